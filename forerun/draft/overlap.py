"""Drafting ahead, `ahead(a)`: while the target verifies a draft, a draft model drafts on for what
may come of it (speculative speculative decoding, Kumar, Dao and May, 2603.03251).

What a verdict leaves is a node where the path ends, and the target's token behind it: an outcome.
In a thread of its own the model reads the draft, and drafts behind the likeliest outcomes of every
request, all in one tree over rows of its cache that nobody commits. If one of them comes true, the
next draft is there, or begun, and then the model goes on with it; if none does, that request alone
is drafted for anew. In any case it is the draft that the model makes then: what it says behind an
outcome depends on the text up to it and on noise, which is a function of places, never on whether
it comes true. So it is as exact as the model under every rule, and what it says does not depend on
time.

Under a coupled rule the noise that the target will draw with is known, so outcomes are ranked with
it."""

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
from forerun.kernels.draw import sample_tokens
from forerun.sampling.filters import shape_logits
from forerun.types import Draft

OUTCOMES = 8  # that are drafted for in a step, of all requests together, but one of each at least
RANKS = 6  # tokens that may stand at the end of a path, the likeliest
LONGEST_LAG = (
    64  # committed tokens that the model may still have to read; who has more is in no hurry
)
STOOD = 0.7  # chance assumed that a drafted token stands,
# and that the target says the likeliest of its tokens at the end of a path, or of the rest, and so
# on
TOKEN = 0.5
KEEP = 0.98  # of what was counted, with each verdict


