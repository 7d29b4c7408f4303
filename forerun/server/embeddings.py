"""/v1/embeddings: the mean of a text's last hidden states, normalised to length 1.

Texts are processed on the engine's thread between its steps, one chunk at a time and in a cache of
their own, so that running generations wait for one small chunk at most and do not change.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fastapi import Request, Response

from forerun.cache.attention import Segment
from forerun.devices import as_tensor
from forerun.draft.proposer import view_of
from forerun.errors import BusyError, ForerunError
from forerun.llm import LLM
from forerun.runtime.torch_runner import Runner
from forerun.server.errors import ApiError, UnavailableError
from forerun.server.large_responses import BASE64_FLOAT_BYTES, FLOAT_BYTES, check_size
from forerun.server.protocol import EmbeddingsRequest
from forerun.server.state import ServerState
from forerun.server.streaming import unless_disconnected

log = logging.getLogger("forerun.server")
MAX_TEXTS = 2048  # of one request, as with OpenAI
MAX_BATCH = 16  # texts in one forward pass
CHUNK = 128  # tokens of one forward pass, for which running generations wait
# Returns the body of a response from vectors and the number of tokens that were processed.
MakeContent = Callable[[np.ndarray, int], dict[str, Any]]


async def embeddings(
    state: ServerState, embedder: Embedder, body: EmbeddingsRequest, http: Request
) -> Response:
    """Answer /v1/embeddings."""
    state.check(body.model)
    check_dimensions(state.service.llm, body.dimensions)
    encoded = body.encoding_format == "base64"

    def content(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
        values = [_base64(vector) if encoded else vector.tolist() for vector in vectors]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": value}
                for i, value in enumerate(values)
            ],
            "model": state.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    float_bytes = BASE64_FLOAT_BYTES if encoded else FLOAT_BYTES
    return await embedder.respond(http, body.input, content, float_bytes=float_bytes)


def check_dimensions(llm: LLM, dimensions: int | None) -> None:
    """Refuse vectors of another size than the model's. Raises ApiError."""
    size = llm.decoder.config.hidden
    if dimensions not in (None, size):
        message = f"dimensions={dimensions} is not supported: this model has {size}"
        raise ApiError(400, message, "dimensions")


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class Embedder:
    """Computes embeddings for one request after the other."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.service = state.service
        self.llm = state.service.llm
        self.waiting = 0
        self._lock = asyncio.Lock()

    async def respond(
        self,
        http: Request,
        texts: str | list[Any],
        content: MakeContent,
        truncate: bool = False,
        float_bytes: int = FLOAT_BYTES,
    ) -> Response:
        """Return the response for texts or token ids; stop when the client disconnects.

        `truncate` shortens texts to what the model takes; `float_bytes` is the size of one element
        of a vector in the response. Raises as `embed` does.
        """

        async def work() -> Response:
            token_ids = await self.state.prepare(_encode, self.state, texts, truncate)
            size = len(token_ids) * self.llm.decoder.config.hidden * float_bytes
            check_size(size, "send fewer texts at once, or ask for encoding_format base64")
            vectors = await self.embed(token_ids)
            num_tokens = sum(map(len, token_ids))
            return await self.state.write(lambda: content(vectors, num_tokens), size)

        return await unless_disconnected(http, work())

    async def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return one vector for each text: float32 [texts, hidden].

        Raises ApiError, BusyError, UnavailableError, TimeoutError.
        """
        self.service.admit(1)
        if self.waiting >= self.service.limit:
            message = f"{self.waiting} requests for embeddings are waiting already"
            raise BusyError(f"{message}: try again in a moment")
        self.waiting += 1
        try:
            async with asyncio.timeout(self.state.timeout or None), self._lock:
                batches = [await self._run(batch) for batch in _batches(self.llm, texts)]
                return np.concatenate(batches)
        finally:
            self.waiting -= 1

    async def _run(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        batch = EmbeddingBatch(self.llm, texts)
        try:
            while not batch.done:
                self.service.admit(0)  # a shutdown ends it between two chunks
                await self.service.call(batch.step)
        except (ForerunError, UnavailableError):
            raise
        except Exception as error:
            log.exception("an embedding failed")
            message = f"the engine failed while it read a text: {type(error).__name__}"
            raise UnavailableError(message) from None
        return batch.vectors()


class EmbeddingBatch:
    """Texts that are processed together: a few short ones at once, or a long one in chunks."""

    def __init__(self, llm: LLM, texts: Sequence[Sequence[int]]) -> None:
        self.decoder = llm.decoder
        self.texts = texts
        self.chunk = chunk_size(llm)
        self.page = llm.config.page
        self.position = 0
        self.normalise = view_of(llm.decoder).normalise
        self.sums = torch.zeros(len(texts), llm.decoder.config.hidden, dtype=torch.float64)
        self.runner: Runner | None = None

    @property
    def done(self) -> bool:
        return self.position >= max(len(text) for text in self.texts)

    def step(self) -> None:
        """Process the next chunk; called on the engine's thread."""
        if self.runner is None:
            pages = sum(-(-len(text) // self.page) for text in self.texts)
            self.runner = Runner(
                self.decoder, tokens=pages * self.page, page=self.page, slots=len(self.texts)
            )
        segments = []
        for slot, text in enumerate(self.texts):
            tokens = list(text[self.position : self.position + self.chunk])
            if not tokens:
                continue
            self.runner.cache.pages.grow(slot, len(text))
            segments.append(Segment.chain(slot, tokens))
        last = self.decoder.config.layers
        features = self.runner.forward(segments, (last,)).features[last]
        states = self.normalise(as_tensor(features)).double().cpu()
        parts = torch.split(states, [len(segment.tokens) for segment in segments])
        for segment, part in zip(segments, parts, strict=True):
            self.sums[segment.slot] += part.sum(0)
            self.runner.cache.commit(segment.slot, range(len(segment.tokens)))
        self.position += self.chunk

    def vectors(self) -> np.ndarray:
        """Return the vectors, float32 [texts, hidden]: a sum has the direction of the mean."""
        return torch.nn.functional.normalize(self.sums, dim=1).float().numpy()


def chunk_size(llm: LLM) -> int:
    return min(CHUNK, llm.config.chunk)


def _batches(llm: LLM, texts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the texts in order, in batches that fit into one chunk where texts are short."""
    batches: list[list[Sequence[int]]] = []
    for text in texts:
        last = batches[-1] if batches else []
        fits = sum(map(len, last)) + len(text) <= chunk_size(llm)
        if last and len(last) < MAX_BATCH and fits:
            last.append(text)
        else:
            batches.append([text])
    return batches


def _encode(state: ServerState, given: str | list[Any], truncate: bool) -> list[list[int]]:
    """Return the token ids of every text. Raises ApiError."""
    llm = state.service.llm
    vocab = llm.decoder.config.vocab
    is_single = isinstance(given, str) or (given and isinstance(given[0], int))
    items = [given] if is_single else list(given)
    if not 0 < len(items) <= MAX_TEXTS:
        raise ApiError(400, f"input has {len(items)} texts: give 1 to {MAX_TEXTS}", "input")
    texts: list[list[int]] = []
    for item in items:
        if truncate:
            item = item[: state.most_characters]
        elif isinstance(item, str):
            state.check_characters(len(item))
        tokens = llm.tokens(item)[: llm.room if truncate else None]
        state.check_limit(tokens)
        if len(tokens) > llm.room:
            message = f"a text has {len(tokens)} tokens, this model takes {llm.room}: shorten it"
            raise ApiError(400, message, "input")
        texts.append(tokens)
    for text in texts:
        if not text:
            raise ApiError(400, "input has a text without tokens: leave it out", "input")
        if not all(0 <= token < vocab for token in text):
            raise ApiError(400, f"input must hold token ids under {vocab}, or texts", "input")
    return texts
