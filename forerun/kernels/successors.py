"""Tables of the likeliest next tokens in the memory of a device, in plain torch: the twin of
`kernels.triton.successors`.

A table learns the target's predictions, and trees of its likeliest nodes are drafts
(`draft.recycle`). Shapes are fixed and nothing waits for the device, so all of it can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun import rng

NUM_SUCCESSORS = 8  # successors that are kept per entry
WAYS = 4  # entries of a set, the most recently learned first
NONE = -1  # stands for a missing token


@dataclass(frozen=True, slots=True)
class TableTensors:
    """A set-associative table of successors; see `draft.recycle.SuccessorTable`.

    Behind its entries lies a set that is never looked up: what must not be stored goes there.

    Attributes:
        keys: int64 [entries + WAYS], as in `pair_key`, 0 if there is no entry.
        tokens: int32 [entries + WAYS, NUM_SUCCESSORS], the likeliest first; -1 behind the last.
        logs: float32 [entries + WAYS, NUM_SUCCESSORS], natural logarithms of their probabilities.
    """

    keys: Tensor
    tokens: Tensor
    logs: Tensor

    @classmethod
    def empty(cls, entries: int, device: torch.device) -> TableTensors:
        """Return an empty table; `entries` is a power of two."""
        count = entries + WAYS
        return cls(
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros((count, NUM_SUCCESSORS), dtype=torch.int32, device=device),
            torch.zeros((count, NUM_SUCCESSORS), dtype=torch.float32, device=device),
        )

    @property
    def entries(self) -> int:
        """The number of entries."""
        return len(self.keys) - WAYS


class Predictions(NamedTuple):
    """The target's likeliest next tokens at N places of texts.

    Attributes:
        before, last: int64 [N], the two tokens before each; `before` is NONE without one.
        is_valid: bool [N], False for places of no text.
        tokens: int32 [N, NUM_SUCCESSORS], likeliest first.
        logs: float32 [N, NUM_SUCCESSORS], natural logarithms of their probabilities.
    """

    before: Tensor
    last: Tensor
    is_valid: Tensor
    tokens: Tensor
    logs: Tensor

    @classmethod
    def of(cls, before: Tensor, last: Tensor, is_valid: Tensor, logits: Tensor) -> Predictions:
        """Take the likeliest tokens from logits [N, V]; rows that are not finite do not count."""
        logs, tokens = logits.float().log_softmax(-1).topk(min(NUM_SUCCESSORS, logits.shape[1]))
        more = (0, NUM_SUCCESSORS - logs.shape[1])
        logs = torch.nn.functional.pad(logs, more, value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, more, value=NONE)
        tokens = torch.where(logs > -torch.inf, tokens, NONE).to(torch.int32)
        return cls(before, last, is_valid & torch.isfinite(logs[:, 0]), tokens, logs)


class TreeRoots(NamedTuple):
    """The roots of R trees, and their bounds.

    Attributes:
        before, root: int64 [R], the last two tokens of each text; `before` may be NONE.
        noise: int64 [R], keys of the target's noise, see `rng.stream`.
        position: int64 [R], the position of the root.
        temperature: float64 [R], the target's; at 0 the probabilities are those of the table, above
            it those of being drawn with the noise.
        max_depth, max_nodes: int64 [R], without the root.
        rates: float64 [R, B], by which probabilities in each of B equal bins are calibrated, see
            `DraftRequest.confidence_rates`.
    """

    before: Tensor
    root: Tensor
    noise: Tensor
    position: Tensor
    temperature: Tensor
    max_depth: Tensor
    max_nodes: Tensor
    rates: Tensor


class Trees(NamedTuple):
    """Nodes of R trees, int64 [R, N], likeliest first; the root is not among them.

    Attributes:
        tokens: the token of each node, 0 where there is none.
        parents: the number of each node's parent, the root being 0 and the first node 1; -1 where
            there is no node.
        bins: bins of the probabilities of a node given its parent.
        probs: float64 [R, N], the probabilities of the paths to them.
    """

    tokens: Tensor
    parents: Tensor
    bins: Tensor
    probs: Tensor

    @classmethod
    def empty(cls, count: int, nodes: int, device: torch.device) -> Trees:
        """Return `count` trees with room for nodes."""
        tokens, parents, bins = torch.zeros((3, count, nodes), dtype=torch.int64, device=device)
        probs = torch.zeros((count, nodes), dtype=torch.float64, device=device)
        return cls(tokens, parents, bins, probs)


def learn(table: TableTensors, seen: Predictions) -> None:
    """Store predictions behind both tokens and behind the last one, in order."""
    ways = torch.arange(WAYS, device=table.keys.device)
    for i in range(len(seen.last)):
        for key in (_pair_key(seen.before[i], seen.last[i]), _pair_key(NONE, seen.last[i])):
            first = torch.where(seen.is_valid[i], _set_of(table, key), table.entries)
            entries = first + ways
            is_held = table.keys[entries] == key
            at = torch.where(is_held, ways, WAYS - 1).amin()  # the last one goes for a new entry
            moved = torch.where((ways > 0) & (ways <= at), entries - 1, entries)
            for column, new in (
                (table.keys, key),
                (table.tokens, seen.tokens[i]),
                (table.logs, seen.logs[i]),
            ):
                own = column[moved]
                own[0] = new
                column[entries] = own


def grow(tables: Sequence[TableTensors], roots: TreeRoots, nodes: int, is_chain: bool) -> Trees:
    """Grow trees of the likeliest nodes, at most `nodes` each; chains have one node per level.

    TableTensors of two tokens are preferred to those of one, and those of earlier tables to later
    ones. Of equally likely nodes the one that became possible first is taken.
    """
    count, device = len(roots.root), roots.root.device
    grown = Trees.empty(count, nodes, device)
    grown.parents.fill_(NONE)
    # nodes with the root, and what could follow them
    tokens = torch.cat((roots.root[:, None], grown.tokens), 1)
    parents = torch.zeros_like(tokens)
    depths, probs = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.float64)
    candidates = torch.zeros((count, nodes * NUM_SUCCESSORS), dtype=torch.float64, device=device)
    successors = torch.zeros((count, nodes * NUM_SUCCESSORS), dtype=torch.int64, device=device)
    bins = torch.zeros_like(successors)
    order = torch.arange(nodes * NUM_SUCCESSORS, device=device)
    goes_on = torch.ones(count, dtype=torch.bool, device=device)
    num_bins = roots.rates.shape[1]
    for node in range(nodes):
        parent = parents[:, node : node + 1]
        before = roots.before if node == 0 else tokens.gather(1, parent)[:, 0]
        found, logs = _find(tables, before, tokens[:, node])
        values = _probabilities(roots, found, logs, depths[:, node])
        values = torch.where((depths[:, node] < roots.max_depth)[:, None], values, 0.0)
        own_bins = (values * num_bins).long().clamp(max=num_bins - 1)
        rates = roots.rates.gather(1, own_bins) / ((own_bins + 0.5) / num_bins)
        span = slice(node * NUM_SUCCESSORS, (node + 1) * NUM_SUCCESSORS)
        if is_chain:
            candidates.zero_()
        candidates[:, span] = probs[:, node : node + 1] * (values * rates).clamp(max=1.0)
        successors[:, span], bins[:, span] = found, own_bins
        best = candidates.amax(1, keepdim=True)
        chosen = torch.where(candidates == best, order, nodes * NUM_SUCCESSORS).amin(
            1, keepdim=True
        )
        goes_on = goes_on & (best[:, 0] > 0) & (node < roots.max_nodes)
        parents[:, node + 1] = chosen[:, 0] // NUM_SUCCESSORS
        depths[:, node + 1] = depths.gather(1, chosen // NUM_SUCCESSORS)[:, 0] + 1
        tokens[:, node + 1] = torch.where(goes_on, successors.gather(1, chosen)[:, 0], 0)
        # nothing follows a node that does not exist
        probs[:, node + 1] = torch.where(goes_on, best[:, 0], 0.0)
        grown.parents[:, node] = torch.where(goes_on, chosen[:, 0] // NUM_SUCCESSORS, NONE)
        grown.bins[:, node] = bins.gather(1, chosen)[:, 0]
        candidates.scatter_(1, chosen, 0.0)
    grown.tokens.copy_(tokens[:, 1:])
    grown.probs.copy_(probs[:, 1:])
    return grown


def _find(tables: Sequence[TableTensors], before: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return successors [R, NUM_SUCCESSORS] of the last two tokens [R] or else of one, and their
    logarithms (-inf behind the last)."""
    tokens = torch.full((len(last), NUM_SUCCESSORS), NONE, dtype=torch.int64, device=last.device)
    logs = torch.full((len(last), NUM_SUCCESSORS), -torch.inf, device=last.device)
    is_open = torch.ones_like(last, dtype=torch.bool)
    ways = torch.arange(WAYS, device=last.device)
    for key in (_pair_key(before, last), _pair_key(NONE, last)):
        for table in tables:
            entries = _set_of(table, key)[:, None] + ways
            is_held = table.keys[entries] == key[:, None]
            entry = torch.where(is_held, entries, 0).amax(1)
            is_new = (is_open & is_held.any(1))[:, None]
            tokens = torch.where(is_new, table.tokens[entry].long(), tokens)
            logs = torch.where(is_new, table.logs[entry], logs)
            is_open = is_open & ~is_new[:, 0]
    return tokens, torch.where(tokens >= 0, logs, -torch.inf)


def _probabilities(roots: TreeRoots, tokens: Tensor, logs: Tensor, depths: Tensor) -> Tensor:
    """Return the probabilities of successors [R, NUM_SUCCESSORS] of nodes at depths [R]."""
    keys = rng.substreams(roots.noise, roots.position + 1 + depths)
    is_drawn = (roots.temperature > 0)[:, None]
    temperature = torch.where(is_drawn[:, 0], roots.temperature, 1.0)[:, None]
    scores = logs.double() / temperature + rng.gumbel(keys[:, None], tokens)
    weights = torch.exp(scores - scores.amax(1, keepdim=True))  # NaN where there are none
    drawn = torch.nan_to_num(weights / weights.sum(1, keepdim=True))
    return torch.where(is_drawn, drawn, torch.exp(logs.double()))


def _pair_key(before: Tensor | int, token: Tensor) -> Tensor:
    """Return the key of two tokens, or of one alone with NONE before it."""
    return (before + 2) * (1 << 32) | token


def _set_of(table: TableTensors, key: Tensor) -> Tensor:
    """Return the index of the first entry of a key's set."""
    return (rng.mix_tensor(key) & (table.entries - 1)) // WAYS * WAYS
