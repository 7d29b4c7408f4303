"""EAGLE-style heads, beyond what every head must do: cache sharing, alignment, when there is no
draft, native precision, P-EAGLE's masks, and the multi-token layer of a target's own checkpoint.

A head that reads the states of the wrong position or layer still drafts, only worse, so one that
knows a text must be right about all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams, rng
from forerun.cache.attention import Segment
from forerun.devices import as_tensor
from forerun.draft.eagle import proposer as eagle
from forerun.draft.eagle.module import Eagle3Head
from forerun.draft.eagle.own_module import load_any_module
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.proposer import DraftRequest, TargetView, view_of
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.rope import rope_tables
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.types import BESIDE, Draft
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import ROOM, head_of
from tests.draft.twins import EagleTwin, target
from tests.draft.watching import (
    ACCEPTANCE,
    Watch,
    chain_of,
    engine_of,
    native_view,
    same_as_twin,
    show,
)
from tests.engine import build

compiled = pytest.mark.skipif(native.library() is None, reason="the native kernels are missing")


def test_a_pair_is_shared_only_with_texts_that_have_its_second_token_too() -> None:
    """The last pair of a page has a token of the next page."""
    head, tokens = tiny.eagle(tiny.eagle_config("llama")).double(), tuple(range(5, 25))
    drafter = EagleProposer("eagle3", head, target(), **ROOM)
    show(drafter, 0, tokens)
    drafter.propose([DraftRequest(0, tokens, SamplingParams(), Noise(1, 2), 3)])
    drafter.close(0)
    for changed, shared in ((18, 16), (17, 16), (16, 12), (15, 12), (12, 8), (11, 8)):
        drafter.open(0, [*tokens[:changed], 63, *tokens[changed + 1 :]])
        assert drafter.cache.length[0] == shared
        drafter.close(0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("form", [None, pytest.param("float32", marks=compiled)])
def test_the_embedding_is_what_enters_the_target_s_first_layer(
    family: str, form: str | None
) -> None:
    """Scaled where the target scales it, without learned positions."""
    directory = tiny.family(family)
    decoder: Any = tiny.decoder(directory)
    if form:
        native.start(2)
        decoder = NativeDecoder(load_config(directory), directory, form, 256)
    runner = Runner(decoder, tokens=16, page=16, slots=1)
    runner.cache.pages.grow(0, 3)
    found = runner.forward([Segment(0, [5, 6, 7], [-1, 0, 1], [])], (0,)).features[0]
    entering = as_tensor(found).double()
    if decoder.weights.positions is not None:
        entering = entering - decoder.weights.positions[:3]
    embedded = view_of(decoder).embed(torch.tensor([5, 6, 7]))
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded.double(), entering, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- alignment


PROMPT, LENGTH, DEPTH = 6, 30, 3
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=1.5, seed=3, ignore_eos=True)


def knowing() -> tuple[Eagle3Head, list[int]]:
    """A head that knows a text, and the text: from every root it predicts what comes next."""
    plain = engine_of("eagle3", tiny.eagle(tiny.eagle_config("llama")))
    request = plain.add(build.prompts()[2][:PROMPT], PARAMS)
    build.finish(plain)
    text = tuple(request.tokens)
    config = tiny.eagle_config(
        "llama", own_embedding=True, layer={"hidden_size": 128}, norm_output=True
    )
    head = tiny.eagle(config).double()
    twin, outputs, wanted = EagleTwin(head), [], []
    for root in range(PROMPT, len(text) - 1):
        path = text[root + 1 : root + DEPTH]
        after = text[root + 1 : root + 1 + DEPTH]
        outputs += twin.outputs(text[: root + 1], path)[-1 - len(path) :][: len(after)]
        wanted += after
    states = twin.norm(torch.stack(outputs), "norm")
    assert len(states) <= 128, "more than a linear head of this width can know"
    answers = torch.nn.functional.one_hot(torch.tensor(wanted), tiny.VOCAB).double()
    head.lm_head.weight.copy_(100 * torch.linalg.lstsq(states, answers).solution.T)
    return head, list(text)


def test_a_head_that_knows_the_text_is_right_about_all_of_it() -> None:
    """The pair of a token and the state before it predicts the next token: off by one it would know
    nothing."""
    head, text = knowing()
    engine = engine_of("eagle3", head)
    again = engine.add(text[:PROMPT], PARAMS, draft="it", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert again.stats.accepted == again.stats.drafted > 15


@pytest.mark.parametrize("width", [1, 3])
def test_nothing_of_a_draft_stays_whether_it_was_accepted_or_not(width: int, watch: Watch) -> None:
    """A head that half knows the text has all, some or none of a draft accepted."""
    head, text = knowing()
    torch.manual_seed(1)
    head.lm_head.weight.add_(torch.randn_like(head.lm_head.weight) * head.lm_head.weight.std())
    engine = engine_of("eagle3", head, width)
    again = engine.add(text[:PROMPT], PARAMS, draft="it", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert {accepted for drafted, accepted in again.stats.rounds if drafted} >= {1, DEPTH}
    assert again.stats.accepted < again.stats.drafted
    same_as_twin(watch, "eagle3", head, every=width)


# ---------------------------------------------------------------- when it cannot draft


def test_without_states_room_or_tokens_there_is_no_draft() -> None:
    head = tiny.eagle(
        tiny.eagle_config("llama", own_embedding=True, draft_vocab=40, layer={"vocab_size": 50})
    ).double()
    drafter = EagleProposer("eagle3", head, target(), tokens=16, page=4, slots=4)

    def drafted(slot: int, tokens: tuple[int, ...], depth: int = 2) -> int:
        row = DraftRequest(slot, tokens, SamplingParams(), Noise(1, len(tokens) - 1), depth)
        return len(drafter.propose([row])[0]) - 1

    assert drafted(0, (5, 6, 7)) == 0, "never opened"
    show(drafter, 0, (5,))
    assert drafted(0, (5,)) == 0, "one token has no pair"
    show(drafter, 0, (5, 6, 7))
    assert drafted(0, (5, 6, 7, 8)) == 0, "the state before the root was not shown"
    assert drafted(0, (5, 6, 7)) == 2
    assert drafted(0, (5, 6, 7), depth=15) == 0, "no room in the pool"
    show(drafter, 1, (5, 60, 7))
    assert drafted(1, (5, 60, 7)) == 0, "token 60 is not in its embedding"
    show(drafter, 2, (5, 6, 7, 8, 9), first=3)
    assert drafted(2, (5, 6, 7, 8, 9)) == 2, "a cached prefix was not shown"
    drafter.reset()
    assert drafted(0, (5, 6, 7)) == 0, "reset drops everything"
    assert drafter.cache.pages.available == drafter.cache.pages.count


# ---------------------------------------------------------------- native kernels


@compiled
@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize(("kind", "shape"), [
    *(("eagle3", shape) for shape in (
        "plain", "norm before residual", "qwen3, other rope", "narrower, some tokens", "window", "joined pairs",
    )),
    ("mtp", "all tokens"), ("eagle", "as published"), ("eagle", "biases and an embedding"),
])  # fmt: skip
def test_the_native_layer_computes_what_is_trained(kind: str, shape: str, form: str) -> None:
    """Outputs of committed pairs, and in float32 whole trees; the trained head is left as it was."""
    native.start(2)
    head, tokens = head_of(kind, shape), (5, 6, 7, 8, 9, 10, 11)
    outputs, trees = [], []
    for view in (target(), replace(target(), form=form)):
        drafter = EagleProposer("x", head, view, **ROOM, width=3)
        show(drafter, 0, tokens)
        draft = drafter.propose([DraftRequest(0, tokens, SamplingParams(), Noise(1, 4), 3)])[0]
        outputs.append(as_tensor(drafter._last[0]))
        trees.append((draft.tokens, draft.parents))
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0 < error < (0.1 if form == "int8" else 1e-4)
    assert trees[0] == trees[1] or form == "int8"
    assert len(trees[0][0]) == 10
    assert any(isinstance(part, torch.nn.Linear) for part in head.modules())


@compiled
@pytest.mark.parametrize(("kind", "shape"), [
    ("eagle3", "plain"), ("eagle3", "reduced vocabulary"), ("eagle3", "joined pairs"), ("mtp", "all tokens"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_confidence_bins_are_those_of_the_probabilities_in_torch(
    kind: str, shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level by level; and beside the chains stand the likeliest other tokens."""
    view, head, params = (
        native_view(),
        head_of(kind, shape),
        SamplingParams(temperature=temperature),
    )
    rows = [
        DraftRequest(
            slot,
            tuple(range(5 + slot, 12 + slot)),
            params,
            Noise(slot, 6),
            depth,
            confidence_rates=ACCEPTANCE,
        )
        for slot, depth in enumerate((6, 3, 7))
    ]
    torch.manual_seed(0)
    states = [{b: torch.randn(6, view.hidden) for b in head.aux_hidden_layers} for _ in rows]

    def proposed() -> list[Draft]:
        drafter = EagleProposer("x", head, view, **ROOM)
        for row, shown in zip(rows, states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, shown)
        return drafter.propose(rows)

    whole = proposed()
    seen: dict[int, list[Tensor]] = {row.slot: [] for row in rows}
    grow = eagle.grow

    def watched(trees: Any, logits: Tensor, width: int, source: str) -> None:
        for tree, own in zip(trees, logits, strict=True):
            seen[tree.request.slot].append(own)
        grow(trees, logits, width, source)

    monkeypatch.setattr(eagle, "grow", watched)
    monkeypatch.setattr(EagleProposer, "draft_natively", lambda *_: False)
    for draft, row, full in zip(proposed(), rows, whole, strict=True):
        chain, expected, above = chain_of(full), [], 1.0
        assert draft.tokens == chain.tokens
        for level, token in enumerate(draft.tokens[1:]):
            chances = chances_of(seen[row.slot][level], row, level)
            own = chances.pop(token, 0.0)
            assert abs(min(own * 16, 15.99) - 0.5 - chain.confidence_bins[level]) <= 0.51 + own / 2
            near = sorted(chances.values(), reverse=True)[:BESIDE] if own else []
            expected += [above * ACCEPTANCE[16 + min(int(chance * 16), 15)] for chance in near]
            above *= ACCEPTANCE[chain.confidence_bins[level]]
        found = zip(full.path_probs, full.confidence_bins, strict=True)
        beside = [chance for chance, sure in found if sure >= 16]
        assert beside == pytest.approx(sorted(expected, reverse=True)[:BESIDE], rel=0.15)


