"""Medusa-style heads: one head a draft position, all on the target's last hidden state.

Medusa (Cai et al. 2401.10774): head i is a stack of residual blocks x + silu(W x + b) with an lm
head of its own. Heads are independent of the tokens drafted before them.

MLP speculators (Wertheimer et al. 2404.19124): a small recurrent network. Level i (from 0) adds a
weighted embedding of the previous token to a projection of the previous state, so that after n
levels half of the state is still the target's: with w = 0.5^(1 / 2n), D the inner size and
e = sqrt((1 - w^2) D / 2),

    s_i+1 = gelu(norm_i(P_i s_i + e / w * E_i[token])), and the logits are H_i s_i+1

where s_0 is the target's last state, normed once more if `scale_input`. With `tie_weights` all
levels share embedding, norm and head, and all but the first share the projection.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.head_config import (
    MAX_LEVELS,
    MlpConfig,
    read_config,
    read_medusa,
    read_mlp,
    reading,
)
from forerun.draft.head_files import Tensors, assemble, read_tensors, size_of, write
from forerun.draft.head_modules import Operations, with_native_products
from forerun.draft.hidden_states import LastStateProposer
from forerun.draft.proposer import TargetView
from forerun.draft.tree import Tree
from forerun.errors import LoadError
from forerun.kernels.native import ACTIVATIONS, ADD, COp
from forerun.models.config import ModelConfig
from forerun.models.families import Json
from forerun.models.shortlist import spread
from forerun.runtime.program import LOGITS, ChainStart, DraftedChain, Program, X
from forerun.types import NUM_ALTERNATIVES

MEDUSA = "set of Medusa heads"
MLP = "MLP speculator"
EPS = 1e-6
CARRIED = LOGITS + 1  # the buffer of the state that is carried from level to level


# ---------------------------------------------------------------- modules


class MedusaStyleHeads(nn.Module):
    """Base of modules with one head a draft position, here called a level.

    Attributes:
        title: the kind of heads in messages, in the plural.
        levels: the number of tokens that they draft.
        hidden, vocab: sizes of the target.
    """

    title: str

    def __init__(self, levels: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.levels, self.hidden, self.vocab = levels, hidden, vocab

    def attach(self, target: TargetView) -> None:
        """Raise LoadError unless the heads are made for this target."""
        if (self.hidden, self.vocab) != (target.hidden, target.vocab):
            raise LoadError(
                f"these {self.title} are for a target with states of {self.hidden} and {self.vocab}"
                f" tokens, this one has {target.hidden} and {target.vocab}: use some that were"
                " trained for it"
            )

    def tokens(self) -> Tensor | None:
        """Return the target's token ids in the order of the logits, [Vd] int64; None if all."""
        return None

    def initial(self, states: Tensor) -> Tensor:
        """Return the input of level 0 from the target's normed states. [R, H] -> [R, C]"""
        return states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run one level after each of the previous `tokens`, [F] int64.

        carried [F, C] -> logits [F, Vd], and what the next level reads [F, C'].
        """
        raise NotImplementedError

    def widths(self) -> tuple[int, int]:
        """Return the row widths of the buffers X and CARRIED for `operations`."""
        return self.hidden, self.hidden

    def operations(self, level: int, build: Operations) -> list[COp]:
        """Return `step` as native operations: from CARRIED and the previous tokens to LOGITS and
        the next CARRIED, by way of X. The products are native ones."""
        raise NotImplementedError


class _ResidualBlocks(nn.Module):
    """The residual blocks of one Medusa head."""

    def __init__(self, layers: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(MedusaStyleHeads):
    """Medusa heads, with vLLM's names of tensors."""

    title = "Medusa heads"

    def __init__(
        self,
        heads: int,
        layers: int,
        hidden: int,
        vocab: int,
        *,
        bias: bool = False,
        draft_vocab: int | None = None,
    ) -> None:
        """`layers` residual blocks a head; `draft_vocab` tokens, whose ids are in `token_map`, None
        for all."""
        super().__init__(heads, hidden, vocab)
        self.layers = layers
        self.blocks = nn.ModuleList(_ResidualBlocks(layers, hidden, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden, draft_vocab or vocab, bias=False) for _ in range(heads)
        )
        ids = None if draft_vocab is None else torch.zeros(draft_vocab, dtype=torch.int64)
        self.register_buffer("token_map", ids)

    def begin(self, lm_head: Tensor) -> None:
        """Start training from the target's lm head [V, H] after blocks that do nothing."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(lm_head if name.startswith("lm_heads") else torch.zeros(()))

    def tokens(self) -> Tensor | None:
        ids: Tensor | None = self.token_map  # type: ignore[assignment]
        return ids

    def head_logits(self, head: int, state: Tensor) -> Tensor:
        """Return the logits of one head. [.., H] -> [.., Vd]"""
        logits: Tensor = self.lm_heads[head](self.blocks[head](state))
        return logits

    def forward(self, state: Tensor) -> Tensor:
        """Return the logits of all heads. [.., H] -> [.., heads, Vd]"""
        return torch.stack([self.head_logits(head, state) for head in range(self.levels)], -2)

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.head_logits(level, carried), carried

    def operations(self, level: int, build: Operations) -> list[COp]:
        blocks, silu = self.blocks[level], ACTIVATIONS["silu"]
        assert isinstance(blocks, _ResidualBlocks)
        return [
            build.copy(CARRIED, X),
            *(build.product(layer, X, X, activation=silu, combine=ADD) for layer in blocks.layers),
            build.product(self.lm_heads[level], X, LOGITS),
        ]


class _ShiftedRmsNorm(nn.Module):
    """An RMS norm with a weight and a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x) * self.weight + self.bias


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class MlpSpeculator(MedusaStyleHeads):
    """An MLP speculator with its authors' names of tensors; of tied weights there is one."""

    title = "levels of an MLP speculator"

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config.levels, config.hidden, config.vocab)
        self.config = config
        inner = config.inner
        count = 1 if config.tied else config.levels
        projections = min(2, config.levels) if config.tied else config.levels
        self.emb = nn.ModuleList(nn.Embedding(config.vocab, inner) for _ in range(count))
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else config.hidden, inner, bias=False) for i in range(projections)
        )
        self.ln = nn.ModuleList(_ShiftedRmsNorm(inner) for _ in range(count))
        self.head = nn.ModuleList(nn.Linear(inner, config.vocab, bias=False) for _ in range(count))
        weight = 0.5 ** (0.5 / config.levels)
        self.embedding_scale = math.sqrt((1 - weight**2) * inner / 2) / weight

    def initial(self, states: Tensor) -> Tensor:
        return _rms_norm(states) / math.sqrt(2) if self.config.scaled else states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedding, projection, norm, head = self._parts(level)
        state = F.gelu(norm(projection(carried) + self.embedding_scale * embedding(tokens)))
        logits: Tensor = head(state)
        return logits, state

    def widths(self) -> tuple[int, int]:
        return self.config.inner, max(self.hidden, self.config.inner)

    def operations(self, level: int, build: Operations) -> list[COp]:
        embedding, projection, norm, head = self._parts(level)
        table = embedding.get_parameter("weight").detach()
        return [
            build.embedding(table, X, self.embedding_scale),
            build.product(projection, CARRIED, X, combine=ADD),
            build.copy(X, CARRIED, norm, activation="gelu"),
            build.product(head, CARRIED, LOGITS),
        ]

    def _parts(self, level: int) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        own = 0 if self.config.tied else level
        projection = self.proj[min(level, len(self.proj) - 1)]
        return self.emb[own], projection, self.ln[own], self.head[own]


