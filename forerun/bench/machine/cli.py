"""The verb `forerun bench roofline`: a pass of the target beside what this machine allows. Heavy imports wait."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forerun.config import Config
from forerun.errors import ConfigError
from forerun.flags import ENGINE, with_flags

MODEL = ENGINE.without(  # the model and where it runs: nothing is drafted, and there is one request
    *("draft", "depth", "width", "draft_threshold", "rule", "draft_quantization"),
    *("context", "max_rows", "chunk", "page", "kv_tokens"),
)


@with_flags(MODEL)
def roofline(
    rows: Annotated[str, typer.Option(help="Rows of a pass, by commas: drafted tokens and the one before them.")] = (
        "1,4,8,16"
    ),
    context: Annotated[int, typer.Option(help="Tokens that stand before them.")] = 128,
    repeats: Annotated[int, typer.Option(help="Rounds; each measures the limits and every number of rows.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """Set a pass of the target beside the limits of this machine: bytes moved, operations, and what binds."""
    counts = [_whole(part.strip()) for part in rows.split(",") if part.strip()]
    Config.of(**config)  # cheaper to refuse before torch is imported
    from forerun.bench.machine.roofline import measure_roofline
    from forerun.measure.tables import print_json
    from forerun.progress import progress

    with progress(as_json, measuring=True) as tell:
        report = measure_roofline(config, counts, context=context, repeats=repeats, tell=tell)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--rows: {text!r} is not a whole number") from None


def _show(report: Any) -> None:
    """The table, the limits, and what they teach."""
    from forerun.bench.machine.roofline import lesson
    from forerun.measure.tables import print_table

    def known(value: float | None, form: str) -> str:
        return "absent" if value is None else format(value, form)

    print_table(
        (
            "rows", "MB moved", "of it cache", "MB in caches", "billion operations", "memory ms", "arithmetic ms",
            "pass ms", "binds", "share", "times one row",
        ),
        [
            (
                str(p.rows), f"{p.moved / 1e6:.1f}", f"{p.bytes['cache'] / 1e6:.2f}",
                f"{p.bytes['activations'] / 1e6:.2f}", f"{sum(p.operations.values()) / 1e9:.3f}",
                known(p.memory_ms, ".3f"), f"{p.arithmetic_ms:.3f}", f"{p.pass_ms:.3f}", p.binds or "absent",
                known(p.share, ".0%"), f"{p.times_one_row:.2f}",
            )
            for p in report.passes
        ],
    )  # fmt: skip
    parts = ", ".join(
        f"{part} {report.passes[0].bytes[part] / 1e6:.1f}" for part in ("attention", "feed-forward", "head")
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
