"""The page allocator: no page is lost or held twice, and a shared page holds exactly the prefix of
its digest.

Random orders of match, grow, seal, shrink and release are compared with a model that knows the
content of every row; digests, the order of eviction, and a grow that fails are tested too."""

from __future__ import annotations

import copy
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forerun.cache.pages import Pages

PAGE, SLOTS, CONTEXT = 3, 3, 15


def digest(tokens: Sequence[int], size: int) -> bytes:
    """Return the digest of the page that ends these tokens, chained from the first page."""
    name = hashlib.blake2b(b"", digest_size=16).digest()  # for the tenant ""
    for start in range(0, len(tokens), size):
        page = np.array(tokens[start : start + size], dtype=np.int64).tobytes()
        name = hashlib.blake2b(name + page, digest_size=16).digest()
    return name


def state(pages: Pages) -> dict[str, Any]:
    """Return the complete state of an allocator."""
    return {
        k: v.tolist() if isinstance(v, np.ndarray) else copy.deepcopy(v)
        for k, v in vars(pages).items()
    }


class Model:
    """Random operations on an allocator.

    `texts`: the committed tokens of each open slot; `written[row]`: the text up to that row."""

    def __init__(self, seed: int, count: int) -> None:
        self.dice = random.Random(seed)
        self.pages = Pages(count, PAGE, SLOTS, CONTEXT)
        self.texts: dict[int, list[int]] = {}
        self.common = [self.dice.choices((0, 1), k=CONTEXT) for _ in range(2)]
        self.written: dict[int, tuple[int, ...]] = {}
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        """Run one random operation that is possible."""
        closed = [slot for slot in range(SLOTS) if slot not in self.texts]
        if closed and self.dice.random() < 0.5:
            self.open(self.dice.choice(closed))
        elif self.texts:
            slot = self.dice.choice(sorted(self.texts))
            self.dice.choice(
                [self.extend, self.extend, self.speculate, self.seal, self.seal, self.release]
            )(slot)
        self.check()

    def random_tokens(self, most: int) -> list[int]:
        return self.dice.choices((0, 1), k=self.dice.randint(1, most))

    def open(self, slot: int) -> None:
        """Open a request: share its cached prefix and read the rest."""
        tokens = [
            *self.dice.choice(self.common)[: self.dice.randint(0, CONTEXT)],
            *self.random_tokens(4),
        ][:CONTEXT]
        known = self.pages.match(slot, tokens)
        self.seen[f"match of {known // PAGE}"] += 1
        assert known % PAGE == 0
        assert known < len(tokens), "one token must be left to read"
        assert known == self.longest(tokens)
        self.texts[slot] = list(tokens[:known])
        self.append(slot, tokens[known:])

    def longest(self, tokens: list[int]) -> int:
        """Return the number of tokens in the longest cached run of full pages from the start."""
        known = 0
        while (
            known + PAGE < len(tokens)
            and digest(tokens[: known + PAGE], PAGE) in self.pages.page_of
        ):
            known += PAGE
        return known

    def extend(self, slot: int) -> None:
        self.append(slot, self.random_tokens(5))

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        text = self.texts[slot]
        if self.grow(slot, len(text) + len(tokens)):
            for token in tokens:
                text.append(token)
                self.write(slot, len(text) - 1, tuple(text))

    def write(self, slot: int, at: int, value: tuple[int, ...]) -> None:
        row = int(self.pages.rows[slot, at])
        assert self.pages.users[row // PAGE] == 1, "a shared page is written"
        self.written[row] = value

    def grow(self, slot: int, upto: int) -> bool:
        before, free = state(self.pages), len(self.pages.free)
        missing = -(-upto // PAGE) - len(self.pages.held[slot])
        possible = upto <= CONTEXT and missing <= self.pages.available
        done = self.pages.grow(slot, upto)
        assert done == possible
        assert not done or len(self.pages.held[slot]) * PAGE >= upto
        assert done or state(self.pages) == before
        self.seen["refusal" if not done else "eviction" if missing > free else "growth"] += 1
        return done

    def speculate(self, slot: int) -> None:
        """Reserve rows for a draft, write to them and release them."""
        length, count = len(self.texts[slot]), self.dice.randint(1, 6)
        if self.grow(slot, length + count):
            for i in range(count):
                self.write(slot, length + i, (9,))
            self.pages.shrink(slot, length)

    def seal(self, slot: int) -> None:
        """Seal up to any committed length, perhaps again; sealed pages are cached at once."""
        text, before = self.texts[slot], len(self.pages.chain[slot]) * PAGE
        upto = self.dice.choice([len(text), self.dice.randint(0, len(text))])
        self.pages.seal(slot, text, upto)
        for end in range(before + PAGE, upto + 1, PAGE):
            assert digest(text[:end], PAGE) in self.pages.page_of

    def release(self, slot: int) -> None:
        self.pages.release(slot)
        del self.texts[slot]
        assert not self.pages.held[slot]

    def check(self) -> None:
        self.pages.check()
        for slot, text in self.texts.items():
            rows = self.pages.rows[slot, : len(text)].tolist()
            assert [self.written[row] for row in rows] == [
                tuple(text[: i + 1]) for i in range(len(text))
            ]
        assert {name: page for page, name in self.pages.digest_of.items()} == self.pages.page_of
        for page, name in self.pages.digest_of.items():
            last = self.written[page * PAGE + PAGE - 1]
            assert len(last) % PAGE == 0
            assert digest(last, PAGE) == name
            assert [self.written[page * PAGE + i] for i in range(PAGE)] == [
                last[: len(last) - i] for i in (2, 1, 0)
            ]


@pytest.mark.parametrize("count", [4, 8, 14])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations(seed: int, count: int) -> None:
    """Pools are too small for one, two or three slots of the longest text."""
    model = Model(seed, count)
    for _ in range(1500):
        model.step()
    for event in ("match of 0", "match of 1", "match of 2", "growth", "eviction", "refusal"):
        assert model.seen[event] > 5, f"{event}: the operations are not random enough"
    for slot in list(model.texts):
        model.release(slot)
    assert model.pages.available == count


# ---------------------------------------------------------------- single rules


def filled(pages: Pages, slot: int, tokens: Sequence[int]) -> Pages:
    """Let a slot read and seal a text; return the allocator."""
    pages.match(slot, tokens)
    assert pages.grow(slot, len(tokens))
    pages.seal(slot, tokens, len(tokens))
    return pages


def test_a_text_that_was_read_twice_is_cached_once() -> None:
    """Two requests that arrive together both read it; the second copy is not cached."""
    pages = Pages(8, 2, 2, 8)
    for slot in (0, 1):
        assert pages.match(slot, [1, 2, 3, 4, 5]) == 0
        assert pages.grow(slot, 5)
    for slot in (0, 1):
        pages.seal(slot, [1, 2, 3, 4, 5], 5)
    assert len(pages.page_of) == 2
    pages.release(1)
    assert not pages.idle
    pages.release(0)
    assert len(pages.idle) == 2
    pages.check()


def test_later_pages_of_a_text_are_evicted_first_and_old_texts_before_new_ones() -> None:
    """A cached page is useless without the pages before it."""
    pages = filled(Pages(6, 1, 3, 6), 0, [1, 2, 3])
    filled(pages, 1, [7, 8, 9])
    pages.release(0)
    pages.release(1)
    kept = []
    for upto in range(1, 7):
        assert pages.grow(2, upto)
        kept.append(
            [
                len([n for n in range(1, 4) if digest(t[:n], 1) in pages.page_of])
                for t in ([1, 2, 3], [7, 8, 9])
            ]
        )
    assert kept == [[2, 3], [1, 3], [0, 3], [0, 2], [0, 1], [0, 0]]


def test_a_prefix_that_was_used_again_is_kept_longer() -> None:
    pages = filled(Pages(4, 1, 3, 4), 0, [1, 2])
    filled(pages, 1, [7, 8])
    pages.release(0)
    pages.release(1)
    assert pages.match(0, [1, 2, 3]) == 2
    pages.release(0)
    assert pages.grow(2, 2)
    assert pages.match(0, [1, 2, 3]) == 2
    assert pages.match(1, [7, 8, 9]) == 0


def test_the_context_is_rounded_up_to_full_pages() -> None:
    pages = Pages(4, 4, 1, 6)
    assert pages.grow(0, 8)
    assert not pages.grow(0, 9)


def test_another_text_after_a_shrink_below_sealed_pages_has_other_digests() -> None:
    pages = filled(Pages(8, 2, 2, 8), 0, [1, 2, 3, 4])
    pages.shrink(0, 2)
    pages.grow(0, 6)
    pages.seal(0, [1, 2, 5, 6, 7, 8], 6)
    pages.check()
    named = {page: name for page, name in pages.digest_of.items() if page in pages.held[0]}
    expected = {
        page: digest([1, 2, 5, 6, 7, 8][: 2 * i + 2], 2) for i, page in enumerate(pages.held[0])
    }
    assert named == expected


def test_check_detects_inconsistencies() -> None:
    for spoil in (
        lambda p: p.free.pop(),
        lambda p: p.free.append(p.held[0][0]),
        lambda p: p.users.__setitem__(0, 7),
        lambda p: p.held[1].append(p.held[0][0]),
    ):
        pages = filled(Pages(4, 2, 2, 8), 0, [1, 2])
        pages.check()
        spoil(pages)
        with pytest.raises(AssertionError):
            pages.check()


def test_prefixes_are_shared_within_a_tenant_only() -> None:
    pages = Pages(8, 2, 3, 8)
    text = [1, 2, 3, 4, 5]
    assert pages.match(0, text, "one") == 0 and pages.grow(0, len(text))
    pages.seal(0, text, 4)
    assert pages.match(1, text, "two") == 0 and pages.match(2, text, "one") == 4
    pages.release(2)
    assert pages.match(2, text) == 0, "the default tenant is a tenant of its own"
    pages.check()


def test_released_pages_stay_cached_until_their_room_is_needed() -> None:
    pages = filled(Pages(4, 2, 2, 8), 0, [1, 2, 3, 4])
    pages.release(0)
    assert pages.available == 4
    assert pages.grow(0, 4)
    assert len(pages.idle) == 2, "free pages are used before cached ones"
    assert pages.match(1, [1, 2, 3, 4, 5]) == 4
    pages.release(1)
    assert pages.grow(0, 8)
    assert not pages.page_of
    assert pages.match(1, [1, 2, 3, 4, 5]) == 0
    pages.check()
