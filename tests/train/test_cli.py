"""`forerun train` makes a drafter that the engine can use, resumes after interruptions, and answers
bad input with one line."""

import copy
import errno
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from forerun import LLM, ConfigError, SamplingParams
from forerun.catalog.facts import facts_at, facts_of
from forerun.catalog.transfer import prepare
from forerun.draft import head_files, kinds
from forerun.kernels import native
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import load_config
from forerun.models.gguf.export import write_tokenizer
from forerun.models.hub import DEFAULT, DEFAULT_REPOSITORY
from forerun.train import export, loop
from forerun.train.evaluate import Evaluation, Measurements, TaskResult
from forerun.train.export import Report, card, table
from forerun.train.loop import TrainingRecord, read_checkpoint
from forerun.train.options import Training
from forerun.train.speed import Comparison, Speed
from tests import gguf_files, quantise, tiny
from tests.cli.test_main import run
from tests.train.conftest import FLAGS, SMALL

Verb = Callable[..., tuple[int, str, str]]
RECIPES = {
    "eagle3": ["--draft-vocab", "100", "--unroll", "2"],
    "mtp": ["--unroll", "2"],
    "medusa": ["--heads", "2"],
    "block": ["--block-size", "3", "--block-layers", "1"],
    "small-lm": ["--layers", "1"],
}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    return lambda *args: run(monkeypatch, capsys, "train", *args)


