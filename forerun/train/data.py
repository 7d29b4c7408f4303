"""What is learnt from: files to documents, documents to texts of tokens, in an order that follows
from the seed.

Documents are told apart by the hash of what they say: the same text is taken once, and whether a
document is held out depends on its own hash alone, so no part of a held-out document is ever
trained on, whatever else is in the data."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng
from torch import Tensor

from forerun.errors import RequestError
from forerun.models.tokenizer import Message, Tokenizer
from forerun.train.settings import FEWEST_TOKENS
from forerun.utils import UnreadableError, text_of

LIBRARY = "library"
# what is read of a directory; a file that is named is read whatever it is called
SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".jsonl", ".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".swift", ".rb", ".php", ".lua", ".jl", ".r", ".ml", ".hs",
    ".sh", ".sql", ".html", ".css",
)  # fmt: skip
NOT_OF_THE_LIBRARY = (
    "site-packages/",
    "test/",
    "idlelib/",
    "lib2to3/",
    "pydoc_data/",
    "encodings/",
    "config-",
)
LARGEST_COUNT = (1 << 63) - 1
WHAT_IS_DATA = "give text files, directories of source, .jsonl of prompts, texts or messages, or the word library"


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and what follows it. Plain text has no prompt; a prompt alone is there to be
    continued."""

    prompt: str | tuple[Message, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """Something that was read: where, the hash of what it says, its passages."""

    name: str
    digest: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens to learn from. The first `given` (at least 1) are context: what is learnt is the
    tokens behind them."""

    tokens: tuple[int, ...]
    given: int


@dataclass(frozen=True, slots=True)
class Source:
    """What became of one path of the data, for the card."""

    name: str
    documents: int
    repeated: int  # the same text was there before
    unreadable: int  # of a directory: not UTF-8, or empty


def read_data(names: Sequence[str]) -> tuple[list[Document], list[Source]]:
    """The documents of all paths, each text once. Raises RequestError for a path without anything
    to learn from."""
    documents: dict[str, Document] = {}
    sources = []
    for name in names:
        found = repeated = unreadable = 0
        for document in _documents(name):
            if document is None:
                unreadable += 1
            elif document.digest in documents:
                repeated += 1
            else:
                documents[document.digest], found = document, found + 1
        if not found and not repeated:
            raise RequestError(f"there is no text in {name}: {WHAT_IS_DATA}")
        sources.append(Source(name, found, repeated, unreadable))
    return list(documents.values()), sources


def split(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """(to train on, held out): those whose hash is in the lowest `share` of all hashes, at least
    one.

    Raises RequestError for a single document, since one has to be held out.
    """
    if len(documents) < 2:
        raise RequestError(
            f"there is one document only, {documents[0].name}: give two or more, one is held out"
        )
    ordered = sorted(documents, key=lambda document: document.digest)
    count = sum(int(document.digest[:8], 16) < share * (1 << 32) for document in ordered)
    count = min(max(count, 1), len(ordered) - 1)
    return ordered[count:], ordered[:count]


def digest_of(documents: Sequence[Document]) -> str:
    """A hash of all documents, whatever their order."""
    return hashlib.sha256(
        "".join(sorted(document.digest for document in documents)).encode()
    ).hexdigest()


class Corpus:
    """Documents as tokens. `examples` are what the data say, `prompts` what the target may
    continue."""

    def __init__(
        self, documents: Sequence[Document], tokenizer: Tokenizer, tokens: int, prompt_tokens: int
    ) -> None:
        """Texts are cut to windows of `tokens`; the first `prompt_tokens` of each window are a
        prompt."""
        self.examples: list[Example] = []
        self.prompts: list[tuple[int, ...]] = []
        self.too_long = 0  # passages whose prompt leaves no room
        self._tokenizer = tokenizer
        for document in documents:
            for passage in document.passages:
                if passage.prompt:
                    self._answer(passage, tokens)
                else:
                    self._windows(tokenizer.encode(passage.text), tokens, prompt_tokens)

    def leave_out(self, vocab: int) -> int:
        """Leave out texts with tokens from `vocab` on, which some tokenizers have and their models
        lack; how many."""
        before = len(self.examples) + len(self.prompts)
        self.examples = [example for example in self.examples if max(example.tokens) < vocab]
        self.prompts = [prompt for prompt in self.prompts if max(prompt) < vocab]
        return before - len(self.examples) - len(self.prompts)

    def counts(self, vocab: int) -> Tensor:
        """How often each token stands where it is learnt, or in prompts if there is nothing else.
        int64 [vocab]"""
        texts = [example.tokens[example.given :] for example in self.examples] or self.prompts
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return torch.bincount(tokens, minlength=vocab)[:vocab]

    def frequent(self, vocab: int, count: int, ends: Sequence[int]) -> Tensor:
        """The `count` tokens of `vocab` that stand there most often, ascending, and before all
        others those that end a text, which data do not show. int64 [count]"""
        counts = self.counts(vocab)
        counts[[end for end in ends if end < vocab]] = LARGEST_COUNT
        return counts.argsort(descending=True, stable=True)[:count].sort().values

    def _windows(self, ids: list[int], tokens: int, prompt_tokens: int) -> None:
        for at in range(0, len(ids), tokens):
            window = tuple(ids[at : at + tokens])
            if len(window) >= FEWEST_TOKENS:
                self.examples.append(Example(window, 1))
            if len(window) > prompt_tokens:
                self.prompts.append(window[:prompt_tokens])

    def _answer(self, passage: Passage, tokens: int) -> None:
        prompt, tokenizer = passage.prompt, self._tokenizer
        ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt))
        if not ids or len(ids) > tokens - FEWEST_TOKENS:
            self.too_long += 1
            return
        self.prompts.append(ids)
        answer = tokenizer.encode(passage.text, special=False) if passage.text else ()
        if answer:
            self.examples.append(Example((*ids, *answer, *self._end)[:tokens], len(ids)))

    @cached_property
    def _end(self) -> tuple[int, ...]:
        """The special token that ends an answer in the target's template, where there is one."""
        tokenizer, asked = self._tokenizer, {"role": "user", "content": "x"}
        try:
            one, other = (
                tokenizer.chat([asked, {"role": "assistant", "content": said}])
                for said in ("7", "x")
            )
        except RequestError:
            return ()
        for token in in_common(one[::-1], other[::-1])[::-1]:
            if token in tokenizer.special:
                return (token,)
            if tokenizer.spell(token).strip():
                break
        return ()


def in_common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The beginning that both have."""
    count = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return list(one[:count])


class Order:
    """Numbers below `count` without end, each once before any comes again; the nth follows from the
    seed and n."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._shuffled = -1, np.zeros(0, dtype=np.int64)

    def __getitem__(self, n: int) -> int:
        epoch, at = divmod(n, self.count)
        if epoch != self._epoch:
            self._epoch, self._shuffled = (
                epoch,
                default_rng([self.seed, epoch]).permutation(self.count),
            )
        return int(self._shuffled[at])


def _documents(name: str) -> Iterator[Document | None]:
    """The documents of one path; None for a file of a directory that cannot be read or is empty."""
    if name == LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [
            p
            for p in sorted(root.rglob("*.py"))
            if not _is_left_out(p.relative_to(root).as_posix())
        ]
        yield from _of_directory(root, paths)
        return
    path = Path(name).expanduser()
    if path.is_dir():
        paths = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES and p.is_file()]
        yield from _of_directory(path, [p for p in paths if not _is_hidden(p.relative_to(path))])
        return
    try:
        text = text_of(path, largest=None)
    except UnreadableError as error:
        raise RequestError(f"the data in {name} cannot be read ({error}): {WHAT_IS_DATA}") from None
    if "\0" in text:
        raise RequestError(
            f"the data in {name} cannot be read (it is not UTF-8 text): {WHAT_IS_DATA}"
        )
    yield from _of_text(path, text, name)


