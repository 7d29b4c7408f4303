"""The recipe block: a drafter of whole blocks over hidden states of the target (DSpark,
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
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus
from forerun.train.fused import fused_sum
from forerun.train.losses import Mixture, nothing_learnt, numbered, tv
from forerun.train.options import BlockOptions
from forerun.train.recipes.base import Outlook, Recipe, begin_listed, outlook_of

ANCHORS = 32  # of each text in one pass of an evaluation, where all of its tokens are anchors


@dataclass(frozen=True, slots=True)
class Block(Recipe):
    """Blocks whose slot k, behind an anchor at position i, says token i + 1 + k; its law is the
    target's at i + k.

    The Markov head and the laws are taught with the text's own tokens. Embedding and head are the
    target's, but for a drafter that says part of the vocabulary, whose head begins as the target's
    rows; the norm before the head begins as the target's, and the Markov head says nothing yet.
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
        said = min(options.draft_vocab or c.vocab, c.vocab)
        config = BlockConfig(
            layer=layers_like(c, options.block_layers),
            target_hidden=c.hidden,
            aux_hidden_layers=self.reads(target),
            block=options.block_size,
            mask_token=mask_token(target, corpus, options.mask_token),
            draft_vocab=said,
            own_head=said < c.vocab,
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
            begin_listed(head, head.lm_head, target, corpus)
        head.attach(target.view)
        return head

    def load(self, directory: Path, target: Target) -> nn.Module:
        head = load_block(directory, view_of(target.llm.decoder))
        if not head.config.is_bigram:
            raise LoadError(
                f"{directory} can be drafted with, but not measured here: its law is no vanilla Markov head"
            )
        head.attach(target.view)
        return head

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, BlockHead)
        anchors, chosen = self.anchors(batch)
        made = blocks(module, batch, anchors)
        ids = module.tokens()
        numbers, sayable = numbered(batch.tokens, ids, batch.vocab)
        at = anchors[..., None] + torch.arange(made.shape[2], device=anchors.device)
        inside = at < batch.mask.shape[1]
        learnt = (
            (batch.mask & sayable[:, 1:]).gather(1, at.where(inside, 0).flatten(1)).view(at.shape)
        )
        counts = chosen[..., None] & inside & learnt
        row, anchor, slot = counts.nonzero(as_tuple=True)
        if not len(row):
            return nothing_learnt(module)  # no text has a token that could be an anchor
        at, options, weights = at[row, anchor, slot], self.options, self.options.decay**slot
        laws, before, said = (
            batch.law.at((row, at)).over(ids),
            batch.tokens[row, at],
            numbers[row, at + 1],
        )
        mixture = Mixture(options.kl, options.tv, options.ce)

        def losses(made: Tensor, part: slice) -> Tensor:
            law, previous = laws.at(part), before[part]
            logits = module.add_markov_bias(module.compute_logits(made), previous)
            values = mixture(law.whole(), logits, said[part])
            if options.confidence:
                overlap = (1 - tv(law.logs, law.of(logits.detach()))).clamp(0, 1)
                trust = module.confidence_logit(made, previous).float()
                values = values + options.confidence * F.binary_cross_entropy_with_logits(
                    trust, overlap, reduction="none"
                )
            return values * weights[part]

        return fused_sum(made[row, anchor, slot], module, losses) / weights.sum()

    def anchors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Some positions that count, as many of each text: (positions [B, A], whether each is one).
        They follow from the tokens of the batch, so a step can be repeated."""
        counts = batch.mask.cpu().clone()
        counts[:, 0] = False  # nothing was read before it
        seed = zlib.crc32(batch.tokens.cpu().numpy().tobytes())
        order = torch.rand(counts.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(
            ~counts, -1.0
        )
        found, anchors = order.topk(min(self.options.anchors, counts.shape[1]))
        chosen = found >= 0
        device = batch.tokens.device
        return anchors.where(chosen, 1).to(device), chosen.to(device)

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        assert isinstance(module, BlockHead)
        return outlook_of(self._guesses(module, batch, depth), batch, depth)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, BlockHead)
        save_block(module, directory, target.recorded, target.llm.decoder.dtype)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        view, cache = view_of(runner.decoder), runner.cache
        room = {
            "tokens": cache.pages.count * cache.pages.size,
            "page": cache.pages.size,
            "slots": len(cache.length),
        }
        return BlockProposer(load_block(directory, view), view, **room)

    def _guesses(
        self, head: BlockHead, batch: Batch, depth: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """(k, roots, logits [B, roots, V]): what slot k says behind consecutive roots, every token
        that has context."""
        rows, positions = batch.mask.shape
        for first in range(1, positions, ANCHORS):
            anchors = torch.arange(
                first, min(first + ANCHORS, positions), device=batch.tokens.device
            )
            made = blocks(head, batch, anchors.expand(rows, -1))
            for k in range(min(depth, made.shape[2])):
                end = min(first + len(anchors), positions - k)  # behind them the text has ended
                if end > first:
                    previous = batch.tokens[:, first + k : end + k]
                    yield (
                        k,
                        slice(first, end),
                        head.over_target_vocab(
                            head.add_markov_bias(
                                head.compute_logits(made[:, : end - first, k]), previous
                            )
                        ),
                    )


def layers_like(c: ModelConfig, layers: int) -> ModelConfig:
    """So many Qwen3 layers of the sizes of another family's."""
    raw = layer_like(c).raw | {"model_type": "qwen3", "num_hidden_layers": layers}
    return make_config(raw, Path("config.json"))


