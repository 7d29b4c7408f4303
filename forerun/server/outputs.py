"""Generated outputs and their statistics in OpenAI's and vLLM's formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from forerun.engine.stats import RequestStats
from forerun.models.tokenizer import Tokenizer
from forerun.server.auth import CALLER
from forerun.server.jobs import Job
from forerun.types import OTHERS, Event, PromptLogprobs, Round, TokenLogprobs

Json = dict[str, Any]
CACHED_TOKENS = 1 << 15  # texts of tokens that are cached: log-probabilities repeat the same ones
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


@dataclass(slots=True)
class Output:
    """The output of one request generated so far."""

    job: Job
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
        """The text so far, joined on demand rather than at every event."""
        return "".join(self.pieces)

    @property
    def stats(self) -> RequestStats:
        """Counters of the request."""
        assert self.job.request is not None
        return self.job.request.stats

    @property
    def has_logprobs(self) -> bool:
        return self.job.params.logprobs is not None


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's finish reason; an answer that a shutdown cuts short has "length"."""
    return "length" if reason == "abort" else reason


def usage(outputs: Sequence[Output], n: int) -> Json:
    """Return token counts over all prompts with `n` outputs each, in OpenAI's format."""
    prompt = sum(o.stats.prompt_tokens for o in outputs[::n])
    completion = sum(len(o.token_ids) for o in outputs)
    details: Json = {}
    predictions = [r for o in outputs for r in o.job.references if r.name == "prediction"]
    if predictions:
        accepted = sum(o.stats.by_source["prediction"].accepted for o in outputs)
        predicted = sum(len(reference.tokens) for reference in predictions)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = max(0, predicted - accepted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(o.stats.cached_tokens for o in outputs[::n])
        },
        "completion_tokens_details": {"reasoning_tokens": 0} | details,
    }


def metrics(outputs: Sequence[Output]) -> Json | None:
    """Return the speculation metrics of a single output in vLLM's format, and our own beside them.

    Responses with several outputs have none.
    """
    if len(outputs) != 1:
        return None
    stats = outputs[0].stats
    rounds = [(drafted, accepted) for drafted, accepted in stats.rounds if drafted]
    widest = max((drafted for drafted, _ in rounds), default=0)
    histogram = [0] * (widest + 1)
    by_length: dict[str, list[int]] = {}
    for drafted, accepted in rounds:
        histogram[accepted] += 1
        by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
    num_accepted = sum(accepted for _, accepted in rounds)
    num_drafted = sum(drafted for drafted, _ in rounds)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + num_accepted / len(rounds) if rounds else 1.0,
            "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": len(rounds),
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafted,
            "num_spec_tokens": widest,
        },
        "forerun": stats.as_dict(),
    }


def completion_logprobs(
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    pieces: Sequence[str],
    offset: int = 0,
    *,
    tokenizer: Tokenizer | None,
    top: int,
) -> Json:
    """Return log-probabilities in the format of /v1/completions.

    `entries` holds None for the first token of a prompt, `offset` is where the text of the first
    token begins, and `top` limits the most likely tokens that are listed.
    """
    offsets = []
    for piece in pieces[: len(entries)]:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": [token_text(tokenizer, token) for token in tokens],
        "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
        "top_logprobs": [None if e is None else _top_by_text(e, top, tokenizer) for e in entries],
        "text_offset": offsets,
    }


def _top_by_text(entry: TokenLogprobs, top: int, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Return the most likely tokens by text; of tokens with equal texts the most likely one."""
    found: dict[str, float] = {}
    for token, logprob in list(entry.top.items())[:top]:
        found.setdefault(token_text(tokenizer, token), _finite(logprob))
    return found


def prompt_logprobs(
    entries: PromptLogprobs, top: int, tokenizer: Tokenizer | None
) -> list[Json | None]:
    """Return log-probabilities of a prompt in vLLM's format, with `top` of the likeliest tokens."""

    def position(entry: TokenLogprobs) -> Json:
        ranked = {}
        for rank, (token, logprob) in enumerate(list(entry.top.items())[:top], start=1):
            ranked[token] = (logprob, rank)
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank or 0))
        return {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": token_text(tokenizer, token),
            }
            for token, (logprob, rank) in ranked.items()
        }

    return [None if entry is None else position(entry) for entry in entries]


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> Json:
    """Return log-probabilities in the format of chats."""

    def token_entry(token: int, logprob: float) -> Json:
        return {
            "token": token_text(tokenizer, token),
            "logprob": _finite(logprob),
            "bytes": list(_token_bytes(tokenizer, token)),
        }

    content = []
    for entry in entries:
        top = [token_entry(token, logprob) for token, logprob in entry.top.items()]
        content.append(token_entry(entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


@lru_cache(maxsize=CACHED_TOKENS)
def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return the text of a token, with replacement characters for incomplete bytes."""
    return tokenizer.spell(token) if tokenizer else str(token)


@lru_cache(maxsize=CACHED_TOKENS)
def _token_bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    return tokenizer.token_bytes(token) if tokenizer else str(token).encode()


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def trace(round_: Round, event: Event, tokenizer: Tokenizer | None) -> Json:
    """Return one speculative step for the playground: the draft, its verification, the output.

    Rejected tokens that were drafted from other requests are hidden. The acceptance rate is an
    average over all requests at first, so only the operator gets it.
    """
    draft = round_.draft
    accepted = set(round_.verdict.path)

    def verified(token: int, row: int) -> Json:
        return {
            "id": token,
            "text": token_text(tokenizer, token),
            "p": round(round_.chances[row], 6),
            "noise": round(round_.noises[row], 4),
        }

    nodes = []
    for node in range(1, len(draft)):
        sources = draft.sources[node]
        if node in accepted or not _is_from_other_requests(sources):
            entry = verified(draft.tokens[node], node - 1)
        else:
            entry = {"id": None, "text": "", "p": None, "noise": None}
        nodes.append(
            entry
            | {
                "parent": draft.parents[node],
                "source": _visible_sources(sources, node in accepted),
                "q": round_.drafted[node - 1],
                "accepted": node in accepted,
            }
        )
    emitted = zip(event.token_ids, event.sources, event.pieces, strict=True)
    return {
        "step": round_.step,
        "depth": round_.depth,
        "rate": round(round_.rate, 4) if CALLER.get().operator else None,
        "tokens": [
            {"id": token, "text": text, "source": source} for token, source, text in emitted
        ],
        "draft": nodes,
        "bonus": verified(round_.verdict.tokens[-1], len(draft) - 1),
        "t_draft_ms": round(1e3 * round_.draft_seconds, 4),
        "t_verify_ms": round(1e3 * round_.verify_seconds, 4),
    }


def _is_from_other_requests(sources: str) -> bool:
    """Return True if no proposer that knows this request alone drafted the token."""
    return all(source in OTHERS for source in sources.split("&"))


def _visible_sources(sources: str, accepted: bool) -> str:
    """Drop the proposers that would reveal drafts from other requests."""
    if accepted or _is_from_other_requests(sources):
        return sources
    return "&".join(source for source in sources.split("&") if source not in OTHERS)
