"""A random-weight target and a draft that agrees with it as often as asked, as ordinary Hugging
Face directories.

The target is a Llama. The draft is its first layers with the same embeddings, norm and head; what
the target's later layers add is scaled by `eps`, so eps = 0 would make the two one model and a
larger eps makes them agree less. The head gives every token a few likely successors, and sharp
random attention picks among them by the context, so greedy text branches instead of running into a
short cycle. Speed depends on shapes and on agreement, not on what a text means: such a pair
measures what a trained pair of its size and acceptance would.

`make_pair` writes all of it or nothing: into a directory beside `out`, renamed at the end.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from forerun import __version__
from forerun.bench.recipe import SPECIAL, PairRecipe
from forerun.cli.progress import Tell, nothing
from forerun.errors import ConfigError
from forerun.measure.agreement import Agreement, Judge
from forerun.measure.corpus import excerpts, library_texts
from forerun.utils import atomic_directory

TEXT_A_TOKEN = 732  # characters of text to learn a token from
JUDGED_TOKENS, JUDGED_PROMPTS = (
    128,
    16,
)  # greedy tokens of each prompt that are compared, and of how many prompts
ROUNDS = 10  # pairs tried before the nearest is taken
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair that was written.

    Attributes:
        directory: where `target/`, `draft/`, `prompts.json` and `meta.json` are.
        recipe: what was asked for.
        eps: the scale of the later layers that was taken.
        agreement: what was measured with it.
        parameters: of the target and the draft.
        middle: where there is a model between them, the share of the target's greedy tokens that it
            says, and of its own that the draft says.
    """

    directory: Path
    recipe: PairRecipe
    eps: float
    agreement: Agreement
    parameters: tuple[int, int]
    middle: tuple[float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in meta.json."""
        return {
            "forerun": __version__,
            "recipe": asdict(self.recipe),
            "eps": self.eps,
            "parameters": {"target": self.parameters[0], "draft": self.parameters[1]},
            "measured": asdict(self.agreement),
            "middle": self.middle,
        }


def make_pair(out: Path, recipe: PairRecipe, tell: Tell = nothing) -> Pair:
    """Write a pair into `out`, which must not exist or be empty.

    Args:
        out: the directory to make, its parents too.
        recipe: what to make.
        tell: is told what goes on.

    Raises:
        ConfigError: `out` holds something, or cannot be a directory.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} is there already, and not empty: give another directory, or remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out) as work:
        tell("learning a tokenizer")
        parts = ["target", "draft", *(["middle"] if recipe.middle_layers else [])]
        prompts = _write_tokenizer(recipe, [work / part for part in parts])
        tell("drawing weights")
        base = draw_weights(recipe)
        draft_size = _save(base, recipe, recipe.draft_layers, work / "draft")
        eps, agreement = _settle(base, recipe, work, prompts, tell)
        middle = (
            _middle(scaled(base, recipe, eps), recipe, work, prompts, tell)
            if recipe.middle_layers
            else None
        )
        target_size = sum(tensor.numel() for tensor in base.values())
        pair = Pair(out, recipe, eps, agreement, (target_size, draft_size), middle)
        (work / "prompts.json").write_text(json.dumps({"prompts": prompts}))
        (work / "meta.json").write_text(json.dumps(pair.as_dict(), indent=1))
    return pair


def _settle(
    base: Weights, recipe: PairRecipe, work: Path, prompts: list[list[int]], tell: Tell
) -> tuple[float, Agreement]:
    """Write targets with one eps after another until the agreement is near enough; the eps that
    stays, and what it gave."""
    tokens = min(JUDGED_TOKENS, recipe.context - recipe.prompt_tokens)

    def judge(eps: float) -> Judge:
        _save(scaled(base, recipe, eps), recipe, recipe.layers, work / "target")
        tell(f"letting a target of eps {eps:.4f} write {len(prompts[:JUDGED_PROMPTS])} texts")
        return Judge(work / "target", work / "draft", prompts[:JUDGED_PROMPTS], tokens)

    eps, tried = recipe.eps, {0.0: 1.0}  # without its later layers the target is the draft
    for _ in range(ROUNDS):
        judged = judge(eps)
        tried[eps] = judged.agree
        tell(f"eps {eps:.4f}: the draft says {judged.agree:.1%} of the target's tokens")
        if not recipe.agree or abs(judged.agree - recipe.agree) <= recipe.tolerance:
            return eps, judged.report()
        eps = next_eps(tried, recipe.agree)
    eps = min(tried, key=lambda e: abs(tried[e] - recipe.agree))
    tell(
        f"an agreement of {recipe.agree:.0%} was not reached; the nearest is kept, with eps {eps:.4f}"
    )
    return eps, judge(eps).report()


def _middle(
    target: Weights, recipe: PairRecipe, work: Path, prompts: list[list[int]], tell: Tell
) -> tuple[float, float]:
    """Write the model between the two; how often it agrees with the target, and the draft with
    it."""
    _save(target, recipe, recipe.middle_layers, work / "middle")
    tokens = min(JUDGED_TOKENS, recipe.context - recipe.prompt_tokens)
    tell("letting target and middle model write")
    pairs = ((work / "target", work / "middle"), (work / "middle", work / "draft"))
    over, under = (Judge(*pair, prompts[:JUDGED_PROMPTS], tokens).agree for pair in pairs)
    return over, under


