"""What a draft option says: the names of drafts, and how several of them draft for one request.

`a|b` asks b where a has nothing (`a+b` is the same), `a?b` whichever of the two is measured to do
better, `a&b` makes one tree of what both say, `a>b` has a draft for the draft model b, `ahead(a)`
lets the draft model a draft on while the target verifies, and parentheses nest; `>` binds closest,
then `&` and `?`. The second draft of a kind is called, for instance, model#2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from forerun.errors import ConfigError, shorten, shown, suggest

COPYING = ("ngram", "suffix", "retrieval")  # drafts that copy
SIMPLE = ("off", "auto", "ngram", "suffix", "recycle")  # which need nothing
LOADED = ("model", "medusa", "mlp", "eagle", "eagle3", "mtp", "block")  # drafts with weights
ITSELF = re.compile(  # how a target drafts for itself
    r"int8|int4|layers=(?:auto|\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)|window=[1-9]\d{0,7}"
)
AHEAD = "ahead"  # what lets a draft go on while the target verifies
# where a draft begins
NAME = rf"(?:(?:{'|'.join((*SIMPLE, *COPYING, *LOADED, 'self'))})(?:[:+|?&>)]|$)|{AHEAD}\()"
WORD = re.compile(r"[^:+|?&>()]*")
NEXT = re.compile(rf"[+|?&>](?=\(*{NAME})")  # where an argument ends
NEXT_OF_LOADED = re.compile(rf"[|?&>](?=\(*{NAME})")  # a directory may be called "a+suffix"
LIST = re.compile(
    r"(?:^|[+|?&>(])(?:retrieval:|self:layers=)[^+|?&>]*$"
)  # whose argument may be several, by commas
SIGNS = "+?&>"  # what holds drafts together, the loosest first
READ = (("+", "|"), ("?",), ("&",), (">",))  # the same as they may be written
DEEP, LONGEST = 8, 200  # parentheses within one another; characters of what is asked of an engine


@dataclass(frozen=True, slots=True)
class Leaf:
    """One draft: its kind, what it needs to be told, and which of those of its kind it is, from
    1."""

    kind: str
    argument: str = ""
    number: int = 1

    @property
    def name(self) -> str:
        """What it is called: model, and a second one model#2."""
        return self.kind if self.number == 1 else f"{self.kind}#{self.number}"

    def __str__(self) -> str:
        return self.name

    def leaves(self) -> Iterator[Leaf]:
        """All drafts that are named, in order."""
        yield self


@dataclass(frozen=True, slots=True)
class Ahead:
    """A draft that goes on while the target verifies."""

    part: Leaf | Several | Ahead

    def __str__(self) -> str:
        return f"{AHEAD}({self.part})"

    def leaves(self) -> Iterator[Leaf]:
        """All drafts that are named, in order."""
        yield from self.part.leaves()


@dataclass(frozen=True, slots=True)
class Several:
    """Drafts that draft for one request: in turn (+), the best of them (?), all of them in one tree
    (&), or each for the next (>)."""

    how: str
    parts: tuple[Leaf | Several | Ahead, ...]

    def __str__(self) -> str:
        return self.how.join(
            f"({part})" if self.needs_parentheses(part) else str(part) for part in self.parts
        )

    def needs_parentheses(self, part: Leaf | Several | Ahead) -> bool:
        """Whether a part binds less closely than what holds the parts together."""
        return isinstance(part, Several) and SIGNS.index(part.how) < SIGNS.index(self.how)

    def leaves(self) -> Iterator[Leaf]:
        """All drafts that are named, in order."""
        for part in self.parts:
            yield from part.leaves()


Said = Leaf | Several | Ahead  # what an option says


def read_draft(spec: str) -> Said:
    """A draft option. Raises ConfigError, which says where it stops making sense."""
    seen = Counter[str]()

    def make(name: str, argument: str, place: str) -> Leaf:
        _check(name, argument, place)
        seen[name] += 1
        return Leaf(name, argument, seen[name])

    found = _Reader(spec, make).whole()
    kinds = [leaf.kind for leaf in found.leaves()]
    _check_once([kind for kind in kinds if kind not in (*LOADED, "self")], spec)
    for kind in kinds:
        if kind in ("off", "auto") and len(kinds) > 1:
            raise ConfigError(f"{kind!r} cannot go with others in {shown(spec)}: give it alone")
    return found


def read_name(name: str, known: Collection[str]) -> Said:
    """What is asked of an engine, by names that it knows. Raises ConfigError."""

    def make(said: str, argument: str, _place: str) -> Leaf:
        if said not in known or argument:
            raise ConfigError(
                f"this engine has no draft {shorten(name)}: {suggest(said, ['off', *known])}"
            )
        kind, _, number = said.partition("#")
        return Leaf(kind, number=int(number) if number.isdigit() else 1)

    found = _Reader(name[:LONGEST], make).whole()
    _check_once([leaf.name for leaf in found.leaves()], name)
    return found


def joined(specs: Sequence[str]) -> str:
    """One option for several drafts, the best of them. Raises ConfigError."""
    for spec in specs:
        read_draft(spec)
    whole = (
        specs[0]
        if len(specs) == 1
        else "?".join(spec if spec in SIMPLE else f"({spec})" for spec in specs)
    )
    read_draft(whole)
    return whole


