"""How fast prompts are read: time to the first token, plainly, one request at once, every engine in turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from forerun.bench.peers.process import Prompts
from forerun.bench.peers.results import OURS, PrefillResult
from forerun.bench.peers.turns import Company, in_turn
from forerun.measure.medians import median
from forerun.progress import Part, Tell


def measure_prefill(
    form: str, company: Company, lengths: Sequence[int], texts: Prompts, repeats: int, tell: Tell
) -> list[PrefillResult]:
    """A row for each length and player that decodes plainly. Prompts are made of `texts`; the first round is cold and
    does not count."""
    results = []
    starts = itertools.count()  # no two prompts begin alike: an engine may remember what it has read
    for at, length in enumerate(lengths):
        part = Part(tell, at, len(lengths))
        runs: dict[str, list[float]] = {player.name: [] for player in company.players if player.ready.plain}
        for i in range(-1, repeats):
            what = f"round {i + 1} of {repeats}" if i >= 0 else "warming up"
            part(f"reading {length} tokens, {what}", i + 1, repeats + 1)
            prompt = prompt_of(texts, length, next(starts))
            for name in in_turn(list(runs), i):
                outcome = company.ask(name, 0, [prompt], 1)
                if outcome is not None and i >= 0:
                    runs[name].append(outcome.prefill_seconds)
        results += _rows(form, length, {name: times for name, times in runs.items() if company.has(name)})
    return results


def prompt_of(texts: Prompts, length: int, start: int) -> list[int]:
    """So many tokens of the texts, one after the other, round and round, from the token at `start` on."""
    whole = list(itertools.chain.from_iterable(texts))
    return list(itertools.islice(itertools.cycle(whole), start % len(whole), start % len(whole) + length))


def _rows(form: str, length: int, runs: Mapping[str, Sequence[float]]) -> list[PrefillResult]:
    """A row for each player, as far as its first tokens were timed."""
    rows = []
    for name, times in runs.items():
        if times and all(times):
            ratios = [theirs / ours for ours, theirs in zip(runs[OURS], times, strict=True)]
            ratio = None if name == OURS else median(ratios)
            rows.append(PrefillResult(name, form, length, median(times), length / median(times), ratio))
    return rows
