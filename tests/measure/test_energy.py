"""Energy: what the counters say and nothing else. Every test runs on counters made up here, and a
clock that is set."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forerun.cli import doctor
from forerun.errors import ConfigError
from forerun.measure import counters, energy
from forerun.measure.energy import Energy, Meter, cost_per_million

RANGE = 65_532_610_987  # microjoules, of a real server


class Clock:
    """Seconds that pass when told to; `sleep` runs `during` first."""

    def __init__(self) -> None:
        self.now = 100.0
        self.during = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.during()
        self.now += seconds


def zone(root: Path, at: str, name: str, microjoules: int, size: int = RANGE) -> Path:
    """A zone of powercap: a directory with its three files."""
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
    """Let a zone's counter run on, round its range."""
    now = int((directory / "energy_uj").read_text())
    size = int((directory / "max_energy_range_uj").read_text())
    (directory / "energy_uj").write_text(str((now + int(joules * 1e6)) % size))


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a GPU nor zeus, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "zeus.device", None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """Two packages with memory beside them, their cores within them, and what holds or repeats
    both."""
    for i in (0, 1):
        zone(tmp_path, f"intel-rapl:{i}", f"package-{i}", 1_000_000 * (i + 1))
        zone(tmp_path, f"intel-rapl:{i}:0", "dram", 7_000_000)
        zone(tmp_path, f"intel-rapl:{i}:1", "core", 5_000_000)
    zone(tmp_path, "intel-rapl:2", "psys", 9_000_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000)
    zone(tmp_path, "dtpm", "dtpm", 1)
    yield tmp_path


def spend(root: Path, joules: float) -> None:
    """What should be counted runs on by so much, and what should not by ten times that."""
    for directory in root.iterdir():
        name = (directory / "name").read_text().strip()
        counted = "mmio" not in directory.name and name.startswith(("package", "dram"))
        add(directory, joules if counted else 10 * joules)


def test_packages_and_memory_are_counted_once(server: Path) -> None:
    """Cores are within a package, psys around it, and the second interface to package 0 is package
    0."""
    clock = Clock()
    meter = Meter(server, clock)
    assert meter.method == "rapl" and meter.devices == [
        "dram-0",
        "dram-1",
        "package-0",
        "package-1",
    ]
    assert len(meter.absent) == 1 and meter.absent[0].startswith("GPU: ")
    first = meter.read()
    spend(server, 30)
    clock.now += 10
    spent = meter.between(first, meter.read())
    assert spent.joules == pytest.approx(
        dict.fromkeys(meter.devices, 30.0)
    ) and spent.total == pytest.approx(120)
    assert spent.seconds == 10 and spent.why == ""
    assert spent.per_token(60) == pytest.approx(2) and spent.per_token(0) is None


def test_a_counter_that_goes_round(tmp_path: Path) -> None:
    clock, directory = Clock(), zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 4_000_000)
    meter = Meter(tmp_path, clock)
    first = meter.read()
    add(directory, 10)
    clock.now += 5
    last = meter.read()
    assert last.counters["package-0"] < first.counters["package-0"]
    assert meter.between(first, last).total == pytest.approx(10)


def test_a_window_in_which_it_may_go_round_unseen_has_no_energy(tmp_path: Path) -> None:
    clock, directory = Clock(), zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Meter(tmp_path, clock)
    first = meter.read()
    add(directory, 10)
    clock.now += 60
    assert meter.between(first, meter.read()).total == pytest.approx(10)
    clock.now += 10
    spent = meter.between(first, meter.read())
    assert spent.total is None and spent.joules == {"package-0": None} and "go round" in spent.why


def test_short_windows_have_no_energy(server: Path) -> None:
    """None, not the 0 that a coarse counter would give."""
    clock = Clock()
    meter = Meter(server, clock)
    with meter.window() as window:
        clock.now += 1.9
    assert window.energy.joules == dict.fromkeys(meter.devices) and window.energy.total is None
    assert "too short" in window.energy.why and window.energy.above_idle == window.energy.joules
    with meter.window() as window:
        clock.now += 2.1
    assert window.energy.total == 0 and not window.energy.why


def test_a_window_that_ends_in_an_error_is_measured(server: Path) -> None:
    clock = Clock()
    meter = Meter(server, clock)
    with pytest.raises(KeyboardInterrupt), meter.window() as window:
        clock.now += 3
        raise KeyboardInterrupt
    assert window.energy.total == 0


def test_idle_power_is_taken_off_beside_the_raw_figure(server: Path) -> None:
    clock = Clock()
    meter = Meter(server, clock, clock.sleep)
    with meter.window() as window:
        clock.now += 4
    assert window.energy.total == 0 and window.energy.total_above_idle is None  # not yet known
    clock.during = lambda: spend(server, 20)
    assert meter.idle(5).total == pytest.approx(80)
    assert meter.idle_watts == pytest.approx(dict.fromkeys(meter.devices, 4.0))
    with meter.window() as window:
        spend(server, 100)
        clock.now += 10
    assert window.energy.total == pytest.approx(
        400
    ) and window.energy.total_above_idle == pytest.approx(400 - 160)


