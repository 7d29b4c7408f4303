"""Native sampling draws the tokens of its reference, and never a token from logits that are not
finite."""

import ctypes.util
import itertools
import math

import numpy as np
import pytest
import torch

from forerun import rng
from forerun.errors import ForerunError
from forerun.kernels import draw, native
from forerun.kernels.draw import gumbel_argmax, sample_tokens, shape_scores
from forerun.sampling.params import Sampling

# vocabulary and spread of the logits: from near uniform, where many tokens can win, to peaked
CASES = [
    (1, 1.0),
    (7, 1.0),
    (16, 0.0),
    (33, 2.0),
    (301, 0.3),
    (5000, 0.01),
    (5000, 3.0),
    (5000, 40.0),
]


def keys_of(rows):
    return [rng.stream(7, rng.Lane.TARGET, i) for i in range(rows)]


# top_k, top_p and min_p
FILTERS = {
    "none": (0, 1.0, 0.0),
    "top_k": (5, 1.0, 0.0),
    "top_k of one": (1, 1.0, 0.0),
    "top_k of 700": (700, 1.0, 0.0),
    "top_k over the vocabulary": (1 << 31, 1.0, 0.0),
    "top_p": (0, 0.9, 0.0),
    "top_p of nearly 1": (0, 0.9999999, 0.0),
    "top_p of nearly 0": (0, 1e-9, 0.0),
    "min_p": (0, 1.0, 0.05),
    "usual": (40, 0.95, 0.05),
    "top_p and min_p": (0, 0.5, 0.3),
}


@pytest.mark.parametrize(("vocab", "spread"), CASES)
def test_sampled_tokens_are_those_of_the_reference(instructions, vocab, spread):
    """Rows have several temperatures, forbidden tokens, ties, or a single candidate."""
    logits = torch.randn(60, vocab, generator=torch.Generator().manual_seed(4)) * spread
    logits[10:20, 1::2] = -torch.inf
    logits[20:30, 1:] = -torch.inf
    logits[30:40] = logits[30:40].round()
    for name, filters in FILTERS.items():
        samplings = [Sampling((0.0, 1.0, 0.8, 0.05, 3.0)[i % 5], *filters) for i in range(60)]
        expected = rng.gumbel_argmax(shape_scores(logits, samplings), keys_of(60)).tolist()
        assert sample_tokens(logits, samplings, keys_of(60)) == expected, name


@pytest.mark.parametrize("filters", [FILTERS["none"], FILTERS["usual"]], ids=["none", "usual"])
@pytest.mark.parametrize("vocab", [12, 301, 5000])
def test_masks_forbid_tokens_as_minus_infinity_does(instructions, vocab, filters):
    """Some rows have no mask, others sparse and dense ones; masks are shorter than the rows, and
    tokens behind a mask are allowed."""
    dice = torch.Generator().manual_seed(6)
    logits = torch.randn(40, vocab, generator=dice) * 3
    allowed = torch.rand(40, vocab, generator=dice) < torch.linspace(0.02, 1, 40)[:, None]
    allowed[:, 3] = True
    allowed[::4] = True
    num_bytes = vocab // 8
    allowed[:, 8 * num_bytes :] = True
    bits = np.packbits(allowed[:, : 8 * num_bytes].numpy(), axis=1, bitorder="little")
    masks = [None if i % 4 == 0 else bits[i].tobytes() for i in range(40)]
    samplings = [Sampling((0.0, 1.0, 0.8)[i % 3], *filters) for i in range(40)]
    expected = sample_tokens(logits.masked_fill(~allowed, -math.inf), samplings, keys_of(40))
    assert sample_tokens(logits, samplings, keys_of(40), masks=masks) == expected


def test_forbidden_logits_that_are_not_finite_are_an_error(instructions):
    logits = torch.zeros(1, 40)
    logits[0, 30] = math.nan
    with pytest.raises(ForerunError, match="not finite"):
        sample_tokens(logits, [Sampling(1.0)], keys_of(1), masks=[b"\x01\0\0\0\0"])


