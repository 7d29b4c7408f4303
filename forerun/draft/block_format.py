"""Block drafters on disk: written in the layout of speculators 0.9 (`dspark`, or `dflash` without Markov and
confidence heads), read in others too (`block_dialects`).

Whether slot k says the token behind its own position or the one at it is a flag of config.json, and a head that is read
the wrong way still drafts, but is never right. Where the flag is not there, slots say the token at their own position:
files of both kinds from before the flag existed are meant so. What older files hold of an embedding and a head is the
drafter's own, unless it is the target's, which is borrowed then.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from forerun.draft.block_dialects import NON_CAUSAL, as_speculators, windows_of
from forerun.draft.block_head import BlockHead, check_fit
from forerun.draft.block_shapes import BlockConfig, read_law
from forerun.draft.borrowed import EMBEDDING, HEAD, borrow, check_fused, check_map
from forerun.draft.fields import read_bool, read_ids, read_whole
from forerun.draft.stored import (
    MOST_LAYERS,
    Tensors,
    assemble,
    describe_speculator,
    read_config,
    read_layer,
    read_tensors,
    reading,
    write,
)  # fmt: skip
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.families import Json, is_whole

KIND = BlockHead.title
LARGEST_BLOCK = 64
TRUST = "confidence_head.proj.weight"


def save_block(head: BlockHead, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Write a head; `target` is the name or path of its target. Raises OSError."""
    c = head.config
    described = describe_speculator("dspark", "DSparkSpeculator", c.layer, c.depth, target)
    own = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "aux_hidden_state_layer_ids": list(c.boundaries),
        "block_size": c.block,
        "mask_token_id": c.mask_token,
        "sample_from_anchor": c.sample_from_anchor,
        NON_CAUSAL: not c.window_causal,
        "markov_rank": c.law.rank if c.law else 0,
        "markov_head_type": c.law.kind if c.law else "vanilla",
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov,
    }
    write(head, described | own, directory, dtype)


def load_block(directory: Path, target: TargetView) -> BlockHead:
    """Read a head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    with reading(directory, KIND):
        borrow(tensors, target)
        config = _config(as_speculators(raw), tensors, target)
        check_fit(config, target)
        check_map(tensors, config.draft_vocab, config.layer.vocab)
        return assemble(lambda: BlockHead(config), tensors, KIND)


def _config(raw: Json, tensors: Tensors, target: TargetView) -> BlockConfig:
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise LoadError("transformer_layer_config in config.json is not an object: it describes no layers")
    made_for = layer.get("num_target_layers")
    if is_whole(made_for) and made_for != target.layers:
        raise LoadError(f"it was made for a target of {made_for} layers, this one has {target.layers}")
    layers, ids = _layers(raw, tensors, target.vocab), read_ids(raw, "aux_hidden_state_layer_ids")
    check_fused(KIND, target, ids, tensors)
    vocab = raw.get("draft_vocab_size")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    law, trusts = read_law(raw, shapes), shapes.get(TRUST, (0, 0))[-1]
    config = BlockConfig(
        layer=layers,
        target_hidden=target.hidden,
        boundaries=ids,
        block=read_whole(raw, "block_size", 1, LARGEST_BLOCK),
        mask_token=read_whole(raw, "mask_token_id", 0, layers.vocab - 1),
        window_causal=any(layers.windows) and not read_bool(raw, NON_CAUSAL, False),
        sample_from_anchor=read_bool(raw, "sample_from_anchor", read_bool(raw, "query_zero_predicts_next", False)),
        draft_vocab=layers.vocab if vocab is None else read_whole(raw, "draft_vocab_size", 1, layers.vocab),
        own_embedding=EMBEDDING in tensors,
        own_head=HEAD in tensors,
        law=law,
        confidence=read_bool(raw, "enable_confidence_head", TRUST in tensors),
        confidence_with_markov=read_bool(raw, "confidence_head_with_markov", trusts > layers.hidden),
    )
    if config.depth < 1:
        raise LoadError("block_size 1 leaves no slot that says a token, since the anchor's says none")
    if config.confidence_with_markov and law is None:
        raise LoadError("confidence_head_with_markov in config.json is true, but there is no Markov head")
    if config.draft_vocab < layers.vocab and not config.own_head:
        raise LoadError(
            f"it says {config.draft_vocab} of {layers.vocab} tokens, but its checkpoint has no lm_head.weight"
        )
    return config


def _layers(raw: Json, tensors: Tensors, vocab: int) -> ModelConfig:
    """The decoder layers that transformer_layer_config describes."""
    layer, windows = raw["transformer_layer_config"], windows_of(raw)
    count = read_whole(layer, "num_hidden_layers", 1, MOST_LAYERS)
    config = read_layer({"model_type": "qwen3"} | layer | {"layer_types": None}, tensors, vocab, layers=count)
    return replace(config, windows=tuple(windows)) if windows else config
