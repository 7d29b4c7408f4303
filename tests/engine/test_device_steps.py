"""Rounds on a device that runs one round ahead of the host give the tokens of one round per step,
for all proposers and all ends. `RecordedOperations` stands in for CUDA graphs; the host reads
results one round late, as on a GPU."""

from __future__ import annotations

import ast
import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from forerun.cache.attention import Segment
from forerun.draft.compose import InTurn
from forerun.draft.device_recycle import DeviceRecycle
from forerun.draft.draft_model import DraftModel
from forerun.draft.eagle.proposer import EagleProposer
from forerun.engine import guard
from forerun.engine.draft_learning import DraftLearning
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import StateError
from forerun.runtime import padded_pass
from forerun.runtime.device_rounds import DeviceRounds
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Verdict
from tests.engine import build
from tests.runtime.test_captured import RecordedOperations

TOKENS = 24


@pytest.fixture(autouse=True)
def without_request_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_LOSS", float("inf"))


def runners_of(engine: Engine) -> list[Runner]:
    parts = [part for proposer in engine.proposers.values() for part in proposer.parts]
    return [engine.target, *(part.runner for part in parts if isinstance(part, DraftModel))]


def engine(
    draft: str, family: str = "llama", late: bool = True, recorded: bool = True, **options: Any
) -> Engine:
    """Return an engine with recorded rounds: `late` ones, or one round per step."""
    wanted = {"in turn": ["suffix", "model"]}.get(draft, draft.split("+"))
    made = build.engine(family, wanted, **({"width": 1} | options))
    if "recycle" in draft:
        made.proposers["recycle"] = recycle = DeviceRecycle(torch.device("cpu"), False)
        if draft != "recycle":
            made.proposers[draft] = InTurn((made.proposers["suffix"], recycle))
    if draft == "in turn":
        made.proposers["in turn"] = InTurn((made.proposers["suffix"], made.proposers["model"]))
    if recorded:
        for runner in runners_of(made):
            runner.graphs = RecordedOperations()
        made.reset()
    made.set_policy(build.Eager())
    made.guard.cold = 1 << 30
    made.multi_step.seconds = 60.0 if late else 0.0
    return made


def add(
    made: Engine, draft: str, prompt: int = 3, depth: int | str = "auto", **given: Any
) -> Request:
    params = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 7 + prompt, "temperature": 0.0}
    sampling = SamplingParams(**(params | given))
    return made.add(build.prompts()[prompt], sampling, draft=draft, depth=depth)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device's operations in order: b(egin), l(aunch), r(esults)."""
    found: list[str] = []

    def noted(letter: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = work(*arguments)
            if result is not None:
                found.append(letter)
            return result

        return run

    for letter, name in (("b", "begin"), ("l", "launch"), ("r", "collect")):
        monkeypatch.setattr(DeviceRounds, name, noted(letter, getattr(DeviceRounds, name)))
    return found


def texts(
    draft: str, late: bool, sampled: dict[str, Any], depth: int | str = "auto", **options: Any
) -> list[list[int]]:
    """Return the tokens of four requests, two of them added a little later."""
    made = engine(draft, late=late, **options)
    requests = []
    for prompt in range(4):
        own = sampled if prompt % 2 else {}
        requests.append(add(made, draft, prompt, depth, **own))
        if prompt == 1:
            for _ in range(3):
                made.step_or_raise()
    build.finish(made)
    return [list(request.output) for request in requests]


def plain_texts(sampled: dict[str, Any], **options: Any) -> list[list[int]]:
    """Return the same tokens without drafts, recordings and late rounds."""
    return _plain_texts(repr((sampled, options)))


@functools.cache
def _plain_texts(given: str) -> list[list[int]]:
    sampled, options = ast.literal_eval(given)
    return texts("off", False, sampled, recorded=False, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8}, {"temperature": 1.1, "top_k": 9}])
