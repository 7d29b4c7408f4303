"""Energy counters of this machine, and the energy of a time window.

    nvml-counter   NVIDIA's energy counter of each visible CUDA device (Volta and later), read with
                   the package nvidia-ml-py
    rapl           Linux powercap counters of each processor package and its DRAM. The zones `core`
                   and `uncore` are parts of a package and `psys` contains the packages: all are
                   left out

Energy is never estimated from a power model. An unknown value is None, never 0: there is no
counter, it cannot be read, the window is too short for its resolution, or the counter may have
wrapped more than once. A counter covers the whole device, including other processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError

INSTALL = "pip install 'forerun[energy]'"
POWERCAP = Path("/sys/class/powercap")
MIN_WINDOW_SECONDS = 2.0
MAX_PACKAGE_WATTS = 1000.0  # bounds how long a RAPL counter can run without wrapping unnoticed
POWER_TIME_CONSTANT = 0.1  # seconds over which JoulesClock averages power
Joules = dict[str, float | None]


class Unavailable(Exception):
    """Raised when a counter cannot be read; the message gives the reason and a remedy."""


class Nvml:
    """Energy counters of torch's CUDA devices, matched by UUID: NVML's order differs."""

    method = "nvml-counter"

    def __init__(self) -> None:
        """Raises Unavailable."""
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() and torch.version.cuda else 0
        if not count:
            raise Unavailable("there is no CUDA device")
        try:
            import pynvml
        except ImportError:
            raise Unavailable(f"the package nvidia-ml-py is not installed: {INSTALL}") from None
        self.ranges: dict[str, float] = {}  # these counters never wrap
        self._nvml = pynvml
        self._handles = {}
        try:
            pynvml.nvmlInit()
            for i in range(count):
                uuid = str(torch.cuda.get_device_properties(i).uuid).removeprefix("GPU-")
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
                self._handles[f"cuda:{i}"] = handle
        except pynvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None

    def read(self) -> dict[str, float]:
        """Return joules by device since the driver was loaded. Raises Unavailable (also on MIG)."""
        read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        try:
            return {device: read(handle) / 1e3 for device, handle in self._handles.items()}
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None


class Rapl:
    """Powercap counters under `root`. `ranges` are the joules after which each one wraps to 0."""

    method = "rapl"

    def __init__(self, root: Path) -> None:
        """Raises Unavailable."""
        self._zones: dict[str, Path] = {}
        for zone in sorted(root.glob("intel-rapl:*")):
            name = _read_text(zone / "name")
            if name.startswith("package"):
                self._zones[name] = zone
            elif name == "dram":
                self._zones[f"dram-{zone.name.split(':')[1]}"] = zone
        if not any(name.startswith("package") for name in self._zones):
            raise Unavailable(f"there are no power counters in {root} (usual in virtual machines)")
        self.ranges = {n: _read_joules(z / "max_energy_range_uj") for n, z in self._zones.items()}

    def read(self) -> dict[str, float]:
        """Return joules by package and DRAM. Raises Unavailable, mostly for lack of permission."""
        return {name: _read_joules(zone / "energy_uj") for name, zone in self._zones.items()}


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters at one moment: the meter's clock, joules by device, and errors of sources."""

    seconds: float
    counters: dict[str, float]
    errors: str = ""


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of one window.

    Attributes:
        seconds: length of the window.
        joules: by device, such as cuda:0, package-0 or dram-0; None where it is unknown.
        reason: why a value is unknown, or empty.
    """

    seconds: float
    joules: Joules
    reason: str = ""

    @property
    def total(self) -> float | None:
        """Joules of all devices; None unless each of them is known."""
        known = [joules for joules in self.joules.values() if joules is not None]
        return sum(known) if known and len(known) == len(self.joules) else None

    @property
    def watts(self) -> float | None:
        """Mean power; None where the total is unknown."""
        return None if self.total is None else self.total / self.seconds

    def per_token(self, num_tokens: int) -> float | None:
        """Joules per token; None where the total is unknown or there are no tokens."""
        return self.total / num_tokens if self.total is not None and num_tokens > 0 else None


class Meter:
    """The energy counters of this machine.

    Usage:
        meter = Meter()
        first = meter.read()
        ...
        meter.since(first).joules

    Attributes:
        sources: the counters that could be opened.
        absent: why the others could not, one line each.
        ranges: joules after which a device's counter wraps, for those that do.
        devices: names of the counted devices.
    """

    def __init__(
        self, root: Path = POWERCAP, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`root` holds the powercap counters; `clock` returns monotonic seconds."""
        self._clock = clock
        self.sources: list[Nvml | Rapl] = []
        self.absent: list[str] = []
        kinds: list[tuple[str, Callable[[], Nvml | Rapl]]] = [
            ("GPU", Nvml),
            ("CPU", lambda: Rapl(root)),
        ]
        for kind, open_source in kinds:
            try:
                source = open_source()
                source.read()
            except Unavailable as error:
                self.absent.append(f"{kind}: {error}")
            else:
                self.sources.append(source)
        self.ranges = {
            device: size for source in self.sources for device, size in source.ranges.items()
        }
        self.devices = sorted(self.read().counters)

    @property
    def method(self) -> str:
        """Method of measuring energy on this machine, or "unavailable: reason", for reports."""
        if not self.sources:
            return f"unavailable: {'; '.join(self.absent)}"
        return ", ".join(source.method for source in self.sources)

    def read(self) -> Reading:
        """Read all counters. A source that fails is left out, and its error is noted."""
        counters: dict[str, float] = {}
        errors = []
        for source in self.sources:
            try:
                counters |= source.read()
            except Unavailable as error:
                errors.append(f"{source.method}: {error}")
        return Reading(self._clock(), counters, "; ".join(errors))

    def since(self, first: Reading) -> Energy:
        """Return the energy used since a reading. Synchronize GPU work before."""
        last = self.read()
        seconds = last.seconds - first.seconds
        joules: Joules = dict.fromkeys(self.devices)
        if not self.sources:
            return Energy(seconds, joules, "; ".join(self.absent))
        if seconds < MIN_WINDOW_SECONDS:
            reason = f"a window of {seconds:.2g} s is too short for these counters"
            return Energy(seconds, joules, f"{reason}: measure {MIN_WINDOW_SECONDS:g} s or more")
        reasons = [reading.errors for reading in (first, last) if reading.errors]
        for device in self.devices:
            if device in first.counters and device in last.counters:
                spent = last.counters[device] - first.counters[device]
                joules[device], reason = _unwrap(spent, seconds, self.ranges.get(device))
                reasons += [f"{device}: {reason}"] if reason else []
        return Energy(seconds, joules, "; ".join(dict.fromkeys(reasons)))


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float | None:
    """Return the price of a million tokens in the unit of `price_per_hour`; None at speed 0.

    Raises ConfigError for a negative or infinite price.
    """
    if not 0 <= price_per_hour < math.inf:
        raise ConfigError(f"price={price_per_hour} is out of range: give a number from 0 up")
    return price_per_hour / 3600 / tokens_per_second * 1e6 if tokens_per_second > 0 else None


