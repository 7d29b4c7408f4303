"""Requests made to keep the server busy: while they are refused or answered, neither the event loop
nor the engine is held, so that those who ask beside them go on."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from forerun.server import limits
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService
from forerun.server.limits import DIGITS, ENTRIES, OBJECTS, VALUES
from tests.server.serving import PATIENCE, Serving, sse

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MEGABYTE = 1 << 20
PROMISED = 0.05  # seconds, on a quiet machine
ALLOWED = 0.5  # here, where other tests run beside this one; what is repaired took seconds
TRIES = 3
USER = '{"role": "user", "content": ""}'
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 50_000}},
}
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": [' + "[], " * 30_000 + "[]]}"},
}


def body(**fields: Any) -> bytes:
    """A completion with these fields."""
    return json.dumps({"prompt": "x = ", "max_tokens": 2} | fields).encode()


def many(item: str, count: int, before: str, after: str = "]}") -> bytes:
    """A body with a list that need not be made to be sent."""
    return (before + ",".join([item] * count) + after).encode()


def dictionary(count: int) -> dict[str, int]:
    return {str(i): 1 for i in range(count)}


CORPUS: dict[str, Callable[[], tuple[str, bytes]]] = {  # made when they are sent: some take long
    # ---- texts
    "a prompt of 8 MB": lambda: (COMPLETION, body(prompt="word " * (8 * MEGABYTE // 5 - 100))),
    "to tokenize 8 MB": lambda: ("/tokenize", b'{"prompt": "' + b"a " * (4 * MEGABYTE - 100) + b'"}'),
    "a message of 8 MB": lambda: (
        CHAT, b'{"messages": [{"role": "user", "content": "' + b"a " * (4 * MEGABYTE - 100) + b'"}]}',
    ),
    "input of 8 MB": lambda: (RESPONSE, b'{"input": "' + b"a " * (4 * MEGABYTE - 100) + b'"}'),
    "a raw prompt of 8 MB": lambda: (
        "/api/generate", b'{"model": "tiny", "raw": true, "prompt": "' + b"a " * (4 * MEGABYTE - 100) + b'"}',
    ),
    "8 MB to embed": lambda: ("/v1/embeddings", b'{"input": "' + b"a " * (4 * MEGABYTE - 100) + b'"}'),
    "8 MB to embed and cut": lambda: (
        "/api/embed", b'{"model": "tiny", "input": "' + b"a " * (4 * MEGABYTE - 100) + b'"}',
    ),
    "as long a prompt as is read": lambda: (COMPLETION, body(prompt="wörd " * 6500)),
    "texts to embed": lambda: ("/v1/embeddings", json.dumps({"input": ["a b c " * 600] * 2048}).encode()),
    "escapes": lambda: (COMPLETION, b'{"prompt": "' + b"\\u0041" * (8 * MEGABYTE // 6 - 100) + b'"}'),
    "quotation marks": lambda: (COMPLETION, b'{"prompt": "' + b'\\"' * (4 * MEGABYTE - 100) + b'"}'),
    "a draft of 8 MB": lambda: (COMPLETION, body(speculative={"draft": "suffix" * MEGABYTE})),
    "a model of 8 MB": lambda: (COMPLETION, body(model="tiny" * MEGABYTE)),
    "a field of 8 MB": lambda: (COMPLETION, body(**{"temperature" * (MEGABYTE // 2): 1})),
    # ---- counts
    "200,000 messages": lambda: (CHAT, many(USER, 200_000, '{"messages": [')),
    "200,000 messages to tokenize": lambda: ("/tokenize", many(USER, 200_000, '{"messages": [')),
    "200,000 messages for Ollama": lambda: ("/api/chat", many(USER, 200_000, '{"model": "tiny", "messages": [')),
    "200,000 items": lambda: (RESPONSE, many(USER, 200_000, '{"input": [')),
    "8,000 parts": lambda: (
        CHAT, many('{"type": "text", "text": ""}', 8000, '{"messages": [{"role": "user", "content": [', "]}]}"),
    ),
    "4,000 messages": lambda: (CHAT, many(USER, 4000, '{"messages": [')),
    "empty lists": lambda: (COMPLETION, many("[]", 2_500_000, '{"prompt": [')),
    "metadata": lambda: (COMPLETION, body(metadata=dictionary(550_000))),
    "options of the template": lambda: (
        CHAT, json.dumps({"messages": [], "chat_template_kwargs": dictionary(500_000)}).encode(),
    ),
    "biases": lambda: (COMPLETION, body(logit_bias=dictionary(550_000))),
    "as many biases as are read": lambda: (COMPLETION, body(logit_bias=dictionary(300), n=16, max_tokens=30)),
    "stop_token_ids": lambda: (COMPLETION, many("5", 3_900_000, '{"prompt": "x", "n": 64, "stop_token_ids": [')),
    "token ids": lambda: (COMPLETION, body(prompt=[[5] * 2000] * 64, n=1)),
    "token ids to spell": lambda: ("/detokenize", many("5", VALUES - 10, '{"tokens": [')),
    "unknown fields": lambda: (COMPLETION, body(**{f"x{i}": 1 for i in range(4000)})),
    "long numbers": lambda: (COMPLETION, many("7" * 4299, 1800, '{"prompt": [')),
    "depth": lambda: (COMPLETION, b'{"prompt": ' + b"[" * 3 * MEGABYTE + b"]" * 3 * MEGABYTE + b"}"),
    # ---- work on what is small enough
    "long stop strings": lambda: (COMPLETION, body(stop=["a" * 500_000, "ab" * 250_000], max_tokens=200)),
    "the longest stop strings": lambda: (
        COMPLETION, body(stop=["a" * i + "b" for i in range(240, 256)], max_tokens=500, logit_bias={"69": 50}),
    ),
    "documents for many prompts": lambda: (COMPLETION, body(prompt=["x = "] * 64, documents=["a1 = 1\n" * 300] * 3)),
    "all the documents there may be": lambda: (
        COMPLETION, body(documents=["".join(f"{i} " for i in range(450))] * 4, n=16),
    ),
    "log-probabilities": lambda: (COMPLETION, body(n=64, logprobs=20, max_tokens=60)),
    "an echo, many times": lambda: (COMPLETION, body(prompt="x = 1\n" * 330, n=64, echo=True, max_tokens=1)),
    "an echo with log-probabilities, many times": lambda: (
        COMPLETION, body(prompt="x = 1\n" * 300, n=16, echo=True, logprobs=20, max_tokens=0),
    ),
    "an echo with log-probabilities, streamed": lambda: (
        COMPLETION, body(prompt="x = 1\n" * 300, n=16, echo=True, logprobs=20, max_tokens=0, stream=True),
    ),
    "penalties": lambda: (
        COMPLETION, body(prompt="x = 1\n" * 300, n=16, repetition_penalty=1.1, frequency_penalty=0.5),
    ),
    "tools": lambda: (
        CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": [TOOL] * 100}).encode(),
    ),
    "arguments": lambda: (
        CHAT, json.dumps({"messages": [{"role": "assistant", "tool_calls": [CALL] * 20, "content": None}]}).encode(),
    ),
}  # fmt: skip


class Watch:
    """How long the event loop and the engine let those wait who ask for nothing but a sign of
    life."""

    def __init__(self, service: EngineService) -> None:
        self.service, self.loop_held, self.engine_held = service, 0.0, 0.0
        self._asked: float | None = None
        self._ended = threading.Event()

    def reset(self) -> None:
        self.loop_held = self.engine_held = 0.0

    async def beat(self, every: float = 0.005) -> None:
        while not self._ended.is_set():
            before = time.perf_counter()
            if self._asked is None:
                self._asked = before
                self.service._commands.put(self._answer)
            await asyncio.sleep(every)
            self.loop_held = max(self.loop_held, time.perf_counter() - before - every)

    def _answer(self) -> None:
        assert self._asked is not None
        self.engine_held = max(self.engine_held, time.perf_counter() - self._asked)
        self._asked = None


@contextmanager
def watched(service: EngineService) -> Iterator[Watch]:
    """The service's event loop and engine with somebody who asks every few milliseconds."""
    watch, loop = Watch(service), service._loop
    assert loop is not None
    beating = asyncio.run_coroutine_threadsafe(watch.beat(), loop)
    try:
        yield watch
    finally:
        watch._ended.set()
        beating.result(PATIENCE)


