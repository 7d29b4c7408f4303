"""The recipe block: each slot learns the distribution that it drafts from."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun import ConfigError, SamplingParams
from forerun.draft.block.module import BlockHead
from forerun.draft.block.proposer import BlockProposer as Proposer
from forerun.draft.proposer import DraftRequest
from forerun.draft.tree import Tree
from forerun.train.data import Corpus, Example
from forerun.train.options import BlockOptions
from forerun.train.recipes import Block
from forerun.train.recipes import block as recipe_module
from forerun.train.recipes.block import block_states, mask_token, spread
from forerun.train.target import Batch, Target
from forerun.verify import Noise
from tests.train.conftest import check_forecast

OPTIONS = BlockOptions(
    block_size=3, block_layers=1, markov_rank=8, kl=1.0, tv=0.0, decay=0.5, confidence=0.7
)
RECIPE = Block(OPTIONS)
TEXTS = [Example(tuple(range(3, 25)), 1), Example(tuple(range(40, 9, -2)), 7)]


@pytest.fixture
def block_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """The target, set to return the hidden states that this recipe reads."""
    monkeypatch.setattr(target, "aux_hidden_layers", (1, 2, 3))
    assert target.head.requires_grad is False  # first read outside of inference mode
    yield target


def head_of(
    target: Target, corpus: Corpus, options: BlockOptions = OPTIONS, **changes: int
) -> BlockHead:
    """Return a head with noise in all weights, so that each part matters."""
    torch.manual_seed(0)
    head = Block(options).build(target, corpus)
    assert isinstance(head, BlockHead)
    if changes:
        layer = replace(head.config.layer, windows=(changes.pop("window", None),))
        head = BlockHead(replace(head.config, layer=layer, **changes))
        head.attach(target.view)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return head


def proposed(
    head: BlockHead, target: Target, batch: Batch, row: int, root: int
) -> list[tuple[torch.Tensor, float]]:
    """Return (logits, confidence logit) of each slot that the proposer computes after a root, in
    float32, for the tokens of the text."""
    drafter = Proposer(head, replace(target.view, form=None), tokens=64, page=4, slots=1)
    tokens = batch.tokens[row].tolist()
    drafter.open(0, tokens[: root + 1])
    drafter.observe(0, 0, {k: states[row, :root] for k, states in batch.hidden_states.items()})
    request = DraftRequest(0, tokens[: root + 1], SamplingParams(), Noise(1, root), 9)
    drafter.propose([request])
    with torch.no_grad():
        (grown,) = drafter._run_blocks([Tree(request)])
        found = []
        for k, (output, slot_logits) in enumerate(zip(grown.outputs, grown.logits, strict=True)):
            if root + k < len(tokens):
                previous = batch.tokens[row, root + k]
                logits = head.over_target_vocab(head.add_markov_bias(slot_logits, previous))
                found.append((logits, float(head.confidence_logit(output, previous))))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_from_anchor": True}, {"sample_from_anchor": False}, {"window": 3},
        {"window": 3, "window_causal": True},
    ],
)  # fmt: skip
def test_training_computes_the_blocks_of_the_proposer(
    block_target: Target, corpus: Corpus, changes: dict[str, int]
) -> None:
    """Training computes all blocks of a text at once, with any anchors."""
    head, batch = head_of(block_target, corpus, **changes), block_target.batch(TEXTS)
    anchors = torch.tensor([[1, 21, 5, 6], [12, 3, 3, 2]])
    made = block_states(head, batch, anchors)
    assert made.shape == (2, 4, head.config.depth, 32)
    for row in range(2):
        for a, anchor in enumerate(anchors[row].tolist()):
            for k, (logits, _) in enumerate(proposed(head, block_target, batch, row, anchor)):
                own, previous = head.compute_logits(made[row, a, k]), batch.tokens[row, anchor + k]
                found = head.over_target_vocab(head.add_markov_bias(own, previous))
                assert torch.allclose(found, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("draft_vocab", [None, 100])
def test_the_loss_is_the_mean_over_anchors_and_slots(
    draft_vocab: int | None, block_target: Target, corpus: Corpus
) -> None:
    """Slot k after token i of the text is compared with the target's distribution at i + k.

    A smaller vocabulary learns renormalised distributions and starts from the target's rows;
    confidence learns from the distribution before it is renormalised.
    """
    recipe = Block(replace(OPTIONS, draft_vocab=draft_vocab))
    head, batch = head_of(block_target, corpus, recipe.options), block_target.batch(TEXTS)
    ids = torch.arange(block_target.vocab)
    if draft_vocab:
        fresh: Any = recipe.build(block_target, corpus)
        ids = fresh.tokens()
        assert torch.equal(fresh.lm_head.weight, block_target.head[ids])
    total, weight = 0.0, 0.0
    for row, text in enumerate(TEXTS):
        for i in range(max(text.prompt_length - 1, 1), len(text.tokens) - 1):
            for k, (logits, confidence) in enumerate(proposed(head, block_target, batch, row, i)):
                if i + k < len(text.tokens) - 1 and text.tokens[i + k + 1] in ids.tolist():
                    p, q = batch.probs.log_probs[row, i + k].exp()[ids], logits.softmax(-1)[ids]
                    normalised = p / p.sum()
                    overlap, prob = torch.minimum(p, q).sum(), torch.tensor(confidence).sigmoid()
                    loss = (normalised * (normalised.log() - q.log())).sum()
                    loss -= 0.7 * (overlap * prob.log() + (1 - overlap) * (1 - prob).log())
                    total, weight = total + 0.5**k * float(loss), weight + 0.5**k
    found = recipe.loss(head, batch)
    assert found.item() == pytest.approx(total / weight, rel=1e-3)
    found.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_new_head_has_the_targets_norm_and_no_bias(block_target: Target, corpus: Corpus) -> None:
    """Its logits then start at the scale of the target's."""
    head = RECIPE.build(block_target, corpus)
    assert isinstance(head, BlockHead)
    made, previous = torch.randn(3, 32), torch.tensor([5, 6, 7])
    logits = head.add_markov_bias(head.compute_logits(made), previous)
    assert torch.equal(head.over_target_vocab(logits), block_target.view.head(made))
    assert torch.allclose(head.norm(made), block_target.view.normalise(made), rtol=1e-2, atol=1e-2)


