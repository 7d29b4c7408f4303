"""A conversation: its messages, what of them fits into the context, and files of it. No terminal here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import RequestError, shown
from forerun.jsonl import json_line
from forerun.texts import UnreadableError, text_of
from forerun.whole import write_whole

if TYPE_CHECKING:
    from forerun.llm import LLM

ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


class Conversation:
    """What was said so far, for one model.

    `messages` are those that the model reads, {"role", "content"}, a system message first where there is one.
    `forgotten` are older ones that did not fit into the context any more: files of the conversation hold them too.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages: list[Message] = []
        self.forgotten: list[Message] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, None without one; setting it keeps what was said."""
        first = self.messages[0] if self.messages else None
        return str(first["content"]) if first and first["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        head = [{"role": "system", "content": text}] if text else []
        self.messages = [*head, *self.said]

    @property
    def said(self) -> list[Message]:
        """The messages but for the system message."""
        return self.messages[self.system is not None :]

    @property
    def whole(self) -> list[Message]:
        """All messages, those that the model does not read any more too."""
        first = int(self.system is not None)
        return [*self.messages[:first], *self.forgotten, *self.messages[first:]]

    def clear(self) -> None:
        """Drop what was said; the system message stays."""
        self.messages, self.forgotten = self.messages[: self.system is not None], []

    @property
    def room(self) -> int:
        """Most tokens that the conversation and an answer may have together."""
        return self.llm.room

    @property
    def used(self) -> int:
        """Tokens of what was said so far."""
        return len(self.llm.tokens(self.messages)) if self.messages else 0

    def ask(self, text: str, answer: int) -> tuple[list[Message], int, int]:
        """The messages with one more of the user's; nothing is kept of it before `add`.

        Where `answer` tokens would not fit behind them, the oldest turns are left out, and some more: what goes from
        the beginning makes the model read the rest anew, which should not happen at every turn.

        Returns:
            the messages, how many were left out, and the tokens that the answer may have.

        Raises:
            RequestError: the message does not fit even alone.
        """
        messages, dropped = [*self.messages, {"role": "user", "content": text}], 0
        fits = self.room - answer
        used, goal = len(self.llm.tokens(messages)), fits
        first = int(self.system is not None)
        while used > goal and len(messages) > first + 1:
            end = next(i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user")
            dropped += end - first
            del messages[first:end]
            used, goal = len(self.llm.tokens(messages)), fits - self.room // 8
        if used > fits:
            raise RequestError(
                f"this message takes {used} tokens and its answer may take {answer}, the context has {self.room}:"
                " shorten the message, lower max-tokens, or raise --context or --kv-tokens"
            )
        return messages, dropped, self.room - used

    def add(self, messages: list[Message], answer: str) -> None:
        """Keep what was asked, as `ask` gave it, and what was answered."""
        dropped = len(self.messages) + 1 - len(messages)
        self.forgotten += self.said[:dropped]
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def save(self, file: str) -> None:
        """Write all messages as one line of JSON, whole or not at all. Raises ForerunError."""
        text = json_line({"messages": self.whole}) + "\n"
        write_whole(Path(file).expanduser(), text)

    def load(self, file: str) -> None:
        """Go on from a file that `save` wrote, or from a list of messages. Raises RequestError."""
        self.messages, self.forgotten = read(Path(file).expanduser()), []


def read(path: Path) -> list[Message]:
    """The messages in a file. Raises RequestError."""
    try:
        found = json.loads(text_of(path))
    except UnreadableError as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} holds no conversation: it is not valid JSON") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise RequestError(f"{path} holds no conversation: it has no list of messages")
    for i, message in enumerate(messages):
        where = f"{path}: message {i + 1}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RequestError(f"{where} has no role and content: {shown(message)}")
        role = message.get("role")
        if role not in ROLES or (role == "system" and i):
            raise RequestError(f"{where} cannot have the role {shown(role)}: a system message is the first")
    return messages
