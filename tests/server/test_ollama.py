"""Ollama's API: the same texts as OpenAI's API in Ollama's formats, and its errors."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.server import conversation
from forerun.server import openai as openai_api
from tests.server.serving import Client, Serving, serving

HI = [{"role": "user", "content": "hi there"}]
OPTIONS = {"num_predict": 24, "seed": 11, "temperature": 0.9}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"}
COUNTS |= {"eval_count", "eval_duration"}


def lines(api: Client, path: str, **body: Any) -> list[dict[str, Any]]:
    response = api.http.post(path, json={"model": "tiny", "options": OPTIONS} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def full(api: Client, path: str, **body: Any) -> dict[str, Any]:
    return api.answer(path, {"model": "tiny", "stream": False, "options": OPTIONS} | body)


def chat(api: Client, **body: Any) -> str:
    return full(api, "/api/chat", **{"messages": HI} | body)["message"]["content"]


def generate(api: Client, **body: Any) -> str:
    return full(api, "/api/generate", **{"prompt": "hi there"} | body)["response"]


def openai_chat(api: Client, messages: list[dict[str, Any]] = HI, **more: Any) -> str:
    request = {"messages": messages, "max_tokens": 24, "seed": 11, "temperature": 0.9} | more
    return api.answer("/v1/chat/completions", request)["choices"][0]["message"]["content"]


def error_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"} and len(response.json()["error"].splitlines()) == 1
    return response.json()["error"]


@pytest.mark.parametrize("model", ["tiny", "tiny:latest"])
def test_a_chat_equals_that_of_openais_api(api: Client, model: str) -> None:
    text = openai_chat(api)
    answer = full(api, "/api/chat", messages=HI, model=model)
    assert answer["message"] == {"role": "assistant", "content": text} and answer["model"] == model
    *parts, last = lines(api, "/api/chat", messages=HI, model=model)
    assert "".join(part["message"]["content"] for part in parts) == text and len(parts) > 1
    assert not any(part["done"] for part in parts) and last["done"]
    assert last.keys() == {"model", "created_at", "message", "done", "done_reason"} | COUNTS
    assert all(isinstance(last[name], int) and last[name] >= 0 for name in COUNTS)
    assert (last["eval_count"], last["done_reason"]) == (24, "length")
    assert last["message"]["content"] == ""
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


def test_a_generation_is_a_chat_of_one_message(api: Client) -> None:
    assert generate(api) == openai_chat(api)
    parts = lines(api, "/api/generate", prompt="hi there")
    assert "".join(part["response"] for part in parts) == openai_chat(api)
    system = [{"role": "system", "content": "be brief"}, *HI]
    assert generate(api, system="be brief") == openai_chat(api, system)
    raw = generate(api, prompt="def f(", raw=True)
    completion = api.complete(prompt="def f(", max_tokens=24, seed=11, temperature=0.9)
    assert raw == completion["choices"][0]["text"]


def test_options_mean_the_same_as_fields_of_openais_api(api: Client) -> None:
    own = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "presence_penalty": 0.5}
    penalized = openai_chat(api, **own, repetition_penalty=1.3)
    options = OPTIONS | own | {"repeat_penalty": 1.3}
    assert chat(api, options=options) == penalized != openai_chat(api)
    text = openai_chat(api)
    cut = full(api, "/api/chat", messages=HI, options=OPTIONS | {"stop": [text[6:9]]})
    assert cut["message"]["content"] == text[: text.index(text[6:9])]
    assert cut["done_reason"] == "stop"
    random = {"options": OPTIONS | {"seed": -1}}
    assert len({generate(api, **random) for _ in range(3)}) > 1


def test_format_is_a_grammar(api: Client) -> None:
    assert json.loads(chat(api, format=SCHEMA))["a"] in ("x", "y")
    assert chat(api, format="json") == openai_chat(api, response_format={"type": "json_object"})
    assert chat(api, format="") == openai_chat(api)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_prompt_loads_the_model(api: Client, path: str) -> None:
    assert api.answer(path, {"model": "tiny"})["done_reason"] == "load"
    assert api.answer(path, {"model": "tiny", "keep_alive": 0})["done_reason"] == "unload"


def test_arguments_of_calls_are_objects(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model calls nothing by itself, so the parser reports a call."""
    parser = conversation.ToolCallParser
    monkeypatch.setattr(parser, "read", lambda _, piece, is_last: ("", [CALL] if is_last else []))
    function = {"index": 0, "name": "f", "arguments": {"x": 1}}
    calls = [{"id": "call_0", "function": function}]
    message = full(serve, "/api/chat", messages=HI, tools=[TOOL])["message"]
    assert message == {"role": "assistant", "content": "", "tool_calls": calls}
    first, last = lines(serve, "/api/chat", messages=HI, tools=[TOOL])
    assert first["message"]["tool_calls"] == calls and not first["done"] and last["done"]


