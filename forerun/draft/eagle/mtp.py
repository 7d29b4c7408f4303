"""Multi-token modules (MTP), as in DeepSeek-V3 (2412.19437) and Qwen3-Next.

The embedding of token t + 1 and the target's normed last state of token t, each normed, are joined,
go through one ordinary decoder layer and a last norm, and the target's lm head predicts token
t + 2. Applied to its own output, the module drafts further; FastMTP (2509.18362) trains for that.
Embedding and lm head are the target's, unless the module predicts part of the vocabulary with an lm
head of its own.

Modules of this file are stored in the `mtp` layout of speculators 0.9, as `forerun train` writes
them. `own_module` reads those inside the target's own checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.eagle.formats import read_draft_vocab
from forerun.draft.eagle.module import EagleModule, HeadParts
from forerun.draft.head_config import read_config, reading
from forerun.draft.head_files import (
    assemble,
    describe_speculator,
    read_layer,
    read_tensors,
    size_of,
    write,
)
from forerun.draft.head_modules import LM_HEAD, JoinedLayer, normalise_token_map
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.models.config import TRAINED_MTP_PREFIX, ModelConfig

MTP = "MTP module"


class _MtpLayer(JoinedLayer):
    """A joined layer with the norms of a pair and the norm after it."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.token_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.hidden_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.final_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)


class MtpModule(EagleModule):
    """A multi-token module with the tensor names of the speculators format."""

    title = MTP
    program_prefix = "mtp_layers"

    def __init__(
        self, layer: ModelConfig, target_layers: int, draft_vocab: int | None = None
    ) -> None:
        """`draft_vocab` is the number of tokens that it predicts; None for all."""
        super().__init__()
        self.layer, self.aux_hidden_layers = layer, (target_layers,)
        self.mtp_layers = nn.ModuleList([_MtpLayer(layer)])
        self.draft_vocab = draft_vocab or layer.vocab
        self.init_token_map(self.draft_vocab, layer.vocab)
        if self.d2t is not None:
            self.lm_head = nn.Linear(layer.hidden, self.draft_vocab, bias=False)

    @property
    def joined(self) -> _MtpLayer:
        """The only layer."""
        (layer,) = self.mtp_layers
        assert isinstance(layer, _MtpLayer)
        return layer

    def begin(self, norm: Tensor) -> None:
        """Start training from the target's norm [H] before its lm head."""
        with torch.no_grad():
            self.joined.final_layernorm.weight.copy_(norm)

    def parts(self) -> HeadParts:
        layer = self.joined
        return HeadParts(
            layer=layer,
            embed_norm=layer.token_layernorm,
            state_norm=layer.hidden_layernorm,
            join=layer.input_proj,
            attention_norm=layer.input_layernorm,
            last_norm=layer.final_layernorm,
            carried=[layer.final_layernorm],
        )


def save_module(module: MtpModule, directory: Path, target: str | None, dtype: torch.dtype) -> None:
    """Write a module; `target` is the name of its target. Raises OSError."""
    described = describe_speculator("mtp", "MTPDraftModel", module.layer, 3, target)
    fields = {"num_nextn_predict_layers": 1, "draft_vocab_size": module.draft_vocab}
    write(module, described | fields, directory, dtype)


def load_module(directory: Path, target: TargetView) -> MtpModule:
    """Load a module for this target, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, MTP), read_tensors(directory, MTP)
    with reading(directory, MTP):
        layer = raw.get("transformer_layer_config")
        if raw.get("speculators_model_type") != "mtp" or not isinstance(layer, dict):
            raise LoadError("config.json does not describe one of the speculators layout")
        layers = raw.get("num_nextn_predict_layers", 1)
        if layers != 1:
            raise LoadError(f"it has {layers!r} layers: only modules of one are supported")
        config = read_layer(layer, tensors, target.vocab, TRAINED_MTP_PREFIX)
        rows = size_of(tensors, LM_HEAD, 0) if LM_HEAD in tensors else config.vocab
        draft_vocab = read_draft_vocab(raw, rows, config.vocab)
        normalise_token_map(tensors, draft_vocab, config.vocab)
        return assemble(lambda: MtpModule(config, target.layers, draft_vocab), tensors, MTP)
