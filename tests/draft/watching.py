"""Engines that draft with heads, and what is seen of every node while they run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.draft import medusa as levels
from forerun.draft.block import proposer as block
from forerun.draft.eagle import proposer as pairs
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
class Watch:
    """What was seen while engines ran: every node's logits, and where the states of its slot
    begin."""

    seen: list[tuple[tuple[int, ...], tuple[int, ...], int, Tensor]] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)

    def node(self, tree: Any, path: tuple[int, ...], logits: Tensor) -> None:
        self.seen.append(
            (tuple(tree.request.tokens), path, self.first.get(tree.request.slot, 0), logits.clone())
        )


def watching(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """See what heads are asked from here on."""
    watch, grow, grow_all, observe = (
        Watch(),
        pairs.grow,
        pairs.grow_all,
        HiddenStateProposer.observe,
    )

    def seeing(trees: Sequence[Any], logits: Tensor, *rest: Any) -> None:
        nodes = [(tree, node) for tree in trees for node in tree.frontier]
        for (tree, node), row in zip(nodes, logits, strict=True):
            watch.node(tree, tuple(tree.draft.tokens[i] for i in tree.draft.path_to(node)[1:]), row)
        grow(trees, logits, *rest)

    def seeing_all(trees: Sequence[Any], said: Sequence[Tensor], *rest: Any) -> None:
        for tree, laws in zip(trees, said, strict=True):
            for level, row in enumerate(laws):
                watch.node(tree, (0,) * level, row)
        grow_all(trees, said, *rest)

    def observing(self: HiddenStateProposer, slot: int, start: int, features: Any) -> None:
        observe(self, slot, start, features)
        watch.first[slot] = self.waiting[slot].begin

    for module in (pairs, block, levels):
        monkeypatch.setattr(module, "grow", seeing)
    monkeypatch.setattr(pairs, "grow_all", seeing_all)
    monkeypatch.setattr(HiddenStateProposer, "observe", observing)
    return watch


def same_as_twin(watch: Watch, kind: str, head: Any, every: int = 1) -> None:
    """The logits of every so-manieth node seen."""
    twin, close = KINDS[kind].twin(head), KINDS[kind].closeness
    assert len(watch.seen) >= 10
    for tokens, path, first, row in watch.seen[::every]:
        expected = twin.logits(tokens, path, first)
        assert torch.equal(row.isinf(), expected.isinf())
        assert torch.allclose(row.double(), expected, rtol=close, atol=close), (
            len(tokens),
            path,
            first,
        )


def engine_of(
    kind: str, head: Any, width: int = 1, *, chunk: int = 64, rule: str = "match", **room: int
) -> Engine:
    drafter = KINDS[kind].propose(head.double(), width=width, **room)
    return Engine(
        Runner(tiny.decoder(tiny.family("llama")), **ROOM | room),
        {"it": drafter},
        chunk=chunk,
        rule=rule,
    )


def run(engine: Engine, which: Sequence[int], length: int = 6, depth: int = 4) -> list[Any]:
    prompts = build.prompts()
    requests = [
        engine.add(prompts[i], build.params(i, 0.8, length), draft="it", depth=depth) for i in which
    ]
    build.finish(engine)
    return requests


def show(drafter: Any, slot: int, tokens: Sequence[int], first: int = 0) -> None:
    """Open a slot anew and show it the states of all but the last token, or of those from `first`
    on."""
    drafter.close(slot)
    drafter.open(slot, tokens)
    if len(tokens) > 1:
        parts = states_of(tuple(tokens[:-1]), drafter.aux_hidden_layers)[first:].split(
            drafter.target.hidden, -1
        )
        drafter.observe(slot, first, dict(zip(drafter.aux_hidden_layers, parts, strict=True)))


def native_view(family: str = "llama") -> TargetView:
    native.start(2)
    path = tiny.family(family)
    return view_of(NativeDecoder(load_config(path), path, "float32", 256), form="float32")


STANDS = array(
    "f", [*(0.5 + i / 32 for i in range(16)), *(0.2 + i / 64 for i in range(16))]
)  # what sixteenths mean


def chain_of(draft: Draft) -> Draft:
    """What a drafter said first of all, without what stands beside it."""
    chain = Draft.root(draft.tokens[0])
    for node, sure in enumerate(draft.confidence_bins, start=1):
        if sure < NUM_CONFIDENCE_BINS:
            chain.add(draft.tokens[node], len(chain) - 1, draft.sources[node])
            chain.confidence_bins.append(sure)
            chain.path_probs.append(draft.path_probs[node - 1])
    return chain
