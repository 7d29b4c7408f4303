"""Indexes of texts on disk: their tokens and a suffix array over them, memory-mapped.

A directory has `index.json` and, for each segment, three files of plain numbers and a table of
passages. Segments never change: what is added becomes a new one, and the list of segments is
replaced last, atomically.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import LoadError, RequestError
from forerun.kernels import native
from forerun.kernels.native import CTexts
from forerun.models.tokenizer import Tokenizer
from forerun.utils import write_atomic

LIST = "index.json"
VERSION = 1
BREAK = 0xFFFFFFFF  # separates two texts; no token has this id
SORTED = 16  # tokens by which suffixes are sorted, and so the longest match
MAX_TOKENS = 1 << 31  # of a segment
PASSAGE = 256  # tokens of a passage
PARTS = {"tokens": np.uint32, "suffixes": np.uint32, "starts": np.int64}
TABLE = "passages"
FILES = (*PARTS, TABLE)
CREATE_TABLE = (
    "CREATE VIRTUAL TABLE passages USING"
    " fts5(tokens, content='', detail=none, columnsize=0, tokenize='ascii')"
)


class PassageTable:
    """A full-text table of the passages of a segment; one thread at a time may query it."""

    def __init__(self, path: Path, count: int) -> None:
        """`count` is the number of passages. Raises LoadError if the table is damaged."""
        self.count = count
        try:
            uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            self._table = sqlite3.connect(uri, uri=True, check_same_thread=False)
            self._table.execute("SELECT rowid FROM passages('0')").fetchone()
        except sqlite3.Error as error:
            raise LoadError(
                f"{path} is damaged ({error}): make the index again with forerun index"
            ) from None

    def find(self, token: int, limit: int) -> list[int]:
        """Return the starts of the first `limit` passages that contain a token, in order.

        A file that turns out to be damaged contains none: drafts are worse then.
        """
        try:
            query = self._table.execute("SELECT rowid FROM passages(?)", (str(token),))
            rows = query.fetchmany(limit)
        except sqlite3.Error:
            return []
        return [start for (start,) in rows]


@cache
def passages_supported() -> bool:
    """Return True if Python's SQLite has FTS5."""
    with closing(sqlite3.connect(":memory:")) as memory:
        try:
            memory.execute(CREATE_TABLE)
        except sqlite3.OperationalError:
            return False
    return True


def write_passages(path: Path, passages: Iterable[tuple[int, np.ndarray]]) -> int:
    """Write a passage table and return the number of passages.

    Args:
        passages: the start and tokens of each, in order.

    Raises:
        OSError: writing failed; the file is unusable then.
    """
    rows = ((start, " ".join(map(str, set(tokens.tolist())))) for start, tokens in passages)
    insert = "INSERT INTO passages(rowid, tokens) VALUES (?, ?)"
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as table:
            table.execute("PRAGMA journal_mode=OFF")  # an unfinished file is never read
            table.execute("PRAGMA synchronous=OFF")
            table.execute(CREATE_TABLE)
            table.execute("BEGIN")
            count = table.executemany(insert, rows).rowcount
            table.execute("COMMIT")
    except sqlite3.Error as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return count


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A text in an index: path, size in bytes and modification time in ns since 1970."""

    path: str
    size: int
    changed: int


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """Some texts of an index, memory-mapped; `retrieval.h` describes the arrays.

    Segments of older versions have no passages.
    """

    name: str
    tokens: np.ndarray
    suffixes: np.ndarray
    starts: np.ndarray
    files: tuple[IndexedFile, ...]
    passages: PassageTable | None = None

    @property
    def struct(self) -> CTexts:
        """The segment as the native code sees it."""
        addresses = (array.ctypes.data for array in (self.tokens, self.suffixes, self.starts))
        return CTexts(*addresses, len(self.tokens), len(self.starts) - 1)


class Index:
    """Index written by `adding`. Raises LoadError if it is missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        about = _read_list(directory)
        self.tokenizer: str = about["tokenizer"]
        self.vocab: int = about["vocab"]
        self.segments = [_open(directory, segment, self.vocab) for segment in about["segments"]]

    @property
    def files(self) -> set[IndexedFile]:
        """All texts, as they were when they were read."""
        return {file for segment in self.segments for file in segment.files}

    @property
    def count(self) -> int:
        """Number of tokens of all texts, with the breaks between them."""
        return sum(len(segment.tokens) for segment in self.segments)

    def check(self, tokenizer: Tokenizer, vocab: int) -> None:
        """Raise LoadError unless the index was made with `tokenizer` for `vocab` tokens."""
        if (self.tokenizer, self.vocab) != (identity(tokenizer), vocab):
            raise LoadError(
                f"{self.directory} was made for another tokenizer: make one with forerun index"
                " --model ..."
            )


