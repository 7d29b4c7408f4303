"""Kinds of drafters: what config.json and tensor names say a directory holds. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.draft.eagle.mtp_formats import has_own_module, refuse_own_module
from forerun.draft.gguf_heads import head_kind
from forerun.errors import LoadError, one_line
from forerun.models.config import TRAINED_MTP_PREFIX
from forerun.models.files import read_header, read_object, weight_files
from forerun.models.gguf.container import open_gguf
from forerun.models.hub import DEFAULT

Json = dict[str, Any]

BUNDLED = Path(__file__).parent.parent / "drafters"

# Instruction sets with which a bundled head was faster than copies alone (benchmarks/LOG.md);
# AVX-VNNI, whose products cost less than those of AVX2, was not measured.
HEAD_PAYS = ("amx", "avx512", "avx512vnni", "avxvnni", "avx2")

# Words in names and tags that say "drafter".
WORDS = (
    *("eagle3", "eagle-3", "p-eagle", "peagle", "eagle", "dflash", "dspark", "medusa", "mtp"),
    *("pard", "speculator", "speculators", "speculative-decoding", "draft", "draft-model"),
    *("drafter", "assistant"),
)

DEEPSPEC, DEEPSPEC_GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
DEEPSPECS = (DEEPSPEC, DEEPSPEC_GEMMA)
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")  # in the order in which vLLM looks
GEMMA_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # by `model_type`
ASSISTANT = "gemma4_assistant"  # the family of such drafters
MLP_ARCHITECTURES = ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")
NUM_NATIVE_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
ARCTIC = ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")
DEEPSPEC_EAGLES = ("Qwen3Eagle3Model", "Gemma4Eagle3Model")
# Types of vLLM's speculators: what they are called, and their kind of `--draft`.
SPECULATORS = {
    "eagle3": ("EAGLE-3 head", "eagle3"),
    "peagle": ("P-EAGLE head", "eagle3"),
    "mtp": ("multi-token module", "mtp"),
    "dspark": ("DSpark drafter", "block"),
    "dflash": ("DFlash drafter", "block"),
}
MEDUSA = "set of Medusa heads"
MTP_TENSORS = ("mtp.", TRAINED_MTP_PREFIX)
OWN_MTP = "model with multi-token layers of its own"
NOT_READ = "forerun does not read this kind of drafter"
OWN_LAYERS = "DSpark layers that draft for their own model are not read"
LATENT = "its layer has latent attention, which is not supported"


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of drafters, and how forerun uses it.

    Attributes:
        family: eagle3, dflash, medusa, lm (an ordinary language model) and so on.
        format: the checkpoint format, "" if the family has only one.
        title: the family's name in a sentence.
        draft: the word for `--draft`, "" if forerun cannot draft with it.
        why: why it cannot, in a few words.
    """

    family: str
    format: str = ""
    title: str = ""
    draft: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        """Family and checkpoint format, for a table."""
        return f"{self.family} ({self.format})" if self.format else self.family


@dataclass(frozen=True, slots=True)
class Look:
    """The visible properties of a drafter: config.json, tensor names (none if they could not be
    read), and whether it comes with a tokenizer."""

    raw: Json
    tensors: Collection[str] = ()
    tokenizer: bool = False

    @property
    def arch(self) -> str:
        return arch_of(self.raw)

    @property
    def type(self) -> str:
        model_type = self.raw.get("model_type")
        return model_type if isinstance(model_type, str) else ""

    @property
    def block(self) -> Json:
        """`dflash_config`, or an empty object."""
        return inner(self.raw, "dflash_config")

    def has(self, *names: str) -> bool:
        return any(self.raw.get(name) is not None for name in names)

    def holds(self, *parts: str) -> bool:
        """Return True if a tensor's name contains one of these strings."""
        return any(part in name for name in self.tensors for part in parts)

    def consists(self, *names: str) -> bool:
        """Return True if it has all these tensors, with or without the prefix `model.`."""
        return set(names) <= {name.removeprefix("model.") for name in self.tensors}


def recognise(look: Look) -> Kind:
    """Return the kind of a drafter; a model of no other kind is an ordinary language model."""
    kind = next(kind for test, kind in TABLE if test(look))
    return kind if isinstance(kind, Kind) else kind(look)


