"""What can be seen of a step besides its tokens: log-probabilities, and the whole round for whoever watches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun import rng
from forerun.engine.request import Request
from forerun.types import Draft, Round, TokenLogprobs, Verdict
from forerun.verify import Noise


def kept(states: Tensor, first: int, path: Sequence[int]) -> Tensor:
    """Of the states of a pass [T, H], the rows of `path` (increasing, not none), counted from `first` on.

    They keep no others alive. Behind a pass an operation of torch takes ten times as long as one of numpy.
    """
    rows = [first + i for i in path]
    if states.device.type != "cpu" or states.dtype == torch.bfloat16:  # numpy has no such numbers
        return states[rows]
    found = states.numpy()
    return states if len(rows) == len(found) else torch.from_numpy(found[rows])


def round_of(
    request: Request, draft: Draft, verdict: Verdict, logits: Tensor, rate: float, seconds: tuple[float, float]
) -> Round:
    """What there is to see of a step before it is committed. logits [N, V]; `seconds` of drafting and the rest"""
    laws, noise = logits.float().softmax(-1), Noise(request.seed, len(request.tokens) - 1)
    depths, last = draft.depths(), verdict.path[-1]
    drawn = [(draft.parents[i], token) for i, token in enumerate(draft.tokens) if i] + [(last, verdict.tokens[-1])]
    noises = [rng.gumbel_scalar(noise.target(depths[node]), token) for node, token in drawn]
    if request.params.greedy or not request.rule.coupled:
        noises = [0.0] * len(drawn)
    chances = [float(laws[node, token]) for node, token in drawn]
    return Round(request.stats.steps, draft, verdict, chances, noises, request.allowed, rate, *seconds)


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Raw log-probabilities of the chosen tokens and the `top` likeliest. logits [K, V], K tokens"""
    laws = logits.log_softmax(-1)
    values, ids = laws.topk(min(top, laws.shape[-1]))
    return [
        TokenLogprobs(token, float(laws[i, token]), dict(zip(ids[i].tolist(), values[i].tolist(), strict=True)))
        for i, token in enumerate(tokens)
    ]
