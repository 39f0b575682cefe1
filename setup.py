"""Builds gemini._C, the native kernels, where there is a compiler; everything else is in pyproject.toml.

The library links nothing but the C++ runtime: it takes addresses, not tensors, so one build serves every torch. It is
built for the baseline of the machine and chooses AVX2 or AVX-512 when it runs. Without a compiler or pybind11 the
package installs all the same, and gemini.kernels runs its torch reference.

The CUDA kernels are not built: their text is installed beside gemini/kernels/nvrtc.py, which compiles it for the card
that it finds.
"""

import shutil
import warnings
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build import build

try:
    import pybind11
except ImportError:
    pybind11 = None

ROOT = Path(__file__).resolve().parent

# The written order of operations is the contract: no contraction to FMA, and nothing of -ffast-math beyond errno.
COMPILE_ARGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0", "-pthread"]


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
            extra_link_args=["-pthread", "-ldl"],
            language="c++",
            optional=True,  # a failing compiler is reported and skipped, not fatal
        )
    ]


class CleanBuild(build):
    """Starts from an empty build folder: what an earlier build left there would be shipped without a word."""

    def run(self) -> None:
        for folder in (self.build_lib, self.build_temp):
            shutil.rmtree(folder, ignore_errors=True)
        super().run()


# integrations/ is at the root of the repository and is imported as gemini.integrations; the folder of that name
# inside gemini/ is only the door to it for source checkouts.
setup(
    packages=[
        *find_packages(include=["gemini", "gemini.*"], exclude=["gemini.integrations*"]),
        "gemini.integrations",
        "gemini.kernels.csrc",
        "gemini.kernels.csrc.cuda",
    ],
    package_dir={"gemini.integrations": "integrations", "gemini.kernels.csrc": "csrc"},
    package_data={"gemini.kernels.csrc": ["*.h"], "gemini.kernels.csrc.cuda": ["*.cu*"]},
    exclude_package_data={"gemini.kernels.csrc": ["*.cpp"]},
    ext_modules=extensions(),
    cmdclass={"build": CleanBuild},
)
