"""Web pages: one that has its name lead here, and one that posts here unseen, are both refused."""

from __future__ import annotations

import json
import socket

import pytest
from starlette.datastructures import Headers

from forerun.llm import LLM
from forerun.server.gate import Hosts, is_loopback
from forerun.server.settings import Settings
from tests.server.serving import Serving, serving

LOOPBACK = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.8.9.1",
    "[::1]",
    "[::1]:8000",
]
ADDRESSES = ["192.168.1.7:8000", "10.0.0.1", "[fe80::1]:8000", "0.0.0.0:8000"]
STRANGE = [
    "a.example", "a.example:8000", "localhost.a.example", "127.0.0.1.a.example", "xlocalhost", "localhost@a.example",
    "[::1]a.example", "[::1].a.example:8000", "127.1", "2130706433", "localhost:8000:1", "[::1", "::1]",
    ":8000", "[]", " ",
]  # fmt: skip


def status(named: str, origin: str | None = None, **options: object) -> int:
    """What a request of these headers is refused with; 0 if it is not."""
    given = {"host": named} | ({"origin": origin} if origin is not None else {})
    error = Hosts(Settings(**options)).refusal(Headers(given))  # type: ignore[arg-type]
    return error.status if error else 0


@pytest.mark.parametrize("listens", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_on_loopback_only_its_own_names_are_answered(listens: str) -> None:
    assert [h for h in LOOPBACK if status(h, host=listens)] == []
    assert [
        h for h in [*ADDRESSES, *STRANGE, socket.gethostname()] if status(h, host=listens) != 421
    ] == []


@pytest.mark.parametrize("listens", ["0.0.0.0", "::", "192.168.1.7"])
def test_elsewhere_addresses_and_the_machines_name_are_answered_too(listens: str) -> None:
    """What is rebound is always a name; an address in Host is no page's doing."""
    assert [
        h for h in [*LOOPBACK, *ADDRESSES, socket.gethostname()] if status(h, host=listens)
    ] == []
    assert [h for h in STRANGE if status(h, host=listens) != 421] == []


def test_names_may_be_added() -> None:
    for listens in ("127.0.0.1", "0.0.0.0"):
        for given in ("llm.example", "LLM.example:9000", "llm.example."):
            assert status("llm.example:8000", host=listens, allowed_hosts=given) == 0
            assert status("a.example", host=listens, allowed_hosts=given) == 421
        assert [
            h for h in [*ADDRESSES, *STRANGE] if status(h, host=listens, allowed_hosts="*")
        ] == []
    assert status("box.lan", host="box.lan") == 0 and status("a.example", host="box.lan") == 421
    assert status("192.168.1.7", allowed_hosts="192.168.1.7") == 0 and status(
        "10.0.0.1", allowed_hosts="192.168.1.7"
    )


def test_only_its_own_pages_and_those_allowed_may_ask() -> None:
    own = [
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("127.0.0.1", "http://127.0.0.1"),
    ]
    behind = [
        ("llm.example", "https://llm.example"),
        ("llm.example:443", "https://LLM.example"),
    ]  # a proxy speaks TLS
    assert [pair for pair in [*own, *behind] if status(*pair, allowed_hosts="llm.example")] == []
    others = [
        "null", "", "http://a.example", "http://localhost", "http://localhost:8001", "https://localhost.a.example:8000",
        "http://127.0.0.1:8000", "file://", "localhost:8000", "chrome-extension://localhost:8000", "http://localhost:8000.a",
    ]  # fmt: skip
    assert [o for o in others if status("localhost:8000", o) != 403] == []
    assert [o for o in others if status("localhost:8000", o, allowed_origins="*")] == []
    assert status("localhost:8000", "app://x", allowed_origins="app://x") == 0
    assert status("localhost:8000", "app://y", allowed_origins="app://x") == 403


def test_what_is_loopback() -> None:
    assert [h for h in ("127.0.0.1", "localhost", "::1", "127.1.2.3") if not is_loopback(h)] == []
    assert [h for h in ("0.0.0.0", "::", "192.168.1.7", "a.example", "") if is_loopback(h)] == []


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/docs", "/playground/app.js", "/nowhere", "/api/tags"]
)
def test_a_rebound_name_reads_nothing(server: Serving, path: str) -> None:
    answer = server.http.get(path, headers={"host": "a.example:8000"})
    assert answer.status_code == 421 and len(answer.text) < 300 and "--allowed-hosts" in answer.text


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/api/generate", "/api/chat"]
)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json", None]
)
def test_a_page_elsewhere_starts_no_work(server: Serving, path: str, kind: str | None) -> None:
    """A browser sends the first two without asking, and a body without a type as well."""
    headers = {"origin": "https://a.example"} | ({"content-type": kind} if kind else {})
    answer = server.http.post(path, content=b'{"prompt": "x", "messages": []}', headers=headers)
    assert answer.status_code == 403 and "--allowed-origins" in answer.text
    assert "access-control-allow-origin" not in answer.headers


def test_requests_without_an_origin_need_a_type_that_no_page_sends_unasked(server: Serving) -> None:
    """Browsers of old sent none with a form."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = server.http.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}
        )
        assert answer.status_code == 400, kind
        assert answer.json()["error"]["message"] == (
            f"the body must be JSON: send the header Content-Type: application/json, not {kind}"
        )


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"]
)
def test_a_body_without_a_type_is_json_unless_a_browser_sends_it(
    server: Serving, path: str
) -> None:
    """A script may leave the header out; a page cannot send a body without one and without saying
    where it is from."""
    body = json.dumps(
        {
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
            "input": "x",
            "max_tokens": 1,
        }
    )
    wanted = {"/v1/responses": "input", "/tokenize": "prompt"}
    fields = ("max_tokens", "prompt" if path == "/v1/completions" else "messages")
    fields = (wanted[path],) if path in wanted else fields
    body = json.dumps({name: value for name, value in json.loads(body).items() if name in fields})
    request = server.http.build_request("POST", path, content=body)
    request.headers.pop("content-type", None)
    assert server.http.send(request).status_code == 200
    for browser in ({"sec-fetch-site": "cross-site"}, {"origin": server.url}):
        request = server.http.build_request("POST", path, content=body, headers=browser)
        answer = server.http.send(request)
        assert (
            answer.status_code == 400 and "Content-Type: application/json, not none" in answer.text
        )


def test_its_own_page_may_ask(spare: LLM) -> None:
    with serving(spare) as s:
        answer = s.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"origin": s.url}
        )
        assert answer.status_code == 200
