"""Build a `tokenizers.Tokenizer` from GGUF metadata that produces the same ids as llama.cpp.

Three kinds are supported: byte-level BPE ("gpt2"), whose merges the file lists; SentencePiece
("llama"), whose scores are converted to merges; and "gemma4", merges over characters with spaces
written as U+2581."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from forerun.errors import LoadError, one_line, shown
from forerun.models.gguf.container import StringArray

Array = np.ndarray[Any, np.dtype[Any]]

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKENS = 1 << 22
SUPPORTED = ("gpt2", "llama", "gemma4")
NO_TOKENIZER = ("none", "no_vocab")  # models whose prompts are token ids

_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"
    " <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>"
    " <eos> <turn|> <|tool_response> [e~["
    " <\uff5cend\u2581of\u2581sentence\uff5c>"
)
_FILL_IN = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c>"
    " <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c>"
    " <SUF> \u2581<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c>"
    " <MID> \u2581<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
ENDS = frozenset(_ENDS.split())  # texts of tokens that end a generation, as llama.cpp has them
FILL_IN = {part: texts.split() for part, texts in _FILL_IN.items()}  # fill-in-the-middle
OLDER_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss shows these
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        model: tokenizer.ggml.model.
        pre: the name of the pre-tokenizer, if the file names one.
        texts: texts by id, all different.
        kinds: int [V], NORMAL to BYTE.
        ids: ids of special tokens by role ("bos", "eos", "eot", "unknown", "padding", ...).
        ends: ids that end a generation, sorted.
    """

    model: str
    pre: str | None
    texts: list[str]
    kinds: Array
    ids: Mapping[str, int]
    ends: tuple[int, ...]


def read_vocabulary(metadata: Mapping[str, Any], rows: int | None = None) -> Vocabulary:
    """Read the tokens of a file, at most the first `rows`. Raises LoadError."""
    model = model_of(metadata)
    texts, total = _texts(metadata, rows), len(metadata[PREFIX + "tokens"])
    kinds = metadata.get(PREFIX + "token_type")
    kinds = None if kinds is None else np.asarray(kinds)
    if kinds is not None and len(kinds) != total:
        raise LoadError(f"the file has {total} tokens, but {len(kinds)} token types; it is broken")
    kinds = np.full(len(texts), NORMAL) if kinds is None else kinds[: len(texts)].copy()
    ids = _ids(metadata, model, len(texts), total)
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
    ends = _ends(ids, named, kinds)
    return Vocabulary(model, metadata.get(PREFIX + "pre"), texts, kinds, ids, ends)


def model_of(metadata: Mapping[str, Any]) -> str:
    """Return tokenizer.ggml.model. Raises LoadError for unsupported kinds."""
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise LoadError(
            "the file has no tokenizer (tokenizer.ggml.model is missing); use one that has it"
        )
    if not isinstance(model, str) or model not in (*SUPPORTED, *NO_TOKENIZER):
        known = ", ".join(SUPPORTED)
        raise LoadError(f"the file's tokenizer {shown(model)} is not supported: known are {known}")
    return model


def _texts(metadata: Mapping[str, Any], rows: int | None) -> list[str]:
    texts = metadata.get(PREFIX + "tokens")
    if not isinstance(texts, list | StringArray) or not texts:
        raise LoadError(
            "the file has no list of tokens (tokenizer.ggml.tokens); it is broken, use another one"
        )
    if len(texts) > MAX_TOKENS:
        raise LoadError(f"the file has {len(texts)} tokens, more than {MAX_TOKENS}")
    texts = list(texts)[:rows]
    return _distinct(texts) if len(set(texts)) < len(texts) or "" in texts else texts


def _distinct(texts: list[str]) -> list[str]:
    """Rename empty texts, and texts that became equal because they were not valid UTF-8."""
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


def _ids(metadata: Mapping[str, Any], model: str, count: int, total: int) -> dict[str, int]:
    """Return the ids of special tokens without padding ids out of range, which real files have."""
    parts = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", *FILL_IN)
    ids = dict(DEFAULT_IDS.get(model, {}))
    for part in parts:
        value = metadata.get(
            f"{PREFIX}{part}_token_id",
            metadata.get(f"{PREFIX}{OLDER_KEYS.get(part, part)}_token_id"),
        )
        if value is None:
            continue
        if isinstance(value, int) and 0 <= value < total:
            ids[part] = value
        elif part in ("bos", "eos"):
            raise LoadError(
                f"the file's {part} token is {shown(value)}, but it has {total} tokens; "
                "it is broken"
            )
    return {part: token for part, token in ids.items() if token < count}


