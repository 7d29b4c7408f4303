"""What a proposer is and what it may know of a request.

A proposer keeps its own state by slot and reads, when asked, whatever committed tokens it has
missed (its lag): there is no callback for "accepted" and no special case for "all accepted". It
never sees the engine, the target's cache or a verdict, and any failure to propose is a root without
children, never an error."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.draft.automaton import SuffixAutomaton
from forerun.errors import ConfigError, ForerunError, shorten
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.sharding import ShardedDecoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import Linear, PackedMatrix
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, States
from forerun.verify import Noise


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target as its drafters see it.

    Attributes:
        config: its shape.
        hidden, layers, vocab: its sizes.
        context: most tokens of one request.
        table, scale: the embedding [V, H] as it is stored, dense or packed, and what its rows are
            multiplied with.
        normalise: the norm before its head, [T, H] -> [T, H] in float32 at least.
        head: its head: states that are normalised, [T, H] -> logits [T, V] in float32 at least.
        packed, softcap: its head on the native kernels, None where they do not run, and what bounds
            its logits, or 0.
        device: where states come from.
        form: in which its drafters compute natively (their precision never changes the text); None
            is torch.
    """

    config: ModelConfig
    hidden: int
    layers: int
    vocab: int
    context: int
    table: Tensor | PackedMatrix
    scale: float
    normalise: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    packed: PackedMatrix | None
    softcap: float
    device: torch.device
    form: str | None

    def embed(self, ids: Tensor) -> Tensor:
        """What enters its first layer for a token, position apart. ids [T] -> float32 [T, H]"""
        return self.table[ids].float() * self.scale

    def __deepcopy__(self, _: Any) -> TargetView:
        return self  # a copy of a drafter borrows from the same target


def view_of(decoder: Decoder | NativeDecoder, form: str | None = "int8") -> TargetView:
    """The view of a loaded target; `form` for its drafters where the native kernels run."""
    config, norm = decoder.config, decoder.weights.norm

    def normalise(x: Tensor) -> Tensor:
        return kernels.norm(_precise(x), norm.weight, norm.bias, config.norm_eps)

    multiply = _product(decoder)

    def head(x: Tensor) -> Tensor:
        logits, cap = multiply(x), config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    return TargetView(
        config=config,
        hidden=config.hidden,
        layers=config.layers,
        vocab=config.vocab,
        context=decoder.context,
        table=_Divided() if isinstance(decoder, ShardedDecoder) else decoder.weights.embed,  # type: ignore[arg-type]
        scale=config.embed_scale,
        normalise=normalise,
        head=head,
        packed=decoder.weights.head if isinstance(decoder, NativeDecoder) else None,
        softcap=config.logit_softcap or 0.0,
        device=decoder.device,
        form=form if isinstance(decoder, NativeDecoder) else None,
    )


class _Divided:
    """The embedding and the head of a target that several processes have parts of: no drafter can
    share them."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "this drafter shares the embedding or the head of its target, of which each process has a part: draft with"
            " suffix, recycle, retrieval or a draft model, or leave tensor_parallel out"
        )

    __getitem__ = __call__ = __getattr__ = _refuse


def _product(decoder: Decoder | NativeDecoder) -> Callable[[Tensor], Tensor]:
    """The product with the target's own head, its weights shared."""
    if isinstance(decoder, ShardedDecoder):
        return _Divided()
    if isinstance(decoder, NativeDecoder):
        packed: Any = decoder.weights.head
        return Linear.of(packed)
    weight = decoder.weights.head.weight
    return lambda x: _precise(kernels.linear(x.to(weight.dtype), weight))


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


Kept = TypeVar("Kept")


@dataclass(slots=True)
class DraftRequest:
    """The view of one request a proposer gets for one round.

    Attributes:
        slot: the request's place in the device tables; the key of the proposer's own state.
        tokens: all committed tokens, prompt and output, read-only; the last one is the root.
        params: the request's sampling parameters, in case the proposer draws as the target will.
        noise: the round's noise; `noise.target(depth)` is what the target will draw with after a
            node at `depth`.
        depth: how deep the draft may be, at least 1.
        coupled: the rule matches tokens: every node is GIVEN, and sharing the target's noise pays.
            Otherwise nodes may be SAMPLED, with `Draft.probs` the law they were really drawn from.
        branching: the rule takes trees; otherwise the draft must be a chain.
        stands, floor: a chain may end where the chance that it stands falls below `floor`, a
            product of what `stands` says of its tokens (see `ConfidenceBins`). None, where it may
            not: the depth was asked for.
    """

    slot: int
    tokens: Sequence[int]
    params: SamplingParams
    noise: Noise
    depth: int
    coupled: bool = True
    branching: bool = True
    confidence_rates: array[float] | None = None
    min_prob: float = 0.0


