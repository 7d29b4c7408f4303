"""A resumed run equals an uninterrupted one, and failures keep the last checkpoint; optimizers and
the time limit."""

import errno
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forerun import ForerunError, LoadError
from forerun.cli.progress import Tell
from forerun.train import loop, stream
from forerun.train.evaluate import Evaluation
from forerun.train.loop import (
    Muon,
    Trainer,
    computes_bfloat16,
    learning_rate,
    make_optimizers,
    orthogonalise,
    read_checkpoint,
    write_checkpoint,
)
from forerun.train.options import Training
from forerun.train.time_limit import TimeLimit
from tests.train.conftest import Clock, Make


class After(Tell):
    """Progress that calls a function after each step."""

    def __init__(self, then: Callable[[str], None]) -> None:
        self.then = then

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        self.then(what)


class Killed(BaseException):
    """An exception that no handler catches."""


class Scripted:
    """An evaluator with given accepted lengths."""

    def __init__(self, *lengths: float) -> None:
        self.lengths = list(lengths)

    def evaluate(self, module: nn.Module, step: int) -> Evaluation:
        return Evaluation(step, 1.0, 1.0, self.lengths.pop(0))


def stopping(at: int, stop: Callable[[], None]) -> After:
    def then(what: str) -> None:
        if what.startswith(f"step {at} "):
            stop()

    return After(then)


def kill() -> None:
    raise Killed


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def with_dropout(trainer: Trainer) -> Trainer:
    """Make torch's random numbers matter."""
    for module in trainer.module.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return trainer


