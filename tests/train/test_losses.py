"""Losses are compared with naive references; their gradients, and the expected accepted length."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forerun.train import losses as losses_module
from forerun.train.losses import (
    FULL_VOCAB,
    DistillationLoss,
    Distribution,
    DraftSpan,
    acceptance_probs,
    accepted_length,
    at_temperature,
    chunked_sum,
    cross_entropy,
    distribution_of,
    expected_passes,
    kl,
    masked_mean,
    sliding_windows,
    tv,
)

P = [[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]]
Q = [[0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0]]


def logs(probs: list[list[float]]) -> Tensor:
    return torch.tensor(probs).log()


def naive_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_kl_and_tv_of_small_distributions() -> None:
    """Zeros of p add nothing; KL is infinite where q excludes an outcome."""
    expected = [naive_kl(p, q) for p, q in zip(P, Q, strict=True)]
    assert kl(logs(P), logs(Q)).tolist() == pytest.approx(expected, abs=1e-6)
    assert tv(logs(P), logs(Q)).tolist() == pytest.approx([0.25, 0.4, 0.5], abs=1e-6)
    assert kl(logs(P), logs(P)).tolist() == tv(logs(P), logs(P)).tolist() == [0.0] * 3
    assert kl(logs(Q), logs(P))[0] == math.inf
    assert tv(logs([P[2]]), logs([[0.0, 0.0, 0.0, 1.0]])).item() == 1


def test_cross_entropy_equals_that_of_torch() -> None:
    logits, tokens = torch.randn(10, 7), torch.randint(7, (10,))
    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    assert torch.allclose(cross_entropy(logits, tokens), expected)


def test_a_large_vocabulary_keeps_the_likeliest_tokens_and_one_for_the_rest() -> None:
    torch.manual_seed(0)
    p_logits, q_logits = torch.randn(2, 3, FULL_VOCAB + 1) * 4, torch.randn(2, 3, FULL_VOCAB + 1)
    probs = distribution_of(p_logits, 5)
    assert probs.token_ids.shape == (2, 3, 5) and probs.log_probs.shape == (2, 3, 6)
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    for at in [(0, 0), (1, 2)]:
        top = p[at].topk(5).indices
        p_top, q_top = ([*x[at][top].tolist(), 1 - x[at][top].sum().item()] for x in (p, q))
        assert probs.log_probs[at].exp().tolist() == pytest.approx(p_top, abs=1e-6)
        assert probs.log_probs_of(q_logits)[at].exp().tolist() == pytest.approx(q_top, abs=1e-6)
    coarse = tv(probs.log_probs, probs.log_probs_of(q_logits))
    assert (coarse <= tv(p_logits.log_softmax(-1), q_logits.log_softmax(-1)) + 1e-6).all()
    small = distribution_of(torch.randn(3, 9), 2)
    assert small.token_ids is None and small.log_probs.shape == (3, 9)


@pytest.mark.parametrize("full", [True, False])
def test_distributions_are_restricted_to_a_smaller_vocabulary(full: bool) -> None:
    """Tokens outside of it are removed; "any other token" keeps its probability."""
    torch.manual_seed(0)
    p, ids, logits = torch.randn(3, 12).softmax(-1), torch.tensor([1, 4, 5, 9]), torch.randn(3, 4)
    q = logits.softmax(-1)
    if full:
        probs = Distribution(None, p.log()).restricted_to(ids)
        assert torch.allclose(probs.log_probs.exp(), p[:, ids])
        assert torch.equal(probs.log_probs_of(logits), logits.log_softmax(-1))
        assert torch.allclose(probs.normalised().log_probs.exp().sum(-1), torch.ones(3))
        return
    top = torch.tensor([[4, 0, 9], [1, 5, 11], [2, 3, 4]])
    rest = 1 - p.gather(-1, top).sum(-1, keepdim=True)
    probs = Distribution(top, torch.cat((p.gather(-1, top), rest), -1).log()).restricted_to(ids)
    indices = [[1, 4, 3], [0, 2, 4], [4, 4, 1]]
    assert probs.token_ids is not None and probs.token_ids.tolist() == indices
    found = probs.log_probs_of(logits).exp()
    for row in range(3):
        known = [n for n in indices[row] if n < 4]
        expected_p = [
            p[row, t].item() if n < 4 else 0.0 for t, n in zip(top[row], indices[row], strict=True)
        ]
        expected_q = [q[row, n].item() if n < 4 else 0.0 for n in indices[row]]
        assert probs.log_probs[row, :3].exp().tolist() == pytest.approx(expected_p)
        assert found[row, :3].tolist() == pytest.approx(expected_q)
        assert found[row, 3].item() == pytest.approx(1 - q[row, known].sum().item(), abs=1e-6)


@pytest.mark.parametrize("vocab", [12, FULL_VOCAB + 1])
def test_impossible_tokens_pass_finite_gradients(vocab: int) -> None:
    """In float32 the other tokens have a log-probability of -inf."""
    sharp = torch.zeros(2, vocab)
    sharp[:, :3] = 500.0
    probs, logits = distribution_of(sharp, 3), torch.randn(2, vocab, requires_grad=True)
    DistillationLoss(1, 1, 1)(probs, logits, torch.tensor([0, 5])).sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad.abs().sum() > 0


def test_the_distillation_loss_is_a_weighted_sum_and_its_gradient_descends() -> None:
    probs, logits = distribution_of(torch.randn(5, 20) * 3, 9), torch.randn(5, 20)
    tokens, q = torch.arange(5), logits.log_softmax(-1)
    parts = 0.5 * kl(probs.log_probs, q) + 2 * tv(probs.log_probs, q)
    expected = parts + 0.1 * cross_entropy(logits, tokens)
    assert torch.allclose(DistillationLoss(0.5, 2, 0.1)(probs, logits, tokens), expected)
    start = torch.zeros(5, 20, dtype=torch.bfloat16, requires_grad=True)
    for loss in (DistillationLoss(kl=1), DistillationLoss(tv=1), DistillationLoss(ce=1)):
        before = loss(probs, start, tokens)
        (gradient,) = torch.autograd.grad(before.sum(), start)
        assert before.dtype == torch.float32
        assert loss(probs, start - gradient, tokens).sum() < before.sum()


def test_masked_mean_and_temperature() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 8.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0
    shaped = at_temperature(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 0.0)
    assert shaped.softmax(-1).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert at_temperature(torch.tensor([[1.0, 3.0]]), 0.5).tolist() == [[2.0, 6.0]]


class Head(nn.Module):
    """A head with an unused module and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.unused = nn.Linear(8, 30), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(hidden * self.frozen)
        return logits


