"""Tokenizer: round trips, text streams for any token borders, stop strings, chats, refusals."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from forerun.errors import RequestError
from forerun.models.tokenizer import (
    LONG,
    MAX_PENDING,
    StopAutomaton,
    StopMatcher,
    TextStream,
    Tokenizer,
)
from tests.models import checks

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox does not.",
    "Grüße aus Köln! Ça va très bien, merci. Ω ≈ 3 µm",
    "日本語のテキストと中文文本、한국어 텍스트。日本語のテキスト。",
    "Smile 😀😃 family 👨‍👩‍👧 flag 🇩🇪 thumbs 👍🏽 done 🎉🎉",
    "def f(x):\n    return [i ** 2 for i in range(x)]\n\n\n",
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Backend:
    """Return byte-level BPE with few merges, so that many characters take several tokens; <s> is
    prepended."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def byte_fallback() -> Backend:
    """Return a tokenizer like those of Llama 2, Mistral and Gemma, with byte tokens as fallback."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abc", "▁a", "▁b"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b")]
    options: dict[str, Any] = dict(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, **options))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return backend


def write(directory: Path, backend: Backend, **settings: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


PLAIN = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write(tmp_path_factory.mktemp("byte-level"), byte_level(), **PLAIN))


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    with_settings = Tokenizer(write(tmp_path / "with", backend, **PLAIN))
    without = Tokenizer(write(tmp_path / "without", byte_level(), **PLAIN))
    for text in ("one", "a text of more than three tokens"):
        assert with_settings.encode(text) == without.encode(text)


@pytest.fixture(params=["tokenizer", "fallback"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    one: Tokenizer = request.getfixturevalue(request.param)
    return one


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write(tmp_path_factory.mktemp("byte-fallback"), byte_fallback(), **PLAIN))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return one token for each byte."""
    vocabulary = tokenizer.vocabulary()
    if "<0x00>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in data]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }
    return [vocabulary[spelling[byte]] for byte in data]


def streamed_text(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], stops: Sequence[str] = ()
) -> str:
    """Return the text of a stream, taken token by token."""
    stream, parts = TextStream(tokenizer, prompt, stops), []
    for i, token in enumerate(output, start=1):
        stream.append(token)
        finished = stream.stopped or i == len(output)
        parts.append(stream.take(finished))
        if finished:
            break
    return "".join(parts)


# ---------------------------------------------------------------- encode, decode


