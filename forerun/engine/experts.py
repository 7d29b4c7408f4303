"""Distinct experts of a forward pass, in units of rows, for models with mixtures of experts.

A pass over a few tokens costs about what it takes to read the experts that they use, and tokens
that share experts cost less than strangers. Passes are therefore measured and predicted by
effective rows: the number of tokens with independent routes that would use as many distinct experts,
E (1 - (1 - k / E)^rows) a layer. What a drafted token will use is estimated from the last time the
target read it; tokens that were never read count as strangers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from forerun.models.families import Experts

TABLE_BYTES = 64 << 20  # of what is remembered of tokens
GAIN = 0.05  # weight of a pass in the mean ratio of effective rows to tokens


class ExpertLoad:
    """What tokens use of a model's experts, learned from the passes of the target.

    Attributes:
        ratio: mean effective rows that a further token adds.
        error: mean relative error of recent estimates, in distinct experts.
    """

    def __init__(self, experts: Experts) -> None:
        self.count, self.used = experts.count, experts.used
        self.layers = sum(experts.layers)
        self.ratio = 1.0
        self.error = 0.0
        # token -> its experts, int16 [layers, used]
        self._last: OrderedDict[int, np.ndarray] = OrderedDict()
        self._most = max(TABLE_BYTES // (2 * self.layers * self.used), 1)
        self._all_layers = np.arange(self.layers)[:, None]

    def rows(self, distinct: float) -> float:
        """Return the effective rows of a pass that uses `distinct` experts, all layers together."""
        if self.used >= self.count:
            return 1.0
        free = max(1 - distinct / self.layers / self.count, 0.5 / self.count)
        return math.log(free) / math.log(1 - self.used / self.count)

    def observe(self, tokens: Sequence[int], choices: np.ndarray) -> float:
        """Remember the experts of the tokens of a pass, int16 [T, layers, used].

        Returns the effective rows of the pass."""
        expected = self.distinct(tokens)[-1]
        found = np.zeros((self.layers, self.count), bool)
        found[self._all_layers, choices.transpose(1, 0, 2).reshape(self.layers, -1)] = True
        distinct = int(found.sum())
        self.error += GAIN * (abs(expected - distinct) / distinct - self.error)
        self.remember(tokens, choices)
        rows = self.rows(distinct)
        if len(tokens) > 1:
            self.ratio += GAIN * ((rows - 1) / (len(tokens) - 1) - self.ratio)
        return rows

    def remember(self, tokens: Sequence[int], choices: np.ndarray) -> None:
        """Remember the experts of tokens, int16 [T, layers, used]."""
        for token, own in zip(tokens, choices, strict=True):
            self._last[token] = own.copy()
            self._last.move_to_end(token)
        while len(self._last) > self._most:
            self._last.popitem(last=False)

    def distinct(self, tokens: Sequence[int]) -> list[float]:
        """Return the number of distinct experts expected of the first 1, 2, .. tokens."""
        used = np.zeros((self.layers, self.count), bool)
        known, strange, found = 0, 0, []
        for token in tokens:
            own = self._last.get(token)
            if own is None:
                strange += 1
            else:
                used[self._all_layers, own] = True
                known = int(used.sum())
            free = self.layers * self.count - known
            found.append(known + free * (1 - (1 - self.used / self.count) ** strange))
        return found

    def growth(self, certain: Sequence[int], drafted: Sequence[int]) -> list[float]:
        """Return the effective rows that the first 0, 1, .. drafted tokens add to certain ones."""
        rows = [self.rows(distinct) for distinct in self.distinct([*certain, *drafted])]
        first = rows[len(certain) - 1]
        return [each - first for each in rows[len(certain) - 1 :]]

    def expected_rows(self, num_tokens: float) -> float:
        """Return the effective rows expected of a pass over so many tokens."""
        return 1 + max(num_tokens - 1, 0) * self.ratio
