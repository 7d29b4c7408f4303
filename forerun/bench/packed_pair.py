"""Random-weight pairs of any size, drawn in the form in which their weights are stored.

Matrices are random blocks of a GGUF type, or random bfloat16 values, with the standard deviations
of `shapes`; no matrix is ever whole in memory or quantized from floats.

Target and draft model have nothing in common but a table of successors. Row t of a model's head is
the sum of the embeddings of the tokens that t follows, so the most likely token is a successor of
the last one with a large margin, whatever the size of the model. The layers compute as they do in
any model; their outputs add up to as much as the embedding, and are noise in the logits. Agreement
depends on two kinds of tokens:

- Some tokens have two successors of the same weight. The target's layers choose one by the text
  before, the draft model's choose independently, and agree half of the time.
- The draft model takes some tokens for others, and is wrong behind them.

Each kind accounts for half of the disagreement. The second share is corrected until the agreement
on a few texts is close enough, which rewrites the draft model only. The texts of a large target
come from a twin of few layers: it has the same embeddings and head, and as much noise.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.random import SFC64, Generator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forerun.bench.pair import (
    COMPARED_PROMPTS,
    END_IDS,
    Agreement,
    Pair,
    PairComparison,
    compared_tokens,
    cut_prompts,
    new_directory,
    save_tokenizer,
    train_tokenizer,
    write_description,
)
from forerun.bench.recipe import SPECIAL, PairRecipe
from forerun.bench.shapes import (
    BRANCHES,
    EMBEDDING,
    EMBEDDING_NAME,
    HEAD_NAME,
    ModelShape,
    RandomTensor,
    gguf_metadata,
    hugging_face_config,
    hugging_face_tensors,
    num_parameters,
    stored_type,
    tensors_of,
)
from forerun.cli.progress import Tell, nothing
from forerun.errors import ConfigError
from forerun.models.gguf.container import ALIGNMENT, BLOCKS
from forerun.models.gguf.tokenizer import CONTROL, NORMAL, PREFIX, UNUSED

Array = np.ndarray[Any, np.dtype[Any]]

COMPARED_TOKENS = 64  # greedy tokens of each prompt that are compared
LARGEST_MEASURED, TWIN_LAYERS = 1 << 28, 2  # bytes of a target that is measured itself
MAX_ATTEMPTS = 6  # draft models that are written until the agreement is close enough
TRAINED_TOKENS = 4096  # tokens of a large vocabulary that come from text; the others join two
SECOND = 0.6  # weight of a token's second successor, relative to the first
LOGIT_MARGIN = 2.0  # of the likeliest token's logit over the logarithm of the vocabulary's size
CHUNK_VALUES = 1 << 22  # values that are drawn at a time
FILE_TYPES = {"q8_0": 7, "q4_k_m": 15, "mxfp4": 38}  # general.file_type
LEVELS = 16  # of an embedding's values: the odd numbers from -15 to 15
CODE_SIZE = math.sqrt((LEVELS**2 - 1) / 3)  # their root mean square


def make_packed_pair(out: Path, recipe: PairRecipe, tell: Tell = nothing) -> Pair:
    """Write a pair into `out` completely or not at all.

    Raises ConfigError unless `out` is an empty directory or does not exist, and if the disk has no
    room for the pair.
    """
    with new_directory(out) as work:
        tell("training a tokenizer")
        tokenizer = grown_tokenizer(recipe.vocab)
        successors = Successors.draw(recipe)
        prompts = cut_prompts(tokenizer, recipe)
        for prompt, start in zip(prompts, successors.starts(len(prompts)), strict=True):
            prompt[-1] = start  # texts after the same token would begin alike
        target = RandomModel(recipe, recipe.format, (recipe.seed, 0), successors)
        draft = RandomModel(recipe.draft, recipe.format, (recipe.seed, 1), successors)
        suffix = "" if recipe.format == "bfloat16" else ".gguf"
        paths = work / f"target{suffix}", work / f"draft{suffix}"
        free, needed = disk_usage(work).free, target.num_bytes + draft.num_bytes
        if free < needed:
            raise ConfigError(
                f"{out} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on its disk"
            )
        target.write(paths[0], tokenizer, tell)

        def write_draft(mistaken: float) -> Path:
            draft.write(paths[1], tokenizer, nothing, mistaken)
            return paths[1]

        measured_layers = recipe.layers
        if target.num_bytes <= LARGEST_MEASURED:
            agreement = _reach_agreement(recipe, paths[0], prompts, write_draft, tell)
        else:
            measured_layers = TWIN_LAYERS
            twin = RandomModel(
                replace(recipe, layers=TWIN_LAYERS), recipe.format, target.seed, successors
            )
            with TemporaryDirectory(dir=work) as folder:
                path = Path(folder) / paths[0].name
                twin.write(path, tokenizer, nothing)
                agreement = _reach_agreement(recipe, path, prompts, write_draft, tell)
        sizes = num_parameters(target.shape), num_parameters(draft.shape)
        pair = Pair(
            directory=out,
            recipe=recipe,
            agreement=agreement,
            measured_layers=measured_layers,
            parameters=(sizes[0][0], sizes[1][0]),
            active=(sizes[0][1], sizes[1][1]),
            target=paths[0].name,
            draft=paths[1].name,
        )
        write_description(work, pair, prompts)
    return pair


def _reach_agreement(
    recipe: PairRecipe,
    target: Path,
    prompts: list[list[int]],
    write_draft: Callable[[float], Path],
    tell: Tell,
) -> Agreement:
    """Write draft models with different shares of mistaken tokens until one agrees as asked.

    write_draft: writes the draft model with a share, and returns where it is.
    """
    prompts = prompts[:COMPARED_PROMPTS]
    tell(f"generating {len(prompts)} texts")
    mistaken = (1 - recipe.agree) / (1 + recipe.agree)  # half of tokens that branch are right
    draft = write_draft(mistaken)
    tokens = compared_tokens(recipe, COMPARED_TOKENS)
    comparison = PairComparison(target, draft, prompts, tokens, is_packed=True)
    tried: dict[float, float] = {}
    for _ in range(MAX_ATTEMPTS):
        agree = tried[mistaken] = comparison.agree
        tell(f"{mistaken:.1%} mistaken tokens: the draft model agrees with {agree:.1%}")
        if abs(agree - recipe.agree) <= recipe.tolerance:
            return comparison.report()
        mistaken = min(max(mistaken + agree - recipe.agree, 0.0), 1.0)
        if mistaken in tried:
            break
        comparison.compare(write_draft(mistaken))
    mistaken = min(tried, key=lambda share: abs(tried[share] - recipe.agree))
    agree = tried[mistaken]
    tell(f"an agreement of {recipe.agree:.0%} was not reached; the nearest is {agree:.1%}")
    comparison.compare(write_draft(mistaken))
    return comparison.report()


# ---------------------------------------------------------------- successors


@dataclass(frozen=True, slots=True)
class Successors:
    """Which tokens follow which.

    Attributes:
        order: ids of the tokens that occur in texts, in a cycle; each is followed by the next.
        first, second: [V] the token whose first and second successor a token is, -1 for none.
        branches: bool [V], True for tokens whose two successors have the same weight.
        rank: float [V], uniform; a draft model mistakes the tokens whose rank is below a share.
        others: [V] the tokens for which it takes them.
    """

    order: Array
    first: Array
    second: Array
    branches: Array
    rank: Array
    others: Array

    @classmethod
    def draw(cls, recipe: PairRecipe) -> Successors:
        """Draw the table of a recipe; SPECIAL tokens follow none."""
        generator = Generator(SFC64((recipe.seed, recipe.vocab)))
        tokens = np.arange(len(SPECIAL), recipe.vocab)
        cycles = []
        for _ in range(3):
            order = generator.permutation(tokens)
            before = np.full(recipe.vocab, -1)
            before[np.roll(order, -1)] = order
            cycles.append((order, before))
        (order, first), (_, second), (_, others) = cycles
        branches = generator.random(recipe.vocab) < 1 - recipe.agree
        rank = generator.random(recipe.vocab)
        return cls(order, first, second, branches, rank, others)

    def starts(self, count: int) -> list[int]:
        """Return tokens that are far from each other in the cycle."""
        step = max(len(self.order) // count, 1)
        return [int(self.order[i * step % len(self.order)]) for i in range(count)]


class Codes:
    """Random embeddings, of which any row can be computed: the odd numbers from -15 to 15.

    A row combines a row of two small tables, so that as many as a vocabulary has need no memory.
    """

    def __init__(self, vocab: int, hidden: int, generator: Generator) -> None:
        self.low = generator.integers(LEVELS, size=(256, hidden), dtype=np.uint8)
        self.high = generator.integers(LEVELS, size=(-(-vocab // 256), hidden), dtype=np.uint8)

    def rows(self, tokens: Array) -> Array:
        """Return the embeddings of some tokens. int8 [n, H]"""
        levels: Array = self.low[tokens & 255] ^ self.high[tokens >> 8]
        levels *= 2
        levels -= LEVELS - 1
        return levels.view(np.int8)


# ---------------------------------------------------------------- models


class RandomModel:
    """A model whose weights are functions of a seed, written as a stream."""

    def __init__(
        self, shape: ModelShape, form: str, seed: tuple[int, int], successors: Successors
    ) -> None:
        """Prepare to write a model.

        Args:
            form: one of FORMATS.
            seed: two numbers; the second tells target and draft model apart.
        """
        self.shape = shape
        self.form = form
        self.seed = seed
        self.successors = successors
        self.codes = Codes(shape.vocab, shape.hidden, Generator(SFC64(seed)))
        self.tensors = list(tensors_of(shape))
        # The final norm leaves a share of the embedding, which meets itself in the head's row of
        # the first successor and gives this logit.
        share = (1 + BRANCHES**2) ** -0.5
        logit = math.log(shape.vocab) + LOGIT_MARGIN
        self.embedding_unit = EMBEDDING / CODE_SIZE
        self.head_unit = logit / (share * CODE_SIZE * shape.hidden)

    def write(self, path: Path, tokenizer: Tokenizer, tell: Tell, mistaken: float = 0.0) -> None:
        """Write a GGUF file, or for bfloat16 a Hugging Face directory.

        mistaken: share of the tokens that the model takes for others.
        """
        if self.form == "bfloat16":
            path.mkdir(exist_ok=True)
            config = hugging_face_config(self.shape) | END_IDS
            (path / "config.json").write_text(json.dumps(config, indent=1))
            (path / "generation_config.json").write_text(json.dumps(END_IDS))
            save_tokenizer(tokenizer, path, self.shape.context)
            path = path / "model.safetensors"
        path.unlink(missing_ok=True)  # instead of overwriting a file that may be mapped
        if self.form == "bfloat16":
            path.write_bytes(self._safetensors_header())
        else:
            self._write_gguf_header(path, tokenizer)
        total, done = sum(tensor.size for tensor in self.tensors), 0
        with path.open("ab") as file:
            for index, tensor in enumerate(self.tensors):
                tell(f"writing {path.name}", done, total)
                if self.form != "bfloat16":
                    file.write(bytes(-file.tell() % ALIGNMENT))
                for rows in self._rows(tensor, index, mistaken):
                    file.write(rows.data)
                done += tensor.size
            if self.form != "bfloat16":
                file.write(bytes(-file.tell() % ALIGNMENT))

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(self.stored_bytes(tensor) for tensor in self.tensors)

    def stored_bytes(self, tensor: RandomTensor) -> int:
        """Return the size of a tensor as it is stored."""
        values, size = BLOCKS[self.kind(tensor)]
        return tensor.size // values * size

    def kind(self, tensor: RandomTensor) -> str:
        """Return the GGUF type of a tensor."""
        return "BF16" if self.form == "bfloat16" else stored_type(tensor, self.shape, self.form)

    def _rows(self, tensor: RandomTensor, index: int, mistaken: float) -> Iterator[Array]:
        """Yield a tensor's rows as they are stored, some at a time. uint8 [n, row bytes]"""
        inputs, kind = tensor.shape[-1], self.kind(tensor)
        rows, step = tensor.size // inputs, max(CHUNK_VALUES // inputs, 1)
        generator = Generator(SFC64((*self.seed, index + 1)))
        for start in range(0, rows, step):
            end = min(start + step, rows)
            if tensor.name == EMBEDDING_NAME:
                yield encode(kind, self._embeddings(start, end, mistaken), self.embedding_unit)
            elif tensor.name == HEAD_NAME:
                yield encode(kind, self._head(start, end), self.head_unit)
            else:
                yield random_rows(kind, (end - start, inputs), tensor, generator)

    def _embeddings(self, start: int, end: int, mistaken: float) -> Array:
        """Return the embeddings of the tokens from `start` to `end`. int8 [n, H]"""
        s = self.successors
        others = s.others[start:end]
        is_mistaken = (s.rank[start:end] < mistaken) & (others >= 0)
        return self.codes.rows(np.where(is_mistaken, others, np.arange(start, end)))

    def _head(self, start: int, end: int) -> Array:
        """Return the head's rows of these tokens: the embeddings of those they follow. int8"""
        s = self.successors
        first, second = s.first[start:end], s.second[start:end]
        weight = np.where(s.branches[second], 1.0, SECOND).astype(np.float32)[:, None]
        rows = weight * self.codes.rows(second) + self.codes.rows(first)
        rows[first < 0] = 0  # never the most likely
        return np.rint(rows).astype(np.int8)

    def _safetensors_header(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in self.tensors:
            for name, shape in hugging_face_tensors(tensor):
                end = at + 2 * math.prod(shape)
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
                at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _write_gguf_header(self, path: Path, tokenizer: Tokenizer) -> None:
        architecture = self.shape.architecture
        metadata = {
            "general.file_type": FILE_TYPES[self.form],
            "general.quantization_version": 2,
        }
        metadata |= {f"{architecture}.{k}": v for k, v in gguf_metadata(self.shape).items()}
        metadata |= gguf_tokenizer(tokenizer)
        writer = GGUFWriter(path, architecture)
        for key, value in metadata.items():
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
        for tensor in self.tensors:
            stored = GGMLQuantizationType[self.kind(tensor)]
            size = self.stored_bytes(tensor)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), size, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()


