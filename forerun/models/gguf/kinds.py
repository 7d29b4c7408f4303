"""What a GGUF file is, told from its header alone: how large, of which kind, and whether it runs here. No torch here.

Hundreds of thousands of tokens and merges are most of a header. Here they are stepped over, and the tokens become one
digest, so that vocabularies can be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import LoadError
from forerun.models.gguf.container import Gguf, Reader, mapped
from forerun.models.gguf.pretokenizers import find_pretokenizer
from forerun.models.gguf.strings import Strings
from forerun.models.gguf.vocabulary import LACKING, PREFIX, model_of
from forerun.models.names import parts_of

READ = ("llama", "mistral3", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3", "gpt2")  # architectures
OTHER_KINDS = {
    "adapter": "an adapter (LoRA)", "mmproj": "a projector of images", "imatrix": "an importance matrix",
    "clip": "a projector of images",
}  # fmt: skip
# what a file may hold that the models read here do not have
REFUSED = {
    "expert_count": "a mixture of experts", "attention.temperature_scale": "scaled attention temperatures",
    "attention.q_lora_rank": "latent attention", "ssm.state_size": "a recurrent state",
    "logit_scale": "scaled logits", "residual_scale": "scaled residuals", "embedding_scale": "scaled embeddings",
    "shortconv.l_cache": "short convolutions", "router_logit_softcapping": "a mixture of experts",
}  # fmt: skip
TOKENS = f"{PREFIX}tokens"
# tokens that only fill up the rows of an embedding, which differ between sizes of one family
PADDING = re.compile(r"\[PAD[0-9]+\]")


class _Skimmer(Reader):
    """A reader whose arrays of strings are empty, but for the tokens: those are one string, their digest."""

    def array(self, key: str) -> Any:
        found = super().array(key)
        if not isinstance(found, Strings):
            return found
        if key != TOKENS:
            return []
        count = len(found)
        while count and PADDING.fullmatch(found[count - 1]):
            count -= 1
        return [hashlib.sha256(found.head(count)).hexdigest()]


def skim(path: Path) -> Gguf:
    """What a file and its further parts hold, without strings in arrays. Raises LoadError, also for a missing part."""
    files = [_read(path.with_name(name)) for name in parts_of(path.name)]
    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    return replace(files[0], tensors=tensors, parts=tuple(file.path for file in files))


def _read(path: Path) -> Gguf:
    try:
        with mapped(path) as data:
            return _Skimmer(path, data).file()
    except FileNotFoundError:
        raise LoadError(f"{path} is not here: download it again") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from None


def token_digest(metadata: Mapping[str, Any]) -> str:
    """A name for the vocabulary of a skimmed file: the same for equal tokens of an equal kind; empty without one."""
    tokens = metadata.get(TOKENS)
    kind = metadata.get(f"{PREFIX}model", "")
    return f"{kind} {tokens[0]}" if isinstance(tokens, list) and tokens else ""


def refused(gguf: Gguf) -> list[tuple[str, str]]:
    """(key, what it means) of all that a file says its model has and forerun does not."""
    keys = {f"{gguf.architecture}.{key}": what for key, what in REFUSED.items()}
    return [(key, what) for key, what in keys.items() if not np.isin(gguf.metadata.get(key, 0), (0, 1)).all()]


def why_not(gguf: Gguf) -> str:
    """Why a file is no model that runs, in a few words; empty if nothing in its header speaks against it."""
    metadata, architecture = gguf.metadata, gguf.architecture
    other = OTHER_KINDS.get(str(metadata.get("general.type"))) or OTHER_KINDS.get(architecture)
    if other:
        return f"is {other}, not a model"
    if architecture not in READ:
        return f"family {architecture or 'without a name'} is not supported"
    if not gguf.tensors:
        return "holds a vocabulary but no weights"
    for key, what in refused(gguf):
        return f"has {what} ({key}), which is not supported"
    try:
        if metadata.get(f"{PREFIX}model") not in (None, *LACKING) and model_of(metadata) == "gpt2":
            find_pretokenizer(metadata.get(f"{PREFIX}pre"))
    except LoadError as error:
        return str(error).partition(";")[0]
    return ""
