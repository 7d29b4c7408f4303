"""The engine: `add` requests, `step` until there is nothing to do.

A step is plan, propose, one pass, verify, commit. Plain decoding is a draft without children, a
prefill chunk is a
chain of known tokens before the root: there is no other path. Proposing and verifying change
nothing; committing is the only mutation. Invariant between steps: the KV cache of a running slot
holds a prefix of its tokens[:-1]."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.config import parse_depth
from forerun.draft.compose import Proposers
from forerun.draft.proposer import Proposer, Reference
from forerun.engine.depth import DepthPolicy
from forerun.engine.drafting import Drafting
from forerun.engine.error_isolation import isolate_errors, together
from forerun.engine.guard import Guard, Part
from forerun.engine.observe import (
    Rows,
    drafter_of,
    kept,
    logprobs_of,
    prompt_logprobs_of,
    quick,
    round_of,
)
from forerun.engine.request import OFF, Request
from forerun.engine.scheduler import Scheduler, Work, output_limit
from forerun.errors import ConfigError, RequestError, shorten, suggest
from forerun.models.tokenizer import TextStream, Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.sampling.compiler import GrammarCompiler
from forerun.sampling.filters import SamplingState, draw_tokens, filter_logits
from forerun.sampling.matcher import Compiled
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Event, Round, Verdict
from forerun.verify import RULES, Noise, Rule, streams


def verify_drafts(
    requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor
) -> list[Verdict | None]:
    """One verdict a request, None for one that failed. logits [M, V]: the nodes of all drafts one
    after the other."""

    def decide(chosen: Sequence[int]) -> list[Verdict]:
        """Of these requests, which share a rule."""
        part = logits
        if len(chosen) < len(requests):
            rows = torch.split(logits, [len(draft) for draft in drafts])
            part = torch.cat([rows[i] for i in chosen])
        return _by(
            requests[chosen[0]].rule,
            [requests[i] for i in chosen],
            [drafts[i] for i in chosen],
            part,
        )

    verdicts: dict[int, Verdict | None] = {}
    for name in {r.rule.name for r in requests}:
        mine = [i for i, r in enumerate(requests) if r.rule.name == name]
        verdicts |= zip(mine, together(decide, mine, requests), strict=True)
    return [verdicts[i] for i in range(len(requests))]


def _by(
    rule: Rule, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor
) -> list[Verdict]:
    noises = [Noise(r.seed, len(r.tokens) - 1) for r in requests]
    states = [r.state for r in requests]
    if rule.follow:
        return rule.follow(drafts, draw_tokens(logits, drafts, states, streams(drafts, noises)))
    with torch.inference_mode():
        return rule.verify(drafts, filter_logits(logits, drafts, states), noises)


SCORE_BYTES = 32 << 20  # of the logits of one pass that are wanted for log-probabilities of prompts


class Engine:
    """Continuous batching over one target and any number of proposers. One thread at a time may use
    it."""

    def __init__(
        self,
        target: Runner,
        proposers: Mapping[str, Proposer],
        *,
        rule: str = "match",
        chunk: int = 512,
        tokenizer: Tokenizer | None = None,
        policy: DepthPolicy | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`proposers` by the name requests choose them with; without a tokenizer there is no text,
        only token ids. `clock` counts what is to be saved: seconds, or whatever else depths
        cost."""
        self.stretch = (
            math.inf
        )  # prompts may make a pass this many times as long as the decoding requests alone
        self.target, self.proposers, self.rule, self.chunk = (
            target,
            Proposers(proposers),
            RULES[rule],
            chunk,
        )
        self.tokenizer = tokenizer
        self.scheduler = self._scheduler()
        config = target.decoder.config
        self.grammars = GrammarCompiler(tokenizer, config.vocab, config.end_ids)
        self.requests: dict[int, Request] = {}
        # On CPU this thread works through every pass, so its own time is what a pass costs,
        # whatever else runs here.
        self.clock = clock or (
            time.thread_time if target.decoder.device.type == "cpu" else time.perf_counter
        )
        self.whole = (
            clock or time.perf_counter
        )  # what a step costs, waiting included: the guard judges by that
        self.set_policy(policy or DepthPolicy())
        self._ids = itertools.count()
        self._aborted: list[Event] = []

    def set_policy(self, policy: DepthPolicy) -> None:
        """Let this policy choose depths from now on, with a guard that has seen nothing yet."""
        self.policy, self.guard = policy, Guard(policy.cost)
        self.drafting = Drafting(self.target, self.proposers, policy, self.guard, self.clock)

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
        tenant: str = "",
        compiled: Compiled | None = None,
    ) -> Request:
        """Queue one request (`n` is the caller's affair); `compiled` is its grammar, where that has
        been done.

        Raises RequestError or CapacityError if it cannot serve.
        """
        if draft != OFF:
            draft = self.proposers.known(
                draft, {request.draft for request in self.requests.values()}
            )
        if rule is not None and rule not in RULES:
            raise ConfigError(f"there is no rule {shorten(rule)}: {suggest(rule, RULES)}")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this engine has none: use stop_token_ids"
            )
        config, limit = self.target.decoder.config, output_limit(self.target, tokens, params)
        draft = draft if limit else OFF
        seed = secrets.randbits(63) if params.seed is None else params.seed
        own_ends = () if params.ignore_eos else config.end_ids
        ends = frozenset((*own_ends, *params.stop_token_ids))
        grammar = self.grammars.matcher(params.grammar, ends, compiled)
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
            tenant=tenant,
            end_ids=ends,
            state=SamplingState(params, tokens, sorted(ends), grammar),
            text=TextStream(self.tokenizer, tokens, params.stop_strings)
            if self.tokenizer
            else None,
        )
        request.stats.prompt_tokens = len(tokens)
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, a paused one too; its last event comes with the next step."""
        if request.id in self.requests or request.paused:
            request.finish_reason = "abort"
            if request.paused:
                request.paused = False
            else:
                self._close(request)
            rest = ""
            with isolate_errors(request):
                rest = request.text.take(finished=True) if request.text else ""
            self._aborted.append(
                Event(request.id, [], [], [rest], finish_reason="abort", error=request.error)
            )

    def pause(self, request: Request) -> None:
        """Take a request out of the engine before its end; it holds no slot and no pages then.
        `resume` continues it with the tokens that it would have had without the pause."""
        if request.id in self.requests:
            request.stats.seconds = time.perf_counter() - request.arrived
            self.scheduler.withdraw(request)
            del self.requests[request.id]
            request.paused = True

    def resume(self, request: Request) -> None:
        """Queue a paused request again."""
        if not request.paused:
            return
        request.paused = False
        if (
            request.draft != OFF
        ):  # its proposer may have been made anew for others meanwhile, or be gone
            request.draft = self.proposers.known(
                request.draft, {other.draft for other in self.requests.values()}
            )
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        """A text of a tenant that was written elsewhere, with the same model: proposers may copy
        from it. Raises RequestError for tokens that the model has not got."""
        if not all(0 <= token < self.target.decoder.config.vocab for token in tokens):
            raise RequestError("this text has tokens that the model has not got")
        for proposer in {part for whole in self.proposers.values() for part in whole.parts}:
            proposer.remember(tenant, tokens)

    def reset(self) -> None:
        """Start over after a failure: every request is dropped without a word, every cache is
        empty."""
        self.requests.clear()
        self._aborted.clear()
        self.target.reset()
        for proposer in self.proposers.values():
            proposer.reset()
        self.scheduler = self._scheduler()

    def _scheduler(self) -> Scheduler:
        """A scheduler of no requests."""
        cache, vocab = self.target.cache, self.target.decoder.config.vocab
        scores = max(1, SCORE_BYTES // (4 * vocab))
        return Scheduler(cache, self.proposers, len(cache.length), self.chunk, scores)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.requests or self._aborted)

    def step(self) -> list[Event]:
        """One pass of the target, and what came of it. A request that fails by itself ends with an
        event that says why; what is raised concerns all of them."""
        events, self._aborted = self._aborted, []
        works = self._matched(_sound(self.scheduler.plan(self._room)))
        if works:
            events += self._pass(works)
        return events + [
            self._failed(request) for request in list(self.scheduler.running) if request.error
        ]

    def _room(self, decoding: int) -> int:
        return self.policy.room(decoding, self.stretch)

    def _matched(self, works: list[Work]) -> list[Work]:
        """The works without those whose grammar has not found yet what it allows next: they wait,
        the others go on."""
        matchers = [
            work.request.state.grammar
            for work in works
            if work.draws and work.request.state.grammar
        ]
        if not matchers:
            return works
        if self.grammars.threads is not None:
            self.grammars.threads.begin_step()
        for matcher in matchers:
            matcher.begin()
        ready = []
        for work in works:
            request = work.request
            with isolate_errors(request):
                if not work.draws or not request.state.grammar or request.state.grammar.ready():
                    ready.append(work)
                    self._end_by_grammar(request)
        return [work for work in ready if not work.request.finish_reason]

    def _end_by_grammar(self, request: Request) -> None:
        """End a request whose grammar allows nothing more, where that was not known when its last
        token came."""
        if request.produced and request.state.grammar and (reason := request.state.grammar.ending):
            request.finish_reason = reason
            self._close(request)
            rest = request.text.take(finished=True) if request.text else ""
            self._aborted.append(Event(request.id, [], [], [rest], finish_reason=reason))

    def step_or_raise(self) -> list[Event]:
        """`step` for whoever asked for every request: what fails for one of them is raised."""
        events = self.step()
        for event in events:
            if event.error:
                raise event.error
        return events

    def _pass(self, works: list[Work]) -> list[Event]:
        """Draft, run the target, verify and commit."""
        start, at = time.perf_counter(), self.whole()
        drafts = self.drafting.propose(works, [work for work in works if work.draws])
        works = [work for work in _sound(works) if not work.draws or work.request.id in drafts]
        if not works:
            return []
        drawing = [work for work in works if work.draws]
        drafted, begun = time.perf_counter(), self.clock()
        segments = [self._segment(work, drafts.get(work.request.id)) for work in works]
        wanted = sorted({b for work in works for b in self._wanted(work.request)})
        with self.drafting.overlap.during(drafts):
            forward = self.target.forward(segments, wanted, keep=False)
        logits = self._score(works, segments, forward.logits)
        trees = [drafts[w.request.id] for w in drawing]
        verdicts = verify_drafts([w.request for w in drawing], trees, logits) if drawing else []
        verified = time.perf_counter()
        events: list[Event] = []
        tokens, features = (
            0,
            {boundary: quick(states) for boundary, states in forward.features.items()},
        )
        for work, segment in zip(works, segments, strict=True):
            work.features, work.first, tokens = features, tokens, tokens + len(segment.tokens)
            if not work.draws:
                self._commit(work, range(work.count))
                self._seal(work.request)
                events += self._ended_by_reading(work.request)
        if self.grammars.threads is not None:
            # whether a request ends may depend on what its grammar allows next
            self.grammars.threads.begin_step()
        first, seconds = 0, (drafted - start, verified - drafted)
        for work, draft, verdict in zip(drawing, trees, verdicts, strict=True):
            if verdict:
                events += self._land(work, draft, verdict, Rows(logits, first, len(draft)), seconds)
            first += len(draft)
        decodes = all(
            work.draws and work.count == 1 for work in works
        )  # reading a prompt is another regime
        self.drafting.overlap.record(
            sum(len(s.tokens) for s in segments), self.clock() - begun, decodes
        )
        if decodes and not any(work.request.insists for work in works):
            said = {event.request_id: len(event.token_ids) for event in events}
            requests = [work.request for work in works]
            parts = [
                Part(r.judge, len(tree) - 1, said.get(r.id, 0), r.was_asked)
                for r, tree in zip(requests, trees, strict=True)
            ]
            self.guard.record(parts, self.whole() - at, self.drafting.seconds)
        return events

    def _segment(self, work: Work, draft: Draft | None) -> Segment:
        """The known tokens to read, and the draft behind them: its root is the last of them."""
        request, count = work.request, work.count
        at = self.target.cache.length[request.slot]
        tokens, parents = request.tokens[at : at + count], list(range(-1, count - 1))
        scored = [position - at for position in work.scored]
        if draft is None:
            return Segment(request.slot, tokens, parents, scored)
        parents += [count - 1 + parent for parent in draft.parents[1:]]
        want = [*scored, *range(count - 1, count - 1 + len(draft))]
        return Segment(request.slot, tokens + draft.tokens[1:], parents, want)

    def _score(self, works: Sequence[Work], segments: Sequence[Segment], logits: Tensor) -> Tensor:
        """Keep the log-probabilities of prompt tokens that were asked for. logits [M, V], and those
        of drafts alone"""
        if not any(work.scored for work in works):
            return logits
        drafted: list[int] = []
        first = 0
        for work, segment in zip(works, segments, strict=True):
            request, last = work.request, first + len(work.scored)
            if work.scored:
                tokens = request.tokens[work.scored.start + 1 : work.scored.stop + 1]
                with isolate_errors(request):
                    top = request.params.prompt_logprobs or 0
                    request.prompt_logprobs += prompt_logprobs_of(logits[first:last], tokens, top)
            first += len(segment.want)
            drafted += range(last, first)
        return logits[drafted]

    def _ended_by_reading(self, request: Request) -> list[Event]:
        """The last event of a request that generates nothing, once its prompt is read."""
        if (
            request.limit
            or request.error
            or self.target.cache.length[request.slot] < len(request.tokens)
        ):
            return []
        request.finish_reason = "length"
        request.stats.first_token_seconds = time.perf_counter() - request.arrived
        self._close(request)
        return [
            Event(
                request.id,
                [],
                [],
                [],
                finish_reason="length",
                prompt_logprobs=request.prompt_logprobs,
            )
        ]

    def _land(
        self, work: Work, draft: Draft, verdict: Verdict, rows: Rows, seconds: tuple[float, float]
    ) -> list[Event]:
        """Commit a verdict and say what it says; nothing where that fails. `seconds` of drafting
        and of the rest."""
        request, event = work.request, Event(work.request.id, [], [], [])
        with isolate_errors(request):
            event.round = self._trace(request, draft, verdict, rows, seconds)
        if request.error:
            return []
        read = work.count - 1  # known tokens before the root
        self._commit(work, [*range(read), *(read + node for node in verdict.path)])
        if request.stats.steps == 0:
            request.stats.first_token_seconds = time.perf_counter() - request.arrived
        request.stats.count(draft, verdict, *seconds)
        self._learn(request, draft, verdict)
        with isolate_errors(request):
            self._teach(request, draft, rows)
            self._say(request, draft, verdict, rows, event)
        if request.error:
            return []
        if request.finish_reason:
            self._close(request)
        else:
            self._seal(request)
            self.target.cache.pages.shrink(request.slot, len(request.tokens))
        return [event]

    def _say(
        self, request: Request, draft: Draft, verdict: Verdict, rows: Rows, event: Event
    ) -> None:
        """Append a verdict's tokens up to the one that ends the request, and write them into its
        event."""
        if not request.produced and request.params.prompt_logprobs is not None:
            event.prompt_logprobs = request.prompt_logprobs
        for token in verdict.tokens:
            event.pieces.append(request.append(token))
            if request.finish_reason:
                break
        taken = len(event.pieces)
        event.token_ids, event.finish_reason = verdict.tokens[:taken], request.finish_reason
        event.sources = [*(draft.sources[node] for node in verdict.path[1:]), ""][:taken]
        if request.params.logprobs is not None:
            event.logprobs = logprobs_of(
                rows.taken[verdict.path[:taken]], event.token_ids, request.params.logprobs
            )

    def _failed(self, request: Request) -> Event:
        """End a request by its own error."""
        request.finish_reason = "abort"
        self._close(request)
        return Event(request.id, [], [], [], finish_reason="abort", error=request.error)

    def _commit(self, work: Work, path: Sequence[int]) -> None:
        """Keep the rows of `path`, and show its hidden states to the proposer that wants them."""
        request, cache = work.request, self.target.cache
        start, wanted = cache.length[request.slot], self._wanted(request)
        cache.commit(request.slot, path)
        if wanted:
            seen = {
                boundary: kept(work.features[boundary], work.first, path) for boundary in wanted
            }
            with isolate_errors(request):
                self.proposers[request.draft].observe(request.slot, start, seen)

    def _wanted(self, request: Request) -> tuple[int, ...]:
        """The boundaries whose hidden states this request's proposer wants."""
        return self.proposers[request.draft].aux_hidden_layers if request.has_proposer else ()

    def _learn(self, request: Request, verified: Draft, verdict: Verdict) -> None:
        """What the depth policy learns from a verdict, of all that was drafted, verified or not, as
        far as the target
        has spoken: of copies that counts for their kind of match, and for who copied what was
            verified."""
        for offered in request.offered:
            draft = offered.draft
            path = draft.match_tokens(verdict.tokens)
            accepted, is_open = len(path) - 1, len(path) > len(verdict.tokens)
            reach = accepted if is_open else max(draft.depths())
            told = {offered.kind or offered.name: reach}
            if offered.kind:
                told[offered.name] = min(len(verified.match_tokens(draft.tokens[1:])) - 1, reach)
            for source, deep in told.items():
                self.policy.record_verdict(
                    source, request.acceptance[source], deep, min(accepted, deep)
                )
            if draft.confidence_bins:
                self.policy.survival(offered.name, request.params.greedy).add(draft, path, is_open)

    def _teach(self, request: Request, draft: Draft, rows: Rows) -> None:
        """Show the target's laws to the proposer that wants them."""
        if not request.has_proposer or not self.proposers[request.draft].learns:
            return
        first = request.tokens[-2] if len(request.tokens) > 1 else -1
        before = [first, *(draft.tokens[parent] for parent in draft.parents[1:])]
        self.proposers[request.draft].learn(request.slot, before, draft.tokens, rows.taken)

    def _trace(
        self,
        request: Request,
        draft: Draft,
        verdict: Verdict,
        rows: Rows,
        seconds: tuple[float, float],
    ) -> Round | None:
        if not request.trace:
            return None
        name = drafter_of(request, draft)
        rate = self.policy.rate(name, request.acceptance[name])
        return round_of(request, draft, verdict, rows.taken, rate, seconds)

    def _seal(self, request: Request) -> None:
        cache = self.target.cache  # a verdict cut short by a stop has committed more than was said
        cache.pages.seal(
            request.slot, request.tokens, min(cache.length[request.slot], len(request.tokens))
        )

    def _close(self, request: Request) -> None:
        request.stats.seconds = time.perf_counter() - request.arrived
        if request.slot >= 0:
            self._seal(request)
        self.scheduler.finish(request)
        del self.requests[request.id]


def _sound(works: Sequence[Work]) -> list[Work]:
    """The work of requests that have not failed."""
    return [work for work in works if not work.request.error]
