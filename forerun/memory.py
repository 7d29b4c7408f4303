"""How much memory this process can still have. No torch here."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path


def free_ram() -> int:
    """Bytes of main memory that can still be allocated, as far as the system and the container say."""
    return min(_available(), _allowed(Path("/sys/fs/cgroup")))


def give_back() -> None:
    """Return to the system what the C library keeps of memory that was freed, where that can be asked for."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _available() -> int:
    """Bytes that the machine has left."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def _allowed(group: Path) -> int:
    """Bytes that a container has left: its limit less what it uses, but for the files it has in memory. Control groups
    of either version, mounted at `group`; a great number without a limit."""
    for limit, used, kept, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # "max" is no number: there is no limit
            room = int((group / limit).read_text()) - int((group / used).read_text())
            lines = (line.split() for line in (group / kept).read_text().splitlines())
            return max(room + sum(int(value) for key, value in lines if key == name), 0)
    return 1 << 60
