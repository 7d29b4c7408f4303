"""forerun: lossless speculative decoding. `LLM` is where to begin.

Names are imported when they are first used, so that `import forerun` and `forerun --help` are
quick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.config import Config
    from forerun.errors import CapacityError, ConfigError, ForerunError, LoadError, RequestError
    from forerun.llm import LLM, Completion, Stream
    from forerun.sampling.grammar import Grammar
    from forerun.sampling.params import SamplingParams
    from forerun.types import Event

__version__ = "0.1.0"

_HOMES = {
    "CapacityError": "forerun.errors",
    "Completion": "forerun.llm",
    "Config": "forerun.config",
    "ConfigError": "forerun.errors",
    "Event": "forerun.types",
    "ForerunError": "forerun.errors",
    "Grammar": "forerun.sampling.grammar",
    "LLM": "forerun.llm",
    "LoadError": "forerun.errors",
    "RequestError": "forerun.errors",
    "SamplingParams": "forerun.sampling.params",
    "Stream": "forerun.llm",
}

__all__ = [
    "LLM",
    "CapacityError",
    "Completion",
    "Config",
    "ConfigError",
    "Event",
    "ForerunError",
    "Grammar",
    "LoadError",
    "RequestError",
    "SamplingParams",
    "Stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
