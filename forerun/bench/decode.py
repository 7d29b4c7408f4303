"""Decoding: every way to draft beside plain decoding of the same model, in turn, on the same tasks.

A setting is a category of tasks at one temperature and so many requests at once. Within a setting a round runs plain
decoding and every arm once over the same prompts, starting with another of them each time; each round takes the next
prompts. Ratios are made within rounds. What proposers remember of finished requests is dropped before every run. One
round that does not count comes first: it warms up, and lets the depth policy measure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.bench.energy import Energy, Meter, cost_per_million
from forerun.bench.report import Tell, bootstrap_interval, machine, median, nothing
from forerun.bench.run import PLAIN, Arm, Run, Work, first_difference, timed_run
from forerun.bench.tally import tally
from forerun.bench.workloads import Task
from forerun.config import RULE_NAMES, Config, parse_depth
from forerun.draft.registry import parse_draft
from forerun.engine.drafting import OFF
from forerun.errors import ConfigError, RequestError, nearest
from forerun.kernels import native
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams

Batch = list[Work]


@dataclass(frozen=True, slots=True)
class Setting:
    """What arms are compared within."""

    category: str
    temperature: float
    requests: int

    def __str__(self) -> str:
        return f"{self.category}, temperature {self.temperature:g}, {self.requests} at once"


@dataclass(frozen=True, slots=True)
class Result:
    """One arm in one setting over all rounds; figures are medians, counts are sums.

    Attributes:
        quantization: of the target; none keeps its dtype.
        draft, depth, rule: the arm; off is plain decoding.
        category, temperature, requests: the setting.
        tokens_per_second: of decoding, all requests together.
        times_plain: the speed over that of plain decoding in the same round.
        interval: 95 % bootstrap interval of times_plain over the rounds; None of fewer than two.
        accepted_length: tokens a target pass and request.
        drafted: nodes drafted a step and request.
        draft_ms, pass_ms, other_ms: milliseconds a step.
        same: whether every output was plain decoding's, token for token; None where only the law is promised.
        first_difference: the earliest output position where one was not.
        lengths, acceptance, sources, positions: counts, see `tally`.
        joules_per_token: None where this machine's counters do not say.
        cost_per_million: of tokens, at the price of an hour that was given; None without.
    """

    quantization: str
    draft: str
    depth: int | str
    rule: str
    category: str
    temperature: float
    requests: int
    tokens_per_second: float
    times_plain: float
    interval: tuple[float, float] | None
    accepted_length: float
    drafted: float
    draft_ms: float
    pass_ms: float
    other_ms: float
    same: bool | None
    first_difference: int | None
    lengths: list[int]
    acceptance: list[list[int]]
    sources: dict[str, list[int]]
    positions: list[list[int]]
    joules_per_token: float | None
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class Limit:
    """Plain decoding of one target beside what reading its weights once a pass allows.

    Attributes:
        quantization, requests: as in `Result`.
        weight_bytes: read by one pass.
        bandwidth: GB/s at which all threads read, measured between the runs; None where the model is not on the CPU,
            or there are no native kernels to measure with.
        tokens_per_second: bandwidth over weight bytes, times requests.
        share: plain decoding's share of that, within rounds.
    """

    quantization: str
    requests: int
    weight_bytes: int
    bandwidth: float | None
    tokens_per_second: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What was measured, where and how. `energy` says how joules were counted, or why not."""

    kind: str
    model: str
    tokens: int
    repeats: int
    machine: dict[str, Any]
    energy: str
    results: list[Result]
    limits: list[Limit]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: the product of all of these. `price` is that of an hour of this machine."""

    params: SamplingParams
    drafts: Sequence[str]
    depths: Sequence[int | str] = ("auto",)
    rules: Sequence[str] = ("match",)
    temperatures: Sequence[float] = (0.0,)
    requests: Sequence[int] = (1,)
    quantizations: Sequence[str] = ("none",)
    repeats: int = 5
    price: float | None = None

    def __post_init__(self) -> None:
        every = (self.drafts, self.depths, self.rules, self.temperatures, self.requests, self.quantizations)
        if not all(every):
            raise ConfigError("there is nothing to measure: give at least one draft, depth, rule, temperature, ..")
        for draft in self.drafts:
            parse_draft(draft)
        for depth in self.depths:
            parse_depth(depth)
        for rule in self.rules:
            if rule not in RULE_NAMES:
                raise ConfigError(f"there is no rule {rule!r}: {nearest(rule, RULE_NAMES)}")
        for requests in self.requests:
            if not 1 <= requests <= 1024:
                raise ConfigError(f"requests={requests} is out of range: give a whole number from 1 to 1024")
        for temperature in self.temperatures:
            replace(self.params, temperature=temperature)  # has its own limits
        if self.params.max_tokens < 2:
            raise ConfigError("one token is no decoding: give at least 2 tokens")
        if not 1 <= self.repeats <= 10_000:
            raise ConfigError(f"repeats={self.repeats} is out of range: give a whole number from 1 to 10000")
        if self.price is not None and not 0 < self.price < 1e6:
            raise ConfigError(f"price={self.price} is out of range: give what an hour of this machine costs")

    def engines(self) -> list[tuple[str, str, list[Arm]]]:
        """(quantization, the draft to load, arms) of each engine: one for every model that drafts, and at least one."""
        drafts = [d for d in dict.fromkeys(self.drafts) if d != OFF]
        simple = [d for d in drafts if ":" not in d]  # every engine has these
        models = [d for d in drafts if ":" in d] or [OFF]
        loaded = []
        for quantization in self.quantizations:
            for i, model in enumerate(models):
                mine = [*(simple if i == 0 else []), *([model] if model != OFF else [])]
                product = itertools.product(mine, self.depths, self.rules)
                loaded.append((quantization, model, [Arm(d, parse_depth(k), rule) for d, k, rule in product]))
        return loaded

    def settings(self, tasks: Sequence[Task]) -> Iterator[tuple[Setting, list[Task]]]:
        """Every setting with the tasks of its category."""
        for category in dict.fromkeys(task.category for task in tasks):
            mine = [task for task in tasks if task.category == category]
            for temperature, requests in itertools.product(self.temperatures, self.requests):
                yield Setting(category, temperature, requests), mine


def measure_decoding(
    options: dict[str, Any], plan: Plan, tasks: Sequence[Task], tell: Tell = nothing, kind: str = "decode"
) -> DecodeReport:
    """Load each engine in turn and measure its arms in every setting.

    Args:
        options: fields of `Config` but for draft, depth, rule and quantization.
        plan: what to measure.
        tasks: at least one of each category; a category of fewer than run at once repeats its own.
        tell: is given a line about each stage.
        kind: what the report calls itself.

    Raises:
        ForerunError: an option, a model or a task that cannot be.
    """
    most, meter = max(plan.requests), Meter()
    options = {"max_rows": max(most, Config().max_rows)} | options
    if options["max_rows"] < most:
        raise ConfigError(f"max_rows={options['max_rows']} cannot run {most} requests at once: raise it")
    results: list[Result] = []
    limits: dict[tuple[str, int], Limit] = {}
    for quantization, draft, arms in plan.engines():
        tell(f"loading, {quantization}")
        llm = LLM(**options, draft=draft, quantization=None if quantization == "none" else quantization)
        for setting, mine in plan.settings(tasks):
            rounds = Rounds(llm, plan, setting, [PLAIN, *arms], meter)
            rounds.play(batches(llm, mine, setting.requests, plan.params.max_tokens), tell)
            results += [rounds.result(quantization, arm) for arm in rounds.runs]
            limits.setdefault((quantization, setting.requests), rounds.limit(quantization))
        del llm
    config = Config.of(**options)
    return DecodeReport(
        kind, config.model or "bundled", plan.params.max_tokens, plan.repeats, machine(config.threads), meter.method,
        results, list(limits.values()),
    )  # fmt: skip


def batches(llm: LLM, tasks: Sequence[Task], requests: int, tokens: int) -> list[Batch]:
    """The tasks in groups that run at once, as token ids; tasks that fill no group are left out, or repeated if there
    are not enough for one. Raises RequestError if an output would be cut short: its tokens are what is counted on."""
    works = []
    for task in tasks:
        prompt = llm.tokens(task.prompt)
        if len(prompt) + tokens > llm.decoder.context:
            raise RequestError(
                f"task {task.id}: a prompt of {len(prompt)} tokens and {tokens} more are over this model's context of"
                f" {llm.decoder.context}: ask for fewer"
            )
        works.append(Work(prompt, tuple(llm.references(len(prompt), task.prediction, task.documents))))
    if len(works) < requests:
        works = list(itertools.islice(itertools.cycle(works), requests))
    return [works[i : i + requests] for i in range(0, len(works) - requests + 1, requests)]


class Rounds:
    """The runs of every arm in one setting."""

    def __init__(self, llm: LLM, plan: Plan, setting: Setting, arms: Sequence[Arm], meter: Meter) -> None:
        self.llm, self.plan, self.setting, self.meter = llm, plan, setting, meter
        self.runs: dict[Arm, list[Run]] = {arm: [] for arm in arms}
        self.energies: dict[Arm, list[Energy]] = {arm: [] for arm in arms}
        self.bandwidths: list[float] = []

    def play(self, works: Sequence[Batch], tell: Tell) -> None:
        """All rounds; round -1 warms up, with the prompts that are used last."""
        llm, arms = self.llm, list(self.runs)
        params = replace(self.plan.params, temperature=self.setting.temperature)
        has_limit = llm.decoder.device.type == "cpu" and native.library() is not None
        if has_limit:
            native.start(llm.config.threads)  # torch kernels have not
        for i in range(-1, self.plan.repeats):
            tell(f"{self.setting}: " + ("warming up" if i < 0 else f"round {i + 1} of {self.plan.repeats}"))
            measured = []
            for turn in range(len(arms)):
                arm = arms[(turn + i) % len(arms)]
                llm.forget()
                with self.meter.window() as window:
                    run = timed_run(llm.engine, works[i % len(works)], params, arm)
                if i >= 0:
                    self.runs[arm].append(run)
                    self.energies[arm] += [window.energy] if window.energy else []
                    measured += [native.read_bandwidth()] if has_limit else []
            self.bandwidths += [median(measured)] if measured else []

    def result(self, quantization: str, arm: Arm) -> Result:
        """What the runs of one arm come to."""
        runs, plain, setting = self.runs[arm], self.runs[PLAIN], self.setting
        ratios = [run.speed / base.speed for run, base in zip(runs, plain, strict=True)]
        same, apart = self._compared(arm)
        speed = median([run.speed for run in runs])
        joules = [e.per_token(run.tokens) for e, run in zip(self.energies[arm], runs, strict=True)]
        known = [j for j in joules if j is not None]
        return Result(
            quantization, arm.draft, arm.depth, arm.rule, setting.category, setting.temperature, setting.requests,
            tokens_per_second=speed,
            times_plain=median(ratios),
            interval=None if arm == PLAIN else bootstrap_interval(ratios),
            accepted_length=median([run.accepted_length for run in runs]),
            drafted=median([run.drafted for run in runs]),
            draft_ms=median([run.draft_ms for run in runs]),
            pass_ms=median([run.pass_ms for run in runs]),
            other_ms=median([run.other_ms for run in runs]),
            same=same,
            first_difference=apart,
            **tally(stats for run in runs for stats in run.stats),
            joules_per_token=median(known) if known and len(known) == len(joules) else None,
            cost_per_million=cost_per_million(self.plan.price, speed) if self.plan.price else None,
        )  # fmt: skip

    def _compared(self, arm: Arm) -> tuple[bool | None, int | None]:
        """Whether the texts are plain decoding's and, if not, from where on; None where that is not promised."""
        if arm.rule != "match" and (self.setting.temperature or arm.rule == "typical"):
            return None, None
        pairs = zip(self.runs[arm], self.runs[PLAIN], strict=True)
        apart = [
            first_difference(mine, theirs)
            for run, base in pairs
            for mine, theirs in zip(run.outputs, base.outputs, strict=True)
        ]
        differing = [at for at in apart if at is not None]
        return not differing, min(differing, default=None)

    def limit(self, quantization: str) -> Limit:
        """What the bandwidth between the runs allows plain decoding."""
        size, requests = self.llm.decoder.weight_bytes, self.setting.requests
        if not self.bandwidths:
            return Limit(quantization, requests, size, None, None, None)
        limits = [1e9 * bandwidth / size * requests for bandwidth in self.bandwidths]
        share = median([run.speed / limit for run, limit in zip(self.runs[PLAIN], limits, strict=True)])
        return Limit(quantization, requests, size, median(self.bandwidths), median(limits), share)
