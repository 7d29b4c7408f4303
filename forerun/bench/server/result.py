"""The figures of one way to draft at one number of requests at once, from its runs. Arithmetic
only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.bench.server.answer import Answer, Speculated
from forerun.measure.medians import bootstrap_interval, first_difference, median

OFF = "off"
PERCENTILES = (50, 95, 99)
ERRORS = 5  # messages that are told one by one


@dataclass(frozen=True, slots=True)
class Arm:
    """What requests say about drafting: a draft of the server, and its depth. None leaves it to the
    server."""

    draft: str | None = None
    depth: int | str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request's body."""
        if self.draft is None:
            return {}
        if self.draft == OFF:
            return {"speculative": False}
        depth = {} if self.depth is None else {"depth": self.depth}
        return {"speculative": {"draft": self.draft} | depth}


@dataclass(slots=True)
class Run:
    """One run; times are `time.perf_counter` seconds.

    Attributes:
        opened, closed: the window. It closes at the last piece of text where the run was cut short.
        answers: in the order in which they were asked for.
        broken: why the run was given up.
        whole: whether it came to its end, neither interrupted nor broken.
        counted: speculation by the server's own counters, where it has any; other clients' requests
            are in it.
    """

    opened: float = 0.0
    closed: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    broken: str | None = None
    whole: bool = False
    counted: Speculated | None = None

    @property
    def finished(self) -> list[Answer]:
        """The answers that came to their end."""
        return [answer for answer in self.answers if answer.finished and answer.error is None]

    @property
    def speed(self) -> float:
        """Tokens a second in the window; a chunk counts as its share of its answer's tokens."""
        tokens = sum(
            count * answer.scale
            for answer in self.answers
            if answer.error is None
            for when, count in answer.chunks
            if when <= self.closed
        )
        return tokens / (self.closed - self.opened) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One draft at one number of requests, over all rounds.

    Attributes:
        draft, depth: as in `Arm`.
        requests: at once.
        rounds: whole ones; 0 where all there is comes from a run that was cut short.
        tokens_per_second: of all requests together, the median of the rounds.
        times_plain: the speed over that of plain decoding in the same round, the median; None
            without drafts.
        interval: 95 % bootstrap interval of times_plain; None of fewer than two rounds.
        requests_per_second: tokens a second over the mean tokens of an answer.
        first_token_ms: {percentile: milliseconds from sending to the first piece of text}.
        inter_token_ms: {percentile: milliseconds between tokens}; the wait for a chunk is shared
            among its tokens.
        finished: answers that came to their end.
        errors: {what happened: how often}, of the requests that failed.
        counted: where token counts come from: usage, or chunks (one token each) where the server
            gives no usage.
        accepted_length: tokens a target pass, by the server's statistics; None where it has none.
        acceptance: drafted tokens accepted, of those verified; None likewise, and where nothing was
            drafted.
        cached: share of prompt tokens that the server found in its cache; None where it does not
            say.
        same: whether every answer was plain decoding's; None where there was none to compare.
        first_difference: the earliest output position, in tokens, where one was not.
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


def result(clients: int, arm: Arm, runs: Sequence[Run], plain: Sequence[Run] | None) -> Result:
    """The figures of one arm at one number of requests; `plain` are the runs of plain decoding, by
    the same rounds."""
    whole = [run for run in runs if run.whole]
    used = whole or runs
    answers = [answer for run in used for answer in run.answers]
    finished = [answer for run in used for answer in run.finished]
    pairs = [
        (run, base)
        for run, base in zip(runs, plain or (), strict=False)
        if run.whole and base.whole
    ]
    ratios = [run.speed / base.speed for run, base in pairs if base.speed]
    apart = [at for run, base in pairs for at in differences(run, base)]
    speed = median([run.speed for run in used])
    told = [a.speculated for a in finished if a.speculated] or [
        run.counted for run in used if run.counted
    ]
    speculated = sum(told, Speculated(0, 0, 0, 0))
    cached = [answer for answer in finished if answer.cached_tokens is not None]
    read = sum(answer.prompt_tokens for answer in cached)
    return Result(
        draft=arm.draft,
        depth=arm.depth,
        requests=clients,
        rounds=len(whole),
        tokens_per_second=speed,
        times_plain=median(ratios) if ratios else None,
        interval=None if arm.draft == OFF else bootstrap_interval(ratios),
        requests_per_second=speed
        * len(finished)
        / max(sum(answer.tokens for answer in finished), 1),
        first_token_ms=percentiles([(a.chunks[0][0] - a.sent, 1.0) for a in finished if a.chunks]),
        inter_token_ms=percentiles([gap for answer in finished for gap in gaps(answer)]),
        finished=len(finished),
        errors=_errors([answer.error for answer in answers if answer.error]),
        counted="usage" if all(answer.counted is not None for answer in finished) else "chunks",
        accepted_length=speculated.emitted / speculated.passes if speculated.passes else None,
        acceptance=speculated.accepted / speculated.drafted if speculated.drafted else None,
        cached=sum(answer.cached_tokens or 0 for answer in cached) / read if read else None,
        same=all(at is None for at in apart) if apart else None,
        first_difference=min((at for at in apart if at is not None), default=None),
    )


def _errors(messages: Sequence[str]) -> dict[str, int]:
    """How often each message came; the rarer ones, which may be as many as the requests, as one."""
    common = dict(Counter(messages).most_common(ERRORS))
    others = len(messages) - sum(common.values())
    return common | ({"others": others} if others else {})


def differences(run: Run, base: Run) -> list[int | None]:
    """For each request that both runs finished: the first output position where they differ, None
    if they are alike."""
    theirs = {answer.index: answer.token_ids for answer in base.finished}
    pairs = [
        (answer.token_ids, theirs[answer.index])
        for answer in run.finished
        if answer.index in theirs
    ]
    return [first_difference(one, other) for one, other in pairs]


def gaps(answer: Answer) -> list[tuple[float, float]]:
    """(seconds, how many) between the tokens of an answer: the wait for a chunk, shared among its
    tokens."""
    found, last = [], answer.chunks[0][0] if answer.chunks else 0.0
    for when, count in answer.chunks[1:]:
        tokens = count * answer.scale
        found.append(((when - last) / tokens, tokens))
        last = when
    return found


def percentiles(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Percentiles of (seconds, weight) pairs in milliseconds: the smallest value that enough weight
    does not exceed.

    Empty where there are no values.
    """
    if not values:
        return {}
    seconds, weights = np.array(sorted(values)).T
    reached = np.cumsum(weights) / np.sum(weights)
    at = [
        min(int(np.searchsorted(reached, p / 100 - 1e-12)), len(seconds) - 1) for p in PERCENTILES
    ]
    return {f"p{p}": 1e3 * float(seconds[i]) for p, i in zip(PERCENTILES, at, strict=True)}
