"""Speculation emits the tokens of plain decoding, for every family, proposer, temperature, arrival,
chunk and pool size.

`make test` runs every drafter on one family and every family with three drafters; `make test-full`
runs every drafter on every family.

All run in float64, so that no near tie can excuse a difference, but GGUF files in their own types
on the native kernels. The reference decodes one request at a time, in one chunk and a large pool.
"""

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch

from forerun.engine import drafting
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.kernels import native
from forerun.sampling.params import SamplingParams
from tests import tiny
from tests.engine import build

# Q4_1 with an embedding in Q8_0; Q4_K with Q6_K, with separate gate and up matrices
GGUF = ["llama/q4_1", "llama/Q5_0", "qwen2/q4_k_m"]
COPYING = ("ngram", "suffix", "recycle", "lookahead", "both", "cascade", "off")
BOTH = None  # temperature: half of the requests are greedy, half sample at 0.8
needs_native = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
FILES = [pytest.param(name, marks=needs_native) for name in GGUF]


@functools.cache
def plain(family: str, temperature: float | None, i: int, length: int = 20) -> list[int]:
    """Return the output of request i alone, without speculation."""
    engine = build.engine(family, [])
    request = engine.add(build.prompts()[i], build.params(i, temperature, length), draft="off")
    build.finish(engine)
    return list(request.output)


def length(draft: str) -> int:
    """Return the output length: copying drafters need one that repeats itself."""
    return 20 if draft in COPYING else 16


def run(
    engine: Engine,
    draft: str,
    temperature: float | None,
    depth: int | str = 4,
    count: int = build.REQUESTS,
) -> list[Request]:
    return build.run(engine, draft, temperature, depth=depth, length=length(draft), count=count)


def same_as_plain(
    requests: Sequence[Request], family: str, temperature: float | None, length: int = 20
) -> None:
    """Check that each request has max_tokens tokens, and that they are those of plain decoding."""
    for i, request in enumerate(requests):
        expected = plain(family, temperature, i, length)
        assert list(request.output) == expected[: request.params.max_tokens]


@pytest.mark.one_in(40)
@pytest.mark.parametrize("draft", build.PROPOSERS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_single_request(family: str, draft: str) -> None:
    engine = build.engine(family, [draft])
    for i in (1, 4):  # greedy, and sampled
        params = build.params(i, BOTH, length(draft))
        request = engine.add(build.prompts()[i], params, draft=draft, depth=4)
        build.finish(engine)
        assert list(request.output) == plain(family, BOTH, i)[: request.params.max_tokens]


TRIPLES = [build.PROPOSERS[i : i + 3] for i in range(0, len(build.PROPOSERS), 3)]


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        *(("llama", drafts) for drafts in TRIPLES),
        *(
            pytest.param(family, TRIPLES[i % len(TRIPLES)], marks=[needs_native] * (family in GGUF))
            for i, family in enumerate([*tiny.FAMILIES, *GGUF])
            if family != "llama"
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_three_drafters_with_small_chunks_and_preemption(
    family: str, drafts: tuple[str, ...]
) -> None:
    """Each drafter has a greedy request and a sampled one, in chunks of 3 tokens and pages of 4,
    with room for about two requests, so that some are preempted."""
    engine = build.engine(family, drafts, chunk=3, tokens=build.SMALL)
    requests = []
    for i in range(6):
        params = build.params(i, BOTH, 10)
        draft = drafts[i * len(drafts) // 6]
        requests.append(engine.add(build.prompts()[i], params, draft=draft, depth=4))
        engine.step_or_raise()
    build.finish(engine)
    same_as_plain(requests, family, BOTH, 10)
    assert sum(r.stats.preemptions for r in requests) > 0


def check_preempted(
    family: str, draft: str, depth: int | str = 4, count: int = build.REQUESTS, **options: int
) -> list[Request]:
    """Run requests in small chunks and a small pool, check their output, and return them."""
    engine = build.engine(family, [draft], chunk=3, **{"tokens": build.SMALL} | options)
    if depth == "auto":
        engine.set_policy(build.Eager())
    requests = run(engine, draft, BOTH, depth, count)
    same_as_plain(requests, family, BOTH)
    assert sum(r.stats.preemptions for r in requests) > 0
    return requests


@pytest.mark.one_in(0)
@pytest.mark.parametrize("draft", build.PROPOSERS)
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *FILES])
def test_small_chunks_and_preemption(family: str, draft: str) -> None:
    check_preempted(family, draft)


@needs_native
@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", build.HEADS)
@pytest.mark.parametrize("family", GGUF[:2])
def test_chains_of_heads_in_one_native_call(family: str, draft: str) -> None:
    """Heads that draft chains run rounds in native calls; `auto` ends chains early."""
    for depth in (4, "auto"):
        requests = check_preempted(family, draft, depth, width=1)
        assert sum(r.stats.drafted for r in requests) > 0


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "width", "draft"),
    [  # the first four contain every pair of values
        ("gemma4", 1, "assistant"),
        ("gemma4", 2, "ordered assistant"),
        ("gemma4-small", 1, "ordered assistant"),
        ("gemma4-small", 2, "assistant"),
        pytest.param("gemma4", 1, "ordered assistant", marks=FULL),
        pytest.param("gemma4", 2, "assistant", marks=FULL),
        pytest.param("gemma4-small", 1, "assistant", marks=FULL),
        pytest.param("gemma4-small", 2, "ordered assistant", marks=FULL),
    ],
)
def test_assistants_that_read_the_keys_of_their_target(family: str, width: int, draft: str) -> None:
    """Chains and trees in batches, with small chunks and preemption, greedy and sampled."""
    requests = check_preempted(family, draft, width=width)
    assert sum(r.stats.accepted for r in requests) > 0


