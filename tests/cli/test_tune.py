"""`forerun tune` measures all candidates, the best for longer; its choice is reliably faster."""

import json
from pathlib import Path

import pytest

from forerun import ConfigError, SamplingParams
from forerun.bench.decode import DecodePlan
from forerun.bench.pair import Pair
from forerun.cli.tune import AT_HAND
from forerun.cli.tuning import choose, ranked, tune
from forerun.config import Config
from forerun.draft_spec import parse_draft
from forerun.measure.rounds import Result
from forerun.server.settings import read_file
from tests.cli.test_main import MODEL


def result(draft: str, depth: int | str, low: float, times: float, high: float) -> Result:
    return Result(
        "none", draft, depth, "match", "all", 0.0, 1, 100 * times, times, (low, high), 2.0, 1.0, 0.1, 1.0, 0.1, True,
        None, [], [], {}, [], None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("results", "draft", "depth", "why"),
    [
        (
            [("suffix", 5, 1.4, 1.5, 1.6), ("suffix", "auto", 1.1, 1.2, 1.3)],
            "suffix",
            5,
            "the fastest",
        ),
        (
            [("suffix", 5, 1.4, 1.5, 1.6), ("suffix", "auto", 1.3, 1.4, 1.5)],
            "suffix",
            "auto",
            "adapts",
        ),
        (
            [("model:x", "auto", 1.4, 1.5, 1.6), ("ngram", 2, 1.3, 1.4, 1.5)],
            "ngram",
            2,
            "needs no weights",
        ),
        (
            [("model:x", 4, 1.8, 1.9, 2.0), ("ngram", "auto", 1.3, 1.4, 1.5)],
            "model:x",
            4,
            "the fastest",
        ),
        (
            [("model:x", 4, 0.9, 1.2, 1.5), ("ngram", "auto", 1.01, 1.02, 1.03)],
            "off",
            "auto",
            "comes closest",
        ),
        (
            [("model:x", 4, 1.1, 1.5, 1.9), ("ngram", "auto", 0.9, 1.02, 1.2)],
            "model:x",
            4,
            "the fastest",
        ),
    ],
)
def test_the_choice_is_reliably_faster_and_as_simple_as_possible(
    results: list, draft: str, depth: int | str, why: str
) -> None:
    choice = choose([result(*r) for r in results])
    assert (choice.draft, choice.depth) == (draft, depth) and why in choice.why
    assert choice.interval[0] > 1 or draft == "off"


def test_plain_decoding_is_not_a_candidate() -> None:
    drafts = [
        result("suffix", 2, 1.0, 1.1, 1.2),
        result("off", 0, 1.0, 9.0, 9.0),
        result("ngram", 2, 1.1, 1.2, 1.3),
    ]
    assert [r.draft for r in ranked(drafts)] == ["ngram", "suffix"]
    params = SamplingParams(max_tokens=8)
    with pytest.raises(ConfigError, match="nothing to choose between"):
        tune({}, DecodePlan(params, ["off"]), [])


def test_default_candidates_need_only_the_model() -> None:
    assert set(AT_HAND) == {"suffix", "suffix+recycle", "ngram"}
    assert not any(argument for draft in AT_HAND for _, argument in parse_draft(draft))


def test_tune_writes_a_file_that_serve_reads(
    pair: Pair, tmp_path: Path, forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    target, out = f"{pair.directory}/target", tmp_path / "tuned.toml"
    drafts = f"ngram,model:{pair.directory}/draft"
    flags = ["--drafts", drafts, "--depths", "auto,2", "--tokens", "16", "--seconds", "0"]
    flags += ["--quantization", "int8", "--threads", "1", "--out", str(out), "--json"]
    code, text, err = forerun("tune", target, *flags)
    assert code == 0 and not err
    report = json.loads(text)
    arms = {(r["draft"].split(":")[0], r["depth"]) for r in report["short"]}
    assert arms == {("ngram", "auto"), ("ngram", 2), ("model", "auto"), ("model", 2)}
    results = report["results"]
    assert all(r["same"] and r["quantization"] == "int8" for r in report["short"] + results)
    assert results == sorted(results, key=lambda r: -r["times_plain"])
    engine, server = read_file(out)
    assert not server and Config.of(**engine).draft == report["choice"]["draft"]
    assert (engine["model"], engine["quantization"], engine["threads"]) == (target, "int8", 1)
    assert engine["depth"] == report["choice"]["depth"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafts", "off"], "nothing to choose between"),
        (["--drafts", "sufix"], "suffix"),
        (["--depths", "deep"], "depth"),
        (["--out", "tuned.json"], ".toml"),
        (["--out", "no/such/directory/tuned.toml"], "a directory that exists"),
        (["--seconds", "-1"], "seconds"),
        (["--tokens", "1"], "at least 2"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags: list[str], message: str, forerun) -> None:
    code, out, err = forerun("tune", MODEL[1], *flags)
    assert code == 2 and not out and message in err and len(err.strip().splitlines()) == 1
