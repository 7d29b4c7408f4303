"""How good a drafter is on documents it has never seen: by its module (analytic), and by the engine (measured).

Both are made along the same texts, so that they differ by the tosses of the verification alone, and by whatever is
wrong: another alignment, another rounding, a drafter that was not written as it was trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.bench.report import Tell, nothing
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import RequestError
from forerun.sampling.params import SamplingParams
from forerun.train.capture import AT_ONCE, Target
from forerun.train.data import Corpus, Example
from forerun.train.lengths import Stretch, accepted_length, from_any
from forerun.train.recipes import Recipe
from forerun.train.settings import Training
from forerun.train.stream import seed_of

ROWS = 4  # texts of one pass
SPAN = 64  # output positions that are counted together
HELD_OUT = 1 << 32  # added to the numbers of seeds, so that no held-out text shares one with training


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A drafter along held-out texts.

    Attributes:
        step: after how many steps.
        perplexity: of the held-out data as they are, or of the target's own texts where there are only prompts.
        overlap: mean of 1 - TV along texts of the target, at the temperature of training; of a large vocabulary, that
            of the coarser laws (`losses`), which is at least that of the whole ones.
        from_any: mean length of a draft that begins at any token, 1 + sum over k of the product of (1 - TV).
        accepted_length: tokens a target pass under rule token, rounds beginning where they do (`lengths`).
    """

    step: int
    perplexity: float
    overlap: float
    from_any: float
    accepted_length: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine counted with a drafter that was written, under rule token.

    Attributes:
        temperature, depth: at which.
        accepted_length: tokens a target pass.
        analytic: what arithmetic expects along the same texts.
        passes: how many were counted.
        by_position: {first output position of a span of 64: tokens a pass that began there}.
    """

    temperature: float
    depth: int
    accepted_length: float
    analytic: float
    passes: int
    by_position: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Judge:
    """Held-out texts and how drafters fare on them."""

    def __init__(self, target: Target, recipe: Recipe, held_out: Corpus, settings: Training) -> None:
        """The target continues the held-out prompts once. Raises RequestError where there is none."""
        if not held_out.prompts:
            raise RequestError(
                f"no held-out text is longer than prompt_tokens={settings.prompt_tokens}, so that it could be"
                " continued: lower it, give longer texts, or hold out more of them"
            )
        self.target, self.recipe, self.settings = target, recipe, settings
        self.prompts = held_out.prompts[: settings.evaluate_rows]
        seeds = [seed_of(settings.seed, HELD_OUT + i) for i in range(len(self.prompts))]
        self.texts = target.continued(self.prompts, seeds, settings.temperature)
        self.data = held_out.examples[: settings.evaluate_rows] or self.texts

    @torch.no_grad()
    def evaluate(self, module: nn.Module, step: int) -> Evaluation:
        """Along the held-out texts."""
        module.eval()
        vocab, logs = self.recipe.vocab(module, self.target), []
        for rows in _chunks(self.data):
            batch = self.target.batch(rows, vocab=vocab)
            logs.append(self.recipe.analytic(module, batch, 1).said[batch.mask].double())
        along = self._along(module, self.texts, self.settings.temperature, self.settings.depth)
        return Evaluation(
            step,
            perplexity=float(torch.cat(logs).mean().neg().exp()),
            overlap=float(along.overlap[..., 0][along.mask].double().mean()),
            from_any=from_any(along.overlap, along.mask),
            accepted_length=accepted_length(along.chances, self._stretches(self.texts)),
        )

    @torch.no_grad()
    def measure(self, module: nn.Module, directory: Path, tell: Tell = nothing) -> list[Measured]:
        """Let the engine draft with what is in `directory`; `module` is what should be there."""
        engine, measured = self._engine(directory), []
        module.eval()
        for temperature in (0.0, self.settings.temperature):
            for depth in depths_up_to(self.settings.depth):
                tell(f"measuring depth {depth} at temperature {temperature:g}")
                requests = self._run(engine, temperature, depth)
                texts = [Example(tuple(request.tokens), request.prompt_length) for request in requests]
                chances = self._along(module, texts, temperature, depth).chances
                rounds = _rounds(requests)
                measured.append(
                    Measured(
                        temperature,
                        depth,
                        accepted_length=sum(map(sum, rounds.values())) / max(sum(map(len, rounds.values())), 1),
                        analytic=accepted_length(chances, self._stretches(texts)),
                        passes=sum(map(len, rounds.values())),
                        by_position={at: sum(emitted) / len(emitted) for at, emitted in sorted(rounds.items())},
                    )
                )
        return measured

    def _along(self, module: nn.Module, texts: Sequence[Example], temperature: float, depth: int) -> _Along:
        """The outlook along some texts, all in one. [B, tokens - 1, depth]"""
        parts, vocab = [], self.recipe.vocab(module, self.target)
        for rows in _chunks(texts):
            batch = self.target.batch(rows, temperature, vocab)
            outlook = self.recipe.analytic(module, batch, depth)
            missing = self.settings.tokens - 1 - batch.mask.shape[1]
            parts.append(
                _Along(
                    F.pad(outlook.overlap, (0, 0, 0, missing)),
                    F.pad(outlook.chances, (0, 0, 0, missing)),
                    F.pad(batch.mask, (0, missing)),
                )
            )
        return _Along(*(torch.cat([getattr(part, name) for part in parts]) for name in _Along.__slots__))

    def _stretches(self, texts: Sequence[Example]) -> list[Stretch]:
        return [Stretch(text.given, len(text.tokens) - 1, self.settings.tokens - 1) for text in texts]

    def _engine(self, directory: Path) -> Engine:
        """An engine on the target's weights that drafts with what is in `directory`, as `--draft` does."""
        runner = self.target.runner(AT_ONCE)
        proposer = self.recipe.proposer(directory, self.target, runner)
        return Engine(runner, {self.recipe.draft: proposer}, rule="token", tokenizer=self.target.tokenizer)

    def _run(self, engine: Engine, temperature: float, depth: int) -> list[Request]:
        """The held-out prompts, continued with drafts of one depth."""
        requests = []
        for i, prompt in enumerate(self.prompts):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=self.settings.tokens - len(prompt),
                seed=seed_of(depth, HELD_OUT + i),  # whatever the seed of the run, so that runs can be compared
            )
            requests.append(engine.add(list(prompt), params, draft=self.recipe.draft, depth=depth))
        while engine.busy:
            engine.step()
        return requests


@dataclass(slots=True)
class _Along:
    """Parts of an outlook, and the positions that count."""

    overlap: Tensor
    chances: Tensor
    mask: Tensor


def depths_up_to(depth: int) -> list[int]:
    """1, 2, 4 and so on, and `depth` itself."""
    return sorted({*(1 << i for i in range(depth.bit_length())), depth})


def _rounds(requests: Sequence[Request]) -> dict[int, list[int]]:
    """{first output position of a span: tokens of each pass that began there}; passes that ended prompts left out."""
    rounds: defaultdict[int, list[int]] = defaultdict(list)
    for request in requests:
        at = 1
        for _, accepted in request.stats.rounds[1:]:
            emitted = min(accepted + 1, request.produced - at)  # the end of the text may lie within a draft
            rounds[at // SPAN * SPAN].append(emitted)
            at += emitted
    return dict(rounds)


def _chunks(texts: Sequence[Example]) -> list[Sequence[Example]]:
    return [texts[at : at + ROWS] for at in range(0, len(texts), ROWS)]
