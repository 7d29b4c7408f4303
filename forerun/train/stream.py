"""Which texts a step learns from, and what the target says and thinks of them.

The texts of a step are a function of the settings and its number, so that any step can be repeated.
To write a text takes the target longer than the drafter takes to learn from it. So texts come back:
after the first `POOL`, one in `reuse` is new and the others are drawn from those before it. What
was captured of a text, while the target wrote it or by reading it once, lies in a file beside the
checkpoint. Values are rounded to two bytes whether they come from there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from numpy.random import default_rng

from forerun.cli.progress import Tell
from forerun.errors import RequestError
from forerun.train.capture import AT_ONCE, Batch, Target, apart
from forerun.train.captured import Captured, Kept, Records
from forerun.train.data import Corpus, Example, Order
from forerun.train.settings import Training

POOL = 64  # texts that are new, at the beginning: a run that is as short as that sees none twice


class Stream:
    """The texts of all steps: the data's own, and beginnings of them that the target has continued.

    The target continues some prompts together; what it said and thought is kept until a later step
    asks for the next ones. `window` is how many of the latest texts may come back; laws are over
    the first `vocab` tokens."""

    window = POOL

    def __init__(
        self, corpus: Corpus, target: Target, settings: Training, kept: Kept | None = None
    ) -> None:
        """`kept` is what was captured of the data's own texts. Raises RequestError where the data
        have no texts, or no prompts, but the settings want some."""
        self.corpus, self.target, self.settings, self.kept = corpus, target, settings, kept
        self.vocab = target.vocab
        if corpus.too_long and not corpus.prompts:
            raise RequestError(
                f"{corpus.too_long} prompts leave no room for an answer within tokens={settings.tokens}, and there is"
                " nothing else: use a larger --tokens"
            )
        if settings.on_policy < 1 and not corpus.examples:
            raise RequestError(
                "the data have no text to learn from, only prompts: use --on-policy 1"
            )
        if settings.on_policy > 0 and not corpus.prompts:
            raise RequestError(
                f"no text is longer than prompt_tokens={settings.prompt_tokens}, so that it could be continued: lower"
                " it, give longer texts, or use --on-policy 0"
            )
        self._own = Order(max(len(corpus.examples), 1), settings.seed)
        self._prompts = Order(max(len(corpus.prompts), 1), settings.seed + 1)
        self._group, self._said = -1, list[Captured]()

    def step(self, number: int) -> list[list[int]]:
        """The passes of a step, each of `rows` texts by their numbers."""
        rows, passes = self.settings.rows, self.settings.accumulate
        first = number * rows * passes
        return [[self.number(first + p * rows + i) for i in range(rows)] for p in range(passes)]

    def number(self, n: int) -> int:
        """The text that is learnt from as the run's nth: the next new one, or one that was
        there."""
        new = self._new(n)
        if self._new(n + 1) > new:
            return new
        return int(default_rng([self.settings.seed, 2, n]).integers(max(new - self.window, 0), new))

    def _new(self, n: int) -> int:
        """How many of the first n are new."""
        return min(n, POOL) + max(n - POOL, 0) // self.settings.reuse

    def text(self, n: int) -> Example:
        """Text n of the run; of the first n there are int(n * on_policy) which the target has
        written."""
        written = self._written(n)
        return self._own_text(n) if written is None else self._continued(written).example

    def captured(self, n: int) -> Captured | None:
        """What the target thought of text n while it wrote it; None where it has to read it."""
        written = self._written(n)
        if written is not None:
            return self._continued(written)
        return self.kept.find(self._own_text(n)) if self.kept else None

    def _written(self, n: int) -> int | None:
        """Which of the texts that the target has written is text n of the run."""
        written = int(n * self.settings.on_policy)
        return written if int((n + 1) * self.settings.on_policy) > written else None

    def _own_text(self, n: int) -> Example:
        return self.corpus.examples[self._own[n - int(n * self.settings.on_policy)]]

    def _continued(self, n: int) -> Captured:
        """The nth text that the target has written."""
        group, at = divmod(n, AT_ONCE)
        if group != self._group:
            numbers = range(group * AT_ONCE, (group + 1) * AT_ONCE)
            prompts = [self.corpus.prompts[self._prompts[i]] for i in numbers]
            seeds = [seed_of(self.settings.seed, i) for i in numbers]
            self._said = self.target.written(prompts, seeds, self.settings.temperature, self.vocab)
            self._group = group
        return self._said[at]


class Harvest:
    """Batches for the steps of a run."""

    def __init__(
        self, target: Target, stream: Stream, vocab: int, settings: Training, path: Path, tell: Tell
    ) -> None:
        """Laws are over the first `vocab` tokens. `path` is the file's."""
        self.target, self.stream, self.vocab = target, stream, vocab
        gigabytes = settings.keep_gb / (
            2 if stream.kept else 1
        )  # what was written has the other half
        self.records = Records(path, target.shape(vocab), settings.tokens, gigabytes, tell)
        self._keeps = settings.reuse > 1  # else nothing comes back
        stream.window, stream.vocab = self.records.places, vocab

    def open(self, keep: bool) -> None:
        """Begin; with `keep`, what is in the file is of this run."""
        if self._keeps:
            self.records.open(keep)

    def close(self, remove: bool) -> None:
        """End; with `remove`, nothing is left."""
        self.records.close(remove)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The texts of these numbers, with what the target thought of them."""
        found = {number: self.records.read(number) for number in dict.fromkeys(numbers)}
        new = {
            number: self.stream.captured(number)
            for number, captured in found.items()
            if captured is None
        }
        missing = [number for number, captured in new.items() if captured is None]
        if missing:
            examples = [self.stream.text(number) for number in missing]
            taken = apart(
                self.target.batch(examples, vocab=self.vocab),
                examples,
                self.target.aux_hidden_layers,
            )
            new.update(zip(missing, taken, strict=True))
        for number, captured in new.items():
            assert captured is not None
            self.records.write(number, captured)
        texts = [captured for number in numbers if (captured := (found | new)[number])]
        return self.target.together(texts, 1.0, self.vocab)


def seed_of(seed: int, n: int) -> int:
    """The seed the target continues prompt n of a run with."""
    return int(default_rng([seed, n]).integers(1 << 62))
