"""The roofline: what a pass demands against counts by hand, limits that are set here, and the verb
from end to end."""

import itertools
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from forerun.bench.machine import limits as limits_module
from forerun.bench.machine import roofline as module
from forerun.bench.machine.demand import Demand, demand_of, matrices
from forerun.bench.machine.limits import INPUTS, OUTPUTS, ROWS, Cpu, Cuda
from forerun.bench.machine.roofline import lesson, measure_roofline
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.gguf.blocks import FORMS
from forerun.models.gguf.container import open_gguf
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import gguf_files, tiny
from tests.cli.test_main import MODEL, run

needs_native = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")

# tiny Llama: hidden 32, 4 heads and 2 for keys of 8 each, 48 within the MLP, 3 layers, 64 tokens
ATTENTION = 3 * (32 * (32 + 16 + 16) + 32 * 32)
FEED_FORWARD = 3 * (32 * 96 + 48 * 32)
HEAD = 64 * 32


def llama(dtype: torch.dtype = torch.float32):
    return tiny.decoder(tiny.family("llama"), dtype)


def test_a_count_by_hand() -> None:
    rows, context = 5, 20
    demand = demand_of(llama(), rows, context)
    seen = 21 + 22 + 23 + 24 + 25
    assert demand.bytes == {
        "attention": 4 * ATTENTION,
        "feed-forward": 4 * FEED_FORWARD,
        "head": 4 * HEAD,
        "embedding": 4 * 5 * 32,
        "cache": 4 * 3 * 2 * 2 * 8 * 25,
        "activations": 4 * 5 * (3 * ((32 + 64) + (32 + 32) + (32 + 96) + (48 + 32)) + (32 + 64)),
    }
    products = 2 * rows * (ATTENTION + FEED_FORWARD + HEAD)
    assert demand.operations == {"float32": products + 3 * 2 * (2 * 4 * 8 * seen)}
    assert demand.moved == sum(demand.bytes.values()) - demand.bytes["activations"]


def test_windows_bound_what_is_read_and_computed() -> None:
    """A window of 7 sees 7 keys: of 5 rows the first needs 6 committed ones, and the others
    fewer."""
    wide, narrow = (
        demand_of(tiny.decoder(tiny.family(n), torch.float32), 5, 20) for n in ("llama", "mistral")
    )
    assert narrow.bytes["cache"] == 4 * 3 * 2 * 2 * 8 * (6 + 5)
    attention = 3 * 2 * (2 * 4 * 8)
    assert wide.operations["float32"] - narrow.operations["float32"] == attention * (115 - 5 * 7)
    short = [
        demand_of(tiny.decoder(tiny.family(n), torch.float32), 2, 3) for n in ("llama", "mistral")
    ]
    assert short[0].bytes == short[1].bytes and short[0].operations == short[1].operations


