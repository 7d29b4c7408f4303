"""Kernels for GPUs in Triton.

Their modules need the package `triton`, which comes with torch's CUDA builds; `problem` tells
whether they can be used."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import first_line
from forerun.sampling.params import Sampling


def problem(device: torch.device) -> str | None:
    """Return why the kernels of a decoder cannot be used on a device, None if they can: each was
    run once, and agrees with torch."""
    if device.type != "cuda":
        return f"they need a CUDA device, and this is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing"
    try:
        wrong = disagreements(device)
    except Exception as error:  # of the compiler or the driver: the caller goes on without
        return first_line(error)
    return f"on this device {', '.join(wrong)} disagree with torch" if wrong else None


def _random(seed: int, device: torch.device, default: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape, normally distributed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = default) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


def _integers(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that makes a tensor of integers, by default int64."""
    return functools.partial(torch.tensor, dtype=torch.int64, device=device)


def disagreements(device: torch.device) -> list[str]:
    """Return the names of those kernels whose results in bfloat16 are not those of torch."""
    from forerun.kernels import reference
    from forerun.kernels.device_matrix import DeviceMatrix
    from forerun.kernels.triton import fused, linear
    from forerun.kernels.triton.attention import Walk, attend

    numbers, integers = _random(0, device, torch.bfloat16), _integers(device)
    x, weight = numbers(17, 256), numbers(70, 256) / 16
    parts, norm = numbers(2, 3, 256, dtype=torch.float32), numbers(256, dtype=torch.float32)
    stream, angles, rows = numbers(3, 256), numbers(5, 1, 16), integers([6, 2, 0])
    rotation, positions = (angles.cos(), angles.sin()), integers([4, 0, 3])

    def turned(run: Callable[..., Tensor]) -> Tensor:
        keys, values = torch.zeros(2, 8, 2, 32, dtype=x.dtype, device=device)
        q = run(parts, rotation, positions, rows, keys, values)
        return torch.cat((q, keys[rows], values[rows]), dim=1)

    int8 = DeviceMatrix.from_rounded("int8", weight, x.dtype)
    int4 = DeviceMatrix.from_rounded("int4", weight, x.dtype)
    bits, scale = weight.to(torch.float8_e4m3fn).view(torch.uint8), numbers(70, 8) / 64
    fp8 = DeviceMatrix.from_values("fp8", bits, numbers(70, 2), dtype=x.dtype)
    nibbles = (bits & 15).view(torch.int8)
    minima = DeviceMatrix.from_values("int4", nibbles, scale, minimum=scale, dtype=x.dtype)
    q, keys, values = numbers(1, 4, 32), numbers(8, 2, 32), numbers(8, 2, 32)
    last, direct, first = (integers([n], dtype=torch.int32) for n in (2, 2, 0))
    walk = Walk(last, direct, rows[None, :2].contiguous(), rows[2:], first)
    results: dict[str, tuple[Tensor, Tensor]] = {
        "linear": (
            linear.linear(x, DeviceMatrix.from_floats(weight)),
            reference.linear(x, weight),
        ),
        "linear of int8": (linear.linear(x, int8), reference.linear(x, int8)),
        "linear of int4": (linear.linear(x, int4), reference.linear(x, int4)),
        "linear of fp8": (linear.linear(x, fp8), reference.linear(x, fp8)),
        "linear with minima": (linear.linear(x, minima), reference.linear(x, minima)),
        "add_norm": (
            fused.add_norm(stream, parts, norm, 1e-5)[1],
            fused.add_norm_reference(stream, parts, norm, 1e-5)[1],
        ),
        "gate": (
            fused.gate(parts, "silu", x.dtype),
            fused.gate_reference(parts, "silu", x.dtype),
        ),
        "rotate_and_store": (
            turned(fused.rotate_and_store),
            turned(fused.rotate_and_store_reference),
        ),
        "attend": (
            attend(q, keys, values, walk, 0.2)[None],
            reference.attention(q[None], keys[None, rows], values[None, rows], None, 0.2),
        ),
    }
    results |= _results_of_experts(device) | _results_of_rounds(device)
    results |= _results_of_states(device)
    return [
        name
        for name, (found, expected) in results.items()
        if not torch.allclose(found.float(), expected.float(), rtol=2**-5, atol=2**-5)
    ]


