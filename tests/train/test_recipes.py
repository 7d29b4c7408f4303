"""All recipes: training helps, predictions agree with the engine, and drafts do not change the
output. The recipes small-lm and medusa in detail: losses and forecasts of each drafted token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, ConfigError, ForerunError, SamplingParams
from forerun.cache.attention import Segment
from forerun.load import load_decoder
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import load_config
from forerun.models.files import SHORTLIST
from forerun.models.shortlist import read_shortlist
from forerun.runtime.torch_runner import Runner
from forerun.train.data import Corpus, Example
from forerun.train.evaluate import Evaluator, measure_drafter
from forerun.train.loop import Trainer
from forerun.train.options import (
    BlockOptions,
    EagleOptions,
    MedusaOptions,
    MtpOptions,
    SmallLMOptions,
    Training,
    options_of,
)
from forerun.train.recipes import Block, Eagle3, Medusa, Mtp, Recipe, SmallLM
from forerun.train.recipes.small_lm import kept_layers, prune, scored_tokens
from forerun.train.stream import TrainingTexts
from forerun.train.target import Target
from forerun.train.time_limit import TimeLimit
from tests import quantise, tiny
from tests.train.conftest import SMALL, check_forecast, documents

TEXTS = [Example(tuple(range(3, 25)), 1), Example(tuple(range(40, 9, -2)), 7)]
KL = {"kl": 1.0, "tv": 0.0}
AHEAD = KL | {"decay": 0.5}
MEDUSA = Medusa(MedusaOptions(heads=2, **AHEAD))
RECIPES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "small-lm": (SmallLM(SmallLMOptions(layers=2, **KL)), {"steps": 20}),
    "medusa": (MEDUSA, {"steps": 40, "learning_rate": 0.02}),
    "eagle3, 100 tokens": (Eagle3(EagleOptions(draft_vocab=100, **AHEAD)), {"steps": 20}),
    "mtp": (Mtp(MtpOptions(**AHEAD)), {"steps": 20}),
    "block": (
        Block(BlockOptions(block_size=3, block_layers=1, markov_rank=8, confidence=0.7, **AHEAD)),
        {"steps": 40},
    ),
}


@pytest.fixture(autouse=True)
def restored(target: Target) -> Iterator[None]:
    yield
    target.aux_hidden_layers = ()


def built(recipe: Recipe, target: Target, corpus: Corpus, noise: float = 0.0) -> Any:
    """Return a module of the recipe, and set the target to return the states that it reads."""
    torch.manual_seed(0)
    module: Any = recipe.build(target, corpus)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(noise * torch.randn_like(weight))
    target.aux_hidden_layers = recipe.aux_hidden_layers(module, target)
    return module


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", RECIPES)
def test_training_helps_and_predictions_agree_with_the_engine(
    name: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    recipe, settings = RECIPES[name]
    texts = [f'{{"name":"beta {i}","sizes":[{i},{i * 3}]}} true false null' for i in range(24)]
    held_out = Corpus(documents(texts), target.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"])
    usual = dict(
        rows=4, evaluate_rows=24, evaluate_every=0, depth=2, temperature=1.0, learning_rate=0.01
    )
    training = Training(**(SMALL | usual | {"patience": 0, "on_policy": 1.0} | settings))
    module = built(recipe, target, corpus)
    evaluator = Evaluator(target, recipe, held_out, training)
    stream = TrainingTexts(corpus, target, training)
    before, after = Trainer(module, stream, evaluator, tmp_path / "x", {}).run().evaluations
    assert after.accepted_length > before.accepted_length + 0.02
    directory = tmp_path / "drafter"
    directory.mkdir()
    recipe.export(module, target, directory)
    batch, loaded = target.batch(TEXTS), recipe.load(directory, target)
    torch.manual_seed(1)
    loss = recipe.loss(module, batch)
    torch.manual_seed(1)
    assert torch.allclose(recipe.loss(loaded, batch), loss, rtol=0.02)
    for result in measure_drafter(evaluator, module, directory, TimeLimit()).measured:
        close = 0.06 if result.temperature else 0.02
        assert result.passes > 150
        assert result.accepted_length == pytest.approx(result.expected, rel=close)
    llm = LLM(tiny.with_tokenizer(), draft=f"{recipe.draft}:{directory}", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=20, temperature=0.7, seed=2, ignore_eos=True)
    drafts = (recipe.draft, "off")
    drafted, plain = (llm.generate([5, 6, 7], params, draft=draft)[0] for draft in drafts)
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "small-lm"])
def test_texts_too_short_to_draft_have_no_loss(name: str, target: Target, corpus: Corpus) -> None:
    recipe = RECIPES[name][0]
    module = built(recipe, target, corpus, noise=0.1)
    loss = recipe.loss(module, target.batch([Example((5, 6), 1)]))
    loss.backward()
    assert loss.item() == 0
    assert not any(weight.grad is not None and weight.grad.any() for weight in module.parameters())


class TestMedusa:
    def test_new_heads_have_the_targets_distribution(self, target: Target, corpus: Corpus) -> None:
        heads = built(MEDUSA, target, corpus)
        batch = target.batch(TEXTS)
        (states,) = batch.hidden_states.values()
        log_probs = heads(batch.view.normalise(states)).log_softmax(-1)
        learned, expected = batch.mask, batch.probs.log_probs
        assert torch.allclose(log_probs[learned][:, 0], expected[learned], atol=2e-2)

    def test_the_loss_averages_heads_and_positions(self, target: Target, corpus: Corpus) -> None:
        """Head k after token j is compared with the distribution of token j + 2 + k."""
        heads = built(MEDUSA, target, corpus, noise=0.1)
        batch = target.batch(TEXTS)
        (states,) = batch.hidden_states.values()
        total, weight = 0.0, 0.0
        for k in range(2):
            losses = []
            for i, text in enumerate(TEXTS):
                for j in range(max(text.prompt_length - 2 - k, 0), len(text.tokens) - 2 - k):
                    q = heads(batch.view.normalise(states[i, j][None]))[0, k].log_softmax(-1)
                    p = batch.probs.log_probs[i, j + 1 + k]
                    losses.append(float((p.exp() * (p - q)).sum().detach()))
            total += 0.5**k * sum(losses) / len(losses)
            weight += 0.5**k
        loss = MEDUSA.loss(heads, batch)
        assert loss.item() == pytest.approx(total / weight, rel=1e-4)
        loss.backward()
        assert all(weight.grad.abs().sum() > 0 for weight in heads.lm_heads.parameters())


def test_invalid_options_are_refused() -> None:
    assert options_of("medusa", {"heads": 3}) == MedusaOptions(heads=3)
    with pytest.raises(ConfigError, match="recipe medusa has no layers"):
        options_of("medusa", {"layers": 3})
    wrong: list[tuple[type, dict[str, Any]]] = [
        *((MedusaOptions, {name: value}) for name, value in (("heads", 0), ("decay", 1.5))),
        (MedusaOptions, {"kl": 0.0, "tv": 0.0}),
        *((BlockOptions, {name: 0}) for name in ("block_size", "block_layers", "anchors")),
        *((BlockOptions, {name: -1}) for name in ("markov_rank", "confidence", "mask_token")),
        (BlockOptions, {"block_size": 65}),
    ]
    for cls, values in wrong:
        with pytest.raises(ConfigError):
            cls(**values)


class TestSmallLM:
    def test_layers_are_evenly_spaced(self) -> None:
        assert kept_layers(6, 2) == [0, 5] and kept_layers(5, 1) == [0]
        assert kept_layers(24, 3) == [0, 12, 23]
        assert all(len(set(kept_layers(n, k))) == k for n in range(2, 20) for k in range(1, n))

    @pytest.mark.parametrize(
        "name", [*tiny.FAMILIES, "llama-biased", "phi3-longrope", "gemma3-scaled"]
    )
    def test_any_family_can_be_pruned(self, name: str, tmp_path: Path) -> None:
        """The module and forerun's decoder agree; kept layers are those of the target."""
        module = prune(tiny.family(name), 2)
        module.save_pretrained(tmp_path)
        decoder = load_decoder(tmp_path, torch.float64, torch.device("cpu"), 64)
        runner = Runner(decoder, tokens=64, page=16, slots=1)
        runner.cache.open(0, [])
        runner.cache.pages.grow(0, 40)
        ids = [(7 * i + 3) % tiny.VOCAB for i in range(40)]
        segment = Segment.chain(0, ids, range(40))
        with torch.inference_mode():
            expected = module.double().eval()(input_ids=torch.tensor([ids])).logits[0]
        assert torch.allclose(runner.forward([segment]).logits, expected, atol=1e-3)
        full, pruned = Checkpoint(tiny.family(name)), Checkpoint(tmp_path)
        last = load_config(tiny.family(name)).layers - 1
        pairs = [(n, n.replace(f".{last}.", ".1.")) for n in full.where if f".{last}." in n]
        assert pairs and all(torch.equal(full.read(n), pruned.read(m)) for n, m in pairs)

    @pytest.mark.parametrize(
        ("layout", "bits", "name"),
        [("gptq", 4, "llama"), ("awq", 4, "llama"), ("packed", 8, "llama"), ("gptq", 8, "gpt2")],
    )
    def test_a_quantised_model_is_dequantised(
        self, layout: str, bits: int, name: str, tmp_path: Path
    ) -> None:
        expected = quantise.checkpoint(tmp_path, layout, bits, name=name)
        kept = prune(tmp_path, 2).state_dict()
        last = load_config(tmp_path).layers - 1
        assert sum(f".{last}." in name for name in expected) > 3
        for full, weight in expected.items():
            for before, after in ((0, 0), (last, 1)):
                if f".{before}." in full:
                    renamed = full.replace(f".{before}.", f".{after}.")
                    assert torch.equal(kept[renamed], weight.float()), full

    @pytest.mark.parametrize("draft_vocab", [None, 60])
    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_loss_and_forecast_cover_each_token(
        self, draft_vocab: int | None, temperature: float, target: Target, corpus: Corpus
    ) -> None:
        """They are restricted to the scored tokens, if the model scores only some."""
        recipe = SmallLM(SmallLMOptions(layers=2, draft_vocab=draft_vocab, **KL))
        module, batch = built(recipe, target, corpus).eval(), target.batch(TEXTS)
        at_temperature = target.batch(TEXTS, temperature)
        ids = scored_tokens(module) if draft_vocab else torch.arange(target.vocab)
        assert ids is not None and len(ids) == (draft_vocab or target.vocab)
        with torch.no_grad():
            logits = module(input_ids=batch.tokens[:, :-1]).logits
            forecast = recipe.forecast(module, at_temperature, 3)
        losses = []
        for i, text in enumerate(TEXTS):
            for j in range(text.prompt_length - 1, len(text.tokens) - 1):
                if text.tokens[j + 1] in ids:
                    q = logits[i, j, ids].log_softmax(-1)
                    p = batch.probs.log_probs[i, j, ids].log_softmax(-1)
                    losses.append(float((p.exp() * (p - q)).sum()))
        loss = recipe.loss(module, batch)
        assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        loss.backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())
        for i, j, k in ((0, 0, 0), (0, 4, 2), (1, 6, 1), (1, 12, 2)):
            check_forecast(forecast, at_temperature, (i, j, k), logits[i, j + k, ids], ids)

    def test_the_target_itself_is_always_accepted(self, target: Target, corpus: Corpus) -> None:
        recipe = SmallLM(SmallLMOptions(init=str(tiny.with_tokenizer())))
        module, batch = built(recipe, target, corpus).eval(), target.batch(TEXTS, 0.8)
        with torch.no_grad():
            forecast = recipe.forecast(module, batch, 1)
            assert recipe.loss(module, target.batch(TEXTS)).item() < 1e-3
        assert forecast.overlap[..., 0][batch.mask].min() > 0.99
        assert forecast.acceptance[..., 0][batch.mask].min() > 0.99

    def test_models_that_do_not_fit_the_target_are_refused(
        self, target: Target, corpus: Corpus, tmp_path: Path
    ) -> None:
        for options, message in (
            ({"init": str(tiny.family("llama"))}, "64 tokens, the target 328"),
            ({"init": str(tmp_path)}, "no config.json"),
            ({"layers": 3}, "not under the target's 3"),
        ):
            with pytest.raises(ForerunError, match=message) as error:
                SmallLM(SmallLMOptions(**options)).build(target, corpus)  # type: ignore[arg-type]
            assert "\n" not in str(error.value)

    def test_the_scored_tokens_are_written(
        self, target: Target, corpus: Corpus, tmp_path: Path
    ) -> None:
        """The lm head stays complete; the proposer uses the shortlist in the same directory."""
        recipe = SmallLM(SmallLMOptions(layers=2, draft_vocab=60))
        module = recipe.build(target, corpus)
        ids = scored_tokens(module).tolist()  # type: ignore[union-attr]
        recipe.export(module, target, tmp_path)
        assert read_shortlist(tmp_path / SHORTLIST).ids.tolist() == ids
        again: Any = recipe.load(tmp_path, target)
        assert scored_tokens(again).tolist() == ids  # type: ignore[union-attr]
        assert again.get_parameter("lm_head.weight").shape[0] == target.vocab
        proposer: Any = recipe.proposer(tmp_path, target, target.runner(1, 64))
        assert proposer.runner.decoder.shortlist.tolist() == ids

    def test_an_exported_model_drafts_as_the_module(
        self, target: Target, corpus: Corpus, tmp_path: Path
    ) -> None:
        """Each greedy draft of the engine is the module's own continuation."""
        recipe = replace(RECIPES["small-lm"][0])
        module = built(recipe, target, corpus, noise=0.01).eval()
        recipe.export(module, target, tmp_path)
        exact: dict[str, Any] = {"draft_quantization": "none", "dtype": "float32"}
        llm = LLM(tiny.with_tokenizer(), draft=f"model:{tmp_path}", kv_tokens=1024, **exact)
        text, drafts, params = list(range(5, 20)), 0, SamplingParams(max_tokens=24)
        request = llm.engine.add(text, params, draft="model", depth=3, trace=True)
        while llm.engine.busy:
            for event in llm.engine.step_or_raise():
                assert event.round is not None
                for token in event.round.draft.tokens[1:]:
                    with torch.inference_mode():
                        logits = module(input_ids=torch.tensor([text])).logits[0, -1]
                    assert logits.argmax() == token
                    text, drafts = [*text, token], drafts + 1
                text = list(request.tokens)
        assert drafts > 20
