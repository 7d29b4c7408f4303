"""Shortlists: files with the token ids that a draft model scores, and output heads of those rows.

Protects: broken files are refused in one line; rows are selected in their stored format, so that
logits of listed tokens equal those of the full head in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.errors import ForerunError, LoadError
from forerun.kernels import native
from forerun.kernels.draw import gumbel_argmax
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.models.shortlist import Shortlist, ids_of, maps_of, read_shortlist
from forerun.runtime.native import NativeDecoder
from forerun.runtime.program import ChainStart
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import Sampling
from tests import tiny
from tests.models.checks import compiled, logits

IDS = torch.tensor(tiny.SHORTLIST)
TOKENS = [5, 6, 7, 8, 9, 3, 1]


def test_a_saved_shortlist_is_read_back(tmp_path: Path) -> None:
    Shortlist(IDS, 64).save(tmp_path / "list")
    shortlist = read_shortlist(tmp_path / "list")
    assert shortlist.ids.tolist() == IDS.tolist() and shortlist.vocab == 64
    assert [path.name for path in tmp_path.iterdir()] == ["list"]
    d2t, t2d = maps_of(IDS, 64)
    assert ids_of(d2t, len(IDS), 64).tolist() == IDS.tolist() == t2d.nonzero()[:, 0].tolist()


D2T, T2D = maps_of(IDS, 64)
BROKEN: dict[str, tuple[dict[str, Tensor], str]] = {
    "no map": ({"t2d": T2D}, "d2t and t2d"),
    "more than maps": ({"d2t": D2T, "t2d": T2D, "x": D2T + 1}, "d2t and t2d"),
    "marks that are numbers": ({"d2t": D2T, "t2d": T2D.long()}, "one bool per token"),
    "fewer offsets than marks": ({"d2t": D2T[1:], "t2d": T2D}, "48 integers"),
    "floats": ({"d2t": D2T.float(), "t2d": T2D}, "48 integers"),
    "a negative token": ({"d2t": D2T - 2, "t2d": T2D}, "ascending"),
    "a token past the end": ({"d2t": D2T + 1, "t2d": T2D}, "ascending"),
    "not sorted": ({"d2t": D2T.flip(0), "t2d": T2D}, "ascending"),
    "wrong marks": ({"d2t": D2T, "t2d": T2D.flip(0)}, "marks other"),
    "an overflow": ({"d2t": torch.full_like(D2T, (1 << 63) - 1), "t2d": T2D}, "ascending"),
    "no tokens": ({"d2t": D2T[:0], "t2d": T2D & False}, "integers"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    tensors, reason = BROKEN[case]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "list")
    with pytest.raises(LoadError, match=reason) as error:
        read_shortlist(tmp_path / "list")
    assert "\n" not in str(error.value) and "forerun train --recipe shortlist" in str(error.value)


def test_a_shortlist_is_for_its_own_vocabulary(tmp_path: Path) -> None:
    shortlist = Shortlist(IDS, 64)
    assert shortlist.for_model(tmp_path, (64, 70)).tolist() == IDS.tolist()
    assert shortlist.for_model(tmp_path, (60, 64)).tolist() == [
        i for i in tiny.SHORTLIST if i < 60
    ], "padding of the target is removed"
    with pytest.raises(LoadError, match="64 tokens, but the draft model has 70"):
        shortlist.for_model(tmp_path, (70, 80))
    with pytest.raises(LoadError, match="none of the 60"):
        Shortlist(torch.tensor([62, 63]), 64).for_model(tmp_path, (60, 64))


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forerun.models.shortlist.save_file", fail)
    with pytest.raises(ForerunError, match="No space left"):
        Shortlist(IDS, 64).save(tmp_path / "list")
    assert not list(tmp_path.iterdir())


def last_logits(decoder: Any) -> Tensor:
    return logits(decoder, TOKENS, [2, len(TOKENS) - 1])


def check_logits(full_logits: Tensor, short_logits: Tensor, atol: float) -> None:
    """Assert that logits are those of the full head, with -inf for all tokens not listed."""
    expected = torch.full_like(full_logits, -torch.inf)
    expected[:, IDS] = full_logits[:, IDS]
    assert short_logits.shape == full_logits.shape and torch.allclose(
        short_logits, expected, rtol=0, atol=atol
    )


# tied and separate heads, and a softcap
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_a_short_head_has_the_logits_of_the_full_head(family: str) -> None:
    load: Callable[..., object] = lambda ids: load_decoder(  # noqa: E731
        tiny.family(family), torch.float64, torch.device("cpu"), 64, ids
    )
    check_logits(last_logits(load(None)), last_logits(load(IDS)), 1e-12)


FILES = ["llama/F32", "llama/BF16", "llama/q4_1", "llama/Q5_0", "llama/Q8_0", "qwen2/q4_k_m"]


@pytest.mark.one_in(3)
@compiled
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", *FILES])
def test_a_short_head_on_native_kernels_has_equal_bits(family: str, form: str) -> None:
    native.start(1)
    path = tiny.family(family)
    full_logits, short_logits = (
        NativeDecoder(load_config(path), path, form, 64, keep=form == "bfloat16", shortlist=ids)
        for ids in (None, IDS)
    )
    check_logits(last_logits(full_logits), last_logits(short_logits), 0)


@compiled
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_chains_use_noise_by_token_id(temperature: float) -> None:
    """A native chain equals successive forward passes, even if most likely tokens are not
    listed."""
    native.start(1)
    path = tiny.family("llama")
    ids = torch.tensor([i for i in range(64) if i % 8 == 3])
    runner = Runner(
        NativeDecoder(load_config(path), path, "float32", 64, shortlist=ids),
        tokens=64,
        page=16,
        slots=1,
    )
    runner.cache.pages.grow(0, 32)
    keys = [11, 12, 13, 14]
    chained = runner.draft_chains([ChainStart(0, 5, 0, Sampling(temperature), keys)], 64)
    path_so_far: list[int] = [5]
    for key in keys:
        parents = list(range(-1, len(path_so_far) - 1))
        logits = runner.forward([Segment(0, path_so_far, parents, [len(path_so_far) - 1])]).logits
        token = logits.argmax(-1) if not temperature else gumbel_argmax(logits / temperature, [key])
        path_so_far.append(int(token))
    assert chained == [path_so_far[1:]] and set(chained[0]) <= set(ids.tolist())
