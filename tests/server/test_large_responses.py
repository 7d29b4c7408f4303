"""Response sizes are estimated before generation; large responses are refused or sent in parts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from forerun.sampling.params import SamplingParams
from forerun.server import large_responses
from forerun.server.errors import ApiError
from forerun.server.jobs import Job
from forerun.server.large_responses import (
    LONG_LOGPROB_BYTES,
    SLICE_CHARACTERS,
    LargeResponse,
    body_of,
    choice_size,
    json_slices,
    limit_jobs,
)
from tests.server.serving import Serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "x = 1\n" * 300}
SCORED = {"logprobs": True, "top_logprobs": 20}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """A limit that the tiny model's short answers reach."""
    monkeypatch.setattr(large_responses, "MAX_BYTES", 1 << 18)
    return large_responses.MAX_BYTES


def refusal(server: Serving, path: str, body: dict[str, Any]) -> str:
    response = server.http.post(path, json=body)
    error = response.json()["error"]
    message = error if path.startswith("/api") else error["message"]
    assert response.status_code == 400 and "MiB" in message
    return message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, LONG | {"n": 64, "echo": True, "max_tokens": 1500}),
        (COMPLETIONS, {"prompt": ["x = 1\n" * 300] * 64, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": "x", "n": 64, "max_tokens": 2000, "logprobs": 20}),
        (COMPLETIONS, {"prompt": ["x"] * 64, "max_tokens": 1999, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": [[5] * 1900] * 16, "max_tokens": 1, "prompt_logprobs": 20}),
        (COMPLETIONS, {"prompt": "x", "n": 64, "max_tokens": 1 << 30, "stream": True}),
        (CHAT, {"messages": HI, "n": 64, "max_tokens": 2000, "logprobs": True}),
        (CHAT, {"messages": HI, "n": 32, "max_completion_tokens": 2000, **SCORED}),
        ("/v1/embeddings", {"input": ["a"] * 2048}),
        ("/api/embed", {"model": "tiny", "input": ["a"] * 2048}),
    ],
)
def test_a_response_that_would_be_too_large_is_refused(
    serve: Serving, limit: int, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before a token is generated; a request of 20 KB once got 82 MB."""
    steps: list[int] = []
    engine = serve.service.llm.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: steps.append(1) or step())
    refusal(serve, path, body)
    assert not steps


def test_an_answer_without_a_limit_ends_at_the_size_limit(serve: Serving, limit: int) -> None:
    body = {"messages": HI, "temperature": 0, "ignore_eos": True, **SCORED}
    answer = serve.answer(CHAT, body)
    assert large_responses.MIN_TOKENS < answer["usage"]["completion_tokens"] < 1900
    assert answer["choices"][0]["finish_reason"] == "length"
    assert limit / 4 < len(json.dumps(answer, ensure_ascii=False)) < 1.5 * limit
    assert "n" in refusal(serve, CHAT, body | {"n": 64}), "the choices together exceed the limit"
    assert "max_tokens" in refusal(serve, CHAT, body | {"max_tokens": 2000})


PROMPT = {"prompt": "x = 1\n" * 100}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, PROMPT | {"n": 4, "echo": True, "max_tokens": 50}),
        (COMPLETIONS, PROMPT | {"echo": True, "logprobs": 20, "max_tokens": 20}),
        (COMPLETIONS, PROMPT | {"prompt_logprobs": 5, "max_tokens": 20}),
        (COMPLETIONS, {"prompt": "x", "n": 8, "logprobs": 5, "return_token_ids": True}),
        (CHAT, {"messages": HI, "n": 2, "max_tokens": 50, **SCORED}),
        (CHAT, {"messages": HI, "n": 16, "max_tokens": 100}),
    ],
)
def test_the_estimate_is_close_to_the_size(
    serve: Serving, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    found: list[int] = []

    def recorded(jobs: Any, context: int, estimate: Any) -> Any:
        found.append(estimate(jobs, [job.params.max_tokens for job in jobs]))
        return limit_jobs(jobs, context, estimate)

    monkeypatch.setattr(large_responses, "limit_jobs", recorded)
    response = serve.http.post(path, json=body | {"ignore_eos": True, "temperature": 0})
    assert response.status_code == 200 and len(found) == 1
    assert 0.2 < len(response.content) / found[0] < 1.6  # the tiny model's tokens are short


def test_usual_requests_of_large_models_are_accepted() -> None:
    """A full context of 131,072 tokens, sixteen of them, log-probabilities of a long answer."""

    def job(count: int, logprobs: int | None = None) -> Job:
        return Job([1] * 8192, SamplingParams(max_tokens=count, logprobs=logprobs), "off", 0)

    def estimate(jobs: Any, lengths: Any) -> int:
        pairs = zip(jobs, lengths, strict=True)
        return sum(choice_size(o, count, LONG_LOGPROB_BYTES, False) for o, count in pairs)

    for jobs in ([job(131072)], [job(131072)] * 16, [job(131072, 1)], [job(8192, 20)]):
        assert limit_jobs(jobs, 1 << 17, estimate) is jobs
    with pytest.raises(ApiError, match="MiB"):
        limit_jobs([job(131072, 5)] * 16, 1 << 17, estimate)


def test_a_large_response_is_sent_in_parts() -> None:
    """Copying it in one piece would block the event loop."""
    text = 'é\u2028"\\' * (1 << 20)
    value = {"text": text, "ids": list(range(300_000)), "none": None, "list": [[1], {"a": "b"}]}
    assert json.loads("".join(json_slices(value))) == value
    assert max(map(len, json_slices(value))) <= 2 * SLICE_CHARACTERS
    response, sent = LargeResponse(value), list[dict[str, Any]]()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(response({"type": "http"}, send, send))  # type: ignore[arg-type]
    start, *parts = sent
    body = b"".join(part["body"] for part in parts)
    headers = dict(start["headers"])
    assert json.loads(body) == value and body_of(response) == body
    assert headers[b"content-length"] == str(len(body)).encode()
    assert headers[b"content-type"] == b"application/json"
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) > 50 and max(len(part["body"]) for part in parts) <= 4 * SLICE_CHARACTERS


def test_large_responses_are_complete(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = serve.answer("/tokenize", {"prompt": "ab " * 9000})["tokens"]
    assert serve.answer("/detokenize", {"tokens": tokens * 3})["prompt"].count("ab") == 27_000
    response = serve.http.post(COMPLETIONS, json=LONG | {"n": 24, "echo": True, "max_tokens": 1})
    assert len(response.json()["choices"]) == 24
    assert int(response.headers["content-length"]) == len(response.content)
    monkeypatch.setattr(large_responses, "MAX_BYTES", 1000)
    assert "fewer tokens" in refusal(serve, "/detokenize", {"tokens": [70] * 2000})


def test_a_text_of_unusually_long_tokens_is_refused_at_the_limit(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias can make a model generate its longest tokens, which the estimate does not know."""
    for name, value in (("MAX_BYTES", 300), ("CHOICE_BYTES", 0), ("TOKEN_BYTES", 0)):
        monkeypatch.setattr(large_responses, name, value)
    body = {"prompt": "x", "temperature": 0, "ignore_eos": True}
    response = serve.http.post(COMPLETIONS, json=body | {"max_tokens": 1500})
    assert response.status_code == 400 and "longer than usual" in response.text
    assert serve.answer(COMPLETIONS, body | {"max_tokens": 20})
