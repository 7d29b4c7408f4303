"""Decoding: every draft beside plain decoding of the same model, in turn, on the same prompts.

What is timed. A run puts `requests` prompts in at once. Its window opens when the last of them has its first token,
and closes when the last has ended; its speed is the tokens that came within the window over its length. So reading
prompts is left out, as are tokens that quick requests produced meanwhile, and the end of a run, where requests that
were less lucky with their drafts go on alone, is left in. With one request that is all tokens but the first over the
time since the first. A draft model reads the prompt within the window, unless an earlier run left it in its cache.

A round runs plain decoding and every draft once over the same prompts, starting with another of them each time; each
round takes the next prompts. Ratios are made within rounds. What proposers remember of finished requests is dropped
before every run. One round that does not count comes first: it warms up, and lets the depth policy measure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.bench.report import Tell, bootstrap_interval, median, nothing
from forerun.config import Config, parse_depth
from forerun.draft.registry import parse_draft
from forerun.engine.engine import OFF, Engine
from forerun.errors import ConfigError, RequestError
from forerun.kernels import native
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode: a draft as in `Config.draft`, and a depth. ("off", 0) is plain decoding."""

    draft: str
    depth: int | str

    @property
    def name(self) -> str:
        """What the engine calls the proposer."""
        return OFF if self.draft == OFF else parse_draft(self.draft)[0]


