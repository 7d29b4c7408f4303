"""The commands under `forerun drafters`: list, search, info, pull, push and embed.

Must not import torch; `embed` does when it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.completion import model_names
from forerun.cli.flags import Json, examples
from forerun.cli.models import count_of, print_notes, print_rows, size_of
from forerun.cli.progress import progress
from forerun.errors import ConfigError, ForerunError
from forerun.measure.tables import print_json

if TYPE_CHECKING:
    from forerun.catalog.facts import Facts
    from forerun.catalog.fit import FitCheck
    from forerun.catalog.search import Candidate, LocalDrafter


app = typer.Typer(
    rich_markup_mode="rich",
    help="Find, check, download and publish drafters.",
    epilog=examples("forerun drafters list", "forerun drafters search Qwen/Qwen3-8B"),
)
Domain = Annotated[
    str | None, typer.Option(help="Kind of text, such as code or law; any word is allowed.")
]
For = Annotated[
    str | None,
    typer.Option("--for", help="Target model; the default is the one that the drafter names."),
]
Name = Annotated[
    str, typer.Argument(help="A Hub id, a directory or a GGUF file.", show_default=False)
]
MARKS = {True: "ok", False: "NO", None: "?"}
# Columns that may be wrapped; the others are meant to be copied.
FOLDED = ("kind", "for", "measured", "found because", "drafts here")


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    "list",
    epilog=examples(
        "forerun drafters list",
        "forerun drafters list Qwen/Qwen3-0.6B --domain code",
        "forerun drafters list ollama:qwen3:8b --in drafters/ --json",
    ),
)
def list_(
    target: Annotated[
        str | None,
        typer.Argument(help="A local model.", autocompletion=model_names, show_default=False),
    ] = None,
    inside: Annotated[
        list[Path] | None,
        typer.Option("--in", help="Look in this directory instead of the current one."),
    ] = None,
    domain: Domain = None,
    as_json: Json = False,
) -> None:
    """List the drafters on this machine, for one target model or for all.

    The list includes drafters that come with forerun, those in the Hub's cache and in directories
    below the current one, and, for a target, the multi-token module in its own checkpoint and
    smaller models with the same vocabulary. Nothing is downloaded; only headers are read.
    """
    from forerun.catalog.search import find_local

    for folder in inside or ():
        if not folder.is_dir():
            raise ConfigError(f"there is no directory {folder}: give another to --in")
    found, notes = find_local(target, inside or [Path()], domain)
    if as_json:
        drafters = [drafter.as_dict() for drafter in found]
        print_json({"target": target, "drafters": drafters, "notes": notes})
        return
    print_notes(notes)
    if not found:
        suffix = f" for {target}" if target else ""
        print(
            f"no drafters here{suffix}: forerun drafters search MODEL asks the Hub", file=sys.stderr
        )
        return
    print_rows([_row(drafter) for drafter in found], FOLDED)
    if sys.stdout.isatty() and any(drafter.draft for drafter in found):
        print("the first column is for --draft")


def _row(drafter: LocalDrafter) -> dict[str, str]:
    facts = drafter.facts
    return {
        "drafter": drafter.draft or facts.name,
        "kind": facts.kind.name,
        "size": size_of(facts.bytes),
        "for": facts.made_for or ("any of its vocabulary" if facts.kind.draft == "model" else ""),
        "measured": ", ".join(drafter.figures()) or "nothing yet",
        "drafts here": "yes" if drafter.draft else f"no: {drafter.reason}",
    }


@app.command(
    epilog=examples(
        "forerun drafters search Qwen/Qwen3-8B",
        "forerun drafters search Qwen3-8B --domain code --json",
    )
)
def search(
    target: Annotated[
        str, typer.Argument(help="Hub id or name of the target model.", show_default=False)
    ],
    domain: Domain = None,
    as_json: Json = False,
) -> None:
    """Search the Hub for drafters for a model and show why each was found. Needs the network.

    A drafter is found by the verifier in its configuration, by the base model on its card, or by
    its name. Drafters that name another verifier are left out. Only lists and configurations are
    read.
    """
    from forerun.catalog.search import search_hub

    with progress(as_json or not sys.stderr.isatty()) as tell:
        tell(f"asking the Hub for drafters for {target}")
        found, notes = search_hub(target, domain)
    if as_json:
        candidates = [candidate.as_dict() for candidate in found]
        print_json({"target": target, "found": candidates, "notes": notes})
        return
    print_notes(notes)
    if not found:
        print(
            f"the Hub has nothing that says it drafts for {target}: forerun train makes one",
            file=sys.stderr,
        )
        return
    print_rows([_found_row(candidate) for candidate in found], FOLDED)


def _found_row(candidate: Candidate) -> dict[str, str]:
    return {
        "drafter": candidate.draft or candidate.repository.name,
        "kind": candidate.facts.kind.name if candidate.facts else "",
        "downloads": str(candidate.repository.downloads),
        "found because": "; ".join(candidate.reasons),
        "drafts here": "yes" if candidate.draft else f"no: {candidate.reason}",
    }


@app.command(
    epilog=examples(
        "forerun drafters info RedHatAI/Qwen3-8B-speculator.eagle3 --for Qwen/Qwen3-8B",
        "forerun drafters info my-drafter --json",
    )
)
def info(drafter: Name, target: For = None, as_json: Json = False) -> None:
    """Describe a drafter, check that it fits a target, and show the options that use it.

    For a drafter on the Hub, only its configuration and the headers of its weights are read.
    """
    from forerun.catalog.facts import facts_of
    from forerun.catalog.transfer import describe, examine, target_of

    facts = facts_of(drafter)
    wanted, note = target_of(facts, target)
    found = examine(facts, wanted)
    if as_json:
        print_json(describe(facts, wanted, found, note))
    else:
        for name, text in _lines(facts):
            print(f"{name:<13}{text}")
        _print_checks(found, note)
    wrong = [check.name for check in found if check.ok is False]
    if wrong:
        against = f" {wanted.name}" if wanted else ""
        print(f"forerun: {facts.name} does not fit{against}: {', '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


@app.command(
    epilog=examples("forerun drafters pull RedHatAI/Qwen3-8B-speculator.eagle3 --for Qwen/Qwen3-8B")
)
def pull(drafter: Name, target: For = None, as_json: Json = False) -> None:
    """Download a drafter from the Hub if it fits, and show the options that use it.

    The drafter is checked before its weights are downloaded.
    """
    from forerun.catalog.facts import facts_at, facts_of
    from forerun.catalog.transfer import describe, download, examine, target_of

    facts = facts_of(drafter)
    wanted, note = target_of(facts, target)
    found = examine(facts, wanted)
    _refuse(facts, found)
    if facts.path is None:
        print(
            f"forerun: downloading {drafter}, {size_of(facts.bytes)}", file=sys.stderr, flush=True
        )
        facts = facts_at(download(facts), drafter)
        found = examine(facts, wanted)
        _refuse(facts, found)
    if as_json:
        print_json(describe(facts, wanted, found, note))
        return
    _print_checks(found, note)
    model = target or facts.made_for
    print(
        f"next: forerun generate ... {f'--model {model} ' if model else ''}"
        f"--draft {facts.kind.draft}:{drafter}"
    )


def _refuse(facts: Facts, found: Sequence[FitCheck]) -> None:
    wrong = next((check for check in found if check.ok is False), None)
    if wrong:
        more = "" if facts.path else "; nothing was downloaded"
        raise ConfigError(f"{facts.name} does not fit, {wrong.name}: {wrong.text}{more}")


@app.command(
    epilog=examples(
        "forerun drafters push my-drafter ORG/Qwen3-0.6B-eagle3 --for Qwen/Qwen3-0.6B"
        " --license apache-2.0 --domain code"
    )
)
def push(
    directory: Annotated[
        Path, typer.Argument(help="Directory that forerun train has written.", show_default=False)
    ],
    repository: Annotated[str, typer.Argument(help="ORG/NAME on the Hub.", show_default=False)],
    target: For = None,
    license_: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="License in the Hub's notation, such as apache-2.0; by default that of the card.",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(help="Kind of text the drafter is for; may be repeated.", show_default=False),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Upload without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a drafter to the Hub with a model card. A new repository is private by default."""
    from forerun.catalog.transfer import prepare, upload

    prepared = prepare(directory, repository, target, license_, domain or ())
    if not as_json:
        size = size_of(sum(prepared.files.values()))
        print(
            f"{', '.join(sorted({*prepared.files, *prepared.texts}))}: {size} to {repository}",
            file=sys.stderr,
        )
    print_notes(prepared.notes)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                "the upload cannot be confirmed, since stdin is no terminal: give --yes"
            )
        typer.confirm(
            f"upload to {repository}, {'for everybody' if public else 'private'}?",
            abort=True,
            err=True,
        )
    address = upload(prepared, private=not public)
    print(
        json.dumps({"address": address, **prepared.as_dict()}, default=str) if as_json else address
    )


