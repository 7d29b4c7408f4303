"""The recipes eagle3 and mtp: unrolled rows are those of the proposer, and new heads start from the
target's last layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import SamplingParams
from forerun.draft.eagle import proposer as eagle_proposer
from forerun.draft.eagle.formats import EagleConfig
from forerun.draft.eagle.module import EagleModule
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.head_modules import JoinedLayer, layer_like
from forerun.draft.proposer import DraftRequest, view_of
from forerun.errors import ConfigError, LoadError
from forerun.models.config import load_config
from forerun.models.rope import rope_tables
from forerun.models.weights import load_weights
from forerun.train.data import Corpus, Example
from forerun.train.options import EagleOptions, MtpOptions
from forerun.train.recipes import Eagle3, Mtp, heads
from forerun.train.recipes.heads import EagleRecipe, copy_last_layer, fused_layers, unroll
from forerun.train.run import TrainingPlan
from forerun.train.target import Batch, Target
from forerun.verify import Noise
from tests import tiny
from tests.draft import gguf_heads
from tests.train.conftest import check_forecast
from tests.train.test_recipes import AHEAD, TEXTS, built, restored  # noqa: F401

SOME: dict[str, Any] = AHEAD | {"unroll": 3, "thin": 1}
RECIPES: dict[str, EagleRecipe] = {
    "eagle3": Eagle3(EagleOptions(**SOME)),
    "eagle3, 100 tokens": Eagle3(EagleOptions(draft_vocab=100, **SOME)),
    "eagle3, portable": Eagle3(EagleOptions(portable=True, **SOME)),
    "mtp": Mtp(MtpOptions(**SOME)),
    "mtp, 100 tokens": Mtp(MtpOptions(draft_vocab=100, **SOME)),
}
# biases, layer norms, norms after a branch, MLPs without a gate
OTHER_LAYERS = {
    "gpt2", "gpt2-gelu", "qwen2", "gemma2", "gemma3", "phi", "starcoder2", "gpt_neox", "gpt_oss",
    "apertus",
}  # fmt: skip


def with_window(head: Any, window: int | None) -> Any:
    if window:
        head.layer = replace(head.layer, windows=(window,))
    return head


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_unrolled_rows_have_the_logits_of_the_proposer(
    name: str, window: int | None, target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares row t of step s with the logits of the proposer's (s + 1)th drafted token."""
    head = with_window(built(RECIPES[name], target, corpus, noise=0.1), window)
    seen: list[Tensor] = []
    grow = eagle_proposer.grow

    def spy(trees: Any, logits: Tensor, *rest: Any) -> Any:
        seen.append(logits)
        return grow(trees, logits, *rest)

    monkeypatch.setattr(eagle_proposer, "grow", spy)
    text = TEXTS[1].tokens
    batch = target.batch([Example(text, 1)])
    for root in (1, 2, 5, len(text) - 2):
        view = view_of(target.llm.decoder, form=None)
        proposer = EagleProposer("x", head, view, tokens=256, page=16, slots=1)
        proposer.open(0, text)
        proposer.observe(0, 0, {k: states[0, :root] for k, states in batch.hidden_states.items()})
        seen.clear()
        request = DraftRequest(0, text[: root + 1], SamplingParams(), Noise(1, root), 3)
        draft = proposer.propose([request])[0]
        head.attach(target.view)
        drafted = target.batch([Example((*text[: root + 1], *draft.tokens[1:]), 1)])
        with torch.no_grad():
            steps = [head.logits(hidden)[0] for _, hidden in unroll(head, drafted, 3)]
        ids = head.tokens()
        assert len(seen) == 3
        for logits, expected in zip(seen, steps, strict=True):
            found = logits[0] if ids is None else logits[0, ids]
            # the target computes in bfloat16
            assert torch.allclose(found[: expected.shape[-1]], expected[root - 1], atol=2e-2)


