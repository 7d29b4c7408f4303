"""Block drafters, DFlash and DSpark: the module, and its directories.

They are written in the layout of speculators 0.9, and read in all formats of `block.formats`. If a
checkpoint holds a copy of the target's embedding or lm head, the target's is borrowed instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.block.formats import (
    NON_CAUSAL,
    BlockConfig,
    MarkovShape,
    as_speculators,
    read_markov,
    windows_of,
)
from forerun.draft.head_config import (
    MAX_LAYERS,
    read_bool,
    read_config,
    read_int,
    read_layer_ids,
    reading,
)
from forerun.draft.head_files import (
    Tensors,
    assemble,
    describe_speculator,
    read_layer,
    read_tensors,
    write,
)
from forerun.draft.head_modules import (
    EMBEDDING,
    LM_HEAD,
    DecoderLayer,
    Head,
    Rotation,
    check_fc_width,
    check_fit,
    drop_borrowed,
    normalise_token_map,
)
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.models.families import Json, is_integer
from forerun.models.shortlist import spread

BLOCK = "block drafter"
LARGEST_BLOCK = 64
CONFIDENCE_WEIGHT = "confidence_head.proj.weight"


class Markov(nn.Module):
    """DSpark's Markov head (2607.05147): a bias of low rank that depends on the previous token.

    - vanilla: W2 W1[x].
    - gated: W2 (g * W1[x]), where the gate g reads the slot and the token.
    - rnn: a state of the size of the rank runs along the block. State, token and slot give a gate,
      a candidate and an output; the state moves to the candidate as far as the gate is closed, and
      the bias is W2 of the output.
    """

    def __init__(self, shape: MarkovShape, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden = shape.rank, config.layer.hidden
        self.kind, self.first = shape.kind, config.first
        self.markov_w1 = nn.Embedding(config.layer.vocab, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def bias(self, previous: Tensor) -> Tensor:
        """Return a vanilla head's bias after these tokens. [..] -> [.., Vd]"""
        out: Tensor = self.markov_w2(self.markov_w1(previous))
        return out

    def initial_state(self, slots: Tensor, anchor: Tensor) -> Tensor:
        """Return the state [..] after the anchor [1]; `slots` [S, Hd] is the block."""
        if self.kind != "rnn":
            return slots.new_zeros(0)
        state = slots.new_zeros(1, self.markov_w1.embedding_dim)
        for slot in slots[: self.first]:  # slots without a prediction move the state too
            state, _ = self._step(slot[None], self.markov_w1(anchor), state)
        return state[0]

    def forward(
        self, slot: Tensor, logits: Tensor, previous: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the bias after the nodes `previous` [F] to the logits [F, Vd] of a slot [Hd].

        `state` [F, ..] is that of the nodes' parents. Returns logits [F, Vd] and the nodes' states.
        """
        known = self.markov_w1(previous)
        slots = slot.expand(len(known), -1)
        if self.kind == "gated":
            known = self.gate_proj(torch.cat((slots, known), -1)).sigmoid() * known
        if self.kind == "rnn":
            state, known = self._step(slots, known, state)
        return logits + self.markov_w2(known), state

    def _step(self, slots: Tensor, known: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next state and the output. slots [F, Hd], known and state [F, r]"""
        joint = self.joint_proj(torch.cat((state, known, slots), -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), output.tanh()


class _Confidence(nn.Module):
    """The logit of the probability that a slot's token is accepted if those before it are."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width = config.layer.hidden
        if config.confidence_with_markov:
            assert config.markov is not None
            width += config.markov.rank
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)[..., 0]
        return out


class BlockHead(Head):
    """A block drafter with the tensor names of the speculators format."""

    title = BLOCK
    markov_head: Markov

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = config.layer
        self.config = config
        self.fc = nn.Linear(config.fused_width, c.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        if config.own_head:
            self.lm_head = nn.Linear(c.hidden, config.draft_vocab, bias=False)
        if config.markov is not None:
            self.markov_head = Markov(config.markov, config)
        if config.confidence:
            self.confidence_head = _Confidence(config)
        self.init_token_map(config.draft_vocab, c.vocab)

    def attach(self, target: TargetView) -> None:
        """Set the target that the head borrows from. Raises LoadError if it does not fit."""
        borrows = not (self.config.own_embedding and self.config.own_head)
        check_fit(BLOCK, target, self.config, borrows=borrows)
        self.target = target

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's concatenated states [.., n * H] into context, [.., Hd]."""
        out: Tensor = self.hidden_norm(self.fc(states))
        return out

    def context_kv(self, layer: int, context: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values of context in one layer, [.., Hd] -> [.., Hkv, D] each.

        Each token's depend on its own context alone: context has no residual stream.
        """
        decoder_layer = self.layers[layer]
        assert isinstance(decoder_layer, DecoderLayer)
        attention = decoder_layer.self_attn
        heads = (*context.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(context).view(heads))
        return kernels.rotate(keys, *rotation), attention.v_proj(context).view(heads)

    def forward(self, embedded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Run the slots of blocks, and norm them. [.., Hd] -> [.., Hd]

        `rotation` is that of their positions, `attend` as in `models.decoder`, of each layer.
        """
        x = embedded
        for layer in self.layers:
            x = layer(x, rotation, attend)
        out: Tensor = self.norm(x)
        return out

    def add_markov_bias(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Add the bias of a vanilla Markov head, if there is one, after the tokens `previous`, as
        training does. [.., Vd], [..] -> [.., Vd]"""
        return logits + self.markov_head.bias(previous) if self.config.markov else logits

    def over_target_vocab(self, logits: Tensor) -> Tensor:
        """Spread logits over the target's vocabulary, -inf for tokens that the head lacks. [.., Vd]
        -> [.., V]"""
        return spread(logits, self.tokens(), self.config.layer.vocab)

    def confidence_logit(self, slots: Tensor, previous: Tensor) -> Tensor:
        """Return the logit of the probability that the token after `previous` is accepted,
        whichever it is. [.., Hd], [..] -> [..]"""
        if self.config.confidence_with_markov:
            slots = torch.cat((slots, self.markov_head.markov_w1(previous)), -1)
        out: Tensor = self.confidence_head(slots)
        return out


# ---------------------------------------------------------------- loading and saving


def load_block(directory: Path, target: TargetView) -> BlockHead:
    """Load a block drafter for this target, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, BLOCK), read_tensors(directory, BLOCK)
    with reading(directory, BLOCK):
        drop_borrowed(tensors, target)
        config = _read_block_config(as_speculators(raw), tensors, target)
        normalise_token_map(tensors, config.draft_vocab, config.layer.vocab)
        head = assemble(lambda: BlockHead(config), tensors, BLOCK)
        head.attach(target)
        return head


def _read_block_config(raw: Json, tensors: Tensors, target: TargetView) -> BlockConfig:
    """Read a config in the speculators format. Raises LoadError."""
    fields = raw.get("transformer_layer_config")
    if not isinstance(fields, dict):
        raise LoadError(
            "transformer_layer_config in config.json is not an object: it describes no layers"
        )
    made_for = fields.get("num_target_layers")
    if is_integer(made_for) and made_for != target.layers:
        raise LoadError(
            f"it was made for a target of {made_for} layers, this one has {target.layers}"
        )
    layer = _read_layers(raw, tensors, target.vocab)
    ids = read_layer_ids(raw, "aux_hidden_state_layer_ids")
    check_fc_width(BLOCK, target, ids, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    confidence_width = shapes.get(CONFIDENCE_WEIGHT, (0, 0))[-1]
    # two names of one flag
    from_anchor = read_bool(raw, "query_zero_predicts_next", False)
    draft_vocab = layer.vocab
    if raw.get("draft_vocab_size") is not None:
        draft_vocab = read_int(raw, "draft_vocab_size", 1, layer.vocab)
    config = BlockConfig(
        layer=layer,
        target_hidden=target.hidden,
        aux_hidden_layers=ids,
        block=read_int(raw, "block_size", 1, LARGEST_BLOCK),
        mask_token=read_int(raw, "mask_token_id", 0, layer.vocab - 1),
        window_causal=any(layer.windows) and not read_bool(raw, NON_CAUSAL, False),
        sample_from_anchor=read_bool(raw, "sample_from_anchor", from_anchor),
        draft_vocab=draft_vocab,
        own_embedding=EMBEDDING in tensors,
        own_head=LM_HEAD in tensors,
        markov=read_markov(raw, shapes),
        confidence=read_bool(raw, "enable_confidence_head", CONFIDENCE_WEIGHT in tensors),
        confidence_with_markov=read_bool(
            raw, "confidence_head_with_markov", confidence_width > layer.hidden
        ),
    )
    if config.depth < 1:
        raise LoadError(
            "block_size 1 leaves no slot that predicts a token, since the anchor's does not"
        )
    if config.confidence_with_markov and config.markov is None:
        raise LoadError(
            "confidence_head_with_markov in config.json is true, but there is no Markov head"
        )
    if config.draft_vocab < layer.vocab and not config.own_head:
        raise LoadError(
            f"it predicts {config.draft_vocab} of {layer.vocab} tokens, but its checkpoint has no"
            f" {LM_HEAD}"
        )
    return config


def _read_layers(raw: Json, tensors: Tensors, vocab: int) -> ModelConfig:
    fields, windows = raw["transformer_layer_config"], windows_of(raw)
    count = read_int(fields, "num_hidden_layers", 1, MAX_LAYERS)
    fields = {"model_type": "qwen3"} | fields | {"layer_types": None}
    config = read_layer(fields, tensors, vocab, layers=count)
    return replace(config, windows=tuple(windows)) if windows else config


def save_block(
    head: BlockHead, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write a block drafter; `target` is the name or path of its target. Raises OSError."""
    c = head.config
    fields = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "aux_hidden_state_layer_ids": list(c.aux_hidden_layers),
        "block_size": c.block,
        "mask_token_id": c.mask_token,
        "sample_from_anchor": c.sample_from_anchor,
        NON_CAUSAL: not c.window_causal,
        "markov_rank": c.markov.rank if c.markov else 0,
        "markov_head_type": c.markov.kind if c.markov else "vanilla",
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov,
    }
    described = describe_speculator("dspark", "DSparkSpeculator", c.layer, c.depth, target)
    write(head, described | fields, directory, dtype)
