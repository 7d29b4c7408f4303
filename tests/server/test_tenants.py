"""What one tenant said never reaches another: a secret is planted, and every endpoint and field is
asked for it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.server.tenants import CALLER, Caller, Callers, read_keys, tenant_of
from tests.server.serving import Serving, serving, sse

SECRET = 'secret_diagnosis = ["rare", "grave", "told nobody", 4711, 815, "by letter", {"to": "her brother"}]\n'
BEGINNING = SECRET[:20]
KNOWN = 12  # tokens of it that an attacker knows
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DEEP: dict[str, Any] = {
    "trace": True,
    "stream": True,
    "speculative": {"draft": "suffix", "depth": 64},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# clients\nalice  key-of-alice\nmallory\tkey-of-mallory\r\n\n")
    return file


@pytest.fixture(scope="module")
def shared(spare: LLM, keys: Path) -> Iterator[Serving]:
    with serving(spare, api_keys=str(keys), api_key=("key-of-operator",)) as server:
        yield server


def asked(
    server: Serving, who: str, path: str, body: dict[str, Any] | None = None
) -> httpx2.Response:
    headers = {"Authorization": f"Bearer key-of-{who}"}
    return (
        server.http.get(path, headers=headers)
        if body is None
        else server.http.post(path, json=body, headers=headers)
    )


def plant(server: Serving, who: str = "alice", **more: Any) -> None:
    """Texts with the secret, as a prompt and as an output, one finished and one left by its
    client."""
    server.service.llm.forget()
    body = {"prompt": SECRET * 3, "max_tokens": 8} | GREEDY | more
    assert asked(server, who, "/v1/completions", body).status_code == 200
    forced = {"response_format": {"type": "choice", "choice": [SECRET]}, "max_tokens": 200}
    assert asked(server, who, "/v1/completions", body | forced).status_code == 200
    headers = {"Authorization": f"Bearer key-of-{who}"}
    with server.http.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 99}, headers=headers
    ) as r:
        next(r.iter_lines())
    server.rest()


def tracks(
    server: Serving, who: str, **more: Any
) -> tuple[str, dict[str, int], list[dict[str, Any]]]:
    """What comes back for the beginning of the secret, its next token forced: (everything,
    counters, drafted nodes).

    A drafter that remembers the secret then drafts the rest of it.
    """
    tokens = server.service.llm.tokens(SECRET)
    known = {"prompt": tokens[:KNOWN], "logit_bias": {str(tokens[KNOWN]): 100}, "max_tokens": 40}
    body = known | {"stream_options": {"include_usage": True}} | GREEDY | DEEP | more
    answer = asked(server, who, "/v1/completions", body)
    chunks = list(sse(answer))
    nodes = [node for chunk in chunks for node in chunk.get("x_spec", {}).get("draft", [])]
    usage, stats = chunks[-1]["usage"], chunks[-1]["metrics"]["forerun"]
    counters = {name: source["drafted"] for name, source in stats["by_source"].items()}
    return (
        answer.text,
        counters | {"cached": usage["prompt_tokens_details"]["cached_tokens"]},
        nodes,
    )


def test_another_key_gets_what_a_fresh_server_would_give(shared: Serving) -> None:
    """Tokens, counters and traces: the same with the secret planted and without; the owner's own
    differ."""
    shared.service.llm.forget()
    text, counters, nodes = tracks(shared, "mallory", cache_salt="before")
    plant(shared)
    text_after, counters_after, nodes_after = tracks(shared, "mallory", cache_salt="after")
    assert counters_after == counters and "memory" not in counters
    assert [n["id"] for n in nodes_after] == [n["id"] for n in nodes]
    assert "told nobody" not in text + text_after
    assert tracks(shared, "alice")[1].get("memory", 0) > 0, (
        "the secret is remembered, so there was something to find"
    )


def test_a_trace_hides_what_another_request_said_even_from_the_same_tenant(shared: Serving) -> None:
    plant(shared)
    text, counters, nodes = tracks(shared, "alice")
    hidden = [n for n in nodes if n["source"] == "memory" and not n["accepted"]]
    assert counters["memory"] > 0 and hidden
    assert all((n["id"], n["text"], n["p"], n["noise"]) == (None, "", None, None) for n in hidden)
    assert "told nobody" not in text


def test_what_the_model_thought_of_one_tenants_text_drafts_for_no_other(shared: Serving) -> None:
    """Tables of successors: another key's drafts are those of a fresh server, and a trace tells of
    no rejected node."""
    recycle: dict[str, Any] = {"speculative": {"draft": "recycle", "depth": 4}}
    shared.service.llm.forget()
    _, counters, nodes = tracks(shared, "mallory", cache_salt="one", **recycle)
    plant(shared, **recycle)
    _, counters_after, nodes_after = tracks(shared, "mallory", cache_salt="two", **recycle)
    assert counters_after == counters and [n["id"] for n in nodes_after] == [n["id"] for n in nodes]
    _, own, nodes = tracks(shared, "alice", **recycle)
    assert own["recycle"] > counters["recycle"], (
        "the text was thought of, so there was something to find"
    )
    rejected = [n for n in nodes if n["source"] == "recycle" and not n["accepted"]]
    assert rejected and all((n["id"], n["text"], n["p"]) == (None, "", None) for n in rejected)


@pytest.mark.parametrize(
    "field", ["documents", "logit_bias", "cache_salt", "n", "response_format", "echo", "user"]
)
def test_no_field_of_a_request_opens_another_tenant(shared: Serving, field: str) -> None:
    plant(shared, cache_salt="alice")
    values: dict[str, Any] = {
        "documents": {"documents": [BEGINNING * 4]}, "logit_bias": {"logit_bias": {"1": 100, "2": 100}},
        "cache_salt": {"cache_salt": "alice"}, "n": {"n": 2}, "echo": {"echo": True}, "user": {"user": "alice"},
        "response_format": {"response_format": {"type": "regex", "regex": "[a-z_]*( = \\[.{0,90})?"}},
    }  # fmt: skip
    body = {"prompt": BEGINNING, "max_tokens": 60} | GREEDY | DEEP | values[field]
    answer = asked(shared, "mallory", "/v1/completions", body)
    assert (
        answer.status_code == 200
        and "told nobody" not in answer.text
        and '"memory"' not in answer.text
    )


PATHS: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/completions", {"prompt": BEGINNING} | GREEDY),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": BEGINNING}]} | GREEDY | DEEP,
    ),
    ("/v1/responses", {"input": BEGINNING, "temperature": 0}),
    ("/v1/embeddings", {"input": BEGINNING}),
    ("/api/generate", {"model": "tiny", "prompt": BEGINNING, "raw": True, "stream": False}),
    (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": BEGINNING}], "stream": False},
    ),
    ("/tokenize", {"prompt": BEGINNING}),
    *(
        (path, None)
        for path in (
            "/v1/models",
            "/server_info",
            "/health",
            "/ready",
            "/version",
            "/metrics",
            "/docs",
        )
    ),
    *((path, None) for path in ("/api/tags", "/api/ps", "/api/version", "/openapi.json")),
]


@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
def test_no_endpoint_shows_what_another_tenant_said(
    shared: Serving, path: str, body: dict[str, Any] | None
) -> None:
    plant(shared)
    answer = asked(shared, "mallory", path, body)
    assert answer.status_code < 500 and "told nobody" not in answer.text
    assert not re.search(
        r"(?<![.\d])4711", answer.text
    )  # which milliseconds may be, behind their point


def test_what_is_counted_over_all_is_the_operators(shared: Serving) -> None:
    refused = asked(shared, "mallory", "/metrics")
    assert refused.status_code == 403 and "operator" in refused.json()["error"]["message"]
    assert asked(shared, "operator", "/metrics").status_code == 200
    plant(shared)
    theirs, ours = (
        asked(shared, who, "/server_info").json()["costs"] for who in ("mallory", "operator")
    )
    assert theirs == {"pass_ms": {}, "draft_ms": {}} and ours["pass_ms"]
    body = {"prompt": BEGINNING, "max_tokens": 4} | GREEDY | DEEP
    rates = {
        who: [
            chunk["x_spec"]["rate"]
            for chunk in sse(asked(shared, who, "/v1/completions", body))
            if "x_spec" in chunk
        ]
        for who in ("mallory", "operator")
    }
    assert set(rates["mallory"]) == {None} and None not in rates["operator"]


def test_one_salt_is_one_memory_within_a_key(shared: Serving) -> None:
    plant(shared, cache_salt="a conversation")
    assert tracks(shared, "alice", cache_salt="a conversation")[1].get("memory", 0) > 0
    assert "memory" not in tracks(shared, "alice", cache_salt="another")[1]
    assert "memory" not in tracks(shared, "alice")[1]


@pytest.mark.parametrize(
    ("host", "share", "remembered"),
    [("127.0.0.1", False, True), ("0.0.0.0", False, False), ("0.0.0.0", True, True)],
)
def test_without_keys_this_machine_is_one_person_and_others_are_strangers(
    spare: LLM, host: str, share: bool, remembered: bool
) -> None:
    with serving(spare, host=host, share_memory=share) as server:
        plant(server)
        assert ("memory" in tracks(server, "anybody")[1]) == remembered
        plant(server, cache_salt="mine")
        assert tracks(server, "anybody", cache_salt="mine")[1].get("memory", 0) > 0


def test_the_operator_may_say_that_keys_share(spare: LLM, keys: Path) -> None:
    with serving(spare, api_keys=str(keys), share_memory=True) as server:
        plant(server)
        assert tracks(server, "mallory")[1].get("memory", 0) > 0


def test_tenants_cannot_be_forged() -> None:
    """No key and salt together name what another key, or no key, names."""
    found = set()
    pairs = [
        (tenant, salt)
        for tenant in ("", "a", "b", "ab")
        for salt in (None, "a", "b", "ab", "\n", "\nb", "a\nb")
    ]
    for tenant, salt in pairs:
        token = CALLER.set(Caller(tenant))
        found.add(tenant_of(salt))
        CALLER.reset(token)
    assert len(found) == len(pairs)


def test_keys_lose_the_line_end_they_came_with(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "from-a-file\n")
    with serving(spare, api_key=("other\n",)) as server:
        for key, status in (("from-a-file", 200), ("other", 200), ("nobody", 401)):
            answer = server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alice\n", "line 1: give a name and a key"),
        ("a b c\n", "line 1: give a name and a key"),
        ("a x\na y\n", "line 2: the name 'a' was there before"),
        ("a x\nb x\n", "the key of b is given twice"),
        ("# nobody\n\n", "has no keys"),
        ("a \x01\n", "visible ASCII"),
        ("a ключ\n", "visible ASCII"),
        ("a " + "x" * 600, "visible ASCII"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        Callers([], file, "127.0.0.1", False)
    assert "\n" not in str(error.value)
    assert "xxx" not in str(error.value), "a message does not show a key"


def test_a_file_of_keys_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"a \xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "bytes")


def test_all_of_this_would_notice_a_leak(spare: LLM) -> None:
    """With one memory for all, the attack that these tests make finds the secret's tokens in the
    counters."""
    with serving(spare, share_memory=True) as server:
        plant(server)
        assert tracks(server, "mallory")[1]["memory"] > 0
        assert json.dumps(tracks(server, "mallory", max_tokens=1)[1])
