"""Client for a running server with the OpenAI API: one streamed request and its statistics.

A request that fails is an `Answer` with one line in `error`, never an exception; only `connect`
raises. Statistics of speculative decoding are read in the formats of forerun, vLLM and llama.cpp.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import astuple, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from forerun.errors import ConfigError, ForerunError, RequestError, suggest

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids, or the messages of a chat
# Servers, as `owned_by` in /v1/models names them, that accept these fields of a request.
TAKE_IGNORE_EOS = ("forerun", "vllm", "sglang", "llamacpp")
GIVE_TOKEN_IDS = ("forerun", "vllm")
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")  # vllm:spec_decode_.._total
KEEPALIVE = 2.0  # seconds that a connection is kept: shorter than servers keep it
MAX_MESSAGE = 300  # characters of a server's message that are shown


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and options of a server.

    Attributes:
        url: of the server, with or without /v1.
        model: its name there; None where the server has only one.
        chat: use /v1/chat/completions instead of /v1/completions.
        key: sent as `Authorization: Bearer`; None sends none.
        timeout: maximum seconds to wait for the next piece of an answer.

    Raises:
        ConfigError: a value is invalid.
    """

    url: str
    model: str | None = None
    chat: bool = False
    key: str | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            httpx2.URL(self.url)
        except (ValueError, httpx2.InvalidURL):
            valid = False
        if not valid or parts.query or parts.fragment or parts.username or parts.password:
            raise ConfigError(f"{self.url!r} is no server URL: write it like http://127.0.0.1:8000")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout={self.timeout} is out of range: give seconds over 0")
        key = self.key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ConfigError(
                "the API key is empty or has characters that HTTP headers cannot carry"
            )

    @property
    def base(self) -> str:
        """The URL before /v1."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class SpecStats:
    """A server's statistics: drafted and accepted tokens, target forward passes, produced tokens.

    Passes are all that produced tokens if the server counts them, else only those with a draft.
    """

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    emitted: int = 0

    def __add__(self, other: SpecStats) -> SpecStats:
        return SpecStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: SpecStats) -> SpecStats:
        return SpecStats(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(slots=True)
class Answer:
    """One request and its answer so far; times are `time.perf_counter` seconds.

    Attributes:
        index: number of the request; the same prompt and seed for every draft.
        sent: time of sending.
        chunks: (time, tokens) of every piece of text; one token if the server does not say.
        text, token_ids: the output; ids only from servers that return them.
        counted: completion tokens by the server's usage, or None.
        prompt_tokens, cached_tokens: by the server's usage; cached_tokens may be None.
        stats: statistics of speculative decoding, or None.
        finished: True once the answer has a finish reason.
        done: True once the stream has sent [DONE].
        error: why it failed, in one line.
    """

    index: int
    sent: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    counted: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    stats: SpecStats | None = None
    finished: bool = False
    done: bool = False
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Number of completion tokens: from the server's usage, else counted in the stream."""
        return self.counted or sum(count for _, count in self.chunks)

    @property
    def scale(self) -> float:
        """Tokens of the answer per streamed token; 1 if the server counts a chunk's tokens."""
        streamed = sum(count for _, count in self.chunks)
        return self.tokens / streamed if streamed else 1.0

    def add(self, data: str) -> None:
        """Process one event of the stream. Raises ForerunError for an error or an invalid chunk."""
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise ForerunError(f"error in the stream: {error_message(chunk)}")
            choices = chunk.get("choices", [])
        except (ValueError, RecursionError, AttributeError):
            choices = None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ForerunError(f"the stream has an invalid chunk: {printable(data)}")
        for choice in choices:
            self._add_choice(choice)
            self.finished |= choice.get("finish_reason") is not None
        usage = _object(chunk, "usage")
        counted = _count(usage, "completion_tokens")
        if counted is not None:
            self.counted = counted
            self.prompt_tokens = _count(usage, "prompt_tokens") or 0
            self.cached_tokens = _count(_object(usage, "prompt_tokens_details"), "cached_tokens")
        self.stats = spec_stats(chunk) or self.stats

    def _add_choice(self, choice: dict[str, Any]) -> None:
        """Append text, reasoning and token ids of one choice."""
        delta = _object(choice, "delta")
        names = ("content", "reasoning", "reasoning_content")
        pieces = (choice.get("text"), *(delta.get(name) for name in names))
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            ids = None
        count = int(bool(text)) if ids is None else len(ids)
        if count:
            self.chunks.append((time.perf_counter(), count))
        self.text += text
        self.token_ids += ids or ()


