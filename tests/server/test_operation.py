"""Running it: keys, limits, time-outs, metrics, clients that go away, an engine that fails, the
end."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from forerun import __version__
from forerun.llm import LLM
from forerun.server.listen import listen
from forerun.server.settings import Settings
from tests.server.serving import Serving, held, serving, slow, sse, until

ASKED = {"prompt": "def add(a, b):", "max_tokens": 8}
LONG = {"prompt": "x = 1\n", "max_tokens": 900, "ignore_eos": True, "speculative": False}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def here(spare: LLM) -> Iterator[Serving]:
    """A server of one's own, which may be hurt."""
    with serving(spare) as running:
        yield running


def error_of(response: httpx2.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and len(error["message"].splitlines()) == 1
    )
    return error


# ------------------------------------------------------------ who may call


def test_everything_but_health_and_the_page_needs_the_key(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "third")
    with serving(spare, api_key=("first", "second")) as s:
        paths = ["/v1/models", "/metrics", "/version", "/server_info", "/ready", "/openapi.json"]
        for path in paths:
            assert error_of(s.http.get(path), 401)["code"] == "invalid_api_key"
        posts = [
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/tokenize",
            "/nowhere",
        ]
        for path in posts:
            error_of(s.http.post(path, json=ASKED), 401)
        for method, path in (("GET", "/api/tags"), ("POST", "/api/chat"), ("POST", "/api/pull")):
            refused = s.http.request(method, path, json={})
            assert refused.status_code == 401 and refused.json() == {
                "error": "give a valid key: Authorization: Bearer KEY"
            }
        assert s.http.get("/health").status_code == 200
        for open_ in ("/", "/playground/nothing.js", "/docs"):
            assert s.http.get(open_).status_code != 401
        for given in (
            "first",
            "Bearer",
            "Bearer firs",
            "Bearer first second",
            "Basic first",
            "Bearer \xe9",
        ):
            error_of(
                s.http.get("/version", headers={"authorization": given.encode("latin-1")}), 401
            )
        for key in ("first", "second", "third"):
            assert (
                s.http.get("/version", headers={"authorization": f"Bearer {key}"}).status_code
                == 200
            )
            assert (
                s.http.get("/version", headers={"authorization": f"bearer  {key}"}).status_code
                == 200
            )
        for path in (
            "/health/../version",
            "//version",
            "/playground/../version",
            "/playground/%2e%2e/version",
        ):
            assert '"version"' not in s.http.get(path).text


def test_pages_do_not_lead_out_of_their_folder(server: Serving) -> None:
    for name in ("..%2fapp.py", "%2e%2e%2fapp.py", "..%2f..%2fconfig.py", "%2fetc%2fpasswd", "%00"):
        response = server.http.get(f"/playground/{name}")
        assert response.status_code in (400, 404), name
    assert not server.http.get("/playground/nothing.js").text.startswith("<")


