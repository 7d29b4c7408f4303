"""The verb `forerun bench serve`. What is heavy is imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.config import parse_depth
from forerun.draft_spec import drafts_in
from forerun.errors import ConfigError, ForerunError, Interrupted
from forerun.measure.lists import listed, whole

if TYPE_CHECKING:
    from forerun.bench.server.endpoint import Prompt
    from forerun.bench.server.load import ServeReport
    from forerun.bench.server.result import Result

PASSAGE = 400  # characters of a prompt where there is no file of them: some 130 tokens
# more than most measurements use: a server that has seen a prompt before answers it sooner
PASSAGES = 1024
COMPARED = ("draft", "times plain (95 %)", "text")  # columns of drafts beside plain decoding


def serve(
    url: Annotated[
        str, typer.Argument(help="A running server of OpenAI's API, such as http://127.0.0.1:8000.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Its name there, if it has several.")
    ] = None,
    requests: Annotated[
        str, typer.Option(help="Numbers of requests at once, by commas.")
    ] = "1,4,16",
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Drafts to compare with plain decoding, by commas: forerun's server, which takes them."
        ),
    ] = None,
    depth: Annotated[
        str | None, typer.Option(help="Of these drafts: a number or auto; the server's own.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Most tokens of an answer.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Of all requests.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first request, and which prompt it has.")] = 0,
    repeats: Annotated[
        int, typer.Option(help="Rounds; each runs everything once, on the next prompts.")
    ] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="How long a run sends requests; 3 a client without it.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts or tasks. Without it, passages of Python's library."),
    ] = None,
    category: Annotated[
        str | None,
        typer.Option(
            help="Categories of the file's tasks, or of our own where there is no file, by commas."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask by /v1/chat/completions.")] = False,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable that holds the API key.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Most seconds to wait for the next piece of an answer.")
    ] = 60.0,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Also write a page (.html) or lines of JSON (.jsonl); may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time a running server under load: tokens a second, first token, between tokens, what its
    drafts are worth."""
    counts = [whole(count, "requests") for count in listed(requests)]
    key = _key(api_key_env) if api_key_env is not None else None
    from forerun.bench.report.writing import check_out, write_out

    check_out(out or [])
    try:
        from forerun.bench.server.endpoint import Endpoint
    except ImportError as error:
        raise ForerunError(f"this needs {error.name}: pip install 'forerun[bench]'") from None
    from forerun.bench.server.load import INTERRUPTED, Plan, measure_serving
    from forerun.cli.progress import progress
    from forerun.measure.tables import print_json

    plan = Plan(
        endpoint=Endpoint(url, model, chat, key, timeout),
        drafts=drafts_in(drafts or ""),
        depth=None if depth is None else parse_depth(depth),
        requests=counts,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
        seconds=seconds,
    )
    if drafts is not None and not plan.drafts:
        raise ConfigError("--drafts names none: give one or more, such as --drafts suffix")
    with progress(as_json, measuring=True) as tell:
        report = measure_serving(plan, _prompts(prompts, category), tell)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    if report.results:
        write_out(out or [], report.as_dict())
    if report.stopped is None:
        return
    ended = f"{report.stopped}; the figures are of what was measured until then"
    raise Interrupted(ended) if report.stopped == INTERRUPTED else ForerunError(ended)


def _prompts(path: Path | None, category: str | None) -> list[Prompt]:
    """The prompts of a file, of our own tasks, or passages of Python's library."""
    if path is None and category is None:
        from forerun.measure.corpus import excerpts

        passages = excerpts(lambda text: [ord(character) for character in text], PASSAGES, PASSAGE)
        return ["".join(map(chr, passage)) for passage in passages]
    from forerun.measure.workloads import builtin, of_categories, read_tasks

    tasks = builtin() if path is None else read_tasks(path)
    return [task.prompt for task in of_categories(tasks, listed(category or ""))]


def _show(report: ServeReport) -> None:
    """The table, what failed, and what the figures are of."""
    from forerun.measure.tables import print_columns

    if not report.results:
        return
    print_columns([_row(result) for result in report.results])
    for result in report.results:
        for error, count in result.errors.items():
            print(
                f"{result.draft or 'requests'}, {result.requests} at once: {count} failed: {error}"
            )
    print(_footer(report))


def _row(r: Result) -> dict[str, str]:
    """One result as cells, those of `COMPARED` only where drafts are."""

    def milliseconds(percentiles: dict[str, float]) -> str:
        return ", ".join(f"{ms:.1f}" for ms in percentiles.values()) or "-"

    times = "-" if r.times_plain is None else f"{r.times_plain:.2f}"
    times += f" ({r.interval[0]:.2f} to {r.interval[1]:.2f})" if r.interval else ""
    text = {True: "same", None: "not compared"}.get(
        r.same, f"DIFFERENT from token {r.first_difference}"
    )
    cells = {
        "draft": str(r.draft), "at once": str(r.requests), "tokens/s": f"{r.tokens_per_second:.1f}",
        "times plain (95 %)": times, "requests/s": f"{r.requests_per_second:.2f}",
        "first token ms": milliseconds(r.first_token_ms), "between tokens ms": milliseconds(r.inter_token_ms),
        "accepted length": "-" if r.accepted_length is None else f"{r.accepted_length:.2f}",
        "acceptance": "-" if r.acceptance is None else f"{r.acceptance:.0%}",
        "failed": str(sum(r.errors.values())), "text": text,
    }  # fmt: skip
    return {
        name: cell for name, cell in cells.items() if r.draft is not None or name not in COMPARED
    }


def _footer(report: ServeReport) -> str:
    """How it was measured, and what flatters or limits the figures."""
    rounds = f"{report.repeats} round{'s' * (report.repeats > 1)}"
    parts = [
        f"{report.model} on {report.server or 'a server'} at {report.url}, {report.tokens} tokens, temperature"
        f" {report.temperature:g}",
        f"medians of {rounds}; milliseconds are the 50th, 95th and 99th percentile, as a client sees them",
    ]
    if any(result.counted == "chunks" for result in report.results):
        parts.append(
            "the server gives no usage: what is counted is chunks, of which each may have several tokens"
        )
    if cached := max((result.cached or 0.0 for result in report.results), default=0.0):
        parts.append(f"up to {cached:.0%} of the prompts' tokens came from the server's cache")
    if report.repeated:
        parts.append(
            f"the server has seen some of these {report.prompts} prompts before, which helps caches and drafters that"
            " remember: give more of them, or another --seed"
        )
    return "\n".join(parts)


def _key(name: str) -> str:
    """The API key in an environment variable."""
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"the environment variable {name} is not set: export the API key in it")
    return key
