"""The engine's bookkeeping: aborts, ends, limits, statistics, refused requests, and no leaks."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.costs import SETTLED
from forerun.engine.depth import DepthPolicy
from forerun.engine.scheduler import output_limit
from forerun.errors import CapacityError, ConfigError, RequestError
from forerun.sampling.params import DEFAULT_MAX_TOKENS, SamplingParams
from tests import tiny
from tests.engine import build


def test_sixty_four_random_requests_end_without_leaks() -> None:
    """Arrivals, lengths, parameters, drafts and aborts are random."""
    dice, engine = random.Random(3), build.engine("qwen3", tokens=160, chunk=6)
    requests, waiting = [], 64
    while engine.busy or waiting:
        if waiting and dice.random() < 0.4:
            waiting -= 1
            params = SamplingParams(
                temperature=dice.choice([0.0, 0.7, 1.5]),
                top_k=dice.choice([0, 3]),
                repetition_penalty=dice.choice([1.0, 1.3]),
                max_tokens=dice.randint(1, 25),
                stop_token_ids=(5,),
                logprobs=dice.choice([None, 2]),
                seed=waiting,
            )
            prompt = [dice.randrange(3, tiny.VOCAB) for _ in range(dice.randint(1, 60))]
            draft = dice.choice(["off", *build.PROPOSERS])
            depth = dice.choice(["auto", 0, 2, 6])
            requests.append(engine.add(prompt, params, draft=draft, depth=depth))
        if requests and dice.random() < 0.05:
            engine.abort(dice.choice(requests))
        engine.step_or_raise()
        engine.target.cache.pages.check()
    build.check_idle(engine)
    assert len(requests) == 64
    assert {r.finish_reason for r in requests} == {"stop", "length", "abort"}
    assert all(r.produced <= r.limit for r in requests)


def test_the_cache_holds_all_but_the_last_token() -> None:
    """This invariant holds between any two steps."""
    engine = build.engine("llama", chunk=5, tokens=128)
    for i, prompt in enumerate(build.prompts()):
        engine.add(prompt, build.params(i, 0.8), draft="tree", depth=3)
    while engine.busy:
        emitted = {event.request_id for event in engine.step_or_raise()}
        for request in engine.scheduler.running:
            length = engine.target.cache.length[request.slot]
            assert length <= len(request.tokens) - 1
            assert request.id not in emitted or length == len(request.tokens) - 1


def test_events_contain_all_tokens_sources_and_logprobs() -> None:
    engine = build.engine("llama")
    params = SamplingParams(max_tokens=17, logprobs=3)
    request = engine.add(build.prompts()[2], params, draft="tree", depth=4)
    events = build.finish(engine)
    tokens = [token for event in events for token in event.token_ids]
    sources = [source for event in events for source in event.sources]
    logprobs = [entry for event in events for entry in event.logprobs or ()]
    assert tokens == list(request.output) and len(sources) == len(tokens) == 17
    assert [entry.token_id for entry in logprobs] == tokens
    assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in logprobs)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert sum(source == "model" for source in sources) <= request.stats.accepted


def test_logprobs_do_not_depend_on_speculation() -> None:
    found = {}
    params = SamplingParams(max_tokens=25, logprobs=2, temperature=0.8, seed=1)
    for draft in ("off", "tree"):
        engine = build.engine("llama")
        engine.add(build.prompts()[2], params, draft=draft)
        found[draft] = [e for event in build.finish(engine) for e in event.logprobs or ()]
    for actual, expected in zip(found["tree"], found["off"], strict=True):
        assert actual.token_id == expected.token_id
        assert actual.logprob == pytest.approx(expected.logprob, abs=1e-9)
        assert actual.top == pytest.approx(expected.top, abs=1e-9)


def test_statistics_of_a_request_are_consistent() -> None:
    engine = build.engine("llama")
    request = engine.add(build.prompts()[1], build.params(1, 0.0), draft="model", depth=3)
    build.finish(engine)
    stats = request.stats
    assert stats.prompt_tokens == len(build.prompts()[1])
    assert stats.completion_tokens == request.produced == 21
    assert stats.accepted_length == pytest.approx(21 / stats.steps)
    assert 0 < stats.accepted <= stats.drafted == stats.by_source["model"].drafted
    # every step emits the accepted tokens and one more, except a last one cut by max_tokens
    assert stats.accepted + stats.steps - 3 <= 21 <= stats.accepted + stats.steps
    assert stats.seconds >= stats.verify_seconds + stats.draft_seconds > 0
    assert stats.as_dict()["by_source"]["model"]["accepted"] == stats.accepted
    assert stats.by_source["absent"].drafted == 0 and list(stats.by_source) == ["model"]
    assert repr(stats.by_source).startswith("{'model': SourceStats(drafted=")


def test_the_context_ends_a_request() -> None:
    engine = build.engine("llama")
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    request = engine.add([5] * 250, params, draft="tree", depth=6)
    build.finish(engine)
    assert (len(request.tokens), request.finish_reason) == (256, "length")


def test_an_aborted_request_emits_one_abort_event() -> None:
    engine = build.engine("llama")
    running = engine.add([5, 6], SamplingParams(max_tokens=50, ignore_eos=True), draft="model")
    engine.step_or_raise()
    waiting = engine.add([5, 6], SamplingParams(max_tokens=50), draft="suffix")
    for request in (running, waiting, running):
        engine.abort(request)
    events = engine.step_or_raise()
    assert [event.request_id for event in events] == [running.id, waiting.id]
    assert [event.finish_reason for event in events] == ["abort"] * 2
    build.check_idle(engine)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([], {}, RequestError, "empty"),
        ([64], {}, RequestError, "vocabulary of 64"),
        ([-1], {}, RequestError, "vocabulary"),
        ([5] * 256, {}, RequestError, "context"),
        ([5], {"logit_bias": {99: 1.0}}, RequestError, "token id 99"),
        ([5], {"stop": "x"}, RequestError, "tokenizer"),
        ([5] * 100, {"max_tokens": 100}, CapacityError, "lower max_tokens or raise kv_tokens"),
    ],
)
def test_invalid_requests(tokens: list[int], options: dict, error: type, message: str) -> None:
    engine = build.engine("llama", tokens=128)
    with pytest.raises(error, match=message):
        engine.add(tokens, SamplingParams(**options))
    assert not engine.busy


@pytest.mark.parametrize(
    ("context", "kv_tokens", "prompt", "limit"),
    [
        (4096, 8192, 10, DEFAULT_MAX_TOKENS),
        (4096, 8192, 4000, 96),
        (4096, 8192, 4095, 1),
        (4096, 1024, 10, DEFAULT_MAX_TOKENS),
        (4096, 1024, 1000, 24),
        (4096, 1024, 1023, 1),
    ],
)
def test_the_default_output_limit_is_cut_to_the_context_and_the_cache(
    context: int, kv_tokens: int, prompt: int, limit: int
) -> None:
    """An explicit max_tokens is cut to the context only."""
    target: Any = SimpleNamespace(
        decoder=SimpleNamespace(context=context, config=SimpleNamespace(vocab=64)),
        cache=SimpleNamespace(pages=SimpleNamespace(count=kv_tokens // 16, size=16)),
    )
    tokens = [5] * prompt
    assert output_limit(target, tokens, SamplingParams()) == limit
    given = SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    if prompt + limit == kv_tokens:
        with pytest.raises(CapacityError, match="lower max_tokens or raise kv_tokens"):
            output_limit(target, tokens, given)
        with pytest.raises(CapacityError, match="shorten the prompt or raise kv_tokens"):
            output_limit(target, [5] * kv_tokens, SamplingParams())
    else:
        assert output_limit(target, tokens, given) == limit


def test_an_unknown_depth_or_draft_is_refused() -> None:
    engine = build.engine("llama")
    for depth in (-1, 65, "deep", True):
        with pytest.raises(ConfigError, match="depth"):
            engine.add([5], SamplingParams(), depth=depth)
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        engine.add([5], SamplingParams(), draft="ngrm")


def test_prefill_chunks_are_limited_while_other_requests_generate() -> None:
    """The SLO or the stretch limits a pass, down to a minimum; a single prompt has no limit. The
    output is the same."""
    prompt = [5 + i % 40 for i in range(150)]
    alone = build.engine("llama", ["off"], chunk=64, tokens=512)
    texts = [alone.add(tokens, build.params(1, 0.8, 40)) for tokens in ([5, 6], prompt)]
    build.finish(alone)
    inf = math.inf
    for slo, stretch, most in ((10.0, inf, 65), (1.0, inf, 26), (0.01, inf, 17), (0.0, 2.0, 26)):
        engine = build.engine("llama", ["off"], chunk=64, tokens=512)
        engine.set_policy(DepthPolicy(slo=slo))
        engine.stretch = stretch
        for _ in range(SETTLED):
            engine.policy.record_forward(1, 0.5)
            engine.policy.costs.add_prefill(10, 0.5)
            engine.policy.costs.add_prefill(26, 1.0)
            engine.policy.costs.add_prefill(64, 8.0)
        sizes = []
        engine.policy.costs.add_prefill = lambda tokens, seconds, sizes=sizes: sizes.append(tokens)
        requests = [engine.add([5, 6], build.params(1, 0.8, 40))]
        engine.step_or_raise()
        requests.append(engine.add(prompt, build.params(1, 0.8, 40)))
        build.finish(engine)
        assert max(sizes[1:]) == most
        assert [request.tokens for request in requests] == [request.tokens for request in texts]
