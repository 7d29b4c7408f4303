"""How often a draft says what its target says, along the target's own greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.llm import LLM
from forerun.load import make_runner, pick_device
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams

DEPTHS = (1, 2, 3, 4, 5, 7)
LAWS = 4  # texts whose laws are compared
TAIL, LONGEST_PERIOD = 100, 50  # a text loops if its last tokens repeat with a period up to this


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was measured on greedy texts of the target.

    Attributes:
        agree: share of positions where the draft's likeliest token is the target's.
        overlap: mean of the sum over tokens of min(p, q), the acceptance of rejection sampling at
            temperature 1.
        accepted: {depth: mean tokens of a chain of that depth that would have been accepted}.
        top: mean probability of the target's likeliest token.
        looping: texts of all that end in a loop, which flatters drafters that look text up.
    """

    agree: float
    overlap: float
    accepted: dict[int, float]
    top: float
    looping: int
    texts: int
    positions: int


class Judge:
    """Both models of a pair, loaded. On torch kernels, in float32 on a CPU: much of the work is
    reading whole texts."""

    def __init__(
        self, target: Path, draft: Path, prompts: Sequence[list[int]], tokens: int
    ) -> None:
        """Let the target continue the prompts (all of one length) by `tokens` tokens."""
        device = pick_device("auto")
        self.llm = LLM(
            target,
            draft="off",
            kernels="torch",
            dtype="float32" if device.type == "cpu" else "auto",
            context=len(prompts[0]) + tokens,
            max_rows=len(prompts),
        )
        self.drafter = make_runner(replace(self.llm.config, max_rows=1), draft, device)
        self.first = len(prompts[0]) - 1  # the position whose next token is the first of the output
        params = SamplingParams.pure(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.texts = [
            [*c.prompt_token_ids, *c.token_ids] for c in self.llm.generate(prompts, params)
        ]
        said = torch.tensor(self.texts)[:, self.first + 1 :]
        drafted = torch.stack([self._logits(self.drafter, text).argmax(-1) for text in self.texts])
        self.same = drafted == said  # [texts, tokens] bool: would the draft have said it

    @property
    def agree(self) -> float:
        """The share of positions where the draft's likeliest token is the target's."""
        return _mean(self.same)

    def report(self) -> Agreement:
        """All that there is to say; `overlap` and `top` are of the first few texts, they take a
        pass of the target."""
        overlap, top = [], []
        for text in self.texts[:LAWS]:
            p = self._logits(self.llm.engine.target, text).softmax(-1)
            q = self._logits(self.drafter, text).softmax(-1)
            overlap.append(torch.minimum(p, q).sum(-1))
            top.append(p.amax(-1))
        return Agreement(
            agree=self.agree,
            overlap=_mean(torch.stack(overlap)),
            accepted={k: _accepted(self.same, k) for k in DEPTHS if k <= self.same.shape[1]},
            top=_mean(torch.stack(top)),
            looping=sum(_loops(text) for text in self.texts),
            texts=len(self.texts),
            positions=self.same.numel(),
        )

    def _logits(self, runner: Runner, text: Sequence[int]) -> Tensor:
        """Logits before each token of the output, in one pass. [tokens, V], on the CPU"""
        cache, slot, read = runner.cache, 0, len(text) - 1
        cache.pages.grow(slot, read)
        want = list(range(self.first, read))
        logits = runner.forward(
            [Segment(slot, list(text[:-1]), list(range(-1, read - 1)), want)]
        ).logits.cpu()
        cache.close(slot)
        return logits


def _accepted(same: Tensor, depth: int) -> float:
    """Mean length of the run of agreements from a position on, cut at `depth`. same [texts,
    tokens]"""
    return _mean(same.float().unfold(1, depth, 1).cumprod(-1).sum(-1))


def _loops(text: Sequence[int]) -> bool:
    tail = list(text[-TAIL:])
    return any(tail[n:] == tail[:-n] for n in range(1, min(LONGEST_PERIOD, len(tail) // 2) + 1))


def _mean(values: Tensor) -> float:
    return round(values.double().mean().item(), 4)
