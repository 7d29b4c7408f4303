"""Engines over tiny models for the tests, in float64, with every proposer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forerun.draft.assistant import AssistantProposer, load_assistant
from forerun.draft.block.formats import MarkovShape
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.compose import InTurn, OverlapProposer
from forerun.draft.draft_model import Cascade, DraftModel, Pard
from forerun.draft.eagle.module import EagleModule
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.medusa import MedusaProposer, MedusaStyleHeads
from forerun.draft.ngram import Lookahead, NGram
from forerun.draft.proposer import DraftRequest, Proposer, view_of
from forerun.draft.recycle import Recycle
from forerun.draft.suffix import Suffix
from forerun.engine.acceptance import Acceptance, DraftOption
from forerun.engine.depth import BatchState, DepthPolicy
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.runtime.captured import CudaGraphs
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Event
from tests import tiny

REQUESTS = 5  # of a run: prompts of each kind at each temperature
MANY = 8  # requests of a run with drafts that are seldom accepted
SMALL = 80  # tokens of a KV pool that holds about two of these requests
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 5,
}  # fmt: skip
PROPOSERS = (
    "ngram", "suffix", "recycle", "lookahead", "model", "shortlist", "tree", "medusa", "mlp", "eagle", "eagle1", "parallel",
    "pard", "mtp", "block", "both", "cascade", "ahead",
)  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {  # further kinds of block drafters
    "windows": {"layer": WINDOWS},
    "gated": {"markov": MarkovShape(5, "gated")},
    "rnn": {"markov": MarkovShape(5, "rnn"), "sample_from_anchor": False},
    "windows, causal": {"layer": WINDOWS, "window_causal": True},
}
ASSISTANTS = ("assistant", "ordered assistant")  # for Gemma 4 only
HEADS = ("medusa", "mlp", "eagle", "eagle1", "parallel", "mtp", "block")


class EarlyOverlap(OverlapProposer):
    """Finishes overlapped drafting before the forward pass, since that of a tiny target is short."""

    def begin_overlap(self, rows: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        super().begin_overlap(rows, drafts)
        self.finish()


class Eager(DepthPolicy):
    """A policy that drafts for all requests and verifies all of a copy, whatever it costs."""

    def choose(self, options: Sequence[DraftOption], batch: BatchState) -> list[int]:
        return [min(3, option.limit) for option in options]

    def cut_copy(
        self, kind: str, acceptance: Acceptance, copied: int, *args: Any, **kwargs: Any
    ) -> tuple[int, float]:
        return copied, super().cut_copy(kind, acceptance, copied, *args, **kwargs)[1]


def engine(
    family: str = "llama",
    drafts: Sequence[str] = PROPOSERS,
    *,
    rule: str = "match",
    tokens: int = 1024,
    chunk: int = 64,
    page: int = 4,
    slots: int = 8,
    width: int = 2,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    form: str = "",
) -> Engine:
    """Return an engine with the proposers of `drafts`; native kernels run GGUF files and `form`s.

    Drafts of ngram, suffix, model (chains), shortlist (the same with a shortlist) and tree (width
    3) are often accepted, those of pard at the first token, of `HEADS` and `BLOCKS` sometimes. both
    is ngram, then an EAGLE-3 head. `width` is that of pard and heads, if the rule accepts trees.
    """
    paths = tiny.family(family), tiny.drafter(family)
    native = paths[0].is_file() or bool(form)
    takes_trees = rule not in ("token", "block")
    width, room = width if takes_trees else 1, {"tokens": tokens, "page": page, "slots": slots}

    def decoder(path: Path, shortlist: Sequence[int] | None = None) -> Any:
        if native:
            return tiny.native_decoder(path, shortlist and tuple(shortlist), form or "bfloat16")
        return tiny.decoder(path, dtype, device, *([shortlist] if shortlist else []))

    def runner(made: object) -> Runner:
        graphs = CudaGraphs() if device == "cuda" else None
        return Runner(  # type: ignore[arg-type]
            made, tokens=tokens, page=page, slots=slots, graphs=graphs
        )

    target = decoder(paths[0])
    view, main = view_of(target), runner(target)

    def model(shortlist: Sequence[int] | None = None, width: int = 1) -> DraftModel:
        return DraftModel(runner(decoder(paths[1], shortlist)), tiny.VOCAB, width=width)

    def medusa_style(name: str, heads: MedusaStyleHeads) -> MedusaProposer:
        return MedusaProposer(name, heads, view, width)

    def eagle_style(
        name: str, head: EagleModule, kind: type[EagleProposer] = EagleProposer, width: int = width
    ) -> EagleProposer:
        return kind(name, head, view, **room, width=width)

    def eagle(width: int = width) -> EagleProposer:
        return eagle_style("eagle3", tiny.eagle(tiny.eagle_config(family)), width=width)

    def block(**changes: Any) -> BlockProposer:
        head = tiny.block(tiny.block_config(family, **changes))
        return BlockProposer(head, view, **room, width=width)

    def assistant(ordered: bool) -> AssistantProposer:
        made = load_assistant(tiny.assistant(family, ordered)[1], view)
        return AssistantProposer("mtp", made, view, main, width)

    make: dict[str, Callable[[], Proposer]] = {
        "ngram": lambda: NGram(longest=3, shortest=1),
        "suffix": lambda: Suffix(shortest=1),
        "recycle": lambda: Recycle(width=3 if takes_trees else 1),
        "lookahead": lambda: Lookahead(window=6, ngram=3, pool=4),
        "model": model,
        "shortlist": lambda: model(tiny.SHORTLIST),
        "tree": lambda: model(width=3 if takes_trees else 1),
        "pard": lambda: Pard(runner(decoder(paths[1])), 3, tiny.VOCAB, width=width),
        "medusa": lambda: medusa_style("medusa", tiny.medusa(family)),
        "mlp": lambda: medusa_style("mlp", tiny.mlp(family)),
        "eagle": eagle,
        "eagle1": lambda: eagle_style("eagle", tiny.eagle1(family)),
        "parallel": lambda: eagle_style("eagle3", tiny.parallel(family), ParallelEagleProposer),
        "mtp": lambda: eagle_style("mtp", tiny.mtp(family)),
        "block": block,
        **{name: functools.partial(block, **kind) for name, kind in BLOCKS.items()},
        "assistant": lambda: assistant(False),
        "ordered assistant": lambda: assistant(True),
        "ahead": lambda: EarlyOverlap(model()),
        "cascade": lambda: Cascade(make["ngram"](), model()),
        "both": lambda: InTurn((make["ngram"](), eagle(width=1))),
    }
    proposers = {name: make[name]() for name in drafts if name != "off"}
    return Engine(main, proposers, rule=rule, chunk=chunk)


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of many lengths; some repeat themselves, some begin alike."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(3, tiny.VOCAB, (9,), generator=generator).tolist()
    result = []
    for i in range(count):
        own = torch.randint(3, tiny.VOCAB, (2 + 5 * i,), generator=generator).tolist()
        result.append(common + own if i % 2 else own * 2)
    return result


def params(i: int, temperature: float | None, length: int = 20) -> SamplingParams:
    """Return the parameters of request i, with its own seed and no early end.

    A `temperature` of None makes half of the requests sample at 0.8 and the others greedy, with
    prompts of every kind among both."""
    temperature = (0.8 if i % 4 in (0, 3) else 0.0) if temperature is None else temperature
    return SamplingParams(
        temperature=temperature, seed=100 + i, max_tokens=length + i % 3, ignore_eos=True
    )


def finish(engine: Engine) -> list[Event]:
    """Step until all requests end, check that nothing leaked, and return the events."""
    events: list[Event] = []
    while engine.busy:
        events += engine.step_or_raise()
    check_idle(engine)
    return events


def finish_all(engine: Engine) -> list[Event]:
    """Run to the end as `finish` does, but allow requests to fail."""
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    check_idle(engine)
    return events


def check_idle(engine: Engine) -> None:
    """Check that all pages and slots of the target and of the drafters are free."""
    parts = [part for p in engine.proposers.values() for part in p.parts]
    caches = [engine.target.cache, *(p.runner.cache for p in parts if isinstance(p, DraftModel))]
    caches += [p.inner.runner.cache for p in parts if isinstance(p, OverlapProposer)]
    caches += [p.cache for p in parts if isinstance(p, (EagleProposer, BlockProposer))]
    for cache in caches:
        cache.pages.check()
        assert cache.pages.available == cache.pages.count
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine.requests
    assert len(engine.scheduler.slots) == len(engine.target.cache.length)


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """Make the target compute logits that are not finite."""
    norm: Any = engine.target.decoder.weights.norm
    weight = norm.weight.clone()
    norm.weight.fill_(float("nan"))
    try:
        yield
    finally:
        norm.weight.copy_(weight)


def run(
    engine: Engine,
    draft: str,
    temperature: float | None,
    *,
    arrivals: int = 1,
    depth: int | str = 4,
    length: int = 20,
    count: int = REQUESTS,
) -> list[Request]:
    """Run `count` requests to the end, with `arrivals` steps between one and the next."""
    requests = []
    for i, prompt in enumerate(prompts(count)):
        sampling = params(i, temperature, length)
        requests.append(engine.add(prompt, sampling, draft=draft, depth=depth))
        for _ in range(arrivals):
            engine.step_or_raise()
    finish(engine)
    return requests
