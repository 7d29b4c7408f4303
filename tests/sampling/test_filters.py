"""Every sampling parameter does what it says, at every node of every draft, whatever else is in the
batch.

The reference below is written from the documentation of `SamplingParams`, in plain Python, for one
position with the text that would stand before it. A filter that looks at the wrong prefix, or at
its neighbours in the batch, makes speculation change the output; that must never happen.
"""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from forerun import rng
from forerun.kernels import draw, native
from forerun.kernels.draw import shape_scores
from forerun.sampling import filters
from forerun.sampling.filters import SamplingState, draw_tokens, filter_logits
from forerun.sampling.params import Sampling, SamplingParams
from forerun.types import Draft

VOCAB, PROMPT, ENDS = 12, [1, 2, 2, 7], [3, 9]


def reference(logits, params, output):
    """The distribution of the next token after `output`: {token: probability}, forbidden tokens left out."""
    scores = {token: float(x) for token, x in enumerate(logits)}
    for token, amount in params.logit_bias.items():
        scores[token] += amount
    for token in {*PROMPT, *output}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, times in Counter(output).items():
        scores[token] -= params.presence_penalty + times * params.frequency_penalty
    if len(output) < params.min_tokens:
        scores = {token: x for token, x in scores.items() if token not in ENDS}
    ranked = sorted((t for t in scores if scores[t] > -math.inf), key=lambda t: (-scores[t], t))
    if params.temperature == 0:
        return {ranked[0]: 1.0}
    if params.top_k:
        ranked = [
            t for t in ranked if scores[t] >= scores[ranked[min(params.top_k, len(ranked)) - 1]]
        ]
    law = normalised(
        {t: math.exp((scores[t] - scores[ranked[0]]) / params.temperature) for t in ranked}
    )
    if params.top_p < 1:
        law = nucleus(law, params.top_p)
    return normalised({t: x for t, x in law.items() if x >= params.min_p * max(law.values())})


def normalised(weights):
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def nucleus(law, top_p):
    """The likeliest tokens up to the one with which their sum reaches top_p."""
    kept, reached = {}, 0.0
    for token, chance in law.items():
        if reached >= top_p:
            break
        kept[token] = chance
        reached += chance
    return kept


def started(params, output=()):
    """The state of a request that has produced `output`."""
    state = SamplingState(params, PROMPT, ENDS)
    for token in output:
        state.append(token)
    return state


def random_draft(dice, kind):
    draft = Draft.root(dice.randrange(VOCAB))
    for node in range({"root": 0, "chain": 5, "tree": 9}[kind]):
        draft.add(
            dice.randrange(VOCAB), node if kind == "chain" else dice.randrange(len(draft)), "toy"
        )
    return draft


