"""The choices of each recipe, in frozen dataclasses. No torch here: `--help` needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forerun.errors import ConfigError
from forerun.train.settings import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLMOptions:
    """A small language model that drafts alone. It begins as some of the target's layers, or as a model given.

    Args:
        init: a model directory or Hub id of the target's vocabulary to begin with.
        layers: of the target, evenly spaced, its embeddings, norm and head with them; 2 if there is no init.
        kl: weight of KL(target, drafter).
        tv: weight of the total variation, which is one minus the acceptance.
        ce: weight of the cross entropy with the text itself.
    """

    init: str | None = None
    layers: int | None = None
    kl: float = 0.5
    tv: float = 0.5
    ce: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, {"layers": 1})
        if self.init is not None and self.layers is not None:
            raise ConfigError("init and layers contradict each other: give the one or the other")
        if not self.kl + self.tv + self.ce:
            raise ConfigError("kl, tv and ce are all 0, which is nothing to learn: give one of them a weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions:
    """Heads on the target's last hidden state, each of which guesses one token further.

    Args:
        heads: how many, and so how many tokens are drafted ahead at most.
        blocks: residual layers below each head.
        decay: head k counts decay**k times as much as the first: it is asked only if all before it were right.
        kl: weight of KL(target, head).
        tv: weight of the total variation, which is one minus the acceptance.
        ce: weight of the cross entropy with the text itself.
    """

    heads: int = 4
    blocks: int = 1
    decay: float = 0.8
    kl: float = 0.5
    tv: float = 0.5
    ce: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, {"heads": 1, "blocks": 1})
        if not self.kl + self.tv + self.ce:
            raise ConfigError("kl, tv and ce are all 0, which is nothing to learn: give one of them a weight")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay} is out of range: give a number over 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """A drafter of whole blocks: a few layers that see hidden states of the target, and say all tokens in one pass.

    Args:
        block_size: slots of a block, and so how many tokens are drafted ahead at most.
        block_layers: decoder layers, of the target's sizes.
        fused_states: hidden states of the target it reads, evenly spaced, the last among them.
        markov_rank: of the head that fits each token to the one before it; 0 has none.
        confidence: weight of learning how likely each token is to stand; 0 has no such head.
        mask_token: fills the slots behind the first; one that texts hardly use if it is not given.
        anchors: tokens of each text that a block is drafted from in one pass of training.
        decay: slot k counts decay**k times as much as the first: it is asked only if all before it were right.
        kl: weight of KL(target, drafter).
        tv: weight of the total variation, which is one minus the acceptance.
        ce: weight of the cross entropy with the text itself.
    """

    block_size: int = 7
    block_layers: int = 2
    fused_states: int = 3
    markov_rank: int = 64
    confidence: float = 0.0
    mask_token: int | None = None
    anchors: int = 64
    decay: float = 0.8
    kl: float = 0.5
    tv: float = 0.5
    ce: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, {"block_size": 1, "block_layers": 1, "fused_states": 1, "anchors": 1})
        for name, most in (("block_size", 64), ("block_layers", 64)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: give at most {most}")
        if not self.kl + self.tv + self.ce:
            raise ConfigError("kl, tv and ce are all 0, which is nothing to learn: give one of them a weight")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay} is out of range: give a number over 0, at most 1")


Options = SmallLMOptions | MedusaOptions | BlockOptions

OPTIONS: dict[str, type[Options]] = {
    "small-lm": SmallLMOptions,
    "medusa": MedusaOptions,
    "block": BlockOptions,
}  # of each recipe, by its name; the first is taken where none is named


def options_of(recipe: str, values: Mapping[str, Any]) -> Options:
    """The options of a recipe from those that were given. Raises ConfigError for one of another recipe."""
    cls = OPTIONS.get(recipe, SmallLMOptions)  # an unknown recipe is refused where it is named
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(f"recipe {recipe} has no {name}: it takes {', '.join(known)}")
    return cls(**values)
