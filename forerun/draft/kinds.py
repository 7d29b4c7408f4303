"""What kind of drafter something is, told from config.json and the names of its tensors: one table, first row wins.

Nothing in a file says "drafter": kinds are told apart by keys that only they have, and by the class that their authors
gave for `architectures`. What is read is from strangers, so any value may be of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from forerun.draft.block_dialects import DEEPSPEC, DEEPSPEC_GEMMA, arch_of
from forerun.draft.eagle_dialects import MASKS
from forerun.draft.level_dialects import PLAIN, VARIANTS
from forerun.errors import one_line
from forerun.models.families import OWN_DRAFTER

Json = dict[str, Any]

DEEPSPECS = (DEEPSPEC, DEEPSPEC_GEMMA)
NATIVE = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
GEMMA_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
DEEPSPEC_EAGLES = ("Qwen3Eagle3Model", "Gemma4Eagle3Model")
SPECULATORS = {  # type to --draft
    "eagle3": "eagle3", "peagle": "eagle3", "mtp": "mtp", "dspark": "block", "dflash": "block",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of drafters, and what forerun makes of it.

    Attributes:
        family: eagle3, dflash, medusa, lm (an ordinary language model) and so on.
        dialect: whose layout of files it is, "" where there is one only.
        title: what to call it in a sentence.
        draft: the word for `--draft`, "" where forerun does not draft with it.
        why: why not, in a few words.
    """

    family: str
    dialect: str = ""
    title: str = ""
    draft: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        """Family and dialect in a cell of a table."""
        return f"{self.family} ({self.dialect})" if self.dialect else self.family


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to see of a drafter: its configuration, the names of its tensors (none where they could not be
    read), and whether a tokenizer comes with it."""

    raw: Json
    tensors: Collection[str] = ()
    tokenizer: bool = False

    @property
    def arch(self) -> str:
        """The class its authors gave, the first of several."""
        return arch_of(self.raw)

    @property
    def type(self) -> str:
        """`model_type`, "" where it is none or not said."""
        said = self.raw.get("model_type")
        return said if isinstance(said, str) else ""

    @property
    def block(self) -> Json:
        """`dflash_config`, or nothing."""
        return inner(self.raw, "dflash_config")

    def has(self, *names: str) -> bool:
        """Whether config.json says anything under one of these names."""
        return any(self.raw.get(name) is not None for name in names)

    def holds(self, *parts: str) -> bool:
        """Whether the name of a tensor has one of these in it."""
        return any(part in name for name in self.tensors for part in parts)

    def consists(self, *names: str) -> bool:
        """Whether it has all these tensors, with or without `model.` before them."""
        return set(names) <= {name.removeprefix("model.") for name in self.tensors}


def recognise(look: Look) -> Kind:
    """The kind of what there is to see; at the end of the table stands the ordinary language model."""
    kind = next(kind for test, kind in TABLE if test(look))
    return kind if isinstance(kind, Kind) else kind(look)


def inner(raw: Json, name: str) -> Json:
    """An object within another; nothing where there is none."""
    found = raw.get(name)
    return found if isinstance(found, dict) else {}


def _speculators(look: Look) -> Kind:
    said = look.raw["speculators_model_type"]
    family = one_line(said) if isinstance(said, str) else "unknown"
    draft = SPECULATORS.get(family, "")
    return Kind(family, "speculators", TITLES.get(family, f"{family} drafter"), draft, "" if draft else NOT_READ)


def _is_mlp(look: Look) -> bool:
    return look.type == "mlp_speculator" or look.arch in (*PLAIN, *VARIANTS)


def _is_arctic(look: Look) -> bool:
    return look.arch in VARIANTS or (look.has("input_hidden_dim") and _is_mlp(look))


def _is_peagle(look: Look) -> bool:
    return look.arch == "PEagleDraftModel" or (_is_eagle3(look) and look.has(*MASKS, "parallel_drafting"))


def _is_eagle3(look: Look) -> bool:
    return "Eagle3" in look.arch or (look.arch in ("LlamaForCausalLM", "") and look.has("draft_vocab_size"))


def _is_eagle1(look: Look) -> bool:
    """A plain configuration of one layer: what it is shows in the tensors, or in there being no tokenizer."""
    one = look.arch == "LlamaForCausalLM" and look.raw.get("num_hidden_layers") == 1
    return one and (look.holds("fc.weight") if look.tensors else not look.tokenizer)


def _is_native(look: Look) -> bool:
    said = [look.raw.get(name) for name in (*NATIVE, "dspark_block_size")]
    said += [inner(look.raw, "text_config").get(name) for name in NATIVE]
    counted = any(isinstance(value, int) and value > 0 for value in said)
    return counted or look.holds("eh_proj") or any(name.startswith("mtp.") for name in look.tensors)


def _block(family: str, dialect: str) -> Kind:
    return Kind(family, dialect, TITLES[family], "block")


EAGLE3 = "EAGLE-3 head"
TITLES = {
    "eagle3": EAGLE3, "peagle": "P-EAGLE head", "mtp": "multi-token module", "dspark": "DSpark drafter",
    "dflash": "DFlash drafter",
}  # fmt: skip
MEDUSA, OWN_MTP = "set of Medusa heads", "model with multi-token layers of its own"
NOT_READ = "forerun does not read this kind of drafter"
OWN_LAYERS = "layers that draft for their own model are read of MiMo only"

TABLE: tuple[tuple[Callable[[Look], bool], Kind | Callable[[Look], Kind]], ...] = (
    (lambda k: k.has("speculators_model_type"), _speculators),
    (lambda k: k.type in GEMMA_ASSISTANTS, Kind("gemma4_assistant", "", "Gemma 4 assistant", "", NOT_READ)),
    (_is_arctic, Kind("arctic", "", "Arctic speculator", "mlp")),
    (_is_mlp, Kind("mlp", "", "MLP speculator", "mlp")),
    (
        lambda k: k.type == "medusa" and k.has("num_heads") and not k.has("medusa_num_heads"),
        Kind("medusa", "vllm", MEDUSA, "medusa"),
    ),
    (lambda k: k.has("medusa_num_heads") or k.type == "medusa", Kind("medusa", "fasterdecoding", MEDUSA, "medusa")),
    (lambda k: k.has("hydra_num_heads", "hydra_head_arch"), Kind("hydra", "", "set of Hydra heads", "", NOT_READ)),
    (lambda k: k.arch in DEEPSPECS and k.raw.get("markov_rank") in (0, None), _block("dflash", "deepspec")),
    (lambda k: k.arch in DEEPSPECS, _block("dspark", "deepspec")),
    (
        lambda k: k.arch == "DSparkDraftModel" or k.block.get("projector_type") == "dspark",
        _block("dspark", "specforge"),
    ),
    (lambda k: k.arch.startswith("DFlash") or k.has("dflash_config"), _block("dflash", "z-lab")),
    (_is_peagle, Kind("peagle", "", "P-EAGLE head", "eagle3")),
    (
        lambda k: k.arch in DEEPSPEC_EAGLES and k.has("target_layer_ids"),
        Kind("eagle3", "deepspec", EAGLE3, "eagle3"),
    ),
    (
        lambda k: "Eagle3" in k.arch and ("DeepseekV2" in k.arch or k.holds("kv_a_proj_with_mqa")),
        Kind("eagle3", "latent attention", EAGLE3, "", "its layer has latent attention, which is not supported"),
    ),
    (lambda k: k.arch.startswith("Eagle3"), Kind("eagle3", "nvidia", EAGLE3, "eagle3")),
    (lambda k: "Eagle3" in k.arch, Kind("eagle3", "specforge", EAGLE3, "eagle3")),
    (_is_eagle3, Kind("eagle3", "safeailab", EAGLE3, "eagle3")),
    (lambda k: k.arch.startswith("Eagle") or k.type == "eagle", Kind("eagle", "vllm", "EAGLE head", "eagle")),
    (lambda k: k.consists("fc.weight", "lm_head.weight", "norm.weight"), Kind("eagle3", "safeailab", EAGLE3, "eagle3")),
    (lambda k: _is_eagle1(k) or k.consists("fc.weight"), Kind("eagle", "safeailab", "EAGLE head", "eagle")),
    (lambda k: k.arch.endswith("DraftModel"), Kind("unknown", "", "drafter", "", NOT_READ)),
    (
        lambda k: k.raw.get("spd_type") == "pard" or k.has("pard_token"),
        Kind("pard", "", "PARD model, drafting in one pass", "model"),
    ),
    (
        lambda k: _is_native(k) and k.has("dspark_block_size"),
        Kind("dspark", "native", "model with DSpark layers of its own", "", OWN_LAYERS),
    ),
    (lambda k: _is_native(k) and k.type in OWN_DRAFTER, Kind("mtp", "native", OWN_MTP, "mtp")),
    (_is_native, Kind("mtp", "native", OWN_MTP, "", OWN_LAYERS)),
    (lambda k: True, Kind("lm", "", "language model", "model")),
)
WORDS = (  # of names and tags that say "drafter"
    "eagle3", "eagle-3", "p-eagle", "peagle", "eagle", "dflash", "dspark", "medusa", "mtp", "pard",
    "speculator", "speculators", "speculative-decoding", "draft", "draft-model", "drafter",
)  # fmt: skip
