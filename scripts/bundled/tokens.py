"""The corpus as tokens: a byte-level BPE tokenizer, streams of 16-bit ids, and texts for the drafters.

A folder holds tokenizer/ (as Hugging Face reads it), train.tokens and held_out.tokens (little-endian uint16: each file
behind the end-of-text token, in the order of their hashes, which mixes packages), train.jsonl and held_out.jsonl (some
of the same files for `forerun train`) and tokens.json, written last: where it is, all is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from forerun.errors import ConfigError, LoadError
from scripts.bundled.common import sha256_of, tell, written_whole
from scripts.bundled.corpus import read_corpus
from scripts.bundled.filters import digest_of

END, END_ID = "<|endoftext|>", 0
LEARNT = 60_000_000  # characters that the tokenizer is made from
TEXTS = {"train": 10_000_000, "held_out": 1_500_000}  # characters of the .jsonl files
AT_ONCE = 256  # files that are encoded together
Ids = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Facts:
    """What tokens.json says: tokens and characters of either part, and what they were made of."""

    vocab: int
    corpus: str
    train_files: int
    train_tokens: int
    train_characters: int
    held_out_files: int
    held_out_tokens: int
    held_out_characters: int


def prepare(corpus: Path, out: Path, vocab: int, context: int) -> Facts:
    """Make the tokenizer, unless there is one, and all tokens. Raises LoadError or ConfigError for a corpus that will
    not do."""
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for line in read_corpus(corpus):
        parts["held_out" if line["held_out"] else "train"].append(line["text"])
    for name, texts in parts.items():
        if not texts:
            raise ConfigError(f"{corpus} has no {name} files: make a larger one")
        texts.sort(key=digest_of)
    tell(f"{len(parts['train'])} files to train on")
    tokenizer = _read_tokenizer(out / "tokenizer", vocab)
    if tokenizer is None:
        tell(f"making a tokenizer of {vocab} tokens")
        tokenizer = train_tokenizer(list(_first(parts["train"], LEARNT)), vocab)
        _save_tokenizer(tokenizer, out / "tokenizer", context)
    counts = {}
    for name, texts in parts.items():
        counts[name] = _encode(tokenizer, texts, out / f"{name}.tokens")
        tell(f"{name}: {counts[name]} tokens of {sum(map(len, texts))} characters")
        with written_whole(out / f"{name}.jsonl") as work:
            lines = (json.dumps({"text": text}) for text in _first(texts, TEXTS[name]))
            work.write_text("\n".join(lines), encoding="utf-8")
    train, held_out = parts["train"], parts["held_out"]
    facts = Facts(
        vocab, sha256_of(corpus), len(train), counts["train"], sum(map(len, train)), len(held_out),
        counts["held_out"], sum(map(len, held_out)),
    )  # fmt: skip
    with written_whole(out / "tokens.json") as work:
        work.write_text(json.dumps(asdict(facts), indent=1))
    return facts


def read_facts(folder: Path) -> Facts:
    """What `prepare` wrote last. Raises LoadError."""
    try:
        return Facts(**json.loads((folder / "tokens.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise LoadError(f"{folder} has no tokens.json that can be read ({error}): run the stage tokens") from None


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer. Raises ConfigError if the texts are too few for so many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ConfigError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab}: give more of them")
    return tokenizer


def read_tokens(path: Path) -> Ids:
    """A stream of tokens, mapped. Raises LoadError."""
    try:
        return np.memmap(path, dtype="<u2", mode="r")
    except (OSError, ValueError) as error:
        raise LoadError(f"the tokens in {path} cannot be read ({error}): run the stage tokens") from None


class Windows:
    """Rows of a stream in an order that follows from the seed: each epoch has all of them once, newly cut and mixed."""

    def __init__(self, stream: Ids, context: int, seed: int) -> None:
        """Raises ConfigError for a stream that is too short for two rows."""
        self.stream, self.context, self.seed = stream, context, seed
        self.count = (len(stream) - 1) // context - 1  # the one less is room to cut anew
        if self.count < 1:
            raise ConfigError(f"{len(stream)} tokens are too few for rows of {context}: make a larger corpus")
        self._epoch, self._starts = -1, np.zeros(0, dtype=np.int64)

    def rows(self, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of the run. int64 [count, context + 1]"""
        picked = [self.stream[start : start + self.context + 1] for start in self._where(first, count)]
        return torch.from_numpy(np.stack(picked).astype(np.int64))

    def _where(self, first: int, count: int) -> Iterator[int]:
        for number in range(first, first + count):
            epoch, at = divmod(number, self.count)
            if epoch != self._epoch:
                draw = np.random.default_rng([self.seed, epoch])
                self._epoch = epoch
                self._starts = draw.permutation(self.count) * self.context + int(draw.integers(self.context))
            yield int(self._starts[at])


def _encode(tokenizer: Tokenizer, texts: Sequence[str], path: Path) -> int:
    """Write the ids of texts, each behind the end-of-text token; how many."""
    total = 0
    with written_whole(path) as work, work.open("wb") as file:
        for at in range(0, len(texts), AT_ONCE):
            for encoded in tokenizer.encode_batch_fast(list(texts[at : at + AT_ONCE])):
                ids = np.array([END_ID, *encoded.ids], dtype="<u2")
                file.write(ids.tobytes())
                total += len(ids)
    return total


def _read_tokenizer(directory: Path, vocab: int) -> Tokenizer | None:
    """The tokenizer that is there: of the model that this one is grown from. Raises ConfigError if it will not do."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() != vocab or tokenizer.token_to_id(END) != END_ID:
        raise ConfigError(f"{path} is not of {vocab} tokens that begin with {END}: remove it to make one")
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": None,
        "clean_up_tokenization_spaces": False, "model_max_length": context,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _first(texts: Sequence[str], characters: int) -> Iterator[str]:
    """Texts until there are so many characters."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


if sys.byteorder != "little":
    raise ConfigError("tokens are kept little-endian: use a little-endian machine")
