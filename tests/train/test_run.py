"""Tables for `recycle` and shortlists for draft models, which need no training."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from forerun import LLM, ConfigError, RequestError, SamplingParams
from forerun.cli.progress import nothing
from forerun.draft.recycle import TABLE, SuccessorTable
from forerun.errors import ForerunError
from forerun.models.shortlist import read_shortlist
from forerun.train import run as run_module
from forerun.train.options import Training
from forerun.train.run import make_shortlist, make_table
from forerun.train.synthesis import WrittenTexts
from tests import tiny
from tests.cli.test_main import run

SETTINGS = Training(tokens=48, prompt_tokens=6, threads=1)
PROMPTS = ("def add(a, b):", "class Stack:", "import os", "for i in range(", "return a +", "print(")
TEXT = '{"name":"alphabet","colour":"green grey","sizes":[10,12,1]} ' * 6


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_a_prepared_table_drafts_from_the_first_token(prompts: str, tmp_path: Path) -> None:
    target, out = str(tiny.repetitive()), tmp_path / "table"
    made = make_table(target, [prompts], SETTINGS, out, nothing)
    assert made.texts == 6 and made.positions > made.texts
    assert sorted(path.name for path in out.iterdir()) == [TABLE, "training.json"]
    params, prompt = SamplingParams.pure(max_tokens=30, ignore_eos=True), "def add(a, b):"
    empty = LLM(target, draft="recycle", kv_tokens=512, depth=4)
    prepared = LLM(target, draft=f"recycle:{out}", kv_tokens=512, depth=4)
    entries = len(SuccessorTable.load(out, prepared.decoder.config.vocab))
    assert entries >= 0.9 * made.entries
    one, other = (llm.generate(prompt, params)[0] for llm in (empty, prepared))
    assert one.token_ids == other.token_ids and one.stats.steps > other.stats.steps


def test_a_table_that_cannot_be_written_leaves_no_file(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "table"
    with monkeypatch.context() as patched:
        patched.setattr(SuccessorTable, "save", full)
        with pytest.raises(ForerunError, match="No space left"):
            make_table(str(tiny.repetitive()), [prompts], SETTINGS, out, nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    monkeypatch.setattr(run_module, "write", lambda *args: WrittenTexts(["{}"] * 4, 0, 0, 0.0))
    settings = replace(SETTINGS, write=4)
    made = make_table(str(tiny.repetitive()), [prompts], settings, out, nothing)
    assert made.texts == 6 + 4, "prompts, and texts that the target wrote"
    with pytest.raises(ConfigError, match="is there already"):
        make_table("nowhere", [], SETTINGS, out, nothing)


def test_a_shortlist_has_the_most_frequent_tokens(data: str, tmp_path: Path) -> None:
    """It also has the end tokens. One document is enough to make it."""
    target, out = str(tiny.repetitive()), tmp_path / "list"
    made = make_shortlist(target, [data], 12, SETTINGS, out, nothing)
    llm = LLM(target, draft="off", kv_tokens=512)
    counts = Counter(llm.tokens(TEXT)[1:])  # the first token is never drafted
    ends, found = set(llm.decoder.config.end_ids), read_shortlist(out)
    ids = found.ids.tolist()
    assert len(ids) == made.tokens == 12 and ends <= set(ids)
    assert found.vocab == made.vocab == tiny.PADDED_VOCAB
    others = max(count for token, count in counts.items() if token not in ids)
    assert min(counts[token] for token in ids if token not in ends) >= others
    total = sum(counts.values())
    assert made.counted == total
    assert made.covered == pytest.approx(sum(counts[i] for i in ids) / total)
    settings = replace(SETTINGS, write=20)
    made = make_shortlist(target, [], 50, settings, tmp_path / "own", nothing)
    assert made.tokens == 50 and made.counted > 100 and 0 < made.covered <= 1


def test_a_shortlist_does_not_change_the_output(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = str(tiny.repetitive()), str(tmp_path / "list")
    words = ("train", "--recipe", "shortlist", "--target", target, "--data", data, "--out", out)
    code, text, err = run(monkeypatch, capsys, *words, "--json")
    assert code == 0, err
    assert json.loads(text)["tokens"] == tiny.PADDED_VOCAB, "a small vocabulary is kept completely"
    Path(out).unlink()
    code, text, err = run(monkeypatch, capsys, *words, "--draft-vocab", "100")
    assert code == 0 and "100 of 328 tokens" in text and f"--draft-shortlist {out}" in text, err
    draft = f"model:{tiny.repetitive(0.05)}"
    llm = LLM(target, draft=draft, draft_shortlist=out, kv_tokens=512, depth=3)
    params = SamplingParams.pure(max_tokens=30, ignore_eos=True, temperature=0.7, seed=1)
    found, plain = (llm.generate(TEXT[:20], params, draft=draft)[0] for draft in (None, "off"))
    assert found.token_ids == plain.token_ids and found.stats.drafted


def test_bad_input_prints_one_line_before_anything_is_loaded(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    for recipe, extra, message in (
        ("table", ("--steps", "5", "--keep-gb=1"), "leave out --steps and --keep-gb"),
        ("shortlist", ("--heads", "3"), "leave out all else"),
        ("shortlist", ("--draft-vocab", "0"), "--draft-vocab 0"),
    ):
        words = ("train", "--recipe", recipe, "--target", "nowhere", "--out", out, *extra)
        code, _, err = run(monkeypatch, capsys, *words)
        assert code == 2 and message in err and len(err.splitlines()) == 1
    with pytest.raises(ConfigError, match="is there already"):
        make_shortlist("nowhere", [], None, SETTINGS, Path(data), nothing)
    with pytest.raises(ConfigError, match="there is no directory"):
        make_shortlist("nowhere", [], None, SETTINGS, tmp_path / "a" / "b", nothing)
    (tmp_path / "short.txt").write_text("a")
    short = [str(tmp_path / "short.txt")]
    with pytest.raises(RequestError, match="no tokens to count"):
        make_shortlist(str(tiny.repetitive()), short, None, SETTINGS, tmp_path / "list", nothing)
