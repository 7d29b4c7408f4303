"""Whose failure it is: what is raised while one request is worked on ends that request, and nobody
else's.

Until a step commits nothing has changed, and a commit only touches the rows of its own request:
what was worked out for a request that fails is dropped, its pages go back, and the others go on as
if it had not been there. Only the pass itself and the bookkeeping of the cache belong to everybody;
what they raise leaves the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from forerun.engine.request import Request
from forerun.errors import ForerunError, StateError

T = TypeVar("T")
OURS = (StateError, KeyboardInterrupt, SystemExit, GeneratorExit)  # concern more than one request


class isolate_errors:
    """Work on one request alone: what is raised becomes its `error`, the first one of a step."""

    __slots__ = ("request",)  # entered several times a step: a generator takes four times as long

    def __init__(self, request: Request) -> None:
        self.request = request

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if error is None or isinstance(error, OURS):
            return False
        self.request.error = self.request.error or _told(
            error
        )  # a panic of a library's Rust side is no Exception
        return True


def together(
    work: Callable[[Sequence[int]], Sequence[T]], chosen: Sequence[int], requests: Sequence[Request]
) -> list[T | None]:
    """What `work` gives for the `chosen` of some requests at once. Where that fails it is done for
    one after the other,
    and those that fail alone are to blame: they get None."""
    try:
        return list(work(chosen))
    except OURS:
        raise
    except BaseException:
        found: list[T | None] = [None] * len(chosen)
        for at, i in enumerate(chosen):
            with isolate_errors(requests[i]):
                (found[at],) = work([i])
        return found


def _told(error: BaseException) -> ForerunError:
    """An error as its client may see it; the cause is for the log."""
    if isinstance(error, ForerunError):
        return error
    told = ForerunError(
        f"the engine failed while it worked on this request: {type(error).__name__}"
    )
    told.__cause__ = error
    return told
