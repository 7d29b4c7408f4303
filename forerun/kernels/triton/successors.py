"""Tables of successors on the device: learning the target's predictions, and growing trees of the
likeliest nodes.

Learning goes through the predictions one after the other, since one may push out another's entry. A
tree is grown by one program, which keeps all nodes that could come next in registers and takes the
likeliest again and again; each step waits for two reads of memory.

Twin: `kernels.successors`, whose results these are, but for logarithms that differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from forerun.kernels.successors import (
    NONE,
    NUM_SUCCESSORS,
    WAYS,
    Predictions,
    TableTensors,
    TreeRoots,
    Trees,
)
from forerun.kernels.triton.draw import element, gumbel, mix

MOST_TABLES = 2  # in which a tree looks


def learn(table: TableTensors, seen: Predictions) -> None:
    """Store predictions as `kernels.successors.learn` does."""
    _learn[(1,)](
        table.keys,
        table.tokens,
        table.logs,
        seen.before,
        seen.last,
        seen.is_valid,
        seen.tokens,
        seen.logs,
        len(seen.last),
        ENTRIES=table.entries,
        WAYS=WAYS,
        NUM_SUCCESSORS=NUM_SUCCESSORS,
        num_warps=1,
    )


def grow(tables: Sequence[TableTensors], roots: TreeRoots, nodes: int, is_chain: bool) -> Trees:
    """Grow trees as `kernels.successors.grow` does, in at most `MOST_TABLES` tables."""
    assert 1 <= len(tables) <= MOST_TABLES, len(tables)
    count, first, second = len(roots.root), tables[0], tables[-1]
    grown = Trees.empty(count, nodes, roots.root.device)
    _grow[(count,)](
        first.keys,
        first.tokens,
        first.logs,
        second.keys,
        second.tokens,
        second.logs,
        *roots,
        *grown,
        ENTRIES=first.entries,
        ENTRIES2=second.entries if len(tables) > 1 else 0,
        NODES=nodes,
        BINS=roots.rates.shape[1],
        IS_CHAIN=is_chain,
        WAYS=WAYS,
        NUM_SUCCESSORS=NUM_SUCCESSORS,
        C=triton.next_power_of_2(nodes * NUM_SUCCESSORS),
        N=triton.next_power_of_2(nodes + 1),
        MISSING=NONE,
        num_warps=1,
    )
    return grown


@triton.jit  # type: ignore[untyped-decorator]
def _set_of(key, ENTRIES: tl.constexpr, WAYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first slot of a key's set."""
    mixed = mix(key.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    return (mixed & (ENTRIES - 1)) // WAYS * WAYS


@triton.jit  # type: ignore[untyped-decorator]
def _learn(  # type: ignore[no-untyped-def]
    keys,
    tokens,
    logs,
    before,
    last,
    is_valid,
    next_tokens,
    next_logs,
    rows,
    ENTRIES: tl.constexpr,
    WAYS: tl.constexpr,
    NUM_SUCCESSORS: tl.constexpr,
):
    """Store predictions in order. Barriers stand between reading and writing the slots of a set:
    the threads move different parts of it."""
    way, e = tl.arange(0, WAYS), tl.arange(0, NUM_SUCCESSORS)
    row = 0
    while row < rows:
        if tl.load(is_valid + row):
            token = tl.load(last + row)
            new_tokens = tl.load(next_tokens + row * NUM_SUCCESSORS + e)
            new_logs = tl.load(next_logs + row * NUM_SUCCESSORS + e)
            for alone in tl.static_range(2):
                first_token = tl.load(before + row)
                if alone:
                    first_token = first_token * 0 - 1
                key = ((first_token + 2) << 32) | token
                slot = _set_of(key, ENTRIES, WAYS) + way
                held = tl.load(keys + slot)
                at = tl.min(tl.where(held == key, way, WAYS - 1), 0)
                is_new = way == 0
                source = tl.where((way > 0) & (way <= at), slot - 1, slot)
                cells = source[:, None] * NUM_SUCCESSORS + e[None, :]
                old_keys = tl.load(keys + source)
                old_tokens, old_logs = tl.load(tokens + cells), tl.load(logs + cells)
                tl.debug_barrier()
                cells = slot[:, None] * NUM_SUCCESSORS + e[None, :]
                tl.store(keys + slot, tl.where(is_new, key, old_keys))
                is_new_row = is_new[:, None]
                tl.store(tokens + cells, tl.where(is_new_row, new_tokens[None, :], old_tokens))
                tl.store(logs + cells, tl.where(is_new_row, new_logs[None, :], old_logs))
                tl.debug_barrier()
        row += 1


@triton.jit  # type: ignore[untyped-decorator]
def _find(  # type: ignore[no-untyped-def]
    keys, first_token, token, ENTRIES: tl.constexpr, WAYS: tl.constexpr
):
    """Return the slot of an entry, -1 if there is none."""
    key = ((first_token + 2) << 32) | token
    slot = _set_of(key, ENTRIES, WAYS) + tl.arange(0, WAYS)
    return tl.max(tl.where(tl.load(keys + slot) == key, slot, -1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _find_either(  # type: ignore[no-untyped-def]
    keys,
    keys2,
    first_token,
    token,
    ENTRIES: tl.constexpr,
    ENTRIES2: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Return the slot of an entry in one of two tables, -1 without any, and whether it is in the
    second."""
    entry = _find(keys, first_token, token, ENTRIES, WAYS)
    is_second = False
    if ENTRIES2 > 0:
        is_second = entry < 0
        if is_second:
            entry = _find(keys2, first_token, token, ENTRIES2, WAYS)
    return entry, is_second


@triton.jit
def _pick(index, at, values):  # type: ignore[no-untyped-def]
    """Return the value of a vector at an index."""
    return tl.sum(tl.where(index == at, values, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _grow(  # type: ignore[no-untyped-def]
    keys,
    tokens,
    logs,
    keys2,
    tokens2,
    logs2,
    before,
    root,
    noise,
    position,
    temperature,
    max_depth,
    max_nodes,
    rates,
    out_tokens,
    out_parents,
    out_bins,
    out_probs,
    ENTRIES: tl.constexpr,
    ENTRIES2: tl.constexpr,
    NODES: tl.constexpr,
    BINS: tl.constexpr,
    IS_CHAIN: tl.constexpr,
    WAYS: tl.constexpr,
    NUM_SUCCESSORS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    MISSING: tl.constexpr,
):
    """Grow one tree: candidate NUM_SUCCESSORS * i + e is successor e of node i."""
    request = tl.program_id(0)
    c, n = tl.arange(0, C), tl.arange(0, N)
    own_temperature = tl.load(temperature + request)
    deepest, most = tl.load(max_depth + request), tl.load(max_nodes + request)
    stream = tl.load(noise + request).to(tl.uint64, bitcast=True)
    start = tl.load(position + request)
    candidates = tl.zeros((C,), tl.float64)
    words, bins = tl.zeros((C,), tl.int64), tl.zeros((C,), tl.int64)
    # of nodes with the root
    node_tokens = tl.where(n == 0, tl.load(root + request), 0)
    node_depths = tl.zeros((N,), tl.int64)
    token, earlier = tl.load(root + request), tl.load(before + request)
    depth, prob = start * 0, tl.sum(tl.where(n == 0, 1.0, 0.0).to(tl.float64), 0)
    goes_on = most > 0
    out = request * NODES
    for node in range(NODES):
        # What follows the node: the entry of two tokens, or that of one, of the first table first.
        entry, is_second = _find_either(keys, keys2, earlier, token, ENTRIES, ENTRIES2, WAYS)
        if entry < 0:
            alone = earlier * 0 + MISSING
            entry, is_second = _find_either(keys, keys2, alone, token, ENTRIES, ENTRIES2, WAYS)
        is_own = c // NUM_SUCCESSORS == node
        cell = tl.where(entry < 0, 0, entry) * NUM_SUCCESSORS + c % NUM_SUCCESSORS
        in_first = is_own & (entry >= 0) & (is_second == 0)
        word = tl.load(tokens + cell, mask=in_first, other=MISSING)
        log = tl.load(logs + cell, mask=in_first, other=float("-inf"))
        if ENTRIES2 > 0:
            in_second = is_own & (entry >= 0) & is_second
            word = tl.where(in_second, tl.load(tokens2 + cell, mask=in_second), word)
            log = tl.where(in_second, tl.load(logs2 + cell, mask=in_second), log)
        word = word.to(tl.int64)
        is_there = is_own & (word >= 0) & (log > float("-inf")) & (depth < deepest)
        score = tl.where(is_there, log.to(tl.float64), float("-inf"))
        if own_temperature > 0:
            own_noise = gumbel(element(stream, start + 1 + depth), word)
            score = tl.where(is_there, score / own_temperature + own_noise, float("-inf"))
            highest = tl.max(score, 0)
            weight = tl.exp(score - tl.where(highest > float("-inf"), highest, 0.0))
            total = tl.sum(weight, 0)
            value = weight / tl.where(total > 0, total, 1.0)
        else:
            value = tl.exp(score)
        own_bin = tl.minimum((value * BINS).to(tl.int64), BINS - 1)
        rate = tl.load(rates + request * BINS + own_bin) / ((own_bin.to(tl.float64) + 0.5) / BINS)
        if IS_CHAIN:
            candidates = tl.zeros((C,), tl.float64)
        candidates = tl.where(is_own, prob * tl.minimum(value * rate, 1.0), candidates)
        words, bins = tl.where(is_own, word, words), tl.where(is_own, own_bin, bins)
        # The likeliest, the earliest first.
        prob = tl.max(candidates, 0)
        chosen = tl.min(tl.where(candidates == prob, c, C), 0)
        goes_on = goes_on & (prob > 0) & (node < most)
        prob = tl.where(goes_on, prob, 0.0)
        parent = chosen // NUM_SUCCESSORS
        token = tl.where(goes_on, _pick(c, chosen, words), 0)
        earlier = _pick(n, parent, node_tokens)
        depth = _pick(n, parent, node_depths) + 1
        node_tokens = tl.where(n == node + 1, token, node_tokens)
        node_depths = tl.where(n == node + 1, depth, node_depths)
        tl.store(out_tokens + out + node, token)
        tl.store(out_parents + out + node, tl.where(goes_on, parent, MISSING))
        tl.store(out_bins + out + node, _pick(c, chosen, bins))
        tl.store(out_probs + out + node, prob)
        candidates = tl.where(c == chosen, 0.0, candidates)
