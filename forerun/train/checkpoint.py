"""Checkpoints of a training run: one file beside the directory to be made, replaced as a whole or
not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ForerunError, LoadError
from forerun.utils import atomic_file

VERSION = 4


def checkpoint_path(out: Path) -> Path:
    """Where the checkpoint of a run that makes `out` is kept."""
    out = Path(os.path.abspath(out))  # "." has a name too
    return out.with_name(f"{out.name}.training")


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the file. Raises ForerunError, and leaves the one before as it is, where that cannot
    be done."""
    try:
        with atomic_file(path) as work, work.open("wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for what the file refused
        kept = (
            f"the last one, {path}, is kept: make room and go on with --resume"
            if path.exists()
            else "make room"
        )
        why = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else str(error).strip().splitlines()[0]
        )
        raise ForerunError(f"the checkpoint cannot be written ({why}); {kept}") from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was written. Raises LoadError for a file that is not there or is no checkpoint."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise LoadError(f"there is no checkpoint {path}: begin without --resume") from None
    except Exception as error:  # whatever unpickling makes of another file
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise LoadError(
            f"the checkpoint {path} cannot be read ({why}): remove it and begin anew"
        ) from None
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise LoadError(
            f"the checkpoint {path} is of another version of forerun: remove it and begin anew"
        )
    return state
