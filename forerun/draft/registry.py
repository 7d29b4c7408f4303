"""The registry of drafters: proposers made from draft options (`draft_spec`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forerun.draft.assistant import AssistantProposer, load_assistant
from forerun.draft.block.module import load_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.compose import InTurn, compose
from forerun.draft.device_recycle import DeviceRecycle
from forerun.draft.eagle.module import EagleModule, load_eagle1_head, load_head
from forerun.draft.eagle.own_module import load_any_module, load_own_module
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.head_config import is_assistant
from forerun.draft.kinds import kind_of
from forerun.draft.medusa import MedusaProposer, MedusaStyleHeads, load_heads, load_mlp
from forerun.draft.ngram import Lookahead, NGram
from forerun.draft.proposer import Proposer, TargetView
from forerun.draft.recycle import Recycle, SuccessorTable
from forerun.draft.retrieval import Retrieval
from forerun.draft.suffix import References, Suffix
from forerun.draft_loading import Loader
from forerun.draft_spec import Composite, DraftSpec, Leaf, lookahead_options, plugins
from forerun.errors import LoadError
from forerun.models.hub import find_model
from forerun.runtime.torch_runner import Runner
from forerun.types import RETRIEVAL

EAGLE_LOADERS: dict[str, Callable[[Path, TargetView], EagleModule]] = {
    "eagle": load_eagle1_head,
    "eagle3": load_head,
    "mtp": load_any_module,
}
MEDUSA_LOADERS: dict[str, Callable[[Path], MedusaStyleHeads]] = {
    "medusa": load_heads,
    "mlp": load_mlp,
}


def make_proposers(
    spec: DraftSpec,
    load: Loader,
    target: TargetView,
    runner: Runner,
    width: int,
    threshold: float,
) -> dict[str, Proposer]:
    """Return an engine's proposers by name: those without weights, and those of a draft option.

    Args:
        runner: the target's; a drafter's cache gets as much room as its.
        width: nodes per level of drafts.
        threshold: that of block drafters.
    """
    pages, slots = runner.cache.pages, len(runner.cache.length)
    room = {"tokens": pages.count * pages.size, "page": pages.size, "slots": slots}

    def make(kind: str, name: str, argument: str) -> Proposer | None:
        if kind == "recycle" and argument:
            table = SuccessorTable.load(Path(argument).expanduser(), target.vocab)
            return _make_recycle(runner, width, table)
        if kind == "lookahead" and argument:
            return Lookahead(**lookahead_options(argument))
        if kind == "retrieval":
            return Retrieval({path: load.index(path) for path in argument.split(",")})
        if kind == "model":
            kind = _kind_of_model(argument)
            if kind == "model":
                return load.model(argument, width)
        if kind == "self":
            return load.self_drafter(argument, width)
        if kind in MEDUSA_LOADERS:
            heads = MEDUSA_LOADERS[kind](find_model(argument, pickled=True))
            return MedusaProposer(name, heads, target, width)
        if kind in EAGLE_LOADERS:
            return _make_eagle(Leaf(kind, argument), name, load, target, room, width)
        if kind == "block":
            block = load_block(find_model(argument, pickled=True), target)
            proposer = BlockProposer(block, target, **room, width=width, threshold=threshold)
            proposer.name = name
            return proposer
        if name not in proposers and kind in plugins():
            plugin = load_plugin(kind, argument)
            plugin.name = name
            return plugin
        return None

    proposers: dict[str, Proposer] = {
        "ngram": NGram(),
        "suffix": Suffix(),
        "recycle": _make_recycle(runner, width),
        "lookahead": Lookahead(),
        RETRIEVAL: Retrieval(),
    }
    for leaf in spec.leaves():
        proposer = make(leaf.kind, leaf.name, leaf.argument)
        if proposer is not None:
            proposers[leaf.name] = proposer
            if leaf.number > 1:
                proposer.name = leaf.name
    chosen = Leaf("suffix") if str(spec) in ("off", "auto") else spec
    copies = Composite("+", (Leaf("suffix"), Leaf("recycle")))
    for composite in (chosen, copies, _with_retrieval(chosen)):
        proposers[str(composite)] = compose(composite, proposers)
    proposers["auto"] = proposers[str(chosen)]
    references = References()
    behind_references = {
        with_references(name): InTurn((references, proposer))
        for name, proposer in proposers.items()
    }
    return {**proposers, references.name: references, **behind_references}


def _make_recycle(runner: Runner, width: int, trained: SuccessorTable | None = None) -> Proposer:
    """Return token recycling, on the target's device where Triton's kernels compute its passes."""
    captured, width = runner.captured, max(width, 2)
    if captured is not None and captured.own_layers:
        return DeviceRecycle(runner.decoder.device, True, trained, width)
    return Recycle(trained, width)


def _make_eagle(
    leaf: Leaf, name: str, load: Loader, target: TargetView, room: dict[str, int], width: int
) -> Proposer:
    """Return the proposer of an EAGLE-style head, a multi-token module or an assistant; `room` is
    that of its cache."""
    head: EagleModule
    if not leaf.argument:
        head = load_own_module(load.directory, target)
    else:
        directory = find_model(leaf.argument, pickled=True)
        if leaf.kind == "mtp" and is_assistant(directory):
            assistant = load_assistant(directory, target)
            return AssistantProposer(name, assistant, target, load.target, width)
        head = EAGLE_LOADERS[leaf.kind](directory, target)
    eagle = EagleProposer if head.mask_token is None else ParallelEagleProposer
    return eagle(name, head, target, **room, width=width)


def _kind_of_model(name: str) -> str:
    """Return the kind of what `model:` names: that of its head for a GGUF file that holds one."""
    path = find_model(name)
    return kind_of(path) if path.is_file() else "model"


def load_plugin(name: str, argument: str) -> Proposer:
    """Make a drafter that an installed package registers.

    Its entry point names a Proposer class, or a function that returns a proposer; it is called with
    what stands behind the colon of `--draft name:argument`, if anything does.

    Raises:
        LoadError: it cannot be imported or made.
    """
    try:
        make = plugins()[name].load()
        proposer = make(argument) if argument else make()
    except Exception as error:
        raise LoadError(
            f"the drafter {name!r} of an installed package failed: {error!r}"
        ) from error
    if not isinstance(proposer, Proposer):
        raise LoadError(
            f"the drafter {name!r} of an installed package gave {proposer!r}, which is no Proposer"
        )
    return proposer


def _with_retrieval(spec: DraftSpec) -> DraftSpec:
    """Put retrieval before a draft, for documents that are added later."""
    if RETRIEVAL in (leaf.name for leaf in spec.leaves()):
        return spec
    is_in_turn = isinstance(spec, Composite) and spec.sign == "+"
    parts = spec.parts if is_in_turn else (spec,)  # type: ignore[union-attr]
    return Composite("+", (Leaf(RETRIEVAL), *parts))


def with_references(name: str) -> str:
    """Return the name of the proposer that asks a request's own references before `name`."""
    return "reference" if name == "off" else f"reference+{name}"
