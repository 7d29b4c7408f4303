"""Proposers made of proposers: one after the other, the best of them, or all in one tree.

The engine asks the parts itself (`Drafting`), so that it learns what each costs and is worth. What
a composition does is to say who is asked next, and to make one draft of what they say: `ask` is a
generator that yields a part, is sent what that offered, and returns the draft. Otherwise it only
passes on what happens to a request."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun import draft_spec as drafts
from forerun.draft.cascade import Cascade
from forerun.draft.draft_model import DraftModel
from forerun.draft.overlap import Ahead
from forerun.draft.proposer import CompositeProposer, Proposer
from forerun.draft_spec import SIGNS, Leaf, Said, read_name
from forerun.errors import ConfigError
from forerun.types import Draft, Proposal


@dataclass(frozen=True, slots=True)
class Offer:
    """What a part has for a request: its whole `draft`, and what of it pays alone (`taken`, a root
    where nothing). `settles`: nobody else is expected to do better; `speed`: tokens a second that a
    copy lets expect."""

    draft: Draft
    taken: Draft
    settles: bool = False
    speed: float = 0.0


MADE = 64  # proposers that requests made of others which are kept
Asking = Generator[Proposer, Offer, Draft]
Ranking = Callable[
    [Sequence[Proposer]], Sequence[Proposer]
]  # proposers, those first that are expected to do best


@dataclass(frozen=True, slots=True)
class Asked:
    """What matters to who is asked: whether drafts may be trees (otherwise they have to be chains),
    and which proposers are expected to do best for this request."""

    branching: bool
    ranking: Ranking


def ask(proposer: Proposer, asked: Asked) -> Asking:
    """Who is asked for a draft of a proposer, one after the other."""
    if isinstance(proposer, Composition):
        return (yield from proposer.ask(asked))
    return (yield proposer).taken


def _in_turn(parts: Sequence[Proposer], asked: Asked) -> Asking:
    for part in parts:
        draft = yield from ask(part, asked)
        if len(draft) > 1:
            break
    return draft


class Composition(CompositeProposer):
    """Base of those made of others."""

    sign = ""

    def __init__(self, parts: Sequence[Proposer]) -> None:
        self.inner = tuple(parts)
        self.told = tuple(own for part in parts for own in part.parts)
        whole: Callable[[Iterable[int]], int] = (
            sum if self.sign == "&" else max
        )  # all draft, or one of them
        self.width, self.beside = (
            whole(part.width for part in parts),
            whole(part.beside for part in parts),
        )
        self.name = self.sign.join(
            f"({part.name})"
            if isinstance(part, Composition) and SIGNS.index(part.sign) < SIGNS.index(self.sign)
            else part.name
            for part in parts
        )
        self.aux_hidden_layers = tuple(
            sorted({b for part in parts for b in part.aux_hidden_layers})
        )
        self.learns = any(part.learns for part in parts)
        self.merges = self.sign == "&" or any(part.merges for part in parts)
        rivals = self.told if self.sign == "?" else [own for part in parts for own in part.rivals]
        self.rivals = tuple(own for own in rivals if not own.copies)

    @property
    def parts(self) -> Sequence[Proposer]:
        return self.told

    def ask(self, asked: Asked) -> Asking:
        """See `ask`."""
        raise NotImplementedError


class Either(Composition):
    """Asks its parts in order: whoever has a draft for a request first drafts it alone."""

    sign = "+"

    def ask(self, asked: Asked) -> Asking:
        return _in_turn(self.inner, asked)


class Best(Either):
    """Looks at what all have who copy, and takes the best of it; where others are expected to do
    better, asks whichever of them is expected to do best first, and the next one where that has
    nothing."""

    sign = "?"

    def ask(self, asked: Asked) -> Asking:
        offers = []
        for part in self.inner:
            if part.copies:
                offers.append((yield part))
        best = max(offers, key=lambda offer: offer.speed, default=None)
        others = [part for part in self.inner if not part.copies]
        if best and (len(best.taken) > 1 or not others):
            return best.taken
        return (yield from _in_turn(asked.ranking(others), asked))


class Both(Composition):
    """Asks its parts in order until one settles it, and makes one tree of what they said."""

    sign = "&"

    def ask(self, asked: Asked) -> Asking:
        if not asked.branching:
            return (yield from _in_turn(self.inner, asked))
        drafts = []
        for part in self.inner:
            if isinstance(part, Composition):
                drafts.append((yield from part.ask(asked)))
                continue
            offer = yield part
            if offer.settles:
                return offer.taken
            drafts.append(offer.draft)
        return merged(drafts)


def composed(said: Said, proposers: Mapping[str, Proposer]) -> Proposer:
    """What drafts as an option says, of these proposers."""
    if isinstance(said, Leaf):
        return proposers[said.name]
    if isinstance(said, drafts.Ahead):
        return _ahead(composed(said.part, proposers))
    parts = [composed(part, proposers) for part in said.parts]
    if said.how == ">":
        return functools.reduce(_cascade, parts)
    return {"+": Either, "?": Best, "&": Both}[said.how](parts)


def _cascade(first: Proposer, model: Proposer) -> Cascade:
    if type(model) is not DraftModel or isinstance(first, Composition) or first.ahead:
        raise ConfigError(
            f"{first.name}>{model.name} is no cascade: it takes one draft, and a draft model to draft for (model:.. or"
            " self:int4)"
        )
    return Cascade(first, model)


def _ahead(model: Proposer) -> Ahead:
    if not isinstance(model, Cascade) and type(model) is not DraftModel:
        raise ConfigError(
            f"ahead({model.name}) cannot be: it takes a draft model (model:.., self:int4, or a>model:..), since"
            " others copy, or need what the target thinks of a text before they go on with it"
        )
    return Ahead(model)


class Proposers(dict[str, Proposer]):
    """Those of an engine by name, and what requests make of them: it is there once it has been
    asked for."""

    def __init__(self, given: Mapping[str, Proposer]) -> None:
        super().__init__(given)
        self._made: list[str] = []

    def known(self, draft: str, wanted: Collection[str]) -> str:
        """What the proposer of a draft is called here. Of those that were made, so many are kept,
        and those that are `wanted`. Raises ConfigError."""
        if draft in self:
            return draft
        said = read_name(
            draft,
            [name for name, p in self.items() if name == p.name and not isinstance(p, Composition)],
        )
        if str(said) not in self:
            made = composed(said, self)
            for unused in [name for name in self._made if name not in wanted][
                : max(len(self._made) - MADE + 1, 0)
            ]:
                self._made.remove(unused)
                del self[unused]
            self._made.append(str(said))
            self[str(said)] = made
        return str(said)


def merged(drafts: Sequence[Draft]) -> Draft:
    """One tree of what all say: nodes of the same text are one, whose sources are all that said it.

    Where chances are known of all nodes, the likeliest come first, and of a node that several said
    the best counts. Otherwise children that were sampled come before given ones, as `tree` wants
    them, and those of one law alone: of others that were sampled in the same place nothing is kept.
    """
    found = [draft for draft in drafts if len(draft) > 1]
    if len(found) < 2:
        return found[0] if found else drafts[0]
    tree, chances, laws = Draft.root(found[0].tokens[0]), [1.0], dict[int, np.ndarray]()
    places: dict[tuple[int, int], int] = {}
    for draft in found:
        at, own = (
            {0: 0},
            dict[int, bool](),
        )  # nodes of the draft in the tree; whether the sampled children are its own
        for node in range(1, len(draft)):
            parent, token = at.get(draft.parents[node], -1), draft.tokens[node]
            if parent < 0:
                continue
            chance = draft.path_probs[node - 1] if draft.path_probs else 0.0
            place = places.get((parent, token))
            if draft.proposals[node] is not Proposal.DETERMINISTIC:
                if not own.setdefault(parent, parent not in laws):
                    continue
                assert draft.probs is not None
                laws[parent] = draft.probs[draft.parents[node]]
            if place is None:
                place = places[parent, token] = tree.add(
                    token, parent, draft.sources[node], draft.proposals[node]
                )
                chances.append(chance)
            else:
                tree.sources[place] = _together(tree.sources[place], draft.sources[node])
                tree.proposals[place] = max(tree.proposals[place], draft.proposals[node])
                chances[place] = max(chances[place], chance)
            at[node] = place
    weighed = all(draft.path_probs for draft in found)
    return _ordered(tree, chances if weighed else None, laws)


def _together(sources: str, source: str) -> str:
    return sources if source in sources.split("&") else f"{sources}&{source}"


def _ordered(tree: Draft, chances: Sequence[float] | None, laws: Mapping[int, np.ndarray]) -> Draft:
    """The same tree, by chance if there are any, parents before their children; sampled siblings
    before given ones."""
    children, made, at = tree.children(), Draft.root(tree.tokens[0]), {0: 0}
    heap: list[tuple[float, int, int, float]] = []

    def push(node: int, chance: float) -> None:
        for child in children[node]:
            own = min(chance, chances[child]) if chances else 0.0
            heapq.heappush(heap, (-own, -int(tree.proposals[child]), child, own))

    push(0, 1.0)
    if chances:
        made.path_probs = []
    while heap:
        _, _, node, chance = heapq.heappop(heap)
        at[node] = made.add(
            tree.tokens[node], at[tree.parents[node]], tree.sources[node], tree.proposals[node]
        )
        if chances:
            made.path_probs.append(chance)
        push(node, chance)
    if laws:
        law = next(iter(laws.values()))
        made.probs = np.zeros((len(made), len(law)), dtype=law.dtype)
        for node, law in laws.items():
            made.probs[at[node]] = law
    return made
