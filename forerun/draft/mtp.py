"""Multi-token modules: a decoder layer behind the target's last state that says the token after next.

As in DeepSeek-V3 (2412.19437) and Qwen3-Next: the pair of the embedding of token t + 1 and the target's normalised last
state of token t, each normed, are joined, go through one ordinary decoder layer and a last norm, and the target's own
head says token t + 2. Applied again to its own normalised output it drafts further; FastMTP (2509.18362) trains for
that. Embedding and head are the target's: nothing of them is stored, unless it says part of the vocabulary (`Listed`),
with a head of its own for that.

A directory is written, and read, in the `mtp` layout of speculators 0.9.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.layers import JoinedLayer
from forerun.draft.listed import check_map
from forerun.draft.pair_head import PairHead, Parts
from forerun.draft.stored import (
    assemble,
    describe_layer,
    describe_speculator,
    read_config,
    read_layer,
    read_tensors,
    size_of,
    write,
)
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend

KIND = "MTP module"
PREFIX = "mtp_layers.0."


class _Layer(JoinedLayer):
    """The norms of a pair, what joins it, a decoder layer, and the norm that comes after it."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.token_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.hidden_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.final_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        return self.along(self.token_layernorm(embedded), self.hidden_layernorm(state), rotation, attend)


class MtpModule(PairHead):
    """The module as it is trained and stored; what it makes of a pair is normalised already."""

    inner = "mtp_layers"

    def __init__(self, layer: ModelConfig, target_layers: int, draft_vocab: int | None = None) -> None:
        """`draft_vocab`: tokens it can say, with a map where they are fewer than the target has; None: all."""
        super().__init__()
        self.layer, self.boundaries = layer, (target_layers,)
        self.mtp_layers = nn.ModuleList([_Layer(layer)])
        self.draft_vocab = draft_vocab or layer.vocab
        self.list_tokens(self.draft_vocab, layer.vocab)
        self.lm_head = nn.Linear(layer.hidden, self.draft_vocab, bias=False) if self.d2t is not None else None

    def begin(self, norm: Tensor) -> None:
        """Begin with the target's own norm [H] before its head."""
        with torch.no_grad():
            self.joined.final_layernorm.weight.copy_(norm)

    def attach(self, target: TargetView) -> None:
        c = self.layer
        if (c.hidden, c.vocab, self.boundaries) != (target.hidden, target.vocab, (target.layers,)):
            raise LoadError(
                f"this MTP module is for a target with states of {c.hidden} and {c.vocab} tokens, this one has"
                f" {target.hidden} and {target.vocab}: use a module that was trained for it"
            )
        self.target = target

    def fuse(self, features: Tensor) -> Tensor:
        return self.target.normalise(features)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        return self.leave(self.mtp_layers[0](embedded, state, rotation, attend))

    def leave(self, x: Tensor) -> Tensor:
        out: Tensor = self.joined.final_layernorm(x)
        return out

    def parts(self) -> Parts:
        own = self.joined
        return Parts(
            own.token_layernorm, own.hidden_layernorm, own.input_proj, own.input_layernorm, own.self_attn,
            own.post_attention_layernorm, own.mlp, own.final_layernorm, [own.final_layernorm], self.lm_head,
        )  # fmt: skip

    @property
    def joined(self) -> _Layer:
        """Its layer, with the norms around it."""
        (layer,) = self.mtp_layers
        assert isinstance(layer, _Layer)
        return layer

    def logits(self, made: Tensor) -> Tensor:
        out: Tensor = self.target.head(made) if self.lm_head is None else self.lm_head(made)
        return out

    def state(self, made: Tensor) -> Tensor:
        return made


def save_module(module: MtpModule, directory: Path, target: str | None, dtype: torch.dtype) -> None:
    """Write a module; `target` is the name of its target. Raises OSError."""
    described = describe_speculator("mtp", "MTPDraftModel", describe_layer(module.layer), 3, target)
    own = {"num_nextn_predict_layers": 1, "draft_vocab_size": module.draft_vocab}
    write(module, described | own, directory, dtype)


def load_module(directory: Path, target: TargetView) -> MtpModule:
    """Read a module for this target, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    try:
        kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
        if kind != "mtp" or not isinstance(layer, dict):
            raise LoadError("config.json does not describe one of the speculators layout")
        if raw.get("num_nextn_predict_layers", 1) != 1:
            raise LoadError(f"it has {raw['num_nextn_predict_layers']!r} layers: only modules of one are supported")
        config = read_layer(layer, tensors, target.vocab, PREFIX)
        said = size_of(tensors, "lm_head.weight", 0) if "lm_head.weight" in tensors else config.vocab
        if raw.get("draft_vocab_size") not in (None, said):
            raise LoadError(f"draft_vocab_size is {raw['draft_vocab_size']!r}, but its head has {said} rows")
        if said > config.vocab:
            raise LoadError(f"it says {said} tokens, more than the {config.vocab} of its vocabulary")
        check_map(tensors, said, config.vocab)
        return assemble(lambda: MtpModule(config, target.layers, said), tensors, KIND)
    except LoadError as error:
        raise LoadError(f"{directory} holds no MTP module that can be used here: {error}") from None
