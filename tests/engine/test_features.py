"""Drafters get the hidden states of every committed token once, in order, and equal to those of
one-token passes of the target.

Only these tests can find wrong states: a drafter that gets another position, path or layer still
drafts, only worse."""

import pytest
import torch

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.devices import as_tensor
from forerun.draft.compose import InTurn
from forerun.draft.draft_model import DraftModel
from forerun.draft.ngram import NGram
from forerun.draft.proposer import Proposer
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.engine import build

AUX_LAYERS = (0, 2, 3)  # the embedding, a layer's input, and the output of the last of three


class Watcher(DraftModel):
    """A draft model that drafts trees and keeps the hidden states that it gets."""

    aux_hidden_layers = AUX_LAYERS

    def __init__(self, runner: Runner, width: int) -> None:
        super().__init__(runner, tiny.VOCAB, width)
        self.seen: dict[int, dict[int, torch.Tensor]] = {}
        self.ended: list[tuple[list[int], dict[int, torch.Tensor]]] = []

    def open(self, slot, tokens, references=(), tenant=""):
        super().open(slot, tokens, references, tenant)
        self.seen[slot] = {}

    def observe(self, slot, start, features):
        assert tuple(features) == self.aux_hidden_layers
        rows = torch.stack([as_tensor(features[b]) for b in self.aux_hidden_layers], 1)
        for i, row in enumerate(rows):
            assert start + i not in self.seen[slot], "once"
            assert not self.seen[slot] or start + i == max(self.seen[slot]) + 1, "in order"
            self.seen[slot][start + i] = row

    def close(self, slot, finished=None):
        super().close(slot, finished)
        if finished is not None:
            self.ended.append((list(finished), self.seen.pop(slot)))


def watching(
    decoder: object, drafter: object, wrap: bool, **options: int
) -> tuple[Engine, Watcher]:
    watcher = Watcher(Runner(drafter, tokens=1024, page=4, slots=8), width=3)
    proposer: Proposer = InTurn((NGram(longest=3, shortest=1), watcher)) if wrap else watcher
    shape = {"tokens": 1024, "page": 4, "slots": 8} | options
    return Engine(Runner(decoder, **shape), {"watch": proposer}, chunk=7), watcher


def reference(decoder: object, tokens: list[int]) -> torch.Tensor:
    """Return the states [T, AUX_LAYERS, H] of one-token passes on an empty cache."""
    runner, rows = Runner(decoder, tokens=len(tokens) + 4, page=4, slots=1), []
    runner.cache.open(0, [])
    runner.cache.pages.grow(0, len(tokens))
    for token in tokens:
        features = runner.forward([Segment(0, [token], [-1], [0])], AUX_LAYERS).features
        rows.append(torch.stack([as_tensor(features[b])[0] for b in AUX_LAYERS]))
        runner.cache.commit(0, [0])
    return torch.stack(rows)


@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "in a cascade"])
@pytest.mark.parametrize("tokens", [1024, 160], ids=["room", "preempted"])
def test_states_of_committed_tokens_are_observed_once_and_in_order(wrap: bool, tokens: int) -> None:
    decoder = tiny.decoder(tiny.family("llama"))
    engine, watcher = watching(decoder, tiny.decoder(tiny.drafter("llama")), wrap, tokens=tokens)
    for i, prompt in enumerate(build.prompts(6)):
        engine.add(prompt, build.params(i, 0.8), draft="watch", depth=3)
    build.finish(engine)
    assert len(watcher.ended) == 6
    for text, seen in watcher.ended:
        # neither the last token, which was never read, nor a cached prefix
        assert max(seen) == len(text) - 2 and min(seen) < len(text) // 2
        expected = reference(decoder, text[:-1])
        for position, row in seen.items():
            assert torch.allclose(row, expected[position], atol=1e-9), position


def test_a_drafter_that_is_not_used_observes_nothing() -> None:
    engine, watcher = watching(
        tiny.decoder(tiny.family("llama")), tiny.decoder(tiny.drafter("llama")), wrap=False
    )
    engine.add(build.prompts()[1], build.params(0, 0.0), draft="off")
    build.finish(engine)
    assert not watcher.seen and not watcher.ended


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_native_states_are_those_of_one_token_passes_bit_for_bit(form: str) -> None:
    """Requesting the states does not change the logits."""
    native.start(2)
    directory = tiny.family("llama")
    decoder = NativeDecoder(load_config(directory), directory, form, 256)
    tokens = torch.randint(
        3, tiny.VOCAB, (19,), generator=torch.Generator().manual_seed(2)
    ).tolist()
    cache = KVCache(
        decoder.config, tokens=64, page=4, slots=1, context=256, dtype=decoder.dtype, device=decoder.device,
        native=True,
    )  # fmt: skip
    cache.open(0, [])
    cache.pages.grow(0, len(tokens))
    segment = Segment.chain(0, tokens, [0, 18])
    found, plain = decoder.forward([segment], cache, AUX_LAYERS), decoder.forward([segment], cache)
    assert torch.equal(found.logits, plain.logits) and not plain.features
    states = torch.stack([as_tensor(found.features[b]) for b in AUX_LAYERS], 1)
    assert torch.equal(states, reference(decoder, tokens))


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
def test_native_states_agree_with_torch() -> None:
    native.start(2)
    directory = tiny.family("llama")
    decoder = NativeDecoder(load_config(directory), directory, "float32", 256)
    tokens = list(range(3, 17))
    expected = reference(tiny.decoder(directory), tokens)
    assert torch.allclose(reference(decoder, tokens).double(), expected, rtol=1e-4, atol=1e-4)
