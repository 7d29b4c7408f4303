"""`forerun chat` as one meets it: keys on a terminal, and lines in a pipe."""

import io
import json
import os
import re
import select
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.test_main import SMALL
from tests.forked import Process

FLAGS = ["--model", str(tiny.spoken()), "--kv-tokens", "2048", "--threads", "1"]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b[A", "\x03", "\x04"
STATISTICS = r"tokens[^\n]* · context \d+ of 2048"


class Terminal:
    """A pseudo-terminal with `forerun chat` in it. `wait` goes through what it writes, each part
    seen once."""

    def __init__(self, *flags: str, state: Path, columns: int = 100) -> None:
        self.end, inner = os.openpty()
        termios.tcsetwinsize(inner, (40, columns))
        env = os.environ | {
            "XDG_STATE_HOME": str(state),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TERM": "xterm",
        }
        self.process = Process(["chat", *FLAGS, *flags], inner, inner, inner, env, tty=True)
        os.close(inner)
        self.raw = ""

    def send(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def wait(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        """Read until something matches."""
        deadline = time.monotonic() + seconds
        while True:
            text = CONTROL.sub("", self.raw).replace("\r", "")
            found = re.search(pattern, text)
            if found:
                self.raw = text[found.end() :]
                return found
            assert time.monotonic() < deadline, text
            self.raw += self._read()

    def _read(self) -> str:
        if not select.select([self.end], [], [], 1)[0]:
            return ""
        try:
            data = os.read(self.end, 65536)
        except OSError:  # what Linux says when nobody holds the other end any more
            data = b""
        if not data:
            raise EOFError(f"it ended: {CONTROL.sub('', self.raw)}")
        return data.decode(errors="replace")

    def say(self, text: str) -> re.Match[str]:
        """Send a message and wait for its answer, and for the next prompt."""
        self.send(text + ENTER)
        found = self.wait(STATISTICS)
        self.wait(">>> ")
        return found

    def leave(self, keys: str = CTRL_D) -> int:
        """Send these keys at the prompt; the exit code."""
        self.send(keys)
        with suppress(EOFError):
            self.wait("(?!)")
        return self.process.wait(20)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator:
    made: list[Terminal] = []

    def open_(*flags: str, columns: int = 100) -> Terminal:
        made.append(Terminal(*flags, state=tmp_path / "state", columns=columns))
        made[-1].wait("Send a message")
        return made[-1]

    yield open_
    for one in made:
        one.process.kill()
        one.process.wait()
        os.close(one.end)


def saved(terminal: Terminal, file: Path) -> list[dict[str, str]]:
    terminal.send(f"/save {file}{ENTER}")
    terminal.wait("messages written")
    terminal.wait(">>> ")
    return json.loads(file.read_text())["messages"]


def asked(terminal: Terminal, file: Path) -> list[str]:
    return [m["content"] for m in saved(terminal, file) if m["role"] == "user"]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(terminal, tmp_path: Path) -> None:
    here = terminal("--max-tokens", "1900", "--ignore-eos", "-t", "1", "--draft", "off")
    here.send("hello" + ENTER)
    here.wait(r"hello\s*\n(?s:.{40})")
    here.send(CTRL_C)
    here.wait(r"\d+ tokens \(interrupted\)[^\n]*")
    here.send("/set max-tokens 8" + ENTER)
    here.say("again")
    first, second, third, fourth = saved(here, tmp_path / "talk.json")
    assert [m["content"] for m in (first, third)] == ["hello", "again"]
    assert len(second["content"]) >= 20 and fourth["content"]
    assert here.leave() == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_ctrl_d_leaves(terminal, tmp_path: Path) -> None:
    here = terminal("-n", "4")
    here.send("never mind" + CTRL_C)
    here.wait("Ctrl-D or /bye leaves")
    here.say("hello")
    assert asked(here, tmp_path / "talk.json") == ["hello"]
    assert here.leave() == 0
    assert terminal().leave("/bye" + ENTER) == 0


def test_several_lines_are_one_message(terminal, tmp_path: Path) -> None:
    here = terminal("-n", "4")
    here.say("\x1b[200~one\ntwo\n\x1b[201~")
    here.say('"""three\rfour"""')
    assert asked(here, tmp_path / "talk.json") == ["one\ntwo\n", "three\nfour"]


def test_what_was_typed_is_remembered_over_sessions(terminal, tmp_path: Path) -> None:
    here = terminal("-n", "4")
    here.say("a thing to say")
    assert here.leave() == 0
    kept = tmp_path / "state" / "forerun" / "history"
    assert "a thing to say" in kept.read_text() and kept.stat().st_mode & 0o77 == 0
    again = terminal("-n", "4")
    again.send(UP)
    again.wait("a thing to say")
    again.say("")
    assert asked(again, tmp_path / "talk.json") == ["a thing to say"]


def test_a_history_that_cannot_be_written_costs_one_line(terminal, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    here = Terminal("-n", "4", state=tmp_path / "state")
    here.wait("note: what you type is not kept: [^\n]*\n")
    here.wait("Send a message")
    here.say("hello")
    assert here.leave() == 0
    os.close(here.end)


def test_commands_are_not_sent(terminal, tmp_path: Path) -> None:
    here = terminal("-n", "4", "--no-stats")
    here.send("/sav talk" + ENTER)
    here.wait(r"forerun: there is no command '/sav': did you mean '/save'\?")
    here.send("/set temperature -1" + ENTER)
    here.wait("forerun: temperature -1.0 is out of range")
    here.send("/stats" + ENTER)
    here.wait("statistics are on")
    here.say("//sav talk")
    assert asked(here, tmp_path / "talk.json") == ["/sav talk"]


def test_a_full_context_drops_the_oldest_and_says_so(terminal, tmp_path: Path) -> None:
    here = terminal("-n", "500", "--ignore-eos")
    for text in ("one", "two", "three"):
        here.say(text)
    here.send("four" + ENTER)
    dropped = int(
        here.wait(r"note: the context is full: the oldest (\d+) messages are forgotten").group(1)
    )
    here.wait(STATISTICS)
    assert asked(here, tmp_path / "talk.json") == ["one", "two", "three", "four"] and dropped >= 2
    here.send("\x1b[200~" + "long words " * 600 + "\x1b[201~" + ENTER)
    here.wait("forerun: this message takes")
    here.say("five")
    assert here.leave() == 0


def test_the_statistics_fit_a_narrow_terminal(terminal) -> None:
    here = terminal("-n", "4", columns=30)
    here.send("hello" + ENTER)
    line = here.wait(r"\n(4 tokens[^\n]*)\n").group(1)
    assert len(line) <= 30


def piped(
    forerun, monkeypatch: pytest.MonkeyPatch, lines: str, *flags: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return forerun("chat", *flags, *SMALL)


def test_a_pipe_is_answered_line_by_line(forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = piped(
        forerun, monkeypatch, "hello\nagain\n/exit\nnever\n", "--json", "--system", "be brief"
    )
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and "no chat template" in err and len(err.splitlines()) == 1
    assert second["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"]
    assert second["stats"]["cached_tokens"] >= first["stats"]["prompt_tokens"] // 16 * 16 > 0


def test_a_pipe_has_no_prompt_and_short_statistics(
    forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = piped(forerun, monkeypatch, "hello\n", "--ignore-eos")
    assert code == 0 and ">>>" not in out + err
    assert re.search(
        r"^8 tokens \(cut at max-tokens\) · .* · context \d+ of 2048 · .* per pass · drafted in \d+ of \d+ steps\b.*$",
        err,
        re.M,
    )
    assert "per pass" not in piped(forerun, monkeypatch, "hello\n", "--no-stats")[2]


def test_what_is_refused_in_a_pipe_shows_in_the_exit_code(
    forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = piped(forerun, monkeypatch, "x " * 4000 + "\nhello\n", "--json")
    assert code == 2 and len(out.splitlines()) == 1 and "forerun: this message takes" in err
