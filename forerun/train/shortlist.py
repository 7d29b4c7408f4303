"""Shortlists for existing draft models: the most frequent tokens of texts (FR-Spec, 2502.14856)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.cli.progress import Tell
from forerun.errors import ConfigError, RequestError
from forerun.load import load_tokenizer
from forerun.models.config import load_config
from forerun.models.hub import find_model
from forerun.models.shortlist import Shortlist
from forerun.train.data import Corpus, read_data
from forerun.train.options import Training
from forerun.train.synthesis import TIME_SHARE, write
from forerun.train.target import Target

# Without a given size a list has a quarter of the vocabulary, within these bounds.
MIN_SIZE, MAX_SIZE, FRACTION = 8192, 32768, 4
UNLIMITED = 1 << 40  # tokens of a text: all of them are counted


@dataclass(frozen=True, slots=True)
class ShortlistSummary:
    """Summary of a shortlist: `tokens` of a vocabulary of `vocab`, which make up the share
    `covered` of `counted` tokens."""

    tokens: int
    vocab: int
    counted: int
    covered: float
    seconds: float


def make_shortlist(
    target: str | None,
    data: Sequence[str],
    size: int | None,
    training: Training,
    out: Path,
    tell: Tell,
) -> ShortlistSummary:
    """Count the tokens of `data`, or of texts that the target writes if there are none, and write
    the `size` most frequent ones to the file `out`. Tokens that end a text are always included. For
    data only the target's tokenizer is loaded.

    Raises:
        ForerunError: an option, a model, data or a file is invalid.
    """
    began = time.monotonic()
    _check_file(out)
    documents = read_data(data)[0] if data else []
    path = find_model(target)
    config, tokenizer = load_config(path), load_tokenizer(path)
    if tokenizer is None:
        raise ConfigError(f"the target in {path} has no tokenizer: it cannot read texts to count")
    default_size = min(max(config.vocab // FRACTION, MIN_SIZE), MAX_SIZE)
    count = min(size or default_size, config.vocab)
    if not documents:
        tell("loading the target")
        # `write` takes a share of the time limit and leaves the rest for training: there is none
        unshared = replace(training, max_minutes=training.max_minutes / TIME_SHARE)
        documents = write(Target(target, training), unshared, tell).read()[0]
    tell("counting tokens")
    corpus = Corpus(documents, tokenizer, UNLIMITED, 1)
    corpus.drop_unknown_tokens(config.vocab)
    counts = corpus.counts(config.vocab)
    if not counts.any():
        raise RequestError("there are no tokens to count in the data: give longer texts")
    ids = corpus.most_frequent(config.vocab, count, config.end_ids)
    Shortlist(ids, config.vocab).save(out)
    total = int(counts.sum())
    covered, seconds = float(counts[ids].sum()) / total, time.monotonic() - began
    return ShortlistSummary(len(ids), config.vocab, total, covered, seconds)


def _check_file(out: Path) -> None:
    """Raise ConfigError now for a file that could not be written after minutes."""
    parent = out.absolute().parent
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already: give another file, or remove it")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{out} cannot be written: there is no directory {parent} that can be written to"
        )
