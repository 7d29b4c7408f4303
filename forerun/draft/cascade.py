"""Cascades, `a>b`: a cheap drafter drafts for a draft model, which verifies that in one forward
pass.

Under `match` the tokens are those that the draft model alone would draft with the target's own
noise, so its drafts are the same and only cost less. Under the ratio rules verification returns
exact samples of the draft model's distribution, however many they are: where they end depends on
the tokens before alone (a stopping time), so that distribution is q.

A first drafter that is a draft model drafts again behind the verified tokens until the draft is as
deep as it should be; one that copies is asked once. `CascadeDepth` decides how deep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun import rng
from forerun.cache.attention import Segment
from forerun.costs import MIN_SECONDS, Curve
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import CompositeProposer, DraftRequest, Proposer
from forerun.draft.tree import Tree, grow
from forerun.kernels.draw import shape_scores
from forerun.types import Draft, Proposal
from forerun.verify.ratio import verify_token

INNER_SEED = 0x63617363616465  # makes the first drafter's noise independent of the target's
MAX_DEPTH = 8  # of drafts for the model
PAUSED_ROUNDS = 16  # rounds without such drafts after they did not pay
DECAY = 0.98  # of the acceptance counts, per round
MAX_MEASURED_LAG = 32  # tokens a model may have missed; reading more would distort the costs


class Cascade(CompositeProposer, DraftModel):
    """Chains of `model`, for which `first` drafts. A token that both chose counts for both in
    statistics."""

    def __init__(self, first: Proposer, model: DraftModel) -> None:
        super().__init__(model.runner, model.vocab, 1, f"{first.name}>{model.name}")
        self.first = first
        self.model = model
        self.told = (first, model)
        self.aux_hidden_layers = first.aux_hidden_layers
        self.wants_logits = first.wants_logits
        self.policy = CascadeDepth()

    @property
    def source(self) -> str:
        return self.model.source

    def _start(self, trees: Sequence[Tree]) -> None:
        requests = [tree.request for tree in trees]
        length = self.runner.cache.length

        def read(drafts: Sequence[Draft]) -> Tensor:
            return self.read(requests, [(draft, range(len(draft))) for draft in drafts])

        lags = [len(request.tokens) - length[request.slot] - 1 for request in requests]
        self._round(trees, self._depth(trees), read, lags)

    def _continue(self, trees: Sequence[Tree]) -> None:
        depth = self._depth(trees) if isinstance(self.first, DraftModel) else 0
        if depth:
            self._round(
                trees, depth, lambda drafts: self.forward(list(map(_segment, trees, drafts)))
            )
            return
        begun = time.thread_time()
        level = trees[0].level
        super()._continue(trees)
        seconds = time.thread_time() - begun
        self.policy.forward_costs.add(len(trees), seconds / (trees[0].level - level))

    def _depth(self, trees: Sequence[Tree]) -> int:
        """Return how deep the first drafter drafts; the model adds one token to what it accepts."""
        remaining = max(tree.request.depth - tree.level for tree in trees)
        return self.policy.depth(remaining - 1, len(trees))

    def _round(
        self,
        trees: Sequence[Tree],
        depth: int,
        read: Callable[[Sequence[Draft]], Tensor],
        lags: Sequence[int] = (0,),
    ) -> None:
        """Let the first drafter draft, and the model verify.

        Args:
            depth: of the first drafter's drafts, 0 for none.
            read: returns the model's logits after each node of these drafts.
            lags: the tokens before them that the model has missed.
        """
        begun = time.thread_time()
        drafts = [Draft.root(tree.draft.tokens[-1]) for tree in trees]
        if depth:
            drafts = self._first_drafts(trees, depth)
        drafted = time.thread_time()
        logits = read(drafts)
        counts = [len(draft) for draft in drafts]
        if max(lags) <= MAX_MEASURED_LAG:
            verifying = time.thread_time() - drafted
            self.policy.record(depth, drafted - begun, sum(lags) + sum(counts), verifying)
        for tree, draft, rows in zip(trees, drafts, torch.split(logits, counts), strict=True):
            before = len(tree.draft)
            if tree.request.coupled:
                self._follow(tree, draft, rows)
            else:
                self._verify(tree, draft, rows)
            self.policy.learn(len(draft) - 1, len(tree.draft) - before - 1)

    def _first_drafts(self, trees: Sequence[Tree], depth: int) -> list[Draft]:
        """Return the first drafter's chains behind the last node of each tree."""
        if not isinstance(self.first, DraftModel):
            requests = [
                _inner_request(tree.request, 0, min(depth, tree.request.depth)) for tree in trees
            ]
            drafts = self.first.propose(requests)
            return [self._readable(d, r) for r, d in zip(requests, drafts, strict=True)]
        begun = []
        for tree in trees:
            last = len(tree.draft) - 1
            request = _inner_request(tree.request, last, min(last + depth, tree.request.depth - 1))
            inner = Tree(request, frontier=[last])
            inner.draft = tree.draft.first(last)
            begun.append(inner)
        drafts = self.first.complete(begun)
        return [
            self._readable(draft.behind(len(tree.draft) - 1), tree.request)
            for tree, draft in zip(trees, drafts, strict=True)
        ]

    def _readable(self, draft: Draft, request: DraftRequest) -> Draft:
        """Cut a draft to the request's depth, and before tokens that the model does not have."""
        vocab = min(self.runner.decoder.config.vocab, self.vocab)
        unknown = (node for node, token in enumerate(draft.tokens) if token >= vocab)
        return draft.first(min(next(unknown, len(draft)) - 1, request.depth))

    def _follow(self, tree: Tree, draft: Draft, logits: Tensor) -> None:
        """Add the model's own tokens as long as they are the drafted ones, and one more."""
        for node in range(min(len(draft), tree.request.depth - tree.level)):
            grow([tree], logits[node : node + 1], 1, self.source)
            if draft.tokens[node + 1 : node + 2] != tree.draft.tokens[-1:]:
                break
            tree.draft.sources[-1] = f"{draft.sources[node + 1]}&{self.source}"
        tree.fed = len(tree.draft) - 1

    def _verify(self, tree: Tree, draft: Draft, logits: Tensor) -> None:
        """Add tokens of the model's distribution by rejection sampling, with the distributions that
        they were drawn from."""
        request = tree.request
        last = len(tree.draft) - 1
        scores = shape_scores(logits, [request.params.sampling] * len(draft))
        probs = scores.double().softmax(-1).cpu().numpy()
        verdict = verify_token(draft, probs, _inner_request(request, last, request.depth).noise)
        for node, token in enumerate(verdict.tokens[: request.depth - last]):
            is_accepted = node + 1 < len(verdict.path)
            source = f"{draft.sources[node + 1]}&{self.source}" if is_accepted else self.source
            tree.probs[last + node] = probs[node]
            tree.frontier = [tree.draft.add(token, last + node, source, Proposal.SAMPLED)]
        tree.fed = len(tree.draft) - 1