def test_anchors_are_a_function_of_the_texts(block_target: Target) -> None:
    """They are distinct learned positions with context, and the same for the same texts."""
    recipe, batch = Block(replace(OPTIONS, anchors=12)), block_target.batch(TEXTS)
    anchors, chosen = recipe.anchors(batch)
    assert chosen.sum(1).tolist() == [12, 9]  # the second text has only 9 learned positions
    for row, text in enumerate(TEXTS):
        found = anchors[row][chosen[row]].tolist()
        assert len(set(found)) == len(found) and all(
            max(text.prompt_length - 1, 1) <= i < len(text.tokens) - 1 for i in found
        )
    torch.manual_seed(5)
    assert torch.equal(recipe.anchors(block_target.batch(TEXTS))[0], anchors)
    assert not torch.equal(
        recipe.anchors(block_target.batch([TEXTS[0], TEXTS[0]]))[0][0], anchors[0]
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_forecast_covers_each_drafted_token(
    block_target: Target, corpus: Corpus, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It covers every root, whatever number of roots is computed together."""
    monkeypatch.setattr(recipe_module, "ANCHORS", 4)
    head, batch = head_of(block_target, corpus).eval(), block_target.batch(TEXTS, temperature)
    with torch.no_grad():
        forecast = RECIPE.forecast(head, batch, 5)
    assert forecast.acceptance.shape == forecast.overlap.shape == (2, 21, 5)
    assert not forecast.acceptance[..., 3:].any() and not forecast.acceptance[:, 0].any()
    for i, root in ((0, 1), (0, 4), (0, 5), (0, 20), (1, 6), (1, 12)):
        for k, (logits, _) in enumerate(proposed(head, block_target, batch, i, root)):
            if root + k >= len(TEXTS[i].tokens) - 1:
                assert forecast.acceptance[i, root, k] == 0
                continue
            q = check_forecast(forecast, batch, (i, root, k), logits, close=1e-4)
            if k == 0 and temperature:
                expected = float(q[batch.tokens[i, root + 1]].log())
                assert forecast.token_log_probs[i, root].item() == pytest.approx(expected, abs=1e-3)


def test_hidden_state_layers_are_evenly_spaced() -> None:
    assert spread(6, 3) == (1, 3, 6) and spread(36, 5) == (1, 10, 19, 27, 36)
    assert spread(24, 1) == (24,) and spread(2, 5) == (1, 2)
    assert all(len(spread(layers, layers)) == layers for layers in range(1, 40))


def test_the_mask_token_does_not_occur_in_texts(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a token that the tokenizer lacks, else padding, else the rarest token."""
    vocabulary = target.tokenizer.vocabulary()
    unused = mask_token(target, corpus, None)
    assert unused not in vocabulary.values() and unused < target.vocab
    assert mask_token(target, corpus, 7) == 7
    with pytest.raises(ConfigError, match="mask_token=328 is no token of the target"):
        mask_token(target, corpus, target.vocab)
    complete = {str(i): i for i in range(target.vocab)}
    monkeypatch.setattr(type(target.tokenizer), "vocabulary", lambda self: complete)
    assert mask_token(target, corpus, None) == 0, "pad_token_id of the tiny models"
    monkeypatch.setitem(target.llm.decoder.config.raw, "pad_token_id", None)
    rarest = mask_token(target, corpus, None)
    assert rarest not in {token for example in corpus.examples for token in example.tokens}
