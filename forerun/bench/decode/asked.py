"""The flags of every verb that measures decoding, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.cli.flags import SAMPLING, Group
from forerun.config import Config, parse_depth
from forerun.draft_spec import drafts_in
from forerun.measure.lists import listed, number, plural, whole
from forerun.sampling.params import NEUTRAL, SamplingParams

DECODED = replace(
    SAMPLING.without(
        *(
            "n",
            "max_tokens",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "logprobs",
            "logit_bias",
        )
    ),
    defaults=dict(NEUTRAL),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks to measure, as it was given: lists stand between commas.

    Args:
        drafts: Drafts to compare, as --draft takes them, by commas.
        depths: Depths of each draft: numbers or auto, by commas.
        rules: Rules of each draft, by commas.
        temperatures: By commas.
        quantizations: Of the target: none, int8, int4, by commas.
        categories: Kinds of tasks, by commas; all for every one. Of our own set without --prompts.
        prompts: A file of tasks: text (one), .jsonl or .json, Spec-Bench's question.jsonl among
            them. Without it and without --categories, prompts.json beside the model's directory, or
            passages of Python's library.
        tokens: Tokens to produce for each prompt.
        requests: Prompts that run at once; decode and sweep take several numbers, by commas.
        repeats: Rounds; each runs everything once over all prompts.
        batches: Prompts of each category to use, times how many run at once.
        price: Of an hour of this machine: tells what a million tokens cost.
        out: Also write a page (.html) or lines of JSON (.jsonl); may be repeated.
    """

    drafts: str | None = None
    depths: str | None = None
    rules: str | None = None
    temperatures: str | None = None
    quantizations: str | None = None
    categories: str | None = None
    prompts: Path | None = None
    tokens: int = 128
    requests: str = "1"
    repeats: int = 3
    batches: int = 3
    price: float | None = None
    out: tuple[Path, ...] = ()


TYPES = dict.fromkeys(
    ("drafts", "depths", "rules", "temperatures", "quantizations", "categories"), str
)
ASKED = Group("asked", Asked, None, TYPES | {"prompts": Path, "price": float, "out": list[Path]})


def chosen(
    asked: Asked, config: dict[str, Any], sampling: dict[str, Any], draft: str, depths: str
) -> dict[str, Any]:
    """The fields of a `Plan` that follow from a command line; what is in a plan is taken out of
    `config`. Raises ForerunError, before anything heavy is imported.

    `draft` and `depths` are what is measured where nothing is said of them.
    """
    fields: dict[str, Any] = {
        "drafts": plural(asked.drafts, config.pop("draft", None), "draft", draft, drafts_in),
        "depths": [
            parse_depth(d) for d in plural(asked.depths, config.pop("depth", None), "depth", depths)
        ],
        "rules": plural(asked.rules, config.pop("rule", None), "rule", "match"),
        "temperatures": [
            number(degree, "temperatures")
            for degree in plural(
                asked.temperatures, sampling.get("temperature"), "temperature", "0"
            )
        ],
        "requests": [whole(count, "requests") for count in listed(asked.requests)],
        "quantizations": plural(
            asked.quantizations, config.pop("quantization", None), "quantization", "none"
        ),
        "price": asked.price,
    }
    for name in fields["quantizations"]:
        Config.of(**config, quantization=name)
    params = SamplingParams.pure(**{"seed": 0} | sampling, max_tokens=asked.tokens, ignore_eos=True)
    return fields | {"params": params}
