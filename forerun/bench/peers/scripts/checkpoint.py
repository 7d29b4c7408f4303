"""A Hugging Face checkpoint read with numpy alone, tensor by tensor: what converters to other formats start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HEADER = 8  # bytes that say how long the JSON after them is
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16


class Checkpoint:
    """The safetensors files and config.json of one directory. Raises ValueError or OSError for what cannot be read.

    `names` holds a place for each tensor: file, offset of its bytes, dtype as the file names it, and shape.
    """

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
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
            raise ValueError(f"{name} is stored as {dtype}, which is not converted here: only {', '.join(STORED)}")
        stored = np.memmap(path, STORED[dtype], mode="r", offset=start, shape=shape)
        if dtype == "BF16":  # the upper half of a float32
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)
