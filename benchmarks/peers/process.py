"""Another engine in a process of its own; both sides exchange JSON lines.

Whatever goes wrong there (a missing package, a crash, a hang, invalid output) is one `PeerError`
here, and the process ends. `workers/worker.py` is the other side and documents the lines.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError

WORKERS = Path(__file__).parent / "workers"
Prompts = list[list[int]]
END_SECONDS = 5.0  # for a process to end after SIGTERM
MAX_SHOWN = 200  # characters of a process's output in a message


class PeerError(ForerunError):
    """Raised when another engine cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of any engine.

    Attributes:
        speed: tokens per second while decoding.
        outputs: token ids, or None if the engine does not return them.
        accepted_length: tokens per target pass and request, or None if unknown.
        prefill_seconds: from the start to the last request's first token.
    """

    speed: float
    outputs: Prompts | None
    accepted_length: float | None
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Version and limits of an engine.

    `plain` and `speculative` are its maximum concurrency without and with a draft, 0 where it
    cannot; `depths` is True if it drafts at a requested depth, `samples` if it decodes at
    temperatures above 0.
    """

    version: str
    plain: int
    speculative: int
    depths: bool
    samples: bool = False


class Worker:
    """One engine process, from its start to `close`.

    Args:
        name: of the engine.
        python: the program that runs the script.
        script: a file in `workers`, or a path.
        packages: what to install if a package is missing.
        options: given to the worker; "threads" also bounds the usual thread pools.
        timeout: seconds that one answer may take.
    """

    def __init__(
        self,
        name: str,
        python: str,
        script: str,
        packages: str,
        options: dict[str, Any],
        timeout: float,
    ) -> None:
        self.name = name
        self.python = python
        self.packages = packages
        self.timeout = timeout
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
        try:
            self.process = subprocess.Popen(
                [python, str(WORKERS / script), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                errors="replace",
                env=_environment(options["threads"]),
                start_new_session=True,
            )
        except OSError as error:
            self.errors.close()
            raise PeerError(f"{python} cannot be run: {error.strerror}") from None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def load(self) -> None:
        """Wait until the engine has loaded, and set `ready`. Raises PeerError."""
        answer = self._answer()
        try:
            self.ready = Capabilities(**answer["ready"])
        except (KeyError, TypeError):
            raise self._invalid(answer) from None

    def run(self, depth: int, prompts: Prompts, tokens: int, temperature: float = 0.0) -> Outcome:
        """Continue all prompts together by `tokens` tokens; depth 0 is plain decoding.

        Raises PeerError.
        """
        request = {
            "depth": depth,
            "prompts": prompts,
            "tokens": tokens,
            "temperature": temperature,
        }
        assert self.process.stdin is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except OSError:
            raise self._died() from None
        answer = self._answer()
        try:
            outputs = answer["outputs"]
            steps = answer["steps"]
            num_tokens = answer["decode_tokens"]
            speed = num_tokens / answer["decode_seconds"] if num_tokens else 0.0
            prefill = float(answer.get("prefill_seconds", 0.0))
            expected = [tokens] * len(prompts)
            lengths = expected if outputs is None else [len(output) for output in outputs]
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise self._invalid(answer) from None
        if lengths != expected:
            raise PeerError(f"made {lengths} tokens instead of {tokens} each, not comparable")
        return Outcome(speed, outputs, sum(lengths) / steps if steps else None, prefill)

    def _answer(self) -> dict[str, Any]:
        """Return the next line as an object. Raises PeerError for anything else."""
        try:
            line = self.lines.get(timeout=self.timeout)
        except queue.Empty:
            raise PeerError(
                f"gave no answer within {self.timeout:g} seconds: see --timeout"
            ) from None
        if line is None:
            raise self._died()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._invalid(line)
        if "error" in answer:
            raise PeerError(str(answer["error"])[:MAX_SHOWN])
        return answer

    def _died(self) -> PeerError:
        running = self.process.poll() is None
        code = self.process.wait(END_SECONDS) if running else self.process.returncode
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip()
        last = lines.rpartition("\n")[2][:MAX_SHOWN]
        if last.startswith("ModuleNotFoundError: "):
            install = f"{self.python} -m pip install {self.packages}"
            return PeerError(f"{last.partition(': ')[2]}: run {install}")
        return PeerError(f"ended with code {code}{last and f': {last}'}")

    def _invalid(self, answer: Any) -> PeerError:
        return PeerError(f"gave {str(answer).strip()[:MAX_SHOWN]!r}, which is no answer")

    def close(self) -> None:
        """End the process; may be called again."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        assert self.process.stdin is not None
        with suppress(OSError):  # unsent data has no reader
            self.process.stdin.close()


def _environment(threads: int) -> dict[str, str]:
    """Return this environment with bounded thread pools and without our package paths.

    OMP_WAIT_POLICY keeps its default: threads that sleep at every barrier cost llama.cpp a quarter
    of its speed, and no thread spins while another engine runs.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    bounds = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return kept | dict.fromkeys(bounds, str(threads))
