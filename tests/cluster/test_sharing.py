"""What one replica said the others may copy, each tenant's for itself, and nothing of another
model."""

import asyncio
from array import array
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forerun import LLM, RequestError, SamplingParams
from forerun.cluster.sharing import LAST, WAITING, Heard, Sharing
from forerun.cluster.wire import Listener
from forerun.draft.suffix import Suffix
from forerun.server.service import Service
from forerun.server.tickets import Order
from forerun.types import SALT
from tests import tiny

HELLO = Order([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True), "suffix", 2, tenant="ann")


async def no_app(*_: object) -> None:
    raise AssertionError("nobody asks")


class Member:
    """A replica without Ray."""

    def __init__(self, kind: str) -> None:
        llm = LLM(str(tiny.spoken()), draft="suffix", threads=1, kv_tokens=1024)
        self.service = Service(llm, 8)
        self.sharing = Sharing(self.service, kind)
        self.listener = Listener(no_app, self.sharing.hear)

    def memory(self, tenant: str) -> list[int]:
        (suffix,) = {p for p in self.service.llm.engine.proposers.values() if isinstance(p, Suffix)}
        return [token for automaton in suffix.memories.get(tenant, []) for token in automaton.text]

    async def ask(self, order: Order) -> list[int]:
        group = self.service.submit([order])
        async for _ in group.events():
            pass
        assert group.tickets[0].request
        return group.tickets[0].request.tokens


@asynccontextmanager
async def members(directory: Path, *kinds: str) -> AsyncGenerator[list[Member], None]:
    found = [Member(kind) for kind in kinds]
    async with AsyncExitStack() as stack:
        for i, member in enumerate(found):
            member.service.start()
            await member.listener.start(directory / f"r{i}")
            spreading = asyncio.create_task(member.listener.spread(member.sharing.waiting))
            stack.callback(spreading.cancel)
            stack.callback(member.service.stop)
        yield found


async def comes(member: Member, tenant: str) -> list[int]:
    """Its memory of a tenant, once there is one."""
    while not member.memory(tenant):
        await asyncio.sleep(0.01)
    return member.memory(tenant)


def test_what_one_said_the_others_remember_under_its_tenant(tmp_path: Path) -> None:
    async def check() -> None:
        async with members(tmp_path, "m", "m", "another model") as (one, other, stranger):
            tokens = await one.ask(HELLO)
            assert (await comes(other, "ann"))[: len(tokens)] == tokens
            assert not other.memory("") and not stranger.memory("ann")

    asyncio.run(asyncio.wait_for(check(), 60))


def test_what_nobody_could_use_is_not_told(tmp_path: Path) -> None:
    async def check() -> None:
        async with members(tmp_path, "m") as (one,):
            one.listener._path = None  # nothing leaves the queue
            for order in (replace(HELLO, draft="off"), replace(HELLO, tenant=f"{2 * SALT}once")):
                await one.ask(order)
            assert one.sharing.waiting.empty()

    asyncio.run(asyncio.wait_for(check(), 60))


def test_tokens_that_the_model_has_not_got_are_not_remembered(tmp_path: Path) -> None:
    async def check() -> None:
        async with members(tmp_path, "m") as (one,):
            for tokens in ([1, 1 << 20], [-1]):
                with pytest.raises(RequestError):
                    await one.sharing.hear(Heard("m", "ann", array("q", tokens)))
            await one.sharing.hear(Heard("m", "bob", array("q", [5, 6])))
            assert await comes(one, "bob") and not one.memory("ann")

    asyncio.run(asyncio.wait_for(check(), 60))


def test_more_than_can_be_told_is_dropped_and_a_long_text_is_cut(tmp_path: Path) -> None:
    async def check() -> None:
        async with members(tmp_path, "m") as (one,):
            await one.ask(HELLO)
            ended = one.service.submit([HELLO]).tickets[0]
            while ended.request is None:
                await asyncio.sleep(0.01)
            ended.request.tokens = [7] * (LAST + 5)
            while not one.sharing.waiting.empty():
                await asyncio.sleep(0.01)
            for _ in range(WAITING + 3):
                one.sharing.end(ended, None)
            assert one.sharing.waiting.full()
            assert len(one.sharing.waiting.get_nowait().tokens) == LAST

    asyncio.run(asyncio.wait_for(check(), 60))
