"""Training data: files become documents, documents become token windows and prompts.

Documents are identified by the hash of their content: the same text is used once, and whether a
document is held out depends on its own hash alone, so no part of a held-out document is trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
import zlib
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
from forerun.measure.medians import first_difference
from forerun.models.tokenizer import BROKEN, Message, Tokenizer
from forerun.train.options import MIN_TOKENS
from forerun.utils import UnreadableError, text_of

LIBRARY = "library"
# suffixes read from a directory; a file that is named explicitly is read whatever its suffix
SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".jsonl", ".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".c",
    ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".swift", ".rb",
    ".php", ".lua", ".jl", ".r", ".ml", ".hs", ".sh", ".sql", ".html", ".css",
)  # fmt: skip
EXCLUDED_FROM_LIBRARY = (
    "site-packages/",
    "test/",
    "idlelib/",
    "lib2to3/",
    "pydoc_data/",
    "encodings/",
    "config-",
)
MAX_COUNT = (1 << 63) - 1
USAGE = "give text files, directories of source, .jsonl files, or the word library"


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and its continuation. Plain text has an empty prompt; a prompt without text is
    there to be continued by the target."""

    prompt: str | tuple[Message, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """One text that was read: its name, the hash of its content, and its passages."""

    name: str
    digest: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of one training text. The first `prompt_length` (at least 1) are context; the
    tokens after them are learned."""

    tokens: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class DataSource:
    """Counts of one path of the data, for the report.

    Attributes:
        documents: documents that are used.
        repeated: documents whose text was seen before.
        unreadable: files of a directory that are empty or not UTF-8.
    """

    name: str
    documents: int
    repeated: int
    unreadable: int


def read_data(names: Sequence[str]) -> tuple[list[Document], list[DataSource]]:
    """Read the documents of all paths, each text once. Raises RequestError for a path that
    contains no text."""
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
                documents[document.digest] = document
                found += 1
        if not found and not repeated:
            raise RequestError(f"there is no text in {name}: {USAGE}")
        sources.append(DataSource(name, found, repeated, unreadable))
    return list(documents.values()), sources


def split(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split into (training, held-out) documents: held out are those whose hash lies in the lowest
    `share` of all hashes, at least one.

    Raises:
        RequestError: there is a single document, and one has to be held out.
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
    """Return a hash of all documents that does not depend on their order."""
    digests = "".join(sorted(document.digest for document in documents))
    return hashlib.sha256(digests.encode()).hexdigest()


class Corpus:
    """Documents as token ids.

    Attributes:
        examples: texts to learn from.
        prompts: token ids that the target may continue.
        too_long: number of passages whose prompt leaves no room for an answer.
    """

    def __init__(
        self, documents: Sequence[Document], tokenizer: Tokenizer, tokens: int, prompt_tokens: int
    ) -> None:
        """Cut texts into windows of `tokens`; the first `prompt_tokens` of a window are a
        prompt."""
        self.examples: list[Example] = []
        self.prompts: list[tuple[int, ...]] = []
        self.too_long = 0
        self._tokenizer = tokenizer
        for document in documents:
            for passage in document.passages:
                if passage.prompt:
                    self._add_answer(passage, tokens)
                else:
                    self._add_windows(tokenizer.encode(passage.text), tokens, prompt_tokens)

    def drop_unknown_tokens(self, vocab: int) -> int:
        """Drop texts with token ids from `vocab` up, which some tokenizers have and their models
        lack. Returns the number of dropped texts."""
        before = len(self.examples) + len(self.prompts)
        self.examples = [example for example in self.examples if max(example.tokens) < vocab]
        self.prompts = [prompt for prompt in self.prompts if max(prompt) < vocab]
        return before - len(self.examples) - len(self.prompts)

    def counts(self, vocab: int) -> Tensor:
        """Count each token among the learned tokens, or in the prompts if there are no texts.
        int64 [vocab]"""
        texts = [example.tokens[example.prompt_length :] for example in self.examples]
        texts = texts or self.prompts
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return torch.bincount(tokens, minlength=vocab)[:vocab]

    def most_frequent(self, vocab: int, count: int, end_ids: Sequence[int]) -> Tensor:
        """Return the `count` most frequent tokens in ascending order. Tokens that end a text come
        first, since the data do not contain them. int64 [count]"""
        counts = self.counts(vocab)
        counts[[end for end in end_ids if end < vocab]] = MAX_COUNT
        return counts.argsort(descending=True, stable=True)[:count].sort().values

    def _add_windows(self, ids: list[int], tokens: int, prompt_tokens: int) -> None:
        for start in range(0, len(ids), tokens):
            window = tuple(ids[start : start + tokens])
            if len(window) >= MIN_TOKENS:
                self.examples.append(Example(window, 1))
            if len(window) > prompt_tokens:
                self.prompts.append(window[:prompt_tokens])

    def _add_answer(self, passage: Passage, tokens: int) -> None:
        prompt, tokenizer = passage.prompt, self._tokenizer
        ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt))
        if not ids or len(ids) > tokens - MIN_TOKENS:
            self.too_long += 1
            return
        self.prompts.append(ids)
        answer = tokenizer.encode(passage.text, special=False) if passage.text else ()
        if answer:
            self.examples.append(Example((*ids, *answer, *self._answer_end)[:tokens], len(ids)))

    @cached_property
    def _answer_end(self) -> tuple[int, ...]:
        """The special token that ends an answer in the chat template, if there is one."""
        tokenizer, question = self._tokenizer, {"role": "user", "content": "x"}
        try:
            first, second = (
                tokenizer.chat([question, {"role": "assistant", "content": answer}])
                for answer in ("7", "x")
            )
        except RequestError:
            return ()
        for token in common_prefix(first[::-1], second[::-1])[::-1]:
            if token in tokenizer.special:
                return (token,)
            if tokenizer.spell(token).strip():
                break
        return ()


def common_prefix(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the longest common prefix of two sequences."""
    return list(first[: first_difference(first, second)])


class EpochOrder:
    """An endless order of the numbers below `count`: every epoch is a permutation. Entry n follows
    from the seed and n."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def __getitem__(self, n: int) -> int:
        epoch, position = divmod(n, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = default_rng([self.seed, epoch]).permutation(self.count)
        return int(self._order[position])


# a script without spaces is counted by its characters
WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


@dataclass(frozen=True, slots=True)
class FilterLimits:
    """Thresholds of `TextFilter`.

    Attributes:
        min_words: words that a question or beginning needs.
        max_known: largest share of its 5-grams that earlier beginnings contain.
        max_repeated: largest share of repeated 4-grams within a text.
        max_compression: largest factor by which deflate may shrink a text.
    """

    min_words: int = 3
    max_known: float = 0.5
    max_repeated: float = 0.4
    max_compression: float = 5.0


class TextFilter:
    """Reject generated texts that are empty, broken, repetitive, or nearly duplicates."""

    def __init__(self, limits: FilterLimits) -> None:
        self.limits = limits
        self._known: set[tuple[str, ...]] = set()

    def fault(self, text: str) -> str:
        """Return why a text is rejected ("empty", "broken" or "looping"), or ""."""
        if not text.strip():
            return "empty"
        if BROKEN in text:
            return "broken"
        grams, raw = _ngrams(_words(text), 4), text.encode()
        repeated = 1 - len(set(grams)) / len(grams)
        compression = len(raw) / len(zlib.compress(raw, 9))
        if repeated > self.limits.max_repeated or compression > self.limits.max_compression:
            return "looping"
        return ""

    def fault_of_beginning(self, text: str) -> str:
        """Do the same for a question or the beginning of a text ("short" and "repeated" are
        further reasons), and remember it if it is accepted."""
        words = _words(text)
        if len(words) < self.limits.min_words:
            return "short"
        if fault := self.fault(text):
            return fault
        grams = _ngrams(words, 5)
        if sum(gram in self._known for gram in grams) > self.limits.max_known * len(grams):
            return "repeated"
        self._known.update(grams)
        return ""


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n words; the whole text if it is shorter."""
    return [tuple(words[at : at + n]) for at in range(max(len(words) - n + 1, 1))]


def _documents(name: str) -> Iterator[Document | None]:
    """Yield the documents of one path; None for a file of a directory that is unreadable or
    empty."""
    if name == LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from _directory(root, [p for p in root.rglob("*.py") if _in_library(root, p)])
        return
    path = Path(name).expanduser()
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()]
        yield from _directory(path, [p for p in found if not _is_hidden(p.relative_to(path))])
        return
    try:
        text = text_of(path, largest=None)
    except UnreadableError as error:
        raise RequestError(f"the data in {name} cannot be read ({error}): {USAGE}") from None
    if "\0" in text:
        raise RequestError(f"the data in {name} cannot be read (it is not UTF-8 text): {USAGE}")
    yield from _file(path, text, name)


