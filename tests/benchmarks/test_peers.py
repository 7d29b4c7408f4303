"""Comparison with other engines: rounds, failures in one line, the workers and their file formats.

Most workers here are scripts that implement the protocol without a model; transformers really runs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from benchmarks.command import run
from benchmarks.peers import __main__ as module
from benchmarks.peers import process
from benchmarks.peers.__main__ import READING_TOKENS, STORED, Engines, Kind, Load, Plan
from benchmarks.peers.process import WORKERS, Capabilities, Outcome, PeerError, Worker
from benchmarks.peers.results import OURS, summarize
from forerun.bench.pair import Pair
from forerun.kernels import native
from forerun.measure import run as timing
from forerun.measure.run import Work
from tests.bench.fake_openai import Handler, chunk, faking, usage
from tests.bench.test_decode import PARAMS, TWO_REQUESTS, FakeEngine

pytestmark = [
    pytest.mark.usefixtures("fixed_bandwidth"),
    pytest.mark.skipif(native.library() is None, reason="no native kernels"),
]
PROTOCOL = """
import json, sys
def send(answer):
    print(json.dumps(answer), flush=True)
def ready():
    send({"ready": {"version": "9.9", "plain": 4, "speculative": 1, "depths": True}})
def answer(request, speed=100.0):
    outputs = [[p[0] + i for i in range(request["tokens"])] for p in request["prompts"]]
    send({"outputs": outputs, "decode_tokens": speed, "decode_seconds": 1.0,
          "prefill_seconds": 1.0, "steps": sum(map(len, outputs)) // (1 + request["depth"])})
"""
WORKING = """
ready()
for line in sys.stdin:
    request = json.loads(line)
    answer(request, 100.0 * (1 + request["depth"]))
"""
BROKEN_WORKERS = [
    ("sys.exit('no such model')", "ended with code 1: no such model"),
    ("ready()\ninput()\nsys.exit(7)", "ended with code 7"),
    ("ready()\ninput()\ninput()\ninput()", "no answer within 1 seconds: see --timeout"),
    ("print('Loading weights')", "gave 'Loading weights', which is no answer"),
    ("send({'hello': 1})", "which is no answer"),
    ("ready()\ninput()\nsend({'outputs': [[1]]})", "which is no answer"),
    ("import no_such_engine", "No module named 'no_such_engine': run PYTHON -m pip install fake"),
    ("send({'error': 'ValueError: too large'})", "ValueError: too large"),
    ("ready()\nr = json.loads(input())\nr['tokens'] -= 1\nanswer(r)\ninput()", "instead of 4 each"),
]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Replace an engine's script; return the entry for --peers."""

    def replace_script(name: str, text: str) -> str:
        script = tmp_path / f"{name}.py"
        script.write_text(PROTOCOL + text)
        formats = ("bfloat16", "int8", STORED)
        monkeypatch.setitem(module.KINDS, name, Kind(str(script), "fake", formats))
        return f"{name}={sys.executable}"

    return replace_script


@pytest.fixture
def peers(pair: Pair, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the benchmark on the tiny pair; return (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        draft = f"model:{pair.directory}/draft"
        models = ["--model", f"{pair.directory}/target", "--draft", draft, "--formats", "int8"]
        quick = ["--depths", "2", "--tokens", "8", "--repeats", "1", "--threads", "1"]
        code = 0
        try:
            run(lambda: module.main([*models, *quick, *words]))
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Return the list of workers that are started, in order."""
    workers: list[Worker] = []
    begin = Worker.__init__

    def record_start(self: Worker, *args: Any) -> None:
        workers.append(self)
        begin(self, *args)

    monkeypatch.setattr(Worker, "__init__", record_start)
    return workers


def test_rows_of_a_report(peers, fake, started: list[Worker]) -> None:
    """A peer that cannot draft for two requests has no speculative speed for them."""
    entry = fake("llama.cpp", WORKING)
    flags = ["--formats", "int8,bfloat16,int4", "--requests", "1,2", "--depths", "auto,1,3"]
    code, out, _ = peers("--peers", entry, *flags, "--repeats", "2", "--json")
    report = json.loads(out)
    assert code == 0
    rows = [(r["engine"], r["format"], r["requests"]) for r in report["results"]]
    names = ("forerun", "llama.cpp")
    assert rows == [(e, f, n) for f in ("int8", "bfloat16") for n in (1, 2) for e in names]
    assert [f["format"] for f in report["failures"]] == ["int4"]
    ours, theirs = report["results"][:2]
    assert set(ours["by_depth"]) == {"auto", "1", "3"} and set(theirs["by_depth"]) == {"1", "3"}
    assert ours["first_difference"] == -1 and ours["ours_over_plain"] is None
    found = [theirs[name] for name in ("version", "plain", "speculative", "depth", "times_plain")]
    assert found == ["9.9", 100.0, 400.0, 3, 4.0]
    assert (theirs["interval"], theirs["accepted_length"]) == ([4.0, 4.0], 4.0)
    several = report["results"][3]
    assert several["plain"] == 100.0 and several["speculative"] is several["depth"] is None
    assert report["bandwidth"] == [10.0, 10.0, 10.0]
    assert len(started) == 2 and all(worker.process.poll() is not None for worker in started)


def test_temperatures_are_rows_of_their_own(peers, fake) -> None:
    """Texts of different engines are not compared there; one that cannot sample is left out."""
    sampling = PROTOCOL.replace('"depths": True', '"depths": True, "samples": True')
    entries = f"{fake('llama.cpp', sampling + WORKING)},{fake('openvino', WORKING)}"
    code, out, err = peers("--peers", entries, "--temperature", "0,0.8", "--json")
    report = json.loads(out)
    assert code == 0 and not err
    rows = report["results"]
    assert [r["temperature"] for r in rows] == [0, 0, 0, 0.8, 0.8, 0.8]
    shared = [r["shared_with_ours"] is None for r in rows]
    assert shared == [True, False, False, True, True, True]
    assert rows[3]["first_difference"] == -1 and rows[3]["speculative"] > 0
    assert rows[4]["speculative"] > 0 and rows[5]["speculative"] is rows[5]["plain"] is None
    why = [f["why"] for f in report["failures"] if f["engine"] == "openvino"]
    assert why == ["is measured at temperature 0 only"]
    _, shown, _ = peers("--peers", entries, "--temperature", "0.8")
    assert "temperature 0.8, 1 threads" in shown.splitlines()[-1]


def test_one_engine_is_loaded_at_a_time(peers, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --alone, an engine is closed before the next one is loaded; the report is the same."""
    loaded: list[str] = []
    closed: list[str] = []
    load, close = Worker.load, Worker.close

    def note_load(self: Worker) -> None:
        assert len(loaded) == len(closed)
        loaded.append(self.name)
        load(self)

    def note_close(self: Worker) -> None:
        if self.process.poll() is None:
            closed.append(self.name)
        close(self)

    ours_made, ours_closed = module.Ours.__init__, module.Ours.close

    def note_made(self: Any, *args: Any) -> None:
        assert len(loaded) == len(closed)
        loaded.append("forerun")
        ours_made(self, *args)

    def note_closed(self: Any) -> None:
        closed.append("forerun")
        ours_closed(self)

    monkeypatch.setattr(Worker, "load", note_load)
    monkeypatch.setattr(Worker, "close", note_close)
    monkeypatch.setattr(module.Ours, "__init__", note_made)
    monkeypatch.setattr(module.Ours, "close", note_closed)
    code, out, _ = peers("--peers", fake("llama.cpp", WORKING), "--alone", "--json")
    results = json.loads(out)["results"]
    assert code == 0 and [r["engine"] for r in results] == ["forerun", "llama.cpp"]
    assert results[1]["plain"] == 100.0 and len(loaded) > 3 and loaded == closed


@pytest.mark.parametrize(("text", "message"), BROKEN_WORKERS)
def test_a_failing_peer(text: str, message: str, peers, fake, started: list[Worker]) -> None:
    """The other engines go on, and no process is left."""
    entries = f"{fake('openvino', text)},{fake('llama.cpp', WORKING)}"
    timeout = "1" if "within 1" in message else "60"
    code, out, err = peers("--peers", entries, "--timeout", timeout)
    assert code == 0 and "Traceback" not in err + out
    (line,) = [line for line in err.splitlines() if line.startswith("left out")]
    assert line.startswith("left out: openvino: ")
    assert message.replace("PYTHON", sys.executable) in line
    assert [row.split()[0] for row in out.splitlines()[1:3]] == ["forerun", "llama.cpp"]
    assert "read bandwidth 10.0 GB/s" in out.splitlines()[-1]
    assert all(worker.process.poll() is not None for worker in started)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", ","], "at least one peer"),
        (["--peers", "llamacpp=/bin/sh"], "did you mean 'llama.cpp'"),
        (["--peers", "server=http://a,server=http://b"], "given twice"),
        (["--peers", "llama.cpp=./nowhere"], "write llama.cpp=PYTHON"),
        (["--peers", "server=localhost:8000"], "write server=http://HOST:PORT"),
        (["--formats", "int5"], "there is no format 'int5'"),
        (["--formats", STORED], "runs as it is stored"),
        (["--depths", "0,1"], "depth 0 is plain"),
        (["--requests", "999"], "fewer than 999 prompts"),
        (["--tokens", "1"], "tokens=1"),
        (["--temperature", "hot"], "'hot' is not a number"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--tokens", "999"], "context of 256"),
        (["--categories", "chats"], "did you mean 'chat'"),
        (["--prefill", "256"], "prompt of 256 tokens and 1 more"),
        (["--draft", "suffix"], "give model:PLACE, lookup or off"),
        (["--converted", __file__], "cannot be a directory"),
        (["--peers", "drafting-server=http://127.0.0.1:9"], "there is no server at"),
    ],
)
def test_bad_input_is_refused(peers, words: list[str], message: str) -> None:
    code, out, err = peers("--peers", f"llama.cpp={sys.executable}", *words)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def engine(name: str, log: list[Any], seconds: float = 1.0, fails: int = 99) -> SimpleNamespace:
    """An engine that logs its runs and fails after some of them."""

    def go(depth: int, prompts: list, tokens: int, temperature: float = 0.0) -> Outcome:
        log.append((name, depth, prompts[0], tokens))
        if len([entry for entry in log if entry[0] == name]) > fails:
            raise PeerError("it broke")
        return Outcome(1.0, [[1]], None, seconds)

    return SimpleNamespace(name=name, ready=Capabilities("1", 9, 9, True), run=go)


def test_rounds_are_fair() -> None:
    """Each round runs all arms on the same prompts, the next arm first; failures are final."""
    log: list[Any] = []
    failures: list[dict[str, str]] = []
    engines = Engines([engine(OURS, log), engine("a", log), engine("b", log, fails=3)], failures)
    plan = Plan(Path("x"), "off", None, {}, [], depths=["auto", 3], tokens=100, repeats=3)
    runs = module.measure_decoding(engines, Load("", 1, [[[5]], [[6]]]), plan, [])
    arms = [(OURS, 0), (OURS, "auto"), (OURS, 3), ("a", 0), ("a", 3), ("b", 0), ("b", 3)]
    assert [entry[:2] for entry in log[:7]] == [arms[(turn - 1) % 7] for turn in range(7)]
    counted = [entry for entry in log[7:] if entry[3] == 100]
    assert {entry[3] for entry in log[:7]} == {50}
    assert [e for e in log[7:] if e[3] != 100][:4] == [
        (*e[:3], READING_TOKENS) for e in counted[:4]
    ]
    rounds = [counted[:6], counted[6:11], counted[11:16]]
    assert [{entry[2][0] for entry in entries} for entries in rounds] == [{5}, {6}, {5}]
    assert [entries[0][:2] for entries in rounds] == arms[:3]
    assert failures == [{"engine": "b", "format": "", "why": "it broke"}]
    assert list(runs) == arms[:5] and all(len(outcomes) == 3 for outcomes in runs.values())


def test_prefill_rounds_use_different_prompts() -> None:
    """No two prompts of an engine have the same beginning, so no cache can help."""
    log: list[Any] = []
    engines = Engines([engine(OURS, log, 1.0), engine("a", log, 2.0)], [])
    plan = Plan(Path("x"), "off", None, {}, [], repeats=3, prefill=[10, 4])
    found = module.measure_prefill("int8", engines, plan, [[1, 2, 3], [4, 5], [6, 7]])
    rows = [(r.engine, r.tokens, r.first_token, r.ours_over) for r in found]
    assert rows[:2] == [(OURS, 10, 1.0, None), ("a", 10, 2.0, 2.0)] and len(rows) == 4
    prompts = [prompt for name, _, prompt, _ in log if name == "a"]
    assert prompts[0] == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3] and prompts[1][:3] == [2, 3, 4]
    assert prompts == [prompt for name, _, prompt, _ in log if name == OURS]


def test_rows_are_summarized_from_outcomes() -> None:
    def outcomes(*speeds: float, output: list[int]) -> list[Outcome]:
        return [Outcome(speed, [output], 2.0) for speed in speeds]

    runs = {
        (OURS, 0): outcomes(10, 20, output=[1, 2, 3, 4]),
        (OURS, 2): outcomes(30, 40, output=[1, 2, 3, 4]),
        ("a", 0): outcomes(5, 20, output=[1, 2, 9, 4]),
        ("a", 2): outcomes(10, 10, output=[1, 2, 9, 5]),
        ("a", 4): outcomes(10, 20, output=[1, 2, 9, 4]),
    }
    ours, theirs = summarize("int8", 1, [engine(OURS, []), engine("a", [])], runs)
    assert (ours.plain, ours.speculative, ours.times_plain) == (15, 35, 2.5)
    assert (theirs.depth, theirs.speculative, theirs.first_difference) == (4, 15, -1)
    assert theirs.shared_with_ours == 0.5 and theirs.ours_over_plain == 1.5
    assert theirs.ours_over_speculative == theirs.ours_over_best == 2.5


@pytest.mark.one_in(0)
def test_transformers_as_a_peer_gives_our_output(peers, pair: Pair) -> None:
    """The outputs are equal in float32: plain, assisted, and with prompt lookup."""
    flags = ["--formats", "float32", "--draft-format", "bfloat16", "--tokens", "12", "--json"]
    entry = f"transformers={sys.executable}"
    code, out, _ = peers("--peers", entry, *flags, "--depths", "3", "--requests", "1,2")
    report = json.loads(out)
    assert code == 0 and not report["failures"]
    ours, alone, _, together = report["results"]
    assert alone["first_difference"] == -1 and alone["shared_with_ours"] == 1.0
    assert together["shared_with_ours"] == 1.0 and together["speculative"] is None
    assert alone["accepted_length"] == pytest.approx(ours["accepted_length"], rel=0.4)
    code, out, _ = peers("--peers", entry, *flags, "--draft", "lookup", "--prefill", "40")
    report = json.loads(out)
    ours, theirs = report["results"]
    assert ours["speculative"] and theirs["accepted_length"] >= 1
    assert theirs["first_difference"] == -1 and len(report["prefills"]) == 2
    code, out, _ = peers("--peers", entry, *flags, "--temperature", "0.8")
    ours, theirs = json.loads(out)["results"]
    assert ours["first_difference"] == -1 and theirs["accepted_length"] >= 1


def test_a_gguf_file_runs_as_it_is_stored(pair: Pair, script, fake, peers, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.Q8_0.gguf"
    script("write_gguf").convert(pair.directory / "target", "int8", path)
    (tmp_path / "prompts.json").write_bytes((pair.directory / "prompts.json").read_bytes())
    check = "options = json.loads(sys.argv[1])\nassert options['lookup'], options\n"
    entries = f"{fake('llama.cpp', check + WORKING)},transformers={sys.executable}"
    flags = ["--model", str(path), "--draft", "lookup", "--formats", ""]
    code, out, _ = peers("--peers", entries, *flags, "--json")
    report = json.loads(out)
    assert code == 0 and report["draft"] == "lookup"
    rows = [(r["engine"], r["format"]) for r in report["results"]]
    assert rows == [(OURS, "Q8_0"), ("llama.cpp", "Q8_0")]
    assert [f["engine"] for f in report["failures"]] == ["transformers"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a worker's module, and remove it from sys.modules afterwards."""
    monkeypatch.syspath_prepend(str(WORKERS))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(WORKERS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_workers_time_the_same_window_as_forerun(script, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine = FakeEngine(monkeypatch, TWO_REQUESTS)
    expected = timing.timed_run(fake_engine, [Work([7]), Work([8])], PARAMS, timing.PLAIN).speed
    watch = script("worker").Watch(2)
    now = 0.0
    for seconds, counts in TWO_REQUESTS:
        now += seconds
        watch.step(counts, now)
    answer = watch.answer([[], []])
    assert answer["decode_tokens"] / answer["decode_seconds"] == expected and answer["steps"] == 7


class FakeModel:
    """Replacement for llama.cpp's model whose next token is a function of the text.

    `wrong` of eight texts are continued wrongly, so that a draft model is right sometimes. Its
    cache holds half of each prompt already.
    """

    def __init__(self, wrong: int = 0) -> None:
        self.wrong, self.rows = wrong, 0

    def begin(self, prompts: list[list[int]], temperature: float = 0.0) -> list[int]:
        self.texts = [prompt[: len(prompt) // 2] for prompt in prompts]
        return [len(text) for text in self.texts]

    def read(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        found = []
        for token, position, sequence, wanted in rows:
            text = self.texts[sequence]
            assert position == len(text)
            text.append(token)
            found += [self.after(text)] if wanted else []
        self.rows += len(rows)
        return found

    def after(self, text: list[int]) -> int:
        mixed = sum((i + 1) * token for i, token in enumerate(text)) * 7919 % 1009
        return mixed + (1 if mixed % 8 < self.wrong else 0)

    def keep(self, sequence: int, length: int) -> None:
        assert length <= len(self.texts[sequence])
        del self.texts[sequence][length:]


class RepeatingModel(FakeModel):
    """Model that repeats the token of twelve positions ago, with a few exceptions."""

    def after(self, text: list[int]) -> int:
        return 500 + len(text) if len(text) % 17 == 0 or len(text) < 12 else text[-12]


@pytest.mark.parametrize("wrong", [0, 3, 8, None])
def test_the_llama_cpp_worker_is_lossless(wrong: int | None, script, monkeypatch) -> None:
    """This holds for every draft model and for lookup (None); each row is processed once."""
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    worker = object.__new__(script("with_llama_cpp").LlamaCpp)
    worker.target = FakeModel() if wrong is not None else RepeatingModel()
    worker.drafter = None if wrong is None else FakeModel(wrong)
    prompts = [[1, 2, 3], [4, 5], [6]]
    plain = worker.run(0, prompts, 60, 0.0)
    assert [len(output) for output in plain["outputs"]] == [60] * 3 and plain["steps"] == 180
    for depth in (1, 3, 10, 90):
        answer = worker.run(depth, prompts, 60, 0.0)
        assert answer["outputs"] == plain["outputs"]
        if wrong is None:
            assert answer["steps"] < 180 * (1 - 0.4 * depth / (depth + 1))
        elif wrong == 0:
            assert answer["steps"] == 3 * (1 + -(-59 // (depth + 1)))
        elif wrong == 8:
            assert answer["steps"] == 180


class FakeLlama(ModuleType):
    """Replacement for llama_cpp whose samplers draw from four tokens by the text and a counter."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__("llama_cpp")
        self.recurrent, self.freed = recurrent, 0
        self.texts: dict[int, list[int]] = {}
        self.seen: list[list[int]] = []  # the text behind each row of the last pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: SimpleNamespace()

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.seen = []
        for i in range(batch.n_tokens):
            text = self.texts.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(text)
            text.append(batch.token[i])
            self.seen.append(list(text))
        return 0

    def llama_memory_seq_rm(self, memory: Any, sequence: int, start: int, end: int) -> bool:
        if self.recurrent and start:
            return False
        del self.texts[sequence][start:]
        return True

    def llama_sampler_init_dist(self, seed: int) -> Any:
        return SimpleNamespace(draws=seed)

    def llama_sampler_chain_init(self, parameters: Any) -> Any:
        return SimpleNamespace(chain=[])

    def llama_sampler_chain_add(self, chain: Any, sampler: Any) -> None:
        chain.chain.append(sampler)

    def llama_sampler_free(self, chain: Any) -> None:
        self.freed += 1

    def llama_sampler_sample(self, chain: Any, context: Any, row: int) -> int:
        source = chain.chain[-1]
        source.draws += 1
        return hash((*self.seen[row], source.draws)) % 4


def llama_model(script: Any, monkeypatch: pytest.MonkeyPatch, recurrent: bool) -> tuple[Any, Any]:
    """Return (a model of the llama.cpp worker on a fake llama.cpp, the fake)."""
    fake = FakeLlama(recurrent)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    model = object.__new__(script("with_llama_cpp").Model)
    rows = {name: [0] * 99 for name in ("token", "pos", "logits", "n_seq_id")}
    model.batch = SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(99)], **rows)
    model.model = model.context = model.memory = None
    model.threads, model.length, model.sequences = 1, 99, 0
    model.held, model.samplers = [], []
    return model, fake


def test_the_llama_cpp_worker_draws_as_without_a_draft(script, monkeypatch) -> None:
    """Above temperature 0, a draft changes no random number and no token."""
    target, fake = llama_model(script, monkeypatch, recurrent=False)
    worker = object.__new__(script("with_llama_cpp").LlamaCpp)
    worker.target, worker.drafter = target, None
    prompts = [[1, 2, 3], [4, 5]]
    plain = worker.run(0, prompts, 40, 0.8)
    assert plain["steps"] == 80 and len(set(plain["outputs"][0])) > 1
    worker.drafter = FakeModel()
    monkeypatch.setattr(worker.drafter, "after", lambda text: len(text) % 4)
    drafted = worker.run(3, prompts, 40, 0.8)
    assert drafted["outputs"] == plain["outputs"] and drafted["steps"] < 80
    assert fake.freed == 2


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_llama_cpp_worker_keeps_what_prompts_share(
    recurrent: bool, script, monkeypatch
) -> None:
    """States that cannot go back are read anew; a draft on them fails in words."""
    model, fake = llama_model(script, monkeypatch, recurrent)
    assert model.begin([[1, 2, 3]], 0.8) == [0]
    model.read([(token, at, 0, at == 2) for at, token in enumerate([1, 2, 3])])
    assert model.begin([[1, 2, 3]]) == ([0] if recurrent else [2])
    model.read([(7, len(model.held[0]), 0, False)])
    assert fake.texts[0] == model.held[0] == ([7] if recurrent else [1, 2, 7])
    model.keep(0, len(model.held[0]))
    if recurrent:
        model.read([(8, 1, 0, False)])
        with pytest.raises(RuntimeError, match="cannot take tokens back"):
            model.keep(0, 1)


def test_steps_of_the_vllm_worker(script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of outputs does not matter; every depth has its own engine."""
    loaded: list[dict[str, Any]] = []

    class FakeVllm:
        """Gives every request two tokens a step, the last request first."""

        def __init__(self, arguments: dict[str, Any]) -> None:
            loaded.append(arguments)
            self.left: dict[str, list[int]] = {}

        @classmethod
        def from_engine_args(cls, arguments: dict[str, Any]) -> Any:
            return cls(arguments)

        def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
            first = prompt["prompt_token_ids"][0]
            self.left[name] = list(range(first, first + params.max_tokens))

        def has_unfinished_requests(self) -> bool:
            return any(self.left.values())

        def step(self) -> list[Any]:
            found = []
            for name in reversed([name for name, left in self.left.items() if left]):
                new, self.left[name] = self.left[name][:2], self.left[name][2:]
                output = SimpleNamespace(token_ids=new)
                found.append(SimpleNamespace(request_id=name, outputs=[output]))
            return found

    package: Any = ModuleType("vllm")
    package.__version__ = "1"
    package.EngineArgs, package.LLMEngine, package.SamplingParams = dict, FakeVllm, SimpleNamespace
    parameters: Any = ModuleType("vllm.sampling_params")
    parameters.RequestOutputKind = SimpleNamespace(DELTA=1)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    for name in ("CPU_KVCACHE_SPACE", "CPU_OMP_THREADS_BIND", "ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(f"VLLM_{name}", "")
    options = dict(model="m", format="bfloat16", draft="", lookup=True, device="cpu")
    worker = script("with_vllm").Vllm(options | {"context": 64, "requests": 2})
    for depth in (0, 0, 3):
        answer = worker.run(depth, [[10, 1], [20]], 5, 0.0)
        assert answer["outputs"] == [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
        assert answer["decode_tokens"] == 6 and answer["steps"] == 6
    assert [own["speculative_config"] for own in loaded] == [
        None,
        {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3},
    ]


def test_the_ngram_cache_drafts_likely_continuations(script) -> None:
    """The longest n-gram that was seen often enough decides, if one continuation is likely."""

    def draft(text: list[int], most: int = 3) -> list[int]:
        cache = script("ngram_cache").NgramCache()
        for end in range(len(text) + 1):
            cache.read(text[:end])
        return cache.draft(text, most)

    assert draft([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert draft([1, 2, 3, 4, 5, 1, 2, 3], 1) == [4]
    assert draft([1, 2, 3, 4, 9, 2, 3]) == []  # two tokens must be seen twice
    assert draft([8, 2, 3, 4, 9, 2, 3, 4, 7, 2, 3])[:1] == [4]
    assert draft([2, 3, 4, 9, 7, 3, 5, 8, 3]) == []  # half is not two thirds
    assert draft([1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2, 3])[:1] == [4]  # half is enough for three
    assert draft([]) == draft([1]) == draft([1, 2], 0) == []


def test_a_directory_is_written_completely_or_not_at_all(script, tmp_path: Path) -> None:
    path = tmp_path / "converted"
    with pytest.raises(ZeroDivisionError), script("worker").atomic_directory(path) as work:
        (work / "model").write_text("x")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with script("worker").atomic_directory(path) as work:
        (work / "model").write_text("x")
        assert not path.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["converted"]
    assert (path / "model").read_text() == "x"


def test_int8_checkpoints_for_vllm(script, tmp_path: Path, pair: Pair) -> None:
    """Matrices of layers are int8 with a scale a row, the rest is as it was."""
    write = script("write_int8")
    target, place = pair.directory / "target", tmp_path / "int8"
    write.convert(target, place)
    source = script("write_gguf").Checkpoint(target)
    stored: dict[str, torch.Tensor] = {}
    for path in place.glob("*.safetensors"):
        stored |= load_file(path)
    assert len(stored) > len(source.names)
    for name in source.names:
        expected, found = torch.from_numpy(source.read(name)), stored[name].float()
        if stored[name].dtype == torch.int8:
            scale = stored[f"{name}_scale"]
            assert scale.shape == (len(expected), 1)
            assert ((found * scale - expected).abs() <= 0.5001 * scale).all()
            assert (found.abs().amax(1) == write.LARGEST).all()
        else:
            assert not name.endswith(write.ROUNDED) and torch.equal(found, expected)
    config = json.loads((place / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    before = place.stat().st_mtime_ns
    write.convert(target, place)  # keeps what is there
    assert place.stat().st_mtime_ns == before and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_written_gguf_files_hold_all_tensors(form: str, script, tmp_path: Path, pair: Pair) -> None:
    """They have llama.cpp's names and the requested format, and are close to the originals."""
    gguf = pytest.importorskip("gguf")
    target = pair.directory / "target"
    script("write_gguf").convert(target, form, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    source = script("write_gguf").Checkpoint(target)
    assert len(reader.tensors) == len(source.names)
    assert reader.fields["llama.vocab_size"].contents() == 512
    (tensor,) = [t for t in reader.tensors if t.name == "blk.1.ffn_down.weight"]
    kind, error = {
        "float32": ("F32", 0),
        "bfloat16": ("BF16", 0),
        "int8": ("Q8_0", 0.01),
        "int4": ("Q4_0", 0.15),
    }[form]
    original = source.read("model.layers.1.mlp.down_proj.weight")
    read = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert tensor.tensor_type.name == kind and read.shape == original.shape
    assert np.abs(read - original).max() <= error * np.abs(original).max()
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_written_gguf_files_interleave_heads(script) -> None:
    """Rotating halves (Hugging Face) or neighbours (llama.cpp) gives equal attention."""
    pytest.importorskip("gguf")
    interleaved = script("write_gguf").interleaved
    rng = np.random.default_rng(0)
    heads, size = 4, 8
    config = {"num_attention_heads": heads, "num_key_value_heads": heads}
    weights = [rng.normal(size=(heads * size, 16)) for _ in range(2)]
    x = rng.normal(size=16)
    angles = 3 * 10000.0 ** (-np.arange(0, size, 2) / size)

    def pairs(vector: np.ndarray, halves: bool) -> np.ndarray:
        if halves:
            return vector.reshape(heads, 2, -1)
        return vector.reshape(heads, -1, 2).swapaxes(1, 2)

    def attention(names: tuple[str, str], halves: bool) -> np.ndarray:
        query, key = (
            interleaved(w, name, config) @ x for w, name in zip(weights, names, strict=True)
        )
        a, b = pairs(query, halves).swapaxes(0, 1)
        cos, sin = np.cos(angles), np.sin(angles)
        rotated = np.stack([a * cos - b * sin, a * sin + b * cos], 1)
        return (rotated * pairs(key, halves)).sum((1, 2))

    theirs = attention(("blk.0.attn_q.weight", "blk.0.attn_k.weight"), halves=False)
    assert np.allclose(attention(("q", "k"), halves=True), theirs)
    assert not np.allclose(attention(("q", "k"), halves=False), theirs)


def test_unsupported_models_are_not_written_as_gguf(script, tmp_path: Path, pair: Pair) -> None:
    pytest.importorskip("gguf")
    source = tmp_path / "model"
    source.mkdir()
    config = json.loads((pair.directory / "target/config.json").read_text())
    save_file({"a": np.zeros(2, np.float32)}, source / "model.safetensors")
    for change, message in (
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "scaled rotary"),
        ({"quantization_config": {}}, "quantised"),
        ({}, "no tensor model.embed_tokens.weight"),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            script("write_gguf").convert(source, "int8", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    place = script("worker").converted("f", str(source), "int8.gguf")
    save_file({"a": np.zeros(3, np.float32)}, source / "model.safetensors")
    assert place != script("worker").converted("f", str(source), "int8.gguf")


@pytest.mark.parametrize("has_ids", [True, False])
def test_the_server_worker_returns_ids_if_there_are_any(has_ids: bool) -> None:
    """Three chunks of six tokens, with their ids if the server gives them."""

    def stream(handler: Handler, body: dict[str, Any]) -> None:
        ids = ([1], [2, 3], [4, 5, 6])
        chunks = [chunk("x", token_ids=each) if has_ids else chunk("x") for each in ids]
        handler.stream(*chunks, usage(6), "[DONE]")

    version = {"/version": (200, '{"version": "7"}')}
    with faking(stream, models=["m"], pages=version) as fake:
        options = {"where": f"{fake.url}/v1/", "drafting": False, "threads": 1}
        worker = Worker("server", sys.executable, "with_server.py", "", options, 60)
        try:
            worker.load()
            assert worker.ready == Capabilities("7", 1 << 20, 0, False, True)
            outcome = worker.run(0, [[5, 6], [7]], 6, 0.5)
            assert outcome.outputs == ([[1, 2, 3, 4, 5, 6]] * 2 if has_ids else None)
            assert outcome.speed > 0
            assert sorted(body["prompt"] for body in fake.bodies) == [[5, 6], [7]]
            sent = fake.bodies[0]
            assert (sent["model"], sent["max_tokens"], sent["ignore_eos"]) == ("m", 6, True)
            assert sent["temperature"] == 0.5
            with pytest.raises(PeerError, match="made 6 tokens where 9 were asked for"):
                worker.run(0, [[5]], 9)
        finally:
            worker.close()


def test_workers_have_bounded_threads_and_no_pythonpath(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    environment = process._environment(3)
    assert "PYTHONPATH" not in environment and environment["OMP_NUM_THREADS"] == "3"
