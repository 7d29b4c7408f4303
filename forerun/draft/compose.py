"""Composite proposers: several drafters in turn, the best of them, or merged into one tree.

The engine asks the parts itself, so that it measures what each costs and how often its tokens are
accepted. A composite only decides which part is asked next and makes one draft of the answers:
`ask` is a generator that yields a proposer, is sent its `Offer`, and returns the draft.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from forerun.draft.cascade import Cascade
from forerun.draft.draft_model import DraftModel
from forerun.draft.overlap import OverlapProposer
from forerun.draft.proposer import CompositeProposer, Proposer
from forerun.draft_spec import SIGNS, DraftSpec, Leaf, OverlappedDraft, read_name
from forerun.errors import ConfigError
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
    """Ask until a proposer has a draft."""
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
        self.told = tuple(leaf for part in parts for leaf in part.parts)
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
        return self.told

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
        self.rivals = tuple(leaf for leaf in self.told if not leaf.copies_text)

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
            place = merged_nodes.get((parent, token))
            if place is None:
                place = tree.add(token, parent, source, proposal)
                merged_nodes[parent, token] = place
                path_probs.append(prob)
            else:
                if source not in tree.sources[place].split("&"):
                    tree.sources[place] += f"&{source}"
                tree.proposals[place] = max(tree.proposals[place], proposal)
                path_probs[place] = max(path_probs[place], prob)
            node_in_tree[node] = place
    has_probs = all(draft.path_probs for draft in found)
    return _in_order(tree, path_probs if has_probs else None, probs)


def _in_order(
    tree: Draft, path_probs: Sequence[float] | None, probs: Mapping[int, np.ndarray]
) -> Draft:
    """Sort nodes by path probability if there are any, parents before their children and sampled
    siblings before deterministic ones."""
    children = tree.children()
    ordered = Draft.root(tree.tokens[0])
    place = {0: 0}
    heap: list[tuple[float, int, int]] = []  # (-path probability, -proposal, node)

    def push_children(node: int, limit: float) -> None:
        for child in children[node]:
            prob = min(limit, path_probs[child]) if path_probs else 0.0
            heapq.heappush(heap, (-prob, -int(tree.proposals[child]), child))

    push_children(0, 1.0)
    while heap:
        negative, _, node = heapq.heappop(heap)
        parent = place[tree.parents[node]]
        place[node] = ordered.add(
            tree.tokens[node], parent, tree.sources[node], tree.proposals[node]
        )
        if path_probs:
            ordered.path_probs.append(-negative)
        push_children(node, -negative)
    if probs:
        first = next(iter(probs.values()))
        ordered.probs = np.zeros((len(ordered), len(first)), dtype=first.dtype)
        for node, distribution in probs.items():
            ordered.probs[place[node]] = distribution
    return ordered