PLAIN = Arm(OFF, 0)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: tokens a second in the window, outputs, and means over its requests.

    `draft_ms` and `pass_ms` are milliseconds a step spent drafting, and in the target's pass with its verification.
    """

    speed: float
    outputs: list[list[int]]
    accepted_length: float
    drafted: float
    draft_ms: float
    pass_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """One arm over all rounds; every figure is a median.

    Attributes:
        quantization: of the target; none keeps its dtype.
        draft, depth: the arm; off is plain decoding.
        tokens_per_second: of decoding, all requests together.
        times_plain: the speed over that of plain decoding in the same round.
        interval: 95 % bootstrap interval of times_plain over the rounds; None of fewer than two.
        accepted_length: tokens a target pass and request.
        drafted: nodes drafted a step.
        draft_ms, pass_ms: milliseconds a step.
        same: whether every output was plain decoding's, token for token.
        first_difference: the earliest output position where one was not.
    """

    quantization: str
    draft: str
    depth: int | str
    tokens_per_second: float
    times_plain: float
    interval: tuple[float, float] | None
    accepted_length: float
    drafted: float
    draft_ms: float
    pass_ms: float
    same: bool
    first_difference: int | None


@dataclass(frozen=True, slots=True)
class Limit:
    """Plain decoding of one target beside what reading its weights once a pass allows.

    Attributes:
        quantization: as in `Result`.
        weight_bytes: read by one pass.
        bandwidth: GB/s at which all threads read, measured between the runs; None where the model is not on the CPU,
            or there are no native kernels to measure with.
        tokens_per_second: bandwidth over weight bytes, times requests.
        share: plain decoding's share of that, within rounds.
    """

    quantization: str
    weight_bytes: int
    bandwidth: float | None
    tokens_per_second: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What was measured, and how."""

    model: str
    requests: int
    tokens: int
    repeats: int
    temperature: float
    rule: str
    results: list[Result]
    limits: list[Limit]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `batches` are the prompts of each round, in turn; `params` what all requests ask for."""

    quantizations: Sequence[str]
    drafts: Sequence[str]
    depths: Sequence[int | str]
    params: SamplingParams
    repeats: int = 5

    def __post_init__(self) -> None:
        if not self.quantizations or not self.drafts or not self.depths:
            raise ConfigError("there is nothing to measure: give at least one draft, depth and quantization")
        for draft in self.drafts:
            parse_draft(draft)
        for depth in self.depths:
            parse_depth(depth)
        if self.params.max_tokens < 2:
            raise ConfigError("one token is no decoding: give at least 2 tokens")
        if not 1 <= self.repeats <= 10_000:
            raise ConfigError(f"repeats={self.repeats} is out of range: give a whole number from 1 to 10000")

    def engines(self) -> list[tuple[str, str, list[Arm]]]:
        """(quantization, the draft to load, arms) of each engine: one for every model that drafts, and at least one."""
        drafts = [d for d in dict.fromkeys(self.drafts) if d != OFF]
        simple = [d for d in drafts if ":" not in d]  # every engine has these
        models = [d for d in drafts if ":" in d] or [OFF]
        loaded = []
        for quantization in self.quantizations:
            for i, model in enumerate(models):
                mine = [*(simple if i == 0 else []), *([model] if model != OFF else [])]
                loaded.append((quantization, model, [Arm(d, parse_depth(k)) for d in mine for k in self.depths]))
        return loaded


def measure_decoding(
    options: dict[str, Any], plan: Plan, batches: Sequence[Prompts], tell: Tell = nothing
) -> DecodeReport:
    """Load each engine in turn and measure its arms.

    Args:
        options: fields of `Config` but for draft, depth and quantization.
        plan: the arms.
        batches: the prompts of one run each, all of the same number; rounds take them in turn.
        tell: is given a line about each stage.

    Raises:
        ForerunError: an option, a model or a prompt that cannot be.
    """
    requests = len(batches[0])
    options = {"max_rows": max(requests, Config().max_rows)} | options
    if options["max_rows"] < requests:
        raise ConfigError(f"max_rows={options['max_rows']} cannot run {requests} requests at once: raise it")
    results: list[Result] = []
    limits: list[Limit] = []
    for quantization, draft, arms in plan.engines():
        tell(f"loading, {quantization}")
        llm = LLM(**options, draft=draft, quantization=None if quantization == "none" else quantization)
        _check_room(llm, plan, batches)
        rounds, bandwidths = _rounds(llm, [PLAIN, *arms], plan, batches, tell)
        results += [_result(quantization, arm, rounds) for arm in rounds]
        limits.append(_limit(quantization, llm, rounds[PLAIN], bandwidths, requests))
        del llm
    config = Config.of(**options)
    return DecodeReport(
        config.model or "bundled", requests, plan.params.max_tokens, plan.repeats, plan.params.temperature, config.rule,
        results, limits,
    )  # fmt: skip


def _check_room(llm: LLM, plan: Plan, batches: Sequence[Prompts]) -> None:
    """Raise RequestError if an output would be cut short: its tokens are what is counted on."""
    longest = max(len(prompt) for batch in batches for prompt in batch)
    if longest + plan.params.max_tokens > llm.decoder.context:
        raise RequestError(
            f"a prompt of {longest} tokens and {plan.params.max_tokens} more are over this model's context of"
            f" {llm.decoder.context}: ask for fewer"
        )


def _rounds(
    llm: LLM, arms: list[Arm], plan: Plan, batches: Sequence[Prompts], tell: Tell
) -> tuple[dict[Arm, list[Run]], list[float]]:
    """The runs of each arm, one a round, and the read bandwidth of each round (none where it means nothing)."""
    runs: dict[Arm, list[Run]] = {arm: [] for arm in arms}
    bandwidths: list[float] = []
    has_limit = llm.decoder.device.type == "cpu" and native.library() is not None
    if has_limit:
        native.start(llm.config.threads)  # torch kernels have not
    for i in range(-1, plan.repeats):  # -1 warms up, with the prompts that are used last
        tell("warming up" if i < 0 else f"round {i + 1} of {plan.repeats}")
        measured = []
        for turn in range(len(arms)):
            arm = arms[(turn + i) % len(arms)]
            llm.forget()
            run = timed_run(llm.engine, batches[i % len(batches)], plan.params, arm)
            if i >= 0:
                runs[arm].append(run)
                measured += [native.read_bandwidth()] if has_limit else []
        bandwidths += [median(measured)] if measured else []
    return runs, bandwidths


def timed_run(engine: Engine, prompts: Prompts, params: SamplingParams, arm: Arm) -> Run:
    """Let the prompts run at once to their end. See the module for what is timed."""
    seed = params.seed or 0
    requests = [
        engine.add(prompt, replace(params, seed=seed + i), draft=arm.name, depth=arm.depth)
        for i, prompt in enumerate(prompts)
    ]
    waiting = {request.id for request in requests}
    opened = closed = time.perf_counter()
    tokens = 0
    while engine.busy:
        events = engine.step()
        closed = time.perf_counter()
        if waiting:
            waiting -= {event.request_id for event in events if event.token_ids}
            opened = closed
        else:
            tokens += sum(len(event.token_ids) for event in events)
    stats = [request.stats for request in requests]
    steps = sum(s.steps for s in stats)
    return Run(
        speed=tokens / (closed - opened) if tokens else 0.0,
        outputs=[list(request.output) for request in requests],
        accepted_length=sum(s.completion_tokens for s in stats) / steps,
        drafted=sum(s.drafted for s in stats) / steps,
        draft_ms=1e3 * sum(s.draft_seconds for s in stats) / steps,
        pass_ms=1e3 * sum(s.verify_seconds for s in stats) / steps,
    )


def _result(quantization: str, arm: Arm, rounds: dict[Arm, list[Run]]) -> Result:
    runs, plain = rounds[arm], rounds[PLAIN]
    ratios = [run.speed / base.speed for run, base in zip(runs, plain, strict=True)]
    apart = [
        first_difference(mine, theirs)
        for run, base in zip(runs, plain, strict=True)
        for mine, theirs in zip(run.outputs, base.outputs, strict=True)
    ]
    differing = [at for at in apart if at is not None]
    return Result(
        quantization=quantization,
        draft=arm.draft,
        depth=arm.depth,
        tokens_per_second=median([run.speed for run in runs]),
        times_plain=median(ratios),
        interval=None if arm == PLAIN else bootstrap_interval(ratios),
        accepted_length=median([run.accepted_length for run in runs]),
        drafted=median([run.drafted for run in runs]),
        draft_ms=median([run.draft_ms for run in runs]),
        pass_ms=median([run.pass_ms for run in runs]),
        same=not differing,
        first_difference=min(differing, default=None),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index where two outputs differ, the end of the shorter one included; None if they are the same."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _limit(quantization: str, llm: LLM, plain: list[Run], bandwidths: list[float], requests: int) -> Limit:
    size = llm.decoder.weight_bytes
    if not bandwidths:
        return Limit(quantization, size, None, None, None)
    limits = [1e9 * bandwidth / size * requests for bandwidth in bandwidths]
    share = median([run.speed / limit for run, limit in zip(plain, limits, strict=True)])
    return Limit(quantization, size, median(bandwidths), median(limits), share)
