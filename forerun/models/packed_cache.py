"""Packed matrices kept on disk, so that a big model is quantised once and not at every start.

One file a model, format and machine, named by a digest of all that its content follows from; a file
that is not whole is as good as none. The cache is a convenience: whatever goes wrong with it, the
model loads all the same.

A file is the matrices one after the other, an index of them in JSON that names the file, and a
trailer that says where the index begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.models.files import weight_files
from forerun.models.gguf.container import open_gguf
from forerun.utils import atomic_file

FORMS = ("int8", "int4")  # what is kept: the rest is as stored
LIMIT = 20 << 30  # bytes of all files together; the least recently used go first
SMALLEST = 100 << 20  # what packs into less is packed again sooner than it is read
RESERVE = 1 << 30  # bytes of the disk that are left free
TRAILER = struct.Struct("<QQL16s")  # where the index begins, its length and checksum, MAGIC
MAGIC = b"forerun packed 1"
SAMPLES, SAMPLE = 32, 4096  # what is read of a big file to tell it from another

Array = np.ndarray[Any, Any]


class Broken(Exception):
    """A file that does not hold what its name promises."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A matrix [out, in] in the cache: its format, and where its weights and scales lie, with
    checksums."""

    path: Path
    form: str
    shape: tuple[int, ...]
    parts: tuple[
        tuple[int, int, int], ...
    ]  # (offset, bytes, checksum) of the weights, of the scales

    def fill(self, *arrays: Array) -> None:
        """Read weights and scales into memory of their size. Raises Broken."""
        try:
            with self.path.open("rb") as file:
                for (offset, size, checksum), array in zip(self.parts, arrays, strict=True):
                    view = array.data.cast("B")
                    file.seek(offset)
                    if (
                        len(view) != size
                        or file.readinto(view) != size
                        or zlib.crc32(view) != checksum
                    ):
                        raise Broken
        except (OSError, ValueError):
            raise Broken from None


class PackedCache:
    """The packed matrices of one model: found in its file, or kept to be written to it."""

    def __init__(self, path: Path | None) -> None:
        """`path` is that of the file, there or not; None keeps nothing."""
        self.path = path
        self._told = False
        self.index = self._read() if path is not None and path.is_file() else {}
        self.matrices: dict[str, tuple[str, tuple[int, ...], tuple[Array, ...]]] = {}
        self.complete = True  # nothing was packed that the file does not hold

    def _read(self) -> dict[str, Kept]:
        assert self.path is not None
        try:
            return _read_index(self.path)
        except Broken:
            self.tell_broken()
            return {}

    def tell_broken(self) -> None:
        """Say once that the file is not whole; it is written anew."""
        if not self._told:
            self._told = True
            print(
                f"note: {self.path} is damaged and ignored: the weights are packed anew",
                file=sys.stderr,
            )

    def find(self, name: str, shape: tuple[int, ...]) -> Kept | None:
        """The matrix in the file, if it is there in this shape."""
        kept = self.index.get(name)
        return kept if kept is not None and kept.shape == shape else None

    def keep(
        self,
        name: str,
        form: str,
        shape: tuple[int, ...],
        arrays: tuple[Array, ...],
        new: bool = True,
    ) -> None:
        """Have a matrix written by `finish`; its weights and scales must stay where they are until
        then."""
        if self.path is not None:
            self.matrices[name] = form, shape, arrays
            self.complete = self.complete and not new

    def finish(self) -> None:
        """Write the file, unless it holds all this already or is not worth it; a failure is said,
        not raised."""
        path, matrices, self.matrices = self.path, self.matrices, {}
        size = sum(array.nbytes for _, _, arrays in matrices.values() for array in arrays)
        if path is None or not matrices:
            return
        try:
            if self.complete:
                os.utime(path)  # used just now
            elif SMALLEST <= size <= LIMIT:
                path.parent.mkdir(parents=True, exist_ok=True)
                _make_room(path, size)
                _write(path, matrices)
        except OSError as error:
            if not self.complete:
                why = error.strerror or error
                print(
                    f"note: the packed weights are not kept in {path.parent}: {why}",
                    file=sys.stderr,
                )


def cache_folder() -> Path | None:
    """$FORERUN_CACHE, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun; None where
    FORERUN_CACHE=off."""
    own, shared = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own == "off":
        return None
    with suppress(RuntimeError, OSError):  # nobody's home
        return (
            Path(own).expanduser()
            if own
            else (Path(shared) if shared else Path.home() / ".cache") / "forerun"
        )
    return None


def open_cache(directory: Path, facts: Iterable[str]) -> PackedCache:
    """The cache for the model in `directory`, packed in the way that `facts` tell."""
    folder = cache_folder()
    try:
        return PackedCache(
            folder and folder / "packed" / f"{model_digest(directory, facts)}.packed"
        )
    except OSError:  # the model itself cannot be read: loading it says so better
        return PackedCache(None)


def model_digest(directory: Path, facts: Iterable[str]) -> str:
    """A name for what a model packs into: one in a directory, or a GGUF file.

    It follows from `facts`, and from the name, place, size, time of change and samples of the
    content of config.json and of the weight files, or of all parts of a GGUF file (those from the
    Hub are links to a place that is named by their content).
    """
    digest = hashlib.sha256(json.dumps([MAGIC.decode(), *facts]).encode())
    for path in open_gguf(directory).parts if directory.is_file() else _files(directory):
        real = path.resolve()
        with real.open("rb") as file:
            stat = os.fstat(file.fileno())
            digest.update(
                repr((path.name, os.fspath(real), stat.st_size, stat.st_mtime_ns)).encode()
            )
            for i in range(SAMPLES + 1):
                file.seek(i * max(stat.st_size - SAMPLE, 0) // SAMPLES)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:40]


def _files(directory: Path) -> list[Path]:
    settings = [directory / name for name in ("config.json", "model.safetensors.index.json")]
    return [path for path in settings if path.exists()] + weight_files(directory)


def _read_index(path: Path) -> dict[str, Kept]:
    """What the file holds. Raises Broken."""
    try:
        with path.open("rb") as file:
            end = file.seek(-TRAILER.size, os.SEEK_END)
            start, length, checksum, magic = TRAILER.unpack(file.read(TRAILER.size))
            if magic != MAGIC or start + length != end:
                raise Broken
            file.seek(start)
            content = file.read(length)
        if zlib.crc32(content) != checksum:
            raise Broken
        own, entries = json.loads(content)
        if own != path.stem:
            raise Broken
        return {name: _entry(path, *entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise Broken from None


def _entry(path: Path, form: object, shape: list[int], parts: list[tuple[int, int, int]]) -> Kept:
    """What the index says of a matrix. Raises ValueError, TypeError."""
    kept = Kept(path, str(form), tuple(shape), tuple((o, n, c) for o, n, c in parts))
    if form not in FORMS or not all(
        type(n) is int and n >= 0 for n in (*shape, *sum(kept.parts, ()))
    ):
        raise ValueError(f"a matrix of {form} in {shape}")
    return kept


def _write(path: Path, matrices: dict[str, tuple[str, tuple[int, ...], tuple[Array, ...]]]) -> None:
    """Write the file beside its place, then move it there in one step."""
    with atomic_file(path) as work, open(work, "xb", buffering=0, opener=_for_its_owner) as file:
        index, at = {}, 0
        for name, (form, shape, arrays) in matrices.items():
            parts = []
            for array in arrays:
                view = array.data.cast("B")
                parts.append((at, len(view), zlib.crc32(view)))
                _write_all(file, view)
                at += len(view)
            index[name] = form, shape, parts
        content = json.dumps([path.stem, index]).encode()
        _write_all(
            file, memoryview(content + TRAILER.pack(at, len(content), zlib.crc32(content), MAGIC))
        )


def _for_its_owner(path: str, flags: int) -> int:
    """Weights may be none of others' business."""
    return os.open(path, flags, 0o600)


def _write_all(file: Any, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _make_room(path: Path, size: int) -> None:
    """Remove what was used longest ago until `size` bytes fit; what interrupted writers left goes
    after a day."""
    for left in path.parent.glob("*.tmp"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 86400:
                left.unlink()
    used = []
    for file in path.parent.glob("*.packed"):
        with suppress(OSError):
            stat = file.stat()
            used.append((stat.st_mtime, stat.st_size, file))
    total = sum(n for _, n, file in used if file != path)
    for _, n, file in sorted(used):
        if file != path and total + size > LIMIT:
            with suppress(OSError):
                file.unlink()
                total -= n
    if shutil.disk_usage(path.parent).free < size + RESERVE:
        raise OSError("there is too little room on the disk")
