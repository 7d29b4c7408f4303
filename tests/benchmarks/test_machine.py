"""Kernels, roofline and energy with fixed limits and counters, and byte counts by hand."""

import ctypes
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import energy, roofline
from benchmarks.energy import measure_energy
from benchmarks.kernels import Layers, measure_kernels
from benchmarks.kernels import main as kernels_main
from benchmarks.roofline import Demand, conclusion, demand_of, measure_roofline
from forerun import ConfigError, ForerunError, SamplingParams
from forerun.bench.decode import DecodePlan
from forerun.bench.pair import Pair
from forerun.kernels import native
from forerun.measure.energy import Meter
from forerun.measure.run import Run
from forerun.measure.workloads import Task
from forerun.models.config import load_config
from forerun.runtime.native import NativeDecoder
from tests import gguf_files, tiny
from tests.measure.test_energy import add, zone
from tests.train.conftest import Clock

needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels")

# tiny Llama: hidden 32, 4 query and 2 key heads of 8, 48 in the MLP, 3 layers, 64 tokens
ATTENTION = 3 * (32 * (32 + 16 + 16) + 32 * 32)
FEED_FORWARD = 3 * (32 * 96 + 48 * 32)
HEAD = 64 * 32


@needs_native
@pytest.mark.usefixtures("fixed_bandwidth")
def test_kernel_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One row is measured for the ratios even if it was not requested."""
    small = ["--inputs", "128", "--outputs", "96", "--megabytes", "1", "--repeats", "2"]
    kernels_main([*small, "--threads", "1", "--rows", "1,3", "--json"])
    report = json.loads(capsys.readouterr().out)
    cases = [(k["format"], k["rows"]) for k in report["kernels"]]
    assert cases == [(f, n) for f in ("float32", "bfloat16", "int8", "int4") for n in (1, 3)]
    assert all(k["microseconds"] > 0 for k in report["kernels"]) and report["bandwidth"] == 10.0
    monkeypatch.setattr(Layers, "seconds", lambda self, rows: rows * 1e-4)
    size = {"inputs": 128, "outputs": 96, "megabytes": 1}
    (three,) = measure_kernels(["int8"], [3], **size, repeats=2).kernels
    rate = (96 * 128 + 96 * 4) / 3e-4 / 1e9  # weights, and a float32 scale for each output
    assert three.gigabytes_a_second == pytest.approx(rate)
    assert three.bandwidth_share == pytest.approx(rate / 10)
    assert (three.microseconds, three.times_one_row) == (pytest.approx(300), pytest.approx(3))
    kernels_main([*small, "--rows", "2", "--formats", "int8"])
    assert "read bandwidth 10.0 GB/s" in capsys.readouterr().out


@needs_native
@pytest.mark.parametrize("form", native.FORMATS)
def test_layers_are_distinct_copies(form: str) -> None:
    """The same copy would stay in the processor's caches, and their speed would be measured."""
    native.start(1)
    torch.manual_seed(1)
    layers = Layers(torch.randn(96, 128), form, 200_000)
    matrices = [op.matrix for op in layers._ops]
    assert layers.count * layers.bytes_each >= 200_000
    assert len({m.weight for m in matrices}) == len({m.scale for m in matrices}) == layers.count
    size = layers.packed.data.nbytes
    first, last = (ctypes.string_at(m.weight, size) for m in (matrices[0], matrices[-1]))
    assert first == last
    assert all(np.array_equal(scale, layers.packed.scale) for scale in layers._scales)


def test_demand_equals_hand_computed_bytes_and_operations() -> None:
    rows, context = 5, 20
    llama = tiny.decoder(tiny.family("llama"), torch.float32)
    demand = demand_of(llama, rows, context)
    assert demand.bytes == {
        "attention": 4 * ATTENTION,
        "feed-forward": 4 * FEED_FORWARD,
        "head": 4 * HEAD,
        "embedding": 4 * 5 * 32,
        "cache": 4 * 3 * 2 * 2 * 8 * 25,
        "activations": 4 * 5 * (3 * ((32 + 64) + (32 + 32) + (32 + 96) + (48 + 32)) + (32 + 64)),
    }
    products = 2 * rows * (ATTENTION + FEED_FORWARD + HEAD)
    attention = 3 * 2 * (2 * 4 * 8)
    attended = 21 + 22 + 23 + 24 + 25
    assert demand.operations == {"float32": products + attention * attended}
    assert demand.moved == sum(demand.bytes.values()) - demand.bytes["activations"]
    # a window of 7 attends to 7 keys; the first of 5 rows needs 6 committed ones
    mistral = demand_of(tiny.decoder(tiny.family("mistral"), torch.float32), rows, context)
    assert mistral.bytes["cache"] == 4 * 3 * 2 * 2 * 8 * (6 + 5)
    saved = demand.operations["float32"] - mistral.operations["float32"]
    assert saved == attention * (attended - 5 * 7)
    gpt2 = demand_of(tiny.decoder(tiny.family("gpt2"), torch.float32), 2, 8)
    assert gpt2.bytes["feed-forward"] == 4 * 3 * (2 * 32 * 128)
    assert gpt2.bytes["embedding"] == 4 * 2 * (32 + 32)


