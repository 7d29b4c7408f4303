"""Folders in pieces that travel: a tar cut into files of a size at most, and put together again.

    python -m scripts.bundled.pieces split build/bundled "$OUT" base base-draft tokens.json
    python -m scripts.bundled.pieces join /where/they/came build/bundled

The pieces are pieces.tar.gz.00 and so on; pieces.json has the SHA-256 of each and of the whole. Nothing is unpacked
before all of them are right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, LoadError
from scripts.bundled.common import CHUNK, run, sha256_of, tell, written_whole

LARGEST = 16 * 1024 * 1024 - 4096  # bytes of a piece: what comes back from a GPU machine is up to 16 MiB a file
MOST = 100
NAME = "pieces"


def split(root: Path, names: Sequence[str], out: Path, largest: int = LARGEST) -> list[Path]:
    """Put files and folders of `root` into pieces in `out`, which is made. Raises ConfigError for what is not there."""
    for name in names:
        if not (root / name).exists() or not (root / name).resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"there is no {name} in {root}: give files or folders of it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        whole = Path(folder) / "whole"
        with tarfile.open(whole, "w:gz", compresslevel=5) as tar:
            for name in names:
                tar.add(root / name, arcname=name)
        size = whole.stat().st_size
        count = -(-size // largest)
        if count > MOST:
            raise ConfigError(f"{size} bytes are more than {MOST} pieces of {largest}: take less, or larger pieces")
        pieces: list[dict[str, Any]] = []
        with whole.open("rb") as source:
            for number in range(count):
                path = out / f"{NAME}.tar.gz.{number:02}"
                with written_whole(path) as work, work.open("wb") as file:
                    _copy(source, file, largest)
                pieces.append({"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)})
        index = {"bytes": size, "sha256": sha256_of(whole), "pieces": pieces}
    with written_whole(out / f"{NAME}.json") as work:
        work.write_text(json.dumps(index, indent=1))
    return [out / piece["name"] for piece in pieces]


def join(source: Path, root: Path) -> list[str]:
    """Unpack pieces into `root`; the names that came. Raises LoadError if one is missing or not what it was."""
    index = _index(source)
    digest = hashlib.sha256()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        whole = Path(folder) / "whole"
        with whole.open("wb") as file:
            for piece in index["pieces"]:
                path = source / piece["name"]
                if not path.is_file():
                    raise LoadError(f"the piece {path} is not there: bring all {len(index['pieces'])} of them")
                data = path.read_bytes()
                if hashlib.sha256(data).hexdigest() != piece["sha256"]:
                    raise LoadError(f"the piece {path} is not what was sent: bring it again")
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != index["sha256"]:
            raise LoadError(f"the pieces in {source} do not make the whole that {NAME}.json says: split again")
        with tarfile.open(whole) as tar:
            tar.extractall(root, filter="data")
            return sorted({member.name.partition("/")[0] for member in tar.getmembers()})


def _index(source: Path) -> dict[str, Any]:
    path = source / f"{NAME}.json"
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        if not all({"name", "sha256"} <= piece.keys() and "/" not in piece["name"] for piece in index["pieces"]):
            raise ValueError("pieces without names")
        return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} cannot be read ({error}): bring it with the pieces") from None


def _copy(source: Any, file: Any, most: int) -> None:
    while most and (chunk := source.read(min(CHUNK, most))):
        file.write(chunk)
        most -= len(chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    cut = verbs.add_parser("split", help="a folder's parts into pieces")
    cut.add_argument("root", type=Path)
    cut.add_argument("out", type=Path)
    cut.add_argument("names", nargs="+")
    back = verbs.add_parser("join", help="pieces into a folder")
    back.add_argument("source", type=Path)
    back.add_argument("root", type=Path)
    args = parser.parse_args()
    if args.verb == "split":
        pieces = split(args.root, args.names, args.out)
        tell(f"{len(pieces)} pieces in {args.out}")
    else:
        tell(f"{', '.join(join(args.source, args.root))} in {args.root}")


if __name__ == "__main__":
    run(main)
