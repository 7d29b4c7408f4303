"""The speed of a finished drafter, measured as `forerun bench decode` does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.cli.progress import Tell, nothing
from forerun.draft.kinds import automatic
from forerun.draft.proposer import view_of
from forerun.draft.registry import make_proposers
from forerun.draft_loading import Loader
from forerun.draft_spec import draft_name, read_draft
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.energy import Meter
from forerun.measure.rounds import Rounds, Setting, always
from forerun.measure.run import PLAIN, Arm, Work, machine
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.train.options import Training
from forerun.train.recipes import Recipe
from forerun.train.target import Target

MAX_PROMPTS = 4
PLACEHOLDER = "DIRECTORY"  # stands for the drafter's directory


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """The speed of one way to decode.

    Attributes:
        draft: "off" for plain decoding, "auto" for what --draft auto selects, else a draft option
            with `PLACEHOLDER`.
        tokens_per_second: without the reading of prompts, see `measure.rounds`.
        times_plain: speed relative to plain decoding.
        interval: 95 % bootstrap interval of times_plain; None for plain decoding or a single round.
        accepted_length: tokens per target pass.
        same_text: True if every text is that of plain decoding.
    """

    draft: str
    tokens_per_second: float
    times_plain: float
    interval: tuple[float, float] | None
    accepted_length: float
    same_text: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """A drafter compared with what --draft auto selects, from the same rounds.

    Attributes:
        draft: the faster way to use the drafter, as an option with `PLACEHOLDER`.
        default: what auto selects, as the engine calls it.
        times_default: speed relative to the default.
        interval: its 95 % bootstrap interval; None for a single round.
        times_plain: speed relative to plain decoding.
    """

    draft: str
    default: str
    times_default: float
    interval: tuple[float, float] | None
    times_plain: float

    @property
    def is_better(self) -> bool:
        """True if the drafter is significantly faster than the default, and than plain decoding."""
        low = self.interval[0] if self.interval else self.times_default
        return low > 1 and self.times_plain > 1

    @property
    def is_worse(self) -> bool:
        """True if the drafter is significantly slower than the default or than plain decoding."""
        high = self.interval[1] if self.interval else self.times_default
        return high < 1 or self.times_plain <= 1

    def __str__(self) -> str:
        span = f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})" if self.interval else ""
        return (
            f"{self.times_default:.2f}{span} times the speed of {self.default}, which --draft auto"
            f" selects, and {self.times_plain:.2f} times that of plain decoding"
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a drafter, medians of rounds.

    Attributes:
        results: plain decoding, what auto selects, the drafter behind suffix, the drafter alone;
            all at depth auto.
        comparison: None if auto selects this very drafter.
        prompts, tokens: number of prompts, and of output tokens after each.
        task: "held-out" or "tasks", the origin of the prompts.
    """

    results: tuple[SpeedResult, ...]
    comparison: Comparison | None
    prompts: int
    tokens: int
    rounds: int
    task: str
    machine: dict[str, Any]


def measure_speed(
    target: Target,
    recipe: Recipe,
    directory: Path,
    task: str,
    prompts: Sequence[tuple[Sequence[int], int]],
    settings: Training,
    tell: Tell = nothing,
    fits: Callable[[float, int], bool] = always,
) -> Speed | None:
    """Measure the speed of what is in `directory` beside plain decoding and --draft auto: greedily,
    one request at a time, under rule match.

    Runs `settings.speed_rounds` rounds, or as many as `fits` allows (see `Rounds.play`), and
    returns None if that is none.

    Args:
        prompts: (token ids, maximum length of the text). The shortest are taken, which leave the
            longest outputs; all outputs have the same length.
    """
    chosen = sorted(prompts, key=lambda prompt: len(prompt[0]))[:MAX_PROMPTS]
    num_tokens = min(limit - len(tokens) for tokens, limit in chosen)
    instructions = native.instructions() if view_of(target.llm.decoder).form else ""
    default = automatic("auto", target.path, instructions)  # what --draft auto selects
    runner = target.runner(1, max(limit for _, limit in chosen))
    llm, own = _llm_with_drafters(target, recipe, directory, default, runner)
    path, option = default.partition(":")[2], f"{recipe.draft}:{PLACEHOLDER}"
    auto = Arm("auto", "auto", proposer=draft_name(default))
    arms = [Arm(option, "auto", proposer=own)]
    is_default = bool(path) and Path(path).resolve() == directory.resolve()
    if not is_default:
        arms.insert(0, Arm(f"suffix+{option}", "auto", proposer=f"suffix+{own}"))
    params = SamplingParams.pure(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    setting, order = Setting(f"speed, {task}", 0.0, 1), [PLAIN, auto, *arms]
    rounds = Rounds(llm, setting, order, params, settings.speed_rounds, Meter())
    rounds.play([[Work(list(tokens))] for tokens, _ in chosen], tell, fits=fits)
    if not rounds.done:
        return None
    comparison = None
    if not is_default:
        best = max(arms, key=rounds.speed)
        times_plain = rounds.ratio(best, PLAIN)[0]
        ratio = rounds.ratio(best, auto)
        comparison = Comparison(best.draft, auto.name, *ratio, times_plain)
    results = tuple(_result(rounds, arm) for arm in order)
    where = machine(settings.threads)
    return Speed(results, comparison, len(chosen), num_tokens, rounds.done, task, where)


def _result(rounds: Rounds, arm: Arm) -> SpeedResult:
    found = rounds.result("none", arm, None)
    return SpeedResult(
        arm.draft,
        found.tokens_per_second,
        found.times_plain,
        found.interval,
        found.accepted_length,
        bool(found.same),
    )


def _llm_with_drafters(
    target: Target, recipe: Recipe, directory: Path, default: str, runner: Runner
) -> tuple[LLM, str]:
    """Return the loaded target with a new engine that has both drafters, and the name of the one in
    the directory."""
    llm, name = copy.copy(target.llm), f"{recipe.draft}#2"
    load = Loader(llm.config, target.path, target.tokenizer, runner, target.device)
    options = llm.config
    proposers = make_proposers(
        read_draft(default),
        load,
        view_of(runner.decoder),
        runner,
        options.width,
        options.draft_threshold,
    )
    proposers[name] = recipe.proposer(directory, target, runner)
    proposers[name].name = name
    llm._engine = Engine(runner, proposers, tokenizer=target.tokenizer)
    return llm, name
