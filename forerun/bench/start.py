"""Start-up time and memory of whole processes, started as users start them."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from forerun.cli.progress import Tell, nothing
from forerun.errors import ConfigError, ForerunError, one_line
from forerun.measure.medians import median, median_if_known
from forerun.utils import check_integer

PROMPT = "Say hello."
READY_TIMEOUT = 600.0  # seconds that a process may take to become ready


@dataclass(frozen=True, slots=True)
class Start:
    """One process; over several rounds, medians.

    Attributes:
        command: how forerun is called.
        verb: generate or serve.
        ready: seconds until a server answers /health; None for generate.
        first: seconds to the first byte of text; for a server, to the first answer once it is
            ready.
        memory: peak resident bytes, including pages of memory-mapped files.
    """

    command: str
    verb: str
    ready: float | None
    first: float
    memory: int


def measure_starts(
    commands: Sequence[str], options: Sequence[str], repeats: int, tell: Tell = nothing
) -> list[Start]:
    """Start every command in turn, `repeats` times after an uncounted start.

    Args:
        commands: how forerun is called, such as "python -m forerun"; compared round by round.
        options: for both verbs, such as --model X.

    Raises:
        ConfigError: a command that cannot be run.
        ForerunError: a process that ends early, with its last line.
    """
    check_integer("repeats", repeats, 1)
    found: dict[tuple[str, str], list[Start]] = {}
    verbs = (("generate", start_generate), ("serve", start_serve))
    turns = list(itertools.product(range(repeats + 1), commands, verbs))
    for i, (round_, command, (verb, start)) in enumerate(turns):
        tell(f"round {round_} of {repeats}: {command} {verb}", i, len(turns))
        measured = start(command, options)
        if round_:
            found.setdefault((command, verb), []).append(measured)
    return [
        replace(
            starts[0],
            ready=median_if_known([s.ready for s in starts]),
            first=median([s.first for s in starts]),
            memory=int(median([s.memory for s in starts])),
        )
        for starts in found.values()
    ]


def start_generate(command: str, options: Sequence[str]) -> Start:
    """Time `generate` with 16 tokens. Raises ForerunError."""
    began = time.perf_counter()
    arguments = ["generate", PROMPT, "--max-tokens", "16", *options]
    with _process(command, arguments, subprocess.PIPE) as (process, errors):
        assert process.stdout is not None
        first_byte = process.stdout.read(1)
        first = time.perf_counter() - began
        process.stdout.read()
        memory = _wait(process)
        if process.returncode or not first_byte:
            raise ForerunError(_last_line(command, errors))
    return Start(command, "generate", None, first, memory)


def start_serve(command: str, options: Sequence[str]) -> Start:
    """Time `serve` until it is ready and until its first answer. Raises ForerunError."""
    port = _free_port()
    began = time.perf_counter()
    arguments = ["serve", "--port", str(port), *options]
    with _process(command, arguments, subprocess.DEVNULL) as (process, errors):
        while not _is_healthy(port):
            if process.poll() is not None or time.perf_counter() - began > READY_TIMEOUT:
                raise ForerunError(_last_line(command, errors))
            time.sleep(0.005)
        ready = time.perf_counter()
        _complete(port)
        first = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        memory = _wait(process)
    return Start(command, "serve", ready - began, first - ready, memory)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process and return its peak resident bytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024


@contextmanager
def _process(
    command: str, arguments: Sequence[str], stdout: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run a process and yield it with its stderr; it is killed at the end of the block."""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [*shlex.split(command), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=errors,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{command!r} cannot be run: {error}") from None
        try:
            yield process, errors
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _complete(port: int) -> None:
    """Request a completion of one token. Raises ForerunError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_TIMEOUT)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    if response.status != 200:
        raise ForerunError(f"the server answered {response.status}: {one_line(text)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(command: str, errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    reason = one_line(lines[-1]) if lines else "without an error message"
    return f"{command} ended before it answered: {reason}"


def this_command() -> str:
    """Return the command that runs this installation."""
    return shlex.join([sys.executable, "-m", "forerun"])


def size_of(model: str | None) -> int:
    """Return the bytes of a model's stored weights. Raises LoadError."""
    from forerun.models.files import parts_of
    from forerun.models.hub import find_model

    path = find_model(model)
    if path.is_dir():
        files = list(path.glob("*.safetensors"))
    else:
        files = [Path(path.parent, part) for part in parts_of(path.name)]
    return sum(file.stat().st_size for file in files)
