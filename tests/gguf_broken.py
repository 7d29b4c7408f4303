"""Broken GGUF files: a parser and writer for all fields of a container, and mutations of a valid
file."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
SIZES = {kind: struct.calcsize(code) for kind, code in CODES.items()}  # bytes of each number type
STRING, ARRAY = 8, 9
EXTREMES = (
    0,
    1,
    2,
    7,
    31,
    33,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
)
Pair = tuple[bytes, int, bytes]  # key, type, value
Info = tuple[bytes, tuple[int, ...], int, int]  # name, dimensions, type, offset


def text(value: bytes | str, length: int | None = None) -> bytes:
    """Return a string as it is stored; `length` replaces its true length."""
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value) if length is None else length) + value


def number(kind: int, value: float) -> bytes:
    """Return a number as it is stored."""
    return struct.pack("<" + CODES[kind], value)


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    """Return an array as it is stored; `count` replaces its true length."""
    each = [text(v) if kind == STRING else number(kind, v) for v in values]
    return struct.pack("<IQ", kind, len(values) if count is None else count) + b"".join(each)


@dataclass
class Container:
    """The parts of a file; `counts` replace the true numbers of tensors and keys."""

    pairs: list[Pair]
    infos: list[Info]
    data: bytes = b""
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    counts: tuple[int, int] | None = None

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        out = self.magic + struct.pack(
            "<IQQ", self.version, *(self.counts or (len(self.infos), len(self.pairs)))
        )
        for key, kind, value in self.pairs:
            out += text(key) + struct.pack("<I", kind) + value
        for name, dimensions, kind, offset in self.infos:
            out += text(name) + struct.pack(
                f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset
            )
        return out + bytes(-len(out) % self.alignment) + self.data

    def with_pair(self, key: str, kind: int, value: bytes) -> Container:
        """Return a copy with one key's value replaced or added."""
        kept = [pair for pair in self.pairs if pair[0] != key.encode()]
        return replace(self, pairs=[*kept, (key.encode(), kind, value)])

    def with_info(self, number: int, **changes: Any) -> Container:
        """Return a copy with one tensor's entry changed."""
        name, dimensions, kind, offset = self.infos[number]
        new = {"name": name, "dimensions": dimensions, "kind": kind, "offset": offset} | changes
        infos = list(self.infos)
        infos[number] = (new["name"], new["dimensions"], new["kind"], new["offset"])
        return replace(self, infos=infos)


@dataclass
class Walk:
    """Parser of a valid file that records its fields: `numbers` are (position, bytes) of lengths,
    counts, types, sizes and offsets, `ends` the end of every field."""

    data: bytes
    at: int = 24
    ends: list[int] = field(default_factory=lambda: [4, 8, 16, 24])
    numbers: list[tuple[int, int]] = field(default_factory=lambda: [(4, 4), (8, 8), (16, 8)])

    def take(self, size: int, is_number: bool = True) -> int:
        start, self.at = self.at, self.at + size
        self.ends.append(self.at)
        if is_number:
            self.numbers.append((start, size))
        return int.from_bytes(self.data[start : self.at], "little") if is_number else start

    def text(self) -> bytes:
        size = self.take(8)
        start = self.take(size, is_number=False)
        return self.data[start : start + size]

    def value(self, kind: int) -> bytes:
        start = self.at
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            of, count = self.take(4), self.take(8)
            for _ in range(count):
                self.value(of)
        else:
            self.take(SIZES[kind])
        return self.data[start : self.at]

    def container(self) -> Container:
        """Parse the file."""
        tensors, keys = struct.unpack_from("<QQ", self.data, 8)
        pairs: list[Pair] = []
        for _ in range(keys):
            key, kind = self.text(), self.take(4)
            pairs.append((key, kind, self.value(kind)))
        infos: list[Info] = []
        for _ in range(tensors):
            name, count = self.text(), self.take(4)
            dimensions = tuple(self.take(8) for _ in range(count))
            infos.append((name, dimensions, self.take(4), self.take(8)))
        return Container(pairs, infos, self.data[self.at + -self.at % 32 :])


