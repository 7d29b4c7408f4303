"""Texts that the target writes itself: varied, the same each time, filtered, and captured."""

import errno
import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import ForerunError
from forerun.cli.progress import Tell
from forerun.engine.request import Request
from forerun.train import run as runs
from forerun.train.capture import CaptureStore
from forerun.train.data import Corpus, Example, FilterLimits, TextFilter, read_data, split
from forerun.train.loop import read_checkpoint
from forerun.train.options import Training
from forerun.train.synthesis import (
    GROUP,
    MIN_TEXTS,
    QUESTION_OPENINGS,
    SOURCE,
    TOPICS,
    BaseWriter,
    ChatWriter,
    write,
)
from forerun.train.target import Batch, Target, split_batch
from tests import tiny
from tests.cli.test_main import run
from tests.train.conftest import SMALL, TEXTS, Notes, with_template
from tests.train.test_capture import same
from tests.train.test_cli import interrupt_at

SIZES: dict[str, Any] = SMALL | {"tokens": 80, "write": 20}
SETTINGS = Training(**SIZES)
# a model of random weights writes nothing that would pass the filter
ANYTHING = FilterLimits(min_words=0, max_known=1.0, max_repeated=1.0, max_compression=1000.0)
write_anything = functools.partial(write, limits=ANYTHING)
Verb = Callable[..., tuple[int, str, str]]

ENDS = "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}<s>a"
LINES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "U:{{ m.content }} B:{% endfor %}"
)
LETTER = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}e"  # turns end soon


@pytest.fixture(scope="module")
def base() -> Target:
    return Target(str(tiny.spoken()), SETTINGS)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(with_template(tmp_path_factory.mktemp("chat") / "model", ENDS), SETTINGS)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("chat") / "model"
    return Target(with_template(path, LETTER, tiny.spoken()), SETTINGS)


class TestWriters:
    def test_questions_are_begun_in_the_users_turn(self, chat: Target) -> None:
        """After a system prompt or with given words, up to the token that ends a turn."""
        writer, tokenizer = ChatWriter(chat), chat.tokenizer
        assert writer.stop == {"stop_token_ids": (tokenizer.vocabulary()["</s>"],)}
        assert writer.opening(0) == tokenizer.encode("<s>u")
        assert writer.opening(1) == tokenizer.encode("<s>uWhat is")
        assert writer.opening(2) == tokenizer.encode(f"<s>s{TOPICS[1]}</s><s>u")
        assert len({tuple(writer.opening(number)) for number in range(GROUP)}) > 0.9 * GROUP
        assert len({tuple(writer.opening(number)) for number in range(4 * GROUP)}) > 2 * GROUP

    def test_unusual_templates(self, tmp_path: Path) -> None:
        """Without system prompts or end tokens, and one that is the text alone."""
        writer = ChatWriter(Target(with_template(tmp_path / "lines", LINES), SETTINGS))
        assert writer.opening(2) == writer.opening(0) == writer.tokenizer.encode("U:")
        assert writer.stop == {"stop": "B:"}
        bare = with_template(tmp_path / "bare", "{{ messages[-1]['content'] }}")
        writer = ChatWriter(Target(bare, SETTINGS))
        assert writer.opening(0) == [2] and writer.stop == {}
        begun, text = writer.opening(1), SimpleNamespace(text=" salt?\n")
        values = dict(tokens=begun, prompt_length=len(begun), text=text, finish_reason="stop")
        beginning: Any = SimpleNamespace(**values)
        assert writer.text(beginning) == "What is salt?"
        target = Target(with_template(tmp_path / "long", ENDS + "long " * 20), SETTINGS)
        with pytest.raises(ForerunError, match=r"tokens=80 leaves no room .* give 1\d\d or more"):
            ChatWriter(target)

    def test_a_base_model_begins_with_nothing_and_with_words(self, base: Target) -> None:
        writer = BaseWriter(base, SETTINGS)
        assert writer.opening(0) == [2]
        assert writer.opening(1) == [2, *base.tokenizer.encode("The")]
        assert all(1 <= len(writer.opening(n)) <= SETTINGS.prompt_tokens for n in range(GROUP))


