"""Passes that are recorded once and replayed give the results of unrecorded passes.

The tests need no GPU: `RecordedOperations` keeps the torch operations of a pass and runs them again
on the same tensors. A number that the host computed while recording, a new tensor in each pass, or
an input that is not staged then gives wrong logits, as in a CUDA graph.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forerun.cache.attention import Segment
from forerun.kernels import experts
from forerun.kernels.experts import dense
from forerun.models.decoder import Decoder
from forerun.runtime.captured import CapturedPass, CudaGraphs, cuda_graphs
from forerun.runtime.padded_pass import PassShape, TreeShape, shape_of
from forerun.runtime.torch_runner import Runner
from tests import families, tiny
from tests.engine import build
from tests.models.test_parity import grown_tree, text_of

FAMILIES = [*tiny.FAMILIES, *families.MODELS]


class Rerun:
    """A stand-in for `CudaGraphs` that runs the function again."""

    own_attention = own_layers = False

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return run(), lambda: run() and None


class RecordedOperations(TorchDispatchMode):
    """A stand-in for `CudaGraphs` that runs the same operations again, on the CPU."""

    own_attention = own_layers = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.count = 0

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.count += 1
        self.calls = calls = []
        with self:
            result = run()
        return result, lambda: replay(calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not (func.is_view and same_storage([args[0], *tree_leaves(found)])):
            self.calls.append((func, args, kwargs, found))
        return found


def same_storage(tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors are views of the first one, so that later writes to it show.
    `reshape`, for example, returns a view or a copy."""
    return len({each.untyped_storage().data_ptr() for each in tensors}) == 1


