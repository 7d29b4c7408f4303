"""Shortlists: files that say which tokens a draft model scores, and heads of so many rows.

Protects: what a file may not hold is one line; rows are chosen as they are stored, so that a head
of some rows says of them what the whole one says, whatever numbers it is in; nothing else of a
model, its packed copy neither, changes."""

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

IDS = torch.tensor(tiny.LISTED)
TOKENS = [5, 6, 7, 8, 9, 3, 1]


def test_a_list_comes_back(tmp_path: Path) -> None:
    Shortlist(IDS, 64).save(tmp_path / "list")
    held = read_shortlist(tmp_path / "list")
    assert held.ids.tolist() == IDS.tolist() and held.vocab == 64
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
    "a token below zero": ({"d2t": D2T - 2, "t2d": T2D}, "ascending"),
    "a token past the end": ({"d2t": D2T + 1, "t2d": T2D}, "ascending"),
    "no order": ({"d2t": D2T.flip(0), "t2d": T2D}, "ascending"),
    "other marks": ({"d2t": D2T, "t2d": T2D.flip(0)}, "marks other"),
    "a wrap": ({"d2t": torch.full_like(D2T, (1 << 63) - 1), "t2d": T2D}, "ascending"),
    "nothing": ({"d2t": D2T[:0], "t2d": T2D & False}, "integers"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_file_may_not_hold_is_one_line(case: str, tmp_path: Path) -> None:
    tensors, says = BROKEN[case]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "list")
    with pytest.raises(LoadError, match=says) as error:
        read_shortlist(tmp_path / "list")
    assert "\n" not in str(error.value) and "forerun train --recipe shortlist" in str(error.value)


def test_it_is_for_models_of_its_vocabulary_or_of_the_targets(tmp_path: Path) -> None:
    held = Shortlist(IDS, 64)
    assert held.for_model(tmp_path, (64, 70)).tolist() == IDS.tolist()
    assert held.for_model(tmp_path, (60, 64)).tolist() == [i for i in tiny.LISTED if i < 60], (
        "padding of the target's"
    )
    with pytest.raises(LoadError, match="64 tokens, but the draft model has 70"):
        held.for_model(tmp_path, (70, 80))
    with pytest.raises(LoadError, match="none of the 60"):
        Shortlist(torch.tensor([62, 63]), 64).for_model(tmp_path, (60, 64))


def test_a_disk_that_is_full_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forerun.models.shortlist.save_file", full)
    with pytest.raises(ForerunError, match="No space left"):
        Shortlist(IDS, 64).save(tmp_path / "list")
    assert not list(tmp_path.iterdir())


def last(decoder: Any) -> Tensor:
    return logits(decoder, TOKENS, [2, len(TOKENS) - 1])


def check(whole: Tensor, some: Tensor, atol: float) -> None:
    """The naive twin: the whole head, its logits of all other tokens set to -inf."""
    expected = torch.full_like(whole, -torch.inf)
    expected[:, IDS] = whole[:, IDS]
    assert some.shape == whole.shape and torch.allclose(some, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "gpt2"]
)  # tied and not, with a softcap
def test_some_rows_say_what_the_whole_head_says_of_them(family: str) -> None:
    load: Callable[..., object] = lambda said: load_decoder(  # noqa: E731
        tiny.family(family), torch.float64, torch.device("cpu"), 64, said
    )
    check(last(load(None)), last(load(IDS)), 1e-12)


FILES = ["llama/F32", "llama/BF16", "llama/q4_1", "llama/Q5_0", "llama/Q8_0", "qwen2/q4_k_m"]


@pytest.mark.one_in(3)
@compiled
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", *FILES])
def test_so_they_do_on_native_kernels_to_the_last_bit(family: str, form: str) -> None:
    native.start(1)
    path = tiny.family(family)
    whole, some = (
        NativeDecoder(load_config(path), path, form, 64, keep=form == "bfloat16", shortlist=said)
        for said in (None, IDS)
    )
    check(last(whole), last(some), 0)


@compiled
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_have_the_noise_of_the_vocabularys_tokens(temperature: float) -> None:
    """One native call says what pass after pass would, where most of what the model likes is not
    listed."""
    native.start(1)
    path, said = tiny.family("llama"), torch.tensor([i for i in range(64) if i % 8 == 3])
    runner = Runner(
        NativeDecoder(load_config(path), path, "float32", 64, shortlist=said),
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
    assert chained == [path_so_far[1:]] and set(chained[0]) <= set(said.tolist())
