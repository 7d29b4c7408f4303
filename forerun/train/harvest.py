"""What the target says and thinks of the texts of a run: found once, kept on disk, learnt from several times.

To write a text and to read it again for its laws takes the target longer than the drafter takes to learn from it. So a
text comes back (`Stream.number`), and what was captured of it lies in a file of fixed records beside the checkpoint,
that of text n in place n modulo their number. A record that is missing, of another text or not whole is made again: the
file never decides what a run comes to. Values are rounded to two bytes whether they come from there or not.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.progress import Tell
from forerun.train.capture import Batch, Target
from forerun.train.data import Example
from forerun.train.losses import FULL, Law
from forerun.train.settings import Training
from forerun.train.stream import Stream

HEAD = struct.Struct("<IIqii")  # checksum of all behind it, bytes behind the head, number + 1, tokens, given


@dataclass(frozen=True, slots=True)
class Captured:
    """A text of n tokens with what the target thought of it, where m = n - given of them are learnt.

    Attributes:
        likeliest: int32 [m, k], or None where `logs` are over the whole vocabulary.
        logs: float16 [m, k + 1] or [m, V], as in `Law`.
        said: float32 [m], of each token that is learnt.
        states: bfloat16 [boundaries, n - 1, H]
    """

    example: Example
    likeliest: Tensor | None
    logs: Tensor
    said: Tensor
    states: Tensor

    def to_bytes(self) -> bytes:
        """All of it behind each other."""
        tokens = np.array(self.example.tokens, "<i4").tobytes()
        likeliest = b"" if self.likeliest is None else self.likeliest.numpy().tobytes()
        states = self.states.view(torch.int16).numpy().tobytes()
        return b"".join((tokens, likeliest, self.logs.numpy().tobytes(), self.said.numpy().tobytes(), states))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a record holds of each token."""

    likeliest: int  # 0 where laws are whole
    logs: int
    boundaries: int
    hidden: int

    def size(self, tokens: int, learnt: int) -> int:
        """Bytes behind the head of a record."""
        return 4 * tokens + learnt * (4 * self.likeliest + 2 * self.logs + 4) + 2 * self._states(tokens)

    def _states(self, tokens: int) -> int:
        return self.boundaries * (tokens - 1) * self.hidden

    def read(self, content: bytes, count: int, given: int) -> Captured:
        """The opposite of `Captured.to_bytes`."""
        learnt, at = count - given, 0

        def take(kind: str, size: int) -> Tensor:
            nonlocal at
            values = np.frombuffer(content, kind, size, at).copy()
            at += values.nbytes
            return torch.from_numpy(values)

        tokens = tuple(take("<i4", count).tolist())
        likeliest = take("<i4", learnt * self.likeliest).view(learnt, -1) if self.likeliest else None
        logs = take("<f2", learnt * self.logs).view(learnt, self.logs)
        said = take("<f4", learnt)
        states = take("<i2", self._states(count)).view(torch.bfloat16).view(self.boundaries, count - 1, self.hidden)
        return Captured(Example(tokens, given), likeliest, logs, said, states)


class Harvest:
    """Batches for the steps of a run."""

    def __init__(self, target: Target, stream: Stream, vocab: int, settings: Training, path: Path, tell: Tell) -> None:
        """Laws are over the first `vocab` tokens. `path` is the file's."""
        self.target, self.stream, self.vocab, self.path, self.tell = target, stream, vocab, path, tell
        whole = vocab <= FULL or settings.top >= vocab
        likeliest, logs = (0, vocab) if whole else (settings.top, settings.top + 1)
        states = len(target.boundaries)
        self.shape = Shape(likeliest, logs, states, target.llm.decoder.config.hidden if states else 0)
        self.slot = HEAD.size + self.shape.size(settings.tokens, settings.tokens - 1)
        self.places = stream.window = max(int(settings.keep_gb * 1e9) // self.slot, 1)
        self._file: int | None = None
        self._keeps = settings.reuse > 1  # else nothing comes back

    def open(self, keep: bool) -> None:
        """Begin; with `keep`, what is in the file is of this run."""
        if not self._keeps:
            return
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC), 0o600)
        except OSError as error:
            self._give_up(error)

    def close(self, remove: bool) -> None:
        """End; with `remove`, nothing is left."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if remove:
            self.path.unlink(missing_ok=True)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The texts of these numbers, with what the target thought of them."""
        found = {number: self._read(number) for number in dict.fromkeys(numbers)}
        missing = [number for number, captured in found.items() if captured is None]
        if missing:
            examples = [self.stream.text(number) for number in missing]
            taken = apart(self.target.batch(examples, vocab=self.vocab), examples, self.target.boundaries)
            for number, captured in zip(missing, taken, strict=True):
                found[number] = captured
                self._write(number, captured)
        return self._together([found[number] for number in numbers])  # type: ignore[misc]

    def _read(self, number: int) -> Captured | None:
        if self._file is None:
            return None
        at = number % self.places * self.slot
        try:
            checksum, size, held, tokens, given = HEAD.unpack(head := os.pread(self._file, HEAD.size, at))
            content = os.pread(self._file, size, at + HEAD.size) if held == number + 1 else b""
        except (OSError, struct.error):  # behind its end
            return None
        if held != number + 1 or zlib.crc32(head[4:] + content) != checksum:  # a hole in a file reads as zeros
            return None
        return self.shape.read(content, tokens, given)

    def _write(self, number: int, captured: Captured) -> None:
        if self._file is None or not self._keeps:
            return
        content, example = captured.to_bytes(), captured.example
        record = HEAD.pack(0, len(content), number + 1, len(example.tokens), example.given)[4:] + content
        try:
            os.pwrite(self._file, struct.pack("<I", zlib.crc32(record)) + record, number % self.places * self.slot)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._keeps = False
        self.tell.note(f"what the target says is not kept from now on ({error.strerror}): the run takes longer")

    def _together(self, texts: Sequence[Captured]) -> Batch:
        width, device = max(len(text.example.tokens) for text in texts), self.target.device
        tokens = torch.zeros((len(texts), width), dtype=torch.int64)
        mask = torch.zeros((len(texts), width - 1), dtype=torch.bool)
        first = texts[0]
        likeliest = None if first.likeliest is None else tokens.new_zeros((*mask.shape, self.shape.likeliest))
        logs, said = torch.zeros((*mask.shape, self.shape.logs)), torch.zeros(mask.shape)
        states = torch.zeros((self.shape.boundaries, *mask.shape, self.shape.hidden))
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


def apart(batch: Batch, examples: Sequence[Example], boundaries: Sequence[int]) -> list[Captured]:
    """A batch text by text, rounded as it is kept."""
    taken = []
    for i, example in enumerate(examples):
        counts, read = slice(example.given - 1, len(example.tokens) - 1), len(example.tokens) - 1
        law, states = batch.law, [batch.states[boundary][i, :read] for boundary in boundaries]
        taken.append(
            Captured(
                example,
                None if law.tokens is None else law.tokens[i, counts].int().cpu(),
                law.logs[i, counts].half().cpu(),
                batch.said[i, counts].float().cpu(),
                (torch.stack(states) if states else batch.said.new_zeros(0, read, 0)).bfloat16().cpu(),
            )
        )
    return taken