def random_logits(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2.5


def probs_of(scores):
    """{token: probability} of one row of scores."""
    chances = scores.double().softmax(-1)
    return {t: chances[t].item() for t in torch.nonzero(scores > -math.inf).ravel().tolist()}


def assert_same_law(scores, expected):
    got = probs_of(scores)
    assert got.keys() == expected.keys()
    assert all(got[t] == pytest.approx(expected[t], rel=2e-5) for t in expected)


FILTERS = {
    "greedy": dict(),
    "temperature": dict(temperature=1.0),
    "cold": dict(temperature=0.3),
    "hot": dict(temperature=7.5),
    "top_k": dict(temperature=1.0, top_k=3),
    "top_k of one": dict(temperature=1.0, top_k=1),
    "top_k over the vocabulary": dict(temperature=1.0, top_k=500),
    "top_p": dict(temperature=1.0, top_p=0.6),
    "small top_p": dict(temperature=1.0, top_p=1e-6),
    "large top_p": dict(temperature=1.0, top_p=0.999),
    "min_p": dict(temperature=1.0, min_p=0.12),
    "min_p of one": dict(temperature=1.0, min_p=1.0),
    "presence": dict(temperature=1.0, presence_penalty=1.7),
    "reward": dict(temperature=1.0, presence_penalty=-1.1),
    "frequency": dict(temperature=1.0, frequency_penalty=0.9),
    "repetition": dict(temperature=1.0, repetition_penalty=1.6),
    "repetition wanted": dict(temperature=1.0, repetition_penalty=0.7),
    "bias": dict(temperature=1.0, logit_bias={4: 3.5, 0: -100.0, 11: 0.25}),
    "min_tokens": dict(temperature=1.0, min_tokens=5),
    "greedy with all": dict(
        presence_penalty=0.3,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={3: 5.0},
        min_tokens=5,
    ),
    "top_k, top_p and min_p": dict(temperature=0.8, top_k=7, top_p=0.85, min_p=0.15),
    "everything": dict(
        temperature=1.4,
        top_k=8,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=0.5,
        frequency_penalty=-0.4,
        repetition_penalty=1.15,
        logit_bias={9: 4.0, 2: -3.0},
        min_tokens=6,
    ),
}


@pytest.mark.parametrize("kind", ["root", "chain", "tree"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_equal_the_reference_at_every_node(name, kind):
    params, dice = SamplingParams.pure(**FILTERS[name]), random.Random(name)
    for seed in range(6):
        draft, output = random_draft(dice, kind), dice.choices(range(VOCAB), k=dice.randrange(5))
        logits = random_logits(seed, len(draft), VOCAB)
        scores = filter_logits(logits, [draft], [started(params, output)])
        for node in range(len(draft)):
            path = [draft.tokens[i] for i in draft.path_to(node)[1:]]
            assert_same_law(scores[node], reference(logits[node], params, output + path))


@pytest.mark.parametrize("only", [*FILTERS, None])
def test_tokens_are_drawn_from_the_filtered_scores(only):
    """With each parameter alone, some without scores, and with all in one batch."""
    dice = random.Random(3)
    settings = [SamplingParams.pure(**FILTERS[name]) for name in ([only] * 3 if only else FILTERS)]
    drafts = [random_draft(dice, "tree") for _ in settings]
    states = [started(p, [5, 5, 2]) for p in settings]
    logits = random_logits(2, sum(map(len, drafts)), VOCAB)
    keys = [rng.stream(5, rng.Lane.TARGET, i) for i in range(len(logits))]
    twin = rng.gumbel_argmax(filter_logits(logits, drafts, states), keys).tolist()
    assert draw_tokens(logits, drafts, states, keys) == twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [VOCAB, 1000])
def test_rows_do_not_depend_on_the_batch(vocab, dtype):
    """Bit for bit: the same request alone, in a batch, and in that batch the other way round."""
    dice = random.Random(1)
    states = [started(SamplingParams.pure(**options), [5, 5, 2]) for options in FILTERS.values()]
    drafts = [random_draft(dice, "tree") for _ in states]
    logits = [random_logits(i, len(draft), vocab).to(dtype) for i, draft in enumerate(drafts)]
    alone = [filter_logits(x, [d], [s]) for x, d, s in zip(logits, drafts, states, strict=True)]
    assert all(scores.dtype == dtype for scores in alone)
    assert torch.equal(filter_logits(torch.cat(logits), drafts, states), torch.cat(alone))
    assert torch.equal(
        filter_logits(torch.cat(logits[::-1]), drafts[::-1], states[::-1]), torch.cat(alone[::-1])
    )


@pytest.mark.parametrize("name", FILTERS)
def test_a_draft_is_filtered_as_one_token_after_the_other(name):
    """Bit for bit: each node of a tree equals plain decoding that has committed the node's path."""
    params, dice = SamplingParams.pure(**FILTERS[name]), random.Random(2)
    draft, output = random_draft(dice, "tree"), [4, 4, 0]
    logits = random_logits(3, len(draft), VOCAB)
    scores = filter_logits(logits, [draft], [started(params, output)])
    for node in range(len(draft)):
        path = [draft.tokens[i] for i in draft.path_to(node)[1:]]
        plain = filter_logits(
            logits[node : node + 1],
            [Draft.root(draft.tokens[node])],
            [started(params, output + path)],
        )
        assert torch.equal(scores[node], plain[0])


def test_logits_and_states_are_left_alone():
    params = SamplingParams.pure(**FILTERS["everything"])
    logits = random_logits(4, 6, VOCAB)
    state = started(params, [4])
    draft = random_draft(random.Random(3), "chain")
    before = logits.clone()
    filter_logits(logits, [draft], [state])
    assert torch.equal(logits, before)
    assert (state.produced, state.output_counts, state.prompt_tokens) == (1, {4: 1}, set(PROMPT))


def shaped(values, dtype=torch.float32, **options):
    """The tokens kept of one row, and its scores."""
    scores = shape_scores(
        torch.tensor([values], dtype=dtype), [SamplingParams.pure(**options).sampling]
    )[0]
    return torch.nonzero(scores > -math.inf).ravel().tolist(), scores


def logs(*chances):
    return [math.log(x) if x else -math.inf for x in chances]


@pytest.mark.parametrize("vocab", [3, 100, 5000])
def test_greedy_takes_the_lowest_of_equals(vocab):
    logits = torch.zeros(4, vocab)
    logits[1:, -2:] = 1.0
    logits[2, 1] = logits[3, 0] = 1.0
    scores = shape_scores(logits, [SamplingParams().sampling] * 4)
    assert scores.argmax(-1).tolist() == [0, vocab - 2, 1, 0]
    assert (scores > -math.inf).sum(-1).tolist() == [1] * 4 and scores.max() == 0


@pytest.mark.parametrize(
    "k, kept",
    [
        (1, [1]),
        (2, [0, 1, 3, 5]),
        (3, [0, 1, 3, 5]),
        (4, [0, 1, 3, 5]),
        (5, [0, 1, 2, 3, 5]),
        (9, list(range(6))),
    ],
)
def test_top_k_keeps_ties_at_the_border(k, kept):
    assert shaped([2.0, 3.0, 1.0, 2.0, 0.5, 2.0], temperature=1.0, top_k=k)[0] == kept


@pytest.mark.parametrize(
    "top_p, kept",
    [
        (0.4, [0]),
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.75, [0, 1]),
        (0.76, [0, 1, 2]),
        (0.99, [0, 1, 2, 3]),
    ],
)
def test_top_p_at_its_borders(top_p, kept):
    """The set ends with the token that reaches top_p; of equals the lowest ids are kept."""
    assert shaped(logs(0.5, 0.25, 0.125, 0.125), temperature=1.0, top_p=top_p)[0] == kept


@pytest.mark.parametrize(
    "chances", [(0.5, 0.5, 0.0), (1.0, 1e-30, 1e-40), (0.9999999, 1e-8, 1e-9)], ids=str
)
def test_top_p_of_1_never_cuts(chances):
    """Not even beside a row that is cut, and not where the sum rounds to 1 early."""
    logits = torch.tensor([logs(*chances), logs(*chances)])
    scores = shape_scores(logits, [Sampling(1.0), Sampling(1.0, top_p=0.5)])
    assert torch.equal(scores[0], logits[0] - logits[0].max())
    assert probs_of(scores[1]).keys() == {0}


@pytest.mark.parametrize("top_p", [1e-3, 1e-30, 1e-46, 1e-300])
def test_top_p_keeps_at_least_one_token(top_p):
    assert shaped([1.0, 3.0, 2.0], temperature=1.0, top_p=top_p)[0] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("min_p", [0.05, 0.1, 0.25, 0.3, 0.5, 0.6, 0.7, 0.9])
def test_min_p_keeps_the_token_at_its_border(min_p, dtype):
    kept, _ = shaped(
        [0.0, math.log(min_p), math.log(min_p) - 1e-5], dtype, temperature=1.0, min_p=min_p
    )
    assert kept == [0, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-38, 1e-46, 1e-300])
