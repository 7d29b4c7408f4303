"""Numbers as clients of other servers write them: one reading on every API, and errors that say
what to send."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from forerun.llm import LLM
from forerun.server import errors
from forerun.server.protocol import FILL_CONTEXT as FILL
from forerun.server.ollama import OllamaChat, to_chat as chat_of
from forerun.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    StreamOptions,
)
from tests.server.serving import Front, serving

HI = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT, RESPONSE = {"prompt": "x"}, {"messages": HI}, {"input": "hi"}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, COMPLETION), (ChatRequest, CHAT), (ResponsesRequest, RESPONSE),
]  # fmt: skip
LENGTHS = (
    "n_predict",
    "num_predict",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
)


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


def length_of(request: Any) -> Any:
    values = [getattr(request, name, None) for name in LENGTHS]
    return next((value for value in values if value is not None), None)


def told(kind: Any, body: dict[str, Any]) -> str:
    """The message of a request that is refused."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    return errors.body(RequestValidationError(error.value.errors()))[1]["error"]["message"]


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("value", [256.0, 2.56e2, 256])
def test_a_whole_number_may_be_written_as_a_float(
    kind: Any, body: dict[str, Any], value: float
) -> None:
    request = kind.model_validate(
        body | {"n_predict": value, "top_k": value, "seed": value, "min_tokens": value}
    )
    for read in (length_of(request), request.top_k, request.seed, request.min_tokens):
        assert read == 256 and type(read) is int


def test_so_are_all_the_other_whole_numbers() -> None:
    fields = {
        "n": 2.0,
        "best_of": 2.0,
        "logprobs": 3.0,
        "stop_token_ids": [5.0, 6],
        "speculative": {"depth": 4.0},
    }
    request = CompletionRequest.model_validate({"prompt": [[7.0, 8], [9.0]], **fields})
    assert (request.n, request.best_of, request.logprobs) == (2, 2, 3)
    assert request.stop_token_ids == [5, 6] and request.prompt == [[7, 8], [9]]
    assert request.speculative.depth == 4  # type: ignore[union-attr]
    assert CompletionRequest.model_validate({"prompt": [7.0, 8]}).prompt == [7, 8]
    assert ChatRequest.model_validate(CHAT | {"top_logprobs": 2.0}).top_logprobs == 2
    assert DetokenizeRequest.model_validate({"tokens": [5.0]}).tokens == [5]
    assert EmbeddingsRequest.model_validate({"input": [5.0], "dimensions": 32.0}).input == [5]
    assert CompletionRequest.model_validate(COMPLETION | {"seed": -0.0}).seed == 0


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("value", [-1, -2, -1.0])
def test_a_length_below_0_is_all_there_is_room_for(
    kind: Any, body: dict[str, Any], value: float
) -> None:
    known = [name for name in LENGTHS if name in kind.model_fields or name not in LENGTHS[3:]]
    assert len(known) >= 4
    for name in known:
        assert length_of(kind.model_validate(body | {name: value})) == FILL
    assert "-1 for as many tokens as there is room for" in told(kind, body | {"n_predict": -3})


def test_ollamas_options_are_read_the_same_way() -> None:
    def read(**options: Any) -> ChatRequest:
        return chat_of(
            OllamaChat.model_validate({"model": "tiny", "messages": HI, "options": options})
        )

    assert (
        read(num_predict=-1).max_tokens
        == read(num_predict=-2).max_tokens
        == read(num_predict=-2.0).max_tokens
    )
    request = read(num_predict=24.0, top_k=40.0, seed=7.0, repeat_penalty=1)
    assert (request.max_tokens, request.top_k, request.seed, request.repetition_penalty) == (
        24,
        40,
        7,
        1.0,
    )
    assert OllamaChat.model_validate({"model": "tiny", "keep_alive": -1}).keep_alive == -1
    assert OllamaChat.model_validate({"model": "tiny", "keep_alive": "5m"}).keep_alive == "5m"


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("name", ["n_predict", "top_k", "seed", "min_tokens"])
@pytest.mark.parametrize("value", ["5", "", True, False, 2.5, [], {}])
def test_what_is_no_whole_number_is_told_what_to_send(
    kind: Any, body: dict[str, Any], name: str, value: Any
) -> None:
    message = told(kind, body | {name: value})
    assert "give a whole number" in message and len(message.splitlines()) == 1
    assert ("without quotation marks" in message) == isinstance(value, str)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty"]
)
def test_what_is_no_number_is_told_what_to_send(name: str) -> None:
    for value in ("0.5", True, [], 10**400):
        assert "number" in told(ChatRequest, CHAT | {name: value})
    assert ChatRequest.model_validate(CHAT | {"temperature": 0}).temperature == 0.0