@pytest.mark.parametrize("name", CORPUS)
def test_neither_the_event_loop_nor_the_engine_is_held(name: str, server: Serving) -> None:
    """What holds them does so each time; what the machine does to this process beside other tests,
    it does once."""
    path, content = CORPUS[name]()
    for _ in range(TRIES):
        with watched(server.service) as watch:
            start = time.perf_counter()
            response = server.http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            took = time.perf_counter() - start
        server.rest()
        print(
            f"\n{name}: {response.status_code} in {took:.2f} s; held {1e3 * watch.loop_held:.0f} ms the event loop,"
            f" {1e3 * watch.engine_held:.0f} ms the engine: {response.text[:90]}"
        )
        assert response.status_code in (200, 400, 404), response.text[:300]
        if response.status_code != 200:
            assert len(response.text) < 700
        held = max(watch.loop_held, watch.engine_held)
        if held < ALLOWED:
            break
    assert held < ALLOWED


def test_all_of_it_at_once_beside_a_stream(server: Serving) -> None:
    """Six who attack, and one who reads: the longest wait between two of its events, and for
    /health."""
    waits: list[float] = []
    done = threading.Event()

    def attack(items: list[tuple[str, bytes]]) -> None:
        with httpx2.Client(base_url=server.url, timeout=PATIENCE) as http:
            for path, content in items:
                http.post(path, content=content, headers={"content-type": "application/json"})

    def ask() -> None:
        with httpx2.Client(base_url=server.url, timeout=PATIENCE) as http:
            while not done.is_set():
                start = time.perf_counter()
                assert http.get("/health").status_code == 200
                waits.append(time.perf_counter() - start)
                done.wait(0.01)

    items = [made() for made in CORPUS.values()]
    threads = [threading.Thread(target=attack, args=(items[i::6],)) for i in range(6)]
    health = threading.Thread(target=ask)
    asked = body(max_tokens=1500, stream=True, ignore_eos=True, speculative=False)
    with watched(server.service) as watch:
        health.start()
        with server.http.stream(
            "POST", COMPLETION, content=asked, headers={"content-type": "application/json"}
        ) as s:
            events, gaps, last = sse(s), list[float](), time.perf_counter()
            for i, event in enumerate(events):
                assert "error" not in event
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                if i == 10:
                    for thread in threads:
                        thread.start()
        for thread in threads:
            thread.join()
        done.set()
        health.join()
    print(
        f"\nheld {1e3 * watch.loop_held:.0f} ms the event loop, {1e3 * watch.engine_held:.0f} ms the engine;"
        f" longest wait between events {1e3 * max(gaps):.0f} ms, for /health {1e3 * max(waits):.0f} ms"
    )
    assert (
        max(watch.loop_held, watch.engine_held) < 4 * ALLOWED
    )  # the clients share this interpreter
    server.rest()


