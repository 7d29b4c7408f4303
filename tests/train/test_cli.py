"""The verb: from data to a directory that the engine drafts with, interrupted and taken up, one
line for bad input."""

import errno
import json
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError

from forerun import LLM, ConfigError, SamplingParams
from forerun.catalogue.facts import facts_at, facts_of
from forerun.catalogue.push import pack
from forerun.draft import head_files as stored
from forerun.models.config import load_config
from forerun.models.hub import DEFAULT, DEFAULT_REPOSITORY
from forerun.train import export, loop
from forerun.train.checkpoint import read_checkpoint
from tests import quantise, tiny
from tests.cli.test_main import run
from tests.train.conftest import SMALL

Verb = Callable[..., tuple[int, str, str]]
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path) -> Verb:
    """`forerun train` for the tiny target, on its data."""
    basics = ["--target", str(tiny.worded()), "--data", str(data), "--layers", "1", *FLAGS]
    return lambda *args: run(monkeypatch, capsys, "train", *basics, *args)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    return lambda *args: run(monkeypatch, capsys, "train", *args)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C in the middle of a step."""
    right = loop.Trainer.learn

    def learn(self: loop.Trainer) -> tuple[float, int]:
        if self.record.step == step - 1:
            signal.raise_signal(signal.SIGINT)
        return right(self)

    monkeypatch.setattr(loop.Trainer, "learn", learn)


def test_from_data_to_a_drafter(train: Verb, bare: Verb, data: Path, tmp_path: Path) -> None:
    """A directory with all that belongs to a model and a card that says where it comes from;
    nothing else is left."""
    out = tmp_path / "drafter"
    code, text, err = train("--out", str(out))
    assert code == 0, err
    assert "accepted length" in text and f"forerun train --eval {out}" in text
    assert "not compared with what --draft auto takes" in text and "next:" not in text
    assert "step 6 of 6, loss" in err and "after 3 steps" in err and "\x1b" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "drafter"]
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= {path.name for path in out.iterdir()}
    report, card = json.loads((out / "training.json").read_text()), (out / "README.md").read_text()
    assert len(report["losses"]) == report["steps"] == 6 and report["recipe"]["layers"] == 1
    assert [(m["temperature"], m["depth"]) for m in report["measured"]] == [
        (t, d) for t in (0, 0.8) for d in (1, 2, 3)
    ]
    for fact in (
        "| held-out | 0.8 | ",
        "depth 3 |",
        str(data),
        '"seed": 0',
        "1 - TV",
        "q(x) / p(x)",
    ):
        assert fact in card
    assert report["data"]["sha256"] in card
    llm = LLM(tiny.worded(), draft=f"model:{out}", kv_tokens=1024)
    assert (
        llm.generate('{"name":', SamplingParams.pure(max_tokens=8))[0]
        .stats.by_source["model"]
        .drafted
    )
    code, text, _ = bare(
        "--eval", str(out), "--target", str(tiny.worded()), "--data", str(data), "--json", *FLAGS
    )
    assert code == 0 and json.loads(text)["measured"] == report["measured"]


def test_the_card_says_how_to_measure_it_again(
    train: Verb, bare: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By task and with the speed; its command gives the same accepted lengths. What is too long is
    counted."""
    tasks = [
        ("edit", "true false null grey"),
        ("edit", "[1,2,3]"),
        ("edit", "x" * 600),
        ("chat", '{"name":"alpha"}'),
    ]
    lines = [
        json.dumps({"id": str(i), "category": kind, "prompt": text})
        for i, (kind, text) in enumerate(tasks)
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("forerun.measure.workloads.TASKS", tmp_path / "tasks.jsonl")
    out = tmp_path / "d"
    code, text, err = train(
        "--out", str(out), "--tasks", "all", "--speed-rounds", "1", "--steps", "0"
    )
    assert code == 0, err
    report, card = json.loads((out / "training.json").read_text()), (out / "README.md").read_text()
    assert list(dict.fromkeys(m["task"] for m in report["measured"])) == [
        "held-out",
        "edit",
        "chat",
    ]
    assert report["left_out"] == {"edit": 1} and "left out, since they are too long: edit 1" in text
    assert (
        "edit: 1 prompts were too long" in card
        and "| chat | 0.8 | " in card
        and "| plain decoding | " in card
    )
    speed = report["speed"]
    assert [pace["depth"] for pace in speed["paces"]] == [0, *["auto"] * 3, 1, 2, 3]
    assert speed["best_depth"] in (1, 2, 3)
    assert f"best fixed depth is {speed['best_depth']}" in card and "best fixed depth" in text
    assert speed["comparison"]["default"] == "suffix" and report["advice"] in card
    assert report["advice"].replace("DIRECTORY", str(out)) in text
    assert (
        ("next: " in text) == speed["comparison"]["better"] == report["advice"].startswith("Use it")
    )
    (told,) = re.findall(r"measured by `forerun train (.*)`", card)
    words = [str(out) if word == "DIRECTORY" else word for word in shlex.split(told)]
    code, text, _ = bare(*words, "--json")
    again = json.loads(text)
    assert code == 0 and all(again[name] == report[name] for name in ("measured", "left_out"))
    assert again["speed"]["tokens"] == speed["tokens"]
    code, text, _ = bare(
        "--eval", str(out), "--target", str(tiny.worded()), *FLAGS, "--tasks", "chat"
    )
    assert code == 0 and {line.split()[0] for line in text.splitlines()[:-1]} == {"task", "chat"}
    assert text.splitlines()[-1].startswith("It was not compared with what --draft auto takes")
    words = [
        "--eval",
        str(out),
        "--target",
        str(tiny.worded()),
        *FLAGS,
        "--tasks",
        "chat",
        "--speed-rounds",
        "1",
    ]
    code, text, _ = bare(*words)  # without data, on the tasks
    assert (
        code == 0
        and "tasks texts, " in text
        and "auto, depth auto" in text
        and "compared" not in text
    )


def test_a_run_whose_time_is_over_when_it_is_set_up(train: Verb, tmp_path: Path) -> None:
    """It writes the drafter as it is, and says what it leaves out."""
    out = tmp_path / "d"
    code, text, err = train(
        "--out", str(out), "--max-minutes", "0.0001", "--tasks", "chat", "--speed-rounds", "1"
    )
    assert code == 0, err
    (line,) = (line for line in text.splitlines() if "for want of time" in line)
    assert line == "not measured, for want of time: held-out, chat, the speed"
    report, card = json.loads((out / "training.json").read_text()), (out / "README.md").read_text()
    assert report["steps"] == 0 and report["measured"] == [] and len(report["evaluations"]) == 1
    assert line.replace("not", "Not", 1) + "." in card


@pytest.mark.parametrize("recipe", ["small-lm", "eagle3", "medusa"])
def test_a_quantised_target(recipe: str, bare: Verb, data: Path, tmp_path: Path) -> None:
    """Drafters learn from the very numbers that serve."""
    target, out = tmp_path / "target", tmp_path / "drafter"
    quantise.checkpoint(target, "packed", 8, size=0, vocab_size=load_config(tiny.worded()).vocab)
    for path in tiny.worded().glob("tokenizer*"):
        shutil.copyfile(path, target / path.name)
    given = ("--target", str(target), "--data", str(data), "--recipe", recipe, *FLAGS)
    code, _, err = bare(*given, "--out", str(out), "--json")
    assert code == 0, err
    kind = "model" if recipe == "small-lm" else recipe
    code, _, err = bare(
        "--target", str(target), "--eval", f"{kind}:{out}", "--data", str(data), *FLAGS
    )
    assert code == 0, err


def test_a_seed_gives_one_drafter(bare: Verb, data: Path, tmp_path: Path) -> None:
    """Also what begins at random follows from the seed."""

    def made(name: str, seed: int) -> bytes:
        out = tmp_path / name
        given = (
            "--target",
            str(tiny.worded()),
            "--data",
            str(data),
            "--recipe",
            "eagle3",
            "--seed",
            str(seed),
        )
        code, _, err = bare(*given, "--out", str(out), *FLAGS, "--steps", "1")
        assert code == 0, err
        return (out / "model.safetensors").read_bytes()

    assert made("a", 1) == made("b", 1) != made("c", 2)


def test_ctrl_c_and_resume(
    train: Verb, bare: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers as without; a plain `--resume --out` knows all that was said before."""
    code, text, _ = train("--out", str(tmp_path / "whole"), "--json")
    whole = json.loads(text)
    assert code == 0
    out = tmp_path / "halves"
    with monkeypatch.context() as patched:
        interrupt_at(patched, 4)
        code, text, err = train("--out", str(out))
    assert (code, text, out.exists()) == (130, "", False)
    assert (
        f"stopped after step 4, and kept in {out}.training; go on with: forerun train --resume --out {out}"
        in err
    )
    assert train("--out", str(out))[2].count("use --resume") == 1
    code, _, err = bare("--resume", "--out", str(out), "--rows", "4")
    assert code == 2 and "begun with --rows 3, not 4" in err
    code, _, err = bare("--resume", "--out", str(out), "--target", "other")
    assert code == 2 and "begun with --target " in err
    code, _, err = bare("--resume", "--out", str(out), "--unroll", "2")
    assert code == 2 and "begun with recipe small-lm, which has no unroll" in err
    code, text, err = bare(
        "--resume", "--out", str(out), "--layers", "1", "--max-minutes", "60", "--json"
    )
    halves = json.loads(text)
    assert (code, err) == (0, "")
    for part in ("losses", "evaluations", "measured", "data"):
        assert halves[part] == whole[part]
    assert not (tmp_path / "halves.training").exists()


@pytest.mark.parametrize("minutes", [[], ["--max-minutes", "60"]])
def test_who_goes_on_by_the_clock_is_told_that_the_weights_differ(
    minutes: list[str], train: Verb, bare: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(patched, 4)
        assert train("--out", str(tmp_path / "d"))[0] == 130
    code, _, err = bare("--resume", "--out", str(tmp_path / "d"), *minutes)
    assert code == 0 and "going on after step 4" in err
    assert ("with --max-minutes the clock decides" in err) == bool(minutes)


def test_resume_needs_the_same_data(
    train: Verb, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(patched, 1)
        assert train("--out", str(tmp_path / "d"))[0] == 130
    data.write_text(data.read_text() + '\n{"text": "another one"}')
    code, _, err = train("--resume", "--out", str(tmp_path / "d"))
    assert code == 2 and "the data have changed" in err
    assert read_checkpoint(tmp_path / "d.training")["step"] == 1


def test_a_full_disk_at_the_end_loses_nothing(
    train: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "d"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export.shutil, "copyfile", full)
        code, _, err = train("--out", str(out))
    assert code == 1 and "No space left on device" in err.splitlines()[-1] and "--resume" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.training", "data.jsonl"]
    monkeypatch.setattr(loop.Trainer, "learn", None)  # no step is taken again
    code, text, _ = train("--resume", "--out", str(out), "--json")
    assert code == 0 and json.loads(text)["steps"] == 6 and out.is_dir()


def test_who_does_not_want_to_wait_for_the_measurement_goes_on_without(
    train: Verb, bare: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the finished drafter is measured loses no step; what is measured may be less
    afterwards."""
    out = tmp_path / "d"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("forerun.train.findings.measure_speed", stop)
        code, _, err = train("--out", str(out), "--speed-rounds", "2", "--tasks", "chat")
    assert code == 130 and f"kept in {out}.training; go on with" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.training", "data.jsonl"]
    code, text, _ = bare(
        "--resume", "--out", str(out), "--speed-rounds", "0", "--tasks", "none", "--json"
    )
    report = json.loads(text)
    assert code == 0 and report["speed"] is None and not report["left_out"] and report["steps"] == 6


def test_no_step_at_all_writes_the_layers_as_they_are(train: Verb, tmp_path: Path) -> None:
    code, text, _ = train(
        "--out", str(tmp_path / "d"), "--steps", "0", "--json", "--on-policy", "0"
    )
    report = json.loads(text)
    assert (
        code == 0 and report["losses"] == [] and [e["step"] for e in report["evaluations"]] == [0]
    )
    from forerun.models.weights import Checkpoint

    mine, theirs = Checkpoint(tmp_path / "d"), Checkpoint(tiny.worded())
    assert mine.where and all(
        torch.equal(mine.read(name), theirs.read(name)) for name in mine.where
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "there is no --out"),
        (["--out", "{tmp}", "--data", "{tmp}/data.jsonl"], "not empty"),
        (["--out", "{tmp}/a/b", "--data", "{tmp}/data.jsonl"], "no directory"),
        (["--out", "{tmp}/d", "--data", "{tmp}/gone.txt"], "cannot be read"),
        (["--out", "{tmp}/d", "--data", "{tmp}/full.txt"], "one document only"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--recipe", "small"], "did you mean 'small-lm'"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--target", "{tmp}"], "no config.json"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--tokens", "99999"], "give at most 256"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--layers", "9", "--on-policy", "0"], "target's 3"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--init", "model", "--layers", "1"], "contradict"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--on-policy", "1.5"], "share from 0 to 1"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--temperature", "0"], "over 0"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--steps", "-1"], "--steps -1"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--learning-rate", "nan"], "--learning-rate nan"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--prompt-tokens", "255"], "leaves no room"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--dtype", "float16"], "float16"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--kl", "0", "--tv", "0"], "nothing to learn"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--recipe", "eagle", "--unroll", "3"], "mean 'eagle3'"),
        (["--out", "{tmp}/d", "--resume"], "begin without --resume"),
        (["--eval", "{tmp}/d", "--out", "{tmp}/e"], "trains nothing"),
        (["--eval", "{tmp}/d", "--data", "{tmp}/data.jsonl"], "there is no directory"),
        (["--eval", "{tmp}/d"], "there is no directory"),
        (["--eval", "{tmp}/d", "--tasks", "none"], "there is nothing to measure on"),
        (["--eval", "{tmp}/d", "--tasks", "edits"], "did you mean 'edit'"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--tasks", ","], "names none"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--speed-rounds", "-1"], "--speed-rounds -1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    bare: Verb, data: Path, tmp_path: Path, flags: list[str], says: str
) -> None:
    (tmp_path / "full.txt").write_text("words")
    flags = flags if "--target" in flags else ["--target", str(tiny.worded()), *flags]
    code, out, err = bare(*(flag.format(tmp=tmp_path) for flag in flags))
    assert (code, out) == (2, "") and says in err.splitlines()[-1]
    assert len([line for line in err.splitlines() if line.startswith("forerun:")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "full.txt"]


def test_a_link_is_no_place_for_a_drafter(bare: Verb, data: Path, tmp_path: Path) -> None:
    """It would be noticed at the end: a directory cannot take the place of a link."""
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "place")
    code, _, err = bare("--out", str(tmp_path / "link"), "--data", str(data))
    assert code == 2 and "is a link" in err


