"""Gemma 4's assistants: small models that draft from the states, keys and values of their target.

The input is the target's embedding of a token beside its last state, normed, of the token before.
A product makes it as narrow as the assistant; some decoder layers follow, which have queries only
and attend to the target's keys and values of the committed tokens: in each layer those of the
target's last layer of that kind, with or without a window. A last norm gives the vector from which
an lm head of its own predicts the next token, and a product makes of it the state that the drafted
token is paired with. All tokens of a draft have the position of the root, and nothing is cached.

Assistants of small targets group the tokens by centroids: only the tokens of the best groups are
scored. The layout is that of transformers (`Gemma4AssistantForCausalLM`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.devices import upload
from forerun.draft.eagle.own_module import dtype_beside, finite, in_torch
from forerun.draft.head_config import (
    AssistantConfig,
    read_assistant,
    read_config,
    reading,
    target_layers,
)
from forerun.draft.head_modules import check_sizes
from forerun.draft.hidden_states import LastStateProposer
from forerun.draft.proposer import DraftRequest, TargetView
from forerun.draft.tree import Tree
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.decoder import DecoderLayers
from forerun.models.directory_weights import DirectoryLoader
from forerun.models.packed_cache import PackedCache
from forerun.models.parameters import LayerWeights, LinearWeights, Norm, Source
from forerun.models.rope import rope_tables
from forerun.models.weights import MakeLinear
from forerun.runtime.packed import Linear, PackedMatrix, pack
from forerun.runtime.torch_runner import Runner

ASSISTANT = "Gemma 4 assistant"
# a linear layer in torch, or packed for the native kernels
Product = LinearWeights | Linear


@dataclass(frozen=True, slots=True)
class AssistantWeights:
    """The weights of an assistant with states of D numbers, for a target with states of H.

    Attributes:
        before, after: [D, 2 H] and [H, D], from the target's states and back.
        layers: its decoder layers.
        norm: the norm behind them.
        head: its lm head [V, D].
        centroids: [n, D], scores of the groups of tokens; None if all tokens are scored.
        groups: [n, V / n] int64, the tokens of each group.
    """

    before: Product
    after: Product
    layers: list[LayerWeights]
    norm: Norm
    head: Product
    centroids: Product | None = None
    groups: Tensor | None = None


class Assistant(DecoderLayers):
    """A loaded assistant.

    Attributes:
        shape: its configuration; `config` is that of its layers.
        sources: for each layer, the target's layer whose keys and values it reads.
        dtype: in which it computes.
    """

    weights: AssistantWeights

    def __init__(
        self,
        shape: AssistantConfig,
        sources: Sequence[int],
        weights: AssistantWeights,
        target: TargetView,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.config, self.sources = shape, shape.layers, sources
        self.weights, self.dtype = weights, dtype
        tables = [rope_tables(self.config, r, target.context, dtype) for r in self.config.ropes]
        self._rotations = [(cos.to(target.device), sin.to(target.device)) for cos, sin in tables]

    def step(
        self, embedded: Tensor, states: Tensor, positions: Tensor, attend: TargetAttention
    ) -> tuple[Tensor, Tensor]:
        """Predict the tokens after some tokens.

        Args:
            embedded: the target's embeddings of the tokens, [F, H].
            states: the target's normed last states of the tokens before them, or what an earlier
                step gave in their place, [F, H].
            positions: those of the roots, int64 [F].

        Returns:
            logits [F, V], -inf for tokens that are not scored, and the states that the next tokens
            are paired with, [F, H].
        """
        rotations = [(cosine[positions], sine[positions]) for cosine, sine in self._rotations]
        x = self._linear(torch.cat((embedded, states), dim=-1), self.weights.before)
        for i in range(self.config.layers):
            x = self.run_layer(x, i, rotations, attend)
        out = self._norm(x, self.weights.norm)
        return self._logits(out), self._linear(out, self.weights.after)

    def _logits(self, out: Tensor) -> Tensor:
        """Score all tokens, or those of the best groups. [F, D] -> [F, V]"""
        w = self.weights
        if w.centroids is None:
            return self._linear(out, w.head)
        assert w.groups is not None and isinstance(w.head, LinearWeights)
        best = self._linear(out, w.centroids).topk(self.shape.used_centroids, dim=-1).indices
        logits = out.new_full((len(out), self.config.vocab), -torch.inf)
        for row, groups in enumerate(best):
            tokens = w.groups[groups].flatten()
            logits[row, tokens] = w.head.weight[tokens] @ out[row]
        return logits

    def _linear(self, x: Tensor, linear: Any) -> Tensor:
        return linear(x) if isinstance(linear, Linear) else super()._linear(x, linear)


class TargetAttention:
    """Attention to the target's committed keys and values, as `decoder.Attend` describes it.

    Every query of a request sees the same keys, those of all tokens before its root.

    Attributes:
        counts: (slot, number of queries) of the requests, in order.
    """

    counts: list[tuple[int, int]]

    def __init__(self, assistant: Assistant, cache: KVCache, slots: Sequence[int]) -> None:
        """Copy what the layers read of these slots out of the target's cache."""
        self._scale = assistant.config.attention_scale
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by slot and layer
        for slot in slots:
            copied: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by source and first row
            windows = assistant.shape.windows()
            for layer, (source, window) in enumerate(zip(assistant.sources, windows, strict=True)):
                first = 0 if window is None else max(cache.length[slot] - window, 0)
                if (source, first) not in copied:
                    keys, values = cache.read(slot, source, first)
                    copied[source, first] = keys.to(assistant.dtype), values.to(assistant.dtype)
                self._kept[slot, layer] = copied[source, first]

    def __call__(self, layer: int, q: Tensor, k: None, v: None, sink_logits: None) -> Tensor:
        """Attend with q [F, Hq, D], the queries of the requests in `counts`. -> [F, Hq, D]"""
        attended = []
        for (slot, _), queries in zip(
            self.counts, torch.split(q, [count for _, count in self.counts]), strict=True
        ):
            keys, values = self._kept[slot, layer]
            out = kernels.attention(queries[None], keys[None], values[None], None, self._scale)
            attended.append(out[0])
        return torch.cat(attended)


