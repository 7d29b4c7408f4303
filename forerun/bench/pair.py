"""A random-weight target and draft model with a chosen agreement, as Hugging Face directories.

The target is a Llama. The draft model is its first layers with the same embeddings, norm and head;
the outputs of the target's later layers are scaled by `eps`, so eps = 0 would make the two models
equal and a larger eps makes them agree less. The head gives every token a few likely successors,
and sharp random attention picks among them by the context, so greedy text branches instead of
entering a short cycle. Speed depends on shapes and agreement, not on what a text means: such a pair
runs as fast as a trained pair of its size and acceptance.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from forerun import __version__
from forerun.bench.recipe import SPECIAL, PairRecipe
from forerun.bench.shapes import hugging_face_config
from forerun.cache.attention import Segment
from forerun.cli.progress import Tell, nothing
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.load import make_runner, pick_device
from forerun.measure.workloads import excerpts, library_texts
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.utils import atomic_directory

CHARACTERS_PER_TOKEN = 732  # of text to train the tokenizer on, per token of its vocabulary
COMPARED_TOKENS, COMPARED_PROMPTS = 128, 16  # greedy tokens of each prompt that are compared
MAX_ATTEMPTS = 10  # values of eps that are tried before the nearest is taken
DEPTHS = (1, 2, 3, 4, 5, 7)
OVERLAP_TEXTS = 4  # texts whose distributions are compared
TAIL, MAX_PERIOD = 100, 50  # a text loops if its last tokens repeat with a period up to this
END_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of target and draft model on greedy texts of the target.

    Attributes:
        agree: share of positions where the draft model's most likely token is the target's.
        overlap: mean of the sum over tokens of min(p, q): acceptance of rejection sampling at
            temperature 1.
        accepted: {depth: mean accepted tokens of a chain of that depth}.
        top: mean probability of the target's most likely token.
        looping: number of texts that end in a loop, which flatters drafters that copy.
    """

    agree: float
    overlap: float
    accepted: dict[int, float]
    top: float
    looping: int
    texts: int
    positions: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair that was written.

    Attributes:
        directory: contains the models, `prompts.json` and `meta.json`.
        recipe: the requested parameters.
        agreement: as measured.
        measured_layers: number of layers of the target with which it was measured.
        parameters: numbers of parameters of target and draft model.
        active: how many of them a token's forward pass reads.
        target, draft: names of the models in the directory.
        eps: the scale of the later layers that was chosen, if the draft model lacks these.
        middle: with a middle model: its agreement with the target, and the draft model's with it.
    """

    directory: Path
    recipe: PairRecipe
    agreement: Agreement
    measured_layers: int
    parameters: tuple[int, int]
    active: tuple[int, int]
    target: str = "target"
    draft: str = "draft"
    eps: float | None = None
    middle: tuple[float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as in meta.json."""
        return {
            "forerun": __version__,
            "recipe": asdict(self.recipe),
            "eps": self.eps,
            "parameters": {"target": self.parameters[0], "draft": self.parameters[1]},
            "active_parameters": {"target": self.active[0], "draft": self.active[1]},
            "measured": asdict(self.agreement),
            "measured_layers": self.measured_layers,
            "middle": self.middle,
        }


