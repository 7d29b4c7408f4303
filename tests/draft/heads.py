"""Every kind of draft head, registered once: tiny heads in each of its shapes, their proposers,
reference twins and files.

test_heads.py tests all of them; a new kind needs a line in KINDS and some in SHAPES."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.draft.block.formats import MarkovShape
from forerun.draft.block.module import load_block, save_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.eagle.module import load_eagle1_head, load_head, save_head
from forerun.draft.eagle.mtp import load_module, save_module
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.medusa import MedusaProposer
from forerun.draft.proposer import Proposer, TargetView
from forerun.draft.registry import MEDUSA_LOADERS
from tests import tiny
from tests.draft import published
from tests.draft.published import Published, PublishedTwin
from tests.draft.twins import BlockTwin, Eagle1Twin, EagleTwin, MtpTwin, ParallelTwin, target

ROOM = {"tokens": 1024, "page": 4, "slots": 8}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of head.

    Attributes:
        draft: its --draft kind.
        make: makes a head for a family, of a shape given by further keywords.
        proposer_type: makes its proposer.
        twin: the reference implementation.
        save, load: write it as it is published, and load it.
        tolerance: the tolerance of logits; some twins compute with a float64 embedding.
    """

    draft: str
    make: Callable[..., Any]
    proposer_type: Callable[..., Proposer]
    twin: Callable[[Any], Any]
    save: Callable[[Any, Path], object]
    load: Callable[[Path, TargetView], Any]
    tolerance: float = 1e-9

    def proposer(
        self, head: Any, view: TargetView | None = None, width: int = 1, **room: int
    ) -> Proposer:
        """Make its proposer, for `view` or else the tiny llama in float64."""
        return self.proposer_type(head, view or target(), width=width, **ROOM | room)


def eagle(family: str, windows: tuple[int, ...] = (), **changes: Any) -> Any:
    config = tiny.eagle_config(family, **changes)
    if windows:
        config = replace(config, layer=replace(config.layer, windows=windows))
    return tiny.eagle(config)


def parallel(family: str, windows: tuple[int, ...] = (), **changes: Any) -> Any:
    head = tiny.parallel(family, **changes)
    if not windows:
        return head
    return tiny.eagle(replace(head.config, layer=replace(head.layer, windows=windows)))


def block(family: str, **changes: Any) -> Any:
    return tiny.block(tiny.block_config(family, **changes))


def medusa_style(family: str, made: Callable[[], Published]) -> Any:
    """Load heads from a published checkpoint; their attribute `published` is the checkpoint."""
    publication, directory = made(), tiny.new_directory("heads-") / "heads"
    heads = MEDUSA_LOADERS[publication.draft](publication.write(directory))
    heads.published = publication
    return heads


def medusa_proposer(head: Any, view: TargetView, width: int, **room: int) -> Proposer:
    return MedusaProposer(head.published.draft, head, view, width)


