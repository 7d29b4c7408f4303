"""Structured output through the engine: output that fits the grammar, and the same tokens with
speculation as without.

The models are tiny and random, in float64, with a real tokenizer; plain decoding with the same
grammar is the reference."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from forerun.draft.draft_model import DraftModel
from forerun.draft.ngram import NGram
from forerun.draft.suffix import Suffix
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.sampling import compiler
from forerun.sampling import matcher as matcher_module
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from tests import tiny
from tests.engine import build
from tests.sampling.test_grammar import EXPLODING

NAMES, COLOURS = ["alpha", "beta", "alphabet"], ["green", "grey"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": NAMES},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 6,
        },
        "next": {
            "type": "object",
            "properties": {"colour": {"enum": COLOURS}},
            "required": ["colour"],
        },
        "note": {"type": "string", "maxLength": 9},
    },
    "required": ["name", "sizes", "next", "note"],
    "additionalProperties": False,
}
SCHEMA["properties"]["next"]["additionalProperties"] = False  # type: ignore[index]
REGEX = "(grey|green|colour: [0-9]{2,5})( null){2,6}"
GRAMMARS = {
    "schema": Grammar.of("json_schema", SCHEMA),
    "object": Grammar.of("json_object"),
    "regex": Grammar.of("regex", REGEX),
    "lark": Grammar.of("lark", 'start: "(" start ")" | "<" start ">" start | /[a-f]{1,3}/'),
    "choice": Grammar.of("choice", [*NAMES, "green grey", "null"]),
}
END = 2
DRAFTS = ("ngram", "suffix", "model", "tree")


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.with_tokenizer())


def engine(rule: str = "match", **options: Any) -> Engine:
    """Return an engine as `build.engine` does, with models that have a tokenizer."""
    chunk = options.pop("chunk", 64)

    def runner(noise: float) -> Runner:
        decoder = tiny.decoder(tiny.with_tokenizer(noise), torch.float64)
        return Runner(decoder, **(dict(tokens=1024, page=4, slots=8) | options))

    proposers = {
        "ngram": NGram(longest=3, shortest=1),
        "suffix": Suffix(shortest=1),
        "model": DraftModel(runner(0.15), tiny.PADDED_VOCAB),
        "tree": DraftModel(
            runner(0.15), tiny.PADDED_VOCAB, width=1 if rule in ("token", "block") else 3
        ),
    }
    return Engine(runner(0.0), proposers, rule=rule, chunk=chunk, tokenizer=tokenizer())


PROMPTS = ['{"name":"alpha","sizes":[10,12]}', "green grey null null", "()<>abc", "x"]


def params(i: int, temperature: float, **options: Any) -> SamplingParams:
    grammar = list(GRAMMARS.values())[i % len(GRAMMARS)]
    usual = dict(temperature=temperature, seed=50 + i, max_tokens=40, grammar=grammar)
    return SamplingParams(**usual | options)


def run(
    target: Engine, options: list[SamplingParams], draft: str, depth: int | str = 4
) -> list[Request]:
    """Run all requests to the end, with a step between arrivals."""
    requests = []
    for i, option in enumerate(options):
        tokens = tokenizer().encode(PROMPTS[i % len(PROMPTS)])
        requests.append(target.add(tokens, option, draft=draft, depth=depth))
        target.step()
    build.finish(target)
    return requests


def outputs(requests: list[Request]) -> list[tuple[list[int], str | None]]:
    return [(list(r.output), r.finish_reason) for r in requests]


@functools.cache
def plain(temperature: float) -> list[tuple[list[int], str | None]]:
    """Return the outputs of `options`, each request alone and without speculation."""
    return [alone(i, option) for i, option in enumerate(options(temperature))]


def options(temperature: float) -> list[SamplingParams]:
    return [params(i, temperature) for i in range(10)]


def alone(i: int, option: SamplingParams) -> tuple[list[int], str | None]:
    target = engine()
    request = target.add(tokenizer().encode(PROMPTS[i % len(PROMPTS)]), option, draft="off")
    build.finish(target)
    return list(request.output), request.finish_reason


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", [*DRAFTS, "off"])
def test_same_tokens_with_every_draft(draft: str, temperature: float) -> None:
    for depth in (4, "auto"):
        requests = run(engine(), options(temperature), draft, depth)
        assert outputs(requests) == plain(temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_same_tokens_in_small_chunks_and_a_small_pool(draft: str, temperature: float) -> None:
    requests = run(engine(chunk=3, tokens=120), options(temperature), draft)
    assert outputs(requests) == plain(temperature)
    assert sum(r.stats.preemptions for r in requests) > 0


def test_drafts_and_forced_tokens_are_accepted() -> None:
    """Guards the tests above, which would prove nothing without accepted drafts and ends."""
    for draft in DRAFTS:
        sources: Counter[str] = Counter()
        for request in run(engine(), options(0.8), draft):
            for name, source in request.stats.by_source.items():
                sources[name] += source.accepted
        assert sources["grammar"] > 20 and sum(sources.values()) > sources["grammar"]
    assert Counter(reason for _, reason in plain(0.8))["stop"] >= 6


FITS = {
    "schema": lambda text: fits_schema(json.loads(text)),
    "object": lambda text: isinstance(json.loads(text), dict),
    "regex": lambda text: re.fullmatch(REGEX, text),
    "lark": lambda text: re.fullmatch(r"[()<>a-f]+", text),
    "choice": lambda text: text in [*NAMES, "green grey", "null"],
}


def fits_schema(value: Any) -> bool:
    return (
        set(value) == {"name", "sizes", "next", "note"}
        and value["name"] in NAMES
        and len(value["sizes"]) <= 6
        and all(isinstance(n, int) and 0 <= n <= 99 for n in value["sizes"])
        and value["next"] in [{"colour": c} for c in COLOURS]
        and len(value["note"]) <= 9
    )


@pytest.mark.parametrize("name", FITS)
def test_output_that_ended_fits_the_grammar(name: str) -> None:
    target, requests = engine(), []
    for i in range(12):
        option = params(i, 1.0, grammar=GRAMMARS[name], max_tokens=90, top_k=40, seed=i)
        requests.append(target.add(tokenizer().encode(PROMPTS[i % 4]), option, draft="suffix"))
    events = build.finish_all(target)
    ended = [request for request in requests if request.finish_reason == "stop"]
    for request in ended:
        text = "".join(event.text for event in events if event.request_id == request.id)
        assert FITS[name](text), text
        assert request.output[-1] == END
    assert len(ended) >= 4


def test_forced_tokens_are_all_accepted_and_plain_decoding_drafts_none() -> None:
    option = SamplingParams(
        max_tokens=30, grammar=Grammar.of("choice", ["true alphabet null false"])
    )
    cases = [*(("ngram", depth) for depth in (16, 3, "auto", 0)), ("tree", 2), ("off", 4)]
    for draft, depth in cases:
        target = engine()
        request = target.add(tokenizer().encode("x = "), option, draft=draft, depth=depth)
        events = build.finish_all(target)
        forced = request.stats.by_source["grammar"]
        assert tokenizer().decode(list(request.output)) == "true alphabet null false"
        assert request.stats.accepted == request.stats.drafted == forced.accepted
        assert (forced.drafted > 0) == (draft != "off" and depth != 0)
        assert [s for event in events for s in event.sources].count("grammar") == forced.accepted
        if isinstance(depth, int) and draft != "off":
            assert max(len(event.token_ids) for event in events) <= depth + 1


@pytest.mark.parametrize("draft", ["off", *DRAFTS])
def test_max_tokens_cuts_off_structured_output(draft: str) -> None:
    for limit in range(1, 12):
        option = params(0, 0.8, max_tokens=limit)
        (request,) = run(engine(), [option], draft)
        assert outputs([request]) == [alone(0, option)] and request.produced <= limit


OTHERS = {
    "no end tokens": dict(ignore_eos=True),
    "two end tokens": dict(stop_token_ids=[40]),
    "its own end token": dict(ignore_eos=True, stop_token_ids=[40]),
    "min_tokens": dict(min_tokens=40),
    "a stop string": dict(stop=["gre", "al", "12", "null"]),
    "logit bias": dict(logit_bias={END: 100.0, 60: 100.0}),
    "filters": dict(top_p=0.7, min_p=0.01, top_k=9),
    "penalties": dict(repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.5),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("draft", ["ngram", "tree"])
@pytest.mark.parametrize("name", OTHERS)
def test_grammars_combine_with_other_sampling_parameters(name: str, draft: str) -> None:
    many = [params(i, 0.8, **OTHERS[name]) for i in range(5)]
    expected = [alone(i, option) for i, option in enumerate(many)]
    assert outputs(run(engine(), many, draft)) == expected
    assert any(reason == "stop" for _, reason in expected)


@pytest.mark.parametrize("draft", ["off", "suffix"])
def test_without_end_tokens_the_output_ends_with_the_grammar(draft: str) -> None:
    option = params(0, 0.8, ignore_eos=True, grammar=GRAMMARS["schema"], max_tokens=90)
    (request,) = run(engine(), [option], draft)
    assert request.finish_reason == "stop"
    assert fits_schema(json.loads(tokenizer().decode(list(request.output))))


def test_an_end_of_the_grammar_that_is_known_late_ends_the_request_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mask behind the last token may still be computed when that token is committed."""
    target, is_known = engine(), False
    ending, is_ready = matcher_module.Matcher.ending.fget, target._is_ready
    assert ending is not None

    def is_ready_and_known(scheduled: Any) -> bool:
        nonlocal is_known
        is_known = True
        try:
            return is_ready(scheduled)
        finally:
            is_known = False

    late_ending = property(lambda matcher: ending(matcher) if is_known else None)
    monkeypatch.setattr(matcher_module.Matcher, "ending", late_ending)
    monkeypatch.setattr(target, "_is_ready", is_ready_and_known)
    option = params(0, 0.8, ignore_eos=True, grammar=GRAMMARS["schema"], max_tokens=90)
    (request,) = run(target, [option], "off")
    assert request.finish_reason == "stop"
    assert fits_schema(json.loads(tokenizer().decode(list(request.output))))


