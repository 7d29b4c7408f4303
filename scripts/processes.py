"""Server processes of the measuring scripts: their addresses, descendants and memory."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path

LONGEST_START = 120.0  # seconds


def address(process: subprocess.Popen[bytes], log: Path, pattern: str = r" on (http://\S+)") -> str:
    """Return the address that a starting server writes to its log. Exits if it does not start."""
    end = time.monotonic() + LONGEST_START
    while process.poll() is None and time.monotonic() < end:
        if found := re.search(pattern, log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {log.read_text()}")


def below(pid: int) -> list[int]:
    """Return a process id and those of all its descendants."""
    found = [pid]
    for process in found:
        with suppress(OSError):  # it may end meanwhile
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def memory(pids: list[int], kind: str = "RssAnon") -> float:
    """Return MiB of processes: RssAnon is what they took for themselves, RssShmem a KV cache."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            found = re.search(rf"{kind}:\s+(\d+)", status)
            total += int(found[1]) if found else 0
    return round(total / 1024, 1)
