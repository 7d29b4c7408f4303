"""The draft syntax: names of drafters, and how several of them draft for one request.

`a|b` (or `a+b`) asks b where a has nothing, `a?b` asks the one that is measured to do better,
`a&b` merges the drafts of both into one tree, `a>b` lets a draft for the draft model b, `ahead(a)`
lets the draft model a draft on while the target verifies. Parentheses nest; `>` binds closest, then
`&`, `?` and `+`. The second drafter of a kind has the name kind#2.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias

from forerun.errors import ConfigError, shorten, shown, suggest

WEIGHTLESS = ("ngram", "suffix", "recycle", "lookahead")  # every engine has these drafters
SIMPLE = ("off", "auto", *WEIGHTLESS)  # they need no argument
WITH_OPTIONS = ("recycle", "lookahead")  # those of them that may have one
LOADED = ("model", "medusa", "mlp", "eagle", "eagle3", "mtp", "block")  # drafters with weights
OWN = "mtp"  # the one that may be in the target's own checkpoint, and then needs no argument
KINDS = (*SIMPLE, "retrieval", "self", *LOADED)
AHEAD = "ahead"  # the function that overlaps drafting and verification
SIGNS = "+?&>"  # operators, the loosest first
SPELLINGS = (("+", "|"), ("?",), ("&",), (">",))  # the same as users may write them
MAX_NESTING = 8  # parentheses within one another
MAX_LENGTH = 200  # characters of a draft that a request asks for
LOOKAHEAD_RANGES = {"window": (1, 64), "ngram": (2, 16), "pool": (1, 64)}  # least, most

_SELF = re.compile(  # arguments of `self`
    r"int8|int4|layers=(?:auto|\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)|window=[1-9]\d{0,7}"
)
_WORD = re.compile(r"[^:+|?&>()]*")
# Drafters whose argument may be a list, separated by commas.
_LIST_ARGUMENT = re.compile(r"(?:^|[+|?&>(])(?:retrieval:|self:layers=|lookahead:)[^+|?&>]*$")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One drafter: its kind, its argument, and its number among those of the kind, from 1."""

    kind: str
    argument: str = ""
    number: int = 1

    @property
    def name(self) -> str:
        """The drafter's name: model for the first one of the kind, model#2 for the second."""
        return self.kind if self.number == 1 else f"{self.kind}#{self.number}"

    def __str__(self) -> str:
        return self.name

    def leaves(self) -> Iterator[Leaf]:
        """Yield all drafters, in order."""
        yield self


@dataclass(frozen=True, slots=True)
class OverlappedDraft:
    """A draft model that drafts on while the target verifies."""

    part: DraftSpec

    def __str__(self) -> str:
        return f"{AHEAD}({self.part})"

    def leaves(self) -> Iterator[Leaf]:
        """Yield all drafters, in order."""
        yield from self.part.leaves()


@dataclass(frozen=True, slots=True)
class Composite:
    """Several drafters for one request, joined by `sign`: in turn (+), the best of them (?), merged
    into one tree (&), or each drafting for the next (>)."""

    sign: str
    parts: tuple[DraftSpec, ...]

    def __str__(self) -> str:
        return self.sign.join(
            f"({part})" if self.needs_parentheses(part) else str(part) for part in self.parts
        )

    def needs_parentheses(self, part: DraftSpec) -> bool:
        """Return True if the operator of a part binds less closely than this one."""
        return isinstance(part, Composite) and SIGNS.index(part.sign) < SIGNS.index(self.sign)

    def leaves(self) -> Iterator[Leaf]:
        """Yield all drafters, in order."""
        for part in self.parts:
            yield from part.leaves()


DraftSpec: TypeAlias = "Leaf | Composite | OverlappedDraft"


def read_draft(spec: str) -> DraftSpec:
    """Parse a draft option.

    Raises:
        ConfigError: it is not valid; the message says where.
    """
    seen = Counter[str]()

    def make(name: str, argument: str, where: str) -> Leaf:
        _check_leaf(name, argument, where)
        seen[name] += 1
        return Leaf(name, argument, seen[name])

    found = _Parser(spec, make).parse()
    kinds = [leaf.kind for leaf in found.leaves()]
    _check_once([kind for kind in kinds if kind not in (*LOADED, "self")], spec)
    for kind in kinds:
        if kind in ("off", "auto") and len(kinds) > 1:
            raise ConfigError(f"{kind!r} cannot go with others in {shown(spec)}: give it alone")
    return found


