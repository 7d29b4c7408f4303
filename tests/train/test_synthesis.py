"""A run without data: the target writes its own, varied and the same each time; what loops or
repeats is left out."""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import ForerunError
from forerun.cli.progress import Tell
from forerun.engine.request import Request
from forerun.models.tokenizer import BROKEN
from forerun.train import run as runs
from forerun.train.capture import Target, apart
from forerun.train.captured import Kept
from forerun.train.checkpoint import read_checkpoint
from forerun.train.data import Corpus, read_data, split
from forerun.train.settings import Training
from forerun.train.sieve import Limits, Sieve
from forerun.train.synthesis import AUTHOR, FEWEST, GROUP, BaseAuthor, ChatAuthor, write
from forerun.train.topics import FIRST_OF_QUESTIONS, TOPICS
from tests import tiny
from tests.cli.test_main import run
from tests.train.conftest import SMALL, TEXTS
from tests.train.test_cli import interrupt_at

SETTINGS = Training(**(SMALL | {"tokens": 80, "write": 20}))
ANYTHING = Limits(
    words=0, seen=1.0, repeated=1.0, ratio=1000.0
)  # a model of random weights says what is no text
Verb = Callable[..., tuple[int, str, str]]


def with_template(directory: Path, template: str, model: Path | None = None) -> str:
    """A tiny model that chats as the template says."""
    shutil.copytree(model or tiny.worded(), directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    return str(directory)


ENDS = "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}<s>a"
LINES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "U:{{ m.content }} B:{% endfor %}"
)
LETTER = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}e"  # a turn ends soon


@pytest.fixture(scope="module")
def base() -> Target:
    return Target(str(tiny.spoken()), SETTINGS)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(with_template(tmp_path_factory.mktemp("chat") / "model", ENDS), SETTINGS)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(
        with_template(tmp_path_factory.mktemp("chat") / "model", LETTER, tiny.spoken()), SETTINGS
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """`forerun train` of the tiny target without data, whose every text is good enough."""
    right = runs.write
    monkeypatch.setattr(runs, "write", lambda *args, **kept: right(*args, ANYTHING, **kept))
    basics = ["--target", str(tiny.spoken()), "--layers", "1"]
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"write": 20}).items()
    ]
    return lambda *args: run(monkeypatch, capsys, "train", *basics, *flags, *args)


