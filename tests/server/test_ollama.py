"""Ollama's API: the same texts as OpenAI's, in Ollama's shapes, and its errors."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.server import openai as openai_api
from tests.server.serving import Front, Serving, serving

HI = [{"role": "user", "content": "hi there"}]
OPTIONS = {"num_predict": 24, "seed": 11, "temperature": 0.9}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
TIMES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


def lines(server: Front, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={"model": "tiny"} | body)
    assert (
        response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    ), response.text
    return [json.loads(line) for line in response.text.splitlines()]


def whole(server: Front, path: str, **body: Any) -> dict[str, Any]:
    return server.answer(path, {"model": "tiny", "stream": False} | body)


def openai(server: Front, messages: list[dict[str, Any]], **more: Any) -> str:
    asked = {"messages": messages, "max_tokens": 24, "seed": 11, "temperature": 0.9} | more
    return server.answer("/v1/chat/completions", asked)["choices"][0]["message"]["content"]


def error_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"} and len(response.json()["error"].splitlines()) == 1
    return response.json()["error"]


# ------------------------------------------------------------ texts


@pytest.mark.parametrize("model", ["tiny", "tiny:latest"])
def test_a_chat_says_what_openais_says(server: Front, model: str) -> None:
    said = openai(server, HI)
    answer = whole(server, "/api/chat", messages=HI, options=OPTIONS, model=model)
    assert answer["message"] == {"role": "assistant", "content": said} and answer["model"] == model
    parts = lines(server, "/api/chat", messages=HI, options=OPTIONS, model=model)
    assert "".join(part["message"]["content"] for part in parts) == said and len(parts) > 2
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_generation_is_a_chat_of_one_message(server: Front) -> None:
    asked = {"prompt": "hi there", "options": OPTIONS}
    assert whole(server, "/api/generate", **asked)["response"] == openai(server, HI)
    assert "".join(part["response"] for part in lines(server, "/api/generate", **asked)) == openai(
        server, HI
    )
    system = [{"role": "system", "content": "be brief"}, *HI]
    assert whole(server, "/api/generate", system="be brief", **asked)["response"] == openai(
        server, system
    )


def test_a_raw_generation_is_a_completion(server: Front) -> None:
    raw = whole(server, "/api/generate", prompt="def f(", raw=True, options=OPTIONS)["response"]
    assert (
        raw
        == server.complete(prompt="def f(", max_tokens=24, seed=11, temperature=0.9)["choices"][0][
            "text"
        ]
    )


def test_options_and_stops_mean_what_they_mean_elsewhere(server: Front) -> None:
    own = {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    }
    both = openai(server, HI, **own, repetition_penalty=1.3)
    assert (
        whole(server, "/api/chat", messages=HI, options=OPTIONS | own | {"repeat_penalty": 1.3})[
            "message"
        ]["content"]
        == both
        != openai(server, HI)
    )
    text = openai(server, HI)
    cut = whole(server, "/api/chat", messages=HI, options=OPTIONS | {"stop": [text[6:9]]})
    assert (
        cut["message"]["content"] == text[: text.index(text[6:9])] and cut["done_reason"] == "stop"
    )


def test_format_is_a_grammar(server: Front) -> None:
    answer = whole(server, "/api/chat", messages=HI, format=SCHEMA, options=OPTIONS)
    assert json.loads(answer["message"]["content"])["a"] in ("x", "y")
    form = {"type": "json_object"}
    assert whole(server, "/api/chat", messages=HI, format="json", options=OPTIONS)["message"][
        "content"
    ] == openai(server, HI, response_format=form)
    assert whole(server, "/api/chat", messages=HI, format="", options=OPTIONS)["message"][
        "content"
    ] == openai(server, HI)


def test_a_negative_length_is_all_there_is_room_for(spare: LLM) -> None:
    with serving(spare, served_name="tiny") as s:
        body = {
            "prompt": "a b c",
            "options": {"num_predict": -1, "ignore_eos": True, "temperature": 0},
        }
        answer = whole(s, "/api/generate", **body)
        assert answer["done_reason"] == "length"
        assert answer["prompt_eval_count"] + answer["eval_count"] == spare.decoder.context


def test_a_negative_seed_is_any_seed(server: Front) -> None:
    asked = {"prompt": "hi there", "options": OPTIONS | {"seed": -1}}
    assert len({whole(server, "/api/generate", **asked)["response"] for _ in range(3)}) > 1


def test_the_last_line_has_counts_and_times(server: Front) -> None:
    last = lines(server, "/api/chat", messages=HI, options=OPTIONS)[-1]
    assert last.keys() == {"model", "created_at", "message", "done", "done_reason"} | TIMES
    assert all(isinstance(last[name], int) and last[name] >= 0 for name in TIMES)
    assert (
        last["eval_count"] == 24
        and last["done_reason"] == "length"
        and last["message"]["content"] == ""
    )
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


def test_no_message_asks_whether_the_model_is_there(server: Front) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert server.answer(path, {"model": "tiny"})["done_reason"] == "load"
        assert server.answer(path, {"model": "tiny", "keep_alive": 0})["done_reason"] == "unload"


def test_tools_are_called_with_objects(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model calls nothing by itself: what it said is put in its mouth."""
    from forerun.server import tools

    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    monkeypatch.setattr(tools.ToolCallParser, "add", lambda self, piece: ("", []))
    monkeypatch.setattr(tools.ToolCallParser, "end", lambda self: ("", [call]))
    asked = {"messages": HI, "tools": [TOOL], "options": OPTIONS}
    expected = [{"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}}]
    assert whole(serve, "/api/chat", **asked)["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": expected,
    }
    first, last = lines(serve, "/api/chat", **asked)
    assert first["message"]["tool_calls"] == expected and not first["done"] and last["done"]


def test_calls_and_their_results_are_read_as_openais(server: Front) -> None:
    ollama = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_name": "f", "content": "5"},
    ]
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    same = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "5"},
    ]
    answer = whole(server, "/api/chat", messages=ollama, tools=[TOOL], options=OPTIONS)
    assert answer["message"]["content"] == openai(server, same, tools=[TOOL])


