"""The recipes eagle3 and mtp: unrolled rows are what the proposer computes, and arithmetic agrees
with the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.draft.eagle import proposer as pairs
from forerun.draft.eagle.module import EagleModule
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.proposer import DraftRequest, view_of
from forerun.errors import ConfigError
from forerun.models.rope import rope_tables
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus, Example
from forerun.train.evaluate import Judge
from forerun.train.loop import Trainer
from forerun.train.losses import Law
from forerun.train.options import EagleOptions, PairOptions
from forerun.train.recipes import Eagle3, Mtp
from forerun.train.recipes.pairs import PairRecipe, depths_read
from forerun.train.run import Plan
from forerun.train.settings import Training
from forerun.train.stream import Stream
from forerun.train.unroll import unroll
from forerun.verify import Noise
from tests import tiny
from tests.train.conftest import SMALL, documents

TEXTS = [Example(tuple(range(3, 25)), 1), Example(tuple(range(40, 9, -2)), 7)]
RECIPES: dict[str, PairRecipe] = {
    "eagle3": Eagle3(EagleOptions(unroll=3, thin=1, kl=1.0, tv=0.0, decay=0.5)),
    "eagle3, some tokens": Eagle3(
        EagleOptions(unroll=3, thin=1, kl=1.0, tv=0.0, decay=0.5, draft_vocab=100)
    ),
    "eagle3, the paper's layer": Eagle3(
        EagleOptions(unroll=3, thin=1, kl=1.0, tv=0.0, decay=0.5, portable=True)
    ),
    "mtp": Mtp(PairOptions(unroll=3, thin=1, kl=1.0, tv=0.0, decay=0.5)),
    "mtp, some tokens": Mtp(
        PairOptions(unroll=3, thin=1, kl=1.0, tv=0.0, decay=0.5, draft_vocab=100)
    ),
}


def aim(recipe: PairRecipe, target: Target, corpus: Corpus) -> Any:
    """A disturbed head of the recipe, and the target made to bring what it reads."""
    torch.manual_seed(0)
    head: Any = recipe.build(target, corpus)  # type: ignore[attr-defined]
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    target.aux_hidden_layers = recipe.aux_hidden_layers(head, target)
    return head


@pytest.fixture(autouse=True)
def restored(target: Target) -> Iterator[None]:
    yield
    target.aux_hidden_layers = ()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_are_what_is_computed_while_drafting(
    name: str, window: int | None, target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row t of step s against the logits of the (s + 1)th drafted token, in the proposer with its
    cache."""
    head = aim(RECIPES[name], target, corpus)
    if window:
        head.layer = replace(head.layer, windows=(window,))
    seen: list[Tensor] = []
    grow = pairs.grow
    monkeypatch.setattr(
        pairs,
        "grow",
        lambda trees, logits, *rest: (seen.append(logits), grow(trees, logits, *rest)),
    )
    text = TEXTS[1].tokens
    batch = target.batch([Example(text, 1)])
    for root in (1, 2, 5, len(text) - 2):
        view = view_of(target.llm.decoder, form=None)
        proposer = EagleProposer("x", head, view, tokens=256, page=16, slots=1)
        proposer.open(0, text)
        proposer.observe(0, 0, {b: states[0, :root] for b, states in batch.states.items()})
        seen.clear()
        draft = proposer.propose(
            [DraftRequest(0, text[: root + 1], SamplingParams(), Noise(1, root), 3)]
        )[0]
        head.attach(target.view)
        drafted = target.batch([Example((*text[: root + 1], *draft.tokens[1:]), 1)])
        with torch.no_grad():
            steps = [head.logits(made)[0] for _, made in unroll(head, drafted, 3)]
        assert len(seen) == 3
        for step, logits in enumerate(seen):
            ids = (
                head.tokens() if head.tokens() is not None else torch.arange(steps[step].shape[-1])
            )
            assert torch.allclose(
                logits[0, ids], steps[step][root - 1], atol=2e-2
            )  # bfloat16, as the target computes


