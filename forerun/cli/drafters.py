"""The verbs under `forerun drafters`: which there are, here and on the Hub, and whether they fit.
No torch here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.completion import model_names
from forerun.cli.flags import Json
from forerun.cli.models import count_of, print_notes, print_rows, size_of
from forerun.cli.progress import progress
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.catalogue.facts import Facts
    from forerun.catalogue.fit import Check
    from forerun.catalogue.found import Candidate
    from forerun.catalogue.here import Known


app = typer.Typer(
    rich_markup_mode="rich",
    help="Drafters: which are here and on the Hub, whether they fit a model, what they were measured to give.",
)
Domain = Annotated[
    str | None, typer.Option(help="A kind of text: code, law, or a word of your own.")
]
For = Annotated[
    str | None, typer.Option("--for", help="The target; without it the one that the drafter names.")
]
Name = Annotated[
    str, typer.Argument(help="A Hub id, a directory or a GGUF file.", show_default=False)
]
MARKS = {True: "ok", False: "NO", None: "?"}
FOLDED = (
    "kind",
    "for",
    "measured",
    "found because",
    "drafts here",
)  # columns: the others are there to be copied


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    "list",
    epilog="[dim]forerun drafters list        forerun drafters list Qwen/Qwen3-0.6B --domain code"
    "        forerun drafters list ollama:qwen3:8b --in drafters/ --json[/dim]",
)
def list_(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A model that is here.", autocompletion=model_names, show_default=False
        ),
    ] = None,
    inside: Annotated[
        list[Path] | None,
        typer.Option("--in", help="Look in this directory instead of the current one."),
    ] = None,
    domain: Domain = None,
    as_json: Json = False,
) -> None:
    """List the drafters that this machine has, for a target or for any.

    Those that come with forerun, those in the Hub's cache and in directories below the current one,
    and, for a target, smaller models with its vocabulary. Nothing is downloaded, only headers are
    read."""
    from forerun.catalogue.here import known

    for folder in inside or ():
        if not folder.is_dir():
            raise ConfigError(f"there is no directory {folder}: give another to --in")
    found, notes = known(target, inside or [Path()], domain)
    if as_json:
        print(
            json.dumps(
                {"target": target, "drafters": [one.as_dict() for one in found], "notes": notes}
            )
        )
        return
    print_notes(notes)
    if not found:
        said = f" for {target}" if target else ""
        print(
            f"no drafters here{said}: forerun drafters search MODEL asks the Hub", file=sys.stderr
        )
        return
    print_rows([_row(one) for one in found], FOLDED)
    if sys.stdout.isatty() and any(one.draft for one in found):
        print("the first column is for --draft")


def _row(one: Known) -> dict[str, str]:
    facts = one.facts
    return {
        "drafter": one.draft or facts.name,
        "kind": facts.kind.name,
        "size": size_of(facts.bytes),
        "for": facts.made_for or ("any of its vocabulary" if facts.kind.draft == "model" else ""),
        "measured": ", ".join(one.figures()) or "nothing yet",
        "drafts here": "yes" if one.draft else f"no: {one.reason}",
    }


@app.command(
    epilog="[dim]forerun drafters search Qwen/Qwen3-8B"
    "        forerun drafters search Qwen3-8B --domain code --json[/dim]"
)
def search(
    target: Annotated[
        str, typer.Argument(help="The model, by its Hub id, or by its name.", show_default=False)
    ],
    domain: Domain = None,
    as_json: Json = False,
) -> None:
    """Search the Hub for drafters for a model, and say why each was found. Needs the network.

    Found by the verifier that a drafter's configuration names, by the base model on its card, and
    by its name; what names another verifier is left out. Only lists and configurations are read.
    """
    from forerun.catalogue.found import search as ask

    with progress(as_json or not sys.stderr.isatty()) as tell:
        tell(f"asking the Hub for drafters for {target}")
        found, notes = ask(target, domain)
    if as_json:
        print(
            json.dumps(
                {"target": target, "found": [one.as_dict() for one in found], "notes": notes}
            )
        )
        return
    print_notes(notes)
    if not found:
        print(
            f"the Hub has nothing that says it drafts for {target}: forerun train makes one",
            file=sys.stderr,
        )
        return
    print_rows([_found_row(one) for one in found], FOLDED)


def _found_row(one: Candidate) -> dict[str, str]:
    said = one.as_dict()
    return {
        "drafter": one.draft or one.at.name,
        "kind": one.facts.kind.name if one.facts else "",
        "downloads": str(one.at.downloads),
        "found because": "; ".join(one.reasons),
        "drafts here": "yes" if one.draft else f"no: {said['reason']}",
    }


@app.command(
    epilog="[dim]forerun drafters info RedHatAI/Qwen3-8B-speculator.eagle3 --for Qwen/Qwen3-8B"
    "        forerun drafters info my-drafter --json[/dim]"
)
def info(drafter: Name, target: For = None, as_json: Json = False) -> None:
    """Say what a drafter is, whether it fits a target, and what to write to draft with it.

    Of a drafter on the Hub only its configuration and the headers of its weights are read.
    """
    from forerun.catalogue.facts import facts_of
    from forerun.catalogue.pull import describe, examine, target_of

    facts = facts_of(drafter)
    wanted, note = target_of(facts, target)
    found = examine(facts, wanted)
    if as_json:
        print(json.dumps(describe(facts, wanted, found, note)))
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
    epilog="[dim]forerun drafters pull RedHatAI/Qwen3-8B-speculator.eagle3 --for Qwen/Qwen3-8B[/dim]"
)
def pull(drafter: Name, target: For = None, as_json: Json = False) -> None:
    """Download a drafter from the Hub, if it fits, and say what to write to draft with it.

    What can be checked is checked first, so that nothing large is downloaded for nothing.
    """
    from forerun.catalogue.facts import facts_at, facts_of
    from forerun.catalogue.pull import describe, download, examine, target_of

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
        print(json.dumps(describe(facts, wanted, found, note)))
        return
    _print_checks(found, note)
    model = target or facts.made_for
    print(
        f"next: forerun generate ... {f'--model {model} ' if model else ''}--draft {facts.kind.draft}:{drafter}"
    )


def _refuse(facts: Facts, found: Sequence[Check]) -> None:
    wrong = next((check for check in found if check.ok is False), None)
    if wrong:
        more = "" if facts.path else "; nothing was downloaded"
        raise ConfigError(f"{facts.name} does not fit, {wrong.name}: {wrong.text}{more}")


@app.command(
    epilog="[dim]forerun drafters push my-drafter ORG/Qwen3-0.6B-eagle3 --for Qwen/Qwen3-0.6B --license apache-2.0"
    " --domain code[/dim]"
)
def push(
    directory: Annotated[
        Path, typer.Argument(help="What forerun train has written.", show_default=False)
    ],
    repository: Annotated[str, typer.Argument(help="ORG/NAME on the Hub.", show_default=False)],
    target: For = None,
    license_: Annotated[
        str | None,
        typer.Option(
            "--license", help="As the Hub writes it: apache-2.0, say; else that of its card."
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(help="A kind of text that it is for; may be repeated.", show_default=False),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see a repository that is new.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a drafter to the Hub, with a card by which it is found; private, unless said
    otherwise."""
    from forerun.catalogue.push import pack
    from forerun.catalogue.push import push as upload

    parcel = pack(directory, repository, target, license_, domain or ())
    if not as_json:
        size = size_of(sum(parcel.files.values()))
        print(
            f"{', '.join(sorted({*parcel.files, *parcel.texts}))}: {size} to {repository}",
            file=sys.stderr,
        )
    print_notes(parcel.notes)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody is there to be asked whether to upload this: give --yes")
        typer.confirm(
            f"upload to {repository}, {'for everybody' if public else 'private'}?",
            abort=True,
            err=True,
        )
    address = upload(parcel, private=not public)
    print(json.dumps({"address": address, **parcel.as_dict()}, default=str) if as_json else address)


def _lines(facts: Facts) -> list[tuple[str, str]]:
    kind, count = facts.kind, count_of(facts.parameters)
    lines = [
        ("drafter", facts.name),
        ("kind", f"{kind.title}{f', {kind.dialect} layout' if kind.dialect else ''}"),
    ]
    lines += [("size", f"{size_of(facts.bytes)}{f', {count} parameters' if count else ''}")]
    lines += [("made for", facts.made_for or "it does not say")]
    return lines + ([("texts", ", ".join(facts.domains))] if facts.domains else [])


def _print_checks(found: Sequence[Check], note: str) -> None:
    for check in found:
        print(f"{check.name:<13}{MARKS[check.ok]:<4}{check.text}")
    print_notes([note] if note else [])
