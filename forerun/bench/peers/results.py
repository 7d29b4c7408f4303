"""What the runs of several engines say: speeds side by side, ratios within rounds, and whether the
texts agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.bench.peers.process import Outcome, Player
from forerun.measure.medians import bootstrap_interval, first_difference, median

OURS = "forerun"
ITS_OWN = 1  # stands for the depth of an engine that drafts as deep as it likes
Runs = Mapping[tuple[str, int | str], Sequence[Outcome]]


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine that was left out: of one format, or (format "") from some run on."""

    engine: str
    format: str
    why: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.why}"


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One engine with one format of weights and number of requests at once; figures are medians
    over the rounds.

    None stands for what the engine does not do or does not tell.

    Attributes:
        engine, version, format, requests: what ran.
        category: of the prompts.
        plain: tokens a second of plain decoding, all requests together.
        speculative: the same with a draft, at the depth that gave the most.
        depth: that depth.
        by_depth: tokens a second at every depth that was run, by its name.
        times_plain: speculative over plain.
        interval: 95 % bootstrap interval of times_plain; None of fewer than two rounds.
        accepted_length: tokens a pass of the target and request, at that depth.
        first_difference: the earliest output position where its speculative text is not its plain
            text, -1 if none.
        first_difference_from_ours: the same of its text and ours, both plain where it decodes
            plainly.
        shared_with_ours: of those texts, the mean share that comes before their first difference.
            Engines round differently, so two tokens that are about as likely part them anywhere; a
            wrong conversion shares nothing.
        ours_over_plain, ours_over_speculative: our speed over its, each at its own best depth.
        ours_over_best: the same, each in the way that it is faster in.
    """

    engine: str
    version: str
    format: str
    requests: int
    plain: float | None
    speculative: float | None
    depth: int | str | None
    by_depth: dict[str, float]
    times_plain: float | None
    interval: tuple[float, float] | None
    accepted_length: float | None
    first_difference: int | None
    first_difference_from_ours: int | None
    shared_with_ours: float | None
    ours_over_plain: float | None
    ours_over_speculative: float | None
    ours_over_best: float | None
    category: str


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """One engine reading prompts of one length; medians over the rounds.

    Attributes:
        engine, format, tokens: what read how much.
        first_token: seconds until the first token.
        speed: tokens of the prompt over these seconds.
        ours_over: our speed over its.
    """

    engine: str
    format: str
    tokens: int
    first_token: float
    speed: float
    ours_over: float | None


@dataclass(frozen=True, slots=True)
class PeersReport:
    """What was measured, and how: decoding, and reading prompts if asked.

    `draft` is model:PLACE, lookup or off, `draft_format` that of a draft model, where there is one.
    `bandwidth` is the lowest, median and highest GB/s read between runs; None where that means
    nothing."""

    model: str
    draft: str
    draft_format: str
    tokens: int
    repeats: int
    threads: int
    device: str
    bandwidth: tuple[float, float, float] | None
    results: list[PeerResult]
    prefills: list[PrefillResult]
    failures: list[Failure]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Best:
    """The runs of one engine that its row is about; none of a way in which it does not decode."""

    plain: Sequence[Outcome]
    speculative: Sequence[Outcome]
    depth: int | str | None

    @property
    def fastest(self) -> Sequence[Outcome]:
        """The way that it is faster in."""
        return max((self.plain, self.speculative), key=_speed)


NOT_RUN = Best((), (), None)


def summarise(
    form: str, requests: int, players: Sequence[Player], runs: Runs, category: str = ""
) -> list[PeerResult]:
    """A row for each player, ours among them, from all runs of one format, number of requests and
    category."""
    chosen = {player.name: _best(player.name, runs) for player in players}
    rows = []
    for player in players:
        ours = NOT_RUN if player.name == OURS else chosen[OURS]  # ours is not compared with itself
        rows.append(_result(form, requests, category, player, chosen[player.name], ours, runs))
    return rows


def _best(name: str, runs: Runs) -> Best:
    depths = [depth for who, depth in runs if who == name and depth != 0]
    depth = max(depths, key=lambda d: _speed(runs[name, d]), default=None)
    return Best(runs.get((name, 0), ()), () if depth is None else runs[name, depth], depth)


def _speed(outcomes: Sequence[Outcome]) -> float:
    return median([outcome.speed for outcome in outcomes]) if outcomes else 0.0


def _result(
    form: str, requests: int, category: str, player: Player, best: Best, ours: Best, runs: Runs
) -> PeerResult:
    ratios = _ratios(best.speculative, best.plain)
    lengths = [
        outcome.accepted_length
        for outcome in best.speculative
        if outcome.accepted_length is not None
    ]
    from_ours = _apart(best.plain or best.speculative, ours.plain)
    by_depth = {
        str(d): _speed(outcomes)
        for (who, d), outcomes in runs.items()
        if who == player.name and d != 0
    }
    return PeerResult(
        engine=player.name,
        version=player.ready.version,
        format=form,
        requests=requests,
        plain=_speed(best.plain) or None,
        speculative=_speed(best.speculative) or None,
        depth=best.depth if player.ready.depths else None,
        by_depth=by_depth if player.ready.depths else {},
        times_plain=median(ratios) if ratios else None,
        interval=bootstrap_interval(ratios),
        accepted_length=median(lengths) if lengths else None,
        first_difference=_earliest(_apart(best.speculative, best.plain)),
        first_difference_from_ours=_earliest(from_ours),
        shared_with_ours=_shared(from_ours),
        ours_over_plain=_ratio(ours.plain, best.plain),
        ours_over_speculative=_ratio(ours.speculative, best.speculative),
        ours_over_best=_ratio(ours.fastest, best.fastest),
        category=category,
    )


def _ratios(some: Sequence[Outcome], others: Sequence[Outcome]) -> list[float]:
    """One speed over the other, round by round; empty where either was not run, or not timed."""
    if not some or not others or not all(outcome.speed for outcome in others):
        return []
    return [one.speed / other.speed for one, other in zip(some, others, strict=True)]


def _ratio(some: Sequence[Outcome], others: Sequence[Outcome]) -> float | None:
    ratios = _ratios(some, others)
    return median(ratios) if ratios else None


def _apart(some: Sequence[Outcome], others: Sequence[Outcome]) -> list[tuple[int | None, int]]:
    """Where each pair of outputs first differs (None: nowhere), and their length; empty where
    outputs are not known."""
    found: list[tuple[int | None, int]] = []
    for one, other in zip(some, others, strict=bool(some and others)):
        if one.outputs is None or other.outputs is None:
            return []
        found += [
            (first_difference(a, b), len(a))
            for a, b in zip(one.outputs, other.outputs, strict=True)
        ]
    return found


def _earliest(apart: Sequence[tuple[int | None, int]]) -> int | None:
    """The earliest difference of all, -1 if there is none; None where nothing was compared."""
    return min((at for at, _ in apart if at is not None), default=-1) if apart else None


def _shared(apart: Sequence[tuple[int | None, int]]) -> float | None:
    """The mean share of a text before its first difference."""
    return (
        sum(1.0 if at is None else at / length for at, length in apart) / len(apart)
        if apart
        else None
    )
