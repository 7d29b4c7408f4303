"""Requests as clients of other servers write them: numbers, their fields, formats, reasoning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from forerun.llm import LLM
from forerun.server import errors
from forerun.server.conversation import chat_prompt, fields_without_effect
from forerun.server.fields import TABLE, Alias, NoEffect, Restricted
from forerun.server.ollama import OllamaChat
from forerun.server.ollama import to_chat as ollama_to_chat
from forerun.server.openai import grammar_of
from forerun.server.protocol import (
    FILL_CONTEXT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    StreamOptions,
)
from forerun.server.responses import to_chat
from tests import tiny
from tests.server.serving import Client, serving

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
REQUESTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def add(a, b):", "max_tokens": 12, "seed": 3},
    CHAT: {"messages": HI, "max_tokens": 12, "seed": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 12, "seed": 3},
}
MODELS: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": "x"}),
    (ChatRequest, {"messages": HI}),
    (ResponsesRequest, {"input": "hi"}),
]
ALIASES = ("n_predict", "num_predict", "max_new_tokens")
LENGTHS = (*ALIASES, "max_tokens", "max_completion_tokens", "max_output_tokens")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == RESPONSES:
        return answer["output"][0]["content"][0]["text"]
    (choice,) = answer["choices"]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def text(api: Client, path: str, **fields: Any) -> str:
    return text_of(path, api.answer(path, REQUESTS[path] | fields))


def refusal(api: Client, path: str, **fields: Any) -> dict[str, Any]:
    response = api.http.post(path, json=REQUESTS[path] | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def message_of(model: Any, body: dict[str, Any]) -> str:
    """Return the error message for an invalid request."""
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    return errors.body(RequestValidationError(error.value.errors()))[1]["error"]["message"]


def length_of(request: Any) -> Any:
    values = [getattr(request, name, None) for name in LENGTHS]
    return next((value for value in values if value is not None), None)


# Numbers


@pytest.mark.parametrize(("model", "body"), MODELS)
@pytest.mark.parametrize("value", [256.0, 256])
def test_an_integer_may_be_written_as_a_float(model: Any, body: Any, value: float) -> None:
    names = ("n_predict", "top_k", "seed", "min_tokens")
    request = model.model_validate(body | dict.fromkeys(names, value))
    for read in (length_of(request), request.top_k, request.seed, request.min_tokens):
        assert read == 256 and type(read) is int


def test_other_integers_may_be_written_as_floats() -> None:
    request = CompletionRequest.model_validate(
        {
            "prompt": [[7.0, 8], [9.0]],
            "n": 2.0,
            "logprobs": 3.0,
            "stop_token_ids": [5.0, 6],
            "speculative": {"depth": 4.0},
        }
    )
    assert (request.n, request.logprobs, request.stop_token_ids) == (2, 3, [5, 6])
    assert request.prompt == [[7, 8], [9]]
    assert CompletionRequest.model_validate({"prompt": "x", "top_k": -1.0}).top_k == 0  # all tokens
    assert request.speculative.depth == 4  # type: ignore[union-attr]
    assert DetokenizeRequest.model_validate({"tokens": [5.0]}).tokens == [5]
    assert EmbeddingsRequest.model_validate({"input": [5.0], "dimensions": 32.0}).input == [5]


@pytest.mark.parametrize(("model", "body"), MODELS)
@pytest.mark.parametrize("value", [-1, -2, -1.0])
def test_a_negative_length_fills_the_context(model: Any, body: Any, value: float) -> None:
    for name in [name for name in LENGTHS if name in ALIASES or name in model.model_fields]:
        assert length_of(model.model_validate(body | {name: value})) == FILL_CONTEXT
    assert "-1 for as many tokens" in message_of(model, body | {"n_predict": -3})


def test_numbers_in_ollamas_options_are_read_alike() -> None:
    def read(**options: Any) -> ChatRequest:
        body = {"model": "tiny", "messages": HI, "options": options}
        return ollama_to_chat(OllamaChat.model_validate(body))

    assert read(num_predict=-2.0).max_tokens == read(num_predict=-1).max_tokens == FILL_CONTEXT
    request = read(num_predict=24.0, top_k=40.0, repeat_penalty=1)
    assert (request.max_tokens, request.top_k, request.repetition_penalty) == (24, 40, 1.0)
    for keep_alive in (-1, "5m"):
        body = {"model": "tiny", "keep_alive": keep_alive}
        assert OllamaChat.model_validate(body).keep_alive == keep_alive


@pytest.mark.parametrize(("model", "body"), MODELS)
@pytest.mark.parametrize("name", ["n_predict", "top_k", "seed", "min_tokens"])
@pytest.mark.parametrize("value", ["5", "", True, 2.5, []])
def test_errors_ask_for_an_integer(model: Any, body: Any, name: str, value: Any) -> None:
    message = message_of(model, body | {name: value})
    assert "give a whole number" in message
    assert ("without quotation marks" in message) == isinstance(value, str)


def test_other_numbers_are_strict_too() -> None:
    for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty"):
        for value in ("0.5", True, [], 10**400):
            assert "number" in message_of(ChatRequest, {"messages": HI, name: value})
    for depth in ("4", "deep", -1, 65, 2.5, True):
        message = message_of(CompletionRequest, {"prompt": "x", "speculative": {"depth": depth}})
        assert "whole number" in message and message.startswith("speculative.depth")
    for value in (0, 1, "true"):
        assert "boolean" in message_of(ChatRequest, {"messages": HI, "stream": value})


def test_logprobs_of_completions_may_be_false() -> None:
    """Some clients send the boolean of chats."""
    assert CompletionRequest.model_validate({"prompt": "x", "logprobs": False}).logprobs is None
    assert CompletionRequest.model_validate({"prompt": "x", "logprobs": 0}).logprobs == 0
    assert "such as 5" in message_of(CompletionRequest, {"prompt": "x", "logprobs": True})


@pytest.mark.parametrize(("model", "body"), MODELS)
def test_null_is_absent_in_every_field(model: Any, body: Any) -> None:
    nulls = {name: None for name in model.model_fields if name not in body}
    plain = model.model_validate(body).model_dump()
    assert model.model_validate(body | nulls).model_dump() == plain
    assert StreamOptions.model_validate({"include_usage": None}) == StreamOptions()


@pytest.mark.parametrize("path", REQUESTS)
def test_a_negative_seed_is_random_and_returned(api: Client, path: str) -> None:
    body = REQUESTS[path] | {"seed": -1, "temperature": 1}
    answers = [api.answer(path, body) for _ in range(3)]
    texts = [text_of(path, answer) for answer in answers]
    assert len(set(texts)) > 1
    assert text(api, path, seed=answers[0]["seed"], temperature=1) == texts[0]


def test_keys_of_logit_bias_are_integers(api: Client) -> None:
    body = {"max_tokens": 3, "temperature": 0}
    forced = api.complete(**body, logit_bias={"69": 100})["choices"]
    assert api.complete(**body, logit_bias={"69.0": 100.0})["choices"] == forced
    for name in ("x", "1.5", "", "6_9", " 69", "٦", "1e3"):
        assert "token ids" in refusal(api, COMPLETIONS, logit_bias={name: 1})["message"]


def test_each_prompt_fills_its_own_context(spare: LLM) -> None:
    with serving(spare, served_name="tiny") as s:
        body = {"prompt": ["a b c", "a b c " * 300], "max_tokens": -1}
        answer = s.answer(COMPLETIONS, body | {"temperature": 0, "ignore_eos": True})
        assert answer["usage"]["total_tokens"] == 2 * spare.room
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


# Fields of other servers


@pytest.mark.parametrize("path", REQUESTS)
def test_aliases_have_the_same_effect(api: Client, path: str) -> None:
    penalized = text(api, path, repetition_penalty=0.05)
    assert text(api, path, repeat_penalty=0.05) == penalized != text(api, path)
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    short = text(api, path, **{limit: 5})
    for name in ALIASES:
        assert text(api, path, **{limit: None, name: 5}) == short, name


CONST = {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}
GRAMMAR = 'start: "up" | "down"'


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_json": {"const": 5}}, CONST),
        ({"guided_json": '{"const": 5}'}, CONST),
        ({"json_schema": {"const": 5}}, CONST),
        ({"guided_regex": "[a-f]{6}"}, {"type": "regex", "regex": "[a-f]{6}"}),
        ({"guided_choice": ["yes", "no"]}, {"type": "choice", "choice": ["yes", "no"]}),
        ({"guided_grammar": GRAMMAR}, {"type": "grammar", "grammar": GRAMMAR}),
        ({"structured_outputs": {"regex": "a", "json": None}}, {"type": "regex", "regex": "a"}),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
    ],
    ids=lambda value: next(iter(value)) if "type" not in value else "",
)
def test_guided_output_is_a_response_format(api: Client, path: str, fields: Any, form: Any) -> None:
    assert text(api, path, **fields) == text(api, path, response_format=form)


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True], ids=["full", "streamed"])
def test_ignored_fields_are_named_in_a_header(api: Client, path: str, stream: bool) -> None:
    body = REQUESTS[path] | {"stream": stream}
    extra = {"num_ctx": 4096, "keep_alive": "5m", "mirostat": 0, "ttl": None}
    response = api.http.post(path, json=body | extra)
    assert response.headers["x-forerun-ignored"] == "num_ctx, keep_alive", response.text
    assert "x-forerun-ignored" not in api.http.post(path, json=body).headers
    ignored = {name: 1 for name, rule in TABLE.items() if isinstance(rule, NoEffect)}
    if not stream:
        assert text(api, path, **ignored) == text(api, path)


@pytest.mark.parametrize(("model", "body"), MODELS)
def test_restricted_fields_accept_the_default_behaviour(model: Any, body: Any) -> None:
    plain = model.model_validate(body)
    for name, rule in TABLE.items():
        if isinstance(rule, Restricted) and name not in model.model_fields:
            for value in (*rule.values, None):
                assert model.model_validate(body | {name: value}) == plain, name


@pytest.mark.parametrize(("path", "model"), list(zip(REQUESTS, dict(MODELS), strict=True)))
def test_other_values_of_restricted_fields_are_refused(api: Client, path: str, model: Any) -> None:
    for name, rule in TABLE.items():
        if isinstance(rule, Restricted) and name not in model.model_fields:
            error = refusal(api, path, **{name: "other", "repetition_penalty": 1.1})
            assert error["param"] == name and rule.advice in error["message"]


def test_repeat_last_n_is_ignored_without_penalties(api: Client) -> None:
    assert text(api, CHAT, repeat_last_n=64, repeat_penalty=1.0) == text(api, CHAT)
    assert refusal(api, CHAT, repeat_last_n=64, repeat_penalty=1.1)["param"] == "repeat_last_n"
    penalized = text(api, CHAT, repetition_penalty=1.7)
    assert text(api, CHAT, repeat_last_n=-1, repeat_penalty=1.7) == penalized


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "'temperature'"),
        ("top_pp", "'top_p'"),
        ("guided_jsn", "'guided_json'"),
        ("qqqqqqqqq", "/docs"),
    ],
)
def test_errors_suggest_the_nearest_field_name(
    api: Client, path: str, name: str, hint: str
) -> None:
    error = refusal(api, path, **{name: 1})
    assert error["param"] == name and hint in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}),
        (CHAT, {"num_predict": 3, "n_predict": 4, "max_tokens": None}),
        (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}),
        (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}),
    ],
)
def test_conflicting_fields_are_refused(api: Client, path: str, fields: Any) -> None:
    assert "give one" in refusal(api, path, **fields)["message"]


VALUES: list[Any] = [5, True, [], {}, "(", [5], {"a": 1}, {"json": 5}, {"regex": "a", "json": {}}]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_wrong_values_of_aliases_are_refused(api: Client, value: Any) -> None:
    for path in REQUESTS:
        for name, rule in TABLE.items():
            if isinstance(rule, Alias):
                body = REQUESTS[path] | {name: value, "max_tokens": 2}
                response = api.http.post(path, json=body)
                assert response.status_code in (200, 400), (name, response.text)


def test_the_published_schema_has_the_fields_of_other_servers(api: Client) -> None:
    schemas = api.http.get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    assert set(TABLE) <= set(chat) and chat["mirostat"]["enum"] == [0, None]
    assert chat["num_ctx"]["description"].startswith("Ignored")
    assert chat["n_predict"]["anyOf"] == chat["max_tokens"]["anyOf"]


# Formats


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "name": "x", "strict": True, "description": None},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "x", "strict": None}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": None, "regex": None},
    ],
)
def test_a_schema_may_be_given_in_several_ways(form: dict[str, Any]) -> None:
    nested = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}

    def grammar(model: Any, body: Any, form: Any) -> Any:
        return grammar_of(model.model_validate(body | {"response_format": form}).response_format)

    expected = grammar(*MODELS[1], nested)
    for model, body in MODELS:
        assert grammar(model, body, form) == expected
    text_format = {"input": "hi", "text": {"format": {"name": "x"} | form}}
    chat = to_chat(ResponsesRequest.model_validate(text_format))
    assert grammar_of(chat.response_format) == expected


@pytest.mark.parametrize(
    ("form", "advice"),
    [
        ("json_object", "give an object"),
        (["json"], "give an object"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "put the schema into its schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}, "give one"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "give type 'json_schema'"),
        ({"type": "text", "regex": "a"}, "give type 'regex'"),
        ({"type": "json_schema", "schema": "{}"}, "dictionary"),
        ({"schema": SCHEMA}, "did you mean 'json_schema'?"),
        ({"type": "text", "Regex": None}, "did you mean 'regex'?"),
    ],
)
def test_other_formats_are_refused_with_advice(form: Any, advice: str) -> None:
    message = message_of(ChatRequest, {"messages": HI, "response_format": form})
    assert advice in message and message.startswith("response_format")


# Reasoning


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template shows its variables."""
    directory = tmp_path_factory.mktemp("reasoner") / "tiny"
    shutil.copytree(tiny.repetitive(), directory)
    variables = [
        "messages[0].content",
        "reasoning_effort|default('-')",
        "enable_thinking|default('-')",
    ]
    template = "|".join("{{ " + variable + " }}" for variable in variables)
    (directory / "chat_template.jinja").write_text(template)
    return LLM(directory, context=256, kv_tokens=256, max_rows=1, draft="off")


