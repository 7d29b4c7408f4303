"""Heads begin as the target's last layer behind the best linear guess of what enters it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forerun.draft.eagle.mtp import MtpModule
from forerun.draft.head_modules import JoinedLayer, layer_like
from forerun.models.config import load_config
from forerun.models.weights import load_weights
from forerun.train import warm
from forerun.train.capture import Target
from forerun.train.data import Corpus
from forerun.train.options import EagleOptions, PairOptions
from forerun.train.recipes import Eagle3, Mtp
from forerun.train.recipes.pairs import PairRecipe
from tests import tiny

RECIPES: dict[str, PairRecipe] = {
    "eagle3": Eagle3(EagleOptions()),
    "eagle3, some tokens": Eagle3(EagleOptions(draft_vocab=50)),
    "mtp": Mtp(PairOptions()),
}
# biases, layer norms, norms of what a branch gives, products without a gate: a layer of ours has
# none of that
OTHERS = {"gpt2", "gpt2-gelu", "qwen2", "gemma2", "gemma3", "phi", "starcoder2", "gpt_neox"}


def weights(path: Any) -> Any:
    config = load_config(path)
    return load_weights(
        config, path, torch.float32, torch.device("cpu"), lambda _, source, bias: source.weight()
    )


def texts_of(target: Target, corpus: Corpus) -> list[Any]:
    """(tokens, states by boundary) of each text, from one pass each."""
    layers = target.llm.decoder.config.layers
    return [(e.tokens, target.states([e], [layers - 1, layers])[0]) for e in corpus.examples]


@pytest.mark.parametrize("name", RECIPES)
def test_pairs_are_joined_by_least_squares(name: str, target: Target, corpus: Corpus) -> None:
    """Against numpy, along every text: (embedding of t + 1, last state of t) to what enters the
    last layer there."""
    torch.manual_seed(0)
    head: Any = RECIPES[name].build(target, corpus)  # type: ignore[attr-defined]
    last, norm = target.llm.decoder.config.layers, target.llm.decoder.weights.norm.weight
    x, y = [], []
    for tokens, states in texts_of(target, corpus):
        left, embedded = (
            states[last][:-1].float(),
            target.view.embed(torch.tensor(tokens[1:-1])).float(),
        )
        parts = [
            part / (part.square().mean(-1, keepdim=True) + head.layer.norm_eps).sqrt()
            for part in (embedded, left)
        ]
        again = parts[1] * norm
        parts[1] = again / (again.square().mean(-1, keepdim=True) + head.layer.norm_eps).sqrt()
        x.append(torch.cat(parts, -1).double().detach())
        y.append(states[last - 1][1:].double())
    pairs, entering = torch.cat(x).numpy(), torch.cat(y).numpy()
    ridge = (warm.RIDGE * np.square(pairs).sum(0).mean()) ** 0.5 * np.eye(pairs.shape[1])
    expected = np.linalg.lstsq(
        np.vstack((pairs, ridge)), np.vstack((entering, 0 * entering[: len(ridge)])), rcond=None
    )[0]
    assert np.allclose(head.joined.input_proj.weight.detach().numpy(), expected.T, atol=2e-3)
    error, spread = np.square(pairs @ expected - entering).mean(), entering.var()
    assert error < 0.7 * spread, "the guess is worth something even on a random model"


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_is_the_targets_last(name: str, target: Target, corpus: Corpus) -> None:
    head: Any = RECIPES[name].build(target, corpus)  # type: ignore[attr-defined]
    held, attention = weights(target.path).layers[-1], head.joined.self_attn
    assert torch.equal(attention.products(), held.qkv) and torch.equal(
        attention.o_proj.weight, held.out
    )
    assert torch.equal(
        torch.cat((head.joined.mlp.gate_proj.weight, head.joined.mlp.up_proj.weight)), held.up
    )
    assert torch.equal(head.joined.input_layernorm.weight, held.attention_norm.weight)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "other width"])
def test_a_layer_of_another_kind_begins_as_nothing(family: str) -> None:
    """It then passes on what was joined; one of the same kind says what the target's does."""
    path = tiny.family("llama" if family == "other width" else family)
    config = load_config(path)
    stub: Any = SimpleNamespace(
        llm=SimpleNamespace(decoder=SimpleNamespace(config=config)),
        path=path,
        device=torch.device("cpu"),
    )
    layer = JoinedLayer(layer_like(config, 8 if family == "other width" else None))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        taken = warm._take(layer, stub)
    assert taken == (family not in OTHERS | {"other width"})
    if taken:
        assert torch.equal(layer.mlp.down_proj.weight, weights(path).layers[-1].down)
    else:
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_where_the_layer_is_of_another_kind_pairs_are_joined_to_what_leaves_it(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_take", lambda layer, target: False)
    seen: list[int] = []

    def fitted(head: Any, target: Any, texts: Any, boundary: int) -> torch.Tensor:
        seen.append(boundary)
        return torch.ones(head.layer.hidden, 2 * head.layer.hidden)

    monkeypatch.setattr(warm, "_fitted", fitted)
    head = Mtp(PairOptions()).build(target, corpus)
    assert isinstance(head, MtpModule) and seen == [target.llm.decoder.config.layers]
    pair = torch.nn.functional.rms_norm(torch.randn(2, 1, head.layer.hidden), (head.layer.hidden,))
    out = head(pair[0], pair[1], (torch.ones(1, 1), torch.zeros(1, 1)), lambda layer, q, k, v: q)
    assert torch.allclose(
        out, torch.cat((pair[0], pair[1]), -1).sum(-1, keepdim=True).expand_as(out), atol=1e-4
    )
