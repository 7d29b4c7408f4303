"""Training data: all input forms, duplicates, held-out documents, the text filter, and one-line
errors."""

import json
from pathlib import Path

import pytest

from forerun import ForerunError
from forerun.models.tokenizer import BROKEN, Tokenizer
from forerun.train.data import (
    Corpus,
    Document,
    EpochOrder,
    FilterLimits,
    Passage,
    TextFilter,
    digest_of,
    read_data,
    split,
)
from tests import tiny
from tests.train.conftest import with_template


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.with_tokenizer())


def documents(count: int) -> list[Document]:
    return [
        Document(f"d{i}", f"{i * 0x9E3779B9 % (1 << 32):08x}", (Passage("", f"text {i}"),))
        for i in range(count)
    ]


def lines(path: Path, *values: object) -> str:
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values))
    return str(path)


def test_data_is_read_from_directories_and_json_lines(tmp_path: Path) -> None:
    """Text files of a directory are read. Hidden, unknown and empty files and files that are not
    UTF-8 are left out; unreadable and repeated ones are counted."""
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, content in {"a.py": b"x = 1", "deep/b.PY": b"y = 2", "again.py": b"x = 1", "c.py": b"\xff\xfe\xfa",
                          "empty.txt": b" \n", "image.png": b"no", ".git/d.py": b"z = 3"}.items():  # fmt: skip
        (folder / name).write_bytes(content)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]  # fmt: skip
    questions = lines(tmp_path / "questions.jsonl", {"prompt": "go on"}, "", {"text": "said\u2028so"}, {"messages": chat},
                  {"messages": chat[:3]})  # fmt: skip
    found, sources = read_data([str(folder), questions])
    assert [d.passages[0].text for d in found[:2]] == ["x = 1", "y = 2"]
    assert (sources[0].documents, sources[0].repeated, sources[0].unreadable) == (2, 1, 2)
    assert [[(bool(p.prompt), p.text) for p in d.passages] for d in found[2:]] == [
        [(True, "")], [(False, "said\u2028so")], [(True, "b"), (True, "d")], [(True, "b"), (True, "")],
    ]  # fmt: skip
    assert len(found[4].passages[1].prompt) == 3
    again, _ = read_data([questions, str(folder), questions])
    assert digest_of(again) == digest_of(found)


def test_the_standard_library_as_data() -> None:
    found, _ = read_data(["library"])
    names = {document.name for document in found}
    assert {"json/decoder.py", "argparse.py"} <= names and not any(
        "/test" in name for name in names
    )


def test_whether_a_document_is_held_out_depends_on_it_alone() -> None:
    everything = documents(200)
    train, held = split(everything, 0.1)
    assert len(train) + len(held) == 200 and 10 < len(held) < 30
    assert not {d.digest for d in train} & {d.digest for d in held}
    fewer_train, fewer_held = split(everything[::2], 0.1)
    assert {d.digest for d in fewer_held} <= {d.digest for d in held}
    assert {d.digest for d in fewer_train} <= {d.digest for d in train}
    for share in (0.0001, 0.99):
        assert [len(part) for part in split(documents(2), share)] == [1, 1]
    with pytest.raises(ForerunError, match="one document only"):
        split(documents(1), 0.5)


def test_texts_are_cut_to_windows(tokenizer: Tokenizer) -> None:
    """Only ends that are too short to learn from are dropped; only windows longer than a prompt can
    be continued."""
    text = "alpha green " * 40
    ids = tuple(tokenizer.encode(text))
    corpus = Corpus([Document("d", "0", (Passage("", text),))], tokenizer, 50, 20)
    kept = sum((e.tokens for e in corpus.examples), ())
    assert kept == ids[: len(kept)] and len(ids) - len(kept) < 16
    assert all(e.prompt_length == 1 and len(e.tokens) <= 50 for e in corpus.examples)
    assert corpus.prompts[0] == ids[:20] and len(corpus.prompts) >= len(ids) // 50


def test_answers_are_learned_and_questions_are_not(tokenizer: Tokenizer) -> None:
    messages = ({"role": "user", "content": "true"},)
    passages = (Passage(messages, "false null"), Passage(messages, ""), Passage("grey " * 200, "x"))
    corpus = Corpus([Document("d", "0", passages)], tokenizer, 60, 20)
    (example,) = corpus.examples
    assert tokenizer.decode(example.tokens[: example.prompt_length]) == "user: true\nassistant:"
    assert tokenizer.decode(example.tokens[example.prompt_length :]) == "false null"
    assert corpus.prompts == [example.tokens[: example.prompt_length]] * 2 and corpus.too_long == 1


