"""Builds the CUDA runtime in host memory with the headers that come with the CUDA build of torch.

python tests/fakegpu/build_runtime.py FOLDER      # prints what LD_PRELOAD has to be
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = "-O1 -g -shared -fPIC -fvisibility=hidden".split()


def build(folder: Path) -> list[Path]:
    packages = Path(sysconfig.get_path("purelib"))
    headers = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]  # the second has crt/
    if not headers[0].exists():
        sys.exit(f"{packages} holds no CUDA build of torch (13): pip took another one")
    folder.mkdir(parents=True, exist_ok=True)
    libraries = [
        ("g++", "cudart.cpp", "libcudart.so.13", ["-std=c++17", f"-Wl,--version-script={HERE / 'cudart.map'}"]),
        ("gcc", "libcuda.c", "libcuda.so.1", []),
        ("gcc", "libnvidia-ml.c", "libnvidia-ml.so.1", []),
    ]
    for compiler, source, name, more in libraries:
        made = folder / name
        if not made.exists() or made.stat().st_mtime < (HERE / source).stat().st_mtime:
            command = [compiler, *FLAGS, *(f"-I{path}" for path in headers), str(HERE / source), *more]
            subprocess.run([*command, f"-Wl,-soname,{made.name}", "-o", str(made)], check=True)
    return [folder / name for _, _, name, _ in libraries]


if __name__ == "__main__":
    print(":".join(map(str, build(Path(sys.argv[1]).resolve()))))
