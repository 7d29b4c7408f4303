"""Requests go where their beginning is known, unless too much waits there; and a fleet of a
thousand stays even."""

from collections.abc import Callable

import pytest

from forerun.cluster.affinity import HOLDERS, Affinity, Routing, prefixes
from forerun.cluster.ledger import Ledger
from forerun.errors import ConfigError
from tests.cluster.fleet import play

FLEET = [f"replica-{i}" for i in range(1000)]
ROUTING = Routing(block=100, place=200, lead=4)


def loads(**busy: int) -> Callable[[str], int | None]:
    return lambda replica: (
        busy.get(replica.replace("replica-", "r"), 0) if replica in FLEET else None
    )


def test_the_replica_that_knows_most_of_a_prompt_has_it() -> None:
    affinity = Affinity(ROUTING, seed=1)
    affinity.learn([1, 2, 3], "replica-7")
    affinity.learn([1, 2, 3, 4, 5], "replica-9")
    assert affinity.choose([1, 2, 3, 4, 6], FLEET, loads()).replica == "replica-9"
    assert affinity.choose([1, 2, 3, 4, 6], FLEET, loads()).held == 4
    assert (
        affinity.choose([1, 2, 3, 8], FLEET, loads(r9=1)).replica == "replica-7"
    )  # both know three: the idle one


def test_a_longer_known_prefix_is_worth_a_longer_queue_up_to_a_bound() -> None:
    affinity = Affinity(ROUTING, seed=1)
    affinity.learn(range(20), "replica-7")

    def goes(blocks: int, busy: int) -> bool:
        return affinity.choose(range(blocks), FLEET, loads(r7=busy)).replica == "replica-7"

    assert goes(1, 0) and not goes(1, 1)  # 100 characters are no place of 200
    assert goes(4, 2) and not goes(4, 3)
    assert goes(20, 4) and not goes(20, 5)  # the bound


def test_what_nobody_knows_goes_to_the_shorter_of_two_queues() -> None:
    affinity = Affinity(ROUTING, seed=1)
    busy = {name: i for i, name in enumerate(FLEET)}
    chosen = [busy[affinity.choose([], FLEET, busy.get).replica] for _ in range(300)]
    assert sum(chosen) / len(chosen) < 0.4 * len(FLEET)  # a third, where one drawn alone is a half


def test_replicas_that_are_gone_or_to_be_avoided_are_not_chosen() -> None:
    affinity = Affinity(ROUTING, seed=1)
    affinity.learn([1, 2], "gone")
    affinity.learn([1], "replica-3")
    assert affinity.choose([1, 2], FLEET, loads()).replica == "replica-3"
    assert affinity.choose([1, 2], FLEET, loads(), avoid={"replica-3"}).replica != "replica-3"
    assert (
        affinity.choose([1], ["replica-3"], loads(), avoid={"replica-3"}).replica == "replica-3"
    )  # there is no other


def test_what_is_remembered_is_bounded_and_the_ends_of_old_prompts_go_first() -> None:
    affinity = Affinity(Routing(remembered=10), seed=1)
    affinity.learn(range(8), "replica-1")
    affinity.learn(range(100, 104), "replica-2")
    assert len(affinity) == 10
    assert affinity.choose(range(8), FLEET, loads()).held == 6
    for i in range(20):
        affinity.learn([0], f"replica-{i}")
    assert len(affinity._holders[0]) == HOLDERS


def test_a_choice_looks_at_a_few_replicas_however_many_there_are() -> None:
    """So it takes as long for a thousand as for two; scripts and figures: docs/cluster.md."""
    affinity = Affinity(Routing(), seed=1)
    for i in range(HOLDERS):
        affinity.learn(range(64), f"replica-{i}")
    asked: list[str] = []

    def load(replica: str) -> int:
        asked.append(replica)
        return 0

    affinity.choose(range(64), FLEET, load)
    assert len(asked) <= 2 + HOLDERS + 2


def test_a_fleet_of_a_thousand_reuses_much_and_stays_even() -> None:
    blind, knowing = play(Routing(blocks=0), requests=6000), play(Routing(), requests=6000)
    assert blind.reused < 0.1 and knowing.reused > 0.75
    assert knowing.busiest <= blind.busiest + Routing().lead
    assert knowing.uneven < 1.3 * blind.uneven