class JoulesClock:
    """Joules that this machine has used since the clock was made, as a clock for the depth policy.

    Counters are updated about every millisecond (RAPL) or more rarely (NVML), which is longer than
    drafting takes. Between two updates the clock advances at the recent power, and each update
    corrects it. It never goes back, and over long times it equals the counters.
    """

    def __init__(
        self, meter: Meter | None = None, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        """Raises ConfigError where no counter can be read, with the reason."""
        self._meter = meter or Meter()
        self._seconds = seconds
        if not self._meter.sources:
            raise ConfigError(f"objective=energy needs an energy counter. {self._meter.method}")
        self._counters = self._meter.read().counters
        self._updated_at = seconds()
        self._counted = 0.0  # joules by the counters
        self._returned = 0.0  # the largest value that was returned
        self._watts = 0.0  # mean power of late

    def __call__(self) -> float:
        now = self._seconds()
        spent = self._spent()
        elapsed = now - self._updated_at
        if spent > 0:
            power = spent / max(elapsed, 1e-9)
            gain = 1 - math.exp(-elapsed / POWER_TIME_CONSTANT) if self._watts else 1.0
            self._watts += gain * (power - self._watts)
            self._counted += spent
            self._updated_at = now
            elapsed = 0.0
        self._returned = max(self._returned, self._counted + self._watts * elapsed)
        return self._returned

    def _spent(self) -> float:
        """Return the joules counted since the last call.

        A counter that went back has wrapped, or was reset if it has no range; a counter that does
        not answer adds nothing.
        """
        before = self._counters
        self._counters = before | self._meter.read().counters
        total = 0.0
        for device, now in self._counters.items():
            step = now - before.get(device, now)
            total += step if step >= 0 else max(step + self._meter.ranges.get(device, 0), 0)
        return total


def _unwrap(spent: float, seconds: float, size: float | None) -> tuple[float | None, str]:
    """Return (joules, "") for the difference of a counter, or (None, reason).

    `size` is the range after which the counter wraps, or None.
    """
    longest = math.inf if size is None else size / MAX_PACKAGE_WATTS
    if seconds > longest:
        reason = f"its counter may wrap more than once in {seconds:.0f} s"
        return None, f"{reason}: measure at most {longest:.0f} s"
    if spent >= 0:
        return spent, ""
    if size is None:
        return None, "its counter went back, as when a driver is reloaded"
    return spent + size, ""


def _read_text(path: Path) -> str:
    """Read a counter's file. Raises Unavailable with the command that would help."""
    try:
        return path.read_text().strip()
    except PermissionError:
        command = f"sudo chmod a+r {path.parent.parent}/intel-rapl:*/energy_uj"
        raise Unavailable(
            f"only root may read the power counters; to allow it until the next boot: {command}"
        ) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from None


def _read_joules(path: Path) -> float:
    text = _read_text(path)
    if not text.isdigit():
        raise Unavailable(f"{path} holds {text[:20]!r}, which is no number")
    return int(text) / 1e6
