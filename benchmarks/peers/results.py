"""Rows of the comparison: speeds side by side, ratios within rounds, and whether outputs agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.peers.process import Capabilities, Outcome, Prompts
from forerun.measure.medians import bootstrap_interval, first_difference, median

OURS = "forerun"
OWN_DEPTH = 1  # stands for the depth of an engine that chooses it itself
Runs = Mapping[tuple[str, int | str], Sequence[Outcome]]  # (engine, depth) -> one run per round


class Engine(Protocol):
    """An engine that takes part, ours or a `Worker`."""

    name: str
    ready: Capabilities

    def run(self, depth: Any, prompts: Prompts, tokens: int, temperature: float = 0.0) -> Outcome:
        """Continue all prompts together by `tokens` tokens; depth 0 is plain. Raises PeerError."""


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One engine with one weight format and concurrency; medians over rounds, None if unknown.

    Attributes:
        plain: tokens per second of plain decoding, all requests together.
        speculative: the same with a draft, at the fastest depth.
        depth: that depth.
        by_depth: tokens per second at every depth.
        times_plain: speculative over plain; `interval` is its 95 % bootstrap interval.
        accepted_length: tokens per target pass and request.
        first_difference: earliest position where speculative and plain output differ; -1 if none.
        shared_with_ours: mean share of its output before the first difference from ours. Engines
            round differently, so outputs may part anywhere; a wrong conversion shares nothing.
            None above temperature 0, where each engine draws its own random numbers.
        ours_over_plain, ours_over_speculative: our speed over its, each at its fastest depth.
        ours_over_best: the same, each in its faster way.
    """

    engine: str
    version: str
    format: str
    requests: int
    category: str
    temperature: float
    plain: float | None
    speculative: float | None
    depth: int | str | None
    by_depth: dict[str, float]
    times_plain: float | None
    interval: tuple[float, float] | None
    accepted_length: float | None
    first_difference: int | None
    shared_with_ours: float | None
    ours_over_plain: float | None
    ours_over_speculative: float | None
    ours_over_best: float | None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """One engine reading prompts of one length; medians over rounds.

    `first_token` is in seconds, `speed` in prompt tokens per second, `ours_over` our speed over
    its.
    """

    engine: str
    format: str
    tokens: int
    first_token: float
    speed: float
    ours_over: float | None


@dataclass(frozen=True, slots=True)
class Fastest:
    """The runs of one engine that its row is about; empty for a way in which it does not decode."""

    plain: Sequence[Outcome] = ()
    speculative: Sequence[Outcome] = ()
    depth: int | str | None = None

    @property
    def best(self) -> Sequence[Outcome]:
        """The faster way."""
        return max((self.plain, self.speculative), key=speed_of)


def summarize(
    form: str,
    requests: int,
    engines: Sequence[Engine],
    runs: Runs,
    category: str = "",
    temperature: float = 0.0,
) -> list[PeerResult]:
    """Return a row for each engine from its runs of one format, concurrency, category and
    temperature."""
    fastest = {engine.name: _fastest(engine.name, runs) for engine in engines}
    rows = []
    for engine in engines:
        own = fastest[engine.name]
        ours = Fastest() if engine.name == OURS else fastest[OURS]
        ratios = _ratios(own.speculative, own.plain)
        lengths = [o.accepted_length for o in own.speculative if o.accepted_length is not None]
        from_plain = _differences(own.speculative, own.plain)
        from_ours = [] if temperature else _differences(own.plain or own.speculative, ours.plain)
        shares = [1.0 if at is None else at / length for at, length in from_ours]
        positions = [at for at, _ in from_plain if at is not None]
        by_depth = {
            str(depth): speed_of(outcomes)
            for (name, depth), outcomes in runs.items()
            if name == engine.name and depth != 0
        }
        rows.append(
            PeerResult(
                engine=engine.name,
                version=engine.ready.version,
                format=form,
                requests=requests,
                category=category,
                temperature=temperature,
                plain=speed_of(own.plain) or None,
                speculative=speed_of(own.speculative) or None,
                depth=own.depth if engine.ready.depths else None,
                by_depth=by_depth if engine.ready.depths else {},
                times_plain=median(ratios) if ratios else None,
                interval=bootstrap_interval(ratios),
                accepted_length=median(lengths) if lengths else None,
                first_difference=min(positions, default=-1) if from_plain else None,
                shared_with_ours=sum(shares) / len(shares) if shares else None,
                ours_over_plain=_ratio(ours.plain, own.plain),
                ours_over_speculative=_ratio(ours.speculative, own.speculative),
                ours_over_best=_ratio(ours.best, own.best),
            )
        )
    return rows


def speed_of(outcomes: Sequence[Outcome]) -> float:
    """Return the median speed; 0 without runs."""
    return median([outcome.speed for outcome in outcomes]) if outcomes else 0.0


def _fastest(name: str, runs: Runs) -> Fastest:
    depths = [depth for engine, depth in runs if engine == name and depth != 0]
    depth = max(depths, key=lambda d: speed_of(runs[name, d]), default=None)
    return Fastest(runs.get((name, 0), ()), () if depth is None else runs[name, depth], depth)


def _ratios(some: Sequence[Outcome], others: Sequence[Outcome]) -> list[float]:
    """Return speed ratios round by round; empty if either was not run or not timed."""
    if not some or not others or not all(outcome.speed for outcome in others):
        return []
    return [one.speed / other.speed for one, other in zip(some, others, strict=True)]


def _ratio(some: Sequence[Outcome], others: Sequence[Outcome]) -> float | None:
    ratios = _ratios(some, others)
    return median(ratios) if ratios else None


def _differences(
    some: Sequence[Outcome], others: Sequence[Outcome]
) -> list[tuple[int | None, int]]:
    """Return (first difference or None, length) of each pair of outputs; empty if unknown."""
    found: list[tuple[int | None, int]] = []
    for one, other in zip(some, others, strict=bool(some and others)):
        if one.outputs is None or other.outputs is None:
            return []
        for a, b in zip(one.outputs, other.outputs, strict=True):
            found.append((first_difference(a, b), len(a)))
    return found
