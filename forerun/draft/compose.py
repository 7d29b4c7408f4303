"""Composite proposers: several drafters in turn, the best of them, all in one tree, or one that
drafts while the target verifies.

The engine asks the parts itself, so that it measures what each costs and how often its tokens are
accepted. A composite only decides which part is asked next and makes one draft of the answers:
`ask` is a generator that yields a proposer, is sent its `Offer`, and returns the draft.

Overlapped drafting, `ahead(a)`: while the target verifies a draft, a draft model drafts on for the
likeliest outcomes (speculative speculative decoding, Kumar, Dao and May, 2603.03251). An outcome of
verification is the node where the accepted path ends and the target's token behind it. In a thread
of its own the model reads the draft, and drafts behind the likeliest outcomes of every request, all
in one tree over rows of its cache that are never committed. If one of them comes true, the next
draft is there, or begun; if none does, that request is drafted for anew. The draft is the same in
both cases: it depends on the text and on the noise, which is a function of positions. So it is as
exact as the model under every rule, and does not depend on time. Under a coupled rule the noise
that the target will draw with is known, so outcomes are ranked with it.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.devices import SideStream
from forerun.draft.draft_model import Cascade, DraftModel
from forerun.draft.proposer import CompositeProposer, DraftRequest, Proposer, Texts, Tokens
from forerun.draft.tree import Tree, grow
from forerun.draft_spec import AHEAD, SIGNS, DraftSpec, Leaf, OverlappedDraft, read_name
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.kernels.draw import sample_tokens, shape_scores
from forerun.sampling.params import GREEDY, Sampling
from forerun.types import Draft, Proposal

MAX_COMPOSED = 64  # composites made for requests that are kept

# Sorts proposers, those first that are expected to do best.
Ranking: TypeAlias = Callable[[Sequence[Proposer]], Sequence[Proposer]]


@dataclass(frozen=True, slots=True)
class Offer:
    """One proposer's draft for a request.

    Attributes:
        draft: all of it.
        worthwhile: as much of it as pays if no other proposer drafts; a root if nothing does.
        is_final: no other proposer is expected to do better.
        speed: expected tokens per second of a copy.
    """

    draft: Draft
    worthwhile: Draft
    is_final: bool = False
    speed: float = 0.0


Asking: TypeAlias = Generator[Proposer, Offer, Draft]


@dataclass(frozen=True, slots=True)
class AskContext:
    """A request as composites see it: whether drafts may be trees, and the order of proposers."""

    branching: bool
    ranking: Ranking


def ask(proposer: Proposer, context: AskContext) -> Asking:
    """Yield the proposers to ask for a draft of `proposer`, one after the other."""
    if isinstance(proposer, Composition):
        return (yield from proposer.ask(context))
    return (yield proposer).worthwhile


def _ask_in_turn(parts: Sequence[Proposer], context: AskContext) -> Asking:
    for part in parts:
        draft = yield from ask(part, context)
        if len(draft) > 1:
            break
    return draft


class Composition(CompositeProposer):
    """Base of the composites that the engine takes apart."""

    sign = ""

    def __init__(self, parts: Sequence[Proposer]) -> None:
        self.inner = tuple(parts)
        self.members = tuple(leaf for part in parts for leaf in part.parts)
        self.name = self.sign.join(self._part_name(part) for part in parts)
        self.aux_hidden_layers = tuple(
            sorted({layer for part in parts for layer in part.aux_hidden_layers})
        )
        self.wants_logits = any(part.wants_logits for part in parts)
        self.merges_drafts = any(part.merges_drafts for part in parts)
        self.width = max(part.width for part in parts)
        self.extra_nodes = max(part.extra_nodes for part in parts)
        self.rivals = tuple(rival for part in parts for rival in part.rivals)

    def _part_name(self, part: Proposer) -> str:
        is_looser = isinstance(part, Composition) and (
            SIGNS.index(part.sign) < SIGNS.index(self.sign)
        )
        return f"({part.name})" if is_looser else part.name

    @property
    def parts(self) -> Sequence[Proposer]:
        return self.members

    def ask(self, context: AskContext) -> Asking:
        """Yield the proposers to ask; see the function `ask`."""
        raise NotImplementedError


class InTurn(Composition):
    """Asks its parts in order; the first that has a draft drafts alone."""

    sign = "+"

    def ask(self, context: AskContext) -> Asking:
        return _ask_in_turn(self.inner, context)


class BestOf(InTurn):
    """Takes the best copy, or else asks the other parts, those first that are expected to do best.

    All parts that copy text are looked at, since that is cheap.
    """

    sign = "?"

    def __init__(self, parts: Sequence[Proposer]) -> None:
        super().__init__(parts)
        self.rivals = tuple(leaf for leaf in self.members if not leaf.copies_text)

    def ask(self, context: AskContext) -> Asking:
        offers = []
        for part in self.inner:
            if part.copies_text:
                offers.append((yield part))
        best = max(offers, key=lambda offer: offer.speed, default=None)
        others = [part for part in self.inner if not part.copies_text]
        if best and (len(best.worthwhile) > 1 or not others):
            return best.worthwhile
        return (yield from _ask_in_turn(context.ranking(others), context))


class Merged(Composition):
    """Asks its parts in order until an offer is final, and merges the drafts into one tree."""

    sign = "&"

    def __init__(self, parts: Sequence[Proposer]) -> None:
        super().__init__(parts)
        self.merges_drafts = True
        self.width = sum(part.width for part in parts)
        self.extra_nodes = sum(part.extra_nodes for part in parts)

    def ask(self, context: AskContext) -> Asking:
        if not context.branching:
            return (yield from _ask_in_turn(self.inner, context))
        drafts = []
        for part in self.inner:
            if isinstance(part, Composition):
                drafts.append((yield from part.ask(context)))
                continue
            offer = yield part
            if offer.is_final:
                return offer.worthwhile
            drafts.append(offer.draft)
        return merge_drafts(drafts)


def compose(spec: DraftSpec, proposers: Mapping[str, Proposer]) -> Proposer:
    """Make the proposer of a draft option from proposers by name. Raises ConfigError."""
    if isinstance(spec, Leaf):
        return proposers[spec.name]
    if isinstance(spec, OverlappedDraft):
        return _overlap(compose(spec.part, proposers))
    parts = [compose(part, proposers) for part in spec.parts]
    if spec.sign == ">":
        return functools.reduce(_cascade, parts)
    return {"+": InTurn, "?": BestOf, "&": Merged}[spec.sign](parts)


def _cascade(first: Proposer, model: Proposer) -> Cascade:
    if type(model) is not DraftModel or isinstance(first, Composition) or first.overlaps:
        raise ConfigError(
            f"{first.name}>{model.name} is no cascade: it takes one draft, and a draft model to"
            " draft for (model:.. or self:int4)"
        )
    return Cascade(first, model)


def _overlap(model: Proposer) -> OverlapProposer:
    if not isinstance(model, Cascade) and type(model) is not DraftModel:
        raise ConfigError(
            f"ahead({model.name}) cannot be: it takes a draft model (model:.., self:int4, or"
            " a>model:..), since other drafters copy text or need the target's states of it"
        )
    return OverlapProposer(model)


class Proposers(dict[str, Proposer]):
    """An engine's proposers by name, with the composites that requests have asked for."""

    def __init__(self, given: Mapping[str, Proposer]) -> None:
        super().__init__(given)
        self._composed: list[str] = []

    def known(self, draft: str, in_use: Collection[str]) -> str:
        """Return the name of a draft's proposer, which is composed if it is not there yet.

        At most MAX_COMPOSED composites are kept, and those `in_use`. Raises ConfigError.
        """
        if draft in self:
            return draft
        leaves = [
            name for name, p in self.items() if name == p.name and not isinstance(p, Composition)
        ]
        spec = read_name(draft, leaves)
        name = str(spec)
        if name not in self:
            proposer = compose(spec, self)
            excess = max(len(self._composed) - MAX_COMPOSED + 1, 0)
            for unused in [other for other in self._composed if other not in in_use][:excess]:
                self._composed.remove(unused)
                del self[unused]
            self._composed.append(name)
            self[name] = proposer
        return name


