"""Work beside the event loop takes a share of the time: its place rests after it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

pytest.importorskip("fastapi")

from forerun.server import lanes
from forerun.server.lanes import Lane


def test_a_place_rests_after_long_work_and_not_after_short(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        later = loop.call_later
        await Lane(1).do(lambda: None)  # the first thread takes longer
        monkeypatch.setattr(
            loop, "call_later", lambda rest, call: later(rests.append(rest) or 0, call)
        )
        lane = Lane(1)
        assert await lane.do(lambda: 7) == 7
        await lane.do(time.sleep, 0.02)
        with pytest.raises(ZeroDivisionError):
            await lane.do(lambda: 1 / 0)
        monkeypatch.undo()

    monkeypatch.setattr(lanes, "SHORT", 0.015)
    asyncio.run(main())
    assert rests[0] == rests[2] == 0.0
    assert lanes.REST * 0.02 <= rests[1] <= lanes.LONGEST_REST


def test_no_more_are_at_work_than_there_are_places() -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.001)
        with lock:
            at_once -= 1

    async def main() -> None:
        lane = Lane(2)
        await asyncio.gather(*(lane.do(work) for _ in range(12)))

    asyncio.run(main())
    assert most == 2
