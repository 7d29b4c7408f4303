"""Write a copy of a GGUF file with further tensors; everything else stays as it is stored."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forerun.errors import LoadError
from forerun.models.gguf.container import (
    BLOCKS,
    NUMBERS,
    TYPES,
    Entry,
    HeaderReader,
    mapped,
)
from forerun.utils import atomic_file

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
