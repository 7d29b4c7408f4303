"""The training loop of all recipes: repeatable steps, checkpoints, optimizers and the time limit.

What a step does follows from the settings and its number; what it changes is the module, the
optimizers, torch's random state and the `TrainingRecord`. A checkpoint holds these four, so a
resumed run continues as if it had not been interrupted.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.cli.progress import Tell, nothing
from forerun.errors import ForerunError, LoadError, first_line
from forerun.hardware import cores
from forerun.kernels import native
from forerun.train.evaluate import Evaluation, Evaluator
from forerun.train.options import LossOptions, Training
from forerun.train.stream import TrainingTexts
from forerun.train.time_limit import TimeLimit
from forerun.utils import atomic_file

FINAL_RATE = 0.1  # of the peak learning rate, at the end of the cosine
# Shares of the time limit for the final measurement: with tasks or speed, and without.
MEASURING_SHARE, HELD_OUT_SHARE = 0.2, 0.05
CHECKPOINT_VERSION = 5


@dataclass(slots=True)
class TrainingRecord:
    """Progress of a run.

    Attributes:
        step: number of finished steps.
        seconds: duration up to the last checkpoint.
        began: second at which training began, after the set-up.
        losses: loss of each step.
    """

    step: int = 0
    seconds: float = 0.0
    began: float = 0.0
    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def best(self) -> Evaluation | None:
        """The first evaluation with the greatest accepted length."""
        return max(self.evaluations, key=lambda found: found.accepted_length, default=None)

    def out_of_patience(self, patience: int) -> bool:
        """Return True after `patience` evaluations without a better one; 0 never gives up."""
        if not patience or self.best is None:
            return False
        return len(self.evaluations) - 1 - self.evaluations.index(self.best) >= patience


class Trainer:
    """A run of one recipe; `best` are the weights with the best evaluation."""

    def __init__(
        self,
        module: nn.Module,
        stream: TrainingTexts,
        evaluator: Evaluator,
        path: Path,
        identity: dict[str, Any],
        tell: Tell = nothing,
        limit: TimeLimit | None = None,
    ) -> None:
        """`path` is the checkpoint's; it stores `identity`, plain values from which the run is set
        up again. `limit` has counted since the run began; without it the run begins now."""
        recipe, target, settings = evaluator.recipe, evaluator.target, evaluator.settings
        self.recipe, self.target, self.settings = recipe, target, settings
        self.module, self.stream, self.evaluator = module.to(target.device), stream, evaluator
        self.path, self.identity, self.tell = path, identity, tell
        self.limit = limit or TimeLimit(settings.max_minutes)
        torch.manual_seed(settings.seed)
        self.record = TrainingRecord()
        self.best: dict[str, Tensor] = {}
        stream.configure(recipe.vocab(module, target), path.with_suffix(".captured"), tell)
        self.bfloat16 = computes_bfloat16(settings.dtype, target.device)
        # Norms read bfloat16 with float32 weights on purpose; torch warns that this is slower.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        self.optimizers = make_optimizers(
            module,
            settings.optimizer,
            settings.learning_rate or LossOptions.default_rate,
            settings.weight_decay,
            torch.bfloat16 if self.bfloat16 else torch.float32,
        )

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.module.load_state_dict(state["module"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.target.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.target.device)
        self.best = state["best"]
        self.record = TrainingRecord(**{f.name: state[f.name] for f in fields(TrainingRecord)})
        self.record.evaluations = [Evaluation(**values) for values in state["evaluations"]]
        self.limit.resume(self.record.seconds)

    def run(self) -> TrainingRecord:
        """Train to the end; the module then has the best weights.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once a checkpoint is written.
            ForerunError: a loss is not finite, or a checkpoint cannot be written; the previous
                checkpoint is kept.
        """
        if not self.record.step:
            self.record.began = self.limit.seconds
        self.stream.open(keep=self.record.step > 0)
        interrupted = False
        try:
            self._run()
        except KeyboardInterrupt:
            interrupted = self.path.exists()
            raise
        finally:
            self.stream.close(remove=not interrupted)
        self.module.load_state_dict(self.best)
        return self.record

    def _run(self) -> None:
        settings = self.settings
        with _stop_requests() as stop_requested:
            while not self._is_done():
                self._evaluate_if(self._is_due(settings.evaluate_every))
                if self._is_done():
                    break
                began = self.limit.seconds
                loss, tokens = self.learn()
                self._show(loss, tokens / max(self.limit.seconds - began, 1e-9))
                if stop_requested():
                    self.save()
                    raise KeyboardInterrupt(f"stopped after step {self.record.step}")
                if settings.checkpoint_every and self._is_due(settings.checkpoint_every):
                    self.save()
            self._evaluate_if(True)
            self.save()
            if stop_requested():
                raise KeyboardInterrupt(f"stopped after step {self.record.step}, the last")

    def learn(self) -> tuple[float, int]:
        """Take one step and return (loss, tokens read). Raises ForerunError before anything is
        changed if the loss is not finite."""
        record, module = self.record, self.module.train()
        rate = learning_rate(self._progress(), self.settings)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        batches = [self.stream.batch(numbers) for numbers in self.stream.step(record.step)]
        positions = sum(batch.positions for batch in batches)
        total = 0.0
        with _torch_threads(self.settings.threads):
            for batch in batches:
                with self._precision():
                    loss = self.recipe.loss(module, batch) * (batch.positions / positions)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(module.parameters(), self.settings.clip).item()
            if not math.isfinite(total) or not math.isfinite(norm):
                kept = f"; the last checkpoint, {self.path}, is kept" if self.path.exists() else ""
                raise ForerunError(
                    f"the loss of step {record.step + 1} is {total} with a gradient of norm {norm}:"
                    f" lower --learning-rate or --clip, or use --dtype float32{kept}"
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
        self.record.seconds = self.limit.seconds
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

    def _end_second(self) -> float:
        """The second of the run at which training ends, before the final measurement."""
        settings = self.settings
        is_short = settings.tasks == "none" and not settings.speed_rounds
        share = HELD_OUT_SHARE if is_short else MEASURING_SHARE
        return self.limit.training_end(self.record.began, share)

    def _progress(self) -> float:
        """The finished share of training, by steps or by time, whichever is larger."""
        began = self.record.began
        share = (self.limit.seconds - began) / (self._end_second() - began)
        return max(self.record.step / self.settings.steps, min(share, 1.0))

    def _is_done(self) -> bool:
        over = self.limit.seconds >= self._end_second()
        finished = over or self.record.step >= self.settings.steps
        return finished or self.record.out_of_patience(self.settings.patience)

    def _is_due(self, every: int) -> bool:
        """Return True if the step is a multiple of `every`; 0 means before the first step only."""
        return self.record.step % every == 0 if every else self.record.step == 0

    def _evaluate_if(self, due: bool) -> None:
        """Evaluate, once per step, and keep the weights if they are the best so far."""
        record = self.record
        if not due or (record.evaluations and record.evaluations[-1].step == record.step):
            return
        with _torch_threads(self.settings.threads), self._precision():
            found = self.evaluator.evaluate(self.module, record.step)
        record.evaluations.append(found)
        if record.best is found:
            weights = self.module.state_dict()
            self.best = {name: value.detach().cpu().clone() for name, value in weights.items()}
        self.tell.note(
            f"after {found.step} steps: accepted length {found.accepted_length:.3f} at depth"
            f" {self.settings.depth}, overlap {found.overlap:.3f},"
            f" perplexity {found.perplexity:.2f}"
        )

    def _show(self, loss: float, speed: float) -> None:
        step, share = self.record.step, self._progress()
        text = f"step {step} of {round(step / share)}, loss {loss:.4f}, {speed:.0f} tokens/s"
        self.tell(text, share, 1)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)


def learning_rate(progress: float, settings: Training) -> float:
    """Return the learning rate at a share of the run: a linear warm-up, then half a cosine down to
    `FINAL_RATE` of the peak."""
    peak = settings.learning_rate or LossOptions.default_rate
    if progress < settings.warmup:
        return peak * min((progress + 1 / settings.steps) / settings.warmup, 1.0)
    share = (progress - settings.warmup) / max(1 - settings.warmup, 1e-9)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


def computes_bfloat16(dtype: str, device: torch.device) -> bool:
    """Return True if products are computed in bfloat16, which CPUs that emulate it do slowly."""
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return native.library() is not None and native.instructions() in ("amx", "avx512")


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C request a stop, so that no step is cut in half; the second one stops
    at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def request(number: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    before = signal.signal(signal.SIGINT, request)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Give torch `count` threads, 0 for one per core. Beside the native kernels torch has a single
    thread, but the kernels are idle while a drafter learns."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count or cores(), cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checkpoint_path(out: Path) -> Path:
    """Return the checkpoint file of a run that writes `out`."""
    out = Path(os.path.abspath(out))  # so that "." has a name, too
    return out.with_name(f"{out.name}.training")


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint atomically. Raises ForerunError and keeps the previous one if that
    fails."""
    try:
        with atomic_file(path) as work, work.open("wb") as file:
            torch.save({"version": CHECKPOINT_VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a failed write
        kept = f"the last one, {path}, is kept: make room and continue with --resume"
        advice = kept if path.exists() else "make room"
        why = getattr(error, "strerror", None) or first_line(error)
        raise ForerunError(f"the checkpoint cannot be written ({why}); {advice}") from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises LoadError if it is missing or is no checkpoint."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise LoadError(f"there is no checkpoint {path}: begin without --resume") from None
    except Exception as error:  # unpickling another file raises anything
        why = first_line(error)
        raise LoadError(
            f"the checkpoint {path} cannot be read ({why}): remove it and start again"
        ) from None
    if not isinstance(state, dict) or state.get("version") != CHECKPOINT_VERSION:
        raise LoadError(
            f"the checkpoint {path} is of another version of forerun: remove it and start again"
        )
    return state


# Muon makes each momentum matrix orthogonal before it is applied (Jordan et al. 2024). Its steps
# are scaled to the size of AdamW's, so that both take one learning rate (Liu et al. 2502.16982).
# torch's own always computes in bfloat16, which many CPUs emulate slowly.

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of the quintic iteration
ITERATIONS = 5
ADAMW_RMS = 0.2  # root mean square of AdamW's steps divided by its learning rate
# Drafters take larger Muon steps: their runs are short and their matrices often random at first.
MUON_SCALE = 3.0
ADAMW_BETAS = (0.9, 0.95)
# parts of the names of weights that map tokens to states or back, which Muon does not suit
NOT_MUON = ("embed", "head", "wte", "wpe", "markov")


class Muon(torch.optim.Optimizer):
    """Muon for weights with two axes, in one parameter group."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        rms: float = ADAMW_RMS,
    ) -> None:
        """`dtype` is that of the iteration, `rms` the root mean square of a step divided by the
        learning rate."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype, self.rms = dtype, rms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state: dict[str, Any] = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)
                nesterov = weight.grad.lerp(momentum, MUON_MOMENTUM)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                size = group["lr"] * self.rms * max(weight.shape) ** 0.5
                weight.sub_(orthogonalise(nesterov, self.dtype).to(weight.dtype), alpha=size)


def orthogonalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T of the singular value decomposition U S V^T by a Newton-Schulz iteration.
    [m, n] -> [m, n]"""
    a, b, c = NEWTON_SCHULZ
    is_wide = x.shape[0] <= x.shape[1]
    y: Tensor = (x if is_wide else x.T).to(dtype)
    y = y / (y.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return y if is_wide else y.T


def make_optimizers(
    module: nn.Module, kind: str, rate: float, weight_decay: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Return AdamW alone, or (for `kind` muon) Muon for inner matrices and AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            inner = weight.ndim == 2 and not any(part in name for part in NOT_MUON)
            (matrices if kind == "muon" and inner else others).append(weight)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, rate, weight_decay, dtype, MUON_SCALE * ADAMW_RMS))
    if others:
        adamw = torch.optim.AdamW(
            others, lr=rate, betas=ADAMW_BETAS, weight_decay=weight_decay, fused=True
        )
        optimizers.append(adamw)
    return optimizers