@pytest.mark.parametrize("seconds", [0, 1.99, -1, float("nan"), float("inf")])
def test_idling_for_no_time(server: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        Meter(server).idle(seconds)


def test_a_machine_without_counters(tmp_path: Path) -> None:
    """It says why, does not wait to measure nothing, and has no zeros."""
    clock = Clock()
    clock.during = lambda: pytest.fail("slept for nothing")
    meter = Meter(tmp_path / "nothing", clock, clock.sleep)
    spent = meter.idle(5)
    assert meter.method.startswith("unavailable: ") and "no CUDA device" in meter.method
    assert "virtual machines" in meter.method and meter.devices == []
    assert (spent.joules, spent.total, spent.total_above_idle) == ({}, None, None) and spent.why


def test_counters_for_root_only(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one command that would help, with a path that the user's shell can expand."""
    read = Path.read_text

    def refuse(self: Path, *args: object, **options: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = Meter(server)
    assert not meter.sources and f"sudo chmod a+r {server}/intel-rapl:*/energy_uj" in meter.method
    assert len(list(server.glob("intel-rapl:*/energy_uj"))) == 7


def test_a_real_file_without_permission(server: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (server / "intel-rapl:0" / "energy_uj").chmod(0)
    assert "sudo chmod" in Meter(server).method


@pytest.mark.parametrize(
    ("file", "content"), [("energy_uj", ""), ("energy_uj", "-5"), ("max_energy_range_uj", "x")]
)
def test_nonsense_in_a_file(server: Path, file: str, content: str) -> None:
    (server / "intel-rapl:0" / file).write_text(content)
    assert "no number" in Meter(server).method


def test_a_counter_that_ceases_to_answer(server: Path) -> None:
    """The window it spoils has no figure rather than one without that part."""
    clock = Clock()
    meter = Meter(server, clock)
    with meter.window() as window:
        clock.now += 3
        (server / "intel-rapl:1" / "energy_uj").unlink()
    assert window.energy.total is None and "cannot be read" in window.energy.why


class NvmlError(Exception):
    """As pynvml raises it."""


def cuda(monkeypatch: pytest.MonkeyPatch, millijoules: dict[str, int]) -> None:
    """Two devices that torch sees in the other order than NVML."""

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
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid="ba"[i])
    )


def test_cuda_devices_by_the_names_torch_gives_them(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    millijoules, clock = {"GPU-a": 5_000, "GPU-b": 9_000}, Clock()
    cuda(monkeypatch, millijoules)
    meter = Meter(server, clock)
    assert meter.method == "nvml-counter, rapl" and not meter.absent
    with meter.window() as window:
        millijoules["GPU-b"] += 700_000
        clock.now += 1000  # a counter that never goes round has no longest window
    assert (
        window.energy.joules["cuda:0"] == pytest.approx(700) and window.energy.joules["cuda:1"] == 0
    )
    with meter.window() as window:
        millijoules["GPU-b"] = 0
        clock.now += 10
    assert (
        window.energy.joules["cuda:0"] is None
        and "went back" in window.energy.why
        and window.energy.total is None
    )


def test_a_device_that_has_no_counter(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, {"GPU-a": 1})
    meter = Meter(server)
    assert meter.method == "rapl" and meter.absent == ["GPU: NVML: Not Supported"]


def test_without_the_library_of_nvidia(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert counters.LIBRARY in Meter(server).absent[0]


class ZeusMonitor:
    """As of zeus 0.16: windows by name, joules by index, None for what is not there."""

    joules = 0.0

    def __init__(
        self, gpu_indices: list[int] | None = None, cpu_indices: list[int] | None = None
    ) -> None:
        self.gpus, self.cpus, self.begun = gpu_indices or [], [0] if cpu_indices is None else [], {}

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        assert key not in self.begun and not sync_execution
        self.begun[key] = self.joules

    def end_window(self, key: str, sync_execution: bool = True) -> SimpleNamespace:
        spent = self.joules - self.begun.pop(key)
        return SimpleNamespace(
            gpu_energy=dict.fromkeys(self.gpus, spent), cpu_energy=dict.fromkeys(self.cpus, spent) or None,
            dram_energy=None,
        )  # fmt: skip


def test_zeus_for_what_is_not_to_be_had_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that follow on each other add up; a device whose power would be sampled is left
    alone."""
    gpus = type("Gpus", (), {
        "__len__": lambda self: 2, "supports_get_total_energy_consumption": lambda self, i: i == 1,
    })()  # fmt: skip
    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "zeus.device", SimpleNamespace(get_gpus=lambda: gpus))
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=ZeusMonitor))
    clock = Clock()
    meter = Meter(tmp_path, clock)
    assert meter.method == "zeus" and meter.devices == ["gpu-1", "package-0"] and not meter.absent
    first = meter.read()
    for _ in range(3):
        clock.now += 2
        monkeypatch.setattr(ZeusMonitor, "joules", ZeusMonitor.joules + 5)
        last = meter.read()
    assert meter.between(first, last).joules == pytest.approx({"gpu-1": 15, "package-0": 15})
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    assert Meter(tmp_path).method == "zeus, rapl"  # the processor's own counter comes first


def test_zeus_that_breaks_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no daemon")

    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "zeus.device", SimpleNamespace(get_gpus=broken))
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=broken))
    assert Meter(tmp_path).method.startswith("unavailable: ")


def test_a_part_that_is_not_known_leaves_the_sum_unknown() -> None:
    spent = Energy(
        3.0, "rapl", {"package-0": 5.0, "dram-0": None}, {"package-0": 1.0, "dram-0": 2.0}
    )
    assert spent.total is None and spent.per_token(4) is None and spent.total_above_idle == 3


def test_cost() -> None:
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)
    assert cost_per_million(0, 50) == 0 and cost_per_million(1, 0) is None
    for price in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="is no price"):
            cost_per_million(price, 10)


def test_the_doctor_says_what_can_be_read(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "Meter", lambda: Meter(server))
    found = doctor._energy()
    assert found.text.startswith("dram-0, dram-1, package-0, package-1 by rapl; GPU: ")
    assert found.value["method"] == "rapl" and found.value["devices"][0] == "dram-0"
    monkeypatch.setattr(energy, "Meter", lambda: Meter(server / "nothing"))
    assert doctor._energy().text.startswith("unavailable: GPU: there is no CUDA device; CPU: ")
