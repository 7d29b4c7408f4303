"""Hostile requests: each is refused in one line and does not delay other requests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from pydantic import ValidationError

from forerun.server import limits
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService
from forerun.server.limits import DIGITS, VALUES
from forerun.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from tests.server.serving import BODIES, HI, TIMEOUT, Client, Serving, sse

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
JSON_TYPE = "application/json"
JSON = {"content-type": JSON_TYPE}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MODELS: dict[str, type[Body]] = {
    COMPLETION: CompletionRequest,
    CHAT: ChatRequest,
    RESPONSE: ResponsesRequest,
    EMBEDDINGS: EmbeddingsRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
GOOD = {path: BODIES[path] for path in MODELS}


NAN, SURROGATE = float("nan"), "\ud800"
WRONG_TYPES = ["1", "", 1, 1.5, True, [], [1], [None], ["a"], {}, {"a": 1}]
LONG = 10**400


def refused(
    api: Client, path: str, content: bytes, field: str | None = None, kind: str = JSON_TYPE
) -> dict[str, Any]:
    """Send a request that must be refused, check the form of the error and return it."""
    response = api.http.post(path, content=content, headers={"content-type": kind})
    status = response.status_code
    assert 400 <= status < 500 and status != 429, (content[:150], response.text[:300])
    assert response.headers["x-request-id"] and set(response.json()) == {"error"}
    assert "connection" not in response.headers, "the connection stays open"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"]
    assert len(error["message"].splitlines()) == 1 and len(error["message"]) <= 500
    if field and error["param"] and status == 400 and path != TOKENIZE:
        first, *rest = error["param"].split(".")
        assert first == field and not {"str", "int", "bool", "float"} & set(rest), error
        assert not any("[" in part or not part.islower() for part in rest if not part.isdigit())
    return error


@pytest.fixture(scope="module", autouse=True)
def nothing_fails(serve: Serving) -> Iterator[None]:
    """Check that no request makes the engine fail or is logged as an error of the server."""
    failures = serve.service.failures
    serve.logged.clear()
    yield
    serve.wait_until_idle()
    assert serve.complete(seed=1)["choices"][0]["finish_reason"] == "length"
    assert serve.service.failures == failures
    assert not serve.logged, [record.getMessage() for record in serve.logged[:5]]


# Generated requests


GET = ["/v1/models", "/v1/models/{name}", "/health", "/ready", "/version", "/server_info"]
GET += ["/metrics", "/api/tags", "/api/ps", "/api/version"]
EXAMPLES = int(os.environ.get("FORERUN_FUZZ", "12"))  # of each operation, valid and invalid
LIMITS = {COMPLETION: "max_tokens", CHAT: "max_completion_tokens", RESPONSE: "max_output_tokens"}


@pytest.fixture(scope="module")
def schema(api: Client) -> Any:
    import schemathesis  # importing it takes seconds

    api.complete()  # a gateway has no metrics before the first response
    return schemathesis.openapi.from_url(f"{api.url}/openapi.json")


def test_every_operation_of_the_schema_is_tested(schema: Any) -> None:
    found = {(o.ok().method.upper(), o.ok().path) for o in schema.get_all_operations()}
    assert found == {("POST", path) for path in BODIES} | {("GET", path) for path in GET}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("method", "path", "valid"),
    [*itertools.product(["POST"], BODIES, [True, False]), *(("GET", path, True) for path in GET)],
)
def test_no_generated_request_makes_the_server_fail(
    schema: Any, api: Client, method: str, path: str, valid: bool
) -> None:
    from schemathesis.generation import GenerationMode

    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
    usual = settings(
        max_examples=EXAMPLES if method == "POST" else 2,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(7)
    @usual
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        body = case.body
        if valid and isinstance(body, dict):  # answers are kept short, and the model exists
            if path.startswith("/api/"):
                body["model"] = "tiny"
            else:
                body.pop("model", None)
            if path in ("/api/chat", "/api/generate"):
                body["options"] = {"num_predict": 8}
            if path in LIMITS and not 0 < (body.get(LIMITS[path]) or 99) <= 8:
                body |= dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"))
                body[LIMITS[path]] = 8
        response = case.call()
        assert response.status_code < 500, f"{case.as_curl_command()} -> {response.text[:300]}"
        if response.status_code >= 400:
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert isinstance(error, str) and error
            else:
                assert set(error) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]

    run()


# Single values and bodies


@pytest.mark.parametrize("path", MODELS)
def test_values_of_a_wrong_type_are_refused(serve: Serving, path: str) -> None:
    """The models are strict, and the error names the field without pydantic's alternatives."""
    for name, value in itertools.product(MODELS[path].model_fields, WRONG_TYPES):
        body = GOOD[path] | {name: value}
        try:
            MODELS[path].model_validate(body)
        except (ValidationError, ApiError):
            refused(serve, path, json.dumps(body).encode(), name)


