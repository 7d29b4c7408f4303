"""The recipes eagle3 and mtp: heads on pairs, unrolled as they draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.eagle.module import Eagle3Head, EagleConfig, EagleModule, load_head, save_head
from forerun.draft.eagle.mtp import MtpModule, load_module, save_module
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.head_modules import layer_like
from forerun.draft.proposer import Proposer, view_of
from forerun.errors import ConfigError, LoadError
from forerun.models.config import ModelConfig
from forerun.models.hub import find_model
from forerun.runtime.torch_runner import Runner
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus
from forerun.train.fused import fused_sum
from forerun.train.losses import Law, Mixture, nothing_learnt, numbered
from forerun.train.options import EagleOptions, PairOptions
from forerun.train.recipes.base import Outlook, Recipe, begin_listed, outlook_of
from forerun.train.unroll import unroll
from forerun.train.warm import begin_as_target

SMALLEST_VOCAB, LARGEST_VOCAB = 8192, 32000  # of an EAGLE-3 head, unless it is asked for
OWN_SCORE = 10.0  # of a pair with itself where an EAGLE-3 head begins; those of others are about 1


@dataclass(frozen=True, slots=True)
class PairRecipe(Recipe):
    """What is the same for all heads on pairs: what they learn, how they are judged, how they
    draft.

    Row t of step s says token t + 2 + s: it is the (s + 1)th token drafted behind the root t + 1,
    and its law is the target's at t + 1 + s.
    """

    options: PairOptions

    def aux_hidden_layers(self, module: nn.Module, target: Target) -> tuple[int, ...]:
        assert isinstance(module, EagleModule)
        return module.aux_hidden_layers

    def reads(self, target: Target) -> tuple[int, ...]:
        if self.options.init is not None:
            return self._read(find_model(self.options.init, pickled=True), target).aux_hidden_layers
        return self._depths(target.llm.decoder.config.layers)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, EagleModule)
        mixture, ids = Mixture(self.options.kl, self.options.tv, self.options.ce), module.tokens()
        law, (numbers, sayable) = (
            batch.law.over(ids).whole(),
            numbered(batch.tokens, ids, batch.vocab),
        )
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for step, (rows, made) in enumerate(
            unroll(module, batch, self.options.unroll, self.options.thin)
        ):
            position = rows + step + 1
            counts = batch.mask[:, position] & sayable[:, position + 1]
            at, said = law.at((slice(None), position)).at(counts), numbers[:, position + 1][counts]

            def losses(made: Tensor, part: slice, at: Law = at, said: Tensor = said) -> Tensor:
                return mixture(at.at(part), module.logits(made), said[part])

            mean = fused_sum(made[counts], module, losses) / max(len(said), 1)
            total = total + self.options.decay**step * mean
            weight += self.options.decay**step
        return total / weight if weight else nothing_learnt(module)

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        assert isinstance(module, EagleModule)
        steps, positions = unroll(module, batch, depth), batch.mask.shape[1]
        guesses = (
            (k, slice(1, positions - k), module.logits(made)) for k, (_, made) in enumerate(steps)
        )
        return outlook_of(guesses, batch, depth, module.tokens())

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        view, cache = view_of(runner.decoder), runner.cache
        room = {
            "tokens": cache.pages.count * cache.pages.size,
            "page": cache.pages.size,
            "slots": len(cache.length),
        }
        return EagleProposer(self.draft, self._read(directory, target), view, **room)

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        if self.options.init is None:
            return self._new(target, corpus)
        return self.load(find_model(self.options.init, pickled=True), target).requires_grad_(True)

    def load(self, directory: Path, target: Target) -> nn.Module:
        head = self._read(directory, target)
        if head.layer.qkv_bias:
            raise ConfigError(
                f"{directory} holds layers with biases, which are not written: train a new module"
            )
        head.attach(target.view)
        return head

    def _new(self, target: Target, corpus: Corpus) -> nn.Module:
        raise NotImplementedError

    def _depths(self, layers: int) -> tuple[int, ...]:
        """The boundaries that a new head reads."""
        raise NotImplementedError

    def _read(self, directory: Path, target: Target) -> EagleModule:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Eagle3(PairRecipe):
    """An EAGLE-3 head (2503.01840) with the norms of 3.1: each of the target's states is normed
    before they are fused, and what is carried on is normed too, so that no draft begins from larger
    numbers than the one before it.

    Its pairs are joined, as in multi-token modules, so that it can begin as the target's last layer
    (`warm`), from the last of the states alone. If it is to be `portable` it has the paper's layer,
    which other engines know; that one begins at random, but for the last norm and the head, and for
    an attention that sees each pair's own embedding (`see_own`): to let the target's last state
    through at first made it learn more slowly."""

    options: EagleOptions
    name = "eagle3"
    draft = "eagle3"

    def _new(self, target: Target, corpus: Corpus) -> nn.Module:
        c = target.llm.decoder.config
        layer, aux_hidden_layers = layer_like(c, self.options.intermediate), self._depths(c.layers)
        said = min(self.options.draft_vocab or fitting_vocab(layer), c.vocab)
        config = EagleConfig(
            layer=layer, target_hidden=c.hidden, aux_hidden_layers=aux_hidden_layers, draft_vocab=said, fc_norm=True,
            norm_before_residual=self.options.portable, norm_output=True, join=not self.options.portable,
        )  # fmt: skip
        head = Eagle3Head(config)
        with torch.no_grad():
            if said < c.vocab:
                begin_listed(head, head.lm_head, target, corpus)
            else:
                head.lm_head.weight.copy_(target.head)
            head.norm.weight.copy_(target.llm.decoder.weights.norm.weight)
        head.attach(target.view)
        if self.options.portable:
            see_own(head)
        else:
            _see_the_last(head)
            begin_as_target(head, head.joined, target, corpus)
        return head

    def _depths(self, layers: int) -> tuple[int, ...]:
        return depths_read(layers)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, Eagle3Head)
        save_head(module, directory, target.recorded, target.llm.decoder.dtype)

    def _read(self, directory: Path, target: Target) -> EagleModule:
        head = load_head(directory, view_of(target.llm.decoder))
        if head.mask_token is not None:
            raise LoadError(
                f"{directory} holds a head that drafts in parallel, which is neither trained nor judged here"
            )
        return head


@dataclass(frozen=True, slots=True)
class Mtp(PairRecipe):
    """A multi-token module, unrolled as in FastMTP (2509.18362). Embedding and head are the
    target's, but for a module that says part of the vocabulary, whose head begins as the target's
    rows."""

    name = "mtp"
    draft = "mtp"

    def _new(self, target: Target, corpus: Corpus) -> nn.Module:
        c = target.llm.decoder.config
        said = min(self.options.draft_vocab or c.vocab, c.vocab)
        module = MtpModule(layer_like(c, self.options.intermediate), c.layers, said)
        if module.lm_head is not None:
            begin_listed(module, module.lm_head, target, corpus)
        module.begin(target.llm.decoder.weights.norm.weight)
        module.attach(target.view)
        begin_as_target(module, module.joined, target, corpus)
        return module

    def _depths(self, layers: int) -> tuple[int, ...]:
        return (layers,)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, MtpModule)
        save_module(module, directory, target.recorded, target.llm.decoder.dtype)

    def _read(self, directory: Path, target: Target) -> EagleModule:
        return load_module(directory, view_of(target.llm.decoder))


def fitting_vocab(layer: ModelConfig) -> int:
    """Tokens that an EAGLE-3 head says where nobody asks for a number: so many that to score them
    costs about as much as its layer does. What a text then lacks is rare, and every round is
    drafted and learnt from sooner."""
    attention = (layer.heads + 2 * layer.kv_heads) * 2 + layer.heads
    inputs = (
        attention * layer.head_dim + 3 * layer.intermediate
    )  # numbers of the layer for each of its inputs
    return min(max(inputs // 1024 * 1024, SMALLEST_VOCAB), LARGEST_VOCAB)


def depths_read(layers: int) -> tuple[int, ...]:
    """The boundaries that an EAGLE-3 head of ours reads: low, middle and, unlike the paper's, the
    very last."""
    return tuple(sorted({min(2, layers // 3), layers // 2, layers}))


@torch.no_grad()
def _see_the_last(head: Eagle3Head) -> None:
    """Let what is fused begin as the last of the states, as it enters the target's own head."""
    hidden = head.layer.hidden
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    last = head.fc_norm[-1]
    assert isinstance(last, nn.RMSNorm)
    last.weight.copy_(head.norm.weight)


