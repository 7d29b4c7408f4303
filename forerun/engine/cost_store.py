"""Persistent cost model: the depth policy's learned costs, a file for each model and machine.

Without it every process starts without measurements: it measures plain passes first, and the cost
of a drafter while its weights are not in the caches yet. The file is a convenience. A damaged one
is ignored with a line in the log, and no file changes the generated text. It holds counts and
seconds, no text.
"""

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

VERSION = "costs 5"  # of the file's content
MIN_WEIGHT_BYTES = 32 << 20  # smaller models are measured as fast as the file is read
MIN_PASSES, MIN_SECONDS = 16, 10.0  # between two writes


class CostStore:
    """The file of one engine's policy, if it has one."""

    def __init__(self, policy: DepthPolicy, path: Path | None) -> None:
        """Load the file at `path` into `policy`; None keeps nothing."""
        self.policy, self.path = policy, path
        self._saved_passes = 0
        self._saved_at = float("-inf")
        if path is not None:
            recalled(path, policy.load_state)
            self._saved_passes = policy.costs.num_passes

    def save(self) -> None:
        """Write the file if enough was learned since the last time."""
        num_passes, now = self.policy.costs.num_passes, time.monotonic()
        due = now >= self._saved_at + MIN_SECONDS and num_passes >= self._saved_passes + MIN_PASSES
        if self.path is None or not due:
            return
        self._saved_passes, self._saved_at = num_passes, now
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(self.policy.state()))
        except (OSError, ForerunError):
            self.path = None  # the next write would fail as well


def open_cost_store(
    policy: DepthPolicy, model: Path, weight_bytes: int, facts: list[Any]
) -> CostStore:
    """Return the store for a model on this machine.

    `facts` are what costs depend on besides: its precision, threads, drafts.
    """
    path: Path | None = None
    folder = cache_folder()
    if folder is not None and weight_bytes >= MIN_WEIGHT_BYTES:
        key = [VERSION, platform.machine(), processor(), *facts]
        with suppress(OSError):
            path = folder / "learned" / f"{model_digest(model, map(str, key))}.json"
    return CostStore(policy, path)