@needs_native
@pytest.mark.parametrize("draft", build.ASSISTANTS)
def test_assistants_of_targets_on_the_native_kernels(draft: str) -> None:
    texts = []
    for name in (draft, "off"):
        engine = build.engine("gemma4", [name], form="float32", chunk=3, tokens=build.SMALL)
        requests = run(engine, name, BOTH)
        texts.append([list(request.output)[:16] for request in requests])
        assert name == "off" or sum(r.stats.drafted for r in requests) > 0
    assert texts[0] == texts[1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("draft", build.BLOCKS)
@pytest.mark.parametrize("family", ["llama", FILES[0]])
def test_every_kind_of_block_drafter(family: str, draft: str, width: int) -> None:
    """Chains and trees, in torch and on native kernels, preempted; `auto` may end them early."""
    for depth in (4, "auto"):
        requests = check_preempted(family, draft, depth, build.MANY, width=width, tokens=112)
        assert sum(r.stats.accepted if depth == 4 else r.stats.drafted for r in requests) > 0


@pytest.mark.one_in(7)
@pytest.mark.parametrize("tokens", [1024, 112], ids=["room", "preempted"])
@pytest.mark.parametrize("draft", build.PROPOSERS)
def test_drafter_state_of_requests_that_pause_long_is_released(
    draft: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request pauses twice; the second time the guard pauses the engine as well."""
    monkeypatch.setattr(drafting, "LONG_PAUSE", 3)
    monkeypatch.setattr(drafting, "WARM_UP", 1)
    engine = build.engine("llama", [draft], chunk=3, tokens=tokens)
    # the guard must not depend on the speed of this machine
    engine.drafting.clock = engine.drafting.wall_clock = lambda: 0.0
    engine.set_policy(build.Eager())
    requests = [
        engine.add(prompt, build.params(i, 0.8, length(draft)), draft=draft)
        for i, prompt in enumerate(build.prompts())
    ]
    released, num_accepting = set(), 0
    for step in itertools.count():
        if not engine.busy:
            break
        if step in (4, 12):
            for request in requests:
                engine.drafting.state(request).guard.paused_steps = 5
            engine.guard.paused_steps = engine.guard.fresh = 5 if step == 12 else 0
        before = {request.id: len(request.tokens) for request in requests}
        engine.step_or_raise()
        released |= {request.id for request in requests if engine.drafting.state(request).released}
        num_accepting += sum(len(r.tokens) > before[r.id] + 1 for r in requests if r.id in released)
    same_as_plain(requests, "llama", 0.8)
    assert released
    assert num_accepting or draft not in ("model", "suffix"), "drafts are accepted again later"


@pytest.mark.parametrize("draft", [*build.PROPOSERS, "off"])
def test_automatic_depth_does_not_change_the_output(draft: str) -> None:
    requests = run(build.engine("llama", [draft]), draft, 0.8, depth="auto")
    same_as_plain(requests, "llama", 0.8)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_and_speculating_requests_in_one_batch(temperature: float) -> None:
    engine, drafts = build.engine("qwen3", chunk=5), ["off", *build.PROPOSERS]
    requests = []
    for i, prompt in enumerate(build.prompts()):
        params, draft = build.params(i, temperature), drafts[i % len(drafts)]
        requests.append(engine.add(prompt, params, draft=draft, depth=1 + i % 4))
    build.finish(engine)
    same_as_plain(requests, "qwen3", temperature)


SPECIAL = [
    SamplingParams(max_tokens=30, seed=3 + i, **options)
    for i, options in enumerate(
        (
            {"temperature": 0.9, "top_k": 5, "ignore_eos": True},
            {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02, "ignore_eos": True},
            {"repetition_penalty": 1.4, "ignore_eos": True},
            {"temperature": 0.7, "presence_penalty": 0.9, "frequency_penalty": 0.6},
            {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -100.0}, "min_tokens": 25},
            {"frequency_penalty": 1.5, "stop_token_ids": (11, 17, 23), "min_tokens": 12},
        )
    )
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("draft", build.PROPOSERS)
def test_sampling_parameters_act_as_without_speculation(draft: str) -> None:
    """In one batch, every parameter acts as it does without speculation."""
    outputs = {}
    for name in ("off", draft):
        engine = build.engine("llama", [name])
        requests = [
            engine.add(build.prompts()[i], p, draft=name, depth=5) for i, p in enumerate(SPECIAL)
        ]
        build.finish(engine)
        outputs[name] = [(list(r.output), r.finish_reason) for r in requests]
    assert outputs[draft] == outputs["off"]


@pytest.mark.parametrize("family", ["llama", FILES[0]])
def test_drafts_of_every_proposer_are_accepted_in_part(family: str) -> None:
    """Guards the tests above, which would prove nothing if no draft were accepted."""
    for draft in build.PROPOSERS:
        count = build.MANY if draft == "medusa" else 4  # medusa's drafts are seldom accepted
        requests = build.run(build.engine(family, [draft]), draft, 0.0, count=count)
        stats = [r.stats for r in requests]
        assert 0 < sum(s.accepted for s in stats) < sum(s.drafted for s in stats)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("draft", ["assistant", *build.PROPOSERS, *build.BLOCKS])
def test_ratio_rules_are_greedy_at_temperature_zero(rule: str, draft: str) -> None:
    """At T = 0 the target's distribution is one token, which every lossless rule must emit."""
    family = "gemma4" if draft == "assistant" else "llama"
    requests = run(build.engine(family, [draft], rule=rule), draft, 0.0)
    same_as_plain(requests, family, 0.0)


def test_a_cached_prefix_does_not_change_the_output() -> None:
    engine = build.engine("llama", ["model"])
    prompt = build.prompts()[7]
    outputs = []
    for _ in range(3):
        request = engine.add(prompt, build.params(7, 0.8), draft="model", depth=3)
        build.finish(engine)
        outputs.append(list(request.output))
    assert outputs == [plain("llama", 0.8, 7)] * 3
    assert request.stats.cached_tokens > 0


@pytest.mark.cuda
@pytest.mark.parametrize("draft", build.PROPOSERS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_equal_plain_decoding_on_cuda(family: str, draft: str) -> None:
    outputs = {}
    for name in ("off", draft):
        requests = build.run(build.engine(family, [name], device="cuda", chunk=7), name, 0.8)
        outputs[name] = [list(r.output) for r in requests]
    assert outputs["off"] == outputs[draft]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_in_other_precisions(dtype: torch.dtype) -> None:
    """Torch's kernels may resolve near ties differently, but lengths and pages must agree."""
    requests = run(build.engine("llama", ["tree"], dtype=dtype), "tree", 0.8)
    lengths = [length("tree") + i % 3 for i in range(build.REQUESTS)]
    assert [r.stats.completion_tokens for r in requests] == lengths
