"""Who runs, and how many tokens of each: admission, prefill in chunks, preemption, release. Looks
into no tensor.

Slots are given in order of arrival. When the KV pool is full the newest request goes back to the
front of the queue and reads its tokens again later; the oldest never waits, so everything ends. A
request that could not end alone in an empty pool is refused on arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.cache.kv import KVCache
from forerun.draft.proposer import Proposer
from forerun.engine.error_isolation import isolate_errors
from forerun.engine.request import WAITING, Request
from forerun.errors import CapacityError, RequestError, shorten
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import States


def check_ids(ids: Collection[int], vocab: int) -> None:
    """Raise RequestError for one that is no token's."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        outside = next(token for token in ids if not 0 <= token < vocab)
        raise RequestError(f"token id {shorten(outside)} is not in the vocabulary of {vocab}")


def output_limit(target: Runner, tokens: Sequence[int], params: SamplingParams) -> int:
    """Most output tokens the request may have. Raises RequestError or CapacityError if it cannot be
    served."""
    vocab, context, pages = target.decoder.config.vocab, target.decoder.context, target.cache.pages
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token")
    for ids in (tokens, params.logit_bias, params.stop_token_ids):
        check_ids(ids, vocab)
    room = context - len(tokens)
    if room < min(1, params.max_tokens):  # a prompt that is only read may fill the context
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, the context only {context}: shorten the prompt"
        )
    limit, rows = min(params.max_tokens, room), pages.count * pages.size
    if len(tokens) + limit > rows:
        raise CapacityError(
            f"prompt and max_tokens need {len(tokens) + limit} tokens of KV cache, which holds {rows}: "
            "lower max_tokens or raise kv_tokens"
        )
    return limit


LEAST = 16  # tokens of prompts that are read in a pass, where there are so many


@dataclass(slots=True)
class Work:
    """`count` tokens of one request to read in this pass; `draws` when that reaches its root and a
    token is to be generated. `scored` are positions of the prompt whose logits are wanted for
    log-probabilities. `features` is what the pass saw, its own tokens from row `first` on."""

    request: Request
    count: int
    draws: bool
    scored: range = range(0)
    features: dict[int, States] = field(default_factory=dict)
    first: int = 0


class Scheduler:
    """Requests that wait and run over one KV cache."""

    def __init__(
        self,
        cache: KVCache,
        proposers: Mapping[str, Proposer],
        slots: int,
        chunk: int,
        scores: int = 1 << 31,
    ) -> None:
        """`scores`: rows of logits for log-probabilities of prompts that there is room for in one
        pass."""
        self.cache, self.proposers, self.chunk, self.scores = cache, proposers, chunk, scores
        self.budget = chunk + slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.slots = list(range(slots - 1, -1, -1))

    def plan(self, room: Callable[[int], int]) -> list[Work]:
        """Choose the work of the next pass: decoding requests first, then prompts as far as the
        budget goes.

        `room` returns the most tokens of a pass in which prompts are read beside so many decoding
        requests; at least `LEAST` tokens of prompts are read all the same.
        """
        if not self._reserve():
            self._admit()
        pending = [(r, len(r.tokens) - self.cache.length[r.slot]) for r in self.running]
        works, budget, decoding = [], self.budget, sum(count == 1 for _, count in pending)
        scores = self.scores
        if 0 < decoding < len(pending):
            budget = min(budget, max(room(decoding), decoding + LEAST))
        for request, count in sorted(pending, key=lambda pair: pair[1] > 1):
            start, take = self.cache.length[request.slot], min(count, self.chunk, budget)
            if request.unscored(start, take):
                take = min(take, scores)
            if take:
                scored = request.unscored(start, take)
                works.append(
                    Work(request, take, draws=take == count and request.limit > 0, scored=scored)
                )
                budget -= take
                scores -= len(scored)
        return works

    def _reserve(self) -> bool:
        """Room for every running request's known tokens, oldest first; True if somebody had to go
        for it."""
        preempted = False
        for request in list(self.running):
            while request.slot != WAITING and not self.cache.pages.grow(
                request.slot, len(request.tokens)
            ):
                self._preempt(self.running[-1])
                preempted = True
        return preempted

    def _preempt(self, request: Request) -> None:
        self._release(request, finished=False)
        request.stats.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self) -> None:
        """Start waiting requests while there are slots, and pages for all their tokens."""
        while self.waiting and self.slots:
            request, slot = self.waiting[0], self.slots[-1]
            cached = self.cache.open(slot, request.reusable, request.tenant)
            if not self.cache.pages.grow(slot, len(request.tokens)):
                self.cache.close(slot)
                assert self.running, "a request that fits no empty pool was let in"
                return
            self.waiting.remove(request)
            self.slots.pop()
            request.slot = slot
            request.stats.cached_tokens = max(
                request.stats.cached_tokens, min(cached, request.prompt_length)
            )
            self.running.append(request)
            if request.draft in self.proposers:
                with isolate_errors(request):
                    take_up(request, self.proposers[request.draft])

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if request.slot == WAITING:
            self.waiting.remove(request)
        else:
            self._release(request, finished=request.error is None)

    def withdraw(self, request: Request) -> None:
        """Take a request out that has not ended: put back among the waiting ones, it reads its
        tokens again and goes on as after a preemption."""
        if request.slot == WAITING:
            self.waiting.remove(request)
        else:
            self._release(request, finished=False)

    def _release(self, request: Request, finished: bool) -> None:
        if request.draft in self.proposers:
            if request.dropped and finished:
                with isolate_errors(request):
                    take_up(
                        request, self.proposers[request.draft]
                    )  # it may remember the text for others
            if not request.dropped:
                with isolate_errors(
                    request
                ):  # whatever a drafter does here, the slot is given back
                    self.proposers[request.draft].close(
                        request.slot, request.tokens if finished else None
                    )
        self.cache.close(request.slot)
        self.slots.append(request.slot)
        self.running.remove(request)
        request.slot = WAITING


def drop(request: Request, proposer: Proposer) -> None:
    """Let its proposer keep nothing of a request: until it takes it up again it is shown nothing,
    and not asked."""
    proposer.close(request.slot)
    request.dropped = True


def take_up(request: Request, proposer: Proposer) -> None:
    """Let its proposer begin with what a request has so far."""
    proposer.open(request.slot, request.tokens, request.references, request.tenant)
    request.dropped = False
    request.asked = {
        p.name: (len(request.tokens), -1)
        for p in proposer.parts
        if p.aux_hidden_layers and request.produced
    }
