"""What Ollama's API says of the model that is served: its name, its file, its sizes."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forerun.catalogue.survey import Survey, survey
from forerun.llm import LLM
from forerun.models.hub import find_model
from forerun.models.local import LocalModel
from forerun.server.answers import started
from forerun.server.kitchen import Kitchen

Json = dict[str, Any]
FOR_GOOD = 36500 * 86400  # seconds that the model stays loaded


class Card:
    """The one model of a server, in the shapes that Ollama's clients read."""

    def __init__(self, kitchen: Kitchen) -> None:
        self.llm: LLM = kitchen.service.llm
        self.name = kitchen.name if ":" in kitchen.name else f"{kitchen.name}:latest"
        self.digest = hashlib.sha256(kitchen.fingerprint.encode()).hexdigest()
        found = LocalModel(
            self.name, find_model(self.llm.config.model), ""
        )  # now: by a request its files may have gone
        self.file: Survey = survey([found])[0]
        self.modified = int(
            Path(self.file.path).stat().st_mtime
        )  # not when it was loaded: replicas say the same

    @property
    def details(self) -> Json:
        """What every entry says of its kind."""
        family, count = self.llm.decoder.config.family, self.file.parameters
        return {
            "parent_model": "",
            "format": "gguf" if self.file.path.endswith(".gguf") else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": _size(count) if count else "",
            "quantization_level": self.file.format.split(" ")[0],
        }

    def listed(self) -> Json:
        """Its entry in /api/tags."""
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": stamp(self.modified),
            "size": self.file.bytes,
            "digest": self.digest,
            "details": self.details,
        }

    def running(self) -> Json:
        """Its entry in /api/ps."""
        listed = self.listed()
        del listed["modified_at"]
        size, on_gpu = self.llm.decoder.weight_bytes, self.llm.decoder.device.type != "cpu"
        return listed | {
            "size": size,
            "size_vram": size if on_gpu else 0,
            "expires_at": stamp(started() + FOR_GOOD),
            "context_length": self.llm.decoder.context,
        }

    def shown(self) -> Json:
        """The answer of /api/show."""
        c, template = (
            self.llm.decoder.config,
            self.llm.tokenizer.template if self.llm.tokenizer else "",
        )
        sizes = {
            "context_length": c.context,
            "embedding_length": c.hidden,
            "block_count": c.layers,
            "feed_forward_length": c.intermediate,
            "attention.head_count": c.heads,
            "attention.head_count_kv": c.kv_heads,
            "vocab_size": c.vocab,
        }
        general = {
            "general.architecture": c.family,
            "general.parameter_count": self.file.parameters,
        }
        return {
            "modelfile": f"FROM {self.name}",
            "parameters": "\n".join(
                f"{name} {value}" for name, value in sorted(self.llm.sampling.items())
            ),
            "template": template,
            "details": self.details,
            "model_info": general | {f"{c.family}.{name}": value for name, value in sizes.items()},
            "capabilities": ["completion", *(["tools"] if "tools" in template else [])],
            "modified_at": stamp(self.modified),
        }


def _size(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def stamp(seconds: float | None = None) -> str:
    """A time as Ollama writes it; now unless it says otherwise."""
    return (
        datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
        .isoformat()
        .replace("+00:00", "Z")
    )