def weights_equal(one: Trainer, other: Trainer) -> bool:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("at", "killed", "settings"),
    [
        (1, False, {}),
        (3, False, {}),
        (5, False, {}),
        (3, True, {}),
        (4, True, {"max_minutes": 1000.0}),
    ],
)
def test_a_resumed_run_has_the_same_curve_and_weights(
    make: Make, at: int, killed: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes after Ctrl-C, or from the last checkpoint after a kill, with reused texts."""
    monkeypatch.setattr(stream, "INITIAL_TEXTS", 4)
    uninterrupted = with_dropout(make(**settings))
    record = uninterrupted.run()
    assert record.step == len(record.losses) == 6
    assert [evaluation.step for evaluation in record.evaluations] == [0, 3, 6]
    first = with_dropout(make(tell=stopping(at, kill if killed else ctrl_c), **settings))
    with monkeypatch.context() as patched:
        if killed:
            patched.setattr(first.stream, "close", lambda remove: None)
            with pytest.raises(Killed):
                first.run()
        else:
            with pytest.raises(KeyboardInterrupt, match=f"after step {at}"):
                first.run()
            assert first.record.losses == record.losses[:at]
    second = with_dropout(make(**settings))
    second.resume(read_checkpoint(first.path))
    assert second.record.step == ((at - 1) // 2 * 2 if killed else at)
    assert second.run() == record and weights_equal(uninterrupted, second)


def test_training_reduces_the_loss(make: Make) -> None:
    trainer = make(steps=20, on_policy=0.0, evaluate_every=0, learning_rate=3e-3, patience=0)
    record = trainer.run()
    assert sum(record.losses[-5:]) < 0.8 * sum(record.losses[:5])
    assert record.evaluations[-1].overlap > record.evaluations[0].overlap


def test_accumulated_passes_are_one_step(make: Make) -> None:
    """The same texts in one pass or in three give the same gradient."""
    one, three = make(steps=2, rows=6), make(steps=2, rows=2, accumulate=3)
    assert one.learn()[0] == pytest.approx(three.learn()[0], rel=1e-5)
    for first, second in zip(one.optimizers, three.optimizers, strict=True):
        name = "momentum" if isinstance(first, Muon) else "exp_avg"
        for a, b in zip(first.state.values(), second.state.values(), strict=True):
            assert torch.allclose(a[name], b[name], atol=1e-6)


def test_the_best_weights_are_kept_and_patience_ends_training(make: Make) -> None:
    trainer = make(steps=50, evaluate_every=1, patience=2, checkpoint_every=0)
    trainer.evaluator = Scripted(1.0, 1.5, 1.4, 1.5, 9.0)  # type: ignore[assignment]
    seen: list[torch.Tensor] = []
    weight = next(trainer.module.parameters())
    trainer.tell = After(lambda _: seen.append(weight.detach().clone()))
    record = trainer.run()
    assert record.step == 3 and record.best is record.evaluations[1]
    assert torch.equal(weight, seen[0]) and not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize(
    ("minutes", "tasks", "steps"), [(10, "none", 19), (10, "chat", 16), (0, "none", 40)]
)
def test_the_time_limit_ends_training(make: Make, minutes: float, tasks: str, steps: int) -> None:
    """A step takes 30 seconds and an evaluation 10; a fifth of the time is left for tasks."""
    clock = Clock()
    trainer = make(
        clock=clock,
        steps=40,
        max_minutes=minutes,
        tasks=tasks,
        patience=0,
        evaluate_every=0,
        checkpoint_every=0,
    )
    learn, evaluator = trainer.learn, Scripted()

    def slow_learn() -> tuple[float, int]:
        clock.now += 30
        return learn()

    def evaluate(module: nn.Module, step: int) -> Evaluation:
        clock.now += 10
        return Evaluation(step, 1.0, 1.0, 1.0)

    evaluator.evaluate = evaluate  # type: ignore[method-assign]
    trainer.learn, trainer.evaluator = slow_learn, evaluator  # type: ignore[method-assign, assignment]
    assert trainer.run().step == steps
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate < 0.2 * loop.LossOptions.default_rate, "the learning rate has fallen"


def test_the_time_limit_divides_the_seconds_of_a_run() -> None:
    clock = Clock(500.0)
    limit = TimeLimit(10, clock)
    clock.now += 100
    assert (limit.seconds, limit.left) == (100, 500) and limit.has(500) and not limit.has(501)
    limit.resume(200)
    assert (limit.seconds, limit.left) == (300, 300)
    assert limit.training_end(0, 0.2) == 480
    assert limit.training_end(400, 0.2) == 500, "at most the share of training"
    assert limit.training_end(700, 0.2) < 700, "even if the set-up has taken all of the time"
    assert TimeLimit(10000).training_end(0, 0.2) == 600000 - 1800
    assert TimeLimit().left == TimeLimit().training_end(20, 0.2) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_with_the_last_checkpoint(
    make: Make, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    recipe = type(trainer.recipe)
    loss = recipe.loss

    def spoiled(self: Any, *args: Any) -> torch.Tensor:
        return loss(self, *args) * (value if trainer.record.step == 3 else 1.0)

    monkeypatch.setattr(recipe, "loss", spoiled)
    message = r"loss of step 4 is (nan|inf).*lower --learning-rate.*is kept"
    with pytest.raises(ForerunError, match=message) as error:
        trainer.run()
    assert "\n" not in str(error.value)
    state = read_checkpoint(trainer.path)
    assert state["step"] == 2
    assert all(torch.isfinite(value).all() for value in state["module"].values())
    assert all(torch.isfinite(p).all() for p in trainer.module.parameters())


def test_a_full_disk_keeps_the_last_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, calls = make(), []

    def full(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop.os, "fsync", full)
    with pytest.raises(ForerunError, match=r"No space left on device.*continue with --resume"):
        trainer.run()
    assert read_checkpoint(trainer.path)["step"] == 2
    assert [path.name for path in trainer.path.parent.iterdir()] == [trainer.path.name]


def test_bad_checkpoint_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content, message in (
        ("gone", None, "begin without --resume"),
        ("empty", b"", "cannot be read"),
        ("text", b"hello", "cannot be read"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(LoadError, match=message) as error:
            read_checkpoint(tmp_path / name)
        assert "\n" not in str(error.value)
    torch.save([1], tmp_path / "list")
    with pytest.raises(LoadError, match="another version"):
        read_checkpoint(tmp_path / "list")

    def fail(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos\nframe #0")

    monkeypatch.setattr(torch, "save", fail)  # what torch raises when a disk is full
    with pytest.raises(ForerunError, match="cannot be written") as failed:
        write_checkpoint(tmp_path / "x", {})
    assert "\n" not in str(failed.value) and not (tmp_path / "x").exists()


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = Training(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(step / 100, settings) for step in range(100)]
    assert max(rates) == rates[10] == 1.0 and (rates[0], rates[9]) == pytest.approx((0.1, 1.0))
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.11


def test_bfloat16_trains_float32_weights(make: Make) -> None:
    cpu = torch.device("cpu")
    assert computes_bfloat16("bfloat16", cpu) and not computes_bfloat16("float32", cpu)
    trainer = make(steps=2, dtype="bfloat16")
    before = trainer.evaluator.evaluate(trainer.module, 0)
    record = trainer.run()
    assert all(p.dtype == torch.float32 for p in trainer.module.parameters())
    assert all(math.isfinite(loss) for loss in record.losses)
    assert record.evaluations[0].overlap != before.overlap
    assert record.evaluations[0].overlap == pytest.approx(before.overlap, abs=0.02)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(9, 8)
        self.up, self.norm = nn.Linear(8, 12, bias=False), nn.LayerNorm(12)
        self.lm_head = nn.Linear(12, 9, bias=False)


@pytest.mark.parametrize("shape", [(6, 6), (4, 11), (11, 4)])
def test_matrices_become_nearly_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3


def test_muon_takes_the_steps_of_torch() -> None:
    """The gradients are the same; torch's optimizer computes in bfloat16."""
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 10), [torch.randn(6, 10) for _ in range(4)]
    moved = []
    for make in (
        lambda p: Muon([p], 0.01, 0.1, torch.float32),
        lambda p: torch.optim.Muon([p], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ):
        weight = nn.Parameter(start.clone())
        optimizer = make(weight)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        moved.append(weight.detach() - start)
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[1].norm()


def test_muon_is_used_for_inner_matrices_only() -> None:
    net = Net()
    muon, adam = make_optimizers(net, "muon", 0.01, 0.0, torch.float32)
    assert [len(p) for p in muon.param_groups[0]["params"]] == [12] and isinstance(muon, Muon)
    assert len(adam.param_groups[0]["params"]) == 4
    (only,) = make_optimizers(net, "adamw", 0.01, 0.0, torch.float32)
    assert len(only.param_groups[0]["params"]) == 5
    net.requires_grad_(False)
    net.up.weight.requires_grad_(True)
    assert len(make_optimizers(net, "muon", 0.01, 0.0, torch.float32)) == 1
