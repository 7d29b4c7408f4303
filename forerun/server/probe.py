"""A few tokens that tell whether a drafter with weights is one for its target at all."""

from __future__ import annotations

from forerun.draft_spec import LOADED, kind_of_name, names_in
from forerun.llm import LLM, Prompt
from forerun.sampling.params import SamplingParams

ASKED = "The sea is salty because rivers carry"
TOKENS, DEPTH = 24, 2
LEAST = 0.06  # accepted tokens a round; drafters that are for their target reach 0.5 and more
MODEL = "it says something else than this target: best is a smaller model of the same family, fine-tuned alike"
HEAD = "it was trained for another target, or for this one before it was fine-tuned"
READS_LAYERS = (
    "eagle3",
    "block",
)  # of the target, whose numbers mean another one in each of their dialects


def probe(llm: LLM) -> str:
    """Let it say a few tokens at temperature 0, drafted by each drafter with weights that it has;
    what is likely wrong with the first of which next to nothing is accepted, and empty otherwise.
    Nothing of it is remembered."""
    names = [part for part in names_in(llm.draft) if kind_of_name(part) in LOADED]
    return next(filter(None, [_probe(llm, name) for name in names or ["off"]]), "")


def _probe(llm: LLM, name: str) -> str:
    params = SamplingParams.pure(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (said,) = llm.generate(_prompt(llm), params, draft=name, depth=None if name == "off" else DEPTH)
    llm.forget()
    counts = said.stats.by_source[name]
    if name == "off" or counts.accepted >= LEAST * said.stats.steps:
        return ""
    what = f"of {counts.drafted} tokens that it drafted {counts.accepted} were accepted"
    if not counts.drafted:
        what = "it drafted nothing"
    kind = kind_of_name(name)
    cause = MODEL if kind == "model" else HEAD
    cause += (
        ", or the layers it reads are counted otherwise in its config.json"
        if kind in READS_LAYERS
        else ""
    )
    return f"the draft {name} does not pay with this target: {what} of a probe. Most likely {cause}"


def _prompt(llm: LLM) -> Prompt:
    """A sentence without a template, which may be anybody's; whatever tokens there are, where there
    is no tokenizer."""
    return ASKED if llm.tokenizer else [i % llm.decoder.config.vocab for i in range(8)]
