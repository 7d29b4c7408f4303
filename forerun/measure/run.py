"""One timed run: requests added together and decoded to their end with one draft setting.

The timed window opens when the last request has produced its first token and closes when the last
request ends; the speed is the tokens produced within it over its length. Prefill is excluded, and
so are tokens that faster requests produced during prefill; the tail of a run, where requests with
fewer accepted tokens run alone, is included. A draft model reads the prompt within the window,
unless an earlier run left it in the draft model's cache.
"""

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

FIRST_BUCKET = 32  # output positions of the first bucket; each later one doubles the end


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode: a draft as in `Config.draft`, a depth and a rule; `proposer` is its name
    in the engine where that does not follow from the draft."""

    draft: str
    depth: int | str
    rule: str = "match"
    proposer: str = ""

    @property
    def name(self) -> str:
        """The name of the proposer in the engine."""
        return self.proposer or draft_name(self.draft)


PLAIN = Arm(OFF, 0)  # plain decoding


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt as token ids, and the reference texts that came with it."""

    prompt: list[int]
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one run.

    Attributes:
        speed: tokens per second in the window.
        outputs: token ids of each request.
        stats: statistics of each request.
        step_ms: milliseconds per step in the window.
        prefill_seconds: time from the start to the last request's first token.
        before: what `_spent` of all requests was by then: not decoding, but the reading of prompts.
    """

    speed: float
    outputs: list[list[int]]
    stats: list[RequestStats]
    step_ms: float
    prefill_seconds: float = 0.0
    before: tuple[float, float, int] = (0.0, 0.0, 0)

    @property
    def tokens(self) -> int:
        """Total number of output tokens."""
        return sum(len(output) for output in self.outputs)

    @property
    def accepted_length(self) -> float:
        """Tokens per target forward pass and request."""
        return sum(s.completion_tokens for s in self.stats) / sum(s.steps for s in self.stats)

    @property
    def draft_ms(self) -> float:
        """Milliseconds of drafting per step."""
        return self._ms_per_step(0)

    @property
    def pass_ms(self) -> float:
        """Milliseconds of the target's forward pass with verification per step."""
        return self._ms_per_step(1)

    @property
    def other_ms(self) -> float:
        """Milliseconds of everything else per step."""
        return max(self.step_ms - self.draft_ms - self.pass_ms, 0.0)

    def _ms_per_step(self, part: int) -> float:
        after = _spent(self.stats)
        return 1e3 * (after[part] - self.before[part]) / max(after[2] - self.before[2], 1)


def _spent(stats: Sequence[RequestStats]) -> tuple[float, float, int]:
    """Return the seconds of drafting and of verifying, and the steps, of all requests."""
    return (
        sum(s.draft_seconds for s in stats),
        sum(s.verify_seconds for s in stats),
        sum(s.steps for s in stats),
    )


def timed_run(engine: Engine, works: Sequence[Work], params: SamplingParams, arm: Arm) -> Run:
    """Decode all prompts together to their end; request i uses the seed of `params` plus i."""
    begun = time.perf_counter()
    requests = []
    for i, work in enumerate(works):
        has_references = work.references and arm.name != OFF
        requests.append(
            engine.add(
                work.prompt,
                replace(params, seed=(params.seed or 0) + i),
                draft=with_references(arm.name) if has_references else arm.name,
                depth=arm.depth,
                rule=arm.rule,
                references=work.references,
            )
        )
    waiting = {request.id for request in requests}
    opened = closed = time.perf_counter()
    before = (0.0, 0.0, 0)
    tokens = steps = 0
    while engine.busy:
        events = engine.step_or_raise()
        closed = time.perf_counter()
        if waiting:
            waiting -= {event.request_id for event in events if event.token_ids}
            opened = closed
            before = _spent([request.stats for request in requests])
        else:
            tokens += sum(len(event.token_ids) for event in events)
            steps += 1
    return Run(
        speed=tokens / (closed - opened) if tokens else 0.0,
        outputs=[list(request.output) for request in requests],
        stats=[request.stats for request in requests],
        step_ms=1e3 * (closed - opened) / steps if steps else 0.0,
        prefill_seconds=opened - begun,
        before=before,
    )


def tally(stats: Iterable[RequestStats]) -> dict[str, Any]:
    """Aggregate the speculative steps of requests into plain values.

    Returns:
        lengths: entry i counts forward passes that produced i + 1 tokens.
        acceptance: for level 1, 2, ..: [drafts at least that deep, drafts accepted that deep].
        sources: {proposer: [drafted tokens, accepted tokens]}.
        positions: [first output position, passes that started in the bucket, tokens they produced]
            for buckets of 32, 32, 64, 128, .. output positions.
    """
    lengths = Counter[int]()
    reached = Counter[int]()
    accepted_levels = Counter[int]()
    sources: dict[str, list[int]] = {}
    positions: dict[int, list[int]] = {}
    for request in stats:
        at = 0
        for depth, (_, accepted) in zip(request.depths, request.rounds, strict=True):
            produced = min(accepted + 1, request.completion_tokens - at)
            lengths[produced] += 1
            reached.update(range(depth))
            accepted_levels.update(range(min(accepted, depth)))
            bucket = positions.setdefault(bucket_of(at), [0, 0])
            bucket[0] += 1
            bucket[1] += produced
            at += produced
        for name, source in request.by_source.items():
            counts = sources.setdefault(name, [0, 0])
            counts[0] += source.drafted
            counts[1] += source.accepted
    return {
        "lengths": [lengths[length] for length in range(1, max(lengths, default=0) + 1)],
        "acceptance": [[n, accepted_levels[level]] for level, n in sorted(reached.items())],
        "sources": sources,
        "positions": [[start, *counts] for start, counts in sorted(positions.items())],
    }


def bucket_of(position: int) -> int:
    """Return the first position of the bucket that holds `position`: 0, 32, 64, 128, .."""
    return 0 if position < FIRST_BUCKET else 1 << (position.bit_length() - 1)


def machine(threads: int = 0) -> dict[str, Any]:
    """Describe this machine in plain values, for reports. `threads` as in `Config`."""
    import torch

    from forerun import __version__
    from forerun.hardware import cores, processor
    from forerun.kernels import native

    on_gpu = torch.cuda.is_available()
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": threads or cores(),
        "instructions": native.instructions() if native.library() is not None else "torch",
        "torch": torch.__version__,
        "forerun": __version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }
