"""Engines over tiny models for the tests, with every proposer, in float64."""

from __future__ import annotations

import torch

from forerun.draft.block import Block
from forerun.draft.cascade import Cascade
from forerun.draft.compose import Either
from forerun.draft.levels import Levels
from forerun.draft.model import DraftModel
from forerun.draft.ngram import NGram
from forerun.draft.pairs import Pairs
from forerun.draft.parallel import ParallelPairs
from forerun.draft.pard import Pard
from forerun.draft.prefixed import Prefixed
from forerun.draft.recycle import Recycle
from forerun.draft.suffix import Suffix
from forerun.draft.view import view_of
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.runner import Runner
from forerun.sampling.params import SamplingParams
from tests import tiny

PROPOSERS = (
    "ngram", "suffix", "recycle", "model", "listed", "tree", "medusa", "mlp", "hydra", "prefixed", "eagle", "eagle1",
    "parallel", "pard", "mtp", "block", "both", "cascade",
)  # fmt: skip


def engine(
    family: str = "llama",
    *,
    rule: str = "match",
    tokens: int = 1024,
    chunk: int = 64,
    page: int = 4,
    slots: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Engine:
    """A target (a GGUF file on native kernels), and proposers: ngram, suffix, model (chains), listed (the same with a
    shortlist), tree (of width 3) often agree with it, pard (of width 2) about its first token, heads (of width 2:
    medusa, mlp, hydra, prefixed, eagle, eagle1, parallel, mtp) and block now and then; both is ngram before an EAGLE-3
    head."""
    paths = tiny.family(family), tiny.drafter(family)
    if paths[0].is_file():
        target, small = map(tiny.native_decoder, paths)
        listed = tiny.native_decoder(paths[1], tiny.LISTED)
    else:
        target, small = (tiny.decoder(path, dtype, device) for path in paths)
        listed = tiny.decoder(paths[1], dtype, device, tiny.LISTED)

    def runner(decoder: object) -> Runner:
        return Runner(decoder, tokens=tokens, page=page, slots=slots)  # type: ignore[arg-type]

    wide = rule not in ("token", "block")
    room = {"tokens": tokens, "page": page, "slots": slots}
    head, view = tiny.eagle(tiny.eagle_config(family)), view_of(target)
    block = tiny.block(tiny.block_config(family))
    proposers = {
        "ngram": NGram(longest=3, shortest=1),
        "suffix": Suffix(shortest=1),
        "recycle": Recycle(width=3 if wide else 1),
        "model": DraftModel(runner(small), tiny.VOCAB),
        "listed": DraftModel(runner(listed), tiny.VOCAB),
        "tree": DraftModel(runner(small), tiny.VOCAB, width=3 if wide else 1),
        "pard": Pard(runner(small), 3, tiny.VOCAB, width=2 if wide else 1),
        "medusa": Levels("medusa", tiny.medusa(family), view, width=2 if wide else 1),
        "mlp": Levels("mlp", tiny.mlp(family, lstm=True), view, width=2 if wide else 1),
        "hydra": Levels("hydra", tiny.hydra(family), view, width=2 if wide else 1),
        "prefixed": Prefixed("hydra", tiny.hydra(family, prefix=True), view, **room, width=2 if wide else 1),
        "eagle": Pairs("eagle3", head, view, **room, width=2 if wide else 1),
        "eagle1": Pairs("eagle", tiny.eagle1(family), view, **room, width=2 if wide else 1),
        "parallel": ParallelPairs("eagle3", tiny.parallel(family), view, **room, width=2 if wide else 1),
        "mtp": Pairs("mtp", tiny.mtp(family), view, **room, width=2 if wide else 1),
        "block": Block(block, view, **room, width=2 if wide else 1),
    }
    proposers["cascade"] = Cascade(NGram(longest=3, shortest=1), DraftModel(runner(small), tiny.VOCAB))
    proposers["both"] = Either((NGram(longest=3, shortest=1), Pairs("eagle3", head, view, **room)))
    return Engine(runner(target), proposers, rule=rule, chunk=chunk)


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of many lengths; some repeat themselves, some begin alike."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(3, tiny.VOCAB, (9,), generator=generator).tolist()
    result = []
    for i in range(count):
        own = torch.randint(3, tiny.VOCAB, (2 + 5 * i,), generator=generator).tolist()
        result.append(common + own if i % 2 else own * 2)
    return result


def params(i: int, temperature: float, length: int = 20) -> SamplingParams:
    """The parameters of request i: a seed of its own, no early end."""
    return SamplingParams(temperature=temperature, seed=100 + i, max_tokens=length + i % 3, ignore_eos=True)


def finish(engine: Engine) -> None:
    """Step until nothing is left, then check that nothing leaked."""
    while engine.busy:
        engine.step_or_raise()
    check_idle(engine)


def check_idle(engine: Engine) -> None:
    """Every page and slot is back, in the target's pool and in the drafters'."""
    parts = [part for p in engine.proposers.values() for part in (p.parts if isinstance(p, Either) else (p,))]
    caches = [engine.target.cache, *(p.runner.cache for p in parts if isinstance(p, DraftModel))]
    caches += [p.cache for p in parts if isinstance(p, (Pairs, Block, Prefixed))]
    for cache in caches:
        cache.pages.check()
        assert cache.pages.available == cache.pages.count
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine.requests
    assert len(engine.scheduler.slots) == len(engine.target.cache.length)


def run(engine: Engine, draft: str, temperature: float, *, arrivals: int = 1, depth: int | str = 4) -> list[Request]:
    """Eight requests, `arrivals` steps between one and the next."""
    requests = []
    for i, prompt in enumerate(prompts()):
        requests.append(engine.add(prompt, params(i, temperature), draft=draft, depth=depth))
        for _ in range(arrivals):
            engine.step_or_raise()
    finish(engine)
    return requests
