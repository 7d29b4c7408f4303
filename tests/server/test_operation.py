"""Operation of a server: keys, limits, timeouts, metrics, disconnects, failures, shutdown."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from forerun import __version__
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.server.listen import listen
from forerun.server.settings import Settings
from tests.server.serving import (
    REQUEST,
    Serving,
    connected,
    engine_blocked,
    make_engine_fail,
    post,
    serving,
    slow,
    sse,
    until,
)

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LONG = {"prompt": "x = 1\n", "max_tokens": 900, "ignore_eos": True, "speculative": False}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: LONG,
    CHATS: CHAT | {"max_tokens": 900, "ignore_eos": True, "speculative": False},
    RESPONSES: {"input": "hi", "max_output_tokens": 900, "speculative": False},
}


@pytest.fixture
def own(spare: LLM) -> Iterator[Serving]:
    """A server that is used by one test only, which may damage it."""
    with serving(spare) as running:
        yield running


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"].splitlines()) == 1
    return error


# ------------------------------------------------------------ keys and pages


def test_all_paths_but_health_and_pages_need_a_key(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "third\n")
    with serving(spare, api_key=("first", "second\n")) as s:

        def status(key: str, path: str = "/version") -> int:
            headers = {"authorization": key.encode("latin-1")}
            return s.http.get(path, headers=headers).status_code

        for path in (
            "/v1/models",
            "/metrics",
            "/version",
            "/server_info",
            "/ready",
            "/openapi.json",
        ):
            assert error_of(s.http.get(path), 401)["code"] == "invalid_api_key"
        for path in (*BODIES, "/v1/embeddings", "/tokenize", "/nowhere"):
            error_of(s.http.post(path, json=REQUEST), 401)
        for method, path in (("GET", "/api/tags"), ("POST", "/api/chat"), ("POST", "/api/pull")):
            refused = s.http.request(method, path, json={})
            message = "give a valid key: Authorization: Bearer KEY"
            assert refused.status_code == 401 and refused.json() == {"error": message}
        assert s.http.get("/health").status_code == 200
        for path in ("/", "/playground/nothing.js", "/docs"):
            assert s.http.get(path).status_code != 401
        wrong = (
            "first",
            "Bearer",
            "Bearer firs",
            "Bearer first second",
            "Basic first",
            "Bearer \xe9",
        )
        assert {status(key) for key in wrong} == {401}
        for key in ("first", "second", "third"):
            assert status(f"Bearer {key}") == status(f"bearer  {key}") == 200
        for path in ("/health/../version", "//version", "/playground/../version"):
            assert '"version"' not in s.http.get(path).text
        assert '"version"' not in s.http.get("/playground/%2e%2e/version").text


def test_playground_paths_cannot_leave_their_folder(server: Serving) -> None:
    for name in ("..%2fapp.py", "%2e%2e%2fapp.py", "..%2f..%2fconfig.py", "%2fetc%2fpasswd", "%00"):
        assert server.http.get(f"/playground/{name}").status_code in (400, 404), name
    assert not server.http.get("/playground/nothing.js").text.startswith("<")


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["open", "with a key"])
def test_allowed_origins_may_call(spare: LLM, keys: tuple[str, ...]) -> None:
    ours = {"origin": "http://a.example", "authorization": "Bearer secret"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with serving(spare, allowed_origins=("http://a.example",), api_key=keys) as s:

        def ask(origin: str) -> httpx2.Response:  # browsers send no key with a preflight
            return s.http.options(COMPLETIONS, headers=preflight | {"origin": origin})

        allowed = ask("http://a.example")
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://a.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        other = ask("http://b.example").headers.get("access-control-allow-origin")
        assert other != "http://b.example"
        for more, status in (({}, 200), ({"n": 0}, 400), ({"x": 1}, 400), ({"prompt": ""}, 400)):
            response = s.http.post(COMPLETIONS, json=REQUEST | more, headers=ours)
            assert response.status_code == status  # and the page may read the error
            assert response.headers.get("access-control-allow-origin") == "http://a.example"
        if keys:
            refused = s.http.get("/version", headers={"origin": "http://a.example"})
            assert refused.status_code == 401
            assert refused.headers.get("access-control-allow-origin") == "http://a.example"


def test_request_ids_are_returned(server: Serving) -> None:
    bodies = ((COMPLETIONS, REQUEST), (COMPLETIONS, REQUEST | {"n": 0}), ("/nowhere", {}))
    for path, body in bodies:
        response = server.http.post(path, json=body, headers={"x-request-id": "abc-1.2_3"})
        assert response.headers.get("x-request-id") == "abc-1.2_3", (path, body)
    with server.http.stream("POST", COMPLETIONS, json=REQUEST | {"stream": True}) as response:
        assert response.headers["x-request-id"]
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in response.headers["cache-control"]
        assert response.read().endswith(b"data: [DONE]\n\n")
    strange = server.http.get("/version", headers={"x-request-id": "a b<script>\t" + "x" * 500})
    assert re.fullmatch(r"abscriptx{1,128}", strange.headers["x-request-id"])
    assert len({server.http.get("/version").headers["x-request-id"] for _ in range(2)}) == 2


# ------------------------------------------------------------ limits


@pytest.mark.parametrize("queue", [0, 1])
def test_a_full_queue_refuses(spare: LLM, queue: int) -> None:
    """Two requests run, `queue` requests wait, and the next is refused and leaves no state."""
    with serving(spare, max_queue=queue) as s, ThreadPoolExecutor(3) as pool:
        with engine_blocked(s.service):
            count = 2 + queue
            accepted = [pool.submit(s.http.post, COMPLETIONS, json=REQUEST) for _ in range(count)]
            until(lambda: len(s.service.jobs) == count, "they are accepted")
            for more in ({}, {"stream": True}, {"n": 2}):
                response = s.http.post(COMPLETIONS, json=REQUEST | more)
                assert error_of(response, 429)["type"] == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
            assert len(s.service.jobs) == count
        assert [t.result().status_code for t in accepted] == [200] * count
        assert s.complete()["usage"]["completion_tokens"] == 8
        s.wait_until_idle()


def test_sizes_of_bodies_and_prompts_are_limited(spare: LLM) -> None:
    with serving(spare, max_body=500, max_prompt=20) as s:
        assert s.complete(prompt=[5] * 20, max_tokens=1)["choices"]
        chunked = iter([b'{"prompt": "', b"x" * 600, b'"}'])
        for response in (
            s.http.post(COMPLETIONS, json={"prompt": "x" * 500}),
            s.http.post(COMPLETIONS, content=chunked),
        ):
            assert "500 bytes" in error_of(response, 413)["message"]
        error = error_of(s.http.post(COMPLETIONS, json={"prompt": [5] * 21}), 400)
        assert error["param"] == "prompt"
        error_of(s.http.post(COMPLETIONS, json={"prompt": [[5], [5] * 21]}), 400)
        long = {"messages": [{"role": "user", "content": "a b " * 30}]}
        error_of(s.http.post(CHATS, json=long), 400)


def test_requests_time_out(spare: LLM) -> None:
    """The timeout includes the time that a request waits for the engine."""
    with serving(spare, timeout=0.15) as s:
        with slow(s.service):
            for path, body in BODIES.items():
                assert error_of(s.http.post(path, json=body), 504)["code"] == "timeout"
            with s.http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
                assert response.status_code == 200
                assert list(sse(response))[-1]["error"]["code"] == "timeout"
            s.wait_until_idle()
        with engine_blocked(s.service):
            error_of(s.http.post(COMPLETIONS, json=REQUEST), 504)
        assert not s.logged, "a timeout is no failure of the server"


# ------------------------------------------------------------ information


def test_small_answers_are_sent_at_once(spare: LLM) -> None:
    """Without TCP_NODELAY each answer on a kept connection takes 40 ms more."""
    with serving(spare, listener=listen(Settings(port=0))) as s:
        assert s.http.get("/version").status_code == 200
        (connection,) = s.server.server_state.connections
        client_socket = connection.transport.get_extra_info("socket")
        assert client_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_port_in_use_is_a_config_error() -> None:
    in_use = r"cannot listen on 127\.0\.0\.1:\d+: address already in use"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match=in_use):
        listen(Settings(port=other.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(Settings(host="no.such.host.invalid"))


def test_health_ready_version_info(server: Serving) -> None:
    server.complete()
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert server.http.get("/version").json() == {"version": __version__}
    info = server.http.get("/server_info").json()
    assert (info["model"], info["draft"], info["rule"]) == ("tiny", "suffix", "match")
    assert {"off", "ngram", "suffix"} <= set(info["drafts"])
    assert info["context"] == server.service.llm.decoder.context
    assert info["costs"]["pass_ms"] and all(ms > 0 for ms in info["costs"]["pass_ms"].values())
    assert info["chat"] is False and info["sampling"] == server.service.llm.recommended
    for draft in info["drafts"]:
        server.complete(speculative={"draft": draft})


def test_ready_waits_for_the_engine_and_health_does_not(own: Serving) -> None:
    with ThreadPoolExecutor(1) as pool, engine_blocked(own.service):
        ready = pool.submit(own.http.get, "/ready")
        assert own.http.get("/health").status_code == 200
        assert not ready.done()
    assert ready.result().status_code == 200


def test_tokenize_and_detokenize(server: Serving) -> None:
    llm = server.service.llm
    for text in ("def add(a, b):\n    return", "sm\N{ROCKET}le \u03b1", " ", "\n\n\tx", ""):
        tokens = server.answer("/tokenize", {"prompt": text})
        assert tokens["tokens"] == llm.tokenizer.encode(text)
        assert tokens["count"] == len(tokens["tokens"])
        assert tokens["max_model_len"] == llm.decoder.context
        assert server.answer("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == text
    chat = server.answer("/tokenize", {"messages": CHAT["messages"]})["tokens"]
    assert len(chat) == server.answer(CHATS, CHAT)["usage"]["prompt_tokens"]


def metrics_of(s: Serving) -> dict[str, float]:
    """Return the samples by name with labels."""
    response = s.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


REPEATING = {"prompt": "x = 1\n" * 12, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_metrics_count_what_happened(own: Serving) -> None:
    before = metrics_of(own)
    assert before["forerun_completion_tokens_total"] == 0
    answer = own.complete(**REPEATING, speculative={"depth": 4})  # an automatic depth may be 0
    own.complete(max_tokens=1, speculative=False)
    found = metrics_of(own)
    spec = answer["metrics"]["speculative_decoding"]
    accepted = spec["num_accepted_draft_tokens"]

    def total(name: str) -> float:
        return sum(value for key, value in found.items() if key.startswith(f"forerun_{name}"))

    assert total("completion_tokens_total") == 41
    assert found['forerun_requests_total{reason="length"}'] == 2
    assert total("prompt_tokens_total") > answer["usage"]["prompt_tokens"]
    assert total("target_passes_total") == answer["metrics"]["forerun"]["steps"] + 1
    assert total("draft_rounds_total") == spec["num_spec_steps"] > 0
    assert total("drafted_tokens_total") == spec["num_draft_tokens"]
    assert total("accepted_tokens_total") == total("accepted_at_total") == accepted > 0
    assert total("time_to_first_token_seconds_count") == 2
    assert total("inter_token_seconds_count") == 39 - (total("accepted_length_sum") - 41)
    assert total("running") == total("waiting") == total("kv_used") == 0
    assert total("engine_failures_total") == 0
    assert not [name for name in found if name.startswith("vllm")]


def test_metrics_under_vllms_names(spare: LLM) -> None:
    spare.forget()  # drafts come from this test's text only
    with serving(spare, metrics_compat="vllm") as s:
        assert "vllm:spec_decode_num_drafts_total" in metrics_of(s)  # before anything happens
        s.complete(**REPEATING, speculative={"depth": 4})
        found = metrics_of(s)
    spec = "vllm:spec_decode_num"
    pairs = {
        f"{spec}_drafts_total": "draft_rounds_total",
        f"{spec}_draft_tokens_total": 'drafted_tokens_total{drafter="suffix"}',
        f"{spec}_accepted_tokens_total": 'accepted_tokens_total{drafter="suffix"}',
        f'{spec}_accepted_tokens_per_pos_total{{position="0"}}': 'accepted_at_total{position="1"}',
        "vllm:prompt_tokens_total": "prompt_tokens_total",
        "vllm:generation_tokens_total": "completion_tokens_total",
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv_used",
        "vllm:time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "inter_token_seconds_sum",
        'vllm:e2e_request_latency_seconds_bucket{le="+Inf"}': 'request_seconds_bucket{le="+Inf"}',
    }
    for theirs, ours in pairs.items():
        assert found[theirs] == found[f"forerun_{ours}"], theirs
    assert found[f"{spec}_draft_tokens_total"] > 0
    pages = spare.engine.target.cache.pages
    labels = f'block_size="{pages.size}",num_gpu_blocks="{pages.count}"'
    assert found[f"vllm:cache_config_info{{{labels}}}"] == 1


# ------------------------------------------------------------ clients that disconnect


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "full"])
def test_a_disconnect_ends_the_request(own: Serving, path: str, stream: bool) -> None:
    requests = own.service.llm.engine.requests
    with slow(own.service):
        with connected(own, post(BODIES[path] | {"stream": stream}, path=path)) as connection:
            if stream:
                assert b"200" in connection.recv(100)
            until(lambda: any(r.produced > 2 for r in list(requests.values())), "it generates")
            (job,) = own.service.jobs
        own.wait_until_idle()
    assert job.request is not None and job.request.produced < 800
    assert own.complete()["choices"][0]["text"] and not own.logged


def test_many_disconnects_leave_no_kv_page_in_use(own: Serving) -> None:
    with engine_blocked(own.service):  # before they are admitted
        for stream in (True, False):
            with connected(own, post(LONG | {"stream": stream})):
                until(lambda: own.service.jobs, "the request waits")
        until(lambda: not own.server.server_state.connections, "they are closed")
    with slow(own.service, 0.002):
        own.wait_until_idle()
        for i in range(12):
            with connected(own, post(LONG | {"stream": True, "n": 1 + i % 3})) as connection:
                assert connection.recv(10)
        own.wait_until_idle()
    assert own.complete()["choices"][0]["text"]
    own.wait_until_idle()


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("path", BODIES)
def test_a_failed_step_ends_the_requests_in_it(
    own: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    expected = own.complete(seed=1)["choices"][0]["text"]
    make_engine_fail(own.service.llm, monkeypatch, after=3)
    response = own.http.post(path, json=BODIES[path])
    assert error_of(response, 503)["type"] == "server_error" and response.headers["retry-after"]
    assert "RuntimeError" in response.text and "on purpose" not in response.text
    assert own.complete(seed=1)["choices"][0]["text"] == expected
    assert own.http.get("/ready").status_code == 200
    found = metrics_of(own)
    assert found["forerun_engine_failures_total"] == 1
    assert found['forerun_requests_total{reason="failed"}'] == 1
    own.wait_until_idle()
    assert not [r for r in own.logged if r.name != "forerun.server"], "it is logged once"


GENERATE = {"model": "tiny", "prompt": "x = 1", "options": {"num_predict": 200, "ignore_eos": True}}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        *((path, BODIES[path], "data: [DONE]\n\n") for path in (COMPLETIONS, CHATS)),
        (RESPONSES, BODIES[RESPONSES], ""),
        ("/api/generate", GENERATE, ""),
    ],
)
def test_a_failed_step_is_the_last_event_of_a_stream(
    own: Serving, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], end: str
) -> None:
    """The client must receive an error, not a regular end."""
    make_engine_fail(own.service.llm, monkeypatch, after=3)
    text = own.http.post(path, json=body | {"stream": True}).text
    assert text.endswith(end)
    last = text.removesuffix(end).splitlines()[-1 if path == "/api/generate" else -2]
    error = json.loads(last.removeprefix("data: "))
    if path == "/api/generate":
        assert set(error) == {"error"}
        error = {"message": error["error"]}
    elif path == RESPONSES:
        assert error.pop("type") == "error" and error.pop("sequence_number") > 2
        assert set(error) == {"message", "param", "code"}
    else:
        error = error["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert "failed" in error["message"]
    own.wait_until_idle()
    assert own.complete()["choices"][0]["text"]


# ------------------------------------------------------------ threads

SHORT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2, "documents": ["some text"]},
    CHATS: CHAT,
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", SHORT)
def test_neither_event_loop_nor_engine_tokenizes_or_compiles(
    own: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Tokenizing megabytes of text or compiling a large grammar takes seconds."""
    llm = own.service.llm
    seen: dict[str, threading.Thread] = {}

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen[name] = threading.current_thread()
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(llm.tokenizer, "encode")
    watch(llm.engine.grammars, "compiled_each")
    schema = {"name": "x", "schema": {"enum": ["a", path]}}
    form: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}}
    if path == RESPONSES:
        form = {"text": {"format": {"type": "json_schema", **schema}}}
    own.answer(path, SHORT[path] | ({} if path == "/tokenize" else form))
    assert set(seen) == {"encode"} | ({"compiled_each"} if path != "/tokenize" else set())
    assert not {own.thread, own.service._thread} & set(seen.values())


