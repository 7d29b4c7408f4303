"""Texts are captured while they are written: the pass that says a token is the one that its law and
states come from.

The engine shows proposers the hidden states of what is committed, and the target's laws before any
sampling parameter. `Recorder` drafts as `suffix` does and keeps both, so that nothing has to be
read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.draft.hidden_states import as_tensor
from forerun.draft.proposer import Reference
from forerun.draft.suffix import Suffix
from forerun.train.captured import Captured
from forerun.train.data import Example
from forerun.train.losses import Law, probs_of, said_of
from forerun.types import States

RECORDED = "recorded"  # what the target's engine calls a recorder


@dataclass(frozen=True, slots=True)
class Heard:
    """What was shown of a text of n tokens.

    Attributes:
        first: the position of the first law; there is one for each position from there to n - 2.
        law: [n - 1 - first] laws.
        said: float32 [n - 1 - first], of each token that follows.
        begun: the position of the first states: those of a prefix that was cached are not shown.
        states: bfloat16 [boundaries, n - 1 - begun, H]
    """

    first: int
    law: Law
    said: Tensor
    begun: int
    states: Tensor

    def behind(self, other: Heard) -> Heard | None:
        """The same with what was shown of a text that this one begins with, the laws of which end
        where these begin; None where they do not."""
        if other.first + len(other.said) != self.first or self.begun < other.begun:
            return None
        shared = other.states[:, : self.begun - other.begun]
        laws, said = joined((other.law, self.law)), torch.cat((other.said, self.said))
        return Heard(other.first, laws, said, other.begun, torch.cat((shared, self.states), 1))

    def captured(self, example: Example, before: Captured | None = None) -> Captured:
        """As it is kept, of as much of the text as `example` has. `before` has what was not shown:
        states up to `begun`, and laws up to `first`, if `example` is learnt from before that."""
        learnt, missing = len(example.tokens) - example.given, self.first - (example.given - 1)
        likeliest = None if self.law.tokens is None else self.law.tokens.int().cpu()
        logs, said, states = self.law.logs.half().cpu(), self.said.cpu(), self.states.cpu()
        if before is not None:
            if likeliest is not None and before.likeliest is not None:
                likeliest = torch.cat((before.likeliest[:missing], likeliest))
            logs, said = (
                torch.cat((before.logs[:missing], logs)),
                torch.cat((before.said[:missing], said)),
            )
            states = torch.cat((before.states[:, : self.begun], states), 1)
        likeliest = None if likeliest is None else likeliest[:learnt]
        return Captured(
            example,
            likeliest,
            logs[:learnt],
            said[:learnt],
            states[:, : len(example.tokens) - 1].contiguous(),
        )


class Recorder(Suffix):
    """Drafts chains as `suffix` does, and keeps what it is shown of texts up to their end.

    Attributes:
        heard: by their tokens, what was shown of texts that have ended since `begin`.
    """

    learns = sees_all = True

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[tuple[int, ...], Heard] = {}
        self._texts: dict[int, _Text] = {}
        self._wanted: tuple[int, ...] = ()

    def begin(self, aux_hidden_layers: Sequence[int], vocab: int, top: int) -> None:
        """From now on keep the states at these boundaries, and laws over the first `vocab` tokens
        as `probs_of` makes them; what was heard is dropped."""
        self._wanted, self.vocab, self.top = tuple(aux_hidden_layers), vocab, top
        self.aux_hidden_layers = self._wanted or (
            0,
        )  # states come for what is committed: they say how much of a draft is
        self.heard.clear()

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        super().open(slot, tokens, references, tenant)
        self._texts[slot] = _Text(len(tokens) - 1, len(tokens) - 1)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        text = self._texts[slot]
        if text.end == 0:
            text.begun = start
        text.end = start + len(features[self.aux_hidden_layers[0]])
        if self._wanted:
            text.states.append(
                torch.stack([as_tensor(features[boundary]).bfloat16() for boundary in self._wanted])
            )

    def learn(
        self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        text = self._texts[slot]
        count = text.end - text.root  # nodes of the chain that stand
        rows = logits[:count, : self.vocab].float()
        law = probs_of(rows, self.top)
        text.follow(tokens[0])
        if count > 1:
            text.said.append(
                said_of(law.at(slice(count - 1)), rows[:-1], _ids(tokens[1:count], rows))
            )
        text.laws.append(law)
        text.last = (
            law.at(slice(count - 1, count)),
            rows[-1:].clone(),
        )  # a view would keep those of the whole pass
        text.root = text.end

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        text = self._texts.pop(slot, None)
        if finished is not None and text is not None and text.laws:
            self.heard[tuple(finished)] = text.ended(finished, len(self._wanted))

    def reset(self) -> None:
        super().reset()
        self._texts.clear()


@dataclass(slots=True)
class _Text:
    """A text that is being written: the position of the next round's root, and what was shown so
    far."""

    root: int
    first: int
    begun: int = 0
    end: int = 0
    laws: list[Law] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    last: tuple[Law, Tensor] | None = (
        None  # law and logits behind which it is not known yet what follows
    )

    def follow(self, token: int) -> None:
        """This token follows the last law."""
        if self.last is not None:
            law, logits = self.last
            self.said.append(said_of(law, logits, _ids([token], logits)))

    def ended(self, tokens: Sequence[int], aux_hidden_layers: int) -> Heard:
        """What was shown of the whole text; a round whose end the text has not reached has shown
        more."""
        heard = sum(len(law.logs) for law in self.laws)
        if self.first + heard < len(tokens):
            self.follow(tokens[self.first + heard])
        laws, count = joined(self.laws), len(tokens) - 1 - self.first
        states = (
            torch.cat(self.states, 1)
            if aux_hidden_layers
            else laws.logs.new_zeros(0, self.end - self.begun, 0)
        )
        return Heard(
            self.first,
            laws.at(slice(count)),
            torch.cat(self.said)[:count],
            self.begun,
            states[:, : len(tokens) - 1 - self.begun].bfloat16(),
        )


def joined(laws: Sequence[Law]) -> Law:
    """Laws behind each other."""
    likeliest = [law.tokens for law in laws if law.tokens is not None]
    return Law(torch.cat(likeliest) if likeliest else None, torch.cat([law.logs for law in laws]))


def _ids(tokens: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(tokens, device=logits.device)
