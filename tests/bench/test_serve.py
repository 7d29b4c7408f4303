"""Load on a server: the figures, fair comparison of drafts, and the ways a server can fail."""

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
from forerun.bench.endpoint import (
    Answer,
    Endpoint,
    SpecStats,
    printable,
    request_prompt,
    spec_stats,
)
from forerun.bench.serve import (
    INTERRUPTED,
    OFF,
    LoadArm,
    LoadRun,
    ServePlan,
    ServeReport,
    measure_serving,
    percentiles,
    summarize,
    token_gaps,
)
from forerun.bench.serve import REQUESTS_PER_CLIENT as PER_CLIENT
from tests import tiny
from tests.bench.fake_openai import END, TIMEOUT, Fake, Handler, chunk, faking, respond, usage
from tests.cli.test_main import run
from tests.server.serving import serving

PROMPTS = [f"prompt {i}" for i in range(100)]
SERVER_LOST = "fails every request"


def measure(
    fake: Fake, prompts: list[Any] = PROMPTS, timeout: float = TIMEOUT, **options: Any
) -> ServeReport:
    """Measure a fake server briefly."""
    given = {"requests": [1], "tokens": 5, "repeats": 1} | options
    return measure_serving(
        ServePlan(endpoint=Endpoint(fake.url, timeout=timeout), **given), prompts
    )


def answer(index: int, chunks: list[tuple[float, int]], **options: Any) -> Answer:
    return Answer(index, 10.0, chunks, **({"finished": True} | options))


def test_the_speed_counts_tokens_within_the_window() -> None:
    """Later chunks and failed answers do not count; without ids, chunks are scaled to the usage."""
    exact = answer(0, [(11.0, 1), (12.0, 4), (14.5, 3)], counted=8)
    scaled = answer(1, [(11.0, 1), (12.0, 1), (13.0, 1), (15.0, 1)], counted=8)
    failed = answer(2, [(11.0, 9)], finished=False, error="gone")
    assert LoadRun(10.0, 14.0, [exact, scaled, failed]).speed == (5 + 3 * 2) / 4
    assert LoadRun(10.0, 14.0, [failed]).speed == 0.0


def test_latencies_are_weighted_by_tokens() -> None:
    """The delay of a chunk is divided among its tokens; percentiles are weighted by tokens."""
    assert token_gaps(answer(0, [(1.0, 1), (2.0, 4), (2.5, 1)])) == [(0.25, 4), (0.5, 1)]
    assert token_gaps(answer(0, [(1.0, 1), (2.0, 1)], counted=4)) == [(0.5, 2.0)]
    assert token_gaps(answer(0, [])) == []
    rng = np.random.default_rng(3)
    pairs = zip(rng.exponential(size=50), rng.integers(1, 6, 50), strict=True)
    values = [(float(v), float(n)) for v, n in pairs]
    repeated = [seconds for seconds, count in values for _ in range(int(count))]
    expected = 1e3 * np.percentile(repeated, [50, 95, 99], method="inverted_cdf")
    assert list(percentiles(values).values()) == pytest.approx(list(expected))
    assert percentiles([(0.25, 1.0)])["p99"] == 250.0 and percentiles([]) == {}


def test_a_result_uses_incomplete_rounds_only_if_there_are_no_others() -> None:
    def runs(*speeds: int) -> list[LoadRun]:
        answers = [[answer(0, [(0.5, s)], token_ids=[1, 2])] for s in speeds]
        return [LoadRun(0.0, 1.0, each, complete=True) for each in answers]

    fast, slow = runs(10, 30, 90), runs(5, 10, 10)
    fast[2].complete = False
    found = summarize(4, LoadArm("suffix"), fast, slow)
    assert (found.rounds, found.tokens_per_second) == (2, 20)
    assert (found.times_plain, found.same) == (2.5, True)
    only = summarize(4, LoadArm("suffix"), fast[2:], slow[2:])
    assert (only.rounds, only.tokens_per_second) == (0, 90.0)
    fast[1].answers[0].token_ids = [1, 3]
    found = summarize(4, LoadArm("suffix"), fast, slow)
    assert (found.same, found.first_difference) == (False, 1)
    failed = [answer(i, [], finished=False, error=f"busy, {i // 4}") for i in range(40)]
    errors = summarize(1, LoadArm(), [LoadRun(0.0, 1.0, failed)], []).errors
    assert errors == {f"busy, {i}": 4 for i in range(5)} | {"others": 20}