def test_what_is_ignored_is_said(server: Front) -> None:
    for stream in (False, True):
        body = {
            "model": "tiny",
            "prompt": "x",
            "options": {"num_ctx": 9, "num_predict": 2},
            "keep_alive": "5m",
        }
        response = server.http.post("/api/generate", json=body | {"stream": stream})
        assert response.headers["x-forerun-ignored"] == "num_ctx, keep_alive"
    response = server.http.post(
        "/api/embed", json={"model": "tiny", "input": "x", "options": {"num_ctx": 9}}
    )
    assert response.headers["x-forerun-ignored"] == "options"


def test_curls_content_type_is_json_unless_a_browser_asks(server: Front) -> None:
    """A page may send a form without asking first, so what comes from one must not be taken."""
    body = b'{"model": "tiny", "prompt": "x", "stream": false, "options": {"num_predict": 2}}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post("/api/generate", content=body, headers=form).status_code == 200
    error_of(
        server.http.post("/api/generate", content=body, headers=form | {"origin": server.url}), 400
    )
    error_of(
        server.http.post(
            "/api/generate", content=body, headers=form | {"origin": "http://a.example"}
        ),
        403,
    )
    assert (
        server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=form).status_code
        == 400
    )


# ------------------------------------------------------------ the model


def test_the_one_model_is_listed_running_and_shown(server: Front, llm: LLM) -> None:
    (listed,) = server.http.get("/api/tags").json()["models"]
    assert (
        listed["name"] == listed["model"] == "tiny:latest"
        and listed["size"] > 0
        and len(listed["digest"]) == 64
    )
    assert listed["details"]["family"] == "llama" and listed["details"]["format"] == "safetensors"
    (running,) = server.http.get("/api/ps").json()["models"]
    assert (
        running["name"] == "tiny:latest"
        and running["context_length"] == 2048
        and running["size_vram"] == 0
    )
    shown = server.answer("/api/show", {"model": "tiny"})
    assert shown == server.answer("/api/show", {"name": "tiny:latest"})
    assert shown["modified_at"] == listed["modified_at"]
    assert datetime.fromisoformat(shown["modified_at"]).timestamp() == int(
        Path(llm.config.model).stat().st_mtime
    )
    assert shown["details"] == listed["details"] and "completion" in shown["capabilities"]
    info, config = shown["model_info"], llm.decoder.config
    assert (
        info["general.architecture"] == "llama" and info["llama.embedding_length"] == config.hidden
    )
    assert info["llama.block_count"] == config.layers and info["general.parameter_count"] > 1000
    assert server.http.get("/api/version").json() == server.http.get("/version").json()
    assert server.http.head("/").status_code == 200


