"""The safetensors files of a Hugging Face directory, read tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import LoadError, one_line
from forerun.models.files import check_pointer, indexed, weight_files
from forerun.models.names import listed
from forerun.models.quantized import PARTS, Scheme, Stored
from forerun.models.unpack import read_stored


class Checkpoint:
    """The safetensors files of a directory, read tensor by tensor; remembers what has been taken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.taken: set[str] = set()
        try:
            paths = self._paths()
            for path in paths:
                check_pointer(path)
            files = [(path, safe_open(path, framework="pt")) for path in paths]
            self.where = {name: (path, file) for path, file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise LoadError(f"the weights in {directory} cannot be read: {one_line(str(error))}") from None

    def _paths(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            paths = indexed(index)
            missing = one_line(", ".join(path.name for path in paths if not path.is_file()))
            if missing:
                raise LoadError(f"{index} names files that are not there: {missing}; download them again")
            return paths
        paths = [path for path in weight_files(self.directory) if path.is_file()]
        if not paths:
            pickled = any(self.directory.glob("*.bin"))
            hint = "convert its .bin files to safetensors" if pickled else "give a Hugging Face model directory"
            raise LoadError(f"{self.directory} has no *.safetensors weights; {hint}")
        return paths

    def claim(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Count a tensor as used, without reading it. Raises LoadError if it is absent or of another shape."""
        if name not in self.where:
            raise LoadError(f"{self.directory}: the checkpoint lacks the tensor {name}; it is incomplete")
        held = self.where[name][1].get_slice(name).get_shape()  # type: ignore[no-untyped-call]
        if shape is not None and tuple(held) != shape:
            raise LoadError(f"{self.directory}: tensor {name} is {held}, but config.json asks for {list(shape)}")
        self.taken.add(name)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        try:  # a mapping of its own, which goes with the tensor: what was read does not stay in memory
            with safe_open(self.where[name][0], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self.directory}: tensor {name} cannot be read: {one_line(str(error))}") from None
        return tensor

    def floats(self, name: str) -> Tensor:
        """A tensor that is not quantised."""
        tensor = self.read(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise LoadError(
                f"{self.directory}: tensor {name} is {tensor.dtype}, as in a quantised checkpoint, but nothing in"
                " config.json or beside it says how to read it"
            )
        return tensor

    def has(self, name: str) -> bool:
        return name in self.where

    def parts(self, layout: str, stem: str) -> list[str]:
        """What there is of a quantised linear layer, without `stem`."""
        return [part for part in sum(PARTS[layout], ()) if self.has(f"{stem}.{part}")]

    def stored(self, scheme: Scheme, layout: str, stem: str, shape: tuple[int, int]) -> Stored:
        """A quantised linear layer of `shape` (out, in). Raises LoadError."""
        held = {part: self.read(f"{stem}.{part}") for part in self.parts(layout, stem)}
        return read_stored(scheme, layout, held, shape, f"{self.directory}: {stem}")

    def finish(self, ignored: tuple[str, ...], others: str | None = None) -> None:
        """Raise LoadError for tensors nobody took, but for those whose names end in one of `ignored`, or begin with
        `others`."""
        left = sorted(n for n in self.where if n not in self.taken and not n.endswith(ignored))
        left = [name for name in left if others is None or not name.startswith(others)]
        if left:
            names = listed(map(one_line, left), 4)
            raise LoadError(f"{self.directory}: {len(left)} tensors fit no part of this model: {names}")
