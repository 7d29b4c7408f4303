"""The verb `forerun check`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from forerun.flags import ENGINE, MODEL, with_flags

SIGNS = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("untested", "yellow")}


@with_flags(ENGINE.without("model", "depth"))
def check(
    model: MODEL = None,
    texts: Annotated[int, typer.Option(help="Prompts, each continued at temperature 0 and 0.8.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 48,
    samples: Annotated[int, typer.Option(help="Tokens for each test of a law.")] = 2000,
    seconds: Annotated[float, typer.Option(help="Begin no further comparison after that.")] = 150.0,
    inject: Annotated[
        str | None, typer.Option(help="Put a known fault in, such as lenient: the check must fail and say where.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """Prove on this machine that speculation does not change what the model says. Exit code 1 if it does.

    Rules by exact enumeration, passes bit by bit, texts token for token (where one parts, with its margin), the law of
    sampled tokens by a sequential test, and known faults put in, each of which must be found. Without --draft every
    drafter at hand, without --rule every lossless rule.
    """
    from forerun.check.certificate import LOSSLESS, Scope, all_drafts, certify

    rules = (config["rule"],) if "rule" in config else LOSSLESS
    named = config.get("draft")
    scope = Scope(rules, (), texts, tokens, samples, seconds, inject)
    if ":" in config.get("draft", "") and config.get("rule") not in ("token", "block"):
        config.setdefault("width", 2)  # trees for the rules that take them
    from forerun.bench.report import print_json, progress
    from forerun.check.findings import Finding
    from forerun.llm import LLM

    with progress(as_json) as tell:
        tell("loading")
        llm = LLM(model, **config)

        def report(finding: Finding) -> None:
            if sys.stderr.isatty():
                tell("")  # clears the line
            if not as_json:
                _print(finding)

        certificate = certify(llm, replace(scope, drafts=all_drafts(llm, llm.draft if named else None)), report, tell)
    if as_json:
        print_json(certificate.as_dict())
    else:
        held = sum(finding.passed is True for finding in certificate.findings)
        verdict = "certified" if certificate.passed else "NOT certified"
        print(
            f"{verdict}: {held} of {len(certificate.findings)} claims held, {len(certificate.failed)} failed,"
            f" {len(certificate.open)} untested; {certificate.model}, {certificate.form}, {certificate.seconds:.0f} s"
        )
    if not certificate.passed:
        raise typer.Exit(1)


def _print(finding: Any) -> None:
    """A line of the certificate."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    sign, style = SIGNS[finding.passed]
    console.print(Text(f"{sign:<8}", style=style if console.is_terminal else ""), end="")
    console.print(Text(f" {finding.part}: {finding.subject}: {finding.text}"))
