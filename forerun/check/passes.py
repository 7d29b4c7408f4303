"""The target's passes: whether tokens read together give the logits they give one at a time.

On the native kernels every bit must be equal. Elsewhere the largest difference is what the arithmetic adds, and the
measure of what a near tie is.
"""

from __future__ import annotations

import torch

from forerun.check.findings import Finding
from forerun.check.subject import Subject

CHUNKS = (2, 5, 8, 16)
TREE = [-1, 0, 0, 1, 1, 2, 5, 6]  # the parents of a small tree


def check_passes(subject: Subject, prompt: tuple[int, ...], exact: bool) -> tuple[Finding, float]:
    """The finding, and the largest difference of a logit. `exact`: whether every bit must be equal. prompt [>= 32]"""
    alone = subject.logits(prompt, step=1)
    worst, where = 0.0, ""
    for step in (*CHUNKS, len(prompt)):
        found = _apart(subject.logits(prompt, step=step), alone)
        worst, where = max((worst, where), (found, f"{step} tokens a pass"))
    half = len(prompt) // 2
    prefix, nodes = prompt[:half], prompt[half : half + len(TREE)]
    together = subject.tree_logits(prefix, nodes, TREE)
    for node in range(len(TREE)):
        path: list[int] = []
        at = node
        while at >= 0:
            path.insert(0, nodes[at])
            at = TREE[at]
        found = _apart(together[node], subject.logits([*prefix, *path], step=1)[-1])
        worst, where = max((worst, where), (found, f"node {node} of a tree"))
    details = {"difference": worst, "tokens": len(prompt), "exact": exact}
    what = f"passes over {', '.join(map(str, CHUNKS))} and {len(prompt)} tokens and a tree of {len(TREE)} nodes"
    if worst == 0:
        return Finding("passes", "target", True, f"{what} equal passes over one, bit for bit", details), 0.0
    text = f"{what} differ from passes over one by up to {worst:.2g} in a logit ({where})"
    if not exact:
        text += ": texts can part at ties that close; the native kernels would be exact"
    return Finding("passes", "target", not exact, text, details), worst


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; infinite where one is no number."""
    if torch.equal(one, other):
        return 0.0
    apart = float((one.double() - other.double()).abs().nan_to_num(nan=torch.inf).max())
    return apart or 5e-324  # zeros of different sign
