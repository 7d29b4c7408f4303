"""The config.json of EAGLE-3 and P-EAGLE heads, in every published format.

Published configurations of EAGLE-3 differ in names and, silently, in what the numbers of hidden
states mean. In forerun, number i is the state that enters layer i of the target's N, and N is the
last layer's output.

- speculators (`speculators_model_type`): the fields of the decoder layer are in
  `transformer_layer_config`; numbers mean the same as here. P-EAGLE is called `peagle`.
- DeepSpec (`target_layer_ids`): numbers are layers whose outputs are read, -1 the embedding.
- SafeAILab, SpecForge, NVIDIA: numbers in `eagle_config` are outputs of layers if the first one is
  1 (SGLang tells them apart so); those at the top mean the same as here (as in vLLM). The default
  is 2, N // 2 and N - 3.
- Any of these with a mask token is P-EAGLE.

The rotary embedding is the head's own, never the target's. Fields that a config leaves out have
transformers' defaults, but sizes are those of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.head_config import HeadConfig, read_bool, read_layer_ids
from forerun.draft.kinds import MASK_TOKENS
from forerun.errors import LoadError
from forerun.models.families import Json, is_integer

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(HeadConfig):
    """The shape of an EAGLE-3 head, or with a `mask_token` of a P-EAGLE head, which may have
    ordinary layers after the first.

    Attributes:
        norm_before_fc: the concatenated states are normed before they are fused.
        fc_norm: each state is normed by itself before they are fused.
        norm_before_residual: the residual stream starts with the normed state.
        norm_output: drafted tokens are paired with the state after the last norm.
        join: a product joins a pair into one vector before an ordinary layer, as in multi-token
            modules; excludes `norm_before_residual`, which is about the paper's layer.
        own_head: it has its own lm head; otherwise it uses the target's.
    """

    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    join: bool = False
    own_head: bool = True


@dataclass(frozen=True, slots=True)
class EagleFormat:
    """Fields of config.json in any published format; `layer` holds the fields of the decoder layer
    in transformers' names, the others are as in `EagleConfig`."""

    layer: Json
    aux_hidden_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool
    mask_token: int | None


def read_format(raw: Json, target_layers: int) -> EagleFormat:
    """Read the config.json of an EAGLE-3 head for a target of so many layers. Raises LoadError."""
    default = (2, target_layers // 2, target_layers - 3)
    if "speculators_model_type" not in raw:
        return _read_plain(raw, default)
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind not in ("eagle3", "peagle"):
        raise LoadError(f"it is a {kind!r} speculator: give one of eagle3 or peagle")
    if not isinstance(layer, dict):
        raise LoadError("config.json has no transformer_layer_config")
    return EagleFormat(
        layer=layer,
        aux_hidden_layers=default if raw.get(LAYER_IDS) is None else read_layer_ids(raw, LAYER_IDS),
        # vLLM's default is true for eagle3, and published heads were measured with it
        norm_before_residual=read_flag(raw, "norm_before_residual", kind == "eagle3"),
        norm_output=read_flag(raw, "norm_output", False),
        mask_token=_read_mask_token(raw, required=kind == "peagle"),
    )


def _read_plain(raw: Json, default: tuple[int, ...]) -> EagleFormat:
    """Read DeepSpec's, SafeAILab's, SpecForge's or NVIDIA's format: one flat object."""
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise LoadError("eagle_config in config.json is not an object")
    if not read_flag(raw, "norm_output", True):  # another meaning than in speculators
        raise LoadError(
            "norm_output false means no norm before its lm_head in this layout, which is not"
            " supported"
        )
    if raw.get("target_layer_ids") is not None:
        ids = tuple(i + 1 for i in read_layer_ids(raw, "target_layer_ids"))
    elif nested.get(LAYER_IDS) is not None:
        ids = read_layer_ids(nested, LAYER_IDS)
        if ids[0] == 1:
            ids = tuple(i + 1 for i in ids)
    else:
        ids = read_layer_ids(raw, LAYER_IDS) if LAYER_IDS in raw else default
    early = read_flag(raw, "norm_before_residual", False)
    mask_token = _read_mask_token(raw, required=read_flag(raw, "parallel_drafting", False))
    return EagleFormat(raw, ids, early, False, mask_token)


def _read_mask_token(raw: Json, required: bool) -> int | None:
    """Read the mask token of a head that drafts in parallel. Raises LoadError."""
    found = {name: raw[name] for name in MASK_TOKENS if raw.get(name) is not None}
    for name, token in found.items():
        if not is_integer(token) or token < 0:
            raise LoadError(f"{name} in config.json is {token!r}, not a token")
    if required and not found:
        names = " or ".join(MASK_TOKENS)
        raise LoadError(
            f"it drafts in parallel, but config.json has no mask token: it is called {names}"
        )
    return next(iter(found.values()), None)


def read_flag(raw: Json, name: str, default: bool) -> bool:
    """Read a boolean at the top of config.json or in `eagle_config`. Raises LoadError."""
    nested = raw.get("eagle_config")
    return read_bool((nested | raw) if isinstance(nested, dict) else raw, name, default)


def read_draft_vocab(raw: Json, rows: int, vocab: int) -> int:
    """Return the number of tokens that a head predicts, the rows of its lm head. Raises LoadError
    if config.json or the vocabulary disagree."""
    if raw.get("draft_vocab_size") not in (None, rows):
        raise LoadError(
            f"draft_vocab_size is {raw['draft_vocab_size']!r}, but lm_head.weight has {rows} rows"
        )
    if rows > vocab:
        raise LoadError(f"it predicts {rows} tokens, more than the {vocab} of its vocabulary")
    return rows
