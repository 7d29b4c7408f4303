"""Sampling parameters of a request, validated when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from forerun.errors import RequestError, shorten, suggest
from forerun.sampling.grammar import Grammar

# llama.cpp's defaults, for values that neither the user nor the model's authors set.
DEFAULT: Mapping[str, float] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
)
# Maximum number of tokens to generate where a request gives none, in the library, on the command
# line, and on the server wherever an API defines no other default and nothing else ends the text.
DEFAULT_MAX_TOKENS = 512
# Greedy decoding without filters.
NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
)
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 100.0),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "n": (1, 1024),
}
_INTEGERS = ("top_k", "max_tokens", "min_tokens", "n", "seed", "logprobs", "prompt_logprobs")


class Sampling(NamedTuple):
    """Parameters by which a token is drawn from a row of logits; by default greedily.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: keeps this many likeliest tokens, with ties at the border; 0 keeps all.
        top_p: keeps of these the likeliest until their probability reaches this.
        min_p: keeps of these the tokens that are at least this times as likely as the likeliest.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of sampling, and of when to stop.

    Temperature, top_k, top_p, min_p and repetition_penalty are None if they are not given. `LLM`
    and the server then take the value that the model's authors set, or else forerun's default
    (`resolved`). The engine itself, used without an `LLM`, takes None for the value that changes
    nothing: greedy decoding without filters.

    Filters apply in this order: grammar, logit_bias, penalties, min_tokens, temperature, top_k,
    top_p, min_p. All of them apply at every position of a draft with the text before it, so
    speculation never changes their effect.

    Args:
        temperature: Divisor of the logits, at most 100: higher values give more varied text, 0
            always takes the likeliest token (greedy decoding).
        top_k: Keep only the k likeliest tokens; 0 keeps all. Ties at the border are kept.
        top_p: Keep only the smallest set of likeliest tokens whose probability reaches this value
            (nucleus sampling), over 0 and at most 1; 1 keeps all.
        min_p: Keep only tokens at least this many times as likely as the likeliest, from 0 to 1; 0
            keeps all.
        presence_penalty: Amount subtracted from the logit of every token in the output so far, from
            -2 to 2.
        frequency_penalty: Amount subtracted from a token's logit once per occurrence in the output
            so far, from -2 to 2.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens in
            prompt or output, from 0.001 to 100; above 1 makes repetition less likely.
        logit_bias: Amounts from -100 to 100 added to the logits of tokens: {token id: amount}, on
            the command line ID=AMOUNT, which may be repeated.
        max_tokens: Maximum number of tokens to generate; fewer if the context is full. By default
            512.
        min_tokens: Number of tokens before which end-of-text and stop_token_ids cannot be drawn,
            unless a grammar allows nothing else.
        stop: String that ends the text and is left out of it, or several of them; they may cross
            token borders.
        stop_token_ids: Token ids that end the text; the last one stays in token_ids and out of the
            text.
        ignore_eos: Do not stop at the model's own end-of-text token.
        seed: Seed of the random draws, from 0 to 2**63 - 1: the same seed and prompt give the same
            tokens. By default one is drawn, which the result reports.
        n: Number of completions; completion i uses a seed derived from seed and i.
        logprobs: Number of likeliest tokens to report beside each chosen token, from 0 to 20. By
            default no log-probabilities are reported.
        prompt_logprobs: The same for each token of the prompt. max_tokens may then be 0: the prompt
            is read and nothing is generated.
        grammar: Form of the output: Grammar.of("json_schema", {...}), Grammar.of("json_object"), or
            of a "regex", a "lark" grammar or a "choice" of strings. JSON comes without optional
            white space.

    Raises:
        RequestError: a value is out of its range or of the wrong type.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        if not isinstance(self.grammar, Grammar | None):
            raise RequestError(
                f"grammar={self.grammar!r} must be a Grammar: make one with Grammar.of(kind, value)"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={shorten(self.ignore_eos)} must be true or false")
        self._check_bias()

    def _check_numbers(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and (name in DEFAULT or name == "max_tokens"):
                continue
            if name == "max_tokens" and value == 0 and self.prompt_logprobs is not None:
                continue
            if not _is_number(value) or not low <= value <= high:
                raise RequestError(
                    f"{name}={shorten(value)} is out of range: give a number from {low} to {high}"
                )
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and not _is_integer(value):
                raise RequestError(f"{name}={shorten(value)} must be a whole number")
        if self.top_p == 0:
            raise RequestError(
                f"top_p={self.top_p} is out of range: give a number over 0 and at most 1"
            )
        if self.min_tokens > self.length_limit:
            raise RequestError(
                f"min_tokens={self.min_tokens} is over max_tokens={self.length_limit}: lower it"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise RequestError(
                f"seed={shorten(self.seed)} is out of range: give a whole number from 0 to"
                " 2**63 - 1"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 20:
                raise RequestError(
                    f"{name}={shorten(value)} is out of range: give 0 to 20, or None"
                )

    def _check_stops(self) -> None:
        if not isinstance(self.stop, (str, list, tuple)):
            raise RequestError(f"stop={shorten(self.stop)} must be a string or a list of strings")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise RequestError(
                f"stop={shorten(self.stop)} must be strings, none of them empty: an empty one would"
                " stop everything"
            )
        token_ids = self.stop_token_ids
        if not isinstance(token_ids, (list, tuple)):
            raise RequestError(f"stop_token_ids={shorten(token_ids)} must be a list")
        if not all(_is_integer(token) for token in token_ids):
            raise RequestError(f"stop_token_ids={shorten(token_ids)} must be whole numbers")

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if not isinstance(bias, dict) or not all(_is_integer(token) for token in bias):
            raise RequestError(f"logit_bias={shorten(bias)} must map token ids to amounts")
        for token, amount in bias.items():
            if not _is_number(amount) or not -100 <= amount <= 100:
                raise RequestError(
                    f"logit_bias of token {shorten(token)} is {shorten(amount)}: give a number from"
                    " -100 to 100"
                )

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Return SamplingParams of keyword arguments. Raises RequestError for unknown names, with
        the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise RequestError(
                    f"there is no sampling parameter {shorten(name)}: {suggest(name, known)}"
                )
        return cls(**options)

    @classmethod
    def pure(cls, **options: Any) -> SamplingParams:
        """Return SamplingParams that nothing is added to, for measurements: greedy decoding unless
        a temperature is given, and no other filter, whatever the model's authors set."""
        return cls.of(**{**NEUTRAL, **options})

    def resolved(self, advised: Mapping[str, Any]) -> SamplingParams:
        """Return the same parameters with a value for every field that is not given: the one in
        `advised`, which are the settings of the model's authors, or else forerun's default."""
        chosen = {
            name: advised.get(name, value)
            for name, value in DEFAULT.items()
            if getattr(self, name) is None
        }
        return replace(self, **chosen) if chosen else self

    @property
    def length_limit(self) -> int:
        """`max_tokens`, or its default if it is not given."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling_temperature(self) -> float:
        """The temperature; 0 for greedy decoding, also if it is so small that dividing by it means
        nothing."""
        return 0.0 if self.temperature is None or self.temperature < 1e-6 else self.temperature

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.sampling_temperature == 0

    @property
    def sampling(self) -> Sampling:
        """Temperature, top_k, top_p and min_p as the engine applies them."""
        if self.greedy:
            return GREEDY
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(self.sampling_temperature, self.top_k or 0, top_p, self.min_p or 0.0)

    @property
    def has_penalties(self) -> bool:
        """True if a penalty depends on the text so far."""
        if self.repetition_penalty not in (None, 1.0):
            return True
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)
