"""An index of texts on disk: their tokens, and a suffix array over them, opened without reading
them.

A directory: `index.json`, and for each segment three files of plain numbers and a table of
passages. A segment never changes once it is there; what is added becomes a segment of its own, and
the list of segments is replaced last, in one step.
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

CREATE_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(tokens, content='', detail=none, columnsize=0, tokenize='ascii')"


class Passages:
    """A table that was written before; any thread may ask, one at a time."""

    def __init__(self, path: Path, count: int) -> None:
        """`count`: passages, as the index says. Raises LoadError where it is damaged."""
        self.count = count
        try:
            place = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            self._table = sqlite3.connect(place, uri=True, check_same_thread=False)
            self._table.execute("SELECT rowid FROM passages('0')").fetchone()
        except sqlite3.Error as error:
            raise LoadError(
                f"{path} is damaged ({error}): make the index again with forerun index"
            ) from None

    def holding(self, token: int, most: int) -> list[int]:
        """Where the passages begin that hold a token, in order, the first `most` of them. Nothing
        where the file turns
        out to be damaged: drafts are worse then."""
        try:
            rows = self._table.execute("SELECT rowid FROM passages(?)", (str(token),)).fetchmany(
                most
            )
        except sqlite3.Error:
            return []
        return [place for (place,) in rows]


@cache
def passages_supported() -> bool:
    """Whether Python's SQLite has FTS5."""
    with closing(sqlite3.connect(":memory:")) as memory:
        try:
            memory.execute(CREATE_TABLE)
        except sqlite3.OperationalError:
            return False
    return True


def write_passages(path: Path, passages: Iterable[tuple[int, np.ndarray]]) -> int:
    """Write a table of passages, each with the place where it begins, in order; how many there
    were. Raises OSError where the disk does, and then the file is worth nothing."""
    words = ((place, " ".join(map(str, set(tokens.tolist())))) for place, tokens in passages)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as table:
            table.execute("PRAGMA journal_mode=OFF")  # a file that is not whole is never read
            table.execute("PRAGMA synchronous=OFF")
            table.execute(CREATE_TABLE)
            table.execute("BEGIN")
            count = table.executemany(
                "INSERT INTO passages(rowid, tokens) VALUES (?, ?)", words
            ).rowcount
            table.execute("COMMIT")
    except sqlite3.Error as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return count


LIST = "index.json"
VERSION = 1
BREAK = 0xFFFFFFFF  # stands between two texts; no token has this id
SORTED = 16  # tokens of a suffix that its place depends on, and so the longest match
MOST = 1 << 31  # tokens of a segment
PASSAGE = 256  # tokens of a passage
PARTS = {"tokens": np.uint32, "suffixes": np.uint32, "starts": np.int64}
TABLE = "passages"
FILES = (*PARTS, TABLE)


@dataclass(frozen=True, slots=True)
class File:
    """A text that is in an index: where it came from, and what it was then."""

    path: str
    size: int
    changed: int  # ns since 1970


@dataclass(frozen=True, slots=True)
class Segment:
    """Some texts of an index: [tokens] and [suffixes] as in `retrieval.h`, mapped; older ones have
    no passages."""

    name: str
    tokens: np.ndarray
    suffixes: np.ndarray
    starts: np.ndarray
    files: tuple[File, ...]
    passages: Passages | None = None

    @property
    def struct(self) -> CTexts:
        """As the native code sees it."""
        places = (array.ctypes.data for array in (self.tokens, self.suffixes, self.starts))
        return CTexts(*places, len(self.tokens), len(self.starts) - 1)


