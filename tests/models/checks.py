"""Shared by tests of models: refusals in one line, the logits of a text, transformers in float64,
and a decoder on torch that rounds as the native kernels do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.cache.attention import Segment
from forerun.errors import LoadError
from forerun.kernels import native, reference
from forerun.models.decoder import Decoder
from forerun.models.parameters import LinearWeights
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import tiny

CPU = torch.device("cpu")
EINSUM = torch.einsum
compiled = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")


def refused(call: Callable[[], object], path: Path, *words: str, longest: int = 400) -> None:
    """Assert that a call raises LoadError in one line that has all of `words` and fewer than
    `longest` characters, not counting the folder of `path`."""
    with pytest.raises(LoadError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message.replace(str(path.parent), "")) < longest
    for word in words:
        assert word in message


def ids(count: int) -> list[int]:
    """Return `count` random token ids, none of them special."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, tiny.VOCAB, (count,), generator=generator).tolist()


def read(runner: Runner, text: list[int], want: Sequence[int] | None = None) -> Tensor:
    """Return the logits after each token of a text, or after the positions in `want`."""
    assert runner.cache.pages.grow(0, len(text))
    chain = list(range(-1, len(text) - 1))
    wanted = list(range(len(text)) if want is None else want)
    return runner.forward([Segment(0, text, chain, wanted)]).logits


def logits(
    decoder: Decoder | NativeDecoder, text: list[int], want: Sequence[int] | None = None
) -> Tensor:
    return read(Runner(decoder, tokens=128, page=4, slots=1), text, want)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of `expected`."""
    return float((found.double() - expected).norm() / expected.norm())


class Float64Mode(TorchFunctionMode):
    """Mode in which transformers computes norms, softmax and rotations in float64, not in its fixed
    float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wide = {torch.float32: torch.float64}
        function = Tensor.double if function is Tensor.float else function
        swapped = [wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        named = {
            k: wide.get(v, v) if isinstance(v, torch.dtype) else v
            for k, v in (kwargs or {}).items()
        }
        return function(*swapped, **named)


def reference_logits(model: Any, text: list[int]) -> Tensor:
    """Return transformers' logits in float64 after each token."""
    with torch.no_grad(), Float64Mode():
        return model(torch.tensor([text]), use_cache=False).logits[0]


class RoundingDecoder(Decoder):
    """Decoder on torch that rounds activations as the native kernels do: to int8 in groups of 64,
    except in routers."""

    def forward(self, *args: Any, **options: Any) -> Any:
        linear = mock.patch.object(reference, "linear", _linear_rounded)
        with linear, mock.patch.object(torch, "einsum", _einsum_rounded):
            return super().forward(*args, **options)

    def _linear(self, x: Tensor, linear: LinearWeights) -> Tensor:
        layers = self.weights.layers
        experts = [layer.experts for layer in layers if layer.experts is not None]
        recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
        altup = [layer.altup for layer in layers if layer.altup is not None]
        exact = [matrix for e in experts for matrix in (e.router, e.shared_gate)]
        exact += [r.decay for r in recurrent]
        exact += [matrix for a in altup for matrix in (a.router, a.predict, a.correct)]
        if any(linear is matrix for matrix in exact):
            return torch.nn.functional.linear(x, linear.weight, linear.bias)
        return reference.linear(x, linear.weight, linear.bias)


def _linear_rounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(_round_in_groups(x), weight, bias)


def _einsum_rounded(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """Round the inputs of latent attention, where each head has its own matrix."""
    is_of_heads = equation.startswith("th")
    return EINSUM(equation, _round_in_groups(x) if is_of_heads else x, weight)


def _round_in_groups(x: Tensor) -> Tensor:
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((groups / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]
