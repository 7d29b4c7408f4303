"""A short run of scripts/attack.py: its whole corpus at a small scale, against a server that it starts."""

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

SHORT = ["--json", "--warm-up", "--once", "--seconds", "1.5", "--scale", "0.01"]
SHORT += ["--patience", "0.5", "--attackers", "6"]


def test_the_corpus_is_not_refused_by_size_alone() -> None:
    assert len(attack_corpus.NAMES) > 40
    for name, make in attack_corpus.REQUESTS.items():
        path, body = make(0.01)
        assert path.startswith("/") and len(body) <= (8 << 20) * 0.01 + 4400, name


@pytest.mark.one_in(0)
def test_an_attack_does_not_affect_other_clients() -> None:
    """Texts stay the same; no status 500, traceback or leak; SIGTERM ends the server.

    The memory is compared after a first pass over all attacks, since a fresh process allocates at
    the first use of many features. What a second pass adds is a leak.
    """
    names = attack_corpus.NAMES
    script = str(ROOT / "scripts" / "attack.py")
    command = [sys.executable, script, *SHORT, "--model", str(tiny.repetitive())]
    command += [word for name in names for word in ("--only", name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert {attack.partition(":")[0] for attack in report["attacks"]} == set(names)
    assert report["under attack"]["texts"] and report["tracebacks"] == 0
    timings = ("tokens ", "/health ")  # these depend on the machine
    assert [failed for failed in report["failed"] if not failed.startswith(timings)] == []


@pytest.mark.parametrize(
    "url", ["http://a.example:8000", "http://192.168.1.7", "http://0.0.0.0:8000"]
)
def test_only_servers_of_this_machine_can_be_attacked(url: str) -> None:
    with pytest.raises(SystemExit, match="not of this machine"):
        attack.Server(attack.arguments(["--url", url]))
