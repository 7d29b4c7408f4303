"""Drafters for a target: those on this machine with their measurements, and candidates on the Hub.

On the Hub nothing marks a drafter. Only its configuration says for certain which target it was made
for, so that of every likely candidate is read. Its card and its name count too, but less: many
cards name the drafter that was converted, or nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.catalog import hub
from forerun.catalog.facts import TOKENIZERS, Facts, facts_at, local_path
from forerun.catalog.fit import (
    bare_name,
    checks,
    draft_argument,
    fits,
    refusal,
    same_model,
    sizes_of,
)
from forerun.catalog.measurements import MAX_NAME, Measurement, load
from forerun.catalog.survey import survey
from forerun.draft.eagle.mtp_formats import has_own_module
from forerun.draft.kinds import BUNDLED, WORDS, Json, Kind, Look, inner, recognise
from forerun.errors import LoadError, RequestError
from forerun.models.files import is_gguf, read_object, title
from forerun.models.hub import hub_errors
from forerun.models.local import LocalModel, cached_repositories, list_local_models

MAX_DEPTH = 4  # folders below one that is searched
MAX_FOLDERS = 20_000
SKIPPED_FOLDERS = ("node_modules", "site-packages", "__pycache__")
SHOWN_CATEGORIES = 3
HEAD_FILES = ("eagle3", "dflash", "dspark")  # parts of the names of GGUF files of heads

TAGS = ("speculative-decoding", "speculators", "eagle3", "dflash", "draft-model", "forerun")
QUERY_WORDS = (
    *("eagle3", "speculator", "dflash", "dspark", "medusa", "mtp", "pard", "draft"),
    "assistant",
)
MAX_ANSWERS = 30  # repositories per query
MAX_READ = 24  # configurations that are read
NUM_THREADS = 6
NAME_PARTS = re.compile(r"\d+(?:\.\d+)?[a-z]?(?![a-z0-9])|[a-z]+|\d+(?:\.\d+)?")  # llama, 3.1, 8b
SCORE_VERIFIER, SCORE_BASE, SCORE_NAME, SCORE_TAG = 100, 60, 30, 10


# On this machine.


@dataclass(frozen=True, slots=True)
class LocalDrafter:
    """A drafter on this machine.

    Attributes:
        facts: what it is.
        origin: bundled, directory, hub, checkpoint if it is in the target's own, or the program
            whose model it is.
        draft: its argument for `--draft`, "" where forerun cannot draft with it.
        reason: why forerun cannot draft with it.
        measured: its measurements, the fastest first.
    """

    facts: Facts
    origin: str
    draft: str
    reason: str
    measured: tuple[Measurement, ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        """The kinds of text that its card names or that it was measured on."""
        measured = (m.category.lower() for m in self.measured)
        return tuple(dict.fromkeys((*self.facts.domains, *measured)))

    def best_speed(self, domain: str | None = None) -> float:
        """Return the highest speed relative to plain decoding; 0 where none was measured.

        Measurements of `domain` count if there are any, else all.
        """
        own = [m for m in self.measured if domain is None or m.category.lower() == domain.lower()]
        return max((m.times_plain or 0.0 for m in own or self.measured), default=0.0)

    def figures(self) -> list[str]:
        """Return accepted length and speed of the first few kinds of text, for a table."""
        best: dict[str, Measurement] = {}
        for m in self.measured:
            best.setdefault(m.category, m)
        return [
            f"{m.category}: {m.accepted_length:.2f} tokens/pass"
            + (f", {m.times_plain:.2f}x plain" if m.times_plain else "")
            for m in list(best.values())[:SHOWN_CATEGORIES]
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        own = {"origin": self.origin, "draft": self.draft, "reason": self.reason}
        measured = [asdict(m) for m in self.measured]
        return self.facts.summary() | own | {"target": self.facts.made_for, "measured": measured}


def find_local(
    target: str | None = None, folders: Sequence[Path] = (), domain: str | None = None
) -> tuple[list[LocalDrafter], list[str]]:
    """Return the drafters on this machine, the fastest first, and notes on unreadable ones.

    Nothing is downloaded.

    Args:
        target: a local model; only drafters for it, and smaller models with its vocabulary.
        folders: searched besides the bundled drafters and the Hub's cache.
        domain: only drafters for, or measured on, this kind of text.

    Raises:
        RequestError: the target is not on this machine.
    """
    notes: list[str] = []
    found = [(facts, origin) for facts, origin in _heads(folders, notes) if _is_head(facts.kind)]
    if target is not None:
        path = local_path(target)
        if path is None:
            raise RequestError(
                f"{target} is not here: forerun models lists local models, and forerun drafters"
                " search searches the Hub"
            )
        own = facts_at(path, target)
        sizes = sizes_of(own)
        found = [
            (facts, origin)
            for facts, origin in found
            if same_model(facts.made_for, target)
            or (not facts.made_for and fits(checks(facts, sizes)[:-1]))
        ]
        if own.path is not None and has_own_module(own.path):  # its checkpoint has a drafter in it
            found.append((replace(own, raw=own.raw | {"own_module": True}), "checkpoint"))
        found += _smaller_models(target, path, folders)
    stored = load()
    drafters = [_with_measurements(facts, origin, target, stored) for facts, origin in found]
    drafters = [d for d in drafters if domain is None or domain.lower() in d.domains]
    return sorted(drafters, key=lambda d: (-d.best_speed(domain), d.facts.bytes)), notes


def _with_measurements(
    facts: Facts, origin: str, target: str | None, stored: Iterable[Measurement]
) -> LocalDrafter:
    names = {facts.name}
    if facts.path:
        names |= {str(facts.path), str(facts.path.resolve())}
    measured = [m for m in stored if m.drafter in names]
    measured = [m for m in measured if target is None or same_model(m.target, target)]
    measured += training_measurements(facts)
    measured.sort(key=lambda m: (-(m.times_plain or 0), -m.accepted_length))
    if facts.kind.format == "native" and origin != "checkpoint":
        # its module drafts for the model itself alone, and for another target the whole model does
        return LocalDrafter(facts, origin, f"model:{facts.name}", "", tuple(measured))
    return LocalDrafter(facts, origin, draft_argument(facts), refusal(facts), tuple(measured))


def _is_head(kind: Kind) -> bool:
    """Return True for a directory or file that is not a model of its own."""
    return kind.family != "lm" and kind.format != "native"


def _heads(folders: Sequence[Path], notes: list[str]) -> Iterator[tuple[Facts, str]]:
    """Yield directories whose configuration may be that of a head, and GGUF files that are named
    as heads, each once."""
    candidates = [(str(path), path, "bundled") for path in sorted(BUNDLED.glob("*"))]
    candidates += [(name, path, "hub") for name, path in cached_repositories()]
    candidates += [(str(path), path, "directory") for folder in folders for path in _below(folder)]
    seen = set()
    for name, path, origin in candidates:
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        try:
            raw = {} if path.is_file() else read_object(path / "config.json")
        except LoadError:
            continue  # no model, or an unfinished download
        if path.is_file() or _is_head(recognise(Look(raw))):
            try:
                yield facts_at(path, name), origin
            except LoadError as error:
                notes.append(str(error))


def _below(folder: Path) -> Iterator[Path]:
    """Yield directories with a config.json, and GGUF files that llama.cpp's naming rule says are
    heads; hidden directories and links to folders are left out."""
    for count, (path, names, files) in enumerate(os.walk(folder)):
        directory = Path(path)
        is_deep = len(directory.relative_to(folder).parts) >= MAX_DEPTH or count > MAX_FOLDERS
        kept = (n for n in names if not n.startswith(".") and n not in SKIPPED_FOLDERS)
        names[:] = [] if is_deep else sorted(kept)
        if "config.json" in files:
            yield directory
        for file in sorted(files):
            if is_gguf(file) and any(mark in file.lower() for mark in HEAD_FILES):
                yield directory / file


def _smaller_models(
    target: str, path: Path, folders: Sequence[Path]
) -> Iterator[tuple[Facts, str]]:
    """Yield local models with the target's vocabulary that are much smaller."""
    found, _ = list_local_models(folders)
    if all(model.path.resolve() != path.resolve() for model in found):
        found.append(LocalModel(target, path, "directory"))
    rows = survey(found)
    own = next(row for row in rows if Path(row.path).resolve() == path.resolve())
    for row in rows:
        if row.can_draft_for(own):
            with suppress(LoadError):
                yield facts_at(Path(row.path), row.name), row.origin


