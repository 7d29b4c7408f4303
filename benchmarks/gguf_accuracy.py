"""Measure the error of the native kernels against a GGUF file's dequantized weights.

    L=/usr/share/common-licenses
    python -m benchmarks.gguf_accuracy $L/GPL-3 $L/Artistic docs/exactness.md

For the first characters of each text: the change in perplexity and the relative error of the logits
against dequantized weights in float32, of the default model as it is stored, and of the float32
weights with the inputs of every layer rounded to 8 bits in groups of 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.command import parser, run
from forerun.cache.attention import Segment
from forerun.kernels import native, reference
from forerun.load import load_tokenizer
from forerun.models.config import load_config
from forerun.models.decoder import Decoder
from forerun.models.hub import find_model
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner

CONTEXT, GROUP = 2048, 64
exact_linear = reference.linear


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose input is rounded as in the native kernels."""
    groups = x.reshape(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return exact_linear(((groups / scale).round() * scale).reshape(x.shape), weight, bias)


def logits(decoder: Decoder | NativeDecoder, ids: list[int]) -> Tensor:
    """Return the logits of every position. float64 [tokens, V]"""
    runner = Runner(decoder, tokens=len(ids) + 64, page=16, slots=1)
    runner.cache.pages.grow(0, len(ids))
    segment = Segment.chain(0, ids, range(len(ids)))
    return runner.forward([segment]).logits.double()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("texts", nargs="+", type=Path, help="text files")
    options.add_argument("--characters", type=int, default=3500, help="of each text")
    given = options.parse_args(arguments)
    path = find_model(None)
    config = load_config(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    native.start()
    stored = NativeDecoder(config, path, "bfloat16", CONTEXT, keep=True)
    dense = NativeDecoder(config, path, "float32", CONTEXT)
    on_torch = Decoder(config, path, torch.float32, torch.device("cpu"), CONTEXT)
    for name in given.texts:
        ids = tokenizer.encode(name.read_text()[: given.characters])
        expected = logits(dense, ids)
        found = {"as stored": logits(stored, ids)}
        reference.linear = rounded_linear  # the decoder has no option for it
        found["float32, inputs rounded"] = logits(on_torch, ids)
        reference.linear = exact_linear
        following = torch.tensor(ids[1:])
        base = cross_entropy(expected[:-1], following)
        for what, own in found.items():
            change = math.expm1(cross_entropy(own[:-1], following) - base)
            error = (own - expected).norm() / expected.norm()
            print(
                f"{name} ({len(ids)} tokens), {what}: perplexity {change:+.2%},"
                f" error of logits {error:.2%}"
            )


if __name__ == "__main__":
    run(main)