@pytest.mark.parametrize(
    "draft",
    [
        *("off", "suffix", "model", "in turn", "shortlist", "eagle", "eagle1", "mtp"),
        *("recycle", "suffix+recycle"),
    ],
)
def test_tokens_equal_those_of_one_round_per_step(
    log: list[str], draft: str, sampled: dict[str, Any]
) -> None:
    assert texts(draft, True, sampled) == plain_texts(sampled)
    rounds = "".join(log)
    if draft not in ("suffix", "in turn", "suffix+recycle"):
        assert "bll" in rounds  # the second round is launched before the results of the first
        assert "rlrl" in rounds
    assert rounds.count("l") == rounds.count("r")


@pytest.mark.parametrize("draft", ["model", "eagle"])
def test_requests_of_different_depths_in_one_round(log: list[str], draft: str) -> None:
    """Chains are as deep as the deepest; each request accepts up to its own depth."""
    found = []
    for late in (False, True):
        made = engine(draft, late=late)
        depths = (1, 4, 2, 3)
        requests = [
            add(made, draft, prompt, depth, temperature=0.8, max_tokens=30)
            for prompt, depth in enumerate(depths)
        ]
        plain = add(made, draft, 4, max_tokens=30)
        build.finish(made)
        for request, depth in zip(requests, depths, strict=True):
            assert max(request.stats.depths) <= depth
        found.append([list(request.output) for request in (*requests, plain)])
    assert found[0] == found[1]
    assert "rlrl" in "".join(log)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", build.PROPOSERS)
def test_every_proposer_gives_the_same_tokens(draft: str) -> None:
    """Proposers that cannot draft on the device run one round per step."""
    sampled = {"temperature": 0.9, "top_p": 0.9}
    assert texts(draft, True, sampled) == plain_texts(sampled)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gemma2", "gemma3n-own-keys", "exaone4", "qwen3", "gpt_oss", "llama4"]
)
def test_families_give_the_same_tokens(log: list[str], family: str) -> None:
    """The device masks windows, writes keys of shared layers once, and routes experts."""
    sampled = {"temperature": 0.8}
    plain = plain_texts(sampled, family=family)
    assert texts("model", True, sampled, family=family) == plain
    assert "l" in log


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The position of each verified draft, and its tokens."""
    found: list[list[int]] = []
    record = DraftLearning.record_verdict

    def noted(self: DraftLearning, request: Request, verified: Draft, verdict: Verdict) -> None:
        found.append([len(request.tokens), *verified.tokens])
        record(self, request, verified, verdict)

    monkeypatch.setattr(DraftLearning, "record_verdict", noted)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["model", "eagle", "eagle1", "mtp", "recycle"])
def test_drafts_and_statistics_are_those_of_single_steps(
    drafts: list[list[int]], draft: str, temperature: float
) -> None:
    """Each round drafts the same tokens; accepted lengths and reasons follow."""
    found = []
    for late in (False, True):
        drafts.clear()
        made = engine(draft, late=late)
        # with a fixed depth no tree is pruned before it is verified
        depth = 4 if draft == "recycle" else "auto"
        request = add(made, draft, depth=depth, temperature=temperature, max_tokens=60)
        build.finish(made)
        stats = request.stats
        counts = stats.steps, stats.drafted, stats.accepted, stats.depths, stats.reasons
        found.append((list(drafts), counts))
    assert found[0] == found[1]
    assert stats.accepted > 0


@pytest.mark.parametrize("other", ["off", "model"])
def test_tables_learn_only_from_requests_that_they_draft_for(log: list[str], other: str) -> None:
    """Two drafters in a batch run without device rounds. A discarded round adds a few entries."""
    tables, found = [], []
    for late in (False, True):
        made = engine("recycle", late=late)
        made.proposers |= engine("model", late=late).proposers
        beside = add(made, other, 2, max_tokens=50)
        request = add(made, "recycle", 3, depth=3, max_tokens=50)
        build.finish(made)
        recycle = made.proposers["recycle"]
        assert isinstance(recycle, DeviceRecycle)
        tables.append(set(recycle.tables[""].held.keys.tolist()))
        found.append((list(request.output), list(beside.output), request.stats.rounds))
        if other == "model":
            found[-1] = *found[-1], beside.stats.rounds
    assert found[0] == found[1]
    assert tables[0] <= tables[1] and len(tables[1] - tables[0]) <= 2 * (3 * 2 + 1)
    assert other == "model" or "rlrl" in "".join(log)


def test_the_last_round_has_rows_for_a_full_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows suffice if all earlier rounds accept everything, or a request has just ended."""
    made, depth, nodes, found = engine("recycle"), 8, 16, []
    begin = DeviceRounds.begin

    def checked(rounds: DeviceRounds, requests: Any, drafter: Any, most: int) -> int:
        most = begin(rounds, requests, drafter, most)
        pages = made.target.cache.pages
        for each in requests if most else ():
            first = len(each.tokens) - 1 + min((most - 1) * (depth + 1), each.remaining + depth + 1)
            rows = first + nodes + 1
            found.append(rows)
            assert rows <= len(pages.held[each.slot]) * pages.size
            assert rounds._current and rows <= rounds._current.shape.keys
        return most

    monkeypatch.setattr(DeviceRounds, "begin", checked)
    monkeypatch.setattr(padded_pass, "MIN_KEYS", 32)
    text = build.prompts()[3] * 9
    for length in range(90, 118, 9):  # the keys of a shape are powers of two
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        made.add(text[:length], params, draft="recycle", depth=depth)
        build.finish(made)
    assert min(found) < 128 < max(found)