def test_a_ledger_knows_who_works_on_what() -> None:
    ledger = Ledger(Routing(), seed=1)
    assert ledger.choose("a", ()) is None  # there is nobody yet
    ledger.set_live(["x", "y"])
    first, second = ledger.choose("a", ()), ledger.choose("b", ())
    assert {first, second} == {"x", "y"}  # the second to the one that has nothing to do
    assert ledger.ended("a") == first and ledger.ended("a") is None
    assert ledger.choose("c", ()) == first
    assert ledger.counts() == {(first, "queue"): 1}


def test_a_request_that_found_no_place_is_sent_elsewhere() -> None:
    ledger = Ledger(Routing(), seed=1)
    ledger.set_live(["x", "y", "z"])
    assert {ledger.choose("a", (1, 2)) for _ in range(3)} == {"x", "y", "z"}
    assert ledger.choose("a", (1, 2)) in {"x", "y", "z"}  # all have been tried: it goes round again
    ledger.ended("a")
    for i in range(3):  # and it was counted once, where it was last
        ledger.choose(f"b{i}", ())
    assert sorted(ledger._running.values()) == [1, 1, 1]


def test_a_ledger_forgets_replicas_that_end_and_not_the_others_work() -> None:
    ledger = Ledger(Routing(), seed=1)
    ledger.set_live(["x", "y"])
    where = {ledger.choose("a", ()): "a", ledger.choose("b", ()): "b"}
    ledger.set_live(["y", "z"])
    assert ledger._running == {"y": 1, "z": 0}
    ledger.ended(where["x"])
    ledger.ended(where["y"])
    assert ledger._running == {"y": 0, "z": 0}


def test_requests_with_the_same_beginning_have_the_same_prefixes() -> None:
    routing = Routing(block=32)
    turn = {
        "messages": [{"role": "system", "content": "s" * 200}, {"role": "user", "content": "first"}]
    }
    later = {"messages": [*turn["messages"], {"role": "assistant", "content": "a" * 90}]}
    short, long = prefixes(turn, "", routing), prefixes(later, "", routing)
    assert short and long[: len(short)] == short and len(long) > len(short)
    other = {"messages": [{"role": "system", "content": "s" * 100 + "t" * 100}]}
    shared = [a == b for a, b in zip(short, prefixes(other, "", routing), strict=False)]
    assert shared[:3] == [True] * 3 and not any(shared[4:])


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "p" * 300},
        {"prompt": ["p" * 300, "q"]},
        {"prompt": list(range(300))},
        {"input": "i" * 300},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "i" * 300}]}]},
        {"system": "s" * 200, "prompt": "p" * 200},
        {"tools": [{"type": "function", "function": {"name": "f" * 300}}], "messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "t" * 300}]}]},
    ],
)
def test_every_way_to_write_a_prompt_has_prefixes(body: dict[str, object]) -> None:
    assert len(prefixes(body, "", Routing())) >= 2


@pytest.mark.parametrize(
    "body", [{}, {"messages": 5}, {"messages": [5, None, {}]}, {"prompt": None}, {"input": {}}]
)
def test_what_is_no_prompt_has_none(body: dict[str, object]) -> None:
    assert not prefixes(body, "", Routing())


def test_tenants_and_salts_share_no_prefix_and_who_shares_nothing_has_none() -> None:
    body = {"prompt": "p" * 300}
    mine, yours = prefixes(body, "me", Routing()), prefixes(body, "you", Routing())
    salted = prefixes(body | {"cache_salt": "x"}, "me", Routing())
    assert not {*mine} & {*yours} and not {*mine} & {*salted}
    assert prefixes(body, None, Routing()) == ()


def test_a_cache_key_keeps_requests_together_whose_prompts_are_short() -> None:
    first, second = ({"prompt": text, "prompt_cache_key": "user-7"} for text in ("hello", "bye"))
    assert prefixes(first, "", Routing()) == prefixes(second, "", Routing()) != ()


def test_long_prompts_are_compared_up_to_a_bound() -> None:
    assert len(prefixes({"prompt": "p" * 1_000_000}, "", Routing(blocks=8))) == 8
    assert prefixes({"prompt": "p" * 1000}, "", Routing(blocks=0)) == ()


@pytest.mark.parametrize(
    "options", [{"block": 1}, {"blocks": -1}, {"place": 0}, {"lead": True}, {"remembered": "9"}]
)
def test_mistakes_in_routing_are_one_line(options: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"^routing\.\w+=.* is out of range: give a whole number from"
    ):
        Routing(**options)
