"""A run of training that has ended: what it was, what came of it.

In plain values it is training.json. In words it is the README.md of the drafter, its card: what it
is for, what was measured and by which command, how it was made.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun import __version__
from forerun.models.hub import DEFAULT
from forerun.train.data import Source
from forerun.train.evaluate import Evaluation, Measured
from forerun.train.findings import Findings
from forerun.train.loop import Record
from forerun.train.settings import Training, depths_up_to
from forerun.train.speed import PLACE, Speed

# Settings that change what is measured of a drafter that is there.
MEASURING = (
    "tokens", "prompt_tokens", "temperature", "held_out", "evaluate_rows", "tasks", "speed_rounds", "depth", "device",
    "threads",
)  # fmt: skip
UNKEPT = ", what it says of held-out texts beside it: the target wrote them, and they were not kept (--save-data does)"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card says of a run besides its results.

    Attributes:
        target: the model drafted for; None is the default model.
        data: the paths of the data, as they were given, and of what the target wrote.
        recipe: its name and options.
        settings: of the run.
        sources: what became of each path.
        documents: trained on, and held out.
        digest: a hash of all documents.
        kept: whether all of them are in `data`.
        made_for: the target by a name that is found from anywhere, for whoever looks for it later.
        license: of the target, as the Hub writes it; "" where it does not say.
    """

    target: str | None
    data: Sequence[str]
    recipe: dict[str, Any]
    settings: Training
    sources: Sequence[Source]
    documents: tuple[int, int]
    digest: str
    kept: bool = True
    made_for: str = ""
    license: str = ""

    def metadata(self, draft: str) -> dict[str, Any]:
        """What stands above the card, as the Hub reads it: `forerun drafters` finds the target
        there. `draft` is what --draft calls the drafter."""
        said: dict[str, Any] = {
            "base_model": self.made_for or self.target or DEFAULT,
            "library_name": "forerun",
        }
        said |= {"license": self.license} if self.license else {}
        return said | {"tags": ["speculative-decoding", "draft-model", "forerun", draft]}


