"""Logits to scores: every sampling parameter, applied per tree node with that node's own hypothetical prefix.

Scores are log-probabilities up to a constant per row; what a filter forbids is -inf, and a greedy row keeps its
argmax alone. A row's scores depend on that row only, never on the rest of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.draw import check_finite, gumbel_argmax, say, temper
from forerun.sampling.matcher import Matcher
from forerun.sampling.params import SamplingParams
from forerun.types import Draft

UNFILTERED = 0, 1.0, 0.0  # top_k, top_p and min_p that keep every token


class SamplingState:
    """What the filters must remember of one request: parameters, tokens counted by penalties, place in the grammar."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int], grammar: Matcher | None = None
    ) -> None:
        """`end_ids` are the tokens that stop this request: min_tokens keeps them out. `grammar` is its own."""
        self.params, self.grammar = params, grammar
        self.end_ids = sorted(set(end_ids))
        self.produced = 0
        self.prompt_tokens = set(prompt) if params.penalised else set()
        self.output_counts: Counter[int] = Counter()
        self._uncounted: list[int] = []
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None

    @property
    def special(self) -> bool:
        """Whether a filter needs more than the row's own logits."""
        params = self.params
        adjusted = bool(params.logit_bias) or params.penalised or self.produced < params.min_tokens
        return adjusted or self.grammar is not None

    def append(self, token: int) -> None:
        """Count one committed output token."""
        self.produced += 1
        if self.params.penalised:
            self.output_counts[token] += 1
            self._uncounted.append(token)
        if self.grammar:
            self.grammar.advance(token)

    def history(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """(how often the output has each token, which tokens prompt or output have), beside logits of one node: brought
        up to date with what is new, so that a long text costs a step no more than a short one. [V], [V]"""
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(len(row), device=row.device)
            self._seen = _with(torch.zeros(len(row), dtype=torch.bool, device=row.device), self.prompt_tokens)
            self._uncounted = list(self.output_counts.elements())
        if self._uncounted:
            self._counts, self._seen = _counted(self._counts, self._uncounted), _with(self._seen, self._uncounted)
            self._uncounted = []
        return self._counts, self._seen

    def bias(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of logit_bias and their amounts."""
        if self._bias is None:
            ids = torch.tensor(list(self.params.logit_bias), device=logits.device)
            amounts = torch.tensor(list(self.params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
            self._bias = ids, amounts
        return self._bias


def _with(seen: Tensor, tokens: Collection[int]) -> Tensor:
    return seen.index_fill(0, torch.tensor(list(tokens), dtype=torch.long, device=seen.device), True)


def _counted(counts: Tensor, tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor(tokens, device=counts.device)
    return counts.index_add(0, ids, torch.ones(len(tokens), device=counts.device))


def filter_logits(logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState]) -> Tensor:
    """The scores of the token after each node.

    Args:
        logits: [M, V] raw target logits, the nodes of all drafts one after the other.
        drafts: one tree a request.
        states: the sampling state of each request.

    Returns:
        [M, V] scores in the dtype of the logits.

    Raises:
        StateError: logits are not finite.
    """
    check_finite(logits)
    if any(state.special for state in states):
        logits = logits.clone()
        rows = torch.split(logits, [len(draft) for draft in drafts])
        for own, draft, state in zip(rows, drafts, states, strict=True):
            if state.special:
                _adjust(own, draft, state)
    return shape_logits(logits, [s.params for d, s in zip(drafts, states, strict=True) for _ in d.tokens])


def _adjust(logits: Tensor, draft: Draft, state: SamplingState) -> None:
    """Grammar, bias, penalties and min_tokens of one request, in place. [N, V]"""
    params, device = state.params, logits.device
    if state.grammar:
        logits.masked_fill_(_forbidden(state.grammar.masks(draft), logits.shape[1]).to(device), -math.inf)
    if params.logit_bias:
        ids, amounts = state.bias(logits)
        logits[:, ids] += amounts
    for node, depth in enumerate(draft.depths()):
        if params.penalised:
            _penalise(logits[node], state, [draft.tokens[i] for i in draft.path_to(node)[1:]])
        if state.produced + depth < params.min_tokens:
            _keep_out(logits[node], state.end_ids)


def _forbidden(masks: Sequence[bytes], vocab: int) -> Tensor:
    """Sets of allowed tokens, a bit each, to the tokens that are not in them. bool [N, V]"""
    packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
    return torch.from_numpy(np.unpackbits(~packed, axis=1, count=vocab, bitorder="little").view(np.bool_))


def _keep_out(row: Tensor, tokens: Sequence[int]) -> None:
    """Forbid tokens, in place, unless they are all that a grammar has left. [V]"""
    before = row[tokens]
    row[tokens] = -math.inf
    if torch.isneginf(row.amax()):
        row[tokens] = before


def _penalise(row: Tensor, state: SamplingState, path: Sequence[int]) -> None:
    """Repetition, presence and frequency penalties of one node behind `path`, in place. [V]"""
    params = state.params
    counts, seen = state.history(row)
    if path:
        counts, seen = _counted(counts, path), _with(seen, path)
    if params.damping != 1.0:
        damped = torch.where(row > 0, row / params.damping, row * params.damping)
        row.copy_(torch.where(seen, damped, row))
    if params.presence_penalty or params.frequency_penalty:
        amounts = params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
        row -= torch.where(counts > 0, amounts, torch.zeros_like(amounts))


def draw_tokens(logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState], keys: list[int]) -> list[int]:
    """The target's own token after each node: a draw from what `filter_logits` gives, which is not made where only
    temperatures count. `keys`: the stream of noise of each node."""
    if any(state.special or not (state.params.greedy or state.params.unfiltered) for state in states):
        with torch.inference_mode():
            return gumbel_argmax(filter_logits(logits, drafts, states), keys).tolist()
    return say(logits, [s.params.heat for d, s in zip(drafts, states, strict=True) for _ in d.tokens], keys)


def shape_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, top-k, top-p and min-p, each row with its own parameters. [M, V], M parameters -> scores [M, V]"""
    scores = temper(logits, [p.heat for p in params])
    filters = [UNFILTERED if p.greedy else p.filters for p in params]  # of one token there is nothing to filter
    if any(k or p < 1 for k, p, _ in filters):
        scores = _top_k_top_p(scores, [k for k, _, _ in filters], [p for _, p, _ in filters])
    if any(share for _, _, share in filters):
        floors = [math.log(share) if share else -math.inf for _, _, share in filters]
        floor = torch.tensor(floors, dtype=scores.dtype, device=scores.device)[:, None]
        scores = scores.masked_fill(scores < floor + scores.amax(-1, keepdim=True), -math.inf)
    return scores


def _top_k_top_p(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    vocab, device = scores.shape[-1], scores.device
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    kept = torch.tensor([min(k, vocab) or vocab for k in top_k], device=device)
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, kept[:, None] - 1), -math.inf)
    if any(p < 1 for p in top_p):
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        # a rounded sum must not cut anything where top_p is 1
        most = torch.tensor([p if p < 1 else 2.0 for p in top_p], dtype=scores.dtype, device=device)
        cut = before >= most[:, None]
        cut[:, 0] = False  # the likeliest token stays, however small top_p
        ordered = ordered.masked_fill(cut, -math.inf)
    return torch.empty_like(scores).scatter_(-1, index, ordered)
