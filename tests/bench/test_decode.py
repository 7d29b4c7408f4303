"""Decoding speed: what a run counts, rounds, comparison of outputs, the plan, the registry."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats

from forerun import LLM, ConfigError, RequestError, SamplingParams
from forerun.bench import decode as module
from forerun.bench.decode import DecodePlan, measure_decoding, record_results
from forerun.bench.pair import Pair
from forerun.catalog.measurements import load
from forerun.engine.stats import RequestStats, SourceStats
from forerun.measure import rounds
from forerun.measure import run as timing
from forerun.measure.energy import Energy, Meter, Reading
from forerun.measure.medians import bootstrap_interval, first_difference
from forerun.measure.rounds import Result, overall, ratio_interval
from forerun.measure.run import PLAIN, Arm, Run, Work, tally, timed_run
from forerun.measure.workloads import Task
from tests.cli.test_main import run

pytestmark = pytest.mark.usefixtures("fixed_bandwidth")
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=0)


def tasks(*prompts: list[int]) -> list[Task]:
    return [Task(str(i), "file", prompt) for i, prompt in enumerate(prompts)]


def measure(
    pair: Pair, plan: DecodePlan, *prompts: list[int], **options: Any
) -> module.DecodeReport:
    return measure_decoding(
        {"model": str(pair.directory / "target")} | options, plan, tasks(*prompts)
    )


class FakeEngine:
    """Engine whose steps have given durations and emit given tokens."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, dict[int, int]]]
    ) -> None:
        self.steps = list(steps)
        self.now = 0.0
        self.added: list[tuple[Any, ...]] = []
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    @property
    def busy(self) -> bool:
        return bool(self.steps)

    def add(self, prompt: list[int], params: SamplingParams, *, draft, depth, rule, references):
        stats = RequestStats(steps=1, completion_tokens=1)
        request = SimpleNamespace(id=len(self.added), stats=stats, output=[])
        self.added.append((prompt, params.seed, draft, depth))
        return request

    def step_or_raise(self) -> list[SimpleNamespace]:
        seconds, tokens = self.steps.pop(0)
        self.now += seconds
        return [SimpleNamespace(request_id=i, token_ids=[0] * n) for i, n in tokens.items()]


# Tokens that the first request emits before the first token of the second one do not count.
TWO_REQUESTS = [
    (1.0, {0: 1}),
    (1.0, {0: 9, 1: 1}),
    (1.0, {0: 1, 1: 1}),
    (1.0, {1: 2}),
    (2.0, {1: 2}),
]


def test_timing_starts_when_all_requests_have_a_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(monkeypatch, [(5.0, {}), (5.0, {0: 1}), (1.0, {0: 4}), (1.0, {0: 2})])
    assert timed_run(engine, [Work([7])], PARAMS, Arm("suffix", 4)).speed == 3.0
    assert engine.added == [([7], 0, "suffix", 4)]
    engine = FakeEngine(monkeypatch, TWO_REQUESTS)
    assert timed_run(engine, [Work([7]), Work([8])], PARAMS, PLAIN).speed == 6 / 4
    assert [seed for _, seed, _, _ in engine.added] == [0, 1]


