"""`Runner`: a decoder with its KV cache, which runs forward passes over any mixture of segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.cache.recurrent import Recurrence
from forerun.devices import upload
from forerun.errors import ConfigError
from forerun.models.config import TRANSFORMERS
from forerun.models.decoder import Decoder
from forerun.models.sharding import ShardedDecoder
from forerun.runtime.captured import CapturedPasses, CudaGraphs
from forerun.runtime.native import NativeDecoder
from forerun.runtime.program import ChainStart
from forerun.types import Forward


class Runner:
    """A decoder, on torch or on the native kernels, and its KV cache.

    The target and every draft model have one each. A forward pass takes prefill chunks, single
    tokens and draft trees at the same time."""

    def __init__(
        self,
        decoder: Decoder | NativeDecoder,
        *,
        tokens: int,
        page: int,
        slots: int,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """Allocate a cache of `tokens` tokens in pages of `page` for `slots` requests.

        `graphs` records passes of a decoder on torch; without it none are recorded."""
        self.decoder = decoder
        self.graphs = graphs
        self._shape = {"tokens": tokens, "page": page, "slots": slots}
        self.reset()

    def reset(self) -> None:
        """Start over with an empty cache."""
        decoder = self.decoder
        self.captured: CapturedPasses | None = None
        if hasattr(self, "cache"):
            del self.cache  # a GPU may have no room for two
        if decoder.config.layout == TRANSFORMERS:
            from forerun.runtime.transformers_backend import TransformersDecoder

            assert isinstance(decoder, TransformersDecoder)
            self.cache: KVCache = decoder.make_cache(**self._shape)
            return
        self.cache = KVCache(
            decoder.config,
            **self._shape,
            context=decoder.context,
            dtype=decoder.dtype,
            device=decoder.device,
            native=isinstance(decoder, NativeDecoder),
        )
        # the parts of a sharded model wait for each other, so their passes cannot be recorded
        if self.graphs and isinstance(decoder, Decoder) and not isinstance(decoder, ShardedDecoder):
            self.captured = CapturedPasses(decoder, self.cache, self.graphs)

    def make_room(self, tokens: int) -> None:
        """Start over with a cache of `tokens` tokens."""
        self._shape["tokens"] = tokens
        self.reset()

    def with_layers(self, layer_ids: Sequence[int], window: int | None = None) -> Runner:
        """Return a runner of these layers with at most `window` keys on the same cache.

        It only reads committed rows of that cache. Raises ConfigError for recurrent models, whose
        states would change."""
        if self.cache.recurrent is not None:
            raise ConfigError(
                "self:.. drafts skip layers, which recurrent models do not allow: use suffix"
            )
        return _PartRunner(self, self.decoder.with_layers(layer_ids, window))

    def draft_chains(self, starts: Sequence[ChainStart], vocab: int) -> list[list[int]] | None:
        """Draft a chain of tokens below `vocab` behind each start in one native call.

        Returns None if the decoder is not native, or has recurrent layers."""
        if isinstance(self.decoder, NativeDecoder) and self.cache.recurrent is None:
            return self.decoder.draft_chains(starts, self.cache, vocab)
        return None

    def draft_chains_from(
        self, starts: Sequence[ChainStart], vocab: int, logits: Tensor
    ) -> list[list[int]] | None:
        """Draft as `CapturedPasses.draft_chains`; None if passes are not recorded."""
        if self.captured is None:
            return None
        return self.captured.draft_chains(starts, vocab, logits)

    def forward(
        self, segments: Sequence[Segment], aux_hidden_layers: Sequence[int] = (), keep: bool = True
    ) -> Forward:
        """Run one forward pass. The slots must have room (`Pages.grow`).

        Logits come in the order of the segments' `want`, hidden states at `aux_hidden_layers` in
        the order of their tokens. Without `keep` the next pass may overwrite both."""
        if isinstance(self.decoder, NativeDecoder):
            return self.decoder.forward(segments, self.cache, aux_hidden_layers, keep)
        if self.captured is not None:
            found = self.captured.forward(segments, aux_hidden_layers)
            if found is not None:
                found.logits = found.logits.clone() if keep else found.logits
                return found
        return self._forward_on_torch(self.decoder, segments, aux_hidden_layers)

    @torch.inference_mode()
    def _forward_on_torch(
        self, decoder: Decoder, segments: Sequence[Segment], aux_hidden_layers: Sequence[int]
    ) -> Forward:
        device = decoder.device
        attention = Attention(segments, self.cache, decoder.config)
        ids = upload([token for s in segments for token in s.tokens], torch.int64, device)
        want, start = [], 0
        for segment in segments:
            want += [start + i for i in segment.want]
            start += len(segment.tokens)
        wanted = upload(want, torch.int64, device)
        args = ids, attention.positions, attention, wanted, aux_hidden_layers
        if self.cache.recurrent is None:
            return decoder.forward(*args)
        plan = self.cache.recurrent.plan(segments, self.cache.length)
        result = decoder.forward(*args, Recurrence(plan, decoder.config))
        plan.settle()
        return result


class _PartRunner(Runner):
    """Shares the cache of another runner, which is always reset first."""

    def __init__(self, owner: Runner, decoder: Decoder | NativeDecoder) -> None:
        self.owner, self.decoder, self.cache = owner, decoder, owner.cache
        self.graphs = self.captured = None

    def reset(self) -> None:
        self.cache = self.owner.cache

    def make_room(self, tokens: int) -> None:
        self.reset()
