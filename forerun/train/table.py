"""Tables for `recycle`, made beforehand: the target writes texts, and the laws that it had on the
way are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from forerun.cli.progress import Tell
from forerun.draft.recycle import TABLE, SuccessorTable
from forerun.draft.suffix import Suffix
from forerun.errors import ForerunError
from forerun.sampling.params import SamplingParams
from forerun.train.capture import Target
from forerun.train.data import Corpus, read_data
from forerun.train.export import check_out
from forerun.train.settings import Training
from forerun.train.stream import seed_of
from forerun.train.synthesis import GROUP, SHARE, write
from forerun.utils import atomic_directory

ENTRIES = 1 << 18  # of the table while it is made


@dataclass(frozen=True, slots=True)
class Made:
    """What a table holds: laws behind pairs and single tokens, from so many laws of so many
    texts."""

    laws: int
    learnt: int
    texts: int
    seconds: float


class Listening(Suffix):
    """Drafts as `suffix` does, and keeps what the target says."""

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self.table, self.learnt = SuccessorTable(ENTRIES), 0

    def learn(
        self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        self.table.learn(before, tokens, logits)
        self.learnt += len(tokens)


def make_table(
    target: str | None, data: Sequence[str], training: Training, out: Path, tell: Tell
) -> Made:
    """Let the target go on with the prompts of `data`, write texts of its own (`training.texts`),
    and write `out`, a directory with the table.

    Raises:
        ForerunError: an option, a model, data or a directory that cannot be.
    """
    begun = time.monotonic()
    check_out(out)
    documents = read_data(data)[0] if data else []
    training = replace(training, write=training.texts(bool(documents)))
    tell("loading the target")
    model, listening, texts = Target(target, training), Listening(), 0
    model.llm.engine.proposers["suffix"] = listening
    if documents:
        texts = _go_on(
            Corpus(documents, model.tokenizer, training.tokens, training.prompt_tokens),
            model,
            training,
            tell,
        )
    if (
        training.write
    ):  # all the time is for writing: `write` leaves a share of it for training, and here is none
        texts += len(
            write(model, replace(training, max_minutes=training.max_minutes / SHARE), tell).lines
        )
    made = Made(len(listening.table), listening.learnt, texts, time.monotonic() - begun)
    try:
        with atomic_directory(out) as work:
            listening.table.save(work / TABLE, model.vocab)
            (work / TABLE).chmod(0o644)
            about = {"kind": "recycle", "target": target, "data": list(data), **asdict(made)}
            (work / "training.json").write_text(
                json.dumps(about, indent=1) + "\n", encoding="utf-8"
            )
    except OSError as error:
        raise ForerunError(f"{out} cannot be written: {error.strerror}") from None
    return made


def _go_on(corpus: Corpus, target: Target, training: Training, tell: Tell) -> int:
    """Let the target go on with all prompts, or as many as there is time for; how many texts."""
    engine, until = target.llm.engine, time.monotonic() + 60 * training.max_minutes
    for at in range(0, len(corpus.prompts), GROUP):
        tell(
            f"the target goes on with texts, {at} of {len(corpus.prompts)}", at, len(corpus.prompts)
        )
        for i, prompt in enumerate(corpus.prompts[at : at + GROUP], at):
            most = training.tokens - len(prompt)
            seed = seed_of(training.seed, i)
            engine.add(
                prompt,
                SamplingParams(temperature=training.temperature, max_tokens=most, seed=seed),
                draft="suffix",
            )
        while engine.busy:
            engine.step_or_raise()
        if training.max_minutes and time.monotonic() > until:
            return min(at + GROUP, len(corpus.prompts))
    return len(corpus.prompts)
