"""What a verb that takes long shows on stderr: one bar with the time left on a terminal, a few
lines in a pipe.

Whoever measures or trains is given a `Tell` and need not know which of them it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINES = 10  # of a count in a pipe
WHOLE_RUN = 24 * 3600.0  # seconds: the time left follows from the pace of all that was counted


class Tell:
    """Takes what is going on; this one shows nothing."""

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        """What begins now, when `done` of `total` is over; what was counted before stays where
        neither is given. A count that goes back begins anew."""

    def note(self, what: str) -> None:
        """A line that stays."""


nothing = Tell()


class Lines(Tell):
    """Lines: what is not counted as it comes, and of a count at most `LINES`."""

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
    """A bar, or a spinner where nothing is counted yet; lines that stay go above it."""

    def __init__(self, console: Any, measuring: bool) -> None:
        self._console, self._measuring = console, measuring
        self._shown: Any = None
        self._stderr: Any = None  # what it was before the bar
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
        """Leave the terminal as it was."""
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
            *columns, console=self._console, transient=True, auto_refresh=not (counted and self._measuring),
            speed_estimate_period=WHOLE_RUN,
        )  # fmt: skip
        self._shown.add_task("", total=None)
        self._stderr, sys.stderr = sys.stderr, _giving_way(self._console, sys.stderr, self.end)
        self._shown.start()


def _giving_way(console: Any, stderr: Any, end: Callable[[], None]) -> Any:
    """stderr while a bar is there: lines go above it, and whatever redraws a line itself, such as
    the bar of a download, has the terminal to itself from then on."""
    from rich.file_proxy import FileProxy

    class GivingWay(FileProxy):
        given = False

        def write(self, text: str) -> int:
            if "\r" in text and not self.given:
                self.given = True
                end()
            return int(stderr.write(text)) if self.given else super().write(text)

        def flush(self) -> None:
            if self.given:
                stderr.flush()
            else:
                super().flush()

    return GivingWay(console, stderr)


class Part(Tell):
    """One of several equal parts of what is told."""

    def __init__(self, whole: Tell, index: int, parts: int, label: str = "") -> None:
        """Part number `index`, from 0; `label` stands before what it tells."""
        self._whole, self._index, self._parts, self._label, self._share = (
            whole,
            index,
            parts,
            label,
            0.0,
        )

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        if done is not None and total:
            self._share = done / total
        self._whole(self._label + what, self._index + self._share, self._parts)

    def note(self, what: str) -> None:
        self._whole.note(what)


@contextmanager
def progress(quiet: bool, measuring: bool = False) -> Iterator[Tell]:
    """What fits where stderr goes; nothing if `quiet`. While something is timed no thread turns the
    bar: it would take time from what is `measuring`."""
    if quiet:
        yield nothing
        return
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console

    console = Console(file=sys.stderr)
    if console.is_dumb_terminal:
        yield Lines()
        return
    bar = Bar(console, measuring)
    try:
        yield bar
    finally:
        bar.end()
