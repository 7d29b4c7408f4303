"""What is captured while the target writes is what reading the same text captures, bit by bit."""

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.draft.hidden_states import as_tensor
from forerun.engine.request import Request
from forerun.train import recorder as recorders
from forerun.train.capture import PAGE, Target, apart, example_of
from forerun.train.captured import Captured
from forerun.train.data import Example
from forerun.train.losses import Law, probs_of
from forerun.train.recorder import RECORDED, Recorder
from forerun.train.settings import Training
from tests import tiny
from tests.train.conftest import SMALL

PROMPTS = [list(range(3 + 5 * i, 3 + 5 * i + 7 + i)) for i in range(6)]
BOUNDARIES = [(), (2,), (0, 1, 2)]


@pytest.fixture(scope="module")
def target() -> Target:
    """It always drafts: whether that pays with a model so small is anybody's guess."""
    target = Target(str(tiny.spoken()), Training(**SMALL))
    target.llm.engine.add = functools.partial(target.llm.engine.add, depth=4)  # type: ignore[method-assign]
    return target


def sampled(count: int, **how: object) -> list[SamplingParams]:
    params: dict[str, object] = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32} | how
    return [SamplingParams(**params, seed=seed) for seed in range(count)]  # type: ignore[arg-type]


def captured(target: Target, requests: Sequence[Request]) -> list[tuple[Captured, Captured]]:
    """What was heard, and what is read."""
    pairs = []
    for request in requests:
        example = example_of(request)
        (read,) = apart(target.batch([example]), [example], target.aux_hidden_layers)
        pairs.append((target.captured(example, target.heard(request), target.vocab), read))
    return pairs


def same(heard: Captured, read: Captured) -> bool:
    return heard.example == read.example and heard.to_bytes() == read.to_bytes()


