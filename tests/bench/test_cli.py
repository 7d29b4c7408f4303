"""The bench verbs: tables, one line and exit code 2 for bad input, help without torch."""

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


BAD_ARGUMENTS = [
    (["decod"], "decode"),
    (["pair"], "--out"),
    (["pair", "--out", __file__], "not empty"),
    (["pair", "--out", "x", "--vocab", "9"], "--vocab 9"),
    (["decode", "--drafts", "sufix"], "did you mean 'suffix'"),
    (["decode", "--draft", "off", "--drafts", "suffix"], "--draft and --drafts"),
    (["decode", "--quantizations", "none,int5"], "quantization 'int5'"),
    (["decode", "--depths", "deep"], "--depth deep"),
    (["decode", "--model", "./nowhere"], "no directory or file ./nowhere"),
    (["decode", "--prompts", "./nowhere.json"], "nowhere.json cannot be read"),
    (["decode", "--requests", "0"], "--requests 0"),
    (["decode", "--tokens", str(5 * tiny.LONG_CONTEXT)], f"context of {tiny.LONG_CONTEXT}"),
    (["decode", "--temprature", "1"], "--temperature"),
    (["decode", "--out", "x.html"], "does not end in .jsonl"),
    (["sweep", "--out", "./nowhere/x.jsonl"], "in a directory that exists"),
    (["sweep", "--temperatures", "0,warm"], "'warm' is not a number"),
    (["sweep", "--requests", "1,many"], "'many' is not a whole number"),
    (["sweep", "--depth", "2", "--depths", "1,2"], "--depth and --depths"),
    (["sweep", "--rules", "match,tokn"], "did you mean 'token'"),
    (["model"], "--acceptance"),
    (["model", "--acceptance", "high"], "'high' is not a number"),
    (["model", "--acceptance", "0.8", "--siblings", "0.3"], "more than 1"),
    (["model", "--acceptance", "0.8", "--verify-cost", "4:1.1"], "one row"),
    (["model", "--acceptance", "0.8", "--depth", "65"], "--depth 65"),
]


@pytest.mark.parametrize(("args", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line_and_exit_code_2(bench, args: list[str], message: str) -> None:
    model = MODEL if args[0] in ("decode", "sweep") and "--model" not in args else []
    code, out, err = bench(*args, *model)
    assert (code, out) == (2, "") and "Traceback" not in err
    assert message in err and err.splitlines()[-1].startswith("forerun: ")


def test_bench_model_finds_the_best_depth(bench) -> None:
    flags = ["--acceptance", "0.8", "--draft-cost", "0.1", "--depth", "6", "--json"]
    code, out, err = bench("model", *flags)
    answer = json.loads(out)
    assert code == 0 and not err and answer["best"] == answer["depths"][0]
    assert answer["best"]["speedup"] == pytest.approx(2.47, abs=0.005)
    flags = ["--acceptance", "0.7,0.6", "--siblings", "0.1", "--verify-cost", "1:1,8:1.1"]
    lines = bench("model", *flags, "--fixed-cost", "0.2", "--ahead", "0.5")[1].splitlines()
    assert lines[0].split() == ["depth", "rows", "tokens", "a", "pass", "cost", "times", "plain"]
    assert lines[1].split()[:3] == ["1", "3", "1.80"] and lines[-1].startswith("best: depth")
    assert "plain decoding" in bench("model", "--acceptance", "0.1", "--draft-cost", "0.5")[1]
    flags = ["--acceptance", "0.8", "--draft-cost", "0.4", "--inner", "0.8:0.08", "--json"]
    inner = json.loads(bench("model", *flags)[1])["inner"]
    assert inner["depth"] > 0 and inner["draft_cost"] < 0.4


@pytest.mark.usefixtures("fixed_bandwidth")
def test_default_depths_of_a_sweep(bench, pair: Pair) -> None:
    base = ["sweep", "--model", f"{pair.directory}/target", "--tokens", "4", "--repeats", "1"]
    for flags, depths in (
        ([], [1, 2, 4, 8, "auto"]),
        (["--depth", "2"], [2]),
        (["--depths", "3,auto"], [3, "auto"]),
    ):
        code, out, _ = bench(*base, "--batches", "1", "--json", *flags)
        report = json.loads(out)
        assert code == 0 and report["kind"] == "sweep"
        assert [r["depth"] for r in report["results"] if r["draft"] == "suffix"] == depths


@pytest.mark.usefixtures("fixed_bandwidth")
def test_decode_prints_a_table_in_a_pipe(bench, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"def f(x):"\n[5, 6, 7]\n')
    files = ["--model", f"{pair.directory}/target", "--prompts", str(tmp_path / "p.jsonl")]
    flags = ["--draft", "ngram", "--tokens", "8", "--repeats", "1", "--dtype", "float32"]
    code, out, err = bench("decode", *files, *flags)
    lines = out.splitlines()
    assert code == 0 and "round 1 of 1" in err
    assert [line.split()[0] for line in lines[:3]] == ["draft", "off", "ngram"]
    assert lines[2].rstrip().endswith("same") and "─" not in out
    assert "MB of weights at 10.0 GB/s" in lines[3] and "prefill is not counted" in lines[-1]


def test_start_prints_a_table(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.bench import start

    found = [start.Start("a", "serve", 1.5, 0.25, 9_000_000)]
    monkeypatch.setattr(start, "measure_starts", lambda *_: found)
    code, out, _ = bench("start", str(tiny.repetitive()))
    assert code == 0 and out.splitlines()[1].split()[:4] == ["serve", "1.50", "0.25", "9"]
    report = json.loads(bench("start", "--json", *MODEL)[1])
    assert report["starts"][0]["ready"] == 1.5 and report["weights_bytes"] > 0


def test_bench_without_a_verb_lists_verbs_and_scripts(bench) -> None:
    code, out, _ = bench()
    assert code == 0
    words = ("pair", "decode", "sweep", "start", "serve", "model", "benchmarks.peers", ".roofline")
    assert all(word in out for word in words)


def test_help_is_quick_and_shows_an_example() -> None:
    verbs = ("pair", "decode", "sweep", "start", "serve", "model")
    code = (
        "import sys; from forerun.cli import main as cli\n"
        f"for verb in {verbs}:\n"
        "    sys.argv = ['forerun', 'bench', verb, '--help']\n"
        "    try: cli.main()\n    except SystemExit: print('end of', verb)\n"
        "    assert not {'torch', 'transformers', 'numpy', 'httpx2'} & set(sys.modules), verb"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rest = done.stdout
    for verb in verbs:
        shown, _, rest = rest.partition(f"end of {verb}\n")
        assert "--json" in shown and f"forerun bench {verb} " in shown
