"""Timing of decoding: what is counted, that runs are fair and interleaved, that texts are
compared."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

from forerun import LLM, ConfigError, RequestError, SamplingParams
from forerun.bench.decode import sweep as module
from forerun.bench.decode.sweep import Plan, measure_decoding
from forerun.bench.pair import Pair
from forerun.engine.stats import RequestStats
from forerun.measure import rounds
from forerun.measure import run as timing
from forerun.measure.energy import Energy, Meter, Window
from forerun.measure.medians import bootstrap_interval, first_difference
from forerun.measure.rounds import overall, ratio_interval
from forerun.measure.run import PLAIN, Arm, Run, Work, tally, timed_run
from forerun.measure.workloads import Task
from tests.cli.test_main import run

pytestmark = pytest.mark.usefixtures("steady")
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=0)


def tasks(*prompts: list[int]) -> list[Task]:
    return [Task(str(i), "file", prompt) for i, prompt in enumerate(prompts)]


class FakeEngine:
    """Plays steps of given lengths that give tokens to requests."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, dict[int, int]]]
    ) -> None:
        self.steps, self.now, self.added = list(steps), 0.0, []
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    @property
    def busy(self) -> bool:
        return bool(self.steps)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        draft: str,
        depth: int | str,
        rule: str,
        references: tuple,
    ) -> SimpleNamespace:
        request = SimpleNamespace(
            id=len(self.added), stats=RequestStats(steps=1, completion_tokens=1), output=[]
        )
        self.added.append((prompt, params, draft, depth))
        return request

    def step_or_raise(self) -> list[SimpleNamespace]:
        seconds, tokens = self.steps.pop(0)
        self.now += seconds
        return [SimpleNamespace(request_id=i, token_ids=[0] * n) for i, n in tokens.items()]


def test_one_request_counts_what_follows_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(monkeypatch, [(5.0, {}), (5.0, {0: 1}), (1.0, {0: 4}), (1.0, {0: 2})])
    assert timed_run(engine, [Work([7])], PARAMS, Arm("suffix", 4)).speed == 3.0
    assert engine.added == [([7], PARAMS, "suffix", 4)]


def test_several_requests_count_from_the_last_first_token_to_the_last_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a quick request says before is not counted, the time in which a slow one goes on alone
    is."""
    steps = [(1.0, {0: 1}), (1.0, {0: 9, 1: 1}), (1.0, {0: 1, 1: 1}), (1.0, {1: 2}), (2.0, {1: 2})]
    engine = FakeEngine(monkeypatch, steps)
    assert timed_run(engine, [Work([7]), Work([8])], PARAMS, PLAIN).speed == 6 / 4
    assert [params.seed for _, params, _, _ in engine.added] == [0, 1]


def test_the_interval_is_the_percentile_bootstrap_of_the_median() -> None:
    values = np.random.default_rng(1).lognormal(size=12)
    theirs = scipy.stats.bootstrap(
        (values,), np.median, n_resamples=4000, method="percentile", rng=0
    )
    assert bootstrap_interval(values) == pytest.approx(theirs.confidence_interval, rel=0.05)
    assert bootstrap_interval([2.0]) is None and bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1 and first_difference([1, 2], [1, 2, 3]) == 2


def test_everything_is_reported(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts come from the pair; every draft at every depth in every precision says what plain
    decoding says."""
    drafts = f"suffix,model:{pair.directory}/draft"
    flags = [
        "--drafts",
        drafts,
        "--depths",
        "auto,3",
        "--quantizations",
        "none,int8",
        "--tokens",
        "24",
    ]
    more = ["--repeats", "2", "--requests", "2", "--temperature", "0.7", "--threads", "1", "--json"]
    code, out, err = run(
        monkeypatch, capsys, "bench", "decode", "--model", f"{pair.directory}/target", *flags, *more
    )
    report = json.loads(out)
    assert code == 0 and not err
    rows = [(r["quantization"], r["draft"].split(":")[0], r["depth"]) for r in report["results"]]
    arms = [("off", 0), ("suffix", "auto"), ("suffix", 3), ("model", "auto"), ("model", 3)]
    assert rows == [(q, draft, depth) for q in ("none", "int8") for draft, depth in arms]
    assert all(r["same"] and r["first_difference"] is None for r in report["results"])
    assert all(
        r["interval"][0] <= r["times_plain"] <= r["interval"][1]
        for r in report["results"]
        if r["draft"] != "off"
    )
    plain, deep = report["results"][0], report["results"][4]
    assert (plain["times_plain"], plain["accepted_length"], plain["drafted"]) == (1.0, 1.0, 0.0)
    assert deep["accepted_length"] > 1.3 and 1.5 < deep["drafted"] <= 3
    wide, narrow = report["limits"]
    assert wide["weight_bytes"] > 1.8 * narrow["weight_bytes"]
    assert wide["tokens_per_second"] == pytest.approx(2 * 10e9 / wide["weight_bytes"])
    first = report["results"][0]
    assert (first["requests"], report["tokens"], first["temperature"]) == (2, 24, 0.7)


