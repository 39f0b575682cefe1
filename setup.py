"""Builds gemini._C, the native kernels, where there is a compiler; everything else is in pyproject.toml.

The library links nothing but the C++ runtime: it takes addresses, not tensors, so one build serves every torch. It is
built for the baseline of the machine and chooses AVX2 or AVX-512 when it runs. Without a compiler or pybind11 the
package installs all the same, and gemini.kernels runs its torch reference.

Where nvcc is found (on PATH, or in CUDA_HOME) the CUDA kernels are built in, with the CUDA runtime linked statically:
the same library loads on a machine without a driver. GEMINI_CUDA=0 leaves them out.
"""

import os
import shutil
import subprocess
import warnings
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

try:
    import pybind11
except ImportError:
    pybind11 = None

ROOT = Path(__file__).resolve().parent

# The written order of operations is the contract: no contraction to FMA, and nothing of -ffast-math beyond errno.
COMPILE_ARGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0", "-pthread"]

# The kernels' arithmetic is written in intrinsics that are never contracted; the flags say the same to the rest.
NVCC_ARGS = ["-std=c++17", "-O3", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"]
# Code for Ampere and Hopper, and PTX that a driver compiles for what is newer.
GENCODE = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
]


def find_nvcc() -> Path | None:
    """The CUDA compiler, unless GEMINI_CUDA=0 says to build without it."""
    if os.environ.get("GEMINI_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    if found is None and home is None:
        found = shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found) if found else None


def cuda_libraries(nvcc: Path) -> Path | None:
    """Where the static CUDA runtime lies, as nvcc itself tells: what is on PATH may only call another one."""
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    top = next((line.partition("=")[2] for line in said.splitlines() if line.startswith("#$ TOP=")), "")
    folders = (Path(top, lib) for lib in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"))
    return next((folder for folder in folders if (folder / "libcudart_static.a").exists()), None) if top else None


def extensions() -> list[Extension]:
    if pybind11 is None:
        warnings.warn("pybind11 is missing: installing without the native kernels", stacklevel=2)
        return []
    return [
        Extension(
            "gemini._C",
            sources=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.cpp"))],
            depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.*h"))] + ["setup.py"],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # a failing compiler is reported and skipped, not fatal
        )
    ]


class BuildExt(build_ext):
    """Adds the CUDA kernels where they can be compiled; where that fails the library is built without them."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        libraries = cuda_libraries(nvcc) if nvcc else None
        if nvcc and libraries:
            try:
                ext.extra_objects += self.compile_cuda(nvcc)
            except subprocess.CalledProcessError as e:
                warnings.warn(f"nvcc failed ({e}): building without the CUDA kernels", stacklevel=2)
            else:
                ext.define_macros += [("GEMINI_CUDA", "1")]
                ext.library_dirs += [str(libraries)]
                ext.libraries += ["cudart_static", "dl", "rt"]
        super().build_extension(ext)

    def compile_cuda(self, nvcc: Path) -> list[str]:
        objects = []
        Path(self.build_temp, "cuda").mkdir(parents=True, exist_ok=True)
        for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
            objects.append(str(Path(self.build_temp, "cuda", f"{source.stem}.o")))
            host = "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"
            subprocess.run([nvcc, *NVCC_ARGS, *GENCODE, host, "-c", source, "-o", objects[-1]], check=True)
        return objects


class CleanBuild(build):
    """Starts from an empty build folder: what an earlier build left there would be shipped without a word."""

    def run(self) -> None:
        for folder in (self.build_lib, self.build_temp):
            shutil.rmtree(folder, ignore_errors=True)
        super().run()


# integrations/ is at the root of the repository and is imported as gemini.integrations; the folder of that name
# inside gemini/ is only the door to it for source checkouts.
setup(
    packages=find_packages(include=["gemini", "gemini.*"], exclude=["gemini.integrations*"]) + ["gemini.integrations"],
    package_dir={"gemini.integrations": "integrations"},
    ext_modules=extensions(),
    cmdclass={"build": CleanBuild, "build_ext": BuildExt},
)
