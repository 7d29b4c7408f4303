"""The verb `forerun bench start`."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.completion import model_names

MODEL_HELP = "A GGUF file, a directory, ollama:NAME, lmstudio:NAME or a Hub id; without it, the default model."


def start(
    model_argument: Annotated[
        str | None,
        typer.Argument(help="The same as --model.", metavar="MODEL", show_default=False, autocompletion=model_names),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False, autocompletion=model_names)
    ] = None,
    commands: Annotated[
        list[str] | None,
        typer.Option(
            "--command", help="How forerun is called, to compare installations with this one; may be repeated."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds, after one that is not counted.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time starts, with their memory: to generate's first word, until serve is ready, to its answer."""
    from forerun.bench.machine.start import here, measure_starts, size_of
    from forerun.flags import with_model
    from forerun.measure.tables import print_columns, print_json
    from forerun.measure.where import machine
    from forerun.progress import progress

    named = with_model(model_argument, {} if model is None else {"model": model}).get("model")
    size = size_of(named)
    with progress(as_json, measuring=True) as tell:
        found = measure_starts([here(), *(commands or [])], ["--model", named] if named else [], repeats, tell)
    if as_json:
        print_json({"machine": machine(), "weights_bytes": size, "starts": [each.as_dict() for each in found]})
        return
    print_columns(
        [
            {
                "command": each.command, "verb": each.verb,
                "ready s": "" if each.ready is None else f"{each.ready:.2f}",
                "first word s": f"{each.first:.2f}", "memory MB": f"{each.memory / 1e6:.0f}",
                "over weights MB": f"{(each.memory - size) / 1e6:.0f}",
            }
            for each in found
        ],
        ("command",),
    )  # fmt: skip
    print(f"weights of {size / 1e6:.0f} MB on disk, medians of {repeats} rounds")