def formatted(llm: LLM, request: ChatRequest) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(chat_prompt(llm, request, lambda _: None))


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("low", "hi|low|True"), ("high", "hi|high|True"), ("none", "hi|-|False")],
)
def test_reasoning_effort_reaches_the_template(reasoner: LLM, effort: str, expected: str) -> None:
    chat = ChatRequest.model_validate({"messages": HI, "reasoning_effort": effort})
    reasoning = {"input": "hi", "reasoning": {"effort": effort}}
    response = to_chat(ResponsesRequest.model_validate(reasoning))
    think = {"model": "tiny", "messages": HI, "think": effort}
    ollama = ollama_to_chat(OllamaChat.model_validate(think))
    for request in (chat, response, ollama):
        assert formatted(reasoner, request) == expected
        assert fields_without_effect(reasoner, request) == []


def test_template_variables_override_the_reasoning_effort(reasoner: LLM) -> None:
    body = {"messages": HI, "enable_thinking": False, "reasoning_effort": "low"}
    assert formatted(reasoner, ChatRequest.model_validate(body)) == "hi|low|False"
    think = {"model": "tiny", "messages": HI, "think": True}
    assert formatted(reasoner, ollama_to_chat(OllamaChat.model_validate(think))) == "hi|-|True"


@pytest.mark.parametrize(
    ("path", "body", "wrong", "name"),
    [
        (CHAT, {"messages": HI, "reasoning_effort": "high"}, "hard", "reasoning_effort"),
        (CHAT, {"messages": HI, "enable_thinking": True}, None, "enable_thinking"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "low"}}, {"effort": 3}, "reasoning"),
        ("/api/chat", {"model": "tiny", "messages": HI, "think": "low"}, "hard", "think"),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "think": True}, "yes", "think"),
    ],
)
def test_reasoning_that_the_template_ignores_is_named(
    api: Client, path: str, body: dict[str, Any], wrong: Any, name: str
) -> None:
    length = {"options": {"num_predict": 2}} if path.startswith("/api") else {"n_predict": 2}
    response = api.http.post(path, json=body | length)
    assert response.status_code == 200 and response.headers["x-forerun-ignored"] == name
    if wrong is not None:
        response = api.http.post(path, json=body | {name: wrong})
        assert response.status_code == 400
        assert "low" in response.text and "high" in response.text


