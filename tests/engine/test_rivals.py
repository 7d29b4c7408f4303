"""How the policy picks one of several drafters, simulated with a known acceptance rate of each
drafter in each domain."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from forerun.engine.acceptance import Acceptance, DraftOption
from forerun.engine.depth import PROBE_DEPTH, BatchState, DepthPolicy

PASS, ROW, LEVEL = 1.0, 0.03, 0.06  # seconds of a pass, of a further row, of a level of drafting
ONE = BatchState(1, 1, 1)  # a single request
Rates = dict[str, float]


class Machine:
    """Simulates requests with the depth policy and drafters of known acceptance rates."""

    def __init__(self, drafters: tuple[str, ...], seed: int) -> None:
        self.policy, self.drafters, self.dice = DepthPolicy(), drafters, random.Random(seed)

    def accepted(self, rate: float, depth: int) -> int:
        return next((i for i in range(depth) if self.dice.random() > rate), depth)

    def request(self, rates: Rates, tokens: int) -> float:
        """Run one request and return its tokens per second."""
        states: dict[str, Acceptance] = defaultdict(Acceptance)
        produced, seconds, batch = 0, 0.0, ONE
        while produced < tokens:
            options = [DraftOption(name, 64, states[name]) for name in self.drafters]
            probed = self.policy.pick_rival_probe(options, 0.0, batch)
            if probed is not None:
                name = self.drafters[probed]
                seconds += self.draft(name, PROBE_DEPTH)
                rival_accepted = self.accepted(rates[name], PROBE_DEPTH)
            first = options[self.policy.rank([[option] for option in options], batch)[0]]
            depth = 0
            if not self.policy.is_paused(first.acceptance):
                (depth,) = self.policy.choose([first], batch)
            if depth:
                seconds += self.draft(first.source, depth)
            accepted = self.accepted(rates[first.source], depth)
            if depth:
                self.policy.record_verdict(first.source, first.acceptance, depth, accepted)
            if probed is not None:
                known = min(rival_accepted, accepted + 1)  # the target emitted no more tokens
                drafted = known if known == accepted + 1 else PROBE_DEPTH
                self.policy.record_verdict(name, states[name], drafted, known)
            pass_seconds = PASS + ROW * depth
            self.policy.record_forward(1 + depth, pass_seconds)
            self.policy.steps += 1
            seconds += pass_seconds
            produced += accepted + 1
        return produced / seconds

    def draft(self, name: str, depth: int) -> float:
        """Record a draft and return its seconds."""
        self.policy.costs.add_draft(name, depth, LEVEL * depth)
        return LEVEL * depth


DOMAINS: dict[str, Rates] = {
    "code": {"code": 0.85, "legal": 0.4, "talk": 0.3},
    "legal": {"code": 0.35, "legal": 0.8, "talk": 0.4},
    "talk": {"code": 0.2, "legal": 0.45, "talk": 0.75},
}


@pytest.mark.one_in(0)
def test_the_policy_finds_the_best_drafter_of_each_domain() -> None:
    """Its speed is within 5 % of the domain's own drafter, for texts in blocks and mixed."""
    speeds: dict[str, dict[str, list[float]]] = {domain: defaultdict(list) for domain in DOMAINS}
    for seed in range(6):
        order = [domain for domain in DOMAINS for _ in range(6)] + 6 * list(DOMAINS)
        machines = {name: Machine((name,), seed) for name in DOMAINS}
        machines["auto"] = Machine(tuple(DOMAINS), seed)
        for domain in order:
            for name, machine in machines.items():
                speeds[domain][name].append(machine.request(DOMAINS[domain], 300))
    for domain, by_name in speeds.items():
        means = {name: sum(values) / len(values) for name, values in by_name.items()}
        assert max(DOMAINS, key=lambda name: means[name]) == domain
        assert means["auto"] >= 0.95 * means[domain], (domain, means)


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_little_is_lost_if_no_drafter_pays(rate: float) -> None:
    """Probing rivals costs a hundredth of the time at most, in addition to other probes."""
    rates = dict.fromkeys(DOMAINS, rate)
    machine, alone = Machine(tuple(DOMAINS), 1), Machine(("code",), 1)
    several = sum(machine.request(rates, 400) for _ in range(10)) / 10
    one = sum(alone.request(rates, 400) for _ in range(10)) / 10
    assert several >= 0.94 * max(one, 1.0)


def test_rivals_are_probed_after_the_first_measurements_and_not_in_every_step() -> None:
    policy, state = DepthPolicy(), {name: Acceptance() for name in "ab"}
    rivals = [DraftOption(name, 64, state[name]) for name in "ab"]
    found = {policy.pick_rival_probe(rivals, 0.0, ONE) for _ in range(10)}
    assert found == {None}, "no pass was measured yet"
    for _ in range(10):
        policy.record_forward(1, PASS)
    probed = []
    for _ in range(200):
        i = policy.pick_rival_probe(rivals, 0.0, ONE)
        if i is not None:
            probed.append(rivals[i].source)
            policy.record_verdict(rivals[i].source, rivals[i].acceptance, PROBE_DEPTH, 0)
    # limited by the credit, and rarer the more is known
    assert set(probed) == set("ab") and 10 < len(probed) < 100


def test_a_rival_that_could_not_be_faster_is_not_probed() -> None:
    """No probe is needed if a copy is faster than the rival at its best."""
    policy, rival = DepthPolicy(), DraftOption("a", 8, Acceptance())
    for _ in range(10):
        policy.record_forward(1, PASS)
        policy.record_forward(9, PASS + 8 * ROW)
        policy.costs.add_draft("a", 8, 8 * LEVEL)
    assert {policy.pick_rival_probe([rival], 100.0, ONE) for _ in range(100)} == {None}
    assert 0 in {policy.pick_rival_probe([rival], 3.0, ONE) for _ in range(100)}
