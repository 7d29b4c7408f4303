"""Retrieval: an index holds and finds what naive code does, and is complete or absent. Passages are
the best of all, never of another client's documents, and damage to them does no harm."""

from __future__ import annotations

import errno
import json
import random
import re
import sqlite3
from collections.abc import Callable
from math import log
from pathlib import Path

import numpy as np
import pytest

from forerun import LLM, ConfigError, ForerunError, LoadError, RequestError, SamplingParams
from forerun.draft import corpus, retrieval
from forerun.draft.corpus import (
    BREAK,
    LIST,
    PASSAGE,
    Index,
    IndexedFile,
    IndexSegment,
    adding,
    passages_of,
    sort_suffixes,
    sort_suffixes_twin,
)
from forerun.draft.retrieval import (
    Passages,
    Retrieval,
    SegmentSearch,
    find_passages,
    rank_passages,
    retrieve_twin,
)
from forerun.models.tokenizer import Tokenizer
from tests import tiny
from tests.draft.helpers import make_request, pure_params, refused
from tests.engine import build

VOCAB = 300


def texts_of(seed: int, letters: int = 4, count: int = 12) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(letters) for _ in range(generator.randrange(60))] for _ in range(count)
    ]


def segment_of(texts: list[list[int]], vocab: int = 50, twin: bool = False) -> IndexSegment:
    tokens = np.array([token for text in texts for token in (*text, BREAK)], np.uint32)
    suffixes = np.zeros(int((tokens != BREAK).sum()), np.uint32)
    starts = np.zeros(vocab + 1, np.int64)
    (sort_suffixes_twin if twin else sort_suffixes)(tokens, suffixes, starts)
    return IndexSegment("1", tokens, suffixes, starts, ())


def drafted(drafter: Retrieval, tokens: list[int], *slots: int) -> list[list[int]]:
    """Draft behind the same text in each slot."""
    drafts = drafter.propose([make_request(tokens, depth=8, slot=slot) for slot in slots])
    return [draft.tokens[1:] for draft in drafts]


@pytest.mark.parametrize("seed", range(6))
def test_suffixes_are_sorted_as_by_the_twin(seed: int) -> None:
    texts = texts_of(seed, letters=(1, 2, 3, 4, 20, 50)[seed])
    ours, twin = segment_of(texts), segment_of(texts, twin=True)
    assert (ours.suffixes == twin.suffixes).all() and (ours.starts == twin.starts).all()


@pytest.mark.parametrize("seed", range(6))
def test_retrieval_finds_what_a_search_of_every_position_finds(seed: int) -> None:
    """Few different tokens give matches of all lengths and votes to count."""
    letters = (1, 2, 3, 4, 8, 20)[seed]
    segments = [segment_of(texts_of(10 * seed + i, letters)) for i in range(3)]
    search, matches = SegmentSearch(segments), set()
    for text in texts_of(seed + 100, letters, 60):
        for max_tokens in (1, 5, 9):
            if text:
                found = search.retrieve(text[-16:], max_tokens)
                assert found == retrieve_twin(segments, text[-16:], max_tokens)
                matches.add(found[0])
    assert {0, 3} <= matches and (letters > 4 or max(matches) > 4)


def test_the_most_frequent_continuation_is_drafted_as_far_as_the_match_is_long() -> None:
    search = SegmentSearch([segment_of([[1, 2, 3, 9, 9, 9, 9], *[[1, 2, 3, 4, 5, 6, 7]] * 2])])
    assert search.retrieve([1, 2, 3], 8) == (3, [4, 5, 6])
    assert search.retrieve([1, 2, 3], 2) == (3, [4, 5])
    assert search.retrieve([1, 2, 3, 9], 8) == (4, [9, 9, 9])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.repetitive())


