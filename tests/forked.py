"""Processes of the command line that need not import what others have imported already.

Whatever starts with torch starts with seconds of imports. A nursery, one for each process that runs
tests, has them
behind it and forks: what comes of that is the command line in a process of its own, with its own
signals, descriptors and end. What imports themselves are a part of (a signal while they go on, how
long a start takes) is tested by `python -m forerun`.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Process:
    """As much of subprocess.Popen as tests ask of a process."""

    def __init__(
        self,
        arguments: list[str],
        stdin: int,
        stdout: int,
        stderr: int,
        env: dict[str, str],
        tty: bool = False,
    ):
        """`tty`: it leads a session of its own, whose terminal is its stdin."""
        mine, theirs = os.pipe()
        said = {"arguments": arguments, "env": env, "tty": tty}
        socket.send_fds(
            _nursery(), [json.dumps(said).encode() + b"\0"], [stdin, stdout, stderr, theirs]
        )
        os.close(theirs)
        self._status, self.args, self.returncode = mine, arguments, None
        (self.pid,) = struct.unpack("i", os.read(mine, 4))

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = struct.unpack("i", os.read(self._status, 4))[0]
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float = 1e6) -> int:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*arguments: str, **env: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command line that reads nothing."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            process = Process(
                [*arguments], nowhere, out.fileno(), errors.fileno(), os.environ | env
            )
        finally:
            os.close(nowhere)
        code = process.wait(120)
        for file in (out, errors):
            file.seek(0)
        return code, out.read().decode(), errors.read().decode()


class Spoken(Process):
    """One whose stderr is read, as text; the rest is nowhere."""

    def __init__(self, *arguments: str, **env: str) -> None:
        outer, inner = os.pipe()
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            super().__init__([*arguments], nowhere, nowhere, inner, os.environ | env)
        finally:
            os.close(nowhere)
            os.close(inner)
        self.stderr = open(outer, encoding="utf-8")  # noqa: SIM115

    def communicate(self, timeout: float) -> tuple[None, str]:
        code = self.wait(timeout)
        assert code is not None
        return None, self.stderr.read()

    def __enter__(self) -> Spoken:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stderr.close()


@functools.cache
def _nursery() -> socket.socket:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", f"from tests.forked import nurse; nurse({theirs.fileno()})"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], cwd=ROOT, env=env, stdin=subprocess.DEVNULL
    )
    theirs.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def nurse(descriptor: int) -> None:
    """Fork a command line for each order, until there is nobody left to give one."""
    import forerun.cli.chat
    import forerun.llm
    import forerun.server.app
    import forerun.server.batch  # noqa: F401

    orders = socket.socket(fileno=descriptor)
    while True:
        said, descriptors, *_ = socket.recv_fds(orders, 1 << 20, 4)
        if not said:
            break
        if not os.fork():
            orders.close()
            _watch(json.loads(said.rstrip(b"\0")), descriptors)
            return
        for each in descriptors:
            os.close(each)
        _reap(os.WNOHANG)
    _reap(0)


def _reap(options: int) -> None:
    try:
        while os.waitpid(-1, options)[0]:
            pass
    except ChildProcessError:
        pass


def _watch(order: dict[str, Any], descriptors: list[int]) -> None:
    """Fork once more, and tell how that ends: who gave the order cannot wait for it."""
    *three, status = descriptors
    child = os.fork()
    if not child:
        os.close(status)
        _run(order, three)
    for each in three:
        os.close(each)
    os.write(status, struct.pack("i", child))
    _, code = os.waitpid(child, 0)
    os.write(status, struct.pack("i", os.waitstatus_to_exitcode(code)))
    os._exit(0)


def _run(order: dict[str, Any], descriptors: list[int]) -> None:
    """Be the command line, from its first word to the end of the interpreter."""
    if order["tty"]:
        os.setsid()
        fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
    for place, each in enumerate(descriptors):
        os.dup2(each, place)
        os.close(each)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = [str(ROOT / "forerun" / "__main__.py"), *order["arguments"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, place in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(place, "w", closefd=False)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                raw, "utf-8", "backslashreplace" if place == 2 else "strict", write_through=True
            ),
        )
    from forerun.cli.main import main

    main()