@needs_native
def test_demanded_weights_are_those_that_a_forward_pass_reads() -> None:
    models = [tiny.decoder(tiny.family(name), torch.float32) for name in tiny.FAMILIES]
    native.start(1)
    path = gguf_files.written("qwen2", "q4_k_m").path
    models.append(NativeDecoder(load_config(path), path, "bfloat16", 64, keep=True))
    for model in models:
        demand = demand_of(model, 2, 8)
        parts = ("attention", "feed-forward", "head")
        assert sum(demand.bytes[part] for part in parts) == model.weight_bytes
    assert len(demand.operations) == 4  # three formats of the file, and float32 for attention


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_5_moe", "minimax_text", "gemma3n", "deepseek_v3"]
)
def test_demanded_weights_of_mixture_and_recurrent_families(name: str, kernels: str) -> None:
    """Experts count if independent tokens use them; a recurrent state is read and written."""
    path = tiny.family(name)
    if kernels == "native":
        native.start(1)
        model = NativeDecoder(load_config(path), path, "int8", 64)
    else:
        model = tiny.decoder(path, torch.float32)
    for rows in (1, 3):
        demand = demand_of(model, rows, 8)
        others = ("embedding", "cache", "state", "activations")
        weights = sum(size for part, size in demand.bytes.items() if part not in others)
        assert weights == pytest.approx(model.pass_bytes(rows), abs=32)
        assert ("state" in demand.bytes) == (name in ("qwen3_5_moe", "minimax_text"))


class FixedLimits:
    """Limits with a given bandwidth (GB/s) and peak (billions of operations per second)."""

    def __init__(self, bandwidth: float | None, peak: float) -> None:
        self._bandwidth, self._peak = bandwidth, peak
        self.absent = "" if bandwidth else "the memory bandwidth"

    def bandwidth(self) -> float | None:
        return self._bandwidth

    def peak(self, form: str) -> float:
        return self._peak


@pytest.mark.parametrize(
    ("limits", "binds", "text"),
    [
        ((0.25, 1.0), ["memory", "arithmetic"], "below"),
        ((1e-6, 1e6), ["memory", "memory"], "almost free"),
        ((1e6, 1.0), ["arithmetic", "arithmetic"], "from the first row on"),
        ((None, 1.0), [None, None], "unknown without the memory bandwidth"),
    ],
)
def test_bounds_of_forward_passes(limits, binds, text, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of n rows takes n milliseconds here."""
    monkeypatch.setattr(roofline, "CpuLimits", lambda *_: FixedLimits(*limits))
    monkeypatch.setattr(roofline, "pass_seconds", lambda runner, count: count * 1e-3)
    options = {"model": str(tiny.family("llama")), "kernels": "torch"}
    report = measure_roofline(options, [2, 8], context=20, repeats=3)
    assert [p.binds for p in report.passes] == binds and text in conclusion(report)
    for p in report.passes:
        assert p.pass_ms == pytest.approx(p.rows) and p.times_one_row == pytest.approx(p.rows)
        assert p.arithmetic_ms == pytest.approx(p.operations["float32"] / limits[1] / 1e6)
        if limits[0]:
            assert p.memory_ms == pytest.approx(p.moved / limits[0] / 1e6)
            assert p.share == pytest.approx(max(p.memory_ms, p.arithmetic_ms) / p.rows)
    if text == "below":
        assert 2 < report.balance <= 8
    json.dumps(asdict(report))
    roofline.show(report)


def test_every_format_has_its_own_peak() -> None:
    work = {"int8": 6_000_000_000, "float32": 1_000_000_000}
    demand = Demand({"head": 100, "activations": 900}, work)
    memory, arithmetic = roofline.bounds(demand, 10.0, {"int8": 100.0, "float32": 50.0})
    assert memory == pytest.approx(100 / 10e9) and arithmetic == pytest.approx(0.06 + 0.02)


@needs_native
def test_the_roofline_command_measures_forward_passes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(tiny.family("llama")), "--rows", "1,2", "--repeats", "1"]
    roofline.main([*words, "--context", "8", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [p["rows"] for p in report["passes"]] == [1, 2] and report["bandwidth"] > 0
    assert all(p["pass_ms"] > 0 and p["binds"] for p in report["passes"])
    with pytest.raises(ConfigError, match="exceed the 256 tokens"):
        roofline.main([*words, "--context", "300"])


def test_joules_per_token(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package takes 10 W idle, 30 W plain and 20 W drafting, which is twice as fast."""
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    clock = Clock()

    def spend(seconds: float, watts: float = 10.0) -> None:
        clock.now += seconds
        add(package, seconds * watts)

    def fake_run(engine: object, works: list, params: SamplingParams, arm) -> Run:
        plain = arm.draft == "off"
        spend(1.0, 30 if plain else 20)
        return Run(1.0, [[0] * (10 if plain else 20)], [], 1.0)

    monkeypatch.setattr(energy, "timed_run", fake_run)
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=clock))
    plan = DecodePlan(SamplingParams(max_tokens=8), ["suffix"], repeats=2, price=3.6)
    options = {"model": str(pair.directory / "target")}
    meter = Meter(tmp_path, clock)
    report = measure_energy(options, plan, [Task("a", "file", [5, 6])], 4.0, meter, spend)
    plain, drafted = report.results
    assert (plain.joules, plain.above_idle, plain.watts) == pytest.approx((3.0, 2.0, 30.0))
    figures = (drafted.joules, drafted.above_idle, drafted.times_plain)
    assert figures == pytest.approx((1.0, 0.5, 1 / 3))
    assert drafted.tokens_per_watt_hour == pytest.approx(3600)
    assert drafted.cost_per_million == pytest.approx(3.6 / 3600 / 20 * 1e6)
    assert (report.method, report.idle_watts) == ("rapl", pytest.approx(10.0))
    energy.show(report)
    with pytest.raises(ForerunError, match=r"cannot be measured here.*unavailable"):
        measure_energy(options, plan, [], 4.0, Meter(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"seconds=1\.0"):
        measure_energy({}, plan, [], 1.0)