@dataclass(frozen=True)
class Reference:
    """A text that came with a request and may help to draft its output. All completions of a
    request share it.

    Attributes:
        name: what statistics call drafts from it: prediction or document.
        tokens: the text as token ids.
        start: how many tokens the prompt has; the output begins there.
        whole: the output is expected to follow the text from its beginning to its end.
    """

    name: str
    tokens: tuple[int, ...]
    start: int
    whole: bool

    def behind(self, start: int) -> Reference:
        """The same text for a prompt of `start` tokens, with the same index."""
        other = replace(self, start=start)
        vars(other).update(
            {"index": self.index, "packed": self.packed}
        )  # what cached_property would make again
        return other

    @cached_property
    def packed(self) -> bytes:
        """Its tokens as 32-bit integers, for the search of bytes."""
        return array("i", self.tokens).tobytes()

    @cached_property
    def index(self) -> SuffixAutomaton:
        """Its suffix automaton: to make it takes some microseconds a token."""
        automaton = SuffixAutomaton()
        for token in self.tokens:
            automaton.append(token)
        return automaton


class Proposer:
    """Base of all proposers.

    Attributes:
        name: what statistics call it.
        width: the most nodes of a level; room is kept for so many,
        beside: and for so many more, wherever they stand.
        boundaries: the target's hidden states it wants: i enters layer i, the number of layers is
            what left the last.
        stops: it ends chains by itself, as `DraftRequest.floor` says.
        weighs: it says of each node how likely it is to stand (`Draft.chances`), by
            `DraftRequest.stands`; as many of them are verified as pay.
        learns: it wants the target's laws, too.
        merges: it may make one draft of what several say.
        sees_all: what it keeps of a request is more than drafts need: it is shown everything,
            whether it drafts or not.
        copies: to look what it has takes the same however deep, and `Draft.match` says what that is
            worth.
        rivals: those of its parts of which only the best is asked, who might draft where others do.
        ahead: it drafts on while the target verifies, between `begin_ahead` and `end_ahead`,
        waited: and so long `propose` waited for what goes on, in seconds.
    """

    name = ""
    width = 1
    extra_nodes = 0
    ends_chains = False
    reports_confidence = False
    wants_logits = False
    merges_drafts = False
    always_observes = False
    copies_text = False
    overlaps = False
    wait_seconds = 0.0
    aux_hidden_layers: tuple[int, ...] = ()
    rivals: tuple[Proposer, ...] = ()

    def most(self, depth: int) -> int:
        """The most nodes of a draft so deep, the root apart."""
        return depth * self.width + self.beside

    @property
    def parts(self) -> Sequence[Proposer]:
        """Those who are asked in order until one has a draft, each with costs and an acceptance of
        its own."""
        return (self,)

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        """A request was given `slot`, first or after a preemption; `tokens` are all it has so far.
        What is kept of a request that has ended may serve requests of the same `tenant` alone."""

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        """The slot is free again. `finished` is the whole text if the request ended, None if it was
        preempted."""

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        """What the target thought of tokens that were just committed: {boundary: [n, H]} of
        positions `start` and on.

        Comes for every boundary asked for, once for each committed token, in order; not for those
        of a cached prefix."""

    def learn(
        self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        """What the target said in a round, before any sampling parameter: logits [N, V] behind each
        of `tokens`, which are the root and whatever was drafted, with the token that stands
        `before` it (-1 where there is none). They are overwritten by the next pass."""

    def kv(self) -> KVCache | None:
        """The cache that it keeps of requests, if it has one; it may be another's."""
        return None

    def make_room(self, tokens: int) -> None:
        """Start over with a cache of so many tokens, if it has one; what it shares has been made
        anew."""

    def begin_ahead(self, rows: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        """The target is about to verify these drafts, of rows that it was asked for in this step.
        Only for who is `ahead`."""

    def end_ahead(self) -> None:
        """The target has verified them."""

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        """A text of a tenant has ended elsewhere: what `close` keeps of one that ended here may be
        kept of it."""

    def forget(self) -> None:
        """Drop whatever was kept of requests that have ended."""

    def reset(self) -> None:
        """Drop everything, running requests too: the engine starts over after a failure."""

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a row, at most `row.depth` deep. Must not change what a later call would
        propose for others."""
        raise NotImplementedError


def drafts_of(proposer: Proposer, rows: Sequence[DraftRequest], vocab: int) -> list[Draft]:
    """Ask a proposer for drafts, and check that they are what was asked for.

    Raises:
        ForerunError: they are not: there is no room for a draft that is too large, and what it
            overwrote might belong to other requests.
    """
    found = proposer.propose(rows)
    if not isinstance(found, list | tuple) or len(found) != len(rows):
        gave = f"{len(found)} drafts" if isinstance(found, list | tuple) else shorten(found)
        raise ForerunError(
            f"the drafter {proposer.name!r} was asked for a list of {len(rows)} drafts and gave {gave}: give one for"
            " each row, Draft.root(row.tokens[-1]) where there is nothing to draft"
        )
    for row, draft in zip(rows, found, strict=True):
        try:
            fault = _fault(proposer, row, draft, vocab)
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            fault = f"gave something that is no Draft ({error})"
        if fault:
            raise ForerunError(f"the drafter {proposer.name!r} {fault}")
    return list(found)


def _fault(proposer: Proposer, row: DraftRequest, draft: Draft, vocab: int) -> str:
    """What is wrong with a draft; "" where nothing is."""
    if not isinstance(draft, Draft):
        return f"gave {shorten(draft)}, which is no Draft: make one with Draft.root and add, or with Draft.chain"
    count = len(draft.tokens)
    if not count or not count == len(draft.parents) == len(draft.sources) == len(draft.proposals):
        lengths = f"{count} tokens, {len(draft.parents)} parents, {len(draft.sources)} sources, {len(draft.proposals)} laws"
        return f"gave a draft of {lengths}: it needs a root, and one of each for every node"
    if draft.tokens[0] != row.tokens[-1] or draft.parents[0] != -1:
        return f"gave a draft that begins with token {draft.tokens[0]}: its root is row.tokens[-1], {row.tokens[-1]}"
    if not all(0 <= parent < node for node, parent in enumerate(draft.parents[1:], start=1)):
        return "gave a draft with a node before its parent: parents come before their children"
    if not row.branching and draft.parents != list(range(-1, count - 1)):
        return "gave a tree under a rule that takes chains: look at row.branching"
    reach, most = max(draft.depths()), proposer.most(row.depth)
    if reach > row.depth or count - 1 > most:
        return (
            f"was asked for {most} tokens, {row.depth} deep, and gave {count - 1}, {reach} deep: keep to row.depth, and"
            " set its width to the most nodes of a level"
        )
    if not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab:
        return f"gave a token that is not in the vocabulary of {vocab}"
    if any(draft.proposals):
        if row.coupled:
            return "gave sampled tokens under a rule that wants Law.GIVEN: look at row.coupled"
        if not isinstance(draft.probs, np.ndarray) or draft.probs.shape != (count, vocab):
            return f"gave sampled tokens and not the laws that they were drawn from: probs is [{count}, {vocab}]"
    return ""


class PerSlotProposer(Proposer, Generic[Kept]):
    """Base of those that draft for one request at a time, from what they keep of it in `slots`."""

    def __init__(self) -> None:
        self.slots: dict[int, Kept] = {}

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.slots.pop(slot, None)

    def reset(self) -> None:
        self.slots.clear()

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(row, self.slots[row.slot]) for row in rows]

    def draft(self, row: DraftRequest, kept: Kept) -> Draft:
        """What `propose` says for one of its rows."""
        raise NotImplementedError


class CompositeProposer(Proposer):
    """Base of those made of others, which are `told` what happens to a request."""

    told: Sequence[Proposer]

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        for part in self.told:
            part.open(slot, tokens, references, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        for part in self.told:
            part.close(slot, finished)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        for part in self.told:
            if part.aux_hidden_layers:
                part.observe(slot, start, {b: features[b] for b in part.aux_hidden_layers})

    def learn(
        self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        for part in self.told:
            if part.learns:
                part.learn(slot, before, tokens, logits)

    def forget(self) -> None:
        for part in self.told:
            part.forget()

    def reset(self) -> None:
        for part in self.told:
            part.reset()
