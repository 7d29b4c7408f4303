"""Starts are of whole processes: what is counted, what is compared, and what one is told where a
command fails."""

import sys

import pytest

from forerun.bench.machine import start
from forerun.bench.machine.start import Start, measure_starts, size_of
from forerun.errors import ConfigError, ForerunError
from tests import tiny

HERE = f"{sys.executable} -m forerun"


def test_a_text_and_a_server_from_their_beginning() -> None:
    generate, serve = measure_starts(
        [HERE], ["--model", str(tiny.spoken()), "--kv-tokens", "256"], 1
    )
    assert (generate.verb, serve.verb, generate.ready) == ("generate", "serve", None)
    assert generate.first > 0 and serve.ready and serve.ready > serve.first > 0
    assert min(generate.memory, serve.memory) > 50e6 > size_of(str(tiny.spoken())) > 0


def test_commands_take_turns_and_the_first_round_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def fake(verb: str):
        def run(command: str, options: list[str]) -> Start:
            asked.append((command, verb))
            return Start(
                command,
                verb,
                None,
                {1: 100.0, 2: 1.0, 3: 5.0, 4: 3.0}[asked.count((command, verb))],
                7,
            )

        return run

    monkeypatch.setattr(start, "start_generate", fake("generate"))
    monkeypatch.setattr(start, "start_serve", fake("serve"))
    found = measure_starts(["a", "b"], [], 3)
    assert (
        asked[:4] == [("a", "generate"), ("a", "serve"), ("b", "generate"), ("b", "serve")]
        and len(asked) == 16
    )
    assert [(s.command, s.verb, s.first, s.memory) for s in found] == [
        ("a", "generate", 3.0, 7), ("a", "serve", 3.0, 7), ("b", "generate", 3.0, 7), ("b", "serve", 3.0, 7)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        ("./nowhere", ConfigError, "cannot be run"),
        (f"{sys.executable} -c 1", ForerunError, "without an error message"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"no model\")'", ForerunError, "no model"),
    ],
)
@pytest.mark.parametrize("verb", [start.start_generate, start.start_serve])
def test_a_command_that_fails_is_one_line(
    command: str, error: type[Exception], says: str, verb
) -> None:
    with pytest.raises(error, match=says) as caught:
        verb(command, [])
    assert "\n" not in str(caught.value)
