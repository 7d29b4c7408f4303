"""The law of sampled tokens: what the engine says at temperature 1, by a sequential test against
the target's own law.

For each token said, the target's exact law comes from a separate pass over the finished text.
Events to bet on are
named from what stood before the token: the target's favourite, the tokens the drafter finds
likelier than the target does (any rule that lets through too much, or too little, shows there
first), the drafter's favourite."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from forerun.check import digits
from forerun.check.findings import Finding
from forerun.check.subject import Ask, Said, Schedule, Subject
from forerun.check.wager import ALPHA, Wager
from forerun.cli.progress import Tell, nothing
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Proposal
from forerun.verify import Rule

EVENTS = ("the target's favourite", "what the draft finds likelier", "the draft's favourite")
UNDRAFTED = (
    "the target's favourite",
    "a token of even id",
    "the target's second choice",
)  # events without a law to draft
TOKENS = 24  # of a text
SCHEDULE = Schedule(8, 64, 3)


def bet(
    subject: Subject, prompts: Sequence[tuple[int, ...]], rule: Rule, draft: str, goal: int, deadline: float,
    tell: Tell = nothing,
) -> Wager:  # fmt: skip
    """Let the engine say texts until the law is refuted, `goal` tokens are said or the time is
    over."""
    wager, seed, began = Wager(len(EVENTS)), 0, time.monotonic()
    while (
        wager.tokens < goal
        and not wager.refuted
        and (time.monotonic() < deadline or not wager.tokens)
    ):
        used = (time.monotonic() - began) / max(deadline - began, 1e-9)
        tell(
            f"{rule.name} with {draft}, {wager.tokens} tokens",
            min(max(wager.tokens / goal, used), 1.0),
            1,
        )
        asks = []
        for prompt in itertools.islice(itertools.cycle(prompts), SCHEDULE.at_once):
            seed += 1
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)
            asks.append(Ask(prompt, params))
        for ask, said in zip(
            asks, subject.say(asks, rule, draft, SCHEDULE, trace=True), strict=True
        ):
            _settle(wager, subject, ask, said, rule.coupled)
    return wager


def _settle(wager: Wager, subject: Subject, ask: Ask, said: Said, coupled: bool) -> None:
    """Bet on every token of a text."""
    whole = [*ask.prompt, *said.tokens]
    laws = subject.logits(whole[:-1], first=len(ask.prompt) - 1).double().softmax(-1).cpu().numpy()
    drafted: list[np.ndarray | None] = []
    for round_, tokens in said.rounds:
        for node in round_.verdict.path[: len(tokens)]:
            drafted.append(None if coupled else proposal(round_.draft, node, laws.shape[1]))
    for p, q, token in zip(laws, drafted, said.tokens, strict=True):
        events = _events(p, q)
        wager.add(
            [bool(event[token]) for event in events], [float(p[event].sum()) for event in events]
        )


def proposal(draft: Draft, node: int, vocab: int) -> np.ndarray | None:
    """The law of the children of a node, given ones counted as certain; None if it has none. [V]

    It depends only on what stands before them: bets on it are bets before the draw.
    """
    children = draft.children()[node]
    if not children:
        return None
    q = np.zeros(vocab)
    if draft.probs is not None and any(
        draft.proposals[c] is not Proposal.DETERMINISTIC for c in children
    ):
        q += draft.probs[node]
    q[[draft.tokens[c] for c in children if draft.proposals[c] is Proposal.DETERMINISTIC]] = 1.0
    return q


def _events(p: np.ndarray, q: np.ndarray | None) -> list[np.ndarray]:
    """What EVENTS says, or UNDRAFTED where there is no draft, as marks of tokens, bool [V]. p [V],
    q [V]"""
    ids = np.arange(len(p))
    if q is None:
        return [ids == p.argmax(), ids % 2 == 0, ids == np.argpartition(p, -2)[-2]]
    return [ids == p.argmax(), q > p, ids == q.argmax()]


def check_law(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    rule: Rule,
    draft: str,
    goal: int,
    deadline: float,
    tell: Tell,
) -> Finding:
    """The finding for one rule and draft."""
    name, events = f"{rule.name} with {draft}", UNDRAFTED if rule.coupled else EVENTS
    try:
        wager = bet(subject, prompts, rule, draft, goal, deadline, tell)
    except AssertionError as error:
        return Finding("law", name, False, f"the engine stopped: {error}")
    excess, bound = wager.excess, wager.bound()
    worst = int(np.argmax(np.abs(excess)))
    details = {
        "tokens": wager.tokens, "evidence": wager.evidence, "alpha": ALPHA, "bound": bound,
        "excess": dict(zip(events, excess, strict=True)), "expected": dict(zip(events, wager.expected, strict=True)),
    }  # fmt: skip
    if wager.refuted:
        text = (
            f"refuted after {wager.tokens} tokens at temperature 1: {events[worst]}"
            f" {digits.off(wager.expected[worst] + excess[worst], wager.expected[worst])} (evidence"
            f" {digits.odds(wager.evidence)}, {digits.odds(1 / ALPHA)} refutes)"
        )
        return Finding("law", name, False, text, details)
    text = (
        f"{wager.tokens} tokens at temperature 1: evidence against {digits.odds(wager.evidence)}"
        f" ({digits.odds(1 / ALPHA)} refutes); {events[1]} comes {100 * excess[1]:+.1f} points off, true bias within"
        f" {100 * bound:.1f} points of that ({1 - ALPHA:.2%})"
    )
    return Finding("law", name, True, text, details)
