"""What a head on pairs is: a module that says token t + 2 from the token t + 1 and the target's states of token t.

EAGLE-3 heads and multi-token modules differ in which states they read, how a pair enters, and whose vocabulary they
speak; all else, from how they are drafted with to how they are trained, is the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from forerun.draft.view import TargetView
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend


class PairHead(nn.Module):
    """Base of all heads on pairs.

    Attributes:
        layer: the shape of its decoder layer; `vocab` is that of its embedding.
        boundaries: the target's hidden states it reads.
        target: what it borrows from its target; there once it is attached.
    """

    layer: ModelConfig
    boundaries: tuple[int, ...]
    target: TargetView

    def attach(self, target: TargetView) -> None:
        """Let it borrow from this target. Raises LoadError if the head is not made for it."""
        raise NotImplementedError

    def tokens(self) -> Tensor | None:
        """The target's token ids the head says, in the order of its logits, [Vd] int64; None: the first Vd."""
        return None

    def can_read(self, token: int) -> bool:
        """Whether its embedding has this token."""
        return True

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states side by side, [.., n * H], to a state of the head, [.., Hd]."""
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        """[..] int64 -> [.., Hd]"""
        return self.target.embed(ids)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Pairs of embeddings and states, [.., Hd] each, to what the head makes of them [.., Hd].

        rotation: cos and sin of the pairs' positions, [.., 1, D / 2]. attend: as in `models.decoder`, of layer 0.
        """
        raise NotImplementedError

    def logits(self, made: Tensor) -> Tensor:
        """[.., Hd] -> logits of the tokens it says, [.., Vd]"""
        raise NotImplementedError

    def state(self, made: Tensor) -> Tensor:
        """What a drafted token is paired with, from what the head made of its parent. [.., Hd] -> [.., Hd]"""
        raise NotImplementedError
