"""Exceptions of forerun, and helpers for messages that say what, why and what to do."""

import difflib
import reprlib
from collections.abc import Iterable

MOST_NAMES = 24  # of a list in an error message
LONGEST_SHOWN = 200  # maximum characters of file content in an error message
LONGEST_NAME = 64  # characters of an unknown name that are compared with known names
_BRIEF = reprlib.Repr()
_BRIEF.maxlong = _BRIEF.maxstring = _BRIEF.maxother = 60


class ForerunError(Exception):
    """Base class of the errors that forerun raises."""


class ConfigError(ForerunError):
    """An invalid option or combination of options."""


class LoadError(ForerunError):
    """A model directory, checkpoint or tokenizer that cannot be read."""


class CapacityError(ForerunError):
    """A request for more memory or tokens than this engine can ever hold."""


class RequestError(ForerunError):
    """An invalid prompt or invalid sampling parameters."""


class BusyError(ForerunError):
    """No capacity at the moment: the request may be repeated later."""


class StateError(ForerunError):
    """The state of the engine is inconsistent: the engine must be reset."""


class LostError(StateError):
    """A part of the model is lost: the model must be loaded again."""


class Interrupted(ForerunError):
    """An interruption by Ctrl-C, with a message about the partial results."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known name closest to `name`, or known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:LONGEST_NAME], known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(known) > MOST_NAMES:
        return f"known: {', '.join(known[:MOST_NAMES])} and {len(known) - MOST_NAMES} others"
    return f"known: {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error itself if it has none."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def one_line(text: str) -> str:
    """Return file content for an error message: one short line with control characters escaped."""
    text = " ".join(text.split())
    text = text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def shown(value: object) -> str:
    """Return the repr of a value from a file, for an error message."""
    return one_line(repr(value))


def shorten(value: object) -> str:
    """Return the repr of a value from a request, for an error message.

    Long values are cut in the middle, without creating the whole repr first.
    """
    return _BRIEF.repr(value)
