"""Draft names to proposers: off, auto, ngram, suffix, model:DIR_OR_HUB_ID, model:bundled."""

from __future__ import annotations

from collections.abc import Callable

from forerun.draft.base import Proposer
from forerun.draft.compose import Cascade
from forerun.draft.model import DraftModel
from forerun.draft.ngram import NGram
from forerun.draft.reference import References
from forerun.draft.suffix import Suffix
from forerun.errors import ConfigError, nearest
from forerun.models.hub import BUNDLED
from forerun.runner import Runner

SIMPLE = ("off", "auto", "ngram", "suffix")


def parse_draft(spec: str) -> tuple[str, str]:
    """A draft option as (name, argument); `auto` becomes what it stands for. Raises ConfigError."""
    name, _, argument = spec.partition(":")
    if name == "auto" and not argument:
        return "suffix", ""
    if name == "model":
        if not argument:
            raise ConfigError("draft 'model' needs a model: write model:DIRECTORY, model:HUB_ID or model:bundled")
        return name, str(BUNDLED / "draft") if argument == "bundled" else argument
    if name not in SIMPLE:
        raise ConfigError(f"there is no draft {spec!r}: {nearest(name, [*SIMPLE, 'model:...'])}")
    if argument:
        raise ConfigError(f"draft {name!r} takes no argument, but was given {argument!r}")
    return name, argument


def make_proposers(
    name: str, argument: str, load: Callable[[str], Runner], vocab: int, width: int
) -> dict[str, Proposer]:
    """The proposers of an engine: those that need no weights, and the draft model if one is asked for."""
    proposers: dict[str, Proposer] = {"ngram": NGram(), "suffix": Suffix()}
    if name == "model":
        proposers["model"] = DraftModel(load(argument), vocab, width)
    references = References()
    cascades = [Cascade((references, proposer)) for proposer in proposers.values()]
    return proposers | {p.name: p for p in (references, *cascades)}


def with_references(name: str) -> str:
    """The proposer that asks a request's own references before `name`."""
    return "reference" if name == "off" else f"reference+{name}"
