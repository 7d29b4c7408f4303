#!/usr/bin/env python3
"""Check and measure forerun on a CUDA device, in about seven minutes and without any download.

    python scripts/device_check.py --out device_check.json
    python scripts/device_check.py --cpu               # the same stages in miniature, on a CPU
    python scripts/device_check.py --stages card,speed --minutes 2

Every stage of `device_stages.py` runs in a process of its own, so one that fails, hangs or breaks
the device does not end the others. Results are written to the JSON file after each row, and printed
as Markdown tables for docs/gpu.md at the end. Exit code 1 if a stage failed or ran out of time, 130
after Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "scripts")]  # of forerun, benchmarks and the stages
# stage: (module and function, seconds of a check of seven minutes)
STAGES = {
    "card": ("device_stages:examine_card", 20),
    "rows": ("device_stages:check_rows", 25),
    "rows_workspace": ("device_stages:check_rows_workspace", 15),
    "noise": ("device_stages:check_noise", 10),
    "kernels": ("device_stages:check_kernels", 60),
    "speed": ("device_stages:measure_speed", 110),
    "requests": ("device_stages:measure_requests", 35),
    "certificate": ("device_stages:certify", 60),
    "training": ("device_stages:train_drafters", 25),
    "tests": ("device_stages:run_tests", 60),
}
Known = dict[str, Any]  # what is known of a stage: status, error, seconds, limit, tables


def work(function: str, cpu: bool, sender: Any) -> None:
    """Run a stage in a process, and in a process group, of its own, and send what it yields."""
    os.setsid()
    try:
        module, _, name = function.partition(":")
        for row in getattr(importlib.import_module(module), name)(cpu):
            sender.send(("row", row))
        sender.send(("end", ("ok", "")))
    except BaseException as error:
        traceback.print_exc()
        text = (str(error).strip() or "no message").splitlines()[0]
        sender.send(("end", ("failed", f"{type(error).__name__}: {text}")))


def run_stage(function: str, cpu: bool, limit: float) -> Iterator[Known]:
    """Run a stage and yield what is known of it at its start, after each row, and at its end.

    It is killed with all its processes after `limit` seconds, or when the caller stops."""
    began = time.monotonic()
    tables: dict[str, list[dict[str, Any]]] = {}
    known: Known = {"status": "interrupted", "error": "", "seconds": 0.0, "limit": round(limit, 1)}
    known["tables"] = tables
    yield known
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(function, cpu, sender))
    process.start()
    sender.close()
    try:
        while known["status"] == "interrupted":
            kind, content = "end", ("timed out", f"not done after {limit:.0f} s")
            if receiver.poll(max(began + limit - time.monotonic(), 0)):
                try:
                    kind, content = receiver.recv()
                except EOFError:
                    content = ("failed", "the process died")
            if kind == "row":
                tables.setdefault(content[0], []).append(content[1])
            else:
                known["status"], known["error"] = content
            known["seconds"] = round(time.monotonic() - began, 1)
            yield known
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def commit() -> str:
    """Return the commit of the checkout, and whether files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not shutil.which("git") or not (head := git("rev-parse", "HEAD")):
        return "unknown"
    return head + (" with changes" if git("status", "--porcelain") else "")


def device_name(cpu: bool) -> str:
    """Return the name of the device that is checked, "" if there is none."""
    if cpu:
        return "CPU"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def shown(value: object) -> str:
    """Return a cell of a Markdown table."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def markdown(results: dict[str, Any]) -> str:
    """Return all tables."""
    lines = [
        f"{results['device']}, forerun {results['forerun']}, commit {results['commit']},"
        f" {results['date']}: `{results['command']}`"
    ]
    for name, stage in results["stages"].items():
        error = f" ({stage['error']})" if stage["error"] else ""
        lines += ["", f"### {name}: {stage['status']} in {stage['seconds']:.0f} s{error}"]
        for rows in stage["tables"].values():
            columns = list(rows[0])
            lines += ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
            lines += [f"| {' | '.join(shown(row.get(c)) for c in columns)} |" for row in rows]
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    usage = "python scripts/device_check.py [options]"
    parser = argparse.ArgumentParser(usage=usage, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("device_check.json"), help="JSON file")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, with commas")
    parser.add_argument("--minutes", type=float, default=7.0, help="time for all stages")
    parser.add_argument("--cpu", action="store_true", help="run in miniature on the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    options = parser.parse_args(arguments)
    options.stages = options.stages.split(",")
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}: use {', '.join(STAGES)}")
    options.device = device_name(options.cpu)
    if not options.device:
        parser.error("torch sees no CUDA device: use --cpu for a run in miniature")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and return the exit code."""
    options = parsed(arguments)
    # Stages and tests, in other processes, use this checkout, too.
    sys.path[:0] = PATHS
    inherited = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *inherited])
    from forerun import __version__
    from forerun.utils import write_atomic

    stages: dict[str, Known] = {}
    results: dict[str, Any] = {
        "device": options.device,
        "forerun": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": f"python scripts/device_check.py{' --cpu' if options.cpu else ''}",
        "stages": stages,
    }
    multiprocessing.get_context("forkserver").set_forkserver_preload(["device_stages"])
    forkserver.ensure_running()  # it imports the stages once for all of them
    end = time.monotonic() + 60 * options.minutes
    code = 0
    try:
        for i, name in enumerate(options.stages):
            # Stages share the time that is left in proportion to their seconds.
            function, seconds = STAGES[name]
            left = sum(STAGES[other][1] for other in options.stages[i:])
            limit = max(end - time.monotonic(), 0.0) * seconds / left
            for stages[name] in run_stage(function, options.cpu, limit):
                write_atomic(options.out, json.dumps(results, indent=1) + "\n")
            known = stages[name]
            print(f"{name}: {known['status']}, {known['seconds']} s", file=sys.stderr, flush=True)
            code = code if known["status"] == "ok" else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    print(json.dumps(results) if options.json else markdown(results))
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout`
    sys.exit(main())
