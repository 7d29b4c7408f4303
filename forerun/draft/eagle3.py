"""EAGLE-3 heads (Li et al. 2503.01840) and P-EAGLE's: what is trained, stored, and computed with while drafting.

A head computes flat pairs of embeddings and states: whoever calls it brings the rotations and the attention, and so
decides what pairs see. It never sees slots, caches or drafts.

On disk heads are read in the layouts they are published in (`eagle_dialects`), and written in that of speculators.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.borrowed import EMBEDDING, HEAD, check_boundaries, check_fused, check_sizes
from forerun.draft.eagle_dialects import Said, read_dialect, read_flag
from forerun.draft.layers import DecoderLayer, JoinedLayer, Layer, Mlp, SelfAttention
from forerun.draft.pair_head import NO_NORM, PairHead, Parts
from forerun.draft.stored import (
    LAYER,
    MOST_LAYERS,
    Tensors,
    assemble,
    describe_speculator,
    read_config,
    read_layer,
    read_tensors,
    reading,
    size_of,
    write,
)  # fmt: skip
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.models.families import Json, is_whole
from forerun.models.shortlist import maps_of

KIND = "EAGLE-3 head"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
        layer: its decoder layer, of a family like Llama; `vocab` is the target's.
        target_hidden: size of the target's hidden states.
        boundaries: which of them it reads, in the order in which they stand in g.
        draft_vocab: tokens it can say; fewer than `vocab` with a map, see `Head`.
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


class _Layer(Layer):
    """The paper's layer: the embedding comes first beside the state, and only the state is carried on."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, 2 * c.hidden)
        self.mlp = Mlp(c)


class _Joined(JoinedLayer):
    """A layer over pairs that are joined before it."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.embed_norm = nn.RMSNorm(c.hidden, c.norm_eps)


class EagleHead(PairHead):
    """The head as it is trained and stored; tensors are called as in the speculators format.

    `mask_hidden` [1, 1, n * H] is what a head that drafts in parallel reads where there are no states. Letters: n
    boundaries, H the target's hidden size, Hd the head's.
    """

    title = KIND
    inner = "layers"
    lm_head: nn.Linear

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c, width = config.layer, len(config.boundaries) * config.target_hidden
        self.config, self.layer, self.boundaries = config, c, config.boundaries
        self.fc = nn.Linear(width, c.hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, c.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden, c.norm_eps) for _ in config.boundaries)
        self.layers = nn.ModuleList([_Joined(c) if config.join else _Layer(c)])
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

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = torch.split(features, self.config.target_hidden, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(features)
        return out

    def fusing(self) -> list[tuple[nn.Module | None, Tensor]]:
        if not self.config.fc_norm:
            return [(self.input_norm if self.config.norm_before_fc else None, self.fc.weight)]
        if self.config.norm_before_fc:
            return []
        return list(zip(self.fc_norm, torch.split(self.fc.weight, self.config.target_hidden, 1), strict=True))

    def forward(self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = super().forward(embedded, state, rotation, attend)
        _, *behind = self.layers
        for layer in behind:
            x = layer(x, rotation, attend)
        return x

    @property
    def entered(self) -> nn.Module | None:
        own = self.layers[0]
        return own.hidden_norm if isinstance(own, _Layer) and self.config.norm_before_residual else None

    def parts(self) -> Parts:
        own = self.layers[0]
        carried = [self.norm] if self.config.norm_output else []
        if isinstance(own, _Joined):
            return Parts(
                layer=own, embed_norm=own.embed_norm, state_norm=own.hidden_norm, join=own.input_proj,
                attention_norm=own.input_layernorm, last_norm=self.norm, carried=carried,
            )  # fmt: skip
        assert isinstance(own, _Layer)
        early = self.config.norm_before_residual
        return Parts(
            layer=own, embed_norm=own.input_layernorm, state_norm=NO_NORM if early else own.hidden_norm,
            last_norm=self.norm, carried=[*carried, own.hidden_norm] if early else carried,
        )  # fmt: skip

    @property
    def joined(self) -> JoinedLayer:
        """Its layer, where `join` is set."""
        (layer,) = self.layers
        assert isinstance(layer, JoinedLayer)
        return layer

    def logits(self, made: Tensor) -> Tensor:
        return self.say(self.norm(made))

    def state(self, made: Tensor) -> Tensor:
        out: Tensor = self.norm(made) if self.config.norm_output else made
        return out


def check_fit(config: EagleConfig, target: TargetView) -> None:
    """Raise LoadError unless the head is made for a target of these sizes."""
    c = config.layer
    check_sizes(KIND, target, config.target_hidden, c.vocab, fewer=True)
    if not config.own_embedding and c.hidden != target.hidden:
        raise LoadError(
            f"this {KIND} has states of {c.hidden}, its target of {target.hidden}, so the target's embedding does"
            " not fit, and the head has none of its own: its checkpoint is incomplete"
        )
    if config.mask_token is not None and config.mask_token >= c.vocab:
        raise LoadError(f"the mask token {config.mask_token} of this {KIND} is not one of its {c.vocab} tokens")
    check_boundaries(KIND, target, config.boundaries)


def load_head(directory: Path, target: TargetView) -> EagleHead:
    """Read a head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw = read_config(directory, KIND)
    tensors = read_named(directory, KIND)
    with reading(directory, KIND):
        said = read_dialect(raw, target.layers)
        check_fused(KIND, target, said.boundaries, tensors)
        layer = read_layer(said.layer, tensors, target.vocab, layers=_layers(said))
        config = EagleConfig(
            layer=layer,
            target_hidden=target.hidden,
            boundaries=said.boundaries,
            draft_vocab=_draft_vocab(raw, tensors, layer),
            own_embedding=EMBEDDING in tensors,
            norm_before_fc=read_flag(raw, "norm_before_fc", "input_norm.weight" in tensors),
            fc_norm=read_flag(raw, "fc_norm", "fc_norm.0.weight" in tensors),
            norm_before_residual=said.norm_before_residual,
            norm_output=said.norm_output,
            join=read_flag(raw, "join", f"{LAYER}input_proj.weight" in tensors),
            mask_token=said.mask_token,
        )
        check_fit(config, target)
        if config.join and config.norm_before_residual:
            raise LoadError("join and norm_before_residual are both true in config.json: a layer has one of them")
        if "mask_hidden" in tensors and said.mask_token is not None:  # [n * H], with axes of 1 before it or without
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        _set_vocabulary(config, tensors)
        return assemble(lambda: EagleHead(config), tensors, KIND)


