"""Settings of a training run and options of each recipe, as frozen dataclasses.

The entries under "Args" are the help texts of the command line. This module does not import torch,
since `--help` needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from forerun.errors import ConfigError, suggest
from forerun.utils import check_numbers

MIN_TOKENS = 16  # shorter texts teach nothing
OPTIMIZERS = ("muon", "adamw")
DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_TEXTS = 384  # texts that the target writes if there are no data
POSITIVE_SETTINGS = (
    "rows",
    "accumulate",
    "prompt_tokens",
    "evaluate_rows",
    "reuse",
    "depth",
    "top",
)
POSITIVE_OPTIONS = (
    "layers",
    "heads",
    "blocks",
    "unroll",
    "thin",
    "intermediate",
    "draft_vocab",
    "block_size",
    "block_layers",
    "fused_states",
    "anchors",
)
HEAD_SHAPE = ("intermediate", "draft_vocab", "portable")  # fixed by a head given as --init


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Settings of every recipe: data, steps, evaluation.

    Args:
        steps: Number of optimizer steps; 0 writes the drafter as it is initialised.
        rows: Texts per forward pass of the drafter.
        accumulate: Forward passes whose gradients make one step.
        tokens: Maximum number of tokens of a text, in training and in evaluation.
        on_policy: Share of the texts that the target continues itself; the rest are the data as
            they are.
        write: Texts that the target writes itself, in addition to the data. Default 384 without
            data, else none; fewer if a fifth of max_minutes is over before.
        temperature: Temperature of the target's texts, and of the acceptance that is evaluated
            beside 0.
        reuse: How often each text is learned from, after the first 64; its captured hidden states
            and distributions are stored meanwhile.
        keep_gb: Maximum gigabytes of captured data on disk, beside --out; older texts are then not
            learned from again.
        prompt_tokens: Number of tokens of the data that the target continues.
        learning_rate: Peak of the schedule, which warms up and then falls along a cosine to a
            tenth. Default 0.001 for eagle3 and mtp, which begin as the target's last layer, and
            0.003 for others.
        warmup: Share of the steps in which the learning rate rises.
        optimizer: muon (for matrices, with AdamW for embeddings, heads and norms) or adamw.
        weight_decay: Weight decay of either optimizer.
        clip: Maximum norm of the gradient; larger gradients are scaled down to it.
        seed: Seed of the data order and of the target's texts; the same seed gives the same run.
        held_out: Share of the documents that are held out for evaluation.
        evaluate_every: Steps between evaluations; 0 evaluates at the beginning and the end only.
        evaluate_rows: Texts per evaluation, and per task in the final measurement.
        tasks: Tasks that the drafter is finally measured on beside the held-out texts, separated by
            commas (completion, edit and others of forerun bench); all, or none.
        speed_rounds: Rounds in which its speed is then compared with plain decoding and with
            --draft auto; 0 skips this.
        depth: Tokens drafted ahead in the accepted length that is evaluated and measured.
        patience: Evaluations without a better accepted length before training stops; 0 never stops
            early.
        checkpoint_every: Steps between checkpoints; 0 writes them at Ctrl-C and at the end only.
        max_minutes: Maximum minutes of the whole run, loading and measuring included. The learning
            rate has fallen when training ends, so the weights depend on the clock. 0 sets no limit,
            and the weights follow from the seed.
        top: Likeliest tokens of the target's distribution that are learned from, beside the rest
            as one outcome; vocabularies of up to 8192 tokens are learned from in full.
        dtype: float32, bfloat16 (weights stay in float32), or auto for bfloat16 where the processor
            supports it.
        device: Device; auto takes CUDA where there is one.
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
        check_numbers(self, dict.fromkeys(POSITIVE_SETTINGS, 1) | {"tokens": MIN_TOKENS})
        for name in ("on_policy", "warmup"):
            if getattr(self, name) > 1:
                raise _out_of_range(name, getattr(self, name), "a share from 0 to 1")
        if not 0 < self.held_out < 1:
            raise _out_of_range("held_out", self.held_out, "a share over 0 and under 1")
        if not 0 < self.temperature <= 100:
            raise _out_of_range("temperature", self.temperature, "a number over 0, at most 100")
        if self.write == 1:
            raise _out_of_range("write", 1, "a whole number from 2 up, or 0 beside --data")
        if not self.clip:
            raise _out_of_range("clip", 0, "a number over 0")
        if self.prompt_tokens + self.depth + 2 > self.tokens:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} leaves no room to draft {self.depth} tokens in"
                f" tokens={self.tokens}: lower it, or raise tokens"
            )
        if self.optimizer not in OPTIMIZERS:
            names = " or ".join(OPTIMIZERS)
            raise ConfigError(f"there is no optimizer {self.optimizer!r}: use {names}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"there is no training in {self.dtype!r}: use {', '.join(DTYPES)}")

    def num_texts(self, has_data: bool) -> int:
        """Return how many texts the target writes itself. Raises ConfigError if that leaves nothing
        to learn from."""
        if self.write is None:
            return 0 if has_data else DEFAULT_TEXTS
        if not self.write and not has_data:
            raise ConfigError(
                "write=0 leaves nothing to learn from: give --data, or a whole number from 2 up"
            )
        return self.write


def _out_of_range(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={value} is out of range: give {allowed}")


def depths_up_to(depth: int) -> list[int]:
    """Return the depths that are measured: 1, 2, 4 and so on, and `depth` itself."""
    return sorted({*(1 << i for i in range(depth.bit_length())), depth})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Weights of the loss, a sum over the learned tokens.

    Args:
        kl: Weight of KL(target, drafter).
        tv: Weight of the total variation, which is one minus the acceptance rate.
        ce: Weight of the cross entropy with the text.

    `default_rate` is the learning rate of the recipe if none is given.
    """

    default_rate: ClassVar[float] = 3e-3
    kl: float = 0.5
    tv: float = 0.5
    ce: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, dict.fromkeys(POSITIVE_OPTIONS, 1))
        if not self.kl + self.tv + self.ce:
            raise ConfigError("kl, tv and ce are all 0, so there is nothing to learn: raise one")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLMOptions(LossOptions):
    """Options of recipe small-lm, a small language model.

    Args:
        init: A model of the target's vocabulary to begin with (directory, GGUF file or Hub id); for
            eagle3 and mtp a head that was trained before.
        layers: Number of evenly spaced layers of the target to begin with, together with its
            embedding, norm and head. Default 2.
        draft_vocab: Number of tokens it scores, the most frequent ones of the data. Default all.
    """

    init: str | None = None
    layers: int | None = None
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)
        if self.init is not None and self.layers is not None:
            raise ConfigError("init and layers contradict each other: give the one or the other")


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTokenOptions(LossOptions):
    """Options of recipes that learn several tokens ahead.

    Args:
        decay: The kth token ahead (counted from 0) has the weight decay**k, since it matters only
            if all tokens before it were accepted.
    """

    decay: float = 0.8

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)
        if not 0 < self.decay <= 1:
            raise _out_of_range("decay", self.decay, "a number over 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions(MultiTokenOptions):
    """Options of recipe medusa: heads on the target's last hidden state, one for each token ahead.

    Args:
        heads: Number of heads, and so the maximum number of drafted tokens.
        blocks: Residual layers below each head.
    """

    heads: int = 4
    blocks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpOptions(MultiTokenOptions):
    """Options of recipes mtp and eagle3, heads that draft token by token.

    Args:
        unroll: Tokens drafted ahead while training, each from the head's own state of the token
            before.
        thin: Each further unrolled token is learned at every nth position of the one before; 1
            takes all positions, at the full cost for each token.
        intermediate: Width of the layer's MLP. Default that of the target.
        draft_vocab: Number of tokens it can draft, the most frequent ones of the data. Default for
            eagle3 as many as cost what the layer costs, from 8192 to 32000; for mtp, small-lm and
            block all.
    """

    default_rate: ClassVar[float] = 1e-3
    unroll: int = 3
    thin: int = 2
    intermediate: int | None = None
    draft_vocab: int | None = None
    init: str | None = None

    def __post_init__(self) -> None:
        MultiTokenOptions.__post_init__(self)
        shape = [name for name in HEAD_SHAPE if getattr(self, name, None)]
        if self.init is not None and shape:
            raise ConfigError(
                f"init and {shape[0]} contradict each other: the shape of a given head is fixed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions(MtpOptions):
    """Options of recipe eagle3: one decoder layer on hidden states from several target layers.

    Args:
        portable: Use the paper's layer, which other engines support. It begins at random and learns
            more slowly than the default, which begins as the target's last layer.
    """

    portable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions(MultiTokenOptions):
    """Options of recipe block: a few layers that draft a whole block in one forward pass.

    Args:
        block_size: Maximum number of drafted tokens, one for each slot of a block.
        block_layers: Number of decoder layers, of the target's sizes.
        fused_states: Number of evenly spaced target layers whose hidden states it reads, the last
            among them.
        markov_rank: Rank of the head that conditions each token on the one before it; 0 for none.
        confidence: Loss weight of the head that predicts acceptance; 0 for no such head.
        mask_token: Token id that fills the slots after the first. Default one that texts hardly
            use.
        anchors: Positions of each text that a block is drafted from in one training pass.
        draft_vocab: Number of tokens it can draft, with a head of its own. Default all.
    """

    block_size: int = 7
    block_layers: int = 2
    fused_states: int = 3
    markov_rank: int = 64
    confidence: float = 0.0
    mask_token: int | None = None
    anchors: int = 64
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        MultiTokenOptions.__post_init__(self)
        for name in ("block_size", "block_layers"):
            if getattr(self, name) > 64:
                raise _out_of_range(name, getattr(self, name), "at most 64")


# The first entry is the default recipe.
OPTIONS: dict[str, type[LossOptions]] = {
    "eagle3": EagleOptions,
    "small-lm": SmallLMOptions,
    "medusa": MedusaOptions,
    "mtp": MtpOptions,
    "block": BlockOptions,
}


def recipes_with(values: Mapping[str, Any]) -> list[str]:
    """Return the recipes that have all these options, or the default recipe if there is none."""
    known = {name: {f.name for f in fields(cls)} for name, cls in OPTIONS.items()}
    fitting = [name for name, names in known.items() if values.keys() <= names]
    return fitting or [next(iter(OPTIONS))]


def options_of(recipe: str, values: Mapping[str, Any]) -> LossOptions:
    """Build the options of a recipe. Raises ConfigError for an unknown recipe or option."""
    if recipe not in OPTIONS:
        raise ConfigError(f"there is no recipe {recipe!r}: {suggest(recipe, OPTIONS)}")
    cls = OPTIONS[recipe]
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(f"recipe {recipe} has no {name}: it takes {', '.join(known)}")
    return cls(**values)
