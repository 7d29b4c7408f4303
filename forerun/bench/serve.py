"""Load on a running server: throughput, latencies, and drafts compared.

A run keeps a number of requests in flight. Its window opens with the first request and closes when
a client first finds nothing left to send, so the concurrency within it is constant; answers that
are still running are awaited, so that long ones count. The speed is the tokens that arrived within
the window over its length, prefill included.

A round runs every draft at every concurrency once, starting with a different draft each time, all
on the same prompts with the same seeds; ratios are formed and outputs compared within rounds. The
first round warms up and does not count.

Servers cache prompts, and drafters remember outputs. So a draft gets no prompt twice while there
are others, and where drafts are compared, one token is requested for each prompt first: otherwise
the first draft alone would pay for the prefill. Times are a client's: they include the network, and
this program's own work where it shares the server's cores.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from forerun.bench.endpoint import (
    Answer,
    Endpoint,
    Prompt,
    RunningServer,
    SpecStats,
    connect,
    request_prompt,
)
from forerun.cli.progress import Tell, nothing
from forerun.config import parse_depth
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.measure.medians import bootstrap_interval, first_difference, median
from forerun.utils import check_integer, check_number

OFF = "off"
PERCENTILES = (50, 95, 99)
REQUESTS_PER_CLIENT = 3  # in a run without a length in seconds
MAX_FAILURES = 3  # of all clients without any success, after which the server counts as gone
PAUSE = 0.25  # seconds that a client waits after a failure
MAX_ERRORS = 5  # distinct messages in a report
INTERRUPTED = "interrupted"

Request = tuple[int, Prompt, dict[str, Any]]  # index, prompt, further fields of the request body


@dataclass(frozen=True, slots=True)
class LoadArm:
    """Draft and depth that requests ask for; None leaves them to the server."""

    draft: str | None = None
    depth: int | str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request body."""
        if self.draft is None:
            return {}
        if self.draft == OFF:
            return {"speculative": False}
        depth = {} if self.depth is None else {"depth": self.depth}
        return {"speculative": {"draft": self.draft} | depth}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """Measurement plan for a server.

    Attributes:
        endpoint: the server.
        drafts: draft options to compare with plain decoding (forerun servers only); empty measures
            the server as it is.
        depth: depth of these drafts; None is the server's default.
        requests: numbers of concurrent requests.
        tokens: maximum tokens of an answer; exactly as many if the server takes `ignore_eos`.
        temperature: temperature of all requests.
        seed: seed of the first request, and the index of its prompt; later requests count on
            from it.
        repeats: number of rounds.
        seconds: how long clients send in a run; None sends REQUESTS_PER_CLIENT each.

    Raises:
        ConfigError: a value is out of range.
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
        for count in self.requests:
            check_integer("requests", count, 1, 1024)
        check_integer("tokens", self.tokens, 1, 1 << 20)
        check_integer("repeats", self.repeats, 1, 10_000)
        check_number("temperature", self.temperature, 0)
        check_integer("seed", self.seed, 0, (1 << 62) - 1)
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds} is out of range: give seconds over 0")
        if self.seconds is not None and self.drafts:
            raise ConfigError("drafts are compared on the same requests: leave --seconds out")
        if self.depth is not None:
            parse_depth(self.depth)
            if not self.drafts:
                raise ConfigError("a depth belongs to drafts that are compared: give --drafts too")

    def arms(self) -> list[LoadArm]:
        """Return plain decoding and each draft once; without drafts, the server as it is."""
        if not self.drafts:
            return [LoadArm()]
        drafts = [draft for draft in dict.fromkeys(self.drafts) if draft != OFF]
        return [LoadArm(OFF), *(LoadArm(draft, self.depth) for draft in drafts)]


@dataclass(slots=True)
class LoadRun:
    """One run; times are `time.perf_counter` seconds.

    Attributes:
        opened, closed: the window; it closes at the last piece of text if the run was cut short.
        answers: in the order of their requests.
        failure: why the run was given up.
        complete: True unless it was interrupted or given up.
        counted: statistics by the server's own counters, which include other clients.
    """

    opened: float = 0.0
    closed: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failure: str | None = None
    complete: bool = False
    counted: SpecStats | None = None

    @property
    def finished(self) -> list[Answer]:
        """Answers that are complete."""
        return [answer for answer in self.answers if answer.finished and answer.error is None]

    @property
    def speed(self) -> float:
        """Tokens per second in the window; a chunk counts as its share of its answer's tokens."""
        tokens = sum(
            count * answer.scale
            for answer in self.answers
            if answer.error is None
            for when, count in answer.chunks
            if when <= self.closed
        )
        return tokens / (self.closed - self.opened) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class ServeResult:
    """One draft at one concurrency over all rounds.

    Attributes:
        draft, depth: as in `LoadArm`.
        requests: concurrent requests.
        rounds: complete ones; 0 if all results come from a run that was cut short.
        tokens_per_second: of all requests together, median of the rounds.
        times_plain: speed over that of plain decoding in the same round, median; None without
            drafts.
        interval: 95 % bootstrap interval of times_plain; None for fewer than two rounds.
        requests_per_second: tokens per second over the mean tokens of an answer.
        first_token_ms: {percentile: milliseconds from sending to the first piece of text}.
        inter_token_ms: {percentile: milliseconds between tokens}; the time before a chunk is
            divided among its tokens.
        finished: number of complete answers.
        errors: {message: count} of failed requests.
        counted: source of token counts: "usage", or "chunks" (one token each) without usage.
        accepted_length: tokens per target forward pass by the server's statistics, or None.
        acceptance: accepted share of drafted tokens by the server's statistics, or None.
        cached: share of prompt tokens found in the server's cache, or None if unknown.
        same: True if every answer equals plain decoding's; None where none was compared.
        first_difference: earliest output position, in tokens, that differs.
    """

    draft: str | None
    depth: int | str | None
    requests: int
    rounds: int
    tokens_per_second: float
    times_plain: float | None
    interval: tuple[float, float] | None
    requests_per_second: float
    first_token_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    finished: int
    errors: dict[str, int]
    counted: str
    accepted_length: float | None
    acceptance: float | None
    cached: float | None
    same: bool | None
    first_difference: int | None


