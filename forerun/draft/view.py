"""What a drafter may know of its target besides hidden states: sizes, embedding, last norm, how to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.parts import PartDecoder
from forerun.native import NativeDecoder
from forerun.packed import Linear, Packed


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target as its drafters see it.

    Attributes:
        config: its shape.
        hidden, layers, vocab: its sizes.
        context: most tokens of one request.
        table, scale: the embedding [V, H] as it is stored, dense or packed, and what its rows are multiplied with.
        normalise: the norm before its head, [T, H] -> [T, H] in float32 at least.
        head: its head: states that are normalised, [T, H] -> logits [T, V] in float32 at least.
        packed, softcap: its head on the native kernels, None where they do not run, and what bounds its logits, or 0.
        device: where states come from.
        form: in which its drafters compute natively (their precision never changes the text); None is torch.
    """

    config: ModelConfig
    hidden: int
    layers: int
    vocab: int
    context: int
    table: Tensor | Packed
    scale: float
    normalise: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    packed: Packed | None
    softcap: float
    device: torch.device
    form: str | None

    def embed(self, ids: Tensor) -> Tensor:
        """What enters its first layer for a token, position apart. ids [T] -> float32 [T, H]"""
        return self.table[ids].float() * self.scale

    def __deepcopy__(self, _: Any) -> TargetView:
        return self  # a copy of a drafter borrows from the same target


def view_of(decoder: Decoder | NativeDecoder, form: str | None = "int8") -> TargetView:
    """The view of a loaded target; `form` for its drafters where the native kernels run."""
    config, norm = decoder.config, decoder.weights.norm

    def normalise(x: Tensor) -> Tensor:
        return kernels.norm(_precise(x), norm.weight, norm.bias, config.norm_eps)

    multiply = _product(decoder)

    def head(x: Tensor) -> Tensor:
        logits, cap = multiply(x), config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    return TargetView(
        config=config,
        hidden=config.hidden,
        layers=config.layers,
        vocab=config.vocab,
        context=decoder.context,
        table=_Divided() if isinstance(decoder, PartDecoder) else decoder.weights.embed,  # type: ignore[arg-type]
        scale=config.embed_scale,
        normalise=normalise,
        head=head,
        packed=decoder.weights.head if isinstance(decoder, NativeDecoder) else None,  # type: ignore[arg-type]
        softcap=config.logit_softcap or 0.0,
        device=decoder.device,
        form=form if isinstance(decoder, NativeDecoder) else None,
    )


class _Divided:
    """The embedding and the head of a target that several processes have parts of: no drafter can share them."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "this drafter shares the embedding or the head of its target, of which each process has a part: draft with"
            " suffix, recycle, retrieval or a draft model, or leave tensor_parallel out"
        )

    __getitem__ = __call__ = __getattr__ = _refuse


def _product(decoder: Decoder | NativeDecoder) -> Callable[[Tensor], Tensor]:
    """The product with the target's own head, its weights shared."""
    if isinstance(decoder, PartDecoder):
        return _Divided()
    if isinstance(decoder, NativeDecoder):
        packed: Any = decoder.weights.head
        return Linear.of(packed)
    weight = decoder.weights.head.weight
    return lambda x: _precise(kernels.linear(x.to(weight.dtype), weight))


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
