"""JSON of answers, written slice by slice: to write a long one in one go would hold the interpreter."""

from __future__ import annotations

import json
from typing import Any

SLICE = 64  # items of a list that are written at once
LEVELS = 5  # down to the entries of log-probabilities


def written(value: Any, levels: int = LEVELS) -> str:
    """A value as JSON."""
    if levels and isinstance(value, dict):
        return "{" + ",".join(f"{_dumps(name)}:{written(item, levels - 1)}" for name, item in value.items()) + "}"
    if levels and isinstance(value, list):
        if levels > 1 and value and isinstance(value[0], dict | list):
            return "[" + ",".join(written(item, levels - 1) for item in value) + "]"
        return "[" + ",".join(_dumps(value[at : at + SLICE])[1:-1] for at in range(0, len(value), SLICE)) + "]"
    return _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
