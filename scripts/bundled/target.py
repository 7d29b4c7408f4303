"""Train a decoder of the bundled family on tokens: the target, and the draft model before it is distilled.

    python -m scripts.bundled.target --size base --work build/bundled --minutes 6      # on a GPU
    python -m scripts.bundled.target --size tiny --work build/tiny --steps 200

WORK holds what the stage "tokens" made (`build.py`); WORK/SIZE is written. One loop for CPU and CUDA: bfloat16 where
the machine computes in it, torch.compile, rows packed plainly. For the first three quarters rows are read as several
shorter ones, which costs less; the rest is read whole. With --grown the first weights are those of a smaller model.
The learning rate warms up, stays, and falls in a line to zero, by the clock (--minutes) or by --steps. A run that was
stopped or killed goes on from its last checkpoint when the same command is given again: by steps it is then the same
run, by the clock it has the minutes that were left.

Size base costs 200 million operations a token in short rows, 285 million in whole ones (`model.flops_of`); an H100 has
989e12 a second in bfloat16. At 40 % of them it would read 2.0 and 1.4 million tokens a second, 660 million in 6
minutes; states this narrow are bound by memory as much (about 100 KB a token and layer), so that 30 %, 500 million
tokens, 17 for each parameter, are likelier. Each line of progress says what it is.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ConfigError, ForerunError, LoadError
from forerun.load import pick_device
from forerun.train.checkpoint import checkpoint_path, read_checkpoint, write_checkpoint
from forerun.train.export import check_out
from forerun.train.loop import computes_bfloat16
from forerun.train.optimizers import BETAS, Muon
from scripts.bundled.common import folder_written_whole, run, tell
from scripts.bundled.export import card, floats_of, tensors_of, write_model
from scripts.bundled.grow import grow
from scripts.bundled.model import SIZES, Decoder, flops_of, size_of
from scripts.bundled.tokens import Ids, Windows, read_facts, read_tokens

HIGHEST = 5e-3  # learning rate, of Muon and AdamW alike
WARMUP = 100  # steps, or a tenth of a run by steps if that is less
FALL = 0.6  # share of the run in which the learning rate falls
DECAY = 0.1  # of the matrices; it bounds what they can grow to
CLIP = 1.0
SHORT = 0.75  # share of the run in which a row is read as shorter ones
HELD_OUT_ROWS = 64  # of the perplexity, at most
TOLD = 15.0  # seconds between lines of progress
CHECKPOINT = 120.0  # seconds between checkpoints
LOWEST = 1e-3  # share of the learning rate, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run. Exactly one of minutes and steps is over 0; rows and passes are those of the size unless given; `grown`
    is the directory of the model to begin from, if any."""

    size: str
    minutes: float = 0.0
    steps: int = 0
    seed: int = 1
    rows: int = 0
    passes: int = 0
    grown: str = ""

    def __post_init__(self) -> None:
        size_of(self.size)
        if (self.minutes > 0) == (self.steps > 0) or self.minutes < 0 or self.steps < 0 or self.minutes > 1e6:
            raise ConfigError("give either --minutes or --steps, a number over 0")
        if self.rows < 0 or self.passes < 0 or self.seed < 0:
            raise ConfigError("rows, passes and seed must be whole numbers from 0 up")

    def share(self, step: int, seconds: float) -> float:
        """How much of the run is done: 0 to 1."""
        return min(step / self.steps if self.steps else seconds / (60 * self.minutes), 1.0)

    def learning_rate(self, step: int, share: float) -> float:
        """What the highest learning rates are multiplied with in the step numbered `step` from 0."""
        warm = min(WARMUP, max(self.steps // 10, 1)) if self.steps else WARMUP
        return max(min(1.0, (step + 1) / warm, (1 - share) / FALL), LOWEST)


class Trainer:
    """The model, its optimisers, and how far they have come."""

    def __init__(
        self, plan: Plan, train: Ids, held_out: Ids, device: torch.device, path: Path, compiled: bool = False
    ) -> None:
        """`path` is the checkpoint's."""
        torch.manual_seed(plan.seed)
        self.plan, self.device, self.path = plan, device, path
        self.size = size_of(plan.size)
        self.per_pass, self.passes = plan.rows or self.size.rows, plan.passes or self.size.passes
        self.windows, self.held_out = Windows(train, self.size.context, plan.seed), held_out
        self.model = Decoder(self.size)
        if plan.grown:
            grow(self.model, Path(plan.grown))
        self.model.to(device)
        if compiled:
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is, and says so
            self.model.compile_parts()
        self.bfloat16 = computes_bfloat16("auto", device)
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(self.model.matrices(), HIGHEST, DECAY, dtype),
            torch.optim.AdamW(self.model.others(), lr=HIGHEST, betas=BETAS, weight_decay=0.0, fused=True),
        ]
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self._pending: list[Tensor] = []

    @property
    def step_tokens(self) -> int:
        return self.per_pass * self.passes * self.size.context

    def learn(self) -> None:
        """One step."""
        share = self.plan.share(self.step, self.seconds)
        cut = self.size.cut if share < SHORT else 1
        total = torch.zeros((), device=self.device)
        for number in range(self.passes):
            first = (self.step * self.passes + number) * self.per_pass
            ids = self.windows.rows(first, self.per_pass).to(self.device, non_blocking=True)
            read, wanted = (part.reshape(self.per_pass * cut, -1) for part in (ids[:, :-1], ids[:, 1:]))
            with self._precision():
                loss = self.model(read, wanted) / self.passes
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        rate = self.plan.learning_rate(self.step, share)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = HIGHEST * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._pending.append(total)

    def settle(self) -> float:
        """Wait for the steps taken and note their losses; the last. Raises ForerunError if one is not finite.

        Not done in each step: the device would wait while the next one is prepared.
        """
        self.losses += [loss.item() for loss in self._pending]
        self._pending.clear()
        bad = next((i for i, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)
        if bad is not None:
            raise ForerunError(
                f"the loss of step {bad} is {self.losses[bad - 1]}: this run leads nowhere; remove {self.path}, if"
                " it is there, and begin anew with another --seed"
            )
        return self.losses[-1]

    def run(self, asked: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic) -> None:
        """Train to the end, from wherever it is. Raises KeyboardInterrupt behind a checkpoint once `asked` is true."""
        begun, before, first = clock(), self.seconds, self.step
        told, saved, since = begun, begun, first
        while self.plan.share(self.step, self.seconds) < 1:
            self.learn()
            now = clock()
            self.seconds = before + now - begun
            if now - told >= TOLD or self.step == first + 1:
                self._tell((self.step - since) / max(now - told, 1e-9))
                told, since = now, self.step
            if asked():
                self.save()
                raise KeyboardInterrupt(f"stopped after step {self.step}; the same command goes on from there")
            if now - saved >= CHECKPOINT:
                self.save()
                saved = now

    @torch.no_grad()
    def perplexity(self) -> float:
        """Of the held-out tokens, over whole rows."""
        context, total = self.size.context, 0.0
        rows = min((len(self.held_out) - 1) // context, HELD_OUT_ROWS)
        if rows < 1:
            raise ConfigError(f"{len(self.held_out)} held-out tokens are less than a row: make a larger corpus")
        for row in range(rows):
            part = self.held_out[row * context : (row + 1) * context + 1].astype("int64")
            ids = torch.from_numpy(part).to(self.device)[None]
            with self._precision(), torch.compiler.set_stance("force_eager"):  # other shapes, once
                total += self.model(ids[:, :-1], ids[:, 1:]).item()
        return math.exp(total / rows)

    def save(self) -> None:
        """Replace the checkpoint. Raises ForerunError, and keeps the one before, after a loss that is not finite."""
        self.settle()
        state = {"plan": self._identity(), "step": self.step, "seconds": self.seconds, "losses": self.losses}
        state |= {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        write_checkpoint(self.path, state)

    def resume(self) -> None:
        """Go on from the checkpoint. Raises ConfigError for one of another run."""
        state = read_checkpoint(self.path)
        before = {**state["plan"], "minutes": self.plan.minutes} if self.plan.minutes else state["plan"]
        if before != self._identity():
            raise ConfigError(f"the checkpoint {self.path} is of another run, {state['plan']}: remove it to begin anew")
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.step, self.seconds, self.losses = state["step"], state["seconds"], list(state["losses"])
        tell(f"going on after step {self.step}")

    def _identity(self) -> dict[str, Any]:
        return {**asdict(self.plan), "tokens": len(self.windows.stream)}

    def _tell(self, steps_a_second: float) -> None:
        loss, share = self.settle(), self.plan.share(self.step, self.seconds)
        rate = steps_a_second * self.step_tokens
        flops = rate * flops_of(self.size, self.size.context // (self.size.cut if share < SHORT else 1))
        tell(
            f"{self.plan.size}: step {self.step}, {100 * share:.0f} %, loss {loss:.3f}, {rate:,.0f} tokens/s,"
            f" {flops / 1e12:.2f} TFLOP/s"
        )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)


def export(trainer: Trainer, work: Path, out: Path) -> dict[str, Any]:
    """Write the model into `out` as it is stored, with the perplexity of just that; what its card says."""
    tokens, size, plan = read_facts(work), trainer.size, trainer.plan
    with folder_written_whole(out) as make:
        write_model(make, size, tensors_of(trainer.model), work / "tokenizer")
        trainer.model.load_state_dict(floats_of(make))
        perplexity = trainer.perplexity()
        a_token = tokens.held_out_characters / tokens.held_out_tokens
        cuda = trainer.device.type == "cuda"
        facts = {
            "size": plan.size, "parameters": sum(p.numel() for p in trainer.model.parameters()), "seed": plan.seed,
            "steps": trainer.step, "step_tokens": trainer.step_tokens, "minutes": round(trainer.seconds / 60, 2),
            "seen_tokens": trainer.step * trainer.step_tokens, "perplexity": perplexity,
            "bits": math.log2(perplexity) / a_token, **asdict(tokens),
            "machine": torch.cuda.get_device_name() if cuda else f"a CPU ({torch.get_num_threads()} threads)",
            "losses": [round(loss, 4) for loss in trainer.losses[:: max(len(trainer.losses) // 500, 1)]],
        }  # fmt: skip
        if plan.grown:
            facts["grown"] = seed_facts(Path(plan.grown))
        (make / "training.json").write_text(json.dumps(facts, indent=1))
        manifest = work / "manifest.json"
        packages = json.loads(manifest.read_text())["packages"] if manifest.is_file() else []
        role = "draft" if plan.size.endswith("-draft") else "target"
        (make / "README.md").write_text(card(role, size, facts, packages), encoding="utf-8")
    return facts


def seed_facts(directory: Path) -> dict[str, int]:
    """What a card says of the model that another is grown from. Raises LoadError."""
    try:
        seed = json.loads((directory / "training.json").read_text())
        return {name: int(seed[name]) for name in ("parameters", "seen_tokens")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{directory}/training.json must say parameters and seen_tokens ({error}): add it") from None


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop behind a checkpoint; the second Ctrl-C does not wait."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(plan: Plan, work: Path, out: Path, device: torch.device, compiled: bool) -> dict[str, Any]:
    """A whole run, from the tokens in `work` to the directory `out`."""
    check_out(out)
    if plan.grown:
        seed_facts(Path(plan.grown))  # what is missing is better found now than after hours
    if read_facts(work).vocab != size_of(plan.size).vocab:
        raise ConfigError(f"the tokens in {work} are not of the vocabulary of size {plan.size}: use another folder")
    streams = read_tokens(work / "train.tokens"), read_tokens(work / "held_out.tokens")
    trainer = Trainer(plan, *streams, device, checkpoint_path(out), compiled)
    if trainer.path.exists():
        trainer.resume()
    with asked_to_stop() as asked:
        trainer.run(asked)
        trainer.save()
    facts = export(trainer, work, out)
    trainer.path.unlink()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", required=True, help=", ".join(SIZES))
    parser.add_argument("--work", type=Path, default=Path("build/bundled"), help="the folder with the tokens")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long to train")
    parser.add_argument("--steps", type=int, default=0, help="how many steps to train")
    parser.add_argument("--seed", type=int, default=1, help="of the first weights and of the order of the data")
    parser.add_argument("--rows", type=int, default=0, help="rows of a pass, if not the size's own")
    parser.add_argument("--passes", type=int, default=0, help="passes of a step, if not the size's own")
    parser.add_argument("--device", default="auto", help="auto takes CUDA where there is one")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--grown", default="", metavar="DIR", help="a smaller model to begin from")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("size", "minutes", "steps", "seed", "rows", "passes", "grown")}
    device = pick_device(args.device)
    torch.set_float32_matmul_precision("high")
    facts = train(Plan(**given), args.work, args.work / args.size, device, not args.no_compile)
    print(
        f"{args.work / args.size}: {facts['parameters'] / 1e6:.1f}M parameters, {facts['seen_tokens']:,} tokens seen,"
        f" held-out perplexity {facts['perplexity']:.2f}"
    )


if __name__ == "__main__":
    run(main)
