"""A report's results as a reader asks for them: named by what differs, grouped, the best first,
said in a sentence.

An arm is a way to decode: draft, depth, rule. A setting is all that arms are compared within:
weights, temperature and requests at once, and the model, machine and length where files of several
runs came together. Names mention what differs within the report and nothing else. Speed-ups are
only ever averaged over categories, within one setting, and geometrically, as ratios are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.report.lines import RUN

PLAIN = "off"
PLAIN_NAME = "plain decoding"
SETTING = (
    "model",
    "tokens",
    "quantization",
    "temperature",
)  # and the machine, and requests at once
NOTHING = "\N{EN DASH}"
SAME, UNCOMPARED, PARTLY_SAME = "same", "not compared", "same where compared"
TEXTS = {
    SAME: "token for token the same text",
    UNCOMPARED: "text not compared",
    PARTLY_SAME: "token for token the same text where texts were compared",
}
LONGEST_NAME = 60  # characters of a name within a sentence


@dataclass(frozen=True, slots=True)
class Entry:
    """One result with its names.

    Attributes:
        arm: draft, and depth and rule where these differ; `PLAIN_NAME` for plain decoding.
        conditions: the setting without requests, such as "int8 weights, temperature 0"; empty if
            there is but one.
        requests: at once.
        category: of the prompts.
        machine: what of it differs from others of the report, in words.
        values: the result as the report has it, with the fields of its run.
    """

    arm: str
    conditions: str
    requests: int
    category: str
    machine: str
    values: Mapping[str, Any]

    def __getitem__(self, field: str) -> Any:
        """A field of the result, or of its run."""
        return self.values[field]

    @property
    def plain(self) -> bool:
        """Whether this is plain decoding."""
        return bool(self["draft"] == PLAIN)


@dataclass(frozen=True, slots=True)
class Standing:
    """One arm in one setting.

    Attributes:
        entries: a result for each category, more where it was measured more than once.
        times: plain decoding, the geometric mean of the entries.
        interval: the 95 % one of a single entry; of several, the least and the greatest; None if
            unknown.
    """

    entries: Sequence[Entry]
    times: float
    interval: Sequence[float] | None


def entries_of(report: Mapping[str, Any]) -> list[Entry]:
    """The results of a checked report, in its order."""
    run = {name: report[name] for name in RUN}
    rows = [{**run, **result} for result in report["results"]]
    speculative = [row for row in rows if row["draft"] != PLAIN]
    arm_fields = [name for name in ("depth", "rule") if _differs(speculative, name)]
    fields = [name for name in SETTING if _differs(rows, name)]
    machines = [row["machine"] for row in rows]
    parts = [
        name
        for name in unique(name for machine in machines for name in machine)
        if _differs(machines, name)
    ]
    entries = []
    for row in rows:
        machine = ", ".join(
            f"{shown(name)} {shown(row['machine'].get(name, NOTHING))}" for name in parts
        )
        conditions = (machine, *(condition(name, row[name]) for name in fields))
        entries.append(
            Entry(
                arm=arm_name(row, arm_fields),
                conditions=", ".join(filter(None, conditions)),
                requests=row["requests"],
                category=shown(row["category"]),
                machine=machine,
                values=row,
            )
        )
    return entries


def _differs(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return len({str(row.get(name)) for row in rows}) > 1


def arm_name(row: Mapping[str, Any], fields: Iterable[str] = ("depth", "rule")) -> str:
    """An arm in words: "suffix, depth auto"."""
    if row["draft"] == PLAIN:
        return PLAIN_NAME
    return ", ".join([shown(row["draft"]), *(f"{name} {shown(row[name])}" for name in fields)])


def condition(name: str, value: Any) -> str:
    """One field of a setting in words."""
    if name == "quantization":
        return "weights as they are" if value == "none" else f"{shown(value)} weights"
    if name == "requests":
        return "one request at a time" if value == 1 else f"{value} requests at once"
    if name == "tokens":
        return f"{value} tokens"
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {shown(value)}"


def shown(value: Any) -> str:
    """Any text as one that can be shown: what is no printable character (control, order of writing)
    is replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def shorten(name: str, length: int = LONGEST_NAME) -> str:
    """A name of at most `length` characters; a long one loses some before its end, where paths and
    depths differ."""
    if len(name) <= length:
        return name
    end = (length - 1) * 2 // 3
    return name[: length - 1 - end] + "\N{HORIZONTAL ELLIPSIS}" + name[-end:]


