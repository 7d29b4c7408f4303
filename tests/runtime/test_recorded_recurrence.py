"""Recurrent layers in recorded passes have the bits of the reference and of plain decoding.

The layers run alone, on inputs that depend on the token only, since products and attention have
other shapes in recorded passes, and so other bits on a CPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.cache import recurrent
from forerun.cache.attention import Segment
from forerun.cache.recurrent import Recurrence, RecurrentStates
from forerun.draft.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.errors import StateError
from forerun.models.decoder import Decoder, DecoderLayers, load_decoder
from forerun.runtime import recorded_recurrence
from forerun.runtime.padded_pass import PassShape
from forerun.runtime.recorded_recurrence import RecordedRecurrence, Steps, steps_of
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.cache.test_recurrent import PAGE, chain, names, random_path, text
from tests.engine import build
from tests.engine.test_device_steps import HostSyncs
from tests.runtime.test_captured import RecordedOperations

CPU = torch.device("cpu")
SLOTS = 3


@pytest.fixture(autouse=True)
def same_bits_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions whose last bits on a CPU differ between torch's vectorised loop and the
    remainder of a tensor."""
    monkeypatch.setattr(recurrent.F, "softplus", lambda x: torch.log1p(torch.exp(x)))
    monkeypatch.setattr(torch, "sigmoid", lambda x: 1 / (1 + torch.exp(-x)))


@functools.cache
def model(name: str) -> Decoder:
    return load_decoder(tiny.family(name), torch.float32, CPU, 256)


@functools.cache
def table(name: str, layer: int) -> tuple[Tensor, Tensor]:
    """Return random inputs of the convolution and of decays, by token."""
    r = model(name).config.recurrent
    assert r is not None
    generator = torch.Generator().manual_seed(layer)
    inputs = torch.randn(tiny.VOCAB, r.channels, generator=generator)
    width = {"delta": 2 * r.value_heads, "mamba": r.value_heads}.get(r.kind, 0)
    return inputs, torch.randn(tiny.VOCAB, width, generator=generator)


class Layers:
    """The recurrent layers of a model over the states of `SLOTS` slots.

    Attributes:
        lengths: number of committed tokens by slot.
        recordings: recordings by shape and steps.
    """

    def __init__(self, name: str) -> None:
        self.name, self.model = name, model(name)
        self.states = RecurrentStates(self.model.config, SLOTS, PAGE)
        self.lengths = [0] * SLOTS
        self.recordings: dict[tuple[PassShape, Steps], Recording] = {}

    def run(self, recur: Recurrence | RecordedRecurrence, tokens: Tensor) -> Tensor:
        """Return the outputs of all layers, [layers, T, inner]."""
        found = []
        for layer in self.states.layout.layers:
            weights = self.model.weights.layers[layer].recurrent
            assert weights is not None
            inputs, decays = table(self.name, layer)
            found.append(recur(layer, inputs[tokens], decays[tokens], weights))
        return torch.stack(found)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], is_recorded: bool) -> list[Tensor]:
        """Return the outputs of each segment, [layers, tokens, inner]."""
        counts = [len(segment.tokens) for segment in segments]
        if not is_recorded:
            plan = self.states.plan(segments, self.lengths)
            tokens = torch.tensor([token for segment in segments for token in segment.tokens])
            found = self.run(Recurrence(plan, self.model.config), tokens)
            plan.settle()
            return list(found.split(counts, 1))
        tokens_each = max(16, 1 << (max(counts) - 1).bit_length())
        shape = PassShape(1 << (len(segments) - 1).bit_length(), tokens_each, 256)
        steps = steps_of(segments, shape, self.states)
        assert steps is not None
        recording = self.recordings.get((shape, steps))
        if recording is None:
            recording = self.recordings[shape, steps] = Recording(self, shape, steps, segments)
        outputs = recording.run(segments)
        return [own[:, : len(s.tokens)] for s, own in zip(segments, outputs, strict=False)]

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.states.commit(slot, path)
        self.lengths[slot] += len(path)


class Recording:
    """The recorded operations of all layers in a pass of one shape."""

    def __init__(
        self, layers: Layers, shape: PassShape, steps: Steps, segments: Sequence[Segment]
    ) -> None:
        self.layers, self.shape = layers, shape
        self.recurrence = RecordedRecurrence(layers.states, shape, steps)
        self.numbers = torch.zeros(self.recurrence.size, dtype=torch.int64)
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64)
        self.recurrence.bind(self.numbers)
        self.recurrence.prepare(segments, layers.lengths, at_once=True)
        self.fill(segments)
        graphs = RecordedOperations()
        self.output, self.again = graphs.record(lambda: layers.run(self.recurrence, self.tokens))

    def fill(self, segments: Sequence[Segment]) -> None:
        self.recurrence.fill(self.numbers.numpy(), segments)
        padded = self.tokens.view(self.shape.segments, self.shape.tokens)
        padded.random_(tiny.VOCAB)  # padding must not matter
        for row, segment in zip(padded, segments, strict=False):
            row[: len(segment.tokens)] = torch.tensor(segment.tokens)

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        self.recurrence.prepare(segments, self.layers.lengths)
        self.fill(segments)
        self.again()
        self.recurrence.settle(segments)
        return list(self.output.clone().unflatten(1, self.shape[:2]).unbind(1))


