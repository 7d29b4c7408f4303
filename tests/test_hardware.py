"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun import hardware as machine
from forerun import load


def group(place: Path, names: tuple[str, str, str], limit: str, stat: str) -> Path:
    for name, text in zip(names, (limit, "3000\n", stat), strict=True):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


TWO = ("memory.max", "memory.current", "memory.stat")
ONE = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")


@pytest.mark.parametrize(("names", "key"), [(TWO, "inactive_file"), (ONE, "total_inactive_file")])
def test_what_a_container_has_left(tmp_path: Path, names: tuple[str, str, str], key: str) -> None:
    """Files in its memory do not count: the system takes them back."""
    assert machine._allowed(group(tmp_path, names, "10000\n", f"anon 5\n{key} 500\n")) == 7500
    assert machine._allowed(group(tmp_path, names, "2000\n", "")) == 0


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert machine._allowed(tmp_path) > 1 << 50
    assert machine._allowed(group(tmp_path, TWO, "max\n", "")) > 1 << 50


def test_the_less_of_both_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed", lambda _: 7)
    assert load.free_memory(torch.device("cpu")) == 7