# ------------------------------------------------------------ what is said


def refusal(server: Serving, path: str, content: bytes) -> str:
    response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content, says",
    [
        (many("1", VALUES + 1, '{"prompt": ['), f"values, this server takes {VALUES}"),
        (
            many("{}", OBJECTS + 1, '{"prompt": ['),
            f"lists and objects, this server takes {OBJECTS}",
        ),
        (
            body(metadata=dictionary(ENTRIES + 1)),
            f"has {ENTRIES + 1} entries, this server takes {ENTRIES}",
        ),
        (body(metadata={"a": dictionary(ENTRIES + 1)}), f"{ENTRIES + 1} entries"),
        (body(metadata=dictionary(65)), "metadata"),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 101 + b"1" + b"}" * 102, "deep"),
        (b'{"prompt": "a", "seed": ' + b"1" * (DIGITS + 1) + b"}", f"{DIGITS + 1} digits"),
        (b'{"prompt": "a", "top_p": 0.' + b"1" * DIGITS + b"}", "digits"),
        (body(stop="a" * 257), "at most 256 characters"),
        (body(stop_token_ids=[5] * 1025), "at most 1024 items"),
        (body(prompt="a" * 40_000), "the prompt has 40000 characters, this server takes 32768"),
    ],
)
def test_a_bound_is_said_in_one_line(content: bytes, says: str, server: Serving) -> None:
    assert says in refusal(server, COMPLETION, content)


