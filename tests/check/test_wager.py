"""The sequential test: right samplers are left alone however long one looks, wrong ones are not,
bounds hold."""

import numpy as np
import pytest

from forerun.check.wager import ALPHA, Wager

LAW = np.array([0.5, 0.3, 0.15, 0.05])


def played(law, tokens, seed):
    """A wager on LAW after tokens drawn from `law`, and whether it was ever refuted on the way."""
    wager, ever = Wager(len(LAW)), False
    for token in np.random.default_rng(seed).choice(len(law), size=tokens, p=law):
        wager.add(np.arange(len(LAW)) == token, LAW)
        ever = ever or wager.refuted
    return wager, ever


def test_the_right_law_is_never_refuted_though_one_looks_after_every_token():
    """24,000 looks: at ALPHA = 1e-4 even one refutation would be a bug."""
    assert not any(played(LAW, 400, seed)[1] for seed in range(60))


def test_capital_is_a_martingale():
    """Exactly: over every string of three tokens, the expected capital is 1."""
    strings = np.stack(np.meshgrid(*[range(4)] * 3), -1).reshape(-1, 3)
    expected = 0.0
    for string in strings:
        wager = Wager(len(LAW))
        for token in string:
            wager.add(np.arange(len(LAW)) == token, LAW)
        expected += LAW[string].prod() * wager.evidence
    assert expected == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("bias, within", [(0.1, 1500), (0.04, 8000)])
def test_a_wrong_law_is_refuted(bias, within):
    wrong = LAW + np.array([-bias, bias, 0, 0])
    for seed in range(5):
        wager, ever = played(wrong, within, seed)
        assert ever
        assert wager.evidence > 1 / ALPHA
        assert wager.excess[1] == pytest.approx(bias, abs=wager.bound())


def test_a_forbidden_token_ends_it_at_once():
    """An event of probability 0 or 1 that goes the other way, again and again."""
    wager = Wager(1)
    for _ in range(30):
        wager.add([True], [0.0])
    assert wager.refuted
    wager = Wager(1)
    for _ in range(30):
        wager.add([False], [1.0])
    assert wager.refuted


def test_the_bound_covers_the_bias_and_shrinks():
    assert Wager(1).bound() == 1.0
    widths = []
    for tokens in (100, 1000, 10_000):
        wager, _ = played(LAW, tokens, seed=tokens)
        assert all(abs(e) <= wager.bound() for e in wager.excess)
        widths.append(wager.bound())
    assert widths[0] > widths[1] > widths[2] and widths[2] < 0.03


def test_capital_does_not_overflow():
    wager = Wager(1)
    for _ in range(5000):
        wager.add([True], [0.0])
    assert wager.refuted and np.isfinite(wager.evidence)
