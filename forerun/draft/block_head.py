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

import torch
from torch import Tensor, nn

from forerun.draft.block_laws import Markov
from forerun.draft.block_shapes import BlockConfig
from forerun.draft.borrowed import Head, check_boundaries, check_sizes
from forerun.draft.layers import DecoderLayer
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.decoder import Attend
from forerun.models.shortlist import spread


class _Confidence(nn.Module):
    """How likely a slot's token is to stand if those before it do, as a logit."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width = config.layer.hidden
        if config.confidence_with_markov:
            assert config.law is not None
            width += config.law.rank
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)[..., 0]
        return out


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
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        if config.own_head:
            self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        if config.law is not None:
            self.markov_head = Markov(config.law, config)
        if config.confidence:
            self.confidence_head = _Confidence(config)
        self.list_tokens(config.draft_vocab, c.vocab)

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
    def law(self) -> Markov | None:
        """What makes the tokens of a draft agree, if anything does."""
        return self.markov_head if self.config.law is not None else None

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