# ---------------------------------------------------------------- loading and saving


def load_heads(directory: Path) -> MedusaHeads:
    """Load Medusa heads, in float32, in their authors' layout or vLLM's. Raises LoadError."""
    raw, stored = read_config(directory, MEDUSA), read_tensors(directory, MEDUSA)
    tensors = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in stored.items()}
    with reading(directory, MEDUSA):
        if any(re.fullmatch(r"\d+\.\d+\.(linear\.)?(weight|bias)", name) for name in tensors):
            return _load_authors_layout(tensors)
        return _load_vllm_layout(raw, tensors)


def save_heads(heads: MedusaHeads, directory: Path, dtype: torch.dtype) -> None:
    """Write Medusa heads in vLLM's layout. Raises OSError."""
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": heads.levels,
        "num_hidden_layers": heads.layers,
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
        "truncated_vocab_size": heads.vocab,
        "medusa_fc_bias": False,
    }
    write(heads, config, directory, dtype)


def _load_authors_layout(tensors: Tensors) -> MedusaHeads:
    """Load a list of heads, each a list of blocks with an lm head after them: `0.0.linear.weight`,
    `0.1.weight`. Their config.json always claims two heads, so sizes come from the tensors."""
    found = [re.fullmatch(r"(\d+)\.(\d+)\.weight", name) for name in tensors]
    layers = max((int(match[2]) for match in found if match), default=0)
    heads = len({name.partition(".")[0] for name in tensors})
    if not (heads <= MAX_LEVELS and 0 < layers <= MAX_LEVELS):
        raise LoadError(
            f"it has {heads} heads of {layers} blocks: from 1 to {MAX_LEVELS} of either are"
            " supported"
        )
    vocab, hidden = (size_of(tensors, f"0.{layers}.weight", axis) for axis in (0, 1))
    bias = "0.0.linear.bias" in tensors
    named: Tensors = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        named[re.sub(rf"^(\d+)\.{layers}\.weight$", r"lm_heads.\1.weight", name)] = tensor
    return assemble(lambda: MedusaHeads(heads, layers, hidden, vocab, bias=bias), named, MEDUSA)


