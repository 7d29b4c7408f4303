"""Output of tiny models without drafts, computed once per test run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from forerun import LLM, SamplingParams
from forerun.sampling.params import NEUTRAL

Prompt = str | Sequence[int]


def plain(
    model: Path,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    kernels: str = "auto",
    dtype: str = "auto",
) -> list[list[int]]:
    """Return the generated tokens of each prompt, without speculation and with enough KV cache for
    all prompts at once."""
    llm = _llm(model, kernels, dtype)
    key = (kernels, dtype, str(model), repr(prompts), repr(params))
    if key not in _outputs:
        _outputs[key] = [
            list(c.token_ids) for c in llm.generate(list(prompts), params.resolved(NEUTRAL))
        ]
    return _outputs[key]


_outputs: dict[tuple[str, ...], list[list[int]]] = {}


@functools.cache
def _llm(model: Path, kernels: str, dtype: str) -> LLM:
    return LLM(
        model,
        draft="off",
        kernels=kernels,
        kv_tokens=2048,
        **({} if dtype == "auto" else {"dtype": dtype}),
    )