def test_tables_learn_from_rounds_without_drafts_in_a_pause_of_the_guard(log: list[str]) -> None:
    tables = []
    for late in (False, True):
        made = engine("recycle", late=late)
        request = add(made, "recycle", max_tokens=26)
        made.step_or_raise()
        made.guard.paused_steps = 28  # in longer ones the slot is closed
        build.finish(made)
        recycle = made.proposers["recycle"]
        assert isinstance(recycle, DeviceRecycle) and request.stats.drafted == 0
        tables.append(set(recycle.tables[""].held.keys.tolist()))
    assert len(tables[0]) > 20
    assert tables[0] <= tables[1] and len(tables[1] - tables[0]) <= 2
    assert "rlrl" in "".join(log)


def test_a_head_drafts_after_a_cached_prefix_that_it_has_not_read(
    log: list[str], drafts: list[list[int]]
) -> None:
    """Its positions count from the first hidden states that it received."""
    found = []
    for late in (False, True):
        made = engine("eagle", late=late)
        add(made, "off", 5, max_tokens=2)
        build.finish(made)
        drafts.clear()
        request = add(made, "eagle", 5, max_tokens=40)
        made.step_or_raise()
        proposer = made.proposers["eagle"]
        assert isinstance(proposer, EagleProposer) and proposer.pending[request.slot].begin > 0
        build.finish(made)
        found.append(list(drafts))
    assert found[0] == found[1]
    assert "rlrl" in "".join(log)


@pytest.mark.parametrize("draft", ["off", "model", "eagle", "recycle"])
def test_a_stop_token_inside_an_accepted_path_ends_the_request(draft: str) -> None:
    """The output ends at its first stop token or its limit, not at the end of a round."""
    for stop in (5, 20):
        given = {"stop_token_ids": list(range(stop, stop + 5)), "temperature": 1.0}
        assert texts(draft, True, given) == plain_texts(given)
    for limit in (2, 3, 6):
        made = engine(draft)
        request = add(made, draft, max_tokens=limit)
        build.finish(made)
        assert len(request.output) == limit and request.finish_reason == "length"


def test_the_end_of_a_request_ends_the_rounds() -> None:
    """A request that waits for the slot waits one more round, and not for others to end."""
    made = engine("off")
    first, second = add(made, "off", max_tokens=8), add(made, "off", 4, max_tokens=60)
    while not first.finish_reason:
        made.step_or_raise()
    assert second.produced <= 8 + 2
    build.finish(made)


