"""What a training run shows while it runs: a bar on a terminal, a few lines in a pipe, nothing when asked for JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

LINES = 20  # of a run in a pipe


class Watch(Protocol):
    """What the loop tells."""

    def tell(self, message: str) -> None:
        """A line that stays."""
        ...

    def step(self, step: int, steps: int, loss: float, tokens: int) -> None:
        """A step is done, of so many as things stand; it read so many tokens."""
        ...


class Silent:
    """Shows nothing."""

    def tell(self, message: str) -> None: ...

    def step(self, step: int, steps: int, loss: float, tokens: int) -> None: ...


class Lines:
    """Lines on stderr, a step in every `LINES`th of the run."""

    def __init__(self) -> None:
        self._tokens, self._since = 0, time.monotonic()

    def tell(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def step(self, step: int, steps: int, loss: float, tokens: int) -> None:
        self._tokens += tokens
        if step % max(steps // LINES, 1) == 0:
            seconds = max(time.monotonic() - self._since, 1e-9)
            self.tell(f"step {step} of {steps}, loss {loss:.4f}, {self._tokens / seconds:.0f} tokens/s")
            self._tokens, self._since = 0, time.monotonic()


class Bar:
    """A bar with the loss, tokens a second and the time left; other lines above it."""

    def __init__(self, progress: Any) -> None:
        self._progress, self._task, self._last = progress, None, time.monotonic()

    def tell(self, message: str) -> None:
        self._progress.console.print(message, highlight=False)

    def step(self, step: int, steps: int, loss: float, tokens: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=steps, completed=step - 1)
        now = time.monotonic()
        text = f"loss {loss:.4f}, {tokens / max(now - self._last, 1e-9):.0f} tokens/s"
        self._last = now
        self._progress.update(self._task, completed=step, total=steps, description=text, refresh=True)


@contextmanager
def watching(quiet: bool) -> Iterator[Watch]:
    """What fits where stderr goes. No thread turns the bar: it would take time from the training."""
    if quiet:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
            yield Bar(progress)
