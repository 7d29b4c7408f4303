"""The engine: `add` requests, `step` until nothing is left.

A step is plan, draft, forward, verify, commit. Plain decoding is a draft without children, and a
prefill chunk is a chain of known tokens before the root: there is no other path. Drafting and
verifying change nothing; committing is the only mutation. Between steps the KV cache of a running
slot holds a prefix of its request's tokens[:-1].
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.config import parse_depth
from forerun.draft.compose import Proposers
from forerun.draft.proposer import Proposer, Reference
from forerun.engine.depth import DepthPolicy
from forerun.engine.device_steps import new_multi_step
from forerun.engine.drafting import Drafting
from forerun.engine.error_isolation import isolate_errors, run_isolated
from forerun.engine.guard import Guard
from forerun.engine.observe import as_fast_array, logprobs_of, prompt_logprobs_of, trace_round
from forerun.engine.request import OFF, Request, ScheduledRequest
from forerun.engine.scheduler import Scheduler, output_limit
from forerun.errors import ConfigError, RequestError, shorten, suggest
from forerun.models.tokenizer import TextStream, Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.sampling.compiler import GrammarCompiler
from forerun.sampling.filters import SamplingState, draw_tokens, filter_logits
from forerun.sampling.matcher import Compiled
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Event, Forward, States, Verdict
from forerun.verify import RULES, Noise, Rule, streams

SCORE_BYTES = 32 << 20  # of the logits of one pass that are wanted for log-probabilities of prompts


@dataclass(slots=True)
class _Timing:
    """Wall-clock seconds of a step's phases."""

    began: float
    drafted: float = 0.0
    verified: float = 0.0

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of drafting, and of the forward pass with verification."""
        return self.drafted - self.began, self.verified - self.drafted


@dataclass(frozen=True, slots=True)
class _Rows:
    """A draft's rows of a pass's logits [M, V], taken only where something looks at them."""

    all_logits: Tensor
    first: int
    last: int

    @property
    def logits(self) -> Tensor:
        """The logits [N, V] of the draft's nodes."""
        return self.all_logits[self.first : self.last]