def test_a_temperature_near_0_is_greedy(temperature):
    """Not infinite and not NaN: a row that is either says a wrong token."""
    scores = shaped([1.0, 30.0, 20.0, -4.0], temperature=temperature)[1]
    chances = scores.double().softmax(-1)
    assert chances.isfinite().all()
    assert chances.argmax() == 1 and chances[1] > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_penalties_of_a_growing_text_are_those_of_its_counts(seed, dtype):
    """What is kept from step to step is what would be counted anew, bit by bit."""
    chance = random.Random(seed)
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        logit_bias={3: 2.5},
    )
    state, output = started(params), []
    for _ in range(40):
        draft = random_draft(chance, "tree")
        logits = random_logits(chance.randrange(1000), len(draft), VOCAB).to(dtype)
        expected = logits.clone()
        expected[:, 3] += 2.5
        for node in range(len(draft)):
            counts = Counter(output + [draft.tokens[i] for i in draft.path_to(node)[1:]])
            seen = torch.tensor(sorted(set(PROMPT) | counts.keys()))
            values = expected[node, seen]
            expected[node, seen] = torch.where(values > 0, values / 1.3, values * 1.3)
            if counts:
                amounts = 0.7 + -0.3 * torch.tensor(list(counts.values()), dtype=dtype)
                expected[node, list(counts)] -= amounts
        assert torch.equal(
            filter_logits(logits, [draft], [state]),
            shape_scores(expected, [params.sampling] * len(draft)),
        )
        for token in chance.choices(range(VOCAB), k=chance.randint(0, 5)):
            state.append(token)
            output.append(token)


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(1, 1.0, 0.0), (5, 0.7, 0.05), (40, 0.95, 0.05), (3, 1.0, 0.3)]
)
@pytest.mark.parametrize("rows", ["any", "ties", "few are allowed", "one is allowed"])
def test_selecting_the_likeliest_is_the_same_as_sorting_all(rows, top_k, top_p, min_p):
    """Sorting a vocabulary is slow: the likeliest are selected, with their ties."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(4, 300, generator=generator)
    if rows == "ties":
        scores = (scores * 2).round()
    if "allowed" in rows:
        scores[:, 1 if rows == "one is allowed" else 20 :] = -math.inf
    selected, every = (
        cut(scores, top_k, top_p, min_p) for cut in (draw._filter, draw._filter_sorted)
    )
    assert torch.equal(torch.isneginf(selected), torch.isneginf(every))
    assert torch.equal(selected, every)
    assert all(
        torch.equal(draw._filter(row[None], top_k, top_p, min_p)[0], whole)
        for row, whole in zip(scores, selected, strict=True)
    )


def test_top_k_does_not_bring_back_forbidden_tokens():
    assert shaped([1.0, -math.inf, 0.0, -math.inf], temperature=1.0, top_k=3)[0] == [0, 2]


def test_top_p_keeps_the_lowest_ids_of_many_equals():
    assert shaped([0.5] * 4096, temperature=1.0, top_p=0.25)[0] == list(range(1024))


class _FixedGrammar:
    """Allows tokens by the depth of a node: every second, every third, .."""

    def masks(self, draft):
        masks = []
        for depth in draft.depths():
            allowed = np.arange(VOCAB) % (depth + 2) == 0
            masks.append(np.packbits(allowed, bitorder="little").tobytes())
        return masks


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_grammar_forbids_the_same_tokens_within_the_native_draw(monkeypatch, min_tokens):
    """Beside a request without a grammar, and with what only torch can do besides."""
    chance = torch.Generator().manual_seed(3)
    drafts = [Draft.chain(1, [2, 4], "x"), Draft.chain(5, [6], "x")]
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, min_tokens=min_tokens, top_k=0, top_p=1.0)
        states = [
            SamplingState(params, PROMPT, ENDS, _FixedGrammar()),
            SamplingState(params, PROMPT, ENDS),
        ]
        for seed in range(40):
            logits = torch.randn(5, VOCAB, generator=chance) * 2
            keys = [rng.stream(seed, rng.Lane.TARGET, i) for i in range(5)]
            with monkeypatch.context() as patched:
                patched.setattr(filters, "takes_masks", lambda logits: False)
                expected = draw_tokens(logits, drafts, states, keys)
            assert draw_tokens(logits, drafts, states, keys) == expected
            assert all(token % (2 + i) == 0 for i, token in enumerate(expected[:3]))
