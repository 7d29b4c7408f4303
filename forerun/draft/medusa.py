"""MLP speculators (Wertheimer et al. 2404.19124), Arctic's among them: a small recurrent network on
the last state.

Level i (from 0) adds to a projection of the state before it an embedding of the token before it,
weighed so that after n levels half of the state is still the target's: with w = 0.5^(1 / 2n) and e
= sqrt((1 - w^2) D / 2), D the inner size,

    s_i+1 = gelu(norm_i(P_i s_i + e / w * E_i[token])), and the logits are H_i s_i+1

with s_0 the target's last state, normed once more where `scaled`. Weights may be tied: all levels
have one embedding, norm and head, and all but the first one projection.

On disk there are IBM's accelerators, and Arctic's (Snowflake), whose config.json names other
classes. Names are IBM's: `emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, in some files behind
`speculator.`. Arctic's `sum_rnn` has them a list deeper (`emb.0.0`). What is tied is written once
or for each level."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.head_files import (
    Tensors,
    assemble,
    read_bool,
    read_config,
    read_tensors,
    read_whole,
    reading,
    size_of,
    write,
)
from forerun.draft.head_modules import with_native_products
from forerun.draft.head_program import Operations
from forerun.draft.hidden_states import as_tensor
from forerun.draft.proposer import DraftRequest, Proposer, Reference, TargetView
from forerun.draft.tree import Tree, grow
from forerun.errors import LoadError, shown
from forerun.kernels.native import ACTIVATIONS, ADD, COp
from forerun.models.config import Json, ModelConfig
from forerun.models.shortlist import spread
from forerun.runtime.program import LOGITS, Link, Recorded, Said, X
from forerun.types import BESIDE, Draft, States

MOST_LEVELS = 64
PLAIN = ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")
VARIANTS = ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")
METHOD = "sum_rnn"


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Of Medusa heads in vLLM's layout.

    Attributes:
        heads, layers: how many there are, each over so many residual layers.
        hidden, vocab: of their target.
        said: how many of the target's tokens they say.
        bias: their residual layers add one.
        shared: all of them have one product that says tokens.
        scale: what it is multiplied with.
    """

    heads: int
    layers: int
    hidden: int
    vocab: int
    said: int
    bias: bool
    shared: bool
    scale: float


@dataclass(frozen=True, slots=True)
class MlpShape:
    """Of an MLP speculator.

    Attributes:
        levels: how many tokens ahead it says.
        hidden, vocab: of its target.
        inner: the size of its own state.
        tied: levels share their weights.
        scaled: the target's state is normed once more.
    """

    levels: int
    hidden: int
    inner: int
    vocab: int
    tied: bool = False
    scaled: bool = False


def read_medusa(raw: Json) -> MedusaShape:
    """Medusa heads, in vLLM's layout. Raises LoadError."""
    heads, layers = (
        read_whole(raw, "num_heads", 1, MOST_LEVELS),
        read_whole(raw, "num_hidden_layers", 1, MOST_LEVELS),
    )
    hidden, vocab = read_whole(raw, "hidden_size"), read_whole(raw, "vocab_size")
    said = (
        vocab
        if raw.get("truncated_vocab_size") is None
        else read_whole(raw, "truncated_vocab_size", 1, vocab)
    )
    bias, shared = (
        read_bool(raw, "medusa_fc_bias", False),
        read_bool(raw, "original_lm_head", False),
    )
    scale = raw.get("logit_scale", 1.0)
    if not isinstance(scale, (int, float)) or not 0 < scale < 1e6:
        raise LoadError(f"logit_scale in config.json is {shown(scale)}, not a positive number")
    return MedusaShape(heads, layers, hidden, vocab, said, bias, shared, scale)


