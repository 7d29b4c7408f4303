"""What is written by lines is one line to every reader, those that split at Unicode's line ends
included."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import forerun
from forerun.cli.conversation import Conversation, read
from forerun.utils import json_line

ENDS = [chr(code) for code in range(sys.maxunicode + 1) if len(f"a{chr(code)}b".splitlines()) > 1]
# the other places where JSON is written with all its characters: none of them writes lines
NOT_LINES = {
    *(
        "utils.py",
        "server/large_responses.py",
        "server/limits.py",
        "server/app.py",
        "server/conversation.py",
    ),
    *("models/chat_template.py", "measure/workloads.py", "train/data.py"),
}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: f"U+{ord(end):04X}")
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_character_of_a_value_ends_its_line(end: str, ascii_only: bool) -> None:
    value = {f"key{end}": [f"one{end}two", "caf\u00e9 \U0001f600"]}
    line = json_line(value, ascii_only)
    assert line.splitlines() == [line] and json.loads(line) == value
    assert line.isascii() is ascii_only


def test_a_saved_conversation_is_one_line(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "".join(ENDS)}]
    conversation = Conversation.__new__(Conversation)
    conversation.messages, conversation.forgotten = said, []
    conversation.save(str(tmp_path / "saved.json"))
    text = (tmp_path / "saved.json").read_bytes().decode()
    assert len(text.splitlines()) == 1 and read(tmp_path / "saved.json") == said


def test_nothing_else_writes_lines_with_all_their_characters() -> None:
    """`json_line` is the one writer: json.dumps with ensure_ascii=False leaves line ends in
    place."""
    package = Path(forerun.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"ensure_ascii\s*=\s*(?!True)", path.read_text(encoding="utf-8"))
    }
    assert found <= NOT_LINES
