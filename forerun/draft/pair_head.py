"""What a head on pairs is: a module that says token t + 2 from the token t + 1 and the target's states of token t.

EAGLE heads and multi-token modules differ in which states they read, how a pair enters, and whose vocabulary they
speak; all else, from how they are drafted with to how they are trained, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.draft.borrowed import Head, check_sizes
from forerun.draft.layers import Layer
from forerun.draft.view import TargetView
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend

NO_NORM = nn.Identity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a head is made of between its states and what they become.

    Attributes:
        layer: which attends, behind a norm where pairs are joined.
        embed_norm, state_norm: of either half of a pair; a state may be normed already, and some heads norm neither.
        join: what makes one vector of a pair, [Hd, 2 Hd], and may add a bias; without it both halves enter the
            attention side by side, and the state alone is carried on.
        attention_norm: before the attention, where pairs are joined.
        last_norm: of what the layer left, before the product that says tokens; some heads have none.
        carried: norms, one after the other, of what the layer left as it enters the layer again.
    """

    layer: Layer
    embed_norm: nn.Module = NO_NORM
    state_norm: nn.Module = NO_NORM
    join: nn.Linear | None = None
    attention_norm: nn.Module = NO_NORM
    last_norm: nn.Module = NO_NORM
    carried: Sequence[nn.Module] = ()

    def along(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """What the layer leaves of pairs, [.., Hd] of either half. -> [.., Hd]"""
        pair = torch.cat((self.embed_norm(embedded), self.state_norm(state)), dim=-1)
        if self.join is None:
            return self.layer.along(state, pair, rotation, attend)
        x = self.join(pair)
        return self.layer.along(x, self.attention_norm(x), rotation, attend)


class PairHead(Head):
    """Base of all heads on pairs: those that read the target's last state, normed, unless they say otherwise.

    Attributes:
        inner: how the names of its layer's parts begin.
        layer: the shape of its decoder layer; `vocab` is that of its embedding.
        boundaries: the target's hidden states it reads.
        mask_token, mask_hidden: what a head that drafts in parallel reads in place of a token that is not known yet,
            and of the target's states beside it, [1, 1, n * H]. Other heads have none.
    """

    inner: str
    layer: ModelConfig
    boundaries: tuple[int, ...]
    mask_token: int | None = None
    mask_hidden: nn.Parameter

    def attach(self, target: TargetView) -> None:
        """Let it borrow from this target. Raises LoadError if the head is not made for it."""
        check_sizes(self.title, target, self.layer.hidden, self.layer.vocab)
        self.target = target

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states side by side, [.., n * H], to a state of the head, [.., Hd]."""
        return self.target.normalise(features)

    def fusing(self) -> list[tuple[nn.Module | None, Tensor]]:
        """Products whose sum is what `fuse` makes, each with the norm before it, [Hd, width]: they read equal parts of
        the features, in order. Empty where there is more to it."""
        return []

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Pairs of embeddings and states, [.., Hd] each, to what the head makes of them [.., Hd].

        rotation: cos and sin of the pairs' positions, [.., 1, D / 2]. attend: as in `models.decoder`, of layer 0.
        """
        return self.leave(self.parts().along(embedded, self.enter(state), rotation, attend))

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
        return self.say(made)

    def state(self, made: Tensor) -> Tensor:
        """What a drafted token is paired with, from what the head made of its parent. [.., Hd] -> [.., Hd]"""
        return made
