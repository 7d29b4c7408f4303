"""A whole run, from names to a directory: what the verb does, for whoever calls it from Python.

A run is set up from a `Plan` of plain values. Its checkpoint holds the same, so that it can be
taken up again without saying anything twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.catalogue.facts import license_of
from forerun.cli.progress import Tell
from forerun.draft.registry import kind_of
from forerun.draft_spec import LOADED, parse_draft
from forerun.errors import ConfigError
from forerun.models.hub import find_model
from forerun.train.capture import Target
from forerun.train.captured import Kept
from forerun.train.checkpoint import checkpoint_path, read_checkpoint
from forerun.train.data import Corpus, Document, digest_of, read_data, split
from forerun.train.deadline import Deadline
from forerun.train.evaluate import Judge
from forerun.train.export import check_out, export
from forerun.train.findings import Findings, find
from forerun.train.loop import Trainer
from forerun.train.options import LossOptions, options_of, recipes_with
from forerun.train.recipes import RECIPES, recipe_of
from forerun.train.report import Facts, Report
from forerun.train.settings import Training
from forerun.train.stream import Stream
from forerun.train.synthesis import Written, check_place, write
from forerun.train.tasks import chosen_tasks, reach_of, task_prompts
from forerun.utils import write_atomic

CLOCK = ": with --max-minutes the clock decides, so the weights will not be those of a run without a break"
MAY_DIFFER = ("max_minutes", "tasks", "speed_rounds")  # between a run and its continuation


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be trained.

    Attributes:
        target: a directory, GGUF file or Hub id; None is the default model.
        data: files, directories, or "library".
        save_data: the file that keeps what the target wrote itself, where it did.
        recipe: its name.
        options: of the recipe.
        training: of the run.
    """

    target: str | None
    data: tuple[str, ...]
    recipe: str
    options: LossOptions
    training: Training
    save_data: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Plan:
        """From plain values: as they were given, or as a checkpoint holds them."""
        given = values.get("options", {})
        name = values.get("recipe") or _recipe_of(given)
        options = options_of(name, given)
        training = Training(**values.get("training", {}))
        data = tuple(values.get("data", ()))
        rate = options.rate if training.learning_rate is None else training.learning_rate
        training = replace(training, learning_rate=rate, write=training.texts(bool(data)))
        return cls(values.get("target"), data, name, options, training, values.get("save_data"))


def train(values: Mapping[str, Any], out: Path, tell: Tell) -> Report:
    """Train from the beginning and write `out`. `values` are what `Plan.of` takes.

    Raises:
        ForerunError: an option, a model, data or a directory that cannot be, or a loss that is not
            finite.
        KeyboardInterrupt: Ctrl-C; once steps are taken, after a checkpoint.
    """
    plan, path = Plan.of(values), checkpoint_path(out)
    deadline = Deadline(plan.training.max_minutes)
    check_out(out)
    if plan.save_data is not None:
        check_place(plan.save_data, plan.training)
    if path.exists():
        raise ConfigError(
            f"there is a checkpoint {path} of a run that has not ended: use --resume, or remove it"
        )
    with ExitStack() as ending:
        return _Run(plan, out, None, ending, tell).to_the_end(deadline)


