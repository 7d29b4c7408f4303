"""The engine: `add` requests, `step` until there is nothing to do.

A step is plan, propose, one pass, verify, commit. Plain decoding is a draft without children, a prefill chunk is a
chain of known tokens before the root: there is no other path. Proposing and verifying change nothing; committing is
the only mutation. Invariant between steps: the KV cache of a running slot holds a prefix of its tokens[:-1].
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from forerun.cache.attention import Segment
from forerun.config import parse_depth
from forerun.draft.base import Proposer, Reference
from forerun.engine.admission import output_limit
from forerun.engine.depth import Auto, DepthPolicy
from forerun.engine.drafting import OFF, Drafting
from forerun.engine.observe import kept, logprobs_of, round_of
from forerun.engine.request import Request
from forerun.engine.scheduler import Scheduler, Work
from forerun.engine.verdicts import verdicts_of
from forerun.errors import ConfigError, RequestError, nearest
from forerun.models.text import TextStream, Tokenizer
from forerun.runner import Runner
from forerun.sampling.filters import SamplingState
from forerun.sampling.grammar import GrammarCompiler
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Event, Round, Verdict
from forerun.verify import RULES


class Engine:
    """Continuous batching over one target and any number of proposers. One thread at a time may use it."""

    def __init__(
        self,
        target: Runner,
        proposers: Mapping[str, Proposer],
        *,
        rule: str = "match",
        chunk: int = 512,
        tokenizer: Tokenizer | None = None,
        policy: DepthPolicy | None = None,
    ) -> None:
        """`proposers` by the name requests choose them with; without a tokenizer there is no text, only token ids."""
        self.target, self.proposers, self.rule, self.chunk = target, proposers, RULES[rule], chunk
        self.tokenizer, self.policy = tokenizer, policy or Auto()
        self.scheduler = Scheduler(target.cache, proposers, len(target.cache.length), chunk)
        config = target.decoder.config
        self.grammars = GrammarCompiler(tokenizer, config.vocab, config.end_ids)
        self.requests: dict[int, Request] = {}
        # On CPU this thread works through every pass, so its own time is what a pass costs, whatever else runs here.
        self.clock = time.thread_time if target.decoder.device.type == "cpu" else time.perf_counter
        self.drafting = Drafting(target, proposers, self.policy, self.clock)
        self._ids = itertools.count()
        self._aborted: list[Event] = []

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        draft: str = OFF,
        depth: int | str = "auto",
        rule: str | None = None,
        references: Sequence[Reference] = (),
        trace: bool = False,
    ) -> Request:
        """Queue one request (`n` is the caller's affair). Raises RequestError or CapacityError if it cannot serve."""
        if draft != OFF and draft not in self.proposers:
            raise ConfigError(f"this engine has no draft {draft!r}: {nearest(draft, [OFF, *self.proposers])}")
        if rule is not None and rule not in RULES:
            raise ConfigError(f"there is no rule {rule!r}: {nearest(rule, RULES)}")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        config, limit = self.target.decoder.config, output_limit(self.target, tokens, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        own_ends = () if params.ignore_eos else config.end_ids
        ends = frozenset((*own_ends, *params.stop_token_ids))
        grammar = self.grammars.matcher(params.grammar, ends)
        request = Request(
            id=next(self._ids),
            tokens=list(tokens),
            prompt_length=len(tokens),
            params=params,
            seed=seed,
            limit=limit,
            draft=draft,
            depth=parse_depth(depth),
            rule=RULES[rule] if rule else self.rule,
            references=references,
            trace=trace,
            end_ids=ends,
            state=SamplingState(params, tokens, sorted(ends), grammar),
            text=TextStream(self.tokenizer, tokens, params.stop_strings) if self.tokenizer else None,
        )
        request.stats.prompt_tokens = len(tokens)
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its last event comes with the next step."""
        if request.id in self.requests:
            request.finish_reason = "abort"
            self._close(request)
            rest = request.text.take(finished=True) if request.text else ""
            self._aborted.append(Event(request.id, [], [], [rest], finish_reason="abort"))

    def reset(self) -> None:
        """Start over after a failure: every request is dropped without a word, every cache is empty."""
        self.requests.clear()
        self._aborted.clear()
        self.target.reset()
        for proposer in self.proposers.values():
            proposer.reset()
        self.scheduler = Scheduler(self.target.cache, self.proposers, len(self.target.cache.length), self.chunk)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.requests or self._aborted)

    def step(self) -> list[Event]:
        """One pass of the target, and what came of it."""
        events, self._aborted = self._aborted, []
        works = self.scheduler.plan()
        if not works:
            return events
        start = time.perf_counter()
        drawing = [work for work in works if work.draws]
        drafts = self.drafting.propose(works, drawing)
        drafted, begun = time.perf_counter(), self.clock()
        segments = [self._segment(work, drafts.get(work.request.id)) for work in works]
        forward = self.target.forward(segments, sorted({b for work in works for b in self._wanted(work.request)}))
        logits = forward.logits
        trees = [drafts[w.request.id] for w in drawing]
        verdicts = verdicts_of([w.request for w in drawing], trees, logits) if drawing else []
        verified = time.perf_counter()
        if all(work.draws and work.count == 1 for work in works):  # reading a prompt is another regime
            self.policy.record_pass(sum(len(s.tokens) for s in segments), self.clock() - begun)
        tokens = 0
        for work, segment in zip(works, segments, strict=True):
            work.features, work.first, tokens = forward.features, tokens, tokens + len(segment.tokens)
            if not work.draws:
                self._commit(work, range(work.count))
                self._seal(work.request)
        first = 0
        for work, draft, verdict in zip(drawing, trees, verdicts, strict=True):
            stats = work.request.stats
            stats.draft_seconds += drafted - start
            stats.verify_seconds += verified - drafted
            rows = logits[first : first + len(draft)]
            round_ = self._trace(work.request, draft, verdict, rows)
            events.append(self._land(work, draft, verdict, rows))
            if round_:
                round_.draft_seconds, round_.verify_seconds = drafted - start, verified - drafted
                events[-1].round = round_
            first += len(draft)
        return events

    def _segment(self, work: Work, draft: Draft | None) -> Segment:
        """The known tokens to read, and the draft behind them: its root is the last of them."""
        request, count = work.request, work.count
        at = self.target.cache.length[request.slot]
        tokens, parents = request.tokens[at : at + count], list(range(-1, count - 1))
        if draft is None:
            return Segment(request.slot, tokens, parents, [])
        parents += [count - 1 + parent for parent in draft.parents[1:]]
        want = list(range(count - 1, count - 1 + len(draft)))
        return Segment(request.slot, tokens + draft.tokens[1:], parents, want)

    def _land(self, work: Work, draft: Draft, verdict: Verdict, logits: Tensor) -> Event:
        """Commit a verdict: keep the path's keys, append its tokens up to the one that ends the request."""
        request, path = work.request, verdict.path
        read = work.count - 1  # known tokens before the root
        self._commit(work, [*range(read), *(read + node for node in path)])
        if request.stats.steps == 0:
            request.stats.first_token_seconds = time.perf_counter() - request.arrived
        request.stats.steps += 1
        self._count(request, draft, verdict)
        pieces: list[str] = []
        for token in verdict.tokens:
            pieces.append(request.append(token))
            if request.finish_reason:
                break
        taken = len(pieces)
        sources = [*(draft.sources[node] for node in path[1:]), ""][:taken]
        event = Event(request.id, verdict.tokens[:taken], sources, pieces, finish_reason=request.finish_reason)
        if request.params.logprobs is not None:
            event.logprobs = logprobs_of(logits[path[:taken]], event.token_ids, request.params.logprobs)
        if request.finish_reason:
            self._close(request)
        else:
            self._seal(request)
            self.target.cache.pages.shrink(request.slot, len(request.tokens))
        return event

    def _commit(self, work: Work, path: Sequence[int]) -> None:
        """Keep the rows of `path`, and show its hidden states to the proposer that wants them."""
        request, cache = work.request, self.target.cache
        start, wanted = cache.length[request.slot], self._wanted(request)
        cache.commit(request.slot, path)
        if wanted:
            seen = {boundary: kept(work.features[boundary], work.first, path) for boundary in wanted}
            self.proposers[request.draft].observe(request.slot, start, seen)

    def _wanted(self, request: Request) -> tuple[int, ...]:
        """The boundaries whose hidden states this request's proposer wants."""
        return () if request.draft == OFF else self.proposers[request.draft].boundaries

    def _count(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        """Statistics of one verdict, and what the depth policy learns from it."""
        kept = set(verdict.path)
        for node in range(1, len(draft)):
            source = request.stats.by_source[draft.sources[node]]
            source.drafted += 1
            source.accepted += node in kept
        request.stats.rounds.append((len(draft) - 1, len(verdict.path) - 1))
        request.stats.depths.append(max(draft.depths()))
        request.stats.drafted += len(draft) - 1
        request.stats.accepted += len(verdict.path) - 1
        if request.reach:
            acceptance = request.acceptance[request.drafter]
            self.policy.record_verdict(request.drafter, acceptance, request.reach, len(verdict.path) - 1)

    def _trace(self, request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> Round | None:
        if not request.trace:
            return None
        name = request.drafter or request.draft
        return round_of(request, draft, verdict, logits, self.policy.rate(name, request.acceptance[name]))

    def _seal(self, request: Request) -> None:
        cache = self.target.cache  # a verdict cut short by a stop has committed more than was said
        cache.pages.seal(request.slot, request.tokens, min(cache.length[request.slot], len(request.tokens)))

    def _close(self, request: Request) -> None:
        request.stats.seconds = time.perf_counter() - request.arrived
        if request.slot >= 0:
            self._seal(request)
        self.scheduler.finish(request)
        del self.requests[request.id]
