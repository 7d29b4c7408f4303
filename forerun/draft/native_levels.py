"""Heads, one a level, on the native kernels: all levels and the draws between them in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from forerun.draft.level_heads import STATE, LevelHeads
from forerun.draft.operations import Operations
from forerun.models.config import ModelConfig
from forerun.passes import Link, Said
from forerun.recorded import LOGITS, Recorded


class NativeLevels:
    """A program for each level of some heads."""

    def __init__(self, heads: LevelHeads, config: ModelConfig, form: str) -> None:
        """Their products are native, in `form`; config: of their target."""
        made, ids = Operations(config, form, None), heads.tokens()
        self.ids = None if ids is None else ids.numpy()
        inner, carried = heads.widths()
        widths = np.ones(STATE + 1, np.int32)
        widths[0], widths[LOGITS], widths[STATE] = inner, heads.vocab if ids is None else len(ids), carried
        programs = [heads.record(level, made) for level in range(heads.levels)]
        self.drafts = all(programs)  # whether rounds can be done here
        self._made, self._begin = made, Recorded(config, [], widths)
        self._levels = [Recorded(config, ops, widths) for ops in programs]

    def round(self, links: Sequence[Link], entered: Tensor, vocab: int, stands: array[float] | None) -> list[Said]:
        """Draft behind each link from what enters level 0, [links, C], at most as many tokens as there are levels; see
        `Recorded.levels`."""
        links = [replace(link, keys=link.keys[: len(self._levels)]) for link in links]
        return self._begin.levels(links, self._levels, {STATE: entered.float().numpy()}, vocab, self.ids, stands)
