"""Recurrent states on other devices than the CPU: transfers, waits of the host, and values.

On the meta device tensors have shapes but no values, so that any read, or a mix with tensors of the
host, fails. The tests marked `cuda` compare a GPU with the CPU."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forerun.cache import recurrent
from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.cache.recurrent import RecurrentStates, StateLayout
from forerun.config import Config
from forerun.errors import CapacityError
from forerun.load import make_runner
from forerun.models.config import load_config
from forerun.models.decoder import DecoderLayers, load_decoder
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.cache.test_recurrent import (
    NAMES,
    PAGE,
    chain,
    compare_random_passes,
    names,
    random_pass,
    random_path,
    text,
)
from tests.engine import build
from tests.engine.test_device_steps import HostSyncs

META = torch.device("meta")


def runner(name: str, device: str, dtype: torch.dtype = torch.float32) -> Runner:
    model = load_decoder(tiny.family(name, gain=0.6), dtype, torch.device(device), 256)
    return Runner(model, tokens=1024, page=PAGE, slots=3)


class Uploads(TorchDispatchMode):
    """Counts copies between devices, and checks that they do not block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        used |= {kwargs["device"]} if kwargs.get("device") and used else set()
        if len(used) > 1:
            assert kwargs.get("non_blocking"), func
            self.count += 1
        return func(*args, **kwargs)


@names
def test_the_host_never_reads_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass uploads as many small arrays as one without recurrent layers; opening, committing and
    copying states needs none. Experts are left out, since they make the host wait."""
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    monkeypatch.setattr(DecoderLayers, "_experts", lambda self, x, *_: torch.zeros_like(x))
    run, dice = runner(name, "meta"), random.Random(0)
    cache, states = run.cache, run.cache.recurrent
    assert states is not None and states.data.device == META
    texts: list[list[int]] = [[], [], []]
    with Uploads() as uploads:
        for _ in range(8):
            segments = random_pass(texts, dice, run)
            uploads.count = 0
            run.forward(segments)
            assert uploads.count <= 8  # tokens, positions, rows, wanted, and those for attention
            uploads.count = 0
            for segment in segments:
                path = random_path(segment, dice)
                texts[segment.slot] += [segment.tokens[i] for i in path]
                cache.commit(segment.slot, path)
            assert uploads.count <= len(segments)  # rows of the KV cache
        uploads.count = 0
        for slot, written in enumerate(texts):
            cache.pages.seal(slot, written, len(written))
            cache.close(slot)
        assert len(states._copies) > 3
        assert cache.open(0, texts[0]) == len(texts[0]) // 8 * 8
        assert uploads.count == 0


def test_uncommitted_nodes_move_on_the_device_in_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner("falcon_h1", "meta")
    assert run.cache.pages.grow(0, 24)
    run.forward([Segment(0, text(5), chain(5), [4])])
    with Uploads() as uploads:
        run.cache.commit(0, range(4))
        run.cache.rewind(0, 3)
        assert uploads.count == 0
        run.forward([Segment(0, [7], chain(3), [0], offset=2)])


@pytest.mark.parametrize("draft", ["off", "suffix", "tree"])
def test_the_host_waits_no_more_often_than_for_other_models(draft: str) -> None:
    """It waits once for the verdict, and for each level of a draft model's tree."""
    made = build.engine("falcon_h1", [draft] if draft != "off" else [], dtype=torch.float32)
    plain = build.engine("llama", [draft] if draft != "off" else [], dtype=torch.float32)
    found = []
    for engine in (made, plain):
        for prompt in range(3):
            params = build.params(prompt, 0.0, 60)
            engine.add(build.prompts()[prompt], params, draft=draft, depth=4)
        while min(request.produced for request in engine.requests.values()) < 2:
            engine.step_or_raise()
        with HostSyncs() as syncs:
            engine.step_or_raise()
        found.append(len(syncs.names))
    assert found[0] <= found[1]


def test_copies_are_bounded_within_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a GPU is limited, so the copies of the longest prefixes stay."""
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    monkeypatch.setattr(recurrent, "COPY_BYTES", 0)
    run, tokens = runner("falcon_h1", "cpu"), text(70)
    states = run.cache.recurrent
    assert states is not None
    run.cache.open(0, tokens)
    assert run.cache.pages.grow(0, 70)
    for first, last in ((0, 20), (20, 70)):
        part = tokens[first:last]
        run.forward([Segment(0, part, chain(len(part)), [0], known=len(part))])
        run.cache.commit(0, range(len(part)))
    assert sorted(states._unnamed[0]) == [40, 48, 56, 64]
    assert states.copy_bytes == 0
    assert run.cache.pages.grow(1, 70)
    run.forward([Segment(1, tokens, chain(70), [0], known=70)])  # no memory is left for copies
    run.cache.commit(1, range(70))
    assert not states._unnamed[1]
    run.cache.pages.seal(0, tokens, 70)
    run.cache.close(0)
    assert run.cache.open(0, [*tokens[:60], 3]) == 56
    assert run.cache.open(2, [*tokens[:30], 3]) == 0


def test_needed_bytes_match_the_allocated_memory() -> None:
    """On a GPU the records of all slots are allocated from the start."""
    shape = load_config(tiny.family("qwen3_5"))
    layout = StateLayout.of(shape)
    states = RecurrentStates(shape, 3, PAGE, META)
    assert states.data.nbytes == 3 * 4 * layout.slot
    needed = RecurrentStates.needed_bytes(shape, 3, torch.device("cuda"))
    assert needed == states.data.nbytes + states.copy_bytes
    assert RecurrentStates.needed_bytes(shape, 3, torch.device("cpu")) == 3 * 4 * layout.copy
    llama = load_config(tiny.family("llama"))
    assert RecurrentStates.needed_bytes(llama, 3, torch.device("cuda")) == 0


def test_the_old_cache_is_freed_before_a_resized_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = runner("falcon_h1", "cpu")
    states = weakref.ref(run.cache.recurrent)

    def make(*args: Any, **options: Any) -> KVCache:
        assert states() is None
        return KVCache(*args, **options)

    monkeypatch.setattr("forerun.runtime.torch_runner.KVCache", make)
    run.make_room(64)
    assert run.cache.pages.count == 64 // PAGE


def test_states_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.load.free_memory", lambda device: 1000)
    with pytest.raises(CapacityError, match="set a lower max_rows"):
        make_runner(Config.of(kernels="torch"), tiny.family("falcon_h1"), torch.device("cpu"))


@pytest.mark.cuda
@names
def test_states_on_a_gpu_agree_with_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares logits, states, records, copies and cached prefixes after random passes."""
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    runs = [runner(name, device, torch.float64) for device in ("cuda", "cpu")]
    compare_random_passes(*runs)


@pytest.mark.cuda
@pytest.mark.parametrize("draft", ["suffix", "tree", "eagle"])
@pytest.mark.parametrize("name", NAMES)
def test_speculation_on_a_gpu_gives_the_plain_output(name: str, draft: str) -> None:
    """It equals plain decoding on a GPU and on the CPU, with preemption and small chunks."""
    texts = []
    for device, own in (("cuda", draft), ("cuda", "off"), ("cpu", "off")):
        drafts = [own] if own != "off" else []
        engine = build.engine(name, drafts, chunk=3, tokens=build.SMALL, device=device)
        requests = build.run(engine, own, 0.0, depth=4, length=10, count=4)
        texts.append([list(request.output) for request in requests])
    assert texts[0] == texts[1] == texts[2]
