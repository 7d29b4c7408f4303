"""Heads on pairs, beyond what every head must do: which texts share pairs, alignment, and what they
are worth natively.

A head that is fed the states of the wrong position or boundary still drafts, only worse, so one
that knows a text must be right about all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LoadError, SamplingParams, rng
from forerun.cache.attention import Segment
from forerun.draft.eagle import proposer as pairs
from forerun.draft.eagle.module import Eagle3Head
from forerun.draft.eagle.proposer import EagleProposer, NativeLayer
from forerun.draft.proposer import DraftRequest, view_of
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.types import BESIDE, Draft
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import ROOM, head_of
from tests.draft.twins import EagleTwin, target
from tests.draft.watching import STANDS, Watch, chain_of, engine_of, native_view, same_as_twin, show
from tests.engine import build


def test_a_pair_is_shared_only_with_texts_that_have_its_second_token_too() -> None:
    """The last pair of a page has a token of the next page."""
    head, tokens = tiny.eagle(tiny.eagle_config("llama")).double(), tuple(range(5, 25))
    drafter = EagleProposer("eagle3", head, target(), **ROOM)
    show(drafter, 0, tokens)
    drafter.propose([DraftRequest(0, tokens, SamplingParams(), Noise(1, 2), 3)])
    drafter.close(0)
    for changed, shared in ((18, 16), (17, 16), (16, 12), (15, 12), (12, 8), (11, 8)):
        drafter.open(0, [*tokens[:changed], 63, *tokens[changed + 1 :]])
        assert drafter.cache.length[0] == shared
        drafter.close(0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("form", [None, "float32"])
def test_the_embedding_is_what_enters_the_target_s_first_layer(
    family: str, form: str | None
) -> None:
    """Scaled where the target scales it, without learned positions."""
    if form and native.library() is None:
        pytest.skip("the native kernels were not compiled")
    directory = tiny.family(family)
    native.start(2) if form else None
    decoder = (
        NativeDecoder(load_config(directory), directory, form, 256)
        if form
        else tiny.decoder(directory)
    )
    runner = Runner(decoder, tokens=16, page=16, slots=1)
    runner.cache.pages.grow(0, 3)
    entering = runner.forward([Segment(0, [5, 6, 7], [-1, 0, 1], [])], (0,)).features[0].double()
    if decoder.weights.positions is not None:
        entering = entering - decoder.weights.positions[:3]
    embedded = view_of(decoder).embed(torch.tensor([5, 6, 7]))
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded.double(), entering, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- alignment


PROMPT, LENGTH, DEPTH = 6, 30, 3
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=1.5, seed=3, ignore_eos=True)


def knowing() -> tuple[Eagle3Head, list[int]]:
    """A head that knows a text, and the text: wherever in it a chain of drafts begins, it names
    what comes next."""
    plain = engine_of("eagle3", tiny.eagle(tiny.eagle_config("llama")))
    request = plain.add(build.prompts()[2][:PROMPT], PARAMS)
    build.finish(plain)
    text = tuple(request.tokens)
    config = tiny.eagle_config(
        "llama", own_embedding=True, layer={"hidden_size": 128}, norm_output=True
    )
    head = tiny.eagle(config).double()
    twin, made, wanted = EagleTwin(head), [], []
    for root in range(PROMPT, len(text) - 1):
        path = text[root + 1 : root + DEPTH]
        after = text[root + 1 : root + 1 + DEPTH]
        made += twin.made(text[: root + 1], path)[-1 - len(path) :][: len(after)]
        wanted += after
    states = twin.norm(torch.stack(made), "norm")
    assert len(states) <= 128, "more than a linear head of this width can know"
    answers = torch.nn.functional.one_hot(torch.tensor(wanted), tiny.VOCAB).double()
    head.lm_head.weight.copy_(100 * torch.linalg.lstsq(states, answers).solution.T)
    return head, list(text)


def test_a_head_that_knows_the_text_is_right_about_all_of_it() -> None:
    """The pair of a token and the state before it says the next token: off by one it would know
    nothing."""
    head, text = knowing()
    engine = engine_of("eagle3", head)
    again = engine.add(text[:PROMPT], PARAMS, draft="it", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert again.stats.accepted == again.stats.drafted > 15


@pytest.mark.parametrize("width", [1, 3])
def test_nothing_of_a_draft_stays_whether_it_was_accepted_or_not(width: int, watch: Watch) -> None:
    """A head that half knows the text has all, some or none of a draft accepted."""
    head, text = knowing()
    torch.manual_seed(1)
    head.lm_head.weight.add_(torch.randn_like(head.lm_head.weight) * head.lm_head.weight.std())
    engine = engine_of("eagle3", head, width)
    again = engine.add(text[:PROMPT], PARAMS, draft="it", depth=DEPTH)
    build.finish(engine)
    assert again.tokens == text
    assert {accepted for drafted, accepted in again.stats.rounds if drafted} >= {1, DEPTH}
    assert again.stats.accepted < again.stats.drafted
    same_as_twin(watch, "eagle3", head, every=width)


# ---------------------------------------------------------------- when it cannot draft


def test_without_states_room_or_tokens_there_is_no_draft() -> None:
    head = tiny.eagle(
        tiny.eagle_config("llama", own_embedding=True, draft_vocab=40, layer={"vocab_size": 50})
    ).double()
    drafter = EagleProposer("eagle3", head, target(), tokens=16, page=4, slots=4)

    def drafted(slot: int, tokens: tuple[int, ...], depth: int = 2) -> int:
        row = DraftRequest(slot, tokens, SamplingParams(), Noise(1, len(tokens) - 1), depth)
        return len(drafter.propose([row])[0]) - 1

    assert drafted(0, (5, 6, 7)) == 0, "never opened"
    show(drafter, 0, (5,))
    assert drafted(0, (5,)) == 0, "one token has no pair"
    show(drafter, 0, (5, 6, 7))
    assert drafted(0, (5, 6, 7, 8)) == 0, "the state before the root was not shown"
    assert drafted(0, (5, 6, 7)) == 2
    assert drafted(0, (5, 6, 7), depth=15) == 0, "no room in the pool"
    show(drafter, 1, (5, 60, 7))
    assert drafted(1, (5, 60, 7)) == 0, "token 60 is not in its embedding"
    show(drafter, 2, (5, 6, 7, 8, 9), first=3)
    assert drafted(2, (5, 6, 7, 8, 9)) == 2, "a cached prefix was not shown"
    drafter.reset()
    assert drafted(0, (5, 6, 7)) == 0, "reset drops everything"
    assert drafter.cache.pages.available == drafter.cache.pages.count


NATIVE = [
    *(("eagle3", shape) for shape in (
        "plain", "norm before residual", "qwen3, other rope", "narrower, some tokens", "window", "joined pairs",
    )),
    ("mtp", "all tokens"), ("eagle", "as published"), ("eagle", "biases and an embedding"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize(("kind", "shape"), NATIVE)
def test_the_native_layer_computes_what_is_trained(kind: str, shape: str, form: str) -> None:
    """What is made of committed pairs, and in float32 whole trees; the trained head is left as it
    was."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    head, tokens = head_of(kind, shape), (5, 6, 7, 8, 9, 10, 11)
    made, trees = [], []
    for view in (target(), replace(target(), form=form)):
        drafter = EagleProposer("x", head, view, **ROOM, width=3)
        show(drafter, 0, tokens)
        draft = drafter.propose([DraftRequest(0, tokens, SamplingParams(), Noise(1, 4), 3)])[0]
        made.append(drafter._last[0])
        trees.append((draft.tokens, draft.parents))
    apart = (made[1] - made[0]).norm() / made[0].norm()
    assert 0 < apart < (0.1 if form == "int8" else 1e-4)
    assert trees[0] == trees[1] or form == "int8"
    assert len(trees[0][0]) == 10
    assert any(isinstance(part, torch.nn.Linear) for part in head.modules())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", "plain"),
        ("eagle3", "reduced vocabulary"),
        ("eagle3", "joined pairs"),
        ("mtp", "all tokens"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sixteenths_are_those_of_the_chances_in_torch(
    kind: str, shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level by level; and beside the chains stand the likeliest of what was not said."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    view, head = native_view(), head_of(kind, shape)
    rows = [
        DraftRequest(slot, tuple(range(5 + slot, 12 + slot)), SamplingParams(temperature=temperature), Noise(slot, 6), depth,
            confidence_rates=STANDS)
        for slot, depth in enumerate((6, 3, 7))
    ]  # fmt: skip
    torch.manual_seed(0)
    states = [{b: torch.randn(6, view.hidden) for b in head.aux_hidden_layers} for _ in rows]

    def proposed() -> list[Draft]:
        drafter = EagleProposer("x", head, view, **ROOM)
        for row, shown in zip(rows, states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, shown)
        return drafter.propose(rows)

    whole = proposed()
    chains = [chain_of(draft) for draft in whole]
    seen: dict[int, list[Tensor]] = {row.slot: [] for row in rows}
    grow = pairs.grow

    def seeing(trees: Any, logits: Tensor, width: int, source: str) -> None:
        for tree, said in zip(trees, logits, strict=True):
            seen[tree.request.slot].append(said)
        grow(trees, logits, width, source)

    monkeypatch.setattr(pairs, "grow", seeing)
    monkeypatch.setattr(NativeLayer, "drafts", property(lambda _: False))
    monkeypatch.setattr(NativeLayer, "chain", lambda *_: None)
    for draft, laws, row, full, chain in zip(
        proposed(), seen.values(), rows, whole, chains, strict=True
    ):
        assert draft.tokens == chain.tokens
        chances, above = [chances_of(law, row, level) for level, law in enumerate(laws)], 1.0
        expected = []
        for level, said in enumerate(draft.tokens[1:]):
            own = chances[level].pop(said, 0.0)
            assert abs(min(own * 16, 15.99) - 0.5 - chain.confidence_bins[level]) <= 0.51 + own / 2
            near = sorted(chances[level].values(), reverse=True)[:BESIDE] if own else []
            expected += [above * STANDS[16 + min(int(chance * 16), 15)] for chance in near]
            above *= STANDS[chain.confidence_bins[level]]
        beside = [
            chance
            for chance, sure in zip(full.path_probs, full.confidence_bins, strict=True)
            if sure >= 16
        ]
        assert beside == pytest.approx(sorted(expected, reverse=True)[:BESIDE], rel=0.15)


def chances_of(law: Tensor, row: DraftRequest, level: int) -> dict[int, float]:
    """The chances of the eight likeliest tokens of logits to be drawn, with the target's noise
    behind a level."""
    greedy = row.params.greedy
    logs, tokens = (
        (law.double() / (1.0 if greedy else row.params.temperature)).log_softmax(-1).topk(8)
    )
    if not greedy:
        noise = [rng.gumbel_scalar(row.noise.target(level), int(token)) for token in tokens]
        logs = logs + torch.tensor(noise, dtype=torch.float64)
        logs = logs.log_softmax(-1)
    return dict(zip(tokens.tolist(), logs.exp().tolist(), strict=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_hidden": 16}, "states of 16"),
        ({"layer": {"vocab_size": 65}, "draft_vocab": 65}, "65 tokens"),
        ({"layer": {"hidden_size": 16}}, "none of its own"),
        ({"aux_hidden_layers": (0, 1, 4)}, "from 0 to 3"),
        ({"aux_hidden_layers": (-1, 1, 2)}, "from 0 to 3"),
        ({"aux_hidden_layers": (2, 1, 2)}, "different"),
    ],
)
def test_a_head_for_another_target(changes: dict, says: str) -> None:
    head = tiny.eagle(tiny.eagle_config("llama", **changes))
    with pytest.raises(LoadError, match=says) as error:
        EagleProposer("eagle3", head, target(), **ROOM)
    assert "\n" not in str(error.value)
