"""The verbs under `forerun bench`. Like all of the command line, they import what is heavy when
they run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.decode.cli import decode, energy, page, sweep
from forerun.bench.machine.cli import roofline, start
from forerun.bench.peers.cli import peers
from forerun.bench.recipe import PairRecipe
from forerun.bench.server.cli import serve
from forerun.cli.flags import Group, Json, with_flags
from forerun.hardware import cores
from forerun.measure.lists import listed, number, whole
from forerun.utils import check_integer

app = typer.Typer(
    rich_markup_mode="rich",
    help="Measure: decoding, starts, servers, other engines, energy, kernels; make models for that; do the arithmetic.",
)
RECIPE = Group("recipe", PairRecipe, "Pair")


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    epilog="[dim]forerun bench pair --out pair        forerun bench pair --out small --layers 4 --hidden 256[/dim]"
)
@with_flags(RECIPE)
def pair(
    out: Annotated[
        Path, typer.Option(help="The directory to make; it must not hold anything yet.")
    ],
    as_json: Json = False,
    *,
    recipe: dict[str, Any],
) -> None:
    """Write a random-weight target and a draft that agrees with it as often as asked."""
    wanted = PairRecipe(**recipe)
    from forerun.bench.pair import make_pair
    from forerun.cli.progress import progress
    from forerun.measure.tables import print_json

    with progress(as_json) as tell:
        made = make_pair(out, wanted, tell)
    if as_json:
        print_json({"directory": str(out), **made.as_dict()})
        return
    measured, (target, draft) = made.agreement, (size / 1e6 for size in made.parameters)
    over, under = made.middle or (0.0, 0.0)
    middle = f"the middle model says {over:.1%} of the target's tokens, the draft {under:.1%} of its own\n"
    print(
        f"{out}: target of {target:.1f}M parameters, draft of {draft:.1f}M, eps {made.eps:.4f}\n"
        f"greedy agreement {measured.agree:.1%} of {measured.positions} tokens,"
        f" {measured.accepted.get(4, measured.agree):.2f} of 4 drafted accepted, overlap at temperature 1"
        f" {measured.overlap:.1%}, {measured.looping} of {measured.texts} texts loop\n"
        + (middle if made.middle else "")
        + f"next: forerun bench decode --model {out}/target --drafts suffix,model:{out}/draft"
    )


@app.command(
    epilog="[dim]forerun bench kernels --formats bfloat16,int8 --rows 1,4,8,16 --threads 2[/dim]"
)
def kernels(
    formats: Annotated[
        str, typer.Option(help="Weight formats, separated by commas.")
    ] = "float32,bfloat16,int8,int4",
    rows: Annotated[str, typer.Option(help="Rows of activations.")] = "1,2,3,4,5,6,8,12,16,32,64",
    inputs: Annotated[int, typer.Option(help="Inputs of the layer.")] = 1024,
    outputs: Annotated[int, typer.Option(help="Outputs of the layer.")] = 2816,
    megabytes: Annotated[
        int, typer.Option(help="Weights of each format: more than the caches hold.")
    ] = 256,
    repeats: Annotated[int, typer.Option(help="Rounds; each times every case once, in turn.")] = 9,
    threads: Annotated[int, typer.Option(help="0 takes one for each core.")] = 0,
    as_json: Json = False,
) -> None:
    """Time the native linear kernels by format and rows, beside the read bandwidth of the
    moment."""
    counts = [whole(count, "rows") for count in listed(rows)]
    check_integer("threads", threads, 0, cores())
    from forerun.bench.machine.kernels import measure_kernels
    from forerun.cli.progress import progress
    from forerun.measure.tables import print_columns, print_json

    with progress(as_json, measuring=True) as tell:
        report = measure_kernels(
            listed(formats), counts, inputs=inputs, outputs=outputs, megabytes=megabytes, repeats=repeats,
            threads=threads, tell=tell,
        )  # fmt: skip
    if as_json:
        print_json(asdict(report))
        return
    print_columns([{
        "format": k.format, "rows": str(k.rows), "us a layer": f"{k.microseconds:.0f}",
        "GB/s": f"{k.gigabytes_a_second:.1f}", "of bandwidth": f"{k.bandwidth_share:.0%}",
        "times one row": f"{k.times_one_row:.2f}",
    } for k in report.kernels])  # fmt: skip
    print(
        f"layers of {inputs} by {outputs}, {report.instructions}, {report.threads} threads,"
        f" read bandwidth {report.bandwidth:.1f} GB/s, medians of {repeats} rounds"
    )


app.command(
    epilog="[dim]forerun bench decode --model pair/target --drafts suffix,model:pair/draft --depths auto,4"
    " --quantizations none,int8[/dim]"
)(decode)
app.command(
    epilog="[dim]forerun bench sweep --drafts suffix,ngram --depths 1,2,4,8,auto --temperatures 0,0.8"
    " --requests 1,4 --out sweep.html[/dim]"
)(sweep)
app.command(
    epilog="[dim]forerun bench energy --model Qwen/Qwen3-0.6B --drafts suffix --price 0.4[/dim]"
)(energy)
app.command(
    epilog="[dim]forerun bench start model.gguf        forerun bench start --command 'old/bin/python -m forerun'[/dim]"
)(start)
app.command(
    epilog="[dim]forerun bench serve http://127.0.0.1:8000 --requests 1,4,16 --drafts suffix[/dim]"
)(serve)


@app.command(
    epilog="[dim]forerun bench model --acceptance 0.8 --draft-cost 0.1 --verify-cost 1:1,8:1.1,16:1.5[/dim]"
)
def model(
    acceptance: Annotated[
        str,
        typer.Option(
            help="Chance that a level is accepted after those before it: 0.8, or by level 0.85,0.8,0.75."
        ),
    ],
    depth: Annotated[
        int | None,
        typer.Option(help="The depth to tell about; every depth up to the best without it."),
    ] = None,
    siblings: Annotated[
        str, typer.Option(help="Chances of the draft's second, third, .. choice of a level: trees.")
    ] = "",
    draft_cost: Annotated[
        float, typer.Option(help="Of drafting one level, in passes of the target.")
    ] = 0.0,
    fixed_cost: Annotated[
        float, typer.Option(help="Of drafting whatever the depth: one-pass drafters.")
    ] = 0.0,
    verify_cost: Annotated[
        str,
        typer.Option(
            help="Of a pass by its rows: ROWS:COST,.. (measured), or what a further row adds."
        ),
    ] = "0",
    ahead: Annotated[
        float | None,
        typer.Option(
            help="Draft ahead, on cores of the drafter's own: the chance that what a verdict leaves was drafted for."
        ),
    ] = None,
    inner: Annotated[
        str,
        typer.Option(
            help="ACCEPTANCE:COST[:ROW] of what drafts for the draft model, a>b: the chance that the model says a token"
            " that was drafted for it, the cost of drafting one in passes of the target, and what a further row adds to"
            " a pass of the draft model, as a share of it (without, as for the target)."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(help="Decoding at once.")] = 1,
    as_json: Json = False,
) -> None:
    """Compute expected tokens a pass, speed-up and the best depth from acceptance and costs.
    Nothing is run."""
    from forerun.measure.speedup import DEEPEST, Speculation, cascaded, played
    from forerun.measure.tables import print_json, print_table

    if depth is not None:
        check_integer("depth", depth, 0, DEEPEST)
    rows, levels = _verify_cost(verify_cost), 0
    if inner:
        chance, cost, *row = inner.split(":", 2) if ":" in inner else (inner, "")
        below = number(cost, "inner") / draft_cost if draft_cost else 0.0
        own = _verify_cost(row[0]) if row else rows
        levels, draft_cost = cascaded(
            draft_cost,
            Speculation(acceptance=[number(chance, "inner")], draft_cost=below, verify_cost=own),
        )
    speculation = Speculation(
        acceptance=[number(a, "acceptance") for a in listed(acceptance)],
        siblings=[number(s, "siblings") for s in listed(siblings)],
        draft_cost=draft_cost,
        fixed_cost=fixed_cost,
        verify_cost=rows,
        foreseen=ahead,
        requests=requests,
    )
    best = speculation.best()
    depths = range(1, min(best.depth + 4, DEEPEST) + 1) if depth is None else [depth]
    forecasts = [speculation.at(d) for d in depths]
    plays = [] if ahead is None else [played(speculation, f.depth) for f in forecasts]
    if as_json:
        found: dict[str, Any] = {"depths": [asdict(f) for f in forecasts], "best": asdict(best)}
        found |= {"inner": {"depth": levels, "draft_cost": draft_cost}} if inner else {}
        print_json(found | ({"played": plays} if plays else {}))
        return
    cells = [
        (str(f.depth), str(f.rows), f"{f.tokens:.2f}", f"{f.cost:.2f}", f"{f.speedup:.2f}")
        for f in forecasts
    ]
    print_table(
        ("depth", "rows", "tokens a pass", "cost", "times plain", *(["played"] if plays else [])),
        [(*row, f"{play:.2f}") for row, play in zip(cells, plays, strict=True)] if plays else cells,
    )
    if inner:
        how = f"drafted for {levels} deep" if levels else "best not drafted for"
        print(f"the draft model is {how}: a level of it costs {draft_cost:.3f}")
    print(
        f"best: depth {best.depth}, {best.speedup:.2f} times plain"
        if best.depth
        else "best: not to draft at all"
    )


app.command(
    epilog="[dim]forerun bench peers --model pair/target --draft model:pair/draft"
    " --peers transformers=venv/bin/python,server=http://localhost:8000[/dim]"
)(peers)


def _verify_cost(text: str) -> Any:
    """`0.02`, or `1:1,8:1.1`, as a function of rows."""
    from forerun.measure.speedup import cost_by_rows, cost_by_slope

    if ":" not in text:
        return cost_by_slope(number(text, "verify-cost"))
    points = {}
    for entry in listed(text):
        rows, _, cost = entry.partition(":")
        points[whole(rows, "verify-cost")] = number(cost, "verify-cost")
    return cost_by_rows(points)


app.command(epilog="[dim]forerun bench page laptop.jsonl server.jsonl --out both.html[/dim]")(page)
app.command(
    epilog="[dim]forerun bench roofline --quantization int8 --rows 1,4,8,16 --context 128[/dim]"
)(roofline)
