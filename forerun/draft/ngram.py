"""Drafts from n-grams: prompt lookup (`NGram`) and lookahead decoding (`Lookahead`).

Prompt lookup copies the continuation of the last few tokens' previous occurrence.

Lookahead decoding (2402.02057): the target's predictions after guesses are the next guesses, and
the n-grams found in this way are drafted. The target reads a window of guesses after the text in
every forward pass, and what it predicts after each of them replaces the guess of the next position:
parallel Jacobi iteration. The tokens by which a guess came about, each predicted from the one
before, are its trail. A trail of n tokens is an n-gram of text as the target would write it, though
it may belong somewhere else; it is kept in a pool, together with those of the text itself, and
drafted when its first token is the last one of the text. The window and the n-grams are one tree,
so that any verification rule applies.

The paper reads a window of two dimensions, the guesses of the last n - 1 iterations. Here a pass
reads the latest ones only, a fraction of the nodes. N-grams are continued by others that begin with
their last tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from torch import Tensor

from forerun.draft.proposer import DraftRequest, PerSlotProposer, Texts, Tokens
from forerun.kernels.draw import sample_tokens
from forerun.sampling.params import GREEDY, Sampling
from forerun.types import Draft
from forerun.verify import Noise


@dataclass(slots=True)
class _NGramIndex:
    """`next_index[ngram]` is the index of the token that followed its last occurrence."""

    next_index: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class NGram(PerSlotProposer[_NGramIndex]):
    """Proposes the continuation of the most recent occurrence of the longest suffix of
    `longest`..`shortest` tokens. Indexing costs a few dictionary writes per token."""

    name = "ngram"
    copies_text = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        super().__init__()
        self.sizes = range(longest, shortest - 1, -1)

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.slots[slot] = _NGramIndex()

    def draft(self, request: DraftRequest, state: _NGramIndex) -> Draft:
        tokens = request.tokens
        # An n-gram is indexed once the token after it is known.
        for end in range(max(state.num_indexed, 1), len(tokens)):
            for size in self.sizes:
                if size <= end:
                    state.next_index[tuple(tokens[end - size : end])] = end
        state.num_indexed = len(tokens)
        for size in self.sizes:
            start = state.next_index.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                copied = copy_from(tokens, start, request.depth)
                return Draft.chain(tokens[-1], copied, self.name, size)
        return Draft.root(tokens[-1])


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start`; past the end the copy continues with itself, as a loop
    would."""
    return list(islice(cycle(tokens[start : start + count]), count))


MAX_KEYS = 2048  # first tokens of n-grams that a request keeps
MAX_WIDTH = 4  # nodes per level of a tree, on average


