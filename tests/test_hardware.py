"""The memory that this process may use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun import hardware, load


def cgroup(place: Path, names: tuple[str, str, str], limit: str, stat: str) -> Path:
    for name, text in zip(names, (limit, "3000\n", stat), strict=True):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")


@pytest.mark.parametrize(("names", "key"), [(V2, "inactive_file"), (V1, "total_inactive_file")])
def test_memory_left_in_a_container(tmp_path: Path, names: tuple[str, str, str], key: str) -> None:
    """Cached files in its memory do not count, since the system can evict them."""
    assert hardware._allowed(cgroup(tmp_path, names, "10000\n", f"anon 5\n{key} 500\n")) == 7500
    assert hardware._allowed(cgroup(tmp_path, names, "2000\n", "")) == 0


def test_a_missing_limit_is_infinite(tmp_path: Path) -> None:
    assert hardware._allowed(tmp_path) > 1 << 50
    assert hardware._allowed(cgroup(tmp_path, V2, "max\n", "")) > 1 << 50


def test_the_smaller_of_two_limits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_allowed", lambda _: 7)
    assert load.free_memory(torch.device("cpu")) == 7
