"""What tests call in a sandbox. Light: it is imported there."""

import itertools
import os
import sys
import time
from typing import Any


def act(kind: str, value: Any = None) -> Any:
    """One of the things that work in a sandbox may do."""
    return {
        "say": lambda: value,
        "pid": os.getpid,
        "modules": lambda: sorted(sys.modules),
        "compute": lambda: [None for _ in itertools.repeat(0) if False],
        "sleep": lambda: time.sleep(value),
        "hoard": lambda: [bytearray(1 << 20) for _ in range(value)] and None,
        "recurse": lambda: act("recurse"),
        "exit": lambda: os._exit(0),
    }[kind]()
