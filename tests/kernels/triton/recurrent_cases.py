"""Recurrent layers have the outputs and memory of the torch form, and a token has the same bits
alone, in a tree, and from its record."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.recurrent import RecurrentStates
from forerun.kernels.triton import recurrent as kernels
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.families import RecurrentLayers
from forerun.models.parameters import LinearWeights, RecurrentWeights
from forerun.runtime.padded_pass import PassShape
from forerun.runtime.recorded_recurrence import RecordedRecurrence, steps_of
from tests import tiny
from tests.cache.test_recurrent import chain, random_path, text
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.decoder_cases import compare, compare_passes, runners_of
from tests.kernels.triton.inputs import DEVICE
from tests.kernels.triton.inputs import random as numbers

# sizes that fill no block
DELTA = RecurrentLayers(
    kind="delta",
    layers=(True, False),
    taps=4,
    channels=128,
    key_heads=2,
    key_size=12,
    value_heads=4,
    value_size=20,
)
MAMBA = RecurrentLayers(
    kind="mamba",
    layers=(True, False),
    taps=3,
    channels=144,
    key_heads=2,
    key_size=12,
    value_heads=4,
    value_size=24,
)
LIGHTNING = RecurrentLayers(
    kind="lightning",
    layers=(True, False),
    taps=1,
    channels=48,
    key_heads=2,
    key_size=8,
    value_heads=2,
    value_size=8,
)
TILED = dataclasses.replace(DELTA, tiled=True)
KINDS = (DELTA, TILED, MAMBA, LIGHTNING)
SLOTS = 3


class Layer:
    """One layer over the states of `SLOTS` slots, by the kernels or in torch.

    Inputs depend on the token."""

    def __init__(self, r: RecurrentLayers, has_kernel: bool = True) -> None:
        config = dataclasses.replace(load_config(tiny.family("llama")), recurrent=r, layers=2)
        self.r, self.has_kernel = r, has_kernel
        self.states = RecurrentStates(config, SLOTS, 4, DEVICE)
        self.lengths = [0] * SLOTS
        n, nothing = r.value_heads, LinearWeights(numbers(0, 1, 1))
        self.weights = RecurrentWeights(nothing, nothing, decay_rate=-numbers(1, n).abs() / 4)
        if r.taps > 1:
            self.weights.conv_weight = numbers(2, r.channels, r.taps)
            self.weights.decay_bias = numbers(3, n)
        if r.kind == "mamba":
            self.weights.conv_bias, self.weights.skip = numbers(4, r.channels), numbers(5, n)
        self.inputs = numbers(6, tiny.VOCAB, r.channels)
        widths = {"delta": 2 * n, "mamba": n, "lightning": 0}
        self.decays = numbers(7, tiny.VOCAB, widths[r.kind]) * 4

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Return the outputs of each segment, [tokens, inner]."""
        shape = PassShape(1 << (len(segments) - 1).bit_length(), 8, 256)
        steps = steps_of(segments, shape, self.states, self.has_kernel)
        assert steps is not None
        recur = RecordedRecurrence(self.states, shape, steps, self.has_kernel)
        staged = torch.zeros(recur.size, dtype=torch.int64)
        recur.prepare(segments, self.lengths)
        recur.fill(staged.numpy(), segments)
        recur.bind(staged.to(DEVICE))
        tokens = torch.zeros(shape[:2], dtype=torch.int64)
        for row, segment in zip(tokens, segments, strict=False):
            row[: len(segment.tokens)] = torch.tensor(segment.tokens)
        ids = tokens.flatten().to(DEVICE)
        found = recur(0, self.inputs[ids], self.decays[ids], self.weights)
        recur.settle(segments)
        rows = found.view(*shape[:2], -1)
        return [own[: len(s.tokens)] for s, own in zip(segments, rows, strict=False)]

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.states.commit(slot, path)
        self.lengths[slot] += len(path)

    def memory(self) -> list[Tensor]:
        """Return the states, and for each slot its pending records and convolution history."""
        states = self.states
        found = [states.data[:, : states.layout.states]]
        for slot, (pending, half) in enumerate(zip(states.pending, states._half, strict=True)):
            found += [states.records[slot, half, :, :pending], states.histories[slot, half]]
        return found


def random_segments(dice: random.Random) -> list[Segment]:
    """Return chains and trees in several slots."""
    segments = []
    for slot in dice.sample(range(SLOTS), dice.randint(1, SLOTS)):
        count, reach = dice.choice([1, 1, 3, 7]), dice.choice([1, 3])
        parents = [-1, *(dice.randint(max(0, i - reach), i - 1) for i in range(1, count))]
        segments.append(Segment(slot, text(count, dice.randrange(999)), parents, []))
    return segments


