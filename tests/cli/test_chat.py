"""`forerun chat` as users run it: keys on a terminal, and lines in a pipe."""

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

FLAGS = ["--model", str(tiny.repetitive()), "--kv-tokens", "2048", "--threads", "1"]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b[A", "\x03", "\x04"
STATISTICS = r"tokens[^\n]* · context \d+ of 2048"


class Terminal:
    """A pseudo-terminal that runs `forerun chat`; `wait` consumes its output up to a match."""

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
        except OSError:  # Linux raises this when the other end is closed
            data = b""
        if not data:
            raise EOFError(f"forerun chat ended: {CONTROL.sub('', self.raw)}")
        return data.decode(errors="replace")

    def say(self, text: str) -> re.Match[str]:
        """Send a message and wait for its answer, and for the next prompt."""
        self.send(text + ENTER)
        found = self.wait(STATISTICS)
        self.wait(">>> ")
        return found

    def leave(self, keys: str = CTRL_D) -> int:
        """Send these keys at the prompt and return the exit code."""
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
    for each in made:
        each.process.kill()
        each.process.wait()
        os.close(each.end)


def saved(terminal: Terminal, file: Path) -> list[dict[str, str]]:
    terminal.send(f"/save {file}{ENTER}")
    terminal.wait("messages written")
    terminal.wait(">>> ")
    return json.loads(file.read_text())["messages"]


def user_messages(terminal: Terminal, file: Path) -> list[str]:
    return [m["content"] for m in saved(terminal, file) if m["role"] == "user"]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(terminal, tmp_path: Path) -> None:
    chat = terminal("--max-tokens", "1900", "--ignore-eos", "-t", "1", "--draft", "off")
    chat.send("hello" + ENTER)
    chat.wait(r"hello\s*\n(?s:.{40})")
    chat.send(CTRL_C)
    chat.wait(r"\d+ tokens \(interrupted\)[^\n]*")
    chat.send("/set max-tokens 8" + ENTER)
    chat.say("again")
    first, second, third, fourth = saved(chat, tmp_path / "talk.json")
    assert [m["content"] for m in (first, third)] == ["hello", "again"]
    assert len(second["content"]) >= 20 and fourth["content"]
    assert chat.leave() == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_ctrl_d_leaves(terminal, tmp_path: Path) -> None:
    chat = terminal("-n", "4")
    chat.send("never mind" + CTRL_C)
    chat.wait("Ctrl-D or /bye leaves")
    chat.say("hello")
    assert user_messages(chat, tmp_path / "talk.json") == ["hello"]
    assert chat.leave() == 0
    assert terminal().leave("/bye" + ENTER) == 0


def test_several_lines_are_one_message(terminal, tmp_path: Path) -> None:
    chat = terminal("-n", "4")
    chat.say("\x1b[200~one\ntwo\n\x1b[201~")
    chat.say('"""three\rfour"""')
    assert user_messages(chat, tmp_path / "talk.json") == ["one\ntwo\n", "three\nfour"]


def test_the_input_history_is_kept_between_sessions(terminal, tmp_path: Path) -> None:
    chat = terminal("-n", "4")
    chat.say("a thing to say")
    assert chat.leave() == 0
    kept = tmp_path / "state" / "forerun" / "history"
    assert "a thing to say" in kept.read_text() and kept.stat().st_mode & 0o77 == 0
    again = terminal("-n", "4")
    again.send(UP)
    again.wait("a thing to say")
    again.say("")
    assert user_messages(again, tmp_path / "talk.json") == ["a thing to say"]


def test_an_unwritable_history_is_reported_in_one_line(terminal, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    chat = Terminal("-n", "4", state=tmp_path / "state")
    chat.wait("note: what you type is not kept: [^\n]*\n")
    chat.wait("Send a message")
    chat.say("hello")
    assert chat.leave() == 0
    os.close(chat.end)


def test_commands_are_not_sent_to_the_model(terminal, tmp_path: Path) -> None:
    chat = terminal("-n", "4", "--no-stats")
    chat.send("/sav talk" + ENTER)
    chat.wait(r"forerun: there is no command '/sav': did you mean '/save'\?")
    chat.send("/set temperature -1" + ENTER)
    chat.wait("forerun: temperature -1.0 is out of range")
    chat.send("/stats" + ENTER)
    chat.wait("statistics are on")
    chat.say("//sav talk")
    assert user_messages(chat, tmp_path / "talk.json") == ["/sav talk"]


def test_a_full_context_drops_the_oldest_messages_with_a_note(terminal, tmp_path: Path) -> None:
    chat = terminal("-n", "500", "--ignore-eos")
    for text in ("one", "two", "three"):
        chat.say(text)
    chat.send("four" + ENTER)
    dropped = int(
        chat.wait(r"note: the context is full: the oldest (\d+) messages are forgotten").group(1)
    )
    chat.wait(STATISTICS)
    assert dropped >= 2
    assert user_messages(chat, tmp_path / "talk.json") == ["one", "two", "three", "four"]
    chat.send("\x1b[200~" + "long words " * 600 + "\x1b[201~" + ENTER)
    chat.wait("forerun: this message takes")
    chat.say("five")
    assert chat.leave() == 0


def test_the_statistics_fit_a_narrow_terminal(terminal) -> None:
    chat = terminal("-n", "4", columns=30)
    chat.send("hello" + ENTER)
    line = chat.wait(r"\n(4 tokens[^\n]*)\n").group(1)
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


def test_a_refused_line_in_a_pipe_sets_the_exit_code(
    forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = piped(forerun, monkeypatch, "x " * 4000 + "\nhello\n", "--json")
    assert code == 2 and len(out.splitlines()) == 1 and "forerun: this message takes" in err
