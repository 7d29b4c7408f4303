"""The service in front of the engine's thread: races of cancelling, refusals, failures. Nobody may
wait for ever, nothing may leak, and nobody's tokens may change."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from forerun.errors import BusyError, ForerunError, LostError, RequestError
from forerun.llm import LLM
from forerun.sampling import filters
from forerun.sampling.params import SamplingParams
from forerun.server.errors import logged_body as told
from forerun.server.jobs import EngineService as Service, Job as Order, RequestHandle as Group
from forerun.server.errors import UnavailableError
from forerun.types import Event
from tests import tiny
from tests.engine.build import check_idle

PATIENCE = 10.0
Body = Callable[[LLM, Service], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM(
        tiny.family("llama"),
        max_rows=3,
        kv_tokens=256,
        chunk=16,
        page=4,
        dtype="float32",
        threads=1,
    )


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.engine.reset()
    return shared


def order(seed: int = 1, tokens: int = 20, draft: str = "suffix", prompt: int = 6) -> Order:
    params = SamplingParams.pure(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True)
    return Order([3 + (seed + i) % 40 for i in range(prompt)], params, draft, "auto")


def play(llm: LLM, body: Body, queue: int = 1000) -> None:
    """Run `body` against a service; afterwards nothing may be left of what it did."""

    async def main() -> None:
        async with asyncio.timeout(60), serving(llm, queue) as service:
            await body(llm, service)
            await until(
                lambda: not service.jobs and not service._running and not llm.engine.busy
            )
        check_idle(llm.engine)

    asyncio.run(main())


@asynccontextmanager
async def serving(llm: LLM, queue: int) -> AsyncIterator[Service]:
    service = Service(llm, queue)
    service.start()
    try:
        yield service
    finally:
        await asyncio.to_thread(service.stop)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def soon(work: Awaitable[Any]) -> Any:
    """What comes of it, in time."""
    async with asyncio.timeout(PATIENCE):
        return await work


async def result(group: Group) -> list[tuple[list[int], str | None]]:
    """(tokens, finish reason) of each request of a group."""
    await group.accepted()
    tokens: list[list[int]] = [[] for _ in group.jobs]
    reasons: list[str | None] = [None] * len(tokens)
    async for ticket, event in group.events():
        tokens[ticket.index] += event.token_ids
        reasons[ticket.index] = event.finish_reason or reasons[ticket.index]
    return list(zip(tokens, reasons, strict=True))


def failing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool], error: BaseException
) -> None:
    """Let passes of the target fail for as long as `when` says so."""
    forward = llm.engine.target.forward

    def fail(*arguments: Any, **options: Any) -> Any:
        if when():
            raise error
        return forward(*arguments, **options)

    monkeypatch.setattr(llm.engine.target, "forward", fail)


def once() -> Callable[[], bool]:
    left = [True]
    return lambda: bool(left and left.pop())


@pytest.mark.parametrize("waits", [False, True], ids=["events lie there", "no event comes"])
def test_the_deadline_ends_the_events_and_not_whoever_takes_them(waits: bool) -> None:
    """A reader that stalls between two events gets to say, as an event, why the stream ends."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        group = Group([order()], timeout=0.05)
        event = Event(0, [1], [""], ["a"])
        group.put(group.jobs[0], event)
        events = group.events()
        assert (await anext(events))[1] is event
        if not waits:
            group.put(group.jobs[0], event)
            await until(lambda: loop.time() > (group.deadline or 0.0))
        with pytest.raises(TimeoutError):
            await soon(anext(events))

    asyncio.run(main())


@pytest.mark.parametrize("draft", ["off", "suffix"])
def test_a_group_that_is_not_read_pauses_and_goes_on_with_the_same_tokens(
    llm: LLM, draft: str
) -> None:
    async def body(llm: LLM, service: Service) -> None:
        orders = [order(seed, 40, draft) for seed in (1, 2)]
        expected = await soon(result(service.submit(orders)))
        service.unread_each = 2000
        group = service.submit(orders)
        await until(lambda: group.paused and not llm.engine.busy)
        assert group.unread > 4000 and llm.engine.scheduler.running == []
        assert await soon(result(service.submit([order(3)]))), "others have its places"
        assert await soon(result(group)) == expected
        late = service.submit(orders)
        await until(lambda: late.paused)
        service.cancel(late)

    play(llm, body)


def test_a_group_that_stays_unread_ends(llm: LLM) -> None:
    """It would keep its place in the queue as long as it liked."""

    async def body(llm: LLM, service: Service) -> None:
        service.unread_each, service.write_timeout = 2000, 0.05
        group = service.submit([order(1, 40), order(2, 40)])
        await until(lambda: group.paused and not service.jobs)
        with pytest.raises(RequestError, match=r"has not read its answer for 0\.05 s"):
            await soon(result(group))
        assert group.unread == 0

    play(llm, body)


