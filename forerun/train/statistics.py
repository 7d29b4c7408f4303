"""Statistics of texts that drafters use, made without training.

Tables for `recycle` hold the target's distributions along texts that it writes. Shortlists of
existing draft models hold the most frequent tokens of texts (FR-Spec, 2502.14856).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from forerun.cli.progress import Tell
from forerun.draft.recycle import TABLE, SuccessorTable, predecessors
from forerun.draft.suffix import Suffix
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.load import load_tokenizer
from forerun.models.config import load_config
from forerun.models.hub import find_model
from forerun.models.shortlist import Shortlist
from forerun.sampling.params import SamplingParams
from forerun.train.data import Corpus, read_data
from forerun.train.export import check_out
from forerun.train.options import Training
from forerun.train.stream import seed_of
from forerun.train.synthesis import GROUP, TIME_SHARE, write
from forerun.train.target import Target
from forerun.types import Draft
from forerun.utils import atomic_directory

MAX_ENTRIES = 1 << 18  # of the table while it is made
# Without a given size a shortlist has a quarter of the vocabulary, within these bounds.
MIN_SIZE, MAX_SIZE, FRACTION = 8192, 32768, 4
UNLIMITED = 1 << 40  # tokens of a text: all of them are counted


@dataclass(frozen=True, slots=True)
class TableSummary:
    """Summary of a table: `entries` (distributions after one or two tokens), made from
    `positions` of `texts`."""

    entries: int
    positions: int
    texts: int
    seconds: float


class TableBuilder(Suffix):
    """A proposer that drafts as `suffix` does and collects the target's distributions."""

    wants_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.table = SuccessorTable(MAX_ENTRIES)
        self.positions = 0

    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        self.table.learn(predecessors(tokens, draft), draft.tokens, logits)
        self.positions += len(draft)


def make_table(
    target: str | None, data: Sequence[str], training: Training, out: Path, tell: Tell
) -> TableSummary:
    """Let the target continue the prompts of `data` and write texts of its own, and write the
    table to the directory `out`.

    Raises:
        ForerunError: an option, a model, data or a directory is invalid.
    """
    began = time.monotonic()
    check_out(out)
    documents = read_data(data)[0] if data else []
    training = replace(training, write=training.num_texts(bool(documents)))
    tell("loading the target")
    model, builder, texts = Target(target, training), TableBuilder(), 0
    model.llm.engine.proposers["suffix"] = builder
    if documents:
        corpus = Corpus(documents, model.tokenizer, training.tokens, training.prompt_tokens)
        texts = _continue_prompts(corpus, model, training, tell)
    if training.write:
        # `write` takes a share of the time limit and leaves the rest for training: there is none
        training = replace(training, max_minutes=training.max_minutes / TIME_SHARE)
        texts += len(write(model, training, tell).lines)
    seconds = time.monotonic() - began
    summary = TableSummary(len(builder.table), builder.positions, texts, seconds)
    about = {"kind": "recycle", "target": target, "data": list(data), **asdict(summary)}
    try:
        with atomic_directory(out) as work:
            builder.table.save(work / TABLE, model.vocab)
            (work / TABLE).chmod(0o644)
            text = json.dumps(about, indent=1) + "\n"
            (work / "training.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ForerunError(f"{out} cannot be written: {error.strerror}") from None
    return summary


def _continue_prompts(corpus: Corpus, target: Target, training: Training, tell: Tell) -> int:
    """Continue all prompts, or as many as the time limit allows, and return their number."""
    until = time.monotonic() + 60 * training.max_minutes
    count = len(corpus.prompts)
    for at in range(0, count, GROUP):
        tell(f"the target continues texts, {at} of {count}", at, count)
        group = corpus.prompts[at : at + GROUP]
        params = [
            SamplingParams(
                temperature=training.temperature,
                max_tokens=training.tokens - len(prompt),
                seed=seed_of(training.seed, number),
            )
            for number, prompt in enumerate(group, at)
        ]
        target.generate(group, params)
        if training.max_minutes and time.monotonic() > until:
            return at + len(group)
    return count


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
