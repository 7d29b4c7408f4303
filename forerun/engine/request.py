"""One request: its tokens, parameters and progress. The scheduler is the only one that moves it
about."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.proposer import Reference
from forerun.engine.acceptance import Acceptance
from forerun.engine.guard import Judge
from forerun.engine.stats import RequestStats
from forerun.errors import ForerunError
from forerun.models.tokenizer import TextStream
from forerun.sampling.filters import SamplingState
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, PromptLogprobs
from forerun.verify import Rule

WAITING = -1
OFF = "off"  # the draft of who wants none


@dataclass(frozen=True, slots=True)
class Offered:
    """What one proposer drafted in a step, verified or not; `kind` is of what was copied, as the
    policy knows it (`kind_of_match`), or empty."""

    name: str
    kind: str
    draft: Draft


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` are prompt and output; the KV cache of its slot holds tokens[:length], the last is
    the next root.

    `limit` is the most output tokens it may have; `draft` names its proposer and `depth` what it
    asked for; `references` are texts that may help to draft it; `trace` asks for the rounds;
    `tenant` says whose it is: it learns from requests of the same tenant alone.
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
    acceptance: defaultdict[str, Acceptance] = field(
        default_factory=lambda: defaultdict(Acceptance)
    )  # by proposer
    asked: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # tokens, and the step, when a proposer last was
    judge: Judge = field(default_factory=Judge)
    dropped: bool = False  # what its proposer kept of it, since there is nothing to draft for long
    allowed: int = 0  # depth its draft may have in this step
    offered: list[Offered] = field(
        default_factory=list
    )  # what was drafted for this step, verified or not
    paused: bool = False  # it is out of the engine until it is resumed
    finish_reason: str | None = None
    error: ForerunError | None = None  # what ends it, of its own
    prompt_logprobs: PromptLogprobs = field(
        default_factory=list
    )  # of the prompt's tokens read so far, if asked for
    arrived: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # nothing stands before the first token

    @property
    def output(self) -> Sequence[int]:
        """The tokens produced so far."""
        return self.tokens[self.prompt_length :]

    def unscored(self, start: int, count: int) -> range:
        """The positions among `count` from `start` on whose logits are needed for log-probabilities
        of the prompt: each says how likely the token behind it is."""
        if self.params.prompt_logprobs is None:
            return range(0)
        return range(
            max(start, len(self.prompt_logprobs) - 1), min(start + count, self.prompt_length - 1)
        )

    @property
    def reusable(self) -> Sequence[int]:
        """The tokens that need not be read where the cache holds them: logits that are needed are
        in no cache."""
        missing = self.unscored(0, self.prompt_length)
        return self.tokens[: missing.start + 1] if missing else self.tokens

    @property
    def insists(self) -> bool:
        """Whether it drafts to a depth of its own, whatever pays."""
        return self.draft != OFF and self.depth != "auto"

    @property
    def has_proposer(self) -> bool:
        """Whether there is a proposer that keeps something of it."""
        return self.draft != OFF and not self.dropped

    @property
    def was_asked(self) -> bool:
        """Whether a proposer was asked for it in this step."""
        return self.allowed > 0 or bool(self.offered)

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt_length

    def append(self, token: int) -> str:
        """Commit one output token and see whether it is the last; returns the text that it made
        printable."""
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