def kind_of(directory: Path) -> str:
    """Return the `--draft` kind of the drafter in a directory or a GGUF file; "model" if no other
    fits."""
    if directory.is_file():
        try:
            return head_kind(open_gguf(directory)) or "model"
        except LoadError:
            return "model"
    try:
        raw = read_object(directory / "config.json")
    except LoadError:
        return "model"  # reading it as a model tells what is wrong
    from forerun.draft.head_files import tensor_names

    return recognise(Look(raw, tensor_names(directory), tokenizer=True)).draft or "model"


def inner(raw: Json, name: str) -> Json:
    """Return an object within another; an empty one if there is none."""
    found = raw.get(name)
    return found if isinstance(found, dict) else {}


def arch_of(raw: Json) -> str:
    """Return the first of the `architectures`, "" if there is none."""
    named = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _speculators(look: Look) -> Kind:
    name = look.raw["speculators_model_type"]
    family = one_line(name) if isinstance(name, str) else "unknown"
    title, draft = SPECULATORS.get(family, (f"{family} drafter", ""))
    return Kind(family, "speculators", title, draft, "" if draft else NOT_READ)


def _is_mlp(look: Look) -> bool:
    return look.type == "mlp_speculator" or look.arch in MLP_ARCHITECTURES


def _is_arctic(look: Look) -> bool:
    return look.arch in ARCTIC or (look.has("input_hidden_dim") and _is_mlp(look))


def _is_peagle(look: Look) -> bool:
    if look.arch == "PEagleDraftModel":
        return True
    return _is_eagle3(look) and look.has(*MASK_TOKENS, "parallel_drafting")


def _is_eagle3(look: Look) -> bool:
    if "Eagle3" in look.arch:
        return True
    return look.arch in ("LlamaForCausalLM", "") and look.has("draft_vocab_size")


def _is_latent_eagle3(look: Look) -> bool:
    is_latent = "DeepseekV2" in look.arch or look.holds("kv_a_proj_with_mqa")
    return "Eagle3" in look.arch and is_latent


def _is_eagle1(look: Look) -> bool:
    """Return True for a one-layer Llama whose tensors, or lack of a tokenizer, show a head."""
    if look.consists("fc.weight"):
        return True
    if look.arch != "LlamaForCausalLM" or look.raw.get("num_hidden_layers") != 1:
        return False
    return look.holds("fc.weight") if look.tensors else not look.tokenizer


def _is_native(look: Look) -> bool:
    numbers = [look.raw.get(name) for name in (*NUM_NATIVE_LAYERS, "dspark_block_size")]
    numbers += [inner(look.raw, "text_config").get(name) for name in NUM_NATIVE_LAYERS]
    if any(isinstance(number, int) and number > 0 for number in numbers):
        return True
    return look.holds("eh_proj") or any(name.startswith(MTP_TENSORS) for name in look.tensors)


def _own_mtp(look: Look) -> Kind:
    why = refuse_own_module(look.raw, look.tensors or None)
    return Kind("mtp", "native", OWN_MTP, "" if why else "mtp", why)


def _speculators_kind(family: str, format: str = "") -> Kind:
    """Return the kind of a family of speculators in another checkpoint format."""
    return Kind(family, format, *SPECULATORS[family])


