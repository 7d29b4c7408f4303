"""The verb `forerun bench peers`. What is heavy is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.choice import PASSAGE
from forerun.bench.lists import listed, whole
from forerun.config import parse_depth
from forerun.doctor import cores
from forerun.errors import ConfigError, RequestError


def peers(
    peers: Annotated[
        str,
        typer.Option(
            help="Engines by commas: transformers, llama.cpp or openvino = a Python that has it, server or"
            " drafting-server = a URL."
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="A directory or Hub id; Llama for most.")] = None,
    draft: Annotated[str, typer.Option(help="model:DIRECTORY, or off to compare plain decoding alone.")] = "off",
    formats: Annotated[str, typer.Option(help="Of the target: float32, bfloat16, int8, int4.")] = "bfloat16,int8,int4",
    draft_format: Annotated[str, typer.Option(help="Of the draft: bfloat16, int8 or int4.")] = "int8",
    depths: Annotated[str, typer.Option(help="Tokens drafted ahead; auto is for forerun alone.")] = "auto,2,3,4,5,7",
    requests: Annotated[str, typer.Option(help="Prompts that run at once.")] = "1",
    tokens: Annotated[int, typer.Option(help="Tokens to produce for each prompt.")] = 256,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: text (one), .jsonl or .json. Without it, prompts.json beside the model's"
            f" directory, or passages of {PASSAGE} tokens of Python's library."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; each runs everything once, on the next prompts.")] = 3,
    threads: Annotated[int, typer.Option(help="Of every engine; 0 takes one for each core.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds that one answer of another engine may take.")] = 1800.0,
    converted: Annotated[
        Path | None, typer.Option(help="Keep converted models here for the next time; else they are thrown away.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time other engines beside this one: the same weights, prompts and lengths, greedily, run by run in turn."""
    counts = [whole(count, "requests") for count in listed(requests)]
    if not counts or min(counts) < 1:
        raise ConfigError("--requests: give whole numbers from 1 up, such as 1,4,16")
    if not 0 <= threads <= 1024:
        raise ConfigError(f"threads={threads} is out of range: give a whole number from 0 to 1024")
    depths_ = [parse_depth(depth) for depth in listed(depths)]
    from forerun.bench.peers import Plan, measure_peers, parse_peers
    from forerun.bench.report import print_json, progress

    plan = Plan(
        parse_peers(listed(peers)), listed(formats), draft_format, depths_, tokens, repeats, threads or cores(),
        device, timeout, converted,
    )  # fmt: skip
    batches = {count: _batches(model, prompts, count, repeats) for count in dict.fromkeys(counts)}
    with progress(as_json) as tell:
        report = measure_peers(model, draft, plan, batches, tell)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)


def _batches(model: str | None, path: Path | None, requests: int, repeats: int) -> list[list[list[int]]]:
    """The prompts of each run, `requests` at once."""
    from forerun.bench.choice import choose_tasks, token_ids

    found = [token_ids(model, task) for task in choose_tasks(model, path, None, requests, repeats)]
    if requests > len(found):
        raise RequestError(f"there are {len(found)} prompts, but {requests} are to run at once: give a file with more")
    return [found[i : i + requests] for i in range(0, len(found) - requests + 1, requests)]


def _show(report: Any) -> None:
    """The table, who was left out and why, and how it was measured."""
    import sys

    from forerun.bench.report import print_table

    columns = (
        "engine", "version", "format", "requests", "plain tokens/s", "speculative", "depth", "times plain",
        "accepted length", "text", "shared with ours", "ours/plain", "ours/speculative", "ours/best",
    )  # fmt: skip
    print_table(columns, [_row(result) for result in report.results])
    for line in dict.fromkeys(map(str, report.failures)):
        print(f"left out: {line}", file=sys.stderr)
    read = ""
    if report.bandwidth:
        low, middle, high = report.bandwidth
        read = f", read bandwidth {middle:.1f} GB/s ({low:.1f} to {high:.1f})"
    print(
        f"{report.tokens} tokens, greedy, {report.threads} thread{'s' * (report.threads > 1)}, drafts in"
        f" {report.draft_format} (transformers: the target's format), medians of {report.repeats}"
        f" round{'s' * (report.repeats > 1)}; reading prompts is not counted{read}"
    )


def _row(r: Any) -> tuple[str, ...]:
    """One result as cells; empty where there is nothing to tell."""

    def number(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def text(at: int | None) -> str:
        return "" if at is None else "same" if at < 0 else f"from token {at}"

    return (
        r.engine, r.version, "its own" if r.engine.endswith("server") else r.format, str(r.requests),
        number(r.plain, 1), number(r.speculative, 1), "" if r.depth is None else str(r.depth),
        number(r.times_plain), number(r.accepted_length), text(r.first_difference),
        "" if r.shared_with_ours is None else f"{r.shared_with_ours:.0%}", number(r.ours_over_plain),
        number(r.ours_over_speculative), number(r.ours_over_best),
    )  # fmt: skip
