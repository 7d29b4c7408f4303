"""The errors forerun raises on purpose. Each message says what, why and what to do.

ForerunError
├── ConfigError     an option, or a combination of options, that cannot be
├── LoadError       a model directory, checkpoint or tokenizer that cannot be read
├── CapacityError   more than this engine can ever hold (context, KV pool)
├── RequestError    a prompt or sampling parameters that make no sense
└── Interrupted     Ctrl-C, where there is something to say of what is left
"""

import difflib
from collections.abc import Iterable

LONGEST_SHOWN = 200  # characters of what a file holds, in an error message


class ForerunError(Exception):
    """Base of every error forerun raises on purpose."""


class ConfigError(ForerunError):
    """An option, or a combination of options, that cannot be."""


class LoadError(ForerunError):
    """A model directory, checkpoint or tokenizer that cannot be read."""


class CapacityError(ForerunError):
    """More than this engine can ever hold."""


class RequestError(ForerunError):
    """A prompt or sampling parameters that make no sense."""


class Interrupted(ForerunError):
    """Ctrl-C, where there is something to say of what is left."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name closest to `name`, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def one_line(text: str) -> str:
    """A text with what a file holds, for an error message: in one line that is not too long."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def shown(value: object) -> str:
    """A value of a file, for an error message."""
    return one_line(repr(value))
