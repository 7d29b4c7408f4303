"""The block drafter as a torch module: what is trained, stored, and computed with while drafting.

As in DFlash (2602.06036) and DSpark (2607.05147): the target's hidden states of a token at some boundaries become one
vector, its context, from which every layer makes keys and values by itself. The drafter's own tokens are a block of
slots, the anchor (the last token known) and then masks, which see all of the context and one another, and say all
tokens of a draft in one pass. A law (`block_laws`) makes what a slot says depend on the tokens before it, so that the
tokens of a draft agree with each other; a confidence head says how likely each of them is to stand.

The module computes slots: whoever calls it brings the rotations and the attention, and so decides which context and
which slots a slot sees. It never sees requests, caches or drafts. Letters: n boundaries, H the target's hidden size,
Hd the head's, V the target's vocabulary, Vd the tokens the head says, S slots of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.block_laws import BlockLaw, GruLaw, Markov, Refiner, Selector
from forerun.draft.block_shapes import BlockConfig, ConvShape, GruShape, MarkovShape, RefinerShape, SelectorShape
from forerun.draft.borrowed import Head, check_boundaries, check_sizes
from forerun.draft.layers import DecoderLayer
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.models.shortlist import spread


class Convolved(nn.Module):
    """Two short convolutions along a block, before a part of a layer and behind it.

    A channel of a slot becomes a sum over the last few slots, itself included, with weights of its own; to these the
    slot adds what a product makes of it, the same for a group of channels. Before a block there is nothing.
    """

    def __init__(self, shape: ConvShape, hidden: int, block: int) -> None:
        super().__init__()
        self.taps, self.block, self.groups = shape.taps, block, hidden // shape.group
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * shape.taps * self.groups, bias=False)

    def around(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What a part makes of slots [.., Hd], whole blocks one behind the other, between both. -> [.., Hd]"""
        own = self.kernel_projection(x).view(-1, self.block, 2, self.taps, self.groups, 1)
        return self._along(part(self._along(x, own, 0)), own, 1)

    def _along(self, x: Tensor, own: Tensor, which: int) -> Tensor:
        groups = x.reshape(-1, self.block, self.groups, x.shape[-1] // self.groups)
        out = torch.zeros_like(groups)
        for tap, base in enumerate(self.base_kernel[which].view(self.taps, *groups.shape[2:])):
            before = F.pad(groups, (0, 0, 0, 0, tap, 0))[:, : self.block]  # each slot's, so many slots before
            out = out + (base + own[:, :, which, tap]) * before
        return out.view(x.shape)


class ConvolvedLayer(DecoderLayer):
    """DFlash2's layer. Tensors are called as in the speculators format."""

    def __init__(self, c: ModelConfig, layer: int, shape: ConvShape, block: int) -> None:
        super().__init__(c, layer)
        self.attention_conv = Convolved(shape, c.hidden, block)
        self.mlp_conv = Convolved(shape, c.hidden, block)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + self.attention_conv.around(lambda inner: self.self_attn(inner, rotation, attend), normed)
        return x + self.mlp_conv.around(self.mlp, self.post_attention_layernorm(x))


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


LAWS: dict[type, tuple[str, Callable[..., BlockLaw]]] = {  # by shape: how it is called in files, and what it is
    MarkovShape: ("markov_head", Markov),
    GruShape: ("domino_head", GruLaw),
    SelectorShape: ("candidate_selector", Selector),
    RefinerShape: ("refiner_head", Refiner),
}


class BlockHead(Head):
    """The head as it is trained and stored; tensors are called as in the speculators format."""

    title = "block drafter"
    markov_head: Markov

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
        if config.law is not None:
            name, law = LAWS[type(config.law)]
            self.add_module(name, law(config.law, config))
        if config.confidence:
            self.confidence_head = _Confidence(config)
        self.list_tokens(config.draft_vocab, c.vocab)

    def _layer(self, i: int) -> DecoderLayer:
        c, conv = self.config.layer, self.config.conv
        return ConvolvedLayer(c, i, conv, self.config.block) if conv else DecoderLayer(c, i)

    def attach(self, target: TargetView) -> None:
        """Let it borrow from this target. Raises LoadError if the head is not made for it."""
        check_fit(self.config, target)
        self.target = target

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states side by side, [.., n * H], to context, [.., Hd]."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def remember(self, layer: int, context: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of context for one layer, each of its own position: context has no residual stream.
        [.., Hd] -> [.., Hkv, D] each"""
        made = self.layers[layer]
        assert isinstance(made, DecoderLayer)
        own = made.self_attn
        heads = (*context.shape[:-1], -1, own.head_dim)
        keys = kernels.rotate(own.k_norm(own.k_proj(context).view(heads)), *rotation)
        return keys, own.v_proj(context).view(heads)

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
        shape = self.config.law
        return getattr(self, LAWS[type(shape)][0]) if shape is not None else None

    def behind(self, logits: Tensor, previous: Tensor) -> Tensor:
        """The logits of slots behind the tokens `previous`, by what training knows: no law, or a vanilla Markov head.
        [.., Vd], [..] -> [.., Vd]"""
        return logits + self.markov_head.bias(previous) if self.config.law else logits

    def follow(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; what it cannot say is -inf. [.., Vd] -> [.., V]"""
        return spread(logits, self.tokens(), self.config.layer.vocab)

    def trust(self, made: Tensor, previous: Tensor) -> Tensor:
        """The logit of how likely the token behind `previous` is to stand, whichever it is. [.., Hd], [..] -> [..]"""
        if self.config.confidence_with_markov:
            made = torch.cat((made, self.markov_head.markov_w1(previous)), -1)
        out: Tensor = self.confidence_head(made)
        return out


def check_fit(config: BlockConfig, target: TargetView) -> None:
    """Raise LoadError unless the head is made for a target of these sizes."""
    c, title = config.layer, BlockHead.title
    check_sizes(title, target, config.target_hidden, c.vocab)
    if c.hidden != target.hidden and not (config.own_embedding and config.own_head):
        raise LoadError(
            f"this {title} has states of {c.hidden}, its target of {target.hidden}, so the target's embedding and"
            " head do not fit, and it has none of its own: its checkpoint is incomplete"
        )
    check_boundaries(title, target, config.boundaries)
    if not 0 <= config.mask_token < c.vocab:
        raise LoadError(f"the mask token {config.mask_token} is none of the {c.vocab} tokens of the target")
