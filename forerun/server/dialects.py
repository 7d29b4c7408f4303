"""How answers are written, whole or line by line: what all endpoints share, and OpenAI's completions and chats."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from forerun.jsonl import json_line
from forerun.server import errors, tools
from forerun.server.answers import Answer, chat_logprobs, completion_logprobs, finish, metrics, trace, usage
from forerun.server.kitchen import Kitchen
from forerun.server.protocol import ChatRequest, CompletionRequest, Generation, StreamOptions
from forerun.types import Event


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

    def __init__(self, streams: bool, left_out: Sequence[str]) -> None:
        self.streams, self.left_out = streams, left_out

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

    def __init__(self, kitchen: Kitchen, body: Generation, n: int, seed: int | None) -> None:
        super().__init__(bool(body.stream), body.left_out)
        self.body, self.n, self.options = body, n, body.stream_options or StreamOptions()
        self.tokenizer = kitchen.service.llm.tokenizer
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": kitchen.name,
            "system_fingerprint": kitchen.fingerprint,
            "seed": seed,
        }

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
        return event_line(errors.told(error)[1])

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


class Completions(Choices):
    """OpenAI's text completions. `echoes` are the prompts as texts, where they are to be repeated."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, kitchen: Kitchen, body: CompletionRequest, n: int, seed: int | None, prompts: list[list[int]]
    ) -> None:
        super().__init__(kitchen, body, n, seed)
        tokenizer = self.tokenizer if body.echo else None
        self.echoes = [tokenizer.decode(prompt) if tokenizer else "" for prompt in prompts]

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text, reason = self.echoes[index // self.n] + answer.text, finish(answer.finish_reason)
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
        if answer.has_logprobs:
            choice["logprobs"] = completion_logprobs(answer.logprobs, answer.pieces, 0, self.tokenizer)
        return self.with_ids(choice, answer.token_ids)

    def change(self, answer: Answer, index: int, event: Event) -> dict[str, Any]:
        echo = self.echoes[index // self.n] if len(answer.token_ids) == len(event.token_ids) else ""
        choice = {"index": index, "text": echo + event.text, "logprobs": None}
        choice["finish_reason"] = finish(event.finish_reason)
        if event.logprobs is not None:
            before = answer.characters - len(event.text)
            choice["logprobs"] = completion_logprobs(event.logprobs, event.pieces, before, self.tokenizer)
        return self.with_ids(choice, event.token_ids)


class Chat(Choices):
    """OpenAI's chat completions, tool calls included."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, kitchen: Kitchen, body: ChatRequest, n: int, seed: int | None) -> None:
        super().__init__(kitchen, body, n, seed)
        self.tools = (body.tools or []) if body.tool_choice != "none" else []
        # of each choice that is streamed: what looks for calls in it, and how many there were
        self.readers: defaultdict[int, tools.CallReader] = defaultdict(partial(tools.CallReader, self.tools))
        self.called: defaultdict[int, int] = defaultdict(int)

    def found(self, answer: Answer) -> tuple[str, list[dict[str, Any]]]:
        """(the text without calls, the calls in OpenAI's shape) of an answer."""
        return tools.find(answer.text, self.tools) if self.tools else (answer.text, [])

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text, calls = self.found(answer)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else finish(answer.finish_reason),
            "logprobs": chat_logprobs(answer.logprobs, self.tokenizer) if answer.has_logprobs else None,
        }
        return self.with_ids(choice, answer.token_ids)

    def begin(self, answers: Sequence[Answer]) -> Iterable[str]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        for i in range(len(answers)):
            yield self.chunk([{"index": i, "delta": delta, "finish_reason": None, "logprobs": None}])

    def change(self, answer: Answer, index: int, event: Event) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        reason = finish(event.finish_reason)
        text, calls = self._certain(index, event) if self.tools else (event.text, [])
        if text or reason or not self.tools:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": self.called[index] + i, **call} for i, call in enumerate(calls)]
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
        return text, calls


def event_line(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json_line(value)}\n\n"
