"""The recipe shortlist: what texts use most is counted, and a draft model scores that alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from forerun import LLM, ConfigError, RequestError, SamplingParams
from forerun.cli.progress import nothing
from forerun.models.shortlist import read_shortlist
from forerun.train.settings import Training
from forerun.train.shortlist import make_shortlist
from tests import tiny
from tests.cli.test_main import run

SETTINGS = Training(tokens=48, prompt_tokens=6, threads=1, write=20)
TEXT = '{"name":"alphabet","colour":"green grey","sizes":[10,12,1]} ' * 6


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_most_frequent_tokens_and_those_that_end_a_text(data: Path, tmp_path: Path) -> None:
    """One document is enough, and the model is not loaded."""
    target, out = str(tiny.spoken()), tmp_path / "list"
    made = make_shortlist(target, [str(data)], 12, SETTINGS, out, nothing)
    llm = LLM(target, draft="off", kv_tokens=512)
    counts = Counter(llm.tokens(TEXT)[1:])  # nobody drafts the first
    ends = set(llm.decoder.config.end_ids)
    held = read_shortlist(out)
    ids = held.ids.tolist()
    assert (
        len(ids) == made.tokens == 12
        and ends <= set(ids)
        and held.vocab == made.vocab == tiny.WORDED
    )
    assert min(counts[i] for i in ids if i not in ends) >= max(
        n for i, n in counts.items() if i not in ids
    )
    assert made.covered == pytest.approx(sum(counts[i] for i in ids) / sum(counts.values()))
    assert made.counted == sum(counts.values())


def test_a_draft_model_with_it_says_what_the_target_says(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the verb, with and without a size."""
    out = tmp_path / "list"
    words = (
        "train",
        "--recipe",
        "shortlist",
        "--target",
        str(tiny.spoken()),
        "--data",
        str(data),
        "--out",
        str(out),
    )
    code, text, err = run(monkeypatch, capsys, *words, "--json")
    assert code == 0, err
    assert json.loads(text)["tokens"] == tiny.WORDED, (
        "a vocabulary below the smallest size is listed whole"
    )
    out.unlink()
    code, text, err = run(monkeypatch, capsys, *words, "--draft-vocab", "100")
    assert code == 0 and "100 of 328 tokens" in text and f"--draft-shortlist {out}" in text, err
    llm = LLM(
        tiny.spoken(),
        draft=f"model:{tiny.spoken(0.05)}",
        draft_shortlist=str(out),
        kv_tokens=512,
        depth=3,
    )
    params = SamplingParams.pure(max_tokens=30, ignore_eos=True, temperature=0.7, seed=1)
    said, plain = (llm.generate(TEXT[:20], params, draft=draft)[0] for draft in (None, "off"))
    assert said.token_ids == plain.token_ids and said.stats.drafted


def test_without_data_the_target_writes(tmp_path: Path) -> None:
    made = make_shortlist(str(tiny.spoken()), [], 50, SETTINGS, tmp_path / "list", nothing)
    assert made.tokens == 50 and made.counted > 100 and 0 < made.covered <= 1


def test_what_cannot_be_is_said_before_anything_is_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        make_shortlist("nowhere", [], None, SETTINGS, data, nothing)
    with pytest.raises(ConfigError, match="there is no directory"):
        make_shortlist("nowhere", [], None, SETTINGS, tmp_path / "a" / "b", nothing)
    for extra, says in (
        (("--heads", "3"), "leave out all else"),
        (("--draft-vocab", "0"), "--draft-vocab 0"),
    ):
        words = (
            "train",
            "--recipe",
            "shortlist",
            "--data",
            str(data),
            "--out",
            str(tmp_path / "list"),
            *extra,
        )
        code, _, err = run(monkeypatch, capsys, *words)
        assert code == 2 and says in err and "Traceback" not in err
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(RequestError, match="no tokens to count"):
        make_shortlist(
            str(tiny.spoken()),
            [str(tmp_path / "short.txt")],
            None,
            SETTINGS,
            tmp_path / "list",
            nothing,
        )
    assert not (tmp_path / "list").exists()
