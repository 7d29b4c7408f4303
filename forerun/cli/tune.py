"""The command `forerun tune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.options import FLAGS, SAMPLING_FLAGS, DecodeOptions, plan_fields
from forerun.cli.flags import ENGINE, Json, with_flags
from forerun.cli.progress import progress
from forerun.draft_spec import read_draft
from forerun.errors import ConfigError
from forerun.measure.tables import parse_integer, print_columns, print_json, times_and_interval
from forerun.measure.workloads import choose_tasks

AT_HAND = ("suffix", "suffix+recycle", "ngram")  # drafts that need only the target model
DEPTHS = "auto,2,5"
TOKENS, ROUNDS, BATCHES = 96, 5, 3
TRIED = replace(
    FLAGS.without("rules", "temperatures", "quantizations", "repeats", "batches", "price", "out"),
    defaults={"drafts": "those that need nothing more", "depths": DEPTHS, "tokens": TOKENS},
)


@with_flags(ENGINE.without("rule"), SAMPLING_FLAGS, TRIED)
def tune(
    *,
    seconds: Annotated[
        float, typer.Option(help="Seconds of the long measurement of each of the best.")
    ] = 30.0,
    out: Annotated[
        Path | None, typer.Option(help="Write the choice to a file for serve --config (.toml).")
    ] = None,
    as_json: Json = False,
    config: dict[str, Any],
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Find the fastest draft and depth for your model, on this machine and your texts.

    Each combination is timed against plain decoding, and the best ones again for longer. All of
    them generate the same text.
    """
    wanted = DecodeOptions(**{"tokens": TOKENS} | options)
    requests = parse_integer(wanted.requests, "requests")
    weights = config.get("quantization")
    fields = plan_fields(wanted, config, sampling, ",".join(AT_HAND), DEPTHS)
    if out is not None and (
        out.suffix != ".toml" or out.is_dir() or not out.absolute().parent.is_dir()
    ):
        raise ConfigError(
            f"--out {out} cannot be written: give a name that ends in .toml,"
            " in a directory that exists"
        )
    from forerun.bench.decode import DecodePlan, record_results
    from forerun.cli.tuning import look_for_layers, write_choice
    from forerun.cli.tuning import tune as measure

    plan = DecodePlan(**fields, repeats=ROUNDS, batches=BATCHES, settle=seconds)
    tasks = choose_tasks(config.get("model"), wanted.prompts, wanted.categories, requests, BATCHES)
    with progress(as_json, measuring=True) as tell:
        if any(
            leaf.argument == "layers=auto"
            for draft in plan.drafts
            for leaf in read_draft(draft).leaves()
        ):
            look_for_layers(config | {"quantization": weights}, tasks, tell)
        tuned = measure(config, plan, tasks, tell)
    record_results(config.get("model"), tuned.results)
    if out is not None:
        write_choice(out, config, weights, tuned)
    if as_json:
        print_json(asdict(tuned))
        return
    for title, results in (
        ("all, short look", tuned.short),
        ("the best, long look", tuned.results),
    ):
        print(f"{title}:")
        print_columns(
            [
                {
                    "draft": r.draft,
                    "depth": str(r.depth),
                    "times plain (95 %)": times_and_interval(r.times_plain, r.interval),
                    "tokens/s": f"{r.tokens_per_second:.1f}",
                    "accepted length": f"{r.accepted_length:.2f}",
                    "text": {True: "same", None: "same distribution"}.get(r.same, "DIFFERENT"),
                }
                for r in results
            ]
        )
    choice = tuned.choice
    times = times_and_interval(choice.times_plain, choice.interval)
    print(
        f"\nuse --draft {choice.draft} --depth {choice.depth}, {times} times plain decoding:"
        f" {choice.why}"
    )
    if any(r.same is False for r in tuned.results):
        print("a text differs from plain decoding's: forerun check says where, and by how much")
    if out is not None:
        print(f"written to {out}: forerun serve --config {out}")
