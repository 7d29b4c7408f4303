"""What `forerun train` does, for callers in Python: a training run, from names to a directory, and
statistics of texts, which need no training.

A run is set up from a `TrainingPlan` of plain values. Its checkpoint holds them too, so a resumed
run needs nothing else. Tables for `recycle` hold the target's distributions along texts that it
writes. Shortlists of existing draft models hold the most frequent tokens of texts (FR-Spec,
2502.14856).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.catalog.facts import license_of
from forerun.cli.progress import Tell
from forerun.draft.kinds import kind_of
from forerun.draft.recycle import TABLE, SuccessorTable, predecessors
from forerun.draft.suffix import Suffix
from forerun.draft_spec import LOADED, parse_draft
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.load import load_tokenizer
from forerun.models.config import load_config
from forerun.models.hub import find_model
from forerun.models.shortlist import Shortlist
from forerun.sampling.params import SamplingParams
from forerun.train.capture import CaptureStore
from forerun.train.data import Corpus, Document, digest_of, read_data, split
from forerun.train.evaluate import (
    Evaluator,
    Measurements,
    max_length,
    measure_drafter,
    select_tasks,
    task_prompts,
)
from forerun.train.export import Report, check_out, export
from forerun.train.loop import Trainer, checkpoint_path, read_checkpoint
from forerun.train.options import LossOptions, Training, options_of, recipes_with
from forerun.train.recipes import RECIPES, recipe_of
from forerun.train.stream import TrainingTexts, seed_of
from forerun.train.synthesis import GROUP, TIME_SHARE, WrittenTexts, check_save_data, write
from forerun.train.target import Target
from forerun.train.time_limit import TimeLimit
from forerun.types import Draft
from forerun.utils import atomic_directory, write_atomic

CLOCK_NOTE = (
    ": with --max-minutes the weights depend on the clock and differ from an uninterrupted run"
)
MAY_CHANGE = ("max_minutes", "tasks", "speed_rounds")  # between a run and its continuation


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Training plan: the target, the data, the recipe and its settings.

    Attributes:
        target: a directory, GGUF file or Hub id; None is the default model.
        data: files, directories, or "library".
        recipe: name of the recipe.
        save_data: file that stores the texts that the target writes itself.
    """

    target: str | None
    data: tuple[str, ...]
    recipe: str
    options: LossOptions
    training: Training
    save_data: str | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TrainingPlan:
        """Build a plan from plain values: the given ones, or those of a checkpoint."""
        given = values.get("options", {})
        name = values.get("recipe") or _default_recipe(given)
        options, training = options_of(name, given), Training(**values.get("training", {}))
        data = tuple(values.get("data", ()))
        rate = training.learning_rate
        training = replace(
            training,
            learning_rate=options.default_rate if rate is None else rate,
            write=training.num_texts(bool(data)),
        )
        return cls(values.get("target"), data, name, options, training, values.get("save_data"))


def train(values: Mapping[str, Any], out: Path, tell: Tell) -> Report:
    """Start a run and write `out`. `values` are those of `TrainingPlan.from_values`.

    Raises:
        ForerunError: an option, a model, data or a directory is invalid, or a loss is not finite.
        KeyboardInterrupt: after Ctrl-C; once training has begun, a checkpoint has been written.
    """
    plan, path = TrainingPlan.from_values(values), checkpoint_path(out)
    limit = TimeLimit(plan.training.max_minutes)
    check_out(out)
    if plan.save_data is not None:
        check_save_data(plan.save_data, plan.training)
    if path.exists():
        raise ConfigError(
            f"there is a checkpoint {path} of an unfinished run: use --resume, or remove it"
        )
    with ExitStack() as cleanup:
        return _Run(plan, out, None, cleanup, tell).finish(limit)