def _results_of_experts(device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the kernels for experts compute, and what they should."""
    from forerun.kernels import reference
    from forerun.kernels.device_matrix import DeviceMatrix
    from forerun.kernels.experts import ExpertMlps, by_expert
    from forerun.kernels.triton import experts

    numbers = _random(2, device, torch.bfloat16)

    def activate(gates: Tensor, ups: Tensor) -> Tensor:
        return reference.gate(gates, ups, "silu")

    up, down, x = numbers(2 * 3 * 128, 128) / 16, numbers(3 * 128, 128) / 16, numbers(18, 128)
    choice = torch.tensor([[2, 0], [0, 1], [2, 1]] * 6, device=device)
    floats = ExpertMlps(up, down, 3, 2, activate, kind="silu")
    rounded = [DeviceMatrix.from_rounded("int8", each, x.dtype) for each in (up, down)]
    int8 = replace(floats, up=rounded[0], down=rounded[1])
    results = {
        name: (experts.compute_experts(x, choice, None, mlps), by_expert(x, choice, None, mlps))
        for name, mlps in (("experts", floats), ("experts of int8", int8))
    }
    parts, weights = numbers(2, 36, 128).float(), numbers(18, 2).float()
    results["combine"] = (
        experts.combine(parts, weights, x.dtype),
        experts.combine_reference(parts, weights, x.dtype),
    )
    return results


def _results_of_rounds(device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the kernels behind a pass compute, and what they should."""
    from forerun.kernels import successors as successor_twins
    from forerun.kernels.draw import DrawParameters, draw_on_device
    from forerun.kernels.successors import Predictions, TableTensors, TreeRoots
    from forerun.kernels.triton import successors
    from forerun.kernels.triton.compact import compact
    from forerun.kernels.triton.draw import draw_tokens
    from forerun.kernels.triton.walk import walk

    integers = _integers(device)
    logits = _random(1, device, torch.float32)(3, 300)
    by, streams = [Sampling(0.8, 20, 0.9), Sampling(1.0), Sampling()], [5, 6, 7]
    drawn = draw_tokens(logits, DrawParameters.upload(by, streams, 300, device))
    # a tree of five nodes: the target's tokens lead from node 0 to 2 and 4
    nodes, target = integers([9, 4, 5, 6, 8]), integers([5, 1, 8, 1, 7])
    parents, first, count = (
        integers(each, dtype=torch.int32) for each in ([-1, 0, 0, 1, 2], [0], [5])
    )
    walked = walk(nodes, parents, target, first, count, 5)
    tables = [TableTensors.empty(64, device) for _ in range(2)]
    seen = Predictions.of(nodes, target, target >= 0, torch.cat((logits, logits[:2])))
    half = torch.full((1,), 0.5, dtype=torch.float64, device=device)
    one, rates = integers([1]), half.expand(1, 16).contiguous()
    roots = TreeRoots(nodes[:1], target[:1], one, one, half, 3 * one, 4 * one, rates)
    successors.learn(tables[0], seen)
    successor_twins.learn(tables[1], seen)
    grown = successors.grow(tables[:1], roots, 4, False).tokens
    rows = torch.arange(48.0, device=device).view(2, 8, 3)
    moved = rows.clone()
    moved[:, 1], moved[:, 2] = rows[:, 2], rows[:, 4]
    compact(rows, integers([[0, 1, 2, 3, 4]]), integers([[0, 2, 4]]), integers([3]))
    return {
        "draw": (drawn, draw_on_device(logits, by, streams)),
        "walk": (walked.tokens[0, :3], integers([5, 8, 7])),
        "compact": (rows, moved),
        "successors": (grown, successor_twins.grow(tables[1:], roots, 4, False).tokens),
    }


def _results_of_states(device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the kernels of recurrent layers compute, and what they should: one pending token
    and two behind it, by the delta rule with two heads of size 16."""
    from forerun.kernels import reference
    from forerun.kernels.triton.recurrent import Heads, KernelWeights, Memory, Runs, recur

    numbers, integers = _random(2, device, torch.float32), _integers(device)
    channels, record, states = 64, 116, 2 * 16 * 16
    half = channels + 2 * record  # with the one earlier input of a convolution of two taps
    data = numbers(1, states + 2 * half) / 4
    inputs, decays, weight = numbers(2, channels), numbers(2, 4), numbers(channels, 2)
    bias, rate = numbers(2), -numbers(2).abs()
    pending = data[0, states + channels :][:record].clone()
    earlier, key, change, decay, _ = torch.split(pending, [channels, 16, 32, 2, 2])
    state = reference.decay_state(data[0, :states].view(2, 16, 16), decay)
    state = reference.change_state(state, key.expand(2, 16), change.view(2, 16))
    rows = torch.stack((earlier.expand_as(inputs), inputs), dim=1)
    convolved = torch.nn.functional.silu(reference.convolve(rows, weight, None))
    queries, keys, values = torch.split(convolved, [16, 16, 32], dim=1)
    queries, keys = reference.unit(queries) / 4, reference.unit(keys)
    steps = torch.nn.functional.softplus(decays[:, :2] + bias)
    outputs = []
    for i in range(2):
        decayed = reference.decay_state(state, torch.exp(rate * steps[i]))
        own, beta = keys[i].expand(2, 16), torch.sigmoid(decays[i, 2:])
        moved = reference.delta_change(decayed, own, values[i].view(2, 16), beta)
        after = reference.change_state(decayed, own, moved)
        outputs.append(reference.read_state(after, queries[i].expand(2, 16)).flatten())
    zero, one = integers([0]), integers([1])
    # the pending token's input is number 3: behind two tokens, and the one before it
    runs = Runs(
        zero,
        zero,
        one,
        integers([2]),
        one,
        integers([0, 0]).view(1, 2),
        integers([3, 3]),
        integers([3]),
    )
    heads = Heads("delta", 2, 1, 16, 2, 16, tiled=False)
    memory = Memory(data, 0, states, half, channels, record)
    weights = KernelWeights(weight, None, bias, rate, None)
    found = recur(inputs, decays, weights, heads, memory, runs, is_tree=True)
    return {
        "recurrent layers": (16 * found, 16 * torch.stack(outputs)),  # which are small
        "recurrent states": (data[0, :states], state.flatten()),
    }
