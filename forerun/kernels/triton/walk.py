"""Following the target's own tokens through drafts on the device, by the rule `match`.

Beginning at the root, the walk goes to the child whose token is the one that the target drew at the
node, until there is none. Drafts are chains or trees, one behind the other; of equal siblings the
first is taken. The drawn tokens need not leave the device between the draw and the walk.

Twin: `verify.match.follow`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 1  # a draft is small: one warp walks it, without barriers


@dataclass(frozen=True, slots=True)
class Walked:
    """Accepted paths of R drafts, padded with -1 to N nodes.

    Attributes:
        path: int32 [R, N], the nodes of the path, the root first; a path ascends.
        tokens: int64 [R, N], the target's token after each of them: these are emitted.
        accepted: int32 [R], the number of nodes on the path, and of tokens; 0 for an empty draft,
            and for one at whose root no token was drawn.
    """

    path: Tensor
    tokens: Tensor
    accepted: Tensor


def walk(
    tokens: Tensor, parents: Tensor, drawn: Tensor, first: Tensor, count: Tensor, most: int
) -> Walked:
    """Walk through R drafts.

    Args:
        tokens: int64 [T], the token of each node, the nodes of all drafts one after the other.
        parents: int32 [T], each node's parent within its draft, which precedes it; -1 for a root.
        drawn: int64 [T], the target's own token after each node; a negative one, of logits that are
            not finite, ends the walk before it is emitted.
        first, count: int32 [R], the first node of each draft, and how many it has.
        most: the largest number of nodes that a draft may have.
    """
    drafts, nodes = len(first), triton.next_power_of_2(max(most, 1))
    device = tokens.device
    path = torch.full((drafts, nodes), -1, dtype=torch.int32, device=device)
    emitted = torch.full((drafts, nodes), -1, dtype=torch.int64, device=device)
    accepted = torch.empty((drafts,), dtype=torch.int32, device=device)
    _walk[(drafts,)](
        tokens, parents, drawn, first, count, path, emitted, accepted, N=nodes, num_warps=WARPS
    )
    return Walked(path, emitted, accepted)


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    tokens, parents, drawn, first, count, path, emitted, accepted, N: tl.constexpr
):
    """Walk through one draft."""
    draft = tl.program_id(0)
    start, own = tl.load(first + draft), tl.load(count + draft)
    node = tl.arange(0, N)
    is_node = node < own
    token = tl.load(tokens + start + node, mask=is_node, other=-1)
    parent = tl.load(parents + start + node, mask=is_node, other=-2)
    at, steps = 0, 0
    drawn_here = tl.load(drawn + start, mask=own > 0, other=-1)
    while drawn_here >= 0:
        tl.store(path + draft * N + steps, at)
        tl.store(emitted + draft * N + steps, drawn_here)
        steps += 1
        # A child follows its parent, so the walk ends for any parents.
        is_hit = is_node & (node > at) & (parent == at) & (token == drawn_here)
        child = tl.min(tl.where(is_hit, node, N), 0)
        at = tl.where(child < N, child, at)
        drawn_here = tl.load(drawn + start + at, mask=child < N, other=-1)
    tl.store(accepted + draft, steps)