FORERUN_STATS = {"forerun": {"drafted": 9, "accepted": 6, "steps": 5, "completion_tokens": 12}}
VLLM_STATS = {"num_draft_tokens": 9, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}
LLAMA_CPP_STATS = {"draft_n": 9, "draft_n_accepted": 6, "predicted_n": 16}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"metrics": FORERUN_STATS}, SpecStats(9, 6, 5, 12)),
        ({"metrics": {"speculative_decoding": VLLM_STATS}}, SpecStats(9, 6, 3, 9)),
        ({"timings": LLAMA_CPP_STATS}, SpecStats(9, 6, 10, 16)),
        ({"timings": {"predicted_n": 16}}, None),
        ({"metrics": [1], "timings": "x"}, None),
        ({"metrics": {"forerun": {"drafted": "9"}}}, None),
        ({"metrics": {"speculative_decoding": {"num_draft_tokens": -1}}}, None),
    ],
)
def test_statistics_in_every_format(given: dict[str, Any], found: SpecStats | None) -> None:
    assert spec_stats(given) == found


def test_clients_keep_the_requested_concurrency() -> None:
    """Every answer waits until four requests are in flight, so fewer would never finish."""
    barrier = threading.Barrier(4)

    def wait_for_four(handler: Handler, body: dict[str, Any]) -> None:
        if handler.fake.bodies.index(body) > 0:  # the first request is sent alone
            barrier.wait(TIMEOUT)
        respond(handler, body)

    with faking(wait_for_four) as fake:
        report = measure(fake, requests=[4])
    assert report.results[0].finished == 4 * PER_CLIENT and not report.results[0].errors


def test_token_counts_come_from_usage_or_chunks() -> None:
    with faking() as fake:
        (found,) = measure(fake, tokens=9).results
    assert (found.counted, found.same, found.accepted_length) == ("usage", None, None)
    assert found.requests_per_second == pytest.approx(found.tokens_per_second / 9)
    assert "ignore_eos" not in fake.bodies[0] and fake.bodies[0]["stream_options"]["include_usage"]
    with faking(lambda handler, body: handler.stream(chunk("a"), chunk("bb"), END)) as fake:
        (found,) = measure(fake).results
    assert found.counted == "chunks"
    assert found.requests_per_second == pytest.approx(found.tokens_per_second / 2)