class RunningServer:
    """A server that was asked for its models.

    Attributes:
        model: the model that requests name.
        maker: the server software, by `owned_by`.
        drafts: what a request may draft with, if the server lets requests choose.
    """

    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient) -> None:
        self.endpoint = endpoint
        self.client = client
        self.model = ""
        self.maker = ""
        self.drafts: list[str] = []

    async def stream(self, answer: Answer, prompt: Prompt, fields: dict[str, Any]) -> None:
        """Send one request and fill `answer` until it ends; `fields` complete the request body."""
        answer.sent = time.perf_counter()
        chat = self.endpoint.chat
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {
            "model": self.model,
            "messages" if chat else "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"ignore_eos": True} if self.maker in TAKE_IGNORE_EOS else {}
        body |= {"return_token_ids": True} if self.maker in GIVE_TOKEN_IDS else {}
        try:
            async with (
                asyncio.timeout(self.endpoint.timeout) as deadline,
                self.client.stream("POST", path, json=body | fields) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise ForerunError(_refusal(response))
                await self._read(response, answer, int(fields["max_tokens"]), deadline)
        except TimeoutError:
            if not answer.done:  # after [DONE] only the end of the stream is missing
                answer.error = f"nothing came for {self.endpoint.timeout:g} s"
        except httpx2.HTTPError as error:
            answer.error = _transport_error(error)
        except ForerunError as error:
            answer.error = str(error)
        if not answer.finished and answer.error is None:
            answer.error = "the stream ended before the answer did"

    async def _read(
        self, response: httpx2.Response, answer: Answer, max_tokens: int, deadline: asyncio.Timeout
    ) -> None:
        """Read the events of a stream to its end, so that the connection can be reused."""
        loop = asyncio.get_running_loop()
        events = aiter(httpx2.EventSource(response))
        async with aclosing(events):  # type: ignore[type-var]  # it is a generator
            async for event in events:
                answer.done |= event.data == "[DONE]"
                if event.data and not answer.done:
                    answer.add(event.data)
                    if len(answer.chunks) > 2 * max_tokens + 16:
                        raise ForerunError(f"it continues after {max_tokens} tokens")
                wait = KEEPALIVE if answer.done else self.endpoint.timeout
                deadline.reschedule(loop.time() + wait)

    async def counters(self) -> SpecStats | None:
        """Return vLLM's totals since its start, over all its clients; None for other servers."""
        if self.maker != "vllm":
            return None
        totals = dict.fromkeys(COUNTERS, 0)
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                lines = (await self.client.get("/metrics")).text.splitlines()
            for line in lines:
                name = line.partition("{")[0].partition(" ")[0]
                name = name.removeprefix("vllm:spec_decode_").removesuffix("_total")
                if name in totals:
                    totals[name] += int(float(line.rpartition(" ")[2]))
        except (httpx2.HTTPError, TimeoutError, ValueError, OverflowError):
            return None
        drafts, drafted, accepted = totals.values()
        return SpecStats(drafted, accepted, drafts, drafts + accepted) if drafts else None

    async def identify(self) -> None:
        """Ask for models, software and drafts. Raises ConfigError or ForerunError."""
        base = self.endpoint.base
        wanted = self.endpoint.model
        names: dict[str, dict[str, Any]] = {}
        for model in _list(await self._get("/v1/models"), "data"):
            if isinstance(model, dict) and isinstance(model.get("id"), str):
                names[model["id"]] = model
        if not names:
            raise ConfigError(
                f"{base} lists no model at /v1/models: it has no OpenAI API, or no model"
            )
        if wanted is None and len(names) > 1:
            raise ConfigError(
                f"{base} has several models: give --model, {printable(', '.join(names))}"
            )
        if wanted is not None and wanted not in names:
            raise ConfigError(
                f"{base} has no model {wanted!r}: it has {printable(', '.join(names))}"
            )
        self.model = wanted or next(iter(names))
        self.maker = str(names[self.model].get("owned_by") or "")
        if self.maker == "forerun":
            self.drafts = [str(name) for name in _list(await self._get("/server_info"), "drafts")]

    def check_drafts(self, drafts: list[str]) -> None:
        """Raise ConfigError for drafts that a request cannot choose on this server."""
        base = self.endpoint.base
        for draft in drafts:
            if not self.drafts:
                raise ConfigError(
                    f"{base} is not a forerun server: others take no draft per request"
                )
            if draft not in self.drafts:
                raise ConfigError(f"{base} has no draft {draft!r}: {suggest(draft, self.drafts)}")

    async def _get(self, path: str) -> dict[str, Any]:
        base = self.endpoint.base
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                response = await self.client.get(path)
        except (httpx2.HTTPError, TimeoutError) as error:
            reason = _transport_error(error)
            raise ForerunError(
                f"{base} does not answer ({reason}): is the server running?"
            ) from None
        if response.status_code in (401, 403):
            reason = _refusal(response)
            raise ConfigError(f"{base} refuses the key ({reason}): give --api-key-env NAME")
        content = _json_object(response) if response.status_code == 200 else None
        if content is None:
            refused = response.status_code != 200
            what = _refusal(response) if refused else printable(response.text[:80])
            raise ConfigError(f"{base} is no server with the OpenAI API: {path} gave {what}")
        return content


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[RunningServer]:
    """Connect to a server. Raises ConfigError if it cannot be used, ForerunError if it is gone."""
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    limits = httpx2.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE
    )
    try:
        client = httpx2.AsyncClient(
            base_url=endpoint.base, headers=headers, limits=limits, timeout=None
        )
    except (ValueError, OSError, ImportError) as error:  # proxies, certificates
        reason = _transport_error(error)
        raise ConfigError(
            f"the HTTP client cannot be set up ({reason}): check HTTP_PROXY and SSL_CERT_FILE"
        ) from None
    async with client:
        server = RunningServer(endpoint, client)
        await server.identify()
        yield server


def request_prompt(prompt: Prompt, chat: bool) -> Prompt:
    """Return a prompt as the endpoint takes it; with `chat` a text becomes a user message.

    Raises RequestError for a prompt that the endpoint cannot take.
    """
    if not prompt:
        raise RequestError("a prompt is empty: give a text, token ids or messages")
    is_messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
    if is_messages and not chat:
        raise RequestError("a prompt is a chat, which /v1/completions does not take: add --chat")
    if isinstance(prompt, list) and not is_messages and chat:
        raise RequestError("a prompt is token ids, which a chat does not take: leave --chat out")
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def spec_stats(chunk: dict[str, Any]) -> SpecStats | None:
    """Read a chunk's statistics in the formats of forerun, vLLM and llama.cpp; None without any."""
    metrics = _object(chunk, "metrics")
    own = _object(metrics, "forerun")
    if own:
        counts = _counts(own, "drafted", "accepted", "steps", "completion_tokens")
        return SpecStats(*counts) if counts else None
    vllm = _object(metrics, "speculative_decoding")
    if vllm:
        counts = _counts(vllm, "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
        if not counts:
            return None
        drafted, accepted, steps = counts
        return SpecStats(drafted, accepted, steps, accepted + steps)
    counts = _counts(_object(chunk, "timings"), "draft_n", "draft_n_accepted", "predicted_n")
    if not counts:
        return None
    drafted, accepted, emitted = counts
    return SpecStats(drafted, accepted, max(emitted - accepted, 0), emitted)


def error_message(content: dict[str, Any]) -> str:
    """Return the message of an error response in the formats that servers use."""
    error = content.get("error") or content.get("detail") or content
    return printable(str(error.get("message", error) if isinstance(error, dict) else error))


def printable(text: str) -> str:
    """Return a server's text in one printable line of limited length."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= MAX_MESSAGE else words[: MAX_MESSAGE - 3] + "..."


def _counts(values: dict[str, Any], *names: str) -> list[int] | None:
    """Return the counts of these names; None if one is missing."""
    counts = [_count(values, name) for name in names]
    return [count for count in counts if count is not None] if None not in counts else None


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None


def _object(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _list(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []


def _json_object(response: httpx2.Response) -> dict[str, Any] | None:
    try:
        content = response.json()
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refusal(response: httpx2.Response) -> str:
    """Return an HTTP status and the server's message."""
    content = _json_object(response)
    message = error_message(content) if content is not None else printable(response.text[:80])
    return f"{response.status_code} {message}".strip()


def _transport_error(error: Exception) -> str:
    return printable(str(error)) or type(error).__name__
