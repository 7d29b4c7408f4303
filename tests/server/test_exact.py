"""Same seed, same tokens: over HTTP, in company, with any draft, whole or streamed."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.serving import Serving, sse

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def"
ASKED = {
    "prompt": PROMPT,
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 77,
    "return_token_ids": True,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 2,
            "maxItems": 3,
        },
        "size": {"type": "integer", "minimum": 0, "maximum": 1000},
    },
    "required": ["names", "size"],
    "additionalProperties": False,
}


def ids(server: Serving, **options: object) -> list[int]:
    (choice,) = server.answer("/v1/completions", ASKED | options)["choices"]
    return choice["token_ids"]


@pytest.fixture(scope="module")
def alone(server: Serving) -> list[int]:
    """The tokens without company and without speculation."""
    tokens = ids(server, speculative=False)
    assert len(tokens) == 48
    assert ids(server, speculative=False, seed=78) != tokens
    return tokens


@pytest.mark.parametrize(
    "speculative",
    [
        True,
        {"draft": "off"},
        {"draft": "auto"},
        {"draft": "ngram", "depth": "auto"},
        {"draft": "suffix", "rule": "match"},
        *(
            {"draft": draft, "depth": depth}
            for draft in ("ngram", "suffix")
            for depth in (0, 1, 4, 64)
        ),
    ],
    ids=json.dumps,
)
def test_drafts_and_depths_change_nothing(
    server: Serving, alone: list[int], speculative: object
) -> None:
    assert ids(server, speculative=speculative) == alone


def test_documents_change_nothing(server: Serving, alone: list[int]) -> None:
    text = server.http.post("/detokenize", json={"tokens": alone}).json()["prompt"]
    assert ids(server, documents=[text, "unlike"], speculative={"depth": 8}) == alone


def test_streaming_and_tracing_change_nothing(server: Serving, alone: list[int]) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json=ASKED | {"stream": True, "trace": True}
    ) as response:
        events = list(sse(response))
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == alone
    assert [t["id"] for e in events for t in e["x_spec"]["tokens"]] == alone
    assert {e["seed"] for e in events} == {77}


def test_company_changes_nothing(server: Serving, alone: list[int]) -> None:
    """The request among 31 others that run at the same time, all of them different; and each of
    those again alone."""

    def other(i: int) -> dict[str, object]:
        kinds = [
            {},
            {"temperature": 0},
            {"top_p": 0.9, "stop": ["\n\n"]},
            {"frequency_penalty": 1.0, "min_p": 0.02},
        ]
        body = {
            "prompt": f"# {i}\n" + PROMPT[: 7 * i],
            "seed": i,
            "max_tokens": 20 + i,
            "return_token_ids": True,
        }
        return body | kinds[i % 4] | {"speculative": i % 3 > 0}

    bodies = [other(i) for i in range(31)]
    bodies.insert(16, dict(ASKED))
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda body: server.answer("/v1/completions", body), bodies))
    together = [answer["choices"][0]["token_ids"] for answer in answers]
    assert together[16] == alone
    for i in (0, 3, 9, 14, 22, 31):
        assert (
            server.answer("/v1/completions", bodies[i])["choices"][0]["token_ids"] == together[i]
        ), bodies[i]


def test_a_seed_that_was_drawn_is_reported_and_repeats(server: Serving) -> None:
    body = {k: v for k, v in ASKED.items() if k != "seed"} | {"n": 2}
    first, second = (server.answer("/v1/completions", body) for _ in range(2))
    assert first["seed"] != second["seed"]
    for answer in (first, second):
        assert answer["seed"] < 1 << 53  # JavaScript's clients must be able to say it back
        again = server.answer(
            "/v1/completions", body | {"seed": answer["seed"], "speculative": False}
        )
        assert again["seed"] == answer["seed"]
        assert [c["token_ids"] for c in again["choices"]] == [
            c["token_ids"] for c in answer["choices"]
        ]
        assert again["choices"][0]["token_ids"] != again["choices"][1]["token_ids"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_every_endpoint_reports_its_seed(server: Serving, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Write."}], "max_tokens": 10}
    body = {"input": "Write.", "max_output_tokens": 10} if path == "/v1/responses" else chat

    def said(answer: dict) -> object:
        return (
            answer["output"][0]["content"]
            if "output" in answer
            else answer["choices"][0]["message"]
        )

    first = server.answer(path, body)
    again = server.answer(path, body | {"seed": first["seed"], "speculative": False})
    assert said(first) == said(again)


def test_negative_and_large_seeds(server: Serving) -> None:
    for seed in (-1, 0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)):
        first = server.answer("/v1/completions", ASKED | {"seed": seed})
        again = server.answer(
            "/v1/completions", ASKED | {"seed": first["seed"], "speculative": False}
        )
        assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]


@pytest.mark.parametrize("seed", range(4))
def test_structured_output_with_speculation_equals_without(server: Serving, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {
        "prompt": "data = ",
        "response_format": form,
        "max_tokens": 120,
        "seed": seed,
        "return_token_ids": True,
    }
    answers = [
        server.answer("/v1/completions", body | {"speculative": speculative})["choices"][0]
        for speculative in (
            False,
            True,
            {"draft": "ngram", "depth": 8},
            {"draft": "suffix", "depth": 3},
        )
    ]
    assert all(a["token_ids"] == answers[0]["token_ids"] for a in answers)
    if answers[0]["finish_reason"] == "stop":
        value = json.loads(answers[0]["text"])
        assert 2 <= len(value["names"]) <= 3 and 0 <= value["size"] <= 1000