def read_name(name: str, known: Collection[str]) -> DraftSpec:
    """Parse the draft that a request asks for, with the drafters that the engine knows.

    Raises:
        ConfigError: it is not valid or names an unknown drafter.
    """

    def make(part: str, argument: str, _where: str) -> Leaf:
        if part not in known or argument:
            hint = suggest(part, ["off", *known])
            if part in plugins():
                hint = f"start it with LLM(draft={part!r}) or --draft {part}"
            raise ConfigError(f"this engine has no draft {shorten(name)}: {hint}")
        kind, _, number = part.partition("#")
        return Leaf(kind, number=int(number) if number.isdigit() else 1)

    found = _Parser(name[:MAX_LENGTH], make).parse()
    _check_once([leaf.name for leaf in found.leaves()], name)
    return found


def joined(specs: Sequence[str]) -> str:
    """Join several draft options into one, the best of them. Raises ConfigError."""
    for spec in specs:
        read_draft(spec)
    if len(specs) == 1:
        return specs[0]
    combined = "?".join(spec if spec in SIMPLE else f"({spec})" for spec in specs)
    read_draft(combined)
    return combined


def parse_draft(spec: str) -> tuple[tuple[str, str], ...]:
    """Return the drafters of an option as (kind, argument), in order. Raises ConfigError."""
    return tuple((leaf.kind, leaf.argument) for leaf in read_draft(spec).leaves())


def draft_name(spec: str) -> str:
    """Return the name of an option's proposer in the engine. Raises ConfigError."""
    return str(read_draft(spec))


def lookahead_options(argument: str) -> dict[str, int]:
    """Return the options in `window=8,ngram=4,pool=6`, any of which may be left out.

    Raises:
        ConfigError: an option is unknown, given twice or out of range.
    """
    options: dict[str, int] = {}
    for part in argument.split(",") if argument else []:
        name, _, number = part.partition("=")
        least, most = LOOKAHEAD_RANGES.get(name, (1, 0))
        is_number = re.fullmatch(r"\d{1,3}", number, re.ASCII) is not None
        if name in options or not is_number or not least <= int(number) <= most:
            ranges = ", ".join(f"{n} ({a} to {b})" for n, (a, b) in LOOKAHEAD_RANGES.items())
            raise ConfigError(
                f"draft 'lookahead' does not take {shown(part)}: give each of {ranges} at most"
                " once, as in lookahead:window=8,ngram=4,pool=6"
            )
        options[name] = int(number)
    return options


def names_in(name: str) -> list[str]:
    """Return the names of the drafters in a proposer's name."""
    return [part for part in re.split(r"[+|?&>()]", name) if part and part != AHEAD]


def kind_of_name(name: str) -> str:
    """Return the kind of a drafter: model for model#2."""
    return name.partition("#")[0]


def drafts_in(text: str) -> list[str]:
    """Split a list of draft options at its commas, except those within arguments."""
    found: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if found and _LIST_ARGUMENT.search(found[-1]) and not _before_drafter("").match(part):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


@functools.cache
def plugins() -> dict[str, EntryPoint]:
    """Return the drafters that installed packages register (entry points `forerun.drafters`)."""
    found = entry_points(group="forerun.drafters")
    return {entry.name: entry for entry in found if is_name(entry.name)}


def _before_drafter(signs: str) -> re.Pattern[str]:
    """Compile the pattern of what precedes another drafter, which may stand in parentheses."""
    names = "|".join((*KINDS, *plugins()))
    return re.compile(rf"{signs}(?=\(*(?:(?:{names})(?:[:+|?&>)]|$)|{AHEAD}\())")