def _named(texts: list[str]) -> dict[str, int]:
    """Return the ids of the texts that have a known meaning."""
    known = ENDS.union(SHOWN, *FILL_IN.values())
    return {text: i for i, text in enumerate(texts) if text in known}


def _ends(ids: Mapping[str, int], named: Mapping[str, int], kinds: Array) -> tuple[int, ...]:
    ends = {
        ids[part] for part in ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom") if part in ids
    }
    ends |= {named[text] for text in ENDS & named.keys()}
    has = {text for text, token in named.items() if token in ends}
    if "<|end|>" in has and has & {"<|call|>", "<|calls|>"} and has & {"<|return|>", "<|flush|>"}:
        ends.discard(named["<|end|>"])  # gpt-oss: it ends a message, others follow
        kinds[named["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= has:  # Gemma 4: a piece of HTML
        ends.discard(named["</s>"])
        kinds[named["</s>"]] = NORMAL
    return tuple(sorted(ends))


_ANY = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # contractions in either case
_LOWER = "'s|'t|'re|'ve|'m|'ll|'d"
_START = r"[^\r\n\p{L}\p{N}]?"  # one character before a word
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _SMALL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_HAN_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

GPT2 = rf"{_LOWER}| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
DIGITS = r"\p{N}{1,3}"
LLAMA3 = rf"{_ANY}|{_START}\p{{L}}+|{DIGITS}|{_SIGNS}[\r\n]*|{_SPACE}"
QWEN2 = rf"{_ANY}|{_START}\p{{L}}+|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACE}"
QWEN35 = rf"{_ANY}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
TEKKEN = rf"{_START}{_UPPER}*{_SMALL}+|{_START}{_UPPER}+{_SMALL}*|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACE}"
GPT4O = (
    rf"{_START}{_UPPER}*{_SMALL}+{_ANY}?|{_START}{_UPPER}+{_SMALL}*{_ANY}?"
    rf"|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}"
)
_MARKS = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
GRANITE = (
    rf"{_START}{_MARKS[0]}*{_MARKS[1]}+{_ANY}?|{_START}{_MARKS[0]}+{_MARKS[1]}*{_ANY}?"
    rf"|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}"
)
_WORDS = rf"{_START}[\p{{L}}\p{{M}}]+{_ANY}?"
YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}"
    r"\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|["
    r"\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    rf"{_WORDS}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACE}",
)
# The text before a number stays with its first digits until the next expression splits it.
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
AYA = (_THREES, rf"{_WORDS}|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}")
_DEEPSEEK = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
DEEPSEEK3 = (DIGITS, _HAN_KANA, rf"{_DEEPSEEK}[\r\n]*|{_SPACE}")
SPARK = (DIGITS, _HAN_KANA, rf"{_DEEPSEEK}|[\r\n]|\s+(?!\S)|\s+", DIGIT)
AFMOE = (
    _THREES,
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    rf"{_DEEPSEEK}[\r\n]*|{_SPACE}",
)
_LATIN = (  # Latin, Greek, Cyrillic and similar scripts, as DeepSeek lists them
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}"
    r"\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}"
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}"
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}"
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}"
    r"\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}"
    r"\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}"
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
# These classes exclude spaces: llama.cpp has replaced each with a vertical tab by then.
_EAST = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^\s]]+"
DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_LATIN}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}&&[^\s]]+",
    r"\s+\z",
    _EAST,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_RUNS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
JAIS2 = rf"{_ANY}|{_START}\p{{L}}+|{DIGITS}|{_SIGNS}[\r\n]*|\s*[\r\n]+|{_RUNS}|\s{{1,2}}(?!\S)|\s"
BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
    rf"|{_START}\p{{L}}+|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = rf"{_ANY}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