def spread(layers: int, count: int) -> tuple[int, ...]:
    """So many boundaries, evenly spaced: what the first layer has left, what the last one has, and
    between; at most one for each layer."""
    if count == 1:
        return (layers,)
    return tuple(sorted({1 + round(i * (layers - 1) / (count - 1)) for i in range(count)}))


def mask_token(target: Target, corpus: Corpus, asked: int | None) -> int:
    """A token that texts hardly use: the one asked for, one that the tokenizer lacks, padding, or
    the rarest of the data. Raises ConfigError."""
    c = target.llm.decoder.config
    if asked is not None:
        if asked >= c.vocab:
            raise ConfigError(
                f"mask_token={asked} is no token of the target: give a number below {c.vocab}"
            )
        return asked
    unused = set(range(c.vocab)) - set(target.tokenizer.vocabulary().values())
    if unused:
        return min(unused)
    padding = c.raw.get("pad_token_id")
    if isinstance(padding, int) and 0 <= padding < c.vocab and padding not in c.end_ids:
        return padding
    return int(corpus.counts(c.vocab).argmin())


def blocks(head: BlockHead, batch: Batch, anchors: Tensor) -> Tensor:
    """What the head makes of the slots that say something behind each anchor, of many anchors at
    once.

    Each anchor has a block of its own, whose slots see context before the anchor and one another,
    as they do while
    drafting: windows included. Context is never changed by what is drafted, so all blocks of a text
    share it.

    Args:
        anchors: [B, A] int64 positions of tokens, from 1 on: behind the very first there is no
            context.

    Returns:
        [B, A, K, Hd]: slot k says token anchor + 1 + k, before the Markov head.
    """
    c = head.config
    context = head.fuse(torch.cat([batch.states[boundary] for boundary in c.aux_hidden_layers], -1))
    tables = rope_tables(c.layer, c.layer.ropes[0], context.shape[1] + c.block, torch.float32)
    cosine, sine = (table.to(anchors.device) for table in tables)
    ids = torch.full((*anchors.shape, c.block), c.mask_token, device=anchors.device)
    ids[..., 0] = batch.tokens.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(c.block, device=anchors.device)
    attend = _Attend(head, context, (cosine[: context.shape[1]], sine[: context.shape[1]]), anchors)
    made: Tensor = head(head.embed(ids), (cosine[positions], sine[positions]), attend)
    return made[:, :, c.first :]


class _Attend:
    """Attention of blocks over the context before their anchors and over themselves."""

    def __init__(
        self, head: BlockHead, context: Tensor, rotation: tuple[Tensor, Tensor], anchors: Tensor
    ) -> None:
        self.head, self.context, self.rotation = head, context, rotation
        # how far each token of context lies before each anchor, [B, 1, 1, A, 1, N]
        distance = anchors[..., None] - torch.arange(context.shape[1], device=anchors.device)
        self.before = distance[:, None, None, :, None]
        self.later = torch.ones(
            head.config.block, head.config.block, dtype=torch.bool, device=anchors.device
        ).triu(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, A, S, heads, D], k and v [B, A, S, Hkv, D] of the blocks -> [B, A, S, heads, D]"""
        keys, values = self.head.context_kv(layer, self.context, self.rotation)
        q = q.view(*q.shape[:3], k.shape[3], -1, q.shape[4])
        c, window = self.head.config, self.head.config.layer.windows[layer]
        unseen = (self.before < 1) | (self.before > window) if window else self.before < 1
        before = torch.einsum("bashgd,bnhd->bhgasn", q, keys).masked_fill(unseen, -torch.inf)
        own = torch.einsum("bashgd,bathd->bhgast", q, k)
        if c.is_causal(layer):
            own = own.masked_fill(self.later, -torch.inf)
        scores = torch.cat((before, own), -1).float() * c.layer.attention_scale
        weights, count = scores.softmax(-1).to(v.dtype), keys.shape[1]
        out = torch.einsum("bhgasn,bnhd->bashgd", weights[..., :count], values)
        out = out + torch.einsum("bhgast,bathd->bashgd", weights[..., count:], v)
        return out.flatten(3, 4)
