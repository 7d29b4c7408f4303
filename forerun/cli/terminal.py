"""Helpers shared by `generate` and `chat`: load a model, print streamed text and statistics.

torch is imported only when a model is loaded, so that errors in flags and names are reported at
once.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from forerun.cli.progress import progress
from forerun.config import Config
from forerun.errors import RequestError
from forerun.models.hub import find_model
from forerun.sampling.params import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM, Completion, Stream


COLOURS = {
    "model": "cyan",
    "ngram": "green",
    "suffix": "yellow",
    "memory": "blue",
    "grammar": "magenta",
}
ENOUGH = 4  # number of steps without a draft needed to estimate plain decoding speed


@contextmanager
def waiting(quiet: bool) -> Iterator[None]:
    """Show a spinner on stderr while something loads, if stderr is a terminal."""
    with progress(quiet or not sys.stderr.isatty()) as tell:
        tell("loading")
        yield


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable garbage collection during loading, whose objects are permanent anyway.

    This saves about 0.2 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load(config: dict[str, Any], quiet: bool) -> LLM:
    """Load the model that the flags name, with its engine. Raises ForerunError."""
    with waiting(quiet), _without_collecting():
        find_model(Config.of(**config).model)
        from forerun.models.chat_template import SANDBOX

        SANDBOX.warm()  # starts in parallel with loading the model
        from forerun.llm import LLM

        llm = LLM(**config)
        if llm.tokenizer is not None:
            llm.tokenizer.confine()
    if llm.engine.rule.lossy:
        print(
            f"note: rule {llm.config.rule} is lossy: the output is not the target's",
            file=sys.stderr,
        )
    return llm


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Build SamplingParams from flags, where logit_bias is a list of ID=AMOUNT.

    Raises RequestError.
    """
    if "logit_bias" in given:
        given = given | {"logit_bias": dict(map(_bias, given["logit_bias"]))}
    return SamplingParams.of(**given)


def _bias(entry: str) -> tuple[int, float]:
    token, _, amount = entry.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise RequestError(f"--logit-bias {entry!r} is not ID=AMOUNT, such as 42=-5") from None


def as_dict(completion: Completion) -> dict[str, Any]:
    """Return a completion as plain data, for --json."""
    values = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "stats": completion.stats.as_dict(),
    }
    if completion.logprobs is not None:
        values["logprobs"] = [
            {"token_id": e.token_id, "logprob": e.logprob, "top": e.top}
            for e in completion.logprobs
        ]
    return values


class Clock:
    """Measures the time of decoding steps to estimate the speed of plain decoding.

    Attributes:
        plain: median seconds of a step without a draft, in the last answer with enough of them;
            None until there is one. It is measured in the same session as the answers that are
            compared with it.
    """

    def __init__(self) -> None:
        self.plain: float | None = None
        self._times: list[float] = []

    def start(self) -> None:
        """Mark the start of an answer."""
        self._times = []

    def tick(self) -> None:
        """Record the arrival of a step."""
        self._times.append(time.perf_counter())

    def stop(self, completion: Completion) -> None:
        """Mark the end of the answer and update `plain` from its steps."""
        # The first step reads the prompt.
        drafted = [count for count, _ in completion.stats.rounds[1:]]
        steps = [
            after - before for before, after in zip(self._times, self._times[1:], strict=False)
        ]
        if len(steps) == len(drafted):
            undrafted = [
                seconds for seconds, count in zip(steps, drafted, strict=True) if not count
            ]
            if len(undrafted) >= ENOUGH:
                self.plain = statistics.median(undrafted)


