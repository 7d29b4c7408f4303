"""Checkpoints of heads, one a level, exactly as they are published, with what the families'
formulas make of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny
from tests.draft.twins import last_states

HIDDEN, VOCAB = 32, tiny.VOCAB
Tensors = dict[str, Tensor]


@dataclass
class Published:
    """A checkpoint: what `--draft` calls it, the fields of its config.json, its tensors by their
    published names, and
    its formula: logits after the tokens that follow the states [n, H] of the target, the root
        first."""

    draft: str
    raw: dict[str, Any]
    tensors: Tensors
    naive: Callable[[Tensor, Sequence[int]], Tensor]
    file: str = "model.safetensors"

    def write(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.raw))
        tensors = {
            name: tensor.float()
            for name, tensor in self.tensors.items()
            if tensor.is_floating_point()
        }
        tensors |= {
            name: tensor for name, tensor in self.tensors.items() if not tensor.is_floating_point()
        }
        path = directory / self.file
        torch.save(tensors, path) if path.suffix != ".safetensors" else save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, path
        )
        return directory


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of some consequence, exact in float32."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 1_000_003)
    return torch.randn(shape, generator=generator).mul(0.5 if len(shape) > 1 else 0.2).double()


class PublishedTwin:
    """The formula of published heads, which needs no more than their checkpoint."""

    def __init__(self, head: Any) -> None:
        self.naive = head.published.naive

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        return self.naive(last_states(tokens[:-1])[first:], (tokens[-1], *path))


def damage(directory: Path, name: str, value: Tensor | None = None) -> None:
    """Take a tensor out of a checkpoint, or put another in."""
    (path,) = [
        file for file in directory.iterdir() if file.suffix in (".safetensors", ".pt", ".bin")
    ]
    tensors = (
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    tensors.pop(name, None)
    tensors |= {} if value is None else {name: value}
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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
        own[f"ln.{i}.weight"], own[f"ln.{i}.bias"] = (
            1 + random(inner, seed=20 + j),
            random(inner, seed=30 + j),
        )
        own[f"head.{i}.weight"] = random(VOCAB, inner, seed=40 + j)

    def naive(states: Tensor, tokens: Sequence[int]) -> Tensor:
        weight = 0.5 ** (0.5 / levels)
        s = rms(states[-1]) / math.sqrt(2) if scaled else states[-1]
        for i, token in enumerate(tokens):
            z = own[f"emb.{i}.weight"][token] * math.sqrt(1 - weight**2) * math.sqrt(inner / 2)
            x = rms(weight * (own[f"proj.{i}.weight"] @ s) + z)
            s = gelu(x * own[f"ln.{i}.weight"] + own[f"ln.{i}.bias"])
        return own[f"head.{len(tokens) - 1}.weight"] @ s

    return Published("mlp", raw, {f"{prefix}{name}": tensor for name, tensor in own.items()}, naive)


def arctic(tied: bool = True, inner: int = 24) -> Published:
    """Arctic's, as ArcticTraining saves them: pickled, with sizes as texts, and shared tensors
    written again."""
    n = 3
    raw = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "base_model_name_or_path": "some/target",
        "input_hidden_dim": HIDDEN, "inner_dim": str(inner), "proj_dim": str(inner), "emb_dim": str(inner),
        "model_type": "mlp_speculator", "n_candidates": n, "n_predict": n, "scale_input": True, "tie_weights": tied,
        "tie_lstm_embs": False, "top_k_tokens_per_head": [1] * n, "torch_dtype": "bfloat16", "vocab_size": VOCAB,
        "method": "sum_rnn",
    }  # fmt: skip
    plain, own = ibm(tied, scaled=True, prefix=""), {}
    for name, tensor in plain.tensors.items():
        part, level, kind = name.split(".")
        if part == "head":
            own[name] = tensor
        elif not tied or int(level) <= (part == "proj"):
            own[f"{part}.{level}.0.{kind}"] = tensor
    return Published("mlp", raw, own, plain.naive, "pytorch_model.bin")


# ---------------------------------------------------------------- Medusa


def medusa(layers: int = 1, prefix: str = "", file: str = "medusa_lm_head.pt") -> Published:
    """FasterDecoding's: their config.json says two heads, whatever there is."""
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

    def naive(states: Tensor, tokens: Sequence[int]) -> Tensor:
        i, x = len(tokens) - 1, states[-1]
        for j in range(layers):
            y = own[f"{i}.{j}.linear.weight"] @ x + own[f"{i}.{j}.linear.bias"]
            x = x + y / (1 + (-y).exp())
        return own[f"{i}.{layers}.weight"] @ x

    return Published(
        "medusa", raw, {f"{prefix}{name}": tensor for name, tensor in own.items()}, naive, file
    )


def medusa_of_vllm(
    said: int = VOCAB,
    whole: bool = False,
    bias: bool = False,
    shared: bool = False,
    scale: float = 1.0,
) -> Published:
    """vLLM's, of which some say no more than the `said` tokens of their token_map; `whole` ones
    have rows of all."""
    raw = {
        "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "max_paths": 64, "medusa_fc_bias": bias,
        "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "original_lm_head": shared, "topk": 10,
        "truncated_vocab_size": said, "vocab_size": VOCAB, "logit_scale": scale,
    }  # fmt: skip
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:said]
    own = {} if said == VOCAB else {"token_map": ids}
    for i in range(3):
        own[f"blocks.{i}.layers.0.weight"] = random(HIDDEN, HIDDEN, seed=i)
        if bias:
            own[f"blocks.{i}.layers.0.bias"] = random(HIDDEN, seed=i)
        if not shared or i == 0:
            own[f"lm_heads.{i}.weight"] = random(VOCAB if whole else said, HIDDEN, seed=10 + i)

    def naive(states: Tensor, tokens: Sequence[int]) -> Tensor:
        i, x = len(tokens) - 1, states[-1]
        y = own[f"blocks.{i}.layers.0.weight"] @ x + (
            own[f"blocks.{i}.layers.0.bias"] if bias else 0
        )
        logits = scale * (own[f"lm_heads.{0 if shared else i}.weight"] @ (x + y / (1 + (-y).exp())))
        if said == VOCAB:
            return logits
        full = torch.full((VOCAB,), -torch.inf).double()
        full[ids] = logits[ids] if whole else logits
        return full

    return Published("medusa", raw, own, naive)


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt()


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2