# Model cards


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "tiny/"])
def test_a_model_has_a_card(api: Client, name: str) -> None:
    (listed,) = api.http.get("/v1/models").json()["data"]
    assert api.http.get(f"/v1/models/{name}").json() == listed


@pytest.mark.parametrize("name", ["gpt-5", "a/b:c", "tiny:q4", "%20", "tiny/x", "x" * 3000])
def test_other_models_are_not_found(api: Client, name: str) -> None:
    response = api.http.get(f"/v1/models/{name}")
    error = response.json()["error"]
    assert response.status_code == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_names_of_models_may_have_slashes(spare: LLM) -> None:
    """The card has the time of the model's file, on which replicas and restarts agree."""
    with serving(spare, served_name="org/sub/tiny:1b") as s:
        for name in ("org/sub/tiny:1b", "org%2Fsub%2Ftiny:1b"):
            card = s.http.get(f"/v1/models/{name}").json()
            assert card["id"] == "org/sub/tiny:1b" and card["object"] == "model"
            assert card["created"] == int(Path(str(spare.config.model)).stat().st_mtime)
        assert s.http.get("/v1/models/tiny:1b").status_code == 404
        assert s.http.get("/v1/models/").json()["data"] == [card]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/tiny", "/api/tags"])
def test_head_is_answered(api: Client, path: str) -> None:
    response = api.http.head(path)
    assert response.status_code == 200 and response.content == b""
    assert response.headers["content-type"] == api.http.get(path).headers["content-type"]