def number(value: float | None) -> str:
    """Three digits that say something, with commas: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return NOTHING
    digits = 2 if value == 0 else min(max(2 - math.floor(math.log10(value)), 0), 4)
    return f"{value:,.{digits}f}"


def span(interval: Sequence[float]) -> str:
    """An interval: 1.40 to 1.60."""
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def in_brackets(interval: Sequence[float] | None) -> str:
    """An interval behind what it is of; nothing where it is not known."""
    return f" ({span(interval)})" if interval else ""


def unique(items: Iterable[Any]) -> list[Any]:
    """Each item once, where it first appears."""
    return list(dict.fromkeys(items))


def mean_ratio(values: Sequence[float]) -> float:
    """The geometric mean; 0 if one of them is."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def standings(entries: Sequence[Entry]) -> list[Standing]:
    """Every arm but plain decoding in every setting, the quickest first.

    An arm that lacks a category that another of its setting has is left out: its mean would be of
    something else."""
    found = []
    for place in unique((e.conditions, e.requests) for e in entries):
        here = [e for e in entries if (e.conditions, e.requests) == place and not e.plain]
        wanted = {e.category for e in here}
        for arm in unique(e.arm for e in here):
            mine = [e for e in here if e.arm == arm]
            if {e.category for e in mine} == wanted:
                found.append(_standing(mine))
    return sorted(found, key=lambda standing: -standing.times)


def _standing(entries: Sequence[Entry]) -> Standing:
    times = [entry["times_plain"] for entry in entries]
    if len(entries) > 1:
        return Standing(entries, mean_ratio(times), (min(times), max(times)))
    return Standing(entries, times[0], entries[0]["interval"])


def same_text(rows: Sequence[Any]) -> str:
    """Whether outputs were plain decoding's: `SAME`, `PARTLY_SAME`, `UNCOMPARED`, or "DIFFERENT
    ..." if one was not.

    Texts are not compared where a rule promises the same distribution rather than the same tokens.
    """
    differing = [row["first_difference"] for row in rows if row["same"] is False]
    if differing:
        known = [at for at in differing if at is not None]
        return f"DIFFERENT from token {min(known)}" if known else "DIFFERENT"
    compared = [row for row in rows if row["same"]]
    return (SAME if len(compared) == len(rows) else PARTLY_SAME) if compared else UNCOMPARED


def headline(entries: Sequence[Entry]) -> tuple[str, str]:
    """The report in a sentence, its claim and its terms: the quickest arm; how sure that is, where,
    and the text."""
    ranked = standings(entries)
    if not ranked:
        speed = max(entry["tokens_per_second"] for entry in entries)
        return f"{PLAIN_NAME}: {number(speed)} tokens/s", "no draft was measured"
    best = ranked[0]
    said = same_text(best.entries)
    where = place_of(best.entries[0], entries)
    terms = [*([where] if where else []), TEXTS.get(said, f"but the text is {said}")]
    draft, interval = arm_name(best.entries[0].values, ("depth",)), best.interval
    if len(best.entries) > 1:
        categories = len({entry.category for entry in best.entries})
        what = f"{categories} categories" if categories > 1 else f"{len(best.entries)} measurements"
        terms.insert(0, f"on average over {what}{in_brackets(interval)}")
        interval = None
    elif best.times >= 1 and interval and interval[0] < 1:
        terms.insert(0, "which may be chance")
    return claimed(draft, best.times, interval, terms)


def claimed(
    draft: str, times: float, interval: Sequence[float] | None, terms: Sequence[str]
) -> tuple[str, str]:  # fmt: skip
    """What is claimed of the quickest draft and its terms, or that none is quicker than plain
    decoding."""
    claim = f"{shorten(draft)}: {times:.2f} times {PLAIN_NAME}{in_brackets(interval)}"
    if times < 1:
        return f"No draft is quicker than {PLAIN_NAME}", ", ".join([f"the best is {claim}", *terms])
    return claim, ", ".join(terms)


def place_of(entry: Entry, entries: Sequence[Entry]) -> str:
    """The setting of an entry in words, as far as the others' differ."""
    several = len({e.requests for e in entries}) > 1
    words = (entry.conditions, condition("requests", entry.requests) if several else "")
    return ", ".join(filter(None, words))


def verdict(entries: Sequence[Entry]) -> tuple[bool, str]:
    """Whether losslessness held as far as it was promised, and that in a sentence."""
    compared = [e for e in entries if not e.plain and e["same"] is not None]
    differing = [e for e in compared if e["same"] is False]
    if differing:
        arm, category = (shorten(name) for name in (differing[0].arm, differing[0].category))
        return False, (
            f"{len(differing)} of {len(compared)} results gave another text than {PLAIN_NAME}; the first is"
            f" {arm}, {category}: {same_text(differing[:1])}"
        )
    if not compared:
        return True, "no text was compared: only the distribution of texts is promised here"
    every = "the one result" if len(compared) == 1 else f"all {len(compared)} results"
    return True, f"{every} that promised plain decoding's text gave it, token for token"
