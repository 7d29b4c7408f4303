"""Block drafters, beyond what every head must do: what of a prefix is read again, alignment,
thresholds.

A head that reads the states of the wrong position, sees too much or too little of its block, or
whose slots are read one off still drafts, only worse: so one that knows a text must be right about
all of it, and faults must show."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.devices import as_tensor
from forerun.draft.block import proposer as block
from forerun.draft.block.formats import BlockConfig
from forerun.draft.block.module import BlockHead, save_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.proposer import DraftRequest
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.runtime.torch_runner import Runner
from forerun.verify import Noise
from tests import tiny
from tests.draft import watching
from tests.draft.heads import PLAIN, ROOM
from tests.draft.twins import BlockTwin, states_of, target
from tests.draft.watching import Watch, run, same_as_twin, show
from tests.engine import build
from tests.texts import plain as plain_texts


def head_of(**changes: Any) -> BlockHead:
    return tiny.block(tiny.block_config("llama", **changes))


def engine_of(
    head: BlockHead, width: int = 1, *, chunk: int = 64, rule: str = "match", **room: int
) -> Engine:
    return watching.engine_of("block", head, width, chunk=chunk, rule=rule, **room)


def test_states_of_a_prefix_that_the_cache_holds_are_left_out() -> None:
    """They come again in pieces."""
    head, tokens = head_of().double(), tuple(range(5, 25))
    drafter, plain = BlockProposer(head, target(), **ROOM), BlockProposer(head, target(), **ROOM)
    row = DraftRequest(0, tokens, SamplingParams(temperature=1.0), Noise(3, 19), 4)
    show(drafter, 0, tokens)
    show(plain, 0, tokens)
    expected = plain.propose([row])[0].tokens
    assert drafter.propose([row])[0].tokens == expected
    drafter.close(0)
    drafter.open(0, tokens)
    assert drafter.cache.length[0] == 16
    parts = states_of(tokens[:-1], drafter.aux_hidden_layers)
    for start, end in ((4, 7), (7, 17), (17, 18), (18, 19)):
        shown = parts[start:end].split(drafter.target.hidden, -1)
        drafter.observe(0, start, dict(zip(drafter.aux_hidden_layers, shown, strict=True)))
    assert len(drafter.pending[0]) == 3
    assert drafter.propose([row])[0].tokens == expected
    for layer in plain.cache.keys:
        for kind in ("keys", "values"):
            mine, theirs = (
                getattr(d.cache, kind)[layer][d.cache.pages.rows[0, :19]] for d in (drafter, plain)
            )
            assert torch.allclose(mine, theirs, atol=1e-9)


def test_context_that_begins_late_is_not_shared() -> None:
    """Its keys have other positions."""
    tokens = tuple(range(5, 25))
    for first, shared in ((0, 16), (3, 0)):
        drafter = BlockProposer(head_of().double(), target(), **ROOM)
        show(drafter, 0, tokens, first)
        row = DraftRequest(0, tokens, SamplingParams(), Noise(3, 19), 4)
        assert len(drafter.propose([row])[0]) == 5
        drafter.close(0)
        drafter.open(0, tokens)
        assert drafter.cache.length[0] == shared


@pytest.mark.parametrize("fault", ["a causal block", "states one off", "slots one off"])
def test_a_fault_would_be_seen(fault: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparisons with the twin in test_heads.py."""
    head = head_of()
    if fault == "a causal block":
        monkeypatch.setattr(BlockConfig, "is_causal", lambda self, layer: True)
    engine = engine_of(head)
    if fault == "states one off":
        observe = BlockProposer.observe

        def shifted(self: BlockProposer, slot: int, start: int, features: Any) -> None:
            rolled = {layer: as_tensor(states).roll(1, 0) for layer, states in features.items()}
            observe(self, slot, start, rolled)

        monkeypatch.setattr(BlockProposer, "observe", shifted)
    run(engine, (0, 1), 8, 3)
    expected = head
    if fault == "slots one off":
        expected = BlockHead(replace(head.config, sample_from_anchor=False, block=5))
        expected.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        same_as_twin(watch, "block", expected)


