"""One timed run: requests put in at once, decoded one way to their end; and what the rounds of
requests add up to.

What is timed. The window opens when the last of the requests has its first token, and closes when
the last has ended; the speed is the tokens that came within it over its length. So reading prompts
is left out, as are tokens that quick requests produced meanwhile, and the end of a run, where
requests that were less lucky with their drafts go on alone, is left in. With one request that is
all tokens but the first over the time since the first. A draft model reads the prompt within the
window, unless an earlier run left it in its cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.draft.proposer import Reference
from forerun.draft.registry import with_references
from forerun.draft_spec import draft_name
from forerun.engine.engine import Engine
from forerun.engine.request import OFF
from forerun.engine.stats import RequestStats
from forerun.sampling.params import SamplingParams

FIRST_BUCKET = 32  # output positions; each later bucket is as long as all before it


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode: a draft as in `Config.draft`, a depth and a rule. PLAIN is plain
    decoding."""

    draft: str
    depth: int | str
    rule: str = "match"

    @property
    def name(self) -> str:
        """What the engine calls the proposer."""
        return draft_name(self.draft)


PLAIN = Arm(OFF, 0)


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt as token ids, and the texts that came with it."""

    prompt: list[int]
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run.

    Attributes:
        speed: tokens a second in the window.
        outputs: of each request.
        stats: of each request.
        step_ms: milliseconds a step in the window, all of it.
        prefill_seconds: from the beginning to the first token of the last request.
    """

    speed: float
    outputs: list[list[int]]
    stats: list[RequestStats]
    step_ms: float
    prefill_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(output) for output in self.outputs)

    @property
    def accepted_length(self) -> float:
        """Tokens a target pass and request."""
        return sum(s.completion_tokens for s in self.stats) / self._steps

    @property
    def draft_ms(self) -> float:
        """Milliseconds a step spent drafting."""
        return 1e3 * sum(s.draft_seconds for s in self.stats) / self._steps

    @property
    def pass_ms(self) -> float:
        """Milliseconds a step spent in the target's pass with its verification."""
        return 1e3 * sum(s.verify_seconds for s in self.stats) / self._steps

    @property
    def other_ms(self) -> float:
        """Milliseconds a step spent on anything else."""
        return max(self.step_ms - self.draft_ms - self.pass_ms, 0.0)

    @property
    def _steps(self) -> int:
        return sum(s.steps for s in self.stats)


def timed_run(engine: Engine, works: Sequence[Work], params: SamplingParams, arm: Arm) -> Run:
    """Let the prompts run at once to their end; request i draws with the seed of `params` plus
    i."""
    begun = time.perf_counter()
    seed, requests = params.seed or 0, []
    for i, work in enumerate(works):
        draft = with_references(arm.name) if work.references and arm.name != OFF else arm.name
        mine = replace(params, seed=seed + i)
        requests.append(
            engine.add(
                work.prompt,
                mine,
                draft=draft,
                depth=arm.depth,
                rule=arm.rule,
                references=work.references,
            )
        )
    waiting = {request.id for request in requests}
    opened = closed = time.perf_counter()
    tokens = steps = 0
    while engine.busy:
        events = engine.step_or_raise()
        closed = time.perf_counter()
        if waiting:
            waiting -= {event.request_id for event in events if event.token_ids}
            opened = closed
        else:
            tokens += sum(len(event.token_ids) for event in events)
            steps += 1
    return Run(
        speed=tokens / (closed - opened) if tokens else 0.0,
        outputs=[list(request.output) for request in requests],
        stats=[request.stats for request in requests],
        step_ms=1e3 * (closed - opened) / steps if steps else 0.0,
        prefill_seconds=opened - begun,
    )


def tally(stats: Iterable[RequestStats]) -> dict[str, Any]:
    """What the rounds of requests add up to, as plain values.

    lengths[i]: passes that gave i + 1 tokens. acceptance: for level 1, 2, .. of the drafts, [drafts
    that reached so deep, those accepted so deep]. sources: {proposer: [drafted, accepted]}.
    positions: [first output position, passes that began from there on, tokens they gave] by buckets
        of 32, 32, 64, 128, .. positions.
    """
    lengths, reached, stood = Counter[int](), Counter[int](), Counter[int]()
    sources: dict[str, list[int]] = {}
    positions: dict[int, list[int]] = {}
    for one in stats:
        at = 0
        for depth, (_, accepted) in zip(one.depths, one.rounds, strict=True):
            given = min(accepted + 1, one.completion_tokens - at)
            lengths[given] += 1
            reached.update(range(depth))
            stood.update(range(min(accepted, depth)))
            bucket = positions.setdefault(bucket_of(at), [0, 0])
            bucket[0] += 1
            bucket[1] += given
            at += given
        for name, source in one.by_source.items():
            counts = sources.setdefault(name, [0, 0])
            counts[0] += source.drafted
            counts[1] += source.accepted
    return {
        "lengths": [lengths[given] for given in range(1, max(lengths, default=0) + 1)],
        "acceptance": [[count, stood[level]] for level, count in sorted(reached.items())],
        "sources": sources,
        "positions": [[start, *counts] for start, counts in sorted(positions.items())],
    }


def bucket_of(position: int) -> int:
    """The first position of the bucket that holds `position`: 0, 32, 64, 128, .."""
    return 0 if position < FIRST_BUCKET else 1 << (position.bit_length() - 1)
