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

from forerun.kernels.draw import check_finite, sample_tokens, shape_scores, takes_masks
from forerun.sampling.matcher import Matcher
from forerun.sampling.params import Sampling, SamplingParams
from forerun.types import Draft


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
        self.sampling = params.sampling
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
        return self.grammar is not None or self.special_without_grammar

    @property
    def special_without_grammar(self) -> bool:
        """True if bias, penalties or min_tokens change the row's logits."""
        params = self.params
        return bool(params.logit_bias or params.has_penalties or self.produced < params.min_tokens)

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
    """Draw the target's own token after each node, from the scores of `filter_logits`.

    `keys`: the key of each node's noise.

    Raises:
        StateError: logits are not finite.
    """
    masks: list[bytes | None] = []
    if any(state.special for state in states):
        if takes_masks(logits) and not any(state.special_without_grammar for state in states):
            masks = _masks(drafts, states)
        else:
            with torch.inference_mode():
                logits = adjust_logits(logits, drafts, states)
    return sample_tokens(logits, samplings_of(drafts, states), keys, masks=masks)


def _masks(drafts: Sequence[Draft], states: Sequence[SamplingState]) -> list[bytes | None]:
    """Return the tokens that grammars allow after each node, None where there is no grammar. [M]"""
    found: list[bytes | None] = []
    for draft, state in zip(drafts, states, strict=True):
        found += state.grammar.masks(draft) if state.grammar else [None] * len(draft)
    return found


def samplings_of(drafts: Sequence[Draft], states: Sequence[SamplingState]) -> list[Sampling]:
    """Return how the token after each node of each draft is drawn. [M]"""
    return [s.sampling for d, s in zip(drafts, states, strict=True) for _ in d.tokens]


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
    return shape_scores(adjust_logits(logits, drafts, states), samplings_of(drafts, states))


def adjust_logits(
    logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState]
) -> Tensor:
    """Return the logits [M, V] with what grammar, bias, penalties and min_tokens change.

    Raises:
        StateError: anything is changed and logits are not finite.
    """
    if not any(state.special for state in states):
        return logits
    check_finite(logits)
    logits = logits.clone()
    parts = torch.split(logits, [len(draft) for draft in drafts])
    for part, draft, state in zip(parts, drafts, states, strict=True):
        if state.special:
            _adjust(part, draft, state)
    return logits


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
