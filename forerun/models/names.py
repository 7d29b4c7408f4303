"""What the names of GGUF files say: which are models, which belong together, and which one a tag
means.

Names are paths with `/` inside a repository or a folder. The rules are llama.cpp's (its `-hf
org/repo:tag`), but that a
tag stands for itself only: F16 is not the end of BF16, and a file of that name comes before a
folder of that name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from forerun.errors import LoadError

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
SIDECARS = (
    "mmproj",
    "imatrix",
    "mtp-",
    "eagle3-",
    "dflash-",
    "dspark-",
)  # what stands beside a model, and is none
PREFERRED = ("Q4_K_M", "Q8_0")  # where no tag is given, in this order
LABEL = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:[it]?q\d(?:_[a-z0-9]+)*|bf16|f16|f32|mxfp4(?:_moe)?|nvfp4))(?=[.-])",
    re.IGNORECASE,
)
MOST_NAMED = 12  # names in one error message


def title(name: str) -> str:
    """What to call a model that is named by a path or an id: the last part, a GGUF file without its
    ending."""
    last = Path(name).name
    shard = SHARD.fullmatch(last)
    return shard[1] if shard else Path(last).stem if is_gguf(last) else last


def is_gguf(file: str) -> bool:
    """Whether a name is one of a GGUF file."""
    return file.lower().endswith(".gguf")


def models_of(files: Iterable[str]) -> list[str]:
    """The GGUF models among files, in order: no sidecars, and of a split model the first part."""
    return [
        file
        for file in sorted(files)
        if is_gguf(file) and not _is_sidecar(file) and not _is_later_part(file)
    ]


def _is_sidecar(file: str) -> bool:
    return any(mark in file.rpartition("/")[2].lower() for mark in SIDECARS)


def _is_later_part(file: str) -> bool:
    match = SHARD.fullmatch(file)
    return match is not None and int(match[2]) != 1


def parts_of(file: str) -> list[str]:
    """All files of a model by the name of one of them: itself, or every part of a split model."""
    match = SHARD.fullmatch(file)
    if match is None or not int(match[3]):
        return [file]
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}{match[4]}" for i in range(int(match[3]))]


def first_part(path: Path) -> Path:
    """The file to open for a GGUF file: itself, or the first part. Raises LoadError where parts are
    missing."""
    parts = [path.with_name(name) for name in parts_of(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if not missing:
        return parts[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise LoadError(
        f"{path} is one of {len(parts)} parts, but {missing[0]}{more} is not beside it; download it into the same place"
    )


def choose(files: Iterable[str], tag: str | None) -> str | None:
    """The model that `tag` means (Q4_K_M, say), or the usual one without a tag; None if there is
    none."""
    models = models_of(files)
    for wanted in [tag] if tag else PREFERRED:
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        in_names = (file for file in models if pattern.search(file.rpartition("/")[2]))
        in_paths = (file for file in models if pattern.search(file))
        chosen = next(in_names, None) or next(in_paths, None)
        if chosen:
            return chosen
    return None if tag else next(iter(models), None)


def tag_of(file: str, files: Iterable[str]) -> str | None:
    """The tag by which `choose` finds a file among files; None where its name has none that
    does."""
    labels = LABEL.findall(file.rpartition("/")[2]) or LABEL.findall(file)
    return labels[-1] if labels and choose(files, labels[-1]) == file else None


def listed(names: Iterable[str], most: int = MOST_NAMED) -> str:
    """Names in an error message: at most so many, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
