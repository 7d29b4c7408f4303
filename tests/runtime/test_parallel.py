"""Tensor parallelism gives the logits and outputs of one process, and one-line errors."""

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
    """Return the logits of a prompt, a tree after it, and a step of two slots after a commit."""
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
    ("name", "num_ranks"),
    [(name, 2) for name in ("llama", "phi3", "gemma2", "gpt2", "llama-biased", "llama/q4_k_m")]
    + [("gpt2", 3)],
)
def test_forward_passes_equal_those_of_one_process(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    """Heads, channels and tokens need not divide evenly; each shard has its share of the bytes."""
    directory, double, cpu = tiny.family(name), torch.float64, torch.device("cpu")
    full = load_decoder(directory, double, cpu, 64)

    def run(rank: int) -> tuple[torch.Tensor, int]:
        store = distributed.FileStore(str(tmp_path / "store"), num_ranks)
        group = distributed.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60))
        shard = Shard(rank, num_ranks, group)
        part = ShardedDecoder(load_config(directory), directory, double, cpu, 64, shard)
        return logits_of(Runner(part, **SIZES)), part.weight_bytes

    with ThreadPoolExecutor(num_ranks) as pool:  # threads stand for processes with own groups
        found = list(pool.map(run, range(num_ranks)))
    expected = logits_of(Runner(full, **SIZES))
    for logits, _ in found:
        assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-9)
    assert sum(size for _, size in found) == full.weight_bytes
    assert max(size for _, size in found) < 1.2 / num_ranks * full.weight_bytes + 4096


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
def sharded() -> LLM:
    return LLM(
        tiny.family("llama"), tensor_parallel=2, dtype="float64", kv_tokens=1024, max_rows=4,
        draft=["suffix", f"model:{tiny.family('llama', seed=1)}"], width=2,
    )  # fmt: skip


def test_outputs_equal_those_of_one_process(sharded: LLM) -> None:
    """In batches, with draft trees, shared prefixes, and after a reset."""
    single = LLM(tiny.family("llama"), kernels="torch", draft="off", max_rows=4, **EXACT)
    prompts = [[3, 4, 5, 6] * 6, [7, 8, 9], [3, 4, 5, 6] * 6 + [11, 12]]
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=24, temperature=temperature, seed=3, ignore_eos=True
        )
        expected = [c.token_ids for c in single.generate(prompts, params)]
        for draft, depth in (("off", "auto"), ("suffix", 4), ("model", 3), ("suffix&model", 4)):
            done = sharded.generate(prompts, replace(params), draft=draft, depth=depth)
            assert [c.token_ids for c in done] == expected, draft
    sharded.engine.reset()
    assert [c.token_ids for c in sharded.generate(prompts, params)] == expected


def test_drafters_that_need_the_full_model_are_refused(sharded: LLM) -> None:
    with pytest.raises(ConfigError, match="leave tensor_parallel out"):
        LLM(tiny.family("llama"), tensor_parallel=2, draft="self:layers=2", **EXACT)
    view = view_of(sharded.decoder)  # what drafting heads would use
    for use in (
        lambda: view.embed(torch.tensor([1])),
        lambda: view.head(torch.zeros(1, 32)),
        lambda: view.table.shape,
    ):
        with pytest.raises(ConfigError, match="leave tensor_parallel out"):
            use()


def test_the_death_of_a_worker_raises_a_one_line_error() -> None:
    llm = LLM(tiny.family("llama"), tensor_parallel=2, draft="off", **EXACT)
    (worker,) = llm.decoder.before_forward.__self__.processes  # type: ignore[union-attr]
    worker.kill()
    worker.wait()
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
        worker = os.pidfd_open(int(leader.stdout.readline()))
        leader.kill()
        waiting = select.poll()
        waiting.register(worker, select.POLLIN)
        assert waiting.poll(20_000), "the worker goes on without the leader"
        os.close(worker)
