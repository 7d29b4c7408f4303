"""One request begins in each round of the event loop: a crowd holds up neither /health nor the
tokens of others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.server import limits
from forerun.server.state import ServerState
from tests.server.serving import PATIENCE, Serving, serving, until
from tests.server.test_connections import ASKED, connected, post


def do(s: Serving, work: Any) -> None:
    """Something on the server's event loop."""
    assert s.service._loop is not None
    asyncio.run_coroutine_threadsafe(work, s.service._loop).result(PATIENCE)


def test_one_goes_on_in_a_round() -> None:
    nothing: Any = None
    passed: list[int] = []

    async def main() -> None:
        kitchen, number = ServerState(nothing, "", "", 0.0, 0), 0

        async def one() -> None:
            await kitchen.turn()
            passed.append(number)

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            number += 1

    asyncio.run(main())
    assert len(passed) == 20 == len(set(passed))


def test_whoever_leaves_before_its_turn_is_not_worked_for(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    asked: list[asyncio.Event] = []
    serves: list[bool] = []
    parse = limits.parse

    async def wait(_: ServerState) -> None:
        if not serves:  # it asks itself for some pages as it starts
            return
        asked.append(asyncio.Event())
        if len(asked) == 1:
            await asked[-1].wait()

    async def let_go() -> None:
        asked[-1].set()

    monkeypatch.setattr(ServerState, "turn", wait)
    with serving(spare) as s:
        monkeypatch.setattr(limits, "parse", lambda body: (parsed.append(body), parse(body))[1])
        serves.append(True)
        with connected(s, post(ASKED)):
            until(lambda: len(asked) == 1, "it waits for its turn")
        until(lambda: not s.server.server_state.connections, "it has gone")
        do(s, let_go())
        until(lambda: not s.server.server_state.tasks, "its request has ended")
        assert not parsed
        assert s.complete()["choices"] and len(parsed) == 1
