"""Drafters that come with forerun: which of them fits a target that is named, and what `auto` therefore is. No torch
here, since `forerun models` says it of every model."""

from __future__ import annotations

import math
from pathlib import Path

from forerun.draft.kinds import Look, recognise
from forerun.models.files import read_header, read_object, weight_files
from forerun.models.hub import DEFAULT

BUNDLED = Path(__file__).parent.parent / "drafters"

# By instructions the bits of a weight, in the mean, from which on a head that comes with forerun was faster than copies
# alone: what weights are short of saves reading, and rows cost as much as ever (docs/performance.md).
PAYS = {"avx512": 0.0, "avx512vnni": 0.0, "avx2": 8.0, "avxvnni": 8.0}


def automatic(spec: str, model: Path, instructions: str, bits: float) -> str:
    """What `auto` means for this model: what copies, and then the drafter that comes with forerun for it, where that
    was measured to pay. `instructions` are those of the native kernels, "" in torch, where a head takes longer to call
    than it is worth; `bits` are those of the model's weights."""
    if spec != "auto":
        return spec
    found = bundled_for(model) if bits >= PAYS.get(instructions, math.inf) else None
    return "suffix" if found is None else f"suffix+{_kind(found)}:{found}"


def _kind(directory: Path) -> str:
    """What a drafter that comes with forerun is, as `--draft` calls it."""
    tensors = [name for file in weight_files(directory) for name in read_header(file)]
    return recognise(Look(read_object(directory / "config.json"), tensors, tokenizer=True)).draft or "model"


def bundled_for(model: Path) -> Path | None:
    """The directory of the drafter that was made for the model here; None where there is none.

    A model goes by its name, whatever its quantisation: were it another, drafts would be worse, and the text the same.
    Whoever loads the drafter sees whether the sizes fit.
    """
    found, near = BUNDLED / DEFAULT, model.absolute().parts[-4:]  # a cache of the Hub names it some levels above
    named = any(DEFAULT.lower() in part.lower() for part in near)
    return found if named and (found / "config.json").is_file() else None
