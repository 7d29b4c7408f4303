"""Checkpoints of draft heads as they are published: configs, tensors, and formulas of those without
another reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny
from tests.draft.twins import last_states, target

HIDDEN, VOCAB = 32, tiny.VOCAB
Tensors = dict[str, Tensor]


@dataclass
class Published:
    """A checkpoint: its --draft kind, config.json, tensors by their published names, file name, and
    the formula of logits, given the target's last states [n, H] and the tokens from the root on."""

    draft: str
    raw: dict[str, Any]
    tensors: Tensors
    formula: Callable[[Tensor, Sequence[int]], Tensor] | None = None
    file: str = "model.safetensors"

    def write(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.raw))
        tensors = {
            name: (t.float() if t.dtype == torch.float64 else t).clone()
            for name, t in self.tensors.items()
        }
        path = directory / self.file
        if path.suffix == ".safetensors":
            save_file(tensors, path)
        else:
            torch.save(tensors, path)
        return directory


class PublishedTwin:
    """The formula of published heads, computed from their checkpoint alone."""

    def __init__(self, head: Any) -> None:
        self.formula = head.published.formula

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        return self.formula(last_states(tokens[:-1])[first:], (tokens[-1], *path))


def of_head(
    draft: str,
    head: Any,
    raw: dict[str, Any],
    *,
    layer: str = "",
    prefix: str = "",
    file: str = "model.safetensors",
    more: Tensors | None = None,
) -> Published:
    """Return a head under published names; `layer` is the prefix of its first layer there."""
    named = {
        prefix + (name.replace("layers.0.", layer) if layer else name): tensor
        for name, tensor in head.state_dict().items()
    }
    return Published(draft, raw, named | (more or {}), file=file)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that are exact in float32."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 1_000_003)
    return torch.randn(shape, generator=generator).mul(0.5 if len(shape) > 1 else 0.2).double()


# ---------------------------------------------------------------- EAGLE

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64, max_position_embeddings=128,
)  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6} | SIZES
SAFEAILAB = LLAMA | {"rms_norm_eps": 1e-5, "draft_vocab_size": 40}
TWO_LAYERS = LLAMA | {"num_hidden_layers": 2}
IDS = {"eagle_aux_hidden_state_layer_ids": [2, 0, 3]}
PEAGLE_SPECULATORS = {
    "speculators_model_type": "peagle", "mask_token_id": 3, "transformer_layer_config": TWO_LAYERS,
} | IDS  # fmt: skip
PEAGLE_VLLM = TWO_LAYERS | {
    "architectures": ["PeagleLlamaForCausalLM"], "pard_token": 3, "parallel_drafting": True,
    "eagle_config": IDS,
}  # fmt: skip
PEAGLE_SPECFORGE = TWO_LAYERS | {"architectures": ["PEagleDraftModel"], "mask_token_id": 3} | IDS


def eagle3(raw: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Published]:
    """An EAGLE-3 head in SafeAILab's layout, or with changes of its config."""
    settings = {
        "draft_vocab": 40, "layer": {"rms_norm_eps": 1e-5}, "aux_hidden_layers": (2, 1, 0),
    }  # fmt: skip
    head = tiny.eagle(tiny.eagle_config("llama", **settings | changes))
    return head, of_head("eagle3", head, SAFEAILAB | (raw or {}), layer="midlayer.")


def eagle1(raw: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Published]:
    """An EAGLE-1 head as its authors publish it, with a copy of the target's embedding."""
    head = tiny.eagle1("llama", **changes)
    return head, as_eagle1(head, raw)


def as_eagle1(head: Any, raw: dict[str, Any] | None = None) -> Published:
    table = {"embed_tokens.weight": target().embed(torch.arange(VOCAB)).half()}
    copied = {} if head.embed_tokens is not None else table
    return of_head("eagle", head, LLAMA | (raw or {}), more=copied)


def eagle1_of_vllm(**changes: Any) -> tuple[Any, Published]:
    """An EAGLE-1 head in vLLM's layout, which has the layer's fields in an object of their own."""
    head = tiny.eagle1("llama", **changes)
    raw = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": LLAMA}
    tensors = {n if n[:2] == "fc" else f"model.{n}": t for n, t in head.state_dict().items()}
    return head, Published("eagle", raw, tensors)


# ---------------------------------------------------------------- block drafters

QWEN3 = SIZES | dict(model_type="qwen3", num_hidden_layers=2, head_dim=16, rms_norm_eps=1e-6)
DFLASH = {
    "speculators_model_type": "dflash", "transformer_layer_config": QWEN3, "block_size": 4,
    "mask_token_id": 0, "aux_hidden_state_layer_ids": [2, 0, 3],
}  # fmt: skip
MARKOV = {
    "markov_rank": 5, "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
DSPARK = DFLASH | MARKOV | {"speculators_model_type": "dspark"}
FLAT = QWEN3 | {"num_target_layers": 3, "layer_types": ["full_attention"] * 2}
DEEPSPEC = FLAT | {
    "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, -1, 2], "block_size": 4,
    "mask_token_id": 0, "num_anchors": 512,
}  # fmt: skip
ZLAB_OWN = {"target_layer_ids": [1, -1, 2], "mask_token_id": 0}
ZLAB = FLAT | {
    "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": ZLAB_OWN,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
}  # fmt: skip
SPECFORGE_OWN = ZLAB_OWN | {
    "block_size": 4, "projector_type": "dspark", "markov_rank": 5, "attention_mode": "gqa",
}  # fmt: skip
SPECFORGE = FLAT | {"architectures": ["DSparkDraftModel"], "dflash_config": SPECFORGE_OWN}
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
    "use_sliding_window": True,
}  # fmt: skip


