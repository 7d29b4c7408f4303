"""Evaluation of a drafter on held-out texts: predicted from its module and measured.

Both use the same texts, so that they differ only by the random draws of the verification and by
faults: another alignment, another rounding, a drafter that was not written as it was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forerun.cli.progress import Tell, nothing
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import ConfigError, RequestError
from forerun.measure.tables import listed
from forerun.measure.workloads import Task, builtin, of_categories
from forerun.sampling.params import SamplingParams
from forerun.train.data import Corpus, Example
from forerun.train.losses import DraftSpan, accepted_length
from forerun.train.options import MIN_TOKENS, Training, depths_up_to
from forerun.train.recipes import Recipe
from forerun.train.speed import MAX_PROMPTS, Speed, measure_speed
from forerun.train.stream import seed_of
from forerun.train.target import BATCH_SIZE, Batch, Target, example_of
from forerun.train.time_limit import TimeLimit, TimeLimitReached

ROWS = 4  # texts per forward pass
HELD_OUT_SEEDS = 1 << 32  # first seed number of held-out texts, which training does not use
HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A drafter along held-out texts after `step` steps.

    Attributes:
        perplexity: of the held-out data, or of the target's own texts if there are only prompts;
            over the tokens that the drafter knows.
        overlap: mean of 1 - TV along texts of the target at the temperature of training. For a
            large vocabulary that of the coarser distributions (`losses`), an upper bound.
        accepted_length: expected tokens per target pass under rule token (`losses`).
    """

    step: int
    perplexity: float
    overlap: float
    accepted_length: float


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Accepted length on one task under rule token, counted by the engine.

    Attributes:
        task: a kind of forerun's own tasks, or "held-out".
        accepted_length: measured tokens per target pass.
        expected: the accepted length that the module predicts along the same texts.
        passes: number of counted target passes.
    """

    task: str
    temperature: float
    depth: int
    accepted_length: float
    expected: float
    passes: int


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """Token ids of a prompt, and the maximum length of its text, the prompt included."""

    tokens: tuple[int, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one task; `too_long` were left out."""

    task: str
    prompts: tuple[EvaluationPrompt, ...]
    too_long: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """The conditions of one result."""

    prompts: PromptSet
    temperature: float
    depth: int


def held_out_prompts(held_out: Corpus, settings: Training) -> PromptSet:
    """Return prompts of held-out documents. Raises RequestError if there is none."""
    if not held_out.prompts:
        raise RequestError(
            f"no held-out text is longer than prompt_tokens={settings.prompt_tokens}, so that it"
            " could be continued: lower it, give longer texts, or hold out more of them"
        )
    tokens = held_out.prompts[: settings.evaluate_rows]
    prompts = tuple(EvaluationPrompt(prompt, settings.tokens) for prompt in tokens)
    return PromptSet(HELD_OUT, prompts, held_out.too_long)


def select_tasks(names: str) -> list[Task]:
    """Return forerun's own tasks of these kinds, separated by commas; `all`, or `none`. Raises
    ConfigError for unknown kinds."""
    kinds = listed(names)
    if not kinds:
        raise ConfigError(f"tasks={names!r} names none: give kinds by commas, all, or none")
    return [] if kinds == ["none"] else of_categories(builtin(), [] if kinds == ["all"] else kinds)


def max_length(module: nn.Module, target: Target) -> int:
    """Return the length of the longest text that target and drafter can read. Heads read with the
    target; a language model has its own limit."""
    own = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return min(target.context, own) if isinstance(own, int) else target.context


def task_prompts(
    tasks: Sequence[Task], target: Target, longest: int, settings: Training
) -> list[PromptSet]:
    """Return the prompts of each kind of task, formatted as `forerun bench` formats them. Outputs
    are as long as those of the data, as far as a text of `longest` tokens has room."""
    sets = []
    for kind in dict.fromkeys(task.category for task in tasks):
        tokens = [tuple(target.llm.tokens(task.prompt)) for task in tasks if task.category == kind]
        short = [prompt for prompt in tokens if len(prompt) + MIN_TOKENS <= longest]
        output = settings.tokens - settings.prompt_tokens
        prompts = tuple(
            EvaluationPrompt(prompt, min(len(prompt) + output, longest))
            for prompt in short[: settings.evaluate_rows]
        )
        sets.append(PromptSet(kind, prompts, len(tokens) - len(short)))
    return sets


