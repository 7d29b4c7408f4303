"""Access control: nothing of one tenant reaches another, and foreign web pages are refused.

The tests of tenants plant a secret, and ask every endpoint and field for it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.datastructures import Headers

from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.server.auth import CALLER, ApiKeys, Caller, HostPolicy, tenant_of
from forerun.server.listen import is_loopback
from forerun.server.settings import Settings
from tests.server.serving import Serving, serving, sse

COMPLETIONS = "/v1/completions"
SECRET = (
    'secret_diagnosis = ["rare", "grave", "told nobody", 4711, 815, "by letter",'
    ' {"to": "her brother"}]\n'
)
BEGINNING = SECRET[:20]
NUM_KNOWN = 12  # tokens of the secret that an attacker knows
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DEEP = {"trace": True, "stream": True, "speculative": {"draft": "suffix", "depth": 64}}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# clients\nalice  key-of-alice\nmallory\tkey-of-mallory\r\n\n")
    return file


@pytest.fixture(scope="module")
def shared(spare: LLM, keys: Path) -> Iterator[Serving]:
    with serving(spare, api_keys=str(keys), api_key=("key-of-operator",)) as server:
        yield server


def ask(server: Serving, client: str, path: str, body: Any = None) -> httpx2.Response:
    headers = {"Authorization": f"Bearer key-of-{client}"}
    method = "GET" if body is None else "POST"
    return server.http.request(method, path, json=body, headers=headers)


def plant(server: Serving, client: str = "alice", **more: Any) -> None:
    """Send the secret as a prompt and as an output, the latter complete and cut off."""
    server.service.llm.forget()
    body = {"prompt": SECRET * 3, "max_tokens": 8} | GREEDY | more
    assert ask(server, client, COMPLETIONS, body).status_code == 200
    forced = {"response_format": {"type": "choice", "choice": [SECRET]}, "max_tokens": 200}
    assert ask(server, client, COMPLETIONS, body | forced).status_code == 200
    headers = {"Authorization": f"Bearer key-of-{client}"}
    stream = body | {"stream": True, "max_tokens": 99}
    with server.http.stream("POST", COMPLETIONS, json=stream, headers=headers) as answer:
        next(answer.iter_lines())
    server.wait_until_idle()


def probe(server: Serving, client: str, **more: Any) -> tuple[str, dict[str, int], list[Any]]:
    """Ask for the beginning of the secret with its next token forced.

    A drafter that remembers the secret then drafts its rest. Return the complete answer, the
    counters of drafted and cached tokens, and the drafted nodes.
    """
    tokens = server.service.llm.tokens(SECRET)
    bias = {"logit_bias": {str(tokens[NUM_KNOWN]): 100}, "stream_options": {"include_usage": True}}
    body = {"prompt": tokens[:NUM_KNOWN], "max_tokens": 40} | bias | GREEDY | DEEP | more
    answer = ask(server, client, COMPLETIONS, body)
    chunks = list(sse(answer))
    nodes = [node for chunk in chunks for node in chunk.get("x_spec", {}).get("draft", [])]
    sources = chunks[-1]["metrics"]["forerun"]["by_source"]
    counters = {name: source["drafted"] for name, source in sources.items()}
    counters["cached"] = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.text, counters, nodes


@pytest.mark.parametrize("draft", ["suffix", "recycle"])
def test_another_key_gets_what_a_fresh_server_would_give(shared: Serving, draft: str) -> None:
    """Tokens, counters and traces are the same with the secret planted and without.

    `recycle` keeps tables of the model's likely successors of a tenant's texts.
    """
    more = {"speculative": {"draft": draft, "depth": 64 if draft == "suffix" else 4}}
    source = "memory" if draft == "suffix" else "recycle"
    shared.service.llm.forget()
    text, counters, nodes = probe(shared, "mallory", cache_salt="before", **more)
    plant(shared, **more)
    text_after, counters_after, after = probe(shared, "mallory", cache_salt="after", **more)
    assert counters_after == counters and "memory" not in counters
    assert [node["id"] for node in after] == [node["id"] for node in nodes]
    assert "told nobody" not in text + text_after
    text, counters_own, nodes = probe(shared, "alice", **more)
    assert counters_own[source] > counters.get(source, 0), "the secret was remembered"
    hidden = [node for node in nodes if node["source"] == source and not node["accepted"]]
    assert hidden and "told nobody" not in text
    assert all((node["id"], node["text"], node["p"]) == (None, "", None) for node in hidden)


FIELDS: dict[str, Any] = {
    "documents": [BEGINNING * 4],
    "logit_bias": {"1": 100, "2": 100},
    "cache_salt": "alice",
    "n": 2,
    "echo": True,
    "user": "alice",
    "response_format": {"type": "regex", "regex": "[a-z_]*( = \\[.{0,90})?"},
}


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_gives_access_to_another_tenant(shared: Serving, field: str) -> None:
    plant(shared, cache_salt="alice")
    body = {"prompt": BEGINNING, "max_tokens": 60, field: FIELDS[field]} | GREEDY | DEEP
    answer = ask(shared, "mallory", COMPLETIONS, body)
    assert answer.status_code == 200
    assert "told nobody" not in answer.text and '"memory"' not in answer.text


MESSAGES = [{"role": "user", "content": BEGINNING}]
POSTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": BEGINNING} | GREEDY,
    "/v1/chat/completions": {"messages": MESSAGES} | GREEDY | DEEP,
    "/v1/responses": {"input": BEGINNING, "temperature": 0},
    "/v1/embeddings": {"input": BEGINNING},
    "/api/generate": {"model": "tiny", "prompt": BEGINNING, "raw": True, "stream": False},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False},
    "/tokenize": {"prompt": BEGINNING},
}
GETS = ("/v1/models", "/server_info", "/health", "/ready", "/version", "/metrics", "/docs")
GETS += ("/api/tags", "/api/ps", "/api/version", "/openapi.json")


def test_no_endpoint_shows_what_another_tenant_sent(shared: Serving) -> None:
    plant(shared)
    for path in (*POSTS, *GETS):
        answer = ask(shared, "mallory", path, POSTS.get(path))
        assert answer.status_code < 500 and "told nobody" not in answer.text, path
        # behind a decimal point, the number may be milliseconds
        assert not re.search(r"(?<![.\d])4711", answer.text), path


def test_only_the_operator_sees_counts_over_all_tenants(shared: Serving) -> None:
    refused = ask(shared, "mallory", "/metrics")
    assert refused.status_code == 403 and "operator" in refused.json()["error"]["message"]
    assert ask(shared, "operator", "/metrics").status_code == 200
    plant(shared)
    body = {"prompt": BEGINNING, "max_tokens": 4} | GREEDY | DEEP
    for client, allowed in (("mallory", False), ("operator", True)):
        costs = ask(shared, client, "/server_info").json()["costs"]
        assert bool(costs["pass_ms"]) is bool(costs["draft_ms"]) is allowed
        chunks = sse(ask(shared, client, COMPLETIONS, body))
        rates = [chunk["x_spec"]["rate"] for chunk in chunks if "x_spec" in chunk]
        assert rates and all((rate is not None) is allowed for rate in rates)


def test_cache_salts_separate_the_memory_of_one_key(shared: Serving) -> None:
    plant(shared, cache_salt="a conversation")
    assert probe(shared, "alice", cache_salt="a conversation")[1].get("memory", 0) > 0
    assert "memory" not in probe(shared, "alice", cache_salt="another")[1]
    assert "memory" not in probe(shared, "alice")[1]


@pytest.mark.parametrize(
    ("host", "share", "remembered"),
    [("127.0.0.1", False, True), ("0.0.0.0", False, False), ("0.0.0.0", True, True)],
)
def test_without_keys_local_clients_share_one_memory(
    spare: LLM, host: str, share: bool, remembered: bool
) -> None:
    with serving(spare, host=host, share_memory=share) as server:
        plant(server)
        assert ("memory" in probe(server, "any")[1]) == remembered
        plant(server, cache_salt="mine")
        assert probe(server, "any", cache_salt="mine")[1].get("memory", 0) > 0


def test_share_memory_joins_the_memories_of_keys(spare: LLM, keys: Path) -> None:
    """This also shows that `probe` notices a leak."""
    with serving(spare, api_keys=str(keys), share_memory=True) as server:
        plant(server)
        assert probe(server, "mallory")[1].get("memory", 0) > 0


def test_tenants_cannot_be_forged() -> None:
    """No key and salt together name the tenant of another key."""
    salts = (None, "a", "b", "ab", "\n", "\nb", "a\nb")
    pairs = [(tenant, salt) for tenant in ("", "a", "b", "ab") for salt in salts]
    found = set()
    for tenant, salt in pairs:
        token = CALLER.set(Caller(tenant))
        found.add(tenant_of(salt))
        CALLER.reset(token)
    assert len(found) == len(pairs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"alice\n", "line 1: give a name and a key"),
        (b"a b c\n", "line 1: give a name and a key"),
        (b"a x\na y\n", "line 2: the name 'a' was there before"),
        (b"a x\nb x\n", "the key of b is given twice"),
        (b"# none\n\n", "has no keys"),
        (b"a \x01\n", "visible ASCII"),
        ("a ключ\n".encode(), "visible ASCII"),
        (b"a " + b"x" * 600, "visible ASCII"),
        (b"a \xff\n", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_an_invalid_key_file_is_reported_in_one_line_without_its_keys(
    tmp_path: Path, text: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as error:
        ApiKeys(Settings(api_keys=str(file)))
    assert "\n" not in str(error.value) and "xxx" not in str(error.value)


# ------------------------------------------------------------ hosts and origins

LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.8.9.1"]
LOOPBACK += ["[::1]", "[::1]:8000"]
ADDRESSES = ["192.168.1.7:8000", "10.0.0.1", "[fe80::1]:8000", "0.0.0.0:8000"]
FOREIGN = ["a.example", "a.example:8000", "localhost.a.example", "127.0.0.1.a.example"]
FOREIGN += ["xlocalhost", "localhost@a.example", "[::1]a.example", "[::1].a.example:8000", "127.1"]
FOREIGN += ["2130706433", "localhost:8000:1", "[::1", "::1]", ":8000", "[]", " "]


def status(host_header: str, origin: str | None = None, **options: Any) -> int:
    """Return the status with which a request of these headers is refused; 0 if it is not."""
    headers = {"host": host_header} | ({} if origin is None else {"origin": origin})
    error = HostPolicy(Settings(**options)).refusal(Headers(headers))
    return error.status if error else 0


def statuses(hosts: list[str], **options: Any) -> set[int]:
    return {status(host, **options) for host in hosts}


@pytest.mark.parametrize("bind_host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_a_loopback_server_accepts_only_loopback_hosts(bind_host: str) -> None:
    assert is_loopback(bind_host)
    assert statuses(LOOPBACK, host=bind_host) == {0}
    assert statuses([*ADDRESSES, *FOREIGN, socket.gethostname()], host=bind_host) == {421}


@pytest.mark.parametrize("bind_host", ["0.0.0.0", "::", "192.168.1.7"])
def test_other_servers_also_accept_addresses_and_the_host_name(bind_host: str) -> None:
    assert not is_loopback(bind_host)
    assert statuses([*LOOPBACK, *ADDRESSES, socket.gethostname()], host=bind_host) == {0}
    assert statuses(FOREIGN, host=bind_host) == {421}


@pytest.mark.parametrize("bind_host", ["127.0.0.1", "0.0.0.0"])
def test_allowed_hosts_adds_names(bind_host: str) -> None:
    for name in ("llm.example", "LLM.example:9000", "llm.example."):
        assert status("llm.example:8000", host=bind_host, allowed_hosts=name) == 0
        assert status("a.example", host=bind_host, allowed_hosts=name) == 421
    assert statuses([*ADDRESSES, *FOREIGN], host=bind_host, allowed_hosts="*") == {0}
    assert status("box.lan", host="box.lan") == 0 and status("a.example", host="box.lan") == 421
    assert status("192.168.1.7", allowed_hosts="192.168.1.7") == 0
    assert status("10.0.0.1", allowed_hosts="192.168.1.7") == 421


def test_only_same_origin_and_allowed_origins_may_call() -> None:
    for host, origin in (
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("llm.example", "https://llm.example"),  # behind a proxy that terminates TLS
        ("llm.example:443", "https://LLM.example"),
    ):
        assert status(host, origin, allowed_hosts="llm.example") == 0
    refused = ["null", "", "http://a.example", "http://localhost", "http://localhost:8001"]
    refused += ["https://localhost.a.example:8000", "http://127.0.0.1:8000", "file://"]
    refused += ["localhost:8000", "chrome-extension://localhost:8000", "http://localhost:8000.a"]
    assert {status("localhost:8000", origin) for origin in refused} == {403}
    assert {status("localhost:8000", o, allowed_origins="*") for o in refused} == {0}
    assert status("localhost:8000", "app://x", allowed_origins="app://x") == 0
    assert status("localhost:8000", "app://y", allowed_origins="app://x") == 403


def test_dns_rebinding_is_refused_on_every_path(server: Serving) -> None:
    paths = ("/", "/health", "/v1/models", "/docs", "/playground/app.js", "/nowhere", "/api/tags")
    for path in paths:
        answer = server.http.get(path, headers={"host": "a.example:8000"})
        assert answer.status_code == 421 and len(answer.text) < 300
        assert "--allowed-hosts" in answer.text


def test_cross_origin_requests_are_refused(server: Serving) -> None:
    """Browsers send the first two content types, and none at all, without a preflight request."""
    body = b'{"prompt": "x", "messages": []}'
    for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/api/generate", "/api/chat"):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json", None):
            headers = {"origin": "https://a.example"} | ({"content-type": kind} if kind else {})
            answer = server.http.post(path, content=body, headers=headers)
            assert answer.status_code == 403 and "--allowed-origins" in answer.text
            assert "access-control-allow-origin" not in answer.headers
    own = {"origin": server.url}
    body_json = {"prompt": "x", "max_tokens": 1}
    assert server.http.post(COMPLETIONS, json=body_json, headers=own).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", COMPLETIONS, "/v1/responses", "/tokenize"]
)
def test_bodies_need_a_content_type_of_json(server: Serving, path: str) -> None:
    """Old browsers send forms without an Origin; only scripts leave the content type out."""
    prompt: dict[str, Any] = {"prompt": "x"}
    if path == "/v1/chat/completions":
        prompt = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    elif path == "/v1/responses":
        prompt = {"input": "x"}

    def ask_with(headers: dict[str, str]) -> httpx2.Response:
        request = server.http.build_request("POST", path, json=prompt)
        request.headers.pop("content-type")
        request.headers.update(headers)
        return server.http.send(request)

    advice = "the body must be JSON: send the header Content-Type: application/json, not "
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = ask_with({"content-type": kind})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == advice + kind
    assert ask_with({}).status_code == 200
    for browser in ({"sec-fetch-site": "cross-site"}, {"origin": server.url}):
        answer = ask_with(browser)
        assert answer.status_code == 400 and advice + "none" in answer.text


def test_the_engine_receives_the_client_of_each_request(
    shared: Serving, serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are shared fairly among clients: a client is a key, or without keys an address."""
    for server, key, client in ((shared, "alice", "alice"), (serve, "none", "127.0.0.1")):
        engine, seen = server.service.llm.engine, []
        add = engine.add

        def recorded(*tokens: Any, add: Any = add, seen: Any = seen, **options: Any) -> Any:
            seen.append(options["client"])
            return add(*tokens, **options)

        monkeypatch.setattr(engine, "add", recorded)
        assert ask(server, key, COMPLETIONS, {"prompt": "def f(", "max_tokens": 2}).is_success
        assert seen == [client]
