"""/v1/embeddings: texts as the mean of the model's last hidden states, of length 1.

Texts are read on the engine's thread between its steps, one chunk at a time and in a cache of their
own: whoever generates meanwhile waits for a small chunk at most, and says the same.
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
from forerun.draft.proposer import view_of
from forerun.errors import BusyError, ForerunError
from forerun.llm import LLM
from forerun.runtime.torch_runner import Runner
from forerun.server import sizes
from forerun.server.api import unless_gone
from forerun.server.errors import ApiError, UnavailableError
from forerun.server.protocol import EmbeddingsRequest
from forerun.server.state import ServerState

log = logging.getLogger("forerun.server")
MOST_TEXTS = 2048  # of one request, as with OpenAI
TOGETHER = 16  # texts in one pass
CHUNK = 128  # most tokens of one pass, which others wait for
Content = Callable[
    [np.ndarray, int], dict[str, Any]
]  # what an answer holds, of vectors and the tokens read


class Embedder:
    """Makes vectors of texts, for one request after the other."""

    def __init__(self, kitchen: ServerState) -> None:
        self.kitchen, self.service, self.llm = kitchen, kitchen.service, kitchen.service.llm
        self.waiting, self._turn = 0, asyncio.Lock()

    async def answer(
        self,
        http: Request,
        given: str | list[Any],
        content: Content,
        cut: bool = False,
        each: int = sizes.FLOAT,
    ) -> Response:
        """The answer with this content, for vectors of what is given and how many tokens were read;
        none once the client is gone. `cut` is that of `tokens_of`; `each` number of a vector takes
        so many bytes. Raises as `embed` does."""

        async def work() -> Response:
            texts = await self.kitchen.prepare(tokens_of, self.kitchen, given, cut)
            size = len(texts) * self.llm.decoder.config.hidden * each
            sizes.check(size, "send fewer texts at once, or ask for encoding_format base64")
            vectors = await self.embed(texts)
            return await self.kitchen.write(lambda: content(vectors, sum(map(len, texts))), size)

        return await unless_gone(http, work())

    async def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """One vector a text: float32 [texts, hidden]. Raises ApiError, BusyError, UnavailableError,
        TimeoutError."""
        self.service.admit(1)
        if self.waiting >= self.service.limit:
            raise BusyError(
                f"{self.waiting} requests for embeddings are waiting already: try again in a moment"
            )
        self.waiting += 1
        try:
            async with asyncio.timeout(self.kitchen.timeout or None), self._turn:
                return np.concatenate(
                    [await self._read(group) for group in _groups(self.llm, texts)]
                )
        finally:
            self.waiting -= 1

    async def _read(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        reading = Reading(self.llm, texts)
        try:
            while not reading.done:
                self.service.admit(0)  # a shutdown ends it between two chunks
                await self.service.call(reading.step)
        except (ForerunError, UnavailableError):
            raise
        except Exception as error:
            log.exception("a text could not be read")
            raise UnavailableError(
                f"the engine failed while it read a text: {type(error).__name__}"
            ) from None
        return reading.vectors()


class Reading:
    """Texts that are read together: a few short ones in one pass, or a long one in chunks."""

    def __init__(self, llm: LLM, texts: Sequence[Sequence[int]]) -> None:
        self.decoder, self.texts, self.chunk, self.page = (
            llm.decoder,
            texts,
            chunk_of(llm),
            llm.config.page,
        )
        self.at, self.normalise = 0, view_of(llm.decoder).normalise
        self.sums = torch.zeros(len(texts), llm.decoder.config.hidden, dtype=torch.float64)
        self.runner: Runner | None = None

    @property
    def done(self) -> bool:
        """Whether all of every text has been read."""
        return self.at >= max(len(text) for text in self.texts)

    def step(self) -> None:
        """Read the next chunk. On the engine's thread."""
        if self.runner is None:
            pages = sum(-(-len(text) // self.page) for text in self.texts)
            self.runner = Runner(
                self.decoder, tokens=pages * self.page, page=self.page, slots=len(self.texts)
            )
        segments = []
        for slot, text in enumerate(self.texts):
            tokens = list(text[self.at : self.at + self.chunk])
            if not tokens:
                continue
            self.runner.cache.pages.grow(slot, len(text))
            segments.append(Segment(slot, tokens, list(range(-1, len(tokens) - 1)), want=[]))
        last = self.decoder.config.layers
        states = (
            self.normalise(self.runner.forward(segments, (last,)).features[last]).double().cpu()
        )
        for segment, part in zip(
            segments, torch.split(states, [len(s.tokens) for s in segments]), strict=True
        ):
            self.sums[segment.slot] += part.sum(0)
            self.runner.cache.commit(segment.slot, range(len(segment.tokens)))
        self.at += self.chunk

    def vectors(self) -> np.ndarray:
        """The vectors of all that has been read: a mean and a sum have the same direction."""
        return torch.nn.functional.normalize(self.sums, dim=1).float().numpy()


def chunk_of(llm: LLM) -> int:
    """Tokens that are read in one pass."""
    return min(CHUNK, llm.config.chunk)


def _groups(llm: LLM, texts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """The texts in order, as many together as a chunk holds."""
    groups: list[list[Sequence[int]]] = []
    for text in texts:
        last = groups[-1] if groups else []
        if last and len(last) < TOGETHER and sum(map(len, last)) + len(text) <= chunk_of(llm):
            last.append(text)
        else:
            groups.append([text])
    return groups


def tokens_of(kitchen: ServerState, given: str | list[Any], cut: bool = False) -> list[list[int]]:
    """What is to be embedded, as token ids; `cut` shortens texts to what the model takes. Raises
    ApiError."""
    llm = kitchen.service.llm
    many = isinstance(given, list) and not (given and isinstance(given[0], int))
    items: list[Any] = given if many and isinstance(given, list) else [given]
    if not 0 < len(items) <= MOST_TEXTS:
        raise ApiError(400, f"input has {len(items)} texts: give 1 to {MOST_TEXTS}", "input")
    texts, vocab = list[list[int]](), llm.decoder.config.vocab
    for item in items:
        if cut:
            item = item[: kitchen.most_characters]
        elif isinstance(item, str):
            kitchen.check_characters(len(item))
        texts.append(llm.tokens(item)[: llm.room if cut else None])
        kitchen.check_limit(texts[-1])
        if len(texts[-1]) > llm.room:
            message = f"a text has {len(texts[-1])} tokens, this model takes {llm.room}: shorten it"
            raise ApiError(400, message, "input")
    for text in texts:
        if not text:
            raise ApiError(400, "input has a text without tokens: leave it out", "input")
        if not all(0 <= token < vocab for token in text):
            raise ApiError(400, f"input must hold token ids under {vocab}, or texts", "input")
    return texts


def check_size(llm: LLM, wanted: int | None) -> None:
    """Refuse vectors of another size than the model's: cut ones would say little. Raises
    ApiError."""
    size = llm.decoder.config.hidden
    if wanted not in (None, size):
        raise ApiError(
            400, f"dimensions={wanted} is not supported: this model has {size}", "dimensions"
        )


async def embeddings(
    kitchen: ServerState, embedder: Embedder, body: EmbeddingsRequest, http: Request
) -> Response:
    """Answer /v1/embeddings."""
    kitchen.check(body.model)
    check_size(kitchen.service.llm, body.dimensions)

    def content(vectors: np.ndarray, count: int) -> dict[str, Any]:
        packed = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": _base64(vector) if packed else vector.tolist(),
            }
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": kitchen.name, "usage": usage}

    each = sizes.BASE64_FLOAT if body.encoding_format == "base64" else sizes.FLOAT
    return await embedder.answer(http, body.input, content, each=each)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
