"""On-disk cache of packed matrices, so that a large model is quantized once and not at every start.

There is one file per model, format and machine, named by a digest of everything its content depends
on. An incomplete file counts as absent, and no failure of the cache prevents the model from
loading. A file holds the matrices one after the other, a JSON index, and a trailer with the offset
of the index.
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

FORMS = ("int8", "int4")  # formats that are cached; other matrices are loaded as stored
MAX_BYTES = 20 << 30  # of all files together; the least recently used are removed first
MIN_BYTES = 100 << 20  # packing less is faster than reading it
DISK_RESERVE = 1 << 30  # bytes of the disk that are left free
TRAILER = struct.Struct("<QQL16s")  # offset, length and checksum of the index, MAGIC
MAGIC = b"forerun packed 1"
SAMPLES, SAMPLE_BYTES = 32, 4096  # of each weight file, for the digest

Array = np.ndarray[Any, Any]


class BrokenCacheError(Exception):
    """The file is damaged or does not match its name."""


@dataclass(frozen=True, slots=True)
class CachedMatrix:
    """A matrix in the cache file.

    Attributes:
        form: "int8" or "int4".
        shape: (out, in).
        parts: (offset, bytes, CRC-32) of the weights and of the scales.
    """

    path: Path
    form: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]

    def read_into(self, *arrays: Array) -> None:
        """Read weights and scales into arrays of their size. Raises BrokenCacheError."""
        try:
            with self.path.open("rb") as file:
                for (offset, size, checksum), array in zip(self.parts, arrays, strict=True):
                    view = array.data.cast("B")
                    file.seek(offset)
                    is_read = len(view) == size and file.readinto(view) == size
                    if not is_read or zlib.crc32(view) != checksum:
                        raise BrokenCacheError
        except (OSError, ValueError):
            raise BrokenCacheError from None


class PackedCache:
    """The packed matrices of one model, found in its file or collected to be written to it."""

    def __init__(self, path: Path | None) -> None:
        """Use the cache file at `path`, which need not exist; None disables the cache."""
        self.path = path
        self._is_reported = False
        self.index: dict[str, CachedMatrix] = {}
        if path is not None and path.is_file():
            try:
                self.index = _read_index(path)
            except BrokenCacheError:
                self.report_broken()
        self.matrices: dict[str, tuple[str, tuple[int, ...], tuple[Array, ...]]] = {}
        self.is_complete = True  # the file holds every matrix added so far

    def report_broken(self) -> None:
        """Print once that the file is damaged; it will be rewritten."""
        if not self._is_reported:
            self._is_reported = True
            print(
                f"note: {self.path} is damaged and ignored: the weights are packed anew",
                file=sys.stderr,
            )

    def find(self, name: str, shape: tuple[int, ...]) -> CachedMatrix | None:
        """Return the cached matrix of this name and shape, if there is one."""
        found = self.index.get(name)
        return found if found is not None and found.shape == shape else None

    def add(
        self,
        name: str,
        form: str,
        shape: tuple[int, ...],
        arrays: tuple[Array, ...],
        new: bool = True,
    ) -> None:
        """Have `finish` write a matrix; its weights and scales must stay unchanged until then.

        new: it is not in the file yet."""
        if self.path is not None:
            self.matrices[name] = form, shape, arrays
            self.is_complete = self.is_complete and not new

    def finish(self) -> None:
        """Write the file unless it is complete or too small to be worth it; print failures."""
        path, matrices = self.path, self.matrices
        self.matrices = {}
        if path is None or not matrices:
            return
        size = sum(array.nbytes for _, _, arrays in matrices.values() for array in arrays)
        try:
            if self.is_complete:
                os.utime(path)  # marks it as recently used
            elif MIN_BYTES <= size <= MAX_BYTES:
                path.parent.mkdir(parents=True, exist_ok=True)
                _make_room(path, size)
                _write(path, matrices)
        except OSError as error:
            if not self.is_complete:
                why = error.strerror or error
                print(f"note: packed weights not cached in {path.parent}: {why}", file=sys.stderr)


def cache_folder() -> Path | None:
    """Return $FORERUN_CACHE, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun; None if
    FORERUN_CACHE=off."""
    own, shared = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own == "off":
        return None
    with suppress(RuntimeError, OSError):  # there is no home directory
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "forerun"
    return None


def open_cache(path: Path, facts: Iterable[str]) -> PackedCache:
    """Open the cache of a model packed under the conditions that `facts` name."""
    folder = cache_folder()
    if folder is None:
        return PackedCache(None)
    try:
        return PackedCache(folder / "packed" / f"{model_digest(path, facts)}.packed")
    except OSError:  # the model cannot be read; loading it reports that better
        return PackedCache(None)


def model_digest(path: Path, facts: Iterable[str]) -> str:
    """Return a digest that identifies a model directory or GGUF file, and `facts`.

    It covers name, resolved path, size, modification time and content samples of config.json and
    the weight files, or of all shards of a GGUF file. (Files from the Hub are links to a path named
    by their content.) Raises OSError."""
    digest = hashlib.sha256(json.dumps([MAGIC.decode(), *facts]).encode())
    if path.is_file():
        files = list(open_gguf(path).parts)
    else:
        settings = [path / name for name in ("config.json", "model.safetensors.index.json")]
        files = [file for file in settings if file.exists()] + weight_files(path)
    for file in files:
        real = file.resolve()
        with real.open("rb") as content:
            stat = os.fstat(content.fileno())
            facts_of_file = (file.name, os.fspath(real), stat.st_size, stat.st_mtime_ns)
            digest.update(repr(facts_of_file).encode())
            for i in range(SAMPLES + 1):
                content.seek(i * max(stat.st_size - SAMPLE_BYTES, 0) // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()[:40]


def _read_index(path: Path) -> dict[str, CachedMatrix]:
    """Read the index of a cache file. Raises BrokenCacheError."""
    try:
        with path.open("rb") as file:
            end = file.seek(-TRAILER.size, os.SEEK_END)
            start, length, checksum, magic = TRAILER.unpack(file.read(TRAILER.size))
            if magic != MAGIC or start + length != end:
                raise BrokenCacheError
            file.seek(start)
            content = file.read(length)
        if zlib.crc32(content) != checksum:
            raise BrokenCacheError
        own, entries = json.loads(content)
        if own != path.stem:
            raise BrokenCacheError
        return {name: _read_entry(path, *entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise BrokenCacheError from None


def _read_entry(
    path: Path, form: object, shape: list[int], parts: list[tuple[int, int, int]]
) -> CachedMatrix:
    """Check an entry of the index. Raises ValueError, TypeError."""
    found = CachedMatrix(path, str(form), tuple(shape), tuple((o, n, c) for o, n, c in parts))
    numbers = (*shape, *sum(found.parts, ()))
    if form not in FORMS or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"a matrix of {form} in {shape}")
    return found


def _write(path: Path, matrices: dict[str, tuple[str, tuple[int, ...], tuple[Array, ...]]]) -> None:
    """Write the file atomically, readable by its owner only: weights may be confidential."""

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    with atomic_file(path) as work, open(work, "xb", buffering=0, opener=open_private) as file:
        index, offset = {}, 0
        for name, (form, shape, arrays) in matrices.items():
            parts = []
            for array in arrays:
                view = array.data.cast("B")
                parts.append((offset, len(view), zlib.crc32(view)))
                _write_all(file, view)
                offset += len(view)
            index[name] = form, shape, parts
        content = json.dumps([path.stem, index]).encode()
        trailer = TRAILER.pack(offset, len(content), zlib.crc32(content), MAGIC)
        _write_all(file, memoryview(content + trailer))


def _write_all(file: Any, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _make_room(path: Path, size: int) -> None:
    """Remove the least recently used files until `size` bytes fit, and interrupted writes after a
    day. Raises OSError if the disk is too full."""
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
        if file != path and total + size > MAX_BYTES:
            with suppress(OSError):
                file.unlink()
                total -= n
    if shutil.disk_usage(path.parent).free < size + DISK_RESERVE:
        raise OSError("there is too little room on the disk")
