"""The recipes of heads: eagle3 and mtp, EAGLE-style heads that are unrolled in training as they
draft, and medusa, heads on the target's last hidden state (2401.10774).

An EAGLE-style head processes pairs: the embedding of token t + 1 and the target's hidden state
after token t. By default it begins as the target's last layer behind a linear map that is fitted by
least squares (`init_from_target`). Training unrolls it as drafting does, which is EAGLE-3's
training-time test (Li et al. 2503.01840, section 3.2; `unroll`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.eagle.formats import EagleConfig
from forerun.draft.eagle.module import Eagle3Head, EagleModule, load_head, save_head
from forerun.draft.eagle.mtp import MtpModule, load_module, save_module
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.head_modules import JoinedLayer, SelfAttention, layer_like
from forerun.draft.medusa import MedusaHeads, MedusaProposer, load_heads, save_heads
from forerun.draft.proposer import Proposer, view_of
from forerun.errors import ConfigError, LoadError
from forerun.models.config import ModelConfig
from forerun.models.hub import find_model
from forerun.models.parameters import LayerWeights, Source
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.models.weights import load_weights
from forerun.runtime.torch_runner import Runner
from forerun.train.data import Corpus, Example
from forerun.train.losses import Distribution, chunked_sum, draft_numbers, masked_mean, zero_loss
from forerun.train.options import EagleOptions, MedusaOptions, MtpOptions
from forerun.train.recipes.base import Forecast, Recipe, cache_size, forecast_of, init_short_head
from forerun.train.target import Batch, Target

MIN_VOCAB, MAX_VOCAB = 8192, 32000  # of an EAGLE-3 head without --draft-vocab
SELF_SCORE = 10.0  # initial attention score of a pair with itself; others are about 1
FIT_TEXTS = 160  # texts that the linear map is fitted to, some ten thousand tokens
FIT_BATCH = 16
RIDGE = 1e-3  # of the mean square of the inputs


@dataclass(frozen=True, slots=True)
class EagleRecipe(Recipe):
    """Base of the recipes of EAGLE-3 heads and multi-token modules.

    Row t of step s predicts token t + 2 + s: it is the (s + 1)th token drafted after root t + 1,
    and learns the target's distribution at t + 1 + s.
    """

    options: MtpOptions

    def aux_hidden_layers(self, module: nn.Module, target: Target) -> tuple[int, ...]:
        assert isinstance(module, EagleModule)
        return module.aux_hidden_layers

    def reads(self, target: Target) -> tuple[int, ...]:
        if self.options.init is None:
            return self._layers(target.llm.decoder.config.layers)
        return self._read(find_model(self.options.init, pickled=True), target).aux_hidden_layers

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        if self.options.init is None:
            return self._new(target, corpus)
        return self.load(find_model(self.options.init, pickled=True), target).requires_grad_(True)

    def load(self, directory: Path, target: Target) -> nn.Module:
        head = self._read(directory, target)
        if head.layer.qkv_bias:
            raise ConfigError(
                f"{directory} has layers with biases, which cannot be written: train a new head"
            )
        head.attach(target.view)
        return head

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, EagleModule)
        ids, loss_of, options = module.tokens(), self.distillation_loss(), self.options
        probs = batch.probs.restricted_to(ids).normalised()
        numbers, known = draft_numbers(batch.tokens, ids, batch.vocab)
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for step, (rows, hidden) in enumerate(unroll(module, batch, options.unroll, options.thin)):
            at = rows + step + 1
            learned = batch.mask[:, at] & known[:, at + 1]
            step_probs = probs.at((slice(None), at)).at(learned)
            following = numbers[:, at + 1][learned]

            def losses(
                hidden: Tensor,
                part: slice,
                step_probs: Distribution = step_probs,
                following: Tensor = following,
            ) -> Tensor:
                return loss_of(step_probs.at(part), module.logits(hidden), following[part])

            mean = chunked_sum(hidden[learned], module, losses) / max(len(following), 1)
            total = total + options.decay**step * mean
            weight += options.decay**step
        return total / weight if weight else zero_loss(module)

    def forecast(self, module: nn.Module, batch: Batch, depth: int) -> Forecast:
        assert isinstance(module, EagleModule)
        positions = batch.mask.shape[1]
        guesses = (
            (k, slice(1, positions - k), module.logits(hidden))
            for k, (_, hidden) in enumerate(unroll(module, batch, depth))
        )
        return forecast_of(guesses, batch, depth, module.tokens())

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        head, view = self._read(directory, target), view_of(runner.decoder)
        return EagleProposer(self.draft, head, view, **cache_size(runner))

    @abstractmethod
    def _new(self, target: Target, corpus: Corpus) -> nn.Module:
        """Return a new head."""

    @abstractmethod
    def _layers(self, layers: int) -> tuple[int, ...]:
        """Return the target layers that a new head reads."""

    @abstractmethod
    def _read(self, directory: Path, target: Target) -> EagleModule:
        """Load the head in a directory."""


@dataclass(frozen=True, slots=True)
class Eagle3(EagleRecipe):
    """An EAGLE-3 head (2503.01840) with the norms of 3.1: each of the target's states is normed
    before they are fused, and the head's own state is normed, so that no draft begins from larger
    values than the one before it.

    By default one product joins each pair before the layer, as in multi-token modules, so that the
    head can begin as the target's last layer. With `portable` it has the paper's layer, which other
    engines support. That one begins at random, except for the last norm, the head, and an attention
    that sees the embedding of its own pair (`attend_to_self`).
    """

    options: EagleOptions
    name = "eagle3"
    draft = "eagle3"

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, Eagle3Head)
        save_head(module, directory, target.recorded_name, target.llm.decoder.dtype)

    def _new(self, target: Target, corpus: Corpus) -> nn.Module:
        c, portable = target.llm.decoder.config, self.options.portable
        layer = layer_like(c, self.options.intermediate)
        draft_vocab = min(self.options.draft_vocab or default_vocab(layer), c.vocab)
        config = EagleConfig(
            layer=layer,
            target_hidden=c.hidden,
            aux_hidden_layers=self._layers(c.layers),
            draft_vocab=draft_vocab,
            fc_norm=True,
            norm_before_residual=portable,
            norm_output=True,
            join=not portable,
        )
        head = Eagle3Head(config)
        assert head.lm_head is not None
        with torch.no_grad():
            if draft_vocab < c.vocab:
                init_short_head(head, head.lm_head, target, corpus)
            else:
                head.lm_head.weight.copy_(target.head)
            head.norm.weight.copy_(target.llm.decoder.weights.norm.weight)
        head.attach(target.view)
        if portable:
            attend_to_self(head)
        else:
            _fuse_last_state(head)
            init_from_target(head, head.joined, target, corpus)
        return head

    def _layers(self, layers: int) -> tuple[int, ...]:
        return fused_layers(layers)

    def _read(self, directory: Path, target: Target) -> EagleModule:
        head = load_head(directory, view_of(target.llm.decoder))
        if head.mask_token is not None:
            raise LoadError(
                f"{directory} has a head that drafts in parallel, which is not supported here"
            )
        if head.lm_head is None:
            raise LoadError(
                f"{directory} has a head without an lm head of its own, which is not supported here"
            )
        return head


@dataclass(frozen=True, slots=True)
class Mtp(EagleRecipe):
    """A multi-token module, unrolled as in FastMTP (2509.18362). Embedding and head are the
    target's; a module with a smaller vocabulary has its own head, which begins as the target's
    rows."""

    name = "mtp"
    draft = "mtp"

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, MtpModule)
        save_module(module, directory, target.recorded_name, target.llm.decoder.dtype)

    def _new(self, target: Target, corpus: Corpus) -> nn.Module:
        c = target.llm.decoder.config
        draft_vocab = min(self.options.draft_vocab or c.vocab, c.vocab)
        module = MtpModule(layer_like(c, self.options.intermediate), c.layers, draft_vocab)
        if module.lm_head is not None:
            init_short_head(module, module.lm_head, target, corpus)
        module.begin(target.llm.decoder.weights.norm.weight)
        module.attach(target.view)
        init_from_target(module, module.joined, target, corpus)
        return module

    def _layers(self, layers: int) -> tuple[int, ...]:
        return (layers,)

    def _read(self, directory: Path, target: Target) -> EagleModule:
        return load_module(directory, view_of(target.llm.decoder))


def default_vocab(layer: ModelConfig) -> int:
    """Return how many tokens an EAGLE-3 head scores by default: as many as cost about what its
    layer costs. Other tokens are rare, and every round is faster."""
    attention = (layer.heads + 2 * layer.kv_heads) * 2 + layer.heads
    weights_per_input = attention * layer.head_dim + 3 * layer.intermediate
    return min(max(weights_per_input // 1024 * 1024, MIN_VOCAB), MAX_VOCAB)


def fused_layers(layers: int) -> tuple[int, ...]:
    """Return the target layers that an EAGLE-3 head reads: low, middle and, unlike the paper's, the
    very last."""
    return tuple(sorted({min(2, layers // 3), layers // 2, layers}))


@torch.no_grad()
def _fuse_last_state(head: Eagle3Head) -> None:
    """Let the fused state begin as the last hidden state, as it enters the target's own head."""
    hidden = head.layer.hidden
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    last = head.fc_norm[-1]
    assert isinstance(last, nn.RMSNorm)
    last.weight.copy_(head.norm.weight)


