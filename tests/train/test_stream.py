"""The texts of each step are reproducible; captured texts are stored, and damaged ones read again."""

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import ForerunError
from forerun.cli.progress import Tell
from forerun.train import stream
from forerun.train.capture import CaptureStore
from forerun.train.data import Corpus, Document, Example, Passage
from forerun.train.options import Training
from forerun.train.stream import TrainingTexts
from forerun.train.target import Batch, Target, split_batch
from tests.train.conftest import SMALL, Notes, documents


@pytest.fixture
def counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of texts that the target read in each call, with hidden states and top tokens."""
    calls: list[int] = []
    batch = target.batch

    def count(examples: Sequence[Example], **options: object) -> Batch:
        calls.append(len(examples))
        return batch(examples, **options)  # type: ignore[arg-type]

    for module in ("forerun.train.losses", "forerun.train.target"):
        monkeypatch.setattr(f"{module}.FULL_VOCAB", 16)
    monkeypatch.setattr(target, "aux_hidden_layers", (0, 1))
    monkeypatch.setattr(target, "batch", count)
    return calls


def made(
    target: Target,
    corpus: Corpus,
    path: Path,
    tell: Tell | None = None,
    written: CaptureStore | None = None,
    **settings: object,
) -> TrainingTexts:
    training = Training(**(SMALL | {"on_policy": 0.0} | settings))
    texts = TrainingTexts(corpus, target, training, written)
    texts.configure(target.vocab, path, tell or Tell())
    texts.open(keep=False)
    return texts


def equal(a: Batch, b: Batch) -> bool:
    assert a.probs.token_ids is not None and b.probs.token_ids is not None
    pairs = [
        (a.tokens, b.tokens),
        (a.mask, b.mask),
        (a.probs.token_ids, b.probs.token_ids),
        (a.probs.log_probs, b.probs.log_probs),
        (a.token_log_probs, b.token_log_probs),
        *((a.hidden_states[i], b.hidden_states[i]) for i in a.hidden_states),
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def test_batches_are_the_targets_outputs_in_16_bits(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    texts = made(target, corpus, tmp_path / "x")
    got = texts.batch([0, 2, 1])
    read = target.batch([texts.text(n) for n in (0, 2, 1)])
    assert got.tokens.equal(read.tokens) and got.mask.equal(read.mask) and got.vocab == read.vocab
    learned = got.mask
    assert got.probs.token_ids[learned].equal(read.probs.token_ids[learned])  # type: ignore[index]
    assert got.token_log_probs[learned].equal(read.token_log_probs[learned])
    close = dict(rtol=1e-3, atol=1e-3)
    assert torch.allclose(got.probs.log_probs[learned], read.probs.log_probs[learned], **close)
    for layer in (0, 1):
        assert torch.allclose(got.hidden_states[layer], read.hidden_states[layer], rtol=8e-3)


def test_stored_texts_are_not_read_again(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    texts = made(target, corpus, tmp_path / "x")
    first = texts.batch([3, 4])
    assert counted == [2] and equal(texts.batch([3, 4]), first)
    assert equal(texts.batch([4, 4, 5]), texts.batch([4, 4, 5])) and counted == [2, 1]
    texts.close(remove=False)
    texts.open(keep=True)
    assert equal(texts.batch([3, 4]), first) and counted == [2, 1]
    texts.close(remove=True)
    assert not (tmp_path / "x").exists()
    assert equal(texts.batch([3, 4]), first) and counted == [2, 1, 2]


def test_continuations_are_captured_while_they_are_generated(
    target: Target,
    corpus: Corpus,
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds while drafting is paused, too; the values are those of reading."""
    monkeypatch.setattr(target.llm.engine.guard, "paused_steps", 100_000)
    texts = made(target, corpus, tmp_path / "x", on_policy=0.5)
    first = texts.batch([0, 1, 2, 3])
    assert counted == [2], "only texts of the data are read"
    assert equal(texts.batch([0, 1, 2, 3]), first) and counted == [2]
    reading = made(target, corpus, tmp_path / "y", on_policy=0.5)
    reading.captured = lambda n: None  # type: ignore[method-assign]
    assert equal(reading.batch([0, 1, 2, 3]), first) and counted == [2, 4]


