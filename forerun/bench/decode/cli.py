"""The verbs `forerun bench decode` and `forerun bench sweep`: one measurement, with fewer and with
more dimensions."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.decode.asked import ASKED, DECODED, Asked, chosen
from forerun.cli.flags import ENGINE, Json, with_flags
from forerun.cli.progress import progress
from forerun.config import Config
from forerun.errors import ConfigError
from forerun.measure.choice import choose_tasks
from forerun.measure.lists import whole
from forerun.measure.tables import print_columns, print_json

if TYPE_CHECKING:
    from forerun.bench.decode.sweep import DecodeReport

ROUNDS, SETTLE = 9, 120.0  # of decode where no number of rounds is given
MORE = f"{ROUNDS}, and more for up to {SETTLE:.0f} seconds while a ratio is uncertain by over 3 %"
DECODE = {"tokens": 256, "batches": 5}
DEPTHS = "1,2,4,8,auto"  # of a sweep


@with_flags(
    ENGINE,
    DECODED,
    replace(ASKED.without("rules", "temperatures"), defaults=DECODE | {"repeats": MORE}),
)
def decode(
    *, as_json: Json = False, config: dict[str, Any], sampling: dict[str, Any], asked: dict[str, Any]
) -> None:  # fmt: skip
    """Time plain decoding and every draft in turn: tokens a second without the prompt, times plain,
    the same text?"""
    settle = 0.0 if "repeats" in asked else SETTLE
    _measure(
        "decode",
        config,
        sampling,
        Asked(**DECODE | {"repeats": ROUNDS} | asked),
        "auto",
        "auto",
        as_json,
        settle,
    )


@with_flags(ENGINE, DECODED, ASKED)
def sweep(
    *, as_json: Json = False, config: dict[str, Any], sampling: dict[str, Any], asked: dict[str, Any]
) -> None:  # fmt: skip
    """Time the product of drafts, depths, rules, temperatures and requests at once, each beside
    plain decoding."""
    _measure("sweep", config, sampling, Asked(**asked), "suffix", DEPTHS, as_json)


@with_flags(
    ENGINE,
    DECODED,
    ASKED.without("rules", "temperatures", "quantizations", "repeats", "batches", "out"),
)
def energy(
    *,
    repeats: Annotated[int, typer.Option(help="Windows of each.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of a window: counters are coarse.")] = 10.0,
    as_json: Json = False,
    config: dict[str, Any],
    sampling: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    """Count joules a token (NVML, RAPL or zeus) of plain decoding and of every draft. Never an
    estimate."""
    wanted = Asked(**asked)
    requests = whole(wanted.requests, "requests")
    Config.of(quantization=config.get("quantization"))  # none is a word of --quantizations
    fields = chosen(wanted, config, sampling, "auto", "auto")
    from forerun.bench.decode.joules import measure_energy
    from forerun.bench.decode.sweep import Plan

    plan = Plan(**fields, repeats=repeats)
    tasks = choose_tasks(config.get("model"), wanted.prompts, wanted.categories, requests, repeats)
    with progress(as_json, measuring=True) as tell:
        report = measure_energy(config, plan, tasks, seconds, tell)
    if as_json:
        print_json(asdict(report))
        return
    print_columns(
        [{
            "draft": r.draft, "depth": "" if r.draft == "off" else str(r.depth), "J/token": _known(r.joules),
            "J/token above idle": _known(r.above_idle), "tokens/Wh": _known(r.tokens_per_watt_hour),
            "times plain": _known(r.times_plain), "W": _known(r.watts), "tokens/s": f"{r.tokens_per_second:.1f}",
            "a million": _known(r.cost_per_million),
        } for r in report.results],
        optional=("a million",),
    )  # fmt: skip
    idle = ", ".join(f"{device} {_known(watts)} W" for device, watts in report.idle_watts.items())
    print(
        f"by {report.method}; idle: {idle}; windows of {seconds:g} s, medians of {repeats}; prompts are included"
    )


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def page(
    lines: Annotated[
        list[Path], typer.Argument(help="What --out FILE.jsonl wrote; several make one page.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Make a page of HTML from lines of JSON measured before, here or elsewhere: by decode and
    sweep, or by serve."""
    from forerun.bench.report.lines import read_lines, read_served
    from forerun.bench.report.writing import check_out, write_out

    check_out([out])
    served = read_served(lines)
    if served and out.suffix != ".html":
        raise ConfigError(f"--out {out} is no page: lines of a server make one, so end it in .html")
    if served:
        from forerun.bench.report.serve_page import write_served_page

        write_served_page(out, served)
    else:
        write_out([out], read_lines(lines))
    print(out)


