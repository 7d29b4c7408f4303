"""Which GGUF files are models that forerun reads, told from their metadata alone. No torch here."""

from __future__ import annotations

import numpy as np

from forerun.errors import LoadError
from forerun.models.gguf.container import Gguf
from forerun.models.gguf.pretokenizers import find_pretokenizer
from forerun.models.gguf.vocabulary import LACKING, PREFIX, model_of

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
