"""From logits to scores: every sampling parameter, applied at each draft node with the text before
it.

Scores are log-probabilities up to a constant per row; what a filter forbids is -inf, and a greedy
row keeps its argmax alone. The scores of a row depend on that row only, never on the rest of the
batch.
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
MAX_SELECTED = 1024  # top_k up to which tokens are selected; the vocabulary is sorted otherwise


class SamplingState:
    """One request's parameters, the tokens that penalties count, and its grammar's state."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_ids: Sequence[int],
        grammar: Matcher | None = None,
    ) -> None:
        """`end_ids` are the tokens that stop this request, which min_tokens forbids."""
        self.params = params
        self.grammar = grammar
        self.end_ids = sorted(set(end_ids))
        self.produced = 0
        self.prompt_tokens = set(prompt) if params.has_penalties else set()
        self.output_counts: Counter[int] = Counter()
        self._uncounted: list[int] = []
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None

    @property
    def special(self) -> bool:
        """True if a filter needs more than the row's own logits."""
        params = self.params
        if params.logit_bias or params.has_penalties or self.grammar is not None:
            return True
        return self.produced < params.min_tokens

    def append(self, token: int) -> None:
        """Count one committed output token."""
        self.produced += 1
        if self.params.has_penalties:
            self.output_counts[token] += 1
            self._uncounted.append(token)
        if self.grammar:
            self.grammar.advance(token)

    def history(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts [V] of the output's tokens, and bool [V] of those in prompt or output.

        They are on the device of `row`, the logits of one node. Only new tokens are counted, so
        that a long text costs a step no more than a short one.
        """
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(len(row), device=row.device)
            nothing = torch.zeros(len(row), dtype=torch.bool, device=row.device)
            self._seen = _add_seen(nothing, self.prompt_tokens)
            self._uncounted = list(self.output_counts.elements())
        if self._uncounted:
            self._counts = _add_counts(self._counts, self._uncounted)
            self._seen = _add_seen(self._seen, self._uncounted)
            self._uncounted = []
        return self._counts, self._seen

    def bias(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of logit_bias and their amounts."""
        if self._bias is None:
            bias = self.params.logit_bias
            ids = torch.tensor(list(bias), device=logits.device)
            amounts = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
            self._bias = ids, amounts
        return self._bias


def _add_seen(seen: Tensor, tokens: Collection[int]) -> Tensor:
    ids = torch.tensor(list(tokens), dtype=torch.long, device=seen.device)
    return seen.index_fill(0, ids, True)


def _add_counts(counts: Tensor, tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor(tokens, device=counts.device)
    return counts.index_add(0, ids, torch.ones(len(tokens), device=counts.device))


def draw_tokens(
    logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState], keys: list[int]
) -> list[int]:
    """Draw the target's own token after each node, from the scores of `filter_logits`, which are
    not computed where only temperatures count.

    `keys`: the key of each node's noise.
    """
    params = _params_of_nodes(drafts, states)
    if any(s.special or not (s.params.greedy or s.params.unfiltered) for s in states):
        with torch.inference_mode():
            return gumbel_argmax(filter_logits(logits, drafts, states), keys).tolist()
    return sample_tokens(logits, [p.sampling_temperature for p in params], keys)


def _params_of_nodes(
    drafts: Sequence[Draft], states: Sequence[SamplingState]
) -> list[SamplingParams]:
    return [s.params for d, s in zip(drafts, states, strict=True) for _ in d.tokens]


def filter_logits(
    logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState]
) -> Tensor:
    """Return the scores of the token after each node.

    Args:
        logits: [M, V] raw target logits, the nodes of all drafts one after the other.
        drafts: one tree per request.
        states: the sampling state of each request.

    Returns:
        [M, V] scores in the dtype of the logits.

    Raises:
        StateError: logits are not finite.
    """
    check_finite(logits)
    if any(state.special for state in states):
        logits = logits.clone()
        parts = torch.split(logits, [len(draft) for draft in drafts])
        for part, draft, state in zip(parts, drafts, states, strict=True):
            if state.special:
                _adjust(part, draft, state)
    return shape_logits(logits, _params_of_nodes(drafts, states))


