"""Values that the parts of the engine exchange: drafts, verdicts, forward passes, events.

Structure (tokens, parents, paths) is ragged host data with one object per request: nothing is
padded, and nothing depends on the rest of the batch. Everything with a vocabulary axis is a tensor
on the model's device. Letters in shapes: N nodes of a draft, T flat tokens of a forward pass,
M flat positions that need logits, V vocabulary, H hidden size. `docs/glossary.md` explains the
terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from forerun.errors import ForerunError


# Sources of drafts that may hold other requests' text.
MEMORY = "memory"  # copies from earlier requests
RECYCLE = "recycle"  # tables of tokens that the target predicted
RETRIEVAL = "retrieval"  # indexed documents of the operator
OTHERS = (MEMORY, RECYCLE, RETRIEVAL)  # their rejected tokens are not traced
SALT = "\n"  # separates the tenant from the cache salt of its client
NUM_CONFIDENCE_BINS = 16  # of a drafter's probabilities (CONFIDENCE_BINS in the native kernels)
NUM_ALTERNATIVES = 3  # likeliest other tokens that are kept beside each drafted one


# Hidden states [n, H]; numpy arrays in main memory, where they are faster.
States: TypeAlias = "Tensor | np.ndarray"


class Proposal(IntEnum):
    """The way a drafted token was chosen given the nodes before it, which defines its q.

    Attributes:
        DETERMINISTIC: a function of the context: q is one-hot.
        SAMPLED: drawn from `probs[parent]`.
        WITHOUT_REPLACEMENT: drawn from `probs[parent]` without earlier siblings of this kind.
    """

    DETERMINISTIC = 0
    SAMPLED = 1
    WITHOUT_REPLACEMENT = 2


@dataclass(slots=True)
class Draft:
    """One request's draft tree. Node 0 is the root, the last committed token.

    Attributes:
        tokens: token ids, the root's first.
        parents: each node's parent, -1 for the root; a parent precedes its children, and siblings
            are in the order in which they were chosen.
        sources: the name of each node's proposer, "" for the root.
        proposals: how each node was chosen.
        probs: float64 [N, V]; row i is the distribution that the sampled children of node i were
            really drawn from. None if all nodes are deterministic.
        match_length: for copies, the tokens before them that agreed with the text; otherwise 0.
        confidence_bins: for each node but the root, the bin of the probability that its drafter
            gave it, plus NUM_CONFIDENCE_BINS for siblings of its first choice. Empty if unknown.
        path_probs: for each node but the root, the estimated probability that it is accepted with
            all before it; nodes are in descending order then. Empty if unknown.
    """

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
        """Return the tree of a request that does not speculate."""
        return cls([token], [-1], [""], [Proposal.DETERMINISTIC])

    @classmethod
    def chain(cls, root: int, tokens: list[int], source: str, match_length: int = 0) -> Draft:
        """Return a deterministic continuation of the root."""
        n = len(tokens)
        return cls(
            tokens=[root, *tokens],
            parents=list(range(-1, n)),
            sources=["", *[source] * n],
            proposals=[Proposal.DETERMINISTIC] * (n + 1),
            match_length=match_length,
        )

    def first(self, count: int) -> Draft:
        """Return the root and the next `count` nodes.

        Valid only for chains and drafts without sampled nodes: a cut must not depend on draws.
        """
        end = count + 1
        return Draft(
            self.tokens[:end],
            self.parents[:end],
            self.sources[:end],
            self.proposals[:end],
            None if self.probs is None else self.probs[:end],
            self.match_length,
            self.confidence_bins[:count],
            self.path_probs[:count],
        )

    def behind(self, node: int) -> Draft:
        """Return the part of a chain from `node` on, which becomes the root."""
        count = len(self) - node
        return Draft(
            self.tokens[node:],
            list(range(-1, count - 1)),
            ["", *self.sources[node + 1 :]],
            [Proposal.DETERMINISTIC, *self.proposals[node + 1 :]],
            None if self.probs is None else self.probs[node:],
        )

    def add(
        self, token: int, parent: int, source: str, proposal: Proposal = Proposal.DETERMINISTIC
    ) -> int:
        """Append a node below `parent` and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.proposals.append(proposal)
        return len(self.tokens) - 1

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Return each node's distance from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def children(self) -> list[list[int]]:
        """Return the children of each node, in the order in which they were chosen."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return children

    def match_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest path of nodes that spells a prefix of `tokens`."""
        children, path = self.children(), [0]
        for token in tokens:
            nodes = [child for child in children[path[-1]] if self.tokens[child] == token]
            if not nodes:
                break
            path.append(nodes[0])
        return path

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


@dataclass(slots=True)
class Verdict:
    """The decision of a verification rule about one draft.

    `path` is the list of accepted nodes, root first; `tokens` is the accepted tokens (those of
    path[1:]) followed by exactly one drawn from the target. Hence len(tokens) == len(path), which
    is also the number of KV rows that are kept.
    """

    tokens: list[int]
    path: list[int]


@dataclass(slots=True)
class Forward:
    """The result of a forward pass.

    Attributes:
        logits: [M, V], at the requested positions.
        features: hidden states [T, H] by layer index i: the input of layer i, where i = number of
            layers is the output of the last layer. Those of the native kernels are numpy arrays:
            right after a pass an operation of torch takes several times as long as one of numpy.
        experts: int16 [T, layers with experts, used], the experts of each token; None if the model
            has none or does not tell.
        is_cold: True if the pass took longer than its next ones will: nothing is learned from it.
    """

    logits: Tensor
    features: Mapping[int, States] = field(default_factory=dict)
    experts: np.ndarray | None = None
    is_cold: bool = False


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the target at one position, before any sampling parameter.

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability.
        top: log-probabilities of the likeliest tokens, by token id.
        rank: the rank of the token by probability, 1 for the most probable; it is computed for
            prompt tokens only.
    """

    token_id: int
    logprob: float
    top: dict[int, float]
    rank: int | None = None


# One entry per prompt token; None for the first.
PromptLogprobs: TypeAlias = "list[TokenLogprobs | None]"


@dataclass(slots=True)
class Round:
    """The trace of one step of one request: its draft and verdict.

    Attributes:
        step: number of the step.
        draft: the draft tree.
        verdict: the result of verification.
        chances: the target's probability of the token of node i + 1, before any sampling parameter;
            the last entry is that of the bonus token.
        noises: the noise of the same tokens under the coupled rules.
        depth: maximum depth of the draft.
        rate: acceptance rate that the depth policy expected.
        draft_seconds, verify_seconds: durations for the whole batch.
        drafted: the drafter's probability of the token of node i + 1, None if it was not sampled.
            The server keeps only these of `draft.probs`, whose rows have the size of the
            vocabulary.
    """

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

    Attributes:
        request_id: id of the request.
        token_ids: the new tokens.
        sources: for each token the proposer whose draft was accepted, or "" for the target's own.
        pieces: for each token the text that it made printable; empty while a character or a stop
            string is incomplete.
        logprobs: one entry per token if the request asked for them.
        finish_reason: None until the last event, then "stop", "length" or "abort".
        error: the error that ended this request.
        round: the trace of the step, if the request asked for it.
        prompt_logprobs: in the first event, if the request asked for them.
    """

    request_id: int
    token_ids: list[int]
    sources: list[str]
    pieces: list[str]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: ForerunError | None = None
    round: Round | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """The text that became printable with this event."""
        return "".join(self.pieces)
