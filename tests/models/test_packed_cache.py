"""The cache of packed weights: a hit is bit for bit what packing gives, and nothing that befalls
the cache shows.

Protects: that a hit reads no weights; truncated, corrupt and foreign files; a folder that cannot be
written and a disk that is full; what the name of a file follows from; the bound on what is kept.
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
    """An empty cache that takes small models too."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of its own."""
    return Path(shutil.copytree(tiny.family("llama"), tmp_path / "model"))


def load(directory: Path, form: str = "int8", keep: bool = False) -> NativeDecoder:
    return NativeDecoder(load_config(directory), directory, form, 64, keep)


def packed(decoder: NativeDecoder) -> list[PackedMatrix]:
    w = decoder.weights
    return [m for x in w.layers for m in (x.qkv, x.out, x.up, x.down)] + [w.head]  # type: ignore[list-item]


def same(one: NativeDecoder, other: NativeDecoder) -> None:
    for a, b in zip(packed(one), packed(other), strict=True):
        assert a.form == b.form and a.bytes == b.bytes
        assert (
            (a.data == b.data).all()
            and (a.scale == b.scale).all()
            and (a.bias is b.bias is None or (a.bias == b.bias).all())
        )
    assert torch.equal(*(logits(each, list(range(3, 33))) for each in (one, other)))


def plain(directory: Path, form: str = "int8", keep: bool = False) -> NativeDecoder:
    """Packed without any cache."""
    before = os.environ.get("FORERUN_CACHE", "")
    os.environ["FORERUN_CACHE"] = "off"
    try:
        return load(directory, form, keep)
    finally:
        os.environ["FORERUN_CACHE"] = before


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-biased"])
def test_a_hit_is_bit_identical_and_reads_no_weights(
    name: str, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.family(name)
    expected = plain(directory, form)
    assert not folder.exists()
    same(load(directory, form), expected)
    only(folder)
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
    same(hit, expected)
    only(folder)


def test_a_quantised_checkpoint_is_kept_too(folder: Path, tmp_path: Path) -> None:
    """Its integers, that is; the head of bfloat16 is read again."""
    quantise.checkpoint(tmp_path / "model", "gptq")
    expected = plain(tmp_path / "model", "bfloat16", keep=True)
    for _ in range(2):
        same(load(tmp_path / "model", "bfloat16", keep=True), expected)
    assert {m.form for m in packed(expected)} == {"int4", "bfloat16"}
    only(folder)


def test_off(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", "off")
    load(model)
    assert not folder.exists()


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("FORERUN_CACHE", "~/y")
    assert cache_folder() == tmp_path / "y"
    monkeypatch.setenv("FORERUN_CACHE", "")
    assert cache_folder() == Path("/x/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("FORERUN_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "forerun"


# ---------------------------------------------------------------- places that cannot be written


def noted(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """The model loads right, with one line on stderr."""
    capsys.readouterr()
    same(load(model), plain(model))
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert all(word in said.err for word in ("note: packed weights not cached in", *words))


@pytest.mark.parametrize("name", ["open", "mkdir", "replace"])
def test_no_right_to_write(
    name: str,
    folder: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tests may run as root, whom no mode of a directory stops."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    owner = {"open": packed_cache.os, "mkdir": packed_cache.Path, "replace": packed_cache.os}[name]
    monkeypatch.setattr(owner, name, denied)
    noted(model, capsys, "Permission denied")
    assert not folder.exists() or not list(folder.iterdir())


def test_a_full_disk(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noticed before writing, or while writing; either way nothing is left behind."""
    monkeypatch.setattr(packed_cache, "DISK_RESERVE", 1 << 60)
    noted(model, capsys, "room")
    monkeypatch.setattr(packed_cache, "DISK_RESERVE", 0)

    def full(file: object, view: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "_write_all", full)
    noted(model, capsys, "No space left")
    assert not list(folder.iterdir())


# ---------------------------------------------------------------- names


def test_the_name_follows_from_the_model_and_the_facts(model: Path, tmp_path: Path) -> None:
    weights, config = model / "model.safetensors", model / "config.json"
    name = model_digest(model, ["int8", "avx2"])
    assert model_digest(model, ["int8", "avx2"]) == name
    assert (
        len({name, model_digest(model, ["int4", "avx2"]), model_digest(model, ["int8", "avx512"])})
        == 3
    )
    seen = {name}

    def new() -> None:
        found = model_digest(model, ["int8", "avx2"])
        assert found not in seen
        seen.add(found)

    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    new()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    os.utime(
        weights, ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # another content of the same size and time
    new()
    config.write_text(config.read_text() + " ")
    new()
    (model / "model-2.safetensors").write_bytes(b"more")
    new()
    elsewhere = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert model_digest(elsewhere, ["int8", "avx2"]) not in seen


# ---------------------------------------------------------------- the bound


def test_the_least_recently_used_go_first(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    load(model)
    size = only(folder).stat().st_size
    mine = only(folder)
    for i, name in enumerate(("old", "older", "new")):
        (folder / f"{name}.packed").write_bytes(b"x" * size)
        os.utime(
            folder / f"{name}.packed", (now, now - {"old": 200, "older": 300, "new": 10}[name] - i)
        )
    os.utime(mine, (now, now - 1000))
    load(model)  # a hit: used just now
    assert mine.stat().st_mtime > now - 100
    monkeypatch.setattr(packed_cache, "MAX_BYTES", 3 * size)
    (folder / "left.tmp").write_bytes(b"")
    (folder / "being written.tmp").write_bytes(b"")
    os.utime(folder / "left.tmp", (now, now - 100_000))
    load(model, "int4")
    left = {path.name for path in folder.iterdir()}
    assert {mine.name, "new.packed", "being written.tmp"} < left
    assert not {"old.packed", "older.packed", "left.tmp"} & left
    assert sum(path.stat().st_size for path in folder.glob("*.packed")) <= 3 * size
