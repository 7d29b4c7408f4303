"""Checks of the running engine: forward passes, texts and the distribution of sampled tokens.

The engine runs requests with any rule, draft and schedule on empty caches; the target's own logits
come from separate forward passes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import default_rng
from torch import Tensor

from forerun import rng
from forerun.cache.attention import Segment
from forerun.check.report import Finding
from forerun.check.sequential_test import ALPHA, SequentialTest
from forerun.cli.progress import Tell, nothing
from forerun.draft.compose import Merged
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.draft.tree import Tree, grow
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.measure.workloads import excerpts
from forerun.models.config import make_config
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Forward, Proposal, Round
from forerun.verify import RULES, Noise, Rule

PROMPT_TOKENS = 48
MIN_PROMPT_TOKENS = 16
TEMPERATURES = (0.0, 0.8)
CHUNKS = (2, 5, 8, 16)  # numbers of tokens per forward pass
TREE = [-1, 0, 0, 1, 1, 2, 5, 6]  # parents of a small tree
NEAR_TIE = 16.0  # a lead of at most this many times the logit noise is a near tie
SAMPLED_TOKENS = 24  # length of each text of the distribution check
PAGE = 16

# Events of the distribution check at positions with a draft distribution, and without one.
DRAFT_EVENTS = (
    "the target's most likely token",
    "a token that the draft overestimates",
    "the draft's most likely token",
)
TARGET_EVENTS = (
    "the target's most likely token",
    "a token with an even id",
    "the target's second most likely token",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Batch size, prompt tokens per forward pass and depth of drafts of a run."""

    batch_size: int
    chunk: int
    depth: int | str

    def __str__(self) -> str:
        return f"batch size {self.batch_size}, chunks of {self.chunk}, depth {self.depth}"


PLAIN = Schedule(1, 512, 0)
TEXT_SCHEDULES = (Schedule(1, 512, 4), Schedule(8, 16, "auto"), Schedule(3, 7, 8))
SAMPLING_SCHEDULE = Schedule(8, 64, 3)


class TextRequest(NamedTuple):
    """A prompt and the sampling parameters of its continuation."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class Text:
    """Tokens of one continuation and, if traced, each round with its tokens that count."""

    tokens: list[int]
    rounds: list[tuple[Round, list[int]]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of a speculative text from the plain one."""

    prompt: int
    seed: int
    temperature: float
    schedule: str
    position: int  # index of the token in the continuation
    plain: int  # token id; -1 is the end of the text
    speculative: int
    margin: float  # gap between the target's two best scores there, noise included


