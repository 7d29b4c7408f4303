"""The directory of the replicas' sockets, which is removed at the end, or by the next start where
there was none."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "forerun-cluster-"


@contextmanager
def socket_directory() -> Iterator[str]:
    """A new directory that only this user may enter. It is locked while it is in use, by which
    those of processes that were killed are known and removed."""
    remove_stale()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as directory:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield directory
        finally:
            os.close(descriptor)


def remove_stale() -> None:
    """Remove the directories of this user that no process has locked."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
