"""A tiny target with a tokenizer, texts for it, and runs of a few steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.progress import nothing
from forerun.train.capture import Target
from forerun.train.data import Corpus, Document, Passage
from forerun.train.deadline import Deadline
from forerun.train.evaluate import Judge
from forerun.train.loop import Trainer
from forerun.train.options import SmallLMOptions
from forerun.train.recipes import SmallLM
from forerun.train.settings import Training
from forerun.train.stream import Stream
from tests import tiny

SMALL: dict[str, Any] = dict(
    steps=6, rows=3, tokens=48, prompt_tokens=8, evaluate_rows=3, evaluate_every=3, checkpoint_every=2, depth=3,
    dtype="float32", device="cpu", held_out=0.3, threads=1, tasks="none", speed_rounds=0,
)  # fmt: skip
TEXTS = [
    f'{{"name":"alpha {i}","sizes":[{i},{i * i},{i * 7}],"colour":"green grey"}}' for i in range(12)
]
Make = Callable[..., Trainer]


class Clock:
    """Goes on when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def documents(texts: list[str]) -> list[Document]:
    return [Document(str(i), str(i), (Passage("", text),)) for i, text in enumerate(texts)]


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(str(tiny.worded()), Training(**SMALL))


@pytest.fixture(scope="session")
def corpus(target: Target) -> Corpus:
    return Corpus(documents(TEXTS), target.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"])


@pytest.fixture
def make(target: Target, corpus: Corpus, tmp_path: Path) -> Make:
    """A run of the tiny target; keyword arguments are settings, options of the recipe, `tell` and
    `clock`."""

    def make(
        tell: Any = nothing, clock: Any = lambda: 0.0, options: Any = None, **settings: Any
    ) -> Trainer:
        training = Training(**(SMALL | settings))
        recipe = SmallLM(SmallLMOptions(**(options or {"layers": 1})))
        module = recipe.build(target, corpus)
        judge, stream = Judge(target, recipe, corpus, training), Stream(corpus, target, training)
        path = tmp_path / "drafter.training"
        deadline = Deadline(training.max_minutes, clock)
        return Trainer(
            recipe, module, target, stream, judge, training, path, {"made": "here"}, tell, deadline
        )

    return make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path