def read_mlp(raw: Json) -> MlpShape:
    """An MLP speculator of any class. Raises LoadError."""
    named = raw.get("architectures") or [PLAIN[0]]
    own = named[0] if isinstance(named, list) else named
    if own not in PLAIN + VARIANTS:
        raise LoadError(
            f"its architecture is {shown(own)}: only {', '.join(PLAIN + VARIANTS)} are supported"
        )
    levels, vocab = read_whole(raw, "n_predict", 1, MOST_LEVELS), read_whole(raw, "vocab_size")
    tied, scaled = read_bool(raw, "tie_weights", False), read_bool(raw, "scale_input", False)
    if own in PLAIN:
        hidden = read_whole(raw, "emb_dim")
        inner = read_whole(raw, "inner_dim", 0, default=0) or hidden
        return MlpShape(levels, hidden, inner, vocab, tied, scaled)
    sizes = {_size(raw, name) for name in ("inner_dim", "emb_dim", "proj_dim")}
    if len(sizes) > 1:
        raise LoadError(
            f"inner_dim, emb_dim and proj_dim are {sorted(sizes)}: only equal ones are supported"
        )
    if raw.get("method", METHOD) != METHOD:
        raise LoadError(f"its method is {shown(raw['method'])}: only {METHOD} is supported")
    return MlpShape(levels, read_whole(raw, "input_hidden_dim"), sizes.pop(), vocab, tied, scaled)


def _size(raw: Json, name: str) -> int:
    """A size that is written as a text, of one number here: several are several layers."""
    value = raw.get(name)
    number = (
        int(value)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9
        else value
    )
    if isinstance(number, str):
        raise LoadError(f"{name} in config.json is {shown(value)}: only one size is supported")
    return read_whole({name: number}, name)


STATE = LOGITS + 1  # the buffer of what is carried from level to level


