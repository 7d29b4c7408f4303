"""Parity with transformers of hidden states between layers, older formats of config.json, dynamic
rotary embeddings and half precision; helpers of test_families.py to compare logits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from forerun.cache.attention import Segment
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder, longest_context
from forerun.models.rope import rope_tables
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import families, tiny

# keeps the rounding of float32, which two orders of summation differ by, well below the tolerance
GAIN = 0.5
TOLERANCE = 1e-4
CPU = torch.device("cpu")
KERNELS = ["torch"] if native.library() is None else ["torch", "native"]
RECURRENT = [name for name in families.MODELS if name.startswith(families.RECURRENT)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the context that its tables are built for, and the number of tokens before the first
    compared one."""

    name: str
    context: int = 256
    prefix: int = 24

    def __str__(self) -> str:
        return f"{self.name}-{self.context}"


# longrope has short factors up to 64 positions and long ones above; transformers chooses by the
# length of the text
SIMPLE = [Case(name) for name in [*tiny.FAMILIES, *tiny.VARIANTS] if name != "phi3-longrope"]
SIMPLE += [Case("phi3-longrope", 64), Case("phi3-longrope", 256, 70)]
simple_cases = pytest.mark.parametrize("case", SIMPLE, ids=str)


@functools.cache
def directory(name: str) -> Path:
    # Norms of small outputs amplify rounding: with larger weights, transformers' float32 logits of
    # recurrent models have an error of 5e-4.
    has_large_weights = name in families.MODELS and name not in RECURRENT
    return tiny.family(name, gain=1.0 if has_large_weights else GAIN)


