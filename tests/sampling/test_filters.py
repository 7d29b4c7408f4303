"""Sampling parameters act as documented, at every node of every draft, in any batch.

The reference below follows the documentation of `SamplingParams`, in plain Python, for one position
and its prefix. A filter that reads the wrong prefix, or its neighbours in the batch, would make
speculation change the output.
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
    """Return {token: probability} of the tokens that may follow `output`."""
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
    probs = normalised(
        {t: math.exp((scores[t] - scores[ranked[0]]) / params.temperature) for t in ranked}
    )
    if params.top_p < 1:
        probs = nucleus(probs, params.top_p)
    return normalised({t: x for t, x in probs.items() if x >= params.min_p * max(probs.values())})


def normalised(weights):
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def nucleus(probs, top_p):
    """Keep the most likely tokens up to the one with which their sum reaches top_p."""
    kept, total = {}, 0.0
    for token, prob in probs.items():
        if total >= top_p:
            break
        kept[token] = prob
        total += prob
    return kept


def state_after(params, output=()):
    """Return the sampling state of a request that has produced `output`."""
    state = SamplingState(params, PROMPT, ENDS)
    for token in output:
        state.append(token)
    return state


def random_draft(generator, kind):
    draft = Draft.root(generator.randrange(VOCAB))
    for node in range({"root": 0, "chain": 5, "tree": 9}[kind]):
        token = generator.randrange(VOCAB)
        parent = node if kind == "chain" else generator.randrange(len(draft))
        draft.add(token, parent, "toy")
    return draft


def random_logits(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2.5


def probs_of(scores):
    """Return {token: probability} of one row of scores."""
    probs = scores.double().softmax(-1)
    return {t: probs[t].item() for t in torch.nonzero(scores > -math.inf).ravel().tolist()}


def assert_same_distribution(scores, expected):
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
    params, generator = SamplingParams.pure(**FILTERS[name]), random.Random(name)
    for seed in range(6):
        draft = random_draft(generator, kind)
        output = generator.choices(range(VOCAB), k=generator.randrange(5))
        logits = random_logits(seed, len(draft), VOCAB)
        scores = filter_logits(logits, [draft], [state_after(params, output)])
        for node in range(len(draft)):
            path = [draft.tokens[i] for i in draft.path_to(node)[1:]]
            assert_same_distribution(scores[node], reference(logits[node], params, output + path))


@pytest.mark.parametrize("only", [*FILTERS, None])
def test_tokens_are_drawn_from_the_filtered_scores(only):
    """Each parameter alone, of which some are drawn without scores, and all in one batch."""
    generator = random.Random(3)
    settings = [SamplingParams.pure(**FILTERS[name]) for name in ([only] * 3 if only else FILTERS)]
    drafts = [random_draft(generator, "tree") for _ in settings]
    states = [state_after(p, [5, 5, 2]) for p in settings]
    logits = random_logits(2, sum(map(len, drafts)), VOCAB)
    keys = [rng.stream(5, rng.Lane.TARGET, i) for i in range(len(logits))]
    expected = rng.gumbel_argmax(filter_logits(logits, drafts, states), keys).tolist()
    assert draw_tokens(logits, drafts, states, keys) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [VOCAB, 1000])
def test_rows_do_not_depend_on_the_batch(vocab, dtype):
    """Scores are equal to the bit for a request alone, in a batch and in the reversed batch."""
    generator = random.Random(1)
    states = [state_after(SamplingParams.pure(**each), [5, 5, 2]) for each in FILTERS.values()]
    drafts = [random_draft(generator, "tree") for _ in states]
    logits = [random_logits(i, len(draft), vocab).to(dtype) for i, draft in enumerate(drafts)]
    alone = [filter_logits(x, [d], [s]) for x, d, s in zip(logits, drafts, states, strict=True)]
    assert all(scores.dtype == dtype for scores in alone)
    assert torch.equal(filter_logits(torch.cat(logits), drafts, states), torch.cat(alone))
    assert torch.equal(
        filter_logits(torch.cat(logits[::-1]), drafts[::-1], states[::-1]), torch.cat(alone[::-1])
    )


@pytest.mark.parametrize("name", FILTERS)
def test_filtering_a_draft_equals_filtering_token_by_token(name):
    """Each node of a tree equals, to the bit, plain decoding that has committed the node's path."""
    params, generator = SamplingParams.pure(**FILTERS[name]), random.Random(2)
    draft, output = random_draft(generator, "tree"), [4, 4, 0]
    logits = random_logits(3, len(draft), VOCAB)
    scores = filter_logits(logits, [draft], [state_after(params, output)])
    for node in range(len(draft)):
        path = [draft.tokens[i] for i in draft.path_to(node)[1:]]
        plain = filter_logits(
            logits[node : node + 1],
            [Draft.root(draft.tokens[node])],
            [state_after(params, output + path)],
        )
        assert torch.equal(scores[node], plain[0])


def test_filtering_changes_neither_logits_nor_states():
    params = SamplingParams.pure(**FILTERS["everything"])
    logits = random_logits(4, 6, VOCAB)
    state = state_after(params, [4])
    draft = random_draft(random.Random(3), "chain")
    before = logits.clone()
    filter_logits(logits, [draft], [state])
    assert torch.equal(logits, before)
    assert (state.produced, state.output_counts, state.prompt_tokens) == (1, {4: 1}, set(PROMPT))


def shape_row(values, dtype=torch.float32, **options):
    """Return the tokens kept of one row, and its scores."""
    scores = shape_scores(
        torch.tensor([values], dtype=dtype), [SamplingParams.pure(**options).sampling]
    )[0]
    return torch.nonzero(scores > -math.inf).ravel().tolist(), scores