# ------------------------------------------------------------ shutdown


def test_sigterm_finishes_running_requests_and_refuses_new_ones(spare: LLM) -> None:
    with serving(spare, shutdown_timeout=20) as s, ThreadPoolExecutor(1) as pool:
        with slow(s.service, 0.003):
            running = pool.submit(s.http.post, COMPLETIONS, json=LONG | {"max_tokens": 60})
            until(lambda: s.service.llm.engine.requests, "the request runs")
            s.server.handle_exit(signal.SIGTERM, None)
            for path in ("/health", "/ready"):
                error_of(s.http.get(path), 503)
            response = s.http.post(COMPLETIONS, json=REQUEST)
            assert error_of(response, 503) and response.headers["retry-after"]
            answer = running.result()
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 60
        until(lambda: s.server.should_exit, "the server ends by itself")


def test_running_requests_are_cut_short_after_the_shutdown_timeout(spare: LLM) -> None:
    with serving(spare, shutdown_timeout=0.1) as s, ThreadPoolExecutor(2) as pool:
        with slow(s.service):
            full = pool.submit(s.http.post, COMPLETIONS, json=LONG)
            streamed = pool.submit(s.http.post, CHATS, json=BODIES[CHATS] | {"stream": True})
            until(lambda: len(s.service.llm.engine.requests) == 2, "both run")
            s.server.handle_exit(signal.SIGTERM, None)
            answer = full.result().json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 900
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert '"finish_reason": "length"' in streamed.result().text


def test_a_second_signal_ends_the_server_at_once(spare: LLM) -> None:
    with serving(spare, shutdown_timeout=1000) as s, slow(s.service), connected(s, post(LONG)):
        until(lambda: s.service.llm.engine.requests, "the request runs")
        s.server.handle_exit(signal.SIGTERM, None)
        assert not s.server.should_exit
        s.server.handle_exit(signal.SIGINT, None)
        assert s.server.should_exit
        until(lambda: not s.thread.is_alive(), "the server ends while a client waits", timeout=3)
