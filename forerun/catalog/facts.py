"""Facts about a drafter or a target before it is loaded, from small files and headers."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.catalog import hub
from forerun.catalog.survey import tokenizer_digest
from forerun.draft.gguf_heads import head_config, head_kind, head_shapes
from forerun.draft.kinds import OWN_MTP, Json, Kind, Look, inner, recognise
from forerun.errors import LoadError, one_line
from forerun.models.files import read_header, read_object, read_text, weight_files
from forerun.models.gguf.config import skim, token_digest
from forerun.models.hub import PICKLED, find_model, is_pickled
from forerun.models.local import cached_repositories, list_local_models

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
CARD = "README.md"
MAX_DOMAINS = 32


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model or a drafter that can be read without loading it.

    Attributes:
        name: the name by which it was requested.
        path: local directory or file; None on the Hub.
        raw: its config.json; for a GGUF file the corresponding fields.
        shapes: its tensors, those of a head in a GGUF file under forerun's names; empty where they
            cannot be read without loading the weights.
        bytes: size of all its weights.
        vocabulary: identifies its tokenizer file; "" without one.
        card: metadata of its model card.
        repository: its repository on the Hub.
    """

    name: str
    path: Path | None = None
    raw: Json = field(default_factory=dict)
    shapes: hub.Shapes = field(default_factory=dict)
    bytes: int = 0
    vocabulary: str = ""
    card: Json = field(default_factory=dict)
    repository: hub.Repository | None = None

    @property
    def kind(self) -> Kind:
        """The kind of drafter."""
        if self.raw.get("gguf"):
            if self.raw.get("own_module"):
                return Kind("mtp", "gguf", OWN_MTP, "mtp")
            if "speculators_model_type" in self.raw:  # a head, in the layout of speculators
                return replace(recognise(Look(self.raw, self.shapes)), format="gguf")
            return Kind("lm", "gguf", "language model", "model")
        return recognise(Look(self.raw, self.shapes, bool(self.vocabulary)))

    @property
    def parameters(self) -> int:
        """Number of parameters; 0 where it is unknown."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def made_for(self) -> str:
        """The target that it names: its verifier, else the base model; "" without one."""
        verifier = inner(inner(self.raw, "speculators_config"), "verifier").get("name_or_path")
        base = self.card.get("base_model")
        base = base[0] if isinstance(base, list) and base else base
        names = (verifier, self.raw.get("base_model_name_or_path"), base)
        return next((one_line(name) for name in names if isinstance(name, str) and name), "")

    @property
    def domains(self) -> tuple[str, ...]:
        """Kinds of text that the model card lists as its domains."""
        value = self.card.get("domains")
        listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        names = [name for name in listed[:MAX_DOMAINS] if isinstance(name, str) and name]
        return tuple(one_line(name).lower() for name in names)

    def summary(self) -> dict[str, Any]:
        """Return the plain values that every JSON report of a drafter has."""
        return {
            "name": self.name,
            "family": self.kind.family,
            "dialect": self.kind.format,
            "bytes": self.bytes,
            "parameters": self.parameters,
            "domains": list(self.domains),
        }


def facts_of(name: str, tensors: bool = True) -> Facts:
    """Return the facts of a local model or drafter, else of a repository on the Hub.

    Args:
        name: a directory, a GGUF file, the name of a cached model, or a Hub id.
        tensors: read the headers of tensors on the Hub.

    Raises:
        LoadError: it does not exist or cannot be read.
    """
    path = local_path(name)
    return facts_at(path, name) if path else _facts_on_hub(name, tensors)


def local_path(name: str) -> Path | None:
    """Return where a model or drafter is on this machine; None if it is not. Raises LoadError."""
    if name.startswith(("ollama:", "lmstudio:")):
        return find_model(name)
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(name).expanduser()
        if path.exists():
            return path
    for model in list_local_models()[0]:
        if model.name == name and not model.trouble:
            return model.path
    for repository, snapshot in cached_repositories():
        has_config = (snapshot / "config.json").is_file()
        if repository == name and has_config and weights_of(snapshot):
            return snapshot
    return None


def weights_of(directory: Path) -> list[Path]:
    """Return the weight files in a directory: safetensors, else pickled ones."""
    files = weight_files(directory)
    files = files or sorted(file for pattern in PICKLED for file in directory.glob(pattern))
    return [file for file in files if file.is_file()]


def facts_at(path: Path, name: str) -> Facts:
    """Return the facts of a directory or a GGUF file. Raises LoadError."""
    if path.is_file() or not (path / "config.json").is_file():
        return _facts_of_gguf(path, name)
    raw = read_object(path / "config.json")
    weights = weights_of(path)
    shapes: hub.Shapes = {}
    for file in weights:
        if file.suffix == ".safetensors":
            shapes |= hub.shapes_of(read_header(file), str(file))
    size = sum(file.stat().st_size for file in weights)
    vocabulary = tokenizer_digest(path / "tokenizer.json")
    if not vocabulary:
        others = [name for name in TOKENIZERS[1:] if (path / name).is_file()]
        vocabulary = f"{others[0]} here" if others else ""
    return Facts(name, path, raw, shapes, size, vocabulary, read_card(path))


def _facts_of_gguf(path: Path, name: str) -> Facts:
    if path.is_dir():
        path = find_model(str(path))
    if path.is_dir():
        raise LoadError(f"{name} is no model: it has neither config.json nor a GGUF file")
    file = skim(path)
    size = sum(part.stat().st_size for part in file.parts)
    vocabulary = token_digest(file.metadata)
    if head_kind(file):
        raw = head_config(file) | {"gguf": True}
        return Facts(name, path, raw, head_shapes(file), size, vocabulary)
    shapes = {key: tuple(tensor.shape) for key, tensor in file.tensors.items()}
    prefix = file.architecture
    blocks = file.metadata.get(f"{prefix}.block_count")
    extra = file.metadata.get(f"{prefix}.nextn_predict_layers")
    if isinstance(blocks, int) and isinstance(extra, int):
        blocks -= extra  # multi-token layers are no layers of the model
    raw = {
        "gguf": True,
        "model_type": prefix,
        "hidden_size": file.metadata.get(f"{prefix}.embedding_length"),
        "num_hidden_layers": blocks,
        "vocab_size": shapes.get("token_embd.weight", (None,))[0],
    }
    return Facts(name, path, raw, shapes, size, vocabulary)


def _facts_on_hub(name: str, tensors: bool) -> Facts:
    found = hub.look_up(name)
    if "config.json" not in found.files:
        raise LoadError(f"{name} on the Hub has no config.json, so its kind is unknown")
    raw = hub.read_object(name, "config.json", found.commit)
    vocabulary = next((f"{t} {found.digests[t]}" for t in TOKENIZERS if found.digests.get(t)), "")
    if vocabulary.startswith("tokenizer.json"):  # as `tokenizer_digest` writes it
        vocabulary = f"json {vocabulary.split()[1]}"
    sizes = [size for file, size in found.files.items() if file.endswith(".safetensors")]
    sizes = sizes or [size for file, size in found.files.items() if is_pickled(file)]
    shapes = hub.read_shapes(found) if tensors else {}
    return Facts(name, None, raw, shapes, sum(sizes), vocabulary, found.card, found)


def read_card(directory: Path) -> Json:
    """Return the metadata of a directory's card; {} where there is none or it is unreadable."""
    try:
        return card_of(read_text(directory / CARD, hub.MAX_JSON_BYTES))[0]
    except LoadError:
        return {}


def license_of(path: Path) -> str:
    """Return the licence that a directory's card or a GGUF file names; "" without one."""
    if path.is_file():
        name = skim(path).metadata.get("general.license")
    else:
        name = read_card(path).get("license")
    return one_line(name).lower() if isinstance(name, str) else ""


def card_of(text: str) -> tuple[Json, str]:
    """Split a card into its metadata and its text."""
    import yaml

    front_matter = r"\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)"
    match = re.match(front_matter, text, re.DOTALL)
    if match is None:
        return {}, text
    try:
        metadata = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        metadata = None
    return (metadata if isinstance(metadata, dict) else {}), text[match.end() :]
