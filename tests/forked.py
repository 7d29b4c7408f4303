"""Command line processes that are forked from a server with all imports done.

Importing torch takes seconds. Each process that runs tests has one fork server; its children are
separate processes with their own signals, descriptors and exit codes. Tests in which the imports
matter (signals during imports, start-up time) run `python -m forerun`.
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
    """The part of subprocess.Popen that tests use."""

    def __init__(
        self,
        arguments: list[str],
        stdin: int,
        stdout: int,
        stderr: int,
        env: dict[str, str],
        tty: bool = False,
    ):
        """`tty` makes the process the leader of a session whose terminal is its stdin."""
        ours, theirs = os.pipe()
        order = {"arguments": arguments, "env": env, "tty": tty}
        socket.send_fds(
            _fork_server(), [json.dumps(order).encode() + b"\0"], [stdin, stdout, stderr, theirs]
        )
        os.close(theirs)
        self._status, self.args, self.returncode = ours, arguments, None
        (self.pid,) = struct.unpack("i", os.read(ours, 4))

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
    """Run a command line without input; return its exit code, stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        null = os.open(os.devnull, os.O_RDWR)
        try:
            process = Process([*arguments], null, out.fileno(), errors.fileno(), os.environ | env)
        finally:
            os.close(null)
        code = process.wait(120)
        for file in (out, errors):
            file.seek(0)
        return code, out.read().decode(), errors.read().decode()


class StderrProcess(Process):
    """A process whose stderr is read as text; stdin and stdout are the null device."""

    def __init__(self, *arguments: str, **env: str) -> None:
        outer, inner = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            super().__init__([*arguments], null, null, inner, os.environ | env)
        finally:
            os.close(null)
            os.close(inner)
        self.stderr = open(outer, encoding="utf-8")  # noqa: SIM115

    def communicate(self, timeout: float) -> tuple[None, str]:
        code = self.wait(timeout)
        assert code is not None
        return None, self.stderr.read()

    def __enter__(self) -> StderrProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stderr.close()


@functools.cache
def _fork_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", f"from tests.forked import serve; serve({theirs.fileno()})"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], cwd=ROOT, env=env, stdin=subprocess.DEVNULL
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(descriptor: int) -> None:
    """Fork a command line for each order, until the socket is closed."""
    import forerun.cli.chat
    import forerun.llm
    import forerun.server.app
    import forerun.server.batch  # noqa: F401

    orders = socket.socket(fileno=descriptor)
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, 1 << 20, 4)
        if not order:
            break
        if not os.fork():
            orders.close()
            _supervise(json.loads(order.rstrip(b"\0")), descriptors)
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


def _supervise(order: dict[str, Any], descriptors: list[int]) -> None:
    """Fork again and report the exit code, since the client cannot wait for a process of ours."""
    *streams, status = descriptors
    child = os.fork()
    if not child:
        os.close(status)
        _run_command_line(order, streams)
    for each in streams:
        os.close(each)
    os.write(status, struct.pack("i", child))
    _, code = os.waitpid(child, 0)
    os.write(status, struct.pack("i", os.waitstatus_to_exitcode(code)))
    os._exit(0)


def _run_command_line(order: dict[str, Any], descriptors: list[int]) -> None:
    """Run the command line in this process until the interpreter exits."""
    if order["tty"]:
        os.setsid()
        fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = [str(ROOT / "forerun" / "__main__.py"), *order["arguments"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "w", closefd=False)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                raw, "utf-8", "backslashreplace" if number == 2 else "strict", write_through=True
            ),
        )
    from forerun.cli.main import main

    main()
