"""The conversation of `forerun chat`: messages, parameters and slash commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forerun.cli.flags import NO_FLAGS, SAMPLING_TYPES, in_flags
from forerun.cli.terminal import Clock, sampling_params
from forerun.errors import RequestError, shown, suggest
from forerun.sampling.params import DEFAULT, DEFAULT_MAX_TOKENS, SamplingParams
from forerun.utils import UnreadableError, json_line, text_of, write_atomic

if TYPE_CHECKING:
    from forerun.llm import LLM


FIELDS = {
    f.name.replace("_", "-"): f for f in fields(SamplingParams) if f.name not in ("n", *NO_FLAGS)
}
AS_BEFORE = "default"  # the value that undoes a /set
OURS = "forerun's default"


class Parameters:
    """The current sampling parameters, merged from several layers.

    Later layers override earlier ones: defaults, the values recommended by the model's authors, the
    command line, and /set.

    Args:
        given: options from the command line.
        advised: options recommended by the model's authors.
        stop: stop strings that always apply.
    """

    def __init__(
        self,
        given: dict[str, Any],
        advised: Mapping[str, Any] = MappingProxyType({}),
        stop: tuple[str, ...] = (),
    ) -> None:
        self._stop = stop
        self._layers: dict[str, Mapping[str, Any]] = {
            OURS: {**DEFAULT, "max_tokens": DEFAULT_MAX_TOKENS},
            "model's authors": advised,
            "command line": given,
            "/set": {},
        }
        self.params = self._merged(self._layers)

    def set(self, name: str, value: str) -> None:
        """Change one parameter, given by its command-line name.

        Raises:
            RequestError: the name or value is invalid; no parameter is changed.
        """
        field = FIELDS.get(name.replace("_", "-").lstrip("-"))
        if field is None:
            raise RequestError(f"there is no parameter {name!r}: {suggest(name, FIELDS)}")
        chosen = {key: kept for key, kept in self._layers["/set"].items() if key != field.name}
        if value != AS_BEFORE:
            chosen[field.name] = _value(
                field.name, SAMPLING_TYPES.get(field.name, type(field.default)), value
            )
        layers = self._layers | {"/set": chosen}
        try:
            self.params = self._merged(layers)
        except RequestError as error:
            raise RequestError(
                in_flags(str(error), {f.name: name for name, f in FIELDS.items()})
            ) from None
        self._layers = layers

    def is_given(self, name: str) -> bool:
        """Return True if the user gave this parameter."""
        return self.origin(name) in ("/set", "command line")

    def origin(self, name: str) -> str:
        """Return the name of the layer that sets a field."""
        return next(
            (origin for origin in reversed(self._layers) if name in self._layers[origin]), OURS
        )

    def lines(self) -> list[tuple[str, str, str]]:
        """Return (command-line name, value, layer) of every parameter."""
        return [
            (name, _text(getattr(self.params, f.name)), self.origin(f.name))
            for name, f in FIELDS.items()
        ]

    def _merged(self, layers: Mapping[str, Mapping[str, Any]]) -> SamplingParams:
        options = {name: value for layer in layers.values() for name, value in layer.items()}
        if self._stop:
            options["stop"] = [*options.get("stop", []), *self._stop]
        return sampling_params(options)


def _value(name: str, kind: Any, text: str) -> Any:
    """Parse text as a command-line flag of type `kind` would."""
    flag = name.replace("_", "-")
    if kind is bool:
        if text not in ("true", "false"):
            raise RequestError(f"{flag} is true or false, not {text!r}")
        return text == "true"
    if kind in (int, float):
        return _number(flag, kind, text)
    if name == "stop":
        return [text]  # one string, which may contain spaces
    return (
        [_number(flag, int, part) for part in text.split()] if kind == list[int] else text.split()
    )


def _number(flag: str, kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RequestError(
            f"{flag} {text!r} is not a {'whole ' if kind is int else ''}number"
        ) from None


def _text(value: Any) -> str:
    """Format a value the way a user would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        value = [f"{token}={amount:g}" for token, amount in value.items()]
    if isinstance(value, list | tuple):
        return (
            " ".join(
                repr(v) if isinstance(v, str) and not v.isprintable() else str(v) for v in value
            )
            or "not set"
        )
    return "not set" if value is None else str(value)


ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


