"""The engine service: races of cancelling, refusals and failures.

No job may wait forever, no memory may leak, and the tokens of other jobs must not change.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forerun.errors import BusyError, ForerunError, LostError, RequestError
from forerun.llm import LLM
from forerun.sampling import filters
from forerun.sampling.params import SamplingParams
from forerun.server.errors import UnavailableError, logged_body
from forerun.server.jobs import EngineService, Job, RequestHandle
from forerun.types import Event
from tests import tiny
from tests.engine.build import check_idle

TIMEOUT = 10.0
Scenario = Callable[[LLM, EngineService], Coroutine[Any, Any, None]]
Tokens = list[tuple[list[int], str | None]]


@pytest.fixture(scope="module")
def shared() -> LLM:
    options = {"max_rows": 3, "kv_tokens": 256, "chunk": 16, "page": 4, "threads": 1}
    return LLM(tiny.family("llama"), dtype="float32", **options)


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.engine.reset()
    return shared


def job(
    seed: int = 1, tokens: int = 20, draft: str = "suffix", prompt: int = 6, **more: Any
) -> Job:
    params = SamplingParams.pure(
        temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True, **more
    )
    return Job([3 + (seed + i) % 40 for i in range(prompt)], params, draft, "auto")


def run_scenario(llm: LLM, scenario: Scenario, queue: int = 1000, ends: bool = True) -> None:
    """Run a scenario with a service; if `ends`, check that its jobs have ended and freed all."""

    async def main() -> None:
        async with asyncio.timeout(60), running(llm, queue) as service:
            await scenario(llm, service)
            if ends:
                await until(
                    lambda: not service.jobs and not service._running and not llm.engine.busy
                )
        if ends:
            check_idle(llm.engine)

    asyncio.run(main())


@asynccontextmanager
async def running(llm: LLM, queue: int) -> AsyncIterator[EngineService]:
    service = EngineService(llm, queue)
    service.start()
    try:
        yield service
    finally:
        await asyncio.to_thread(service.stop)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.005)


async def in_time(work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(TIMEOUT):
        return await work


async def output(handle: RequestHandle) -> Tokens:
    """Return (tokens, finish reason) of each job."""
    await handle.accepted()
    tokens: list[list[int]] = [[] for _ in handle.jobs]
    reasons: list[str | None] = [None] * len(tokens)
    async for one, event in handle.events():
        tokens[one.index] += event.token_ids
        reasons[one.index] = event.finish_reason or reasons[one.index]
    return list(zip(tokens, reasons, strict=True))


async def run(service: EngineService, *jobs: Job) -> Tokens:
    result: Tokens = await in_time(output(service.submit(jobs)))
    return result


def make_forward_fail(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool], error: BaseException
) -> None:
    """Make forward passes of the target fail while `when` returns True."""
    forward = llm.engine.target.forward

    def fail(*arguments: Any, **options: Any) -> Any:
        if when():
            raise error
        return forward(*arguments, **options)

    monkeypatch.setattr(llm.engine.multi_step, "seconds", 0.0)  # native rounds do not call forward
    monkeypatch.setattr(llm.engine.target, "forward", fail)


@pytest.mark.parametrize("waits", [False, True], ids=["an event is there", "no event comes"])
def test_a_deadline_is_raised_by_the_iterator_of_events(waits: bool) -> None:
    async def main() -> None:
        handle = RequestHandle([job()], timeout=0.05)
        event = Event(0, [1], [""], ["a"])
        handle.put(handle.jobs[0], event)
        events = handle.events()
        assert (await anext(events))[1] is event
        if not waits:
            handle.put(handle.jobs[0], event)
            deadline = handle.deadline or 0.0
            await until(lambda: asyncio.get_running_loop().time() > deadline)
        with pytest.raises(TimeoutError):
            await in_time(anext(events))

    asyncio.run(main())


@pytest.mark.parametrize("draft", ["off", "suffix"])
def test_unread_jobs_pause_and_continue_with_the_same_tokens(llm: LLM, draft: str) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        expected = await run(service, job(1, 40, draft), job(2, 40, draft))
        service.unread_each = 2000
        handle = service.submit([job(1, 40, draft), job(2, 40, draft)])
        await until(lambda: handle.paused and not llm.engine.busy)
        assert handle.unread > 4000 and llm.engine.scheduler.running == []
        assert await run(service, job(3)), "other requests use the slots"
        assert await in_time(output(handle)) == expected
        late = service.submit([job(1, 40, draft)])
        await until(lambda: late.paused)
        service.cancel(late)

    run_scenario(llm, scenario)


def test_unread_jobs_end_after_the_write_timeout(llm: LLM) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        service.unread_each, service.write_timeout = 2000, 0.05
        # long enough not to end before the engine pauses them
        handle = service.submit([job(1, 110), job(2, 110)])
        await until(lambda: handle.paused and not service.jobs)
        with pytest.raises(RequestError, match=r"has not read its answer for 0\.05 s"):
            await in_time(output(handle))
        assert handle.unread == 0

    run_scenario(llm, scenario)


def test_cancelled_requests_are_freed_at_once(llm: LLM) -> None:
    """They need no garbage collection, and the timer of a paused request does not keep them."""

    async def scenario(llm: LLM, service: EngineService) -> None:
        service.unread_each, service.write_timeout = 2000, 60
        handles = [service.submit([job(1, 40)])]
        kept = weakref.ref(handles[0]), weakref.ref(handles[0].jobs[0])
        await until(lambda: handles[0].paused)
        service.cancel(handles[0])
        await in_time(service.call(lambda: None))
        gc.disable()
        try:
            handles.clear()
            await until(lambda: not any(reference() for reference in kept))
        finally:
            gc.enable()

    run_scenario(llm, scenario)


def test_cancelling_before_admission_and_after_the_end(llm: LLM) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        for seed in range(50):
            handle = service.submit([job(seed), job(seed + 1)])
            service.cancel(handle)
            service.cancel(handle)
            assert not service.jobs
        handle = service.submit([job()])
        assert (await in_time(output(handle)))[0][1] == "length"
        service.cancel(handle)
        service.end_all()
        await in_time(service.call(lambda: None))

    run_scenario(llm, scenario)


def test_jobs_are_admitted_together_or_not_at_all(llm: LLM) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        other = service.submit([job(7)])
        handle = service.submit([job(1), job(2), job(3, prompt=400), job(4)])
        with pytest.raises(RequestError):
            await in_time(handle.accepted())
        assert not set(service.jobs) & set(handle.jobs)
        assert len((await in_time(output(other)))[0][0]) == 20
        for _ in range(20):  # refused and cancelled at the same time
            handle = service.submit([job(1), job(3, prompt=400)])
            await asyncio.sleep(0)
            service.cancel(handle)
        await in_time(service.call(lambda: None))

    run_scenario(llm, scenario)


def test_the_limit_counts_all_jobs_of_a_handle(llm: LLM) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        first = service.submit([job(i) for i in range(4)])
        with pytest.raises(BusyError):
            service.submit([job(8), job(9)])
        service.cancel(first)
        await run(service, *(job(i) for i in range(5)))

    run_scenario(llm, scenario, queue=2)


def test_ending_all_jobs_keeps_the_text_so_far(llm: LLM) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        handles = [service.submit([job(i, tokens=200)]) for i in range(6)]
        service.draining = True
        with pytest.raises(UnavailableError):
            service.submit([job()])
        service.end_all()
        service.end_all()
        for handle in handles:
            assert [reason for _, reason in await in_time(output(handle))] == ["abort"]

    run_scenario(llm, scenario)


def test_a_failed_step_ends_only_the_jobs_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        expected = await run(service, job(5))
        make_forward_fail(llm, monkeypatch, lambda: not service.failures, RuntimeError("a test"))
        lost = [service.submit([job(i, tokens=100), job(i + 1, tokens=100)]) for i in range(5)]
        outcomes = await in_time(asyncio.gather(*map(output, lost), return_exceptions=True))
        assert all(isinstance(o, UnavailableError) or len(o) == 2 for o in outcomes)
        assert any(isinstance(o, UnavailableError) for o in outcomes)
        assert service.alive and service.failures == 1
        assert await run(service, job(5)) == expected

    run_scenario(llm, scenario)


def test_an_engine_that_lost_its_model_is_not_restarted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        make_forward_fail(llm, monkeypatch, lambda: True, LostError("a test"))
        with pytest.raises(UnavailableError):
            await run(service, job(1))
        assert not service.alive and service.failures == 1
        with pytest.raises(UnavailableError, match="restart this server"):
            service.submit([job(2)])
        llm.engine.reset()

    run_scenario(llm, scenario)


@pytest.mark.parametrize("error", [RuntimeError("a test"), BaseException("a panic")], ids=repr)
def test_an_error_of_one_request_ends_only_that_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    adjust = filters._adjust

    def fail(logits: Any, draft: Any, state: filters.SamplingState) -> None:
        if state.params.seed == 3 and state.produced >= 4:
            raise error
        adjust(logits, draft, state)

    async def scenario(llm: LLM, service: EngineService) -> None:
        expected = [await run(service, job(i, presence_penalty=0.5)) for i in range(6)]
        monkeypatch.setattr(filters, "_adjust", fail)
        handles = [service.submit([job(i, presence_penalty=0.5)]) for i in range(6)]
        outcomes = await in_time(asyncio.gather(*map(output, handles), return_exceptions=True))
        failed = outcomes.pop(3)
        assert outcomes == expected[:3] + expected[4:]
        assert isinstance(failed, ForerunError)
        assert "failed while it worked on this request" in str(failed) and "\n" not in str(failed)
        assert logged_body(failed)[0] == 500
        assert service.alive and service.failures == 0

    run_scenario(llm, scenario)


def test_a_failed_step_does_not_affect_a_job_that_ended_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        expected = await run(service, job(1, tokens=1))
        alone = lambda: len(llm.engine.requests) == 1 and not service.failures  # noqa: E731
        make_forward_fail(llm, monkeypatch, alone, RuntimeError("a test"))
        handle = service.submit([job(1, tokens=1), job(2, tokens=50)])
        end = time.monotonic() + TIMEOUT
        while not service.failures and time.monotonic() < end:
            time.sleep(0.001)  # keeps the event loop busy
        items: dict[int, list[Any]] = {0: [], 1: []}
        while not all(done and not isinstance(done[-1], Event) for done in items.values()):
            one, item = await in_time(handle._queue.get())
            items[one.index].append(item)
        *events, last = items[0]
        assert last is None and [t for e in events for t in e.token_ids] == expected[0][0]

    run_scenario(llm, scenario)


def test_a_job_that_ends_in_a_failing_step_gets_the_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit, ended = llm.engine._emit, []
    monkeypatch.setattr(llm.engine.multi_step, "seconds", 0.0)  # native rounds do not call _emit

    def emit_or_fail(*arguments: Any) -> Any:
        if ended:
            raise RuntimeError("after a job has ended")
        event = emit(*arguments)
        ended.extend([1] if event.finish_reason else [])
        return event

    async def scenario(llm: LLM, service: EngineService) -> None:
        handles = [service.submit([job(seed, draft="off")]) for seed in (1, 2)]
        monkeypatch.setattr(llm.engine, "_emit", emit_or_fail)
        for handle in handles:
            with pytest.raises(UnavailableError):
                await in_time(output(handle))
        monkeypatch.undo()

    run_scenario(llm, scenario)


def test_unexpected_errors_of_admission_and_calls_are_reported(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(llm: LLM, service: EngineService) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "add", lambda *_, **__: 1 / 0)
            with pytest.raises(UnavailableError):
                await run(service, job(1), job(2))
        assert not service.jobs
        with pytest.raises(ZeroDivisionError):
            await in_time(service.call(lambda: 1 / 0))
        assert service.failures == 0 and (await run(service, job()))[0][1] == "length"

    run_scenario(llm, scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("resets", [True, False], ids=["a panic", "no restart is possible"])
def test_a_crashed_engine_is_reported_to_all_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    """A panic of a Rust library is a BaseException; a lost device makes `reset` fail."""

    async def scenario(llm: LLM, service: EngineService) -> None:
        error = BaseException("a panic") if resets else RuntimeError("the device is lost")
        make_forward_fail(llm, monkeypatch, lambda: True, error)
        with monkeypatch.context() as patch:
            if not resets:
                patch.setattr(llm.engine, "reset", lambda: 1 / 0)
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    await run(service, *(job(i) for i in range(5)))
                assert not service.jobs

    run_scenario(llm, scenario, ends=False)


def test_random_cancellations_change_no_tokens(llm: LLM) -> None:
    """The small KV cache causes preemption; some jobs are refused or cancelled at any time."""
    rng = random.Random(4)
    alone = {
        seed: llm.generate((one := job(seed, 10 + 8 * seed)).tokens, one.params, draft="off")[0]
        for seed in range(12)
    }

    async def one_client(service: EngineService) -> None:
        seeds = [rng.randrange(12) for _ in range(rng.randrange(1, 4))]
        await asyncio.sleep(rng.random())
        jobs = [job(seed, 10 + 8 * seed, rng.choice(["off", "ngram", "suffix"])) for seed in seeds]
        if rng.random() < 0.15:
            jobs.append(job(1, prompt=400))
        handle = service.submit(jobs)
        work = asyncio.ensure_future(output(handle))
        if rng.random() < 0.5:
            await asyncio.wait((work,), timeout=rng.random() * 0.1)
            work.cancel()
            service.cancel(handle)
        try:
            outcome = await in_time(work)
        except (asyncio.CancelledError, RequestError):
            return
        assert [tokens for tokens, _ in outcome] == [alone[seed].token_ids for seed in seeds]

    async def scenario(llm: LLM, service: EngineService) -> None:
        await asyncio.gather(*(one_client(service) for _ in range(150)))

    run_scenario(llm, scenario)
