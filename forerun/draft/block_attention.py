"""Who sees whom in a pass over the slots of blocks: context by where its anchor stands, and one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from forerun.cache.attention import Attention, Segment, Sight
from forerun.cache.kv import KVCache
from forerun.draft.block_head import BlockConfig


class BlockAttention(Attention):
    """The plan of a pass over whole blocks, whose anchors stand behind all that is committed.

    All slots of a block see the same context, of which a layer with a window knows the last that so many tokens have
    left; which of one another they see is `BlockConfig.is_causal` of the layer.
    """

    def __init__(self, segments: Sequence[Segment], cache: KVCache, config: BlockConfig) -> None:
        self._block = config
        super().__init__(segments, cache, config.layer)

    def _masks(
        self, segments: list[Segment], depths: list[np.ndarray], queries: int, width: int
    ) -> dict[Sight, Tensor | None]:
        masks: dict[Sight, Tensor | None] = {}
        for layer, window in enumerate(self.config.windows):
            mask = np.zeros((len(segments), queries, width), dtype=bool)
            for r, segment in enumerate(segments):
                at, count = self.cache.length[segment.slot], len(segment.tokens)
                mask[r, :count, max(0, at - window) if window else 0 : at] = True
                mask[r, :count, at : at + count] = np.tri(count, dtype=bool) if self._block.is_causal(layer) else True
                mask[r, count:, 0] = True  # a padding query must see something, or it is NaN
            masks[self.config.sight(layer)] = None if mask.all() else self._tensor(mask)
        return masks