def _directory(root: Path, paths: Sequence[Path]) -> Iterator[Document | None]:
    for path in sorted(paths):
        try:
            text = text_of(path, largest=None)
        except UnreadableError:
            text = ""
        if not text.strip() or "\0" in text:
            yield None
        else:
            yield from _file(path, text, path.relative_to(root).as_posix())


def _file(path: Path, text: str, name: str) -> Iterator[Document]:
    if path.suffix.lower() == ".jsonl":
        # not splitlines: a JSON string may contain U+2028
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield read_line(line, f"{name}, line {number}")
    elif text.strip():
        yield _document(name, (Passage("", text),))


def _document(name: str, passages: tuple[Passage, ...]) -> Document:
    content = json.dumps([[passage.prompt, passage.text] for passage in passages])
    return Document(name, hashlib.sha256(content.encode()).hexdigest(), passages)


def read_line(line: str, where: str) -> Document:
    """Parse a line of a .jsonl file. Raises RequestError that names the place."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can spell a lone surrogate, which no tokenizer reads
        raise RequestError(
            f"{where}: it contains half of a character (a lone surrogate), which cannot be encoded"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{where}: this is not JSON ({error}); each line is one object"
        ) from None
    keys = [k for k in ("prompt", "text", "messages") if isinstance(value, dict) and k in value]
    if len(keys) != 1:
        raise RequestError(
            f"{where}: give an object with one of prompt, text and messages on each line"
        )
    content = value[keys[0]]
    if keys[0] == "messages":
        return _document(where, _turns(content, where))
    if not isinstance(content, str) or not content.strip():
        raise RequestError(f"{where}: {keys[0]} must be a text that is not empty")
    passage = Passage(content, "") if keys[0] == "prompt" else Passage("", content)
    return _document(where, (passage,))


def _turns(messages: Any, where: str) -> tuple[Passage, ...]:
    """Return each answer of a conversation with everything before it, and a last question without
    an answer."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"{where}: messages must be a list of at least one message")
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


def _in_library(root: Path, path: Path) -> bool:
    name = path.relative_to(root).as_posix()
    return not name.startswith(EXCLUDED_FROM_LIBRARY) and "/test" not in name


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
