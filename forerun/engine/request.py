"""One request: its tokens, parameters and progress. The scheduler is the only one that moves it about."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Reference
from forerun.engine.depth import Acceptance
from forerun.engine.stats import RequestStats
from forerun.errors import ForerunError
from forerun.models.text import TextStream
from forerun.sampling.filters import SamplingState
from forerun.sampling.params import SamplingParams
from forerun.verify import Rule

WAITING = -1


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` are prompt and output; the KV cache of its slot holds tokens[:length], the last is the next root.

    `limit` is the most output tokens it may have; `draft` names its proposer and `depth` what it asked for;
    `references` are texts that may help to draft it; `trace` asks for the rounds; `tenant` says whose it is: it learns
    from requests of the same tenant alone.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    limit: int
    draft: str
    depth: int | str
    rule: Rule
    references: Sequence[Reference]
    trace: bool
    tenant: str
    end_ids: frozenset[int]
    state: SamplingState
    text: TextStream | None
    slot: int = WAITING
    stats: RequestStats = field(default_factory=RequestStats)
    acceptance: defaultdict[str, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))  # by proposer
    asked: dict[str, int] = field(default_factory=dict)  # tokens when a proposer was last asked: what it lags behind
    drafter: str = ""  # who drafted for this step; a cascade is several
    allowed: int = 0  # depth its draft may have in this step
    reach: int = 0  # depth of what was drafted for this step, before a grammar cut it
    kind: str = ""  # of what was copied for this step, as the policy knows it (`kind_of_match`)
    aside: tuple[str, list[int]] | None = None  # tokens that were copied and are not verified, and their kind
    finish_reason: str | None = None
    error: ForerunError | None = None  # what ends it, of its own
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def output(self) -> Sequence[int]:
        """The tokens produced so far."""
        return self.tokens[self.prompt_length :]

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt_length

    def append(self, token: int) -> str:
        """Commit one output token and see whether it is the last; returns the text that it made printable."""
        self.tokens.append(token)
        self.state.append(token)
        self.stats.completion_tokens += 1
        if token in self.end_ids:
            self.finish_reason = "stop"
        elif self.text is not None:
            self.text.append(token)
            if self.text.stopped:
                self.finish_reason = "stop"
        if self.state.grammar:
            self.finish_reason = self.state.grammar.ending or self.finish_reason
        if self.finish_reason is None and self.produced >= self.limit:
            self.finish_reason = "length"
        return self.text.take(finished=self.finish_reason is not None) if self.text else ""
