"""EAGLE-1 and EAGLE-2 heads (Li et al. 2401.15077, 2406.16858): the target's last state, one layer
ahead.

The pair of the embedding of token t + 1 and the target's normalised last state of token t is joined
by one product, goes through a decoder layer without a norm before its attention, and comes out as a
guess of the target's normalised last state of token t + 1: the target's own head says token t + 2
from it, and a drafted token is paired with it as it is. EAGLE-2 is the same head, drafting trees.

Two layouts are read: that of its authors, a config.json of a Llama of one layer, and that of vLLM,
the same in `model`. Either may come with a head of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.eagle.formats import Said, read_dialect, read_flag
from forerun.draft.head_files import (
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
from forerun.draft.head_modules import (
    EMBEDDING,
    HEAD,
    DecoderLayer,
    Head,
    JoinedLayer,
    Layer,
    Mlp,
    SelfAttention,
    borrow,
    check_aux_hidden_layers,
    check_fused,
    check_sizes,
)
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError, shown
from forerun.models.config import Json, ModelConfig, is_integer
from forerun.models.decoder import Attend
from forerun.models.shortlist import maps_of

NO_NORM = nn.Identity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a head is made of between its states and what they become.

    Attributes:
        layer: which attends, behind a norm where pairs are joined.
        embed_norm, state_norm: of either half of a pair; a state may be normed already, and some
            heads norm neither.
        join: what makes one vector of a pair, [Hd, 2 Hd], and may add a bias; without it both
            halves enter the attention side by side, and the state alone is carried on.
        attention_norm: before the attention, where pairs are joined.
        last_norm: of what the layer left, before the product that says tokens; some heads have
            none.
        carried: norms, one after the other, of what the layer left as it enters the layer again.
    """

    layer: Layer
    embed_norm: nn.Module = NO_NORM
    state_norm: nn.Module = NO_NORM
    join: nn.Linear | None = None
    attention_norm: nn.Module = NO_NORM
    last_norm: nn.Module = NO_NORM
    carried: Sequence[nn.Module] = ()

    def along(
        self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """What the layer leaves of pairs, [.., Hd] of either half. -> [.., Hd]"""
        pair = torch.cat((self.embed_norm(embedded), self.state_norm(state)), dim=-1)
        if self.join is None:
            return self.layer.along(state, pair, rotation, attend)
        x = self.join(pair)
        return self.layer.along(x, self.attention_norm(x), rotation, attend)


class EagleModule(Head):
    """Base of all heads on pairs: those that read the target's last state, normed, unless they say
    otherwise.

    Attributes:
        inner: how the names of its layer's parts begin.
        layer: the shape of its decoder layer; `vocab` is that of its embedding.
        boundaries: the target's hidden states it reads.
        mask_token, mask_hidden: what a head that drafts in parallel reads in place of a token that
            is not known yet, and of the target's states beside it, [1, 1, n * H]. Other heads have
            none.
    """

    inner: str
    layer: ModelConfig
    aux_hidden_layers: tuple[int, ...]
    mask_token: int | None = None
    mask_hidden: nn.Parameter

    def attach(self, target: TargetView) -> None:
        """Let it borrow from this target. Raises LoadError if the head is not made for it."""
        check_sizes(self.title, target, self.layer.hidden, self.layer.vocab)
        self.target = target

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states side by side, [.., n * H], to a state of the head, [.., Hd]."""
        return self.target.normalise(features)

    def fusing(self) -> list[tuple[nn.Module | None, Tensor]]:
        """Products whose sum is what `fuse` makes, each with the norm before it, [Hd, width]: they
        read equal parts of the features, in order. Empty where there is more to it."""
        return []

    def forward(
        self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Pairs of embeddings and states, [.., Hd] each, to what the head makes of them [.., Hd].

        rotation: cos and sin of the pairs' positions, [.., 1, D / 2]. attend: as in
            `models.decoder`, of layer 0.
        """
        return self.leave(self.parts().along(embedded, self.enter(state), rotation, attend))

    def parts(self) -> Parts:
        """What `forward` is made of, between `enter` and `leave`."""
        raise NotImplementedError

    @property
    def entered(self) -> nn.Module | None:
        """The norm of states as they go into the layer, if there is one."""
        return None

    def enter(self, state: Tensor) -> Tensor:
        """States as they go into the layer. [.., Hd] -> [.., Hd]"""
        norm = self.entered
        return state if norm is None else norm(state)

    def leave(self, x: Tensor) -> Tensor:
        """What is made of what the layer left. [.., Hd] -> [.., Hd]"""
        return x

    def logits(self, made: Tensor) -> Tensor:
        """[.., Hd] -> logits of the tokens it says, [.., Vd]"""
        return self.say(made)

    def state(self, made: Tensor) -> Tensor:
        """What a drafted token is paired with, from what the head made of its parent. [.., Hd] ->
        [.., Hd]"""
        return made


EAGLE3 = "EAGLE-3 head"


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
        join: one product makes a vector of a pair before an ordinary layer, as in multi-token
            modules; the paper has another layer, and `norm_before_residual` is about that one.
        mask_token: the token that stands for those not known yet, in a head that drafts in parallel
            (P-EAGLE); such a head may have ordinary layers behind the first.
    """

    layer: ModelConfig
    target_hidden: int
    aux_hidden_layers: tuple[int, ...]
    draft_vocab: int
    own_embedding: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    join: bool = False
    mask_token: int | None = None


class _Eagle3Layer(Layer):
    """The paper's layer: the embedding comes first beside the state, and only the state is carried
    on."""

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


class Eagle3Head(EagleModule):
    """The head as it is trained and stored; tensors are called as in the speculators format.

    `mask_hidden` [1, 1, n * H] is what a head that drafts in parallel reads where there are no
    states. Letters: n boundaries, H the target's hidden size, Hd the head's.
    """

    title = EAGLE3
    inner = "layers"
    lm_head: nn.Linear

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c, width = config.layer, len(config.aux_hidden_layers) * config.target_hidden
        self.config, self.layer, self.aux_hidden_layers = config, c, config.aux_hidden_layers
        self.fc = nn.Linear(width, c.hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, c.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden, c.norm_eps) for _ in config.aux_hidden_layers
            )
        self.layers = nn.ModuleList([_Joined(c) if config.join else _Eagle3Layer(c)])
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
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        out: Tensor = self.fc(features)
        return out

    def fusing(self) -> list[tuple[nn.Module | None, Tensor]]:
        if not self.config.fc_norm:
            return [(self.input_norm if self.config.norm_before_fc else None, self.fc.weight)]
        if self.config.norm_before_fc:
            return []
        return list(
            zip(
                self.fc_norm, torch.split(self.fc.weight, self.config.target_hidden, 1), strict=True
            )
        )

    def forward(
        self, embedded: Tensor, state: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        x = super().forward(embedded, state, rotation, attend)
        _, *behind = self.layers
        for layer in behind:
            x = layer(x, rotation, attend)
        return x

    @property
    def entered(self) -> nn.Module | None:
        own = self.layers[0]
        return (
            own.hidden_norm
            if isinstance(own, _Eagle3Layer) and self.config.norm_before_residual
            else None
        )

    def parts(self) -> Parts:
        own = self.layers[0]
        carried = [self.norm] if self.config.norm_output else []
        if isinstance(own, _Joined):
            return Parts(
                layer=own, embed_norm=own.embed_norm, state_norm=own.hidden_norm, join=own.input_proj,
                attention_norm=own.input_layernorm, last_norm=self.norm, carried=carried,
            )  # fmt: skip
        assert isinstance(own, _Eagle3Layer)
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
    check_sizes(EAGLE3, target, config.target_hidden, c.vocab, fewer=True)
    if not config.own_embedding and c.hidden != target.hidden:
        raise LoadError(
            f"this {EAGLE3} has states of {c.hidden}, its target of {target.hidden}, so the target's embedding does"
            " not fit, and the head has none of its own: its checkpoint is incomplete"
        )
    if config.mask_token is not None and config.mask_token >= c.vocab:
        raise LoadError(
            f"the mask token {config.mask_token} of this {EAGLE3} is not one of its {c.vocab} tokens"
        )
    check_aux_hidden_layers(EAGLE3, target, config.aux_hidden_layers)


def load_head(directory: Path, target: TargetView) -> Eagle3Head:
    """Read a head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw = read_config(directory, EAGLE3)
    tensors = read_named(directory, EAGLE3)
    with reading(directory, EAGLE3):
        said = read_dialect(raw, target.layers)
        check_fused(EAGLE3, target, said.aux_hidden_layers, tensors)
        layer = read_layer(said.layer, tensors, target.vocab, layers=_layers(said))
        config = EagleConfig(
            layer=layer,
            target_hidden=target.hidden,
            aux_hidden_layers=said.aux_hidden_layers,
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
            raise LoadError(
                "join and norm_before_residual are both true in config.json: a layer has one of them"
            )
        if (
            "mask_hidden" in tensors and said.mask_token is not None
        ):  # [n * H], with axes of 1 before it or without
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        _set_vocabulary(config, tensors)
        return assemble(lambda: Eagle3Head(config), tensors, EAGLE3)


def save_head(
    head: Eagle3Head, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write a head in the speculators layout; `target` is the name or path of its target. Raises
    OSError."""
    c = head.config
    described = describe_speculator("eagle3", "Eagle3Speculator", c.layer, 3, target)
    own = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_hidden_layers),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        **({"join": True} if c.join else {}),
        "embed_requires_grad": False,
    }
    write(head, described | own, directory, dtype)


def read_named(directory: Path, kind: str) -> Tensors:
    """All tensors under the names that our heads have for them; buffers of no use are left out.
    Raises LoadError."""
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
    if not is_integer(count) or not 1 <= count <= MOST_LAYERS:
        raise LoadError(
            f"num_hidden_layers is {count!r}, not a whole number from 1 to {MOST_LAYERS}"
        )
    return int(count)


def _draft_vocab(raw: Json, tensors: Tensors, layer: ModelConfig) -> int:
    size = size_of(tensors, HEAD, 0)
    if raw.get("draft_vocab_size") not in (None, size):
        raise LoadError(
            f"draft_vocab_size is {raw['draft_vocab_size']!r}, but lm_head.weight has {size} rows"
        )
    if size > layer.vocab:
        raise LoadError(f"it says {size} tokens, more than the {layer.vocab} of its vocabulary")
    return size


def _set_vocabulary(config: EagleConfig, tensors: Tensors) -> None:
    """Make d2t offsets of ascending ids, whatever is stored, and t2d what follows from it."""
    size, vocab = config.draft_vocab, config.layer.vocab
    stored, order = tensors.pop("d2t", None), torch.arange(size)
    tensors.pop("t2d", None)
    if stored is None and size < vocab:
        raise LoadError(
            f"it says {size} of {vocab} tokens, but its checkpoint has no d2t that tells which"
        )
    if stored is None:
        return
    if stored.shape != (size,) or stored.is_floating_point():
        raise LoadError(
            f"d2t is {stored.dtype} of shape {list(stored.shape)}, not {size} whole numbers"
        )
    stored = stored.long()
    ids = stored + order
    if (stored.diff() < 0).any() or ids[
        -1
    ] >= vocab:  # no offsets of ascending ids: some store the ids themselves
        ids, at = stored.sort()
        tensors[HEAD] = tensors[HEAD][at]
    if ids[0] < 0 or ids[-1] >= vocab or (ids.diff() < 1).any():
        raise LoadError(f"d2t does not name {size} different tokens of {vocab}")
    if size < vocab:
        if torch.equal(ids, order):
            print(
                f"note: d2t of this {EAGLE3} is all zero: it only says the tokens below {size}",
                file=sys.stderr,
            )
        tensors["d2t"], tensors["t2d"] = maps_of(ids, vocab)


EAGLE1 = "EAGLE head"
# rows of two embeddings that differ by less than this share are the same but for how they are
# stored
ALIKE = 0.1


class _Eagle1Layer(Layer):
    """A decoder layer whose attention reads what enters it as it is."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(c, c.hidden)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)


class Eagle1Head(EagleModule):
    """The head under the names of its authors; what it makes of a pair is a state that the target's
    head can read."""

    title = EAGLE1

    def __init__(
        self, layer: ModelConfig, target_layers: int, bias: bool = True, own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:  # fmt: skip
        """`bias`: what joins a pair adds one. `own_embedding`, `own_head`: it has one that is not
        the target's."""
        super().__init__()
        self.layer, self.aux_hidden_layers = layer, (target_layers,)
        self.inner = (
            "layers." if own_head else ""
        )  # all of it, where the target's head says the tokens
        self.list_tokens(layer.vocab, layer.vocab)
        self.fc = nn.Linear(2 * layer.hidden, layer.hidden, bias=bias)
        self.layers = nn.ModuleList([_Eagle1Layer(layer)])
        self.embed_tokens = nn.Embedding(layer.vocab, layer.hidden) if own_embedding else None
        self.lm_head = nn.Linear(layer.hidden, layer.vocab, bias=False) if own_head else None

    def parts(self) -> Parts:
        (own,) = self.layers
        assert isinstance(own, _Eagle1Layer)
        return Parts(layer=own, join=self.fc)


def load_first_head(directory: Path, target: TargetView) -> Eagle1Head:
    """Read an EAGLE-1 or EAGLE-2 head for this target, in float32. Raises LoadError, also where it
    does not fit."""
    raw, tensors = read_config(directory, EAGLE1), read_named(directory, EAGLE1)
    with reading(directory, EAGLE1):
        said = _fields(raw)
        if "norm.weight" in tensors:
            raise LoadError(
                "it has a norm before its lm_head, as EAGLE-3 heads have: give it as eagle3:"
            )
        if said.get("truncated_vocab_size") not in (None, target.vocab):
            raise LoadError(
                f"it says {shown(said['truncated_vocab_size'])} tokens alone, which is not supported"
            )
        width = size_of(tensors, "fc.weight", 1)
        if width != 2 * target.hidden:
            raise LoadError(
                f"fc.weight reads {width} numbers, but an embedding and a state of this target have"
                f" {2 * target.hidden}: use a head that was trained for it"
            )
        # the layer is Llama's, whatever the target is; what adds a bias is said apart
        layer = read_layer(
            said | {"model_type": "llama", "attention_bias": False}, tensors, target.vocab
        )
        layer = replace(
            layer, qkv_bias=read_flag(said, "qkv_bias", f"{LAYER}self_attn.q_proj.bias" in tensors)
        )
        bias = read_flag(said, "bias", "fc.bias" in tensors)
        borrow(tensors, target, _is_target_s)
        own = EMBEDDING in tensors, HEAD in tensors
        head = assemble(lambda: Eagle1Head(layer, target.layers, bias, *own), tensors, EAGLE1)
        head.attach(target)
        return head


def _fields(raw: Json) -> Json:
    """The fields of the layer, with the flags beside them. Raises LoadError."""
    inner = raw.get("model", {})
    if not isinstance(inner, dict):
        raise LoadError("model in config.json is not an object")
    return raw | inner


def _is_target_s(table: Tensor, target: TargetView) -> bool:
    """Whether an embedding is the target's, as some rows from all over it tell: it is then
    borrowed, not kept twice."""
    if table.shape != (target.vocab, target.hidden):
        return False
    ids = torch.linspace(0, target.vocab - 1, min(64, target.vocab)).long()
    theirs = target.embed(ids.to(target.device)).cpu()
    return bool((table[ids] - theirs).norm() <= ALIKE * theirs.norm())
