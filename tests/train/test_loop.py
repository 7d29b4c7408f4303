"""The loop: a run that is taken up again is the run itself; what goes wrong leaves the last
checkpoint whole."""

import errno
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import ForerunError, LoadError
from forerun.cli.progress import Tell
from forerun.train import checkpoint, stream
from forerun.train.checkpoint import read_checkpoint, write_checkpoint
from forerun.train.evaluate import Evaluation
from forerun.train.loop import RATE, Trainer, computes_bfloat16, learning_rate
from forerun.train.optimizers import Muon
from forerun.train.settings import Training
from tests.train.conftest import Clock, Make


class Each(Tell):
    """Does something after each step."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        self.then()


class Interrupting(Tell):
    """Ctrl-C after a step."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)


class Scripted:
    """A judge that says what it was told to."""

    parts = 1

    def __init__(self, *lengths: float) -> None:
        self.lengths = list(lengths)

    def evaluate(self, module: torch.nn.Module, step: int) -> Evaluation:
        return Evaluation(step, 1.0, 1.0, 1.0, self.lengths.pop(0))


ENDS: dict[str, Any] = {"patience": 0, "evaluate_every": 0}  # by steps or time alone


def timed(trainer: Trainer, clock: Clock, parts: int) -> Trainer:
    """A step takes 30 seconds, an evaluation 10, and measuring as long as so many evaluations."""
    learn, judge = trainer.learn, Scripted(1.0)

    def slow_learn() -> tuple[float, int]:
        clock.now += 30
        return learn()

    def evaluate(module: torch.nn.Module, step: int) -> Evaluation:
        clock.now += 10
        return Evaluation(step, 1.0, 1.0, 1.0, 1.0)

    judge.parts, judge.evaluate = parts, evaluate  # type: ignore[method-assign]
    trainer.learn, trainer.judge = slow_learn, judge  # type: ignore[method-assign, assignment]
    return trainer


def with_dropout(trainer: Trainer) -> Trainer:
    """So that torch's random numbers count."""
    for module in trainer.module.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return trainer


def interrupted(make: Make, at: int, **settings: object) -> Trainer:
    trainer = with_dropout(make(tell=Interrupting(at), **settings))
    with pytest.raises(KeyboardInterrupt, match=f"after step {at}"):
        trainer.run()
    return trainer


