"""What int8 and int4 cost in quality, and that speculation changes nothing over long generations."""

import functools
import math
from pathlib import Path

import pytest
import torch

import forerun
from forerun import LLM, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.suffix import Suffix
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.native import NativeDecoder
from forerun.runner import Runner
from tests import tiny

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")


@functools.cache
def perplexity(quantization: str | None) -> float:
    """Of the bundled model, in bfloat16 unless it is quantised, on code it was not trained on: this package's."""
    dtype = "auto" if quantization else "bfloat16"
    llm = LLM(draft="off", kv_tokens=2048, dtype=dtype, quantization=quantization)
    runner, total, count = llm.engine.target, 0.0, 0
    assert llm.tokenizer is not None
    for path in sorted(Path(forerun.__file__).parent.rglob("*.py"))[::3]:
        ids = llm.tokenizer.encode(path.read_text())[:400]
        if len(ids) < 300:
            continue
        runner.reset()
        runner.cache.open(0, ids)
        runner.cache.pages.grow(0, len(ids))
        chunk = Segment(0, ids, list(range(-1, len(ids) - 1)), list(range(len(ids))))
        laws = runner.forward([chunk]).logits.double().log_softmax(-1)
        total -= float(laws[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum())
        count += len(ids) - 1
    assert count > 10_000
    return math.exp(total / count)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.003), ("int4", 0.03)])
def test_perplexity_stays_near_that_of_bfloat16(quantization: str, most: float) -> None:
    assert perplexity(quantization) / perplexity(None) - 1 < most


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_two_thousand_tokens_in_a_batch_of_eight(form: str) -> None:
    """Greedy and sampled requests side by side, plain and speculative: not one token differs."""
    native.start(2)
    directory = tiny.family("llama")
    model = NativeDecoder(load_config(directory), directory, form, 2100)
    outputs = []
    for draft in ("off", "suffix"):
        engine = Engine(Runner(model, tokens=8 * 2112, page=16, slots=8), {"suffix": Suffix()})
        params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=2000, ignore_eos=True) for i in range(8)]
        requests = [engine.add([3 + i, 7, 9], p, draft=draft, depth=3) for i, p in enumerate(params)]
        while engine.busy:
            engine.step()
        outputs.append([list(r.output) for r in requests])
        assert all(len(r.output) == 2000 for r in requests)
    assert outputs[0] == outputs[1]
