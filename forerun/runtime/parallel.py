"""A model divided between processes of one machine: this one leads, and the others follow its
passes.

What followers are told of a pass are tokens, places and rows of the cache, by their standard input,
at whose end they end; what passes between them while they compute goes through torch.distributed,
by the loopback interface (gloo) or between GPUs (nccl). Each keeps its own heads of the KV cache.
Everything else, drafts, rules, text, is the leader's."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as distributed

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.errors import ForerunError, LoadError, LostError, one_line
from forerun.models.config import ModelConfig, load_config
from forerun.models.decoder import Attend
from forerun.models.sharding import Part, PartDecoder, divided
from forerun.runtime.torch_runner import Runner

PATIENCE = timedelta(seconds=120)  # that a process waits for another
ENTRY = (
    "import sys; sys.path[:] = sys.argv[1:]; from forerun.runtime.parallel import follow; follow()"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What a process has to do. `store` is a file through which processes find each other."""

    directory: Path
    dtype: torch.dtype
    device: torch.device
    context: int
    rank: int
    of: int
    threads: int
    store: str


@dataclass(frozen=True, slots=True)
class Order:
    """What a follower is told of a pass.

    Attributes:
        cache, shape: which of the leader's caches it is in, and (tokens, page, slots) of that.
        gone: caches that are no more.
        moves: rows that were moved since the last pass in it, from and to.
        places: of each slot in the pass, how many tokens are committed, and its rows so far.
    """

    cache: int
    shape: tuple[int, int, int]
    gone: list[int]
    moves: list[tuple[np.ndarray, np.ndarray]]
    places: dict[int, tuple[int, np.ndarray]]
    segments: list[Segment]


class Followers:
    """The other processes of a model, which are told of each pass."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self._caches: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self._numbers, self._gone = count(), list[int]()

    def tell(self, attend: Attend) -> None:
        """Of a pass that is about to begin. Raises LostError where one of them has ended."""
        assert isinstance(attend, Attention)
        cache, pages, segments = attend.cache, attend.cache.pages, list(attend.segments)
        if cache not in self._caches:
            cache.moves, number = [], next(self._numbers)
            self._caches[cache] = number
            weakref.finalize(cache, self._gone.append, number)
        places = {}
        for s in segments:
            at = cache.length[s.slot]
            places[s.slot] = at, pages.rows[s.slot, : at + len(s.parents)].copy()
        shape = pages.count * pages.size, pages.size, len(cache.length)
        moves = [
            (source.cpu().numpy(), target.cpu().numpy()) for source, target in cache.moves or []
        ]
        said = pickle.dumps(
            Order(self._caches[cache], shape, list(self._gone), moves, places, segments)
        )
        for process in self.processes:
            try:
                assert process.stdin
                process.stdin.write(said)
                process.stdin.flush()
            except OSError:
                raise LostError("a process of this model has ended: load it again") from None
        cache.moves = []
        self._gone.clear()


def lead(
    directory: Path, dtype: torch.dtype, device: torch.device, context: int, of: int, threads: int
) -> PartDecoder:
    """Load a model in `of` processes, of which this one is the first; the others end with it, or
    with its decoder. `threads` of the CPU for all of them, 0 is as many as torch has here.

    Raises:
        ConfigError: there are more processes than key-value heads.
        LoadError: a process cannot load its part, or does not begin.
    """
    config = load_config(directory)
    divided(config, Part(0, of, None))
    each = max((threads or torch.get_num_threads()) // of, 1)
    with tempfile.TemporaryDirectory() as place:
        store = str(Path(place) / "store")
        others = [
            torch.device("cuda", rank) if device.type == "cuda" else device for rank in range(1, of)
        ]
        jobs = [
            Job(directory, dtype, own, context, i, of, each, store)
            for i, own in enumerate([device, *others])
        ]
        processes = [_begin(job) for job in jobs[1:]]
        try:
            for process in processes:
                _hear(process)  # it is there: only then wait for each other
            decoder = _load(jobs[0], config, Followers(processes).tell)
            for process in processes:
                _hear(process)  # it has loaded its part
        except BaseException:
            _end(processes)
            raise
    weakref.finalize(decoder, _end, processes)
    return decoder


def _begin(job: Job) -> subprocess.Popen[bytes]:
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


def _hear(process: subprocess.Popen[bytes]) -> None:
    """Wait until a follower says that all is well. Raises LoadError where it is not."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise LoadError(
            f"a process of this model has ended while it was loaded (exit code {process.wait()})"
        )
    if error := json.loads(line):
        raise LoadError(error)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End followers: they stop where they are, there is nothing of theirs to keep."""
    for process in processes:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with suppress(OSError):  # what was still to be written
                    pipe.close()
        process.wait()


def _load(
    job: Job, config: ModelConfig, tell: Callable[[Attend], None] = lambda attend: None
) -> PartDecoder:
    """A process's part of the model, once all have found each other. Raises LoadError."""
    torch.set_num_threads(job.threads)
    part = _join(job.device, job.store, job.rank, job.of)
    return PartDecoder(config, job.directory, job.dtype, job.device, job.context, part, tell)


def _join(device: torch.device, store: str, rank: int, of: int) -> Part:
    """Find the others, in a group apart from the one that a program may have. Raises LoadError."""
    file = distributed.FileStore(store, of)  # type: ignore[attr-defined]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            part = Part(rank, of, distributed.ProcessGroupNCCL(file, rank, of, options))
        else:
            with _loopback():
                part = Part(rank, of, distributed.ProcessGroupGloo(file, rank, of, PATIENCE))
        part.summed(torch.zeros(1, device=device))  # nccl connects when it is first used
    except RuntimeError as error:
        raise LoadError(
            f"the processes of this model do not find each other: {one_line(str(error))}"
        ) from None
    return part


@contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo listen on the loopback interface alone: what goes through it is for no other
    machine."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = before or names[0]
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]


def follow() -> None:
    """A follower's life: its part of the model, then the leader's passes until that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader's affair
    told, say = sys.stdin.buffer, sys.stdout
    job: Job = pickle.load(told)
    print(json.dumps(""), file=say, flush=True)
    try:
        decoder = _load(job, load_config(job.directory))
    except ForerunError as error:
        print(json.dumps(str(error)), file=say, flush=True)
        return
    print(json.dumps(""), file=say, flush=True)
    runners: dict[int, Runner] = {}
    for order in _orders(told):
        for number in order.gone:
            runners.pop(number, None)
        if order.cache not in runners:
            tokens, page, slots = order.shape
            runners[order.cache] = Runner(decoder, tokens=tokens, page=page, slots=slots)
        try:
            _obey(runners[order.cache], order)
        except LostError:  # the leader knows
            return


def _orders(told: IO[bytes]) -> Iterator[Order]:
    try:
        while True:
            yield pickle.load(told)
    except (EOFError, pickle.UnpicklingError):  # the leader is gone
        return


def _obey(runner: Runner, order: Order) -> None:
    """Do what the leader does."""
    cache = runner.cache
    for source, target in order.moves:
        cache.move(torch.from_numpy(source), torch.from_numpy(target))
    for slot, (length, rows) in order.places.items():
        cache.length[slot] = length
        cache.pages.rows[slot, : len(rows)] = rows
    runner.forward(order.segments)
