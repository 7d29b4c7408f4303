"""A draft model proposes what a full recomputation would, from the text alone, and keeps the
distributions that it drew from.

Also tested: catching up with committed tokens, that proposing changes nothing, the end of pages and
of the context, vocabularies of other sizes, and cascades."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import LLM, ConfigError, SamplingParams, rng
from forerun.cache.attention import Segment
from forerun.check import oracle
from forerun.draft import draft_model, tree
from forerun.draft.draft_model import Cascade, DraftModel
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.kernels import native
from forerun.kernels.draw import shape_scores
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime.program import ChainStart
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Forward, Proposal
from forerun.verify import Noise
from forerun.verify.ratio import verify_block, verify_token, verify_tree
from tests import exact, tiny
from tests.draft.helpers import (
    FILTERED,
    GREEDY,
    KERNELS,
    SETTINGS,
    WARM,
    assert_same_draft,
    drafts_of,
    make_request,
    refused,
)

FAMILIES = ["llama", "gemma2", "gpt2"]  # no windows, windows, learned positions


def decoder(name: str = "llama") -> Decoder:
    return tiny.decoder(tiny.drafter(name))


def proposer(
    width: int = 1,
    name: str = "llama",
    *,
    tokens: int = 1024,
    page: int = 4,
    slots: int = 4,
    vocab: int = tiny.VOCAB,
) -> DraftModel:
    return DraftModel(Runner(decoder(name), tokens=tokens, page=page, slots=slots), vocab, width)


def text_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(tiny.VOCAB), k=length)


def models(kernels: str, count: int, width: int = 1) -> list[DraftModel]:
    if kernels == "torch":
        return [proposer(width, slots=8) for _ in range(count)]
    native.start(2)
    made = tiny.native_decoder(tiny.drafter("llama"))
    room = {"tokens": 2048, "page": 16, "slots": 8}
    return [DraftModel(Runner(made, **room), tiny.VOCAB, width) for _ in range(count)]


@functools.cache
def _logits(model: Decoder, tokens: tuple[int, ...]) -> Tensor:
    runner = Runner(model, tokens=256, page=256, slots=1)
    runner.cache.pages.grow(0, len(tokens))
    chain = list(range(-1, len(tokens) - 1))
    return runner.forward([Segment(0, list(tokens), chain, [len(tokens) - 1])]).logits[0]


def logits_after(model: Decoder, tokens: Sequence[int], vocab: int = tiny.VOCAB) -> Tensor:
    """Run the model on the whole text from scratch; logits over the target's vocabulary."""
    logits = _logits(model, tuple(tokens))
    padding = torch.full((max(0, vocab - len(logits)),), -torch.inf, dtype=logits.dtype)
    return torch.cat((logits[:vocab], padding))


def noisy(scores: Tensor, key: int) -> list[float]:
    """Add the stream's Gumbel noise to scores, token by token in plain Python."""
    return [
        s + rng.gumbel_scalar(key, i) if s > -math.inf else s for i, s in enumerate(scores.tolist())
    ]