@torch.no_grad()
def attend_to_self(head: Eagle3Head) -> None:
    """Initialise half of the heads to attend to their own pair and to carry its embedding into the
    residual stream.

    The residual stream of an EAGLE-3 layer is the target's state alone: the last token enters by
    attention only, which random weights need hundreds of steps to find. Queries and keys begin as
    one map of the embedding, whose product with itself is the largest; values and the output as
    another map and its transpose.
    """
    c, attention = head.layer, head.parts().layer.self_attn
    maps = torch.empty(2, c.kv_heads * c.head_dim, c.hidden)
    for one_map in maps:
        nn.init.orthogonal_(one_map)
    query_key, value = maps.view(2, c.kv_heads, c.head_dim, c.hidden)
    # normed embeddings have a square of about head_dim there
    query_key = query_key * (SELF_SCORE / c.head_dim**0.5) ** 0.5
    for kv_head in range(c.kv_heads):
        start = kv_head * (c.heads // c.kv_heads) * c.head_dim
        first = slice(start, start + c.head_dim)
        group = slice(kv_head * c.head_dim, (kv_head + 1) * c.head_dim)
        attention.q_proj.weight[first, : c.hidden] += query_key[kv_head]
        attention.k_proj.weight[group, : c.hidden] += query_key[kv_head]
        attention.v_proj.weight[group, : c.hidden] += value[kv_head]
        attention.o_proj.weight[:, first] += value[kv_head].T


def unroll(
    head: EagleModule, batch: Batch, steps: int, thin: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draft from every token of a batch at once.

    Step 0 processes all pairs of a text with the target's own states. Step s stands for the
    (s + 1)th token drafted after each root: its pairs consist of the text's tokens and of the
    head's states from step s - 1 in the same rows. As while drafting, a row sees the pairs of step
    0 up to its own, and only its own pair of later steps.

    Args:
        thin: each step after the first keeps every `thin`th row of the one before whose next token
            is known, from a random offset.

    Yields:
        (rows [R], hidden [B, R, Hd]) of steps 0 to `steps` - 1, where row t of step s predicts
        token t + 2 + s. Ends early when no row is left.
    """
    features = torch.cat([batch.hidden_states[layer] for layer in head.aux_hidden_layers], -1)
    count = features.shape[1] - 1  # nothing is known to follow the token beside the last state
    layer, device = head.layer, features.device
    tables = rope_tables(layer, layer.ropes[0], count + steps, torch.float32)
    cosine, sine = (table.to(device) for table in tables)
    rows = torch.arange(count, device=device)
    state = head.fuse(features[:, :count])
    attend = _UnrolledAttention(layer.attention_scale, layer.windows[0])
    for step in range(min(steps, count)):
        if step:
            offset = int(torch.randint(thin, ())) if thin > 1 else 0
            kept = (rows < count - step).nonzero()[:, 0]
            kept = kept[min(offset, len(kept) - 1) :: thin]
            rows, state = rows[kept], state[:, kept]
            attend.keep(kept)
        attend.rows = rows
        at = rows + step
        hidden = head(head.embed(batch.tokens[:, at + 1]), state, (cosine[at], sine[at]), attend)
        yield rows, hidden
        state = head.next_state(hidden)


class _UnrolledAttention:
    """Attention of successive steps, which keeps the keys and values of earlier ones."""

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale, self.window = scale, window
        self.rows = torch.arange(0)
        self._first: tuple[Tensor, Tensor] | None = None  # of step 0, all rows
        self._later: list[tuple[Tensor, Tensor]] = []  # of each later step, the rows that are left

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows of the later steps."""
        self._later = [(key[:, rows], value[:, rows]) for key, value in self._later]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, R, heads, D], k and v [B, R, Hkv, D] of this step's rows -> [B, R, heads, D]"""
        groups = q.shape[2] // k.shape[2]
        own = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        if self._first is None:
            self._first = own
        else:
            self._later.append(own)
        keys, values = self._first
        step, count = len(self._later), keys.shape[1]
        scores = torch.einsum("brhd,bkhd->bhrk", q, keys)
        parts = [scores.masked_fill(~self._visible(step, count), -torch.inf)]
        for s, (key, _) in enumerate(self._later, 1):
            score = (q * key).sum(-1).transpose(1, 2)
            if self.window is not None and step - s >= self.window:
                score = torch.full_like(score, -torch.inf)
            parts.append(score[..., None])
        weights = (torch.cat(parts, -1).float() * self.scale).softmax(-1).to(v.dtype)
        out = torch.einsum("bhrk,bkhd->brhd", weights[..., :count], values)
        for s, (_, value) in enumerate(self._later):
            out = out + weights[..., count + s].transpose(1, 2)[..., None] * value
        return out

    def _visible(self, step: int, count: int) -> Tensor:
        """Which pairs of step 0 each row sees: up to its own, within the window of its position.
        bool [R, K]"""
        at = torch.arange(count, device=self.rows.device)
        visible = at <= self.rows[:, None]
        if self.window is not None:
            visible &= self.rows[:, None] + step - at < self.window
        return visible


@torch.no_grad()
def init_from_target(head: EagleModule, layer: JoinedLayer, target: Target, corpus: Corpus) -> None:
    """Let a head begin as the target's last layer behind a fitted map.

    What enters the target's last layer at token t + 1 follows to a good part from the token's
    embedding and the hidden state after token t. The map between them is a least-squares problem
    over some thousand tokens. With the target's last layer, norm and head behind it, the head
    drafts before its first step about as well as a random one after a hundred steps.

    Where the last layer is of another kind, the head's layer begins as the identity, and the map is
    fitted to the output of the target's last layer. The head must fuse states into something like
    the last one.
    """
    layers = target.llm.decoder.config.layers
    if copy_last_layer(layer, target):
        layers -= 1
    else:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    texts = corpus.examples or [Example(tuple(prompt), 1) for prompt in corpus.prompts]
    texts = texts[:: max(len(texts) // FIT_TEXTS, 1)][:FIT_TEXTS]
    layer.input_proj.weight.copy_(fit_pairs(head, target, texts, layers))


def fit_pairs(
    head: EagleModule, target: Target, texts: Sequence[Example], target_layer: int
) -> Tensor:
    """Fit the map from normed pairs to the hidden states of `target_layer` at their tokens by
    ridge regression. float32 [Hd, 2 Hd]"""
    parts, layers = head.parts(), sorted({*head.aux_hidden_layers, target_layer})
    width = 2 * head.layer.hidden
    squares = torch.zeros(width, width, dtype=torch.float64)
    products = torch.zeros(width, head.layer.hidden, dtype=torch.float64)
    for at in range(0, len(texts), FIT_BATCH):
        group = texts[at : at + FIT_BATCH]
        for example, states in zip(group, target.hidden_states(group, layers), strict=True):
            features = [states[layer][:-1].float() for layer in head.aux_hidden_layers]
            ids = torch.tensor(example.tokens[1:-1], device=target.device)
            embedded = parts.embed_norm(head.embed(ids).float())
            state = parts.state_norm(head.fuse(torch.cat(features, -1)))
            pairs = torch.cat((embedded, state), -1).double().cpu()
            squares += pairs.T @ pairs
            products += pairs.T @ states[target_layer][1:].double().cpu()
    squares += RIDGE * squares.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    fitted: Tensor = torch.linalg.solve(squares, products)
    return fitted.T.float()


def copy_last_layer(layer: JoinedLayer, target: Target) -> bool:
    """Copy the target's last layer. Returns False, with nothing done, if it is of another kind
    (biases, layer norms, norms after a branch, an MLP without a gate, other sizes)."""
    c = target.llm.decoder.config
    if not c.is_llama_like:
        return False
    found: dict[str, Tensor] = {}

    def make(part: str, source: Source, bias: Tensor | None) -> None:
        if source.name.startswith(f"{c.layers - 1}."):  # all other tensors stay on disk
            found[part] = source.weight()

    last: LayerWeights = load_weights(c, target.path, torch.float32, target.device, make).layers[-1]
    assert last.attention_norm is not None and last.mlp_norm is not None
    attention, mlp = layer.self_attn, layer.mlp
    if attention.products().shape != found["qkv"].shape:
        return False
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights = torch.split(found["qkv"], [projection.out_features for projection in projections])
    gate, up = found["up"].chunk(2)
    pairs: list[tuple[Tensor, Tensor]] = [
        *((projection.weight, w) for projection, w in zip(projections, weights, strict=True)),
        (attention.o_proj.weight, found["out"]),
        (mlp.gate_proj.weight, gate),
        (mlp.up_proj.weight, up),
        (mlp.down_proj.weight, found["down"]),
        (layer.input_layernorm.weight, last.attention_norm.weight),
        (layer.post_attention_layernorm.weight, last.mlp_norm.weight),
        *_query_key_norms(attention, last),
    ]
    if any(to.shape != value.shape for to, value in pairs):
        return False
    for to, value in pairs:
        to.copy_(value)
    return True


def _query_key_norms(attention: SelfAttention, last: LayerWeights) -> list[tuple[Tensor, Tensor]]:
    norms = ((attention.q_norm, last.q_norm), (attention.k_norm, last.k_norm))
    return [
        (to.weight, value.weight)
        for to, value in norms
        if isinstance(to, nn.RMSNorm) and value is not None
    ]


@dataclass(frozen=True, slots=True)
class Medusa(Recipe):
    """Heads that begin as copies of the target's own head.

    Head k predicts token j + 2 + k from the hidden state after token j. What it drafts after root i
    therefore comes from the state of i - 1, and its distribution is the target's at i + k.
    """

    options: MedusaOptions
    name = "medusa"
    draft = "medusa"

    def reads(self, target: Target) -> tuple[int, ...]:
        return (target.llm.decoder.config.layers,)

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        config, options = target.llm.decoder.config, self.options
        heads = MedusaHeads(options.heads, options.blocks, config.hidden, config.vocab)
        heads.begin(target.head)
        return heads

    def load(self, directory: Path, target: Target) -> nn.Module:
        return load_heads(directory).requires_grad_(True)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        loss_of = self.distillation_loss()
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for k, logits in enumerate(self._logits(module, batch)):
            probs = batch.probs.at((slice(None), slice(k + 1, None)))
            losses = loss_of(probs, logits, batch.tokens[:, k + 2 :])
            total = total + self.options.decay**k * masked_mean(losses, batch.mask[:, k + 1 :])
            weight += self.options.decay**k
        return total / weight if weight else zero_loss(module)

    def forecast(self, module: nn.Module, batch: Batch, depth: int) -> Forecast:
        positions = batch.mask.shape[1]
        heads = enumerate(self._logits(module, batch)[:depth])
        guesses = ((k, slice(1, positions - k), logits) for k, logits in heads)
        return forecast_of(guesses, batch, depth)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, MedusaHeads)
        save_heads(module, directory, target.llm.decoder.dtype)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        return MedusaProposer("medusa", load_heads(directory), view_of(runner.decoder))

    def _logits(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        """The logits of each head where its token lies within the texts. [B, N - 1 - k, V]"""
        assert isinstance(module, MedusaHeads)
        (states,) = batch.hidden_states.values()
        normalised = batch.view.normalise(states)
        found = []
        for k in range(min(module.levels, batch.mask.shape[1] - 1)):
            logits = module.head_logits(k, normalised[:, : batch.mask.shape[1] - 1 - k])
            found.append(spread(logits, module.tokens(), batch.vocab))
        return found