# ---------------------------------------------------------------- alignment


PROMPT, LENGTH, DEPTH = 6, 26, 3
PARAMS = SamplingParams.pure(max_tokens=LENGTH, temperature=1.5, seed=3, ignore_eos=True)


def knowing(sample_from_anchor: bool) -> tuple[BlockHead, list[int]]:
    """A head that knows a text, and the text: from every root its slots predict what comes next."""
    plain = Engine(Runner(tiny.decoder(tiny.family("llama")), **ROOM), {})
    request = plain.add(build.prompts()[2][:PROMPT], PARAMS)
    build.finish(plain)
    text = tuple(request.tokens)
    wide = {"hidden_size": 128, "num_hidden_layers": 1}
    head = head_of(
        **PLAIN, sample_from_anchor=sample_from_anchor, block=DEPTH + (not sample_from_anchor), own_embedding=True,
        own_head=True, layer=wide,
    ).double()  # fmt: skip
    twin, outputs, wanted = BlockTwin(head), [], []
    for root in range(PROMPT, len(text) - 1):
        after = text[root + 1 : root + 1 + DEPTH]
        outputs += twin.outputs(text[: root + 1])[head.config.first :][: len(after)]
        wanted += after
    assert len(outputs) <= 128, "more than a linear head of this width can know"
    answers = torch.nn.functional.one_hot(torch.tensor(wanted), tiny.VOCAB).double()
    head.lm_head.weight.copy_(100 * torch.linalg.lstsq(torch.stack(outputs), answers).solution.T)
    return head, list(text)


@pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["anchor first", "fill-in"])
def test_a_head_that_knows_the_text_is_right_about_all_of_it(sample_from_anchor: bool) -> None:
    """And the same head, its slots read as those of the other layout, is right about next to
    nothing."""
    head, text = knowing(sample_from_anchor)
    other = BlockHead(replace(head.config, sample_from_anchor=not sample_from_anchor)).double()
    other.load_state_dict(head.state_dict())
    accepted = []
    for drafter in (head, other.requires_grad_(False)):
        engine = engine_of(drafter)
        again = engine.add(text[:PROMPT], PARAMS, draft="it", depth=DEPTH)
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
    weight = head.lm_head.weight
    weight.add_(0.03 * torch.randn_like(weight) * weight.std())
    engine = engine_of(head, width)
    again = engine.add(text[:PROMPT], PARAMS, draft="it", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert len({accepted for drafted, accepted in again.stats.rounds if drafted}) > 2
    assert again.stats.accepted < again.stats.drafted
    same_as_twin(watch, "block", head, every=width)


# ---------------------------------------------------------------- how far it goes


@pytest.mark.parametrize("width", [1, 3])
def test_paths_below_the_threshold_are_not_followed(width: int) -> None:
    """A node has children if and only if the product of confidences down to it reaches the
    threshold."""
    head, tokens = head_of(), (5, 6, 7, 8, 9)
    with torch.no_grad():
        head.confidence_head.proj.weight.mul_(0.3)
    drafter, twin = BlockProposer(head.double(), target(), **ROOM, width=width), BlockTwin(head)
    show(drafter, 0, tokens)
    row = DraftRequest(0, tokens, SamplingParams(temperature=1.0), Noise(3, 4), 4)
    whole = drafter.propose([row])[0]
    assert len(whole) == 1 + 4 * width, "by default all are followed"
    confidence = {0: twin.confidence(tokens, ())}
    for node in range(1, len(whole)):
        path = tuple(whole.tokens[i] for i in whole.path_to(node)[1:])
        if len(path) < 4:
            confidence[node] = confidence[whole.parents[node]] * twin.confidence(tokens, path)
    values = sorted(confidence.values())
    for drafter.threshold in ((a + b) / 2 for a, b in pairwise(values)):
        cut = drafter.propose([row])[0]
        for node in range(len(cut)):
            path = tuple(cut.tokens[i] for i in cut.path_to(node)[1:])
            product = math.prod(twin.confidence(tokens, path[:i]) for i in range(len(path)))
            assert not path or product >= drafter.threshold
        if width == 1:
            below = (i for i in range(4) if confidence[i] < drafter.threshold)
            assert len(cut) - 1 == next(below, 4)
    drafter.threshold = 1.0
    assert len(drafter.propose([row])[0]) == 1


@pytest.mark.parametrize("rule", ["match", "token", "tree"])
def test_a_threshold_changes_no_text(rule: str) -> None:
    """At temperature 0, where every lossless rule says the target's own tokens."""
    texts, drafted = [], []
    for draft, threshold in (("off", 0.0), ("it", 0.0), ("it", 0.3)):
        engine = engine_of(head_of(), 1 if rule == "token" else 2, rule=rule)
        engine.proposers["it"].threshold = threshold
        requests = [
            engine.add(build.prompts()[i], build.params(i, 0.0, 16), draft=draft, depth=4)
            for i in range(4)
        ]
        build.finish(engine)
        texts.append([r.tokens for r in requests])
        drafted.append(sum(r.stats.drafted for r in requests))
    assert texts[0] == texts[1] == texts[2]
    assert 0 < drafted[2] < drafted[1]


def test_without_states_or_room_there_is_no_draft() -> None:
    drafter = BlockProposer(head_of().double(), target(), tokens=24, page=4, slots=4)

    def drafted(slot: int, tokens: tuple[int, ...], depth: int = 2) -> int:
        row = DraftRequest(slot, tokens, SamplingParams(), Noise(1, len(tokens) - 1), depth)
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
    """The masks after it reach past the target's context."""
    engine, limit = engine_of(head_of(block=12)), target().context
    prompt = (build.prompts()[7] * 7)[: limit - 8]
    params = SamplingParams.pure(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)
    request = engine.add(prompt, params, draft="it", depth=12)
    build.finish(engine)
    assert len(request.tokens) == limit and request.stats.drafted > 0


# ---------------------------------------------------------------- in use


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_the_native_products_compute_what_is_trained(form: str) -> None:
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    head, tokens = head_of(own_head=True, block=5), (5, 6, 7, 8, 9, 10)
    found = []
    for view in (target(), replace(target(), form=form)):
        drafter = BlockProposer(head, view, **ROOM)
        show(drafter, 0, tokens)
        row = DraftRequest(0, tokens, SamplingParams(), Noise(1, 5), 5)
        drafter.propose([row])
        (grown,) = drafter._run_blocks([block.Tree(row)])
        previous = torch.tensor([10, 3, 3, 3, 3])
        logits = drafter.head.over_target_vocab(
            drafter.head.add_markov_bias(grown.logits, previous)
        )
        found.append((logits, drafter.head.confidence_logit(grown.outputs, previous)))
    for mine, theirs in zip(*found, strict=True):
        assert (theirs - mine).norm() / mine.norm() < (0.1 if form == "int8" else 1e-4)
    assert not isinstance(drafter.head.fc, torch.nn.Linear) and isinstance(head.fc, torch.nn.Linear)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_user_s_threshold(temperature: float, tmp_path: Path) -> None:
    """Less is drafted, and the text is plain decoding's."""
    save_block(head_of(), tmp_path / "drafter")
    params = SamplingParams.pure(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    model, draft, drafted = tiny.family("llama"), f"block:{tmp_path / 'drafter'}", []
    for threshold in (0.0, 0.2, 1.0):
        llm = LLM(model, draft=draft, kv_tokens=512, draft_threshold=threshold)
        out = llm.generate([5, 6, 7, 8], params, depth=4)[0]
        assert [out.token_ids] == plain_texts(model, [[5, 6, 7, 8]], params)
        drafted.append(out.stats.drafted)
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_a_threshold_needs_a_confidence_head(tmp_path: Path) -> None:
    save_block(head_of(**PLAIN), tmp_path / "drafter")
    draft = f"block:{tmp_path / 'drafter'}"
    with pytest.raises(ConfigError, match=r"draft_threshold=0.3 needs .* confidence head") as error:
        LLM(tiny.family("llama"), draft=draft, kv_tokens=512, draft_threshold=0.3)
    assert "\n" not in str(error.value)
