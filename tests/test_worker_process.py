"""Worker processes: results, limits, and no process that is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forerun import worker_process
from forerun.errors import BusyError
from forerun.worker_process import RefusedError, WorkerProcess, WorkerProcessError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess("tests.worker_tasks:run", seconds=0.3, memory=64 << 20)
    yield worker
    worker.stop()


def wait_until(condition: Callable[[], object], state: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"timed out: {state}"
        time.sleep(0.01)


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, first the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, even if its parent has not noticed."""
    with suppress(OSError):
        return stat(pid)[0] == "Z"
    return True


def test_values_and_errors_are_returned(worker: WorkerProcess) -> None:
    for value in ("é\ud800😀", [1, 2.5, None, True], {"a": {"b": []}}):
        assert worker.call("echo", value) == value
    with pytest.raises(RefusedError, match="nothing"):
        worker.call("nothing")
    with pytest.raises(RefusedError, match="plain"):
        worker.call("echo", object())
    pid = worker.call("pid")
    with pytest.raises(RefusedError, match="recursion"):
        worker.call("recurse")
    assert worker.call("pid") == pid != os.getpid()
    assert not {"torch", "numpy", "transformers"} & set(worker.call("modules"))


def test_results_have_a_maximum_size(worker: WorkerProcess) -> None:
    assert len(worker.call("echo", "x" * 1_000_000)) == 1_000_000
    with pytest.raises(WorkerProcessError, match="too long"):
        worker.call("echo", "\x01" * 1_000_000)  # six times as long in JSON


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="sessions do not share processors here"
)
def test_workers_have_a_low_priority() -> None:
    worker = WorkerProcess("tests.worker_tasks:run", seconds=0.3, memory=64 << 20, niceness=7)
    pid = worker.call("pid")
    assert Path(f"/proc/{pid}/autogroup").read_text().split()[-1] == "7"
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 7
    worker.stop()


@pytest.mark.parametrize(
    "task", [("compute",), ("sleep", 60), ("allocate", 4096), ("exit",)], ids=lambda task: task[0]
)
def test_a_call_over_a_limit_fails_and_the_next_one_works(
    task: tuple[Any, ...], worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = worker.call("pid")
    start = time.monotonic()
    with monkeypatch.context() as patch, pytest.raises(WorkerProcessError) as error:
        patch.setattr(worker_process, "WALL", 2)
        worker.call(*task)
    assert "0.3 seconds or 64 MiB" in str(error.value)
    assert time.monotonic() - start < 10  # the caller waits for at most 1.6 seconds
    assert worker.call("pid") != before and has_ended(before)


def test_killed_workers_are_replaced(worker: WorkerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(worker.call, "sleep", 60)
        wait_until(lambda: worker._busy, "the worker is busy")
        os.kill(worker.processes[0], signal.SIGKILL)
        with pytest.raises(WorkerProcessError, match="ended"):
            task.result(20)
    idle = worker.call("pid")
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: has_ended(idle), "the worker has ended")
    assert worker.call("pid") != idle


def test_at_most_two_calls_run_and_stop_ends_all() -> None:
    worker = WorkerProcess("tests.worker_tasks:run", seconds=30, memory=64 << 20)
    failed: list[str] = []

    def wait() -> None:
        with pytest.raises(WorkerProcessError) as error:
            worker.call("sleep", 60)
        failed.append(str(error.value))

    threads = [threading.Thread(target=wait) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(worker._busy) == 2, "two calls run")
    pids = worker.processes
    assert len(pids) == 2
    worker.stop()
    for thread in threads:
        thread.join(20)
        assert len(worker._busy) <= 2
    assert len(failed) == 6 and all("ended" in text for text in failed)
    assert all(has_ended(pid) for pid in pids)
    assert worker.call("echo", 1) == 1
    worker.stop()


def test_a_call_waits_for_a_worker_for_a_limited_time(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "PATIENCE", 0.01)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(worker.call, "sleep", 60)
        wait_until(lambda: len(worker._busy) == 2, "two calls run")
        with pytest.raises(BusyError, match="try again"):
            worker.call("echo", 1)
        worker.stop()


PARENT = """
import threading
from forerun.worker_process import WorkerProcess
worker = WorkerProcess("tests.worker_tasks:run", seconds=60, memory=1 << 26)
def start(): print(worker.call("pid"), flush=True)
first = threading.Thread(target=start); first.start(); first.join()
threading.Thread(target=worker.call, args=("compute",), daemon=True).start()
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, None])
def test_no_worker_outlives_its_owner(signal_number: signal.Signals | None) -> None:
    """Nor does a worker end with the thread that started it."""

    def processor_seconds(pid: int) -> float:
        fields = stat(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout and owner.stdin
        pid = int(owner.stdout.readline())
        wait_until(lambda: processor_seconds(pid) > 0.2, "the worker is busy")
        if signal_number:
            owner.send_signal(signal_number)
        else:
            owner.stdin.close()
        owner.wait(20)
    wait_until(lambda: has_ended(pid), "the worker has ended")
