"""What came of requests, in OpenAI's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from forerun.engine.stats import RequestStats
from forerun.models.tokenizer import Tokenizer
from forerun.server.tenants import CALLER
from forerun.server.tickets import Ticket
from forerun.types import OTHERS, Event, PromptLogprobs, Round, TokenLogprobs

SPELLED = (
    1 << 15
)  # tokens whose texts are kept: log-probabilities name the same ones again and again
LEAST = -9999.0  # stands for minus infinity, which JSON has no number for


@dataclass(slots=True)
class Answer:
    """The output of one ticket as far as it has come."""

    ticket: Ticket
    characters: int = 0
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: Event) -> None:
        self.characters += len(event.text)
        self.token_ids += event.token_ids
        self.pieces += event.pieces
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = event.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        """All of it, joined when it is wanted: not at every event."""
        return "".join(self.pieces)

    @property
    def stats(self) -> RequestStats:
        assert self.ticket.request is not None
        return self.ticket.request.stats

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return self.ticket.order.params.logprobs is not None


def finish(reason: str | None) -> str | None:
    """A finish reason as clients know them: what was cut short by a shutdown ends by length."""
    return "length" if reason == "abort" else reason


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Token counts over the answers to all prompts, n for each. Every emitted token counts once,
    and no other."""
    prompt = sum(a.stats.prompt_tokens for a in answers[::n])
    completion = sum(len(a.token_ids) for a in answers)
    details: dict[str, Any] = {}
    given = [r for a in answers for r in a.ticket.order.references if r.name == "prediction"]
    if given:
        accepted = sum(a.stats.by_source["prediction"].accepted for a in answers)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = max(0, sum(len(r.tokens) for r in given) - accepted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(a.stats.cached_tokens for a in answers[::n])
        },
        "completion_tokens_details": {"reasoning_tokens": 0} | details,
    }


def metrics(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Speculation of a single answer in vLLM's shape, which benchmark tools read, and beside it
    what took the time."""
    if len(answers) != 1:
        return None
    stats = answers[0].stats
    rounds = [r for r in stats.rounds if r[0]]
    widest = max((drafted for drafted, _ in rounds), default=0)
    histogram = [0] * (widest + 1)
    by_length: dict[str, list[int]] = {}
    for drafted, accepted in rounds:
        histogram[accepted] += 1
        by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
    accepted = sum(a for _, a in rounds)
    drafted = sum(d for d, _ in rounds)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / len(rounds) if rounds else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": len(rounds),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": widest,
        },
        "forerun": stats.as_dict(),
    }


def completion_logprobs(
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    pieces: Sequence[str],
    offset: int,
    tokenizer: Tokenizer | None,
    top: int,
) -> dict[str, Any]:
    """Logprobs as /v1/completions writes them, with at most `top` of the likeliest tokens; the text
    of the first token begins at `offset`. The first token of a prompt has no entry."""
    offsets = []
    for piece in pieces[: len(entries)]:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": [spell(tokenizer, token) for token in tokens],
        "token_logprobs": [None if e is None else number(e.logprob) for e in entries],
        "top_logprobs": [None if e is None else _by_text(e, top, tokenizer) for e in entries],
        "text_offset": offsets,
    }


def _by_text(entry: TokenLogprobs, top: int, tokenizer: Tokenizer | None) -> dict[str, float]:
    """The likeliest tokens by their texts; of several with the same text the likeliest."""
    found: dict[str, float] = {}
    for token, value in list(entry.top.items())[:top]:
        found.setdefault(spell(tokenizer, token), number(value))
    return found


def prompt_logprobs(
    entries: PromptLogprobs, top: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt as vLLM writes them: by token id the token itself and `top` of
    the likeliest."""

    def one(entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {
            token: (value, i)
            for i, (token, value) in enumerate(list(entry.top.items())[:top], start=1)
        }
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank or 0))
        return {
            str(token): {
                "logprob": number(value),
                "rank": rank,
                "decoded_token": spell(tokenizer, token),
            }
            for token, (value, rank) in ranked.items()
        }

    return [None if entry is None else one(entry) for entry in entries]


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Logprobs as chats write them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = spell(tokenizer, token)
        return {
            "token": text,
            "logprob": number(logprob),
            "bytes": list(_bytes(tokenizer, token) if tokenizer else text.encode()),
        }

    return {
        "content": [
            one(e.token_id, e.logprob) | {"top_logprobs": [one(t, v) for t, v in e.top.items()]}
            for e in entries
        ],
        "refusal": None,
    }


def spell(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as text; bytes that are no character show as a replacement character."""
    return _text(tokenizer, token) if tokenizer else str(token)


@lru_cache(maxsize=SPELLED)
def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.spell(token)


@lru_cache(maxsize=SPELLED)
def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return tokenizer.token_bytes(token)


def number(value: float) -> float:
    """A log-probability that JSON can carry."""
    return max(value, LEAST)


def trace(round_: Round, event: Event, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One round for whoever watches: what was drafted, what the target thought of it, what was
    emitted.

    Tokens that come from another request and were rejected are not told: they are no part of this
    one. How often drafts are accepted follows at first from everybody's, and is for the operator.
    """
    draft, kept = round_.draft, set(round_.verdict.path)

    def one(token: int, i: int, told: bool = True) -> dict[str, Any]:
        if not told:
            return {"id": None, "text": "", "p": None, "noise": None}
        return {
            "id": token,
            "text": spell(tokenizer, token),
            "p": round(round_.chances[i], 6),
            "noise": round(round_.noises[i], 4),
        }

    nodes = [
        one(draft.tokens[node], node - 1, told=node in kept or not _is_hidden(draft.sources[node]))
        | {
            "parent": draft.parents[node],
            "source": _told_sources(draft.sources[node], node in kept),
            "q": round_.drafted[node - 1],
            "accepted": node in kept,
        }
        for node in range(1, len(draft))
    ]
    emitted = zip(event.token_ids, event.sources, event.pieces, strict=True)
    return {
        "step": round_.step,
        "depth": round_.depth,
        "rate": round(round_.rate, 4) if CALLER.get().operator else None,
        "tokens": [
            {"id": token, "text": text, "source": source} for token, source, text in emitted
        ],
        "draft": nodes,
        "bonus": one(round_.verdict.tokens[-1], len(draft) - 1),
        "t_draft_ms": round(1e3 * round_.draft_seconds, 4),
        "t_verify_ms": round(1e3 * round_.verify_seconds, 4),
    }


def _is_hidden(sources: str) -> bool:
    """Whether nobody drafted a token who only knows this request."""
    return all(source in OTHERS for source in sources.split("&"))


def _told_sources(sources: str, accepted: bool) -> str:
    """Who drafted a token, as far as that tells nothing of other requests."""
    if accepted or _is_hidden(sources):
        return sources
    return "&".join(source for source in sources.split("&") if source not in OTHERS)


@lru_cache(maxsize=1)
def started() -> int:
    """When this server began, in whole seconds."""
    return int(time.time())
