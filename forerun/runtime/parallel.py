"""Tensor parallelism on one machine: worker processes repeat the forward passes of this process.

The leader pickles the segments, cache rows and lengths of each forward pass to the standard input
of the workers, which exit when it closes. During a forward pass the processes communicate through
torch.distributed, over the loopback interface (gloo) or between GPUs (nccl). Each keeps the KV
cache of its own heads. Drafting, verification and text processing happen in the leader only."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as distributed

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.errors import ForerunError, LoadError, LostError, one_line
from forerun.models.config import ModelConfig, load_config
from forerun.models.decoder import Attend
from forerun.models.sharding import Shard, ShardedDecoder, shard_config
from forerun.runtime.torch_runner import Runner

TIMEOUT = timedelta(seconds=120)  # for one process to wait for another
ENTRY = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from forerun.runtime.parallel import run_worker; run_worker()"
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Load options of one process. The processes find each other through the file `store`."""

    path: Path
    dtype: torch.dtype
    device: torch.device
    context: int
    rank: int
    world_size: int
    threads: int
    store: str


@dataclass(frozen=True, slots=True)
class ForwardMessage:
    """A forward pass, as it is sent to the workers.

    Attributes:
        cache: number of the leader's cache that it uses.
        shape: (tokens, page size, slots) of that cache.
        freed: numbers of caches that no longer exist.
        moves: cache rows moved since the last pass, (from, to) each.
        slots: number of committed tokens and cache rows of each slot in the pass.
    """

    cache: int
    shape: tuple[int, int, int]
    freed: list[int]
    moves: list[tuple[Sequence[int], Sequence[int]]]
    slots: dict[int, tuple[int, np.ndarray]]
    segments: list[Segment]


# ---------------------------------------------------------------- the leader


class WorkerPool:
    """The worker processes of a model."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self._caches: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self._numbers = count()
        self._freed: list[int] = []

    def announce(self, attend: Attend) -> None:
        """Send the forward pass that is about to begin. Raises LostError if a worker has ended."""
        assert isinstance(attend, Attention)
        cache, pages, segments = attend.cache, attend.cache.pages, list(attend.segments)
        if cache not in self._caches:
            cache.moves, number = [], next(self._numbers)
            self._caches[cache] = number
            weakref.finalize(cache, self._freed.append, number)
        slots = {}
        for s in segments:
            committed = cache.length[s.slot]
            rows = pages.rows[s.slot, : committed + len(s.parents)].copy()
            slots[s.slot] = committed, rows
        moves = cache.moves or []
        shape = pages.count * pages.size, pages.size, len(cache.length)
        number, freed = self._caches[cache], list(self._freed)
        message = pickle.dumps(ForwardMessage(number, shape, freed, moves, slots, segments))
        for process in self.processes:
            try:
                assert process.stdin
                process.stdin.write(message)
                process.stdin.flush()
            except OSError:
                raise LostError("a process of this model has ended: load it again") from None
        cache.moves = []
        self._freed.clear()


def load_parallel(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    world_size: int,
    threads: int,
) -> ShardedDecoder:
    """Load a model in `world_size` processes, this one included, and return this one's part.

    The others end with this process or with its decoder.

    Args:
        threads: CPU threads of all processes together; 0 is as many as torch uses here.

    Raises:
        ConfigError: there are more processes than key-value heads.
        LoadError: a process cannot load its part, or does not start.
    """
    config = load_config(path)
    shard_config(config, Shard(0, world_size, None))
    share = max((threads or torch.get_num_threads()) // world_size, 1)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        jobs = []
        for rank in range(world_size):
            own = torch.device("cuda", rank) if rank and device.type == "cuda" else device
            jobs.append(WorkerConfig(path, dtype, own, context, rank, world_size, share, store))
        processes = [_start(job) for job in jobs[1:]]
        try:
            for process in processes:
                _wait_for(process)  # started; only then wait for each other
            decoder = _load_shard(jobs[0], config, WorkerPool(processes).announce)
            for process in processes:
                _wait_for(process)  # loaded
        except BaseException:
            _stop(processes)
            raise
    weakref.finalize(decoder, _stop, processes)
    return decoder


def _start(job: WorkerConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin
    process.stdin.write(pickle.dumps(job))
    process.stdin.flush()
    return process


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait until a worker reports success. Raises LoadError if it reports an error or ends."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        raise LoadError(f"a process of this model has ended while loading it (exit code {code})")
    if error := json.loads(line):
        raise LoadError(error)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill workers; they hold nothing that must be saved."""
    for process in processes:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with suppress(OSError):  # raised for buffered output
                    pipe.close()
        process.wait()


# ---------------------------------------------------------------- every process


def _load_shard(
    job: WorkerConfig, config: ModelConfig, announce: Callable[[Attend], None] = lambda attend: None
) -> ShardedDecoder:
    """Load this process's part of the model once all have found each other. Raises LoadError."""
    torch.set_num_threads(job.threads)
    shard = _join(job.device, job.store, job.rank, job.world_size)
    return ShardedDecoder(config, job.path, job.dtype, job.device, job.context, shard, announce)


def _join(device: torch.device, store: str, rank: int, world_size: int) -> Shard:
    """Join the other processes, in a group separate from torch's default one. Raises LoadError."""
    file = distributed.FileStore(store, world_size)  # type: ignore[attr-defined]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            group: Any = distributed.ProcessGroupNCCL(file, rank, world_size, options)
        else:
            with _loopback():
                group = distributed.ProcessGroupGloo(file, rank, world_size, TIMEOUT)
        shard = Shard(rank, world_size, group)
        shard.all_reduce(torch.zeros(1, device=device))  # nccl connects at its first use
    except RuntimeError as error:
        why = one_line(str(error))
        raise LoadError(f"the processes of this model do not find each other: {why}") from None
    return shard


@contextmanager
def _loopback() -> Iterator[None]:
    """Make gloo listen on the loopback interface only, out of reach of other machines."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = before or names[0]
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]


# ---------------------------------------------------------------- a worker


def run_worker() -> None:
    """Entry point of a worker: load a part of the model, then follow the leader until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader
    messages, reports = sys.stdin.buffer, sys.stdout
    job: WorkerConfig = pickle.load(messages)
    print(json.dumps(""), file=reports, flush=True)
    try:
        decoder = _load_shard(job, load_config(job.path))
    except ForerunError as error:
        print(json.dumps(str(error)), file=reports, flush=True)
        return
    print(json.dumps(""), file=reports, flush=True)
    runners: dict[int, Runner] = {}
    for message in _read_messages(messages):
        for number in message.freed:
            runners.pop(number, None)
        if message.cache not in runners:
            tokens, page, slots = message.shape
            runners[message.cache] = Runner(decoder, tokens=tokens, page=page, slots=slots)
        try:
            _follow(runners[message.cache], message)
        except LostError:  # the leader detects it too
            return


def _read_messages(messages: IO[bytes]) -> Iterator[ForwardMessage]:
    try:
        while True:
            yield pickle.load(messages)
    except (EOFError, pickle.UnpicklingError):  # the leader has ended
        return


def _follow(runner: Runner, message: ForwardMessage) -> None:
    """Repeat the leader's cache updates and run the forward pass."""
    cache = runner.cache
    for source, target in message.moves:
        cache.move(source, target)
    for slot, (length, rows) in message.slots.items():
        cache.length[slot] = length
        cache.pages.rows[slot, : len(rows)] = rows
    runner.forward(message.segments)
