"""Medusa heads: which state they read, what they say from it, how they are stored; wrong ones are
refused.

A head that reads the state of the wrong position still drafts, only worse, so alignment is tested
by heads that know."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from forerun import LLM, LoadError, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.medusa import MedusaHeads, MedusaProposer, load_heads
from forerun.draft.proposer import DraftRequest, view_of
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.runtime.packed import Linear
from forerun.runtime.torch_runner import Runner
from forerun.verify import Noise
from tests import tiny
from tests.engine import build


def save(heads: MedusaHeads, directory, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(heads.config() | changes))
    save_file(
        {name: t.contiguous() for name, t in heads.state_dict().items()},
        directory / "model.safetensors",
    )
    return directory


class Fitted(MedusaHeads):
    """Heads fitted to texts: from the state of token t they know tokens t + 2, t + 3, .. of
    them."""

    def fit(self, states: torch.Tensor, tokens: list[int]) -> None:
        self.begin(torch.zeros(self.vocab, self.hidden))
        for i, head in enumerate(self.lm_heads):
            count = len(tokens) - 2 - i
            wanted = torch.nn.functional.one_hot(torch.tensor(tokens[2 + i :]), self.vocab).double()
            weight = torch.linalg.lstsq(states[:count].double(), wanted).solution.T
            head.weight.data.copy_(100 * weight)  # far above any noise


def test_heads_read_the_state_of_the_token_before_the_root() -> None:
    """Heads that know one text by its states are right about all of it; off by one they would know
    nothing."""
    decoder = tiny.decoder(tiny.family("llama"))
    view = view_of(decoder)
    plain = Engine(Runner(decoder, tokens=256, page=4, slots=1), {})
    request = plain.add(
        build.prompts()[2][:6],
        SamplingParams(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True),
    )
    while plain.busy:
        plain.step()
    text = list(request.tokens)
    runner = Runner(decoder, tokens=64, page=4, slots=1)
    runner.cache.pages.grow(0, len(text))
    segment = Segment(0, text[:-1], list(range(-1, len(text) - 2)), [])
    states = view.normalise(runner.forward([segment], (view.layers,)).features[view.layers])
    heads = Fitted(3, 1, view.hidden, view.vocab)
    heads.fit(states, text)
    engine = Engine(
        Runner(decoder, tokens=256, page=4, slots=1),
        {"medusa": MedusaProposer("medusa", heads, view)},
    )
    again = engine.add(text[:6], request.params, draft="medusa", depth=3)
    while engine.busy:
        engine.step_or_raise()
    assert again.tokens == text
    assert again.stats.accepted == again.stats.drafted > 15, (
        "heads that know the text are right wherever asked"
    )


@pytest.mark.parametrize("form", [None, "float32", "int8"])
def test_the_proposer_computes_what_is_trained(form) -> None:
    if form and native.library() is None:
        pytest.skip("the native kernels were not compiled")
    torch.manual_seed(0)
    native.start(2) if form else None
    heads = MedusaHeads(3, 2, 32, tiny.VOCAB)
    view = view_of(tiny.decoder(tiny.family("llama")))
    medusa, state = MedusaProposer("medusa", heads, replace(view, form=form)), torch.randn(5, 32)
    expected = heads(state)
    for head in range(3):
        apart = (
            medusa.grower.heads.step(head, state, torch.zeros(5))[0] - expected[:, head]
        ).norm() / expected[:, head].norm()
        assert apart < (0.05 if form == "int8" else 1e-5)


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
def test_a_native_linear_has_rows_of_their_own() -> None:
    native.start(2)
    torch.manual_seed(1)
    linear, x = Linear(torch.randn(70, 33), "int8"), torch.randn(9, 33)
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


def test_heads_come_back_as_they_were_stored(tmp_path) -> None:
    torch.manual_seed(2)
    heads = MedusaHeads(2, 1, 8, 12)
    loaded = load_heads(save(heads, tmp_path / "m"))
    assert (loaded.levels, loaded.layers, loaded.hidden, loaded.vocab) == (2, 1, 8, 12)
    state = torch.randn(3, 8)
    assert torch.equal(loaded(state), heads(state))
    assert sorted(heads.state_dict()) == [
        "blocks.0.layers.0.weight", "blocks.1.layers.0.weight", "lm_heads.0.weight", "lm_heads.1.weight",
    ]  # fmt: skip


def test_untrained_heads_say_what_the_target_says() -> None:
    heads, head = MedusaHeads(2, 1, 8, 12), torch.randn(12, 8)
    heads.begin(head)
    state = torch.randn(4, 8)
    assert torch.allclose(heads(state)[:, 1], state @ head.T)


@pytest.mark.parametrize(
    "change", ["other target", "no file", "bad config", "missing tensor", "garbage"]
)
def test_heads_that_do_not_fit(change, tmp_path) -> None:
    directory = save(
        tiny.medusa("llama") if change != "other target" else MedusaHeads(2, 1, 8, 12),
        tmp_path / "m",
    )
    if change == "no file":
        (directory / "model.safetensors").unlink()
    if change == "bad config":
        (directory / "config.json").write_text('{"num_heads": "many"}')
    if change == "missing tensor":
        save_file({"lm_heads.0.weight": torch.zeros(64, 32)}, directory / "model.safetensors")
    if change == "garbage":
        (directory / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(500))
    with pytest.raises(LoadError, match=r"Medusa heads|cannot be read") as error:
        LLM(tiny.family("llama"), draft=f"medusa:{directory}", kv_tokens=512)
    assert "\n" not in str(error.value).split(":")[0]


def test_a_prompt_of_one_token_has_no_state_before_its_root() -> None:
    decoder = tiny.decoder(tiny.family("llama"))
    medusa = MedusaProposer("medusa", tiny.medusa("llama"), view_of(decoder))
    medusa.open(0, [5])
    assert (
        len(medusa.propose([DraftRequest(0, [5], SamplingParams(), Noise(1, 0), depth=3)])[0]) == 1
    )
