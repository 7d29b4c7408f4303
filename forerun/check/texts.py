"""Texts, token for token: with speculation and without, however requests are batched and prompts
are cut.

`match` promises equality at every temperature, the ratio rules at temperature 0. Where a text
parts, the margin says how close the target's choice was: the gap between its best and second-best
score, noise included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from forerun import rng
from forerun.check.findings import Finding
from forerun.check.subject import Ask, Said, Schedule, Subject
from forerun.cli.progress import Tell
from forerun.verify import RULES, Noise, Rule

PLAIN = Schedule(1, 512, 0)
SCHEDULES = (Schedule(1, 512, 4), Schedule(8, 16, "auto"), Schedule(3, 7, 8))
Spell = Callable[[int], str]
NEAR = 16.0  # ties this many times the largest difference of a logit are near


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text left the plain one. `margin` is the gap of the two best scores of the target
    there."""

    prompt: int
    seed: int
    temperature: float
    schedule: str
    position: int
    plain: int
    speculative: int
    margin: float

    def words(self, spell: Spell | None) -> str:
        """Where, which tokens, and how sure the target was."""
        names = [_named(token, spell) for token in (self.speculative, self.plain)]
        return (
            f"prompt {self.prompt}, seed {self.seed}, temperature {self.temperature:g}, {self.schedule}: token"
            f" {self.position} is {names[0]} instead of {names[1]}, where the target's first choice leads the second by"
            f" {self.margin:.3g} in its score"
        )


def check_texts(
    subject: Subject, asks: Sequence[Ask], rules: Sequence[Rule], drafts: Sequence[str], noise: float,
    deadline: float, tell: Tell,
) -> Iterator[Finding]:  # fmt: skip
    """One finding a rule and draft. `noise` is the largest difference of a logit (0: none is
    allowed)."""
    tell("plain decoding")
    plain = subject.say(asks, RULES["match"], "off", PLAIN)
    greedy = [i for i, ask in enumerate(asks) if ask.params.greedy]
    arms = [
        (rule, draft)
        for rule in rules
        for draft in [*(["off"] if rule.name == "match" else []), *drafts]
    ]
    for number, (rule, draft) in enumerate(arms):
        mine = list(range(len(asks))) if rule.name == "match" else greedy
        done, apart, now = 0, list[Divergence](), time.monotonic()
        share = now + (deadline - now) / (
            len(arms) - number
        )  # no arm takes the time of those behind it
        try:
            for schedule in SCHEDULES:
                if time.monotonic() > (share if done else deadline):
                    break
                tell(f"{_name(rule.name, draft)}, {schedule}", done, len(SCHEDULES))
                said = subject.say([asks[i] for i in mine], rule, draft, schedule)
                apart += _divergences(
                    subject, asks, plain, dict(zip(mine, said, strict=True)), schedule
                )
                done += 1
        except AssertionError as error:
            yield Finding("texts", _name(rule.name, draft), False, f"the engine stopped: {error}")
            continue
        spell = subject.llm.tokenizer.spell if subject.llm.tokenizer else None
        yield _finding(_name(rule.name, draft), [asks[i] for i in mine], done, apart, noise, spell)


def _named(token: int, spell: Spell | None) -> str:
    if token < 0:
        return "the end of the text"
    return f"{spell(token)!r} (id {token})" if spell else str(token)


def _name(rule: str, draft: str) -> str:
    return f"{rule} with {draft}" if draft != "off" else "plain, batched"


def _divergences(
    subject: Subject,
    asks: Sequence[Ask],
    plain: Sequence[Said],
    said: dict[int, Said],
    schedule: Schedule,
) -> list[Divergence]:
    found = []
    for i, mine in said.items():
        theirs = plain[i].tokens
        at = next(
            (k for k, (a, b) in enumerate(zip(mine.tokens, theirs, strict=False)) if a != b), None
        )
        if at is None:
            if len(mine.tokens) == len(theirs):
                continue
            at = min(len(mine.tokens), len(theirs))
        params = asks[i].params
        seed, pair = params.seed or 0, ([*theirs, -1][at], [*mine.tokens, -1][at])
        margin = _margin(subject, [*asks[i].prompt, *theirs[:at]], params.heat, seed)
        found.append(Divergence(i, seed, params.heat, str(schedule), at, *pair, margin))
    return found


def _margin(subject: Subject, prefix: Sequence[int], temperature: float, seed: int) -> float:
    """The gap between the best and the second-best score behind `prefix`, in units of a logit."""
    logits = subject.logits(prefix, first=len(prefix) - 1, step=1).double()
    if temperature:
        logits = (
            rng.perturb(logits / temperature, [Noise(seed, len(prefix) - 1).target(0)])
            * temperature
        )
    best = torch.topk(logits[0], 2).values
    return float(best[0] - best[1])


def _finding(
    subject: str,
    asks: Sequence[Ask],
    done: int,
    apart: Sequence[Divergence],
    noise: float,
    spell: Spell | None = None,
) -> Finding:
    """What the texts of one rule and draft come to; `spell` gives the text of a token."""
    temperatures = sorted({ask.params.heat for ask in asks})
    details = {
        "texts": len(asks) * done, "tokens": sum(ask.params.max_tokens for ask in asks) * done,
        "schedules": [str(s) for s in SCHEDULES[:done]], "temperatures": temperatures,
        "divergences": [asdict(d) for d in apart],
    }  # fmt: skip
    if not done:
        return Finding(
            "texts", subject, None, "not compared: the time was over (raise --seconds)", details
        )
    what = (
        f"{len(asks) * done} texts of {asks[0].params.max_tokens} tokens at temperature"
        f" {' and '.join(f'{t:g}' for t in temperatures)} ({done} of {len(SCHEDULES)} schedules)"
    )
    if not apart:
        return Finding("texts", subject, True, f"{what}: the same tokens", details)
    far = [d for d in apart if not d.margin <= NEAR * noise]
    first = min(far or apart, key=lambda d: d.position)
    where = first.words(spell)
    if far:
        tie = (
            f"a lead of at most {NEAR * noise:.2g} would be a near tie"
            if noise
            else "none may part"
        )
        text = f"{len(far)} of {what} part from plain decoding ({tie}), the first one here: {where}"
        return Finding("texts", subject, False, text, details)
    text = f"{len(apart)} of {what} part, all at near ties (a lead of at most {NEAR * noise:.2g}), the first here: {where}"
    return Finding("texts", subject, True, text, details)
