"""Multi-token modules (MTP) in the checkpoints of their own targets: which families have them, and
under which tensor names. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from forerun.draft.gguf_heads import LAYER_NAMES
from forerun.errors import LoadError, shown
from forerun.models.config import (
    MTP_PREFIXES,
    TRAINED_MTP_PREFIX,
    ModelConfig,
    make_config,
    text_part,
)
from forerun.models.families import Json, is_integer
from forerun.models.files import indexed_files, joined, read_header, read_object, weight_files
from forerun.models.gguf.config import TRAINED_BLOCK, skim
from forerun.models.gguf.container import GgufFile
from forerun.models.tensor_names import NAMES

LATENT = "kv_a_proj_with_mqa"  # part of the names of latent attention (MLA)
# parts of a module outside of its layer; the last one may be the target's
JOINED = ("join", "embed_norm", "state_norm", "last_norm")
MIMO_NAMES = {
    "join": "input_proj",
    "embed_norm": "token_layernorm",
    "state_norm": "hidden_layernorm",
    "last_norm": "final_layernorm",
}
QWEN_NAMES = {
    "join": "fc",
    "embed_norm": "pre_fc_norm_embedding",
    "state_norm": "pre_fc_norm_hidden",
    "last_norm": "norm",
}
NEXTN_NAMES = {
    "join": "eh_proj",
    "embed_norm": "enorm",
    "state_norm": "hnorm",
    "last_norm": "shared_head.norm",
}
ERNIE_NAMES = {
    "join": "linear_proj.0",
    "embed_norm": "emb_norm.0",
    "state_norm": "hidden_norm.0",
}
GGUF_NAMES = {
    "join": "nextn.eh_proj",
    "embed_norm": "nextn.enorm",
    "state_norm": "nextn.hnorm",
    "last_norm": "nextn.shared_head_norm",
}
# names of a module from `forerun train` in a GGUF file, by its own names behind "mtp_layers.0."
TRAINED_GGUF_NAMES = {name: part for part, name in LAYER_NAMES.items()} | {
    MIMO_NAMES[part]: name for part, name in GGUF_NAMES.items()
}
TRAINED_GGUF_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json
# the target's embedding and lm head, which some checkpoints repeat beside the module
TARGET_COPIES = (
    "embed_tokens.weight",
    "shared_head.head.weight",
    "nextn.shared_head_head.weight",
    "rotary_emb.inv_freq",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayout:
    """The layout of the multi-token module in the checkpoints of a family.

    Attributes:
        prefix: how the names of the module's tensors begin; `{i}` is the number of the target's
            layers.
        layer: what follows before the names of the decoder layer, which are those of the target's.
        outside: names of `JOINED`.
        state_first: the product that joins a pair has the columns of the state first.
        like_first: the layer is built like the target's first one, which may be dense among others
            with experts, and not like the last one that attends.
        dense: the layer has no experts, though the target's last one has.
        shares_norm: the norm behind the layer is the target's last one, and states pass from one
            token to the next before it, the target's own too.
    """

    prefix: str
    layer: str = ""
    outside: dict[str, str] = field(default_factory=lambda: NEXTN_NAMES)
    state_first: bool = False
    like_first: bool = False
    dense: bool = False
    shares_norm: bool = False

    def at(self, layers: int) -> str:
        """Return how the names of the module's tensors begin behind this many layers."""
        return self.prefix.format(i=layers)

    def layer_config(self, c: ModelConfig) -> ModelConfig:
        """Return the config of the only layer of the module of a model: like one of the model's
        layers with attention, and with experts as the layout says."""
        i = 0 if self.like_first else max(i for i in range(c.layers) if c.has_attention(i))
        rope = c.rope_of[i]
        has_experts = c.has_experts(i) if self.like_first else c.experts is not None
        experts = None
        if has_experts and not self.dense and c.experts is not None:
            experts = replace(c.experts, layers=(True,))
        return replace(
            c,
            layers=1,
            ropes=() if rope is None else c.ropes[rope : rope + 1],
            rope_of=(None if rope is None else 0,),
            windows=(c.windows[i] if self.like_first else None,),
            sinks=(),
            experts=experts,
            recurrent=None,
            attends=(),
            normed_residual=c.normed_residual[i : i + 1],
        )

    def names(self, c: ModelConfig) -> Iterator[tuple[str, bool]]:
        """Return the names of all tensors of the module of a model, each with whether it is a
        matrix, which may be quantized; the names of matrices are without `.weight`."""
        at = self.at(c.layers)
        for part, name in self.outside.items():
            yield (f"{at}{name}", True) if part == "join" else (f"{at}{name}.weight", False)
        for name, is_matrix in _layer_names(self.layer_config(c)):
            yield f"{at}{self.layer}{name}", is_matrix

    def refuse(self, c: ModelConfig, tensors: Collection[str]) -> str:
        """Return why the module in a checkpoint with these tensors cannot be used; "" if it can."""
        at = self.at(c.layers)
        held = {name for name in tensors if name.startswith(at)}
        if not held:
            return "its checkpoint has no multi-token layers; some copies leave them out"
        kinds = c.raw.get("mtp_layer_types")
        if kinds not in (None, ["full_attention"]):
            return (
                f"mtp_layer_types is {shown(kinds)}: only one layer of full attention is supported"
            )
        quantized = any(c.raw.get(key) is not None for key in QUANTIZED)
        names = list(self.names(c))
        matrices = [name for name, is_matrix in names if is_matrix]
        vectors = {name for name, is_matrix in names if not is_matrix}
        missing, held = list(vectors - held), held - vectors
        parts: dict[str, list[str]] = {}  # of quantized matrices, by their names
        for name in held if quantized else ():
            parts.setdefault(name.rpartition(".")[0], []).append(name)
        for name in matrices:
            found = parts.get(name, []) if quantized else [f"{name}.weight"]
            if not found or not held.issuperset(found):
                missing.append(f"{name}.weight")
            held.difference_update(found)
        if missing:
            lost = joined((name.removeprefix("model.") for name in sorted(missing)), 3)
            return f"its checkpoint has no {lost}: it is incomplete, or of another kind"
        extra = sorted(name for name in held if not name.endswith(TARGET_COPIES))
        if extra:
            more = joined((name.removeprefix("model.") for name in extra), 3)
            return f"its multi-token layers have {more}, which is not supported"
        return ""


