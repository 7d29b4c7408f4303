"""What the config.json of a block drafter says, in the dialects it is published in, told as speculators tells it.

- speculators (`dspark`, `dflash`): as it is.
- DeepSpec (`Qwen3DSparkModel`): layers and all else at the top. A slot says the token behind its own position, also
  where there is no Markov head and the drafter is called DFlash.
- z-lab (`DFlashDraftModel`) and SpecForge (`DSparkDraftModel`): layers at the top, all else in `dflash_config`. A slot
  says the token at its own position unless the file says otherwise.

But for speculators, numbers of hidden states are those of layers whose outputs are read; -1 is the embedding. A drafter
that is read the wrong way drafts, and is never right. No torch here: what a drafter is for is asked of files that are
not loaded.
"""

from __future__ import annotations

from typing import Any

from forerun.errors import LoadError, shown
from forerun.models.families import is_whole

Json = dict[str, Any]

KINDS = ("dspark", "dflash")
DEEPSPEC, DEEPSPEC_GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
ANCHOR = ("sample_from_anchor", "query_zero_predicts_next")  # a slot says the token behind its own position
OWN = (
    "block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "draft_vocab_size",
)  # fmt: skip


def arch_of(raw: Json) -> str:
    """The class its authors gave, the first of several; "" where there is none."""
    named = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def is_block(raw: Json) -> bool:
    """Whether it describes a block drafter, in whatever dialect."""
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] in KINDS
    return "dflash_config" in raw or arch_of(raw) in (DEEPSPEC, DEEPSPEC_GEMMA, "DSparkDraftModel", "DFlashDraftModel")


def as_speculators(raw: Json) -> Json:
    """The same as speculators would say it; what a file does not say is not there. Raises LoadError for what no
    dialect means."""
    if "speculators_model_type" in raw:
        return raw
    deepspec, own = arch_of(raw) == DEEPSPEC, raw.get("dflash_config") or {}
    if arch_of(raw) == DEEPSPEC_GEMMA:
        raise LoadError("its layers are Gemma 4's, which are not supported in drafters")
    if not isinstance(own, dict):
        raise LoadError("dflash_config in config.json is not an object")
    projector = own.get("projector_type", raw.get("projector_type"))
    if projector not in (None, *KINDS) or "selector_rank" in own:
        raise LoadError(f"it is a descendant of DFlash ({shown(projector or 'DFlash2')}), which is not supported")
    if own.get("causal") is True:
        raise LoadError("its blocks are causal, which is not supported")
    given = {name: own.get(name, raw.get(name)) for name in OWN}
    anchor = [place[name] for name in ANCHOR for place in (own, raw) if place.get(name) is not None]
    said = {name: value for name, value in given.items() if value is not None}
    ids = own.get("target_layer_ids", raw.get("target_layer_ids"))
    if ids is not None:
        said["aux_hidden_state_layer_ids"] = _boundaries(ids)
    return said | {
        "speculators_model_type": "dspark" if said.get("markov_rank") else "dflash",
        "transformer_layer_config": raw,
        "sample_from_anchor": anchor[0] if anchor else deepspec,
    }


def _boundaries(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(is_whole(i) for i in ids):
        raise LoadError(f"target_layer_ids in config.json is {shown(ids)}, not a list of hidden states to read")
    return [i + 1 for i in ids]
