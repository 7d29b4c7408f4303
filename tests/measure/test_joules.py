"""A clock of joules, on counters made up here: it goes on between ticks, and is right at each of
them."""

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.measure import energy
from forerun.measure.energy import JoulesClock, Meter
from tests import tiny
from tests.measure.test_energy import RANGE, Clock, add, no_libraries, zone

__all__ = ["no_libraries"]  # a fixture that is used here as well
TICK = 0.001


class Machine:
    """A package that takes some watts, whose counter ticks a thousand times a second."""

    def __init__(self, root: Path, start: int = 0, size: int = RANGE) -> None:
        self.zone, self.seconds = zone(root, "intel-rapl:0", "package-0", start, size), Clock()
        self.uncounted = self.due = 0.0
        self.clock = JoulesClock(Meter(root, self.seconds), self.seconds)

    def run(self, seconds: float, watts: float) -> float:
        """Joules that the clock says it took."""
        before, left = self.clock(), seconds
        while left > 1e-12:
            part = min(left, TICK - self.due)
            self.seconds.now, self.due, left = self.seconds.now + part, self.due + part, left - part
            self.uncounted += part * watts
            if self.due >= TICK - 1e-12:
                add(self.zone, self.uncounted)
                self.due = self.uncounted = 0.0
        return self.clock() - before


def test_a_long_time_takes_what_the_counter_says_and_a_short_one_its_share(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(0.1, watts=50)
    assert machine.run(1.0, watts=50) == pytest.approx(50, rel=0.01)
    short = [machine.run(0.00005, watts=50) for _ in range(100)]  # twenty of them between two ticks
    assert sum(short) == pytest.approx(0.25, rel=0.25) and sorted(short)[10] > 0.001
    machine.run(1.0, watts=20)
    assert machine.run(0.01, watts=80) > 2 * machine.run(
        0.01, watts=20
    )  # the counter, not the time


def test_it_never_goes_back_and_goes_round_with_the_counter(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path, start=2_900_000, size=3_000_000
    )  # microjoules: it goes round after 0.1 J
    said = [machine.clock()]
    for watts in (100, 10, 100, 10):
        for _ in range(50):
            machine.run(0.0005, watts)
            said.append(machine.clock())
    assert said == sorted(said) and said[-1] - said[0] == pytest.approx(0.025 * 220, rel=0.05)


def test_a_counter_that_goes_round_between_two_looks_has_counted_all_of_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, start=2_900_000, size=3_000_000)
    before = machine.clock()
    add(machine.zone, 2.0)
    machine.seconds.now += 1.0
    assert machine.clock() - before == pytest.approx(2.0)


def test_a_counter_that_ceases_to_answer_leaves_the_power_of_late(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(0.5, watts=40)
    (machine.zone / "energy_uj").unlink()
    before = machine.clock()
    machine.seconds.now += 1.0
    assert machine.clock() - before == pytest.approx(40, rel=0.05)


def test_without_a_counter_it_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.measure.energy.Meter", lambda: Meter(tmp_path))
    with pytest.raises(ConfigError, match="objective=energy needs a counter of energy"):
        LLM(tmp_path / "no model", objective="energy")
    with pytest.raises(ConfigError, match="bounds time"):
        LLM(tmp_path / "no model", objective="energy", slo_ms=5)


def test_costs_are_joules_and_the_text_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = zone(tmp_path, "intel-rapl:0", "package-0", 0)

    class Counting(Meter):
        def read(self) -> energy.Reading:
            add(counted, 0.5)  # each look takes half a joule
            return super().read()

    monkeypatch.setattr("forerun.measure.energy.Meter", lambda: Counting(tmp_path))
    directory, params = tiny.spoken(), SamplingParams.pure(max_tokens=60, temperature=0)
    llm = LLM(directory, objective="energy", context=512, kv_tokens=1024)
    said = [
        llm.generate("import os", params, draft=draft)[0].token_ids for draft in ("suffix", "off")
    ]
    assert said[0] == said[1]
    assert llm.engine.policy.cost(1) >= 0.4  # a step reads the counter some times
    assert llm.engine.policy.costs() == ({}, {})  # which are no seconds
