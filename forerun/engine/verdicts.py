"""Verdicts: each request's rule on its own draft, from the logits of one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.engine.request import Request
from forerun.sampling.filters import draw_tokens, filter_logits
from forerun.types import Draft, Verdict
from forerun.verify import Noise, Rule, streams


def verdicts_of(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    """One verdict a request. logits [M, V]: the nodes of all drafts one after the other."""
    rules = {r.rule.name: r.rule for r in requests}
    if len(rules) == 1:
        return _by(requests[0].rule, requests, drafts, logits)
    rows = torch.split(logits, [len(draft) for draft in drafts])
    verdicts: dict[int, Verdict] = {}
    for rule in rules.values():
        mine = [i for i, r in enumerate(requests) if r.rule is rule]
        part = torch.cat([rows[i] for i in mine])
        verdicts |= zip(mine, _by(rule, [requests[i] for i in mine], [drafts[i] for i in mine], part), strict=True)
    return [verdicts[i] for i in range(len(requests))]


def _by(rule: Rule, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    noises = [Noise(r.seed, len(r.tokens) - 1) for r in requests]
    states = [r.state for r in requests]
    with torch.inference_mode():
        if rule.follow:
            return rule.follow(drafts, draw_tokens(logits, drafts, states, streams(drafts, noises)))
        return rule.verify(drafts, filter_logits(logits, drafts, states), noises)
