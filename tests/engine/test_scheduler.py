"""Clients share the slots: none holds more than half of them while others have requests.

The limit ends with the requests of the others, preempted requests resume first whatever their
client, and every request ends with the output that it has alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from tests.engine import build


def add(engine: Engine, clients: Sequence[str], length: int = 12) -> list[Request]:
    """Queue a request of each client, in this order."""
    prompt = build.prompts()[1]
    return [
        engine.add(prompt, build.params(i, 0.8, length), client=client)
        for i, client in enumerate(clients)
    ]


def held(engine: Engine) -> Counter[str]:
    """Count the slots that each client holds."""
    return Counter(request.client for request in engine.scheduler.running)


def test_a_client_alone_holds_all_slots() -> None:
    engine = build.engine(drafts=[], slots=6)
    add(engine, ["a"] * 9)
    engine.step_or_raise()
    assert held(engine) == {"a": 6}


def test_a_client_holds_half_of_the_slots_while_others_have_requests() -> None:
    """The remaining slots stay free, so that a later client gets one at once."""
    engine = build.engine(drafts=[], slots=6)
    add(engine, [*["a"] * 9, "b"])
    engine.step_or_raise()
    assert held(engine) == {"a": 3, "b": 1}
    (late,) = add(engine, ["c"])
    engine.step_or_raise()
    assert late.slot >= 0 and held(engine) == {"a": 3, "b": 1, "c": 1}


def test_a_client_gets_all_slots_when_the_others_have_ended() -> None:
    engine = build.engine(drafts=[], slots=4)
    many = add(engine, ["a"] * 6, length=20)
    (short,) = add(engine, ["b"], length=3)
    while not short.finish_reason:
        engine.step_or_raise()
        assert held(engine)["a"] <= 2
    engine.step_or_raise()
    assert held(engine)["a"] == 4
    build.finish(engine)
    assert all(request.finish_reason == "length" for request in many)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_request_ends_with_the_output_that_it_has_alone(slots: int) -> None:
    """Few slots and a small pool also lead to preemption."""
    clients = ["a", "a", "a", "b", "a", "c", "b"]
    texts = []
    for sizes in ({"slots": slots, "tokens": 64}, {"slots": 8}):
        engine = build.engine(drafts=[], **sizes)  # type: ignore[arg-type]
        requests = add(engine, clients)
        build.finish(engine)
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_a_preempted_request_resumes_beyond_its_clients_share() -> None:
    engine = build.engine(drafts=[], slots=4)
    first, second, third = add(engine, ["a", "a", "b"])
    engine.step_or_raise()
    engine.scheduler._preempt(second)
    fourth, fifth = add(engine, ["a", "a"])
    engine.step_or_raise()
    assert second.slot >= 0 and first.slot >= 0 and third.slot >= 0
    assert fourth.slot < 0 and fifth.slot < 0
