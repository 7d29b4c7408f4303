"""One pass of a model over any mixture of prefill chunks, single tokens and draft trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.models.decoder import Decoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.program import Link
from forerun.types import Forward


class Runner:
    """A decoder, on torch or on the native kernels, and its KV cache. The target has one; so has
    every draft model."""

    def __init__(
        self, decoder: Decoder | NativeDecoder, *, tokens: int, page: int, slots: int
    ) -> None:
        """Room for `tokens` tokens of KV in pages of `page`, for `slots` requests at a time."""
        self.decoder = decoder
        self._shape = {"tokens": tokens, "page": page, "slots": slots}
        self.reset()

    def reset(self) -> None:
        """Start over with an empty cache."""
        decoder = self.decoder
        self.cache = KVCache(
            decoder.config, **self._shape, context=decoder.context, dtype=decoder.dtype, device=decoder.device,
            native=isinstance(decoder, NativeDecoder),
        )  # fmt: skip

    def make_room(self, tokens: int) -> None:
        """Start over with a cache of so many tokens."""
        self._shape["tokens"] = tokens
        self.reset()

    def abridged(self, kept: Sequence[int], window: int | None = None) -> Runner:
        """Part of the model on the same cache, whose committed rows it only reads: these of its
        layers, and a window of so many keys."""
        return _Part(self, self.decoder.abridged(kept, window))

    def chain(self, links: Sequence[Link], vocab: int) -> list[list[int]] | None:
        """Say token after token below `vocab` behind each link; None where passes are not
        native."""
        if isinstance(self.decoder, NativeDecoder):
            return self.decoder.chain(links, self.cache, vocab)
        return None

    def forward(
        self, segments: Sequence[Segment], aux_hidden_layers: Sequence[int] = (), keep: bool = True
    ) -> Forward:
        """One pass. The slots must have room (`Pages.grow`); logits come in the order of the
        segments' `want`, hidden states at `aux_hidden_layers` in that of their tokens. Logits that
        are not to be kept may be overwritten by the next pass."""
        if isinstance(self.decoder, NativeDecoder):
            return self.decoder.forward(segments, self.cache, aux_hidden_layers, keep)
        return self._on_torch(self.decoder, segments, aux_hidden_layers)

    @torch.inference_mode()
    def _on_torch(
        self, decoder: Decoder, segments: Sequence[Segment], aux_hidden_layers: Sequence[int]
    ) -> Forward:
        device = decoder.device
        attention = Attention(segments, self.cache, decoder.config)
        ids = torch.tensor([token for s in segments for token in s.tokens], device=device)
        want, start = [], 0
        for segment in segments:
            want += [start + i for i in segment.want]
            start += len(segment.tokens)
        chosen = torch.tensor(want, dtype=torch.int64, device=device)
        return decoder.forward(ids, attention.positions, attention, chosen, aux_hidden_layers)


class _Part(Runner):
    """Shares the cache of another runner, which starts over first."""

    def __init__(self, whole: Runner, decoder: Decoder | NativeDecoder) -> None:
        self.whole, self.decoder, self.cache = whole, decoder, whole.cache

    def reset(self) -> None:
        self.cache = self.whole.cache

    def make_room(self, tokens: int) -> None:
        """Of which the other has made as much."""
        self.reset()
