"""Shapes that clients of other servers send and read: model cards, reasoning effort, forms, one
call at most."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from forerun.llm import LLM
from forerun.server import conversation, errors, openai
from forerun.server.ollama import OllamaChat, to_chat as chat_of
from forerun.server.protocol import ChatRequest, ResponsesRequest
from forerun.server.responses import to_chat as as_chat
from tests import tiny
from tests.server.serving import Front, serving

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
NESTED = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CALLS = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEMPLATE = "{{ messages[0].content }}|{{ reasoning_effort|default('-') }}|{{ enable_thinking|default('-') }}"


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


# ------------------------------------------------------------ models


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "tiny/"])
def test_a_model_has_a_card(server: Front, name: str) -> None:
    (listed,) = server.http.get("/v1/models").json()["data"]
    response = server.http.get(f"/v1/models/{name}")
    assert response.status_code == 200 and response.json() == listed


@pytest.mark.parametrize(
    "name", ["gpt-5", "tiny2", "a/b:c", "tiny:q4", "%20", "tiny/x", "x" * 3000]
)
def test_no_other_model_has_one(server: Front, name: str) -> None:
    error = server.http.get(f"/v1/models/{name}")
    assert error.status_code == 404
    assert (
        error.json()["error"]["code"] == "model_not_found"
        and error.json()["error"]["param"] == "model"
    )


def test_names_of_models_may_have_slashes(spare: LLM) -> None:
    """The card says when the model's file was made: replicas say the same, and a server that starts
    again does."""
    with serving(spare, served_name="org/sub/tiny:1b") as s:
        for name in ("org/sub/tiny:1b", "org%2Fsub%2Ftiny:1b"):
            card = s.http.get(f"/v1/models/{name}").json()
            assert card["id"] == "org/sub/tiny:1b" and card["object"] == "model"
            assert card["created"] == int(Path(str(spare.config.model)).stat().st_mtime)
        assert s.http.get("/v1/models/tiny:1b").status_code == 404
        assert s.http.get("/v1/models/").json()["data"] == [card]


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/v1/models/tiny", "/api/tags", "/api/version"]
)
def test_the_head_of_a_page_can_be_asked_for(server: Front, path: str) -> None:
    """Monitors and clients ask so whether a server is up."""
    response = server.http.head(path)
    assert response.status_code == 200 and response.content == b""
    assert response.headers["content-type"] == server.http.get(path).headers["content-type"]


# ------------------------------------------------------------ reasoning


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template shows what it is told of thinking."""
    directory = tmp_path_factory.mktemp("thinker") / "tiny"
    shutil.copytree(tiny.spoken(), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(directory, context=256, kv_tokens=256, max_rows=1, draft="off")


def laid_out(llm: LLM, request: ChatRequest) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(conversation.chat_prompt(llm, request, lambda _: None))


@pytest.mark.parametrize(
    ("effort", "said"),
    [
        ("low", "hi|low|True"),
        ("high", "hi|high|True"),
        ("minimal", "hi|minimal|True"),
        ("none", "hi|-|False"),
    ],
)
def test_reasoning_effort_reaches_the_template_from_every_api(
    thinker: LLM, effort: str, said: str
) -> None:
    chat = ChatRequest.model_validate({"messages": HI, "reasoning_effort": effort})
    response = as_chat(
        ResponsesRequest.model_validate({"input": "hi", "reasoning": {"effort": effort}})
    )
    ollama = chat_of(OllamaChat.model_validate({"model": "tiny", "messages": HI, "think": effort}))
    for request in (chat, response, ollama):
        assert laid_out(thinker, request) == said
        assert conversation.fields_without_effect(thinker, request) == []


def test_what_a_request_says_to_the_template_itself_goes_first(thinker: LLM) -> None:
    own = {
        "messages": HI,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
    }
    assert laid_out(thinker, ChatRequest.model_validate(own)) == "hi|low|False"
    plain = chat_of(OllamaChat.model_validate({"model": "tiny", "messages": HI, "think": True}))
    assert laid_out(thinker, plain) == "hi|-|True"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": HI, "reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"messages": HI, "enable_thinking": True}, "enable_thinking"),
        (
            RESPONSES,
            {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}},
            "reasoning",
        ),
        ("/api/chat", {"model": "tiny", "messages": HI, "think": "low"}, "think"),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "think": True}, "think"),
    ],
)
def test_a_template_that_cannot_use_it_is_said(
    server: Front, path: str, body: dict[str, Any], name: str
) -> None:
    length = {"options": {"num_predict": 2}} if path.startswith("/api") else {"n_predict": 2}
    response = server.http.post(path, json=body | length)
    assert response.status_code == 200 and response.headers["x-forerun-ignored"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "reasoning_effort": "hard"}),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "hard"}}),
        ("/api/chat", {"model": "tiny", "messages": HI, "think": "hard"}),
        ("/api/chat", {"model": "tiny", "messages": HI, "think": 3}),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "think": "yes"}),
    ],
)
def test_another_effort_is_refused_with_those_there_are(
    server: Front, path: str, body: dict[str, Any]
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400 and "low" in response.text and "high" in response.text


# ------------------------------------------------------------ forms


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "name": "x", "strict": True, "description": None},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "x", "strict": None}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": None, "regex": None},
    ],
)
def test_a_schema_in_any_place_is_the_same_form(form: dict[str, Any]) -> None:
    wanted = openai.grammar_of(
        ChatRequest.model_validate({"messages": HI, "response_format": NESTED}).response_format
    )
    for kind, body in ((ChatRequest, {"messages": HI}), (ResponsesRequest, {"input": "hi"})):
        assert (
            openai.grammar_of(
                kind.model_validate(body | {"response_format": form}).response_format
            )
            == wanted
        )
    chat = as_chat(
        ResponsesRequest.model_validate({"input": "hi", "text": {"format": {"name": "x"} | form}})
    )
    assert openai.grammar_of(chat.response_format) == wanted