@pytest.mark.parametrize("pool", [64, 4], ids=["new texts", "texts that come back"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_interrupted_run_goes_on_to_the_very_same_curve(
    make: Make, at: int, pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, evaluations and weights bit by bit, whether or not the step is one of evaluation or
    checkpoint."""
    monkeypatch.setattr(stream, "POOL", pool)
    whole = with_dropout(make())
    record = whole.run()
    assert record.step == len(record.losses) == 6 and [e.step for e in record.evaluations] == [
        0,
        3,
        6,
    ]
    first = interrupted(make, at)
    assert first.record.losses == record.losses[:at]
    second = with_dropout(make())
    second.resume(read_checkpoint(first.path))
    assert second.record.step == at
    assert second.run() == record
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.module.parameters(), second.module.parameters(), strict=True)
    )


class Killed(BaseException):
    """What no handler knows."""


@pytest.mark.parametrize("minutes", [0.0, 1000.0], ids=["no limit", "a limit that is far"])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_very_same_curve(
    make: Make, at: int, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written or removed at its end, and what was captured of texts since the checkpoint
    is still there."""
    monkeypatch.setattr(stream, "POOL", 4)
    whole = with_dropout(make(max_minutes=minutes))
    record = whole.run()

    class Killing:
        def __call__(self, text: str, done: float = 0.0, of: float = 0.0) -> None:
            if text.startswith(f"step {at} "):
                raise Killed

        def note(self, text: str) -> None:
            pass

    first = with_dropout(make(tell=Killing(), max_minutes=minutes))
    with monkeypatch.context() as patch:
        patch.setattr(first.harvest, "close", lambda remove: None)
        with pytest.raises(Killed):
            first.run()
    second = with_dropout(make(max_minutes=minutes))
    second.resume(read_checkpoint(first.path))
    assert second.record.step == (at - 1) // 2 * 2
    assert second.run() == record
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.module.parameters(), second.module.parameters(), strict=True)
    )


@pytest.mark.parametrize("part", ["random", "optimizers", "module", "step"])
def test_each_part_of_a_checkpoint_counts(make: Make, part: str) -> None:
    """Without it the curve is another: the test above can fail."""
    record = with_dropout(make()).run()
    state = read_checkpoint(interrupted(make, 3).path)
    second = with_dropout(make())
    fresh = {
        "random": torch.get_rng_state(), "optimizers": [optimizer.state_dict() for optimizer in second.optimizers],
        "module": second.module.state_dict(), "step": 2,
    }  # fmt: skip
    second.resume(state | {part: fresh[part]})
    assert second.run().losses[-3:] != record.losses[-3:]


def test_it_learns(make: Make) -> None:
    trainer = make(steps=30, on_policy=0.0, evaluate_every=0, learning_rate=3e-3, patience=0)
    record = trainer.run()
    assert sum(record.losses[-5:]) < 0.8 * sum(record.losses[:5])
    assert record.evaluations[-1].overlap > record.evaluations[0].overlap


def test_accumulated_passes_are_one_step(make: Make) -> None:
    """The same texts in one pass or in three give the same gradient."""
    one, three = make(steps=2, rows=6), make(steps=2, rows=2, accumulate=3)
    assert one.learn()[0] == pytest.approx(three.learn()[0], rel=1e-5)
    for mine, others in zip(one.optimizers, three.optimizers, strict=True):
        name = "momentum" if isinstance(mine, Muon) else "exp_avg"
        for a, b in zip(mine.state.values(), others.state.values(), strict=True):
            assert torch.allclose(a[name], b[name], atol=1e-6)


def test_the_best_is_kept_and_patience_ends(make: Make) -> None:
    trainer = make(steps=50, evaluate_every=1, patience=2, checkpoint_every=0)
    trainer.judge = Scripted(1.0, 1.5, 1.4, 1.5, 9.0)  # type: ignore[assignment]
    seen: list[torch.Tensor] = []
    trainer.tell = Each(lambda: seen.append(next(trainer.module.parameters()).detach().clone()))
    record = trainer.run()
    assert (
        record.step == 3 and record.best is record.evaluations[1] and len(record.evaluations) == 4
    )
    assert torch.equal(next(trainer.module.parameters()), seen[0]) and not torch.equal(
        seen[0], seen[2]
    )


@pytest.mark.parametrize(("parts", "steps"), [(6, 16), (9, 15), (1000, 14)])
def test_the_time_ends(make: Make, parts: int, steps: int) -> None:
    """Of ten minutes one goes by before the first step. What an evaluation took says how much is
    kept for measuring, a fifth at most, and over what is left the learning rate falls."""
    clock = Clock()
    trainer = make(steps=50, max_minutes=10.0, clock=clock, **ENDS)
    rates: list[float] = []
    trainer.tell = Each(lambda: rates.append(trainer.optimizers[0].param_groups[0]["lr"]))
    clock.now += 60
    record = timed(trainer, clock, parts).run()
    assert (record.began, record.slowest) == (60, 10)
    assert record.step == steps and record.evaluations[-1].step == record.step
    assert max(rates[:3]) == max(rates) and rates[-1] < 0.15 * max(rates), (
        "it warms up once set-up is over"
    )


def test_a_run_that_is_taken_up_again_has_the_time_that_was_left(make: Make) -> None:
    """Setting it up again takes time too; what is kept for measuring is known from before."""
    clock = Clock()
    first = make(tell=Interrupting(3), steps=50, max_minutes=10.0, clock=clock, **ENDS)
    clock.now += 60
    with pytest.raises(KeyboardInterrupt):
        timed(first, clock, 6).run()
    clock = Clock(7000.0)
    second = make(steps=50, max_minutes=10.0, clock=clock, **ENDS)
    clock.now += 50
    second.resume(read_checkpoint(first.path))
    assert (
        second.record.seconds == 60 + 10 + 3 * 30
        and second.deadline.seconds == second.record.seconds + 50
    )
    record = timed(second, clock, 6).run()
    assert (record.step, record.began) == (3 + 11, 60)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_with_the_last_checkpoint(
    make: Make, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    recipe = type(trainer.recipe)
    right = recipe.loss
    monkeypatch.setattr(
        recipe,
        "loss",
        lambda self, *a: right(self, *a) * (value if trainer.record.step == 3 else 1.0),
    )
    with pytest.raises(
        ForerunError, match=r"loss of step 4 is (nan|inf).*lower --learning-rate.*is kept"
    ) as error:
        trainer.run()
    assert "\n" not in str(error.value)
    state = read_checkpoint(trainer.path)
    assert state["step"] == 2 and all(
        torch.isfinite(value).all() for value in state["module"].values()
    )
    assert all(torch.isfinite(p).all() for p in trainer.module.parameters())


def test_a_full_disk_keeps_the_last_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    calls = []

    def full(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(ForerunError, match=r"No space left on device.*go on with --resume"):
        trainer.run()
    assert read_checkpoint(trainer.path)["step"] == 2
    assert [path.name for path in trainer.path.parent.iterdir()] == [trainer.path.name]


def test_a_disk_that_is_full_within_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says so in its own words, several lines of them."""

    def fail(*_: object) -> None:
        raise RuntimeError(
            "[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0\nframe #0"
        )

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(ForerunError, match="cannot be written") as error:
        write_checkpoint(tmp_path / "x", {})
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    for name, content, says in (
        ("gone", None, "begin without --resume"),
        ("empty", b"", "cannot be read"),
        ("text", b"hello", "cannot be read"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(LoadError, match=says) as error:
            read_checkpoint(tmp_path / name)
        assert "\n" not in str(error.value)
    torch.save([1], tmp_path / "list")
    with pytest.raises(LoadError, match="another version"):
        read_checkpoint(tmp_path / "list")


def test_the_learning_rate() -> None:
    settings = Training(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(step / 100, settings) for step in range(100)]
    assert max(rates) == rates[10] == 1.0 and (rates[0], rates[9]) == pytest.approx((0.1, 1.0))
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.11
    assert learning_rate(0.0, Training(steps=1, warmup=0.0)) == RATE


def test_precision() -> None:
    assert computes_bfloat16("bfloat16", torch.device("cpu")) and not computes_bfloat16(
        "float32", torch.device("cpu")
    )


def test_bfloat16_trains_float32_weights(make: Make) -> None:
    trainer = make(steps=2, dtype="bfloat16")
    before = trainer.judge.evaluate(trainer.module, 0)
    record = trainer.run()
    assert all(p.dtype == torch.float32 for p in trainer.module.parameters())
    assert all(math.isfinite(loss) for loss in record.losses)
    assert record.evaluations[0].overlap != before.overlap
    assert record.evaluations[0].overlap == pytest.approx(before.overlap, abs=0.02)
