"""Error isolation: an error in the work for one request ends that request and no other.

A step changes nothing until it commits, and a commit touches only the rows of its own request.
The results of a request that fails are dropped, its pages are freed, and the others continue as if
it had not been in the batch. Only the forward pass and the bookkeeping of the cache concern all
requests; their exceptions propagate from the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from forerun.engine.request import Request
from forerun.errors import ForerunError, StateError

T = TypeVar("T")
SHARED = (StateError, KeyboardInterrupt, SystemExit, GeneratorExit)  # concern all requests


class isolate_errors:
    """Context manager for work on one request: an exception becomes the request's `error`.

    A class because it is entered several times a step: a generator takes four times as long.
    """

    __slots__ = ("request",)

    def __init__(self, request: Request) -> None:
        self.request = request

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        # BaseException: a panic in a library's Rust code is no Exception.
        if error is None or isinstance(error, SHARED):
            return False
        self.request.error = self.request.error or _client_error(error)
        return True


def run_isolated(
    work: Callable[[Sequence[int]], Sequence[T]], chosen: Sequence[int], requests: Sequence[Request]
) -> list[T | None]:
    """Run `work` for the `chosen` requests at once; where that fails, for one after the other.

    Requests that fail alone get None and their error.
    """
    try:
        return list(work(chosen))
    except SHARED:
        raise
    except BaseException:
        found: list[T | None] = [None] * len(chosen)
        for at, i in enumerate(chosen):
            with isolate_errors(requests[i]):
                (found[at],) = work([i])
        return found


def _client_error(error: BaseException) -> ForerunError:
    """Return the error that a client may see; its cause is for the log."""
    if isinstance(error, ForerunError):
        return error
    name = type(error).__name__
    shown = ForerunError(f"the engine failed while it worked on this request: {name}")
    shown.__cause__ = error
    return shown
