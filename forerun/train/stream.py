"""The texts of each training step.

The texts of a step are a function of the settings and its number, so any step can be repeated.
Writing a text takes the target longer than learning from it takes the drafter, so texts are reused:
after the first `INITIAL_TEXTS`, one in `reuse` is new and the others are drawn from earlier ones.
Captured texts are stored beside the checkpoint. Values are rounded to two bytes whether they come
from there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from numpy.random import default_rng

from forerun.cli.progress import Tell
from forerun.errors import RequestError
from forerun.train.capture import CapturedText, CaptureStore
from forerun.train.data import Corpus, EpochOrder, Example
from forerun.train.options import Training
from forerun.train.target import BATCH_SIZE, Batch, Target, example_of, split_batch

INITIAL_TEXTS = 64  # new texts at the beginning; a run this short sees none twice


class TrainingTexts:
    """Batches for the steps of a run: texts of the data, and beginnings that the target continues.

    Attributes:
        vocab: number of tokens, from 0, that distributions cover. Set by `configure`.
        window: number of latest texts that may be reused. Set by `configure`.
        store: captured texts. Set by `configure`.
    """

    store: CaptureStore

    def __init__(
        self,
        corpus: Corpus,
        target: Target,
        settings: Training,
        written: CaptureStore | None = None,
    ) -> None:
        """`written` holds captures of texts that the target wrote as data. Raises RequestError if
        the data lack the texts or prompts that the settings ask for."""
        self.corpus, self.target, self.settings, self.written = corpus, target, settings, written
        self.vocab, self.window = target.vocab, INITIAL_TEXTS
        if corpus.too_long and not corpus.prompts:
            raise RequestError(
                f"{corpus.too_long} prompts leave no room for an answer within"
                f" tokens={settings.tokens}, and there is nothing else: use a larger --tokens"
            )
        if settings.on_policy < 1 and not corpus.examples:
            raise RequestError(
                "the data have no text to learn from, only prompts: use --on-policy 1"
            )
        if settings.on_policy > 0 and not corpus.prompts:
            raise RequestError(
                f"no text is longer than prompt_tokens={settings.prompt_tokens}, so that it could"
                " be continued: lower it, give longer texts, or use --on-policy 0"
            )
        self._example_order = EpochOrder(max(len(corpus.examples), 1), settings.seed)
        self._prompt_order = EpochOrder(max(len(corpus.prompts), 1), settings.seed + 1)
        self._group_number = -1
        self._group: list[CapturedText] = []

    def configure(self, vocab: int, directory: Path, tell: Tell) -> None:
        """Set the drafter's vocabulary and the directory that stores captured texts."""
        if vocab != self.target.vocab:
            self.written = None  # its distributions cover other tokens
        gigabytes = self.settings.keep_gb / (2 if self.written else 1)
        self.vocab, self.window = vocab, self.target.max_stored(gigabytes, vocab)
        self.store = CaptureStore(directory, self.window, tell)

    def open(self, keep: bool) -> None:
        """Begin; with `keep`, stored texts belong to this run."""
        if self.settings.reuse > 1:
            self.store.open(keep)

    def close(self, remove: bool) -> None:
        """End; with `remove`, delete stored texts."""
        self.store.close(remove)

    def step(self, number: int) -> list[list[int]]:
        """Return the text numbers of a step: `accumulate` passes of `rows` texts."""
        rows, passes = self.settings.rows, self.settings.accumulate
        first = number * rows * passes
        return [[self.number(first + p * rows + i) for i in range(rows)] for p in range(passes)]

    def number(self, n: int) -> int:
        """Return the number of the text in place n of the run: the next new one or an earlier
        one."""
        new = self._num_new(n)
        if self._num_new(n + 1) > new:
            return new
        return int(default_rng([self.settings.seed, 2, n]).integers(max(new - self.window, 0), new))

    def _num_new(self, n: int) -> int:
        """Return the number of new texts among the first n."""
        return min(n, INITIAL_TEXTS) + max(n - INITIAL_TEXTS, 0) // self.settings.reuse

    def text(self, n: int) -> Example:
        """Return text n; int(n * on_policy) of the first n are continued by the target."""
        continued = self._continued_index(n)
        return self._example(n) if continued is None else self._continuation(continued).example

    def captured(self, n: int) -> CapturedText | None:
        """Return the data captured while the target wrote text n; None if it must be read."""
        continued = self._continued_index(n)
        if continued is not None:
            return self._continuation(continued)
        return self.written.find(self._example(n)) if self.written else None

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the texts of these numbers with the target's outputs."""
        stored = {number: self.store.read(number) for number in dict.fromkeys(numbers)}
        found, unread = dict[int, CapturedText](), []
        for number, text in stored.items():
            text = text or self.captured(number)
            if text is None:
                unread.append(number)
            else:
                found[number] = text
        if unread:
            examples = [self.text(number) for number in unread]
            batch = self.target.batch(examples, vocab=self.vocab)
            texts = split_batch(batch, examples, self.target.aux_hidden_layers)
            found |= zip(unread, texts, strict=True)
        for number, text in stored.items():
            if text is None:
                self.store.write(number, found[number])
        return self.target.collate([found[number] for number in numbers], 1.0, self.vocab)

    def _continued_index(self, n: int) -> int | None:
        """Which of the target's continuations text n is; None for a text of the data."""
        index = int(n * self.settings.on_policy)
        return index if int((n + 1) * self.settings.on_policy) > index else None

    def _example(self, n: int) -> Example:
        return self.corpus.examples[self._example_order[n - int(n * self.settings.on_policy)]]

    def _continuation(self, n: int) -> CapturedText:
        """The nth continuation of the target; `BATCH_SIZE` are written together and kept."""
        group, at = divmod(n, BATCH_SIZE)
        if group != self._group_number:
            numbers = range(group * BATCH_SIZE, (group + 1) * BATCH_SIZE)
            requests = self.target.continue_prompts(
                [self.corpus.prompts[self._prompt_order[i]] for i in numbers],
                [seed_of(self.settings.seed, i) for i in numbers],
                self.settings.temperature,
                self.vocab,
            )
            self._group = [
                self.target.captured(request, example_of(request), self.vocab)
                for request in requests
            ]
            self._group_number = group
        return self._group[at]


def seed_of(seed: int, n: int) -> int:
    """Return the seed with which the target continues prompt n of a run."""
    return int(default_rng([seed, n]).integers(1 << 62))
