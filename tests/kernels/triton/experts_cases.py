"""Experts equal their reference in all forms, and a (token, expert) pair has the same bits alone."""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from forerun.kernels import reference
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.kernels.experts import ExpertMlps, by_expert
from forerun.kernels.triton import experts as kernels
from forerun.kernels.triton import linear
from forerun.kernels.triton.experts import (
    assign_tiles,
    combine,
    combine_reference,
    compute_experts,
    fits,
    products,
)
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import FLOATS, random
from tests.kernels.triton.linear_cases import matrices

GATES = {kind: functools.partial(reference.gate, kind=kind) for kind in ("silu", "clamped_swiglu")}
SQUARES = functools.partial(reference.activate, kind="relu2")


def chosen(seed: int, tokens: int, count: int, used: int) -> Tensor:
    """Return different random experts for each token."""
    return random(seed, tokens, count).argsort(-1)[:, :used]


def case_tiles() -> None:
    """Every pair has one place, in order within its expert; tiles have one expert each."""
    for tokens, count, used in ((1, 1, 1), (5, 8, 2), (40, 3, 2), (300, 5, 4), (16, 128, 8)):
        choice = chosen(1, tokens, count, used)
        if tokens == 40:
            choice[3:] = choice[0]  # padding
        tiles = assign_tiles(choice, count)
        rows = tiles.pairs.shape[1]
        found: list[tuple[int, int]] = []
        for pairs, expert in zip(tiles.pairs.tolist(), tiles.experts.tolist(), strict=True):
            own = [pair for pair in pairs if expert >= 0 and pair >= 0]
            assert own == pairs[: len(own)] and (own or expert < 0)
            assert len(own) == rows or set(pairs[len(own) :]) <= {-1} or expert < 0
            found += [(expert, pair) for pair in own]
        flat = choice.flatten().tolist()
        assert found == sorted((expert, pair) for pair, expert in enumerate(flat))


# tokens, experts, experts per token, inner size, width: sizes that are multiples of the tiles or
# not, tiles of 16 and 32 rows, one part and several, a last part that is smaller than the others
SHAPES = [(3, 5, 2, 96, 128), (40, 4, 3, 64, 256), (2, 3, 1, 72, 600)]


def case_equals_reference() -> None:
    """All forms are compared in one shape, and some in the others."""
    for tokens, count, used, inner, width in SHAPES:
        x, choice = random(2, tokens, width), chosen(3, tokens, count, used)
        ups, downs = matrices(2 * count * inner, width), matrices(count * width, inner)
        few = {"float", "int8", "fp8", "int4 by 64 with minima"}
        for form in ups.keys() & downs.keys() & (ups.keys() if tokens == 3 else few):
            mlps = ExpertMlps(ups[form], downs[form], count, 2, GATES["silu"], kind="silu")
            assert fits(mlps)
            found, expected = (f(x, choice, None, mlps) for f in (compute_experts, by_expert))
            slack = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=slack, msg=form)


def case_mixtures() -> None:
    """Biases, clamps, weighted inputs, experts without gates, and floats in the loaded layout."""
    x, choice, factors = random(2, 7, 128), chosen(3, 7, 6, 2), random(4, 7, 2).abs()
    for halves, activate in ((2, GATES["clamped_swiglu"]), (1, SQUARES)):
        up, down = random(5, halves * 6 * 128, 128), random(6, 6 * 128, 128)
        biases = random(7, halves, 6, 128), random(8, 6, 128)
        for more in ((), biases):
            mlps = ExpertMlps(up, down, 6, halves, activate, *more)
            assert fits(mlps)
            for own in (None, factors):
                found, expected = (f(x, choice, own, mlps) for f in (compute_experts, by_expert))
                slack = 1e-5 * float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=slack)
    assert not fits(ExpertMlps(up[:, :96], down, 6, 1, SQUARES))


