"""What is measured of a drafter by itself is remembered for its target, and nothing else is."""

from __future__ import annotations

from typing import Any

from forerun.bench.decode.sweep import keep
from forerun.catalogue.memory import recall
from forerun.measure.rounds import Result


def result(**changed: Any) -> Result:
    fields = dict.fromkeys(Result.__dataclass_fields__) | {
        "draft": "model:some/where", "depth": 4, "rule": "match", "category": "chat", "temperature": 0.8, "requests": 1,
        "times_plain": 1.5, "accepted_length": 2.5, "same": True,
    }  # fmt: skip
    return Result(**(fields | changed))


def test_drafters_by_themselves_are_remembered() -> None:
    keep(
        "org/target",
        [result(), result(category="", temperature=0.0, depth="auto"), result(draft="off")],
    )
    keep(None, [result(draft="eagle3:head")])
    kept = {(m.target, m.drafter, m.kind, m.category, m.depth): m for m in recall()}
    assert kept.keys() == {
        ("org/target", "some/where", "model", "chat", "4"),
        ("org/target", "some/where", "model", "all", "auto"),
        ("SmolLM2-135M-Instruct", "head", "eagle3", "chat", "4"),
    }
    one = kept["org/target", "some/where", "model", "chat", "4"]
    assert (one.accepted_length, one.times_plain, one.temperature) == (
        2.5,
        1.5,
        0.8,
    ) and one.machine


def test_what_says_nothing_of_one_drafter_is_not() -> None:
    keep("t", [
        result(draft="suffix+model:a"), result(draft="suffix"), result(requests=8), result(same=False),
        result(rule="token"), result(draft="recycle:table"),
    ])  # fmt: skip
    assert recall() == []
