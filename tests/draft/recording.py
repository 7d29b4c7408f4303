"""Engines that draft with heads, and a recorder of the logits of every drafted node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.draft import hidden_states
from forerun.draft.block import proposer as block
from forerun.draft.eagle import proposer as eagle
from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.proposer import TargetView, view_of
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.types import NUM_CONFIDENCE_BINS, Draft
from tests import tiny
from tests.draft.heads import KINDS, ROOM
from tests.draft.twins import states_of
from tests.engine import build


@dataclass
class LogitRecorder:
    """Records (tokens, path, first position with states, logits) of every node, and by slot the
    first position with states."""

    nodes: list[tuple[tuple[int, ...], tuple[int, ...], int, Tensor]] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)

    def record(self, tree: Any, path: tuple[int, ...], logits: Tensor) -> None:
        begin = self.first.get(tree.request.slot, 0)
        self.nodes.append((tuple(tree.request.tokens), path, begin, logits.clone()))


def record_logits(monkeypatch: pytest.MonkeyPatch) -> LogitRecorder:
    """Record the logits of heads from here on."""
    recorder = LogitRecorder()
    grow, grow_all, observe = eagle.grow, eagle.grow_all, HiddenStateProposer.observe

    def recording_grow(trees: Sequence[Any], logits: Tensor, *rest: Any) -> None:
        nodes = [(tree, node) for tree in trees for node in tree.frontier]
        for (tree, node), row in zip(nodes, logits, strict=True):
            recorder.record(
                tree, tuple(tree.draft.tokens[i] for i in tree.draft.path_to(node)[1:]), row
            )
        grow(trees, logits, *rest)

    def recording_grow_all(trees: Sequence[Any], logits: Sequence[Tensor], *rest: Any) -> None:
        for tree, levels in zip(trees, logits, strict=True):
            for level, row in enumerate(levels):
                recorder.record(tree, (0,) * level, row)
        grow_all(trees, logits, *rest)

    def recording_observe(self: HiddenStateProposer, slot: int, start: int, features: Any) -> None:
        observe(self, slot, start, features)
        recorder.first[slot] = self.pending[slot].begin

    for module in (eagle, block, hidden_states):
        monkeypatch.setattr(module, "grow", recording_grow)
    monkeypatch.setattr(eagle, "grow_all", recording_grow_all)
    monkeypatch.setattr(HiddenStateProposer, "observe", recording_observe)
    return recorder


def assert_equals_twin(recorder: LogitRecorder, kind: str, head: Any, every: int = 1) -> None:
    """Compare the logits of every `every`-th node with the reference twin."""
    twin, close = KINDS[kind].twin(head), KINDS[kind].tolerance
    assert len(recorder.nodes) >= 10
    for tokens, path, first, row in recorder.nodes[::every]:
        expected = twin.logits(tokens, path, first)
        assert torch.equal(row.isinf(), expected.isinf())
        same = torch.allclose(row.double(), expected, rtol=close, atol=close)
        assert same, (len(tokens), path, first)


def engine_of(
    kind: str, head: Any, width: int = 1, *, chunk: int = 64, rule: str = "match", **room: int
) -> Engine:
    drafter = KINDS[kind].proposer(head.double(), width=width, **room)
    runner = Runner(tiny.decoder(tiny.family("llama")), **ROOM | room)
    return Engine(runner, {"head": drafter}, chunk=chunk, rule=rule)


def run(engine: Engine, which: Sequence[int], length: int = 6, depth: int = 4) -> list[Any]:
    prompts = build.prompts()
    requests = [
        engine.add(prompts[i], build.params(i, 0.8, length), draft="head", depth=depth)
        for i in which
    ]
    build.finish(engine)
    return requests


def observe_states(drafter: Any, slot: int, tokens: Sequence[int], first: int = 0) -> None:
    """Open a slot anew and pass it the states of all but the last token, from `first` on."""
    drafter.close(slot)
    drafter.open(slot, tokens)
    if len(tokens) > 1:
        layers = drafter.aux_hidden_layers
        states = states_of(tuple(tokens[:-1]), layers)[first:]
        parts = states.split(drafter.target.hidden, -1)
        drafter.observe(slot, first, dict(zip(layers, parts, strict=True)))


def native_view(family: str = "llama") -> TargetView:
    native.start(2)
    path = tiny.family(family)
    return view_of(NativeDecoder(load_config(path), path, "float32", 256), form="float32")


# acceptance by confidence bin: of first choices, then of alternatives to them
ACCEPTANCE = array("f", [*(0.5 + i / 32 for i in range(16)), *(0.2 + i / 64 for i in range(16))])


def chain_of(draft: Draft) -> Draft:
    """Return the drafter's first choices, without the alternatives to them."""
    chain = Draft.root(draft.tokens[0])
    for node, confidence_bin in enumerate(draft.confidence_bins, start=1):
        if confidence_bin < NUM_CONFIDENCE_BINS:
            chain.add(draft.tokens[node], len(chain) - 1, draft.sources[node])
            chain.confidence_bins.append(confidence_bin)
            chain.path_probs.append(draft.path_probs[node - 1])
    return chain