def test_tool_calls_and_results_are_read_like_those_of_openais_api(api: Client) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    own = [*HI, called, {"role": "tool", "tool_name": "f", "content": "5"}]
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    same = [*HI, called, {"role": "tool", "name": "f", "content": "5"}]
    assert chat(api, messages=own, tools=[TOOL]) == openai_chat(api, same, tools=[TOOL])


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("generate", {"prompt": "x", "keep_alive": "5m", "stream": False}, "num_ctx, keep_alive"),
        ("generate", {"prompt": "x", "keep_alive": "5m", "stream": True}, "num_ctx, keep_alive"),
        ("embed", {"input": "x"}, "options"),
    ],
)
def test_ignored_fields_are_named(api: Client, path: str, body: Any, ignored: str) -> None:
    options = {"num_ctx": 9, "num_predict": 2}
    request = {"model": "tiny", "options": options} | body
    assert api.http.post(f"/api/{path}", json=request).headers["x-forerun-ignored"] == ignored


def test_curls_default_content_type_is_json_except_from_browsers(api: Client) -> None:
    """A page may send a form to another origin without a preflight request."""
    body = b'{"model": "tiny", "prompt": "x", "stream": false, "options": {"num_predict": 2}}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    for origin, status in ({}, 200), ({"origin": api.url}, 400), ({"origin": "http://a.b"}, 403):
        response = api.http.post("/api/generate", content=body, headers=form | origin)
        assert response.status_code == status
    response = api.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=form)
    assert response.status_code == 400


def test_the_model_is_listed_running_and_shown(api: Client, llm: LLM) -> None:
    (listed,) = api.http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "tiny:latest"
    assert listed["size"] > 0 and len(listed["digest"]) == 64
    assert listed["details"]["family"] == "llama" and listed["details"]["format"] == "safetensors"
    (running,) = api.http.get("/api/ps").json()["models"]
    assert running["name"] == "tiny:latest" and running["context_length"] == 2048
    assert running["size_vram"] == 0 and datetime.fromisoformat(running["expires_at"])
    shown = api.answer("/api/show", {"model": "tiny"})
    assert shown == api.answer("/api/show", {"name": "tiny:latest"})
    assert shown["modified_at"] == listed["modified_at"]
    modified = datetime.fromisoformat(shown["modified_at"]).timestamp()
    assert modified == int(Path(llm.config.model).stat().st_mtime)
    assert shown["details"] == listed["details"] and "completion" in shown["capabilities"]
    info, config = shown["model_info"], llm.decoder.config
    assert info["general.architecture"] == "llama" and info["general.parameter_count"] > 1000
    assert info["llama.embedding_length"] == config.hidden
    assert info["llama.block_count"] == config.layers
    assert api.http.get("/api/version").json() == api.http.get("/version").json()


