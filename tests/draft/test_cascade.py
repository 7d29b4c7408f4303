"""A drafter for a draft model: the draft model's own drafts for less, or exact samples of its
law."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from forerun import LLM, ConfigError, SamplingParams
from forerun.cache.attention import Segment
from forerun.check import oracle
from forerun.draft import draft_model as draft_model_module
from forerun.draft.draft_model import Cascade, DraftModel
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.kernels import native
from forerun.kernels.draw import shape_scores
from forerun.runtime.program import ChainStart
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, Forward, Proposal
from forerun.verify import Noise
from forerun.verify.ratio import verify_block, verify_token, verify_tree
from tests import exact, tiny
from tests.draft.test_draft_model import (
    FILTERED,
    GREEDY,
    WARM,
    logits_after,
    proposer,
    row,
    text_of,
)

KERNELS = [
    pytest.param(
        "native",
        marks=pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled"),
    ),
    "torch",
]


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


@pytest.mark.parametrize("params", [GREEDY, WARM, FILTERED], ids=["greedy", "warm", "filtered"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_under_match_drafts_are_those_of_the_model_alone(
    kernels: str, params: SamplingParams
) -> None:
    """Whatever was drafted for it: all of it right, a part, nothing, more than it was asked for,
    unknown tokens."""
    if kernels == "native":
        native.start(2)
        decoder = tiny.native_decoder(tiny.drafter("llama"))
        alone = DraftModel(Runner(decoder, tokens=1024, page=16, slots=8), tiny.VOCAB)
        other = DraftModel(Runner(decoder, tokens=1024, page=16, slots=8), tiny.VOCAB)
    else:
        alone, other = proposer(slots=8), proposer(slots=8)
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
        assert (
            len(draft) == 6
            and draft.proposals[1:] == [Proposal.SAMPLED] * 5
            and draft.parents == list(range(-1, 5))
        )
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
    cascade, rows = (
        Cascade(first, model),
        [row(text_of(7, s), depth=(1, 8, 2, 5)[s], slot=s) for s in range(4)],
    )
    for r in rows:
        cascade.open(r.slot, r.tokens)
    for _ in range(12):
        cascade.propose(rows)
    assert first.asked and all(r.depth <= rows[r.slot].depth for r in first.asked)


@pytest.mark.parametrize("kernels", KERNELS)
def test_costs_are_those_of_one_pass(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the model's last tokens come level by level or in one call, and without the reading
    of a prompt."""
    if kernels == "native":
        native.start(2)
        made = tiny.native_decoder(tiny.drafter("llama"))
        model = DraftModel(Runner(made, tokens=1024, page=16, slots=8), tiny.VOCAB)
    else:
        model = proposer(slots=8)
    clock, passes = [0.0], Runner.forward
    monkeypatch.setattr(draft_model_module.time, "thread_time", lambda: clock[0])

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
    assert (
        90 not in cascade.policy.forward_costs.sizes
        and max(cascade.policy.forward_costs.sizes, default=0) <= 3
    )
    for _ in range(3):
        cascade.propose([row(text, depth=6)])
    assert cascade.policy.forward_costs.at(1) == pytest.approx(1.0)


@pytest.mark.parametrize("spec", ["suffix>recycle", "model:{0}>suffix", "(suffix|ngram)>model:{0}"])
def test_what_is_no_cascade(spec: str) -> None:
    with pytest.raises(ConfigError, match="is no cascade") as error:
        LLM(tiny.spoken(), draft=spec.format(tiny.spoken(0.1)), kv_tokens=192)
    assert "\n" not in str(error.value)
    llm = LLM(tiny.spoken(), draft=f"model:{tiny.spoken(0.1)}", kv_tokens=192)
    assert llm.generate("the name", SamplingParams.pure(max_tokens=5), draft="suffix>model")[
        0
    ].token_ids
    before = set(llm.engine.proposers)
    with pytest.raises(ConfigError, match="is no cascade"):
        llm.generate("the name", draft="model>suffix")
    assert (
        set(llm.engine.proposers) == before and "model>suffix" not in llm.engine.proposers._composed
    )
