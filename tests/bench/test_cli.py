"""The bench verbs on the command line: tables, one line and exit code 2 for bad input, and help
without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.bench.pair import Pair
from tests import tiny
from tests.cli.test_main import MODEL, run


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: run(monkeypatch, capsys, "bench", *args)


BAD = {
    "no verb of that name": (["decod"], "decode"),
    "pair without a place": (["pair"], "--out"),
    "pair where a file is": (["pair", "--out", __file__], "not empty"),
    "pair that cannot be": (["pair", "--out", "x", "--vocab", "9"], "--vocab 9"),
    "kernels of no format": (["kernels", "--formats", "int9"], "did you mean 'int"),
    "kernels of no rows": (["kernels", "--rows", ","], "at least one"),
    "kernels of odd rows": (["kernels", "--rows", "1,two"], "'two' is not a whole number"),
    "kernels of zero rows": (["kernels", "--rows", "0"], "--rows 0"),
    "decode with an unknown draft": (["decode", "--drafts", "sufix"], "did you mean 'suffix'"),
    "decode with both": (
        ["decode", "--draft", "off", "--drafts", "suffix"],
        "--draft and --drafts",
    ),
    "decode with an unknown precision": (
        ["decode", "--quantizations", "none,int5"],
        "quantization 'int5'",
    ),
    "decode with an unknown depth": (["decode", "--depths", "deep"], "--depth deep"),
    "decode with no model": (["decode", "--model", "./nowhere"], "no directory ./nowhere"),
    "decode with no prompts": (
        ["decode", "--prompts", "./nowhere.json"],
        "nowhere.json cannot be read",
    ),
    "decode with no requests": (["decode", "--requests", "0"], "--requests 0"),
    "decode over the context": (
        ["decode", "--tokens", str(5 * tiny.SPOKEN)],
        f"context of {tiny.SPOKEN}",
    ),
    "sweep of no temperature": (["sweep", "--temperatures", "0,warm"], "'warm' is not a number"),
    "sweep of bad counts": (["sweep", "--requests", "1,many"], "'many' is not a whole number"),
    "sweep with both": (["sweep", "--depth", "2", "--depths", "1,2"], "--depth and --depths"),
    "sweep of an unknown rule": (["sweep", "--rules", "match,tokn"], "did you mean 'token'"),
    "decode with an unknown flag": (["decode", "--temprature", "1"], "--temperature"),
    "model without acceptance": (["model"], "--acceptance"),
    "model of nonsense": (["model", "--acceptance", "high"], "'high' is not a number"),
    "model over one": (["model", "--acceptance", "0.8", "--siblings", "0.3"], "more than 1"),
    "model of bad costs": (["model", "--acceptance", "0.8", "--verify-cost", "4:1.1"], "one row"),
    "model too deep": (["model", "--acceptance", "0.8", "--depth", "65"], "--depth 65"),
}


@pytest.mark.parametrize("args", BAD.values(), ids=BAD.keys())
def test_bad_input(bench, args: tuple[list[str], str]) -> None:
    given, says = args
    model = MODEL if given[0] in ("decode", "sweep") and "--model" not in given else []
    code, out, err = bench(*given, *model)
    assert (code, out) == (2, "") and "Traceback" not in err
    assert says in err and err.splitlines()[-1].startswith("forerun: ")


def test_model(bench) -> None:
    code, out, err = bench(
        "model", "--acceptance", "0.8", "--draft-cost", "0.1", "--depth", "6", "--json"
    )
    answer = json.loads(out)
    assert code == 0 and not err
    assert answer["best"] == answer["depths"][0] and answer["best"]["speedup"] == pytest.approx(
        2.47, abs=0.005
    )
    flags = [
        "--acceptance",
        "0.7,0.6",
        "--siblings",
        "0.1",
        "--verify-cost",
        "1:1,8:1.1",
        "--fixed-cost",
        "0.2",
    ]
    _, out, _ = bench("model", *flags)
    lines = out.splitlines()
    assert lines[0].split() == ["depth", "rows", "tokens", "a", "pass", "cost", "times", "plain"]
    assert lines[1].split()[:3] == ["1", "3", "1.80"] and lines[-1].startswith("best: depth")
    assert "not to draft" in bench("model", "--acceptance", "0.1", "--draft-cost", "0.5")[1]


@pytest.mark.usefixtures("steady")
def test_a_sweep_has_depths_of_its_own(bench, pair: Pair) -> None:
    """Where none are given, more than one; one that is given, or several, are taken instead."""
    basics = [
        "sweep",
        "--model",
        f"{pair.directory}/target",
        "--tokens",
        "4",
        "--repeats",
        "1",
        "--batches",
        "1",
        "--json",
    ]
    for flags, depths in (
        ([], [1, 2, 4, 8, "auto"]),
        (["--depth", "2"], [2]),
        (["--depths", "3,auto"], [3, "auto"]),
    ):
        code, out, _ = bench(*basics, *flags)
        report = json.loads(out)
        assert code == 0 and report["kind"] == "sweep"
        assert [r["depth"] for r in report["results"] if r["draft"] == "suffix"] == depths


def test_a_client_of_a_server_needs_no_torch() -> None:
    code = "import forerun.bench.server.load, forerun.bench.server.result, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.usefixtures("steady")
def test_decode_prints_a_table_in_a_pipe(bench, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"def f(x):"\n[5, 6, 7]\n')
    files = ["--model", f"{pair.directory}/target", "--prompts", str(tmp_path / "p.jsonl")]
    code, out, err = bench(
        "decode",
        *files,
        "--draft",
        "ngram",
        "--tokens",
        "8",
        "--repeats",
        "1",
        "--dtype",
        "float32",
    )
    lines = out.splitlines()
    assert code == 0 and "round 1 of 1" in err
    assert (
        lines[0].startswith("draft")
        and lines[1].split()[0] == "off"
        and lines[2].split()[0] == "ngram"
    )
    assert lines[2].rstrip().endswith("same") and "─" not in out
    assert (
        "MB of weights at 10.0 GB/s" in lines[3] and "reading prompts is not counted" in lines[-1]
    )


def test_bench_alone_shows_its_verbs(bench) -> None:
    code, out, _ = bench()
    assert code == 0 and all(
        verb in out for verb in ("pair", "kernels", "decode", "sweep", "energy")
    )


@pytest.mark.parametrize(
    "verb", ["pair", "kernels", "decode", "sweep", "energy", "roofline", "serve", "model"]
)
def test_help_is_quick_and_shows_an_example(verb: str) -> None:
    code = (
        f"import sys; from forerun import cli; sys.argv = ['forerun', 'bench', '{verb}', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout and f"forerun bench {verb} " in done.stdout
