"""A Llama checkpoint as a GGUF file, with gguf's own quantisation.

The names and the order of queries and keys are llama.cpp's: it rotates neighbouring values where
Hugging Face rotates halves, so the rows of each head are interleaved. There is no vocabulary, only
its size: prompts are token ids. Norms stay float32. With int4, embeddings and the head are int8, as
in forerun, since they cost the most in quality."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType as FileType

HEADER = 8  # bytes of a safetensors file that say how long the JSON after them is
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16
FORMATS = {  # of the matrices, and what the file calls that
    "float32": (Type.F32, FileType.ALL_F32),
    "float16": (Type.F16, FileType.MOSTLY_F16),
    "bfloat16": (Type.BF16, FileType.MOSTLY_BF16),
    "int8": (Type.Q8_0, FileType.MOSTLY_Q8_0),
    "int4": (Type.Q4_0, FileType.MOSTLY_Q4_0),
}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Checkpoint:
    """The safetensors files and config.json of a directory, read with numpy alone, tensor by
    tensor.

    `names` holds a place for each tensor: file, offset of its bytes, dtype as the file names it,
    and shape. Raises ValueError or OSError for what cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads(
            (directory / "config.json").read_text(encoding="utf-8")
        )
        self.names: dict[str, tuple[Path, int, str, tuple[int, ...]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(HEADER), "little")
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    start = HEADER + length + entry["data_offsets"][0]
                    self.names[name] = (path, start, entry["dtype"], tuple(entry["shape"]))
        if not self.names:
            raise ValueError(f"there are no .safetensors files in {directory}")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ValueError where there is none of that name."""
        if name not in self.names:
            raise ValueError(f"the checkpoint has no tensor {name}")
        return self.names[name][3]

    def read(self, name: str) -> Any:
        """One tensor as a numpy array in float32, which holds each of the stored dtypes exactly."""
        shape = self.shape(name)
        path, start, dtype, _ = self.names[name]
        if dtype not in STORED:
            raise ValueError(
                f"{name} is stored as {dtype}, which is not converted here: only {', '.join(STORED)}"
            )
        stored = np.memmap(path, STORED[dtype], mode="r", offset=start, shape=shape)
        if dtype == "BF16":  # the upper half of a float32
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)


def convert(directory: Path, form: str, path: Path) -> None:
    """Write `path`, whole or not at all.

    Args:
        directory: a Hugging Face checkpoint.
        form: float32, float16, bfloat16, int8 (Q8_0) or int4 (Q4_0).
        path: the file to make, or to leave if it is there already.

    Raises:
        ValueError: a checkpoint that is no plain Llama.
    """
    if path.exists():
        return
    checkpoint = Checkpoint(directory)
    _refuse_others(checkpoint)
    names = _names(checkpoint)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(work, "llama")
    try:
        _describe(writer, checkpoint.config)
        writer.add_file_type(FORMATS[form][1])
        for theirs, ours in names.items():
            kind, shape = _type(ours, checkpoint.shape(theirs), form), checkpoint.shape(theirs)
            stored = gguf.quant_shape_to_byte_shape(shape, kind) if kind != Type.F32 else shape
            dtype = np.dtype(np.float32 if kind == Type.F32 else np.uint8)
            writer.add_tensor_info(ours, stored, dtype, int(np.prod(stored)) * dtype.itemsize, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for theirs, ours in names.items():
            tensor = interleaved(checkpoint.read(theirs), ours, checkpoint.config)
            writer.write_tensor_data(gguf.quantize(tensor, _type(ours, tensor.shape, form)))
        writer.close()
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


def _refuse_others(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    if config.get("model_type") != "llama":
        raise ValueError(
            f"only Llama checkpoints are converted here, and this is a {config.get('model_type')!r}"
        )
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ValueError("a Llama with scaled rotary embeddings is not converted here")
    if any(name.endswith(".bias") for name in checkpoint.names) or "quantization_config" in config:
        raise ValueError("a Llama with biases or quantised weights is not converted here")


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors to convert: names in the checkpoint to names in the file."""
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in OUTSIDE.items()}
    if checkpoint.config.get("tie_word_embeddings"):
        del names["lm_head.weight"]  # llama.cpp takes the embeddings
    for i in range(checkpoint.config["num_hidden_layers"]):
        names |= {
            f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight"
            for theirs, ours in LAYER.items()
        }
    return names


def _type(name: str, shape: tuple[int, ...], form: str) -> Type:
    if len(shape) == 1:
        return Type.F32
    return (
        Type.Q8_0
        if form == "int4" and name in ("token_embd.weight", "output.weight")
        else FORMATS[form][0]
    )


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The shape of the model, and a vocabulary of nothing but its size."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def interleaved(tensor: Any, name: str, config: dict[str, Any]) -> Any:
    """Queries and keys with the two halves of each head's rows interleaved; any other tensor as it
    is. [outputs, in]"""
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return tensor
    heads = config["num_attention_heads"]
    if name.endswith("attn_k.weight"):
        heads = config.get("num_key_value_heads") or heads
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
