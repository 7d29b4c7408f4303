"""Fields of other servers: what is mapped gives the same text, what is ignored is said, the rest is
refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.server.fields import TABLE, NoEffect as Idle, Alias as Mapped, Restricted as Only
from forerun.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from tests.server.serving import Front

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 12, "seed": 3},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "seed": 3,
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 12, "seed": 3},
}
PATHS = tuple(ASKED)
REQUESTS = (CompletionRequest, ChatRequest, ResponsesRequest)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


def text(server: Front, path: str, **fields: Any) -> str:
    answer = server.answer(path, ASKED[path] | fields)
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"]
    (choice,) = answer["choices"]
    return choice["text"] if path == "/v1/completions" else choice["message"]["content"]


def refusal(server: Front, path: str, **fields: Any) -> dict[str, Any]:
    response = server.http.post(path, json=ASKED[path] | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert len(error["message"].splitlines()) == 1
    return error


@pytest.mark.parametrize("path", PATHS)
def test_another_name_says_the_same(server: Front, path: str) -> None:
    assert (
        text(server, path, repeat_penalty=0.05)
        == text(server, path, repetition_penalty=0.05)
        != text(server, path)
    )
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for name in ("n_predict", "num_predict", "max_new_tokens"):
        assert text(server, path, **{limit: None, name: 5}) == text(server, path, **{limit: 5}), (
            name
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_json": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
        (
            {"guided_json": '{"const": 5}'},
            {"type": "json_schema", "json_schema": {"schema": {"const": 5}}},
        ),
        ({"json_schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
        ({"guided_regex": "[a-f]{6}"}, {"type": "regex", "regex": "[a-f]{6}"}),
        ({"guided_choice": ["yes", "no"]}, {"type": "choice", "choice": ["yes", "no"]}),
        (
            {"guided_grammar": 'start: "up" | "down"'},
            {"type": "grammar", "grammar": 'start: "up" | "down"'},
        ),
        (
            {"structured_outputs": {"regex": "[0-9]{4}", "json": None}},
            {"type": "regex", "regex": "[0-9]{4}"},
        ),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
    ],
    ids=lambda value: next(iter(value)) if "type" not in value else "",
)
def test_guided_output_is_a_response_format(
    server: Front, path: str, fields: Any, form: Any
) -> None:
    assert (
        text(server, path, **fields)
        == text(server, path, response_format=form)
        != text(server, path)
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_ignored_is_said_in_a_header_and_changes_nothing(
    server: Front, path: str, stream: bool
) -> None:
    asked = ASKED[path] | {"stream": stream}
    response = server.http.post(
        path, json=asked | {"num_ctx": 4096, "keep_alive": "5m", "mirostat": 0, "ttl": None}
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-forerun-ignored"] == "num_ctx, keep_alive"
    assert "x-forerun-ignored" not in server.http.post(path, json=asked).headers
    if not stream:
        idle = {name: 1 for name, row in TABLE.items() if isinstance(row, Idle)}
        assert text(server, path, **idle) == text(server, path)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_every_value_that_means_what_happens_anyway_is_taken(request_type: Any) -> None:
    asked = dict(zip(REQUESTS, ASKED.values(), strict=True))[request_type]
    plain = request_type.model_validate(asked)
    for name, row in TABLE.items():
        if isinstance(row, Only) and name not in request_type.model_fields:
            for value in (*row.values, None):
                assert request_type.model_validate(asked | {name: value}) == plain, name


@pytest.mark.parametrize("path", PATHS)
def test_what_would_change_the_text_is_refused_by_name(server: Front, path: str) -> None:
    for name, row in TABLE.items():
        if (
            isinstance(row, Only)
            and name not in dict(zip(PATHS, REQUESTS, strict=True))[path].model_fields
        ):
            error = refusal(server, path, **{name: "other", "repetition_penalty": 1.1})
            assert error["param"] == name and row.advice in error["message"]


def test_a_window_of_penalties_matters_only_with_penalties(server: Front) -> None:
    path = "/v1/chat/completions"
    assert text(server, path, repeat_last_n=64, repeat_penalty=1.0) == text(server, path)
    assert refusal(server, path, repeat_last_n=64, repeat_penalty=1.1)["param"] == "repeat_last_n"
    assert text(server, path, repeat_last_n=-1, repeat_penalty=1.7) == text(
        server, path, repetition_penalty=1.7
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("temprature", "'temperature'"),
        ("top_pp", "'top_p'"),
        ("guided_jsn", "'guided_json'"),
        ("qqqqqqqqq", "/docs"),
    ],
)
def test_a_typo_is_told_the_nearest_name(server: Front, path: str, name: str, says: str) -> None:
    error = refusal(server, path, **{name: 1})
    assert error["param"] == name and says in error["message"]


def test_one_thing_is_said_once(server: Front) -> None:
    path = "/v1/chat/completions"
    for fields in (
        {"repeat_penalty": 1.1, "repetition_penalty": 1.2},
        {"num_predict": 3, "n_predict": 4, "max_tokens": None},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
    ):
        assert "give one" in refusal(server, path, **fields)["message"]
    form = {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}
    assert "give one" in refusal(server, "/v1/responses", **form)["message"]


@pytest.mark.parametrize(
    "value",
    [5, True, [], {}, "(", [5], {"a": 1}, {"json": 5}, {"regex": "a", "json": {}}, "x" * 9999],
)
def test_wrong_values_of_mapped_fields_are_refused(server: Front, value: Any) -> None:
    for path in PATHS:
        for name, row in TABLE.items():
            if isinstance(row, Mapped):
                response = server.http.post(path, json=ASKED[path] | {name: value, "max_tokens": 2})
                assert response.status_code in (200, 400), (name, response.text)
    server.rest()


def test_thinking_is_the_templates_own_option() -> None:
    asked = ASKED["/v1/chat/completions"]
    assert ChatRequest.model_validate(asked | {"enable_thinking": False}).chat_template_kwargs == {
        "enable_thinking": False
    }


def test_the_published_schema_has_the_table(server: Front) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    assert set(TABLE) <= set(chat)
    assert chat["num_ctx"]["description"].startswith("Ignored")
    assert chat["mirostat"]["enum"] == [0, None]
    assert chat["n_predict"]["anyOf"] == chat["max_tokens"]["anyOf"]