def test_families_without_a_gate_and_with_learned_positions() -> None:
    demand = demand_of(tiny.decoder(tiny.family("gpt2"), torch.float32), 2, 8)
    assert demand.bytes["feed-forward"] == 4 * 3 * (2 * 32 * 128)
    assert demand.bytes["embedding"] == 4 * 2 * (32 + 32)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_weights_are_those_that_the_model_says_a_pass_reads(name: str) -> None:
    model = tiny.decoder(tiny.family(name), torch.float32)
    assert sum(m.bytes for m in matrices(model)) == model.weight_bytes
    assert all(m.bytes == 4 * m.inputs * m.outputs for m in matrices(model))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so wide that the padding and the scales of packed weights are little beside the
    weights."""
    directory = tmp_path_factory.mktemp("roofline") / "wide"
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "vocab_size": 512,
        "num_hidden_layers": 2,
    }
    tiny.hf_model("llama", **shape).save_pretrained(directory)
    return directory


@needs_native
@pytest.mark.parametrize(
    ("form", "each"), [("float32", 4), ("bfloat16", 2), ("int8", 1), ("int4", 0.5 + 2 / 32)]
)
def test_packed_weights_are_as_many_bytes_as_their_format_says(
    wide: Path, form: str, each: float
) -> None:
    """Within what padding and scales add; the head of an int4 model is int8, and attention computes
    in float32."""
    native.start(1)
    model = NativeDecoder(load_config(wide), wide, form, 64)
    demand = demand_of(model, 4, 32)
    weights = {part: demand.bytes[part] for part in ("attention", "feed-forward", "head")}
    assert sum(weights.values()) == model.weight_bytes
    for part, size in weights.items():
        count = sum(m.inputs * m.outputs for m in matrices(model) if m.part == part)
        assert size == pytest.approx(
            count * (1 if (form, part) == ("int4", "head") else each), rel=0.06
        )
    assert set(demand.operations) == {form, "float32"} | ({"int8"} if form == "int4" else set())
    attention = (
        4 * model.config.heads * model.config.head_dim * model.config.layers * (33 + 34 + 35 + 36)
    )
    assert form == "float32" or demand.operations["float32"] == attention


@needs_native
def test_a_file_demands_its_own_numbers() -> None:
    """Types by matrix, or by rows of one, each with operations of its own format; rows of the
    embedding too."""
    native.start(1)
    path = gguf_files.written("qwen2", "q4_k_m").path
    model = NativeDecoder(load_config(path), path, "bfloat16", 64, keep=True)
    c, demand = model.config, demand_of(model, 2, 8)
    assert sum(m.bytes for m in matrices(model)) == model.weight_bytes
    counted = Counter[str]()
    for entry in open_gguf(path).tensors.values():
        if len(entry.shape) > 1 and entry.name != "token_embd.weight":
            counted[FORMS[entry.kind]] += entry.shape[0] * entry.shape[1]
    assert len(counted) == 3
    if c.tied:
        counted["q6_k"] += c.vocab * c.hidden
    assert all(demand.operations[form] == 2 * 2 * count for form, count in counted.items())
    assert (
        2 * c.hidden * 6.5 / 8 < demand.bytes["embedding"] < 2 * c.hidden * 8.6 / 8
    )  # Q6_K, padded


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_more_rows_demand_more(name: str) -> None:
    model = tiny.decoder(tiny.family(name), torch.float32)
    demands = [demand_of(model, rows, 16) for rows in range(1, 40)]
    for before, after in itertools.pairwise(demands):
        assert all(after.bytes[kind] >= size for kind, size in before.bytes.items())
        assert (
            after.moved > before.moved
            and after.operations["float32"] > before.operations["float32"]
        )
        assert (
            after.bytes["attention"] == before.bytes["attention"]
        )  # weights are read once, whatever the rows


class Set:
    """Limits that are known: GB/s and billions of operations a second."""

    absent = ""

    def __init__(self, bandwidth: float | None, peak: float) -> None:
        self._bandwidth, self._peak = bandwidth, peak
        self.absent = "" if bandwidth else "the memory's bandwidth: not here"

    def bandwidth(self) -> float | None:
        return self._bandwidth

    def peak(self, form: str) -> float:
        return self._peak


def measured(monkeypatch: pytest.MonkeyPatch, given: Set, rows: list[int], repeats: int = 3):
    """A report where a pass of n rows takes n milliseconds."""
    monkeypatch.setattr(module, "limits_of", lambda *_: given)
    monkeypatch.setattr(module, "_seconds", lambda runner, count: count * 1e-3)
    options = {"model": str(tiny.family("llama")), "kernels": "torch"}
    return measure_roofline(options, rows, context=20, repeats=repeats)


def test_the_figures_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, Set(0.25, 1.0), [2, 8])
    demands = {n: demand_of(llama(), n, 20) for n in range(1, 200)}
    two, eight = report.passes
    assert (
        (two.rows, eight.rows) == (2, 8)
        and report.bandwidth == 0.25
        and report.peaks == {"float32": 1.0}
    )
    for p in report.passes:
        demand = demands[p.rows]
        assert (
            p.bytes == demand.bytes
            and p.moved == demand.moved
            and p.operations == demand.operations
        )
        assert p.memory_ms == pytest.approx(demand.moved / 0.25e9 * 1e3)
        assert p.arithmetic_ms == pytest.approx(demand.operations["float32"] / 1e9 * 1e3)
        assert p.share == pytest.approx(max(p.memory_ms, p.arithmetic_ms) / p.rows)
        assert p.pass_ms == pytest.approx(p.rows) and p.times_one_row == pytest.approx(p.rows)
    assert (two.binds, eight.binds) == ("memory", "arithmetic")
    first = next(n for n, d in demands.items() if d.operations["float32"] / 1.0 >= d.moved / 0.25)
    assert report.balance == first and 2 < first <= 8
    said = lesson(report)
    assert (
        f"memory up to {first - 1} rows, by arithmetic from {first} on" in said
        and "8 rows took 8.00 times" in said
    )
    assert report.weight_bytes == 4 * (ATTENTION + FEED_FORWARD + HEAD)


def test_formats_have_peaks_of_their_own() -> None:
    """Times of formats add up: the same cores do one after the other."""
    demand = Demand(
        {"head": 100, "activations": 900}, {"int8": 6_000_000_000, "float32": 1_000_000_000}
    )
    memory, arithmetic = module._limits(demand, 10.0, {"int8": 100.0, "float32": 50.0})
    assert memory == pytest.approx(100 / 10e9) and arithmetic == pytest.approx(0.06 + 0.02)


def test_one_limit_is_always_the_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, Set(1e-6, 1e6), [1])
    assert (
        report.balance is None
        and report.passes[0].binds == "memory"
        and "almost for nothing" in lesson(report)
    )
    assert "over 100%" in lesson(
        report
    )  # a bandwidth of 1 kB/s: the pass was quicker than that allows
    report = measured(monkeypatch, Set(1e6, 1.0), [1, 4])
    assert report.balance == 1 and "from the first row on" in lesson(report)
    assert "reaches" in lesson(report) and "over 100%" not in lesson(report)


def test_without_a_bandwidth_nothing_is_said_to_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, Set(None, 1.0), [1, 4])
    for p in report.passes:
        assert (p.memory_ms, p.binds, p.share) == (None, None, None) and p.arithmetic_ms > 0
    assert (report.bandwidth, report.balance, report.absent) == (
        None,
        None,
        "the memory's bandwidth: not here",
    )
    assert "cannot be told" in lesson(report) and "not here" in lesson(report)
    json.dumps(asdict(report))


def test_shares_are_made_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down slows both: two rounds of three reach the same share, at a speed
    and at a quarter."""
    given, rounds = (
        Set(0.25, 1e6),
        iter([(1.0, 1.0), (2.0, 1.0), (4.0, 4.0)]),
    )  # memory and passes slower by these
    now = [(1.0, 1.0)]

    def bandwidth() -> float:
        now[0] = next(rounds)
        return 0.25 / now[0][0]

    given.bandwidth = bandwidth
    monkeypatch.setattr(module, "limits_of", lambda *_: given)
    monkeypatch.setattr(module, "_seconds", lambda runner, count: 1e-3 * now[0][1])
    report = measure_roofline(
        {"model": str(tiny.family("llama")), "kernels": "torch"}, [1], context=20, repeats=3
    )
    (one,) = report.passes
    assert one.share == pytest.approx(demand_of(llama(), 1, 20).moved / 0.25e9 / 1e-3)
    assert report.bandwidth == 0.125 and one.pass_ms == pytest.approx(1)