def is_name(name: object) -> bool:
    """Return True if a drafter may have this name."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z][\w-]{0,63}", name) is not None


class _Parser:
    """Recursive-descent parser of the draft syntax."""

    def __init__(self, spec: str, make: Callable[[str, str, str], Leaf]) -> None:
        """`make` gets the name and argument of each drafter, and where it stands, for messages."""
        self.spec = spec
        self.make = make
        self.at = 0
        self.nesting = 0

    def parse(self) -> DraftSpec:
        found = self._composite()
        if self.at < len(self.spec):
            raise ConfigError(
                f"{self._rest()} is one ) too many, or a + | ? & or > is missing before it"
            )
        return found

    def _composite(self, level: int = 0) -> DraftSpec:
        """Parse what the operators of a level and of tighter ones join."""
        if level == len(SPELLINGS):
            return self._atom()
        parts = [self._composite(level + 1)]
        while self._next() in SPELLINGS[level]:
            self.at += 1
            parts.append(self._composite(level + 1))
        sign = SIGNS[level]
        flat: list[DraftSpec] = []
        for part in parts:
            is_same = isinstance(part, Composite) and part.sign == sign
            flat.extend(part.parts if is_same else (part,))  # type: ignore[union-attr]
        return Composite(sign, tuple(flat)) if len(flat) > 1 else flat[0]

    def _atom(self) -> DraftSpec:
        if self.spec.startswith(f"{AHEAD}(", self.at):
            self.at += len(AHEAD)
            return OverlappedDraft(self._atom())
        if self._next() != "(":
            return self._leaf()
        if self.nesting == MAX_NESTING:
            raise ConfigError(
                f"{self._rest()} is one parenthesis too deep: nest at most {MAX_NESTING}"
            )
        self.at += 1
        self.nesting += 1
        found = self._composite()
        if self._next() != ")":
            raise ConfigError(f"{shown(self.spec)} has no ) for each of its (: add what is missing")
        self.at += 1
        self.nesting -= 1
        return found

    def _leaf(self) -> Leaf:
        word = _WORD.match(self.spec, self.at)
        assert word is not None
        name, start = word.group(), self.at
        self.at = word.end()
        argument = ""
        if self._next() == ":":
            begin = self.at + 1
            self.at = self._argument_end(name, begin)
            argument = self.spec[begin : self.at]
        is_alone = start == 0 and self.at == len(self.spec)
        where = "" if is_alone else f" (at character {start + 1} of {shown(self.spec)})"
        return self.make(name, argument, where)

    def _argument_end(self, name: str, begin: int) -> int:
        """Find where an argument ends: before an operator that another drafter follows, or before
        the parenthesis that closes a group."""
        signs = "[|?&>]" if name in LOADED else "[+|?&>]"  # a directory may be called "a+suffix"
        found = _before_drafter(signs).search(self.spec, begin)
        end = found.start() if found else len(self.spec)
        opened = 0
        for at in range(begin, end):
            if self.spec[at] == "(":
                opened += 1
            elif self.spec[at] == ")":
                opened -= 1
                if opened < 0 and self.nesting:
                    return at
        return end

    def _next(self) -> str:
        return self.spec[self.at : self.at + 1]

    def _rest(self) -> str:
        return f"{shown(self.spec[self.at :])} in {shown(self.spec)}"


def _check_once(names: Sequence[str], spec: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name!r} stands twice in {shown(spec)}: name each draft once")


def _check_leaf(name: str, argument: str, where: str) -> None:
    """Raise ConfigError unless there is such a drafter and it takes this argument."""
    if name in LOADED and name != OWN and not argument:
        raise ConfigError(
            f"draft {name!r} needs to be told where it is: write {name}:DIRECTORY or"
            f" {name}:HUB_ID{where}"
        )
    if name == "retrieval" and not argument:
        raise ConfigError(
            "draft 'retrieval' needs an index: write retrieval:INDEX, which forerun index"
            f" makes{where}"
        )
    if name == "self" and not _SELF.fullmatch(argument):
        raise ConfigError(
            f"a model cannot draft for itself as {argument!r}: write self:int8 or self:int4"
            " (rounded), self:layers=12 (its first layers), self:layers=0-9,20-29 (these) or"
            f" self:layers=auto (as is found to pay), or self:window=1024 (of its keys){where}"
        )
    if name == "lookahead":
        lookahead_options(argument)
    if name not in KINDS and name not in plugins():
        known = [*SIMPLE, OWN, *(f"{n}:..." for n in ("retrieval", "self", *LOADED)), *plugins()]
        raise ConfigError(f"there is no draft {shown(name)}{where}: {suggest(name, known)}")
    if name in SIMPLE and name not in WITH_OPTIONS and argument:
        raise ConfigError(f"draft {name!r} takes no argument, but was given {argument!r}{where}")