@pytest.mark.parametrize("aux_hidden_layers", BOUNDARIES)
@pytest.mark.parametrize("whole", [True, False])
def test_it_is_what_reading_captures(
    target: Target, aux_hidden_layers: tuple[int, ...], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole laws and their likeliest tokens, whatever was drafted, filters and temperatures
    notwithstanding."""
    monkeypatch.setattr(target, "aux_hidden_layers", aux_hidden_layers)
    if not whole:
        monkeypatch.setattr("forerun.train.losses.FULL", 16)
        monkeypatch.setattr(target, "top", 9)
    requests = target.say(PROMPTS, sampled(6), listen=target.vocab)
    assert sum(request.stats.accepted for request in requests) > 10, (
        "rounds that keep several nodes"
    )
    pairs = captured(target, requests)
    assert all(same(*pair) for pair in pairs)
    assert all((heard.likeliest is None) == whole for heard, _ in pairs)
    states = [heard.states.shape for heard, _ in pairs]
    assert states[0][:2] == (len(aux_hidden_layers), len(requests[0].tokens) - 1)


def test_a_prompt_that_the_cache_has_is_read_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "aux_hidden_layers", (1, 2))
    prompts = [[*range(50, 85), last] for last in (3, 4, 5)]
    target.say(prompts[:1], sampled(1), listen=target.vocab)
    requests = target.say(prompts, sampled(3, max_tokens=12), listen=target.vocab)
    assert [request.stats.cached_tokens for request in requests] == [2 * PAGE] * 3
    read: list[Example] = []
    batch = target.batch
    with monkeypatch.context() as patched:
        patched.setattr(
            target, "batch", lambda texts, **how: (read.extend(texts), batch(texts, **how))[1]
        )
        heard = [target.captured(example_of(r), target.heard(r), target.vocab) for r in requests]
    assert [len(example.tokens) for example in read] == [2 * PAGE + 1]
    assert all(
        same(one, other) for one, (_, other) in zip(heard, captured(target, requests), strict=True)
    )


def test_a_text_that_is_cut_short(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its limit, or in the middle of a draft by a stop token: the round has shown more than the
    text has."""
    monkeypatch.setattr(target, "aux_hidden_layers", (2,))
    (whole,) = target.say(PROMPTS[:1], sampled(1, temperature=0.0), listen=target.vocab)
    for count in range(8, 30, 3):
        stop = whole.tokens[whole.prompt_length + count]
        for how in ({"max_tokens": count}, {"stop_token_ids": (stop,)}):
            requests = target.say(
                PROMPTS[:1], sampled(1, temperature=0.0, **how), listen=target.vocab
            )
            assert len(requests[0].tokens) < len(whole.tokens)
            assert all(same(*pair) for pair in captured(target, requests))


def test_a_beginning_and_what_follows_it(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests, the one with the text of the other for a prompt: nothing is read but what
    stands before both."""
    monkeypatch.setattr(target, "aux_hidden_layers", (0, 2))
    (first,) = target.say([[5, 9]], sampled(1, max_tokens=20), listen=target.vocab)
    begun = target.heard(first)
    (rest,) = target.say([first.tokens], sampled(1, max_tokens=20), listen=target.vocab)
    heard = target.heard(rest)
    assert begun is not None and heard is not None and heard.begun == PAGE
    whole, example = heard.behind(begun), Example(tuple(rest.tokens[:-3]), 1)
    assert whole is not None and (whole.first, whole.begun) == (1, 0)
    (read,) = apart(target.batch([example]), [example], target.aux_hidden_layers)
    assert same(target.captured(example, whole, target.vocab), read)
    assert same(target.captured(example, heard, target.vocab), read), (
        "and without it, by reading that much"
    )
    assert heard.behind(heard) is None


def test_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said before it is read again."""
    target = Target(str(tiny.spoken()), Training(**SMALL))
    target.llm = LLM(
        str(tiny.spoken()), draft="suffix", kv_tokens=7 * PAGE, page=PAGE, context=48, max_rows=6
    )
    target.recorder = target.llm.engine.proposers[RECORDED] = Recorder()
    target.aux_hidden_layers = (1, 2)
    requests = target.say(PROMPTS, sampled(6), listen=target.vocab)
    assert sum(request.stats.preemptions for request in requests) > 1
    assert all(same(*pair) for pair in captured(target, requests))


@pytest.mark.parametrize("fault", ["temperature", "shifted", "rejected"])
def test_faults_are_seen(target: Target, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws at a temperature, states of the token before, laws of nodes that did not stand: each is
    another capture."""
    monkeypatch.setattr(target, "aux_hidden_layers", (2,))
    learn, observe = Recorder.learn, Recorder.observe

    def wrong_learn(
        self: Recorder, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        learn(self, slot, before, tokens, logits if fault == "shifted" else logits.flip(0))

    def wrong_observe(self: Recorder, slot: int, start: int, features: dict[int, Tensor]) -> None:
        observe(
            self,
            slot,
            start,
            {at: as_tensor(states).roll(1, -1) for at, states in features.items()},
        )

    def warm(logits: Tensor, top: int) -> Law:
        return probs_of(logits / 0.8, top)

    if fault == "temperature":
        monkeypatch.setattr(recorders, "probs_of", warm)
    elif fault == "shifted":
        monkeypatch.setattr(Recorder, "observe", wrong_observe)
    else:
        monkeypatch.setattr(Recorder, "learn", wrong_learn)
    requests = target.say(PROMPTS, sampled(6), listen=target.vocab)
    assert not all(same(*pair) for pair in captured(target, requests))


def test_on_torch_it_is_the_same_to_rounding() -> None:
    target = Target(str(tiny.spoken()), Training(**SMALL))
    target.llm = LLM(
        str(tiny.spoken()),
        dtype="float32",
        kernels="torch",
        draft="suffix",
        kv_tokens=2048,
        page=PAGE,
    )
    target.recorder = target.llm.engine.proposers[RECORDED] = Recorder()
    target.aux_hidden_layers = (1, 2)
    for heard, read in captured(target, target.say(PROMPTS, sampled(6), listen=target.vocab)):
        assert heard.example == read.example
        for one, other in (
            (heard.logs, read.logs),
            (heard.said, read.said),
            (heard.states, read.states),
        ):
            assert torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_a_new_beginning_forgets_what_was_heard(target: Target) -> None:
    """What nobody listened to changes nothing, and what was not heard is read."""
    (request,) = target.say(PROMPTS[:1], sampled(1), listen=target.vocab)
    target.say(PROMPTS[1:2], sampled(1))
    assert target.heard(request) is not None
    target.say(PROMPTS[1:2], sampled(1), listen=target.vocab)
    assert target.heard(request) is None
    assert target.captured(example_of(request), None, target.vocab).example == example_of(request)