@pytest.mark.parametrize("draft", ["off", "model", "in turn", "eagle", "suffix+recycle"])
def test_requests_that_join_pause_and_abort(draft: str) -> None:
    alone = []
    for prompt in (3, 4):
        made = engine("off", late=False, recorded=False)
        request = add(made, "off", prompt, temperature=0.8, max_tokens=60)
        build.finish(made)
        alone.append(list(request.output))
    made = engine(draft, tokens=400)
    made.multi_step.seconds = 0.02
    first = add(made, draft, temperature=0.8, max_tokens=60)
    while first.produced < 6:
        made.step_or_raise()
    second = add(made, draft, 4, temperature=0.8, max_tokens=60)
    made.step_or_raise()
    made.pause(first)
    made.step_or_raise()
    made.resume(first)
    third = add(made, draft, 5)
    made.step_or_raise()
    made.abort(third)
    build.finish(made)
    assert [list(first.output), list(second.output)] == alone


@pytest.mark.parametrize("draft", ["off", "model", "eagle", "recycle"])
def test_preemption_and_small_pools(draft: str) -> None:
    """Without room for rounds the engine runs single steps, and the output stays the same."""
    plain = plain_texts({"temperature": 0.8})
    for tokens in (120, 180):
        assert texts(draft, True, {"temperature": 0.8}, tokens=tokens) == plain


@pytest.mark.parametrize("draft", ["model", "recycle"])
def test_rounds_reach_the_end_of_the_context(draft: str) -> None:
    """They also reach the last key of a recorded shape: a tree has more rows than it accepts."""
    made = engine(draft, late=False)
    prompt = build.prompts()[3] * 8
    room = made.target.decoder.context - len(prompt)
    ends = []
    for late in (False, True):
        made = engine(draft, late=late)
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        request = made.add(prompt, params, draft=draft, depth=8 if draft == "recycle" else "auto")
        build.finish(made)
        ends.append(list(request.output))
    assert ends[0] == ends[1] and len(ends[0]) == room


@pytest.mark.parametrize(
    "given", [{"frequency_penalty": 0.5}, {"logprobs": 1}, {"min_tokens": TOKENS}], ids=str
)
def test_requests_that_need_python_run_single_rounds(log: list[str], given: dict[str, Any]) -> None:
    """While such a request runs, all others in the batch do the same."""
    made = engine("model")
    special = add(made, "model", **given)
    other = add(made, "model", 2, max_tokens=2 * TOKENS)
    while not special.finish_reason:
        made.step_or_raise()
    assert not log
    build.finish(made)
    assert "l" in log and len(other.output) == 2 * TOKENS


def test_requests_with_different_filters_share_rounds(log: list[str]) -> None:
    given: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 1.1, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.05, "top_k": 20},
    ]
    found = []
    for late in (False, True):
        made = engine("model", late=late)
        requests = [add(made, "model", i, **own) for i, own in enumerate(given)]
        build.finish(made)
        found.append([list(request.output) for request in requests])
    assert found[0] == found[1]
    assert "rlrl" in "".join(log)


@pytest.mark.parametrize("draft", ["model", "eagle", "recycle"])
def test_cache_rows_are_those_of_single_steps(draft: str) -> None:
    """Compares rows of the target and of the drafter, and the drafter's lag after a call."""
    found = []
    for late in (False, True):
        made = engine(draft, late=late)
        made.multi_step.seconds = 0.01 if late else 0.0
        request = add(made, draft, temperature=0.8, max_tokens=50)
        while request.produced < 30:
            made.step_or_raise()
        made.multi_step.seconds = 0.0
        proposer = made.proposers[draft]
        caches = [made.target.cache, proposer.kv()]
        rows = [
            own[: request.prompt_length + 25]
            for cache in caches
            if cache
            for layer in cache.keys
            for own in cache.read(request.slot, layer, 0)
        ]
        if isinstance(proposer, DraftModel):
            lag = len(request.tokens) - proposer.runner.cache.length[request.slot]
            assert 1 <= lag <= 2
        elif isinstance(proposer, EagleProposer):
            pending = proposer.pending[request.slot]
            assert pending.end == len(request.tokens) - 1 and len(pending) <= 4
        build.finish(made)
        found.append((rows, list(request.output)))
    assert found[0][1] == found[1][1]
    for step, call in zip(found[0][0], found[1][0], strict=True):
        atol = 1e-12 if step.dtype == torch.float64 else 1e-4  # the head is in float32
        torch.testing.assert_close(step, call, rtol=0, atol=atol)