class Ahead(CompositeProposer):
    """Proposes what `model` would, sooner where an outcome came true that it had drafted for.

    Attributes:
        asked, hits: verdicts since something was drafted ahead, and those that were foreseen.
    """

    overlaps = True

    def __init__(
        self, model: DraftModel, outcomes: int = OUTCOMES, *, coupled: bool = True
    ) -> None:
        """Of a cascade it is the draft model at its end that goes on. `coupled` ranks outcomes with
        the target's noise where the rule shares it."""
        self.model, self.told, self.name, self.width = (
            model,
            (model,),
            f"{AHEAD}({model.name})",
            model.width,
        )
        self.inner = model.model if isinstance(model, Cascade) else model
        self.aux_hidden_layers, self.wants_logits = model.aux_hidden_layers, model.wants_logits
        self.outcomes, self.coupled, self.asked, self.hits = outcomes, coupled, 0, 0
        self._odds = _Odds()
        self._foreseen: dict[int, _Foresight] = {}  # by slot
        self._thread = ThreadPoolExecutor(1, "forerun-ahead")
        self._working: Future[None] | None = None
        self._over = Event()

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self._wait()
        super().open(slot, tokens, references, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._wait()
        self._foreseen.pop(slot, None)
        super().close(slot, finished)

    def reset(self) -> None:
        self.end_overlap()
        self._wait()
        self._foreseen.clear()
        super().reset()

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        error = self._wait()
        if error:
            raise error
        recalled = {row.slot: tree for row in rows if (tree := self._recall(row))}
        missed = [row for row in rows if row.slot not in recalled]
        begun = [
            tree for tree in recalled.values() if tree.frontier and tree.level < tree.row.depth
        ]
        drafts = {slot: tree.finish(self.inner.vocab) for slot, tree in recalled.items()}
        drafts |= zip((row.slot for row in missed), self.model.propose(missed), strict=True)
        drafts |= zip((tree.row.slot for tree in begun), self.inner.complete(begun), strict=True)
        return [drafts[row.slot] for row in rows]

    def begin_overlap(self, rows: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        """The target is about to verify these drafts: draft on meanwhile, until `end_overlap`. Passes
        of this thread have fewer threads till then."""
        each = max(self.outcomes // max(len(rows), 1), 1)
        made = (self._foresee(row, draft, each) for row, draft in zip(rows, drafts, strict=True))
        foresights = [foresight for foresight in made if foresight]
        if foresights:
            self._foreseen |= {foresight.row.slot: foresight for foresight in foresights}
            self._over.clear()
            self._working = self._thread.submit(self._work, foresights)
            native.share(max(native.threads() - native.reserved(), 1))

    def end_overlap(self) -> None:
        """The pass is over: no further one of the model's begins."""
        self._over.set()
        native.share(0)

    def finish(self) -> None:
        """Wait until all is drafted that there is to draft."""
        if self._working:
            wait([self._working])

    def steps(self, foresights: Sequence[_Foresight]) -> Iterator[None]:
        """All that is done ahead, a pass of the model at a time; it may end behind any of them."""
        drafts = [(foresight.draft, range(len(foresight.draft))) for foresight in foresights]
        logits = self.inner.read([foresight.row for foresight in foresights], drafts)
        parts = torch.split(logits, [len(nodes) for _, nodes in drafts])
        for foresight, part in zip(foresights, parts, strict=True):
            foresight.choose(self._ranked(foresight, part), self._odds)
        yield
        while growing := [foresight for foresight in foresights if foresight.growing]:
            grow(
                [b.tree for f in growing for b in f.growing],
                self._feed(growing),
                self.width,
                self._source,
            )
            yield

    @property
    def _source(self) -> str:
        """What statistics call what was drafted ahead."""
        return f"{AHEAD}&{self.inner.source}"

    def _work(self, foresights: Sequence[_Foresight]) -> None:
        native.share(native.reserved())
        for _ in self.steps(foresights):
            if self._over.is_set():
                break

    def _wait(self) -> BaseException | None:
        """Until the other thread is through with the pass it is in; what went wrong there."""
        begun, working, self._working = time.perf_counter(), self._working, None
        self._over.set()
        error = working.exception() if working else None
        self.wait_seconds = time.perf_counter() - begun
        return error

    def _recall(self, row: DraftRequest) -> Tree | None:
        """What was drafted behind what the target said, if anything was, as a tree to go on
        with."""
        foresight, cache = self._foreseen.pop(row.slot, None), self.inner.runner.cache
        if foresight is None:
            return None
        cache.pages.seal(row.slot, row.tokens, cache.length[row.slot])
        cache.pages.shrink(row.slot, len(row.tokens))
        said = row.tokens[len(foresight.row.tokens) :]
        self._odds.learn(foresight, said)
        tree = foresight.behind(said, row)
        self.asked += 1
        self.hits += tree is not None
        return tree

    def _foresee(self, row: DraftRequest, draft: Draft, outcomes: int) -> _Foresight | None:
        """What there is to draft for; None where there is no room, or a token that the model has
        not."""
        row = replace(row, tokens=list(row.tokens))  # which go on while the other thread reads them
        runner, length = self.inner.runner, len(row.tokens)
        lag = row.tokens[runner.cache.length[row.slot] :]
        upto = length + len(draft) - 1 + outcomes * (1 + (row.depth - 1) * self.width)
        if (
            not 0 < len(lag) <= LONGEST_LAG
            or max(*lag, *draft.tokens) >= runner.decoder.config.vocab
        ):
            return None
        if upto > runner.decoder.context or not runner.cache.pages.grow(row.slot, upto):
            return None
        return _Foresight(row, draft, outcomes)

    def _feed(self, foresights: Sequence[_Foresight]) -> Tensor:
        """Read the nodes that were added last; the logits behind each of them."""
        segments = []
        for foresight in foresights:
            offset = len(foresight.parents)
            tokens = [
                foresight.place(b, node) for b in foresight.growing for node in b.tree.frontier
            ]
            want = list(range(len(tokens)))
            segments.append(
                Segment(foresight.row.slot, tokens, foresight.parents, want, offset=offset)
            )
        return self.inner.say(segments)

    def _ranked(self, foresight: _Foresight, logits: Tensor) -> list[list[int]]:
        """Of each node the tokens that the target may say behind it, the likeliest first, without
        its children."""
        row, draft, params = foresight.row, foresight.draft, foresight.row.params
        free = params.greedy or params.unfiltered
        scores = logits.clone() if free else shape_logits(logits, [params] * len(draft)).clone()
        noisy = self.coupled and row.coupled and not params.greedy
        heat = (params.heat if free else 1.0) if noisy else 0.0
        keys = [row.noise.target(depth) for depth in draft.depths()]
        nodes, found = torch.arange(len(draft)), list[list[int]]()
        for node, children in enumerate(draft.children()):
            scores[node, [draft.tokens[child] for child in children]] = -torch.inf
        for _ in range(min(RANKS, foresight.outcomes, scores.shape[1] - len(draft))):
            found.append(sample_tokens(scores, [heat] * len(draft), keys, strict=False))
            scores[nodes, found[-1]] = -torch.inf
            if not free and not torch.isfinite(scores).any(-1).all():
                break
        return [list(tokens) for tokens in zip(*found, strict=True)]


@dataclass(slots=True)
class _Branch:
    """What is drafted behind an outcome, which says `said`: `tree`, as in the round after it.
    `places` are those of its nodes among the uncommitted rows of the slot."""

    said: tuple[int, ...]
    tree: Tree
    places: dict[int, int]


@dataclass(slots=True)
class _Foresight:
    """What is drafted ahead for one request.

    Attributes:
        row, draft: of the round whose draft is verified.
        outcomes: how many are drafted for.
        parents: of the slot's uncommitted rows, of which the first are the draft's nodes.
        ranked: tokens that may be said behind each of these.
    """

    row: DraftRequest
    draft: Draft
    outcomes: int
    parents: list[int] = field(default_factory=list)
    ranked: list[list[int]] = field(default_factory=list)
    branches: list[_Branch] = field(default_factory=list)

    @property
    def growing(self) -> list[_Branch]:
        """Those that are not as deep as drafts are to be."""
        return [b for b in self.branches if b.tree.frontier and b.tree.level < self.row.depth]

    def choose(self, ranked: list[list[int]], odds: _Odds) -> None:
        """Begin with the likeliest outcomes."""
        self.ranked, self.parents = ranked, list(self.draft.parents)
        depths, noise = self.draft.depths(), self.row.noise
        for node, token in odds.likeliest(self.draft, ranked, self.outcomes):
            path = [self.draft.tokens[i] for i in self.draft.path_to(node)[1:]]
            here = replace(noise, root=noise.root + depths[node] + 1)
            tree = Tree(replace(self.row, tokens=(token,), noise=here))
            self.branches.append(_Branch((*path, token), tree, {-1: node}))

    def place(self, branch: _Branch, node: int) -> int:
        """Give a node of a branch the next row; its token."""
        parent = branch.tree.draft.parents[node]
        branch.places[node] = len(self.parents)
        self.parents.append(branch.places[parent])
        return branch.tree.draft.tokens[node]

    def behind(self, said: Sequence[int], row: DraftRequest) -> Tree | None:
        """What was drafted behind what the target said, if there is any, no deeper than `row` asks
        for."""
        for branch in self.branches:
            if branch.said == tuple(said) and len(branch.tree.draft) > 1:
                return branch.tree.until(row)
        return None


class _Odds:
    """How likely outcomes are, by what became of others: counts, discounted."""

    def __init__(self) -> None:
        self.stood, self.fell = 4 * STOOD, 4 * (1 - STOOD)
        start = [TOKEN * (1 - TOKEN) ** rank for rank in range(RANKS)]
        self.ranks = {
            False: list(start),
            True: list(start),
        }  # behind a node with children, and behind one without
        self.ends = {False: 1.0, True: 1.0}

    def likeliest(
        self, draft: Draft, ranked: Sequence[Sequence[int]], count: int
    ) -> list[tuple[int, int]]:
        """(node where the path ends, token behind it) of the likeliest outcomes. By the chance that
        a path ends at a node, the tokens of it become fewer geometrically."""
        rate, depths, children = (
            self.stood / (self.stood + self.fell),
            draft.depths(),
            draft.children(),
        )
        found = []
        for node, tokens in enumerate(ranked):
            stands = (
                draft.path_probs[node - 1] if node and draft.path_probs else rate ** depths[node]
            )
            is_leaf = not children[node]
            ends = stands if is_leaf else stands * (1 - rate)
            chances = [count / self.ends[is_leaf] for count in self.ranks[is_leaf]]
            found += [
                (ends * chance, node, token) for chance, token in zip(chances, tokens, strict=False)
            ]
        return [
            (node, token) for _, node, token in sorted(found, key=lambda each: -each[0])[:count]
        ]

    def learn(self, foresight: _Foresight, said: Sequence[int]) -> None:
        """What the target said instead."""
        path = foresight.draft.match_tokens(said)
        if len(path) != len(said) or not foresight.ranked:
            return
        is_leaf, tokens = not foresight.draft.children()[path[-1]], foresight.ranked[path[-1]]
        self.stood = KEEP * self.stood + len(path) - 1
        self.fell = KEEP * self.fell + (not is_leaf)
        ranks = self.ranks[is_leaf] = [KEEP * count for count in self.ranks[is_leaf]]
        self.ends[is_leaf] = KEEP * self.ends[is_leaf] + 1
        if said[-1] in tokens:
            ranks[tokens.index(said[-1])] += 1