@pytest.fixture
def train(bare: Verb, data: Path) -> Verb:
    """`forerun train` for the tiny target on its data."""
    basics = ["--target", str(tiny.with_tokenizer()), "--data", str(data), *FLAGS]
    return lambda *args: bare(*basics, *args)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Raise SIGINT within a step."""
    learn = loop.Trainer.learn

    def interrupted(self: loop.Trainer) -> tuple[float, int]:
        if self.record.step == step - 1:
            signal.raise_signal(signal.SIGINT)
        return learn(self)

    monkeypatch.setattr(loop.Trainer, "learn", interrupted)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def described(out: Path) -> tuple[dict[str, Any], str]:
    """Return the report and the model card of a drafter."""
    return json.loads((out / "training.json").read_text()), (out / "README.md").read_text()


def gguf_data(tmp_path: Path) -> str:
    """Write texts in the vocabulary of the tokenizers in GGUF files."""
    texts = [f"the king and the ring in the inn, number {i * 37}" * 2 for i in range(12)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


def test_training_writes_a_usable_drafter(train: Verb, data: Path, tmp_path: Path) -> None:
    """It has a model, a report and a card; no other file is left."""
    out = tmp_path / "drafter"
    code, text, err = train("--layers", "1", "--out", str(out))
    assert code == 0, err
    assert "accepted length" in text and f"forerun train --eval {out}" in text
    assert "not compared with what --draft auto selects" in text and "next:" not in text
    assert "step 6 of 6, loss" in err and "after 3 steps" in err and "\x1b" not in err
    assert names(tmp_path) == ["data.jsonl", "drafter"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {*names(out)}
    report, readme = described(out)
    assert len(report["losses"]) == report["steps"] == 6 and report["recipe"]["layers"] == 1
    cases = [(m["temperature"], m["depth"]) for m in report["measured"]]
    assert cases == [(t, d) for t in (0, 0.8) for d in (1, 2, 3)]
    assert "| held-out | 0.8 | " in readme and "depth 3 |" in readme
    llm = LLM(tiny.with_tokenizer(), draft=f"model:{out}", depth=2, kv_tokens=1024)
    (output,) = llm.generate('{"name":', SamplingParams.pure(max_tokens=8))
    assert output.stats.by_source["model"].drafted
    code, text, _ = train("--eval", str(out), "--json")
    assert code == 0 and json.loads(text)["measured"] == report["measured"]


def test_tasks_and_speed(train: Verb, bare: Verb, tmp_path: Path, monkeypatch: Any) -> None:
    """The report has the advice that follows, and counts prompts that are too long."""
    texts = [("edit", "true false null grey"), ("edit", "x" * 600), ("chat", '{"name":"alpha"}')]
    lines = [
        json.dumps({"id": str(i), "category": kind, "prompt": text})
        for i, (kind, text) in enumerate(texts)
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("forerun.measure.workloads.TASKS", tmp_path / "tasks.jsonl")
    out, measuring = tmp_path / "d", ("--tasks", "all", "--speed-rounds", "1", "--depth", "1")
    code, text, err = train("--layers", "1", "--out", str(out), *measuring, "--steps", "0")
    assert code == 0, err
    report, readme = described(out)
    tasks = list(dict.fromkeys(m["task"] for m in report["measured"]))
    assert tasks == ["held-out", "edit", "chat"] and report["left_out"] == {"edit": 1}
    assert "edit: 1 prompts were too long" in text and "edit: 1 prompts were too long" in readme
    drafts = [result["draft"] for result in report["speed"]["results"]]
    assert drafts == ["off", "auto", "suffix+model:DIRECTORY", "model:DIRECTORY"]
    comparison = report["speed"]["comparison"]
    assert comparison["default"] == "suffix" and report["advice"] in readme
    assert report["advice"].replace("DIRECTORY", str(out)) in text
    assert ("next: " in text) == comparison["better"] == report["advice"].startswith("Use it")
    words = ("--eval", str(out), "--target", str(tiny.with_tokenizer()), *FLAGS, "--tasks", "chat")
    code, text, _ = bare(*words, "--depth", "1", "--speed-rounds", "1")  # tasks without data
    assert code == 0 and "tasks texts: " in text and "held-out" not in text


def test_a_time_limit_that_ends_before_the_first_step(train: Verb, tmp_path: Path) -> None:
    """The report lists the measurements that are missing."""
    out, limit = tmp_path / "d", ("--max-minutes", "0.0001", "--speed-rounds", "1")
    code, text, err = train("--layers", "1", "--out", str(out), "--tasks", "chat", *limit)
    assert code == 0, err
    line = "Not measured for lack of time: 12 of 12 accepted lengths, 1 of 1 rounds of speed"
    report, readme = described(out)
    assert line in text.splitlines() and line in readme
    assert report["steps"] == 0 and report["measured"] == [] and len(report["evaluations"]) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", ["small-lm", "eagle3", "medusa"])
def test_a_quantised_target(recipe: str, bare: Verb, data: Path, tmp_path: Path) -> None:
    target, out = tmp_path / "target", str(tmp_path / "drafter")
    quantise.checkpoint(
        target, "packed", 8, size=0, vocab_size=load_config(tiny.with_tokenizer()).vocab
    )
    for path in tiny.with_tokenizer().glob("tokenizer*"):
        shutil.copyfile(path, target / path.name)
    basics = ("--target", str(target), "--data", str(data), *FLAGS, "--steps", "2")
    code, _, err = bare(*basics, "--recipe", recipe, "--out", out, "--json")
    assert code == 0, err
    kind = "model" if recipe == "small-lm" else recipe
    code, _, err = bare(*basics, "--eval", f"{kind}:{out}")
    assert code == 0, err


@pytest.mark.one_in(3)
@pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gguf_target(recipe: str, bare: Verb, tmp_path: Path) -> None:
    """The trained drafter drafts for the file and does not change the output."""
    path = gguf_files.written("llama", "q4_1", tokenizer="gpt2").path
    data, out = gguf_data(tmp_path), str(tmp_path / "drafter")
    words = ("--target", str(path), "--recipe", recipe, "--data", data, "--out", out)
    code, _, err = bare(*words, *RECIPES[recipe], *FLAGS, "--steps", "2", "--depth", "1")
    assert code == 0, err
    draft = "model" if recipe == "small-lm" else recipe
    outputs = []
    for spec in ("off", f"{draft}:{out}"):
        llm = LLM(path, draft=spec, kv_tokens=1024, depth=2)
        params = SamplingParams.pure(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
        outputs += llm.generate("the inn", params)
    plain, drafted = outputs
    assert plain.token_ids == drafted.token_ids and drafted.stats.by_source[draft].drafted > 2


@pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_mtp_module_is_embedded_in_the_gguf_file_of_its_target(
    family: str,
    bare: Verb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From training to drafting with `auto`. A dense model is trained from its file, a hybrid from
    its checkpoint, which training needs."""
    written = gguf_files.written(family, "Q8_0", tokenizer="gpt2")
    target = written.path
    if family == "qwen3_5":
        target = tmp_path / "target"
        copy.deepcopy(written.model).float().save_pretrained(target)
        write_tokenizer(written.path, target)
    data, module, out = gguf_data(tmp_path), tmp_path / "module", tmp_path / "both.gguf"
    words = ("--target", str(target), "--recipe", "mtp", "--data", data, "--out", str(module))
    code, _, err = bare(*words, *RECIPES["mtp"], *FLAGS, "--steps", "3", "--depth", "1")
    assert code == 0, err
    words = ("drafters", "embed", str(module), str(written.path), "--out", str(out))
    code, text, err = run(monkeypatch, capsys, *words)
    assert code == 0 and f"--model {out}" in text, err
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    params = SamplingParams.pure(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    found, original = [], written.path
    for path, draft in (
        (original, "auto"),
        (original, f"mtp:{module}"),
        (out, "auto"),
        (out, "mtp"),
    ):
        llm = LLM(path, draft=draft, kv_tokens=1024)
        found.append((llm.draft, llm.generate("the inn", params, depth=2)[0]))
    assert [name for name, _ in found] == ["suffix", "mtp", "suffix+mtp", "mtp"]
    assert len({tuple(output.token_ids) for _, output in found}) == 1
    separate, embedded = (found[i][1].stats.by_source["mtp"] for i in (1, 3))
    assert (separate.drafted, separate.accepted) == (embedded.drafted, embedded.accepted)
    assert embedded.drafted > 10 and found[2][1].stats.by_source["mtp"].drafted > 2


def test_the_seed_determines_the_drafter(train: Verb, tmp_path: Path) -> None:
    def made(name: str, seed: int) -> bytes:
        words = ("--recipe", "eagle3", "--seed", str(seed), "--steps", "1", "--depth", "1")
        code, _, err = train(*words, "--out", str(tmp_path / name))
        assert code == 0, err
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert made("a", 1) == made("b", 1) != made("c", 2)


def test_ctrl_c_and_resume(train: Verb, bare: Verb, tmp_path: Path, monkeypatch: Any) -> None:
    """It has the results of an uninterrupted run; `--resume --out` needs no other flags."""
    full = json.loads(train("--layers", "1", "--out", str(tmp_path / "full"), "--json")[1])
    out = tmp_path / "parts"
    with monkeypatch.context() as patched:
        interrupt_at(patched, 4)
        code, text, err = train("--layers", "1", "--out", str(out))
    assert (code, text, out.exists()) == (130, "", False)
    again = f"continue with: forerun train --resume --out {out}"
    assert f"stopped after step 4, and kept in {out}.training; {again}" in err
    assert train("--out", str(out))[2].count("use --resume") == 1
    resumed = ("--resume", "--out", str(out))
    for flags, message in (
        (("--rows", "4"), "begun with --rows 3, not 4"),
        (("--target", "other"), "begun with --target "),
        (("--unroll", "2"), "begun with recipe small-lm, which has no unroll"),
    ):
        code, _, err = bare(*resumed, *flags)
        assert code == 2 and message in err
    with monkeypatch.context() as patched:
        interrupt_at(patched, 5)
        code, _, err = bare(*resumed, "--max-minutes", "60")
    assert code == 130 and "continuing after step 4: with --max-minutes the weights depend" in err
    code, text, err = bare(*resumed, "--layers", "1", "--json")
    parts = json.loads(text)
    assert (code, err) == (0, "")
    for part in ("losses", "evaluations", "measured", "data"):
        assert parts[part] == full[part]
    assert names(tmp_path) == ["data.jsonl", "full", "parts"]


def test_resume_needs_the_same_data(
    train: Verb, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(patched, 1)
        assert train("--layers", "1", "--out", str(tmp_path / "d"))[0] == 130
    data.write_text(data.read_text() + '\n{"text": "another one"}')
    code, _, err = train("--resume", "--out", str(tmp_path / "d"))
    assert code == 2 and "the data have changed" in err
    assert read_checkpoint(tmp_path / "d.training")["step"] == 1


def test_a_failure_after_training_loses_nothing(
    train: Verb, bare: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a full disk, reported by the system or by safetensors, and Ctrl-C while measuring."""
    out = str(tmp_path / "d")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_in_rust(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    train_again = ("--recipe", "eagle3", "--speed-rounds", "2", "--out", out)
    for attribute, fault, message in (
        ((export.shutil, "copyfile"), full, "No space left on device"),
        ((head_files, "save_file"), full_in_rust, "No space left on device"),
        (("forerun.train.evaluate.measure_speed",), stop, f"kept in {out}.training; continue"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(*attribute, fault)
            code, _, err = train(*train_again)
        assert code == (130 if fault is stop else 1) and message in err.splitlines()[-1]
        assert "--resume" in err and names(tmp_path) == ["d.training", "data.jsonl"]
        train_again = ("--resume", "--out", out)
        monkeypatch.setattr(loop.Trainer, "learn", None)  # no step may run again
        train = bare
    code, text, _ = bare("--resume", "--out", out, "--speed-rounds", "0", "--json")
    report = json.loads(text)
    assert code == 0 and report["steps"] == 6 and report["speed"] is None
    assert names(tmp_path) == ["d", "data.jsonl"]


def test_zero_steps_write_the_targets_layers_unchanged(train: Verb, tmp_path: Path) -> None:
    out = tmp_path / "d"
    flags = ("--layers", "1", "--steps", "0", "--on-policy", "0", "--json")
    code, text, _ = train(*flags, "--out", str(out))
    report = json.loads(text)
    assert code == 0 and report["losses"] == []
    assert [evaluation["step"] for evaluation in report["evaluations"]] == [0]
    made, full = Checkpoint(out), Checkpoint(tiny.with_tokenizer())
    assert made.where and all(torch.equal(made.read(n), full.read(n)) for n in made.where)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "there is no --out"),
        (["--out", "{tmp}", "--data", "{tmp}/data.jsonl"], "not empty"),
        (["--out", "{tmp}/a/b", "--data", "{tmp}/data.jsonl"], "no directory"),
        (["--out", "{tmp}/link", "--data", "{tmp}/data.jsonl"], "is a link"),
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
        (["--out", "{tmp}/d", "--resume"], "begin without --resume"),
        (["--eval", "{tmp}/d", "--out", "{tmp}/e"], "trains nothing"),
        (["--eval", "{tmp}/d"], "there is no directory"),
        (["--eval", "{tmp}/d", "--tasks", "none"], "there is nothing to measure on"),
        (["--eval", "{tmp}/d", "--tasks", "edits"], "did you mean 'edit'"),
        (["--out", "{tmp}/d", "--data", "{tmp}/data.jsonl", "--tasks", ","], "names none"),
    ],
)  # fmt: skip
def test_bad_input_prints_one_line(
    bare: Verb, data: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "full.txt").write_text("words")
    (tmp_path / "link").symlink_to(tmp_path)
    given = [flag.format(tmp=tmp_path) for flag in flags]
    given = given if "--target" in flags else ["--target", str(tiny.with_tokenizer()), *given]
    code, out, err = bare(*given)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]
    assert len([line for line in err.splitlines() if line.startswith("forerun:")]) == 1
    assert names(tmp_path) == ["data.jsonl", "full.txt", "link"]


def test_ctrl_c_before_the_first_step_leaves_nothing(
    train: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.train.run.TrainingTexts", stop)
    code, _, err = train("--out", str(tmp_path / "d"))
    assert code == 130 and "--resume" not in err and names(tmp_path) == ["data.jsonl"]


def test_a_model_of_another_vocabulary_is_refused(train: Verb, tmp_path: Path) -> None:
    """It has as many tokens, but two of them are swapped."""
    other = tmp_path / "other"
    shutil.copytree(tiny.with_tokenizer(), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for flags in (["--out", str(tmp_path / "d"), "--init", str(other)], ["--eval", str(other)]):
        code, _, err = train(*flags)
        assert code == 2 and "another vocabulary" in err.splitlines()[-1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_drafter_records_the_hub_id_and_licence_of_its_target(
    recipe: str, bare: Verb, data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """They are those of a model in the Hub's cache; `drafters info` and `drafters push` use them."""
    home = tmp_path / "models--org--Big-1B" / "snapshots" / "5"
    shutil.copytree(tiny.with_tokenizer(), home)
    (home / "README.md").write_text("---\nlicense: Apache-2.0\n---\n# Big\n")
    monkeypatch.chdir(home.parent)
    out, words = tmp_path / "d", ["--target", "./5", "--data", str(data), "--recipe", recipe]
    flags = [*RECIPES[recipe], *FLAGS, "--steps", "1", "--depth", "1"]
    code, _, err = bare(*words, *flags, "--out", str(out))
    assert code == 0, err
    monkeypatch.chdir(tmp_path)
    facts = facts_of(str(out))
    assert facts.made_for == "org/Big-1B" and facts.card["license"] == "apache-2.0"
    packed = prepare(out, f"me/Big-1B-{recipe}", None, None, [])
    assert packed.metadata["base_model"] == "org/Big-1B"
    assert packed.metadata["license"] == "apache-2.0"
    assert packed.texts["README.md"].count("base_model:") == 1
    monkeypatch.setattr(
        "forerun.catalog.transfer.facts_of", lambda name, tensors=True: facts_at(home, name)
    )
    code, text, err = run(monkeypatch, capsys, "drafters", "info", str(out))
    assert code == 0 or "does not fit org/Big-1B: size" in err, err
    faults = [line for line in text.splitlines() if " NO " in line]
    assert all(line.startswith("size") for line in faults), "all models are tiny here"
    assert re.search(r"made for +org/Big-1B", text)


def test_a_target_without_a_hub_id_is_recorded_by_name_or_path(
    bare: Verb, data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The default model is recorded by its name, a directory by its absolute path."""
    monkeypatch.setattr("forerun.models.hub.default_model", tiny.with_tokenizer)
    flags = ("--data", str(data), "--recipe", "medusa", *FLAGS, "--steps", "1", "--depth", "1")
    code, _, err = bare(*flags, "--out", str(tmp_path / "default"))
    assert code == 0, err
    assert facts_of(str(tmp_path / "default")).made_for == DEFAULT
    packed = prepare(tmp_path / "default", "me/mine", None, "mit", [])
    assert packed.metadata["base_model"] == DEFAULT_REPOSITORY
    shutil.copytree(tiny.with_tokenizer(), tmp_path / "big")
    monkeypatch.chdir(tmp_path)
    code, _, err = bare("--target", "big", *flags, "--out", "d")
    assert code == 0, err
    monkeypatch.chdir(tmp_path.parent)
    assert facts_of(str(tmp_path / "d")).made_for == str(tmp_path / "big")
    code, text, err = run(monkeypatch, capsys, "drafters", "info", str(tmp_path / "d"))
    assert code == 0 and re.search(rf"target +ok +it was made for {tmp_path / 'big'}", text), err
    with pytest.raises(ConfigError, match="which is no Hub id; give --for ORG/MODEL"):
        prepare(tmp_path / "d", "me/mine", None, "mit", [])


def report_of(
    comparison: Comparison | None, steps: int = 6, compared: bool = True, **settings: Any
) -> Report:
    training = Training(**(SMALL | settings))
    record = TrainingRecord(step=steps, evaluations=[Evaluation(0, 9.0, 0.5, 1.25)])
    results = [
        TaskResult(task, 0.8, depth, 1.5 + depth, 1.25 + depth, 90)
        for task, depth in (("held-out", 1), ("held-out", 2), ("edit", 2))
    ]
    speed = Speed((), comparison, 3, 40, 2, "held-out", {}) if compared else None
    measurements = Measurements(results, {"edit": 2}, speed, ("x",))
    data = {"documents": 9, "held_out": 3}
    values = ("a target", "org/target", "", {"name": "small-lm"}, "model", training, data)
    return Report(*values, record, 12, measurements)


@pytest.mark.parametrize(
    ("times", "interval", "times_plain", "start"),
    [
        (1.3, (1.1, 1.5), 1.6, "Use it: --draft suffix+model:here has 1.30 (1.10 to 1.50) times"),
        (1.3, None, 1.6, "Use it"),
        (1.3, (1.1, 1.5), 0.9, "Do not use it as it is"),
        (1.02, (0.9, 1.1), 1.6, "Whether to use it is open"),
        (0.8, (0.7, 0.9), 1.6, "Do not use it as it is"),
    ],
)
def test_the_advice_follows_from_the_comparison(
    times: float, interval: tuple[float, float] | None, times_plain: float, start: str
) -> None:
    draft = "suffix+model:DIRECTORY"
    found = report_of(Comparison(draft, "suffix", times, interval, times_plain))
    text = found.advice("here")
    assert text.startswith(start) and "DIRECTORY" not in text
    assert ("more texts" in text) == text.startswith("Do not")
    short = report_of(Comparison(draft, "suffix", 0.5, None, 1.0), steps=3, max_minutes=5.0)
    assert "give more --max-minutes" in short.advice("here")
    same = report_of(None)
    assert same.advice("here") == "It is what --draft auto selects already."
    none = report_of(None, compared=False)
    again = "forerun train --eval 'my dir' --target 'a target'"
    assert none.advice("my dir").endswith(again)


def test_the_card_has_a_row_for_each_task_and_temperature() -> None:
    found = report_of(None)
    assert table(found.measurements.measured, [1, 2]) == [
        "| task | temperature | depth 1 | depth 2 |",
        "|---|---|---|---|",
        "| held-out | 0.8 | 2.500 (2.250) | 3.500 (3.250) |",
        "| edit | 0.8 |  | 3.500 (3.250) |",
    ]
    text = card(found)
    assert "edit: 2 prompts were too long" in text and "lack of time: x." in text
    assert "base_model: org/target" in text and "# Drafter for a target" in text
