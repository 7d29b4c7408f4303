#!/usr/bin/env python3
"""What one round of a head costs beside a pass of one row over the default model, whatever its
drafts are worth.

    python scripts/round_cost.py                      # the model's own file
    python scripts/round_cost.py --quantization int8 --depth 4

`eagle3` is the head that comes with forerun; the others are untrained: `block` has two layers and a
Markov head of rank 64, `medusa` one residual layer a head, and both say 8,192 tokens; `mlp` (levels
tied) says all, as published ones do. Rounds and passes take turns; medians, and the median of their
quotients."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from forerun import LLM, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.block.formats import BlockConfig, MarkovShape
from forerun.draft.block.module import BlockHead
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.medusa import MedusaHeads, MedusaProposer, MlpConfig, MlpSpeculator
from forerun.draft.proposer import Proposer, Row, view_of
from forerun.draft.registry import BUNDLED
from forerun.models.hub import DEFAULT
from forerun.runtime.native import NativeDecoder
from forerun.train.recipes.block import layers_like, spread
from forerun.verify import Noise

BEFORE, SAID = 200, 8192  # tokens of the text in the caches; tokens that the block drafter says


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=150)
    asked = parser.parse_args()
    draft = f"eagle3:{BUNDLED / DEFAULT}"
    llm = LLM(draft=draft, dtype=asked.dtype, quantization=asked.quantization, kv_tokens=1024)
    torch.manual_seed(0)
    for name, drafter in [
        ("eagle3", llm.engine.proposers[llm.draft]),
        *untrained(llm, asked.depth),
    ]:
        for temperature in (0.0, 0.8):
            pairs = measure(
                llm, drafter, SamplingParams(temperature=temperature), asked.depth, asked.rounds
            )
            rounds, passes = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            share = statistics.median(a / b for a, b in pairs)
            print(
                f"{name:6} depth {asked.depth}, temperature {temperature:g}: a round {rounds:.2f} ms"
                f" is {share:.2f} of a pass of {passes:.2f} ms ({llm.decoder.precision})",
                flush=True,
            )


def untrained(llm: LLM, depth: int) -> Iterator[tuple[str, Proposer]]:
    """Drafters that say anything, by name."""
    c, view = llm.decoder.config, view_of(llm.decoder)
    block = BlockConfig(
        layer=layers_like(c, 2), target_hidden=c.hidden, aux_hidden_layers=spread(c.layers, 3), block=depth, mask_token=0,
        draft_vocab=SAID, own_head=True, markov=MarkovShape(64),
    )  # fmt: skip
    yield (
        "block",
        BlockProposer(BlockHead(block).requires_grad_(False), view, tokens=1024, page=16, slots=4),
    )
    medusa = MedusaHeads(depth, 1, c.hidden, c.vocab, said=SAID)
    medusa.token_map = torch.arange(SAID)
    mlp = MlpConfig(
        levels=depth, hidden=c.hidden, inner=c.hidden, vocab=c.vocab, tied=True, scaled=True
    )
    levels = {"medusa": medusa, "mlp": MlpSpeculator(mlp)}
    yield from (
        (name, MedusaProposer(name, heads.requires_grad_(False), view))
        for name, heads in levels.items()
    )


def measure(
    llm: LLM, drafter: Proposer, params: SamplingParams, depth: int, rounds: int
) -> list[tuple[float, float]]:
    """Seconds of a round and of the pass after it."""
    target, c = llm.engine.target, llm.decoder.config
    drafter.reset()
    text = torch.randint(3, c.vocab, (BEFORE + 2 * rounds + 20,)).tolist()
    show(drafter, c.hidden, 0, BEFORE - 1, text)
    target.cache.open(0, text[:BEFORE])
    target.cache.pages.grow(0, BEFORE + 1)
    assert isinstance(target.decoder, NativeDecoder)
    target.decoder.forward(
        [Segment(0, text[:BEFORE], list(range(-1, BEFORE - 1)), [])], target.cache
    )
    target.cache.commit(0, range(BEFORE))
    one, found = Segment(0, [text[BEFORE]], [-1], [0]), []
    for at in range(BEFORE, BEFORE + 2 * (rounds + 5), 2):
        row = Row(0, text[:at], params, Noise(1, at - 1), depth)
        found.append(
            (timed(drafter.propose, [row]), timed(target.decoder.forward, [one], target.cache))
        )
        show(drafter, c.hidden, at - 1, 2, text)
    target.cache.close(0)
    return found[5:]


def show(drafter: Proposer, hidden: int, start: int, count: int, text: list[int]) -> None:
    """States of `count` tokens, which are any."""
    if start == 0:
        drafter.open(0, text[:1])
    drafter.observe(
        0, start, {boundary: torch.randn(count, hidden) for boundary in drafter.aux_hidden_layers}
    )


def timed(do: Callable[..., object], *given: object) -> float:
    start = time.perf_counter()
    do(*given)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
