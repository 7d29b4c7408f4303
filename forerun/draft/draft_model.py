"""An independent small model as drafter, with its own KV cache: chains, or trees of `width` nodes
per level. `tree` makes nodes of its logits.

Cascades, `a>b`: a cheap drafter drafts for a draft model, which verifies that in one forward pass.
Under `match` the tokens are those that the draft model alone would draft with the target's own
noise, so its drafts are the same and only cost less. Under the ratio rules verification returns
exact samples of the draft model's distribution, however many they are: where they end depends on
the tokens before alone (a stopping time), so that distribution is q. A first drafter that is a
draft model drafts again behind the verified tokens until the draft is as deep as it should be; one
that copies is asked once. `CascadeDepth` decides how deep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import rng
from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.costs import MIN_SECONDS, Curve
from forerun.draft.device_chains import REREAD, ModelDrafter
from forerun.draft.proposer import CompositeProposer, DraftRequest, Proposer, Texts, Tokens
from forerun.draft.tree import Tree, grow, grow_all
from forerun.errors import LoadError
from forerun.kernels.draw import shape_scores
from forerun.models.config import ModelConfig
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, Proposal
from forerun.verify.ratio import verify_token

CHUNK = 512  # most tokens of a slot per forward pass while catching up


class DraftModel(Proposer):
    """Proposes what the model of `runner` would generate.

    `vocab` is the target's vocabulary, `width` the number of nodes per level.

    Attributes:
        drafts_by_itself: a drafted token is the one that the model would generate.
    """

    drafts_by_itself = True

    def __init__(self, runner: Runner, vocab: int, width: int = 1, name: str = "model") -> None:
        self.runner = runner
        self.vocab = vocab
        self.width = width
        self.name = name
        self.reading_bytes = runner.decoder.weight_bytes
        self._device_drafter: ModelDrafter | None = None

    @property
    def source(self) -> str:
        """The name of its tokens in statistics."""
        return self.name

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.runner.cache.open(slot, tokens, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.runner.cache.close(slot)

    def reset(self) -> None:
        self.runner.reset()

    def kv(self) -> KVCache:
        return self.runner.cache

    def make_room(self, tokens: int) -> None:
        self.runner.make_room(tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.complete([Tree(request) for request in requests])

    def complete(self, trees: Sequence[Tree]) -> list[Draft]:
        """Grow trees, which may have nodes already, to the depth of their requests."""
        active = [tree for tree in trees if self._has_room(tree.request)]
        if active:
            self._start(active)
        while active := [tree for tree in active if tree.is_growing]:
            self._continue(active)
        return [tree.finish(self.vocab) for tree in trees]

    def _start(self, trees: Sequence[Tree]) -> None:
        """Process the tokens that the slots have missed and the nodes so far, and add a level."""
        requests = [tree.request for tree in trees]
        logits = self.read(requests, [(tree.draft, tree.frontier) for tree in trees])
        for tree in trees:
            tree.fed = len(tree.draft)
        if not self._chain(trees, logits):
            self._grow(trees, logits)

    def _continue(self, trees: Sequence[Tree]) -> None:
        """Add a level, or all that is left to draft."""
        if not self._chain(trees):
            self._grow(trees, self._feed(trees))

    def _grow(self, trees: Sequence[Tree], logits: Tensor) -> None:
        """Add a level below the frontiers; logits [F, V] after each of their nodes."""
        grow(trees, logits, self.width, self.source)

    def _has_room(self, request: DraftRequest) -> bool:
        """Return True if a draft fits the pool and the model's context, and the model has all the
        tokens of the text. The request goes on without a draft otherwise."""
        num_tokens = len(request.tokens) + request.depth * self.width
        decoder, cache = self.runner.decoder, self.runner.cache
        if max(request.tokens[cache.length[request.slot] :]) >= decoder.config.vocab:
            return False
        return num_tokens <= decoder.context and cache.pages.grow(request.slot, num_tokens)

    def read(
        self, requests: Sequence[DraftRequest], drafts: Sequence[tuple[Draft, Sequence[int]]] = ()
    ) -> Tensor:
        """Read and commit the tokens that each slot has missed, and read drafts behind them, which
        are not committed.

        Args:
            drafts: for each request a draft, and its nodes whose logits are wanted; without any,
                the roots alone.

        Returns:
            logits [N, V] after the wanted nodes, request by request.
        """
        self._catch_up(requests)
        cache = self.runner.cache
        drafts = drafts or [(Draft.root(request.tokens[-1]), [0]) for request in requests]
        segments = []
        for request, (draft, nodes) in zip(requests, drafts, strict=True):
            lag = list(request.tokens[cache.length[request.slot] :])
            root = len(lag) - 1
            parents = list(range(-1, root)) + [root + parent for parent in draft.parents[1:]]
            wanted = [root + node for node in nodes]
            segments.append(Segment(request.slot, lag + draft.tokens[1:], parents, wanted))
        logits = self.forward(segments)
        for request in requests:
            slot = request.slot
            cache.commit(slot, range(len(request.tokens) - 1 - cache.length[slot]))
            self.share(slot, request.tokens)
        return logits

    def _catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Process the tokens that slots have missed, except at most the last `CHUNK` ones."""
        length = self.runner.cache.length
        while late := [r for r in requests if len(r.tokens) - length[r.slot] > CHUNK]:
            segments = []
            for request in late:
                start = length[request.slot]
                tokens = list(request.tokens[start : start + CHUNK])
                segments.append(Segment.chain(request.slot, tokens))
            self.forward(segments)
            for request in late:
                self.runner.cache.commit(request.slot, range(CHUNK))

    def _num_shareable(self, slot: int) -> int:
        """Return how many of the committed tokens other slots may share."""
        return self.runner.cache.length[slot]

    def begin_rounds(
        self, requests: Sequence[DraftRequest], num_tokens: int
    ) -> ModelDrafter | None:
        """Prepare rounds on a device that append at most `num_tokens` tokens to each request: read
        what was missed, and reserve the room. None where only `propose` can draft."""
        captured, cache = self.runner.captured, self.runner.cache
        has_all_tokens = self.runner.decoder.config.vocab >= self.vocab
        if captured is None or captured.failed or self.width > 1 or cache.recurrent is not None:
            return None
        if not self.drafts_by_itself or not has_all_tokens:
            return None
        for request in requests:
            room = len(request.tokens) + num_tokens + request.depth
            fits = self._has_room(request) and room <= self.runner.decoder.context
            if not fits or not request.coupled or not cache.pages.grow(request.slot, room):
                return None
        late = [r for r in requests if len(r.tokens) - cache.length[r.slot] > REREAD]
        if late:
            self.read(late)
        if self._device_drafter is None or self._device_drafter.passes is not captured:
            self._device_drafter = ModelDrafter(self, captured)
        return self._device_drafter

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """Let other slots reuse the committed pages of a text."""
        self.runner.cache.pages.seal(slot, tokens, self._num_shareable(slot))

    def _feed(self, trees: Sequence[Tree]) -> Tensor:
        """Read the nodes added last; returns the logits [F, V] after each tree's frontier."""
        segments = []
        for tree in trees:
            draft, first = tree.draft, tree.fed
            wanted = [node - first for node in tree.frontier]
            tokens = draft.tokens[first:]
            segments.append(Segment(tree.request.slot, tokens, draft.parents, wanted, offset=first))
            tree.fed = len(draft)
        return self.forward(segments)

    def _chain(self, trees: Sequence[Tree], logits: Tensor | None = None) -> bool:
        """Finish chains in one native call, or with `logits` [F, V] after each frontier without
        waiting for the device on the way.

        Returns False, and does nothing, where that is impossible: branches, sampled nodes, or a
        model whose passes are neither native nor recorded.
        """
        if self.width > 1 or not all(tree.is_plain for tree in trees):
            return False
        if logits is None:
            chains = self.runner.draft_chains([tree.link(tree.fed) for tree in trees], self.vocab)
        else:
            starts = [tree.link(tree.fed, tree.level) for tree in trees]
            chains = self.runner.draft_chains_from(starts, self.vocab, logits)
        if chains is None:
            return False
        for tree, tokens in zip(trees, chains, strict=True):
            tree.extend(tokens, self.source)
        return True

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Run a forward pass, and cut or pad its logits to the target's vocabulary: models of one
        family differ in the padding of theirs."""
        logits = self.runner.forward(segments).logits[:, : self.vocab]
        missing = self.vocab - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class Pard(DraftModel):
    """A model that predicts all tokens of a draft in one forward pass (PARD, 2504.18583).

    It is an ordinary model that was trained to continue behind mask tokens: `depth - 1` masks stand
    behind the text, the last token of the text predicts the first drafted token and mask j the one
    after the next j. A prediction does not depend on the tokens drafted before it, and masks are
    never committed. The same model drafts for every target of its vocabulary.
    """

    drafts_by_itself = False

    def __init__(self, runner: Runner, token: int, vocab: int, width: int = 1) -> None:
        """`token` is the mask, `vocab` the target's vocabulary."""
        super().__init__(runner, vocab, width)
        self.token = token

    def _start(self, trees: Sequence[Tree]) -> None:
        requests = [tree.request for tree in trees]
        drafts = [Draft.chain(r.tokens[-1], [self.token] * (r.depth - 1), "") for r in requests]
        logits = self.read(requests, [(draft, range(len(draft))) for draft in drafts])
        levels = torch.split(logits, [request.depth for request in requests])
        grow_all(trees, levels, self.width, self.name)


