"""Whether forerun can draft with a drafter of a kind that it knows: what its modules have, told
from headers alone.

What is refused here is what reading the drafter would refuse after its download.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from forerun.catalogue.facts import Facts
from forerun.draft.block.formats import FLAGS, as_speculators, read_law, windows_of
from forerun.draft.head_files import read_bool
from forerun.draft.medusa import read_medusa, read_mlp
from forerun.draft.registry import Json, inner
from forerun.errors import LoadError, shown
from forerun.models.config import FAMILIES, MTP_PREFIXES, is_integer
from forerun.models.gguf.config import skim, unsupported_reason

LAYERS = (
    "llama",
    "qwen3",
)  # families of decoder layers that heads are built of (`draft/stored.py`)
LARGEST_BLOCK = 64
BEFORE = re.compile(r"^(model|speculator|medusa_heads?)\.")  # the names of tensors, in some files


def refusal(facts: Facts) -> str:
    """Why forerun cannot draft with this, in a few words; "" where nothing that can be seen speaks
    against it."""
    kind = facts.kind
    if not kind.draft:
        return kind.why
    return READERS[kind.draft](facts)


def said_of(facts: Facts) -> str:
    """What to write behind `--draft`, "" where forerun cannot draft with this."""
    return "" if refusal(facts) else f"{facts.kind.draft}:{facts.name}"


def layer_of(raw: Json) -> Json:
    """Where the fields of a head's decoder layer are: apart in the layout of speculators and in
    vLLM's, else at the top."""
    apart = [raw.get(name) for name in ("transformer_layer_config", "model")]
    return next((layer for layer in apart if isinstance(layer, dict)), raw)


def _eagle3(facts: Facts) -> str:
    flags = inner(facts.raw, "eagle_config") | facts.raw
    if "speculators_model_type" not in facts.raw and flags.get("norm_output") is False:
        return "norm_output false means no norm before its lm_head in this layout, which is not supported"
    layers = None if facts.kind.family == "peagle" else 1
    return _layer(facts.raw, layers) or _lacks(facts, "fc.weight", "lm_head.weight")


def _eagle(facts: Facts) -> str:
    if {"norm.weight", "model.norm.weight"} & facts.shapes.keys():
        return "it has a norm before its lm_head, as EAGLE-3 heads have"
    raw = facts.raw | layer_of(facts.raw)
    if raw.get("truncated_vocab_size") not in (None, raw.get("vocab_size")):
        return f"it says {shown(raw['truncated_vocab_size'])} tokens alone, which is not supported"
    # its layer is Llama's, whatever the target is
    own = {
        name: raw[name] for name in ("num_hidden_layers", "mlp_bias") if raw.get(name) is not None
    }
    return _layer(own, 1) or _lacks(facts, "fc.weight", "layers.0.self_attn.q_proj.weight")


def _block(facts: Facts) -> str:
    shapes = {BEFORE.sub("", name): tuple(shape) for name, shape in facts.shapes.items()}
    try:
        raw = as_speculators(facts.raw)
        layer = layer_of(raw)
        windows_of(raw | {"transformer_layer_config": layer})
        read_law(raw, shapes)
        for flag in FLAGS:
            read_bool(raw, flag, False)
    except LoadError as error:
        return str(error)
    size = raw.get("block_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_BLOCK:
        return f"block_size is {shown(size)}, not a whole number from 1 to {LARGEST_BLOCK}"
    mask, vocab = raw.get("mask_token_id"), layer.get("vocab_size")
    if not is_integer(mask) or (is_integer(vocab) and not 0 <= mask < vocab):  # type: ignore[operator]
        return f"its mask token is {shown(mask)}, which is none of the {shown(vocab)} tokens"
    held = {name.split(".")[1] for name in facts.shapes if name.startswith("layers.")}
    if held and layer.get("num_hidden_layers") != len(held):
        return f"its configuration says {shown(layer.get('num_hidden_layers'))} layers, its checkpoint has {len(held)}"
    return _layer({"model_type": "qwen3"} | layer, None) or _lacks(facts, "fc.weight")


def _mtp(facts: Facts) -> str:
    if facts.raw.get("model_type") in MTP_PREFIXES:
        return ""
    if facts.raw.get("num_nextn_predict_layers", 1) != 1:
        return f"it has {shown(facts.raw['num_nextn_predict_layers'])} layers: only modules of one are supported"
    return _layer(facts.raw, 1) or _lacks(facts, "mtp_layers.0.input_proj.weight")


def _medusa(facts: Facts) -> str:
    if facts.kind.dialect != "vllm":
        return _lacks(facts, "0.0.linear.weight")
    missing = _says(read_medusa, facts.raw) or _lacks(
        facts, "blocks.0.layers.0.weight", "lm_heads.0.weight"
    )
    return missing or _levels(facts, "blocks", facts.raw["num_heads"])


def _mlp(facts: Facts) -> str:
    missing = _says(read_mlp, facts.raw) or _lacks(facts, "head.0.weight")
    return missing or (
        "" if facts.raw.get("tie_weights") else _levels(facts, "head", facts.raw["n_predict"])
    )


def _levels(facts: Facts, part: str, said: int) -> str:
    """Of heads whose header is known: whether there are as many as their configuration says."""
    names = [BEFORE.sub("", name).split(".") for name in facts.shapes]
    held = {name[1] for name in names if name[0] == part and len(name) > 1}
    return (
        f"its configuration says {said} levels, its checkpoint has {len(held)}"
        if held and len(held) != said
        else ""
    )


def _says(read: Callable[[Json], object], raw: Json) -> str:
    """Why a configuration cannot be read, if it cannot."""
    try:
        read(raw)
    except LoadError as error:
        return str(error)
    return ""


def _model(facts: Facts) -> str:
    if facts.raw.get("gguf"):
        return _gguf(facts)
    family = facts.raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return f"family {shown(family)} is not supported"
    return ""


def _gguf(facts: Facts) -> str:
    try:
        return unsupported_reason(skim(facts.path)) if facts.path else ""
    except LoadError as error:
        return str(error)


def _layer(raw: Json, layers: int | None) -> str:
    layer = layer_of(raw)
    family = layer.get("model_type") or (
        "qwen3" if "Qwen3" in str(layer.get("architectures")) else "llama"
    )
    if family not in LAYERS:
        return (
            f"its layer is of the family {shown(family)}: only {' and '.join(LAYERS)} are supported"
        )
    if layers is not None and layer.get("num_hidden_layers", layers) != layers:
        return f"it has {shown(layer['num_hidden_layers'])} layers: only drafters of {layers} layer are supported"
    if layer.get("attention_bias") is True or layer.get("mlp_bias") is True:
        return "its layer has biases, which is not supported"
    return ""


def _lacks(facts: Facts, *names: str) -> str:
    """Of a drafter whose header is known: a tensor without which it is none."""
    held = {BEFORE.sub("", name) for name in facts.shapes}
    missing = [name for name in names if held and name not in held]
    return (
        f"its checkpoint has no {missing[0]}: it is incomplete, or of another kind"
        if missing
        else ""
    )


READERS: dict[str, Callable[[Facts], str]] = {
    "eagle": _eagle, "eagle3": _eagle3, "block": _block, "mtp": _mtp, "medusa": _medusa, "mlp": _mlp,
    "model": _model,
}  # fmt: skip
