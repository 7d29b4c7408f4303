"""The rule `match`: the output equals, token for token, plain decoding with the same seed.

This must hold for any draft, at any temperature, in any batch. Further tests check how often drafts
that share the target's noise agree with it, that a verdict does not depend on the batch, and in
what the rule `typical` is lossy."""

import itertools
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from forerun import rng
from forerun.check import oracle
from forerun.rng import Lane
from forerun.sampling.filters import SamplingState, filter_logits
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Proposal
from forerun.verify import RULES, Noise, match

VOCAB, LENGTH, END = 8, 7, 3


@dataclass
class Request:
    """A request of the toy engine: its drafter, its tokens and its sampling state."""

    seed: int
    params: SamplingParams
    drafter: str = "none"
    tokens: list[int] = field(default_factory=lambda: [1, 2])
    rounds: int = 0

    def __post_init__(self):
        self.state = SamplingState(self.params, self.tokens, [END])
        self.generator = random.Random(self.seed)

    @property
    def noise(self):
        return Noise(self.seed, len(self.tokens) - 1)

    def append(self, tokens):
        for token in tokens:
            self.tokens.append(token)
            self.state.append(token)


class ToyModel:
    """The next token depends on the last two. Logits are a table [V, V, V]."""

    def __init__(self, seed, noise_scale=0.0):
        self.table = self.random(seed) * 1.5 + self.random(9) * noise_scale

    @staticmethod
    def random(seed):
        shape = (VOCAB, VOCAB, VOCAB)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def logits(self, requests, drafts):
        """Return the logits after every node of every draft. [M, V]"""
        before, last = [], []
        for request, draft in zip(requests, drafts, strict=True):
            before += [request.tokens[-2], *(draft.tokens[parent] for parent in draft.parents[1:])]
            last += draft.tokens
        return self.table[torch.tensor(before), torch.tensor(last)]


TARGET, DRAFTER = ToyModel(0), ToyModel(0, noise_scale=0.6)


def no_draft(request):
    return Draft.root(request.tokens[-1])


def random_chain(request):
    tokens = [request.generator.randrange(VOCAB) for _ in range(request.generator.randrange(5))]
    return Draft.chain(request.tokens[-1], tokens, "random")


def random_tree(request):
    """Give nodes up to three children, which may be equal, down to a depth of at most 3."""
    draft, depths = no_draft(request), [0]
    for node in range(13):
        if node < len(draft) and depths[node] < 3:
            for _ in range(request.generator.randrange(4)):
                draft.add(request.generator.randrange(VOCAB), node, "random")
                depths.append(depths[node] + 1)
    return draft


def repetition(request):
    """Repeat the last token many times."""
    return Draft.chain(request.tokens[-1], [request.tokens[-1]] * 6, "repetition")


def coupled(requests, width, depth=3):
    """Draft trees of the `width` most likely tokens per node, given the target's noise."""
    drafts = [no_draft(request) for request in requests]
    for level in range(depth):
        scores = DRAFTER.logits(requests, drafts)
        keys = [
            request.noise.target(node_depth)
            for request, draft in zip(requests, drafts, strict=True)
            for node_depth in draft.depths()
        ]
        best = iter(rng.perturb(scores, keys).topk(width).indices.tolist())
        for draft in drafts:
            for node, node_depth in enumerate(draft.depths()):
                tokens = next(best)
                for token in tokens if node_depth == level else ():
                    draft.add(token, node, "coupled")
    return drafts


UNCOUPLED = {"none": no_draft, "chain": random_chain, "tree": random_tree, "repetition": repetition}
WIDTHS = {"coupled chain": 1, "coupled tree": 2}
DRAFTERS = [*UNCOUPLED, *WIDTHS]


def propose(requests):
    drafts = {id(r): UNCOUPLED[r.drafter](r) for r in requests if r.drafter in UNCOUPLED}
    for name, width in WIDTHS.items():
        group = [r for r in requests if r.drafter == name]
        if group:
            drafts |= {id(r): draft for r, draft in zip(group, coupled(group, width), strict=True)}
    return [drafts[id(r)] for r in requests]


