"""Overlapped drafting, `ahead(a)`: while the target verifies a draft, a draft model drafts on for
the likeliest outcomes (speculative speculative decoding, Kumar, Dao and May, 2603.03251).

An outcome of verification is the node where the accepted path ends and the target's token behind
it. In a thread of its own the model reads the draft, and drafts behind the likeliest outcomes of
every request, all in one tree over rows of its cache that are never committed. If one of them comes
true, the next draft is there, or begun; if none does, that request is drafted for anew. The draft
is the same in both cases: it depends on the text and on the noise, which is a function of
positions. So it is as exact as the model under every rule, and does not depend on time.

Under a coupled rule the noise that the target will draw with is known, so outcomes are ranked with
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Event

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.draft.cascade import Cascade
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import CompositeProposer, DraftRequest, Reference
from forerun.draft.tree import Tree, grow
from forerun.draft_spec import AHEAD
from forerun.kernels import native
from forerun.kernels.draw import sample_tokens, shape_scores
from forerun.sampling.params import GREEDY, Sampling
from forerun.types import Draft

MAX_OUTCOMES = 8  # drafted for in a step, over all requests; one per request at least
NUM_RANKS = 6  # candidates for the token at the end of a path
MAX_LAG = 64  # committed tokens that the model may still have to read
ACCEPTED_RATE = 0.7  # assumed probability that a drafted token is accepted
# Assumed probability that the target draws the likeliest token at the end of a path, and of each
# following one given that it is none of those before.
RANK_RATE = 0.5
DECAY = 0.98  # of the counts, per verdict


class OverlapProposer(CompositeProposer):
    """Proposes the drafts of `model`, sooner where an outcome that was drafted for came true.

    Attributes:
        asked: verdicts that followed overlapped drafting.
        hits: how many of them were among the outcomes.
    """

    overlaps = True

    def __init__(
        self, model: DraftModel, outcomes: int = MAX_OUTCOMES, *, coupled: bool = True
    ) -> None:
        """In a cascade its last draft model drafts on. `coupled`: rank outcomes with the target's
        noise where the rule shares it."""
        self.model = model
        self.told = (model,)
        self.name = f"{AHEAD}({model.name})"
        self.width = model.width
        self.inner = model.model if isinstance(model, Cascade) else model
        self.aux_hidden_layers = model.aux_hidden_layers
        self.wants_logits = model.wants_logits
        self.outcomes = outcomes
        self.coupled = coupled
        self.asked = 0
        self.hits = 0
        self._statistics = _OutcomeStatistics()
        self._lookaheads: dict[int, _Lookahead] = {}  # by slot
        self._pool = ThreadPoolExecutor(1, "forerun-ahead")
        self._task: Future[None] | None = None
        self._stop = Event()

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self._join()
        super().open(slot, tokens, references, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._join()
        self._lookaheads.pop(slot, None)
        super().close(slot, finished)

    def reset(self) -> None:
        self.end_overlap()
        self._join()
        self._lookaheads.clear()
        super().reset()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        error = self._join()
        if error:
            raise error
        trees = {r.slot: tree for r in requests if (tree := self._recall(r))}
        drafts = {slot: tree.finish(self.inner.vocab) for slot, tree in trees.items()}
        missed = [request for request in requests if request.slot not in trees]
        begun = [tree for tree in trees.values() if tree.is_growing]
        for request, draft in zip(missed, self.model.propose(missed), strict=True):
            drafts[request.slot] = draft
        for tree, draft in zip(begun, self.inner.complete(begun), strict=True):
            drafts[tree.request.slot] = draft
        return [drafts[request.slot] for request in requests]

    def begin_overlap(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        """Draft on until `end_overlap`; this thread gets fewer native threads till then."""
        each = max(self.outcomes // max(len(requests), 1), 1)
        begun = [self._look_ahead(r, d, each) for r, d in zip(requests, drafts, strict=True)]
        lookaheads = [lookahead for lookahead in begun if lookahead]
        if lookaheads:
            self._lookaheads |= {lookahead.request.slot: lookahead for lookahead in lookaheads}
            self._stop.clear()
            self._task = self._pool.submit(self._work, lookaheads)
            native.share(max(native.threads() - native.reserved(), 1))

    def end_overlap(self) -> None:
        self._stop.set()
        native.share(0)

    def finish(self) -> None:
        """Wait until everything is drafted that there is to draft."""
        if self._task:
            wait([self._task])

    def steps(self, lookaheads: Sequence[_Lookahead]) -> Iterator[None]:
        """Draft on, one forward pass at a time; the iteration may be abandoned behind any."""
        drafts = [(lookahead.draft, range(len(lookahead.draft))) for lookahead in lookaheads]
        logits = self.inner.read([lookahead.request for lookahead in lookaheads], drafts)
        parts = torch.split(logits, [len(nodes) for _, nodes in drafts])
        for lookahead, part in zip(lookaheads, parts, strict=True):
            lookahead.choose(self._ranked(lookahead, part), self._statistics)
        yield
        source = f"{AHEAD}&{self.inner.source}"
        while growing := [lookahead for lookahead in lookaheads if lookahead.growing]:
            trees = [branch.tree for lookahead in growing for branch in lookahead.growing]
            grow(trees, self._feed(growing), self.width, source)
            yield

    def _work(self, lookaheads: Sequence[_Lookahead]) -> None:
        native.share(native.reserved())
        for _ in self.steps(lookaheads):
            if self._stop.is_set():
                break

    def _join(self) -> BaseException | None:
        """Wait for the forward pass that the other thread is in; returns its error, if any."""
        begun = time.perf_counter()
        task = self._task
        self._task = None
        self._stop.set()
        error = task.exception() if task else None
        self.wait_seconds = time.perf_counter() - begun
        return error

    def _recall(self, request: DraftRequest) -> Tree | None:
        """Return the tree that was drafted behind the target's verdict, if there is one."""
        lookahead = self._lookaheads.pop(request.slot, None)
        if lookahead is None:
            return None
        cache = self.inner.runner.cache
        cache.pages.seal(request.slot, request.tokens, cache.length[request.slot])
        cache.pages.shrink(request.slot, len(request.tokens))
        tokens = request.tokens[len(lookahead.request.tokens) :]
        self._statistics.learn(lookahead, tokens)
        tree = lookahead.recall(tokens, request)
        self.asked += 1
        if tree is not None:
            self.hits += 1
        return tree

    def _look_ahead(self, request: DraftRequest, draft: Draft, outcomes: int) -> _Lookahead | None:
        """Return the outcomes to draft for; None without room, or if the model lacks a token."""
        # The engine appends to the request's tokens while the other thread reads them.
        request = replace(request, tokens=list(request.tokens))
        runner, slot = self.inner.runner, request.slot
        lag = request.tokens[runner.cache.length[slot] :]
        if not 0 < len(lag) <= MAX_LAG:
            return None
        if max(*lag, *draft.tokens) >= runner.decoder.config.vocab:
            return None
        nodes = outcomes * (1 + (request.depth - 1) * self.width)
        num_tokens = len(request.tokens) + len(draft) - 1 + nodes
        if num_tokens > runner.decoder.context or not runner.cache.pages.grow(slot, num_tokens):
            return None
        return _Lookahead(request, draft, outcomes)

    def _feed(self, lookaheads: Sequence[_Lookahead]) -> Tensor:
        """Read the nodes that were added last; returns the logits behind each of them."""
        segments = []
        for lookahead in lookaheads:
            offset = len(lookahead.parents)
            tokens = [
                lookahead.add_row(branch, node)
                for branch in lookahead.growing
                for node in branch.tree.frontier
            ]
            wanted = list(range(len(tokens)))
            slot = lookahead.request.slot
            segments.append(Segment(slot, tokens, lookahead.parents, wanted, offset=offset))
        return self.inner.forward(segments)

    def _ranked(self, lookahead: _Lookahead, logits: Tensor) -> list[list[int]]:
        """Return for each node the tokens that the target may draw behind it, the likeliest first,
        without its children. logits [N, V]"""
        request, draft = lookahead.request, lookahead.draft
        sampling = request.params.sampling
        is_filtered = sampling != Sampling(sampling.temperature)
        if is_filtered:
            scores = shape_scores(logits, [sampling] * len(draft)).clone()
        else:
            scores = logits.clone()
        by = GREEDY
        if self.coupled and request.coupled and sampling.temperature:
            by = Sampling(1.0 if is_filtered else sampling.temperature)
        keys = [request.noise.target(depth) for depth in draft.depths()]
        for node, children in enumerate(draft.children()):
            scores[node, [draft.tokens[child] for child in children]] = -torch.inf
        nodes = torch.arange(len(draft))
        found: list[list[int]] = []
        for _ in range(min(NUM_RANKS, lookahead.outcomes, scores.shape[1] - len(draft))):
            found.append(sample_tokens(scores, [by] * len(draft), keys, strict=False))
            scores[nodes, found[-1]] = -torch.inf
            if is_filtered and not torch.isfinite(scores).any(-1).all():
                break
        return [list(tokens) for tokens in zip(*found, strict=True)]


