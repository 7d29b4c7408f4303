"""Drafters for a target on the Hub, which has no word for them: by what their configuration, card
and name say.

Only the configuration of a drafter says for certain whom it verifies with, so that of every likely
candidate is read. Names and cards alone are reasons, too, but weaker ones: many cards name the
drafter that was converted, or nobody."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.catalogue import far
from forerun.catalogue.facts import TOKENIZERS, Facts
from forerun.catalogue.fit import bare, same_model
from forerun.catalogue.layout import refusal, said_of
from forerun.draft.registry import WORDS
from forerun.errors import LoadError
from forerun.models.files import title

TAGS = ("speculative-decoding", "speculators", "eagle3", "dflash", "draft-model", "forerun")
ASKED = ("eagle3", "speculator", "dflash", "dspark", "medusa", "mtp", "pard", "draft")  # in names
MOST, MOST_READ, AT_ONCE = (
    30,
    24,
    6,
)  # answers to a question, configurations that are read, at a time
PARTS = re.compile(
    r"\d+(?:\.\d+)?[a-z]?(?![a-z0-9])|[a-z]+|\d+(?:\.\d+)?"
)  # of names: llama, 3.1, 8b
VERIFIER, BASE, NAME, TAG = 100, 60, 30, 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A repository that may be a drafter for a target.

    Attributes:
        at: what the Hub lists of it.
        score: how much speaks for it.
        reasons: what does.
        facts: what its configuration says; None where it was not read.
    """

    at: far.Repository
    score: int
    reasons: tuple[str, ...]
    facts: Facts | None = field(default=None, repr=False)

    @property
    def draft(self) -> str:
        """What to write behind `--draft`, "" where forerun cannot draft with it or nobody
        looked."""
        return said_of(self.facts) if self.facts else ""

    @property
    def domains(self) -> tuple[str, ...]:
        """The kinds of text it is for, as its card or its tags say."""
        tagged = (
            tag.partition(":")[2].lower() for tag in self.at.tags if tag.startswith("domain:")
        )
        return tuple(dict.fromkeys((*Facts(self.at.name, card=self.at.card).domains, *tagged)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        kind = self.facts.kind if self.facts else None
        return {
            "name": self.at.name, "score": self.score, "reasons": list(self.reasons),
            "family": kind.family if kind else "", "dialect": kind.dialect if kind else "", "draft": self.draft,
            "reason": refusal(self.facts) if self.facts else "its configuration was not read",
            "domains": list(self.domains), "downloads": self.at.downloads,
        }  # fmt: skip


def search(target: str, domain: str | None = None) -> tuple[list[Candidate], list[str]]:
    """Candidates for a target by its Hub id or name, the likeliest first, and a line for each
    question that failed. Raises LoadError where the Hub cannot be asked at all."""
    repositories, notes = _ask(target, domain)
    likely = sorted(filter(None, (_judge(at, target) for at in repositories)), key=_order)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        read = list(pool.map(lambda one: _read(one, target), likely[:MOST_READ]))
    found = [one for one in [*read, *likely[MOST_READ:]] if one is not None]
    found = [one for one in found if domain is None or domain.lower() in one.domains]
    return sorted(found, key=_order), notes


def _order(one: Candidate) -> tuple[int, bool, int, str]:
    return -one.score, not one.draft, -one.at.downloads, one.at.name


def _ask(target: str, domain: str | None) -> tuple[list[far.Repository], list[str]]:
    """What the Hub answers to all questions, each repository once."""
    try:
        far.reach()
    except LoadError as error:
        raise LoadError(
            f"search needs the network, {error}; forerun drafters list says what is here"
        ) from None
    questions: list[dict[str, Any]] = [{"search": f"{title(target)} {word}"} for word in ASKED]
    questions += [
        {"search": " ".join([*PARTS.findall(bare(target)), "eagle3"])}
    ]  # in another order, glued otherwise
    if far.REPOSITORY.fullmatch(target):
        questions += [{"filter": [f"base_model:{target}", tag]} for tag in TAGS]
    if domain:
        questions.append({"search": title(target), "filter": f"domain:{domain.lower()}"})
    found: dict[str, far.Repository] = {}
    failed: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for answer in pool.map(_answer, questions):
            if isinstance(answer, str):
                failed.append(answer)
                continue
            found |= {at.name: at for at in answer}
    if len(failed) == len(questions):
        raise LoadError(f"{failed[0]}; forerun drafters list says what is here")
    return list(found.values()), list(dict.fromkeys(failed))


def _answer(question: dict[str, Any]) -> list[far.Repository] | str:
    """The repositories of one answer, or why there is none."""
    from huggingface_hub import HfApi

    try:
        with far.asking("the Hub gives no answer"):
            models = HfApi().list_models(
                **question, limit=MOST, sort="downloads", full=True, cardData=True
            )
            found = list(_listed(models))
    except LoadError as error:
        return str(error)
    return found


def _listed(models: Iterable[Any]) -> Iterator[far.Repository]:
    for info in models:
        if isinstance(info.id, str) and far.REPOSITORY.fullmatch(info.id) and ".." not in info.id:
            yield far.listed(info.id, info)


def _judge(at: far.Repository, target: str) -> Candidate | None:
    """A candidate by its card and name; None for what says nowhere that it is a drafter, or is the
    target itself."""
    words = _words(at)
    if not words or at.name.lower() == target.lower():
        return None
    reasons, score = [], 0
    base = at.card.get("base_model")
    if any(
        isinstance(name, str) and same_model(name, target)
        for name in (base if isinstance(base, list) else [base])
    ):
        reasons.append("its card says that its base model is the target")
        score += BASE
    likeness = _likeness(at.name, target)
    if likeness:
        more = "" if likeness == NAME else ", and more, so that it may be for a relative"
        reasons.append(f"its name says {words[0]} and the target{more}")
        score += likeness
    if set(at.tags) & set(TAGS):
        score += TAG
    return Candidate(at, score, tuple(reasons)) if score else None


def _words(at: far.Repository) -> list[str]:
    """The words that make a drafter of a repository, of its name first, then of its tags."""
    name = at.name.partition("/")[2].lower()
    return [word for word in WORDS if word in name] + [
        word for word in WORDS if word in {t.lower() for t in at.tags}
    ]


def _likeness(name: str, target: str) -> int:
    """What the name of a repository is worth: it must have all parts of the target's, in any order,
    and where it has other words, too, such as instruct, it is worth half."""
    own = name.partition("/")[2].lower()
    for word in WORDS:
        own = own.replace(word, " ")
    parts, wanted = Counter(PARTS.findall(own)), Counter(PARTS.findall(bare(target)))
    if not wanted or wanted - parts:
        return 0
    return NAME // 2 if any(len(part) > 1 and part.isalpha() for part in parts - wanted) else NAME


def _read(one: Candidate, target: str) -> Candidate | None:
    """A candidate with what its configuration says; None where that says that it is for another
    target."""
    try:
        raw = far.read_object(one.at.name, "config.json", one.at.commit)
    except LoadError:
        return one if one.reasons else None
    tokenizer = next((name for name in TOKENIZERS if name in one.at.files), "")
    facts = Facts(one.at.name, raw=raw, card=one.at.card, at=one.at, vocabulary=tokenizer)
    verifier = replace(facts, card={}).made_for
    if same_model(verifier, target):
        reason = "its configuration names the target as its verifier"
        return replace(one, facts=facts, score=one.score + VERIFIER, reasons=(reason, *one.reasons))
    if verifier and facts.kind.dialect == "speculators":
        return None
    is_model = facts.kind.family == "lm" and not any(
        word in one.at.name.lower() for word in ("draft", "pard")
    )
    return None if is_model or not one.reasons else replace(one, facts=facts)
