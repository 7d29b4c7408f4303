"""Work on what strangers send, done in processes that can be killed.

A worker is a Python process of its own, started when it is first needed and kept. It is given plain
values, answers in JSON, and sets itself limits of memory and time (`work`), where it ends if it
meets one; whoever waits kills it when it is late, and the next call gets a new one. Workers end
with the process that started them, however that one ends. What
the function imports must be light: nothing of it may need torch.
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

WORKERS = 2  # processes of one sandbox at once: further calls wait
PATIENCE = 30.0  # seconds a call waits for a place
WALL = (
    5  # seconds by the clock for each that a worker may compute: the machine has other things to do
)
LONGER = 4  # an answer is at most so many times as long as what was told,
SPARE = 1 << 18  # and so many bytes
GROWN = 16 << 20  # bytes by which a worker may have grown and be kept
STACK = 120 << 20  # bytes; compilers recurse, and Linux leaves room for so much
PR_SET_PDEATHSIG = 1
ENDED = "the process that worked on it was ended"
ENTRY = "import sys; sys.path[:] = sys.argv[7:]; from forerun.worker_process import work; work()"

_sandboxes: WeakSet[WorkerProcess] = WeakSet()
# A worker is killed when the thread that started it ends: this one ends with the process.
_starter = ThreadPoolExecutor(1, "forerun-sandbox")


class WorkerProcessError(Exception):
    """The work was not done: it went over a limit, or its process was ended."""


class RefusedError(Exception):
    """The function raised an exception; this is its text."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerProcess:
    """One function, called in other processes.

    Args:
        function: "module:name". Its arguments must be plain values, its result must be JSON.
        seconds: of computing that one call may take.
        memory: bytes that one call may need.
        niceness: added to the workers' own: the higher, the more everything else goes first.
    """

    def __init__(self, function: str, *, seconds: float, memory: int, niceness: int = 0) -> None:
        self.function, self.seconds, self.memory, self.niceness = (
            function,
            seconds,
            memory,
            niceness,
        )
        self._places = threading.BoundedSemaphore(WORKERS)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._epoch = 0
        _sandboxes.add(self)

    def call(self, *arguments: Any) -> Any:
        """The function's result. Raises SandboxError, BusyError, or RefusedError where the function
        raised."""
        try:
            told = marshal.dumps(arguments)
        except ValueError:
            raise RefusedError(
                "it is nested too deeply, or holds values that are not plain"
            ) from None
        epoch = self._epoch
        if not self._places.acquire(timeout=PATIENCE):
            raise BusyError(
                "too many grammars or conversations are being worked on: try again in a moment"
            )
        try:
            said = self._answer(told, epoch)
        finally:
            self._places.release()
        if "error" in said:
            raise RefusedError(said["error"])
        return said["result"]

    def warm(self) -> None:
        """Start a worker, so that the first call need not wait for it."""
        if not self._idle and not self._busy:
            with suppress(WorkerProcessError):  # the first call will say so
                self._idle.append(self._start())

    def stop(self) -> None:
        """End all work now; those who wait for it get an error, later calls begin anew. A signal's
        handler may call this."""
        self._epoch += 1
        idle, self._idle = self._idle, []
        for worker in [*list(self._busy), *idle]:
            worker.process.kill()

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [
            w.process.pid
            for w in [*list(self._busy), *list(self._idle)]
            if w.process.poll() is None
        ]

    def _answer(self, told: bytes, epoch: int) -> dict[str, Any]:
        worker = self._free()
        self._busy.add(worker)
        try:
            if epoch != self._epoch:
                raise WorkerProcessError(ENDED)
            worker.connection.send_bytes(told)
            if not worker.connection.poll(WALL * self.seconds + 1):
                raise WorkerProcessError(self._limits())
            said: dict[str, Any] = json.loads(
                worker.connection.recv_bytes(LONGER * len(told) + SPARE)
            )
        except (EOFError, ConnectionError):
            killed = worker.process.wait() == -signal.SIGKILL
            worker.end()
            raise WorkerProcessError(ENDED if killed else self._limits()) from None
        except OSError:
            worker.end()
            raise WorkerProcessError("what comes of it is too long") from None
        except BaseException:
            worker.end()
            raise
        finally:
            self._busy.discard(worker)
        if said["grown"] > GROWN or epoch != self._epoch:
            worker.end()
        else:
            self._idle.append(worker)
        return said

    def _limits(self) -> str:
        return f"it takes over {self.seconds:g} seconds or {self.memory >> 20} MiB"

    def _free(self) -> _Worker:
        with suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.end()
        return self._start()

    def _start(self) -> _Worker:
        try:
            return _starter.submit(self._spawn).result()
        except (OSError, RuntimeError) as error:
            raise WorkerProcessError(f"no process could be started for it: {error}") from None

    def _spawn(self) -> _Worker:
        mine, theirs = Pipe()
        settings = (
            theirs.fileno(),
            os.getpid(),
            self.function,
            self.seconds,
            self.memory,
            self.niceness,
        )
        where = (os.path.abspath(entry) for entry in sys.path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", ENTRY, *map(str, settings), *where],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for whoever started it
            )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        return _Worker(process, mine)


