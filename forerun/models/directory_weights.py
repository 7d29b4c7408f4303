"""Load the decoder's weights from the safetensors files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.checkpoint import Checkpoint
from forerun.models.config import MTP_PREFIXES, TRAINED_MTP_PREFIX
from forerun.models.experts import StackedRows, mx_matrix, split_experts
from forerun.models.families import is_integer
from forerun.models.parameters import Matrix
from forerun.models.quantized import read_scheme, stack
from forerun.models.tensor_names import (
    IGNORED,
    INTERLEAVED_EXPERTS,
    NAMES,
    OTHER_MODALITIES,
    PREFIXES,
    TRANSPOSED_EXPERTS,
)
from forerun.models.weights import WeightLoader

MOST_MTP_LAYERS = 8  # multi-token modules behind a model's layers


class DirectoryLoader(WeightLoader):
    """`WeightLoader` for a Hugging Face directory."""

    def open(self, path: Path) -> None:
        config, self.checkpoint = self.config, Checkpoint(path)
        self.scheme = read_scheme(config.raw, str(path / "config.json"))
        self.names = NAMES[config.layout]
        self.rotates_pairs = config.rotates_pairs
        embed = f"{self.names['embed']}.weight"
        self.prefix = next((p for p in PREFIXES if self.checkpoint.has(p + embed)), "model.")

    def head_stem(self) -> str:
        head = super().head_stem()
        inner = f"language_model.{head}"
        return inner if self.checkpoint.has(f"{inner}.weight") else head

    def decay_rate(self, stored: Tensor) -> Tensor:
        return -stored.exp()

    def xielu_parameters(self, i: int) -> Tensor:
        stem, parts = self.stem("xielu", i), (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()))
        found = [self.floats(f"{stem}.{name}", shape) for name, shape in (*parts, ("eps", ()))]
        return torch.cat([value.flatten() for value in found])

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.checkpoint.claim(name, shape)
        return self.checkpoint.floats(name)

    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        checkpoint, scheme = self.checkpoint, self.scheme
        name = f"{stem}.weight"
        layout = scheme.layout(checkpoint.has, stem) if scheme else None
        if scheme is None or layout is None:
            checkpoint.claim(name, shape[::-1] if transposed else shape)
            if transposed:
                return lambda: checkpoint.floats(name).T
            return lambda: checkpoint.floats(name)
        for suffix in checkpoint.suffixes(layout, stem):
            checkpoint.claim(f"{stem}.{suffix}")
        extra = f"{stem}.bias"  # older GPTQ writers add a bias of zeros to every layer
        if not bias and checkpoint.has(extra) and not checkpoint.read(extra).any():
            checkpoint.claim(extra)
        return lambda: checkpoint.quantized(scheme, layout, stem, shape)

    def expert_matrix(
        self, part: str, layer: int, halves: int, rows: int, inputs: int
    ) -> Callable[[], Matrix]:
        checkpoint, experts = self.checkpoint, self.config.experts
        assert experts is not None
        count, stems = experts.count, self.names[part]
        if "{e}" in (stems if isinstance(stems, str) else stems[0]):
            names = [stem for stem, _ in self.stems(part, layer, [rows] * halves)]
            readers = [
                self.matrix(name.format(e=e), (rows, inputs), False, False)
                for name in names
                for e in range(count)
            ]
            if self.scheme is not None:
                return lambda: stack([reader() for reader in readers])
            parts: Any = readers
            return lambda: StackedRows(parts, rows, inputs)
        name = self.stem(part, layer)
        if checkpoint.has(f"{name}_blocks"):
            for suffix in ("blocks", "scales"):
                checkpoint.claim(f"{name}_{suffix}")
            return lambda: mx_matrix(
                checkpoint.slices(f"{name}_blocks"),
                checkpoint.read(f"{name}_scales"),
                count,
                halves,
                rows,
                inputs,
                f"{checkpoint.directory}: {name}",
            )
        transposed = self.config.layout in TRANSPOSED_EXPERTS
        shape = (halves * rows, inputs)
        checkpoint.claim(name, (count, *(shape[::-1] if transposed else shape)))

        def read(expert: int) -> Tensor:
            matrix = checkpoint.floats(name, expert)
            return matrix.T if transposed else matrix

        interleaved = self.config.layout in INTERLEAVED_EXPERTS
        return lambda: split_experts(read, count, halves, rows, inputs, interleaved)

    def expert_bias(self, part: str, layer: int, halves: int, rows: int) -> Tensor:
        experts = self.config.experts
        assert experts is not None
        found = self.floats(f"{self.stem(part, layer)}_bias", (experts.count, halves * rows))
        return torch.cat([found[:, half::halves].flatten() for half in range(halves)])

    def stream_matrix(self, part: str, n: int) -> Callable[[], Matrix]:
        shape = (self.config.hidden, self.config.hidden)
        return self.matrix(f"{self.stem(part)}.{n}", shape, False, False)

    def embedding(self) -> Callable[[], Matrix]:
        return lambda: self.tensor("embed", None, "weight", (self.config.vocab, self.config.hidden))

    def finish(self) -> None:
        """Raise LoadError if the checkpoint has tensors that were not used."""
        ignored = (*IGNORED, "lm_head.weight") if self.config.tied else IGNORED
        mtp = MTP_PREFIXES.get(self.config.family)
        prefixes = (*OTHER_MODALITIES, TRAINED_MTP_PREFIX, *([mtp] if mtp else []))
        # DeepSeek V3 and GLM-4.5 store their multi-token modules as layers behind the model's own
        count, extra = self.config.layers, self.config.raw.get("num_nextn_predict_layers")
        if isinstance(extra, int) and is_integer(extra):
            layer = f"{self.prefix}{self.names['layer']}"
            last = count + min(extra, MOST_MTP_LAYERS)
            prefixes += tuple(layer.format(i=i) for i in range(count, last))
        self.checkpoint.finish(ignored, prefixes + self.unused_keys())

    def unused_keys(self) -> tuple[str, ...]:
        """Return the beginnings of the names of keys and values in layers that read those of
        others: checkpoints of Gemma 3n have them all the same."""
        c, qkv = self.config, self.names["qkv"]
        if not isinstance(qkv, list):
            return ()
        stems = [*qkv[1:], self.names.get("k_norm"), self.names.get("value_norm")]
        layers = [i for i in range(c.layers) if c.kv_layer(i) != i]
        prefix = self.prefix + str(self.names["layer"])
        return tuple(f"{prefix.format(i=i)}{stem}." for i in layers for stem in stems if stem)
