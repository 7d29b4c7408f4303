"""How completions and chats are written, whole or chunk by chunk."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from forerun.server import tools
from forerun.server.answers import Answer, chat_logprobs, completion_choice, completion_logprobs, finish, metrics, usage
from forerun.server.kitchen import Kitchen
from forerun.server.protocol import ChatRequest, CompletionRequest, Generation
from forerun.types import Event


class Dialect:
    """How one endpoint writes answers. `body` is the request, n its completions for each prompt."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, kitchen: Kitchen, body: Generation, n: int, seed: int | None) -> None:
        self.kitchen, self.body, self.n = kitchen, body, n
        self.tokenizer = kitchen.service.llm.tokenizer
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": kitchen.name,
            "system_fingerprint": kitchen.fingerprint,
            "seed": seed,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self.choice(answer, i) for i, answer in enumerate(answers)]
        counted = {"usage": usage(answers, self.n), "metrics": metrics(answers)}
        return {**self.head, "object": self.kind, "choices": choices, **counted}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk of a streamed answer."""
        return {**self.head, "object": self.chunk_kind, "choices": choices, **more}

    def last(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk behind all choices, where usage is wanted."""
        return self.chunk([], usage=usage(answers, self.n), metrics=metrics(answers))

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """One choice of a whole answer."""
        raise NotImplementedError

    def first(self, count: int) -> list[dict[str, Any]]:
        """Chunks before anything has been said."""
        return []

    def deltas(self, answer: Answer, index: int, event: Event) -> list[dict[str, Any]]:
        """The choices of the chunk for an event that has just been added to `answer`."""
        raise NotImplementedError

    def with_ids(self, choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return choice | {"token_ids": token_ids} if self.body.return_token_ids else choice


class Completions(Dialect):
    """OpenAI's text completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, kitchen: Kitchen, body: CompletionRequest, n: int, seed: int | None, prompts: list[list[int]]
    ) -> None:
        super().__init__(kitchen, body, n, seed)
        self.echoes = [self._echo(prompt) if body.echo else "" for prompt in prompts]

    def _echo(self, prompt: list[int]) -> str:
        return self.tokenizer.decode(prompt) if self.tokenizer else ""

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text = self.echoes[index // self.n] + answer.text
        return self.with_ids(completion_choice(answer, index, self.tokenizer, text), answer.token_ids)

    def deltas(self, answer: Answer, index: int, event: Event) -> list[dict[str, Any]]:
        echo = self.echoes[index // self.n] if len(answer.token_ids) == len(event.token_ids) else ""
        choice = {"index": index, "text": echo + event.text, "logprobs": None}
        choice["finish_reason"] = finish(event.finish_reason)
        if event.logprobs is not None:
            before = answer.characters - len(event.text)
            choice["logprobs"] = completion_logprobs(event.logprobs, event.pieces, before, self.tokenizer)
        return [self.with_ids(choice, event.token_ids)]


class Chat(Dialect):
    """OpenAI's chat completions, tool calls included."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, kitchen: Kitchen, body: ChatRequest, n: int, seed: int | None) -> None:
        super().__init__(kitchen, body, n, seed)
        self.tools = (body.tools or []) if body.tool_choice != "none" else []
        # of each choice that is streamed: whether it may be a call, what is held back, characters that are not
        self.suspicions: defaultdict[int, tools.Suspicion] = defaultdict(tools.Suspicion)
        self.held: defaultdict[int, list[str]] = defaultdict(list)
        self.sent: defaultdict[int, int] = defaultdict(int)

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text, calls = tools.find(answer.text, self.tools) if self.tools else (answer.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else finish(answer.finish_reason),
            "logprobs": chat_logprobs(answer.logprobs, self.tokenizer) if self._logprobs(answer) else None,
        }
        return self.with_ids(choice, answer.token_ids)

    def first(self, count: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": i, "delta": delta, "finish_reason": None, "logprobs": None} for i in range(count)]

    def deltas(self, answer: Answer, index: int, event: Event) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {}
        reason = finish(event.finish_reason)
        if not self.tools:
            delta["content"] = event.text
        elif event.finish_reason is not None:
            text, calls = tools.find(answer.text, self.tools)
            delta["content"] = text[self.sent[index] :]
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                reason = "tool_calls"
        elif (content := self._beyond_doubt(index, event.text)) is not None:
            delta["content"] = content
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if event.logprobs is not None:
            choice["logprobs"] = chat_logprobs(event.logprobs, self.tokenizer)
        return [self.with_ids(choice, event.token_ids)]

    def _beyond_doubt(self, index: int, piece: str) -> str | None:
        """The text of a choice that can be streamed with its next piece, None while it may be a call."""
        held = self.held[index]
        held.append(piece)
        if self.suspicions[index].add(piece):
            return None
        content = "".join(held)
        held.clear()
        self.sent[index] += len(content)
        return content

    @staticmethod
    def _logprobs(answer: Answer) -> bool:
        return answer.ticket.order.params.logprobs is not None