def parse_draft(spec: str) -> tuple[tuple[str, str], ...]:
    """The drafts of an option as (kind, argument), in order. Raises ConfigError."""
    return tuple((leaf.kind, leaf.argument) for leaf in read_draft(spec).leaves())


def draft_name(spec: str) -> str:
    """What the engine calls the proposer of a draft option. Raises ConfigError."""
    return str(read_draft(spec))


def names_in(name: str) -> list[str]:
    """The drafts in what the engine calls a proposer."""
    return [part for part in re.split(r"[+|?&>()]", name) if part and part != AHEAD]


def kind_of_name(name: str) -> str:
    """The kind of draft that has a name: model#2 is a model."""
    return name.partition("#")[0]


def drafts_in(text: str) -> list[str]:
    """Draft options by commas, which stand within some of them, too."""
    found: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if found and LIST.search(found[-1]) and not re.match(rf"\(*{NAME}", part):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


class _Reader:
    """Reads an option from left to right."""

    def __init__(self, spec: str, make: Callable[[str, str, str], Leaf]) -> None:
        """`make` is told the name and argument of each draft, and where they stand."""
        self.spec, self.make, self.at, self.open = spec, make, 0, 0

    def whole(self) -> Said:
        found = self._several()
        if self.at < len(self.spec):
            raise ConfigError(
                f"{self._here()} is one ) too many, or a + | ? & or > is missing before it"
            )
        return found

    def _several(self, level: int = 0) -> Said:
        """What signs of a level hold together, the loosest first."""
        if level == len(READ):
            return self._one()
        signs, parts = READ[level], [self._several(level + 1)]
        while self.spec[self.at : self.at + 1] in signs:
            self.at += 1
            parts.append(self._several(level + 1))
        how = signs[0]
        flat = [
            own
            for p in parts
            for own in (p.parts if isinstance(p, Several) and p.how == how else (p,))
        ]
        return Several(how, tuple(flat)) if len(flat) > 1 else flat[0]

    def _one(self) -> Said:
        if self.spec.startswith(f"{AHEAD}(", self.at):
            self.at += len(AHEAD)
            return Ahead(self._one())
        if self.spec[self.at : self.at + 1] != "(":
            return self._leaf()
        if self.open == DEEP:
            raise ConfigError(f"{self._here()} is one parenthesis too deep: nest at most {DEEP}")
        self.at, self.open = self.at + 1, self.open + 1
        found = self._several()
        if self.spec[self.at : self.at + 1] != ")":
            raise ConfigError(f"{shown(self.spec)} has no ) for each of its (: add what is missing")
        self.at, self.open = self.at + 1, self.open - 1
        return found

    def _leaf(self) -> Leaf:
        word = WORD.match(self.spec, self.at)
        assert word is not None
        name, start = word.group(), self.at
        self.at, argument = word.end(), ""
        if self.spec[self.at : self.at + 1] == ":":
            begin = self.at + 1
            self.at = self._end(name, begin)
            argument = self.spec[begin : self.at]
        return self.make(name, argument, self._place(start))

    def _end(self, name: str, begin: int) -> int:
        """Where an argument ends: before what goes on with another draft, or closes a parenthesis
        around it."""
        found = (NEXT_OF_LOADED if name in LOADED else NEXT).search(self.spec, begin)
        end = found.start() if found else len(self.spec)
        opened = 0
        for at in range(begin, end):
            opened += (self.spec[at] == "(") - (self.spec[at] == ")")
            if opened < 0 and self.open:
                return at
        return end

    def _here(self) -> str:
        return f"{shown(self.spec[self.at :])} in {shown(self.spec)}"

    def _place(self, start: int) -> str:
        return (
            f" (at character {start + 1} of {shown(self.spec)})"
            if start or self.at < len(self.spec)
            else ""
        )


def _check_once(names: Sequence[str], spec: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name!r} stands twice in {shown(spec)}: name each draft once")


def _check(name: str, argument: str, place: str) -> None:
    if name in LOADED and not argument:
        where = f"write {name}:DIRECTORY or {name}:HUB_ID{place}"
        raise ConfigError(f"draft {name!r} needs to be told where it is: {where}")
    if name == "retrieval" and not argument:
        raise ConfigError(
            f"draft 'retrieval' needs an index: write retrieval:INDEX, which forerun index makes{place}"
        )
    if name == "self" and not ITSELF.fullmatch(argument):
        raise ConfigError(
            f"a model cannot draft for itself as {argument!r}: write self:int8 or self:int4 (rounded), self:layers=12"
            f" (its first layers), self:layers=0-9,20-29 (these) or self:layers=auto (as is found to pay), or"
            f" self:window=1024 (of its keys){place}"
        )
    if name not in (*LOADED, *SIMPLE, *COPYING, "self"):
        known = [*SIMPLE, *(f"{n}:..." for n in ("retrieval", "self", *LOADED))]
        raise ConfigError(f"there is no draft {shown(name)}{place}: {suggest(name, known)}")
    if name in ("off", "auto", "ngram", "suffix") and argument:
        raise ConfigError(f"draft {name!r} takes no argument, but was given {argument!r}{place}")
