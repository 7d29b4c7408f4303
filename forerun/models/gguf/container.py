"""Container format of GGUF: header, metadata and tensor table, validated before use; and copies of
files with further tensors.

Every count, length and offset is compared with the size of the file first, so a broken or hostile
file costs one error line, no memory and no crash. The reader of the `gguf` package is not used: it
makes Python objects for every element of an array, checks neither counts nor lengths against the
size of the file, and maps tensor data, which kills the process if the file shrinks. Tensor data is
read here with plain reads, a part at a time.
"""

from __future__ import annotations

import array
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forerun.errors import LoadError, one_line
from forerun.models.files import POINTER, parts_of
from forerun.utils import atomic_file

MAGIC = b"GGUF"
ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
MAX_KEY, MAX_NAME = 1 << 16, 63  # bytes
MAX_DIMENSIONS, MAX_SIZE = 4, 1 << 63
STRING, ARRAY, BOOL = 8, 9, 7  # value types
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip

# type id -> name, values per block, bytes per block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
REMOVED_TYPES = {4, 5, *range(31, 34), *range(36, 39)}
BLOCKS = {name: (values, size) for name, values, size in TYPES.values()}


class StringArray:
    """An array of strings that are decoded when read; as Python strings they would take ten times
    the memory."""

    def __init__(self, data: bytes, ends: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Wrap the strings as stored, each behind its length of 8 bytes; ends: int64 [N]."""
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = int(self._ends[index - 1]) if index else 0
        return self._data[start + 8 : int(self._ends[index])].decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        data, start = self._data, 0
        for end in self._ends.tolist():
            yield data[start + 8 : end].decode(errors="replace")
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | StringArray) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def head(self, count: int) -> bytes:
        """Return the bytes of the first `count` strings, lengths included."""
        return self._data[: int(self._ends[count - 1]) if count else 0]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `shape` is (out, in) for a matrix, `kind` a name in `TYPES`, `offset`
    and `size` are in bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the values along the last dimension."""
        values, size = BLOCKS[self.kind]
        return self.shape[-1] // values * size

    def read(self, first: int = 0, rows: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read rows as they are stored, uint8 [rows, row bytes]. Raises LoadError."""
        row_bytes = self.row_bytes
        rows = self.size // row_bytes - first if rows is None else rows
        data = np.empty((rows, row_bytes), np.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + first * row_bytes)
                done = file.readinto(data.data.cast("B"))
        except OSError as error:
            raise LoadError(f"{self.path}: tensor {self.name} cannot be read: {error}") from None
        if done < data.nbytes:
            raise LoadError(
                f"{self.path}: tensor {self.name} ends past the end of the file; download it again"
            )
        return data


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model's file or shards.

    Attributes:
        path: the file, or the first shard.
        metadata: str, int, float, bool, StringArray or numpy array, by key.
        tensors: by name.
        parts: all files.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    parts: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """general.architecture, or ""."""
        found = self.metadata.get("general.architecture")
        return one_line(found) if isinstance(found, str) else ""


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a file and of its further shards; cached while the file is unchanged.

    Raises LoadError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    return _open(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _open(path: Path, size: int, changed: int) -> GgufFile:
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    shards = [_read(part) for part in _shards(path, count)]
    tensors: dict[str, Entry] = {}
    for number, shard in enumerate(shards):
        own = shard.metadata.get("split.no", -1), shard.metadata.get("split.count")
        if own != (number, count):
            raise LoadError(f"{shard.path} is not shard {number + 1} of {count}; download it again")
        twice = tensors.keys() & shard.tensors.keys()
        if twice:
            raise LoadError(
                f"{shard.path}: tensor {min(twice)} is in an earlier shard too; "
                "download the shards again"
            )
        tensors |= shard.tensors
    expected = shards[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise LoadError(f"{path}: the {count} shards hold {len(tensors)} tensors, not {expected}")
    return replace(shards[0], tensors=tensors, parts=tuple(shard.path for shard in shards))


def _shards(path: Path, count: int) -> list[Path]:
    """Return all shards of a split model. Raises LoadError if one is missing or misnamed."""
    paths = [path.with_name(name) for name in parts_of(path.name)]
    if len(paths) != count:
        raise LoadError(
            f"{path} is one of {count} shards, but not named so: their names are "
            f"NAME-00001-of-{count:05}.gguf"
        )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LoadError(
            f"{path} is one of {count} shards, but {missing[0]}{more} is not beside it; "
            "download it too"
        )
    return paths


def _read(path: Path) -> GgufFile:
    try:
        with mapped(path) as data:
            return HeaderReader(path, data).read()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error}") from None


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file read-only. Raises LoadError, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise LoadError(f"{path} is no GGUF file: it has only {size} bytes; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


class HeaderReader:
    """Reads the header of one file, from its first byte on. Methods raise LoadError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.size, self.at = len(data), 0

    def read(self) -> GgufFile:
        """Read the whole header."""
        if self.data[:4] != MAGIC:
            raise LoadError(f"{self.path} is no GGUF file: {self._what_it_is()}")
        self.at = 4
        version = self.number("<I", "the version")
        if version & 0xFFFF == 0:
            self.fail(
                "is big-endian, which is not supported: convert it on a little-endian machine"
            )
        if version not in (2, 3):
            self.fail(f"has version {version} of GGUF: versions 2 and 3 are supported")
        tensors = self.number("<Q", "the number of tensors")
        pairs = self.number("<Q", "the number of keys")
        if pairs * 13 > self.size or tensors * 24 > self.size:  # their least sizes in bytes
            self.fail(f"names {tensors} tensors and {pairs} keys, more than fit in it")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.name("a key", MAX_KEY)
            if not key or key in metadata:
                self.fail(f"has the key {key!r} twice" if key else "has a key without a name")
            metadata[key] = self.value(key)
        entries = self.entries(tensors, self.alignment(metadata))
        return GgufFile(self.path, metadata, entries, (self.path,))

    def fail(self, what: str) -> None:
        raise LoadError(
            f"{self.path} {one_line(what)}; it is broken or incomplete, download it again"
        )

    def _what_it_is(self) -> str:
        start = bytes(self.data[:64]).lstrip()
        if start.startswith(POINTER):
            return "it is a Git LFS pointer; fetch the file itself (git lfs pull)"
        if start[:1] == b"<":
            return "it is a page of HTML; download the file itself"
        return "it does not begin with GGUF; download it again"

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes; return where they begin."""
        start = self.at
        if count > self.size - start:
            self.fail(f"ends within {what}")
        self.at = start + count
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize(code), what)
        return struct.unpack_from(code, self.data, start)[0]

    def text(self, what: str, longest: int = MAX_SIZE) -> str:
        length = self.number("<Q", what)
        if length > longest:
            self.fail(f"has {length} bytes in {what}, more than {longest}")
        start = self.take(length, what)
        return self.data[start : start + length].decode(errors="replace")

    def name(self, what: str, longest: int) -> str:
        """Read a string that error messages may show."""
        found = self.text(what, longest)
        if not found.isprintable():
            self.fail(f"has unprintable characters in {what}, {found!r}")
        return found

    def value(self, key: str) -> Any:
        kind = self.number("<I", key)
        if kind == STRING:
            return self.text(key)
        if kind == ARRAY:
            return self.array(key)
        if kind not in NUMBERS:
            self.fail(f"has a value of the unknown type {kind} in {key}")
        return self.numbers(kind, 1, key)[0].item()

    def array(self, key: str) -> Any:
        kind, count = self.number("<I", key), self.number("<Q", key)
        if kind == STRING:
            return self.strings(count, key)
        if kind not in NUMBERS:
            self.fail(f"has an array of the unknown type {kind} in {key}")
        return self.numbers(kind, count, key)

    def numbers(self, kind: int, count: int, key: str) -> Any:
        dtype = np.dtype(NUMBERS[kind])
        start = self.take(count * dtype.itemsize, key)
        if kind == BOOL:  # any nonzero byte is true
            return np.frombuffer(self.data, np.uint8, count, start) != 0
        return np.frombuffer(self.data, dtype, count, start).copy()

    def strings(self, count: int, key: str) -> StringArray:
        if count * 8 > self.size - self.at:
            self.fail(f"has {count} strings in {key}, more than fit in it")
        data, start, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        at, ends = start, array.array("q")
        try:
            for _ in range(count):  # a hot loop: vocabularies have 100,000s of tokens
                at += 8 + length_at(data, at)[0]
                ends.append(at - start)
        except (struct.error, OverflowError):  # a length beyond the end of the file
            self.fail(f"ends within {key}")
        if at > self.size:
            self.fail(f"ends within {key}")
        self.at = at
        return StringArray(data[start:at], np.array(ends, np.int64))

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(found, int) or not 0 < found <= MAX_ALIGNMENT or found & (found - 1):
            self.fail(f"has the alignment {found!r}, not a power of two up to {MAX_ALIGNMENT}")
        return int(found)

    def entries(self, count: int, alignment: int) -> dict[str, Entry]:
        """Read the tensor table; tensors must lie within the file and not overlap."""
        found: dict[str, Entry] = {}
        for _ in range(count):
            entry = self.entry(alignment)
            if entry.name in found:
                self.fail(f"has the tensor {entry.name} twice")
            found[entry.name] = entry
        start = -(-self.at // alignment) * alignment
        placed = {name: replace(e, offset=start + e.offset) for name, e in found.items()}
        end, before = start, ""
        for entry in sorted(placed.values(), key=lambda entry: entry.offset):
            if entry.offset < end:
                self.fail(f"has the tensors {before} and {entry.name} in the same place")
            end, before = entry.offset + entry.size, entry.name
            if end > self.size:
                self.fail(f"has only {self.size} bytes, but tensor {entry.name} ends at byte {end}")
        return placed

    def entry(self, alignment: int) -> Entry:
        """Read one line of the table; `offset` is still relative to the start of the data."""
        name = self.name("a tensor's name", MAX_NAME)
        dimensions = self.number("<I", name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail(f"has the tensor {name!r} of {dimensions} dimensions")
        sizes = [self.number("<Q", name) for _ in range(dimensions)]
        kind, offset = self.number("<I", name), self.number("<Q", name)
        if kind in REMOVED_TYPES:
            raise LoadError(
                f"{self.path}: tensor {name} has a type that GGUF has removed ({kind}); "
                "quantize it again"
            )
        if kind not in TYPES:
            known = ", ".join(BLOCKS)
            raise LoadError(
                f"{self.path}: tensor {name} has the unknown type {kind}; known: {known}"
            )
        label, values, size = TYPES[kind]
        total = math.prod(sizes)
        if min(sizes) < 1 or total >= MAX_SIZE or sizes[0] % values:
            self.fail(f"has the tensor {name} of the shape {sizes[::-1]}, which cannot be {label}")
        if offset % alignment:
            self.fail(f"has the tensor {name} at offset {offset}, off its alignment")
        return Entry(name, label, tuple(sizes[::-1]), self.path, offset, total // values * size)


# ---------------------------------------------------------------- further tensors

COUNTS_AT = 8  # where the numbers of tensors and of keys stand
UINT32 = 4
TYPE_IDS = {name: kind for kind, (name, _, _) in TYPES.items()}
COPY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to append: `kind` is a name in `TYPES`, `data` its values as they are stored."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[Any]]


class _LayoutReader(HeaderReader):
    """Remembers where the parts of a header are.

    Attributes:
        values: type and place of each value, by key.
        metadata_end, table_end: where the metadata and the table of tensors end.
        boundary: the alignment of tensor data.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        super().__init__(path, data)
        self.values: dict[str, tuple[int, int]] = {}
        self.metadata_end, self.table_end, self.boundary = 0, 0, 1

    def value(self, key: str) -> Any:
        start = self.at
        found = super().value(key)
        self.values[key] = struct.unpack_from("<I", self.data, start)[0], start + 4
        return found

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        self.metadata_end, self.boundary = self.at, super().alignment(metadata)
        return self.boundary

    def entries(self, count: int, alignment: int) -> dict[str, Entry]:
        found = super().entries(count, alignment)
        self.table_end = self.at
        return found


def append_tensors(
    path: Path, out: Path, tensors: Sequence[NewTensor], numbers: Mapping[str, int]
) -> None:
    """Write a copy of a file with further tensors behind its own.

    Args:
        numbers: integers of the metadata, which are replaced where the file has them.

    Raises:
        LoadError: the file is broken, is one of several shards, or has one of the tensors already.
        OSError: the copy cannot be written.
    """
    with mapped(path) as data, atomic_file(out) as work:
        layout = _LayoutReader(path, data)
        gguf = layout.read()
        if gguf.metadata.get("split.count", 1) not in (0, 1):
            raise LoadError(f"{path} is one of several shards: merge them into one file first")
        twice = [tensor.name for tensor in tensors if tensor.name in gguf.tensors]
        if twice:
            raise LoadError(f"{path} has the tensor {twice[0]} already")
        start = -(-layout.table_end // layout.boundary) * layout.boundary
        end = max((entry.offset + entry.size for entry in gguf.tensors.values()), default=start)
        header = _header(layout, tensors, numbers, end - start, len(gguf.tensors))
        with path.open("rb") as source, work.open("wb") as target:
            target.write(header)
            _pad(target, layout.boundary)
            source.seek(start)
            _copy(source, target, end - start)
            for tensor in tensors:
                _pad(target, layout.boundary)
                target.write(np.ascontiguousarray(tensor.data).tobytes())


def _header(
    layout: _LayoutReader,
    tensors: Sequence[NewTensor],
    numbers: Mapping[str, int],
    data_bytes: int,
    num_tensors: int,
) -> bytes:
    """Return the header of the copy; `data_bytes` is the size of the tensors that it copies."""
    stored = bytearray(layout.data[: layout.metadata_end])
    added = {key: number for key, number in numbers.items() if key not in layout.values}
    for key in numbers.keys() - added:
        kind, at = layout.values[key]
        code = NUMBERS.get(kind, "")
        if code[1:2] not in ("i", "u"):
            raise LoadError(f"{layout.path}: {key} is not a whole number")
        value = np.array(numbers[key], np.dtype(code)).tobytes()
        stored[at : at + len(value)] = value
    counts = num_tensors + len(tensors), len(layout.values) + len(added)
    struct.pack_into("<QQ", stored, COUNTS_AT, *counts)
    parts = [bytes(stored)]
    parts += [_text(key) + struct.pack("<II", UINT32, number) for key, number in added.items()]
    parts.append(layout.data[layout.metadata_end : layout.table_end])
    offset = data_bytes
    for tensor in tensors:
        offset = -(-offset // layout.boundary) * layout.boundary
        sizes = tensor.shape[::-1]
        parts.append(_text(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", TYPE_IDS[tensor.kind], offset))
        values, size = BLOCKS[tensor.kind]
        offset += int(np.prod(tensor.shape)) // values * size
    return b"".join(parts)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _pad(file: BinaryIO, boundary: int) -> None:
    file.write(bytes(-file.tell() % boundary))


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    """Copy `count` bytes. Raises OSError, also if the source ends before."""
    while count:
        part = source.read(min(count, COPY_BYTES))
        if not part:
            raise OSError("the file became shorter while it was read")
        target.write(part)
        count -= len(part)
