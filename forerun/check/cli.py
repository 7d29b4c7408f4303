"""The verb `forerun check`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import ENGINE, with_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from forerun.check.certificate import Certificate
    from forerun.check.findings import Finding

SIGNS = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("untested", "yellow")}


@with_flags(ENGINE.without("depth"))
def check(
    texts: Annotated[
        int, typer.Option(help="Prompts, each continued at temperature 0 and 0.8.")
    ] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 48,
    samples: Annotated[int, typer.Option(help="Tokens for each test of a law.")] = 2000,
    seconds: Annotated[float, typer.Option(help="Begin no further comparison after that.")] = 150.0,
    inject: Annotated[
        str | None,
        typer.Option(
            help="Put a known fault in, such as lenient: the check must fail and say where."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every claim with what was found.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """Prove on this machine that speculation does not change what the model says. Exit code 1 if it
    does.

    Rules by exact enumeration, passes bit by bit, texts token for token (where one parts, with its
    margin), the law of sampled tokens by a sequential test, and known faults put in, each of which
    must be found. Without --draft every drafter at hand, without --rule every lossless rule.
    """
    from forerun.check.certificate import LOSSLESS, Scope, all_drafts, certify

    rules = (config["rule"],) if "rule" in config else LOSSLESS
    named = config.get("draft")
    scope = Scope(rules, (), texts, tokens, samples, seconds, inject)
    if ":" in config.get("draft", "") and config.get("rule") not in ("token", "block"):
        config.setdefault("width", 2)  # trees for the rules that take them
    from forerun.cli.progress import progress
    from forerun.llm import LLM
    from forerun.measure.tables import print_json

    parts = _Parts(quiet=as_json or sys.stderr.isatty())
    with progress(as_json or not sys.stderr.isatty()) as tell:
        tell("loading")
        llm = LLM(**config)
        scope = replace(scope, drafts=all_drafts(llm, llm.draft if named else None))
        certificate = certify(llm, scope, parts.report, tell)
    parts.end()
    if as_json:
        print_json(certificate.as_dict())
    else:
        _print(certificate, verbose)
    if not certificate.passed:
        raise typer.Exit(1)


class _Parts:
    """In a pipe, a line on stderr for each part that is over."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._findings: list[Finding] = []

    def report(self, finding: Finding) -> None:
        """A finding that comes."""
        if self._findings and self._findings[0].part != finding.part:
            self.end()
        self._findings.append(finding)

    def end(self) -> None:
        """Nothing more comes of the part."""
        if self._findings and not self._quiet:
            from forerun.check.summary import held

            print(
                f"{self._findings[0].part}: {held(self._findings)} held",
                file=sys.stderr,
                flush=True,
            )
        self._findings = []


def _print(made: Certificate, verbose: bool) -> None:
    """The verdict, what failed, what was shown; on demand every claim."""
    from rich.console import Console
    from rich.text import Text

    from forerun.check.summary import parts, verdict

    console = Console(highlight=False, soft_wrap=True)
    first, *more = verdict(made)
    console.print(Text(first, style="bold green" if made.passed else "bold red"))
    for line in more:
        console.print(Text(line))
    _print_rows(console, "", [_row(finding) for finding in (*made.failed, *made.open)])
    _print_rows(console, "", [(part, "bold", text) for part, text in parts(made)])
    _print_rows(console, "every claim:", [_row(finding) for finding in made.findings if verbose])


def _print_rows(console: Console, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Rows of a word, its style and a text, which is folded beside the word on a terminal and whole
    in a pipe."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    console.print(f"\n{title}" if title else "")
    if not console.is_terminal:
        width = max(len(word) for word, _, _ in rows)
        print("\n".join(f"{word:<{width}}  {text}" for word, _, text in rows))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for word, style, text in rows:
        table.add_row(Text(word, style=style), Text(text))
    console.print(table, soft_wrap=False)


def _row(finding: Finding) -> tuple[str, str, str]:
    return *SIGNS[finding.passed], f"{finding.part}: {finding.subject}: {finding.text}"
