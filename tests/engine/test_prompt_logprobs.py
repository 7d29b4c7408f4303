"""Log-probabilities of a prompt equal those of a plain pass over it, whatever the chunks, the other
requests, the cache and the drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.cache.attention import Segment
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Event
from tests import tiny
from tests.engine import build

TOP = 3


def naive(
    engine: Engine, tokens: list[int], each: bool = False
) -> list[tuple[float, list[int], int]]:
    """Return (log-probability, likeliest tokens, rank) of each token but the first, from one pass
    over all tokens or, with `each`, one pass per token."""
    runner = Runner(engine.target.decoder, tokens=256, page=4, slots=1)
    assert runner.cache.pages.grow(0, len(tokens))
    found = []
    for part in [[token] for token in tokens] if each else [tokens]:
        count = len(part)
        segment = Segment(0, part, list(range(-1, count - 1)), list(range(count)))
        found.append(runner.forward([segment]).logits)
        runner.cache.commit(0, range(count))
    logprobs = torch.cat(found).log_softmax(-1)[:-1]
    return [
        (float(row[token]), row.topk(TOP).indices.tolist(), int((row > row[token]).sum()) + 1)
        for row, token in zip(logprobs, tokens[1:], strict=True)
    ]


def run(engine: Engine, *requests: Request) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        events += engine.step_or_raise()
        engine.target.cache.pages.check()
    build.check_idle(engine)
    return events


def check(
    request: Request, expected: list[tuple[float, list[int], int]], exact: bool = False
) -> None:
    first, *entries = request.prompt_logprobs
    assert first is None and len(entries) == len(expected)
    scored = zip(entries, request.tokens[1:], expected, strict=False)
    for entry, token, (logprob, top, rank) in scored:
        assert entry is not None and entry.token_id == token and entry.rank == rank
        assert entry.logprob == (logprob if exact else pytest.approx(logprob, abs=1e-9))
        assert list(entry.top) == top


def scoring(max_tokens: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, prompt_logprobs=TOP, ignore_eos=True, **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    ("chunk", "scores"), [(64, 1 << 20), (5, 1 << 20), (64, 4), (3, 2), (64, 1)]
)
def test_prompt_logprobs_equal_those_of_a_plain_pass(family: str, chunk: int, scores: int) -> None:
    """Prompts are read in chunks, with few rows of logits per pass, beside other requests, with and
    without an answer."""
    engine = build.engine(family, ["tree"], chunk=chunk)
    engine.scheduler.max_scored = scores
    prompts = build.prompts(6)
    busy = engine.add(prompts[3], build.params(0, 0.8), draft="tree", depth=3)
    requests = [
        engine.add(prompt, scoring(max_tokens=0 if i % 2 else 7), draft="tree", depth=2)
        for i, prompt in enumerate(prompts)
    ]
    run(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        check(request, naive(engine, prompt))
        assert request.finish_reason == "length" and request.produced == request.limit
    alone = build.engine(family, ["tree"])
    same = alone.add(prompts[3], build.params(0, 0.8), draft="tree", depth=3)
    run(alone)
    assert busy.output == same.output, "scoring does not change the output of other requests"


def test_rows_of_logits_per_pass_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a long prompt would take gigabytes for a large vocabulary."""
    engine = build.engine("llama", ["ngram"])
    engine.scheduler.max_scored = 5
    rows: list[int] = []
    forward = engine.target.forward

    def counted(segments: Any, *args: Any, **options: Any) -> Any:
        rows.append(sum(len(segment.want) for segment in segments))
        return forward(segments, *args, **options)

    monkeypatch.setattr(engine.target, "forward", counted)
    for prompt in build.prompts(6):
        engine.add(prompt, scoring())
    run(engine)
    assert max(rows) == 5


def test_a_cached_prefix_is_read_again_only_for_prompt_logprobs() -> None:
    engine = build.engine("llama", ["ngram"])
    prompt = build.prompts(8)[7]
    plain = engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    run(engine)
    for length in (0, 5):
        request = engine.add(prompt, scoring(length))
        run(engine)
        check(request, naive(engine, prompt))
        assert request.stats.cached_tokens == 0
    again = engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    run(engine)
    assert again.stats.cached_tokens > 0 and again.output == plain.output


