"""The command line: output and exit codes, errors of one line, flags and their aliases, quick help."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forerun.cli import main as cli
from forerun.cli.flags import ALIASES
from forerun.models.local import is_model_name
from tests import tiny
from tests.forked import Process

MODEL = ["--model", str(tiny.repetitive())]
SMALL = [*MODEL, "--max-tokens", "8", "--kv-tokens", "2048"]


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    """Run one command in this process; return the exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["forerun", *args])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.fixture
def forerun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: run(monkeypatch, capsys, *args)


def test_generate_prints_text_and_a_summary(forerun) -> None:
    code, out, err = forerun("generate", "def add(a, b):\n", *SMALL)
    assert code == 0 and out.strip()
    assert " · context " in err and " per pass" in err and len(err.splitlines()) == 1


@pytest.mark.default_model
def test_generate_uses_the_default_model(forerun) -> None:
    """Sensible answers show that weights and tokenizer of the default model are read correctly."""
    flags = ["--json", "--temperature", "0", "--kv-tokens", "2048"]
    code, out, err = forerun(
        "generate", "The capital of France is", "--raw", "--max-tokens", "4", *flags
    )
    assert code == 0 and not err and "Paris" in json.loads(out)["text"]
    code, out, _ = forerun(
        "generate", "What is the capital of France?", "--max-tokens", "20", *flags
    )
    answer = json.loads(out)
    assert code == 0
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == "The capital of France is Paris."


def test_json_is_one_object_and_nothing_else(forerun) -> None:
    words = ["generate", "def add(a, b):\n", "--json", "-t", "0", *SMALL]
    code, out, err = forerun(*words, "--logprobs", "2", "--depth", "3")
    answer = json.loads(out)
    assert code == 0 and not err
    assert len(answer["token_ids"]) == 8 and answer["finish_reason"] == "length"
    assert answer["stats"]["completion_tokens"] == 8 and len(answer["logprobs"]) == 8
    plain = json.loads(forerun(*words, "--draft", "off")[1])
    assert plain["token_ids"] == answer["token_ids"]


def test_n_prints_one_line_of_json_each(forerun) -> None:
    _, out, _ = forerun("generate", "x = ", "--json", "--n", "3", "-t", "1", "--seed", "4", *SMALL)
    assert len({json.loads(line)["seed"] for line in out.splitlines()}) == 3


def test_json_schema_as_text_or_file_and_regex(forerun, tmp_path: Path) -> None:
    properties = '{"a": {"enum": ["x", "yy"]}}'
    schema = f'{{"type": "object", "properties": {properties}, "required": ["a"], "additionalProperties": false}}'
    file = tmp_path / "schema.json"
    file.write_text(schema)
    for given in (schema, str(file)):
        flags = ["--json", "--json-schema", given, "--kv-tokens", "2048", *MODEL]
        answer = json.loads(forerun("generate", "a = ", *flags)[1])
        assert answer["finish_reason"] == "stop" and json.loads(answer["text"])["a"] in ("x", "yy")
    assert forerun("generate", "a = ", "--regex", "[0-9]{3}", *SMALL)[1].strip().isdigit()


