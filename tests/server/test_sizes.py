"""The size of an answer is known before anything is generated: what would be too long is refused,
in one line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.server import batch, large_responses as sizes
from forerun.server.errors import ApiError
from forerun.server.tickets import Order
from forerun.server.large_responses import SLICE_CHARACTERS as TEXT, LargeResponse as LongResponse, body_of as content_of, json_slices as slices
from tests.server.serving import Serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SCORED = [5] * 1900


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound that the tiny model's short answers reach."""
    monkeypatch.setattr(sizes, "MAX_BYTES", 1 << 18)
    return sizes.MAX_BYTES


def refusal(server: Serving, path: str, body: dict[str, Any]) -> str:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text[:200]
    message = response.json()["error"]["message"]
    assert "MiB" in message and len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x = 1\n" * 300, "n": 64, "echo": True, "max_tokens": 1500}),
        (
            COMPLETIONS,
            {"prompt": ["x = 1\n" * 300] * 64, "echo": True, "logprobs": 1, "max_tokens": 0},
        ),
        (COMPLETIONS, {"prompt": "x", "n": 64, "max_tokens": 2000, "logprobs": 20}),
        (COMPLETIONS, {"prompt": ["x"] * 32, "n": 2, "max_tokens": 1999, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": [SCORED] * 16, "max_tokens": 1, "prompt_logprobs": 20}),
        (
            COMPLETIONS,
            {"prompt": "x", "n": 64, "max_tokens": 1 << 30, "stream": True, "logprobs": 5},
        ),
        (CHAT, {"messages": HI, "n": 64, "max_tokens": 2000, "logprobs": True}),
        (
            CHAT,
            {
                "messages": HI,
                "n": 32,
                "max_completion_tokens": 2000,
                "logprobs": True,
                "top_logprobs": 20,
            },
        ),
        ("/v1/embeddings", {"input": ["a"] * 2048}),
        ("/api/embed", {"model": "tiny", "input": ["a"] * 2048}),
    ],
)
def test_an_answer_that_would_be_too_long_is_refused(
    serve: Serving, small: int, path: str, body: dict[str, Any]
) -> None:
    """Before a token is generated: 20 KB that asked for 82 MB were answered."""
    steps: list[int] = []
    step = serve.service.llm.engine.step
    serve.service.llm.engine.step = lambda: steps.append(1) or step()  # type: ignore[method-assign, func-returns-value]
    try:
        if path.startswith("/api"):
            response = serve.http.post(path, json=body)
            assert response.status_code == 400 and "MiB" in response.json()["error"]
        else:
            refusal(serve, path, body)
    finally:
        del serve.service.llm.engine.step
    assert not steps
    serve.rest()


