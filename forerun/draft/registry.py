"""Draft names to proposers: off, auto, ngram, suffix, recycle, KIND:DIR_OR_HUB_ID for those with
weights, and suffix+KIND:DIR_OR_HUB_ID for both: what the text repeats is copied, the rest is
drafted with weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forerun.cache.kv import KVCache
from forerun.draft.block.formats import DEEPSPEC, DEEPSPEC_GEMMA, arch_of
from forerun.draft.block.module import load_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.compose import Either, composed
from forerun.draft.corpus import Index
from forerun.draft.eagle.module import MASK_TOKENS, EagleModule, load_eagle1_head, load_head
from forerun.draft.eagle.mtp import load_module
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.head_files import tensor_names
from forerun.draft.medusa import (
    MLP_ARCHITECTURES,
    MedusaProposer,
    MedusaStyleHeads,
    load_heads,
    load_mlp,
)
from forerun.draft.ngram import NGram
from forerun.draft.proposer import Proposer, TargetView
from forerun.draft.recycle import Recycle, Successors
from forerun.draft.reference import References
from forerun.draft.retrieval import Retrieval
from forerun.draft.suffix import Suffix
from forerun.draft_spec import Leaf, Said, Several, plugins
from forerun.errors import LoadError, one_line
from forerun.models.config import MTP_PREFIXES
from forerun.models.files import read_header, read_object, weight_files
from forerun.models.hub import DEFAULT, find_model
from forerun.types import RETRIEVAL

Json = dict[str, Any]

DEEPSPECS = (DEEPSPEC, DEEPSPEC_GEMMA)
NATIVE = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
GEMMA_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
ARCTIC = ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")
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
    """What there is to see of a drafter: its configuration, the names of its tensors (none where
    they could not be read), and whether a tokenizer comes with it."""

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
    """The kind of what there is to see; at the end of the table stands the ordinary language
    model."""
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
    return Kind(
        family,
        "speculators",
        TITLES.get(family, f"{family} drafter"),
        draft,
        "" if draft else NOT_READ,
    )


def _is_mlp(look: Look) -> bool:
    return look.type == "mlp_speculator" or look.arch in MLP_ARCHITECTURES


def _is_arctic(look: Look) -> bool:
    return look.arch in ARCTIC or (look.has("input_hidden_dim") and _is_mlp(look))


def _is_peagle(look: Look) -> bool:
    return look.arch == "PEagleDraftModel" or (
        _is_eagle3(look) and look.has(*MASK_TOKENS, "parallel_drafting")
    )


def _is_eagle3(look: Look) -> bool:
    return "Eagle3" in look.arch or (
        look.arch in ("LlamaForCausalLM", "") and look.has("draft_vocab_size")
    )


def _is_eagle1(look: Look) -> bool:
    """A plain configuration of one layer: what it is shows in the tensors, or in there being no
    tokenizer."""
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
    (
        lambda k: k.type in GEMMA_ASSISTANTS,
        Kind("gemma4_assistant", "", "Gemma 4 assistant", "", NOT_READ),
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
        _block("dflash", "deepspec"),
    ),
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
        Kind(
            "eagle3",
            "latent attention",
            EAGLE3,
            "",
            "its layer has latent attention, which is not supported",
        ),
    ),
    (lambda k: k.arch.startswith("Eagle3"), Kind("eagle3", "nvidia", EAGLE3, "eagle3")),
    (lambda k: "Eagle3" in k.arch, Kind("eagle3", "specforge", EAGLE3, "eagle3")),
    (_is_eagle3, Kind("eagle3", "safeailab", EAGLE3, "eagle3")),
    (
        lambda k: k.arch.startswith("Eagle") or k.type == "eagle",
        Kind("eagle", "vllm", "EAGLE head", "eagle"),
    ),
    (
        lambda k: k.consists("fc.weight", "lm_head.weight", "norm.weight"),
        Kind("eagle3", "safeailab", EAGLE3, "eagle3"),
    ),
    (
        lambda k: _is_eagle1(k) or k.consists("fc.weight"),
        Kind("eagle", "safeailab", "EAGLE head", "eagle"),
    ),
    (lambda k: k.arch.endswith("DraftModel"), Kind("unknown", "", "drafter", "", NOT_READ)),
    (
        lambda k: k.raw.get("spd_type") == "pard" or k.has("pard_token"),
        Kind("pard", "", "PARD model, drafting in one pass", "model"),
    ),
    (
        lambda k: _is_native(k) and k.has("dspark_block_size"),
        Kind("dspark", "native", "model with DSpark layers of its own", "", OWN_LAYERS),
    ),
    (lambda k: _is_native(k) and k.type in MTP_PREFIXES, Kind("mtp", "native", OWN_MTP, "mtp")),
    (_is_native, Kind("mtp", "native", OWN_MTP, "", OWN_LAYERS)),
    (lambda k: True, Kind("lm", "", "language model", "model")),
)
WORDS = (  # of names and tags that say "drafter"
    "eagle3", "eagle-3", "p-eagle", "peagle", "eagle", "dflash", "dspark", "medusa", "mtp", "pard",
    "speculator", "speculators", "speculative-decoding", "draft", "draft-model", "drafter",
)  # fmt: skip


BUNDLED = Path(__file__).parent.parent / "drafters"

# By instructions the bits of a weight, in the mean, from which on a head that comes with forerun
# was faster than copies
# alone: what weights are short of saves reading, and rows cost as much as ever
# (docs/performance.md).
PAYS = {"avx512": 0.0, "avx512vnni": 0.0, "avx2": 8.0, "avxvnni": 8.0}


def automatic(spec: str, model: Path, instructions: str, bits: float) -> str:
    """What `auto` means for this model: what copies, and then the drafter that comes with forerun
    for it, where that was measured to pay. `instructions` are those of the native kernels, "" in
    torch, where a head takes longer to call than it is worth; `bits` are those of the model's
    weights."""
    if spec != "auto":
        return spec
    found = bundled_for(model) if bits >= PAYS.get(instructions, math.inf) else None
    return "suffix" if found is None else f"suffix+{_kind(found)}:{found}"


def _kind(directory: Path) -> str:
    """What a drafter that comes with forerun is, as `--draft` calls it."""
    tensors = [name for file in weight_files(directory) for name in read_header(file)]
    return (
        recognise(Look(read_object(directory / "config.json"), tensors, tokenizer=True)).draft
        or "model"
    )


def bundled_for(model: Path) -> Path | None:
    """The directory of the drafter that was made for the model here; None where there is none.

    A model goes by its name, whatever its quantisation: were it another, drafts would be worse, and
    the text the same. Whoever loads the drafter sees whether the sizes fit.
    """
    found, near = (
        BUNDLED / DEFAULT,
        model.absolute().parts[-4:],
    )  # a cache of the Hub names it some levels above
    named = any(DEFAULT.lower() in part.lower() for part in near)
    return found if named and (found / "config.json").is_file() else None


PAIRS: dict[str, Callable[[Path, TargetView], EagleModule]] = {
    "eagle": load_eagle1_head, "eagle3": load_head, "mtp": load_module,
}  # fmt: skip

LEVELS: dict[str, Callable[[Path], MedusaStyleHeads]] = {"medusa": load_heads, "mlp": load_mlp}


def kind_of(directory: Path) -> str:
    """What a directory holds, as `--draft` calls it; a model where it holds nothing else that
    drafts."""
    try:
        raw = read_object(directory / "config.json")
    except LoadError:
        return "model"  # whoever reads it says what is wrong
    return recognise(Look(raw, tensor_names(directory), tokenizer=True)).draft or "model"


class Loading(Protocol):
    """Reads what a draft option names, for the target of an engine."""

    def model(self, where: str, width: int) -> Proposer:
        """A draft model, with drafts of `width` where its vocabulary is the target's."""
        ...

    def itself(self, how: str, width: int) -> Proposer:
        """The target as its own drafter, as the argument of `self` says."""
        ...

    def index(self, where: str) -> Index:
        """An index of the target's tokens."""
        ...


