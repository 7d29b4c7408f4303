"""Losses of drafters. All of them take log-laws in float32 over the same outcomes and give one
value a position.

p is the target's law, q the drafter's, [..., O] natural logarithms over O outcomes. The outcomes
are the vocabulary, or the target's likeliest tokens and "any other" (`Law`): then KL and TV are
those of the coarser laws, which are at most those of the whole ones. A probability of zero is a
logarithm of -inf and adds what its limit is. The mean is over the positions that count, and 0 over
none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FULL = 8192  # largest vocabulary whose whole laws are kept


@dataclass(slots=True)
class Law:
    """The target's laws at some positions.

    Attributes:
        tokens: [..., k] its likeliest tokens, or None: then the outcomes are the vocabulary.
        logs: [..., k + 1] the logarithms of their probabilities and, last, of all other tokens
            together; or [..., V].
    """

    tokens: Tensor | None
    logs: Tensor

    def at(self, where: Tensor | slice | tuple[Tensor | slice, Tensor | slice]) -> Law:
        """The laws of some positions: a mask, indices, or a part of a flat list of them. [...] ->
        [M]"""
        return Law(None if self.tokens is None else self.tokens[where], self.logs[where])

    def over(self, ids: Tensor | None) -> Law:
        """The same laws for a drafter that says the tokens `ids` [Vd] alone, in its own numbers:
        what it cannot say is left out, so that probabilities sum to less than 1. None stands for
        all tokens, in order."""
        if ids is None:
            return self
        if self.tokens is None:
            return Law(None, self.logs[..., ids])
        numbers = places(ids, int(self.tokens.max()) + 1)[self.tokens]
        likeliest = torch.where(numbers < len(ids), self.logs[..., :-1], -torch.inf)
        return Law(numbers, torch.cat((likeliest, self.logs[..., -1:]), -1))

    def whole(self) -> Law:
        """The same, made to sum to 1; something of each law must be left."""
        return Law(self.tokens, self.logs.log_softmax(-1))

    def of(self, logits: Tensor) -> Tensor:
        """The log-law over these outcomes that `logits` [..., V] say, float32; it passes
        gradients."""
        logits = logits.float()
        if self.tokens is None:
            return logits.log_softmax(-1)
        total = logits.logsumexp(-1, keepdim=True)
        logits = F.pad(logits, (0, 1), value=-torch.inf)  # the place of tokens that it cannot say
        others = logits.scatter(-1, self.tokens, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat((logits.gather(-1, self.tokens), others), -1) - total


def places(ids: Tensor, vocab: int) -> Tensor:
    """For each of `vocab` tokens its place among `ids` [Vd], Vd where it is not there. int64
    [vocab]"""
    found = torch.full(
        (max(vocab, int(ids.max()) + 1),), len(ids), dtype=torch.int64, device=ids.device
    )
    found[ids] = torch.arange(len(ids), device=ids.device)
    return found


def numbered(tokens: Tensor, ids: Tensor | None, vocab: int) -> tuple[Tensor, Tensor]:
    """(the numbers that tokens have among `ids`, 0 for those that are not there; which of them
    are): of a drafter that says the tokens `ids` [Vd] of `vocab` alone, None: all. [...] int64 ->
    [...] int64, [...] bool"""
    if ids is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    numbers = places(ids, vocab)[tokens]
    sayable = numbers < len(ids)
    return torch.where(sayable, numbers, 0), sayable


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits as sampling sees them: divided by the temperature; at 0 only the first likeliest is
    left. [..., V]"""
    logits = logits.float()
    if temperature:
        return logits / temperature
    return torch.full_like(logits, -torch.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)


def probs_of(logits: Tensor, top: int) -> Law:
    """The laws that target logits [..., V] say: whole for a small vocabulary, or the `top`
    likeliest and the rest."""
    if logits.shape[-1] <= FULL or top >= logits.shape[-1]:
        return Law(None, logits.float().log_softmax(-1))
    likeliest = logits.topk(top).indices
    return Law(likeliest, Law(likeliest, logits).of(logits))


def said_of(law: Law, logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each of `tokens` [M] behind logits [M, V] whose law `probs_of` has
    made. float32 [M]"""
    if law.tokens is None:
        return law.logs.gather(-1, tokens[:, None])[:, 0]
    total = (
        logits.gather(-1, law.tokens[:, :1]).float() - law.logs[:, :1]
    )  # the likeliest is never impossible
    return (logits.gather(-1, tokens[:, None]).float() - total)[:, 0]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) = sum p (log p - log q). Infinite where q forbids what p allows. [..., O] x 2 ->
    [...]"""
    return torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1)


def tv(p: Tensor, q: Tensor) -> Tensor:
    """The total variation 1 - sum min(p, q): one minus the best possible acceptance. [..., O] x 2
    -> [...]"""
    return 1 - torch.minimum(p.exp(), q.exp()).sum(-1)


def ce_hard(logits: Tensor, tokens: Tensor) -> Tensor:
    """The cross entropy with a token, -log q(token). [..., V], [...] -> [...]"""
    return logits.float().logsumexp(-1) - logits.float().gather(-1, tokens[..., None])[..., 0]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the losses; one of weight 0 is not computed."""

    kl: float = 0.0
    tv: float = 0.0
    ce: float = 0.0

    def __call__(self, law: Law, logits: Tensor, tokens: Tensor) -> Tensor:
        """The weighted sum at each position. law [...], drafter's logits [..., V], what the text
        says [...] -> [...]"""
        total = torch.zeros(tokens.shape, device=logits.device)
        if self.kl or self.tv:
            q = law.of(logits)
            total = total + self.kl * kl(law.logs, q) if self.kl else total
            total = total + self.tv * tv(law.logs, q) if self.tv else total
        return total + self.ce * ce_hard(logits, tokens) if self.ce else total


def nothing_learnt(module: nn.Module) -> Tensor:
    """The loss of a batch that no position counts of: zero, with gradients of zero."""
    return next(module.parameters()).sum() * 0.0


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of values where mask is true; 0 where it nowhere is. Values elsewhere may be
    anything, NaN included. values, mask [..., K] -> scalar"""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
