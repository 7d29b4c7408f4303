"""What measuring a drafter tells the registry, so that `forerun drafters` and whoever chooses may know it."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.catalogue.memory import remember
from forerun.drafts import LOADED, parse_draft
from forerun.machine import processor
from forerun.measure.rounds import Result
from forerun.models.hub import DEFAULT


def keep(model: str | None, results: Sequence[Result]) -> None:
    """Remember what drafters with weights gave by themselves, one request at a time and with unchanged text."""
    for r in results:
        (name, argument), *others = parse_draft(r.draft)
        if name in LOADED and not others and r.requests == 1 and r.same is not False and r.rule == "match":
            remember(
                model or DEFAULT, argument, name, r.category or "all", r.accepted_length, r.times_plain,
                depth=str(r.depth), temperature=r.temperature, machine=processor(),
            )  # fmt: skip
