"""The container of GGUF files: broken ones are refused with a LoadError of one line before any of
their values are used.

Protects: bounds of counts, lengths, types, shapes and offsets; other file formats; sharded files;
hundreds of mutated files, which never cause another exception or use much memory."""

from __future__ import annotations

import functools
import resource
import warnings
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from forerun.catalog.survey import survey
from forerun.errors import ForerunError, LoadError
from forerun.kernels import native
from forerun.load import load_tokenizer
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.models.gguf.container import TYPES, open_gguf
from forerun.models.local import LocalModel
from forerun.runtime.native import NativeDecoder
from tests import gguf_files, tiny
from tests.gguf_broken import ARRAY, SIZES, STRING, Container, Walk, array, mutations, number, text
from tests.models import checks
from tests.models.checks import CPU

SMALL = Container(
    pairs=[
        (b"general.architecture", STRING, text("llama")),
        (b"llama.block_count", 4, number(4, 1)),
    ],
    infos=[(b"a", (64, 2), 8, 0), (b"b", (32,), 0, 160)],
    data=bytes(160 + 128),
)


def refused(path: Path, *words: str) -> None:
    """Assert that opening raises LoadError in one line with the folder and all of `words`."""
    checks.refused(lambda: open_gguf(path), path, str(path.parent), *words)


def written(path: Path, data: Container | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.pack())
    return path


def with_value(kind: int, value: bytes) -> Container:
    return SMALL.with_pair("x", kind, value)


# ---------------------------------------------------------------- valid files


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_of_a_valid_file(version: int, path: Path) -> None:
    file = open_gguf(written(path, replace(SMALL, version=version)))
    assert file.metadata == {"general.architecture": "llama", "llama.block_count": 1}
    assert {name: (t.kind, t.shape, t.size) for name, t in file.tensors.items()} == {
        "a": ("Q8_0", (2, 64), 136), "b": ("F32", (32,), 128)
    }  # fmt: skip
    assert file.tensors["a"].read(1, 1).shape == (1, 68)


@pytest.mark.parametrize(
    "kind, value", [*((k, 1) for k in SIZES if k != 7), (1, -1), (5, -7), (11, -(2**62)), (12, 0.1)]
)
def test_numbers_of_every_type(kind: int, value: float, path: Path) -> None:
    pairs = SMALL.with_pair("one", kind, number(kind, value)).with_pair(
        "many", ARRAY, array(kind, [value, 0, value])
    )
    found = open_gguf(written(path, pairs)).metadata
    assert found["one"] == value and found["many"].tolist() == [value, 0, value]


def test_nonzero_bytes_are_true_and_strings_may_be_invalid_utf8(path: Path) -> None:
    pairs = SMALL.with_pair("yes", 7, b"\x05").with_pair("no", 7, b"\x00")
    pairs = pairs.with_pair("texts", ARRAY, array(STRING, [b"\xff", "\u00e9", ""]))
    found = open_gguf(written(path, pairs)).metadata
    assert (found["yes"], found["no"], found["texts"]) == (True, False, ["\ufffd", "\u00e9", ""])


def test_data_starts_at_the_stated_alignment(path: Path) -> None:
    data = np.arange(64, dtype=np.float32).tobytes()
    wide = replace(SMALL, infos=[(b"b", (64,), 0, 0)], data=data, alignment=4096)
    file = open_gguf(written(path, wide.with_pair("general.alignment", 4, number(4, 4096))))
    assert file.tensors["b"].offset % 4096 == 0
    assert file.tensors["b"].read().tobytes() == data


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    for kind, (name, values, size) in TYPES.items():
        if kind in known:
            assert (name, (values, size)) == (
                known[kind],
                gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)],
            )


def test_a_changed_file_is_read_again(path: Path) -> None:
    open_gguf(written(path, SMALL))
    written(path, with_value(4, number(4, 7)))
    assert open_gguf(path).metadata["x"] == 7


# ---------------------------------------------------------------- other files


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "only 0 bytes"),
        (b"GGUF", "only 4 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
            "Git LFS pointer",
        ),
        (b"<!DOCTYPE html><html><body>Sign in to continue</body></html>", "page of HTML"),
        (b"\n  <html><head></head></html>  \n", "page of HTML"),
        (bytes(4096), "does not begin with GGUF"),
        (b"PK\x03\x04" + bytes(64), "does not begin with GGUF"),
        (b"ggml" + bytes(64), "does not begin with GGUF"),
    ],
    ids=lambda v: v[:12] if isinstance(v, bytes) else "",
)
def test_files_of_other_formats_are_refused(data: bytes, words: str, path: Path) -> None:
    refused(written(path, data), words)


@pytest.mark.parametrize(
    "version, words",
    [
        (0x03000000, "big-endian"),
        (0x02000000, "big-endian"),
        (1, "version 1"),
        (4, "version 4"),
        (99, "version 99"),
    ],
)
def test_unsupported_versions_are_refused(version: int, words: str, path: Path) -> None:
    refused(written(path, replace(SMALL, version=version)), words)


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.gguf", "cannot be read")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "cannot be read")


