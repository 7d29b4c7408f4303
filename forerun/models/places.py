"""Every model that this machine already has, wherever it came from, with the name by which
`find_model` finds it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import LoadError
from forerun.models import caches, lmstudio, ollama
from forerun.models.hub import DEFAULT, default_model
from forerun.models.names import first_part, is_gguf, models_of, parts_of, tag_of

DEEPEST = 6  # folders below one that was given


@dataclass(frozen=True, slots=True)
class Found:
    """A model: what to give for --model, the file or directory, whose it is, and why it cannot be
    used (else "")."""

    name: str
    path: Path
    origin: str
    trouble: str = ""


def everything(directories: Iterable[Path] = ()) -> tuple[list[Found], list[str]]:
    """All models, those of `directories` first, and a line for each place that could not be
    read."""
    given, default, (of_ollama, locked) = list(directories), default_model(), _of_ollama()
    locked += [
        f"{folder} is no directory that can be read: give another"
        for folder in given
        if not _readable(folder)
    ]
    found = [model for folder in given for model in _below(folder)]
    found += [Found(DEFAULT, default, "default")] if default else []
    found += [*of_ollama, *_of_lmstudio(), *_of_hub(), *_of_llama_cpp()]
    return list({model.name: model for model in reversed(found)}.values())[::-1], locked


def names() -> list[str]:
    """What can be given for --model without a download, for the shell's completion. Never
    raises."""
    try:
        return [model.name for model in everything()[0] if not model.trouble]
    except Exception:  # a shell that waits for a word has no use for what went wrong
        return []


def names_model(text: str) -> bool:
    """Whether somebody who writes this means a model rather than a prompt: the name of a GGUF file,
    a directory that holds a model, or what only a model is called here."""
    with suppress(OSError, ValueError, RuntimeError):  # too long a name, a zero byte, ~ of nobody
        path = Path(text).expanduser()
        if path.is_dir():
            return (path / "config.json").is_file() or bool(
                models_of(file.name for file in path.iterdir())
            )
        if path.is_file():
            return is_gguf(path.name)
    if len(text.split()) != 1:
        return False
    if is_gguf(text) or text.startswith(("ollama:", "lmstudio:")):
        return True
    return text.count("/") == 1 and text.partition(":")[0] in dict(caches.repositories())


def _readable(folder: Path) -> bool:
    with suppress(OSError):
        return bool(os.listdir(folder)) or True
    return False


def _of_ollama() -> tuple[list[Found], list[str]]:
    manifests, locked = ollama.installed()
    found = []
    for manifest in manifests:
        name = f"ollama:{manifest.name}"
        try:
            found.append(Found(name, manifest.blob(), "ollama"))
        except LoadError as error:
            found.append(Found(name, manifest.root, "ollama", str(error)))
    return found, locked


def _of_lmstudio() -> Iterator[Found]:
    with suppress(OSError):
        for folder in lmstudio.installed():
            for name, path in folder.names().items():
                yield _whole(f"lmstudio:{name}", path, "lmstudio")


def _of_hub() -> Iterator[Found]:
    for repository, snapshot in caches.repositories():
        files = caches.files_of(snapshot)
        if "config.json" in files and any(file.endswith(".safetensors") for file in files):
            yield Found(repository, snapshot, "hub")
        for file in models_of(files):
            tag = tag_of(file, files)
            yield _whole(
                f"{repository}:{tag}" if tag else str(snapshot / file), snapshot / file, "hub"
            )


def _of_llama_cpp() -> Iterator[Found]:
    for root in caches.flat_roots():
        with suppress(OSError):
            told = {file: name for name, file in caches.flat_files(root).items()}
            for file in models_of(path.name for path in root.iterdir() if path.is_file()):
                yield _whole(told.get(file) or str(root / file), root / file, "llama.cpp")


def _below(folder: Path) -> Iterator[Found]:
    """Models in a folder and below it; hidden folders and links to folders are left out."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        deep = len(here.relative_to(folder).parts) >= DEEPEST
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        if "config.json" in files and any(file.endswith(".safetensors") for file in files):
            yield Found(str(here), here, "directory")
        for file in models_of(files):
            yield _whole(str(here / file), here / file, "directory")


def _whole(name: str, path: Path, origin: str) -> Found:
    """A model, with what is missing of it."""
    try:
        if len(parts_of(path.name)) > 1:
            first_part(path)
    except LoadError as error:
        return Found(name, path, origin, str(error))
    return Found(name, path, origin)
