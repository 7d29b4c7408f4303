"""Retrieval: the index is what a naive one would be, finds what a naive search finds, and is whole
or not there."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import numpy as np
import pytest

from forerun import LLM, ConfigError, ForerunError, LoadError, RequestError, SamplingParams
from forerun.draft import corpus
from forerun.draft.corpus import (
    BREAK,
    LIST,
    Index,
    IndexedFile,
    IndexSegment,
    adding,
    sort_suffixes,
    sort_suffixes_twin,
)
from forerun.draft.proposer import DraftRequest
from forerun.draft.retrieval import Retrieval, SegmentSearch, retrieve_twin
from forerun.models.tokenizer import Tokenizer
from forerun.verify import Noise
from tests import tiny
from tests.engine import build


def texts_of(seed: int, letters: int = 4, count: int = 12) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(letters) for _ in range(generator.randrange(60))] for _ in range(count)
    ]


def segment_of(texts: list[list[int]], vocab: int = 50, twin: bool = False) -> IndexSegment:
    tokens = np.array([token for text in texts for token in (*text, BREAK)], np.uint32)
    suffixes, starts = (
        np.zeros(int((tokens != BREAK).sum()), np.uint32),
        np.zeros(vocab + 1, np.int64),
    )
    (sort_suffixes_twin if twin else sort_suffixes)(tokens, suffixes, starts)
    return IndexSegment("1", tokens, suffixes, starts, ())


def row_of(tokens: list[int], slot: int = 0, depth: int = 8) -> DraftRequest:
    return DraftRequest(slot, tokens, SamplingParams(), Noise(1, len(tokens) - 1), depth=depth)


@pytest.mark.parametrize("seed", range(6))
def test_suffixes_are_sorted_as_plain_sorting_does(seed: int) -> None:
    texts = texts_of(seed, letters=(1, 2, 3, 4, 20, 50)[seed])
    ours, twin = segment_of(texts), segment_of(texts, twin=True)
    assert (ours.suffixes == twin.suffixes).all() and (ours.starts == twin.starts).all()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_what_looking_at_every_place_finds(seed: int) -> None:
    """Over few letters, so that there are matches of all lengths and votes to count."""
    letters = (1, 2, 3, 4, 8, 20)[seed]
    segments = [segment_of(texts_of(10 * seed + i, letters)) for i in range(3)]
    shelf, matches = SegmentSearch(segments), set()
    for text in texts_of(seed + 100, letters, 60):
        for most in (1, 5, 9):
            if text:
                found = shelf.retrieve(text[-16:], most)
                assert found == retrieve_twin(segments, text[-16:], most)
                matches.add(found[0])
    assert {0, 3} <= matches and (letters > 4 or max(matches) > 4)


def test_most_occurrences_decide_and_a_match_speaks_for_its_length() -> None:
    shelf = SegmentSearch([segment_of([[1, 2, 3, 9, 9, 9, 9], *[[1, 2, 3, 4, 5, 6, 7]] * 2])])
    assert shelf.retrieve([1, 2, 3], 8) == (3, [4, 5, 6])
    assert shelf.retrieve([1, 2, 3], 2) == (3, [4, 5])
    assert shelf.retrieve([1, 2, 3, 9], 8) == (4, [9, 9, 9])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.spoken())


def write(directory: Path, tokenizer: Tokenizer, texts: list[list[int]], name: str = "a") -> None:
    with adding(directory, tokenizer, 50) as writer:
        writer.add(IndexedFile(name, 1, 2), texts)


def test_adding_finds_what_building_at_once_finds(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parts = [texts_of(seed, 3) for seed in range(3)]
    for part in parts:
        write(tmp_path / "added", tokenizer, part)
    write(tmp_path / "once", tokenizer, [text for part in parts for text in part])
    added, once = Index(tmp_path / "added"), Index(tmp_path / "once")
    assert (
        len(added.segments) == 3 and added.count == once.count and added.tokenizer == once.tokenizer
    )
    for text in filter(None, texts_of(9, 3, 40)):
        one, other = (
            SegmentSearch(index.segments).retrieve(text[-16:], 1) for index in (added, once)
        )
        assert one[0] == other[0]


@pytest.mark.parametrize(
    "damage",
    [
        "no list",
        "list",
        "nested",
        "version",
        "number",
        "missing",
        "short",
        "long",
        "starts",
        "elsewhere",
    ],
)
def test_a_damaged_index_is_one_clear_line(
    damage: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path, tokenizer, texts_of(1))
    listed, about = tmp_path / LIST, json.loads((tmp_path / LIST).read_text())
    if damage == "no list":
        listed.unlink()
    elif damage in ("list", "nested"):
        listed.write_text("[" * 100_000 if damage == "nested" else "{]")
    elif damage == "missing":
        (tmp_path / "0001.suffixes").unlink()
    elif damage in ("short", "long"):
        path = tmp_path / "0001.tokens"
        path.write_bytes(
            path.read_bytes()[:-4] if damage == "short" else path.read_bytes() + b"1234"
        )
    elif damage == "starts":
        path = tmp_path / "0001.starts"
        path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    else:
        about["version"] = 99 if damage == "version" else 1
        about["segments"][0] |= {
            "number": {"tokens": "many"},
            "elsewhere": {"name": "../0001"},
        }.get(damage, {})
        listed.write_text(json.dumps(about))
    with pytest.raises(LoadError) as raised:
        Index(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_numbers_that_are_damaged_draft_nothing_that_is_no_token(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Bits may turn without a file changing its size: drafts are worse then, and never out of
    bounds."""
    write(tmp_path, tokenizer, texts_of(1, 3))
    generator = np.random.default_rng(1)
    for part in ("tokens", "suffixes"):
        path = tmp_path / f"0001.{part}"
        path.write_bytes(generator.bytes(path.stat().st_size))
    shelf = SegmentSearch(Index(tmp_path).segments)
    for text in filter(None, texts_of(9, 3, 40)):
        assert all(0 <= token < 50 for token in shelf.retrieve(text[-16:], 8)[1])


