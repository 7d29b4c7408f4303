"""What is kept of a text that the target has read or written, and the files of fixed records that
keep it.

A record that is missing, of another text or not whole reads as None: a file never decides what a
run comes to."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.cli.progress import Tell
from forerun.train.data import Example
from forerun.train.losses import FULL

HEAD = struct.Struct(
    "<IIqii"
)  # checksum of all behind it, bytes behind the head, number + 1, tokens, given


@dataclass(frozen=True, slots=True)
class Captured:
    """A text of n tokens with what the target thought of it, where m = n - given of them are
    learnt: in these dtypes where it is kept, more precise where it has just been read.

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
        return b"".join(
            (tokens, likeliest, self.logs.numpy().tobytes(), self.said.numpy().tobytes(), states)
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What a record holds of each token."""

    likeliest: int  # 0 where laws are whole
    logs: int
    aux_hidden_layers: int
    hidden: int

    @classmethod
    def of(cls, vocab: int, aux_hidden_layers: int, hidden: int, top: int) -> Shape:
        """Of laws over the first `vocab` tokens, and states of `hidden` numbers at so many
        boundaries."""
        whole = vocab <= FULL or top >= vocab
        return cls(
            0 if whole else top,
            vocab if whole else top + 1,
            aux_hidden_layers,
            hidden if aux_hidden_layers else 0,
        )

    def size(self, tokens: int, learnt: int) -> int:
        """Bytes behind the head of a record."""
        return (
            4 * tokens
            + learnt * (4 * self.likeliest + 2 * self.logs + 4)
            + 2 * self._states(tokens)
        )

    def _states(self, tokens: int) -> int:
        return self.aux_hidden_layers * (tokens - 1) * self.hidden

    def read(self, content: bytes, count: int, given: int) -> Captured:
        """The opposite of `Captured.to_bytes`."""
        learnt, at = count - given, 0

        def take(kind: str, size: int) -> Tensor:
            nonlocal at
            values = np.frombuffer(content, kind, size, at).copy()
            at += values.nbytes
            return torch.from_numpy(values)

        tokens = tuple(take("<i4", count).tolist())
        likeliest = (
            take("<i4", learnt * self.likeliest).view(learnt, -1) if self.likeliest else None
        )
        logs = take("<f2", learnt * self.logs).view(learnt, self.logs)
        said = take("<f4", learnt)
        states = (
            take("<i2", self._states(count))
            .view(torch.bfloat16)
            .view(self.aux_hidden_layers, count - 1, self.hidden)
        )
        return Captured(Example(tokens, given), likeliest, logs, said, states)


class Records:
    """A file of records: text n is in place n modulo `places`, of which there are as many as
    `gigabytes` hold."""

    def __init__(self, path: Path, shape: Shape, tokens: int, gigabytes: float, tell: Tell) -> None:
        """Texts have up to `tokens` tokens."""
        self.path, self.shape, self.tell = path, shape, tell
        self.slot = HEAD.size + shape.size(tokens, tokens - 1)
        self.places = max(int(gigabytes * 1e9) // self.slot, 1)
        self._file: int | None = None
        self._keeps = True

    def open(self, keep: bool) -> None:
        """Begin; with `keep`, what is in the file is of this run."""
        try:
            self._file = os.open(
                self.path, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC), 0o600
            )
        except OSError as error:
            self._give_up(error)

    def close(self, remove: bool) -> None:
        """End; with `remove`, nothing is left."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if remove:
            self.path.unlink(missing_ok=True)

    def read(self, number: int) -> Captured | None:
        """What was written of the text of this number, if it is there."""
        if self._file is None:
            return None
        at = number % self.places * self.slot
        try:
            checksum, size, held, tokens, given = HEAD.unpack(
                head := os.pread(self._file, HEAD.size, at)
            )
            content = os.pread(self._file, size, at + HEAD.size) if held == number + 1 else b""
        except (OSError, struct.error):  # behind its end
            return None
        if (
            held != number + 1 or zlib.crc32(head[4:] + content) != checksum
        ):  # a hole in a file reads as zeros
            return None
        return self.shape.read(content, tokens, given)

    def write(self, number: int, captured: Captured) -> None:
        """Keep it, in place of what was there. A full disk is told once, and then nothing more is
        kept."""
        if self._file is None or not self._keeps:
            return
        content, example = captured.to_bytes(), captured.example
        record = (
            HEAD.pack(0, len(content), number + 1, len(example.tokens), example.given)[4:] + content
        )
        try:
            os.pwrite(
                self._file,
                struct.pack("<I", zlib.crc32(record)) + record,
                number % self.places * self.slot,
            )
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._keeps = False
        self.tell.note(
            f"what the target says is not kept from now on ({error.strerror}): the run takes longer"
        )


class Kept(Records):
    """What was captured of texts that the target wrote by itself, as many as there are places
    for."""

    def open(self, keep: bool) -> None:
        super().open(keep)
        self._numbers: dict[Example, int] = {}
        while (captured := self.read(len(self._numbers))) and captured.example not in self._numbers:
            self._numbers[captured.example] = len(self._numbers)

    def add(self, captured: Captured) -> None:
        """Keep what is new, while there are places."""
        if captured.example not in self._numbers and len(self._numbers) < self.places:
            self.write(len(self._numbers), captured)
            self._numbers[captured.example] = len(self._numbers)

    def find(self, text: Example) -> Captured | None:
        """What was captured of it, if it is there."""
        number = self._numbers.get(text)
        return None if number is None else self.read(number)
