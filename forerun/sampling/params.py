"""SamplingParams: what a caller may ask of one generation, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from forerun.errors import RequestError, brief, nearest
from forerun.sampling.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. The defaults are greedy decoding.

    Order of the filters: grammar, logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p. All of them
    act at every position of a draft with the text that would stand before it, so speculation never changes what they
    do.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it. At most 100.
        top_k: keep the k likeliest tokens; 0 keeps all. Ties at the border are kept.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p (nucleus sampling).
        min_p: keep tokens at least min_p times as likely as the likeliest.
        presence_penalty: subtracted from the logit of every token in the output so far. -2 to 2.
        frequency_penalty: subtracted once per occurrence in the output so far. -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output. 0.001 to 100.
        logit_bias: {token id: amount added to its logit}. -100 to 100.
        max_tokens: most tokens to produce.
        min_tokens: end-of-text and stop_token_ids cannot be drawn before this many, unless a grammar allows no more.
        stop: a string or strings that end the text and are left out of it; may cross token borders.
        stop_token_ids: tokens that end the text; the last one stays in token_ids and out of the text.
        ignore_eos: do not stop at the model's own end-of-text token.
        seed: same seed, same prompt, same tokens. None draws one, and the result says which.
        n: how many completions; completion i uses a seed derived from seed and i.
        logprobs: None, or how many of the likeliest tokens to report beside each chosen token (0 to 20).
        prompt_logprobs: None, or the same for each token of the prompt (0 to 20). max_tokens may then be 0: the prompt
            is read and nothing is generated.
        grammar: what the output must look like: Grammar.of("json_schema", {...}), Grammar.of("json_object"), or of a
            "regex", a "lark" grammar or a "choice" of strings. JSON comes without white space that may be left out.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int = 128
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
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if name == "max_tokens" and value == 0 and self.prompt_logprobs is not None:
                continue
            if not _is_number(value) or not low <= value <= high:
                raise RequestError(f"{name}={brief(value)} is out of range: give a number from {low} to {high}")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and not _is_whole(value):
                raise RequestError(f"{name}={brief(value)} must be a whole number")
        if self.top_p == 0:
            raise RequestError(f"top_p={self.top_p} is out of range: give a number over 0 and at most 1")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}: lower it")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise RequestError(f"seed={brief(self.seed)} is out of range: give a whole number from 0 to 2**63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 20:
                raise RequestError(f"{name}={brief(value)} is out of range: give 0 to 20, or None")
        if not isinstance(self.grammar, Grammar | None):
            raise RequestError(f"grammar={self.grammar!r} must be a Grammar: make one with Grammar.of(kind, value)")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={brief(self.ignore_eos)} must be true or false")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(
                f"stop={brief(self.stop)} must be strings, none of them empty: an empty one would stop everything"
            )
        if not all(_is_whole(token) for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids={brief(self.stop_token_ids)} must be whole numbers")
        if not isinstance(self.logit_bias, dict) or not all(_is_whole(token) for token in self.logit_bias):
            raise RequestError(f"logit_bias={brief(self.logit_bias)} must map token ids to amounts")
        for token, amount in self.logit_bias.items():
            if not _is_number(amount) or not -100 <= amount <= 100:
                raise RequestError(
                    f"logit_bias of token {brief(token)} is {brief(amount)}: give a number from -100 to 100"
                )

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """SamplingParams from keyword arguments; an unknown name is an error that names the nearest."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise RequestError(f"there is no sampling parameter {brief(name)}: {nearest(name, known)}")
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever it was given as."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Temperature 0, or so near to it that dividing by it means nothing."""
        return self.temperature < 1e-6

    @property
    def heat(self) -> float:
        """The temperature, and 0 where they are greedy."""
        return 0.0 if self.greedy else self.temperature

    @property
    def unfiltered(self) -> bool:
        """Whether every token can be drawn: no top-k, top-p or min-p."""
        return not self.top_k and self.top_p >= 1 and not self.min_p

    @property
    def penalised(self) -> bool:
        """Whether any penalty depends on the text so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 1 << 31),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.001, 100.0),
    ("max_tokens", 1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("n", 1, 1024),
)
_WHOLE = ("top_k", "max_tokens", "min_tokens", "n", "seed", "logprobs", "prompt_logprobs")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """A list or tuple as a tuple."""
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name}={brief(value)} must be a list")
    return tuple(value)