def reference(recipe: PairRecipe, head: EagleModule, batch: Batch) -> float:
    """The loss, one drafted token after the other."""
    ids = head.tokens()
    said = ids.tolist() if ids is not None else list(range(batch.vocab))
    total, weight = 0.0, 0.0
    for step, (_, made) in enumerate(unroll(head, batch, recipe.options.unroll)):
        logits, losses = head.logits(made).double(), []
        for i, text in enumerate(TEXTS):
            for root in range(1, len(text.tokens) - 1 - step):
                at = root + step  # the position whose law is learnt
                if at < text.given - 1 or text.tokens[at + 1] not in said:
                    continue
                p = batch.law.logs[i, at][said].double().softmax(-1)
                q = logits[i, root - 1].log_softmax(-1)
                losses.append(float((p * (p.log() - q)).sum()))
        total, weight = (
            total + recipe.options.decay**step * sum(losses) / len(losses),
            weight + recipe.options.decay**step,
        )
    return total / weight


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_is_that_of_each_drafted_token(name: str, target: Target, corpus: Corpus) -> None:
    recipe = RECIPES[name]
    head = aim(recipe, target, corpus)
    batch = target.batch(TEXTS)
    loss = recipe.loss(head, batch)
    with torch.no_grad():
        assert loss.item() == pytest.approx(reference(recipe, head, batch), rel=1e-4)
    loss.backward()
    trained = [weight for weight in head.parameters() if weight.grad is not None]
    assert len(trained) == len(list(head.parameters())) and all(
        weight.grad.isfinite().all() for weight in trained
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_fewer_places_are_drafted_from_as_all_would_be(
    name: str, window: int | None, target: Target, corpus: Corpus
) -> None:
    head = aim(RECIPES[name], target, corpus)
    if window:
        head.layer = replace(head.layer, windows=(window,))
    batch, firsts = target.batch(TEXTS), set()
    with torch.no_grad():
        whole = [made for _, made in unroll(head, batch, 3)]
        for seed in range(8):
            torch.manual_seed(seed)
            sizes = []
            for step, (rows, made) in enumerate(unroll(head, batch, 3, thin=2)):
                assert torch.allclose(made, whole[step][:, rows], atol=1e-5)
                sizes.append(len(rows))
                firsts.add((step, int(rows[0])))
            assert sizes[0] == whole[0].shape[1] and sizes[1] in (
                sizes[0] // 2,
                sizes[0] // 2 - 1,
                (sizes[0] + 1) // 2,
            )
            assert sizes[2] <= (sizes[1] + 1) // 2
    assert len(firsts) > 4  # not always the same ones


@pytest.mark.parametrize("name", RECIPES)
def test_texts_too_short_to_draft_teach_nothing(name: str, target: Target, corpus: Corpus) -> None:
    head = aim(RECIPES[name], target, corpus)
    RECIPES[name].loss(head, target.batch([Example((5, 6), 1)])).backward()
    assert not any(weight.grad is not None and weight.grad.any() for weight in head.parameters())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_outlook_is_that_of_each_drafted_token(
    temperature: float, target: Target, corpus: Corpus
) -> None:
    """Also for a head that cannot say all tokens: what it cannot say is never accepted."""
    recipe = Eagle3(EagleOptions(draft_vocab=12))
    head, batch = aim(recipe, target, corpus), target.batch(TEXTS, temperature)
    with torch.no_grad():
        outlook = recipe.analytic(head, batch, 3)
        steps = [head.logits(made) for _, made in unroll(head, batch, 3)]
    said, cannot = head.tokens().tolist(), 0
    for i, root, k in ((0, 1, 0), (0, 4, 2), (0, 9, 1), (1, 7, 1), (1, 12, 2)):
        logits, at, token = steps[k][i, root - 1], root + k, int(batch.tokens[i, root + k + 1])
        q = torch.zeros(batch.vocab)
        q[said] = (
            (logits / temperature).softmax(-1) if temperature else (logits == logits.max()).float()
        )
        p = batch.law.logs[i, at].exp()
        assert outlook.overlap[i, root, k].item() == pytest.approx(
            torch.minimum(p, q).sum().item(), abs=1e-5
        )
        expected = min(1.0, float(q[token] / p[token])) if p[token] else float(q[token] > 0)
        assert outlook.chances[i, root, k].item() == pytest.approx(expected, abs=1e-4)
        cannot += token not in said
    assert cannot and not outlook.overlap[:, 0].any(), "no state stands before the first token"


@pytest.mark.parametrize("name", ["eagle3, some tokens", "mtp", "mtp, some tokens"])
def test_training_pays_and_arithmetic_agrees_with_the_engine(
    name: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Accepted length rises; measured and analytic agree within 5 %; what is written changes no
    text."""
    recipe: Any = RECIPES[name]
    held_out = Corpus(
        documents([f'{{"name":"beta {i}","sizes":[{i},{i * 3}]}} true false null' for i in range(30)]),
        target.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"],
    )  # fmt: skip
    training = Training(
        **(SMALL | dict(steps=20, rows=4, evaluate_rows=24, evaluate_every=0, depth=2, temperature=1.0)),
        learning_rate=0.01, patience=0, on_policy=1.0,
    )  # fmt: skip
    head = recipe.build(target, corpus)
    target.aux_hidden_layers = recipe.aux_hidden_layers(head, target)
    judge = Judge(target, recipe, held_out, training)
    trainer = Trainer(
        recipe, head, target, Stream(corpus, target, training), judge, training, tmp_path / "x", {}
    )
    before, after = trainer.run().evaluations
    assert after.accepted_length > before.accepted_length + 0.02
    directory = tmp_path / "head"
    directory.mkdir()
    recipe.export(head, target, directory)
    loaded = recipe.load(directory, target)
    assert torch.allclose(
        recipe.loss(loaded, target.batch(TEXTS)), recipe.loss(head, target.batch(TEXTS)), rtol=0.01
    )
    for entry in judge.measure(head, directory, judge.cases):
        assert entry.passes > 150
        assert entry.accepted_length == pytest.approx(
            entry.analytic, rel=0.05 if entry.temperature else 0.02
        )
    llm = LLM(tiny.worded(), draft=f"{recipe.draft}:{directory}", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=20, temperature=0.7, seed=2, ignore_eos=True)
    texts = [
        llm.generate([5, 6, 7], params, draft=draft)[0].token_ids for draft in (recipe.draft, "off")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "recipe", [Eagle3(EagleOptions(draft_vocab=20)), Mtp(PairOptions(draft_vocab=20))]
)
def test_the_most_frequent_tokens_are_said(
    recipe: PairRecipe, target: Target, corpus: Corpus
) -> None:
    """And those that end a text, which the data do not show."""
    head: Any = recipe.build(target, corpus)  # type: ignore[attr-defined]
    counts = [0] * target.vocab
    for example in corpus.examples:
        for token in example.tokens[example.given :]:
            counts[token] += 1
    ids = head.tokens().tolist()
    assert ids == sorted(set(ids)) and len(ids) == 20
    ends = set(target.llm.decoder.config.end_ids)
    assert ends and ends <= set(ids)
    assert min(counts[i] for i in ids if i not in ends) >= max(
        n for i, n in enumerate(counts) if i not in ids
    )
    assert torch.equal(head.lm_head.weight, target.head[ids]), (
        "its head begins as the target's rows"
    )


def test_a_head_begins_with_its_own_embedding(target: Target, corpus: Corpus) -> None:
    """One head of each group attends to its own pair, and what comes of that is much of the
    embedding."""
    torch.manual_seed(3)
    head: Any = Eagle3(EagleOptions(portable=True)).build(target, corpus)
    c, groups, own = head.layer, head.layer.heads // head.layer.kv_heads, []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("rhd,khd->hrk", q[:, ::groups], k) * c.attention_scale
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        own.append(scores.masked_fill(unseen, -torch.inf).softmax(-1).diagonal(dim1=1, dim2=2))
        return v.repeat_interleave(groups, 1)

    embedded = head.parts().embed_norm(head.embed(torch.randperm(c.vocab)[:64]))
    rotation = rope_tables(c, c.ropes[0], 64, torch.float32)
    with torch.no_grad():
        given = head.parts().layer.self_attn(
            torch.cat((embedded, torch.randn_like(embedded)), -1), rotation, attend
        )
    assert own[0].mean() > 0.5, "of 32 pairs or so"
    assert torch.cosine_similarity(given, embedded).mean() > 0.3, "of a random map: 0"


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 24, 36, 80])
def test_low_middle_and_last_states_are_read(layers: int) -> None:
    read = depths_read(layers)
    assert (
        read[-1] == layers
        and len(set(read)) == len(read)
        and all(0 <= boundary <= layers for boundary in read)
    )


@pytest.mark.parametrize("whole", [True, False])
def test_laws_over_some_tokens(whole: bool) -> None:
    """In the drafter's own numbers; of the likeliest tokens alone, all others together stay what
    they are."""
    torch.manual_seed(0)
    p, ids, logits = torch.randn(3, 12).softmax(-1), torch.tensor([1, 4, 5, 9]), torch.randn(3, 4)
    q = logits.softmax(-1)
    if whole:
        law = Law(None, p.log()).over(ids)
        assert torch.allclose(law.logs.exp(), p[:, ids]) and torch.equal(
            law.of(logits), logits.log_softmax(-1)
        )
        assert torch.allclose(law.whole().logs.exp().sum(-1), torch.ones(3))
        return
    top = torch.tensor([[4, 0, 9], [1, 5, 11], [2, 3, 4]])
    rest = 1 - p.gather(-1, top).sum(-1, keepdim=True)
    law = Law(top, torch.cat((p.gather(-1, top), rest), -1).log()).over(ids)
    kept = [[True, False, True], [True, True, False], [False, False, True]]
    numbers = [[1, 4, 3], [0, 2, 4], [4, 4, 1]]
    assert law.tokens is not None and law.tokens.tolist() == numbers
    said = law.of(logits).exp()
    for row in range(3):
        for j in range(3):
            assert law.logs[row, j].exp().item() == pytest.approx(
                p[row, top[row, j]].item() if kept[row][j] else 0
            )
            assert said[row, j].item() == pytest.approx(
                q[row, numbers[row][j]].item() if kept[row][j] else 0
            )
        others = 1 - sum(
            q[row, n].item() for n, keep in zip(numbers[row], kept[row], strict=True) if keep
        )
        assert said[row, 3].item() == pytest.approx(others, abs=1e-6)


@pytest.mark.parametrize("name", ["eagle3, some tokens", "mtp"])
def test_a_head_goes_on_from_one_that_was_trained_before(
    name: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Whatever it can say and however it is stored; it is trained, and has its own shape."""
    recipe: Any = RECIPES[name]
    head = aim(recipe, target, corpus)
    recipe.export(head, target, tmp_path)
    again: Any = replace(recipe, options=type(recipe.options)(init=str(tmp_path)))
    begun = again.build(target, corpus)
    for key, value in recipe.load(tmp_path, target).state_dict().items():
        assert torch.equal(begun.state_dict()[key], value)
    again.loss(begun, target.batch(TEXTS)).backward()
    assert all(weight.grad is not None for weight in begun.parameters())
    assert Plan.of({"options": {"init": str(tmp_path)}}).recipe == recipe.name
    with pytest.raises(ConfigError, match="init and intermediate contradict"):
        type(recipe.options)(init=str(tmp_path), intermediate=8)
