"""Exactness of the ratio rules: emitted tokens have the target's distribution for every draft.

Every draft and every coin is enumerated (`forerun.check.oracle`), in fractions wherever that is
affordable, so "exact" means an error of 0. Further tests check that each rule accepts as many
tokens as theory predicts."""

import functools
import itertools
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest

from forerun.check import oracle
from forerun.check.oracle import greedy, greedy_plus_one, mixed
from forerun.types import Draft, Verdict
from forerun.verify.ratio import probs_of, verify_block, verify_token, verify_tree
from tests import exact
from tests.verify import schemes
from tests.verify.schemes import MERGED, TREES, greedy_first

GRID = [
    ("exact", 2, 1),
    ("exact", 2, 2),
    ("exact", 2, 3),
    ("sparse", 2, 3),
    ("exact", 3, 1),
    ("exact", 3, 2),
]
GRID += [("sparse", 3, 2), ("exact", 3, 3), ("float", 4, 1), ("float", 4, 2), ("float", 4, 3)]
CHAIN_RULES = {"token": verify_token, "block": verify_block, "tree": verify_tree}


def tolerance(kind):
    """Return the error that an exact rule may have: 0 in fractions, rounding in float64."""
    return 1e-12 if kind == "float" else 0


def bias(rule, scheme, models, depth):
    return exact.bias(rule, oracle.proposals(scheme, models[1], depth), models[0], depth)


def mean(rule, scheme, models, depth):
    return exact.mean_tokens(
        oracle.emission(rule, oracle.proposals(scheme, models[1], depth), models[0])
    )


RAGGED = ["iid2", "without replacement 2", "top2", "greedy + 1", "n-gram + sample"]


# Chains.


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind, vocab, depth", GRID)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_sampled_chain_is_exact(rule, kind, vocab, depth, seed):
    models = oracle.toy_models(kind, vocab, depth, seed)
    assert bias(CHAIN_RULES[rule], oracle.sampled, models, depth) <= tolerance(kind)


def prefix_mass(draft, target, upto):
    """Return the least product of p / q over runs that end with token `upto`, at most 1."""
    p = oracle.rows(draft, target)
    ratios = [
        p[i - 1][draft.tokens[i]] / draft.probs[i - 1][draft.tokens[i]] for i in range(1, upto + 1)
    ]
    return min(np.prod(ratios[start:]) if start < upto else 1 for start in range(upto + 1))


@pytest.mark.parametrize("kind, vocab, depth", GRID)
def test_block_accepts_the_prefix_mass(kind, vocab, depth):
    models = oracle.toy_models(kind, vocab, depth, seed=5)
    expected = 1
    for draft, weight in oracle.proposals(oracle.sampled, models[1], depth):
        expected += weight * sum(prefix_mass(draft, models[0], i) for i in range(1, depth + 1))
    assert abs(mean(verify_block, oracle.sampled, models, depth) - expected) <= tolerance(kind)


@pytest.mark.parametrize("kind, vocab, depth", GRID)
def test_token_accepts_the_product_of_ratios(kind, vocab, depth):
    models = oracle.toy_models(kind, vocab, depth, seed=6)
    expected = 1
    for draft, weight in oracle.proposals(oracle.sampled, models[1], depth):
        p, accept_prob = oracle.rows(draft, models[0]), weight
        for node in range(1, depth + 1):
            accept_prob *= min(
                1, p[node - 1][draft.tokens[node]] / draft.probs[node - 1][draft.tokens[node]]
            )
            expected += accept_prob
    assert abs(mean(verify_token, oracle.sampled, models, depth) - expected) <= tolerance(kind)


@pytest.mark.parametrize("rule, accepted", [("token", Fraction(10, 9)), ("block", Fraction(11, 9))])
def test_the_worked_example_of_the_block_paper(rule, accepted):
    p, q = oracle.fractions([1, 2]), oracle.fractions([2, 1])
    prefixes = [s for n in range(3) for s in itertools.product(range(2), repeat=n)]
    models = dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q)
    assert mean(CHAIN_RULES[rule], oracle.sampled, models, 2) == 1 + accepted


@pytest.mark.parametrize("kind, vocab, depth", GRID)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_chain_of_deterministic_and_sampled_tokens_is_exact(rule, kind, vocab, depth):
    models = oracle.toy_models(kind, vocab, depth, seed=7)
    assert bias(CHAIN_RULES[rule], mixed, models, depth) <= tolerance(kind)
    assert bias(CHAIN_RULES[rule], greedy, models, depth) <= tolerance(kind)


# Trees.


def ragged(scheme):
    """Restrict `scheme` to the root and to first children."""

    def first_only(draft, node, q):
        first = node == 0 or draft.children()[draft.parents[node]][0] == node
        return scheme(draft, node, q) if first else [([], None, 1)]

    return first_only


