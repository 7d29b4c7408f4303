"""What the config.json of an EAGLE-3 head says, in the dialects it is published in.

Dialects differ in names and, without a trace, in which hidden states their numbers mean. Here a
number is always a
boundary: i enters layer i of the target's N, and N is what left the last.

- speculators (`speculators_model_type`): the layer's fields apart, in `transformer_layer_config`;
  ids are boundaries.
- DeepSpec (`target_layer_ids`): ids are layers, whose outputs are read; -1 is the embedding.
- P-EAGLE, in any of these, is told by its mask token; speculators calls it `peagle`.
- SafeAILab, SpecForge, NVIDIA: ids in `eagle_config` are layers if the first of them is 1,
  boundaries otherwise (so SGLang tells them apart); ids at the top are boundaries (as vLLM has it);
  without any they are 2, N // 2 and N - 3.

The layer's rotary embedding is its own, never the target's. What a config leaves out is what
transformers takes for it, sizes apart, which are in the tensors. No torch here: what a head is for
is asked of files that are not loaded."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.head_files import read_bool
from forerun.errors import LoadError
from forerun.models.config import Json, is_integer

MASKS = (
    "pard_token",
    "ptd_token_id",
    "mask_token_id",
)  # what P-EAGLE's mask token is called, in the order vLLM asks


@dataclass(frozen=True, slots=True)
class Said:
    """What a config.json says.

    Attributes:
        layer: the fields of the decoder layer, as transformers calls them.
        boundaries: the target's hidden states that are fused.
        norm_before_residual, norm_output, mask_token: see `EagleConfig`.
    """

    layer: Json
    aux_hidden_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool
    mask_token: int | None


def read_dialect(raw: Json, layers: int) -> Said:
    """What the config.json of a head says, for a target of so many layers. Raises LoadError."""
    usual = 2, layers // 2, layers - 3  # the boundaries of a head that names none
    return _speculators(raw, usual) if "speculators_model_type" in raw else _plain(raw, usual)


def _speculators(raw: Json, usual: tuple[int, ...]) -> Said:
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind not in ("eagle3", "peagle"):
        raise LoadError(f"it is a {kind!r} speculator: give one of eagle3 or peagle")
    if not isinstance(layer, dict):
        raise LoadError("config.json has no transformer_layer_config")
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    aux_hidden_layers = usual if ids is None else _ids(ids)
    # vLLM takes true for eagle3 where it is not said, and the heads published so were measured with
    # that
    early = read_flag(raw, "norm_before_residual", kind == "eagle3")
    mask = _mask_token(raw, kind == "peagle")
    return Said(layer, aux_hidden_layers, early, read_flag(raw, "norm_output", False), mask)


def _plain(raw: Json, usual: tuple[int, ...]) -> Said:
    """DeepSpec, SafeAILab, SpecForge, NVIDIA: the layer's fields are at the top."""
    own = raw.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise LoadError("eagle_config in config.json is not an object")
    if not read_flag(
        raw, "norm_output", True
    ):  # here it says whether there is a last norm, not what is fed back
        raise LoadError(
            "norm_output false means no norm before its lm_head in this layout, which is not supported"
        )
    layers, ids = raw.get("target_layer_ids"), own.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None:
        aux_hidden_layers = tuple(i + 1 for i in _ids(layers))
    elif ids is not None:
        aux_hidden_layers = tuple(i + 1 for i in _ids(ids)) if _ids(ids)[0] == 1 else _ids(ids)
    elif "eagle_aux_hidden_state_layer_ids" in raw:
        aux_hidden_layers = _ids(raw["eagle_aux_hidden_state_layer_ids"])
    else:
        aux_hidden_layers = usual
    mask = _mask_token(raw, read_flag(raw, "parallel_drafting", False))
    return Said(raw, aux_hidden_layers, read_flag(raw, "norm_before_residual", False), False, mask)


def _mask_token(raw: Json, needed: bool) -> int | None:
    """The mask token of a head that drafts in parallel. Raises LoadError where it is `needed` and
    not there."""
    said = {name: raw[name] for name in MASKS if raw.get(name) is not None}
    for name, token in said.items():
        if not is_integer(token) or token < 0:
            raise LoadError(f"{name} in config.json is {token!r}, not a token")
    if needed and not said:
        raise LoadError(
            f"it drafts in parallel, but config.json has no mask token: it is called {' or '.join(MASKS)}"
        )
    return next(iter(said.values()), None)


def _ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(map(is_integer, ids)):
        raise LoadError(
            f"the hidden states to read are {ids!r} in config.json, not a list of layer numbers"
        )
    return tuple(ids)


def read_flag(raw: Json, name: str, default: bool) -> bool:
    """A flag at the top of config.json or in `eagle_config`. Raises LoadError."""
    own = raw.get("eagle_config")
    return read_bool((own | raw) if isinstance(own, dict) else raw, name, default)