PREFLIGHT = {
    "origin": "http://a.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["open", "with a key"])
def test_allowed_pages_may_call(spare: LLM, keys: tuple[str, ...]) -> None:
    headers = {"origin": "http://a.example", "authorization": "Bearer secret"}
    with serving(spare, allowed_origins=("http://a.example",), api_key=keys) as s:
        before = s.http.options(
            "/v1/completions", headers=PREFLIGHT
        )  # a browser sends no key with this one
        assert (
            before.status_code == 200
            and before.headers["access-control-allow-origin"] == "http://a.example"
        )
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        for body, status in (
            (ASKED, 200),
            (ASKED | {"n": 0}, 400),
            (ASKED | {"x": 1}, 400),
            ({"prompt": ""}, 400),
        ):
            response = s.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status  # and the page may read why
            assert response.headers.get("access-control-allow-origin") == "http://a.example", body
        stranger = s.http.options(
            "/v1/completions", headers=PREFLIGHT | {"origin": "http://b.example"}
        )
        assert stranger.headers.get("access-control-allow-origin") != "http://b.example"
        if keys:
            refused = s.http.get("/version", headers={"origin": "http://a.example"})
            assert refused.status_code == 401
            assert refused.headers.get("access-control-allow-origin") == "http://a.example"


def test_request_ids_come_back(server: Serving) -> None:
    for path, body in (
        ("/v1/completions", ASKED),
        ("/v1/completions", ASKED | {"n": 0}),
        ("/nowhere", {}),
    ):
        response = server.http.post(path, json=body, headers={"x-request-id": "abc-1.2_3"})
        assert response.headers.get("x-request-id") == "abc-1.2_3", (path, body)
    with server.http.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as response:
        assert response.headers["x-request-id"]
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in response.headers["cache-control"]
        assert response.read().endswith(b"data: [DONE]\n\n")
    strange = server.http.get("/version", headers={"x-request-id": "a b<script>\t" + "x" * 500})
    assert re.fullmatch(r"abscriptx{1,128}", strange.headers["x-request-id"])
    first, second = (server.http.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second


# ------------------------------------------------------------ limits


def test_a_full_queue_is_told_to_come_back(spare: LLM) -> None:
    """max_rows=2 run, one waits, the next is refused; what was refused leaves no trace."""
    with serving(spare, max_queue=1) as s, ThreadPoolExecutor(3) as pool:
        with held(s.service):
            taken = [pool.submit(s.http.post, "/v1/completions", json=ASKED) for _ in range(3)]
            until(lambda: len(s.service.jobs) == 3, "three are taken")
            for more in ({}, {"stream": True}, {"n": 2}):
                response = s.http.post("/v1/completions", json=ASKED | more)
                assert error_of(response, 429)["type"] == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
            assert len(s.service.jobs) == 3
        assert [t.result().status_code for t in taken] == [200] * 3
        assert s.complete()["usage"]["completion_tokens"] == 8
        s.rest()


def test_without_a_queue_there_are_only_places(spare: LLM) -> None:
    with serving(spare, max_queue=0) as s, ThreadPoolExecutor(2) as pool:
        with held(s.service):
            taken = [pool.submit(s.http.post, "/v1/chat/completions", json=CHAT) for _ in range(2)]
            until(lambda: len(s.service.jobs) == 2, "two are taken")
            error_of(s.http.post("/v1/responses", json={"input": "hi"}), 429)
        assert [t.result().status_code for t in taken] == [200] * 2


def test_bodies_and_prompts_over_the_limit(spare: LLM) -> None:
    with serving(spare, max_body=500, max_prompt=20) as s:
        assert s.complete()["choices"]
        response = s.http.post("/v1/completions", json={"prompt": "x" * 500})
        assert "500 bytes" in error_of(response, 413)["message"]
        response = s.http.post(
            "/v1/completions", content=iter([b'{"prompt": "', b"x" * 600, b'"}'])
        )
        assert "500 bytes" in error_of(response, 413)["message"]
        assert (
            error_of(s.http.post("/v1/completions", json={"prompt": [5] * 21}), 400)["param"]
            == "prompt"
        )
        assert (
            s.http.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 1}).status_code
            == 200
        )
        error_of(s.http.post("/v1/completions", json={"prompt": [[5], [5] * 21]}), 400)
        error_of(
            s.http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "a b " * 30}]},
            ),
            400,
        )


def test_the_time_is_up(spare: LLM) -> None:
    with serving(spare, timeout=0.15) as s, slow(s.service):
        for path, body in (
            ("/v1/completions", LONG),
            (
                "/v1/chat/completions",
                CHAT | {"max_tokens": 900, "ignore_eos": True, "speculative": False},
            ),
            ("/v1/responses", {"input": "hi", "speculative": False, "max_output_tokens": 900}),
        ):
            assert error_of(s.http.post(path, json=body), 504)["code"] == "timeout"
        with s.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            assert response.status_code == 200
            assert list(sse(response))[-1]["error"]["code"] == "timeout"
        s.rest()
        assert not s.logged, "a time-out is no failure of the server"


