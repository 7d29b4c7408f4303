"""Captured texts: the target's distributions and hidden states along a text, recorded while the
target writes it, and stored on disk until they are learned from again."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from forerun.cli.progress import Tell
from forerun.devices import as_tensor
from forerun.draft.proposer import Reference
from forerun.draft.suffix import Suffix
from forerun.train.data import Example
from forerun.train.losses import Distribution, concatenate, distribution_of, token_log_probs
from forerun.types import Draft, States


@dataclass(frozen=True, slots=True)
class CapturedText:
    """A text of n tokens with the target's outputs along it; m = n - prompt_length of its
    tokens are learned. Rounded to these dtypes where it is stored, more precise right after
    reading.

    Attributes:
        likeliest: int32 [m, k], or None if `log_probs` covers the whole vocabulary.
        log_probs: float16 [m, k + 1] or [m, V], as in `Distribution`.
        token_log_probs: float32 [m], the log-probability of each learned token.
        hidden_states: bfloat16 [layers, n - 1, H].
    """

    example: Example
    likeliest: Tensor | None
    log_probs: Tensor
    token_log_probs: Tensor
    hidden_states: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return all values as named tensors."""
        values = {
            "tokens": torch.tensor(self.example.tokens, dtype=torch.int32),
            "prompt_length": torch.tensor([self.example.prompt_length], dtype=torch.int32),
            "log_probs": self.log_probs.contiguous(),
            "token_log_probs": self.token_log_probs.contiguous(),
            "hidden_states": self.hidden_states.contiguous(),
        }
        return values if self.likeliest is None else values | {"likeliest": self.likeliest}

    @classmethod
    def from_tensors(cls, values: Mapping[str, Tensor]) -> CapturedText:
        """Invert `tensors`."""
        example = Example(tuple(values["tokens"].tolist()), int(values["prompt_length"]))
        names = ("log_probs", "token_log_probs", "hidden_states")
        return cls(example, values.get("likeliest"), *(values[name] for name in names))


class CaptureStore:
    """A directory of captured texts, one file each.

    A file that is missing, damaged or of another text reads as None: it never changes the result of
    a run, only its duration.
    """

    def __init__(self, directory: Path, max_texts: int, tell: Tell) -> None:
        self.directory, self.max_texts, self.tell = directory, max_texts, tell
        self._can_read = self._can_write = False
        self._num_files = 0

    def open(self, keep: bool) -> None:
        """Begin; with `keep`, existing files belong to this run."""
        try:
            if not keep:
                shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(exist_ok=True)
            self._num_files = len(list(self.directory.iterdir()))
            self._can_read = self._can_write = True
        except OSError as error:
            self._stop_writing(error)

    def close(self, remove: bool) -> None:
        """End; with `remove`, delete all files."""
        self._can_read = self._can_write = False
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)

    def read(self, number: int) -> CapturedText | None:
        """Return text `number` of the run, if it is stored."""
        return self._read(self._slot(number), str(number))

    def write(self, number: int, captured: CapturedText) -> None:
        """Store text `number` in place of an older one."""
        self._write(self._slot(number), str(number), captured)

    def find(self, example: Example) -> CapturedText | None:
        """Return the text with these tokens that `add` stored, if there is one."""
        digest = _digest(example)
        return self._read(digest, digest)

    def add(self, captured: CapturedText) -> None:
        """Store a text by its tokens, unless the store is full."""
        digest = _digest(captured.example)
        if self._num_files < self.max_texts and not (self.directory / digest).exists():
            self._write(digest, digest, captured)
            self._num_files += 1

    def _slot(self, number: int) -> str:
        return str(number % self.max_texts)

    def _read(self, name: str, key: str) -> CapturedText | None:
        if not self._can_read:
            return None
        try:
            with safe_open(self.directory / name, "pt") as file:
                if file.metadata() != {"key": key}:
                    return None
                tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
                return CapturedText.from_tensors(tensors)
        except (OSError, SafetensorError, KeyError):
            return None

    def _write(self, name: str, key: str, captured: CapturedText) -> None:
        if not self._can_write:
            return
        work = self.directory / f".{name}"
        try:
            work.write_bytes(save(captured.tensors(), {"key": key}))
            os.replace(work, self.directory / name)
        except OSError as error:
            work.unlink(missing_ok=True)
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self._can_write = False
        self.tell.note(
            f"captured texts are not stored from now on ({error.strerror}): the run takes longer"
        )


