"""The model to train a drafter for: its texts, its next-token distributions, its hidden states.

Texts that the target writes are captured in the forward passes that write them; texts of the data
are read once. Continuations depend on prompts, seeds and temperature alone (bit by bit where a
forward pass is exact, as with the native kernels), so a resumed run sees the same texts.
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
from forerun.devices import as_tensor
from forerun.draft.proposer import TargetView, view_of
from forerun.engine.request import Request
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.load import load_tokenizer, pick_device
from forerun.models.config import TRANSFORMERS, load_config
from forerun.models.decoder import default_context, longest_context
from forerun.models.hub import DEFAULT, find_model
from forerun.models.parameters import Source
from forerun.models.tokenizer import Tokenizer
from forerun.models.weights import load_weights
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.train.capture import CapturedText, Recorder
from forerun.train.data import Example
from forerun.train.losses import (
    FULL_VOCAB,
    Distribution,
    at_temperature,
    distribution_of,
    token_log_probs,
)
from forerun.train.options import Training

PAGE = 16
BATCH_SIZE = 16  # texts that are continued together
EXTRA_CONTEXT = 384  # tokens for the longer prompts of tasks, beside a training text
MAX_LOGITS = 1 << 25  # logits of one forward pass
HUB_CACHE = "models--"  # prefix of directories in the Hub's cache
CACHED_PREFIXES = 64  # beginnings of texts whose capture is kept: many prompts share them
RECORDED = "recorded"  # name of the recorder in the target's engine
HEADER_BYTES = 1024  # upper bound of the header of a safetensors file of a text


@dataclass(slots=True)
class Batch:
    """Texts with the target's distributions along them. B texts, N positions: position i predicts
    token i + 1.

    Attributes:
        tokens: int64 [B, N + 1], shorter texts padded with token 0.
        mask: bool [B, N], the learned positions: those that predict a token after the prompt.
        probs: [B, N] distributions; anything finite where the mask is false.
        token_log_probs: float32 [B, N], log-probability of the token that follows.
        temperature: temperature of the distributions; 0 is greedy.
        vocab: number of tokens, from 0, that the distributions cover.
        hidden_states: {layer: [B, N, H]} of the target after token i.
        view: the target's embedding, norm and head; the head is dense and passes gradients.
    """

    tokens: Tensor
    mask: Tensor
    probs: Distribution
    token_log_probs: Tensor
    temperature: float
    vocab: int
    hidden_states: dict[int, Tensor]
    view: TargetView

    @property
    def positions(self) -> int:
        """Number of learned positions."""
        return int(self.mask.sum())


class Target:
    """The model to train a drafter for.

    Attributes:
        tokens: maximum number of tokens of a training text.
        context: number of tokens that its cache has room for.
        aux_hidden_layers: layers whose hidden states its batches contain (see `Forward`).
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: str | None, settings: Training) -> None:
        """Load it for texts of up to `settings.tokens` tokens; None is the default model. Raises
        ConfigError where that is not possible."""
        self.name = model
        self.tokens, self.top = settings.tokens, settings.top
        self.path: Path = find_model(model)  # a directory or a GGUF file
        config = load_config(self.path)
        if config.layout == TRANSFORMERS:
            raise ConfigError(
                f"drafters are trained for families of forerun's own decoder, {config.family} runs"
                " on transformers: draft with suffix, recycle, retrieval or a draft model"
            )
        longest = longest_context(config)
        if self.tokens > longest:
            raise ConfigError(
                f"tokens={self.tokens} is over what the target can read: give at most {longest}"
            )
        if load_tokenizer(self.path) is None:
            raise ConfigError(f"the target in {self.path} has no tokenizer to read texts with")
        self.context = max(self.tokens, min(self.tokens + EXTRA_CONTEXT, default_context(config)))
        self.llm = LLM(
            model,
            draft="suffix",
            device=settings.device,
            context=self.context,
            max_rows=BATCH_SIZE,
            page=PAGE,
            kv_tokens=BATCH_SIZE * (self.tokens + 4 * PAGE),
            threads=settings.threads,
        )
        self.device = pick_device(settings.device)
        self.vocab = self.llm.decoder.config.vocab
        self.recorder = self.llm.engine.proposers[RECORDED] = Recorder()
        self._prefix = functools.lru_cache(CACHED_PREFIXES)(self._capture)

    @property
    def recorded_name(self) -> str:
        """The name that drafters record, which finds it from any directory: as it was given, or an
        absolute path, but the Hub id of a model in the Hub's cache."""
        given = self.name or DEFAULT
        path = Path(given).expanduser()
        if self.name is None or not path.exists():
            return given
        path = path.absolute()
        cached = next((part for part in path.parts if part.startswith(HUB_CACHE)), None)
        return cached.removeprefix(HUB_CACHE).replace("--", "/", 1) if cached else str(path)

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
            if part == "head":  # all other tensors stay on disk
                found.append(source.weight())

        load_weights(self.llm.decoder.config, self.path, torch.float32, self.device, make)
        return found[0]

    @cached_property
    def view(self) -> TargetView:
        """View of the target for trained modules; its head is dense and passes gradients."""

        def head(x: Tensor) -> Tensor:
            logits, cap = F.linear(x, self.head), self.llm.decoder.config.logit_softcap
            return torch.tanh(logits / cap) * cap if cap else logits

        return replace(view_of(self.llm.decoder), head=head)

    def runner(self, slots: int, tokens: int) -> Runner:
        """Return the target with its own empty cache for `slots` texts of up to `tokens` tokens."""
        return Runner(self.llm.decoder, tokens=slots * (tokens + 4 * PAGE), page=PAGE, slots=slots)

    def max_stored(self, gigabytes: float, vocab: int) -> int:
        """Return how many captured texts, with distributions over `vocab` tokens, fit on disk."""
        full = vocab <= FULL_VOCAB or self.top >= vocab
        distribution = 2 * vocab if full else 4 * self.top + 2 * (self.top + 1)
        states = 2 * len(self.aux_hidden_layers) * self.llm.decoder.config.hidden
        text = HEADER_BYTES + self.tokens * (4 + distribution + 4 + states)
        return max(int(gigabytes * 1e9) // text, 1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        record_vocab: int = 0,
    ) -> list[Request]:
        """Continue the prompts, `BATCH_SIZE` at a time. With `record_vocab`, record distributions
        over that many tokens and hidden states, for `captured`."""
        engine, draft = self.llm.engine, RECORDED if record_vocab else "suffix"
        with self._full_precision():
            self.llm.forget()  # speculation then depends on these prompts alone
            if record_vocab:
                self.recorder.begin(self.aux_hidden_layers, record_vocab, self.top)
            requests = [
                engine.add(list(prompt), how, draft=draft)
                for prompt, how in zip(prompts, params, strict=True)
            ]
            while engine.busy:
                engine.step_or_raise()
        return requests

    def _full_precision(self) -> torch.autocast:
        """Keep its outputs independent of the precision that a drafter is trained in."""
        return torch.autocast(self.device.type, enabled=False)

    def continue_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float,
        record_vocab: int = 0,
    ) -> Iterator[Request]:
        """Continue prompts to the end of the text or to `tokens` tokens in all, and yield each
        text while its recording lasts (see `generate`)."""
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=self.tokens - len(prompt))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for at in range(0, len(prompts), BATCH_SIZE):
            group = slice(at, at + BATCH_SIZE)
            yield from self.generate(prompts[group], params[group], record_vocab)

    def captured(self, request: Request, example: Example, vocab: int) -> CapturedText:
        """Return the recording of a text of the latest `generate`, or of its beginning.

        What the recorder did not see is read: a prefix that the cache had, distributions within the
        prompt, and everything before a preemption.
        """
        recorded = self.recorder.finished.get(tuple(request.tokens))
        if recorded is None or recorded.first < example.prompt_length - 1:
            return self._capture(example, self.aux_hidden_layers, vocab)
        lacks_probs = recorded.first >= example.prompt_length
        count = max(recorded.states_from, recorded.first if lacks_probs else 0)
        if not count:
            return recorded.captured(example)
        prompt_length = example.prompt_length if lacks_probs else count + 1
        prefix = Example(example.tokens[: count + 1], prompt_length)
        return recorded.captured(example, self._prefix(prefix, self.aux_hidden_layers, vocab))

    def _capture(self, example: Example, layers: tuple[int, ...], vocab: int) -> CapturedText:
        return split_batch(self.batch([example], vocab=vocab), [example], layers)[0]

    @torch.no_grad()
    def batch(
        self, examples: Sequence[Example], temperature: float = 1.0, vocab: int | None = None
    ) -> Batch:
        """Read texts; distributions cover the first `vocab` tokens, since models of one vocabulary
        may pad it differently."""
        vocab = vocab or self.vocab
        texts: list[CapturedText] = []
        with self._full_precision():
            for text, logits, states in self._forward(examples):
                logits = at_temperature(logits[:, :vocab], temperature)
                probs = distribution_of(logits, self.top)
                learned = torch.tensor(text.tokens[text.prompt_length :], device=self.device)
                token_probs = token_log_probs(probs, logits, learned)
                texts.append(
                    CapturedText(text, probs.token_ids, probs.log_probs, token_probs, states)
                )
        return self.collate(texts, temperature, vocab)

    def collate(self, texts: Sequence[CapturedText], temperature: float, vocab: int) -> Batch:
        """Pad captured texts into one batch."""
        width, first = max(len(text.example.tokens) for text in texts), texts[0]
        tokens = torch.zeros((len(texts), width), dtype=torch.int64, device=self.device)
        mask = torch.zeros((len(texts), width - 1), dtype=torch.bool, device=self.device)
        likeliest: Tensor | None = None
        if first.likeliest is not None:
            likeliest = tokens.new_zeros((*mask.shape, first.likeliest.shape[1]))
        log_probs = torch.zeros((*mask.shape, first.log_probs.shape[1]), device=self.device)
        token_probs = torch.zeros(mask.shape, device=self.device)
        layers, _, hidden = first.hidden_states.shape
        states = torch.zeros((layers, *mask.shape, hidden), device=self.device)
        for i, text in enumerate(texts):
            count = len(text.example.tokens)
            learned = slice(text.example.prompt_length - 1, count - 1)
            tokens[i, :count] = torch.tensor(text.example.tokens)
            mask[i, learned] = True
            log_probs[i, learned] = text.log_probs.to(log_probs)
            token_probs[i, learned] = text.token_log_probs.to(token_probs)
            states[:, i, : count - 1] = text.hidden_states.to(states)
            if likeliest is not None and text.likeliest is not None:
                likeliest[i, learned] = text.likeliest.to(likeliest)
        by_layer = dict(zip(self.aux_hidden_layers, states, strict=True))
        probs = Distribution(likeliest, log_probs)
        return Batch(tokens, mask, probs, token_probs, temperature, vocab, by_layer, self.view)

    @torch.no_grad()
    def hidden_states(
        self, examples: Sequence[Example], layers: Sequence[int]
    ) -> list[dict[int, Tensor]]:
        """Return the hidden states along each text without its last token, {layer: [n - 1, H]}."""
        runner = self.runner(len(examples), max(len(example.tokens) for example in examples))
        found = []
        for slot, example in enumerate(examples):
            features = runner.forward([_segment(runner, slot, example, [])], layers).features
            found.append({layer: as_tensor(features[layer]) for layer in layers})
        return found

    def _forward(self, examples: Sequence[Example]) -> Iterator[tuple[Example, Tensor, Tensor]]:
        """Yield each text with the target's logits [m, V] at its learned positions and the hidden
        states [layers, n - 1, H], a few texts at a time so that logits fit into memory."""
        longest = max(len(example.tokens) for example in examples)
        slots = min(max(MAX_LOGITS // (longest * self.vocab), 1), len(examples))
        runner = self.runner(slots, longest)
        for at in range(0, len(examples), slots):
            group = examples[at : at + slots]
            segments = [
                _segment(runner, slot, text, range(text.prompt_length - 1, len(text.tokens) - 1))
                for slot, text in enumerate(group)
            ]
            forward = runner.forward(segments, self.aux_hidden_layers)
            lengths = [len(segment.tokens) for segment in segments]
            layers = [
                as_tensor(forward.features[layer]).float() for layer in self.aux_hidden_layers
            ]
            states = torch.stack(layers) if layers else forward.logits.new_zeros(0, sum(lengths), 0)
            yield from zip(
                group,
                torch.split(forward.logits, [len(segment.want) for segment in segments]),
                torch.split(states, lengths, 1),
                strict=True,
            )
            for segment in segments:
                runner.cache.close(segment.slot)


def example_of(request: Request) -> Example:
    """Return a text that the target has written as an example whose continuation is learned."""
    return Example(tuple(request.tokens), request.prompt_length)


def _segment(runner: Runner, slot: int, example: Example, want: Sequence[int]) -> Segment:
    """A whole text in its own slot. Nothing follows the last token, so it is not read."""
    tokens = list(example.tokens[:-1])
    runner.cache.open(slot, [])
    runner.cache.pages.grow(slot, len(tokens))
    return Segment.chain(slot, tokens, want)


def split_batch(
    batch: Batch, examples: Sequence[Example], layers: Sequence[int]
) -> list[CapturedText]:
    """Split a batch into its texts, rounded as they are stored."""
    texts = []
    for i, example in enumerate(examples):
        count = len(example.tokens) - 1
        learned = slice(example.prompt_length - 1, count)
        states = [batch.hidden_states[layer][i, :count] for layer in layers]
        stacked = torch.stack(states) if states else batch.token_log_probs.new_zeros(0, count, 0)
        likeliest = batch.probs.token_ids
        texts.append(
            CapturedText(
                example,
                None if likeliest is None else likeliest[i, learned].int().cpu(),
                batch.probs.log_probs[i, learned].half().cpu(),
                batch.token_log_probs[i, learned].float().cpu(),
                stacked.bfloat16().cpu(),
            )
        )
    return texts
