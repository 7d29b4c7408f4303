"""Timing of kernels: every format and number of rows is there, over memory that is really read."""

import ctypes
import json

import numpy as np
import pytest
import torch

from forerun.bench.machine.kernels import ROWS, _Layers
from forerun.kernels import native
from tests.cli.test_main import run

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
SMALL = [
    "--inputs",
    "128",
    "--outputs",
    "96",
    "--megabytes",
    "1",
    "--repeats",
    "2",
    "--threads",
    "1",
]


@pytest.mark.usefixtures("steady")
def test_json_has_all_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "bench", "kernels", "--json", *SMALL)
    report = json.loads(out)
    assert code == 0 and not err and report["bandwidth"] == 10.0 and report["threads"] == 1
    cases = [(k["format"], k["rows"]) for k in report["kernels"]]
    assert cases == [
        (form, rows) for form in ("float32", "bfloat16", "int8", "int4") for rows in ROWS
    ]
    assert all(k["microseconds"] > 0 and k["bandwidth_share"] > 0 for k in report["kernels"])


@pytest.mark.usefixtures("steady")
def test_the_figures_are_what_they_are_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Layers, "seconds", lambda self, rows: rows * 1e-4)
    _, out, _ = run(
        monkeypatch,
        capsys,
        "bench",
        "kernels",
        "--json",
        "--rows",
        "1,3",
        "--formats",
        "int8",
        *SMALL,
    )
    one, three = json.loads(out)["kernels"]
    size = 96 * 128 + 96 * 4  # weights, and a float32 scale for each output
    assert one["gigabytes_a_second"] == pytest.approx(size / 1e-4 / 1e9)
    assert one["bandwidth_share"] == pytest.approx(size / 1e-4 / 1e9 / 10)
    assert three["microseconds"] == pytest.approx(300) and three["times_one_row"] == pytest.approx(
        3
    )


@pytest.mark.usefixtures("steady")
def test_one_row_is_the_measure_even_if_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Layers, "seconds", lambda self, rows: rows * 1e-4)
    _, out, _ = run(
        monkeypatch,
        capsys,
        "bench",
        "kernels",
        "--json",
        "--rows",
        "64",
        "--formats",
        "int8",
        *SMALL,
    )
    (k,) = json.loads(out)["kernels"]
    assert (k["format"], k["rows"]) == ("int8", 64) and k["times_one_row"] == pytest.approx(64)


@pytest.mark.parametrize("form", native.FORMATS)
def test_copies_are_matrices_of_their_own(form: str) -> None:
    """Distinct memory with the same content, scales too, and enough of it: else the caches would be
    measured."""
    native.start(1)
    torch.manual_seed(1)
    layers = _Layers(torch.randn(96, 128), form, 200_000)
    matrices = [op.matrix for op in layers._ops]
    assert layers.count * layers.bytes_each >= 200_000
    assert len({m.weight for m in matrices}) == layers.count == len({m.scale for m in matrices})
    first, last = (
        ctypes.string_at(m.weight, layers.packed.data.nbytes) for m in (matrices[0], matrices[-1])
    )
    assert first == last
    assert all(np.array_equal(scale, layers.packed.scale) for scale in layers._scales)


def test_what_is_timed_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the last layer, caught before it is dropped."""
    native.start(1)
    torch.manual_seed(1)
    weight = torch.randn(96, 128)
    layers, zeros, kept = _Layers(weight, "float32", 1), np.zeros, []
    monkeypatch.setattr(np, "zeros", lambda *a, **k: kept.append(zeros(*a, **k)) or kept[-1])
    assert layers.seconds(3) > 0
    given = np.random.default_rng(0).standard_normal((3, 128), dtype=np.float32)
    (result,) = [array for array in kept if array.shape == (3, 96)]
    assert np.allclose(result, given @ weight.numpy().T, atol=1e-3)
