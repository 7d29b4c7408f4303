"""What the target thinks of a text is kept and comes back as it was; a record that is not right is
made again."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.cli.progress import Tell
from forerun.train import captured, stream
from forerun.train.capture import Batch, Target, apart
from forerun.train.captured import Kept
from forerun.train.data import Corpus
from forerun.train.settings import Training
from forerun.train.stream import Harvest, Stream
from tests.train.conftest import SMALL


class Noting(Tell):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts the target read, call by call; it says its states too, and the likeliest
    tokens of its laws."""
    calls: list[int] = []
    batch = target.batch

    def count(examples: list[object], **options: object) -> Batch:
        calls.append(len(examples))
        return batch(examples, **options)  # type: ignore[arg-type]

    for module in ("forerun.train.losses", "forerun.train.captured"):
        monkeypatch.setattr(f"{module}.FULL", 16)
    monkeypatch.setattr(target, "aux_hidden_layers", (0, 1))
    monkeypatch.setattr(target, "batch", count)
    return calls


def made(
    target: Target, corpus: Corpus, path: Path, tell: Tell | None = None, **settings: object
) -> Harvest:
    training = Training(**(SMALL | {"on_policy": 0.0} | settings))
    return Harvest(
        target, Stream(corpus, target, training), target.vocab, training, path, tell or Tell()
    )


def equal(a: Batch, b: Batch) -> bool:
    assert (
        a.law.tokens is not None and b.law.tokens is not None and a.states.keys() == b.states.keys()
    )
    pairs = [
        (a.tokens, b.tokens),
        (a.mask, b.mask),
        (a.law.tokens, b.law.tokens),
        (a.law.logs, b.law.logs),
    ]
    pairs += [(a.said, b.said), *((a.states[i], b.states[i]) for i in a.states)]
    return all(torch.equal(x, y) for x, y in pairs)


