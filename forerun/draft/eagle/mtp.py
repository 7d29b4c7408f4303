"""Multi-token modules: a decoder layer behind the target's last state that says the token after
next.

As in DeepSeek-V3 (2412.19437) and Qwen3-Next: the pair of the embedding of token t + 1 and the
target's normalised last state of token t, each normed, are joined, go through one ordinary decoder
layer and a last norm, and the target's own head says token t + 2. Applied again to its own
normalised output it drafts further; FastMTP (2509.18362) trains for that. Embedding and head are
the target's: nothing of them is stored, unless it says part of the vocabulary (`Head`), with a head
of its own for that.

On disk they are written and read in the `mtp` layout of speculators 0.9, and read out of targets'
own checkpoints: MiMo (2505.07608) has `model.mtp_layers.*` beside the layers that it answers with:
each is a layer like those, which joins a pair with the state first. Its own reader leaves them out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.eagle.module import EagleModule, Parts
from forerun.draft.head_files import (
    assemble,
    describe_speculator,
    read_config,
    read_layer,
    read_tensors,
    reading,
    size_of,
    write,
)
from forerun.draft.head_modules import HEAD, JoinedLayer, check_map
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.models.config import MTP_PREFIXES, Json, ModelConfig
from forerun.models.weights import Checkpoint

KIND = "MTP module"
PREFIX = "mtp_layers.0."


class _Layer(JoinedLayer):
    """The norms of a pair, what joins it, a decoder layer, and the norm that comes after it."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.token_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.hidden_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.final_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)


class MtpModule(EagleModule):
    """The module as it is trained and stored; what it makes of a pair is normalised already."""

    title = KIND
    inner = "mtp_layers"

    def __init__(
        self, layer: ModelConfig, target_layers: int, draft_vocab: int | None = None
    ) -> None:
        """`draft_vocab`: tokens it can say, with a map where they are fewer than the target has;
        None: all."""
        super().__init__()
        self.layer, self.aux_hidden_layers = layer, (target_layers,)
        self.mtp_layers = nn.ModuleList([_Layer(layer)])
        self.draft_vocab = draft_vocab or layer.vocab
        self.list_tokens(self.draft_vocab, layer.vocab)
        self.lm_head = (
            nn.Linear(layer.hidden, self.draft_vocab, bias=False) if self.d2t is not None else None
        )

    def begin(self, norm: Tensor) -> None:
        """Begin with the target's own norm [H] before its head."""
        with torch.no_grad():
            self.joined.final_layernorm.weight.copy_(norm)

    def leave(self, x: Tensor) -> Tensor:
        out: Tensor = self.joined.final_layernorm(x)
        return out

    def parts(self) -> Parts:
        own = self.joined
        return Parts(
            layer=own, embed_norm=own.token_layernorm, state_norm=own.hidden_layernorm, join=own.input_proj,
            attention_norm=own.input_layernorm, last_norm=own.final_layernorm, carried=[own.final_layernorm],
        )  # fmt: skip

    @property
    def joined(self) -> _Layer:
        """Its layer, with the norms around it."""
        (layer,) = self.mtp_layers
        assert isinstance(layer, _Layer)
        return layer


def save_module(module: MtpModule, directory: Path, target: str | None, dtype: torch.dtype) -> None:
    """Write a module; `target` is the name of its target. Raises OSError."""
    described = describe_speculator("mtp", "MTPDraftModel", module.layer, 3, target)
    own = {"num_nextn_predict_layers": 1, "draft_vocab_size": module.draft_vocab}
    write(module, described | own, directory, dtype)


def load_module(directory: Path, target: TargetView) -> MtpModule:
    """Read a module for this target, in float32. Raises LoadError."""
    raw = read_config(directory, KIND)
    read = _read_own if raw.get("model_type") in MTP_PREFIXES else _read
    with reading(directory, KIND):
        return read(directory, raw, target)


def _read(directory: Path, raw: Json, target: TargetView) -> MtpModule:
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    tensors = read_tensors(directory, KIND)
    if kind != "mtp" or not isinstance(layer, dict):
        raise LoadError("config.json does not describe one of the speculators layout")
    if raw.get("num_nextn_predict_layers", 1) != 1:
        raise LoadError(
            f"it has {raw['num_nextn_predict_layers']!r} layers: only modules of one are supported"
        )
    config = read_layer(layer, tensors, target.vocab, PREFIX)
    said = size_of(tensors, HEAD, 0) if HEAD in tensors else config.vocab
    if raw.get("draft_vocab_size") not in (None, said):
        raise LoadError(
            f"draft_vocab_size is {raw['draft_vocab_size']!r}, but its head has {said} rows"
        )
    if said > config.vocab:
        raise LoadError(f"it says {said} tokens, more than the {config.vocab} of its vocabulary")
    check_map(tensors, said, config.vocab)
    return assemble(lambda: MtpModule(config, target.layers, said), tensors, KIND)


def _read_own(directory: Path, raw: Json, target: TargetView) -> MtpModule:
    """The first multi-token layer of a target's checkpoint."""
    before, checkpoint = f"{MTP_PREFIXES[raw['model_type']]}0.", Checkpoint(directory)
    names = [name for name in checkpoint.where if name.startswith(before)]
    if not names:
        raise LoadError("its checkpoint has no multi-token layers; some copies leave them out")
    if (raw.get("hidden_size"), raw.get("num_hidden_layers")) != (target.hidden, target.layers):
        raise LoadError(
            "its multi-token layers are for itself alone, and the target is another model"
        )
    tensors = {
        PREFIX + name.removeprefix(before): checkpoint.floats(name).float() for name in names
    }
    join = f"{PREFIX}input_proj.weight"
    if join in tensors:
        tensors[join] = torch.cat(tensors[join].chunk(2, 1)[::-1], 1).contiguous()
    c = target.config
    layer = replace(c, layers=1, rope_of=c.rope_of[-1:], windows=(None,), sinks=())
    return assemble(lambda: MtpModule(layer, target.layers), tensors, KIND)
