"""The verbs under `forerun bench`. Like all of the command line, they import what is heavy when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.cli_peers import peers
from forerun.bench.recipe import PairRecipe
from forerun.config import Config, parse_depth
from forerun.errors import ConfigError
from forerun.flags import ENGINE, SAMPLING, Group, with_flags
from forerun.sampling.params import SamplingParams

app = typer.Typer(
    rich_markup_mode="rich", help="Measure: pairs of models to measure with, kernels, decoding, and the arithmetic."
)
RECIPE = Group("recipe", PairRecipe, "Pair")
DECODED = SAMPLING.without(
    *("n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias")
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PASSAGE = 128  # tokens of a prompt where there is no file of them
DIFFERENT_PASSAGES = 5


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    epilog="[dim]forerun bench pair --out pair        forerun bench pair --out small --layers 4 --hidden 256[/dim]"
)
@with_flags(RECIPE)
def pair(
    out: Annotated[Path, typer.Option(help="The directory to make; it must not hold anything yet.")],
    as_json: Json = False,
    *,
    recipe: dict[str, Any],
) -> None:
    """Write a random-weight target and a draft that agrees with it as often as asked."""
    wanted = PairRecipe(**recipe)
    from forerun.bench.pair import make_pair
    from forerun.bench.report import print_json, progress

    with progress(as_json) as tell:
        made = make_pair(out, wanted, tell)
    if as_json:
        print_json({"directory": str(out), **made.as_dict()})
        return
    measured, (target, draft) = made.agreement, (size / 1e6 for size in made.parameters)
    print(
        f"{out}: target of {target:.1f}M parameters, draft of {draft:.1f}M, eps {made.eps:.4f}\n"
        f"greedy agreement {measured.agree:.1%} of {measured.positions} tokens,"
        f" {measured.accepted.get(4, measured.agree):.2f} of 4 drafted accepted, overlap at temperature 1"
        f" {measured.overlap:.1%}, {measured.looping} of {measured.texts} texts loop\n"
        f"next: forerun bench decode --model {out}/target --drafts suffix,model:{out}/draft"
    )


@app.command(epilog="[dim]forerun bench kernels --formats bfloat16,int8 --rows 1,4,8,16 --threads 2[/dim]")
def kernels(
    formats: Annotated[str, typer.Option(help="Weight formats, separated by commas.")] = "float32,bfloat16,int8,int4",
    rows: Annotated[str, typer.Option(help="Rows of activations.")] = "1,2,3,4,5,6,8,12,16,32,64",
    inputs: Annotated[int, typer.Option(help="Inputs of the layer.")] = 1024,
    outputs: Annotated[int, typer.Option(help="Outputs of the layer.")] = 2816,
    megabytes: Annotated[int, typer.Option(help="Weights of each format: more than the caches hold.")] = 256,
    repeats: Annotated[int, typer.Option(help="Rounds; each times every case once, in turn.")] = 9,
    threads: Annotated[int, typer.Option(help="0 takes one for each core.")] = 0,
    as_json: Json = False,
) -> None:
    """Time the native linear kernels by format and rows, beside the read bandwidth of the moment."""
    counts = [_whole(count, "rows") for count in _listed(rows)]
    from forerun.bench.kernels import measure_kernels
    from forerun.bench.report import print_json, print_table, progress

    with progress(as_json) as tell:
        report = measure_kernels(
            _listed(formats), counts, inputs=inputs, outputs=outputs, megabytes=megabytes, repeats=repeats,
            threads=threads, tell=tell,
        )  # fmt: skip
    if as_json:
        print_json(report.as_dict())
        return
    print_table(
        ("format", "rows", "us a layer", "GB/s", "of bandwidth", "times one row"),
        [
            (
                k.format, str(k.rows), f"{k.microseconds:.0f}", f"{k.gigabytes_a_second:.1f}",
                f"{k.bandwidth_share:.0%}", f"{k.times_one_row:.2f}",
            )
            for k in report.kernels
        ],
    )  # fmt: skip
    print(
        f"layers of {inputs} by {outputs}, {report.instructions}, {report.threads} threads,"
        f" read bandwidth {report.bandwidth:.1f} GB/s, medians of {repeats} rounds"
    )


@app.command(
    epilog="[dim]forerun bench decode --model pair/target --drafts suffix,model:pair/draft --depths auto,4"
    " --quantizations none,int8[/dim]"
)
@with_flags(ENGINE, DECODED)
def decode(
    drafts: Annotated[str | None, typer.Option(help="Drafts to compare, as --draft takes them, by commas.")] = None,
    depths: Annotated[str | None, typer.Option(help="Depths of each draft: numbers or auto, by commas.")] = None,
    quantizations: Annotated[str | None, typer.Option(help="Of the target: none, int8, int4, by commas.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: text (one), .jsonl or .json. Without it, prompts.json beside the model's"
            f" directory, or passages of {PASSAGE} tokens of Python's library."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to produce for each prompt.")] = 256,
    requests: Annotated[int, typer.Option(help="Prompts that run at once.")] = 1,
    repeats: Annotated[int, typer.Option(help="Rounds; each runs everything once, on the next prompts.")] = 5,
    as_json: Json = False,
    *,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Time plain decoding and every draft in turn: tokens a second without the prompt, times plain, the same text?"""
    drafts_ = _plural(drafts, config.pop("draft", None), "draft", "auto")
    depths_ = [parse_depth(depth) for depth in _plural(depths, config.pop("depth", None), "depth", "auto")]
    weights = _plural(quantizations, config.pop("quantization", None), "quantization", "none")
    for name in weights:
        Config.of(**config, quantization=None if name == "none" else name)  # cheaper to refuse before torch is imported
    params = SamplingParams.of(**{"seed": 0} | sampling, max_tokens=tokens, ignore_eos=True)
    from forerun.bench.decode import Plan, measure_decoding
    from forerun.bench.report import print_json, progress

    plan = Plan(weights, drafts_, depths_, params, repeats)
    batches = _batches(config.get("model"), prompts, requests, repeats)
    with progress(as_json) as tell:
        report = measure_decoding(config, plan, batches, tell)
    if as_json:
        print_json(report.as_dict())
    else:
        _show_decoding(report)