SCHEMAS: list[Any] = [
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
    {"const": SURROGATE},
    {"description": "x" * (1 << 17)},
]
REGEXES = ["", "(", "a{1000000000}", "(" * 5000 + ")" * 5000, "a" * (1 << 17), SURROGATE]
GRAMMARS = ["start", "start: nowhere", "start: start", ""]
FORMATS: list[Any] = [
    {"type": "xml"},
    {"type": "json_schema"},
    {"type": "regex"},
    {"type": "json_schema", "json_schema": {"schema": {}, "more": 1}},
    *({"type": "choice", "choice": choice} for choice in ([], [""], [1], "ab")),
    *({"type": "regex", "regex": regex} for regex in REGEXES),
    *({"type": "grammar", "grammar": grammar} for grammar in GRAMMARS),
    *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS),
]
TOKENS: list[Any] = [[-1], [4096], [1 << 70], [1.5], [True], [None]]
PROMPTS: list[Any] = [[""], [[]], [[], [5]], [5, "a"], ["a", 5], "x = 1\n" * 3000, [5] * 5000]
LENGTHS: list[Any] = [0, -3, -1.5, 1 << 33, LONG]
NAMES = ["nothing", "", "model", "model:/etc", "Suffix", SURROGATE]
RANGES: dict[str, list[Any]] = {  # fields of every endpoint that generates
    "model": ["gpt-5", "", "tiny ", "a\nb"],
    "temperature": [-1, -0.001, 101, 1e308, LONG],
    "top_p": [0, -0.1, 1.1],
    "top_k": [-2, 1 << 40, LONG],
    "min_p": [-0.1, 1.1],
    "seed": [1 << 64, -(1 << 63) - 1, LONG],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1e9],
    "min_tokens": [-1, 3, LONG],
    "stop": [[""], ["a", ""], ["a"] * 17, "a" * 257],
    "response_format": FORMATS,
    "speculative": [
        {"width": 2},
        *({"draft": draft} for draft in [*NAMES, 5, True]),
        *({"depth": depth} for depth in ("deep", "4", -1, 65, 1.5, LONG)),
        *({"rule": rule} for rule in ("nothing", "", 5, "MATCH", SURROGATE)),
    ],
}
CHOICES: dict[str, list[Any]] = RANGES | {  # fields of completions and chats
    "n": [0, -1, 1025, 1 << 80],
    "logit_bias": [{key: 1} for key in ("x", "", "1.5", "-1", "4096", "9" * 50, "9" * 5000)],
    "stream_options": [{"include_usage": 1}, {"usage": True}],
    "stop_token_ids": TOKENS,
    "documents": [["a"] * 65],
    "max_tokens": LENGTHS,
}
CHOICES["logit_bias"] += [{"1": bias} for bias in (101, -101, "a", None, NAN, True)]