class EngineChecks:
    """Checks of one model's engine.

    Attributes:
        prompts: token ids of the prompts.
        requests: every prompt at every temperature.
        exact: whether the kernels promise equal bits for every number of tokens per pass.
        logit_noise: largest difference of a logit found by `check_forward`.
    """

    def __init__(self, llm: LLM, num_prompts: int, max_tokens: int) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.exact = isinstance(llm.decoder, NativeDecoder)
        self.logit_noise = 0.0
        self.prompts = _prompts(llm, num_prompts)
        self.requests = [
            _request(prompt, temperature, seed, max_tokens)
            for temperature in TEMPERATURES
            for seed, prompt in enumerate(self.prompts)
        ]

    def generate(
        self,
        requests: Sequence[TextRequest],
        rule: Rule,
        draft: str,
        schedule: Schedule,
        trace: bool = False,
    ) -> list[Text]:
        """Run requests on empty caches and return their texts in order."""
        self.engine.reset()
        self.engine.rule = rule
        self.engine.scheduler.chunk = schedule.chunk
        waiting = list(enumerate(requests))
        running = dict[int, tuple[int, Request]]()
        texts = [Text([], []) for _ in requests]
        while waiting or running:
            while waiting and len(running) < schedule.batch_size:
                index, (prompt, params) = waiting.pop(0)
                request = self.engine.add(
                    list(prompt), params, draft=draft, depth=schedule.depth, trace=trace
                )
                running[request.id] = index, request
            for event in self.engine.step_or_raise():
                index, request = running[event.request_id]
                if event.round:
                    texts[index].rounds.append((event.round, event.token_ids))
                if event.finish_reason:
                    texts[index].tokens = list(request.output)
                    del running[event.request_id]
        return texts

    def logits(self, tokens: Sequence[int], first: int = 0, step: int | None = None) -> Tensor:
        """Return the target's logits after each token from index `first` on.

        Runs on an empty cache, `step` tokens per forward pass (default: all).
        Shape [len(tokens) - first, V].
        """
        runner = self._runner(len(tokens))
        step = step or len(tokens)
        rows = []
        for start in range(0, len(tokens), step):
            chunk = list(tokens[start : start + step])
            want = [i for i in range(len(chunk)) if start + i >= first]
            rows.append(runner.forward([Segment.chain(0, chunk, want)]).logits.clone())
            runner.cache.commit(0, range(len(chunk)))
        return torch.cat(rows)

    def tree_logits(
        self, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Tensor:
        """Return the target's logits after each node of a tree, in one forward pass. [N, V]"""
        runner = self._runner(len(prefix) + len(tokens))
        runner.forward([Segment.chain(0, list(prefix))])
        runner.cache.commit(0, range(len(prefix)))
        nodes = Segment(0, list(tokens), list(parents), list(range(len(tokens))))
        return runner.forward([nodes]).logits.clone()

    def _runner(self, num_tokens: int) -> Runner:
        runner = Runner(self.llm.decoder, tokens=num_tokens + PAGE, page=PAGE, slots=1)
        runner.cache.open(0, [])
        runner.cache.pages.grow(0, num_tokens)
        return runner

    def check_forward(self) -> Finding:
        """Compare logits of passes over several tokens with those of one token at a time.

        On the native kernels every bit must be equal. Elsewhere the largest difference measures
        what the arithmetic adds, and so what a near tie is.
        """
        prompt = self.prompts[0]
        single = self.logits(prompt, step=1)
        differences = [
            _difference(f"{step} tokens per pass", self.logits(prompt, step=step), single)
            for step in (*CHUNKS, len(prompt))
        ]
        half = len(prompt) // 2
        prefix, nodes = prompt[:half], prompt[half : half + len(TREE)]
        tree = Draft(list(nodes), TREE, [], [])
        tree_logits = self.tree_logits(prefix, nodes, TREE)
        for node in range(len(TREE)):
            path = [nodes[i] for i in tree.path_to(node)]
            last = self.logits([*prefix, *path], step=1)[-1:]
            differences.append(
                _difference(f"node {node} of a tree", tree_logits[node : node + 1], last)
            )
        size, where = max(differences, key=lambda difference: difference[0])
        self.logit_noise = size
        details = {"max_difference": size, "where": where, "exact": self.exact}
        what = f"passes over {', '.join(map(str, CHUNKS))} and {len(prompt)} tokens and a tree"
        if size == 0:
            text = f"{what}: equal to passes over one token, bit for bit"
            return Finding("forward", "target", True, text, details)
        text = f"{what} differ from passes over one token by up to {size:.3g} in a logit: {where}"
        if self.exact:
            text += "; the native kernels allow no difference"
        return Finding("forward", "target", not self.exact and math.isfinite(size), text, details)

    @cached_property
    def plain_texts(self) -> list[Text]:
        """Texts of plain decoding, one request at a time."""
        return self.generate(self.requests, RULES["match"], "off", PLAIN)

    def check_texts(
        self, rule: Rule, draft: str, deadline: float = math.inf, tell: Tell = nothing
    ) -> Finding:
        """Compare the texts of one rule and draft with plain decoding, token for token.

        `match` promises equal texts at every temperature, the ratio rules at temperature 0.

        Args:
            rule: the verification rule.
            draft: name of the engine's proposer; "off" batches plain decoding.
            deadline: time (monotonic) after which no further schedule is begun.
            tell: progress.
        """
        subject = f"{rule.name} with {draft}" if draft != "off" else "plain, batched"
        indices = [
            i for i, r in enumerate(self.requests) if rule.name == "match" or r.params.greedy
        ]
        divergences: list[Divergence] = []
        done = 0
        try:
            for schedule in TEXT_SCHEDULES:
                if time.monotonic() > deadline:
                    break
                tell(f"{subject}, {schedule}", done, len(TEXT_SCHEDULES))
                texts = self.generate([self.requests[i] for i in indices], rule, draft, schedule)
                divergences += self._divergences(dict(zip(indices, texts, strict=True)), schedule)
                done += 1
        except AssertionError as error:
            return Finding("texts", subject, False, f"the engine stopped: {error}")
        return self._texts_finding(subject, indices, done, divergences)

    def _divergences(self, texts: dict[int, Text], schedule: Schedule) -> list[Divergence]:
        """Return the first difference of each text from the plain one, if there is any."""
        found = []
        for index, text in texts.items():
            plain = self.plain_texts[index].tokens
            pairs = itertools.zip_longest(plain, text.tokens, fillvalue=-1)
            for position, (expected, emitted) in enumerate(pairs):
                if expected == emitted:
                    continue
                request = self.requests[index]
                temperature = request.params.sampling_temperature
                seed = request.params.seed or 0
                margin = self.margin([*request.prompt, *plain[:position]], temperature, seed)
                prompt = index % len(self.prompts)
                where = (prompt, seed, temperature, str(schedule), position)
                found.append(Divergence(*where, expected, emitted, margin))
                break
        return found

    def margin(self, prefix: Sequence[int], temperature: float, seed: int) -> float:
        """Return the gap between the two best scores after `prefix`, in units of a logit."""
        logits = self.logits(prefix, first=len(prefix) - 1, step=1).double()
        if temperature:
            streams = [Noise(seed, len(prefix) - 1).target(0)]
            logits = rng.perturb(logits / temperature, streams) * temperature
        best = torch.topk(logits[0], 2).values
        return float(best[0] - best[1])

    def _texts_finding(
        self, subject: str, indices: Sequence[int], done: int, found: Sequence[Divergence]
    ) -> Finding:
        params = [self.requests[i].params for i in indices]
        num_texts = len(params) * done
        details = {
            "texts": num_texts,
            "tokens": num_texts * params[0].length_limit,
            "schedules": [str(schedule) for schedule in TEXT_SCHEDULES[:done]],
            "temperatures": sorted({p.sampling_temperature for p in params}),
            "divergences": [asdict(divergence) for divergence in found],
        }
        if not done:
            text = "not compared: no time was left (raise --seconds)"
            return Finding("texts", subject, None, text, details)
        text = f"{num_texts} texts of {params[0].length_limit} tokens"
        if not found:
            return Finding("texts", subject, True, f"{text}: equal to plain decoding", details)
        near_tie = NEAR_TIE * self.logit_noise
        wrong = [d for d in found if not d.margin <= near_tie]
        first = self._describe(min(wrong or found, key=lambda d: d.position))
        if wrong:
            text += f": {len(wrong)} diverge from plain decoding; the first: {first}"
        else:
            text += (
                f": {len(found)} diverge, all at near ties (lead <= {near_tie:.2g}), e.g. {first}"
            )
        return Finding("texts", subject, not wrong, text, details)

    def _describe(self, divergence: Divergence) -> str:
        emitted = self._spell(divergence.speculative)
        expected = self._spell(divergence.plain)
        return (
            f"prompt {divergence.prompt}, temperature {divergence.temperature:g},"
            f" {divergence.schedule}: token {divergence.position} is {emitted} instead of"
            f" {expected}, where the target's best token leads by {divergence.margin:.3g}"
        )

    def _spell(self, token: int) -> str:
        if token < 0:
            return "the end of the text"
        tokenizer = self.llm.tokenizer
        return repr(tokenizer.spell(token)) if tokenizer else str(token)

    def check_distribution(
        self,
        rule: Rule,
        draft: str,
        num_tokens: int,
        deadline: float = math.inf,
        tell: Tell = nothing,
    ) -> Finding:
        """Test tokens sampled at temperature 1 against the target's exact distribution.

        Samples texts until the test rejects, `num_tokens` are tested or the deadline is over.
        """
        subject = f"{rule.name} with {draft}"
        test = SequentialTest(len(DRAFT_EVENTS))
        seeds = itertools.count(1)
        prompts = itertools.cycle(self.prompts)
        try:
            while test.num_tokens < num_tokens and not test.rejected:
                if time.monotonic() >= deadline and test.num_tokens:
                    break
                tell(f"{subject}, {test.num_tokens} tokens", test.num_tokens, num_tokens)
                requests = [
                    _request(next(prompts), 1.0, next(seeds), SAMPLED_TOKENS)
                    for _ in range(SAMPLING_SCHEDULE.batch_size)
                ]
                texts = self.generate(requests, rule, draft, SAMPLING_SCHEDULE, trace=True)
                for request, text in zip(requests, texts, strict=True):
                    self._add_text(test, request, text, rule.coupled)
        except AssertionError as error:
            return Finding("distribution", subject, False, f"the engine stopped: {error}")
        return _distribution_finding(subject, test, TARGET_EVENTS if rule.coupled else DRAFT_EVENTS)

    def _add_text(
        self, test: SequentialTest, request: TextRequest, text: Text, coupled: bool
    ) -> None:
        """Add every token of a text to the test."""
        context = [*request.prompt, *text.tokens][:-1]
        logits = self.logits(context, first=len(request.prompt) - 1)
        target = logits.double().softmax(-1).cpu().numpy()
        drafted: list[np.ndarray | None] = []
        for round_, tokens in text.rounds:
            for node in round_.verdict.path[: len(tokens)]:
                q = None if coupled else draft_probs(round_.draft, node, target.shape[1])
                drafted.append(q)
        for p, q, token in zip(target, drafted, text.tokens, strict=True):
            events = _events(p, q)
            test.add(
                [bool(event[token]) for event in events],
                [float(p[event].sum()) for event in events],
            )


def _request(
    prompt: tuple[int, ...], temperature: float, seed: int, max_tokens: int
) -> TextRequest:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True
    )
    return TextRequest(prompt, params)


