"""A list of texts as a file holds it: hundreds of thousands of tokens and merges in a few megabytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Strings:
    """Texts that are decoded when they are read: as Python strings they would take ten times the memory, for good.

    `data` are the bytes of all texts, each behind the eight that say its length; `ends` int64 [N] where each ends.
    """

    def __init__(self, data: bytes, ends: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = int(self._ends[index - 1]) if index else 0
        return self._data[start + 8 : int(self._ends[index])].decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        data, start = self._data, 0
        for end in self._ends.tolist():
            yield data[start + 8 : end].decode(errors="replace")
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | Strings) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def head(self, count: int) -> bytes:
        """The bytes of the first `count` texts, lengths included."""
        return self._data[: int(self._ends[count - 1]) if count else 0]
