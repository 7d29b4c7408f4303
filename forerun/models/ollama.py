"""The models that Ollama has on this machine: from a name and its manifest to the blob that is a
GGUF file.

A manifest lies at `manifests/<host>/<namespace>/<model>/<tag>` and names layers by digest; blobs
lie side by side. What is looked for is compared with what is there, so no name that is given
becomes part of a path."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import LoadError
from forerun.models.names import listed
from forerun.utils import decoded

KIND = "application/vnd.ollama.image."
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
LIBRARY, LATEST = "library", "latest"
# Where Ollama runs as a service its models are in the home of a user of its own.
SERVICES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models", "/var/lib/ollama")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One model of Ollama's: the folder of all of them, and where its manifest is below that."""

    root: Path
    host: str
    namespace: str
    model: str
    tag: str

    @property
    def name(self) -> str:
        """What Ollama calls it, as short as it can be."""
        parts = [self.model if self.tag == LATEST else f"{self.model}:{self.tag}"]
        if not self.is_usual or self.namespace != LIBRARY:
            parts.insert(0, self.namespace)
        return "/".join(parts if self.is_usual else [self.host, *parts])

    @property
    def is_usual(self) -> bool:
        """Whether it comes from Ollama's own registry, whose host is left out of names."""
        return self.host.startswith("registry.")

    def blob(self) -> Path:
        """The GGUF file. Raises LoadError where there is none."""
        path = self.root.joinpath("manifests", self.host, self.namespace, self.model, self.tag)
        layers = self._layers(path)
        kinds = [str(layer.get("mediaType", "")).removeprefix(KIND) for layer in layers]
        if "model" not in kinds:
            raise LoadError(f"{self.name} of Ollama is no GGUF file: {_why_none(kinds)}")
        digest = DIGEST.fullmatch(str(layers[kinds.index("model")].get("digest")))
        if digest is None:
            raise LoadError(f"{path} names no valid digest for its model: ollama pull {self.name}")
        blob, old = (self.root / "blobs" / f"sha256{separator}{digest[1]}" for separator in "-:")
        if not blob.is_file() and not old.is_file():
            raise LoadError(
                f"{self.name} of Ollama is not whole, there is no {blob}: ollama pull {self.name}"
            )
        return blob if blob.is_file() else old

    def _layers(self, path: Path) -> list[dict[str, object]]:
        try:
            raw = json.loads(decoded(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}, a manifest of Ollama's, cannot be read: {error}") from None
        layers = raw.get("layers") if isinstance(raw, dict) else None
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise LoadError(f"{path} is no manifest of Ollama's: ollama pull {self.name}")
        return layers


def _why_none(kinds: list[str]) -> str:
    if "tensor" in kinds:
        return "its weights are stored as single tensors for MLX; pull another tag"
    return (
        "it has no weights here, as models that run in Ollama's cloud have none; pull another tag"
    )


def roots() -> list[Path]:
    """The folders where Ollama may keep models: what OLLAMA_MODELS says, else the usual ones."""
    said = os.environ.get("OLLAMA_MODELS")
    return (
        [Path(said).expanduser()]
        if said
        else [Path.home() / ".ollama/models", *map(Path, SERVICES)]
    )


def installed() -> tuple[list[Manifest], list[str]]:
    """Every model, and what to say of each folder that may not be read."""
    found: list[Manifest] = []
    locked = []
    for root in roots():
        try:
            found += [Manifest(root, *parts) for parts in _below(root / "manifests", 4)]
        except PermissionError:
            locked.append(
                f"Ollama's models in {root} cannot be read: permission denied; ask for leave to read that"
                " folder, or set OLLAMA_MODELS to one that can be read"
            )
    return found, locked


def _below(folder: Path, depth: int) -> list[tuple[str, ...]]:
    """The names on the way to everything `depth` folders down."""
    if depth == 0:
        return [()]
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(name, *rest) for name in names for rest in _below(folder / name, depth - 1)]


def find(name: str) -> Path:
    """The GGUF file of a model: MODEL, NAMESPACE/MODEL or HOST/NAMESPACE/MODEL, and perhaps :TAG.
    Raises LoadError."""
    found, locked = installed()
    match = match_of(name, found)
    if match is not None:
        return match.blob()
    if not found:
        looked = listed(str(root) for root in roots())
        raise LoadError(
            locked[0]
            if locked
            else f"no models of Ollama's are here: looked in {looked}; set OLLAMA_MODELS"
        )
    near = sorted(
        (f"ollama:{m.name}" for m in found), key=lambda other: -_likeness(other, f"ollama:{name}")
    )
    raise LoadError(f"Ollama has no model {name!r} here; it has {listed(near)}")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


def match_of(name: str, found: list[Manifest]) -> Manifest | None:
    """The model that Ollama means by a name; letters count the same in either case."""
    place, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        place, tag = name, LATEST
    *host, namespace, model = [LIBRARY, *place.split("/")][-max(place.count("/") + 1, 2) :]
    wanted = [*host, namespace, model, tag or LATEST]
    matches = [
        m for m in found
        if [part.casefold() for part in (m.host, m.namespace, m.model, m.tag)][-len(wanted) :]
        == [part.casefold() for part in wanted]
    ]  # fmt: skip
    return min(matches, key=lambda m: (not m.is_usual, found.index(m)), default=None)
