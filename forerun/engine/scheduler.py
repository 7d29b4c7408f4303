"""Admission, chunked prefill, preemption and release: which requests run, and how many tokens of
each a step processes. No tensor is touched here.

Slots are given in order of arrival, but while several clients have requests, none of them holds
more than half of the slots: a client that sends many requests does not slow the others without
bound. When the KV pool is full the newest request goes back to the
front of the queue and reads its tokens again later; the oldest is never preempted, so everything
ends. A request that could not end alone in an empty pool is refused on arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from forerun.cache.kv import KVCache
from forerun.engine.drafting import Drafting
from forerun.engine.request import WAITING, Request, ScheduledRequest
from forerun.errors import CapacityError, RequestError, shorten
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams

MIN_PREFILL = 16  # prompt tokens that a step reads at least, if there are any


class Scheduler:
    """Waiting and running requests over one KV cache."""

    def __init__(
        self,
        cache: KVCache,
        drafting: Drafting,
        slots: int,
        chunk: int,
        max_scored: int = 1 << 31,
    ) -> None:
        """`chunk`: prompt tokens per step; `max_scored`: rows of logits for log-probabilities of
        prompts that fit into one step."""
        self.cache, self.drafting = cache, drafting
        self.chunk, self.max_scored = chunk, max_scored
        self.budget = chunk + slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.slots = list(range(slots - 1, -1, -1))
        self.client_slots = max(slots // 2, 1)  # of one client while others have requests

    def plan(self, room: Callable[[int], int]) -> list[ScheduledRequest]:
        """Choose what the next step processes: decoding requests first, then prompts.

        `room` returns the most tokens of a pass that reads prompts beside a number of decoding
        requests; at least `MIN_PREFILL` prompt tokens are read all the same.
        """
        if not self._reserve():
            self._admit()
        pending = [(r, len(r.tokens) - self.cache.length[r.slot]) for r in self.running]
        decoding = sum(count == 1 for _, count in pending)
        budget, scores = self.budget, self.max_scored
        if 0 < decoding < len(pending):
            budget = min(budget, max(room(decoding), decoding + MIN_PREFILL))
        batch = []
        for request, count in sorted(pending, key=lambda pair: pair[1] > 1):
            start = self.cache.length[request.slot]
            take = min(count, self.chunk, budget)
            if request.unscored(start, take):
                take = min(take, scores)
            if not take:
                continue
            scored = request.unscored(start, take)
            generates = take == count and request.limit > 0
            batch.append(ScheduledRequest(request, take, generates, scored))
            budget -= take
            scores -= len(scored)
        return batch

    def _reserve(self) -> bool:
        """Reserve rows for every running request's known tokens, oldest first.

        Returns True if a request had to be preempted for it.
        """
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
        while self.slots and (request := self._next()):
            slot = self.slots[-1]
            cached = self.cache.open(slot, request.reusable, request.tenant)
            if not self.cache.pages.grow(slot, len(request.tokens)):
                self.cache.close(slot)
                assert self.running, "a request that does not fit an empty pool was admitted"
                return
            self.waiting.remove(request)
            self.slots.pop()
            request.slot = slot
            cached = min(cached, request.prompt_length)
            request.stats.cached_tokens = max(request.stats.cached_tokens, cached)
            self.running.append(request)
            self.drafting.admit(request)

    def _next(self) -> Request | None:
        """Return the waiting request to start, None if there is none or all clients that wait hold
        their share of the slots."""
        if len({request.client for request in (*self.waiting, *self.running)}) < 2:
            return self.waiting[0] if self.waiting else None
        held = Counter(request.client for request in self.running)
        for request in self.waiting:
            if request.stats.preemptions or held[request.client] < self.client_slots:
                return request
        return None

    def remove(self, request: Request, finished: bool) -> None:
        """Remove a request, wherever it is; `finished` if its text may be remembered.

        Put back among the waiting ones it reads its tokens again, as after a preemption.
        """
        if request.slot == WAITING:
            self.waiting.remove(request)
        else:
            self._release(request, finished)

    def _release(self, request: Request, finished: bool) -> None:
        self.drafting.release(request, finished)
        self.cache.close(request.slot)
        self.slots.append(request.slot)
        self.running.remove(request)
        request.slot = WAITING


def check_ids(ids: Collection[int], vocab: int) -> None:
    """Raise RequestError for an id outside of the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        outside = next(token for token in ids if not 0 <= token < vocab)
        raise RequestError(f"token id {shorten(outside)} is not in the vocabulary of {vocab}")


def output_limit(target: Runner, tokens: Sequence[int], params: SamplingParams) -> int:
    """Return the most output tokens that a request may have.

    They are `params.max_tokens`, or less if the context ends before. If the request does not give
    max_tokens, its default is also cut to the KV cache.

    Raises:
        RequestError, CapacityError: the request cannot be served.
    """
    context, pages = target.decoder.context, target.cache.pages
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token")
    for ids in (tokens, params.logit_bias, params.stop_token_ids):
        check_ids(ids, target.decoder.config.vocab)
    limit, room = params.length_limit, context - len(tokens)
    if room < min(1, limit):  # a prompt that is only read may fill the context
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, the context only {context}: shorten the prompt"
        )
    limit, rows = min(limit, room), pages.count * pages.size
    if len(tokens) + min(1, limit) > rows:
        raise CapacityError(
            f"the prompt has {len(tokens)} tokens, the KV cache only {rows}: shorten the prompt or"
            " raise kv_tokens"
        )
    if params.max_tokens is None:
        limit = min(limit, rows - len(tokens))
    if len(tokens) + limit > rows:
        raise CapacityError(
            f"prompt and max_tokens need {len(tokens) + limit} tokens of KV cache, which holds"
            f" {rows}: lower max_tokens or raise kv_tokens"
        )
    return limit