class TestWriting:
    def test_a_base_model(self, base: Target) -> None:
        written = write_anything(base, SETTINGS)
        assert len(written.lines) == SETTINGS.write
        assert len({json.loads(line)["text"][:8] for line in written.lines}) > 0.8 * SETTINGS.write
        documents, (source,) = written.read()
        assert source.name == SOURCE and source.documents == len(documents) == SETTINGS.write
        corpus = Corpus(documents, base.tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens)
        assert len(corpus.examples) >= SETTINGS.write and len(corpus.prompts) >= SETTINGS.write
        assert write_anything(base, SETTINGS).lines == written.lines
        other = write_anything(base, Training(**(SIZES | {"seed": 1})))
        assert not {*other.lines} & {*written.lines}

    def test_a_chat_model(self, talker: Target) -> None:
        """Complete questions with answers, which go through the template again."""
        written, tokenizer = write_anything(talker, SETTINGS), talker.tokenizer
        corpus = Corpus(written.read()[0], tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens)
        assert len(corpus.prompts) == len(corpus.examples) == SETTINGS.write and not corpus.too_long
        begun = []
        for line in written.lines:
            question, answer = json.loads(line)["messages"]
            text = question["content"]
            words = next((words for words in QUESTION_OPENINGS if text.startswith(words)), "")
            begun.append(bool(words))
            assert (question["role"], answer["role"]) == ("user", "assistant")
            assert "e" not in text.removeprefix(words) and answer["content"]
            assert tuple(tokenizer.chat([question])) in corpus.prompts
        assert any(begun) and not all(begun)

    @pytest.mark.parametrize("name", ["base", "talker"])
    def test_outputs_are_captured_while_it_writes(
        self,
        name: str,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """For each text that its line is read as, the bits that reading would give."""
        target: Target = request.getfixturevalue(name)
        monkeypatch.setattr(target, "aux_hidden_layers", (1, 2))
        if name == "base":  # as a model whose texts begin with a token
            encode = target.tokenizer.encode

            def with_start(text: str, special: bool = True) -> list[int]:
                return [2] * special + encode(text, special=False)

            monkeypatch.setattr(target.tokenizer, "encode", with_start)
        read, texts = list[int](), list[tuple[int, ...]]()
        batch, generate = target.batch, target.generate

        def counted(examples: Sequence[Example], **how: Any) -> Batch:
            read.extend(len(example.tokens) for example in examples)
            return batch(examples, **how)

        def spied(*args: Any, **how: Any) -> list[Request]:
            requests = generate(*args, **how)
            texts.extend(tuple(each.tokens) for each in requests)
            return requests

        monkeypatch.setattr(target, "batch", counted)
        monkeypatch.setattr(target, "generate", spied)
        store = CaptureStore(tmp_path / "store", 100, Tell())
        store.open(keep=False)
        written = write_anything(target, SETTINGS, store=store)
        assert sum(read) < 0.3 * SETTINGS.write * SETTINGS.tokens, "beginnings only"
        documents = written.read()[0]
        sizes = SETTINGS.tokens, SETTINGS.prompt_tokens
        examples = Corpus(documents, target.tokenizer, *sizes).examples
        found = [(example, captured) for example in examples if (captured := store.find(example))]
        assert len(found) > 5 and [example for example, _ in found] == [
            example
            for example in examples
            if any(text[: len(example.tokens)] == example.tokens for text in texts)
        ], "all but those that are read in other tokens"
        for example, captured in found:
            full = batch([example], vocab=target.vocab)
            (again,) = split_batch(full, [example], target.aux_hidden_layers)
            assert same(captured, again)

    def test_incomplete_and_long_questions_are_left_out(
        self, chat: Target, talker: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        says = r"0 of 128 texts are usable .left out: 1.. cut off.*; give --data$"
        with pytest.raises(ForerunError, match=says):
            write_anything(chat, SETTINGS)
        monkeypatch.setattr(ChatWriter, "prompt", lambda self, beginning: [5] * 65)
        with pytest.raises(ForerunError, match=r"are usable .*\d+ long"):
            write_anything(talker, SETTINGS)

    def test_what_is_left_out_is_counted(
        self, base: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        faults, notes = itertools.cycle(["", "short", "", "repeated", "looping"]), Notes()
        monkeypatch.setattr(TextFilter, "fault_of_beginning", lambda self, text: next(faults))
        written = write_anything(base, SETTINGS, notes)
        assert (len(written.lines), written.repeated, written.left_out) == (20, 13, 25)
        (note,) = notes.notes
        assert note.startswith(f"20 texts {SOURCE} in ")
        assert note.endswith(" s; left out: 13 short, 13 repeated, 12 looping")

    def test_it_ends_in_time(self, base: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a fifth of the time limit, or when nothing new comes."""
        settings = Training(**(SIZES | {"write": 5 * GROUP, "max_minutes": 10.0}))
        for seconds, count in ((59.0, 2 * GROUP), (1000.0, GROUP)):
            clock = itertools.count(0.0, seconds).__next__
            assert len(write_anything(base, settings, clock=clock).lines) == count
        notes, strict = Notes(), FilterLimits(min_words=0, max_repeated=-1.0)
        with pytest.raises(ForerunError, match=r"0 of \d+ texts .*looping.*give --data$"):
            write(base, SETTINGS, notes, strict)
        assert len(notes.calls) <= 6 and notes.calls[0][1:] == (0, SETTINGS.write)
        left, fault = iter(range(MIN_TEXTS)), TextFilter.fault_of_beginning

        def repeats(self: TextFilter, text: str) -> str:
            return fault(self, text) or ("repeated" if next(left, None) is None else "")

        monkeypatch.setattr(TextFilter, "fault_of_beginning", repeats)
        settings = Training(**(SIZES | {"write": 1000}))
        assert len(write_anything(base, settings).lines) == MIN_TEXTS


class TestVerb:
    @pytest.fixture
    def verb(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
        """`forerun train` of the tiny target without data and without a filter."""
        monkeypatch.setattr(runs, "write", write_anything)
        values = (SMALL | {"write": 20}).items()
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values]
        basics = ["--target", str(tiny.spoken()), "--layers", "1", *flags]
        return lambda *args: run(monkeypatch, capsys, "train", *basics, *args)

    def test_without_data(self, verb: Verb, tmp_path: Path) -> None:
        """What was saved is data, and gives the same run."""
        out, saved = tmp_path / "d", tmp_path / "saved.jsonl"
        code, text, err = verb("--out", str(out), "--save-data", str(saved), "--json")
        assert code == 0, err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "saved.jsonl"]
        report = json.loads(text)
        assert report["data"]["sources"][0]["name"] == SOURCE
        parts = split(read_data([str(saved)])[0], SMALL["held_out"])
        counts = report["data"]["documents"], report["data"]["held_out"]
        assert counts == tuple(len(part) for part in parts)
        again = str(tmp_path / "again")
        code, text, err = verb("--out", again, "--data", str(saved), "--write", "0", "--json")
        assert code == 0, err
        for part in ("losses", "measured"):
            assert json.loads(text)[part] == report[part]

    def test_beside_data(self, verb: Verb, data: Path, tmp_path: Path) -> None:
        words = ("--out", str(tmp_path / "d"), "--data", str(data), "--write", "8", "--json")
        code, text, err = verb(*words)
        assert code == 0, err
        found = json.loads(text)["data"]
        sources = [(source["name"], source["documents"]) for source in found["sources"]]
        assert sources == [(str(data), len(TEXTS)), (SOURCE, 8)]
        assert found["documents"] + found["held_out"] == len(TEXTS) + 8

    def test_ctrl_c_and_resume(
        self, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The checkpoint holds what was written, and what that took counts as part of the run."""
        whole = json.loads(verb("--out", str(tmp_path / "whole"), "--json")[1])
        out, limit = tmp_path / "halves", ("--max-minutes", "90")
        with monkeypatch.context() as patched:
            interrupt_at(patched, 4)
            assert verb("--out", str(out), *limit)[0] == 130
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["halves.captured", "halves.training", "halves.written", "whole"]
        state = read_checkpoint(tmp_path / "halves.training")
        assert state["identity"]["training"]["max_minutes"] == 90
        assert 0 < state["identity"]["written"]["seconds"] < state["began"]
        monkeypatch.delattr(runs, "write")
        code, _, err = verb("--out", str(out), "--resume", "--save-data", "kept.jsonl")
        assert code == 2 and "the run was begun with --save-data None" in err
        code, text, err = verb("--out", str(out), "--resume", "--json")
        assert code == 0, err
        assert all(json.loads(text)[part] == whole[part] for part in ("losses", "measured", "data"))

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--data", "library", "--write", "0", "--save-data", "{tmp}/kept.jsonl"], "leave one out"),
            (["--save-data", "{tmp}/kept.txt"], "ends in .jsonl"),
            (["--save-data", "{tmp}/gone/kept.jsonl"], "in a directory that can be written to"),
            (["--write", "1"], "from 2 up"),
            (["--write", "0"], "nothing to learn from"),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_line(
        self, verb: Verb, tmp_path: Path, flags: list[str], says: str
    ) -> None:
        given = [flag.format(tmp=tmp_path) for flag in flags]
        code, _, err = verb("--out", str(tmp_path / "d"), *given)
        assert code == 2 and says in err and len(err.splitlines()) == 1
        assert not list(tmp_path.iterdir())

    def test_a_full_disk(self, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line before any training, and nothing is left."""
        replace = os.replace

        def full(source: Any, place: Any) -> None:
            if str(place).endswith(".jsonl"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, place)

        monkeypatch.setattr(runs.Trainer, "run", lambda self: pytest.fail("it trains"))
        monkeypatch.setattr(os, "replace", full)
        saved = str(tmp_path / "kept.jsonl")
        code, _, err = verb("--out", str(tmp_path / "d"), "--save-data", saved)
        assert code != 0 and err.splitlines()[-1].endswith("No space left on device")
        assert "kept.jsonl cannot be written" in err and not list(tmp_path.iterdir())
