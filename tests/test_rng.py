"""Random numbers for sampling: a pure function of seed, lane, counters and token, uniform and
independent.

If streams for different purposes were correlated, every rule would be biased although its code is
right, so the rules also run with the engine's real noise here. The tests of `forerun check` show
that it detects noise which shares a stream."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from forerun import rng
from forerun.check import oracle
from forerun.draft.proposer import DraftRequest
from forerun.draft.tree import Tree, grow
from forerun.rng import Lane
from forerun.sampling.params import SamplingParams
from forerun.verify import RULES, Noise

NUM_DRAWS = 20_000
MIN_P_VALUE = 1e-4  # seeds are fixed, so a lower p-value shows a fault and not bad luck


def test_splitmix64_reference_vectors():
    """The first outputs of SplitMix64 seeded with 0 and with 1234567."""
    zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    other = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [rng.mix(i * rng.GOLDEN) for i in range(1, 5)] == zero
    assert [rng.mix(1234567 + i * rng.GOLDEN) for i in range(1, 5)] == other


def test_uniform_is_an_element_of_a_splitmix_stream():
    assert rng.uniform(0, 0) == ((0xE220A8397B1DCDAF >> 12) + 0.5) * 2.0**-52
    assert rng.uniform(0, 3) == ((0xF88BB8A8724C81EC >> 12) + 0.5) * 2.0**-52


@pytest.mark.parametrize(
    "bits", [0, 1, 1 << 11, rng.MASK >> 1, rng.MASK - (1 << 11), rng.MASK], ids=hex
)
def test_uniform_is_never_0_or_1(bits, monkeypatch):
    monkeypatch.setattr(rng, "mix", lambda x: bits)
    assert 0 < rng.uniform(5) < 1
    assert math.isfinite(rng.gumbel_scalar(5, 0))


def test_gumbel_equals_gumbel_scalar():
    keys = [rng.stream(seed, lane, 17) for seed in (0, 1, 2**63 - 1) for lane in Lane]
    tokens = [0, 1, 2, 1000, 151_935, 2**31]
    pairs = list(itertools.product(keys, tokens))
    fast = rng.gumbel(
        torch.tensor([k - (1 << 64) if k >> 63 else k for k, _ in pairs]),
        torch.tensor([t for _, t in pairs]),
    )
    slow = torch.tensor([rng.gumbel_scalar(k, t) for k, t in pairs], dtype=torch.float64)
    assert (fast - slow).abs().max() <= 1e-15 * slow.abs().max()


def test_noise_of_a_token_depends_on_its_key_and_token_id_alone():
    """The batch, the row's index, the vocabulary's size and removed tokens change nothing."""
    keys = [rng.stream(3, Lane.TARGET, i) for i in range(6)]
    full = rng.perturb(torch.zeros(6, 40), keys)
    assert torch.equal(rng.perturb(torch.zeros(1, 40), keys[4:5]), full[4:5])
    assert torch.equal(rng.perturb(torch.zeros(6, 20), keys), full[:, :20])
    filtered = torch.zeros(6, 40).masked_fill(torch.arange(40) % 3 == 0, -math.inf)
    assert torch.equal(rng.perturb(filtered, keys), full.masked_fill(filtered.isinf(), -math.inf))


def test_only_tokens_with_finite_scores_are_drawn():
    scores = torch.full((3, 9), -math.inf)
    scores[[0, 1, 2], [8, 0, 4]] = torch.tensor([-80.0, 0.0, 5.0])
    assert rng.gumbel_argmax(scores, [1, 2, 3]).tolist() == [8, 0, 4]


def test_gumbel_argmax_draws_from_the_softmax():
    probs = np.array([0.5, 0.3, 0.15, 0.049, 0.001])
    drawn = rng.gumbel_argmax(
        torch.tensor(np.log(probs)).expand(NUM_DRAWS, -1),
        [rng.stream(11, Lane.TARGET, i) for i in range(NUM_DRAWS)],
    )
    assert stats.chisquare(np.bincount(drawn, minlength=5), probs * NUM_DRAWS).pvalue > MIN_P_VALUE


STREAMS = {
    "positions": lambda i: (rng.stream(5, Lane.TARGET, i), 0),
    "seeds": lambda i: (rng.stream(i, Lane.TARGET, 3), 0),
    "distant seeds": lambda i: (rng.stream(i << 43, Lane.DRAFT, 3, 1), 0),
    "tokens": lambda i: (rng.stream(5, Lane.TARGET, 3), i),
    "nodes": lambda i: (rng.stream(5, Lane.ACCEPT, 3, i), 0),
    "roots": lambda i: (rng.stream(5, Lane.RESIDUAL, i, 0), 0),
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_counter_gives_uniform_numbers(name):
    values = [rng.uniform(*STREAMS[name](i)) for i in range(NUM_DRAWS)]
    assert stats.kstest(values, "uniform").pvalue > MIN_P_VALUE
    assert independent(values[:-1], values[1:]), "neighbours"
    assert independent(values[:-2], values[2:]), "next neighbours"


def independent(one, other):
    """Return True if pairs fill a 10 by 10 grid evenly."""
    cells, _, _ = np.histogram2d(one, other, bins=10, range=[[0, 1], [0, 1]])
    return stats.chisquare(cells.ravel()).pvalue > MIN_P_VALUE


def numbers_of_round(i):
    """Return the first numbers of the streams of a round, and the noise of two tokens."""
    noise, root = Noise(9, i), i
    keys = [noise.target(0), noise.target(1), noise.draft(0), noise.draft(1)]
    keys += [
        rng.stream(9, lane, root, node) for lane in (Lane.ACCEPT, Lane.RESIDUAL) for node in (0, 1)
    ]
    return [*map(rng.uniform, keys), rng.uniform(keys[0], 1), rng.uniform(keys[2], 1)]


def test_streams_of_one_round_are_independent():
    table = np.array([numbers_of_round(2 * i) for i in range(NUM_DRAWS // 2)]).T
    assert all(independent(a, b) for a, b in itertools.combinations(table, 2))


def test_lanes_of_one_seed_share_no_key():
    keys = [rng.stream(s, lane, c) for s in range(20) for lane in Lane for c in range(50)]
    with_node = itertools.product(range(20), Lane, range(20), range(9))
    keys += [rng.stream(*counters) for counters in with_node]
    assert len(set(keys)) == len(keys)


# `Noise.draw` and `Noise.accept` at their edges.

EXTREMES = [2.0**-54, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0]
WEIGHTS = [
    [0, 1, 0],
    [0, 0, 1, 0, 0],
    [1e-300, 0, 1e-300, 0],
    [0, 5e-324, 0],
    [0, 0.1, 0.2, 0, 0.7, 0],
    [1, 1e-17, 0, 1e-17, 0],
    [0, 1e300, 1e-300, 0],
]


@pytest.mark.parametrize("u", EXTREMES)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_draw_never_gives_a_token_of_weight_0(weights, u, monkeypatch):
    monkeypatch.setattr(rng, "uniform", lambda key, index=0: u)
    assert weights[Noise(1, 1).draw(np.array(weights, dtype=float), 0)] > 0


def test_draw_follows_its_weights():
    weights = np.array([0.0, 2.0, 1.0, 0.0, 0.5, 0.01])
    drawn = np.bincount([Noise(4, i).draw(weights, 0) for i in range(NUM_DRAWS)], minlength=6)
    positive = weights > 0
    assert (
        stats.chisquare(drawn[positive], weights[positive] / weights.sum() * NUM_DRAWS).pvalue
        > MIN_P_VALUE
    )


@pytest.mark.parametrize("u", [2.0**-54, 0.5, 1 - 2.0**-53])
def test_accept_with_extreme_uniform_numbers(u, monkeypatch):
    monkeypatch.setattr(rng, "uniform", lambda key, index=0: u)
    noise = Noise(1, 1)
    assert not noise.accept(0, 0.3, 1) and not noise.accept(0, 0, 1)
    assert noise.accept(0.3, 0.3, 1) and noise.accept(0.4, 0.3, 1) and noise.accept(1e-300, 0, 1)


# The rules with real noise.


def real_draft(noise, context, drafter, depth, branching):
    """Draft as proposers do: a chain, or a tree of width 2 if the rule takes trees."""
    params = SamplingParams(temperature=1.0)
    request = DraftRequest(0, [0], params, noise, depth, coupled=False, branching=branching)
    tree = Tree(request)
    for _ in range(depth):
        probs = [drafter[context + oracle.prefix_of(tree.draft, node)] for node in tree.frontier]
        grow([tree], torch.tensor(np.log(probs)), 2, "toy")
    return tree.finish(len(drafter[()]))


def speculate(rule, models, depth, length, seed):
    """Generate `length` tokens in rounds of speculative decoding, as the engine does."""
    target, drafter = models
    output = ()
    while len(output) < length:
        noise, context = Noise(seed, 4 + len(output)), output[-1:]
        draft = real_draft(noise, context, drafter, depth, RULES[rule].branching)
        p = np.stack(
            [target[context + oracle.prefix_of(draft, node)] for node in range(len(draft))]
        )
        output += tuple(RULES[rule].verify([draft], torch.tensor(p).log(), [noise])[0].tokens)
    return output[:length]


def string_p_value(rule, depth=2, length=3, count=1000, vocab=3):
    """Return the p-value of the outputs of `count` seeds, given the target's joint distribution."""
    models = [
        last_token_only(table, max(depth + 1, length))
        for table in oracle.toy_models("float", vocab, 1, seed=2)
    ]
    probs = oracle.joint(models[0], length)
    outputs = [speculate(rule, models, depth, length, seed) for seed in range(count)]
    rare = [s for s in probs if probs[s] * count < 5]
    cells = [*([s] for s in probs if s not in rare), *([rare] if rare else [])]
    observed = [sum(map(outputs.count, cell)) for cell in cells]
    return stats.chisquare(observed, [sum(probs[s] for s in cell) * count for cell in cells]).pvalue


def last_token_only(table, depth):
    """Make a model whose distribution depends on the last token alone."""
    vocab = len(table[()])
    return {
        s: table[s[-1:]]
        for n in range(depth + 1)
        for s in itertools.product(range(vocab), repeat=n)
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["token", "block", "tree"])
def test_outputs_with_real_noise_have_the_target_s_distribution(rule):
    assert string_p_value(rule) > MIN_P_VALUE


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
def test_first_tokens_with_real_noise_have_the_target_s_distribution(rule):
    """The drafter is one with which noise that is shared would bias the output."""
    assert oracle.check_random_numbers(rule, oracle.ENUMERABLE[rule]).passed