def test_what_is_in_a_text_counts_as_no_structure(server: Serving) -> None:
    """Brackets, commas and quotation marks of a program are text, escaped or not."""
    program = ('x = {"a": [[1, 2], "b\\\\"], \'c\': "\\"{[,:"}\n' * 400)[:15_000]
    assert server.http.post("/tokenize", json={"prompt": program}).json()["count"] > 0
    text = json.dumps({"prompt": "[{,:" * 6000 + '\\" \\' + '"' * 9000})
    assert server.http.post(
        "/tokenize", content=text, headers={"content-type": "application/json"}
    ).status_code in (
        200,
        400,
    )
    assert (
        "lists and objects"
        not in server.http.post(
            "/tokenize", content=text, headers={"content-type": "application/json"}
        ).text
    )


@pytest.mark.parametrize("digits", [400, 600])
def test_an_error_repeats_little_of_what_was_sent(digits: int, server: Serving) -> None:
    said = refusal(server, COMPLETION, b'{"prompt": "a", "seed": ' + b"1" * digits + b"}")
    assert "seed=111" in said and "1" * 80 not in said and "64-bit" in said
    assert "a" * 100 not in refusal(server, COMPLETION, body(speculative={"draft": "a" * 5000}))
    response = server.http.post(COMPLETION, json={"prompt": "a", "model": "b" * 5000})
    assert response.status_code == 404 and "b" * 100 not in response.text


# ------------------------------------------------------------ places


def test_there_is_a_place_before_there_is_any_work(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no place is left, nothing is tokenized for a request of any endpoint."""
    monkeypatch.setattr(server.service, "reserved", server.service.limit)
    monkeypatch.setattr(server.service.llm.tokenizer, "encode", None)
    monkeypatch.setattr(server.service.llm.tokenizer, "chat", None)
    for path, content in {
        COMPLETION: body(),
        CHAT: b'{"messages": [{"role": "user", "content": "a"}]}',
        RESPONSE: b'{"input": "a"}',
        "/tokenize": b'{"prompt": "a"}',
        "/detokenize": b'{"tokens": [5]}',
        "/v1/embeddings": b'{"input": "a"}',
        "/api/chat": b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}]}',
        "/api/generate": b'{"model": "tiny", "prompt": "a"}',
        "/api/embed": b'{"model": "tiny", "input": "a"}',
        "/api/embeddings": b'{"model": "tiny", "prompt": "a"}',
    }.items():
        response = server.http.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 429, path
        assert response.headers["retry-after"]


def test_a_place_is_given_back_whatever_comes_of_the_preparation(server: Serving) -> None:
    for content in (
        body(),
        body(prompt="a" * 40_000),
        body(stop_token_ids=[-1]),
        b'{"prompt": [[]]}',
    ):
        server.http.post(COMPLETION, content=content, headers={"content-type": "application/json"})
        assert server.service.reserved == 0


def test_what_a_refused_body_held_is_free_at_once(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of an error may hold the error: where megabytes wait for cycles to be looked for, they
    pile up."""

    class Large(dict[str, Any]):
        """What came of the body."""

    found: list[weakref.ref[Large]] = []

    def parse(_: bytes) -> Large:
        large = Large()
        found.append(weakref.ref(large))
        raise ApiError(400, f"{len(large)} fields are too few")

    monkeypatch.setattr(limits, "parse", parse)
    gc.disable()
    try:
        for _ in range(3):
            assert server.http.post(COMPLETION, json={"prompt": "x" * 20_000}).status_code == 400
        monkeypatch.undo()
        server.complete()  # the last one's frames have ended
        assert len(found) == 3 and not any(one() for one in found)
    finally:
        gc.enable()
