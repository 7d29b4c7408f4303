"""The safetensors files of a model directory: which tensors there are, and reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import LoadError, one_line
from forerun.models.files import check_pointer, indexed_files, joined, weight_files
from forerun.models.quantized import TENSORS, QuantizedMatrix, Scheme, read_matrix


class Checkpoint:
    """The safetensors files of a directory. `taken` holds the names of tensors already used."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises LoadError."""
        self.directory = directory
        self.taken: set[str] = set()
        try:
            paths = self._paths()
            for path in paths:
                check_pointer(path)
            files = [(path, safe_open(path, framework="pt")) for path in paths]
            self.where = {
                name: (path, file)
                for path, file in files
                for name in file.keys()  # type: ignore[no-untyped-call]  # noqa: SIM118
            }
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            why = one_line(str(error))
            raise LoadError(f"the weights in {directory} cannot be read: {why}") from None

    def _paths(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            paths = indexed_files(index)
            missing = one_line(", ".join(path.name for path in paths if not path.is_file()))
            if missing:
                raise LoadError(f"{index} names missing files: {missing}; download them again")
            return paths
        paths = [path for path in weight_files(self.directory) if path.is_file()]
        if not paths:
            hint = "give a Hugging Face model directory"
            if any(self.directory.glob("*.bin")):
                hint = "convert its .bin files to safetensors"
            raise LoadError(f"{self.directory} has no *.safetensors weights; {hint}")
        return paths

    def claim(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Mark a tensor as used without reading it.

        Raises LoadError if it is missing or has another shape."""
        if name not in self.where:
            raise LoadError(
                f"{self.directory}: the checkpoint lacks tensor {name}; it is incomplete"
            )
        held = self.where[name][1].get_slice(name).get_shape()  # type: ignore[no-untyped-call]
        if shape is not None and tuple(held) != shape:
            raise LoadError(
                f"{self.directory}: tensor {name} is {held}, but config.json asks for {list(shape)}"
            )
        self.taken.add(name)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor as it is stored, or one entry of its first axis. Raises LoadError."""
        # a separate mapping is released with the tensor, so that read pages do not stay in memory
        try:
            with safe_open(self.where[name][0], framework="pt") as file:
                tensor: Tensor
                tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            why = one_line(str(error))
            raise LoadError(f"{self.directory}: tensor {name} cannot be read: {why}") from None
        return tensor

    def slices(self, name: str) -> Any:
        """Return a tensor whose rows are read on demand."""
        return self.where[name][1].get_slice(name)  # type: ignore[no-untyped-call]

    def floats(self, name: str, index: int | None = None) -> Tensor:
        """Read a tensor that is not quantized. Raises LoadError for integers and 8-bit floats."""
        tensor = self.read(name, index)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise LoadError(
                f"{self.directory}: tensor {name} is {tensor.dtype}, as in a quantized checkpoint, "
                "but config.json has no quantization_config that says how to read it"
            )
        return tensor

    def has(self, name: str) -> bool:
        return name in self.where

    def suffixes(self, layout: str, stem: str) -> list[str]:
        """Return the suffixes of the tensors that make up the quantized linear layer `stem`."""
        return [suffix for suffix in sum(TENSORS[layout], ()) if self.has(f"{stem}.{suffix}")]

    def quantized(
        self, scheme: Scheme, layout: str, stem: str, shape: tuple[int, int]
    ) -> QuantizedMatrix:
        """Read a quantized linear layer of `shape` (out, in). Raises LoadError."""
        held = {suffix: self.read(f"{stem}.{suffix}") for suffix in self.suffixes(layout, stem)}
        return read_matrix(scheme, layout, held, shape, f"{self.directory}: {stem}")

    def finish(self, ignored: tuple[str, ...], prefixes: tuple[str, ...] = ()) -> None:
        """Raise LoadError for unused tensors, except those that end in `ignored` or start with
        one of `prefixes`."""
        left = sorted(n for n in self.where if n not in self.taken and not n.endswith(ignored))
        left = [name for name in left if not name.startswith(prefixes)]
        if left:
            names = joined(map(one_line, left), 4)
            raise LoadError(
                f"{self.directory}: {len(left)} tensors fit no part of this model: {names}"
            )
