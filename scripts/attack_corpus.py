"""What strangers may send: requests that are malformed, extreme or never end, each by its name.

`REQUESTS` are bodies, made when their turn comes; `BEHAVIOURS` are ways to use a connection.
`scale` makes what is large smaller, for tests.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hello."}]
Made = tuple[str, bytes]


def posted(path: str, body: Any) -> Made:
    """A body as JSON."""
    return path, json.dumps(body, separators=(",", ":")).encode()


def completion(prompt: Any = "x", **fields: Any) -> Made:
    """A completion."""
    return posted(COMPLETIONS, {"prompt": prompt, **fields})


def chat(**fields: Any) -> Made:
    """A chat."""
    return posted(CHAT, {"messages": HELLO, **fields})


def many(count: float, scale: float) -> int:
    """Return a number of repetitions, scaled, at least 2."""
    return max(2, int(count * scale))


def form(kind: str, value: Any) -> Made:
    """A completion in the form of a grammar."""
    named = {"name": "x", "schema": value} if kind == "json_schema" else value
    return completion(max_tokens=32, response_format={"type": kind, kind: named})


def grown(kind: str, value: Any) -> Made:
    """A long and unlikely completion in the form of a grammar whose matching takes more and
    more."""
    more = {"temperature": 100, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 400, "n": 4}
    return completion(**more, response_format={"type": kind, kind: value})


def terminals(count: int) -> str:
    """A grammar whose terminals all begin alike, so that each token may belong to any of them."""
    names = [f"T{i}" for i in range(count)]
    rules = [f"T{i}: /(.|\\n)*{chr(97 + i % 26)}.{{{i % 40}}}/" for i in range(count)]
    return "\n".join([f"start: ({' | '.join(names)})+", *rules])


def messages(scale: float) -> Made:
    return chat(messages=[{"role": "user"}] * many(490_000, scale), max_tokens=1)


def stops(scale: float) -> Made:
    texts = ["\n" * many(950_000, scale) + str(i) for i in range(4)]
    return completion(max_tokens=400, ignore_eos=True, stop=texts)


def documents(scale: float) -> Made:
    text = "def walk(path): return [name for name in os.listdir(path)]\n" * many(2_500, scale)
    return completion(["x"] * 64, max_tokens=2, documents=[text])


def nested(scale: float) -> Made:
    deep = many(2_000_000, scale)
    return CHAT, b'{"messages":' + b"[" * deep + b"]" * deep + b"}"


def schema_of_schemas(scale: float) -> Made:
    value: Any = {"type": "string"}
    for _ in range(many(300, scale)):
        properties = {"a": value, "b": {"$ref": "#"}}
        value = {"type": "object", "properties": properties, "required": ["a"]}
    return form("json_schema", value)


def tools(scale: float) -> Made:
    nothing = {"type": "object", "properties": {}}
    functions = [{"name": f"f{i}", "parameters": nothing} for i in range(many(20_000, scale))]
    given = [{"type": "function", "function": function} for function in functions]
    return chat(max_tokens=4, tools=given, tool_choice="required")


def noise(rng: random.Random) -> Made:
    """A request of fields that may exist with values that may be of their kind."""
    names = (
        "prompt", "messages", "max_tokens", "n", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "logprobs",
        "logit_bias", "echo", "stream", "trace", "documents", "prediction", "speculative", "response_format", "tools",
        "tool_choice", "stop_token_ids", "user", "min_tokens", "x",
    )  # fmt: skip
    values: tuple[Any, ...] = (
        None, True, -1, 0, 1, 1 << 70, 1e308, float("nan"), float("-inf"), "", "x", "\x00", "\ud800", "\u202e" * 9, [],
        [[]], [1, "x"], {}, {"x": {"x": {}}}, {"type": "regex", "regex": "(((a*)*)*)*b"},
        {"draft": "model:/etc", "depth": -1},
    )  # fmt: skip
    body = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(1, 6))}
    base: dict[str, Any] = rng.choice([{"prompt": "x"}, {"messages": HELLO}])
    others = ("/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize", "/api/chat")
    return posted(rng.choice((COMPLETIONS, CHAT, *others)), base | body)


WORDS = "a b c d "
ENDLESS_LARK = 'start: %json {"type": "integer", "\\u006dultipleOf": 123456789}'
REQUESTS: dict[str, Callable[[float], Made]] = {
    "long prompt": lambda s: completion(WORDS * many(1_000_000, s), max_tokens=1),
    "long chat": lambda s: chat(messages=[{"role": "user", "content": WORDS * many(1_000_000, s)}]),
    "long tokenize": lambda s: posted("/tokenize", {"prompt": WORDS * many(1_000_000, s)}),
    "one long word": lambda s: posted("/tokenize", {"prompt": "a" * many(8_000_000, s)}),
    "long embedding": lambda s: posted("/v1/embeddings", {"input": WORDS * many(1_000_000, s)}),
    "long generate": lambda s: posted(
        "/api/generate", {"prompt": WORDS * many(1_000_000, s), "raw": True}
    ),
    "many embeddings": lambda s: posted("/v1/embeddings", {"input": ["x"] * many(1_900_000, s)}),
    "many prompts": lambda s: completion(["x"] * many(1_900_000, s), max_tokens=1),
    "many ids": lambda s: posted("/detokenize", {"tokens": [9] * many(3_900_000, s)}),
    "many messages": messages,
    "many messages to tokenize": lambda s: ("/tokenize", messages(s)[1]),
    "metadata": lambda s: chat(
        max_tokens=1, metadata={f"k{i}": "" for i in range(many(550_000, s))}
    ),
    "long stops": stops,
    "stop ids": lambda s: completion(max_tokens=4, n=64, stop_token_ids=[9] * many(3_900_000, s)),
    "documents": documents,
    "tools": tools,
    "logit bias": lambda s: completion(
        max_tokens=4, logit_bias={str(i): 1 for i in range(many(500_000, s))}
    ),
    "lark with an escaped multipleOf": lambda s: form("grammar", ENDLESS_LARK),
    "schema with a multipleOf": lambda s: form(
        "json_schema", {"type": "integer", "multipleOf": 123456789}
    ),
    "nested schema": schema_of_schemas,
    "large regex": lambda s: form("regex", f"(a{{{many(1000, s)}}}){{{many(1000, s)}}}"),
    "a lexer that grows": lambda s: grown("regex", r"(.|\n)*[aeiou](.|\n){30}x"),
    "an ambiguous grammar": lambda s: grown(
        "grammar", 'start: s\ns: s s | s s s | "a" | /[a-z ]/ | /[a-z]+/'
    ),
    "a grammar of many terminals": lambda s: grown("grammar", terminals(300)),
    "long choice": lambda s: form("choice", [f"{i:07}" for i in range(many(700_000, s))]),
    "template arguments": lambda s: chat(
        max_tokens=1, chat_template_kwargs={"x": [[0] * 9] * many(300_000, s)}
    ),
    "most completions": lambda s: completion(max_tokens=many(64, s), n=64),
    "an echo, many times": lambda s: completion(
        [9] * many(2000, s), echo=True, n=256, max_tokens=1
    ),
    "echoes of many prompts": lambda s: completion(
        [WORDS * many(200, s)] * 64, echo=True, n=4, max_tokens=1
    ),
    "an echo with log-probabilities": lambda s: completion(
        [9] * many(2000, s), echo=True, logprobs=20, n=16, max_tokens=0
    ),
    "log-probabilities": lambda s: chat(
        logprobs=True, top_logprobs=20, n=64, max_tokens=many(2000, s)
    ),
    "embeddings of short texts": lambda s: posted(
        "/v1/embeddings", {"input": ["x"] * many(2048, s)}
    ),
    "too many completions": lambda s: completion(n=10**9),
    "a seed of 4,299 digits": lambda s: (
        COMPLETIONS,
        b'{"prompt":"x","seed":' + b"9" * 4299 + b"}",
    ),
    "a number of many digits": lambda s: (
        COMPLETIONS,
        b'{"prompt":"x","top_p":0.' + b"9" * many(7_000_000, s) + b"}",
    ),
    "unknown fields": lambda s: completion(**{f"z{i}": i for i in range(many(400_000, s))}),
    "nested lists": nested,
    "no JSON": lambda s: (CHAT, b'{"messages": [{"role"'),
    "no text": lambda s: (CHAT, bytes(range(256)) * many(10_000, s)),
    "nothing": lambda s: (CHAT, b""),
}


class Wire:
    """One address of a server, and what can be done to it by hand from the address `source`, ""
    for the usual one."""

    def __init__(self, host: str, port: int, patience: float, source: str = "") -> None:
        self.host, self.port, self.patience = host, port, patience
        self.source = (source, 0) if source and host.startswith("127.") else None

    async def ask(
        self, path: str, body: bytes, kind: str = "application/json", name: str = ""
    ) -> str:
        """Send a request and read all of its answer; returns the status, or what became of it."""
        head = f"POST {path} HTTP/1.1\r\nHost: {name or f'{self.host}:{self.port}'}\r\nContent-Type: {kind}\r\n"
        return await self.say(
            f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )

    async def say(self, *pieces: bytes, pause: float = 0.0, read: bool = True) -> str:
        """Send bytes, with pauses between the pieces; returns the status of what is answered."""
        writer, status = None, "no answer"
        try:
            async with asyncio.timeout(self.patience):
                reader, writer = await asyncio.open_connection(
                    self.host, self.port, local_addr=self.source
                )
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)
                line = await reader.readline() if read else b""
                status = line[9:12].decode(errors="replace") or "closed"
                while read and await reader.read(1 << 16):
                    pass
        except TimeoutError:
            status = f"{status}, not ended" if status != "no answer" else status
        except OSError:
            status = "closed" if status == "no answer" else status
        finally:
            if writer is not None:
                writer.transport.abort()
        return status


def begun(path: str, length: int) -> bytes:
    kind = "Content-Type: application/json"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {length}\r\n\r\n".encode()


async def hung_body(wire: Wire, scale: float) -> str:
    """Most of a large body, and then nothing."""
    size = many(8_000_000, scale)
    return await wire.say(begun(COMPLETIONS, size) + b'{"prompt": "' + b"a" * (size // 2))


async def trickle(wire: Wire, scale: float) -> str:
    """A body a byte at a time."""
    return await wire.say(begun(COMPLETIONS, 1000), *[b" "] * 500, pause=0.1)


async def slow_headers(wire: Wire, scale: float) -> str:
    """Headers a line at a time."""
    return await wire.say(b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 500, pause=0.1)


async def many_connections(wire: Wire, scale: float) -> str:
    """Connections that send nothing."""
    statuses = await asyncio.gather(
        *(wire.say(b"", pause=3 * scale, read=False) for _ in range(many(700, scale)))
    )
    return statuses[0]


async def unread(wire: Wire, request: Made, count: int) -> str:
    """Requests on several connections, of whose answers nothing is read."""
    path, content = request
    sent, pause = begun(path, len(content)) + content, wire.patience * 0.9
    return max(
        await asyncio.gather(*(wire.say(sent, pause=pause, read=False) for _ in range(count)))
    )


EVERYTHING = dict(max_tokens=2000, ignore_eos=True, logprobs=20, stream=True, trace=True)


async def slow_reader(wire: Wire, scale: float) -> str:
    """A stream with all that can be in it, of which nothing is read."""
    return await unread(wire, completion(n=4, **EVERYTHING), 1)


async def killed(wire: Wire, scale: float) -> str:
    """Streams that are left as soon as they have begun."""
    path, content = completion(max_tokens=500, ignore_eos=True, stream=True)
    sent = begun(path, len(content)) + content
    return (await asyncio.gather(*(wire.say(sent, pause=0.05, read=False) for _ in range(20))))[0]


async def rebound(wire: Wire, scale: float) -> str:
    """A page whose name leads here."""
    return await wire.ask(COMPLETIONS, b'{"prompt": "x", "max_tokens": 1}', name="a.example")


async def unseen_post(wire: Wire, scale: float) -> str:
    """What a page elsewhere may send unasked."""
    return await wire.ask(
        "/api/generate", b'{"prompt": "x"}', kind="text/plain\r\nOrigin: https://a.example"
    )


async def random_bytes(wire: Wire, scale: float) -> str:
    """No HTTP at all."""
    return await wire.say(random.Random(1).randbytes(many(100_000, scale)))


async def header_flood(wire: Wire, scale: float) -> str:
    """Headers without end."""
    return await wire.say(
        b"GET / HTTP/1.1\r\nHost: localhost\r\n", *[b"X-Header: y\r\n" * 1000] * many(500, scale)
    )


KEYED = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def tiny_chunks(wire: Wire, scale: float) -> str:
    """A body of 43,000 chunks of one byte."""
    _, content = completion(max_tokens=1, user="x" * many(43_000, scale))
    head = f"{KEYED}Authorization: Bearer none\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    return await wire.say(head + chunks + b"0\r\n\r\n")


async def tiny_chunks_without_end(wire: Wire, scale: float) -> str:
    """Eight connections on which such chunks do not end."""
    head = f"{KEYED}Transfer-Encoding: chunked\r\n\r\n".encode()
    pieces = [head, *[b"1\r\nx\r\n" * 20_000] * many(50, scale)]
    return max(await asyncio.gather(*(wire.say(*pieces) for _ in range(8))))


async def many_headers(wire: Wire, scale: float) -> str:
    """Requests of thousands of short headers, for which no key is needed."""
    sent = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * many(4000, scale) + b"\r\n"
    return max(await asyncio.gather(*(wire.say(sent) for _ in range(many(100, scale)))))


async def most_headers(wire: Wire, scale: float) -> str:
    """As many and as long headers as are taken, on many connections at once."""
    sent = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        + b"a: %s\r\n" % (b"b" * 150) * 90
        + b"\r\n"
    )
    return max(await asyncio.gather(*(wire.say(sent) for _ in range(many(200, scale)))))


async def unread_answers(wire: Wire, scale: float) -> str:
    """Two hundred streams with all that can be in them, of which nothing is read."""
    return await unread(wire, completion(**EVERYTHING), many(200, scale))


async def unread_whole_answers(wire: Wire, scale: float) -> str:
    """Large answers in one piece, of which nothing is read."""
    request = posted("/v1/embeddings", {"input": ["x"] * many(200, scale)})
    return await unread(wire, request, many(60, scale))


async def descriptors(wire: Wire, scale: float) -> str:
    """Half-sent requests on more connections than there are descriptors, and a grammar beside
    them."""
    half = [
        wire.say(b"POST / HTTP/1.1\r\nContent-Le", b"", pause=scale, read=False)
        for _ in range(many(1500, scale))
    ]
    number = random.randrange(10**6)
    request = wire.ask(*form("regex", f"[a-z]{{4}}{number}"))
    return (await asyncio.gather(request, *half))[0]


async def log_flood(wire: Wire, scale: float) -> str:
    """What a server may write a line about, a thousand times."""
    wrong = (
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET / HTTP/1.1\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    )
    statuses = [await wire.say(wrong[i % 3], read=i % 3 < 2) for i in range(many(1000, scale))]
    return max(statuses)


async def two_lengths(wire: Wire, scale: float) -> str:
    """A request that two readers would end at different places."""
    return await wire.say(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"
    )


async def pipeline(wire: Wire, scale: float) -> str:
    """Many requests at once on one connection, whose answers are not read."""
    return await wire.say(
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * many(1000, scale),
        pause=1.0 * scale,
        read=False,
    )


async def noise_of_fields(wire: Wire, scale: float) -> str:
    """Requests of random fields."""
    rng = random.Random()
    statuses = [await wire.ask(*noise(rng)) for _ in range(many(20, scale))]
    return max(statuses)  # the worst status


BEHAVIOURS: dict[str, Callable[[Wire, float], Awaitable[str]]] = {
    "hung body": hung_body,
    "trickling body": trickle,
    "slow headers": slow_headers,
    "many connections": many_connections,
    "slow reader": slow_reader,
    "killed clients": killed,
    "rebound name": rebound,
    "unseen post": unseen_post,
    "random bytes": random_bytes,
    "header flood": header_flood,
    "tiny chunks": tiny_chunks,
    "tiny chunks without end": tiny_chunks_without_end,
    "many headers": many_headers,
    "most headers": most_headers,
    "unread answers": unread_answers,
    "unread whole answers": unread_whole_answers,
    "descriptors": descriptors,
    "log flood": log_flood,
    "two lengths": two_lengths,
    "pipeline": pipeline,
    "random fields": noise_of_fields,
}
NAMES = (*REQUESTS, *BEHAVIOURS)


async def strike(wire: Wire, name: str, scale: float = 1.0) -> str:
    """Run one attack of the corpus; return the server's status."""
    if name in BEHAVIOURS:
        return await BEHAVIOURS[name](wire, scale)
    return await wire.ask(*REQUESTS[name](scale))
