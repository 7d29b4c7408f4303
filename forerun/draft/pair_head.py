"""What a head on pairs is: a module that says token t + 2 from the token t + 1 and the target's states of token t.

EAGLE heads and multi-token modules differ in which states they read, how a pair enters, and whose vocabulary they
speak; all else, from how they are drafted with to how they are trained, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from forerun.draft.layers import Mlp, SelfAttention
from forerun.draft.listed import Listed
from forerun.draft.view import TargetView
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.packed import Packed


@dataclass(frozen=True, slots=True)
class Parts:
    """What the layer of a head is made of, for those who compute it in their own way.

    Attributes:
        embed_norm, state_norm: of either half of a pair; a state may be normed already, and some heads norm neither.
        join: what makes one vector of a pair, [Hd, 2 Hd], and may add a bias; without it both halves enter the
            attention side by side, and the state alone is carried on.
        attention_norm: before the attention, where pairs are joined.
        attention, mlp_norm, mlp: of the layer.
        last_norm: of what the layer left, before the product that says tokens; some heads have none.
        carried: norms, one after the other, of what the layer left as it enters the layer again.
        says: that product; the target's head where there is none.
    """

    embed_norm: nn.Module | None
    state_norm: nn.Module | None
    join: nn.Linear | None
    attention_norm: nn.Module | None
    attention: SelfAttention
    mlp_norm: nn.Module
    mlp: Mlp
    last_norm: nn.Module | None
    carried: Sequence[nn.Module]
    says: nn.Module | None


class PairHead(Listed):
    """Base of all heads on pairs.

    Attributes:
        inner: how the names of its layer's parts begin.
        layer: the shape of its decoder layer; `vocab` is that of its embedding.
        boundaries: the target's hidden states it reads.
        target: what it borrows from its target; there once it is attached.
        mask_token, mask_hidden: what a head that drafts in parallel reads in place of a token that is not known yet,
            and of the target's states beside it, [1, 1, n * H]. Other heads have none.
    """

    inner: str
    layer: ModelConfig
    boundaries: tuple[int, ...]
    target: TargetView
    mask_token: int | None = None
    mask_hidden: nn.Parameter

    def attach(self, target: TargetView) -> None:
        """Let it borrow from this target. Raises LoadError if the head is not made for it."""
        raise NotImplementedError

    @property
    def embedding(self) -> nn.Embedding | None:
        """Its own embedding; None where it borrows the target's."""
        return None

    def can_read(self, token: int) -> bool:
        """Whether its embedding has this token."""
        return self.embedding is None or token < self.layer.vocab

    def table(self) -> tuple[Tensor | Packed, float]:
        """Its embedding [.., Hd], and what rows are multiplied with."""
        own = self.embedding
        return (self.target.table, self.target.scale) if own is None else (own.weight.detach(), 1.0)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states side by side, [.., n * H], to a state of the head, [.., Hd]."""
        raise NotImplementedError

    def fusing(self) -> list[tuple[nn.Module | None, Tensor]] | None:
        """Products whose sum is what `fuse` makes, each with the norm before it, [Hd, width]: they read equal parts of
        the features, in order. None where there is more to it."""
        return None

    def embed(self, ids: Tensor) -> Tensor:
        """[..] int64 -> [.., Hd]"""
        own = self.embedding
        out: Tensor = self.target.embed(ids) if own is None else own(ids)
        return out

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Pairs of embeddings and states, [.., Hd] each, to what the head makes of them [.., Hd].

        rotation: cos and sin of the pairs' positions, [.., 1, D / 2]. attend: as in `models.decoder`, of layer 0.
        """
        raise NotImplementedError

    def parts(self) -> Parts:
        """What `forward` is made of, between `enter` and `leave`."""
        raise NotImplementedError

    @property
    def entered(self) -> nn.Module | None:
        """The norm of states as they go into the layer, if there is one."""
        return None

    def enter(self, state: Tensor) -> Tensor:
        """States as they go into the layer. [.., Hd] -> [.., Hd]"""
        norm = self.entered
        return state if norm is None else norm(state)

    def leave(self, x: Tensor) -> Tensor:
        """What is made of what the layer left. [.., Hd] -> [.., Hd]"""
        return x

    def logits(self, made: Tensor) -> Tensor:
        """[.., Hd] -> logits of the tokens it says, [.., Vd]"""
        raise NotImplementedError

    def state(self, made: Tensor) -> Tensor:
        """What a drafted token is paired with, from what the head made of its parent. [.., Hd] -> [.., Hd]"""
        raise NotImplementedError
