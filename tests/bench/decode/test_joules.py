"""Energy by draft: windows are long enough, ratios are made within rounds, nothing is invented
where none is read."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from forerun import ConfigError, ForerunError, SamplingParams
from forerun.bench.decode import joules as module
from forerun.bench.decode.joules import measure_energy
from forerun.bench.decode.sweep import Plan
from forerun.bench.pair import Pair
from forerun.measure.energy import Meter
from forerun.measure.run import Run
from forerun.measure.workloads import Task

PLAN = Plan(SamplingParams(max_tokens=8, ignore_eos=True, seed=0), ["suffix"], repeats=2, price=3.6)
TASKS = [Task("a", "file", [5, 6, 7])]


class Bench:
    """A machine whose clock runs with the work, and whose package draws 10 W idle, 30 W plain and
    20 W drafting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.now, self.joules = 0.0, 0.0
        zone = root / "intel-rapl:0"
        zone.mkdir(parents=True)
        (zone / "name").write_text("package-0\n")
        (zone / "max_energy_range_uj").write_text("262143328850\n")
        self.counter = zone / "energy_uj"
        self.spend(0, 0)
        monkeypatch.setattr(module, "timed_run", self.run)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.meter = Meter(
            root=root, clock=lambda: self.now, sleep=lambda seconds: self.spend(seconds, 10)
        )

    def spend(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += seconds * watts
        self.counter.write_text(f"{int(self.joules * 1e6)}\n")

    def run(self, engine: object, works: list, params: SamplingParams, arm: object) -> Run:
        self.spend(1.0, 30 if arm.draft == "off" else 20)
        return Run(1.0, [[0] * (10 if arm.draft == "off" else 20)], [], 1.0)


def test_joules_a_token_by_draft(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = Bench(monkeypatch, tmp_path)
    report = measure_energy(
        {"model": str(pair.directory / "target")}, PLAN, TASKS, 4.0, meter=bench.meter
    )
    plain, drafted = report.results
    assert (plain.joules, plain.above_idle, plain.watts) == pytest.approx((3.0, 2.0, 30.0))
    assert (drafted.joules, drafted.above_idle, drafted.times_plain) == pytest.approx(
        (1.0, 0.5, 1 / 3)
    )
    assert drafted.tokens_per_watt_hour == pytest.approx(
        3600
    ) and drafted.tokens_per_second == pytest.approx(20)
    assert drafted.cost_per_million == pytest.approx(3.6 / 3600 / 20 * 1e6)
    assert report.method == "rapl" and report.idle_watts == pytest.approx({"package-0": 10.0})
    json.dumps(asdict(report), allow_nan=False)


def test_nothing_is_invented(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"cannot be measured here.*unavailable"):
        measure_energy(
            {"model": str(pair.directory / "target")},
            PLAN,
            TASKS,
            4.0,
            meter=Meter(root=tmp_path / "none"),
        )
    with pytest.raises(ConfigError, match=r"seconds=1\.0"):
        measure_energy({}, PLAN, TASKS, 1.0)