def _batches(model: str | None, path: Path | None, requests: int, repeats: int) -> list[list[list[int]]]:
    """The prompts of each run: those of the file, those that belong to a pair, or passages of Python's library."""
    if requests < 1:
        raise ConfigError(f"requests={requests} is out of range: give a whole number from 1 up")
    from forerun.bench.corpus import excerpts, groups, read_prompts
    from forerun.load import load_tokenizer
    from forerun.models.hub import find_model

    directory = find_model(model)
    tokenizer = load_tokenizer(directory)
    if path is None and (directory.parent / "prompts.json").is_file():
        path = directory.parent / "prompts.json"

    def encode(text: str) -> list[int]:
        if tokenizer is None:
            raise ConfigError("this model has no tokenizer: give --prompts with token ids")
        return tokenizer.encode(text)

    if path is not None:
        return groups(read_prompts(path, encode), requests)
    return groups(excerpts(encode, requests * min(max(repeats, 1), DIFFERENT_PASSAGES), PASSAGE), requests)


def _show_decoding(report: Any) -> None:
    """The table, and a line for each quantization that sets plain decoding beside its limit."""
    from forerun.bench.report import print_table

    rows = []
    for r in report.results:
        spread = f" ({r.interval[0]:.2f} to {r.interval[1]:.2f})" if r.interval else ""
        same = "same" if r.same else f"DIFFERENT from token {r.first_difference}"
        rows.append(
            (
                r.quantization, r.draft, "" if r.draft == "off" else str(r.depth), f"{r.tokens_per_second:.1f}",
                f"{r.times_plain:.2f}{spread}", f"{r.accepted_length:.2f}", f"{r.drafted:.1f}", f"{r.draft_ms:.2f}",
                f"{r.pass_ms:.2f}", same,
            )
        )  # fmt: skip
    columns = ("weights", "draft", "depth", "tokens/s", "times plain (95 %)", "accepted length", "drafted a step")
    print_table((*columns, "draft ms", "pass ms", "text"), rows)
    for limit in report.limits:
        size = f"{limit.weight_bytes / 1e6:.0f} MB of weights"
        if limit.bandwidth is None:
            print(f"{limit.quantization}: {size}")
        else:
            print(
                f"{limit.quantization}: {size} at {limit.bandwidth:.1f} GB/s allow {limit.tokens_per_second:.0f} plain"
                f" tokens/s; plain decoding reaches {limit.share:.0%}"
            )
    at_once = f"{report.requests} requests at once" if report.requests > 1 else "one request at a time"
    print(
        f"{report.tokens} tokens, {at_once}, temperature {report.temperature:g}, rule {report.rule},"
        f" medians of {report.repeats} round{'s' * (report.repeats > 1)}; reading prompts is not counted"
    )