@torch.inference_mode()
def replay(calls: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    """Run operations again and write their results to the tensors of the first run."""
    for func, args, kwargs, first in calls:
        again = func(*args, **kwargs)
        if isinstance(first, Tensor):
            results = [(first, again)]
        else:
            results = zip(tree_leaves(first), tree_leaves(again), strict=True)
        for old, new in results:
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


def pair(decoder: Decoder, slots: int = 4, graphs: Any = None) -> tuple[Runner, Runner, Any]:
    """Return a runner that records, one that does not, and the recorder."""
    graphs, sizes = graphs or RecordedOperations(), dict(tokens=1024, page=4, slots=slots)
    return Runner(decoder, **sizes, graphs=graphs), Runner(decoder, **sizes), graphs


def both(
    runners: Sequence[Runner], segments: Sequence[Segment], layers: Sequence[int] = ()
) -> list[Tensor]:
    """Run one pass on both runners and compare logits and hidden states."""
    for runner in runners:
        for segment in segments:
            length = runner.cache.length[segment.slot] + len(segment.parents)
            assert runner.cache.pages.grow(segment.slot, length)
    recorded, plain = (runner.forward(segments, layers) for runner in runners)
    # recurrent states are float32; so are routing weights, whose sigmoid depends on the rows
    config = runners[0].decoder.config
    atol = 1e-4 if config.recurrent else 1e-5 if config.experts else 1e-9
    torch.testing.assert_close(recorded.logits, plain.logits, rtol=0, atol=atol)
    assert recorded.features.keys() == plain.features.keys()
    for layer, states in plain.features.items():
        torch.testing.assert_close(recorded.features[layer], states, rtol=0, atol=atol)
    return [recorded.logits, plain.logits]


def chain(slot: int, tokens: list[int], **options: Any) -> Segment:
    parents = list(range(-1, len(tokens) - 1))
    return Segment(slot, tokens, parents, list(range(len(tokens))), **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_passes_equal_unrecorded_ones(name: str) -> None:
    """Prompts, single tokens, trees and several slots in one pass, each shape recorded once and
    replayed with other tokens, lengths and pages."""
    decoder = tiny.decoder(tiny.family(name))
    recorded, plain, graphs = pair(decoder)
    compare_passes((recorded, plain))
    assert graphs.count <= (6 if decoder.config.recurrent is None else 12)
    assert recorded.captured is not None
    assert not recorded.captured.failed


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_graphs_equal_unrecorded_passes(name: str) -> None:
    decoder = tiny.decoder(tiny.family(name), torch.float64, "cuda")
    recorded, plain, _ = pair(decoder, graphs=CudaGraphs())
    compare_passes((recorded, plain))
    assert recorded.captured is not None and not recorded.captured.failed


def compare_passes(runners: Sequence[Runner]) -> None:
    """Compare prompts, trees, single tokens and chunks of several slots."""
    decoder = runners[0].decoder
    layers = (0, decoder.config.layers)
    for slot, length in ((0, 20), (1, 3), (2, 9)):
        both(runners, [chain(slot, text_of(length, slot))], layers)
        for runner in runners:
            runner.cache.commit(slot, range(length))
    for seed in range(4):
        tokens, parents = grown_tree(6 + seed, seed)
        tree = Segment(0, tokens, parents, list(range(1, len(tokens))))
        single = Segment(1, text_of(1, seed), [-1], [0])
        both(runners, [tree, single, chain(2, text_of(2, seed))], layers)
        path = [0, *(i for i in range(1, len(parents)) if parents[i] == 0)][:2]
        path = path if parents[path[-1]] == path[0] or len(path) == 1 else path[:1]
        for runner in runners:
            for slot, kept in ((0, path), (1, [0]), (2, [0, 1])):
                runner.cache.commit(slot, kept)
        both(runners, [Segment(0, text_of(1, 9 + seed), [-1], [0])])


def test_uncommitted_tokens_of_earlier_passes_are_visible() -> None:
    """A draft model adds one level per pass behind tokens that are not committed."""
    recorded, plain, _ = pair(tiny.decoder(tiny.family("llama")))
    runners = recorded, plain
    both(runners, [chain(0, text_of(7))])
    for runner in runners:
        runner.cache.commit(0, range(7))
    both(runners, [Segment(0, [5], [-1], [0])])
    both(runners, [Segment(0, [6, 7], [-1, 0, 0], [0, 1], offset=1)])
    both(runners, [Segment(0, [8], [-1, 0, 0, 2], [0], offset=3)])
    assert recorded.captured is not None and not recorded.captured.failed


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("family", ["llama", "mistral", "llama4"])
def test_chains_placed_on_the_device_equal_staged_ones(family: str, window: int | None) -> None:
    """Covers full attention, windows with and without first keys, and chunked attention."""
    decoder = tiny.decoder(tiny.family(family))
    runner = Runner(decoder, tokens=1024, page=4, slots=3)
    if window:
        decoder = decoder.with_layers(range(decoder.config.layers), window)
    cache = runner.cache
    for slot, length in ((0, 20), (1, 3), (2, 9)):
        assert cache.pages.grow(slot, length + 3)
        cache.length[slot] = length
    shape = PassShape(4, 16, 256)
    staged, placed = (CapturedPass(decoder, cache, shape, (), False, None) for _ in range(2))
    tokens = [text_of(3, slot) for slot in range(3)]
    staged.fill([chain(slot, own) for slot, own in enumerate(tokens)], None)
    table = staged.inputs.table
    placed.begin_chains(table, staged.inputs.wanted)
    placed.place(torch.tensor([*tokens, [0] * 3]), torch.tensor([20, 3, 9, 1]))
    assert torch.equal(placed.inputs.table, table)
    for name in ("ids", "positions", "rows"):
        actual, expected = (getattr(each.inputs, name).view(4, 16)[:3] for each in (placed, staged))
        assert torch.equal(actual, expected), name
    for actual, expected in zip(placed.inputs.masks, staged.inputs.masks, strict=True):
        assert torch.equal(actual[:3], expected[:3])
        assert actual.view(torch.bool).any(-1).all()  # no row of padding is fully masked


def rows_of(walk: Any, table: Tensor, shape: PassShape) -> list[list[int]]:
    """Return the cache rows that each token of a pass reads, by position."""
    found = []
    for token in range(shape.rows):
        last, direct = int(walk.last[token]), int(walk.direct[token])
        own, at = table[token // shape.tokens].tolist(), int(walk.extra_at[token]) - direct
        found.append([own[p] if p < direct else int(walk.extra[at + p]) for p in range(last + 1)])
    return found


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "llama4"])
def test_trees_placed_on_the_device_equal_staged_ones(family: str, walks: bool) -> None:
    """Random trees with room for more nodes, after texts of different lengths."""
    decoder = tiny.decoder(tiny.family(family))
    cache = Runner(decoder, tokens=1024, page=4, slots=3).cache
    dice, lengths, room = random.Random(4), (20, 3, 9), 9
    segments, parents = [], []
    for slot, length in enumerate(lengths):
        assert cache.pages.grow(slot, length + room + 1)
        cache.length[slot] = length
        count = dice.randrange(4, room)
        own = [0, *(dice.randrange(max(0, node - 4), node) for node in range(2, count + 1))]
        segments.append(Segment(slot, text_of(count + 1, slot), [-1, *own], [0]))
        parents.append([*own, *[-1] * (room - count)])
    depth = max(max(segment.depths) for segment in segments)
    shape = PassShape(4, 16, 256)
    staged, placed = (CapturedPass(decoder, cache, shape, (), walks, None) for _ in range(2))
    staged.fill(segments, None)
    table = staged.inputs.table.clone()
    for slot in range(3):  # the host stages no rows after the nodes
        table[slot, : lengths[slot] + room + 1] = torch.from_numpy(
            cache.pages.rows[slot, : lengths[slot] + room + 1].astype("int64")
        )
    placed.begin_chains(table, staged.inputs.wanted)
    tree = TreeShape.of(torch.tensor([*parents, [-1] * room]), depth)
    tokens = [[*s.tokens, *[0] * (room + 1 - len(s.tokens))] for s in segments]
    placed.place(torch.tensor([*tokens, [0] * (room + 1)]), torch.tensor([*lengths, 1]), tree)
    for slot, segment in enumerate(segments):
        count = len(segment.tokens)
        for name in ("ids", "positions", "rows"):
            actual, expected = (getattr(e.inputs, name).view(4, 16)[slot] for e in (placed, staged))
            assert torch.equal(actual[:count], expected[:count]), name
        assert segment.depths == tree.depths[slot, :count].tolist()
        for actual, expected in zip(placed.inputs.masks, staged.inputs.masks, strict=True):
            assert torch.equal(actual[slot, :count], expected[slot, :count])
        if walks:
            actual, expected = (rows_of(e.inputs, e.inputs.table, shape) for e in (placed, staged))
            first = slot * shape.tokens
            assert actual[first : first + count] == expected[first : first + count]


def test_keys_of_long_texts_get_larger_shapes() -> None:
    decoder = tiny.decoder(tiny.family("llama"))
    recorded, plain, graphs = pair(decoder, slots=1)
    text = text_of(decoder.context - 8)
    both((recorded, plain), [chain(0, text)])
    for runner in (recorded, plain):
        runner.cache.commit(0, range(len(text)))
    for _ in range(3):
        both((recorded, plain), [chain(0, [5])])
        for runner in (recorded, plain):
            runner.cache.commit(0, [0])
    assert graphs.count == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1], (1, 16, 256)),
        ([16], (1, 16, 256)),
        ([17], (1, 32, 256)),
        ([33], None),
        ([1, 1, 5], (4, 16, 256)),
        ([1] * 5, (8, 1, 256)),
        ([3] * 9, (16, 4, 256)),
        ([32] * 17, None),
    ],
    ids=str,
)
def test_shapes_of_passes(tokens: list[int], expected: tuple[int, int, int] | None) -> None:
    """Plain decoding of up to four requests has the shape of drafts of up to 15 tokens."""
    recorded, _, _ = pair(tiny.decoder(tiny.family("llama")), slots=17)
    segments = [chain(slot, [5] * count) for slot, count in enumerate(tokens)]
    found = shape_of(segments, recorded.cache)
    assert found == (None if expected is None else PassShape(*expected))


