"""Every file in examples/ and the Python code in the documentation run.

They run in this process with a tiny model, and once as a user runs them, with the default model if
it is installed."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forerun
from forerun import LLM, SamplingParams
from forerun.draft.ngram import NGram
from forerun.draft.proposer import Proposer
from tests import tiny
from tests.cluster.deployed import NEEDS_RAY
from tests.test_docs import DOCS, ROOT, tokens

EXAMPLES = ROOT / "examples"
OPTIONS = {  # options for short runs
    "drafter.py": (),
    "batch.py": (),
    "demo.py": ("--repeats", "1"),
    "predict.py": ("--repeats", "1", "--tokens", "24", "--changed", "1"),
}
CLUSTER = "cluster_demo.py"
PAGE = "speculative_decoding.py"  # needs a model


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*OPTIONS, CLUSTER, PAGE}


@pytest.mark.parametrize("name", OPTIONS)
def test_examples_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forerun.models.hub.default_model", tiny.repetitive)
    monkeypatch.setattr(sys, "argv", [name, *OPTIONS[name]])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        assert not end.code, "demo.py exits with 1 if a text differs"
    assert len(capsys.readouterr().out.splitlines()) > 1


@pytest.mark.parametrize("depth", [1, 4])
def test_the_algorithm_on_one_page_gives_the_tokens_of_the_engine(depth: int) -> None:
    page = runpy.run_path(str(EXAMPLES / PAGE))
    directory = tiny.repetitive()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    llm = LLM(directory, draft="off", dtype="float64", kv_tokens=1024)
    params = SamplingParams.pure(temperature=0, max_tokens=40, ignore_eos=True)
    for text in ("import os\nimport sys\n" * 3, "The name of the name"):
        prompt = llm.tokens(text)
        tokens, passes = page["generate"](model, NGram(), prompt, 40, depth)
        assert tokens == llm.generate(prompt, params)[0].token_ids
        assert passes < 40


def test_the_algorithm_on_one_page_has_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / PAGE))["main"](str(tiny.repetitive()), "import os\n" * 3)
    assert "forward passes" in capsys.readouterr().err


def run_example(name: str, *options: str, timeout: float = 300) -> str:
    """Run an example as a user does; return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.one_in(0)
@pytest.mark.default_model
@pytest.mark.parametrize("name", ["batch.py", "predict.py"])
def test_examples_run_on_the_default_model(name: str) -> None:
    assert len(run_example(name, *OPTIONS[name]).splitlines()) > 1


@pytest.mark.default_model
def test_the_drafter_of_the_example_is_lossless() -> None:
    """It drafts accepted tokens, and the text is that of plain decoding."""
    plain, drafted = run_example("drafter.py").splitlines()[-2:]
    lengths = [float(re.findall(r"\d\.\d\d", line)[0]) for line in (plain, drafted)]
    assert lengths[0] == 1.0 < lengths[1] and plain.split("ids")[1] == drafted.split("ids")[1]


@NEEDS_RAY
@pytest.mark.default_model
def test_the_example_cluster_answers() -> None:
    output = run_example(CLUSTER)
    assert output.count("prompt tokens were cached") == 12 and "forerun_requests_total" in output


def blocks(page: Path) -> list[str]:
    """Return the blocks of Python on a page."""
    return [
        token.content for token in tokens(page) if token.type == "fence" and token.info == "python"
    ]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "generate.md", DOCS / "write-a-drafter.md"]
)
def test_python_on_pages_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run in order, with a tiny model instead of the named ones."""
    load = forerun.LLM
    monkeypatch.setattr(
        forerun,
        "LLM",
        lambda model=None, **options: load(tiny.repetitive(), kv_tokens=4096, **options),
    )
    names: dict[str, Any] = {"text": "a request that is given earlier"}
    found = [block for block in blocks(page) if not block.startswith("class Proposer:")]
    assert found
    for block in found:
        exec(compile(block, page.name, "exec"), names)
    assert capsys.readouterr().out


def test_the_interface_on_the_page_equals_the_code() -> None:
    (shown,) = [
        block
        for block in blocks(DOCS / "write-a-drafter.md")
        if block.startswith("class Proposer:")
    ]
    functions = [node for node in ast.walk(ast.parse(shown)) if isinstance(node, ast.FunctionDef)]
    named = {function.name: ast.unparse(function.args) for function in functions}
    assert named.keys() == {"open", "propose", "close"}
    for name, parameters in named.items():
        code = inspect.signature(getattr(Proposer, name)).parameters
        plain = [
            each if p.default is p.empty else f"{each}={p.default!r}" for each, p in code.items()
        ]
        assert parameters == ", ".join(plain), name