def test_the_time_runs_while_the_engine_is_not_heard_of(spare: LLM) -> None:
    """The limit is on the whole request, the wait before its first token included."""
    with serving(spare, timeout=0.15) as s, held(s.service):
        response = httpx2.post(f"{s.url}/v1/completions", json=ASKED, timeout=5)
        error_of(response, 504)


# ------------------------------------------------------------ what it says of itself


def test_small_answers_are_not_held_back(spare: LLM) -> None:
    """Without TCP_NODELAY every answer on a kept connection waits 40 ms for the client's
    acknowledgement."""
    with serving(spare, listener=listen(Settings(port=0))) as s:
        assert s.http.get("/version").status_code == 200
        (connection,) = s.server.server_state.connections
        at = connection.transport.get_extra_info("socket")
        assert at.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_health_ready_version_info(server: Serving) -> None:
    server.complete()
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert server.http.get("/version").json() == {"version": __version__}
    info = server.http.get("/server_info").json()
    assert info["model"] == "tiny" and info["draft"] == "suffix" and info["rule"] == "match"
    assert {"off", "ngram", "suffix"} <= set(info["drafts"]) and info[
        "context"
    ] == server.service.llm.decoder.context
    assert info["costs"]["pass_ms"] and all(ms > 0 for ms in info["costs"]["pass_ms"].values())
    assert info["chat"] is False and info["sampling"] == server.service.llm.recommended
    for draft in info["drafts"]:  # each of them can be asked for
        server.complete(speculative={"draft": draft})


def test_ready_means_that_the_engine_answers(here: Serving) -> None:
    with ThreadPoolExecutor(1) as pool, held(here.service):
        asked = pool.submit(here.http.get, "/ready")
        assert httpx2.get(f"{here.url}/health", timeout=10).status_code == 200
        assert not asked.done()
    assert asked.result().status_code == 200