@app.command(epilog=examples("forerun drafters embed my-mtp model.gguf --out model-mtp.gguf"))
def embed(
    module: Annotated[
        str,
        typer.Argument(
            help="Directory that forerun train --recipe mtp has written.", show_default=False
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="GGUF file of the model that the module was trained for.",
            autocompletion=model_names,
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
) -> None:
    """Write a copy of a GGUF model with a trained multi-token module in it, for --draft auto.

    The model's own tensors and metadata are copied as they are, but for the number of blocks.
    """
    from forerun.draft.eagle.own_module import store_module
    from forerun.models.hub import find_model

    path, directory = find_model(target), find_model(module, pickled=True)
    if not path.is_file():
        raise ConfigError(
            f"{target} is no GGUF file: beside a model in safetensors files, copy the module's"
            " model.safetensors as mtp.safetensors"
        )
    if out.exists():
        raise ConfigError(f"{out} is there already: give another file to --out")
    try:
        store_module(directory, path, out)
    except OSError as error:
        why = error.strerror or error
        raise ForerunError(f"{out} cannot be written: {why}") from None
    print(f"next: forerun generate ... --model {out}")


def _lines(facts: Facts) -> list[tuple[str, str]]:
    kind, count = facts.kind, count_of(facts.parameters)
    lines = [
        ("drafter", facts.name),
        ("kind", f"{kind.title}{f', {kind.format} layout' if kind.format else ''}"),
        ("size", f"{size_of(facts.bytes)}{f', {count} parameters' if count else ''}"),
        ("made for", facts.made_for or "it does not say"),
    ]
    return lines + ([("texts", ", ".join(facts.domains))] if facts.domains else [])


def _print_checks(found: Sequence[FitCheck], note: str) -> None:
    for check in found:
        print(f"{check.name:<13}{MARKS[check.ok]:<4}{check.text}")
    print_notes([note] if note else [])