class Index:
    """What is in a directory. Raises LoadError where it is no index, or damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        about = _read(directory)
        self.tokenizer, self.vocab = about["tokenizer"], about["vocab"]
        self.segments = [_open(directory, segment, self.vocab) for segment in about["segments"]]

    @property
    def files(self) -> set[File]:
        """All texts, as they were when they were read."""
        return {file for segment in self.segments for file in segment.files}

    @property
    def count(self) -> int:
        """Tokens of all texts, those between them included."""
        return sum(len(segment.tokens) for segment in self.segments)

    def check(self, tokenizer: Tokenizer, vocab: int) -> None:
        """Raise LoadError unless its tokens are those of `tokenizer`, for a model that has `vocab`
        of them."""
        if (self.tokenizer, self.vocab) != (identity(tokenizer), vocab):
            raise LoadError(
                f"{self.directory} was made for another tokenizer: make one with forerun index --model ..."
            )


def identity(tokenizer: Tokenizer) -> str:
    """A hash of a vocabulary: equal where token ids mean the same."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.vocabulary().items())).encode()).hexdigest()


def _read(directory: Path) -> dict[str, Any]:
    try:
        about = json.loads((directory / LIST).read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            raise LoadError(
                f"{directory} was made by another version of forerun: make it again with forerun index"
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
        raise LoadError(
            f"{directory / LIST} is damaged: make the index again with forerun index"
        ) from None


def _open(directory: Path, segment: Any, vocab: int) -> Segment:
    try:
        name, count = str(segment["name"]), {part: int(segment[part]) for part in PARTS}
        files = tuple(
            File(str(path), int(size), int(changed)) for path, size, changed in segment["files"]
        )
        if (
            Path(name).name != name
            or count["starts"] != vocab + 1
            or not 0 < count["suffixes"] <= count["tokens"]
        ):
            raise ValueError(name)
        parts = {}
        for part, kind in PARTS.items():
            path = directory / f"{name}.{part}"
            _check_size(path, count[part] * np.dtype(kind).itemsize)
            parts[part] = np.memmap(path, kind, "r", shape=(count[part],))
        if (
            parts["starts"][0] != 0
            or parts["starts"][-1] != count["suffixes"]
            or (np.diff(parts["starts"]) < 0).any()
        ):
            raise LoadError(
                f"{directory / name}.starts is damaged: make the index again with forerun index"
            )
        return Segment(
            name, **parts, files=files, passages=_open_table(directory / f"{name}.{TABLE}", segment)
        )
    except OSError as error:
        raise LoadError(
            f"{error.filename} cannot be read ({error.strerror}): make the index again"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise LoadError(
            f"{directory / LIST} is damaged: make the index again with forerun index"
        ) from None


def _open_table(path: Path, segment: Any) -> Passages | None:
    """The passages of a segment, if it has any."""
    if TABLE not in segment:
        return None
    count, size = map(int, segment[TABLE])
    _check_size(path, size)
    return Passages(path, count)


def _check_size(path: Path, size: int) -> None:
    if path.stat().st_size != size:
        raise LoadError(
            f"{path} is damaged (another size): make the index again with forerun index"
        )


@contextmanager
def adding(directory: Path, tokenizer: Tokenizer, vocab: int) -> Iterator[Writer]:
    """A writer of one more segment of the index in `directory`, which need not be there yet. What
    it wrote is in the index at the end, or gone if anything is raised before."""
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        about: dict[str, Any] = {"tokenizer": identity(tokenizer), "vocab": vocab, "segments": []}
        if (directory / LIST).exists():
            about = _read(directory)
        number = 1 + max((int(segment["name"]) for segment in about["segments"]), default=0)
        writer = Writer(directory, f"{number:04}", vocab)
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
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else writes there meanwhile. Raises RequestError where somebody does."""
    place = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RequestError(
            f"{directory} is being added to by another process: wait until that has ended"
        ) from None
    finally:
        os.close(place)


def is_left_over(directory: Path) -> bool:
    """Whether a directory without a list has nothing but what a build has left that was killed."""
    return all(path.stem.isdigit() and path.suffix[1:] in FILES for path in directory.iterdir())


class Writer:
    """One segment while it is made. Its files are in the directory, but not in its list."""

    def __init__(self, directory: Path, name: str, vocab: int) -> None:
        self.directory, self.name, self.vocab = directory, name, vocab
        self.files: list[File] = []
        self.count = self._texts = 0  # tokens, and breaks behind texts
        self._tokens = (directory / f"{name}.tokens").open("wb")

    def add(self, file: File, texts: Iterable[Sequence[int]]) -> None:
        """The texts of a file, as token ids below `vocab`. Raises RequestError where there are too
        many."""
        self.files.append(file)
        for ids in filter(None, texts):
            if self.count + len(ids) + 1 > MOST:
                raise RequestError(
                    f"an index takes {MOST:,} tokens at a time: give some files, and others afterwards"
                )
            self._tokens.write(np.array([*ids, BREAK], np.uint32).tobytes())
            self.count += len(ids) + 1
            self._texts += 1

    def finish(self) -> dict[str, Any]:
        """Sort the suffixes, write the passages; what the list says of the segment."""
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        tokens = np.memmap(self._path("tokens"), np.uint32, "r", shape=(self.count,))
        suffixes = self._mapped("suffixes", self.count - self._texts)
        starts = self._mapped("starts", self.vocab + 1)
        sort_suffixes(tokens, suffixes, starts)
        suffixes.flush()
        starts.flush()
        counts = {"tokens": len(tokens), "suffixes": len(suffixes), "starts": len(starts)}
        files = [(file.path, file.size, file.changed) for file in self.files]
        return {"name": self.name, **counts, "files": files, **self._tabled(tokens)}

    def _tabled(self, tokens: np.ndarray) -> dict[str, Any]:
        """Write the passages; what the list says of them, which is nothing where SQLite cannot."""
        if not passages_supported():
            return {}
        count = write_passages(self._path(TABLE), passages_of(tokens))
        return {TABLE: [count, self._path(TABLE).stat().st_size]}

    def _mapped(self, part: str, count: int) -> np.memmap:
        """A part to be written. Its room is taken now: a disk that is full later would end the
        process."""
        kind = np.dtype(PARTS[part])
        with self._path(part).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count * kind.itemsize)
        return np.memmap(self._path(part), kind, "r+", shape=(count,))

    def _path(self, part: str) -> Path:
        return self.directory / f"{self.name}.{part}"

    def close(self) -> None:
        self._tokens.close()

    def remove(self) -> None:
        """Take away what was written."""
        for part in FILES:
            with suppress(OSError):
                self._path(part).unlink()
        with suppress(OSError):
            self.directory.rmdir()  # it was not there before, or is an index


def passages_of(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """All passages of texts, none of them across a break: where they begin, and their tokens."""
    begin, step = 0, 1 << 20
    for first in range(0, len(tokens), step):
        for end in (first + np.flatnonzero(tokens[first : first + step] == BREAK)).tolist():
            for place in range(begin, end, PASSAGE):
                yield place, tokens[place : min(place + PASSAGE, end)]
            begin = end + 1


def sort_suffixes(tokens: np.ndarray, suffixes: np.ndarray, starts: np.ndarray) -> None:
    """Fill `suffixes` and `starts` [V + 1] as `retrieval.h` has them."""
    lib = native.library()
    if lib is None:
        sort_suffixes_twin(tokens, suffixes, starts)
        return
    places = suffixes.ctypes.data, starts.ctypes.data
    lib.forerun_sort(
        tokens.ctypes.data, len(tokens), len(starts) - 1, len(os.sched_getaffinity(0)), *places
    )


def sort_suffixes_twin(tokens: np.ndarray, suffixes: np.ndarray, starts: np.ndarray) -> None:
    """`sort_suffixes` in plain Python, for short texts."""
    ids = tokens.tolist()
    suffixes[:] = sorted(
        (at for at, token in enumerate(ids) if token != BREAK),
        key=lambda at: (_suffix(ids, at), at),
    )
    firsts = np.sort(tokens[tokens != BREAK])
    starts[:] = np.searchsorted(firsts, np.arange(len(starts)))


def _suffix(ids: Sequence[int], at: int) -> list[int]:
    """What stands at a place, as far as it is sorted: up to a break, which counts."""
    some = [*ids[at : at + SORTED], BREAK][:SORTED]
    return some[: some.index(BREAK) + 1] if BREAK in some else some
