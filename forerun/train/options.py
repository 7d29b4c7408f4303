"""The choices of each recipe, in frozen dataclasses. No torch here: `--help` needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from forerun.errors import ConfigError, suggest
from forerun.utils import check_numbers

WHOLE = (
    "layers", "heads", "blocks", "unroll", "thin", "intermediate", "draft_vocab", "block_size", "block_layers",
    "fused_states", "anchors",
)  # numbers from 1 up  # fmt: skip
SHAPE = ("intermediate", "draft_vocab", "portable")  # of heads on pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What is minimised: a weighted sum over the tokens that count.

    Args:
        kl: weight of KL(target, drafter).
        tv: weight of the total variation, which is one minus the acceptance.
        ce: weight of the cross entropy with the text itself.

    `rate` is the learning rate where none is given.
    """

    rate: ClassVar[float] = 3e-3
    kl: float = 0.5
    tv: float = 0.5
    ce: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, dict.fromkeys(WHOLE, 1))
        if not self.kl + self.tv + self.ce:
            raise ConfigError(
                "kl, tv and ce are all 0, which is nothing to learn: give one of them a weight"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLMOptions(LossOptions):
    """A small language model that drafts alone. It begins as some of the target's layers, or as a
    model given.

    Args:
        init: a directory, GGUF file or Hub id of a model of the target's vocabulary to begin with;
            for recipes eagle3 and mtp a head that was trained before.
        layers: of the target, evenly spaced, its embeddings, norm and head with them; 2 if there is
            no init.
        draft_vocab: tokens it scores, the most frequent ones of the data; all if it is not given.
    """

    init: str | None = None
    layers: int | None = None
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)
        if self.init is not None and self.layers is not None:
            raise ConfigError("init and layers contradict each other: give the one or the other")


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOptions(LossOptions):
    """What is minimised where several tokens ahead are learnt.

    Args:
        decay: the kth token ahead counts decay**k times as much as the first, k counted from 0: it
            is asked only if all before it were right.
    """

    decay: float = 0.8

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)
        if not 0 < self.decay <= 1:
            raise ConfigError(
                f"decay={self.decay} is out of range: give a number over 0, at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions(AheadOptions):
    """Heads on the target's last hidden state, each of which guesses one token further.

    Args:
        heads: how many, and so how many tokens are drafted ahead at most.
        blocks: residual layers below each head.
    """

    heads: int = 4
    blocks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(AheadOptions):
    """What heads on pairs have in common, EAGLE-3 heads and multi-token modules: they draft token
    by token.

    Args:
        unroll: tokens drafted ahead while training, each from what the head made of those before
            it.
        thin: each further token of those is drafted behind every nth of the places that the one
            before it was; 1 takes all of them, which costs as much again for each token.
        intermediate: width of the layer's MLP; the target's if it is not given.
        draft_vocab: tokens it can say, the most frequent ones of the data; where it is not given,
            as many as cost what the layer costs, from 8192 to 32000 (eagle3), or all (mtp; small-lm
            and block have this option, too).
    """

    rate: ClassVar[float] = 1e-3
    unroll: int = 3
    thin: int = 2
    intermediate: int | None = None
    draft_vocab: int | None = None
    init: str | None = None

    def __post_init__(self) -> None:
        AheadOptions.__post_init__(self)
        shape = [name for name in SHAPE if getattr(self, name, None)]
        if self.init is not None and shape:
            raise ConfigError(
                f"init and {shape[0]} contradict each other: a head that is given has its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions(PairOptions):
    """An EAGLE-3 head: one decoder layer on hidden states of the target from several depths.

    Args:
        portable: make the paper's layer, which other engines know: it begins at random and learns
            more slowly than one whose pairs are joined before it, and which begins as the target's
            last.
    """

    portable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions(AheadOptions):
    """A drafter of whole blocks: a few layers that see hidden states of the target, and say all
    tokens in one pass.

    Args:
        block_size: slots of a block, and so how many tokens are drafted ahead at most.
        block_layers: decoder layers, of the target's sizes.
        fused_states: hidden states of the target it reads, evenly spaced, the last among them.
        markov_rank: of the head that fits each token to the one before it; 0 has none.
        confidence: weight of learning how likely each token is to stand; 0 has no such head.
        mask_token: fills the slots behind the first; one that texts hardly use if it is not given.
        anchors: tokens of each text that a block is drafted from in one pass of training.
        draft_vocab: tokens it can say, the most frequent ones of the data, with a head of its own;
            all if not given.
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
        AheadOptions.__post_init__(self)
        for name in ("block_size", "block_layers"):
            if getattr(self, name) > 64:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: give at most 64")


OPTIONS: dict[str, type[LossOptions]] = {
    "eagle3": EagleOptions,
    "small-lm": SmallLMOptions,
    "medusa": MedusaOptions,
    "mtp": PairOptions,
    "block": BlockOptions,
}  # of each recipe, by its name


def recipes_with(values: Mapping[str, Any]) -> list[str]:
    """The recipes that have all these options; where none has them, the one that is taken without
    any."""
    fitting = [
        name for name, cls in OPTIONS.items() if values.keys() <= {f.name for f in fields(cls)}
    ]
    return fitting or [next(iter(OPTIONS))]


def options_of(recipe: str, values: Mapping[str, Any]) -> LossOptions:
    """The options of a recipe from those that were given. Raises ConfigError for one of another
    recipe, or none."""
    if recipe not in OPTIONS:
        raise ConfigError(f"there is no recipe {recipe!r}: {suggest(recipe, OPTIONS)}")
    cls = OPTIONS[recipe]
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(f"recipe {recipe} has no {name}: it takes {', '.join(known)}")
    return cls(**values)
