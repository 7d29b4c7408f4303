r"""How byte-level BPE tokenizers of GGUF files cut a text before they merge, by `tokenizer.ggml.pre`.

Each name stands for regular expressions that are applied one after the other, each to what those before have matched
or left. They are llama.cpp's (src/llama-vocab.cpp, src/unicode.cpp), because a file names llama.cpp's and not the
author's: some of its expressions tell upper from lower case in ASCII only, and some have no marks (\p{M}). They are
written for Oniguruma, which tokenizers uses; \d and $ mean other things there and do not occur.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import LoadError, shown

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
    rf"{_START}{_UPPER}*{_SMALL}+{_ANY}?|{_START}{_UPPER}+{_SMALL}*{_ANY}?|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}"
)  # fmt: skip
_MARKS = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
GRANITE = (
    rf"{_START}{_MARKS[0]}*{_MARKS[1]}+{_ANY}?|{_START}{_MARKS[0]}+{_MARKS[1]}*{_ANY}?|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}"
)  # fmt: skip
_WORDS = rf"{_START}[\p{{L}}\p{{M}}]+{_ANY}?"
YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    rf"{_WORDS}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACE}",
)
# the text before a number stays with its first digits until the next expression cuts it
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
AYA = (_THREES, rf"{_WORDS}|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}")
_DEEPSEEK = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK3 = (DIGITS, _HAN_KANA, rf"{_DEEPSEEK}[\r\n]*|{_SPACE}")
SPARK = (DIGITS, _HAN_KANA, rf"{_DEEPSEEK}|[\r\n]|\s+(?!\S)|\s+", DIGIT)
AFMOE = (
    _THREES,
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    rf"{_DEEPSEEK}[\r\n]*|{_SPACE}",
)
_LATIN = (  # Latin, Greek, Cyrillic and what is like them, as DeepSeek lists them
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}"
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}"
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}"
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}"
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
# a blank is no part of these: llama.cpp has written each as a vertical tab by then
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
    rf"{_ANY}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)  # fmt: skip
MINICPM5 = (DIGITS, rf"{_ANY}|{_START}\p{{L}}+|\p{{N}}+|{_SIGNS}[\r\n]*|{_SPACE}")
SUPERBPE = (r"\p{N}+", "[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))")
CHAMELEON = (
    "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
)  # fmt: skip
_HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
KIMI = rf"[{_HAN}]+|{_START}[\p{{L}}&&[^{_HAN}]]+{_ANY}?|{DIGITS}|{_SIGNS}[\r\n]*|{_SPACE}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name of `tokenizer.ggml.pre` says.

    Attributes:
        patterns: regular expressions, applied one after the other.
        ignore_merges: a piece that is a token is taken as it is, whatever the merges say.
        add_bos: a text begins with the beginning-of-text token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _table() -> dict[str, PreTokenizer]:
    lines: list[tuple[str, str | tuple[str, ...], bool, bool]] = [
        ("gpt-2 phi-2 olmo mpt exaone4 modern-bert mellum jais trillion gigachat granite-docling", GPT2, False, False),
        ("a.x-4.0 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe", GPT2, False, False),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (DIGIT, GPT2), False, False),
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", LLAMA3, True, True),
        ("dbrx smaug-bpe chatglm-bpe", LLAMA3, False, False),
        ("glm4 glm5", LLAMA3, True, False),
        ("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2 kormo f2llmv2 solar-open", QWEN2, False, False),
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
    """What a file's `tokenizer.ggml.pre` says; files without it are cut by the expressions of "default".

    Raises LoadError for a name that is not known: a guess would give a model tokens it was not trained on.
    """
    found = PRE_TOKENIZERS.get(name or "default") if name is None or isinstance(name, str) else None
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise LoadError(
            f"the pre-tokenizer {shown(name)} is not known; known are {known}; use another file of this model"
        )
    return found
