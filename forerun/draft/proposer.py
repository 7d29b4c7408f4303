"""Proposers: the interface of drafters, their requests, and their view of the target.

A drafter of your own derives from `Proposer` and implements `propose`; `docs/write-a-drafter.md`
has one of thirty lines. Its drafts may be wrong: the target verifies every proposed token.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.draft.automaton import SuffixAutomaton
from forerun.errors import ConfigError, ForerunError, shorten
from forerun.kernels import reference as kernels
from forerun.models.config import TRANSFORMERS, ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.sharding import ShardedDecoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import Linear, PackedMatrix
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, States
from forerun.verify import Noise

if TYPE_CHECKING:
    from forerun.cache.kv import KVCache

State = TypeVar("State")


@dataclass(slots=True)
class DraftRequest:
    """Request for a draft: one request's draft in one step.

    Attributes:
        slot: the request's place in the device tables; the key of the proposer's own state.
        tokens: all committed tokens, prompt and output, read-only; the last one is the draft's
            root.
        params: the request's sampling parameters.
        noise: the step's noise; `noise.target(depth)` is what the target will draw with after a
            node at `depth`.
        depth: maximum depth of the draft, at least 1.
        coupled: the rule compares tokens: all nodes are deterministic, and drawing with the
            target's noise makes them agree more often. Otherwise nodes may be sampled, with
            `Draft.probs` the distributions they were drawn from.
        branching: the draft may be a tree; otherwise it must be a chain.
        confidence_rates: float32 [2 * NUM_CONFIDENCE_BINS], how often tokens are accepted by the
            probability that the drafter gave them; None if the draft must have the depth asked for.
        min_prob: a chain may end where the probability that all of it is accepted, by
            `confidence_rates`, falls below this.
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
    """A text that came with a request and may help to draft its output.

    All completions of a request share it.

    Attributes:
        name: what statistics call drafts from it: prediction or document.
        tokens: the text as token ids.
        start: the number of prompt tokens; the output begins there.
        is_prediction: the output is expected to follow the text from its beginning to its end.
    """

    name: str
    tokens: tuple[int, ...]
    start: int
    is_prediction: bool

    def behind(self, start: int) -> Reference:
        """Return the same text, with the same index, for a prompt of `start` tokens."""
        other = replace(self, start=start)
        # cached_property stores its value there; it would be computed again otherwise.
        vars(other).update({"index": self.index, "packed": self.packed})
        return other

    def build(self) -> None:
        """Compute the inputs that drafting needs, and keep them."""
        _ = self.index, self.packed

    @cached_property
    def packed(self) -> bytes:
        """The tokens as 32-bit integers, for a search of bytes."""
        return array("i", self.tokens).tobytes()

    @cached_property
    def index(self) -> SuffixAutomaton:
        automaton = SuffixAutomaton()
        automaton.extend(self.tokens)
        return automaton


Tokens: TypeAlias = Sequence[int]
Texts: TypeAlias = Sequence[Reference]  # that came with a request


@dataclass(frozen=True, slots=True)
class CopySources:
    """Texts that drafts are copied from.

    Attributes:
        min_match: the fewest tokens that a copy's context has in common with the end of the
            request's text; 0 if nothing is copied.
        texts: those beside the request's own, which only grow, and may be dropped.
    """

    min_match: int = 0
    texts: Sequence[SuffixAutomaton] = ()