def _distribution_finding(subject: str, test: SequentialTest, events: Sequence[str]) -> Finding:
    bound = test.bound()
    details: dict[str, Any] = {"tokens": test.num_tokens, "evidence": test.evidence, "alpha": ALPHA}
    details |= {"bias": dict(zip(events, test.bias, strict=True)), "bias_bound": bound}
    details |= {"expected": dict(zip(events, test.expected, strict=True))}
    text = f"{test.num_tokens} tokens at temperature 1: {test.describe()}"
    if test.rejected:
        worst, words = test.describe_worst()
        text += f"; {events[worst]} {words}"
    else:
        text += (
            f"; bias of the event {events[1]!r}: {100 * test.bias[1]:+.1f} percentage points,"
            f" within {100 * bound:.1f} of the true bias at confidence {1 - ALPHA:.2%}"
        )
    return Finding("distribution", subject, not test.rejected, text, details)


def draft_probs(draft: Draft, node: int, vocab: int) -> np.ndarray | None:
    """Return the drafter's distribution below a node; None without children. [V]

    Deterministic children count as certain. The result depends only on what precedes the children,
    so bets on it are placed before the draw.
    """
    children = draft.children()[node]
    if not children:
        return None
    q = np.zeros(vocab)
    if draft.probs is not None and any(
        draft.proposals[c] is not Proposal.DETERMINISTIC for c in children
    ):
        q += draft.probs[node]
    q[[draft.tokens[c] for c in children if draft.proposals[c] is Proposal.DETERMINISTIC]] = 1.0
    return q