def case_equals_torch() -> None:
    for r in KINDS:
        compiled, reference, dice = Layer(r), Layer(r, has_kernel=False), random.Random(0)
        for _ in range(3):
            segments = random_segments(dice)
            outputs = compiled.forward(segments), reference.forward(segments)
            for found, expected in zip(*outputs, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            for segment in segments:
                path = random_path(segment, dice)
                for each in (compiled, reference):
                    each.commit(segment.slot, path)
            for found, expected in zip(compiled.memory(), reference.memory(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def case_bits_of_plain_decoding() -> None:
    """Outputs and states have the bits of one-token passes over a single slot."""
    for r in (DELTA, MAMBA, LIGHTNING):
        drafted, plain, dice = Layer(r), Layer(r), random.Random(1)
        for _ in range(3):
            segments = random_segments(dice)
            for segment, found in zip(segments, drafted.forward(segments), strict=True):
                path = random_path(segment, dice)
                drafted.commit(segment.slot, path)
                for node in path:
                    single = Segment(segment.slot, [segment.tokens[node]], [-1], [])
                    (expected,) = plain.forward([single])
                    assert torch.equal(found[node], expected[0]), r.kind
                    plain.commit(segment.slot, [0])
        for each in (drafted, plain):
            for slot in range(SLOTS):
                each.states.apply_pending(slot, each.lengths[slot])
        for found, expected in zip(drafted.memory()[:1], plain.memory()[:1], strict=True):
            assert torch.equal(found, expected)


def case_bits_of_records() -> None:
    """The kernel applies records with the bits of torch, which applies them before some passes."""
    for r in (DELTA, MAMBA):
        layers = Layer(r), Layer(r)
        for turn in range(2):
            for each in layers:
                each.forward([Segment(0, text(4, turn), chain(4), [])])
                each.commit(0, range(3))
            layers[1].states.apply_pending(0, layers[1].lengths[0])
            for each in layers:
                each.forward([Segment(0, [7], [-1], [])])
                each.commit(0, [])
        for found, expected in zip(*(each.memory() for each in layers), strict=True):
            assert torch.equal(found, expected), r.kind


def tiny_decoder(family: str) -> Decoder:
    return load_decoder(tiny.family(family), torch.float32, DEVICE, 64)


def case_decoders() -> None:
    """Tiny models with other layers on torch, and one whose recurrent layers have no kernel."""
    for family in ("qwen3_5", "falcon_h1", "lfm2"):
        runners = runners_of(tiny_decoder(family))
        compare_passes(runners)
        for runner in runners:
            runner.cache.commit(0, [0, 1])
        compare(runners, Segment(0, [6], [-1], [0]), Segment(1, [9, 4], [-1, 0], [1]))
        passes = runners[0].captured
        assert passes is not None and not passes.failed and passes.own_attention
        made = [each.recurrence for each in passes._passes.values()]
        assert all(own is not None and own.has_kernel == (family != "lfm2") for own in made)


def case_falls_back() -> None:
    """A kernel that fails is replaced by torch and leaves the states unchanged."""
    runners, before = runners_of(tiny_decoder("falcon_h1")), kernels.recur
    compare_passes(runners)
    for runner in runners:
        runner.cache.commit(0, [0, 1])

    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    kernels.recur = broken
    try:  # another shape, which is recorded with the broken kernel
        compare(runners, Segment(0, [6, 7, 8], [-1, 0, 0], [1]), Segment(1, [9, 4], [-1, 0], [1]))
    finally:
        kernels.recur = before
    passes = runners[0].captured
    assert passes is not None and not passes.failed and not passes.own_attention


# Qwen3-Next, Granite 4 and Falcon-H1: kind, channels, key heads, size, value heads, size
SHAPES = (
    ("delta", 8192, 16, 128, 32, 128),
    ("mamba", 3328, 1, 128, 48, 64),
    ("mamba", 1792, 1, 256, 24, 64),
)


def compile_kernels() -> None:
    floats = ("inputs", "decays", "weight", "bias", "decay_bias", "decay_rate", "data", "q_out")
    floats += ("q", "skip", "out", "points")
    integers = ("slots", "old_halves", "new_halves", "counts", "pending", "parents", "windows")
    kinds = dict.fromkeys(floats, "*fp32") | dict.fromkeys((*integers, "histories"), "*i64")
    kinds["scale"] = "fp32"
    for kind, channels, key_heads, key_size, value_heads, value_size in SHAPES:
        sizes = dict(KH=key_heads, K=key_size, VH=value_heads, V=value_size)
        sizes |= dict(IS_DELTA=kind == "delta")
        check_machine_code(
            kernels._prepare,
            kinds,
            dict(C=channels, WINDOW=3, HAS_BIAS=True, HAS_STEP=True, BLOCK=key_size, **sizes),
            registers=160,
            warps=1,
            fuses=False,
        )
        sizes |= dict(KP=key_size, BLOCKS=value_size // 16, LANES=16, IS_TILED=False)
        code = check_machine_code(
            kernels._sweep,
            kinds,
            dict(HAS_SKIP=kind == "mamba", **sizes),
            registers=144,
            warps=kernels.sweep_warps(key_size),
            fuses=False,
        )
        assert "FFMA" not in code  # torch rounds the product of a key and a change
