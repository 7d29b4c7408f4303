"""Compiles the native kernels with the machine's compiler. Without one forerun installs all the same, on torch."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = Path(__file__).parent / "forerun" / "kernels" / "native"
COMMON = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-strict-aliasing", "-fno-math-errno", "-Wno-psabi"]
# contraction off: whether a product and a sum are fused must not depend on how many rows a loop was unrolled for
EXACT = ["-ffp-contract=off"]
VARIANTS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ],
}


class BuildNative(build_ext):
    """One object for each instruction set, chosen among when the library starts."""

    def build_extension(self, ext: Extension) -> None:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if not compiler or platform.machine() not in ("x86_64", "AMD64"):
            raise CompileError("no C++ compiler for this machine")
        extra = os.environ.get("FORERUN_CXXFLAGS", "").split()
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        jobs = [
            (SOURCE / "kernels.cpp", work / f"{name}.o", [*flags, f'-DNAME="{name}"', f"-DVARIANT={name}_variant"])
            for name, flags in VARIANTS.items()
        ]
        jobs.append((SOURCE / "engine.cpp", work / "engine.o", []))
        with ThreadPoolExecutor() as threads:
            list(
                threads.map(
                    lambda job: self._run([compiler, *COMMON, *EXACT, *extra, *job[2], "-c", job[0], "-o", job[1]]),
                    jobs,
                )
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._run([compiler, "-shared", "-pthread", *extra, *(job[1] for job in jobs), "-o", target])

    @staticmethod
    def _run(command: list[object]) -> None:
        try:
            subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{error}\n{getattr(error, 'stderr', '')}") from error


setup(
    ext_modules=[Extension("forerun.kernels.native._native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
