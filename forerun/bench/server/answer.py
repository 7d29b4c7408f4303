"""A streamed answer of OpenAI's API as far as it has come, in the shapes that servers use. Nothing
of HTTP here."""

from __future__ import annotations

import json
import time
from dataclasses import astuple, dataclass, field
from typing import Any

from forerun.errors import ForerunError

LONGEST_LINE = 300  # characters of a message that a server wrote


@dataclass(frozen=True, slots=True)
class Speculated:
    """What a server says of its speculation: tokens drafted and accepted, target passes and the
    tokens they gave.

    Passes are all that produced tokens where a server counts those, and otherwise only those that
    verified a draft."""

    drafted: int
    accepted: int
    passes: int
    emitted: int

    def __add__(self, other: Speculated) -> Speculated:
        return Speculated(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )

    def __sub__(self, other: Speculated) -> Speculated:
        return Speculated(
            *(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )


@dataclass(slots=True)
class Answer:
    """One request as far as its answer has come; times are `time.perf_counter` seconds.

    Attributes:
        index: which request of the measurement; the same prompt and seed in every arm.
        sent: when it was sent.
        chunks: (when, tokens) of every piece of text; one token where the server does not say.
        text, token_ids: what was said; ids only from servers that give them.
        counted: completion tokens by the server's usage; None where it gives none.
        prompt_tokens, cached_tokens: of the prompt, and those found in the server's cache, by its
            usage; None likewise.
        speculated: by the server's statistics; None where it gives none.
        finished: whether it came to its end.
        error: why not, in one line.
    """

    index: int
    sent: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    counted: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    speculated: Speculated | None = None
    finished: bool = False
    error: str | None = None

    @property
    def seen(self) -> int:
        """Tokens by what was streamed: ids, or one a chunk."""
        return sum(tokens for _, tokens in self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens by the server's usage, or by what was streamed."""
        return self.counted or self.seen

    @property
    def scale(self) -> float:
        """Tokens of the answer for each token of its chunks: 1 where the server says which tokens a
        chunk has."""
        return self.tokens / self.seen if self.seen else 1.0

    def add(self, data: str) -> None:
        """Take in one event of the stream. Raises ForerunError for an error, and for what is no
        chunk."""
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise ForerunError(f"error in the stream: {message_of(chunk)}")
            choices = chunk.get("choices", [])
        except (ValueError, RecursionError, AttributeError):  # no JSON, or too deep, or no object
            choices = None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ForerunError(f"it streamed what is no chunk of an answer: {one_line(data)}")
        for choice in choices:
            self._say(choice)
            self.finished |= choice.get("finish_reason") is not None
        usage = _object(chunk, "usage")
        if (counted := _count(usage, "completion_tokens")) is not None:
            self.counted = counted
            self.prompt_tokens = _count(usage, "prompt_tokens") or 0
            self.cached_tokens = _count(_object(usage, "prompt_tokens_details"), "cached_tokens")
        self.speculated = speculated(chunk) or self.speculated

    def _say(self, choice: dict[str, Any]) -> None:
        """Text, reasoning and token ids of one choice."""
        delta = _object(choice, "delta")
        pieces = (
            choice.get("text"),
            *(delta.get(name) for name in ("content", "reasoning", "reasoning_content")),
        )
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        ids = choice.get("token_ids")
        ids = ids if isinstance(ids, list) and all(type(token) is int for token in ids) else None
        if count := (bool(text) if ids is None else len(ids)):
            self.chunks.append((time.perf_counter(), int(count)))
        self.text += text
        self.token_ids += ids or ()


def speculated(chunk: dict[str, Any]) -> Speculated | None:
    """Statistics of speculation beside an answer, in the shapes of forerun, vLLM and llama.cpp;
    None without any."""
    metrics, timings = _object(chunk, "metrics"), _object(chunk, "timings")
    own, theirs = _object(metrics, "forerun"), _object(metrics, "speculative_decoding")
    if own:
        counts = _counts(own, "drafted", "accepted", "steps", "completion_tokens")
        return Speculated(*counts) if counts else None
    if theirs:
        counts = _counts(theirs, "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
        # a pass gives one token of its own
        return (
            Speculated(counts[0], counts[1], counts[2], counts[1] + counts[2]) if counts else None
        )
    counts = _counts(timings, "draft_n", "draft_n_accepted", "predicted_n")
    return (
        Speculated(counts[0], counts[1], max(counts[2] - counts[1], 0), counts[2])
        if counts
        else None
    )


def _counts(values: dict[str, Any], *names: str) -> list[int] | None:
    """The counts of these names; None where one is missing."""
    counts = [count for name in names if (count := _count(values, name)) is not None]
    return counts if len(counts) == len(names) else None


def _object(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None


def message_of(content: dict[str, Any]) -> str:
    """The message of an error in the shapes servers use."""
    error = content.get("error") or content.get("detail") or content
    return one_line(str(error.get("message", error) if isinstance(error, dict) else error))


def one_line(text: str) -> str:
    """A server's text in one printable line that is not too long."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= LONGEST_LINE else words[: LONGEST_LINE - 3] + "..."
