"""The EAGLE-3 proposer computes what a naive, uncached head does over the whole text, from the right states.

A head that is fed the states of the wrong position or boundary, or keeps keys of drafted tokens, still drafts, only
worse, so its logits are compared round by round, and a head that knows a text must be right about all of it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams, rng
from forerun.cache.attention import Segment
from forerun.draft import features, pairs
from forerun.draft.base import Row
from forerun.draft.eagle_format import save_head
from forerun.draft.eagle_head import EagleConfig, EagleHead
from forerun.draft.native_layer import NativeLayer
from forerun.draft.pairs import Pairs
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
from tests.engine import build

ROOM = {"tokens": 1024, "page": 4, "slots": 8}


def target() -> TargetView:
    return view_of(tiny.decoder(tiny.family("llama")))


@functools.cache
def states_of(tokens: tuple[int, ...], boundaries: tuple[int, ...]) -> Tensor:
    """The target's states of each token, side by side, from one pass over the whole text. [T, n * H]"""
    runner = Runner(tiny.decoder(tiny.family("llama")), tokens=256, page=256, slots=1)
    runner.cache.pages.grow(0, len(tokens))
    segment = Segment(0, list(tokens), list(range(-1, len(tokens) - 1)), [])
    features = runner.forward([segment], boundaries).features
    return torch.cat([features[boundary] for boundary in boundaries], -1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Naive:
    """The head written out again: no cache, no chunks, no trees; everything anew for each path."""

    def __init__(self, head: EagleHead, view: TargetView) -> None:
        self.config, self.w, self.view = head.config, head.double().state_dict(), view
        layer = self.config.layer
        self.cos, self.sin = rope_tables(layer, layer.ropes[0], 256, torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.w[f"{name}.weight"], self.config.layer.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        c = self.config
        if c.norm_before_fc:
            features = self.norm(features, "input_norm")
        if c.fc_norm:
            parts = features.split(c.target_hidden, -1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return features @ self.w["fc.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """One head at positions 0, 1, .. [T, D]"""
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[: len(x), 0], self.sin[: len(x), 0]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each position over itself and those before it, head by head. [T, heads, D]"""
        c, window = self.config.layer, self.config.layer.windows[0] or len(q)
        unseen = torch.tensor([[not t - window < s <= t for s in range(len(q))] for t in range(len(q))])
        heads = []
        for h in range(c.heads):
            shared = h // (c.heads // c.kv_heads)
            scores = self.rotate(q[:, h]) @ self.rotate(k[:, shared]).T / c.head_dim**0.5
            heads.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, shared])
        return torch.stack(heads, 1)

    def layer(self, embedded: Tensor, state: Tensor) -> Tensor:
        c, at = self.config.layer, "layers.0."
        normed = self.norm(state, f"{at}hidden_norm")
        if self.config.join:
            pair = torch.cat((self.norm(embedded, f"{at}embed_norm"), normed), -1)
            state = pair @ self.w[f"{at}input_proj.weight"].T
            x = self.norm(state, f"{at}input_layernorm")
        else:
            x = torch.cat((self.norm(embedded, f"{at}input_layernorm"), normed), -1)
        q, k, v = ((x @ self.w[f"{at}self_attn.{n}_proj.weight"].T).view(len(x), -1, c.head_dim) for n in "qkv")
        if c.qk_norm:
            q, k = self.norm(q, f"{at}self_attn.q_norm"), self.norm(k, f"{at}self_attn.k_norm")
        out = self.attend(q, k, v).flatten(1) @ self.w[f"{at}self_attn.o_proj.weight"].T
        x = (normed if self.config.norm_before_residual else state) + out
        y = self.norm(x, f"{at}post_attention_layernorm")
        gate, up = (y @ self.w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (gate / (1 + (-gate).exp()) * up) @ self.w[f"{at}mlp.down_proj.weight"].T

    def made(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """What it makes of every pair: those of the committed tokens from `first` on, then those of the path."""
        states = self.fuse(states_of(tokens[:-1], self.config.boundaries))[first:]
        ids = [*tokens[first + 1 :]]
        for token in (None, *path):
            if token is not None:
                last = made[-1]  # noqa: F821
                states = torch.cat((states, (self.norm(last, "norm") if self.config.norm_output else last)[None]))
                ids.append(token)
            if self.config.own_embedding:
                embedded = self.w["embed_tokens.weight"][ids]
            else:
                embedded = self.view.embed(torch.tensor(ids)).double()
            made = self.layer(embedded, states)
        return made

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Over the target's vocabulary, after the last token of the path."""
        said = self.norm(self.made(tokens, path, first)[-1], "norm") @ self.w["lm_head.weight"].T
        ids = [i + int(offset) for i, offset in enumerate(self.w.get("d2t", torch.zeros(len(said))))]
        full = torch.full((self.view.vocab,), -torch.inf, dtype=torch.float64)
        full[ids] = said
        return full


@dataclass
class Watch:
    """What was seen while engines ran: every node's logits, and where the pairs of its slot begin."""

    seen: list[tuple[tuple[int, ...], tuple[int, ...], int, Tensor]] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)


@pytest.fixture
def watch(monkeypatch) -> Watch:
    watch, grow, observe = Watch(), pairs.grow, Pairs.observe

    def seeing(trees, logits, width, source):
        nodes = [(tree, node) for tree in trees for node in tree.frontier]
        for (tree, node), row in zip(nodes, logits, strict=True):
            path = tuple(tree.draft.tokens[i] for i in tree.draft.path_to(node)[1:])
            watch.seen.append((tuple(tree.row.tokens), path, watch.first[tree.row.slot], row.clone()))
        grow(trees, logits, width, source)

    def observing(self, slot, start, features):
        observe(self, slot, start, features)
        watch.first[slot] = self.waiting[slot].begin

    monkeypatch.setattr(pairs, "grow", seeing)
    monkeypatch.setattr(Pairs, "observe", observing)
    return watch


def same_as_naive(watch: Watch, head: EagleHead, every: int = 1) -> None:
    """The logits of every so-manieth node seen."""
    naive = Naive(head, target())
    assert len(watch.seen) > 10
    for tokens, path, first, row in watch.seen[::every]:
        expected = naive.logits(tokens, path, first)
        assert torch.equal(row.isinf(), expected.isinf())
        assert torch.allclose(row, expected, rtol=1e-9, atol=1e-9), (len(tokens), path, first)


def engine_of(head: EagleHead, width: int = 1, *, chunk: int = 64, rule: str = "match", **room: int) -> Engine:
    decoder, shape = tiny.decoder(tiny.family("llama")), ROOM | room
    return Engine(
        Runner(decoder, **shape), {"eagle": Pairs("eagle3", head.double(), view_of(decoder), **shape, width=width)},
        chunk=chunk, rule=rule,
    )  # fmt: skip


def run(engine: Engine, count: int = 4, temperature: float = 0.8, depth: int = 3, length: int = 12) -> list:
    prompts = build.prompts()
    requests = [
        engine.add(prompts[i], build.params(i, temperature, length), draft="eagle", depth=depth) for i in range(count)
    ]
    build.finish(engine)
    return requests


# ---------------------------------------------------------------- what it computes


SHAPES = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "norm_output": True},
    "norm of each state": {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
    "norm of the output": {"norm_output": True},
    "reduced vocabulary": {"draft_vocab": 40},
    "one state": {"boundaries": (1,)},
    "own embedding, narrower": {"own_embedding": True, "layer": {"hidden_size": 24, "head_dim": 8}},
    "joined pairs": {"join": True, "fc_norm": True, "norm_output": True, "draft_vocab": 40},
    "qwen3, other rope": {"layer": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 500.0}},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_node_has_the_logits_of_the_naive_head(shape: str, width: int, watch: Watch) -> None:
    """Chains and trees, several requests at once, whatever was accepted before."""
    head = tiny.eagle(tiny.eagle_config("llama", **SHAPES[shape]))
    run(engine_of(head, width), count=2, length=6)
    same_as_naive(watch, head, every=width)


def test_small_chunks_and_preemption(watch: Watch, monkeypatch) -> None:
    """Pairs come in pieces, wait fused, and begin anew, some behind a prefix that nobody showed."""
    monkeypatch.setattr(features, "CHUNK", 5)
    head = tiny.eagle(tiny.eagle_config("llama"))
    requests = run(engine_of(head, 2, chunk=3, tokens=112), count=8)
    assert sum(r.stats.preemptions for r in requests) > 0
    assert {first > 0 for *_, first, _ in watch.seen} == {False, True}
    same_as_naive(watch, head, every=5)


@pytest.mark.parametrize("draft", ["eagle", "off"])
def test_the_pairs_of_a_cached_prefix_are_shared(draft: str, watch: Watch) -> None:
    """The target shows the states of a prefix once; who comes later finds what was made of them, or does without where
    nobody asked."""
    head, prompt = tiny.eagle(tiny.eagle_config("llama")), build.prompts()[7]
    engine = engine_of(head, chunk=5)
    first = engine.add(prompt, build.params(1, 0.8, 12), draft=draft, depth=3)
    build.finish(engine)
    for seed in (2, 3):
        del watch.seen[:]
        again = engine.add(list(first.tokens), build.params(seed, 0.8, 16), draft="eagle", depth=3)
        build.finish(engine)
        assert again.stats.cached_tokens > len(prompt)
        assert {begin for *_, begin, _ in watch.seen} == {0 if draft == "eagle" else again.stats.cached_tokens}
        same_as_naive(watch, head)


def test_a_pair_is_shared_only_with_texts_that_have_its_second_token_too() -> None:
    """The last pair of a page has a token of the next page."""
    head, tokens = tiny.eagle(tiny.eagle_config("llama")).double(), tuple(range(5, 25))
    drafter = Pairs("eagle3", head, target(), **ROOM)
    show(drafter, 0, tokens)
    drafter.propose([Row(0, tokens, SamplingParams(), Noise(1, 2), 3)])
    drafter.close(0)
    for changed, shared in ((18, 16), (17, 16), (16, 12), (15, 12), (12, 8), (11, 8)):
        drafter.open(0, [*tokens[:changed], 63, *tokens[changed + 1 :]])
        assert drafter.cache.length[0] == shared
        drafter.close(0)


def test_a_sliding_window(watch: Watch) -> None:
    config = tiny.eagle_config("llama")
    head = tiny.eagle(replace(config, layer=replace(config.layer, windows=(4,))))
    run(engine_of(head), count=2, length=6)
    same_as_naive(watch, head)


def test_a_long_lag_is_read_when_it_is_asked_again(watch: Watch) -> None:
    """Rounds without a draft leave pairs behind."""
    head = tiny.eagle(tiny.eagle_config("llama"))
    engine = engine_of(head)
    request = engine.add(build.prompts()[2], build.params(2, 0.8, 40), draft="eagle", depth=0)
    for _ in range(15):
        engine.step_or_raise()
    request.depth = 3
    build.finish(engine)
    assert len(watch.seen[0][0]) > 20
    same_as_naive(watch, head)


def test_ratio_rules_sample_from_the_law_of_the_head(watch: Watch) -> None:
    head = tiny.eagle(tiny.eagle_config("llama"))
    run(engine_of(head, 3, rule="tree"), count=2, length=6)
    same_as_naive(watch, head, every=2)


def test_q_is_the_law_of_the_logits() -> None:
    """And proposing twice changes nothing."""
    head, tokens = tiny.eagle(tiny.eagle_config("llama", draft_vocab=40)), (5, 6, 7, 8, 9)
    drafter = Pairs("eagle3", head.double(), target(), **ROOM)
    show(drafter, 0, tokens)
    row = Row(0, tokens, SamplingParams(temperature=1.0), Noise(3, 4), 3, coupled=False, branching=False)
    first, again = drafter.propose([row])[0], drafter.propose([row])[0]
    assert first.tokens == again.tokens and len(first) == 4 and set(first.laws[1:]) == {Law.SAMPLED}
    law = Naive(head, target()).logits(tokens, (first.tokens[1],)).softmax(-1)
    assert torch.allclose(torch.from_numpy(first.probs[1]), law, atol=1e-9)


def show(drafter: Pairs, slot: int, tokens: tuple[int, ...], first: int = 0) -> None:
    """Open a slot and show it the states of all but the last token."""
    drafter.open(slot, tokens)
    if len(tokens) > 1:
        parts = states_of(tokens[:-1], drafter.boundaries)[first:].split(drafter.target.hidden, -1)
        drafter.observe(slot, first, dict(zip(drafter.boundaries, parts, strict=True)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("form", [None, "float32"])
def test_the_embedding_is_what_enters_the_target_s_first_layer(family: str, form: str | None) -> None:
    """Scaled where the target scales it, without learned positions."""
    if form and native.library() is None:
        pytest.skip("the native kernels were not compiled")
    directory = tiny.family(family)
    native.start(2) if form else None
    decoder = NativeDecoder(load_config(directory), directory, form, 256) if form else tiny.decoder(directory)
    runner = Runner(decoder, tokens=16, page=16, slots=1)
    runner.cache.pages.grow(0, 3)
    entering = runner.forward([Segment(0, [5, 6, 7], [-1, 0, 1], [])], (0,)).features[0].double()
    if decoder.weights.positions is not None:
        entering = entering - decoder.weights.positions[:3]
    embedded = view_of(decoder).embed(torch.tensor([5, 6, 7]))
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded.double(), entering, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- alignment


PROMPT, LENGTH, DEPTH = 6, 30, 3
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=1.5, seed=3, ignore_eos=True)


def knowing() -> tuple[EagleHead, list[int]]:
    """A head that knows a text, and the text: wherever in it a chain of drafts begins, it names what comes next."""
    plain = engine_of(tiny.eagle(tiny.eagle_config("llama")))
    request = plain.add(build.prompts()[2][:PROMPT], PARAMS)
    build.finish(plain)
    text = tuple(request.tokens)
    config = tiny.eagle_config("llama", own_embedding=True, layer={"hidden_size": 128}, norm_output=True)
    head = tiny.eagle(config).double()
    naive, made, wanted = Naive(head, target()), [], []
    for root in range(PROMPT, len(text) - 1):
        path = text[root + 1 : root + DEPTH]
        after = text[root + 1 : root + 1 + DEPTH]
        made += naive.made(text[: root + 1], path)[-1 - len(path) :][: len(after)]
        wanted += after
    states = naive.norm(torch.stack(made), "norm")
    assert len(states) <= 128, "more than a linear head of this width can know"
    answers = torch.nn.functional.one_hot(torch.tensor(wanted), tiny.VOCAB).double()
    head.lm_head.weight.copy_(100 * torch.linalg.lstsq(states, answers).solution.T)
    return head, list(text)


def test_a_head_that_knows_the_text_is_right_about_all_of_it() -> None:
    """The pair of a token and the state before it says the next token: off by one it would know nothing."""
    head, text = knowing()
    engine = engine_of(head)
    again = engine.add(text[:PROMPT], PARAMS, draft="eagle", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert again.stats.accepted == again.stats.drafted > 15


@pytest.mark.parametrize("width", [1, 3])
def test_nothing_of_a_draft_stays_whether_it_was_accepted_or_not(width: int, watch: Watch) -> None:
    """A head that half knows the text has all, some or none of a draft accepted."""
    head, text = knowing()
    torch.manual_seed(1)
    head.lm_head.weight.add_(torch.randn_like(head.lm_head.weight) * head.lm_head.weight.std())
    engine = engine_of(head, width)
    again = engine.add(text[:PROMPT], PARAMS, draft="eagle", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert {accepted for drafted, accepted in again.stats.rounds if drafted} >= {1, DEPTH}
    assert again.stats.accepted < again.stats.drafted
    same_as_naive(watch, head, every=width)


# ---------------------------------------------------------------- when it cannot draft


def test_without_states_room_or_tokens_there_is_no_draft() -> None:
    head = tiny.eagle(tiny.eagle_config("llama", own_embedding=True, draft_vocab=40, layer={"vocab_size": 50})).double()
    drafter = Pairs("eagle3", head, target(), tokens=16, page=4, slots=4)

    def drafted(slot: int, tokens: tuple[int, ...], depth: int = 2) -> int:
        row = Row(slot, tokens, SamplingParams(), Noise(1, len(tokens) - 1), depth)
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


NATIVE = {
    "plain": lambda: tiny.eagle(tiny.eagle_config("llama")),
    "norm before residual": lambda: tiny.eagle(tiny.eagle_config("llama", norm_before_residual=True, norm_output=True)),
    "norms of queries and keys": lambda: tiny.eagle(
        tiny.eagle_config("llama", layer={"model_type": "qwen3", "head_dim": 16})
    ),
    "narrower, some tokens": lambda: tiny.eagle(
        tiny.eagle_config("llama", own_embedding=True, draft_vocab=40, layer={"hidden_size": 24, "head_dim": 8})
    ),
    "window": lambda: _windowed(tiny.eagle_config("llama")),
    "joined pairs": lambda: tiny.eagle(tiny.eagle_config("llama", join=True, norm_output=True, draft_vocab=40)),
    "mtp": lambda: tiny.mtp("llama"),
    "eagle-1": lambda: tiny.eagle1("llama"),
    "eagle-1, with biases and an embedding": lambda: tiny.eagle1("llama", qkv_bias=True, own=True),
}


def _windowed(config: EagleConfig) -> EagleHead:
    return tiny.eagle(replace(config, layer=replace(config.layer, windows=(3,))))


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("name", NATIVE)
def test_the_native_layer_computes_what_is_trained(name: str, form: str) -> None:
    """What is made of committed pairs, and in float32 whole trees; the trained head is left as it was."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    head, tokens = NATIVE[name](), (5, 6, 7, 8, 9, 10, 11)
    made, trees = [], []
    for view in (target(), replace(target(), form=form)):
        drafter = Pairs("x", head, view, **ROOM, width=3)
        show(drafter, 0, tokens)
        draft = drafter.propose([Row(0, tokens, SamplingParams(), Noise(1, 4), 3)])[0]
        made.append(drafter._last[0])
        trees.append((draft.tokens, draft.parents))
    apart = (made[1] - made[0]).norm() / made[0].norm()
    assert 0 < apart < (0.1 if form == "int8" else 1e-4)
    assert trees[0] == trees[1] or form == "int8"
    assert len(trees[0][0]) == 10
    assert any(isinstance(part, torch.nn.Linear) for part in head.modules())


CHAINED = NATIVE | {
    "norm of the output": lambda: tiny.eagle(tiny.eagle_config("llama", fc_norm=True, norm_output=True)),
    "some tokens": lambda: tiny.eagle(tiny.eagle_config("llama", draft_vocab=40)),
    "fewer tokens than the target, all of them said": lambda: tiny.eagle(
        tiny.eagle_config("llama", own_embedding=True, layer={"vocab_size": 50}, draft_vocab=50)
    ),
}


@pytest.mark.parametrize(
    ("family", "name"), [*(("llama", name) for name in CHAINED), ("gemma2", "mtp"), ("gemma2", "eagle-1")]
)
def test_a_round_in_one_call_is_the_chain_level_by_level(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests, each with its own depth and temperature; a softcap and a scaled embedding where Gemma has
    them. Then once more, when there is nothing new to read, and behind a few tokens more."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    directory = tiny.family(family)
    view = view_of(NativeDecoder(load_config(directory), directory, "float32", 256), form="float32")
    head = {"mtp": tiny.mtp, "eagle-1": tiny.eagle1}[name](family) if family != "llama" else CHAINED[name]()
    rows = [
        Row(slot, tuple(range(5 + slot, 12 + 2 * slot)), SamplingParams(temperature=t), Noise(slot, 6), depth)
        for slot, (depth, t) in enumerate(((5, 0.8), (1, 0.0), (7, 1.3), (4, 0.0)))
    ]
    torch.manual_seed(0)
    states = [{b: torch.randn(len(row.tokens) - 1, view.hidden) for b in head.boundaries} for row in rows]
    further = [replace(row, tokens=(*row.tokens, 9, 8, 7)[: len(row.tokens) + 1 + row.slot % 3]) for row in rows]
    more = [{b: torch.randn(len(f.tokens) - len(r.tokens), view.hidden) for b in head.boundaries}
            for f, r in zip(further, rows, strict=True)]  # fmt: skip
    calls, drafts, done, chained = [], [], NativeLayer.round, NativeLayer.chain
    for whole in (True, False):
        if whole:
            monkeypatch.setattr(NativeLayer, "round", lambda *a: (calls.append("round"), done(*a))[1])
            monkeypatch.setattr(NativeLayer, "chain", lambda *a: (calls.append("chain"), chained(*a))[1])
        else:
            monkeypatch.setattr(NativeLayer, "drafts", property(lambda _: False))
            monkeypatch.setattr(NativeLayer, "chain", lambda *_: None)
        drafter = Pairs("x", head, view, **ROOM)
        for row, shown in zip(rows, states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, shown)
        drafts.append([drafter.propose(rows) for _ in range(2)])
        for row, shown in zip(rows, more, strict=True):
            drafter.observe(row.slot, len(row.tokens) - 1, shown)
        drafts[-1].append(drafter.propose(further))
    assert calls == ["round", "chain", "round"]
    assert drafts[0] == drafts[1]
    assert [len(draft) - 1 for draft in drafts[0][0]] == [5, 1, 7, 4]
    assert len({token for draft in drafts[0][0] for token in draft.tokens[1:]}) > 4


@pytest.mark.parametrize("name", ["plain", "some tokens", "joined pairs", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_end_where_they_are_not_sure_any_more(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteenths are those of the chances in torch, level by level; a chain ends behind the token with which the
    product of what they stand for falls below its floor. One row stops while another goes on. Beside the chains stand
    the likeliest of what was not said, every node behind its parent and the likelier ones first."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    directory = tiny.family("llama")
    view = view_of(NativeDecoder(load_config(directory), directory, "float32", 256), form="float32")
    head = CHAINED[name]()
    rows = [
        Row(slot, tuple(range(5 + slot, 12 + slot)), SamplingParams(temperature=temperature), Noise(slot, 6), depth)
        for slot, depth in enumerate((6, 3, 7))
    ]
    torch.manual_seed(0)
    states = [{b: torch.randn(6, view.hidden) for b in head.boundaries} for _ in rows]
    stands = array("f", [*(0.5 + i / 32 for i in range(16)), *(0.2 + i / 64 for i in range(16))])

    def proposed(floors: tuple[float, ...]) -> list[Draft]:
        drafter = Pairs("x", head, view, **ROOM)
        for row, shown in zip(rows, states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, shown)
        return drafter.propose([replace(r, stands=stands, floor=f) for r, f in zip(rows, floors, strict=True)])

    assert Pairs("x", head, view, **ROOM).stops
    whole = proposed((0.0, 0.0, 0.0))
    assert [max(draft.depths()) for draft in whole] == [6, 3, 7]
    assert all(len(draft.sure) == len(draft.chances) == len(draft) - 1 for draft in whole)
    assert [len(draft) for draft in whole] == [1 + depth + BESIDE for depth in (6, 3, 7)]
    chains = [chain_of(draft) for draft in whole]
    ends: list[int] = []
    for floors in ((0.5, 0.5, 0.5), (0.05, 0.3, 0.2), (0.0, 0.9, 0.1)):
        for draft, full, floor in zip(proposed(floors), chains, floors, strict=True):
            chances = list(itertools.accumulate((stands[i] for i in full.sure), operator.mul))
            end = next((i + 1 for i, chance in enumerate(chances) if chance < floor), len(chances))
            chain = chain_of(draft)
            assert (chain.tokens, chain.sure) == (full.tokens[: end + 1], full.sure[:end])
            assert chain.chances == pytest.approx(chances[:end])
            assert draft.chances == sorted(draft.chances, reverse=True)
            ends.append(end)
    assert len(set(ends)) > 3
    seen: dict[int, list[Tensor]] = {row.slot: [] for row in rows}
    grow = pairs.grow

    def seeing(trees: Any, logits: Tensor, width: int, source: str) -> None:
        for tree, said in zip(trees, logits, strict=True):
            seen[tree.row.slot].append(said)
        grow(trees, logits, width, source)

    monkeypatch.setattr(pairs, "grow", seeing)
    monkeypatch.setattr(NativeLayer, "drafts", property(lambda _: False))
    monkeypatch.setattr(NativeLayer, "chain", lambda *_: None)
    for draft, laws, row, full, chain in zip(proposed((0.0,) * 3), seen.values(), rows, whole, chains, strict=True):
        assert draft.tokens == chain.tokens
        chances, above = [chances_of(law, row, level) for level, law in enumerate(laws)], 1.0
        expected = []
        for level, said in enumerate(draft.tokens[1:]):
            own = chances[level].pop(said, 0.0)
            assert abs(min(own * 16, 15.99) - 0.5 - chain.sure[level]) <= 0.51 + own / 2
            near = sorted(chances[level].values(), reverse=True)[:BESIDE] if own else []
            expected += [above * stands[16 + min(int(chance * 16), 15)] for chance in near]
            above *= stands[chain.sure[level]]
        beside = [chance for chance, sure in zip(full.chances, full.sure, strict=True) if sure >= 16]
        assert beside == pytest.approx(sorted(expected, reverse=True)[:BESIDE], rel=0.15)


def chain_of(draft: Draft) -> Draft:
    """What a drafter said first of all, without what stands beside it."""
    chain = Draft.root(draft.tokens[0])
    for node, sure in enumerate(draft.sure, start=1):
        if sure < 16:
            chain.add(draft.tokens[node], len(chain) - 1, draft.sources[node])
            chain.sure.append(sure)
            chain.chances.append(draft.chances[node - 1])
    return chain


def chances_of(law: Tensor, row: Row, level: int) -> dict[int, float]:
    """The chances of the eight likeliest tokens of logits to be drawn, with the target's noise behind a level."""
    greedy = row.params.greedy
    logs, tokens = (law.double() / (1.0 if greedy else row.params.temperature)).log_softmax(-1).topk(8)
    if not greedy:
        noise = [rng.gumbel_scalar(row.noise.target(level), int(token)) for token in tokens]
        logs = logs + torch.tensor(noise, dtype=torch.float64)
        logs = logs.log_softmax(-1)
    return dict(zip(tokens.tolist(), logs.exp().tolist(), strict=True))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_user_s_head(kernels: str, tmp_path) -> None:
    """From a directory, beside plain decoding."""
    save_head(tiny.eagle(tiny.eagle_config("llama", draft_vocab=50)), tmp_path / "head")
    llm = LLM(tiny.family("llama"), draft=f"eagle3:{tmp_path / 'head'}", kv_tokens=512, kernels=kernels, width=2)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True)
    drafted = llm.generate([5, 6, 7, 8], params, depth=3)[0]
    assert drafted.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
    assert drafted.stats.by_source["eagle3"].drafted > 20


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_hidden": 16}, "states of 16"),
        ({"layer": {"vocab_size": 65}, "draft_vocab": 65}, "65 tokens"),
        ({"layer": {"hidden_size": 16}}, "none of its own"),
        ({"boundaries": (0, 1, 4)}, "from 0 to 3"),
        ({"boundaries": (-1, 1, 2)}, "from 0 to 3"),
        ({"boundaries": (2, 1, 2)}, "different"),
    ],
)
def test_a_head_for_another_target(changes: dict, says: str) -> None:
    head = tiny.eagle(tiny.eagle_config("llama", **changes))
    with pytest.raises(LoadError, match=says) as error:
        Pairs("eagle3", head, target(), **ROOM)
    assert "\n" not in str(error.value)
