"""Checks that a drafter is supported and fits a target, from headers and configurations.

`refusal` answers the first: what it refuses is what reading the drafter would refuse after its
download. `checks` answers the second, one check for each thing that must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.catalog.facts import Facts
from forerun.catalog.survey import MAX_DRAFT_SHARE
from forerun.draft.block.formats import FLAGS, as_speculators, is_block, read_markov, windows_of
from forerun.draft.eagle.formats import read_format
from forerun.draft.eagle.mtp_formats import refuse_gguf_module, refuse_own_module
from forerun.draft.head_config import (
    read_assistant,
    read_bool,
    read_int,
    read_medusa,
    read_mlp,
)
from forerun.draft.kinds import ASSISTANT, GEMMA_ASSISTANTS, Json, inner
from forerun.errors import LoadError, shown
from forerun.models.config import check_family
from forerun.models.families import is_integer
from forerun.models.files import LABEL, title
from forerun.models.gguf.config import skim, unsupported_reason

LAYER_FAMILIES = ("llama", "qwen3")  # families of decoder layers in heads (`draft/head_files.py`)
MAX_BLOCK_SIZE = 64
MAX_SIZE = 1 << 31  # of any size in a configuration
PREFIX = re.compile(r"^(model|speculator|medusa_heads?)\.")  # of tensor names, in some files


# Checks that forerun can draft with a drafter.


def refusal(facts: Facts) -> str:
    """Return why forerun cannot draft with a drafter; "" if nothing in its headers forbids it."""
    kind = facts.kind
    if not kind.draft:
        return kind.why
    try:
        return _REFUSALS[kind.draft](facts)
    except LoadError as error:
        return str(error)


def draft_argument(facts: Facts) -> str:
    """Return the argument for `--draft`; "" if forerun cannot draft with it."""
    return "" if refusal(facts) else f"{facts.kind.draft}:{facts.name}"


def layer_config(raw: Json) -> Json:
    """Return the configuration of a head's decoder layer, which may be nested."""
    names: tuple[str, ...] = ("transformer_layer_config", "model")
    if raw.get("model_type") in GEMMA_ASSISTANTS:
        names = ("text_config",)
    nested = [raw.get(name) for name in names]
    return next((layer for layer in nested if isinstance(layer, dict)), raw)


def _refuse_eagle3(facts: Facts) -> str:
    flags = inner(facts.raw, "eagle_config") | facts.raw
    if "speculators_model_type" not in facts.raw and flags.get("norm_output") is False:
        return "norm_output false (no norm before its lm_head) is not supported in this format"
    num_layers = None if facts.kind.family == "peagle" else 1
    names = ["fc.weight"] if flags.get("own_head") is False else ["fc.weight", "lm_head.weight"]
    return _refuse_layer(facts.raw, num_layers) or _missing(facts, *names)


def _refuse_eagle(facts: Facts) -> str:
    if {"norm.weight", "model.norm.weight"} & facts.shapes.keys():
        return "it has a norm before its lm_head, as EAGLE-3 heads have"
    raw = facts.raw | layer_config(facts.raw)
    if raw.get("truncated_vocab_size") not in (None, raw.get("vocab_size")):
        size = shown(raw["truncated_vocab_size"])
        return f"its vocabulary is reduced to {size} tokens, which is not supported"
    # its layer is Llama's, whatever the target's family is
    names = ("num_hidden_layers", "mlp_bias")
    layer = {name: raw[name] for name in names if raw.get(name) is not None}
    tensors = ("fc.weight", "layers.0.self_attn.q_proj.weight")
    return _refuse_layer(layer, 1) or _missing(facts, *tensors)


def _refuse_block(facts: Facts) -> str:
    raw = as_speculators(facts.raw)
    layer = layer_config(raw)
    windows_of(raw | {"transformer_layer_config": layer})
    read_markov(raw, {PREFIX.sub("", name): shape for name, shape in facts.shapes.items()})
    for flag in FLAGS:
        read_bool(raw, flag, False)
    read_int(raw, "block_size", 1, MAX_BLOCK_SIZE)
    read_int(raw, "mask_token_id", 0, read_int(layer, "vocab_size", default=MAX_SIZE) - 1)
    num_layers = _count(facts, "layers")
    if num_layers and layer.get("num_hidden_layers") != num_layers:
        configured = shown(layer.get("num_hidden_layers"))
        return f"its configuration has {configured} layers, its checkpoint {num_layers}"
    return _refuse_layer({"model_type": "qwen3"} | layer, None) or _missing(facts, "fc.weight")


