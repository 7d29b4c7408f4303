"""Tiny models with other vocabularies than `tiny.repetitive`, which often generate the same text."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from forerun.draft.cross_vocabulary import ModelVocabulary, SharedVocabulary
from forerun.models.config import load_config
from forerun.models.tokenizer import Tokenizer
from tests import tiny

_DIRECTORY = tempfile.TemporaryDirectory(prefix="forerun-words-")  # deleted at exit
KINDS = ("pieces", "bytes", "shuffled")
TEXTS = [
    "the name of the colour is green, and the sizes of the alphabet are next to it",
    'def name(self):\n    return {"colour": true, "next": null}\n' * 2,
    "été grün 数字 übermut",
]


def pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer like those of SentencePiece: spaces are a letter, bytes replace unknown
    text, and a space precedes a text."""
    learned = tokenizers.Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learned.train_from_iterator(
        TEXTS * 20, trainers.BpeTrainer(vocab_size=150, show_progress=False)
    )
    made = json.loads(learned.to_str())["model"]
    ids = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁▁"]
    ids += sorted(set(made["vocab"]) - set(ids), key=lambda text: (len(text), text))
    merges = [("▁", "▁"), *(tuple(merge) for merge in made["merges"])]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(ids)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def in_bytes() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer of other text, with one special token of the target."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<end>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return tokenizer


def shuffled() -> tokenizers.Tokenizer:
    """Return the target's tokenizer with permuted ids."""
    raw = json.loads((tiny.repetitive() / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    raw["model"]["vocab"] = {text: (7 * i + 5) % len(vocabulary) for text, i in vocabulary.items()}
    for token in raw["added_tokens"]:
        token["id"] = raw["model"]["vocab"][token["content"]]
    return tokenizers.Tokenizer.from_str(json.dumps(raw))


MAKERS = {"pieces": pieces, "bytes": in_bytes, "shuffled": shuffled}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """Return a drafter's tokenizer; "target" is that of `tiny.repetitive`."""
    if kind == "target":
        return Tokenizer(tiny.repetitive())
    directory = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_DIRECTORY.name))
    _write(kind, directory)
    return Tokenizer(directory)


def _write(kind: str, directory: Path) -> None:
    MAKERS[kind]().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )


def size(kind: str) -> int:
    """Return the vocabulary size of the model."""
    return (
        tiny.PADDED_VOCAB if kind in ("target", "shuffled") else len(tokenizer(kind).vocabulary())
    )


@functools.cache
def words(kind: str) -> ModelVocabulary:
    return ModelVocabulary(tokenizer(kind), size(kind))


@functools.cache
def shared(kind: str) -> SharedVocabulary:
    return SharedVocabulary(words("target"), words(kind))


@functools.cache
def drafter(kind: str, noise: float = 0.05) -> Path:
    """Write `tiny.repetitive(noise)` with another vocabulary. Shared tokens keep their weights; others
    are slightly less likely than the target's token that they start with."""
    model = hf.LlamaForCausalLM.from_pretrained(tiny.repetitive(noise))
    embedding = model.model.embed_tokens.weight.detach()
    head = model.lm_head.weight.detach()
    torch.manual_seed(3)
    new_embedding = torch.randn(size(kind), embedding.shape[1])
    new_head = torch.zeros(size(kind), head.shape[1])
    new_head[:, 0] = -30.0
    for token, own in enumerate(shared(kind).to_target):
        spelling = words(kind).spellings[token]
        if own >= 0:
            new_embedding[token] = embedding[own]
            new_head[token] = head[own]
        elif spelling.isascii() and spelling:
            first = words("target").encode([spelling.decode()])[0][0]
            new_embedding[token] = embedding[first]
            new_head[token] = head[first] * (0.98 - token / 5000)  # no ties
    model.resize_token_embeddings(size(kind), mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(new_embedding)
        model.lm_head.weight.copy_(new_head)
    directory = Path(tempfile.mkdtemp(prefix=f"{kind}-model-", dir=_DIRECTORY.name))
    model.save_pretrained(directory)
    _write(kind, directory)
    assert load_config(directory).vocab == size(kind)
    return directory
