"""Grounding: the passages that looking at all would choose, of nobody else's documents, and nothing
if damaged."""

from __future__ import annotations

import errno
import json
import random
import sqlite3
from math import log
from pathlib import Path

import numpy as np
import pytest

from forerun import LLM, LoadError, SamplingParams
from forerun.draft import corpus as passages
from forerun.draft import retrieval as grounding
from forerun.draft.corpus import (
    BREAK,
    LIST,
    PASSAGE,
    Index,
    IndexedFile,
    IndexSegment,
    adding,
    passages_of,
)
from forerun.draft.retrieval import Passages, Retrieval, find_passages, rank_passages
from forerun.models.tokenizer import Tokenizer
from tests import tiny
from tests.draft.test_retrieval import row_of

VOCAB = 300


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.spoken())


def write(
    directory: Path, tokenizer: Tokenizer, texts: list[list[int]], vocab: int = VOCAB
) -> Index:
    with adding(directory, tokenizer, vocab) as writer:
        writer.add(IndexedFile("a", 1, len(texts)), texts)
    return Index(directory)


def texts_of(seed: int) -> list[list[int]]:
    """Of many lengths, tokens from frequent to rare."""
    generator = random.Random(seed)
    lengths = [
        0,
        1,
        PASSAGE - 1,
        PASSAGE,
        PASSAGE + 1,
        *(generator.randrange(900) for _ in range(6)),
    ]
    return [[int(VOCAB * generator.random() ** 4) for _ in range(length)] for length in lengths]


def fit_twin(segments: list[IndexSegment], tokens: list[int]) -> list[tuple[int, int]]:
    """`fit` by looking at every passage."""
    all_passages = [
        (n, place, held.tolist())
        for n, s in enumerate(segments)
        for place, held in passages_of(s.tokens)
    ]
    every = [token for segment in segments for token in segment.tokens.tolist()]
    scores, spent = dict[tuple[int, int], float](), 0
    known = {token for token in tokens[-grounding.NUM_RECENT :] if token in every}
    for token in sorted(known, key=lambda token: (every.count(token), token))[
        : grounding.NUM_QUERIED
    ]:
        spent += every.count(token)
        holding = [(n, place) for n, place, held in all_passages if token in held]
        for passage in holding if spent <= grounding.MAX_FOUND else ():
            worth = log(1 + (len(all_passages) - len(holding) + 0.5) / (len(holding) + 0.5))
            scores[passage] = scores.get(passage, 0.0) + worth
    return sorted(scores, key=lambda passage: (-scores[passage], passage))[: grounding.NUM_PASSAGES]


@pytest.mark.parametrize("found", [50, 5_000])
def test_the_passages_are_those_that_looking_at_all_finds(
    found: int, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grounding, "MAX_FOUND", found)
    for seed in range(3):
        segments = write(tmp_path / "index", tokenizer, texts_of(seed)).segments
    asked = [text for seed in (0, 1, 7) for text in texts_of(seed)]
    chosen = [rank_passages(segments, text) for text in asked]
    assert chosen == [fit_twin(segments, text) for text in asked]
    assert len({len(passages) for passages in chosen}) > 1 and {
        of for c in chosen for of, _ in c
    } == {0, 1, 2}


