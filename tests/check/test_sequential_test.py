"""The sequential test rejects biased samplers and never correct ones; its bounds hold."""

import numpy as np
import pytest

from forerun.check.sequential_test import ALPHA, SequentialTest

PROBS = np.array([0.5, 0.3, 0.15, 0.05])


def run(probs, tokens, seed):
    """Test tokens drawn from `probs` against PROBS; also return whether it ever rejected."""
    test, ever = SequentialTest(len(PROBS)), False
    for token in np.random.default_rng(seed).choice(len(probs), size=tokens, p=probs):
        test.add(np.arange(len(PROBS)) == token, PROBS)
        ever = ever or test.rejected
    return test, ever


def test_the_right_distribution_is_never_rejected_at_any_token():
    """With 24,000 evaluations at ALPHA = 1e-4, even one rejection would be a bug."""
    assert not any(run(PROBS, 400, seed)[1] for seed in range(60))


def test_capital_is_a_martingale():
    """The expected capital over all strings of three tokens is exactly 1."""
    strings = np.stack(np.meshgrid(*[range(4)] * 3), -1).reshape(-1, 3)
    expected = 0.0
    for string in strings:
        test = SequentialTest(len(PROBS))
        for token in string:
            test.add(np.arange(len(PROBS)) == token, PROBS)
        expected += PROBS[string].prod() * test.evidence
    assert expected == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("bias, within", [(0.1, 1500), (0.04, 8000)])
def test_a_wrong_distribution_is_rejected(bias, within):
    wrong = PROBS + np.array([-bias, bias, 0, 0])
    for seed in range(5):
        test, ever = run(wrong, within, seed)
        assert ever
        assert test.evidence > 1 / ALPHA
        assert test.bias[1] == pytest.approx(bias, abs=test.bound())


@pytest.mark.parametrize("occurs", [True, False])
def test_impossible_events_are_rejected_within_a_few_tokens(occurs):
    """An event of probability 0 occurs, or one of probability 1 does not; capital stays finite."""
    test = SequentialTest(1)
    for token in range(5000):
        test.add([occurs], [float(not occurs)])
        assert test.rejected or token < 29
    assert np.isfinite(test.evidence)


def test_the_bound_covers_the_bias_and_shrinks():
    assert SequentialTest(1).bound() == 1.0
    widths = []
    for tokens in (100, 1000, 10_000):
        test, _ = run(PROBS, tokens, seed=tokens)
        assert all(abs(e) <= test.bound() for e in test.bias)
        widths.append(test.bound())
    assert widths[0] > widths[1] > widths[2] and widths[2] < 0.03
