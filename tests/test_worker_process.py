"""Work in processes that can be killed: what it gives, what ends it, and that nothing of it is
left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from forerun import worker_process as sandbox_module
from forerun.errors import BusyError
from forerun.worker_process import RefusedError, WorkerProcess, WorkerProcessError

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def box() -> Iterator[WorkerProcess]:
    sandbox = WorkerProcess("tests.boxed:act", seconds=0.3, memory=64 << 20)
    yield sandbox
    sandbox.stop()


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, f"it never came that {what}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended, though perhaps nobody has asked how."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def begun(box: WorkerProcess) -> int:
    until(lambda: box._busy, "a process works")
    return box.processes[0]


def test_values_go_there_and_back(box: WorkerProcess) -> None:
    for value in ("é\ud800😀", [1, 2.5, None, True], {"a": {"b": []}}):
        assert box.call("say", value) == value
    with pytest.raises(RefusedError, match="nothing"):
        box.call("nothing")
    with pytest.raises(RefusedError, match="plain"):
        box.call("say", object())
    assert box.call("pid") == box.call("pid") != os.getpid()


def test_a_worker_is_light(box: WorkerProcess) -> None:
    assert not {"torch", "numpy", "transformers"} & set(box.call("modules"))


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="sessions do not share processors here"
)
def test_a_worker_lets_others_go_first() -> None:
    """Its own niceness counts within its session only, so the session's has to be set."""
    polite = WorkerProcess("tests.boxed:act", seconds=0.3, memory=64 << 20, niceness=7)
    pid = polite.call("pid")
    assert Path(f"/proc/{pid}/autogroup").read_text().split()[-1] == "7"
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 7
    polite.stop()


@pytest.mark.parametrize(
    "work", [("compute",), ("sleep", 60), ("hoard", 4096), ("exit",)], ids=lambda work: work[0]
)
def test_what_goes_over_a_limit_is_ended_and_the_next_call_works(
    work: tuple[str, int], box: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "WALL", 2)
    before = box.call("pid")
    start = time.monotonic()
    with pytest.raises(WorkerProcessError, match=r"0\.3 seconds or 64 MiB"):
        box.call(*work)
    assert time.monotonic() - start < 10  # it waits at most 1.6 seconds
    assert box.call("pid") != before
    assert gone(before)


def test_what_is_refused_harms_nothing(box: WorkerProcess) -> None:
    before = box.call("pid")
    with pytest.raises(RefusedError, match="recursion"):
        box.call("recurse")
    assert box.call("pid") == before


def test_answers_are_bounded(box: WorkerProcess) -> None:
    assert len(box.call("say", "x" * 1_000_000)) == 1_000_000
    with pytest.raises(WorkerProcessError, match="too long"):
        box.call("say", "\x01" * 1_000_000)  # six times as long in JSON


def test_a_worker_that_is_killed(box: WorkerProcess) -> None:
    """While it works, and while it has nothing to do."""
    with ThreadPoolExecutor(1) as pool:
        work: Future[object] = pool.submit(box.call, "sleep", 60)
        os.kill(begun(box), signal.SIGKILL)
        with pytest.raises(WorkerProcessError, match="ended"):
            work.result(20)
    idle = box.call("pid")
    os.kill(idle, signal.SIGKILL)
    until(lambda: gone(idle), "it is dead")
    assert box.call("pid") != idle


def test_few_work_at_once_and_all_end_when_told() -> None:
    box, failed, most = (
        WorkerProcess("tests.boxed:act", seconds=30, memory=64 << 20),
        list[str](),
        0,
    )

    def wait() -> None:
        with pytest.raises(WorkerProcessError) as caught:
            box.call("sleep", 60)
        failed.append(str(caught.value))

    threads = [threading.Thread(target=wait) for _ in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: len(box._busy) == 2, "two work")
    pids = box.processes
    assert len(pids) == 2
    box.stop()
    for thread in threads:
        thread.join(20)
        most = max(most, len(box._busy))
    assert len(failed) == 6 and all("ended" in text for text in failed) and most <= 2
    assert all(gone(pid) for pid in pids)
    assert box.call("say", 1) == 1
    box.stop()


def test_a_call_waits_for_a_place_only_so_long(
    box: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "PATIENCE", 0.01)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(box.call, "sleep", 60)
        until(lambda: len(box._busy) == 2, "two work")
        with pytest.raises(BusyError, match="try again"):
            box.call("say", 1)
        box.stop()


PARENT = """
import threading
from forerun.errors import BusyError
from forerun.worker_process import WorkerProcess
box = WorkerProcess("tests.boxed:act", seconds=60, memory=1 << 26)
def start(): print(box.call("pid"), flush=True)
first = threading.Thread(target=start); first.start(); first.join()
threading.Thread(target=box.call, args=("compute",), daemon=True).start()
input()
"""


@LINUX
@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, signal.SIGTERM, None], ids=["killed", "terminated", "ends"]
)
def test_no_worker_outlives_the_process_that_started_it(sign: signal.Signals | None) -> None:
    """Nor does one end with the thread that started it."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stdin
        worker = int(process.stdout.readline())
        until(lambda: computing(worker) > 0.2, "it works")
        if sign:
            process.send_signal(sign)
        else:
            process.stdin.close()
        process.wait(20)
    until(lambda: gone(worker), "the worker has ended")


def computing(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