def test_an_object_without_a_schema_stays_one() -> None:
    for form in ({"type": "json_object"}, {"type": "json_object", "schema": None}):
        request = ChatRequest.model_validate({"messages": HI, "response_format": form})
        assert request.response_format is not None and request.response_format.type == "json_object"


@pytest.mark.parametrize(
    ("form", "advice"),
    [
        ("json_object", "give an object"),
        (["json"], "give an object"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "put the schema into its schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}, "give one"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "give type 'json_schema'"),
        ({"type": "text", "regex": "a"}, "give type 'regex'"),
        ({"type": "regex", "regex": "a", "choice": ["a"]}, "give type 'choice'"),
        ({"type": "json_schema", "schema": "{}"}, "dictionary"),
        ({"schema": SCHEMA}, "did you mean 'json_schema'?"),
        ({"type": "text", "Regex": None}, "did you mean 'regex'?"),
    ],
)
def test_other_shapes_are_refused_with_advice(form: Any, advice: str) -> None:
    """A value beside another type than its own was ignored without a word."""
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate({"messages": HI, "response_format": form})
    message = errors.body(RequestValidationError(error.value.errors()))[1]["error"]["message"]
    assert advice in message and message.startswith("response_format")


def test_a_schema_beside_the_type_is_obeyed(server: Front) -> None:
    form = {"type": "json_object", "schema": SCHEMA}
    answer = server.answer(CHAT, {"messages": HI, "response_format": form, "max_tokens": 60})
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in ("x", "y")
    answer = server.answer(
        RESPONSES, {"input": "hi", "text": {"format": form}, "max_output_tokens": 60}
    )
    assert json.loads(answer["output"][0]["content"][0]["text"])["a"] in ("x", "y")


# ------------------------------------------------------------ calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("parallel", "count"), [(False, 1), (True, 2), (None, 2)])
def test_one_call_at_most_where_none_may_be_parallel(
    server: Front, parallel: bool | None, count: int, stream: bool
) -> None:
    """The model says two calls: the second is not handed out where the request asks for one."""
    saying = {
        "response_format": {"type": "choice", "choice": [CALLS]},
        "parallel_tool_calls": parallel,
    }
    asked = {"messages": HI, "tools": [TOOL], "max_tokens": 200, "stream": stream, **saying}
    response = server.http.post(CHAT, json=asked)
    if stream:
        events = [
            json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")
        ]
        calls = [
            call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())
        ]
    else:
        calls = response.json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ["{}", '{"a": 1}'][:count]


@pytest.mark.parametrize(("parallel", "count"), [(False, 1), (True, 2), (None, 2)])
def test_one_item_at_most_in_responses(server: Front, parallel: bool | None, count: int) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    saying = {
        "response_format": {"type": "choice", "choice": [CALLS]},
        "parallel_tool_calls": parallel,
    }
    answer = server.answer(
        RESPONSES, {"input": "hi", "tools": [tool], "max_output_tokens": 200, **saying}
    )
    assert [item["type"] for item in answer["output"]] == ["function_call"] * count
    assert answer["parallel_tool_calls"] is (parallel is not False)


def test_a_call_that_is_required_is_one(server: Front) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    asked = {
        "messages": HI,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (call,) = server.answer(CHAT, asked | {"max_tokens": 80})["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
