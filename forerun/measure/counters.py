"""Counters of energy that a machine keeps by itself, read as joules by device. Nothing is ever
worked out from a model.

    nvml-counter   NVIDIA's counter of each visible CUDA device since its driver was loaded, in
    millijoules (Volta and
                   later), through the library nvidia-ml-py
    rapl           Linux's powercap counters: each processor package, and the memory beside it where
    that is counted;
                   its cores and graphics are parts of a package and left out, as is psys, which
                   holds the packages
    zeus           the library zeus where it is installed: devices of other makers, and packages
    through its daemon

A counter is for the whole device, whoever uses it. What cannot be read raises Unavailable with the
reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

LIBRARY = "pip install 'forerun[energy]'"


class Unavailable(Exception):
    """A source that cannot be read here; the message says why and what would help."""


class Source(Protocol):
    """Counters of one kind. `ranges` are joules after which a device's counter starts again at 0;
    others never do."""

    method: str
    ranges: dict[str, float]

    def read(self) -> dict[str, float]:
        """Joules by device since some moment in the past. Raises Unavailable."""


class Nvml:
    """The energy counter of each CUDA device that torch sees, by its UUID: the order of NVML is
    another one."""

    method = "nvml-counter"

    def __init__(self) -> None:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() and torch.version.cuda else 0
        if not count:
            raise Unavailable("there is no CUDA device")
        try:
            import pynvml
        except ImportError:
            raise Unavailable(f"the library nvidia-ml-py is not installed: {LIBRARY}") from None
        self.nvml, self.ranges = pynvml, dict[str, float]()
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
        try:
            pynvml.nvmlInit()
            self.handles = {
                f"cuda:{i}": pynvml.nvmlDeviceGetHandleByUUID(
                    f"GPU-{uuid.removeprefix('GPU-')}".encode()
                )
                for i, uuid in enumerate(uuids)
            }
        except pynvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None

    def read(self) -> dict[str, float]:
        """Joules since the driver was loaded. Raises Unavailable, as on a slice of a device
        (MIG)."""
        try:
            return {
                device: self.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
                for device, handle in self.handles.items()
            }
        except self.nvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None


class Rapl:
    """The powercap counters under `root`; microjoules, going round at a range that each zone
    states."""

    method = "rapl"

    def __init__(self, root: Path) -> None:
        self.zones: dict[str, Path] = {}
        self.ranges: dict[str, float] = {}
        for zone in sorted(root.glob("intel-rapl:*")):
            name = _text(zone / "name")
            if name.startswith("package"):
                self.zones[name] = zone
            elif name == "dram":
                self.zones[f"dram-{zone.name.split(':')[1]}"] = zone
        if not any(name.startswith("package") for name in self.zones):
            raise Unavailable(
                f"the system shows no power counters in {root}, as in most virtual machines"
            )
        self.ranges = {
            name: _joules(zone / "max_energy_range_uj") for name, zone in self.zones.items()
        }

    def read(self) -> dict[str, float]:
        """Joules of each package, and of the memory beside it. Raises Unavailable, mostly for want
        of permission."""
        return {name: _joules(zone / "energy_uj") for name, zone in self.zones.items()}


class Zeus:
    """What the library zeus counts of one kind, "GPU" or "CPU", that the sources above do not give.

    Its windows have no beginning that can be looked up later, so one follows on the other and they
    are added up. Only
    devices with a counter are asked: for others zeus would sum samples of the power in a process of
        its own.
    """

    method = "zeus"

    def __init__(self, kind: str) -> None:
        self.kind, self.ranges = kind, dict[str, float]()
        self.joules: dict[str, float] = {}
        try:
            from zeus.device import get_gpus
            from zeus.monitor import ZeusMonitor

            gpus: Any = get_gpus() if kind == "GPU" else []
            counted = [i for i in range(len(gpus)) if gpus.supports_get_total_energy_consumption(i)]
            self.monitor = ZeusMonitor(
                gpu_indices=counted, cpu_indices=[] if kind == "GPU" else None
            )
            self.monitor.begin_window("forerun", sync_execution=False)
        except (
            Exception
        ) as error:  # not installed, or one of the errors it has for each kind of machine
            raise Unavailable(f"zeus: {error}") from None

    def read(self) -> dict[str, float]:
        """Joules since this was made. Raises Unavailable."""
        try:
            spent = self.monitor.end_window("forerun", sync_execution=False)
            self.monitor.begin_window("forerun", sync_execution=False)
        except Exception as error:
            raise Unavailable(f"zeus: {error}") from None
        parts = {"gpu": spent.gpu_energy, "package": spent.cpu_energy, "dram": spent.dram_energy}
        for part, by_index in parts.items():
            for index, joules in (by_index or {}).items():
                self.joules[f"{part}-{index}"] = self.joules.get(f"{part}-{index}", 0.0) + joules
        if not self.joules:
            raise Unavailable(f"zeus counts no {self.kind} here")
        return dict(self.joules)


def _text(path: Path) -> str:
    """The content of a counter's file. Raises Unavailable with the command that would help."""
    try:
        return path.read_text().strip()
    except PermissionError:
        raise Unavailable(
            "only root may read the power counters; to allow everybody to, until the machine starts again:"
            f" sudo chmod a+r {path.parent.parent}/intel-rapl:*/energy_uj"
        ) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from None


def _joules(path: Path) -> float:
    text = _text(path)
    if not text.isdigit():
        raise Unavailable(f"{path} holds {text[:20]!r} and no number")
    return int(text) / 1e6