class Engine:
    """Continuous batching over one target and any number of proposers.

    One thread at a time may use it.

    Attributes:
        requests: all requests that wait or run, by id.
        drafting: everything about speculation: proposers, depth policy, guard.
        multi_step: runs several rounds of requests at once, if there is time for them.
        stretch: a pass that reads prompts may take this many times as long as one of the decoding
            requests alone.
    """

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
        multi_step: float = 0.0,
    ) -> None:
        """`proposers` by the name that requests choose them with; without a tokenizer there are
        only token ids. `clock` counts what speculation should save: seconds by default. With
        `multi_step` a step may run several rounds, for about so many seconds."""
        self.target = target
        self.proposers = Proposers(proposers)
        self.rule = RULES[rule]
        self.chunk = chunk
        self.tokenizer = tokenizer
        self.stretch = math.inf
        self.requests: dict[int, Request] = {}
        config = target.decoder.config
        self.grammars = GrammarCompiler(tokenizer, config.vocab, config.end_ids)
        on_cpu = target.decoder.device.type == "cpu"
        self.drafting = Drafting(
            target,
            self.proposers,
            policy or DepthPolicy(),
            # On CPU this thread works through every pass, so its own time is what a pass costs,
            # whatever else the machine does.
            clock=clock or (time.thread_time if on_cpu else time.perf_counter),
            wall_clock=clock or time.perf_counter,
        )
        self.multi_step = new_multi_step(target, self.drafting, multi_step)
        self.scheduler = self._new_scheduler()
        self._ids = itertools.count()
        self._pending: list[Event] = []  # last events of requests that ended between steps

    @property
    def policy(self) -> DepthPolicy:
        """The depth policy."""
        return self.drafting.policy

    @property
    def guard(self) -> Guard:
        """The guard that disables speculation while it is slower than plain decoding."""
        return self.drafting.guard

    @property
    def busy(self) -> bool:
        """True if a step would do anything."""
        return bool(self.requests or self._pending)

    # Requests

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
        client: str = "",
        compiled: Compiled | None = None,
    ) -> Request:
        """Queue one request; `compiled` is its grammar, if that was compiled already.

        `client` may hold half of the slots while requests of other clients wait or run.

        `params.n` is the caller's affair.

        Raises:
            RequestError, CapacityError: the request cannot be served.
            ConfigError: the draft, depth or rule does not exist.
        """
        if draft != OFF:
            draft = self._known_draft(draft)
        if rule is not None and rule not in RULES:
            raise ConfigError(f"there is no rule {shorten(rule)}: {suggest(rule, RULES)}")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this engine has none: use stop_token_ids"
            )
        limit = output_limit(self.target, tokens, params)
        end_ids = () if params.ignore_eos else self.target.decoder.config.end_ids
        ends = frozenset((*end_ids, *params.stop_token_ids))
        grammar = self.grammars.matcher(params.grammar, ends, compiled)
        text = TextStream(self.tokenizer, tokens, params.stop_strings) if self.tokenizer else None
        request = Request(
            id=next(self._ids),
            tokens=list(tokens),
            prompt_length=len(tokens),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            limit=limit,
            draft=draft if limit else OFF,
            depth=parse_depth(depth),
            rule=RULES[rule] if rule else self.rule,
            references=references,
            trace=trace,
            tenant=tenant,
            client=client,
            end_ids=ends,
            state=SamplingState(params, tokens, sorted(ends), grammar),
            text=text,
        )
        request.stats.prompt_tokens = len(tokens)
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, also a paused one; its last event comes with the next step."""
        if request.id not in self.requests and not request.paused:
            return
        request.finish_reason = "abort"
        if request.paused:
            request.paused = False
        else:
            self._close(request)
        rest = ""
        with isolate_errors(request):
            rest = request.take_text()
        self._pending.append(_last_event(request, rest))

    def pause(self, request: Request) -> None:
        """Take a request out of the engine; it holds no slot and no pages then.

        `resume` continues it with the tokens that it would have had without the pause.
        """
        if request.id in self.requests:
            request.stats.seconds = time.perf_counter() - request.arrived
            self.scheduler.remove(request, finished=False)
            del self.requests[request.id]
            request.paused = True

    def resume(self, request: Request) -> None:
        """Queue a paused request again."""
        if not request.paused:
            return
        request.paused = False
        if request.speculates:
            # Its proposer may have been replaced for other requests since.
            request.draft = self._known_draft(request.draft)
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        """Let proposers copy from a tenant's text that the same model wrote elsewhere.

        Raises:
            RequestError: a token is not in the vocabulary.
        """
        if not all(0 <= token < self.target.decoder.config.vocab for token in tokens):
            raise RequestError("this text has tokens outside the model's vocabulary")
        for part in {part for proposer in self.proposers.values() for part in proposer.parts}:
            part.remember(tenant, tokens)

    def set_policy(self, policy: DepthPolicy) -> None:
        """Let `policy` choose depths from now on, with a new guard."""
        self.drafting.set_policy(policy)

    def reset(self) -> None:
        """Start over after a failure: drop all requests without events, empty all caches."""
        self.requests.clear()
        self.drafting.states.clear()
        self._pending.clear()
        self.target.reset()
        for proposer in self.proposers.values():
            proposer.reset()
        self.scheduler = self._new_scheduler()

    def _known_draft(self, draft: str) -> str:
        """Return the name under which a draft's proposer is kept here. Raises ConfigError."""
        return self.proposers.known(draft, {request.draft for request in self.requests.values()})

    def _new_scheduler(self) -> Scheduler:
        cache, vocab = self.target.cache, self.target.decoder.config.vocab
        max_scored = max(1, SCORE_BYTES // (4 * vocab))
        return Scheduler(cache, self.drafting, len(cache.length), self.chunk, max_scored)

    # One step

    def step(self) -> list[Event]:
        """Run one step and return its events.

        A request that fails by itself ends with an event that says why. An exception concerns all
        requests: call `reset` then.
        """
        timing = _Timing(time.perf_counter())
        batch = self._plan()
        is_full_batch = len(batch) == len(self.scheduler.running)
        room = self.multi_step.room(batch) if is_full_batch else 0
        has_plain_rounds = is_full_batch and not room and self.multi_step.may_run
        batch = self._draft(batch, room, has_plain_rounds)
        events, self._pending = self._pending, []
        several = self.multi_step.run(batch) if batch and is_full_batch else []
        if several:
            for scheduled, event in zip(batch, several, strict=True):
                events += self._end_rounds(scheduled.request, event)
        elif batch:
            timing.drafted = time.perf_counter()
            forward = self._forward(batch)
            logits = self._verify(batch, forward)
            timing.verified = time.perf_counter()
            events += self._commit(batch, forward, logits, timing)
        failed = [request for request in self.scheduler.running if request.error]
        return events + [self._fail(request) for request in failed]

    def step_or_raise(self) -> list[Event]:
        """Run `step`, but raise the error of a request that failed."""
        events = self.step()
        for event in events:
            if event.error:
                raise event.error
        return events

    def _plan(self) -> list[ScheduledRequest]:
        """Choose how many tokens each request processes in this step.

        Requests whose grammar has not computed yet what it allows next wait for a later step.
        """
        batch = self.scheduler.plan(lambda decoding: self.policy.room(decoding, self.stretch))
        batch = [scheduled for scheduled in batch if not scheduled.request.error]
        generating = [s.request.state.grammar for s in batch if s.generates]
        grammars = [grammar for grammar in generating if grammar]
        if not grammars:
            return batch
        # A set that takes long delays one step of the others, and not each.
        others = len(batch) > len(grammars) or not all(grammar.late for grammar in grammars)
        self._begin_grammar_step(waits_again=not others)
        for grammar in grammars:
            grammar.begin()
        return [scheduled for scheduled in batch if self._is_ready(scheduled)]

    def _begin_grammar_step(self, waits_again: bool) -> None:
        if self.grammars.threads is not None:
            self.grammars.threads.begin_step(waits_again)

    def _is_ready(self, scheduled: ScheduledRequest) -> bool:
        """Return True if the request takes part in this step; end it if its grammar is complete."""
        request, grammar = scheduled.request, scheduled.request.state.grammar
        if not scheduled.generates or not grammar:
            return True
        with isolate_errors(request):
            if not grammar.ready():
                return False
            if request.produced and grammar.ending:
                # That was not known yet when the last token was committed.
                request.finish_reason = grammar.ending
                self._close(request)
                self._pending.append(_last_event(request, request.take_text()))
                return False
            return True
        return False

    def _draft(
        self, batch: list[ScheduledRequest], room: int, has_plain_rounds: bool
    ) -> list[ScheduledRequest]:
        """Draft for the generating requests; return the requests that stay in the step. `room` is
        that of `MultiStep.room`; the last argument as in `BatchState`."""
        if not batch:
            return []
        self.drafting.draft(batch, room, has_plain_rounds)
        return [
            scheduled
            for scheduled in batch
            if not scheduled.request.error
            and (scheduled.draft is not None or not scheduled.generates)
        ]

    def _forward(self, batch: Sequence[ScheduledRequest]) -> Forward:
        """Run the target over all known and drafted tokens of the batch, one flat pass."""
        row = 0
        for scheduled in batch:
            scheduled.segment = self._segment(scheduled)
            scheduled.first_row = row
            row += len(scheduled.segment.tokens)
        segments = [s.segment for s in batch if s.segment]
        layers = sorted({layer for s in batch for layer in self.drafting.hidden_layers(s.request)})
        with self.drafting.during_forward(batch):
            return self.target.forward(segments, layers, keep=False)

    def _segment(self, scheduled: ScheduledRequest) -> Segment:
        """Return the known tokens to read and the draft behind them, whose root is the last."""
        request, count, draft = scheduled.request, scheduled.count, scheduled.draft
        start = self.target.cache.length[request.slot]
        tokens = request.tokens[start : start + count]
        parents = list(range(-1, count - 1))
        scored = [position - start for position in scheduled.scored]
        if draft is None:
            return Segment(request.slot, tokens, parents, scored, known=count)
        root = count - 1
        parents += [root + parent for parent in draft.parents[1:]]
        wanted = [*scored, *range(root, root + len(draft))]
        return Segment(request.slot, tokens + draft.tokens[1:], parents, wanted, known=root)

    def _verify(self, batch: Sequence[ScheduledRequest], forward: Forward) -> Tensor:
        """Set the verdicts of the drafts; return the logits [M, V] of all their nodes."""
        logits = self._score_prompts(batch, forward.logits)
        generating = [scheduled for scheduled in batch if scheduled.draft is not None]
        if generating:
            drafts = [scheduled.draft for scheduled in generating if scheduled.draft]
            verdicts = verify_drafts([s.request for s in generating], drafts, logits)
            for scheduled, verdict in zip(generating, verdicts, strict=True):
                scheduled.verdict = verdict
        return logits

    def _score_prompts(self, batch: Sequence[ScheduledRequest], logits: Tensor) -> Tensor:
        """Keep the log-probabilities of prompt tokens that were asked for.

        logits [M, V]; returns those of drafts alone.
        """
        if not any(scheduled.scored for scheduled in batch):
            return logits
        draft_rows: list[int] = []
        row = 0
        for scheduled in batch:
            assert scheduled.segment
            request, scored = scheduled.request, scheduled.scored
            first, row = row, row + len(scheduled.segment.want)
            draft_rows += range(first + len(scored), row)
            if scored:
                tokens = request.tokens[scored.start + 1 : scored.stop + 1]
                rows = logits[first : first + len(scored)]
                with isolate_errors(request):
                    top = request.params.prompt_logprobs or 0
                    request.prompt_logprobs += prompt_logprobs_of(rows, tokens, top)
        return logits[draft_rows]

    def _commit(
        self,
        batch: Sequence[ScheduledRequest],
        forward: Forward,
        logits: Tensor,
        timing: _Timing,
    ) -> list[Event]:
        """Commit processed and accepted tokens; return the emitted. logits [M, V] of drafts."""
        states = {layer: as_fast_array(found) for layer, found in forward.features.items()}
        events: list[Event] = []
        for scheduled in batch:
            if scheduled.draft is None:
                self._commit_rows(scheduled, range(scheduled.count), states)
                self._seal(scheduled.request)
                events += self._end_after_prompt(scheduled.request)
        # whether a request ends may depend on what its grammar allows
        self._begin_grammar_step(waits_again=False)
        row = 0
        for scheduled in batch:
            if scheduled.draft is None:
                continue
            first, row = row, row + len(scheduled.draft)
            if scheduled.verdict is not None:
                rows = _Rows(logits, first, row)
                events += self._emit(
                    scheduled, scheduled.draft, scheduled.verdict, rows, states, timing
                )
        emitted = {event.request_id: len(event.token_ids) for event in events}
        if not forward.is_cold:
            self.drafting.record_step(batch, emitted, forward.experts)
        return events

    def _commit_rows(
        self, scheduled: ScheduledRequest, path: Sequence[int], states: Mapping[int, States]
    ) -> None:
        """Keep the rows `path` of a segment; show their hidden states {layer: [T, H]} to the
        proposer."""
        cache, slot = self.target.cache, scheduled.request.slot
        start = cache.length[slot]
        cache.commit(slot, path)
        self.drafting.observe(scheduled, start, states, path)

    def _emit(
        self,
        scheduled: ScheduledRequest,
        draft: Draft,
        verdict: Verdict,
        rows: _Rows,
        states: Mapping[int, States],
        timing: _Timing,
    ) -> list[Event]:
        """Commit a verdict and return its event; nothing if that fails."""
        request, event = scheduled.request, Event(scheduled.request.id, [], [], [])
        if request.trace:
            with isolate_errors(request):
                event.round = trace_round(
                    request,
                    draft,
                    verdict,
                    rows.logits,
                    allowed_depth=self.drafting.state(request).allowed_depth,
                    acceptance_rate=self.drafting.acceptance_of(request, draft),
                    seconds=timing.seconds,
                )
        if request.error:
            return []
        root = scheduled.count - 1
        self._commit_rows(scheduled, [*range(root), *(root + n for n in verdict.path)], states)
        if request.stats.steps == 0:
            request.stats.first_token_seconds = time.perf_counter() - request.arrived
        request.stats.count(draft, verdict, *timing.seconds)
        self.drafting.record_verdict(request, draft, verdict)
        with isolate_errors(request):
            self.drafting.observe_logits(request, draft, lambda: rows.logits)
            self._append(request, draft, verdict, rows, event)
        return self._end_rounds(request, event)

    def _end_rounds(self, request: Request, event: Event) -> list[Event]:
        """Give back what a request no longer needs after it appended tokens; return its event."""
        if request.error:
            return []
        if request.finish_reason:
            self._close(request)
        else:
            self._seal(request)
            self.target.cache.pages.shrink(request.slot, len(request.tokens))
        return [event]

    def _append(
        self, request: Request, draft: Draft, verdict: Verdict, rows: _Rows, event: Event
    ) -> None:
        """Append a verdict's tokens up to the one that ends the request; fill in the event."""
        if not request.produced and request.params.prompt_logprobs is not None:
            event.prompt_logprobs = request.prompt_logprobs
        for token in verdict.tokens:
            event.pieces.append(request.append(token))
            if request.finish_reason:
                break
        taken = len(event.pieces)
        event.token_ids = verdict.tokens[:taken]
        event.finish_reason = request.finish_reason
        event.sources = [*(draft.sources[node] for node in verdict.path[1:]), ""][:taken]
        if request.params.logprobs is not None:
            logits = rows.logits[verdict.path[:taken]]
            event.logprobs = logprobs_of(logits, event.token_ids, request.params.logprobs)

    def _end_after_prompt(self, request: Request) -> list[Event]:
        """Return the last event of a request that generates nothing, once its prompt is read."""
        is_read = self.target.cache.length[request.slot] >= len(request.tokens)
        if request.limit or request.error or not is_read:
            return []
        request.finish_reason = "length"
        request.stats.first_token_seconds = time.perf_counter() - request.arrived
        self._close(request)
        event = Event(request.id, [], [], [], finish_reason="length")
        event.prompt_logprobs = request.prompt_logprobs
        return [event]

    def _fail(self, request: Request) -> Event:
        """End a request by its own error."""
        request.finish_reason = "abort"
        self._close(request)
        return Event(request.id, [], [], [], finish_reason="abort", error=request.error)

    def _seal(self, request: Request) -> None:
        """Let other requests reuse the committed pages."""
        cache = self.target.cache
        # A verdict that was cut short by a stop has committed more rows than tokens.
        committed = min(cache.length[request.slot], len(request.tokens))
        cache.pages.seal(request.slot, request.tokens, committed)

    def _close(self, request: Request) -> None:
        """Release everything that a request holds."""
        request.stats.seconds = time.perf_counter() - request.arrived
        if request.slot >= 0:
            self._seal(request)
        self.scheduler.remove(request, finished=request.error is None)
        del self.requests[request.id]


def _last_event(request: Request, rest: str) -> Event:
    """Return the event of a request that ended between steps, with the text that is left."""
    event = Event(request.id, [], [], [rest], finish_reason=request.finish_reason)
    event.error = request.error
    return event


def verify_drafts(
    requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor
) -> list[Verdict | None]:
    """Return one verdict per request, None for requests that failed.

    logits [M, V]: the nodes of all drafts, one draft after the other.
    """

    def verify(chosen: Sequence[int]) -> list[Verdict]:
        """Verify the drafts of requests that share a rule."""
        rows = logits
        if len(chosen) < len(requests):
            split = torch.split(logits, [len(draft) for draft in drafts])
            rows = torch.cat([split[i] for i in chosen])
        rule = requests[chosen[0]].rule
        return _verify_by(rule, [requests[i] for i in chosen], [drafts[i] for i in chosen], rows)

    verdicts: list[Verdict | None] = [None] * len(requests)
    for name in {request.rule.name for request in requests}:
        chosen = [i for i, request in enumerate(requests) if request.rule.name == name]
        for i, verdict in zip(chosen, run_isolated(verify, chosen, requests), strict=True):
            verdicts[i] = verdict
    return verdicts


def _verify_by(
    rule: Rule, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor
) -> list[Verdict]:
    noises = [Noise(request.seed, len(request.tokens) - 1) for request in requests]
    states = [request.state for request in requests]
    if rule.follow:
        return rule.follow(drafts, draw_tokens(logits, drafts, states, streams(drafts, noises)))
    with torch.inference_mode():
        return rule.verify(drafts, filter_logits(logits, drafts, states), noises)
