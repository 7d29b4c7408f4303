"""A conversation without a terminal: context, cached prefixes, commands, parameters, files."""

import json
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.conversation import (
    Commands,
    Conversation,
    Parameters,
    is_command,
    message,
    read,
    unfinished,
)
from forerun.errors import ForerunError, RequestError
from tests import tiny


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny.repetitive(), kv_tokens=512, page=16, threads=1)


@pytest.fixture
def commands(llm: LLM) -> Commands:
    return Commands(Conversation(llm), Parameters({"temperature": 0.5}))


def turn(talk: Conversation, text: str, tokens: int = 16):
    """Answer one message; return the completion and the number of dropped messages."""
    messages, dropped, _ = talk.ask(text, tokens)
    (done,) = talk.llm.generate(messages, SamplingParams.pure(max_tokens=tokens, ignore_eos=True))
    talk.add(messages, done.text)
    return done, dropped


def test_a_turn_processes_only_new_tokens(llm: LLM) -> None:
    talk = Conversation(llm, "be brief")
    first, _ = turn(talk, "what is a name and what is a colour of it?")
    second, _ = turn(talk, "and then?")
    assert second.stats.cached_tokens >= first.stats.prompt_tokens // 16 * 16 > 0


def test_the_oldest_turns_are_dropped_and_the_system_message_stays(llm: LLM) -> None:
    talk, total = Conversation(llm, "be brief"), 0
    for i in range(12):
        done, dropped = turn(talk, f"number {i}: " + "true false " * 8, 32)
        total += dropped
        assert done.stats.prompt_tokens + 32 <= talk.room == 512
        assert talk.messages[0] == {"role": "system", "content": "be brief"}
        assert [m["role"] for m in talk.turns] == ["user", "assistant"] * (len(talk.turns) // 2)
        assert (
            len(talk.turns) == 2 * (i + 1) - total and f"number {i}:" in talk.turns[-2]["content"]
        )
    assert total and total % 2 == 0


def test_dropping_leaves_room_for_several_turns(llm: LLM) -> None:
    """Otherwise each turn of a full conversation would process its prompt from the beginning."""
    talk, drops = Conversation(llm), []
    for _ in range(16):
        drops.append(turn(talk, "and?", 24)[1])
    full = [bool(dropped) for dropped in drops[drops.index(next(filter(None, drops))) :]]
    assert not all(full)


def test_a_message_that_does_not_fit_changes_nothing(llm: LLM) -> None:
    talk = Conversation(llm, "be brief")
    turn(talk, "hello")
    before = list(talk.messages)
    with pytest.raises(RequestError, match=r"takes \d+ tokens .*--kv-tokens"):
        talk.ask("x " * 600, 64)
    assert talk.messages == before


def test_the_system_message(commands: Commands) -> None:
    talk = commands.conversation
    assert "no system message" in commands.run("/system")
    commands.run("/system be brief")
    turn(talk, "hello", 4)
    commands.run('/system """be\nlong"""')
    assert commands.run("/system") == talk.system == "be\nlong" and len(talk.turns) == 2
    commands.run("/clear")
    assert talk.messages == [{"role": "system", "content": "be\nlong"}]
    commands.run('/system ""')
    assert talk.messages == []


def test_parameters_are_set_by_their_names(commands: Commands) -> None:
    parameters = commands.parameters
    assert parameters.params.max_tokens == 512 and not parameters.is_given("max_tokens")
    for line in ("top-p 0.9", "max_tokens 9", "seed 4", "stop the end", "ignore-eos true"):
        assert commands.run(f"/set {line}") == ""
    assert parameters.params == SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=9, seed=4, stop=["the end"], ignore_eos=True
    ).resolved({})
    assert parameters.is_given("max_tokens")
    shown = commands.run("/show")
    assert "0.9 (/set)" in shown
    assert "0.5 (command line)" in shown
    assert "40 (forerun's default)" in shown
    assert "of 512" in shown
    commands.run("/set temperature 1")
    commands.run("/set temperature default")
    commands.run("/set max-tokens default")
    assert (parameters.params.temperature, parameters.params.max_tokens) == (0.5, 512)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature 'hot' is not a number"),
        ("/set max-tokens 1.5", "max-tokens '1.5' is not a whole number"),
        ("/set top-p 0", "top-p 0.0 is out of range"),
        ("/set temprature 1", "did you mean 'temperature'"),
        ("/set n 2", "there is no parameter 'n'"),
        ("/set ignore-eos maybe", "true or false"),
        ("/set temperature", "NAME VALUE"),
        ("/sav x", "did you mean '/save'"),
        ("/save", "name of a file"),
        ("/load nowhere.json", "nowhere.json cannot be read"),
    ],
)
def test_invalid_commands_change_nothing(commands: Commands, line: str, message: str) -> None:
    before = commands.parameters.params
    with pytest.raises(RequestError) as error:
        commands.run(line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert commands.parameters.params is before


def test_exit_help_and_stats(commands: Commands) -> None:
    assert commands.stats and "off" in commands.run("/stats") and not commands.stats
    assert "/save FILE" in commands.run("/?") == commands.run("/help")
    commands.run("/exit")
    assert commands.left


def test_a_conversation_is_saved_and_loaded(commands: Commands, tmp_path: Path) -> None:
    talk, file = commands.conversation, tmp_path / "talk.json"
    talk.system = "kürze"
    turn(talk, "hello", 4)
    assert "3 messages" in commands.run(f"/save {file}")
    messages = talk.messages
    talk.clear()
    assert "3 messages" in commands.run(f"/load {file}")
    assert talk.messages == messages
    assert talk.system == "kürze"
    file.write_text(json.dumps(messages))  # a list without an object
    assert read(file) == messages
    with pytest.raises(ForerunError, match="cannot be written"):
        commands.run(f"/save {tmp_path}")
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_saved_file_includes_dropped_turns(llm: LLM, tmp_path: Path, system: str | None) -> None:
    """Turns dropped from a full context are written in order and once, and loaded with the file."""
    talk, file, texts = Conversation(llm, system), tmp_path / "talk.json", []
    dropped = 0
    for i in range(12):
        texts.append(f"number {i}: " + "true false " * 8)
        dropped += turn(talk, texts[-1], 32)[1]
    assert dropped == len(talk.forgotten) > 0
    assert f"{len(talk.forgotten)} messages" in Commands(talk, Parameters({})).run("/show")
    output = Commands(talk, Parameters({})).run(f"/save {file}")
    written = read(file)
    assert f"{len(written)} messages" in output and written == talk.all_messages
    assert [m["content"] for m in written if m["role"] == "user"] == texts
    first = ["system"] if system else []
    assert [m["role"] for m in written] == first + ["user", "assistant"] * 12
    other = Conversation(llm)
    other.load(str(file))
    assert other.all_messages == written and not other.forgotten
    turn(other, "and then?", 32)
    assert other.forgotten and other.all_messages[:-2] == written, (
        "what does not fit is dropped again, and still kept"
    )
    other.system = "another"
    assert other.all_messages[0]["content"] == "another" and len(other.all_messages) == 27
    other.clear()
    assert [m["role"] for m in other.all_messages] == ["system"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "7", '{"messages": 7}', '["hello"]', '[{"role": "user"}]', '[{"role": "tool", "content": "x"}]',
        '[{"role": "user", "content": ["x"]}]', "[" * 100000, '[{"role": ["user"], "content": "x"}]',
        '[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]',
    ],
)  # fmt: skip
def test_an_invalid_file_changes_nothing(commands: Commands, tmp_path: Path, text: str) -> None:
    (tmp_path / "talk.json").write_text(text)
    commands.run("/system stays")
    with pytest.raises(RequestError) as error:
        commands.run(f"/load {tmp_path / 'talk.json'}")
    assert "\n" not in str(error.value) and commands.conversation.system == "stays"


def test_lines_are_classified() -> None:
    assert is_command("/help") and not is_command("//help") and not is_command("1/2")
    assert message("//help") == "/help"
    assert message('"""a\nb"""') == "a\nb"
    assert message("a /b") == "a /b"
    assert unfinished('"""a') and unfinished('"""') and unfinished('/system """a')
    assert not unfinished('"""a"""') and not unfinished('a """ b') and not unfinished('""""""')
