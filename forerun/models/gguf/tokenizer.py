"""Tokenizers of GGUF files: from metadata to a `tokenizers.Tokenizer` that gives llama.cpp's ids, without a detour.

Two kinds are read: byte-level BPE ("gpt2"), whose merges the file lists, and SentencePiece ("llama"), whose scores are
made into merges (`spm`). "gemma4" is in between: merges over characters, spaces written as U+2581.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from forerun.errors import LoadError, one_line, shown
from forerun.models.gguf.pretokenizers import find_pretokenizer
from forerun.models.gguf.spm import merges_by_score
from forerun.models.gguf.strings import Strings
from forerun.models.gguf.vocabulary import (
    BYTE,
    CONTROL,
    LACKING,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    model_of,
    read_vocabulary,
)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that leave the spaces after them
TEMPLATE = "tokenizer.chat_template"


def build_tokenizer(metadata: Mapping[str, Any], rows: int | None = None) -> Tokenizer | None:
    """The tokenizer of a file, of more tokens than `rows` the first; None where it says that its model has none.

    Special tokens in a text are found (llama.cpp's parse_special); with the tokenizer's `encode_special_tokens` set,
    they are text. What a file leaves open is decided as llama.cpp does. Raises LoadError for a tokenizer that is
    broken, or of a kind that forerun does not read.
    """
    if model_of(metadata) in LACKING:
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
        raise LoadError(f"the file's tokens and merges do not fit together: {why}; use another file") from None
    return tokenizer


def end_tokens(metadata: Mapping[str, Any], rows: int | None = None) -> tuple[int, ...]:
    """All ids that end a generation, sorted: those that the file names, and those that llama.cpp knows by their text.
    Raises LoadError as `build_tokenizer` does."""
    return () if model_of(metadata) in LACKING else read_vocabulary(metadata, rows).ends


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What chat templates call `bos_token`, `eos_token`, `unk_token` and `pad_token`, where the file names them."""
    if model_of(metadata) in LACKING:
        return {}
    vocabulary = read_vocabulary(metadata)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {name: vocabulary.texts[vocabulary.ids[part]] for part, name in names.items() if part in vocabulary.ids}


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The file's Jinja templates of conversations by name; the usual one is called "default"."""
    names = {key.removeprefix(TEMPLATE + "."): key for key in metadata if key.startswith(TEMPLATE + ".")}
    if TEMPLATE in metadata:
        names["default"] = TEMPLATE
    return {name: str(metadata[key]) for name, key in names.items()}


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    how = find_pretokenizer(vocabulary.pre)
    ids = {text: i for i, text in enumerate(vocabulary.texts)}
    merges = _merges(metadata, ids)
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=how.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in how.patterns]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_as_letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    texts, scores = vocabulary.texts, metadata.get(PREFIX + "scores")
    if scores is None or len(scores) != len(metadata[PREFIX + "tokens"]):
        count = "none" if scores is None else len(scores)
        raise LoadError(f"the file has {len(texts)} tokens, but scores of {count}; it is broken, use another one")
    # typed text never becomes a control or byte token
    joins = ~np.isin(vocabulary.kinds, (UNKNOWN, CONTROL, BYTE))
    merges = merges_by_score(texts, np.asarray(scores, np.float32)[: len(texts)], joins)
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))
    return _on_characters({text: i for i, text in enumerate(texts)}, merges, vocabulary, prefix)


def _on_characters(
    ids: dict[str, int], merges: list[tuple[str, str]], vocabulary: Vocabulary, prefix: bool
) -> Tokenizer:
    """BPE over characters, with bytes for those that are no token. `prefix` writes a space before what follows a
    special token or the beginning."""
    unknown = vocabulary.ids.get("unknown")
    unknown_text = None if unknown is None else vocabulary.texts[unknown]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _gemma4(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """Lines are pieces, and so are runs of newlines, which are a token or single newlines."""
    ids = {text: i for i, text in enumerate(vocabulary.texts)}
    runs = [n for n in range(2, 256) if "\n" * n in ids]
    joined = [("\n" * i, "\n" * (n - i)) for n in runs for i in range(1, n) if {"\n" * i, "\n" * (n - i)} <= ids.keys()]
    tokenizer = _on_characters(ids, [*_merges(metadata, ids), *joined], vocabulary, prefix=False)
    whole = "|".join(rf"(?<!\n)\n{{{n}}}(?!\n)" for n in runs)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"[^\n]+|{whole}|\n" if runs else r"[^\n]+|\n"), "isolated")
    return tokenizer


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The file's merges. Of equal ones the first counts; those of tokens that were cut off are left out."""
    found = metadata.get(PREFIX + "merges")
    if not isinstance(found, list | Strings):
        raise LoadError("the file has no merges (tokenizer.ggml.merges), which its tokenizer needs; use another one")
    merges = [_halves(merge) for merge in dict.fromkeys(found)]
    if len(ids) < len(metadata[PREFIX + "tokens"]):
        merges = [(left, right) for left, right in merges if {left, right, left + right} <= ids.keys()]
    return merges


def _halves(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # a token may begin with a space
    if at < 0:
        raise LoadError(f"the file's merge {shown(merge)} is not of two tokens; it is broken, use another one")
    return merge[:at], merge[at + 1 :]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Tell which tokens are cut out of a text before anything else."""
    name = str(metadata.get("general.name", "")).lower()
    strip = "phi-3" in name or "phi3" in name  # llama.cpp goes by the name, nothing in the file says it
    texts, kinds = vocabulary.texts, vocabulary.kinds
    for wanted, special in ((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False):
        added = [
            AddedToken(texts[i], normalized=False, special=special, rstrip=strip and texts[i] not in PLAIN)
            for i in np.flatnonzero(np.isin(kinds, wanted)).tolist()
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Have a text begin and end with the tokens that the model expects there."""
    begins = vocabulary.model in ("llama", "gemma4") or (
        vocabulary.model == "gpt2" and find_pretokenizer(vocabulary.pre).add_bos and "bos" in vocabulary.ids
    )
    if vocabulary.model != "gemma4":  # whose files say no and mean yes
        begins = bool(metadata.get(PREFIX + "add_bos_token", begins))
    ends = bool(metadata.get(PREFIX + "add_eos_token", False))
    for wanted, part in (begins, "bos"), (ends, "eos"):
        if wanted and part not in vocabulary.ids:
            raise LoadError(f"the file wants its {part} token added to texts, but names none; use another file")
    pieces = [*(["bos"] if begins else []), None, *(["eos"] if ends else [])]
    if len(pieces) > 1:
        used = [(vocabulary.texts[vocabulary.ids[p]], vocabulary.ids[p]) for p in pieces if p]
        single = ["$A" if p is None else vocabulary.texts[vocabulary.ids[p]] for p in pieces]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
