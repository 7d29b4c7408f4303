"""What travels between the parts: drafts, verdicts, forward passes, events.

Structure (tokens, parents, paths) is host data, one object a request, ragged: nothing is padded and
nothing depends on what else is in the batch. Whatever has a vocabulary axis is a tensor on the
model's device.
Letters: N nodes of a draft, T flat tokens of a pass, M flat positions that need logits, V
vocabulary, H hidden."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from forerun.errors import ForerunError


MEMORY = "memory"  # the source of drafts that come from other requests than the one they are for,
RECYCLE = "recycle"  # and of those that may: from what the target has thought,
RETRIEVAL = "retrieval"  # or from documents that the operator has
OTHERS = (MEMORY, RECYCLE, RETRIEVAL)  # what is not told of where it does not stand
SALT = "\n"  # stands in a tenant between a client and whatever it tells its requests apart by
NUM_CONFIDENCE_BINS = 16  # parts of a probability that are told apart (SURE in the native kernels)
BESIDE = 3  # tokens that a native round thinks of beside each that it says, at most (BESIDE there)


States: TypeAlias = (
    "Tensor | np.ndarray"  # hidden states [n, H]; in main memory numpy's, which is sooner there
)


class Proposal(IntEnum):
    """How a drafted token was drawn, given everything drafted before it: what its q is."""

    DETERMINISTIC = 0  # a function of the context: q is one-hot
    SAMPLED = 1  # drawn from probs[parent]
    WITHOUT_REPLACEMENT = 2  # drawn from probs[parent] without its earlier siblings drawn so


@dataclass(slots=True)
class Draft:
    """One request's draft tree. Node 0 is the root, the last committed token; a parent precedes its
    children.

    `parents[0]` is -1; siblings stand in the order in which they were chosen. `probs` [N, V]
    float64 holds, for node i, the law its SAMPLED or WITHOUT_REPLACEMENT children were really drawn
    from; None when all are GIVEN. `match` says of copied tokens how many before them agreed with
    the text, 0 where nothing was copied; `sure` of each node but the root, where it is known, the
    sixteenth that the probability falls into which its drafter gave it, 16 higher for those that
    stand beside its first choice, and `chances` how likely it is to stand with all before it, where
    nodes come in that order."""

    tokens: list[int]
    parents: list[int]
    sources: list[str]
    proposals: list[Proposal]
    probs: np.ndarray | None = None
    match_length: int = 0
    confidence_bins: list[int] = field(default_factory=list)
    path_probs: list[float] = field(default_factory=list)

    @classmethod
    def root(cls, token: int) -> Draft:
        """The tree of a request that does not speculate."""
        return cls([token], [-1], [""], [Proposal.DETERMINISTIC])

    @classmethod
    def chain(cls, root: int, tokens: list[int], source: str, match_length: int = 0) -> Draft:
        """A deterministic continuation of the root."""
        n = len(tokens)
        return cls(
            [root, *tokens],
            list(range(-1, n)),
            ["", *[source] * n],
            [Proposal.DETERMINISTIC] * (n + 1),
            match_length=match_length,
        )

    def first(self, count: int) -> Draft:
        """The root and the `count` nodes behind it, of a chain or of a draft whose tokens are
        GIVEN."""
        end = count + 1
        parts = self.tokens[:end], self.parents[:end], self.sources[:end], self.proposals[:end]
        probs = None if self.probs is None else self.probs[:end]
        return Draft(
            *parts,
            probs,
            match_length=self.match_length,
            confidence_bins=self.confidence_bins[:count],
            path_probs=self.path_probs[:count],
        )

    def behind(self, node: int) -> Draft:
        """What stands behind a node of a chain, of which that is the root then."""
        count = len(self) - node
        probs = None if self.probs is None else self.probs[node:]
        sources, proposals = (
            ["", *self.sources[node + 1 :]],
            [Proposal.DETERMINISTIC, *self.proposals[node + 1 :]],
        )
        return Draft(self.tokens[node:], list(range(-1, count - 1)), sources, proposals, probs)

    def add(
        self, token: int, parent: int, source: str, proposal: Proposal = Proposal.DETERMINISTIC
    ) -> int:
        """Append a node below `parent`; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.proposals.append(proposal)
        return len(self.tokens) - 1

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def children(self) -> list[list[int]]:
        """The children of each node, in the order in which they were chosen."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return children

    def match_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that say these tokens one by one, from the root on, as far as there are any."""
        children, path = self.children(), [0]
        for token in tokens:
            nodes = [child for child in children[path[-1]] if self.tokens[child] == token]
            if not nodes:
                break
            path.append(nodes[0])
        return path

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


@dataclass(slots=True)
class Verdict:
    """What a rule decided about one draft.

    `path` is the nodes kept, root first; `tokens` is the accepted tokens (those of path[1:])
    followed by exactly one drawn from the target. So len(tokens) == len(path), which is also the
    number of KV rows that survive."""

    tokens: list[int]
    path: list[int]


@dataclass(slots=True)
class Forward:
    """What one pass of the model gives: logits [M, V] of the wanted positions, features {boundary:
    [T, H]}.

    Boundary i is the hidden state that enters layer i; boundary `layers` is what the last layer
    left."""

    logits: Tensor
    features: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities the target gave at one position, before any sampling parameter.
    `rank` is the place of the token among all by probability, 1 for the likeliest; it is worked out
    for tokens of a prompt only."""

    token_id: int
    logprob: float
    top: dict[int, float]
    rank: int | None = None


PromptLogprobs: TypeAlias = (
    "list[TokenLogprobs | None]"  # an entry for each token of a prompt; None for the first
)


@dataclass(slots=True)
class Round:
    """One step of one request, kept for whoever wants to watch: what was drafted and what became of
    it.

    `chances[i]` is the probability the target gave the token of node i + 1 (its own law, before any
    sampling parameter) and `noises[i]` the noise of that token under the coupled rules; the last
    entry of both is the bonus token's. `drafted[i]` is the probability its drafter gave that token,
    None where it was not drawn; the server keeps that alone of `draft.probs`, which are as large as
    the vocabulary. `depth` is how deep it was allowed to be, `rate` the acceptance the depth policy
    expected. Seconds are those of the whole step."""

    step: int
    draft: Draft
    verdict: Verdict
    chances: list[float]
    noises: list[float]
    depth: int
    rate: float
    draft_seconds: float
    verify_seconds: float
    drafted: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Event:
    """New tokens of one request, as they leave the engine.

    `sources[i]` names the proposer whose drafted token was accepted, or is "" where the token is
    the target's own draw; `pieces[i]` is the text it made printable (none while a character or a
    stop string is unfinished). `finish_reason` is None until the last event ("stop", "length",
    "abort"); `error` is what ended this request and no other.
    """

    request_id: int
    token_ids: list[int]
    sources: list[str]
    pieces: list[str]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: ForerunError | None = None
    round: Round | None = None  # where the request asked to be traced
    prompt_logprobs: PromptLogprobs | None = (
        None  # in the first event, where the request asked for them
    )

    @property
    def text(self) -> str:
        """What became printable with this event."""
        return "".join(self.pieces)
