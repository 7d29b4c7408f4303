"""The experts of a layer on torch: the MLPs that a router chose for each token.

`by_expert` is the reference. It asks which experts were chosen, for which the host waits, and has
operations of shapes that depend on the answer. The functions behind `on_device` have neither, so
that a pass with experts can be recorded as a CUDA graph:

- `grouped` sorts the pairs of token and slot by expert, and torch's grouped products read the
  experts that were chosen. They need floats in bfloat16 on a GPU.
- `gathered` copies the matrices of each pair's expert, which pays while pairs are few.
- `dense` computes all experts for all tokens. Reading the matrices takes longer than the products,
  up to `MAX_DENSE_TOKENS` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import reference
from forerun.kernels.device_matrix import CHUNK, DeviceMatrix

# (inputs [T, H], experts [T, k], factors on the inputs [T, k] or None, the layer's experts)
# -> [T, k, out]
ComputeExperts = Callable[[Tensor, Tensor, Tensor | None, "ExpertMlps"], Tensor]

# tokens up to which a card reads an expert's matrices longer than it multiplies with them: the
# operations that a card does while it reads a weight (200 or more in bfloat16) are 2 a token
MAX_DENSE_TOKENS = 256
# how often a matrix in floats moves through memory if it is gathered: read, written, read again;
# packed ones are dequantized, which costs the same for one expert and for all
GATHER_COST = 3


@dataclass(frozen=True, slots=True)
class ExpertMlps:
    """The MLPs of the E experts of a layer, of inner size I.

    Attributes:
        up: [halves * E * I, H]: the gates of all experts, then their ups; without gates one half.
        down: [E * out, I].
        up_bias: [halves, E, I]; down_bias: [E, out].
        activate: maps gates and ups, or ups alone, to what `down` reads.
        kind: the activation where gates are only activated and multiplied by ups; "" otherwise.
    """

    up: Tensor | DeviceMatrix
    down: Tensor | DeviceMatrix
    count: int
    halves: int
    activate: Callable[..., Tensor]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    kind: str = ""

    @property
    def inner(self) -> int:
        """I."""
        return int(self.up.shape[0]) // (self.halves * self.count)

    @property
    def outputs(self) -> int:
        """Outputs of each expert."""
        return int(self.down.shape[0]) // self.count


def by_expert(x: Tensor, choice: Tensor, factors: Tensor | None, mlps: ExpertMlps) -> Tensor:
    """Compute the chosen experts one after the other, each for its own tokens; a
    `ComputeExperts`."""
    out = x.new_zeros(*choice.shape, mlps.outputs)
    for expert in set(choice.flatten().tolist()):
        token, slot = (choice == expert).nonzero(as_tuple=True)
        own = x[token]
        if factors is not None:
            own = own * factors[token, slot, None].to(own.dtype)
        parts = [
            reference.linear(
                own,
                _rows(mlps.up, half * mlps.count + expert, mlps.inner),
                None if mlps.up_bias is None else mlps.up_bias[half, expert],
            )
            for half in range(mlps.halves)
        ]
        bias = None if mlps.down_bias is None else mlps.down_bias[expert]
        down = _rows(mlps.down, expert, mlps.outputs)
        out[token, slot] = reference.linear(mlps.activate(*parts), down, bias)
    return out


def on_device(x: Tensor, choice: Tensor, factors: Tensor | None, mlps: ExpertMlps) -> Tensor:
    """Compute the chosen experts by operations of fixed shapes; a `ComputeExperts`."""
    if can_group(mlps):
        return grouped(x, choice, factors, mlps)
    cost = 1 if isinstance(mlps.up, DeviceMatrix) else GATHER_COST
    if cost * choice.numel() <= mlps.count:
        return gathered(x, choice, factors, mlps)
    return dense(x, choice, factors, mlps)


def without_padding(choice: Tensor, is_padding: Tensor) -> Tensor:
    """Let padding use the experts of the first token, which are needed anyway.

    choice: int64 [T, k]; is_padding: bool [T, 1], not of the first token."""
    return choice[:1].where(is_padding, choice)


def can_group(mlps: ExpertMlps) -> bool:
    """Return True if torch's grouped products take these matrices and ask the host nothing."""
    matrices = (mlps.up, mlps.down)
    return all(
        isinstance(matrix, Tensor)
        and matrix.dtype == torch.bfloat16
        and matrix.shape[1] % 8 == 0  # rows begin at multiples of 16 bytes
        and matrix.is_cuda
        and torch.cuda.get_device_capability(matrix.device) >= (8, 0)
        for matrix in matrices
    )


