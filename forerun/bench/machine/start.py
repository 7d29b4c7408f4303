"""How long one waits from the command to the first word, and how much memory that takes: whole
processes, as users start them."""

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
PATIENCE = 600.0  # seconds that a process may take to become ready


@dataclass(frozen=True, slots=True)
class Start:
    """A process from its beginning; of several rounds, medians.

    Attributes:
        command: how forerun is called.
        verb: generate or serve.
        ready: seconds until a server answers /health; of generate, None.
        first: seconds until the first byte of text; of a server, of the first answer after it was
            ready.
        memory: the most bytes that were resident at once, pages of files that are mapped included.
    """

    command: str
    verb: str
    ready: float | None
    first: float
    memory: int


def measure_starts(
    commands: Sequence[str], options: Sequence[str], repeats: int, tell: Tell = nothing
) -> list[Start]:
    """Start every command in turn, `repeats` times after one that is not counted (files are then in
    memory).

    Args:
        commands: how forerun is called, such as "python -m forerun"; several are compared round by
            round.
        options: for both verbs, such as --model X.

    Raises:
        ConfigError: a command that cannot be run.
        ForerunError: one that ends before it says anything, with its last line.
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
            starts[0], ready=median_if_known([s.ready for s in starts]), first=median([s.first for s in starts]),
            memory=int(median([s.memory for s in starts])),
        )
        for starts in found.values()
    ]  # fmt: skip


def start_generate(command: str, options: Sequence[str]) -> Start:
    """One text of 16 tokens. Raises ForerunError."""
    began = time.perf_counter()
    with _process(
        command, ["generate", PROMPT, "--max-tokens", "16", *options], subprocess.PIPE
    ) as (process, errors):
        assert process.stdout is not None
        first = process.stdout.read(1)
        taken = time.perf_counter() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not first:
            raise ForerunError(_last(command, errors))
    return Start(command, "generate", None, taken, usage.ru_maxrss * 1024)


def start_serve(command: str, options: Sequence[str]) -> Start:
    """One server, until its first answer. Raises ForerunError."""
    port, began = _free_port(), time.perf_counter()
    with _process(command, ["serve", "--port", str(port), *options], subprocess.DEVNULL) as (
        process,
        errors,
    ):
        while not _answers(port):
            if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                raise ForerunError(_last(command, errors))
            time.sleep(0.005)
        ready = time.perf_counter()
        _ask(port)
        first = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Start(command, "serve", ready - began, first - ready, usage.ru_maxrss * 1024)


@contextmanager
def _process(
    command: str, words: Sequence[str], stdout: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A process and what it says on stderr; it does not outlive the block."""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [*shlex.split(command), *words],
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


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _ask(port: int) -> None:
    """One completion of one token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json"}
    connection.request(
        "POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 1}), headers
    )
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        raise ForerunError(
            f"the server answered {response.status}: {one_line(text.decode(errors='replace'))}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last(command: str, errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"{command} ended before it said anything: {one_line(lines[-1]) if lines else 'without an error message'}"


def here() -> str:
    """The command that is running."""
    return shlex.join([sys.executable, "-m", "forerun"])


def size_of(model: str | None) -> int:
    """Bytes of a model's weights as they are stored. Raises LoadError."""
    from forerun.models.files import parts_of
    from forerun.models.hub import find_model

    path = find_model(model)
    files = (
        list(path.glob("*.safetensors"))
        if path.is_dir()
        else [Path(path.parent, p) for p in parts_of(path.name)]
    )
    return sum(file.stat().st_size for file in files)