def _refuse_mtp(facts: Facts) -> str:
    if facts.raw.get("gguf"):
        return refuse_gguf_module(skim(facts.path)) if facts.path else ""
    if facts.kind.family == ASSISTANT:
        read_assistant(facts.raw)
        return _missing(facts, "pre_projection.weight")
    if facts.kind.format == "native":
        return refuse_own_module(facts.raw, facts.shapes or None)
    num_layers = facts.raw.get("num_nextn_predict_layers", 1)
    if num_layers != 1:
        return f"it has {shown(num_layers)} layers: only modules of one are supported"
    return _refuse_layer(facts.raw, 1) or _missing(facts, "mtp_layers.0.input_proj.weight")


def _refuse_medusa(facts: Facts) -> str:
    if facts.kind.format != "vllm":
        return _missing(facts, "0.0.linear.weight")
    read_medusa(facts.raw)
    missing = _missing(facts, "blocks.0.layers.0.weight", "lm_heads.0.weight")
    return missing or _refuse_levels(facts, "blocks", facts.raw["num_heads"])


def _refuse_mlp(facts: Facts) -> str:
    read_mlp(facts.raw)
    missing = _missing(facts, "head.0.weight")
    if missing or facts.raw.get("tie_weights"):
        return missing
    return _refuse_levels(facts, "head", facts.raw["n_predict"])


def _refuse_levels(facts: Facts, part: str, configured: int) -> str:
    held = _count(facts, part)
    if held in (0, configured):
        return ""
    return f"its configuration has {configured} levels, its checkpoint {held}"


def _refuse_model(facts: Facts) -> str:
    if facts.raw.get("gguf"):
        return unsupported_reason(skim(facts.path)) if facts.path else ""
    check_family(facts.raw, Path(facts.name))
    return ""


_REFUSALS: dict[str, Callable[[Facts], str]] = {
    "eagle": _refuse_eagle,
    "eagle3": _refuse_eagle3,
    "block": _refuse_block,
    "mtp": _refuse_mtp,
    "medusa": _refuse_medusa,
    "mlp": _refuse_mlp,
    "model": _refuse_model,
}


def _refuse_layer(raw: Json, num_layers: int | None) -> str:
    layer = layer_config(raw)
    default = "qwen3" if "Qwen3" in str(layer.get("architectures")) else "llama"
    family = layer.get("model_type") or default
    if family not in LAYER_FAMILIES:
        known = " and ".join(LAYER_FAMILIES)
        return f"its layer is of the family {shown(family)}: only {known} are supported"
    if num_layers is not None and layer.get("num_hidden_layers", num_layers) != num_layers:
        return f"it has {shown(layer['num_hidden_layers'])} layers: only {num_layers} is supported"
    if layer.get("attention_bias") is True or layer.get("mlp_bias") is True:
        return "its layer has biases, which is not supported"
    return ""


def _missing(facts: Facts, *names: str) -> str:
    """Return a message if a drafter whose header is known lacks one of these tensors."""
    held = {PREFIX.sub("", name) for name in facts.shapes}
    missing = [name for name in names if held and name not in held]
    return f"its checkpoint has no {missing[0]}: it is incomplete" if missing else ""


def _count(facts: Facts, part: str) -> int:
    """Return how many numbered parts such as `layers.0` the tensors have; 0 if unknown."""
    names = [PREFIX.sub("", name).split(".") for name in facts.shapes]
    return len({name[1] for name in names if name[0] == part and len(name) > 1})


# Checks that a drafter fits a target.


@dataclass(frozen=True, slots=True)
class FitCheck:
    """One comparison of drafter and target.

    Attributes:
        name: what is compared.
        ok: whether it fits; None if that is unknown.
        text: the reason.
    """

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a target that a drafter has to match."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    parameters: int = 0
    bytes: int = 0
    vocabulary: str = ""


def sizes_of(target: Facts) -> Sizes:
    """Return the sizes of a target. Raises LoadError if its configuration lacks them."""
    raw = target.raw | inner(target.raw, "text_config")
    hidden_size = _size(raw, "hidden_size", "n_embd")
    num_layers = _size(raw, "num_hidden_layers", "n_layer")
    vocab_size = _size(raw, "vocab_size")
    if not (hidden_size and num_layers and vocab_size):
        lacks = "its configuration lacks a hidden size, layers or a vocabulary"
        raise LoadError(f"{target.name} is no target: {lacks}")
    weights = (target.parameters, target.bytes, target.vocabulary)
    return Sizes(target.name, hidden_size, num_layers, vocab_size, *weights)


