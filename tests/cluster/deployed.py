"""`forerun deploy` in a process of its own."""

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
def deployed(
    plan: str, file: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """The cluster of a plan in TOML: its process, and a client of its door. It must end in order,
    and leave nothing in its directory for temporary files, where the plan is if no other `file` is
    given."""
    with tempfile.TemporaryDirectory() as folder:
        file = file or Path(folder) / "cluster.toml"
        file.write_text(f"port = 0\nshutdown_timeout = 2\n{plan}")
        command = [sys.executable, "-m", "forerun.cli.main", "deploy", str(file)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "serving replicas" in line), "")
            address = re.search(r"http://[0-9.:]+$", said.strip())
            assert address, "the cluster did not start"
            with httpx2.Client(base_url=address[0], timeout=60) as http:
                yield process, http
        finally:
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=60)
        assert process.returncode == 0, rest
        assert not list(Path(folder).glob("forerun-*"))
