"""What a block drafter says of a slot behind the tokens that were drafted before it: the base of all such heads.

The layers make all slots at once, so each would say its token without knowing those before it. A law adds what follows
from them, one level of a draft after the other. What it says of a node's children depends on the text and on the path
down to the node alone, never on what else is drafted, is drawn or is about to be: so q is the law a token was really
drawn from, and every rule stays exact with chains, trees and laws that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Behind:
    """What a law knows of some nodes of a draft, of one level.

    Attributes:
        slot: which slot of the block says their children.
        made [S, Hd]: what the layers made of all slots.
        said [F, Vd]: what that slot says by itself.
        previous [F]: the nodes' tokens.
        embed: tokens to what enters the layers, [..] -> [.., Hd].
    """

    slot: int
    made: Tensor
    said: Tensor
    previous: Tensor
    embed: Callable[[Tensor], Tensor]


class BlockLaw(nn.Module):
    """One of them. It may carry a state from a node to its children."""

    def begin(self, made: Tensor, tokens: Tensor) -> Tensor:
        """What stands above the root, [..]. made [S, Hd], of all slots; tokens [2]: the last one before the anchor, and
        the anchor."""
        return made.new_zeros(0)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits behind some nodes [F, Vd], and the state for their children; state [F, ..]: that of their parents."""
        raise NotImplementedError