def test_a_difference_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(engine: object, works: list, params: SamplingParams, arm: Arm) -> Run:
        run = timed_run(engine, works, params, arm)
        if arm.draft == "suffix":
            run.outputs[0][5] ^= 1
        return run

    monkeypatch.setattr(rounds, "timed_run", corrupt)
    plan = Plan(PARAMS, ["ngram", "suffix"], [2], repeats=1)
    report = measure_decoding({"model": str(pair.directory / "target")}, plan, tasks([5, 6, 7]))
    assert [(r.draft, r.same, r.first_difference) for r in report.results] == [
        ("off", True, None), ("ngram", True, None), ("suffix", False, 5),
    ]  # fmt: skip


def test_joules_are_those_of_a_token(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each arm its own, the median of its rounds."""
    spent = iter(
        [30.0, 6.0, 12.0, 90.0, 18.0, 42.0]
    )  # of off and suffix, in the second round the other way round

    class Counting(Meter):
        @contextmanager
        def window(self) -> Iterator[Window]:
            yield (window := Window())
            window.energy = Energy(
                1.0, self.method, {"package-0": next(spent)}, {"package-0": None}
            )

    def note(engine: object, works: list[Work], params: SamplingParams, arm: Arm) -> Run:
        return Run(10.0, [[1, 1, 1]], [RequestStats(steps=1, completion_tokens=3)], 1.0)

    monkeypatch.setattr(rounds, "timed_run", note)
    monkeypatch.setattr(module, "Meter", Counting)
    plan = Plan(PARAMS, ["suffix"], [2], repeats=3)
    report = measure_decoding({"model": str(pair.directory / "target")}, plan, tasks([5]))
    assert [(r.draft, r.joules_per_token) for r in report.results] == [
        ("off", 10.0),
        ("suffix", 4.0),
    ]


def test_rounds_are_fair(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run comes after a forgetting; a round runs everything once over every prompt, another
    one first each time; the warm-up does not count; a speed is that of the median times."""
    log: list[object] = []

    def note(engine: object, works: list, params: SamplingParams, arm: Arm) -> Run:
        log.append((works[0].prompt[0], arm.draft))
        return Run(10.0 * len(log), [[1]], [RequestStats(steps=1, completion_tokens=1)], 1.0)

    monkeypatch.setattr(rounds, "timed_run", note)
    monkeypatch.setattr(LLM, "forget", lambda self: log.append("forget"))
    plan = Plan(PARAMS, ["suffix", "ngram"], ["auto"], repeats=3)
    report = measure_decoding({"model": str(pair.directory / "target")}, plan, tasks([5], [6]))
    assert log[::2] == ["forget"] * 21
    runs = log[1::2]
    assert [prompt for prompt, _ in runs] == [5] * 3 + ([5] * 3 + [6] * 3) * 3
    for i in range(7):
        assert sorted(draft for _, draft in runs[3 * i : 3 * i + 3]) == ["ngram", "off", "suffix"]
    assert [runs[3 * i][1] for i in range(1, 5)] == ["off", "suffix", "ngram", "off"]
    speeds = {5: [], 6: []}
    for i, (prompt, draft) in enumerate(runs):
        if draft == "off" and i > 2:
            speeds[prompt].append(10.0 * (2 * i + 2))
    assert report.results[0].tokens_per_second == pytest.approx(
        scipy.stats.hmean([sorted(s)[1] for s in speeds.values()])
    )


@pytest.mark.parametrize(
    ("noise", "seconds", "expected"), [(0.0, 100.0, 3), (0.2, 10.0, 5), (0.2, 1e6, None)]
)
def test_rounds_are_added_until_ratios_have_settled(
    noise: float, seconds: float, expected: int | None, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    """None where they have, as many as fit into the time where they have not; with time enough,
    until they have."""
    dice, now = np.random.default_rng(0), [0.0]

    def note(engine: object, works: list, params: SamplingParams, arm: Arm) -> Run:
        now[0] += 1.0
        speed = 10.0 * (1 + (arm.draft != "off")) * (1 + noise * dice.uniform(-1, 1))
        return Run(speed, [[1]], [RequestStats(steps=1, completion_tokens=1)], 1.0)

    monkeypatch.setattr(rounds, "timed_run", note)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    plan = Plan(PARAMS, ["suffix"], [2], repeats=3, settle=seconds)
    report = measure_decoding({"model": str(pair.directory / "target")}, plan, tasks([5]))
    low, high = report.results[1].interval
    settled = high - low <= rounds.NARROW * report.results[1].times_plain
    assert report.repeats == expected if expected else report.repeats > 5
    assert settled == (expected != 5)


def test_one_disturbed_run_counts_for_nothing_and_every_prompt_for_its_time() -> None:
    speeds = np.array([[10.0, 10.0, 1.0], [40.0, 90.0, 40.0]])
    assert overall(speeds) == pytest.approx(2 / (1 / 10 + 1 / 40))
    assert ratio_interval(speeds, speeds) is not None
    steady = np.full((2, 5), 3.0)
    assert (
        ratio_interval(2 * steady, steady) == (2.0, 2.0)
        and ratio_interval(steady[:, :1], steady[:, :1]) is None
    )


def test_the_interval_covers_what_repeats_show() -> None:
    """Of 100 measurements with noise of 10 %, nearly all intervals cover the true ratio."""
    dice, covered = np.random.default_rng(3), 0
    for _ in range(100):
        plain, drafted = (base * dice.lognormal(0, 0.1, (4, 9)) for base in (1.0, 2.0))
        low, high = ratio_interval(drafted, plain)
        covered += low <= 2.0 <= high
    assert covered >= 85


def test_engines_are_loaded_once_for_each_draft_model() -> None:
    drafts = ["suffix", "model:y", "off", "suffix", "ngram", "model:x"]
    loaded = Plan(PARAMS, drafts, [1, "2"], quantizations=["none", "int4"]).engines()
    assert [(q, draft) for q, draft, _ in loaded] == [
        (q, draft) for q in ("none", "int4") for draft in ("model:y", "model:x")
    ]
    assert [arm.draft for arm in loaded[0][2]] == [
        d for d in ("suffix", "ngram", "model:y") for _ in (1, 2)
    ]
    assert loaded[1][2] == [Arm("model:x", 1), Arm("model:x", 2)]
    assert Plan(PARAMS, ["off"]).engines() == [("none", "off", [])]


def test_settings_are_the_product_of_categories_temperatures_and_requests() -> None:
    plan = Plan(PARAMS, ["suffix"], temperatures=[0.0, 0.8], requests=[1, 4])
    mixed = [Task("a", "chat", [5]), Task("b", "edit", [6]), Task("c", "chat", [7])]
    settings = list(plan.settings(mixed))
    assert [(s.category, s.temperature, s.requests) for s, _ in settings] == [
        (category, t, n) for category in ("chat", "edit") for t in (0.0, 0.8) for n in (1, 4)
    ]
    assert [[task.id for task in mine] for _, mine in settings[::4]] == [["a", "c"], ["b"]]


def test_a_sweep_compares_texts_where_a_rule_promises_them(pair: Pair) -> None:
    plan = Plan(
        PARAMS,
        ["suffix"],
        [2],
        rules=["match", "token"],
        temperatures=[0.0, 0.9],
        requests=[1, 3],
        repeats=1,
    )
    report = measure_decoding(
        {"model": str(pair.directory / "target")}, plan, tasks([5, 6, 5], [7, 8]), kind="sweep"
    )
    same = {(r.draft, r.rule, r.temperature, r.requests): r.same for r in report.results}
    assert {key: value for key, value in same.items() if value is not True} == {
        ("suffix", "token", 0.9, 1): None, ("suffix", "token", 0.9, 3): None,
    }  # fmt: skip
    assert len(same) == 3 * 2 * 2 and report.kind == "sweep"
    assert [limit.requests for limit in report.limits] == [1, 3]


def test_few_tasks_are_repeated_to_fill_a_batch_and_many_are_grouped(pair: Pair) -> None:
    llm = LLM(pair.directory / "target")
    prompts = [[[work.prompt[0] for work in batch] for batch in batches] for batches in (
        module.batches(llm, tasks([5], [6]), 5, 9), module.batches(llm, tasks([5], [6], [7]), 1, 9),
        module.batches(llm, tasks([5], [6], [7], [8], [9]), 2, 9),
    )]  # fmt: skip
    assert prompts == [[[5, 6, 5, 6, 5]], [[5], [6], [7]], [[5, 6], [7, 8]]]


def test_tally_by_hand() -> None:
    """Two requests: one of 40 tokens in passes of 1, 3, 1, 3, ..; the last pass of the other is cut
    by its limit."""
    one = RequestStats(completion_tokens=40, rounds=[(0, 0), (4, 2)] * 10, depths=[0, 4] * 10)
    one.by_source["suffix"].drafted, one.by_source["suffix"].accepted = 40, 20
    two = RequestStats(completion_tokens=2, rounds=[(4, 4)], depths=[2])
    counted = tally([one, two])
    assert counted["lengths"] == [10, 1, 10]
    assert counted["acceptance"] == [[11, 11], [11, 11], [10, 0], [10, 0]]
    assert counted["sources"] == {"suffix": [40, 20]}
    assert counted["positions"] == [[0, 17, 34], [32, 4, 8]]
    assert sum(i * n for i, n in enumerate(counted["lengths"], 1)) == 42
    long = RequestStats(completion_tokens=200, rounds=[(0, 0)] * 200, depths=[0] * 200)
    assert [row[:2] for row in tally([long])["positions"]] == [
        [0, 32],
        [32, 32],
        [64, 64],
        [128, 72],
    ]


def test_what_cannot_be_measured(pair: Pair) -> None:
    for options in (
        {"drafts": []}, {"drafts": ["sufix"]}, {"depths": ["x"]}, {"repeats": 0}, {"batches": 0},
        {"rules": ["mach"]}, {"price": -1.0},
        {"requests": [0]}, {"quantizations": []},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Plan(**{"params": PARAMS, "drafts": ["suffix"]} | options)
    with pytest.raises(RequestError, match="temperature"):
        Plan(PARAMS, ["suffix"], temperatures=[-1.0])
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        Plan(SamplingParams(max_tokens=1), ["suffix"])
    target = {"model": str(pair.directory / "target")}
    with pytest.raises(RequestError, match="context of 256"):
        measure_decoding(target, Plan(SamplingParams(max_tokens=300), ["suffix"]), tasks([5]))
    with pytest.raises(ConfigError, match="max_rows=1"):
        measure_decoding(
            target | {"max_rows": 1}, Plan(PARAMS, ["suffix"], requests=[2]), tasks([5], [6])
        )
