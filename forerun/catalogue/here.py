"""Drafters on this machine, with whom they are for and what they were measured to give. No torch
here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.catalogue.facts import Facts, facts_at, here
from forerun.catalogue.fit import Sizes, checks, fits, same_model, sizes_of
from forerun.catalogue.layout import refusal
from forerun.catalogue.memory import LONGEST, Measurement, recall
from forerun.catalogue.survey import DRAFT_SHARE, survey
from forerun.draft.registry import BUNDLED, Json, Kind, Look, inner, recognise
from forerun.errors import LoadError, RequestError
from forerun.models.files import read_object
from forerun.models.local import LocalModel, cached_repositories, list_local_models

DEEPEST = 4  # folders below one that is looked through
MOST_FOLDERS = 20_000
FIGURES = 3  # kinds of text in a cell
LEFT_OUT = ("node_modules", "site-packages", "__pycache__")


@dataclass(frozen=True, slots=True)
class Known:
    """A drafter that is here.

    Attributes:
        facts: what it is.
        origin: bundled, directory, hub, or whose model it is.
        draft: what to write behind `--draft`, "" where forerun cannot draft with it; `reason` says
            why not.
        measured: what it was measured to give, the best first.
    """

    facts: Facts
    origin: str
    draft: str
    reason: str
    measured: tuple[Measurement, ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        """The kinds of text it is for, as its card says, or that it was measured on."""
        return tuple(
            dict.fromkeys((*self.facts.domains, *(m.category.lower() for m in self.measured)))
        )

    def best(self, domain: str | None = None) -> float:
        """The highest times plain, of one kind of text if there is any; 0 where no speed was
        measured."""
        own = [
            m for m in self.measured if domain is None or m.category.lower() == domain.lower()
        ] or self.measured
        return max((m.times_plain or 0.0 for m in own), default=0.0)

    def figures(self) -> list[str]:
        """The first figures, a kind of text each: the accepted length and, where it is known, times
        plain."""
        best = {m.category: m for m in reversed(self.measured)}
        kinds = list(dict.fromkeys(m.category for m in self.measured))[:FIGURES]
        times = {
            kind: f", {best[kind].times_plain:.2f} x plain" if best[kind].times_plain else ""
            for kind in kinds
        }
        return [f"{kind} {best[kind].accepted_length:.2f} a pass{times[kind]}" for kind in kinds]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.facts.name, "origin": self.origin, "family": self.facts.kind.family,
            "dialect": self.facts.kind.dialect, "bytes": self.facts.bytes, "parameters": self.facts.parameters,
            "target": self.facts.made_for, "domains": list(self.facts.domains), "draft": self.draft,
            "reason": self.reason, "measured": [asdict(m) for m in self.measured],
        }  # fmt: skip


def known(
    target: str | None = None, folders: Sequence[Path] = (), domain: str | None = None
) -> tuple[list[Known], list[str]]:
    """The drafters that are here, for a target or for any, with what was measured, the fastest
    first; and a line for each place that could not be read. Nothing is downloaded. Raises
    RequestError for a target that is not here.

    Args:
        target: a model that is here, by what `--model` takes; with it models of its vocabulary
            count as drafters, too.
        folders: looked through besides the drafters that come with forerun and the Hub's cache.
        domain: a kind of text: only what is for it, or was measured on it.
    """
    notes: list[str] = []
    heads = [(facts, origin) for facts, origin in _heads(folders, notes) if _is_drafter(facts.kind)]
    if target is not None:
        wanted, path = _target(target)
        heads = [(facts, origin) for facts, origin in heads if _serves(facts, wanted)]
        heads += _models(wanted, path, folders)
    kept = recall()
    found = [_known(facts, origin, target, kept) for facts, origin in heads]
    found = [one for one in found if domain is None or domain.lower() in one.domains]
    return sorted(found, key=lambda one: (-one.best(domain), one.facts.bytes)), notes


def _known(facts: Facts, origin: str, target: str | None, kept: Iterable[Measurement]) -> Known:
    """A drafter with what was measured of it: here, or else when it was made."""
    own = {facts.name, str(facts.path), str(facts.path.resolve())} if facts.path else {facts.name}
    measured = [
        m for m in kept if m.drafter in own and (target is None or same_model(m.target, target))
    ]
    reason = refusal(facts)
    draft = "" if reason else f"{facts.kind.draft}:{facts.name}"
    order = sorted(
        [*measured, *trained(facts)], key=lambda m: (-(m.times_plain or 0), -m.accepted_length)
    )
    return Known(facts, origin, draft, reason, tuple(order))


def _is_drafter(kind: Kind) -> bool:
    return kind.family != "lm" and kind.dialect != "native"


def _serves(facts: Facts, target: Sizes) -> bool:
    """Whether a drafter is for a target: it names it, or names none and fits."""
    made_for = facts.made_for
    return same_model(made_for, target.name) if made_for else fits(checks(facts, target)[:-1])


def _heads(folders: Sequence[Path], notes: list[str]) -> Iterator[tuple[Facts, str]]:
    """Directories that may hold drafters."""
    places = [(str(path), path, "bundled") for path in sorted(BUNDLED.glob("*"))]
    places += [(name, path, "hub") for name, path in cached_repositories()]
    places += [(str(path), path, "directory") for folder in folders for path in _below(folder)]
    once = {place[1].resolve(): place for place in reversed(places)}
    for name, path, origin in reversed(once.values()):
        try:
            if _may_be(path):
                yield facts_at(path, name), origin
        except LoadError as error:
            notes.append(str(error))


def _may_be(path: Path) -> bool:
    """Whether config.json is one of a drafter, as far as that is seen without tensors."""
    try:
        raw = read_object(path / "config.json")
    except LoadError:
        return False  # no model at all, or one whose download was not finished
    return _is_drafter(recognise(Look(raw)))


def _below(folder: Path) -> Iterator[Path]:
    """Directories with a config.json; hidden ones and links to folders are left out."""
    for count, (place, names, files) in enumerate(os.walk(folder)):
        directory = Path(place)
        deep = len(directory.relative_to(folder).parts) >= DEEPEST or count > MOST_FOLDERS
        names[:] = (
            [] if deep else sorted(n for n in names if not n.startswith(".") and n not in LEFT_OUT)
        )
        if "config.json" in files:
            yield directory


def _target(name: str) -> tuple[Sizes, Path]:
    """The sizes of a target that is here, and where it is. Raises RequestError."""
    path = here(name)
    if path is None:
        raise RequestError(
            f"{name} is not here: forerun models says what is, and forerun drafters search asks the Hub"
        )
    return sizes_of(facts_at(path, name)), path


def _models(target: Sizes, path: Path, folders: Sequence[Path]) -> Iterator[tuple[Facts, str]]:
    """Models with the vocabulary of a target, and much smaller."""
    found, _ = list_local_models(folders)
    if all(model.path.resolve() != path.resolve() for model in found):
        found.append(LocalModel(target.name, path, "directory"))
    rows = survey(found)
    own = next(row for row in rows if Path(row.path).resolve() == path.resolve())
    size = own.parameters or own.bytes
    for row in rows:
        small = row.runs and row.parameters and row.parameters <= size * DRAFT_SHARE
        if small and row.vocabulary and row.vocabulary == own.vocabulary:
            with suppress(LoadError):
                yield facts_at(Path(row.path), row.name), row.origin


def trained(facts: Facts) -> list[Measurement]:
    """What `forerun train` measured of a drafter: of each kind of text the deepest greedy
    drafts."""
    said: Json = {}
    if facts.path:
        with suppress(LoadError):
            said = read_object(facts.path / "training.json")
    entries = said.get("measured")
    best: dict[str, Measurement] = {}
    for entry in entries if isinstance(entries, list) else []:
        made = _measurement(facts, said, entry)
        if made and (
            made.category not in best or made.temperature <= best[made.category].temperature
        ):
            best[made.category] = made
    return list(best.values())


def _measurement(facts: Facts, said: Json, entry: Any) -> Measurement | None:
    """A figure of training.json, if it is one; the speed is that of held-out texts."""
    try:
        task = str(entry["task"])[:LONGEST]
        paces = inner(said, "speed").get("paces", [])
        own = [pace for pace in paces if pace["depth"] and pace.get("draft") != "auto"]
        fastest = max((float(pace["times_plain"]) for pace in own), default=None)
        return Measurement(
            str(said.get("target"))[: LONGEST], facts.name, facts.kind.draft, task,
            float(entry["accepted_length"]), fastest if task == "held-out" else None,
            depth=str(entry["depth"]), temperature=float(entry["temperature"]), passes=int(entry["passes"]),
        )  # fmt: skip
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
