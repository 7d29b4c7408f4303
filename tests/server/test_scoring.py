"""Prompts with their log-probabilities: `echo` as OpenAI's completions had it, `prompt_logprobs` as
vLLM has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from tests import tiny
from tests.server.serving import Front

PROMPTS = ["def add(a, b):", "x = 1", "wörd ☃ wörd", "a"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "for i in range(10): print(i, i * i, 'x')\n" * 20
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


@pytest.fixture(scope="module")
def apart() -> LLM:
    """The same model, which no server's thread works with."""
    return LLM(tiny.spoken(), context=2048, kv_tokens=8192, max_rows=8)


def expected(apart: LLM, prompt: str, top: int) -> list[Any]:
    """What the library says of each token of a prompt."""
    found = apart.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=top))[
        0
    ].prompt_logprobs
    assert found is not None
    return found


def scores(apart: LLM, prompt: str, top: int, logprobs: dict[str, Any], text: str) -> None:
    """Compare the logprobs of an echo with what the library says, and its offsets with the text."""
    tokens, entries = apart.tokens(prompt), expected(apart, prompt, top)
    assert apart.tokenizer is not None
    assert logprobs["tokens"][: len(tokens)] == [apart.tokenizer.spell(token) for token in tokens]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for i, entry in list(enumerate(entries))[1:]:
        assert logprobs["token_logprobs"][i] == pytest.approx(entry.logprob, abs=1e-3)
        best = list(entry.top.values())[:1]
        assert [max(logprobs["top_logprobs"][i].values())] == pytest.approx(best, abs=1e-3)
        assert len(logprobs["top_logprobs"][i]) <= top
    assert len({len(logprobs[name]) for name in logprobs}) == 1
    for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or text[start:].startswith(token)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 0.0, 6])
def test_an_echo_has_the_log_probabilities_of_its_prompt(
    server: Front, apart: LLM, prompt: str, max_tokens: float
) -> None:
    asked = {"prompt": prompt, "echo": True, "logprobs": 2, "seed": 3, "ignore_eos": True}
    answer = server.complete(**asked, max_tokens=max_tokens)
    (choice,) = answer["choices"]
    scores(apart, prompt, 2, choice["logprobs"], choice["text"])
    count = len(apart.tokens(prompt))
    assert answer["usage"] == answer["usage"] | {
        "prompt_tokens": count,
        "completion_tokens": int(max_tokens),
    }
    assert (
        len(choice["logprobs"]["tokens"]) == count + max_tokens
        and choice["finish_reason"] == "length"
    )
    assert choice["text"].startswith(prompt)
    if max_tokens:
        plain = server.complete(**asked | {"echo": False}, max_tokens=max_tokens)["choices"][0]
        assert choice["text"] == prompt + plain["text"]
        for name in ("tokens", "token_logprobs"):
            assert choice["logprobs"][name][count:] == plain["logprobs"][name]
        shifted = [len(prompt) + offset for offset in plain["logprobs"]["text_offset"]]
        assert choice["logprobs"]["text_offset"][count:] == shifted


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_streamed_echo_is_the_whole_one(server: Front, max_tokens: int) -> None:
    """A long prompt comes in several chunks, each with its own log-probabilities."""
    asked = {
        "prompt": [LONG, "x = 1"],
        "n": 2,
        "echo": True,
        "logprobs": 3,
        "seed": 5,
        "max_tokens": max_tokens,
    }
    whole = server.complete(**asked)["choices"]
    response = server.http.post(COMPLETIONS, json=asked | {"stream": True})
    events = [
        json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")
    ]
    for index, choice in enumerate(whole):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            joined = [
                value for part in parts if part["logprobs"] for value in part["logprobs"][name]
            ]
            assert joined == values, name
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert index > 1 or len(parts) > 4


def test_an_evaluation_harness_sums_what_it_asked_for(server: Front, apart: LLM) -> None:
    """As lm-evaluation-harness does: a context and its continuation as token ids, one token more
    than is needed."""
    context, continuation = apart.tokens("def add(a, b):"), apart.tokens("\n    return a + b")
    tokens = context + continuation
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    for choice in server.complete(prompt=[tokens, tokens], **asked)["choices"]:
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        assert len(logprobs) == len(continuation)
        wanted = apart.generate(tokens, SamplingParams(max_tokens=0, prompt_logprobs=1))[
            0
        ].prompt_logprobs
        assert wanted is not None
        total = sum(entry.logprob for entry in wanted[len(context) :] if entry)
        assert sum(logprobs) == pytest.approx(total, abs=1e-2)


def test_a_prompt_that_was_read_before_is_scored_alike(server: Front) -> None:
    """The cache of prompts holds no logits."""
    asked = {"prompt": LONG, "max_tokens": 0, "echo": True, "logprobs": 1}
    server.complete(prompt=LONG, max_tokens=2)
    first = server.complete(**asked)["choices"]
    assert server.complete(**asked)["choices"] == first
    assert None not in first[0]["logprobs"]["token_logprobs"][1:]


def test_an_echo_alone_needs_no_log_probabilities(server: Front) -> None:
    (choice,) = server.complete(prompt="x = 1", max_tokens=0, echo=True)["choices"]
    assert choice == {"index": 0, "text": "x = 1", "finish_reason": "length", "logprobs": None}


def test_vllms_prompt_logprobs(server: Front, apart: LLM) -> None:
    (choice,) = server.complete(prompt="def add(a, b):", max_tokens=2, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    entries, tokens = expected(apart, "def add(a, b):", 2), apart.tokens("def add(a, b):")
    assert first is None and len(rest) == len(tokens) - 1 and choice["logprobs"] is None
    for said, entry in zip(rest, entries[1:], strict=True):
        own = said[str(entry.token_id)]
        assert (
            own["logprob"] == pytest.approx(entry.logprob, abs=1e-3) and own["rank"] == entry.rank
        )
        assert set(said) == {str(entry.token_id), *map(str, entry.top)}
        assert apart.tokenizer is not None and own["decoded_token"] == apart.tokenizer.spell(
            entry.token_id
        )
    answer = server.answer(CHAT, {"messages": HI, "max_tokens": 2, "prompt_logprobs": 0})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in server.answer(CHAT, {"messages": HI, "max_tokens": 2})


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "echo"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "stream"),
        (CHAT, {"messages": HI, "prompt_logprobs": 1, "stream": True}, "stream"),
        (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
        ("/v1/responses", {"input": "x", "prompt_logprobs": 1}, "/v1/completions"),
    ],
)
def test_what_cannot_be_scored_is_told(
    server: Front, path: str, body: dict[str, Any], says: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400 and says in response.json()["error"]["message"]
