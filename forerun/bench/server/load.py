"""A running server under load: tokens a second, time to the first token, time between tokens, what
drafts are worth.

A run keeps a number of requests going. Its window opens with its first request and closes when a
client first finds
nothing left to send: in it the number of requests at once is what was asked for. What runs on then
is waited for, so that long answers are not left out. Its speed is the tokens that came within the
window over the window's length, the reading of prompts included.

A round runs every draft at every number of requests once, another draft first each time, all on the
same prompts with the same seeds; ratios are made and texts compared within rounds. The first round
warms up and does not count.

Servers cache prompts, and drafters remember what was said. So a draft gets no prompt twice while
there are others; and where drafts are compared, one token is asked of each prompt first: otherwise
the first draft alone would read them.

Times are a client's: they include the network, and this program's own work where it shares the
server's cores."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.bench.server.answer import Answer
from forerun.bench.server.endpoint import Endpoint, Prompt, Server, as_asked, connect
from forerun.bench.server.result import OFF, Arm, Result, Run, result
from forerun.cli.progress import Tell, nothing
from forerun.config import parse_depth
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.utils import check_integer, check_number

EACH = 3  # requests a client sends in a run that has no length in seconds
FAILURES = (
    3  # of all clients together, without a success of any, after which a server counts as gone
)
PAUSE = 0.25  # seconds a client waits after a failure: a server that refuses is not to be hammered
INTERRUPTED = "interrupted"

Request = tuple[int, Prompt, dict[str, Any]]  # index, prompt, and the other fields of the body


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        endpoint: the server.
        drafts: to compare with plain decoding, by request (forerun's server only); none measures
            the server as it is.
        depth: of these drafts; None is the server's own.
        requests: numbers of requests at once.
        tokens: most of each answer; exactly so many where the server takes `ignore_eos`.
        temperature: of all requests.
        seed: of the first request, and which prompt it has; the others count on from it.
        repeats: rounds.
        seconds: how long clients send in a run; without it each sends EACH requests.
    """

    endpoint: Endpoint
    drafts: Sequence[str] = ()
    depth: int | str | None = None
    requests: Sequence[int] = (1, 4, 16)
    tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 3
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("there is nothing to measure: give at least one number of requests")
        counts = [("requests", count, 1024) for count in self.requests]
        for name, value, most in (
            *counts,
            ("tokens", self.tokens, 1 << 20),
            ("repeats", self.repeats, 10_000),
        ):
            check_integer(name, value, 1, most)
        check_number("temperature", self.temperature, 0)
        check_integer("seed", self.seed, 0, (1 << 62) - 1)
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds} is out of range: give seconds over 0")
        if self.seconds is not None and self.drafts:
            raise ConfigError(
                "drafts are compared on the same requests, not in the same time: leave --seconds out"
            )
        if self.depth is not None:
            parse_depth(self.depth)
            if not self.drafts:
                raise ConfigError("a depth is of drafts that are compared: give --drafts too")

    def arms(self) -> list[Arm]:
        """Plain decoding and each draft once; the server as it is where no drafts are given."""
        if not self.drafts:
            return [Arm()]
        return [
            Arm(OFF),
            *(Arm(draft, self.depth) for draft in dict.fromkeys(self.drafts) if draft != OFF),
        ]


@dataclass(frozen=True, slots=True)
class ServeReport:
    """What was measured, and how.

    Attributes:
        url, server, model: who answered; `server` is the maker it names, such as forerun or vllm.
        chat, tokens, temperature, repeats, seconds: as planned.
        prompts: how many different ones there were.
        repeated: whether the server had seen prompts before, in this measurement or an earlier one,
            so that caches and drafters that remember were of help.
        stopped: why it ended early, and results are of what had been measured by then; None where
            it did not.
        results: by number of requests, then by draft.
    """

    url: str
    server: str
    model: str
    chat: bool
    tokens: int
    temperature: float
    repeats: int
    seconds: float | None
    prompts: int
    repeated: bool
    stopped: str | None
    results: list[Result]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"kind": "serve"} | asdict(self)


async def drive(run: Run, server: Server, clients: int, requests: Iterator[Request]) -> None:
    """Keep `clients` clients busy: each sends its next request as soon as its last one has ended.

    What has been measured is in `run`, cancelled or not. Raises ForerunError where the server
    fails."""
    before = await server.counters()
    streaks = [0] * clients
    run.opened = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(clients):
                group.create_task(_client(run, server, streaks, i, requests))
        run.whole = run.broken is None
    finally:
        if not run.whole:
            run.closed = max(
                (when for answer in run.answers for when, _ in answer.chunks), default=run.opened
            )
    after = await server.counters()
    if before and after:
        run.counted = after - before
    if run.broken is not None:
        raise ForerunError(f"{server.endpoint.base} fails every request: {run.broken}")


async def _client(
    run: Run, server: Server, streaks: list[int], mine: int, requests: Iterator[Request]
) -> None:
    """One client; `streaks` are the failures of each since its last success."""
    for index, prompt, fields in requests:
        answer = Answer(index)
        run.answers.append(answer)
        await server.stream(answer, prompt, fields)
        streaks[mine] = streaks[mine] + 1 if answer.error else 0
        if all(streaks) and sum(streaks) >= FAILURES:
            run.broken = answer.error
        if run.broken is not None:
            return
        if answer.error:
            await asyncio.sleep(PAUSE)
    run.closed = run.closed or time.perf_counter()


