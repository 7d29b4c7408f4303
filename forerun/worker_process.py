"""Run functions on untrusted input in worker processes that can be killed.

A worker is a separate Python process, started when it is first needed and then reused. It receives
plain values, answers in JSON, and limits its own memory and processor time. The caller kills a
worker that exceeds its time, and the next call starts another. Workers end with the process that
started them, however that one ends. The module of the function must not import torch, so that
workers start quickly.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import marshal
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any
from weakref import WeakSet

from forerun.errors import BusyError
from forerun.hardware import heap

WORKERS = 2  # processes of one WorkerProcess; further calls wait
PATIENCE = 30.0  # seconds that a call waits for a process
WALL = 5  # wall-clock seconds for each second of processor time, since the machine may be busy
MAX_ANSWER_RATIO = 4  # an answer may be this many times as long as the arguments,
MIN_ANSWER = 1 << 18  # and this many bytes longer
MAX_GROWTH = 16 << 20  # bytes by which a worker may have grown to be reused
STACK = 120 << 20  # bytes; compilers recurse deeply
PR_SET_PDEATHSIG = 1
KILLED = "the process that worked on it was ended"
ENTRY = "import sys; sys.path[:] = sys.argv[7:]; from forerun.worker_process import work; work()"

_instances: WeakSet[WorkerProcess] = WeakSet()
# Linux kills a worker when the thread that started it ends, so this thread lives until the exit.
_starter = ThreadPoolExecutor(1, "forerun-worker-starter")


class WorkerProcessError(Exception):
    """The call exceeded a limit, or its process was killed."""


class RefusedError(Exception):
    """The function raised an exception with this text."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerProcess:
    """A function that is called in worker processes.

    Args:
        function: "module:name". Its arguments must be plain values, its result must be JSON.
        seconds: processor time that one call may take.
        memory: bytes that one call may allocate.
        niceness: added to the niceness of the workers, which gives other processes priority.
    """

    def __init__(self, function: str, *, seconds: float, memory: int, niceness: int = 0) -> None:
        self.function = function
        self.seconds = seconds
        self.memory = memory
        self.niceness = niceness
        self._slots = threading.BoundedSemaphore(WORKERS)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._epoch = 0  # number of calls of `stop`
        _instances.add(self)

    def call(self, *arguments: Any) -> Any:
        """Return the function's result.

        Raises WorkerProcessError, BusyError if no worker becomes free, or RefusedError if the
        function raised or the arguments are not plain.
        """
        try:
            message = marshal.dumps(arguments)
        except ValueError:
            problem = "it is nested too deeply, or holds values that are not plain"
            raise RefusedError(problem) from None
        epoch = self._epoch
        if not self._slots.acquire(timeout=PATIENCE):
            raise BusyError(
                "too many grammars or conversations are being worked on: try again in a moment"
            )
        try:
            answer = self._send(message, epoch)
        finally:
            self._slots.release()
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["result"]

    def warm(self) -> None:
        """Start a worker, so that the first call need not wait for it."""
        if not self._idle and not self._busy:
            with suppress(WorkerProcessError):  # the first call will report it
                self._idle.append(self._start())

    def stop(self) -> None:
        """Kill all workers. Running calls raise; later calls start new workers.

        A signal handler may call this.
        """
        self._epoch += 1
        idle, self._idle = self._idle, []
        for worker in [*list(self._busy), *idle]:
            worker.process.kill()

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers."""
        workers = [*list(self._busy), *list(self._idle)]
        return [worker.process.pid for worker in workers if worker.process.poll() is None]

    def _send(self, message: bytes, epoch: int) -> dict[str, Any]:
        worker = self._take_worker()
        self._busy.add(worker)
        try:
            if epoch != self._epoch:
                raise WorkerProcessError(KILLED)
            worker.connection.send_bytes(message)
            if not worker.connection.poll(WALL * self.seconds + 1):
                raise WorkerProcessError(self._limits_text())
            data = worker.connection.recv_bytes(MAX_ANSWER_RATIO * len(message) + MIN_ANSWER)
            answer: dict[str, Any] = json.loads(data)
        except (EOFError, ConnectionError):
            killed = worker.process.wait() == -signal.SIGKILL
            worker.kill()
            raise WorkerProcessError(KILLED if killed else self._limits_text()) from None
        except OSError:
            worker.kill()
            raise WorkerProcessError("what comes of it is too long") from None
        except BaseException:
            worker.kill()
            raise
        finally:
            self._busy.discard(worker)
        if answer["growth"] > MAX_GROWTH or epoch != self._epoch:
            worker.kill()
        else:
            self._idle.append(worker)
        return answer

    def _limits_text(self) -> str:
        return f"it takes over {self.seconds:g} seconds or {self.memory >> 20} MiB"

    def _take_worker(self) -> _Worker:
        with suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.kill()
        return self._start()

    def _start(self) -> _Worker:
        try:
            return _starter.submit(self._spawn).result()
        except (OSError, RuntimeError) as error:
            raise WorkerProcessError(f"no process could be started for it: {error}") from None

    def _spawn(self) -> _Worker:
        parent_end, child_end = Pipe()
        descriptor = child_end.fileno()
        settings = (os.getpid(), self.function, self.seconds, self.memory, self.niceness)
        arguments = [str(descriptor), *map(str, settings), *map(os.path.abspath, sys.path)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", ENTRY, *arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not reach it
            )
        except OSError:
            parent_end.close()
            raise
        finally:
            child_end.close()
        return _Worker(process, parent_end)


@atexit.register
def stop_all() -> None:
    """Kill the workers of every WorkerProcess."""
    for instance in list(_instances):
        instance.stop()


# ------------------------------------------------------------ in the worker


@dataclass
class _Limits:
    """Limits of one call in this worker, and the memory that it held before the call."""

    seconds: float
    memory: int
    before: int = 0

    def set(self) -> None:
        """Start the time of a call, and allow `memory` bytes beyond what is held now."""
        _limit_memory(self.memory)
        self.before = _held_memory()
        _set_alarms(self.seconds)


_limits: _Limits | None = None  # None if this process is not a worker


@contextmanager
def own_work() -> Iterator[None]:
    """Suspend the limits for work that does not depend on untrusted input, such as loading a
    vocabulary.

    The limits of the call start anew afterwards. Does nothing outside of a worker.
    """
    if _limits is None:
        yield
        return
    _set_alarms(0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, hard))
    yield
    _limits.set()


def work() -> None:
    """Answer calls until the owner closes the connection.

    The command line has the connection's descriptor, the owner's process id and the arguments of
    `WorkerProcess`.
    """
    global _limits
    descriptor, parent, name, seconds, memory, niceness = sys.argv[1:7]
    _end_with(int(parent))
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    _lower_priority(int(niceness))
    _limit_memory(int(memory))
    connection = Connection(int(descriptor))
    _limits = _Limits(float(seconds), int(memory), _held_memory())
    while True:
        try:
            arguments = marshal.loads(connection.recv_bytes())
        except EOFError:
            return
        _set_alarms(float(seconds))
        try:
            answer = {"result": function(*arguments)}
        except MemoryError:
            os._exit(1)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        del arguments
        answer["growth"] = _held_memory() - _limits.before
        connection.send_bytes(json.dumps(answer).encode())
        _set_alarms(0)


def _lower_priority(niceness: int) -> None:
    """Give other processes priority.

    Where Linux groups processes by session (autogroup), the niceness of a process counts only
    within its session, so the session's niceness is set too.
    """
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def _held_memory() -> int:
    """Return the bytes of memory this process holds, stacks included; 0 if unknown."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def _set_alarms(seconds: float) -> None:
    """End the process after `seconds` of processor time or WALL times that in wall-clock time.

    0 removes the limit. Nothing handles these signals, so they end the process.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)


def _limit_memory(memory: int) -> None:
    """Allow `memory` bytes beyond what is held now, a large stack, and no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, hard))
    if held := heap():
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (held + memory, hard))


def _end_with(parent: int) -> None:
    """End when the parent does: at once on Linux, with the next answer elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
