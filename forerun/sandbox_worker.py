"""The process behind a `Sandbox`: one function, called again and again, under limits.

Where a limit is met the process ends, which is all that the other side has to know. What the function imports must be
light: nothing here may need torch.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import marshal
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from forerun.sandbox import WALL

PR_SET_PDEATHSIG = 1
STACK = 120 << 20  # compilers recurse; Linux leaves room for so much


def main() -> None:
    """Answer until the other side closes. The arguments are those of `Sandbox`, behind a connection and its owner."""
    descriptor, parent, name, seconds, memory, niceness = sys.argv[1:7]
    _end_with(int(parent))
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    _yield(int(niceness))
    _limit(int(memory))
    connection, before = Connection(int(descriptor)), _held()
    while True:
        try:
            arguments = marshal.loads(connection.recv_bytes())
        except EOFError:
            return
        _alarm(float(seconds))
        try:
            said = {"result": function(*arguments)}
        except MemoryError:
            os._exit(1)
        except Exception as error:
            said = {"error": str(error) or type(error).__name__}
        del arguments
        connection.send_bytes(json.dumps(said | {"grown": _held() - before}).encode())
        _alarm(0)


def _yield(niceness: int) -> None:
    """Let everything else go first, by so much. Linux shares a processor by sessions first where it groups them, and
    then a process's own niceness counts within its session only."""
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def heap() -> int:
    """Bytes of memory that this process has now, besides stacks; 0 where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    return 0


def _held() -> int:
    """The same with stacks."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def _alarm(seconds: float) -> None:
    """What comes next may compute for so long, and take WALL times that by the clock; 0 for no limit. Nothing handles
    these signals: they end the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)


def _limit(memory: int) -> None:
    """Refuse memory beyond what is held now and `memory` bytes, let the stack grow, and write no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    if held := heap():
        resource.setrlimit(resource.RLIMIT_DATA, (held + memory, held + memory))


def _end_with(parent: int) -> None:
    """End when the process that started this one does, where Linux can see to that; elsewhere with its next answer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
