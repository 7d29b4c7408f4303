"""Engines whose passes, sampling, walks and compaction are Triton's kernels emit the tokens of an
engine on torch that runs one round per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forerun.draft.device_recycle import DeviceRecycle
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import Proposer
from forerun.engine.engine import Engine
from forerun.models.decoder import Decoder
from forerun.runtime import padded_pass
from forerun.runtime.device_rounds import DeviceRounds
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Forward
from tests import tiny
from tests.engine import build
from tests.kernels.triton.decoder_cases import decoder_of
from tests.kernels.triton.inputs import DEVICE

padded_pass.DRAFT_TOKENS, padded_pass.MIN_KEYS = 8, 64
PROMPTS = [[5, 9, 11], [4, 8, 21, 3]]
FILTERED = [{"temperature": 0.9, "top_k": 5}, {"temperature": 1.2, "min_p": 0.02}]


class Rerun:
    """A stand-in for `CudaGraphs` that runs the function again; rounds write their results to the
    same tensors."""

    own_attention = own_layers = True

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        found = run()

        def again() -> None:
            result = run()
            if isinstance(found, Forward):
                found.logits.copy_(result.logits)

        return found, torch.inference_mode()(again)


def engine(decoder: Decoder, own: bool, width: int) -> Engine:
    """Return an engine whose draft model is its target, on kernels in late rounds or on torch."""
    sizes: dict[str, Any] = dict(tokens=256, page=4, slots=2)

    def runner() -> Runner:
        return Runner(decoder, **sizes, graphs=Rerun() if own else None)

    drafters: dict[str, Proposer] = {"model": DraftModel(runner(), tiny.VOCAB, width)}
    made = Engine(runner(), drafters, multi_step=60.0 if own else 0.0)
    made.set_policy(build.Eager())
    return made


def texts(made: Engine, draft: str, params: list[dict[str, Any]], count: int) -> list[list[int]]:
    requests = []
    for prompt, own in zip(PROMPTS, params, strict=False):
        sampling = SamplingParams(max_tokens=count, seed=3, ignore_eos=True, **own)
        requests.append(made.add(prompt, sampling, draft=draft, depth="auto"))
    build.finish(made)
    return [list(request.output) for request in requests]


def case_rounds() -> None:
    """Chains of a draft model, with different filters for each request."""
    decoder, launch = decoder_of("llama"), DeviceRounds.launch
    launched: list[DeviceRounds] = []

    def noted(rounds: DeviceRounds) -> bool:
        launched.append(rounds)
        return launch(rounds)

    DeviceRounds.launch = noted  # type: ignore[method-assign]
    try:
        plain = texts(engine(decoder, False, 1), "off", FILTERED, 6)
        assert not launched
        made = engine(decoder, True, 1)
        assert texts(made, "model", FILTERED, 6) == plain
        passes = made.target.captured
        assert passes is not None and passes.own_layers and not passes.failed
        assert launched and not launched[0].failed
    finally:
        DeviceRounds.launch = launch  # type: ignore[method-assign]


def case_recycling() -> None:
    """Trees from tables on the device, in rounds, with the tokens and drafts of torch."""
    decoder, found = decoder_of("llama"), []
    for own in (True, False):
        made = engine(decoder, own, 1)
        made.proposers["recycle"] = recycle = DeviceRecycle(DEVICE, own)
        requests = [
            made.add(
                [5, 9, 11, 5, 9],
                SamplingParams(max_tokens=14, seed=3, ignore_eos=True, temperature=temperature),
                draft="recycle",
                depth=3,
            )
            for temperature in (0.0, 0.7)
        ]
        build.finish(made)
        stats = [(request.stats.drafted, request.stats.accepted) for request in requests]
        found.append(([list(request.output) for request in requests], stats))
        assert recycle.tables[""].held.keys.count_nonzero() > 10
        assert own == bool(recycle._drafters), "only rounds use them"
    assert found[0] == found[1] and found[0][1][0][0] > 4


def case_compaction() -> None:
    """Trees with one round per step: accepted nodes that are not contiguous become so."""
    decoder = decoder_of("llama")
    plain = texts(engine(decoder, False, 1), "off", [FILTERED[1]], 6)
    made, moved = engine(decoder, True, 3), []
    compact = made.target.cache.compact
    assert compact is not None

    def noted(*arguments: Any) -> None:
        moved.append(arguments)
        compact(*arguments)

    made.target.cache.compact = noted
    assert texts(made, "model", [FILTERED[1]], 6) == plain
    assert moved and made.target.cache.compact is noted