def _load_vllm_layout(raw: Json, tensors: Tensors) -> MedusaHeads:
    c = read_medusa(raw)
    draft_vocab = c.draft_vocab if c.draft_vocab < c.vocab else None
    stored_map, rows = tensors.pop("token_map", None), None
    if draft_vocab is not None:
        # draws want the rows of an lm head in the order of their tokens
        ids = _check_token_map(stored_map, c.draft_vocab, c.vocab)
        tensors["token_map"], rows = ids.sort()
    if c.shared:
        size_of(tensors, "lm_heads.0.weight", 0)
        tensors |= {f"lm_heads.{i}.weight": tensors["lm_heads.0.weight"] for i in range(c.heads)}
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        weight = tensors[name]
        if rows is not None:
            weight = weight[tensors["token_map"] if len(weight) == c.vocab else rows]
        tensors[name] = weight if c.logit_scale == 1 else weight * c.logit_scale
    sizes = c.heads, c.layers, c.hidden, c.vocab
    return assemble(
        lambda: MedusaHeads(*sizes, bias=c.bias, draft_vocab=draft_vocab), tensors, MEDUSA
    )


def _check_token_map(stored: Tensor | None, size: int, vocab: int) -> Tensor:
    """Return the token ids of a token_map. Raises LoadError unless it names `size` tokens."""
    if stored is None or stored.shape != (size,) or stored.is_floating_point():
        raise LoadError(
            f"it predicts {size} of {vocab} tokens, but there is no token_map of {size} whole"
            " numbers"
        )
    ids = stored.long()
    if len(set(ids.tolist())) < size or ids.min() < 0 or ids.max() >= vocab:
        raise LoadError(f"token_map does not name {size} different tokens of {vocab}")
    return ids


