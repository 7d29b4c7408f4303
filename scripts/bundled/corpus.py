"""The corpus: Python source under permissive licences, one compressed file that can travel, and what it is made of.

    python -m scripts.bundled.corpus --out build/bundled --from /path/to/site-packages

Sources are the standard library of the running Python and the packages of packages.txt, each from the first place
that has it: the folders given with --from (site-packages, or wheels), the running environment, or the package index by
way of pip, unless --offline. Wheels stay in OUT/wheels, so the next run does not ask for them again.

Written are OUT/corpus.jsonl.xz, a line {"package", "path", "held_out", "text"} for each file, and OUT/manifest.json:
packages with versions, licences, files and characters; what was left out and why; the SHA-256 of the corpus.
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from forerun.errors import ConfigError, ForerunError, LoadError
from scripts.bundled.common import run, sha256_of, tell, written_whole
from scripts.bundled.filters import SUFFIXES, Seen, in_order, is_held_out, licence_of, why_not

NAMES = Path(__file__).with_name("packages.txt")
CORPUS, MANIFEST = "corpus.jsonl.xz", "manifest.json"
MEGABYTES = 46  # 64 MiB travel to a GPU machine, this repository and its present models among them
MOST_OF_ONE = 24_000_000  # characters of one package
SLACK = 3_000_000  # bytes that the compressor may still hold back
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 26}]
NOT_OF_THE_LIBRARY = ("site-packages", "lib2to3/tests/data", "pydoc_data", "idlelib/Icons", "encodings", "config-")


class Readable(Protocol):
    """A file on disk, or in a wheel."""

    def read_bytes(self) -> bytes: ...


@dataclass(slots=True)
class Package:
    """Where some of the corpus comes from: its name, version and licence; files and characters that were taken."""

    name: str
    version: str
    licence: str
    files: int = 0
    characters: int = 0


@dataclass(slots=True)
class Manifest:
    """What the corpus is made of.

    Attributes:
        packages: in the order in which they stand in it.
        left_out: packages that were named but not taken, and why.
        dropped: files of the packages that were not taken, by reason.
        files, held_out, characters, bytes: in all; bytes are those of the compressed file.
        python: whose standard library it was, and whose grammar files had to fit.
    """

    packages: list[Package] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    files: int = 0
    held_out: int = 0
    characters: int = 0
    bytes: int = 0
    sha256: str = ""
    python: str = platform.python_version()


def read_names(path: Path) -> list[str]:
    """The names of a list, without comments, each once. Raises ConfigError for none, or for what is no name."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the list of packages {path} cannot be read ({error}): give a text file of names") from None
    names = list(dict.fromkeys(line for line in lines if line))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+]+)?", name):
            raise ConfigError(f"{path}: {name!r} is no name of a package: write name or name==version")
    if not names:
        raise ConfigError(f"{path} names no packages: write one name on each line")
    return names


def normal(name: str) -> str:
    """A package's name as all its spellings have it, without a version."""
    return re.sub(r"[-_.]+", "-", name.partition("==")[0]).casefold()


