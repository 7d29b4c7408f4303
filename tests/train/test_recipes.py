"""The recipe small-lm: layers of any family, models given, the loss and the outlook against naive
references."""

from pathlib import Path

import pytest
import torch

from forerun import ForerunError
from forerun.cache.attention import Segment
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.models.files import SHORTLIST
from forerun.models.shortlist import read_shortlist
from forerun.models.weights import Checkpoint
from forerun.runtime.torch_runner import Runner
from forerun.train.capture import Target
from forerun.train.data import Corpus, Example
from forerun.train.options import SmallLMOptions
from forerun.train.prune import kept_layers, prune
from forerun.train.recipes import SmallLM
from forerun.train.recipes.small_lm import scored
from tests import quantise, tiny

TEXTS = [Example(tuple(range(3, 25)), 1), Example(tuple(range(40, 9, -2)), 7)]


def test_layers_are_evenly_spaced() -> None:
    assert (
        kept_layers(6, 2) == [0, 5]
        and kept_layers(24, 3) == [0, 12, 23]
        and kept_layers(5, 1) == [0]
    )
    assert all(len(set(kept_layers(n, k))) == k for n in range(2, 20) for k in range(1, n))


@pytest.mark.parametrize("name", [*tiny.FAMILIES, "llama-biased", "phi3-longrope", "gemma3-scaled"])
def test_any_family_is_pruned_to_what_our_decoder_reads(name: str, tmp_path: Path) -> None:
    """Logits of the module and of our decoder on what it wrote; each kept layer is the target's."""
    module = prune(tiny.family(name), 2)
    module.save_pretrained(tmp_path)
    runner = Runner(
        load_decoder(tmp_path, torch.float64, torch.device("cpu"), 64), tokens=64, page=16, slots=1
    )
    runner.cache.open(0, [])
    runner.cache.pages.grow(0, 40)
    ids = [(7 * i + 3) % tiny.VOCAB for i in range(40)]
    ours = runner.forward([Segment(0, ids, list(range(-1, 39)), list(range(40)))]).logits
    with torch.inference_mode():
        theirs = module.double().eval()(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-3)
    whole, part = Checkpoint(tiny.family(name)), Checkpoint(tmp_path)
    last = load_config(tiny.family(name)).layers - 1
    pairs = [(n, n.replace(f".{last}.", ".1.")) for n in whole.where if f".{last}." in n]
    assert pairs and all(torch.equal(whole.read(n), part.read(m)) for n, m in pairs)


@pytest.mark.parametrize(
    ("layout", "bits", "name"),
    [
        ("gptq", 4, "llama"),
        ("awq", 4, "llama"),
        ("packed", 8, "llama"),
        ("plain", 8, "llama"),
        ("gptq", 8, "gpt2"),
    ],
)
def test_a_quantised_model_is_pruned_to_its_numbers(
    layout: str, bits: int, name: str, tmp_path: Path
) -> None:
    expected = quantise.checkpoint(tmp_path, layout, bits, name=name)
    kept = prune(tmp_path, 2).state_dict()
    last = load_config(tmp_path).layers - 1
    assert sum(f".{last}." in n for n in expected) > 3
    for full, weight in expected.items():
        for before, after in ((0, 0), (last, 1)):
            if f".{before}." in full:
                assert torch.equal(
                    kept[full.replace(f".{before}.", f".{after}.")], weight.float()
                ), full


