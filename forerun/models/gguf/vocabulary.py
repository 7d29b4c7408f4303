"""What a GGUF file says of its tokens, checked: texts, kinds, and the ids that have a part to play.

The rules are llama.cpp's (src/llama-vocab.cpp, `llama_vocab::impl::load`), those that go by a token's text included:
files often lack the key, or have the wrong kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.errors import LoadError, shown
from forerun.models.gguf.strings import Strings

Array = np.ndarray[Any, np.dtype[Any]]

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MOST_TOKENS = 1 << 22
READ = ("gpt2", "llama", "gemma4")
LACKING = ("none", "no_vocab")  # files of models whose prompts are token ids

_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>"
    " <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~["
    " <\uff5cend\u2581of\u2581sentence\uff5c>"
)
_FILL_IN = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE>"
    " <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF>"
    " <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID>"
    " <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
ENDS = frozenset(_ENDS.split())  # texts of tokens that end a generation
FILL_IN = {part: texts.split() for part, texts in _FILL_IN.items()}  # and of those for filling in
OLDER = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # keys of older files
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # of gpt-oss: part of the text
DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        model: what `tokenizer.ggml.model` says.
        pre: the name of the pre-tokenizer, None where the file has none.
        texts: by id, all different.
        kinds: int [V], NORMAL to BYTE.
        ids: ids by their part ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", ...).
        ends: ids that end a generation, sorted.
    """

    model: str
    pre: str | None
    texts: list[str]
    kinds: Array
    ids: Mapping[str, int]
    ends: tuple[int, ...]


def read_vocabulary(metadata: Mapping[str, Any], rows: int | None = None) -> Vocabulary:
    """The tokens of a file, of more than `rows` the first. Raises LoadError."""
    model = model_of(metadata)
    texts, whole = _texts(metadata, rows), len(metadata[PREFIX + "tokens"])
    kinds = metadata.get(PREFIX + "token_type")
    kinds = None if kinds is None else np.asarray(kinds)
    if kinds is not None and len(kinds) != whole:
        raise LoadError(f"the file has {whole} tokens, but {len(kinds)} kinds of them; it is broken, use another one")
    kinds = np.full(len(texts), NORMAL) if kinds is None else kinds[: len(texts)].copy()
    ids = _ids(metadata, model, len(texts), whole)
    named = _named(texts)
    for part, known in FILL_IN.items():
        candidates = [named[text] for text in known if text in named]
        if part not in ids and candidates:
            ids[part] = min(candidates)
            kinds[ids[part]] = CONTROL
    for text in ENDS & named.keys():
        kinds[named[text]] = CONTROL
    for text in named.keys() & SHOWN:
        kinds[named[text]] = USER_DEFINED
    return Vocabulary(model, metadata.get(PREFIX + "pre"), texts, kinds, ids, _ends(ids, named, kinds))


def model_of(metadata: Mapping[str, Any]) -> str:
    """The kind of tokenizer. Raises LoadError for one that forerun does not read."""
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise LoadError("the file has no tokenizer (tokenizer.ggml.model is missing); use one that has it")
    if not isinstance(model, str) or model not in (*READ, *LACKING):
        read = ", ".join(READ)
        raise LoadError(f"the file's tokenizer is a {shown(model)}, which forerun does not read: it reads {read}")
    return model


def _texts(metadata: Mapping[str, Any], rows: int | None) -> list[str]:
    texts = metadata.get(PREFIX + "tokens")
    if not isinstance(texts, list | Strings) or not texts:
        raise LoadError("the file has no list of tokens (tokenizer.ggml.tokens); it is broken, use another one")
    if len(texts) > MOST_TOKENS:
        raise LoadError(f"the file has {len(texts)} tokens, more than the {MOST_TOKENS} that forerun takes")
    texts = list(texts)[:rows]
    return _apart(texts) if len(set(texts)) < len(texts) or "" in texts else texts


def _apart(texts: list[str]) -> list[str]:
    """The texts without those that are empty, and those that became equal because they were no UTF-8."""
    seen: dict[str, int] = {}
    found = []
    for i, text in enumerate(texts):
        if not text:
            text = f"[EMPTY_{i}]"
        elif text in seen:
            if "\N{REPLACEMENT CHARACTER}" not in text:
                both = f"tokens {seen[text]} and {i} of the file are both {shown(text)}"
                raise LoadError(f"{both}; it is broken, use another")
            text = f"[BROKEN_{i}]"
        seen[text] = i
        found.append(text)
    return found


def _ids(metadata: Mapping[str, Any], model: str, count: int, whole: int) -> dict[str, int]:
    """Ids that the file names; those out of range, which do occur for padding, count as none."""
    parts = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", *FILL_IN)
    ids = dict(DEFAULTS.get(model, {}))
    for part in parts:
        value = metadata.get(f"{PREFIX}{part}_token_id", metadata.get(f"{PREFIX}{OLDER.get(part, part)}_token_id"))
        if value is None:
            continue
        if isinstance(value, int) and 0 <= value < whole:
            ids[part] = value
        elif part in ("bos", "eos"):
            raise LoadError(f"the file names token {shown(value)} as its {part} token, but has {whole}; it is broken")
    return {part: token for part, token in ids.items() if token < count}


def _named(texts: list[str]) -> dict[str, int]:
    """Ids of those texts that the rules know."""
    known = ENDS.union(SHOWN, *FILL_IN.values())
    return {text: i for i, text in enumerate(texts) if text in known}


def _ends(ids: Mapping[str, int], named: Mapping[str, int], kinds: Array) -> tuple[int, ...]:
    ends = {ids[part] for part in ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom") if part in ids}
    ends |= {named[text] for text in ENDS & named.keys()}
    has = {text for text, token in named.items() if token in ends}
    if "<|end|>" in has and has & {"<|call|>", "<|calls|>"} and has & {"<|return|>", "<|flush|>"}:
        ends.discard(named["<|end|>"])  # gpt-oss: it ends a message, others follow
        kinds[named["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= has:  # Gemma 4: a piece of HTML
        ends.discard(named["</s>"])
        kinds[named["</s>"]] = NORMAL
    return tuple(sorted(ends))
