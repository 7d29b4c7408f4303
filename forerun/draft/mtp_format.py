"""Multi-token modules on disk: written and read in the `mtp` layout of speculators 0.9, and read out of targets' own
checkpoints.

MiMo (2505.07608) has `model.mtp_layers.*` beside the layers that it answers with: each is a layer like those, which
joins a pair with the state first. Its own reader leaves them out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from forerun.draft.listed import check_map
from forerun.draft.mtp import MtpModule
from forerun.draft.stored import (
    Json,
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
from forerun.models.checkpoint import Checkpoint
from forerun.models.families import OWN_DRAFTER

KIND = "MTP module"
PREFIX = "mtp_layers.0."


def save_module(module: MtpModule, directory: Path, target: str | None, dtype: torch.dtype) -> None:
    """Write a module; `target` is the name of its target. Raises OSError."""
    described = describe_speculator("mtp", "MTPDraftModel", describe_layer(module.layer), 3, target)
    own = {"num_nextn_predict_layers": 1, "draft_vocab_size": module.draft_vocab}
    write(module, described | own, directory, dtype)


def load_module(directory: Path, target: TargetView) -> MtpModule:
    """Read a module for this target, in float32. Raises LoadError."""
    raw = read_config(directory, KIND)
    read = _read_own if raw.get("model_type") in OWN_DRAFTER else _read
    try:
        return read(directory, raw, target)
    except LoadError as error:
        raise LoadError(f"{directory} holds no MTP module that can be used here: {error}") from None


def _read(directory: Path, raw: Json, target: TargetView) -> MtpModule:
    kind, layer, tensors = (
        raw.get("speculators_model_type"), raw.get("transformer_layer_config"), read_tensors(directory, KIND),
    )  # fmt: skip
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


def _read_own(directory: Path, raw: Json, target: TargetView) -> MtpModule:
    """The first multi-token layer of a target's checkpoint."""
    before, checkpoint = f"{OWN_DRAFTER[raw['model_type']]}0.", Checkpoint(directory)
    names = [name for name in checkpoint.where if name.startswith(before)]
    if not names:
        raise LoadError("its checkpoint has no multi-token layers; some copies leave them out")
    if (raw.get("hidden_size"), raw.get("num_hidden_layers")) != (target.hidden, target.layers):
        raise LoadError("its multi-token layers are for itself alone, and the target is another model")
    tensors = {PREFIX + name.removeprefix(before): checkpoint.floats(name).float() for name in names}
    join = f"{PREFIX}input_proj.weight"
    if join in tensors:
        tensors[join] = torch.cat(tensors[join].chunk(2, 1)[::-1], 1).contiguous()
    c = target.config
    layer = replace(c, layers=1, rope_of=c.rope_of[-1:], windows=(None,), sinks=())
    return assemble(lambda: MtpModule(layer, target.layers), tensors, KIND)
