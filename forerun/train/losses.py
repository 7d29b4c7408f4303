"""Losses of drafters, and the accepted length that they lead to.

In this module p is the target's next-token distribution and q the drafter's, both as natural
logarithms [..., O] in float32 over the same O outcomes. The outcomes are the whole vocabulary, or
the target's likeliest tokens and "any other token" (`Distribution`); KL and TV are then those of
the coarser distributions, which are at most those of the full ones. A probability of zero is a
logarithm of -inf and contributes its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FULL_VOCAB = 8192  # largest vocabulary whose distributions are kept in full
# Positions whose logits exist at once: over ten thousand tokens they fit into a cache of a few MB.
CHUNK = 128


@dataclass(slots=True)
class Distribution:
    """The target's next-token distributions at some positions.

    Attributes:
        token_ids: int64 [..., k], the likeliest tokens, or None if the outcomes are the vocabulary.
        log_probs: float32 [..., k + 1], the last one for all other tokens together; or [..., V].
    """

    token_ids: Tensor | None
    log_probs: Tensor

    def at(self, index: Tensor | slice | tuple[Tensor | slice, Tensor | slice]) -> Distribution:
        """Select positions by a mask, by indices or by a slice. [...] -> [M]"""
        token_ids = None if self.token_ids is None else self.token_ids[index]
        return Distribution(token_ids, self.log_probs[index])

    def restricted_to(self, ids: Tensor | None) -> Distribution:
        """Express the distributions in the token numbers of a drafter that knows only the tokens
        `ids` [Vd] (None: all). Tokens that it lacks are removed, so probabilities sum to less
        than 1."""
        if ids is None:
            return self
        if self.token_ids is None:
            return Distribution(None, self.log_probs[..., ids])
        numbers = _index_of(ids, int(self.token_ids.max()) + 1)[self.token_ids]
        likeliest = torch.where(numbers < len(ids), self.log_probs[..., :-1], -torch.inf)
        return Distribution(numbers, torch.cat((likeliest, self.log_probs[..., -1:]), -1))

    def normalised(self) -> Distribution:
        """Scale the probabilities to sum to 1; each distribution must have a possible outcome."""
        return Distribution(self.token_ids, self.log_probs.log_softmax(-1))

    def log_probs_of(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of drafter logits [..., V] over the same outcomes, float32.
        Differentiable."""
        logits = logits.float()
        if self.token_ids is None:
            return logits.log_softmax(-1)
        total = logits.logsumexp(-1, keepdim=True)
        logits = F.pad(logits, (0, 1), value=-torch.inf)  # stands for tokens that it lacks
        others = logits.scatter(-1, self.token_ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat((logits.gather(-1, self.token_ids), others), -1) - total


def concatenate(parts: Sequence[Distribution]) -> Distribution:
    """Concatenate distributions along their first axis."""
    token_ids = [part.token_ids for part in parts if part.token_ids is not None]
    log_probs = torch.cat([part.log_probs for part in parts])
    return Distribution(torch.cat(token_ids) if token_ids else None, log_probs)


def distribution_of(logits: Tensor, top: int) -> Distribution:
    """Return the distributions of target logits [..., V]: in full for a small vocabulary, else
    the `top` likeliest tokens and the rest."""
    if logits.shape[-1] <= FULL_VOCAB or top >= logits.shape[-1]:
        return Distribution(None, logits.float().log_softmax(-1))
    likeliest = logits.topk(top).indices
    return Distribution(likeliest, Distribution(likeliest, logits).log_probs_of(logits))


def token_log_probs(probs: Distribution, logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of `tokens` [M] under logits [M, V], whose distributions
    `distribution_of` returned. float32 [M]"""
    if probs.token_ids is None:
        return probs.log_probs.gather(-1, tokens[:, None])[:, 0]
    # the likeliest token is always possible, so its log-probability gives the normaliser
    total = logits.gather(-1, probs.token_ids[:, :1]).float() - probs.log_probs[:, :1]
    return (logits.gather(-1, tokens[:, None]).float() - total)[:, 0]


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits [..., V] by the temperature; at 0 leave the first of the likeliest tokens."""
    logits = logits.float()
    if temperature:
        return logits / temperature
    return torch.full_like(logits, -torch.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)


def _index_of(ids: Tensor, vocab: int) -> Tensor:
    """Map each of `vocab` tokens to its index in `ids` [Vd], or to Vd. int64 [vocab]"""
    size = max(vocab, int(ids.max()) + 1)
    found = torch.full((size,), len(ids), dtype=torch.int64, device=ids.device)
    found[ids] = torch.arange(len(ids), device=ids.device)
    return found


def draft_numbers(tokens: Tensor, ids: Tensor | None, vocab: int) -> tuple[Tensor, Tensor]:
    """Translate target tokens into the numbers of a drafter that knows the tokens `ids` [Vd] of
    `vocab` (None: all).

    Returns:
        (numbers [...] int64, 0 for unknown tokens; known [...] bool).
    """
    if ids is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    numbers = _index_of(ids, vocab)[tokens]
    known = numbers < len(ids)
    return torch.where(known, numbers, 0), known


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q); infinite where q excludes an outcome of p. [..., O] x 2 -> [...]"""
    return torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1)


def tv(p: Tensor, q: Tensor) -> Tensor:
    """Total variation, one minus the best acceptance rate. [..., O] x 2 -> [...]"""
    return 1 - torch.minimum(p.exp(), q.exp()).sum(-1)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log q(token). [..., V], [...] -> [...]"""
    return logits.float().logsumexp(-1) - logits.float().gather(-1, tokens[..., None])[..., 0]


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """A weighted sum of losses; one of weight 0 is not computed."""

    kl: float = 0.0
    tv: float = 0.0
    ce: float = 0.0

    def __call__(self, probs: Distribution, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of each position: target distributions [...], drafter logits [..., V],
        tokens of the text [...] -> [...]"""
        total = torch.zeros(tokens.shape, device=logits.device)
        if self.kl or self.tv:
            q = probs.log_probs_of(logits)
            if self.kl:
                total = total + self.kl * kl(probs.log_probs, q)
            if self.tv:
                total = total + self.tv * tv(probs.log_probs, q)
        if self.ce:
            total = total + self.ce * cross_entropy(logits, tokens)
        return total


def zero_loss(module: nn.Module) -> Tensor:
    """Return the loss of a batch without a learned position: zero, with zero gradients."""
    return next(module.parameters()).sum() * 0.0


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average the values where the mask is true; 0 if it is nowhere. Other values may be anything,
    NaN included. [...] x 2 -> scalar"""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


Losses = Callable[[Tensor, slice], Tensor]


def chunked_sum(hidden: Tensor, module: nn.Module, losses: Losses) -> Tensor:
    """Sum `losses(hidden[part], part)` [P] over chunks of hidden [M, H].

    The logits of thousands of positions over a vocabulary are gigabytes. Here the gradient of a
    chunk is computed right after its loss, while its logits are in the cache. Gradients flow to
    `hidden` and to the parameters of `module` that the losses use.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weights):
        return torch.stack([losses(hidden[part], part).sum() for part in _chunks(hidden)]).sum()
    total: Tensor = _ChunkedSum.apply(losses, hidden, *weights)  # type: ignore[no-untyped-call]
    return total


def _chunks(hidden: Tensor) -> list[slice]:
    count = len(hidden)
    return [slice(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)] or [slice(0, 0)]


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Losses, hidden: Tensor, *weights: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        gradients: list[Tensor | None] = [None] * len(weights)
        for part in _chunks(hidden):
            with torch.enable_grad():
                chunk = hidden[part].detach().requires_grad_()
                value = losses(chunk, part).sum()
            own, *others = torch.autograd.grad(value, (chunk, *weights), allow_unused=True)
            hidden_gradient[part] = own
            total += value.detach()
            for i, gradient in enumerate(others):
                known = gradients[i]
                if gradient is not None:
                    gradients[i] = gradient if known is None else known.add_(gradient)
        ctx.save_for_backward(hidden_gradient, *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, *gradients = ctx.saved_tensors
        scaled = (None if gradient is None else gradient * scale for gradient in gradients)
        return None, hidden_gradient * scale, *scaled


# Expected accepted length. A token x drafted from q is accepted with the probability
# min(1, q(x) / p(x)), independently of all others once the text is fixed (Leviathan et al.
# 2211.17192). Along a text that the target wrote, the rounds of the engine are therefore a renewal
# process. Its expected number of forward passes is a sum over the positions where rounds may begin.
# Averaging the draft length over all positions instead would overestimate: rounds begin where a
# draft has just failed, which is where tokens are hard to guess.


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """The part of a text in which the engine drafts: rounds begin at tokens `first` to `end` - 1,
    and token `end` is the last of the text. `limit` is the last position the text could have had:
    no draft goes beyond it."""

    first: int
    end: int
    limit: int


def acceptance_probs(p: Tensor, q: Tensor) -> Tensor:
    """min(1, q / p) from log-probabilities of the text's tokens; 0 where q excludes them."""
    return torch.where(q == -torch.inf, 0.0, (q - p).clamp(max=0).exp())


def expected_passes(acceptance: np.ndarray, span: DraftSpan) -> float:
    """Return the expected number of target passes in a span.

    Args:
        acceptance: [N, K], the probability at [i, k] that the (k + 1)th token drafted after token
            i is accepted if those before it were.
    """
    depth = acceptance.shape[1]
    begins = np.zeros(span.end + depth + 2)  # probability that a round begins at a position
    begins[span.first] = 1.0
    for i in range(span.first, span.end):
        reached = begins[i]
        allowed = min(depth, max(span.limit - i - 1, 0))
        for k in range(allowed):
            # tokens drafted beyond the end of the text do not count
            accepted = acceptance[i, k] if i + k + 1 <= span.end else 1.0
            begins[i + k + 1] += reached * (1 - accepted)
            reached *= accepted
        begins[i + allowed + 1] += reached
    return float(begins[span.first : span.end].sum())


def accepted_length(acceptance: Tensor, spans: Sequence[DraftSpan]) -> float:
    """Return the expected tokens per target pass over all texts, acceptance [B, N, K]; 1.0 if no
    pass drafts."""
    rows = acceptance.double().cpu().numpy()
    tokens = sum(span.end - span.first for span in spans)
    passes = sum(expected_passes(row, span) for row, span in zip(rows, spans, strict=True))
    return tokens / passes if passes else 1.0


def sliding_windows(values: Tensor, depth: int) -> Tensor:
    """Repeat per-position values for a drafter whose distribution depends on the text alone: entry
    [b, i, k] is value [b, i + k], and 0 beyond the end. [B, N] -> [B, N, depth]"""
    return F.pad(values, (0, depth - 1)).unfold(1, depth, 1)
