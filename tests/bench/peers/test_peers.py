"""Other engines beside this one: what is asked of them and how it is counted, and that whatever
goes wrong there is one line here, leaves nothing behind and stops nobody else. Most workers here
are scripts that speak the protocol and run nothing; transformers is run for real, it is always
there."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from forerun import ConfigError
from forerun.bench.pair import Pair
from forerun.bench.peers import peers as module
from forerun.bench.peers import process as peer_process
from forerun.bench.peers.peers import Company, measure_peers, measure_prefill
from forerun.bench.peers.plan import ENGINES, STORED, Engine, Load, Plan, parse_peers
from forerun.bench.peers.process import SCRIPTS, Outcome, PeerError, Ready, Worker
from forerun.bench.peers.results import OURS, summarise
from forerun.cli.progress import nothing
from forerun.kernels import native
from forerun.measure import run as timing
from forerun.measure.choice import conversation, token_ids
from forerun.measure.run import Work
from forerun.measure.workloads import Task
from tests.bench.decode.test_sweep import PARAMS, FakeEngine
from tests.cli.test_main import run

pytestmark = [
    pytest.mark.usefixtures("steady"),
    pytest.mark.skipif(native.library() is None, reason="no native kernels"),
]
FAKE = """
import json, sys
def say(answer):
    print(json.dumps(answer), flush=True)
def ready():
    say({"ready": {"version": "9.9", "plain": 4, "speculative": 1, "depths": True}})
