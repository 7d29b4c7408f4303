"""Small files that come with a model, from strangers: bounded in size, regular files only, every
fault one line."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, one_line, shown
from forerun.utils import decoded

SHORTLIST = "shortlist.safetensors"  # beside a model: which of its tokens it scores when it drafts
LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library allows
POINTER = (
    b"version https://git-lfs"  # with which the text begins that Git has in place of a large file
)
LARGEST = 64 << 20  # bytes; the longest lists of tensors and of added tokens have a few


def read_text(path: Path, largest: int = LARGEST) -> str:
    """A text file. Raises LoadError."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise LoadError(f"{path} is no file that can be read; download it again")
        with path.open("rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise LoadError(
                f"{path} has over {largest >> 20} MB, which no such file has; download it again"
            )
        _refuse_pointer(path, content)
        return decoded(content)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"{path} cannot be read: {one_line(str(error))}; download it again"
        ) from None


def check_pointer(path: Path) -> None:
    """Raise LoadError where a Git LFS pointer lies in place of a file of any kind."""
    with suppress(OSError), path.open("rb") as file:
        _refuse_pointer(path, file.read(len(POINTER)))


def _refuse_pointer(path: Path, content: bytes) -> None:
    if content.startswith(POINTER):
        raise LoadError(
            f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in its directory"
        )


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises LoadError."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else one_line(str(error))
        raise LoadError(f"{path} cannot be read: {why}; download it again") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises LoadError."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise LoadError(f"{path} does not hold an object: download it again")
    return raw


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """What the header of a safetensors file says of each tensor, by name. Raises LoadError."""
    try:
        check_pointer(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LARGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            content = file.read(length)
    except (OSError, ValueError, struct.error) as error:
        raise LoadError(
            f"{path} is no safetensors file or not whole: {error}; download it again"
        ) from None
    return parse_header(content, str(path))


def parse_header(content: bytes, file: str) -> dict[str, dict[str, Any]]:
    """What a header says of each tensor, by name; `file` is what messages call it. Raises
    LoadError."""
    try:
        return {
            name: tensor for name, tensor in json.loads(content).items() if name != "__metadata__"
        }
    except (ValueError, AttributeError, RecursionError) as error:
        why = one_line(str(error))
        raise LoadError(
            f"{file} is no safetensors file or not whole: {why}; download it again"
        ) from None


def inside(directory: Path, name: str) -> Path:
    """The file that another one in `directory` names. Raises LoadError for a name that leads out of
    there."""
    path = directory / name
    if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
        raise LoadError(
            f"{directory} names the file {shown(name)}, which is not in it; download it again"
        )
    return path


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory that hold a model's tensors."""
    return sorted(path for path in directory.glob("*.safetensors") if path.name != SHORTLIST)


def indexed(index: Path) -> list[Path]:
    """The files that an index of weights names, there or not. Raises LoadError."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise LoadError(
            f"{index} cannot be read: it has no weight_map of tensors to files; download it again"
        )
    return [inside(index.parent, name) for name in sorted(set(files.values()))]
