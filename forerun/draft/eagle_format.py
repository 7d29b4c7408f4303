"""EAGLE-3 heads on disk: read in the layouts they are published in, written in that of speculators.

A head is a directory with config.json, which `eagle_dialects` reads, and *.safetensors or pytorch_model*.bin. Every
tensor must be there, have the shape that is asked for, and be asked for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.draft.eagle_dialects import LAYER, Json, read_dialect, read_flag, read_layer, size_of
from forerun.draft.eagle_head import EagleConfig, EagleHead, check_fit
from forerun.draft.view import TargetView
from forerun.errors import ForerunError, LoadError
from forerun.models.config import ModelConfig

Tensors = dict[str, Tensor]

VERSION = "0.9.0"  # of the speculators format


def load_head(directory: Path, target: TargetView) -> EagleHead:
    """Read a head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw = _read_config(directory / "config.json")
    tensors = _read_tensors(directory)
    try:
        said = read_dialect(raw, target)
        hidden = _target_hidden(tensors, said.boundaries, target)
        layer = read_layer(said.layer, tensors, target.vocab)
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
        )
        check_fit(config, target)
        _set_vocabulary(config, tensors)
        return _assemble(config, tensors)
    except LoadError as error:
        raise LoadError(f"{directory} holds no EAGLE-3 head that can be used here: {error}") from None


def save_head(head: EagleHead, directory: Path, target: str | None = None) -> None:
    """Write a head in the speculators layout; `target` is the name or path of its target. Raises ForerunError."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    text = json.dumps(_described(head.config, target), indent=2) + "\n"
    weights, settings = (directory / f".{name}.part" for name in ("model.safetensors", "config.json"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, weights, metadata={"format": "pt"})
        settings.write_text(text, encoding="utf-8")
        os.replace(weights, directory / "model.safetensors")
        os.replace(settings, directory / "config.json")
    except (OSError, SafetensorError) as error:
        raise ForerunError(f"the EAGLE-3 head cannot be written to {directory}: {error}") from None
    finally:
        with suppress(OSError):
            weights.unlink(missing_ok=True)
            settings.unlink(missing_ok=True)


def _described(config: EagleConfig, target: str | None) -> Json:
    """config.json of the speculators layout."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "transformer_layer_config": _described_layer(config.layer),
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "tie_word_embeddings": False,
    }


def _described_layer(c: ModelConfig) -> Json:
    """The decoder layer as transformers describes it, nothing left to defaults."""
    rope = c.ropes[0].parameters
    window = {"layer_types": ["sliding_attention"], "sliding_window": c.windows[0]} if c.windows[0] else {}
    return window | {
        "model_type": c.family, "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_hidden_layers": 1,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab, "max_position_embeddings": c.context, "rms_norm_eps": c.norm_eps,
        "rope_theta": rope["rope_theta"], "rope_parameters": rope, "hidden_act": c.raw.get("hidden_act", "silu"),
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip


def _read_config(path: Path) -> Json:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path.parent} is no EAGLE-3 head: it has no config.json; give the head's directory") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise LoadError(f"{path} does not hold an object: download it again")
    return raw


def _read_tensors(directory: Path) -> Tensors:
    """All tensors of the directory, under the names that `EagleHead` has for them; buffers of no use are left out."""
    paths = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))
    if not paths:
        raise LoadError(f"{directory} is no EAGLE-3 head: it has neither *.safetensors nor pytorch_model*.bin")
    held: Tensors = {}
    for path in paths:
        try:
            read = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise LoadError(f"{path} cannot be read: {str(error).splitlines()[0]}; download it again") from None
        held |= read
    named = {}
    for name, tensor in held.items():
        name = name.removeprefix("model.")
        name = LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        if not name.endswith("rotary_emb.inv_freq"):
            named[name] = tensor.float() if tensor.is_floating_point() else tensor
    return named


def _unpickle(path: Path) -> Tensors:
    """A file of tensors by torch.save; nothing in it is run."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling foreign bytes may raise
        raise ValueError(str(error) or repr(error)) from None
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise ValueError("it does not hold tensors by name")
    return held


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
        tensors["d2t"], tensors["t2d"] = ids - order, torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


def _assemble(config: EagleConfig, tensors: Tensors) -> EagleHead:
    with torch.device("meta"):
        head = EagleHead(config)
    expected = head.state_dict()
    missing, extra = sorted(expected.keys() - tensors), sorted(tensors.keys() - expected)
    if missing:
        raise LoadError(f"its checkpoint has no {_few(missing)}: it is incomplete, or of another kind")
    if extra:
        raise LoadError(f"its checkpoint has {_few(extra)}, which an EAGLE-3 head of this layout does not have")
    for name, wanted in expected.items():
        held = tensors[name]
        if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
            raise LoadError(
                f"{name} is {held.dtype} of shape {list(held.shape)}, but config.json asks for {list(wanted.shape)}"
            )
        if held.is_floating_point() and not held.isfinite().all():
            raise LoadError(f"{name} holds numbers that are not finite: download it again")
    head.load_state_dict(tensors, assign=True)
    return head.requires_grad_(False)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
