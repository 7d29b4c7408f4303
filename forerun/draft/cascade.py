"""Cascades, `a>b`: a cheap drafter drafts for a draft model, which checks that in one pass and hands on what it says.

Under `match` the tokens are those that the draft model says alone, with the target's own noise, so its drafts are the
same and only cost less. Under the ratio rules what comes of checking are exact samples of the draft model's law,
however many they are, since where they end depends on those before alone (a stopping time): so that law is q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from forerun import rng
from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.model import DraftModel
from forerun.draft.tree import Tree, grow
from forerun.sampling.filters import shape_logits
from forerun.types import Draft, Law, States
from forerun.verify import Noise
from forerun.verify.token import verify_chain

INNER = 0x63617363616465  # makes the noise of the inner level another one than the target's


class Cascade(DraftModel):
    """Chains of `model`, for which `first` drafts. Statistics count a token that both said for both."""

    def __init__(self, first: Proposer, model: DraftModel) -> None:
        super().__init__(model.runner, model.vocab, 1, f"{first.name}>{model.name}")
        self.first, self.model = first, model
        self.boundaries, self.learns = first.boundaries, first.learns
        self._said: dict[int, Draft] = {}  # by slot, for the time of a round: what `first` drafted

    @property
    def source(self) -> str:
        return self.model.source

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        super().open(slot, tokens, references, tenant)
        self.first.open(slot, tokens, references, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self.first.close(slot, finished)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        self.first.observe(slot, start, features)

    def learn(self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        self.first.learn(slot, before, tokens, logits)

    def forget(self) -> None:
        self.first.forget()

    def reset(self) -> None:
        super().reset()
        self.first.reset()

    def masks(self, row: Row) -> list[int]:
        return self._said[row.slot].tokens[1:]

    def _say_first(self, trees: Sequence[Tree]) -> None:
        rows = [tree.row for tree in trees]
        drafts = self.first.propose([_inner(row) for row in rows])
        self._said = {row.slot: self._readable(draft, row) for row, draft in zip(rows, drafts, strict=True)}
        logits, start = self._read(rows), 0
        for tree in trees:
            draft = self._said[tree.row.slot]
            keep = self._follow if tree.row.coupled else self._verify
            keep(tree, draft, logits[start : start + len(draft)])
            start += len(draft)

    def _readable(self, draft: Draft, row: Row) -> Draft:
        """As much of a draft as the model has tokens for."""
        vocab = min(self.runner.decoder.config.vocab, self.vocab)
        strange = (i for i, token in enumerate(draft.tokens) if token >= vocab)
        return draft.first(min(next(strange, len(draft)) - 1, row.depth))

    def _follow(self, tree: Tree, draft: Draft, logits: Tensor) -> None:
        """Let the model say its own tokens, as long as they are those that were drafted, and one more."""
        for node in range(min(len(draft), tree.row.depth)):
            grow([tree], logits[node : node + 1], 1, self.source)
            if draft.tokens[node + 1 : node + 2] != tree.draft.tokens[-1:]:
                break
            tree.draft.sources[-1] = f"{draft.sources[node + 1]}&{self.source}"
        tree.fed = len(tree.draft) - 1

    def _verify(self, tree: Tree, draft: Draft, logits: Tensor) -> None:
        """Tokens of the model's law by rejection sampling, and what that law was behind each of those before them."""
        row, noise = tree.row, _inner(tree.row).noise
        laws = shape_logits(logits, [row.params] * len(draft)).double().softmax(-1).cpu().numpy()
        verdict = verify_chain(draft, laws, noise)
        for node, token in enumerate(verdict.tokens[: row.depth]):
            kept = node + 1 < len(verdict.path)
            source = f"{draft.sources[node + 1]}&{self.source}" if kept else self.source
            tree.laws[node] = laws[node]
            tree.frontier = [tree.draft.add(token, node, source, Law.SAMPLED)]
        tree.fed = len(tree.draft) - 1


def _inner(row: Row) -> Row:
    """How a drafter is asked to draft for the model: a chain, and with noise of its own where laws count."""
    noise = row.noise if row.coupled else Noise(rng.mix(row.noise.seed ^ INNER), row.noise.root)
    return replace(row, branching=False, stands=None, floor=0.0, noise=noise)