@pytest.mark.parametrize("count", [0, 1, 7, 8, 29])
def test_chunked_sums_have_the_gradients_of_a_single_pass(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_module, "CHUNK", 7)
    torch.manual_seed(count)
    head, below = Head(), nn.Linear(8, 8)
    x, tokens = torch.randn(count, 8), torch.randint(30, (count,))
    probs, loss = Distribution(None, torch.randn(count, 30).log_softmax(-1)), DistillationLoss(1, 1)
    sizes: list[int] = []

    def losses(hidden: Tensor, part: slice) -> Tensor:
        sizes.append(len(hidden))
        return loss(probs.at(part), head(hidden), tokens[part])

    single = losses(below(x), slice(None)).sum() * 3
    single.backward()
    parameters = (*head.parameters(), *below.parameters())
    expected = [None if p.grad is None else p.grad.clone() for p in parameters]
    for module in (head, below):
        module.zero_grad()
    sizes.clear()
    chunked = chunked_sum(below(x), head, losses) * 3
    chunked.backward()
    assert max(sizes) <= 7 and sum(sizes) == count
    assert torch.allclose(chunked, single, rtol=1e-5)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(chunked_sum(below(x), head, losses) * 3, single, rtol=1e-5)


def simulated_passes(acceptance: np.ndarray, span: DraftSpan, dice: np.random.Generator) -> int:
    at, passes = span.first, 0
    while at < span.end:
        passes += 1
        allowed, kept = min(acceptance.shape[1], span.limit - at - 1), 0
        while kept < allowed and (at + kept >= span.end or dice.random() < acceptance[at, kept]):
            kept += 1
        at += kept + 1
    return passes


@pytest.mark.parametrize("limit", [30, 34, 90])
def test_expected_passes_are_those_of_simulated_rounds(limit: int) -> None:
    dice = np.random.default_rng(1)
    acceptance = sliding_windows(torch.tensor(dice.random(40) ** 0.3)[None], 3)
    span = DraftSpan(4, 30, limit)
    mean = np.mean([simulated_passes(acceptance[0].numpy(), span, dice) for _ in range(2000)])
    assert expected_passes(acceptance[0].numpy(), span) == pytest.approx(mean, rel=0.015)
    assert accepted_length(acceptance, [span]) == pytest.approx(26 / mean, rel=0.015)


def test_the_expected_length_is_that_of_exact_speculation() -> None:
    """The mean over all texts of a vocabulary of two equals that of the token rule's rounds."""
    p, q, depth, count = np.array([0.7, 0.3]), np.array([0.4, 0.6]), 2, 4
    expected = 0.0
    for text in itertools.product((0, 1), repeat=count):
        accepted = [
            acceptance_probs(torch.tensor(p[t]).log(), torch.tensor(q[t]).log()) for t in text
        ]
        along = torch.tensor([[0.0, *accepted]])
        acceptance = sliding_windows(along, depth)[0].numpy()
        passes = expected_passes(acceptance, DraftSpan(1, count + 1, count + 1))
        expected += np.prod(p[list(text)]) * passes
    alpha = np.minimum(p, q).sum()

    def passes_for(left: int) -> float:
        if left == 0:
            return 0.0
        allowed = min(depth, left - 1)
        kept = [alpha**k * (1 - alpha if k < allowed else 1.0) for k in range(allowed + 1)]
        return 1 + sum(prob * passes_for(left - k - 1) for k, prob in enumerate(kept))

    assert expected == pytest.approx(passes_for(count), rel=1e-6)


def test_extreme_accepted_lengths_and_the_end_of_a_text() -> None:
    always, never = torch.ones(1, 20, 4), torch.zeros(1, 20, 4)
    assert accepted_length(never, [DraftSpan(2, 20, 20)]) == 1
    assert accepted_length(always, [DraftSpan(5, 20, 40)]) == 5
    assert accepted_length(always, [DraftSpan(19, 19, 40)]) == 1
    acceptance, span = torch.rand(1, 12, 3), DraftSpan(1, 9, 50)
    beyond = acceptance.clone()
    beyond[0, 9:] = beyond[0, 8, 1:] = beyond[0, 7, 2] = 0
    assert accepted_length(acceptance, [span]) == accepted_length(beyond, [span])
    beyond[0, 7, 0] = 0
    assert accepted_length(acceptance, [span]) != accepted_length(beyond, [span])
    p = torch.tensor([0.5, 0.2, 0.2, 1.0, 0.0, 0.0]).log()
    q = torch.tensor([0.25, 0.4, 0.0, 1.0, 0.0, 0.3]).log()
    assert acceptance_probs(p, q).tolist() == pytest.approx([0.5, 1, 0, 1, 0, 1])