def identity(tokenizer: Tokenizer) -> str:
    """Return a hash of a vocabulary: it is equal where token ids mean the same."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.vocabulary().items())).encode()).hexdigest()


def _damaged(path: Path, why: str = "") -> LoadError:
    return LoadError(f"{path} is damaged{why}: make the index again with forerun index")


def _read_list(directory: Path) -> dict[str, Any]:
    try:
        about = json.loads((directory / LIST).read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            raise LoadError(
                f"{directory} was made by another version of forerun: make it again with forerun"
                " index"
            )
        return {
            "tokenizer": str(about["tokenizer"]),
            "vocab": int(about["vocab"]),
            "segments": list(about["segments"]),
        }
    except OSError as error:
        raise LoadError(
            f"there is no index in {directory} ({error.strerror}): make one with forerun index"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(directory / LIST) from None


def _open(directory: Path, segment: Any, vocab: int) -> IndexSegment:
    try:
        name = str(segment["name"])
        counts = {part: int(segment[part]) for part in PARTS}
        files = tuple(
            IndexedFile(str(path), int(size), int(changed))
            for path, size, changed in segment["files"]
        )
        if Path(name).name != name or counts["starts"] != vocab + 1:
            raise ValueError(name)
        if not 0 < counts["suffixes"] <= counts["tokens"]:
            raise ValueError(name)
        parts = {}
        for part, dtype in PARTS.items():
            path = directory / f"{name}.{part}"
            _check_size(path, counts[part] * np.dtype(dtype).itemsize)
            parts[part] = np.memmap(path, dtype, "r", shape=(counts[part],))
        starts = parts["starts"]
        if starts[0] != 0 or starts[-1] != counts["suffixes"] or (np.diff(starts) < 0).any():
            raise _damaged(directory / f"{name}.starts")
        passages = None
        if TABLE in segment:
            count, size = map(int, segment[TABLE])
            path = directory / f"{name}.{TABLE}"
            _check_size(path, size)
            passages = PassageTable(path, count)
        return IndexSegment(name, **parts, files=files, passages=passages)
    except OSError as error:
        raise LoadError(
            f"{error.filename} cannot be read ({error.strerror}): make the index again"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise _damaged(directory / LIST) from None


def _check_size(path: Path, size: int) -> None:
    if path.stat().st_size != size:
        raise _damaged(path, " (another size)")


@contextmanager
def adding(directory: Path, tokenizer: Tokenizer, vocab: int) -> Iterator[SegmentWriter]:
    """Yield a writer of a new segment of the index in `directory`, which is made if need be.

    The segment is in the index at the end; if anything is raised before, it is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        about: dict[str, Any] = {"tokenizer": identity(tokenizer), "vocab": vocab, "segments": []}
        if (directory / LIST).exists():
            about = _read_list(directory)
        number = 1 + max((int(segment["name"]) for segment in about["segments"]), default=0)
        writer = SegmentWriter(directory, f"{number:04}", vocab)
        try:
            yield writer
            if writer.count:
                about["segments"].append(writer.finish())
                write_atomic(directory / LIST, json.dumps({"version": VERSION, **about}))
            else:
                writer.remove()
        except BaseException:
            writer.remove()
            raise
        finally:
            writer.close()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises RequestError if another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RequestError(
            f"{directory} is being added to by another process: wait until that has ended"
        ) from None
    finally:
        os.close(descriptor)


def is_left_over(directory: Path) -> bool:
    """Return True if a directory without a list has only files of a build that was killed."""
    return all(path.stem.isdigit() and path.suffix[1:] in FILES for path in directory.iterdir())


