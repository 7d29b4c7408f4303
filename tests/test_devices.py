"""The order of work on a side stream and on the main one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from forerun.devices import SideStream


def test_a_side_stream_is_ordered_by_fork_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.name = "side" if device else "main"

        def wait_stream(self, other: Any) -> None:
            events.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def stream(own: Any) -> Any:
        events.append(f"in {own.name}")
        yield
        events.append("out")

    main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    side = SideStream(torch.device("cuda"))
    side.fork()
    with side.use():
        events.append("work")
    side.join()
    expected = ["side waits for main", "in side", "work", "out", "main waits for side"]
    assert events == expected


def test_a_side_stream_does_nothing_on_a_cpu() -> None:
    side = SideStream(torch.device("cpu"))
    side.fork()
    with side.use():
        pass
    side.join()