def _of_directory(root: Path, paths: Sequence[Path]) -> Iterator[Document | None]:
    for path in paths:
        try:
            text = text_of(path, largest=None)
        except UnreadableError:
            text = ""
        if not text.strip() or "\0" in text:
            yield None
        else:
            yield from _of_text(path, text, path.relative_to(root).as_posix())


def _of_text(path: Path, text: str, name: str) -> Iterator[Document]:
    if path.suffix.lower() == ".jsonl":
        for number, line in enumerate(
            text.split("\n"), 1
        ):  # not splitlines: a JSON string may hold a U+2028
            if line.strip():
                yield read_line(line, f"{name}, line {number}")
    elif text.strip():
        yield _document(name, (Passage("", text),))


def _document(name: str, passages: tuple[Passage, ...]) -> Document:
    said = json.dumps([[passage.prompt, passage.text] for passage in passages], ensure_ascii=True)
    return Document(name, hashlib.sha256(said.encode()).hexdigest(), passages)


def read_line(line: str, where: str) -> Document:
    """A line of a .jsonl file. Raises RequestError that names the place."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can spell what is no character
        raise RequestError(
            f"{where}: it has half of a character (a lone surrogate): no tokenizer reads that"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{where}: this is not JSON ({error}); each line is one object"
        ) from None
    kinds = (
        [key for key in ("prompt", "text", "messages") if key in value]
        if isinstance(value, dict)
        else []
    )
    if len(kinds) != 1:
        raise RequestError(
            f"{where}: give an object with one of prompt, text and messages on each line"
        )
    said = value[kinds[0]]
    if kinds[0] == "messages":
        return _document(where, _turns(said, where))
    if not isinstance(said, str) or not said.strip():
        raise RequestError(f"{where}: {kinds[0]} must be a text that says something")
    return _document(where, (Passage(said, "") if kinds[0] == "prompt" else Passage("", said),))


def _turns(messages: Any, where: str) -> tuple[Passage, ...]:
    """Each answer of a conversation with all that stands before it, and a question at the end
    without one."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"{where}: messages must be a list with a message or more")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise RequestError(f"{where}: each message needs a role and a content, both text")
    passages = [
        Passage(tuple(messages[:i]), message["content"])
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and i
    ]
    if messages[-1]["role"] != "assistant":
        passages.append(Passage(tuple(messages), ""))
    if not passages:
        raise RequestError(
            f"{where}: no message comes before the assistant's: there is nothing to continue"
        )
    return tuple(passages)


def _is_left_out(name: str) -> bool:
    return name.startswith(NOT_OF_THE_LIBRARY) or "/test" in name


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