def block(raw: dict[str, Any], **changes: Any) -> tuple[Any, Published]:
    """A block drafter with this config.json; `changes` are the shape that it describes."""
    head = tiny.block(tiny.block_config("llama", **changes))
    return head, of_head("block", head, raw)


# ---------------------------------------------------------------- MLP speculators


def ibm(
    tied: bool = False, scaled: bool = False, prefix: str = "speculator.", levels: int = 3
) -> Published:
    """IBM's accelerators; 2404.19124, section 2."""
    inner = 24
    raw = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN,
        "inner_dim": inner, "n_candidates": 5, "n_predict": levels, "scale_input": scaled, "tie_weights": tied,
        "top_k_tokens_per_head": [4, 3, 2][:levels], "torch_dtype": "float16", "vocab_size": VOCAB,
    }  # fmt: skip
    own = {}
    for i in range(levels):
        j, k = (0, min(i, 1)) if tied else (i, i)
        own[f"emb.{i}.weight"] = random(VOCAB, inner, seed=j)
        own[f"proj.{i}.weight"] = random(inner, inner if i else HIDDEN, seed=10 + k)
        own[f"ln.{i}.weight"] = 1 + random(inner, seed=20 + j)
        own[f"ln.{i}.bias"] = random(inner, seed=30 + j)
        own[f"head.{i}.weight"] = random(VOCAB, inner, seed=40 + j)

    def formula(states: Tensor, tokens: Sequence[int]) -> Tensor:
        weight = 0.5 ** (0.5 / levels)
        s = rms(states[-1]) / math.sqrt(2) if scaled else states[-1]
        for i, token in enumerate(tokens):
            z = own[f"emb.{i}.weight"][token] * math.sqrt(1 - weight**2) * math.sqrt(inner / 2)
            x = rms(weight * (own[f"proj.{i}.weight"] @ s) + z)
            s = gelu(x * own[f"ln.{i}.weight"] + own[f"ln.{i}.bias"])
        return own[f"head.{len(tokens) - 1}.weight"] @ s

    return Published(
        "mlp", raw, {f"{prefix}{name}": tensor for name, tensor in own.items()}, formula
    )


# ---------------------------------------------------------------- Medusa


def medusa(layers: int = 1, prefix: str = "", file: str = "medusa_lm_head.pt") -> Published:
    """FasterDecoding's heads, whose config.json says two heads, however many there are."""
    raw = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }  # fmt: skip
    own = {}
    for i in range(3):
        for j in range(layers):
            own[f"{i}.{j}.linear.weight"] = random(HIDDEN, HIDDEN, seed=10 * i)
            own[f"{i}.{j}.linear.bias"] = random(HIDDEN, seed=10 * i)
        own[f"{i}.{layers}.weight"] = random(VOCAB, HIDDEN, seed=10 * i)

    def formula(states: Tensor, tokens: Sequence[int]) -> Tensor:
        i, x = len(tokens) - 1, states[-1]
        for j in range(layers):
            y = own[f"{i}.{j}.linear.weight"] @ x + own[f"{i}.{j}.linear.bias"]
            x = x + y / (1 + (-y).exp())
        return own[f"{i}.{layers}.weight"] @ x

    return Published(
        "medusa", raw, {f"{prefix}{name}": tensor for name, tensor in own.items()}, formula, file
    )


def medusa_of_vllm(
    draft_vocab: int = VOCAB,
    all_rows: bool = False,
    bias: bool = False,
    shared: bool = False,
    scale: float = 1.0,
) -> Published:
    """vLLM's heads: some predict only the `draft_vocab` tokens of their token_map, and of these
    some (`all_rows`) store an lm head with rows for all tokens."""
    raw = {
        "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "max_paths": 64, "medusa_fc_bias": bias,
        "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "original_lm_head": shared, "topk": 10,
        "truncated_vocab_size": draft_vocab, "vocab_size": VOCAB, "logit_scale": scale,
    }  # fmt: skip
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab]
    own = {} if draft_vocab == VOCAB else {"token_map": ids}
    for i in range(3):
        own[f"blocks.{i}.layers.0.weight"] = random(HIDDEN, HIDDEN, seed=i)
        if bias:
            own[f"blocks.{i}.layers.0.bias"] = random(HIDDEN, seed=i)
        if not shared or i == 0:
            own[f"lm_heads.{i}.weight"] = random(
                VOCAB if all_rows else draft_vocab, HIDDEN, seed=10 + i
            )

    def formula(states: Tensor, tokens: Sequence[int]) -> Tensor:
        i, x = len(tokens) - 1, states[-1]
        y = own[f"blocks.{i}.layers.0.weight"] @ x + (
            own[f"blocks.{i}.layers.0.bias"] if bias else 0
        )
        logits = scale * (own[f"lm_heads.{0 if shared else i}.weight"] @ (x + y / (1 + (-y).exp())))
        if draft_vocab == VOCAB:
            return logits
        full = torch.full((VOCAB,), -torch.inf).double()
        full[ids] = logits[ids] if all_rows else logits
        return full

    return Published("medusa", raw, own, formula)


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt()


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2
