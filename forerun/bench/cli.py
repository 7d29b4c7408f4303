"""The verbs under `forerun bench`. Heavy modules are imported when a verb runs."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.options import FLAGS, SAMPLING_FLAGS, DecodeOptions, plan_fields
from forerun.bench.recipe import PairRecipe
from forerun.bench.shapes import SHAPES, named_shape
from forerun.cli.completion import model_names
from forerun.cli.flags import (
    ENGINE,
    Group,
    Json,
    examples,
    model_as_argument,
    with_flags,
    with_model,
)
from forerun.cli.progress import progress
from forerun.config import parse_depth
from forerun.draft_spec import drafts_in
from forerun.errors import ConfigError, ForerunError, Interrupted
from forerun.measure.tables import (
    listed,
    parse_integer,
    parse_number,
    print_columns,
    print_json,
    print_table,
    times_and_interval,
)
from forerun.measure.workloads import builtin, choose_tasks, excerpts, of_categories, read_tasks
from forerun.utils import check_integer, json_line, write_atomic

if TYPE_CHECKING:
    from forerun.bench.decode import DecodeReport
    from forerun.bench.endpoint import Prompt
    from forerun.bench.pair import Pair
    from forerun.bench.serve import ServeReport, ServeResult

ROUNDS, SETTLE_SECONDS = 9, 120.0  # of decode, if no number of rounds is given
REPEATS_HELP = (
    f"{ROUNDS}, and more for up to {SETTLE_SECONDS:.0f} s while a ratio is uncertain by 3 %"
)
DECODE_DEFAULTS: dict[str, Any] = {"tokens": 256, "batches": 5}
SWEEP_DEPTHS = "1,2,4,8,auto"
PASSAGE_CHARACTERS = 400  # of a prompt for a server, some 130 tokens
PASSAGES = 1024  # enough that most measurements repeat no prompt
DRAFT_COLUMNS = ("draft", "times plain (95 %)", "text")  # of serve, only where drafts are compared
MODEL_HELP = "A GGUF file, a directory, ollama:NAME, lmstudio:NAME or a Hub id."

app = typer.Typer(
    rich_markup_mode="rich",
    help="Measure decoding, start-up and servers, make model pairs, and predict the speed-up."
    " Other engines, kernels, the roofline and energy are measured by scripts in the repository:"
    " python -m benchmarks.peers, .kernels, .roofline, .energy;"
    " .report makes tables of --out files.",
    epilog=examples(
        "forerun bench decode --drafts suffix,ngram",
        "forerun bench serve http://127.0.0.1:8000",
    ),
)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    epilog=examples(
        "forerun bench pair --out pair",
        "forerun bench pair --out small --layers 4 --hidden 256",
        "forerun bench pair --out moe --shape moe-3b --format q4_k_m",
    )
)
@with_flags(Group("recipe", PairRecipe, "Pair"))
def pair(
    out: Annotated[Path, typer.Option(help="The directory to create; it must be empty or absent.")],
    shape: Annotated[
        str | None,
        typer.Option(help=f"Sizes of a published model: {', '.join(SHAPES)}.", show_default=False),
    ] = None,
    as_json: Json = False,
    *,
    recipe: dict[str, Any],
) -> None:
    """Write a random-weight target and a draft model with a chosen agreement."""
    wanted = PairRecipe(**(named_shape(shape) if shape else {}) | recipe)
    from forerun.bench.packed_pair import make_packed_pair
    from forerun.bench.pair import make_pair

    with progress(as_json) as tell:
        result = (make_packed_pair if wanted.is_packed else make_pair)(out, wanted, tell)
    if as_json:
        print_json({"directory": str(out), **result.as_dict()})
    else:
        _print_pair(result)


def _print_pair(pair: Pair) -> None:
    """Print sizes, agreement and the next command."""
    target, draft = (size / 1e6 for size in pair.parameters)
    sizes = f"target of {target:.1f}M parameters, draft of {draft:.1f}M"
    if pair.recipe.experts:
        sizes += f", {pair.active[0] / 1e6:.1f}M and {pair.active[1] / 1e6:.1f}M a token"
    eps = "" if pair.eps is None else f", eps {pair.eps:.4f}"
    print(f"{pair.directory}: {sizes}{eps}")
    measured = pair.agreement
    print(
        f"greedy agreement {measured.agree:.1%} of {measured.positions} tokens,"
        f" {measured.accepted.get(4, measured.agree):.2f} of 4 drafted accepted, overlap at"
        f" temperature 1 {measured.overlap:.1%}, {measured.looping} of {measured.texts} texts loop"
    )
    if pair.measured_layers < pair.recipe.layers:
        print(f"measured with a target of {pair.measured_layers} layers that is otherwise the same")
    if pair.middle:
        with_target, with_draft = pair.middle
        print(f"the middle model agrees with {with_target:.1%} of the target's greedy tokens")
        print(f"the draft agrees with {with_draft:.1%} of the middle model's")
    models = pair.directory / pair.target, pair.directory / pair.draft
    print(f"next: forerun bench decode --model {models[0]} --drafts suffix,model:{models[1]}")


@app.command(
    epilog=examples(
        "forerun bench decode --model pair/target --drafts suffix,model:pair/draft --depths auto,4"
        " --quantizations none,int8"
    )
)
@with_flags(
    ENGINE,
    SAMPLING_FLAGS,
    replace(
        FLAGS.without("rules", "temperatures"), defaults=DECODE_DEFAULTS | {"repeats": REPEATS_HELP}
    ),
)
def decode(
    *,
    as_json: Json = False,
    config: dict[str, Any],
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Time plain decoding and every draft in turn: tokens per second, times plain."""
    settle = 0.0 if "repeats" in options else SETTLE_SECONDS
    given = DecodeOptions(**DECODE_DEFAULTS | {"repeats": ROUNDS} | options)
    fields = plan_fields(given, config, sampling, "auto", "auto")
    _measure("decode", config, given, fields | {"settle": settle}, as_json)