@pytest.mark.parametrize(
    "draft", ["suffix", "recycle", "model", "tree", "eagle", "medusa", "block"]
)
def test_speculation_with_recorded_passes_is_lossless(draft: str) -> None:
    """Half of the requests are greedy, and half are sampled."""
    assert texts_of(draft, recorded=True) == plain()


@functools.cache
def plain() -> list[list[int]]:
    found = texts_of("off", recorded=False)
    assert found == texts_of("off", recorded=True)
    return found


def texts_of(name: str, recorded: bool) -> list[list[int]]:
    engine, graphs = build.engine(drafts=[name]), RecordedOperations() if recorded else None
    for runner in (engine.target, *_runners(engine.proposers.values())):
        runner.graphs = graphs
    engine.reset()
    requests = [
        engine.add(prompt, build.params(i, None), draft=name, depth=3)
        for i, prompt in enumerate(build.prompts(6))
    ]
    while engine.busy:
        engine.step_or_raise()
    assert graphs is None or graphs.count
    return [request.tokens for request in requests]


def _runners(proposers: Any) -> list[Runner]:
    parts = [part for proposer in proposers for part in proposer.parts]
    return [part.runner for part in parts if isinstance(getattr(part, "runner", None), Runner)]


def test_a_failed_recording_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        own_attention = own_layers = False

        def record(self, run: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    decoder = tiny.decoder(tiny.family("llama"))
    sizes = dict(tokens=64, page=4, slots=1)
    recorded, plain = Runner(decoder, **sizes, graphs=Failing()), Runner(decoder, **sizes)
    with caplog.at_level(logging.WARNING, "forerun.runtime"):
        both((recorded, plain), [chain(0, [5, 6])])
        both((recorded, plain), [chain(0, [7])])
    assert [record.getMessage() for record in caplog.records] == [
        "passes are not recorded as CUDA graphs: operation not permitted when stream is capturing"
    ]


def test_kernels_that_cannot_be_used_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forerun.runtime"):
        assert [cuda_graphs("triton", torch.device("cpu", 3)) for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "the kernels of Triton are not used: they need a CUDA device, and this is cpu"
    ]
    graphs = cuda_graphs("auto", torch.device("cuda"))
    assert graphs is not None and not graphs.own_layers and not graphs.own_attention
    assert cuda_graphs("torch", torch.device("cuda")) is None


def test_the_first_pass_of_a_shape_is_cold() -> None:
    recorded, _, _ = pair(tiny.decoder(tiny.family("llama")))
    assert recorded.cache.pages.grow(0, 4)
    assert recorded.forward([chain(0, [5])]).is_cold
    assert not recorded.forward([chain(0, [6, 7])]).is_cold


def test_padding_uses_the_experts_of_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding must not read weights of further experts."""
    choices: list[Tensor] = []

    def noted(*call: Any) -> Tensor:
        choices.append(call[1])
        return dense(*call)

    monkeypatch.setattr(experts, "on_device", noted)
    runner = Runner(
        tiny.decoder(tiny.family("qwen3_moe")), tokens=64, page=4, slots=2, graphs=Rerun()
    )
    for slot in range(2):
        assert runner.cache.pages.grow(slot, 3)
    runner.forward([chain(0, [5, 9, 11]), chain(1, [7, 6, 4])])
    assert choices
    for choice in choices:
        segments = choice.view(2, 16, -1)
        assert (segments[:, 3:] == choice[0]).all()
        assert (segments[:, :3] != choice[0]).any()


def test_large_passes_of_mixtures_are_not_recorded() -> None:
    decoder = tiny.decoder(tiny.family("qwen3_moe"))
    recorded, plain, graphs = pair(decoder, slots=32)
    assert recorded.captured is not None
    assert recorded.captured.takes(PassShape(16, 16, 256))
    assert not recorded.captured.takes(PassShape(16, 32, 256))
    both((recorded, plain), [chain(slot, [5] * 17) for slot in range(16)])
    assert not graphs.count and not recorded.captured.failed
    dense = pair(tiny.decoder(tiny.family("llama")))[0].captured
    assert dense is not None and dense.takes(PassShape(16, 32, 256))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_host_never_waits_while_a_pass_is_computed(name: str, monkeypatch: Any) -> None:
    """In a CUDA graph, syncs is an error."""
    decoder = tiny.decoder(tiny.family(name))
    runner = Runner(decoder, tokens=64, page=4, slots=1, graphs=RecordedOperations())
    assert runner.captured is not None and runner.cache.pages.grow(0, 3)
    for compute, waits in ((experts.on_device, False), (experts.by_expert, True)):
        monkeypatch.setattr(experts, "on_device", compute)
        captured = runner.captured.new_pass(PassShape(1, 16, 256))
        captured.fill([chain(0, [5, 9, 11])], None)
        with monkeypatch.context() as patch, SyncCounter(patch) as syncs:
            captured.compute()
        assert (syncs.count > 0) == waits


def test_the_recorder_detects_numbers_computed_by_the_host() -> None:
    """As in a graph, an operation that was not recorded is not repeated."""
    number = torch.tensor([3.0])
    source = torch.tensor([1.0])
    result, again = RecordedOperations().record(lambda: source * float(number))
    number += 1
    source += 1
    again()
    assert result.tolist() == [6.0]


class SyncCounter(TorchDispatchMode):
    """Counts operations on the CPU that would wait for a device: reads of values, sizes that depend
    on values, and tensors made on the device from the host's numbers."""

    SYNCING = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        patch.setattr(Tensor, "is_cpu", property(lambda tensor: False))
        patch.setattr(Tensor, "tolist", self._counted(Tensor.tolist))
        patch.setattr(Tensor, "numpy", self._counted(Tensor.numpy))
        make = torch.tensor
        patch.setattr(
            torch,
            "tensor",
            lambda *a, **k: (self._counted(make) if "device" in k else make)(*a, **k),
        )

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return call(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in self.SYNCING or by_mask:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"top_k": 8, "top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("draft", "most"), [("off", 1), ("suffix", 1), ("ngram", 1), ("model", 2)])
def test_a_step_waits_for_the_device_at_most_twice(
    draft: str, most: int, temperature: float, options: dict[str, Any], monkeypatch: Any
) -> None:
    """It waits once for the draft of a draft model, of any depth, and once for the target's
    tokens."""
    engine = build.engine(drafts=[draft])
    for runner in (engine.target, *_runners(engine.proposers.values())):
        runner.graphs = RecordedOperations()
    engine.reset()
    params = build.SamplingParams.pure(
        temperature=temperature, seed=3, max_tokens=60, ignore_eos=True, **options
    )
    for prompt in build.prompts(2):
        engine.add(prompt, params, draft=draft, depth=5)
    for _ in range(6):  # prompts are read and shapes recorded
        engine.step_or_raise()
    with monkeypatch.context() as patch, SyncCounter(patch) as syncs:
        for _ in range(3):
            syncs.count = 0
            events = engine.step_or_raise()
            assert events and syncs.count <= most
