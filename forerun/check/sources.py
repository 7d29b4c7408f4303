"""Several drafters that sample into one tree, on the engine itself over a toy model.

The enumeration of `rules` replaces random numbers, and `law` tries the drafters of the model under
test, most of which sample alone. Neither sees whether two drafters of one tree draw independently
of each other. Here the engine drafts, merges, verifies and commits with two drafters; the
probabilities of all three models depend on the last token alone, so each emitted token can be bet
on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.check import digits
from forerun.check.findings import Finding
from forerun.check.wager import ALPHA, Wager
from forerun.draft.compose import Both
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.draft.tree import Tree, grow
from forerun.engine.engine import Engine
from forerun.models.config import make_config
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Forward
from forerun.verify import Noise, Rule

ROUNDING = 1e-9  # stands for probability 0, whose logarithm logits cannot hold
DEPTH, WIDTH = 2, 2
BATCH, LENGTH, MOST = (
    32,
    3,
    1920,
)  # requests at once, tokens of each (one round of the drafts below), tokens in all


def _probs(*rows: Sequence[float]) -> Tensor:
    """Rows of probabilities of the next token, as logits. [V, V]"""
    table = np.maximum(np.array(rows, dtype=float), ROUNDING)
    return torch.tensor(np.log(table / table.sum(-1, keepdims=True)))


# Behind each of the tokens 2 to 5 the first drafter guesses 0 and the second 1, and both draw one
# of 2 to 5 behind it. The target accepts 0 exactly where the first drafter drew 2 or 3. If both
# draw with the same noise, the second drafter draws 4 or 5 wherever 0 was rejected, and 2 and 3
# come too seldom behind 1.
_FIRST, _SECOND, _NEXT = (
    (0.5, 0.5, 0, 0, 0, 0),
    (0, 0, 0.5, 0.5, 0, 0),
    (0, 0, 0.25, 0.25, 0.25, 0.25),
)
TARGET = _probs(_SECOND, _NEXT, *[_FIRST] * 4)
DRAFTERS = (
    _probs(_NEXT, _NEXT, *[(0.5, 0, 0.125, 0.125, 0.125, 0.125)] * 4),
    _probs(_NEXT, _NEXT, *[(0, 0.5, 0.125, 0.125, 0.125, 0.125)] * 4),
)
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": len(TARGET), "hidden_size": 1, "num_hidden_layers": 1,
    "num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1, "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


class TableTarget(Runner):
    """A target whose logits are a row of a table for the last token [V, V]; its cache holds
    zeros."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        config = make_config(CONFIG, Path("toy"))
        stub: Any = SimpleNamespace(
            config=config, context=config.context, dtype=torch.float64, device=torch.device("cpu")
        )
        super().__init__(stub, tokens=32 * BATCH, page=4, slots=BATCH)

    def forward(
        self, segments: Sequence[Segment], aux_hidden_layers: Sequence[int] = (), keep: bool = True
    ) -> Forward:
        """The rows of the wanted tokens. [M, V]"""
        return Forward(
            self.table[[segment.tokens[i] for segment in segments for i in segment.want]]
        )


class TableDrafter(Proposer):
    """A drafter that samples a tree from a table for the last token [V, V]; `noise` is the class of
    its noise."""

    width = WIDTH

    def __init__(self, name: str, table: Tensor, noise: type[Noise]) -> None:
        self.name, self.table, self.noise = name, table, noise

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        """One tree a row, a level at a time."""
        own = [
            replace(row, noise=self.noise(row.noise.seed, row.noise.root, row.noise.source))
            for row in rows
        ]
        trees = [Tree(row) for row in own]
        for level in range(DEPTH):
            growing = [tree for tree in trees if tree.row.depth > level and tree.frontier]
            if growing:
                after = [tree.draft.tokens[node] for tree in growing for node in tree.frontier]
                grow(growing, self.table[after], self.width, self.name)
        return [tree.finish(len(self.table)) for tree in trees]


def toy_engine(rule: Rule, noise: type[Noise] = Noise) -> tuple[Engine, str]:
    """An engine over the toy model, and the name of the draft that merges what both drafters
    sample."""
    parts = [
        TableDrafter(name, table, noise)
        for name, table in zip(("first", "second"), DRAFTERS, strict=True)
    ]
    both = Both(parts)
    engine = Engine(TableTarget(TARGET), {part.name: part for part in (*parts, both)})
    engine.rule = rule
    return engine, both.name


def emit(engine: Engine, draft: str, seeds: Sequence[int]) -> list[list[int]]:
    """The texts of one request a seed at temperature 1, each with its prompt of one token in
    front."""
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
    requests = [
        engine.add([2], replace(params, seed=seed), draft=draft, depth=DEPTH) for seed in seeds
    ]
    while engine.busy:
        engine.step_or_raise()
    return [copy.copy(request.tokens) for request in requests]


def check_sources(rule: Rule, noise: type[Noise] = Noise) -> Finding:
    """Whether tokens have the target's probabilities where two drafters sample into one tree."""
    subject, wager, target = (
        f"{rule.name}, two drafters in one tree",
        Wager(TARGET.numel()),
        TARGET.exp().numpy(),
    )
    engine, draft = toy_engine(rule, noise)
    for start in range(0, MOST // LENGTH, BATCH):
        try:
            texts = emit(engine, draft, range(start, start + BATCH))
        except AssertionError as error:
            return Finding("rules", subject, False, f"the rule refused a draft: {error}")
        for tokens in texts:
            for last, token in itertools.pairwise(tokens):
                hits, chances = np.zeros(target.shape), np.zeros(target.shape)
                hits[last, token], chances[last] = 1, target[last]
                wager.add(hits.ravel(), chances.ravel())
        if wager.refuted:
            break
    worst = int(np.argmax(np.abs(wager.excess)))
    pair = {
        "last": worst // len(target),
        "token": worst % len(target),
        "excess": wager.excess[worst],
    }
    details = {"tokens": wager.tokens, "evidence": wager.evidence, **pair}
    if wager.refuted:
        expected = wager.expected[worst]
        text = (
            f"refuted after {wager.tokens} tokens of a toy model: token {pair['token']} behind token {pair['last']}"
            f" {digits.off(expected + wager.excess[worst], expected)} (evidence {digits.odds(wager.evidence)},"
            f" {digits.odds(1 / ALPHA)} refutes)"
        )
        return Finding("rules", subject, False, text, details)
    text = (
        f"{wager.tokens} tokens of a toy model: the target's probabilities are not refuted (evidence against them"
        f" {digits.odds(wager.evidence)}, {digits.odds(1 / ALPHA)} refutes)"
    )
    return Finding("rules", subject, True, text, details)