def same_model(name: str, other: str) -> bool:
    """Return True if two names mean one model, in whatever file format or quantization."""
    return bool(name and other) and bare_name(name) == bare_name(other)


def bare_name(name: str) -> str:
    """Return a model's name in lower case, without owner, file format and quantization."""
    if name.startswith("ollama:"):
        name = name.removeprefix("ollama:").removesuffix(":latest").replace(":", "-")
    tagged = re.fullmatch(r"(.*/.*):[\w.-]+", name)
    short = LABEL.sub("", f"{title(tagged[1] if tagged else name)}.").rstrip(".-_")
    return re.sub(r"[-_.](gguf|gptq|awq|fp8|int4|int8|bnb|4bit|8bit)$", "", short.lower())


def checks(drafter: Facts, target: Sizes | None) -> list[FitCheck]:
    """Return all checks; the last one is whether forerun can draft with the drafter at all."""
    reason = refusal(drafter)
    usable = reason or f"forerun drafts with it: --draft {drafter.kind.draft}:{drafter.name}"
    last = FitCheck("forerun", not reason, usable)
    if target is None:
        return [last]
    is_model = drafter.kind.family in ("lm", "pard")
    found = list(_check_model(drafter, target) if is_model else _check_head(drafter, target))
    if last.ok and not fits(found):
        text = f"forerun reads drafters of this kind, but not this one for {target.name}"
        last = FitCheck("forerun", True, text)
    return [*found, last]


def fits(found: Sequence[FitCheck]) -> bool:
    """Return True if no check failed."""
    return all(check.ok is not False for check in found)


def _check_model(drafter: Facts, target: Sizes) -> Iterator[FitCheck]:
    """Check an ordinary model: equal tokens, and a smaller size."""
    own = _size(drafter.raw, "vocab_size")
    wanted = target.vocab_size
    same = bool(drafter.vocabulary) and drafter.vocabulary == target.vocabulary
    if same:
        text = "the same tokenizer file as the target's"
    elif not own:
        text = "its config.json has no vocab_size"
    elif abs(own - wanted) > max(own, wanted) // 50:
        text = (
            f"another vocabulary ({own} tokens, the target {wanted}): it drafts through text, so"
            " fewer tokens are accepted"
        )
    else:
        text = f"{own} tokens, the target {wanted}: compared when both are loaded"
    yield FitCheck("vocabulary", same or None, text)
    known = bool(drafter.parameters and target.parameters)
    unit = "parameters" if known else "bytes"
    size = drafter.parameters if known else drafter.bytes
    target_size = target.parameters if known else target.bytes
    if size and target_size:
        text = f"it has {size / target_size:.0%} of the target's {unit}"
        small = size <= target_size * MAX_DRAFT_SHARE
        more = f", over {MAX_DRAFT_SHARE:.0%}, so it cannot pay"
        yield FitCheck("size", small, text if small else text + more)


def _check_head(drafter: Facts, target: Sizes) -> Iterator[FitCheck]:
    """Check a drafter that reads the target's hidden states."""
    made_for = drafter.made_for
    if made_for and not same_model(made_for, target.name):
        text = f"it was made for {made_for}: for {target.name} it may draft badly"
        yield FitCheck("target", None, text)
    elif made_for:
        yield FitCheck("target", True, f"it was made for {made_for}")
    yield _check_vocabulary(drafter, target)
    hidden_size = _target_hidden_size(drafter)
    if hidden_size:
        text = f"it reads states of {hidden_size}, the target has {target.hidden_size}"
        yield FitCheck("hidden size", hidden_size == target.hidden_size, text)
    yield from _check_layers(drafter, target)
    yield from _check_embedding(drafter, target)