def random_segments(dice: random.Random, most: int = 9) -> list[Segment]:
    """Return chains and trees in several slots."""
    segments = []
    for slot in dice.sample(range(SLOTS), dice.randint(1, SLOTS)):
        count, parents = dice.choice([1, 1, 2, 5, most]), [-1]
        reach = dice.choice([1, 3])
        parents += [dice.randint(max(0, i - reach), i - 1) for i in range(1, count)]
        segments.append(Segment(slot, text(count, dice.randrange(999)), parents, []))
    return segments


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def compare_memory(actual: RecurrentStates, expected: RecurrentStates) -> None:
    """Compare states, pending records, convolution histories, and copies."""
    assert actual.pending == expected.pending and actual._half == expected._half
    width = actual.layout.states
    assert torch.equal(actual.data[:, :width], expected.data[:, :width])
    for slot, (pending, half) in enumerate(zip(actual.pending, actual._half, strict=True)):
        assert torch.equal(actual.histories[slot, half], expected.histories[slot, half])
        records = [each.records[slot, half, :, :pending] for each in (actual, expected)]
        assert torch.equal(*records)
        assert actual._unnamed[slot].keys() == expected._unnamed[slot].keys()
        for length, copy in actual._unnamed[slot].items():
            assert torch.equal(copy, expected._unnamed[slot][length])


