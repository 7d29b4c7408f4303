"""Other engines beside this one: the same weights, prompts, lengths and threads, greedily, run by run in turn.

Every engine sits loaded in a process of its own, one for each format of the weights, and sleeps while another runs. A
round runs plain decoding and every depth of every engine once over the same prompts, starting with another of them each
time; ratios are made within rounds, and the read bandwidth is measured after every run. What is timed is what
`forerun.bench.decode` times: from the first token of the last request to the end. One short round that does not count
comes first. An engine that fails is left out from then on, with a line that says why; the others go on.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forerun import __version__
from forerun.bench.peer_process import Outcome, PeerError, Prompts, Ready, Worker
from forerun.bench.peer_results import ITS_OWN, OURS, Failure, PeerResult, PeersReport, spread, summarise
from forerun.bench.report import Tell, nothing
from forerun.bench.run import PLAIN, Arm, Work, timed_run
from forerun.config import parse_depth
from forerun.draft.registry import parse_draft
from forerun.engine.drafting import OFF
from forerun.errors import ConfigError, ForerunError, RequestError, nearest
from forerun.kernels import native
from forerun.llm import LLM
from forerun.models.hub import find_model
from forerun.sampling.params import SamplingParams

FORMATS = ("float32", "bfloat16", "int8", "int4")
WARMING = 64  # tokens of the round that does not count


@dataclass(frozen=True, slots=True)
class Engine:
    """Another engine: the script that runs it, what its Python needs, and the formats of weights that it has here.

    One without formats has its own: a server, which loaded what it loaded.
    """

    script: str
    packages: str
    formats: tuple[str, ...]


ENGINES = {
    "transformers": Engine("with_transformers.py", "transformers torch", ("float32", "bfloat16")),
    "llama.cpp": Engine("with_llama_cpp.py", "llama-cpp-python gguf", FORMATS),
    "openvino": Engine("with_openvino.py", "openvino-genai gguf", ("bfloat16", "int8", "int4")),
    "server": Engine("with_server.py", "", ()),
    "drafting-server": Engine("with_server.py", "", ()),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        peers: engines to where they are: a Python that has it, or a server's URL.
        formats: of the target's weights.
        draft_format: of the draft's, for engines that can draft in another format than the target's.
        depths: tokens drafted ahead; auto is for this engine alone.
        tokens: to make for each prompt.
        repeats: rounds.
        threads: of every engine.
        device: cpu or cuda.
        timeout: seconds for one answer of another engine.
        converted: a directory that keeps what models are converted to; None throws it away at the end.
    """

    peers: Mapping[str, str]
    formats: Sequence[str] = ("bfloat16", "int8", "int4")
    draft_format: str = "int8"
    depths: Sequence[int | str] = ("auto", 2, 3, 4, 5, 7)
    tokens: int = 256
    repeats: int = 3
    threads: int = 1
    device: str = "cpu"
    timeout: float = 1800.0
    converted: Path | None = None

    def __post_init__(self) -> None:
        if not self.peers or not self.formats or not self.depths:
            raise ConfigError("there is nothing to compare: give at least one peer, format and depth")
        for name, known, given in (
            ("format", FORMATS, self.formats), ("draft format", FORMATS[1:], [self.draft_format]),
            ("device", ("cpu", "cuda"), [self.device]),
        ):  # fmt: skip
            for value in given:
                if value not in known:
                    raise ConfigError(f"there is no {name} {value!r}: {nearest(value, known)}")
        if 0 in [parse_depth(depth) for depth in self.depths]:
            raise ConfigError("depth 0 is plain decoding, which is always measured: give depths from 1 up")
        if self.tokens < 2:
            raise ConfigError("one token is no decoding: give at least 2 tokens")
        if not 1 <= self.repeats <= 10_000:
            raise ConfigError(f"repeats={self.repeats} is out of range: give a whole number from 1 to 10000")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout={self.timeout:g} is out of range: give seconds over 0")


def parse_peers(entries: Sequence[str]) -> dict[str, str]:
    """`name=place` entries by name. Raises ConfigError for an unknown engine, or a place that cannot be one."""
    peers: dict[str, str] = {}
    for entry in entries:
        name, _, where = (part.strip() for part in entry.partition("="))
        if name not in ENGINES:
            raise ConfigError(f"there is no peer {name!r}: {nearest(name, ENGINES)}")
        if name in peers:
            raise ConfigError(f"the peer {name} was given twice: give it once")
        if name.endswith("server"):
            if not where.startswith(("http://", "https://")):
                raise ConfigError(f"the peer {name} needs a URL: write {name}=http://HOST:PORT")
        elif shutil.which(where) is None:
            raise ConfigError(f"{where!r} is no program: write {name}=PYTHON, the Python that has {name}")
        peers[name] = where
    return peers


class Player(Protocol):
    """An engine that takes part, ours or another."""

    name: str
    ready: Ready

    def run(self, depth: Any, prompts: Prompts, tokens: int) -> Outcome:
        """One run; depth 0 is plain decoding. Raises PeerError."""


class Ours:
    """This engine as a player. Raises ForerunError for models that cannot be loaded."""

    def __init__(self, model: str | None, draft: str, form: str, requests: int, plan: Plan) -> None:
        self.name, self.draft = OURS, draft
        self.ready = Ready(__version__, requests, 0 if draft == OFF else requests, True)
        target = {"quantization": form} if form in ("int8", "int4") else {"dtype": form}
        self.llm = LLM(
            model=model, draft=draft, **target, threads=plan.threads, device=plan.device, max_rows=requests,
            draft_quantization="none" if plan.draft_format == "bfloat16" else plan.draft_format,
        )  # fmt: skip

    def run(self, depth: int | str, prompts: Prompts, tokens: int) -> Outcome:
        """As `Player.run`."""
        self.llm.forget()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, seed=0)
        run = timed_run(
            self.llm.engine, [Work(prompt) for prompt in prompts], params, Arm(self.draft, depth) if depth else PLAIN
        )
        return Outcome(run.speed, run.outputs, run.accepted_length)


