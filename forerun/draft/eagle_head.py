"""The EAGLE-3 head as a torch module: what is trained, stored, and computed with while drafting.

It computes flat pairs of embeddings and states: whoever calls it brings the rotations and the attention, and so decides
what pairs see. It never sees slots, caches or drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.draft.layers import DecoderLayer, JoinedLayer, Mlp, SelfAttention
from forerun.draft.pair_head import PairHead, Parts
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
        layer: its decoder layer, of a family like Llama; `vocab` is the target's.
        target_hidden: size of the target's hidden states.
        boundaries: which of them it reads, in the order in which they stand in g.
        draft_vocab: tokens it can say; fewer than `vocab` with a map, see `Listed`.
        own_embedding: it has an embedding of its own; otherwise the target's is used.
        norm_before_fc: g is normed as a whole before it is fused.
        fc_norm: each state in g is normed by itself before it is fused.
        norm_before_residual: the residual stream starts with the normed state.
        norm_output: drafted tokens are paired with the state after the last norm, not before it.
        join: one product makes a vector of a pair before an ordinary layer, as in multi-token modules; the paper has
            another layer, and `norm_before_residual` is about that one.
        mask_token: the token that stands for those not known yet, in a head that drafts in parallel (P-EAGLE); such a
            head may have ordinary layers behind the first.
    """

    layer: ModelConfig
    target_hidden: int
    boundaries: tuple[int, ...]
    draft_vocab: int
    own_embedding: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    join: bool = False
    mask_token: int | None = None


class _Layer(nn.Module):
    """The decoder layer: the embedding comes first beside the state, and only the state is carried on."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, 2 * c.hidden)
        self.mlp = Mlp(c)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        x = residual + self.self_attn(x, rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Joined(JoinedLayer):
    """A layer over pairs that are joined before it."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.embed_norm = nn.RMSNorm(c.hidden, c.norm_eps)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        return self.along(self.embed_norm(embedded), self.hidden_norm(state), rotation, attend)


class EagleHead(PairHead):
    """The head as it is trained and stored; tensors are called as in the speculators format.

    `mask_hidden` [1, 1, n * H] is what a head that drafts in parallel reads where there are no states. Letters: n
    boundaries, H the target's hidden size, Hd the head's.
    """

    inner = "layers"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c, width = config.layer, len(config.boundaries) * config.target_hidden
        self.config, self.layer, self.boundaries = config, c, config.boundaries
        self.fc = nn.Linear(width, c.hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, c.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden, c.norm_eps) for _ in config.boundaries)
        self.layers = nn.ModuleList([_Joined(c) if config.join else _Layer(config)])
        self.layers.extend(DecoderLayer(c, layer) for layer in range(1, c.layers))
        self.mask_token = config.mask_token
        if config.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.list_tokens(config.draft_vocab, c.vocab)

    def attach(self, target: TargetView) -> None:
        check_fit(self.config, target)
        self.target = target

    def tokens(self) -> Tensor | None:
        if self.d2t is not None:
            return super().tokens()
        said = self.config.draft_vocab
        return None if said == self.target.vocab else torch.arange(said, device=self.target.device)

    @property
    def embedding(self) -> nn.Embedding | None:
        return self.embed_tokens if self.config.own_embedding else None

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = torch.split(features, self.config.target_hidden, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(features)
        return out

    def fusing(self) -> list[tuple[nn.Module | None, Tensor]] | None:
        if not self.config.fc_norm:
            return [(self.input_norm if self.config.norm_before_fc else None, self.fc.weight)]
        if self.config.norm_before_fc:
            return None
        return list(zip(self.fc_norm, torch.split(self.fc.weight, self.config.target_hidden, 1), strict=True))

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        first, *behind = self.layers
        out: Tensor = first(embedded, state, rotation, attend)
        for layer in behind:
            out = layer(out, rotation, attend)
        return out

    @property
    def entered(self) -> nn.Module | None:
        own = self.layers[0]
        return own.hidden_norm if isinstance(own, _Layer) and own.norm_before_residual else None

    def parts(self) -> Parts:
        (own,) = self.layers
        carried = [self.norm] if self.config.norm_output else []
        if isinstance(own, _Joined):
            return Parts(
                own.embed_norm, own.hidden_norm, own.input_proj, own.input_layernorm, own.self_attn,
                own.post_attention_layernorm, own.mlp, self.norm, carried, self.lm_head,
            )  # fmt: skip
        assert isinstance(own, _Layer)
        early = own.norm_before_residual
        carried += [own.hidden_norm] if early else []
        return Parts(
            own.input_layernorm, None if early else own.hidden_norm, None, None, own.self_attn,
            own.post_attention_layernorm, own.mlp, self.norm, carried, self.lm_head,
        )  # fmt: skip

    @property
    def joined(self) -> JoinedLayer:
        """Its layer, where `join` is set."""
        (layer,) = self.layers
        assert isinstance(layer, JoinedLayer)
        return layer

    def logits(self, made: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(made))
        return out

    def state(self, made: Tensor) -> Tensor:
        out: Tensor = self.norm(made) if self.config.norm_output else made
        return out


def check_fit(config: EagleConfig, target: TargetView) -> None:
    """Raise LoadError unless the head is made for a target of these sizes."""
    c = config.layer
    if (config.target_hidden, c.vocab <= target.vocab) != (target.hidden, True):
        raise LoadError(
            f"this EAGLE-3 head is for a target with states of {config.target_hidden} and {c.vocab} tokens, this one"
            f" has {target.hidden} and {target.vocab}: use a head that was trained for it"
        )
    if not config.own_embedding and c.hidden != target.hidden:
        raise LoadError(
            f"this EAGLE-3 head has states of {c.hidden}, its target of {target.hidden}, so the target's embedding does"
            " not fit, and the head has none of its own: its checkpoint is incomplete"
        )
    if config.mask_token is not None and config.mask_token >= c.vocab:
        raise LoadError(f"the mask token {config.mask_token} of this EAGLE-3 head is not one of its {c.vocab} tokens")
    ids = config.boundaries
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i <= target.layers for i in ids):
        raise LoadError(
            f"this EAGLE-3 head reads the hidden states {list(ids)}, which must be different numbers from 0 to"
            f" {target.layers}, the layers of this target: use a head that was trained for it"
        )
