"""Helpers of the drafter tests: draft requests, sampling parameters, kernels, and comparisons of
drafts and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from forerun.draft.proposer import DraftRequest, Proposer
from forerun.errors import ForerunError
from forerun.kernels import native
from forerun.sampling.params import SamplingParams
from forerun.types import Draft
from forerun.verify import Noise

GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=0.8, top_k=12, top_p=0.9)
SETTINGS = pytest.mark.parametrize(
    "params", [GREEDY, WARM, FILTERED], ids=["greedy", "warm", "filtered"]
)
needs_native = pytest.mark.skipif(
    native.library() is None, reason=native.reason() or "no native kernels"
)
KERNELS = [pytest.param("native", marks=needs_native), "torch"]


def make_request(
    tokens: Sequence[int],
    params: SamplingParams = GREEDY,
    depth: int = 4,
    slot: int = 0,
    **options: Any,
) -> DraftRequest:
    return DraftRequest(slot, tokens, params, Noise(11, len(tokens) - 1), depth, **options)


def pure_params(max_tokens: int, temperature: float = 0.8, seed: int = 1) -> SamplingParams:
    """Return parameters without filters, under which end tokens do not end a text."""
    return SamplingParams.pure(
        max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )


def drafts_of(drafter: Proposer, requests: Sequence[DraftRequest]) -> list[Draft]:
    """Open the slots of requests and draft for them."""
    for request in requests:
        drafter.open(request.slot, request.tokens)
    return drafter.propose(requests)


def assert_same_draft(found: Draft, expected: Draft) -> None:
    """Compare everything but the sources."""
    nodes = [(draft.tokens, draft.parents, draft.proposals) for draft in (found, expected)]
    assert nodes[0] == nodes[1]
    assert (found.probs is None) == (expected.probs is None)
    if found.probs is not None:
        assert np.allclose(found.probs, expected.probs, atol=1e-9)


@contextmanager
def refused(
    kind: type[ForerunError], message: str = ""
) -> Iterator[pytest.ExceptionInfo[ForerunError]]:
    """Expect an error of one line."""
    with pytest.raises(kind, match=message) as error:
        yield error
    assert "\n" not in str(error.value)