def answer(order, speed=100.0):
    outputs = [[prompt[0] + i for i in range(order["tokens"])] for prompt in order["prompts"]]
    say({"outputs": outputs, "decode_tokens": speed, "decode_seconds": 1.0, "prefill_seconds": 1.0,
         "steps": sum(map(len, outputs)) // (1 + order["depth"])})
"""
WELL = "ready()\nfor line in sys.stdin:\n    order = json.loads(line)\n    answer(order, 100.0 * (1 + order['depth']))\n"
BROKEN = {
    "dies while loading": ("sys.exit('no such model')", "ended with code 1: no such model"),
    "dies in a run": ("ready()\ninput()\nsys.exit(7)", "ended with code 7"),
    "hangs": ("ready()\ninput()\ninput()\ninput()", "no answer within 1 seconds: see --timeout"),
    "prints garbage": ("print('Loading weights')", "said 'Loading weights', which is no answer"),
    "prints other JSON": ("say({'hello': 1})", "which is no answer"),
    "gives half an answer": ("ready()\ninput()\nsay({'outputs': [[1]]})", "which is no answer"),
    "gives an answer without time": (
        "ready()\ninput()\nsay({'outputs': [], 'decode_tokens': 1, 'decode_seconds': 0, 'steps': 1})", "is no answer",
    ),
    "lacks its package": ("import no_such_engine", "No module named 'no_such_engine': run PYTHON -m pip install fake"),
    "says what failed": ("say({'error': 'ValueError: too large'})", "ValueError: too large"),
    "ends early": (
        "ready()\norder = json.loads(input())\norder['tokens'] -= 1\nanswer(order)\ninput()", "tokens where 8 each",
    ),
}  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Puts a script in the place of an engine; gives the entry for --peers."""

    def put(name: str, text: str) -> str:
        script = tmp_path / f"{name}.py"
        script.write_text(FAKE + text)
        monkeypatch.setitem(
            ENGINES, name, Engine(str(script), "fake", ("bfloat16", "int8", STORED))
        )
        return f"{name}={sys.executable}"

    return put


@pytest.fixture
def peers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """The verb on the tiny pair, quick unless told otherwise."""

    def call(*args: str) -> tuple[int, str, str]:
        models = ["--model", f"{pair.directory}/target", "--draft", f"model:{pair.directory}/draft"]
        short = [
            "--formats",
            "int8",
            "--depths",
            "2",
            "--tokens",
            "8",
            "--repeats",
            "1",
            "--threads",
            "1",
        ]
        return run(monkeypatch, capsys, "bench", "peers", *models, *short, *args)

    return call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Every worker that is started."""
    workers: list[Worker] = []
    begin = Worker.__init__

    def note(self: Worker, *args: Any) -> None:
        workers.append(self)
        begin(self, *args)

    monkeypatch.setattr(Worker, "__init__", note)
    return workers


def test_everything_is_reported(peers, fake, started: list[Worker]) -> None:
    """A row for each engine, format and number of requests; a peer that cannot draft for several
    does not."""
    entry = fake("llama.cpp", WELL)
    code, out, err = peers("--peers", entry, "--formats", "int8,bfloat16,int4", "--requests", "1,2", "--depths",
                           "auto,1,3", "--repeats", "2", "--json")  # fmt: skip
    report = json.loads(out)
    assert code == 0 and not err
    rows = [(r["engine"], r["format"], r["requests"]) for r in report["results"]]
    assert rows == [
        (e, f, n) for f in ("int8", "bfloat16") for n in (1, 2) for e in ("forerun", "llama.cpp")
    ]
    assert [f["format"] for f in report["failures"]] == ["int4"] and "int4" in report["failures"][
        0
    ]["why"]
    ours, theirs = report["results"][:2]
    assert set(ours["by_depth"]) == {"auto", "1", "3"} and set(theirs["by_depth"]) == {"1", "3"}
    assert ours["first_difference"] == -1 and ours["ours_over_plain"] is None
    assert (theirs["version"], theirs["plain"], theirs["speculative"], theirs["depth"]) == (
        "9.9",
        100.0,
        400.0,
        3,
    )
    assert (theirs["times_plain"], theirs["interval"], theirs["accepted_length"]) == (
        4.0,
        [4.0, 4.0],
        4.0,
    )
    assert theirs["first_difference"] == -1 and theirs["first_difference_from_ours"] is not None
    assert theirs["ours_over_plain"] == pytest.approx(ours["plain"] / 100, rel=1)
    several = report["results"][3]
    assert (
        several["plain"] == 100.0
        and several["speculative"] is several["depth"] is several["times_plain"] is None
    )
    assert report["bandwidth"] == [10.0, 10.0, 10.0]
    assert len(started) == 2 and all(worker.process.poll() is not None for worker in started)


def test_the_table_and_its_footer(peers, fake) -> None:
    code, out, err = peers(
        "--peers", f"{fake('llama.cpp', WELL)},{fake('openvino', 'sys.exit(3)')}"
    )
    lines = out.splitlines()
    assert code == 0 and "left out: openvino: ended with code 3" in err
    assert lines[0].split()[:4] == ["engine", "version", "format", "requests"]
    assert lines[1].split()[0] == "forerun" and lines[2].split()[:6] == [
        "llama.cpp",
        "9.9",
        "int8",
        "1",
        "100.0",
        "300.0",
    ]
    assert "read bandwidth 10.0 GB/s" in lines[-1]


@pytest.mark.parametrize("how", BROKEN)
def test_a_peer_that_fails_is_one_line_and_the_others_go_on(
    how: str, peers, fake, started: list[Worker]
) -> None:
    text, says = BROKEN[how]
    entries = f"{fake('openvino', text)},{fake('llama.cpp', WELL)}"
    code, out, err = peers("--peers", entries, "--timeout", "1" if how == "hangs" else "60")
    assert code == 0 and "Traceback" not in err + out
    (line,) = [line for line in err.splitlines() if line.startswith("left out")]
    assert (
        line.startswith("left out: openvino: ") and says.replace("PYTHON", sys.executable) in line
    )
    assert [row.split()[0] for row in out.splitlines()[1:3]] == ["forerun", "llama.cpp"]
    assert all(worker.process.poll() is not None for worker in started)


def test_when_nobody_could_run_the_verb_fails(peers, fake) -> None:
    code, out, err = peers(
        "--peers", f"{fake('openvino', 'sys.exit(3)')},{fake('llama.cpp', 'ready()')}", "--json"
    )
    assert (code, out) == (1, "")
    assert (
        err
        == "forerun: no other engine could run: openvino: ended with code 3; llama.cpp: ended with code 0\n"
    )


def test_an_interrupt_leaves_no_process_and_no_file(
    pair: Pair, fake, started: list[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake("llama.cpp", WELL)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))

    def interrupt(message: str, *_: float) -> None:
        if message.startswith("round"):
            assert [p for p in tmp_path.iterdir() if p.is_dir()] and started[
                0
            ].process.poll() is None
            raise KeyboardInterrupt

    plan = Plan({"llama.cpp": sys.executable}, ["int8"], depths=[1], tokens=4)
    with pytest.raises(KeyboardInterrupt):
        measure_peers(f"{pair.directory}/target", "off", plan, [Load("", 1, [[[5]]])], interrupt)
    assert started[0].process.poll() is not None and not [
        p for p in tmp_path.iterdir() if p.is_dir()
    ]


BAD = {
    "no peers": (["--peers", ","], "at least one peer"),
    "an unknown engine": (["--peers", "llamacpp=/bin/sh"], "did you mean 'llama.cpp'"),
    "an engine twice": (["--peers", "server=http://a,server=http://b"], "given twice"),
    "no Python": (["--peers", "llama.cpp=./nowhere"], "no program: write llama.cpp=PYTHON"),
    "nothing after the name": (["--peers", "transformers"], "write transformers=PYTHON"),
    "no URL": (["--peers", "server=localhost:8000"], "write server=http://HOST:PORT"),
    "an unknown format": (
        ["--peers", "llama.cpp=PYTHON", "--formats", "int5"],
        "there is no format 'int5'",
    ),
    "an unknown draft format": (
        ["--peers", "llama.cpp=PYTHON", "--draft-format", "x"],
        "no draft format 'x'",
    ),
    "an unknown device": (["--peers", "llama.cpp=PYTHON", "--device", "gpu"], "no device 'gpu'"),
    "an unknown depth": (["--peers", "llama.cpp=PYTHON", "--depths", "deep"], "depth='deep'"),
    "depth 0": (["--peers", "llama.cpp=PYTHON", "--depths", "0,1"], "depth 0 is plain"),
    "no requests": (["--peers", "llama.cpp=PYTHON", "--requests", "0"], "from 1 up"),
    "odd requests": (
        ["--peers", "llama.cpp=PYTHON", "--requests", "two"],
        "'two' is not a whole number",
    ),
    "too many requests": (
        ["--peers", "llama.cpp=PYTHON", "--requests", "999"],
        "999 are to run at once",
    ),
    "one token": (["--peers", "llama.cpp=PYTHON", "--tokens", "1"], "at least 2 tokens"),
    "over the context": (["--peers", "llama.cpp=PYTHON", "--tokens", "999"], "context of 256"),
    "no category": (
        ["--peers", "llama.cpp=PYTHON", "--categories", "chats"],
        "did you mean 'chat'",
    ),
    "prompts of nothing": (
        ["--peers", "llama.cpp=PYTHON", "--prefill", "0"],
        "from 1 up, such as 1000",
    ),
    "odd lengths": (
        ["--peers", "llama.cpp=PYTHON", "--prefill", "long"],
        "--prefill: 'long' is not a whole number",
    ),
    "prompts over the context": (
        ["--peers", "llama.cpp=PYTHON", "--prefill", "256"],
        "prompt of 256 tokens and 1 more",
    ),
    "a directory as stored": (
        ["--peers", "llama.cpp=PYTHON", "--formats", "as stored"],
        "is no GGUF file",
    ),
    "no rounds": (["--peers", "llama.cpp=PYTHON", "--repeats", "0"], "--repeats 0"),
    "no time": (["--peers", "llama.cpp=PYTHON", "--timeout", "nan"], "--timeout nan"),
    "threads of nonsense": (["--peers", "llama.cpp=PYTHON", "--threads", "-1"], "--threads -1"),
    "a draft without a model": (
        ["--peers", "llama.cpp=PYTHON", "--draft", "suffix"],
        "--draft model:PLACE, lookup or off",
    ),
    "a file for converted models": (
        ["--peers", "llama.cpp=PYTHON", "--converted", __file__],
        "cannot be a directory",
    ),
}


@pytest.mark.parametrize("args", BAD.values(), ids=BAD.keys())
def test_bad_input(peers, args: tuple[list[str], str]) -> None:
    given, says = args
    code, out, err = peers(*(text.replace("PYTHON", sys.executable) for text in given))
    assert (code, out) == (2, "") and "Traceback" not in err
    assert says in err and err.splitlines()[-1].startswith("forerun: ")


def test_parse_peers() -> None:
    entries = [f"transformers = {sys.executable}", "server=http://x:1/v1"]
    assert parse_peers(entries) == {"transformers": sys.executable, "server": "http://x:1/v1"}
    with pytest.raises(ConfigError, match="drafting-server needs a URL"):
        parse_peers(["drafting-server=/bin/sh"])


def test_help_is_quick() -> None:
    code = (
        "import sys; from forerun import cli; sys.argv = ['forerun', 'bench', 'peers', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "forerun bench peers --" in done.stdout and "--json" in done.stdout


def test_rounds_are_fair() -> None:
    """Each round runs everything once on the same prompts, starting with another; who fails is not
    asked again."""
    log: list[tuple[str, int, int, int]] = []

    def player(name: str, fails: int = 99) -> SimpleNamespace:
        def go(depth: int, prompts: list, tokens: int) -> Outcome:
            log.append((name, depth, prompts[0][0], tokens))
            if len([entry for entry in log if entry[0] == name]) > fails:
                raise PeerError("it broke")
            return Outcome(1.0, [[1]], None)

        return SimpleNamespace(name=name, ready=Ready("1", 9, 9, True), run=go)

    company, bandwidths = Company([player(OURS), player("a"), player("b", fails=3)]), []
    plan = Plan({"a": "x", "b": "x"}, depths=["auto", 3], tokens=100, repeats=3)
    runs = module.measure_decoding(company, Load("", 1, [[[5]], [[6]]]), plan, bandwidths, nothing)
    everything = [(OURS, 0), (OURS, "auto"), (OURS, 3), ("a", 0), ("a", 3), ("b", 0), ("b", 3)]
    assert sorted(log[:7], key=str) == sorted([(*arm, 6, 64) for arm in everything], key=str)
    rounds = [log[7:14], log[14:19], log[19:24]]
    assert [{prompt for _, _, prompt, _ in entries} for entries in rounds] == [{5}, {6}, {5}]
    assert [entries[0][:2] for entries in rounds] == everything[:3]
    assert all(tokens == 100 for entries in rounds for *_, tokens in entries)
    assert [str(failure) for failure in company.failures] == ["b: it broke"]
    assert [player.name for player in company.players] == [OURS, "a"]
    assert list(runs) == everything[:5] and all(len(outcomes) == 3 for outcomes in runs.values())
    assert len(bandwidths) == 5 * 3 + 1


def test_reading_prompts_is_timed_in_turn_too() -> None:
    """Each round reads prompts of the length that nobody knows the beginning of; ratios are made
    within rounds."""
    log: list[tuple[str, list[int]]] = []

    def player(name: str, seconds: float, fails: int = 99, plain: int = 9) -> SimpleNamespace:
        def go(depth: int, prompts: list, tokens: int) -> Outcome:
            log.append((name, prompts[0]))
            assert (depth, len(prompts), tokens) == (0, 1, 1)
            if len([entry for entry in log if entry[0] == name]) > fails:
                raise PeerError("it broke")
            slow = 3 if len(log) > 6 else 1  # the machine, from the second round on
            return Outcome(0.0, None, None, seconds * slow)

        return SimpleNamespace(name=name, ready=Ready("1", plain, 9, True), run=go)

    players = [
        player(OURS, 1.0),
        player("a", 2.0),
        player("b", 1.0, fails=1),
        player("drafting-server", 1.0, plain=0),
    ]
    company = Company(players)
    texts = [[1, 2, 3], [4, 5], [6, 7]]
    ours, theirs, *more = measure_prefill("int8", company, [10, 4], texts, 3, nothing)
    assert (ours.tokens, ours.first_token, ours.speed, ours.ours_over) == (10, 3.0, 10 / 3, None)
    assert (theirs.engine, theirs.first_token, theirs.ours_over) == ("a", 6.0, 2.0)
    assert [(row.engine, row.tokens, row.ours_over) for row in more] == [
        (OURS, 4, None),
        ("a", 4, 2.0),
    ]
    assert [str(failure) for failure in company.failures] == ["b: it broke"]
    assert [name for name, _ in log[:7]] == ["b", OURS, "a", OURS, "a", "b", "a"] and len(
        log
    ) == 2 + 2 * 8
    prompts = [prompt for name, prompt in log if name == "a"]
    assert (
        prompts[0] == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
        and prompts[1][:3] == [2, 3, 4]
        and prompts[4] == [5, 6, 7, 1]
    )
    assert prompts == [prompt for name, prompt in log if name == OURS]


@pytest.fixture
def gguf(tmp_path: Path, pair: Pair, script) -> Path:
    """The target of the pair as a GGUF file, with its prompts in two categories beside it."""
    pytest.importorskip("gguf")
    file = tmp_path / "tiny.Q8_0.gguf"
    script("write_gguf").convert(pair.directory / "target", "int8", file)
    found = json.loads((pair.directory / "prompts.json").read_text())["prompts"]
    tasks = [{"prompt": ids, "category": ("edit", "chat")[i % 2]} for i, ids in enumerate(found)]
    (tmp_path / "prompts.json").write_text(json.dumps(tasks))
    return file


LOOKS = (
    "options = json.loads(sys.argv[1])\n"
    "assert options['model'].endswith('.Q8_0.gguf') and options['lookup'] and not options['draft'], options\n"
)


def test_a_gguf_file_goes_as_it_is_to_those_that_run_it(gguf: Path, peers, fake) -> None:
    """One format, drafts from the text, a row for each category, and a line about who does not run
    it."""
    entries = (
        f"{fake('llama.cpp', LOOKS + WELL)},transformers={sys.executable},openvino={sys.executable}"
    )
    options = ["--model", str(gguf), "--draft", "lookup", "--formats", "", "--prefill", "40"]
    code, out, err = peers("--peers", entries, *options, "--json")
    report = json.loads(out)
    assert code == 0 and report["draft"] == "lookup"
    rows = [(r["engine"], r["format"], r["category"]) for r in report["results"]]
    assert rows == [
        (engine, "Q8_0", category)
        for category in ("edit", "chat")
        for engine in (OURS, "llama.cpp")
    ]
    assert all(row["first_difference"] == -1 and row["speculative"] for row in report["results"])
    (ours, theirs) = report["prefills"]
    assert (theirs["tokens"], theirs["speed"], theirs["first_token"]) == (40, 40.0, 1.0)
    assert ours["speed"] > 0 and theirs["ours_over"] == pytest.approx(ours["speed"] / 40, rel=0.01)
    assert [failure["engine"] for failure in report["failures"]] == ["transformers", "openvino"]
    assert all("GGUF file" in failure["why"] for failure in report["failures"])
    code, out, err = peers("--peers", entries, *options)
    assert "category" in out.splitlines()[0] and "first token s" in out.splitlines()[5]
    assert "drafts looked up in the text (forerun: suffix)" in out and err.count("left out: ") == 2
    code, out, err = peers("--peers", entries, "--model", str(gguf))
    assert (code, out) == (
        2,
        "",
    ) and "is a GGUF file, which runs as it is stored, not in int8" in err


def test_what_suits_a_model_is_the_default(gguf: Path, pair: Pair) -> None:
    """Nobody has to say how a GGUF file is run."""
    from forerun.bench.peers.plan import LOOKUP_DEPTHS, find_models

    models = find_models(str(gguf), None)
    plan = Plan({"a": "x"}).settled(models)
    assert (models.draft, models.ours, plan.formats, plan.depths) == (
        "lookup",
        "suffix",
        (STORED,),
        LOOKUP_DEPTHS,
    )
    models = find_models(str(pair.directory / "target"), None)
    plan = Plan({"a": "x"}).settled(models)
    assert (models.draft, models.ours, plan.formats[0], plan.depths[-1]) == (
        "off",
        "off",
        "bfloat16",
        7,
    )
    assert find_models(str(gguf), f"model:{gguf}").ours == f"model:{gguf}"


def test_a_gguf_file_may_draft_for_another(gguf: Path, peers, fake) -> None:
    text = (
        LOOKS.replace(
            "options['lookup'] and not options['draft']", "options['draft'].endswith('.gguf')"
        )
        + WELL
    )
    code, out, _ = peers("--peers", fake("llama.cpp", text), "--model", str(gguf), "--draft", f"model:{gguf}",
                         "--formats", "as stored", "--json")  # fmt: skip
    report = json.loads(out)
    ours = report["results"][0]
    assert (
        code == 0
        and report["draft_format"] == "as stored"
        and ours["accepted_length"] == 2
        and ours["first_difference"] == -1
    )


def test_tasks_are_put_to_a_model_that_chats_in_its_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talks = SimpleNamespace(
        has_chat_template=True, encode=lambda text: ["text", text], chat=lambda said: ["chat", said]
    )
    monkeypatch.setattr("forerun.load.load_tokenizer", lambda _: talks)
    monkeypatch.setattr("forerun.models.hub.find_model", lambda _: None)
    said = "User: Why?\nAnd how?\nAssistant: So.\nUser: Really?\nAssistant:"
    turns = [("user", "Why?\nAnd how?"), ("assistant", "So."), ("user", "Really?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tasks = [Task("1", "edit", "Go on"), Task("2", "chat", said), Task("3", "completion", "Go on"),
             Task("4", "file", said), Task("5", "chat", [7]), Task("6", "chat", messages)]  # fmt: skip
    assert token_ids("m", tasks) == [
        ["chat", [{"role": "user", "content": "Go on"}]], ["chat", messages], ["text", "Go on"], ["text", said], [7],
        ["chat", messages],
    ]  # fmt: skip
    talks.has_chat_template = False
    assert token_ids("m", tasks[:2]) == [["text", "Go on"], ["text", said]]
    for text in (
        "Look: \n" + said,
        said + " Yes.",
        said[len("User: Why?") :].strip(),
        "User: Assistant:",
        "User: a",
    ):
        assert conversation(text) == [{"role": "user", "content": text}]


def test_ratios_are_made_within_rounds_and_texts_compared() -> None:
    """The machine became twice as fast in round 2: no ratio shows it. Texts are told apart from the
    first token on."""

    def outcomes(speed: float, *outputs: list[int] | None) -> list[Outcome]:
        return [Outcome(speed * (1, 2, 1)[i], o and [o], 2.0) for i, o in enumerate(outputs)]

    text, other = [1, 2, 3], [1, 2, 4]
    ready = Ready("1", 9, 9, True)
    players = [SimpleNamespace(name=name, ready=ready) for name in (OURS, "a")]
    players.append(SimpleNamespace(name="drafting-server", ready=Ready("", 0, 9, False)))
    runs = {
        (OURS, 0): outcomes(10, text, text, text), (OURS, "auto"): outcomes(30, text, text, text),
        ("a", 0): outcomes(5, text, text, other), ("a", 2): outcomes(4, text, other, other),
        ("a", 4): outcomes(3, other, other, other), ("drafting-server", 1): outcomes(15, None, None, None),
    }  # fmt: skip
    ours, a, server = summarise("int8", 1, players, runs)
    assert (ours.times_plain, ours.depth, ours.first_difference) == (3.0, "auto", -1)
    assert (a.plain, a.speculative, a.depth, a.times_plain) == (5.0, 4.0, 2, 0.8)
    assert (a.first_difference, a.first_difference_from_ours) == (2, 2)
    assert (
        a.shared_with_ours == pytest.approx((1 + 1 + 2 / 3) / 3) and ours.shared_with_ours is None
    )
    assert (a.ours_over_plain, a.ours_over_speculative, a.ours_over_best) == (2.0, 7.5, 6.0)
    assert (server.plain, server.speculative, server.depth, server.by_depth) == (
        None,
        15.0,
        None,
        {},
    )
    assert (server.ours_over_plain, server.ours_over_speculative, server.ours_over_best) == (
        None,
        2.0,
        2.0,
    )
    assert (
        server.first_difference_from_ours is server.shared_with_ours is server.times_plain is None
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a worker's module, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_workers_time_what_decode_times(script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, told to both clocks, give the same speed."""
    steps = [(1.0, {0: 1}), (1.0, {0: 9, 1: 1}), (1.0, {0: 1, 1: 1}), (1.0, {1: 2}), (2.0, {1: 2})]
    expected = timing.timed_run(
        FakeEngine(monkeypatch, steps), [Work([7]), Work([8])], PARAMS, timing.PLAIN
    ).speed
    watch, now = script("worker").Watch(2), 0.0
    for seconds, counts in steps:
        now += seconds
        watch.step(counts, now)
    answer = watch.answer([[], []])
    assert answer["decode_tokens"] / answer["decode_seconds"] == expected == 6 / 4
    assert answer["steps"] == 7


def test_transformers_for_real(peers, started: list[Worker]) -> None:
    """In float32 its text is ours, plain and assisted; accepted lengths agree as the depth does."""
    code, out, _ = peers("--peers", f"transformers={sys.executable}", "--formats", "float32", "--draft-format",
                           "bfloat16", "--tokens", "12", "--depths", "3", "--requests", "1,2", "--json")  # fmt: skip
    report = json.loads(out)
    assert code == 0 and not report["failures"]
    ours, alone, _, together = report["results"]
    assert alone["first_difference"] == alone["first_difference_from_ours"] == -1
    assert together["first_difference_from_ours"] == -1 and together["speculative"] is None
    assert (
        alone["accepted_length"] == pytest.approx(ours["accepted_length"], rel=0.4)
        and alone["plain"] > 0
    )


def test_transformers_looks_up_for_real(peers) -> None:
    code, out, _ = peers("--peers", f"transformers={sys.executable}", "--formats", "float32", "--draft", "lookup",
                         "--tokens", "24", "--depths", "4", "--json")  # fmt: skip
    report = json.loads(out)
    assert code == 0 and not report["failures"]
    ours, theirs = report["results"]
    assert ours["speculative"] and theirs["speculative"] and theirs["accepted_length"] >= 1
    assert (
        ours["first_difference"]
        == theirs["first_difference"]
        == theirs["first_difference_from_ours"]
        == -1
    )


class Memory:
    """In the place of llama.cpp's model: the next token is a function of all tokens before, and
    every row has to come at its position. `wrong` of eight texts are guessed wrongly, so that a
    draft model is sometimes right."""

    def __init__(self, wrong: int = 0) -> None:
        self.wrong, self.rows = wrong, 0

    def begin(self, sequences: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(sequences)]

    def read(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        found = []
        for token, position, sequence, wanted in rows:
            text = self.texts[sequence]
            assert position == len(text), "a row at the wrong place"
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


@pytest.mark.parametrize("wrong", [0, 3, 8])
def test_the_loop_of_llama_cpp(wrong: int, script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the draft model guesses and however many run, the text is the target's; each row is
    read once."""
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    engine = object.__new__(script("with_llama_cpp").LlamaCpp)
    engine.target, engine.drafter = Memory(), Memory(wrong)
    prompts = [[1, 2, 3], [4, 5], [6]]
    plain = engine.run(0, prompts, 20)
    assert [len(output) for output in plain["outputs"]] == [20] * 3 and plain["steps"] == 60
    for depth in (1, 2, 5, 30):
        engine.drafter.rows = 0
        answer = engine.run(depth, prompts, 20)
        assert answer["outputs"] == plain["outputs"]
        if wrong == 0:
            assert (
                answer["steps"] == 3 * (1 + -(-19 // (depth + 1))) and engine.drafter.rows <= 6 + 60
            )
        elif wrong == 8:
            assert answer["steps"] == 60


class Refrain(Memory):
    """A target that says what it said twelve tokens ago, with a slip now and then."""

    def after(self, text: list[int]) -> int:
        return 500 + len(text) if len(text) % 17 == 0 or len(text) < 12 else text[-12]


@pytest.mark.parametrize("target", [Memory, Refrain])
def test_lookup_of_llama_cpp(target: type[Memory], script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found in the text, the text is the target's; one that repeats itself takes fewer
    passes."""
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    engine = object.__new__(script("with_llama_cpp").LlamaCpp)
    engine.target, engine.drafter = target(), None
    prompts = [[1, 2, 3], [4, 5], [6]]
    plain = engine.run(0, prompts, 60)
    assert plain["steps"] == 180
    for depth in (1, 3, 10, 90):
        answer = engine.run(depth, prompts, 60)
        assert answer["outputs"] == plain["outputs"]
        assert target is Memory or answer["steps"] < 180 * (1 - 0.4 * depth / (depth + 1))


def test_the_cache_of_n_grams(script) -> None:
    """The longest n-gram that was seen often enough decides, if it mostly goes on in one way."""

    def guess(text: list[int], most: int = 3) -> list[int]:
        cache = script("ngram_cache").NgramCache()
        for end in range(len(text) + 1):  # token by token is as good as at once
            cache.read(text[:end])
        return cache.draft(text, most)

    assert guess([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1] and guess([1, 2, 3, 4, 5, 1, 2, 3], 1) == [
        4
    ]
    assert guess([1, 2, 3, 4, 9, 2, 3]) == [], "two tokens have to be seen twice"
    assert guess([8, 2, 3, 4, 9, 2, 3, 4, 7, 2, 3])[:1] == [4]
    assert guess([2, 3, 4, 9, 7, 3, 5, 8, 3]) == [], "half is not two thirds"
    assert guess([1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2, 3])[:1] == [4], "half is enough for three"
    assert guess([]) == guess([1]) == guess([1, 2], 0) == []


def test_the_checkpoint_reader(script, tmp_path: Path, pair: Pair) -> None:
    checkpoint = script("write_gguf").Checkpoint(pair.directory / "target")
    import torch
    from safetensors.torch import load_file as load_torch

    for name, tensor in load_torch(pair.directory / "target" / "model.safetensors").items():
        assert torch.equal(torch.from_numpy(checkpoint.read(name)), tensor.float())
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.arange(3, dtype=np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a is stored as I8"):
        script("write_gguf").Checkpoint(tmp_path).read("a")
    with pytest.raises(ValueError, match="no tensor b"):
        script("write_gguf").Checkpoint(tmp_path).read("b")


def test_converted_files_belong_to_one_state_of_a_checkpoint(script, tmp_path: Path) -> None:
    place = script("worker").converted
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    first = place("f", str(tmp_path), "int8.gguf")
    assert first == place("f", str(tmp_path), "int8.gguf") and first.name.endswith("-int8.gguf")
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    assert first != place("f", str(tmp_path), "int8.gguf")


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_gguf(form: str, script, tmp_path: Path, pair: Pair) -> None:
    """Every tensor is there under llama.cpp's name, in the format asked for and near its value."""
    gguf = pytest.importorskip("gguf")
    convert, target = script("write_gguf").convert, pair.directory / "target"
    convert(target, form, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    source = script("write_gguf").Checkpoint(target)
    assert len(reader.tensors) == len(source.names)
    assert reader.fields["llama.vocab_size"].contents() == 512
    kinds = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
    for tensor in reader.tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            assert tensor.tensor_type.name == kinds[form]
            original = source.read("model.layers.1.mlp.down_proj.weight")
            read = gguf.dequantize(tensor.data, tensor.tensor_type)
            bound = {"float32": 0, "bfloat16": 0, "int8": 0.01, "int4": 0.15}[form] * np.abs(
                original
            ).max()
            assert read.shape == original.shape and np.abs(read - original).max() <= bound
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_gguf_interleaves_heads_as_llama_cpp_rotates(script) -> None:
    """Rotating halves (Hugging Face) and rotating neighbours (llama.cpp) of the converted rows give
    one attention."""
    pytest.importorskip("gguf")
    interleaved = script("write_gguf").interleaved
    random, heads, size = np.random.default_rng(0), 4, 8
    config = {"num_attention_heads": heads, "num_key_value_heads": heads}
    weights = [random.normal(size=(heads * size, 16)) for _ in range(2)]
    angles = 3 * 10000.0 ** (-np.arange(0, size, 2) / size)
    x = random.normal(size=16)

    def turned(vector: np.ndarray, halves: bool) -> np.ndarray:
        parts = (
            vector.reshape(heads, 2, -1) if halves else vector.reshape(heads, -1, 2).swapaxes(1, 2)
        )
        a, b = parts[:, 0], parts[:, 1]
        return np.stack(
            [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], 1
        )

    def attention(names: tuple[str, str], halves: bool) -> np.ndarray:
        query, key = (
            interleaved(w, name, config) @ x for w, name in zip(weights, names, strict=True)
        )
        return (turned(query, halves) * key.reshape(heads, 2, -1) if halves else
                turned(query, halves) * key.reshape(heads, -1, 2).swapaxes(1, 2)).sum((1, 2))  # fmt: skip

    theirs = attention(("blk.0.attn_q.weight", "blk.0.attn_k.weight"), halves=False)
    assert np.allclose(attention(("q", "k"), halves=True), theirs)
    assert not np.allclose(attention(("q", "k"), halves=False), theirs)


def test_gguf_is_whole_or_absent_and_refuses_what_it_does_not_know(
    script, tmp_path: Path, pair: Pair
) -> None:
    pytest.importorskip("gguf")
    convert, source = script("write_gguf").convert, tmp_path / "model"
    source.mkdir()
    config = json.loads((pair.directory / "target/config.json").read_text())
    for change, says in (
        ({"model_type": "qwen3"}, "'qwen3'"), ({"rope_scaling": {"rope_type": "llama3"}}, "scaled rotary"),
        ({"quantization_config": {}}, "quantised"), ({}, "no tensor model.embed_tokens.weight"),
    ):  # fmt: skip
        (source / "config.json").write_text(json.dumps(config | change))
        save_file({"a": np.zeros(2, np.float32)}, source / "model.safetensors")
        with pytest.raises(ValueError, match=says):
            convert(source, "int8", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Completions(BaseHTTPRequestHandler):
    """A server of one model that streams three pieces an answer; `tells` whether it says which
    tokens they hold."""

    tells = True
    asked: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        answers = {"/v1/models": {"data": [{"id": "m"}]}, "/version": {"version": "7"}}
        self._send(answers.get(self.path, {}), 200 if self.path in answers else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        pieces = [[1], [2, 3], [4, 5, 6]]
        for piece in pieces:
            ids = {"token_ids": piece} if self.tells else {}
            self._event({"choices": [{"index": 0, "text": "x", **ids}]})
        self._event({"choices": [], "usage": {"completion_tokens": 6}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _send(self, data: dict[str, Any], status: int) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())


@pytest.fixture
def url() -> Iterator[str]:
    Completions.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("tells", [True, False])
def test_a_server(tells: bool, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Completions, "tells", tells)
    options = {"where": f"{url}/v1/", "drafting": False, "threads": 1}
    worker = Worker("server", sys.executable, "with_server.py", "", options, 60)
    try:
        worker.load()
        assert worker.ready == Ready("7", 1 << 20, 0, False)
        outcome = worker.run(0, [[5, 6], [7]], 6)
        assert (
            outcome.outputs == ([[1, 2, 3, 4, 5, 6]] * 2 if tells else None) and outcome.speed > 0
        )
        assert sorted(body["prompt"] for body in Completions.asked) == [[5, 6], [7]]
        sent = Completions.asked[0]
        assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["ignore_eos"]) == (
            "m",
            6,
            0,
            True,
        )
        with pytest.raises(PeerError, match="made 6 tokens where 9 were asked for"):
            worker.run(0, [[5]], 9)
    finally:
        worker.close()


def test_no_server(peers, url: str) -> None:
    code, _, err = peers("--peers", "drafting-server=http://127.0.0.1:9")
    assert code == 1 and "there is no server at http://127.0.0.1:9" in err
    code, _, err = peers("--peers", f"server={url}/nothing/there")
    assert code == 1 and "/nothing/there/v1/models answers 404" in err and "Traceback" not in err


def test_workers_get_the_threads_and_none_of_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    given = peer_process._environment(3)
    assert "PYTHONPATH" not in given and (given["OMP_NUM_THREADS"], given["OMP_WAIT_POLICY"]) == (
        "3",
        "passive",
    )