# Tests in the order in which they are tried, each with the kind.
TABLE: tuple[tuple[Callable[[Look], bool], Kind | Callable[[Look], Kind]], ...] = (
    (lambda k: k.has("speculators_model_type"), _speculators),
    (
        lambda k: k.type in GEMMA_ASSISTANTS,
        Kind(ASSISTANT, "", "Gemma 4 assistant", "mtp"),
    ),
    (_is_arctic, Kind("arctic", "", "Arctic speculator", "", NOT_READ)),
    (_is_mlp, Kind("mlp", "", "MLP speculator", "mlp")),
    (
        lambda k: k.type == "medusa" and k.has("num_heads") and not k.has("medusa_num_heads"),
        Kind("medusa", "vllm", MEDUSA, "medusa"),
    ),
    (
        lambda k: k.has("medusa_num_heads") or k.type == "medusa",
        Kind("medusa", "fasterdecoding", MEDUSA, "medusa"),
    ),
    (
        lambda k: k.has("hydra_num_heads", "hydra_head_arch"),
        Kind("hydra", "", "set of Hydra heads", "", NOT_READ),
    ),
    (
        lambda k: k.arch in DEEPSPECS and k.raw.get("markov_rank") in (0, None),
        _speculators_kind("dflash", "deepspec"),
    ),
    (lambda k: k.arch in DEEPSPECS, _speculators_kind("dspark", "deepspec")),
    (
        lambda k: k.arch == "DSparkDraftModel" or k.block.get("projector_type") == "dspark",
        _speculators_kind("dspark", "specforge"),
    ),
    (
        lambda k: k.arch.startswith("DFlash") or k.has("dflash_config"),
        _speculators_kind("dflash", "z-lab"),
    ),
    (_is_peagle, _speculators_kind("peagle")),
    (
        lambda k: k.arch in DEEPSPEC_EAGLES and k.has("target_layer_ids"),
        _speculators_kind("eagle3", "deepspec"),
    ),
    (_is_latent_eagle3, Kind("eagle3", "latent attention", "EAGLE-3 head", "", LATENT)),
    (lambda k: k.arch.startswith("Eagle3"), _speculators_kind("eagle3", "nvidia")),
    (lambda k: "Eagle3" in k.arch, _speculators_kind("eagle3", "specforge")),
    (_is_eagle3, _speculators_kind("eagle3", "safeailab")),
    (
        lambda k: k.arch.startswith("Eagle") or k.type == "eagle",
        Kind("eagle", "vllm", "EAGLE head", "eagle"),
    ),
    (
        lambda k: k.consists("fc.weight", "lm_head.weight", "norm.weight"),
        _speculators_kind("eagle3", "safeailab"),
    ),
    (_is_eagle1, Kind("eagle", "safeailab", "EAGLE head", "eagle")),
    (lambda k: k.arch.endswith("DraftModel"), Kind("unknown", "", "drafter", "", NOT_READ)),
    (
        lambda k: k.raw.get("spd_type") == "pard" or k.has("pard_token"),
        Kind("pard", "", "PARD model, drafting in one pass", "model"),
    ),
    (
        lambda k: _is_native(k) and k.has("dspark_block_size"),
        Kind("dspark", "native", "model with DSpark layers of its own", "", OWN_LAYERS),
    ),
    (_is_native, _own_mtp),
    (lambda k: True, Kind("lm", "", "language model", "model")),
)


def automatic(spec: str, model: Path, instructions: str) -> str:
    """Resolve the draft option `auto` for a model; other options are returned as is.

    It is copying, followed by the bundled drafter of the model, or by the multi-token module in its
    own checkpoint, where the bundled one was measured to pay.

    Args:
        instructions: those of the native kernels; "" in torch, where a head costs more than it
            saves.
    """
    if spec != "auto":
        return spec
    if instructions not in HEAD_PAYS:
        return "suffix"
    found = bundled_for(model)
    if found is None:
        return "suffix+mtp" if has_own_module(model) else "suffix"
    tensors = [name for file in weight_files(found) for name in read_header(file)]
    kind = recognise(Look(read_object(found / "config.json"), tensors, tokenizer=True))
    return f"suffix+{kind.draft or 'model'}:{found}"


def has_drafter(model: Path) -> bool:
    """Return True if a drafter with weights comes with a model, or with forerun for it."""
    return bundled_for(model) is not None or has_own_module(model)


def bundled_for(model: Path) -> Path | None:
    """Return the directory of the bundled drafter that was trained for a model, if there is one.

    Models are told apart by name, whatever their quantisation: with another model drafts would be
    worse and the text the same. Loading the drafter checks that the sizes fit.
    """
    directory = BUNDLED / DEFAULT
    # A cache of the Hub has the name some levels above the files.
    is_default = any(DEFAULT.lower() in part.lower() for part in model.absolute().parts[-4:])
    return directory if is_default and (directory / "config.json").is_file() else None
