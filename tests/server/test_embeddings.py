"""Embeddings: the mean of the last hidden states of a forward pass, also while requests generate."""

from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np
import openai
import pytest
import torch

from forerun.kernels import native
from forerun.llm import LLM
from forerun.server.embeddings import CHUNK, EmbeddingBatch
from tests import tiny
from tests.server.serving import Client, serving, slow, sse

LONG = {"prompt": "x = 1\n", "max_tokens": 150, "ignore_eos": True, "seed": 4, "logprobs": 2}
LONG |= {"temperature": 0.8, "speculative": False, "return_token_ids": True}
NATIVE = pytest.mark.skipif(bool(native.reason()), reason="no native kernels")
KERNELS = ["torch", pytest.param("native", marks=NATIVE)]


def expected(directory: Any, tokens: list[int]) -> torch.Tensor:
    """Return the normalized mean of the states after the last norm, computed by transformers."""
    model = tiny.hf.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        states = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_an_embedding_is_the_mean_of_the_last_states(family: str, kernels: str) -> None:
    """The texts share forward passes, in chunks that are not aligned with pages."""
    directory = tiny.family(family)
    llm = LLM(directory, kernels=kernels, dtype="float32", chunk=10, page=16)
    texts = [[(7 * i + n) % tiny.VOCAB for i in range(n)] for n in (1, 5, 37)]
    batch = EmbeddingBatch(llm, texts)
    passes = 0
    while not batch.done:
        batch.step()
        passes += 1
    assert passes == 4
    for vector, text in zip(batch.vectors(), texts, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(vector), expected(directory, text), atol=2e-5, rtol=0
        )


def test_openai_client_reads_both_encodings(client: openai.OpenAI, api: Client) -> None:
    texts = ["def add(a, b):", "return a + b", "x"]
    packed = client.embeddings.create(model="tiny", input=texts)  # base64 by default
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = [entry.embedding for entry in plain.data]
    assert [entry.index for entry in packed.data] == [0, 1, 2]
    assert [entry.embedding for entry in packed.data] == vectors
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-6 for vector in vectors)
    ids = [api.answer("/tokenize", {"prompt": text})["tokens"] for text in texts]
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
    by_ids = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
    assert [entry.embedding for entry in by_ids.data] == vectors
    body = {"input": ids[0], "encoding_format": "base64", "dimensions": len(vectors[0])}
    encoded = api.answer("/v1/embeddings", body)["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(vectors[0])}f", base64.b64decode(encoded))) == vectors[0]


def test_embeddings_do_not_depend_on_other_texts(api: Client) -> None:
    texts = [f"line {i}\n" * (1 + 13 * i % 29) for i in range(40)]
    together = api.answer("/v1/embeddings", {"input": texts})["data"]
    for i in (0, 7, 39):
        (alone,) = api.answer("/v1/embeddings", {"input": texts[i]})["data"]
        assert alone["embedding"] == pytest.approx(together[i]["embedding"], abs=1e-6)


def test_ollama_formats_have_the_same_vectors(api: Client) -> None:
    def embed(given: Any) -> Any:
        return api.answer("/api/embed", {"model": "tiny", "input": given})

    data = api.answer("/v1/embeddings", {"input": ["one", "two"]})["data"]
    vectors = [entry["embedding"] for entry in data]
    answer = embed(["one", "two"])
    assert answer["embeddings"] == vectors and answer["model"] == "tiny"
    assert answer["prompt_eval_count"] > 1
    assert embed("one")["embeddings"][0] == pytest.approx(vectors[0])
    older = api.answer("/api/embeddings", {"model": "tiny", "prompt": "two"})
    assert older["embedding"] == pytest.approx(vectors[1])
    assert embed([])["embeddings"] == embed("")["embeddings"] == []
    long = "x = 1\n" * 3000
    ids = api.answer("/tokenize", {"prompt": long})["tokens"][:2048]
    (cut,) = api.answer("/v1/embeddings", {"input": ids})["data"]
    assert embed(long)["embeddings"][0] == cut["embedding"]


def test_generations_continue_unchanged_between_chunks(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities stay the same while texts larger than the page pool are read."""
    with serving(spare) as s:
        alone = s.answer("/v1/completions", LONG)["choices"][0]
        with slow(s.service), monkeypatch.context() as patch:
            order = recorded_order(spare, patch)
            with s.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
                events = sse(response)
                parts = [next(events)]
                texts = [[5 + i % 90 for i in range(2000)], [9, 8]]
                vectors = s.answer("/v1/embeddings", {"input": texts})["data"]
                during = list(order)
                parts += list(events)
        choices = [part["choices"][0] for part in parts]
        assert [token for c in choices for token in c["token_ids"]] == alone["token_ids"]
        values = [value for c in choices for value in c["logprobs"]["token_logprobs"]]
        assert values == alone["logprobs"]["token_logprobs"]
        assert len(vectors) == 2 and during.count("read") == -(-2000 // CHUNK) + 1
        assert "read read" not in " ".join(during)
        s.wait_until_idle()


def recorded_order(llm: LLM, patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with what the engine's thread does."""
    order: list[str] = []
    step, read = llm.engine.step, EmbeddingBatch.step
    patch.setattr(llm.engine, "step", lambda: order.append("step") or step())
    patch.setattr(EmbeddingBatch, "step", lambda self: order.append("read") or read(self))
    return order


def test_a_failure_is_reported_and_the_next_request_works(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(spare) as s:
        with monkeypatch.context() as patch:
            patch.setattr(EmbeddingBatch, "step", lambda self: 1 / 0)
            assert s.http.post("/v1/embeddings", json={"input": "a"}).status_code == 503
        assert s.http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
        assert s.complete()["choices"]


def test_a_shutdown_ends_work_between_chunks(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(spare) as s:
        read = EmbeddingBatch.step

        def last(self: EmbeddingBatch) -> None:
            read(self)
            s.service.draining = True

        monkeypatch.setattr(EmbeddingBatch, "step", last)
        response = s.http.post("/v1/embeddings", json={"input": [5] * 1000})
        assert response.status_code == 503 and response.headers["retry-after"]


def test_a_prompt_over_the_servers_limit_is_refused(spare: LLM) -> None:
    with serving(spare, max_prompt=3) as s:
        for path, body in (
            ("/v1/embeddings", {"input": [5] * 4}),
            ("/api/embed", {"model": "tiny", "input": "a b c d"}),
        ):
            assert "takes 3" in s.http.post(path, json=body).text