class Measurement:
    """One measurement under way: `runs[requests, arm]` has a run for each round, so that what is
    there can be told whenever it ends."""

    def __init__(self, plan: Plan, prompts: Sequence[Prompt], tell: Tell) -> None:
        if not prompts:
            raise RequestError("there are no prompts to measure with: give at least one")
        self.plan, self.tell = plan, tell
        self.prompts = [as_asked(prompt, plan.endpoint.chat) for prompt in prompts]
        self.runs: dict[tuple[int, Arm], list[Run]] = {
            (n, arm): [] for n in plan.requests for arm in plan.arms()
        }
        self.sent = 0  # requests of each arm up to here: the index of the next one
        self.told = 0  # runs begun, those that warm up included
        self.repeated = False
        self.server: Server | None = None

    async def measure(self) -> None:
        """All rounds. Raises ForerunError where the server does not answer, or no more."""
        plan, arms, base = self.plan, self.plan.arms(), self.plan.endpoint.base
        async with connect(plan.endpoint) as server:
            server.check_drafts([arm.draft for arm in arms if arm.draft])
            self.server = server
            self.tell("one request, to see whether it is answered")
            first = Answer(0)
            await server.stream(first, *self._request(0, arms[0])[1:])
            if first.error:
                raise ForerunError(f"{base} does not do what it is asked: {first.error}")
            self.repeated = (first.cached_tokens or 0) > first.prompt_tokens / 2
            self.sent = 1
            for turn in range(-1, plan.repeats):  # -1 warms up
                for clients in dict.fromkeys(plan.requests):
                    await self._round(server, turn, clients, arms)
            await server.introduce()  # whether it is still there

    async def _round(self, server: Server, turn: int, clients: int, arms: list[Arm]) -> None:
        """Every arm once, with the same requests."""
        if turn >= 0 and len(arms) > 1:
            short = (
                (i, prompt, fields | {"max_tokens": 1})
                for i, prompt, fields in self._requests(arms[0], clients)
            )
            await drive(Run(), server, clients, short)
        most = 0
        for i in range(len(arms)):
            arm, run = arms[(turn + i) % len(arms)], Run()
            what = f"{clients} at once" + (f", {arm.draft}" if arm.draft else "")
            now = "warming up" if turn < 0 else f"round {turn + 1} of {self.plan.repeats}"
            self.tell(f"{what}: {now}", self.told, (self.plan.repeats + 1) * len(self.runs))
            self.told += 1
            if turn >= 0:
                self.runs[clients, arm].append(run)
            await drive(run, server, clients, self._requests(arm, clients, warm=turn < 0))
            most = max(most, len(run.answers))
        self.sent += most
        self.repeated |= self.sent > len(self.prompts)

    def _requests(self, arm: Arm, clients: int, warm: bool = False) -> Iterator[Request]:
        """The requests of one run, until there are enough or its time is up."""
        seconds, end = self.plan.seconds, time.perf_counter() + (self.plan.seconds or 0.0)
        count = clients if warm else EACH * clients if seconds is None else None
        for i in itertools.count():
            if i == count or (count is None and time.perf_counter() >= end):
                return
            yield self._request(self.sent + i, arm)

    def _request(self, index: int, arm: Arm) -> Request:
        plan = self.plan
        fields = {
            "max_tokens": plan.tokens,
            "temperature": plan.temperature,
            "seed": plan.seed + index,
        }
        return index, self.prompts[(plan.seed + index) % len(self.prompts)], fields | arm.fields

    def report(self, stopped: str | None) -> ServeReport:
        """What there is, of runs that gave at least one token."""
        plan, server = self.plan, self.server
        plain = Arm(OFF) if plan.drafts else None
        results = [
            result(clients, arm, runs, self.runs[clients, plain] if plain else None)
            for (clients, arm), runs in self.runs.items()
            if any(run.speed for run in runs)
        ]
        return ServeReport(
            url=plan.endpoint.base,
            server=server.maker if server else "",
            model=server.model if server else "",
            chat=plan.endpoint.chat,
            tokens=plan.tokens,
            temperature=plan.temperature,
            repeats=plan.repeats,
            seconds=plan.seconds,
            prompts=len(self.prompts),
            repeated=self.repeated,
            stopped=stopped,
            results=results,
        )


def measure_serving(plan: Plan, prompts: Sequence[Prompt], tell: Tell = nothing) -> ServeReport:
    """Measure a running server as planned, with these prompts in turn.

    Where the server goes away midway, or the user interrupts, the report has what was measured by
    then and says so in `stopped`. Raises ConfigError for a server that cannot be asked so,
    RequestError for prompts that it cannot be given, and ForerunError or KeyboardInterrupt where
    nothing had been measured."""
    measurement = Measurement(plan, prompts, tell)
    try:
        asyncio.run(measurement.measure())
        stopped = None
    except (ForerunError, KeyboardInterrupt) as error:
        stopped = str(error) or INTERRUPTED
        if not measurement.report(stopped).results:
            raise
    return measurement.report(stopped)
