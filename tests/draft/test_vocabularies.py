"""Two vocabularies share the tokens with the same bytes, in whatever notation, and texts are
retokenized from one to the other.

Also tested: byte-level, SentencePiece and single-byte tokens, special tokens, that a text read in
any pieces has the tokens of one read at once, and that settled tokens never change."""

from __future__ import annotations

import random

import pytest
import torch

from forerun.draft.cross_vocabulary import (
    RetokenizedText,
    context_bytes,
    same_tokens,
    tokens_behind,
)
from tests import other_vocabularies
from tests.other_vocabularies import KINDS, shared, tokenizer, words

TEXT = 'the name  is {"name": 12}\n\n    and  the\tété 数字 👩‍👩‍👧 colour  green, ' * 4
UNBROKEN = "数字" * 200 + "x" * 700 + " " * 300 + "end"


def ids(text: str) -> list[int]:
    return tokenizer("target").encode(text)


def read_at_once(kind: str, tokens: list[int]) -> RetokenizedText:
    text = RetokenizedText(shared(kind))
    text.read(tokens)
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_shared_tokens_mean_the_same_bytes(kind: str) -> None:
    found = shared(kind)
    assert len(found) > 200
    for token, own in enumerate(found.to_target):
        if own >= 0:
            assert found.to_draft[own] == token
            assert words("target").spellings[own] == words(kind).spellings[token]
            assert words("target").special.get(own) == words(kind).special.get(token)


@pytest.mark.parametrize(
    "text, target, drafter",
    [(" null", "Ġnull", "▁null"), ("\t", "ĉ", "<0x09>"), ("\x9f", "Ł", "<0x9F>"), ("e", "e", "e")],
)
def test_tokens_are_matched_in_any_notation(text: str, target: str, drafter: str) -> None:
    found, ours, theirs = shared("pieces"), words("target"), words("pieces")
    own, other = ours.tokenizer.vocabulary()[target], theirs.tokenizer.vocabulary()[drafter]
    assert ours.spellings[own] == theirs.spellings[other] == text.encode("latin-1")
    assert found.to_target[other] == own and found.to_draft[own] == other


def test_special_tokens_are_shared_by_their_text_alone() -> None:
    ours, theirs, found = words("target"), words("bytes"), shared("bytes")
    own, other = ours.tokenizer.vocabulary(), theirs.tokenizer.vocabulary()
    assert found.to_draft[own["</s>"]] == other["</s>"]
    assert found.to_draft[own["<pad>"]] == -1 and found.to_target[other["<end>"]] == -1
    assert words("pieces").opening == [words("pieces").tokenizer.vocabulary()["<s>"]]


def test_vocabularies_are_the_same_only_with_the_same_ids() -> None:
    assert same_tokens(tokenizer("target"), tokenizer("target"), 328)
    assert not same_tokens(tokenizer("target"), tokenizer("shuffled"), 328)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_mapped_to_the_shared_tokens(kind: str) -> None:
    found = shared(kind)
    scores = torch.randn(2, len(found.to_target))
    mapped, others = found.to_target_scores(scores), found.unshared_scores(scores)
    for token, own in enumerate(found.to_target):
        if own >= 0:
            assert mapped[:, own].tolist() == scores[:, token].tolist()
            assert torch.isneginf(others[:, token]).all()
        else:
            assert others[:, token].tolist() == scores[:, token].tolist()
    missing = [own for own, token in enumerate(found.to_draft) if token < 0]
    assert torch.isneginf(mapped[:, missing]).all()


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_tokens_of_the_drafter_s_tokenizer(kind: str) -> None:
    text = read_at_once(kind, ids(TEXT))
    assert text.tokens == tokenizer(kind).encode(TEXT)
    assert 0 < text.settled < len(text.tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TEXT, UNBROKEN], ids=["words", "unbroken"])
def test_tokens_do_not_depend_on_the_pieces_that_were_read(kind: str, text: str) -> None:
    """The tokens that `read` reports as unchanged are, and settled ones never change."""
    generator, tokens, in_pieces = random.Random(1), ids(text), RetokenizedText(shared(kind))
    tokens[40:40] = [
        words("target").tokenizer.vocabulary()[special] for special in ("<pad>", "</s>", "<s>")
    ]
    at = 0
    while at < len(tokens):
        at += generator.choice((0, 1, 1, 2, 3, 9, 40))
        before, settled = list(in_pieces.tokens), in_pieces.settled
        unchanged = in_pieces.read(tokens[:at])
        assert settled <= unchanged <= min(len(before), len(in_pieces.tokens))
        assert settled <= in_pieces.settled
        assert before[:unchanged] == in_pieces.tokens[:unchanged]
        at_once = read_at_once(kind, tokens[:at])
        for field in ("tokens", "settled", "pending"):
            assert getattr(in_pieces, field) == getattr(at_once, field)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_an_unfinished_character_are_held_back(kind: str) -> None:
    tokens, text = [*ids("so "), *ids("👍")], RetokenizedText(shared(kind))
    for end in range(len(ids("so ")), len(tokens)):
        text.read(tokens[:end])
        assert text.pending == "👍".encode()[: end - len(ids("so "))]
        assert "\ufffd" not in tokenizer(kind).decode(text.tokens)
    text.read(tokens)
    assert not text.pending and tokenizer(kind).decode(text.tokens) == "so 👍"


def test_a_beginning_of_text_token_is_not_doubled() -> None:
    begin = words("target").tokenizer.vocabulary()["<s>"]
    text = read_at_once("pieces", [begin, *ids("the name")])
    assert text.tokens == tokenizer("pieces").encode("the name")


# ---------------------------------------------------------------- back to the target's tokens


@pytest.mark.parametrize(
    "text, follows", [("the name", " is green"), ('{"na', 'me":'), ("x 👍", " and"), ("1", "2 3")]
)
def test_a_continuation_has_tokens_of_exactly_its_bytes(text: str, follows: str) -> None:
    target = words("target")
    before = context_bytes(target, ids(text))
    tokens = tokens_behind(target, before, before + follows.encode())
    assert b"".join(target.spellings[token] for token in tokens) == follows.encode()


def test_a_token_that_reaches_back_into_the_text_is_split() -> None:
    """If the text ends within a word, the rest of the word is proposed."""
    target = words("target")
    assert len(ids('"name"')) < len(ids('"na')) + len(ids('me"'))
    tokens = tokens_behind(target, b'"na', b'"name"')
    assert tokens == target.encode(['me"'])[0]


def test_an_unfinished_character_is_not_proposed() -> None:
    target = words("target")
    assert tokens_behind(target, b"so", b"so it \xf0\x9f") == target.encode([" it "])[0]


def test_only_tokens_that_the_model_has_are_proposed() -> None:
    less = other_vocabularies.ModelVocabulary(tokenizer("target"), max(ids("the")))
    assert tokens_behind(less, b"", b"the") == ids("the")[: ids("the").index(max(ids("the")))]