def naive_coupled(
    model: Decoder, request: DraftRequest, width: int
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Return the levels of a beam: the `width` likeliest paths of each, as (tokens, value)."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    levels = []
    for depth in range(request.depth):
        found = []
        for path, value in beams:
            logits = logits_after(model, [*request.tokens, *path])
            if request.params.sampling_temperature > 0:
                scores = shape_scores(logits[None], [request.params.sampling])[0]
                noised = noisy(scores, request.noise.target(depth))
                logits = torch.tensor(noised, dtype=torch.float64)
            log_probs = torch.log_softmax(logits, -1).tolist()
            found += [
                ((*path, token), value + log_prob)
                for token, log_prob in enumerate(log_probs)
                if log_prob > -math.inf
            ]
        beams = sorted(found, key=lambda pair: -pair[1])[:width]
        levels.append(beams)
    return levels


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens below the root on the way to each node."""
    return [tuple(draft.tokens[i] for i in draft.path_to(node)[1:]) for node in range(len(draft))]


def assert_well_formed(draft: Draft, request: DraftRequest) -> None:
    assert draft.tokens[0] == request.tokens[-1]
    assert draft.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(draft.parents[1:], start=1))
    assert len(draft.tokens) == len(draft.parents) == len(draft.sources) == len(draft.proposals)
    assert draft.sources == ["", *["model"] * (len(draft) - 1)]
    assert max(draft.depths()) <= request.depth
    assert len(set(paths(draft))) == len(draft), "two siblings are the same token"


def assert_equals_naive(model: Decoder, request: DraftRequest, width: int, draft: Draft) -> None:
    assert_well_formed(draft, request)
    assert draft.probs is None
    assert set(draft.proposals) == {Proposal.DETERMINISTIC}
    expected = [path for level in naive_coupled(model, request, width) for path, _ in level]
    assert paths(draft) == [(), *expected]


# ---------------------------------------------------------------- with the target's noise


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [(GREEDY,) * 3, (WARM,) * 3, (FILTERED,) * 3, (GREEDY, WARM, FILTERED)],
    ids=["greedy", "warm", "filtered", "mixed"],
)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_coupled_drafts_equal_a_full_recomputation(
    name: str, settings: tuple[SamplingParams, ...], width: int
) -> None:
    """The slots of a batch differ in length and depth."""
    drafter = proposer(width, name)
    sizes = enumerate(zip(settings, ((3, 4), (21, 2), (12, 5)), strict=True))
    requests = [
        make_request(text_of(size, size), params, depth, slot)
        for slot, (params, (size, depth)) in sizes
    ]
    for request, draft in zip(requests, drafts_of(drafter, requests), strict=True):
        assert_equals_naive(decoder(name), request, width, draft)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("width, coupled", [(1, True), (3, True), (1, False), (3, False)])
def test_proposing_twice_gives_the_same_draft(width: int, coupled: bool) -> None:
    """Proposing for others in between, or to a lower depth, changes nothing."""
    drafter = proposer(width)
    requests = [
        make_request(text_of(9 + slot, slot), WARM, 4, slot, coupled=coupled) for slot in range(3)
    ]
    first = drafts_of(drafter, requests)
    drafter.propose([make_request(requests[0].tokens, GREEDY, 2, 0)])
    again = [draft for request in reversed(requests) for draft in drafter.propose([request])][::-1]
    for one, other in zip(first, again, strict=True):
        assert_same_draft(one, other)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("width", [1, 3])
def test_the_proposer_catches_up_with_any_number_of_tokens(name: str, width: int) -> None:
    """After a round any number of tokens may have been committed: drafted ones, others, none at
    all."""
    generator, drafter, text = random.Random(7), proposer(width, name), text_of(5)
    drafter.open(0, text)
    for count in (0, 1, 2, 3, 4, 5, 17, 1, 30, 2):
        request = make_request(text, WARM, 3)
        (draft,) = drafter.propose([request])
        assert_equals_naive(decoder(name), request, width, draft)
        longest = max(paths(draft), key=len)
        text = [
            *text,
            *longest[:count],
            *generator.choices(range(tiny.VOCAB), k=max(0, count - len(longest))),
        ]


def test_a_lag_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are read in several forward passes; some texts of a call need fewer."""
    monkeypatch.setattr(draft_model, "CHUNK", 6)
    drafter = proposer(2)
    requests = [
        make_request(text_of(length, length), WARM, 3, slot)
        for slot, length in enumerate((30, 1, 6, 13))
    ]
    for request, draft in zip(requests, drafts_of(drafter, requests), strict=True):
        assert_equals_naive(decoder(), request, 2, draft)


# ---------------------------------------------------------------- with noise of its own


@SETTINGS
@pytest.mark.parametrize(
    "width, branching", [(1, False), (1, True), (2, True), (3, True), (3, False)]
)
def test_sampled_drafts_keep_the_probs_they_were_drawn_from(
    params: SamplingParams, width: int, branching: bool
) -> None:
    """A greedy tree is a beam; otherwise probs are kept, without deterministic siblings."""
    drafter = proposer(width)
    requests = [
        make_request(text_of(7 + slot, slot), params, 4, slot, coupled=False, branching=branching)
        for slot in range(3)
    ]
    for request, draft in zip(requests, drafts_of(drafter, requests), strict=True):
        assert_well_formed(draft, request)
        if params.greedy and branching:
            assert_equals_naive(decoder(), request, width, draft)
        else:
            assert_drawn_from_probs(decoder(), request, width if branching else 1, draft)


def assert_drawn_from_probs(
    model: Decoder, request: DraftRequest, width: int, draft: Draft
) -> None:
    """Compare an uncoupled draft with the model run from scratch and levels planned anew."""
    assert draft.probs is not None
    assert draft.probs.shape == (len(draft), tiny.VOCAB)
    assert draft.probs.dtype == np.float64
    children, depths = draft.children(), draft.depths()
    values = {0: 1.0}  # of the nodes to expand: the probability that their path is accepted
    for _ in range(request.depth):
        scores_of, likeliest = {}, {}
        for node in values:
            logits = logits_after(model, [*request.tokens, *paths(draft)[node]])
            scores_of[node] = shape_scores(logits[None], [request.params.sampling])[0]
            probs = scores_of[node].double().softmax(-1)
            top = probs.topk(width - 1).indices.tolist()
            likeliest[node] = [(t, probs[t].item()) for t in top if probs[t]]
        candidates = [(value * tree.SAMPLED_RATE, node, None) for node, value in values.items()]
        candidates += [
            (values[n] * p * tree.SIBLING_GAIN, n, (t, p)) for n in values for t, p in likeliest[n]
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        taken = [(node, sibling) for _, node, sibling in candidates[:width]]
        found = {}
        for node, value in values.items():
            siblings = [sibling for n, sibling in taken if n == node and sibling is not None]
            scores = scores_of[node].clone()
            scores[[token for token, _ in siblings]] = -math.inf
            kept = list(children[node])
            if (node, None) in taken and torch.isfinite(scores).any():
                child, drawn = kept.pop(0), noisy(scores, request.noise.draft(node))
                assert draft.proposals[child] is Proposal.SAMPLED
                assert draft.tokens[child] == max(range(tiny.VOCAB), key=drawn.__getitem__)
                assert np.allclose(
                    draft.probs[node], scores.double().softmax(-1).numpy(), atol=1e-9
                )
                assert draft.probs[node][draft.tokens[child]] > 0
                left = 1 - sum(prob for _, prob in siblings)
                rate = tree.REST_RATE * max(left, 1e-9) if siblings else tree.SAMPLED_RATE
                found[child] = value * rate
            else:
                assert not draft.probs[node].any()
            assert [(draft.tokens[i], draft.proposals[i]) for i in kept] == [
                (token, Proposal.DETERMINISTIC) for token, _ in siblings
            ]
            found |= {child: value * prob for child, (_, prob) in zip(kept, siblings, strict=True)}
        values = dict(sorted(found.items()))
        assert 0 < len(values) <= width
    assert len(draft) == 1 + sum(map(len, children)) and max(depths) == request.depth
    assert not any(children[node] for node in values)


def test_deterministic_siblings_may_leave_nothing_to_draw() -> None:
    """If the only possible token is deterministic, none is drawn and the tree goes on below it."""
    params = SamplingParams(temperature=1.0, top_k=1)
    request = make_request(text_of(9), params, 4, coupled=False)
    (draft,) = drafts_of(proposer(2), [request])
    assert_equals_naive(decoder(), request, 1, draft)
    assert len(draft) == 5


# ---------------------------------------------------------------- without room


def test_without_free_pages_there_is_no_draft() -> None:
    """A request that fits still gets its draft; another gets one when there is room again."""
    drafter, texts = proposer(tokens=24, slots=2), [text_of(14, 1), text_of(9, 2)]
    for slot, text in enumerate(texts):
        drafter.open(slot, text)
    requests = [make_request(text, slot=slot) for slot, text in enumerate(texts)]
    full, none = drafter.propose(requests)
    assert_equals_naive(decoder(), requests[0], 1, full)
    assert (none.tokens, none.parents, none.probs) == ([texts[1][-1]], [-1], None)
    drafter.close(0, texts[0])
    assert_equals_naive(decoder(), requests[1], 1, drafter.propose([requests[1]])[0])
    drafter.runner.cache.pages.check()


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_at_the_end_of_the_context_there_is_no_draft(width: int, page: int) -> None:
    """The drafter's context may be shorter than the target's, and no whole number of pages."""
    small = load_decoder(tiny.drafter("llama"), torch.float64, torch.device("cpu"), 20)
    drafter = DraftModel(Runner(small, tokens=128, page=page, slots=1), tiny.VOCAB, width)
    text = text_of(40, 8)
    drafter.open(0, text[:3])
    for end in (3, 7, 12, 17, 19, 20, 21, 22, 40):
        request = make_request(text[:end], WARM, 3)
        (draft,) = drafter.propose([request])
        if end + 3 * width <= 20:
            assert_equals_naive(decoder(), request, width, draft)
        else:
            assert len(draft) == 1
        if end >= 20:
            assert draft.tokens == [text[end - 1]]


# ---------------------------------------------------------------- vocabularies


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Decoder]:
    """Drafters with fewer and with more tokens than the target."""
    decoders = {}
    for vocab in (56, 72):
        directory: Path = tmp_path_factory.mktemp(f"vocab-{vocab}")
        tiny.hf_model("llama", 3, vocab_size=vocab).save_pretrained(directory)
        decoders[vocab] = tiny.decoder(directory)
    return decoders


@pytest.mark.parametrize("vocab", [56, 72])
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_vocabulary_of_another_size(
    vocab: int, coupled: bool, width: int, sized: dict[int, Decoder]
) -> None:
    """Tokens that only one of the models has are never drafted and have no probability."""
    hot = SamplingParams(temperature=5.0)
    drafter = DraftModel(Runner(sized[vocab], tokens=512, page=4, slots=1), tiny.VOCAB, width)
    text = [t % 56 for t in text_of(12, 9)]
    drafter.open(0, text)
    for seed in range(12):
        request = DraftRequest(0, text, hot, Noise(seed, 11), 4, coupled=coupled)
        (draft,) = drafter.propose([request])
        assert_well_formed(draft, request)
        assert max(draft.tokens) < min(vocab, tiny.VOCAB)
        if coupled:
            assert_equals_naive(sized[vocab], request, width, draft)
        else:
            assert_drawn_from_probs(sized[vocab], request, width, draft)
            assert draft.probs is not None and not draft.probs[:, vocab:].any()


def test_behind_a_token_that_the_drafter_lacks_there_is_no_draft(sized: dict[int, Decoder]) -> None:
    """A target may emit tokens for which a smaller drafter has no embedding."""
    drafter = DraftModel(Runner(sized[56], tokens=512, page=4, slots=2), tiny.VOCAB)
    good = [t % 56 for t in text_of(8, 9)]
    drafts = drafts_of(drafter, [make_request([1, 2, 60, 3]), make_request(good, slot=1)])
    assert drafts[0].tokens == [3]
    assert_equals_naive(sized[56], make_request(good, slot=1), 1, drafts[1])


def test_a_slot_that_is_used_again() -> None:
    drafter, first, second = proposer(2), text_of(14, 1), text_of(9, 2)
    drafts_of(drafter, [make_request(first, WARM)])
    drafter.close(0, first)
    request = make_request(second, WARM)
    assert_equals_naive(decoder(), request, 2, drafts_of(drafter, [request])[0])
    drafter.runner.cache.pages.check()


def test_a_preempted_request_comes_back_in_another_slot() -> None:
    """Its cached tokens are found again, and its draft is the same."""
    drafter, text = proposer(2), text_of(22, 3)
    before = drafts_of(drafter, [make_request(text, WARM)])
    drafter.close(0)
    drafter.open(2, text)
    assert drafter.runner.cache.length[2] == 20
    assert drafter.propose([make_request(text, WARM, slot=2)]) == before


# Cascades: a drafter drafts for a draft model, whose drafts then take fewer forward passes.


class Scripted(Proposer):
    """Drafts the tokens of a script, by slot."""

    name = "scripted"

    def __init__(self, script: dict[int, list[int]]) -> None:
        self.script, self.requests = script, list[DraftRequest]()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.requests += requests
        return [
            Draft.chain(
                request.tokens[-1], self.script.get(request.slot, [])[: request.depth], self.name
            )
            for request in requests
        ]


class Warmer(DraftModel):
    """Draws at another temperature than that of the request."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return super().propose(
            [replace(request, params=SamplingParams.pure(temperature=1.6)) for request in requests]
        )


@SETTINGS
@pytest.mark.parametrize("kernels", KERNELS)
def test_coupled_cascades_draft_what_the_model_alone_drafts(
    kernels: str, params: SamplingParams
) -> None:
    """The drafts for the model are right, wrong, right in part, empty, or have unknown tokens."""
    alone, other = models(kernels, 2)
    requests = [
        make_request(text_of(5 + 3 * slot, slot), params, depth=3 + slot % 3, slot=slot)
        for slot in range(6)
    ]
    cascade = Cascade(script := Scripted({}), other)
    assert cascade.name == "scripted>model" and cascade.width == 1
    for request in requests:
        alone.open(request.slot, request.tokens)
        cascade.open(request.slot, request.tokens)
    expected = alone.propose(requests)
    right = [draft.tokens[1:] for draft in expected]
    wrong = [(t + 1) % tiny.VOCAB for t in right[1]]
    in_part = [*right[4][:2], *wrong]
    scripted = (right[0], wrong, right[2][:1], [], in_part, [right[5][0], 10**6])
    script.script = dict(enumerate(scripted))
    for _ in range(2):  # proposing changes nothing
        found = cascade.propose(requests)
        assert [draft.tokens for draft in found] == [draft.tokens for draft in expected]
    assert [draft.sources[1] for draft in found] == [
        "scripted&model" if i not in (1, 3) else "model" for i in range(6)
    ]


def test_a_cascade_takes_fewer_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, other, passes = proposer(), proposer(), list[int]()
    one = make_request(text_of(9), depth=6)
    (expected,) = drafts_of(alone, [one])
    cascade = Cascade(Scripted({0: expected.tokens[1:5]}), other)
    cascade.open(0, one.tokens)
    forward = Runner.forward
    monkeypatch.setattr(
        Runner, "forward", lambda self, segments: (passes.append(1), forward(self, segments))[1]
    )
    assert cascade.propose([one])[0].tokens == expected.tokens
    assert len(passes) == 2, (
        "one reads the text and four drafted tokens and gives the fifth, one the sixth"
    )


@pytest.mark.parametrize("params", [WARM, FILTERED], ids=["warm", "filtered"])
def test_probs_of_a_cascade_are_those_of_the_model(params: SamplingParams) -> None:
    """This holds whether a token was drafted, drawn in place of one, or drawn behind them."""
    text = text_of(9, 3)
    model = proposer()
    cascade, kinds = Cascade(Warmer(proposer().runner, tiny.VOCAB), model), set[str]()
    for seed in range(8):
        one = replace(
            make_request(text, params, depth=5), coupled=False, noise=Noise(seed, len(text) - 1)
        )
        (draft,) = drafts_of(cascade, [one])
        assert len(draft) == 6
        assert draft.proposals[1:] == [Proposal.SAMPLED] * 5
        assert draft.parents == list(range(-1, 5))
        for node in range(5):
            logits = logits_after(model.runner.decoder, [*text, *draft.tokens[1 : node + 1]])
            probs = shape_scores(logits[None], [params.sampling]).double().softmax(-1).numpy()[0]
            assert draft.probs is not None and np.allclose(draft.probs[node], probs, atol=1e-9)
        kinds |= set(draft.sources[1:])
        cascade.close(0)
    assert kinds == {"model&model", "model"}


def cascades(
    small: oracle.Table, middle: oracle.Table, depth: int
) -> Iterator[tuple[Draft, float]]:
    """Yield every draft of verifying the small model's samples with the middle one, and its
    probability."""
    for draft, weight in oracle.proposals(oracle.sampled, small, depth):
        probs = oracle.rows(draft, middle)
        for verdict, prob in oracle.outcomes(partial(verify_token, draft, probs)):
            made = Draft.root(0)
            for node, token in enumerate(verdict.tokens[:depth]):
                made.add(token, node, "toy", Proposal.SAMPLED)
            made.probs = np.stack(
                [middle[oracle.prefix_of(made, node)] for node in range(len(made))]
            )
            yield made, weight * prob


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("verify", [verify_token, verify_block, verify_tree])
def test_drafts_of_a_cascade_are_exact(verify: object, seed: int) -> None:
    """All drafts and coins of both levels are enumerated; drafts end behind a rejected token."""
    target, middle = oracle.toy_models("float", 2, 2, seed)
    _, small = oracle.toy_models("float", 2, 2, seed + 9)
    assert exact.bias(verify, cascades(small, middle, 2), target, 2) < 1e-12
    wrong = ((replace(d, probs=np.roll(d.probs, 1, -1)), w) for d, w in cascades(small, middle, 2))
    assert exact.bias(verify, wrong, target, 2) > 1e-6, "wrong probs are not detected"


def test_a_cascade_drafts_no_deeper_than_each_request_asks() -> None:
    """The deepest request of a batch does not change the depth of the others."""
    model, first = proposer(slots=4), Scripted({slot: [5] * 9 for slot in range(4)})
    cascade = Cascade(first, model)
    requests = [make_request(text_of(7, s), depth=(1, 8, 2, 5)[s], slot=s) for s in range(4)]
    for request in requests:
        cascade.open(request.slot, request.tokens)
    for _ in range(12):
        cascade.propose(requests)
    assert first.requests
    assert all(each.depth <= requests[each.slot].depth for each in first.requests)


@pytest.mark.parametrize("kernels", KERNELS)
def test_cascades_learn_the_cost_of_one_forward_pass(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts tokens level by level or in one call; reading a prompt does not count."""
    (model,) = models(kernels, 1)
    clock, passes = [0.0], Runner.forward
    monkeypatch.setattr(draft_model.time, "thread_time", lambda: clock[0])

    def forward(self: Runner, segments: Sequence[Segment]) -> Forward:
        clock[0] += 1.0
        return passes(self, segments)

    chain = Runner.draft_chains

    def at_once(self: Runner, links: Sequence[ChainStart], vocab: int) -> list[list[int]] | None:
        tokens = chain(self, links, vocab)
        clock[0] += 0.0 if tokens is None else max(len(link.keys) for link in links)
        return tokens

    monkeypatch.setattr(Runner, "forward", forward)
    monkeypatch.setattr(Runner, "draft_chains", at_once)
    cascade, text = Cascade(Scripted({0: [5] * 2}), model), text_of(90, 3)
    drafts_of(cascade, [make_request(text, depth=6)])
    assert 90 not in cascade.policy.forward_costs.sizes
    assert max(cascade.policy.forward_costs.sizes, default=0) <= 3
    for _ in range(3):
        cascade.propose([make_request(text, depth=6)])
    assert cascade.policy.forward_costs.at(1) == pytest.approx(1.0)


@pytest.mark.parametrize("spec", ["suffix>recycle", "model:{0}>suffix", "(suffix|ngram)>model:{0}"])
def test_invalid_cascades_are_refused(spec: str) -> None:
    with refused(ConfigError, "is no cascade"):
        LLM(tiny.repetitive(), draft=spec.format(tiny.repetitive(0.1)), kv_tokens=192)
    llm = LLM(tiny.repetitive(), draft=f"model:{tiny.repetitive(0.1)}", kv_tokens=192)
    assert llm.generate("the name", SamplingParams.pure(max_tokens=5), draft="suffix>model")[
        0
    ].token_ids
    before = set(llm.engine.proposers)
    with pytest.raises(ConfigError, match="is no cascade"):
        llm.generate("the name", draft="model>suffix")
    assert set(llm.engine.proposers) == before
    assert "model>suffix" not in llm.engine.proposers._composed