def chances_of(logits: Tensor, row: DraftRequest, level: int) -> dict[int, float]:
    """The probabilities that the eight likeliest tokens are drawn, given the target's noise."""
    temperature = 1.0 if row.params.greedy else row.params.temperature
    logs, tokens = (logits.double() / temperature).log_softmax(-1).topk(8)
    if not row.params.greedy:
        noise = [rng.gumbel_scalar(row.noise.target(level), int(token)) for token in tokens]
        logs = (logs + torch.tensor(noise, dtype=torch.float64)).log_softmax(-1)
    return dict(zip(tokens.tolist(), logs.exp().tolist(), strict=True))


# ---------------------------------------------------------------- P-EAGLE


PARALLEL_TEXT = (5, 6, 7, 8, 9, 10, 11, 12)


def parallel_drafts(head: Eagle3Head, view: TargetView, depths: tuple[int, ...]) -> list[list[int]]:
    """Drafts one after the other, of a text that gets a token longer each time."""
    drafter, tokens = ParallelEagleProposer("eagle3", head, view, **ROOM), PARALLEL_TEXT
    drafter.open(0, tokens)
    generator = torch.Generator().manual_seed(3)
    states = {
        layer: torch.randn(len(tokens), view.hidden, generator=generator)
        for layer in drafter.aux_hidden_layers
    }
    drafts, shown = [], 0
    for more, depth in enumerate(depths):
        text = tokens[: len(tokens) - len(depths) + 1 + more]
        drafter.observe(0, shown, {b: s[shown : len(text) - 1] for b, s in states.items()})
        shown = len(text) - 1
        row = DraftRequest(0, text, SamplingParams(temperature=0.8), Noise(1, shown), depth)
        first, again = (drafter.propose([row])[0].tokens for _ in range(2))
        assert first == again, "proposing changes nothing"
        drafts.append(first)
    return drafts


