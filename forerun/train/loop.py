"""The one training loop: any recipe, steps that can be repeated, checkpoints that continue to the
same curve.

What a step does follows from the settings and its number; what it changes is the module, the
optimisers, torch's random numbers and the `Record`. A checkpoint holds these four, so a run that
was interrupted and taken up again goes on as if nothing had been.
"""

from __future__ import annotations

import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.cli.progress import Tell, nothing
from forerun.errors import ForerunError
from forerun.hardware import cores
from forerun.kernels import native
from forerun.train.capture import Target
from forerun.train.checkpoint import write_checkpoint
from forerun.train.deadline import Deadline
from forerun.train.evaluate import FIGURE, Evaluation, Judge
from forerun.train.optimizers import make_optimizers
from forerun.train.options import LossOptions
from forerun.train.recipes import Recipe
from forerun.train.settings import Training
from forerun.train.stream import Harvest, Stream

RATE = LossOptions.rate  # where the settings say nothing
FLOOR = 0.1  # of the learning rate, at the end of the cosine
Weights = dict[str, Tensor]


@dataclass(slots=True)
class Record:
    """What a run has come to.

    Attributes:
        step: steps that are done.
        seconds: up to its last checkpoint.
        began: the second at which the first step could begin: what came before was set-up.
        slowest: seconds of the slowest evaluation, which say how long measuring takes.
        losses, evaluations: one a step, and those that were made.
    """

    step: int = 0
    seconds: float = 0.0
    began: float = 0.0
    slowest: float = 0.0
    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def best(self) -> Evaluation | None:
        """The first of the evaluations with the greatest accepted length."""
        return max(
            self.evaluations, key=lambda evaluation: evaluation.accepted_length, default=None
        )

    def without_better(self) -> int:
        """Evaluations since the best."""
        best = self.best
        return 0 if best is None else len(self.evaluations) - 1 - self.evaluations.index(best)

    def gave_up(self, patience: int) -> bool:
        """Whether so many evaluations were no better than the best; 0 never gives up."""
        return bool(patience) and self.without_better() >= patience


