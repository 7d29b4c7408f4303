"""A model that drafts for itself, its weights rounded: its own text, sooner, and no other."""

from __future__ import annotations

import pytest

from forerun import LLM, ConfigError, SamplingParams
from forerun.kernels import native
from tests import tiny

PROMPTS = [[5, 6, 7], [9] * 6, [3, 1, 4, 1, 5]]


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("rule", ["match", "token"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_says_what_it_says_alone(form: str, rule: str, temperature: float) -> None:
    llm = LLM(tiny.family("llama"), draft=f"self:{form}", kv_tokens=1024, depth=4, rule=rule)
    params = SamplingParams.pure(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    said = llm.generate(PROMPTS, params)
    if rule == "match" or temperature == 0:
        assert [c.token_ids for c in said] == [
            c.token_ids for c in llm.generate(PROMPTS, params, draft="off")
        ]
    counts = [c.stats.by_source["self"] for c in said]
    least = 0.6 if form == "int8" else 0.1  # four bits of random weights are not much
    assert (
        sum(count.accepted for count in counts) > least * sum(count.drafted for count in counts) > 5
    )


def test_forms_that_are_none_are_one_line() -> None:
    for spec in ("self", "self:int2", "self:layers"):
        with pytest.raises(ConfigError, match="write self:int8 or self:int4"):
            LLM(tiny.family("llama"), draft=spec)
    with pytest.raises(ConfigError, match="needs the native kernels"):
        LLM(tiny.family("llama"), draft="self:int4", kernels="torch")
