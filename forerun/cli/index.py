"""The command `forerun index`: build an index that `--draft retrieval:INDEX` drafts from."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.flags import Json
from forerun.cli.progress import Tell, progress
from forerun.errors import ForerunError, RequestError
from forerun.measure.tables import print_json
from forerun.utils import UnreadableError, text_of

if TYPE_CHECKING:
    from forerun.draft.corpus import IndexedFile
    from forerun.models.tokenizer import Tokenizer


MAX_NAMED = 5  # maximum number of unreadable files listed by name
BATCH_CHARACTERS = 1 << 20  # characters tokenized in one batch


@dataclass(slots=True)
class Indexed:
    """Counters of an indexing run."""

    files: int = 0
    unchanged: int = 0  # already in the index
    unreadable: int = 0  # not UTF-8, or empty
    unreadable_files: list[str] = field(default_factory=list)  # the first of them
    tokens: int = 0
    seconds: float = 0.0
    total: int = 0  # tokens of the whole index


def index(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, directories of them, or .jsonl files of texts or messages."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Directory of the index; an existing index is extended.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Model whose tokenizer is used; the default model if missing."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build an index of texts to draft from, such as code, documents or earlier answers.

    Files that are in the index and have not changed are skipped. --draft retrieval:INDEX copies
    from indexed text wherever it continues the text of a request.
    """
    from forerun.load import load_tokenizer
    from forerun.models.config import load_config
    from forerun.models.hub import find_model

    with progress(as_json) as tell:
        directory = find_model(model)
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise RequestError(f"{directory} has no tokenizer: name a model that has one")
        counts = build(paths, out, tokenizer, load_config(directory).vocab, tell)
    if as_json:
        print_json({"index": str(out), **asdict(counts)})
        return
    print(
        f"{out}: {counts.files} files with {counts.tokens:,} tokens in {counts.seconds:.0f} s,"
        f" {counts.unchanged} unchanged, {counts.unreadable} unreadable;"
        f" {counts.total:,} tokens in all",
        file=sys.stderr,
    )
    if counts.unreadable:
        more = f" and {counts.unreadable - MAX_NAMED} more" if counts.unreadable > MAX_NAMED else ""
        print(
            f"not UTF-8 text, or empty: {', '.join(counts.unreadable_files)}{more}",
            file=sys.stderr,
        )
    print(
        f"next: forerun generate ... {f'--model {model} ' if model else ''}--draft retrieval:{out}"
    )


def build(
    paths: Sequence[Path], out: Path, tokenizer: Tokenizer, vocab: int, tell: Tell
) -> Indexed:
    """Add new and changed files in `paths` to the index `out`.

    Raises:
        ForerunError: the index cannot be written; it is then unchanged.
    """
    from forerun.draft.corpus import LIST, Index, adding, is_left_over
    from forerun.hardware import trim_heap

    began, counts = time.monotonic(), Indexed()
    known: set[IndexedFile] = set()
    if (out / LIST).exists():
        before = Index(out)
        before.check(tokenizer, vocab)
        known, counts.total = before.files, before.count
    elif out.exists() and not (out.is_dir() and is_left_over(out)):
        raise RequestError(f"{out} is there and is no index: give --out another name")
    found = list(_files(paths))
    files = [file for file in found if file not in known]
    counts.unchanged = len(found) - len(files)
    size, done = sum(file.size for file in files), 0
    try:
        with adding(out, tokenizer, vocab) as writer:
            for batch in _batches(files, counts):
                for file, texts in _tokenized(batch, tokenizer, vocab):
                    writer.add(file, texts)
                done += sum(file.size for file, _ in batch)
                rate = writer.count / (time.monotonic() - began)
                tell(
                    f"tokenizing, {done / 1e6:.0f} of {size / 1e6:.0f} MB, {rate:,.0f} tokens/s",
                    done,
                    size,
                )
            counts.files, counts.tokens = len(writer.files), writer.count
            counts.total += writer.count
            trim_heap()
            if writer.count:
                tell(f"sorting {writer.count:,} tokens")
    except OSError as error:
        raise ForerunError(
            f"{out} cannot be written ({error.strerror}): what was there before is as it was"
        ) from None
    counts.seconds = time.monotonic() - began
    return counts


def _files(paths: Sequence[Path]) -> Iterator[IndexedFile]:
    """Yield all files, each once, in order. Raises RequestError for a missing path."""
    from forerun.draft.corpus import IndexedFile
    from forerun.train.data import SUFFIXES

    seen = set()
    for path in paths:
        if not path.exists():
            raise RequestError(f"there is no {path}: give text files or directories of them")
        found = (
            sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if path.is_dir()
            else [path]
        )
        for candidate in found:
            resolved = candidate.resolve()
            hidden = path.is_dir() and any(
                part.startswith(".") for part in candidate.relative_to(path).parts
            )
            if resolved not in seen and resolved.is_file() and not hidden:
                seen.add(resolved)
                status = resolved.stat()
                yield IndexedFile(str(resolved), status.st_size, status.st_mtime_ns)


def _batches(
    files: Sequence[IndexedFile], counts: Indexed
) -> Iterator[list[tuple[IndexedFile, list[str]]]]:
    """Yield batches of files with their texts, sized for tokenizing."""
    batch: list[tuple[IndexedFile, list[str]]] = []
    size = 0
    for file in files:
        texts = _texts(file)
        if not texts:
            counts.unreadable += 1
            if counts.unreadable <= MAX_NAMED:
                counts.unreadable_files.append(file.path)
        else:
            batch.append((file, texts))
            size += sum(map(len, texts))
        if size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _texts(file: IndexedFile) -> list[str]:
    """Return the texts of a file, or an empty list if it is not text.

    Raises:
        RequestError: a line of a .jsonl file is invalid.
    """
    from forerun.train.data import read_line

    try:
        text = text_of(Path(file.path), largest=None)
    except UnreadableError:
        return []
    if "\0" in text or not text.strip():
        return []
    if not file.path.lower().endswith(".jsonl"):
        return [text]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    documents = [read_line(line, f"{file.path}, line {number}") for number, line in lines]
    return [passage.text for document in documents for passage in document.passages if passage.text]


def _tokenized(
    batch: Sequence[tuple[IndexedFile, list[str]]], tokenizer: Tokenizer, vocab: int
) -> Iterator[tuple[IndexedFile, list[list[int]]]]:
    """Yield each file with the token ids of its texts, without ids beyond the vocabulary."""
    ids = iter(tokenizer.encode_all([text for _, texts in batch for text in texts]))
    for file, texts in batch:
        yield file, [[token for token in next(ids) if token < vocab] for _ in texts]
