"""The target at work for a drafter: it continues prompts through the engine, and says its laws
along texts.

What it writes is captured in the passes that write it (`recorder`); texts that are given, it reads.
Continuations depend on prompts, seeds and temperature alone (bit by bit where a pass is exact, as
on the native kernels), so a run that is taken up again sees the same texts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.draft.proposer import TargetView, view_of
from forerun.engine.request import Request
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.load import load_tokenizer, pick_device
from forerun.models.config import load_config
from forerun.models.decoder import default_context, longest_context
from forerun.models.hub import DEFAULT, find_model
from forerun.models.tokenizer import Tokenizer
from forerun.models.weights import Source, load_weights
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.train.captured import Captured, Shape
from forerun.train.data import Example
from forerun.train.losses import Law, at_temperature, probs_of, said_of
from forerun.train.recorder import RECORDED, Heard, Recorder
from forerun.train.settings import Training

PAGE = 16
AT_ONCE = 16  # texts continued together
ROOM = 384  # tokens of the longer prompts of tasks, beside a text that is learnt from
LOGITS = 1 << 25  # most logits of one pass
CACHED = "models--"  # what directories of the Hub's cache begin with
BEGINNINGS = 64  # of texts that are remembered: prompts have them in common


@dataclass(slots=True)
class Batch:
    """Texts with the target's laws along them. B texts, N positions: position i says what token i +
    1 is.

    Attributes:
        tokens: [B, N + 1] int64, shorter texts filled up with token 0.
        mask: [B, N] bool, the positions that count: those that say a token behind the context that
            was given.
        law: [B, N] laws; anything finite where the mask is false.
        said: [B, N] log-probability of the token that follows.
        temperature: which the laws are those of; 0 is greedy.
        vocab: tokens that the laws are over: the first so many.
        states: {boundary: [B, N, H]} hidden states of the target with token i read, where a recipe
            wants them.
        view: the target's embedding, norm and head; the head is dense and passes gradients.
    """

    tokens: Tensor
    mask: Tensor
    law: Law
    said: Tensor
    temperature: float
    vocab: int
    states: dict[int, Tensor]
    view: TargetView

    @property
    def positions(self) -> int:
        """How many positions count."""
        return int(self.mask.sum())


class Target:
    """The model to draft for: `tokens` of a text are learnt from, `context` is what it has room
    for. `aux_hidden_layers` are the hidden states that its batches bring along (see `Forward`)."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: str | None, settings: Training) -> None:
        """Load it for texts of up to `settings.tokens` tokens. Raises ConfigError where that cannot
        be."""
        self.name = model  # None is the default model
        self.tokens, self.top, tokens = settings.tokens, settings.top, settings.tokens
        self.path: Path = find_model(model)  # a directory or a GGUF file
        config = load_config(self.path)
        longest = longest_context(config)
        if tokens > longest:
            raise ConfigError(
                f"tokens={tokens} is over what the target can read: give at most {longest}"
            )
        if load_tokenizer(self.path) is None:
            raise ConfigError(
                f"the target in {self.path} has no tokenizer: it cannot read texts to learn from"
            )
        self.context = max(tokens, min(tokens + ROOM, default_context(config)))
        self.llm = LLM(
            model, draft="suffix", device=settings.device, context=self.context, max_rows=AT_ONCE, page=PAGE,
            kv_tokens=AT_ONCE * (tokens + 4 * PAGE), threads=settings.threads,
        )  # fmt: skip
        self.device = pick_device(settings.device)
        self.vocab = self.llm.decoder.config.vocab
        self.recorder = self.llm.engine.proposers[RECORDED] = Recorder()
        self._beginning = functools.lru_cache(BEGINNINGS)(self._read)

    @property
    def recorded(self) -> str:
        """Its name as drafters record it, by which it is found from anywhere: as it was given, or a
        whole path, but the Hub id of what lies in the Hub's cache."""
        given = self.name or DEFAULT
        path = Path(given).expanduser()
        if self.name is None or not path.exists():
            return given
        path = path.absolute()
        cached = next((part for part in path.parts if part.startswith(CACHED)), None)
        return cached.removeprefix(CACHED).replace("--", "/", 1) if cached else str(path)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        assert self.llm.tokenizer is not None
        return self.llm.tokenizer

    @cached_property
    def head(self) -> Tensor:
        """The weight of its head, as it is stored. float32 [V, H]"""
        found: list[Tensor] = []

        def make(part: str, source: Source, bias: Tensor | None) -> None:
            if part == "head":  # all else stays on disk
                found.append(source.weight())

        load_weights(self.llm.decoder.config, self.path, torch.float32, self.device, make)
        return found[0]

    @cached_property
    def view(self) -> TargetView:
        """What modules that are trained may borrow. Its head is the dense one, which passes
        gradients."""

        def head(x: Tensor) -> Tensor:
            logits, cap = F.linear(x, self.head), self.llm.decoder.config.logit_softcap
            return torch.tanh(logits / cap) * cap if cap else logits

        return replace(view_of(self.llm.decoder), head=head)

    def runner(self, slots: int, tokens: int) -> Runner:
        """The target with an empty cache of its own, for `slots` texts of up to `tokens` tokens."""
        return Runner(self.llm.decoder, tokens=slots * (tokens + 4 * PAGE), page=PAGE, slots=slots)

    def shape(self, vocab: int) -> Shape:
        """Of what is captured of its texts, with laws over the first `vocab` tokens."""
        return Shape.of(
            vocab, len(self.aux_hidden_layers), self.llm.decoder.config.hidden, self.top
        )

    def say(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], listen: int = 0
    ) -> list[Request]:
        """What the target says behind each prompt, `AT_ONCE` at a time; with `listen`, `recorder`
        then has what was shown of these texts, with laws over the first so many tokens
        (`heard`)."""
        engine, draft = self.llm.engine, RECORDED if listen else "suffix"
        with self._own_precision():
            self.llm.forget()  # speculation then depends on these prompts alone
            if listen:
                self.recorder.begin(self.aux_hidden_layers, listen, self.top)
            requests = [
                engine.add(list(prompt), how, draft=draft)
                for prompt, how in zip(prompts, params, strict=True)
            ]
            while engine.busy:
                engine.step_or_raise()
        return requests

    def _own_precision(self) -> torch.autocast:
        """It says the same, whatever precision a drafter is trained or judged in around it."""
        return torch.autocast(self.device.type, enabled=False)

    def continued(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float
    ) -> list[Example]:
        """What the target says behind each prompt, up to the end of the text or `tokens` tokens in
        all."""
        return [example_of(request) for request in self._going_on(prompts, seeds, temperature)]

    def written(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, vocab: int
    ) -> list[Captured]:
        """The same with what the target thought meanwhile. Laws are over the first `vocab`
        tokens."""
        requests = self._going_on(prompts, seeds, temperature, listen=vocab)
        return [
            self.captured(example_of(request), self.heard(request), vocab) for request in requests
        ]

    def _going_on(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float,
        listen: int = 0,
    ) -> Iterator[Request]:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=self.tokens - len(prompt))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for at in range(0, len(prompts), AT_ONCE):
            yield from self.say(prompts[at : at + AT_ONCE], params[at : at + AT_ONCE], listen)

    def heard(self, request: Request) -> Heard | None:
        """What was shown of a text of the latest `say`."""
        return self.recorder.heard.get(tuple(request.tokens))

    def captured(self, example: Example, heard: Heard | None, vocab: int) -> Captured:
        """What the target thought of a text that it wrote, or of its beginning. What it was not
        shown is read: what the cache had of a prompt, and laws within it, or before a preemption.
            Laws are over the first `vocab` tokens."""
        if heard is None or heard.first < example.given - 1:
            return self._read(example, self.aux_hidden_layers, vocab)
        lacks_laws = heard.first >= example.given
        count = max(heard.begun, heard.first if lacks_laws else 0)
        if not count:
            return heard.captured(example)
        start = Example(example.tokens[: count + 1], example.given if lacks_laws else count + 1)
        return heard.captured(example, self._beginning(start, self.aux_hidden_layers, vocab))

    def _read(self, example: Example, aux_hidden_layers: tuple[int, ...], vocab: int) -> Captured:
        return apart(self.batch([example], vocab=vocab), [example], aux_hidden_layers)[0]

    @torch.no_grad()
    def batch(
        self, examples: Sequence[Example], temperature: float = 1.0, vocab: int | None = None
    ) -> Batch:
        """The laws along texts, over the first `vocab` tokens (models of one vocabulary may pad it
        differently)."""
        vocab = vocab or self.vocab
        texts: list[Captured] = []
        with self._own_precision():
            for text, logits, states in self._passes(
                examples
            ):  # one after the other: all of them may be too many
                logits = at_temperature(logits[:, :vocab], temperature)
                law = probs_of(logits, self.top)
                said = said_of(
                    law, logits, torch.tensor(text.tokens[text.given :], device=self.device)
                )
                texts.append(Captured(text, law.tokens, law.logs, said, states))
        return self.together(texts, temperature, vocab)

    def together(self, texts: Sequence[Captured], temperature: float, vocab: int) -> Batch:
        """Texts with what it thinks of them, rounded or not, in one batch."""
        width, first = max(len(text.example.tokens) for text in texts), texts[0]
        tokens = torch.zeros((len(texts), width), dtype=torch.int64, device=self.device)
        mask = torch.zeros((len(texts), width - 1), dtype=torch.bool, device=self.device)
        likeliest = (
            None
            if first.likeliest is None
            else tokens.new_zeros((*mask.shape, first.likeliest.shape[1]))
        )
        logs = torch.zeros((*mask.shape, first.logs.shape[1]), device=self.device)
        said = torch.zeros(mask.shape, device=self.device)
        states = torch.zeros(
            (len(first.states), *mask.shape, first.states.shape[2]), device=self.device
        )
        for i, text in enumerate(texts):
            count = len(text.example.tokens)
            counts = slice(text.example.given - 1, count - 1)
            tokens[i, :count] = torch.tensor(text.example.tokens)
            mask[i, counts] = True
            logs[i, counts], said[i, counts] = text.logs, text.said
            states[:, i, : count - 1] = text.states
            if likeliest is not None and text.likeliest is not None:
                likeliest[i, counts] = text.likeliest
        held = dict(zip(self.aux_hidden_layers, states, strict=True))
        return Batch(tokens, mask, Law(likeliest, logs), said, temperature, vocab, held, self.view)

    @torch.no_grad()
    def states(
        self, examples: Sequence[Example], aux_hidden_layers: Sequence[int]
    ) -> list[dict[int, Tensor]]:
        """The hidden states along texts, their last tokens left out: {boundary: [n - 1, H]} of
        each."""
        runner, found = (
            self.runner(len(examples), max(len(example.tokens) for example in examples)),
            [],
        )
        for slot, example in enumerate(examples):
            segment = _reading(runner, slot, example, [])
            features = runner.forward([segment], aux_hidden_layers).features
            found.append({boundary: features[boundary] for boundary in aux_hidden_layers})
        return found

    def _passes(self, examples: Sequence[Example]) -> Iterator[tuple[Example, Tensor, Tensor]]:
        """Of each text the target's logits [m, V] at every position that counts, and the hidden
        states [boundaries, n - 1, H] of all that is read; some texts a pass."""
        longest = max(len(example.tokens) for example in examples)
        at_once = min(max(LOGITS // (longest * self.vocab), 1), len(examples))
        runner = self.runner(at_once, longest)
        for at in range(0, len(examples), at_once):
            group = examples[at : at + at_once]
            segments = [
                _reading(runner, slot, example, range(example.given - 1, len(example.tokens) - 1))
                for slot, example in enumerate(group)
            ]
            forward = runner.forward(segments, self.aux_hidden_layers)
            wanted, read = (
                [len(segment.want) for segment in segments],
                [len(segment.tokens) for segment in segments],
            )
            held = [forward.features[boundary].float() for boundary in self.aux_hidden_layers]
            states = torch.stack(held) if held else forward.logits.new_zeros(0, sum(read), 0)
            yield from zip(
                group,
                torch.split(forward.logits, wanted),
                torch.split(states, read, 1),
                strict=True,
            )
            for segment in segments:
                runner.cache.close(segment.slot)


def example_of(request: Request) -> Example:
    """A text that the target has written, to learn what it said behind its prompt."""
    return Example(tuple(request.tokens), request.prompt_length)


def _reading(runner: Runner, slot: int, example: Example, want: Sequence[int]) -> Segment:
    """A whole text in a slot of its own; nothing follows the last token, so it is not read."""
    read = list(example.tokens[:-1])
    runner.cache.open(slot, [])
    runner.cache.pages.grow(slot, len(read))
    return Segment(slot, read, list(range(-1, len(read) - 1)), list(want))


def apart(
    batch: Batch, examples: Sequence[Example], aux_hidden_layers: Sequence[int]
) -> list[Captured]:
    """A batch text by text, rounded as it is kept."""
    taken = []
    for i, example in enumerate(examples):
        counts, read = slice(example.given - 1, len(example.tokens) - 1), len(example.tokens) - 1
        law, states = (
            batch.law,
            [batch.states[boundary][i, :read] for boundary in aux_hidden_layers],
        )
        taken.append(
            Captured(
                example,
                None if law.tokens is None else law.tokens[i, counts].int().cpu(),
                law.logs[i, counts].half().cpu(),
                batch.said[i, counts].float().cpu(),
                (torch.stack(states) if states else batch.said.new_zeros(0, read, 0))
                .bfloat16()
                .cpu(),
            )
        )
    return taken