def _measure(
    kind: str,
    config: dict[str, Any],
    sampling: dict[str, Any],
    asked: Asked,
    draft: str,
    depths: str,
    as_json: bool,
    settle: float = 0.0,
) -> None:
    """Check what was asked before anything heavy is imported, measure, show. `draft` and `depths`
    are what is measured where nothing is said of them."""
    fields = chosen(asked, config, sampling, draft, depths)
    from forerun.bench.report.writing import check_out, write_out

    check_out(asked.out)
    from forerun.bench.decode.sweep import Plan, keep, measure_decoding

    plan = Plan(**fields, repeats=asked.repeats, batches=asked.batches, settle=settle)
    tasks = choose_tasks(
        config.get("model"), asked.prompts, asked.categories, max(plan.requests), asked.batches
    )
    with progress(as_json, measuring=True) as tell:
        report = measure_decoding(config, plan, tasks, tell, kind)
    keep(config.get("model"), report.results)
    if as_json:
        print_json(asdict(report))
    else:
        _show(report)
    write_out(asked.out, asdict(report))


def _show(report: DecodeReport) -> None:
    """A table with the columns that say something here, and a line that sets plain decoding beside
    its limit."""
    rows = []
    for r in report.results:
        spread = f" ({r.interval[0]:.2f} to {r.interval[1]:.2f})" if r.interval else ""
        text = {True: "same", None: "law"}.get(r.same, f"DIFFERENT from token {r.first_difference}")
        plain = r.draft == "off"
        rows.append({
            "category": r.category, "temperature": f"{r.temperature:g}", "at once": str(r.requests),
            "weights": r.quantization, "draft": r.draft, "depth": "" if plain else str(r.depth),
            "rule": "" if plain else r.rule, "tokens/s": f"{r.tokens_per_second:.1f}",
            "times plain (95 %)": f"{r.times_plain:.2f}{spread}", "accepted length": f"{r.accepted_length:.2f}",
            "drafted a step": f"{r.drafted:.1f}", "draft ms": f"{r.draft_ms:.2f}", "pass ms": f"{r.pass_ms:.2f}",
            "J/token": "" if r.joules_per_token is None else f"{r.joules_per_token:.3g}",
            "a million": "" if r.cost_per_million is None else f"{r.cost_per_million:.3g}", "text": text,
        })  # fmt: skip
    print_columns(
        rows,
        optional=("category", "temperature", "at once", "weights", "rule", "J/token", "a million"),
    )
    for limit in report.limits:
        at_once = f", {limit.requests} at once" if limit.requests > 1 else ""
        size = f"{limit.quantization}{at_once}: {limit.weight_bytes / 1e6:.0f} MB of weights"
        if limit.bandwidth is None:
            print(size)
        else:
            print(
                f"{size} at {limit.bandwidth:.1f} GB/s allow {limit.tokens_per_second:.0f} plain tokens/s; plain"
                f" decoding reaches {limit.share:.0%}"
            )
    print(
        f"{report.tokens} tokens a prompt, each prompt the median of {report.repeats}"
        f" round{'s' * (report.repeats > 1)}; reading prompts is not counted"
    )
