"""The recipe medusa: each head learns the law it will be asked for, and arithmetic agrees with the
engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.draft.medusa import MedusaHeads
from forerun.train.capture import Target
from forerun.train.data import Corpus, Example
from forerun.train.evaluate import Judge
from forerun.train.loop import Trainer
from forerun.train.options import MedusaOptions, SmallLMOptions, options_of
from forerun.train.recipes import Medusa
from forerun.train.settings import Training
from forerun.train.stream import Stream
from tests import tiny
from tests.train.conftest import SMALL, documents

RECIPE = Medusa(MedusaOptions(heads=2, kl=1.0, tv=0.0, decay=0.5))
TEXTS = [Example(tuple(range(3, 25)), 1), Example(tuple(range(40, 9, -2)), 7)]


@pytest.fixture
def aimed(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """The target, whose batches bring what this recipe wants."""
    monkeypatch.setattr(target, "aux_hidden_layers", (target.llm.decoder.config.layers,))
    yield target


def heads_of(target: Target, corpus: Corpus, noise: float = 0.1) -> MedusaHeads:
    torch.manual_seed(0)
    heads = RECIPE.build(target, corpus)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return heads


def test_heads_begin_as_the_target_s_own(aimed: Target, corpus: Corpus) -> None:
    """Untouched, each head says what the target says of the next token: right, but one or two
    tokens too early."""
    batch, heads = aimed.batch(TEXTS), RECIPE.build(aimed, corpus)
    (states,) = batch.states.values()
    said = heads(batch.view.normalise(states)).log_softmax(-1)
    at = batch.mask
    assert torch.allclose(
        said[at][:, 0], batch.law.logs[at], atol=2e-2
    )  # bfloat16 or float32, as the target computes


def test_the_loss_is_that_of_each_head_and_position(aimed: Target, corpus: Corpus) -> None:
    """Head k, from the state with which token j was read, against the target's law of token j + 2 +
    k."""
    batch, heads = aimed.batch(TEXTS), heads_of(aimed, corpus)
    (states,) = batch.states.values()
    total, weight = 0.0, 0.0
    for k in range(2):
        losses = []
        for i, text in enumerate(TEXTS):
            for j in range(len(text.tokens) - 2 - k):
                if j + 1 + k >= text.given - 1:
                    q = heads(batch.view.normalise(states[i, j][None]))[0, k].log_softmax(-1)
                    p = batch.law.logs[i, j + 1 + k]
                    losses.append(float((p.exp() * (p - q)).sum().detach()))
        total, weight = total + 0.5**k * sum(losses) / len(losses), weight + 0.5**k
    loss = RECIPE.loss(heads, batch)
    assert loss.item() == pytest.approx(total / weight, rel=1e-4)
    loss.backward()
    assert all(
        weight.grad is not None and weight.grad.abs().sum() > 0
        for weight in heads.lm_heads.parameters()
    )


def test_texts_too_short_for_any_head_teach_nothing(aimed: Target, corpus: Corpus) -> None:
    heads = heads_of(aimed, corpus)
    RECIPE.loss(heads, aimed.batch([Example((5, 6), 1)])).backward()
    assert not any(weight.grad is not None and weight.grad.any() for weight in heads.parameters())


def test_training_pays_and_arithmetic_agrees_with_the_engine(
    aimed: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Accepted length rises; measured and analytic agree within 5 %; what is written changes no
    text."""
    held_out = Corpus(
        documents([f'{{"name":"beta {i}","sizes":[{i},{i * 3}]}} true false null' for i in range(30)]),
        aimed.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"],
    )  # fmt: skip
    training = Training(
        **(SMALL | dict(steps=40, rows=6, evaluate_rows=30, evaluate_every=0, depth=2, temperature=1.0)),
        learning_rate=0.02, patience=0, on_policy=1.0,
    )  # fmt: skip
    judge, heads = Judge(aimed, RECIPE, held_out, training), RECIPE.build(aimed, corpus)
    trainer = Trainer(
        RECIPE,
        heads,
        aimed,
        Stream(corpus, aimed, training),
        judge,
        training,
        tmp_path / "heads.training",
        {},
    )
    before, after = trainer.run().evaluations
    assert after.accepted_length > before.accepted_length + 0.02
    directory = tmp_path / "heads"
    directory.mkdir()
    RECIPE.export(heads, aimed, directory)
    for entry in judge.measure(heads, directory, judge.cases):
        assert entry.passes > 200
        assert entry.accepted_length == pytest.approx(
            entry.analytic, rel=0.05 if entry.temperature else 0.02
        )
    llm = LLM(tiny.worded(), draft=f"medusa:{directory}", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=20, temperature=0.7, seed=2, ignore_eos=True)
    texts = [
        llm.generate([5, 6, 7], params, draft=draft)[0].token_ids for draft in ("medusa", "off")
    ]
    assert texts[0] == texts[1]


def test_options_of_another_recipe_are_refused() -> None:
    assert options_of("medusa", {"heads": 3}) == MedusaOptions(heads=3)
    assert options_of("small-lm", {"layers": 3}) == SmallLMOptions(layers=3)
    with pytest.raises(ConfigError, match="recipe medusa has no layers"):
        options_of("medusa", {"layers": 3})
    for wrong in ({"heads": 0}, {"decay": 0.0}, {"decay": 1.5}, {"kl": 0.0, "tv": 0.0}):
        with pytest.raises(ConfigError):
            MedusaOptions(**wrong)