def make_proposers(
    said: Said, load: Loading, target: TargetView, cache: KVCache, width: int, threshold: float
) -> dict[str, Proposer]:
    """The proposers of an engine: those that need no weights, and what is asked for, as
    `read_draft` gives it. One with a cache of its own gets as much room as the target's `cache`
    has; `threshold` is that of a block drafter."""
    proposers: dict[str, Proposer] = {
        "ngram": NGram(),
        "suffix": Suffix(),
        "recycle": Recycle(width=max(width, 2)),
        RETRIEVAL: Retrieval(),
    }
    pages = cache.pages
    room = {"tokens": pages.count * pages.size, "page": pages.size, "slots": len(cache.length)}
    for leaf in said.leaves():
        kind, name, argument = leaf.kind, leaf.name, leaf.argument
        if kind == "recycle" and argument:
            proposers[name] = Recycle(
                Successors.load(Path(argument).expanduser(), target.vocab), max(width, 2)
            )
        if kind == "retrieval":
            proposers[name] = Retrieval({place: load.index(place) for place in argument.split(",")})
        if kind == "model":
            proposers[name] = load.model(argument, width)
        if kind == "self":
            proposers[name] = load.itself(argument, width)
        if kind in LEVELS:
            heads = LEVELS[kind](find_model(argument, pickled=True))
            proposers[name] = MedusaProposer(name, heads, target, width)
        if kind in PAIRS:
            head = PAIRS[kind](find_model(argument, pickled=True), target)
            pairs = EagleProposer if head.mask_token is None else ParallelEagleProposer
            proposers[name] = pairs(name, head, target, **room, width=width)
        if kind == "block":
            block = load_block(find_model(argument, pickled=True), target)
            proposers[name] = BlockProposer(block, target, **room, width=width, threshold=threshold)
        if name not in proposers and kind in plugins():
            proposers[name] = load_plugin(kind, argument)
            proposers[name].name = name
        if leaf.number > 1:
            proposers[name].name = name
    plain = said if str(said) not in ("off", "auto") else Leaf("suffix")
    for several in (
        plain,
        Several("+", (Leaf("suffix"), Leaf("recycle"))),
        _behind(RETRIEVAL, plain),
    ):
        proposers[str(several)] = composed(several, proposers)
    proposers["auto"] = proposers[str(plain)]
    references = References()
    found: dict[str, Proposer] = {references.name: references}
    return (
        proposers
        | found
        | {with_references(n): Either((references, p)) for n, p in proposers.items()}
    )


def load_plugin(name: str, argument: str) -> Proposer:
    """Make a drafter that an installed package registers.

    Its entry point names a Proposer class, or a function that returns a proposer; it is called with
    what stands behind the colon of `--draft name:argument`, if anything does.

    Raises:
        LoadError: it cannot be imported or made.
    """
    try:
        make = plugins()[name].load()
        made = make(argument) if argument else make()
    except Exception as error:
        raise LoadError(
            f"the drafter {name!r} of an installed package failed: {error!r}"
        ) from error
    if not isinstance(made, Proposer):
        raise LoadError(
            f"the drafter {name!r} of an installed package gave {made!r}, which is no Proposer"
        )
    return made


def _behind(name: str, said: Said) -> Said:
    """The same with another draft before it, for documents that come later."""
    if name in (leaf.name for leaf in said.leaves()):
        return said
    return Several(
        "+",
        (Leaf(name), *(said.parts if isinstance(said, Several) and said.how == "+" else (said,))),
    )


def with_references(name: str) -> str:
    """The proposer that asks a request's own references before `name`."""
    return "reference" if name == "off" else f"reference+{name}"