def test_a_deeper_parallel_draft_begins_like_a_shallower_one() -> None:
    """And masks leave nothing after for the next round."""
    head = tiny.parallel("llama")
    shallow, deep = (parallel_drafts(head, target(), depths) for depths in ((1, 1, 2), (7, 5, 6)))
    assert [len(d) for d in deep] == [8, 6, 7]
    assert [d[: len(s)] for d, s in zip(deep, shallow, strict=True)] == shallow


@compiled
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_parallel_drafts_on_the_native_kernels(form: str) -> None:
    """The same drafts in float32; in int8 they may differ, and the text cannot."""
    native.start(2)
    head, views = tiny.parallel("llama", draft_vocab=40), (target(), replace(target(), form=form))
    plain, fast = (parallel_drafts(head, view, (4, 1, 3)) for view in views)
    assert plain == fast if form == "float32" else [len(d) for d in plain] == [len(d) for d in fast]


# ---------------------------------------------------------------- a target's own multi-token layer


def mimo(directory: Path, **changes: Any) -> Path:
    """A tiny MiMo: a Qwen2 with a multi-token layer, which joins states and embeddings in that
    order."""
    sizes = {"tie_word_embeddings": False, "use_sliding_window": False}
    tiny.hf_model("qwen2", **sizes).save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text()) | {"model_type": "mimo"}
    raw |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(raw | changes))
    stored, own = load_file(directory / "model.safetensors"), "model.mtp_layers.0."
    hidden = raw["hidden_size"]
    torch.manual_seed(5)
    for name in [name for name in stored if name.startswith("model.layers.1.")]:
        copied = name.replace("model.layers.1.", own)
        stored[copied] = torch.randn_like(stored[name]) * 0.5
    for name in ("token", "hidden", "final"):
        stored[f"{own}{name}_layernorm.weight"] = 1 + 0.1 * torch.randn(hidden)
    stored[f"{own}input_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.5
    save_file(stored, directory / "model.safetensors")
    return directory


def last_states(path: Path, tokens: list[int]) -> dict[int, Tensor]:
    """The target's states of all tokens but the last."""
    decoder = tiny.decoder(path)
    runner = Runner(decoder, tokens=64, page=64, slots=1)
    runner.cache.pages.grow(0, len(tokens))
    segment = Segment(0, tokens[:-1], list(range(-1, len(tokens) - 2)), [])
    found = runner.forward([segment], (decoder.config.layers,)).features
    return {layer: as_tensor(states) for layer, states in found.items()}


def mimo_logits(path: Path, tokens: list[int]) -> Tensor:
    """MiMo's layer written out from its checkpoint: logits after the last token. [V]"""
    w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
    own, n = "model.mtp_layers.0.", len(tokens) - 1
    c = tiny.decoder(path).config

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[f"{name}.weight"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{own}{name}.weight"].T + w.get(f"{own}{name}.bias", 0.0)

    states = rms(last_states(path, tokens)[c.layers].double(), "model.norm")
    embedded = w["model.embed_tokens.weight"][tokens[1:]]
    pair = rms(states, f"{own}hidden_layernorm"), rms(embedded, f"{own}token_layernorm")
    x = product(torch.cat(pair, -1), "input_proj")
    y = rms(x, f"{own}input_layernorm")
    q, k, v = (product(y, f"self_attn.{part}_proj").view(n, -1, c.head_dim) for part in "qkv")
    cos, sin = (table[:n] for table in rope_tables(c, c.ropes[0], 64, torch.float64))
    halves = [part.chunk(2, -1) for part in (q, k)]
    q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves)
    later, heads = torch.ones(n, n).triu(1) > 0, []
    for h in range(c.heads):
        shared = h // (c.heads // c.kv_heads)
        scores = q[:, h] @ k[:, shared].T / c.head_dim**0.5
        heads.append(scores.masked_fill(later, -9e9).softmax(-1) @ v[:, shared])
    x = x + product(torch.cat(heads, -1), "self_attn.o_proj")
    y = rms(x, f"{own}post_attention_layernorm")
    gate = torch.nn.functional.silu(product(y, "mlp.gate_proj"))
    x = x + product(gate * product(y, "mlp.up_proj"), "mlp.down_proj")
    return rms(x, f"{own}final_layernorm")[-1] @ w["lm_head.weight"].T


def test_a_target_s_own_layer_computes_what_it_should(tmp_path: Path) -> None:
    """Its biases, its norms, and the state before the embedding; the target does without it."""
    path, tokens = mimo(tmp_path / "mimo"), [5, 6, 7, 9, 11, 3]
    view = view_of(tiny.decoder(path))
    drafter = EagleProposer("mtp", load_any_module(path, view), view, **ROOM)
    drafter.open(0, tokens)
    drafter.observe(0, 0, last_states(path, tokens))
    (draft,) = drafter.propose([DraftRequest(0, tokens, SamplingParams(), Noise(1, 5), 1)])
    expected = mimo_logits(path, tokens)
    logits = drafter.head.logits(as_tensor(drafter._last[0])[None])[0]
    assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-9)
    assert draft.tokens[1] == int(expected.argmax())


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_target_drafts_with_its_own_layer(kernels: str, tmp_path: Path) -> None:
    path = mimo(tmp_path / "mimo")
    llm = LLM(path, draft=f"mtp:{path}", kv_tokens=512, kernels=kernels)
    params = SamplingParams.pure(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    drafted = llm.generate([5, 6, 7, 8], params, depth=3)[0]
    assert drafted.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
    assert drafted.stats.by_source["mtp"].drafted > 20


@pytest.mark.parametrize(
    ("lost", "changes", "says"),
    [
        ("mtp_layers", {}, "no multi-token layers"),
        ("nothing", {"num_hidden_layers": 2}, "for this model alone"),
        ("mtp_layers.0.mlp", {}, "has no mtp_layers.0.mlp"),
    ],
)
def test_an_own_layer_that_is_not_there_is_one_line(
    lost: str, changes: dict[str, int], says: str, tmp_path: Path
) -> None:
    path = mimo(tmp_path / "mimo", **changes)
    stored = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if lost not in name}
    save_file(kept, path / "model.safetensors")
    whole = view_of(tiny.decoder(mimo(tmp_path / "whole")))
    with pytest.raises(LoadError, match=says) as error:
        load_any_module(path, whole)
    assert "\n" not in str(error.value)
