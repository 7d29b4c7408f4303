"""How much sooner tokens come with a drafter that was written: measured as `forerun bench decode`
does.

Plain decoding, what `--draft auto` takes already, the drafter behind `suffix` and alone, at depth
auto and at every fixed depth, run in turn, on the same held-out prompts, one at a time, greedily,
under rule match, on the target's weights that are loaded already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.cli.progress import Tell, nothing
from forerun.draft.proposer import view_of
from forerun.draft.registry import automatic, make_proposers
from forerun.draft_loading import Loader
from forerun.draft_spec import draft_name, read_draft
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.energy import Meter
from forerun.measure.rounds import Rounds, Setting, always
from forerun.measure.run import PLAIN, Arm, Work
from forerun.measure.where import machine
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.train.capture import Target
from forerun.train.recipes import Recipe
from forerun.train.settings import Training, depths_up_to
from forerun.train.tasks import HELD_OUT, Prompts

MOST_PROMPTS = 4
AUTO = "auto"  # the draft of what is taken where nobody names one
PLACE = "DIRECTORY"  # stands for where the drafter is
COPIES = "suffix"  # what drafts before a drafter with weights: it costs next to nothing
# to decode, beside fixed depths: plain, what auto takes, the drafter behind copies, and alone
OTHER_WAYS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Decoding one way.

    Attributes:
        depth: auto or fixed; 0 is plain decoding.
        tokens_per_second: without the reading of prompts, see `measure.rounds`.
        times_plain: that over plain decoding's.
        interval: 95 % bootstrap interval of times_plain; None of plain decoding and of a single
            round.
        accepted_length: tokens a target pass.
        same: whether every text was plain decoding's.
        draft: "auto" for what `--draft auto` takes already, an option with `PLACE` for the drafter
            together with another; "" for the drafter alone, and plain decoding.
    """

    depth: int | str
    tokens_per_second: float
    times_plain: float
    interval: tuple[float, float] | None
    accepted_length: float
    same: bool
    draft: str = ""

    @property
    def label(self) -> str:
        """Which way to decode this is, in words."""
        depth = f"depth {self.depth}" if self.depth else "plain decoding"
        return f"{self.draft}, {depth}" if self.draft else depth

    @property
    def ratio(self) -> str:
        """Times plain with its interval, in words."""
        span = f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})" if self.interval else ""
        return f"{self.times_plain:.2f}{span}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A drafter beside what `--draft auto` takes already, from the same rounds, both at depth auto.

    Attributes:
        draft: the quicker of the ways to use the drafter, as an option with `PLACE`.
        default: what auto takes, as the engine calls it.
        times_default: its tokens a second over those of the default.
        interval: 95 % bootstrap interval of that; None of a single round.
        times_plain: its speed over plain decoding.
    """

    draft: str
    default: str
    times_default: float
    interval: tuple[float, float] | None
    times_plain: float

    @property
    def better(self) -> bool:
        """Whether the drafter is quicker than the default and than plain decoding, beyond what
        rounds differ by."""
        low = self.interval[0] if self.interval else self.times_default
        return low > 1 and self.times_plain > 1

    @property
    def worse(self) -> bool:
        """Whether it is slower than one of them, beyond what rounds differ by."""
        high = self.interval[1] if self.interval else self.times_default
        return high < 1 or self.times_plain <= 1

    @property
    def ratio(self) -> str:
        """Times the default with its interval, in words."""
        span = f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})" if self.interval else ""
        return f"{self.times_default:.2f}{span}"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speeds of a drafter, medians of rounds.

    Attributes:
        paces: plain decoding, what auto takes, the drafter behind copies, the drafter alone at
            depth auto, and then at every fixed depth.
        prompts, tokens, rounds: how many prompts, tokens of each output, and rounds.
        machine: where.
        task: of the prompts: held-out, or tasks.
        comparison: with what auto takes; None where that is this drafter.
    """

    paces: tuple[Pace, ...]
    prompts: int
    tokens: int
    rounds: int
    machine: dict[str, Any]
    comparison: Comparison | None = None
    task: str = HELD_OUT

    @property
    def best_depth(self) -> int | str:
        """The fixed depth that was the quickest."""
        fixed = [pace for pace in self.paces if not pace.draft and pace.depth not in (0, "auto")]
        return max(fixed, key=lambda pace: pace.tokens_per_second).depth if fixed else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = asdict(self) | {"best_depth": self.best_depth}
        if self.comparison is not None:
            values["comparison"]["better"] = self.comparison.better
        return values


