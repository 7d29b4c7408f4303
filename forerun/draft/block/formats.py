"""The config.json of block drafters: DSpark (2607.05147) and DFlash, in every published format.

All formats are translated to that of speculators 0.9 (`dspark`, or `dflash` for a drafter without
Markov and confidence heads). Numbers of hidden states mean the same there as in forerun: number i
enters layer i of the target. DeepSpec, z-lab and SpecForge count outputs of layers instead, and
have their fields at the top or in `dflash_config`.

Whether slot k predicts the token after its own position or the one at it is a flag, and a head
that is read the wrong way still drafts, but is never right. Without the flag, slots predict the
token at their own position (older files of both kinds), except for DeepSpec's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.draft.head_config import HeadConfig, read_int, read_layer_ids
from forerun.draft.kinds import DEEPSPEC, DEEPSPEC_GEMMA, arch_of
from forerun.errors import LoadError, shown
from forerun.models.families import Json, is_integer

KINDS = ("dspark", "dflash")  # speculators' names
CLASSES = (DEEPSPEC, DEEPSPEC_GEMMA, "DSparkDraftModel", "DFlashDraftModel")
MARKOV_KINDS = ("vanilla", "gated", "rnn")
NON_CAUSAL = "sliding_window_non_causal"
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096  # transformers' for a Qwen3 config without sliding_window
FROM_ANCHOR = ("sample_from_anchor", "query_zero_predicts_next")  # old and new names of one flag
FLAGS = ("sample_from_anchor", NON_CAUSAL, "enable_confidence_head", "confidence_head_with_markov")
COPIED = (
    "block_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "causal",
    NON_CAUSAL,
)
# fields that change the computation: not supported if present, or unless they are 1
UNSUPPORTED = ("attention_value_scale", "attention_sink_bias", "selector_rank")
UNSUPPORTED_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
NOT_READ = "which forerun does not read: use a DFlash or DSpark drafter"
MAX_RANK = 1 << 16


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """A Markov head: the rank of its factors, and one of `MARKOV_KINDS`."""

    rank: int
    kind: str = "vanilla"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(HeadConfig):
    """The shape of a block drafter; `mask_token` fills the slots after the anchor.

    Attributes:
        block: the number of slots in a block, S, the anchor's included.
        window_causal: in layers with a sliding window (`layer.windows`, counted back from the
            anchor), slots see only those before them; otherwise they see the whole block.
        sample_from_anchor: slot k predicts the token at position anchor + k + 1 (DSpark); otherwise
            the one at its own position anchor + k, and slot 0 predicts nothing (DFlash).
        own_head: it has its own lm head; otherwise it uses the target's.
        markov: the Markov head that makes a slot depend on the tokens drafted before it, if any.
        confidence: it has a confidence head,
        confidence_with_markov: which also reads the Markov head's embedding of the previous token.
    """

    block: int
    mask_token: int
    window_causal: bool = False
    sample_from_anchor: bool = True
    own_head: bool = False
    markov: MarkovShape | None = None
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def first(self) -> int:
        """The slot that predicts the token after the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block - self.first

    @property
    def is_bigram(self) -> bool:
        """True if predictions depend on at most the previous token, by an additive bias."""
        return self.markov is None or self.markov.kind == "vanilla"

    def is_causal(self, layer: int) -> bool:
        """Return True if slots see no later ones in this layer."""
        return self.window_causal and self.layer.windows[layer] is not None


def is_block(raw: Json) -> bool:
    """Return True if a config.json describes a block drafter in any format."""
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] in KINDS
    return "dflash_config" in raw or arch_of(raw) in CLASSES


