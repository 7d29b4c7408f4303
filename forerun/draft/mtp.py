"""Multi-token modules: a decoder layer behind the target's last state that says the token after next.

As in DeepSeek-V3 (2412.19437) and Qwen3-Next: the pair of the embedding of token t + 1 and the target's normalised last
state of token t, each normed, are joined, go through one ordinary decoder layer and a last norm, and the target's own
head says token t + 2. Applied again to its own normalised output it drafts further; FastMTP (2509.18362) trains for
that. Embedding and head are the target's: nothing of them is stored, unless it says part of the vocabulary (`Listed`),
with a head of its own for that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.draft.layers import JoinedLayer
from forerun.draft.pair_head import PairHead, Parts
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend


class _Layer(JoinedLayer):
    """The norms of a pair, what joins it, a decoder layer, and the norm that comes after it."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.token_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.hidden_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.final_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        return self.along(self.token_layernorm(embedded), self.hidden_layernorm(state), rotation, attend)


class MtpModule(PairHead):
    """The module as it is trained and stored; what it makes of a pair is normalised already."""

    inner = "mtp_layers"

    def __init__(self, layer: ModelConfig, target_layers: int, draft_vocab: int | None = None) -> None:
        """`draft_vocab`: tokens it can say, with a map where they are fewer than the target has; None: all."""
        super().__init__()
        self.layer, self.boundaries = layer, (target_layers,)
        self.mtp_layers = nn.ModuleList([_Layer(layer)])
        self.draft_vocab = draft_vocab or layer.vocab
        self.list_tokens(self.draft_vocab, layer.vocab)
        self.lm_head = nn.Linear(layer.hidden, self.draft_vocab, bias=False) if self.d2t is not None else None

    def begin(self, norm: Tensor) -> None:
        """Begin with the target's own norm [H] before its head."""
        with torch.no_grad():
            self.joined.final_layernorm.weight.copy_(norm)

    def attach(self, target: TargetView) -> None:
        c = self.layer
        if (c.hidden, c.vocab, self.boundaries) != (target.hidden, target.vocab, (target.layers,)):
            raise LoadError(
                f"this MTP module is for a target with states of {c.hidden} and {c.vocab} tokens, this one has"
                f" {target.hidden} and {target.vocab}: use a module that was trained for it"
            )
        self.target = target

    def fuse(self, features: Tensor) -> Tensor:
        return self.target.normalise(features)

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        return self.leave(self.mtp_layers[0](embedded, state, rotation, attend))

    def leave(self, x: Tensor) -> Tensor:
        out: Tensor = self.joined.final_layernorm(x)
        return out

    def parts(self) -> Parts:
        own = self.joined
        return Parts(
            own.token_layernorm, own.hidden_layernorm, own.input_proj, own.input_layernorm, own.self_attn,
            own.post_attention_layernorm, own.mlp, own.final_layernorm, [own.final_layernorm], self.lm_head,
        )  # fmt: skip

    @property
    def joined(self) -> _Layer:
        """Its layer, with the norms around it."""
        (layer,) = self.mtp_layers
        assert isinstance(layer, _Layer)
        return layer

    def logits(self, made: Tensor) -> Tensor:
        out: Tensor = self.target.head(made) if self.lm_head is None else self.lm_head(made)
        return out

    def state(self, made: Tensor) -> Tensor:
        return made
