"""Recycling: tables keep the latest distributions in bounded memory, trees are of the likeliest
nodes, and tenants are separate."""

from __future__ import annotations

import math
import re
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import LLM, LoadError, SamplingParams, rng
from forerun.draft.recycle import (
    MAX_TENANTS,
    NONE,
    NUM_SUCCESSORS,
    Growth,
    Recycle,
    SuccessorTable,
    grow_tree,
    grow_tree_twin,
    pair_key,
)
from forerun.types import Draft
from tests import tiny
from tests.draft.helpers import make_request, refused

VOCAB = 300


def logits_of(rows: int, seed: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def make_table(
    seed: int = 1, rows: int = 400, tokens: int = 40, twin: bool = False, entries: int = 1024
) -> SuccessorTable:
    """Make a table of many distributions over few tokens, so that trees can grow deep."""
    table, generator = SuccessorTable(entries), torch.Generator().manual_seed(seed)
    logits = logits_of(rows, seed)
    logits[:, tokens:] -= 100
    before, last = torch.randint(0, tokens, (2, rows), generator=generator).tolist()
    (table.learn_twin if twin else table.learn)(before, last, logits)
    return table


@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 16), (7, 17), (5, 301), (2, 49152)])
def test_a_table_learns_the_likeliest_tokens_of_a_distribution(instructions, rows, vocab) -> None:
    table, logits = SuccessorTable(64), logits_of(rows, vocab=vocab)
    table.learn(range(rows), range(1, rows + 1), logits)
    best, tokens = logits.log_softmax(-1).topk(min(NUM_SUCCESSORS, vocab))
    for i in range(rows):
        found = table.find(pair_key(i, i + 1))
        assert [token for token, _ in found] == tokens[i].tolist()
        assert [log for _, log in found] == pytest.approx(best[i].tolist(), abs=0.05)


def test_the_twin_learns_the_same() -> None:
    ours, twin = make_table(), make_table(twin=True)
    held = ours.keys > 0
    assert (ours.keys == twin.keys).all() and (ours.tokens[held] == twin.tokens[held]).all()
    assert np.abs(ours.logs[held] - twin.logs[held]).max() < 0.05


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_distributions_that_are_not_finite_are_left_out(broken: float) -> None:
    logits = logits_of(2)
    logits[0, 7] = broken
    for name in ("learn", "learn_twin"):
        table = SuccessorTable(64)
        getattr(table, name)([1, 3], [2, 4], logits)
        assert not table.find(pair_key(1, 2)) and table.find(pair_key(3, 4))