# ---------------------------------------------------------------- blocks


def random_rows(
    kind: str, shape: tuple[int, int], tensor: RandomTensor, generator: Generator
) -> Array:
    """Draw rows of a tensor in a GGUF type.

    Quantized values are uniform over the levels of their type, with the scale that gives the
    tensor's standard deviation; floats are normal. -> uint8 [rows, row bytes]
    """
    rows, inputs = shape
    if kind in ("F32", "BF16"):
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(tensor.deviation)
        values += np.float32(tensor.mean)
        return _stored_floats(kind, values)
    values_each, size = BLOCKS[kind]
    count = rows * inputs // values_each
    words = generator.bit_generator.random_raw(-(-count * size // 8))
    blocks = words.view(np.uint8)[: count * size].reshape(count, size)
    _SCALED[kind](blocks, tensor.deviation)
    return blocks.reshape(rows, -1)


def _scale_q8_0(blocks: Array, deviation: float) -> None:
    values = blocks[:, 2:].view(np.int8)
    np.maximum(values, -127, out=values)
    levels = np.maximum(np.arange(-128, 128), -127)
    _set_half(blocks, 0, deviation / _size(levels))


def _scale_q5_0(blocks: Array, deviation: float) -> None:
    sign = blocks[:, 1] & 0x80  # random, since the levels have a mean
    _set_half(blocks, 0, deviation / _size(np.arange(-16, 16)))
    blocks[:, 1] |= sign


def _scale_q4_k(blocks: Array, deviation: float) -> None:
    """Give all groups scales from 32 to 63, and minima that make 7.5 the middle of 0 to 15.

    Byte j < 4 holds the scale of group j and the upper bits of that of group 4 + j, byte 4 + j the
    same of the minima, and byte 8 + j the lower bits of both.
    """
    scales = blocks[:, 4:16]
    scales[:, :4] |= 0b1010_0000
    scales[:, 4:8] = scales[:, :4]
    scales[:, 8:] = (scales[:, 8:] & 15) * 17
    unit = deviation / (_size(np.arange(32, 64)) * _size(np.arange(16) - 7.5))
    _set_half(blocks, 0, unit)
    _set_half(blocks, 2, 7.5 * unit)


def _scale_q5_k(blocks: Array, deviation: float) -> None:
    """Give all groups scales from 32 to 63, as in Q4_K, and minima that make 15.5 the middle."""
    _scale_q4_k(blocks, deviation)
    unit = deviation / (_size(np.arange(32, 64)) * _size(np.arange(32) - 15.5))
    _set_half(blocks, 0, unit)
    _set_half(blocks, 2, 15.5 * unit)


def _scale_q6_k(blocks: Array, deviation: float) -> None:
    """Give groups odd scales of either sign whose size is from 65 to 127."""
    scales = blocks[:, 192:208]
    sign = scales & 0x80
    scales[:] = sign | (sign ^ 0x80) >> 1 | scales & 0x3F | 1
    unit = deviation / (_size(np.arange(65, 128, 2)) * _size(np.arange(-32, 32)))
    _set_half(blocks, 208, unit)


def _scale_mxfp4(blocks: Array, deviation: float) -> None:
    """Give groups the power of two below the scale or the one above, with a mean square of it."""
    scale = deviation / _size(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    exponent = math.floor(math.log2(scale))
    share = ((scale / 2**exponent) ** 2 - 1) / 3  # of groups with the power above
    blocks[:, 0] = (blocks[:, 0] < 256 * share) + np.uint8(127 + exponent)


_SCALED = {
    "Q8_0": _scale_q8_0,
    "Q5_0": _scale_q5_0,
    "Q4_K": _scale_q4_k,
    "Q5_K": _scale_q5_k,
    "Q6_K": _scale_q6_k,
    "MXFP4": _scale_mxfp4,
}


def encode(kind: str, codes: Array, unit: float) -> Array:
    """Store integers times `unit` in a GGUF type, exactly except for the rounding of `unit`.

    Args:
        codes: int8 [rows, in], at most 31 in size; at most 15 for Q5_0, and odd for Q4_K.

    Returns:
        uint8 [rows, row bytes].
    """
    rows = len(codes)
    if kind in ("F32", "BF16"):
        return _stored_floats(kind, codes.astype(np.float32) * np.float32(unit))
    values, size = BLOCKS[kind]
    blocks = np.zeros((codes.size // values, size), np.uint8)
    codes = codes.reshape(-1, values)
    if kind == "Q8_0":
        blocks[:, 2:] = (codes * np.int8(4)).view(np.uint8)
        _set_half(blocks, 0, unit / 4)
    elif kind == "Q5_0":
        levels = (codes + np.int8(16)).view(np.uint8)
        blocks[:, 2:6] = np.packbits(levels >> 4, axis=1, bitorder="little")
        blocks[:, 6:] = levels[:, :16] & 15 | levels[:, 16:] << 4
        _set_half(blocks, 0, unit)
    elif kind == "Q4_K":
        levels = ((codes + np.int8(15)) >> 1).view(np.uint8).reshape(-1, 4, 2, 32)
        blocks[:, 16:] = (levels[:, :, 0] | levels[:, :, 1] << 4).reshape(-1, 128)
        blocks[:, 4:16] = 0xFF  # all scales and minima are 63
        _set_half(blocks, 0, 2 * unit / 63)
        _set_half(blocks, 2, 15 * unit / 63)
    else:
        levels = (codes + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
        low = levels[:, :, :2] & 15 | (levels[:, :, 2:] & 15) << 4
        high = levels >> 4 << (2 * np.arange(4, dtype=np.uint8))[:, None]
        blocks[:, :128] = low.reshape(-1, 128)
        blocks[:, 128:192] = np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)
        blocks[:, 192:208] = 64
        _set_half(blocks, 208, unit / 64)
    return blocks.reshape(rows, -1)


def _stored_floats(kind: str, values: Array) -> Array:
    if kind == "F32":
        return values.view(np.uint8)
    bits = values.view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16).view(np.uint8)


def _set_half(blocks: Array, at: int, value: float) -> None:
    blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)


def _size(levels: Array) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(levels, dtype=np.float64))))