def merge_drafts(drafts: Sequence[Draft]) -> Draft:
    """Merge drafts of one request into one tree.

    Nodes of the same text become one node, with all their sources. If all drafts have path
    probabilities, the likeliest nodes come first, and the best probability of a node counts.
    Otherwise sampled children come before deterministic ones, as the rule `tree` wants them. Only
    the sampled children of one distribution are kept at each place.
    """
    found = [draft for draft in drafts if len(draft) > 1]
    if len(found) < 2:
        return found[0] if found else drafts[0]
    tree = Draft.root(found[0].tokens[0])
    path_probs = [1.0]
    probs: dict[int, np.ndarray] = {}
    merged_nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node of the tree
    for draft in found:
        node_in_tree = {0: 0}
        owns_sampled: dict[int, bool] = {}  # whether the sampled children are this draft's
        for node in range(1, len(draft)):
            parent = node_in_tree.get(draft.parents[node], -1)
            if parent < 0:
                continue
            if draft.proposals[node] is not Proposal.DETERMINISTIC:
                if not owns_sampled.setdefault(parent, parent not in probs):
                    continue
                assert draft.probs is not None
                probs[parent] = draft.probs[draft.parents[node]]
            token = draft.tokens[node]
            source = draft.sources[node]
            proposal = draft.proposals[node]
            prob = draft.path_probs[node - 1] if draft.path_probs else 0.0
            merged = merged_nodes.get((parent, token))
            if merged is None:
                merged = tree.add(token, parent, source, proposal)
                merged_nodes[parent, token] = merged
                path_probs.append(prob)
            else:
                if source not in tree.sources[merged].split("&"):
                    tree.sources[merged] += f"&{source}"
                tree.proposals[merged] = max(tree.proposals[merged], proposal)
                path_probs[merged] = max(path_probs[merged], prob)
            node_in_tree[node] = merged
    has_probs = all(draft.path_probs for draft in found)
    return _in_order(tree, path_probs if has_probs else None, probs)


