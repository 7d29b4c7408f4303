"""The recipe block: a drafter of whole blocks on hidden states of the target (DSpark,
2607.05147)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.block.formats import BlockConfig, MarkovShape
from forerun.draft.block.module import BlockHead, load_block, save_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.head_modules import layer_like
from forerun.draft.proposer import Proposer, view_of
from forerun.errors import ConfigError, LoadError
from forerun.models.config import ModelConfig, make_config
from forerun.models.rope import rope_tables
from forerun.runtime.torch_runner import Runner
from forerun.train.data import Corpus
from forerun.train.losses import chunked_sum, draft_numbers, tv, zero_loss
from forerun.train.options import BlockOptions
from forerun.train.recipes.base import Forecast, Recipe, cache_size, forecast_of, init_short_head
from forerun.train.target import Batch, Target

ANCHORS = 32  # anchors of a text per forward pass of an evaluation, where every token is one


@dataclass(frozen=True, slots=True)
class Block(Recipe):
    """Blocks of slots: slot k after an anchor at position i predicts token i + 1 + k, and learns
    the target's distribution at i + k.

    The Markov head is taught with the text's own tokens and begins at zero. Embedding and head are
    the target's; a drafter with a smaller vocabulary has its own head, which begins as the target's
    rows. The norm before the head begins as the target's.
    """

    options: BlockOptions
    name = "block"
    draft = "block"

    def aux_hidden_layers(self, module: nn.Module, target: Target) -> tuple[int, ...]:
        assert isinstance(module, BlockHead)
        return module.config.aux_hidden_layers

    def reads(self, target: Target) -> tuple[int, ...]:
        return spread(target.llm.decoder.config.layers, self.options.fused_states)

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        c, options = target.llm.decoder.config, self.options
        draft_vocab = min(options.draft_vocab or c.vocab, c.vocab)
        config = BlockConfig(
            layer=layers_like(c, options.block_layers),
            target_hidden=c.hidden,
            aux_hidden_layers=self.reads(target),
            block=options.block_size,
            mask_token=mask_token(target, corpus, options.mask_token),
            draft_vocab=draft_vocab,
            own_head=draft_vocab < c.vocab,
            markov=MarkovShape(options.markov_rank) if options.markov_rank else None,
            confidence=options.confidence > 0,
            confidence_with_markov=options.confidence > 0 and options.markov_rank > 0,
        )
        head = BlockHead(config)
        with torch.no_grad():
            head.norm.weight.copy_(target.llm.decoder.weights.norm.weight)
            if config.markov:
                head.markov_head.markov_w2.weight.zero_()
        if head.lm_head is not None:
            init_short_head(head, head.lm_head, target, corpus)
        head.attach(target.view)
        return head

    def load(self, directory: Path, target: Target) -> nn.Module:
        head = load_block(directory, view_of(target.llm.decoder))
        if not head.config.is_bigram:
            raise LoadError(
                f"{directory} can draft, but it is not measured here: it has no vanilla Markov head"
            )
        head.attach(target.view)
        return head

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, BlockHead)
        options, loss_of = self.options, self.distillation_loss()
        anchors, chosen = self.anchors(batch)
        hidden = block_states(module, batch, anchors)
        ids = module.tokens()
        numbers, known = draft_numbers(batch.tokens, ids, batch.vocab)
        positions = anchors[..., None] + torch.arange(hidden.shape[2], device=anchors.device)
        inside = positions < batch.mask.shape[1]
        learned = (batch.mask & known[:, 1:]).gather(1, positions.where(inside, 0).flatten(1))
        counts = chosen[..., None] & inside & learned.view(positions.shape)
        row, anchor, slot = counts.nonzero(as_tuple=True)
        if not len(row):
            return zero_loss(module)  # no text has a token that can be an anchor
        at, weights = positions[row, anchor, slot], options.decay**slot
        probs = batch.probs.at((row, at)).restricted_to(ids)
        previous, following = batch.tokens[row, at], numbers[row, at + 1]

        def losses(hidden: Tensor, part: slice) -> Tensor:
            target_probs = probs.at(part)
            logits = module.add_markov_bias(module.compute_logits(hidden), previous[part])
            values = loss_of(target_probs.normalised(), logits, following[part])
            if options.confidence:
                q = target_probs.log_probs_of(logits.detach())
                overlap = (1 - tv(target_probs.log_probs, q)).clamp(0, 1)
                confidence = module.confidence_logit(hidden, previous[part]).float()
                values = values + options.confidence * F.binary_cross_entropy_with_logits(
                    confidence, overlap, reduction="none"
                )
            return values * weights[part]

        return chunked_sum(hidden[row, anchor, slot], module, losses) / weights.sum()

    def anchors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Choose learned positions at random, equally many of each text. They follow from the
        tokens of the batch, so a step can be repeated.

        Returns:
            (positions [B, A], bool [B, A]: whether each is an anchor).
        """
        learned = batch.mask.cpu().clone()
        learned[:, 0] = False  # nothing is read before the first token
        seed = zlib.crc32(batch.tokens.cpu().numpy().tobytes())
        order = torch.rand(learned.shape, generator=torch.Generator().manual_seed(seed))
        order = order.masked_fill(~learned, -1.0)
        found, anchors = order.topk(min(self.options.anchors, learned.shape[1]))
        chosen = found >= 0
        device = batch.tokens.device
        return anchors.where(chosen, 1).to(device), chosen.to(device)

    def forecast(self, module: nn.Module, batch: Batch, depth: int) -> Forecast:
        assert isinstance(module, BlockHead)
        return forecast_of(self._guesses(module, batch, depth), batch, depth)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, BlockHead)
        save_block(module, directory, target.recorded_name, target.llm.decoder.dtype)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        view = view_of(runner.decoder)
        return BlockProposer(load_block(directory, view), view, **cache_size(runner))

    def _guesses(
        self, head: BlockHead, batch: Batch, depth: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield (k, roots, logits [B, roots, V]) of slot k after consecutive roots: every token
        that has context."""
        rows, positions = batch.mask.shape
        for first in range(1, positions, ANCHORS):
            last = min(first + ANCHORS, positions)
            anchors = torch.arange(first, last, device=batch.tokens.device)
            hidden = block_states(head, batch, anchors.expand(rows, -1))
            for k in range(min(depth, hidden.shape[2])):
                end = min(last, positions - k)  # beyond it the text has ended
                if end > first:
                    previous = batch.tokens[:, first + k : end + k]
                    logits = head.add_markov_bias(
                        head.compute_logits(hidden[:, : end - first, k]), previous
                    )
                    yield k, slice(first, end), head.over_target_vocab(logits)


def layers_like(c: ModelConfig, layers: int) -> ModelConfig:
    """Return the config of `layers` Qwen3 layers with the sizes of another family."""
    raw = layer_like(c).raw | {"model_type": "qwen3", "num_hidden_layers": layers}
    return make_config(raw, Path("config.json"))


def spread(layers: int, count: int) -> tuple[int, ...]:
    """Return `count` evenly spaced layers, from the first to the last, each at most once."""
    if count == 1:
        return (layers,)
    return tuple(sorted({1 + round(i * (layers - 1) / (count - 1)) for i in range(count)}))


def mask_token(target: Target, corpus: Corpus, given: int | None) -> int:
    """Return a token that texts hardly use: the given one, one that the tokenizer lacks, padding,
    or the rarest of the data. Raises ConfigError for a token id outside the vocabulary."""
    c = target.llm.decoder.config
    if given is not None:
        if given >= c.vocab:
            raise ConfigError(
                f"mask_token={given} is no token of the target: give a number below {c.vocab}"
            )
        return given
    unused = set(range(c.vocab)) - set(target.tokenizer.vocabulary().values())
    if unused:
        return min(unused)
    padding = c.raw.get("pad_token_id")
    if isinstance(padding, int) and 0 <= padding < c.vocab and padding not in c.end_ids:
        return padding
    return int(corpus.counts(c.vocab).argmin())


def block_states(head: BlockHead, batch: Batch, anchors: Tensor) -> Tensor:
    """Compute the hidden states of the predicting slots after many anchors at once.

    Each anchor has its own block, whose slots see the context before the anchor and one another, as
    they do while drafting, windows included. Drafts never change the context, so all blocks of a
    text share it.

    Args:
        anchors: int64 [B, A] positions of tokens from 1 up; the first token has no context.

    Returns:
        [B, A, K, Hd]: slot k predicts token anchor + 1 + k, before the Markov head.
    """
    c = head.config
    states = [batch.hidden_states[layer] for layer in c.aux_hidden_layers]
    context = head.fuse(torch.cat(states, -1))
    tables = rope_tables(c.layer, c.layer.ropes[0], context.shape[1] + c.block, torch.float32)
    cosine, sine = (table.to(anchors.device) for table in tables)
    ids = torch.full((*anchors.shape, c.block), c.mask_token, device=anchors.device)
    ids[..., 0] = batch.tokens.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(c.block, device=anchors.device)
    attend = _Attend(head, context, (cosine[: context.shape[1]], sine[: context.shape[1]]), anchors)
    hidden: Tensor = head(head.embed(ids), (cosine[positions], sine[positions]), attend)
    return hidden[:, :, c.first :]


class _Attend:
    """Attention of blocks over the context before their anchors and over themselves."""

    def __init__(
        self, head: BlockHead, context: Tensor, rotation: tuple[Tensor, Tensor], anchors: Tensor
    ) -> None:
        self.head, self.context, self.rotation = head, context, rotation
        # distance from each token of the context to each anchor, [B, 1, 1, A, 1, N]
        distance = anchors[..., None] - torch.arange(context.shape[1], device=anchors.device)
        self.distance = distance[:, None, None, :, None]
        size = head.config.block
        self.later = torch.ones(size, size, dtype=torch.bool, device=anchors.device).triu(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, A, S, heads, D], k and v [B, A, S, Hkv, D] of the blocks -> [B, A, S, heads, D]"""
        keys, values = self.head.context_kv(layer, self.context, self.rotation)
        q = q.view(*q.shape[:3], k.shape[3], -1, q.shape[4])
        c, window = self.head.config, self.head.config.layer.windows[layer]
        unseen = self.distance < 1
        if window:
            unseen = unseen | (self.distance > window)
        before = torch.einsum("bashgd,bnhd->bhgasn", q, keys).masked_fill(unseen, -torch.inf)
        own = torch.einsum("bashgd,bathd->bhgast", q, k)
        if c.is_causal(layer):
            own = own.masked_fill(self.later, -torch.inf)
        scores = torch.cat((before, own), -1).float() * c.layer.attention_scale
        weights, count = scores.softmax(-1).to(v.dtype), keys.shape[1]
        out = torch.einsum("bhgasn,bnhd->bashgd", weights[..., :count], values)
        out = out + torch.einsum("bhgast,bathd->bashgd", weights[..., count:], v)
        return out.flatten(3, 4)