def save_head(head: EagleHead, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Write a head in the speculators layout; `target` is the name or path of its target. Raises OSError."""
    c = head.config
    described = describe_speculator("eagle3", "Eagle3Speculator", c.layer, 3, target)
    own = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.boundaries),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        **({"join": True} if c.join else {}),
        "embed_requires_grad": False,
    }
    write(head, described | own, directory, dtype)


def read_named(directory: Path, kind: str) -> Tensors:
    """All tensors under the names that our heads have for them; buffers of no use are left out. Raises LoadError."""
    named = {}
    for name, tensor in read_tensors(directory, kind).items():
        name = name.removeprefix("model.")
        name = LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        if not name.endswith("rotary_emb.inv_freq"):
            named[name] = tensor
    return named


def _layers(said: Said) -> int:
    """How many layers it has: one, but for a head that drafts in parallel. Raises LoadError."""
    count = 1 if said.mask_token is None else said.layer.get("num_hidden_layers", 1)
    if not is_whole(count) or not 1 <= count <= MOST_LAYERS:
        raise LoadError(f"num_hidden_layers is {count!r}, not a whole number from 1 to {MOST_LAYERS}")
    return int(count)


def _draft_vocab(raw: Json, tensors: Tensors, layer: ModelConfig) -> int:
    size = size_of(tensors, HEAD, 0)
    if raw.get("draft_vocab_size") not in (None, size):
        raise LoadError(f"draft_vocab_size is {raw['draft_vocab_size']!r}, but lm_head.weight has {size} rows")
    if size > layer.vocab:
        raise LoadError(f"it says {size} tokens, more than the {layer.vocab} of its vocabulary")
    return size


def _set_vocabulary(config: EagleConfig, tensors: Tensors) -> None:
    """Make d2t offsets of ascending ids, whatever is stored, and t2d what follows from it."""
    size, vocab = config.draft_vocab, config.layer.vocab
    stored, order = tensors.pop("d2t", None), torch.arange(size)
    tensors.pop("t2d", None)
    if stored is None and size < vocab:
        raise LoadError(f"it says {size} of {vocab} tokens, but its checkpoint has no d2t that tells which")
    if stored is None:
        return
    if stored.shape != (size,) or stored.is_floating_point():
        raise LoadError(f"d2t is {stored.dtype} of shape {list(stored.shape)}, not {size} whole numbers")
    stored = stored.long()
    ids = stored + order
    if (stored.diff() < 0).any() or ids[-1] >= vocab:  # no offsets of ascending ids: some store the ids themselves
        ids, at = stored.sort()
        tensors[HEAD] = tensors[HEAD][at]
    if ids[0] < 0 or ids[-1] >= vocab or (ids.diff() < 1).any():
        raise LoadError(f"d2t does not name {size} different tokens of {vocab}")
    if size < vocab:
        if torch.equal(ids, order):
            print(f"note: d2t of this {KIND} is all zero: it only says the tokens below {size}", file=sys.stderr)
        tensors["d2t"], tensors["t2d"] = maps_of(ids, vocab)