def top_down(draft, p, coins):
    """Simple reference for the tree rule: decide one level after the other, from the root."""
    children, node = draft.children(), 0
    while True:
        rest = p[node]
        for child in children[node]:
            q = probs_of(draft, child, p)
            if coins.accept(rest[draft.tokens[child]], q[draft.tokens[child]], child):
                node = child
                break
            rest = np.maximum(rest - q, 0)
            rest = rest / rest.sum() if rest.sum() > 0 else p[node]
        else:
            path = draft.path_to(node)
            return Verdict([*(draft.tokens[i] for i in path[1:]), coins.draw(rest, node)], path)


@functools.cache
def tree_case(name, kind, vocab, depth, seed, is_ragged=False):
    """Return what `verify_tree` and `top_down` emit, and the target."""
    target, drafter = oracle.toy_models(kind, vocab, depth, seed)
    scheme = ragged(TREES[name]) if is_ragged else TREES[name]
    drafts = list(oracle.proposals(scheme, drafter, depth))
    return [oracle.emission(rule, drafts, target) for rule in (verify_tree, top_down)], target


WIDE = ["top2", "greedy + 1", "1 + greedy", "n-gram + sample"]
TREE_GRID = [
    (name, *models, is_ragged)
    for names, models, is_ragged in (
        (TREES, ("exact", 2, 2), False),
        (TREES, ("sparse", 3, 1), False),
        (TREES, ("sparse", 2, 2), False),
        (TREES, ("float", 4, 1), False),
        (TREES, ("float", 3, 2), False),
        (WIDE, ("float", 4, 2), False),
        (RAGGED, ("float", 4, 2), True),
        (RAGGED, ("exact", 2, 3), True),
        (RAGGED, ("float", 3, 2), True),
    )
    for name in names
]


@pytest.mark.parametrize("name, kind, vocab, depth, is_ragged", TREE_GRID)
def test_tree_is_exact_and_accepts_at_least_as_much_as_top_down(
    name, kind, vocab, depth, is_ragged
):
    emitted, target = tree_case(name, kind, vocab, depth, 0, is_ragged)
    for distribution in emitted:
        completed = oracle.complete(distribution, target, depth + 1)
        assert exact.error(completed, oracle.joint(target, depth + 1)) <= tolerance(kind)
    by_tree, by_top_down = map(exact.mean_tokens, emitted)
    assert by_tree >= by_top_down - tolerance(kind)


@pytest.mark.parametrize("kind, vocab, depth", GRID)
@pytest.mark.parametrize("scheme", [oracle.sampled, mixed], ids=["sampled", "mixed"])
def test_tree_equals_block_on_a_chain(scheme, kind, vocab, depth):
    target, drafter = oracle.toy_models(kind, vocab, depth, seed=9)
    for draft, _ in oracle.proposals(scheme, drafter, depth):
        by_tree, by_block = (
            oracle.emission(r, [(draft, 1)], target) for r in (verify_tree, verify_block)
        )
        assert exact.error(by_tree, by_block) <= tolerance(kind)


def probs_of_child_sets(scheme, q):
    """Return the probability of each set of tokens that the root's children can be."""
    sets = defaultdict(int)
    for children, _, prob in scheme(Draft.root(0), 0, q):
        sets[frozenset(t for t, _ in children)] += prob
    return sets