class NGramPool:
    """The most recent n-grams of each first token.

    At most MAX_KEYS first tokens are kept; the one that got no n-gram for longest is dropped.
    """

    def __init__(self, size: int, per_token: int) -> None:
        """Keep `per_token` n-grams of `size` tokens for each first token."""
        self.size = size
        self.per_token = per_token
        # By first token: the other tokens of its n-grams, the most recent n-gram last.
        self._rests: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._rests.values()))

    def add(self, ngram: Sequence[int]) -> None:
        """Make an n-gram the most recent one."""
        first, rest = ngram[0], tuple(ngram[1:])
        rests = self._rests.setdefault(first, [])
        self._rests.move_to_end(first)
        if rest in rests:
            rests.remove(rest)
        rests.append(rest)
        del rests[: -self.per_token]
        if len(self._rests) > MAX_KEYS:
            self._rests.popitem(last=False)

    def rests(self, token: int) -> list[tuple[int, ...]]:
        """Return what followed a token, the most recent first."""
        return self._rests.get(token, [])[::-1]

    def extend(self, path: list[int], length: int) -> None:
        """Append tokens to a path until it has `length` tokens or nothing is known to follow.

        The n-gram that agrees with most tokens at the end of the path is appended.
        """
        while len(path) < length and (found := self._continuation(path)):
            path += found[: length - len(path)]

    def _continuation(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the end of an n-gram that begins with the last tokens of the path, () if none."""
        for overlap in range(min(self.size - 1, len(path)), 0, -1):
            first, *others = path[-overlap:]
            for rest in self.rests(first):
                if list(rest[: overlap - 1]) == others:
                    return rest[overlap - 1 :]
        return ()


@dataclass(slots=True)
class _LookaheadState:
    """State of one request: n-grams and guesses that its forward passes gave.

    Attributes:
        pool: n-grams of its text and of trails.
        trails: by position after the text, the guess for it at the end of its trail.
        num_read: committed tokens whose n-grams are in the pool.
        seed: the seed of the noise that the target draws with; None before the first draft.
        sampling: how guesses are drawn.
    """

    pool: NGramPool
    trails: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_read: int = 0
    seed: int | None = None
    sampling: Sampling = GREEDY


class Lookahead(PerSlotProposer[_LookaheadState]):
    """Drafts a tree of the Jacobi window and the pool's n-grams behind the last token.

    Where the rule compares tokens (`DraftRequest.coupled`), guesses are drawn with the noise that
    the target will draw with at their position; otherwise they are the likeliest tokens. State
    belongs to one request and ends with it.
    """

    name = "lookahead"
    wants_logits = True

    def __init__(self, window: int = 8, ngram: int = 4, pool: int = 6) -> None:
        """Guess `window` positions; keep `pool` n-grams of `ngram` tokens for each first token.

        No draft is deeper than the window.
        """
        super().__init__()
        self.window = window
        self.ngram = ngram
        self.pool = pool
        self.width = min(1 + pool, MAX_WIDTH)

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.slots[slot] = _LookaheadState(NGramPool(self.ngram, self.pool))

    def draft(self, request: DraftRequest, state: _LookaheadState) -> Draft:
        state.seed = request.noise.seed
        state.sampling = request.params.sampling if request.coupled else GREEDY
        tokens = request.tokens
        self._read(state, tokens)
        depth = min(request.depth, self.window)
        branches = self._branches(state, tokens[-1], depth)
        window = self._guesses(state, tokens, depth)
        if not request.branching:
            chain = branches[0] + window[len(branches[0]) :] if branches else window
            return Draft.chain(tokens[-1], chain, self.name)
        # The window comes first: without it nothing would be learned.
        short = [branch[: self.ngram - 1] for branch in branches]
        return self._tree(tokens[-1], [window, *short, *branches], depth * self.width)

    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        """Make the target's predictions along the deepest path the next guesses.

        In a draft of this proposer that is the window.
        """
        state = self.slots[slot]
        if state.seed is None or len(draft) == 1:
            return
        depths = draft.depths()
        path = draft.path_to(depths.index(max(depths)))
        root = len(tokens) - 1
        noise = Noise(state.seed, root)
        keys = [noise.target(depth) for depth in range(len(path))]
        samplings = [state.sampling] * len(path)
        predicted = sample_tokens(logits[path], samplings, keys, strict=False)
        trails = {position: trail for position, trail in state.trails.items() if position > root}
        for position, (node, prediction) in enumerate(
            zip(path, predicted, strict=True), start=root
        ):
            token = draft.tokens[node]
            trail = state.trails.get(position, ())
            if trail[-1:] != (token,):
                trail = (token,)
            trail = (*trail, prediction)[-self.ngram :]
            trails[position + 1] = trail
            if len(trail) == self.ngram:
                state.pool.add(trail)
        state.trails = trails

    def _read(self, state: _LookaheadState, tokens: Sequence[int]) -> None:
        for end in range(max(state.num_read + 1, self.ngram), len(tokens) + 1):
            state.pool.add(tokens[end - self.ngram : end])
        state.num_read = len(tokens)

    def _branches(self, state: _LookaheadState, root: int, depth: int) -> list[list[int]]:
        """Return the n-grams that begin with the root, without it and continued to the depth."""
        branches = [list(rest) for rest in state.pool.rests(root)]
        for branch in branches:
            state.pool.extend(branch, depth)
        return [branch[:depth] for branch in branches]

    def _guesses(self, state: _LookaheadState, tokens: Sequence[int], depth: int) -> list[int]:
        """Return guesses for the next `depth` positions.

        Positions without one get a continuation of the guesses before them, or else any token.
        """
        before = self.ngram - 1
        path = list(tokens[-before:])
        start = len(path)
        for position in range(len(tokens), len(tokens) + depth):
            trail = state.trails.get(position)
            if trail:
                path.append(trail[-1])
                continue
            length = len(path)
            state.pool.extend(path, length + 1)
            if len(path) == length:
                path.append(tokens[-1 - min(length - start, len(tokens) - 1)])
        return path[start:]

    def _tree(self, root: int, paths: Sequence[Sequence[int]], max_nodes: int) -> Draft:
        """Return a tree of the paths behind the root, in which equal beginnings are one branch."""
        draft = Draft.root(root)
        nodes: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = 0
            for token in path:
                node = nodes.get((parent, token))
                if node is None:
                    if len(draft) > max_nodes:
                        return draft
                    node = nodes[parent, token] = draft.add(token, parent, self.name)
                parent = node
        return draft
