"""What a server says as it starts and while it runs: to a person at a terminal, and to a
program."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2

from forerun.server.run import JsonLines, PlainLines, announcement, greeting
from tests import tiny

FACTS = {"model": "tiny", "draft": "suffix", "depth": "auto", "rule": "match"}
ROOT = Path(__file__).parents[2]


def record(level: int, text: str, **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("forerun.server", level, __file__, 1, text, (), None)
    made.facts = facts
    return made


def test_a_person_is_told_where_to_go() -> None:
    said = greeting(FACTS, "http://127.0.0.1:8000").splitlines()
    assert len(said) <= 4 and max(map(len, said)) < 80
    assert "tiny (draft suffix)" in said[0]
    for end in ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/docs"):
        assert any(line.endswith(end) for line in said), end
    assert "no chat template" in greeting(
        FACTS | {"chat_template": False}, ""
    ) and "template" not in "".join(said)
    assert "(no draft)" in greeting(FACTS | {"draft": "off"}, "")


def test_a_program_is_told_in_one_line_that_ends_with_the_address() -> None:
    said = announcement(FACTS, "http://127.0.0.1:8000")
    match = re.fullmatch(r"forerun: serving (\{.*\}) on (http://127.0.0.1:8000)", said)
    assert match and json.loads(match[1]) == FACTS


def test_log_lines_for_a_person_and_for_a_program() -> None:
    warning = record(logging.WARNING, "it is late", seconds=1.5, error=None)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d WARNING: it is late seconds=1.5", PlainLines().format(warning)
    )
    assert json.loads(JsonLines().format(warning))["seconds"] == 1.5


def test_on_a_terminal_the_greeting_comes_when_it_answers_and_nothing_else() -> None:
    outer, inner = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "forerun.cli.main",
        "serve",
        str(tiny.spoken()),
        "--port",
        "0",
        "--kv-tokens",
        "2048",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=inner)
    os.close(inner)
    said = b""
    try:
        while b"/docs" not in said:
            said += os.read(outer, 4096)
        address = re.search(rb"http://[0-9.:]+", said)
        assert (
            address and httpx2.get(f"{address[0].decode()}/health", timeout=30).status_code == 200
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(outer)
    lines = said.decode().splitlines()
    assert len(lines) == 4 and lines[0].startswith(
        "Serving tiny (draft suffix), which has no chat template"
    ), lines