def test_chunks_of_chats_and_reasoning_count() -> None:
    deltas = [{"content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}, {"content": None}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    system = [{"role": "system", "content": "be brief"}]
    with faking(lambda handler, body: handler.stream(*events, END, "[DONE]")) as fake:
        endpoint = Endpoint(f"{fake.url}/v1/", chat=True)
        plan = ServePlan(endpoint=endpoint, requests=[1], repeats=1)
        (found,) = measure_serving(plan, ["hello", system]).results
    assert found.requests_per_second == pytest.approx(found.tokens_per_second / 2)
    assert set(fake.paths) == {"/v1/chat/completions"}
    messages = [body["messages"] for body in fake.bodies[:2]]
    assert messages == [[{"role": "user", "content": "hello"}], system]


def speculating(wrong: str = "") -> Any:
    """Behave like forerun's server; the draft `wrong` changes its third token."""

    def behave(handler: Handler, body: dict[str, Any]) -> None:
        draft = (body["speculative"] or {"draft": OFF})["draft"]
        ids = [body["seed"], 5, 6 + (draft == wrong), 7][: body["max_tokens"]]
        pieces = [chunk(str(i), token_ids=[i]) for i in ids]
        handler.stream(*pieces, END, usage(len(ids), metrics=FORERUN_STATS), "[DONE]")

    return behave


def test_drafts_are_compared_on_the_same_requests_in_turn() -> None:
    """In a round all drafts get the same prompts and seeds; each is first in one of the rounds."""
    drafts = ["suffix", "ngram", "suffix", OFF]
    with faking(speculating(), owner="forerun") as fake:
        report = measure(fake, drafts=drafts, depth=3, requests=[2], repeats=3, tokens=4)
    found = [(r.draft, r.depth, r.same) for r in report.results]
    assert found == [(OFF, None, True), ("suffix", 3, True), ("ngram", 3, True)]
    assert (report.results[1].accepted_length, report.results[1].acceptance) == (12 / 5, 6 / 9)
    assert report.results[0].times_plain == 1.0 and report.results[1].interval is not None
    seeds = defaultdict(list)
    for body in fake.bodies[1:]:
        assert body["prompt"] == f"prompt {body['seed']}" and body["ignore_eos"]
        draft = body["speculative"]["draft"] if body["speculative"] else OFF
        seeds[draft, body["max_tokens"]].append(body["seed"])
    counted = sorted(range(1, 3 + 3 * 2 * PER_CLIENT))  # two warm up; three rounds of two clients
    assert all(sorted(seeds[draft, 4]) == counted for draft in (OFF, "suffix", "ngram"))
    assert sorted(seeds[OFF, 1]) == counted[2:] and len(seeds) == 4  # prefill before each round
    rounds = [fake.bodies[7 + i * 4 * 2 * PER_CLIENT :][: 4 * 2 * PER_CLIENT] for i in range(3)]
    firsts = [requests[2 * PER_CLIENT]["speculative"] for requests in rounds]
    assert firsts == [False, {"draft": "suffix", "depth": 3}, {"draft": "ngram", "depth": 3}]


def test_a_different_output_is_reported() -> None:
    with faking(speculating(wrong="suffix"), owner="forerun") as fake:
        found = {r.draft: r for r in measure(fake, drafts=["suffix", "ngram"]).results}
    assert (found["suffix"].same, found["suffix"].first_difference) == (False, 2)
    assert (found["ngram"].same, found["ngram"].first_difference) == (True, None)


def test_repeated_prompts_are_reported() -> None:
    with faking() as fake:
        assert not measure(fake).repeated
        assert measure(fake, prompts=PROMPTS[:2]).repeated
    seen = {"prompt_tokens": 10, "completion_tokens": 1}
    seen["prompt_tokens_details"] = {"cached_tokens": 9}
    with faking(lambda handler, body: handler.stream(chunk("a"), END, {"usage": seen})) as fake:
        report = measure(fake)
    assert report.repeated and report.results[0].cached == pytest.approx(0.9)


def test_vllms_counters_replace_missing_statistics() -> None:
    """They are differences over a counted run, summed over engines; similar names do not count."""

    def behave(handler: Handler, body: dict[str, Any]) -> None:
        n = len(handler.fake.bodies)
        name = "vllm:spec_decode_num"
        lines = [f'{name}_drafts_total{{engine="{e}"}} {n}.0' for e in (0, 1)]
        lines += [f"{name}_draft_tokens_total {8 * n}", "# HELP x", f"{name}_drafts_created 9"]
        lines += [f'{name}_accepted_tokens_total{{engine="0"}} {float(n * n)}']
        handler.fake.pages["/metrics"] = (200, "\n".join(lines))
        respond(handler, body)

    with faking(behave, owner="vllm") as fake:
        (found,) = measure(fake).results
    assert (found.accepted_length, found.acceptance) == (1 + (25 - 4) / 6, (25 - 4) / 24)
    assert fake.bodies[0]["return_token_ids"] and "speculative" not in fake.bodies[0]


def test_a_run_that_is_limited_in_seconds_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("forerun.bench.serve.time.perf_counter", lambda: clock[0])

    def tick(handler: Handler, body: dict[str, Any]) -> None:
        clock[0] += 1.0
        respond(handler, body)

    with faking(tick) as fake:
        report = measure(fake, seconds=4.5)
    assert report.results[0].finished == 5 and len(fake.bodies) == 1 + 1 + 5


def ping(handler: Handler) -> None:
    """Send comments, which keep a connection alive, until the client disconnects."""
    handler.begin()
    try:
        while not handler.fake.released.wait(0.01):
            handler.wfile.write(b": ping\n\n")
    except OSError:
        pass


ERROR = '{"error": {"message": "too\\nlong"}}'
MISBEHAVIOUR: list[tuple[Any, str]] = [
    (lambda h, b: h.reply(400, ERROR), "400 too long"),
    (lambda h, b: h.reply(429, '{"detail": "come back"}'), "429 come back"),
    (lambda h, b: h.reply(502, "<html>bad \x1b[31m</html>", "text/html"), "502 <html>bad [31m"),
    (lambda h, b: h.reply(200, '{"choices": []}'), "text/event-stream"),
    (lambda h, b: h.stream(chunk("a"), '{"choi'), 'invalid chunk: {"choi'),
    (lambda h, b: h.stream([1]), "invalid chunk: [1]"),
    (lambda h, b: h.stream({"choices": {"text": "a"}}), "invalid chunk"),
    (lambda h, b: h.stream("[" * 100_000), "invalid chunk: [[["),
    (lambda h, b: h.stream(chunk("a"), {"error": {"message": "lost it"}}, "[DONE]"), "lost it"),
    (lambda h, b: h.stream(chunk("a"), "[DONE]"), "ended before the answer did"),
    (lambda h, b: h.stream(), "ended before the answer did"),
    (lambda h, b: h.stream(*[chunk("a")] * 40, END), "continues after 5 tokens"),
    (lambda h, b: h.stream("x" * (2 << 20)), "exceeded the 1048576 byte limit"),
    (lambda h, b: (h.stream(), h.fake.released.wait(TIMEOUT)), "nothing came for 1 s"),
    (lambda h, b: ping(h), "nothing came for 1 s"),
    (lambda h, b: setattr(h, "close_connection", True), "disconnected"),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("behaviour", "message"), MISBEHAVIOUR, ids=lambda x: str(x)[:24])
def test_a_misbehaving_server_gives_one_line(behaviour: Any, message: str) -> None:
    """Before the measurement it is an error of one line, later a failed request."""
    timeout = 1.0 if "for 1 s" in message else TIMEOUT
    with faking(behaviour) as fake, pytest.raises(ForerunError) as caught:
        measure(fake, timeout=timeout)
    shown = str(caught.value)
    assert message in shown and fake.url in shown and shown.isprintable()

    def sometimes(handler: Handler, body: dict[str, Any]) -> None:
        (behaviour if len(handler.fake.bodies) == 4 else respond)(handler, body)

    with faking(sometimes) as fake:
        report = measure(fake, timeout=timeout)
    (error,) = report.results[0].errors
    assert message in error and report.stopped is None
    assert report.results[0].finished == PER_CLIENT - 1


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((200, "<html>hello"), "no server with the OpenAI API: /v1/models gave <html>hello"),
        ((404, ""), "/v1/models gave 404"),
        ((301, ""), "/v1/models gave 301"),
        ((200, "[]"), "no server with the OpenAI API"),
        ((200, '{"data": [3, {"id": 4}]}'), "lists no model"),
        ((200, '{"data": 3}'), "lists no model"),
        ((401, '{"error": "who?"}'), "refuses the key (401 who?): give --api-key-env"),
        ((200, '{"data": [{"id": "one"}, {"id": "two"}]}'), "give --model, one, two"),
    ],
)
def test_a_server_without_the_openai_api_is_refused(page: tuple[int, str], message: str) -> None:
    with faking(pages={"/v1/models": page}) as fake, pytest.raises(ConfigError) as caught:
        measure(fake)
    assert message in str(caught.value) and fake.url in str(caught.value)


