"""The target's passes: whether tokens read together give the logits they give one at a time.

On the native kernels every bit must be equal. Elsewhere the largest difference is what the
arithmetic adds, and the measure of what a near tie is.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from forerun.check import digits
from forerun.check.findings import Finding
from forerun.check.subject import Subject
from forerun.types import Draft

CHUNKS = (2, 5, 8, 16)
TREE = [-1, 0, 0, 1, 1, 2, 5, 6]  # the parents of a small tree


def check_passes(subject: Subject, prompt: tuple[int, ...], exact: bool) -> tuple[Finding, float]:
    """The finding, and the largest difference of a logit. `exact`: whether every bit must be equal.
    prompt [>= 32]"""
    alone, steps = subject.logits(prompt, step=1), (*CHUNKS, len(prompt))
    found = [
        _apart(f"{step} tokens a pass", subject.logits(prompt, step=step), alone) for step in steps
    ]
    half = len(prompt) // 2
    prefix, nodes = prompt[:half], prompt[half : half + len(TREE)]
    together, tree = subject.tree_logits(prefix, nodes, TREE), Draft(list(nodes), TREE, [], [])
    for node in range(len(TREE)):
        path = [nodes[i] for i in tree.path_to(node)]
        last = subject.logits([*prefix, *path], step=1)[-1:]
        found.append(_apart(f"node {node} of a tree", together[node : node + 1], last))
    worst = max(found, key=lambda difference: difference.size)
    details = {"difference": worst.size, "tokens": len(prompt), "exact": exact}
    what = f"passes over {', '.join(map(str, CHUNKS))} and {len(prompt)} tokens and a tree of {len(TREE)} nodes"
    if worst.size == 0:
        return Finding(
            "passes", "target", True, f"{what} equal passes over one, bit for bit", details
        ), 0.0
    text = f"{what} differ from passes over one by up to {worst.size:.2g} in a score: {worst}"
    if exact:
        text += "; the native kernels allow no difference"
    elif math.isfinite(worst.size):
        text += "; texts can part at ties that close, the native kernels would be exact"
    passed = not exact and math.isfinite(worst.size)
    return Finding("passes", "target", passed, text, details | {"worst": asdict(worst)}), worst.size


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of two passes: of which token's logit, behind which row, and both
    logits."""

    size: float = 0.0
    where: str = ""
    row: int = 0
    token: int = 0
    together: float = 0.0
    alone: float = 0.0

    def __str__(self) -> str:
        together, alone = digits.pair(self.together, self.alone)
        return f"{together} instead of {alone} for token {self.token} behind row {self.row}, {self.where}"


def _apart(where: str, together: torch.Tensor, alone: torch.Tensor) -> Difference:
    """Where they are furthest apart; infinitely where one is no number. [M, V] x 2"""
    if torch.equal(together, alone):
        return Difference()
    one, other = together.double(), alone.double()
    gaps = (one - other).abs().nan_to_num(nan=torch.inf).masked_fill(one == other, 0.0)
    row, token = divmod(int(gaps.argmax()), gaps.shape[1])
    size = float(gaps[row, token]) or 5e-324  # zeros of different sign
    return Difference(size, where, row, token, float(one[row, token]), float(other[row, token]))