def _in_order(
    tree: Draft, path_probs: Sequence[float] | None, probs: Mapping[int, np.ndarray]
) -> Draft:
    """Sort nodes by path probability if there are any, parents before their children and sampled
    siblings before deterministic ones."""
    children = tree.children()
    ordered = Draft.root(tree.tokens[0])
    new_node = {0: 0}
    heap: list[tuple[float, int, int]] = []  # (-path probability, -proposal, node)

    def push_children(node: int, limit: float) -> None:
        for child in children[node]:
            prob = min(limit, path_probs[child]) if path_probs else 0.0
            heapq.heappush(heap, (-prob, -int(tree.proposals[child]), child))

    push_children(0, 1.0)
    while heap:
        negative, _, node = heapq.heappop(heap)
        parent = new_node[tree.parents[node]]
        new_node[node] = ordered.add(
            tree.tokens[node], parent, tree.sources[node], tree.proposals[node]
        )
        if path_probs:
            ordered.path_probs.append(-negative)
        push_children(node, -negative)
    if probs:
        first = next(iter(probs.values()))
        ordered.probs = np.zeros((len(ordered), len(first)), dtype=first.dtype)
        for node, distribution in probs.items():
            ordered.probs[new_node[node]] = distribution
    return ordered


MAX_OUTCOMES = 8  # outcomes drafted for per step over all requests; at least one per request
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
        self.members = (model,)
        self.name = f"{AHEAD}({model.name})"
        self.width = model.width
        self.inner = model.model if isinstance(model, Cascade) else model
        self.aux_hidden_layers = model.aux_hidden_layers
        self.wants_logits = model.wants_logits
        self.outcomes = outcomes
        self.coupled = coupled
        self.verdicts = 0
        self.hits = 0
        self._statistics = _OutcomeStatistics()
        self._lookaheads: dict[int, _Lookahead] = {}  # by slot
        self._pool = ThreadPoolExecutor(1, "forerun-ahead")
        self._stream = SideStream(self.inner.runner.decoder.device)
        self._task: Future[None] | None = None
        self._stop = Event()

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
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
        growing = [tree for tree in trees.values() if tree.is_growing]
        for request, draft in zip(missed, self.model.propose(missed), strict=True):
            drafts[request.slot] = draft
        for tree, draft in zip(growing, self.inner.complete(growing), strict=True):
            drafts[tree.request.slot] = draft
        return [drafts[request.slot] for request in requests]

    def begin_overlap(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        """Draft on until `end_overlap`; this thread gets fewer native threads till then."""
        outcomes = max(self.outcomes // max(len(requests), 1), 1)
        pairs = zip(requests, drafts, strict=True)
        found = [self._look_ahead(request, draft, outcomes) for request, draft in pairs]
        lookaheads = [lookahead for lookahead in found if lookahead]
        if lookaheads:
            self._lookaheads |= {lookahead.request.slot: lookahead for lookahead in lookaheads}
            self._stop.clear()
            self._stream.fork()
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
        with self._stream.use():
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
        self._stream.join()
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
        self.verdicts += 1
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
