"""Compiles the native kernels with the machine's compiler. Without one forerun installs all the
same, on torch."""

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
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-Wno-psabi",
]
# contraction off: whether a product and a sum are fused must not depend on how many rows a loop was
# unrolled for
EXACT = ["-ffp-contract=off"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [
    *AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    "-mprefer-vector-width=512",
]
VARIANTS = {
    "portable": [],
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512vnni": AVX512,
    "avx512": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8"],
}
# what older compilers or assemblers do not know, by variant: the library is made without those
NEW = {
    "avxvnni": ("-mavxvnni", "__m256i f(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }"),
    "amx": ("-mamx-int8", "void f() { _tile_dpbsud(0, 1, 2); }"),
}
# for tests on machines that have not got them (by their name in /proc/cpuinfo): what they do, on
# AVX2
FLAGS = {
    "avxvnni": "avx_vnni",
    "avx512vnni": "avx512_vnni",
    "avx512": "avx512_bf16",
    "amx": "amx_int8",
}
EMULATORS = Path(__file__).parent / "tests" / "kernels"
EMULATED = {
    "avxvnni": [*AVX2, "-include", str(EMULATORS / "emulated_avxvnni.h")],
    "avx512vnni": [*AVX2, "-DWITHOUT_BF16", "-include", str(EMULATORS / "emulated_avx512.h")],
    "avx512": [*AVX2, "-include", str(EMULATORS / "emulated_avx512.h")],
}
EMULATED["amx"] = [*EMULATED["avx512"], "-include", str(EMULATORS / "emulated_amx.h")]


class BuildNative(build_ext):
    """One object for each instruction set, chosen among when the library starts."""

    def build_extension(self, ext: Extension) -> None:
        for old in SOURCE.glob("_native*.so") if self.editable_mode else ():
            old.unlink()  # where compiling fails, no library of older sources is to stay
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if not compiler or platform.machine() not in ("x86_64", "AMD64"):
            raise CompileError("no C++ compiler for this machine")
        extra = os.environ.get("FORERUN_CXXFLAGS", "").split()
        emulate = bool(os.environ.get("FORERUN_EMULATE"))
        has = Path("/proc/cpuinfo").read_text().split() if emulate else []
        variants = VARIANTS | {
            n: EMULATED[n] for n, flag in FLAGS.items() if emulate and flag not in has
        }
        switches = ["-DEMULATED"] if emulate else []
        for name, (flag, source) in NEW.items():
            if flag in variants[name] and not self._knows(compiler, flag, source):
                del variants[name]
                switches.append(f"-DWITHOUT_{name.upper()}")
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        jobs = [
            (
                SOURCE / "kernels.cpp",
                work / f"{name}.o",
                [*flags, f'-DNAME="{name}"', f"-DVARIANT={name}_variant"],
            )
            for name, flags in variants.items()
        ]
        jobs.append((SOURCE / "engine.cpp", work / "engine.o", switches))
        with ThreadPoolExecutor() as threads:
            list(
                threads.map(
                    lambda job: self._run(
                        [compiler, *COMMON, *EXACT, *extra, *job[2], "-c", job[0], "-o", job[1]]
                    ),
                    jobs,
                )
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._run(
            [compiler, "-shared", "-pthread", *extra, *(job[1] for job in jobs), "-o", target]
        )

    @staticmethod
    def _knows(compiler: str, flag: str, source: str) -> bool:
        """Whether compiler and assembler are new enough (2020); older variants serve without it."""
        command = [compiler, flag, "-x", "c++", "-c", "-", "-o", os.devnull]
        source = f"#include <immintrin.h>\n{source}\n"
        return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0

    @staticmethod
    def _run(command: list[object]) -> None:
        try:
            subprocess.run(
                [str(part) for part in command], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{error}\n{getattr(error, 'stderr', '')}") from error


setup(
    ext_modules=[Extension("forerun.kernels.native._native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
