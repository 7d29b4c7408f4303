"""One request: its tokens, parameters and progress, and its part of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.cache.attention import Segment
from forerun.draft.proposer import Reference
from forerun.engine.stats import RequestStats
from forerun.errors import ForerunError
from forerun.models.tokenizer import TextStream
from forerun.sampling.filters import SamplingState
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, PromptLogprobs, Verdict
from forerun.verify import Rule

WAITING = -1  # the slot of a request that does not run
OFF = "off"  # the draft of a request that wants none


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A prompt that is being continued.

    Attributes:
        tokens: prompt and output; the KV cache of its slot holds a prefix of them, and the last one
            is the root of the next draft.
        limit: the maximum number of output tokens.
        draft: the name of its proposer, or OFF.
        depth: the depth that was asked for, or "auto".
        references: texts that may help to draft the output.
        trace: keep a `Round` of every step.
        tenant: the request shares cached and learned data with requests of the same tenant only.
        client: who sent it; clients share the slots.
        state, text: sampling state, and the text printed so far (None without a tokenizer).
        slot: its row in the device tables while it runs.
        paused: it is out of the engine until it is resumed.
        error: what ends this request alone.
        prompt_logprobs: those of the prompt tokens read so far, if they were asked for.
        arrived: `time.perf_counter()` at its arrival.
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
    client: str
    end_ids: frozenset[int]
    state: SamplingState
    text: TextStream | None
    slot: int = WAITING
    stats: RequestStats = field(default_factory=RequestStats)
    paused: bool = False
    finish_reason: str | None = None
    error: ForerunError | None = None
    prompt_logprobs: PromptLogprobs = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # the first token has no predecessor

    @property
    def output(self) -> Sequence[int]:
        """The tokens produced so far."""
        return self.tokens[self.prompt_length :]

    @property
    def produced(self) -> int:
        """The number of tokens produced so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """The most tokens of a draft that can still be accepted."""
        return self.limit - self.produced - 1

    @property
    def speculates(self) -> bool:
        """True if the request wants drafts at all."""
        return self.draft != OFF

    @property
    def has_fixed_depth(self) -> bool:
        """True if it drafts to a depth of its own, whatever pays."""
        return self.speculates and self.depth != "auto"

    def unscored(self, start: int, count: int) -> range:
        """Return the prompt positions among `count` from `start` whose logits are still needed.

        Each position's logits give the log-probability of the token behind it.
        """
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(start, len(self.prompt_logprobs) - 1)
        return range(first, min(start + count, self.prompt_length - 1))

    @property
    def reusable(self) -> Sequence[int]:
        """The tokens whose cached keys and values may be used: logits are not in the cache."""
        missing = self.unscored(0, self.prompt_length)
        return self.tokens[: missing.start + 1] if missing else self.tokens

    def append(self, token: int) -> str:
        """Commit an output token, decide whether it is the last, and return the printable text."""
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
        return self.take_text()

    def take_text(self) -> str:
        """Return the text that became printable; all of it once the request has ended."""
        return self.text.take(finished=self.finish_reason is not None) if self.text else ""


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part of one step, filled in as the step goes on.

    Attributes:
        count: known tokens to read in this forward pass.
        generates: reading them reaches the root, and a token is to be generated.
        scored: prompt positions whose logits are wanted for log-probabilities.
        draft: what is verified; None if nothing is generated in this step.
        segment: its tokens in the forward pass, known ones and drafted ones.
        first_row: where they begin in the flat forward pass.
        verdict: what was accepted; None if verification failed.
    """

    request: Request
    count: int
    generates: bool
    scored: range = range(0)
    draft: Draft | None = None
    segment: Segment | None = None
    first_row: int = 0
    verdict: Verdict | None = None