def test_prefill_is_not_part_of_decoding_times(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(monkeypatch, [(5.0, {0: 1}), (1.0, {0: 4}), (1.0, {0: 2})])
    requests: list[SimpleNamespace] = []
    add, step = engine.add, engine.step_or_raise

    def record_request(*args: Any, **options: Any) -> SimpleNamespace:
        requests.append(add(*args, **options))
        return requests[-1]

    def record_step() -> list[SimpleNamespace]:
        stats, seconds = requests[0].stats, engine.steps[0][0]
        stats.steps += 1
        stats.verify_seconds += 0.75 * seconds
        stats.draft_seconds += 0.25 * seconds
        return step()

    monkeypatch.setattr(engine, "add", record_request)
    monkeypatch.setattr(engine, "step_or_raise", record_step)
    run = timed_run(engine, [Work([7])], PARAMS, Arm("suffix", 4))
    assert (run.pass_ms, run.draft_ms, run.step_ms) == (750, 250, 1000)


def test_intervals_and_speeds_of_repeated_runs() -> None:
    """Bootstrap intervals cover the true ratio, and speeds are computed from median times."""
    values = np.random.default_rng(1).lognormal(size=12)
    theirs = scipy.stats.bootstrap(
        (values,), np.median, n_resamples=4000, method="percentile", rng=0
    )
    assert bootstrap_interval(values) == pytest.approx(theirs.confidence_interval, rel=0.05)
    assert bootstrap_interval([2.0]) is None and bootstrap_interval([2.0, 2.0]) == (2.0, 2.0)
    assert overall(np.array([[10.0, 10.0, 1.0], [40.0, 90.0, 40.0]])) == 2 / (1 / 10 + 1 / 40)
    constant = np.full((2, 5), 3.0)
    assert ratio_interval(2 * constant, constant) == (2.0, 2.0)
    assert ratio_interval(constant[:, :1], constant[:, :1]) is None
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        plain, drafted = (base * rng.lognormal(0, 0.1, (4, 9)) for base in (1.0, 2.0))
        low, high = ratio_interval(drafted, plain)
        covered += low <= 2.0 <= high
    assert covered >= 85
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1


def test_tally_of_rounds_counted_by_hand() -> None:
    """One request emits 1, 3, 1, 3, .. tokens a step; the last step of the other is truncated."""
    one = RequestStats(completion_tokens=40, rounds=[(0, 0), (4, 2)] * 10, depths=[0, 4] * 10)
    one.by_source["suffix"] = SourceStats(drafted=40, accepted=20)
    two = RequestStats(completion_tokens=2, rounds=[(4, 4)], depths=[2])
    assert tally([one, two]) == {
        "lengths": [10, 1, 10],
        "acceptance": [[11, 11], [11, 11], [10, 0], [10, 0]],
        "sources": {"suffix": [40, 20]},
        "positions": [[0, 17, 34], [32, 4, 8]],
    }
    long = RequestStats(completion_tokens=200, rounds=[(0, 0)] * 200, depths=[0] * 200)
    assert [p[:2] for p in tally([long])["positions"]] == [[0, 32], [32, 32], [64, 64], [128, 72]]


def test_bench_decode_compares_every_draft_depth_and_precision(
    pair: Pair, monkeypatch, capsys, tmp_path
) -> None:
    """Every draft, depth and precision gives plain decoding's output."""
    flags = ["--drafts", f"suffix,model:{pair.directory}/draft", "--depths", "auto,3"]
    flags += ["--quantizations", "none,int8", "--tokens", "24", "--repeats", "2", "--requests", "2"]
    flags += ["--temperature", "0.7", "--threads", "1", "--json", "--out"]
    flags.append(str(tmp_path / "x.jsonl"))
    model = ["--model", f"{pair.directory}/target"]
    code, out, err = run(monkeypatch, capsys, "bench", "decode", *model, *flags)
    report = json.loads(out)
    assert code == 0 and not err and report["tokens"] == 24
    arms = [("off", 0), ("suffix", "auto"), ("suffix", 3), ("model", "auto"), ("model", 3)]
    results = report["results"]
    found = [(r["quantization"], r["draft"].split(":")[0], r["depth"]) for r in results]
    assert found == [(q, draft, depth) for q in ("none", "int8") for draft, depth in arms]
    assert all(r["same"] and r["first_difference"] is None for r in results)
    for r in results:
        assert r["draft"] == "off" or r["interval"][0] <= r["times_plain"] <= r["interval"][1]
    plain, deep = results[0], results[4]
    assert (plain["times_plain"], plain["accepted_length"], plain["drafted"]) == (1.0, 1.0, 0.0)
    assert (plain["requests"], plain["temperature"]) == (2, 0.7)
    assert deep["accepted_length"] > 1.3 and 1.5 < deep["drafted"] <= 3
    wide, narrow = report["limits"]
    assert wide["weight_bytes"] > 1.8 * narrow["weight_bytes"]
    assert wide["tokens_per_second"] == pytest.approx(2 * 10e9 / wide["weight_bytes"])
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["draft"] for line in lines] == [r["draft"] for r in results]
    assert all(line["model"] == report["model"] and line["kind"] == "decode" for line in lines)


def test_a_different_output_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def change_a_token(engine: object, works: list, params: SamplingParams, arm: Arm) -> Run:
        run = timed_run(engine, works, params, arm)
        if arm.draft == "suffix":
            run.outputs[0][5] ^= 1
        return run

    monkeypatch.setattr(rounds, "timed_run", change_a_token)
    report = measure(pair, DecodePlan(PARAMS, ["ngram", "suffix"], [2], repeats=1), [5, 6, 7])
    found = [(r.draft, r.same, r.first_difference) for r in report.results]
    assert found == [("off", True, None), ("ngram", True, None), ("suffix", False, 5)]


