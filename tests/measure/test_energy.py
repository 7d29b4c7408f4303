"""Energy counters, with counter files and clocks that the tests set."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.cli import doctor
from forerun.measure import energy
from forerun.measure.energy import INSTALL, Energy, JoulesClock, Meter, cost_per_million
from tests import tiny
from tests.train.conftest import Clock

RANGE = 65_532_610_987  # microjoules, of a real server
TICK = 0.001  # seconds between two updates of a counter


def zone(root: Path, at: str, name: str, microjoules: int, size: int = RANGE) -> Path:
    """Write a powercap zone: a directory with three files."""
    directory = root / at
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in (
        ("name", name),
        ("energy_uj", microjoules),
        ("max_energy_range_uj", size),
    ):
        (directory / file).write_text(f"{content}\n")
    return directory


def add(directory: Path, joules: float) -> None:
    """Advance a zone's counter, which wraps at its range."""
    now = int((directory / "energy_uj").read_text())
    size = int((directory / "max_energy_range_uj").read_text())
    (directory / "energy_uj").write_text(str((now + int(joules * 1e6)) % size))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two packages with DRAM, their cores within them, and zones that contain or repeat both."""
    for i in (0, 1):
        zone(tmp_path, f"intel-rapl:{i}", f"package-{i}", 1_000_000 * (i + 1))
        zone(tmp_path, f"intel-rapl:{i}:0", "dram", 7_000_000)
        zone(tmp_path, f"intel-rapl:{i}:1", "core", 5_000_000)
    zone(tmp_path, "intel-rapl:2", "psys", 9_000_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000)
    return tmp_path


def test_packages_and_dram_are_counted_once(server: Path, clock: Clock) -> None:
    meter = Meter(server, clock)
    assert meter.method == "rapl"
    assert meter.devices == ["dram-0", "dram-1", "package-0", "package-1"]
    assert len(meter.absent) == 1 and meter.absent[0].startswith("GPU: there is no CUDA device")
    first = meter.read()
    for directory in server.iterdir():
        name = (directory / "name").read_text().strip()
        counted = "mmio" not in directory.name and name.startswith(("package", "dram"))
        add(directory, 30 if counted else 300)
    clock.now += 10
    spent = meter.since(first)
    assert spent.joules == pytest.approx(dict.fromkeys(meter.devices, 30.0))
    assert (spent.total, spent.seconds, spent.reason) == (pytest.approx(120), 10, "")
    assert spent.per_token(60) == pytest.approx(2) and spent.per_token(0) is None


def test_a_wrapped_counter_is_corrected_once(tmp_path: Path, clock: Clock) -> None:
    """One wrap is corrected; a window in which the counter may wrap twice has no energy."""
    directory = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 4_000_000)
    meter = Meter(tmp_path, clock)
    first = meter.read()
    add(directory, 10)
    clock.now += 60
    assert meter.since(first).total == pytest.approx(10)
    clock.now += 10
    spent = meter.since(first)
    assert spent.joules == {"package-0": None} and "wrap more than once" in spent.reason


def test_short_windows_have_no_energy(server: Path, clock: Clock) -> None:
    meter = Meter(server, clock)
    first = meter.read()
    clock.now += 1.9
    spent = meter.since(first)
    assert spent.joules == dict.fromkeys(meter.devices) and spent.total is None
    assert "too short" in spent.reason
    clock.now += 0.2
    assert meter.since(first).total == 0 and not meter.since(first).reason


def test_a_counter_that_fails_invalidates_its_window(server: Path, clock: Clock) -> None:
    meter = Meter(server, clock)
    first = meter.read()
    clock.now += 3
    (server / "intel-rapl:1" / "energy_uj").unlink()
    spent = meter.since(first)
    assert spent.total is None and "cannot be read" in spent.reason
    partly = Energy(3.0, {"package-0": 5.0, "dram-0": None})
    assert partly.total is None and partly.per_token(4) is None


def test_unreadable_counters_are_reported(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that gives access, with a path that a shell can expand."""
    meter = Meter(server / "nothing")
    assert meter.devices == [] and "virtual machines" in meter.method
    assert meter.method.startswith("unavailable: ")
    for file, content in (("energy_uj", ""), ("energy_uj", "-5"), ("max_energy_range_uj", "x")):
        before = (server / "intel-rapl:0" / file).read_text()
        (server / "intel-rapl:0" / file).write_text(content)
        assert "no number" in Meter(server).method
        (server / "intel-rapl:0" / file).write_text(before)
    read = Path.read_text

    def refuse(self: Path, *args: object, **options: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = Meter(server)
    assert not meter.sources
    assert f"sudo chmod a+r {server}/intel-rapl:*/energy_uj" in meter.method


class NvmlError(Exception):
    """The exception that pynvml raises."""


def cuda(monkeypatch: pytest.MonkeyPatch, millijoules: dict[str, int]) -> None:
    """Fake two devices that torch and NVML number in different orders."""

    def energy_of(handle: str) -> int:
        if handle not in millijoules:
            raise NvmlError("Not Supported")
        return millijoules[handle]

    library = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid.decode(),
        nvmlDeviceGetTotalEnergyConsumption=energy_of,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    uuids = [SimpleNamespace(uuid="b"), SimpleNamespace(uuid="a")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: uuids[i])


def test_cuda_devices(server: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have torch's names; windows of a counter without a range may have any length."""
    millijoules = {"GPU-a": 5_000, "GPU-b": 9_000}
    cuda(monkeypatch, millijoules)
    meter = Meter(server, clock)
    assert meter.method == "nvml-counter, rapl" and not meter.absent
    first = meter.read()
    millijoules["GPU-b"] += 700_000
    clock.now += 1000
    spent = meter.since(first)
    assert (spent.joules["cuda:0"], spent.joules["cuda:1"]) == (700, 0)
    first = meter.read()
    millijoules["GPU-b"] = 0
    clock.now += 10
    spent = meter.since(first)
    assert spent.joules["cuda:0"] is None and "went back" in spent.reason
    del millijoules["GPU-b"]
    assert Meter(server).absent == ["GPU: NVML: Not Supported"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert INSTALL in Meter(server).absent[0]


def test_cost_per_million() -> None:
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)
    assert cost_per_million(0, 50) == 0 and cost_per_million(1, 0) is None
    for price in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="out of range"):
            cost_per_million(price, 10)


def test_the_doctor_reports_counters(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "Meter", lambda: Meter(server))
    found = doctor._energy()
    assert found.text.startswith("dram-0, dram-1, package-0, package-1 by rapl; GPU: ")
    assert found.value["method"] == "rapl" and found.value["devices"][0] == "dram-0"
    monkeypatch.setattr(energy, "Meter", lambda: Meter(server / "nothing"))
    assert doctor._energy().text.startswith("unavailable: GPU: there is no CUDA device; CPU: ")


class Machine:
    """A package with a given power, whose counter is updated a thousand times per second."""

    def __init__(self, root: Path, start: int = 0, size: int = RANGE) -> None:
        self.zone = zone(root, "intel-rapl:0", "package-0", start, size)
        self.seconds = Clock(100.0)
        self.uncounted = self.due = 0.0
        self.clock = JoulesClock(Meter(root, self.seconds), self.seconds)

    def run(self, seconds: float, watts: float) -> float:
        """Return the joules by the clock."""
        before = self.clock()
        while seconds > 1e-12:
            part = min(seconds, TICK - self.due)
            self.seconds.now += part
            self.due += part
            seconds -= part
            self.uncounted += part * watts
            if self.due >= TICK - 1e-12:
                add(self.zone, self.uncounted)
                self.due = self.uncounted = 0.0
        return self.clock() - before


def test_the_clock_equals_the_counter_and_advances_between_updates(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(0.1, watts=50)
    assert machine.run(1.0, watts=50) == pytest.approx(50, rel=0.01)
    short = [machine.run(0.00005, watts=50) for _ in range(100)]  # 20 between two updates
    assert sum(short) == pytest.approx(0.25, rel=0.25) and sorted(short)[10] > 0.001
    machine.run(1.0, watts=20)
    assert machine.run(0.01, watts=80) > 2 * machine.run(0.01, watts=20)
    machine.run(0.5, watts=40)
    (machine.zone / "energy_uj").unlink()
    before = machine.clock()
    machine.seconds.now += 1.0
    assert machine.clock() - before == pytest.approx(40, rel=0.05)  # by the recent power


def test_the_clock_is_monotonic_and_wraps_with_the_counter(tmp_path: Path) -> None:
    machine = Machine(tmp_path, start=2_900_000, size=3_000_000)  # wraps after 0.1 J
    values = [machine.clock()]
    for watts in (100, 10, 100, 10):
        for _ in range(50):
            machine.run(0.0005, watts)
            values.append(machine.clock())
    assert values == sorted(values)
    assert values[-1] - values[0] == pytest.approx(0.025 * 220, rel=0.05)
    unread = Machine(tmp_path / "other", start=2_900_000, size=3_000_000)
    before = unread.clock()
    add(unread.zone, 2.0)
    unread.seconds.now += 1.0
    assert unread.clock() - before == pytest.approx(2.0)


def test_objective_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a counter it is refused before loading; else costs are joules, outputs the same."""
    monkeypatch.setattr(energy, "Meter", lambda: Meter(tmp_path))
    with pytest.raises(ConfigError, match="objective=energy needs an energy counter"):
        LLM(tmp_path / "no model", objective="energy")
    with pytest.raises(ConfigError, match="bounds time"):
        LLM(tmp_path / "no model", objective="energy", slo_ms=5)
    counted = zone(tmp_path, "intel-rapl:0", "package-0", 0)

    class Counting(Meter):
        def read(self) -> energy.Reading:
            add(counted, 0.5)  # each reading costs half a joule
            return super().read()

    monkeypatch.setattr(energy, "Meter", lambda: Counting(tmp_path))
    llm = LLM(tiny.repetitive(), objective="energy", context=512, kv_tokens=1024)
    params = SamplingParams.pure(max_tokens=60, temperature=0)
    outputs = [
        llm.generate("import os", params, draft=draft)[0].token_ids for draft in ("suffix", "off")
    ]
    assert outputs[0] == outputs[1]
    assert llm.engine.policy.forward_seconds(1) >= 0.4  # a step reads the counter several times
    assert llm.engine.policy.cost_table() == ({}, {})  # costs in joules are not reported as seconds