def test_a_draft_models_cache_holds_all_committed_tokens_after_each_call() -> None:
    """Its rows equal those of one pass over the text, even after a fully accepted chain, whose last
    token the drafting itself does not read."""
    made, sizes = engine("model"), {"tokens": 1024, "page": 4}
    made.multi_step.seconds = 0.01
    twin = Runner(made.target.decoder, **sizes, slots=8, graphs=RecordedOperations())
    proposer = made.proposers["model"] = DraftModel(twin, made.target.decoder.config.vocab)
    cache, accepted = proposer.runner.cache, set()
    fresh = Runner(made.target.decoder, **sizes, slots=1)
    for prompt in range(4):
        request = add(made, "model", prompt, temperature=0.8, max_tokens=60)
        while request.produced < 40:
            made.step_or_raise()
            length, tokens = cache.length[request.slot], request.tokens
            if not length:
                continue
            accepted.add(request.stats.rounds[-1])
            fresh.reset()
            fresh.cache.pages.grow(0, length)
            fresh.forward([Segment.chain(0, tokens[:length])])
            fresh.cache.commit(0, range(length))
            read = zip(cache.read(request.slot, 0, 0), fresh.cache.read(0, 0, 0), strict=True)
            for actual, expected in read:
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        made.abort(request)
        build.finish(made)
    assert (3, 3) in accepted


def test_a_failed_recording_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(RecordedOperations):
        def record(self, run: Callable[[], Any]) -> Any:
            if "_Rounds" in run.__qualname__:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return super().record(run)

    made = engine("model")
    for runner in runners_of(made):
        runner.graphs = Failing()
    made.reset()
    caplog.set_level(logging.WARNING, "forerun.runtime")
    requests = [add(made, "model", prompt) for prompt in range(4)]
    build.finish(made)
    assert [list(request.output) for request in requests] == plain_texts({})
    assert [record.message for record in caplog.records] == [
        "the host waits for each round, since they cannot be recorded: operation not permitted "
        "when stream is capturing"
    ]


def test_logits_that_are_not_finite_raise_as_in_a_single_step() -> None:
    made = engine("model")
    request = add(made, "model", max_tokens=200)
    made.multi_step.seconds = 0.001
    while request.produced < 4:
        made.step_or_raise()
    made.multi_step.seconds = 60.0
    with build.poisoned(made), pytest.raises(StateError):
        made.step_or_raise()
    made.reset()
    again = add(made, "model")
    build.finish(made)
    assert len(again.output) == TOKENS


@pytest.mark.parametrize("draft", ["model", "eagle"])
def test_drafts_after_a_pause_of_the_guard_are_those_of_single_steps(
    log: list[str], drafts: list[list[int]], draft: str
) -> None:
    """A head has read the hidden states of every round in the pause."""
    found: list[dict[int, list[int]]] = []
    for late in (False, True):
        made = engine(draft, late=False)
        request = add(made, draft, max_tokens=100)
        while request.produced < 8:
            made.step_or_raise()
        drafts.clear()
        made.multi_step.seconds = 60.0 if late else 0.0
        made.guard.paused_steps = 20
        build.finish(made)
        assert all(len(tokens) == 2 for tokens in drafts[:20])
        found.append({first: tokens for first, *tokens in drafts if len(tokens) > 1})
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 10
    assert all(found[0][place] == found[1][place] for place in shared)
    assert "rlrl" in "".join(log)