def test_the_first_of_a_few_passes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds in the caches what the reading of the limits left there."""
    clock = iter([0, 50, 100, 101, 200, 202, 300, 303])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(Runner, "forward", lambda self, segments: None)
    runner = Runner(llama(), tokens=64, page=4, slots=1)
    assert module._seconds(runner, 2) == 2


def test_a_pass_is_a_chain_below_the_context_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[tuple[int, int, int]] = []
    forward = Runner.forward

    def note(self: Runner, segments, *rest):
        (segment,) = segments
        passes.append((self.cache.length[0], len(segment.tokens), len(segment.want)))
        assert segment.parents == list(range(-1, len(segment.tokens) - 1))
        return forward(self, segments, *rest)

    monkeypatch.setattr(Runner, "forward", note)
    monkeypatch.setattr(module, "limits_of", lambda *_: Set(1.0, 1.0))
    monkeypatch.setattr(module, "CHUNK", 16)
    measure_roofline({"model": str(tiny.family("llama"))}, [1, 6], context=20, repeats=2)
    assert passes[:2] == [(0, 16, 0), (16, 4, 0)]  # the context
    each = 1 + module.PASSES
    assert passes[2:] == [
        (20, n, n) for n in (1, 6, 6, 1) for _ in range(each)
    ]  # the other way round in turn


def test_the_context_and_the_rows_must_fit_the_model() -> None:
    options = {"model": str(tiny.family("llama")), "kernels": "torch"}
    with pytest.raises(ConfigError, match="over the 256 tokens"):
        measure_roofline(options, [16], context=241)
    report = measure_roofline(options, [16], context=240, repeats=1)
    assert [p.rows for p in report.passes] == [16]


@needs_native
def test_peaks_are_operations_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3e-3, 1e-3, 2e-3] * 3)
    monkeypatch.setattr(
        limits_module._Layers, "seconds", lambda self, rows: next(times) if rows == 48 else 0.0
    )
    assert Cpu(True, 1, 1).peak("int8") == pytest.approx(
        2 * INPUTS * OUTPUTS * ROWS["native"] / 1e-3 / 1e9
    )


@needs_native
def test_as_much_is_read_as_a_pass_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that weights that stay in a cache are held against the cache."""
    asked: list[int] = []
    monkeypatch.setattr(native, "read_bandwidth", lambda megabytes: asked.append(megabytes) or 5.0)
    for size in (1, 11 << 20, 1 << 40):
        assert Cpu(True, 1, size).bandwidth() == 5.0
    assert asked == [1, 11, 256]