def best_acceptance(p, sets):
    """Return the bound on any rule: min over H of p(H) + 1 - P(set within H), a minimal cut."""
    tokens = range(len(p))
    subsets = [set(h) for n in range(len(p) + 1) for h in itertools.combinations(tokens, n)]
    return min(
        sum(p[list(h)]) + 1 - sum(prob for s, prob in sets.items() if s <= h) for h in subsets
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("kind, vocab", [("exact", 3), ("sparse", 3), ("float", 4)])
def test_acceptance_of_one_level_is_bounded_and_optimal_where_known(name, kind, vocab, seed):
    target, drafter = oracle.toy_models(kind, vocab, 1, seed)
    p, q = target[()], drafter[()]
    rules = [verify_tree, top_down]
    if name in ("sampled chain", "mixed chain"):
        rules += [verify_token, verify_block]
    sets, best = probs_of_child_sets(TREES[name], q), int(np.argmax(q))
    rest = q.copy()
    rest[best] = 0
    known = {
        "sampled chain": np.minimum(p, q).sum(),
        "mixed chain": np.minimum(p, q).sum(),
        "top2": p[np.argsort(-q, kind="stable")[:2]].sum(),
        "greedy + 1": p[best]
        + (np.minimum(p, rest / rest.sum())[rest > 0].sum() if rest.sum() else 0),
    }
    for rule in rules:
        accepted = mean(rule, TREES[name], (target, drafter), 1) - 1
        assert accepted <= best_acceptance(p, sets) + 1e-12
        if name in known:
            assert abs(accepted - known[name]) <= tolerance(kind)
            assert abs(accepted - best_acceptance(p, sets)) <= tolerance(kind)


# Drafts of adaptive size.


def is_unlikely(draft, node):
    """Return True if a drafted token was unlikely when it was drawn."""
    return draft.probs[draft.parents[node]][draft.tokens[node]] < 0.35


def truncated(drafts, length):
    """Cut each chain to `length(draft)` tokens."""
    for draft, weight in drafts:
        yield draft.first(length(draft)), weight


def until_first(condition, included):
    """Make a function that counts tokens up to the first that meets `condition`."""

    def length(draft):
        found = (node for node in range(1, len(draft)) if condition(draft, node))
        return next((node if included else node - 1 for node in found), len(draft) - 1)

    return length


before_first = functools.partial(until_first, included=False)
through_first = functools.partial(until_first, included=True)


def path_confidence(draft, node):
    """Return the drafter's estimate, before it draws `node`, that a token there is accepted."""
    return np.prod([draft.probs[parent].max() for parent in draft.path_to(node)[:-1]])


POLICIES = {
    "keep the unlikely token, then stop": through_first(is_unlikely),
    "stop before an uncertain draw": before_first(lambda d, n: d.probs[n - 1].max() < 0.5),
    "stop where confidence is low": before_first(lambda d, n: path_confidence(d, n) < 0.3),
    "stop after an odd token": through_first(lambda d, n: d.tokens[n] % 2 == 1),
}


def chains(vocab, depth, seed):
    target, drafter = oracle.toy_models("float", vocab, depth, seed)
    return target, list(oracle.proposals(oracle.sampled, drafter, depth))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_stop_policy_that_cannot_see_the_next_token_is_exact(rule, policy):
    for seed in range(2):
        target, drafts = chains(3, 3, seed)
        assert len({POLICIES[policy](draft) for draft, _ in drafts}) > 1, (
            "the policy stops, but not always"
        )
        assert exact.bias(CHAIN_RULES[rule], truncated(drafts, POLICIES[policy]), target, 3) < 1e-12


def admit(pair, budget, score):
    """Return how many tokens of each chain of a pair fit in `budget`, best scores first."""
    candidates = [
        (-score(draft, node), request, node)
        for request, draft in enumerate(pair)
        for node in range(1, len(draft))
    ]
    chosen = [request for _, request, _ in sorted(candidates)[:budget]]
    return chosen.count(0), chosen.count(1)


def shared_budget_error(rule, budget, score):
    """Return the error of the joint distribution of two requests that share a budget."""
    sides = [chains(3, 2, seed) for seed in (0, 4)]
    joint_probs = defaultdict(int)

    @functools.cache
    def emitted(side, index, length):
        target, drafts = sides[side][0], [(sides[side][1][index][0], 1)]
        return oracle.complete(
            oracle.emission(rule, truncated(drafts, lambda _: length), target), target, 3
        )

    for (i, (one, w)), (j, (other, v)) in itertools.product(
        *(enumerate(drafts) for _, drafts in sides)
    ):
        n, m = admit((one, other), budget, score)
        for (a, p), (b, q) in itertools.product(emitted(0, i, n).items(), emitted(1, j, m).items()):
            joint_probs[a, b] += w * v * p * q
    joints = [oracle.joint(target, 3) for target, _ in sides]
    expected = {
        (a, b): p * q for (a, p), (b, q) in itertools.product(*(joint.items() for joint in joints))
    }
    return exact.error(joint_probs, expected)


@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_budget_shared_by_requests_is_exact(rule, budget):
    assert shared_budget_error(CHAIN_RULES[rule], budget, path_confidence) < 1e-12


# Trees of two drafters.


def merged_bias(pair, kind, vocab, depth, seed):
    target, first = oracle.toy_models(kind, vocab, depth, seed)
    second = oracle.toy_models(kind, vocab, depth, seed + 50)[1]
    return exact.bias(
        verify_tree, schemes.merged_proposals(pair, (first, second), depth), target, depth
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "kind, vocab, depth", [("exact", 2, 2), ("sparse", 2, 2), ("exact", 3, 1), ("sparse", 3, 1)]
)
@pytest.mark.parametrize("pair", MERGED.values(), ids=MERGED)
def test_a_tree_of_two_sampling_drafters_is_exact(pair, kind, vocab, depth, seed):
    """The drafters draw independently, which `tests/check/test_engine_checks.py` tests."""
    assert merged_bias(pair, kind, vocab, depth, seed) == 0


@pytest.mark.parametrize("kind, vocab, depth", GRID)
def test_block_accepts_no_more_deterministic_tokens_than_token(kind, vocab, depth):
    models = oracle.toy_models(kind, vocab, depth, seed=8)
    by_token, by_block = (mean(r, greedy, models, depth) for r in (verify_token, verify_block))
    assert abs(by_block - by_token) <= tolerance(kind)


@pytest.mark.parametrize("kind, vocab", [("exact", 2), ("exact", 3), ("sparse", 3), ("float", 4)])
def test_drafting_sampled_children_first_accepts_more(kind, vocab):
    models = [oracle.toy_models(kind, vocab, 1, seed) for seed in range(6)]
    gains = [
        mean(verify_tree, greedy_plus_one, each, 1) - mean(verify_tree, greedy_first, each, 1)
        for each in models
    ]
    assert min(gains) >= -tolerance(kind)
    assert vocab == 2 or max(gains) > 1e-2  # with two tokens both are drafted, whatever the order