def _events(p: np.ndarray, q: np.ndarray | None) -> list[np.ndarray]:
    """Return masks [V] of DRAFT_EVENTS, or of TARGET_EVENTS where there is no draft."""
    ids = np.arange(len(p))
    if q is None:
        return [ids == p.argmax(), ids % 2 == 0, ids == np.argpartition(p, -2)[-2]]
    return [ids == p.argmax(), q > p, ids == q.argmax()]


def _difference(where: str, several: Tensor, single: Tensor) -> tuple[float, str]:
    """Return the largest difference of two logits and its place; infinity for NaN. [M, V] x 2"""
    if torch.equal(several, single):
        return 0.0, ""
    one, other = several.double(), single.double()
    gaps = (one - other).abs().nan_to_num(nan=torch.inf).masked_fill(one == other, 0.0)
    row, token = divmod(int(gaps.argmax()), gaps.shape[1])
    return float(gaps[row, token]), f"logit of token {token} after position {row}, {where}"


def _prompts(llm: LLM, count: int) -> list[tuple[int, ...]]:
    """Return passages of code that repeat their beginning, so that n-gram lookups find something.

    Raises:
        ConfigError: the context is too short.
    """
    tokens = min(PROMPT_TOKENS, llm.decoder.context // 2)
    if tokens < MIN_PROMPT_TOKENS:
        raise ConfigError(
            f"a context of {llm.decoder.context} tokens is too short to check:"
            f" give --context {2 * MIN_PROMPT_TOKENS} or more"
        )
    if llm.tokenizer is None:
        halves = default_rng(0).integers(llm.decoder.config.vocab, size=(count, tokens // 2))
        return [tuple(int(t) for t in [*half, *half]) for half in halves]
    passages = excerpts(llm.tokenizer.encode, count, 2 * tokens // 3)
    return [(*passage, *passage[: tokens // 3]) for passage in passages]


# The check of several drafters that sample into one tree, which must draw independently of each
# other. The engine drafts, merges, verifies and commits over a toy model with two drafters. The
# probabilities of all three models depend on the last token alone, so each emitted token is tested.
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


def compare_drafters(noise: type[Noise] = Noise) -> SequentialTest:
    """Test every token after every other against the target."""
    test, target = SequentialTest(TARGET.numel()), TARGET.exp().numpy()
    for tokens in emitted(noise):
        for last, token in itertools.pairwise(tokens):
            hits, probs = np.zeros(target.shape), np.zeros(target.shape)
            hits[last, token], probs[last] = 1, target[last]
            test.add(hits.ravel(), probs.ravel())
    return test


def check_two_drafters() -> Finding:
    """Test the engine's output with two drafters in one tree, under the rule `tree`."""
    test = compare_drafters()
    text = f"{test.num_tokens} tokens: {test.describe()}"
    details = {"tokens": test.num_tokens, "evidence": test.evidence}
    subject = "tree, two drafters that sample"
    return Finding("rules", subject, not test.rejected, text, details)
