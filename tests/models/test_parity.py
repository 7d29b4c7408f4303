"""Parity with transformers for every family and rope scaling, however a text is cut into passes.

Whole prompts, odd chunks and single tokens; draft trees in fragmented pages, beside other requests
and after commits; hidden states between layers; older spellings of config.json; rotary embeddings
that depend on the length; half precision; CUDA."""

from __future__ import annotations

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

from forerun.cache.attention import MAX_BATCHED, Segment
from forerun.errors import LoadError
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder, longest_context
from forerun.models.rope import rope_tables
from forerun.runtime.torch_runner import Runner
from tests import tiny

# keeps the rounding of float32, which two orders of summation differ by, well below the tolerance
GAIN = 0.5
TOLERANCE = 1e-4
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the context the engine prepares for, and how long the text is before anything is
    compared."""

    name: str
    context: int = 256
    prefix: int = 24

    def __str__(self) -> str:
        return f"{self.name}-{self.context}"


# longrope: short factors up to 64 positions, long ones above, where transformers needs a text over
# 64 to agree
CASES = [Case(name) for name in [*tiny.FAMILIES, *tiny.VARIANTS] if name != "phi3-longrope"]
CASES += [Case("phi3-longrope", 64), Case("phi3-longrope", 256, 70)]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@functools.cache
def directory(name: str) -> Path:
    return tiny.family(name, gain=GAIN)


@functools.cache
def reference(name: str) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(
        directory(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@functools.cache
def decoder(
    name: str, context: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    return load_decoder(directory(name), dtype, torch.device(device), context)


def truth(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """transformers' logits after every token of each text; texts are padded on the right, which
    nothing sees."""
    width = max(map(len, texts))
    batch = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    with torch.no_grad():
        logits = model(batch, use_cache=False).logits
    return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]


def text_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(tiny.VOCAB), k=length)


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert (found.cpu().float() - expected.cpu().float()).abs().max().item() <= tolerance


class Session:
    """A runner with small pages, scattered over the pool, scratch rows full of rubbish, and each
    slot's text."""

    def __init__(self, decoder: Decoder, slots: int = 3, seed: int = 0) -> None:
        self.runner = Runner(decoder, tokens=slots * decoder.context, page=4, slots=slots)
        self.runner.cache.data.fill_(40.0)
        random.Random(seed).shuffle(self.runner.cache.pages.free)
        self.texts: list[list[int]] = [[] for _ in range(slots)]

    def segment(
        self, slot: int, tokens: list[int], parents: list[int] | None = None, **options: Any
    ) -> Segment:
        """A segment with room for it, that wants all logits."""
        parents = chain(len(tokens)) if parents is None else parents
        assert self.runner.cache.pages.grow(slot, len(self.texts[slot]) + len(parents))
        return Segment(slot, tokens, parents, list(range(len(tokens))), **options)

    def forward(self, *segments: Segment, aux_hidden_layers: Sequence[int] = ()) -> list[Tensor]:
        """The logits of each segment."""
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
    """Tokens and parents of `count` nodes, some of which hang off the committed prefix itself."""
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
    """A chunk beside another request, and the `checked` nodes of a tree behind it, have the bits of
    passes over single tokens."""
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


