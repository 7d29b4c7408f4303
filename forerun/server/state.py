"""State that all request handlers share, and the preparation of requests beside the event loop."""

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
from forerun.server import limits
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService, Job, RequestHandle
from forerun.server.large_responses import LargeResponse
from forerun.server.limits import ThrottledThreads
from forerun.types import SALT
from forerun.worker_process import WORKERS

R = TypeVar("R")
NUM_THREADS = 2  # each that computes may hold the interpreter lock for a moment
MIN_CHARACTERS = 4096  # a prompt of this length is always tokenized before it is judged
SMALL_RESPONSE = 1 << 14  # bytes of a response that is serialized on the event loop


@dataclass(frozen=True, slots=True)
class ServerState:
    """The engine service, the options of the server, and the threads that prepare requests.

    Attributes:
        service: front of the engine's thread.
        name: name of the model in the API.
        fingerprint: `system_fingerprint` of responses.
        timeout: seconds that a request may take; 0 for no limit.
        max_prompt: number of tokens a prompt may have; 0 for the model's context.
    """

    service: EngineService
    name: str
    fingerprint: str
    timeout: float
    max_prompt: int
    compiling: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(WORKERS))
    parsing: ThrottledThreads = field(default_factory=lambda: ThrottledThreads(1))
    preparing: ThrottledThreads = field(default_factory=lambda: ThrottledThreads(NUM_THREADS))
    writing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(NUM_THREADS))
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def wait_turn(self) -> None:
        """Let one request start in each iteration of the event loop.

        However many arrive together, /health and running streams never wait for all of them.
        """
        async with self.starting:
            await asyncio.sleep(0)

    def check(self, model: str | None) -> None:
        """Raise ApiError (404) for a model that is not served."""
        if model is not None and model.removesuffix(":latest") != self.name.removesuffix(":latest"):
            message = f"there is no model {shorten(model)} here, only {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def check_limit(self, tokens: Sequence[int]) -> None:
        """Raise ApiError for a prompt longer than --max-prompt."""
        if self.max_prompt and len(tokens) > self.max_prompt:
            message = f"the prompt has {len(tokens)} tokens, this server takes {self.max_prompt}"
            raise ApiError(400, message, "prompt")

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise an error for a prompt longer than --max-prompt or the context."""
        self.check_limit(tokens)
        context = self.service.llm.decoder.context
        if len(tokens) >= context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the context only {context}:"
                " shorten the prompt"
            )

    @property
    def most_characters(self) -> int:
        """Number of characters of the longest text that is tokenized."""
        room = self.service.llm.room
        return max(MIN_CHARACTERS, CHARACTERS * min(self.max_prompt or room, room))

    def check_characters(self, count: int) -> None:
        """Raise ApiError for a text that is too long however it is tokenized."""
        if count > self.most_characters:
            message = (
                f"the prompt has {count} characters, this server takes {self.most_characters}:"
                " shorten the prompt"
            )
            raise ApiError(400, message, None, "context_length_exceeded")

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raises ApiError or RequestError."""
        if isinstance(prompt, str):
            self.check_characters(len(prompt))
        else:
            self.check_prompt(prompt)
            check_ids(prompt, self.service.llm.decoder.config.vocab)
        tokens = self.service.llm.tokens(prompt)
        self.check_prompt(tokens)
        return tokens

    async def parse(self, body: bytes) -> Any:
        """Parse the JSON of a request body. Raises as `prepare` does, and ValueError."""
        with self.service.reserve(1):
            return await limits.parse_in_thread(body, self.parsing)

    async def prepare(self, work: Callable[..., R], *arguments: Any, count: int = 1) -> R:
        """Run `work` in a thread while `count` places in the queue are reserved.

        Raises BusyError or UnavailableError without a place, and whatever `work` raises.
        """
        with self.service.reserve(count):
            return await self.preparing.run(work, *arguments)

    async def submit(self, jobs: Sequence[Job]) -> RequestHandle:
        """Compile the grammar of the jobs of one request in a worker process, then submit them.

        Raises as `EngineService.submit` does, RequestError for the grammar, or TimeoutError.
        """
        grammar = jobs[0].params.grammar
        if grammar is not None:
            tenant = jobs[0].tenant.partition(SALT)[0]
            compiler = self.service.llm.engine.grammars
            compile_each = partial(compiler.compiled_each, grammar, len(jobs), tenant)
            async with asyncio.timeout(self.timeout or None):
                compiled = await to_thread.run_sync(compile_each, limiter=self.compiling)
            jobs = [replace(job, compiled=own) for job, own in zip(jobs, compiled, strict=True)]
        return self.service.submit(jobs, self.timeout)

    async def write(self, content: Callable[[], dict[str, Any]], size: int) -> Response:
        """Build a response of about `size` bytes; a large one is serialized in a thread."""
        if size < SMALL_RESPONSE:
            return JSONResponse(content())
        return await to_thread.run_sync(lambda: LargeResponse(content()), limiter=self.writing)
