"""The block drafter as a torch module: what is trained, stored, and computed with while drafting.

As in DFlash (2602.06036) and DSpark (2607.05147): the target's hidden states of a token at some boundaries become one
vector, its context, from which every layer makes keys and values by itself. The drafter's own tokens are a block of
slots, the anchor (the last token known) and then masks, which see all of the context and one another, and say all
tokens of a draft in one pass. A law (`block_law`) makes what a slot says depend on the tokens before it, so that the
tokens of a draft agree with each other; a confidence head says how likely each of them is to stand.

The module computes slots: whoever calls it brings the rotations and the attention, and so decides which context and
which slots a slot sees. It never sees requests, caches or drafts. Letters: n boundaries, H the target's hidden size,
Hd the head's, V the target's vocabulary, Vd the tokens the head says, S slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.draft.block_gru import GruLaw
from forerun.draft.block_law import BlockLaw
from forerun.draft.block_layers import BlockLayer, ConvolvedLayer
from forerun.draft.block_markov import Markov
from forerun.draft.block_refiner import Refiner
from forerun.draft.block_selector import Selector
from forerun.draft.block_shapes import ConvShape, GruShape, LawShape, MarkovShape, RefinerShape, SelectorShape
from forerun.draft.listed import Listed
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.models.shortlist import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The shape of a head.

    Attributes:
        layer: its decoder layers, of a family like Qwen3; `vocab` is the target's.
        target_hidden: size of the target's hidden states.
        boundaries: which of them make the context, in the order in which they are fused.
        block: slots of a block, S, the anchor's included.
        mask_token: the target's token that fills the slots behind the anchor.
        causal: slots see those before them alone; otherwise all of their block.
        window_causal: the same of layers with a window (`layer.windows`), which see the context of so many tokens
            before the anchor.
        sample_from_anchor: slot k says the token at position start + k + 1, start being the anchor's (DSpark);
            otherwise the one at its own position start + k, and slot 0 says nothing (DFlash).
        draft_vocab: tokens it can say; fewer than `vocab` with a map, see `Listed`.
        own_embedding, own_head: it has an embedding and a head of its own; otherwise the target's are used.
        conv: convolutions in its layers, if they have some.
        law: what it says behind the tokens before a slot, if that depends on them.
        confidence: there is a confidence head.
        confidence_with_markov: which also reads what the Markov head knows of the token before.
    """

    layer: ModelConfig
    target_hidden: int
    boundaries: tuple[int, ...]
    block: int
    mask_token: int
    causal: bool = False
    window_causal: bool = False
    sample_from_anchor: bool = True
    draft_vocab: int
    own_embedding: bool = False
    own_head: bool = False
    law: LawShape | None = None
    conv: ConvShape | None = None
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def first(self) -> int:
        """The slot that says the token behind the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        """Tokens a block says."""
        return self.block - self.first

    @property
    def is_bigram(self) -> bool:
        """Whether its law, if it has one, adds what follows from the token before, and nothing else."""
        return self.law is None or (isinstance(self.law, MarkovShape) and self.law.kind == "vanilla")

    def is_causal(self, layer: int) -> bool:
        """Whether slots see no later ones in this layer."""
        return self.window_causal if self.layer.windows[layer] else self.causal


class _Confidence(nn.Module):
    """How likely a slot's token is to stand if those before it do, as a logit."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width = config.layer.hidden
        if config.confidence_with_markov:
            assert isinstance(config.law, MarkovShape)
            width += config.law.rank
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)[..., 0]
        return out


LAWS: dict[type, str] = {
    MarkovShape: "markov_head",
    GruShape: "domino_head",
    SelectorShape: "candidate_selector",
    RefinerShape: "refiner_head",
}