@dataclass(frozen=True, slots=True)
class ServeReport:
    """Results of a server measurement, with its settings.

    Attributes:
        url, server, model: the server; `server` is the software it names, such as forerun or vllm.
        chat, tokens, temperature, repeats, seconds: as planned.
        prompts: number of different prompts.
        repeated: True if the server had seen prompts before, which helps caches and some drafters.
        stopped: why the measurement ended early, or None.
        results: results by concurrency, then by draft.
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
    results: list[ServeResult]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"kind": "serve"} | asdict(self)


def measure_serving(
    plan: ServePlan, prompts: Sequence[Prompt], tell: Tell = nothing
) -> ServeReport:
    """Measure a running server with these prompts in turn.

    If the server goes away or the user interrupts, the report has the results so far and says so in
    `stopped`.

    Raises:
        ConfigError: the server cannot be asked this way.
        RequestError: it cannot take these prompts.
        ForerunError, KeyboardInterrupt: nothing was measured before the failure.
    """
    measurement = LoadMeasurement(plan, prompts, tell)
    try:
        asyncio.run(measurement.measure())
        stopped = None
    except (ForerunError, KeyboardInterrupt) as error:
        stopped = str(error) or INTERRUPTED
        if not measurement.report(stopped).results:
            raise
    return measurement.report(stopped)


class LoadMeasurement:
    """A measurement in progress: `runs[requests, arm]` holds one run per round."""

    def __init__(self, plan: ServePlan, prompts: Sequence[Prompt], tell: Tell) -> None:
        if not prompts:
            raise RequestError("there are no prompts to measure with: give at least one")
        self.plan = plan
        self.tell = tell
        self.prompts = [request_prompt(prompt, plan.endpoint.chat) for prompt in prompts]
        self.runs: dict[tuple[int, LoadArm], list[LoadRun]] = {
            (requests, arm): [] for requests in plan.requests for arm in plan.arms()
        }
        self.next_index = 0  # index of the next request
        self.num_started = 0  # runs started, including the warm-up
        self.repeated = False
        self.server: RunningServer | None = None

    async def measure(self) -> None:
        """Run all rounds. Raises ForerunError if the server stops answering."""
        plan = self.plan
        arms = plan.arms()
        async with connect(plan.endpoint) as server:
            server.check_drafts([arm.draft for arm in arms if arm.draft])
            self.server = server
            self.tell("one request, to see whether it is answered")
            first = Answer(0)
            await server.stream(first, *self._request(0, arms[0])[1:])
            if first.error:
                raise ForerunError(f"{plan.endpoint.base} fails the first request: {first.error}")
            self.repeated = (first.cached_tokens or 0) > first.prompt_tokens / 2
            self.next_index = 1
            for turn in range(-1, plan.repeats):  # -1 is the warm-up
                for clients in dict.fromkeys(plan.requests):
                    await self._round(server, turn, clients, arms)
            await server.identify()  # raises if it is gone

    async def _round(
        self, server: RunningServer, turn: int, clients: int, arms: list[LoadArm]
    ) -> None:
        """Run every arm once, with the same requests."""
        if turn >= 0 and len(arms) > 1:
            requests = self._requests(arms[0], clients)
            prefill = ((i, prompt, fields | {"max_tokens": 1}) for i, prompt, fields in requests)
            await drive(LoadRun(), server, clients, prefill)
        most = 0
        for i in range(len(arms)):
            arm = arms[(turn + i) % len(arms)]
            run = LoadRun()
            what = f"{clients} at once" + (f", {arm.draft}" if arm.draft else "")
            now = "warming up" if turn < 0 else f"round {turn + 1} of {self.plan.repeats}"
            total = (self.plan.repeats + 1) * len(self.runs)
            self.tell(f"{what}: {now}", self.num_started, total)
            self.num_started += 1
            if turn >= 0:
                self.runs[clients, arm].append(run)
            await drive(run, server, clients, self._requests(arm, clients, warm_up=turn < 0))
            most = max(most, len(run.answers))
        self.next_index += most
        self.repeated |= self.next_index > len(self.prompts)

    def _requests(self, arm: LoadArm, clients: int, warm_up: bool = False) -> Iterator[Request]:
        """Yield the requests of one run until there are enough or its time is up."""
        seconds = self.plan.seconds
        end = time.perf_counter() + (seconds or 0.0)
        if warm_up:
            count: int | None = clients
        else:
            count = REQUESTS_PER_CLIENT * clients if seconds is None else None
        for i in itertools.count():
            if i == count or (count is None and time.perf_counter() >= end):
                return
            yield self._request(self.next_index + i, arm)

    def _request(self, index: int, arm: LoadArm) -> Request:
        plan = self.plan
        seed = plan.seed + index
        fields = {"max_tokens": plan.tokens, "temperature": plan.temperature, "seed": seed}
        return index, self.prompts[seed % len(self.prompts)], fields | arm.fields

    def report(self, stopped: str | None) -> ServeReport:
        """Summarize the runs so far that produced at least one token."""
        plan = self.plan
        results = [
            summarize(clients, arm, runs, self.runs.get((clients, LoadArm(OFF)), []))
            for (clients, arm), runs in self.runs.items()
            if any(run.speed for run in runs)
        ]
        return ServeReport(
            url=plan.endpoint.base,
            server=self.server.maker if self.server else "",
            model=self.server.model if self.server else "",
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


async def drive(
    run: LoadRun, server: RunningServer, clients: int, requests: Iterator[Request]
) -> None:
    """Keep `clients` clients busy; each sends its next request when its last one has ended.

    Results are in `run` even if this is cancelled. Raises ForerunError if every request fails.
    """
    before = await server.counters()
    failures = [0] * clients  # of each client since its last success
    run.opened = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(clients):
                group.create_task(_client(run, server, failures, i, requests))
        run.complete = run.failure is None
    finally:
        if not run.complete:
            times = (when for answer in run.answers for when, _ in answer.chunks)
            run.closed = max(times, default=run.opened)
    after = await server.counters()
    if before and after:
        run.counted = after - before
    if run.failure is not None:
        raise ForerunError(f"{server.endpoint.base} fails every request: {run.failure}")


async def _client(
    run: LoadRun, server: RunningServer, failures: list[int], own: int, requests: Iterator[Request]
) -> None:
    for index, prompt, fields in requests:
        answer = Answer(index)
        run.answers.append(answer)
        await server.stream(answer, prompt, fields)
        failures[own] = failures[own] + 1 if answer.error else 0
        if all(failures) and sum(failures) >= MAX_FAILURES:
            run.failure = answer.error
        if run.failure is not None:
            return
        if answer.error:
            await asyncio.sleep(PAUSE)
    run.closed = run.closed or time.perf_counter()


def summarize(
    clients: int, arm: LoadArm, runs: Sequence[LoadRun], plain: Sequence[LoadRun]
) -> ServeResult:
    """Compute the result of one arm; `plain` are the runs of plain decoding in the same rounds."""
    complete = [run for run in runs if run.complete]
    used = complete or runs
    answers = [answer for run in used for answer in run.answers]
    finished = [answer for run in used for answer in run.finished]
    pairs = [(r, p) for r, p in zip(runs, plain, strict=False) if r.complete and p.complete]
    ratios = [run.speed / base.speed for run, base in pairs if base.speed]
    compared = [at for run, base in pairs for at in differences(run, base)]
    speed = median([run.speed for run in used])
    own_stats = [answer.stats for answer in finished if answer.stats]
    stats = sum(own_stats or [run.counted for run in used if run.counted], SpecStats())
    with_cache = [answer for answer in finished if answer.cached_tokens is not None]
    prompt_tokens = sum(answer.prompt_tokens for answer in with_cache)
    cached_tokens = sum(answer.cached_tokens or 0 for answer in with_cache)
    return ServeResult(
        draft=arm.draft,
        depth=arm.depth,
        requests=clients,
        rounds=len(complete),
        tokens_per_second=speed,
        times_plain=median(ratios) if ratios else None,
        interval=None if arm.draft == OFF else bootstrap_interval(ratios),
        requests_per_second=speed * len(finished) / max(sum(a.tokens for a in finished), 1),
        first_token_ms=percentiles([(a.chunks[0][0] - a.sent, 1.0) for a in finished if a.chunks]),
        inter_token_ms=percentiles([gap for answer in finished for gap in token_gaps(answer)]),
        finished=len(finished),
        errors=_errors([answer.error for answer in answers if answer.error]),
        counted="usage" if all(a.counted is not None for a in finished) else "chunks",
        accepted_length=stats.emitted / stats.passes if stats.passes else None,
        acceptance=stats.accepted / stats.drafted if stats.drafted else None,
        cached=cached_tokens / prompt_tokens if prompt_tokens else None,
        same=all(at is None for at in compared) if compared else None,
        first_difference=min((at for at in compared if at is not None), default=None),
    )


def _errors(messages: Sequence[str]) -> dict[str, int]:
    """Count messages; the rarer ones are counted together as "others"."""
    common = dict(Counter(messages).most_common(MAX_ERRORS))
    others = len(messages) - sum(common.values())
    return common | ({"others": others} if others else {})


def differences(run: LoadRun, base: LoadRun) -> list[int | None]:
    """Return the first differing output position of each request that both runs finished."""
    outputs = {answer.index: answer.token_ids for answer in base.finished}
    return [
        first_difference(answer.token_ids, outputs[answer.index])
        for answer in run.finished
        if answer.index in outputs
    ]


def token_gaps(answer: Answer) -> list[tuple[float, float]]:
    """Return (seconds per token, tokens) of each chunk after the first."""
    gaps = []
    for (last, _), (when, count) in itertools.pairwise(answer.chunks):
        tokens = count * answer.scale
        gaps.append(((when - last) / tokens, tokens))
    return gaps


def percentiles(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return percentiles of (seconds, weight) pairs in milliseconds; empty without values.

    A percentile is the smallest value that at least this share of the weight does not exceed.
    """
    if not values:
        return {}
    seconds, weights = np.array(sorted(values)).T
    reached = np.cumsum(weights) / np.sum(weights)
    found = {}
    for p in PERCENTILES:
        at = min(int(np.searchsorted(reached, p / 100 - 1e-12)), len(seconds) - 1)
        found[f"p{p}"] = 1e3 * float(seconds[at])
    return found