def test_texts_captured_before_the_run_are_not_read_again(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    written = CaptureStore(tmp_path / "written", 100, Tell())
    written.open(keep=False)
    own = corpus.examples[:-1]
    for one in split_batch(target.batch(own), own, target.aux_hidden_layers):
        written.add(one)
    counted.clear()
    texts = made(target, corpus, tmp_path / "x", written=written)
    plain = made(target, corpus, tmp_path / "y")
    assert texts.window < plain.window, "both stores share the room"
    everything = range(len(corpus.examples))
    first = texts.batch(everything)
    assert counted == [1], "only the text that was not captured is read"
    assert equal(first, plain.batch(everything))


def test_a_damaged_file_is_replaced(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    texts = made(target, corpus, tmp_path / "x")
    first = texts.batch([0])
    (file,) = (tmp_path / "x").iterdir()
    content = file.read_bytes()
    for number, damaged in enumerate((b"", b"\xff" * 40, content[: len(content) // 2]), 2):
        file.write_bytes(damaged)
        assert equal(texts.batch([0]), first) and counted == [1] * number


def test_the_size_of_the_store_is_bounded(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    small = made(target, corpus, tmp_path / "x", keep_gb=1e-9)
    assert small.window == 1
    for number in (0, 1, 1):
        small.batch([number])
    assert counted == [1, 1] and len(list((tmp_path / "x").iterdir())) == 1
    small.batch([0])
    assert counted == [1, 1, 1]


def test_a_full_disk_costs_only_time(
    target: Target,
    corpus: Corpus,
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tell, missing = Notes(), Notes()
    texts = made(target, corpus, tmp_path / "x", tell)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert equal(texts.batch([0, 1]), texts.batch([0, 1])) and counted == [2, 2]
    assert len(tell.notes) == 1 and "No space left on device" in tell.notes[0]
    texts = made(target, corpus, tmp_path / "nowhere" / "x", missing)
    assert equal(texts.batch([0]), texts.batch([0])) and counted == [2, 2, 1, 1]
    assert len(missing.notes) == 1 and "No such file" in missing.notes[0]


@pytest.mark.parametrize("reuse", [1, 3])
def test_texts_are_reused(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, reuse: int
) -> None:
    """The first texts are new, then one in `reuse`; the others are recent ones."""
    monkeypatch.setattr(stream, "INITIAL_TEXTS", 10)
    texts = TrainingTexts(corpus, target, Training(**(SMALL | {"reuse": reuse})))
    texts.window = 8
    numbers, newest, new = [texts.number(n) for n in range(400)], -1, []
    for n, number in enumerate(numbers):
        if number > newest:
            assert number == newest + 1
            newest = number
            new.append(n)
        else:
            assert number > newest - 8
    assert new[:10] == list(range(10)) and set(np.diff(new[10:])) == {reuse}
    counts = np.bincount(numbers)[20:100]
    assert abs(counts.mean() - reuse) < 0.3 and (reuse == 1 or counts.std() > 0.5)
    again = TrainingTexts(corpus, target, texts.settings)
    again.window = 8
    assert [again.number(n) for n in range(399, 0, -7)] == numbers[399:0:-7]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_texts_of_a_step_are_reproducible(target: Target, corpus: Corpus, share: float) -> None:
    settings = Training(**(SMALL | {"on_policy": share, "accumulate": 2}))
    texts = TrainingTexts(corpus, target, settings)
    steps = [texts.step(n) for n in range(8)]
    assert TrainingTexts(corpus, target, settings).step(6) == steps[6] and texts.step(2) == steps[2]
    found = [texts.text(number) for step in steps for part in step for number in part]
    written = [text for text in found if text.prompt_length == SMALL["prompt_tokens"]]
    assert [len(part) for part in steps[0]] == [3, 3] and len(written) == int(share * len(found))
    others = [text for text in found if text.prompt_length == 1]
    assert share == 1 or set(others[: len(corpus.examples)]) == set(corpus.examples)


def test_data_without_usable_texts_are_refused(target: Target) -> None:
    chat = [Document("a", "a", (Passage("grey " * 60, "x"),))]
    for found, prompt_tokens, message in (
        (documents(['"a"']), 8, "use --on-policy 1"),
        (documents(["[10,12,10,12,10,12,10,12]"]), 45, "longer than prompt_tokens"),
        (chat, 8, r"1 prompts leave no room .* use a larger --tokens"),
    ):
        corpus = Corpus(found, target.tokenizer, 48, prompt_tokens)
        with pytest.raises(ForerunError, match=message):
            TrainingTexts(corpus, target, Training(**SMALL))
