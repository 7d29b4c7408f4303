"""Checks of model pairs: agreement according to transformers, and drafts in the engine."""

import json
from typing import Any

import torch
import transformers

from forerun import LLM, Completion, SamplingParams
from forerun.bench.pair import Pair


def prompts_of(pair: Pair) -> list[list[int]]:
    """Return the prompts that were written beside the models."""
    prompts: list[list[int]] = json.loads((pair.directory / "prompts.json").read_text())["prompts"]
    return prompts


def check_with_transformers(pair: Pair, tokens: int, within: float) -> tuple[Any, Any]:
    """Assert that the models have the measured agreement and parameters; return both models."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, draft = (
        load(pair.directory / part, dtype=torch.float32).eval() for part in ("target", "draft")
    )
    prompts = torch.tensor(prompts_of(pair))
    with torch.inference_mode():
        texts = target.generate(prompts, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        outputs = texts[:, prompts.shape[1] :]
        drafted = draft(texts[:, :-1]).logits[:, prompts.shape[1] - 1 :].argmax(-1)
    assert abs((drafted == outputs).float().mean().item() - pair.agreement.agree) < within
    assert pair.agreement.positions == outputs.numel()
    assert pair.parameters == tuple(
        sum(weight.numel() for weight in model.parameters()) for model in (target, draft)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair.directory / "target")
    assert len(tokenizer) == 512 == target.config.vocab_size
    code = "def f(x):\n    return x"
    assert tokenizer.decode(tokenizer(code)["input_ids"]) == code
    return target, draft


def check_drafts(pair: Pair, tokens: int, margin: float, **options: Any) -> list[Completion]:
    """Assert that drafts change no token and have the measured acceptance; return the texts."""
    draft = f"model:{pair.directory / pair.draft}"
    llm = LLM(pair.directory / pair.target, draft=draft, **options)
    params = SamplingParams.pure(max_tokens=tokens, ignore_eos=True)
    plain = llm.generate(prompts_of(pair), params, draft="off")
    fast = llm.generate(prompts_of(pair), params, depth=4)
    assert [c.token_ids for c in plain] == [c.token_ids for c in fast]
    length = sum(c.stats.completion_tokens for c in fast) / sum(c.stats.steps for c in fast)
    expected = pair.agreement.accepted[4] + 0.9  # a little lower, since drafts end with outputs
    assert abs(length - expected) < margin
    return plain