@pytest.mark.parametrize("recipe", ["small-lm", "medusa", "eagle3"])
def test_a_full_disk_in_safetensors_words_loses_nothing(
    recipe: str, bare: Verb, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(stored, "save_file", full)
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    flags = [
        "--target",
        str(tiny.worded()),
        "--data",
        str(data),
        *FLAGS,
        "--steps",
        "1",
        "--recipe",
        recipe,
    ]
    code, _, err = bare(*flags, "--out", str(tmp_path / "d"))
    assert code == 1 and "No space left on device" in err.splitlines()[-1] and "--resume" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.training", "data.jsonl"]


def test_ctrl_c_before_the_first_step_leaves_nothing(
    train: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.train.run.Stream", stop)
    code, _, err = train("--out", str(tmp_path / "d"))
    assert code == 130 and "--resume" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_model_of_another_vocabulary_is_refused(bare: Verb, data: Path, tmp_path: Path) -> None:
    """As many tokens, of other texts: what it learnt would mean something else."""
    other = tmp_path / "other"
    shutil.copytree(tiny.worded(), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    basics = ["--target", str(tiny.worded()), "--data", str(data), *FLAGS]
    for flags in (["--out", str(tmp_path / "d"), "--init", str(other)], ["--eval", str(other)]):
        code, _, err = bare(*basics, *flags)
        assert code == 2 and "another vocabulary" in err.splitlines()[-1]


RECIPES = {
    "eagle3": ["--draft-vocab", "100"],
    "mtp": [],
    "medusa": ["--heads", "2"],
    "block": ["--block-size", "3", "--block-layers", "1"],
    "small-lm": ["--layers", "1"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_drafter_says_which_target_it_is_for(
    recipe: str,
    bare: Verb,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """`drafters info` checks it against that target, from any directory, and `drafters push` needs
    to be told nothing else where the target has a Hub id and a licence."""
    home = tmp_path / "models--org--Big-1B" / "snapshots" / "5"
    shutil.copytree(tiny.worded(), home)
    (home / "README.md").write_text("---\nlicense: Apache-2.0\n---\n# Big\n")
    monkeypatch.chdir(home.parent)
    out, flags = tmp_path / "d", [flag for flag in FLAGS if not flag.startswith("--steps")]
    words = [
        "--target",
        "./5",
        "--data",
        str(data),
        "--recipe",
        recipe,
        *RECIPES[recipe],
        *flags,
        "--steps",
        "1",
    ]
    code, _, err = bare(*words, "--out", str(out))
    assert code == 0, err
    monkeypatch.chdir(tmp_path)
    facts = facts_of(str(out))
    assert facts.made_for == "org/Big-1B" and facts.card["license"] == "apache-2.0"
    parcel = pack(out, f"me/Big-1B-{recipe}", None, None, [])
    assert (
        parcel.metadata["base_model"] == "org/Big-1B" and parcel.metadata["license"] == "apache-2.0"
    )
    assert (
        parcel.texts["README.md"].count("base_model:") == 1
        and "# Drafter for ./5" in parcel.texts["README.md"]
    )
    monkeypatch.setattr(
        "forerun.catalogue.pull.facts_of", lambda name, tensors=True: facts_at(home, name)
    )
    code, text, err = run(monkeypatch, capsys, "drafters", "info", str(out))
    assert code == 0 or "does not fit org/Big-1B: size" in err, err
    wrong = [
        line for line in text.splitlines() if " NO " in line and not line.startswith("size")
    ]  # all here are tiny
    assert (
        re.search(r"made for +org/Big-1B", text)
        and not wrong
        and "names no target" not in text + err
    )


def test_a_drafter_of_the_default_model_says_so(
    bare: Verb, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It named none: `drafters push` asked for --for, and `drafters info` checked nothing."""
    monkeypatch.setattr("forerun.models.hub.default_model", tiny.worded)
    out = tmp_path / "d"
    code, _, err = bare("--data", str(data), "--recipe", "medusa", *FLAGS, "--out", str(out))
    assert code == 0, err
    assert facts_of(str(out)).made_for == DEFAULT
    assert pack(out, "me/mine", None, "mit", []).metadata["base_model"] == DEFAULT_REPOSITORY


def test_a_drafter_of_a_model_in_a_directory_records_the_whole_path(
    bare: Verb, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """So that it is found later from anywhere; whoever uploads it is asked for the Hub id."""
    shutil.copytree(tiny.worded(), tmp_path / "big")
    monkeypatch.chdir(tmp_path)
    code, _, err = bare(
        "--target", "big", "--data", str(data), "--recipe", "mtp", *FLAGS, "--out", "d"
    )
    assert code == 0, err
    monkeypatch.chdir(tmp_path.parent)
    assert facts_of(str(tmp_path / "d")).made_for == str(tmp_path / "big")
    code, text, err = run(monkeypatch, capsys, "drafters", "info", str(tmp_path / "d"))
    assert code == 0 and re.search(rf"target +ok +it was made for {tmp_path / 'big'}", text), (
        text + err
    )
    with pytest.raises(ConfigError, match="which is no Hub id; give --for ORG/MODEL"):
        pack(tmp_path / "d", "me/mine", None, "mit", [])