class Evaluator:
    """Held-out texts and tasks, and how drafters perform on them."""

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        held_out: Corpus | None,
        settings: Training,
        tasks: Sequence[PromptSet] = (),
    ) -> None:
        """`held_out` is required for `evaluate`. Raises RequestError if none of its texts can be
        continued."""
        self.target, self.recipe, self.settings = target, recipe, settings
        self.corpus = held_out
        self.held_out = None if held_out is None else held_out_prompts(held_out, settings)
        self.sets = [*([self.held_out] if self.held_out else []), *tasks]
        self._batches: tuple[list[Batch], list[Batch]] | None = None

    @property
    def cases(self) -> list[Case]:
        """All cases to measure, in the order of the report. Raises RequestError if every prompt is
        too long."""
        sets = [prompts for prompts in self.sets if prompts.prompts]
        if not sets:
            raise RequestError(
                "no prompt is left to measure with, all are too long: give others by --data or"
                " --tasks"
            )
        temperatures = (0.0, self.settings.temperature)
        grid = product(sets, temperatures, depths_up_to(self.settings.depth))
        return [Case(*conditions) for conditions in grid]

    @cached_property
    def texts(self) -> list[Example]:
        """The target's continuations of the held-out prompts, written once."""
        assert self.held_out is not None
        prompts = [prompt.tokens for prompt in self.held_out.prompts]
        seeds = [seed_of(self.settings.seed, HELD_OUT_SEEDS + i) for i in range(len(prompts))]
        requests = self.target.continue_prompts(prompts, seeds, self.settings.temperature)
        return [example_of(request) for request in requests]

    @torch.no_grad()
    def evaluate(self, module: nn.Module, step: int) -> Evaluation:
        """Predict acceptance along the held-out texts."""
        assert self.corpus is not None
        module.eval()
        texts, vocab = self.texts, self.recipe.vocab(module, self.target)
        if self._batches is None:  # the target's outputs are the same at every evaluation
            data = self.corpus.examples[: self.settings.evaluate_rows] or texts
            written = self._read(texts, self.settings.temperature, vocab)
            self._batches = self._read(data, 1.0, vocab), written
        data_batches, written_batches = self._batches
        log_probs = torch.cat(
            [
                self.recipe.forecast(module, batch, 1).token_log_probs[batch.mask].double()
                for batch in data_batches
            ]
        )
        forecasts = [
            self.recipe.forecast(module, batch, self.settings.depth) for batch in written_batches
        ]
        overlap = _join([forecast.overlap[..., 0] for forecast in forecasts])
        acceptance = _join([forecast.acceptance for forecast in forecasts])
        mask = _join([batch.mask for batch in written_batches])
        spans = [
            DraftSpan(text.prompt_length, len(text.tokens) - 1, self.settings.tokens - 1)
            for text in texts
        ]
        return Evaluation(
            step,
            perplexity=float(log_probs[log_probs > -torch.inf].mean().neg().exp()),
            overlap=float(overlap[mask].double().mean()),
            accepted_length=accepted_length(acceptance, spans),
        )

    def engine(self, directory: Path) -> Engine:
        """Return an engine on the target's weights that drafts with what is in `directory`, as
        --draft does."""
        limits = [prompt.limit for prompts in self.sets for prompt in prompts.prompts]
        runner = self.target.runner(BATCH_SIZE, max(limits))
        proposer = self.recipe.proposer(directory, self.target, runner)
        proposers = {self.recipe.draft: proposer}
        return Engine(runner, proposers, rule="token", tokenizer=self.target.tokenizer)

    @torch.no_grad()
    def measure(
        self, engine: Engine, module: nn.Module, case: Case, limit: TimeLimit
    ) -> TaskResult:
        """Measure one case; `module` is what the engine should draft with. Raises
        TimeLimitReached."""
        module.eval()
        requests = self._run(engine, case, limit)
        texts = [example_of(request) for request in requests]
        vocab = self.recipe.vocab(module, self.target)
        batches = self._read(texts, case.temperature, vocab, limit)
        acceptance = [self.recipe.forecast(module, b, case.depth).acceptance for b in batches]
        spans = [
            DraftSpan(
                len(prompt.tokens) + _prefill_tokens(request) - 1,
                len(request.tokens) - 1,
                prompt.limit - 1,
            )
            for prompt, request in zip(case.prompts.prompts, requests, strict=True)
        ]
        passes = [emitted for request in requests for emitted in _pass_lengths(request)]
        return TaskResult(
            case.prompts.task,
            case.temperature,
            case.depth,
            accepted_length=sum(passes) / max(len(passes), 1),
            expected=accepted_length(_join(acceptance), spans),
            passes=len(passes),
        )

    def _read(
        self,
        texts: Sequence[Example],
        temperature: float,
        vocab: int,
        limit: TimeLimit | None = None,
    ) -> list[Batch]:
        batches = []
        for at in range(0, len(texts), ROWS):
            if limit:
                limit.check()
            batches.append(self.target.batch(texts[at : at + ROWS], temperature, vocab))
        return batches

    def _run(self, engine: Engine, case: Case, limit: TimeLimit) -> list[Request]:
        """Continue the prompts of a case with drafts."""
        requests = []
        for i, prompt in enumerate(case.prompts.prompts):
            params = SamplingParams(
                temperature=case.temperature,
                max_tokens=prompt.limit - len(prompt.tokens),
                # independent of the run's seed, so that runs can be compared
                seed=seed_of(case.depth, HELD_OUT_SEEDS + i),
            )
            tokens, draft = list(prompt.tokens), self.recipe.draft
            requests.append(engine.add(tokens, params, draft=draft, depth=case.depth))
        while engine.busy:
            limit.check()
            engine.step_or_raise()
        return requests


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Texts of several batches in one, padded with zeros. [B, N, ...] each -> [B of all, N, ...]"""
    return pad_sequence([text for part in parts for text in part], batch_first=True)


def _prefill_tokens(request: Request) -> int:
    """Tokens of the pass that ended the prompt, which is not counted. It drafts only if a single
    token was left to read: a short prompt, or one whose beginning the cache still has."""
    return min(request.stats.rounds[0][1] + 1, request.produced)


def _pass_lengths(request: Request) -> list[int]:
    """Tokens that each pass after the prompt emitted."""
    lengths, position = [], _prefill_tokens(request)
    for _, accepted in request.stats.rounds[1:]:
        # the end of the text may lie within a draft
        lengths.append(min(accepted + 1, request.produced - position))
        position += lengths[-1]
    return lengths


@dataclass(frozen=True, slots=True)
class Measurements:
    """Everything that was measured of a drafter.

    Attributes:
        measured: by task, temperature and depth; held-out texts first.
        left_out: {task: number of prompts that were too long}.
        speed: on held-out texts, or on tasks if there are none; None if it was not measured.
        not_measured: what the time limit left out, in words.
    """

    measured: Sequence[TaskResult]
    left_out: dict[str, int]
    speed: Speed | None
    not_measured: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        values = asdict(self)
        if self.speed is not None and self.speed.comparison is not None:
            values["speed"]["comparison"]["better"] = self.speed.comparison.is_better
        return values


def measure_drafter(
    evaluator: Evaluator,
    module: nn.Module,
    directory: Path,
    limit: TimeLimit,
    tell: Tell = nothing,
) -> Measurements:
    """Measure the drafter in `directory` as far as the time limit allows.

    The most important measurements come first: held-out texts at the chosen depth, the speed, all
    tasks at that depth, other depths. `module` is the module that the directory should contain.
    """
    settings, cases = evaluator.settings, evaluator.cases
    engine = evaluator.engine(directory)
    found: dict[Case, TaskResult] = {}

    def measure(selected: Sequence[Case]) -> None:
        for case in selected:
            what = f"{case.prompts.task}, depth {case.depth} at temperature {case.temperature:g}"
            tell(f"measuring {what}", len(found), len(cases))
            try:
                limit.check()
                found[case] = evaluator.measure(engine, module, case, limit)
            except TimeLimitReached:
                return

    order = sorted(cases, key=lambda case: case.depth != settings.depth)
    first = [case for case in order[:2] if case.prompts is evaluator.held_out]
    measure(first)
    speed = None
    if settings.speed_rounds and limit.has(0):
        half = limit.left / 2  # rounds after the first leave half of the time to the tasks
        speed = measure_speed(
            evaluator.target,
            evaluator.recipe,
            directory,
            *_speed_prompts(evaluator),
            settings,
            tell,
            lambda seconds, done: limit.has(seconds + (half if done else 0.0)),
        )
    measure(order[len(first) :])
    return Measurements(
        [found[case] for case in cases if case in found],
        {prompts.task: prompts.too_long for prompts in evaluator.sets if prompts.too_long},
        speed,
        tuple(_not_measured(len(cases) - len(found), len(cases), settings.speed_rounds, speed)),
    )


def _speed_prompts(evaluator: Evaluator) -> tuple[str, list[tuple[Sequence[int], int]]]:
    """Return the kind and the prompts for the speed: held-out ones, or one of each task."""
    if evaluator.held_out is not None:
        kind, chosen = HELD_OUT, list(evaluator.held_out.prompts)
    else:
        kind = "tasks"
        chosen = [prompts.prompts[0] for prompts in evaluator.sets if prompts.prompts]
        chosen = chosen[:MAX_PROMPTS]
    return kind, [(prompt.tokens, prompt.limit) for prompt in chosen]


def _not_measured(missing: int, cases: int, rounds: int, speed: Speed | None) -> Iterator[str]:
    """Count the accepted lengths and the rounds of speed that the time limit left out."""
    if missing:
        yield f"{missing} of {cases} accepted lengths"
    done = 0 if speed is None else speed.rounds
    if done < rounds:
        yield f"{rounds - done} of {rounds} rounds of speed"
