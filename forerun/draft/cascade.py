"""Cascades, `a>b`: a cheap drafter drafts for a draft model, which checks that in one pass and
hands on what it says.

Under `match` the tokens are those that the draft model says alone, with the target's own noise, so
its drafts are the same and only cost less. Under the ratio rules what comes of checking are exact
samples of the draft model's law, however many they are, since where they end depends on those
before alone (a stopping time): so that law is q.

A draft model drafts again behind what the other one said, until the draft is as deep as it is to
be; who copies is asked once. How deep is decided by what both cost here and by what was accepted
(`Plan`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun import rng
from forerun.cache.attention import Segment
from forerun.costs import TICK, Curve
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import CompositeProposer, DraftRequest, Proposer
from forerun.draft.tree import Tree, grow
from forerun.sampling.filters import shape_logits
from forerun.types import Draft, Proposal
from forerun.verify.token import verify_chain

INNER = 0x63617363616465  # makes the noise of the inner level another one than the target's
DEEPEST = 8  # of what is drafted for the model
REST = 16  # rounds without that, where it did not pay
KEEP = 0.98  # of what was counted of drafts, with each round
SHORT = 32  # tokens that a model may have missed: to read more is another matter than a round


class Cascade(CompositeProposer, DraftModel):
    """Chains of `model`, for which `first` drafts. Statistics count a token that both said for
    both."""

    def __init__(self, first: Proposer, model: DraftModel) -> None:
        super().__init__(model.runner, model.vocab, 1, f"{first.name}>{model.name}")
        self.first, self.model, self.told = first, model, (first, model)
        self.aux_hidden_layers, self.learns, self.plan = (
            first.aux_hidden_layers,
            first.learns,
            Plan(),
        )

    @property
    def source(self) -> str:
        return self.model.source

    def _say_first(self, trees: Sequence[Tree]) -> None:
        def read(drafts: Sequence[Draft]) -> Tensor:
            return self.read(
                [tree.row for tree in trees], [(draft, range(len(draft))) for draft in drafts]
            )

        missed = [
            len(tree.row.tokens) - self.runner.cache.length[tree.row.slot] - 1 for tree in trees
        ]
        self._round(trees, self._depth(trees), read, missed)

    def _go_on(self, trees: Sequence[Tree]) -> None:
        depth = self._depth(trees) if isinstance(self.first, DraftModel) else 0
        if depth:
            self._round(trees, depth, lambda drafts: self.say(list(map(_behind, trees, drafts))))
            return
        begun, level = time.thread_time(), trees[0].level
        super()._go_on(trees)
        self.plan.passes.add(len(trees), (time.thread_time() - begun) / (trees[0].level - level))

    def _depth(self, trees: Sequence[Tree]) -> int:
        """How deep the first is to draft. It leaves the last token of a draft to the model, which
        says one more."""
        return self.plan.depth(max(tree.row.depth - tree.level for tree in trees) - 1, len(trees))

    def _round(
        self,
        trees: Sequence[Tree],
        depth: int,
        read: Callable[[Sequence[Draft]], Tensor],
        missed: Sequence[int] = (0,),
    ) -> None:
        """Let the first draft, and the model check it; `read` gives its logits behind each node of
        these drafts, and reads so many tokens before them that the model had `missed`."""
        begun = time.thread_time()
        drafts = (
            self._drafted(trees, depth)
            if depth
            else [Draft.root(tree.draft.tokens[-1]) for tree in trees]
        )
        drafted = time.thread_time()
        logits = read(drafts)
        if max(missed) <= SHORT:
            rows = sum(missed) + sum(map(len, drafts))
            self.plan.record(depth, drafted - begun, rows, time.thread_time() - drafted)
        for tree, draft, said in zip(
            trees, drafts, torch.split(logits, list(map(len, drafts))), strict=True
        ):
            before = len(tree.draft)
            (self._follow if tree.row.coupled else self._verify)(tree, draft, said)
            self.plan.learn(len(draft) - 1, len(tree.draft) - before - 1)

    def _drafted(self, trees: Sequence[Tree], depth: int) -> list[Draft]:
        """What the first says behind the last node of each tree, so deep at most, as chains from
        there."""
        if not isinstance(self.first, DraftModel):
            rows = [_inner(tree.row, 0, min(depth, tree.row.depth)) for tree in trees]
            return [
                self._readable(draft, row)
                for row, draft in zip(rows, self.first.propose(rows), strict=True)
            ]
        begun = []
        for tree in trees:
            last = len(tree.draft) - 1
            row = _inner(tree.row, last, min(last + depth, tree.row.depth - 1))
            own = Tree(row, frontier=[last])
            own.draft = tree.draft.first(last)
            begun.append(own)
        whole = self.first.complete(begun)
        return [
            self._readable(draft.behind(len(tree.draft) - 1), tree.row)
            for tree, draft in zip(trees, whole, strict=True)
        ]

    def _readable(self, draft: Draft, row: DraftRequest) -> Draft:
        """As much of a draft as the model has tokens for."""
        vocab = min(self.runner.decoder.config.vocab, self.vocab)
        strange = (i for i, token in enumerate(draft.tokens) if token >= vocab)
        return draft.first(min(next(strange, len(draft)) - 1, row.depth))

    def _follow(self, tree: Tree, draft: Draft, logits: Tensor) -> None:
        """Let the model say its own tokens, as long as they are those that were drafted, and one
        more."""
        for node in range(min(len(draft), tree.row.depth - tree.level)):
            grow([tree], logits[node : node + 1], 1, self.source)
            if draft.tokens[node + 1 : node + 2] != tree.draft.tokens[-1:]:
                break
            tree.draft.sources[-1] = f"{draft.sources[node + 1]}&{self.source}"
        tree.fed = len(tree.draft) - 1

    def _verify(self, tree: Tree, draft: Draft, logits: Tensor) -> None:
        """Tokens of the model's law by rejection sampling, and what that law was behind each of
        those before them."""
        row, last = tree.row, len(tree.draft) - 1
        laws = shape_logits(logits, [row.params] * len(draft)).double().softmax(-1).cpu().numpy()
        verdict = verify_chain(draft, laws, _inner(row, last, row.depth).noise)
        for node, token in enumerate(verdict.tokens[: row.depth - last]):
            kept = node + 1 < len(verdict.path)
            source = f"{draft.sources[node + 1]}&{self.source}" if kept else self.source
            tree.probs[last + node] = laws[node]
            tree.frontier = [tree.draft.add(token, last + node, source, Proposal.SAMPLED)]
        tree.fed = len(tree.draft) - 1


class Plan:
    """How deep a drafter drafts for a draft model: as gives it most tokens a second, by what was
    measured here.

    Attributes:
        passes: seconds of a pass of the model by its rows.
        drafts: seconds of the first by depth.
    """

    def __init__(self) -> None:
        self.passes, self.drafts = Curve(slope=0.1), Curve(slope=0.3)
        self.kept, self.lost, self.rest = (
            2.0,
            1.0,
            0,
        )  # tokens that stood and did not, discounted; rounds to rest

    def depth(self, most: int, requests: int) -> int:
        """The best depth, at most `most`; where that is 0, another is tried now and then."""
        most, self.rest = min(most, DEEPEST), max(self.rest - 1, 0)
        if most < 1 or self.rest:
            return 0
        speeds = [self._tokens(depth) / self._seconds(depth, requests) for depth in range(most + 1)]
        best = speeds.index(max(speeds))
        if best == 0:
            self.rest = REST
        return max(best, 1)

    def record(self, depth: int, drafting: float, rows: int, checking: float) -> None:
        """A round took so long: drafting to a depth, and checking it in a pass over so many
        rows."""
        self.passes.add(rows, max(checking, TICK))
        if depth:
            self.drafts.add(depth, max(drafting, TICK))

    def learn(self, drafted: int, kept: int) -> None:
        """Of a chain drafted for the model so many tokens stood."""
        if drafted:
            kept = min(kept, drafted)
            self.kept = KEEP * self.kept + kept
            self.lost = KEEP * self.lost + (kept < drafted)

    def _tokens(self, depth: int) -> float:
        """That are expected of a round."""
        rate = self.kept / (self.kept + self.lost)
        return sum(rate**level for level in range(depth + 1))

    def _seconds(self, depth: int, requests: int) -> float:
        """That a round takes; a draft a tenth of a pass for each level until one was measured."""
        one = self.passes.at(requests) or 1.0
        drafting = self.drafts.at(depth) if depth else 0.0
        return (self.passes.at(requests * (1 + depth)) or one) + (
            0.1 * depth * one if drafting is None else drafting
        )


def _behind(tree: Tree, draft: Draft) -> Segment:
    """What is read of a tree that has been begun, and of a chain behind its last node."""
    tokens = tree.draft.tokens[tree.fed :] + draft.tokens[1:]
    return Segment(
        tree.row.slot,
        tokens,
        list(range(-1, tree.fed + len(tokens) - 1)),
        list(range(len(tokens))),
        offset=tree.fed,
    )


def _inner(row: DraftRequest, last: int, depth: int) -> DraftRequest:
    """How a drafter is asked to draft for the model behind node `last` of its tree: a chain, and
    with noise of its own where laws count."""
    noise = (
        row.noise
        if row.coupled
        else replace(row.noise, seed=rng.mix(row.noise.seed ^ (INNER + last)))
    )
    return replace(row, branching=False, stands=None, floor=0.0, noise=noise, depth=depth)
