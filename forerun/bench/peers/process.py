"""Another engine in a process of its own, run by the Python that has it, spoken with in lines of
JSON.

Whatever goes wrong there, a missing package, a death, a silence, nonsense, is one `PeerError` here,
and the process is gone. `forerun/bench/peers/scripts/worker.py` is the other side, and says what
the lines hold."""

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
from typing import Any, Protocol

from forerun.errors import ForerunError

SCRIPTS = Path(__file__).parent / "scripts"
Prompts = list[list[int]]
PATIENCE = 5.0  # seconds for a process to end when told to
SHOWN = 200  # characters of what a process said


class PeerError(ForerunError):
    """Another engine that cannot be measured, and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of any engine: tokens a second while decoding, and what came out.

    `outputs` and `accepted_length` are None where the engine does not tell. Accepted length is
    tokens a pass of the target and request. `prefill_seconds` go from the beginning to the first
    token of the last request."""

    speed: float
    outputs: Prompts | None
    accepted_length: float | None
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What an engine is: its version, the most requests at once that it decodes plainly and with a
    draft, and whether it drafts as deep as it is asked to."""

    version: str
    plain: int
    speculative: int
    depths: bool


class Player(Protocol):
    """An engine that takes part, ours or another."""

    name: str
    ready: Ready

    def run(self, depth: Any, prompts: Prompts, tokens: int) -> Outcome:
        """Continue all prompts at once by `tokens` tokens each; depth 0 is plain decoding. Raises
        PeerError."""


class Worker:
    """One process, from its start to `close`.

    Args:
        name: of the engine.
        python: the program that runs the script.
        script: the name of a file in `forerun/bench/peers/scripts`, or a path.
        packages: what to install where a package is missing.
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
        self.name, self.python, self.packages, self.timeout = name, python, packages, timeout
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
        command = [python, str(SCRIPTS / script), json.dumps(options)]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, errors="replace",
                env=_environment(options["threads"]), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.errors.close()
            raise PeerError(f"{python} cannot be run: {error.strerror}") from None
        threading.Thread(
            target=self._listen, daemon=True
        ).start()  # asleep whenever nothing is said

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def load(self) -> None:
        """Wait until the engine has loaded; `ready` says what it is."""
        answer = self._answer()
        try:
            self.ready = Ready(**answer["ready"])
        except (KeyError, TypeError):
            raise self._nonsense(answer) from None

    def run(self, depth: int, prompts: Prompts, tokens: int) -> Outcome:
        """As `Player.run`."""
        order = {"depth": depth, "prompts": prompts, "tokens": tokens}
        assert self.process.stdin is not None
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
        except OSError:
            raise self._died() from None
        answer = self._answer()
        try:
            outputs, steps, made = answer["outputs"], answer["steps"], answer["decode_tokens"]
            speed = made / answer["decode_seconds"] if made else 0.0
            prefill = float(answer.get("prefill_seconds", 0.0))
            lengths = (
                [tokens] * len(prompts) if outputs is None else [len(output) for output in outputs]
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise self._nonsense(answer) from None
        if lengths != [tokens] * len(prompts):
            raise PeerError(
                f"made {lengths} tokens where {tokens} each were asked for, so it cannot be compared"
            )
        return Outcome(speed, outputs, sum(lengths) / steps if steps else None, prefill)

    def _answer(self) -> dict[str, Any]:
        """The next line as an object. Raises PeerError for anything that is none, or says that
        something failed."""
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
            raise self._nonsense(line)
        if "error" in answer:
            raise PeerError(str(answer["error"])[:SHOWN])
        return answer

    def _died(self) -> PeerError:
        code = (
            self.process.wait(PATIENCE) if self.process.poll() is None else self.process.returncode
        )
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2][:SHOWN]
        if last.startswith("ModuleNotFoundError: "):
            return PeerError(
                f"{last.partition(': ')[2]}: run {self.python} -m pip install {self.packages}"
            )
        return PeerError(f"ended with code {code}{last and f': {last}'}")

    def _nonsense(self, said: Any) -> PeerError:
        return PeerError(f"said {str(said).strip()[:SHOWN]!r}, which is no answer")

    def close(self) -> None:
        """End the process, at once where it does not end when told to. May be called again."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        assert self.process.stdin is not None
        with suppress(OSError):  # what was still to be sent has no reader
            self.process.stdin.close()


def _environment(threads: int) -> dict[str, str]:
    """This process's, with the usual pools bound to `threads`, and without what would lend it our
    packages.

    OMP_WAIT_POLICY is left as it is. By default OpenMP's threads spin for milliseconds before they
    sleep: none does while another engine runs. With `passive` they sleep at every barrier, which
        took llama.cpp a quarter of its speed
    and more; but where other programs want the same cores, spinning takes far more than that.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    bounds = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return kept | dict.fromkeys(bounds, str(threads))