@pytest.mark.parametrize("depth", ["4", "deep", -1, 65, 2.5, True])
def test_a_depth_that_is_none_is_told_what_to_send(depth: Any) -> None:
    message = told(CompletionRequest, COMPLETION | {"speculative": {"depth": depth}})
    assert "whole number" in message and message.startswith("speculative.depth")


def test_logprobs_of_completions() -> None:
    """Some clients send the boolean of chats: false says what it means, true does not."""
    assert CompletionRequest.model_validate(COMPLETION | {"logprobs": False}).logprobs is None
    assert CompletionRequest.model_validate(COMPLETION | {"logprobs": 0}).logprobs == 0
    assert "such as 5" in told(CompletionRequest, COMPLETION | {"logprobs": True})


@pytest.mark.parametrize(("kind", "body"), KINDS)
def test_null_is_absent_in_every_field(kind: Any, body: dict[str, Any]) -> None:
    nulls = {name: None for name in kind.model_fields if name not in body}
    assert kind.model_validate(body | nulls).model_dump() == kind.model_validate(body).model_dump()
    assert (
        StreamOptions.model_validate({"include_usage": None, "include_obfuscation": None})
        == StreamOptions()
    )


def test_any_top_k_of_another_server(server: Front) -> None:
    asked = {"max_tokens": 8, "seed": 3, "temperature": 1}
    plain = server.complete(**asked, top_k=0)["choices"]
    assert (
        server.complete(**asked, top_k=-1)["choices"]
        == server.complete(**asked, top_k=-1.0)["choices"]
        == plain
    )
    response = server.http.post("/v1/completions", json={"prompt": "x", "top_k": -2})
    assert response.status_code == 400 and "0 for all tokens" in response.text


@pytest.mark.parametrize("seed", [-1, -1.0, -7])
def test_a_seed_below_0_is_any_seed(server: Front, seed: float) -> None:
    """On /v1 it was one seed like any other: the same text each time at temperature 1."""
    asked = {"seed": seed, "temperature": 1}
    answers = [server.complete(**asked) for _ in range(3)]
    assert len({answer["choices"][0]["text"] for answer in answers}) > 1
    again = server.complete(**asked | {"seed": answers[0]["seed"]})
    assert again["choices"][0]["text"] == answers[0]["choices"][0]["text"]
    chats = [
        server.answer("/v1/chat/completions", CHAT | {"max_tokens": 9} | asked) for _ in range(3)
    ]
    assert len({chat["choices"][0]["message"]["content"] for chat in chats}) > 1
    said = [
        server.answer("/v1/responses", RESPONSE | {"max_output_tokens": 9} | asked)
        for _ in range(3)
    ]
    assert len({answer["output"][0]["content"][0]["text"] for answer in said}) > 1


def test_biases_name_tokens_by_whole_numbers(server: Front) -> None:
    asked = {"max_tokens": 3, "temperature": 0}
    forced = server.complete(**asked, logit_bias={"69": 100})["choices"]
    assert server.complete(**asked, logit_bias={"69.0": 100.0})["choices"] == forced
    for name in ("x", "1.5", "", "6_9", " 69", "٦", "1e3"):
        response = server.http.post(
            "/v1/completions", json={"prompt": "x", "logit_bias": {name: 1}}
        )
        assert response.status_code == 400 and "token ids" in response.json()["error"]["message"]


def test_a_length_of_minus_1_fills_the_context(spare: LLM) -> None:
    """Two prompts of unlike lengths: each has its own room."""
    with serving(spare, served_name="tiny") as s:
        fixed = {"temperature": 0, "ignore_eos": True}
        answer = s.answer(
            "/v1/completions", {"prompt": ["a b c", "a b c " * 300], "max_tokens": -1} | fixed
        )
        usage = answer["usage"]
        assert usage["total_tokens"] == 2 * spare.room
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
        for path, body, name in (
            ("/v1/chat/completions", CHAT, "max_completion_tokens"),
            ("/v1/responses", RESPONSE, "max_output_tokens"),
        ):
            assert (
                s.answer(path, body | {name: -1} | {"temperature": 0})["usage"]["total_tokens"]
                <= spare.room
            )