@pytest.mark.parametrize("top_k", [3, 300])
def test_tokens_tied_at_the_border_of_top_k_can_be_drawn(instructions, top_k):
    """This includes more tied tokens than the kernel keeps at first."""
    logits = torch.zeros(400, 2000)
    logits[:, 0] = 1.0
    by = [Sampling(1.0, top_k)] * 400
    drawn = sample_tokens(logits, by, keys_of(400))
    assert drawn == rng.gumbel_argmax(shape_scores(logits, by), keys_of(400)).tolist()
    assert max(drawn) > top_k


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(instructions, broken):
    """At any position, including the lanes behind the last full vector."""
    for place, temperature in itertools.product((0, 17, 39), (0.0, 1.0)):
        logits = torch.zeros(3, 40)
        logits[1, place] = broken
        for given in (logits, logits.double()):
            with pytest.raises(ForerunError, match="not finite"):
                sample_tokens(given, [Sampling(temperature)] * 3, keys_of(3))


def test_a_row_without_a_possible_token_is_an_error(instructions):
    with pytest.raises(ForerunError, match="not finite"):
        sample_tokens(torch.full((1, 40), -math.inf), [Sampling(1.0)], keys_of(1))


def test_large_scores_keep_their_order(instructions):
    """Where float32 has no fractions left, noise decides between equal sums, as in the
    reference."""
    scores = torch.full((50, 100), 3e7)
    scores[:, ::3] += 4.0
    assert torch.equal(gumbel_argmax(scores, keys_of(50)), rng.gumbel_argmax(scores, keys_of(50)))


def test_a_library_of_another_version_is_not_loaded(monkeypatch):
    """An update without a new build leaves an old library; torch is used then, and `doctor` shows
    the reason."""
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("this system has no libm to load")
    monkeypatch.setenv("FORERUN_NATIVE", name)
    assert native._load.__wrapped__() == (
        None,
        "the compiled library is of another version of forerun: install it again",
    )


def filtered(scores, rows):
    """Filter rows as on a GPU."""
    vocab = scores.shape[1]
    by = draw.DrawParameters.upload(rows, [0] * len(rows), vocab, scores.device)
    return draw._filter_rows(scores, by.top_k, by.top_p, by.least, by.kind)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_filters_without_host_syncs_keep_the_same_tokens(filters):
    """They may differ for ties at the border, which random numbers do not have."""
    scores = torch.randn(20, 900, generator=torch.Generator().manual_seed(2)).double() * 3
    scores[:5, 100:] = -torch.inf
    scores -= scores.amax(-1, keepdim=True)
    alone = filtered(scores, [Sampling(1.0, *filters)] * 20)
    assert torch.equal(alone, draw._filter(scores, *filters))


def test_rows_with_different_filters_are_filtered_together():
    scores = torch.randn(2 * len(FILTERS), 900, generator=torch.Generator().manual_seed(4)) * 3
    scores = scores.double() - scores.double().amax(-1, keepdim=True)
    rows = [Sampling(1.0, *filters) for filters in FILTERS.values() for _ in range(2)]
    together = filtered(scores, rows)
    for row, own, by in zip(together, scores, rows, strict=True):
        assert torch.equal(row, draw._filter(own[None], *by[1:])[0]), by


def test_sampling_on_a_device_takes_one_copy_to_the_host(monkeypatch):
    """The device code runs on the CPU here; `tolist` is its only operation that would wait."""
    copies = []
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self) or to_list(self))
    monkeypatch.setattr(torch, "nonzero", None)
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)).double()
    by = [Sampling(0.8, 40, 0.95, 0.05), Sampling(), Sampling(1.3)] * 2
    drawn = sample_tokens(logits, by, keys_of(6))
    assert len(copies) == 1
    monkeypatch.undo()
    assert drawn == sample_tokens(logits, by, keys_of(6))
