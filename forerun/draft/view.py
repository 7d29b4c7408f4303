"""What a drafter may know of its target besides hidden states: sizes, the last norm, how to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels import reference as kernels
from forerun.models.decoder import Decoder
from forerun.native import NativeDecoder


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target as its drafters see it.

    Attributes:
        hidden, layers, vocab: its sizes.
        normalise: the norm before its head, [T, H] -> float32 [T, H].
        device: where states come from.
        form: in which its drafters compute natively (their precision never changes the text); None is torch.
    """

    hidden: int
    layers: int
    vocab: int
    normalise: Callable[[Tensor], Tensor]
    device: torch.device
    form: str | None


def view_of(decoder: Decoder | NativeDecoder, form: str | None = "int8") -> TargetView:
    """The view of a loaded target; `form` for its drafters where the native kernels run."""
    config, norm = decoder.config, decoder.weights.norm

    def normalise(x: Tensor) -> Tensor:
        if norm.bias is not None:
            return kernels.layer_norm(x.float(), norm.weight, norm.bias, config.norm_eps)
        return kernels.rms_norm(x.float(), norm.weight, config.norm_eps)

    is_native = isinstance(decoder, NativeDecoder)
    return TargetView(
        config.hidden, config.layers, config.vocab, normalise, decoder.device, form if is_native else None
    )