def test_models_keys_and_drafts_are_checked_first() -> None:
    with faking(models=["one", "two"]) as fake:
        with pytest.raises(ConfigError, match="no model 'three': it has one, two"):
            measure_serving(ServePlan(endpoint=Endpoint(fake.url, "three")), PROMPTS)
        endpoint = Endpoint(fake.url, "two", key="s3cret")
        measure_serving(ServePlan(endpoint=endpoint, requests=[1], repeats=1), PROMPTS)
        assert {body["model"] for body in fake.bodies} == {"two"}
        assert fake.keys[-1] == "Bearer s3cret"
        with pytest.raises(ConfigError, match="several models"):
            measure(fake)
    with faking() as fake, pytest.raises(ConfigError, match="not a forerun server"):
        measure(fake, drafts=["suffix"])
    with faking(owner="forerun") as fake, pytest.raises(ConfigError, match="did you mean 'suffix'"):
        measure(fake, drafts=["sufix"])
    with pytest.raises(ForerunError, match=r"does not answer .*: is the server running"):
        measure(fake)


def test_an_invalid_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense://x")
    with pytest.raises(ConfigError, match=r"nonsense.*: check HTTP_PROXY"):
        measure_serving(ServePlan(endpoint=Endpoint("http://127.0.0.1:1")), PROMPTS)