@dataclass(frozen=True, slots=True)
class Report:
    """A run that has ended: what it was, what came of it."""

    facts: Facts
    record: Record
    parameters: int
    findings: Findings
    draft: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in training.json."""
        best = self.record.best
        return {
            "forerun": __version__,
            "target": self.facts.target or DEFAULT,
            "recipe": self.facts.recipe,
            "training": asdict(self.facts.settings),
            "data": {
                "sources": [asdict(source) for source in self.facts.sources],
                "documents": self.facts.documents[0],
                "held_out": self.facts.documents[1],
                "sha256": self.facts.digest,
            },
            "parameters": self.parameters,
            "steps": self.record.step,
            "losses": self.record.losses,
            "evaluations": [asdict(evaluation) for evaluation in self.record.evaluations],
            "best": None if best is None else asdict(best),
            **self.findings.as_dict(),
            "advice": advice(self.findings, PLACE, self),
        }


def card(report: Report) -> str:
    """The text of the card."""
    import yaml

    facts, best, first = report.facts, report.record.best, report.record.evaluations[0]
    settings = facts.settings
    lines = [
        f"---\n{yaml.safe_dump(facts.metadata(report.draft), sort_keys=False, allow_unicode=True)}---",
        "",
        f"# Drafter for {facts.target or DEFAULT}",
        "",
        f"{report.parameters:,} parameters, made by `forerun train --recipe {facts.recipe['name']}` (forerun"
        f" {__version__}), for `forerun generate --draft {report.draft}:DIRECTORY`: it changes how soon the target's"
        " tokens come, never which.",
        "",
        advice(report.findings, PLACE, report),
        "",
        f"What follows was measured by `{command(facts)}`{'' if facts.kept else UNKEPT}.",
        "",
        "## Accepted length",
        "",
        "Tokens a target pass, the target's own included, on held-out prompts and on forerun's own tasks, continued by"
        " the target and verified by rule token: what the engine counted and, in brackets, what is expected along the"
        " same texts when token x is accepted with the chance min(1, q(x) / p(x)) and rounds begin where the one before"
        " has ended. Passes are those at the greatest depth.",
        "",
        *by_task(report.findings.measured, depths_up_to(settings.depth)),
        *(
            f"\n{task}: {count} prompts were too long and are left out."
            for task, count in report.findings.left_out.items()
        ),
        *(
            [f"\nNot measured, for want of time: {', '.join(missing)}."]
            if (missing := report.findings.no_time)
            else []
        ),
        *([] if report.findings.speed is None else speed_table(report.findings.speed)),
        "",
        "## Training",
        "",
        f"By steps, at depth {settings.depth} and temperature {settings.temperature:g} (*from any*: the mean over all"
        " tokens of 1 + sum over k of prod over j <= k of (1 - TV), as if a draft began at each):",
        "",
        "| steps | accepted length | from any | overlap (1 - TV) | perplexity |",
        "|---|---|---|---|---|",
        *(
            _row(evaluation)
            for evaluation in dict.fromkeys((first, best))
            if evaluation is not None
        ),
        "",
        f"- Recipe: {json.dumps(facts.recipe)}",
        f"- Training: {json.dumps(asdict(settings))}; {report.record.step} steps were done.",
        f"- Data: {facts.documents[0]} documents to train on, {facts.documents[1]} held out by the hash of their text,"
        f" SHA-256 {facts.digest}",
        *(
            f"  - {source.name}: {source.documents} documents, {source.repeated} repeated, {source.unreadable} left out"
            for source in facts.sources
        ),
        f"- Of the texts, a share of {settings.on_policy:g} was continued by the target itself, at temperature"
        f" {settings.temperature:g}.",
    ]
    return "\n".join(lines) + "\n"


def advice(findings: Findings, place: str, report: Report | None = None) -> str:
    """Whether to use a drafter that is at `place`, by what was measured of it beside what auto
    takes already; and what would help if not, as far as the run that made it says so."""
    again = f"forerun train --eval {place}" if report is None else command(report.facts, place)
    if findings.speed is None:
        return (
            "It was not compared with what --draft auto takes already, so nothing says that it is worth using. To"
            f" compare them: {again}"
        )
    found = findings.speed.comparison
    if found is None:
        return "It is what --draft auto takes already."
    draft, seen = (
        found.draft.replace(PLACE, place),
        f"{found.ratio} times the speed of {found.default}",
    )
    seen += f", which --draft auto takes already, and {found.times_plain:.2f} times that of plain decoding"
    if found.better:
        return f"Use it: --draft {draft} has {seen}."
    if not found.worse:
        return (
            f"Whether to use it is open: --draft {draft} has {seen}. Until more rounds tell, leave --draft as it is:"
            f" {again} --speed-rounds 20"
        )
    return f"Do not use it as it is: --draft {draft} has {seen}. {_help(report)}"


def _help(report: Report | None) -> str:
    """What may make a better drafter."""
    if report is None:
        return "More training may help: more minutes, more texts."
    settings, steps = report.facts.settings, report.record.step
    if (
        settings.max_minutes
        and steps < settings.steps
        and not report.record.gave_up(settings.patience)
    ):
        return (
            f"It has learnt for {steps} steps, as many as {settings.max_minutes:g} minutes had time for: give it more"
            " --max-minutes, or a machine that does nothing else."
        )
    return (
        f"It has learnt for {steps} steps: more texts may help (--data, --write), and more --steps."
    )


def command(facts: Facts, place: str = PLACE) -> str:
    """What measures the same again of the drafter at a place, with its speed."""
    words = [
        "forerun",
        "train",
        "--eval",
        place,
        *(["--target", facts.target] if facts.target else []),
    ]
    words += [word for path in facts.data for word in ("--data", path)]
    given, default = asdict(facts.settings), asdict(Training())
    if not facts.data and given["tasks"] == "none":
        given["tasks"] = default["tasks"]  # there is nothing else to measure on
    differing = [
        name
        for name in MEASURING
        if given[name] != default[name] and (given[name] or name != "speed_rounds")
    ]
    return shlex.join(
        [*words, *(f"--{name.replace('_', '-')}={given[name]}" for name in differing)]
    )


def by_task(measured: Sequence[Measured], depths: Sequence[int]) -> list[str]:
    """A row for each task and temperature, a column for each depth."""
    rows: dict[tuple[str, float], dict[int, Measured]] = {}
    for entry in measured:
        rows.setdefault((entry.task, entry.temperature), {})[entry.depth] = entry
    return [
        f"| task | temperature |{''.join(f' depth {depth} |' for depth in depths)} passes |",
        "|---|---|" + "---|" * len(depths) + "---|",
        *(
            f"| {task} | {temperature:g} |"
            + "".join(f" {_length(entries.get(depth))} |" for depth in depths)
            + f" {entries[depths[-1]].passes} |"
            for (task, temperature), entries in rows.items()
        ),
    ]


def _length(entry: Measured | None) -> str:
    """As the engine counted and, in brackets, as expected; nothing where the time was too short."""
    return "" if entry is None else f"{entry.accepted_length:.3f} ({entry.analytic:.3f})"


def speed_table(speed: Speed) -> list[str]:
    """The section about speed."""
    where = ", ".join(f"{name} {value}" for name, value in speed.machine.items())
    return [
        "",
        "## Speed",
        "",
        f"Plain decoding, what `auto` takes already, and this drafter in turn, on {speed.prompts} {speed.task} prompts,"
        f" one at a time, {speed.tokens} tokens behind each at temperature 0, reading prompts not counted: medians of"
        f" {speed.rounds} rounds. The best fixed depth is {speed.best_depth}. Measured on: {where}.",
        "",
        "| | tokens/s | times plain (95 %) | accepted length | text |",
        "|---|---|---|---|---|",
        *(
            f"| {pace.label} | {pace.tokens_per_second:.1f} |"
            f" {pace.ratio} | {pace.accepted_length:.2f} |"
            f" {'same' if pace.same else 'DIFFERENT'} |"
            for pace in speed.paces
        ),
    ]


def _row(e: Evaluation) -> str:
    return f"| {e.step} | {e.accepted_length:.3f} | {e.from_any:.3f} | {e.overlap:.3f} | {e.perplexity:.2f} |"
