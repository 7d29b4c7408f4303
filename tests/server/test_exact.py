"""The same seed gives the same tokens over HTTP: beside other requests, with any draft, streamed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.serving import Serving, sse

COMPLETIONS = "/v1/completions"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def"
REQUEST: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0.8, "seed": 77}
REQUEST["return_token_ids"] = True
NAMES = {"type": "array", "items": {"type": "string", "maxLength": 12}}
SCHEMA = {
    "type": "object",
    "properties": {
        "names": NAMES | {"minItems": 2, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 1000},
    },
    "required": ["names", "size"],
    "additionalProperties": False,
}
DRAFTS = [
    {"draft": draft, "depth": depth} for draft in ("ngram", "suffix") for depth in (0, 1, 4, 64)
]


def token_ids(server: Serving, **options: Any) -> list[int]:
    (choice,) = server.answer(COMPLETIONS, REQUEST | options)["choices"]
    return list(choice["token_ids"])


@pytest.fixture(scope="module")
def alone(server: Serving) -> list[int]:
    """The tokens without speculation and without other requests."""
    tokens = token_ids(server, speculative=False)
    assert len(tokens) == 48
    assert token_ids(server, speculative=False, seed=78) != tokens
    return tokens


@pytest.mark.parametrize(
    "speculative",
    [True, {"draft": "off"}, {"draft": "auto"}, {"draft": "ngram", "depth": "auto"}, *DRAFTS],
    ids=json.dumps,
)
def test_drafts_and_depths_change_nothing(
    server: Serving, alone: list[int], speculative: object
) -> None:
    assert token_ids(server, speculative=speculative) == alone


def test_documents_streaming_and_traces_change_nothing(server: Serving, alone: list[int]) -> None:
    text = server.http.post("/detokenize", json={"tokens": alone}).json()["prompt"]
    assert token_ids(server, documents=[text, "unlike"], speculative={"depth": 8}) == alone
    body = REQUEST | {"stream": True, "trace": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as response:
        events = list(sse(response))
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == alone
    assert [t["id"] for e in events for t in e["x_spec"]["tokens"]] == alone
    assert {e["seed"] for e in events} == {77}


def test_other_requests_change_nothing(server: Serving, alone: list[int]) -> None:
    """32 different requests at the same time give what each of them gives alone."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_p": 0.9, "stop": ["\n\n"]}]
    kinds.append({"frequency_penalty": 1.0, "min_p": 0.02})
    bodies = [
        {"prompt": f"# {i}\n" + PROMPT[: 7 * i], "seed": i, "max_tokens": 20 + i}
        | {"return_token_ids": True, "speculative": i % 3 > 0}
        | kinds[i % 4]
        for i in range(31)
    ]
    bodies.insert(16, dict(REQUEST))

    def tokens(body: dict[str, Any]) -> list[int]:
        return list(server.answer(COMPLETIONS, body)["choices"][0]["token_ids"])

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(tokens, bodies))
    assert together[16] == alone
    for i in (0, 3, 9, 14, 22, 31):
        assert tokens(bodies[i]) == together[i], bodies[i]


def test_a_drawn_seed_is_reported_and_repeats(server: Serving) -> None:
    body = {k: v for k, v in REQUEST.items() if k != "seed"} | {"n": 2}
    first, second = (server.answer(COMPLETIONS, body) for _ in range(2))
    assert first["seed"] != second["seed"]
    for answer in (first, second):
        assert answer["seed"] < 1 << 53  # JavaScript must be able to represent it
        again = server.answer(COMPLETIONS, body | {"seed": answer["seed"], "speculative": False})
        assert again["seed"] == answer["seed"]
        tokens = [choice["token_ids"] for choice in answer["choices"]]
        assert [choice["token_ids"] for choice in again["choices"]] == tokens
        assert tokens[0] != tokens[1]


def test_negative_and_large_seeds(server: Serving) -> None:
    for seed in (-1, 0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)):
        first = server.answer(COMPLETIONS, REQUEST | {"seed": seed})
        again = token_ids(server, seed=first["seed"], speculative=False)
        assert first["choices"][0]["token_ids"] == again


@pytest.mark.parametrize("seed", range(4))
def test_structured_output_is_the_same_with_drafts(server: Serving, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {"prompt": "data = ", "response_format": form, "max_tokens": 120, "seed": seed}
    drafts = (False, True, {"draft": "ngram", "depth": 8}, {"draft": "suffix", "depth": 3})
    answers = [
        server.answer(COMPLETIONS, body | {"return_token_ids": True, "speculative": draft})
        for draft in drafts
    ]
    first = answers[0]["choices"][0]
    assert all(a["choices"][0]["token_ids"] == first["token_ids"] for a in answers)
    if first["finish_reason"] == "stop":
        value = json.loads(first["text"])
        assert 2 <= len(value["names"]) <= 3 and 0 <= value["size"] <= 1000
