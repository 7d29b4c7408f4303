"""Progress: a bar on a terminal that is removed at the end, few lines in a pipe, none with JSON."""

import io
import os
import re
import signal
import sys
import termios
import threading

import pytest
from rich.console import Console

from forerun.cli.progress import Bar, Part, ProgressLines, Tell, progress
from tests import tiny
from tests.forked import Process, run

CURSOR = ("\x1b[?25l", "\x1b[?25h")  # hidden, shown
CHECK = [
    "check", str(tiny.family("llama")), "--texts", "1", "--tokens", "8", "--samples", "50", "--rule", "match",
    "--draft", "suffix", "--kv-tokens", "2048", "--threads", "1",
]  # fmt: skip


class RecordedProgress(Tell):
    """Receiver that records all reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float | None, float | None]] = []

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        self.reports.append((what, done, total))


def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def written(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_pipe_gets_at_most_one_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines("loading")
    for i in range(1000):
        lines(f"round {i}", i, 1000)
    out, err = capsys.readouterr()
    rounds = [f"round {100 * tenth}" for tenth in range(10)]
    assert out == "" and err.splitlines() == ["loading", *rounds]


def test_a_restarted_count_is_reported_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    for what in ("short", "long"):
        lines(what, 0, 2)
        lines(what, 0.1, 2)
        lines(what, 1, 2)
    assert capsys.readouterr().err.split() == ["short", "short", "long", "long"]


def test_quiet_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as tell:
        tell("loading")
        tell("round 1", 0, 9)
        tell.note("found")
    assert capsys.readouterr() == ("", "")


def test_parts_add_up_to_one_count() -> None:
    """Parts may contain parts; an activity without a count keeps the previous count."""
    recorded = RecordedProgress()
    for i in range(2):
        part = Part(recorded, i, 2, "look, ")
        part("loading")
        for j in range(2):
            Part(part, j, 2)("round", 1, 2)
        part("loading")
    shares = [done / total for _, done, total in recorded.reports if done is not None and total]
    assert shares == [0, 0.125, 0.375, 0.375, 0.5, 0.625, 0.875, 0.875]
    assert recorded.reports[0][0] == "look, loading"


def test_a_bar_shows_count_and_remaining_time() -> None:
    console = screen()
    bar = Bar(console, measuring=True)
    bar("loading")
    for i in range(3):
        bar(f"round {i + 1} of 4", i, 4)
    bar.note("[found] something")
    bar("a new stage")
    bar.end()
    text = written(console)
    assert "loading" in text and "round 3 of 4" in text and " 50%" in text and "a new stage" in text
    assert "[found] something\n" in text
    assert re.search(r"50% \d:\d\d:\d\d", text), "two counts give an estimate"
    assert text.endswith("\x1b[2K") or text.rstrip().endswith("\x1b[2K"), "the line is cleared"
    assert text.count(CURSOR[0]) == text.count(CURSOR[1]) and text.rfind(CURSOR[1]) > text.rfind(
        CURSOR[0]
    )


def test_lines_appear_above_a_bar_and_other_bars_replace_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other bars are for example those of downloads; the next stage has a bar again."""
    console, real = screen(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", real)
    bar = Bar(console, measuring=True)
    bar("round 1", 0, 2)
    print("a warning", file=sys.stderr)
    assert "a warning\n" in written(console) and real.getvalue() == ""
    held = sys.stderr
    for text in ("\r10%", "\r20%", "\n"):
        held.write(text)
        held.flush()
    assert real.getvalue() == "\r10%\r20%\n" and sys.stderr is real
    assert written(console).count(CURSOR[0]) == written(console).count(CURSOR[1])
    bar("round 2", 1, 2)
    bar.end()
    assert "round 2" in written(console) and sys.stderr is real


def test_no_thread_updates_a_bar_during_measurements() -> None:
    """A spinner before a measurement has a thread, which ends; other bars have one too."""
    before = set(threading.enumerate())
    timed, other = Bar(screen(), measuring=True), Bar(screen(), measuring=False)
    timed("loading")
    (spinner,) = set(threading.enumerate()) - before
    timed("round 1 of 4", 0, 4)
    timed("round 2 of 4", 1, 4)
    spinner.join(20)
    assert set(threading.enumerate()) <= before  # a thread of another test may have ended since
    other("claim 1 of 4", 0, 4)
    (updating,) = set(threading.enumerate()) - before
    timed.end()
    other.end()
    updating.join(20)
    assert set(threading.enumerate()) <= before  # a thread of another test may have ended since


def terminal(*args: str, interrupt_at: str = "", **environ: str) -> tuple[int, str]:
    """Run a command on a pseudo-terminal; return the exit code and its output."""
    end, inner = os.openpty()
    termios.tcsetwinsize(inner, (40, 120))
    env = os.environ | {"TERM": "xterm-256color"} | environ
    process = Process([*args], inner, inner, inner, env, tty=True)
    os.close(inner)
    text = b""
    while True:
        try:
            data = os.read(end, 65536)
        except OSError:  # Linux raises this when the other end is closed
            data = b""
        if not data:
            break
        text += data
        if interrupt_at and interrupt_at.encode() in text:
            process.send_signal(signal.SIGINT)
            interrupt_at = ""
    os.close(end)
    return process.wait(60), text.decode()


def test_check_on_a_terminal_shows_one_bar_and_then_the_verdict() -> None:
    code, text = terminal(*CHECK, NO_COLOR="1")
    assert code == 0
    assert (
        re.search(r"check \d of 6, texts: match with suffix", text) and "━" in text and "%" in text
    )
    assert text.rfind(CURSOR[1]) > text.rfind(CURSOR[0]), "the cursor is shown again"
    after = text[text.rfind(CURSOR[1]) :]
    assert re.search(r"\ncertified: |\x1b\[2K.*certified: |certified: ", after)
    assert "check " not in after
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[38;", text), "NO_COLOR"


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    # long enough not to end before the interrupt
    endless = [*CHECK, "--texts", "2000", "--samples", "100000"]
    code, text = terminal(*endless, interrupt_at="check 1 of")
    assert code == 130
    assert text.count(CURSOR[0]) == text.count(CURSOR[1]) and text.rfind(CURSOR[1]) > text.rfind(
        CURSOR[0]
    )
    assert "Traceback" not in text


def test_check_in_a_pipe_gives_a_line_for_each_part() -> None:
    code, out, errors = run(*CHECK)
    assert code == 0, errors
    assert errors.splitlines() == [
        "rules: 1 of 1 passed", "forward: 1 of 1 passed", "texts: 2 of 2 passed", "distribution: 1 of 1 passed",
        "faults: 1 of 1 passed",
    ]  # fmt: skip
    assert out.startswith("certified: ") and "\x1b" not in out
