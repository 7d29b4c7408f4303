"""A server that speaks OpenAI's API: what it is, and one streamed request to it.

A request that fails is an `Answer` with one line in `error`, never an exception: only `connect`
raises, where nothing could be measured at all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from forerun.bench.server.answer import Answer, Speculated, message_of, one_line
from forerun.errors import ConfigError, ForerunError, RequestError, suggest

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids, or the messages of a chat
# Makers, as the `owned_by` of /v1/models names them, of servers that take the field.
TAKE_IGNORE_EOS = ("forerun", "vllm", "sglang", "llamacpp")
GIVE_TOKEN_IDS = ("forerun", "vllm")
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")  # vllm:spec_decode_..._total
IDLE = 2.0  # seconds that a connection is kept for the next request: less than servers keep it


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        url: of the server, with or without /v1.
        model: its name there; None where the server has one only.
        chat: ask by /v1/chat/completions instead of /v1/completions.
        key: for `Authorization: Bearer`; None sends none.
        timeout: most seconds to wait for the next piece of an answer.
    """

    url: str
    model: str | None = None
    chat: bool = False
    key: str | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            httpx2.URL(self.url)
        except (ValueError, httpx2.InvalidURL):
            good = False
        if not good or parts.query or parts.fragment or parts.username or parts.password:
            raise ConfigError(
                f"{self.url!r} is no address of a server: write it like http://127.0.0.1:8000"
            )
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout={self.timeout} is out of range: give seconds over 0")
        if self.key is not None and not (
            self.key.isascii() and self.key.isprintable() and self.key.strip()
        ):
            raise ConfigError("the API key is empty, or has characters that no HTTP header carries")

    @property
    def base(self) -> str:
        """The address before /v1."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


class Server:
    """A server that has said what it is. `model` is the one asked for, `maker` who made the server,
    `drafts` what a request may draft with where it may say so."""

    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient) -> None:
        self.endpoint, self.client = endpoint, client
        self.model, self.maker, self.drafts = "", "", list[str]()

    async def stream(self, answer: Answer, prompt: Prompt, fields: dict[str, Any]) -> None:
        """Send one request and fill `answer` until it ends; `fields` are those of the body besides
        prompt and model."""
        answer.sent = time.perf_counter()
        chat = self.endpoint.chat
        path, body = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
        asked = {
            "model": self.model,
            body: prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked |= {"ignore_eos": True} if self.maker in TAKE_IGNORE_EOS else {}
        asked |= {"return_token_ids": True} if self.maker in GIVE_TOKEN_IDS else {}
        longest = (
            2 * int(fields["max_tokens"]) + 16
        )  # chunks: more only from a server that does not count
        done = False
        try:
            async with (
                asyncio.timeout(self.endpoint.timeout) as patience,
                self.client.stream("POST", path, json=asked | fields) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise ForerunError(_refusal(response))
                events = aiter(httpx2.EventSource(response))
                async with aclosing(events):  # type: ignore[type-var]  # it is a generator
                    async for event in events:
                        done |= (
                            event.data == "[DONE]"
                        )  # read on to the end, so that the connection can be used again
                        if event.data and not done:
                            answer.add(event.data)
                            if len(answer.chunks) > longest:
                                raise ForerunError(
                                    f"it sends on after {fields['max_tokens']} tokens"
                                )
                        wait = IDLE if done else self.endpoint.timeout
                        patience.reschedule(asyncio.get_running_loop().time() + wait)
        except TimeoutError:
            answer.error = None if done else f"nothing came for {self.endpoint.timeout:g} s"
        except httpx2.HTTPError as error:
            answer.error = _trouble(error)
        except ForerunError as error:
            answer.error = str(error)
        if not answer.finished and answer.error is None:
            answer.error = "the stream ended before the answer did"

    async def counters(self) -> Speculated | None:
        """vLLM's totals since it started, over all its clients; None from other servers."""
        if self.maker != "vllm":
            return None
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                lines = (await self.client.get("/metrics")).text.splitlines()
            totals = dict.fromkeys(COUNTERS, 0)
            for line in lines:
                name = (
                    line.partition("{")[0]
                    .partition(" ")[0]
                    .removeprefix("vllm:spec_decode_")
                    .removesuffix("_total")
                )
                if name in totals:
                    totals[name] += int(float(line.rpartition(" ")[2]))
        except (httpx2.HTTPError, TimeoutError, ValueError, OverflowError):
            return None
        drafts, drafted, accepted = totals.values()
        return Speculated(drafted, accepted, drafts, drafts + accepted) if drafts else None

    async def introduce(self) -> None:
        """Ask what it is and which models it has. Raises ConfigError or ForerunError."""
        base, wanted = self.endpoint.base, self.endpoint.model
        listed = await self._get("/v1/models")
        models = [
            m
            for m in _items(listed, "data")
            if isinstance(m, dict) and isinstance(m.get("id"), str)
        ]
        if not models:
            raise ConfigError(
                f"{base} lists no model at /v1/models: it is no server of OpenAI's API, or has none loaded"
            )
        names = {str(m["id"]): m for m in models}
        if wanted is None and len(names) > 1:
            raise ConfigError(
                f"{base} has several models: give --model, one of {one_line(', '.join(names))}"
            )
        if wanted is not None and wanted not in names:
            raise ConfigError(
                f"{base} has no model {wanted!r}: it has {one_line(', '.join(names))}"
            )
        self.model = wanted or next(iter(names))
        self.maker = str(names[self.model].get("owned_by") or "")
        if self.maker == "forerun":
            self.drafts = [str(name) for name in _items(await self._get("/server_info"), "drafts")]

    def check_drafts(self, drafts: list[str]) -> None:
        """Raise ConfigError for drafts that a request cannot ask this server for."""
        for draft in drafts:
            if not self.drafts:
                raise ConfigError(
                    f"{self.endpoint.base} is not forerun's server: only that takes drafts by request"
                )
            if draft not in self.drafts:
                raise ConfigError(
                    f"{self.endpoint.base} has no draft {draft!r}: {suggest(draft, self.drafts)}"
                )

    async def _get(self, path: str) -> dict[str, Any]:
        base = self.endpoint.base
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                response = await self.client.get(path)
        except (httpx2.HTTPError, TimeoutError) as error:
            raise ForerunError(
                f"{base} does not answer ({_trouble(error)}): is the server running?"
            ) from None
        if response.status_code in (401, 403):
            raise ConfigError(
                f"{base} refuses the key ({_refusal(response)}): give --api-key-env NAME"
            )
        content = _object_in(response) if response.status_code == 200 else None
        if content is None:
            what = (
                _refusal(response) if response.status_code != 200 else one_line(response.text[:80])
            )
            raise ConfigError(f"{base} is no server of OpenAI's API: {path} gave {what}")
        return content


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Server]:
    """The server at an endpoint. Raises ConfigError for one that cannot be asked so, ForerunError
    if none answers."""
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    limits = httpx2.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE
    )
    try:
        client = httpx2.AsyncClient(
            base_url=endpoint.base, headers=headers, limits=limits, timeout=None
        )
    except (
        ValueError,
        OSError,
        ImportError,
    ) as error:  # the environment's proxies and certificates
        raise ConfigError(
            f"the HTTP client cannot be set up ({_trouble(error)}): look at HTTP_PROXY, SSL_CERT_FILE and their like"
        ) from None
    async with client:
        server = Server(endpoint, client)
        await server.introduce()
        yield server


def as_asked(prompt: Prompt, chat: bool) -> Prompt:
    """A prompt as the endpoint takes it: a text becomes a user's message. Raises RequestError where
    it cannot."""
    if not prompt:
        raise RequestError("there is an empty prompt: give a text, token ids or messages")
    messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
    if messages and not chat:
        raise RequestError(
            "a prompt is a chat, which /v1/completions does not take: ask by chat (--chat)"
        )
    if isinstance(prompt, list) and not messages and chat:
        raise RequestError(
            "a prompt is token ids, which a chat does not take: give texts, or leave --chat out"
        )
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def _items(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []


def _object_in(response: httpx2.Response) -> dict[str, Any] | None:
    """The JSON object that a response is; None for anything else."""
    try:
        content = response.json()
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refusal(response: httpx2.Response) -> str:
    """An HTTP status and what the server says about it."""
    content = _object_in(response)
    said = message_of(content) if content is not None else one_line(response.text[:80])
    return f"{response.status_code} {said}".strip()


def _trouble(error: Exception) -> str:
    """An error of the transport in one line, with its kind where it has no words."""
    return one_line(str(error)) or type(error).__name__