def measure_peers(
    model: str | None, draft: str, plan: Plan, batches: Mapping[int, Sequence[Prompts]], tell: Tell = nothing
) -> PeersReport:
    """Load every engine in each format in turn, and measure.

    Args:
        model: as in `Config`; other engines are given its directory.
        draft: model:PLACE, or off, and then only plain decoding is compared.
        plan: what to measure.
        batches: numbers of requests at once, to the prompts of one run each; rounds take them in turn.
        tell: is given a line about each stage.

    Raises:
        ForerunError: an option, a model or a prompt that cannot be; or no other engine could run.
    """
    kind, place = parse_draft(draft)
    if kind not in ("model", OFF):
        raise ConfigError(f"other engines cannot draft with {draft}: give --draft model:DIRECTORY, or off")
    places = (find_model(model), find_model(place) if kind == "model" else None)
    results: list[PeerResult] = []
    failures: list[Failure] = []
    bandwidths: list[float] = []
    with _folder(plan.converted) as folder:
        for form in plan.formats:
            with ExitStack() as stack:
                tell(f"loading {OURS}, {form}")
                ours = Ours(model, draft if places[1] else OFF, form, max(batches), plan)
                options = _options(ours, places, form, plan, batches, folder)
                players: list[Player] = [ours]
                for name in plan.peers:
                    tell(f"loading {name}, {form}")
                    players += _start(name, form, options, plan, stack, failures)
                for requests, prompts in batches.items():
                    if len(players) == 1:
                        break  # nobody is left to be compared with
                    runs = _rounds(players, requests, prompts, plan, failures, bandwidths, tell)
                    results += summarise(form, requests, players, runs)
    if not any(result.engine != OURS for result in results):
        raise ForerunError(f"no other engine could run: {'; '.join(dict.fromkeys(map(str, failures)))}")
    return PeersReport(
        str(places[0]), draft, plan.draft_format, plan.tokens, plan.repeats, plan.threads, plan.device,
        spread(bandwidths), results, failures,
    )  # fmt: skip


def _options(
    ours: Ours, places: tuple[Path, Path | None], form: str, plan: Plan, batches: Mapping[int, Sequence[Prompts]],
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """What every worker is told. RequestError if an output would be cut short: its tokens are what is counted on."""
    longest = max(len(prompt) for groups in batches.values() for prompts in groups for prompt in prompts)
    context = ours.llm.decoder.context
    if longest + plan.tokens > context:
        raise RequestError(
            f"a prompt of {longest} tokens and {plan.tokens} more are over this model's context of {context}:"
            " ask for fewer"
        )
    deepest = max([depth for depth in plan.depths if isinstance(depth, int)], default=0)
    return {
        "model": str(places[0]), "draft": str(places[1]) if places[1] else "", "format": form,
        "draft_format": plan.draft_format, "threads": plan.threads, "device": plan.device, "requests": max(batches),
        "context": longest + plan.tokens + deepest + 1, "converted": str(folder),
    }  # fmt: skip


def _start(
    name: str, form: str, options: dict[str, Any], plan: Plan, stack: ExitStack, failures: list[Failure]
) -> list[Player]:
    """The player of that name, loaded, which ends with the stack; none if it fails or lacks the format."""
    engine, where = ENGINES[name], plan.peers[name]
    try:
        if engine.formats and form not in engine.formats:
            raise PeerError(f"is not run in {form} here")
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


def _rounds(
    players: list[Player], requests: int, batches: Sequence[Prompts], plan: Plan, failures: list[Failure],
    bandwidths: list[float], tell: Tell,
) -> dict[tuple[str, int | str], list[Outcome]]:  # fmt: skip
    """The runs of each player and depth, one a round. A player that fails is taken out of `players`."""
    runs: dict[tuple[str, int | str], list[Outcome]] = {
        (player.name, depth): [] for player in players for depth in _depths(player, requests, plan)
    }
    by_name = {player.name: player for player in players}
    if measurable := plan.device == "cpu" and native.library() is not None:
        native.start(plan.threads)
    for i in range(-1, plan.repeats):  # -1 warms up, with the prompts that are used last
        said = "warming up" if i < 0 else f"round {i + 1} of {plan.repeats}"
        tell(f"{requests} requests, {said}" if requests > 1 else said)
        for turn in range(len(arms := list(runs))):
            name, depth = arms[(turn + i) % len(arms)]
            if name not in by_name:
                continue
            tokens = plan.tokens if i >= 0 else min(WARMING, plan.tokens)
            try:
                outcome = by_name[name].run(depth, batches[i % len(batches)], tokens)
            except PeerError as error:
                failures.append(Failure(name, "", str(error)))
                players.remove(by_name.pop(name))
                continue
            if i >= 0:
                runs[name, depth].append(outcome)
                bandwidths += [native.read_bandwidth()] if measurable else []
    return {arm: outcomes for arm, outcomes in runs.items() if arm[0] in by_name}


def _depths(player: Player, requests: int, plan: Plan) -> list[int | str]:
    """The depths to run, 0 (plain) among them."""
    plain = [0] if requests <= player.ready.plain else []
    if requests > player.ready.speculative:
        return [*plain]
    if not player.ready.depths:
        return [*plain, ITS_OWN]
    return [*plain, *(depth for depth in map(parse_depth, plan.depths) if depth != "auto" or player.name == OURS)]


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
        raise ConfigError(f"{wanted} cannot be a directory of converted models: {error.strerror}") from None
    yield wanted.resolve()
