"""Verdicts: each request's rule on its own draft, from the logits of one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.engine.blame import together
from forerun.engine.request import Request
from forerun.sampling.filters import draw_tokens, filter_logits
from forerun.types import Draft, Verdict
from forerun.verify import Noise, Rule, streams


def verdicts_of(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict | None]:
    """One verdict a request, None for one that failed. logits [M, V]: the nodes of all drafts one after the other."""

    def decide(chosen: Sequence[int]) -> list[Verdict]:
        """Of these requests, which share a rule."""
        part = logits
        if len(chosen) < len(requests):
            rows = torch.split(logits, [len(draft) for draft in drafts])
            part = torch.cat([rows[i] for i in chosen])
        return _by(requests[chosen[0]].rule, [requests[i] for i in chosen], [drafts[i] for i in chosen], part)

    verdicts: dict[int, Verdict | None] = {}
    for name in {r.rule.name for r in requests}:
        mine = [i for i, r in enumerate(requests) if r.rule.name == name]
        verdicts |= zip(mine, together(decide, mine, requests), strict=True)
    return [verdicts[i] for i in range(len(requests))]


def _by(rule: Rule, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    noises = [Noise(r.seed, len(r.tokens) - 1) for r in requests]
    states = [r.state for r in requests]
    if rule.follow:
        return rule.follow(drafts, draw_tokens(logits, drafts, states, streams(drafts, noises)))
    with torch.inference_mode():
        return rule.verify(drafts, filter_logits(logits, drafts, states), noises)