def write(
    directory: Path, tokenizer: Tokenizer, texts: list[list[int]], vocab: int = VOCAB
) -> Index:
    with adding(directory, tokenizer, vocab) as writer:
        writer.add(IndexedFile("a", 1, 2), texts)
    return Index(directory)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_adding_finds_what_building_at_once_finds(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parts = [texts_of(seed, 3) for seed in range(3)]
    added = [write(tmp_path / "added", tokenizer, part) for part in parts][-1]
    once = write(tmp_path / "once", tokenizer, [text for part in parts for text in part])
    assert len(added.segments) == 3
    assert added.count == once.count
    assert added.tokenizer == once.tokenizer
    for text in filter(None, texts_of(9, 3, 40)):
        one, other = (
            SegmentSearch(index.segments).retrieve(text[-16:], 1) for index in (added, once)
        )
        assert one[0] == other[0]


def edit_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Change the content of a file."""

    def edit(directory: Path) -> None:
        path = directory / name
        path.write_bytes(change(path.read_bytes()))

    return edit


def edit_list(**fields: object) -> Callable[[Path], object]:
    """Change the segment's fields in the list of segments, or the list's `version`."""

    def change(content: bytes) -> bytes:
        about = json.loads(content)
        about["version"] = fields.pop("version", about["version"])
        about["segments"][0] |= fields
        return json.dumps(about).encode()

    return edit_file(LIST, change)


def another_table(directory: Path) -> None:
    path = directory / "0001.passages"
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE others (x)")
    edit_list(passages=[1, path.stat().st_size])(directory)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no list": lambda directory: (directory / LIST).unlink(),
    "list": edit_file(LIST, lambda content: b"{]"),
    "nested": edit_file(LIST, lambda content: b"[" * 100_000),
    "version": edit_list(version=99),
    "number": edit_list(tokens="many"),
    "elsewhere": edit_list(name="../0001"),
    "missing": lambda directory: (directory / "0001.suffixes").unlink(),
    "short": edit_file("0001.tokens", lambda content: content[:-4]),
    "long": edit_file("0001.tokens", lambda content: content + b"1234"),
    "starts": edit_file("0001.starts", lambda content: content[:-8] + b"\xff" * 8),
    "no passages": lambda directory: (directory / "0001.passages").unlink(),
    "short passages": edit_file("0001.passages", lambda content: content[:-1]),
    "other bytes": edit_file(
        "0001.passages", lambda content: bytes(range(256)) * (len(content) // 256)
    ),
    "no table": another_table,
    "number of passages": edit_list(passages="many"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused_in_one_line(
    damage: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path, tokenizer, texts_of(1))
    DAMAGES[damage](tmp_path)
    with refused(LoadError, re.escape(str(tmp_path))):
        Index(tmp_path)


def test_damaged_numbers_never_draft_ids_outside_of_the_vocabulary(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """If bits flip and a file keeps its size, drafts are worse but never out of bounds."""
    write(tmp_path, tokenizer, texts_of(1, 3), 50)
    generator = np.random.default_rng(1)
    for part in ("tokens", "suffixes"):
        path = tmp_path / f"0001.{part}"
        path.write_bytes(generator.bytes(path.stat().st_size))
    search = SegmentSearch(Index(tmp_path).segments)
    for text in filter(None, texts_of(9, 3, 40)):
        assert all(0 <= token < 50 for token in search.retrieve(text[-16:], 8)[1])


@pytest.mark.parametrize("when", ["tokens", "room", "sorting", "list"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_an_addition_that_fails_leaves_the_index_as_it_was(
    when: str,
    error: BaseException,
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "index", tokenizer, texts_of(1))
    before = files_of(tmp_path / "index")

    def fail(*_: object) -> None:
        raise error

    if when == "room":  # a disk that gets full under a mapped file would kill the process
        monkeypatch.setattr(corpus.os, "posix_fallocate", fail)
    if when == "sorting":
        monkeypatch.setattr(corpus, "sort_suffixes", fail)
    if when == "list":
        monkeypatch.setattr("forerun.utils.os.replace", fail)
    for directory in (tmp_path / "index", tmp_path / "new"):
        with (
            pytest.raises((type(error), ForerunError)),
            adding(directory, tokenizer, VOCAB) as writer,
        ):
            writer.add(IndexedFile("b", 1, 2), texts_of(2))
            if when == "tokens":
                fail()
    assert files_of(tmp_path / "index") == before
    assert not (tmp_path / "new").exists()


def test_concurrent_additions_are_refused_and_empty_ones_leave_no_trace(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path, tokenizer, texts_of(1))
    before = files_of(tmp_path)
    with adding(tmp_path, tokenizer, VOCAB) as writer:
        with (
            pytest.raises(RequestError, match="another process"),
            adding(tmp_path, tokenizer, VOCAB),
        ):
            pass
        writer.add(IndexedFile("empty", 1, 2), [[]])
    assert files_of(tmp_path) == before


def test_indices_may_be_added_and_removed_while_tenants_use_them(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    drafter = Retrieval({"all": write(tmp_path / "all", tokenizer, [[1, 2, 3, 4]])})
    drafter.open(0, [], tenant="a")
    drafter.open(1, [], tenant="b")
    drafter.add("one", write(tmp_path / "one", tokenizer, [[1, 2, 3, 5]]), client="a")
    text = [9, 1, 2, 3]
    assert drafted(drafter, text, 0, 1) == [[4], [4]]
    drafter.remove("all")
    assert drafted(drafter, text, 0, 1) == [[5], []]
    drafter.remove("one")
    assert drafted(drafter, text, 0, 1) == [[], []]


@pytest.mark.parametrize(
    ("draft", "has_prompt", "min_accepted"),
    [("retrieval", False, 20), ("suffix+retrieval", False, 0), ("retrieval", True, 40)],
)
def test_documents_are_drafted_and_the_text_is_unchanged(
    draft: str, has_prompt: bool, min_accepted: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The document is the answer alone, or the prompt and the answer."""
    llm = LLM(tiny.repetitive(), draft="off", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=60, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n"
    plain = llm.generate(prompt, params)[0].token_ids
    document = [*(tokenizer.encode(prompt) if has_prompt else []), *plain]
    write(tmp_path / "index", tokenizer, [document], llm.decoder.config.vocab)
    for temperature in (0.0, 0.8):
        llm = LLM(tiny.repetitive(), draft=f"{draft}:{tmp_path}/index", kv_tokens=512, depth=6)
        params = pure_params(60, temperature, seed=4)
        output = llm.generate(prompt, params)[0]
        assert output.token_ids == llm.generate(prompt, params, draft="off")[0].token_ids
        assert temperature or output.stats.by_source["retrieval"].accepted > min_accepted


def test_another_tokenizers_index_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "index", tokenizer, [[1, 2, 3]])
    listed = tmp_path / "index" / LIST
    listed.write_text(json.dumps(json.loads(listed.read_text()) | {"tokenizer": "other"}))
    with pytest.raises(LoadError, match="made for another tokenizer"):
        LLM(tiny.repetitive(), draft=f"retrieval:{tmp_path}/index", kv_tokens=512)
    with pytest.raises(LoadError, match="there is no index"):
        LLM(tiny.repetitive(), draft=f"retrieval:{tmp_path}/nowhere", kv_tokens=512)
    with pytest.raises(ConfigError, match="retrieval:INDEX"):
        LLM(tiny.repetitive(), draft="retrieval", kv_tokens=512)


def test_neither_matches_nor_drafts_cross_from_one_text_to_another() -> None:
    search = SegmentSearch([segment_of([[1, 2, 3, 4], [5, 6, 7, 8]])])
    assert search.retrieve([1, 2, 3], 8) == (3, [4])
    assert search.retrieve([2, 3, 4], 8) == (0, [])
    assert search.retrieve([3, 4, 5], 8) == (0, [])


def test_an_index_of_another_vocabulary_size_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    index = write(tmp_path, tokenizer, texts_of(1))
    with pytest.raises(LoadError, match="made for another tokenizer"):
        index.check(tokenizer, VOCAB + 1)
    index.check(tokenizer, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["match", "token", "tree"])
def test_retrieval_in_batches_with_preemption_changes_no_text(
    temperature: float, rule: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Chunks have 3 tokens, the pool has room for about two requests, and the index holds their
    texts with mistakes."""
    plain = [list(r.output) for r in build.run(build.engine("llama", []), "off", temperature)]
    generator = random.Random(1)
    texts = [
        [t if generator.random() < 0.9 else generator.randrange(tiny.VOCAB) for t in text]
        for text in plain
    ]
    engine = build.engine("llama", [], rule=rule, chunk=3, tokens=build.SMALL)
    index = write(tmp_path, tokenizer, texts, tiny.VOCAB)
    engine.proposers["retrieval"] = Retrieval({"texts": index})  # type: ignore[index]
    requests = build.run(engine, "retrieval", temperature)
    assert sum(r.stats.preemptions for r in requests) > 0
    if rule == "match" or not temperature:
        assert [list(r.output) for r in requests] == plain
        counts = [r.stats.by_source["retrieval"] for r in requests]
        assert 0 < sum(c.accepted for c in counts) < sum(c.drafted for c in counts)
    assert sum(r.stats.preemptions for r in requests) > 0


# ---------------------------------------------------------------- passages


def documents(seed: int) -> list[list[int]]:
    """Make documents of many lengths, of frequent and rare tokens."""
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


def rank_passages_twin(segments: list[IndexSegment], tokens: list[int]) -> list[tuple[int, int]]:
    """Rank passages as `rank_passages` does, by looking at every passage."""
    all_passages = [
        (n, place, held.tolist())
        for n, segment in enumerate(segments)
        for place, held in passages_of(segment.tokens)
    ]
    every = [token for segment in segments for token in segment.tokens.tolist()]
    scores, spent = dict[tuple[int, int], float](), 0
    known = {token for token in tokens[-retrieval.NUM_RECENT :] if token in every}
    for token in sorted(known, key=lambda token: (every.count(token), token))[
        : retrieval.NUM_QUERIED
    ]:
        spent += every.count(token)
        holding = [(n, place) for n, place, held in all_passages if token in held]
        for passage in holding if spent <= retrieval.MAX_FOUND else ():
            worth = log(1 + (len(all_passages) - len(holding) + 0.5) / (len(holding) + 0.5))
            scores[passage] = scores.get(passage, 0.0) + worth
    return sorted(scores, key=lambda passage: (-scores[passage], passage))[: retrieval.NUM_PASSAGES]


@pytest.mark.parametrize("found", [50, 5_000])
def test_ranking_passages_finds_what_ranking_all_of_them_finds(
    found: int, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "MAX_FOUND", found)
    for seed in range(3):
        segments = write(tmp_path / "index", tokenizer, documents(seed)).segments
    asked = [text for seed in (0, 1, 7) for text in documents(seed)]
    chosen = [rank_passages(segments, text) for text in asked]
    assert chosen == [rank_passages_twin(segments, text) for text in asked]
    assert len({len(passages) for passages in chosen}) > 1
    assert {segment for passages in chosen for segment, _ in passages} == {0, 1, 2}


def test_passages_are_texts_or_consecutive_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([token for text in documents(1) for token in (*text, BREAK)], np.uint32)
    cut = list(passages_of(tokens))
    assert all(
        0 < len(held) <= PASSAGE and (held == tokens[at : at + len(held)]).all() for at, held in cut
    )
    assert np.concatenate([held for _, held in cut]).tolist() == tokens[tokens != BREAK].tolist()
    assert len(cut) == sum(-(-len(text) // PASSAGE) for text in documents(1))


def test_the_longest_match_is_drafted_from_the_best_passage() -> None:
    passages = Passages(
        [
            np.array(text, np.uint32)
            for text in ([1, 2, 3, 4], [9, 2, 3, 5, 6, 7], [8, 2, 3, 5], [], [3, 4])
        ]
    )
    assert passages.retrieve([0, 2, 3], 8) == (2, [4])
    assert passages.retrieve([9, 2, 3], 8) == (3, [5, 6, 7])
    assert passages.retrieve([9, 2, 3], 1) == (3, [5])
    assert passages.retrieve([7, 8], 8) == (0, [])  # not across two of them
    assert passages.retrieve([6, 7], 8) == (0, [])  # nothing follows
    assert (
        passages.retrieve([0], 8) == passages.retrieve([2], 8) == (0, [])
    )  # one token is no match


def test_passages_need_a_match_of_two_tokens_and_win_ties(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Without passages the draft would be 4, with which most texts go on."""
    common = [[10 + n, 1, 2, 3, 4, 4, 4] for n in range(20)]
    drafter = Retrieval(
        {"docs": write(tmp_path, tokenizer, [*common, [200, 201, 1, 2, 3, 5, 6, 7]])}
    )

    def draft_behind(tokens: list[int]) -> tuple[int, list[int]]:
        (draft,) = drafter.propose([make_request(tokens, depth=8)])
        return draft.match_length, draft.tokens[1:]

    drafter.open(0, [99])  # a prompt with no passage
    assert draft_behind([99, 1, 2, 3]) == (3, [4, 4, 4])
    assert draft_behind([99, 2, 3]) == (0, [])
    drafter.close(0)
    drafter.open(0, [200, 201])
    assert draft_behind([200, 201, 1, 2, 3]) == (5, [5, 6, 7])
    assert draft_behind([200, 201, 99, 1, 2, 3]) == (3, [5, 6, 7])
    assert draft_behind([200, 201, 99, 2, 3]) == (2, [5, 6, 7])
    # a changed index is read again, and the passages found before are dropped
    drafter.add("docs", write(tmp_path, tokenizer, [[1]]))
    assert draft_behind([200, 201, 99, 1, 2, 3]) == (3, [4, 4, 4])


def test_passages_of_another_clients_documents_are_never_used(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    secret = [250, 251, 252, 253, 254]
    drafter = Retrieval({"all": write(tmp_path / "all", tokenizer, [[1, 2, 3, 4]])})
    drafter.add("one", write(tmp_path / "one", tokenizer, [secret]), client="a")
    for slot, tenant in enumerate(("a", "b", "")):
        drafter.open(slot, secret[:3], tenant=tenant)
    assert drafted(drafter, secret[1:3], 0, 1, 2) == [[253, 254], [], []]
    drafter.remove("one")
    assert drafted(drafter, secret[1:3], 0) == [[]]


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_table_never_drafts_ids_outside_of_the_vocabulary(
    seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A table of the right size that opens may give wrong passages, but no id out of bounds."""
    write(tmp_path, tokenizer, documents(1))
    table, generator = tmp_path / "0001.passages", random.Random(seed)
    held = bytearray(table.read_bytes())
    for _ in range(400):
        held[generator.randrange(4096, len(held))] = generator.randrange(256)
    table.write_bytes(held)
    try:
        segments = Index(tmp_path).segments
    except LoadError:
        return
    for text in documents(2):
        passages = find_passages(segments, text)
        assert passages is None or all(
            0 <= token < VOCAB for token in passages.retrieve(text[-16:], 8)[1]
        )


def test_an_index_without_passages_drafts_as_before(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "passages_supported", lambda: False)
        before = write(tmp_path, tokenizer, [[1, 2, 3, 4]])
    drafter = Retrieval({"docs": before})
    drafter.open(0, [1, 2, 3])
    assert not (tmp_path / "0001.passages").exists()
    assert "passages" not in json.loads((tmp_path / LIST).read_text())
    assert drafted(drafter, [1, 2, 3], 0) == [[4]]
    added = write(tmp_path, tokenizer, [[7, 8, 9]])  # what is added has some
    assert rank_passages(added.segments, [1, 2, 3]) == []
    assert rank_passages(added.segments, [1, 8]) == [(1, 0)]


def test_a_full_disk_leaves_the_index_as_it_was(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "index", tokenizer, documents(1))
    before = files_of(tmp_path / "index")
    monkeypatch.setattr(corpus, "CREATE_TABLE", f"PRAGMA max_page_count=3; {corpus.CREATE_TABLE}")
    real = sqlite3.connect

    class Small(sqlite3.Connection):
        """A connection on a disk with room for a few pages."""

        def execute(self, sql: str, *more: object) -> sqlite3.Cursor:
            for statement in sql.split("; "):
                done = super().execute(statement, *more)  # type: ignore[arg-type]
            return done

    monkeypatch.setattr(corpus.sqlite3, "connect", lambda *a, **k: real(*a, factory=Small, **k))
    for directory in (tmp_path / "index", tmp_path / "new"):
        with (
            pytest.raises(OSError, match="full") as raised,
            adding(directory, tokenizer, VOCAB) as writer,
        ):
            writer.add(IndexedFile("b", 1, 2), documents(2))
        assert raised.value.errno == errno.EIO and "\n" not in str(raised.value)
    assert files_of(tmp_path / "index") == before
    assert not (tmp_path / "new").exists()