def next_eps(tried: dict[float, float], agree: float) -> float:
    """Where the agreement should be `agree`: on the line between the nearest eps on either side, or
    further out.

    The more eps, the less agreement, but for the chance of which texts come out.
    """
    above = max(eps for eps, share in tried.items() if share > agree)
    below = min(
        (eps for eps, share in tried.items() if share <= agree and eps > above), default=None
    )
    if below is None:
        return above * min(max((1 - agree) / (1 - tried[above] + 1e-9), 1.1), 4.0)
    return above + (below - above) * (tried[above] - agree) / (tried[above] - tried[below])


def draw_weights(recipe: PairRecipe) -> Weights:
    """The target's tensors by their Hugging Face names, bfloat16, the later layers at their full
    strength (eps 1).

    Each matrix is normal with a deviation that keeps activations near 1; the order of drawing is
    part of the recipe."""
    r, generator = recipe, torch.Generator().manual_seed(recipe.seed)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * deviation).bfloat16()

    queries, keys, unit = r.heads * r.head_dim, r.kv_heads * r.head_dim, r.hidden**-0.5
    weights = {"model.embed_tokens.weight": normal(r.vocab, r.hidden, r.emb)}
    for i in range(r.layers):
        at = f"model.layers.{i}."
        weights |= {
            at + "self_attn.q_proj.weight": normal(queries, r.hidden, r.qk * unit),
            at + "self_attn.k_proj.weight": normal(keys, r.hidden, r.qk * unit),
            at + "self_attn.v_proj.weight": normal(keys, r.hidden, unit),
            at + "self_attn.o_proj.weight": normal(r.hidden, queries, 1.5 * r.ctx * queries**-0.5),
            at + "mlp.gate_proj.weight": normal(r.intermediate, r.hidden, 1.5 * unit),
            at + "mlp.up_proj.weight": normal(r.intermediate, r.hidden, unit),
            at + "mlp.down_proj.weight": normal(
                r.hidden, r.intermediate, r.ctx * r.intermediate**-0.5
            ),
            at + "input_layernorm.weight": torch.ones(r.hidden, dtype=torch.bfloat16),
            at + "post_attention_layernorm.weight": torch.ones(r.hidden, dtype=torch.bfloat16),
        }
    weights["model.norm.weight"] = torch.ones(r.hidden, dtype=torch.bfloat16)
    weights["lm_head.weight"] = _head(weights["model.embed_tokens.weight"], recipe, generator)
    return weights


def _head(embeddings: Tensor, recipe: PairRecipe, generator: torch.Generator) -> Tensor:
    """Noise, and for each token a liking for the states that its `nsucc` predecessors make. [V, H]

    Each of `nsucc` random permutations pairs every token with one successor, so all are called for
    equally often."""
    head = torch.randn(recipe.vocab, recipe.hidden, generator=generator)
    directions = torch.nn.functional.normalize(embeddings.float(), dim=1)
    for _ in range(recipe.nsucc):
        head[torch.randperm(recipe.vocab, generator=generator)] += (
            recipe.beta * recipe.hidden**0.5 * directions
        )
    head[: len(SPECIAL)] = 0  # never the likeliest
    logits_scale: float = recipe.temp * recipe.hidden**-0.5
    return (head * logits_scale).bfloat16()


def scaled(base: Weights, recipe: PairRecipe, eps: float) -> Weights:
    """The target of one eps: the outputs of the layers that the draft lacks, times eps."""
    tail = {
        f"model.layers.{i}.{part}.weight"
        for i in range(recipe.draft_layers, recipe.layers)
        for part in ("self_attn.o_proj", "mlp.down_proj")
    }
    return {name: (t.float() * eps).bfloat16() if name in tail else t for name, t in base.items()}


def _save(weights: Weights, recipe: PairRecipe, layers: int, directory: Path) -> int:
    """A model of the first `layers` layers, a directory but for its tokenizer; returns how many
    parameters it has."""
    later = tuple(f"model.layers.{i}." for i in range(layers, recipe.layers))
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(later)}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": recipe.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "intermediate_size": recipe.intermediate,
        "vocab_size": recipe.vocab,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **ends,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(ends))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(
        directory / "config.json", directory / "model.safetensors"
    )  # it comes readable by its owner only
    return sum(tensor.numel() for tensor in weights.values())


def _write_tokenizer(recipe: PairRecipe, directories: list[Path]) -> list[list[int]]:
    """A byte-level BPE of exactly `vocab` tokens into each directory; returns the prompts it
    makes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(TEXT_A_TOKEN * recipe.vocab), trainer)
    missing = recipe.vocab - tokenizer.get_vocab_size()  # the library has only so many words
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(missing)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.context,
        "clean_up_tokenization_spaces": False,
        **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True)),
    }
    for directory in directories:
        directory.mkdir()
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return excerpts(
        lambda text: list(tokenizer.encode(text).ids), recipe.prompts, recipe.prompt_tokens
    )