def decode(requests, length=LENGTH):
    """Decode all requests as one batch; return the first `length` output tokens of each."""
    active = requests
    while active:
        drafts = propose(active)
        scores = filter_logits(TARGET.logits(active, drafts), drafts, [r.state for r in active])
        verdicts = match.verify(drafts, scores, [r.noise for r in active])
        for request, verdict in zip(active, verdicts, strict=True):
            assert len(verdict.tokens) == len(verdict.path)
            request.append(verdict.tokens)
            request.rounds += 1
        active = [r for r in active if len(r.tokens) < 2 + length]
    return [r.tokens[2 : 2 + length] for r in requests]


STATELESS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, min_p=0.05),
]
STATEFUL = [
    SamplingParams(
        temperature=1.0, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3
    ),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, min_tokens=4),
    SamplingParams(temperature=0.9, logit_bias={4: 2.0, END: 3.0}, min_tokens=6, top_p=0.8),
]


@pytest.mark.parametrize(
    "choices, seeds",
    [(STATELESS, 3000), pytest.param(STATELESS, 10_000, marks=pytest.mark.full), (STATEFUL, 300)],
    ids=["stateless", "stateless at length", "stateful"],
)
def test_any_draft_gives_the_tokens_of_plain_decoding(choices, seeds):
    def requests(drafters):
        pairs = list(itertools.product(drafters, choices))
        found = []
        for seed in range(seeds):
            drafter, params = pairs[seed % len(pairs)]
            found.append(Request(seed, params, drafter))
        return found

    assert decode(requests(DRAFTERS)) == decode(requests(["none"]))


def test_good_drafts_save_rounds():
    """Without this, the test above could pass by accepting nothing."""
    rounds = {}
    for drafter in DRAFTERS:
        requests = [Request(seed, STATELESS[0], drafter) for seed in range(200)]
        decode(requests)
        rounds[drafter] = sum(r.rounds for r in requests) / len(requests)
    assert rounds["none"] == LENGTH
    assert rounds["repetition"] < LENGTH
    assert rounds["coupled tree"] < rounds["coupled chain"] < 0.6 * LENGTH


def ragged_drafts(rule):
    """Return drafts of various sizes; they are trees if the rule takes trees."""
    generator, drafts = np.random.default_rng(4), []
    for size in [0, 3, 1, 5, 2, 0, 4, 4, 1, 6]:
        q = oracle.softmax(generator.normal(size=(size + 1, VOCAB)))
        draft = Draft.root(int(generator.integers(VOCAB)))
        draft.probs = None if rule.coupled else q
        for node in range(1, size + 1):
            parent = int(generator.integers(node)) if rule.branching else node - 1
            is_given = rule.coupled or node % 3 == 0
            proposal = Proposal.DETERMINISTIC if is_given else Proposal.SAMPLED
            draft.add(int(generator.choice(VOCAB, p=q[parent])), parent, "toy", proposal)
        drafts.append(draft)
    return drafts


@pytest.mark.parametrize("name", RULES)
def test_a_verdict_does_not_depend_on_the_batch(name):
    rule = RULES[name]
    drafts = ragged_drafts(rule)
    noises = [Noise(seed=70 + i, root=5 * i) for i in range(len(drafts))]
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(sum(map(len, drafts)), VOCAB, generator=generator) * 2
    scores[:3, 2:] = -math.inf
    parts = scores.split([len(draft) for draft in drafts])
    alone = [
        rule.verify([draft], rows, [noise])[0]
        for draft, rows, noise in zip(drafts, parts, noises, strict=True)
    ]
    assert rule.verify(drafts, scores, noises) == alone
    assert len({len(v.tokens) for v in alone}) > 1


