"""The drafting model proposes what a full recomputation would, from the text alone, and says truly
how it drew.

Protects: chains and beams, greedy and sampled, with the target's noise or its own laws; reading
whatever it has missed; that proposing changes nothing; what happens without room, and between
vocabularies of different sizes."""

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
from tests.draft.asking import FILTERED, GREEDY, KERNELS, SETTINGS, WARM, refused, row, same

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
    """The model run on the whole text from scratch; the target's vocabulary."""
    logits = _logits(model, tuple(tokens))
    padding = torch.full((max(0, vocab - len(logits)),), -torch.inf, dtype=logits.dtype)
    return torch.cat((logits[:vocab], padding))


def noisy(scores: Tensor, key: int) -> list[float]:
    """Scores plus the stream's Gumbel noise, token by token in plain Python."""
    return [
        s + rng.gumbel_scalar(key, i) if s > -math.inf else s for i, s in enumerate(scores.tolist())
    ]


def naive_coupled(
    model: Decoder, row: DraftRequest, width: int
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Levels of a beam: the `width` likeliest paths below the root, each a tuple of tokens and its
    value."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    levels = []
    for depth in range(row.depth):
        found = []
        for path, value in beams:
            logits = logits_after(model, [*row.tokens, *path])
            if row.params.sampling_temperature > 0:
                scores = shape_scores(logits[None], [row.params.sampling])[0]
                logits = torch.tensor(noisy(scores, row.noise.target(depth)), dtype=torch.float64)
            law = torch.log_softmax(logits, -1).tolist()
            found += [
                ((*path, token), value + law[token])
                for token in range(tiny.VOCAB)
                if law[token] > -math.inf
            ]
        beams = sorted(found, key=lambda pair: -pair[1])[:width]
        levels.append(beams)
    return levels


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens below the root on the way to each node."""
    return [tuple(draft.tokens[i] for i in draft.path_to(node)[1:]) for node in range(len(draft))]


def well_formed(draft: Draft, row: DraftRequest) -> None:
    assert draft.tokens[0] == row.tokens[-1]
    assert draft.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(draft.parents[1:], start=1))
    assert len(draft.tokens) == len(draft.parents) == len(draft.sources) == len(draft.proposals)
    assert draft.sources == ["", *["model"] * (len(draft) - 1)]
    assert max(draft.depths()) <= row.depth
    assert len(set(paths(draft))) == len(draft), "two siblings are the same token"


def same_as_naive(model: Decoder, row: DraftRequest, width: int, draft: Draft) -> None:
    well_formed(draft, row)
    assert draft.probs is None
    assert set(draft.proposals) == {Proposal.DETERMINISTIC}
    expected = [path for level in naive_coupled(model, row, width) for path, _ in level]
    assert paths(draft) == [(), *expected]


# ---------------------------------------------------------------- with the target's noise


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [(GREEDY,) * 3, (WARM,) * 3, (FILTERED,) * 3, (GREEDY, WARM, FILTERED)],
    ids=["greedy", "warm", "filtered", "mixed"],
)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_coupled_draft_is_a_full_recomputation(
    name: str, settings: tuple[SamplingParams, ...], width: int
) -> None:
    """Several slots at once, of different lengths and depths."""
    drafter = proposer(width, name)
    sizes = enumerate(zip(settings, ((3, 4), (21, 2), (12, 5)), strict=True))
    rows = [
        row(text_of(size, size), params, depth, slot) for slot, (params, (size, depth)) in sizes
    ]
    for r in rows:
        drafter.open(r.slot, r.tokens)
    for r, draft in zip(rows, drafter.propose(rows), strict=True):
        same_as_naive(decoder(name), r, width, draft)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("width, coupled", [(1, True), (3, True), (1, False), (3, False)])
def test_proposing_twice_gives_the_same_draft(width: int, coupled: bool) -> None:
    """And asking for others in between, or for less, changes nothing."""
    drafter = proposer(width)
    rows = [row(text_of(9 + slot, slot), WARM, 4, slot, coupled=coupled) for slot in range(3)]
    for r in rows:
        drafter.open(r.slot, r.tokens)
    first = drafter.propose(rows)
    drafter.propose([row(rows[0].tokens, GREEDY, 2, 0)])
    again = [draft for r in reversed(rows) for draft in drafter.propose([r])][::-1]
    for one, other in zip(first, again, strict=True):
        same(one, other)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("width", [1, 3])
def test_reads_whatever_it_has_missed(name: str, width: int) -> None:
    """After a round any number of tokens may have been committed: drafted ones, others, none at
    all."""
    chance, drafter, text = random.Random(7), proposer(width, name), text_of(5)
    drafter.open(0, text)
    for count in (0, 1, 2, 3, 4, 5, 17, 1, 30, 2):
        r = row(text, WARM, 3)
        (draft,) = drafter.propose([r])
        same_as_naive(decoder(name), r, width, draft)
        longest = max(paths(draft), key=len)
        text = [
            *text,
            *longest[:count],
            *chance.choices(range(tiny.VOCAB), k=max(0, count - len(longest))),
        ]


def test_a_lag_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are read in several passes, those of one call ending at different times."""
    monkeypatch.setattr(draft_model, "CHUNK", 6)
    drafter = proposer(2)
    rows = [
        row(text_of(length, length), WARM, 3, slot) for slot, length in enumerate((30, 1, 6, 13))
    ]
    for r in rows:
        drafter.open(r.slot, r.tokens)
    for r, draft in zip(rows, drafter.propose(rows), strict=True):
        same_as_naive(decoder(), r, 2, draft)


# ---------------------------------------------------------------- with a law of its own


@SETTINGS
@pytest.mark.parametrize(
    "width, branching", [(1, False), (1, True), (2, True), (3, True), (3, False)]
)
def test_sampled_draft_keeps_the_law_it_drew_from(
    params: SamplingParams, width: int, branching: bool
) -> None:
    """A greedy tree is a beam; else laws are kept, each without the given siblings."""
    drafter = proposer(width)
    rows = [
        row(text_of(7 + slot, slot), params, 4, slot, coupled=False, branching=branching)
        for slot in range(3)
    ]
    for r in rows:
        drafter.open(r.slot, r.tokens)
    for r, draft in zip(rows, drafter.propose(rows), strict=True):
        well_formed(draft, r)
        if params.greedy and branching:
            same_as_naive(decoder(), r, width, draft)
        else:
            sampled_as_said(decoder(), r, width if branching else 1, draft)


def sampled_as_said(model: Decoder, row: DraftRequest, width: int, draft: Draft) -> None:
    """Every node of a draft of an uncoupled row, against the model run from scratch and the level
    planned once more."""
    assert draft.probs is not None
    assert draft.probs.shape == (len(draft), tiny.VOCAB)
    assert draft.probs.dtype == np.float64
    children, depths = draft.children(), draft.depths()
    values = {0: 1.0}  # of the nodes to expand: the chance that their path stands
    for _ in range(row.depth):
        laws, likeliest = {}, {}
        for node in values:
            scores = shape_scores(
                logits_after(model, [*row.tokens, *paths(draft)[node]])[None], [row.params.sampling]
            )[0]
            laws[node] = scores
            chances = scores.double().softmax(-1)
            likeliest[node] = [
                (t, chances[t].item())
                for t in chances.topk(width - 1).indices.tolist()
                if chances[t]
            ]
        wishes = [(value * tree.SAMPLED_RATE, node, None) for node, value in values.items()]
        wishes += [
            (values[n] * c * tree.SIBLING_GAIN, n, (t, c)) for n in values for t, c in likeliest[n]
        ]
        taken = [wish[1:] for wish in sorted(wishes, key=lambda wish: -wish[0])[:width]]
        found = {}
        for node, value in values.items():
            given = [wish for n, wish in taken if n == node and wish is not None]
            scores = laws[node].clone()
            scores[[token for token, _ in given]] = -math.inf
            kept = list(children[node])
            if (node, None) in taken and torch.isfinite(scores).any():
                child, drawn = kept.pop(0), noisy(scores, row.noise.draft(node))
                assert draft.proposals[child] is Proposal.SAMPLED
                assert draft.tokens[child] == max(range(tiny.VOCAB), key=drawn.__getitem__)
                assert np.allclose(
                    draft.probs[node], scores.double().softmax(-1).numpy(), atol=1e-9
                )
                assert draft.probs[node][draft.tokens[child]] > 0
                left = 1 - sum(chance for _, chance in given)
                found[child] = value * (
                    tree.REST_RATE * max(left, 1e-9) if given else tree.SAMPLED_RATE
                )
            else:
                assert not draft.probs[node].any()
            assert [(draft.tokens[i], draft.proposals[i]) for i in kept] == [
                (token, Proposal.DETERMINISTIC) for token, _ in given
            ]
            found |= {child: value * chance for child, (_, chance) in zip(kept, given, strict=True)}
        values = dict(sorted(found.items()))
        assert 0 < len(values) <= width
    assert len(draft) == 1 + sum(map(len, children)) and max(depths) == row.depth
    assert not any(children[node] for node in values)


def test_given_siblings_that_leave_nothing_to_draw() -> None:
    """With one token possible and given, there is no law to draw from: the tree goes on below what
    is given."""
    params = SamplingParams(temperature=1.0, top_k=1)
    drafter, r = proposer(2), row(text_of(9), params, 4, coupled=False)
    drafter.open(0, r.tokens)
    (draft,) = drafter.propose([r])
    same_as_naive(decoder(), r, 1, draft)
    assert len(draft) == 5


# ---------------------------------------------------------------- without room


def test_no_pages_left_is_a_root() -> None:
    """The one that fits still gets its draft; the other goes on when there is room again."""
    drafter, texts = proposer(tokens=24, slots=2), [text_of(14, 1), text_of(9, 2)]
    for slot, text in enumerate(texts):
        drafter.open(slot, text)
    rows = [row(text, slot=slot) for slot, text in enumerate(texts)]
    full, none = drafter.propose(rows)
    same_as_naive(decoder(), rows[0], 1, full)
    assert (none.tokens, none.parents, none.probs) == ([texts[1][-1]], [-1], None)
    drafter.close(0, texts[0])
    same_as_naive(decoder(), rows[1], 1, drafter.propose([rows[1]])[0])
    drafter.runner.cache.pages.check()


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_end_of_the_context_is_a_root(width: int, page: int) -> None:
    """The drafter's context may be shorter than the target's, and no whole number of pages."""
    small = load_decoder(tiny.drafter("llama"), torch.float64, torch.device("cpu"), 20)
    drafter = DraftModel(Runner(small, tokens=128, page=page, slots=1), tiny.VOCAB, width)
    text = text_of(40, 8)
    drafter.open(0, text[:3])
    for end in (3, 7, 12, 17, 19, 20, 21, 22, 40):
        r = row(text[:end], WARM, 3)
        (draft,) = drafter.propose([r])
        if end + 3 * width <= 20:
            same_as_naive(decoder(), r, width, draft)
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
    """Tokens only one of the two has are never drafted and have no probability."""
    hot = SamplingParams(temperature=5.0)
    drafter = DraftModel(Runner(sized[vocab], tokens=512, page=4, slots=1), tiny.VOCAB, width)
    text = [t % 56 for t in text_of(12, 9)]
    drafter.open(0, text)
    for seed in range(12):
        r = DraftRequest(0, text, hot, Noise(seed, 11), 4, coupled=coupled)
        (draft,) = drafter.propose([r])
        well_formed(draft, r)
        assert max(draft.tokens) < min(vocab, tiny.VOCAB)
        if coupled:
            same_as_naive(sized[vocab], r, width, draft)
        else:
            sampled_as_said(sized[vocab], r, width, draft)
            assert draft.probs is not None and not draft.probs[:, vocab:].any()


def test_a_committed_token_the_drafter_does_not_have(sized: dict[int, Decoder]) -> None:
    """The target may say what the smaller drafter has no embedding for: no draft, never an
    error."""
    drafter = DraftModel(Runner(sized[56], tokens=512, page=4, slots=2), tiny.VOCAB)
    good = [t % 56 for t in text_of(8, 9)]
    drafter.open(0, [1, 2, 60, 3])
    drafter.open(1, good)
    drafts = drafter.propose([row([1, 2, 60, 3]), row(good, slot=1)])
    assert drafts[0].tokens == [3]
    same_as_naive(sized[56], row(good, slot=1), 1, drafts[1])


def test_a_slot_that_is_used_again() -> None:
    drafter, first, second = proposer(2), text_of(14, 1), text_of(9, 2)
    drafter.open(0, first)
    drafter.propose([row(first, WARM)])
    drafter.close(0, first)
    drafter.open(0, second)
    r = row(second, WARM)
    same_as_naive(decoder(), r, 2, drafter.propose([r])[0])
    drafter.runner.cache.pages.check()


def test_a_preempted_request_comes_back_in_another_slot() -> None:
    """What it has read is still known, and what it proposes is the same."""
    drafter, text = proposer(2), text_of(22, 3)
    drafter.open(0, text)
    before = drafter.propose([row(text, WARM)])
    drafter.close(0)
    drafter.open(2, text)
    assert drafter.runner.cache.length[2] == 20
    assert drafter.propose([row(text, WARM, slot=2)]) == before


# A drafter for a draft model: the draft model's own drafts for less, or exact samples of its distribution.


class Scripted(Proposer):
    """Drafts what it was told, by slot."""

    name = "scripted"

    def __init__(self, script: dict[int, list[int]]) -> None:
        self.script, self.asked = script, list[DraftRequest]()

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += rows
        return [
            Draft.chain(r.tokens[-1], self.script.get(r.slot, [])[: r.depth], self.name)
            for r in rows
        ]


class Warmer(DraftModel):
    """Draws at another temperature than it is asked to."""

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        return super().propose(
            [replace(r, params=SamplingParams.pure(temperature=1.6)) for r in rows]
        )


@SETTINGS
@pytest.mark.parametrize("kernels", KERNELS)
def test_under_match_drafts_are_those_of_the_model_alone(
    kernels: str, params: SamplingParams
) -> None:
    """Whatever was drafted for it: all of it right, a part, nothing, more than it was asked for,
    unknown tokens."""
    alone, other = models(kernels, 2)
    rows = [
        row(text_of(5 + 3 * slot, slot), params, depth=3 + slot % 3, slot=slot) for slot in range(6)
    ]
    cascade = Cascade(script := Scripted({}), other)
    assert cascade.name == "scripted>model" and cascade.width == 1
    for r in rows:
        alone.open(r.slot, r.tokens)
        cascade.open(r.slot, r.tokens)
    expected = alone.propose(rows)
    said = [draft.tokens[1:] for draft in expected]
    wrong = [(t + 1) % tiny.VOCAB for t in said[1]]
    script.script = {
        0: said[0],
        1: wrong,
        2: said[2][:1],
        3: [],
        4: [*said[4][:2], *wrong],
        5: [said[5][0], 10**6],
    }
    for _ in range(2):  # proposing changes nothing
        found = cascade.propose(rows)
        assert [draft.tokens for draft in found] == [draft.tokens for draft in expected]
    assert [draft.sources[1] for draft in found] == [
        "scripted&model" if i not in (1, 3) else "model" for i in range(6)
    ]


def test_it_takes_fewer_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, other, passes = proposer(), proposer(), list[int]()
    one = row(text_of(9), depth=6)
    alone.open(0, one.tokens)
    (expected,) = alone.propose([one])
    cascade = Cascade(Scripted({0: expected.tokens[1:5]}), other)
    cascade.open(0, one.tokens)
    forward = Runner.forward
    monkeypatch.setattr(
        Runner, "forward", lambda self, segments: (passes.append(1), forward(self, segments))[1]
    )
    assert cascade.propose([one])[0].tokens == expected.tokens
    assert len(passes) == 2, (
        "one reads the text and four drafted tokens and says the fifth, one the sixth"
    )


@pytest.mark.parametrize("params", [WARM, FILTERED], ids=["warm", "filtered"])
def test_laws_are_those_the_model_has_there(params: SamplingParams) -> None:
    """Under the ratio rules, of every node, whether it was drafted, drawn in its place or
    behind."""
    text = text_of(9, 3)
    model = proposer()
    cascade, kinds = Cascade(Warmer(proposer().runner, tiny.VOCAB), model), set[str]()
    for seed in range(8):
        one = replace(row(text, params, depth=5), coupled=False, noise=Noise(seed, len(text) - 1))
        cascade.open(0, text)
        (draft,) = cascade.propose([one])
        assert len(draft) == 6
        assert draft.proposals[1:] == [Proposal.SAMPLED] * 5
        assert draft.parents == list(range(-1, 5))
        for node in range(5):
            logits = logits_after(model.runner.decoder, [*text, *draft.tokens[1 : node + 1]])
            law = shape_scores(logits[None], [params.sampling]).double().softmax(-1).numpy()[0]
            assert draft.probs is not None and np.allclose(draft.probs[node], law, atol=1e-9)
        kinds |= set(draft.sources[1:])
        cascade.close(0)
    assert kinds == {"model&model", "model"}


def cascades(
    small: oracle.Table, middle: oracle.Table, depth: int
) -> Iterator[tuple[Draft, float]]:
    """Every draft that comes of checking one drafter's samples by the middle one's law, and its
    chance."""
    for draft, weight in oracle.proposals(oracle.sampled, small, depth):
        laws = oracle.rows(draft, middle)
        for verdict, chance in oracle.outcomes(partial(verify_token, draft, laws)):
            made = Draft.root(0)
            for node, said in enumerate(verdict.tokens[:depth]):
                made.add(said, node, "toy", Proposal.SAMPLED)
            made.probs = np.stack(
                [middle[oracle.prefix_of(made, node)] for node in range(len(made))]
            )
            yield made, weight * chance


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("verify", [verify_token, verify_block, verify_tree])
def test_what_comes_of_checking_is_exact(verify: object, seed: int) -> None:
    """Enumerated over all drafts and all coins of both levels, though drafts end where a token was
    refused."""
    target, middle = oracle.toy_models("float", 2, 2, seed)
    _, small = oracle.toy_models("float", 2, 2, seed + 9)
    assert exact.bias(verify, cascades(small, middle, 2), target, 2) < 1e-12
    wrong = ((replace(d, probs=np.roll(d.probs, 1, -1)), w) for d, w in cascades(small, middle, 2))
    assert exact.bias(verify, wrong, target, 2) > 1e-6, "and with the law of another it is not"


def test_nobody_is_asked_for_more_than_there_is_room_for() -> None:
    """Requests of one round are drafted for to their own depths, whatever the deepest of them asks
    for."""
    model, first = proposer(slots=4), Scripted({slot: [5] * 9 for slot in range(4)})
    cascade = Cascade(first, model)
    rows = [row(text_of(7, s), depth=(1, 8, 2, 5)[s], slot=s) for s in range(4)]
    for r in rows:
        cascade.open(r.slot, r.tokens)
    for _ in range(12):
        cascade.propose(rows)
    assert first.asked and all(r.depth <= rows[r.slot].depth for r in first.asked)


@pytest.mark.parametrize("kernels", KERNELS)
def test_costs_are_those_of_one_pass(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the model's last tokens come level by level or in one call, and without the reading
    of a prompt."""
    (model,) = models(kernels, 1)
    clock, passes = [0.0], Runner.forward
    monkeypatch.setattr(draft_model.time, "thread_time", lambda: clock[0])

    def forward(self: Runner, segments: Sequence[Segment]) -> Forward:
        clock[0] += 1.0
        return passes(self, segments)

    chain = Runner.draft_chains

    def at_once(self: Runner, links: Sequence[ChainStart], vocab: int) -> list[list[int]] | None:
        said = chain(self, links, vocab)
        clock[0] += 0.0 if said is None else max(len(link.keys) for link in links)
        return said

    monkeypatch.setattr(Runner, "forward", forward)
    monkeypatch.setattr(Runner, "draft_chains", at_once)
    cascade, text = Cascade(Scripted({0: [5] * 2}), model), text_of(90, 3)
    cascade.open(0, text)
    cascade.propose([row(text, depth=6)])
    assert 90 not in cascade.policy.forward_costs.sizes
    assert max(cascade.policy.forward_costs.sizes, default=0) <= 3
    for _ in range(3):
        cascade.propose([row(text, depth=6)])
    assert cascade.policy.forward_costs.at(1) == pytest.approx(1.0)


@pytest.mark.parametrize("spec", ["suffix>recycle", "model:{0}>suffix", "(suffix|ngram)>model:{0}"])
def test_what_is_no_cascade(spec: str) -> None:
    with refused(ConfigError, "is no cascade"):
        LLM(tiny.spoken(), draft=spec.format(tiny.spoken(0.1)), kv_tokens=192)
    llm = LLM(tiny.spoken(), draft=f"model:{tiny.spoken(0.1)}", kv_tokens=192)
    assert llm.generate("the name", SamplingParams.pure(max_tokens=5), draft="suffix>model")[
        0
    ].token_ids
    before = set(llm.engine.proposers)
    with pytest.raises(ConfigError, match="is no cascade"):
        llm.generate("the name", draft="model>suffix")
    assert set(llm.engine.proposers) == before
    assert "model>suffix" not in llm.engine.proposers._composed
