"""Packs DeepSpeed and what it needs into a folder that travels to a machine without a network.

    python benchmarks/gpu/pack_deepspeed.py --into runs/peers/deepspeed-cp312 --python-version 3.12

The wheel is made without native ops (``DS_BUILD_OPS=0``), so it is pure Python; its CPU Adam is compiled where it runs.
Other packages come as wheels for the named version of Python. What torch's machine has anyway (torch, numpy, ninja,
psutil, packaging, tqdm, einops, msgpack, py-cpuinfo) stays behind unless ``--with`` names it. Put the folder on
PYTHONPATH there; ``benchmarks/gpu/peers.py --deepspeed FOLDER`` does. It is made in a virtual environment of its own,
and is no part of the repository.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

DEEPSPEED = "0.19.8"
NEEDED = ("hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
"""Of DeepSpeed's requirements, what comes along. pip resolves them together: pydantic asks for one pydantic-core."""
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 27, 28)) + ("manylinux2014_x86_64",)


def pack(into: Path, version: str, python_version: str, more: Sequence[str]) -> list[Path]:
    """The wheels that were unpacked into ``into``.

    Raises:
        subprocess.CalledProcessError: where pip fails.
    """
    with tempfile.TemporaryDirectory(prefix="pack-") as scratch:
        folder, python = Path(scratch), Path(scratch, "venv", "bin", "python")
        venv.create(folder / "venv", with_pip=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "install", "setuptools", "wheel", "packaging", "py-cpuinfo", "psutil"], check=True)
        environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheels")]
        for name in (f"deepspeed=={version}", "hjson"):  # hjson has no wheel
            subprocess.run([*build, name], check=True, env=environment)
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        wanted = [name for name in (*NEEDED, *more) if name != "hjson"]
        subprocess.run(
            [*pip, "download", "--only-binary=:all:", "--python-version", python_version, "--implementation", "cp",
             *platforms, "-d", str(folder / "wheels"), *wanted],
            check=True,
        )  # fmt: skip
        wheels = sorted((folder / "wheels").glob("*.whl"))
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
        return [Path(wheel.name) for wheel in wheels]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="the folder; what was in it goes")
    parser.add_argument("--version", default=DEEPSPEED, help="of DeepSpeed (default: %(default)s)")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python-version", default=here, help="where it will run (default: %(default)s)")
    parser.add_argument("--with", dest="more", nargs="*", default=[], help="further packages to take along")
    args = parser.parse_args(argv)
    wheels = pack(args.into, args.version, args.python_version, args.more)
    size = sum(file.stat().st_size for file in args.into.rglob("*") if file.is_file())
    print("\n".join(map(str, wheels)))
    print(f"{args.into}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
