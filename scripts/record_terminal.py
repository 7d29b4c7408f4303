"""A picture of a command as it runs in a terminal: an animated SVG, in real time, for the
documentation.

    python scripts/record_terminal.py docs/demo.svg make demo
    python scripts/record_terminal.py --on '>>> ' 'Hello\\r' --on 'context .*>>> ' '/bye\\r'
    docs/chat.svg forerun chat

`--on PATTERN KEYS` waits until what was written since the last keys matches, then types; they go in
turn. Where a reader wants no motion the last frame is shown. Needs the package `pyte` (the group
`docs`)."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shlex
import termios
import time
from collections import defaultdict
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
import pyte.graphics

TALL = 500  # rows: nothing is scrolled away, the picture moves instead
FRAME, STROKE, PAUSE, HOLD = (
    0.1,
    0.05,
    0.7,
    4.0,
)  # seconds: between frames and keys, before typing, at the end
WIDE, HIGH, PAD = 8.4, 18, 14  # of a cell, and around all of them
COLOURS = {
    "default": "#d8dee9", "red": "#f07178", "green": "#a5d66f", "brown": "#f2c55c", "blue": "#6cb2f7",
    "magenta": "#d59bf6", "cyan": "#56d4dd", "white": "#d8dee9", "faint": "#7d8796", "black": "#7d8796",
}  # fmt: skip
pyte.graphics.FG_ANSI[2] = "faint"  # pyte knows no dim text: it becomes a colour

Run = tuple[int, str, str, bool]  # column, text, colour, bold


class Screen(pyte.Screen):
    """A screen that answers when it is asked where its cursor stands."""

    answer_to = -1

    def write_process_input(self, data: str) -> None:
        os.write(self.answer_to, data.encode())


class Recording:
    """What each row showed, and from when to when."""

    def __init__(self, columns: int, lines: int) -> None:
        self.screen = Screen(columns, TALL)
        self.lines, self.seconds, self.last = lines, 0.0, 0
        self.scrolls: list[tuple[float, int]] = [(0.0, 0)]
        self.spans: dict[tuple[float, float], list[tuple[int, list[Run]]]] = defaultdict(list)
        self._now: dict[int, tuple[list[Run], float]] = {}

    def frame(self, seconds: float) -> None:
        """Note what has changed by now."""
        self.seconds = seconds
        for y in {*self.screen.dirty, self.screen.cursor.y, self.last}:
            runs = self._runs(y)
            shown, since = self._now.get(y, ([], 0.0))
            if runs != shown:
                self.spans[since, seconds].append((y, shown))
                self._now[y] = runs, seconds
        self.screen.dirty.clear()
        self.last = self.screen.cursor.y
        scroll = max(
            0, max((y for y, (runs, _) in self._now.items() if runs), default=0) + 1 - self.lines
        )
        if scroll != self.scrolls[-1][1]:
            self.scrolls.append((seconds, scroll))

    def close(self) -> None:
        """The last frame stays for a while."""
        end = self.seconds + HOLD
        for y, (runs, since) in self._now.items():
            self.spans[since, end].append((y, runs))
        self.seconds = end

    def _runs(self, y: int) -> list[Run]:
        cursor = self.screen.cursor
        cells = [self.screen.buffer[y][x] for x in range(self.screen.columns)]
        looks = [(cell.fg, cell.bold) for cell in cells]
        runs, x = [], 0
        for (colour, bold), group in groupby(looks):
            size = len(list(group))
            for part in re.finditer(
                r"\S+(?: \S+)*", "".join(cell.data for cell in cells[x : x + size])
            ):
                runs.append((x + part.start(), part.group(), colour, bold))
            x += size
        if y == cursor.y and not cursor.hidden:
            runs.append((cursor.x, "\u2588", "faint", False))
        return runs


def record(
    command: list[str], shown: str, keys: list[tuple[str, str]], columns: int, lines: int
) -> Recording:
    """Run the command on a pseudo-terminal until it ends."""
    recording = Recording(columns, lines)
    stream = pyte.ByteStream(recording.screen)
    stream.feed(f"\x1b[2m$\x1b[0m \x1b[1m{shown}\x1b[0m\r\n".encode())
    pid, terminal = pty.fork()
    if pid == 0:
        termios.tcsetwinsize(0, (TALL, columns))
        os.execvpe(command[0], command, os.environ | {"TERM": "xterm-256color"})
    recording.screen.answer_to = terminal
    start, recent, typing = time.monotonic(), "", []
    while True:
        now = time.monotonic() - start
        if now - recording.seconds >= FRAME:
            recording.frame(now)
        if typing and typing[0][0] <= now:
            os.write(terminal, typing.pop(0)[1].encode())
        if not typing and keys and re.search(keys[0][0], recent, flags=re.DOTALL):
            text, recent = keys.pop(0)[1].encode().decode("unicode_escape"), ""
            pause = 0.0 if text == "\x03" else PAUSE
            typing = [(now + pause + i * STROKE, key) for i, key in enumerate(text)]
        if select.select([terminal], [], [], FRAME / 5)[0]:
            try:
                written = os.read(terminal, 65536)
            except OSError:  # the command has ended
                recording.frame(now + FRAME)
                recording.close()
                os.waitpid(pid, 0)
                return recording
            stream.feed(written)
            recent += written.decode(errors="replace")


def picture(recording: Recording, title: str) -> str:
    """The recording as an SVG of keyframes, each row of the screen in each of its states."""
    total, width, height = (
        recording.seconds,
        round(recording.screen.columns * WIDE),
        recording.lines * HIGH,
    )
    styles, groups = [], []
    for i, ((start, end), rows) in enumerate(recording.spans.items()):
        text = "".join(_text(y, run) for y, runs in rows for run in runs)
        if not text:
            continue
        frames = {0.0: "hidden", start: "visible", end: "hidden"}
        steps = "".join(f"{at / total:.3%}{{visibility:{state}}}" for at, state in frames.items())
        styles.append(f"@keyframes k{i}{{{steps}}}")
        groups.append(
            f'<g class="{"r e" if end >= total else "r"}" style="animation-name:k{i}">{text}</g>'
        )
    scroll = "".join(
        f"{at / total:.3%}{{transform:translateY(-{y * HIGH}px)}}" for at, y in recording.scrolls
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * PAD} {height + 2 * PAD}" role="img">
<title>{escape(title)}</title>
<style>
text{{font:14px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre}}
.r,.s{{animation:{total:.2f}s step-end infinite}}.r{{visibility:hidden}}.e{{visibility:visible}}
.s{{animation-name:s;transform:translateY(-{recording.scrolls[-1][1] * HIGH}px)}}
@media (prefers-reduced-motion:reduce){{.r,.s{{animation:none!important}}}}
@keyframes s{{{scroll}}}
{"".join(styles)}
</style>
<rect width="100%" height="100%" rx="8" fill="#14181f"/>
<svg x="{PAD}" y="{PAD}" width="{width}" height="{height}"><g class="s">
{chr(10).join(groups)}
</g></svg>
</svg>
"""


def _text(y: int, run: Run) -> str:
    x, text, colour, bold = run
    fill = COLOURS.get(colour.removeprefix("bright"), f"#{colour}")
    weight = ' font-weight="bold"' if bold else ""
    size = f'x="{x * WIDE:.1f}" y="{y * HIGH + 14}" textLength="{len(text) * WIDE:.1f}"'
    return f'<text {size} fill="{fill}"{weight}>{escape(text, quote=False)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--on", nargs=2, action="append", default=[], metavar=("PATTERN", "KEYS"))
    parser.add_argument("--columns", type=int, default=96)
    parser.add_argument("--lines", type=int, default=26)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    shown = shlex.join(args.command)
    args.out.write_text(
        picture(record(args.command, shown, args.on, args.columns, args.lines), shown), "utf-8"
    )


if __name__ == "__main__":
    main()
