"""A grammar along one request: what it allows at each node of a draft, and what it leaves no choice about.

Only `advance` commits. Masks, pruning and forced tokens look ahead along the paths of a tree and leave no trace: what
is allowed at a place depends on the text before it and on nothing else, so drafts are masked as plain decoding is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from forerun.types import Draft, Law

SOURCE = "grammar"  # what statistics call forced tokens


@dataclass(eq=False)
class Compiled:
    """A grammar as llguidance's matcher before its first token, and the bytes that it holds."""

    core: Any
    size: int


class Matcher:
    """A grammar along one request. A set of tokens is an int: bit t is token t.

    After a complete text the tokens of `end_ids` are allowed and nothing else where nothing can follow; before that
    none of the model's own end-of-text tokens. The llguidance matcher has read the committed tokens and, while
    looking ahead, those of `ahead`; `rows` keeps the sets found since the last commit.
    """

    def __init__(
        self, compiled: Compiled, last: int, vocab: int, own_ends: Collection[int], end_ids: Collection[int]
    ) -> None:
        """`compiled` is not changed; `last` is its sign that the text may end."""
        self.compiled, self.core, self.last = compiled, compiled.core.deep_copy(), last
        self.width = (vocab + 7) // 8
        self.ends = _set(token for token in end_ids if token < vocab)
        self.texts = ((1 << vocab) - 1) & ~_set([last, *own_ends])
        self.tokens: list[int] = []
        self.ahead: list[int] = []
        self.rows: dict[tuple[int, ...], int] = {}
        self.broken = False

    def masks(self, draft: Draft) -> list[bytes]:
        """For each node the tokens allowed after it: ceil(V / 8) bytes, the lowest token in the lowest bit.

        A node that cannot be accepted, or with nothing to follow, gets a set that is not empty and means nothing.
        """
        rows = [0 if path is None else self._row(path) for path in self._paths(draft)]
        return [(row or self.ends or 1).to_bytes(self.width, "little") for row in rows]

    def prune(self, draft: Draft) -> Draft:
        """The draft without the nodes that the grammar forbids, and what hangs below them.

        A draft with sampled nodes is left alone: which nodes are verified may not depend on what was drawn.
        """
        if any(law is not Law.GIVEN for law in draft.laws):
            return draft
        kept = [node for node, path in enumerate(self._paths(draft)) if path is not None]
        if len(kept) == len(draft):
            return draft
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        return Draft(
            tokens=[draft.tokens[i] for i in kept],
            parents=[new[draft.parents[i]] for i in kept],
            sources=[draft.sources[i] for i in kept],
            laws=[draft.laws[i] for i in kept],
            probs=None if draft.probs is None else draft.probs[kept],
        )

    def forced(self, limit: int) -> list[int]:
        """The next tokens, as long as the grammar allows one only; at most `limit`, and no end of the text."""
        path: tuple[int, ...] = ()
        while len(path) < limit:
            row = self._row(path)
            if row.bit_count() != 1 or row & self.ends:
                break
            path = (*path, row.bit_length() - 1)
        return list(path)

    def advance(self, token: int) -> None:
        """Commit one token."""
        if self.broken:
            return
        if self.ends >> token & 1:  # the request ends with it: only whether it may has still to be known
            self.broken = not self._row(()) >> token & 1
            return
        if self.ahead[:1] == [token]:
            self.ahead.pop(0)
        else:
            self._move(())
            self.broken = not self.core.consume_token(token)
        self.tokens.append(token)
        self.rows.clear()

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        self._move(())
        return bool(self.core.is_accepting()) and not self.broken

    @property
    def stopped(self) -> bool:
        """Whether nothing can follow the text so far but its end."""
        return self.broken or not self._row(()) & ~self.ends

    @property
    def ending(self) -> str | None:
        """Why the request ends here, where no end token says so.

        "stop": the text is complete and cannot go on, and the request has no end token. "abort": no token can go on
        and the text is not complete: a vocabulary that cannot spell it, or one of llguidance's limits.
        """
        if self.broken:
            return "abort"
        if self.ends or not self.stopped:
            return None
        return "stop" if self.accepting else "abort"

    def _paths(self, draft: Draft) -> list[tuple[int, ...] | None]:
        """The tokens from the root to each node; None for nodes that cannot be accepted."""
        paths: list[tuple[int, ...] | None] = [()]
        for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
            above = paths[parent]
            allowed = above is not None and self._row(above) >> token & 1
            paths.append((*above, token) if allowed and above is not None else None)
        return paths

    def _row(self, path: tuple[int, ...]) -> int:
        """The tokens allowed after the committed ones and `path`, whose tokens are allowed themselves."""
        if path not in self.rows:
            self.rows[path] = 0 if path and self.ends >> path[-1] & 1 else self._look(path)
        return self.rows[path]

    def _look(self, path: tuple[int, ...]) -> int:
        """`_row`, found by going there."""
        row = bits(self.core) if self._move(path) else 0
        if self.core.is_error():
            self._restart()
            return 0
        return row & self.texts | (self.ends if row >> self.last & 1 else 0)

    def _move(self, path: tuple[int, ...]) -> bool:
        """Bring the llguidance matcher to the end of `path`; False where one of its limits forbids that."""
        shared = 0
        while shared < min(len(path), len(self.ahead)) and path[shared] == self.ahead[shared]:
            shared += 1
        back = len(self.ahead) - shared
        if back and not self.core.rollback(back):
            self._restart()
            shared = 0
        if len(path) > shared and not self.core.consume_tokens(list(path[shared:])):
            return False
        self.ahead = list(path)
        return True

    def _restart(self) -> None:
        """Read the committed tokens anew: an llguidance matcher never leaves an error."""
        self.core, self.ahead = self.compiled.core.deep_copy(), []
        self.core.consume_tokens(self.tokens)


def bits(core: Any) -> int:
    """The set of tokens that llguidance allows next."""
    return int.from_bytes(core.compute_bitmask(), "little")


def _set(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))
