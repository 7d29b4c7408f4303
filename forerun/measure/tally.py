"""What the rounds of requests add up to: tokens a pass, acceptance by level, by source and by place in the output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forerun.engine.stats import RequestStats

FIRST_BUCKET = 32  # output positions; each later bucket is as long as all before it


def tally(stats: Iterable[RequestStats]) -> dict[str, Any]:
    """Counts over requests, as plain values.

    lengths[i]: passes that gave i + 1 tokens. acceptance: for level 1, 2, .. of the drafts, [drafts that reached so
    deep, those accepted so deep]. sources: {proposer: [drafted, accepted]}. positions: [first output position, passes
    that began from there on, tokens they gave] by buckets of 32, 32, 64, 128, .. positions.
    """
    lengths: list[int] = []
    acceptance: list[list[int]] = []
    sources: dict[str, list[int]] = {}
    positions: dict[int, list[int]] = {}
    for one in stats:
        at = 0
        for depth, accepted in zip(one.depths, (r[1] for r in one.rounds), strict=True):
            given = min(accepted + 1, one.completion_tokens - at)
            _count(lengths, given - 1)
            for level in range(depth):
                acceptance += [[0, 0]] if level == len(acceptance) else []
                acceptance[level][0] += 1
                acceptance[level][1] += accepted > level
            bucket = positions.setdefault(bucket_of(at), [0, 0])
            bucket[0] += 1
            bucket[1] += given
            at += given
        for name, source in one.by_source.items():
            counts = sources.setdefault(name, [0, 0])
            counts[0] += source.drafted
            counts[1] += source.accepted
    return {
        "lengths": lengths, "acceptance": acceptance, "sources": sources,
        "positions": [[start, *counts] for start, counts in sorted(positions.items())],
    }  # fmt: skip


def _count(histogram: list[int], index: int) -> None:
    histogram += [0] * (index + 1 - len(histogram))
    histogram[index] += 1


def bucket_of(position: int) -> int:
    """The first position of the bucket that holds `position`: 0, 32, 64, 128, .."""
    return 0 if position < FIRST_BUCKET else 1 << (position.bit_length() - 1)