def resume(given: Mapping[str, Any], out: Path, tell: Tell) -> Report:
    """Continue from the checkpoint of `out`. Values that are given again must be those of the run,
    except for `MAY_CHANGE`."""
    check_out(out)
    state = read_checkpoint(checkpoint_path(out))
    identity = state["identity"]
    stored, wanted = _flatten(identity), _flatten(given)
    for name, value in wanted.items():
        if name not in stored:
            raise ConfigError(
                f"the run was begun with recipe {identity['recipe']}, which has no {name}: leave it"
                " out"
            )
        if name not in MAY_CHANGE and value != stored[name]:
            raise ConfigError(
                f"the run was begun with {name}={stored[name]!r}, not {value!r}: leave it out"
            )
    plan = TrainingPlan.from_values(identity)
    changed = {name: wanted[name] for name in MAY_CHANGE if name in wanted}
    plan = replace(plan, training=replace(plan.training, **changed))
    limit = TimeLimit(plan.training.max_minutes)
    with ExitStack() as cleanup:
        return _Run(plan, out, state, cleanup, tell).finish(limit)


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a plan with its options and training settings on one level."""
    others = {name: value for name, value in values.items() if name not in ("options", "training")}
    return {**others, **values.get("options", {}), **values.get("training", {})}


def measure(
    target: str | None, drafter: str, data: tuple[str, ...], training: Training, tell: Tell
) -> Measurements:
    """Measure an existing drafter on held-out documents of the data, if there are any, and on
    tasks."""
    limit, tasks = TimeLimit(training.max_minutes), select_tasks(training.tasks)
    if not data and not tasks:
        raise ConfigError("there is nothing to measure on: give --data, or other --tasks than none")
    documents = split(read_data(data)[0], training.held_out)[1] if data else None
    kind, directory = _kind_and_directory(drafter)
    tell("loading the target")
    model, recipe = Target(target, training), recipe_of(kind)
    module = recipe.load(directory, model).to(model.device)
    model.aux_hidden_layers = recipe.aux_hidden_layers(module, model)
    held_out = None if documents is None else _corpus(documents, model, training, tell)
    prompts = task_prompts(tasks, model, max_length(module, model), training)
    evaluator = Evaluator(model, recipe, held_out, training, prompts)
    return measure_drafter(evaluator, module, directory, limit, tell)


def _default_recipe(options: Mapping[str, Any]) -> str:
    """Return the recipe without --recipe: the first that has the given options, or the one of the
    drafter given as init."""
    names = recipes_with(options)
    if len(names) > 1 and "init" in options:
        return recipe_of(kind_of(find_model(options["init"], pickled=True))).name
    return names[0]


def _kind_and_directory(drafter: str) -> tuple[str, Path]:
    """The kind and directory of KIND:DIRECTORY, as a draft option has it, or of a directory."""
    if ":" in drafter and drafter.partition(":")[0] in LOADED:
        ((kind, argument),) = parse_draft(drafter)
        return kind, find_model(argument, pickled=True)
    directory = find_model(drafter, pickled=True)
    return kind_of(directory), directory


class _Run:
    """A plan with its data read or written and its models loaded."""

    def __init__(
        self,
        plan: TrainingPlan,
        out: Path,
        state: dict[str, Any] | None,
        cleanup: ExitStack,
        tell: Tell,
    ) -> None:
        """`state` is the checkpoint, if there is one; `cleanup` runs at the end."""
        self.plan, self.out, self.state, self.tell = plan, out, state, tell
        self.path = checkpoint_path(out)
        settings, tasks = plan.training, select_tasks(plan.training.tasks)
        documents, self.sources = read_data(plan.data) if plan.data else ([], [])
        tell("loading the target")
        self.target = Target(plan.target, settings)
        self.recipe = RECIPES[plan.recipe](plan.options)
        self.written: WrittenTexts | None = None
        store: CaptureStore | None = None
        if settings.write:
            store = self._open_store(cleanup)
            self.written = self._written_texts(store)
            more, sources = self.written.read()
            known = {document.digest for document in documents}
            documents += [document for document in more if document.digest not in known]
            self.sources += sources
        self.digest = digest_of(documents)
        training_documents, held_out_documents = split(documents, settings.held_out)
        self.num_documents = len(training_documents), len(held_out_documents)
        tell.note("{} documents to train on, {} held out".format(*self.num_documents))
        corpus = _corpus(training_documents, self.target, settings, tell)
        held_out = _corpus(held_out_documents, self.target, settings, tell)
        self.stream = TrainingTexts(corpus, self.target, settings, store)
        torch.manual_seed(settings.seed)  # for weights that begin at random
        self.module = self.recipe.build(self.target, corpus)
        self.target.aux_hidden_layers = self.recipe.aux_hidden_layers(self.module, self.target)
        tell.note(f"{len(corpus.examples)} texts of up to {settings.tokens} tokens")
        tell("the target continues texts")
        longest = max_length(self.module, self.target)
        prompts = task_prompts(tasks, self.target, longest, settings)
        self.evaluator = Evaluator(self.target, self.recipe, held_out, settings, prompts)

    def _open_store(self, cleanup: ExitStack) -> CaptureStore:
        """Open the store of the data captured while the target writes; it exists as long as there
        is a checkpoint."""
        target, settings = self.target, self.plan.training
        target.aux_hidden_layers = self.recipe.reads(target)
        max_texts = target.max_stored(settings.keep_gb / 2, target.vocab)
        store = CaptureStore(self.path.with_suffix(".written"), max_texts, self.tell)
        cleanup.callback(lambda: store.close(remove=not self.path.exists()))
        store.open(keep=self.state is not None)
        return store

    def _written_texts(self, store: CaptureStore) -> WrittenTexts:
        if self.state is not None:
            return WrittenTexts(**self.state["identity"]["written"])
        written = write(self.target, self.plan.training, self.tell, store=store)
        if self.plan.save_data is not None:
            text = "".join(f"{line}\n" for line in written.lines)
            write_atomic(Path(self.plan.save_data).expanduser(), text)
        return written

    def finish(self, limit: TimeLimit) -> Report:
        """Train, write the drafter and remove the checkpoint within the time limit."""
        plan, state = self.plan, self.state
        identity = {
            **asdict(plan),
            "data": list(plan.data),
            "digest": self.digest,
            "written": None if self.written is None else asdict(self.written),
        }
        trainer = Trainer(
            self.module, self.stream, self.evaluator, self.path, identity, self.tell, limit
        )
        if state is not None:
            if state["identity"]["digest"] != self.digest:
                raise ConfigError(
                    "the data have changed since the run began: restore them, or start again"
                )
            trainer.resume(state)
            note = CLOCK_NOTE if plan.training.max_minutes else ""
            self.tell.note(f"continuing after step {trainer.record.step}{note}")
        record = trainer.run()

        def report_of(measurements: Measurements) -> Report:
            return Report(
                plan.target,
                self.target.recorded_name,
                license_of(self.target.path),
                {"name": plan.recipe, **asdict(plan.options)},
                self.recipe.draft,
                plan.training,
                {
                    "sources": [asdict(source) for source in self.sources],
                    "documents": self.num_documents[0],
                    "held_out": self.num_documents[1],
                    "sha256": self.digest,
                },
                record,
                sum(weight.numel() for weight in self.module.parameters()),
                measurements,
            )

        report = export(self.out, self.module, self.evaluator, report_of, limit, self.tell)
        self.path.unlink(missing_ok=True)
        return report


def _corpus(documents: list[Document], target: Target, training: Training, tell: Tell) -> Corpus:
    """Tokenize documents for the target, with a note about unusable ones."""
    corpus = Corpus(documents, target.tokenizer, training.tokens, training.prompt_tokens)
    if corpus.too_long:
        tell.note(
            f"{corpus.too_long} prompts are left out: they leave no room within --tokens"
            f" {training.tokens}"
        )
    if unknown := corpus.drop_unknown_tokens(target.vocab):
        tell.note(f"{unknown} texts are left out: they contain tokens that the target lacks")
    return corpus


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