class AssistantProposer(LastStateProposer):
    """Drafts chains, or trees of `width` nodes a level, with an assistant of the target."""

    def __init__(
        self, name: str, assistant: Assistant, target: TargetView, runner: Runner, width: int = 1
    ) -> None:
        """`name` is the source in statistics; `runner` is the target's, whose cache is read."""
        super().__init__(name, target, width, assistant.dtype)
        self.assistant, self._runner = assistant, runner

    def can_draft(self, row: DraftRequest) -> bool:
        committed = self._runner.cache.length[row.slot]
        return super().can_draft(row) and committed == len(row.tokens) - 1

    def grow_trees(self, trees: Sequence[Tree], states: Tensor) -> None:
        slots = [tree.request.slot for tree in trees]
        self._attention = TargetAttention(self.assistant, self._runner.cache, slots)
        self.draft_by_levels(trees, states)
        del self._attention

    def step(
        self, level: int, trees: Sequence[Tree], carried: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows: dict[int, int] = {}
        for tree in trees:
            rows[tree.request.slot] = rows.get(tree.request.slot, 0) + 1
        self._attention.counts = list(rows.items())
        roots = [len(tree.request.tokens) - 1 for tree in trees]
        positions = upload(roots, torch.int64, carried.device)
        embedded = self.target.embed(tokens).to(self.dtype)
        return self.assistant.step(embedded, carried, positions, self._attention)


# ---------------------------------------------------------------- loading


def load_assistant(directory: Path, target: TargetView) -> Assistant:
    """Load an assistant for this target, in the target's dtype, or in its native form. Raises
    LoadError, also if it is not made for the target."""
    raw = read_config(directory, ASSISTANT)
    with reading(directory, ASSISTANT):
        shape = read_assistant(raw)
        check_sizes(ASSISTANT, target, shape.target_hidden, shape.layers.vocab)
        sources = target_layers(shape, target.config)
        dtype = dtype_beside(target)
        make_linear = _packing(target.form) if target.form is not None else in_torch
        # the scheme of quantized checkpoints is in the outer object
        layers = replace(shape.layers, raw=raw)
        args = (layers, directory, dtype, target.device, make_linear, Source.weight)
        weights = _read(DirectoryLoader(*args), shape)
        return Assistant(shape, sources, weights, target, dtype)


def _read(loader: DirectoryLoader, shape: AssistantConfig) -> AssistantWeights:
    c, wide = shape.layers, shape.target_hidden

    def product(name: str, rows: int, inputs: int) -> Product:
        read = loader.matrix(name, (rows, inputs), False, False)
        found: Product = loader.make_linear(name, loader.source(name, (rows, inputs), read), None)
        return found

    head = loader.source("head", (c.vocab, c.hidden), loader.embedding())
    centroids, groups = None, None
    if shape.centroids:
        # a product with some rows of the lm head is computed in torch
        lm_head: Product = in_torch("head", head, None)
        centroids = product("masked_embedding.centroids", shape.centroids, c.hidden)
        groups = _read_groups(loader, c.vocab).view(shape.centroids, -1)
    else:
        lm_head = loader.make_linear("head", head, None)
    weights = AssistantWeights(
        before=product("pre_projection", c.hidden, 2 * wide),
        after=product("post_projection", wide, c.hidden),
        layers=[loader.layer(i) for i in range(c.layers)],
        norm=loader.norm("norm"),
        head=lm_head,
        centroids=centroids,
        groups=groups,
    )
    loader.finish()
    return weights


def _read_groups(loader: DirectoryLoader, vocab: int) -> Tensor:
    """Read the tokens in the order of their groups, [V] int64. Raises LoadError unless each token
    is there once."""
    name = "masked_embedding.token_ordering"
    loader.checkpoint.claim(name, (vocab,))
    tokens = loader.checkpoint.read(name).long()
    if not torch.equal(tokens.sort().values, torch.arange(vocab)):
        raise LoadError(f"{name} does not name each of the {vocab} tokens once")
    return tokens.to(loader.device)


def _packing(form: str) -> MakeLinear:
    no_cache = PackedCache(None)

    def make(part: str, source: Source, bias: Tensor | None) -> Linear:
        packed = pack(finite(source), bias, form, False, False, no_cache)
        assert isinstance(packed, PackedMatrix)
        return Linear.of(packed)

    return make
