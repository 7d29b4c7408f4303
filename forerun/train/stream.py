"""Which texts a step learns from: a function of the settings and its number, so that any step can be repeated."""

from __future__ import annotations

import numpy as np

from forerun.errors import RequestError
from forerun.train.capture import AT_ONCE, Target
from forerun.train.data import Corpus, Example, Order
from forerun.train.settings import Training


class Stream:
    """The texts of all steps: the data's own, and beginnings of them that the target has continued.

    The target continues some prompts together; what it said is kept until a later step asks for the next ones.
    """

    def __init__(self, corpus: Corpus, target: Target, settings: Training) -> None:
        """Raises RequestError where the data have no texts, or no prompts, but the settings want some."""
        self.corpus, self.target, self.settings = corpus, target, settings
        if corpus.too_long and not corpus.prompts:
            raise RequestError(
                f"{corpus.too_long} prompts leave no room for an answer within tokens={settings.tokens}, and there is"
                " nothing else: use a larger --tokens"
            )
        if settings.on_policy < 1 and not corpus.examples:
            raise RequestError("the data have no text to learn from, only prompts: use --on-policy 1")
        if settings.on_policy > 0 and not corpus.prompts:
            raise RequestError(
                f"no text is longer than prompt_tokens={settings.prompt_tokens}, so that it could be continued: lower"
                " it, give longer texts, or use --on-policy 0"
            )
        self._own = Order(max(len(corpus.examples), 1), settings.seed)
        self._prompts = Order(max(len(corpus.prompts), 1), settings.seed + 1)
        self._group, self._said = -1, list[Example]()

    def step(self, number: int) -> list[list[Example]]:
        """The passes of a step, each of `rows` texts."""
        rows, passes = self.settings.rows, self.settings.accumulate
        first = number * rows * passes
        return [[self._text(first + p * rows + i) for i in range(rows)] for p in range(passes)]

    def _text(self, n: int) -> Example:
        """Text n of the run; of the first n there are int(n * on_policy) which the target has written."""
        written = int(n * self.settings.on_policy)
        if int((n + 1) * self.settings.on_policy) > written:
            return self._continued(written)
        return self.corpus.examples[self._own[n - written]]

    def _continued(self, n: int) -> Example:
        """The nth text that the target has written."""
        group, at = divmod(n, AT_ONCE)
        if group != self._group:
            numbers = range(group * AT_ONCE, (group + 1) * AT_ONCE)
            prompts = [self.corpus.prompts[self._prompts[i]] for i in numbers]
            seeds = [seed_of(self.settings.seed, i) for i in numbers]
            self._said = self.target.continued(prompts, seeds, self.settings.temperature)
            self._group = group
        return self._said[at]


def seed_of(seed: int, n: int) -> int:
    """The seed the target continues prompt n of a run with."""
    return int(np.random.default_rng([seed, n]).integers(1 << 62))