def test_the_latest_distribution_of_a_pair_is_kept_and_the_oldest_pair_dropped() -> None:
    table = SuccessorTable(4)  # one set
    for i in range(4):
        table.learn([NONE], [i], logits_of(1, seed=i))
    assert len(table) == 4
    table.learn([NONE], [0], logits_of(1, seed=9))
    table.learn([NONE], [7], logits_of(1, seed=7))
    assert table.find(pair_key(NONE, 0))[0][0] == int(logits_of(1, seed=9).argmax())
    assert not table.find(pair_key(NONE, 1)) and table.find(pair_key(NONE, 2)), (
        "1 was stored before 2"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("has_rates", [False, True])
def test_the_twin_grows_the_same_tree(temperature: float, is_chain: bool, has_rates: bool) -> None:
    tables = [make_table(1, rows=60), make_table(2)]
    rates = array("f", [(0.9 * (i + 0.5) / 16) ** 1.3 for i in range(16)]) if has_rates else None
    sizes = set()
    for root in range(40):
        keys = [rng.stream(3, rng.Lane.TARGET, root, k) for k in range(5)] if temperature else []
        growth = Growth((root * 7) % 40, root, 5, 12, is_chain, temperature, keys, rates)
        found, twin = grow_tree(tables, growth), grow_tree_twin(tables, growth)
        assert found[:3] == twin[:3] and found.path_probs == pytest.approx(twin.path_probs)
        assert found.path_probs == sorted(found.path_probs, reverse=True)
        sizes.add(len(found.tokens))
        if is_chain:
            assert found.parents == list(range(len(found.parents)))
    assert max(sizes) == (5 if is_chain else 12)


def test_nodes_are_the_likeliest_of_all() -> None:
    """Every path of the distributions is enumerated with its probability; the best are the tree."""
    table, root, levels = make_table(rows=3000), 3, 3
    paths, frontier = {}, [((root,), 1.0)]
    for _ in range(levels):
        grown = []
        for path, prob in frontier:
            before = path[-2] if len(path) > 1 else 8
            known = table.find(pair_key(before, path[-1])) or table.find(pair_key(NONE, path[-1]))
            grown += [((*path, token), prob * min(math.exp(log), 1)) for token, log in known]
        paths |= dict(grown)
        frontier = grown
    best = sorted(paths.values(), reverse=True)[:20]
    found = grow_tree([table], Growth(8, root, levels, 20))
    nodes = [(root,)]
    for token, parent in zip(found.tokens, found.parents, strict=True):
        nodes.append((*nodes[parent], token))
    assert [paths[node] for node in nodes[1:]] == pytest.approx(best, rel=1e-5)
    assert found.path_probs == pytest.approx(best, rel=1e-5)


def test_a_table_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    table = make_table(entries=4096)
    table.save(tmp_path / "table", VOCAB)
    again = SuccessorTable.load(tmp_path / "table", VOCAB)
    assert (tmp_path / "table").stat().st_size < 30_000
    assert 0.95 * len(table) < len(again) <= len(table)
    for key in again.keys[again.keys > 0].tolist():
        (own, logs), (other, read) = (zip(*t.find(key), strict=True) for t in (table, again))
        assert own == other and logs == pytest.approx(read, rel=1e-2)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "vocab", "other", "missing"])
def test_a_damaged_or_foreign_file_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    make_table().save(path, VOCAB)
    content = path.read_bytes()
    if damage == "other":
        from safetensors.numpy import save_file

        save_file(
            {"keys": np.zeros(5, np.uint64)}, path, {"format": "forerun-successors", "vocab": "300"}
        )
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"cut": content[:-100], "text": b"hello", "empty": b"", "vocab": content}[damage]
        )
    with refused(LoadError, re.escape(str(path))):
        SuccessorTable.load(path, VOCAB if damage != "vocab" else 12)


def test_a_tenant_drafts_from_its_own_table_only() -> None:
    recycle = Recycle()
    recycle.open(0, [1, 2], tenant="a")
    recycle.open(1, [1, 2], tenant="b")
    recycle.learn(0, [1, 2], Draft.root(2), logits_of(1))
    own, other = recycle.propose([make_request([1, 2]), make_request([1, 2], slot=1)])
    assert len(own) > 1 and len(other) == 1
    recycle.close(0, [1, 2])
    recycle.open(0, [1, 2], tenant="a")
    assert len(recycle.propose([make_request([1, 2])])[0]) > 1, "the table outlives the request"
    recycle.forget()
    assert len(recycle.propose([make_request([1, 2])])[0]) == 1


def test_the_number_of_tables_is_bounded_and_those_in_use_stay() -> None:
    recycle = Recycle()
    recycle.open(0, [1, 2], tenant="first")
    for i in range(3 * MAX_TENANTS):
        recycle.open(1, [1, 2], tenant=str(i))
        recycle.close(1)
    assert len(recycle.tables) == MAX_TENANTS and "first" in recycle.tables


def test_a_saved_table_drafts_for_any_tenant_and_changes_no_text(tmp_path: Path) -> None:
    target = tiny.family("llama")
    first = LLM(target, draft="recycle", kv_tokens=1024)
    params = SamplingParams.pure(max_tokens=30, ignore_eos=True)
    plain = first.generate([3, 4, 5], params, draft="off")[0].token_ids
    assert first.generate([3, 4, 5], params, depth=3)[0].token_ids == plain
    first.engine.proposers["recycle"].tables[""].save(tmp_path / "table", tiny.VOCAB)
    later = LLM(target, draft=f"suffix+recycle:{tmp_path}/table", kv_tokens=1024)
    output = later.generate([3, 4, 5], params, depth=3)[0]
    assert output.token_ids == plain and output.stats.by_source["recycle"].accepted > 10
