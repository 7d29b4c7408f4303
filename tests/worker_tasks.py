"""Tasks that tests run in worker processes, which import this module, so it imports little."""

import itertools
import os
import sys
import time
from typing import Any


def run(kind: str, value: Any = None) -> Any:
    """Run one kind of task."""
    return {
        "echo": lambda: value,
        "pid": os.getpid,
        "modules": lambda: sorted(sys.modules),
        "compute": lambda: [None for _ in itertools.repeat(0) if False],
        "sleep": lambda: time.sleep(value),
        "allocate": lambda: [bytearray(1 << 20) for _ in range(value)] and None,
        "recurse": lambda: run("recurse"),
        "exit": lambda: os._exit(0),
    }[kind]()
