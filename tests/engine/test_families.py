"""Speculative text equals plain text for every further family, on the native kernels."""

from __future__ import annotations

import functools

import pytest

from forerun.kernels import native
from tests import families
from tests.engine import build

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
BOTH = None  # half of the requests greedily, half at 0.8, side by side
LENGTH = 14
# every family with three drafters, in turn another one of those with weights
DRAFTS = ["recycle", "tree", "eagle", "medusa", "parallel", "mtp", "block", "cascade", "ahead"]
CASES = [
    (name, draft)
    for i, name in enumerate(families.MODELS)
    for draft in ("suffix", "model", DRAFTS[i % len(DRAFTS)])
]
# norms that replace the residual stream, whose states drafters read
CASES += [("minimax_text", draft) for draft in DRAFTS if ("minimax_text", draft) not in CASES]
# experts of several types in one file
CASES += [("gpt_oss/experts", "suffix"), ("glm4_moe/mxfp4_moe", "model"), ("olmo2/Q8_0", "tree")]
CASES += [("deepseek_v3/experts", "tree"), ("gemma3n/Q8_0", "suffix"), ("llama4/experts", "model")]


@functools.cache
def plain(name: str, i: int, form: str | None = "float32") -> list[int]:
    engine = build.engine(name, [], form=form)
    request = engine.add(build.prompts()[i], build.params(i, BOTH), draft="off")
    build.finish(engine)
    return list(request.output)


@pytest.mark.parametrize(("name", "draft"), CASES)
def test_small_chunks_and_preemption(name: str, draft: str) -> None:
    """Chunks of 3 tokens in pages of 4, and room for about two requests at once."""
    engine = build.engine(name, [draft], chunk=3, tokens=build.SMALL, form="float32")
    requests = build.run(engine, draft, BOTH, depth=4, length=LENGTH, count=4)
    for i, request in enumerate(requests):
        assert list(request.output) == plain(name, i)[: request.params.max_tokens]
    assert sum(request.stats.drafted for request in requests) > 0


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "falcon_h1", "lfm2", "minimax_text"])
def test_recurrent_layers_in_torch(name: str) -> None:
    """Texts of `kernels=torch`, whose products are in float64 here."""
    engine = build.engine(name, ["tree"], chunk=3, tokens=build.SMALL)
    requests = build.run(engine, "tree", BOTH, depth=4, length=LENGTH, count=2)
    for i, request in enumerate(requests):
        assert list(request.output) == plain(name, i, None)[: request.params.max_tokens]
    assert sum(request.stats.drafted for request in requests) > 0
