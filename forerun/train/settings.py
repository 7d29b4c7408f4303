"""What a training run is made of: every choice, in frozen dataclasses. No torch here: `--help`
needs them."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError
from forerun.utils import check_numbers

FEWEST_TOKENS = 16  # of a row: fewer teach nothing
OPTIMIZERS = ("muon", "adamw")
DTYPES = ("auto", "float32", "bfloat16")
WRITTEN = 384  # texts of the target itself, where there is nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How any recipe is trained: data, steps, evaluation.

    Args:
        steps: steps of the optimiser; 0 writes the drafter as it begins.
        rows: texts of one pass of the drafter.
        accumulate: passes whose gradients make one step.
        tokens: most tokens of a text, in training and in evaluation.
        on_policy: share of the texts that the target continues itself; the rest are the data as
            they are.
        write: texts that the target writes itself, beside the data if there are any; 384 where
            there are none, else none unless it is given; fewer where a fifth of max_minutes is over
            before.
        temperature: what the target continues texts at, and what acceptance is judged at beside 0.
        reuse: times that each text is learnt from, after the first 64; what the target says of it
            is kept meanwhile.
        keep_gb: most gigabytes of that on disk, beside --out; the oldest texts do not come back
            then.
        prompt_tokens: tokens of the data before the target goes on.
        learning_rate: the highest of the schedule, which warms up and then falls along a cosine to
            a tenth of it; 0.001 for heads that begin as the target's last layer (eagle3, mtp) and
            0.003 for others if it is not given.
        warmup: share of the steps in which the learning rate rises.
        optimizer: muon (for matrices, beside AdamW for embeddings, heads and norms) or adamw.
        weight_decay: of either.
        clip: largest norm of the gradient; larger ones are scaled down to it.
        seed: of the order of the data and of what the target says; the same seed gives the same
            run.
        held_out: share of the documents that are kept for evaluation.
        evaluate_every: steps between evaluations; 0 evaluates at the beginning and at the end only.
        evaluate_rows: texts of an evaluation, and of each task in the measurement at the end.
        tasks: kinds of tasks that the drafter is measured on at the end beside the held-out texts,
            by commas (completion, edit and others of forerun bench); all, or none.
        speed_rounds: rounds in which its speed is then measured beside plain decoding; 0 does not
            measure it.
        depth: tokens drafted ahead in the accepted length that is evaluated and measured.
        patience: evaluations without a better accepted length before training stops; 0 never stops
            early.
        checkpoint_every: steps between checkpoints; 0 writes them at Ctrl-C and at the end only.
        max_minutes: most of the whole run, loading and measuring included; the learning rate has
            fallen when training ends, so the weights depend on the clock. 0 sets no limit, and the
            weights follow from the seed.
        top: likeliest tokens of the target's law that are learnt from, beside what is left for all
            others; of a vocabulary of up to 8192 tokens the whole law is taken.
        dtype: float32, bfloat16 (weights stay in float32), or auto: bfloat16 where the processor
            computes in it.
        device: auto takes CUDA where there is one.
        threads: CPU threads; 0 takes one for each core.
    """

    steps: int = 1000
    rows: int = 8
    accumulate: int = 1
    tokens: int = 256
    on_policy: float = 0.5
    write: int | None = None
    temperature: float = 0.8
    reuse: int = 4
    keep_gb: float = 4.0
    prompt_tokens: int = 64
    learning_rate: float | None = None
    warmup: float = 0.05
    optimizer: str = "muon"
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    held_out: float = 0.05
    evaluate_every: int = 100
    evaluate_rows: int = 16
    tasks: str = "all"
    speed_rounds: int = 3
    depth: int = 4
    patience: int = 5
    checkpoint_every: int = 100
    max_minutes: float = 0.0
    top: int = 64
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(
            ("rows", "accumulate", "prompt_tokens", "evaluate_rows", "reuse", "depth", "top"), 1
        )
        check_numbers(self, lowest | {"tokens": FEWEST_TOKENS})
        for name in ("on_policy", "warmup", "held_out"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range: give a share from 0 to 1"
                )
        if not 0 < self.temperature <= 100:
            raise ConfigError(
                f"temperature={self.temperature} is out of range: give a number over 0, at most 100"
            )
        if self.write == 1:
            raise ConfigError(
                "write=1 is out of range: give a whole number from 2 up, or 0 beside --data"
            )
        if not 0 < self.held_out < 1:
            raise ConfigError(
                f"held_out={self.held_out} is out of range: give a share over 0 and under 1"
            )
        if not self.clip:
            raise ConfigError("clip=0 would stand still: give a number over 0")
        if self.prompt_tokens + self.depth + 2 > self.tokens:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} leaves no room to draft {self.depth} tokens in"
                f" tokens={self.tokens}: lower it, or raise tokens"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"there is no optimizer {self.optimizer!r}: use {' or '.join(OPTIMIZERS)}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"there is no training in {self.dtype!r}: use {', '.join(DTYPES)}")

    def texts(self, data: bool) -> int:
        """How many the target writes itself, with `data` or without. Raises ConfigError where there
        is neither."""
        if self.write is not None:
            if not self.write and not data:
                raise ConfigError(
                    "write=0 leaves nothing to learn from: give --data, or a whole number from 2 up"
                )
            return self.write
        return 0 if data else WRITTEN


def depths_up_to(depth: int) -> list[int]:
    """1, 2, 4 and so on, and `depth` itself: what is measured."""
    return sorted({*(1 << i for i in range(depth.bit_length())), depth})
