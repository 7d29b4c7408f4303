"""What this machine has: its processor, and the memory that this process holds and can still have.
No torch here."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

M_ARENA_MAX = -8  # of mallopt, in glibc


def told(file: str, field: str) -> str:
    """What a file of /proc tells of a field, where it stands first; "" where it does not."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """What the processor calls itself."""
    return told("cpuinfo", "model name") or platform.processor() or platform.machine()


def heap() -> int:
    """Bytes of memory that this process has now, besides stacks; 0 where the system does not
    say."""
    return _bytes("self/status", "VmData")


def free_ram() -> int:
    """Bytes of main memory that can still be allocated, as far as the system and the container
    say."""
    return min(_available(), _allowed(Path("/sys/fs/cgroup")))


def give_back() -> None:
    """Return to the system what the C library keeps of memory that was freed, where that can be
    asked for."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_arenas() -> None:
    """Let all threads allocate from two arenas, where the C library can be told so: memory that is
    freed in an arena of each thread stays there, hundreds of megabytes behind grammars that
    grew."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def _bytes(file: str, field: str) -> int:
    text = told(file, field)
    return int(text.split()[0]) << 10 if text else 0


def _available() -> int:
    """Bytes that the machine has left."""
    if left := _bytes("meminfo", "MemAvailable"):
        return left
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def _allowed(group: Path) -> int:
    """Bytes that a container has left: its limit less what it uses, but for the files it has in
    memory. Control groups of either version, mounted at `group`; a great number without a limit."""
    for limit, used, kept, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with suppress(OSError, ValueError):  # "max" is no number: there is no limit
            room = int((group / limit).read_text()) - int((group / used).read_text())
            lines = (line.split() for line in (group / kept).read_text().splitlines())
            return max(room + sum(int(value) for key, value in lines if key == name), 0)
    return 1 << 60
