"""What tiny models say without drafts: computed once a run, whoever compares with it."""

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
    """The tokens behind each prompt, of a model that never speculates and has room for all of them
    at once."""
    made = _llm(model, kernels, dtype)
    key = (kernels, dtype, str(model), repr(prompts), repr(params))
    if key not in _said:
        _said[key] = [
            list(c.token_ids) for c in made.generate(list(prompts), params.resolved(NEUTRAL))
        ]
    return _said[key]


_said: dict[tuple[str, ...], list[list[int]]] = {}


@functools.cache
def _llm(model: Path, kernels: str, dtype: str) -> LLM:
    return LLM(
        model,
        draft="off",
        kernels=kernels,
        kv_tokens=2048,
        **({} if dtype == "auto" else {"dtype": dtype}),
    )
