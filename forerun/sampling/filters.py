"""Logits to scores: every sampling parameter, applied per tree node with that node's own
hypothetical prefix.

Scores are log-probabilities up to a constant per row; what a filter forbids is -inf, and a greedy
row keeps its argmax alone. A row's scores depend on that row only, never on the rest of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.draw import check_finite, gumbel_argmax, sample_tokens, scale_by_temperature
from forerun.sampling.matcher import Matcher
from forerun.sampling.params import SamplingParams
from forerun.types import Draft

UNFILTERED = 0, 1.0, 0.0  # top_k, top_p and min_p that keep every token
MOST_SELECTED = 1024  # top_k up to which the likeliest tokens are selected rather than sorted out


class SamplingState:
    """What the filters must remember of one request: parameters, tokens counted by penalties, place
    in the grammar."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_ids: Sequence[int],
        grammar: Matcher | None = None,
    ) -> None:
        """`end_ids` are the tokens that stop this request: min_tokens keeps them out. `grammar` is
        its own."""
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
        """(how often the output has each token, which tokens prompt or output have), beside logits
        of one node: brought up to date with what is new, so that a long text costs a step no more
            than a short one. [V], [V]"""
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(len(row), device=row.device)
            self._seen = _with(
                torch.zeros(len(row), dtype=torch.bool, device=row.device), self.prompt_tokens
            )
            self._uncounted = list(self.output_counts.elements())
        if self._uncounted:
            self._counts, self._seen = (
                _counted(self._counts, self._uncounted),
                _with(self._seen, self._uncounted),
            )
            self._uncounted = []
        return self._counts, self._seen

    def bias(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of logit_bias and their amounts."""
        if self._bias is None:
            ids = torch.tensor(list(self.params.logit_bias), device=logits.device)
            amounts = torch.tensor(
                list(self.params.logit_bias.values()), dtype=logits.dtype, device=logits.device
            )
            self._bias = ids, amounts
        return self._bias


def _with(seen: Tensor, tokens: Collection[int]) -> Tensor:
    return seen.index_fill(
        0, torch.tensor(list(tokens), dtype=torch.long, device=seen.device), True
    )


def _counted(counts: Tensor, tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor(tokens, device=counts.device)
    return counts.index_add(0, ids, torch.ones(len(tokens), device=counts.device))


def filter_logits(
    logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState]
) -> Tensor:
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
    return shape_logits(
        logits, [s.params for d, s in zip(drafts, states, strict=True) for _ in d.tokens]
    )


def _adjust(logits: Tensor, draft: Draft, state: SamplingState) -> None:
    """Grammar, bias, penalties and min_tokens of one request, in place. [N, V]"""
    params, device = state.params, logits.device
    if state.grammar:
        logits.masked_fill_(
            _forbidden(state.grammar.masks(draft), logits.shape[1]).to(device), -math.inf
        )
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
    return torch.from_numpy(
        np.unpackbits(~packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
    )


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


def draw_tokens(
    logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState], keys: list[int]
) -> list[int]:
    """The target's own token after each node: a draw from what `filter_logits` gives, which is not
    made where only temperatures count. `keys`: the stream of noise of each node."""
    if any(
        state.special or not (state.params.greedy or state.params.unfiltered) for state in states
    ):
        with torch.inference_mode():
            return gumbel_argmax(filter_logits(logits, drafts, states), keys).tolist()
    return sample_tokens(
        logits, [s.params.heat for d, s in zip(drafts, states, strict=True) for _ in d.tokens], keys
    )


def shape_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, top-k, top-p and min-p, each row with its own parameters. [M, V], M parameters
    -> scores [M, V]"""
    scores = scale_by_temperature(logits, [p.heat for p in params])
    filters = [
        UNFILTERED if p.greedy else p.filters for p in params
    ]  # of one token there is nothing to filter
    kinds = set(filters)
    if len(kinds) == 1:
        return _cut(scores, *filters[0])
    result = torch.empty_like(scores)
    for (
        kind
    ) in kinds:  # all rows with the same filters at once: what a row computes depends on it alone
        rows = torch.tensor(
            [i for i, own in enumerate(filters) if own == kind], device=scores.device
        )
        result[rows] = _cut(scores[rows], *kind)
    return result


def _cut(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Scores [M, V] of which the top_k likeliest stay (ties at the border with them), of these the
    nucleus, and of that what min_p leaves."""
    vocab = scores.shape[-1]
    if not 0 < top_k <= MOST_SELECTED or top_k >= vocab:
        return _cut_sorted(scores, top_k, top_p, min_p)
    values, index = scores.topk(
        top_k + 1, dim=-1
    )  # sorting a whole vocabulary takes as long as a small model's pass
    tied = (values[:, -1] == values[:, -2]) & ~torch.isneginf(values[:, -1])
    index, order = index[:, :-1].sort(
        dim=-1
    )  # so that equal scores stand in the order of their tokens
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    values = _likely(_nucleus(values, top_p), min_p)
    result = torch.full_like(scores, -math.inf).scatter_(-1, index.gather(-1, order), values)
    if tied.any():
        result[tied] = _cut_sorted(scores[tied], top_k, top_p, min_p)
    return result


def _cut_sorted(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The same, where more of the vocabulary may stay."""
    if 0 < top_k < scores.shape[-1] or top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        if 0 < top_k < scores.shape[-1]:
            ordered = ordered.masked_fill(ordered < ordered[:, top_k - 1 : top_k], -math.inf)
        scores = torch.empty_like(scores).scatter_(-1, index, _nucleus(ordered, top_p))
    return _likely(scores, min_p)


def _likely(scores: Tensor, min_p: float) -> Tensor:
    """Scores of tokens that are at least min_p times as likely as the likeliest."""
    if not min_p:
        return scores
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -math.inf)


def _nucleus(ordered: Tensor, top_p: float) -> Tensor:
    """Scores in descending order without those behind the first ones whose probability reaches
    top_p."""
    if top_p >= 1:  # a rounded sum must not cut anything
        return ordered
    probs = ordered.softmax(-1)
    cut = probs.cumsum(-1) - probs >= top_p
    cut[:, 0] = False  # the likeliest token stays, however small top_p
    return ordered.masked_fill(cut, -math.inf)
