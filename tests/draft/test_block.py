"""The block proposer computes what a naive, uncached head does over the whole text, from the right states and slots.

A head that is fed the states of the wrong position, sees too much or too little of its block, or whose slots are read
one off still drafts, only worse. So its logits are compared round by round, and a head that knows a text must be right
about all of it.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, ConfigError, LoadError, SamplingParams
from forerun.cache.attention import Attention
from forerun.draft import block, features
from forerun.draft.base import Row
from forerun.draft.block import Block
from forerun.draft.block_format import save_block
from forerun.draft.block_head import BlockHead
from forerun.draft.features import as_tensor
from forerun.draft.native_block import NativeBlock
from forerun.draft.view import TargetView, view_of
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.rope import rope_tables
from forerun.native import NativeDecoder
from forerun.runner import Runner
from forerun.types import BESIDE, Draft, Law
from forerun.verify import Noise
from tests import tiny
from tests.draft.test_eagle import chain_of, norm, states_of, target
from tests.engine import build

ROOM = {"tokens": 1024, "page": 4, "slots": 8}


class Naive:
    """The head written out again: no cache, no chunks, no trees; the whole text anew for each path."""

    def __init__(self, head: BlockHead, view: TargetView) -> None:
        self.config, self.w, self.view = head.config, head.double().state_dict(), view
        layer = self.config.layer
        self.cos, self.sin = rope_tables(layer, layer.ropes[0], 300, torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.w[f"{name}.weight"], self.config.layer.norm_eps)

    def project(self, x: Tensor, name: str) -> Tensor:
        return (x @ self.w[f"{name}_proj.weight"].T).view(len(x), -1, self.config.layer.head_dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D]"""
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def layer(self, i: int, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """One layer over the block x, whose slots see all context and one another."""
        c, at = self.config.layer, f"layers.{i}."
        normed, own = self.norm(x, f"{at}input_layernorm"), f"{at}self_attn."
        both = torch.cat((context, normed))
        q, k, v = self.project(normed, f"{own}q"), self.project(both, f"{own}k"), self.project(both, f"{own}v")
        if c.qk_norm:
            q, k = self.norm(q, f"{own}q_norm"), self.norm(k, f"{own}k_norm")
        q, k = self.rotate(q, positions[len(context) :]), self.rotate(k, positions)
        heads = []
        for h in range(c.heads):
            shared = h // (c.heads // c.kv_heads)
            heads.append((q[:, h] @ k[:, shared].T / c.head_dim**0.5).softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, 1) @ self.w[f"{own}o_proj.weight"].T
        y = self.norm(x, f"{at}post_attention_layernorm")
        gate, up = (y @ self.w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (gate / (1 + (-gate).exp()) * up) @ self.w[f"{at}mlp.down_proj.weight"].T

    def made(self, tokens: tuple[int, ...], first: int = 0) -> Tensor:
        """What it makes of each slot of the block behind `tokens`, whose states are known from `first` on. [S, Hd]"""
        c = self.config
        context = states_of(tokens[:-1], c.boundaries)[first:] @ self.w["fc.weight"].T
        context = self.norm(context, "hidden_norm")
        ids = [tokens[-1], *[c.mask_token] * (c.block - 1)]
        if c.own_embedding:
            x = self.w["embed_tokens.weight"][ids]
        else:
            x = self.view.embed(torch.tensor(ids)).double()
        positions = torch.arange(first, len(tokens) - 1 + c.block)
        for i in range(c.layer.layers):
            x = self.layer(i, x, context, positions)
        return self.norm(x, "norm")

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Over the target's vocabulary, after the last token of the path."""
        c = self.config
        made = self.made(tokens, first)[len(path) + (0 if c.sample_from_anchor else 1)]
        said = self.w["lm_head.weight"] @ made if c.own_head else self.view.head(made[None])[0].double()
        if c.markov_rank:
            said = said + self.w["markov_head.markov_w2.weight"] @ self.known(tokens, path)
        ids = [i + int(offset) for i, offset in enumerate(self.w.get("d2t", torch.zeros(len(said))))]
        full = torch.full((self.view.vocab,), -torch.inf, dtype=torch.float64)
        full[ids] = said
        return full

    def trust(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> float:
        """The confidence in the token after the path."""
        x = torch.cat((self.made(tokens)[len(path)], self.known(tokens, path)))
        w, b = self.w["confidence_head.proj.weight"][0], self.w["confidence_head.proj.bias"][0]
        return float((w @ x + b).sigmoid())

    def known(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """What the Markov head knows of the last token of the path."""
        return self.w["markov_head.markov_w1.weight"][(*tokens, *path)[-1]]


@dataclass
class Watch:
    """What was seen while engines ran: every node's logits, and where the context of its slot begins."""

    seen: list[tuple[tuple[int, ...], tuple[int, ...], int, Tensor]] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, grow, observe = Watch(), block.grow, Block.observe

    def seeing(trees, logits, width, source):
        nodes = [(tree, node) for tree in trees for node in tree.frontier]
        for (tree, node), row in zip(nodes, logits, strict=True):
            path = tuple(tree.draft.tokens[i] for i in tree.draft.path_to(node)[1:])
            watch.seen.append((tuple(tree.row.tokens), path, watch.first[tree.row.slot], row.clone()))
        grow(trees, logits, width, source)

    def observing(self, slot, start, features):
        observe(self, slot, start, features)
        watch.first[slot] = self.waiting[slot].begin

    monkeypatch.setattr(block, "grow", seeing)
    monkeypatch.setattr(Block, "observe", observing)
    return watch


def same_as_naive(watch: Watch, head: BlockHead, every: int = 1) -> None:
    """The logits of every so-manieth node seen."""
    naive = Naive(head, target())
    assert len(watch.seen) > 10
    for tokens, path, first, row in watch.seen[::every]:
        expected = naive.logits(tokens, path, first)
        assert torch.equal(row.isinf(), expected.isinf())
        assert torch.allclose(row.double(), expected, rtol=1e-9, atol=1e-9), (len(tokens), path, first)


def engine_of(head: BlockHead, width: int = 1, *, chunk: int = 64, rule: str = "match", **room: int) -> Engine:
    view, shape = target(), ROOM | room
    runner = Runner(tiny.decoder(tiny.family("llama")), **shape)
    return Engine(runner, {"block": Block(head.double(), view, **shape, width=width)}, chunk=chunk, rule=rule)


def run(engine: Engine, count: int = 4, depth: int = 3, length: int = 12) -> list:
    prompts = build.prompts()
    requests = [engine.add(prompts[i], build.params(i, 0.8, length), draft="block", depth=depth) for i in range(count)]
    build.finish(engine)
    return requests


def head_of(**changes: Any) -> BlockHead:
    return tiny.block(tiny.block_config("llama", **changes))


# ---------------------------------------------------------------- what it computes


PLAIN = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False}
SHAPES = {
    "dspark": {},
    "no heads": PLAIN,
    "dflash": {**PLAIN, "sample_from_anchor": False},
    "one state, one layer, a block of one": {"boundaries": (1,), "block": 1, "layer": {"num_hidden_layers": 1}},
    "reduced vocabulary": {"draft_vocab": 40, "own_head": True},
    "own embedding and head, narrower": {
        "own_embedding": True, "own_head": True, "layer": {"hidden_size": 24, "head_dim": 8},
    },
    "llama, other rope": {"layer": {"model_type": "llama", "rope_theta": 500.0}},
    "a block longer than what is attended together": {"block": 20},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_node_has_the_logits_of_the_naive_head(shape: str, width: int, watch: Watch) -> None:
    """Chains and trees, several requests at once, whatever was accepted before."""
    head = head_of(**SHAPES[shape])
    run(engine_of(head, width), count=3, length=8)
    same_as_naive(watch, head, every=2 * width)


def test_small_chunks_and_preemption(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """States come in pieces, wait fused, and begin anew, some behind a prefix that nobody showed."""
    monkeypatch.setattr(features, "CHUNK", 5)
    head = head_of()
    requests = run(engine_of(head, 2, chunk=3, tokens=112), count=8)
    assert sum(r.stats.preemptions for r in requests) > 0
    assert {first > 0 for *_, first, _ in watch.seen} == {False, True}
    same_as_naive(watch, head, every=5)


@pytest.mark.parametrize("draft", ["block", "off"])
def test_the_context_of_a_cached_prefix_is_shared(draft: str, watch: Watch) -> None:
    """The target shows the states of a prefix once; who comes later finds what was made of them, or does without where
    nobody asked."""
    head, prompt = head_of(), build.prompts()[7]
    engine = engine_of(head, chunk=5)
    first = engine.add(prompt, build.params(1, 0.8, 12), draft=draft, depth=3)
    build.finish(engine)
    for seed in (2, 3):
        del watch.seen[:]
        again = engine.add(list(first.tokens), build.params(seed, 0.8, 16), draft="block", depth=3)
        build.finish(engine)
        assert again.stats.cached_tokens > len(prompt)
        begins = {begin for *_, begin, _ in watch.seen}
        assert begins == {0 if draft == "block" else again.stats.cached_tokens}
        same_as_naive(watch, head)


def test_a_prefix_that_is_known_beyond_what_the_target_has_is_not_read_twice() -> None:
    """States that come again, in pieces, are left out."""
    head, tokens = head_of().double(), tuple(range(5, 25))
    drafter, plain = Block(head, target(), **ROOM), Block(head, target(), **ROOM)
    row = Row(0, tokens, SamplingParams(temperature=1.0), Noise(3, 19), 4)
    show(drafter, 0, tokens)
    show(plain, 0, tokens)
    expected = plain.propose([row])[0].tokens
    assert drafter.propose([row])[0].tokens == expected
    drafter.close(0)
    drafter.open(0, tokens)
    assert drafter.cache.length[0] == 16
    parts = states_of(tokens[:-1], drafter.boundaries)
    for start, end in ((4, 7), (7, 17), (17, 18), (18, 19)):
        shown = parts[start:end].split(drafter.target.hidden, -1)
        drafter.observe(0, start, dict(zip(drafter.boundaries, shown, strict=True)))
    assert len(drafter.waiting[0]) == 3 and drafter.propose([row])[0].tokens == expected
    assert torch.allclose(*(d.cache.data[:, :, d.cache.pages.rows[0, :19]] for d in (drafter, plain)), atol=1e-9)


def test_context_that_begins_late_is_not_shared() -> None:
    """Its keys have other positions."""
    tokens = tuple(range(5, 25))
    for first, shared in ((0, 16), (3, 0)):
        drafter = Block(head_of().double(), target(), **ROOM)
        show(drafter, 0, tokens, first)
        assert len(drafter.propose([Row(0, tokens, SamplingParams(), Noise(3, 19), 4)])[0]) == 5
        drafter.close(0)
        drafter.open(0, tokens)
        assert drafter.cache.length[0] == shared


def test_a_long_lag_is_read_when_it_is_asked_again(watch: Watch) -> None:
    """Rounds without a draft leave states behind."""
    head = head_of()
    engine = engine_of(head)
    request = engine.add(build.prompts()[2], build.params(2, 0.8, 40), draft="block", depth=0)
    for _ in range(15):
        engine.step_or_raise()
    request.depth = 3
    build.finish(engine)
    assert len(watch.seen[0][0]) > 20
    same_as_naive(watch, head)


def test_ratio_rules_sample_from_the_law_of_the_head(watch: Watch) -> None:
    head = head_of()
    run(engine_of(head, 3, rule="tree"), count=2, length=6)
    same_as_naive(watch, head, every=2)


@pytest.mark.parametrize("fault", ["a causal block", "states one off", "slots one off"])
def test_a_fault_would_be_seen(fault: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the comparisons above."""
    head = head_of()
    if fault == "a causal block":
        monkeypatch.setattr(block, "Attention", lambda *args, causal: Attention(*args, causal=True))
    engine = engine_of(head)
    if fault == "states one off":
        observe = Block.observe

        def shifted(self: Block, slot: int, start: int, features: Any) -> None:
            observe(
                self, slot, start, {boundary: as_tensor(states).roll(1, 0) for boundary, states in features.items()}
            )

        monkeypatch.setattr(Block, "observe", shifted)
    run(engine, count=2, length=8)
    expected = head
    if fault == "slots one off":
        expected = BlockHead(replace(head.config, sample_from_anchor=False, block=5))
        expected.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        same_as_naive(watch, expected)


def test_q_is_the_law_of_the_logits() -> None:
    """And proposing twice changes nothing."""
    head, tokens = head_of(draft_vocab=40, own_head=True), (5, 6, 7, 8, 9)
    drafter = Block(head.double(), target(), **ROOM)
    show(drafter, 0, tokens)
    row = Row(0, tokens, SamplingParams(temperature=1.0), Noise(3, 4), 3, coupled=False, branching=False)
    first, again = drafter.propose([row])[0], drafter.propose([row])[0]
    assert first.tokens == again.tokens and len(first) == 4 and set(first.laws[1:]) == {Law.SAMPLED}
    law = Naive(head, target()).logits(tokens, (first.tokens[1],)).softmax(-1)
    assert torch.allclose(torch.from_numpy(first.probs[1]), law, atol=1e-9)


def show(drafter: Block, slot: int, tokens: tuple[int, ...], first: int = 0) -> None:
    """Open a slot and show it the states of all but the last token."""
    drafter.close(slot)
    drafter.open(slot, tokens)
    if len(tokens) > 1:
        parts = states_of(tokens[:-1], drafter.boundaries)[first:].split(drafter.target.hidden, -1)
        drafter.observe(slot, first, dict(zip(drafter.boundaries, parts, strict=True)))


# ---------------------------------------------------------------- alignment


PROMPT, LENGTH, DEPTH = 6, 26, 3
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=1.5, seed=3, ignore_eos=True)


def knowing(sample_from_anchor: bool) -> tuple[BlockHead, list[int]]:
    """A head that knows a text, and the text: wherever in it a block begins, its slots name what comes next."""
    runner = Runner(tiny.decoder(tiny.family("llama")), **ROOM)
    plain = Engine(runner, {})
    request = plain.add(build.prompts()[2][:PROMPT], PARAMS)
    build.finish(plain)
    text = tuple(request.tokens)
    wide = {"hidden_size": 128, "num_hidden_layers": 1}
    head = head_of(
        **PLAIN, sample_from_anchor=sample_from_anchor, block=DEPTH + (not sample_from_anchor), own_embedding=True,
        own_head=True, layer=wide,
    ).double()  # fmt: skip
    naive, made, wanted = Naive(head, target()), [], []
    for root in range(PROMPT, len(text) - 1):
        after = text[root + 1 : root + 1 + DEPTH]
        made += naive.made(text[: root + 1])[head.config.first :][: len(after)]
        wanted += after
    assert len(made) <= 128, "more than a linear head of this width can know"
    answers = torch.nn.functional.one_hot(torch.tensor(wanted), tiny.VOCAB).double()
    head.lm_head.weight.copy_(100 * torch.linalg.lstsq(torch.stack(made), answers).solution.T)
    return head, list(text)


@pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["anchor first", "fill-in"])
def test_a_head_that_knows_the_text_is_right_about_all_of_it(sample_from_anchor: bool) -> None:
    """And the same head, its slots read as those of the other layout, is right about next to nothing."""
    head, text = knowing(sample_from_anchor)
    other = BlockHead(replace(head.config, sample_from_anchor=not sample_from_anchor)).double()
    other.load_state_dict(head.state_dict())
    accepted = []
    for drafter in (head, other.requires_grad_(False)):
        engine = engine_of(drafter)
        again = engine.add(text[:PROMPT], PARAMS, draft="block", depth=DEPTH)
        build.finish(engine)
        assert again.tokens == text
        accepted.append(again.stats.accepted / again.stats.drafted)
    assert accepted[0] == 1 and again.stats.drafted > 30
    assert accepted[1] < 0.15


@pytest.mark.parametrize("width", [1, 3])
def test_nothing_of_a_draft_stays_whether_it_was_accepted_or_not(width: int, watch: Watch) -> None:
    """A head that half knows the text has all, some or none of a draft accepted."""
    head, text = knowing(True)
    torch.manual_seed(1)
    head.lm_head.weight.add_(0.03 * torch.randn_like(head.lm_head.weight) * head.lm_head.weight.std())
    engine = engine_of(head, width)
    again = engine.add(text[:PROMPT], PARAMS, draft="block", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert len({accepted for drafted, accepted in again.stats.rounds if drafted}) > 2
    assert again.stats.accepted < again.stats.drafted
    same_as_naive(watch, head, every=width)


# ---------------------------------------------------------------- how far it goes


@pytest.mark.parametrize("width", [1, 3])
def test_paths_that_are_not_trusted_are_not_followed(width: int) -> None:
    """A node has children where the product of confidences down to it reaches the threshold, and nowhere else."""
    head, tokens = head_of(), (5, 6, 7, 8, 9)
    with torch.no_grad():
        head.confidence_head.proj.weight.mul_(0.3)
    drafter, naive = Block(head.double(), target(), **ROOM, width=width), Naive(head, target())
    show(drafter, 0, tokens)
    row = Row(0, tokens, SamplingParams(temperature=1.0), Noise(3, 4), 4)
    whole = drafter.propose([row])[0]
    assert len(whole) == 1 + 4 * width, "by default all are followed"
    trust = {0: naive.trust(tokens, ())}
    for node in range(1, len(whole)):
        path = tuple(whole.tokens[i] for i in whole.path_to(node)[1:])
        if len(path) < 4:
            trust[node] = trust[whole.parents[node]] * naive.trust(tokens, path)
    values = sorted(trust.values())
    for drafter.threshold in ((a + b) / 2 for a, b in pairwise(values)):
        cut = drafter.propose([row])[0]
        for node in range(len(cut)):
            path = tuple(cut.tokens[i] for i in cut.path_to(node)[1:])
            stands = 1.0
            for depth in range(len(path)):
                stands *= naive.trust(tokens, path[:depth])
            assert not path or stands >= drafter.threshold
        if width == 1:
            assert len(cut) - 1 == next((i for i in range(4) if trust[i] < drafter.threshold), 4)
    drafter.threshold = 1.0
    assert len(drafter.propose([row])[0]) == 1


@pytest.mark.parametrize("rule", ["match", "token", "tree"])
def test_a_threshold_changes_no_text(rule: str) -> None:
    """At temperature 0, where every lossless rule says the target's own tokens."""
    texts, drafted = [], []
    for draft, threshold in (("off", 0.0), ("block", 0.0), ("block", 0.3)):
        engine = engine_of(head_of(), 1 if rule == "token" else 2, rule=rule)
        engine.proposers["block"].threshold = threshold
        requests = [engine.add(build.prompts()[i], build.params(i, 0.0, 16), draft=draft, depth=4) for i in range(4)]
        build.finish(engine)
        texts.append([r.tokens for r in requests])
        drafted.append(sum(r.stats.drafted for r in requests))
    assert texts[0] == texts[1] == texts[2]
    assert 0 < drafted[2] < drafted[1]


def test_without_states_or_room_there_is_no_draft() -> None:
    drafter = Block(head_of().double(), target(), tokens=24, page=4, slots=4)

    def drafted(slot: int, tokens: tuple[int, ...], depth: int = 2) -> int:
        row = Row(slot, tokens, SamplingParams(), Noise(1, len(tokens) - 1), depth)
        return len(drafter.propose([row])[0]) - 1

    assert drafted(0, (5, 6, 7)) == 0, "never opened"
    show(drafter, 0, (5,))
    assert drafted(0, (5,)) == 0, "there is no state before the only token"
    show(drafter, 0, (5, 6, 7))
    assert drafted(0, (5, 6, 7, 8)) == 0, "the state before the root was not shown"
    assert drafted(0, (5, 6, 7)) == 2
    assert drafted(0, (5, 6, 7), depth=9) == 4, "no deeper than its block"
    show(drafter, 1, (5, 6, 7, 8, 9, 10), first=3)
    assert drafted(1, (5, 6, 7, 8, 9, 10)) == 2, "a cached prefix was not shown"
    show(drafter, 2, tuple(range(5, 15)))
    assert drafted(2, tuple(range(5, 15))) == 0, "no room in the pool"
    drafter.close(0)
    assert drafted(2, tuple(range(5, 15))) == 2, "there is when another request is gone"
    drafter.reset()
    assert drafted(1, (5, 6, 7, 8, 9, 10)) == 0, "reset drops everything"
    assert drafter.cache.pages.available == drafter.cache.pages.count


def test_a_text_may_end_at_the_very_last_position() -> None:
    """The masks behind it reach past the target's context."""
    engine, limit = engine_of(head_of(block=12)), target().context
    prompt = (build.prompts()[7] * 7)[: limit - 8]
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)
    request = engine.add(prompt, params, draft="block", depth=12)
    build.finish(engine)
    assert len(request.tokens) == limit and request.stats.drafted > 0


# ---------------------------------------------------------------- in use


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_the_native_products_compute_what_is_trained(form: str) -> None:
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    head, tokens = head_of(own_head=True, block=5), (5, 6, 7, 8, 9, 10)
    said = []
    for view in (target(), replace(target(), form=form)):
        drafter = Block(head, view, **ROOM)
        show(drafter, 0, tokens)
        row = Row(0, tokens, SamplingParams(), Noise(1, 5), 5)
        drafter.propose([row])
        (grown,) = drafter._say([block.Tree(row)])
        previous = torch.tensor([10, 3, 3, 3, 3])
        said.append((drafter.head.follow(grown.said, previous), drafter.head.trust(grown.made, previous)))
    for mine, theirs in zip(*said, strict=True):
        assert (theirs - mine).norm() / mine.norm() < (0.1 if form == "int8" else 1e-4)
    assert not isinstance(drafter.head.fc, torch.nn.Linear) and isinstance(head.fc, torch.nn.Linear)


@pytest.mark.parametrize(("family", "shape"), [*(("llama", shape) for shape in SHAPES), ("gemma2", "dspark")])
def test_a_round_in_one_call_is_the_chain_level_by_level(
    family: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests, each with its own depth and temperature; a softcap and a scaled embedding where Gemma has
    them. Then once more, when there is nothing new to read, and behind some tokens more, of which one request has
    none and one has many. The same in torch, but for what waits fused at the end of the cache."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    monkeypatch.setattr(features, "CHUNK", 8)
    directory = tiny.family(family)
    view = view_of(NativeDecoder(load_config(directory), directory, "float32", 256), form="float32")
    head = tiny.block(tiny.block_config(family, **SHAPES[shape]))
    rows = [
        Row(slot, tuple(range(5 + slot, 12 + 2 * slot)), SamplingParams(temperature=t), Noise(slot, 6), depth)
        for slot, (depth, t) in enumerate(((3, 0.8), (1, 0.0), (9, 1.3), (2, 0.0)))
    ]
    torch.manual_seed(0)
    states = [{b: torch.randn(len(row.tokens) - 1, view.hidden) for b in head.config.boundaries} for row in rows]
    counts = (0, 1, 3, 25)
    further = [replace(row, tokens=(*row.tokens, *[9, 8, 7, 6, 5] * 5)[: len(row.tokens) + n])
               for row, n in zip(rows, counts, strict=True)]  # fmt: skip
    more = [{b: torch.randn(n, view.hidden) for b in head.config.boundaries} for n in counts]
    calls, drafts, done = [], [], NativeBlock.round
    for way in ("one call", "level by level", "torch"):
        with monkeypatch.context() as patched:
            if way == "one call":
                patched.setattr(NativeBlock, "round", lambda *a: (calls.append(a[1]), done(*a))[1])
            else:
                patched.setattr(NativeBlock, "drafts", property(lambda _: False))
            drafter = Block(head, view if way != "torch" else replace(view, form=None), **ROOM)
            for row, shown in zip(rows, states, strict=True):
                drafter.open(row.slot, row.tokens)
                drafter.observe(row.slot, 0, shown)
            drafts.append([drafter.propose(rows) for _ in range(2)])
            for row, shown in zip(rows, more, strict=True):
                for at in range(0, len(next(iter(shown.values()))), 10):
                    part = {boundary: states[at : at + 10] for boundary, states in shown.items()}
                    drafter.observe(row.slot, len(row.tokens) - 1 + at, part)
            drafts[-1].append(drafter.propose(further))
    assert len(calls) == 3 and [len(s.segment.tokens) for s in calls[1]] == [0] * 4
    assert drafts[0] == drafts[1] == drafts[2]
    depth = head.config.depth
    assert [len(draft) - 1 for draft in drafts[0][0]] == [min(most, depth) for most in (3, 1, 9, 2)]
    assert len({token for draft in drafts[0][0] for token in draft.tokens[1:]}) > min(4, depth)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_end_where_they_are_not_sure_any_more(temperature: float) -> None:
    """As those of other heads: behind the token with which the product of what its sixteenths stand for falls below the
    row's floor. Beside them stand the likeliest of what was not said."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    directory = tiny.family("llama")
    view = view_of(NativeDecoder(load_config(directory), directory, "float32", 256), form="float32")
    head = tiny.block(tiny.block_config("llama", block=7, draft_vocab=40, own_head=True))
    rows = [
        Row(slot, tuple(range(5 + slot, 12 + slot)), SamplingParams(temperature=temperature), Noise(slot, 6), depth)
        for slot, depth in enumerate((6, 3, 7))
    ]
    torch.manual_seed(0)
    states = [{b: torch.randn(6, view.hidden) for b in head.config.boundaries} for _ in rows]
    stands = array("f", [*(0.5 + i / 32 for i in range(16)), *(0.2 + i / 64 for i in range(16))])

    def proposed(floors: tuple[float, ...]) -> list[Draft]:
        drafter = Block(head, view, **ROOM)
        for row, shown in zip(rows, states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, shown)
        return drafter.propose([replace(r, stands=stands, floor=f) for r, f in zip(rows, floors, strict=True)])

    assert Block(head, view, **ROOM).stops
    whole, ends = proposed((0.0, 0.0, 0.0)), []
    assert [len(draft) for draft in whole] == [1 + depth + BESIDE for depth in (6, 3, 7)]
    for floors in ((0.5, 0.5, 0.5), (0.05, 0.3, 0.2), (0.0, 0.9, 0.1)):
        for draft, full, floor in zip(proposed(floors), map(chain_of, whole), floors, strict=True):
            chances = list(itertools.accumulate((stands[i] for i in full.sure), operator.mul))
            end = next((i + 1 for i, chance in enumerate(chances) if chance < floor), len(chances))
            chain = chain_of(draft)
            assert (chain.tokens, chain.sure) == (full.tokens[: end + 1], full.sure[:end])
            ends.append(end)
    assert len(set(ends)) > 2


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_user_s_drafter(kernels: str, tmp_path) -> None:
    """From a directory, beside plain decoding."""
    save_block(head_of(), tmp_path / "drafter")
    llm = LLM(tiny.family("llama"), draft=f"block:{tmp_path / 'drafter'}", kv_tokens=512, kernels=kernels, width=2)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True)
    drafted = llm.generate([5, 6, 7, 8], params, depth=3)[0]
    assert drafted.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
    assert drafted.stats.by_source["block"].drafted > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_user_s_threshold(temperature: float, tmp_path: Path) -> None:
    """Less is drafted, and the text is plain decoding's."""
    save_block(head_of(), tmp_path / "drafter")
    params, drafted = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True), []
    for threshold in (0.0, 0.2, 1.0):
        llm = LLM(tiny.family("llama"), draft=f"block:{tmp_path / 'drafter'}", kv_tokens=512, draft_threshold=threshold)
        out = llm.generate([5, 6, 7, 8], params, depth=4)[0]
        assert out.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
        drafted.append(out.stats.drafted)
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_a_threshold_needs_a_head_that_knows(tmp_path: Path) -> None:
    """It would be without effect otherwise."""
    save_block(head_of(**PLAIN), tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"draft_threshold=0.3 needs .* confidence head") as error:
        LLM(tiny.family("llama"), draft=f"block:{tmp_path / 'drafter'}", kv_tokens=512, draft_threshold=0.3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_hidden": 16}, "states of 16"),
        ({"layer": {"vocab_size": 65}, "draft_vocab": 65}, "65 tokens"),
        ({"layer": {"hidden_size": 16}}, "none of its own"),
        ({"boundaries": (0, 1, 4)}, "from 0 to 3"),
        ({"boundaries": (2, 1, 2)}, "different"),
        ({"mask_token": 64}, "mask token 64"),
    ],
)
def test_a_drafter_for_another_target(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says) as error:
        Block(head_of(**changes), target(), **ROOM)
    assert "\n" not in str(error.value)
