"""The host side of the KV cache: the pages of each slot, and the pages of known prefixes.

A page is `size` consecutive rows of the KV tensors. Full pages of committed tokens are sealed:
named by a digest of their tenant and of all tokens up to their end, so that a later request of the
same tenant with the same beginning shares them. A shared page is never written, since writes happen
past the committed length and sharing only below it. Invariant (`check`): every page is free, idle
(sealed and unused, the first to be reused when room is needed), or held by as many slots as its
count of users says.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np


class Pages:
    """Allocator of `count` pages of `size` rows, for `slots` slots of at most `context` tokens.

    A row depends on its token and on as many as `ahead` tokens behind it, so the digest of a page
    includes those behind its last row.

    Attributes:
        rows: int64 [slots, context], the KV row of each logical index of a slot.
        lines: the addresses of the rows of `rows`.
        held: by slot, its pages.
        free: pages without contents.
        idle: sealed pages without users, the least recently used first.
        users: by page, the number of slots that hold it.
        digest_of, page_of: digests of sealed pages, both ways.
        chain: by slot, the digests of its full pages.
        root: by slot, the digest that precedes the first page; it depends on the tenant.
    """

    def __init__(self, count: int, size: int, slots: int, context: int, ahead: int = 0) -> None:
        self.count = count
        self.size = size
        self.ahead = ahead
        self.rows = np.zeros((slots, -(-context // size) * size), dtype=np.int64)
        self.lines: list[int] = [self.rows[slot].ctypes.data for slot in range(slots)]
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.free = list(range(count - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.users = [0] * count
        self.digest_of: dict[int, bytes] = {}
        self.page_of: dict[bytes, int] = {}
        self.chain: list[list[bytes]] = [[] for _ in range(slots)]
        self.root = [_root("")] * slots

    @property
    def available(self) -> int:
        """Number of pages that no slot holds."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """Number of pages that some slot holds."""
        return self.count - self.available

    def match(self, slot: int, tokens: Sequence[int], tenant: str = "") -> int:
        """Give an empty slot the sealed pages of the longest known prefix of this tenant; returns
        the number of tokens in them. At least one token is always left to read."""
        digest = self.root[slot] = _root(tenant)
        for start in range(0, len(tokens) - self.ahead - self.size, self.size):
            digest = self._digest(digest, tokens, start)
            page = self.page_of.get(digest)
            if page is None:
                break
            self.idle.pop(page, None)
            self._give(slot, page)
            self.chain[slot].append(digest)
        return len(self.held[slot]) * self.size

    def grow(self, slot: int, upto: int) -> bool:
        """Make room for `upto` tokens; return False and change nothing without enough pages."""
        need = -(-upto // self.size) - len(self.held[slot])
        if need > self.available or upto > self.rows.shape[1]:
            return False
        for _ in range(need):
            self._give(slot, self._take())
        return True

    def shrink(self, slot: int, upto: int) -> None:
        """Give back the pages past `upto` tokens, which must not be fewer than are committed."""
        keep = -(-upto // self.size)
        del self.chain[slot][upto // self.size :]
        while len(self.held[slot]) > keep:
            self._drop(self.held[slot].pop())

    def seal(self, slot: int, tokens: Sequence[int], upto: int) -> None:
        """Seal the full pages of the first `upto` committed tokens, so that others can share them.
        `tokens` has `ahead` more."""
        chain = self.chain[slot]
        while (len(chain) + 1) * self.size <= upto:
            start = len(chain) * self.size
            digest = self._digest(chain[-1] if chain else self.root[slot], tokens, start)
            page = self.held[slot][len(chain)]
            if digest not in self.page_of and page not in self.digest_of:
                self.page_of[digest] = page
                self.digest_of[page] = digest
            chain.append(digest)

    def release(self, slot: int) -> None:
        """Give back all pages of a slot; sealed ones stay known until their room is needed."""
        self.shrink(slot, 0)
        self.chain[slot].clear()

    def check(self) -> None:
        """Assert the invariant."""
        users = Counter(page for held in self.held for page in held)
        assert [users[p] for p in range(self.count)] == self.users, "users do not match the slots"
        states = [*self.free, *self.idle, *users]
        assert sorted(states) == list(range(self.count)), "a page is lost or in two states"
        assert all(page in self.digest_of for page in self.idle), "an idle page has no digest"

    def _take(self) -> int:
        if self.free:
            return self.free.pop()
        page, _ = self.idle.popitem(last=False)
        del self.page_of[self.digest_of.pop(page)]
        return page

    def _give(self, slot: int, page: int) -> None:
        at = len(self.held[slot]) * self.size
        self.rows[slot, at : at + self.size] = np.arange(page * self.size, (page + 1) * self.size)
        self.held[slot].append(page)
        self.users[page] += 1

    def _drop(self, page: int) -> None:
        self.users[page] -= 1
        if self.users[page] == 0:
            if page in self.digest_of:
                self.idle[page] = None
            else:
                self.free.append(page)

    def _digest(self, previous: bytes, tokens: Sequence[int], start: int) -> bytes:
        """Return the digest of the page from `start` on, behind the page with digest `previous`."""
        page = np.asarray(tokens[start : start + self.size + self.ahead], dtype=np.int64)
        return hashlib.blake2b(previous + page.tobytes(), digest_size=16).digest()


def _root(tenant: str) -> bytes:
    """Return the digest that precedes a tenant's first pages."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()