@pytest.mark.parametrize("when", ["tokens", "room", "sorting", "list"])
@pytest.mark.parametrize(
    "what", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_what_ends_an_addition_leaves_the_index_as_it_was(
    when: str,
    what: BaseException,
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "index", tokenizer, texts_of(1))
    before = {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()}

    def fail(*_: object) -> None:
        raise what

    if when == "room":  # a disk that gets full under a mapped file would kill the process
        monkeypatch.setattr(corpus.os, "posix_fallocate", fail)
    if when == "sorting":
        monkeypatch.setattr(corpus, "sort_suffixes", fail)
    if when == "list":
        monkeypatch.setattr("forerun.utils.os.replace", fail)
    for directory in (tmp_path / "index", tmp_path / "new"):
        with pytest.raises((type(what), ForerunError)), adding(directory, tokenizer, 50) as writer:
            writer.add(IndexedFile("b", 1, 2), texts_of(2))
            if when == "tokens":
                fail()
    assert {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_two_do_not_add_at_once_and_nothing_new_leaves_no_trace(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path, tokenizer, texts_of(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with adding(tmp_path, tokenizer, 50) as writer:
        with pytest.raises(RequestError, match="another process"), adding(tmp_path, tokenizer, 50):
            pass
        writer.add(IndexedFile("empty", 1, 2), [[]])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tenants_and_indices_that_come_and_go(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, token in (("all", 4), ("one", 5)):
        write(tmp_path / name, tokenizer, [[1, 2, 3, token]])
    retrieval = Retrieval({"all": Index(tmp_path / "all")})
    retrieval.open(0, [], tenant="a")
    retrieval.open(1, [], tenant="b")
    retrieval.add("one", Index(tmp_path / "one"), client="a")
    longer = [9, 1, 2, 3]

    def said() -> list[list[int]]:
        return [
            draft.tokens[1:]
            for draft in retrieval.propose([row_of(longer, slot) for slot in (0, 1)])
        ]

    assert said() == [[4], [4]]
    retrieval.remove("all")
    assert said() == [[5], []]
    retrieval.remove("one")
    assert said() == [[], []]


def test_texts_are_the_same_and_the_documents_are_drafted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    llm = LLM(tiny.spoken(), draft="off", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=60, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n"
    plain = llm.generate(prompt, params)[0].token_ids
    with adding(tmp_path / "index", tokenizer, llm.decoder.config.vocab) as writer:
        writer.add(IndexedFile("answers", 1, 2), [plain])
    for draft in (f"retrieval:{tmp_path}/index", f"suffix+retrieval:{tmp_path}/index"):
        for temperature in (0.0, 0.8):
            llm = LLM(tiny.spoken(), draft=draft, kv_tokens=512, depth=6)
            params = SamplingParams.pure(
                max_tokens=60, ignore_eos=True, temperature=temperature, seed=4
            )
            said = llm.generate(prompt, params)[0]
            assert said.token_ids == llm.generate(prompt, params, draft="off")[0].token_ids
            assert temperature or said.stats.by_source["retrieval"].accepted > (
                20 if draft[0] == "r" else 0
            )


def test_another_tokenizers_index_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "index", tokenizer, [[1, 2, 3]])
    listed = tmp_path / "index" / LIST
    listed.write_text(json.dumps(json.loads(listed.read_text()) | {"tokenizer": "other"}))
    with pytest.raises(LoadError, match="made for another tokenizer"):
        LLM(tiny.spoken(), draft=f"retrieval:{tmp_path}/index", kv_tokens=512)
    with pytest.raises(LoadError, match="there is no index"):
        LLM(tiny.spoken(), draft=f"retrieval:{tmp_path}/nowhere", kv_tokens=512)
    with pytest.raises(ConfigError, match="retrieval:INDEX"):
        LLM(tiny.spoken(), draft="retrieval", kv_tokens=512)


def test_nothing_goes_on_across_two_texts() -> None:
    shelf = SegmentSearch([segment_of([[1, 2, 3, 4], [5, 6, 7, 8]])])
    assert shelf.retrieve([1, 2, 3], 8) == (3, [4])
    assert shelf.retrieve([2, 3, 4], 8) == (0, [])
    assert shelf.retrieve([3, 4, 5], 8) == (0, [])


def test_room_is_taken_before_anything_is_mapped(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gets full under a mapped file ends the process without a word."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpus.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "new", tokenizer, texts_of(1))
    assert not (tmp_path / "new").exists()


def test_a_model_of_another_size_needs_an_index_of_its_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write(tmp_path, tokenizer, texts_of(1))
    with pytest.raises(LoadError, match="made for another tokenizer"):
        Index(tmp_path).check(tokenizer, 51)
    Index(tmp_path).check(tokenizer, 50)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["match", "token", "tree"])
def test_batches_with_preemption_say_what_they_say_without(
    temperature: float, rule: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Chunks of 3 tokens, room for about two requests; the index has what they say, with mistakes
    in it."""
    plain = [list(r.output) for r in build.run(build.engine("llama", []), "off", temperature)]
    generator = random.Random(1)
    texts = [
        [t if generator.random() < 0.9 else generator.randrange(tiny.VOCAB) for t in text]
        for text in plain
    ]
    engine = build.engine("llama", [], rule=rule, chunk=3, tokens=build.SMALL)
    with adding(tmp_path, tokenizer, tiny.VOCAB) as writer:
        writer.add(IndexedFile("said", 1, 2), texts)
    engine.proposers["retrieval"] = Retrieval({"texts": Index(tmp_path)})  # type: ignore[index]
    requests = build.run(engine, "retrieval", temperature)
    assert sum(r.stats.preemptions for r in requests) > 0
    if rule == "match" or not temperature:
        assert [list(r.output) for r in requests] == plain
        counts = [r.stats.by_source["retrieval"] for r in requests]
        assert 0 < sum(c.accepted for c in counts) < sum(c.drafted for c in counts)
    assert sum(r.stats.preemptions for r in requests) > 0
