"""Load the decoder's weights from a GGUF file and undo the changes of llama.cpp's converter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.files import joined
from forerun.models.gguf.architectures import rotates_pairs
from forerun.models.gguf.blocks import Blocks, Piece, floats
from forerun.models.gguf.container import Entry, open_gguf
from forerun.models.gguf.dense_architectures import XIELU
from forerun.models.parameters import Matrix
from forerun.models.tensor_names import Names
from forerun.models.weights import WeightLoader

NAMES: Names = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "layer": "blk.{i}.",
    "attention_norm": "attn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "out": "attn_output",
    "attention_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_out_norm": "post_ffw_norm",
    "down": "ffn_down",
    "sink_logits": "attn_sinks.weight",
    "router": "ffn_gate_inp",
    "choice_bias": "exp_probs_b.bias",
    "expert_down": "ffn_down_exps",
    "shared_gate": "ffn_gate_inp_shexp",
    "router_scale": "ffn_gate_inp.scale",
    "expert_scale": "ffn_down_exps.scale",
    "expert_norm": "pre_ffw_norm_2",
    "expert_out_norm": "post_ffw_norm_2",
    "shared_out_norm": "post_ffw_norm_1",
    "layer_scale": "layer_output_scale.weight",
    "layer_gate": "inp_gate",
    "layer_projection": "proj",
    "layer_input_norm": "post_norm",
    "layer_embed": "per_layer_token_embd",
    "layer_projections": "per_layer_model_proj",
    "layer_inputs_norm": "per_layer_proj_norm",
    "altup_norm": "altup_router_norm",
    "altup_router": "altup_router",
    "altup_predict": "altup_predict_coef",
    "altup_correct": "altup_correct_coef",
    "altup_scale": "altup_correct_scale.weight",
    "laurel_left": "laurel_l",
    "laurel_right": "laurel_r",
    "laurel_norm": "laurel_post_norm",
    "stream_opening": "altup_proj",
    "stream_joining": "altup_unembd_proj",
    "latent_in": "ffn_latent_down",
    "latent_out": "ffn_latent_up",
    "query": "attn_q",
    "query_down": "attn_q_a",
    "query_norm": "attn_q_a_norm",
    "query_up": "attn_q_b",
    "latent_down": "attn_kv_a_mqa",
    "latent_norm": "attn_kv_a_norm",
    "latent_up": "attn_kv_b",
    "key_up": "attn_k_b",
    "value_up": "attn_v_b",
    "recurrent_out": "ssm_out",
    "convolution": "ssm_conv1d",
    "decay_rate": "ssm_a",
    "decay_bias": "ssm_dt.bias",
    "skip": "ssm_d",
    "recurrent_norm": "ssm_norm",
}
RECURRENT_NAMES: dict[str, Names] = {
    "conv": {
        "recurrent_input": "shortconv.in_proj",
        "recurrent_out": "shortconv.out_proj",
        "convolution": "shortconv.conv",
    },
    "mamba": {"recurrent_input": "ssm_in"},
    "delta": {
        "recurrent_input": ["attn_qkv", "attn_gate"],
        "recurrent_decay": ["ssm_alpha", "ssm_beta"],
    },
}
# vectors of recurrent layers are stored as [n, 1] or [groups, n / groups], their convolutions
# without an axis
RESHAPED = re.compile(r"\.(ssm_(a|d|norm\.weight|conv1d\.weight)|shortconv\.conv\.weight)$")
# rope factors are read with the configuration; image, audio and drafting modules are not used
IGNORED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|(v|mm|a|s|mtp|blk\.\d+\.nextn)\..*"
)


class GgufLoader(WeightLoader):
    """`WeightLoader` for a GGUF file."""

    def open(self, path: Path) -> None:
        """Open the file; query, key and value, and gate and up, may be fused in it."""
        self.gguf = open_gguf(path)
        self.taken: set[str] = set()
        self.prefix = ""
        self.rotates_pairs = rotates_pairs(self.gguf)

        config = self.config

        def has(stem: str) -> bool:
            layers = [f"blk.{i}.{stem}" for i in range(config.layers)]
            return any(f"{name}.weight" in self.gguf.tensors for name in layers)

        def gated(gate: str, up: str) -> str | list[str]:
            return [gate, up] if has(gate) else up

        attends = [i for i in range(config.layers) if config.has_attention(i)]
        is_fused = any(f"blk.{i}.attn_qkv.weight" in self.gguf.tensors for i in attends)
        shared = "_shexp" if has("ffn_up_shexp") else ""  # Gemma 4 has no suffix
        # gpt-oss, GLM-4.5 and Seed-OSS call it after what comes before it
        norms = [name for name in ("ffn_norm", "post_attention_norm", "attn_norm") if has(name)]
        if "blk.0.ffn_norm" in self.gguf.tensors:  # Falcon-H1 leaves the suffix out
            norms.insert(0, "ffn_norm")
        self.names = NAMES | {
            "shared_up": gated(f"ffn_gate{shared}", f"ffn_up{shared}"),
            "shared_down": f"ffn_down{shared}",
            "qkv": "attn_qkv" if is_fused else ["attn_q", "attn_k", "attn_v"],
            "up": gated("ffn_gate", "ffn_up"),
            "sparse_up": gated("ffn_gate", "ffn_up"),
            "mlp_norm": norms[0] if norms else "ffn_norm",
            "expert_up": "ffn_gate_up_exps"
            if has("ffn_gate_up_exps")
            else gated("ffn_gate_exps", "ffn_up_exps"),
        }
        if "token_embd_norm.weight" in self.gguf.tensors:  # LFM2 normalises no embedding
            self.names["norm"] = "token_embd_norm"
        if config.recurrent is not None:
            self.names |= RECURRENT_NAMES[config.recurrent.kind]
            if has("ssm_ba"):  # Qwen3-Next
                self.names["recurrent_decay"] = "ssm_ba"
            if config.recurrent.kind == "delta" and has("ssm_in"):  # of older files
                self.names["recurrent_input"] = "ssm_in"

    def claim(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return a tensor and mark it as used. Raises LoadError if it is missing or misshapen."""
        if name.removesuffix(".weight") in self.gguf.tensors:
            name = name.removesuffix(".weight")
        entry = self.gguf.tensors.get(name)
        if entry is None:
            raise LoadError(f"{self.gguf.path}: the file lacks tensor {name}; it is incomplete")
        if entry.shape != shape:
            raise LoadError(
                f"{self.gguf.path}: tensor {name} is {list(entry.shape)}, but its metadata asks "
                f"for {list(shape)}"
            )
        self.taken.add(name)
        return entry

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self.gguf.tensors.get(name)
        is_same = stored is not None and math.prod(stored.shape) == math.prod(shape)
        if stored is not None and is_same and RESHAPED.search(name):
            entry = self.claim(name, stored.shape)
        else:
            entry = self.claim(name, shape)
        return floats(entry.kind, entry.read()).reshape(shape)

    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        entry = self.gguf.tensors.get(f"{stem}.weight")
        if entry is not None and len(entry.shape) == 1 and shape[0] == 1:  # one row is a vector
            values = self.floats(f"{stem}.weight", shape[1:])
            return lambda: values[None]
        blocks = Blocks((Piece(self.claim(f"{stem}.weight", shape)),))
        return lambda: blocks

    def stacked(self, name: str, shape: tuple[int, int, int]) -> Entry:
        """Claim a tensor of several matrices and return it as one, on top of each other."""
        entry = self.claim(name, shape)
        return replace(entry, shape=(shape[0] * shape[1], shape[2]))

    def heads_of_latent(self, i: int, keys: bool) -> Any:
        """Load the heads' matrices. Newer files have a tensor for keys and one for values, that of
        the keys transposed."""
        c, a = self.config, self.config.latent
        assert a is not None
        if f"{self.stem('latent_up', i)}.weight" in self.gguf.tensors:
            return super().heads_of_latent(i, keys)
        part = "key_up" if keys else "value_up"
        name = f"{self.stem(part, i)}.weight"
        rows, inputs = (a.rank, a.plain) if keys else (a.value, a.rank)
        blocks = Blocks((Piece(self.stacked(name, (c.heads, rows, inputs))),))
        source = self.source(f"{i}.{part}", blocks.shape, lambda: blocks)
        return self.make_linear(part, source, None)

    def expert_matrix(
        self, part: str, layer: int, halves: int, rows: int, inputs: int
    ) -> Callable[[], Matrix]:
        experts = self.config.experts
        assert experts is not None
        count = experts.count
        pieces = []
        stems = self.stems(part, layer, [rows] * halves)
        for stem, part_rows in stems:
            flat = self.stacked(f"{stem}.weight", (count, part_rows, inputs))
            if part_rows == rows:
                pieces.append(Piece(flat))
                continue
            order = np.arange(count * part_rows).reshape(count, halves, rows)
            pieces += [
                Piece(flat, np.ascontiguousarray(order[:, half].ravel())) for half in range(halves)
            ]
        blocks = Blocks(tuple(pieces))
        return lambda: blocks

    def expert_bias(self, part: str, layer: int, halves: int, rows: int) -> Tensor:
        experts = self.config.experts
        assert experts is not None
        stems = self.stems(part, layer, [rows] * halves)
        biases = [self.floats(f"{stem}.bias", (experts.count, size)) for stem, size in stems]
        parts = [half for bias in biases for half in torch.split(bias, rows, dim=1)]
        return torch.cat([half.flatten() for half in parts])

    def stream_matrix(self, part: str, n: int) -> Callable[[], Matrix]:
        altup, size = self.config.altup, self.config.hidden
        assert altup is not None
        flat = self.stacked(f"{self.stem(part)}.weight", (altup.streams - 1, size, size))
        blocks = Blocks((Piece(flat, np.arange(n * size, (n + 1) * size)),))
        return lambda: blocks

    def decay_rate(self, stored: Tensor) -> Tensor:
        return stored

    def xielu_parameters(self, i: int) -> Tensor:
        return torch.tensor([self.config.raw["xielu"][name][i] for name in XIELU])

    def embedding(self) -> Callable[[], Matrix]:
        shape = (self.config.vocab, self.config.hidden)
        return self.matrix(str(self.names["embed"]), shape, False, False)

    def finish(self) -> None:
        # blocks behind the model's layers belong to multi-token prediction modules
        count = np.ravel(self.gguf.metadata[f"{self.gguf.architecture}.block_count"])[0]
        extra = range(self.config.layers, int(count))
        left = []
        for name in sorted(self.gguf.tensors.keys() - self.taken):
            block = re.match(r"blk\.(\d+)\.", name)
            is_extra = block is not None and int(block[1]) in extra
            # layers that read the keys and values of others may have their own all the same
            if block is not None and int(block[1]) < self.config.layers:
                is_own = self.config.kv_layer(int(block[1])) == int(block[1])
                is_extra = not is_own and bool(re.search(r"\.attn_(k|v|k_norm)\.weight", name))
            if not IGNORED.fullmatch(name) and not is_extra:
                left.append(name)
        if left:
            names = joined(left, 4)
            raise LoadError(
                f"{self.gguf.path}: {len(left)} tensors fit no part of this model: {names}"
            )