def tree_truth(
    model: Any, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> Tensor:
    """What transformers says after each node, run on that node's own text alone."""
    texts = [[*prefix, *(tokens[i] for i in path_to(parents, node))] for node in range(len(tokens))]
    return torch.stack([rows[-1] for rows in truth(model, texts)])


def crooked_path(parents: Sequence[int]) -> list[int]:
    """The longest path that is not simply the first nodes."""
    paths = [path_to(parents, node) for node in range(len(parents))]
    return max((p for p in paths if p != list(range(len(p)))), key=len)


@cases
def test_whole_prompt(case: Case) -> None:
    text = text_of(case.prefix + 20)
    session = Session(decoder(case.name, case.context))
    near(session.read(0, text), truth(reference(case.name), [text])[0])


@cases
def test_chunks_then_single_tokens(case: Case) -> None:
    """Chunks both shorter and longer than what is padded together, read in turns by two slots."""
    texts = [text_of(case.prefix + 30, 1), text_of(case.prefix + 27, 2)]
    session = Session(decoder(case.name, case.context))
    logits: list[list[Tensor]] = [[], []]
    for size in (1, 7, MAX_BATCHED + 3, 5, *[1] * case.prefix, *[1] * 30):
        segments = []
        for slot, text in enumerate(texts):
            at = len(session.texts[slot])
            if text[at : at + size]:
                segments.append(session.segment(slot, text[at : at + size]))
        for segment, rows in zip(
            segments, session.forward(*segments) if segments else [], strict=True
        ):
            session.commit(segment.slot, segment.tokens, range(len(segment.tokens)))
            logits[segment.slot].append(rows)
    for found, expected in zip(logits, truth(reference(case.name), texts), strict=True):
        near(torch.cat(found), expected)


@cases
def test_trees_of_two_slots_beside_a_chunk(case: Case) -> None:
    model, session = reference(case.name), Session(decoder(case.name, case.context))
    prefixes = [
        text_of(case.prefix, 3),
        text_of(case.prefix + 5, 4),
        text_of(MAX_BATCHED + 6 + case.prefix, 5),
    ]
    for slot in (0, 1):
        session.read(slot, prefixes[slot][:9])
    for slot in (0, 1):
        session.read(slot, prefixes[slot][9:])
    session.read(2, prefixes[2][: case.prefix])
    trees = [grown_tree(11, 6), grown_tree(6, 7)]
    segments = [session.segment(slot, *tree) for slot, tree in enumerate(trees)]
    found = session.forward(*segments, session.segment(2, prefixes[2][case.prefix :]))
    for slot, (tokens, parents) in enumerate(trees):
        near(found[slot], tree_truth(model, prefixes[slot], tokens, parents))
    near(found[2], truth(model, [prefixes[2]])[0][case.prefix :])


@cases
def test_commit_of_a_path_then_further_steps(case: Case) -> None:
    """Two trees one after the other in each of two slots; what a commit keeps must read like plain
    text."""
    model, session = reference(case.name), Session(decoder(case.name, case.context))
    for slot in (0, 1):
        session.read(slot, text_of(case.prefix - slot, 12 + slot))
    for turn in (0, 1):
        trees = [grown_tree(8, 20 + 2 * turn), grown_tree(12, 21 + 2 * turn)]
        found = session.forward(*(session.segment(slot, *tree) for slot, tree in enumerate(trees)))
        for slot, (tokens, parents) in enumerate(trees):
            near(found[slot], tree_truth(model, session.texts[slot], tokens, parents))
            session.commit(slot, tokens, crooked_path(parents))
    for token in text_of(3, 30):
        for slot in (0, 1):
            found = session.read(slot, [token])
            near(found, truth(model, [session.texts[slot]])[0][-1:])


@cases
def test_features_are_the_hidden_states_between_layers(case: Case) -> None:
    """transformers norms its last hidden state, so that one is caught on its way into the norm."""
    model, text = reference(case.name), text_of(case.prefix + 4, 15)
    norm, caught = model.transformer.ln_f if case.name == "gpt2" else model.model.norm, []
    hook = norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        states = model(
            torch.tensor([text]), output_hidden_states=True, use_cache=False
        ).hidden_states
    hook.remove()
    layers = len(states) - 1
    session = Session(decoder(case.name, case.context))
    features = session.runner.forward([session.segment(0, text)], range(layers + 1)).features
    assert list(features) == list(range(layers + 1))
    for boundary in range(layers):
        near(features[boundary], states[boundary][0])
    near(features[layers], caught[0][0])
    some = session.runner.forward([session.segment(0, text)], [1]).features
    assert list(some) == [1]


@pytest.mark.parametrize("cut", [[60], [33, 20, 7], [1] * 60], ids=str)
def test_dynamic_rope_is_that_of_single_steps(cut: list[int], tmp_path: Path) -> None:
    """Past max_position_embeddings, whatever the chunks, position t turns as a text of t + 1 tokens
    does."""
    model = tiny.hf_model("llama-dynamic", gain=GAIN, max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    text, cache, expected = text_of(60, 16), hf.DynamicCache(config=model.config), []
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
    near(torch.cat(found), torch.cat(expected))


def old_llama(raw: dict[str, Any]) -> None:
    """rope_theta at the top, the scaling beside it, its kind called `type`."""
    parameters = raw.pop("rope_parameters")
    raw["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    if "partial_rotary_factor" in parameters:
        raw["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}


def old_phi3(raw: dict[str, Any], kind: str = "longrope") -> None:
    """The original length stands at the top; the first releases called longrope `su`."""
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


def respelled(name: str, change: Any, target: Path) -> Path:
    """A copy of the model with another config.json."""
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
def test_older_spelling_of_the_configuration(name: str, change: Any, tmp_path: Path) -> None:
    new, old = load_config(directory(name)), load_config(respelled(name, change, tmp_path))
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
def test_an_absent_key_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    """Or is refused, but never read as something else; keys without which transformers itself fails
    say nothing."""
    text, wrong = text_of(40, 19), []
    raw = json.loads((directory(name) / "config.json").read_text())
    for key in (key for key in OPTIONAL if key in raw):
        target = respelled(name, lambda raw, key=key: raw.pop(key), tmp_path / key)
        try:
            found = Session(load_decoder(target, torch.float32, CPU, 256)).read(0, text)
            model = hf.AutoModelForCausalLM.from_pretrained(
                target, dtype=torch.float32, attn_implementation="eager"
            )
        except (LoadError, RuntimeError, ValueError):
            continue
        if (found - truth(model.eval(), [text])[0]).abs().max() > TOLERANCE:
            wrong.append(key)
    assert not wrong


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str) -> None:
    text = text_of(40, 18)
    half = hf.AutoModelForCausalLM.from_pretrained(
        directory(name), dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    exact = truth(reference(name), [text])[0]
    error = (truth(half, [text])[0].float() - exact).abs().mean()
    mine = decoder(name, 256, torch.bfloat16)
    logits = Session(mine).read(0, text)
    assert logits.dtype is torch.float32
    assert mine.weights.layers[0].qkv.weight.dtype is torch.bfloat16
    assert mine.weights.norm.weight.dtype is torch.float32
    assert (logits - exact).abs().mean() <= 1.3 * error
    assert error < 0.2 * exact.std()


@pytest.mark.cuda
@cases
def test_parity_on_cuda(case: Case) -> None:
    """Prefill, trees of two slots and a crooked commit; only the order of summation differs from
    the CPU's."""
    model, session = reference(case.name), Session(decoder(case.name, case.context, device="cuda"))
    prefixes = [text_of(case.prefix, 3), text_of(case.prefix + 5, 4)]
    for slot, prefix in enumerate(prefixes):
        near(session.read(slot, prefix), truth(model, [prefix])[0])
    trees = [grown_tree(11, 6), grown_tree(6, 7)]
    found = session.forward(*(session.segment(slot, *tree) for slot, tree in enumerate(trees)))
    for slot, (tokens, parents) in enumerate(trees):
        near(found[slot], tree_truth(model, prefixes[slot], tokens, parents))
        session.commit(slot, tokens, crooked_path(parents))
    for slot in (0, 1):
        near(session.read(slot, [5]), truth(model, [session.texts[slot]])[0][-1:])