def test_passages_are_whole_texts_or_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([token for text in texts_of(1) for token in (*text, BREAK)], np.uint32)
    cut = list(passages_of(tokens))
    assert all(
        0 < len(held) <= PASSAGE and (held == tokens[at : at + len(held)]).all() for at, held in cut
    )
    assert np.concatenate([held for _, held in cut]).tolist() == tokens[tokens != BREAK].tolist()
    assert len(cut) == sum(-(-len(text) // PASSAGE) for text in texts_of(1))


def test_the_longest_match_is_followed_the_best_passage_first() -> None:
    near = Passages(
        [
            np.array(text, np.uint32)
            for text in ([1, 2, 3, 4], [9, 2, 3, 5, 6, 7], [8, 2, 3, 5], [], [3, 4])
        ]
    )
    assert near.retrieve([0, 2, 3], 8) == (2, [4])
    assert near.retrieve([9, 2, 3], 8) == (3, [5, 6, 7])
    assert near.retrieve([9, 2, 3], 1) == (3, [5])
    assert near.retrieve([7, 8], 8) == (0, [])  # not across two of them
    assert near.retrieve([6, 7], 8) == (0, [])  # nothing follows
    assert near.retrieve([0], 8) == near.retrieve([2], 8) == (0, [])  # one token is no match


def test_what_fits_is_drafted_behind_two_tokens_and_wins_ties(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The whole index would say 4, which most texts go on with."""
    common = [[10 + n, 1, 2, 3, 4, 4, 4] for n in range(20)]
    retrieval = Retrieval(
        {"docs": write(tmp_path, tokenizer, [*common, [200, 201, 1, 2, 3, 5, 6, 7]])}
    )

    def said(tokens: list[int]) -> tuple[int, list[int]]:
        (draft,) = retrieval.propose([row_of(tokens)])
        return draft.match_length, draft.tokens[1:]

    retrieval.open(0, [99])  # about nothing that is known
    assert said([99, 1, 2, 3]) == (3, [4, 4, 4]) and said([99, 2, 3]) == (0, [])
    retrieval.close(0)
    retrieval.open(0, [200, 201])
    assert said([200, 201, 1, 2, 3]) == (5, [5, 6, 7])
    assert said([200, 201, 99, 1, 2, 3]) == (3, [5, 6, 7]) and said([200, 201, 99, 2, 3]) == (
        2,
        [5, 6, 7],
    )
    retrieval.add(
        "docs", write(tmp_path, tokenizer, [[1]])
    )  # read again: what was found before is forgotten
    assert said([200, 201, 99, 1, 2, 3]) == (3, [4, 4, 4])


def test_nobody_is_grounded_in_another_clients_documents(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    secret = [250, 251, 252, 253, 254]
    retrieval = Retrieval({"all": write(tmp_path / "all", tokenizer, [[1, 2, 3, 4]])})
    retrieval.add("one", write(tmp_path / "one", tokenizer, [secret]), client="a")
    for slot, tenant in enumerate(("a", "b", "")):
        retrieval.open(slot, secret[:3], tenant=tenant)
    drafts = retrieval.propose([row_of(secret[1:3], slot) for slot in range(3)])
    assert [draft.tokens[1:] for draft in drafts] == [[253, 254], [], []]
    retrieval.remove("one")
    assert [draft.tokens[1:] for draft in retrieval.propose([row_of(secret[1:3])])] == [[]]


@pytest.mark.parametrize("damage", ["missing", "short", "bytes", "no table", "number"])
def test_a_damaged_table_is_one_clear_line(
    damage: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path, tokenizer, texts_of(1))
    table, listed = tmp_path / "0001.passages", tmp_path / LIST
    size = table.stat().st_size
    about = json.loads(listed.read_text())
    if damage == "missing":
        table.unlink()
    elif damage in ("short", "bytes"):
        table.write_bytes(
            table.read_bytes()[:-1] if damage == "short" else bytes(range(256)) * (size // 256)
        )
    elif damage == "no table":
        table.unlink()
        with sqlite3.connect(table) as other:
            other.execute("CREATE TABLE others (x)")
        about["segments"][0]["passages"] = [1, table.stat().st_size]
    else:
        about["segments"][0]["passages"] = "many"
    listed.write_text(json.dumps(about))
    with pytest.raises(LoadError) as raised:
        Index(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("seed", range(8))
def test_bits_that_turn_in_a_table_draft_nothing_that_is_no_token(
    seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Its size is right and it opens: what is found may be wrong, and is never out of bounds."""
    write(tmp_path, tokenizer, texts_of(1))
    table, generator = tmp_path / "0001.passages", random.Random(seed)
    held = bytearray(table.read_bytes())
    for _ in range(400):
        held[generator.randrange(4096, len(held))] = generator.randrange(256)
    table.write_bytes(held)
    try:
        segments = Index(tmp_path).segments
    except LoadError:
        return
    for text in texts_of(2):
        near = find_passages(segments, text)
        assert near is None or all(0 <= token < VOCAB for token in near.retrieve(text[-16:], 8)[1])


@pytest.mark.parametrize("why", ["older", "no FTS5"])
def test_an_index_without_passages_drafts_as_before(
    why: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(passages, "passages_supported", lambda: False)
        before = write(tmp_path, tokenizer, [[1, 2, 3, 4]])
    retrieval = Retrieval({"docs": before})
    retrieval.open(0, [1, 2, 3])
    assert not (tmp_path / "0001.passages").exists() and "passages" not in json.loads(
        (tmp_path / LIST).read_text()
    )
    assert [draft.tokens for draft in retrieval.propose([row_of([1, 2, 3])])] == [[3, 4]]
    added = write(tmp_path, tokenizer, [[7, 8, 9]])  # what is added has some
    assert rank_passages(added.segments, [1, 2, 3]) == [] and rank_passages(
        added.segments, [1, 8]
    ) == [(1, 0)]


def test_a_full_disk_leaves_the_index_as_it_was(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "index", tokenizer, texts_of(1))
    before = {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()}
    monkeypatch.setattr(
        passages, "CREATE_TABLE", f"PRAGMA max_page_count=3; {passages.CREATE_TABLE}"
    )
    real = sqlite3.connect

    class Small(sqlite3.Connection):
        """On a disk with room for a few pages."""

        def execute(self, sql: str, *more: object) -> sqlite3.Cursor:
            for statement in sql.split("; "):
                done = super().execute(statement, *more)  # type: ignore[arg-type]
            return done

    monkeypatch.setattr(passages.sqlite3, "connect", lambda *a, **k: real(*a, factory=Small, **k))
    for directory in (tmp_path / "index", tmp_path / "new"):
        with (
            pytest.raises(OSError, match="full") as raised,
            adding(directory, tokenizer, VOCAB) as writer,
        ):
            writer.add(IndexedFile("b", 1, 2), texts_of(2))
        assert raised.value.errno == errno.EIO and "\n" not in str(raised.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_texts_are_the_same_where_the_prompt_names_its_document(tmp_path: Path) -> None:
    llm = LLM(tiny.spoken(), draft="off", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=60, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n"
    ids = llm.tokenizer.encode(prompt)  # type: ignore[union-attr]
    plain = llm.generate(prompt, params)[0].token_ids
    write(tmp_path / "index", llm.tokenizer, [[*ids, *plain]], llm.decoder.config.vocab)  # type: ignore[arg-type]
    for temperature in (0.0, 0.8):
        llm = LLM(tiny.spoken(), draft=f"retrieval:{tmp_path}/index", kv_tokens=512, depth=6)
        params = SamplingParams.pure(
            max_tokens=60, ignore_eos=True, temperature=temperature, seed=4
        )
        said = llm.generate(prompt, params)[0]
        assert said.token_ids == llm.generate(prompt, params, draft="off")[0].token_ids
        assert temperature or said.stats.by_source["retrieval"].accepted > 40