@app.command(
    epilog=examples(
        "forerun bench sweep --drafts suffix,ngram --depths 1,2,4,8,auto --temperatures 0,0.8"
        " --requests 1,4 --out sweep.jsonl"
    )
)
@with_flags(ENGINE, SAMPLING_FLAGS, FLAGS)
def sweep(
    *,
    as_json: Json = False,
    config: dict[str, Any],
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Time every combination of drafts, depths, rules, temperatures and concurrency."""
    given = DecodeOptions(**options)
    fields = plan_fields(given, config, sampling, "suffix", SWEEP_DEPTHS)
    _measure("sweep", config, given, fields, as_json)


def _measure(
    kind: str, config: dict[str, Any], options: DecodeOptions, fields: dict[str, Any], as_json: bool
) -> None:
    """Measure a plan, record and print its results."""
    _check_out(options.out)
    from forerun.bench.decode import DecodePlan, measure_decoding, record_results

    plan = DecodePlan(**fields, repeats=options.repeats, batches=options.batches)
    model = config.get("model")
    tasks = choose_tasks(
        model, options.prompts, options.categories, max(plan.requests), options.batches
    )
    with progress(as_json, measuring=True) as tell:
        report = measure_decoding(config, plan, tasks, tell, kind)
    record_results(model, report.results)
    if as_json:
        print_json(asdict(report))
    else:
        _print_decoding(report)
    _write_lines(options.out, asdict(report))


def _print_decoding(report: DecodeReport) -> None:
    """Print a table of the columns that differ, and the bound on plain decoding."""
    rows = []
    for r in report.results:
        plain = r.draft == "off"
        rows.append(
            {
                "category": r.category,
                "temperature": f"{r.temperature:g}",
                "at once": str(r.requests),
                "weights": r.quantization,
                "draft": r.draft,
                "depth": "" if plain else str(r.depth),
                "rule": "" if plain else r.rule,
                "tokens/s": f"{r.tokens_per_second:.1f}",
                "times plain (95 %)": times_and_interval(r.times_plain, r.interval),
                "accepted length": f"{r.accepted_length:.2f}",
                "drafted a step": f"{r.drafted:.1f}",
                "draft ms": f"{r.draft_ms:.2f}",
                "pass ms": f"{r.pass_ms:.2f}",
                "J/token": _known(r.joules_per_token, ".3g"),
                "a million": _known(r.cost_per_million, ".3g"),
                "text": _compared(r.same, r.first_difference, "same distribution"),
            }
        )
    settings = ("category", "temperature", "at once", "weights", "rule")
    print_columns(rows, optional=(*settings, "J/token", "a million"))
    for limit in report.limits:
        at_once = f", {limit.requests} at once" if limit.requests > 1 else ""
        size = f"{limit.quantization}{at_once}: {limit.weight_bytes / 1e6:.0f} MB of weights"
        if limit.bandwidth is None:
            print(size)
        else:
            print(
                f"{size} at {limit.bandwidth:.1f} GB/s allow {limit.tokens_per_second:.0f} plain"
                f" tokens/s; plain decoding reaches {limit.share:.0%}"
            )
    print(
        f"{report.tokens} tokens per prompt, each prompt the median of {_rounds(report.repeats)};"
        " prefill is not counted"
    )


@app.command(
    epilog=examples(
        "forerun bench start model.gguf",
        "forerun bench start --command 'old/bin/python -m forerun'",
    )
)
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
            "--command", help="How another installation is called, to compare; may be repeated."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of rounds, after an uncounted one.")] = 5,
    as_json: Json = False,
) -> None:
    """Time the start of `generate` and `serve` to their first text, with memory."""
    from forerun.bench.start import measure_starts, size_of, this_command
    from forerun.measure.run import machine

    named = with_model(model_argument, {} if model is None else {"model": model}).get("model")
    size = size_of(named)
    arguments = ["--model", named] if named else []
    with progress(as_json, measuring=True) as tell:
        starts = measure_starts([this_command(), *(commands or [])], arguments, repeats, tell)
    if as_json:
        found = [asdict(start) for start in starts]
        print_json({"machine": machine(), "weights_bytes": size, "starts": found})
        return
    rows = [
        {
            "command": start.command,
            "verb": start.verb,
            "ready s": _known(start.ready, ".2f"),
            "first word s": f"{start.first:.2f}",
            "memory MB": f"{start.memory / 1e6:.0f}",
            "over weights MB": f"{(start.memory - size) / 1e6:.0f}",
        }
        for start in starts
    ]
    print_columns(rows, optional=("command",))
    print(f"weights of {size / 1e6:.0f} MB on disk, medians of {repeats} rounds")


@app.command(
    epilog=examples("forerun bench serve http://127.0.0.1:8000 --requests 1,4,16 --drafts suffix")
)
def serve(
    url: Annotated[
        str,
        typer.Argument(help="A server with the OpenAI API, such as http://127.0.0.1:8000."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name of the model, if there are several.")
    ] = None,
    requests: Annotated[
        str, typer.Option(help="Numbers of concurrent requests, separated by commas.")
    ] = "1,4,16",
    drafts: Annotated[
        str | None,
        typer.Option(help="Drafts to compare with plain decoding (forerun servers), with commas."),
    ] = None,
    depth: Annotated[
        str | None, typer.Option(help="Depth of these drafts: a number or auto.")
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", "--max-tokens", "-n", help="Maximum number of tokens of an answer."
        ),
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "--temp", "-t", help="Sampling temperature of all requests."),
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option("--seed", "-s", help="Seed of the first request, and index of its prompt."),
    ] = 0,
    repeats: Annotated[
        int, typer.Option(help="Number of rounds; each runs everything once, on the next prompts.")
    ] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Duration of a run; without it, each client sends 3 requests.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts. Without it, passages of Python's standard library."),
    ] = None,
    category: Annotated[
        str | None,
        typer.Option(help="Categories of the file's tasks or the built-in ones, with commas."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Maximum seconds to wait for the next piece of an answer.")
    ] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the results to a .jsonl file, for benchmarks.report."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a running server under load: throughput, time to first token, between tokens, drafts."""
    counts = [parse_integer(count, "requests") for count in listed(requests)]
    key = _api_key(api_key_env) if api_key_env is not None else None
    _check_out(out)
    try:
        from forerun.bench.endpoint import Endpoint
    except ImportError as error:
        raise ForerunError(f"this needs {error.name}: pip install 'forerun[bench]'") from None
    from forerun.bench.serve import INTERRUPTED, ServePlan, measure_serving

    plan = ServePlan(
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
        raise ConfigError("--drafts is empty: give one or more, such as --drafts suffix")
    with progress(as_json, measuring=True) as tell:
        report = measure_serving(plan, _server_prompts(prompts, category), tell)
    if as_json:
        print_json(report.as_dict())
    elif report.results:
        _print_serving(report)
    if report.results:
        _write_lines(out, report.as_dict())
    if report.stopped is not None:
        ended = f"{report.stopped}; the results are those measured until then"
        raise Interrupted(ended) if report.stopped == INTERRUPTED else ForerunError(ended)


def _server_prompts(path: Path | None, category: str | None) -> list[Prompt]:
    """Return the prompts of a file, of built-in tasks, or passages of the standard library."""
    if path is None and category is None:
        passages = excerpts(lambda text: [ord(c) for c in text], PASSAGES, PASSAGE_CHARACTERS)
        return ["".join(map(chr, passage)) for passage in passages]
    tasks = builtin() if path is None else read_tasks(path)
    return [task.prompt for task in of_categories(tasks, listed(category or ""))]


def _print_serving(report: ServeReport) -> None:
    """Print the table, the failures, and how it was measured."""
    print_columns([_serving_row(result) for result in report.results])
    for result in report.results:
        for error, count in result.errors.items():
            source = result.draft or "requests"
            print(f"{source}, {result.requests} at once: {count} failed: {error}")
    print(
        f"{report.model} on {report.server or 'a server'} at {report.url}, {report.tokens} tokens,"
        f" temperature {report.temperature:g}"
    )
    print(
        f"medians of {_rounds(report.repeats)}; milliseconds are the 50th, 95th and 99th"
        " percentile, as a client sees them"
    )
    if any(result.counted == "chunks" for result in report.results):
        print(
            "the server gives no usage: chunks are counted, each of which may hold several tokens"
        )
    cached = max((result.cached or 0.0 for result in report.results), default=0.0)
    if cached:
        print(f"up to {cached:.0%} of the prompt tokens came from the server's cache")
    if report.repeated:
        print(
            f"the server has seen some of these {report.prompts} prompts before, which helps caches"
            " and drafters that remember: give more of them, or another --seed"
        )


def _serving_row(r: ServeResult) -> dict[str, str]:
    def milliseconds(percentiles: dict[str, float]) -> str:
        return ", ".join(f"{ms:.1f}" for ms in percentiles.values()) or "-"

    cells = {
        "draft": str(r.draft),
        "at once": str(r.requests),
        "tokens/s": f"{r.tokens_per_second:.1f}",
        "times plain (95 %)": "-"
        if r.times_plain is None
        else times_and_interval(r.times_plain, r.interval),
        "requests/s": f"{r.requests_per_second:.2f}",
        "first token ms": milliseconds(r.first_token_ms),
        "between tokens ms": milliseconds(r.inter_token_ms),
        "accepted length": _known(r.accepted_length, ".2f", "-"),
        "acceptance": _known(r.acceptance, ".0%", "-"),
        "failed": str(sum(r.errors.values())),
        "text": _compared(r.same, r.first_difference, "not compared"),
    }
    return {
        name: cell
        for name, cell in cells.items()
        if r.draft is not None or name not in DRAFT_COLUMNS
    }


@app.command(
    epilog=examples(
        "forerun bench model --acceptance 0.8 --draft-cost 0.1 --verify-cost 1:1,8:1.1,16:1.5"
    )
)
def model(
    acceptance: Annotated[
        str,
        typer.Option(
            help="Probability that a level is accepted given those before it: 0.8, or by level"
            " 0.85,0.8,0.75."
        ),
    ],
    depth: Annotated[
        int | None, typer.Option(help="A single depth; by default every depth up to the best.")
    ] = None,
    siblings: Annotated[
        str, typer.Option(help="Probabilities of the draft's second, third, .. choice (trees).")
    ] = "",
    draft_cost: Annotated[
        float, typer.Option(help="Cost of drafting one level, in target forward passes.")
    ] = 0.0,
    fixed_cost: Annotated[
        float, typer.Option(help="Cost of a draft of any depth (one-pass drafters).")
    ] = 0.0,
    verify_cost: Annotated[
        str, typer.Option(help="Cost of a pass by its rows: ROWS:COST,.., or what each row adds.")
    ] = "0",
    ahead: Annotated[
        float | None,
        typer.Option(
            help="Asynchronous drafting on other cores: probability of anticipating the verdict."
        ),
    ] = None,
    inner: Annotated[
        str,
        typer.Option(
            help="ACCEPTANCE:COST[:ROW] of what drafts for the draft model (a>b): probability that"
            " the model accepts its token, cost of drafting one in target passes, and what each row"
            " adds to the draft model's pass (by default as for the target)."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(help="Number of concurrent requests.")] = 1,
    as_json: Json = False,
) -> None:
    """Predict tokens per pass, speed-up and the best depth from acceptance and costs."""
    from forerun.costs import MAX_DEPTH, Speculation, cascaded

    if depth is not None:
        check_integer("depth", depth, 0, MAX_DEPTH)
    rows = _verify_cost(verify_cost)
    levels = 0
    if inner:
        chance, _, rest = inner.partition(":")
        cost, _, row = rest.partition(":")
        cascade = Speculation(
            acceptance=[parse_number(chance, "inner")],
            draft_cost=parse_number(cost, "inner") / draft_cost if draft_cost else 0.0,
            verify_cost=_verify_cost(row) if row else rows,
        )
        levels, draft_cost = cascaded(draft_cost, cascade)
    speculation = Speculation(
        acceptance=[parse_number(a, "acceptance") for a in listed(acceptance)],
        siblings=[parse_number(s, "siblings") for s in listed(siblings)],
        draft_cost=draft_cost,
        fixed_cost=fixed_cost,
        verify_cost=rows,
        foreseen=ahead,
        requests=requests,
    )
    best = speculation.best()
    depths = range(1, min(best.depth + 4, MAX_DEPTH) + 1) if depth is None else [depth]
    forecasts = [speculation.at(d) for d in depths]
    if as_json:
        found: dict[str, Any] = {"depths": [asdict(f) for f in forecasts], "best": asdict(best)}
        print_json(
            found | ({"inner": {"depth": levels, "draft_cost": draft_cost}} if inner else {})
        )
        return
    print_table(
        ("depth", "rows", "tokens a pass", "cost", "times plain"),
        [
            (str(f.depth), str(f.rows), f"{f.tokens:.2f}", f"{f.cost:.2f}", f"{f.speedup:.2f}")
            for f in forecasts
        ],
    )
    if inner:
        how = f"drafted for at depth {levels}" if levels else "faster without a draft of its own"
        print(f"the draft model is {how}: a level costs {draft_cost:.3f}")
    if best.depth:
        print(f"best: depth {best.depth}, {best.speedup:.2f} times plain")
    else:
        print("best: plain decoding")


def _verify_cost(text: str) -> Any:
    """Parse `0.02` or `1:1,8:1.1` into a function of rows."""
    from forerun.costs import cost_by_rows, cost_by_slope

    if ":" not in text:
        return cost_by_slope(parse_number(text, "verify-cost"))
    points = {}
    for entry in listed(text):
        rows, _, cost = entry.partition(":")
        points[parse_integer(rows, "verify-cost")] = parse_number(cost, "verify-cost")
    return cost_by_rows(points)


def _known(value: float | None, form: str, unknown: str = "") -> str:
    return unknown if value is None else format(value, form)


def _compared(same: bool | None, first_difference: int | None, unknown: str) -> str:
    """Describe whether outputs equal plain decoding's."""
    if same is None:
        return unknown
    return "same" if same else f"DIFFERENT from token {first_difference}"


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count > 1)}"


def _api_key(name: str) -> str:
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"the environment variable {name} is not set: export the API key in it")
    return key


def _check_out(path: Path | None) -> None:
    """Raise ConfigError before the measurement if its results could not be written."""
    if path is None:
        return
    if path.suffix != ".jsonl":
        raise ConfigError(f"--out {path} does not end in .jsonl")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path} cannot be written: give a file in a directory that exists")


def _write_lines(path: Path | None, report: dict[str, Any]) -> None:
    """Write one JSON line per result with the fields of its run, so that files concatenate."""
    if path is None:
        return
    run = {name: value for name, value in report.items() if name not in ("results", "limits")}
    lines = [json_line(run | result) + "\n" for result in report["results"]]
    write_atomic(path, "".join(lines))
