"""Shapes of what block drafters have beside their layers, and how a config.json says them, in words
of speculators.

A drafter has one law at most, its Markov head: what makes the logits of a slot depend on the tokens
before it. No torch
here: what a drafter is for is asked of files that are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.draft.head_files import read_ids, read_whole
from forerun.errors import LoadError, shown
from forerun.models.config import Json, ModelConfig, is_integer

KINDS = ("dspark", "dflash")  # as speculators calls them
DEEPSPEC, DEEPSPEC_GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
NON_CAUSAL = "sliding_window_non_causal"
SLIDING, WINDOW = (
    "sliding_attention",
    4096,
)  # and the window that transformers takes for a Qwen3 that does not say
CLASSES = (DEEPSPEC, DEEPSPEC_GEMMA, "DSparkDraftModel", "DFlashDraftModel")
ANCHOR = (
    "sample_from_anchor",
    "query_zero_predicts_next",
)  # a slot says the token behind its own position
OWN = (
    "block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "draft_vocab_size", "causal", NON_CAUSAL,
)  # fmt: skip
FLAGS = ("sample_from_anchor", NON_CAUSAL, "enable_confidence_head", "confidence_head_with_markov")
UNKNOWN = (
    "attention_value_scale",
    "attention_sink_bias",
    "selector_rank",
)  # would change what is computed
NOT_READ = "which forerun does not read: use a DFlash or DSpark drafter"
SCALES = (
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)  # the same, unless they are 1


def arch_of(raw: Json) -> str:
    """The class its authors gave, the first of several; "" where there is none."""
    named = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def is_block(raw: Json) -> bool:
    """Whether it describes a block drafter, in whatever dialect."""
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] in KINDS
    return "dflash_config" in raw or arch_of(raw) in CLASSES


def as_speculators(raw: Json) -> Json:
    """The same as speculators would say it; what a file does not say is not there. Raises LoadError
    for what no dialect means."""
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] not in KINDS:
            raise LoadError(f"config.json does not describe one, {' or '.join(KINDS)}")
        _check_causal(raw)
        return raw
    own = raw.get("dflash_config") or {}
    if not isinstance(own, dict):
        raise LoadError("dflash_config in config.json is not an object")
    both = raw | own
    said = {name: both[name] for name in OWN if both.get(name) is not None}
    said |= {"speculators_model_type": _kind(raw, own), "transformer_layer_config": raw}
    _check(raw, own)
    deepspec = arch_of(raw) == DEEPSPEC
    anchor = [place[name] for name in ANCHOR for place in (own, raw) if place.get(name) is not None]
    said["sample_from_anchor"] = anchor[0] if anchor else deepspec
    if both.get("target_layer_ids") is not None:
        said["aux_hidden_state_layer_ids"] = [i + 1 for i in read_ids(both, "target_layer_ids")]
    if arch_of(raw).startswith("DFlash") and both.get("projector_type") is None:
        said.setdefault(NON_CAUSAL, True)  # z-lab's
    if deepspec and NON_CAUSAL not in said and SLIDING in str(raw.get("layer_types")):
        raise LoadError(
            f"some of its layers have {SLIDING}, but no {NON_CAUSAL} says which slots these see"
        )
    return said


def _kind(raw: Json, own: Json) -> str:
    """What speculators would call it. Raises LoadError."""
    projector, arch = own.get("projector_type", raw.get("projector_type")), arch_of(raw)
    other = projector if projector not in (None, *KINDS) else arch
    if other != arch or (arch.endswith("DraftModel") and arch not in CLASSES):
        raise LoadError(f"it is a descendant of DFlash ({shown(other)}), {NOT_READ}")
    return "dspark" if own.get("markov_rank", raw.get("markov_rank")) else "dflash"


def _check(raw: Json, own: Json) -> None:
    """Raise LoadError for layers that are not read."""
    if arch_of(raw) == DEEPSPEC_GEMMA:
        raise LoadError("its layers are Gemma 4's, which are not supported in drafters")
    if arch_of(raw).startswith("DFlashLaguna"):
        raise LoadError("its layers are Laguna's, which are not supported in drafters")
    _check_causal(raw | own)
    odd = [name for name in UNKNOWN if raw.get(name) is not None or own.get(name) is not None]
    odd += [name for name in SCALES if own.get(name) not in (None, 1)]
    if odd:
        raise LoadError(
            f"{odd[0]} in config.json changes what it computes in a way that is not supported"
        )


def _check_causal(raw: Json) -> None:
    """Raise LoadError where slots see those before them alone in all layers."""
    if raw.get("causal") not in (None, False):
        raise LoadError(f"its blocks are causal (causal in config.json), {NOT_READ}")


def windows_of(raw: Json) -> list[int | None]:
    """How many tokens of context each layer sees before the anchor, None for all, of a drafter as
    speculators tells it; nothing where no layer says. Raises LoadError for another attention than
    these, and for what contradicts itself."""
    layer = raw["transformer_layer_config"]
    types, used = layer.get("layer_types"), layer.get("use_sliding_window")
    window = layer.get("sliding_window", WINDOW if used is True else None)
    if types is None:
        return []
    known = ("full_attention", SLIDING)
    if not isinstance(types, list) or not all(kind in known for kind in types):
        raise LoadError(
            f"some of its layers have another attention than {' and '.join(known)}, which is not supported"
        )
    if SLIDING not in types:
        return []
    if len(types) != layer.get("num_hidden_layers"):
        layers = shown(layer.get("num_hidden_layers"))
        raise LoadError(
            f"layer_types in config.json has {len(types)} entries, but there are {layers} layers"
        )
    if not is_integer(window) or window < 1 or used is False:
        raise LoadError(
            f"some of its layers have {SLIDING}, but sliding_window in config.json is {shown(window)} and"
            f" use_sliding_window {shown(used)}: one of them is wrong"
        )
    return [window if kind == SLIDING else None for kind in types]


Shapes = Mapping[str, tuple[int, ...]]
MARKOV = ("vanilla", "gated", "rnn")
MOST = 1 << 16  # of any size below


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """`block_laws.Markov`. rank: of the factors; kind: one of `MARKOV`."""

    rank: int
    kind: str = "vanilla"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The shape of a head.

    Attributes:
        layer: its decoder layers, of a family like Qwen3; `vocab` is the target's.
        target_hidden: size of the target's hidden states.
        boundaries: which of them make the context, in the order in which they are fused.
        block: slots of a block, S, the anchor's included.
        mask_token: the target's token that fills the slots behind the anchor.
        window_causal: in layers with a window (`layer.windows`), which see the context of so many
            tokens before the anchor, slots see those before them alone; otherwise all of their
            block.
        sample_from_anchor: slot k says the token at position start + k + 1, start being the
            anchor's (DSpark); otherwise the one at its own position start + k, and slot 0 says
            nothing (DFlash).
        draft_vocab: tokens it can say; fewer than `vocab` with a map, see `Head`.
        own_embedding, own_head: it has an embedding and a head of its own; otherwise the target's
            are used.
        law: its Markov head, if what it says depends on the tokens before a slot.
        confidence: there is a confidence head.
        confidence_with_markov: which also reads what the Markov head knows of the token before.
    """

    layer: ModelConfig
    target_hidden: int
    aux_hidden_layers: tuple[int, ...]
    block: int
    mask_token: int
    window_causal: bool = False
    sample_from_anchor: bool = True
    draft_vocab: int
    own_embedding: bool = False
    own_head: bool = False
    law: MarkovShape | None = None
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
        """Whether its law, if it has one, adds what follows from the token before, and nothing
        else."""
        return self.law is None or self.law.kind == "vanilla"

    def is_causal(self, layer: int) -> bool:
        """Whether slots see no later ones in this layer."""
        return self.window_causal and self.layer.windows[layer] is not None


def read_law(raw: Json, shapes: Shapes) -> MarkovShape | None:
    """The law that is described; `shapes` are those of the tensors, as far as they are known.
    Raises LoadError."""
    rank = _size(raw, "markov_rank", shapes, "markov_head.markov_w1.weight", 1, default=0)
    kind = raw.get("markov_head_type")
    if kind not in (None, *MARKOV):
        raise LoadError(
            f"its Markov head is of the type {shown(kind)}: only {', '.join(MARKOV)} are supported"
        )
    return MarkovShape(rank, kind or "vanilla") if rank else None


def _size(
    raw: Json, name: str, shapes: Shapes, tensor: str, axis: int, default: int | None = None
) -> int:
    """A size that config.json says, or the axis of a tensor: the same, where both are known."""
    shape = shapes.get(tensor, ())
    held = shape[axis] if axis < len(shape) else None
    size = read_whole(
        raw, name, 1 if default is None else 0, MOST, default if held is None else held
    )
    if shapes and size and held is None:
        raise LoadError(f"its checkpoint has no {tensor}: it is incomplete, or of another kind")
    if held not in (None, size):
        raise LoadError(f"{tensor} has {held} numbers where config.json asks for {size}, by {name}")
    return size
