"""A drafter or a target before it is loaded: what its small files and headers say, here or on the
Hub."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forerun.catalogue import far
from forerun.catalogue.survey import tokenizer_digest
from forerun.draft.registry import Json, Kind, Look, inner, recognise
from forerun.errors import LoadError, one_line
from forerun.models.files import read_header, read_object, read_text, weight_files
from forerun.models.gguf.config import skim, token_digest
from forerun.models.hub import PICKLED, find_model, is_pickled
from forerun.models.local import cached_repositories, list_local_models

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
CARD = "README.md"
MOST_NAMES = 32  # domains of one drafter, and so on


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model or a drafter.

    Attributes:
        name: by which it was asked for.
        path: where it is here; None on the Hub.
        raw: its config.json; of a GGUF file what stands for it.
        shapes: its tensors; empty where they cannot be told without loading them.
        bytes: of all its weights.
        vocabulary: the same for tokenizers that are the same file; "" without one.
        card: the metadata of its card.
        at: its repository, on the Hub.
    """

    name: str
    path: Path | None = None
    raw: Json = field(default_factory=dict)
    shapes: far.Shapes = field(default_factory=dict)
    bytes: int = 0
    vocabulary: str = ""
    card: Json = field(default_factory=dict)
    at: far.Repository | None = None

    @property
    def kind(self) -> Kind:
        """What kind of drafter it is."""
        if self.raw.get("gguf"):
            return Kind("lm", "gguf", "language model", "model")
        return recognise(Look(self.raw, self.shapes, bool(self.vocabulary)))

    @property
    def parameters(self) -> int:
        """How many numbers its tensors have; 0 where they cannot be told."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def made_for(self) -> str:
        """The target that it names: its verifier or base, or else its card's base model; "" where
        it names none."""
        named = inner(inner(self.raw, "speculators_config"), "verifier").get("name_or_path")
        base = self.card.get("base_model")
        base = base[0] if isinstance(base, list) and base else base
        said = (named, self.raw.get("base_model_name_or_path"), base)
        return next((one_line(name) for name in said if isinstance(name, str) and name), "")

    @property
    def domains(self) -> tuple[str, ...]:
        """The kinds of text it is for, as its card says."""
        said = self.card.get("domains")
        listed = [said] if isinstance(said, str) else said if isinstance(said, list) else []
        return tuple(
            one_line(name).lower() for name in listed[:MOST_NAMES] if isinstance(name, str) and name
        )


def facts_of(name: str, tensors: bool = True) -> Facts:
    """What is known of a drafter or a model that is named: a directory, a GGUF file, what is in a
    cache, or else a repository on the Hub, of which no more than headers is read, or without
    `tensors` not even these. Raises LoadError."""
    path = here(name)
    return facts_at(path, name) if path else facts_far(name, tensors)


def here(name: str) -> Path | None:
    """Where something is on this machine; None where it is not, and nothing is downloaded. Raises
    LoadError."""
    if name.startswith(("ollama:", "lmstudio:")):
        return find_model(name)
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(name).expanduser()
        if path.exists():
            return path
    known = {model.name: model.path for model in list_local_models()[0] if not model.trouble}
    return known.get(name) or _cached(name)


def _cached(name: str) -> Path | None:
    """A repository in the Hub's cache whose weights are there, as tensors or pickled."""
    for repository, snapshot in cached_repositories():
        if (
            repository == name
            and (snapshot / "config.json").is_file()
            and any(weights_of(snapshot))
        ):
            return snapshot
    return None


def weights_of(directory: Path) -> list[Path]:
    """The files of weights in a directory."""
    files = weight_files(directory)
    files = files or sorted(file for pattern in PICKLED for file in directory.glob(pattern))
    return [file for file in files if file.is_file()]


def facts_at(path: Path, name: str) -> Facts:
    """What is known of a directory or a GGUF file. Raises LoadError."""
    if path.is_file() or not (path / "config.json").is_file():
        return _facts_of_gguf(path, name)
    raw, weights = read_object(path / "config.json"), weights_of(path)
    stored = [file for file in weights if file.suffix == ".safetensors"]
    shapes = {
        name: shape
        for file in stored
        for name, shape in far.shapes_of(read_header(file), str(file)).items()
    }
    size = sum(file.stat().st_size for file in weights)
    return Facts(name, path, raw, shapes, size, _vocabulary(path), read_card(path))


def _facts_of_gguf(path: Path, name: str) -> Facts:
    if path.is_dir():
        path = find_model(str(path))
    if path.is_dir():
        raise LoadError(
            f"{name} has no config.json, nor is it a GGUF file: give a directory or a file that is a model"
        )
    file = skim(path)
    shapes = {key: tuple(tensor.shape) for key, tensor in file.tensors.items()}
    size = sum(part.stat().st_size for part in file.parts)
    said = {
        key.rpartition(".")[2]: value
        for key, value in file.metadata.items()
        if key.startswith(file.architecture)
    }
    raw = {
        "gguf": True, "model_type": file.architecture, "hidden_size": said.get("embedding_length"),
        "num_hidden_layers": said.get("block_count"), "vocab_size": shapes.get("token_embd.weight", (None,))[0],
    }  # fmt: skip
    return Facts(name, path, raw, shapes, size, token_digest(file.metadata))


def facts_far(repository: str, tensors: bool = True) -> Facts:
    """What is known of a repository on the Hub, see `facts_of`. Raises LoadError."""
    at = far.look_up(repository)
    if "config.json" not in at.files:
        raise LoadError(
            f"{repository} on the Hub has no config.json, so nobody can tell what it is: give another"
        )
    raw = far.read_object(repository, "config.json", at.commit)
    digest = next((f"{name} {at.digests[name]}" for name in TOKENIZERS if at.digests.get(name)), "")
    sizes = [size for name, size in at.files.items() if name.endswith(".safetensors")]
    sizes = sizes or [size for name, size in at.files.items() if is_pickled(name)]
    digest = f"json {digest.split()[1]}" if digest.startswith("tokenizer.json") else digest
    shapes = far.read_shapes(at) if tensors else {}
    return Facts(repository, None, raw, shapes, sum(sizes), digest, at.card, at)


def _vocabulary(directory: Path) -> str:
    digest = tokenizer_digest(directory / "tokenizer.json")
    named = next((name for name in TOKENIZERS[1:] if (directory / name).is_file()), "")
    return digest or (named and f"{named} here")


def read_card(directory: Path) -> Json:
    """The metadata of the card in a directory; nothing where there is none that can be read."""
    try:
        return card_of(read_text(directory / CARD, far.MOST_JSON))[0]
    except LoadError:
        return {}


def license_of(path: Path) -> str:
    """The licence of a model in a directory or a GGUF file, as it says; "" where it does not."""
    said = (
        skim(path).metadata.get("general.license")
        if path.is_file()
        else read_card(path).get("license")
    )
    return one_line(said).lower() if isinstance(said, str) else ""


def card_of(text: str) -> tuple[Json, str]:
    """Metadata and text of a card."""
    import yaml

    match = re.match(r"\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", text, re.DOTALL)
    if match is None:
        return {}, text
    try:
        metadata = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        metadata = None
    return (metadata if isinstance(metadata, dict) else {}), text[match.end() :]
