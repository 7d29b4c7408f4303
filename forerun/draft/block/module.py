"""Block drafters on disk: written in the layout of speculators 0.9 (`dspark`, or `dflash` without
Markov and confidence heads), read in others too (`block_dialects`).

Whether slot k says the token behind its own position or the one at it is a flag of config.json, and
a head that is read the wrong way still drafts, but is never right. Where the flag is not there,
slots say the token at their own position: files of both kinds from before the flag existed are
meant so. What older files hold of an embedding and a head is the drafter's own, unless it is the
target's, which is borrowed then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.block.formats import (
    NON_CAUSAL,
    BlockConfig,
    MarkovShape,
    as_speculators,
    read_law,
    windows_of,
)
from forerun.draft.head_files import (
    MOST_LAYERS,
    Tensors,
    assemble,
    describe_speculator,
    read_bool,
    read_config,
    read_ids,
    read_layer,
    read_tensors,
    read_whole,
    reading,
    write,
)  # fmt: skip
from forerun.draft.head_modules import (
    EMBEDDING,
    HEAD,
    DecoderLayer,
    Head,
    borrow,
    check_aux_hidden_layers,
    check_fused,
    check_map,
    check_sizes,
)
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.config import Json, ModelConfig, is_integer
from forerun.models.decoder import Attend
from forerun.models.shortlist import spread


@dataclass(frozen=True, slots=True)
class Behind:
    """What a law knows of some nodes of a draft, of one level.

    Attributes:
        slot: which slot of the block says their children.
        made [S, Hd]: what the layers made of all slots.
        said [F, Vd]: what that slot says by itself.
        previous [F]: the nodes' tokens.
    """

    slot: int
    made: Tensor
    said: Tensor
    previous: Tensor


class Markov(nn.Module):
    """DSpark's Markov head (2607.05147): a bias of low rank, by the token before.

    - vanilla: W2 W1[x].
    - gated: W2 (g * W1[x]), where the gate g sees the slot and the token.
    - rnn: a state of the size of the rank goes along the block. From the state, the token and the
      slot come a gate, a candidate and an output; the state moves to the candidate as far as the
      gate is closed, and W2 says the output.
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
        """What a vanilla one adds behind these tokens, whatever the slot. [..] -> [.., Vd]"""
        out: Tensor = self.markov_w2(self.markov_w1(previous))
        return out

    def begin(self, made: Tensor, anchor: Tensor) -> Tensor:
        """The state above the root, [..]; made [S, Hd], of all slots; anchor [1]."""
        if self.kind != "rnn":
            return made.new_zeros(0)
        state = made.new_zeros(1, self.markov_w1.embedding_dim)
        for slot in range(
            self.first
        ):  # slots that say nothing move it, too, as they did when it was trained
            state, _ = self._step(made[slot : slot + 1], self.markov_w1(anchor), state)
        return state[0]

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits behind some nodes [F, Vd], and the state for their children; state [F, ..]: that
        of their parents."""
        known = self.markov_w1(behind.previous)
        made = behind.made[behind.slot].expand(len(known), -1)
        if self.kind == "gated":
            known = self.gate_proj(torch.cat((made, known), -1)).sigmoid() * known
        if self.kind == "rnn":
            state, known = self._step(made, known, state)
        return behind.said + self.markov_w2(known), state

    def _step(self, made: Tensor, known: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, and what W2 says. made [F, Hd], known and state [F, r]"""
        gate, candidate, output = self.joint_proj(torch.cat((state, known, made), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), output.tanh()


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
        self.fc = nn.Linear(
            len(config.aux_hidden_layers) * config.target_hidden, c.hidden, bias=False
        )
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

    def remember(
        self, layer: int, context: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of context for one layer, each of its own position: context has no
        residual stream. [.., Hd] -> [.., Hkv, D] each"""
        made = self.layers[layer]
        assert isinstance(made, DecoderLayer)
        own = made.self_attn
        heads = (*context.shape[:-1], -1, own.head_dim)
        keys = kernels.rotate(own.k_norm(own.k_proj(context).view(heads)), *rotation)
        return keys, own.v_proj(context).view(heads)

    def forward(self, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Slots, [.., Hd], to what is made of them, [.., Hd]. rotation: cos and sin of their
        positions, [.., 1, D / 2];
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
        """The logits of slots behind the tokens `previous`, by what training knows: no law, or a
        vanilla Markov head. [.., Vd], [..] -> [.., Vd]"""
        return logits + self.markov_head.bias(previous) if self.config.law else logits

    def follow(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; what it cannot say is -inf. [.., Vd] -> [.., V]"""
        return spread(logits, self.tokens(), self.config.layer.vocab)

    def trust(self, made: Tensor, previous: Tensor) -> Tensor:
        """The logit of how likely the token behind `previous` is to stand, whichever it is. [..,
        Hd], [..] -> [..]"""
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
    check_aux_hidden_layers(title, target, config.aux_hidden_layers)
    if not 0 <= config.mask_token < c.vocab:
        raise LoadError(
            f"the mask token {config.mask_token} is none of the {c.vocab} tokens of the target"
        )


KIND = BlockHead.title
LARGEST_BLOCK = 64
TRUST = "confidence_head.proj.weight"


def save_block(
    head: BlockHead, directory: Path, target: str | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write a head; `target` is the name or path of its target. Raises OSError."""
    c = head.config
    described = describe_speculator("dspark", "DSparkSpeculator", c.layer, c.depth, target)
    own = {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "aux_hidden_state_layer_ids": list(c.aux_hidden_layers),
        "block_size": c.block,
        "mask_token_id": c.mask_token,
        "sample_from_anchor": c.sample_from_anchor,
        NON_CAUSAL: not c.window_causal,
        "markov_rank": c.law.rank if c.law else 0,
        "markov_head_type": c.law.kind if c.law else "vanilla",
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov,
    }
    write(head, described | own, directory, dtype)


def load_block(directory: Path, target: TargetView) -> BlockHead:
    """Read a head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    with reading(directory, KIND):
        borrow(tensors, target)
        config = _config(as_speculators(raw), tensors, target)
        check_fit(config, target)
        check_map(tensors, config.draft_vocab, config.layer.vocab)
        return assemble(lambda: BlockHead(config), tensors, KIND)


def _config(raw: Json, tensors: Tensors, target: TargetView) -> BlockConfig:
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise LoadError(
            "transformer_layer_config in config.json is not an object: it describes no layers"
        )
    made_for = layer.get("num_target_layers")
    if is_integer(made_for) and made_for != target.layers:
        raise LoadError(
            f"it was made for a target of {made_for} layers, this one has {target.layers}"
        )
    layers, ids = _layers(raw, tensors, target.vocab), read_ids(raw, "aux_hidden_state_layer_ids")
    check_fused(KIND, target, ids, tensors)
    vocab = raw.get("draft_vocab_size")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    law, trusts = read_law(raw, shapes), shapes.get(TRUST, (0, 0))[-1]
    config = BlockConfig(
        layer=layers,
        target_hidden=target.hidden,
        aux_hidden_layers=ids,
        block=read_whole(raw, "block_size", 1, LARGEST_BLOCK),
        mask_token=read_whole(raw, "mask_token_id", 0, layers.vocab - 1),
        window_causal=any(layers.windows) and not read_bool(raw, NON_CAUSAL, False),
        sample_from_anchor=read_bool(
            raw, "sample_from_anchor", read_bool(raw, "query_zero_predicts_next", False)
        ),
        draft_vocab=layers.vocab
        if vocab is None
        else read_whole(raw, "draft_vocab_size", 1, layers.vocab),
        own_embedding=EMBEDDING in tensors,
        own_head=HEAD in tensors,
        law=law,
        confidence=read_bool(raw, "enable_confidence_head", TRUST in tensors),
        confidence_with_markov=read_bool(
            raw, "confidence_head_with_markov", trusts > layers.hidden
        ),
    )
    if config.depth < 1:
        raise LoadError(
            "block_size 1 leaves no slot that says a token, since the anchor's says none"
        )
    if config.confidence_with_markov and law is None:
        raise LoadError(
            "confidence_head_with_markov in config.json is true, but there is no Markov head"
        )
    if config.draft_vocab < layers.vocab and not config.own_head:
        raise LoadError(
            f"it says {config.draft_vocab} of {layers.vocab} tokens, but its checkpoint has no lm_head.weight"
        )
    return config


def _layers(raw: Json, tensors: Tensors, vocab: int) -> ModelConfig:
    """The decoder layers that transformer_layer_config describes."""
    layer, windows = raw["transformer_layer_config"], windows_of(raw)
    count = read_whole(layer, "num_hidden_layers", 1, MOST_LAYERS)
    config = read_layer(
        {"model_type": "qwen3"} | layer | {"layer_types": None}, tensors, vocab, layers=count
    )
    return replace(config, windows=tuple(windows)) if windows else config
