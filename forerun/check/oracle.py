"""Checks of the verification rules on toy models: exact output distributions by enumeration, and a
test with real random numbers.

A toy model is a table from each prefix to the distribution of the next token, in float64 or in
fractions. `emission` runs a verification rule on every draft that a drafting scheme can produce
and on every outcome of the rule's coin tosses, so its result has no sampling error. A round is
exact if the tokens it emits, completed by the target, have the target's joint distribution. Exact
rounds compose by induction.

`enumerate_rule` checks a rule's own code in this way; probabilities are fractions, so a correct
rule has an error of exactly 0. Enumeration replaces the random numbers, so `check_random_numbers`
tests a rule with the real ones: a rule whose coins, residual draws and drafts share random numbers
is correct coin by coin, and still biased.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng

from forerun import rng
from forerun.check.report import Finding
from forerun.check.sequential_test import SequentialTest
from forerun.types import Draft, Proposal, Verdict
from forerun.verify import RULES, Noise, match
from forerun.verify.base import Coins, RatioRule
from forerun.verify.ratio import verify_block, verify_token, verify_tree

Probability = Any  # a float or a Fraction
Prefix = tuple[int, ...]
Table = dict[Prefix, np.ndarray]  # the next token's distribution [V] after each prefix
StringProbs = dict[Prefix, Probability]
Children = tuple[list[tuple[int, Proposal]], "np.ndarray | None", Probability]
Scheme = Callable[[Draft, int, np.ndarray], Iterable[Children]]
Proposals = Iterable[tuple[Draft, Probability]]


# Enumeration of coin tosses.


class EnumeratedCoins:
    """Coins that replay a script of choices, then take the first branch of every further toss.

    `others` are the scripts of branches not taken, `weight` the probability of those taken.
    """

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight: Probability = 1

    def accept(self, p: Probability, q: Probability, node: int) -> bool:
        """Return True on the branch of probability min(1, p / q)."""
        accepted = min(1, p / q) if q else int(p > 0)
        return bool(self._choose([True, False], [accepted, 1 - accepted]))

    def draw(self, weights: np.ndarray, node: int) -> int:
        """Return a token, one branch for each token of non-zero weight. weights [V]"""
        return int(self._choose(range(len(weights)), weights / weights.sum()))

    def _choose(self, values: Iterable[Any], probs: Iterable[Probability]) -> Any:
        branches = [(value, prob) for value, prob in zip(values, probs, strict=True) if prob > 0]
        choice = 0
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            self.others += [[*self.taken, other] for other in range(1, len(branches))]
        self.taken.append(choice)
        value, prob = branches[choice]
        self.weight *= prob
        return value


def outcomes(run: Callable[[EnumeratedCoins], Verdict]) -> Iterator[tuple[Verdict, Probability]]:
    """Yield every verdict of code that tosses coins, with the probability of its tosses.

    A verdict that is reached in several ways is yielded once for each.
    """
    scripts: list[list[int]] = [[]]
    while scripts:
        coins = EnumeratedCoins(scripts.pop())
        yield run(coins), coins.weight
        scripts += coins.others


# Toy models.


def softmax(logits: np.ndarray) -> np.ndarray:
    """Normalise logits along the last axis."""
    weights: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    probs: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return probs


def fractions(weights: Iterable[int]) -> np.ndarray:
    """Normalise integer weights in exact arithmetic. Returns [V] of Fraction (dtype object)."""
    weights = [int(w) for w in weights]
    return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)


def toy_models(kind: str, vocab: int, depth: int, seed: int) -> tuple[Table, Table]:
    """Return a random target and a random drafter for every prefix of at most `depth` tokens.

    Args:
        kind: "float"; "exact" (fractions); or "sparse" (fractions with zeros, one-hot
            distributions, and target and drafter sometimes equal).
        vocab: number of tokens.
        depth: length of the longest prefix.
        seed: seed of the random tables.
    """
    rng = default_rng(seed)
    target: Table = {}
    drafter: Table = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            if kind == "float":
                logits = rng.normal(size=vocab) * 1.5
                target[prefix] = softmax(logits)
                drafter[prefix] = softmax(logits + rng.normal(size=vocab) * 0.9)
            else:
                low = 0 if kind == "sparse" else 1
                p, q = rng.integers(low, 6, (2, vocab))
                p[rng.integers(vocab)] += p.sum() == 0
                q[rng.integers(vocab)] += q.sum() == 0
                same = kind == "sparse" and rng.random() < 0.2
                target[prefix] = fractions(p)
                drafter[prefix] = fractions(p if same else q)
    return target, drafter


# Drafting schemes. A scheme gets the draft so far, the node to expand and the drafter's
# distribution there, and yields every set of children with the distribution that its sampled
# tokens are drawn from and the probability of the set.


def prefix_of(draft: Draft, node: int) -> Prefix:
    """Return the tokens on the path from the root (excluded) to `node` (included)."""
    return tuple(draft.tokens[i] for i in draft.path_to(node)[1:])


def sampled(draft: Draft, node: int, q: np.ndarray) -> Iterator[Children]:
    """Draft a chain: one child, drawn from q."""
    for token in np.flatnonzero(q > 0):
        yield [(int(token), Proposal.SAMPLED)], q, q[token]


def greedy(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft a chain of most likely tokens, which are deterministic."""
    return [([(int(np.argmax(q)), Proposal.DETERMINISTIC)], None, 1)]


