"""Multi-token modules (MTP) in the checkpoints of their own targets: which families have them, and
under which tensor names. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import LoadError, shown
from forerun.models.config import MAX_EXPERTS, MTP_PREFIXES, text_part
from forerun.models.families import Json
from forerun.models.files import indexed_files, joined, read_header, read_object, weight_files

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
PARTS = ("gate", "up", "down")
EXPERTS = "mlp.experts."
DENSE_MLP = {f"mlp.{part}_proj": f"mlp.{part}_proj" for part in PARTS}
MIXED_MLP = {f"mlp.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in PARTS} | {
    "mlp.router": "mlp.gate",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
NORMS = ("input_layernorm", "post_attention_layernorm")
QKV_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
LATENT = "kv_a_proj_with_mqa"  # part of the names of latent attention (MLA)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayout:
    """The layout of the multi-token module in the checkpoints of a family.

    Attributes:
        prefix: how the names of the module's tensors begin.
        layer: what follows before the names of the decoder layer.
        outside: names of the parts outside of the layer, by their names in `MtpModule`.
        further: tensors of the layer besides `ATTENTION`, `MLP` and `NORMS`.
        state_first: the product that joins a pair has the columns of the state first.
    """

    prefix: str
    layer: str = ""
    outside: dict[str, str]
    further: tuple[str, ...]
    state_first: bool = False

    def names(self, mixed: bool = False) -> dict[str, str]:
        """Return the stored name of each tensor of a module, by its name in `MtpModule`.

        `mixed` is True for a module with a mixture of experts; `expert_names` has the experts'.
        """
        linears, at = (*ATTENTION, *NORMS), f"{self.prefix}{self.layer}"
        inside = {name: name for name in linears} | (MIXED_MLP if mixed else DENSE_MLP)
        found = {f"{name}.weight": f"{at}{stored}.weight" for name, stored in inside.items()}
        found |= {name: f"{at}{name}" for name in self.further}
        for name, stored in self.outside.items():
            found[f"{name}.weight"] = f"{self.prefix}{stored}.weight"
        return found

    def expert_names(self, part: str, count: int) -> list[str]:
        """Return the names of a matrix of each expert: `part` is gate, up or down."""
        at = f"{self.prefix}{self.layer}{EXPERTS}"
        return [f"{at}{expert}.{part}_proj.weight" for expert in range(count)]

    def is_mixed(self, tensors: Collection[str]) -> bool:
        """Return True if the module in a checkpoint with these tensors has experts."""
        at = f"{self.prefix}{self.layer}{EXPERTS}"
        return any(name.startswith(at) for name in tensors)


MIMO_NAMES = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
QWEN_NAMES = {
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# by the `model_type` of the language model
OWN_LAYOUTS = {
    "mimo": OwnLayout(
        prefix=f"{MTP_PREFIXES['mimo']}0.",
        outside={name: name for name in MIMO_NAMES},
        further=QKV_BIASES,
        state_first=True,
    ),
    **{
        family: OwnLayout(
            prefix=MTP_PREFIXES[family], layer="layers.0.", outside=QWEN_NAMES, further=QK_NORMS
        )
        for family in QWEN
    },
}


def own_layout(raw: Json) -> OwnLayout | None:
    """Return how a model with this config.json stores its multi-token module; None if such modules
    are not read of its family."""
    family = text_part(raw).get("model_type")
    return OWN_LAYOUTS.get(family) if isinstance(family, str) else None


def refuse_own_module(raw: Json, tensors: Collection[str] | None) -> str:
    """Return why the multi-token module of a model's own checkpoint cannot be used; "" if it can.

    `tensors` are the names of the checkpoint's tensors, None if they are unknown.
    """
    layout = own_layout(raw)
    if layout is None:
        if any(LATENT in name for name in tensors or ()):
            return "its layers have latent attention, which is not supported"
        family = shown(text_part(raw).get("model_type"))
        return (
            f"multi-token layers of the family {family} are not read: only those of MiMo,"
            " Qwen3-Next and Qwen3.5 are"
        )
    if tensors is None:
        return ""
    held = {name for name in tensors if name.startswith(layout.prefix)}
    if not held:
        return "its checkpoint has no multi-token layers; some copies leave them out"
    mixed = layout.is_mixed(held)
    wanted = set(layout.names(mixed).values())
    if mixed:
        count = text_part(raw).get("num_experts")
        if not isinstance(count, int) or not 0 < count <= MAX_EXPERTS:
            return f"it has experts, but num_experts in config.json is {shown(count)}"
        wanted |= {name for part in PARTS for name in layout.expert_names(part, count)}
    if missing := sorted(wanted - held):
        names = joined((name.removeprefix("model.") for name in missing), 3)
        return f"its checkpoint has no {names}: it is incomplete, or quantized"
    if extra := sorted(held - wanted):
        names = joined((name.removeprefix("model.") for name in extra), 3)
        return f"its multi-token layers have {names}, which is not supported"
    return ""


def has_own_module(model: Path) -> bool:
    """Return True if the checkpoint in a directory has a multi-token module that can be used."""
    try:
        raw = read_object(model / "config.json")
        if own_layout(raw) is None:
            return False
        index = model / "model.safetensors.index.json"
        files = indexed_files(index) if index.is_file() else weight_files(model)
        return not refuse_own_module(raw, {name for file in files for name in read_header(file)})
    except LoadError:
        return False  # loading the model says what is wrong