KINDS = {
    "eagle3": Kind(
        "eagle3", eagle, functools.partial(EagleProposer, "eagle3"), EagleTwin, save_head, load_head
    ),
    "eagle": Kind(
        "eagle", tiny.eagle1, functools.partial(EagleProposer, "eagle"), Eagle1Twin,
        lambda head, directory: published.as_eagle1(head).write(directory), load_eagle1_head, 1e-6,
    ),
    "p-eagle": Kind(
        "eagle3", parallel, functools.partial(ParallelEagleProposer, "eagle3"), ParallelTwin,
        lambda head, directory: published.of_head(
            "eagle3", head, published.PEAGLE_SPECFORGE
        ).write(directory),
        load_head, 1e-6,
    ),
    "mtp": Kind(
        "mtp", tiny.mtp, functools.partial(EagleProposer, "mtp"), MtpTwin,
        lambda head, directory: save_module(head, directory, None, torch.float32), load_module, 1e-6,
    ),
    "block": Kind("block", block, BlockProposer, BlockTwin, save_block, load_block),
    **{
        name: Kind(
            name, medusa_style, medusa_proposer, PublishedTwin,
            lambda head, directory: head.published.write(directory),
            lambda directory, view, name=name: MEDUSA_LOADERS[name](directory), 1e-4,
        )
        for name in ("mlp", "medusa")
    },
}  # fmt: skip
CACHED = [name for name in KINDS if name not in MEDUSA_LOADERS]  # with a KV cache of their own
WINDOWS = {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True, "sliding_window": 5,
}  # fmt: skip
NO_CONFIDENCE = {"confidence": False, "confidence_with_markov": False}
PLAIN = {"markov": None, **NO_CONFIDENCE}
REDUCED = {"draft_vocab": 40, "own_head": True}
FILL_IN = {"sample_from_anchor": False}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "plain": {},
        "norm before residual": {"norm_before_residual": True},
        "norm before fc": {"norm_before_fc": True, "norm_output": True},
        "norm of each state": {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
        "norm of the output": {"norm_output": True},
        "reduced vocabulary": {"draft_vocab": 40},
        "one state": {"aux_hidden_layers": (1,)},
        "own embedding, narrower": {"own_embedding": True, "layer": {"hidden_size": 24, "head_dim": 8}},
        "narrower, some tokens": {
            "own_embedding": True, "draft_vocab": 40, "layer": {"hidden_size": 24, "head_dim": 8},
        },
        "joined pairs": {"join": True, "fc_norm": True, "norm_output": True, "draft_vocab": 40},
        "qwen3, other rope": {"layer": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 500.0}},
        "window": {"windows": (4,)},
        "the target's head": {"own_head": False},
        "fewer tokens than the target": {"own_embedding": True, "layer": {"vocab_size": 50}, "draft_vocab": 50},
    },
    "eagle": {
        "as published": {},
        "without a bias": {"bias": False},
        "biases of queries, keys and values": {"qkv_bias": True},
        "an embedding of its own": {"own": True},
        "a head of its own": {"own_head": True},
        "biases and an embedding": {"qkv_bias": True, "own": True},
    },
    "p-eagle": {
        "two layers": {},
        "as published": {"layers": 4},
        "one layer": {"layers": 1},
        "all norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        "norm before fc, some tokens": {"norm_before_fc": True, "draft_vocab": 40},
        "qwen3, the target's embedding": {"layer": {"model_type": "qwen3", "head_dim": 16}, "own_embedding": False},
        "windows": {"windows": (4, 4)},
    },
    "mtp": {"all tokens": {}, "some tokens": {"draft_vocab": 40}},
    "block": {
        "dspark": {},
        "no heads": PLAIN,
        "dflash": {**PLAIN, **FILL_IN},
        "one state, one layer, a block of one": {"aux_hidden_layers": (1,), "block": 1, "layer": {"num_hidden_layers": 1}},
        "reduced vocabulary": REDUCED,
        "own embedding and head, narrower": {
            "own_embedding": True, "own_head": True, "layer": {"hidden_size": 24, "head_dim": 8},
        },
        "llama, other rope": {"layer": {"model_type": "llama", "rope_theta": 500.0}},
        "a block longer than what is attended together": {"block": 20},
        "long, some tokens": {"block": 7, **REDUCED},
        "windows": {"layer": WINDOWS},
        "windows, causal inside": {"layer": WINDOWS, "window_causal": True},
        "a gated Markov head": {"markov": MarkovShape(5, "gated")},
        "a gated one, some tokens": {"markov": MarkovShape(5, "gated"), **REDUCED, **FILL_IN},
        "a recurrent Markov head": {"markov": MarkovShape(5, "rnn")},
        "a recurrent one, filling in": {"markov": MarkovShape(5, "rnn"), **FILL_IN},
    },
    "mlp": {
        "IBM's": {"made": published.ibm},
        "IBM's, tied": {"made": lambda: published.ibm(tied=True, scaled=True)},
        "IBM's, of one level": {"made": lambda: published.ibm(levels=1, prefix="")},
    },
    "medusa": {
        "its authors'": {"made": published.medusa},
        "two layers": {"made": lambda: published.medusa(2, "medusa_head.", "medusa_lm_head.safetensors")},
        "vLLM's": {"made": published.medusa_of_vllm},
        "vLLM's, some tokens": {"made": lambda: published.medusa_of_vllm(draft_vocab=40)},
        "vLLM's, rows of all": {"made": lambda: published.medusa_of_vllm(draft_vocab=40, all_rows=True)},
        "vLLM's, all else": {"made": lambda: published.medusa_of_vllm(bias=True, shared=True, scale=0.5)},
    },
}  # fmt: skip
ALL = [(kind, shape) for kind in KINDS for shape in SHAPES[kind]]
CASES = [
    case for case in ALL if "fewer tokens" not in case[1]
]  # such a head can rarely read a full text


def head_of(kind: str, shape: str | None = None, family: str = "llama") -> Any:
    """A head of a registered shape, by default of the kind's first one."""
    return KINDS[kind].make(family, **SHAPES[kind][shape or next(iter(SHAPES[kind]))])
