"""Decoding speed: every draft beside plain decoding of one model, interleaved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.catalog.measurements import Measurement, record
from forerun.cli.progress import Part, Tell, nothing
from forerun.config import RULE_NAMES, Config, parse_depth
from forerun.draft_spec import LOADED, parse_draft
from forerun.engine.request import OFF
from forerun.errors import ConfigError, RequestError, suggest
from forerun.hardware import processor
from forerun.llm import LLM
from forerun.measure.energy import Meter
from forerun.measure.rounds import Batch, Limit, Result, Rounds, Setting
from forerun.measure.run import PLAIN, Arm, Work, machine
from forerun.measure.workloads import Task
from forerun.models.hub import DEFAULT
from forerun.sampling.params import SamplingParams
from forerun.utils import check_integer, check_number


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """Results, and where and how they were measured.

    Attributes:
        kind: decode, sweep or tune.
        tokens: generated for each prompt.
        repeats: the largest number of rounds of a setting.
        energy: how energy was measured, or why not.
    """

    kind: str
    model: str
    tokens: int
    repeats: int
    machine: dict[str, Any]
    energy: str
    results: list[Result]
    limits: list[Limit]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Measurement plan: drafts x depths x rules x temperatures x requests x quantizations.

    Attributes:
        params: sampling parameters of every request.
        repeats: minimum number of rounds.
        batches: number of prompt groups of each category.
        price: price of an hour of this machine.
        settle: seconds for further rounds in each setting while ratios are uncertain.

    Raises:
        ConfigError: a value is out of range or unknown.
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
        dimensions = (self.drafts, self.depths, self.rules, self.temperatures)
        if not all((*dimensions, self.requests, self.quantizations)):
            raise ConfigError(
                "there is nothing to measure: give at least one draft, depth, rule, .."
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
            replace(self.params, temperature=temperature)  # checks it
        if self.params.length_limit < 2:
            raise ConfigError("a single token is prefill only: give at least 2 tokens")
        check_integer("repeats", self.repeats, 1, 10_000)
        check_integer("batches", self.batches, 1, 10_000)
        check_number("seconds", self.settle, 0, 1e6)
        if self.price is not None and not 0 < self.price < 1e6:
            raise ConfigError(f"price={self.price} is out of range: give the price of an hour")

    def engines(self) -> list[tuple[str, str, list[Arm]]]:
        """Return (quantization, draft to load, arms) of each engine.

        There is one engine for each draft with weights, or a single one; drafts without weights are
        measured in the first.
        """
        drafts = [draft for draft in dict.fromkeys(self.drafts) if draft != OFF]
        with_weights = [draft for draft in drafts if ":" in draft or draft == "auto"]
        without_weights = [draft for draft in drafts if draft not in with_weights]
        engines = []
        for quantization in self.quantizations:
            for i, loaded in enumerate(with_weights or [OFF]):
                names = [*(without_weights if i == 0 else []), *([] if loaded == OFF else [loaded])]
                product = itertools.product(names, self.depths, self.rules)
                arms = [Arm(name, parse_depth(depth), rule) for name, depth, rule in product]
                engines.append((quantization, loaded, arms))
        return engines

    def settings(self, tasks: Sequence[Task]) -> Iterator[tuple[Setting, list[Task]]]:
        """Yield every setting with the tasks of its category."""
        for category in dict.fromkeys(task.category for task in tasks):
            own = [task for task in tasks if task.category == category]
            for temperature, requests in itertools.product(self.temperatures, self.requests):
                yield Setting(category, temperature, requests), own


def measure_decoding(
    options: dict[str, Any],
    plan: DecodePlan,
    tasks: Sequence[Task],
    tell: Tell = nothing,
    kind: str = "decode",
) -> DecodeReport:
    """Load each engine in turn and measure its arms in every setting.

    Args:
        options: fields of `Config` except draft, depth, rule and quantization.
        tasks: at least one; a category with fewer tasks than concurrent requests repeats them.
        tell: shows progress.

    Raises:
        ForerunError: an option, model or task is invalid.
    """
    largest = max(plan.requests)
    options = {"max_rows": max(largest, Config().max_rows)} | options
    if options["max_rows"] < largest:
        rows = options["max_rows"]
        raise ConfigError(f"max_rows={rows} cannot run {largest} requests at once: raise it")
    meter = Meter()
    results: list[Result] = []
    limits: dict[tuple[str, int], Limit] = {}
    num_rounds = 0
    engines = plan.engines()
    settings = list(plan.settings(tasks))
    parts = iter(Part(tell, i, len(engines) * len(settings)) for i in itertools.count())
    for quantization, draft, arms in engines:
        tell("loading" + f", {quantization}" * (quantization != "none"))
        llm = LLM(**options, draft=draft, quantization=quantization)
        for setting, own in settings:
            rounds = Rounds(llm, setting, [PLAIN, *arms], plan.params, plan.repeats, meter)
            works = batches(llm, own, setting.requests, plan.params.length_limit)[: plan.batches]
            rounds.play(works, next(parts), plan.settle)
            num_rounds = max(num_rounds, rounds.done)
            results += [rounds.result(quantization, arm, plan.price) for arm in rounds.runs]
            limits.setdefault((quantization, setting.requests), rounds.limit(quantization))
        del llm
    config = Config.of(**options)
    return DecodeReport(
        kind=kind,
        model=config.model or DEFAULT,
        tokens=plan.params.length_limit,
        repeats=num_rounds,
        machine=machine(config.threads),
        energy=meter.method,
        results=results,
        limits=list(limits.values()),
    )


def batches(llm: LLM, tasks: Sequence[Task], requests: int, tokens: int) -> list[Batch]:
    """Tokenize tasks and group them into batches of `requests` that run together.

    Tasks that do not fill a batch are left out, or repeated if there are too few for one. Raises
    RequestError if the context is too short for `tokens` output tokens.
    """
    works = []
    for task in tasks:
        prompt = llm.tokens(task.prompt)
        if len(prompt) + tokens > llm.decoder.context:
            raise RequestError(
                f"task {task.id}: a prompt of {len(prompt)} tokens and {tokens} more exceed this"
                f" model's context of {llm.decoder.context}: ask for fewer"
            )
        references = llm.references(task.prediction, task.documents)
        works.append(Work(prompt, tuple(r.behind(len(prompt)) for r in references)))
    if len(works) < requests:
        works = list(itertools.islice(itertools.cycle(works), requests))
    return [works[i : i + requests] for i in range(0, len(works) - requests + 1, requests)]


def record_results(model: str | None, results: Sequence[Result]) -> None:
    """Store results of drafters with weights in the registry that `forerun drafters` shows.

    Only a single drafter, one request at a time, under rule match, with unchanged output counts.
    """
    for r in results:
        (name, argument), *others = parse_draft(r.draft)
        comparable = r.requests == 1 and r.same is not False and r.rule == "match"
        if name in LOADED and not others and comparable:
            measurement = Measurement(
                model or DEFAULT,
                argument or model or DEFAULT,
                name,
                r.category or "all",
                r.accepted_length,
                r.times_plain,
                depth=str(r.depth),
                temperature=r.temperature,
                machine=processor(),
            )
            record(measurement)