@functools.cache
def reference(name: str) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(
        directory(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def load(path: Path, kernels: str, context: int = 256) -> Decoder | NativeDecoder:
    """A decoder in float32; `kernels` are "torch", "native" or "cuda"."""
    if kernels != "native":
        device = torch.device("cpu" if kernels == "torch" else kernels)
        return load_decoder(path, torch.float32, device, context)
    native.start(2)
    return NativeDecoder(load_config(path), path, "float32", context)


@functools.cache
def decoder(name: str, kernels: str = "torch", context: int = 256) -> Any:
    return load(directory(name), kernels, context)


def logits_of(name: str, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return transformers' logits after every token of each text.

    Recurrent models read token by token, since their code for several tokens rounds differently;
    common prefixes of texts are read once."""
    if name not in RECURRENT:
        return reference_logits(reference(name), texts)
    rows: dict[tuple[int, ...], Tensor] = {}

    def read(cache: Any, at: int, following: list[tuple[int, ...]]) -> None:
        """Read on after the first `at` tokens, which `following` share and `cache` contains."""
        for token in sorted({text[at] for text in following if len(text) > at}):
            branch = [text for text in following if len(text) > at and text[at] == token]
            own = copy.deepcopy(cache)
            with torch.no_grad():
                out = reference(name)(torch.tensor([[token]]), cache=own, use_cache=True)
            rows[branch[0][: at + 1]] = out.logits[0]
            read(own, at + 1, branch)

    config = reference(name).config
    empty = MiniMaxCache() if name == "minimax_text" else hf.DynamicCache(config=config)
    read(empty, 0, [tuple(text) for text in texts])
    return [torch.cat([rows[tuple(text[: end + 1])] for end in range(len(text))]) for text in texts]


def reference_logits(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return transformers' logits after every token of each text; the padding on the right has no
    effect."""
    width = max(map(len, texts))
    batch = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    with torch.no_grad():
        logits = model(batch, use_cache=False).logits
    return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]


def text_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(tiny.VOCAB), k=length)


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert (found.cpu().float() - expected.cpu().float()).abs().max().item() <= tolerance


class Session:
    """A runner with small pages in random order and arbitrary values in unused rows, and the text
    of each slot."""

    def __init__(self, decoder: Decoder, slots: int = 3, seed: int = 0) -> None:
        self.runner = Runner(decoder, tokens=slots * decoder.context, page=4, slots=slots)
        self.runner.cache.data.fill_(40.0)
        random.Random(seed).shuffle(self.runner.cache.pages.free)
        self.texts: list[list[int]] = [[] for _ in range(slots)]

    def segment(
        self, slot: int, tokens: list[int], parents: list[int] | None = None, **options: Any
    ) -> Segment:
        """Reserve pages and return a segment that requests all logits."""
        parents = chain(len(tokens)) if parents is None else parents
        assert self.runner.cache.pages.grow(slot, len(self.texts[slot]) + len(parents))
        return Segment(slot, tokens, parents, list(range(len(tokens))), **options)

    def forward(self, *segments: Segment, aux_hidden_layers: Sequence[int] = ()) -> list[Tensor]:
        """Return the logits of each segment."""
        logits = self.runner.forward(segments, aux_hidden_layers).logits
        return list(logits.split([len(s.want) for s in segments]))

    def commit(self, slot: int, tokens: Sequence[int], path: Sequence[int]) -> None:
        self.runner.cache.commit(slot, path)
        self.texts[slot] += [tokens[i] for i in path]

    def read(self, slot: int, tokens: list[int]) -> Tensor:
        """Read known tokens and commit them."""
        (logits,) = self.forward(self.segment(slot, tokens))
        self.commit(slot, tokens, range(len(tokens)))
        return logits


def grown_tree(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents of `count` nodes; some are children of the committed prefix."""
    chance = random.Random(seed)
    parents = [chance.randint(max(-1, i - 4), i - 1) for i in range(count)]
    return text_of(count, seed), parents


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def check_bits_of_single_tokens(
    model: Any, text: list[int], other: list[int], nodes: int, checked: Sequence[int]
) -> None:
    """Assert that a chunk beside another request, and the `checked` nodes of a tree after it, have
    the bits of single-token passes."""
    single, chunked = Session(model), Session(model)
    rows = torch.cat([single.read(0, [token]).clone() for token in text])
    tokens, parents = grown_tree(nodes, 8)
    first, _ = chunked.forward(chunked.segment(0, text), chunked.segment(1, other))
    assert torch.equal(first, rows)
    chunked.commit(0, text, range(len(text)))
    (tree,) = chunked.forward(chunked.segment(0, tokens, parents))
    for node in checked:
        again = Session(model)
        again.read(0, text)
        for i in path_to(parents, node):
            alone = again.read(0, [tokens[i]])
        assert torch.equal(tree[node], alone[0])


def reordered_path(parents: Sequence[int]) -> list[int]:
    """Return the longest path whose nodes are not simply 0, 1, 2, .."""
    paths = [path_to(parents, node) for node in range(len(parents))]
    return max((p for p in paths if p != list(range(len(p)))), key=len)


@simple_cases
def test_features_are_the_hidden_states_between_layers(case: Case) -> None:
    """transformers normalises its last hidden state, so a hook captures the input of the norm."""
    model = reference(case.name)
    text = text_of(case.prefix + 4, 15)
    norm, caught = model.transformer.ln_f if case.name == "gpt2" else model.model.norm, []
    hook = norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        states = model(
            torch.tensor([text]), output_hidden_states=True, use_cache=False
        ).hidden_states
    hook.remove()
    layers = len(states) - 1
    session = Session(decoder(case.name, "torch", case.context))
    features = session.runner.forward([session.segment(0, text)], range(layers + 1)).features
    assert list(features) == list(range(layers + 1))
    for layer in range(layers):
        assert_near(features[layer], states[layer][0])
    assert_near(features[layers], caught[0][0])
    some = session.runner.forward([session.segment(0, text)], [1]).features
    assert list(some) == [1]


@pytest.mark.parametrize("cut", [[60], [33, 20, 7], [1] * 60], ids=str)
def test_dynamic_rope_does_not_depend_on_chunks(cut: list[int], tmp_path: Path) -> None:
    """Beyond max_position_embeddings, position t rotates as in a text of t + 1 tokens."""
    model = tiny.hf_model("llama-dynamic", gain=GAIN, max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    text = text_of(60, 16)
    cache = hf.DynamicCache(config=model.config)
    expected = []
    with torch.no_grad():
        for token in text:
            expected.append(
                model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0]
            )
    assert longest_context(load_config(tmp_path)) == 64
    session, found = Session(load_decoder(tmp_path, torch.float32, CPU, 64)), []
    for size in cut:
        at = len(session.texts[0])
        found.append(session.read(0, text[at : at + size]))
    assert_near(torch.cat(found), torch.cat(expected))


def old_llama(raw: dict[str, Any]) -> None:
    """Move rope_theta to the top level and call the type of the scaling `type`."""
    parameters = raw.pop("rope_parameters")
    raw["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    if "partial_rotary_factor" in parameters:
        raw["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}


def old_phi3(raw: dict[str, Any], kind: str = "longrope") -> None:
    """Leave the original length at the top level; the first releases called longrope `su`."""
    old_llama(raw)
    raw["rope_scaling"].pop("original_max_position_embeddings", None)
    raw["rope_scaling"]["type"] = kind


def oldest_phi3(raw: dict[str, Any]) -> None:
    old_phi3(raw, "su")


def old_gemma3(raw: dict[str, Any]) -> None:
    ropes = raw.pop("rope_parameters")
    raw["rope_theta"] = ropes["full_attention"]["rope_theta"]
    raw["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    scaled = ropes["full_attention"]["rope_type"] != "default"
    raw["rope_scaling"] = (
        {"rope_type": "linear", "factor": ropes["full_attention"]["factor"]} if scaled else None
    )
    del raw["layer_types"]
    raw["sliding_window_pattern"] = 4


def old_layers(raw: dict[str, Any]) -> None:
    raw.pop("layer_types", None)
    raw.pop("no_rope_layers", None)
    if raw["rope_parameters"]:
        old_llama(raw)


def with_config(name: str, change: Any, target: Path) -> Path:
    """Copy the model with a changed config.json."""
    shutil.copytree(directory(name), target, dirs_exist_ok=True)
    raw = json.loads((target / "config.json").read_text())
    change(raw)
    (target / "config.json").write_text(json.dumps(raw))
    return target


OLD: dict[str, Any] = {
    name: old_llama
    for name in [*tiny.VARIANTS, "llama", "mistral"]
    if name.startswith(("llama", "mistral"))
}
OLD |= {
    "phi3": old_llama,
    "phi3-longrope": old_phi3,
    "gemma3": old_gemma3,
    "gemma3-scaled": old_gemma3,
}
OLD |= {"qwen2": old_layers, "qwen3": old_layers, "smollm3": old_layers, "gemma2": old_layers}


OLD_CASES = [*OLD.items(), ("phi3-longrope", oldest_phi3)]
old_cases = pytest.mark.parametrize(
    "name, change", OLD_CASES, ids=[f"{n}-{c.__name__}" for n, c in OLD_CASES]
)


@old_cases
def test_older_configuration_formats_are_equivalent(name: str, change: Any, tmp_path: Path) -> None:
    new = load_config(directory(name))
    old = load_config(with_config(name, change, tmp_path))
    plain: dict[str, Any] = dict(raw={}, ropes=())
    assert dataclasses.replace(old, **plain) == dataclasses.replace(new, **plain)
    assert len(old.ropes) == len(new.ropes)
    for i, context in itertools.product(range(len(new.ropes)), (64, 256)):
        before = rope_tables(old, old.ropes[i], context, torch.float64)
        after = rope_tables(new, new.ropes[i], context, torch.float64)
        assert all(map(torch.equal, before, after))


OPTIONAL = [
    "rope_parameters",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "activation_function",
    "num_key_value_heads",
    "no_rope_layers",
    "no_rope_layer_interval",
    "sliding_window",
    "tie_word_embeddings",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "max_window_layers",
    "n_inner",
]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    """Otherwise they are refused. Keys without which transformers itself fails are skipped."""
    text, wrong = text_of(40, 19), []
    raw = json.loads((directory(name) / "config.json").read_text())
    for key in (key for key in OPTIONAL if key in raw):
        target = with_config(name, lambda raw, key=key: raw.pop(key), tmp_path / key)
        try:
            found = Session(load_decoder(target, torch.float32, CPU, 256)).read(0, text)
            model = hf.AutoModelForCausalLM.from_pretrained(
                target, dtype=torch.float32, attn_implementation="eager"
            )
        except (LoadError, RuntimeError, ValueError):
            continue
        if (found - reference_logits(model.eval(), [text])[0]).abs().max() > TOLERANCE:
            wrong.append(key)
    assert not wrong


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str) -> None:
    text = text_of(40, 18)
    half = hf.AutoModelForCausalLM.from_pretrained(
        directory(name), dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    exact = reference_logits(reference(name), [text])[0]
    error = (reference_logits(half, [text])[0].float() - exact).abs().mean()
    ours = load_decoder(directory(name), torch.bfloat16, CPU, 256)
    logits = Session(ours).read(0, text)
    assert logits.dtype is torch.float32
    assert ours.weights.layers[0].qkv.weight.dtype is torch.bfloat16
    assert ours.weights.norm.weight.dtype is torch.float32
    assert (logits - exact).abs().mean() <= 1.3 * error
    assert error < 0.2 * exact.std()