def calling(name: str, arguments: Any) -> list[Any]:
    function = {"name": name, "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]


OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    COMPLETION: CHOICES
    | {
        "prompt": [*PROMPTS, *TOKENS, *([tokens] for tokens in TOKENS), ["a", "x = 1\n" * 3000]],
        "logprobs": [-1, 21, 1 << 70],
        "best_of": [0, 2, -1],
        "suffix": ["the end"],
    },
    CHAT: CHOICES
    | {
        "messages": [
            *([{"role": role, "content": "hi"}] for role in ("robot", "", None, "function")),
            *([{"role": "user", "content": content}] for content in (5, [5], [None], [{}], ["a"])),
            [{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}],
            [{"role": "user", "content": "hi", "more": 1}],
            [{"content": "hi"}],
            [{"role": "user", "content": "hi " * 5000}],
            [{"role": "assistant", "tool_calls": [{}]}],
            calling("f", {}),
            calling("f", "{"),
            calling("f\n\ng", "{"),
            calling("f", "[" * 50_000),
        ],
        "max_completion_tokens": LENGTHS,
        "top_logprobs": [2],
        "tools": [
            [TOOL] * 129,
            *([TOOL | {"type": kind}] for kind in ("x", None)),
            *([TOOL | {"function": {"name": name}}] for name in ("", "a b", "x" * 65)),
            *([TOOL | {"function": {"name": "f", "parameters": p}}] for p in (5, [], True)),
        ],
        "tool_choice": ["must", "required", TOOL | {"function": {"name": SURROGATE}}],
        "prediction": [{"type": "text", "content": "x"}, {"type": "content", "content": SURROGATE}],
        "chat_template_kwargs": [{name: 1} for name in ("messages", "tools", "self", "tokenize")],
        "modalities": [["audio"]],
    },
    RESPONSE: RANGES
    | {
        "input": [
            [],
            "hi " * 5000,
            [{"type": "image"}],
            [{"role": "tool", "content": "hi"}],
            [{"role": "user", "content": "hi", "more": 1}],
            [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
            [{"type": "function_call_output", "output": "rain"}],
        ],
        "max_output_tokens": LENGTHS,
        "text": [
            {"format": {"type": "json_schema", "name": "x", "schema": schema}} for schema in SCHEMAS
        ],
        "tools": [[TOOL], [{"type": "web_search"}], [{"type": "function", "name": ""}]],
        "tool_choice": ["must", "required", {"type": "function", "name": "f"}],
        "previous_response_id": ["resp_1"],
        "background": [True],
    },
    EMBEDDINGS: {
        "input": [*PROMPTS, *TOKENS, "", ["a"] * 2049],
        "encoding_format": ["binary"],
        "dimensions": [0, -1, 8, LONG],
    },
    TOKENIZE: {"messages": [HI], "model": ["gpt-5"]},
    DETOKENIZE: {"tokens": TOKENS, "model": ["gpt-5"]},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("path", "name"), [(p, n) for p, f in OUT_OF_RANGE.items() for n in f])
def test_values_out_of_range_are_refused(serve: Serving, path: str, name: str) -> None:
    for value in OUT_OF_RANGE[path][name]:
        refused(serve, path, json.dumps(GOOD[path] | {name: value}).encode(), name)


@pytest.mark.parametrize("path", GOOD)
def test_malformed_bodies_are_refused(serve: Serving, path: str) -> None:
    text = json.dumps(GOOD[path])
    for content in (b"", b" ", b"null", b"[]", b"5", b'"x"', b"{}", b"[" * 100_000, b"\0" * 100):
        refused(serve, path, content)
    for more in ("}", ",}", ', "\\ud800": 1}', ', "a\\nb": 1}', ', "": 1}'):
        refused(serve, path, (text[:-1] + more + ("}" if more == "}" else "")).encode())
    for content in (text.encode("utf-16")[:-1], text.encode()[:-1], text.encode() + b"\xff"):
        refused(serve, path, content)
    refused(serve, path, b"\xef\xbb\xbf{")
    refused(serve, path, text.replace('"', "'").encode())
    refused(serve, path, json.dumps(dict.fromkeys(GOOD[path])).encode())
    refused(serve, path, text.encode(), kind="")


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (CompletionRequest, {"prompt": [None] * 10_000}),
        (CompletionRequest, {"prompt": [[None] * 10_000]}),
        (CompletionRequest, {"prompt": ["a"] * 10_000 + [1]}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["a"] * 10_000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): None for i in range(10_000)}}),
        (CompletionRequest, {"prompt": "x"} | {f"field{i}": 0 for i in range(10_000)}),
        (ChatRequest, {"messages": [{}] * 10_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 10_000}]}),
        (ChatRequest, {"messages": HI, "tools": [None] * 128}),
        (ResponsesRequest, {"input": [{"type": 3}] * 10_000}),
        (DetokenizeRequest, {"tokens": [None] * 10_000}),
    ],
)
def test_errors_do_not_grow_with_the_request(model: type[Body], value: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, ApiError)) as error:
        model.model_validate(value)
    assert isinstance(error.value, ApiError) or error.value.error_count() < 10