def _layer_names(c: ModelConfig) -> Iterator[tuple[str, bool]]:
    """Return the names of all tensors of a decoder layer with attention, as `OwnLayout.names`."""
    names = NAMES[c.layout]

    def stems(part: str) -> list[str]:
        stored = names[part]
        return [stored] if isinstance(stored, str) else stored

    vectors = ["attention_norm", "mlp_norm"] if c.pre_norm else []
    vectors += ["attention_out_norm", "mlp_out_norm"] if c.sandwich else []
    matrices = ["out"]
    if c.latent is None:
        matrices.append("qkv")
        vectors += ["q_norm", "k_norm"] if c.qk_norm else []
    else:
        matrices += ["latent_down", "latent_up"]
        matrices += ["query_down", "query_up"] if c.latent.query_rank else ["query"]
        vectors += ["latent_norm", "query_norm"] if c.latent.query_rank else ["latent_norm"]
    if c.experts is None:
        matrices += ["up", "down"]
    else:
        matrices.append("router")
        matrices += ["shared_up", "shared_down"] if c.experts.shared else []
        matrices += ["shared_gate"] if c.experts.shared_gate else []
        for part in ("expert_up", "expert_down"):
            for stem in stems(part):
                yield from ((stem.format(e=e), True) for e in range(c.experts.count))
        if c.experts.choice_bias:
            yield str(names["choice_bias"]), False
    for part in vectors:
        yield f"{names[part]}.weight", False
    for part in matrices:
        yield from ((stem, True) for stem in stems(part))
    if c.qkv_bias and c.latent is None:
        yield from ((f"{stem}.bias", False) for stem in stems("qkv"))


QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
EXAONE = ("exaone4", "exaone4_5_text")
NEXTN = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
# by the `model_type` of the language model
OWN_LAYOUTS = {
    "mimo": OwnLayout(prefix=f"{MTP_PREFIXES['mimo']}0.", outside=MIMO_NAMES, state_first=True),
    **{
        family: OwnLayout(prefix=MTP_PREFIXES[family], layer="layers.0.", outside=QWEN_NAMES)
        for family in QWEN
    },
    **{
        family: OwnLayout(
            prefix=MTP_PREFIXES[family], layer="layers.0.", outside=QWEN_NAMES, like_first=True
        )
        for family in EXAONE
    },
    "exaone_moe": OwnLayout(
        prefix=MTP_PREFIXES["exaone_moe"], layer="layers.0.", outside=QWEN_NAMES, dense=True
    ),
    "ernie4_5_moe": OwnLayout(
        prefix=MTP_PREFIXES["ernie4_5_moe"],
        layer="block.0.",
        outside=ERNIE_NAMES,
        like_first=True,
        shares_norm=True,
    ),
    **{family: OwnLayout(prefix="model.layers.{i}.") for family in NEXTN},
}
GGUF_LAYOUT = OwnLayout(prefix="blk.{i}.", outside=GGUF_NAMES)
GGUF_LAYOUTS = {
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2"), GGUF_LAYOUT),
    "exaone-moe": replace(GGUF_LAYOUT, dense=True),
}


def holds_trained_module(tensors: Collection[str]) -> bool:
    """Return True if a checkpoint has a module that `forerun train` made, under the names of its
    own export."""
    return any(name.startswith(TRAINED_MTP_PREFIX) for name in tensors)


