"""EAGLE-3 heads on disk: read in the layouts they are published in, written in that of speculators.

A head is a directory with config.json, which `eagle_dialects` reads, and tensors, which `stored` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.draft.eagle_dialects import Said, read_dialect, read_flag
from forerun.draft.eagle_head import EagleConfig, EagleHead, check_fit
from forerun.draft.stored import (
    LAYER,
    MOST_LAYERS,
    Json,
    Tensors,
    assemble,
    describe_layer,
    describe_speculator,
    read_config,
    read_layer,
    read_tensors,
    size_of,
    write,
)  # fmt: skip
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.shortlist import maps_of

KIND = "EAGLE-3 head"


def load_head(directory: Path, target: TargetView) -> EagleHead:
    """Read a head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw = read_config(directory, KIND)
    tensors = read_named(directory, KIND)
    try:
        said = read_dialect(raw, target)
        hidden = _target_hidden(tensors, said.boundaries, target)
        layer = read_layer(said.layer, tensors, target.vocab, layers=_layers(said))
        config = EagleConfig(
            layer=layer,
            target_hidden=hidden,
            boundaries=said.boundaries,
            draft_vocab=_draft_vocab(raw, tensors, layer),
            own_embedding="embed_tokens.weight" in tensors,
            norm_before_fc=read_flag(raw, "norm_before_fc", "input_norm.weight" in tensors),
            fc_norm=read_flag(raw, "fc_norm", "fc_norm.0.weight" in tensors),
            norm_before_residual=said.norm_before_residual,
            norm_output=said.norm_output,
            join=read_flag(raw, "join", f"{LAYER}input_proj.weight" in tensors),
            mask_token=said.mask_token,
        )
        check_fit(config, target)
        if config.join and config.norm_before_residual:
            raise LoadError("join and norm_before_residual are both true in config.json: a layer has one of them")
        if "mask_hidden" in tensors and said.mask_token is not None:  # [n * H], with axes of 1 before it or without
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        _set_vocabulary(config, tensors)
        return assemble(lambda: EagleHead(config), tensors, KIND)
    except LoadError as error:
        raise LoadError(f"{directory} holds no EAGLE-3 head that can be used here: {error}") from None


def save_head(head: EagleHead, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Write a head in the speculators layout; `target` is the name or path of its target. Raises OSError."""
    c = head.config
    described = describe_speculator("eagle3", "Eagle3Speculator", describe_layer(c.layer), 3, target)
    own = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.boundaries),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        **({"join": True} if c.join else {}),
        "embed_requires_grad": False,
    }
    write(head, described | own, directory, dtype)


def read_named(directory: Path, kind: str) -> Tensors:
    """All tensors under the names that our heads have for them; buffers of no use are left out. Raises LoadError."""
    named = {}
    for name, tensor in read_tensors(directory, kind).items():
        name = name.removeprefix("model.")
        name = LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        if not name.endswith("rotary_emb.inv_freq"):
            named[name] = tensor
    return named


def _layers(said: Said) -> int:
    """How many layers it has: one, but for a head that drafts in parallel. Raises LoadError."""
    count = 1 if said.mask_token is None else said.layer.get("num_hidden_layers", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_LAYERS:
        raise LoadError(f"num_hidden_layers is {count!r}, not a whole number from 1 to {MOST_LAYERS}")
    return count


def _target_hidden(tensors: Tensors, boundaries: Sequence[int], target: TargetView) -> int:
    """The size of the target's hidden states; fc must read as many of them as there are boundaries."""
    width, fused = size_of(tensors, "fc.weight", 1), len(boundaries) * target.hidden
    if width != fused:
        raise LoadError(
            f"fc.weight reads {width} numbers, but the hidden states {list(boundaries)} of this target have {fused}:"
            " use a head that was trained for it"
        )
    return target.hidden


def _draft_vocab(raw: Json, tensors: Tensors, layer: ModelConfig) -> int:
    size = size_of(tensors, "lm_head.weight", 0)
    if raw.get("draft_vocab_size") not in (None, size):
        raise LoadError(f"draft_vocab_size is {raw['draft_vocab_size']!r}, but lm_head.weight has {size} rows")
    if size > layer.vocab:
        raise LoadError(f"it says {size} tokens, more than the {layer.vocab} of its vocabulary")
    return size


def _set_vocabulary(config: EagleConfig, tensors: Tensors) -> None:
    """Make d2t offsets of ascending ids, whatever is stored, and t2d what follows from it."""
    size, vocab = config.draft_vocab, config.layer.vocab
    stored, order = tensors.pop("d2t", None), torch.arange(size)
    tensors.pop("t2d", None)
    if stored is None and size < vocab:
        raise LoadError(f"it says {size} of {vocab} tokens, but its checkpoint has no d2t that tells which")
    if stored is None:
        return
    if stored.shape != (size,) or stored.is_floating_point():
        raise LoadError(f"d2t is {stored.dtype} of shape {list(stored.shape)}, not {size} whole numbers")
    stored = stored.long()
    ids = stored + order
    if (stored.diff() < 0).any() or ids[-1] >= vocab:  # no offsets of ascending ids: some store the ids themselves
        ids, at = stored.sort()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][at]
    if ids[0] < 0 or ids[-1] >= vocab or (ids.diff() < 1).any():
        raise LoadError(f"d2t does not name {size} different tokens of {vocab}")
    if size < vocab:
        if torch.equal(ids, order):
            print(f"note: d2t of this EAGLE-3 head is all zero: it only says the tokens below {size}", file=sys.stderr)
        tensors["d2t"], tensors["t2d"] = maps_of(ids, vocab)