@app.command(epilog="[dim]forerun bench model --acceptance 0.8 --draft-cost 0.1 --verify-cost 1:1,8:1.1,16:1.5[/dim]")
def model(
    acceptance: Annotated[
        str, typer.Option(help="Chance that a level is accepted after those before it: 0.8, or by level 0.85,0.8,0.75.")
    ],
    depth: Annotated[
        int | None, typer.Option(help="The depth to tell about; every depth up to the best without it.")
    ] = None,
    siblings: Annotated[
        str, typer.Option(help="Chances of the draft's second, third, .. choice of a level: trees.")
    ] = "",
    draft_cost: Annotated[float, typer.Option(help="Of drafting one level, in passes of the target.")] = 0.0,
    fixed_cost: Annotated[float, typer.Option(help="Of drafting whatever the depth: one-pass drafters.")] = 0.0,
    verify_cost: Annotated[
        str, typer.Option(help="Of a pass by its rows: ROWS:COST,.. (measured), or what a further row adds.")
    ] = "0",
    requests: Annotated[int, typer.Option(help="Decoding at once.")] = 1,
    as_json: Json = False,
) -> None:
    """Compute expected tokens a pass, speed-up and the best depth from acceptance and costs. Nothing is run."""
    from forerun.bench.report import print_json, print_table
    from forerun.bench.speedup import DEEPEST, Speculation

    if depth is not None and not 0 <= depth <= DEEPEST:
        raise ConfigError(f"depth={depth} is out of range: give a whole number from 0 to {DEEPEST}")
    speculation = Speculation(
        acceptance=[_number(a, "acceptance") for a in _listed(acceptance)],
        siblings=[_number(s, "siblings") for s in _listed(siblings)],
        draft_cost=draft_cost,
        fixed_cost=fixed_cost,
        verify_cost=_verify_cost(verify_cost),
        requests=requests,
    )
    best = speculation.best()
    depths = range(1, min(best.depth + 4, DEEPEST) + 1) if depth is None else [depth]
    forecasts = [speculation.at(d) for d in depths]
    if as_json:
        from dataclasses import asdict

        print_json({"depths": [asdict(f) for f in forecasts], "best": asdict(best)})
        return
    print_table(
        ("depth", "rows", "tokens a pass", "cost", "times plain"),
        [(str(f.depth), str(f.rows), f"{f.tokens:.2f}", f"{f.cost:.2f}", f"{f.speedup:.2f}") for f in forecasts],
    )
    print(f"best: depth {best.depth}, {best.speedup:.2f} times plain" if best.depth else "best: not to draft at all")


app.command(
    epilog="[dim]forerun bench peers --model pair/target --draft model:pair/draft"
    " --peers transformers=venv/bin/python,server=http://localhost:8000[/dim]"
)(peers)


def _verify_cost(text: str) -> Any:
    """`0.02`, or `1:1,8:1.1`, as a function of rows."""
    from forerun.bench.speedup import cost_by_rows, cost_by_slope

    if ":" not in text:
        return cost_by_slope(_number(text, "verify-cost"))
    points = {}
    for entry in _listed(text):
        rows, _, cost = entry.partition(":")
        points[_whole(rows, "verify-cost")] = _number(cost, "verify-cost")
    return cost_by_rows(points)


def _listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _plural(many: str | None, one: Any, name: str, default: str) -> list[str]:
    """The values of `--drafts`, or the one of `--draft`; both are an error."""
    if many is not None and one is not None:
        raise ConfigError(f"--{name} and --{name}s were both given: give one of them")
    return _listed(many) if many is not None else [str(one if one is not None else default)]


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is not a whole number") from None


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is not a number") from None
