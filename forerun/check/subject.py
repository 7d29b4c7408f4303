"""The engine under test: requests with any rule, batch and chunk, and the target's own logits by
separate passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from numpy.random import default_rng
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.llm import LLM
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Round
from forerun.verify import Rule

PAGE = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """How requests run: `at_once`, their prompts read `chunk` tokens a pass, drafts of `depth`."""

    at_once: int
    chunk: int
    depth: int | str

    def __str__(self) -> str:
        return f"{self.at_once} at once, chunks of {self.chunk}, depth {self.depth}"


@dataclass(frozen=True, slots=True)
class Ask:
    """One text to produce."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class Said:
    """What a request said, and its rounds where they were asked for: (round, tokens of it that
    count)."""

    tokens: list[int]
    rounds: list[tuple[Round, list[int]]]


class Subject:
    """An LLM and what the checks need of it."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine

    def say(
        self, asks: Sequence[Ask], rule: Rule, draft: str, schedule: Schedule, trace: bool = False
    ) -> list[Said]:
        """The texts, in order, on empty caches: so that prompts are read as the schedule says."""
        self.engine.reset()
        waiting, running, said = (
            list(enumerate(asks)),
            dict[int, tuple[int, Request]](),
            dict[int, Said](),
        )
        with _set_to(self.engine, rule, schedule.chunk):
            while waiting or running:
                while waiting and len(running) < schedule.at_once:
                    i, ask = waiting.pop(0)
                    request = self.engine.add(
                        list(ask.prompt), ask.params, draft=draft, depth=schedule.depth, trace=trace
                    )
                    running[request.id] = i, request
                    said[i] = Said([], [])
                for event in self.engine.step_or_raise():
                    i, request = running[event.request_id]
                    said[i].rounds += [(event.round, event.token_ids)] if event.round else []
                    if event.finish_reason:
                        said[i].tokens = list(request.output)
                        del running[event.request_id]
        return [said[i] for i in range(len(asks))]

    def logits(self, tokens: Sequence[int], first: int = 0, step: int | None = None) -> Tensor:
        """The target's logits after each token from index `first` on, in passes of its own over
        `step` tokens (all at once without), on an empty cache. [len(tokens) - first, V]"""
        runner = Runner(self.llm.decoder, tokens=len(tokens) + PAGE, page=PAGE, slots=1)
        runner.cache.open(0, [])
        runner.cache.pages.grow(0, len(tokens))
        rows, step = [], step or len(tokens)
        for at in range(0, len(tokens), step):
            chunk = list(tokens[at : at + step])
            want = [i for i in range(len(chunk)) if at + i >= first]
            rows.append(
                runner.forward(
                    [Segment(0, chunk, list(range(-1, len(chunk) - 1)), want)]
                ).logits.clone()
            )
            runner.cache.commit(0, range(len(chunk)))
        return torch.cat(rows)

    def tree_logits(
        self, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Tensor:
        """The target's logits after each node of a tree behind `prefix`, in one pass. [N, V]"""
        runner = Runner(
            self.llm.decoder, tokens=len(prefix) + len(tokens) + PAGE, page=PAGE, slots=1
        )
        runner.cache.open(0, [])
        runner.cache.pages.grow(0, len(prefix) + len(tokens))
        runner.forward([Segment(0, list(prefix), list(range(-1, len(prefix) - 1)), [])])
        runner.cache.commit(0, range(len(prefix)))
        return runner.forward(
            [Segment(0, list(tokens), list(parents), list(range(len(tokens))))]
        ).logits.clone()


@contextmanager
def _set_to(engine: Engine, rule: Rule, chunk: int) -> Iterator[None]:
    """Let the engine use `rule`, whatever is in it, and `chunk`; requests left over by an error are
    dropped."""
    before = engine.rule, engine.scheduler.chunk
    engine.rule, engine.scheduler.chunk = rule, chunk
    try:
        yield
    except BaseException:
        engine.reset()
        raise
    finally:
        engine.rule, engine.scheduler.chunk = before


def random_prompts(vocab: int, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Prompts for a model without a tokenizer; each repeats its first half, so that look-ups find
    something."""
    dice = default_rng(0)
    halves = dice.integers(vocab, size=(count, tokens // 2))
    return [tuple(int(t) for t in [*half, *half]) for half in halves]