def test_requests_beyond_every_limit_are_refused_before_any_work(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 429 asks a client to try again, so what can never be accepted gets status 400."""
    monkeypatch.setattr(serve.service.llm.tokenizer, "encode", None)
    many_prompts = {"prompt": ["a"] * 500, "documents": ["def f(x):\n    return x\n" * 500]}
    for more in ({"n": 1000}, many_prompts, {"prompt": ["a"] * 20, "n": 20}):
        refused(serve, COMPLETION, json.dumps(GOOD[COMPLETION] | more).encode())


def test_unknown_paths_and_methods_have_openais_errors(serve: Serving) -> None:
    for method, path, status in (
        ("POST", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ):
        response = serve.http.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]


RECURSIVE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "regex": "(ab)+c{900}(d|e)*"},
        {"type": "grammar", "grammar": 'start: "a" start | "b" start'},
        {"type": "json_schema", "schema": {"type": "array", "minItems": 100000, "items": {}}},
        {"type": "json_schema", "schema": {"$ref": "#/$defs/a", "$defs": {"a": RECURSIVE}}},
    ],
    ids=["regex", "lark", "array", "recursive"],
)
def test_a_grammar_without_an_end_ends_by_max_tokens(serve: Serving, form: dict[str, Any]) -> None:
    body = {"prompt": "x", "max_tokens": 40, "response_format": form}
    response = serve.http.post(COMPLETION, json=body)
    assert response.status_code in (200, 400)
    if response.status_code == 200:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["usage"]["completion_tokens"] == 40


# Requests that take much time to process


MEGABYTE = 1 << 20
MAX_DELAY = 0.5  # seconds; about 0.05 on an idle machine
TRIES = 3
USER = '{"role": "user", "content": ""}'
LARGE_TOOL = {"type": "object", "description": "x" * 50_000}
LARGE_CALL = calling("f", '{"a": [' + "[], " * 30_000 + "[]]}")[0]["tool_calls"]
LONG_TEXT = b"a " * (4 * MEGABYTE - 100)
KEYS = {f"key{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(300)}


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x = ", "max_tokens": 2} | fields).encode()


def regex(pattern: str) -> bytes:
    return body(response_format={"type": "regex", "regex": pattern})


def many(item: str, count: int, before: str, after: str = "]}") -> bytes:
    """Return a body with a long list, without making the list."""
    return (before + ",".join([item] * count) + after).encode()


def dictionary(count: int) -> dict[str, int]:
    return {str(i): 1 for i in range(count)}


def long_text(before: str, after: str = '"}') -> bytes:
    return before.encode() + LONG_TEXT + after.encode()


MESSAGES = '{"model": "tiny", "messages": ['
SCORED = {"prompt": "x = 1\n" * 300, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 0}
SLOW: dict[str, tuple[str, Callable[[], bytes]]] = {  # made when sent, since some are large
    "long prompt": (COMPLETION, lambda: body(prompt="word " * (8 * MEGABYTE // 5 - 100))),
    "long text to tokenize": (TOKENIZE, lambda: long_text('{"prompt": "')),
    "long message": (CHAT, lambda: long_text('{"messages": [{"role":"user","content":"', '"}]}')),
    "long input": (RESPONSE, lambda: long_text('{"input": "')),
    "long raw": ("/api/generate", lambda: long_text('{"model":"tiny","raw":true,"prompt":"')),
    "long text to embed": (EMBEDDINGS, lambda: long_text('{"input": "')),
    "long text to truncate": ("/api/embed", lambda: long_text('{"model":"tiny","input":"')),
    "longest prompt": (COMPLETION, lambda: body(prompt="wörd " * 6500)),
    "texts to embed": (EMBEDDINGS, lambda: json.dumps({"input": ["a b c " * 600] * 2048}).encode()),
    "escapes": (COMPLETION, lambda: many("\\u0041" * 1000, 1390, '{"prompt": "', '"}')),
    "quotation marks": (COMPLETION, lambda: many('\\"' * 1000, 4100, '{"prompt": "', '"}')),
    "long draft": (COMPLETION, lambda: body(speculative={"draft": "suffix" * MEGABYTE})),
    "long model": (COMPLETION, lambda: body(model="tiny" * MEGABYTE)),
    "long field": (COMPLETION, lambda: body(**{"temperature" * (MEGABYTE // 2): 1})),
    "messages": (CHAT, lambda: many(USER, 200_000, MESSAGES)),
    "messages to tokenize": (TOKENIZE, lambda: many(USER, 200_000, MESSAGES)),
    "messages for Ollama": ("/api/chat", lambda: many(USER, 200_000, MESSAGES)),
    "items": (RESPONSE, lambda: many(USER, 200_000, '{"input": [')),
    "most messages": (CHAT, lambda: many(USER, 4000, MESSAGES)),
    "parts": (
        CHAT,
        lambda: many('{"type":"text","text":""}', 8000, MESSAGES + USER[:-3] + "[", "]}]}"),
    ),
    "empty lists": (COMPLETION, lambda: many("[]", 2_500_000, '{"prompt": [')),
    "metadata": (COMPLETION, lambda: body(metadata=dictionary(550_000))),
    "biases": (COMPLETION, lambda: body(logit_bias=dictionary(550_000))),
    "most biases": (COMPLETION, lambda: body(logit_bias=dictionary(300), n=16, max_tokens=30)),
    "stop tokens": (COMPLETION, lambda: many("5", 3_900_000, '{"prompt":"x","stop_token_ids":[')),
    "token ids": (COMPLETION, lambda: body(prompt=[[5] * 2000] * 64)),
    "tokens to decode": (DETOKENIZE, lambda: many("5", VALUES - 10, '{"tokens": [')),
    "unknown fields": (COMPLETION, lambda: body(**{f"x{i}": 1 for i in range(4000)})),
    "long numbers": (COMPLETION, lambda: many("7" * 4299, 1800, '{"prompt": [')),
    "depth": (COMPLETION, lambda: b'{"prompt": ' + b"[" * 3 * MEGABYTE + b"]" * 3 * MEGABYTE),
    "long stops": (COMPLETION, lambda: body(stop=["a" * 500_000, "ab" * 250_000])),
    "longest stops": (
        COMPLETION,
        lambda: body(stop=["a" * i + "b" for i in range(240, 256)], max_tokens=500),
    ),
    "documents": (COMPLETION, lambda: body(prompt=["x = "] * 64, documents=["a1 = 1\n" * 300] * 3)),
    "log-probabilities": (COMPLETION, lambda: body(n=64, logprobs=20, max_tokens=60)),
    "echoes": (COMPLETION, lambda: body(prompt="x = 1\n" * 330, n=64, echo=True, max_tokens=1)),
    "scored echoes": (COMPLETION, lambda: body(**SCORED)),
    "streamed echoes": (COMPLETION, lambda: body(**SCORED, stream=True)),
    "penalties": (COMPLETION, lambda: body(prompt="x = 1\n" * 300, n=16, repetition_penalty=1.1)),
    "tools": (
        CHAT,
        lambda: json.dumps(
            {
                "messages": HI,
                "tools": [TOOL | {"function": {"name": "f", "parameters": LARGE_TOOL}}],
            }
        ).encode(),
    ),
    "arguments": (
        CHAT,
        lambda: json.dumps(
            {"messages": [{"role": "assistant", "tool_calls": LARGE_CALL * 20}]}
        ).encode(),
    ),
    "schema": (COMPLETION, lambda: body(guided_json={"type": "object", "properties": KEYS})),
    "constants": (
        COMPLETION,
        lambda: body(guided_json={"anyOf": [{"const": "x" * i} for i in range(300)]}),
    ),
    "ambiguous regex": (COMPLETION, lambda: regex("(a|aa)*" * 40 + "b")),
    "nested regex": (COMPLETION, lambda: regex("((((a{0,1000}b){0,1000}c){0,1000}d){0,1000}e)")),
    "states": (COMPLETION, lambda: regex("(.*a.{500}){30}")),
}


class Watch:
    """Measures the longest time that the event loop and the engine take to respond."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.loop_delay = 0.0
        self.engine_delay = 0.0
        self.ended = threading.Event()
        self._asked: float | None = None

    async def beat(self, every: float = 0.005) -> None:
        while not self.ended.is_set():
            before = time.perf_counter()
            if self._asked is None:
                self._asked = before
                self.service._commands.put(self._answer)
            await asyncio.sleep(every)
            self.loop_delay = max(self.loop_delay, time.perf_counter() - before - every)

    def _answer(self) -> None:
        assert self._asked is not None
        self.engine_delay = max(self.engine_delay, time.perf_counter() - self._asked)
        self._asked = None


@contextmanager
def watched(service: EngineService) -> Iterator[Watch]:
    watch = Watch(service)
    assert service._loop is not None
    beating = asyncio.run_coroutine_threadsafe(watch.beat(), service._loop)
    try:
        yield watch
    finally:
        watch.ended.set()
        beating.result(TIMEOUT)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SLOW)