def test_a_name_with_a_tag_stays_as_it_is(spare: LLM) -> None:
    with serving(spare, served_name="tiny:1b") as s:
        assert s.http.get("/api/tags").json()["models"][0]["name"] == "tiny:1b"
        error_of(s.http.post("/api/show", json={"model": "tiny"}), 404)


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy", "delete"])
def test_models_are_not_managed(api: Client, name: str) -> None:
    method = "DELETE" if name == "delete" else "POST"
    response = api.http.request(method, f"/api/{name}", json={"model": "x"})
    assert "forerun serve" in error_of(response, 501)


X: dict[str, Any] = {"prompt": "x"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("generate", X | {"suffix": "y"}, "suffix"),
        ("generate", X | {"template": "y"}, "template"),
        ("generate", X | {"images": ["YQ=="]}, "images"),
        ("generate", X | {"context": [1]}, "/api/chat"),
        ("generate", X | {"raw": True, "system": "y"}, "raw"),
        ("generate", X | {"options": {"mirostat": 2}}, "mirostat"),
        ("generate", X | {"options": {"temprature": 2}}, "'temperature'"),
        ("generate", X | {"options": {"messages": []}}, "messages"),
        ("generate", X | {"options": {"temperature": "hot"}}, "temperature"),
        ("generate", X | {"options": {"num_predict": 0}}, "max_tokens"),
        ("generate", X | {"options": [1]}, "options"),
        ("generate", X | {"format": "xml"}, "format"),
        ("generate", X | {"format": {"type": 5}}, ""),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": "x = 1\n" * 3000}, "prompt"),
        ("generate", X | {"nothing": 1}, "nothing"),
        ("generate", X | {"stream": "yes"}, "stream"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [{"role": "robot", "content": "hi"}]}, "role"),
        ("chat", {"messages": [HI[0] | {"images": ["YQ=="]}]}, "images"),
        ("chat", {"messages": [{}] * 4_000}, "role"),
        ("chat", {"messages": [{}] * 10_000}, "8192"),
        ("chat", {"messages": HI, "tools": [{}]}, "tools"),
        ("chat", {"messages": HI, "think": 3}, "think"),
        ("embed", {"input": 5}, "input"),
        ("embed", {"input": ["a"] * 2049}, "2048"),
        ("embed", {"input": [""]}, "input"),
        ("embed", {"input": "x = 1\n" * 3000, "truncate": False}, "2048"),
        ("embed", {"input": "a", "dimensions": 3}, "dimensions"),
        ("embeddings", {"prompt": ["a"]}, "prompt"),
        ("show", {"model": None}, "model"),
    ],
)
def test_errors_are_reported_in_one_line(api: Client, path: str, body: Any, message: str) -> None:
    response = api.http.post(f"/api/{path}", json={"model": "tiny"} | body)
    assert message in error_of(response, 400)


def test_other_models_and_paths_are_not_found(api: Client) -> None:
    for path, body in (
        ("chat", {"messages": HI}),
        ("generate", X),
        ("embed", {"input": "x"}),
        ("show", {}),
    ):
        response = api.http.post(f"/api/{path}", json={"model": "llama3"} | body)
        assert "'llama3'" in error_of(response, 404)
    error_of(api.http.get("/api/nothing"), 404)
    headers = {"content-type": "application/json"}
    error_of(api.http.post("/api/chat", content=b"{", headers=headers), 400)


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        ("/api/chat", {"messages": HI, "stream": False}, "eval_count"),
        ("/api/generate", {"prompt": "x", "raw": True, "stream": False}, "eval_count"),
        ("/v1/chat/completions", {"messages": HI}, "completion_tokens"),
        ("/v1/responses", {"input": "hi"}, "output_tokens"),
    ],
)
def test_an_answer_without_a_limit_gets_the_default_one(
    spare: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, counted: str
) -> None:
    """A model without a chat template once filled the context: 32,761 tokens for a greeting."""
    monkeypatch.setattr(openai_api, "DEFAULT_MAX_TOKENS", 24)
    with serving(spare, served_name="tiny") as s:
        answer = s.answer(path, {"model": "tiny", **body})
    assert (answer.get("usage") or answer)[counted] <= 24