def grouped(x: Tensor, choice: Tensor, factors: Tensor | None, mlps: ExpertMlps) -> Tensor:
    """Compute the pairs sorted by expert, by torch's grouped products; matrices in floats."""
    experts, order = choice.flatten().sort(stable=True)
    index = torch.arange(mlps.count, device=x.device)
    ends = torch.searchsorted(experts, index, right=True).to(torch.int32)
    own = input_pairs(x, choice, factors)[order]

    def product(own: Tensor, weight: Tensor | DeviceMatrix, half: int, rows: int) -> Tensor:
        assert isinstance(weight, Tensor)
        stacked = weight.view(-1, mlps.count, rows, weight.shape[1])[half]
        return F.grouped_mm(own, stacked.transpose(1, 2), offs=ends)

    parts = [product(own, mlps.up, half, mlps.inner) for half in range(mlps.halves)]
    if mlps.up_bias is not None:
        parts = [part + mlps.up_bias[half, experts] for half, part in enumerate(parts)]
    found = product(mlps.activate(*parts), mlps.down, 0, mlps.outputs)
    if mlps.down_bias is not None:
        found = found + mlps.down_bias[experts]
    return torch.empty_like(found).index_copy_(0, order, found).view(*choice.shape, -1)


def gathered(x: Tensor, choice: Tensor, factors: Tensor | None, mlps: ExpertMlps) -> Tensor:
    """Compute each pair of token and slot with a copy of its expert's matrices, some at a time."""
    own, experts = input_pairs(x, choice, factors)[:, None], choice.flatten()
    step = max(CHUNK // (x.shape[1] * mlps.inner * mlps.halves), 1)
    found = [
        _mlp(own[at : at + step], experts[at : at + step], mlps)
        for at in range(0, len(experts), step)
    ]
    return torch.cat(found).view(*choice.shape, -1)


def dense(x: Tensor, choice: Tensor, factors: Tensor | None, mlps: ExpertMlps) -> Tensor:
    """Compute all experts for all tokens, some experts at a time."""
    tokens, width = x.shape
    size = tokens * (width + mlps.halves * mlps.inner + mlps.outputs)
    if isinstance(mlps.up, DeviceMatrix):
        size += mlps.inner * max(mlps.halves * width, mlps.outputs)
    step = max(CHUNK // size, 1)
    if factors is not None:  # by token and expert
        factors = factors.new_zeros(tokens, mlps.count).scatter_(1, choice, factors)
    out = x.new_zeros(*choice.shape, mlps.outputs)
    token = torch.arange(tokens, device=x.device)[:, None]
    for first in range(0, mlps.count, step):
        count = min(step, mlps.count - first)
        own = x.expand(count, -1, -1)
        if factors is not None:
            own = own * factors[:, first : first + count].T[..., None].to(x.dtype)
        found = _mlp(own, slice(first, first + count), mlps)
        at = choice - first
        is_here = (at >= 0) & (at < count)
        out = torch.where(is_here[..., None], found[at.clamp(0, count - 1), token], out)
    return out


def input_pairs(x: Tensor, choice: Tensor, factors: Tensor | None) -> Tensor:
    """Return the inputs [T * k, H] of the pairs of token and slot."""
    own = x[:, None].expand(*choice.shape, x.shape[1])
    if factors is not None:
        own = own * factors[..., None].to(x.dtype)
    return own.reshape(-1, x.shape[1])


def _mlp(x: Tensor, experts: Tensor | slice, mlps: ExpertMlps) -> Tensor:
    """Compute n experts, each for inputs of its own: x [n, M, H] -> [n, M, out]"""

    def product(
        x: Tensor, weight: Tensor | DeviceMatrix, rows: int, bias: Tensor | None, half: int
    ) -> Tensor:
        matrices = _matrices(weight, experts, half * mlps.count, rows)
        found = torch.bmm(x, matrices.transpose(1, 2))
        return found if bias is None else found + bias[experts][:, None]

    biases = [None] * mlps.halves if mlps.up_bias is None else list(mlps.up_bias)
    parts = [product(x, mlps.up, mlps.inner, bias, half) for half, bias in enumerate(biases)]
    return product(mlps.activate(*parts), mlps.down, mlps.outputs, mlps.down_bias, 0)


def _matrices(
    weight: Tensor | DeviceMatrix, experts: Tensor | slice, shift: int, rows: int
) -> Tensor:
    """Return some of the matrices of `rows` rows that are stacked in a weight, [n, rows, in]; those
    of these experts behind `shift` others."""
    if isinstance(experts, slice):
        first, count = experts.start, experts.stop - experts.start
        return _rows(weight, shift + first, rows, count).view(count, rows, -1)
    if isinstance(weight, DeviceMatrix):
        index = torch.arange(rows, device=experts.device)
        return weight[(shift + experts)[:, None] * rows + index]
    return weight.view(-1, rows, weight.shape[1])[shift + experts]


def _rows(weight: Tensor | DeviceMatrix, index: int, rows: int, count: int = 1) -> Tensor:
    """Return the rows of `count` of the matrices of `rows` rows that are stacked in a weight, from
    the one at `index` on."""
    first = index * rows
    if isinstance(weight, DeviceMatrix):
        return weight.dequantize(first, count * rows)
    return weight[first : first + count * rows]
