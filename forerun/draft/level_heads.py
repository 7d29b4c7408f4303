"""Heads on the target's last state, one a level: what they are.

With g_t the state in which the target left token t, after its last norm, the target's own head says token t + 1. The
head of level i (from 0) says token t + 2 + i, from what level i - 1 carries over and the token that was drafted there:
Medusa's carry the state and look at no token, a multi-layer perceptron a state of its own. Nothing of it outlives a
round, so there is no cache, and a request needs no more than its last state.
"""

from __future__ import annotations

from torch import Tensor, nn

from forerun.draft.operations import Operations
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.kernels.native import COp
from forerun.recorded import LOGITS

STATE = LOGITS + 1  # the buffer of what is carried from level to level


class LevelHeads(nn.Module):
    """Base of all modules with a head a level.

    Attributes:
        title: what messages call them, in the plural.
        levels: how many tokens ahead they say.
        hidden, vocab: sizes of the target that they are for.
    """

    title: str

    def __init__(self, levels: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.levels, self.hidden, self.vocab = levels, hidden, vocab

    def attach(self, target: TargetView) -> None:
        """Check that they are for this target. Raises LoadError if they are not."""
        if (self.hidden, self.vocab) != (target.hidden, target.vocab):
            raise LoadError(
                f"these {self.title} are for a target with states of {self.hidden} and {self.vocab} tokens, this one"
                f" has {target.hidden} and {target.vocab}: use some that were trained for it"
            )

    def tokens(self) -> Tensor | None:
        """The target's token ids they say, in the order of their logits, [Vd] int64; None: all of them."""
        return None

    def enter(self, states: Tensor) -> Tensor:
        """What level 0 begins with, of the target's normalised states. [R, H] -> [R, C]"""
        return states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What a level says behind each of `tokens`, [F] int64, and what it carries over to the next.

        [F, C], where C may differ from level to level -> logits [F, Vd], [F, C']
        """
        raise NotImplementedError

    def widths(self) -> tuple[int, int]:
        """Of the buffers X and STATE, for `record`."""
        return self.hidden, self.hidden

    def record(self, level: int, made: Operations) -> list[COp]:
        """What `step` does as operations, where its products are native: from STATE and the tokens before to LOGITS and
        the next STATE, by way of X."""
        raise NotImplementedError