def test_slow_requests_block_neither_event_loop_nor_engine(name: str, serve: Serving) -> None:
    """A request that blocks does so on every try; other processes delay single tries."""
    path, make = SLOW[name]
    content = make()
    for _ in range(TRIES):
        with watched(serve.service) as watch:
            response = serve.http.post(path, content=content, headers=JSON)
        serve.wait_until_idle()
        assert response.status_code in (200, 400, 404), response.text[:300]
        assert response.status_code == 200 or len(response.text) < 700
        delay = max(watch.loop_delay, watch.engine_delay)
        if delay < MAX_DELAY:
            break
    assert delay < MAX_DELAY


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
def test_concurrent_slow_requests_do_not_delay_a_stream(serve: Serving, step: int) -> None:
    """Six clients send slow requests, every `step`-th of SLOW, while another reads a stream."""

    def attack(items: list[tuple[str, bytes]]) -> None:
        with httpx2.Client(base_url=serve.url, timeout=TIMEOUT) as http:
            for path, content in items:
                http.post(path, content=content, headers=JSON)

    items = [(path, make()) for path, make in list(SLOW.values())[::step]]
    threads = [threading.Thread(target=attack, args=(items[i::6],)) for i in range(6)]
    streamed = body(max_tokens=1500, stream=True, ignore_eos=True, speculative=False)
    with (
        watched(serve.service) as watch,
        serve.http.stream("POST", COMPLETION, content=streamed, headers=JSON) as stream,
    ):
        for i, event in enumerate(sse(stream)):
            assert "error" not in event
            if i == 10:
                for thread in threads:
                    thread.start()
        for thread in threads:
            thread.join()
    # the clients share this interpreter
    assert max(watch.loop_delay, watch.engine_delay) < 4 * MAX_DELAY
    serve.wait_until_idle()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (many("1", VALUES + 1, '{"prompt": ['), f"values, this server takes {VALUES}"),
        (body(metadata=dictionary(65)), "metadata"),
        (b'{"prompt": "a", "top_p": 0.' + b"1" * DIGITS + b"}", "digits"),
        (body(stop="a" * 257), "at most 256 characters"),
        (body(stop_token_ids=[5] * 1025), "at most 1024 items"),
        (body(prompt="a" * 40_000), "has 40000 characters, this server takes 32768"),
        (b'{"prompt": "a", "seed": ' + b"1" * 400 + b"}", "64-bit"),
        (body(speculative={"draft": "a" * 5000}), "aaa"),
    ],
)
def test_errors_name_limits_in_one_short_line(serve: Serving, content: bytes, message: str) -> None:
    error = refused(serve, COMPLETION, content)["message"]
    assert message in error and "1" * 100 not in error and "a" * 100 not in error