def test_a_preempted_request_keeps_its_prompt_logprobs() -> None:
    """The pool is too small for all requests; no token is scored twice, and none is left out."""
    engine = build.engine("llama", ["ngram"], tokens=build.SMALL, chunk=6)
    prompts = build.prompts(8)[4:]
    others = [
        engine.add(prompt[:9], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
        for prompt in prompts
    ]
    requests = [engine.add(prompt, scoring(6)) for prompt in prompts]
    run(engine)
    assert sum(request.stats.preemptions for request in [*others, *requests]) > 0
    for request, prompt in zip(requests, prompts, strict=True):
        check(request, naive(engine, prompt))


def test_preemption_in_the_middle_of_a_prompt() -> None:
    engine = build.engine("llama", ["ngram"], chunk=7)
    prompt = build.prompts(8)[7]
    request = engine.add(prompt, scoring(3))
    engine.step_or_raise()
    engine.step_or_raise()
    assert 1 < len(request.prompt_logprobs) < len(prompt)
    engine.scheduler._preempt(request)
    run(engine)
    check(request, naive(engine, prompt))
    assert 0 < request.stats.cached_tokens < len(prompt), "scored tokens are not read again"


def test_native_passes_give_the_same_bits() -> None:
    """Native rows depend neither on chunks nor on other rows of the pass."""
    for chunk in (64, 5):
        engine = build.engine("llama/q4_k_m", ["ngram"], chunk=chunk)
        prompts = build.prompts(5)
        requests = [engine.add(prompt, scoring(4 * (i % 2))) for i, prompt in enumerate(prompts)]
        run(engine)
        for request, prompt in zip(requests, prompts, strict=True):
            check(request, naive(engine, prompt, each=True), exact=True)


def test_only_the_first_event_has_the_prompt_logprobs() -> None:
    engine = build.engine("llama", ["ngram"])
    request = engine.add(build.prompts()[2], scoring(5))
    events = run(engine)
    assert events[0].prompt_logprobs == request.prompt_logprobs and len(events) > 1
    assert all(event.prompt_logprobs is None for event in events[1:])
    scored = engine.add(build.prompts()[2], scoring())
    (event,) = run(engine)
    assert event.prompt_logprobs == scored.prompt_logprobs
    # a pass over fewer rows may round differently in the last bit
    for again, first in zip(scored.prompt_logprobs[1:], request.prompt_logprobs[1:], strict=True):
        assert again is not None and first is not None
        assert (again.token_id, again.rank) == (first.token_id, first.rank)
        assert again.logprob == pytest.approx(first.logprob, abs=1e-9)
        assert again.top == pytest.approx(first.top, abs=1e-9)
    assert event.token_ids == [] and event.finish_reason == "length"


def test_a_single_token_and_a_full_context() -> None:
    engine = build.engine("llama", ["ngram"])
    single = engine.add([5], scoring())
    full = engine.add([3 + i % 50 for i in range(engine.target.decoder.context)], scoring())
    run(engine)
    assert single.prompt_logprobs == [None]
    assert len(full.prompt_logprobs) == engine.target.decoder.context


def test_prompt_logprobs_do_not_change_the_output() -> None:
    engine = build.engine("llama", ["tree"])
    for temperature in (0.0, 0.8):
        sampling = replace(build.params(4, temperature, 12), logprobs=2)
        scored = replace(sampling, prompt_logprobs=0)
        plain, both = (
            engine.add(build.prompts()[4], each, draft="tree") for each in (sampling, scored)
        )
        run(engine)
        assert plain.output == both.output


def test_max_tokens_of_zero_needs_prompt_logprobs() -> None:
    with pytest.raises(RequestError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    for wrong in (-1, 21, True, 1.5):
        with pytest.raises(RequestError, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=wrong)  # type: ignore[arg-type]


def test_prompt_logprobs_through_the_library() -> None:
    llm = LLM(tiny.repetitive(), context=256, kv_tokens=512, max_rows=2, draft="off")
    text = "def add(a, b): return a + b"
    both = llm.generate([text, "x = 1"], SamplingParams(max_tokens=0, prompt_logprobs=2))
    for completion, prompt in zip(both, (text, "x = 1"), strict=True):
        tokens = llm.tokens(prompt)
        assert completion.text == ""
        assert completion.token_ids == []
        assert completion.finish_reason == "length"
        assert completion.prompt_logprobs is not None and completion.prompt_logprobs[0] is None
        scored = [entry.token_id for entry in completion.prompt_logprobs[1:] if entry]
        assert scored == tokens[1:] and completion.prompt_token_ids == tokens
    # the log-probability of a token is the same in a prompt and in an output
    answer = llm.generate(text, SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True))[0]
    tokens = [*llm.tokens(text), *answer.token_ids]
    again = llm.generate(tokens, SamplingParams(max_tokens=0, prompt_logprobs=2))[0].prompt_logprobs
    assert again is not None and answer.logprobs is not None
    for entry, generated in zip(again[-5:], answer.logprobs, strict=True):
        assert entry is not None and entry.logprob == pytest.approx(generated.logprob, abs=1e-4)
    assert llm.generate(text, SamplingParams(max_tokens=1))[0].prompt_logprobs is None
