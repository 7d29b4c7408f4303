"""The verb `forerun check`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import ENGINE, Json, with_flags

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.check.report import Certificate, Finding

SIGNS = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("untested", "yellow")}


@with_flags(ENGINE.without("depth"))
def check(
    texts: Annotated[
        int, typer.Option(help="Number of prompts, each continued at temperature 0 and 0.8.")
    ] = 4,
    tokens: Annotated[
        int,
        typer.Option("--tokens", "--max-tokens", "-n", help="Number of tokens of each text."),
    ] = 48,
    samples: Annotated[
        int, typer.Option(help="Number of sampled tokens of each distribution test.")
    ] = 2000,
    seconds: Annotated[
        float, typer.Option(help="Seconds after which no further comparison begins.")
    ] = 150.0,
    inject: Annotated[
        str | None,
        typer.Option(help="Inject a known fault, such as lenient; the check must then fail."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every check with its result.")
    ] = False,
    as_json: Json = False,
    *,
    config: dict[str, Any],
) -> None:
    """Prove on this machine that speculation does not change the model's output.

    Exit code 1 if it does. Checks the verification rules by exact enumeration, forward passes bit
    by bit, texts token for token, the distribution of sampled tokens by a sequential test, and that
    these checks find known faults. Without --draft it checks every available drafter, without
    --rule every lossless rule.
    """
    from forerun.check.certificate import LOSSLESS, Scope, certify, drafts_to_check
    from forerun.check.report import count

    rules = (config["rule"],) if "rule" in config else LOSSLESS
    named = config.get("draft")
    scope = Scope(rules, (), texts, tokens, samples, seconds, inject)
    if ":" in config.get("draft", "") and config.get("rule") not in ("token", "block"):
        config.setdefault("width", 2)  # draft trees for the rules that accept them
    from forerun.cli.progress import progress
    from forerun.llm import LLM
    from forerun.measure.tables import print_json

    terminal = sys.stderr.isatty()

    def report(findings: list[Finding]) -> None:
        if not as_json and not terminal:
            line = f"{findings[0].part}: {count(findings)} passed"
            print(line, file=sys.stderr, flush=True)

    with progress(as_json or not terminal) as tell:
        tell("loading")
        llm = LLM(**config)
        scope = replace(scope, drafts=drafts_to_check(llm, llm.draft if named else None))
        certificate = certify(llm, scope, report, tell)
    if as_json:
        print_json(certificate.as_dict())
    else:
        _print(certificate, verbose)
    if not certificate.passed:
        raise typer.Exit(1)


def _print(certificate: Certificate, verbose: bool) -> None:
    """Print the verdict, the failures, the claim of each part and, if verbose, every check."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    first, *more = certificate.verdict()
    console.print(Text(first, style="bold green" if certificate.passed else "bold red"))
    for line in more:
        console.print(Text(line))
    _print_rows(console, "", [_row(f) for f in (*certificate.failed, *certificate.untested)])
    _print_rows(console, "", [(part, "bold", text) for part, text in certificate.parts()])
    if verbose:
        _print_rows(console, "all checks:", [_row(f) for f in certificate.findings])


def _print_rows(console: Console, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print rows of a word, its style and a text."""
    from rich.text import Text

    if not rows:
        return
    width = max(len(word) for word, _, _ in rows)
    console.print(f"\n{title}" if title else "")
    for word, style, text in rows:
        console.print(Text.assemble((f"{word:<{width}}", style), f"  {text}"))


def _row(finding: Finding) -> tuple[str, str, str]:
    word, style = SIGNS[finding.passed]
    return word, style, f"{finding.part}: {finding.subject}: {finding.text}"
