"""Drafting whole blocks in one pass, DFlash and DSpark: the context is what the target thought of
the text.

The context of a committed token depends on the target's states of that token alone: its keys and
values are computed once for each layer, kept in the head's own cache, and never change. The block
of a round stands behind them: its keys and values are scratch rows, which the next round
overwrites. So a draft of any depth costs one pass of a few layers, and the tokens are then taken
from it level by level.

The root is the anchor, at position start: its own states are not known yet, and the context are
those before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Attention, Segment, Sight
from forerun.cache.kv import KVCache
from forerun.draft.block.formats import BlockConfig
from forerun.draft.block.module import Behind, BlockHead, Markov
from forerun.draft.head_modules import DecoderLayer, with_native_products
from forerun.draft.head_program import Operations, run
from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.proposer import DraftRequest, TargetView
from forerun.draft.tree import Tree, grow
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.runtime.program import LOGITS, QKV, Packed, Pass, Recorded, Said, Start, X
from forerun.types import BESIDE

CONTEXT, FUSED, KNOWN, FEATURES = range(
    LOGITS + 1, LOGITS + 5
)  # buffers; of FEATURES there is one for each boundary


def computes(config: BlockConfig) -> bool:
    """Whether the native kernels have what its layers need; those of others are computed in torch.
    A pass has one answer for all layers to whether slots see later ones, and a window is counted
    from the last that a slot sees."""
    return not (any(config.layer.windows) and config.window_causal)


class NativeBlock:
    """A head's layers as programs; its weights are packed in `form`."""

    def __init__(
        self,
        head: BlockHead,
        form: str,
        rotation: tuple[Tensor, Tensor],
        says: Packed | None,
        softcap: float,
    ) -> None:
        """rotation: cos and sin of all positions, float32 [context, 1, D / 2]. says: what makes
        logits, bounded by `softcap` unless that is 0; without it, and with a law that asks for more
        than the token before, no drafts are made here."""
        self._config, c, law = head.config, head.config.layer, head.config.law
        # windows are counted from the last slot of a block here, instead of from its anchor
        wide = replace(
            c, windows=tuple(window and window + head.config.block for window in c.windows)
        )
        self._made = made = Operations(wide, form, rotation)
        ids, self._vocab = head.tokens(), head.target.vocab
        self._ids = None if ids is None else ids.numpy()
        rank, states = law.rank if law else 1, [head.config.target_hidden]
        others = c.hidden, c.hidden, rank, *states * len(head.config.aux_hidden_layers)
        widths = made.widths(says.matrix.outputs if says else 1, *others)
        table, scale = head.table()
        reads, layers = self._layers(head)
        slots = [made.embedding(table, X, scale), *layers]
        self._reads, self._slots = Recorded(c, reads, widths), Recorded(c, slots, widths)
        self._fuses = Recorded(c, [*self._fuse(head), *reads], widths)
        self._whole, self._follow = None, None
        if says and head.config.is_bigram:
            ends = made.product(says, X, LOGITS, head.norm, wanted=1, softcap=softcap)
            self._whole = Recorded(c, [*slots, ends], widths)
            if head.law:
                self._follow = Recorded(c, self._adds(head.markov_head), widths)

    @property
    def drafts(self) -> bool:
        """Whether whole rounds can be done here."""
        return self._whole is not None

    def read(self, segments: Sequence[Segment], context: Tensor, cache: KVCache) -> None:
        """Write keys and values of context [T, Hd], which stands at the segments' places."""
        run(self._reads, Pass(segments, cache), cache, {CONTEXT: context})

    def slots(self, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """What the layers make of the slots of some blocks, before the last norm. -> float32 [T,
        Hd]"""
        return run(self._slots, Pass(segments, cache, False), cache, {}).clone()

    def round(
        self, starts: Sequence[Start], cache: KVCache, raw: bool, stands: array[float] | None
    ) -> list[Said]:
        """Read the context that each start brings and draft behind it, in one call; see
        `Recorded.block`. `raw`: it is the target's states, which are yet to be fused."""
        assert self._whole is not None
        begin, given = (
            (self._fuses, range(FEATURES, len(self._whole.widths)))
            if raw
            else (self._reads, [CONTEXT])
        )
        first = self._config.first
        return self._whole.block(
            starts,
            self._block,
            cache,
            self._vocab,
            self._ids,
            first,
            begin,
            given,
            self._follow,
            stands,
        )

    def _block(self, start: Start) -> Segment:
        """The slots behind what a start brings."""
        return block_of(self._config, start.segment.slot, start.link.token, start.link.offset)

    def _layers(self, head: BlockHead) -> tuple[list[COp], list[COp]]:
        """What makes keys and values of CONTEXT, and the layers over the slots in X. Both share
        their weights."""
        made, c = self._made, head.config.layer
        queries, reads, slots = c.heads * c.head_dim, [], []
        for i, layer in enumerate(head.layers):
            assert isinstance(layer, DecoderLayer)
            own, norm = layer.self_attn, layer.input_layernorm
            weight, bias = own.products(), own.biases()
            both = made.pack(weight[queries:], None if bias is None else bias[queries:])
            turned = made.rotate(own, i)
            reads += [made.product(both, CONTEXT, QKV, column=queries), turned]
            slots += [
                made.product(
                    weight[:queries], X, QKV, norm, None if bias is None else bias[:queries]
                ),
                made.product(both, X, QKV, norm, column=queries),
                turned,
                *made.rest(layer, i),
            ]
        return reads, slots

    def _fuse(self, head: BlockHead) -> list[COp]:
        """The target's states to CONTEXT, as `BlockHead.fuse` does."""
        made, weights = self._made, torch.split(head.fc.weight, head.config.target_hidden, 1)
        parts = [
            made.product(weight, FEATURES + i, FUSED, combine=native.ADD if i else 0)
            for i, weight in enumerate(weights)
        ]
        return [*parts, made.copy(FUSED, CONTEXT, head.hidden_norm)]

    def _adds(self, law: Markov) -> list[COp]:
        """What follows a token, added to LOGITS."""
        return [
            self._made.embedding(law.markov_w1.weight.detach(), KNOWN),
            self._made.product(law.markov_w2.weight, KNOWN, LOGITS, combine=native.ADD),
        ]


def block_of(config: BlockConfig, slot: int, anchor: int, offset: int = 0) -> Segment:
    """The slots of a block, `offset` tokens behind what is committed."""
    tokens = [anchor, *[config.mask_token] * (config.block - 1)]
    return Segment(slot, tokens, list(range(-1, offset + config.block - 1)), [], offset)


@dataclass(slots=True)
class _Growing:
    """A tree under construction, what its block said, and how likely the path to each node is to
    stand.

    block [S, Hd]: what was made of all slots. made [K, Hd], said [K, Vd]: of those that say
    something, K as deep as any draft of the round. carried: what the law carries from each node to
    its children."""

    tree: Tree
    block: Tensor
    made: Tensor
    said: Tensor
    stands: dict[int, float] = field(default_factory=lambda: {-1: 1.0})
    carried: dict[int, Tensor] = field(default_factory=dict)


class Block(HiddenStateProposer):
    """Chains, or trees of `width` nodes a level, as deep as the head has slots.

    Attributes:
        threshold: a path whose product of confidences falls below it is not followed further; 0
            follows all. It decides from what is drafted already, never from what is about to be, so
            it changes no text.
    """

    name = "block"
    native: NativeBlock | None

    def __init__(
        self,
        head: BlockHead,
        target: TargetView,
        *,
        width: int = 1,
        threshold: float = 0.0,
        **room: int,
    ) -> None:
        """Room for context: as in `HiddenStateProposer`. It computes in the head's own dtype, or in
        the target's native form. Raises LoadError if the head is not made for this target,
        ConfigError for a threshold where it has no confidence head."""
        if threshold and not head.config.confidence:
            raise ConfigError(
                f"draft_threshold={threshold:g} needs a block drafter with a confidence head, which this one has not:"
                " leave it out, or train one with confidence"
            )
        head.attach(target)
        head = head.to(target.device)
        self.config, self.aux_hidden_layers = head.config, head.config.aux_hidden_layers
        dtype = next(head.parameters()).dtype if target.form is None else torch.float32
        context = (
            target.context + self.config.block
        )  # the block at the very end of a text reaches past it
        super().__init__(target, self.config.layer, dtype, context, **room)
        self.width, self.threshold = width, threshold
        self.head, self.native = (
            (head, None) if target.form is None else self._natively(head, target.form)
        )
        whole = self.native is not None and self.native.drafts and width == 1 and not threshold
        self.ends_chains = self.reports_confidence = whole
        self.extra_nodes = BESIDE if whole else 0
        self.reset()

    def fuse(self, shown: Tensor) -> Tensor:
        return self.head.fuse(shown)

    def scratch(self, row: DraftRequest) -> int:
        return self.config.block

    def draft(self, trees: Sequence[Tree]) -> None:
        if self._round(trees):
            return
        self.catch_up([tree.request for tree in trees])
        growing = self._say(trees)
        for level in range(self.config.depth):
            growing = [g for g in growing if g.tree.request.depth > level and g.tree.frontier]
            growing = self._grow(growing, level)

    def _round(self, trees: Sequence[Tree]) -> bool:
        """Read what the slots have missed and draft chains behind it, all in one native call.
        False, and nothing done,
        where that takes more: branches, laws to keep, filters, trust."""
        native = self.native
        if (
            native is None
            or not self.reports_confidence
            or self.threshold
            or not all(tree.is_plain for tree in trees)
        ):
            return False
        self.catch_up([tree.request for tree in trees if self.waiting[tree.request.slot].parts > 1])
        raw = not any(self.waiting[tree.request.slot].fused for tree in trees)
        starts = [self._start(tree, raw) for tree in trees]
        stands = (
            trees[0].request.confidence_rates
        )  # a guess, which differs between temperatures alone; rows without have no floor
        said = native.round(starts, self.cache, raw, stands)
        for tree, start, own in zip(trees, starts, said, strict=True):
            if start.segment.tokens:
                self.commit(tree.request, len(start.segment.tokens))
            tree.weigh(own, self.name, self.extra_nodes)
        return True

    def _start(self, tree: Tree, raw: bool) -> Start:
        """What a native round has to know of one request; `raw`, it brings the target's states."""
        row = tree.request
        parts = self.take_raw(row.slot) if raw else [part.numpy() for part in self.take(row.slot)]
        count = len(parts[0]) if parts else 0
        link = tree.link(count)
        link = replace(link, keys=link.keys[: self.config.depth])
        return Start(self.behind(row, count), parts, 0, link)

    def keep(self, segments: Sequence[Segment], fused: Tensor) -> None:
        """Keys and values of context; none depends on another."""
        if self.native is not None:
            return self.native.read(segments, fused, self.cache)
        spans = [(s.slot, self.cache.length[s.slot], len(s.tokens)) for s in segments]
        positions = np.concatenate([np.arange(at, at + count) for _, at, count in spans])
        places = np.concatenate(
            [self.cache.pages.rows[slot, at : at + count] for slot, at, count in spans]
        )
        rotation = self.rotate(torch.from_numpy(positions).to(self.target.device))
        index = torch.from_numpy(places).to(self.target.device)
        for layer in range(self.layer.layers):
            keys, values = self.head.remember(layer, fused, rotation)
            self.cache.keys[layer, index], self.cache.values[layer, index] = keys, values
        return None

    def _say(self, trees: Sequence[Tree]) -> list[_Growing]:
        """One pass over the block of each root. A block is whole however deep the draft is to be:
        what a slot says depends on how many there are."""
        c = self.config
        segments = [block_of(c, tree.request.slot, tree.request.tokens[-1]) for tree in trees]
        if self.native is not None:
            made = self.head.norm(self.native.slots(segments, self.cache))
        else:
            attention = _BlockAttention(segments, self.cache, c)
            ids = torch.tensor(
                [token for s in segments for token in s.tokens], device=self.target.device
            )
            made = self.head(
                self.head.embed(ids).to(self.dtype), self.rotate(attention.positions), attention
            )
        deepest = min(max(tree.request.depth for tree in trees), c.depth)
        blocks = made.view(len(trees), c.block, -1)
        made = blocks[:, c.first : c.first + deepest]
        said = self.head.say(made.flatten(0, 1)).view(len(trees), deepest, -1)
        return [_Growing(*each) for each in zip(trees, blocks, made, said, strict=True)]

    def _grow(self, growing: Sequence[_Growing], level: int) -> list[_Growing]:
        """Add one level to each tree; those that go on."""
        if self.threshold > 0:
            growing = [g for g in growing if self._is_trusted(g, level)]
        if growing:
            logits = torch.cat([self._follow(g, level) for g in growing])
            grow([g.tree for g in growing], logits, self.width, self.name)
        return list(growing)

    def _follow(self, g: _Growing, level: int) -> Tensor:
        """What is said behind each node of the frontier. [F, V]"""
        law, previous = self.head.law, self._frontier(g)
        said = g.said[level].expand(len(previous), -1)
        if law is not None:
            if not level:
                anchor = torch.tensor([g.tree.request.tokens[-1]], device=self.target.device)
                g.carried[-1] = law.begin(g.block, anchor)
            state = torch.stack([g.carried[g.tree.draft.parents[node]] for node in g.tree.frontier])
            said, state = law(Behind(level + self.config.first, g.block, said, previous), state)
            g.carried |= zip(g.tree.frontier, state, strict=True)
        return self.head.follow(said)

    def _is_trusted(self, g: _Growing, level: int) -> bool:
        """Take the paths that are not likely enough to stand out of the frontier; whether any is
        left."""
        tree, previous = g.tree, self._frontier(g)
        trust = self.head.trust(g.made[level].expand(len(previous), -1), previous).sigmoid()
        for node, chance in zip(tree.frontier, trust.tolist(), strict=True):
            g.stands[node] = g.stands[tree.draft.parents[node]] * chance
        kept = [i for i, node in enumerate(tree.frontier) if g.stands[node] >= self.threshold]
        tree.frontier, tree.values = (
            [tree.frontier[i] for i in kept],
            [tree.values[i] for i in kept],
        )
        return bool(kept)

    def _frontier(self, g: _Growing) -> Tensor:
        """The tokens of the frontier. [F]"""
        return torch.tensor(
            [g.tree.draft.tokens[node] for node in g.tree.frontier], device=self.target.device
        )

    def _natively(self, head: BlockHead, form: str) -> tuple[BlockHead, NativeBlock | None]:
        """The head with products on the native kernels, and its layers as programs, where there are
        some that compute them."""
        if not computes(head.config):
            return with_native_products(head, form), None
        fast = with_native_products(head, form, "layers")
        return fast, NativeBlock(head, form, self.rotation, *fast.packed())


class _BlockAttention(Attention):
    """Who sees whom in a pass over whole blocks, whose anchors stand behind all that is committed.

    All slots of a block see the same context, of which a layer with a window knows the last that so
    many tokens have left; which of one another they see is `BlockConfig.is_causal` of the layer.
    """

    def __init__(self, segments: Sequence[Segment], cache: KVCache, config: BlockConfig) -> None:
        self._block = config
        super().__init__(segments, cache, config.layer)

    def _masks(
        self, segments: list[Segment], depths: list[np.ndarray], queries: int, width: int
    ) -> dict[Sight, Tensor | None]:
        masks: dict[Sight, Tensor | None] = {}
        for layer, window in enumerate(self.config.windows):
            mask = np.zeros((len(segments), queries, width), dtype=bool)
            for r, segment in enumerate(segments):
                at, count = self.cache.length[segment.slot], len(segment.tokens)
                mask[r, :count, max(0, at - window) if window else 0 : at] = True
                mask[r, :count, at : at + count] = (
                    np.tri(count, dtype=bool) if self._block.is_causal(layer) else True
                )
                mask[r, count:, 0] = True  # a padding query must see something, or it is NaN
            masks[self.config.sight(layer)] = None if mask.all() else self._tensor(mask)
        return masks
