"""The errors forerun raises on purpose. Each message says what, why and what to do."""

import difflib
import reprlib
from collections.abc import Iterable

LONGEST_SHOWN = 200  # characters of what a file holds, in an error message
LONGEST_NAME = 64  # characters of a name that is compared with those that are known
_BRIEF = reprlib.Repr()
_BRIEF.maxlong = _BRIEF.maxstring = _BRIEF.maxother = 60


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


class BusyError(ForerunError):
    """No room for it now: come back later."""


class StateError(ForerunError):
    """What the engine works with cannot be trusted any more: it has to start over."""


class LostError(StateError):
    """A part of the model is gone: it has to be loaded again."""


class Interrupted(ForerunError):
    """Ctrl-C, where there is something to say of what is left."""


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name closest to `name`, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:LONGEST_NAME], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def one_line(text: str) -> str:
    """A text with what a file holds, for an error message: in one line that is not too long, and
    shows what a terminal would obey."""
    text = " ".join(text.split())
    text = text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def shown(value: object) -> str:
    """A value of a file, for an error message."""
    return one_line(repr(value))


def shorten(value: object) -> str:
    """A value of a request, for an error message: what is long is cut in its middle, and not
    written down before."""
    return _BRIEF.repr(value)