@pytest.mark.parametrize(
    "text",
    [*CORPUS, "", " ", "\n", "\N{MATHEMATICAL FRAKTUR CAPITAL U}nseen \x00\x7f ☃"],
    ids=range(9),
)
def test_round_trip(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.vocabulary()["<s>"]
    assert tokenizer.encode(text, special=False) == ids[1:]
    assert tokenizer.decode(ids) == tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize(
    "settings",
    [{}, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "GPT2Tokenizer"}],
)
def test_settings_of_the_class_do_not_matter(
    settings: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = Tokenizer(write(tmp_path, byte_level(), **settings))
    for text in CORPUS:
        assert other.encode(text, special=False) == tokenizer.encode(text, special=False)
        assert other.decode(other.encode(text)) == text


# ---------------------------------------------------------------- one token at a time


@pytest.mark.parametrize("text", CORPUS, ids=range(5))
@pytest.mark.parametrize("cut", [0, 1, 3, 10])
def test_streamed_text_is_the_decoded_text(text: str, cut: int, tokenizer: Tokenizer) -> None:
    """This holds for any part of the text as the prompt."""
    ids = tokenizer.encode(text)
    prompt = ids[:cut]
    before = tokenizer.decode(prompt)
    if REPLACEMENT in before:
        pytest.skip("the prompt ends within a character")
    assert streamed_text(tokenizer, prompt, ids[cut:]) == text[len(before) :]


def test_vocabulary_bytes_are_those_within_a_text(either: Tokenizer) -> None:
    """Leading spaces of a token are kept; special tokens have no spelling."""
    size = len(either.vocabulary())
    spellings = either.vocabulary_bytes(size + 3)
    text = "a  the  grün 😀 text"
    assert (
        b"".join(spellings[token] for token in either.encode(text, special=False)).strip()
        == text.encode()
    )
    assert [spellings[token] for token in byte_ids(either, bytes(range(256)))] == [
        bytes([i]) for i in range(256)
    ]
    assert not any(spellings[token] for token in either.special) and spellings[size:] == [b""] * 3


@pytest.mark.parametrize("seed", range(3))
def test_invalid_bytes_never_crash(seed: int, either: Tokenizer) -> None:
    """Random bytes are split between prompt and output, and the text after them is still
    complete."""
    rng = random.Random(seed)
    ending = either.encode("abcab", special=False)
    for _ in range(120):
        data = bytes(rng.choice(b"ab\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xa9\xff") for _ in range(14))
        cut = rng.randint(0, 14)
        prompt = byte_ids(either, data[:cut])
        output = byte_ids(either, data[cut:])
        assert streamed_text(either, prompt, output + ending).endswith("bcab")


@pytest.mark.parametrize("end", [b"\xff", b"\xe2", b"\xe2\x82", b"\xac"], ids=repr)
def test_an_invalid_byte_after_a_character(end: bytes, fallback: Tokenizer) -> None:
    """Byte-fallback decoders decode runs of bytes together, so an invalid byte would also change
    valid ones before it."""
    letters = fallback.vocabulary()
    output = [letters["a"], *byte_ids(fallback, "€".encode() + end), letters["b"], letters["c"]]
    text = streamed_text(fallback, [], output)
    assert text.startswith("a€")
    assert text.endswith("bc")


@pytest.mark.parametrize(
    "end", [REPLACEMENT.encode(), b"\xff", b"\xe2\x82", b"\xf0\x9f\x98"], ids=repr
)
def test_no_text_of_the_prompt_is_shown(end: bytes, either: Tokenizer) -> None:
    """This holds even if the prompt ends within a character."""
    text = streamed_text(either, byte_ids(either, b"hello" + end), byte_ids(either, b"xyz"))
    assert not set("hello") & set(text)
    assert text.endswith("xyz")


def test_first_word_keeps_its_space_after_a_prompt(fallback: Tokenizer) -> None:
    """These decoders strip the space before the first word of a text, but an output continues a
    text."""
    words = fallback.vocabulary()
    assert streamed_text(fallback, [words["▁a"]], [words["▁b"], words["▁a"]]) == " b a"
    assert streamed_text(fallback, [], [words["▁b"], words["▁a"]]) == "b a"


def test_invalid_text_is_not_pending_for_ever(tokenizer: Tokenizer) -> None:
    """Pending text is bounded, so that tokens take constant time; later text is still complete."""
    bad = byte_ids(tokenizer, b"\xff")
    special = tokenizer.vocabulary()["<|end|>"]
    stream, text = TextStream(tokenizer, [], ()), ""
    for token in [*bad * 1000, *[special] * 1000, *byte_ids(tokenizer, b"end")]:
        stream.append(token)
        text += stream.take(finished=False)
        assert len(stream.stream.pending) + len(stream.stream.context) <= 2 * MAX_PENDING
    assert text.strip(REPLACEMENT) == "end"


@pytest.mark.parametrize("length", [LONG - 1, LONG, 3 * LONG])
def test_long_texts_are_encoded_and_decoded_as_short_ones(length: int, either: Tokenizer) -> None:
    """Long texts are batches of one, for which the library has other code."""
    text = ("".join(CORPUS) * length)[:length]
    ids = either.encode(text)
    assert ids == either._backend.encode(text).ids
    assert (
        either.encode(text, special=False)
        == either._backend.encode(text, add_special_tokens=False).ids
    )
    assert either.decode(ids) == either._backend.decode(ids)
    with pytest.raises(RequestError, match="Unicode"):
        either.encode(text[:-1] + "\ud800")


# ---------------------------------------------------------------- stop strings


class PieceTokenizer:
    """A tokenizer in which token i of an output has the text pieces[i]."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def stream(self, prompt: Sequence[int]) -> PieceTokenizer:
        return self

    def append(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return ""


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str, bool]:
    """Return the text shown after each piece, all text, and whether the stream stopped."""
    stream, parts = TextStream(PieceTokenizer(pieces), [], stops), []  # type: ignore[arg-type]
    for i in range(len(pieces)):
        stream.append(i)
        parts.append(stream.take(finished=stream.stopped or i == len(pieces) - 1))
        if stream.stopped:
            break
    return parts, stream.text, stream.stopped


def expected(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str, bool]:
    """Return the same with a naive search of the whole text after every piece."""
    text, total, parts = "", "", []
    for i, piece in enumerate(pieces):
        text += piece
        at = [text.find(stop) for stop in stops if stop in text]
        if at:
            text = text[: min(at)]
        last = bool(at) or i == len(pieces) - 1
        partial = [
            n
            for n in range(1, len(text) + 1)
            for stop in stops
            if stop.startswith(text[-n:]) and n < len(stop)
        ]
        end = len(text) if last else len(text) - max(partial, default=0)
        parts.append(text[len(total) : end])
        total = text[:end] if end > len(total) else total
        if at:
            return parts, text, True
    return parts, text, False


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_against_a_naive_search(seed: int) -> None:
    """Pieces and stops are short and over two letters, so that prefixes overlap and several stops
    match."""
    rng = random.Random(seed)
    for _ in range(500):
        pieces = ["".join(rng.choices("ab", k=rng.randint(0, 4))) for _ in range(rng.randint(1, 8))]
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3))]
        found = run(pieces, stops)
        assert found == expected(pieces, stops)
        assert "".join(found[0]) == found[1]


def test_many_nested_stop_strings_take_linear_time() -> None:
    """The stops are prefixes of each other and match the text almost completely; a naive search
    compares each of them for each token."""
    stops = ["a" * length + "b" for length in range(1, 40_000, 4000)]
    start = time.perf_counter()
    matcher = StopMatcher(StopAutomaton([*stops, "a" * 90_000 + "c"]))
    assert not any(matcher.feed("a") for _ in range(100_000))
    assert matcher.partial_length == 90_000
    assert (
        time.perf_counter() - start < 10
    )  # half a second on an idle machine; minutes with a naive search


# ---------------------------------------------------------------- chat

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}<|user|>{{ m.role }}/{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": "hi 🎉"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "ok"},
]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_chats_use_the_template_of_the_model(place: str, tmp_path: Path) -> None:
    settings = dict(PLAIN, chat_template=TEMPLATE) if place == "tokenizer_config.json" else PLAIN
    write(tmp_path, byte_level(), **settings)
    if place != "tokenizer_config.json":
        (tmp_path / place).write_text(TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.has_chat_template
    text = "<s><|user|>user/hi 🎉<|end|><|user|>assistant/yes?<|end|><|user|>user/ok<|end|><|user|>"
    assert tokenizer.chat(CONVERSATION) == tokenizer.encode(text, special=False)
    assert tokenizer.chat(CONVERSATION).count(tokenizer.vocabulary()["<s>"]) == 1


def test_errors_of_a_template_are_one_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, byte_level(), **PLAIN, chat_template=TEMPLATE))
    with pytest.raises(RequestError, match="no system here") as caught:
        tokenizer.chat([{"role": "system", "content": "be good"}])
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- refusals


def refused(directory: Path) -> None:
    checks.refused(lambda: Tokenizer(directory), directory, str(directory))


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    refused(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Spell"}}', "null"])
@pytest.mark.parametrize("settings", [PLAIN, {}], ids=["plain", "auto"])
def test_a_broken_tokenizer_is_refused(content: str, settings: Any, tmp_path: Path) -> None:
    write(tmp_path, byte_level(), **settings)
    (tmp_path / "tokenizer.json").write_text(content)
    refused(tmp_path)
