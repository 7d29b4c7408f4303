"""Speculative output equals plain output for every further family, on the native kernels."""

from __future__ import annotations

import functools

import pytest

from forerun.kernels import native
from tests import families
from tests.engine import build

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
BOTH = None  # temperature: half of the requests are greedy, half sample at 0.8
LENGTH = 10
# every family with three drafters; the last one rotates
DRAFTS = ["recycle", "tree", "eagle", "medusa", "parallel", "mtp", "block", "cascade", "ahead"]
CASES = [
    (name, ("suffix", "model", DRAFTS[i % len(DRAFTS)])) for i, name in enumerate(families.MODELS)
]
# drafters read the residual stream, which norms of this family replace
CASES += [("minimax_text", tuple(DRAFTS[i : i + 3])) for i in (0, 3, 6)]
# experts of several types in one file
CASES += [
    ("gpt_oss/experts", ("suffix",)), ("glm4_moe/mxfp4_moe", ("model",)), ("olmo2/Q8_0", ("tree",)),
    ("deepseek_v3/experts", ("tree",)), ("gemma3n/Q8_0", ("suffix",)), ("llama4/experts", ("model",)),
]  # fmt: skip


@functools.cache
def plain(name: str, i: int, form: str | None = "float32") -> list[int]:
    engine = build.engine(name, [], form=form)
    request = engine.add(build.prompts()[i], build.params(i, BOTH, LENGTH), draft="off")
    build.finish(engine)
    return list(request.output)


@pytest.mark.parametrize(("name", "drafts"), CASES)
def test_tokens_equal_plain_decoding_with_small_chunks_and_preemption(
    name: str, drafts: tuple[str, ...]
) -> None:
    """Chunks of 3 tokens in pages of 4, with room for about two requests at once; each drafter has
    a greedy request and a sampled one."""
    engine = build.engine(name, drafts, chunk=3, tokens=build.SMALL, form="float32")
    requests = []
    for i in range(6 if len(drafts) > 1 else 4):
        draft = drafts[i // 2 % len(drafts)]
        prompt, params = build.prompts()[i], build.params(i, BOTH, LENGTH)
        requests.append((draft, engine.add(prompt, params, draft=draft, depth=4)))
        engine.step_or_raise()
    build.finish(engine)
    for i, (_, request) in enumerate(requests):
        assert list(request.output) == plain(name, i)[: request.params.max_tokens]
    for draft in drafts:
        assert sum(request.stats.drafted for own, request in requests if own == draft) > 0, draft


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "minimax_text"])
def test_tokens_equal_plain_decoding_with_recurrent_layers_in_torch(name: str) -> None:
    """The torch products are in float64 here."""
    engine = build.engine(name, ["tree"], chunk=3, tokens=build.SMALL)
    requests = build.run(engine, "tree", BOTH, depth=4, length=LENGTH, count=2)
    for i, request in enumerate(requests):
        assert list(request.output) == plain(name, i, None)[: request.params.max_tokens]
    assert sum(request.stats.drafted for request in requests) > 0