@torch.no_grad()
def see_own(head: Eagle3Head) -> None:
    """Let half of the heads attend to their own pair and carry its embedding into the residual
    stream.

    The stream of an EAGLE-3 layer is the target's state alone: what was said last comes in by
    attention only, and to find that takes random weights hundreds of steps. Queries and keys begin
    as one map of the embedding, whose product with itself is the largest; values and the output as
    another and its transpose."""
    c, attention = head.layer, head.parts().layer.self_attn
    maps = torch.empty(2, c.kv_heads * c.head_dim, c.hidden)
    for each in maps:
        nn.init.orthogonal_(each)
    look, carry = maps.view(2, c.kv_heads, c.head_dim, c.hidden)
    look = (
        look * (OWN_SCORE / c.head_dim**0.5) ** 0.5
    )  # normed embeddings have about head_dim of their square there
    for kv_head in range(c.kv_heads):
        group = slice(kv_head * c.head_dim, (kv_head + 1) * c.head_dim)
        first = slice(at := kv_head * (c.heads // c.kv_heads) * c.head_dim, at + c.head_dim)
        attention.q_proj.weight[first, : c.hidden] += look[kv_head]
        attention.k_proj.weight[group, : c.hidden] += look[kv_head]
        attention.v_proj.weight[group, : c.hidden] += carry[kv_head]
        attention.o_proj.weight[:, first] += carry[kv_head].T