class Proposer:
    """Base class of all drafters. Only `propose` must be implemented.

    A drafter that keeps state of a request implements `open` and `close` too, and finds it by
    `DraftRequest.slot`. It reads the committed tokens that it has missed in `propose`: there is no
    special case for accepted, rejected, resumed or paused requests.

    Its attributes belong to the class, or to the instance where they depend on options.

    Attributes:
        name: what statistics call the drafter.
        width: the most nodes per level, for which the engine reserves room.
        extra_nodes: the most nodes beside these, at any depth.
        aux_hidden_layers: the target's hidden states that `observe` wants: i is what enters layer
            i, the number of layers is what leaves the last one.
        wants_logits: `learn` wants the target's logits.
        copies_text: looking up a draft costs the same at any depth, and `Draft.match_length` says
            how long a match it follows.
        ends_chains: chains end by themselves, as `DraftRequest.min_prob` says.
        reports_confidence: drafts have `Draft.path_probs`, by `DraftRequest.confidence_rates`; as
            many nodes are verified as pay.
        always_observes: it is shown every token even while it does not draft for a request.
        overlaps: it drafts on between `begin_overlap` and `end_overlap` while the target verifies.
        wait_seconds: how long `propose` waited for that drafting to end.
        reading_bytes: size of the weights with which it reads tokens that it missed; 0 if it reads
            none.
        merges_drafts: it merges the drafts of its parts into one tree (see `compose`).
        rivals: the drafters of which it uses the one that is measured to be better.
    """

    name = ""
    width = 1
    extra_nodes = 0
    aux_hidden_layers: tuple[int, ...] = ()
    wants_logits = False
    copies_text = False
    ends_chains = False
    reports_confidence = False
    always_observes = False
    overlaps = False
    wait_seconds = 0.0
    reading_bytes = 0
    merges_drafts = False
    rivals: tuple[Proposer, ...] = ()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft per request, at most `depth` deep; `Draft.root` where there is nothing.

        A call must not change what later calls propose for other requests.
        """
        raise NotImplementedError

    def has_draft(self, slot: int, tokens: Sequence[int]) -> bool:
        """Return False if it is known at once that there is nothing to draft behind `tokens`.

        `propose` is not called for the request in this step then, which saves more time than a
        small lookup takes.
        """
        return True

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        """Start a request in `slot`, at first or after a preemption, with its `tokens` so far.

        What is kept of a request after its end may serve requests of the same `tenant` only.
        """

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        """Free the slot. `finished` is the whole text if the request ended, None if it was
        preempted."""

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        """Read the target's hidden states {layer: [n, H]} of committed tokens from `start` on.

        It is called for each layer of `aux_hidden_layers`, once per committed token and in order,
        but not for tokens of a cached prefix.
        """

    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        """Read the target's raw logits [N, V] after each node of a verified draft, accepted or not.

        `tokens` is the committed text, which ends with the draft's root; the draft may be that of
        another proposer. The next forward pass overwrites the logits.
        """

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        """Add a tenant's text that ended in another engine as if it had ended here."""

    def forget(self) -> None:
        """Drop everything kept of requests that have ended."""

    def reset(self) -> None:
        """Drop everything, running requests too: the engine starts over after a failure."""

    def copy_sources(self, slot: int) -> CopySources | None:
        """Return where drafts may be copied from, so that a native call can tell when there may be
        one; None if it cannot."""
        return None if self.copies_text else CopySources()

    def begin_overlap(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        """Draft on while the target verifies `drafts` of requests asked for in this step."""

    def end_overlap(self) -> None:
        """Stop drafting on: the target has verified."""

    def kv(self) -> KVCache | None:
        """Return the drafter's KV cache, if it has one; it may be another's."""
        return None

    def make_room(self, tokens: int) -> None:
        """Start over with a cache of `tokens` tokens, if there is one."""

    def most(self, depth: int) -> int:
        """Return the most nodes of a draft of this depth, without the root."""
        return depth * self.width + self.extra_nodes

    @property
    def parts(self) -> Sequence[Proposer]:
        """The drafters that are asked in turn, each with costs and acceptance of its own."""
        return (self,)


class PerSlotProposer(Proposer, Generic[State]):
    """Base of drafters that draft for one request at a time, from its state in `slots`."""

    def __init__(self) -> None:
        self.slots: dict[int, State] = {}

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.slots.pop(slot, None)

    def reset(self) -> None:
        self.slots.clear()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(request, self.slots[request.slot]) for request in requests]

    def draft(self, request: DraftRequest, state: State) -> Draft:
        raise NotImplementedError