@names
@pytest.mark.parametrize("interval", [8, 1024])
def test_recorded_passes_have_the_bits_of_the_reference(
    name: str, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and unrecorded passes share the memory: trees, chains, drafts read level by level,
    rewound tokens, and copies at page borders."""
    monkeypatch.setattr(recurrent, "INTERVAL", interval)
    recorded, reference, dice = Layers(name), Layers(name), random.Random(interval)
    both = recorded, reference
    for turn in range(40):
        segments = random_segments(dice)
        is_recorded = dice.random() < 0.8
        compare(recorded.forward(segments, is_recorded), reference.forward(segments, False))
        if turn % 5 == 4:
            segments = [next_level(segment) for segment in segments]
            assert steps_of(segments, PassShape(4, 16, 256), recorded.states) is None
            compare(*(each.forward(segments, is_recorded=False) for each in both))
        paths = [random_path(as_one_pass(segment), dice) for segment in segments]
        for segment, path in zip(segments, paths, strict=True):
            for each in both:
                each.commit(segment.slot, path)
                if turn % 4 == 3 and len(path) > 1:
                    assert each.states.rewind(segment.slot, 1)
                    each.lengths[segment.slot] -= 1
        compare_memory(recorded.states, reference.states)
    assert sum(map(len, recorded.states._unnamed)) > 6 or interval > 8
    assert len({steps for _, steps in recorded.recordings}) > 4


@names
def test_more_pending_tokens_than_a_recording_applies(name: str) -> None:
    recorded, reference = Layers(name), Layers(name)
    for turn in range(4):
        for each in (recorded, reference):
            each.forward([Segment(1, text(40, turn), chain(40), [])], is_recorded=False)
            each.commit(1, range(40))
        segments = [Segment(slot, [5, 9], chain(2), []) for slot in range(2)]
        compare(recorded.forward(segments, True), reference.forward(segments, False))
        for each in (recorded, reference):
            each.commit(0, [0])
            each.commit(1, [0, 1])
        compare_memory(recorded.states, reference.states)
    assert len(recorded.recordings) == 1


def next_level(segment: Segment) -> Segment:
    """Return two nodes behind those of a segment that an earlier pass has read."""
    count = len(segment.tokens)
    return Segment(segment.slot, [5, 7], [*segment.parents, count - 1, 0], [], offset=count)


def as_one_pass(segment: Segment) -> Segment:
    """Return the segment of a single pass over all nodes."""
    return Segment(segment.slot, [0] * len(segment.parents), segment.parents, [])


@names
def test_a_node_has_the_bits_of_plain_decoding(name: str) -> None:
    """Compares chains and trees in a batch with single tokens of one slot, all recorded."""
    drafted, plain, dice = Layers(name), Layers(name), random.Random(3)
    for _ in range(16):
        segments = random_segments(dice, most=16)
        for segment, found in zip(segments, drafted.forward(segments, True), strict=True):
            path = random_path(segment, dice)
            drafted.commit(segment.slot, path)
            for node in path:
                single = Segment(segment.slot, [segment.tokens[node]], [-1], [])
                (expected,) = plain.forward([single], True)
                assert torch.equal(found[:, node], expected[:, 0])
                plain.commit(segment.slot, [0])
    assert {steps.is_tree for _, steps in drafted.recordings} == {True, False}
    assert {steps for _, steps in plain.recordings} == {Steps(1, False)}


def test_trees_that_need_too_much_memory_run_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    states, shape = Layers("qwen3_5").states, PassShape(4, 16, 256)
    tree = Segment(0, [5, 6, 7], [-1, 0, 0], [])
    assert steps_of([tree], shape, states) == (4, True)
    monkeypatch.setattr(recorded_recurrence, "POINT_BYTES", 4 * 4 * 4 * states.layout.state - 1)
    assert steps_of([tree], shape, states) is None
    assert steps_of([Segment(0, [5, 6, 7], chain(3), [])], shape, states) == (4, False)


def recorded_engine(
    name: str, drafts: Sequence[str], **options: Any
) -> tuple[Engine, list[RecordedOperations]]:
    """Return an engine whose target and draft models record passes, and their recorders."""
    engine = build.engine(name, drafts, **options)
    parts = [part for proposer in engine.proposers.values() for part in proposer.parts]
    runners = [engine.target, *(part.runner for part in parts if isinstance(part, DraftModel))]
    graphs = [RecordedOperations() for _ in runners]
    for runner, own in zip(runners, graphs, strict=True):
        runner.graphs = own
    engine.reset()
    return engine, graphs


def without_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the experts of a model return zeros."""
    monkeypatch.setattr(DecoderLayers, "_experts", lambda self, x, *_: torch.zeros_like(x))


def test_a_pass_that_was_not_committed_is_refused() -> None:
    decoder = tiny.decoder(tiny.family("falcon_h1"))
    runner = Runner(decoder, tokens=256, page=4, slots=1, graphs=RecordedOperations())
    assert runner.cache.pages.grow(0, 80)
    runner.forward([Segment(0, text(40), chain(40), [39], known=40)])  # unrecorded
    with pytest.raises(StateError, match="not committed"):
        runner.forward([Segment(0, [5], [-1], [0])])
    assert runner.captured is not None and not runner.captured.failed


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", ["off", "suffix", "recycle", "model", "tree"])
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2", "minimax_text"])
def test_speculation_with_recorded_passes_is_lossless(
    name: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of 3 tokens, preemption and copies every 8 tokens give the output of a
    target without recordings, greedy and sampled."""
    without_experts(monkeypatch)
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    sizes: dict[str, Any] = dict(chunk=3, tokens=build.SMALL)
    plain = build.run(build.engine(name, [], **sizes), "off", None, count=4)
    drafts = [draft] if draft != "off" else []
    engine, graphs = recorded_engine(name, drafts, **sizes)
    requests = build.run(engine, draft, None, count=4)
    assert [list(r.output) for r in requests] == [list(r.output) for r in plain]
    assert graphs[0].count > 1
    captured = engine.target.captured
    assert captured is not None and not captured.failed
    if drafts:
        assert sum(request.stats.drafted for request in requests) > 0
    if draft in ("recycle", "tree"):
        assert any(steps is not None and steps.is_tree for _, _, steps in captured._passes)


def test_prefixes_of_recorded_passes_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request starts from a copy that a recorded pass has made."""
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    found = []
    for made in (build.engine("falcon_h1", []), recorded_engine("falcon_h1", [])[0]):
        first = made.add(build.prompts()[3], build.params(0, 0.0, 30), draft="off")
        build.finish(made)
        longer = [*first.tokens[:-1], 7]
        second = made.add(longer, build.params(1, 0.0), draft="off")
        build.finish(made)
        assert second.stats.cached_tokens >= len(first.tokens) - 10
        found.append([list(first.output), list(second.output)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2"])
def test_the_host_never_waits_in_passes_commits_and_copies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    decoder = tiny.decoder(tiny.family(name))
    graphs = RecordedOperations()
    runner, tree = Runner(decoder, tokens=256, page=4, slots=2, graphs=graphs), [-1, 0, 0, 1]
    for turn in range(8):
        segments = [Segment(0, text(4, turn), tree, [3]), Segment(1, text(1, turn), [-1], [0])]
        for segment in segments:
            room = runner.cache.length[segment.slot] + len(segment.tokens)
            assert runner.cache.pages.grow(segment.slot, room)
        recorded = graphs.count
        with HostSyncs() as syncs:
            runner.forward(segments)
            runner.cache.commit(0, [0, 1, 3])
            runner.cache.commit(1, [0])
        assert not syncs.names or graphs.count > recorded
    assert graphs.count < 5 and runner.cache.recurrent is not None
    assert len(runner.cache.recurrent._unnamed[0]) > 1