class BlockHead(Listed):
    """The head as it is trained and stored; tensors are called as in the speculators format.

    `target` is there once it is attached.
    """

    target: TargetView

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = config.layer
        self.config = config
        self.fc = nn.Linear(len(config.boundaries) * config.target_hidden, c.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.layers = nn.ModuleList(self._layer(i) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        if config.own_head:
            self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        if isinstance(config.law, MarkovShape):
            self.markov_head = Markov(config.law, c.hidden, c.vocab, config.draft_vocab, config.first)
        if isinstance(config.law, GruShape):
            self.domino_head = GruLaw(config.law, c.hidden, config.draft_vocab, config.first)
        if isinstance(config.law, SelectorShape):
            self.candidate_selector = Selector(config.law, c.hidden, c.vocab)
        if isinstance(config.law, RefinerShape):
            said, first = config.draft_vocab, config.first
            self.refiner_head = Refiner(config.law, c.hidden, c.vocab, said, config.block, first)
        if config.confidence:
            self.confidence_head = _Confidence(config)
        self.list_tokens(config.draft_vocab, c.vocab)

    def _layer(self, i: int) -> BlockLayer:
        c, conv = self.config.layer, self.config.conv
        return ConvolvedLayer(c, i, conv, self.config.block) if conv else BlockLayer(c, i)

    def attach(self, target: TargetView) -> None:
        """Let it borrow from this target. Raises LoadError if the head is not made for it."""
        check_fit(self.config, target)
        self.target = target

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states side by side, [.., n * H], to context, [.., Hd]."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def remember(self, layer: int, context: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of context for one layer, each of its own position. [.., Hd] -> [.., Hkv, D] each"""
        found: tuple[Tensor, Tensor] = self.layers[layer].remember(context, rotation)  # type: ignore[operator]
        return found

    def embed(self, ids: Tensor) -> Tensor:
        """[..] int64 -> [.., Hd]"""
        out: Tensor = self.embed_tokens(ids) if self.config.own_embedding else self.target.embed(ids)
        return out

    def forward(self, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Slots, [.., Hd], to what is made of them, [.., Hd]. rotation: cos and sin of their positions, [.., 1, D / 2];
        attend: as in `models.decoder`, of each layer."""
        x = embedded
        for layer in self.layers:
            x = layer(x, rotation, attend)
        out: Tensor = self.norm(x)
        return out

    @property
    def law(self) -> BlockLaw | None:
        """What makes the tokens of a draft agree, if anything does."""
        name = LAWS.get(type(self.config.law))
        return getattr(self, name) if name else None

    def say(self, made: Tensor) -> Tensor:
        """Logits of the tokens it says, without its law. [.., Hd] -> [.., Vd]"""
        out: Tensor = self.lm_head(made) if self.config.own_head else self.target.head(made)
        return out

    def behind(self, logits: Tensor, previous: Tensor) -> Tensor:
        """The same behind the tokens `previous`, of heads that training knows: none, or a vanilla Markov head.
        [.., Vd], [..] -> [.., Vd]"""
        return logits + self.markov_head.bias(previous) if self.config.law else logits

    def follow(self, logits: Tensor) -> Tensor:
        """The same over the target's vocabulary; what it cannot say is -inf. [.., Vd] -> [.., V]"""
        return spread(logits, self.tokens(), self.config.layer.vocab)

    def trust(self, made: Tensor, previous: Tensor) -> Tensor:
        """The logit of how likely the token behind `previous` is to stand, whichever it is. [.., Hd], [..] -> [..]"""
        if self.config.confidence_with_markov:
            made = torch.cat((made, self.markov_head.markov_w1(previous)), -1)
        out: Tensor = self.confidence_head(made)
        return out


def check_fit(config: BlockConfig, target: TargetView) -> None:
    """Raise LoadError unless the head is made for a target of these sizes."""
    c, ids = config.layer, config.boundaries
    if (config.target_hidden, c.vocab) != (target.hidden, target.vocab):
        raise LoadError(
            f"this block drafter is for a target with states of {config.target_hidden} and {c.vocab} tokens, this one"
            f" has {target.hidden} and {target.vocab}: use a drafter that was trained for it"
        )
    if c.hidden != target.hidden and not (config.own_embedding and config.own_head):
        raise LoadError(
            f"this block drafter has states of {c.hidden}, its target of {target.hidden}, so the target's embedding and"
            " head do not fit, and it has none of its own: its checkpoint is incomplete"
        )
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i <= target.layers for i in ids):
        raise LoadError(
            f"this block drafter reads the hidden states {list(ids)}, which must be different numbers from 0 to"
            f" {target.layers}, the layers of this target: use a drafter that was trained for it"
        )
    if not 0 <= config.mask_token < c.vocab:
        raise LoadError(f"the mask token {config.mask_token} is none of the {c.vocab} tokens of the target")