def reference_loss(recipe: EagleRecipe, head: EagleModule, batch: Batch) -> float:
    """Return the loss, computed for one drafted token after the other."""
    ids = head.tokens()
    known = ids.tolist() if ids is not None else list(range(batch.vocab))
    total, weight = 0.0, 0.0
    for step, (_, hidden) in enumerate(unroll(head, batch, recipe.options.unroll)):
        logits, losses = head.logits(hidden).double(), []
        for i, text in enumerate(TEXTS):
            for root in range(1, len(text.tokens) - 1 - step):
                at = root + step
                if at >= text.prompt_length - 1 and text.tokens[at + 1] in known:
                    p = batch.probs.log_probs[i, at][known].double().softmax(-1)
                    q = logits[i, root - 1].log_softmax(-1)
                    losses.append(float((p * (p.log() - q)).sum()))
        total += recipe.options.decay**step * sum(losses) / len(losses)
        weight += recipe.options.decay**step
    return total / weight


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_averages_drafted_tokens(name: str, target: Target, corpus: Corpus) -> None:
    recipe = RECIPES[name]
    head = built(recipe, target, corpus, noise=0.1)
    batch = target.batch(TEXTS)
    loss = recipe.loss(head, batch)
    with torch.no_grad():
        assert loss.item() == pytest.approx(reference_loss(recipe, head, batch), rel=1e-4)
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in head.parameters())


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["eagle3", "eagle3, portable", "mtp, 100 tokens"])
def test_thinned_rows_equal_those_of_a_full_pass(
    name: str, window: int | None, target: Target, corpus: Corpus
) -> None:
    head = with_window(built(RECIPES[name], target, corpus, noise=0.1), window)
    batch, firsts = target.batch(TEXTS), set()
    with torch.no_grad():
        full = [hidden for _, hidden in unroll(head, batch, 3)]
        for seed in range(8):
            torch.manual_seed(seed)
            sizes = []
            for step, (rows, hidden) in enumerate(unroll(head, batch, 3, thin=2)):
                assert torch.allclose(hidden, full[step][:, rows], atol=1e-5)
                sizes.append(len(rows))
                firsts.add((step, int(rows[0])))
            assert sizes[0] == full[0].shape[1] and abs(sizes[1] - sizes[0] / 2) <= 1
            assert sizes[2] <= (sizes[1] + 1) // 2
    assert len(firsts) > 4, "the rows vary"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_forecast_of_each_drafted_token(
    temperature: float, target: Target, corpus: Corpus
) -> None:
    """Tokens outside of the head's vocabulary are never accepted."""
    recipe = Eagle3(EagleOptions(draft_vocab=12))
    head = built(recipe, target, corpus, noise=0.1)
    batch = target.batch(TEXTS, temperature)
    with torch.no_grad():
        forecast = recipe.forecast(head, batch, 3)
        steps = [head.logits(hidden) for _, hidden in unroll(head, batch, 3)]
    known, unknown = head.tokens(), 0
    for i, root, k in ((0, 1, 0), (0, 4, 2), (0, 9, 1), (1, 7, 1), (1, 12, 2)):
        check_forecast(forecast, batch, (i, root, k), steps[k][i, root - 1], known)
        unknown += int(batch.tokens[i, root + k + 1]) not in known.tolist()
    assert unknown and not forecast.overlap[:, 0].any(), "no state precedes the first token"


@pytest.mark.parametrize(
    "recipe", [Eagle3(EagleOptions(draft_vocab=20)), Mtp(MtpOptions(draft_vocab=20))]
)
def test_the_most_frequent_tokens_are_drafted(
    recipe: EagleRecipe, target: Target, corpus: Corpus
) -> None:
    """So are the end tokens; the head starts from the target's rows."""
    head, counts = built(recipe, target, corpus), corpus.counts(target.vocab)
    ids, ends = head.tokens().tolist(), set(target.llm.decoder.config.end_ids)
    assert ids == sorted(set(ids)) and len(ids) == 20 and ends and ends <= set(ids)
    others = [i for i in range(target.vocab) if i not in ids]
    assert counts[[i for i in ids if i not in ends]].min() >= counts[others].max()
    assert torch.equal(head.lm_head.weight, target.head[ids])


def test_a_portable_head_attends_to_its_own_pair(target: Target, corpus: Corpus) -> None:
    torch.manual_seed(3)
    head: Any = Eagle3(EagleOptions(portable=True)).build(target, corpus)
    c, groups, own = head.layer, head.layer.heads // head.layer.kv_heads, []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("rhd,khd->hrk", q[:, ::groups], k) * c.attention_scale
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        own.append(scores.masked_fill(unseen, -torch.inf).softmax(-1).diagonal(dim1=1, dim2=2))
        return v.repeat_interleave(groups, 1)

    embedded = head.parts().embed_norm(head.embed(torch.randperm(c.vocab)[:64]))
    pairs = torch.cat((embedded, torch.randn_like(embedded)), -1)
    rotation = rope_tables(c, c.ropes[0], 64, torch.float32)
    with torch.no_grad():
        output = head.parts().layer.self_attn(pairs, rotation, attend)
    assert own[0].mean() > 0.5, "of about 32 pairs"
    assert torch.cosine_similarity(output, embedded).mean() > 0.3, "0 for a random map"


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 24, 80])
def test_low_middle_and_last_states_are_read(layers: int) -> None:
    found = fused_layers(layers)
    assert found[-1] == layers and len(set(found)) == len(found)
    assert all(0 <= layer <= layers for layer in found)


