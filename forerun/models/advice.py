"""How a model's authors would sample from it: generation_config.json, or `general.sampling` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, RequestError
from forerun.models.files import read_object
from forerun.models.gguf.container import open_gguf
from forerun.sampling.params import DEFAULT, SamplingParams

NAMES = tuple(DEFAULT)  # the parameters that authors set
IN_GGUF = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # where a file has other names


def recommended(path: Path) -> dict[str, Any]:
    """Sampling parameters that the model in a directory or a GGUF file comes with, by our names; what cannot be is left
    out. A configuration that does not sample recommends nothing; one that samples without a temperature means 1, since
    transformers leaves out what is its own default."""
    if path.is_file():
        metadata = open_gguf(path).metadata
        return _possible({name: metadata.get(f"general.sampling.{IN_GGUF.get(name, name)}") for name in NAMES})
    with suppress(LoadError):
        settings = read_object(path / "generation_config.json")
        if settings.get("do_sample") is True:
            return _possible({"temperature": 1.0} | {name: settings.get(name) for name in NAMES if name in settings})
    return {}


def _possible(found: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in found.items():
        with suppress(RequestError, TypeError, ValueError, ArithmeticError):
            if value is not None:
                SamplingParams.of(**{name: value})
                kept[name] = value
    return kept