@atexit.register
def stop_all() -> None:
    """End the work of every sandbox now."""
    for sandbox in list(_sandboxes):
        sandbox.stop()


@dataclass
class _Limits:
    """The limits of one call in this worker, and the memory that it had before."""

    seconds: float
    memory: int
    before: int = 0

    def set(self) -> None:
        """Start a call's time, and allow `memory` bytes beyond what is held now."""
        _limit(self.memory)
        self.before = _held()
        _alarm(self.seconds)


_limits: _Limits | None = None  # of this process, where it is a worker


@contextmanager
def own_work() -> Iterator[None]:
    """Do work of ours within a call, such as reading the model's own vocabulary, outside of the
    call's limits.

    The limits of what a stranger sent then count from the end of that work. Outside of a worker
    there are none."""
    if _limits is None:
        yield
        return
    _alarm(0)
    resource.setrlimit(
        resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_DATA)[1])
    )
    yield
    _limits.set()


def work() -> None:
    """A worker's life: answer until the other side closes. Its arguments are those of
    `WorkerProcess`, behind a connection and its owner."""
    global _limits
    descriptor, parent, name, seconds, memory, niceness = sys.argv[1:7]
    _end_with(int(parent))
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    _yield(int(niceness))
    _limit(int(memory))
    connection, _limits = Connection(int(descriptor)), _Limits(float(seconds), int(memory), _held())
    while True:
        try:
            arguments = marshal.loads(connection.recv_bytes())
        except EOFError:
            return
        _alarm(float(seconds))
        try:
            said = {"result": function(*arguments)}
        except MemoryError:
            os._exit(1)
        except Exception as error:
            said = {"error": str(error) or type(error).__name__}
        del arguments
        connection.send_bytes(json.dumps(said | {"grown": _held() - _limits.before}).encode())
        _alarm(0)


def _yield(niceness: int) -> None:
    """Let everything else go first, by so much. Linux shares a processor by sessions first where it
    groups them, and then a process's own niceness counts within its session only."""
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def _held() -> int:
    """Bytes of memory that this process has now, stacks included; 0 where the system does not
    say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def _alarm(seconds: float) -> None:
    """What comes next may compute for so long, and take WALL times that by the clock; 0 for no
    limit. Nothing handles
    these signals: they end the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)


def _limit(memory: int) -> None:
    """Refuse memory beyond what is held now and `memory` bytes, let the stack grow, and write no
    core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1])
        )
    if held := heap():
        resource.setrlimit(
            resource.RLIMIT_DATA, (held + memory, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )


def _end_with(parent: int) -> None:
    """End when the process that started this one does, where Linux can see to that; elsewhere with
    its next answer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
