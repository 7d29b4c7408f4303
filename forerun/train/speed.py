"""How much sooner tokens come with a drafter that was written: measured as `forerun bench decode` does.

Plain decoding, depth auto and every fixed depth run in turn, on the same held-out prompts, one at a time, greedily,
under rule match, on the target's weights that are loaded already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.measure.energy import Meter
from forerun.measure.rounds import Rounds, Setting, always
from forerun.measure.run import PLAIN, Arm, Work
from forerun.measure.where import machine
from forerun.progress import Tell, nothing
from forerun.sampling.params import SamplingParams
from forerun.train.capture import Target
from forerun.train.recipes import Recipe
from forerun.train.settings import Training, depths_up_to
from forerun.train.tasks import Prompts

MOST_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Decoding one way.

    Attributes:
        depth: auto or fixed; 0 is plain decoding.
        tokens_per_second: without the reading of prompts, see `measure.rounds`.
        times_plain: that over plain decoding's.
        interval: 95 % bootstrap interval of times_plain; None of plain decoding and of a single round.
        accepted_length: tokens a target pass.
        same: whether every text was plain decoding's.
    """

    depth: int | str
    tokens_per_second: float
    times_plain: float
    interval: tuple[float, float] | None
    accepted_length: float
    same: bool

    @property
    def ratio(self) -> str:
        """Times plain with its interval, in words."""
        span = f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})" if self.interval else ""
        return f"{self.times_plain:.2f}{span}"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speeds of a drafter, medians of rounds.

    Attributes:
        paces: plain decoding, then depth auto, then every fixed depth.
        prompts, tokens, rounds: how many prompts, tokens of each output, and rounds.
        machine: where.
    """

    paces: tuple[Pace, ...]
    prompts: int
    tokens: int
    rounds: int
    machine: dict[str, Any]

    @property
    def best_depth(self) -> int | str:
        """The fixed depth that was the quickest."""
        return max(self.paces[2:], key=lambda pace: pace.tokens_per_second).depth

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"best_depth": self.best_depth}


def measure_speed(
    target: Target, recipe: Recipe, directory: Path, prompts: Prompts, settings: Training, tell: Tell = nothing,
    fits: Callable[[float, int], bool] = always,
) -> Speed | None:  # fmt: skip
    """Time what is in `directory` beside plain decoding, in `settings.speed_rounds` rounds, at least one, or in as many
    as `fits` has time for (see `Rounds.play`); None if that is none.

    The shortest prompts are taken, which leave the longest outputs; these are all of one length.
    """
    openings = sorted(prompts.openings, key=lambda opening: len(opening.tokens))[:MOST_PROMPTS]
    tokens = min(opening.limit - len(opening.tokens) for opening in openings)
    spec = f"{recipe.draft}:{directory}"
    depths: list[int | str] = ["auto", *depths_up_to(settings.depth)]
    arms = [PLAIN, *(Arm(spec, depth) for depth in depths)]
    params = SamplingParams.pure(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    setting = Setting(f"speed, {prompts.task}", 0.0, 1)
    llm = _with_drafter(target, recipe, directory, settings)
    rounds = Rounds(llm, setting, arms, params, settings.speed_rounds, Meter())
    rounds.play([[Work(list(opening.tokens))] for opening in openings], tell, fits=fits)
    if not rounds.done:
        return None
    results = [rounds.result("none", arm, None) for arm in arms]
    paces = tuple(
        Pace(r.depth, r.tokens_per_second, r.times_plain, r.interval, r.accepted_length, bool(r.same)) for r in results
    )
    return Speed(paces, len(openings), tokens, rounds.done, machine(settings.threads))


def _with_drafter(target: Target, recipe: Recipe, directory: Path, settings: Training) -> LLM:
    """The target as it is loaded, with an engine of its own that drafts with what is in the directory."""
    llm, runner = copy.copy(target.llm), target.runner(1, settings.tokens)
    proposer = recipe.proposer(directory, target, runner)
    llm.engine = Engine(runner, {recipe.draft: proposer}, tokenizer=target.tokenizer)
    return llm