def test_answers_end_with_the_end_token_of_the_template(tmp_path: Path) -> None:
    """The token is added if the template puts it right after answers and the window has room."""
    passage = Passage(({"role": "user", "content": "true"},), "false null")
    templates = (
        ("{% for m in messages %}<s>{{ m.content }} </s>\n{% endfor %}<s>", ["</s>"]),
        ("{% for m in messages %}<s>{{ m.content }}. </s>{% endfor %}<s>", []),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", []),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
            "{{ m.content }}</s>{% endfor %}",
            [],
        ),
    )
    for i, (template, end) in enumerate(templates):
        directory = with_template(tmp_path / str(i), template)
        tokenizer = Tokenizer(Path(directory))
        ids = tokenizer.encode("false null", special=False)
        ids += [tokenizer.vocabulary()[token] for token in end]
        (example,) = Corpus([Document("d", "0", (passage,))], tokenizer, 60, 20).examples
        assert list(example.tokens[example.prompt_length :]) == ids
        size = len(example.tokens) - len(end)
        if size >= 20:
            (short,) = Corpus([Document("d", "0", (passage,))], tokenizer, size, 4).examples
            assert short.tokens == example.tokens[:size]


def test_texts_with_tokens_outside_the_models_vocabulary_are_dropped(tokenizer: Tokenizer) -> None:
    texts = ["true false " * 20, "alpha green " * 20]
    corpus = Corpus([Document(t, t, (Passage("", t),)) for t in texts], tokenizer, 50, 20)
    before = len(corpus.examples) + len(corpus.prompts)
    vocab = max(max(e.tokens) for e in corpus.examples)
    left_out = corpus.drop_unknown_tokens(vocab)
    assert left_out == before - len(corpus.examples) - len(corpus.prompts) > 0
    assert corpus.drop_unknown_tokens(vocab) == 0
    assert corpus.examples and all(max(e.tokens) < vocab for e in corpus.examples)


def test_the_epoch_order_is_a_permutation_that_depends_on_the_seed() -> None:
    order = EpochOrder(7, 3)
    numbers = [order[n] for n in range(21)]
    assert all(sorted(numbers[i : i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert numbers[:7] != numbers[7:14]
    assert [EpochOrder(7, 3)[n] for n in reversed(range(21))] == numbers[::-1]
    assert [EpochOrder(7, 4)[n] for n in range(21)] != numbers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: this is not JSON"),
        ('{"text": "x"}\n[1]', "line 2: give an object"),
        ('{"text": "x", "prompt": "y"}', "one of prompt, text and messages"),
        ('{"text": 3}', "text must be a text"),
        ('{"prompt": " "}', "prompt must be a text"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": [{"role": "user"}]}', "needs a role and a content"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to continue"),
        ('{"text": "\\ud83d"}', "line 1: it contains half of a character"),
        ("\n\n", "there is no text in"),
    ],
)
def test_invalid_lines_raise_one_line_errors(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ForerunError, match=message) as error:
        read_data([lines(tmp_path / "bad.jsonl", content)])
    assert "\n" not in str(error.value)


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("no.txt", "not UTF-8"),
        ("binary.txt", "not UTF-8"),
        ("empty", "no text in"),
        ("gone", "No"),
    ):
        with pytest.raises(ForerunError, match=message):
            read_data([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("How do I bake bread without yeast?", ""),
        ("Bake bread?", "short"),
        ("!!! ??? ...", "short"),
        ("如何烤面包", ""),  # a script without spaces
        (f"How do I bake {BROKEN} bread?", "broken"),
        ("I want to know, " * 8, "looping"),
        ("Say " + "ha" * 300 + " and then stop", "looping"),
        ("1. salt is on shelf 0\n2. oil is on shelf 7\n3. rice is on shelf 14", ""),
    ],
)
def test_the_filter_finds_faults_of_beginnings(text: str, fault: str) -> None:
    assert TextFilter(FilterLimits()).fault_of_beginning(text) == fault


def test_the_filter_finds_repetitions_of_earlier_beginnings() -> None:
    texts = TextFilter(FilterLimits())
    assert [texts.fault(text) for text in ("42", " \n", "x" + BROKEN)] == ["", "empty", "broken"]
    assert texts.fault("Please write a short poem about a cat") == ""
    for text, fault in [
        ("Please write a short poem about the sea in winter", ""),
        ("please, write a short poem about the SEA in spring!", "repeated"),
        ("Please write a short story about how my cat was lost", ""),
        ("Name me three rivers of that country in spring", ""),
    ]:
        assert texts.fault_of_beginning(text) == fault
    lenient = FilterLimits(min_words=0, max_known=1.0, max_repeated=1.0, max_compression=1000.0)
    looping = "no no no no no no no no no no no no no no"
    assert texts.fault(looping) == "looping" and TextFilter(lenient).fault(looping) == ""