def _refuse_trained(raw: Json, tensors: Collection[str]) -> str:
    c = make_config(raw, Path("config.json"))
    matrices = [f"self_attn.{part}_proj" for part in "qkvo"]
    matrices += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", *MIMO_NAMES.values()]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if c.qk_norm == "head" else []
    names = [f"{TRAINED_MTP_PREFIX}{name}.weight" for name in (*matrices, *norms)]
    missing = [name for name in names if name not in tensors]
    return f"its checkpoint has no {joined(missing, 3)}: it is incomplete" if missing else ""


def own_layout(raw: Json) -> OwnLayout | None:
    """Return how a model with this config.json stores its multi-token module; None if such modules
    are not read of its family."""
    family = text_part(raw).get("model_type")
    return OWN_LAYOUTS.get(family) if isinstance(family, str) else None


def refuse_own_module(raw: Json, tensors: Collection[str] | None) -> str:
    """Return why the multi-token module of a model's own checkpoint cannot be used; "" if it can.

    `tensors` are the names of the checkpoint's tensors, None if they are unknown.
    """
    layout, is_trained = own_layout(raw), holds_trained_module(tensors or ())
    if layout is None and not is_trained:
        if any(LATENT in name for name in tensors or ()):
            return "its layers have latent attention, which is supported for DeepSeek V3 and GLM"
        family = shown(text_part(raw).get("model_type"))
        return (
            f"multi-token layers of the family {family} are not read: only those of MiMo,"
            " Qwen3-Next, Qwen3.5, GLM-4.5 to GLM-4.7, DeepSeek V3, EXAONE and ERNIE 4.5 are"
        )
    if tensors is None:
        return ""
    try:
        if layout is None or is_trained:
            return _refuse_trained(raw, tensors)
        return layout.refuse(make_config(raw, Path("config.json")), tensors)
    except LoadError as error:
        return str(error)


def refuse_gguf_module(gguf: GgufFile) -> str:
    """Return why the multi-token module in a GGUF file cannot be used; "" if its header shows no
    reason."""
    architecture = gguf.architecture
    extra = gguf.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if not is_integer(extra) or extra < 1:
        return "the file has no multi-token layers; some copies leave them out"
    is_trained = TRAINED_BLOCK in gguf.metadata
    if not is_trained and architecture not in GGUF_LAYOUTS:
        return (
            f"multi-token layers of GGUF files of the architecture {shown(architecture)} are not"
            f" read: only those of {', '.join(GGUF_LAYOUTS)} are"
        )
    blocks = gguf.metadata.get(f"{architecture}.block_count")
    if not isinstance(blocks, int) or not is_integer(blocks) or not extra < blocks:
        return f"block_count is {shown(blocks)}, and {shown(extra)} of the blocks are multi-token"
    if is_trained:
        return _refuse_trained_block(gguf, range(blocks - extra, blocks))
    at = GGUF_LAYOUT.at(blocks - extra)
    wanted = [f"{at}{name}.weight" for name in (*GGUF_NAMES.values(), "attn_norm")]
    missing = [name for name in wanted if name not in gguf.tensors]
    return f"the file has no {joined(missing, 3)}: it is incomplete" if missing else ""


def trained_names(gguf: GgufFile) -> dict[str, str]:
    """Return the names of the tensors of the module from `forerun train` in a GGUF file, by those
    in its own export."""
    at = GGUF_LAYOUT.at(gguf.metadata[TRAINED_BLOCK])
    normed = f"{at}attn_q_norm.weight" in gguf.tensors
    names = TRAINED_GGUF_NAMES | (TRAINED_GGUF_NORMS if normed else {})
    return {
        f"{TRAINED_MTP_PREFIX}{own}.weight": f"{at}{name}.weight" for own, name in names.items()
    }


def _refuse_trained_block(gguf: GgufFile, blocks: range) -> str:
    block = gguf.metadata[TRAINED_BLOCK]
    if not is_integer(block) or block not in blocks:
        return (
            f"{TRAINED_BLOCK} is {shown(block)}, not one of the multi-token blocks"
            f" {blocks[0]} to {blocks[-1]}"
        )
    missing = [name for name in trained_names(gguf).values() if name not in gguf.tensors]
    return f"the file has no {joined(missing, 3)}: it is incomplete" if missing else ""


def has_own_module(model: Path) -> bool:
    """Return True if the checkpoint in a directory, or a GGUF file, has a multi-token module that
    can be used."""
    try:
        if model.is_file():
            return not refuse_gguf_module(skim(model))
        raw = read_object(model / "config.json")
        index = model / "model.safetensors.index.json"
        files = indexed_files(index) if index.is_file() else weight_files(model)
        return not refuse_own_module(raw, {name for file in files for name in read_header(file)})
    except LoadError:
        return False  # loading the model says what is wrong
