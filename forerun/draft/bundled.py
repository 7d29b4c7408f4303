"""Drafters that come with forerun: which of them fits a target that is named, so that `auto` may draft with it."""

from __future__ import annotations

from pathlib import Path

from forerun.models.hub import DEFAULT

BUNDLED = Path(__file__).parent.parent / "drafters"


def bundled_for(model: Path) -> Path | None:
    """The directory of the drafter that was made for the model here; None where there is none.

    A model goes by its name, whatever its quantisation: were it another, drafts would be worse, and the text the same.
    Whoever loads the drafter sees whether the sizes fit.
    """
    found, near = BUNDLED / DEFAULT, model.absolute().parts[-4:]  # a cache of the Hub names it some levels above
    named = any(DEFAULT.lower() in part.lower() for part in near)
    return found if named and (found / "config.json").is_file() else None
