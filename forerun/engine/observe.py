"""Observations of a step besides its tokens: log-probabilities and traced rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun import rng
from forerun.devices import upload
from forerun.engine.request import Request
from forerun.types import Draft, Round, States, TokenLogprobs, Verdict
from forerun.verify import Noise

SCORE_ROWS = 16  # rows of logits that are scored at once, to bound the memory


def as_fast_array(states: States) -> States:
    """Return hidden states [T, H] as a numpy array where that shares memory, since every request
    takes its rows of them."""
    if isinstance(states, Tensor) and states.is_cpu and states.dtype != torch.bfloat16:
        return states.numpy()
    return states


def take_rows(states: States, first: int, path: Sequence[int]) -> States:
    """Return a copy of the rows `first + path` of hidden states [T, H]; `path` ascends."""
    is_straight = path[-1] - path[0] == len(path) - 1
    if is_straight and not isinstance(states, Tensor):
        return states[first + path[0] : first + path[-1] + 1].copy()
    rows = [first + i for i in path]
    if not isinstance(states, Tensor):
        return states[rows]
    return states[upload(rows, torch.int64, states.device)]


def trace_round(
    request: Request,
    draft: Draft,
    verdict: Verdict,
    logits: Tensor,
    *,
    allowed_depth: int,
    acceptance_rate: float,
    seconds: tuple[float, float],
) -> Round:
    """Return the trace of a step for a request, before it is committed.

    logits [N, V]; `seconds` of drafting and of the rest of the step.
    """
    probs = logits.float().softmax(-1)
    noise = Noise(request.seed, len(request.tokens) - 1)
    depths = draft.depths()
    drawn = [(draft.parents[node], draft.tokens[node]) for node in range(1, len(draft))]
    drawn.append((verdict.path[-1], verdict.tokens[-1]))
    if request.params.greedy or not request.rule.coupled:
        noises = [0.0] * len(drawn)
    else:
        noises = [rng.gumbel_scalar(noise.target(depths[node]), token) for node, token in drawn]
    return Round(
        step=request.stats.steps,
        draft=draft,
        verdict=verdict,
        chances=[float(probs[node, token]) for node, token in drawn],
        noises=noises,
        depth=allowed_depth,
        rate=acceptance_rate,
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
        drafted=[_draft_prob(draft, node) for node in range(1, len(draft))],
    )


def _draft_prob(draft: Draft, node: int) -> float | None:
    """Return the probability that the drafter gave a sampled node; None for a deterministic one."""
    if draft.probs is None or not draft.proposals[node]:
        return None
    return float(draft.probs[draft.parents[node], draft.tokens[node]])


def prompt_logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return log-probabilities and ranks of prompt tokens. logits [K, V], K tokens."""
    entries: list[TokenLogprobs] = []
    for start in range(0, len(tokens), SCORE_ROWS):
        rows, part = logits[start : start + SCORE_ROWS], tokens[start : start + SCORE_ROWS]
        chosen = rows.gather(1, torch.tensor(part, device=rows.device)[:, None])
        ranks = ((rows > chosen).sum(1) + 1).tolist()
        for entry, rank in zip(logprobs_of(rows, part, top), ranks, strict=True):
            entry.rank = rank
            entries.append(entry)
    return entries


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return raw log-probabilities of K tokens and of the `top` likeliest. logits [K, V]."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    return [
        TokenLogprobs(
            token,
            float(logprobs[i, token]),
            dict(zip(ids[i].tolist(), values[i].tolist(), strict=True)),
        )
        for i, token in enumerate(tokens)
    ]
