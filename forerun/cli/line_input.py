"""Line input of `forerun chat` on a terminal: editing, history and messages of several lines.

A module of its own, since prompt_toolkit takes a tenth of a second to import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from forerun.cli.conversation import unfinished
from forerun.cli.models import print_notes

PROMPT, MORE, HINT = ">>> ", "... ", "Send a message (/? for help)"
HOW_TO_LEAVE = "Ctrl-D or /bye leaves"


def typed() -> Iterator[str]:
    """Yield the messages that the user types, until Ctrl-D."""
    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,  # keeps pasted lines together; `_keys` makes Enter send
        prompt_continuation=MORE,
        placeholder=[("ansibrightblack", HINT)],
        history=_history(),
        key_bindings=_keys(),
        output=create_output(always_prefer_tty=True),  # answers may be redirected to a file
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            print(HOW_TO_LEAVE, file=sys.stderr)
        except EOFError:
            return


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _File(FileHistory):
    """A history that ignores write errors, so that a full disk does not end a conversation."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: text that cannot be encoded
            super().store_string(string)


def _history() -> History:
    """Return the prompt history, kept on disk if the state directory is writable."""
    state = os.environ.get("XDG_STATE_HOME")
    path = (Path(state) if state else Path("~/.local/state").expanduser()) / "forerun" / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Only the user may read the history.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600))
    except OSError as error:
        print_notes([f"what you type is not kept: {path} cannot be written: {error.strerror}"])
        return InMemoryHistory()
    return _File(path)
