"""What tests of drafters share: requests for drafts, the sampling parameters and kernels that they
are tried with, and how drafts and errors are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from forerun.draft.proposer import DraftRequest
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
compiled = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
KERNELS = [pytest.param("native", marks=compiled), "torch"]


def row(
    tokens: Sequence[int],
    params: SamplingParams = GREEDY,
    depth: int = 4,
    slot: int = 0,
    **options: Any,
) -> DraftRequest:
    return DraftRequest(slot, tokens, params, Noise(11, len(tokens) - 1), depth, **options)


def same(found: Draft, expected: Draft) -> None:
    """Compare all but the sources."""
    nodes = [(draft.tokens, draft.parents, draft.proposals) for draft in (found, expected)]
    assert nodes[0] == nodes[1]
    assert (found.probs is None) == (expected.probs is None)
    if found.probs is not None:
        assert np.allclose(found.probs, expected.probs, atol=1e-9)


@contextmanager
def refused(
    kind: type[ForerunError], says: str = ""
) -> Iterator[pytest.ExceptionInfo[ForerunError]]:
    """Expect an error of one line."""
    with pytest.raises(kind, match=says) as error:
        yield error
    assert "\n" not in str(error.value)
