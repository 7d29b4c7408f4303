"""The cache of packed weights: a hit has the bits of packing, and failures of the cache only give a
note.

Protects: a hit reads no weights; folders that cannot be written and full disks; the names of files;
the bound on the size of the cache.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from forerun.kernels import native
from forerun.models import packed_cache
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import load_config
from forerun.models.packed_cache import cache_folder, model_digest
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import PackedMatrix
from tests import quantise, tiny
from tests.models.checks import logits

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache that accepts small models."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Copy a model, so that a test may change it."""
    return Path(shutil.copytree(tiny.family("llama"), tmp_path / "model"))


def load(directory: Path, form: str = "int8", keep: bool = False) -> NativeDecoder:
    return NativeDecoder(load_config(directory), directory, form, 64, keep)


def matrices(decoder: NativeDecoder) -> list[PackedMatrix]:
    w = decoder.weights
    return [m for x in w.layers for m in (x.qkv, x.out, x.up, x.down)] + [w.head]  # type: ignore[list-item]


def assert_same(one: NativeDecoder, other: NativeDecoder) -> None:
    for a, b in zip(matrices(one), matrices(other), strict=True):
        assert a.form == b.form and a.bytes == b.bytes
        assert (
            (a.data == b.data).all()
            and (a.scale == b.scale).all()
            and (a.bias is b.bias is None or (a.bias == b.bias).all())
        )
    assert torch.equal(*(logits(each, list(range(3, 33))) for each in (one, other)))


def load_uncached(directory: Path, form: str = "int8", keep: bool = False) -> NativeDecoder:
    """Load a model without the cache."""
    before = os.environ.get("FORERUN_CACHE", "")
    os.environ["FORERUN_CACHE"] = "off"
    try:
        return load(directory, form, keep)
    finally:
        os.environ["FORERUN_CACHE"] = before


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-biased"])
def test_a_hit_is_bit_identical_and_reads_no_weights(
    name: str, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.family(name)
    expected = load_uncached(directory, form)
    assert not folder.exists()
    assert_same(load(directory, form), expected)
    only_file(folder)
    read: list[str] = []
    floats = Checkpoint.floats
    monkeypatch.setattr(
        Checkpoint, "floats", lambda self, name: read.append(name) or floats(self, name)
    )  # type: ignore[func-returns-value]
    hit = load(directory, form)
    assert not [
        n
        for n in read
        if n.endswith(("proj.weight", "c_attn.weight", "c_fc.weight", "lm_head.weight"))
    ]
    assert_same(hit, expected)
    only_file(folder)


def test_a_quantised_checkpoint_is_cached(folder: Path, tmp_path: Path) -> None:
    """Its integers are cached; the bfloat16 head is read again."""
    quantise.checkpoint(tmp_path / "model", "gptq")
    expected = load_uncached(tmp_path / "model", "bfloat16", keep=True)
    for _ in range(2):
        assert_same(load(tmp_path / "model", "bfloat16", keep=True), expected)
    assert {m.form for m in matrices(expected)} == {"int4", "bfloat16"}
    only_file(folder)


def test_a_disabled_cache(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", "off")
    load(model)
    assert not folder.exists()


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("FORERUN_CACHE", "~/y")
    assert cache_folder() == tmp_path / "y"
    monkeypatch.setenv("FORERUN_CACHE", "")
    assert cache_folder() == Path("/x/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("FORERUN_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "forerun"


# ---------------------------------------------------------------- write errors


def check_note(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Assert that a model loads correctly with one line on stderr."""
    capsys.readouterr()
    assert_same(load(model), load_uncached(model))
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert all(word in printed.err for word in ("note: packed weights not cached in", *words))


@pytest.mark.parametrize("name", ["open", "mkdir", "replace"])
def test_a_folder_without_write_permission_gives_a_note(
    name: str,
    folder: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is simulated, since root may write to any folder."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    owner = {"open": packed_cache.os, "mkdir": packed_cache.Path, "replace": packed_cache.os}[name]
    monkeypatch.setattr(owner, name, denied)
    check_note(model, capsys, "Permission denied")
    assert not folder.exists() or not list(folder.iterdir())


def test_a_full_disk_gives_a_note_and_leaves_no_file(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds if it is noticed before writing and if a write fails."""
    monkeypatch.setattr(packed_cache, "DISK_RESERVE", 1 << 60)
    check_note(model, capsys, "room")
    monkeypatch.setattr(packed_cache, "DISK_RESERVE", 0)

    def full(file: object, view: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "_write_all", full)
    check_note(model, capsys, "No space left")
    assert not list(folder.iterdir())


# ---------------------------------------------------------------- names


def test_the_file_name_depends_on_the_model_and_its_options(model: Path, tmp_path: Path) -> None:
    weights, config = model / "model.safetensors", model / "config.json"
    name = model_digest(model, ["int8", "avx2"])
    assert model_digest(model, ["int8", "avx2"]) == name
    assert (
        len({name, model_digest(model, ["int4", "avx2"]), model_digest(model, ["int8", "avx512"])})
        == 3
    )
    seen = {name}

    def check_new_digest() -> None:
        found = model_digest(model, ["int8", "avx2"])
        assert found not in seen
        seen.add(found)

    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    check_new_digest()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    # other content with the same size and time
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    check_new_digest()
    config.write_text(config.read_text() + " ")
    check_new_digest()
    (model / "model-2.safetensors").write_bytes(b"more")
    check_new_digest()
    elsewhere = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert model_digest(elsewhere, ["int8", "avx2"]) not in seen


# ---------------------------------------------------------------- bound of the size


def test_the_least_recently_used_files_are_deleted_first(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    load(model)
    size = only_file(folder).stat().st_size
    own_file = only_file(folder)
    for i, name in enumerate(("old", "older", "new")):
        (folder / f"{name}.packed").write_bytes(b"x" * size)
        os.utime(
            folder / f"{name}.packed", (now, now - {"old": 200, "older": 300, "new": 10}[name] - i)
        )
    os.utime(own_file, (now, now - 1000))
    load(model)  # a hit, which updates the time
    assert own_file.stat().st_mtime > now - 100
    monkeypatch.setattr(packed_cache, "MAX_BYTES", 3 * size)
    (folder / "left.tmp").write_bytes(b"")
    (folder / "being written.tmp").write_bytes(b"")
    os.utime(folder / "left.tmp", (now, now - 100_000))
    load(model, "int4")
    remaining = {path.name for path in folder.iterdir()}
    assert {own_file.name, "new.packed", "being written.tmp"} < remaining
    assert not {"old.packed", "older.packed", "left.tmp"} & remaining
    assert sum(path.stat().st_size for path in folder.glob("*.packed")) <= 3 * size
