r"""How byte-level BPE tokenizers of GGUF files cut a text before they merge, by `tokenizer.ggml.pre`.

Each name stands for regular expressions that are applied one after the other, each to what those before have matched
or left. They are llama.cpp's (src/llama-vocab.cpp and src/unicode.cpp), because a file names llama.cpp's and not the
author's: its expressions know letters of either case only in ASCII, for instance, and no marks where it says so. Written
for Oniguruma, which tokenizers uses; \d and $ mean other things there and do not occur.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import LoadError

_ANY = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # contractions in either case
_LOWER = "'s|'t|'re|'ve|'m|'ll|'d"
_START = r"[^\r\n\p{L}\p{N}]?"  # one character before a word
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _SMALL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
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
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    rf"{_WORDS}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACE}",
)
# the text before a number stays with its first digits until the next expression cuts it
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
AYA = (_THREES, rf"{_WORDS}|{DIGITS}|{_SIGNS}[\r\n/]*|{_SPACE}")
_DEEPSEEK = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK3 = (DIGITS, "[一-龥぀-ゟ゠-ヿ]+", rf"{_DEEPSEEK}[\r\n]*|{_SPACE}")
SPARK = (DIGITS, "[一-龥぀-ゟ゠-ヿ]+", rf"{_DEEPSEEK}|[\r\n]|\s+(?!\S)|\s+", DIGIT)
AFMOE = (
    _THREES,
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    rf"{_DEEPSEEK}[\r\n]*|{_SPACE}",
)
_LATIN = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    r"ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EAST = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK = (r"[\r\n]", rf"\s?[{_LATIN}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+\z", _EAST, r"\p{N}+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
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
    lines: list[tuple[str, str | tuple[str, ...]]] = [
        ("gpt-2 phi-2 olmo mpt exaone4 modern-bert mellum jais trillion gigachat granite-docling a.x-4.0", GPT2),
        ("jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe", GPT2),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (DIGIT, GPT2)),
        ("dbrx smaug-bpe chatglm-bpe", LLAMA3),
        ("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2 kormo f2llmv2 solar-open", QWEN2),
        ("laguna", (r"[^\n]+|\n+", QWEN2)),
        ("qwen35", QWEN35),
        ("gpt-4o llama4 minimax-m2 kanana2 talkie", GPT4O),
        ("tiny_aya cohere2moe", AYA),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", DEEPSEEK3),
        ("deepseek-llm", DEEPSEEK),
        ("deepseek-coder", DEEPSEEK_CODER),
        ("spark2_5", SPARK),
        ("afmoe", AFMOE),
        ("falcon", FALCON),
        ("default", DEFAULT),
        ("bloom gpt3-finnish poro-chat", BLOOM),
        ("viking", (BLOOM, DIGIT)),
        ("jais-2", JAIS2),
        ("bailingmoe bailingmoe2 llada-moe", BAILING),
        ("seed-coder", SEED),
        ("ufakzeka", UFAKZEKA),
        ("exaone-moe", EXAONE_MOE),
        ("superbpe", SUPERBPE),
        ("kimi-k2", KIMI),
    ]
    table = {
        name: PreTokenizer((found,) if isinstance(found, str) else found) for names, found in lines for name in names.split()
    }
    for name in "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano".split():
        table[name] = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
    table["tekken"] = PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True)
    table["chameleon"] = PreTokenizer(CHAMELEON, add_bos=True)
    for name, found in ("glm4", LLAMA3), ("glm5", LLAMA3), ("granite-embed-multi-97m", GRANITE):
        table[name] = PreTokenizer((found,), ignore_merges=True)
    table["youtu"] = PreTokenizer(YOUTU, ignore_merges=True)
    table["minicpm5"] = PreTokenizer(MINICPM5, ignore_merges=True)
    return table


PRE_TOKENIZERS = _table()


def find_pretokenizer(name: str | None) -> PreTokenizer:
    """What a file's `tokenizer.ggml.pre` says; files without it are cut by the expressions of "default".

    Raises LoadError for a name that is not known: a guess would give a model tokens it was not trained on.
    """
    if not name:
        return PRE_TOKENIZERS["default"]
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise LoadError(f"the pre-tokenizer {name!r} is not known; known are {known}; use another file of this model")
    return PRE_TOKENIZERS[name]
