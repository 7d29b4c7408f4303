"""How near the native kernels are to a file's dequantised weights, and how much of that rounding
activations explains.

    L=/usr/share/common-licenses; python scripts/gguf_accuracy.py $L/GPL-3 $L/Artistic
    docs/exactness.md

For the first 3,500 characters of each text: perplexity and root mean square difference of the
logits (over that of the logits) against the dequantised weights in float32, of the default model as
stored, and of those float32 weights with the inputs of every layer rounded to 8 bits in groups of
64."""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.kernels import native, reference
from forerun.load import load_tokenizer
from forerun.models.config import load_config
from forerun.models.decoder import Decoder
from forerun.models.hub import find_model
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner

CONTEXT, CHARACTERS, GROUP = 2048, 3500, 64
exact_linear = reference.linear


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose input is rounded as the native kernels do."""
    groups = x.reshape(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return exact_linear(((groups / scale).round() * scale).reshape(x.shape), weight, bias)


def logits(decoder: Decoder | NativeDecoder, ids: list[int]) -> Tensor:
    """Of every position. float64 [N, V]"""
    runner = Runner(decoder, tokens=len(ids) + 64, page=16, slots=1)
    runner.cache.pages.grow(0, len(ids))
    return runner.forward(
        [Segment(0, ids, list(range(-1, len(ids) - 1)), list(range(len(ids))))]
    ).logits.double()


def main() -> None:
    path = find_model(None)
    config, tokenizer = load_config(path), load_tokenizer(path)
    assert tokenizer is not None
    native.start()
    stored = NativeDecoder(config, path, "bfloat16", CONTEXT, keep=True)
    dense = NativeDecoder(config, path, "float32", CONTEXT)
    on_torch = Decoder(config, path, torch.float32, torch.device("cpu"), CONTEXT)
    for name in sys.argv[1:]:
        ids = tokenizer.encode(Path(name).read_text()[:CHARACTERS])
        truth = logits(dense, ids)
        found = {"as stored": logits(stored, ids)}
        reference.linear = rounded_linear
        found["float32, inputs rounded"] = logits(on_torch, ids)
        reference.linear = exact_linear
        base = torch.nn.functional.cross_entropy(truth[:-1], torch.tensor(ids[1:]))
        for what, said in found.items():
            more = torch.nn.functional.cross_entropy(said[:-1], torch.tensor(ids[1:])) - base
            off = (said - truth).norm() / truth.norm()
            print(
                f"{name} ({len(ids)} tokens), {what}: perplexity {math.expm1(more):+.2%}, logits off by {off:.2%}"
            )


if __name__ == "__main__":
    main()