def test_a_copy_ends_the_rounds(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the text begins to repeat itself, no further round is launched, and the copying drafter
    drafts in the next step. In the log, c is a match and s the begin of a step."""
    made = engine("suffix")
    # copies are not cut, since measured costs, and so the best length, vary from run to run
    monkeypatch.setattr(made.policy, "cut_copy", lambda kind, own, copied, *_: (copied, math.inf))
    suffix = made.proposers["suffix"]
    has_draft = suffix.has_draft

    def noted(slot: int, tokens: Sequence[int]) -> bool:
        found = has_draft(slot, tokens)
        if found:
            log.append("c")
        return found

    monkeypatch.setattr(suffix, "has_draft", noted)
    request = add(made, "suffix", 4, max_tokens=60)
    while made.busy:
        log.append("s")
        made.step_or_raise()
    steps = "".join(log).split("s")
    assert any("rc" in step for step in steps)
    assert not any(re.search("c.*l", step) for step in steps)
    assert request.stats.by_source["suffix"].accepted > 0


class HostSyncs(TorchFunctionMode):
    """Notes calls that copy numbers from a device, for which the host would wait on a GPU."""

    NAMES = ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("draft", ["off", "model", "eagle", "recycle"])
def test_the_host_waits_once_a_round(log: list[str], draft: str) -> None:
    """It waits once for all requests together, at any depth."""
    for depth, temperature in ((1, 0.0), (7, 0.8)):
        made = engine(draft)
        for prompt in range(3):
            add(made, draft, prompt, depth, temperature=temperature, max_tokens=40)
        while min(request.produced for request in made.requests.values()) < 2:
            made.step_or_raise()
        log.clear()
        with HostSyncs() as syncs:
            made.step_or_raise()
        assert log.count("r") > 3
        assert syncs.names == ["tolist"] * log.count("r")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_host_does_not_wait_for_experts(log: list[str], family: str) -> None:
    """It waits neither in recorded rounds nor in their recording, which allocates inputs in main
    memory (numpy)."""
    made = engine("model", family)
    for prompt in range(3):
        add(made, "model", prompt, 3, temperature=0.8)
    while min(request.produced for request in made.requests.values()) < 1:
        made.step_or_raise()
    log.clear()
    with HostSyncs() as syncs:
        made.step_or_raise()
    assert log.count("r") > 3
    names = [name for name in syncs.names if name != "numpy"]
    assert names == ["tolist"] * log.count("r")


@pytest.mark.parametrize("draft", ["off", "suffix", "model", "recycle"])
def test_the_host_waits_at_most_twice_in_a_single_step(draft: str) -> None:
    """It waits for the verdict, and for the chain of a draft model of any depth. Requests are
    greedy, since sampling on a CPU takes another path with more waits."""
    made = engine(draft, late=False)
    for prompt in range(3):
        add(made, draft, prompt, 7, max_tokens=60)
    while min(request.produced for request in made.requests.values()) < 2:
        made.step_or_raise()
    with HostSyncs() as syncs:
        made.step_or_raise()
    assert len(syncs.names) <= 2, syncs.names


@pytest.mark.cuda
@pytest.mark.parametrize("draft", ["off", "suffix", "model", "in turn", "eagle"])
def test_tokens_on_a_gpu_equal_those_of_single_steps(log: list[str], draft: str) -> None:
    found = []
    for late in (False, True):
        made = build.engine(drafts=["suffix", "model", "eagle"], device="cuda", width=1)
        made.proposers["in turn"] = InTurn((made.proposers["suffix"], made.proposers["model"]))
        made.set_policy(build.Eager())
        made.multi_step.seconds = 0.03 if late else 0.0
        requests = [add(made, draft, prompt, temperature=0.8) for prompt in range(4)]
        build.finish(made)
        found.append([list(request.output) for request in requests])
    assert found[0] == found[1]
    assert "l" in log