def test_it_is_what_the_target_says_to_two_bytes(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    mine = made(target, corpus, tmp_path / "x")
    got = mine.batch([0, 2, 1])
    said = target.batch([mine.stream.text(n) for n in (0, 2, 1)])
    assert got.tokens.equal(said.tokens) and got.mask.equal(said.mask) and got.vocab == said.vocab
    assert got.law.tokens is not None and said.law.tokens is not None
    counts = got.mask
    assert got.law.tokens[counts].equal(said.law.tokens[counts]) and got.said[counts].equal(
        said.said[counts]
    )
    assert torch.allclose(got.law.logs[counts], said.law.logs[counts], rtol=1e-3, atol=1e-3)
    for boundary in (0, 1):
        assert torch.allclose(got.states[boundary], said.states[boundary], rtol=8e-3)


def test_what_comes_back_is_read_and_the_same(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    mine, path = made(target, corpus, tmp_path / "x"), tmp_path / "x"
    never_kept = mine.batch([3, 4])
    mine.open(keep=False)
    first = mine.batch([3, 4])
    assert counted == [2, 2] and equal(mine.batch([3, 4]), first) and equal(never_kept, first)
    assert equal(mine.batch([4, 4, 5]), mine.batch([4, 4, 5])) and counted == [2, 2, 1]
    mine.close(remove=False)
    other = made(target, corpus, path)
    other.open(keep=True)
    assert equal(other.batch([3, 4]), first) and counted == [2, 2, 1]
    other.close(remove=True)
    assert not path.exists()
    other.open(keep=False)
    other.batch([3])
    assert counted == [2, 2, 1, 1]


def test_what_the_target_writes_is_not_read_again(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    """It comes with what was captured while it was written, and is the same as if it were read."""
    mine = made(target, corpus, tmp_path / "x", on_policy=0.5)
    mine.open(keep=False)
    first = mine.batch([0, 1, 2, 3])
    assert counted == [2], "the data's own"
    assert equal(mine.batch([0, 1, 2, 3]), first) and counted == [2]
    reading = made(target, corpus, tmp_path / "y", on_policy=0.5)
    reading.stream.captured = lambda n: None  # type: ignore[method-assign]
    assert equal(reading.batch([0, 1, 2, 3]), first) and counted == [2, 4]


def test_what_was_captured_before_the_run_is_not_read_again(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", target.shape(target.vocab), SMALL["tokens"], 1.0, Tell())
    kept.open(keep=False)
    own = corpus.examples[:-1]
    for one in apart(target.batch(own, vocab=target.vocab), own, target.aux_hidden_layers):
        kept.add(one)
        kept.add(one)
    counted.clear()
    training = Training(**(SMALL | {"on_policy": 0.0}))
    mine = Harvest(
        target,
        Stream(corpus, target, training, kept),
        target.vocab,
        training,
        tmp_path / "x",
        Tell(),
    )
    assert mine.records.places < made(target, corpus, tmp_path / "y").records.places, (
        "both share the room"
    )
    first = mine.batch(range(len(corpus.examples)))
    assert counted == [1], "the one that was not"
    assert equal(first, made(target, corpus, tmp_path / "y").batch(range(len(corpus.examples))))


def test_as_many_are_kept_as_there_is_room_for(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    shape, texts = target.shape(target.vocab), corpus.examples[:3]
    taken = apart(target.batch(texts), texts, target.aux_hidden_layers)
    slot = Kept(tmp_path / "kept", shape, SMALL["tokens"], 0.0, Tell()).slot
    kept = Kept(tmp_path / "kept", shape, SMALL["tokens"], 2.5 * slot / 1e9, Tell())
    for keep in (False, True):
        kept.open(keep)
        for one in taken:
            kept.add(one)
        assert [kept.find(text) is not None for text in texts] == [True, True, False]
        kept.close(remove=False)


@pytest.mark.parametrize("at", [0, 8, 16, 40, 200, -1])
def test_a_record_that_is_not_whole_is_made_again(
    at: int, target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    mine, path = made(target, corpus, tmp_path / "x"), tmp_path / "x"
    mine.open(keep=False)
    first, content = mine.batch([0]), bytearray((tmp_path / "x").read_bytes())
    if at < 0:
        os.truncate(path, len(content) // 2)
    else:
        content[at] ^= 0xFF
        path.write_bytes(content)
    assert equal(mine.batch([0]), first) and counted == [1, 1]


def test_places_are_bounded_and_the_latest_text_has_its_own(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    small = made(target, corpus, tmp_path / "x", keep_gb=1e-9)
    assert small.records.places == small.stream.window == 1
    small.open(keep=False)
    small.batch([0])
    small.batch([1])
    small.batch([1])
    assert counted == [1, 1] and (tmp_path / "x").stat().st_size <= small.records.slot
    small.batch([0])
    assert counted == [1, 1, 1]


def test_a_full_disk_costs_time_alone(
    target: Target,
    corpus: Corpus,
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell = Noting()
    mine = made(target, corpus, tmp_path / "x", tell)
    mine.open(keep=False)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(captured.os, "pwrite", full)
    assert equal(mine.batch([0, 1]), mine.batch([0, 1])) and counted == [2, 2]
    assert len(tell.notes) == 1 and "No space left on device" in tell.notes[0]


def test_a_file_that_cannot_be_made_is_told(
    target: Target, corpus: Corpus, counted: list[int], tmp_path: Path
) -> None:
    tell = Noting()
    mine = made(target, corpus, tmp_path / "nowhere" / "x", tell)
    mine.open(keep=False)
    assert equal(mine.batch([0]), mine.batch([0])) and counted == [1, 1]
    assert len(tell.notes) == 1 and "No such file" in tell.notes[0]


@pytest.mark.parametrize("reuse", [1, 3])
def test_texts_come_back(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, reuse: int
) -> None:
    """The first are new, then one in `reuse`, the others any of the latest; each new one once, in
    order."""
    monkeypatch.setattr(stream, "POOL", 10)
    texts = Stream(corpus, target, Training(**(SMALL | {"reuse": reuse})))
    texts.window = 8
    numbers, newest, new = [texts.number(n) for n in range(400)], -1, []
    for n, number in enumerate(numbers):
        if number > newest:
            assert number == newest + 1
            newest = number
            new.append(n)
        else:
            assert number > newest - 8
    assert new[:10] == list(range(10))
    assert set(np.diff(new[10:])) == {reuse}
    counts = np.bincount(numbers)[20:100]
    assert abs(counts.mean() - reuse) < 0.3 and (reuse == 1 or counts.std() > 0.5)
    again = Stream(corpus, target, replace(texts.settings))
    again.window = 8
    assert [again.number(n) for n in range(399, 0, -7)] == numbers[399:0:-7]


def test_what_the_target_writes_is_seen_while_drafts_rest(
    target: Target,
    corpus: Corpus,
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who rests for long is forgotten by its proposer, but for the one that is there to see all of
    it."""
    monkeypatch.setattr(target.llm.engine.guard, "paused_steps", 100_000)
    mine = made(target, corpus, tmp_path / "x", on_policy=0.5)
    mine.open(keep=False)
    mine.batch([0, 1, 2, 3])
    assert counted == [2], "the data's own"