def test_without_native_kernels_the_bandwidth_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "they were not compiled"))
    report = measure_roofline({"model": str(tiny.family("llama"))}, [1, 2], context=8, repeats=1)
    assert (
        report.bandwidth is None and "not compiled" in report.absent and report.kernels == "torch"
    )
    assert report.peaks["float32"] > 0 and all(
        p.binds is None and p.pass_ms > 0 for p in report.passes
    )


SMALL = ["--rows", "1,3", "--context", "12", "--repeats", "1"]


@pytest.mark.parametrize(
    "options", [["--kernels", "torch"], ["--kernels", "torch", "--dtype", "bfloat16"]]
)
@pytest.mark.usefixtures("steady")
def test_json_is_one_object(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny.family("llama"))
    code, out, err = run(
        monkeypatch, capsys, "bench", "roofline", "--model", model, "--json", *SMALL, *options
    )
    report = json.loads(out)
    assert code == 0 and not err
    assert [p["rows"] for p in report["passes"]] == [1, 3] and report["kernels"] == "torch"
    assert (report["bandwidth"] is None) == (native.library() is None)
    assert report["peaks"][options[-1] if "--dtype" in options else "float32"] > 0


@needs_native
@pytest.mark.usefixtures("steady")
def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny.family("llama"))
    args = [
        "bench",
        "roofline",
        "--model",
        model,
        "--quantization",
        "int4",
        "--threads",
        "1",
        *SMALL,
    ]
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 0 and "round 1 of 1" in err
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["rows", "MB", "moved"] and [
        line.split()[0] for line in lines[1:3]
    ] == ["1", "3"]
    assert (
        "bandwidth 10.0 GB/s" in out and "int4 " in out and "int8 " in out and "context 12" in out
    )


BAD = {
    "no rows": (["--rows", ","], "at least one"),
    "odd rows": (["--rows", "1,two"], "'two' is not a whole number"),
    "rows with a sign too many": (["--rows", "1,--4"], "'--4' is not a whole number"),
    "zero rows": (["--rows", "0"], "--rows 0"),
    "too many rows": (["--rows", "2000"], "--rows 2000"),
    "no context": (["--context", "0"], "--context 0"),
    "too much context": (["--context", str(5 * tiny.SPOKEN)], f"over the {tiny.SPOKEN} tokens"),
    "no rounds": (["--repeats", "0"], "--repeats 0"),
    "an unknown precision": (["--quantization", "int5"], "did you mean 'int"),
    "a precision that torch lacks": (
        ["--quantization", "int8", "--kernels", "torch"],
        "needs the native kernels",
    ),
    "no model": (["--model", "./nowhere"], "no directory ./nowhere"),
    "a device that is not here": (["--device", "cuda:99"], "cuda:99"),
    "a flag of drafting": (["--draft", "off"], "--draft"),
}


@pytest.mark.parametrize("args", BAD.values(), ids=BAD.keys())
def test_bad_input(
    args: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, says = args
    model = [] if "--model" in given else MODEL
    code, out, err = run(monkeypatch, capsys, "bench", "roofline", *model, *given)
    assert (code, out) == (2, "") and says in err and err.splitlines()[-1].startswith("forerun: ")


def test_a_model_that_is_not_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        monkeypatch, capsys, "bench", "roofline", "--json", "--model", str(tmp_path)
    )
    assert (code, out) == (2, "") and "no config.json" in err


@pytest.mark.cuda
def test_limits_of_a_cuda_device() -> None:
    limits = Cuda(torch.device("cuda"), 64 << 20)
    assert limits.bandwidth() > 1 and limits.peak("bfloat16") > 1 and not limits.absent
    report = measure_roofline(
        {"model": str(tiny.family("llama")), "device": "cuda"}, [1, 4], context=16, repeats=2
    )  # fmt: skip
    assert report.device.startswith("cuda") and all(
        p.binds and p.pass_ms > 0 for p in report.passes
    )


def test_a_divided_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="in one process"):
        measure_roofline({"model": str(tiny.family("llama")), "tensor_parallel": 2}, [1])
