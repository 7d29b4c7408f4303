"""How good a drafter is on texts it has never seen: by its module (analytic), and by the engine
(measured).

Both are made along the same texts, so that they differ by the tosses of the verification alone, and
by whatever is
wrong: another alignment, another rounding, a drafter that was not written as it was trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forerun.cli.progress import Tell, nothing
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import RequestError
from forerun.measure.run import bucket_of
from forerun.sampling.params import SamplingParams
from forerun.train.capture import AT_ONCE, Batch, Target, example_of
from forerun.train.data import Corpus, Example
from forerun.train.deadline import Deadline, TimeIsOver
from forerun.train.lengths import Stretch, accepted_length, from_any
from forerun.train.recipes import Recipe
from forerun.train.settings import Training, depths_up_to
from forerun.train.speed import OTHER_WAYS
from forerun.train.stream import seed_of
from forerun.train.tasks import Opening, Prompts, held_out_prompts

ROWS = 4  # texts of one pass
# evaluations that take about as long as one figure: drafts are made, and verified beside each token
FIGURE = 2
APART = 1 << 32  # added to the numbers of seeds, so that no held-out text shares one with training


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A drafter along held-out texts.

    Attributes:
        step: after how many steps.
        perplexity: of the held-out data as they are, or of the target's own texts where there are
            only prompts; over the tokens that the drafter can say.
        overlap: mean of 1 - TV along texts of the target, at the temperature of training; of a
            large vocabulary, that of the coarser laws (`losses`), which is at least that of the
            whole ones.
        from_any: mean length of a draft that begins at any token, 1 + sum over k of the product of
            (1 - TV).
        accepted_length: tokens a target pass under rule token, rounds beginning where they do
            (`lengths`).
    """

    step: int
    perplexity: float
    overlap: float
    from_any: float
    accepted_length: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine counted with a drafter that was written, on one task, under rule token.

    Attributes:
        task: a kind of the project's own tasks, or held-out.
        temperature, depth: at which.
        accepted_length: tokens a target pass.
        analytic: what arithmetic expects along the same texts.
        passes: how many were counted.
        by_position: {first output position of a span: tokens a pass that began there}, by spans of
            32, 32, 64, 128, ..
    """

    task: str
    temperature: float
    depth: int
    accepted_length: float
    analytic: float
    passes: int
    by_position: dict[int, float]


@dataclass(frozen=True, slots=True)
class Case:
    """What one figure is measured with."""

    prompts: Prompts
    temperature: float
    depth: int


class Judge:
    """Texts that are not trained on, and how drafters fare on them."""

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        held_out: Corpus | None,
        settings: Training,
        tasks: Sequence[Prompts] = (),
    ) -> None:
        """To evaluate, held-out documents are needed; `tasks` are measured beside them. Raises
        RequestError where no held-out text can be continued."""
        self.target, self.recipe, self.settings = target, recipe, settings
        self.corpus = held_out
        self.held_out = None if held_out is None else held_out_prompts(held_out, settings)
        self._batches: tuple[list[Batch], list[Batch]] | None = None
        self.sets = [*([self.held_out] if self.held_out else []), *tasks]

    @property
    def cases(self) -> list[Case]:
        """All that is measured, in the order in which it is reported. Raises RequestError where
        every prompt was left out."""
        sets = [prompts for prompts in self.sets if prompts.openings]
        if not sets:
            raise RequestError(
                "no prompt is left to measure with, all are too long: give others by --data or --tasks"
            )
        grid = product(sets, (0.0, self.settings.temperature), depths_up_to(self.settings.depth))
        return [Case(*each) for each in grid]

    @property
    def parts(self) -> int:
        """How many evaluations take about as long as all that comes behind the last step: one, the
        figures, and the speed, where each way to decode takes about as long for its few texts, one
        at a time, as for many together."""
        ways = OTHER_WAYS + len(depths_up_to(self.settings.depth))
        return 1 + FIGURE * len(self.cases) + ways * self.settings.speed_rounds

    @cached_property
    def texts(self) -> list[Example]:
        """What the target says behind the held-out prompts, made once."""
        assert self.held_out is not None
        prompts = [opening.tokens for opening in self.held_out.openings]
        seeds = [seed_of(self.settings.seed, APART + i) for i in range(len(prompts))]
        return self.target.continued(prompts, seeds, self.settings.temperature)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, step: int) -> Evaluation:
        """Along the held-out texts."""
        assert self.corpus is not None
        module.eval()
        texts, vocab = self.texts, self.recipe.vocab(module, self.target)
        if self._batches is None:  # what the target says of them is the same at every evaluation
            own = self.corpus.examples[: self.settings.evaluate_rows] or texts
            self._batches = (
                self._read(own, 1.0, vocab),
                self._read(texts, self.settings.temperature, vocab),
            )
        theirs, said_by_it = self._batches
        said = torch.cat(
            [self.recipe.analytic(module, batch, 1).said[batch.mask].double() for batch in theirs]
        )
        stretches = [
            Stretch(text.given, len(text.tokens) - 1, self.settings.tokens - 1) for text in texts
        ]
        outlooks = [
            self.recipe.analytic(module, batch, self.settings.depth) for batch in said_by_it
        ]
        overlap = _joined([outlook.overlap for outlook in outlooks])
        chances = _joined([outlook.chances for outlook in outlooks])
        mask = _joined([batch.mask for batch in said_by_it])
        return Evaluation(
            step,
            perplexity=float(said[said > -torch.inf].mean().neg().exp()),
            overlap=float(overlap[..., 0][mask].double().mean()),
            from_any=from_any(overlap, mask),
            accepted_length=accepted_length(chances, stretches),
        )

    @torch.no_grad()
    def measure(
        self,
        module: nn.Module,
        directory: Path,
        cases: Sequence[Case],
        tell: Tell = nothing,
        deadline: Deadline | None = None,
    ) -> Iterator[Measured]:
        """Let the engine draft with what is in `directory`, case by case; `module` is what should
        be there. Of a case in the midst of which the time is over there is no figure, and then no
        more come."""
        engine = self._engine(directory, [case.prompts for case in cases])
        module.eval()
        for i, case in enumerate(cases):
            what = f"{case.prompts.task}, depth {case.depth} at temperature {case.temperature:g}"
            tell(f"measuring {what}", i, len(cases))
            try:
                figure = self._measure(engine, module, case, deadline or Deadline())
            except TimeIsOver:
                return
            yield figure

    def _measure(
        self, engine: Engine, module: nn.Module, case: Case, deadline: Deadline
    ) -> Measured:
        """One task at one temperature and depth. Raises TimeIsOver."""
        prompts, temperature, depth = case.prompts, case.temperature, case.depth
        requests = self._run(engine, prompts.openings, temperature, depth, deadline)
        texts = [example_of(request) for request in requests]
        batches = self._read(texts, temperature, self.recipe.vocab(module, self.target), deadline)
        chances = _joined([self.recipe.analytic(module, batch, depth).chances for batch in batches])
        stretches = [
            Stretch(
                len(opening.tokens) + _opened(request) - 1,
                len(request.tokens) - 1,
                opening.limit - 1,
            )
            for opening, request in zip(prompts.openings, requests, strict=True)
        ]
        rounds = _rounds(requests)
        passes = sum(map(len, rounds.values()))
        return Measured(
            prompts.task,
            temperature,
            depth,
            accepted_length=sum(map(sum, rounds.values())) / max(passes, 1),
            analytic=accepted_length(chances, stretches),
            passes=passes,
            by_position={at: sum(emitted) / len(emitted) for at, emitted in sorted(rounds.items())},
        )

    def _read(
        self,
        texts: Sequence[Example],
        temperature: float,
        vocab: int,
        deadline: Deadline | None = None,
    ) -> list[Batch]:
        """What the target says along some texts, some of them at once."""
        batches = []
        for at in range(0, len(texts), ROWS):
            if deadline:
                deadline.check()
            batches.append(self.target.batch(texts[at : at + ROWS], temperature, vocab))
        return batches

    def _engine(self, directory: Path, sets: Sequence[Prompts]) -> Engine:
        """An engine on the target's weights that drafts with what is in `directory`, as `--draft`
        does."""
        runner = self.target.runner(
            AT_ONCE, max(opening.limit for prompts in sets for opening in prompts.openings)
        )
        proposer = self.recipe.proposer(directory, self.target, runner)
        return Engine(
            runner, {self.recipe.draft: proposer}, rule="token", tokenizer=self.target.tokenizer
        )

    def _run(
        self,
        engine: Engine,
        openings: Sequence[Opening],
        temperature: float,
        depth: int,
        deadline: Deadline,
    ) -> list[Request]:
        """The prompts, continued with drafts of one depth."""
        requests = []
        for i, opening in enumerate(openings):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=opening.limit - len(opening.tokens),
                seed=seed_of(
                    depth, APART + i
                ),  # whatever the seed of the run, so that runs can be compared
            )
            requests.append(
                engine.add(list(opening.tokens), params, draft=self.recipe.draft, depth=depth)
            )
        while engine.busy:
            deadline.check()
            engine.step_or_raise()
        return requests


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Texts of several batches in one, shorter ones filled up with zeros. [B, N, ...] each -> [B of
    all, N, ...]"""
    return pad_sequence([text for part in parts for text in part], batch_first=True)


def _opened(request: Request) -> int:
    """Tokens of the pass that ended the prompt, which is not counted. It drafts only where a single
    token was left to
    read: a short prompt, or one whose beginning the cache still has."""
    return min(request.stats.rounds[0][1] + 1, request.produced)


def _rounds(requests: Sequence[Request]) -> dict[int, list[int]]:
    """{first output position of a span: tokens of each pass that began there}; passes that ended
    prompts left out."""
    rounds: defaultdict[int, list[int]] = defaultdict(list)
    for request in requests:
        at = _opened(request)
        for _, accepted in request.stats.rounds[1:]:
            emitted = min(
                accepted + 1, request.produced - at
            )  # the end of the text may lie within a draft
            rounds[bucket_of(at)].append(emitted)
            at += emitted
    return dict(rounds)
