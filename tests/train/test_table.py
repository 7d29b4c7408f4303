"""Tables that are made beforehand: what the target thought while it wrote, in a directory that
`recycle` reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun import LLM, ConfigError, SamplingParams
from forerun.cli.progress import nothing
from forerun.draft.recycle import TABLE, SuccessorTable
from forerun.errors import ForerunError
from forerun.train import table
from forerun.train.settings import Training
from forerun.train.synthesis import Written
from forerun.train.table import make_table
from tests import tiny
from tests.cli.test_main import run

SETTINGS = Training(tokens=48, prompt_tokens=6, threads=1)


def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = (
        "def add(a, b):",
        "class Stack:",
        "import os",
        "for i in range(",
        "return a +",
        "print(",
    )
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_a_table_holds_what_the_target_says_and_makes_drafts_from_the_first_word(
    tmp_path: Path,
) -> None:
    target, out = str(tiny.spoken()), tmp_path / "table"
    made = make_table(target, [str(prompts(tmp_path))], SETTINGS, out, nothing)
    assert (
        made.texts == 6
        and made.learnt > made.texts
        and sorted(p.name for p in out.iterdir()) == [TABLE, "training.json"]
    )
    params, prompt = SamplingParams.pure(max_tokens=30, ignore_eos=True), "def add(a, b):"
    from_nothing = LLM(target, draft="recycle", kv_tokens=512, depth=4)
    prepared = LLM(target, draft=f"recycle:{out}", kv_tokens=512, depth=4)
    assert len(SuccessorTable.load(out, prepared.decoder.config.vocab)) >= 0.9 * made.laws
    one, other = (llm.generate(prompt, params)[0] for llm in (from_nothing, prepared))
    assert one.token_ids == other.token_ids and one.stats.steps > other.stats.steps


def test_a_disk_that_is_full_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SuccessorTable, "save", full)
    with pytest.raises(ForerunError, match="No space left"):
        make_table(
            str(tiny.spoken()), [str(prompts(tmp_path))], SETTINGS, tmp_path / "table", nothing
        )
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_place_that_is_taken_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        make_table("nowhere", [], SETTINGS, tmp_path / "table", nothing)


def test_what_has_no_meaning_for_a_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one line that says what to leave out, before anything is loaded."""
    flags = (
        "--recipe",
        "table",
        "--target",
        "nowhere",
        "--steps",
        "5",
        "--keep-gb=1",
        "--out",
        str(tmp_path / "t"),
    )
    code, _, err = run(monkeypatch, capsys, "train", *flags)
    assert code == 2 and "leave out --steps and --keep-gb" in err and len(err.splitlines()) == 1


def test_texts_of_its_own_come_beside_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "write", lambda *args: Written(["{}"] * 4, 0, 0, 0.0))
    made = make_table(
        str(tiny.spoken()),
        [str(prompts(tmp_path))],
        replace(SETTINGS, write=4),
        tmp_path / "t",
        nothing,
    )
    assert made.texts == 6 + 4
