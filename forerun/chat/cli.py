"""The verb `forerun chat`. Like all of the command line, it imports what is heavy when it runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.chat.commands import Commands, is_command, message
from forerun.chat.conversation import Conversation
from forerun.chat.parameters import Parameters
from forerun.errors import ForerunError
from forerun.flags import ENGINE, SAMPLING, with_flags

if TYPE_CHECKING:
    from forerun.llm import LLM, Completion

LEAST = 256  # tokens that an answer may have, where nobody asked for a number


@with_flags(ENGINE, SAMPLING.without("n"))
def chat(
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an answer.")] = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="A line of statistics after each answer.")] = True,
    *,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D or /bye the conversation; /? lists what else there is."""
    from forerun.cli import _load, _params  # which registers this verb

    Parameters(_params, sampling)  # bad ones are told before a model is loaded
    llm = _load(config, as_json)
    parameters = Parameters(_params, sampling, llm.recommended, _stop(llm))
    commands = Commands(Conversation(llm, system), parameters, stats)
    alone = not sys.stdin.isatty()
    failed = _talk(_piped() if alone else _typed(), commands, as_json, alone)
    if failed and alone:
        raise typer.Exit(2)


def _stop(llm: LLM) -> tuple[str, ...]:
    """What ends the answers of a model that does not say how a conversation is written."""
    if llm.tokenizer is None or llm.tokenizer.has_chat_template:
        return ()
    print("note: this model has no chat template; it may not answer like an assistant", file=sys.stderr)
    return ("\nuser:",)


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _typed() -> Iterator[str]:
    from forerun.chat.line import typed

    return typed()


def _talk(lines: Iterable[str], commands: Commands, as_json: bool, alone: bool) -> bool:
    """Answer each line, until there are no more or the user leaves; whether anything was refused."""
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
            print(file=sys.stderr)  # before an answer began, or behind it
        if commands.left:
            break
    return failed


def _turn(commands: Commands, text: str, as_json: bool, alone: bool) -> None:
    """One message and its answer."""
    from forerun.cli import _as_dict, _print

    talk, params = commands.conversation, commands.parameters.params
    messages, dropped, room = talk.ask(text, _wanted(commands))
    if dropped:
        print(f"note: the context is full: the oldest {dropped} messages are forgotten", file=sys.stderr)
    most = min(params.max_tokens, room)
    params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
    stream = talk.llm.stream(messages, params)
    with _ended_by_ctrl_c(stream.stop, alone):
        if as_json:
            for _ in stream:
                pass
        else:
            _print(stream)
    completion = stream.completion
    talk.add(messages, completion.text)
    if as_json:
        print(json.dumps(_as_dict(completion)), flush=True)
    elif commands.stats:
        _say(_parts(completion, talk.room))


def _wanted(commands: Commands) -> int:
    """Tokens that an answer must have room for; never more than half of the context."""
    most, asked = commands.parameters.params.max_tokens, commands.parameters.asked("max_tokens")
    return min(most if asked else min(most, LEAST), commands.conversation.room // 2)


@contextmanager
def _ended_by_ctrl_c(stop: Callable[[], None], alone: bool) -> Iterator[None]:
    """Ctrl-C stops an answer between two steps, so that the engine is whole for the next one; not in a pipe."""
    if alone:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _parts(completion: Completion, room: int) -> list[str]:
    """What the line of statistics says, the most wanted first."""
    stats = completion.stats
    decoding = stats.seconds - stats.first_token_seconds
    rest = stats.completion_tokens - stats.completion_tokens / max(stats.steps, 1)
    used = stats.prompt_tokens + stats.completion_tokens
    full = " (context full)" if used >= room else " (cut at max-tokens)"
    why = {"length": full, "abort": " (interrupted)"}.get(completion.finish_reason, "")
    return [
        f"{stats.completion_tokens} tokens{why}",
        *([f"{rest / decoding:.0f} tokens/s"] if decoding > 0 and stats.steps > 1 else []),
        *([f"{stats.accepted_length:.2f} per pass"] if stats.steps else []),
        f"context {used} of {room}",
    ]


def _say(parts: list[str]) -> None:
    """One line on stderr; on a terminal it is dim, and what does not fit is left out."""
    if not sys.stderr.isatty():
        print(" · ".join(parts), file=sys.stderr)
        return
    width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts = parts[:-1]
    line = " · ".join(parts)[:width]
    print(line if "NO_COLOR" in os.environ else f"\x1b[2m{line}\x1b[0m", file=sys.stderr)