# ---------------------------------------------------------------- broken headers

LONG = b"k" * 70000
HEADERS = {
    "tensors-2^63": (replace(SMALL, counts=(2**63, 2)), "9223372036854775808 tensors"),
    "keys-2^63": (replace(SMALL, counts=(2, 2**63)), "9223372036854775808 keys"),
    "keys-more-than-there-are": (replace(SMALL, counts=(2, 9)), "broken"),
    "tensors-more-than-there-are": (replace(SMALL, counts=(9, 2)), "broken"),
    "key-empty": (SMALL.with_pair("", 4, number(4, 1)), "without a name"),
    "key-twice": (
        replace(SMALL, pairs=[*SMALL.pairs, SMALL.pairs[1]]),
        "'llama.block_count' twice",
    ),
    "key-long": (
        replace(SMALL, pairs=[(LONG, 4, number(4, 1))], data=bytes(80000)),
        "70000 bytes in a key",
    ),
    "key-of-lines": (SMALL.with_pair("a\nb", 99, b""), "unprintable"),
    "type-13": (with_value(13, bytes(8)), "type 13 in x"),
    "array-of-arrays": (
        with_value(ARRAY, array(ARRAY, [], 1) + bytes(64)),
        "array of the unknown type 9 in x",
    ),
    "array-of-13": (
        with_value(ARRAY, array(13, [], 1) + bytes(64)),
        "array of the unknown type 13 in x",
    ),
    "array-2^62": (with_value(ARRAY, array(4, [], 2**62)), "ends within x"),
    "array-2^64": (with_value(ARRAY, array(10, [], 2**64 - 1)), "ends within x"),
    "strings-2^61": (
        with_value(ARRAY, array(STRING, [], 2**61)),
        "2305843009213693952 strings in x",
    ),
    "string-2^40": (with_value(STRING, text("abc", 2**40)), "ends within x"),
    "string-in-array-2^40": (
        with_value(ARRAY, array(STRING, [], 1) + text("abc", 2**40)),
        "ends within x",
    ),
    "alignment-0": (SMALL.with_pair("general.alignment", 4, number(4, 0)), "alignment 0"),
    "alignment-3": (SMALL.with_pair("general.alignment", 4, number(4, 3)), "alignment 3"),
    "alignment-2^31": (
        SMALL.with_pair("general.alignment", 4, number(4, 2**31)),
        "alignment 2147483648",
    ),
    "alignment-minus": (SMALL.with_pair("general.alignment", 5, number(5, -32)), "alignment -32"),
    "alignment-text": (SMALL.with_pair("general.alignment", STRING, text("32")), "alignment '32'"),
    "name-64": (SMALL.with_info(0, name=b"n" * 64), "64 bytes in a tensor's name"),
    "name-of-lines": (SMALL.with_info(0, name=b"a\nb"), "unprintable"),
    "name-twice": (SMALL.with_info(1, name=b"a"), "tensor a twice"),
    "dimensions-0": (SMALL.with_info(0, dimensions=()), "0 dimensions"),
    "dimensions-5": (SMALL.with_info(0, dimensions=(1,) * 5), "5 dimensions"),
    "dimension-0": (SMALL.with_info(0, dimensions=(64, 0)), "shape [0, 64]"),
    "product-2^64": (
        SMALL.with_info(0, dimensions=(2**32, 2**32)),
        "shape [4294967296, 4294967296]",
    ),
    "product-wraps": (SMALL.with_info(0, dimensions=(2**32, 2**32, 2)), "which cannot be Q8_0"),
    "33-of-Q8_0": (SMALL.with_info(0, dimensions=(33, 2)), "cannot be Q8_0"),
    "128-of-Q4_K": (SMALL.with_info(0, kind=12, dimensions=(128, 2)), "cannot be Q4_K"),
    "type-99": (SMALL.with_info(0, kind=99), "unknown type 99"),
    "type-given-up": (SMALL.with_info(0, kind=4), "removed (4)"),
    "offset-off": (SMALL.with_info(1, offset=168), "off its alignment"),
    "offset-past": (SMALL.with_info(1, offset=2**62), "but tensor"),
    "end-past": (SMALL.with_info(1, dimensions=(64,)), "ends at byte"),
    "data-short": (replace(SMALL, data=bytes(100)), "only"),
    "overlap": (SMALL.with_info(1, offset=128), "tensors a and b in the same place"),
    "same-place": (SMALL.with_info(1, offset=0), "in the same place"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_header_is_refused(case: str, path: Path) -> None:
    container, words = HEADERS[case]
    refused(written(path, container), words)


def test_a_file_truncated_after_any_field_is_refused(path: Path) -> None:
    data = SMALL.pack()
    walk = Walk(data)
    walk.container()
    for end in walk.ends:
        refused(written(path, data[:end]), "broken" if end >= 24 else "bytes")


def test_a_file_that_is_truncated_after_opening_is_refused(path: Path) -> None:
    entry = open_gguf(written(path, SMALL)).tensors["b"]
    written(path, SMALL.pack()[:-64])
    with pytest.raises(LoadError, match="tensor b ends past the end of the file"):
        entry.read()
    path.unlink()
    with pytest.raises(LoadError, match="tensor b cannot be read"):
        entry.read()


# ---------------------------------------------------------------- shards


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Write a tiny model in four files, as llama-gguf-split and the converter do."""
    real, model = gguf.GGUFWriter, tiny.hf_model("llama", **gguf_files.sizes("llama", "Q8_0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", functools.partial(real, split_max_tensors=9))
        gguf_files.write(tmp_path / "model.gguf", model, "Q8_0")
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-0000{i}-of-00004.gguf" for i in range(1, 5)]
    return found


def changed(path: Path, key: str, kind: int, value: bytes) -> None:
    """Rewrite one value of a file."""
    written(path, Walk(path.read_bytes()).container().with_pair(key, kind, value))


@pytest.mark.parametrize("opened", [0, 1, 3])
def test_any_shard_opens_the_whole_model(opened: int, shards: list[Path]) -> None:
    single = gguf_files.written("llama", "Q8_0")
    one, several = (
        load_decoder(p, torch.float32, CPU, 32).weights for p in (single.path, shards[opened])
    )
    assert torch.equal(one.layers[2].down.weight, several.layers[2].down.weight)
    assert torch.equal(one.head.weight, several.head.weight)
    assert open_gguf(shards[opened]).parts == tuple(shards)


def test_missing_shards_are_named(shards: list[Path]) -> None:
    shards[2].unlink()
    refused(shards[0], shards[2].name, "not beside it")
    shards[0].unlink()
    refused(shards[1], shards[0].name, "1 more")


def test_shards_in_the_wrong_order_are_refused(shards: list[Path]) -> None:
    spare = shards[0].with_name("spare")
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    refused(shards[0], shards[1].name, "not shard 2 of 4")


def test_a_renamed_shard_is_refused(shards: list[Path]) -> None:
    other = shards[0].rename(shards[0].with_name("model.gguf"))
    refused(other, "one of 4 shards", "-00001-of-00004.gguf")


def test_a_tensor_in_two_shards_is_refused(shards: list[Path]) -> None:
    container = Walk(shards[1].read_bytes()).container()
    names = [info[0] for info in Walk(shards[0].read_bytes()).container().infos]
    written(shards[1], container.with_info(0, name=names[0]))
    refused(shards[0], shards[1].name, names[0].decode(), "earlier shard")


def test_fewer_tensors_than_stated_are_refused(shards: list[Path]) -> None:
    changed(shards[0], "split.tensors.count", 5, number(5, 1000))
    refused(shards[0], "not 1000")


def test_a_shard_with_another_total_is_refused(shards: list[Path]) -> None:
    changed(shards[3], "split.count", 2, number(2, 5))
    refused(shards[0], shards[3].name, "shard 4 of 4")


# ---------------------------------------------------------------- mutated files

NUM_FILES = 300  # of each tokenizer


@functools.cache
def original(tokenizer: str) -> bytes:
    """Return a small file with a tokenizer, several tensor types and permuted rows."""
    small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    path = gguf_files.new_path("original")
    kinds = ("Q8_0", "Q4_1", "F16", "Q5_0", "IQ4_NL", "Q5_1", "Q4_0")
    gguf_files.write(path, tiny.hf_model("llama", **small), kinds, tokenizer=tokenizer)
    return path.read_bytes()


def load_all(path: Path) -> None:
    """Read everything in a file."""
    config, tokenizer = load_config(path), load_tokenizer(path)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("the end.\n"))
    if native.library() is not None:
        NativeDecoder(config, path, "bfloat16", 64, keep=True)
    else:
        load_decoder(path, torch.float32, CPU, 64)


def failure_of(path: Path) -> str | None:
    """Return what went wrong if a file neither loads nor is refused in one line; a warning counts
    as an error."""
    message = survey([LocalModel("file", path, "here")])[0].reason
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_all(path)
    except ForerunError as error:
        message += str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return f"several lines: {message}" if "\n" in message or len(message) > 4000 else None


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
def test_broken_files_load_or_are_refused_in_one_line(tokenizer: str, path: Path) -> None:
    """Mutations are deterministic: truncation, other numbers, flipped bytes, values and tensors."""
    if native.library() is not None:
        native.start(2)
    written(path, original(tokenizer))
    assert failure_of(path) is None and load_config(path).hidden == 64
    peak, failures = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for i, (what, data) in enumerate(
        mutations(original(tokenizer), NUM_FILES, seed=len(tokenizer))
    ):
        file = written(path.with_name(f"{i}.gguf"), data)
        found = failure_of(file)
        failures += [f"{what}: {found}"] if found else []
        file.unlink()
    assert not failures, "\n".join(failures)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 1024