def test_a_request_without_a_limit_gets_as_much_as_there_is_room_for(
    serve: Serving, small: int
) -> None:
    """Nobody asked for more than the bound: the answer ends there instead of being refused."""
    asked = {
        "messages": HI,
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = serve.answer(CHAT, asked)
    count = answer["usage"]["completion_tokens"]
    assert sizes.MIN_TOKENS < count < 1900 and answer["choices"][0]["finish_reason"] == "length"
    assert small / 4 < len(json.dumps(answer, ensure_ascii=False)) < 1.5 * small
    assert "n" in refusal(serve, CHAT, asked | {"n": 64}), "too many to leave room for any"
    assert "max_tokens" in refusal(serve, CHAT, asked | {"max_tokens": 2000})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x = 1\n" * 100, "n": 4, "echo": True, "max_tokens": 50}),
        (COMPLETIONS, {"prompt": "x = 1\n" * 100, "echo": True, "logprobs": 20, "max_tokens": 20}),
        (COMPLETIONS, {"prompt": "x = 1\n" * 100, "prompt_logprobs": 5, "max_tokens": 20}),
        (
            COMPLETIONS,
            {"prompt": "x", "n": 8, "logprobs": 5, "max_tokens": 100, "return_token_ids": True},
        ),
        (CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 20, "max_tokens": 50}),
        (CHAT, {"messages": HI, "n": 16, "max_tokens": 100}),
    ],
)
def test_the_estimate_is_about_what_is_written(
    serve: Serving, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    found: list[int] = []
    fitted = sizes.limit_orders

    def noted(orders: Any, room: int, weight: Any) -> Any:
        found.append(weight(orders, [order.params.max_tokens for order in orders]))
        return fitted(orders, room, weight)

    monkeypatch.setattr(sizes, "limit_orders", noted)
    response = serve.http.post(path, json=body | {"ignore_eos": True, "temperature": 0})
    assert response.status_code == 200
    (size,) = found
    assert 0.2 < len(response.content) / size < 1.6, "the tiny model says tokens of one character"


def test_usual_requests_of_large_models_are_let_in() -> None:
    """A context of 131,072 tokens, filled; sixteen answers; log-probabilities of a long one."""

    def order(count: int, logprobs: int | None = None) -> Order:
        return Order([1] * 8192, SamplingParams(max_tokens=count, logprobs=logprobs), "off", 0)

    def weight(orders: Any, lengths: Any) -> int:
        return sum(
            sizes.choice_size(o, n, sizes.LONG_LOGPROB_BYTES, False)
            for o, n in zip(orders, lengths, strict=True)
        )

    for orders in ([order(131072)], [order(131072)] * 16, [order(131072, 1)], [order(8192, 20)]):
        assert sizes.limit_orders(orders, 1 << 17, weight) is orders
    with pytest.raises(ApiError, match="MiB"):
        sizes.limit_orders([order(131072, 5)] * 16, 1 << 17, weight)


def test_a_long_answer_is_sent_in_parts() -> None:
    """In one piece the interpreter, and with it the event loop, is held while it is copied."""
    value = {
        "text": 'é\u2028"\\' * (1 << 20),
        "ids": list(range(300_000)),
        "none": None,
        "list": [[1], {"a": "b"}],
    }
    assert json.loads("".join(slices(value))) == value
    assert max(map(len, slices(value))) <= 2 * TEXT
    response, sent = LongResponse(value), list[dict[str, Any]]()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(response({"type": "http"}, send, send))  # type: ignore[arg-type]
    start, *parts = sent
    body = b"".join(part["body"] for part in parts)
    assert json.loads(body) == value and content_of(response) == body
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) > 50 and max(len(part["body"]) for part in parts) <= 4 * TEXT


def test_long_answers_arrive(serve: Serving) -> None:
    """Whole, by the same route as short ones, with tokens and texts."""
    tokens = serve.answer("/tokenize", {"prompt": "ab " * 9000})["tokens"]
    assert len(tokens) >= 9000
    assert serve.answer("/detokenize", {"tokens": tokens * 3})["prompt"].count("ab") == 27_000
    asked = {"prompt": "x = 1\n" * 300, "n": 24, "echo": True, "max_tokens": 1}
    response = serve.http.post(COMPLETIONS, json=asked)
    assert len(response.json()["choices"]) == 24 and int(response.headers["content-length"]) == len(
        response.content
    )


def test_the_text_of_many_tokens_is_bounded_too(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MAX_BYTES", 1000)
    assert "fewer tokens" in serve.http.post("/detokenize", json={"tokens": [70] * 2000}).text


def test_a_text_of_long_tokens_ends_at_the_bound(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias can make a model say its longest tokens only, which the estimate knows nothing of."""
    for name, value in (("MAX_BYTES", 300), ("CHOICE_BYTES", 0), ("TOKEN_BYTES", 0)):
        monkeypatch.setattr(sizes, name, value)
    asked = {"prompt": "x", "temperature": 0, "ignore_eos": True}
    assert "longer than usual" in refusal(serve, COMPLETIONS, asked | {"max_tokens": 1500})
    assert serve.answer(COMPLETIONS, asked | {"max_tokens": 20})
    serve.rest()


def test_batches_have_the_same_bound(
    spare: LLM, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MAX_BYTES", 1 << 16)
    bodies = [
        {"prompt": "x = 1\n" * 100, "n": 8, "echo": True, "max_tokens": 1},
        {"prompt": "x = 1\n" * 100, "n": 200, "echo": True, "max_tokens": 1},
    ]
    jobs = [
        {"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body}
        for i, body in enumerate(bodies)
    ]
    target = tmp_path / "out.jsonl"
    asyncio.run(batch.run_requests(spare, jobs, target, lambda *_: None))
    lines = {
        line["custom_id"]: line["response"]
        for line in map(json.loads, target.read_text().splitlines())
    }
    assert lines["0"]["status_code"] == 200 and len(lines["0"]["body"]["choices"]) == 8
    assert lines["1"]["status_code"] == 400 and "MiB" in lines["1"]["body"]["error"]["message"]
