"""Grammars along a request: the tokens that a grammar allows at each node of a draft.

Only `Matcher.advance` commits. Masks, pruning and forced tokens look ahead along the paths of a
tree and leave no trace: what is allowed depends on the text before and on nothing else, so drafts
are masked exactly as plain decoding is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from forerun.errors import RequestError
from forerun.sampling.grammar import short
from forerun.types import Draft, Proposal

SOURCE = "grammar"  # the name of forced tokens in statistics
PATIENCE = 1.0  # seconds that the masks of one step may take, while other requests go on
MOMENT = 0.01  # seconds that a step waits for the masks of all its requests
T = TypeVar("T")


class NotReadyError(Exception):
    """The allowed tokens are not known yet: the request has to be left out of this step."""


class MaskThreads:
    """Threads that compute masks, and the time until which a step waits for them.

    Attributes:
        until: the time until which the step waits for all of them.
        waits_again: the step waits even for requests that have let an earlier step wait in vain.
    """

    def __init__(self, count: int) -> None:
        self.pool = ThreadPoolExecutor(count, "forerun-masks")
        self.until = 0.0
        self.waits_again = True

    def begin_step(self, waits_again: bool) -> None:
        """Let the waits of a step begin."""
        self.until = time.perf_counter() + MOMENT
        self.waits_again = waits_again


@dataclass(eq=False)
class Compiled:
    """A grammar compiled for one request.

    Attributes:
        core: llguidance's matcher before its first token; its lexer collects states in use.
        size: the bytes that it held after compilation.
        renew: compiles the grammar again, for a matcher with an empty lexer.
        kind: the kind of the grammar.
        owner: the client that made the request.
    """

    core: Any
    size: int
    renew: Callable[[], Any]
    kind: str
    owner: str = ""


class Matcher:
    """A grammar along one request. A set of tokens is an int: bit t is token t.

    Behind a complete text the tokens of `end_ids` are allowed, and nothing else if nothing can
    follow; before that, none of the model's own end-of-text tokens is. The llguidance matcher has
    read the committed tokens and, while looking ahead, those of `ahead`; `rows` keeps the sets
    found behind the committed tokens, by the path to them.

    llguidance bounds the number of its lexer states and the work of one mask. When a bound is met,
    a new matcher reads the tokens again and tries once more. So whether a request can go on depends
    on its text alone, with drafts and without. If the new matcher fails too, the request ends with
    an error.

    With `threads` the time is bounded as well: sets are computed there, and a request whose set
    takes too long is left out of a step (`ready`, NotReadyError), so that the others go on. After
    PATIENCE seconds the request ends.
    """

    def __init__(
        self,
        compiled: Compiled,
        last: int,
        vocab: int,
        own_ends: Collection[int],
        end_ids: Collection[int],
        threads: MaskThreads | None = None,
    ) -> None:
        """Create a matcher; `last` is the token with which `compiled` marks a possible end."""
        self.compiled = compiled
        self.core = compiled.core
        self.last = last
        self.threads = threads
        self._moment = MOMENT  # seconds that others wait for a set: 0 after one that took longer
        self.width = (vocab + 7) // 8
        self.ends = _token_set(token for token in end_ids if token < vocab)
        self.texts = ((1 << vocab) - 1) & ~_token_set([last, *own_ends])
        self.tokens: list[int] = []
        self.ahead: list[int] = []
        # None where a bound of llguidance forbids to go there.
        self.rows: dict[tuple[int, ...], int | None] = {}
        self.broken = False
        self._running: Future[object] | None = None  # a look-ahead in a thread, since `_begun`
        self._begun = 0.0
        self._only_known = False  # look up sets, and do not compute them
        self._why = ""  # the bound that was met last

    # State of the request

    def ready(self) -> bool:
        """Return True if the set behind the committed tokens is known, after a wait that all
        requests of a step share.

        Raises:
            RequestError: it cannot be computed, or not within PATIENCE seconds.
        """
        if self._running is None and (() in self.rows or self.broken):
            return True
        try:
            self._in_time(self._root)
        except NotReadyError:
            return False
        return True

    def begin(self) -> None:
        """Start the computation that `ready` waits for."""
        if self.threads is None or self._running is not None:
            return
        if not self.broken and () not in self.rows:
            self._running = self._start(self._root)

    @property
    def late(self) -> bool:
        """True if the set is not known yet, and others should not wait for it."""
        running = self._running
        waited = time.perf_counter() - self._begun
        return running is not None and not running.done() and waited >= self._moment

    @property
    def accepting(self) -> bool:
        """True if the text so far is complete."""
        if self.broken:
            return False
        return (self._move(()) or self._renew(self.tokens)) and bool(self.core.is_accepting())

    @property
    def stopped(self) -> bool:
        """True if nothing can follow the text so far but its end."""
        return self.broken or not self._in_time(self._root) & ~self.ends

    @property
    def ending(self) -> str | None:
        """Why the request ends here without an end token, or None.

        "stop": the text is complete and cannot go on, and the request has no end token. "abort": no
        token can go on and the text is not complete: the vocabulary cannot spell it. It is None
        while that is not known (`ready`).
        """
        if self.broken:
            return "abort"
        try:
            if self.ends or not self.stopped:
                return None
        except NotReadyError:
            return None
        return "stop" if self.accepting else "abort"

    def advance(self, token: int) -> None:
        """Commit one token. Raises RequestError if a bound of llguidance forbids it."""
        if self.broken:
            return
        if self._running is not None:  # the thread is using the core
            self._in_time(self._root, PATIENCE)
        if self.ends >> token & 1:  # the request ends: only whether it may has to be known
            self.broken = not self._root() >> token & 1
            return
        if self.ahead[:1] == [token]:
            self.ahead.pop(0)
        elif not self._root() >> token & 1:
            self.broken = True
        elif not self._consume(token):
            raise self._too_complex()
        self.tokens.append(token)
        self.rows = {path[1:]: row for path, row in self.rows.items() if path[:1] == (token,)}

    def _consume(self, token: int) -> bool:
        """Let the core read a committed token; False if a bound of llguidance forbids it."""
        if self._move(()) and self.core.consume_token(token):
            return True
        return self._renew([*self.tokens, token])

    # Drafts

    def masks(self, draft: Draft) -> list[bytes]:
        """Return the tokens allowed after each node: ceil(V / 8) bytes, the lowest token in the
        lowest bit.

        The set of a node that cannot be accepted, or with nothing to follow, is arbitrary but not
        empty.

        Raises:
            RequestError: a bound of llguidance forbids to go on behind a node.
        """

        def look() -> list[int]:
            return [0 if path is None else self._allowed(path) for path in self._paths(draft)]

        rows = self._in_time(look, PATIENCE)
        return [(row or self.ends or 1).to_bytes(self.width, "little") for row in rows]

    def prune(self, draft: Draft) -> Draft:
        """Return the draft without the nodes that the grammar forbids and those below them.

        A draft with sampled nodes is left alone: which nodes are verified may not depend on what
        was drawn. `masks` has nothing left to compute behind this.

        Raises:
            NotReadyError: it takes longer than other requests should wait.
        """
        paths = self._in_time(lambda: self._paths(draft, known=True))
        if any(proposal is not Proposal.DETERMINISTIC for proposal in draft.proposals):
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
        """Return the next tokens, at most `limit`, as long as the grammar allows a single one that
        does not end the text. Raises NotReadyError as `prune` does."""

        def look() -> list[int]:
            path: tuple[int, ...] = ()
            while len(path) < limit:
                row = self._row(path)
                if row is None or row.bit_count() != 1 or row & self.ends:
                    break
                path = (*path, row.bit_length() - 1)
            return list(path)

        return self._in_time(look)

    def _paths(self, draft: Draft, known: bool = False) -> list[tuple[int, ...] | None]:
        """Return the tokens from the root to each node, None for nodes that cannot be accepted.

        With `known` also None for those behind which a bound of llguidance forbids to go on.
        """
        paths: list[tuple[int, ...] | None] = [()]
        for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
            above = paths[parent]
            path = None
            if above is not None and (self._row(above) or 0) >> token & 1:
                path = (*above, token)
                if known and self._row(path) is None:
                    path = None
            paths.append(path)
        return paths

    # Sets of allowed tokens

    def _root(self) -> int:
        return self._allowed(())

    def _allowed(self, path: tuple[int, ...]) -> int:
        """Return `_row`. Raises RequestError in place of None."""
        row = self._row(path)
        if row is None:
            raise self._too_complex()
        return row

    def _row(self, path: tuple[int, ...]) -> int | None:
        """Return the tokens allowed behind the committed ones and `path`, which must be allowed;
        None if a bound of llguidance forbids to go there."""
        if path not in self.rows:
            self.rows[path] = 0 if path and self.ends >> path[-1] & 1 else self._compute(path)
        return self.rows[path]

    def _compute(self, path: tuple[int, ...]) -> int | None:
        if self._only_known:
            raise NotReadyError
        row = self._try(path)
        if row is None and self._renew(self.tokens):
            row = self._try(path)
        return row

    def _try(self, path: tuple[int, ...]) -> int | None:
        row = bits(self.core) if self._move(path) else 0
        if self.core.is_error():
            self._why = self.core.get_error()
            return None
        return row & self.texts | (self.ends if row >> self.last & 1 else 0)

    def _move(self, path: tuple[int, ...]) -> bool:
        """Bring the core to the end of `path`; False if one of its bounds forbids that."""
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
        """Read committed tokens with a new core; False if a bound forbids that. A core that has
        failed stays so, and its lexer is full."""
        self.core = self.compiled.renew()
        self.ahead = []
        return bool(self.core.consume_tokens(tokens))

    # Time

    def _in_time(self, look: Callable[[], T], seconds: float = 0.0) -> T:
        """Return the result of `look`, computed in a thread where time is bounded.

        Raises:
            NotReadyError: the wait of this step, and `seconds`, are over before; nothing else may
                be computed meanwhile.
            RequestError: PATIENCE seconds are over.
        """
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
            self._running = self._start(look)
        until = self.threads.until
        if not self.threads.waits_again:
            until = min(until, self._begun + self._moment)
        wait([self._running], max(until - time.perf_counter(), seconds))
        if not self._running.done():
            if time.perf_counter() - self._begun >= PATIENCE:
                raise RequestError(
                    f"this {self.compiled.kind} grammar takes too long to match after"
                    f" {len(self.tokens)} tokens: give one with fewer ambiguities and shorter"
                    " repetitions"
                )
            raise NotReadyError
        running = self._running
        self._running = None
        running.result()
        return self._in_time(look, seconds)  # the thread may have computed something else

    def _start(self, look: Callable[[], object]) -> Future[object]:
        assert self.threads is not None
        self._begun = time.perf_counter()

        def run() -> None:
            try:
                look()
            finally:
                if look == self._root:  # what is derived from that set takes no time
                    self._moment = MOMENT if time.perf_counter() - self._begun < MOMENT else 0.0

        return self.threads.pool.submit(run)

    def _too_complex(self) -> RequestError:
        why = short((self.core.get_error() or self._why).partition("<state>")[0])
        return RequestError(
            f"this {self.compiled.kind} grammar is too complex to match after {len(self.tokens)}"
            f" tokens ({why}): give one with fewer ambiguities and shorter repetitions"
        )


def bits(core: Any) -> int:
    """Return the set of tokens that llguidance allows next."""
    return int.from_bytes(core.compute_bitmask(), "little")


def _token_set(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))