def mutations(data: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield (description, content) of `count` broken files; the kinds of mutation take turns and
    depend on the seed only."""
    walk = Walk(data)
    parts = walk.container()
    rng = random.Random(seed)
    kinds: list[Callable[[], tuple[str, bytes]]] = [
        lambda: _truncated(data, rng.choice(walk.ends)),
        lambda: _truncated(data, rng.randrange(len(data))),
        lambda: _renumbered(data, rng.choice(walk.numbers), rng),
        lambda: _flipped(data, walk.at, rng),
        lambda: _flipped(data, len(data), rng),
        lambda: _value_changed(parts, rng),
        lambda: _value_changed(parts, rng, "tokenizer."),
        lambda: _tensor_changed(parts, rng),
    ]
    for i in range(count):
        yield kinds[i % len(kinds)]()


def _truncated(data: bytes, at: int) -> tuple[str, bytes]:
    return f"truncated at {at}", data[:at]


def _renumbered(data: bytes, where: tuple[int, int], rng: random.Random) -> tuple[str, bytes]:
    at, size = where
    old = int.from_bytes(data[at : at + size], "little")
    new = rng.choice([*EXTREMES, old + 1, old - 1, old * 2, old ^ 1 << rng.randrange(8 * size)])
    new %= 1 << 8 * size
    return f"{new} for {old} at {at}", data[:at] + new.to_bytes(size, "little") + data[at + size :]


def _flipped(data: bytes, end: int, rng: random.Random) -> tuple[str, bytes]:
    changed = bytearray(data)
    places = rng.choices(range(end), k=rng.choice((1, 1, 2, 8)))
    for at in places:
        changed[at] ^= rng.randrange(1, 256)
    return f"flipped {places}", bytes(changed)


VALUES: list[tuple[int, bytes]] = [
    (STRING, text("")), (STRING, text("llama")), (STRING, text("x" * 5000)), (STRING, text(b"\xff\n\x00\xfe")),
    (4, number(4, 0)), (4, number(4, 1)), (4, number(4, 2**32 - 1)), (5, number(5, -1)), (10, number(10, 2**64 - 1)),
    (7, b"\x05"), (6, number(6, float("nan"))), (6, number(6, float("inf"))), (12, number(12, -1e300)),
    (6, number(6, 0)),
    (ARRAY, array(4, [])), (ARRAY, array(5, [2])), (ARRAY, array(5, [2, -3])), (ARRAY, array(STRING, [])),
    (ARRAY, array(STRING, ["a", "a"])), (ARRAY, array(STRING, ["a b", "b", ""])), (ARRAY, array(6, [0.5] * 64)),
    (ARRAY, array(7, [1] * 64)), (ARRAY, array(6, [float("nan")] * 64)), (ARRAY, array(5, [9] * 64)),
    (ARRAY, array(STRING, [f"t{i}" for i in range(64)])), (ARRAY, array(STRING, [f"t{i}" for i in range(65)])),
]  # fmt: skip


def _value_changed(parts: Container, rng: random.Random, prefix: str = "") -> tuple[str, bytes]:
    """Replace the value of a key, by one of the same or of another type, or remove the key."""
    key, kind, value = rng.choice(
        [pair for pair in parts.pairs if pair[0].startswith(prefix.encode())]
    )
    new = rng.choice(VALUES)
    how = rng.randrange(6)
    if how == 0:
        return f"without {key!r}", replace(
            parts, pairs=[pair for pair in parts.pairs if pair[0] != key]
        ).pack()
    if how == 1 and kind == ARRAY:
        count = struct.unpack_from("<Q", value, 4)[0]
        of = value[:4]
        if of != struct.pack("<I", STRING):
            size, less = SIZES[of[0]], rng.randrange(count)
            new = kind, of + struct.pack("<Q", less) + value[12 : 12 + size * less]
    if how == 2 and kind not in (STRING, ARRAY):
        new = kind, bytes(rng.randrange(256) for _ in value)
    return f"{key!r} of type {new[0]}: {new[1][:40]!r}", parts.with_pair(key.decode(), *new).pack()


def _tensor_changed(parts: Container, rng: random.Random) -> tuple[str, bytes]:
    """Change the offset, shape, type or name of a tensor, or remove it."""
    which, other = rng.sample(range(len(parts.infos)), 2)
    name, dimensions, _, offset = parts.infos[which]
    changes: list[dict[str, Any]] = [
        {"offset": parts.infos[other][3]}, {"offset": offset + rng.choice((8, 32, -32, 2**40, 2**63)) & 2**64 - 1},
        {"kind": rng.randrange(64)}, {"kind": parts.infos[other][2]}, {"name": parts.infos[other][0]},
        {"name": b"blk.0.unknown.weight"}, {"name": b"\xff\n" * 20}, {"name": b""}, {"name": b"n" * 64},
        {"dimensions": dimensions[::-1]}, {"dimensions": (*dimensions, 1)}, {"dimensions": ()},
        {"dimensions": (*dimensions[:-1], rng.choice(EXTREMES))},
        {"dimensions": (rng.choice(EXTREMES), *dimensions[1:])}, {"dimensions": (2**32, 2**32, 2**32, 2**32)},
        {"dimensions": (1,) * 5}, {"dimensions": parts.infos[other][1]},
    ]  # fmt: skip
    change = rng.choice(changes)
    if not rng.randrange(8):
        return f"without {name!r}", replace(
            parts, infos=[info for info in parts.infos if info[0] != name]
        ).pack()
    return f"tensor {name!r}: {change}", parts.with_info(which, **change).pack()