def _digest(example: Example) -> str:
    content = str((example.prompt_length, example.tokens))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class RecordedText:
    """Distributions and hidden states recorded while the engine wrote a text of n tokens.

    Attributes:
        first: position of the first distribution; there is one for each position up to n - 2.
        probs: n - 1 - first distributions.
        token_log_probs: float32 [n - 1 - first], of each following token.
        states_from: position of the first hidden state; a prefix from the cache is not shown.
        hidden_states: bfloat16 [layers, n - 1 - states_from, H].
    """

    first: int
    probs: Distribution
    token_log_probs: Tensor
    states_from: int
    hidden_states: Tensor

    def captured(self, example: Example, prefix: CapturedText | None = None) -> CapturedText:
        """Convert to the stored form for as much of the text as `example` has.

        `prefix` contains what was not shown: hidden states up to `states_from`, and distributions
        up to `first` if tokens before that are learned.
        """
        learned = len(example.tokens) - example.prompt_length
        missing = self.first - (example.prompt_length - 1)
        likeliest = None if self.probs.token_ids is None else self.probs.token_ids.int().cpu()
        log_probs = self.probs.log_probs.half().cpu()
        token_probs, states = self.token_log_probs.cpu(), self.hidden_states.cpu()
        if prefix is not None:
            if likeliest is not None and prefix.likeliest is not None:
                likeliest = torch.cat((prefix.likeliest[:missing], likeliest))
            log_probs = torch.cat((prefix.log_probs[:missing], log_probs))
            token_probs = torch.cat((prefix.token_log_probs[:missing], token_probs))
            states = torch.cat((prefix.hidden_states[:, : self.states_from], states), 1)
        return CapturedText(
            example,
            None if likeliest is None else likeliest[:learned],
            log_probs[:learned],
            token_probs[:learned],
            states[:, : len(example.tokens) - 1],
        )


class Recorder(Suffix):
    """A proposer that drafts as `suffix` does and records the target's outputs.

    The engine shows proposers the hidden states of committed tokens and the target's logits before
    any sampling parameter, so nothing has to be read again.

    Attributes:
        finished: texts that have ended since `begin`, by their tokens.
    """

    wants_logits = True
    always_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.finished: dict[tuple[int, ...], RecordedText] = {}
        self._texts: dict[int, _OpenText] = {}
        self._layers: tuple[int, ...] = ()

    def begin(self, layers: Sequence[int], vocab: int, top: int) -> None:
        """Record hidden states of these layers, and distributions over the first `vocab` tokens as
        `distribution_of` returns them. Earlier texts are dropped."""
        self._layers, self.vocab, self.top = tuple(layers), vocab, top
        # Hidden states arrive for committed tokens only, so they tell how much of a draft was
        # accepted. At least one layer is therefore always observed.
        self.aux_hidden_layers = self._layers or (0,)
        self.finished.clear()

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        super().open(slot, tokens, references, tenant)
        self._texts[slot] = _OpenText(root=len(tokens) - 1, first=len(tokens) - 1)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        text = self._texts[slot]
        if text.end == 0:
            text.states_from = start
        text.end = start + len(features[self.aux_hidden_layers[0]])
        if self._layers:
            states = [as_tensor(features[layer]).bfloat16() for layer in self._layers]
            text.states.append(torch.stack(states))

    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        text = self._texts[slot]
        count = text.end - text.root  # accepted nodes of the chain, its root included
        rows = logits[:count, : self.vocab].float()
        probs = distribution_of(rows, self.top)
        text.append_token(draft.tokens[0])
        if count > 1:
            following = torch.tensor(draft.tokens[1:count], device=rows.device)
            inner = probs.at(slice(count - 1))
            text.token_probs.append(token_log_probs(inner, rows[:-1], following))
        text.probs.append(probs)
        # cloned: a view would keep the logits of the whole forward pass alive
        text.last = probs.at(slice(count - 1, count)), rows[-1:].clone()
        text.root = text.end

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        text = self._texts.pop(slot, None)
        if finished is not None and text is not None and text.probs:
            self.finished[tuple(finished)] = text.recorded(finished, bool(self._layers))

    def reset(self) -> None:
        super().reset()
        self._texts.clear()


@dataclass(slots=True)
class _OpenText:
    """A text that is being written.

    Attributes:
        root: position of the next round's root.
        end: position after the last hidden state.
        last: distribution and logits whose following token is not known yet.
    """

    root: int
    first: int
    states_from: int = 0
    end: int = 0
    probs: list[Distribution] = field(default_factory=list)
    token_probs: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    last: tuple[Distribution, Tensor] | None = None

    def append_token(self, token: int) -> None:
        """Note the token that follows the last distribution."""
        if self.last is not None:
            probs, logits = self.last
            token_id = torch.tensor([token], device=logits.device)
            self.token_probs.append(token_log_probs(probs, logits, token_id))

    def recorded(self, tokens: Sequence[int], has_states: bool) -> RecordedText:
        """Return the finished text; the last round may have shown more than the text has."""
        count = sum(len(probs.log_probs) for probs in self.probs)
        if self.first + count < len(tokens):
            self.append_token(tokens[self.first + count])
        probs, learned = concatenate(self.probs), len(tokens) - 1 - self.first
        if has_states:
            states = torch.cat(self.states, 1)
        else:
            states = probs.log_probs.new_zeros(0, self.end - self.states_from, 0)
        return RecordedText(
            self.first,
            probs.at(slice(learned)),
            torch.cat(self.token_probs)[:learned],
            self.states_from,
            states[:, : len(tokens) - 1 - self.states_from].bfloat16(),
        )