class Places:
    """Where packages are found: folders of installed ones and of wheels, then the package index."""

    def __init__(self, folders: Sequence[Path], wheels: Path, offline: bool) -> None:
        """Raises ConfigError for a folder that is not there."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"there is no folder {folder}: give a site-packages, or a folder of wheels")
        self.wheels, self.offline = wheels, offline
        self._found: dict[str, Distribution] = {}
        for folder in (*folders, wheels, Path(sysconfig.get_paths()["purelib"])):
            self._add(folder)

    def find(self, name: str) -> Distribution:
        """The package. Raises LoadError where it is not to be had."""
        version = name.partition("==")[2]
        found = self._found.get(normal(name))
        if found is not None and version in ("", found.version):
            return found
        if self.offline:
            raise LoadError("it is in none of the folders, and --offline was given")
        self._download(name)
        self._add(self.wheels)
        if normal(name) not in self._found:
            raise LoadError("what was downloaded is not called so")
        return self._found[normal(name)]

    def _add(self, folder: Path) -> None:
        paths = [str(path) for path in (folder, *sorted(folder.glob("*.whl")))]
        for distribution in distributions(path=paths):
            said = distribution.metadata["Name"] if isinstance(distribution, PathDistribution) else None
            if said and distribution.files:
                self._found.setdefault(normal(said), distribution)

    def _download(self, name: str) -> None:
        self.wheels.mkdir(parents=True, exist_ok=True)
        tell(f"asking the package index for {name}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", str(self.wheels), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.strip().split("\n") if line.startswith("ERROR")] or ["pip failed"]
            raise LoadError(lines[-1].removeprefix("ERROR: "))


def files_of(distribution: Distribution) -> list[tuple[str, Readable]]:
    """The source files of a package by their paths in it."""
    return [
        (file.as_posix(), distribution.locate_file(file))  # type: ignore[misc]  # pathlib's, or zipfile's like it
        for file in distribution.files or ()
        if file.suffix in SUFFIXES and ".." not in file.parts
    ]


def files_of_the_library(root: Path) -> list[tuple[str, Readable]]:
    """The source files of the standard library in `root`, its tests among them."""
    found: list[tuple[str, Readable]] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(NOT_OF_THE_LIBRARY):
            found.append((name, path))
    return found


def texts_of(files: Sequence[tuple[str, Readable]], seen: Seen, dropped: dict[str, int]) -> Iterator[tuple[str, str]]:
    """(path, text) of what is worth learning from, in order of paths; `dropped` counts the rest by reason."""
    kept, room = [], MOST_OF_ONE
    by_name = dict(files)
    for path in in_order(list(by_name)):
        try:
            text = by_name[path].read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError, KeyError):
            text = ""
        reason = why_not(path, text) or ("over the most of one package" if len(text) > room else seen.repeats(text))
        if reason:
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            kept.append((path, text))
            room -= len(text)
    yield from sorted(kept)


class Writer:
    """Appends packages to the compressed file until it is full."""

    def __init__(self, raw: BinaryIO, file: lzma.LZMAFile, most: int) -> None:
        """`file` compresses into `raw`, which is to have `most` bytes."""
        self.manifest, self.full = Manifest(), False
        self._most, self._seen, self._raw, self._file = most, Seen(), raw, file

    def add(self, package: Package, files: Sequence[tuple[str, Readable]]) -> None:
        """Take what is worth it; stops in the middle of a package when the file is full."""
        manifest = self.manifest
        for path, text in texts_of(files, self._seen, manifest.dropped):
            if self._raw.tell() + SLACK > self._most:
                self.full = True
                break
            held = is_held_out(package.name, path, text)
            line = {"package": package.name, "path": path, "held_out": held, "text": text}
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            package.files, package.characters = package.files + 1, package.characters + len(text)
            manifest.held_out += held
        manifest.files, manifest.characters = manifest.files + package.files, manifest.characters + package.characters
        if package.files:
            manifest.packages.append(package)
        else:
            manifest.left_out[package.name] = "nothing of it was new and worth learning from"


def build(
    names: Sequence[str], places: Places, out: Path, most: int, also: Sequence[str] = (), library: Path | None = None
) -> Manifest:
    """Write the corpus and its manifest into `out`. Raises ForerunError if it would be over `most` bytes.

    `also` are further licences to take, by their SPDX names; `library` is the standard library, if not Python's own.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    with written_whole(out / CORPUS) as work:
        with work.open("wb") as raw, lzma.LZMAFile(raw, "wb", format=lzma.FORMAT_XZ, filters=FILTERS) as file:
            writer = Writer(raw, file, most)
            manifest = writer.manifest
            writer.add(Package("python", platform.python_version(), "PSF-2.0"), files_of_the_library(library))
            for number, name in enumerate(names, 1):
                if writer.full:
                    manifest.left_out[normal(name)] = "the corpus was full"
                else:
                    _take(writer, name, places, also)
                sizes = f"{manifest.files} files, {manifest.characters / 1e6:.1f} million characters"
                tell(f"{number} of {len(names)}, {name}: {sizes}")
        manifest.bytes, manifest.sha256 = work.stat().st_size, sha256_of(work)
        if manifest.bytes > most:
            raise ForerunError(f"the corpus has {manifest.bytes} bytes, over {most}: raise SLACK in {__file__}")
    with written_whole(out / MANIFEST) as work:
        work.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    return manifest


def _take(writer: Writer, name: str, places: Places, also: Sequence[str]) -> None:
    """A package, if it is there and its licence allows it."""
    try:
        found = places.find(name)
    except LoadError as error:
        writer.manifest.left_out[normal(name)] = str(error)
        return
    licence, allowed = licence_of(found.metadata, also)  # type: ignore[arg-type]  # an email.message.Message
    if allowed:
        writer.add(Package(normal(name), found.version, licence), files_of(found))
    else:
        writer.manifest.left_out[normal(name)] = f"its licence: {licence}"


def read_corpus(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a corpus. Raises LoadError for a file that is not there, not whole, or another."""
    try:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                value = json.loads(line)
                if not isinstance(value, dict) or not {"text", "held_out"} <= value.keys():
                    raise ValueError("a line without a text")
                yield value
    except FileNotFoundError:
        raise LoadError(f"there is no corpus {path}: make it with python -m scripts.bundled.corpus") from None
    except (OSError, lzma.LZMAError, EOFError, ValueError) as error:
        raise LoadError(f"the corpus {path} cannot be read ({error}): remove it and make it again") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bundled"), help="the folder to write to")
    parser.add_argument("--names", type=Path, default=NAMES, help="the list of packages")
    parser.add_argument(
        "--from", type=Path, action="append", default=[], dest="folders", metavar="FOLDER",
        help="a site-packages or a folder of wheels to look in first; may be repeated",
    )  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="do not ask the package index")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="most of the compressed file")
    parser.add_argument(
        "--also", action="append", default=[], metavar="SPDX", help="a further licence to take; may be repeated"
    )
    args = parser.parse_args()
    if not 4 <= args.megabytes <= 1000:
        raise ConfigError(f"megabytes={args.megabytes} is out of range: give a whole number from 4 to 1000")
    names = read_names(args.names)
    places = Places(args.folders, args.out / "wheels", args.offline)
    manifest = build(names, places, args.out, args.megabytes * 1_000_000, args.also)
    for name, reason in manifest.left_out.items():
        tell(f"left out: {name} ({reason})")
    tell(f"files not taken: {manifest.dropped}")
    print(
        f"{args.out / CORPUS}: {manifest.bytes / 1e6:.1f} MB, {manifest.files} files of {len(manifest.packages)}"
        f" packages, {manifest.characters / 1e6:.1f} million characters, {manifest.held_out} files held out"
    )


if __name__ == "__main__":
    run(main)