def test_a_slot_is_reserved_before_any_work(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the server is full, no endpoint tokenizes anything."""
    monkeypatch.setattr(serve.service, "reserved", serve.service.limit)
    monkeypatch.setattr(serve.service.llm.tokenizer, "encode", None)
    monkeypatch.setattr(serve.service.llm.tokenizer, "chat", None)
    for path in BODIES.keys() - {"/api/show"}:
        response = serve.http.post(path, json={"model": "tiny"} | BODIES[path])
        assert response.status_code == 429 and response.headers["retry-after"], path


def test_a_slot_is_released_after_every_refusal(serve: Serving) -> None:
    for more in ({}, {"prompt": "a" * 40_000}, {"stop_token_ids": [-1]}, {"prompt": [[]]}):
        serve.http.post(COMPLETION, json=GOOD[COMPLETION] | more)
        assert serve.service.reserved == 0


def test_a_refused_body_is_freed_at_once(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of an error may refer to the error: megabytes would wait for the cycle collector."""

    class Large(dict[str, Any]):
        """A parsed body."""

    found: list[weakref.ref[Large]] = []

    def parse(_: bytes) -> Large:
        large = Large()
        found.append(weakref.ref(large))
        raise ApiError(400, f"{len(large)} fields are too few")

    monkeypatch.setattr(limits, "parse", parse)
    gc.disable()
    try:
        for _ in range(3):
            assert serve.http.post(COMPLETION, json={"prompt": "x" * 20_000}).status_code == 400
        monkeypatch.undo()
        serve.complete()  # the frames of the last request have ended
        assert len(found) == 3 and not any(reference() for reference in found)
    finally:
        gc.enable()
