"""Write a checkpoint with int8 weights as vLLM reads it: compressed-tensors, W8A8.

Each row of a linear layer has a scale of its own; activations are rounded token by token while the
model runs. Embeddings and head stay in the checkpoint's dtype.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import worker
from safetensors.torch import load_file, save_file

LARGEST = 127
ROUNDED = "_proj.weight"  # ends the names of the matrices of attention and feed-forward layers
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def convert(directory: Path, converted: Path) -> None:
    """Write the directory `converted` completely or not at all, unless it exists."""
    if converted.is_dir():
        return
    with worker.atomic_directory(converted) as work:
        for path in sorted(directory.glob("*.safetensors")):
            tensors: dict[str, torch.Tensor] = {}
            for name, tensor in load_file(path).items():
                if name.endswith(ROUNDED):
                    rounded, scale = round_rows(tensor)
                    tensors |= {name: rounded, f"{name}_scale": scale}
                else:
                    tensors[name] = tensor
            save_file(tensors, work / path.name, {"format": "pt"})
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = QUANTIZATION
        (work / "config.json").write_text(json.dumps(config), encoding="utf-8")


def round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix as int8 [N, K] and the scales of its rows, float32 [N, 1]."""
    rows = weight.float()
    scale = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
    return (rows / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale
