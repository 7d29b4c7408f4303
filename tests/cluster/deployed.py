"""`forerun deploy` as a process."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra cluster"
)


@contextmanager
def deployed(plan: str) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """Run the cluster of a plan in TOML; yield its process and a client of its address.

    At the end it must exit with code 0 and leave none of its processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(f"port = 0\nshutdown_timeout = 2\n{plan}")
        command = [sys.executable, "-m", "forerun.cli.main", "deploy", str(file)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        children: set[int] = set()
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "serving replicas" in line:
                    break
            address = re.search(r"http://[0-9.:]+$", "".join(lines).strip())
            assert address, f"the cluster did not start: {lines}"
            with httpx2.Client(base_url=address[0], timeout=60) as http:
                yield process, http
            children = descendants(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=60)
        assert process.returncode == 0, rest
        assert not [pid for pid in children if is_running(pid)]


def descendants(pid: int, name: str = "") -> set[int]:
    """Return the ids of descendants of a process whose command line contains a name."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    found = {pid}
    while True:
        more = {int(child) for child, parent, *_ in rows if int(parent) in found} - found
        if not more:
            break
        found |= more
    return {int(row[0]) for row in rows if int(row[0]) in found - {pid} and name in row[-1]}


def is_running(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