def test_the_loss_is_that_of_each_position(target: Target, corpus: Corpus) -> None:
    recipe = SmallLM(SmallLMOptions(layers=2, kl=1.0, tv=0.0))
    module, batch = recipe.build(target, corpus), target.batch(TEXTS)
    loss = recipe.loss(module, batch)
    total, count = 0.0, 0
    for i, text in enumerate(TEXTS):
        with torch.inference_mode():
            q = module(input_ids=torch.tensor([text.tokens])).logits[0].log_softmax(-1)
        for j in range(text.given - 1, len(text.tokens) - 1):
            p = batch.law.logs[i, j]
            total, count = total + float((p.exp() * (p - q[j])).sum()), count + 1
    assert loss.item() == pytest.approx(total / count, rel=1e-4)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_outlook_is_that_of_each_drafted_token(
    target: Target, corpus: Corpus, temperature: float
) -> None:
    recipe = SmallLM(SmallLMOptions(layers=2))
    module, batch = recipe.build(target, corpus).eval(), target.batch(TEXTS, temperature)
    with torch.no_grad():
        outlook = recipe.analytic(module, batch, 3)
        logits = module(input_ids=batch.tokens[:, :-1]).logits
    assert outlook.chances.shape == outlook.overlap.shape == (2, 21, 3)
    for i, j, k in ((0, 0, 0), (0, 4, 2), (1, 6, 1), (1, 12, 2)):
        at, token = j + k, batch.tokens[i, j + k + 1]
        q = (
            logits[i, at].softmax(-1)
            if not temperature
            else (logits[i, at] / temperature).softmax(-1)
        )
        if not temperature:
            q = torch.nn.functional.one_hot(q.argmax(), len(q)).float()
        p = batch.law.logs[i, at].exp()
        assert outlook.overlap[i, j, k].item() == pytest.approx(
            torch.minimum(p, q).sum().item(), abs=1e-5
        )
        expected = min(1.0, float(q[token] / p[token])) if p[token] else float(q[token] > 0)
        assert outlook.chances[i, j, k].item() == pytest.approx(expected, abs=1e-4)


def test_a_drafter_that_is_the_target_is_always_right(target: Target, corpus: Corpus) -> None:
    recipe = SmallLM(SmallLMOptions(init=str(tiny.worded())))
    module, batch = recipe.build(target, corpus).eval(), target.batch(TEXTS, 0.8)
    with torch.no_grad():
        outlook = recipe.analytic(module, batch, 1)
        assert recipe.loss(module, target.batch(TEXTS)).item() < 1e-3
    assert (
        outlook.overlap[..., 0][batch.mask].min() > 0.99
        and outlook.chances[..., 0][batch.mask].min() > 0.99
    )


def test_models_that_do_not_fit(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    for options, says in (
        ({"init": str(tiny.family("llama"))}, "64 tokens, the target 328"),
        ({"init": str(tmp_path)}, "no config.json"),
        ({"layers": 3}, "not under the target's 3"),
        ({"init": "x", "layers": 1}, "contradict"),
        ({"kl": 0.0, "tv": 0.0}, "nothing to learn"),
    ):
        with pytest.raises(ForerunError, match=says) as error:
            SmallLM(SmallLMOptions(**options)).build(target, corpus)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


def test_a_model_that_scores_some_tokens(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """The loss and the outlook are over those, the head stays whole, and what is written says which
    they are."""
    recipe = SmallLM(SmallLMOptions(layers=2, kl=1.0, tv=0.0, draft_vocab=60))
    module, batch = recipe.build(target, corpus), target.batch(TEXTS)
    ids = scored(module)
    assert ids is not None and len(ids) == 60
    with torch.no_grad():
        logits, loss, count = module(input_ids=batch.tokens[:, :-1]).logits, 0.0, 0
        outlook = recipe.analytic(module, batch, 1)
        for i, text in enumerate(TEXTS):
            for j in range(text.given - 1, len(text.tokens) - 1):
                q, p = logits[i, j, ids].softmax(-1), batch.law.logs[i, j].exp()[ids]
                assert outlook.overlap[i, j, 0].item() == pytest.approx(
                    torch.minimum(p, q).sum().item(), abs=1e-5
                )
                if text.tokens[j + 1] in ids.tolist():
                    p = p / p.sum()
                    loss, count = loss + float((p * (p / q).log()).sum()), count + 1
        assert recipe.loss(module, batch).item() == pytest.approx(loss / count, rel=1e-4)
    recipe.export(module, target, tmp_path)
    assert read_shortlist(tmp_path / SHORTLIST).ids.tolist() == ids.tolist()
    again = recipe.load(tmp_path, target)
    assert scored(again).tolist() == ids.tolist()  # type: ignore[union-attr]
    assert again.get_parameter("lm_head.weight").shape[0] == target.vocab
    proposer = recipe.proposer(tmp_path, target, target.runner(1, 64))
    assert proposer.runner.decoder.shortlist.tolist() == ids.tolist()  # type: ignore[attr-defined]