class LevelHeads(nn.Module):
    """Base of all modules with a head a level.

    Attributes:
        title: what messages call them, in the plural.
        levels: how many tokens ahead they say.
        hidden, vocab: sizes of the target that they are for.
    """

    title: str

    def __init__(self, levels: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.levels, self.hidden, self.vocab = levels, hidden, vocab

    def attach(self, target: TargetView) -> None:
        """Check that they are for this target. Raises LoadError if they are not."""
        if (self.hidden, self.vocab) != (target.hidden, target.vocab):
            raise LoadError(
                f"these {self.title} are for a target with states of {self.hidden} and {self.vocab} tokens, this one"
                f" has {target.hidden} and {target.vocab}: use some that were trained for it"
            )

    def tokens(self) -> Tensor | None:
        """The target's token ids they say, in the order of their logits, [Vd] int64; None: all of
        them."""
        return None

    def enter(self, states: Tensor) -> Tensor:
        """What level 0 begins with, of the target's normalised states. [R, H] -> [R, C]"""
        return states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What a level says behind each of `tokens`, [F] int64, and what it carries over to the
        next.

        [F, C], where C may differ from level to level -> logits [F, Vd], [F, C']
        """
        raise NotImplementedError

    def widths(self) -> tuple[int, int]:
        """Of the buffers X and STATE, for `record`."""
        return self.hidden, self.hidden

    def record(self, level: int, made: Operations) -> list[COp]:
        """What `step` does as operations, where its products are native: from STATE and the tokens
        before to LOGITS and the next STATE, by way of X."""
        raise NotImplementedError


class NativeLevels:
    """Heads on the native kernels, a program for each level: all levels and the draws between them
    in one call."""

    def __init__(self, heads: LevelHeads, config: ModelConfig, form: str) -> None:
        """Their products are native, in `form`; config: of their target."""
        made, ids = Operations(config, form, None), heads.tokens()
        self._ids, self._vocab = None if ids is None else ids.numpy(), heads.vocab
        inner, carried = heads.widths()
        widths = np.ones(STATE + 1, np.int32)
        widths[0], widths[LOGITS], widths[STATE] = (
            inner,
            heads.vocab if ids is None else len(ids),
            carried,
        )
        programs = [heads.record(level, made) for level in range(heads.levels)]
        self._made, self._begin = made, Recorded(config, [], widths)
        self._levels = [Recorded(config, ops, widths) for ops in programs]

    def round(
        self, links: Sequence[Link], entered: Tensor, stands: array[float] | None
    ) -> list[Said]:
        """Draft behind each link from what enters level 0, [links, C], at most as many tokens as
        there are levels; see `Recorded.levels`."""
        links = [replace(link, keys=link.keys[: len(self._levels)]) for link in links]
        given = {STATE: entered.float().numpy()}
        return self._begin.levels(links, self._levels, given, self._vocab, self._ids, stands)


class Grower:
    """Heads that draft for a target, and the drafts they grow.

    Attributes:
        heads: with products in the target's native form.
        native: their levels as programs, where whole rounds can be done by them.
    """

    def __init__(self, name: str, heads: LevelHeads, target: TargetView, width: int) -> None:
        """Raises LoadError if they are not made for this target."""
        heads.attach(target)
        self.name, self.target, self.width = name, target, width
        self.heads, self.native = heads.to(target.device), None
        if target.form is not None:
            self.heads = with_native_products(self.heads, target.form)
            if width == 1:
                self.native = NativeLevels(self.heads, target.config, target.form)

    def grow(self, trees: Sequence[Tree], states: Tensor) -> None:
        """Grow each tree as deep as its row allows and there are levels; states [trees, H] stand
        before the roots."""
        entered = self.heads.enter(states)
        if not self._round(trees, entered):
            self._by_levels(trees, entered)

    def _round(self, trees: Sequence[Tree], entered: Tensor) -> bool:
        """All of it in one native call. False, and nothing done, where that takes more."""
        if self.native is None or not all(tree.is_plain for tree in trees):
            return False
        stands = (
            trees[0].request.confidence_rates
        )  # a guess, which differs between temperatures alone; rows without have no floor
        said = self.native.round([tree.link(0) for tree in trees], entered, stands)
        for tree, own in zip(trees, said, strict=True):
            tree.weigh(own, self.name, BESIDE)
        return True

    def _by_levels(self, trees: Sequence[Tree], carried: Tensor) -> None:
        growing = list(trees)  # rows of frontiers, the trees one after the other
        for level in range(self.heads.levels):
            nodes = [(tree, node) for tree in growing for node in tree.frontier]
            tokens = torch.tensor(
                [tree.draft.tokens[node] for tree, node in nodes], device=carried.device
            )
            logits, carried = self.heads.step(level, carried, tokens)
            grow(
                growing,
                spread(logits, self.heads.tokens(), self.target.vocab),
                self.width,
                self.name,
            )
            growing = [tree for tree in growing if tree.request.depth > level + 1 and tree.frontier]
            if not growing:
                return
            place = {(id(tree), node): i for i, (tree, node) in enumerate(nodes)}
            carried = carried[
                [
                    place[id(tree), tree.draft.parents[node]]
                    for tree in growing
                    for node in tree.frontier
                ]
            ]


class MedusaProposer(Proposer):
    """Chains, or trees of `width` nodes a level, from heads on the state of the token before the
    root."""

    def __init__(self, name: str, heads: LevelHeads, target: TargetView, width: int = 1) -> None:
        """`name` is what statistics call it. It computes in the heads' own dtype, or in the
        target's native form. Raises LoadError if the heads are not made for this target."""
        self.dtype = next(heads.parameters()).dtype
        self.grower = Grower(name, heads, target, width)
        self.name, self.target, self.width, self.aux_hidden_layers = (
            name,
            target,
            width,
            (target.layers,),
        )
        self.ends_chains = self.reports_confidence = self.grower.native is not None
        self.extra_nodes = BESIDE if self.ends_chains else 0
        self._states: dict[
            int, tuple[int, States]
        ] = {}  # by slot: position and state of its last token

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self._states.pop(slot, None)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._states.pop(slot, None)

    def reset(self) -> None:
        self._states.clear()

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        states = features[self.target.layers]
        self._states[slot] = start + len(states) - 1, states[-1]

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        trees = [Tree(row, fed=0) for row in rows]
        # the state must be that of the token before the root
        active = [
            tree
            for tree in trees
            if self._states.get(tree.request.slot, (None,))[0] == len(tree.request.tokens) - 2
        ]
        if active:
            states = self.target.normalise(
                torch.stack([as_tensor(self._states[tree.request.slot][1]) for tree in active])
            )
            self.grower.grow(active, states.to(self.dtype))
        return [tree.finish(self.target.vocab) for tree in trees]


SILU = ACTIVATIONS["silu"]
MEDUSA = "set of Medusa heads"
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
SAYS = re.compile(r"(\d+)\.(\d+)\.weight")


class _Block(nn.Module):
    """The residual layers below one head."""

    def __init__(self, layers: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(LevelHeads):
    """The heads as they are trained and stored: `heads` of them, each over `layers` residual
    layers."""

    title = "Medusa heads"

    def __init__(
        self,
        heads: int,
        layers: int,
        hidden: int,
        vocab: int,
        *,
        bias: bool = False,
        said: int | None = None,
    ) -> None:
        """`bias`: the residual layers add one. `said`: how many tokens the heads say, of which
        `token_map` has the ids; None where these are all."""
        super().__init__(heads, hidden, vocab)
        self.layers = layers
        self.blocks = nn.ModuleList(_Block(layers, hidden, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden, said or vocab, bias=False) for _ in range(heads)
        )
        self.register_buffer(
            "token_map", None if said is None else torch.zeros(said, dtype=torch.int64)
        )

    def begin(self, head: Tensor) -> None:
        """Blocks that do nothing yet, below the target's own head [V, H]: the usual start."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(head if name.startswith("lm_heads") else torch.zeros(()))

    def tokens(self) -> Tensor | None:
        ids: Tensor | None = self.token_map  # type: ignore[assignment]
        return ids

    def say(self, head: int, state: Tensor) -> Tensor:
        """One head. [.., H] -> logits [.., Vd]"""
        logits: Tensor = self.lm_heads[head](self.blocks[head](state))
        return logits

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.say(level, carried), carried

    def record(self, level: int, made: Operations) -> list[COp]:
        block = self.blocks[level]
        assert isinstance(block, _Block)
        layers = [made.product(layer, X, X, activation=SILU, combine=ADD) for layer in block.layers]
        return [made.copy(STATE, X), *layers, made.product(self.lm_heads[level], X, LOGITS)]

    def forward(self, state: Tensor) -> Tensor:
        """[.., H] -> logits [.., heads, Vd]"""
        return torch.stack([self.say(head, state) for head in range(self.levels)], -2)

    def config(self) -> dict[str, object]:
        """config.json, as other engines read it."""
        return {
            "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": self.levels,
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "vocab_size": self.vocab,
            "truncated_vocab_size": self.vocab, "medusa_fc_bias": False,
        }  # fmt: skip


def save_heads(heads: MedusaHeads, directory: Path, dtype: torch.dtype) -> None:
    """Write the heads that `forerun train` makes into a directory. Raises OSError."""
    write(heads, heads.config(), directory, dtype)


def load_heads(directory: Path) -> MedusaHeads:
    """Read a directory of heads, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, MEDUSA), read_tensors(directory, MEDUSA)
    try:
        named = {
            name.removeprefix("medusa_heads.").removeprefix("medusa_head."): t
            for name, t in tensors.items()
        }
        if any(BLOCK.fullmatch(name) or SAYS.fullmatch(name) for name in named):
            return _of_authors(named)
        return _of_vllm(raw, named)
    except LoadError as error:
        raise LoadError(f"{directory} holds no Medusa heads that can be read: {error}") from None


def _of_authors(tensors: Tensors) -> MedusaHeads:
    """A list of heads, each of which is a list of blocks with what says tokens behind them."""
    layers = max((int(m[2]) for m in map(SAYS.fullmatch, tensors) if m), default=0)
    heads = len({name.partition(".")[0] for name in tensors})
    if not (heads <= MOST_LEVELS and 0 < layers <= MOST_LEVELS):
        raise LoadError(
            f"it has {heads} heads of {layers} blocks: from 1 to {MOST_LEVELS} of either are supported"
        )
    vocab, hidden = (size_of(tensors, f"0.{layers}.weight", axis) for axis in (0, 1))
    bias = "0.0.linear.bias" in tensors
    named = {_renamed(name, layers): tensor for name, tensor in tensors.items()}
    return assemble(lambda: MedusaHeads(heads, layers, hidden, vocab, bias=bias), named, MEDUSA)


def _renamed(name: str, layers: int) -> str:
    """As vLLM calls it; what neither knows stays as it is."""
    if match := BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    match = SAYS.fullmatch(name)
    return f"lm_heads.{match[1]}.weight" if match and int(match[2]) == layers else name


def _of_vllm(raw: Json, tensors: Tensors) -> MedusaHeads:
    shape, tensors = read_medusa(raw), dict(tensors)
    ids, said = tensors.pop("token_map", None), shape.said if shape.said < shape.vocab else None
    rows = None  # of a stored head, in the order of their tokens, as draws want them
    if said is not None:
        tensors["token_map"], rows = _ids(ids, said, shape.vocab).sort()
    if shape.shared:
        size_of(tensors, "lm_heads.0.weight", 0)
        tensors |= {
            f"lm_heads.{i}.weight": tensors["lm_heads.0.weight"] for i in range(shape.heads)
        }
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        weight = tensors[name]
        if rows is not None:
            weight = weight[tensors["token_map"] if len(weight) == shape.vocab else rows]
        tensors[name] = weight if shape.scale == 1 else weight * shape.scale
    sizes = shape.heads, shape.layers, shape.hidden, shape.vocab
    return assemble(lambda: MedusaHeads(*sizes, bias=shape.bias, said=said), tensors, MEDUSA)


def _ids(stored: Tensor | None, said: int, vocab: int) -> Tensor:
    if stored is None or stored.shape != (said,) or stored.is_floating_point():
        raise LoadError(
            f"it says {said} of {vocab} tokens, but there is no token_map of {said} whole numbers"
        )
    ids = stored.long()
    if len(set(ids.tolist())) < said or ids.min() < 0 or ids.max() >= vocab:
        raise LoadError(f"token_map does not name {said} different tokens of {vocab}")
    return ids


MLP = "MLP speculator"
EPS = 1e-6
DEEPER = re.compile(r"(emb|proj|ln)\.(\d+)\.0\.(\w+)")


class _Norm(nn.Module):
    """By the root mean square, then scaled and shifted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = (
            nn.Parameter(torch.ones(size)),
            nn.Parameter(torch.zeros(size)),
            EPS,
        )

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(x) * self.weight + self.bias


class MlpSpeculator(LevelHeads):
    """The speculator under the names of its authors; of what is tied there is one."""

    title = "levels of an MLP speculator"

    def __init__(self, shape: MlpShape) -> None:
        super().__init__(shape.levels, shape.hidden, shape.vocab)
        self.shape = shape
        inner = shape.inner
        own, steps = (1, min(2, shape.levels)) if shape.tied else (shape.levels, shape.levels)
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab, inner) for _ in range(own))
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else shape.hidden, inner, bias=False) for i in range(steps)
        )
        self.ln = nn.ModuleList(_Norm(inner) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(inner, shape.vocab, bias=False) for _ in range(own))
        weight = 0.5 ** (0.5 / shape.levels)
        self.share = (
            math.sqrt((1 - weight**2) * inner / 2) / weight
        )  # of an embedding beside a projected state

    def enter(self, states: Tensor) -> Tensor:
        return _scaled(states) / math.sqrt(2) if self.shape.scaled else states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own = 0 if self.shape.tied else level
        added = self.share * self.emb[own](tokens)
        state = F.gelu(self.ln[own](self._projection(level)(carried) + added))
        logits: Tensor = self.head[own](state)
        return logits, state

    def widths(self) -> tuple[int, int]:
        return self.shape.inner, max(self.hidden, self.shape.inner)

    def record(self, level: int, made: Operations) -> list[COp]:
        own = 0 if self.shape.tied else level
        return [
            made.embedding(self.emb[own].get_parameter("weight").detach(), X, self.share),
            made.product(self._projection(level), STATE, X, combine=ADD),
            made.copy(X, STATE, self.ln[own], activation="gelu"),
            made.product(self.head[own], STATE, LOGITS),
        ]

    def _projection(self, level: int) -> nn.Module:
        return self.proj[min(level, len(self.proj) - 1)]


def _scaled(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def load_mlp(directory: Path) -> MlpSpeculator:
    """Read a speculator, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, MLP), read_tensors(directory, MLP)
    with reading(directory, MLP):
        shape = read_mlp(raw)
        named = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
        named = {DEEPER.sub(r"\1.\2.\3", name): tensor for name, tensor in named.items()}
        if shape.tied:
            named = {name: tensor for name, tensor in named.items() if not _is_copy(name)}
        return assemble(lambda: MlpSpeculator(shape), named, MLP)


def _is_copy(name: str) -> bool:
    """Whether this is what another level has, too."""
    part, _, rest = name.partition(".")
    level = rest.partition(".")[0]
    return (
        part in ("emb", "proj", "ln", "head")
        and level.isdigit()
        and int(level) > (1 if part == "proj" else 0)
    )
