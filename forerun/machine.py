"""What this machine's processor is, and how much of it there is."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def cpu_lines(field: str) -> list[str]:
    """Every value of a field of /proc/cpuinfo; empty where there is no such file."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field]
    return []


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """What the processor calls itself."""
    return next(iter(cpu_lines("model name")), "") or platform.processor() or platform.machine()
