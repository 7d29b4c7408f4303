"""Over a thousand requests that are wrong: each is refused at once in OpenAI's words, and leaves no
trace."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.server.serving import Serving

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "x = ", "max_tokens": 2},
    CHAT: {"messages": HI, "max_tokens": 2},
    RESPONSE: {"input": "hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


@dataclass(frozen=True)
class Raw:
    """Text that json.dumps would not write, put into a body as it is."""

    text: str


NAN, INF, HUGE = Raw("NaN"), Raw("-Infinity"), Raw("1e999")
LONG = Raw("1" + "0" * 400)
DEEP = Raw("[" * 10_000 + "]" * 10_000)
DEEP_OBJECT = Raw('{"a":' * 10_000 + "1" + "}" * 10_000)
NOT_TEXT: list[Any] = [1, 1.5, True, {}, {"a": 1}, NAN, DEEP]
NOT_WHOLE: list[Any] = ["1", "", 1.5, True, [], [1], {}, NAN, INF, HUGE, DEEP]
NOT_NUMBER: list[Any] = ["1", "nan", True, [], {}, NAN, INF, HUGE, LONG, DEEP]
NOT_BOOL: list[Any] = ["true", "", 0, 1, 2.5, [], {}, NAN]
NOT_LIST: list[Any] = ["a", 1, 1.5, True, {}, {"0": 1}, NAN]
NOT_OBJECT: list[Any] = ["a", 1, 1.5, [], [1], NAN, DEEP]
NO_TOKENS: list[Any] = [[-1], [4096], [1 << 70], [1.5], ["1"], [True], [None], [[1]]]
BAD_SCHEMAS: list[Any] = [
    {"type": "nothing"},
    {"type": 5},
    {"$ref": "#/nowhere"},
    {"$ref": "http://example.com/x"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?<=a)b"},
    {"type": "object", "properties": 5},
    {"enum": []},
    {"allOf": "x"},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "number", "multipleOf": 0},
    {"type": "number", "maximum": NAN},
    {"const": Raw('"\\ud800"')},
    {"a": DEEP},
    {"description": "x" * (1 << 17)},
    "x",
    5,
    [],
]

GENERATION: dict[str, list[Any]] = {
    "model": [*NOT_TEXT, [], "gpt-5", "", "tiny ", Raw('"\\ud800"'), "a\nb"],
    "temperature": [*NOT_NUMBER, -1, -0.001, 101, 1e308],
    "top_p": [*NOT_NUMBER, 0, -0.1, 1.1],
    "n": [*NOT_WHOLE, 0, -1, 1025, 1 << 80],
    "stop": [
        1,
        True,
        {},
        [1],
        [None],
        "",
        [""],
        ["a", ""],
        ["a"] * 17,
        "a" * 257,
        NAN,
        DEEP,
        Raw('["\\ud800"]'),
    ],
    "seed": [*NOT_WHOLE, 1 << 64, -(1 << 63) - 1, LONG],
    "logit_bias": [
        *NOT_OBJECT,
        {"x": 1},
        {"": 1},
        {"1.5": 1},
        {"-1": 1},
        {"4096": 1},
        {"9" * 50: 1},
        {"9" * 5000: 1},
        {"1": 101},
        {"1": -101},
        {"1": "a"},
        {"1": None},
        {"1": NAN},
        {"1": True},
    ],
    "presence_penalty": [*NOT_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NOT_NUMBER, -2.1, 2.1],
    "stream": NOT_BOOL,
    "stream_options": [
        *NOT_OBJECT,
        {"include_usage": 1},
        {"usage": True},
        {"include_usage": "yes"},
    ],
    "response_format": [
        *NOT_OBJECT,
        {},
        {"type": "xml"},
        {"type": None},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None},
        {"type": "regex"},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": "("},
        {"type": "regex", "regex": "a{1000000000}"},
        {"type": "regex", "regex": "(" * 5000 + ")" * 5000},
        {"type": "regex", "regex": "a" * (1 << 17)},
        {"type": "regex", "regex": Raw('"\\ud800"')},
        {"type": "grammar", "grammar": "start"},
        {"type": "grammar", "grammar": "start: nowhere"},
        {"type": "grammar", "grammar": "start: start"},
        {"type": "grammar", "grammar": ""},
        {"type": "choice", "choice": []},
        {"type": "choice", "choice": [""]},
        {"type": "choice", "choice": [1]},
        {"type": "choice", "choice": "ab"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "more": 1}},
        *(
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            for schema in BAD_SCHEMAS
        ),
    ],
    "top_k": [*NOT_WHOLE, -2, 1 << 40, LONG],
    "min_p": [*NOT_NUMBER, -0.1, 1.1],
    "repetition_penalty": [*NOT_NUMBER, 0, -1, 1e9],
    "min_tokens": [*NOT_WHOLE, -1, 3, LONG],
    "ignore_eos": NOT_BOOL,
    "stop_token_ids": [*NOT_LIST, *NO_TOKENS, DEEP],
    "return_token_ids": NOT_BOOL,
    "speculative": [
        *("true", 0, 1.5, [], NAN),
        *(
            {"draft": d}
            for d in ("nothing", "", 5, True, [], "model", "model:/etc", "Suffix", Raw('"\\ud800"'))
        ),
        *({"depth": d} for d in ("deep", "", "4", -1, 65, 1.5, True, [], NAN, LONG)),
        *({"rule": r} for r in ("nothing", "", 5, True, [], "MATCH", Raw('"\\ud800"'))),
        {"width": 2},
    ],
    "documents": [*NOT_LIST, [1], [None], ["a"] * 65, Raw('["\\ud800"]')],
    "trace": NOT_BOOL,
    "user": [*NOT_TEXT, []],
    "metadata": NOT_OBJECT,
    "store": NOT_BOOL,
    "service_tier": [*NOT_TEXT, []],
    "safety_identifier": [*NOT_TEXT, []],
    "prompt_cache_key": [*NOT_TEXT, []],
    "parallel_tool_calls": NOT_BOOL,
}
MAX_TOKENS: list[Any] = [*NOT_WHOLE, 0, -3, -1.5, 1 << 33, LONG]
TEXTS: list[Any] = [*NOT_TEXT, None, DEEP_OBJECT]
BAD_MESSAGES: list[Any] = [
    *NOT_LIST,
    *(None, [], [None], ["hi"], [5], [[]], [{}], DEEP, DEEP_OBJECT),
    *(
        [{"role": role, "content": "hi"}]
        for role in ("robot", "", 5, None, [], "User", "function", NAN)
    ),
    *(
        [{"role": "user", "content": c}]
        for c in (5, True, {}, [5], [None], [{}], ["a"], NAN, DEEP, Raw('"\\ud800"'))
    ),
    *(
        [{"role": "user", "content": [part]}]
        for part in ({"type": "text"}, {"type": "image_url", "image_url": {}})
    ),
    *(
        [{"role": "user", "content": [{"type": "text", "text": text}]}]
        for text in (5, None, [], Raw('"\\ud800"'))
    ),
    [{"role": "user", "content": "hi", "more": 1}],
    [{"content": "hi"}],
    [{"role": "user", "content": "hi " * 5000}],
    [{"role": "assistant", "tool_calls": "x"}],
    [{"role": "assistant", "tool_calls": [{}]}],
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}],
        }
    ],
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}],
        }
    ],
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f\n\ng", "arguments": "{"}}],
        }
    ],
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 50_000}}],
        }
    ],
]
BAD_TOOLS: list[Any] = [
    *NOT_LIST,
    *([None], [5], ["f"], [{}], [[]], [TOOL] * 129, DEEP),
    *([TOOL | {"type": kind}] for kind in ("x", None, 5)),
    *(
        [{"type": "function", "function": f}]
        for f in (None, 5, {}, {"name": ""}, {"name": "a b"}, {"name": "x" * 65})
    ),
    *(
        [{"type": "function", "function": {"name": "f", "parameters": p}}]
        for p in (5, "x", [], True)
    ),
]
BAD: dict[str, dict[str, list[Any]]] = {
    COMPLETION: GENERATION
    | {
        "prompt": [
            *(
                None,
                5,
                1.5,
                True,
                {},
                "",
                [],
                [""],
                [[]],
                [[], [5]],
                [None],
                [5, "a"],
                ["a", 5],
                [1.5],
                NAN,
                DEEP,
            ),
            *(tokens for tokens in NO_TOKENS if tokens not in (["1"], [[1]])),
            *([tokens] for tokens in NO_TOKENS),
            "x = 1\n" * 3000,
            [5] * 5000,
            ["a", "x = 1\n" * 3000],
            Raw('"\\ud800"'),
            Raw('["a", "\\udfff"]'),
        ],
        "max_tokens": MAX_TOKENS,
        "logprobs": [*NOT_WHOLE, -1, 21, 1 << 70],
        "echo": NOT_BOOL,
        "best_of": [*NOT_WHOLE, 0, 2, -1],
        "suffix": [*NOT_TEXT, "the end"],
    },
    CHAT: GENERATION
    | {
        "messages": BAD_MESSAGES,
        "max_tokens": MAX_TOKENS,
        "max_completion_tokens": MAX_TOKENS,
        "logprobs": NOT_BOOL,
        "top_logprobs": [*NOT_WHOLE, 2],
        "tools": BAD_TOOLS,
        "tool_choice": [
            *("must", "", 5, True, [], {}, "required", NAN, DEEP),
            {"type": "function"},
            {"type": "function", "function": {}},
            {"type": "function", "function": {"name": "f"}},
            {"type": "function", "function": {"name": Raw('"\\ud800"')}},
        ],
        "prediction": [
            *NOT_OBJECT,
            {},
            {"type": "text", "content": "x"},
            {"type": "content"},
            {"type": "content", "content": 5},
            {"type": "content", "content": None},
            {"type": "content", "content": Raw('"\\ud800"')},
        ],
        "chat_template_kwargs": [
            *NOT_OBJECT,
            *({name: 1} for name in ("messages", "tools", "self")),
        ],
        "modalities": [*NOT_LIST, ["audio"], [None]],
    },
    RESPONSE: {
        "input": [
            *(
                None,
                5,
                True,
                {},
                [],
                [None],
                [5],
                ["hi"],
                [[]],
                "hi " * 5000,
                NAN,
                DEEP,
                Raw('"\\ud800"'),
            ),
            [{"type": "image"}],
            [{"type": "item_reference", "id": "x"}],
            [{"role": "tool", "content": "hi"}],
            [{"role": "user", "content": "hi", "more": 1}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            [{"role": "user", "content": 5}],
            [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
            [{"type": "function_call", "call_id": "a", "arguments": "{}"}],
            [{"type": "function_call_output", "output": "rain"}],
        ],
        "instructions": [*NOT_TEXT, [], Raw('"\\ud800"')],
        "max_output_tokens": MAX_TOKENS,
        **{
            name: GENERATION[name]
            for name in ("model", "temperature", "top_p", "stream", "seed", "speculative")
        },
        **{name: GENERATION[name] for name in ("metadata", "store", "user", "parallel_tool_calls")},
        "text": [
            *NOT_OBJECT,
            {"format": 5},
            {"format": {}},
            {"format": {"type": "regex"}},
            {"format": {"type": "json_schema", "name": "x", "schema": 5}},
            *(
                {"format": {"type": "json_schema", "name": "x", "schema": schema}}
                for schema in BAD_SCHEMAS
            ),
        ],
        "tools": [
            *NOT_LIST,
            [None],
            [{}],
            [TOOL],
            [{"type": "web_search"}],
            [{"type": "function", "name": ""}],
        ],
        "tool_choice": [
            "must",
            5,
            [],
            {},
            "required",
            {"type": "function", "name": "f"},
            {"type": "web_search"},
        ],
        "previous_response_id": [*NOT_TEXT, "resp_1"],
        "background": [*NOT_BOOL, True],
        "truncation": ["x", 5, True, []],
        "reasoning": NOT_OBJECT,
        "include": [*NOT_LIST, [5]],
    },
    "/v1/embeddings": {
        "input": [
            *(
                None,
                5,
                1.5,
                True,
                {},
                "",
                [],
                [""],
                [[]],
                [[], [5]],
                [None],
                [5, "a"],
                ["a", 5],
                [1.5],
                NAN,
                DEEP,
            ),
            *(tokens for tokens in NO_TOKENS if tokens not in (["1"], [[1]])),
            *(
                "x = 1\n" * 3000,
                [5] * 5000,
                ["a", "x = 1\n" * 3000],
                ["a"] * 2049,
                Raw('"\\ud800"'),
            ),
        ],
        "model": GENERATION["model"],
        "encoding_format": [*NOT_TEXT, [], "binary"],
        "dimensions": [*NOT_WHOLE, 0, -1, 8, LONG],
        "user": [*NOT_TEXT, []],
    },
    "/tokenize": {
        "prompt": [*NOT_TEXT, [], None, Raw('"\\ud800"')],
        "messages": [*NOT_LIST, [5], [{}], HI],
        "model": ["gpt-5", 5],
        "add_special_tokens": NOT_BOOL,
    },
    "/detokenize": {"tokens": [*NOT_LIST, *NO_TOKENS, None, DEEP], "model": ["gpt-5", 5]},
}


def write(value: Any) -> str:
    """JSON, with raw pieces as they are."""
    pieces: list[str] = []

    def marked(raw: Any) -> str:
        pieces.append(raw.text)
        return f"\0{len(pieces) - 1}\0"

    def swap(item: Any) -> Any:
        if isinstance(item, Raw):
            return marked(item)
        if isinstance(item, dict):
            return {key: swap(v) for key, v in item.items()}
        return [swap(v) for v in item] if isinstance(item, list) else item

    text = json.dumps(swap(value))
    for i, piece in enumerate(pieces):
        text = text.replace(f'"\\u0000{i}\\u0000"', piece)
    return text


@dataclass
class Case:
    path: str
    content: bytes
    headers: dict[str, str]
    label: str
    field: str | None = None  # the one that is wrong


def by_field() -> Iterator[Case]:
    """Each field of each endpoint with each value it cannot have."""
    for path, fields in BAD.items():
        for name, values in fields.items():
            for value in values:
                text = write(GOOD[path] | {name: value})
                yield Case(path, text.encode(), JSON, text[:150], name)


def by_shape() -> Iterator[Case]:
    """Bodies that are no JSON, no object, no UTF-8, or not called JSON."""
    for path, good in GOOD.items():
        text = json.dumps(good)
        bodies: list[bytes] = [
            b"",
            b" ",
            b"null",
            b"[]",
            b"5",
            b'"x"',
            b"true",
            b"{}",
            b"[" * 100_000,
            b"{" * 100_000,
        ]
        bodies += [
            text.encode("utf-16")[:-1],
            b"\xef\xbb\xbf{",
            b"\xff\xfe",
            text.encode() + b"}",
            b"\x00" * 100,
        ]
        bodies += [
            text.replace('"', "'").encode(),
            (text[:-1] + ",}").encode(),
            write(DEEP).encode(),
        ]
        bodies += [
            (text[:-1] + more + "}").encode()
            for more in (', "\\ud800": 1', ', "a\\nb": 1', ', "": 1')
        ]
        bodies += [
            b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
            json.dumps(dict.fromkeys(good)).encode(),
        ]
        for body in bodies:
            yield Case(path, body, JSON, repr(body[:60]))
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
        ):
            yield Case(path, text.encode(), {"content-type": kind}, f"content-type {kind!r}")


def by_chance(seed: int = 20) -> Iterator[Case]:
    """Good bodies cut short, made invalid UTF-8, or with a field nobody knows at some depth."""
    rng = random.Random(seed)
    rich: dict[str, dict[str, Any]] = {
        COMPLETION: GOOD[COMPLETION]
        | {"speculative": {"depth": 2}, "stream_options": {"include_usage": True}},
        CHAT: {
            "messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "prediction": {"type": "content", "content": "x"},
            "max_tokens": 2,
        },
        RESPONSE: {
            "input": [{"role": "user", "content": "x"}],
            "text": {"format": {"type": "text"}},
        },
    }
    junk: list[Any] = [
        None,
        0,
        -1,
        "",
        "x" * 1000,
        [],
        {},
        [[[]]],
        True,
        1e308,
        NAN,
        Raw('"\\udead"'),
        {"a": {"b": 1}},
    ]
    for _ in range(130):
        path = rng.choice(list(rich))
        text = json.dumps(rich[path])
        cut = rng.randrange(1, len(text))
        yield Case(path, text[:cut].encode(), JSON, f"cut: {text[:cut][-40:]}")
        data = bytearray(text.encode())
        data.insert(rng.randrange(1, len(data)), rng.choice((0xFF, 0xC0, 0x80, 0x00)))
        yield Case(path, bytes(data), JSON, f"bytes: {bytes(data)[:60]!r}")
        body = json.loads(text)
        objects = [body]
        for item in objects:  # grows while it is walked: every object below
            for value in item.values():
                objects += [
                    v
                    for v in (value if isinstance(value, list) else [value])
                    if isinstance(v, dict)
                ]
        name = rng.choice(
            ("x", "Prompt", "max-tokens", "__class__", "temperature ", "\N{ROCKET}", "a.b", "0")
        )
        rng.choice(objects)[name] = rng.choice(junk)
        yield Case(path, write(body).encode(), JSON, write(body)[:150])


@dataclass
class Told:
    case: Case
    status: int
    seconds: float
    response: httpx2.Response | None

    def __str__(self) -> str:
        text = self.response.text[:160] if self.response else "no answer"
        return (
            f"{self.case.path} {self.case.label} -> {self.status} in {self.seconds:.2f} s: {text}"
        )


@pytest.fixture(scope="module")
def failures_before(server: Serving) -> int:
    """How often the engine had started over when these tests began: others make it do so."""
    return server.service.failures


@pytest.fixture(scope="module")
def told(server: Serving, failures_before: int) -> list[Told]:
    """What the server says to each of them."""
    told = []
    server.complete()
    server.rest()
    server.logged.clear()
    for case in [*by_field(), *by_shape(), *by_chance()]:
        start = time.perf_counter()
        try:
            response = server.http.post(case.path, content=case.content, headers=case.headers)
            told.append(Told(case, response.status_code, time.perf_counter() - start, response))
        except httpx2.TransportError:
            told.append(Told(case, 0, time.perf_counter() - start, None))
    return told


def none(wrong: list[Told]) -> None:
    assert not wrong, f"{len(wrong)} of them, such as\n" + "\n".join(str(t) for t in wrong[:50])


def test_there_are_a_thousand(told: list[Told]) -> None:
    assert len(told) >= 1000


def test_each_is_refused(told: list[Told]) -> None:
    none([t for t in told if not 400 <= t.status < 500 or t.status == 429])


def test_each_is_answered_in_openais_shape(told: list[Told]) -> None:
    def shaped(response: httpx2.Response) -> bool:
        value = response.json()
        error = value.get("error")
        if set(value) != {"error"} or set(error) != {"message", "type", "param", "code"}:
            return False
        texts = (error["message"], error["type"])
        return all(isinstance(t, str) and t for t in texts) and all(
            error[name] is None or isinstance(error[name], str) for name in ("param", "code")
        )

    none([t for t in told if t.response is not None and t.status != 200 and not shaped(t.response)])


def test_each_is_told_in_one_short_line(told: list[Told]) -> None:
    def message(t: Told) -> str:
        return (
            t.response.json()["error"]["message"]
            if t.response is not None and t.status != 200
            else "fine"
        )

    none([t for t in told if len(message(t).splitlines()) != 1 or len(message(t)) > 500])


def test_each_has_a_request_id(told: list[Told]) -> None:
    none([t for t in told if t.response is not None and not t.response.headers.get("x-request-id")])


def test_each_is_refused_at_once(told: list[Told]) -> None:
    slow = [t for t in told if t.seconds > 1]
    print("\nover a second:", *slow, sep="\n")
    none([t for t in slow if t.seconds > 3])


def test_the_error_names_the_field(told: list[Told]) -> None:
    """Where the type of one field is wrong, `param` is its path, without the names of our own
    types."""
    ours = {"str", "int", "bool", "float", "NamedTool", "Speculative", "FlatToolChoice"}

    def wrong(t: Told) -> bool:
        param = (
            t.response.json()["error"]["param"]
            if t.response is not None and t.status == 400
            else None
        )
        if (
            param is None or t.case.field is None or t.case.path == "/tokenize"
        ):  # prompt or messages, one of them
            return False
        parts = param.split(".")
        return parts[0] != t.case.field or any(p in ours or "[" in p for p in parts)

    none([t for t in told if wrong(t)])


def test_nothing_was_logged_as_a_failure(told: list[Told], server: Serving) -> None:
    seen = {
        f"{r.name}: {r.getMessage().strip()} {r.exc_info and r.exc_info[1]!r}"[:200]
        for r in server.logged
    }
    assert not server.logged, f"{len(server.logged)} records, such as\n" + "\n".join(
        sorted(seen)[:20]
    )


def test_afterwards_all_is_well(told: list[Told], server: Serving, failures_before: int) -> None:
    server.rest()
    assert server.complete(seed=1)["choices"][0]["finish_reason"] == "length"
    server.rest()
    assert server.service.failures == failures_before


# ------------------------------------------------------------ single ones


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("value", [Raw('"\\ud800"'), NAN, INF, HUGE], ids=lambda v: v.text)
@pytest.mark.parametrize(
    "extra",
    [
        lambda v: {"metadata": {"a": v}},
        lambda v: {
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "parameters": {"type": "object", "description": v},
                }
            ]
        },
        lambda v: {"text": {"format": {"type": "text", "schema": {"a": v}}}},
    ],
    ids=["metadata", "tools", "format"],
)
def test_what_a_response_repeats_can_be_written_as_json(
    server: Serving, extra: Any, value: Raw
) -> None:
    """JSON has neither half a character nor infinity: refused before the work, or answered, but no
    failure after it."""
    for stream in (False, True):
        body = write(GOOD[RESPONSE] | {"stream": stream} | extra(value))
        response = server.http.post(RESPONSE, content=body, headers=JSON)
        assert response.status_code in (200, 400), response.text
        assert "server_error" not in response.text
    server.rest()


def test_template_options_cannot_break_or_replace_the_template(server: Serving) -> None:
    for name in (
        "messages",
        "tools",
        "self",
        "conversation",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
    ):
        response = server.http.post(CHAT, json=GOOD[CHAT] | {"chat_template_kwargs": {name: "x"}})
        assert response.status_code < 500, f"{name}: {response.text}"


def test_more_at_once_than_this_server_ever_takes_is_no_reason_to_come_back(
    server: Serving,
) -> None:
    """429 means: try again. What can never be taken is a 400."""
    for more in ({"n": 1000}, {"prompt": ["a"] * 500}, {"prompt": ["a"] * 20, "n": 20}):
        assert error_of(server.http.post(COMPLETION, json=GOOD[COMPLETION] | more), 400)["message"]


def test_a_body_over_the_limit_is_413(server: Serving) -> None:
    limit = 8 << 20
    body = b'{"prompt": "' + b"a" * limit + b'"}'
    assert (
        "max-body"
        in error_of(server.http.post(COMPLETION, content=body, headers=JSON), 413)["message"]
    )

    def pieces() -> Iterator[bytes]:  # without a content-length
        for at in range(0, len(body), 1 << 20):
            yield body[at : at + (1 << 20)]

    assert (
        "max-body"
        in error_of(server.http.post(COMPLETION, content=pieces(), headers=JSON), 413)["message"]
    )
    server.complete()


def test_a_wrong_path_or_method_is_told_in_openais_shape(server: Serving) -> None:
    assert error_of(server.http.post("/v1/nothing", json={}), 404)["type"] == "not_found_error"
    assert error_of(server.http.get(CHAT), 405)["message"]
    assert error_of(server.http.delete("/v1/models"), 405)["message"]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "regex": "(ab)+c{900}(d|e)*"},
        {"type": "grammar", "grammar": 'start: "a" start | "b" start'},
        {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "array", "minItems": 100000, "items": {}}},
        },
        {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "$ref": "#/$defs/a",
                    "$defs": {
                        "a": {
                            "type": "object",
                            "properties": {"a": {"$ref": "#/$defs/a"}},
                            "required": ["a"],
                        }
                    },
                }
            },
        },
    ],
    ids=["regex", "lark", "array", "recursive"],
)
def test_a_grammar_without_an_end_ends_by_max_tokens(server: Serving, form: dict[str, Any]) -> None:
    start = time.perf_counter()
    response = server.http.post(
        COMPLETION, json={"prompt": "x", "max_tokens": 40, "response_format": form}
    )
    assert time.perf_counter() - start < 5
    if response.status_code == 200:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["usage"]["completion_tokens"] == 40
    else:
        error_of(response, 400)
    server.rest()


def test_large_schemas_and_long_stops_do_not_hold_up_others(server: Serving) -> None:
    many = {f"key{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(300)}
    bombs = [
        {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": many}}},
        {
            "type": "json_schema",
            "json_schema": {"schema": {"anyOf": [{"const": "x" * i} for i in range(300)]}},
        },
        {"type": "regex", "regex": "(a|aa)*" * 40 + "b"},
        {"type": "regex", "regex": "((((a{0,1000}b){0,1000}c){0,1000}d){0,1000}e){0,1000}"},
        {"type": "regex", "regex": "(.*a.{500}){30}"},
        {"type": "regex", "regex": "[a-z]{0,200}[a-y]{0,200}[a-x]{0,200}z"},
    ]
    for form in bombs:
        start = time.perf_counter()
        response = server.http.post(COMPLETION, json=GOOD[COMPLETION] | {"response_format": form})
        assert response.status_code in (200, 400), response.text
        assert time.perf_counter() - start < 3
    start = time.perf_counter()
    server.complete(stop=["a" * 256, "b" * 256, "ab" * 128], max_tokens=100)
    stops = ["a" * 100_000, "b" * 100_000, "ab" * 50_000]
    assert (
        "256"
        in error_of(server.http.post(COMPLETION, json=GOOD[COMPLETION] | {"stop": stops}), 400)[
            "message"
        ]
    )
    assert time.perf_counter() - start < 3
    server.rest()