def test_one_of_two_siblings_with_the_same_token_is_followed():
    """Which of the two is followed is not specified."""
    draft = Draft.root(0)
    for token in (5, 5, 6):
        draft.add(token, 0, "toy")
    assert match.follow(draft, [5, 2, 3, 4]) in (
        match.Verdict([5, 2], [0, 1]),
        match.Verdict([5, 3], [0, 2]),
    )
    assert match.follow(draft, [6, 2, 3, 4]) == match.Verdict([6, 4], [0, 3])
    assert match.follow(draft, [7, 2, 3, 4]) == match.Verdict([7], [0])


def agreement(p, q):
    """Return P(argmax(log p + g) = argmax(log q + g)) for shared Gumbel noise g."""
    both = (p > 0) & (q > 0)
    with np.errstate(divide="ignore"):
        return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in np.flatnonzero(both))


def random_distributions(seed, vocab=6):
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=vocab) * 2
    return oracle.softmax(scores), oracle.softmax(scores + generator.normal(size=vocab) * 0.8)


@pytest.mark.parametrize("seed", range(4))
def test_coupled_drafts_agree_as_often_as_theory_says(seed, num_samples=20_000):
    p, q = random_distributions(seed)
    noises = [Noise(seed, root) for root in range(num_samples)]
    drawn = rng.gumbel_argmax(
        torch.tensor(np.log(q)).expand(num_samples, -1), [n.target(0) for n in noises]
    ).tolist()
    drafts = [Draft.chain(0, [token], "coupled") for token in drawn]
    verdicts = match.verify(drafts, torch.tensor(np.log(p)).expand(2 * num_samples, -1), noises)
    accepted = sum(len(v.path) == 2 for v in verdicts) / num_samples
    expected = agreement(p, q)
    assert abs(accepted - expected) < 4 * math.sqrt(expected * (1 - expected) / num_samples)


def test_the_noise_of_a_depth_is_the_noise_of_its_position():
    """This is why speculative and plain decoding draw the same tokens."""
    assert Noise(7, 10).target(3) == Noise(7, 13).target(0) == rng.stream(7, Lane.TARGET, 14)


def test_only_typical_is_lossy():
    assert [rule.name for rule in RULES.values() if rule.lossy] == ["typical"]
    assert all(rule.name == name for name, rule in RULES.items())


@pytest.mark.parametrize(
    "probs, token, passes",
    [
        ([0.6, 0.39, 0.01], 0, True),
        ([0.6, 0.39, 0.01], 2, False),
        ([0.6, 0.3, 0.1], 2, True),  # over .09, though under .3 * exp(-entropy)
        ([0.05] * 20, 7, True),  # under .09, but over .3 * exp(-entropy)
        ([0.5] + [0.025] * 20, 7, False),
    ],
    ids=["likely", "unlikely", "over epsilon", "flat", "tail"],
)
def test_typical_always_accepts_a_plausible_draft(probs, token, passes, num_samples=1_500):
    """If the draft does not pass, tokens have the target's distribution."""
    p = torch.tensor(probs, dtype=torch.float64)
    drafts = [Draft.chain(0, [token], "toy")] * num_samples
    verdicts = RULES["typical"].verify(
        drafts, p.log().expand(2 * num_samples, -1), [Noise(1, i) for i in range(num_samples)]
    )
    frequencies = np.bincount([v.tokens[0] for v in verdicts], minlength=len(p)) / num_samples
    assert {len(v.tokens) for v in verdicts} == ({2} if passes else {1})
    if passes:
        assert frequencies[token] == 1  # a total variation of 1 - p(token) from the target
    else:
        assert abs(frequencies - p.numpy()).max() < 0.05


def test_typical_is_match_at_temperature_0():
    """A one-hot distribution has no entropy, and only its own token passes."""
    requests = [
        Request(seed, SamplingParams(temperature=0.0), "coupled tree") for seed in range(100)
    ]
    drafts = propose(requests)
    scores = filter_logits(TARGET.logits(requests, drafts), drafts, [r.state for r in requests])
    noises = [r.noise for r in requests]
    assert [v.tokens for v in RULES["typical"].verify(drafts, scores, noises)] == [
        v.tokens for v in match.verify(drafts, scores, noises)
    ]