class Trainer:
    """A run of one recipe. `best` are the weights that were evaluated best."""

    def __init__(
        self,
        recipe: Recipe,
        module: nn.Module,
        target: Target,
        stream: Stream,
        judge: Judge,
        settings: Training,
        path: Path,
        identity: dict[str, Any],
        tell: Tell = nothing,
        deadline: Deadline | None = None,
    ) -> None:
        """`path` is the checkpoint's; `identity` is put into it, so that the run can be set up
        again. `deadline` has counted since the run began; without it, the run begins now."""
        self.recipe, self.module, self.target, self.stream = (
            recipe,
            module.to(target.device),
            target,
            stream,
        )
        self.judge, self.settings, self.path, self.identity = judge, settings, path, identity
        self.tell, self.deadline = tell, deadline or Deadline(settings.max_minutes)
        torch.manual_seed(settings.seed)
        self.record = Record()
        self._step = 0.0  # seconds that the last one took
        self.best: Weights = {}
        self.harvest = Harvest(
            target,
            stream,
            recipe.vocab(module, target),
            settings,
            path.with_suffix(".captured"),
            tell,
        )
        self.bfloat16 = computes_bfloat16(settings.dtype, target.device)
        # norms read bfloat16 with weights in float32, as is meant; torch warns that this is not its
        # fastest way
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        self.optimizers = make_optimizers(
            module, settings.optimizer, settings.learning_rate or RATE, settings.weight_decay, dtype
        )

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.module.load_state_dict(state["module"])
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.target.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.target.device)
        self.best = state["best"]
        self.record = Record(**{part.name: state[part.name] for part in fields(Record)})
        self.record.evaluations = [Evaluation(**values) for values in state["evaluations"]]
        self.deadline.resume(self.record.seconds)

    def run(self) -> Record:
        """Train to the end; the module then has the best weights.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when a checkpoint has been written.
            ForerunError: a loss that is not finite, or a checkpoint that cannot be written; the one
                before is kept.
        """
        if not self.record.step:
            self.record.began = self.deadline.seconds
        self.harvest.open(keep=self.record.step > 0)
        goes_on = False
        try:
            self._run()
        except KeyboardInterrupt:
            goes_on = self.path.exists()
            raise
        finally:
            self.harvest.close(remove=not goes_on)
        self.module.load_state_dict(self.best)
        return self.record

    def _run(self) -> None:
        with _asked_to_stop() as asked:
            while not self._done():
                self._evaluate_if(self._due(self.settings.evaluate_every))
                if self._done():
                    break
                began = self.deadline.seconds
                loss, tokens = self.learn()
                self._step = self.deadline.seconds - began
                self._tell(loss, tokens / max(self._step, 1e-9))
                if asked():
                    self.save()
                    raise KeyboardInterrupt(f"stopped after step {self.record.step}")
                if self.settings.checkpoint_every and self._due(self.settings.checkpoint_every):
                    self.save()
            self._evaluate_if(True)
            self.save()
            if asked():
                raise KeyboardInterrupt(f"stopped after step {self.record.step}, the last")

    def learn(self) -> tuple[float, int]:
        """One step; (its loss, tokens it read). Raises ForerunError before anything is changed if
        it is not finite."""
        record, module = self.record, self.module.train()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(self._share(), self.settings)
        batches = [self.harvest.batch(numbers) for numbers in self.stream.step(record.step)]
        positions = sum(batch.positions for batch in batches)
        total = 0.0
        with _threads(self.settings.threads):
            for batch in batches:
                with self._precision():
                    loss = self.recipe.loss(module, batch) * (batch.positions / positions)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(module.parameters(), self.settings.clip).item()
            if not math.isfinite(total) or not math.isfinite(norm):
                kept = f"; the last checkpoint, {self.path}, is kept" if self.path.exists() else ""
                raise ForerunError(
                    f"the loss of step {record.step + 1} is {total} with a gradient of norm {norm}: lower"
                    f" --learning-rate or --clip, or use --dtype float32{kept}"
                )
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        record.step += 1
        record.losses.append(total)
        return total, sum(batch.tokens.numel() for batch in batches)

    def save(self) -> None:
        """Write a checkpoint. Raises ForerunError."""
        cuda = self.target.device.type == "cuda"
        self.record.seconds = self.deadline.seconds
        write_checkpoint(
            self.path,
            {
                "identity": self.identity,
                **asdict(self.record),
                "module": self.module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "best": self.best,
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state(self.target.device) if cuda else None,
            },
        )

    def _until(self) -> float:
        """The second of the run at which training ends. A step may have begun just before; an
        evaluation comes then, and there should be time for a figure at least."""
        began, slowest = self.record.began, self.record.slowest
        return self.deadline.of_training(
            began, self._step + (1 + FIGURE) * slowest, self.judge.parts * slowest
        )

    def _share(self) -> float:
        """How much of the training is done, of its steps or, if that is more, of its time."""
        began = self.record.began
        share = (self.deadline.seconds - began) / (self._until() - began)
        return max(self.record.step / self.settings.steps, min(share, 1.0))

    def _done(self) -> bool:
        over = self.record.step >= self.settings.steps or self.deadline.seconds >= self._until()
        return over or self.record.gave_up(self.settings.patience)

    def _due(self, every: int) -> bool:
        """Whether the steps done are a multiple of `every`; of 0 only none at all is."""
        return self.record.step % every == 0 if every else self.record.step == 0

    def _evaluate_if(self, due: bool) -> None:
        """Evaluate, once a step, and keep the weights if they are the best so far."""
        record = self.record
        if not due or (record.evaluations and record.evaluations[-1].step == record.step):
            return
        began = self.deadline.seconds
        with _threads(self.settings.threads), self._precision():
            found = self.judge.evaluate(self.module, record.step)
        record.slowest = max(record.slowest, self.deadline.seconds - began)
        record.evaluations.append(found)
        if record.best is found:
            self.best = {
                name: value.detach().cpu().clone()
                for name, value in self.module.state_dict().items()
            }
        self.tell.note(
            f"after {found.step} steps: accepted length {found.accepted_length:.3f} at depth {self.settings.depth},"
            f" overlap {found.overlap:.3f}, perplexity {found.perplexity:.2f}"
        )

    def _tell(self, loss: float, speed: float) -> None:
        step, share = self.record.step, self._share()
        self.tell(
            f"step {step} of {round(step / share)}, loss {loss:.4f}, {speed:.0f} tokens/s", share, 1
        )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)


def learning_rate(share: float, settings: Training) -> float:
    """When so much of the run is done: up in a line, then down along half a cosine to a tenth."""
    highest = settings.learning_rate or RATE
    if share < settings.warmup:
        return highest * min((share + 1 / settings.steps) / settings.warmup, 1.0)
    way = (share - settings.warmup) / max(1 - settings.warmup, 1e-9)
    return highest * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * way)))


def computes_bfloat16(dtype: str, device: torch.device) -> bool:
    """Whether products are to be in bfloat16; on CPUs that only emulate it, it is many times
    slower."""
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return native.library() is not None and native.instructions() == "avx512"


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C ask to stop rather than stop at once, so that no step is cut in half. The second
    one does stop."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give torch's products so many threads, 0 one for each core: beside the native kernels it has
    a single one, but they sleep while a drafter learns."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count or cores(), cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
