"""The standing attack in short: scripts/attack.py, all of its corpus once and small, against a
server of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import attack  # noqa: E402
import attack_corpus  # noqa: E402

SHORT = [
    "--json",
    "--once",
    "--seconds",
    "1.5",
    "--scale",
    "0.01",
    "--patience",
    "0.5",
    "--attackers",
    "6",
]


def test_the_corpus_has_what_it_says() -> None:
    assert len(attack_corpus.NAMES) > 40
    for name, make in attack_corpus.REQUESTS.items():
        path, body = make(0.01)
        assert path.startswith("/") and len(body) <= (8 << 20) * 0.01 + 4400, (
            f"{name} is refused by its size alone"
        )


def test_innocents_notice_no_attack() -> None:
    """They get their text and /health is answered; there is no 500, no traceback, no memory kept;
    SIGTERM ends it."""
    names = attack_corpus.NAMES
    command = [
        sys.executable,
        str(ROOT / "scripts" / "attack.py"),
        *SHORT,
        "--model",
        str(tiny.spoken()),
    ]
    done = subprocess.run(
        [*command, *(word for name in names for word in ("--only", name))],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert {what.partition(":")[0] for what in report["attacks"]} == set(names), (
        "not all of it was tried"
    )
    assert report["under attack"]["texts"] and report["tracebacks"] == 0
    times = (f"{word} " for word in ("tokens", "/health"))  # which are no matter for a test
    assert [failed for failed in report["failed"] if not failed.startswith(tuple(times))] == []


@pytest.mark.parametrize(
    "url", ["http://a.example:8000", "http://192.168.1.7", "http://0.0.0.0:8000"]
)
def test_only_what_is_on_this_machine_is_attacked(url: str) -> None:
    with pytest.raises(SystemExit, match="not of this machine"):
        attack.Server(attack.arguments(["--url", url]))