class Told:
    """A `Tell` that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float | None, float | None]] = []
        self.notes: list[str] = []

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        self.told.append((what, done, total))

    def note(self, what: str) -> None:
        self.notes.append(what)


class TestSieve:
    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("How do I bake bread without yeast?", ""),
            ("Bake bread?", "short"),
            ("!!! ??? ...", "short"),
            ("如何烤面包", ""),  # no spaces
            (f"How do I bake {BROKEN} bread?", "broken"),
            ("I want to know, " * 8, "looping"),
            ("Say " + "ha" * 300 + " and then stop", "looping"),
            (
                "\n".join(
                    f"{i}. {name} is on shelf {i * 7}"
                    for i, name in enumerate(("salt", "oil", "rice"))
                ),
                "",
            ),
        ],
    )
    def test_beginnings(self, text: str, fault: str) -> None:
        assert Sieve(Limits()).fault_of_beginning(text) == fault

    def test_an_answer_may_be_one_word_but_something(self) -> None:
        assert [Sieve(Limits()).fault(text) for text in ("42", " \n", "x" + BROKEN)] == [
            "",
            "empty",
            "broken",
        ]

    def test_what_was_nearly_said_before(self) -> None:
        """However it is written; what was dropped is not remembered, an answer neither."""
        sieve = Sieve(Limits())
        first = "Please write a short poem about the sea in winter"
        assert sieve.fault("Please write a short poem about a cat") == ""
        assert sieve.fault_of_beginning(first) == ""
        assert (
            sieve.fault_of_beginning("please, write a short poem about the SEA in spring!")
            == "repeated"
        )
        assert (
            sieve.fault_of_beginning("Please write a short story about how my cat was lost") == ""
        )
        assert sieve.fault_of_beginning("Name me three rivers of that country in spring") == ""

    def test_limits_can_be_given(self) -> None:
        text = "no no no no no no no no no no no no no no"
        assert Sieve(Limits()).fault(text) == "looping" and Sieve(ANYTHING).fault(text) == ""


class TestAuthors:
    def test_a_question_is_begun_where_the_template_has_a_users(self, chat: Target) -> None:
        """Behind a system prompt, or by first words; it ends at the token that stands behind it."""
        author, tokenizer = ChatAuthor(chat), chat.tokenizer
        assert author.ends == {"stop_token_ids": (tokenizer.vocabulary()["</s>"],)}
        assert author.opening(0) == tokenizer.encode("<s>u")
        assert author.opening(1) == tokenizer.encode("<s>uWhat is")
        assert author.opening(2) == tokenizer.encode(f"<s>s{TOPICS[1]}</s><s>u")
        assert len({tuple(author.opening(number)) for number in range(GROUP)}) > 0.9 * GROUP
        assert len({tuple(author.opening(number)) for number in range(4 * GROUP)}) > 2 * GROUP

    def test_a_template_without_system_prompts_or_end_tokens(self, tmp_path: Path) -> None:
        author = ChatAuthor(Target(with_template(tmp_path / "m", LINES), SETTINGS))
        assert author.opening(2) == author.opening(0) == author.tokenizer.encode("U:")
        assert author.ends == {"stop": "B:"}

    def test_a_template_that_is_the_text_alone(self, tmp_path: Path) -> None:
        """There is always a token to begin behind."""
        target = Target(with_template(tmp_path / "m", "{{ messages[-1]['content'] }}"), SETTINGS)
        author = ChatAuthor(target)
        assert author.opening(0) == [2] and author.ends == {}
        asked = author.opening(1)
        said = SimpleNamespace(text=" salt?\n")
        beginning: Any = SimpleNamespace(
            tokens=asked, prompt_length=len(asked), text=said, finish_reason="stop"
        )
        assert author.text(beginning) == "What is salt?"

    def test_no_room(self, tmp_path: Path) -> None:
        target = Target(with_template(tmp_path / "m", ENDS + "long " * 20), SETTINGS)
        with pytest.raises(
            ForerunError, match=r"tokens=80 leaves no room .* give 1[0-9][0-9] or more"
        ):
            ChatAuthor(target)

    def test_a_base_model_begins_from_nothing_and_from_words(self, base: Target) -> None:
        author = BaseAuthor(base, SETTINGS)
        assert author.opening(0) == [2] and author.opening(1) == [2, *base.tokenizer.encode("The")]
        assert all(1 <= len(author.opening(n)) <= SETTINGS.prompt_tokens for n in range(GROUP))


class TestWriting:
    def test_a_base_model(self, base: Target) -> None:
        """As many as are wanted, as long as there is room for, and the same from the same seed."""
        written = write(base, SETTINGS, limits=ANYTHING)
        assert len(written.lines) == SETTINGS.write
        assert len({json.loads(line)["text"][:8] for line in written.lines}) > 0.8 * SETTINGS.write
        documents, (source,) = written.read()
        assert source.name == AUTHOR and source.documents == len(documents) == SETTINGS.write
        corpus = Corpus(documents, base.tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens)
        assert len(corpus.examples) >= SETTINGS.write and len(corpus.prompts) >= SETTINGS.write
        assert write(base, SETTINGS, limits=ANYTHING).lines == written.lines
        other = Training(**(SMALL | {"tokens": 80, "write": 20, "seed": 1}))
        assert not {*write(base, other, limits=ANYTHING).lines} & {*written.lines}

    def test_a_chat_model(self, talker: Target) -> None:
        """Questions that have come to their end, with answers, which go through the template
        again."""
        written = write(talker, SETTINGS, limits=ANYTHING)
        corpus = Corpus(
            written.read()[0], talker.tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens
        )
        assert len(corpus.prompts) == len(corpus.examples) == SETTINGS.write and not corpus.too_long
        begun = []
        for line in written.lines:
            asked, answered = json.loads(line)["messages"]
            words = next(
                (words for words in FIRST_OF_QUESTIONS if asked["content"].startswith(words)), ""
            )
            begun.append(bool(words))
            assert (asked["role"], answered["role"]) == ("user", "assistant")
            assert "e" not in asked["content"].removeprefix(words)
            assert tuple(talker.tokenizer.chat([asked])) in corpus.prompts and answered["content"]
        assert any(begun) and not all(begun)
        assert write(talker, SETTINGS, limits=ANYTHING).lines == written.lines

    @pytest.mark.parametrize("name", ["base", "talker"])
    def test_what_it_thinks_is_captured_while_it_writes(
        self,
        name: str,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of each text that is kept, for as it will be read from its line, to the bit what reading
        it would capture."""
        target: Target = request.getfixturevalue(name)
        monkeypatch.setattr(target, "aux_hidden_layers", (1, 2))
        if name == "base":  # as of a model whose texts begin with a token
            encode = target.tokenizer.encode
            monkeypatch.setattr(
                target.tokenizer,
                "encode",
                lambda text, special=True: [2] * special + encode(text, special=False),
            )
        kept, told = (
            Kept(tmp_path / "kept", target.shape(target.vocab), SETTINGS.tokens, 1.0, Tell()),
            Told(),
        )
        kept.open(keep=False)
        read: list[int] = []
        batch = target.batch
        monkeypatch.setattr(
            target,
            "batch",
            lambda texts, **how: (read.extend(len(t.tokens) for t in texts), batch(texts, **how))[
                1
            ],
        )
        said: list[tuple[int, ...]] = []
        say = target.say

        def saying(*args: Any, **how: Any) -> list[Request]:
            requests = say(*args, **how)
            said.extend(tuple(request.tokens) for request in requests)
            return requests

        monkeypatch.setattr(target, "say", saying)
        written = write(target, SETTINGS, told, ANYTHING, kept=kept)
        assert sum(read) < 0.15 * SETTINGS.write * SETTINGS.tokens, (
            "of prompts, what they have in common"
        )
        examples = Corpus(
            written.read()[0], target.tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens
        ).examples
        found = [(example, captured) for example in examples if (captured := kept.find(example))]
        as_written = [
            example
            for example in examples
            if any(text[: len(example.tokens)] == example.tokens for text in said)
        ]
        assert [example for example, _ in found] == as_written, (
            "but those that are read in other tokens"
        )
        assert len(found) > 5
        for example, captured in found:
            (again,) = apart(
                batch([example], vocab=target.vocab), [example], target.aux_hidden_layers
            )
            assert captured.example == example and captured.to_bytes() == again.to_bytes()
        kept.close(remove=False)
        kept.open(keep=True)
        assert all(kept.find(example) for example, _ in found), "a run that goes on has them"
        kept.close(remove=True)
        assert not list(tmp_path.iterdir())

    def test_a_question_without_an_end_is_none(self, chat: Target) -> None:
        with pytest.raises(
            ForerunError, match=r"of 128 texts 0 are left .left out: 1.. cut off.*; give --data$"
        ):
            write(chat, SETTINGS, limits=ANYTHING)

    def test_a_question_that_leaves_no_room_is_none(
        self, talker: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may be read in more tokens than it was written in."""
        monkeypatch.setattr(ChatAuthor, "prompt", lambda self, beginning: [5] * 65)
        with pytest.raises(ForerunError, match=r"0 are left .* long"):
            write(talker, SETTINGS, limits=ANYTHING)

    def test_what_is_left_out_is_counted(
        self, base: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the card's numbers; the note says why."""
        faults, told = itertools.cycle(["", "short", "", "repeated", "looping"]), Told()
        monkeypatch.setattr(Sieve, "fault_of_beginning", lambda self, text: next(faults))
        written = write(base, SETTINGS, told, ANYTHING)
        assert (len(written.lines), written.repeated, written.left_out) == (20, 13, 25)
        (note,) = told.notes
        assert note.startswith(f"20 texts {AUTHOR} in ")
        assert note.endswith(" s; left out: 13 short, 13 repeated, 12 looping")

    def test_a_fifth_of_the_time(self, base: Target) -> None:
        """Where a group more would take longer it is left; but a few texts there are in any
        case."""
        for seconds, count in ((59.0, 2 * GROUP), (61.0, GROUP), (1000.0, GROUP)):
            settings = Training(**(SMALL | {"tokens": 80, "write": 5 * GROUP, "max_minutes": 10.0}))
            clock = itertools.count(0.0, seconds).__next__
            written = write(base, settings, limits=ANYTHING, clock=clock)
            assert len(written.lines) == count

    def test_a_target_that_only_loops(self, base: Target) -> None:
        """It is given up soon, in one line that says why and what to do."""
        told = Told()
        with pytest.raises(ForerunError) as error:
            write(base, SETTINGS, told, Limits(words=0, repeated=-1.0))
        assert "0 are left (left out: " in str(error.value) and "looping" in str(error.value)
        assert str(error.value).endswith("give --data") and "\n" not in str(error.value)
        assert len(told.told) <= 6 and told.told[0][1:] == (0, SETTINGS.write)

    def test_fewer_than_wanted_are_enough(
        self, base: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once nothing new comes any more."""
        right = Sieve.fault_of_beginning
        left = iter(range(FEWEST))

        def fault(self: Sieve, text: str) -> str:
            return right(self, text) or ("repeated" if next(left, None) is None else "")

        monkeypatch.setattr(Sieve, "fault_of_beginning", fault)
        settings = Training(**(SMALL | {"tokens": 80, "write": 1000}))
        assert len(write(base, settings, limits=ANYTHING).lines) == FEWEST


class TestVerb:
    def test_without_data(self, verb: Verb, tmp_path: Path) -> None:
        """To a drafter whose card says who wrote the data; what was saved is data, and measures the
        same again."""
        out, kept = tmp_path / "d", tmp_path / "kept.jsonl"
        code, text, err = verb("--out", str(out), "--save-data", str(kept), "--json")
        assert code == 0, err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "kept.jsonl"]
        report, card = json.loads(text), (out / "README.md").read_text()
        assert report["data"]["sources"][0]["name"] == AUTHOR and f"{AUTHOR}: 20 documents" in card
        assert f"--data {kept}" in card and "not kept" not in card
        documents, _ = read_data([str(kept)])
        train_on, held_out = split(documents, SMALL["held_out"])
        assert (report["data"]["documents"], report["data"]["held_out"]) == (
            len(train_on),
            len(held_out),
        )
        code, text, err = verb(
            "--out", str(tmp_path / "again"), "--data", str(kept), "--write", "0", "--json"
        )
        again = json.loads(text)
        assert code == 0 and again["data"]["sha256"] == report["data"]["sha256"]
        assert again["losses"] == report["losses"] and again["measured"] == report["measured"]

    def test_a_card_without_what_was_written(self, verb: Verb, tmp_path: Path) -> None:
        code, _, err = verb("--out", str(tmp_path / "d"), "--steps", "0")
        assert code == 0, err
        assert "they were not kept (--save-data does)" in (tmp_path / "d" / "README.md").read_text()

    def test_ctrl_c_and_resume(
        self, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The checkpoint holds what was written: nothing is written again, and all is as
        without."""
        code, text, _ = verb("--out", str(tmp_path / "whole"), "--json")
        whole, out = json.loads(text), tmp_path / "halves"
        assert code == 0
        with monkeypatch.context() as patched:
            interrupt_at(patched, 4)
            assert verb("--out", str(out))[0] == 130
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "halves.captured", "halves.training", "halves.written", "whole",
        ]  # fmt: skip
        monkeypatch.delattr(runs, "write")
        code, _, err = verb("--out", str(out), "--resume", "--save-data", "kept.jsonl")
        assert code == 2 and "the run was begun with --save-data None" in err
        code, text, err = verb("--out", str(out), "--resume", "--json")
        assert code == 0, err
        assert all(
            json.loads(text)[part] == whole[part]
            for part in ("losses", "evaluations", "measured", "data")
        )

    def test_writing_is_a_part_of_the_run(
        self, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it took is not there for steps; the checkpoint still says what was asked for."""
        begun: list[float] = []
        right = runs.Trainer.run
        monkeypatch.setattr(
            runs.Trainer, "run", lambda self: (begun.append(self.deadline.seconds), right(self))[1]
        )
        with monkeypatch.context() as patched:
            interrupt_at(patched, 2)
            assert verb("--out", str(tmp_path / "d"), "--max-minutes", "9")[0] == 130
        identity = read_checkpoint(tmp_path / "d.training")["identity"]
        assert (
            identity["training"]["max_minutes"] == 9
            and 0 < identity["written"]["seconds"] < begun[0]
        )
        assert verb("--out", str(tmp_path / "d"), "--resume")[0] == 0 and len(begun) == 2

    def test_beside_data(self, verb: Verb, data: Path, tmp_path: Path) -> None:
        """What is there, and as many texts of the target as are asked for; each text once, however
        it came."""
        out, kept = tmp_path / "d", tmp_path / "kept.jsonl"
        code, text, err = verb(
            "--out",
            str(out),
            "--data",
            str(data),
            "--write",
            "8",
            "--save-data",
            str(kept),
            "--json",
        )
        assert code == 0, err
        report, card = json.loads(text), (out / "README.md").read_text()
        sources = [(source["name"], source["documents"]) for source in report["data"]["sources"]]
        assert (
            sources == [(str(data), len(TEXTS)), (AUTHOR, 8)]
            and len(kept.read_text().splitlines()) == 8
        )
        assert report["data"]["documents"] + report["data"]["held_out"] == len(TEXTS) + 8
        assert f"--data {data} --data {kept}" in card and "not kept" not in card
        code, text, err = verb(
            "--out",
            str(tmp_path / "e"),
            "--data",
            str(kept),
            "--data",
            str(data),
            "--write=8",
            "--json",
        )
        again = json.loads(text)
        assert code == 0 and again["data"]["sha256"] == report["data"]["sha256"], (
            "it wrote the same once more"
        )
        assert "they were not kept" in (tmp_path / "e" / "README.md").read_text()

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (
                ["--data", "library", "--write", "0", "--save-data", "{tmp}/kept.jsonl"],
                "leave one out",
            ),
            (["--save-data", "{tmp}/kept.txt"], "ends in .jsonl"),
            (["--save-data", "{tmp}/gone/kept.jsonl"], "in a directory that can be written to"),
            (["--write", "1"], "from 2 up"),
            (["--write", "0"], "nothing to learn from"),
        ],
    )
    def test_what_cannot_be_is_said_at_once(
        self, verb: Verb, tmp_path: Path, flags: list[str], says: str
    ) -> None:
        code, _, err = verb(
            "--out", str(tmp_path / "d"), *(flag.format(tmp=tmp_path) for flag in flags)
        )
        assert (
            code == 2
            and says in err
            and len(err.splitlines()) == 1
            and not list(tmp_path.iterdir())
        )

    def test_a_full_disk(self, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line before any training, and nothing is left."""

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(runs.Trainer, "run", lambda self: pytest.fail("it trains"))
        monkeypatch.setattr(os, "replace", full)
        code, _, err = verb(
            "--out", str(tmp_path / "d"), "--save-data", str(tmp_path / "kept.jsonl")
        )
        assert (
            code != 0
            and "kept.jsonl cannot be written: No space left on device" in err.splitlines()[-1]
        )
        assert not list(tmp_path.iterdir())
