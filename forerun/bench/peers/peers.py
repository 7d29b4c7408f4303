"""Other engines beside this one: the same weights, prompts, lengths and threads, greedily, run by
run in turn.

A directory is converted to what the others read, in one format after the other; a GGUF file goes as
it is to those that run it as it is stored. Drafts come from a draft model or are looked up in the
text, by each engine in its own way.

Every engine sits loaded in a process of its own, one for each format of the weights, and sleeps
while another runs. A round runs plain decoding and every depth of every engine once over the same
prompts, starting with another of them each time; ratios are made within rounds, and the read
bandwidth is measured after every run. What is timed is what `forerun.measure.run` times: from the
first token of the last request to the end. One short round that does not count comes first. An
engine that fails is left out from then on, with a line that says why; the others go on."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forerun import __version__
from forerun.bench.peers.plan import ENGINES, LOOKUP, STORED, Load, Models, Plan, find_models
from forerun.bench.peers.process import Outcome, PeerError, Player, Prompts, Ready, Worker
from forerun.bench.peers.results import (
    ITS_OWN,
    OURS,
    Failure,
    PeerResult,
    PeersReport,
    PrefillResult,
    summarise,
)
from forerun.cli.progress import Part, Tell, nothing
from forerun.engine.request import OFF
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.medians import median
from forerun.measure.run import PLAIN, Arm, Work, timed_run
from forerun.sampling.params import SamplingParams

T = TypeVar("T")
WARMING = 64  # tokens of the round that does not count


class Ours:
    """This engine as a player. Raises ForerunError for models that cannot be loaded."""

    def __init__(self, models: Models, form: str, requests: int, plan: Plan) -> None:
        self.name, self.draft = OURS, models.ours
        self.ready = Ready(__version__, requests, 0 if self.draft == OFF else requests, True)
        target = {STORED: {}, "int8": {"quantization": form}, "int4": {"quantization": form}}.get(
            form, {"dtype": form}
        )
        draft = "none" if plan.draft_format == "bfloat16" else plan.draft_format
        if models.drafter and models.drafter.is_file():
            draft = "auto"  # as it is stored
        self.llm = LLM(
            model=str(models.target), draft=self.draft, **target, threads=plan.threads, device=plan.device,
            max_rows=requests, draft_quantization=draft,
        )  # fmt: skip

    def run(self, depth: int | str, prompts: Prompts, tokens: int) -> Outcome:
        """As `Player.run`."""
        self.llm.forget()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, seed=0)
        run = timed_run(
            self.llm.engine,
            [Work(prompt) for prompt in prompts],
            params,
            Arm(self.draft, depth) if depth else PLAIN,
        )
        return Outcome(run.speed, run.outputs, run.accepted_length, run.prefill_seconds)


@dataclass(slots=True)
class Company:
    """Who still takes part, and why others do not any more."""

    players: list[Player]
    failures: list[Failure] = field(default_factory=list)

    def ask(self, name: str, depth: Any, prompts: Prompts, tokens: int) -> Outcome | None:
        """One run of a player; None of one that has left, or leaves because of it."""
        for player in self.players:
            if player.name == name:
                try:
                    return player.run(depth, prompts, tokens)
                except PeerError as error:
                    self.failures.append(Failure(name, "", str(error)))
                    self.players.remove(player)
                    break
        return None

    def has(self, name: str) -> bool:
        """Whether a player still takes part."""
        return any(player.name == name for player in self.players)


def measure_peers(
    model: str | None, draft: str | None, plan: Plan, loads: Sequence[Load], tell: Tell = nothing
) -> PeersReport:
    """Load every engine in each format in turn, and measure.

    Args:
        model: as in `Config`; other engines are given its directory or GGUF file.
        draft: model:PLACE, lookup, off (then only plain decoding is compared), or None for what
            suits the model.
        plan: what to measure.
        loads: prompts by category and requests at once.
        tell: is told what goes on.

    Raises:
        ForerunError: an option, a model or a prompt that cannot be; or no other engine could run.
    """
    models = find_models(model, draft)
    plan = plan.settled(models)
    results: list[PeerResult] = []
    prefills: list[PrefillResult] = []
    failures: list[Failure] = []
    bandwidths: list[float] = []
    with _folder(plan.converted) as folder:
        for number, form in enumerate(plan.formats):
            part = Part(tell, number, len(plan.formats))
            with ExitStack() as stack:
                label = models.label(form)
                part(f"loading {OURS}, {label}")
                ours = Ours(models, form, max(load.requests for load in loads), plan)
                options = _options(ours, models, form, plan, loads, folder)
                company = Company([ours], failures)
                for name in plan.peers:
                    part(f"loading {name}, {label}")
                    company.players += _start(name, form, options, plan, stack, failures)
                turns = len(loads) + bool(plan.prefill)
                for turn, load in enumerate(loads):
                    if len(company.players) == 1:
                        break  # nobody is left to be compared with
                    runs = measure_decoding(
                        company, load, plan, bandwidths, Part(part, turn, turns)
                    )
                    results += summarise(label, load.requests, company.players, runs, load.category)
                if len(company.players) > 1:
                    last = Part(part, turns - 1, turns)
                    prefills += measure_prefill(
                        label, company, plan.prefill, _texts(loads), plan.repeats, last
                    )
    if not any(result.engine != OURS for result in results):
        raise ForerunError(
            f"no other engine could run: {'; '.join(dict.fromkeys(map(str, failures)))}"
        )
    draft_format = STORED if models.drafter and models.drafter.is_file() else plan.draft_format
    read = (min(bandwidths), median(bandwidths), max(bandwidths)) if bandwidths else None
    return PeersReport(
        str(models.target), models.draft, draft_format, plan.tokens, plan.repeats, plan.threads, plan.device,
        read, results, prefills, failures,
    )  # fmt: skip


def _texts(loads: Sequence[Load]) -> Prompts:
    return [prompt for load in loads for prompts in load.groups for prompt in prompts]


def _options(
    ours: Ours, models: Models, form: str, plan: Plan, loads: Sequence[Load], folder: Path
) -> dict[str, Any]:
    """What every worker is told. RequestError if an output would be cut short: its tokens are what
    is counted on."""
    longest = max(map(len, _texts(loads)))
    context = ours.llm.decoder.context
    for prompt, more in ((longest, plan.tokens), (max(plan.prefill, default=0), 1)):
        if prompt + more > context:
            raise RequestError(
                f"a prompt of {prompt} tokens and {more} more are over this model's context of {context}: ask for fewer"
            )
    deepest = max([depth for depth in plan.depths if isinstance(depth, int)], default=0)
    return {
        "model": str(models.target), "draft": str(models.drafter or ""), "lookup": models.draft == LOOKUP,
        "format": form, "draft_format": plan.draft_format, "threads": plan.threads, "device": plan.device,
        "requests": max(load.requests for load in loads), "converted": str(folder),
        "context": max([longest + plan.tokens, *plan.prefill]) + deepest + 1,
    }  # fmt: skip


def _start(
    name: str,
    form: str,
    options: dict[str, Any],
    plan: Plan,
    stack: ExitStack,
    failures: list[Failure],
) -> list[Player]:
    """The player of that name, loaded, which ends with the stack; none if it fails or lacks the
    format."""
    engine, where = ENGINES[name], plan.peers[name]
    try:
        if why := engine.why_not(form):
            raise PeerError(why)
        python = where if engine.formats else sys.executable
        worker = Worker(
            name, python, engine.script, engine.packages,
            options | {"where": where, "drafting": name.startswith("drafting")}, plan.timeout,
        )  # fmt: skip
        stack.callback(worker.close)
        worker.load()
    except PeerError as error:
        failures.append(Failure(name, form, str(error)))
        return []
    return [worker]


def in_rounds(arms: Sequence[T], repeats: int, what: str, tell: Tell) -> Iterator[tuple[int, T]]:
    """(round, arm): all arms in every round, starting with another each time. Round -1 warms up and
    does not count."""
    for i in range(-1, repeats):
        now = "warming up" if i < 0 else f"round {i + 1} of {repeats}"
        tell(what + now, i + 1, repeats + 1)
        for turn in range(len(arms)):
            yield i, arms[(turn + i) % len(arms)]


def measure_decoding(
    company: Company, load: Load, plan: Plan, bandwidths: list[float], tell: Tell
) -> dict[tuple[str, int | str], list[Outcome]]:
    """The runs of each player and depth, one a round. Rounds take the prompts in turn; those used
    last warm up."""
    runs: dict[tuple[str, int | str], list[Outcome]] = {
        (player.name, depth): []
        for player in company.players
        for depth in _depths(player, load.requests, plan)
    }
    if measurable := plan.device == "cpu" and native.library() is not None:
        native.start(plan.threads)
    what = f"{load.category}, " * bool(load.category) + f"{load.requests} requests, " * (
        load.requests > 1
    )
    for i, (name, depth) in in_rounds(list(runs), plan.repeats, what, tell):
        tokens = plan.tokens if i >= 0 else min(WARMING, plan.tokens)
        outcome = company.ask(name, depth, load.groups[i % len(load.groups)], tokens)
        if outcome is not None and i >= 0:
            runs[name, depth].append(outcome)
            bandwidths += [native.read_bandwidth()] if measurable else []
    return {arm: outcomes for arm, outcomes in runs.items() if company.has(arm[0])}


def _depths(player: Player, requests: int, plan: Plan) -> list[int | str]:
    """The depths to run, 0 (plain) among them."""
    plain: list[int | str] = [0] if requests <= player.ready.plain else []
    if requests > player.ready.speculative:
        return plain
    if not player.ready.depths:
        return [*plain, ITS_OWN]
    return [*plain, *(depth for depth in plan.depths if depth != "auto" or player.name == OURS)]


def measure_prefill(
    form: str, company: Company, lengths: Sequence[int], texts: Prompts, repeats: int, tell: Tell
) -> list[PrefillResult]:
    """How fast prompts are read, plainly and one at once: a row for each length and player, as far
    as its first tokens were timed. A prompt is tokens of `texts`, one after the other, round and
    round."""
    text = list(itertools.chain.from_iterable(texts))
    results = []
    for at, length in enumerate(lengths):
        runs: dict[str, list[float]] = {
            player.name: [] for player in company.players if player.ready.plain
        }
        for i, name in in_rounds(
            list(runs), repeats, f"reading {length} tokens, ", Part(tell, at, len(lengths))
        ):
            # no two prompts begin alike: an engine may remember what it has read
            start = (at * (1 + repeats) + 1 + i) % len(text)
            prompt = list(itertools.islice(itertools.cycle(text), start, start + length))
            outcome = company.ask(name, 0, [prompt], 1)
            if outcome is not None and i >= 0:
                runs[name].append(outcome.prefill_seconds)
        for name, times in runs.items():
            if company.has(name) and times and all(times):
                ratios = [theirs / ours for ours, theirs in zip(runs[OURS], times, strict=True)]
                ratio = None if name == OURS else median(ratios)
                results.append(
                    PrefillResult(name, form, length, median(times), length / median(times), ratio)
                )
    return results


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """Where converted models go: a directory that stays, or one that goes with everything in it."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="forerun-peers-") as name:
            yield Path(name)
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{wanted} cannot be a directory of converted models: {error.strerror}"
        ) from None
    yield wanted.resolve()
