"""Tensor parallelism: forward passes and texts equal those of one process; failures are one line."""

import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from forerun import LLM, ConfigError, ForerunError, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.proposer import view_of
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.models.sharding import Shard, ShardedDecoder, shard_config
from forerun.runtime.torch_runner import Runner
from tests import tiny

SIZES = dict(tokens=256, page=16, slots=2)
EXACT: dict[str, Any] = dict(dtype="float64", kv_tokens=1024)
TREE = Segment(0, [5, 9, 11, 7, 9], [-1, 0, 0, 1, 2], [0, 1, 2, 3, 4])


def logits_of(runner: Runner) -> torch.Tensor:
    """Logits of a prompt, a tree behind it, and a step of two slots after committing a path."""
    for slot in (0, 1):
        runner.cache.pages.grow(slot, 40)
    prompt = Segment.chain(0, list(range(3, 20)), [16])
    logits = [runner.forward([prompt]).logits]
    runner.cache.commit(0, range(17))
    logits.append(runner.forward([TREE]).logits)
    runner.cache.commit(0, [0, 2, 4])
    logits.append(
        runner.forward([Segment(0, [13], [-1], [0]), Segment(1, [4, 6], [-1, 0], [1])]).logits
    )
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("name", "of"),
    [(name, 2) for name in ("llama", "phi3", "gemma2", "gpt2", "llama-biased", "llama/q4_k_m")]
    + [("gpt2", 3)],
)
def test_forward_passes_equal_those_of_one_process(name: str, of: int, tmp_path: Path) -> None:
    """Also if heads, channels and tokens do not divide evenly; each part has its share of bytes."""
    directory, double, cpu = tiny.family(name), torch.float64, torch.device("cpu")
    whole = load_decoder(directory, double, cpu, 64)

    def do(rank: int) -> tuple[torch.Tensor, int]:
        store = distributed.FileStore(str(tmp_path / "store"), of)
        group = distributed.ProcessGroupGloo(store, rank, of, timedelta(seconds=60))
        part = ShardedDecoder(
            load_config(directory), directory, double, cpu, 64, Shard(rank, of, group)
        )
        return logits_of(Runner(part, **SIZES)), part.weight_bytes

    with ThreadPoolExecutor(of) as pool:  # threads stand for processes, each with its own group
        found = list(pool.map(do, range(of)))
    expected = logits_of(Runner(whole, **SIZES))
    for logits, _ in found:
        assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-9)
    assert sum(size for _, size in found) == whole.weight_bytes
    assert max(size for _, size in found) < 1.2 / of * whole.weight_bytes + 4096


def test_more_processes_than_heads_are_refused() -> None:
    config = load_config(tiny.family("llama"))
    assert (
        sum(shard_config(config, Shard(rank, 2, None)).heads for rank in range(2)) == config.heads
    )
    with pytest.raises(ConfigError, match="this model has 2; give no more"):
        shard_config(config, Shard(0, 3, None))
    with pytest.raises(ConfigError, match="computes with torch"):
        LLM(tiny.family("llama"), tensor_parallel=2, quantization="int8")


@pytest.fixture(scope="module")
def parted() -> LLM:
    return LLM(
        tiny.family("llama"), tensor_parallel=2, dtype="float64", kv_tokens=1024, max_rows=4,
        draft=["suffix", f"model:{tiny.family('llama', seed=1)}"], width=2,
    )  # fmt: skip


def test_texts_equal_those_of_one_process(parted: LLM) -> None:
    """In batches, with draft trees, shared prefixes, and after a reset."""
    single = LLM(tiny.family("llama"), kernels="torch", draft="off", max_rows=4, **EXACT)
    prompts = [[3, 4, 5, 6] * 6, [7, 8, 9], [3, 4, 5, 6] * 6 + [11, 12]]
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=24, temperature=temperature, seed=3, ignore_eos=True
        )
        expected = [c.token_ids for c in single.generate(prompts, params)]
        for draft, depth in (("off", "auto"), ("suffix", 4), ("model", 3), ("suffix&model", 4)):
            done = parted.generate(prompts, replace(params), draft=draft, depth=depth)
            assert [c.token_ids for c in done] == expected, draft
    parted.engine.reset()
    assert [c.token_ids for c in parted.generate(prompts, params)] == expected


def test_what_needs_the_whole_model_is_refused(parted: LLM) -> None:
    with pytest.raises(ConfigError, match="leave tensor_parallel out"):
        LLM(tiny.family("llama"), tensor_parallel=2, draft="self:layers=2", **EXACT)
    view = view_of(parted.decoder)  # what heads on its states would share
    for use in (
        lambda: view.embed(torch.tensor([1])),
        lambda: view.head(torch.zeros(1, 32)),
        lambda: view.table.shape,
    ):
        with pytest.raises(ConfigError, match="leave tensor_parallel out"):
            use()


def test_a_worker_that_dies_is_one_line() -> None:
    llm = LLM(tiny.family("llama"), tensor_parallel=2, draft="off", **EXACT)
    (other,) = llm.decoder.before_forward.__self__.processes  # type: ignore[union-attr]
    other.kill()
    other.wait()
    for _ in range(2):
        with pytest.raises(ForerunError, match="load it again") as failed:
            llm.generate([3, 4, 5], SamplingParams.pure(max_tokens=4))
        assert "\n" not in str(failed.value)


def test_workers_end_with_the_leader() -> None:
    code = (
        "import os, signal; from forerun import LLM\n"
        f"llm = LLM({str(tiny.family('llama'))!r}, tensor_parallel=2, dtype='float64', kv_tokens=1024, draft='off')\n"
        "print(llm.decoder.before_forward.__self__.processes[0].pid, flush=True)\n"
        "signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout
        other = os.pidfd_open(int(leader.stdout.readline()))
        leader.kill()
        waiting = select.poll()
        waiting.register(other, select.POLLIN)
        assert waiting.poll(20_000), "the worker goes on without the leader"
        os.close(other)