def as_speculators(raw: Json) -> Json:
    """Translate a config.json to the speculators format; fields that it leaves out stay out.

    Raises LoadError for what forerun does not support in any format.
    """
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] not in KINDS:
            raise LoadError(f"config.json does not describe one, {' or '.join(KINDS)}")
        _check_not_causal(raw)
        return raw
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise LoadError("dflash_config in config.json is not an object")
    merged, arch = raw | nested, arch_of(raw)
    _check_supported(raw, nested)
    found = {name: merged[name] for name in COPIED if merged.get(name) is not None}
    found["speculators_model_type"] = "dspark" if merged.get("markov_rank") else "dflash"
    found["transformer_layer_config"] = raw
    flags = [part.get(name) for name in FROM_ANCHOR for part in (nested, raw)]
    flags = [flag for flag in flags if flag is not None]
    found["sample_from_anchor"] = flags[0] if flags else arch == DEEPSPEC
    if merged.get("target_layer_ids") is not None:
        ids = read_layer_ids(merged, "target_layer_ids")
        found["aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
    if arch.startswith("DFlash") and merged.get("projector_type") is None:
        found.setdefault(NON_CAUSAL, True)  # z-lab's drafters
    if arch == DEEPSPEC and NON_CAUSAL not in found and SLIDING in str(raw.get("layer_types")):
        raise LoadError(
            f"some of its layers have {SLIDING}, but no {NON_CAUSAL} says which slots these see"
        )
    return found


def _check_supported(raw: Json, nested: Json) -> None:
    """Raise LoadError for descendants of DFlash and layers that forerun does not read."""
    arch = arch_of(raw)
    projector = nested.get("projector_type", raw.get("projector_type"))
    other = projector if projector not in (None, *KINDS) else arch
    if other != arch or (arch.endswith("DraftModel") and arch not in CLASSES):
        raise LoadError(f"it is a descendant of DFlash ({shown(other)}), {NOT_READ}")
    for start, family in ((DEEPSPEC_GEMMA, "Gemma 4"), ("DFlashLaguna", "Laguna")):
        if arch.startswith(start):
            raise LoadError(f"its layers are {family}'s, which are not supported in drafters")
    _check_not_causal(raw | nested)
    odd = [name for name in UNSUPPORTED if (raw.get(name), nested.get(name)) != (None, None)]
    odd += [name for name in UNSUPPORTED_SCALES if nested.get(name) not in (None, 1)]
    if odd:
        raise LoadError(
            f"{odd[0]} in config.json changes what it computes in a way that is not supported"
        )


def _check_not_causal(raw: Json) -> None:
    """Raise LoadError if slots see only those before them in all layers."""
    if raw.get("causal") not in (None, False):
        raise LoadError(f"its blocks are causal (causal in config.json), {NOT_READ}")


def windows_of(raw: Json) -> list[int | None]:
    """Return the sliding window of each layer, None for full attention, of a config in the
    speculators format; [] if no layer has one. Raises LoadError for other kinds of attention."""
    layer = raw["transformer_layer_config"]
    types, enabled = layer.get("layer_types"), layer.get("use_sliding_window")
    window = layer.get("sliding_window", DEFAULT_WINDOW if enabled is True else None)
    if types is None:
        return []
    if not isinstance(types, list) or not all(kind in (FULL, SLIDING) for kind in types):
        raise LoadError(
            f"some of its layers have another attention than {FULL} and {SLIDING}, which is not"
            " supported"
        )
    if SLIDING not in types:
        return []
    if len(types) != layer.get("num_hidden_layers"):
        layers = shown(layer.get("num_hidden_layers"))
        raise LoadError(
            f"layer_types in config.json has {len(types)} entries, but there are {layers} layers"
        )
    if not is_integer(window) or window < 1 or enabled is False:
        raise LoadError(
            f"some of its layers have {SLIDING}, but sliding_window in config.json is"
            f" {shown(window)} and use_sliding_window {shown(enabled)}: one of them is wrong"
        )
    return [window if kind == SLIDING else None for kind in types]


def read_markov(raw: Json, shapes: Mapping[str, tuple[int, ...]]) -> MarkovShape | None:
    """Read the Markov head of a config in the speculators format; `shapes` are those of the
    tensors, {} if they are not known. Raises LoadError if config and tensors disagree."""
    tensor = "markov_head.markov_w1.weight"
    shape = shapes.get(tensor, ())
    stored = shape[1] if len(shape) > 1 else None
    rank = read_int(raw, "markov_rank", 0, MAX_RANK, stored or 0)
    if shapes and rank and stored is None:
        raise LoadError(f"its checkpoint has no {tensor}: it is incomplete, or of another kind")
    if stored not in (None, rank):
        raise LoadError(
            f"{tensor} has {stored} numbers where config.json asks for {rank}, by markov_rank"
        )
    kind = raw.get("markov_head_type")
    if kind not in (None, *MARKOV_KINDS):
        supported = ", ".join(MARKOV_KINDS)
        raise LoadError(
            f"its Markov head is of the type {shown(kind)}: only {supported} are supported"
        )
    return MarkovShape(rank, kind or "vanilla") if rank else None