def fake_run(speed: float) -> Run:
    return Run(speed, [[1, 1, 1]], [RequestStats(steps=1, completion_tokens=3)], 1.0)


def test_joules_are_medians_over_the_rounds_of_an_arm(pair: Pair, monkeypatch) -> None:
    spent = iter([30.0, 6.0, 12.0, 90.0, 18.0, 42.0])  # off, suffix; suffix, off; off, suffix

    class Counting(Meter):
        def since(self, first: Reading) -> Energy:
            return Energy(1.0, {"package-0": next(spent)})

    monkeypatch.setattr(rounds, "timed_run", lambda *_: fake_run(10.0))
    monkeypatch.setattr(module, "Meter", Counting)
    report = measure(pair, DecodePlan(PARAMS, ["suffix"], [2], repeats=3), [5])
    assert [(r.draft, r.joules_per_token) for r in report.results] == [("off", 10), ("suffix", 4)]


def test_rounds_are_fair(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is dropped before each run, arms rotate, the warm-up does not count."""
    log: list[Any] = []

    def fake_timed_run(engine: object, works: list, params: SamplingParams, arm: Arm) -> Run:
        log.append((works[0].prompt[0], arm.draft))
        return fake_run(10.0 * len(log))

    monkeypatch.setattr(rounds, "timed_run", fake_timed_run)
    monkeypatch.setattr(LLM, "forget", lambda self: log.append("forget"))
    report = measure(pair, DecodePlan(PARAMS, ["suffix", "ngram"], ["auto"], repeats=3), [5], [6])
    assert log[::2] == ["forget"] * 21
    runs = log[1::2]
    assert [prompt for prompt, _ in runs] == [5] * 3 + ([5] * 3 + [6] * 3) * 3
    for i in range(7):
        assert sorted(draft for _, draft in runs[3 * i : 3 * i + 3]) == ["ngram", "off", "suffix"]
    assert [runs[3 * i][1] for i in range(1, 5)] == ["off", "suffix", "ngram", "off"]
    speeds: dict[int, list[float]] = {5: [], 6: []}
    for i, (prompt, draft) in enumerate(runs):
        if draft == "off" and i > 2:
            speeds[prompt].append(10.0 * (2 * i + 2))
    expected = scipy.stats.hmean([sorted(s)[1] for s in speeds.values()])
    assert report.results[0].tokens_per_second == pytest.approx(expected)


@pytest.mark.parametrize(
    ("noise", "seconds", "expected"), [(0.0, 100.0, 3), (0.2, 10.0, 5), (0.15, 1e6, None)]
)
def test_rounds_are_added_until_ratios_have_settled(
    noise, seconds, expected, monkeypatch, pair
) -> None:
    """No round is added without noise, else as many as fit the time or as many as are needed."""
    rng = np.random.default_rng(0)
    now = [0.0]

    def fake_timed_run(engine: object, works: list, params: SamplingParams, arm: Arm) -> Run:
        now[0] += 1.0
        return fake_run(10.0 * (1 + (arm.draft != "off")) * (1 + noise * rng.uniform(-1, 1)))

    monkeypatch.setattr(rounds, "timed_run", fake_timed_run)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = measure(pair, DecodePlan(PARAMS, ["suffix"], [2], repeats=3, settle=seconds), [5])
    low, high = report.results[1].interval
    settled = high - low <= rounds.SETTLED_WIDTH * report.results[1].times_plain
    assert report.repeats == expected if expected else report.repeats > 5
    assert settled == (expected != 5)


def test_a_plan_runs_all_combinations() -> None:
    drafts = ["suffix", "model:y", "off", "suffix", "ngram", "model:x"]
    engines = DecodePlan(PARAMS, drafts, [1, "2"], quantizations=["none", "int4"]).engines()
    loaded = [(quantization, draft) for quantization, draft, _ in engines]
    assert loaded == [(q, draft) for q in ("none", "int4") for draft in ("model:y", "model:x")]
    assert [arm.draft for arm in engines[0][2][::2]] == ["suffix", "ngram", "model:y"]
    assert engines[1][2] == [Arm("model:x", 1), Arm("model:x", 2)]
    assert DecodePlan(PARAMS, ["off"]).engines() == [("none", "off", [])]
    plan = DecodePlan(PARAMS, ["suffix"], temperatures=[0.0, 0.8], requests=[1, 4])
    mixed = [Task("a", "chat", [5]), Task("b", "edit", [6]), Task("c", "chat", [7])]
    settings = list(plan.settings(mixed))
    assert [(s.category, s.temperature, s.requests) for s, _ in settings] == [
        (category, t, n) for category in ("chat", "edit") for t in (0.0, 0.8) for n in (1, 4)
    ]
    assert [[task.id for task in own] for _, own in settings[::4]] == [["a", "c"], ["b"]]


def test_outputs_are_compared_if_the_rule_guarantees_equality(pair: Pair) -> None:
    plan = DecodePlan(PARAMS, ["suffix"], [2], ["match", "token"], [0.0, 0.9], [1, 3], repeats=1)
    report = measure(pair, plan, [5, 6, 5], [7, 8])
    same = {(r.draft, r.rule, r.temperature, r.requests): r.same for r in report.results}
    unknown = {key for key, value in same.items() if value is None}
    assert unknown == {("suffix", "token", 0.9, 1), ("suffix", "token", 0.9, 3)}
    assert all(value is not False for value in same.values()) and len(same) == 12
    assert [limit.requests for limit in report.limits] == [1, 3]


@pytest.mark.parametrize(
    ("prompts", "requests", "expected"),
    [
        ([[5], [6]], 5, [[5, 6, 5, 6, 5]]),
        ([[5], [6], [7]], 1, [[5], [6], [7]]),
        ([[5], [6], [7], [8], [9]], 2, [[5, 6], [7, 8]]),
    ],
)
def test_tasks_are_batched(pair: Pair, prompts, requests, expected) -> None:
    works = module.batches(LLM(pair.directory / "target"), tasks(*prompts), requests, 9)
    assert [[work.prompt[0] for work in batch] for batch in works] == expected


def test_invalid_plans(pair: Pair) -> None:
    for options in (
        *({"drafts": []}, {"drafts": ["sufix"]}, {"depths": ["x"]}, {"repeats": 0}, {"batches": 0}),
        *({"rules": ["mach"]}, {"price": -1.0}, {"requests": [0]}, {"quantizations": []}),
        {"params": SamplingParams(max_tokens=1)},
    ):
        with pytest.raises(ConfigError):
            DecodePlan(**{"params": PARAMS, "drafts": ["suffix"]} | options)
    with pytest.raises(RequestError, match="temperature"):
        DecodePlan(PARAMS, ["suffix"], temperatures=[-1.0])
    with pytest.raises(RequestError, match="context of 256"):
        measure(pair, DecodePlan(SamplingParams(max_tokens=300), ["suffix"]), [5])
    with pytest.raises(ConfigError, match="max_rows=1"):
        measure(pair, DecodePlan(PARAMS, ["suffix"], requests=[2]), [5], [6], max_rows=1)


def result(**changed: Any) -> Result:
    fields = dict.fromkeys(Result.__dataclass_fields__) | {
        "draft": "model:some/where",
        "depth": 4,
        "rule": "match",
        "category": "chat",
        "temperature": 0.8,
        "requests": 1,
        "times_plain": 1.5,
        "accepted_length": 2.5,
        "same": True,
    }
    return Result(**(fields | changed))


def test_results_of_single_drafters_are_recorded() -> None:
    record_results("t", [result(), result(category="", temperature=0.0, depth="auto")])
    record_results(None, [result(draft="eagle3:head")])
    others = ("off", "suffix", "suffix+model:a", "recycle:table")
    record_results("t", [result(draft=draft) for draft in others])
    record_results("t", [result(requests=8), result(same=False), result(rule="token")])
    kept = {(m.target, m.drafter, m.kind, m.category, m.depth): m for m in load()}
    assert kept.keys() == {
        ("t", "some/where", "model", "chat", "4"),
        ("t", "some/where", "model", "all", "auto"),
        ("SmolLM2-135M-Instruct", "head", "eagle3", "chat", "4"),
    }
    one = kept["t", "some/where", "model", "chat", "4"]
    assert (one.accepted_length, one.times_plain, one.temperature) == (2.5, 1.5, 0.8)
    assert one.machine