def mixed(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft a chain of deterministic and sampled tokens; the prefix decides which."""
    prefix = prefix_of(draft, node)
    if (sum(prefix) + len(prefix)) % 2:
        return greedy(draft, node, q)
    return sampled(draft, node, q)


def without_replacement2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft two different tokens without replacement; one where q has no second token."""
    for a in np.flatnonzero(q > 0):
        others = [b for b in np.flatnonzero(q > 0) if b != a]
        first = (int(a), Proposal.WITHOUT_REPLACEMENT)
        if not others:
            yield [first], q, q[a]
        for b in others:
            second = (int(b), Proposal.WITHOUT_REPLACEMENT)
            yield [first, second], q, q[a] * q[b] / sum(q[others])


def greedy_plus_one(
    draft: Draft, node: int, q: np.ndarray, sampled_first: bool = True
) -> Iterable[Children]:
    """Draft the most likely token deterministically, and one token sampled from the others."""
    best = int(np.argmax(q))
    rest = q.copy()
    rest[best] = 0
    top = (best, Proposal.DETERMINISTIC)
    if not rest.sum():
        yield [top], None, 1
        return
    rest = rest / rest.sum()
    for token in np.flatnonzero(rest > 0):
        pair = [(int(token), Proposal.SAMPLED), top]
        yield pair if sampled_first else pair[::-1], rest, rest[token]


CHAINS: dict[str, Scheme] = {"sampled": sampled, "greedy": greedy, "mixed": mixed}
TREES: dict[str, Scheme] = {"two samples": without_replacement2, "greedy + sample": greedy_plus_one}


# Exact distributions.


def proposals(scheme: Scheme, drafter: Table, depth: int) -> Iterator[tuple[Draft, Probability]]:
    """Yield every draft that a scheme can produce, with its probability.

    Nodes are expanded in the order in which they were added.
    """

    def expand(
        draft: Draft, rows: list[np.ndarray], weight: Probability
    ) -> Iterator[tuple[Draft, Probability]]:
        node = len(rows)
        if node == len(draft):
            probs = np.stack(rows)
            yield Draft(draft.tokens, draft.parents, draft.sources, draft.proposals, probs), weight
            return
        prefix = prefix_of(draft, node)
        leaf: Children = ([], None, 1)
        choices = [leaf] if len(prefix) == depth else scheme(draft, node, drafter[prefix])
        for children, q, prob in choices:
            wider = Draft([*draft.tokens], [*draft.parents], [*draft.sources], [*draft.proposals])
            for token, proposal in children:
                wider.add(token, node, "toy", proposal)
            row = drafter[()] * 0 if q is None else q
            yield from expand(wider, [*rows, row], weight * prob)

    yield from expand(Draft.root(0), [], 1)


def rows(draft: Draft, target: Table) -> np.ndarray:
    """Return the target's distribution after each node. [N, V]"""
    return np.stack([target[prefix_of(draft, node)] for node in range(len(draft))])


def emission(rule: RatioRule, drafts: Proposals, target: Table) -> StringProbs:
    """Return the distribution of the string that one round emits.

    Raises:
        AssertionError: the rule's verdict is not a path from the root followed by one token.
    """
    emitted: StringProbs = defaultdict(int)
    for draft, weight in drafts:
        p = rows(draft, target)
        for verdict, prob in outcomes(partial(rule, draft, p)):
            kept = tuple(draft.tokens[node] for node in verdict.path[1:])
            assert draft.path_to(verdict.path[-1]) == verdict.path, "not a path from the root"
            assert tuple(verdict.tokens[:-1]) == kept, "the tokens are not those of the path"
            emitted[tuple(verdict.tokens)] += weight * prob
    return emitted


def complete(emitted: StringProbs, target: Table, length: int) -> StringProbs:
    """Let the target continue every emitted string to `length` tokens."""
    probs: StringProbs = defaultdict(int, emitted)
    for short in range(length):
        for string in [s for s in probs if len(s) == short]:
            prob = probs.pop(string)
            for token in np.flatnonzero(target[string] > 0):
                probs[(*string, int(token))] += prob * target[string][token]
    return probs


def joint(target: Table, length: int) -> StringProbs:
    """Return the target's own distribution of strings of `length` tokens."""
    return complete({(): 1}, target, length)


# kind, vocabulary and depth of the toy models, each with every seed
TOY_MODELS = [
    ("exact", 2, 1),
    ("exact", 2, 2),
    ("sparse", 2, 2),
    ("exact", 3, 1),
    ("sparse", 3, 1),
    ("float", 3, 2),
]
SEEDS = range(3)
ROUNDING = 1e-12  # tolerance of a probability computed in float64
NUM_ROUNDS = 6000
BATCH_SIZE = 1000
# target and drafter that show a large bias if random numbers are shared
P = np.array([0.62, 0.25, 0.04, 0.08, 0.01])
Q = np.array([0.43, 0.02, 0.49, 0.05, 0.01])


class _LazyDraws:
    """The target's draw after each node, made by coins when it is read."""

    def __init__(self, p: np.ndarray, coins: Coins) -> None:
        self._p = p
        self._coins = coins

    def __getitem__(self, node: int) -> int:
        return self._coins.draw(self._p[node], node)


def match_by_coins(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Run the `match` rule with coins for its draws, as the ratio rules are run. p [N, V]"""
    return match.follow(draft, _LazyDraws(p, coins))  # type: ignore[arg-type]


ENUMERABLE: dict[str, RatioRule] = {
    "match": match_by_coins,
    "token": verify_token,
    "block": verify_block,
    "tree": verify_tree,
}


def enumerate_rule(
    name: str,
    rule: RatioRule,
    schemes: Mapping[str, Scheme] | None = None,
    exact: bool = True,
) -> Finding:
    """Compare the distribution that rounds of `rule` emit with the target's, on every toy model.

    Args:
        name: the rule's name.
        rule: its code, possibly with a fault.
        schemes: drafting schemes; by default all whose drafts the rule accepts.
        exact: demand an error of 0 where probabilities are fractions. False allows rounding there
            too, for faults that compute in float64: rounding alone must not reject them.
    """
    if schemes is None:
        schemes = {**CHAINS, **(TREES if RULES[name].branching else {})}
    num_cases = 0
    for scheme, grow in schemes.items():
        for kind, vocab, depth in TOY_MODELS:
            for seed in SEEDS:
                case = {"scheme": scheme, "kind": kind, "vocabulary": vocab}
                case |= {"depth": depth, "seed": seed}
                allowed = 0.0 if exact and kind != "float" else ROUNDING
                try:
                    wrong = _compare(rule, grow, case, allowed)
                except AssertionError as error:  # the rule noticed an impossible draft
                    wrong = {"error": str(error)}
                if wrong:
                    return Finding("rules", name, False, _describe(case, wrong), case | wrong)
                num_cases += 1
    text = f"{num_cases} combinations of toy model and drafting scheme: error 0"
    return Finding("rules", name, True, text, {"cases": num_cases})


def _compare(
    rule: RatioRule, grow: Scheme, case: Mapping[str, Any], allowed: float
) -> dict[str, Any]:
    """Return the string with the largest error of probability; {} if all are within `allowed`."""
    kind, vocab, depth, seed = (case[key] for key in ("kind", "vocabulary", "depth", "seed"))
    target, drafter = toy_models(kind, vocab, depth, seed)
    drafts = proposals(grow, drafter, depth)
    emitted = complete(emission(rule, drafts, target), target, depth + 1)
    expected = joint(target, depth + 1)
    errors = {s: emitted.get(s, 0) - expected.get(s, 0) for s in {*emitted, *expected}}
    worst = max(sorted(errors), key=lambda s: abs(errors[s]))
    if abs(errors[worst]) <= allowed:
        return {}
    target_prob = float(expected.get(worst, 0))
    error = float(errors[worst])
    return {"tokens": list(worst), "expected": target_prob, "error": error, "allowed": allowed}


def _describe(case: Mapping[str, Any], wrong: Mapping[str, Any]) -> str:
    where = (
        f"toy model {case['kind']}, seed {case['seed']}, {case['vocabulary']} tokens,"
        f" scheme {case['scheme']!r}, depth {case['depth']}"
    )
    if "tokens" not in wrong:
        return f"{where}: the rule rejected a draft as impossible: {wrong['error']}"
    tokens = " ".join(map(str, wrong["tokens"]))
    direction = "high" if wrong["error"] > 0 else "low"
    return (
        f"{where}: the probability of the tokens {tokens} is {abs(wrong['error']):.2g} too"
        f" {direction} (the target's is {wrong['expected']:.4g}, the allowed error"
        f" {wrong['allowed']:g})"
    )


def check_random_numbers(name: str, rule: RatioRule, noise: type[Noise] = Noise) -> Finding:
    """Test the first token of rounds with the real random numbers against the target P.

    Drafts are chains of two tokens sampled from Q.
    """
    subject = f"{name}, real random numbers"
    test = SequentialTest(len(P))
    for start in range(0, NUM_ROUNDS, BATCH_SIZE):
        noises = [noise(seed, 7) for seed in range(start, start + BATCH_SIZE)]
        for draft, own in zip(_sample_chains(noises), noises, strict=True):
            try:
                verdict = rule(draft, np.stack([P] * 3), own)
            except AssertionError as error:
                return Finding("rules", subject, False, f"the rule rejected a draft: {error}")
            test.add(np.arange(len(P)) == verdict.tokens[0], P)
        if test.rejected:
            break
    worst, words = test.describe_worst()
    details = {"rounds": test.num_tokens, "evidence": test.evidence}
    details |= {"token": worst, "bias": test.bias[worst]}
    text = f"{test.num_tokens} rounds: {test.describe()}"
    if test.rejected:
        text += f"; token {worst} {words}"
    return Finding("rules", subject, not test.rejected, text, details)


def _sample_chains(noises: Sequence[Noise]) -> list[Draft]:
    """Sample chains of two tokens from Q as a drafter does."""
    drafts = [Draft.root(0) for _ in noises]
    logits = torch.tensor(Q).log().expand(len(noises), -1)
    for node in range(2):
        drawn = rng.gumbel_argmax(logits, [noise.draft(node) for noise in noises])
        for draft, chosen in zip(drafts, drawn.tolist(), strict=True):
            draft.add(chosen, node, "toy", Proposal.SAMPLED)
            draft.probs = np.stack([Q, Q, 0 * Q])
    return drafts