def test_prompt_from_stdin(forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument - is optional; the last newline of a file is not part of the prompt."""
    found = []
    for end, given in (("", ["-"]), ("\n", []), ("\n\n", [])):
        monkeypatch.setattr(sys, "stdin", io.StringIO("def add(a, b):" + end))
        answer = json.loads(forerun("generate", *given, "--json", *SMALL)[1])
        found.append(answer["stats"]["prompt_tokens"])
    assert found[0] == found[1] > 3 and found[2] == found[0] + 1


def test_generation_config_sets_absent_parameters(forerun, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.repetitive(), model)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 11, "eos_token_id": 2}
    (model / "generation_config.json").write_text(json.dumps(settings))
    small = ["generate", "ab", "--json", "--model", str(model), "-n", "2", "--kv-tokens", "2048"]
    used = json.loads(forerun(*small)[1])["sampling"]
    assert used["temperature"] == 0.7 and used["top_k"] == 11 and used["top_p"] == 0.95
    used = json.loads(forerun(*small, "--temperature", "0")[1])["sampling"]
    assert used["temperature"] == 0.0 and used["top_k"] == 11


def test_the_prompt_of_a_chat_model_is_put_into_its_template(forerun, tmp_path: Path) -> None:
    """So is --system, which needs a template; --raw continues the prompt as text."""
    model = tmp_path / "chat"
    shutil.copytree(tiny.repetitive(), model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    )
    small = ["--json", "--model", str(model), "--max-tokens", "2", "--kv-tokens", "2048"]

    def read(*given: str) -> int:
        return json.loads(forerun("generate", *given, *small)[1])["stats"]["prompt_tokens"]

    assert read("ab") == read("<user>ab:", "--raw") != read("ab", "--raw")
    assert read("ab", "--system", "cd") == read("<system>cd<user>ab:", "--raw")
    for flags, why in ((["--raw", *small], "contradict"), (SMALL, "no chat template")):
        code, _, err = forerun("generate", "ab", "--system", "cd", *flags)
        assert code == 2 and why in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "stdin",
    [io.StringIO("ok \udcff\udcfe"), io.TextIOWrapper(io.BytesIO(b"ok \xff"), "utf-8")],
    ids=["usual locale", "strict locale"],
)
def test_invalid_utf8_on_stdin_is_reported_in_one_line(
    forerun, monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOBase
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = forerun("generate", "-", *SMALL)
    assert (code, out) == (2, "") and "Unicode" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("raised", ["raise ImportError('libfoo.so')", "import nothing_of_the_kind"])
def test_broken_package_is_named_without_a_traceback(tmp_path: Path, raised: str) -> None:
    (tmp_path / "uvicorn.py").write_text(raised)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    command = [sys.executable, "-m", "forerun", "serve", *MODEL]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert re.search("uvicorn.*libfoo|nothing_of_the_kind", found.stderr), found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_without_a_traceback() -> None:
    with open("/dev/full", "w") as full, tempfile.TemporaryFile("w+") as errors:
        words = ["generate", "x = 1", "--max-tokens", "8", *MODEL]
        process = Process(words, 0, full.fileno(), errors.fileno(), {**os.environ})
        assert process.wait(60) == 1
        errors.seek(0)
        output = errors.read()
    assert "No space left" in output and "Traceback" not in output


BAD = {
    "no such path": (["--model", "./nowhere"], "no directory or file ./nowhere"),
    "a file": (["--model", __file__], "is a file"),
    "a folder without a model": (["--model", str(Path(__file__).parent)], "no config.json"),
    "no Hub id": (["--model", "a b/c d"], "a b/c d"),
    "unknown draft": (["--draft", "ngrm"], "did you mean 'ngram'"),
    "draft without a model": (["--draft", "model"], "model:DIRECTORY"),
    "invalid draft model": (["--draft", "model:./nowhere"], "no directory"),
    "unknown rule": (["--rule", "mach"], "did you mean 'match'"),
    "unknown dtype": (["--dtype", "float23"], "did you mean 'float32'"),
    "unknown device": (["--device", "gpu"], "device"),
    "depth": (["--depth", "many"], "--depth many is out of range"),
    "draft threshold": (
        ["--draft-threshold", "1.5"],
        "--draft-threshold 1.5 is out of range: give a number",
    ),
    "width of a chain rule": (["--rule", "block", "--width", "2"], "--width 2"),
    "context": (["--context", "100000"], f"at most {tiny.LONG_CONTEXT}"),
    "temperature": (["--temperature", "-1"], "--temperature -1.0 is out of range"),
    "top-p": (["--top-p", "0"], "--top-p 0.0 is out of range"),
    "nan": (["--temperature", "nan"], "--temperature nan"),
    "contradiction": (
        ["--min-tokens", "9", "--max-tokens", "3"],
        "--min-tokens 9 is over --max-tokens 3",
    ),
    "logit bias": (["--logit-bias", "42=-5", "--logit-bias", "4:1"], "'4:1' is not ID=AMOUNT"),
    "token id outside of the vocabulary": (["--logit-bias", "99999=1"], "token id 99999"),
    "no schema": (["--json-schema", "nowhere.json"], "neither a JSON object nor a text file"),
    "a broken schema": (["--json-schema", "{"], "not valid JSON"),
    "a wrong schema": (["--json-schema", '{"type": "strin"}'], "grammar cannot be used"),
    "a broken regex": (["--regex", "[a"], "regex"),
    "two grammars": (["--regex", "a", "--json-schema", "{}"], "contradict"),
    "unknown flag": (["--temprature", "1"], "--temperature"),
    "not a number": (["--max-tokens", "ten"], "--max-tokens"),
}


@pytest.mark.parametrize("args", BAD.values(), ids=BAD.keys())
def test_bad_input(forerun, args: tuple[list[str], str]) -> None:
    flags, message = args
    model = [] if "--model" in flags else MODEL
    code, out, err = forerun("generate", "def f():", *model, *flags)
    assert code == 2 and out == "" and "Traceback" not in err
    assert message in err and err.startswith("forerun: ") and len(err.splitlines()) == 1


def test_a_lossy_rule_prints_a_warning(forerun) -> None:
    assert "lossy" in forerun("generate", "x = 1", "--rule", "typical", *SMALL)[2]
    assert "lossy" not in forerun("generate", "x = 1", "--rule", "block", *SMALL)[2]


def test_max_tokens_is_cut_to_the_context_with_a_note_if_it_was_given(forerun) -> None:
    code, out, err = forerun(
        "generate", "x = 1\n", "-n", "500", "--kv-tokens", "64", "--json", *MODEL
    )
    answer = json.loads(out)
    room = 64 - answer["stats"]["prompt_tokens"]
    assert code == 0 and answer["stats"]["completion_tokens"] <= room
    assert err.startswith(f"note: --max-tokens 500 is cut to {room}: ")
    assert len(err.splitlines()) == 1
    code, out, err = forerun("generate", "x = 1\n", "--kv-tokens", "64", "--json", *MODEL)
    assert code == 0 and not err and json.loads(out)["stats"]["completion_tokens"] <= room


def test_commands_take_the_model_as_first_argument_or_by_flag() -> None:
    """Only commands whose arguments are files take the model by its flag alone."""

    def verbs(command, path=()):
        for name, sub in getattr(command, "commands", {}).items():
            yield from verbs(sub, (*path, name))
        yield path, command

    for path, command in verbs(cli.command_line()):
        by_flag = any("--model" in p.opts for p in command.params)
        arguments = [
            (p.metavar or p.name) for p in command.params if p.param_type_name == "argument"
        ]
        if by_flag and path not in (("batch",), ("index",), ("train",), ("bench", "serve")):
            assert arguments[:1] == ["MODEL"], path
        assert not by_flag or any("-m" in p.opts for p in command.params), path


def test_help_and_errors_in_arguments_do_not_import_torch() -> None:
    """Errors in a command are reported at once, not after two seconds of imports."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        in_use = f"{port}: address already in use; another program has it: give"
        wrong = [
            (["generate", "x", "--draft", "ngrm"], "did you mean 'ngram'"),
            (["generate", "x", "--temperature", "-1"], "--temperature"),
            (["generate", "x", "--model", "./nowhere"], "no directory or file ./nowhere"),
            (["chat", "./nowhere"], "no directory or file ./nowhere"),
            (["serve", "./nowhere"], "no directory or file ./nowhere"),
            (["serve", MODEL[1], "--port", port], in_use),
        ]
        code = (
            "import sys\nfrom forerun.cli import main as cli\n"
            f"for words in {[['generate', '--help'], *(words for words, _ in wrong)]!r}:\n"
            "    sys.argv = ['forerun', *words]\n"
            "    try: cli.main()\n"
            "    except SystemExit as e: assert (e.code or 0) == 2 * (words[-1] != '--help')\n"
            "    assert words[-1] != '--help' or 'numpy' not in sys.modules\n"
            "assert not {'torch', 'transformers'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(wrong), lines
    for line, (_, message) in zip(lines, wrong, strict=True):
        assert message in line
    for flag in ("--temperature", "--draft", "--logit-bias", "--kv-tokens", "--json"):
        assert flag in done.stdout


def test_flag_names_of_other_programs_are_aliases(forerun) -> None:
    """Flags of llama.cpp, vLLM and Ollama have the same effect as forerun's own."""

    def tokens(*words: str) -> list[int]:
        code, out, err = forerun("generate", *words, "--json", "--kv-tokens", "2048")
        assert code == 0 and not err
        return json.loads(out)["token_ids"]

    ours = ["--temperature", "0.7", "--seed", "3", "--max-tokens", "6", "--context", "1024"]
    ours += ["--repetition-penalty", "1.1", "--max-rows", "2"]
    expected = tokens(MODEL[1], "x = 1", *ours)
    assert len(expected) == 6
    short = ["-t", "0.7", "-s", "3", "-n", "6", "-c", "1024"]
    assert tokens("-m", MODEL[1], "-p", "x = 1", *short, *ours[-4:]) == expected
    llama = ["--temp", "0.7", "--seed", "3", "--n-predict", "6", "--ctx-size", "1024"]
    llama += ["--repeat-penalty", "1.1", "--parallel", "2"]
    assert tokens(*MODEL, "--prompt", "x = 1", *llama) == expected
    vllm = [*llama[:4], "--max-tokens", "6", "--max-model-len", "1024", "--max-num-seqs", "2"]
    assert tokens(MODEL[1], "-p", "x = 1", *vllm, *ours[-4:-2]) == expected


SAME_CONTEXT = "--context and --ctx-size or --max-model"
SAME_TEMPERATURE = "--temperature and --temp are the same: give one"
NOT_A_PROMPT = "'why' begins the prompt, put the prompt in quotes"


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("generat", ["x"], "generate"),
        ("generate", ["x", "--context", "64", "--ctx-size", "64"], SAME_CONTEXT),
        ("generate", ["x", "-t", "1", "--temp", "1"], SAME_TEMPERATURE),
        ("generate", ["x", "y", "-p", "z"], "the prompt is given twice"),
        ("generate", ["./nowhere", "-p", "z"], "no directory or file ./nowhere"),
        ("generate", ["x", "--temp", "-1"], "--temperature -1.0 is out of range"),
        ("generate", ["x", "--max-model-len", "100000", *MODEL], f"at most {tiny.LONG_CONTEXT}"),
        ("generate", ["x", "--ctx-size", "ten"], "--ctx-size"),
        ("generate", [MODEL[1], "x", "-m", MODEL[1]], "the model is given twice"),
        ("check", [MODEL[1], "-m", MODEL[1]], "the model is given twice"),
        ("generate", ["why", "is it"], NOT_A_PROMPT),
        ("generate", ["x = 1\n" * 40, "--kv-tokens", "64", *MODEL], "or raise --kv-tokens"),
        ("generate", ["x = 1\n" * 2000, "--json", *MODEL], "context"),
        ("chat", ["hello there"], "messages are typed or piped in"),
    ],
)
def test_invalid_arguments_are_one_line(forerun, verb: str, words: list[str], message: str) -> None:
    code, out, err = forerun(verb, *words)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_short_flags_mean_the_same_in_all_commands() -> None:
    """Each option of engine and sampling has its aliases in all commands that accept it."""
    meanings: dict[str, set[str]] = {}

    def visit(command) -> None:
        for sub in getattr(command, "commands", {}).values():
            visit(sub)
        options = {p.name: p.opts for p in command.params}
        names = [name for opts in options.values() for name in opts]
        assert len(names) == len(set(names)), command.name
        for name, opts in options.items():
            for short in opts:
                if len(short) == 2:
                    meanings.setdefault(short, set()).add(name)
        for name, aliases in ALIASES.items():
            if name in options and options[name][0] == f"--{name.replace('_', '-')}":
                assert set(aliases) <= set(names), (command.name, name)

    visit(cli.command_line())
    assert meanings["-c"] == {"context"} and meanings["-s"] == {"seed"}
    assert meanings["-t"] == {"temperature"} and meanings["-n"] == {"max_tokens", "tokens"}
    assert meanings["-p"] == {"port", "prompt"} and meanings["-m"] == {"model", "target"}


