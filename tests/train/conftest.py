"""A tiny target with a tokenizer, texts for it, and runs of a few steps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.cli.progress import Tell, nothing
from forerun.train.data import Corpus, Document, Passage
from forerun.train.evaluate import Evaluator
from forerun.train.loop import Trainer
from forerun.train.options import SmallLMOptions, Training
from forerun.train.recipes import SmallLM
from forerun.train.recipes.base import Forecast
from forerun.train.stream import TrainingTexts
from forerun.train.target import Batch, Target
from forerun.train.time_limit import TimeLimit
from tests import tiny

SMALL: dict[str, Any] = dict(
    steps=6, rows=3, tokens=48, prompt_tokens=8, evaluate_rows=3, evaluate_every=3, checkpoint_every=2, depth=3,
    dtype="float32", device="cpu", held_out=0.3, threads=1, tasks="none", speed_rounds=0,
)  # fmt: skip
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
TEXTS = [
    f'{{"name":"alpha {i}","sizes":[{i},{i * i},{i * 7}],"colour":"green grey"}}' for i in range(12)
]
Make = Callable[..., Trainer]
ALL = slice(None)


class Clock:
    """A clock that tests move."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Notes(Tell):
    """Progress that remembers its calls and notes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float | None, float | None]] = []
        self.notes: list[str] = []

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        self.calls.append((what, done, total))

    def note(self, what: str) -> None:
        self.notes.append(what)


def documents(texts: list[str]) -> list[Document]:
    return [Document(str(i), str(i), (Passage("", text),)) for i, text in enumerate(texts)]


def with_template(directory: Path, template: str, model: Path | None = None) -> str:
    """Write a tiny model with this chat template."""
    shutil.copytree(model or tiny.with_tokenizer(), directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": template}))
    return str(directory)


def check_forecast(
    forecast: Forecast,
    batch: Batch,
    place: tuple[int, int, int],
    logits: Tensor,
    known: Tensor | slice = ALL,
    close: float = 1e-5,
) -> Tensor:
    """Compare a forecast for the (k + 1)th token drafted after a root, `place` = (text, root, k),
    with the drafter's logits over its vocabulary `known`. Return its distribution, [V]."""
    i, root, k = place
    q = torch.zeros(batch.vocab)
    if batch.temperature:
        q[known] = (logits / batch.temperature).softmax(-1)
    else:
        q[known] = (logits == logits.max()).float()
    p, token = batch.probs.log_probs[i, root + k].exp(), int(batch.tokens[i, root + k + 1])
    overlap = torch.minimum(p, q).sum().item()
    assert forecast.overlap[place].item() == pytest.approx(overlap, abs=close)
    accepted = min(1.0, float(q[token] / p[token])) if p[token] else float(q[token] > 0)
    assert forecast.acceptance[place].item() == pytest.approx(accepted, abs=10 * close)
    return q


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(str(tiny.with_tokenizer()), Training(**SMALL))


@pytest.fixture(scope="session")
def corpus(target: Target) -> Corpus:
    return Corpus(documents(TEXTS), target.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"])


@pytest.fixture
def make(target: Target, corpus: Corpus, tmp_path: Path) -> Make:
    """A function that makes a run for the tiny target from settings, `tell` and `clock`."""

    def make(tell: Any = nothing, clock: Any = lambda: 0.0, **settings: Any) -> Trainer:
        training = Training(**(SMALL | settings))
        recipe = SmallLM(SmallLMOptions(layers=1))
        evaluator = Evaluator(target, recipe, corpus, training)
        stream = TrainingTexts(corpus, target, training)
        limit, path = TimeLimit(training.max_minutes, clock), tmp_path / "drafter.training"
        module = recipe.build(target, corpus)
        return Trainer(module, stream, evaluator, path, {"made": "here"}, tell, limit)

    return make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path
