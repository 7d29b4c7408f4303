"""A drafter from the Hub, after all that can be checked without it: nothing large is downloaded for
nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.catalogue import far
from forerun.catalogue.facts import Facts, facts_of
from forerun.catalogue.fit import Check, Sizes, checks, fits, sizes_of
from forerun.catalogue.layout import said_of
from forerun.errors import ConfigError, LoadError
from forerun.models.hub import is_pickled

TEXTS = (".json", ".jinja", ".txt", ".md")
NAMED = ("tokenizer.model",)


def target_of(drafter: Facts, named: str | None) -> tuple[Facts | None, str]:
    """The target to check a drafter against, the one that is named or else the one that it was made
    for, and a line where there is none. Raises LoadError where one that was named cannot be
    read."""
    if named is not None:
        return facts_of(named, tensors=False), ""
    if not drafter.made_for:
        return None, "it names no target: give --for TARGET to check it against one"
    try:
        return facts_of(drafter.made_for, tensors=False), ""
    except LoadError as error:
        return None, f"it is not checked against {drafter.made_for} ({error}): give --for TARGET"


def examine(drafter: Facts, target: Facts | None) -> list[Check]:
    """All checks, that of the words of a vocabulary with them where both are here."""
    sizes = sizes_of(target) if target else None
    found = checks(drafter, sizes)
    unsure = next(
        (i for i, check in enumerate(found) if check.name == "vocabulary" and check.ok is None),
        None,
    )
    if (
        unsure is not None
        and target
        and drafter.kind.draft == "model"
        and drafter.path
        and target.path
        and sizes
    ):
        found[unsure] = _same_words(drafter.path, target.path, sizes)
    return found


def _same_words(drafter: Path, target: Path, sizes: Sizes) -> Check:
    from forerun.load import check_vocabulary, load_tokenizer

    try:
        check_vocabulary(load_tokenizer(target), drafter, sizes.vocab)
    except LoadError as error:
        return Check("vocabulary", False, str(error))
    except ConfigError:
        return Check(
            "vocabulary", None, "another vocabulary: it drafts through text, so less is accepted"
        )
    return Check("vocabulary", True, "every token means the same to both")


def describe(
    drafter: Facts, target: Facts | None, found: Sequence[Check], note: str
) -> dict[str, Any]:
    """All that is said of a drafter, in plain values."""
    kind = drafter.kind
    return {
        "name": drafter.name, "path": str(drafter.path) if drafter.path else None, "family": kind.family,
        "dialect": kind.dialect, "bytes": drafter.bytes, "parameters": drafter.parameters,
        "made_for": drafter.made_for, "domains": list(drafter.domains), "target": target.name if target else None,
        "fits": fits(found), "checks": [asdict(check) for check in found],
        "draft": said_of(drafter), "notes": [note] if note else [],
    }  # fmt: skip


def files_of(at: far.Repository) -> dict[str, int]:
    """The files of a drafter that are wanted, and their bytes: pickled weights only where there are
    no others."""
    texts = {n: size for n, size in at.files.items() if n.endswith(TEXTS) or n in NAMED}
    weights = {n: size for n, size in at.files.items() if n.endswith(".safetensors")}
    pickled = {n: size for n, size in at.files.items() if is_pickled(n)}
    return texts | (weights or pickled)


def download(drafter: Facts) -> Path:
    """The wanted files of a drafter on the Hub, in its cache. Raises LoadError."""
    from huggingface_hub import constants, snapshot_download

    assert drafter.at is not None
    wanted = files_of(drafter.at)
    needed, place = sum(wanted.values()), Path(constants.HF_HUB_CACHE)
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise LoadError(
            f"{drafter.name} has {needed / 1e9:.1f} GB, but {place} has room for {free / 1e9:.1f} GB: make room, or set"
            " HF_HUB_CACHE to another disk"
        )
    with far.asking(f"{drafter.name} cannot be downloaded"):
        directory = snapshot_download(drafter.name, allow_patterns=sorted(wanted))
    return Path(directory)
