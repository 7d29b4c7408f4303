"""Measuring a running server: what the figures are made of, that drafts are compared fairly, and
what may go wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import LLM, ConfigError, ForerunError, RequestError
from forerun.bench.server.answer import Answer, Speculated, one_line, speculated
from forerun.bench.server.endpoint import Endpoint, as_asked
from forerun.bench.server.load import EACH, INTERRUPTED, Plan, ServeReport, measure_serving
from forerun.bench.server.result import OFF, Arm, Run, gaps, percentiles, result
from tests import tiny
from tests.bench.server.fake_openai import END, PATIENCE, Fake, Handler, chunk, faking, good, usage
from tests.cli.test_main import run
from tests.server.serving import serving

PROMPTS = [f"prompt {i}" for i in range(100)]
DIES = "fails every request"


def measure(
    fake: Fake, prompts: list[Any] = PROMPTS, timeout: float = PATIENCE, **options: Any
) -> ServeReport:
    """A small measurement of a fake."""
    given = {"requests": [1], "tokens": 5, "repeats": 1} | options
    return measure_serving(Plan(endpoint=Endpoint(fake.url, timeout=timeout), **given), prompts)


def answer(index: int, sent: float, chunks: list[tuple[float, int]], **options: Any) -> Answer:
    return Answer(index, sent, chunks, **({"finished": True} | options))


# what the figures are made of


def test_the_speed_counts_what_came_within_the_window() -> None:
    """Pieces after the window and failed answers do not count; without ids, chunks are scaled to
    the usage."""
    exact = answer(0, 10.0, [(11.0, 1), (12.0, 4), (14.5, 3)], counted=8)
    scaled = answer(1, 10.0, [(11.0, 1), (12.0, 1), (13.0, 1), (15.0, 1)], counted=8)
    failed = answer(2, 10.0, [(11.0, 9)], finished=False, error="gone")
    assert Run(10.0, 14.0, [exact, scaled, failed]).speed == (5 + 3 * 2) / 4
    assert Run(10.0, 14.0, [failed]).speed == 0.0


def test_the_wait_for_a_chunk_is_shared_among_its_tokens() -> None:
    assert gaps(answer(0, 0.0, [(1.0, 1), (2.0, 4), (2.5, 1)])) == [(0.25, 4), (0.5, 1)]
    assert gaps(answer(0, 0.0, [(1.0, 1), (2.0, 1)], counted=4)) == [(0.5, 2.0)]
    assert gaps(answer(0, 0.0, [])) == []


def test_percentiles_are_those_of_the_values_repeated() -> None:
    random = np.random.default_rng(3)
    values = [
        (float(v), float(n))
        for v, n in zip(random.exponential(size=50), random.integers(1, 6, 50), strict=True)
    ]
    repeated = [seconds for seconds, count in values for _ in range(int(count))]
    expected = 1e3 * np.percentile(repeated, [50, 95, 99], method="inverted_cdf")
    assert list(percentiles(values).values()) == pytest.approx(list(expected))
    assert (
        percentiles([(0.25, 1.0)]) == {"p50": 250.0, "p95": 250.0, "p99": 250.0}
        and percentiles([]) == {}
    )


def test_a_result_is_made_of_whole_rounds_while_there_are_any() -> None:
    def runs(*speeds: int) -> list[Run]:
        return [
            Run(0.0, 1.0, [answer(0, 0.0, [(0.5, s)], token_ids=[1, 2])], whole=True)
            for s in speeds
        ]

    fast, slow = runs(10, 30, 90), runs(5, 10, 10)
    fast[2].whole = False
    found = result(4, Arm("suffix"), fast, slow)
    assert (found.rounds, found.tokens_per_second, found.times_plain, found.same) == (
        2,
        20.0,
        2.5,
        True,
    )
    assert result(4, Arm("suffix"), fast[2:], slow[2:]).rounds == 0
    assert result(4, Arm("suffix"), fast[2:], slow[2:]).tokens_per_second == 90.0
    fast[1].answers[0].token_ids = [1, 3]
    assert (result(4, Arm("suffix"), fast, slow).same, result(4, Arm("suffix"), fast, slow).first_difference) == (
        False, 1,
    )  # fmt: skip


FORERUN = {
    "forerun": {"drafted": 9, "accepted": 6, "steps": 5, "completion_tokens": 12},
    "speculative_decoding": {},
}
VLLM = {
    "speculative_decoding": {
        "num_draft_tokens": 9,
        "num_accepted_draft_tokens": 6,
        "num_spec_steps": 3,
    }
}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"metrics": FORERUN}, Speculated(9, 6, 5, 12)),
        ({"metrics": VLLM}, Speculated(9, 6, 3, 9)),
        (
            {"timings": {"draft_n": 9, "draft_n_accepted": 6, "predicted_n": 16}},
            Speculated(9, 6, 10, 16),
        ),
        ({"timings": {"predicted_n": 16}}, None),
        ({"metrics": None}, None),
        ({"metrics": [1], "timings": "x"}, None),
        ({"metrics": {"forerun": {"drafted": "9"}}}, None),
        ({"metrics": {"speculative_decoding": {"num_draft_tokens": -1}}}, None),
    ],
)
def test_statistics_of_speculation_in_every_shape(
    given: dict[str, Any], found: Speculated | None
) -> None:
    assert speculated(given) == found


# how it asks


def test_clients_keep_as_many_requests_going_as_asked() -> None:
    """Every answer waits until there are as many requests at once as there should be: fewer would
    never end."""
    barrier, most, lock, now = threading.Barrier(1), [0], threading.Lock(), [0]

    def wait(handler: Handler, body: dict[str, Any]) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if handler.fake.asked.index(body) > 0:  # the first is asked alone
            barrier.wait(PATIENCE)
        with lock:
            now[0] -= 1
        good(handler, body)

    with faking(wait) as fake:
        barrier = threading.Barrier(4)
        report = measure(fake, requests=[4])
    assert most == [4] and report.results[0].finished == 4 * EACH and not report.results[0].errors


def test_token_counts_come_from_the_usage_or_are_called_chunks() -> None:
    with faking() as fake:
        (found,) = measure(fake, tokens=9).results
        assert (found.counted, found.same, found.accepted_length, found.cached) == (
            "usage",
            None,
            None,
            None,
        )
        assert found.requests_per_second == pytest.approx(found.tokens_per_second / 9)
        assert "ignore_eos" not in fake.asked[0] and fake.asked[0]["stream_options"] == {
            "include_usage": True
        }
    with faking(lambda handler, body: handler.stream(chunk("a"), chunk("bb"), END)) as fake:
        (found,) = measure(fake).results
        assert found.counted == "chunks" and found.requests_per_second == pytest.approx(
            found.tokens_per_second / 2
        )


def test_chats_are_asked_as_chats_and_reasoning_counts() -> None:
    def think(handler: Handler, body: dict[str, Any]) -> None:
        deltas = [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"content": "yes"},
            {"content": None},
        ]
        handler.stream(*({"choices": [{"delta": delta}]} for delta in deltas), END, "[DONE]")

    with faking(think) as fake:
        plan = Plan(endpoint=Endpoint(f"{fake.url}/v1/", chat=True), requests=[1], repeats=1)
        (found,) = measure_serving(
            plan, ["hello", [{"role": "system", "content": "be brief"}]]
        ).results
    assert found.requests_per_second == pytest.approx(found.tokens_per_second / 2)
    assert set(fake.paths) == {"/v1/chat/completions"}
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert fake.asked[1]["messages"] == [{"role": "system", "content": "be brief"}]


def speculating(wrong: str = "") -> Any:
    """Answers by seed, as forerun's server does; the draft `wrong` says something else at its third
    token."""

    def behave(handler: Handler, body: dict[str, Any]) -> None:
        draft = (body["speculative"] or {"draft": OFF})["draft"]
        ids = [body["seed"], 5, 6 + (draft == wrong), 7][: body["max_tokens"]]
        pieces = [chunk(str(i), token_ids=[i]) for i in ids]
        handler.stream(*pieces, END, usage(len(ids), metrics=FORERUN), "[DONE]")

    return behave


def test_drafts_are_compared_on_the_same_requests_in_turn() -> None:
    """Each draft gets the same prompts and seeds in a round, first in turn, and no prompt twice;
    before a round, one token of each is asked for, so that none of them has to read the prompts for
    all."""
    with faking(speculating(), maker="forerun") as fake:
        report = measure(
            fake,
            drafts=["suffix", "ngram", "suffix", OFF],
            depth=3,
            requests=[2],
            repeats=3,
            tokens=4,
        )
    assert [(r.draft, r.depth, r.same) for r in report.results] == [
        (OFF, None, True), ("suffix", 3, True), ("ngram", 3, True),
    ]  # fmt: skip
    assert (report.results[1].accepted_length, report.results[1].acceptance) == (12 / 5, 6 / 9)
    assert report.results[0].times_plain == 1.0 and report.results[1].interval is not None
    kinds = defaultdict(list)
    for body in fake.asked[1:]:
        draft = body["speculative"]["draft"] if body["speculative"] else OFF
        assert body["prompt"] == f"prompt {body['seed']}" and body["ignore_eos"]
        assert not body["speculative"] or body["speculative"]["depth"] == 3
        kinds[draft, body["max_tokens"]].append(body["seed"])
    counted = sorted(
        range(1, 3 + 3 * 2 * EACH)
    )  # the first was asked alone; two to warm up; three rounds
    assert all(sorted(kinds[draft, 4]) == counted for draft in (OFF, "suffix", "ngram"))
    assert sorted(kinds[OFF, 1]) == counted[2:] and len(kinds) == 4
    rounds = [fake.asked[7 + i * 4 * 2 * EACH :][: 4 * 2 * EACH] for i in range(3)]
    firsts = [requests[2 * EACH]["speculative"] for requests in rounds]
    assert firsts == [False, {"draft": "suffix", "depth": 3}, {"draft": "ngram", "depth": 3}]


def test_an_answer_that_is_not_plain_decodings_is_seen() -> None:
    with faking(speculating(wrong="suffix"), maker="forerun") as fake:
        found = {r.draft: r for r in measure(fake, drafts=["suffix", "ngram"]).results}
    assert (found["suffix"].same, found["suffix"].first_difference) == (False, 2)
    assert (found["ngram"].same, found["ngram"].first_difference) == (True, None)


def test_prompts_that_the_server_has_seen_are_told() -> None:
    with faking() as fake:
        assert not measure(fake).repeated
        assert measure(fake, prompts=PROMPTS[:2]).repeated
    seen = {
        "prompt_tokens": 10,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 9},
    }
    with faking(lambda handler, body: handler.stream(chunk("a"), END, {"usage": seen})) as fake:
        report = measure(fake)
    assert report.repeated and report.results[0].cached == pytest.approx(0.9)


def test_vllms_counters_serve_where_answers_carry_no_statistics() -> None:
    """The difference over each counted run, of all engines; another gauge of a like name is not
    counted."""
    totals = [0]

    def behave(handler: Handler, body: dict[str, Any]) -> None:
        totals[0] += 1
        n = totals[0]
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="{e}"}} {n}.0' for e in (0, 1)]
        lines += [
            f"vllm:spec_decode_num_draft_tokens_total {8 * n}",
            "# HELP x",
            "vllm:spec_decode_num_drafts_created 9",
        ]
        lines += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(n * n)}']
        handler.fake.pages["/metrics"] = (200, "\n".join(lines))
        good(handler, body)

    with faking(behave, maker="vllm") as fake:
        (found,) = measure(fake).results
    assert (found.accepted_length, found.acceptance) == (1 + (25 - 4) / 6, (25 - 4) / 24)
    assert (
        fake.asked[0]["return_token_ids"]
        and fake.asked[0]["ignore_eos"]
        and "speculative" not in fake.asked[0]
    )


def test_a_run_in_seconds_sends_until_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("forerun.bench.server.load.time.perf_counter", lambda: clock[0])

    def tick(handler: Handler, body: dict[str, Any]) -> None:
        clock[0] += 1.0
        good(handler, body)

    with faking(tick) as fake:
        report = measure(fake, seconds=4.5)
    assert report.results[0].finished == 5 and len(fake.asked) == 1 + 1 + 5


# what goes wrong

MISBEHAVIOUR: dict[str, tuple[Any, str]] = {
    "refuses": (lambda h, b: h.reply(400, '{"error": {"message": "too\\nlong"}}'), "400 too long"),
    "is busy": (lambda h, b: h.reply(429, '{"detail": "come back"}'), "429 come back"),
    "fails in HTML": (
        lambda h, b: h.reply(502, "<html>bad \x1b[31mgateway</html>", "text/html"),
        "502 <html>bad [31mg",
    ),
    "does not stream": (lambda h, b: h.reply(200, '{"choices": []}'), "text/event-stream"),
    "streams garbage": (
        lambda h, b: h.stream(chunk("a"), '{"choi'),
        'no chunk of an answer: {"choi',
    ),
    "streams a list": (lambda h, b: h.stream([1]), "no chunk of an answer: [1]"),
    "streams odd choices": (
        lambda h, b: h.stream({"choices": {"text": "a"}}),
        "no chunk of an answer",
    ),
    "streams deep JSON": (lambda h, b: h.stream("[" * 100_000), "no chunk of an answer: [[["),
    "streams an error": (
        lambda h, b: h.stream(chunk("a"), {"error": {"message": "lost it"}}, "[DONE]"),
        "lost it",
    ),
    "ends early": (lambda h, b: h.stream(chunk("a"), "[DONE]"), "ended before the answer did"),
    "says nothing": (lambda h, b: h.stream(), "ended before the answer did"),
    "never stops": (lambda h, b: h.stream(*[chunk("a")] * 40, END), "sends on after 5 tokens"),
    "sends huge lines": (lambda h, b: h.stream("x" * (2 << 20)), "exceeded the 1048576 byte limit"),
    "never sends": (
        lambda h, b: (h.stream(), h.wfile.flush(), h.fake.released.wait(PATIENCE)),
        "nothing came for 1 s",
    ),
    "only pings": (lambda h, b: ping(h), "nothing came for 1 s"),
    "hangs up": (lambda h, b: setattr(h, "close_connection", True), "disconnected"),
}


def ping(handler: Handler) -> None:
    """Comments, which keep a connection alive and say nothing, until the client has gone."""
    handler.begin()
    try:
        while not handler.fake.released.wait(0.01):
            handler.wfile.write(b": ping\n\n")
    except OSError:
        pass


@pytest.mark.parametrize(("behaviour", "says"), MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
def test_a_server_that_does_not_do_what_it_is_asked(behaviour: Any, says: str) -> None:
    """One line that says what it did instead, before anything is measured; and the same as a
    failure of a request."""
    patience = 1.0 if "for 1 s" in says else PATIENCE
    with faking(behaviour) as fake:
        with pytest.raises(ForerunError) as told:
            measure(fake, timeout=patience)
        message = str(told.value)
        assert (
            says in message
            and fake.url in message
            and message.isprintable()
            and type(told.value) is ForerunError
        )

    def sometimes(handler: Handler, body: dict[str, Any]) -> None:
        (behaviour if len(handler.fake.asked) == 4 else good)(handler, body)

    with faking(sometimes) as fake:
        report = measure(fake, timeout=patience)
    (error,) = report.results[0].errors
    assert says in error and report.results[0].finished == EACH - 1 and report.stopped is None


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "HTML": (
        {"pages": {"/v1/models": (200, "<html>hello")}},
        "no server of OpenAI's API: /v1/models gave <html>hello",
    ),
    "no such page": (
        {"pages": {"/v1/models": (404, "")}},
        "no server of OpenAI's API: /v1/models gave 404",
    ),
    "odd JSON": ({"pages": {"/v1/models": (200, "[]")}}, "no server of OpenAI's API"),
    "odd models": ({"pages": {"/v1/models": (200, '{"data": [3, {"id": 4}]}')}}, "lists no model"),
    "data that is no list": ({"pages": {"/v1/models": (200, '{"data": 3}')}}, "lists no model"),
    "no key": (
        {"pages": {"/v1/models": (401, '{"error": "who?"}')}},
        "refuses the key (401 who?): give --api-key-env",
    ),
    "elsewhere": (
        {"pages": {"/v1/models": (301, "")}},
        "no server of OpenAI's API: /v1/models gave 301",
    ),
    "two models": ({"models": ["one", "two"]}, "give --model, one of one, two"),
}


@pytest.mark.parametrize(("options", "says"), MODELS.values(), ids=MODELS.keys())
def test_what_is_no_server_of_openais_api(options: dict[str, Any], says: str) -> None:
    with faking(**options) as fake, pytest.raises(ConfigError) as told:
        measure(fake)
    assert says in str(told.value) and fake.url in str(told.value)


def test_a_model_that_is_not_there_and_one_of_several() -> None:
    with faking(models=["one", "two"]) as fake:
        with pytest.raises(ConfigError, match="no model 'three': it has one, two"):
            measure_serving(Plan(endpoint=Endpoint(fake.url, "three")), PROMPTS)
        measure_serving(
            Plan(endpoint=Endpoint(fake.url, "two", key="s3cret"), requests=[1], repeats=1), PROMPTS
        )
        assert {body["model"] for body in fake.asked} == {"two"} and fake.keys[
            -1
        ] == "Bearer s3cret"


def test_drafts_are_for_forerun_and_must_be_there() -> None:
    with faking() as fake, pytest.raises(ConfigError, match="not forerun's server"):
        measure(fake, drafts=["suffix"])
    with faking(maker="forerun") as fake, pytest.raises(ConfigError, match="did you mean 'suffix'"):
        measure(fake, drafts=["sufix"])


def test_a_url_that_does_not_answer() -> None:
    with faking() as fake:
        pass
    with pytest.raises(ForerunError, match=r"does not answer .*: is the server running"):
        measure(fake)


def test_an_environment_that_no_client_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense://x")
    with pytest.raises(ConfigError, match=r"nonsense.*: look at HTTP_PROXY"):
        measure_serving(Plan(endpoint=Endpoint("http://127.0.0.1:1")), PROMPTS)


def test_rare_errors_are_told_as_one() -> None:
    failed = [
        answer(i, 0.0, [], finished=False, error=f"busy, request {i // 4}") for i in range(40)
    ]
    errors = result(1, Arm(), [Run(0.0, 1.0, failed)], None).errors
    assert errors == {f"busy, request {i}": 4 for i in range(5)} | {"others": 20}


@pytest.mark.parametrize("clients", [1, 4])
def test_what_was_measured_before_the_server_went_is_kept(clients: int) -> None:
    """It dies in the second round: the first is reported, whole, and why there is no more."""

    def dying(handler: Handler, body: dict[str, Any]) -> None:
        handler.fake.dead = len(handler.fake.asked) > 1 + clients + clients * EACH
        (handler.reply(500, "") if handler.fake.dead else good(handler, body))

    with faking(dying) as fake:
        report = measure(fake, requests=[clients], repeats=3)
    assert report.stopped and DIES in report.stopped
    assert report.results[0].rounds == 1 and report.results[0].finished == clients * EACH


def test_a_server_that_refuses_some_while_it_works_for_others_is_not_gone() -> None:
    """One client is answered only after the other has been refused three times: busy, not dead."""
    refused = threading.Semaphore(0)

    def busy(handler: Handler, body: dict[str, Any]) -> None:
        place = handler.fake.asked.index(body) - 3  # one alone, two to warm up, then six
        if place == 0:
            assert all(refused.acquire(timeout=PATIENCE) for _ in range(3))
        if place in (1, 2, 3):
            handler.reply(429, "busy")
            refused.release()
        else:
            good(handler, body)

    with faking(busy) as fake:
        report = measure(fake, requests=[2])
    assert report.stopped is None
    assert (report.results[0].finished, report.results[0].errors) == (3, {"429 busy": 3})


def test_a_server_that_is_gone_at_the_very_end_is_told() -> None:
    def last(handler: Handler, body: dict[str, Any]) -> None:
        handler.fake.dead = len(handler.fake.asked) == 1 + 1 + EACH
        good(handler, body)

    with faking(last) as fake:
        report = measure(fake)
    assert report.stopped and "does not answer" in report.stopped and report.results[0].rounds == 1


BAD_PLANS: list[dict[str, Any]] = [
    {"requests": []}, {"requests": [0]}, {"requests": [1025]}, {"tokens": 0}, {"repeats": 0}, {"temperature": -0.1},
    {"temperature": float("nan")}, {"seconds": 0.0}, {"seconds": float("inf")}, {"seed": -1}, {"depth": 3},
    {"depth": 65, "drafts": ["suffix"]}, {"seconds": 1.0, "drafts": ["suffix"]},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_PLANS, ids=str)
def test_plans_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Plan(endpoint=Endpoint("http://127.0.0.1:8000"), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"url": "127.0.0.1:8000"}, {"url": "ftp://a"}, {"url": "http://"}, {"url": "http://[::1"}, {"url": "http://a:99999"},
        {"url": "http://a?b"}, {"url": "http://me:secret@a"}, {"url": "http://a\nb"}, {"timeout": 0.0},
        {"timeout": float("nan")}, {"key": ""}, {"key": "a\nb"}, {"key": "schlüssel"},
    ],
    ids=str,
)  # fmt: skip
def test_endpoints_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Endpoint(**({"url": "http://127.0.0.1:8000"} | options))


def test_prompts_that_cannot_be_asked() -> None:
    for prompt, chat in (("", False), ([], True), ([{"role": "user"}], False), ([1, 2], True)):
        with pytest.raises(RequestError):
            as_asked(prompt, chat)
    with pytest.raises(RequestError, match="no prompts"):
        measure_serving(Plan(endpoint=Endpoint("http://127.0.0.1:1")), [])
    assert as_asked([1, 2], chat=False) == [1, 2] and one_line("a\x07\n" + "b" * 999).startswith(
        "a bb"
    )


# the verb


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: run(monkeypatch, capsys, "bench", "serve", *args)


def test_our_own_server_says_the_same_with_every_draft(bench, tmp_path: Path) -> None:
    """The real server, by key: figures of each draft, and of other texts by chat; without the key
    one line."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("replaced")
    with (
        serving(LLM(tiny.spoken(), kv_tokens=8192, max_rows=4), api_key=("s3cret",)) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        code, out, err = bench(server.url, "--requests", "1")
        assert (code, out) == (2, "") and "refuses the key" in err and len(err.splitlines()) == 1
        patch.setenv("SERVE_KEY", "s3cret")
        flags = ["--api-key-env", "SERVE_KEY", "--tokens", "24", "--repeats", "1"]
        more = ["--requests", "1,2", "--drafts", "suffix", "--temperature", "0.7", "--json"]
        more += ["--out", str(lines), "--out", str(tmp_path / "page.html")]
        code, out, err = bench(server.url, *flags, *more)
        report = json.loads(out)
        assert (code, err, report["kind"], report["server"], report["stopped"]) == (
            0,
            "",
            "serve",
            "forerun",
            None,
        )
        assert [(r["requests"], r["draft"], r["same"]) for r in report["results"]] == [
            (n, draft, True) for n in (1, 2) for draft in ("off", "suffix")
        ]
        plain, drafted = report["results"][:2]
        assert plain["accepted_length"] == 1.0 and drafted["accepted_length"] >= 1.0
        assert (
            plain["acceptance"] is None
            and plain["counted"] == "usage"
            and 0.5 < plain["cached"] <= 1
        )
        assert all(
            r["errors"] == {} and r["finished"] == r["requests"] * EACH for r in report["results"]
        )
        written = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [w["requests"] for w in written] == [1, 1, 2, 2] and all(
            w["url"] == server.url for w in written
        )
        assert "first token ms" in (tmp_path / "page.html").read_text()
        assert sorted(tmp_path.iterdir()) == [lines, tmp_path / "page.html"]
        code, out, err = bench(
            server.url, *flags, "--requests", "2", "--chat", "--category", "chat"
        )
        assert code == 0 and "round 1 of 1" in err and out.split()[:3] == ["at", "once", "tokens/s"]
        assert (
            out.splitlines()[1].split()[0] == "2" and "another --seed" in out
        )  # there are four such tasks only


def test_failures_are_in_the_table(bench) -> None:
    def sometimes(handler: Handler, body: dict[str, Any]) -> None:
        handler.reply(429, '{"error": "busy"}') if len(handler.fake.asked) == 4 else good(
            handler, body
        )

    with faking(sometimes) as fake:
        code, out, _ = bench(fake.url, "--requests", "1", "--repeats", "1", "--tokens", "5")
    assert code == 0 and "requests, 1 at once: 1 failed: 429 busy" in out


def test_partial_figures_come_with_exit_code_1(bench, tmp_path: Path) -> None:
    def dying(handler: Handler, body: dict[str, Any]) -> None:
        handler.fake.dead = len(handler.fake.asked) > 1 + 1 + EACH
        (handler.reply(500, "") if handler.fake.dead else good(handler, body))

    with faking(dying) as fake:
        code, out, err = bench(
            fake.url, "--requests", "1", "--tokens", "5", "--out", str(tmp_path / "x.jsonl")
        )
    assert code == 1 and out.startswith("at once") and DIES in err.splitlines()[-1]
    assert DIES in json.loads((tmp_path / "x.jsonl").read_text())["stopped"]


def test_a_file_that_cannot_be_written_keeps_what_it_held(
    bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "x.jsonl").write_text("before")
    monkeypatch.setattr("forerun.utils.os.replace", full)
    with faking() as fake:
        flags = [
            "--requests",
            "1",
            "--repeats",
            "1",
            "--tokens",
            "5",
            "--out",
            str(tmp_path / "x.jsonl"),
        ]
        code, out, err = bench(fake.url, *flags)
    assert (
        code == 1
        and out
        and err.splitlines()[-1]
        == f"forerun: {tmp_path / 'x.jsonl'} cannot be written: No space left on device"
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


BAD = {
    "no address": (["localhost:8000"], "write it like http"),
    "no numbers": (["http://a", "--requests", "1,two"], "'two' is not a whole number"),
    "no requests": (["http://a", "--requests", ","], "at least one number of requests"),
    "no drafts": (["http://a", "--drafts", ","], "--drafts names none"),
    "odd depth": (["http://a", "--drafts", "suffix", "--depth", "deep"], "--depth deep"),
    "no key": (["http://a", "--api-key-env", "SERVE_NO_SUCH_KEY"], "SERVE_NO_SUCH_KEY is not set"),
    "no file": (["http://a", "--prompts", "./nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    "no category": (["http://a", "--category", "edits"], "did you mean 'edit'"),
    "nowhere to write": (["http://a", "--out", "./nowhere/x.jsonl"], "there is none to hold it"),
}


@pytest.mark.parametrize(("args", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(bench, args: list[str], says: str) -> None:
    code, out, err = bench(*args)
    assert (code, out) == (2, "") and says in err and err.splitlines()[-1].startswith("forerun: ")


def test_without_the_extra_it_says_what_to_install(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forerun.bench.server.endpoint")
    monkeypatch.setitem(sys.modules, "httpx2", None)
    code, _, err = bench("http://a")
    assert code == 1 and err == "forerun: this needs httpx2: pip install 'forerun[bench]'\n"


def test_ctrl_c_prints_what_was_measured() -> None:
    """The second round never ends; the first is printed within a moment of the signal, and the exit
    code says why."""
    second = threading.Event()

    def slow(handler: Handler, body: dict[str, Any]) -> None:
        if len(handler.fake.asked) <= 1 + 1 + EACH:
            return good(handler, body)
        handler.begin()
        handler.say(chunk("a"))
        second.set()
        handler.fake.released.wait(PATIENCE)
        return None

    with faking(slow) as fake:
        command = [
            sys.executable,
            "-m",
            "forerun",
            "bench",
            "serve",
            fake.url,
            "--requests",
            "1",
            "--json",
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert second.wait(PATIENCE)
        done.send_signal(signal.SIGINT)
        out, err = done.communicate(
            timeout=PATIENCE / 2
        )  # well under the server's patience, and the client's
    report = json.loads(out)
    assert (
        done.returncode == 130
        and err.startswith("forerun: interrupted; ")
        and len(err.splitlines()) == 1
    )
    assert report["stopped"] == INTERRUPTED and report["results"][0]["rounds"] == 1


def test_help_needs_nothing_heavy_and_shows_an_example() -> None:
    code = (
        "import sys; from forerun import cli; sys.argv = ['forerun', 'bench', 'serve', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'httpx2'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout and "forerun bench serve http" in done.stdout
