"""Check at the start of a server whether a drafter with weights fits its target."""

from __future__ import annotations

from forerun.draft_spec import LOADED, kind_of_name, names_in
from forerun.llm import LLM, Prompt
from forerun.sampling.params import SamplingParams

PROMPT = "The sea is salty because rivers carry"
NUM_TOKENS = 24
DEPTH = 2
MIN_ACCEPTED = 0.06  # accepted tokens a step; drafters that fit reach 0.5 and more
MODEL_CAUSE = (
    "it says something else than this target: best is a smaller model of the same family,"
    " fine-tuned alike"
)
HEAD_CAUSE = "it was trained for another target, or for this one before it was fine-tuned"
LAYER_CAUSE = ", or the layers it reads are counted otherwise in its config.json"
READS_LAYERS = ("eagle3", "block")  # drafters whose config.json numbers layers of the target


def probe(llm: LLM) -> str:
    """Generate some tokens greedily with each drafter that has weights.

    Returns a warning for the first drafter of which almost nothing is accepted, or "". The engine
    remembers nothing of it.
    """
    names = [name for name in names_in(llm.draft) if kind_of_name(name) in LOADED]
    for name in names or ["off"]:
        warning = _probe(llm, name)
        if warning:
            return warning
    return ""


def _probe(llm: LLM, name: str) -> str:
    prompt: Prompt = PROMPT
    if llm.tokenizer is None:
        prompt = [i % llm.decoder.config.vocab for i in range(8)]
    params = SamplingParams.pure(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate(prompt, params, draft=name, depth=None if name == "off" else DEPTH)
    llm.forget()
    counts = output.stats.by_source[name]
    if name == "off" or counts.accepted >= MIN_ACCEPTED * output.stats.steps:
        return ""
    result = "it drafted nothing"
    if counts.drafted:
        result = f"of {counts.drafted} tokens that it drafted {counts.accepted} were accepted"
    kind = kind_of_name(name)
    cause = MODEL_CAUSE if kind == "model" else HEAD_CAUSE
    if kind in READS_LAYERS:
        cause += LAYER_CAUSE
    return (
        f"the draft {name} does not pay with this target: {result} of a probe. Most likely {cause}"
    )