def dying(after: int) -> Any:
    """Behave well for some requests, then refuse everything."""

    def behave(handler: Handler, body: dict[str, Any]) -> None:
        handler.fake.is_dead = len(handler.fake.bodies) > after
        (handler.reply(500, "") if handler.fake.is_dead else respond(handler, body))

    return behave


@pytest.mark.parametrize("clients", [1, 4])
def test_results_before_the_server_died_are_kept(clients: int) -> None:
    with faking(dying(1 + clients + clients * PER_CLIENT)) as fake:
        report = measure(fake, requests=[clients], repeats=3)
    assert report.stopped and SERVER_LOST in report.stopped
    assert report.results[0].rounds == 1 and report.results[0].finished == clients * PER_CLIENT

    def die_after_the_last(handler: Handler, body: dict[str, Any]) -> None:
        handler.fake.is_dead = len(handler.fake.bodies) == 1 + 1 + PER_CLIENT
        respond(handler, body)

    with faking(die_after_the_last) as fake:
        report = measure(fake)
    assert "does not answer" in str(report.stopped) and report.results[0].rounds == 1


def test_a_busy_server_does_not_end_the_run() -> None:
    """One client is answered only after the other was refused three times."""
    refused = threading.Semaphore(0)

    def busy(handler: Handler, body: dict[str, Any]) -> None:
        number = handler.fake.bodies.index(body) - 3  # one alone, two to warm up, then six
        if number == 0:
            assert all(refused.acquire(timeout=TIMEOUT) for _ in range(3))
        if number in (1, 2, 3):
            handler.reply(429, "busy")
            refused.release()
        else:
            respond(handler, body)

    with faking(busy) as fake:
        report = measure(fake, requests=[2])
    assert report.stopped is None
    assert (report.results[0].finished, report.results[0].errors) == (3, {"429 busy": 3})


def test_invalid_plans_endpoints_and_prompts() -> None:
    url = "http://127.0.0.1:1"
    for options in (
        *({"requests": []}, {"requests": [0]}, {"requests": [1025]}, {"tokens": 0}),
        *({"repeats": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"seed": -1}),
        *({"seconds": 0.0}, {"seconds": float("inf")}, {"depth": 3}),
        *({"depth": 65, "drafts": ["suffix"]}, {"seconds": 1.0, "drafts": ["suffix"]}),
    ):
        with pytest.raises(ConfigError):
            ServePlan(endpoint=Endpoint(url), **options)
    for options in (
        *({"url": "127.0.0.1:8000"}, {"url": "ftp://a"}, {"url": "http://"}, {"url": "http://a?b"}),
        *({"url": "http://[::1"}, {"url": "http://a:99999"}, {"url": "http://me:secret@a"}),
        *({"url": "http://a\nb"}, {"timeout": 0.0}, {"timeout": float("nan")}),
        *({"key": ""}, {"key": "a\nb"}, {"key": "schlüssel"}),
    ):
        with pytest.raises(ConfigError):
            Endpoint(**({"url": url} | options))
    for prompt, chat in (("", False), ([], True), ([{"role": "user"}], False), ([1, 2], True)):
        with pytest.raises(RequestError):
            request_prompt(prompt, chat)
    with pytest.raises(RequestError, match="no prompts"):
        measure_serving(ServePlan(endpoint=Endpoint(url)), [])
    assert request_prompt([1, 2], chat=False) == [1, 2]
    assert printable("a\x07\n" + "b" * 999).startswith("a bb")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: run(monkeypatch, capsys, "bench", "serve", *args)