def training_measurements(facts: Facts) -> list[Measurement]:
    """Return `forerun train`'s results: per kind of text the last at the lowest temperature."""
    report: Json = {}
    if facts.path:
        with suppress(LoadError):
            report = read_object(facts.path / "training.json")
    entries = report.get("measured")
    best: dict[str, Measurement] = {}
    for entry in entries if isinstance(entries, list) else []:
        measurement = _training_measurement(facts, report, entry)
        if measurement is None:
            continue
        earlier = best.get(measurement.category)
        if earlier is None or measurement.temperature <= earlier.temperature:
            best[measurement.category] = measurement
    return list(best.values())


def _training_measurement(facts: Facts, report: Json, entry: Any) -> Measurement | None:
    """Return one entry of training.json, None if malformed; only held-out text has a speed."""
    try:
        task = str(entry["task"])[:MAX_NAME]
        speeds = [
            float(result["times_plain"])
            for result in inner(report, "speed").get("results", [])
            if result["draft"] not in ("off", "auto")
        ]
        return Measurement(
            str(report.get("target"))[:MAX_NAME],
            facts.name,
            facts.kind.draft,
            task,
            float(entry["accepted_length"]),
            max(speeds, default=None) if task == "held-out" else None,
            depth=str(entry["depth"]),
            temperature=float(entry["temperature"]),
            passes=int(entry["passes"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


# On the Hub.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A repository on the Hub that may be a drafter for a target.

    Attributes:
        repository: what the Hub lists of it.
        score: weight of the evidence.
        reasons: the evidence.
        facts: what its configuration says; None where it was not read.
    """

    repository: hub.Repository
    score: int
    reasons: tuple[str, ...]
    facts: Facts | None = field(default=None, repr=False)

    @property
    def draft(self) -> str:
        """Its argument for `--draft`; "" where forerun cannot draft with it or that is unknown."""
        return draft_argument(self.facts) if self.facts else ""

    @property
    def reason(self) -> str:
        """Why forerun cannot draft with it, or why that is unknown."""
        return refusal(self.facts) if self.facts else "its configuration was not read"

    @property
    def domains(self) -> tuple[str, ...]:
        """The kinds of text that its card or tags name."""
        tags = [tag for tag in self.repository.tags if tag.startswith("domain:")]
        own = Facts(self.repository.name, card=self.repository.card).domains
        return tuple(dict.fromkeys((*own, *(tag.partition(":")[2].lower() for tag in tags))))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        kind = self.facts.kind if self.facts else None
        return {
            "name": self.repository.name,
            "score": self.score,
            "reasons": list(self.reasons),
            "family": kind.family if kind else "",
            "dialect": kind.format if kind else "",
            "draft": self.draft,
            "reason": self.reason,
            "domains": list(self.domains),
            "downloads": self.repository.downloads,
        }


def search_hub(target: str, domain: str | None = None) -> tuple[list[Candidate], list[str]]:
    """Return candidates for a target's Hub id or name, the best first, and a note per failed query.

    Raises:
        LoadError: the Hub cannot be reached.
    """
    repositories, notes = _query(target, domain)
    likely = [found for found in (_rate(r, target) for r in repositories) if found]
    likely.sort(key=_order)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        read = list(pool.map(lambda candidate: _read(candidate, target), likely[:MAX_READ]))
    found = [c for c in [*read, *likely[MAX_READ:]] if c is not None]
    found = [c for c in found if domain is None or domain.lower() in c.domains]
    return sorted(found, key=_order), notes


def _order(c: Candidate) -> tuple[int, bool, int, str]:
    return -c.score, not c.draft, -c.repository.downloads, c.repository.name


def _query(target: str, domain: str | None) -> tuple[list[hub.Repository], list[str]]:
    """Return the repositories that the Hub finds, each once, and a note per failed query."""
    local = "forerun drafters list shows the local ones"
    try:
        hub.check_reachable()
    except LoadError as error:
        raise LoadError(f"search needs the network, {error}; {local}") from None
    queries: list[dict[str, Any]] = [{"search": f"{title(target)} {w}"} for w in QUERY_WORDS]
    # the parts of the name, for repositories that order or join them differently
    queries.append({"search": " ".join([*NAME_PARTS.findall(bare_name(target)), "eagle3"])})
    if hub.REPOSITORY.fullmatch(target):
        queries += [{"filter": [f"base_model:{target}", tag]} for tag in TAGS]
    if domain:
        queries.append({"search": title(target), "filter": f"domain:{domain.lower()}"})
    found: dict[str, hub.Repository] = {}
    failed: list[str] = []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for answer in pool.map(_answer, queries):
            if isinstance(answer, str):
                failed.append(answer)
            else:
                found |= {repository.name: repository for repository in answer}
    if len(failed) == len(queries):
        raise LoadError(f"{failed[0]}; {local}")
    return list(found.values()), list(dict.fromkeys(failed))


def _answer(query: dict[str, Any]) -> list[hub.Repository] | str:
    """Return the repositories of one query, or why it failed."""
    from huggingface_hub import HfApi

    try:
        with hub_errors("the Hub gives no answer"):
            models = HfApi().list_models(
                **query, limit=MAX_ANSWERS, sort="downloads", full=True, cardData=True
            )
            return [
                hub.checked(info.id, info)
                for info in models
                if isinstance(info.id, str) and hub.is_repository(info.id)
            ]
    except LoadError as error:
        return str(error)


def _rate(repository: hub.Repository, target: str) -> Candidate | None:
    """Rate a repository by card and name; None if neither indicates a drafter."""
    words = _drafter_words(repository)
    if not words or repository.name.lower() == target.lower():
        return None
    reasons = []
    score = 0
    base = repository.card.get("base_model")
    bases = base if isinstance(base, list) else [base]
    if any(isinstance(name, str) and same_model(name, target) for name in bases):
        reasons.append("its card names the target as its base model")
        score += SCORE_BASE
    name_score = _name_score(repository.name, target)
    if name_score:
        more = "" if name_score == SCORE_NAME else ", with other words: it may be for a variant"
        reasons.append(f"its name contains {words[0]} and the target{more}")
        score += name_score
    if set(repository.tags) & set(TAGS):
        score += SCORE_TAG
    return Candidate(repository, score, tuple(reasons)) if score else None


def _drafter_words(repository: hub.Repository) -> list[str]:
    """Return the words of its name, then of its tags, that say that it is a drafter."""
    name = repository.name.partition("/")[2].lower()
    tags = {tag.lower() for tag in repository.tags}
    return [word for word in WORDS if word in name] + [word for word in WORDS if word in tags]


def _name_score(name: str, target: str) -> int:
    """Return the score of a repository's name.

    It must contain all parts of the target's name, in any order; other words, such as instruct,
    halve the score.
    """
    own = name.partition("/")[2].lower()
    for word in WORDS:
        own = own.replace(word, " ")
    parts = Counter(NAME_PARTS.findall(own))
    wanted = Counter(NAME_PARTS.findall(bare_name(target)))
    if not wanted or wanted - parts:
        return 0
    has_others = any(len(part) > 1 and part.isalpha() for part in parts - wanted)
    return SCORE_NAME // 2 if has_others else SCORE_NAME


def _read(candidate: Candidate, target: str) -> Candidate | None:
    """Return a candidate with its configuration; None if that names another target."""
    repository = candidate.repository
    try:
        raw = hub.read_object(repository.name, "config.json", repository.commit)
    except LoadError:
        return candidate if candidate.reasons else None
    tokenizer = next((name for name in TOKENIZERS if name in repository.files), "")
    card = repository.card
    facts = Facts(
        repository.name, None, raw, vocabulary=tokenizer, card=card, repository=repository
    )
    verifier = replace(facts, card={}).made_for
    if same_model(verifier, target):
        reasons = ("its configuration names the target as its verifier", *candidate.reasons)
        return Candidate(repository, candidate.score + SCORE_VERIFIER, reasons, facts)
    if verifier and facts.kind.format == "speculators":
        return None
    says_draft = any(word in repository.name.lower() for word in ("draft", "pard"))
    if not candidate.reasons or (facts.kind.family == "lm" and not says_draft):
        return None
    return replace(candidate, facts=facts)