def test_tokenize_and_detokenize(server: Serving) -> None:
    llm = server.service.llm
    for text in (
        "def add(a, b):\n    return a + b",
        "sm\N{ROCKET}le \N{GREEK SMALL LETTER ALPHA}",
        " ",
        "\n\n\tx",
        "",
    ):
        tokens = server.answer("/tokenize", {"prompt": text})
        assert tokens["count"] == len(tokens["tokens"]) and tokens[
            "tokens"
        ] == llm.tokenizer.encode(text)
        assert server.answer("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == text
        assert tokens["max_model_len"] == llm.decoder.context
    chat = server.answer("/tokenize", {"messages": CHAT["messages"]})["tokens"]
    usage = server.answer("/v1/chat/completions", CHAT)["usage"]
    assert len(chat) == usage["prompt_tokens"]
    assert server.answer("/detokenize", {"tokens": []}) == {"prompt": ""}


def numbers(s: Serving) -> dict[str, float]:
    """The metrics, each sample by its name with labels."""
    response = s.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_what_happened(here: Serving) -> None:
    before = numbers(here)
    assert before["forerun_completion_tokens_total"] == 0
    drafted = {
        "temperature": 0,
        "ignore_eos": True,
        "speculative": {"depth": 4},
    }  # automatic depth may draft nothing
    answer = here.complete(prompt="x = 1\n" * 12, max_tokens=40, **drafted)
    here.complete(max_tokens=1, stream=False, speculative=False)
    found, stats = numbers(here), answer["metrics"]["forerun"]
    spec = answer["metrics"]["speculative_decoding"]
    assert found["forerun_completion_tokens_total"] == 41
    assert found['forerun_requests_total{reason="length"}'] == 2
    assert found["forerun_prompt_tokens_total"] > answer["usage"]["prompt_tokens"]
    assert found["forerun_target_passes_total"] == stats["steps"] + 1
    assert found["forerun_draft_rounds_total"] == spec["num_spec_steps"] > 0
    drafters = ("suffix", "memory")  # of its own text, and of those before it
    drafted, accepted = (
        sum(found.get(f'forerun_{kind}_tokens_total{{drafter="{name}"}}', 0) for name in drafters)
        for kind in ("drafted", "accepted")
    )
    assert drafted == spec["num_draft_tokens"] and accepted == spec["num_accepted_draft_tokens"] > 0
    positions = sum(v for k, v in found.items() if k.startswith("forerun_accepted_at_total"))
    assert positions == spec["num_accepted_draft_tokens"]
    assert found["forerun_time_to_first_token_seconds_count"] == 2
    assert found["forerun_inter_token_seconds_count"] == 39 - (
        found["forerun_accepted_length_sum"] - 41
    )
    assert found["forerun_running"] == found["forerun_waiting"] == found["forerun_kv_used"] == 0
    assert found["forerun_engine_failures_total"] == 0
    assert not [name for name in found if name.startswith("vllm")]


def test_metrics_under_vllms_names(spare: LLM) -> None:
    spare.forget()  # else it would draft from the texts of other tests
    with serving(spare, metrics_compat="vllm") as s:
        assert "vllm:spec_decode_num_drafts_total" in numbers(s)  # before anything has happened
        body = {"prompt": "x = 1\n" * 12, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        s.complete(**body, speculative={"depth": 4})  # automatic depth may draft nothing
        found = numbers(s)
    pairs = {
        "vllm:spec_decode_num_drafts_total": "forerun_draft_rounds_total",
        "vllm:spec_decode_num_draft_tokens_total": 'forerun_drafted_tokens_total{drafter="suffix"}',
        "vllm:spec_decode_num_accepted_tokens_total": 'forerun_accepted_tokens_total{drafter="suffix"}',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 'forerun_accepted_at_total{position="1"}',
        "vllm:prompt_tokens_total": "forerun_prompt_tokens_total",
        "vllm:generation_tokens_total": "forerun_completion_tokens_total",
        "vllm:num_requests_running": "forerun_running",
        "vllm:num_requests_waiting": "forerun_waiting",
        "vllm:kv_cache_usage_perc": "forerun_kv_used",
        "vllm:time_to_first_token_seconds_count": "forerun_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "forerun_inter_token_seconds_sum",
        'vllm:e2e_request_latency_seconds_bucket{le="+Inf"}': 'forerun_request_seconds_bucket{le="+Inf"}',
    }
    for theirs, ours in pairs.items():
        assert found[theirs] == found[ours], theirs
    assert found["vllm:spec_decode_num_draft_tokens_total"] > 0
    pages = spare.engine.target.cache.pages
    assert (
        found[f'vllm:cache_config_info{{block_size="{pages.size}",num_gpu_blocks="{pages.count}"}}']
        == 1
    )


# ------------------------------------------------------------ clients that go away


def raw(s: Serving, path: str, body: dict) -> socket.socket:
    """A connection on which this was asked; the answer is not awaited."""
    content = json.dumps(body).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n"
    host, port = s.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head.encode() + content)
    return connection


BODIES = {
    "/v1/completions": LONG,
    "/v1/chat/completions": CHAT | {"max_tokens": 900, "ignore_eos": True, "speculative": False},
    "/v1/responses": {"input": "hi", "max_output_tokens": 900, "speculative": False},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_frees_its_request(here: Serving, path: str, stream: bool) -> None:
    engine = here.service.llm.engine
    with slow(here.service):
        connection = raw(here, path, BODIES[path] | {"stream": stream})
        if stream:
            assert b"200" in connection.recv(100)
        until(
            lambda: any(r.produced > 2 for r in list(engine.requests.values())),
            "tokens are produced",
        )
        (ticket,) = here.service.jobs
        connection.close()
        here.rest()
    assert (
        ticket.request is not None and ticket.request.produced < 800
    )  # it was ended, it did not end
    assert here.complete()["choices"][0]["text"]
    assert not here.logged


def test_clients_that_go_away_before_they_are_taken(here: Serving) -> None:
    with held(here.service):
        connections = [
            raw(here, "/v1/completions", LONG | {"stream": i % 2 == 0}) for i in range(2)
        ]
        until(lambda: len(here.service.jobs) == 2, "both wait")
        for connection in connections:
            connection.close()
        time.sleep(0.2)  # let the server see it; it must free them whether it has by now or not
    with slow(here.service):
        here.rest()
    assert here.complete()["choices"][0]["text"]


def test_many_that_go_away_leave_no_page_behind(here: Serving) -> None:
    with slow(here.service, 0.002):
        connections = [
            raw(here, "/v1/completions", LONG | {"stream": True, "n": 1 + i % 3}) for i in range(12)
        ]
        for connection in connections:
            assert connection.recv(10)
        for connection in connections:
            connection.close()
        here.rest()
    here.complete()
    here.rest()


# ------------------------------------------------------------ failures


def failing(s: Serving, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The engine fails once, in the step `after` that many with work in it."""
    engine = s.service.llm.engine
    step, calls = engine.step, []

    def fails() -> list:
        calls.append(1)
        if len(calls) == after + 1:
            raise RuntimeError("on purpose")
        return step()

    monkeypatch.setattr(engine, "step", fails)


@pytest.mark.parametrize("path", BODIES)
def test_a_failed_step_is_told_to_those_in_flight_and_to_nobody_else(
    here: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    expected = here.answer("/v1/completions", ASKED | {"seed": 1})["choices"][0]["text"]
    failing(here, monkeypatch, after=3)
    response = here.http.post(path, json=BODIES[path])
    assert error_of(response, 503)["type"] == "server_error" and response.headers["retry-after"]
    assert "RuntimeError" in response.text and "on purpose" not in response.text
    assert here.answer("/v1/completions", ASKED | {"seed": 1})["choices"][0]["text"] == expected
    assert here.http.get("/ready").status_code == 200
    assert numbers(here)["forerun_engine_failures_total"] == 1
    assert numbers(here)['forerun_requests_total{reason="failed"}'] == 1
    here.rest()
    logged = [r for r in here.logged if r.name != "forerun.server"]
    assert not logged, "the failure is logged once, by the service"


def test_a_failed_step_in_a_stream_is_its_last_event(
    here: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(here, monkeypatch, after=3)
    with here.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        text = response.read().decode()
    *_, last, done, end = text.split("\n\n")
    assert set(json.loads(last.removeprefix("data: "))["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    assert (done, end) == ("data: [DONE]", "")
    here.rest()
    assert here.complete()["choices"][0]["text"]


def test_a_failure_while_a_request_is_taken_leaves_nobody_waiting(
    here: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the engine's add that nobody foresaw: its client is told, and others are not
    disturbed."""
    engine = here.service.llm.engine
    add = engine.add

    def fails(tokens: list, *args: object, **options: object) -> object:
        if len(tokens) == 3:
            raise ValueError("nobody foresaw this")
        return add(tokens, *args, **options)

    with slow(here.service, 0.003), ThreadPoolExecutor(1) as pool:
        other = pool.submit(here.http.post, "/v1/completions", json=LONG | {"max_tokens": 100})
        until(lambda: engine.requests, "the other one runs")
        monkeypatch.setattr(engine, "add", fails)
        response = httpx2.post(f"{here.url}/v1/completions", json={"prompt": [5, 6, 7]}, timeout=4)
        assert response.status_code in (500, 503) and response.json()["error"]["message"]
        assert other.result().status_code == 200
    here.rest()


def test_an_engine_that_cannot_start_over_is_told_too(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a device is lost: nobody waits for ever, and whoever watches the server sees that it
    is dead."""
    with serving(spare) as s:

        def fails() -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(spare.engine, "reset", fails)
        failing(s, monkeypatch, after=3)
        try:
            error_of(httpx2.post(f"{s.url}/v1/completions", json=LONG, timeout=4), 503)
            until(lambda: s.http.get("/health").status_code == 503, "health says so", patience=4)
            error_of(s.http.post("/v1/completions", json=ASKED), 503)
        finally:
            monkeypatch.undo()
            spare.engine.reset()


SLOW_WORK = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "documents": ["some text"]},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", SLOW_WORK)
def test_texts_are_not_tokenized_where_everybody_waits(
    here: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Megabytes take seconds: not on the event loop, nor on the engine's thread."""
    seen: list[threading.Thread] = []
    encode = here.service.llm.tokenizer.encode

    def watched(*args: object, **options: object) -> list[int]:
        seen.append(threading.current_thread())
        return encode(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(here.service.llm.tokenizer, "encode", watched)
    here.answer(path, SLOW_WORK[path])
    assert seen and not {here.thread, here.service._thread} & set(seen)


@pytest.mark.parametrize("path", list(BODIES))
def test_grammars_are_not_compiled_where_everybody_waits(
    here: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    grammars, seen = here.service.llm.engine.grammars, list[threading.Thread]()
    compiled_each = grammars.compiled_each

    def watched(*given: Any) -> object:
        seen.append(threading.current_thread())
        return compiled_each(*given)

    monkeypatch.setattr(grammars, "compiled_each", watched)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", path]}}}
    flat = {"type": "json_schema", "name": "x", "schema": {"enum": ["a", path]}}
    more = {"text": {"format": flat}} if path == "/v1/responses" else {"response_format": form}
    here.answer(path, SLOW_WORK[path] | more)
    assert seen and not {here.thread, here.service._thread} & set(seen)


# ------------------------------------------------------------ the end


def test_a_signal_lets_requests_end_and_takes_no_new_ones(spare: LLM) -> None:
    with serving(spare, shutdown_timeout=20) as s, ThreadPoolExecutor(2) as pool:
        with slow(s.service, 0.003):
            running = pool.submit(s.http.post, "/v1/completions", json=LONG | {"max_tokens": 60})
            until(lambda: s.service.llm.engine.requests, "it runs")
            s.server.handle_exit(signal.SIGTERM, None)
            for path in ("/health", "/ready"):
                error_of(s.http.get(path), 503)
            response = s.http.post("/v1/completions", json=ASKED)
            assert error_of(response, 503) and response.headers["retry-after"]
            answer = running.result()
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 60
        until(lambda: s.server.should_exit, "the server ends by itself")


def test_after_its_time_a_running_request_is_cut_short(spare: LLM) -> None:
    with serving(spare, shutdown_timeout=0.1) as s, ThreadPoolExecutor(2) as pool, slow(s.service):
        whole = pool.submit(s.http.post, "/v1/completions", json=LONG)
        streamed = pool.submit(
            s.http.post,
            "/v1/chat/completions",
            json=BODIES["/v1/chat/completions"] | {"stream": True},
        )
        until(lambda: len(s.service.llm.engine.requests) == 2, "both run")
        s.server.handle_exit(signal.SIGTERM, None)
        answer = whole.result().json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 900
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert '"finish_reason": "length"' in streamed.result().text


def test_a_second_signal_ends_it_at_once(spare: LLM) -> None:
    with serving(spare, shutdown_timeout=1000) as s, slow(s.service):
        connection = raw(s, "/v1/completions", LONG)
        until(lambda: s.service.llm.engine.requests, "it runs")
        s.server.handle_exit(signal.SIGTERM, None)
        assert not s.server.should_exit
        s.server.handle_exit(signal.SIGINT, None)
        assert s.server.should_exit
        until(
            lambda: not s.thread.is_alive(), "the server's end, though a client waits", patience=3
        )
        connection.close()


def test_a_port_that_is_taken_is_one_line() -> None:
    from forerun.errors import ConfigError

    taken = r"cannot listen on 127\.0\.0\.1:\d+: address already in use"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match=taken):
        listen(Settings(port=other.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(Settings(host="no.such.host.invalid"))
