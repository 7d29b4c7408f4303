"""Shapes of what block drafters have beside their layers, and how a config.json says them, in words of speculators.

A drafter has one law at most, its Markov head: what makes the logits of a slot depend on the tokens before it. No torch
here: what a drafter is for is asked of files that are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.draft.fields import read_whole
from forerun.errors import LoadError, shown
from forerun.models.config import ModelConfig
from forerun.models.families import Json

Shapes = Mapping[str, tuple[int, ...]]
MARKOV = ("vanilla", "gated", "rnn")
MOST = 1 << 16  # of any size below


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """`block_laws.Markov`. rank: of the factors; kind: one of `MARKOV`."""

    rank: int
    kind: str = "vanilla"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The shape of a head.

    Attributes:
        layer: its decoder layers, of a family like Qwen3; `vocab` is the target's.
        target_hidden: size of the target's hidden states.
        boundaries: which of them make the context, in the order in which they are fused.
        block: slots of a block, S, the anchor's included.
        mask_token: the target's token that fills the slots behind the anchor.
        window_causal: in layers with a window (`layer.windows`), which see the context of so many tokens before the
            anchor, slots see those before them alone; otherwise all of their block.
        sample_from_anchor: slot k says the token at position start + k + 1, start being the anchor's (DSpark);
            otherwise the one at its own position start + k, and slot 0 says nothing (DFlash).
        draft_vocab: tokens it can say; fewer than `vocab` with a map, see `Head`.
        own_embedding, own_head: it has an embedding and a head of its own; otherwise the target's are used.
        law: its Markov head, if what it says depends on the tokens before a slot.
        confidence: there is a confidence head.
        confidence_with_markov: which also reads what the Markov head knows of the token before.
    """

    layer: ModelConfig
    target_hidden: int
    boundaries: tuple[int, ...]
    block: int
    mask_token: int
    window_causal: bool = False
    sample_from_anchor: bool = True
    draft_vocab: int
    own_embedding: bool = False
    own_head: bool = False
    law: MarkovShape | None = None
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def first(self) -> int:
        """The slot that says the token behind the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        """Tokens a block says."""
        return self.block - self.first

    @property
    def is_bigram(self) -> bool:
        """Whether its law, if it has one, adds what follows from the token before, and nothing else."""
        return self.law is None or self.law.kind == "vanilla"

    def is_causal(self, layer: int) -> bool:
        """Whether slots see no later ones in this layer."""
        return self.window_causal and self.layer.windows[layer] is not None


def read_law(raw: Json, shapes: Shapes) -> MarkovShape | None:
    """The law that is described; `shapes` are those of the tensors, as far as they are known. Raises LoadError."""
    rank = _size(raw, "markov_rank", shapes, "markov_head.markov_w1.weight", 1, default=0)
    kind = raw.get("markov_head_type")
    if kind not in (None, *MARKOV):
        raise LoadError(f"its Markov head is of the type {shown(kind)}: only {', '.join(MARKOV)} are supported")
    return MarkovShape(rank, kind or "vanilla") if rank else None


def _size(raw: Json, name: str, shapes: Shapes, tensor: str, axis: int, default: int | None = None) -> int:
    """A size that config.json says, or the axis of a tensor: the same, where both are known."""
    shape = shapes.get(tensor, ())
    held = shape[axis] if axis < len(shape) else None
    size = read_whole(raw, name, 1 if default is None else 0, MOST, default if held is None else held)
    if shapes and size and held is None:
        raise LoadError(f"its checkpoint has no {tensor}: it is incomplete, or of another kind")
    if held not in (None, size):
        raise LoadError(f"{tensor} has {held} numbers where config.json asks for {size}, by {name}")
    return size
