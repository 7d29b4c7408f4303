"""File descriptors: as many as the system allows, and no more connections than leave some for
everything else."""

from __future__ import annotations

import errno
import logging
import os
import resource
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from forerun.server.settings import Settings

log = logging.getLogger("forerun.server")
# descriptors for files, pipes of worker processes and everything else that opens one while requests
# run
SPARE = 64
MOST_ARRIVALS = 1024  # connections that have not sent a request yet
SURPLUS = 16  # connections over --max-connections, until those that are too many are closed
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> None:
    """Let this process have as many open files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_arrivals() -> int:
    """Connections that may wait without a request, besides --max-connections: fewer where there are
    few descriptors."""
    return max(4, min(MOST_ARRIVALS, _limit() // 8))


def within_limit(settings: Settings, each: int = 1) -> Settings:
    """Settings whose connections leave descriptors for everything else; a connection takes `each`
    of them.

    Logs one line where that is fewer than were asked for.
    """
    used = (
        sum(1 for _ in Path("/proc/self/fd").iterdir()) if os.path.isdir("/proc/self/fd") else SPARE
    )
    most = max(1, (_limit() - used - SPARE - SURPLUS - most_arrivals()) // each)
    if most >= settings.max_connections:
        return settings
    log.warning(
        "this process may have %d files open, which is enough for %d connections and not for %d (--max-connections):"
        " raise the limit with ulimit -n",
        *(_limit(), most, settings.max_connections),
    )
    return replace(settings, max_connections=most)


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Whether an error says that there is no descriptor left."""
    return isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
