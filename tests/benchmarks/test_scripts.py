"""Every benchmark and measuring script: its help, commands in the documentation, a tiny run."""

import argparse
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.command import run as run_benchmark
from forerun import LLM
from forerun.bench.pair import Pair
from forerun.kernels import native
from tests import tiny
from tests.server.serving import serving

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
NOT_RUN = ("__init__", "command")
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_RUN)
MODULES.append("peers.__main__")
SCRIPTS = ("published_blocks", "published_heads", "load", "device_check")
PAGES = [
    *(ROOT / "README.md", FOLDER / "README.md", FOLDER / "LOG.md"),
    *sorted((ROOT / "docs").glob("*.md")),
]
needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels")


def main_of(module: str):
    return importlib.import_module(f"benchmarks.{module}").main


def commands() -> list[list[str]]:
    """Return the words of each `python -m benchmarks.NAME ..` in the documentation."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.splitlines()]
        prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            for command in re.findall(r"python -m (benchmarks\..*)", line):
                command = re.sub(r"\[.*?\]|,\.\.\.", "", command)  # optional parts
                words = shlex.split(command, comments=True)
                end = next((i for i, word in enumerate(words) if word in (">", "&&")), None)
                found.append(words[:end])
    return found


class Parsed(Exception):
    """Raised instead of running a benchmark."""


@pytest.mark.parametrize("module", MODULES)
def test_help_of_benchmarks(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main_of(module)(["--help"])
    name = module.removesuffix(".__main__")
    assert exit_.value.code == 0 and f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_scripts(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "scripts" / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(path, run_name="__main__")
    assert not exit_.value.code and f"scripts/{script}.py" in capsys.readouterr().out


def test_benchmark_commands_in_the_documentation_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command names an existing benchmark and its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, words: list[str]) -> None:
        parse(self, words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    found = commands()
    assert {words[0].removeprefix("benchmarks.") for words in found} >= {
        module.removesuffix(".__main__") for module in MODULES
    }
    for module, *words in found:
        name = "benchmarks.peers.__main__" if module == "benchmarks.peers" else module
        with pytest.raises(Parsed):
            importlib.import_module(name).main(words)


def test_scripts_named_in_the_documentation_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"scripts/\w+\.py", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_benchmark(lambda: main_of("kernels")(["--formats", "int9"]))
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.startswith("error: there is no format 'int9'")
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("fixed_bandwidth")
def test_compare_drafts_and_load_table(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", f"{pair.directory}/target", "--prompts", f"{pair.directory}/prompts.json"]
    drafts = ["--draft", "suffix", "--draft", f"model:{pair.directory}/draft"]
    flags = [*drafts, "--drafts", "model", "suffix|model", "--tokens", "8", "--repeats", "1"]
    main_of("compare_drafts")([*model, *flags, "--tasks", "1", "--depth", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["draft", "off", "model", "suffix|model"]
    assert all(line.rstrip().endswith("same") for line in lines[1:])
    load = ["--drafts", "suffix", "--loads", "all:2:0,random:1:0.8", "--fixed", "suffix@2"]
    quick = ["--tokens", "8", "--seconds", "0.05", "--rounds", "1"]
    main_of("load_table")([*model, *load, *quick])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| load | plain, tokens/s | suffix, 2 | suffix, auto | recovers, s |"
    assert len(lines) == 5 and lines[2].startswith("| all, 2 at once, 0 | ")


@needs_native
def test_asynchronous_drafting(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", f"{pair.directory}/target", "--draft", f"model:{pair.directory}/draft"]
    prompts = ["--prompts", f"{pair.directory}/prompts.json", "--tokens", "8", "--repeats", "1"]
    main_of("async_drafting")([*flags, *prompts, "--depth", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "anticipated" in lines[0] and "tokens/s" in lines[1]


@pytest.mark.one_in(0)
@pytest.mark.default_model
@needs_native
def test_scripts_for_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They use its tokenizer, weights or drafter head."""
    main_of("past_answers")(["--categories", "edit", "--tokens", "2"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 8 and all(answer["text"] for answer in answers)
    main_of("round_cost")(["--rounds", "2", "--depth", "2"])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [name for name in ("eagle3", "block", "medusa", "mlp") for _ in range(2)]
    main_of("gguf_accuracy")(["--characters", "120", str(ROOT / "LICENSE")])
    assert "as stored: perplexity" in capsys.readouterr().out


@pytest.mark.default_model
@needs_native
def test_host_share_is_part_of_a_step(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "_load", native._load)  # the benchmark replaces it
    main_of("host_share")(["--requests", "2", "--tokens", "4", "--draft", "suffix"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    for line in lines:
        host, total = map(float, re.findall(r"[\d.]+(?= ms)", line))
        assert 0 < host < total


@pytest.mark.default_model
@needs_native
def test_cold_caches(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "_load", native._load)  # the benchmark replaces it
    script = importlib.import_module("benchmarks.cold_caches")
    monkeypatch.setattr(script, "MEGABYTES", (0, 1))
    monkeypatch.setattr(script, "READ", 1)
    monkeypatch.setattr(script, "REPEATS", 2)
    script.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 7 and "1 MB read before a step" in lines[1]


@pytest.mark.default_model
def test_passage_retrieval(tmp_path: Path, monkeypatch, capsys) -> None:
    from forerun.cli import main as cli

    sources = tmp_path / "sources"
    sources.mkdir()
    for path in (ROOT / "forerun" / "measure").glob("*.py"):
        (sources / path.name).write_bytes(path.read_bytes())
    words = ["forerun", "index", str(sources), "--out", str(tmp_path / "index")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    capsys.readouterr()
    main_of("passage_retrieval")([str(tmp_path / "index"), str(sources)])
    lines = capsys.readouterr().out.splitlines()
    speeds = [[float(x) for x in re.findall(r"\d+\.\d\d", line)] for line in lines]
    assert len(speeds) == 3 and speeds[0][0] > speeds[1][0] > speeds[2][0] > 1


def test_cross_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer restores texts, and held-out questions are not in the training set."""
    module = importlib.import_module("benchmarks.cross_vocabulary")
    texts = ["the quick brown fox jumps over the lazy dog " * 3]
    tokenizer = module.other_tokenizer(texts, 280)
    text = "the lazy fox, naïve"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.id_to_token(i) for i in range(3)] == list(module.SPECIAL)
    conversations = module.questions(40)
    assert len(conversations) == 40
    held_out = [json.dumps(c) for c in conversations[: module.HELD_OUT]]
    assert not set(held_out) & {json.dumps(c) for c in conversations[module.HELD_OUT :]}


def test_a_server_under_load_gives_exact_output() -> None:
    """scripts/load.py with few streams against a real server."""
    with serving(LLM(tiny.repetitive(), kv_tokens=8192, max_rows=4)) as server:
        words = [server.url, "--streams", "3", "--seconds", "1", "--json"]
        command = [sys.executable, str(ROOT / "scripts" / "load.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["failed"] == [], done.stderr
    assert report["finished"] > 0 and report["probes_wrong"] == 0 and report["probes"] >= 5