class CascadeDepth:
    """The depth that gives the draft model most tokens per second, by measured costs and counted
    acceptance.

    Attributes:
        forward_costs: seconds of the model's forward pass by its number of tokens.
        draft_costs: seconds of the first drafter by depth.
        accepted, rejected: discounted counts of the first drafter's tokens.
        paused_rounds: rounds without drafts that are left.
    """

    def __init__(self) -> None:
        self.forward_costs = Curve(slope=0.1)
        self.draft_costs = Curve(slope=0.3)
        self.accepted = 2.0
        self.rejected = 1.0
        self.paused_rounds = 0

    def depth(self, limit: int, requests: int) -> int:
        """Return the best depth, at most `limit`; 0 is followed by a pause and then a new try."""
        limit = min(limit, MAX_DEPTH)
        self.paused_rounds = max(self.paused_rounds - 1, 0)
        if limit < 1 or self.paused_rounds:
            return 0
        speeds = [
            self._expected_tokens(depth) / self._expected_seconds(depth, requests)
            for depth in range(limit + 1)
        ]
        best = speeds.index(max(speeds))
        if best == 0:
            self.paused_rounds = PAUSED_ROUNDS
        return max(best, 1)

    def record(self, depth: int, drafting: float, num_tokens: int, verifying: float) -> None:
        """Add the seconds of a round: of drafting, and of verifying `num_tokens` tokens."""
        self.forward_costs.add(num_tokens, max(verifying, MIN_SECONDS))
        if depth:
            self.draft_costs.add(depth, max(drafting, MIN_SECONDS))

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the tokens of a chain."""
        if drafted:
            accepted = min(accepted, drafted)
            self.accepted = DECAY * self.accepted + accepted
            self.rejected = DECAY * self.rejected + (1 if accepted < drafted else 0)

    def _expected_tokens(self, depth: int) -> float:
        rate = self.accepted / (self.accepted + self.rejected)
        return sum(rate**level for level in range(depth + 1))

    def _expected_seconds(self, depth: int, requests: int) -> float:
        """Return the seconds of a round; an unmeasured draft counts a tenth of a forward pass per
        level."""
        plain = self.forward_costs.at(requests) or 1.0
        verifying = self.forward_costs.at(requests * (1 + depth)) or plain
        drafting = self.draft_costs.at(depth) if depth else 0.0
        return verifying + (0.1 * depth * plain if drafting is None else drafting)


def _segment(tree: Tree, draft: Draft) -> Segment:
    """Return the unread nodes of a tree, and a chain behind its last node."""
    tokens = tree.draft.tokens[tree.fed :] + draft.tokens[1:]
    parents = list(range(-1, tree.fed + len(tokens) - 1))
    wanted = list(range(len(tokens)))
    return Segment(tree.request.slot, tokens, parents, wanted, offset=tree.fed)


def _inner_request(request: DraftRequest, last: int, depth: int) -> DraftRequest:
    """Return the request for a chain behind node `last` of a tree. Where distributions count, its
    noise is independent of the target's."""
    noise = request.noise
    if not request.coupled:
        noise = replace(noise, seed=rng.mix(noise.seed ^ (INNER_SEED + last)))
    return replace(
        request, branching=False, confidence_rates=None, min_prob=0.0, noise=noise, depth=depth
    )