@dataclass(slots=True)
class _Branch:
    """The draft behind one outcome.

    Attributes:
        outcome: the tokens that the target would emit.
        tree: the draft of the step after it.
        rows: by node of the tree, its place among the uncommitted rows of the slot.
    """

    outcome: tuple[int, ...]
    tree: Tree
    rows: dict[int, int]


@dataclass(slots=True)
class _Lookahead:
    """The overlapped drafts of one request.

    Attributes:
        request, draft: of the step whose draft is verified.
        outcomes: how many are drafted for.
        parents: of the slot's uncommitted rows, of which the first are the draft's nodes.
        ranked: candidates for the token behind each node of the draft.
    """

    request: DraftRequest
    draft: Draft
    outcomes: int
    parents: list[int] = field(default_factory=list)
    ranked: list[list[int]] = field(default_factory=list)
    branches: list[_Branch] = field(default_factory=list)

    @property
    def growing(self) -> list[_Branch]:
        """The branches that are not as deep as requested."""
        return [branch for branch in self.branches if branch.tree.is_growing]

    def choose(self, ranked: list[list[int]], statistics: _OutcomeStatistics) -> None:
        """Begin branches for the likeliest outcomes."""
        self.ranked = ranked
        self.parents = list(self.draft.parents)
        depths, noise = self.draft.depths(), self.request.noise
        for node, token in statistics.likeliest(self.draft, ranked, self.outcomes):
            path = [self.draft.tokens[i] for i in self.draft.path_to(node)[1:]]
            later = replace(noise, root=noise.root + depths[node] + 1)
            tree = Tree(replace(self.request, tokens=(token,), noise=later))
            self.branches.append(_Branch((*path, token), tree, {-1: node}))

    def add_row(self, branch: _Branch, node: int) -> int:
        """Give a node of a branch the next row; returns its token."""
        draft = branch.tree.draft
        branch.rows[node] = len(self.parents)
        self.parents.append(branch.rows[draft.parents[node]])
        return draft.tokens[node]

    def recall(self, tokens: Sequence[int], request: DraftRequest) -> Tree | None:
        """Return the draft behind the emitted tokens, if there is one, cut to `request`."""
        for branch in self.branches:
            if branch.outcome == tuple(tokens) and len(branch.tree.draft) > 1:
                return branch.tree.cut_to(request)
        return None


