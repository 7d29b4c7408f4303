"""Command-line options of `forerun bench decode`, `forerun bench sweep` and `forerun tune`.

Imports no torch: the command line needs it for `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.cli.flags import SAMPLING, Group
from forerun.config import Config, parse_depth
from forerun.draft_spec import drafts_in
from forerun.measure.tables import listed, parse_integer, parse_number, plural
from forerun.sampling.params import NEUTRAL, SamplingParams

NO_FLAGS = (
    *("n", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "logit_bias"),
)
SAMPLING_FLAGS = replace(SAMPLING.without(*NO_FLAGS), defaults=dict(NEUTRAL))


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of a measurement as they were given; several values are separated by commas.

    Args:
        drafts: Drafts to compare, as --draft takes them, separated by commas.
        depths: Depths of each draft: numbers or auto, separated by commas.
        rules: Verification rules of each draft, separated by commas.
        temperatures: Temperatures, separated by commas.
        quantizations: Quantizations of the target: none, int8, int4, separated by commas.
        categories: Categories of tasks, separated by commas, or all. Built-in tasks without
            --prompts.
        prompts: A file of tasks: text (one), .jsonl or .json, such as Spec-Bench's question.jsonl.
            Without it and without --categories, prompts.json beside the model's directory, or
            passages of Python's standard library.
        tokens: Number of tokens to generate for each prompt.
        requests: Number of concurrent requests; decode and sweep take several, separated by commas.
        repeats: Number of rounds; each runs everything once over all prompts.
        batches: Number of prompts of each category, times the number of concurrent requests.
        price: Price of an hour of this machine; adds the price of a million tokens.
        out: Write the results to a .jsonl file, from which benchmarks.report makes tables.
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
    out: Path | None = None


TEXT_OPTIONS = ("drafts", "depths", "rules", "temperatures", "quantizations", "categories")
FLAGS = Group(
    "options",
    DecodeOptions,
    None,
    dict.fromkeys(TEXT_OPTIONS, str) | {"prompts": Path, "price": float, "out": Path},
)


def plan_fields(
    options: DecodeOptions,
    config: dict[str, Any],
    sampling: dict[str, Any],
    draft: str,
    depths: str,
) -> dict[str, Any]:
    """Return the fields of a `DecodePlan` that follow from a command line.

    Args:
        options, config, sampling: what was given; fields that the plan holds are removed from
            `config`.
        draft, depths: the values to use where none were given.

    Raises:
        ForerunError: an option is invalid. Nothing heavy has been imported by then.
    """
    temperatures = plural(options.temperatures, sampling.get("temperature"), "temperature", "0")
    fields: dict[str, Any] = {
        "drafts": plural(options.drafts, config.pop("draft", None), "draft", draft, drafts_in),
        "depths": [
            parse_depth(depth)
            for depth in plural(options.depths, config.pop("depth", None), "depth", depths)
        ],
        "rules": plural(options.rules, config.pop("rule", None), "rule", "match"),
        "temperatures": [parse_number(value, "temperatures") for value in temperatures],
        "requests": [parse_integer(count, "requests") for count in listed(options.requests)],
        "quantizations": plural(
            options.quantizations, config.pop("quantization", None), "quantization", "none"
        ),
        "price": options.price,
    }
    for name in fields["quantizations"]:
        Config.of(**config, quantization=name)
    given = {"seed": 0} | sampling
    params = SamplingParams.pure(**given, max_tokens=options.tokens, ignore_eos=True)
    return fields | {"params": params}
