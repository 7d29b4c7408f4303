"""EAGLE-1, EAGLE-2, EAGLE-3 and P-EAGLE heads: modules, loading and saving.

EAGLE-3 (Li et al. 2503.01840): hidden states of several layers of the target are fused into one
state g_t of token t; the pair of the embedding of token t + 1 and g_t goes through one decoder
layer, which predicts token t + 2. P-EAGLE is such a head with a mask token, which drafts in one
forward pass. EAGLE-1 (2401.15077) reads the target's last hidden state alone, has no norm before
its attention, and predicts the target's next last state, from which the target's lm head predicts
the token; EAGLE-2 (2406.16858) is the same head, drafting trees.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.eagle.formats import (
    LAYER_IDS,
    EagleConfig,
    read_draft_vocab,
    read_flag,
    read_format,
)
from forerun.draft.head_config import (
    MAX_LAYERS,
    read_config,
    read_int,
    reading,
)
from forerun.draft.head_files import (
    FIRST_LAYER,
    Tensors,
    assemble,
    describe_speculator,
    read_layer,
    read_tensors,
    size_of,
    write,
)
from forerun.draft.head_modules import (
    EMBEDDING,
    LM_HEAD,
    DecoderLayer,
    Head,
    HeadLayer,
    JoinedLayer,
    Mlp,
    Rotation,
    SelfAttention,
    check_fc_width,
    check_fit,
    check_sizes,
    drop_borrowed,
)
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError, shown
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.models.shortlist import maps_of

EAGLE1, EAGLE3 = "EAGLE head", "EAGLE-3 head"
NO_NORM = nn.Identity()
# relative difference up to which an embedding in an EAGLE-1 head is a copy of a quantised target's
SAME_EMBEDDING = 0.1


# ---------------------------------------------------------------- modules


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """The modules that a head consists of beside its embedding, fusion and lm head.

    Attributes:
        layer: attention and MLP.
        embed_norm, state_norm: norms of the two halves of a pair.
        join: the product [Hd, 2 Hd] that joins a pair. Without it both halves enter the attention
            side by side, and the state alone starts the residual stream.
        attention_norm: after `join`, before the attention.
        last_norm: of the layer's output, before the lm head.
        fused_norm: of fused states, where the residual stream starts with normed states.
        carried: norms, in order, of the layer's output where it becomes the next token's state.
    """

    layer: HeadLayer
    embed_norm: nn.Module = NO_NORM
    state_norm: nn.Module = NO_NORM
    join: nn.Linear | None = None
    attention_norm: nn.Module = NO_NORM
    last_norm: nn.Module = NO_NORM
    fused_norm: nn.Module = NO_NORM
    carried: Sequence[nn.Module] = ()


class EagleModule(Head):
    """Base of EAGLE-style heads. By default a head reads the target's last state, normed.

    Attributes:
        program_prefix: how names of the parts begin that the native program computes.
        layer: the config of the decoder layer; `vocab` is that of the embedding.
        aux_hidden_layers: the target's hidden states that the head reads.
        mask_token, mask_hidden: P-EAGLE's stand-ins for a token that is not known yet, and for the
            target's states beside it, [1, 1, n * H].
    """

    program_prefix: str
    layer: ModelConfig
    aux_hidden_layers: tuple[int, ...]
    mask_token: int | None = None
    mask_hidden: nn.Parameter

    def attach(self, target: TargetView) -> None:
        """Set the target that the head borrows from. Raises LoadError if it does not fit."""
        check_sizes(self.title, target, self.layer.hidden, self.layer.vocab)
        self.target = target

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states that enter the head."""
        return next(self.parameters()).dtype

    def parts(self) -> HeadParts:
        """Return the modules that `forward`, `logits` and `next_state` consist of."""
        raise NotImplementedError

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's concatenated states [.., n * H] into a state of the head, [.., Hd]."""
        return self.target.normalise(states)

    def fusion_products(self) -> list[tuple[nn.Module | None, Tensor]]:
        """Return products [Hd, width], each with the norm before it, over equal parts of the states
        in order. Their sum after `fused_norm` is `fuse`; [] if that is not so."""
        return []

    def forward(
        self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """Run pairs of embeddings and states, [.., Hd] each. -> [.., Hd]

        `rotation` is that of the pairs' positions, `attend` as in `models.decoder`, of layer 0.
        """
        parts = self.parts()
        pair = torch.cat((parts.embed_norm(embedded), parts.state_norm(state)), dim=-1)
        if parts.join is None:
            return parts.layer.add_residuals(state, pair, rotation, attend)
        x = parts.join(pair)
        return parts.layer.add_residuals(x, parts.attention_norm(x), rotation, attend)

    def logits(self, output: Tensor) -> Tensor:
        """Return the logits of the head's outputs. [.., Hd] -> [.., Vd]"""
        return self.compute_logits(self.parts().last_norm(output))

    def next_state(self, output: Tensor) -> Tensor:
        """Return the state paired with a drafted token, from the head's output of its parent.
        [.., Hd] -> [.., Hd]"""
        for norm in self.parts().carried:
            output = norm(output)
        return output


class _Eagle3Layer(HeadLayer):
    """The paper's layer: embedding and state enter the attention side by side."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, 2 * c.hidden)
        self.mlp = Mlp(c)


class _JoinedEagle3Layer(JoinedLayer):
    """A layer after a product that joins the normed halves of a pair."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.embed_norm = nn.RMSNorm(c.hidden, c.norm_eps)


class Eagle3Head(EagleModule):
    """An EAGLE-3 or P-EAGLE head, with the tensor names of the speculators format."""

    title = EAGLE3
    program_prefix = "layers"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c, width = config.layer, config.fused_width
        self.config, self.layer = config, c
        self.aux_hidden_layers, self.mask_token = config.aux_hidden_layers, config.mask_token
        self.fc = nn.Linear(width, c.hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, c.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden, c.norm_eps) for _ in config.aux_hidden_layers
            )
        self.layers = nn.ModuleList([_JoinedEagle3Layer(c) if config.join else _Eagle3Layer(c)])
        self.layers.extend(DecoderLayer(c, layer) for layer in range(1, c.layers))
        if config.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.init_token_map(config.draft_vocab, c.vocab)

    def attach(self, target: TargetView) -> None:
        own_head = self.config.own_head
        borrows = not (self.config.own_embedding and own_head)
        check_fit(EAGLE3, target, self.config, borrows=borrows, fewer=own_head)
        self.target = target

    def tokens(self) -> Tensor | None:
        count = self.config.draft_vocab
        if self.d2t is not None or count == self.target.vocab:
            return super().tokens()
        return torch.arange(count, device=self.target.device)  # a smaller vocabulary, no map

    def fuse(self, states: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = torch.split(states, self.config.target_hidden, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        out: Tensor = self.parts().fused_norm(self.fc(states))
        return out

    def fusion_products(self) -> list[tuple[nn.Module | None, Tensor]]:
        if not self.config.fc_norm:
            return [(self.input_norm if self.config.norm_before_fc else None, self.fc.weight)]
        if self.config.norm_before_fc:
            return []
        weights = torch.split(self.fc.weight, self.config.target_hidden, 1)
        return list(zip(self.fc_norm, weights, strict=True))

    def forward(
        self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        x = super().forward(embedded, state, rotation, attend)
        for layer in list(self.layers)[1:]:
            x = layer(x, rotation, attend)
        return x

    def parts(self) -> HeadParts:
        first = self.layers[0]
        carried: list[nn.Module] = [self.norm] if self.config.norm_output else []
        if isinstance(first, _JoinedEagle3Layer):
            return HeadParts(
                layer=first,
                embed_norm=first.embed_norm,
                state_norm=first.hidden_norm,
                join=first.input_proj,
                attention_norm=first.input_layernorm,
                last_norm=self.norm,
                carried=carried,
            )
        assert isinstance(first, _Eagle3Layer)
        early = self.config.norm_before_residual
        return HeadParts(
            layer=first,
            embed_norm=first.input_layernorm,
            state_norm=NO_NORM if early else first.hidden_norm,
            last_norm=self.norm,
            fused_norm=first.hidden_norm if early else NO_NORM,
            carried=[*carried, first.hidden_norm] if early else carried,
        )

    @property
    def joined(self) -> JoinedLayer:
        """The only layer of a head with `join`."""
        (layer,) = self.layers
        assert isinstance(layer, JoinedLayer)
        return layer


class _Eagle1Layer(HeadLayer):
    """A decoder layer without a norm before its attention."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(c, c.hidden)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)


class Eagle1Head(EagleModule):
    """An EAGLE-1 or EAGLE-2 head with its authors' tensor names; its outputs are guesses of the
    target's normed last states."""

    title = EAGLE1

    def __init__(
        self,
        layer: ModelConfig,
        target_layers: int,
        bias: bool = True,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        """`bias` is that of `fc`; `own_embedding` and `own_head` are for a head that does not use
        the target's."""
        super().__init__()
        self.layer, self.aux_hidden_layers = layer, (target_layers,)
        # without an lm head of its own, the native program computes the whole head
        self.program_prefix = "layers." if own_head else ""
        self.init_token_map(layer.vocab, layer.vocab)
        self.fc = nn.Linear(2 * layer.hidden, layer.hidden, bias=bias)
        self.layers = nn.ModuleList([_Eagle1Layer(layer)])
        self.embed_tokens = nn.Embedding(layer.vocab, layer.hidden) if own_embedding else None
        self.lm_head = nn.Linear(layer.hidden, layer.vocab, bias=False) if own_head else None

    def parts(self) -> HeadParts:
        (layer,) = self.layers
        assert isinstance(layer, _Eagle1Layer)
        return HeadParts(layer=layer, join=self.fc)


# ---------------------------------------------------------------- loading and saving


def read_named_tensors(directory: Path, title: str) -> Tensors:
    """Read all tensors under forerun's names, without unused buffers. Raises LoadError."""
    named = {}
    for name, tensor in read_tensors(directory, title).items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = FIRST_LAYER + name.removeprefix("midlayer.")
        if not name.endswith("rotary_emb.inv_freq"):
            named[name] = tensor
    return named


def load_head(directory: Path, target: TargetView) -> Eagle3Head:
    """Load an EAGLE-3 or P-EAGLE head for this target, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, EAGLE3), read_named_tensors(directory, EAGLE3)
    with reading(directory, EAGLE3):
        found = read_format(raw, target.layers)
        check_fc_width(EAGLE3, target, found.aux_hidden_layers, tensors)
        parallel = found.mask_token is not None
        layers = (
            read_int(found.layer, "num_hidden_layers", 1, MAX_LAYERS, default=1) if parallel else 1
        )
        layer = read_layer(found.layer, tensors, target.vocab, layers=layers)
        own_head = read_flag(raw, "own_head", True)
        rows = size_of(tensors, LM_HEAD, 0) if own_head else layer.vocab
        config = EagleConfig(
            layer=layer,
            target_hidden=target.hidden,
            aux_hidden_layers=found.aux_hidden_layers,
            draft_vocab=read_draft_vocab(raw, rows, layer.vocab),
            own_embedding=EMBEDDING in tensors,
            own_head=own_head,
            norm_before_fc=read_flag(raw, "norm_before_fc", "input_norm.weight" in tensors),
            fc_norm=read_flag(raw, "fc_norm", "fc_norm.0.weight" in tensors),
            norm_before_residual=found.norm_before_residual,
            norm_output=found.norm_output,
            join=read_flag(raw, "join", f"{FIRST_LAYER}input_proj.weight" in tensors),
            mask_token=found.mask_token,
        )
        if config.join and config.norm_before_residual:
            raise LoadError(
                "join and norm_before_residual are both true in config.json: a layer has one of"
                " them"
            )
        if parallel and "mask_hidden" in tensors:  # stored with or without axes of size 1
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        _normalise_token_map(config, tensors)
        head = assemble(lambda: Eagle3Head(config), tensors, EAGLE3)
        head.attach(target)
        return head


def _normalise_token_map(config: EagleConfig, tensors: Tensors) -> None:
    """Make d2t offsets of ascending ids, whatever is stored, and derive t2d. Raises LoadError."""
    size, vocab = config.draft_vocab, config.layer.vocab
    stored, order = tensors.pop("d2t", None), torch.arange(size)
    tensors.pop("t2d", None)
    if stored is None:
        if size < vocab:
            raise LoadError(f"it predicts {size} of {vocab} tokens, but its checkpoint has no d2t")
        return
    if stored.shape != (size,) or stored.is_floating_point():
        raise LoadError(
            f"d2t is {stored.dtype} of shape {list(stored.shape)}, not {size} whole numbers"
        )
    stored = stored.long()
    ids = stored + order
    if (stored.diff() < 0).any() or ids[-1] >= vocab:
        # no offsets of ascending ids: some files store the ids themselves
        ids, rows = stored.sort()
        if config.own_head:
            tensors[LM_HEAD] = tensors[LM_HEAD][rows]
    if ids[0] < 0 or ids[-1] >= vocab or (ids.diff() < 1).any():
        raise LoadError(f"d2t does not name {size} different tokens of {vocab}")
    if size < vocab:
        if torch.equal(ids, order):
            print(
                f"note: d2t of this {EAGLE3} is all zero: it predicts only the tokens below {size}",
                file=sys.stderr,
            )
        tensors["d2t"], tensors["t2d"] = maps_of(ids, vocab)


def save_head(
    head: Eagle3Head, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write an EAGLE-3 head in the speculators layout; `target` is the name or path of its target.
    Raises OSError."""
    c = head.config
    fields = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        LAYER_IDS: list(c.aux_hidden_layers),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        **({"join": True} if c.join else {}),
        **({} if c.own_head else {"own_head": False}),
        "embed_requires_grad": False,
    }
    described = describe_speculator("eagle3", "Eagle3Speculator", c.layer, 3, target)
    write(head, described | fields, directory, dtype)


def load_eagle1_head(directory: Path, target: TargetView) -> Eagle1Head:
    """Load an EAGLE-1 or EAGLE-2 head for this target, in float32. Raises LoadError.

    Its authors' config.json is that of a Llama of one layer; vLLM's has the same in `model`. Either
    may come with an lm head of its own.
    """
    raw, tensors = read_config(directory, EAGLE1), read_named_tensors(directory, EAGLE1)
    with reading(directory, EAGLE1):
        nested = raw.get("model", {})
        if not isinstance(nested, dict):
            raise LoadError("model in config.json is not an object")
        fields = raw | nested
        if "norm.weight" in tensors:
            raise LoadError(
                "it has a norm before its lm_head, as EAGLE-3 heads have: give it as eagle3:"
            )
        truncated = fields.get("truncated_vocab_size")
        if truncated not in (None, target.vocab):
            raise LoadError(f"it predicts {shown(truncated)} tokens only, which is not supported")
        width = size_of(tensors, "fc.weight", 1)
        if width != 2 * target.hidden:
            raise LoadError(
                f"fc.weight reads {width} numbers, but an embedding and a state of this target have"
                f" {2 * target.hidden}: use a head that was trained for it"
            )
        # the layer is Llama's whatever the target is, and biases are declared by flags of their own
        llama = fields | {"model_type": "llama", "attention_bias": False}
        biased = f"{FIRST_LAYER}self_attn.q_proj.bias" in tensors
        layer = replace(
            read_layer(llama, tensors, target.vocab),
            qkv_bias=read_flag(fields, "qkv_bias", biased),
        )
        bias = read_flag(fields, "bias", "fc.bias" in tensors)
        drop_borrowed(tensors, target, SAME_EMBEDDING)
        own = EMBEDDING in tensors, LM_HEAD in tensors
        head = assemble(lambda: Eagle1Head(layer, target.layers, bias, *own), tensors, EAGLE1)
        head.attach(target)
        return head
