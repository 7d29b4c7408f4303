"""What the depth policy learned, from one process to the next: a file of counts and seconds for
each model and machine.

Without it every process begins by believing nothing: it measures plain passes first, and what a
drafter costs while its weights are not in the caches yet. It is a convenience: of a file that is
damaged nothing is believed, which is told in one line, and no file changes what is generated. It
holds no text."""

from __future__ import annotations

import json
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.engine.depth import DepthPolicy
from forerun.errors import ForerunError
from forerun.hardware import processor
from forerun.models.packed_cache import cache_folder, model_digest
from forerun.utils import recalled, write_atomic

VERSION = "learned 3"  # of what a file holds
SMALLEST = 32 << 20  # bytes of weights: what is smaller is measured as fast as it is read
PASSES, SECONDS = 16, 10.0  # that lie between two writes at least


class Learned:
    """The file of one engine, if it has one."""

    def __init__(self, policy: DepthPolicy, path: Path | None) -> None:
        """Lets the policy begin with what the file at `path` knows; None keeps nothing."""
        self.policy, self.path = policy, path
        self._passes, self._written = 0, float("-inf")
        if path is not None:
            recalled(path, policy.recall)
            self._passes = policy.learned.passes

    def keep(self) -> None:
        """Write the file, where enough was learned since the last time."""
        learned, now = self.policy.learned, time.monotonic()
        if (
            self.path is None
            or now < self._written + SECONDS
            or learned.passes < self._passes + PASSES
        ):
            return
        self._passes, self._written = learned.passes, now
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(self.policy.state()))
        except (OSError, ForerunError):
            self.path = None  # the next one would fail as well


def learned_of(policy: DepthPolicy, model: Path, weight_bytes: int, facts: list[Any]) -> Learned:
    """What is known of this model, as `facts` tell it (its precision, threads, drafts), on this
    machine."""
    path: Path | None = None
    folder = cache_folder()
    if folder is not None and weight_bytes >= SMALLEST:
        machine = [VERSION, platform.machine(), processor()]
        with suppress(OSError):
            path = folder / "learned" / f"{model_digest(model, map(str, [*machine, *facts]))}.json"
    return Learned(policy, path)