UFAKZEKA = rf"{_START}\p{{L}}+|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACE}"
EXAONE_MOE = (
    rf"{_ANY}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    rf"|\p{{N}}|{_SIGNS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
MINICPM5 = (DIGITS, rf"{_ANY}|{_START}\p{{L}}+|\p{{N}}+|{_SIGNS}[\r\n]*|{_SPACE}")
SUPERBPE = (r"\p{N}+", "[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))")
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
KIMI = rf"[{_HAN}]+|{_START}[\p{{L}}&&[^{_HAN}]]+{_ANY}?|{DIGITS}|{_SIGNS}[\r\n]*|{_SPACE}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer of `tokenizer.ggml.pre`.

    Attributes:
        patterns: regular expressions that split the text, applied one after the other.
        ignore_merges: a piece that is in the vocabulary is not split by merges.
        add_bos: texts begin with the bos token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _table() -> dict[str, PreTokenizer]:
    """Expand lines of (names, patterns, ignore_merges, add_bos)."""
    lines: list[tuple[str, str | tuple[str, ...], bool, bool]] = [
        ("gpt-2 phi-2 olmo mpt exaone4 modern-bert mellum jais trillion", GPT2, False, False),
        ("gigachat granite-docling a.x-4.0 jina-es jina-de jina-v2-es", GPT2, False, False),
        ("jina-v2-de jina-v1-en jina-v2-code roberta-bpe", GPT2, False, False),
        ("smollm starcoder refact command-r codeshell exaone", (DIGIT, GPT2), False, False),
        ("minerva-7b mellum2", (DIGIT, GPT2), False, False),
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral", LLAMA3, True, True),
        ("midm-2.0 lfm2 jina-v5-nano", LLAMA3, True, True),
        ("dbrx smaug-bpe chatglm-bpe", LLAMA3, False, False),
        ("glm4 glm5", LLAMA3, True, False),
        ("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2", QWEN2, False, False),
        ("kormo f2llmv2 solar-open", QWEN2, False, False),
        ("qwen35", QWEN35, False, False),
        ("laguna", (r"[^\n]+|\n+", QWEN2), False, False),
        ("tekken", TEKKEN, True, True),
        ("gpt-4o llama4 minimax-m2 kanana2 talkie", GPT4O, False, False),
        ("granite-embed-multi-97m", GRANITE, True, False),
        ("tiny_aya cohere2moe", AYA, False, False),
        ("youtu", YOUTU, True, False),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", DEEPSEEK3, False, False),
        ("deepseek-llm", DEEPSEEK, False, False),
        ("deepseek-coder", DEEPSEEK_CODER, False, False),
        ("spark2_5", SPARK, False, False),
        ("afmoe", AFMOE, False, False),
        ("falcon", FALCON, False, False),
        ("default", DEFAULT, False, False),
        ("bloom gpt3-finnish poro-chat", BLOOM, False, False),
        ("viking", (BLOOM, DIGIT), False, False),
        ("jais-2", JAIS2, False, False),
        ("bailingmoe bailingmoe2 llada-moe", BAILING, False, False),
        ("seed-coder", SEED, False, False),
        ("ufakzeka", UFAKZEKA, False, False),
        ("exaone-moe", EXAONE_MOE, False, False),
        ("minicpm5", MINICPM5, True, False),
        ("superbpe", SUPERBPE, False, False),
        ("kimi-k2", KIMI, False, False),
        ("chameleon", CHAMELEON, False, True),
    ]
    return {
        name: PreTokenizer((found,) if isinstance(found, str) else found, ignore_merges, add_bos)
        for names, found, ignore_merges, add_bos in lines
        for name in names.split()
    }


PRE_TOKENIZERS = _table()


def find_pretokenizer(name: str | None) -> PreTokenizer:
    """Return the pre-tokenizer of `tokenizer.ggml.pre`, "default" if the file names none.

    Raises LoadError for unknown names: a guess would give tokens the model was not trained on."""
    found = PRE_TOKENIZERS.get(name or "default") if name is None or isinstance(name, str) else None
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise LoadError(
            f"the pre-tokenizer {shown(name)} is not known; known are {known}; use another file of "
            "this model"
        )
    return found


# odd, hence invertible modulo 2^64
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def merges_by_score(tokens: list[str], scores: Array, joins: Array) -> list[tuple[str, str]]:
    """Convert SentencePiece scores to BPE merges, best score first, then lowest id.

    Args:
        tokens: texts, all different.
        scores: float [V].
        joins: bool [V], True where a token may be produced by joining two.
    """
    token, left, right = _pairs(tokens, joins)
    order = np.lexsort((token, -scores[token]))
    text = tokens.__getitem__
    return list(zip(map(text, left[order].tolist()), map(text, right[order].tolist()), strict=True))


def _pairs(tokens: list[str], joins: Array) -> tuple[Array, Array, Array]:
    """Find every token that is the concatenation of two tokens. -> ids of it, left, right

    Texts are compared by 64-bit polynomial hashes, so that the hashes of a text's two parts follow
    from those of its prefixes, and the search takes time linear in the total length."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    characters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32).astype(np.uint64)
    owner = np.repeat(np.arange(len(tokens)), lengths)
    position = np.arange(len(characters)) - starts[owner]
    longest = int(lengths.max(initial=0)) + 1
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(_mixed(characters) * _powers(_BASE, longest)[position], out=sums[1:])

    candidates = np.flatnonzero(joins | (lengths == 1))
    hashes = sums[ends[candidates]] - sums[starts[candidates]]
    by_hash = np.argsort(hashes)
    hashes, candidates = hashes[by_hash], candidates[by_hash]

    def find(wanted: Array) -> Array:
        """Return the ids of the candidates with these hashes, -1 for none."""
        if not len(candidates):
            return np.full(len(wanted), -1)
        at = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
        return np.where(hashes[at] == wanted, candidates[at], -1)

    at = np.flatnonzero((position > 0) & joins[owner])  # every place where a token may be cut
    left = find(sums[at] - sums[starts[owner[at]]])
    at, left = at[left >= 0], left[left >= 0]
    right = find((sums[ends[owner[at]]] - sums[at]) * _powers(_INVERSE, longest)[position[at]])
    found = right >= 0
    return owner[at[found]], left[found], right[found]


def _mixed(values: Array) -> Array:
    values = (values + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(29)
    return values * np.uint64(0x94D049BB133111EB)


def _powers(base: int, count: int) -> Array:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
# special tokens of Phi-3 that do not swallow the spaces behind them
PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
TEMPLATE = "tokenizer.chat_template"


def build_tokenizer(metadata: Mapping[str, Any], rows: int | None = None) -> Tokenizer | None:
    """Build the tokenizer of a file from at most its first `rows` tokens; None if it has none.

    Special tokens in a text are recognised (llama.cpp's parse_special); with the tokenizer's
    `encode_special_tokens` set, they are text. Settings that a file lacks are those of llama.cpp.
    Raises LoadError for broken or unsupported tokenizers."""
    if model_of(metadata) in NO_TOKENIZER:
        return None
    try:
        vocabulary = read_vocabulary(metadata, rows)
        build = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}[vocabulary.model]
        tokenizer = build(metadata, vocabulary)
        _add_tokens(tokenizer, metadata, vocabulary)
        _add_ends(tokenizer, metadata, vocabulary)
    except LoadError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        why = one_line(str(error))
        raise LoadError(f"the file's tokens and merges do not match: {why}; use another") from None
    return tokenizer


def end_tokens(metadata: Mapping[str, Any], rows: int | None = None) -> tuple[int, ...]:
    """Return the ids that end a generation, sorted: those the file names, and those llama.cpp knows
    by their text. Raises LoadError as `build_tokenizer` does."""
    return () if model_of(metadata) in NO_TOKENIZER else read_vocabulary(metadata, rows).ends


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token, unk_token and pad_token, as far as the file names them."""
    if model_of(metadata) in NO_TOKENIZER:
        return {}
    vocabulary = read_vocabulary(metadata)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {
        name: vocabulary.texts[vocabulary.ids[part]]
        for part, name in names.items()
        if part in vocabulary.ids
    }


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the file's chat templates by name, "default" for the usual one."""
    names = {
        key.removeprefix(TEMPLATE + "."): key for key in metadata if key.startswith(TEMPLATE + ".")
    }
    if TEMPLATE in metadata:
        names["default"] = TEMPLATE
    return {name: str(metadata[key]) for name, key in names.items()}


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    pre = find_pretokenizer(vocabulary.pre)
    ids = {text: i for i, text in enumerate(vocabulary.texts)}
    merges = _merges(metadata, ids)
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_as_letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    texts, scores = vocabulary.texts, metadata.get(PREFIX + "scores")
    if scores is None or len(scores) != len(metadata[PREFIX + "tokens"]):
        count = "none" if scores is None else len(scores)
        raise LoadError(f"the file has {len(texts)} tokens, but {count} scores; it is broken")
    # no text is tokenized as a control or byte token
    joins = ~np.isin(vocabulary.kinds, (UNKNOWN, CONTROL, BYTE))
    merges = merges_by_score(texts, np.asarray(scores, np.float32)[: len(texts)], joins)
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))
    return _on_characters({text: i for i, text in enumerate(texts)}, merges, vocabulary, prefix)


def _on_characters(
    ids: dict[str, int], merges: list[tuple[str, str]], vocabulary: Vocabulary, prefix: bool
) -> Tokenizer:
    """Build BPE over characters, with byte tokens for unknown ones.

    prefix: put a space before text at the beginning and behind special tokens."""
    unknown = vocabulary.ids.get("unknown")
    unknown_text = None if unknown is None else vocabulary.texts[unknown]
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _gemma4(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """Build BPE over characters within lines; runs of newlines are one token or single newlines."""
    ids = {text: i for i, text in enumerate(vocabulary.texts)}
    runs = [n for n in range(2, 256) if "\n" * n in ids]
    joined = [
        ("\n" * i, "\n" * (n - i))
        for n in runs
        for i in range(1, n)
        if {"\n" * i, "\n" * (n - i)} <= ids.keys()
    ]
    tokenizer = _on_characters(ids, [*_merges(metadata, ids), *joined], vocabulary, prefix=False)
    whole = "|".join(rf"(?<!\n)\n{{{n}}}(?!\n)" for n in runs)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"[^\n]+|{whole}|\n" if runs else r"[^\n]+|\n"), "isolated"
    )
    return tokenizer


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the file's merges: the first of equal ones, and none of tokens beyond `rows`."""
    found = metadata.get(PREFIX + "merges")
    if not isinstance(found, list | StringArray):
        raise LoadError("the file has no merges (tokenizer.ggml.merges); use another one")
    merges = [_split_merge(merge) for merge in dict.fromkeys(found)]
    if len(ids) < len(metadata[PREFIX + "tokens"]):
        merges = [
            (left, right) for left, right in merges if {left, right, left + right} <= ids.keys()
        ]
    return merges


