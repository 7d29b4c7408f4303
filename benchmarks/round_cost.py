"""Compare the cost of one draft of each kind of head with a forward pass of one row.

    python -m benchmarks.round_cost                      # the model's own file
    python -m benchmarks.round_cost --quantization int8 --depth 4

`eagle3` is the head that comes with forerun; the others are untrained: `block` has two layers and a
Markov head of rank 64, `medusa` one residual layer per head, both over 8,192 tokens; `mlp` (tied
levels) over all tokens, as published ones. Drafts and passes take turns; medians, and the median of
ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.command import add_engine_options, load, parser, run
from forerun import LLM, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.block.formats import BlockConfig, MarkovShape
from forerun.draft.block.module import BlockHead
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.head_config import MlpConfig
from forerun.draft.kinds import BUNDLED
from forerun.draft.medusa import MedusaHeads, MedusaProposer, MlpSpeculator
from forerun.draft.proposer import DraftRequest, Proposer, view_of
from forerun.models.hub import DEFAULT
from forerun.runtime.native import NativeDecoder
from forerun.train.recipes.block import layers_like, spread
from forerun.verify import Noise

CONTEXT = 200  # tokens in the caches before the first draft
DRAFT_VOCAB = 8192
WARM_UP = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    add_engine_options(options)
    options.add_argument("--depth", type=int, default=4)
    options.add_argument("--rounds", type=int, default=150)
    given = options.parse_args(arguments)
    llm = load(given, draft=f"eagle3:{BUNDLED / DEFAULT}", kv_tokens=1024)
    torch.manual_seed(0)
    heads = [("eagle3", llm.engine.proposers[llm.draft]), *untrained(llm, given.depth)]
    for name, drafter in heads:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature)
            pairs = measure(llm, drafter, params, given.depth, given.rounds)
            drafting, forward = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            share = statistics.median(a / b for a, b in pairs)
            print(
                f"{name:6} depth {given.depth}, temperature {temperature:g}: a draft of"
                f" {drafting:.2f} ms is {share:.2f} of a pass of {forward:.2f} ms"
                f" ({llm.decoder.precision})",
                flush=True,
            )


def untrained(llm: LLM, depth: int) -> Iterator[tuple[str, Proposer]]:
    """Yield untrained drafters by name."""
    c = llm.decoder.config
    view = view_of(llm.decoder)
    block = BlockConfig(
        layer=layers_like(c, 2),
        target_hidden=c.hidden,
        aux_hidden_layers=spread(c.layers, 3),
        block=depth,
        mask_token=0,
        draft_vocab=DRAFT_VOCAB,
        own_head=True,
        markov=MarkovShape(64),
    )
    head = BlockHead(block).requires_grad_(False)
    yield "block", BlockProposer(head, view, tokens=1024, page=16, slots=4)
    medusa = MedusaHeads(depth, 1, c.hidden, c.vocab, draft_vocab=DRAFT_VOCAB)
    medusa.token_map = torch.arange(DRAFT_VOCAB)
    yield "medusa", MedusaProposer("medusa", medusa.requires_grad_(False), view)
    shape = MlpConfig(
        levels=depth, hidden=c.hidden, inner=c.hidden, vocab=c.vocab, tied=True, scaled=True
    )
    yield "mlp", MedusaProposer("mlp", MlpSpeculator(shape).requires_grad_(False), view)


def measure(
    llm: LLM, drafter: Proposer, params: SamplingParams, depth: int, rounds: int
) -> list[tuple[float, float]]:
    """Return the seconds of each draft and of the forward pass after it."""
    target = llm.engine.target
    c = llm.decoder.config
    decoder = target.decoder
    assert isinstance(decoder, NativeDecoder)
    drafter.reset()
    text = torch.randint(3, c.vocab, (CONTEXT + 2 * rounds + 20,)).tolist()
    drafter.open(0, text[:1])
    observe(drafter, c.hidden, 0, CONTEXT - 1)
    target.cache.open(0, text[:CONTEXT])
    target.cache.pages.grow(0, CONTEXT + 1)
    decoder.forward([Segment.chain(0, text[:CONTEXT])], target.cache)
    target.cache.commit(0, range(CONTEXT))
    one = Segment(0, [text[CONTEXT]], [-1], [0])
    found = []
    for at in range(CONTEXT, CONTEXT + 2 * (rounds + WARM_UP), 2):
        row = DraftRequest(0, text[:at], params, Noise(1, at - 1), depth)
        drafting = seconds_of(drafter.propose, [row])
        found.append((drafting, seconds_of(decoder.forward, [one], target.cache)))
        observe(drafter, c.hidden, at - 1, 2)
    target.cache.close(0)
    return found[WARM_UP:]


def observe(drafter: Proposer, hidden: int, start: int, count: int) -> None:
    """Give a drafter random hidden states of `count` tokens."""
    states = {layer: torch.randn(count, hidden) for layer in drafter.aux_hidden_layers}
    drafter.observe(0, start, states)


def seconds_of(function: Callable[..., object], *arguments: object) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


if __name__ == "__main__":
    run(main)
