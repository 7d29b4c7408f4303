"""Every kind of head, registered once: tiny ones in each of its shapes, their proposers, their
twins, their files.

`tests/draft/test_heads.py` asks of all of them what any head must do; a new kind is a line in KINDS
and some in SHAPES."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.draft.block.formats import MarkovShape
from forerun.draft.block.module import load_block, save_block
from forerun.draft.block.proposer import Block
from forerun.draft.eagle.module import load_first_head, load_head, save_head
from forerun.draft.eagle.mtp import load_module, save_module
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.medusa import MedusaProposer
from forerun.draft.proposer import Proposer, TargetView
from forerun.draft.registry import MEDUSA_LOADERS
from tests import tiny
from tests.draft import published
from tests.draft.block_twin import BlockTwin
from tests.draft.published import Published, PublishedTwin
from tests.draft.twins import EagleTwin, FirstTwin, MtpTwin, ParallelTwin, target

ROOM = {"tokens": 1024, "page": 4, "slots": 8}
FIELDS = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of head is made of, and what is made of it.

    Attributes:
        draft: what `--draft` calls it.
        make: one for a family, of a shape that further keywords say.
        drafter: how it drafts.
        twin: what it is compared with.
        save, load: write it as it is published, and read it.
        closeness: how far twin and head may be apart: some twins compute with the embedding in
            float64.
    """

    draft: str
    make: Callable[..., Any]
    drafter: Callable[..., Proposer]
    twin: Callable[[Any], Any]
    save: Callable[[Any, Path], object]
    load: Callable[[Path, TargetView], Any]
    closeness: float = 1e-9

    def propose(
        self, head: Any, view: TargetView | None = None, width: int = 1, **room: int
    ) -> Proposer:
        """Its proposer, for the tiny llama in float64 unless a view says otherwise."""
        return self.drafter(head, view or target(), width=width, **ROOM | room)


def eagle(family: str, windows: tuple[int, ...] = (), **changes: Any) -> Any:
    config = tiny.eagle_config(family, **changes)
    return tiny.eagle(
        replace(config, layer=replace(config.layer, windows=windows)) if windows else config
    )


def parallel(family: str, windows: tuple[int, ...] = (), **changes: Any) -> Any:
    head = tiny.parallel(family, **changes)
    return (
        tiny.eagle(replace(head.config, layer=replace(head.layer, windows=windows)))
        if windows
        else head
    )


def levels(family: str, made: Callable[[], Published]) -> Any:
    """Heads out of a published directory, which know what they were published as."""
    publication, directory = made(), tiny.new_directory("heads-") / "heads"
    heads = MEDUSA_LOADERS[publication.draft](publication.write(directory))
    heads.published = publication
    return heads


def on_last_states(head: Any, view: TargetView, width: int, **room: int) -> Proposer:
    return MedusaProposer(head.published.draft, head, view, width)


