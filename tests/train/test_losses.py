"""Losses: against naive references, at their finite cases, with their limits, and that gradients
stay finite."""

import math

import pytest
import torch

from forerun.train.losses import (
    FULL,
    Law,
    Mixture,
    at_temperature,
    ce_hard,
    kl,
    masked_mean,
    probs_of,
    tv,
)

P = [[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]]
Q = [[0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0]]


def logs(law: list[list[float]]) -> torch.Tensor:
    return torch.tensor(law).log()


def naive_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_finite_cases() -> None:
    """Zeros of p add nothing; equal laws are at no distance; a law against one that forbids it is
    infinitely far."""
    expected = [naive_kl(p, q) for p, q in zip(P, Q, strict=True)]
    assert kl(logs(P), logs(Q)).tolist() == pytest.approx(expected, abs=1e-6)
    assert tv(logs(P), logs(Q)).tolist() == pytest.approx([0.25, 0.4, 0.5], abs=1e-6)
    assert kl(logs(P), logs(P)).tolist() == tv(logs(P), logs(P)).tolist() == [0.0] * 3
    assert (
        kl(logs(Q), logs(P))[0] == math.inf
        and tv(logs([P[2]]), logs([[0.0, 0.0, 0.0, 1.0]])).item() == 1
    )


def test_cross_entropy_is_torchs() -> None:
    logits, tokens = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), reduction="none"
    )
    assert torch.allclose(ce_hard(logits, tokens).flatten(), expected)


def test_laws_of_a_large_vocabulary_keep_the_likeliest_and_the_rest() -> None:
    """A drafter's law over the same outcomes adds up to one, and the distances are those of the
    coarser laws."""
    torch.manual_seed(0)
    p_logits, q_logits = torch.randn(2, 3, FULL + 1) * 4, torch.randn(2, 3, FULL + 1) * 4
    law = probs_of(p_logits, 5)
    assert law.tokens is not None and law.tokens.shape == (2, 3, 5) and law.logs.shape == (2, 3, 6)
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    for at in [(0, 0), (1, 2)]:
        top = sorted(range(FULL + 1), key=lambda i: -p[at][i])[:5]
        mine = [*(p[at][i].item() for i in top), 1 - sum(p[at][i].item() for i in top)]
        theirs = [*(q[at][i].item() for i in top), 1 - sum(q[at][i].item() for i in top)]
        assert law.logs[at].exp().tolist() == pytest.approx(mine, abs=1e-6)
        assert law.of(q_logits)[at].exp().tolist() == pytest.approx(theirs, abs=1e-6)
        assert kl(law.logs, law.of(q_logits))[at].item() == pytest.approx(
            naive_kl(mine, theirs), rel=1e-3
        )
    whole = Law(None, p_logits.log_softmax(-1))
    assert (tv(law.logs, law.of(q_logits)) <= tv(whole.logs, whole.of(q_logits)) + 1e-6).all()


def test_a_small_vocabulary_keeps_its_whole_law() -> None:
    law = probs_of(torch.randn(3, 9), 2)
    assert law.tokens is None and law.logs.exp().sum(-1).tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("vocab", [12, FULL + 1])
def test_a_law_so_sharp_that_nothing_is_left_passes_finite_gradients(vocab: int) -> None:
    """In float32 the other tokens have no probability at all: -inf, which no gradient may see."""
    sharp = torch.zeros(2, vocab)
    sharp[:, :3] = 500.0
    law, logits = probs_of(sharp, 3), torch.randn(2, vocab, requires_grad=True)
    Mixture(1, 1, 1)(law, logits, torch.tensor([0, 5])).sum().backward()
    assert (
        logits.grad is not None
        and torch.isfinite(logits.grad).all()
        and logits.grad.abs().sum() > 0
    )


def test_a_mixture_is_its_parts() -> None:
    law, logits, tokens = (
        probs_of(torch.randn(4, 6), 9),
        torch.randn(4, 6),
        torch.tensor([0, 1, 2, 5]),
    )
    q = logits.log_softmax(-1)
    expected = 0.5 * kl(law.logs, q) + 2 * tv(law.logs, q) + 0.1 * ce_hard(logits, tokens)
    assert torch.allclose(Mixture(0.5, 2, 0.1)(law, logits, tokens), expected)
    assert torch.equal(Mixture(tv=1)(law, logits, tokens), tv(law.logs, q))


def test_losses_fall_along_their_gradient_and_are_float32_of_anything() -> None:
    law, logits = (
        probs_of(torch.randn(5, 20) * 3, 9),
        torch.zeros(5, 20, dtype=torch.bfloat16, requires_grad=True),
    )
    for mixture in (Mixture(kl=1), Mixture(tv=1), Mixture(ce=1)):
        loss = mixture(law, logits, torch.arange(5))
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert mixture(law, logits - gradient, torch.arange(5)).sum() < loss.sum()


def test_the_mean_is_over_what_counts() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 8.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0


def test_at_no_temperature_one_token_is_left() -> None:
    shaped = at_temperature(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 0.0)
    assert shaped.softmax(-1).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert at_temperature(torch.tensor([[1.0, 3.0]]), 0.5).tolist() == [[2.0, 6.0]]