def case_bits_of_a_pair() -> None:
    """The bits are the same alone, among others, in another row, and beside rows that are not
    finite."""

    def run(x: Tensor, choice: Tensor, matrix: DeviceMatrix) -> Tensor:
        found = products(x, matrix, 3, assign_tiles(choice, 3), halves=2)
        return found.unflatten(1, choice.shape)

    for inner in (40, 64):
        x, choice = random(9, 40, 256).to(FLOATS), chosen(4, 40, 3, 2)
        by_form = matrices(2 * 3 * inner, 256)
        by_form["float"] = DeviceMatrix.from_floats(random(1, 6 * inner, 256).to(FLOATS))
        forms = ["float", "int8", "int8 by 32", "int4 by 32", "fp8"]
        forms += ["int4 by 128 with zero points", "int8 by 32 with minima"]
        for form in forms:
            matrix = by_form[form]
            together = run(x, choice, matrix)
            own = slice(39, 40)
            assert torch.equal(run(x[own], choice[own], matrix), together[:, own]), form
            if form not in ("float", "int4 by 32"):
                continue  # forms differ within a tile only
            assert torch.equal(run(x.flip(0), choice.flip(0), matrix).flip(1), together), form
            assert torch.equal(run(x[5:18], choice[5:18], matrix), together[:, 5:18]), form
            broken = x[:12].clone()
            broken[3], broken[5, 2], broken[6] = torch.nan, torch.inf, 1e38
            kept, found = [0, 1, 2, 4, 7, 11], run(broken, choice[:12], matrix)
            assert torch.equal(found[:, kept], together[:, kept]), form


def case_combine() -> None:
    for tokens, used, outputs, parts in ((1, 1, 1, 1), (5, 8, 1300, 2), (3, 2, 64, 4)):
        given, weights = random(1, parts, tokens * used, outputs), random(2, tokens, used)
        found = combine(given, weights, torch.float32)
        expected = combine_reference(given, weights, torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
        alone = combine(given[:, :used].contiguous(), weights[:1], torch.float32)
        assert torch.equal(alone[0], found[0])


def compile_experts() -> None:
    for form, stored, group, extra in (
        ("float", "*bf16", 0, ""),
        ("int8", "*i8", 0, ""),
        ("int8", "*i8", 32, ""),
        ("int8", "*i8", 32, "minima"),
        ("fp8", "*u8", 128, ""),
        ("int4", "*u8", 32, ""),
        ("int4", "*u8", 32, "minima in blocks"),
        ("int4", "*u8", 128, "zero points"),
    ):
        kinds = dict(x="*bf16", values=stored, parts="*fp32", zero="*u8")
        kinds |= dict(tile_pairs="*i32", experts="*i32")
        is_half = (group == 32 or form == "int4") and not extra
        has_minimum, has_blocks = "minima" in extra, "blocks" in extra
        kinds["scale"] = "*i8" if has_blocks else "*fp16" if is_half else "*fp32"
        kinds |= dict(minimum=kinds["scale"], block_scale="*fp16", block_minimum="*fp16")
        for rows, is_aligned in ((32, True), (32, False)):
            if form in ("fp8", "int8") and is_aligned:
                continue  # as in `linear_cases`
            constants = dict(
                IS_ALIGNED=is_aligned,
                FORM=linear.FORMS[form],
                K=2048,
                GROUP=group,
                GROUPS=2048 // group if group else 1,
                STEP=min(group, 128) or 128,
                PER_PART=8,
                IS_EVEN=True,
                IS_WHOLE=True,
                HAS_ZERO=extra == "zero points",
                HAS_MINIMUM=has_minimum,
                PER_BLOCK=256 // group if has_blocks else 0,
                BM=rows,
                BN=linear.BLOCK_N,
                BK=linear.BLOCK_K,
                DOT=tl.bfloat16,
            )
            check_machine_code(
                kernels._multiply_experts,
                kinds,
                constants,
                registers=112 if is_aligned and not extra else 144,
                shared=100,
                warps=linear.warps_of(rows, has_minimum),
                stages=linear.STAGES,
                contains="HMMA",
                aligned=("row_stride", "inputs", *(("rows", "outputs") if is_aligned else ())),
            )
    kinds = dict(choice="*i64", tile_pairs="*i32", experts="*i32")
    check_machine_code(
        kernels._assign_tiles, kinds, dict(CHUNKS=1, BM=16, BP=128, EP=256, TP=128), registers=64
    )
    check_machine_code(
        kernels._assign_tiles, kinds, dict(CHUNKS=4, BM=32, BP=1024, EP=1024, TP=1024), registers=96
    )
    kinds = dict(parts="*fp32", weights="*bf16", out="*bf16")
    check_machine_code(
        kernels._combine, kinds, dict(PARTS=2, USED=8, BN=kernels.SUMMED), registers=96
    )
