"""A grammar along one request: what it allows at each node of a draft, and what it leaves no choice
about.

Only `advance` commits. Masks, pruning and forced tokens look ahead along the paths of a tree and
leave no trace: what is allowed at a place depends on the text before it and on nothing else, so
drafts are masked as plain decoding is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from forerun.errors import RequestError
from forerun.sampling.grammar import short
from forerun.types import Draft, Proposal

SOURCE = "grammar"  # what statistics call forced tokens
PATIENCE = 1.0  # seconds that the masks of one step may take, while other requests go on
MOMENT = 0.01  # seconds that a step waits for the masks of all its requests
T = TypeVar("T")


class NotReadyError(Exception):
    """What a grammar allows is not known yet: the request has to be left out of this step."""


class MaskThreads:
    """Threads in which masks are computed, and the time until which a step waits for all of them
    together."""

    def __init__(self, count: int) -> None:
        self.pool, self.until = ThreadPoolExecutor(count, "forerun-masks"), 0.0

    def begin_step(self) -> None:
        """Let the waits of a step begin."""
        self.until = time.perf_counter() + MOMENT


@dataclass(eq=False)
class Compiled:
    """A grammar compiled for one request: llguidance's matcher before its first token, which that
    request alone uses.

    Attributes:
        core: the matcher; its lexer collects states as it is used.
        size: bytes that it held when it was compiled.
        renew: compiles the grammar again, for a matcher whose lexer is empty.
        kind: what sort of grammar it is.
        owner: the client whose request it is for.
    """

    core: Any
    size: int
    renew: Callable[[], Any]
    kind: str
    owner: str = ""


class Matcher:
    """A grammar along one request. A set of tokens is an int: bit t is token t.

    After a complete text the tokens of `end_ids` are allowed and nothing else where nothing can
    follow; before that none of the model's own end-of-text tokens. The llguidance matcher has read
    the committed tokens and, while looking ahead, those of `ahead`; `rows` keeps the sets found
    behind the committed tokens, by what follows them.

    llguidance bounds how many states its lexer may have and how much work one mask may take. Where
    a matcher meets a bound, a new one reads the tokens again and tries once more: so whether a
    request can go on depends on its text alone, not on what was looked at before, and it is the
    same with drafts and without. If the new one fails too, the request ends with an error.

    With `threads` the time is bounded as well: sets are found there, and who waits too long for one
    leaves the request out of a step (`ready`, NotReadyError), so that the others go on. After
    PATIENCE seconds the request ends."""

    def __init__(
        self,
        compiled: Compiled,
        last: int,
        vocab: int,
        own_ends: Collection[int],
        end_ids: Collection[int],
        threads: MaskThreads | None = None,
    ) -> None:
        """`last` is the sign of `compiled` that the text may end."""
        self.compiled, self.core, self.last, self.threads = compiled, compiled.core, last, threads
        self.width = (vocab + 7) // 8
        self.ends = _set(token for token in end_ids if token < vocab)
        self.texts = ((1 << vocab) - 1) & ~_set([last, *own_ends])
        self.tokens: list[int] = []
        self.ahead: list[int] = []
        self.rows: dict[
            tuple[int, ...], int | None
        ] = {}  # None where a bound of llguidance forbids to go there
        self.broken = False
        self._running: Future[object] | None = None  # looks ahead in a thread, since `_begun`
        self._begun = 0.0
        self._only_known = False  # whether sets are only to be looked up
        self._why = ""  # which bound was met last

    def ready(self) -> bool:
        """Return True if the set of tokens behind the committed ones is known, after a wait that
        all requests of a step share. Raises RequestError where it cannot be found, or is not within
        PATIENCE seconds."""
        if self._running is None and (() in self.rows or self.broken):
            return True
        try:
            self._in_time(self._root)
        except NotReadyError:
            return False
        return True

    def begin(self) -> None:
        """Begin with what `ready` waits for."""
        if (
            self.threads is not None
            and self._running is None
            and not self.broken
            and () not in self.rows
        ):
            self._running = self._started(self._root)

    def masks(self, draft: Draft) -> list[bytes]:
        """For each node the tokens allowed after it: ceil(V / 8) bytes, the lowest token in the
        lowest bit.

        A node that cannot be accepted, or with nothing to follow, gets a set that is not empty and
        means nothing. Raises RequestError where a bound of llguidance forbids to go on behind a
        node."""

        def look() -> list[int]:
            return [0 if path is None else self._allowed(path) for path in self._paths(draft)]

        rows = self._in_time(look, PATIENCE)
        return [(row or self.ends or 1).to_bytes(self.width, "little") for row in rows]

    def prune(self, draft: Draft) -> Draft:
        """The draft without the nodes that the grammar forbids, and what hangs below them.

        A draft with sampled nodes is left alone: which nodes are verified may not depend on what
            was drawn. Raises
        NotReadyError where that takes longer than others should wait; `masks` need not look any
        more behind this."""
        paths = self._in_time(lambda: self._paths(draft, known=True))
        if any(kind is not Proposal.DETERMINISTIC for kind in draft.proposals):
            return draft
        kept = [node for node, path in enumerate(paths) if path is not None]
        if len(kept) == len(draft):
            return draft
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        return Draft(
            tokens=[draft.tokens[i] for i in kept],
            parents=[new[draft.parents[i]] for i in kept],
            sources=[draft.sources[i] for i in kept],
            proposals=[draft.proposals[i] for i in kept],
            probs=None if draft.probs is None else draft.probs[kept],
        )

    def forced(self, limit: int) -> list[int]:
        """The next tokens, as long as the grammar allows one only; at most `limit`, and no end of
        the text. Raises NotReadyError as `prune` does."""
        return self._in_time(lambda: self._forced(limit))

    def _forced(self, limit: int) -> list[int]:
        path: tuple[int, ...] = ()
        while len(path) < limit:
            row = self._row(path)
            if row is None or row.bit_count() != 1 or row & self.ends:
                break
            path = (*path, row.bit_length() - 1)
        return list(path)

    def advance(self, token: int) -> None:
        """Commit one token. Raises RequestError where a bound of llguidance forbids it."""
        if self.broken:
            return
        if self._running is not None:  # nobody else may use the core meanwhile
            self._in_time(self._root, PATIENCE)
        if (
            self.ends >> token & 1
        ):  # the request ends with it: only whether it may has still to be known
            self.broken = not self._root() >> token & 1
            return
        if self.ahead[:1] == [token]:
            self.ahead.pop(0)
        elif not self._root() >> token & 1:
            self.broken = True
        elif not (self._move(()) and self.core.consume_token(token)) and not self._renew(
            [*self.tokens, token]
        ):
            raise self._too_complex()
        self.tokens.append(token)
        self.rows = {path[1:]: row for path, row in self.rows.items() if path[:1] == (token,)}

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        return (
            not self.broken
            and (self._move(()) or self._renew(self.tokens))
            and bool(self.core.is_accepting())
        )

    @property
    def stopped(self) -> bool:
        """Whether nothing can follow the text so far but its end."""
        return self.broken or not self._in_time(self._root) & ~self.ends

    @property
    def ending(self) -> str | None:
        """Why the request ends here, where no end token says so.

        "stop": the text is complete and cannot go on, and the request has no end token. "abort": no
        token can go on
        and the text is not complete: the vocabulary cannot spell it. None as well while that is not
            known (`ready`).
        """
        if self.broken:
            return "abort"
        try:
            if self.ends or not self.stopped:
                return None
        except NotReadyError:
            return None
        return "stop" if self.accepting else "abort"

    def _paths(self, draft: Draft, known: bool = False) -> list[tuple[int, ...] | None]:
        """The tokens from the root to each node; None for nodes that cannot be accepted and, with
        `known`, for those behind which a bound of llguidance forbids to go on."""
        paths: list[tuple[int, ...] | None] = [()]
        for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
            above = paths[parent]
            path = (
                (*above, token)
                if above is not None and (self._row(above) or 0) >> token & 1
                else None
            )
            paths.append(None if path is not None and known and self._row(path) is None else path)
        return paths

    def _row(self, path: tuple[int, ...]) -> int | None:
        """The tokens allowed after the committed ones and `path`, whose tokens are allowed
        themselves; None where a bound of llguidance forbids to go there."""
        if path not in self.rows:
            self.rows[path] = 0 if path and self.ends >> path[-1] & 1 else self._look(path)
        return self.rows[path]

    def _allowed(self, path: tuple[int, ...]) -> int:
        """`_row`. Raises RequestError in place of None."""
        row = self._row(path)
        if row is None:
            raise self._too_complex()
        return row

    def _root(self) -> int:
        return self._allowed(())

    def _look(self, path: tuple[int, ...]) -> int | None:
        """`_row`, found by going there, if need be with a new core."""
        if self._only_known:
            raise NotReadyError
        row = self._tried(path)
        if row is None and self._renew(self.tokens):
            row = self._tried(path)
        return row

    def _tried(self, path: tuple[int, ...]) -> int | None:
        row = bits(self.core) if self._move(path) else 0
        if self.core.is_error():
            self._why = self.core.get_error()
            return None
        return row & self.texts | (self.ends if row >> self.last & 1 else 0)

    def _move(self, path: tuple[int, ...]) -> bool:
        """Bring the core to the end of `path`; False where one of its bounds forbids that."""
        shared = 0
        while shared < min(len(path), len(self.ahead)) and path[shared] == self.ahead[shared]:
            shared += 1
        back = len(self.ahead) - shared
        if (back and not self.core.rollback(back)) or self.core.is_error():
            return False
        self.ahead = self.ahead[:shared]
        if len(path) > shared and not self.core.consume_tokens(list(path[shared:])):
            return False
        self.ahead = list(path)
        return True

    def _renew(self, tokens: list[int]) -> bool:
        """Read committed tokens with a new core, since one that has failed stays so and its lexer
        is full; False where a bound forbids that."""
        self.core, self.ahead = self.compiled.renew(), []
        return bool(self.core.consume_tokens(tokens))

    def _in_time(self, look: Callable[[], T], seconds: float = 0.0) -> T:
        """What `look` gives at once, or in a thread, where time is bounded. Raises NotReadyError if
        the wait of this step and `seconds` are over before, and RequestError after PATIENCE
        seconds; nothing else may be asked meanwhile."""
        if self.threads is None:
            return look()
        if self._running is None:
            self._only_known = True
            try:
                return look()
            except NotReadyError:
                pass
            finally:
                self._only_known = False
            self._running = self._started(look)
        wait([self._running], max(self.threads.until - time.perf_counter(), seconds))
        if not self._running.done():
            if time.perf_counter() - self._begun >= PATIENCE:
                raise self._too_slow()
            raise NotReadyError
        running, self._running = self._running, None
        running.result()
        return self._in_time(look, seconds)  # what ran may have been another question

    def _started(self, look: Callable[[], object]) -> Future[object]:
        assert self.threads is not None
        self._begun = time.perf_counter()
        return self.threads.pool.submit(look)

    def _too_slow(self) -> RequestError:
        return RequestError(
            f"this {self.compiled.kind} grammar takes too long to match after {len(self.tokens)} tokens: give one with"
            " fewer ambiguities and shorter repetitions"
        )

    def _too_complex(self) -> RequestError:
        why = short((self.core.get_error() or self._why).partition("<state>")[0])
        return RequestError(
            f"this {self.compiled.kind} grammar is too complex to match after {len(self.tokens)} tokens ({why}): give"
            " one with fewer ambiguities and shorter repetitions"
        )


def bits(core: Any) -> int:
    """The set of tokens that llguidance allows next."""
    return int.from_bytes(core.compute_bitmask(), "little")


def _set(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))
