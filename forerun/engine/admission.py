"""Whether a request can be served at all, and for how long."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forerun.errors import CapacityError, RequestError, brief
from forerun.runner import Runner
from forerun.sampling.params import SamplingParams


def check_ids(ids: Collection[int], vocab: int) -> None:
    """Raise RequestError for one that is no token's."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        outside = next(token for token in ids if not 0 <= token < vocab)
        raise RequestError(f"token id {brief(outside)} is not in the vocabulary of {vocab}")


def output_limit(target: Runner, tokens: Sequence[int], params: SamplingParams) -> int:
    """Most output tokens the request may have. Raises RequestError or CapacityError if it cannot be served."""
    vocab, context, pages = target.decoder.config.vocab, target.decoder.context, target.cache.pages
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token")
    for ids in (tokens, params.logit_bias, params.stop_token_ids):
        check_ids(ids, vocab)
    room = context - len(tokens)
    if room < min(1, params.max_tokens):  # a prompt that is only read may fill the context
        raise RequestError(f"the prompt has {len(tokens)} tokens, the context only {context}: shorten the prompt")
    limit, rows = min(params.max_tokens, room), pages.count * pages.size
    if len(tokens) + limit > rows:
        raise CapacityError(
            f"prompt and max_tokens need {len(tokens) + limit} tokens of KV cache, which holds {rows}: "
            "lower max_tokens or raise kv_tokens"
        )
    return limit
