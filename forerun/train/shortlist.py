"""Shortlists for draft models that are there: the tokens that texts use most, counted (FR-Spec,
2502.14856)."""

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
from forerun.train.capture import Target
from forerun.train.data import Corpus, Document, read_data
from forerun.train.settings import Training
from forerun.train.synthesis import SHARE, write

SMALLEST, LARGEST, PART = (
    8192,
    32768,
    4,
)  # of a list that nobody gave a size: a quarter of the vocabulary, within these
WHOLE = 1 << 40  # tokens of a text that is counted: all of them


@dataclass(frozen=True, slots=True)
class Listed:
    """What a shortlist holds: `tokens` of a vocabulary of `vocab`, which are the share `covered` of
    `counted` ones."""

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
) -> Listed:
    """Count the tokens of `data`, or of `training.write` texts that the target writes where there
    is none, and write the file `out` with the `size` most frequent ones. Tokens that end a text are
    always among them. To count data takes the target's tokenizer alone: the model is not loaded.

    Raises:
        ForerunError: an option, a model, data or a file that cannot be.
    """
    begun = time.monotonic()
    _check_file(out)
    documents = read_data(data)[0] if data else []
    path = find_model(target)
    config, tokenizer = load_config(path), load_tokenizer(path)
    if tokenizer is None:
        raise ConfigError(f"the target in {path} has no tokenizer: it cannot read texts to count")
    count = min(size or min(max(config.vocab // PART, SMALLEST), LARGEST), config.vocab)
    if not documents:
        documents = _written(target, training, tell)
    tell("counting tokens")
    corpus = Corpus(documents, tokenizer, WHOLE, 1)
    corpus.leave_out(config.vocab)
    counts, ids = corpus.counts(config.vocab), corpus.frequent(config.vocab, count, config.end_ids)
    if not counts.any():
        raise RequestError("there are no tokens to count in the data: give longer texts")
    Shortlist(ids, config.vocab).save(out)
    total = int(counts.sum())
    return Listed(
        len(ids), config.vocab, total, float(counts[ids].sum()) / total, time.monotonic() - begun
    )


def _check_file(out: Path) -> None:
    """Raise ConfigError now for a file that could not be written after minutes."""
    parent = out.absolute().parent
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already: give another file, or remove it")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{out} cannot be written: there is no directory {parent} that can be written to"
        )


def _written(target: str | None, training: Training, tell: Tell) -> list[Document]:
    """What the target writes itself, with all of the time that there is: `write` leaves a share of
    it for training."""
    tell("loading the target")
    everything = replace(training, max_minutes=training.max_minutes / SHARE)
    return write(Target(target, training), everything, tell).read()[0]