def test_the_end_token_overrides_min_tokens_if_nothing_else_is_allowed() -> None:
    option = SamplingParams(min_tokens=20, max_tokens=30, grammar=Grammar.of("choice", ["null"]))
    output, reason = alone(0, option)
    assert (tokenizer().decode(output), output[-1], reason) == ("null", END, "stop")
    longer = SamplingParams(min_tokens=20, max_tokens=30, grammar=Grammar.of("regex", "a+"))
    assert len(alone(0, replace(longer, logit_bias={END: 100.0}))[0]) == 21


@pytest.mark.one_in(4)
@pytest.mark.parametrize("states, fails", [(250, False), (60, True)])
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_grammar_limit_is_hit_at_the_same_token_with_and_without_drafts(
    states: int, fails: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting fills the lexer's states sooner, so a fresh lexer over the text decides. Another
    request goes on."""
    monkeypatch.setattr(compiler, "STATES", states)
    option = SamplingParams(max_tokens=40, temperature=temperature, seed=3, grammar=EXPLODING)
    found = []
    for draft in ("off", "ngram", "model", "tree"):
        target = engine()
        request, other = (
            target.add(tokenizer().encode(PROMPTS[i]), own, draft=draft, depth=4)
            for i, own in enumerate([option, params(1, temperature)])
        )
        build.finish_all(target)
        found.append((list(request.output), request.finish_reason, str(request.error)))
        assert (list(other.output), other.finish_reason) == alone(1, params(1, temperature))
    assert all(each == found[0] for each in found)
    assert ("too complex to match after" in found[0][2]) == fails and len(found[0][0]) > 1


def test_a_request_waiting_for_a_mask_does_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matcher_module, "PATIENCE", 20.0)  # enough for a busy machine
    target, gate = engine(), threading.Event()
    target.grammars.confine()
    slow = target.add(tokenizer().encode("x"), params(2, 0.8), draft="ngram", depth=3)
    quick = target.add(tokenizer().encode(PROMPTS[1]), params(1, 0.8), draft="ngram", depth=3)
    matcher, wait, waits = slow.state.grammar, matcher_module.wait, []
    assert matcher is not None
    try_path = matcher._try
    monkeypatch.setattr(matcher, "_try", lambda path: gate.wait(20) and try_path(path))

    def recorded(futures: Any, timeout: float) -> Any:
        waits.append(max(timeout, 0.0) if matcher._running in futures else 0.0)
        return wait(futures, timeout)

    monkeypatch.setattr(matcher_module, "wait", recorded)
    while quick.finish_reason is None:
        target.step()
    # the engine waits in one step, and not again in later ones
    assert len(waits) > 5 and sum(waits) < 3 * matcher_module.MOMENT
    assert not slow.output and slow.finish_reason is None
    gate.set()
    build.finish(target)
    assert outputs([quick, slow]) == [alone(1, params(1, 0.8)), alone(3, params(2, 0.8))]


def test_a_mask_that_takes_too_long_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "PATIENCE", 0.02)
    target, gate = engine(), threading.Event()
    target.grammars.confine()
    slow = target.add(tokenizer().encode("x"), params(2, 0.8), draft="ngram", depth=3)
    quick = target.add(tokenizer().encode(PROMPTS[1]), params(0, 0.8), draft="off")
    matcher = slow.state.grammar
    assert matcher is not None
    monkeypatch.setattr(matcher, "_try", lambda path: gate.wait(20) and None)
    build.finish_all(target)
    gate.set()
    assert "takes too long to match" in str(slow.error)
    assert quick.finish_reason in ("stop", "length")


def test_logprobs_are_those_of_the_model() -> None:
    """They are not masked: the likeliest tokens include some that the grammar forbids."""
    found = {}
    for draft in ("off", "tree"):
        target = engine()
        target.add(tokenizer().encode("x"), params(0, 0.8, logprobs=3), draft=draft, depth=4)
        found[draft] = [
            entry for event in build.finish_all(target) for entry in event.logprobs or ()
        ]
    assert any(entry.token_id not in entry.top for entry in found["off"])
    for actual, expected in zip(found["tree"], found["off"], strict=True):
        assert actual.token_id == expected.token_id
        assert actual.logprob == pytest.approx(expected.logprob, abs=1e-9)


def test_requests_with_and_without_a_grammar_share_a_batch() -> None:
    free = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
    mixed = [params(0, 0.8), free, params(2, 0.8), free]
    expected = [alone(i, option) for i, option in enumerate(mixed)]
    assert outputs(run(engine(), mixed, "tree")) == expected


def test_aborts_leave_nothing_behind() -> None:
    target = engine(slots=2)
    requests = [target.add([5, 6], params(0, 0.8), draft="suffix") for _ in range(4)]
    for request in requests:
        target.step()
        target.abort(request)
    build.finish(target)
    assert {r.finish_reason for r in requests} == {"abort"}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_ratio_rules_are_greedy_at_temperature_zero(rule: str, draft: str) -> None:
    assert outputs(run(engine(rule), options(0.0), draft)) == plain(0.0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "rule, draft", [("token", "model"), ("block", "model"), ("tree", "tree"), ("token", "ngram")]
)
def test_ratio_rules_keep_the_distribution(rule: str, draft: str) -> None:
    """Forbidden drafts are rejected, and replacements are drawn from the allowed tokens."""
    grammar = Grammar.of("regex", "[ab][bc](d|grey|green)")
    counts = []
    for name, seeds in ((draft, range(300)), ("off", range(1000, 1300))):
        target = engine(rule, slots=64, tokens=4096)
        option = SamplingParams(temperature=2.5, max_tokens=9, grammar=grammar)
        prompt = tokenizer().encode("abab grey")
        requests = [
            target.add(prompt, replace(option, seed=seed), draft=name, depth=3) for seed in seeds
        ]
        build.finish(target)
        counts.append(Counter(tokenizer().decode(list(r.output)) for r in requests))
    texts = [text for text in counts[0] | counts[1] if counts[0][text] + counts[1][text] >= 10]
    assert len(texts) >= 4
    table = [[count[text] for text in texts] for count in counts]
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_invalid_grammars_are_refused_before_any_work() -> None:
    target = engine()
    with pytest.raises(RequestError, match="regex"):
        target.add([5], SamplingParams(grammar=Grammar.of("regex", "[a")))
    with pytest.raises(RequestError, match="tokenizer"):
        build.engine("llama").add([5], SamplingParams(grammar=GRAMMARS["object"]))
    assert not target.busy