def test_cancelled_before_it_is_taken(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        for seed in range(50):
            group = service.submit([order(seed), order(seed + 1)])
            service.cancel(group)
            service.cancel(group)
            assert not service.jobs
        assert (await soon(result(service.submit([order()]))))[0][1] == "length"

    play(llm, body)


def test_cancelled_after_its_end(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        group = service.submit([order()])
        await soon(result(group))
        service.cancel(group)
        service.end_all()
        await soon(service.call(lambda: None))

    play(llm, body)


def test_a_group_is_taken_whole_or_not_at_all(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        other = service.submit([order(7)])
        group = service.submit([order(1), order(2), order(3, prompt=400), order(4)])
        with pytest.raises(RequestError):
            await soon(group.accepted())
        assert not service.jobs & set(group.jobs)
        assert len((await soon(result(other)))[0][0]) == 20

    play(llm, body)


def test_refused_and_cancelled_at_the_same_time(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        for _ in range(20):
            group = service.submit([order(1), order(3, prompt=400)])
            await asyncio.sleep(0)
            service.cancel(group)
        await soon(service.call(lambda: None))

    play(llm, body)


def test_the_limit_counts_groups_whole(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        first = service.submit([order(i) for i in range(4)])
        with pytest.raises(BusyError):
            service.submit([order(8), order(9)])
        service.cancel(first)
        await soon(result(service.submit([order(i) for i in range(5)])))

    play(llm, body, queue=2)


def test_everybody_gets_what_there_is_when_all_is_ended(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        groups = [service.submit([order(i, tokens=200)]) for i in range(6)]
        service.draining = True
        with pytest.raises(UnavailableError):
            service.submit([order()])
        service.end_all()
        service.end_all()
        for group in groups:
            assert [reason for _, reason in await soon(result(group))] == ["abort"]

    play(llm, body)


def test_a_failed_pass_is_told_to_those_it_concerns_and_to_nobody_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(llm: LLM, service: Service) -> None:
        expected = await soon(result(service.submit([order(5)])))
        failing(llm, monkeypatch, once(), RuntimeError("a test"))
        lost = [service.submit([order(i, tokens=100), order(i + 1, tokens=100)]) for i in range(5)]
        outcomes = await soon(
            asyncio.gather(*(result(group) for group in lost), return_exceptions=True)
        )
        assert all(isinstance(o, UnavailableError) or len(o) == 2 for o in outcomes)
        assert any(isinstance(o, UnavailableError) for o in outcomes)
        assert service.alive and service.failures == 1
        assert await soon(result(service.submit([order(5)]))) == expected

    play(llm, body)


def test_an_engine_whose_model_is_gone_is_not_asked_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting over would fail for ever, and look well from outside."""

    async def body(llm: LLM, service: Service) -> None:
        failing(llm, monkeypatch, lambda: True, LostError("a test"))
        with pytest.raises(UnavailableError):
            await soon(result(service.submit([order(1)])))
        assert not service.alive and service.failures == 1
        with pytest.raises(UnavailableError, match="restart this server"):
            service.submit([order(2)])
        llm.engine.reset()  # what its thread will not do any more

    play(llm, body)


@pytest.mark.parametrize(
    "error", [RuntimeError("a test"), BaseException("a panic")], ids=["exception", "panic"]
)
def test_what_fails_for_one_request_is_told_to_that_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The engine goes on, and the others say what they would have said."""
    adjust = filters._adjust

    def fail(logits: Any, draft: Any, state: filters.SamplingState) -> None:
        if state.params.seed == 3 and state.produced >= 4:
            raise error
        adjust(logits, draft, state)

    async def body(llm: LLM, service: Service) -> None:
        orders = [
            replace(order(i), params=replace(order(i).params, presence_penalty=0.5))
            for i in range(6)
        ]
        expected = [await soon(result(service.submit([each]))) for each in orders]
        monkeypatch.setattr(filters, "_adjust", fail)
        groups = [service.submit([each]) for each in orders]
        outcomes = await soon(
            asyncio.gather(*(result(group) for group in groups), return_exceptions=True)
        )
        failed = outcomes.pop(3)
        assert outcomes == [each for i, each in enumerate(expected) if i != 3]
        assert isinstance(failed, ForerunError) and "failed while it worked on this request" in str(
            failed
        )
        assert "\n" not in str(failed) and told(failed)[0] == 500
        assert service.alive and service.failures == 0

    play(llm, body)


def test_a_failure_behind_the_last_event_of_a_request_does_not_take_it_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last event was on its way to a busy event loop when a later step failed."""

    async def body(llm: LLM, service: Service) -> None:
        expected = await soon(result(service.submit([order(1, tokens=1)])))
        failing(
            llm,
            monkeypatch,
            lambda: len(llm.engine.requests) == 1 and not service.failures,
            RuntimeError("a test"),
        )
        group = service.submit([order(1, tokens=1), order(2, tokens=50)])
        end = time.monotonic() + PATIENCE
        while not service.failures and time.monotonic() < end:
            time.sleep(0.001)  # the event loop is busy
        done = [(ticket, item) async for ticket, item in _items(group)]
        own = [item for ticket, item in done if ticket == 0]
        assert not any(isinstance(item, BaseException) for item in own)
        assert [token for event in own if event for token in event.token_ids] == expected[0][0]

    play(llm, body)


async def _items(group: Group) -> AsyncIterator[tuple[int, Any]]:
    """Everything that is put into a group's inbox, errors included, until each ticket has ended."""
    left = len(group.jobs)
    while left:
        ticket, item = await soon(group._queue.get())
        left -= item is None or isinstance(item, BaseException)
        yield ticket.index, item


def test_an_accident_while_a_request_is_taken_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(llm: LLM, service: Service) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "add", lambda *_, **__: 1 / 0)
            group = service.submit([order(1), order(2)])
            with pytest.raises(UnavailableError):
                await soon(result(group))
        assert not service.jobs
        assert (await soon(result(service.submit([order()]))))[0][1] == "length"

    play(llm, body)


def test_whoever_ends_in_a_step_that_then_fails_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last event was made, and lost with the step."""
    land, ended = llm.engine._land, []

    def fails(*arguments: Any) -> Any:
        if ended:
            raise RuntimeError("behind one that has ended")
        event = land(*arguments)
        ended.extend([1] if event.finish_reason else [])
        return event

    async def body(llm: LLM, service: Service) -> None:
        groups = [service.submit([order(seed, draft="off")]) for seed in (1, 2)]
        monkeypatch.setattr(llm.engine, "_land", fails)
        for group in groups:
            with pytest.raises(UnavailableError):
                await soon(result(group))
        monkeypatch.undo()

    play(llm, body)


def test_an_accident_in_a_call_is_told(llm: LLM) -> None:
    async def body(llm: LLM, service: Service) -> None:
        with pytest.raises(ZeroDivisionError):
            await soon(service.call(lambda: 1 / 0))
        assert service.failures == 0

    play(llm, body)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_engine_thread_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of a Rust library is no Exception."""

    async def main() -> None:
        async with serving(llm, 100) as service:
            failing(llm, monkeypatch, lambda: True, BaseException("a panic"))
            group = service.submit([order(i) for i in range(5)])
            with pytest.raises(UnavailableError):
                await soon(result(group))
            assert not service.jobs

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_start_over_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(llm, 100) as service:
            failing(llm, monkeypatch, lambda: True, RuntimeError("the device is lost"))
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine, "reset", lambda: 1 / 0)
                with pytest.raises(UnavailableError):
                    await soon(result(service.submit([order()])))
                assert not service.jobs
                with pytest.raises(UnavailableError):
                    await soon(result(service.submit([order()])))

    asyncio.run(main())


def test_a_storm_of_cancels_changes_nobodys_tokens(llm: LLM) -> None:
    """Preemption (the pool is small), groups that are refused, cancels at any moment."""
    rng = random.Random(4)
    alone = {seed: _alone(llm, seed) for seed in range(12)}

    async def one(service: Service) -> None:
        seeds = [rng.randrange(12) for _ in range(rng.randrange(1, 4))]
        await asyncio.sleep(rng.random())
        drafts = [rng.choice(["off", "ngram", "suffix"]) for _ in seeds]
        orders = [
            order(seed, 10 + 8 * seed, draft) for seed, draft in zip(seeds, drafts, strict=True)
        ]
        if rng.random() < 0.15:
            orders.append(order(1, prompt=400))
        group = service.submit(orders)
        work = asyncio.ensure_future(result(group))
        if rng.random() < 0.5:
            await asyncio.wait((work,), timeout=rng.random() * 0.1)
            work.cancel()
            service.cancel(group)
        try:
            outcome = await soon(work)
        except (asyncio.CancelledError, RequestError):
            return
        assert [tokens for tokens, _ in outcome] == [alone[seed] for seed in seeds]

    async def body(llm: LLM, service: Service) -> None:
        await asyncio.gather(*(one(service) for _ in range(150)))

    play(llm, body)


def _alone(llm: LLM, seed: int) -> list[int]:
    wanted = order(seed, 10 + 8 * seed)
    return llm.generate(wanted.tokens, wanted.params, draft="off")[0].token_ids