def resume(given: Mapping[str, Any], out: Path, tell: Tell) -> Report:
    """Go on from the checkpoint of `out`. What is given beside it must be what it was, but for
    `MAY_DIFFER`."""
    check_out(out)
    state = read_checkpoint(checkpoint_path(out))
    identity, asked = state["identity"], _flat(given)
    held = _flat(identity)
    for name, value in asked.items():
        if name not in held:
            raise ConfigError(
                f"the run was begun with recipe {identity['recipe']}, which has no {name}: leave it out"
            )
        if name not in MAY_DIFFER and value != held[name]:
            raise ConfigError(
                f"the run was begun with {name}={held[name]!r}, not {value!r}: leave it out"
            )
    plan = Plan.of(identity)
    changed = {name: asked[name] for name in MAY_DIFFER if name in asked}
    plan = replace(plan, training=replace(plan.training, **changed))
    deadline = Deadline(plan.training.max_minutes)
    with ExitStack() as ending:
        return _Run(plan, out, state, ending, tell).to_the_end(deadline)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `Plan.of` takes, with the options of the recipe and the settings of the run beside all
    else."""
    others = {name: value for name, value in values.items() if name not in ("options", "training")}
    return {**others, **values.get("options", {}), **values.get("training", {})}


def measure(
    target: str | None, drafter: str, data: tuple[str, ...], training: Training, tell: Tell
) -> Findings:
    """What a drafter that is there is worth: on held-out documents of the data, if there are any,
    and on tasks."""
    deadline, tasks = Deadline(training.max_minutes), chosen_tasks(training.tasks)
    if not data and not tasks:
        raise ConfigError("there is nothing to measure on: give --data, or other --tasks than none")
    documents = split(read_data(data)[0], training.held_out)[1] if data else None
    kind, directory = _kind_and_directory(drafter)
    tell("loading the target")
    model, recipe = Target(target, training), recipe_of(kind)
    module = recipe.load(directory, model).to(model.device)
    model.aux_hidden_layers = recipe.aux_hidden_layers(module, model)
    held_out = None if documents is None else _corpus(documents, model, training, tell)
    prompts = task_prompts(tasks, model, reach_of(module, model), training)
    return find(
        Judge(model, recipe, held_out, training, prompts), module, directory, deadline, tell
    )


def _recipe_of(options: Mapping[str, Any]) -> str:
    """The recipe where none is named: the first that has the options given, or that of the drafter
    to begin with."""
    names = recipes_with(options)
    if len(names) > 1 and "init" in options:
        return recipe_of(kind_of(find_model(options["init"], pickled=True))).name
    return names[0]


def _kind_and_directory(drafter: str) -> tuple[str, Path]:
    """What a drafter is and where: KIND:DIRECTORY as a draft option has it, or a directory that
    says it."""
    if ":" in drafter and drafter.partition(":")[0] in LOADED:
        ((kind, argument),) = parse_draft(drafter)
        return kind, find_model(argument, pickled=True)
    directory = find_model(drafter, pickled=True)
    return kind_of(directory), directory


class _Run:
    """A plan with its data read, or written, and its models loaded."""

    def __init__(
        self, plan: Plan, out: Path, state: dict[str, Any] | None, ending: ExitStack, tell: Tell
    ) -> None:
        """`state` is what the checkpoint of `out` holds, if there is one; `ending` closes what is
        open when the run ends."""
        self.plan, self.out, self.state, self.tell, self.path = (
            plan,
            out,
            state,
            tell,
            checkpoint_path(out),
        )
        settings, tasks = plan.training, chosen_tasks(plan.training.tasks)
        documents, self.sources = read_data(plan.data) if plan.data else ([], [])
        tell("loading the target")
        self.target = Target(plan.target, settings)
        self.recipe = RECIPES[plan.recipe](plan.options)
        self.written: Written | None = None
        kept: Kept | None = None
        if settings.write:
            kept = self._kept(ending)
            self.written = (
                self._write(kept) if state is None else Written(**state["identity"]["written"])
            )
            more, sources = self.written.read()
            known = {document.digest for document in documents}
            documents += [document for document in more if document.digest not in known]
            self.sources += sources
        self.digest, self.split = digest_of(documents), split(documents, settings.held_out)
        tell.note(f"{len(self.split[0])} documents to train on, {len(self.split[1])} held out")
        train_on, held_out = (
            _corpus(documents, self.target, settings, tell) for documents in self.split
        )
        self.stream = Stream(train_on, self.target, settings, kept)
        torch.manual_seed(settings.seed)  # of the weights that begin at random
        self.module = self.recipe.build(self.target, train_on)
        self.target.aux_hidden_layers = self.recipe.aux_hidden_layers(self.module, self.target)
        if self.recipe.vocab(self.module, self.target) != self.target.vocab:
            self.stream.kept = None  # its laws are over other tokens
        tell.note(f"{len(train_on.examples)} texts of up to {settings.tokens} tokens")
        tell("the target continues texts")
        prompts = task_prompts(tasks, self.target, reach_of(self.module, self.target), settings)
        self.judge = Judge(self.target, self.recipe, held_out, settings, prompts)

    def _kept(self, ending: ExitStack) -> Kept:
        """For what is captured while the target writes; it is there for as long as there is a
        checkpoint."""
        target, settings, path = self.target, self.plan.training, self.path.with_suffix(".written")
        target.aux_hidden_layers = self.recipe.reads(target)
        kept = Kept(
            path, target.shape(target.vocab), settings.tokens, settings.keep_gb / 2, self.tell
        )
        ending.callback(lambda: kept.close(remove=not self.path.exists()))
        kept.open(keep=self.state is not None)
        return kept

    def _write(self, kept: Kept) -> Written:
        written = write(self.target, self.plan.training, self.tell, kept=kept)
        if self.plan.save_data is not None:
            write_atomic(
                Path(self.plan.save_data).expanduser(),
                "".join(f"{line}\n" for line in written.lines),
            )
        return written

    def to_the_end(self, deadline: Deadline) -> Report:
        """Train, write the drafter, and remove the checkpoint; all before `deadline`."""
        plan, state = self.plan, self.state
        identity = {
            "target": plan.target, "data": list(plan.data), "recipe": plan.recipe, "options": asdict(plan.options),
            "training": asdict(plan.training), "digest": self.digest, "save_data": plan.save_data,
            "written": None if self.written is None else asdict(self.written),
        }  # fmt: skip
        trainer = Trainer(
            self.recipe, self.module, self.target, self.stream, self.judge, plan.training, self.path, identity,
            self.tell, deadline,
        )  # fmt: skip
        if state is not None:
            if state["identity"]["digest"] != self.digest:
                raise ConfigError(
                    "the data have changed since the run began: bring them back, or begin anew"
                )
            trainer.resume(state)
            self.tell.note(
                f"going on after step {trainer.record.step}{CLOCK if plan.training.max_minutes else ''}"
            )
        record = trainer.run()
        facts = Facts(
            plan.target,
            plan.data if plan.save_data is None else (*plan.data, plan.save_data),
            {"name": plan.recipe, **asdict(plan.options)},
            plan.training,
            self.sources,
            (len(self.split[0]), len(self.split[1])),
            self.digest,
            kept=self.written is None or plan.save_data is not None,
            made_for=self.target.recorded,
            license=license_of(self.target.path),
        )
        report = export(self.out, self.module, self.judge, facts, record, deadline, self.tell)
        self.path.unlink(missing_ok=True)
        return report


def _corpus(documents: list[Document], target: Target, training: Training, tell: Tell) -> Corpus:
    """Documents as the target reads them; what cannot be learnt from is told."""
    corpus = Corpus(documents, target.tokenizer, training.tokens, training.prompt_tokens)
    if corpus.too_long:
        tell.note(
            f"{corpus.too_long} prompts are left out: they leave no room within --tokens {training.tokens}"
        )
    if unknown := corpus.leave_out(target.vocab):
        tell.note(
            f"{unknown} texts are left out: they have tokens of the tokenizer that the target has not"
        )
    return corpus