def load_mlp(directory: Path) -> MlpSpeculator:
    """Load an MLP speculator, in float32. Raises LoadError.

    Tensors are called `emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, in some files with the prefix
    `speculator.`. Tied weights are stored once or for every level.
    """
    raw, stored = read_config(directory, MLP), read_tensors(directory, MLP)
    with reading(directory, MLP):
        config = read_mlp(raw)
        tensors: Tensors = {}
        for name, tensor in stored.items():
            name = name.removeprefix("speculator.")
            copied = re.fullmatch(r"(emb|proj|ln|head)\.(\d+)\..*", name) if config.tied else None
            if not copied or int(copied[2]) <= (copied[1] == "proj"):
                tensors[name] = tensor
        return assemble(lambda: MlpSpeculator(config), tensors, MLP)


# ---------------------------------------------------------------- drafting


class NativeMedusa:
    """All levels and the draws between them in one native call, a program for each level."""

    def __init__(self, heads: MedusaStyleHeads, config: ModelConfig, form: str) -> None:
        """`heads` have native products in `form`; `config` is the target's."""
        self._build = Operations(config, form, None)
        ids = heads.tokens()
        self._ids = None if ids is None else ids.numpy()
        self._vocab = heads.vocab
        widths = np.ones(CARRIED + 1, np.int32)
        widths[X], widths[CARRIED] = heads.widths()
        widths[LOGITS] = heads.vocab if ids is None else len(ids)
        self._start = Program([], widths)
        self._levels = [
            Program(heads.operations(level, self._build), widths) for level in range(heads.levels)
        ]

    def round(
        self, links: Sequence[ChainStart], initial: Tensor, acceptance: array[float] | None
    ) -> list[DraftedChain]:
        """Draft after each link from level 0's inputs, [links, C]; see `Program.draft_levels`."""
        links = [replace(link, keys=link.keys[: len(self._levels)]) for link in links]
        inputs = {CARRIED: initial.float().numpy()}
        return self._start.draft_levels(
            links, self._levels, inputs, self._vocab, self._ids, acceptance
        )


class MedusaProposer(LastStateProposer):
    """Drafts chains, or trees of `width` nodes a level, with Medusa-style heads.

    The heads read the state of the token before the root.
    """

    def __init__(
        self, name: str, heads: MedusaStyleHeads, target: TargetView, width: int = 1
    ) -> None:
        """`name` is the source in statistics. Computes in the heads' dtype, or in the target's
        native form. Raises LoadError if the heads are not made for this target."""
        heads.attach(target)
        super().__init__(name, target, width, next(heads.parameters()).dtype)
        self.max_depth = heads.levels
        self.heads = heads.to(target.device)
        self.native: NativeMedusa | None = None
        if target.form is not None:
            self.heads = with_native_products(self.heads, target.form)
            if width == 1:
                self.native = NativeMedusa(self.heads, target.config, target.form)
        self.ends_chains = self.reports_confidence = self.native is not None
        self.extra_nodes = NUM_ALTERNATIVES if self.native is not None else 0

    def grow_trees(self, trees: Sequence[Tree], states: Tensor) -> None:
        initial = self.heads.initial(states)
        if not self._draft_natively(trees, initial):
            self.draft_by_levels(trees, initial)

    def step(
        self, level: int, trees: Sequence[Tree], carried: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, carried = self.heads.step(level, carried, tokens)
        return spread(logits, self.heads.tokens(), self.target.vocab), carried

    def _draft_natively(self, trees: Sequence[Tree], initial: Tensor) -> bool:
        """Draft chains in one native call; False, with nothing done, if that is not possible."""
        if self.native is None or not all(tree.is_plain for tree in trees):
            return False
        # an estimate that differs between temperatures only; requests without one have no floor
        acceptance = trees[0].request.confidence_rates
        found = self.native.round([tree.link(0) for tree in trees], initial, acceptance)
        for tree, own in zip(trees, found, strict=True):
            tree.add_drafted(own, self.name, NUM_ALTERNATIVES)
        return True
