"""The container of GGUF files: whatever is broken in one is a LoadError in one line, found before
anything is believed.

Protects: each bound on counts, lengths, types, shapes and offsets; other things saved as .gguf;
files in several parts; and that no broken file, of hundreds, does anything else than that, in
memory of a bounded size."""

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
from tests.gguf_broken import ARRAY, SIZES, STRING, Container, Walk, array, number, spoiled, text
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
    """Opening raises LoadError, in one line that names the file and holds all of `words`."""
    checks.refused(lambda: open_gguf(path), path, str(path.parent), *words)


def written(path: Path, data: Container | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.pack())
    return path


def with_value(kind: int, value: bytes) -> Container:
    return SMALL.with_pair("x", kind, value)


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("version", [2, 3])
def test_a_small_file(version: int, path: Path) -> None:
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


def test_any_byte_but_zero_is_true_and_texts_need_not_be_utf8(path: Path) -> None:
    pairs = SMALL.with_pair("yes", 7, b"\x05").with_pair("no", 7, b"\x00")
    pairs = pairs.with_pair("texts", ARRAY, array(STRING, [b"\xff", "\u00e9", ""]))
    found = open_gguf(written(path, pairs)).metadata
    assert (found["yes"], found["no"], found["texts"]) == (True, False, ["\ufffd", "\u00e9", ""])


def test_data_begins_at_the_alignment_that_the_file_states(path: Path) -> None:
    data = np.arange(64, dtype=np.float32).tobytes()
    wide = replace(SMALL, infos=[(b"b", (64,), 0, 0)], data=data, alignment=4096)
    file = open_gguf(written(path, wide.with_pair("general.alignment", 4, number(4, 4096))))
    assert file.tensors["b"].offset % 4096 == 0
    assert file.tensors["b"].read().tobytes() == data


def test_sizes_of_types_are_those_of_the_gguf_package() -> None:
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    for kind, (name, values, size) in TYPES.items():
        if kind in known:
            assert (name, (values, size)) == (
                known[kind],
                gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)],
            )


def test_a_file_that_changes_is_read_anew(path: Path) -> None:
    open_gguf(written(path, SMALL))
    written(path, with_value(4, number(4, 7)))
    assert open_gguf(path).metadata["x"] == 7


# ---------------------------------------------------------------- what is no file of models


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
def test_other_things_saved_as_gguf(data: bytes, words: str, path: Path) -> None:
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
def test_other_versions(version: int, words: str, path: Path) -> None:
    refused(written(path, replace(SMALL, version=version)), words)


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.gguf", "cannot be read")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "cannot be read")


# ---------------------------------------------------------------- what is broken in one

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
def test_a_broken_header(case: str, path: Path) -> None:
    container, words = HEADERS[case]
    refused(written(path, container), words)


def test_every_field_may_be_missing(path: Path) -> None:
    data = SMALL.pack()
    walk = Walk(data)
    walk.container()
    for end in walk.ends:
        refused(written(path, data[:end]), "broken" if end >= 24 else "bytes")


def test_a_file_that_shrinks_after_it_was_opened(path: Path) -> None:
    entry = open_gguf(written(path, SMALL)).tensors["b"]
    written(path, SMALL.pack()[:-64])
    with pytest.raises(LoadError, match="tensor b ends past the end of the file"):
        entry.read()
    path.unlink()
    with pytest.raises(LoadError, match="tensor b cannot be read"):
        entry.read()


# ---------------------------------------------------------------- several parts


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A tiny model in four files, as llama-gguf-split and the converter write them."""
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
def test_parts_are_one_model_whichever_is_named(opened: int, parts: list[Path]) -> None:
    whole = gguf_files.written("llama", "Q8_0")
    one, many = (
        load_decoder(p, torch.float32, CPU, 32).weights for p in (whole.path, parts[opened])
    )
    assert torch.equal(one.layers[2].down.weight, many.layers[2].down.weight)
    assert torch.equal(one.head.weight, many.head.weight)
    assert open_gguf(parts[opened]).parts == tuple(parts)


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[2].unlink()
    refused(parts[0], parts[2].name, "not beside it")
    parts[0].unlink()
    refused(parts[1], parts[0].name, "1 more")


def test_parts_in_the_wrong_order(parts: list[Path]) -> None:
    spare = parts[0].with_name("spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])
    refused(parts[0], parts[1].name, "not shard 2 of 4")


def test_a_part_under_another_name(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("model.gguf"))
    refused(other, "one of 4 shards", "-00001-of-00004.gguf")


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    container = Walk(parts[1].read_bytes()).container()
    names = [info[0] for info in Walk(parts[0].read_bytes()).container().infos]
    written(parts[1], container.with_info(0, name=names[0]))
    refused(parts[0], parts[1].name, names[0].decode(), "earlier shard")


def test_fewer_tensors_than_promised(parts: list[Path]) -> None:
    changed(parts[0], "split.tensors.count", 5, number(5, 1000))
    refused(parts[0], "not 1000")


def test_a_part_of_another_number_of_parts(parts: list[Path]) -> None:
    changed(parts[3], "split.count", 2, number(2, 5))
    refused(parts[0], parts[3].name, "shard 4 of 4")


# ---------------------------------------------------------------- all that can go wrong

FILES = 300  # of each tokenizer


@functools.cache
def original(tokenizer: str) -> bytes:
    """A small file with everything in it: a tokenizer, several types, permuted rows."""
    small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    path = gguf_files.new_path("original")
    kinds = ("Q8_0", "Q4_1", "F16", "Q5_0", "IQ4_NL", "Q5_1", "Q4_0")
    gguf_files.write(path, tiny.hf_model("llama", **small), kinds, tokenizer=tokenizer)
    return path.read_bytes()


def use(path: Path) -> None:
    """All that is read of a file."""
    config, tokenizer = load_config(path), load_tokenizer(path)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("the end.\n"))
    if native.library() is not None:
        NativeDecoder(config, path, "bfloat16", 64, keep=True)
    else:
        load_decoder(path, torch.float32, CPU, 64)


def leak(path: Path) -> str | None:
    """What comes of a file other than a model or an error in one line; a warning would be a line
    too."""
    said = survey([LocalModel("file", path, "here")])[0].reason
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(path)
    except ForerunError as error:
        said += str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return f"several lines: {said}" if "\n" in said or len(said) > 4000 else None


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
def test_no_broken_file_does_anything_but_say_so(tokenizer: str, path: Path) -> None:
    """Deterministic: cut, renumbered, flipped, with other values and other tensors. What loads all
    the same is fine."""
    if native.library() is not None:
        native.start(2)
    written(path, original(tokenizer))
    assert leak(path) is None and load_config(path).hidden == 64
    peak, leaks = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for i, (what, data) in enumerate(spoiled(original(tokenizer), FILES, seed=len(tokenizer))):
        file = written(path.with_name(f"{i}.gguf"), data)
        found = leak(file)
        leaks += [f"{what}: {found}"] if found else []
        file.unlink()
    assert not leaks, "\n".join(leaks)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 1024
