"""What every handler needs: the service, what the server was told, and the way of a request to the
engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Response
from fastapi.responses import JSONResponse

from forerun.engine.scheduler import check_ids
from forerun.errors import RequestError, shorten
from forerun.llm import CHARACTERS
from forerun.server import bounds
from forerun.server.errors import ApiError
from forerun.server.lanes import Lane
from forerun.server.large_responses import LargeResponse
from forerun.server.service import Service
from forerun.server.tickets import Group, Order
from forerun.types import SALT
from forerun.worker_process import WORKERS

R = TypeVar("R")
PREPARATIONS = (
    2  # at once: each that computes may keep the interpreter from the engine for a moment
)
FEWEST = 4096  # characters that any prompt may have: they take no time worth a refusal
SHORT = 1 << 14  # bytes of an answer that is written on the spot


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What every handler needs: the service and what the server was told."""

    service: Service
    name: str
    fingerprint: str
    timeout: float
    max_prompt: int
    compiling: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(WORKERS))
    parsing: Lane = field(default_factory=lambda: Lane(1))
    preparing: Lane = field(default_factory=lambda: Lane(PREPARATIONS))
    writing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(PREPARATIONS))
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def turn(self) -> None:
        """Wait for a turn: in each round of the event loop one request goes on, so that however
        many come at once, /health and the tokens of others never wait for all of them."""
        async with self.beginning:
            await asyncio.sleep(0)

    def check(self, model: str | None) -> None:
        """Refuse a model that is not served."""
        if model is not None and model.removesuffix(":latest") != self.name.removesuffix(":latest"):
            message = f"there is no model {shorten(model)} here, only {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def check_limit(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt over this server's limit."""
        count = len(tokens)
        if self.max_prompt and count > self.max_prompt:
            raise ApiError(
                400, f"the prompt has {count} tokens, this server takes {self.max_prompt}", "prompt"
            )

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt over this server's limit, or over the context."""
        self.check_limit(tokens)
        count, context = len(tokens), self.service.llm.decoder.context
        if count >= context:
            raise RequestError(
                f"the prompt has {count} tokens, the context only {context}: shorten the prompt"
            )

    @property
    def most_characters(self) -> int:
        """Characters of the longest text that is tokenized."""
        room = self.service.llm.room
        return max(FEWEST, CHARACTERS * min(self.max_prompt or room, room))

    def check_characters(self, count: int) -> None:
        """Refuse a text that cannot be short enough, before it is tokenized."""
        if count > self.most_characters:
            message = f"the prompt has {count} characters, this server takes {self.most_characters}: shorten the prompt"
            raise ApiError(400, message, None, "context_length_exceeded")

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """A prompt as the model reads it. Raises ApiError, RequestError."""
        if isinstance(prompt, str):
            self.check_characters(len(prompt))
        else:
            self.check_prompt(prompt)
            check_ids(prompt, self.service.llm.decoder.config.vocab)
        tokens = self.service.llm.tokens(prompt)
        self.check_prompt(tokens)
        return tokens

    async def parse(self, body: bytes) -> Any:
        """The value that a body is. Raises as `prepare` does, and ValueError."""
        with self.service.place(1):
            return await bounds.parse_aside(body, self.parsing)

    async def prepare(self, work: Callable[..., R], *given: Any, count: int = 1) -> R:
        """What `work` makes of something given, beside the event loop: of few requests at once, and
        only where there is a place for `count` of them. Raises BusyError, UnavailableError,
        RequestError."""
        with self.service.place(count):
            return await self.preparing.do(work, *given)

    async def submit(self, orders: Sequence[Order]) -> Group:
        """Hand the orders of one request to the engine, with their grammar compiled for each: its
        thread never does that. As many are compiled at once as there are processes for it; others
        wait, and hold no thread meanwhile. Raises as the service does, RequestError for the
        grammar, TimeoutError."""
        grammar, compiler = orders[0].params.grammar, self.service.llm.engine.grammars
        if grammar is not None:
            owner = orders[0].tenant.partition(SALT)[0]
            compile_each = partial(compiler.compiled_each, grammar, len(orders), owner)
            async with asyncio.timeout(self.timeout or None):
                compiled = await to_thread.run_sync(compile_each, limiter=self.compiling)
            orders = [
                replace(order, compiled=own) for order, own in zip(orders, compiled, strict=True)
            ]
        return self.service.submit(orders, self.timeout)

    async def write(self, content: Callable[[], dict[str, Any]], size: int) -> Response:
        """The answer whose content has about `size` bytes; a long one is written beside the event
        loop."""
        if size < SHORT:
            return JSONResponse(content())
        return await to_thread.run_sync(lambda: LargeResponse(content()), limiter=self.writing)
