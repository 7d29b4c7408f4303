"""What begins with a slash in a conversation. No terminal here: a command gives the text to show."""

from __future__ import annotations

from forerun.chat.conversation import Conversation
from forerun.chat.parameters import FIELDS, Parameters
from forerun.errors import RequestError, nearest
from forerun.terminal import Clock

HELP = {
    "/help, /?": "this list",
    "/show": "the model, the context used, the parameters and where they come from",
    "/set NAME VALUE": "change a sampling parameter, such as temperature 0.8; VALUE default takes it back",
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
    """The commands of one conversation, and what they switch.

    `stats` says whether answers are followed by a line of statistics, `left` whether the user has taken leave, `clock`
    how fast answers come, `seed` with what the last one was drawn.
    """

    def __init__(self, conversation: Conversation, parameters: Parameters, stats: bool = True) -> None:
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
        """Do what a line says, as `is_command` found it to be one; the text to show. Raises ForerunError."""
        name, rest = [*line.split(maxsplit=1), ""][:2]
        command = self._known.get(ALIASES.get(name, name))
        if command is None:
            known = nearest(name, [*self._known, *ALIASES])
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
                ("context", f"{talk.used} of {talk.room} tokens used, {len(talk.said)} messages"),
                *([("forgotten", f"{len(talk.forgotten)} messages; /save writes them too")] if talk.forgotten else []),
                *((name, f"{value} ({origin})") for name, value, origin in self.parameters.lines()),
                *([("last seed", f"{self.seed} (drawn)")] if self.seed is not None else []),
            ]
        )

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        if not value.strip():
            raise RequestError(f"/set wants NAME VALUE, such as /set temperature 0.8; names: {', '.join(FIELDS)}")
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
        return f"{len(self.conversation.whole)} messages written to {rest}"

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
    """Whether a line is for forerun; two slashes are for the model."""
    return text.lstrip().startswith("/") and not text.lstrip().startswith("//")


def message(text: str) -> str:
    """What a line that is no command says to the model."""
    return text.lstrip()[1:] if text.lstrip().startswith("//") else unquoted(text)


def unquoted(text: str) -> str:
    '''A text without the """ around it, where they are.'''
    inside = text.strip()
    if len(inside) >= 2 * len(QUOTES) and inside.startswith(QUOTES) and inside.endswith(QUOTES):
        return inside.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def unfinished(text: str) -> bool:
    """Whether a message, or a command's text, has opened its quotes and not closed them."""
    name, _, rest = text.lstrip().partition(" ")
    inside = (rest if name.startswith("/") else text).strip()
    return inside.startswith(QUOTES) and not (len(inside) >= 2 * len(QUOTES) and inside.endswith(QUOTES))


def _file(command: str, rest: str) -> str:
    if not rest:
        raise RequestError(f"{command} wants the name of a file, such as {command} talk.json")
    return rest


def _columns(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)