class SegmentWriter:
    """A segment under construction. Its files are in the directory, but not in its list."""

    def __init__(self, directory: Path, name: str, vocab: int) -> None:
        self.directory = directory
        self.name = name
        self.vocab = vocab
        self.files: list[IndexedFile] = []
        self.count = 0  # tokens and breaks
        self._num_texts = 0
        self._tokens = self._path("tokens").open("wb")

    def add(self, file: IndexedFile, texts: Iterable[Sequence[int]]) -> None:
        """Add the texts of a file, as token ids. Raises RequestError if there are too many."""
        self.files.append(file)
        for ids in filter(None, texts):
            if self.count + len(ids) + 1 > MAX_TOKENS:
                raise RequestError(
                    f"an index takes {MAX_TOKENS:,} tokens at a time: give some files, and others"
                    " afterwards"
                )
            self._tokens.write(np.array([*ids, BREAK], np.uint32).tobytes())
            self.count += len(ids) + 1
            self._num_texts += 1

    def finish(self) -> dict[str, Any]:
        """Write suffixes and passages; return the segment's entry in the list."""
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        tokens = np.memmap(self._path("tokens"), np.uint32, "r", shape=(self.count,))
        suffixes = self._create("suffixes", self.count - self._num_texts)
        starts = self._create("starts", self.vocab + 1)
        sort_suffixes(tokens, suffixes, starts)
        suffixes.flush()
        starts.flush()
        entry: dict[str, Any] = {
            "name": self.name,
            "tokens": len(tokens),
            "suffixes": len(suffixes),
            "starts": len(starts),
            "files": [(file.path, file.size, file.changed) for file in self.files],
        }
        if passages_supported():
            count = write_passages(self._path(TABLE), passages_of(tokens))
            entry[TABLE] = [count, self._path(TABLE).stat().st_size]
        return entry

    def _create(self, part: str, count: int) -> np.memmap:
        """Map a new file. Its room is allocated now: writing to a mapped file of a full disk would
        kill the process."""
        dtype = np.dtype(PARTS[part])
        with self._path(part).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        return np.memmap(self._path(part), dtype, "r+", shape=(count,))

    def _path(self, part: str) -> Path:
        return self.directory / f"{self.name}.{part}"

    def close(self) -> None:
        self._tokens.close()

    def remove(self) -> None:
        """Remove the files, and the directory if it is empty then."""
        for part in FILES:
            with suppress(OSError):
                self._path(part).unlink()
        with suppress(OSError):
            self.directory.rmdir()


def passages_of(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the start and tokens of each passage; passages do not cross breaks."""
    begin, step = 0, 1 << 20
    for first in range(0, len(tokens), step):
        for end in (first + np.flatnonzero(tokens[first : first + step] == BREAK)).tolist():
            for start in range(begin, end, PASSAGE):
                yield start, tokens[start : min(start + PASSAGE, end)]
            begin = end + 1


def sort_suffixes(tokens: np.ndarray, suffixes: np.ndarray, starts: np.ndarray) -> None:
    """Fill `suffixes` and `starts` [V + 1] as `retrieval.h` describes them."""
    lib = native.library()
    if lib is None:
        sort_suffixes_twin(tokens, suffixes, starts)
        return
    outputs = suffixes.ctypes.data, starts.ctypes.data
    threads = len(os.sched_getaffinity(0))
    lib.forerun_sort(tokens.ctypes.data, len(tokens), len(starts) - 1, threads, *outputs)


def sort_suffixes_twin(tokens: np.ndarray, suffixes: np.ndarray, starts: np.ndarray) -> None:
    """Do what `sort_suffixes` does in plain Python, for short texts."""
    ids = tokens.tolist()

    def sort_key(at: int) -> tuple[list[int], int]:
        suffix = [*ids[at : at + SORTED], BREAK][:SORTED]
        return suffix[: suffix.index(BREAK) + 1] if BREAK in suffix else suffix, at

    positions = [at for at, token in enumerate(ids) if token != BREAK]
    suffixes[:] = sorted(positions, key=sort_key)
    starts[:] = np.searchsorted(np.sort(tokens[tokens != BREAK]), np.arange(len(starts)))
