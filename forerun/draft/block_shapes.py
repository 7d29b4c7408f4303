"""Shapes of what block drafters have beside their layers, and how a config.json says them, in words of speculators.

A drafter has one law at most: what makes the logits of a slot depend on the tokens that are drafted before it. No torch
here: what a drafter is for is asked of files that are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from forerun.draft.fields import read_whole
from forerun.errors import LoadError, shown
from forerun.models.config import ModelConfig
from forerun.models.families import Json, is_whole

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]
MARKOV = ("vanilla", "gated", "rnn")
DOMINO, DFLASH2, XPRESS = "domino", "dflash2", "xpress"
HEAD, BARE = "domino_head.", ("prefix_gru.", "embed_proj.")  # tensors of a law that stand by themselves in files
MOST = 1 << 16  # of any size below


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """`block_laws.Markov`. rank: of the factors; kind: one of `MARKOV`."""

    rank: int
    kind: str = "vanilla"


@dataclass(frozen=True, slots=True)
class GruShape:
    """`block_laws.GruLaw`. state: of the GRU; inner: width of the correction; plain: slots that go without one."""

    state: int
    inner: int
    plain: int


@dataclass(frozen=True, slots=True)
class SelectorShape:
    """`block_laws.Selector`. rank: of what is known of tokens; most: candidates."""

    rank: int
    most: int


@dataclass(frozen=True, slots=True)
class ConvShape:
    """`block_head.Convolved`. taps: slots that it sums; group: channels that share what a slot adds."""

    taps: int
    group: int


@dataclass(frozen=True, slots=True)
class RefinerShape:
    """`block_laws.Refiner`. rank: of its states; ratio: how many times as wide its MLP is."""

    rank: int
    ratio: int = 2


LawShape = MarkovShape | GruShape | SelectorShape | RefinerShape


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
        draft_vocab: tokens it can say; fewer than `vocab` with a map, see `Head`.
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


def read_law(raw: Json, shapes: Shapes) -> LawShape | None:
    """The law that is described; `shapes` are those of the tensors, as far as they are known. Raises LoadError."""
    return READERS.get(str(raw.get("speculators_model_type")), _markov)(raw, shapes)


def _markov(raw: Json, shapes: Shapes) -> MarkovShape | None:
    rank = _size(raw, "markov_rank", shapes, "markov_head.markov_w1.weight", 1, default=0)
    kind = raw.get("markov_head_type")
    if kind not in (None, *MARKOV):
        raise LoadError(f"its Markov head is of the type {shown(kind)}: only {', '.join(MARKOV)} are supported")
    return MarkovShape(rank, kind or "vanilla") if rank else None


def _gru(raw: Json, shapes: Shapes) -> GruShape:
    plain = read_whole(raw, "pure_draft_prefix_len", 0, MOST)
    state = _size(raw, "gru_hidden_dim", shapes, f"{HEAD}prefix_gru.weight_hh_l0", 1)
    return GruShape(state, _size(raw, "emb_dim", shapes, f"{HEAD}embed_proj.0.weight", 0), plain)


def _selector(raw: Json, shapes: Shapes) -> SelectorShape:
    tensor, layer = "candidate_selector.predecessor_codebook", raw.get("transformer_layer_config")
    rank, most = _size(raw, "selector_rank", shapes, tensor, 1), read_whole(raw, "selector_top_k", 1, MOST, default=16)
    vocab: Any = shapes[tensor][0] if tensor in shapes else layer.get("vocab_size") if isinstance(layer, dict) else None
    if is_whole(vocab) and (most > vocab or raw.get("draft_vocab_size") not in (None, vocab)):
        said = shown(raw.get("draft_vocab_size"))
        raise LoadError(f"it chooses among {most} of {said} tokens, but must say all {vocab} of its target")
    return SelectorShape(rank, most)


def _refiner(raw: Json, shapes: Shapes) -> RefinerShape:
    rank = _size(raw, "xpress_rank", shapes, "refiner_head.token_embed.weight", 1)
    inner = shapes.get("refiner_head.mlp_gate.weight", (0, 0))[0]
    ratio = read_whole(raw, "xpress_mlp_ratio", 1, MOST, inner // rank or 2)
    mixed = shapes.get("refiner_head.mix_l", (0, raw.get("block_size")))[1]
    if inner not in (0, ratio * rank) or mixed != raw.get("block_size"):
        wanted = f"{ratio} times {rank} and blocks of {shown(raw.get('block_size'))}"
        raise LoadError(f"its refiner has {inner} numbers and blocks of {mixed}, config.json asks for {wanted}")
    return RefinerShape(rank, ratio)


def read_conv(raw: Json, shapes: Shapes, hidden: object) -> ConvShape | None:
    """The convolutions of its layers, whose states are of `hidden`, if it has some. Raises LoadError."""
    if raw.get("speculators_model_type") != DFLASH2:
        return None
    taps = _size(raw, "conv_kernel_size", shapes, "layers.0.attention_conv.base_kernel", 1, 2)
    group, block = read_whole(raw, "conv_group_size", 1, MOST, 16), raw.get("block_size")
    if taps < 1 or not isinstance(block, int) or taps > block:
        raise LoadError(f"conv_kernel_size in config.json is {taps}, for blocks of {shown(block)} slots")
    if not is_whole(hidden):
        raise LoadError(f"hidden_size in config.json is {shown(hidden)}, not a whole number")
    assert isinstance(hidden, int)
    made = shapes.get("layers.0.attention_conv.kernel_projection.weight", (2 * taps * (hidden // group), 0))[0]
    if hidden % group or made != 2 * taps * (hidden // group):
        raise LoadError(f"conv_group_size in config.json is {group}, which does not fit its states of {hidden}")
    return ConvShape(taps, group)


READERS: dict[str, Callable[[Json, Shapes], LawShape | None]] = {DOMINO: _gru, DFLASH2: _selector, XPRESS: _refiner}


def named(tensors: Mapping[str, T]) -> dict[str, T]:
    """Whatever is known of tensors, by the names they have in modules here."""
    return {HEAD + name if name.startswith(BARE) else name: held for name, held in tensors.items()}


def _size(raw: Json, name: str, shapes: Shapes, tensor: str, axis: int, default: int | None = None) -> int:
    """A size that config.json says, or the axis of a tensor: the same, where both are known."""
    shape = shapes.get(tensor, ())
    held = shape[axis] if axis < len(shape) else None
    size = read_whole(raw, name, 1 if default is None else 0, MOST, default if held is None else held)
    if shapes and size and held is None:
        raise LoadError(f"its checkpoint has no {tensor.removeprefix(HEAD)}: it is incomplete, or of another kind")
    if held not in (None, size):
        raise LoadError(f"{tensor.removeprefix(HEAD)} has {held} numbers where config.json asks for {size}, by {name}")
    return size
