"""The header of a GGUF file without its strings: what it takes to say what a file is, in milliseconds.

Hundreds of thousands of tokens and merges are most of a header, and most of the time that reading it takes. Here they
are stepped over, and the tokens become one digest, so that vocabularies can be compared.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.errors import LoadError
from forerun.models.gguf.container import Gguf, Reader, mapped
from forerun.models.names import parts_of

TOKENS = "tokenizer.ggml.tokens"
PADDING = re.compile(
    rb"\[PAD\d+\]"
)  # tokens that only fill up the rows of an embedding, which differ between sizes of one family


class _Skimmer(Reader):
    """A reader whose arrays of strings are empty, but for the tokens: those are one string, their digest."""

    def texts(self, count: int, key: str) -> list[str]:
        if count * 8 > self.size - self.at:
            self.fail(f"has {count} strings in {key}, more than fit in it")
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
        except (struct.error, OverflowError):  # a length that leads out of the file
            self.fail(f"ends within {key}")
        if at > self.size:
            self.fail(f"ends within {key}")
        start, self.at = self.at, at
        return [hashlib.sha256(data[start : self.unpadded(start, count)]).hexdigest()] if key == TOKENS else []

    def unpadded(self, start: int, count: int) -> int:
        """Where `count` tokens that begin at `start` and end here end without padding."""
        data, at, length_at, begins = self.data, start, struct.Struct("<Q").unpack_from, []
        if data[self.at - 1 : self.at] != b"]":
            return self.at
        for _ in range(count):
            begins.append(at)
            at += 8 + length_at(data, at)[0]
        while begins and PADDING.fullmatch(data, begins[-1] + 8, at):
            at = begins.pop()
        return at


def skim(path: Path) -> Gguf:
    """What a file and its further parts hold, without strings in arrays. Raises LoadError, also for a missing part."""
    files = [_read(path.with_name(name)) for name in parts_of(path.name)]
    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    return replace(files[0], tensors=tensors, parts=tuple(file.path for file in files))


def _read(path: Path) -> Gguf:
    try:
        with mapped(path) as data:
            return _Skimmer(path, data).file()
    except FileNotFoundError:
        raise LoadError(f"{path} is not here: download it again") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from None


def token_digest(metadata: Any) -> str:
    """A name for the vocabulary of a skimmed file: the same for equal tokens of an equal kind; empty without one."""
    tokens = metadata.get(TOKENS)
    kind = metadata.get("tokenizer.ggml.model", "")
    return f"{kind} {tokens[0]}" if isinstance(tokens, list) and tokens else ""
