"""Several rounds in one native call give the same tokens, drafts and cache rows as one round per
step, whatever ends the call."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from forerun.draft.compose import InTurn
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.proposer import DraftRequest
from forerun.engine import guard, multi_step
from forerun.engine.depth import BatchState
from forerun.engine.draft_learning import LEAST_MATCH_STEPS
from forerun.engine.draft_state import ProposedDraft
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import StateError
from forerun.kernels import native
from forerun.kernels.draw import packed
from forerun.rng import GOLDEN, MASK, mix
from forerun.runtime.rounds import Grams, RoundsResult
from forerun.sampling.params import GREEDY, SamplingParams
from forerun.types import Draft, Verdict
from tests.engine import build

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")

DRAFTS = ("off", "suffix", "eagle", "both")
FAMILIES = ("llama/q4_1", "qwen2/q4_k_m", "gemma2")  # gemma2 has windows and softcaps
TOKENS = 60


class VerifyAll(build.Eager):
    """A policy that verifies every drafted node, whatever a pass costs on this machine."""

    def pass_costs(self, most: int, batch: BatchState) -> array[float]:
        return array("d", [1.0] * (most + 1))

    def num_worth_verifying(
        self, path_probs: Sequence[float], batch: BatchState, draft: Draft | None = None
    ) -> int:
        return len(path_probs)


def engine(
    draft: str = "both", family: str = FAMILIES[0], seconds: float = 10.0, **options: Any
) -> Engine:
    """Return an engine that always drafts, with calls of up to 32 rounds."""
    form = "" if "/" in family else "float32"
    wanted = ["suffix", "eagle"] if draft == "both" else [draft]
    made = build.engine(family, wanted, width=1, form=form, **options)
    if draft == "both":
        made.proposers["both"] = InTurn((made.proposers["suffix"], made.proposers["eagle"]))
    made.set_policy(VerifyAll())
    made.guard.cold = 1 << 30  # otherwise it pauses drafting, which is slow for a tiny target
    made.multi_step.seconds = seconds
    return made


@pytest.fixture(autouse=True)
def without_request_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_LOSS", float("inf"))


def add(
    made: Engine, draft: str, temperature: float = 0.0, prompt: int = 3, **params: Any
) -> Request:
    given = {"max_tokens": TOKENS, "ignore_eos": True} | params
    sampling = SamplingParams(temperature=temperature, seed=5, **given)
    return made.add(build.prompts()[prompt], sampling, draft=draft, depth="auto")


def finished(made: Engine, request: Request) -> tuple[list[int], str | None]:
    build.finish(made)
    return list(request.output), request.finish_reason


def plain(temperature: float = 0.0, family: str = FAMILIES[0], **params: Any) -> list[int]:
    """Return the tokens of a single request without drafts, with one round per step."""
    made = engine("off", family, seconds=0.0)
    return finished(made, add(made, "off", temperature, **params))[0]


def add_repeating(made: Engine, draft: str) -> Request:
    """Add a request whose output repeats itself, so that there is something to copy."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return made.add([7, 8, 9, 10, 11, 12] * 6, sampling, draft=draft, depth="auto")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rounds of each native call."""
    found: list[int] = []
    run = multi_step.run_rounds

    def counted(*arguments: Any, **options: Any) -> list[RoundsResult]:
        results = run(*arguments, **options)
        found.append(len(results[0].rounds))
        return results

    monkeypatch.setattr(multi_step, "run_rounds", counted)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_one_round_per_step(
    calls: list[int], family: str, draft: str, temperature: float
) -> None:
    expected = plain(temperature, family)
    assert not calls and len(expected) == TOKENS
    made = engine(draft, family)
    request = add(made, draft, temperature)
    assert finished(made, request) == (expected, "length")
    if draft in ("off", "eagle"):  # the others also copy, with one round per step
        assert max(calls) > 3
    stats = request.stats
    assert stats.steps == len(stats.rounds) == len(stats.depths)
    assert stats.accepted + stats.steps == TOKENS
    assert draft == "off" or stats.reasons.total() == stats.steps
    assert draft == "off" or stats.drafted > 0


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5, "temperature": 1.2},
        {"top_p": 0.7, "min_p": 0.05, "temperature": 0.9},
        {"max_tokens": 7},
        {"max_tokens": 2},
        {"stop_token_ids": list(range(3, 40)), "temperature": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_sampling_and_ends_equal_those_of_single_steps(draft: str, params: dict[str, Any]) -> None:
    ends = []
    for seconds in (0.0, 10.0):
        made = engine(draft, seconds=seconds)
        ends.append(finished(made, add(made, draft, **params)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("draft", DRAFTS)
def test_requests_that_need_python_run_one_round_per_step(calls: list[int], draft: str) -> None:
    """Penalties, log-probabilities, a trace or a fixed depth, of any request of the batch."""
    for params in ({"frequency_penalty": 0.5}, {"logprobs": 1}, {"min_tokens": TOKENS}):
        made = engine(draft)
        finished(made, add(made, draft, **params))
    made = engine(draft)
    prompt, params = build.prompts()[3], build.params(0, 0.0)
    made.add(prompt, params, draft=draft, depth="auto", trace=True)
    build.finish(made)
    if draft != "off":
        made.add(prompt, params, draft=draft, depth=2)
        build.finish(made)
    made.add(prompt, params, draft=draft, depth="auto", trace=True)
    made.add(prompt, params, draft=draft, depth="auto")
    build.finish(made)
    assert not calls


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_makes_the_drafts_of_single_steps(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Tokens, parents, bins and probabilities agree after rounds that accepted first choices or
    siblings."""
    expected: list[Draft] = []
    pairs: list[tuple[Draft, Draft]] = []
    begin, draft_of = EagleProposer.begin_rounds, multi_step._draft_of

    def begin_rounds(self: EagleProposer, rows: Sequence[DraftRequest], room: int) -> Any:
        (row,) = rows
        head, pending = begin(self, rows, room), self.pending[row.slot]
        saved = list(pending.raw), pending.num_raw, self.cache.length[row.slot]
        expected[:] = self.propose([row])
        pending.raw, pending.num_raw, self.cache.length[row.slot] = saved
        return head

    def observed(found: Any, root: int, source: str) -> Draft:
        made = draft_of(found, root, source)
        if expected:
            pairs.append((expected.pop(), made))
        return made

    monkeypatch.setattr(EagleProposer, "begin_rounds", begin_rounds)
    monkeypatch.setattr(multi_step, "_draft_of", observed)
    made = engine("eagle", seconds=1.0)
    monkeypatch.setattr(multi_step, "MAX_ROUNDS", 3)
    finished(made, add(made, "eagle", temperature))
    assert len(pairs) > 4
    for step, call in pairs:
        for field in ("tokens", "parents", "sources", "confidence_bins"):
            assert getattr(step, field) == getattr(call, field)
        assert step.path_probs == pytest.approx(call.path_probs, rel=1e-6)
    assert any(len(set(step.parents)) < len(step.parents) for step, _ in pairs)  # siblings


@pytest.mark.parametrize("draft", ["off", "eagle"])
def test_cache_rows_and_pending_states_are_those_of_single_steps(draft: str) -> None:
    found = []
    for seconds in (0.0, 10.0):
        made = engine(draft, seconds=seconds)
        request = add(made, draft, 0.7, max_tokens=200)
        while request.produced < 40:
            made.step_or_raise()
        made.multi_step.seconds = 0.0
        cache = made.target.cache
        rows = [
            kept[: request.prompt_length + 39].float().numpy()
            for layer in cache.keys
            for kept in cache.read(request.slot, layer, 0)
        ]
        head = []
        if draft == "eagle":
            proposer = made.proposers["eagle"]
            assert isinstance(proposer, EagleProposer)
            assert proposer.pending[request.slot].end == len(request.tokens) - 1
            both = proposer.cache.read(request.slot, 0, 0)
            head = [kept[: request.prompt_length + 30].float().numpy() for kept in both]
        found.append((request.tokens[: request.prompt_length + 40], [*rows, *head]))
        made.abort(request)
        build.finish(made)
    assert found[0][0] == found[1][0]
    for step, call in zip(found[0][1], found[1][1], strict=True):
        assert np.array_equal(step, call)


@pytest.mark.parametrize("draft", DRAFTS)
def test_requests_that_join_pause_and_abort(draft: str) -> None:
    """A second request joins after a call, the first pauses and resumes, a third is aborted."""
    alone = [plain(0.8, prompt=prompt) for prompt in (3, 4)]
    made = engine(draft, tokens=400)
    first = add(made, draft, 0.8)
    while first.produced < 10:
        made.step_or_raise()
    second = add(made, draft, 0.8, 4)
    made.step_or_raise()
    made.pause(first)
    for _ in range(2):
        made.step_or_raise()
    made.resume(first)
    third = add(made, draft, 0.8, 5)
    made.step_or_raise()
    made.abort(third)
    build.finish(made)
    assert [list(first.output), list(second.output)] == alone


@pytest.mark.parametrize("draft", DRAFTS)
def test_small_pools_and_the_end_of_the_context(draft: str) -> None:
    """Without room for a call, rounds run one per step, and the output stays the same."""
    expected = plain(0.8, max_tokens=230)
    for tokens in (300, 260):
        made = engine(draft, tokens=tokens)
        assert finished(made, add(made, draft, 0.8, max_tokens=230))[0] == expected


@pytest.mark.parametrize("draft", DRAFTS[1:])
@pytest.mark.parametrize("pause", [3, 20, 70, 100])
def test_rounds_in_a_pause_of_the_guard_draft_nothing(
    calls: list[int], draft: str, pause: int
) -> None:
    """After the pause the drafter goes on where it left off."""
    expected = plain(max_tokens=180)
    made = engine(draft)
    request = add(made, draft, 0.0, max_tokens=180)
    while request.produced < 8:
        made.step_or_raise()
    before = request.stats.drafted
    made.guard.paused_steps = pause
    while made.guard.paused_steps and made.busy:
        made.step_or_raise()
    assert request.stats.drafted == before
    assert finished(made, request)[0] == expected
    assert request.stats.drafted > before or draft == "suffix"
    assert sum(calls) > 20


def test_logits_that_are_not_finite_end_the_request_as_in_a_step() -> None:
    made = engine("eagle")
    request = add(made, "eagle")
    while request.produced < 4:
        made.step_or_raise()
    with build.poisoned(made), pytest.raises(StateError):
        made.step_or_raise()
    made.reset()
    again = add(made, "eagle")
    assert len(finished(made, again)[0]) == TOKENS


def test_a_copy_ends_the_call(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """When the text repeats itself, the copying drafter is called, and its drafts are accepted."""
    made = engine("both")
    monkeypatch.setattr(made.drafting, "least_match", lambda *_: 2)
    request = add_repeating(made, "both")
    build.finish(made)
    assert request.stats.by_source["suffix"].accepted > 0
    assert len(calls) > 1


def test_the_shortest_match_that_pays_is_recomputed_after_copies_and_periodically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = engine("suffix")
    request = add(made, "suffix")
    made.step_or_raise()
    drafting, computed = made.drafting, []
    compute = drafting._least_match

    def counted(*arguments: Any) -> int:
        computed.append(arguments)
        return compute(*arguments)

    monkeypatch.setattr(drafting, "_least_match", counted)
    (part,) = drafting.proposers["suffix"].parts
    first = drafting.least_match(request, part, 2, 1)
    assert drafting.least_match(request, part, 2, 1) == first and len(computed) == 1
    drafting.least_match(request, part, 2, 4)
    assert len(computed) == 2, "it depends on the batch size"
    drafting.steps += LEAST_MATCH_STEPS
    drafting.least_match(request, part, 2, 1)
    assert len(computed) == 3
    copy = Draft.chain(request.tokens[-1], [5], "suffix")
    drafting.state(request).proposed.append(ProposedDraft("suffix", "suffix, 2 bits", copy))
    drafting.record_verdict(request, Draft.root(request.tokens[-1]), Verdict([5], [0]))
    drafting.least_match(request, part, 2, 1)
    assert len(computed) == 4


def test_new_requests_share_the_shortest_match_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("suffix")
    requests = [add(made, "suffix", prompt) for prompt in (0, 1)]
    made.step_or_raise()
    drafting, computed = made.drafting, []
    monkeypatch.setattr(drafting, "_least_match", lambda *_: computed.append(2) or 2)
    (part,) = drafting.proposers["suffix"].parts
    for request in requests:
        assert drafting.least_match(request, part, 2, 2) == 2
    assert len(computed) == 1
    drafting.state(requests[1]).has_copied = True
    drafting.least_match(requests[1], part, 2, 2)
    assert len(computed) == 2, "after a copy a request has a record of its own"


def test_output_of_other_requests_is_watched_for_matches_until_forget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only output of the same tenant is watched, and `forget` drops all of it."""
    made = engine("suffix")
    monkeypatch.setattr(made.drafting, "least_match", lambda *_: 3)
    watched: list[int] = []
    run = multi_step.run_rounds

    def seen(decoder: Any, cache: Any, requests: Any, **options: Any) -> list[RoundsResult]:
        watched.append(len(requests[0].grams))
        return run(decoder, cache, requests, **options)

    monkeypatch.setattr(multi_step, "run_rounds", seen)
    sets = made.multi_step._grams_of
    monkeypatch.setattr(made.drafting, "is_resting", lambda *_: False)
    for seed, (tenant, expected) in enumerate((("a", {1}), ("a", {2}), ("b", {1}))):
        watched.clear()
        sampling = SamplingParams(max_tokens=TOKENS, temperature=2.0, seed=seed, ignore_eos=True)
        made.add(build.prompts()[2], sampling, draft="suffix", depth="auto", tenant=tenant)
        build.finish(made)
        assert set(watched) == expected
    assert len(sets) == 1
    made.proposers["suffix"].forget()
    assert not sets


def test_native_rounds_add_their_tokens_to_the_watched_sequences(
    monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    made = engine("suffix")
    monkeypatch.setattr(made.drafting, "least_match", lambda *_: 3)
    monkeypatch.setattr(made.drafting, "is_resting", lambda *_: False)
    request = add(made, "suffix", 2.0, max_tokens=150)
    while request.produced < 100:
        made.step_or_raise()
    assert max(calls) > 3
    (grams,) = made.drafting.state(request).text._grams.values()
    tokens = request.tokens[: grams.noted]
    expected = {_key(tokens[i : i + 3]) for i in range(len(tokens) - 2)}
    assert len(tokens) > request.prompt_length + 20
    assert {key for key in grams._slots.tolist() if key} == expected
    build.finish(made)


SEVERAL: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 9, "max_tokens": 30},
    {"temperature": 0.9, "stop_token_ids": list(range(9))},
]


def several(made: Engine, draft: str, together: bool = True) -> list[tuple[list[int], str | None]]:
    """Run requests with different parameters, the last one added a little later."""
    requests = []
    for prompt, given in enumerate(SEVERAL):
        params = {"max_tokens": TOKENS, "temperature": 0.0, "seed": prompt} | given
        sampling = SamplingParams(ignore_eos="stop_token_ids" not in given, **params)
        name = "off" if prompt == 2 else draft
        requests.append(made.add(build.prompts()[prompt], sampling, draft=name, depth="auto"))
        if prompt == 2:
            made.step_or_raise()
            made.step_or_raise()
        if not together:
            build.finish(made)
    build.finish(made)
    return [(list(request.output), request.finish_reason) for request in requests]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_requests_run_rounds_that_draft_nothing(
    calls: list[int], family: str, draft: str
) -> None:
    alone = several(engine("off", family, seconds=0.0), "off", together=False)
    made = engine(draft, family)
    made.guard.paused_steps = 1000 if draft != "suffix" else 0
    assert several(made, draft) == alone
    assert draft == "suffix" or max(calls) > 3


@pytest.mark.parametrize("draft", ["off", "eagle"])
def test_state_after_rounds_of_several_requests_is_that_of_single_steps(
    calls: list[int], draft: str
) -> None:
    """Compares cache rows, statistics, and the hidden states that a head has not read yet."""
    found = []
    for seconds in (0.0, 10.0):
        made = engine(draft, seconds=seconds)
        requests = [add(made, draft, 0.7, prompt, max_tokens=200) for prompt in (2, 3, 4)]
        while requests[0].produced < 3:
            made.step_or_raise()
        made.guard.paused_steps = 60
        while made.guard.paused_steps > 2:
            made.step_or_raise()
        made.multi_step.seconds = 0.0
        states = []
        for request in requests:
            while request.produced < 70:
                made.step_or_raise()
            cache, slot = made.target.cache, request.slot
            for layer in cache.keys:
                for kept in cache.read(slot, layer, 0):
                    states.append(kept[: request.prompt_length + 60].float().numpy())
            stats = request.stats
            found.append((request.tokens[: request.prompt_length + 60], stats.rounds[:50]))
            if draft == "eagle":
                proposer = made.proposers["eagle"]
                assert isinstance(proposer, EagleProposer)
                assert proposer.pending[slot].end == len(request.tokens) - 1
                for kept in proposer.cache.read(slot, 0, 0):  # made from the hidden states
                    states.append(kept[: request.prompt_length + 50].float().numpy())
        found.append(states)
    assert max(calls) > 5
    half = len(found) // 2
    for step, call in zip(found[:half], found[half:], strict=True):
        if isinstance(step, list):
            assert all(np.array_equal(a, b) for a, b in zip(step, call, strict=True))
        else:
            assert step == call


def test_one_request_with_a_copy_ends_the_call(
    monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    made = engine("suffix")
    monkeypatch.setattr(made.drafting, "least_match", lambda *_: 2)
    monkeypatch.setattr(made.drafting, "is_resting", lambda *_: False)
    first = add(made, "suffix", 2.0, 2)
    copies = add_repeating(made, "suffix")
    build.finish(made)
    assert copies.stats.by_source["suffix"].drafted > 0 and len(first.output) == TOKENS
    assert max(calls) < 20, "a call has up to 32 rounds"


def test_the_end_of_one_request_ends_the_call() -> None:
    """A waiting request gets the free slot without waiting for the others to end."""
    made = engine("off")
    first, second = add(made, "off", 0.0, 2, max_tokens=8), add(made, "off", 0.0, 3)
    while not first.finish_reason:
        made.step_or_raise()
    assert second.produced <= 9
    build.finish(made)


def test_logits_of_one_request_that_are_not_finite_end_the_call() -> None:
    """No request keeps anything of that round."""
    made = engine("off")
    made.multi_step.seconds = 0.0
    good, bad = add(made, "off", 0.8, 2), add(made, "off", 0.8, 3)
    while bad.produced < 4:
        made.step_or_raise()
    cache = made.target.cache
    own = cache.pages.rows[bad.slot, : cache.length[bad.slot]]
    cache.values[0][:, torch.from_numpy(own.astype("int64"))] = torch.nan
    made.multi_step.seconds = 60.0
    with pytest.raises(StateError, match="not finite"):
        made.step_or_raise()
    assert good.produced == bad.produced == 4


def test_a_request_that_drafts_beside_others_drafts_as_in_single_steps(calls: list[int]) -> None:
    found = []
    for seconds in (0.0, 10.0):
        made = engine("eagle", seconds=seconds)
        first, second = add(made, "eagle", 0.0, 2), add(made, "off", 0.8, 3)
        build.finish(made)
        found.append((first.stats.rounds, list(first.output), list(second.output)))
    assert found[0] == found[1] and any(accepted for _, accepted in found[0][0])


class TestGrams:
    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_contains_all_sequences_of_the_text(self, length: int) -> None:
        """Compared with a set; the text is added in pieces of several sizes."""
        generator = np.random.default_rng(1)
        text = generator.integers(0, 12, 3000).tolist()
        grams = Grams(length)
        for last in itertools.chain(range(1, 40, 3), [1000, 1001, 2500]):
            grams.update(text, last)
        known = {tuple(text[i : i + length]) for i in range(2500 - length + 1)}
        assert {key for key in grams._slots.tolist() if key} == {_key(gram) for gram in known}

    def test_a_break_matches_no_token(self) -> None:
        grams = Grams(2)
        grams.update([5, -1, 6, 7], 4)
        expected = {_key(gram) for gram in ((5, -1), (-1, 6), (6, 7))}
        assert {key for key in grams._slots.tolist() if key} == expected


def _key(tokens: Sequence[int]) -> int:
    """Return the key of a sequence, as `slot_of` of rounds.h does."""
    key = 0
    for token in tokens:
        key = mix((key + (token & MASK) * GOLDEN + 1) & MASK)
    return key or 1


def test_packed_sampling_parameters_have_the_size_of_the_c_struct() -> None:
    assert ctypes.sizeof(native.CSampling) == len(packed([GREEDY]))
