"""What can be seen of a step besides its tokens: log-probabilities, and the whole round for whoever
watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun import rng
from forerun.engine.request import Request
from forerun.types import Draft, Round, States, TokenLogprobs, Verdict
from forerun.verify import Noise

SCORED = 16  # rows of logits that are scored at once


@dataclass(frozen=True, slots=True)
class Rows:
    """A request's rows of a pass's logits [M, V]: few look at them, and to take them is an
    operation of torch's."""

    logits: Tensor
    first: int
    count: int

    @property
    def taken(self) -> Tensor:
        """[N, V]"""
        return self.logits[self.first : self.first + self.count]


def quick(states: Tensor) -> States:
    """The states of a pass [T, H] as numpy has them, where it can: behind a pass an operation of
    torch's takes ten times as long as one of numpy's, and every request takes its rows."""
    return states.numpy() if states.is_cpu and states.dtype != torch.bfloat16 else states


def kept(states: States, first: int, path: Sequence[int]) -> States:
    """Of the states of a pass [T, H], the rows of `path` (increasing, not none), counted from
    `first` on. They keep no others alive."""
    if len(path) == 1 and not isinstance(states, Tensor):
        at = first + path[0]
        return states[at : at + 1].copy()
    return states[[first + i for i in path]]


def drafter_of(request: Request, draft: Draft) -> str:
    """The proposer whose draft was verified, by the name it is judged by; who was asked last, where
    none was."""
    names, source = (
        [offer.name for offer in request.offered] or [request.draft],
        draft.sources[min(1, len(draft) - 1)],
    )
    return source if source in names else names[-1]


def round_of(
    request: Request,
    draft: Draft,
    verdict: Verdict,
    logits: Tensor,
    rate: float,
    seconds: tuple[float, float],
) -> Round:
    """What there is to see of a step before it is committed. logits [N, V]; `seconds` of drafting
    and the rest"""
    laws, noise = logits.float().softmax(-1), Noise(request.seed, len(request.tokens) - 1)
    depths, last = draft.depths(), verdict.path[-1]
    drawn = [(draft.parents[i], token) for i, token in enumerate(draft.tokens) if i] + [
        (last, verdict.tokens[-1])
    ]
    noises = [rng.gumbel_scalar(noise.target(depths[node]), token) for node, token in drawn]
    if request.params.greedy or not request.rule.coupled:
        noises = [0.0] * len(drawn)
    chances = [float(laws[node, token]) for node, token in drawn]
    drafted = [
        float(draft.probs[parent, token]) if draft.probs is not None and drawn else None
        for token, parent, drawn in list(
            zip(draft.tokens, draft.parents, draft.proposals, strict=True)
        )[1:]
    ]
    return Round(
        request.stats.steps,
        draft,
        verdict,
        chances,
        noises,
        request.allowed,
        rate,
        *seconds,
        drafted,
    )


def prompt_logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """`logprobs_of` for tokens of a prompt, with their ranks; a few rows at a time, so that it
    takes little memory."""
    entries: list[TokenLogprobs] = []
    for at in range(0, len(tokens), SCORED):
        rows, part = logits[at : at + SCORED], tokens[at : at + SCORED]
        chosen = rows.gather(1, torch.tensor(part, device=rows.device)[:, None])
        ranks = ((rows > chosen).sum(1) + 1).tolist()
        entries += map(_with_rank, logprobs_of(rows, part, top), ranks)
    return entries


def _with_rank(entry: TokenLogprobs, rank: int) -> TokenLogprobs:
    entry.rank = rank
    return entry


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Raw log-probabilities of the chosen tokens and the `top` likeliest. logits [K, V], K
    tokens"""
    laws = logits.log_softmax(-1)
    values, ids = laws.topk(min(top, laws.shape[-1]))
    return [
        TokenLogprobs(
            token,
            float(laws[i, token]),
            dict(zip(ids[i].tolist(), values[i].tolist(), strict=True)),
        )
        for i, token in enumerate(tokens)
    ]