def test_a_name_with_a_tag_stays_as_it_is(spare: LLM) -> None:
    with serving(spare, served_name="tiny:1b") as s:
        assert s.http.get("/api/tags").json()["models"][0]["name"] == "tiny:1b"
        error_of(s.http.post("/api/show", json={"model": "tiny"}), 404)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("POST", "pull"),
        ("POST", "push"),
        ("POST", "create"),
        ("POST", "copy"),
        ("DELETE", "delete"),
    ],
)
def test_models_are_not_managed_here(server: Front, method: str, name: str) -> None:
    assert "forerun serve" in error_of(
        server.http.request(method, f"/api/{name}", json={"model": "x"}), 501
    )


# ------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "template": "y"}, "template"),
        ("generate", {"prompt": "x", "images": ["YQ=="]}, "images"),
        ("generate", {"prompt": "x", "context": [1]}, "/api/chat"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "raw"),
        ("generate", {"prompt": "x", "options": {"mirostat": 2}}, "mirostat"),
        ("generate", {"prompt": "x", "options": {"temprature": 2}}, "'temperature'"),
        ("generate", {"prompt": "x", "options": {"messages": []}}, "messages"),
        ("generate", {"prompt": "x", "options": {"temperature": "hot"}}, "temperature"),
        ("generate", {"prompt": "x", "options": {"num_predict": 0}}, "max_tokens"),
        ("generate", {"prompt": "x", "options": [1]}, "options"),
        ("generate", {"prompt": "x", "format": "xml"}, "format"),
        ("generate", {"prompt": "x", "format": {"type": 5}}, ""),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": "x = 1\n" * 3000}, "prompt"),
        ("generate", {"prompt": "x", "nothing": 1}, "nothing"),
        ("generate", {"prompt": "x", "stream": "yes"}, "stream"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [{"role": "robot", "content": "hi"}]}, "role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "content"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["YQ=="]}]}, "images"),
        ("chat", {"messages": [{}] * 4_000}, "role"),
        ("chat", {"messages": [{}] * 10_000}, "8192"),
        ("chat", {"messages": HI, "tools": [{}]}, "tools"),
        ("chat", {"messages": HI, "think": "hard"}, "think"),
        ("embed", {"input": 5}, "input"),
        ("embed", {"input": ["a"] * 2049}, "2048"),
        ("embed", {"input": [""]}, "input"),
        ("embed", {"input": "x = 1\n" * 3000, "truncate": False}, "2048"),
        ("embed", {"input": "a", "dimensions": 3}, "dimensions"),
        ("embeddings", {"prompt": ["a"]}, "prompt"),
        ("show", {}, "model"),
    ],
)
def test_what_cannot_be_is_one_line(
    server: Front, path: str, body: dict[str, Any], says: str
) -> None:
    model = {} if path == "show" else {"model": "tiny"}
    assert says in error_of(server.http.post(f"/api/{path}", json=model | body), 400)
    server.rest()


def test_another_model_and_another_path_are_not_found(server: Front) -> None:
    for path, body in (
        ("chat", {"messages": HI}),
        ("generate", {"prompt": "x"}),
        ("embed", {"input": "x"}),
        ("show", {}),
    ):
        assert "'llama3'" in error_of(
            server.http.post(f"/api/{path}", json={"model": "llama3"} | body), 404
        )
    error_of(server.http.get("/api/nothing"), 404)
    error_of(
        server.http.post("/api/chat", content=b"{", headers={"content-type": "application/json"}),
        400,
    )


def test_an_engine_that_fails_in_a_stream_is_a_last_line(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(spare, served_name="tiny") as s:
        step, done = spare.engine.step, []

        def fails() -> Any:
            done.append(1)
            if len(done) > 3:
                monkeypatch.undo()
                raise RuntimeError("broken")
            return step()

        monkeypatch.setattr(spare.engine, "step", fails)
        parts = lines(
            s, "/api/generate", prompt="x = 1", options={"num_predict": 200, "ignore_eos": True}
        )
        assert "failed" in parts[-1]["error"] and set(parts[-1]) == {"error"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HI, "stream": False}),
        ("/api/generate", {"prompt": "x", "raw": True, "stream": False}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_an_answer_without_a_limit_ends_where_nothing_else_ends_it(
    spare: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A model without a chat template wrote until the context was full: 32,761 tokens for a
    greeting."""
    monkeypatch.setattr(openai_api, "OPEN_ENDED_TOKENS", 24)
    with serving(spare, served_name="tiny") as s:
        answer = s.http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    counted = answer.json().get("usage") or answer.json()
    assert (
        next(
            counted[n] for n in ("eval_count", "completion_tokens", "output_tokens") if n in counted
        )
        <= 24
    )
