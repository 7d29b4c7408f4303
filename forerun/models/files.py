"""Files that come with a model: safe readers for small ones, and the naming rules of GGUF files.

Model files are untrusted: readers are bounded in size, accept regular files only, and turn
every fault into one LoadError line. GGUF names follow llama.cpp (`-hf org/repo:tag`), except that a
tag stands for itself only: F16 does not match BF16, and a file name takes precedence over a folder
name. Such names are paths with `/` inside a repository or folder."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, one_line, shown
from forerun.utils import decoded

SHORTLIST = "shortlist.safetensors"  # beside a model: the tokens it scores as a drafter
LARGEST = 64 << 20  # bytes of a JSON or template file; the largest tokenizers have a few MB
LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
POINTER = b"version https://git-lfs"  # first bytes of a Git LFS pointer

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
# parts of the names of GGUF files that accompany a model
SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
DEFAULT_TAGS = ("Q4_K_M", "Q8_0")  # in order of preference
LABEL = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:[it]?q\d(?:_[a-z0-9]+)*|bf16|f16|f32|mxfp4(?:_moe)?|nvfp4))(?=[.-])",
    re.IGNORECASE,
)

# ---------------------------------------------------------------- reading


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Read a text file of at most `largest` bytes. Raises LoadError."""
    try:
        if not path.is_file():  # opening a pipe would block
            raise LoadError(f"{path} is not a regular file; download it again")
        with path.open("rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise LoadError(f"{path} is larger than {largest >> 20} MB; download it again")
        _refuse_pointer(path, content)
        return decoded(content)
    except (OSError, ValueError) as error:
        why = one_line(str(error))
        raise LoadError(f"{path} cannot be read: {why}; download it again") from None


def check_pointer(path: Path) -> None:
    """Raise LoadError if the file is a Git LFS pointer instead of the content it stands for."""
    with suppress(OSError), path.open("rb") as file:
        _refuse_pointer(path, file.read(len(POINTER)))


def _refuse_pointer(path: Path, content: bytes) -> None:
    if content.startswith(POINTER):
        raise LoadError(
            f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in its directory"
        )


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises LoadError."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else one_line(str(error))
        raise LoadError(f"{path} cannot be read: {why}; download it again") from None


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object. Raises LoadError."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise LoadError(f"{path} does not hold a JSON object: download it again")
    return raw


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the header entry of each tensor in a safetensors file. Raises LoadError."""
    try:
        check_pointer(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LARGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            content = file.read(length)
    except (OSError, ValueError, struct.error) as error:
        raise _not_safetensors(str(path), error) from None
    return parse_header(content, str(path))


def parse_header(content: bytes, file: str) -> dict[str, dict[str, Any]]:
    """Return the header entry of each tensor; `file` is named in errors. Raises LoadError."""
    try:
        entries = json.loads(content).items()
        return {name: entry for name, entry in entries if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise _not_safetensors(file, error) from None


def _not_safetensors(file: str, error: Exception) -> LoadError:
    why = one_line(str(error))
    return LoadError(f"{file} is not a complete safetensors file: {why}; download it again")


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files in a directory that hold a model's tensors."""
    return sorted(path for path in directory.glob("*.safetensors") if path.name != SHORTLIST)


def indexed_files(index: Path) -> list[Path]:
    """List the files a safetensors index names, whether or not they exist.

    Raises LoadError for a broken index, or one that names files outside its directory."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise LoadError(f"{index} has no weight_map of tensors to files; download it again")
    names = sorted(set(files.values()))
    for name in names:
        if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
            raise LoadError(
                f"{index} names the file {shown(name)}, which is outside its directory; "
                "download it again"
            )
    return [index.parent / name for name in names]


# ---------------------------------------------------------------- names of GGUF files


def title(name: str) -> str:
    """Return a display name for a path or Hub id: its last part, without the ending .gguf."""
    last = Path(name).name
    shard = SHARD.fullmatch(last)
    if shard:
        return shard[1]
    return Path(last).stem if is_gguf(last) else last


def is_gguf(file: str) -> bool:
    """Return True for the name of a GGUF file."""
    return file.lower().endswith(".gguf")


def gguf_models(files: Iterable[str]) -> list[str]:
    """Sort out the GGUF models among files: no sidecars, and only the first shard of each."""
    models = []
    for file in sorted(files):
        shard = SHARD.fullmatch(file)
        is_sidecar = any(mark in file.rpartition("/")[2].lower() for mark in SIDECARS)
        if is_gguf(file) and not is_sidecar and (shard is None or int(shard[2]) == 1):
            models.append(file)
    return models


def parts_of(file: str) -> list[str]:
    """Return the names of all shards of a model, given the name of one of them."""
    match = SHARD.fullmatch(file)
    if match is None or not int(match[3]):
        return [file]
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}{match[4]}" for i in range(int(match[3]))]


def first_shard(path: Path) -> Path:
    """Return the file to open for a GGUF model. Raises LoadError if a shard is missing."""
    parts = [path.with_name(name) for name in parts_of(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if not missing:
        return parts[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise LoadError(
        f"{path} is one of {len(parts)} shards, but {missing[0]}{more} is not beside it; "
        "download it into the same folder"
    )


def choose_gguf(files: Iterable[str], tag: str | None) -> str | None:
    """Return the model a tag such as Q4_K_M means, or the preferred one without a tag."""
    models = gguf_models(files)
    for wanted in [tag] if tag else DEFAULT_TAGS:
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        in_names = (file for file in models if pattern.search(file.rpartition("/")[2]))
        in_paths = (file for file in models if pattern.search(file))
        chosen = next(in_names, None) or next(in_paths, None)
        if chosen:
            return chosen
    return None if tag else next(iter(models), None)


def tag_of(file: str, files: Iterable[str]) -> str | None:
    """Return the tag by which `choose_gguf` finds a file among files, if there is one."""
    labels = LABEL.findall(file.rpartition("/")[2]) or LABEL.findall(file)
    return labels[-1] if labels and choose_gguf(files, labels[-1]) == file else None


def joined(names: Iterable[str], most: int = 12) -> str:
    """Join names for an error message: at most `most` of them, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