def _split_merge(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # a token may begin with a space
    if at < 0:
        raise LoadError(f"the file's merge {shown(merge)} is not of two tokens; it is broken")
    return merge[:at], merge[at + 1 :]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Add the tokens that are matched before a text is pre-tokenized."""
    name = str(metadata.get("general.name", "")).lower()
    strip = "phi-3" in name or "phi3" in name  # llama.cpp relies on the name too
    texts, kinds = vocabulary.texts, vocabulary.kinds
    for wanted, special in ((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False):
        added = [
            AddedToken(
                texts[i],
                normalized=False,
                special=special,
                rstrip=strip and texts[i] not in PHI3_PLAIN,
            )
            for i in np.flatnonzero(np.isin(kinds, wanted)).tolist()
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Add the bos and eos tokens that the model expects around a text."""
    begins = vocabulary.model in ("llama", "gemma4") or (
        vocabulary.model == "gpt2"
        and find_pretokenizer(vocabulary.pre).add_bos
        and "bos" in vocabulary.ids
    )
    if vocabulary.model != "gemma4":  # llama.cpp adds it whatever the file says
        begins = bool(metadata.get(PREFIX + "add_bos_token", begins))
    ends = bool(metadata.get(PREFIX + "add_eos_token", False))
    for wanted, part in (begins, "bos"), (ends, "eos"):
        if wanted and part not in vocabulary.ids:
            raise LoadError(f"the file adds its {part} token to texts, but names none; use another")
    pieces = [*(["bos"] if begins else []), None, *(["eos"] if ends else [])]
    if len(pieces) > 1:
        used = [(vocabulary.texts[vocabulary.ids[p]], vocabulary.ids[p]) for p in pieces if p]
        single = ["$A" if p is None else vocabulary.texts[vocabulary.ids[p]] for p in pieces]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