def _adjust(logits: Tensor, draft: Draft, state: SamplingState) -> None:
    """Apply grammar, bias, penalties and min_tokens of one request, in place. [N, V]"""
    params = state.params
    if state.grammar:
        forbidden = _forbidden(state.grammar.masks(draft), logits.shape[1])
        logits.masked_fill_(forbidden.to(logits.device), -math.inf)
    if params.logit_bias:
        ids, amounts = state.bias(logits)
        logits[:, ids] += amounts
    for node, depth in enumerate(draft.depths()):
        if params.has_penalties:
            _penalise(logits[node], state, [draft.tokens[i] for i in draft.path_to(node)[1:]])
        if state.produced + depth < params.min_tokens:
            _forbid(logits[node], state.end_ids)


def _forbidden(masks: Sequence[bytes], vocab: int) -> Tensor:
    """Return the tokens that are not in sets of one bit per token. bool [N, V]"""
    packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
    bits = np.unpackbits(~packed, axis=1, count=vocab, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def _forbid(row: Tensor, tokens: Sequence[int]) -> None:
    """Forbid tokens, in place, unless they are all that a grammar has left. [V]"""
    before = row[tokens]
    row[tokens] = -math.inf
    if torch.isneginf(row.amax()):
        row[tokens] = before


def _penalise(row: Tensor, state: SamplingState, path: Sequence[int]) -> None:
    """Apply repetition, presence and frequency penalties of a node behind `path`, in place. [V]"""
    params = state.params
    counts, seen = state.history(row)
    if path:
        counts = _add_counts(counts, path)
        seen = _add_seen(seen, path)
    penalty = params.repetition_penalty
    if penalty is not None and penalty != 1.0:
        penalised = torch.where(row > 0, row / penalty, row * penalty)
        row.copy_(torch.where(seen, penalised, row))
    if params.presence_penalty or params.frequency_penalty:
        amounts = params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
        row -= torch.where(counts > 0, amounts, torch.zeros_like(amounts))


def shape_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, each row with its own parameters.

    [M, V], M parameters -> scores [M, V]
    """
    scores = scale_by_temperature(logits, [p.sampling_temperature for p in params])
    # A greedy row has one token left: there is nothing to filter.
    filters = [UNFILTERED if p.greedy else p.filters for p in params]
    kinds = set(filters)
    if len(kinds) == 1:
        return _filter(scores, *filters[0])
    result = torch.empty_like(scores)
    for kind in kinds:  # rows do not depend on each other, so equal filters can be batched
        rows = [i for i, own in enumerate(filters) if own == kind]
        index = torch.tensor(rows, device=scores.device)
        result[index] = _filter(scores[index], *kind)
    return result


def _filter(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Keep the top_k likeliest tokens with ties at the border, of these the nucleus, and of that
    what min_p leaves. [M, V]"""
    vocab = scores.shape[-1]
    if not 0 < top_k <= MAX_SELECTED or top_k >= vocab:
        return _filter_sorted(scores, top_k, top_p, min_p)
    # Sorting the whole vocabulary takes as long as a small model's forward pass.
    values, index = scores.topk(top_k + 1, dim=-1)
    is_tied = (values[:, -1] == values[:, -2]) & ~torch.isneginf(values[:, -1])
    # Equal scores are in the order of their tokens, as in a stable sort.
    index, order = index[:, :-1].sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    values = _apply_min_p(_apply_top_p(values, top_p), min_p)
    result = torch.full_like(scores, -math.inf).scatter_(-1, index.gather(-1, order), values)
    if is_tied.any():
        result[is_tied] = _filter_sorted(scores[is_tied], top_k, top_p, min_p)
    return result


def _filter_sorted(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Apply the filters of `_filter` for any top_k."""
    has_top_k = 0 < top_k < scores.shape[-1]
    if has_top_k or top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        if has_top_k:
            ordered = ordered.masked_fill(ordered < ordered[:, top_k - 1 : top_k], -math.inf)
        scores = torch.empty_like(scores).scatter_(-1, index, _apply_top_p(ordered, top_p))
    return _apply_min_p(scores, min_p)


def _apply_min_p(scores: Tensor, min_p: float) -> Tensor:
    if not min_p:
        return scores
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -math.inf)


def _apply_top_p(ordered: Tensor, top_p: float) -> Tensor:
    """Keep the first of descending scores whose probability reaches top_p."""
    if top_p >= 1:  # a rounded sum must not cut anything
        return ordered
    probs = ordered.softmax(-1)
    cut = probs.cumsum(-1) - probs >= top_p
    cut[:, 0] = False  # the likeliest token stays, however small top_p is
    return ordered.masked_fill(cut, -math.inf)