class Conversation:
    """The messages exchanged with one model.

    Attributes:
        llm: the model.
        messages: the messages that the model reads, dicts with "role" and "content"; a system
            message, if there is one, comes first.
        forgotten: older messages that no longer fit into the context; `save` writes them too.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages: list[Message] = []
        self.forgotten: list[Message] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, or None; setting it keeps the other messages."""
        first = self.messages[0] if self.messages else None
        return str(first["content"]) if first and first["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        head = [{"role": "system", "content": text}] if text else []
        self.messages = [*head, *self.turns]

    @property
    def turns(self) -> list[Message]:
        """The messages without the system message."""
        return self.messages[self.system is not None :]

    @property
    def all_messages(self) -> list[Message]:
        """All messages, including those dropped from the context."""
        first = int(self.system is not None)
        return [*self.messages[:first], *self.forgotten, *self.messages[first:]]

    def clear(self) -> None:
        """Drop all messages except the system message."""
        self.messages, self.forgotten = self.messages[: self.system is not None], []

    @property
    def room(self) -> int:
        """The maximum number of tokens of the conversation and an answer together."""
        return self.llm.room

    @property
    def used(self) -> int:
        """The number of tokens of the conversation so far."""
        return len(self.llm.tokens(self.messages)) if self.messages else 0

    def ask(self, text: str, answer: int) -> tuple[list[Message], int, int]:
        """Return the messages with a new user message; `add` stores them.

        If `answer` tokens do not fit after them, the oldest turns are dropped. More turns are
        dropped than necessary, because removing a prefix invalidates the KV cache and should not
        happen at every turn.

        Returns:
            the messages, the number of dropped ones, and the maximum tokens of the answer.

        Raises:
            RequestError: the message does not fit even without earlier turns.
        """
        messages, dropped = [*self.messages, {"role": "user", "content": text}], 0
        fits = self.room - answer
        used, goal = len(self.llm.tokens(messages)), fits
        first = int(self.system is not None)
        while used > goal and len(messages) > first + 1:
            end = next(i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user")
            dropped += end - first
            del messages[first:end]
            used, goal = len(self.llm.tokens(messages)), fits - self.room // 8
        if used > fits:
            raise RequestError(
                f"this message takes {used} tokens and its answer may take {answer}, the context"
                f" has {self.room}: shorten the message, lower max-tokens, or raise --context or"
                " --kv-tokens"
            )
        return messages, dropped, self.room - used

    def add(self, messages: list[Message], answer: str) -> None:
        """Store the messages that `ask` returned and the answer."""
        dropped = len(self.messages) + 1 - len(messages)
        self.forgotten += self.turns[:dropped]
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def save(self, file: str) -> None:
        """Write all messages as one line of JSON, atomically. Raises ForerunError."""
        text = json_line({"messages": self.all_messages}) + "\n"
        write_atomic(Path(file).expanduser(), text)

    def load(self, file: str) -> None:
        """Load messages from a file that `save` wrote or a JSON list. Raises RequestError."""
        self.messages, self.forgotten = read(Path(file).expanduser()), []


def read(path: Path) -> list[Message]:
    """Read the messages in a file. Raises RequestError."""
    try:
        found = json.loads(text_of(path))
    except UnreadableError as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} holds no conversation: it is not valid JSON") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise RequestError(f"{path} holds no conversation: it has no list of messages")
    for i, message in enumerate(messages):
        where = f"{path}: message {i + 1}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RequestError(f"{where} has no role and content: {shown(message)}")
        role = message.get("role")
        if role not in ROLES or (role == "system" and i):
            raise RequestError(
                f"{where} cannot have the role {shown(role)}: a system message is the first"
            )
    return messages


HELP = {
    "/help, /?": "this list",
    "/show": "the model, the context used, the parameters and where they come from",
    "/set NAME VALUE": "change a sampling parameter, such as temperature 0.8;"
    " VALUE default takes it back",
    "/system TEXT": 'replace the system message ("" removes it); without TEXT show it',
    "/clear": "forget the conversation; the system message stays",
    "/save FILE": "write the whole conversation as JSON",
    "/load FILE": "go on from such a file",
    "/stats": "switch the line of statistics on or off",
    "/bye, /exit, Ctrl-D": "leave",
    "//TEXT": "send /TEXT",
    '"""': "begins and ends a message of several lines; pasted lines stay together too",
    "Ctrl-C": "ends an answer; the conversation goes on",
}
ALIASES = {"/?": "/help", "/exit": "/bye"}
QUOTES = '"""'


class Commands:
    """The slash commands of one conversation, and the settings they change.

    Attributes:
        conversation: the messages.
        parameters: the sampling parameters.
        stats: True if a line of statistics follows each answer.
        left: True after the user has ended the conversation.
        clock: measures the decoding speed of answers.
        seed: the random seed of the last answer; None for greedy decoding.
    """

    def __init__(
        self, conversation: Conversation, parameters: Parameters, stats: bool = True
    ) -> None:
        self.conversation, self.parameters, self.stats = conversation, parameters, stats
        self.left = False
        self.clock = Clock()
        self.seed: int | None = None
        self._known = {
            "/help": self._help,
            "/show": self._show,
            "/set": self._set,
            "/system": self._system,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/bye": self._bye,
        }

    def run(self, line: str) -> str:
        """Run a line for which `is_command` is True and return the text to show.

        Raises:
            ForerunError: the command is unknown or fails.
        """
        name, rest = [*line.split(maxsplit=1), ""][:2]
        command = self._known.get(ALIASES.get(name, name))
        if command is None:
            known = suggest(name, [*self._known, *ALIASES])
            raise RequestError(f"there is no command {name!r}: {known} (/{name} sends it as text)")
        return command(rest.strip())

    def _help(self, _: str) -> str:
        return _columns(list(HELP.items()))

    def _show(self, _: str) -> str:
        from forerun.models.hub import DEFAULT

        talk, config = self.conversation, self.conversation.llm.config
        return _columns(
            [
                ("model", config.model or DEFAULT),
                ("precision", talk.llm.decoder.precision),
                ("draft", f"{config.draft}, depth {config.depth}, rule {config.rule}"),
                ("context", f"{talk.used} of {talk.room} tokens used, {len(talk.turns)} messages"),
                *(
                    [("forgotten", f"{len(talk.forgotten)} messages; /save writes them too")]
                    if talk.forgotten
                    else []
                ),
                *((name, f"{value} ({origin})") for name, value, origin in self.parameters.lines()),
                *([("last seed", f"{self.seed} (drawn)")] if self.seed is not None else []),
            ]
        )

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        if not value.strip():
            raise RequestError(
                f"/set wants NAME VALUE, such as /set temperature 0.8; names: {', '.join(FIELDS)}"
            )
        self.parameters.set(name, value.strip())
        return ""

    def _system(self, rest: str) -> str:
        if not rest:
            return self.conversation.system or "there is no system message"
        self.conversation.system = unquoted(rest) if rest != '""' else None
        return ""

    def _clear(self, _: str) -> str:
        self.conversation.clear()
        return "the conversation is forgotten"

    def _save(self, rest: str) -> str:
        self.conversation.save(_file("/save", rest))
        return f"{len(self.conversation.all_messages)} messages written to {rest}"

    def _load(self, rest: str) -> str:
        self.conversation.load(_file("/load", rest))
        return f"{len(self.conversation.messages)} messages read from {rest}"

    def _stats(self, _: str) -> str:
        self.stats = not self.stats
        return f"statistics are {'on' if self.stats else 'off'}"

    def _bye(self, _: str) -> str:
        self.left = True
        return ""


def is_command(text: str) -> bool:
    """Return True if a line is a command; lines with two slashes are messages."""
    return text.lstrip().startswith("/") and not text.lstrip().startswith("//")


def message(text: str) -> str:
    """Return the message in a line that is not a command."""
    return text.lstrip()[1:] if text.lstrip().startswith("//") else unquoted(text)


def unquoted(text: str) -> str:
    '''Remove the enclosing """ from a text, if present.'''
    inside = text.strip()
    if len(inside) >= 2 * len(QUOTES) and inside.startswith(QUOTES) and inside.endswith(QUOTES):
        return inside.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def unfinished(text: str) -> bool:
    """Return True if a message or a command's text opens triple quotes and does not close them."""
    name, _, rest = text.lstrip().partition(" ")
    inside = (rest if name.startswith("/") else text).strip()
    return inside.startswith(QUOTES) and not (
        len(inside) >= 2 * len(QUOTES) and inside.endswith(QUOTES)
    )


def _file(command: str, rest: str) -> str:
    if not rest:
        raise RequestError(f"{command} wants the name of a file, such as {command} talk.json")
    return rest


def _columns(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)