def make_pair(out: Path, recipe: PairRecipe, tell: Tell = nothing) -> Pair:
    """Write a pair into `out` completely or not at all.

    Raises ConfigError unless `out` is an empty directory or does not exist. Recipes that are
    packed belong to `packed_pair`.
    """
    with new_directory(out) as work:
        tell("training a tokenizer")
        tokenizer = train_tokenizer(recipe.vocab)
        for part in ("target", "draft", *(["middle"] if recipe.middle_layers else [])):
            (work / part).mkdir()
            save_tokenizer(tokenizer, work / part, recipe.context)
        prompts = cut_prompts(tokenizer, recipe)
        tell("drawing weights")
        base = draw_weights(recipe)
        draft_size = _save(base, recipe, recipe.draft_layers, work / "draft")
        compared = prompts[:COMPARED_PROMPTS]
        eps, agreement = _search_eps(base, recipe, work, compared, tell)
        middle = None
        if recipe.middle_layers:
            _save(scaled(base, recipe, eps), recipe, recipe.middle_layers, work / "middle")
            tell("comparing target and middle model")
            tokens = compared_tokens(recipe)
            middle = (
                PairComparison(work / "target", work / "middle", compared, tokens).agree,
                PairComparison(work / "middle", work / "draft", compared, tokens).agree,
            )
        target_size = sum(tensor.numel() for tensor in base.values())
        embeddings = base["model.embed_tokens.weight"].numel()
        pair = Pair(
            directory=out,
            recipe=recipe,
            agreement=agreement,
            measured_layers=recipe.layers,
            parameters=(target_size, draft_size),
            active=(target_size - embeddings, draft_size - embeddings),
            eps=eps,
            middle=middle,
        )
        write_description(work, pair, prompts)
    return pair


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out` at the end.

    Raises ConfigError unless `out` is an empty directory or does not exist.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: give another directory, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out) as work:
        yield work


def write_description(work: Path, pair: Pair, prompts: list[list[int]]) -> None:
    """Write `prompts.json` and `meta.json`."""
    (work / "prompts.json").write_text(json.dumps({"prompts": prompts}))
    (work / "meta.json").write_text(json.dumps(pair.as_dict(), indent=1))


def compared_tokens(recipe: PairRecipe, most: int = COMPARED_TOKENS) -> int:
    """Return how many tokens of each text are compared: as many as the context has room for."""
    return min(most, recipe.context - recipe.prompt_tokens)


def _search_eps(
    base: Weights, recipe: PairRecipe, work: Path, prompts: list[list[int]], tell: Tell
) -> tuple[float, Agreement]:
    """Write targets with different eps until the agreement is close enough.

    Returns the eps of the target that was kept, and its agreement.
    """

    def compare(eps: float) -> PairComparison:
        _save(scaled(base, recipe, eps), recipe, recipe.layers, work / "target")
        tell(f"generating {len(prompts)} texts with eps {eps:.4f}")
        tokens = compared_tokens(recipe)
        return PairComparison(work / "target", work / "draft", prompts, tokens)

    eps = recipe.eps
    tried = {0.0: 1.0}  # without its later layers the target is the draft model
    for _ in range(MAX_ATTEMPTS):
        comparison = compare(eps)
        tried[eps] = comparison.agree
        tell(f"eps {eps:.4f}: the draft model agrees with {comparison.agree:.1%} of the tokens")
        if not recipe.agree or abs(comparison.agree - recipe.agree) <= recipe.tolerance:
            return eps, comparison.report()
        eps = next_eps(tried, recipe.agree)
    eps = min(tried, key=lambda e: abs(tried[e] - recipe.agree))
    tell(f"an agreement of {recipe.agree:.0%} was not reached; the nearest has eps {eps:.4f}")
    return eps, compare(eps).report()


def next_eps(tried: dict[float, float], agree: float) -> float:
    """Return the eps to try next, given {eps: agreement} of those tried.

    Interpolates between the nearest on either side of `agree`, or extrapolates. Agreement decreases
    with eps except for noise.
    """
    above = max(eps for eps, share in tried.items() if share > agree)
    candidates = (eps for eps, share in tried.items() if share <= agree and eps > above)
    below = min(candidates, default=None)
    if below is None:
        return above * min(max((1 - agree) / (1 - tried[above] + 1e-9), 1.1), 4.0)
    return above + (below - above) * (tried[above] - agree) / (tried[above] - tried[below])


class PairComparison:
    """Greedy texts of a target, and the positions where a draft model predicts the same token.

    Runs with torch kernels (float32 on a CPU) unless models are quantized, since most of the work
    is reading whole texts.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        prompts: Sequence[list[int]],
        tokens: int,
        is_packed: bool = False,
    ) -> None:
        """Generate a continuation of each prompt; all prompts have one length.

        is_packed: compute with the weights as they are stored, if there are kernels for them.
        """
        self.device = pick_device("auto")
        self.start = len(prompts[0]) - 1  # the position that predicts the first output token
        options: dict[str, Any] = {}
        if not is_packed:
            options["kernels"] = "torch"
            options["dtype"] = "float32" if self.device.type == "cpu" else "auto"
        self.llm = LLM(
            target,
            draft="off",
            context=len(prompts[0]) + tokens,
            max_rows=len(prompts),
            **options,
        )
        params = SamplingParams.pure(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        completions = self.llm.generate(prompts, params)
        self.texts = [[*c.prompt_token_ids, *c.token_ids] for c in completions]
        self.compare(draft)

    def compare(self, draft: Path) -> None:
        """Find the positions where this draft model predicts the target's token."""
        self.drafter = make_runner(replace(self.llm.config, max_rows=1), draft, self.device)
        outputs = torch.tensor(self.texts)[:, self.start + 1 :]
        drafted = [self._logits(self.drafter, text).argmax(-1) for text in self.texts]
        self.same = torch.stack(drafted) == outputs  # bool [texts, tokens]

    @property
    def agree(self) -> float:
        """Share of positions where the draft model's most likely token is the target's."""
        return _mean(self.same)

    def report(self) -> Agreement:
        """Measure everything; `overlap` and `top` use the first few texts only."""
        overlap = []
        top = []
        for text in self.texts[:OVERLAP_TEXTS]:
            p = self._logits(self.llm.engine.target, text).softmax(-1)
            q = self._logits(self.drafter, text).softmax(-1)
            overlap.append(torch.minimum(p, q).sum(-1))
            top.append(p.amax(-1))
        return Agreement(
            agree=self.agree,
            overlap=_mean(torch.stack(overlap)),
            accepted={
                depth: accepted_tokens(self.same, depth)
                for depth in DEPTHS
                if depth <= self.same.shape[1]
            },
            top=_mean(torch.stack(top)),
            looping=sum(is_looping(text) for text in self.texts),
            texts=len(self.texts),
            positions=self.same.numel(),
        )

    def _logits(self, runner: Runner, text: Sequence[int]) -> Tensor:
        """Return the logits that predict each output token. [tokens, V] on the CPU"""
        length = len(text) - 1
        slot = 0
        runner.cache.pages.grow(slot, length)
        segment = Segment.chain(slot, list(text[:-1]), range(self.start, length))
        logits = runner.forward([segment]).logits.cpu()
        runner.cache.close(slot)
        return logits


def accepted_tokens(same: Tensor, depth: int) -> float:
    """Return the mean accepted tokens of chains of `depth`. same: bool [texts, tokens]"""
    return _mean(same.float().unfold(1, depth, 1).cumprod(-1).sum(-1))


def is_looping(text: Sequence[int]) -> bool:
    """Return True if the last tokens repeat with a short period."""
    tail = list(text[-TAIL:])
    longest = min(MAX_PERIOD, len(tail) // 2)
    return any(tail[n:] == tail[:-n] for n in range(1, longest + 1))


def _mean(values: Tensor) -> float:
    return round(values.double().mean().item(), 4)


def draw_weights(recipe: PairRecipe) -> Weights:
    """Return the target's tensors (bfloat16) by their Hugging Face names, for eps = 1.

    Each matrix is normal with a deviation that keeps activations near 1. The order of the draws is
    part of the recipe.
    """
    r = recipe
    generator = torch.Generator().manual_seed(recipe.seed)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * deviation).bfloat16()

    queries = r.heads * r.head_dim
    keys = r.kv_heads * r.head_dim
    unit = r.hidden**-0.5
    ones = torch.ones(r.hidden, dtype=torch.bfloat16)
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
            at + "input_layernorm.weight": ones.clone(),
            at + "post_attention_layernorm.weight": ones.clone(),
        }
    weights["model.norm.weight"] = ones
    weights["lm_head.weight"] = _head(weights["model.embed_tokens.weight"], recipe, generator)
    return weights


def _head(embeddings: Tensor, recipe: PairRecipe, generator: torch.Generator) -> Tensor:
    """Return the output head. [V, H]

    It is noise plus, for each token, the embeddings of `nsucc` predecessors. Random permutations
    pair every token with its successors, so all tokens are equally frequent.
    """
    head = torch.randn(recipe.vocab, recipe.hidden, generator=generator)
    directions = torch.nn.functional.normalize(embeddings.float(), dim=1)
    for _ in range(recipe.nsucc):
        head[torch.randperm(recipe.vocab, generator=generator)] += (
            recipe.beta * recipe.hidden**0.5 * directions
        )
    head[: len(SPECIAL)] = 0  # never the most likely
    logits_scale: float = recipe.temp * recipe.hidden**-0.5
    return (head * logits_scale).bfloat16()


def scaled(base: Weights, recipe: PairRecipe, eps: float) -> Weights:
    """Return the target with the outputs of layers that the draft lacks scaled by eps."""
    tail = {
        f"model.layers.{i}.{part}.weight"
        for i in range(recipe.draft_layers, recipe.layers)
        for part in ("self_attn.o_proj", "mlp.down_proj")
    }
    return {name: (t.float() * eps).bfloat16() if name in tail else t for name, t in base.items()}


def _save(weights: Weights, recipe: PairRecipe, layers: int, directory: Path) -> int:
    """Write the first `layers` layers as a model without tokenizer; return its parameters."""
    later = tuple(f"model.layers.{i}." for i in range(layers, recipe.layers))
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(later)}
    config = hugging_face_config(recipe) | {"num_hidden_layers": layers, **END_IDS}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(END_IDS))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors files are created readable only by their owner
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    return sum(tensor.numel() for tensor in weights.values())


def train_tokenizer(vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `vocab` tokens, of which the first are SPECIAL."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(CHARACTERS_PER_TOKEN * vocab), trainer)
    missing = vocab - tokenizer.get_vocab_size()  # if the text has too few words
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(missing)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write a tokenizer beside a model."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True)),
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def cut_prompts(tokenizer: Tokenizer, recipe: PairRecipe) -> list[list[int]]:
    """Return prompts from the sources of the standard library."""
    return excerpts(
        lambda text: list(tokenizer.encode(text).ids), recipe.prompts, recipe.prompt_tokens
    )
