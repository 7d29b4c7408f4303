"""Directories of sockets do not outlive their processes for long, and Ray's ports are not open to
other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.cluster.sockets import PREFIX, remove_stale, socket_directory

KILLED = """
import os, signal
from forerun.cluster.sockets import socket_directory
with socket_directory() as directory:
    open(os.path.join(directory, "socket"), "w").close()
    print(directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_directory_of_a_killed_process_is_removed_by_the_next_start(temporary: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    left = Path(done.stdout.strip())
    assert done.returncode < 0 and (left / "socket").exists() and left.parent == temporary
    with socket_directory() as directory:
        assert not left.exists() and Path(directory).is_dir()
    assert list(temporary.iterdir()) == []


def test_a_directory_in_use_and_what_is_not_ours_stay(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("x")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").write_text("x")
    (temporary / "forerun-other").mkdir()
    with socket_directory() as directory:
        assert os.stat(directory).st_mode & 0o077 == 0
        remove_stale()
        assert Path(directory).is_dir()
    assert (elsewhere / "file").exists() and (temporary / "forerun-other").exists()
    assert (temporary / f"{PREFIX}file").exists() and (temporary / f"{PREFIX}link").is_symlink()


def test_ray_is_kept_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages of metrics were open on all interfaces."""
    from forerun.cluster.cli import _keep_to_this_machine

    for name in (
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        _keep_to_this_machine()
        assert (
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
            and len(os.environ["RAY_AUTH_TOKEN"]) == 64
        )