def draft_model(runner: Runner, where: str, vocab: int, width: int) -> DraftModel:
    """Return a draft model, a `Pard` if it was trained as one.

    Args:
        where: its name in messages.

    Raises:
        LoadError: it cannot draft for a target of `vocab` tokens.
    """
    shortlist = runner.decoder.shortlist
    try:
        token = mask_of(runner.decoder.config)
        if shortlist is not None and shortlist[0] >= vocab:
            raise LoadError(f"its shortlist has none of the {vocab} tokens of the target")
    except LoadError as error:
        raise LoadError(f"{where} is no draft model that can be used here: {error}") from None
    return DraftModel(runner, vocab, width) if token is None else Pard(runner, token, vocab, width)


def mask_of(config: ModelConfig) -> int | None:
    """Return the mask token of a PARD model, None for other models. Raises LoadError."""
    kind = config.raw.get("spd_type")
    token = config.raw.get("pard_token")
    if kind not in (None, "pard"):
        raise LoadError(
            f"spd_type in config.json is {kind!r}: of such models only 'pard' is supported"
        )
    if kind is None and token is None:
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab:
        raise LoadError(
            f"pard_token in config.json is {token!r}, not one of its {config.vocab} tokens"
        )
    return token


INNER_SEED = 0x63617363616465  # makes the first drafter's noise independent of the target's
MAX_DEPTH = 8  # of drafts for the model
PAUSED_ROUNDS = 16  # rounds without such drafts after they did not pay
DECAY = 0.98  # of the acceptance counts, per round
MAX_MEASURED_LAG = 32  # tokens a model may have missed; reading more would distort the costs


class Cascade(CompositeProposer, DraftModel):
    """Chains of `model`, for which `first` drafts. A token that both chose counts for both in
    statistics."""

    drafts_by_itself = False

    def __init__(self, first: Proposer, model: DraftModel) -> None:
        super().__init__(model.runner, model.vocab, 1, f"{first.name}>{model.name}")
        self.first = first
        self.model = model
        self.members = (first, model)
        self.reading_bytes = model.reading_bytes
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
        growing = []
        for tree in trees:
            last = len(tree.draft) - 1
            request = _inner_request(tree.request, last, min(last + depth, tree.request.depth - 1))
            inner = Tree(request, frontier=[last])
            inner.draft = tree.draft.first(last)
            growing.append(inner)
        drafts = self.first.complete(growing)
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
