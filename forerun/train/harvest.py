"""What the target says and thinks of the texts of a run: found once, kept on disk, learnt from several times.

To write a text takes the target longer than the drafter takes to learn from it. So a text comes back
(`Stream.number`), and what was captured of it, while the target wrote it or by reading it once, lies in a file beside
the checkpoint. Values are rounded to two bytes whether they come from there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.progress import Tell
from forerun.train.capture import Batch, Target, apart
from forerun.train.captured import Captured, Records
from forerun.train.losses import Law
from forerun.train.settings import Training
from forerun.train.stream import Stream


class Harvest:
    """Batches for the steps of a run."""

    def __init__(self, target: Target, stream: Stream, vocab: int, settings: Training, path: Path, tell: Tell) -> None:
        """Laws are over the first `vocab` tokens. `path` is the file's."""
        self.target, self.stream, self.vocab = target, stream, vocab
        gigabytes = settings.keep_gb / (2 if stream.kept else 1)  # what was written has the other half
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
        new = {number: self.stream.captured(number) for number, captured in found.items() if captured is None}
        missing = [number for number, captured in new.items() if captured is None]
        if missing:
            examples = [self.stream.text(number) for number in missing]
            taken = apart(self.target.batch(examples, vocab=self.vocab), examples, self.target.boundaries)
            new.update(zip(missing, taken, strict=True))
        for number, captured in new.items():
            assert captured is not None
            self.records.write(number, captured)
        return self._together([captured for number in numbers if (captured := (found | new)[number])])

    def _together(self, texts: Sequence[Captured]) -> Batch:
        shape = self.records.shape
        width, device = max(len(text.example.tokens) for text in texts), self.target.device
        tokens = torch.zeros((len(texts), width), dtype=torch.int64)
        mask = torch.zeros((len(texts), width - 1), dtype=torch.bool)
        first = texts[0]
        likeliest = None if first.likeliest is None else tokens.new_zeros((*mask.shape, shape.likeliest))
        logs, said = torch.zeros((*mask.shape, shape.logs)), torch.zeros(mask.shape)
        states = torch.zeros((shape.boundaries, *mask.shape, shape.hidden))
        for i, text in enumerate(texts):
            count = len(text.example.tokens)
            counts = slice(text.example.given - 1, count - 1)
            tokens[i, :count] = torch.tensor(text.example.tokens)
            mask[i, counts] = True
            logs[i, counts], said[i, counts] = text.logs.float(), text.said
            states[:, i, : count - 1] = text.states.float()
            if likeliest is not None and text.likeliest is not None:
                likeliest[i, counts] = text.likeliest.long()
        law = Law(None if likeliest is None else likeliest.to(device), logs.to(device))
        held = dict(zip(self.target.boundaries, states.to(device), strict=True))
        return Batch(
            tokens.to(device), mask.to(device), law, said.to(device), 1.0, self.vocab, held, self.target.view
        )  # fmt: skip
