"""Decoding: every way to draft beside plain decoding of the same model, on the same tasks, in every
setting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.catalogue.memory import remember
from forerun.cli.progress import Part, Tell, nothing
from forerun.config import RULE_NAMES, Config, parse_depth
from forerun.draft_spec import LOADED, parse_draft
from forerun.engine.request import OFF
from forerun.errors import ConfigError, RequestError, suggest
from forerun.hardware import processor
from forerun.llm import LLM
from forerun.measure.energy import Meter
from forerun.measure.rounds import Batch, Limit, Result, Rounds, Setting
from forerun.measure.run import PLAIN, Arm, Work
from forerun.measure.where import machine
from forerun.measure.workloads import Task
from forerun.models.hub import DEFAULT
from forerun.sampling.params import SamplingParams
from forerun.utils import check_integer


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What was measured, where and how. `repeats` is the most rounds of a setting; `energy` says
    how joules were counted, or why not."""

    kind: str
    model: str
    tokens: int
    repeats: int
    machine: dict[str, Any]
    energy: str
    results: list[Result]
    limits: list[Limit]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: the product of all of these.

    `batches` is how many groups of prompts of each category are used, `repeats` how often each at
    least; rounds are added for up to `settle` seconds in each setting while ratios are uncertain.
    `price` is that of an hour of this machine.
    """

    params: SamplingParams
    drafts: Sequence[str]
    depths: Sequence[int | str] = ("auto",)
    rules: Sequence[str] = ("match",)
    temperatures: Sequence[float] = (0.0,)
    requests: Sequence[int] = (1,)
    quantizations: Sequence[str] = ("none",)
    repeats: int = 5
    batches: int = 5
    price: float | None = None
    settle: float = 0.0

    def __post_init__(self) -> None:
        every = (
            self.drafts,
            self.depths,
            self.rules,
            self.temperatures,
            self.requests,
            self.quantizations,
        )
        if not all(every):
            raise ConfigError(
                "there is nothing to measure: give at least one draft, depth, rule, temperature, .."
            )
        for draft in self.drafts:
            parse_draft(draft)
        for depth in self.depths:
            parse_depth(depth)
        for rule in self.rules:
            if rule not in RULE_NAMES:
                raise ConfigError(f"there is no rule {rule!r}: {suggest(rule, RULE_NAMES)}")
        for requests in self.requests:
            check_integer("requests", requests, 1, 1024)
        for temperature in self.temperatures:
            replace(self.params, temperature=temperature)  # has its own limits
        if self.params.max_tokens < 2:
            raise ConfigError("one token is no decoding: give at least 2 tokens")
        for name, value in (("repeats", self.repeats), ("batches", self.batches)):
            check_integer(name, value, 1, 10_000)
        if not 0 <= self.settle <= 1e6:
            raise ConfigError(
                f"seconds={self.settle} is out of range: give how long to go on, from 0"
            )
        if self.price is not None and not 0 < self.price < 1e6:
            raise ConfigError(
                f"price={self.price} is out of range: give what an hour of this machine costs"
            )

    def engines(self) -> list[tuple[str, str, list[Arm]]]:
        """(quantization, the draft to load, arms) of each engine: one for every model that drafts,
        and at least one."""
        drafts = [d for d in dict.fromkeys(self.drafts) if d != OFF]
        loads = [d for d in drafts if ":" in d or d == "auto"]
        simple = [d for d in drafts if d not in loads]  # every engine has these
        models = loads or [OFF]
        loaded = []
        for quantization in self.quantizations:
            for i, model in enumerate(models):
                mine = [*(simple if i == 0 else []), *([model] if model != OFF else [])]
                product = itertools.product(mine, self.depths, self.rules)
                loaded.append(
                    (quantization, model, [Arm(d, parse_depth(k), rule) for d, k, rule in product])
                )
        return loaded

    def settings(self, tasks: Sequence[Task]) -> Iterator[tuple[Setting, list[Task]]]:
        """Every setting with the tasks of its category."""
        for category in dict.fromkeys(task.category for task in tasks):
            mine = [task for task in tasks if task.category == category]
            for temperature, requests in itertools.product(self.temperatures, self.requests):
                yield Setting(category, temperature, requests), mine


def measure_decoding(
    options: dict[str, Any],
    plan: Plan,
    tasks: Sequence[Task],
    tell: Tell = nothing,
    kind: str = "decode",
) -> DecodeReport:
    """Load each engine in turn and measure its arms in every setting.

    Args:
        options: fields of `Config` but for draft, depth, rule and quantization.
        tasks: at least one of each category; a category of fewer than run at once repeats its own.

    Raises:
        ForerunError: an option, a model or a task that cannot be.
    """
    most, meter = max(plan.requests), Meter()
    options = {"max_rows": max(most, Config().max_rows)} | options
    if options["max_rows"] < most:
        raise ConfigError(
            f"max_rows={options['max_rows']} cannot run {most} requests at once: raise it"
        )
    results: list[Result] = []
    most_rounds = 0
    limits: dict[tuple[str, int], Limit] = {}
    engines, settings = plan.engines(), list(plan.settings(tasks))
    parts = iter(Part(tell, i, len(engines) * len(settings)) for i in itertools.count())
    for quantization, draft, arms in engines:
        tell("loading" + f", {quantization}" * (quantization != "none"))
        llm = LLM(**options, draft=draft, quantization=quantization)
        for setting, mine in settings:
            rounds = Rounds(llm, setting, [PLAIN, *arms], plan.params, plan.repeats, meter)
            works = batches(llm, mine, setting.requests, plan.params.max_tokens)[: plan.batches]
            rounds.play(works, next(parts), plan.settle)
            most_rounds = max(most_rounds, rounds.done)
            results += [rounds.result(quantization, arm, plan.price) for arm in rounds.runs]
            limits.setdefault((quantization, setting.requests), rounds.limit(quantization))
        del llm
    config = Config.of(**options)
    return DecodeReport(
        kind, config.model or DEFAULT, plan.params.max_tokens, most_rounds, machine(config.threads), meter.method,
        results, list(limits.values()),
    )  # fmt: skip


def batches(llm: LLM, tasks: Sequence[Task], requests: int, tokens: int) -> list[Batch]:
    """The tasks in groups that run at once, as token ids; tasks that fill no group are left out, or
    repeated if there are not enough for one. Raises RequestError if an output would be cut short:
    its tokens are what is counted on."""
    works = []
    for task in tasks:
        prompt = llm.tokens(task.prompt)
        if len(prompt) + tokens > llm.decoder.context:
            raise RequestError(
                f"task {task.id}: a prompt of {len(prompt)} tokens and {tokens} more are over this model's context of"
                f" {llm.decoder.context}: ask for fewer"
            )
        references = llm.references(task.prediction, task.documents)
        works.append(Work(prompt, tuple(reference.behind(len(prompt)) for reference in references)))
    if len(works) < requests:
        works = list(itertools.islice(itertools.cycle(works), requests))
    return [works[i : i + requests] for i in range(0, len(works) - requests + 1, requests)]


def keep(model: str | None, results: Sequence[Result]) -> None:
    """Tell the registry, for `forerun drafters` and whoever chooses, what drafters with weights
    gave by themselves, one request at a time and with unchanged text."""
    for r in results:
        (name, argument), *others = parse_draft(r.draft)
        if (
            name in LOADED
            and not others
            and r.requests == 1
            and r.same is not False
            and r.rule == "match"
        ):
            remember(
                model or DEFAULT, argument, name, r.category or "all", r.accepted_length, r.times_plain,
                depth=str(r.depth), temperature=r.temperature, machine=processor(),
            )  # fmt: skip
