"""Check that several drafters that sample into one tree draw independently of each other.

The engine drafts, merges, verifies and commits over a toy model with two drafters. The
probabilities of all three models depend on the last token alone, so each emitted token is tested.
"""

from __future__ import annotations

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
from forerun.check.report import Finding
from forerun.check.sequential_test import SequentialTest
from forerun.draft.compose import Merged
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.draft.tree import Tree, grow
from forerun.engine.engine import Engine
from forerun.models.config import make_config
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Forward
from forerun.verify import RULES, Noise

DEPTH, WIDTH = 2, 2
BATCH, LENGTH, COUNT = 32, 3, 640  # requests at once, tokens of each, requests in all


def table(*rows: Sequence[float]) -> Tensor:
    """Return the logits [V, V] of the next token after each token; probability 0 becomes 1e-9."""
    probs = np.maximum(np.array(rows, dtype=float), 1e-9)
    return torch.tensor(np.log(probs / probs.sum(-1, keepdims=True)))


# After each of the tokens 2 to 5 the first drafter guesses 0 and the second 1, and both draw one of
# 2 to 5 after it. The target accepts 0 exactly where the first drafter drew 2 or 3. If both draw
# with the same noise, the second drafter draws 4 or 5 wherever 0 was rejected, and 2 and 3 come too
# seldom after 1.
ZERO, ONE, REST = (0.5, 0.5, 0, 0, 0, 0), (0, 0, 0.5, 0.5, 0, 0), (0, 0, 0.25, 0.25, 0.25, 0.25)
TARGET = table(ONE, REST, *[ZERO] * 4)
DRAFTERS = (
    table(REST, REST, *[(0.5, 0, 0.125, 0.125, 0.125, 0.125)] * 4),
    table(REST, REST, *[(0, 0.5, 0.125, 0.125, 0.125, 0.125)] * 4),
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": len(TARGET),
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 2,
    "intermediate_size": 1,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class TableTarget(Runner):
    """A target whose logits are a row of TARGET; its cache holds zeros."""

    def __init__(self) -> None:
        config = make_config(CONFIG, Path("toy"))
        stub: Any = SimpleNamespace(
            config=config, context=config.context, dtype=torch.float64, device=torch.device("cpu")
        )
        super().__init__(stub, tokens=32 * BATCH, page=4, slots=BATCH)

    def forward(
        self, segments: Sequence[Segment], aux_hidden_layers: Sequence[int] = (), keep: bool = True
    ) -> Forward:
        return Forward(TARGET[[segment.tokens[i] for segment in segments for i in segment.want]])


class TableDrafter(Proposer):
    """A drafter that samples a tree from a table; `noise` is the class of its random numbers."""

    width = WIDTH

    def __init__(self, name: str, logits: Tensor, noise: type[Noise]) -> None:
        self.name, self.logits, self.noise = name, logits, noise

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        own = [
            replace(row, noise=self.noise(row.noise.seed, row.noise.root, row.noise.source))
            for row in rows
        ]
        trees = [Tree(row) for row in own]
        for level in range(DEPTH):
            growing = [tree for tree in trees if tree.request.depth > level and tree.frontier]
            if growing:
                after = [tree.draft.tokens[node] for tree in growing for node in tree.frontier]
                grow(growing, self.logits[after], self.width, self.name)
        return [tree.finish(len(self.logits)) for tree in trees]


def emitted(noise: type[Noise]) -> list[list[int]]:
    """Return the texts of COUNT requests under rule `tree`, each with its one-token prompt."""
    parts = [
        TableDrafter(name, logits, noise)
        for name, logits in zip(("first", "second"), DRAFTERS, strict=True)
    ]
    both = Merged(parts)
    engine = Engine(TableTarget(), {part.name: part for part in (*parts, both)})
    engine.rule = RULES["tree"]
    texts: list[list[int]] = []
    for start in range(0, COUNT, BATCH):
        params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
        requests = [
            engine.add([2], replace(params, seed=seed), draft=both.name, depth=DEPTH)
            for seed in range(start, start + BATCH)
        ]
        while engine.busy:
            engine.step_or_raise()
        texts += [list(request.tokens) for request in requests]
    return texts


def compare(noise: type[Noise] = Noise) -> SequentialTest:
    """Test every token after every other against the target."""
    test, target = SequentialTest(TARGET.numel()), TARGET.exp().numpy()
    for tokens in emitted(noise):
        for last, token in itertools.pairwise(tokens):
            hits, probs = np.zeros(target.shape), np.zeros(target.shape)
            hits[last, token], probs[last] = 1, target[last]
            test.add(hits.ravel(), probs.ravel())
    return test


def check_two_drafters(noise: type[Noise] = Noise) -> Finding:
    """Test the engine's output with two drafters in one tree, under the rule `tree`."""
    test = compare(noise)
    text = f"{test.num_tokens} tokens: {test.describe()}"
    details = {"tokens": test.num_tokens, "evidence": test.evidence}
    subject = "tree, two drafters that sample"
    return Finding("rules", subject, not test.rejected, text, details)
