"""Sampling on the device draws the tokens of sampling on the CPU, with any filters."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from forerun import rng
from forerun.kernels.draw import sample_tokens, shape_scores
from forerun.kernels.triton import draw as kernels
from forerun.kernels.triton.draw import DrawParameters, draw_tokens
from forerun.sampling.params import GREEDY, Sampling
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import DEVICE


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_of(count: int, seed: int = 7) -> list[int]:
    return [rng.stream(seed, rng.Lane.TARGET, i) for i in range(count)]


def drawn(logits: Tensor, samplings: list[Sampling], keys: list[int]) -> list[int]:
    parameters = DrawParameters.upload(samplings, keys, logits.shape[1], DEVICE)
    return draw_tokens(logits.to(DEVICE), parameters, block=kernels.CHUNK).tolist()


def case_equals_cpu() -> None:
    """Rows with every combination of filters at once, each with its own parameters."""
    choices = list(itertools.product((0.7, 1.3), (0, 1, 40, 500), (1.0, 0.9, 0.2), (0.0, 0.1)))
    samplings = [GREEDY._replace(top_k=3), *(Sampling(*each) for each in choices[::7])]
    for vocab, spread in ((257, 3.0), (100, 20.0)):
        own = samplings[::2] if vocab == 257 else samplings[1::2]
        logits, keys = random(1, len(own), vocab) * spread, keys_of(len(own))
        assert drawn(logits, own, keys) == sample_tokens(logits, own, keys)


def case_small_rows() -> None:
    for vocab in (1, 17):
        own = [Sampling(1.0, 2, 0.5, 0.0), Sampling(0.5, 0, 0.99, 0.01), GREEDY]
        logits, keys = random(vocab, len(own), vocab), keys_of(len(own), vocab)
        assert drawn(logits, own, keys) == sample_tokens(logits, own, keys)


def case_many_rows() -> None:
    """64 rows without filters have independent noise."""
    own, keys = [Sampling(1.0)] * 64, keys_of(64)
    logits = random(3, 1, 40).expand(64, 40).contiguous()
    found = drawn(logits, own, keys)
    assert found == sample_tokens(logits, own, keys) and len(set(found)) > 10
    assert drawn(logits[5:6], own[:1], keys[5:6]) == found[5:6]


def case_ties() -> None:
    """Of equal logits the lowest token wins; tokens tied at the border of top-k or top-p stay."""
    logits = (random(4, 6, 128) * 2).round()  # a few dozen different numbers
    own = [
        GREEDY,
        Sampling(1.0, 5),
        Sampling(1.0, 30, 0.9),
        Sampling(0.8, 0, 0.3),
        Sampling(1.0, 0, 1.0, 0.05),
    ]
    own.append(Sampling(1.0))
    keys = keys_of(6)
    found = drawn(logits, own, keys)
    assert found[0] == int(logits[0].argmax())
    exact = [0, 1, 4, 5]  # without top-p the CPU keeps the same tokens
    expected = sample_tokens(logits, own, keys)
    assert [found[i] for i in exact] == [expected[i] for i in exact]
    scores = shape_scores(logits, own)
    for i in (2, 3):
        lowest = scores[i][scores[i] > -math.inf].min()
        every = shape_scores(logits, [Sampling(own[i].temperature)] * 6)[i]
        kept = every.masked_fill(every < lowest, -math.inf)
        assert found[i] == int(rng.gumbel_argmax(kept[None], keys[i : i + 1]))
    flat = torch.zeros(3, 300)
    kinds = [GREEDY, Sampling(1.0, 1), Sampling(1.0, 0, 0.1)]
    every = rng.gumbel_argmax(torch.zeros(3, 300), keys[:3]).tolist()
    assert drawn(flat, kinds, keys[:3]) == [0, every[1], every[2]]


def case_not_finite() -> None:
    """NaN, inf and rows of -inf give -1 and change no other row; -inf is never drawn."""
    own = [Sampling(1.0, 10, 0.9, 0.01), GREEDY] * 4
    logits, keys = random(5, 8, 120) * 3, keys_of(8)
    logits[:, ::3] = -math.inf
    before = drawn(logits, own, keys)
    assert all(token % 3 for token in before) and before == sample_tokens(logits, own, keys)
    logits[0, 119], logits[1, 0] = math.nan, math.nan
    logits[2, 7], logits[3, 7] = math.inf, math.inf
    logits[4], logits[5] = -math.inf, -math.inf
    logits[6] = -math.inf
    logits[6, 119] = -1e30
    found = drawn(logits, own, keys)
    assert found == [-1] * 6 + [119, before[7]]


def case_probabilities() -> None:
    """The nucleus equals that of the CPU at its borders: exact sums, and ends of bins."""
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = probs.log().repeat(4, 1)[:, [3, 1, 0, 4, 2]].contiguous()
    for seed in range(1):
        own = [Sampling(1.0, 0, top_p) for top_p in (0.49, 0.51, 0.76, 0.9999999)]
        keys = keys_of(4, seed)
        assert drawn(logits, own, keys) == sample_tokens(logits, own, keys)


def compile_draws() -> None:
    kinds = dict.fromkeys(("logits", "peaks", "temperature", "least"), "*fp32")
    kinds |= dict.fromkeys(("counts", "masses", "limits", "below", "total", "best"), "*fp64")
    kinds |= dict.fromkeys(("bars", "found", "indices"), "*i32")
    kinds |= dict.fromkeys(("keys", "tokens"), "*i64")
    shape, padded = dict(B=kernels.BLOCK), dict(PADDED=128)
    check_machine_code(kernels._find_peaks, kinds, shape, registers=48, aligned=("V",))
    for is_mass, shift in ((False, 28), (True, 4), (True, 0)):
        digit = padded | dict(
            IS_MASS=is_mass, SHIFT=shift, FIRST=kernels.FIRST_SHIFT, BINS=kernels.BINS
        )
        own = digit | shape | dict(CHUNK=kernels.CHUNK)
        check_machine_code(kernels._measure, kinds, own, registers=168, aligned=("V",))
        check_machine_code(kernels._descend, kinds, digit, registers=128)
    check_machine_code(kernels._draw, kinds, shape | padded, registers=96, aligned=("V",))
    check_machine_code(kernels._choose, kinds, padded, registers=48)
