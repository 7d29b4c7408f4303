"""One request of an LLM: the events that have come of it, and what they make."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from forerun.engine.request import Request
from forerun.engine.stats import RequestStats
from forerun.types import Event, PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output.

    Attributes:
        text: the output as text, without the stop string or end-of-text token; "" without a tokenizer.
        token_ids: the output's tokens, the one that ended it included.
        finish_reason: stop (a stop string or token), length (max_tokens or the context), or abort.
        stats: what it took: steps, drafted, accepted, accepted_length, by_source, seconds.
        sources: for each token, the proposer whose draft was accepted, or "" for the target's own.
        logprobs: one entry a token where the parameters asked for them.
        seed: the seed it was drawn with; the same seed gives the same tokens.
        prompt_token_ids: the prompt as the model read it.
        prompt_logprobs: one entry a token of the prompt where the parameters asked for them, None for the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    sources: list[str]
    logprobs: list[TokenLogprobs] | None
    seed: int
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None


class Job:
    """A request and what has come of it until now."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.inbox: deque[Event] = deque()
        self.events: list[Event] = []
        self.done = False

    def receive(self, event: Event) -> None:
        """The next of its events."""
        self.inbox.append(event)
        self.events.append(event)
        self.done = event.finish_reason is not None

    def check(self) -> None:
        """Raise what ended this request, if that was not its own end."""
        if self.request.error:
            raise self.request.error

    def completion(self) -> Completion:
        """What there is so far."""
        request, wants = self.request, self.request.params.logprobs is not None
        return Completion(
            text="".join(event.text for event in self.events),
            token_ids=list(request.output),
            finish_reason=request.finish_reason or "abort",
            stats=request.stats,
            sources=[source for event in self.events for source in event.sources],
            logprobs=[entry for event in self.events for entry in event.logprobs or ()] if wants else None,
            seed=request.seed,
            prompt_token_ids=request.tokens[: request.prompt_length],
            prompt_logprobs=None if request.params.prompt_logprobs is None else list(request.prompt_logprobs),
        )