class _OutcomeStatistics:
    """Discounted counts of past outcomes, by which new ones are ranked.

    Attributes:
        accepted, rejected: of drafted tokens.
        ranks: for ends at inner nodes (False) and leaves (True), how often each candidate was the
            target's token.
        ends: how often paths ended at inner nodes and leaves.
    """

    def __init__(self) -> None:
        self.accepted = 4 * ACCEPTED_RATE
        self.rejected = 4 * (1 - ACCEPTED_RATE)
        start = [RANK_RATE * (1 - RANK_RATE) ** rank for rank in range(NUM_RANKS)]
        self.ranks = {False: list(start), True: list(start)}
        self.ends = {False: 1.0, True: 1.0}

    def likeliest(
        self, draft: Draft, ranked: Sequence[Sequence[int]], count: int
    ) -> list[tuple[int, int]]:
        """Return (node where the path ends, token behind it) of the likeliest outcomes."""
        rate = self.accepted / (self.accepted + self.rejected)
        depths, children = draft.depths(), draft.children()
        found = []
        for node, tokens in enumerate(ranked):
            is_leaf = not children[node]
            if node and draft.path_probs:
                end_prob = draft.path_probs[node - 1]
            else:
                end_prob = rate ** depths[node]
            if not is_leaf:
                end_prob *= 1 - rate
            for token, hits in zip(tokens, self.ranks[is_leaf], strict=False):
                found.append((end_prob * (hits / self.ends[is_leaf]), node, token))
        found.sort(key=lambda outcome: -outcome[0])
        return [(node, token) for _, node, token in found[:count]]

    def learn(self, lookahead: _Lookahead, tokens: Sequence[int]) -> None:
        """Count the tokens that the target emitted."""
        path = lookahead.draft.match_tokens(tokens)
        if len(path) != len(tokens) or not lookahead.ranked:
            return
        is_leaf = not lookahead.draft.children()[path[-1]]
        candidates = lookahead.ranked[path[-1]]
        self.accepted = DECAY * self.accepted + len(path) - 1
        self.rejected = DECAY * self.rejected + (0 if is_leaf else 1)
        self.ranks[is_leaf] = [DECAY * hits for hits in self.ranks[is_leaf]]
        self.ends[is_leaf] = DECAY * self.ends[is_leaf] + 1
        if tokens[-1] in candidates:
            self.ranks[is_leaf][candidates.index(tokens[-1])] += 1
