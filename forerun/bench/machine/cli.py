"""The verbs `forerun bench roofline` and `forerun bench start`. What is heavy is imported when they
run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from forerun.cli.completion import model_names
from forerun.cli.flags import ENGINE, Json, model_as_argument, with_flags, with_model
from forerun.cli.progress import progress
from forerun.config import Config
from forerun.measure.lists import listed, whole
from forerun.measure.tables import print_columns, print_json
from forerun.measure.where import machine

MODEL = ENGINE.without(  # the model and where it runs: nothing is drafted, and there is one request
    *("draft", "depth", "width", "draft_threshold", "rule", "draft_quantization"),
    *("context", "max_rows", "chunk", "page", "kv_tokens"),
)
MODEL_HELP = "A GGUF file, a directory, ollama:NAME, lmstudio:NAME or a Hub id; without it, the default model."


@with_flags(MODEL)
def roofline(
    rows: Annotated[
        str, typer.Option(help="Rows of a pass, by commas: drafted tokens and the one before them.")
    ] = ("1,4,8,16"),
    context: Annotated[int, typer.Option(help="Tokens that stand before them.")] = 128,
    repeats: Annotated[
        int, typer.Option(help="Rounds; each measures the limits and every number of rows.")
    ] = 9,
    as_json: Json = False,
    *,
    config: dict[str, Any],
) -> None:
    """Set a pass of the target beside the limits of this machine: bytes moved, operations, and what
    binds."""
    counts = [whole(count, "rows") for count in listed(rows)]
    Config.of(**config)  # cheaper to refuse before torch is imported
    from forerun.bench.machine.roofline import measure_roofline

    with progress(as_json, measuring=True) as tell:
        report = measure_roofline(config, counts, context=context, repeats=repeats, tell=tell)
    if as_json:
        print_json(asdict(report))
    else:
        _show(report)


def _show(report: Any) -> None:
    """The table, the limits, and what they teach."""
    from forerun.bench.machine.roofline import lesson

    def known(value: float | None, form: str) -> str:
        return "absent" if value is None else format(value, form)

    print_columns([{
        "rows": str(p.rows), "MB moved": f"{p.moved / 1e6:.1f}", "of it cache": f"{p.bytes['cache'] / 1e6:.2f}",
        "MB in caches": f"{p.bytes['activations'] / 1e6:.2f}",
        "billion operations": f"{sum(p.operations.values()) / 1e9:.3f}", "memory ms": known(p.memory_ms, ".3f"),
        "arithmetic ms": f"{p.arithmetic_ms:.3f}", "pass ms": f"{p.pass_ms:.3f}", "binds": p.binds or "absent",
        "share": known(p.share, ".0%"), "times one row": f"{p.times_one_row:.2f}",
    } for p in report.passes])  # fmt: skip
    parts = ", ".join(
        f"{part} {report.passes[0].bytes[part] / 1e6:.1f}"
        for part in ("attention", "feed-forward", "head")
    )
    print(f"{report.weight_bytes / 1e6:.1f} MB of weights: {parts}")
    peaks = ", ".join(f"{form} {peak:.0f}" for form, peak in report.peaks.items())
    bandwidth = known(report.bandwidth, ".1f") + (" GB/s" if report.bandwidth is not None else "")
    print(f"bandwidth {bandwidth}; billion operations a second: {peaks}")
    print(
        f"{report.device}, {report.kernels}, context {report.context}, medians of {report.repeats}"
        f" round{'s' * (report.repeats > 1)}"
    )
    print(lesson(report))


def start(
    model_argument: Annotated[str | None, model_as_argument("The same as --model.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help=MODEL_HELP, show_default=False, autocompletion=model_names
        ),
    ] = None,
    commands: Annotated[
        list[str] | None,
        typer.Option(
            "--command",
            help="How forerun is called, to compare installations with this one; may be repeated.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds, after one that is not counted.")] = 5,
    as_json: Json = False,
) -> None:
    """Time starts, with their memory: to generate's first word, until serve is ready, to its
    answer."""
    from forerun.bench.machine.start import here, measure_starts, size_of

    named = with_model(model_argument, {} if model is None else {"model": model}).get("model")
    size = size_of(named)
    with progress(as_json, measuring=True) as tell:
        found = measure_starts(
            [here(), *(commands or [])], ["--model", named] if named else [], repeats, tell
        )
    if as_json:
        print_json(
            {
                "machine": machine(),
                "weights_bytes": size,
                "starts": [asdict(each) for each in found],
            }
        )
        return
    print_columns([{
        "command": each.command, "verb": each.verb,
        "ready s": "" if each.ready is None else f"{each.ready:.2f}",
        "first word s": f"{each.first:.2f}", "memory MB": f"{each.memory / 1e6:.0f}",
        "over weights MB": f"{(each.memory - size) / 1e6:.0f}",
    } for each in found], ("command",))  # fmt: skip
    print(f"weights of {size / 1e6:.0f} MB on disk, medians of {repeats} rounds")