@dataclass(frozen=True, slots=True)
class _Way(Arm):
    """One way to decode, with a proposer that has a name of its own: two drafters of one kind are
    compared."""

    called: str = ""
    label: str = ""  # the `draft` of its pace

    @property
    def name(self) -> str:
        return self.called


def measure_speed(
    target: Target, recipe: Recipe, directory: Path, prompts: Prompts, settings: Training, tell: Tell = nothing,
    fits: Callable[[float, int], bool] = always,
) -> Speed | None:  # fmt: skip
    """Time what is in `directory` beside plain decoding and what auto takes, in
    `settings.speed_rounds` rounds, at least one, or in as many as `fits` has time for (see
    `Rounds.play`); None if that is none.

    The shortest prompts are taken, which leave the longest outputs; these are all of one length.
    """
    openings = sorted(prompts.openings, key=lambda opening: len(opening.tokens))[:MOST_PROMPTS]
    tokens = min(opening.limit - len(opening.tokens) for opening in openings)
    default = _default(target)
    runner = target.runner(1, max(opening.limit for opening in openings))
    llm, own = _with_drafters(target, recipe, directory, default, runner)
    place = default.partition(":")[2]
    others = not place or Path(place).resolve() != directory.resolve()
    ways = _ways(f"{recipe.draft}:{directory}", own, default, depths_up_to(settings.depth), others)
    params = SamplingParams.pure(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    setting = Setting(f"speed, {prompts.task}", 0.0, 1)
    arms = [PLAIN, *ways]
    rounds = Rounds(llm, setting, arms, params, settings.speed_rounds, Meter())
    rounds.play([[Work(list(opening.tokens))] for opening in openings], tell, fits=fits)
    if not rounds.done:
        return None
    results = [rounds.result("none", arm, None) for arm in arms]
    labels = ["", *(way.label for way in ways)]
    paces = tuple(
        Pace(
            r.depth,
            r.tokens_per_second,
            r.times_plain,
            r.interval,
            r.accepted_length,
            bool(r.same),
            label,
        )
        for r, label in zip(results, labels, strict=True)
    )
    compared = _compared(rounds, ways, default) if others else None
    return Speed(
        paces, len(openings), tokens, rounds.done, machine(settings.threads), compared, prompts.task
    )


def _default(target: Target) -> str:
    """The draft that `auto` takes for this target, as an option."""
    decoder = target.llm.decoder
    instructions = native.instructions() if view_of(decoder).form else ""
    return automatic(AUTO, target.path, instructions, decoder.weight_bits)


def _ways(spec: str, own: str, default: str, depths: Sequence[int], others: bool) -> list[_Way]:
    """What is compared with plain decoding, what auto takes first, where that is not the drafter
    itself (`others`). `own` is what the engine calls the drafter."""
    auto = _Way(default, "auto", called=draft_name(default), label=AUTO)
    label = f"{COPIES}+{spec.partition(':')[0]}:{PLACE}"
    together = _Way(f"{COPIES}+{spec}", "auto", called=f"{COPIES}+{own}", label=label)
    own_depths: list[int | str] = ["auto", *depths]
    alone = [_Way(spec, depth, called=own) for depth in own_depths]
    return [auto, *([together] if others else []), *alone]


def _compared(rounds: Rounds, ways: Sequence[_Way], default: str) -> Comparison:
    """The drafter, as it does best at depth auto, beside what auto takes."""
    auto, *own = [way for way in ways if way.depth == "auto"]
    best = max(own, key=rounds.speed)
    ratio, interval = rounds.ratio(best, auto)
    draft = best.label or f"{best.draft.partition(':')[0]}:{PLACE}"
    return Comparison(draft, draft_name(default), ratio, interval, rounds.ratio(best, PLAIN)[0])


def _with_drafters(
    target: Target, recipe: Recipe, directory: Path, default: str, runner: Runner
) -> tuple[LLM, str]:
    """The target as it is loaded, with an engine of its own that drafts with what is in the
    directory, and with what auto takes; and what that engine calls the former."""
    llm, name = copy.copy(target.llm), f"{recipe.draft}#2"
    load = Loader(llm.config, target.path, target.tokenizer, runner, target.device)
    view, options = view_of(runner.decoder), llm.config
    proposers = make_proposers(
        read_draft(default), load, view, runner.cache, options.width, options.draft_threshold
    )
    proposers[name] = recipe.proposer(directory, target, runner)
    proposers[name].name = name
    llm.engine = Engine(runner, proposers, tokenizer=target.tokenizer)
    return llm, name