@pytest.mark.parametrize("name", ["eagle3, 100 tokens", "mtp"])
def test_a_head_continues_from_an_earlier_one(
    name: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    recipe: Any = RECIPES[name]
    recipe.export(built(recipe, target, corpus, noise=0.1), target, tmp_path)
    again: Any = replace(recipe, options=type(recipe.options)(init=str(tmp_path)))
    begun = again.build(target, corpus)
    for key, value in recipe.load(tmp_path, target).state_dict().items():
        assert torch.equal(begun.state_dict()[key], value)
    again.loss(begun, target.batch(TEXTS)).backward()
    assert all(weight.grad is not None for weight in begun.parameters())
    assert TrainingPlan.from_values({"options": {"init": str(tmp_path)}}).recipe == recipe.name
    with pytest.raises(ConfigError, match="init and intermediate contradict"):
        type(recipe.options)(init=str(tmp_path), intermediate=8)


def test_only_a_head_with_its_own_lm_head_can_be_continued(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Other heads, as in some GGUF files, use the target's, which training would change."""
    c = target.llm.decoder.config
    shape = dict(target_hidden=c.hidden, aux_hidden_layers=(1, 2), draft_vocab=c.vocab)
    for own_head in (True, False):
        head = tiny.eagle(EagleConfig(layer=layer_like(c), own_head=own_head, **shape))
        path = gguf_heads.write(tmp_path / f"{own_head}.gguf", head)
        assert TrainingPlan.from_values({"options": {"init": str(path)}}).recipe == "eagle3"
        recipe = Eagle3(EagleOptions(init=str(path)))
        if own_head:
            begun: Any = recipe.build(target, corpus)
            assert torch.equal(begun.lm_head.weight, head.lm_head.weight.float())
        else:
            with pytest.raises(LoadError, match="without an lm head of its own"):
                recipe.build(target, corpus)


def weights(path: Any) -> Any:
    def make(_: str, source: Any, bias: Any) -> Any:
        return source.weight()

    return load_weights(load_config(path), path, torch.float32, torch.device("cpu"), make)


@pytest.mark.parametrize("name", ["eagle3", "mtp, 100 tokens"])
def test_a_head_starts_as_the_targets_last_layer(name: str, target: Target, corpus: Corpus) -> None:
    """Its input is the least-squares map from pairs to that layer's input, compared with numpy."""
    head = built(RECIPES[name], target, corpus)
    last, norm = target.llm.decoder.config.layers, target.llm.decoder.weights.norm.weight

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + head.layer.norm_eps).sqrt()

    x, y = [], []
    for example in corpus.examples:
        (states,) = target.hidden_states([example], [last - 1, last])
        embedded = target.view.embed(torch.tensor(example.tokens[1:-1])).float()
        state = normed(normed(states[last][:-1].float()) * norm)
        x.append(torch.cat((normed(embedded), state), -1).double().detach())
        y.append(states[last - 1][1:].double())
    pairs, entering = torch.cat(x).numpy(), torch.cat(y).numpy()
    ridge = (heads.RIDGE * np.square(pairs).sum(0).mean()) ** 0.5 * np.eye(pairs.shape[1])
    inputs, outputs = np.vstack((pairs, ridge)), np.vstack((entering, 0 * entering[: len(ridge)]))
    expected = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    assert np.allclose(head.joined.input_proj.weight.detach().numpy(), expected.T, atol=2e-3)
    assert np.square(pairs @ expected - entering).mean() < 0.7 * entering.var()
    layer, attention, mlp = weights(target.path).layers[-1], head.joined.self_attn, head.joined.mlp
    assert torch.equal(attention.products(), layer.qkv)
    assert torch.equal(attention.o_proj.weight, layer.out)
    assert torch.equal(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), layer.up)
    assert torch.equal(head.joined.input_layernorm.weight, layer.attention_norm.weight)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gpt_oss", "apertus", "other width"])
def test_only_a_layer_of_the_same_kind_is_copied(family: str) -> None:
    path = tiny.family("llama" if family == "other width" else family)
    config = load_config(path)
    llm = SimpleNamespace(decoder=SimpleNamespace(config=config))
    stub: Any = SimpleNamespace(llm=llm, path=path, device=torch.device("cpu"))
    layer = JoinedLayer(layer_like(config, 8 if family == "other width" else None))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        copied = copy_last_layer(layer, stub)
    assert copied == (family not in OTHER_LAYERS | {"other width"})
    if copied:
        assert torch.equal(layer.mlp.down_proj.weight, weights(path).layers[-1].down)
    else:
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_another_kind_of_layer_starts_as_the_identity(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are then mapped to the output of the target's last layer."""
    seen: list[int] = []

    def fitted(head: Any, target: Any, texts: Any, layer: int) -> Tensor:
        seen.append(layer)
        return torch.ones(head.layer.hidden, 2 * head.layer.hidden)

    monkeypatch.setattr(heads, "copy_last_layer", lambda layer, target: False)
    monkeypatch.setattr(heads, "fit_pairs", fitted)
    head: Any = Mtp(MtpOptions()).build(target, corpus)
    assert seen == [target.llm.decoder.config.layers]
    size = head.layer.hidden
    pair = torch.nn.functional.rms_norm(torch.randn(2, 1, size), (size,))
    rotation = (torch.ones(1, 1), torch.zeros(1, 1))
    out = head(pair[0], pair[1], rotation, lambda layer, q, k, v: q)
    expected = torch.cat((pair[0], pair[1]), -1).sum(-1, keepdim=True)
    assert torch.allclose(out, expected.expand_as(out), atol=1e-4)
