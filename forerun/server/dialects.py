"""How answers are written, whole or line by line: what all endpoints share, and OpenAI's
completions and chats."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from forerun.models.tokenizer import Tokenizer
from forerun.server import errors, sizes, tools
from forerun.server.answers import (
    Answer,
    chat_logprobs,
    completion_logprobs,
    finish,
    metrics,
    prompt_logprobs,
    trace,
    usage,
)
from forerun.server.jobs import Job
from forerun.server.protocol import ChatRequest, CompletionRequest, Generation, StreamOptions
from forerun.server.state import ServerState
from forerun.types import Event
from forerun.utils import json_line

ECHOED = 16  # tokens of a prompt in one chunk of a stream, where they come with log-probabilities


class Dialect:
    """How one endpoint writes the answers to a request.

    Attributes:
        streams: whether they are written line by line.
        left_out: fields of the request that had no effect.
        closing: the last line, whatever came of it.
    """

    media_type = "text/event-stream"
    headers: ClassVar[dict[str, str]] = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    closing = ""
    entry = 0  # bytes of one log-probability, where they are written

    def __init__(self, streams: bool, left_out: Sequence[str]) -> None:
        self.streams, self.left_out = streams, left_out

    def weight(self, orders: Sequence[Job], lengths: Sequence[int]) -> int:
        """About how many bytes the answer has, with so many tokens for each order."""
        return sum(
            sizes.of_choice(o, count, self.entry, False)
            for o, count in zip(orders, lengths, strict=True)
        )

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        raise NotImplementedError

    def begin(self, answers: Sequence[Answer]) -> Iterable[str]:
        """Lines before anything has been said."""
        return ()

    def lines(self, answers: Sequence[Answer], index: int, event: Event) -> Iterable[str]:
        """Lines for an event that has just been added to the answer at `index`."""
        raise NotImplementedError

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        """Lines behind the last event."""
        return ()

    def failed(self, error: Exception) -> str:
        """The line that says what has ended it."""
        raise NotImplementedError


class Choices(Dialect):
    """OpenAI's completions and chats. `body` is the request, n its completions for each prompt."""

    closing = "data: [DONE]\n\n"
    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, kitchen: ServerState, body: Generation, n: int, seed: int | None) -> None:
        super().__init__(bool(body.stream), body.left_out)
        self.body, self.n, self.options = body, n, body.stream_options or StreamOptions()
        self.tokenizer, self.sampling = kitchen.service.llm.tokenizer, kitchen.service.llm.sampling
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": kitchen.name,
            "system_fingerprint": kitchen.fingerprint,
            "seed": seed,
        }

    def weight(self, orders: Sequence[Job], lengths: Sequence[int]) -> int:
        ids, scores = bool(self.body.return_token_ids), self.body.prompt_logprobs is not None
        size = sum(
            sizes.of_choice(o, count, self.entry, ids)
            for o, count in zip(orders, lengths, strict=True)
        )
        return size + (
            sum(sizes.of_prompt(order, sizes.LONG_ENTRY) for order in orders) if scores else 0
        )

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self.choice(answer, i) for i, answer in enumerate(answers)]
        counted = {"usage": usage(answers, self.n), "metrics": metrics(answers)}
        return {**self.head, "object": self.kind, "choices": choices, **counted}

    def lines(self, answers: Sequence[Answer], index: int, event: Event) -> Iterable[str]:
        more: dict[str, Any] = {}
        if event.round is not None:
            more["x_spec"] = trace(event.round, event, self.tokenizer)
        if self.options.continuous_usage_stats:
            more["usage"] = usage(answers, self.n)
        return [self.chunk([self.change(answers[index], index, event)], **more)]

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        if self.options.include_usage:
            yield self.chunk([], usage=usage(answers, self.n), metrics=metrics(answers))

    def failed(self, error: Exception) -> str:
        return event_line(errors.logged_body(error)[1])

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """One chunk of a streamed answer."""
        return event_line({**self.head, "object": self.chunk_kind, "choices": choices, **more})

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """One choice of a whole answer."""
        raise NotImplementedError

    def change(self, answer: Answer, index: int, event: Event) -> dict[str, Any]:
        """The choice of the chunk for an event that has just been added to `answer`."""
        raise NotImplementedError

    def with_ids(self, choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return choice | {"token_ids": token_ids} if self.body.return_token_ids else choice

    def scored(self, answer: Answer) -> list[dict[str, Any] | None]:
        """The log-probabilities of the prompt in vLLM's shape."""
        return prompt_logprobs(
            answer.prompt_logprobs, self.body.prompt_logprobs or 0, self.tokenizer
        )


class Completions(Choices):
    """OpenAI's text completions.

    `echoes` are the prompts as texts, where they are to be repeated; `spelled` are their tokens as
    texts, where they are repeated with log-probabilities.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    entry = sizes.ENTRY

    def __init__(
        self,
        kitchen: ServerState,
        body: CompletionRequest,
        n: int,
        seed: int | None,
        prompts: list[list[int]],
    ) -> None:
        super().__init__(kitchen, body, n, seed)
        self.prompts, self.top = prompts, body.logprobs or 0
        tokenizer = self.tokenizer if body.echo else None
        self.echoes = [tokenizer.decode(prompt) if tokenizer else "" for prompt in prompts]
        self.spelled: list[list[str]] = []
        if body.echo and body.logprobs is not None:
            self.spelled = [_pieces(tokenizer, prompt) for prompt in prompts]
            self.echoes = ["".join(pieces) for pieces in self.spelled]

    def weight(self, orders: Sequence[Job], lengths: Sequence[int]) -> int:
        size = super().weight(orders, lengths)
        size += self.n * sum(len(echo.encode()) for echo in self.echoes)
        return size + (
            sum(sizes.of_prompt(order, self.entry) for order in orders) if self.spelled else 0
        )

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        at = index // self.n
        text, reason = self.echoes[at] + answer.text, finish(answer.finish_reason)
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
        if self.spelled:
            tokens, pieces = self.prompts[at] + answer.token_ids, self.spelled[at] + answer.pieces
            entries = [*answer.prompt_logprobs, *answer.logprobs]
            choice["logprobs"] = completion_logprobs(
                tokens, entries, pieces, 0, self.tokenizer, self.top
            )
        elif answer.has_logprobs:
            ids, entries = answer.token_ids, list(answer.logprobs)
            choice["logprobs"] = completion_logprobs(
                ids, entries, answer.pieces, 0, self.tokenizer, self.top
            )
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.scored(answer)
        return self.with_ids(choice, answer.token_ids)

    def lines(self, answers: Sequence[Answer], index: int, event: Event) -> Iterable[str]:
        if self.spelled and event.prompt_logprobs is not None:
            yield from self._echoed(index, event)
        yield from super().lines(answers, index, event)

    def _echoed(self, index: int, event: Event) -> Iterable[str]:
        """Chunks that repeat a prompt with its log-probabilities."""
        tokens, pieces, offset = self.prompts[index // self.n], self.spelled[index // self.n], 0
        for at in range(0, len(tokens), ECHOED):
            part = slice(at, at + ECHOED)
            entries = (event.prompt_logprobs or [])[part]
            logprobs = completion_logprobs(
                tokens[part], entries, pieces[part], offset, self.tokenizer, self.top
            )
            text = "".join(pieces[part])
            offset += len(text)
            yield self.chunk(
                [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]
            )

    def change(self, answer: Answer, index: int, event: Event) -> dict[str, Any]:
        echo = self.echoes[index // self.n]
        is_first = len(answer.token_ids) == len(event.token_ids) and not self.spelled
        choice = {"index": index, "text": (echo if is_first else "") + event.text, "logprobs": None}
        choice["finish_reason"] = finish(event.finish_reason)
        if event.logprobs is not None:
            before, ids = len(echo) + answer.characters - len(event.text), event.token_ids
            choice["logprobs"] = completion_logprobs(
                ids, event.logprobs, event.pieces, before, self.tokenizer, self.top
            )
        return self.with_ids(choice, event.token_ids)


def _pieces(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> list[str]:
    """The text that each token of a prompt makes whole."""
    if tokenizer is None:
        return [""] * len(prompt)
    decoding = tokenizer.stream([])
    pieces = [decoding.append(token) for token in prompt]
    return [*pieces[:-1], pieces[-1] + decoding.flush()]


class Chat(Choices):
    """OpenAI's chat completions, tool calls included."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    entry = sizes.LONG_ENTRY

    def __init__(self, kitchen: ServerState, body: ChatRequest, n: int, seed: int | None) -> None:
        super().__init__(kitchen, body, n, seed)
        self.tools = (body.tools or []) if body.tool_choice != "none" else []
        # of each choice that is streamed: what looks for calls in it, and how many there were
        self.readers: defaultdict[int, tools.CallReader] = defaultdict(
            partial(tools.CallReader, self.tools)
        )
        self.called: defaultdict[int, int] = defaultdict(int)

    def found(self, answer: Answer) -> tuple[str, list[dict[str, Any]]]:
        """(the text without calls, the calls in OpenAI's shape) of an answer: of several calls the
        first, where the request asks for no parallel ones."""
        if not self.tools:
            return answer.text, []
        text, calls = tools.find(answer.text, self.tools)
        return text, calls[:1] if self.body.parallel_tool_calls is False else calls

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text, calls = self.found(answer)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else finish(answer.finish_reason),
            "logprobs": chat_logprobs(answer.logprobs, self.tokenizer)
            if answer.has_logprobs
            else None,
        }
        return self.with_ids(choice, answer.token_ids)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        scored = (
            {}
            if self.body.prompt_logprobs is None
            else {"prompt_logprobs": self.scored(answers[0])}
        )
        return super().whole(answers) | scored

    def begin(self, answers: Sequence[Answer]) -> Iterable[str]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        for i in range(len(answers)):
            yield self.chunk(
                [{"index": i, "delta": delta, "finish_reason": None, "logprobs": None}]
            )

    def change(self, answer: Answer, index: int, event: Event) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        reason = finish(event.finish_reason)
        text, calls = self._certain(index, event) if self.tools else (event.text, [])
        if text or reason or not self.tools:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [
                {"index": self.called[index] + i, **call} for i, call in enumerate(calls)
            ]
            self.called[index] += len(calls)
        if reason and self.called[index]:
            reason = "tool_calls"
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if event.logprobs is not None:
            choice["logprobs"] = chat_logprobs(event.logprobs, self.tokenizer)
        return self.with_ids(choice, event.token_ids)

    def _certain(self, index: int, event: Event) -> tuple[str, list[dict[str, Any]]]:
        """(text, calls) of a streamed choice that are certain with an event."""
        text, calls = self.readers[index].add(event.text)
        if event.finish_reason is not None:
            rest, more = self.readers[index].end()
            text, calls = text + rest, calls + more
        if self.body.parallel_tool_calls is False:
            calls = calls[: max(1 - self.called[index], 0)]
        return text, calls


def event_line(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json_line(value)}\n\n"