def _check_vocabulary(drafter: Facts, target: Sizes) -> FitCheck:
    own = _size(layer_config(drafter.raw), "vocab_size")
    # an EAGLE-3 head may leave out the padding at the end of a vocabulary, other heads may not
    is_shorter = drafter.kind.draft == "eagle3" and own <= target.vocab_size
    if own and own != target.vocab_size and not is_shorter:
        text = f"it is for {own} tokens, the target has {target.vocab_size}"
        return FitCheck("vocabulary", False, text)
    reduced = _size(drafter.raw, "draft_vocab_size") or _rows(drafter, "lm_head.weight")
    if not reduced or reduced >= (own or target.vocab_size):
        text = f"{own or 'unknown'} tokens, the target has {target.vocab_size}"
        return FitCheck("vocabulary", bool(own) or None, text)
    mapped = _rows(drafter, "d2t")
    if drafter.shapes and mapped != reduced:
        text = f"it drafts {reduced} tokens, but its map of them, d2t, has {mapped or 'none'}"
        return FitCheck("vocabulary", False, text)
    return FitCheck("vocabulary", True, f"it drafts {reduced} of {target.vocab_size} tokens")


def _target_hidden_size(drafter: Facts) -> int:
    if drafter.kind.draft == "mlp":
        return _size(drafter.raw, "input_hidden_dim", "emb_dim")
    size = _size(drafter.raw, "target_hidden_size", "backbone_hidden_size")
    if drafter.kind.family in ("medusa", "mtp", "eagle"):  # their states have the target's size
        size = size or _size(layer_config(drafter.raw), "hidden_size")
    return size


def _check_layers(drafter: Facts, target: Sizes) -> Iterator[FitCheck]:
    try:
        layers = aux_hidden_layers(drafter, target)
    except LoadError as error:
        yield FitCheck("layers", False, str(error))
        return
    if layers is None:
        return
    in_range = all(0 <= layer <= target.num_layers for layer in layers)
    text = f"it reads the hidden states {list(layers)}"
    if not layers or len(set(layers)) < len(layers) or not in_range:
        text += f", not different numbers from 0 to {target.num_layers}, the target's layers"
        yield FitCheck("layers", False, text)
    else:
        yield FitCheck("layers", True, f"{text} of 0 to {target.num_layers}")
    shape = _shape(drafter, "fc.weight")
    if len(shape) == 2:
        fused = len(layers) * target.hidden_size
        text = f"fc.weight reads {shape[1]} numbers, {len(layers)} states have {fused}"
        yield FitCheck("fusion", shape[1] == fused, text)


def aux_hidden_layers(drafter: Facts, target: Sizes) -> tuple[int, ...] | None:
    """Return the target's hidden states that a drafter reads; state i enters layer i.

    None where it reads only the last one, or where that is unknown.

    Raises:
        LoadError: the configuration's list is malformed.
    """
    raw = drafter.raw
    if drafter.kind.draft == "eagle3":
        return read_format(raw, target.num_layers).aux_hidden_layers
    name = "aux_hidden_state_layer_ids"
    layers = (as_speculators(raw) if is_block(raw) else raw).get(name)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or not all(is_integer(i) for i in layers):
        raise LoadError(f"{name} in config.json is {shown(layers)}, not a list of hidden states")
    return tuple(layers)


def _check_embedding(drafter: Facts, target: Sizes) -> Iterator[FitCheck]:
    if drafter.kind.draft in ("medusa", "mlp") or drafter.kind.family == ASSISTANT:
        return
    hidden_size = _size(layer_config(drafter.raw), "hidden_size")
    rows = _rows(drafter, "embed_tokens.weight")
    uses_target_head = drafter.kind.draft == "block" and not _rows(drafter, "lm_head.weight")
    if rows and uses_target_head and hidden_size != target.hidden_size:
        text = f"it has its own, but uses the target's head, of {target.hidden_size} numbers"
        yield FitCheck("embedding", False, text)
    elif rows:
        text = f"it has its own, of {rows} tokens, the target has {target.vocab_size}"
        yield FitCheck("embedding", rows <= target.vocab_size, text)
    elif hidden_size and drafter.shapes:
        text = f"it uses the target's, of {target.hidden_size} numbers, for states of {hidden_size}"
        yield FitCheck("embedding", hidden_size == target.hidden_size, text)


def _shape(drafter: Facts, name: str) -> tuple[int, ...]:
    return drafter.shapes.get(name) or drafter.shapes.get(f"model.{name}") or ()


def _rows(drafter: Facts, name: str) -> int:
    return next(iter(_shape(drafter, name)), 0)


def _size(raw: Json, *names: str) -> int:
    """Return the first of these fields that is a size; 0 where none is."""
    for value in (raw.get(name) for name in names):
        if isinstance(value, int) and is_integer(value) and 0 < value <= MAX_SIZE:
            return value
    return 0
