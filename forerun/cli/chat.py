"""The command `forerun chat`. Heavy modules are imported only when it runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.conversation import Commands, Conversation, Parameters, is_command, message
from forerun.cli.flags import ENGINE, SAMPLING, with_flags
from forerun.cli.models import print_notes
from forerun.cli.terminal import as_dict, load, print_summary, show, summary
from forerun.errors import ForerunError, LoadError
from forerun.models.hub import find_model
from forerun.utils import BYTE_ORDER_MARK, json_line

if TYPE_CHECKING:
    from forerun.llm import LLM


LEAST = 256  # tokens to keep free for an answer if max_tokens was not given


@with_flags(ENGINE, SAMPLING.without("n"))
def chat(
    system: Annotated[
        str | None, typer.Option("--system", "--system-prompt", help="Initial system message.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer.")
    ] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats/--no-stats", help="Print a line of statistics after each answer."),
    ] = True,
    *,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model.

    Ctrl-C ends an answer, Ctrl-D or /bye the conversation; /? lists all commands.
    """
    Parameters(sampling)  # reports invalid parameters before a model is loaded
    _check_model(config.get("model"))
    llm = load(config, as_json)
    parameters = Parameters(sampling, llm.recommended, _stop(llm))
    commands = Commands(Conversation(llm, system), parameters, stats)
    alone = not sys.stdin.isatty()
    failed = _talk(_lines(alone), commands, as_json, alone)
    if failed and alone:
        raise typer.Exit(2)


def _check_model(model: str | None) -> None:
    """Raise LoadError if the argument is not a model.

    The message explains the usage if the argument looks like a chat message.
    """
    try:
        find_model(model)
    except LoadError as error:
        if model is None or len(model.split()) == 1:
            raise
        raise LoadError(
            f"there is no model {model!r}: chat takes a model as its argument, and messages are"
            " typed or piped in"
        ) from error


def _stop(llm: LLM) -> tuple[str, ...]:
    """Return the stop strings for a model without a chat template."""
    if llm.tokenizer is None or llm.tokenizer.has_chat_template:
        return ()
    print_notes(["this model has no chat template; it may not answer like an assistant"])
    return ("\nuser:",)


def _lines(alone: bool) -> Iterator[str]:
    """Return the lines of stdin: from a pipe, or from an interactive prompt."""
    if alone:
        return (line.removeprefix(BYTE_ORDER_MARK).removesuffix("\n") for line in sys.stdin)
    from forerun.cli.line_input import typed

    return typed()


def _talk(lines: Iterable[str], commands: Commands, as_json: bool, alone: bool) -> bool:
    """Answer each line until the input ends or the user leaves.

    Returns True if any line was refused.
    """
    failed = False
    for line in lines:
        if not line.strip():
            continue
        try:
            if is_command(line):
                shown = commands.run(line)
                if shown:
                    print(shown, file=sys.stderr)
            else:
                _turn(commands, message(line), as_json, alone)
        except ForerunError as error:
            failed = True
            print(f"forerun: {' '.join(str(error).split())}", file=sys.stderr)
        except KeyboardInterrupt:
            if alone:
                raise
            print(file=sys.stderr)  # Ctrl-C came before or after an answer
        if commands.left:
            break
    return failed


def _turn(commands: Commands, text: str, as_json: bool, alone: bool) -> None:
    """Send one message and print its answer."""
    talk, params = commands.conversation, commands.parameters.params
    messages, dropped, room = talk.ask(text, _wanted(commands))
    if dropped:
        forgotten = f"the oldest {dropped} messages are forgotten (/save writes them)"
        print_notes([f"the context is full: {forgotten}"])
    most = min(params.length_limit, room)
    params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
    stream = talk.llm.stream(messages, params)
    with _ended_by_ctrl_c(stream.stop, alone):
        if as_json:
            for _ in stream:
                pass
        else:
            show(stream, commands.clock)
    completion = stream.completion
    talk.add(messages, completion.text)
    commands.seed = None if params.greedy else completion.seed
    if as_json:
        print(json_line(as_dict(completion), ascii_only=True), flush=True)
    elif commands.stats:
        print_summary(summary(completion, talk.room, commands.clock.plain))


def _wanted(commands: Commands) -> int:
    """Return the number of tokens to keep free for an answer, at most half of the context."""
    parameters, most = commands.parameters, commands.parameters.params.length_limit
    limit = most if parameters.is_given("max_tokens") else min(most, LEAST)
    return min(limit, commands.conversation.room // 2)


@contextmanager
def _ended_by_ctrl_c(stop: Callable[[], None], alone: bool) -> Iterator[None]:
    """Make Ctrl-C stop the answer between two engine steps, which keeps the engine usable.

    With piped input, Ctrl-C keeps its usual meaning.
    """
    if alone:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