class WrappedLines:
    """Word wrapping of streamed text.

    A word is held back until it is complete, so that it is not split over two lines. A word longer
    than a line is shown as it arrives.

    Args:
        width: returns the current number of columns of the terminal.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0  # column of the next character
        self._word: list[tuple[str, str]] = []  # (character, style)

    def add(self, text: str, style: str) -> list[tuple[str, str]]:
        """Add text and return the (text, style) parts that can be shown now."""
        shown: list[tuple[str, str]] = []
        for character in text:
            if character.isspace():
                shown += self._placed()
                shown += self._space(character)
            else:
                if cell_len(character) > 1:  # scripts with wide characters break anywhere
                    shown += self._placed()
                self._word.append((character, style))
                if self._wide > self._width():
                    shown += self._placed()
                    self._column %= self._width()  # the terminal wraps this word itself
        return _joined(shown)

    def rest(self) -> list[tuple[str, str]]:
        """Return the parts still held back at the end of the text."""
        return _joined(self._placed())

    @property
    def _wide(self) -> int:
        return sum(cell_len(character) for character, _ in self._word)

    def _placed(self) -> list[tuple[str, str]]:
        """Return the pending word, after a line break if it does not fit on this line."""
        word, wide = self._word, self._wide
        self._word = []
        if not word:
            return []
        breaks = self._column > 0 and self._column + wide > self._width()
        self._column = wide + (0 if breaks else self._column)
        return [("\n", ""), *word] if breaks else word

    def _space(self, character: str) -> list[tuple[str, str]]:
        if character in "\n\r":
            self._column = 0
        elif character == "\t":
            self._column += 8 - self._column % 8
        elif self._column >= self._width():
            return []  # the line is full: drop the space before the line break
        else:
            self._column += 1
        return [(character, "")]


def _joined(parts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge adjacent parts with the same style."""
    return [
        ("".join(text for text, _ in group), style)
        for style, group in groupby(parts, key=lambda part: part[1])
    ]


def show(stream: Stream, clock: Clock) -> Completion:
    """Print the text of a stream as it arrives.

    On a terminal, accepted tokens have the colour of their proposer.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    lines = WrappedLines(lambda: console.width)
    clock.start()

    def put(parts: Iterable[tuple[str, str]]) -> None:
        for text, style in parts:
            console.print(Text(text, style=style), end="")

    for event in stream:
        clock.tick()
        for piece, source in zip(event.pieces, [*event.sources, ""], strict=False):
            if console.is_terminal:
                put(lines.add(piece, COLOURS.get(source, "cyan") if source else ""))
            else:
                sys.stdout.write(piece)
        sys.stdout.flush()
    put(lines.rest())
    print()
    clock.stop(stream.completion)
    return stream.completion


def summary(completion: Completion, room: int, plain: float | None) -> list[str]:
    """Return the parts of the line of statistics, the most important first.

    Args:
        completion: the finished output.
        room: maximum number of tokens of the context.
        plain: seconds per token of plain decoding, if known.
    """
    stats = completion.stats
    decoding = stats.seconds - stats.first_token_seconds
    rest = stats.completion_tokens - stats.completion_tokens / max(stats.steps, 1)
    speed = rest / decoding if decoding > 0 and stats.steps > 1 else 0.0
    used = stats.prompt_tokens + stats.completion_tokens
    full = " (context full)" if used >= room else " (cut at max-tokens)"
    why = {"length": full, "abort": " (interrupted)"}.get(completion.finish_reason, "")
    return [
        f"{stats.completion_tokens} token{'s' * (stats.completion_tokens != 1)}{why}",
        *([f"{speed:.0f} tokens/s"] if speed else []),
        *([f"{speed * plain:.1f} times plain"] if speed and plain and stats.drafted else []),
        f"context {used} of {room}",
        *([f"{stats.accepted_length:.2f} per pass"] if stats.steps else []),
        *([stats.why] if stats.why else []),
    ]


def print_summary(parts: list[str]) -> None:
    """Print one line on stderr; on a terminal it is dim, and parts that do not fit are omitted."""
    if not sys.stderr.isatty():
        print(" · ".join(parts), file=sys.stderr)
        return
    width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts = parts[:-1]
    line = " · ".join(parts)[:width]
    print(line if "NO_COLOR" in os.environ else f"\x1b[2m{line}\x1b[0m", file=sys.stderr)
