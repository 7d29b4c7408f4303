"""The verb `forerun bench peers`. What is heavy is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.config import parse_depth
from forerun.errors import ConfigError, RequestError
from forerun.hardware import cores
from forerun.measure.choice import PASSAGE
from forerun.measure.lists import listed, whole
from forerun.utils import check_integer

if TYPE_CHECKING:
    from forerun.bench.peers.plan import Load


def peers(
    peers: Annotated[
        str,
        typer.Option(
            help="Engines by commas: transformers, llama.cpp or openvino = a Python that has it, server or"
            " drafting-server = a URL."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A GGUF file, or a directory: Llama for most."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="model:PLACE; lookup, in the text so far: ours is suffix, others have their own; or off to compare"
            " plain decoding alone. By default lookup for a GGUF file, off for a directory."
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            help="Of a directory's weights: float32, bfloat16, int8, int4; by default the last three. A GGUF file runs"
            " as it is stored."
        ),
    ] = "",
    draft_format: Annotated[
        str, typer.Option(help="Of the draft: bfloat16, int8 or int4.")
    ] = "int8",
    depths: Annotated[
        str,
        typer.Option(
            help="Tokens drafted ahead; auto is for forerun alone. By default auto,2,3,4,5,7, of lookup"
            " auto,3,5,7,10,16."
        ),
    ] = "",
    requests: Annotated[str, typer.Option(help="Prompts that run at once.")] = "1",
    tokens: Annotated[int, typer.Option(help="Tokens to produce for each prompt.")] = 256,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: text (one), .jsonl or .json. Without it and --categories, prompts.json beside the"
            f" model, or passages of {PASSAGE} tokens of Python's library."
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(
            help="Of our tasks or the file's, such as chat,edit,summary,mathematics, or all; a row for each. Models"
            " that chat get them in their template."
        ),
    ] = None,
    prefill: Annotated[
        str,
        typer.Option(
            help="Time the first token after prompts of so many tokens too, such as 1000,6000."
        ),
    ] = "",
    repeats: Annotated[
        int, typer.Option(help="Rounds; each runs everything once, on the next prompts.")
    ] = 3,
    threads: Annotated[int, typer.Option(help="Of every engine; 0 takes one for each core.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout: Annotated[
        float, typer.Option(help="Seconds that one answer of another engine may take.")
    ] = 1800.0,
    converted: Annotated[
        Path | None,
        typer.Option(
            help="Keep converted models here for the next time; else they are thrown away."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time other engines beside this one: the same weights, prompts and lengths, greedily, run by
    run in turn."""
    counts = [whole(count, "requests") for count in listed(requests)]
    if not counts or min(counts) < 1:
        raise ConfigError("--requests: give whole numbers from 1 up, such as 1,4,16")
    check_integer("threads", threads, 0, cores())
    depths_ = [parse_depth(depth) for depth in listed(depths)]
    from forerun.bench.peers.peers import measure_peers
    from forerun.bench.peers.plan import Plan, parse_peers
    from forerun.cli.progress import progress
    from forerun.measure.tables import print_json

    plan = Plan(
        parse_peers(listed(peers)), listed(formats), draft_format, depths_, tokens, repeats, threads or cores(),
        device, timeout, converted, [whole(length, "prefill") for length in listed(prefill)],
    )  # fmt: skip
    loads = [
        load
        for count in dict.fromkeys(counts)
        for load in _loads(model, prompts, categories, count, repeats)
    ]
    with progress(as_json, measuring=True) as tell:
        report = measure_peers(model, draft, plan, loads, tell)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)


def _loads(
    model: str | None, path: Path | None, categories: str | None, requests: int, repeats: int
) -> list[Load]:
    """The prompts of each category in groups, `requests` at once."""
    from forerun.bench.peers.plan import Load
    from forerun.measure.choice import choose_tasks, token_ids

    tasks = choose_tasks(model, path, categories, requests, repeats)
    by_category: dict[str, list[list[int]]] = {}
    for task, ids in zip(tasks, token_ids(model, tasks), strict=True):
        by_category.setdefault(task.category, []).append(ids)
    for category, found in by_category.items():
        if requests > len(found):
            raise RequestError(
                f"there are {len(found)} prompts of category {category}, but {requests} are to run at once: give a file"
                " with more"
            )
    return [
        Load(
            category,
            requests,
            [found[i : i + requests] for i in range(0, len(found) - requests + 1, requests)],
        )
        for category, found in by_category.items()
    ]


def _show(report: Any) -> None:
    """The tables, who was left out and why, and how it was measured."""
    import sys

    from forerun.measure.tables import print_columns

    print_columns([_row(result) for result in report.results], optional=("category",))
    if report.prefills:
        print_columns([_prefill_row(result) for result in report.prefills])
    for line in dict.fromkeys(map(str, report.failures)):
        print(f"left out: {line}", file=sys.stderr)
    read = ""
    if report.bandwidth:
        low, middle, high = report.bandwidth
        read = f", read bandwidth {middle:.1f} GB/s ({low:.1f} to {high:.1f})"
    print(
        f"{report.tokens} tokens, greedy, {report.threads} thread{'s' * (report.threads > 1)}, {_drafts(report)},"
        f" medians of {report.repeats} round{'s' * (report.repeats > 1)}; reading prompts is not counted{read}"
    )


def _drafts(report: Any) -> str:
    """Where drafts came from."""
    if report.draft == "lookup":
        return "drafts looked up in the text (forerun: suffix)"
    if report.draft == "off":
        return "no drafts"
    if report.draft_format == "as stored":
        return "drafts of a GGUF file as stored"
    return f"drafts in {report.draft_format} (transformers: the target's format)"


def _prefill_row(r: Any) -> dict[str, str]:
    """One engine reading prompts of one length, as cells."""
    return {
        "engine": r.engine, "format": r.format, "prompt": str(r.tokens), "first token s": f"{r.first_token:.3f}",
        "tokens/s": f"{r.speed:.1f}", "ours/theirs": "" if r.ours_over is None else f"{r.ours_over:.2f}",
    }  # fmt: skip


def _row(r: Any) -> dict[str, str]:
    """One result as cells; empty where there is nothing to tell."""

    def number(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def text(at: int | None) -> str:
        return "" if at is None else "same" if at < 0 else f"from token {at}"

    return {
        "engine": r.engine, "version": r.version, "format": "its own" if r.engine.endswith("server") else r.format,
        "requests": str(r.requests), "category": r.category, "plain tokens/s": number(r.plain, 1),
        "speculative": number(r.speculative, 1), "depth": "" if r.depth is None else str(r.depth),
        "times plain": number(r.times_plain), "accepted length": number(r.accepted_length),
        "text": text(r.first_difference),
        "shared with ours": "" if r.shared_with_ours is None else f"{r.shared_with_ours:.0%}",
        "ours/plain": number(r.ours_over_plain), "ours/speculative": number(r.ours_over_speculative),
        "ours/best": number(r.ours_over_best),
    }  # fmt: skip