class CompositeProposer(Proposer):
    """Base of drafters made of others, to which it passes on what happens to a request."""

    members: Sequence[Proposer]

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        for part in self.members:
            part.open(slot, tokens, references, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        for part in self.members:
            part.close(slot, finished)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        for part in self.members:
            if part.aux_hidden_layers:
                part.observe(
                    slot, start, {layer: features[layer] for layer in part.aux_hidden_layers}
                )

    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        for part in self.members:
            if part.wants_logits:
                part.learn(slot, tokens, draft, logits)

    def forget(self) -> None:
        for part in self.members:
            part.forget()

    def reset(self) -> None:
        for part in self.members:
            part.reset()


def drafts_of(proposer: Proposer, requests: Sequence[DraftRequest], vocab: int) -> list[Draft]:
    """Ask a proposer for drafts, and check that they satisfy the requests.

    Raises:
        ForerunError: they do not, or the proposer failed. There is no room for a draft that is too
            large, and what it overwrote might belong to other requests.
    """
    try:
        found = proposer.propose(requests)
    except ForerunError:
        raise
    except Exception as error:
        # Clients may see the message, so it has no text of the error.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind, file = type(error).__name__, Path(frame.filename).name
        raise ForerunError(
            f"the drafter {proposer.name!r} failed in {file}, line {frame.lineno}: {kind}"
        ) from error
    if not isinstance(found, list | tuple) or len(found) != len(requests):
        result = f"{len(found)} drafts" if isinstance(found, list | tuple) else shorten(found)
        raise ForerunError(
            f"the drafter {proposer.name!r} was asked for a list of {len(requests)} drafts and gave"
            f" {result}: give one per request, Draft.root(request.tokens[-1]) where there is"
            " nothing to draft"
        )
    for request, draft in zip(requests, found, strict=True):
        try:
            fault = _fault(proposer, request, draft, vocab)
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            fault = f"gave something that is no Draft ({error})"
        if fault:
            raise ForerunError(f"the drafter {proposer.name!r} {fault}")
    return list(found)


def _fault(proposer: Proposer, request: DraftRequest, draft: Draft, vocab: int) -> str:
    """Describe the first error of a draft; "" if it is valid."""
    if not isinstance(draft, Draft):
        return f"gave {shorten(draft)}, which is no Draft: use Draft.root and add, or Draft.chain"
    count = len(draft.tokens)
    lengths = {len(draft.parents), len(draft.sources), len(draft.proposals)}
    if not count or lengths != {count}:
        return (
            f"gave a draft of {count} tokens, {len(draft.parents)} parents, {len(draft.sources)}"
            f" sources, {len(draft.proposals)} proposals: it needs a root, and one of each per node"
        )
    root = request.tokens[-1]
    if draft.tokens[0] != root or draft.parents[0] != -1:
        return (
            f"gave a draft that begins with token {draft.tokens[0]}: its root is"
            f" request.tokens[-1], {root}"
        )
    if not all(0 <= parent < node for node, parent in enumerate(draft.parents[1:], start=1)):
        return "gave a draft with a node before its parent: parents come before their children"
    if not request.branching and draft.parents != list(range(-1, count - 1)):
        return "gave a tree under a rule that takes chains: look at request.branching"
    depth, most = max(draft.depths()), proposer.most(request.depth)
    if depth > request.depth or count - 1 > most:
        return (
            f"was asked for {most} tokens, {request.depth} deep,"
            f" and gave {count - 1}, {depth} deep:"
            " keep to request.depth, and set its width to the most nodes of a level"
        )
    if not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab:
        return f"gave a token that is not in the vocabulary of {vocab}"
    if any(draft.proposals):
        if request.coupled:
            return (
                "gave sampled tokens under a rule that wants Proposal.DETERMINISTIC: look at"
                " request.coupled"
            )
        if not isinstance(draft.probs, np.ndarray) or draft.probs.shape != (count, vocab):
            return (
                "gave sampled tokens without the distributions that they were drawn from: probs is"
                f" [{count}, {vocab}]"
            )
    return ""


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target as its drafters see it: sizes, embedding, last norm, output head.

    Attributes:
        config: its shape.
        hidden, layers, vocab: its sizes.
        context: most tokens of one request.
        table, scale: the embedding [V, H] as it is stored, dense or packed, and the factor of its
            rows.
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
        """Return the input of the first layer, without positions. ids [T] -> float32 [T, H]."""
        return self.table[ids].float() * self.scale

    def __deepcopy__(self, _: Any) -> TargetView:
        return self  # a copy of a drafter borrows from the same target


def view_of(decoder: Decoder | NativeDecoder, form: str | None = "int8") -> TargetView:
    """Return the view of a loaded target; `form` is for drafters on the native kernels."""
    config = decoder.config
    if config.layout == TRANSFORMERS:
        return _view_of_module(decoder)
    norm = decoder.weights.norm

    def normalise(x: Tensor) -> Tensor:
        return kernels.norm(_precise(x), norm.weight, norm.bias, config.norm_eps)

    multiply = _product(decoder)

    def head(x: Tensor) -> Tensor:
        logits, cap = multiply(x), config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    sharded = isinstance(decoder, ShardedDecoder)
    return TargetView(
        config=config,
        hidden=config.hidden,
        layers=config.layers,
        vocab=config.vocab,
        context=decoder.context,
        table=_Divided() if sharded else decoder.weights.embed,  # type: ignore[arg-type]
        scale=config.embed_scale,
        normalise=normalise,
        head=head,
        packed=decoder.weights.head if isinstance(decoder, NativeDecoder) else None,
        softcap=config.logit_softcap or 0.0,
        device=decoder.device,
        form=form if isinstance(decoder, NativeDecoder) else None,
    )


def _view_of_module(decoder: Decoder | NativeDecoder) -> TargetView:
    """Return the view of a target that runs on transformers' module."""
    from forerun.runtime.transformers_backend import TransformersDecoder

    assert isinstance(decoder, TransformersDecoder)
    config = decoder.config
    return TargetView(
        config=config,
        hidden=config.hidden,
        layers=config.layers,
        vocab=config.vocab,
        context=decoder.context,
        table=_Rows(decoder.embed),  # type: ignore[arg-type]
        scale=1.0,
        normalise=decoder.normalise,
        head=decoder.head,
        packed=None,
        softcap=config.logit_softcap or 0.0,
        device=decoder.device,
        form=None,
    )


class _Rows:
    """The embedding of a module, indexed by token ids as a table is."""

    def __init__(self, embed: Callable[[Tensor], Tensor]) -> None:
        self.embed = embed

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


class _Divided:
    """Embedding and head of a target divided between processes: no drafter can share them."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "this drafter shares the embedding or the head of its target, of which each process has"
            " a part: draft with suffix, recycle, retrieval or a draft model, or leave"
            " tensor_parallel out"
        )

    __getitem__ = __call__ = __getattr__ = _refuse


def _product(decoder: Decoder | NativeDecoder) -> Callable[[Tensor], Tensor]:
    """Return the product with the target's own output head; its weights are shared."""
    if isinstance(decoder, ShardedDecoder):
        return _Divided()
    if isinstance(decoder, NativeDecoder):
        packed: Any = decoder.weights.head
        return Linear.of(packed)
    weight = decoder.weights.head.weight
    return lambda x: _precise(kernels.linear(x.to(weight.dtype), weight))


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