def save_tensors(
    head: Any,
    directory: Path,
    fields: dict[str, Any],
    layer: str = "",
    more: dict[str, torch.Tensor] | None = None,
) -> Path:
    """`layer`: what the first layer is called there."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    named = {
        n.replace("layers.0.", layer) if layer else n: t.clone()
        for n, t in head.state_dict().items()
    }
    save_file((more or {}) | named, directory / "model.safetensors")
    return directory


def save_first(head: Any, directory: Path, **fields: Any) -> Path:
    """As EAGLE-1's authors publish it: a copy of the target's embedding is in it."""
    table = {"embed_tokens.weight": target().embed(torch.arange(tiny.VOCAB)).half()}
    return save_tensors(head, directory, FIELDS | fields, more=table)


def save_parallel(head: Any, directory: Path) -> Path:
    fields = {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "mask_token_id": 3}
    return save_tensors(
        head, directory, FIELDS | fields | {"eagle_aux_hidden_state_layer_ids": [2, 0, 3]}
    )


KINDS = {
    "eagle3": Kind("eagle3", eagle, functools.partial(EagleProposer, "eagle3"), EagleTwin,
                   lambda head, directory: save_head(head, directory, None, torch.float32), load_head),
    "eagle": Kind("eagle", tiny.eagle1, functools.partial(EagleProposer, "eagle"), FirstTwin, save_first, load_first_head,
                  1e-6),
    "p-eagle": Kind("eagle3", parallel, functools.partial(ParallelEagleProposer, "eagle3"), ParallelTwin, save_parallel,
                    load_head, 1e-6),
    "mtp": Kind("mtp", tiny.mtp, functools.partial(EagleProposer, "mtp"), MtpTwin,
                lambda head, directory: save_module(head, directory, None, torch.float32), load_module,
                1e-6),
    "block": Kind("block", lambda family, **changes: tiny.block(tiny.block_config(family, **changes)), Block, BlockTwin,
                  lambda head, directory: save_block(head, directory, None, torch.float32), load_block),
    **{
        name: Kind(name, levels, on_last_states, PublishedTwin,
                   lambda head, directory: head.published.write(directory),
                   lambda directory, view, name=name: MEDUSA_LOADERS[name](directory), 1e-4)
        for name in ("mlp", "medusa")
    },
}  # fmt: skip
CACHED = [
    name for name in KINDS if name not in ("mlp", "medusa")
]  # with keys and values of their own
WINDOWS = {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True, "sliding_window": 5,
}  # fmt: skip
SURE = {"confidence": False, "confidence_with_markov": False}
PLAIN = {"law": None, **SURE}
SOME = {"draft_vocab": 40, "own_head": True}
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
        "reduced vocabulary": SOME,
        "own embedding and head, narrower": {
            "own_embedding": True, "own_head": True, "layer": {"hidden_size": 24, "head_dim": 8},
        },
        "llama, other rope": {"layer": {"model_type": "llama", "rope_theta": 500.0}},
        "a block longer than what is attended together": {"block": 20},
        "long, some tokens": {"block": 7, **SOME},
        "windows": {"layer": WINDOWS},
        "windows, causal inside": {"layer": WINDOWS, "window_causal": True},
        "a gated Markov head": {"law": MarkovShape(5, "gated")},
        "a gated one, which says some tokens": {"law": MarkovShape(5, "gated"), **SOME, **FILL_IN},
        "a recurrent Markov head": {"law": MarkovShape(5, "rnn")},
        "a recurrent one, filling in": {"law": MarkovShape(5, "rnn"), **FILL_IN},
    },
    "mlp": {
        "IBM's": {"made": published.ibm},
        "IBM's, tied": {"made": lambda: published.ibm(tied=True, scaled=True)},
        "IBM's, of one level": {"made": lambda: published.ibm(levels=1, prefix="")},
        "Arctic's, recurrent": {"made": published.arctic},
        "Arctic's, not tied": {"made": lambda: published.arctic(tied=False)},
    },
    "medusa": {
        "its authors'": {"made": published.medusa},
        "two layers": {"made": lambda: published.medusa(2, "medusa_head.", "medusa_lm_head.safetensors")},
        "vLLM's": {"made": published.medusa_of_vllm},
        "vLLM's, some tokens": {"made": lambda: published.medusa_of_vllm(said=40)},
        "vLLM's, rows of all": {"made": lambda: published.medusa_of_vllm(said=40, whole=True)},
        "vLLM's, all else": {"made": lambda: published.medusa_of_vllm(bias=True, shared=True, scale=0.5)},
    },
}  # fmt: skip
ALL = [(kind, shape) for kind in KINDS for shape in SHAPES[kind]]
CASES = [
    case for case in ALL if "fewer tokens" not in case[1]
]  # such a head rarely reads a whole text


def head_of(kind: str, shape: str | None = None, family: str = "llama") -> Any:
    """A head of a registered shape, by default of the kind's first one."""
    return KINDS[kind].make(family, **SHAPES[kind][shape or next(iter(SHAPES[kind]))])