def test_bench_serve_on_a_forerun_server(bench, tmp_path: Path) -> None:
    """Drafts on a real server give the same output; without the key there is one line."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("replaced")
    llm = LLM(tiny.repetitive(), kv_tokens=8192, max_rows=4)
    with serving(llm, api_key=("s3cret",)) as server, pytest.MonkeyPatch.context() as patch:
        code, out, err = bench(server.url, "--requests", "1")
        assert (code, out, len(err.splitlines())) == (2, "", 1) and "refuses the key" in err
        patch.setenv("SERVE_KEY", "s3cret")
        flags = ["--api-key-env", "SERVE_KEY", "--tokens", "24", "--repeats", "1"]
        more = ["--requests", "1,2", "--drafts", "suffix", "--temperature", "0.7", "--json"]
        code, out, err = bench(server.url, *flags, *more, "--out", str(lines))
        report = json.loads(out)
        assert (code, err, report["kind"], report["server"]) == (0, "", "serve", "forerun")
        found = [(r["requests"], r["draft"], r["same"]) for r in report["results"]]
        assert found == [(n, draft, True) for n in (1, 2) for draft in ("off", "suffix")]
        plain, drafted = report["results"][:2]
        assert plain["accepted_length"] == 1.0 and drafted["accepted_length"] >= 1.0
        assert plain["acceptance"] is None and 0.5 < plain["cached"] <= 1
        assert all(r["finished"] == r["requests"] * PER_CLIENT for r in report["results"])
        written = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [w["requests"] for w in written] == [1, 1, 2, 2]
        assert all(w["url"] == server.url for w in written) and list(tmp_path.iterdir()) == [lines]
        flags += ["--requests", "2", "--chat", "--category", "chat"]
        code, out, err = bench(server.url, *flags)
        assert code == 0 and "round 1 of 1" in err
        assert out.split()[:3] == ["at", "once", "tokens/s"] and "another --seed" in out


def test_bench_serve_prints_failures_and_partial_results(bench, tmp_path: Path) -> None:
    def sometimes(handler: Handler, body: dict[str, Any]) -> None:
        is_fourth = len(handler.fake.bodies) == 4
        handler.reply(429, '{"error": "busy"}') if is_fourth else respond(handler, body)

    flags = ["--requests", "1", "--tokens", "5"]
    with faking(sometimes) as fake:
        code, out, _ = bench(fake.url, *flags, "--repeats", "1")
    assert code == 0 and "requests, 1 at once: 1 failed: 429 busy" in out
    with faking(dying(1 + 1 + PER_CLIENT)) as fake:
        code, out, err = bench(fake.url, *flags, "--out", str(tmp_path / "x.jsonl"))
    assert code == 1 and out.startswith("at once") and SERVER_LOST in err.splitlines()[-1]
    assert SERVER_LOST in json.loads((tmp_path / "x.jsonl").read_text())["stopped"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["localhost:8000"], "write it like http"),
        (["http://a", "--requests", "1,two"], "'two' is not a whole number"),
        (["http://a", "--requests", ","], "at least one number of requests"),
        (["http://a", "--drafts", ","], "--drafts is empty"),
        (["http://a", "--drafts", "suffix", "--depth", "deep"], "--depth deep"),
        (["http://a", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["http://a", "--prompts", "./nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["http://a", "--category", "edits"], "did you mean 'edit'"),
        (["http://a", "--out", "./nowhere/x.jsonl"], "in a directory that exists"),
    ],
)
def test_bad_input_is_one_line(bench, args: list[str], message: str) -> None:
    code, out, err = bench(*args)
    assert (code, out) == (2, "") and message in err
    assert err.splitlines()[-1].startswith("forerun: ")


def test_a_missing_extra_is_named(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forerun.bench.endpoint")
    monkeypatch.setitem(sys.modules, "httpx2", None)
    code, _, err = bench("http://a")
    assert code == 1 and err == "forerun: this needs httpx2: pip install 'forerun[bench]'\n"


def test_the_client_does_not_import_torch() -> None:
    code = "import forerun.bench.serve, sys; print('torch' in sys.modules)"
    done = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert done.strip() == "False"


def test_ctrl_c_prints_what_was_measured() -> None:
    """The second round never ends; the first is printed soon after the signal."""
    second = threading.Event()

    def slow(handler: Handler, body: dict[str, Any]) -> None:
        if len(handler.fake.bodies) <= 1 + 1 + PER_CLIENT:
            respond(handler, body)
            return
        handler.begin()
        handler.send(chunk("a"))
        second.set()
        handler.fake.released.wait(TIMEOUT)

    with faking(slow) as fake:
        command = [sys.executable, "-m", "forerun", "bench", "serve", fake.url]
        done = subprocess.Popen(
            [*command, "--requests", "1", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert second.wait(TIMEOUT)
        done.send_signal(signal.SIGINT)
        out, err = done.communicate(timeout=TIMEOUT / 2)
    report = json.loads(out)
    assert done.returncode == 130 and len(err.splitlines()) == 1
    assert err.startswith("forerun: interrupted; ")
    assert report["stopped"] == INTERRUPTED and report["results"][0]["rounds"] == 1