# ---------------------------------------------------------------- tokenizer


def grown_tokenizer(vocab: int) -> Tokenizer:
    """Make a byte-level BPE tokenizer of any size in seconds.

    Its first tokens come from text (`train_tokenizer`); further ones join the words among them.
    """
    if vocab <= TRAINED_TOKENS:
        return train_tokenizer(vocab)
    model = json.loads(train_tokenizer(TRAINED_TOKENS).to_str())["model"]
    ids: dict[str, int] = model["vocab"]
    merges = [tuple(merge) for merge in model["merges"]]
    words = [token for token in ids if re.fullmatch("\u0120?[A-Za-z]+", token)]
    ends = [word for word in words if word.isascii()]
    joined = (
        (word, ends[(i + offset) % len(ends)])
        for offset in range(len(ends))
        for i, word in enumerate(words)
    )
    for word, end in joined:
        if len(ids) == vocab:
            break
        if word + end not in ids:
            ids[word + end] = len(ids)
            merges.append((word, end))
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(missing)])
    return tokenizer


def gguf_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE tokenizer."""
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [UNUSED if re.fullmatch("<unused[0-9]+>", token) else NORMAL for token in tokens]
    kinds[: len(SPECIAL)] = [CONTROL] * len(SPECIAL)
    found = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]],
        "bos_token_id": END_IDS["bos_token_id"],
        "eos_token_id": END_IDS["eos_token_id"],
        "padding_token_id": END_IDS["pad_token_id"],
        "add_bos_token": False,
    }
    return {f"{PREFIX}{key}": value for key, value in found.items()}
