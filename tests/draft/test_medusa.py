"""Medusa heads: which state they read, that training and drafting compute the same, and saving.

Heads that read the state of the wrong position still draft, only worse, so alignment is tested with
heads that are fitted to a text."""

from dataclasses import replace

import pytest
import torch

from forerun import SamplingParams
from forerun.draft.medusa import MedusaHeads, MedusaProposer, load_heads, save_heads
from forerun.draft.proposer import view_of
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.runtime.packed import Linear
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.draft.helpers import make_request, needs_native
from tests.draft.twins import features_of
from tests.engine import build


def fitted(states: torch.Tensor, tokens: list[int], vocab: int) -> MedusaHeads:
    """Fit heads that predict tokens t + 2, t + 3, .. of a text from the state of token t."""
    heads = MedusaHeads(3, 1, states.shape[1], vocab)
    heads.begin(torch.zeros(vocab, states.shape[1]))
    for i, head in enumerate(heads.lm_heads):
        count = len(tokens) - 2 - i
        wanted = torch.nn.functional.one_hot(torch.tensor(tokens[2 + i :]), vocab).double()
        weight = torch.linalg.lstsq(states[:count].double(), wanted).solution.T
        head.weight.data.copy_(100 * weight)  # far above any noise
    return heads


def test_heads_read_the_state_of_the_token_before_the_root() -> None:
    """Heads fitted to the states of a text predict all of it; off by one they would not."""
    decoder = tiny.decoder(tiny.family("llama"))
    view = view_of(decoder)
    room = {"tokens": 256, "page": 4, "slots": 1}
    plain = Engine(Runner(decoder, **room), {})
    params = SamplingParams(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True)
    request = plain.add(build.prompts()[2][:6], params)
    build.finish(plain)
    text = list(request.tokens)
    states = view.normalise(features_of(decoder, text[:-1], (view.layers,))[view.layers])
    medusa = MedusaProposer("medusa", fitted(states, text, view.vocab), view)
    engine = Engine(Runner(decoder, **room), {"medusa": medusa})
    again = engine.add(text[:6], params, draft="medusa", depth=3)
    build.finish(engine)
    assert again.tokens == text
    assert again.stats.accepted == again.stats.drafted > 15


@pytest.mark.parametrize(
    "form", [None, *(pytest.param(f, marks=needs_native) for f in ("float32", "int8"))]
)
def test_the_proposer_equals_the_trained_module(form) -> None:
    torch.manual_seed(0)
    if form:
        native.start(2)
    heads = MedusaHeads(3, 2, 32, tiny.VOCAB)
    view = view_of(tiny.decoder(tiny.family("llama")))
    medusa, state = MedusaProposer("medusa", heads, replace(view, form=form)), torch.randn(5, 32)
    expected = heads(state)
    for head in range(3):
        logits, _ = medusa.heads.step(head, state, torch.zeros(5))
        error = (logits - expected[:, head]).norm() / expected[:, head].norm()
        assert error < (0.05 if form == "int8" else 1e-5)


@needs_native
def test_rows_of_a_native_linear_do_not_depend_on_the_batch() -> None:
    native.start(2)
    torch.manual_seed(1)
    linear, x = Linear(torch.randn(70, 33), "int8"), torch.randn(9, 33)
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


def test_heads_come_back_as_they_were_stored(tmp_path) -> None:
    torch.manual_seed(2)
    heads = MedusaHeads(2, 1, 8, 12)
    save_heads(heads, tmp_path / "m", torch.float32)
    loaded = load_heads(tmp_path / "m")
    assert (loaded.levels, loaded.layers, loaded.hidden, loaded.vocab) == (2, 1, 8, 12)
    state = torch.randn(3, 8)
    assert torch.equal(loaded(state), heads(state))
    assert sorted(heads.state_dict()) == [
        "blocks.0.layers.0.weight", "blocks.1.layers.0.weight", "lm_heads.0.weight", "lm_heads.1.weight",
    ]  # fmt: skip


def test_untrained_heads_predict_what_the_target_does() -> None:
    heads, head = MedusaHeads(2, 1, 8, 12), torch.randn(12, 8)
    heads.begin(head)
    state = torch.randn(4, 8)
    assert torch.allclose(heads(state)[:, 1], state @ head.T)


def test_a_prompt_of_one_token_has_no_state_before_its_root() -> None:
    decoder = tiny.decoder(tiny.family("llama"))
    medusa = MedusaProposer("medusa", tiny.medusa("llama"), view_of(decoder))
    medusa.open(0, [5])
    assert len(medusa.propose([make_request([5])])[0]) == 1
