"""Progress of long-running commands on stderr: a bar on a terminal, a few lines in a pipe.

Code that measures or trains receives a `Tell` and does not depend on how progress is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LINES = 10  # maximum number of lines per count in a pipe
WHOLE_RUN = 24 * 3600.0  # seconds; the estimated time left uses the average speed since the start


class Tell:
    """Receiver of progress reports; this base class shows nothing."""

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        """Report the current activity and that `done` of `total` units are complete.

        Without `done`, the previous count stays. A smaller `done` starts a new count.
        """

    def note(self, what: str) -> None:
        """Print a permanent line."""


nothing = Tell()


class ProgressLines(Tell):
    """Progress as lines of text: at most `LINES` per count; uncounted activities are all shown."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        if done is None or not total:
            self.note(what)
            return
        tenth = min(int(LINES * done / total), LINES - 1)
        if tenth != self._last:
            self.note(what)
        self._last = tenth

    def note(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


class Bar(Tell):
    """A progress bar, or a spinner without a count; permanent lines appear above it."""

    def __init__(self, console: Any, measuring: bool) -> None:
        self._console, self._measuring = console, measuring
        self._shown: Any = None
        self._stderr: Any = None  # sys.stderr before the bar replaced it
        self._done: float | None = None

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        if self._shown is None or (done is not None and (self._done is None or done < self._done)):
            self._begin(counted=done is not None)
        self._done = self._done if done is None else done
        counted = {} if done is None else {"completed": done, "total": total}
        self._shown.update(self._shown.task_ids[0], description=what, refresh=True, **counted)

    def note(self, what: str) -> None:
        self._console.print(what, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Remove the bar and restore sys.stderr."""
        if self._shown is not None:
            self._shown.stop()
            self._shown, sys.stderr = None, self._stderr

    def _begin(self, counted: bool) -> None:
        from rich import progress as parts

        self.end()
        self._done = None
        text = parts.TextColumn("{task.description}", markup=False)
        columns = (
            (
                parts.BarColumn(bar_width=24),
                parts.TaskProgressColumn(),
                parts.TimeRemainingColumn(),
                text,
            )
            if counted
            else (parts.SpinnerColumn(), parts.TimeElapsedColumn(), text)
        )
        self._shown = parts.Progress(
            *columns,
            console=self._console,
            transient=True,
            auto_refresh=not (counted and self._measuring),
            speed_estimate_period=WHOLE_RUN,
        )
        self._shown.add_task("", total=None)
        self._stderr, sys.stderr = sys.stderr, _stderr_proxy(self._console, sys.stderr, self.end)
        self._shown.start()


def _stderr_proxy(console: Any, stderr: Any, end: Callable[[], None]) -> Any:
    """Return a replacement for stderr while a bar is shown: lines appear above the bar.

    The bar ends at the first carriage return, since another progress bar, such as that of a
    download, then redraws its own line.
    """
    from rich.file_proxy import FileProxy

    class EndingProxy(FileProxy):
        """Proxy that ends the bar at the first carriage return."""

        has_ended = False

        def write(self, text: str) -> int:
            if "\r" in text and not self.has_ended:
                self.has_ended = True
                end()
            return int(stderr.write(text)) if self.has_ended else super().write(text)

        def flush(self) -> None:
            if self.has_ended:
                stderr.flush()
            else:
                super().flush()

    return EndingProxy(console, stderr)


@dataclass
class Part(Tell):
    """Progress of part `index`, from 0, of several equal parts; it is reported to `parent`.

    `label` is put before each activity."""

    parent: Tell
    index: int
    parts: int
    label: str = ""
    share: float = 0.0

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        if done is not None and total:
            self.share = done / total
        self.parent(self.label + what, self.index + self.share, self.parts)

    def note(self, what: str) -> None:
        self.parent.note(what)


@contextmanager
def progress(quiet: bool, measuring: bool = False) -> Iterator[Tell]:
    """Yield the kind of progress report that suits stderr, or a silent one if `quiet`.

    With `measuring`, no thread refreshes the bar, since that would disturb timings.
    """
    if quiet:
        yield nothing
        return
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console

    console = Console(file=sys.stderr)
    if console.is_dumb_terminal:
        yield ProgressLines()
        return
    bar = Bar(console, measuring)
    try:
        yield bar
    finally:
        bar.end()
