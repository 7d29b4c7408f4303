"""The processor and the memory of this machine and process. Must not import torch."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

M_ARENA_MAX = -8  # parameter of mallopt in glibc


def proc_field(file: str, field: str) -> str:
    """Return the first value of a field in a file of /proc, or ""."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Return the model name of the processor."""
    return proc_field("cpuinfo", "model name") or platform.processor() or platform.machine()


def heap() -> int:
    """Return the bytes of data memory of this process, without stacks; 0 if unknown."""
    return _bytes("self/status", "VmData")


def free_ram() -> int:
    """Return the bytes of main memory that can still be allocated on this system or container."""
    return min(_available(), _allowed(Path("/sys/fs/cgroup")))


def trim_heap() -> None:
    """Return freed memory that the C library holds to the system, if malloc_trim is available."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_arenas() -> None:
    """Limit the C library to two malloc arenas, if it supports that.

    With an arena per thread, freed memory is not reused by other threads: large grammars leave
    hundreds of megabytes behind.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def _bytes(file: str, field: str) -> int:
    text = proc_field(file, field)
    return int(text.split()[0]) << 10 if text else 0


def _available() -> int:
    """Return the available bytes of the machine."""
    if left := _bytes("meminfo", "MemAvailable"):
        return left
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def _allowed(group: Path) -> int:
    """Return the available bytes of a container: limit - usage + reclaimable file cache.

    Supports both versions of control groups, mounted at `group`. Without a limit, returns 2**60.
    """
    for limit, used, kept, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with suppress(OSError, ValueError):  # "max" is not a number: there is no limit
            room = int((group / limit).read_text()) - int((group / used).read_text())
            lines = (line.split() for line in (group / kept).read_text().splitlines())
            return max(room + sum(int(value) for key, value in lines if key == name), 0)
    return 1 << 60
