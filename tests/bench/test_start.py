"""Start-up times: whole processes, commands in turn, and one line if a command fails."""

import sys

import pytest

from forerun.bench import start
from forerun.bench.start import Start, measure_starts, size_of, this_command
from forerun.errors import ConfigError, ForerunError
from tests import tiny


@pytest.mark.one_in(0)
def test_generate_and_serve_are_timed() -> None:
    options = ["--model", str(tiny.repetitive()), "--kv-tokens", "256"]
    generate, serve = measure_starts([this_command()], options, 1)
    assert (generate.verb, serve.verb, generate.ready) == ("generate", "serve", None)
    assert generate.first > 0 and serve.ready and serve.ready > serve.first > 0
    assert min(generate.memory, serve.memory) > 50e6 > size_of(str(tiny.repetitive())) > 0


def test_commands_take_turns_and_the_first_round_does_not_count(monkeypatch) -> None:
    calls: list[tuple[str, str]] = []

    def fake(verb: str):
        def run(command: str, options: list[str]) -> Start:
            calls.append((command, verb))
            seconds = [100.0, 1.0, 5.0, 3.0][calls.count((command, verb)) - 1]
            return Start(command, verb, None, seconds, 7)

        return run

    monkeypatch.setattr(start, "start_generate", fake("generate"))
    monkeypatch.setattr(start, "start_serve", fake("serve"))
    found = measure_starts(["a", "b"], [], 3)
    cases = [("a", "generate"), ("a", "serve"), ("b", "generate"), ("b", "serve")]
    assert calls == cases * 4
    assert [(s.command, s.verb) for s in found] == cases
    assert {(s.first, s.memory) for s in found} == {(3.0, 7)}


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("./nowhere", ConfigError, "cannot be run"),
        (f"{sys.executable} -c 1", ForerunError, "without an error message"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"no model\")'", ForerunError, "no model"),
    ],
)
@pytest.mark.parametrize("verb", [start.start_generate, start.start_serve])
def test_a_command_that_fails_gives_one_line(command, error, message, verb) -> None:
    with pytest.raises(error, match=message) as caught:
        verb(command, [])
    assert "\n" not in str(caught.value)
