"""scripts/device_check.py with tiny models on the CPU: results, failures and time limits."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SLOW = ("tests", "certificate")  # stages that take longer than the others together


def fails(cpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """A stage that fails after its first row."""
    yield "rows", {"number": 1}
    raise ValueError("a | in\na message")


def dies(cpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """A stage whose process ends, as after an illegal access of the driver."""
    yield "rows", {"number": 2}
    os._exit(3)


def hangs(cpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """A stage that never ends."""
    yield "rows", {"number": 3}
    time.sleep(600)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PYTHONPATH", "")  # the script changes it
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT / "scripts"), *sys.path])
    import device_check

    return device_check


def set_stages(monkeypatch: pytest.MonkeyPatch, script: ModuleType, **seconds: float) -> None:
    """Replace all stages by stages of this file."""
    stages = {name: (f"tests.test_device_check:{name}", each) for name, each in seconds.items()}
    monkeypatch.setattr(script, "STAGES", stages)


def test_quick_stages_on_the_cpu(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check.json"
    quick = [name for name in script.STAGES if name not in SLOW]
    assert script.main(["--cpu", "--out", str(out), "--stages", ",".join(quick)]) == 0
    results = json.loads(out.read_text())
    assert results["device"] == "CPU" and results["command"].endswith(" --cpu")
    assert list(results["stages"]) == quick
    assert {stage["status"] for stage in results["stages"].values()} == {"ok"}
    tables = {name: stage["tables"] for name, stage in results["stages"].items()}
    assert tables["rows"].keys() == tables["rows_workspace"].keys() == {"products", "attention"}
    assert {row["part"] for row in tables["rows"]["products"]} == {
        *("qkv", "out", "up", "down", "head")
    }
    (noise,) = tables["noise"]["noise"]
    assert noise["of other bits than on the CPU"] == 0 and noise["same tokens"] == 4
    assert [row["rows"] for row in tables["speed"]["passes"]] == [1, 5]
    decoding = tables["speed"]["decoding"]
    assert [row["draft"] for row in decoding[:3]] == ["off", "known, depth 4", "model, depth 4"]
    assert all(row["differs from plain at"] is None for row in decoding)
    assert all(row["accepted length"] > 1 for row in decoding if row["draft"] != "off")
    assert decoding[2]["operations a round"] > decoding[0]["operations a round"] > 0
    assert [row["requests"] for row in tables["requests"]["requests"]] == [1, 4]
    assert all(row["same texts"] for row in tables["requests"]["requests"])
    if importlib.util.find_spec("triton"):
        assert [row["result"] for row in tables["kernels"]["kernels"]] == ["passed", "passed"]
    printed = capsys.readouterr().out
    assert "### speed: ok in " in printed and "| tiny | off | 0 |" in printed


def test_slow_stages_on_the_cpu(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    assert script.main(["--cpu", "--out", str(out), "--stages", ",".join(SLOW)]) == 0
    tests, certificate = (
        stage["tables"] for stage in json.loads(out.read_text())["stages"].values()
    )
    assert "tests collected" in tests["tests"][0]["result"]
    parts = {row["part"] for row in certificate["certificate"]}
    assert parts == {"rules", "forward", "texts", "distribution", "faults"}


def test_a_failing_stage_does_not_stop_the_others(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_stages(monkeypatch, script, fails=1, dies=1)
    out = tmp_path / "check.json"
    assert script.main(["--cpu", "--json", "--out", str(out)]) == 1
    results = json.loads(capsys.readouterr().out)
    assert results == json.loads(out.read_text())
    failed, died = results["stages"].values()
    assert failed["status"] == died["status"] == "failed"
    assert failed["error"] == "ValueError: a | in" and died["error"] == "the process died"
    assert failed["tables"] == {"rows": [{"number": 1}]}
    assert died["tables"] == {"rows": [{"number": 2}]}


def test_a_stage_over_its_time_limit_is_stopped(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "check.json"
    set_stages(monkeypatch, script, fails=1)
    script.main(["--cpu", "--out", str(out)])  # starts the process from which the others are forked
    set_stages(monkeypatch, script, hangs=1, fails=2)
    assert script.main(["--cpu", "--out", str(out), "--minutes", "0.1"]) == 1
    hung, failed = json.loads(out.read_text())["stages"].values()
    assert hung["status"] == "timed out" and hung["error"] == "not done after 2 s"
    assert 1.9 < hung["limit"] <= 2 and 2.5 < failed["limit"] <= 4  # the rest of six seconds
    assert hung["tables"] == {"rows": [{"number": 3}]} and failed["status"] == "failed"
    assert "### hangs: timed out in 2 s (not done after 2 s)" in capsys.readouterr().out


def test_ctrl_c_keeps_finished_rows(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_stages(monkeypatch, script, hangs=1, fails=1)
    run_stage = script.run_stage

    def interrupted(*arguments: Any) -> Iterator[dict[str, Any]]:
        for known in run_stage(*arguments):
            yield known
            if known["tables"]:
                raise KeyboardInterrupt

    monkeypatch.setattr(script, "run_stage", interrupted)
    out = tmp_path / "check.json"
    assert script.main(["--cpu", "--out", str(out)]) == 130
    (hung,) = json.loads(out.read_text())["stages"].values()
    assert hung["status"] == "interrupted" and hung["tables"] == {"rows": [{"number": 3}]}
    assert "### hangs: interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--cpu", "--stages", "card,cart"], ["--minutes", "1"]])
def test_refusals(script: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        script.main(words)
    assert exit_.value.code == 2


def test_the_random_model_predicts_successors_in_4_bits(script: ModuleType) -> None:
    """Token t + 1 follows token t as in floats, which the drafts of the check rely on."""
    import device_stages
    import torch

    from forerun.cache.attention import Segment

    shape = device_stages.shapes(cpu=True)[0]
    runner = device_stages.random_runner(shape, cpu=True, slots=1, graphs="")
    packed = device_stages.random_runner(shape, cpu=True, slots=1, graphs="", packing="int4")
    assert packed.decoder.precision.startswith("int4 and int8, ")
    tokens = list(range(40))
    for each in (runner, packed):
        assert each.cache.pages.grow(0, 40)
        logits = each.forward([Segment.chain(0, tokens, tokens)]).logits
        assert logits.argmax(-1).eq(torch.arange(1, 41)).float().mean() > 0.8