def logs(*probs):
    return [math.log(x) if x else -math.inf for x in probs]


@pytest.mark.parametrize("vocab", [3, 100, 5000])
def test_greedy_takes_the_lowest_id_of_equally_likely_tokens(vocab):
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
def test_top_k_keeps_ties_at_the_boundary(k, kept):
    assert shape_row([2.0, 3.0, 1.0, 2.0, 0.5, 2.0], temperature=1.0, top_k=k)[0] == kept


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
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    """Of equally likely tokens the lowest ids are kept."""
    assert shape_row(logs(0.5, 0.25, 0.125, 0.125), temperature=1.0, top_p=top_p)[0] == kept


@pytest.mark.parametrize(
    "probs", [(0.5, 0.5, 0.0), (1.0, 1e-30, 1e-40), (0.9999999, 1e-8, 1e-9)], ids=str
)
def test_top_p_of_1_never_removes_tokens(probs):
    """This holds beside a row that is filtered, and where the sum rounds to 1 early."""
    logits = torch.tensor([logs(*probs), logs(*probs)])
    scores = shape_scores(logits, [Sampling(1.0), Sampling(1.0, top_p=0.5)])
    assert torch.equal(scores[0], logits[0] - logits[0].max())
    assert probs_of(scores[1]).keys() == {0}


@pytest.mark.parametrize("top_p", [1e-3, 1e-30, 1e-46, 1e-300])
def test_top_p_keeps_at_least_one_token(top_p):
    assert shape_row([1.0, 3.0, 2.0], temperature=1.0, top_p=top_p)[0] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("min_p", [0.05, 0.1, 0.25, 0.3, 0.5, 0.6, 0.7, 0.9])
def test_min_p_keeps_the_token_at_its_boundary(min_p, dtype):
    kept, _ = shape_row(
        [0.0, math.log(min_p), math.log(min_p) - 1e-5], dtype, temperature=1.0, min_p=min_p
    )
    assert kept == [0, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-38, 1e-46, 1e-300])
def test_a_temperature_near_0_is_greedy(temperature):
    """Scores that become infinite or NaN would give a wrong token."""
    scores = shape_row([1.0, 30.0, 20.0, -4.0], temperature=temperature)[1]
    probs = scores.double().softmax(-1)
    assert probs.isfinite().all()
    assert probs.argmax() == 1 and probs[1] > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_incremental_penalties_equal_those_of_counts_made_anew(seed, dtype):
    """Counts that are kept from step to step give the same scores to the bit."""
    generator = random.Random(seed)
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        logit_bias={3: 2.5},
    )
    state, output = state_after(params), []
    for _ in range(40):
        draft = random_draft(generator, "tree")
        logits = random_logits(generator.randrange(1000), len(draft), VOCAB).to(dtype)
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
        for token in generator.choices(range(VOCAB), k=generator.randint(0, 5)):
            state.append(token)
            output.append(token)


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(1, 1.0, 0.0), (5, 0.7, 0.05), (40, 0.95, 0.05), (3, 1.0, 0.3)]
)
@pytest.mark.parametrize("rows", ["any", "ties", "few are allowed", "one is allowed"])
def test_selecting_the_most_likely_tokens_equals_sorting_all(rows, top_k, top_p, min_p):
    """Sorting a vocabulary is slow, so the most likely tokens are selected, with their ties."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(4, 300, generator=generator)
    if rows == "ties":
        scores = (scores * 2).round()
    if "allowed" in rows:
        scores[:, 1 if rows == "one is allowed" else 20 :] = -math.inf
    selected = draw._filter(scores, top_k, top_p, min_p)
    expected = draw._filter_sorted(scores, top_k, top_p, min_p)
    assert torch.equal(torch.isneginf(selected), torch.isneginf(expected))
    assert torch.equal(selected, expected)
    assert all(
        torch.equal(draw._filter(row[None], top_k, top_p, min_p)[0], in_batch)
        for row, in_batch in zip(scores, selected, strict=True)
    )


def test_top_k_does_not_bring_back_forbidden_tokens():
    assert shape_row([1.0, -math.inf, 0.0, -math.inf], temperature=1.0, top_k=3)[0] == [0, 2]


def test_top_p_keeps_the_lowest_ids_of_many_equally_likely_tokens():
    assert shape_row([0.5] * 4096, temperature=1.0, top_p=0.25)[0] == list(range(1024))


class _FixedGrammar:
    """A grammar that allows every second token at depth 0, every third one at depth 1, ..."""

    def masks(self, draft):
        masks = []
        for depth in draft.depths():
            allowed = np.arange(VOCAB) % (depth + 2) == 0
            masks.append(np.packbits(allowed, bitorder="little").tobytes())
        return masks


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_grammar_forbids_the_same_tokens_within_the_native_draw(monkeypatch, min_tokens):
    """A request without a grammar is in the batch; only torch applies `min_tokens`."""
    generator = torch.Generator().manual_seed(3)
    drafts = [Draft.chain(1, [2, 4], "x"), Draft.chain(5, [6], "x")]
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, min_tokens=min_tokens, top_k=0, top_p=1.0)
        states = [
            SamplingState(params, PROMPT, ENDS, _FixedGrammar()),
            SamplingState(params, PROMPT, ENDS),
        ]
        for seed in range(40):
            logits = torch.randn(5, VOCAB, generator=generator) * 2
            keys = [rng.stream(seed, rng.Lane.TARGET, i) for i in range(5)]
            with monkeypatch.context() as patched:
                patched.setattr(filters, "takes_masks", lambda logits: False)
                expected = draw_tokens(logits, drafts, states, keys)
            assert draw_tokens(logits, drafts, states, keys) == expected
            assert all(token % (2 + i) == 0 for i, token in enumerate(expected[:3]))