def test_help_lists_rarely_needed_flags_last(forerun) -> None:
    _, out, _ = forerun("generate", "--help")
    panels = ["Options", "Engine", "Sampling", "More engine options", "More sampling options"]
    places = [re.search(rf"─ {panel} ─", out).start() for panel in panels]
    assert places == sorted(places)
    assert out.index("--kv-tokens") > places[3] > out.index("--seed") > places[2]


def test_an_interrupt_exits_without_a_traceback() -> None:
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+") as errors, open(reading, "rb", 0) as out:
        words = ["generate", "x = 1", "--max-tokens", "8000", "--ignore-eos", *MODEL]
        process = Process(words, 0, writing, errors.fileno(), {**os.environ})
        os.close(writing)
        assert out.read(1)  # it has begun
        process.send_signal(signal.SIGINT)
        while out.read(1 << 16):
            pass
        assert process.wait(30) == 130
        errors.seek(0)
        assert "Traceback" not in errors.read()


@pytest.mark.parametrize("how", ["stopped.py", "-m stopped"])
def test_an_interrupt_inside_exec_is_reported_as_usual(tmp_path: Path, how: str) -> None:
    """Dataclasses use exec while modules are imported: CPython then ends `python -m` by the signal,
    which a shell reports as 130 too."""
    verb = "from forerun.cli import main as cli\ncli.command_line = lambda: lambda **_: exec('raise KeyboardInterrupt')\ncli.main()\n"
    (tmp_path / "stopped.py").write_text(verb)
    done = subprocess.run(
        f"{sys.executable} {how}; echo $?", shell=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("130\n", "forerun: interrupted\n")


@pytest.mark.parametrize(
    "kind", ["file", "file that is not there", "directory", "directory of GGUF", "name of Ollama's"]
)
def test_a_model_instead_of_a_prompt_is_an_error(forerun, tmp_path: Path, kind: str) -> None:
    """Otherwise the default model would get its name as the prompt."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    given = {
        "file": tmp_path / "x.gguf", "file that is not there": "models/Qwen3-0.6B-Q8_0.gguf",
        "directory": tiny.repetitive(), "directory of GGUF": tmp_path, "name of Ollama's": "ollama:qwen3:0.6b",
    }[kind]  # fmt: skip
    code, out, err = forerun("generate", str(given))
    assert (code, out) == (2, "")
    assert "is a model, and there is no prompt" in err
    assert len(err.splitlines()) == 1


def test_other_texts_are_not_mistaken_for_models(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    prompts = ["What is a .gguf", "and/or", "TCP/IPv4", "ollama", "", "x" * 9000, "a\0b"]
    prompts.append(str(tmp_path / "notes.txt"))
    assert [text for text in prompts if is_model_name(text)] == []
