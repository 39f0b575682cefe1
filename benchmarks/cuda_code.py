"""What the compiler makes of the CUDA kernels: registers, local memory and wide accesses of each, per architecture.

    python benchmarks/cuda_code.py --report benchmarks/reports/cuda_code_<architectures>_<date>.md

Compiles csrc/cuda/*.cu with the options of gemini/kernels/nvrtc.py, for each architecture that is asked for, and reads
what ptxas says of every kernel, its PTX, and its machine code (SASS) where there is a disassembler: cuobjdump on PATH,
beside nvcc, or given with --cuobjdump (the package nvidia-cuda-cuobjdump holds one). Where NVRTC of the same release is
there (torch of CUDA brings it, or --nvrtc LIBRARY) its machine code, which is what runs, is compared byte by byte, and
where that differs the arithmetic and accesses of its PTX. No GPU is needed.

Status 1, naming the kernel, where one uses local memory (a stack frame, spills, LDL or STL); where one for aligned
arrays has fewer 128-bit loads or stores than a thread's elements fill; and where PTX holds a fused multiply-add, an
approximation or flushed subnormals, none of which the CPU kernels have; and where NVRTC makes other code. Status 2:
there is no nvcc.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report
from benchmarks._report import add_out, told_command
from gemini.kernels import nvrtc

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ["80", "89", "90"]
COMPACT = ("Adam<true>", "Adam<false>", "Lion", "PlainSgd", "Sgd")  # rules with a compact form
_ENTRY = r"^\s*(?:\.visible |\.weak )?\.entry (\w+)\(", r"^}"
FORMATS = {"0": "fp32", "1": "bf16", "2": "fp16"}  # of gradients: enum Dtype
DOINGS = {"0": "read", "1": "copy", "2": "widen", "3": "accumulate", "4": "first24", "5": "add24"}  # enum Doing
STATES = {
    "AdamW": 2,
    "Adam": 2,
    "Sgd": 1,
    "PlainSgd": 0,
    "Lion": 1,
}


@dataclass
class Kernel:
    """What is known of one kernel on one architecture. ``machine`` is None without a disassembler."""

    name: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    ptx: dict[str, int] = field(default_factory=dict)
    machine: dict[str, int] | None = None

    def wide(self) -> tuple[int, int]:
        """128-bit loads and stores of global memory: in the machine code, else in PTX."""
        counts = self.ptx if self.machine is None else self.machine
        return counts.get("wide loads", 0), counts.get("wide stores", 0)

    def faults(self) -> list[str]:
        """What must not be."""
        found = []
        local = 0 if self.machine is None else self.machine["local"]
        if self.stack or self.spills or local or self.ptx["local"]:
            found.append(f"local memory: {self.stack} bytes of stack, {self.spills} spilled, {local} instructions")
        wanted, wide = expected_wide(self.name), self.wide()
        if wide[0] < wanted[0] or wide[1] < wanted[1]:
            found.append(f"128-bit accesses: {wide[0]} loads and {wide[1]} stores, of {wanted[0]} and {wanted[1]}")
        if self.ptx["inexact"]:
            found.append(f"{self.ptx['inexact']} instructions that fuse, approximate or flush")
        return found


def expected_wide(name: str) -> tuple[int, int]:
    """The 128-bit loads and stores of a kernel for aligned arrays, whose threads take eight elements of each.

    Of what is not aligned nothing is demanded.
    """
    narrow, wide = 8 * 2 // 16, 8 * 4 // 16
    if match := re.fullmatch(r"(\w+)<(\w+), (split|fp32 master), aligned>", name):
        master = 2 * narrow if match[3] == "split" else wide
        stored = master + STATES[match[1]] * wide
        return stored + (wide if match[2] == "fp32" else narrow), stored
    if match := re.fullmatch(r"compact \w+<(\w+), aligned>", name):  # bytes go eight at a time
        return narrow + (wide if match[1] == "fp32" else narrow), narrow
    if match := re.fullmatch(r"grad<(\w+), (\w+), aligned>", name):
        source = wide if match[2] == "fp32" else narrow
        stored = {"read": 0, "copy": source, "first24": narrow, "add24": narrow}.get(match[1], wide)
        return source + {"accumulate": wide, "add24": narrow}.get(match[1], 0), stored
    return 0, 0


def short_name(symbol: str) -> str:
    """A kernel's name and template arguments, from its mangled symbol."""
    match = re.search(r"\d(update|compact|split|join|grad|clip)_kernel(?:I(.*?)EEv)?", symbol)
    if match is None:
        return symbol
    arguments = re.findall(r"L(?:NS_\d*\w*?E|N\w*?E|b)(\d)E", f"{match[2] or ''}E")
    if match[1] == "update":
        rule = re.match(r"NS_\d+([A-Za-z]+?)(?:ILb(\d)EE)?EL", match[2])
        assert rule is not None, symbol
        grad, is_split, is_aligned = arguments[-3:]
        master = "split" if is_split == "1" else "fp32 master"
        name = "AdamW" if rule[2] == "1" else rule[1]
        return f"{name}<{FORMATS[grad]}, {master}, {'aligned' if is_aligned == '1' else 'not aligned'}>"
    if match[1] == "compact":
        rule = re.match(r"NS_\d+([A-Za-z]+?)(?:ILb(\d)EE)?EL", match[2])
        assert rule is not None, symbol
        grad, is_aligned = arguments[-2:]
        name = "AdamW" if rule[2] == "1" else rule[1]
        return f"compact {name}<{FORMATS[grad]}, {'aligned' if is_aligned == '1' else 'not aligned'}>"
    if match[1] == "grad":
        doing, source, is_aligned = arguments
        return f"grad<{DOINGS[doing]}, {FORMATS[source]}, {'aligned' if is_aligned == '1' else 'not aligned'}>"
    return match[1]


# ---- reading what the tools say --------------------------------------------------------------------------------------


def read_resources(said: str) -> dict[str, Kernel]:
    """By symbol, from ``ptxas -v``."""
    found: dict[str, Kernel] = {}
    kernel: Kernel | None = None
    for line in said.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = found[match[1]] = Kernel(short_name(match[1]))
        elif re.search(r"Function properties for", line):
            continue
        elif kernel is not None:
            if match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
                kernel.stack, kernel.spills = int(match[1]), int(match[2]) + int(match[3])
            if match := re.search(r"Used (\d+) registers", line):
                kernel.registers = int(match[1])
                shared = re.search(r"(\d+) bytes smem", line)
                kernel.shared = int(shared[1]) if shared else 0
    return found


def read_ptx(text: str) -> dict[str, dict[str, int]]:
    """Counts by symbol."""
    found = {}
    for symbol, body in _bodies(text, *_ENTRY):
        found[symbol] = {
            "wide loads": _count(body, r"\bld\.global\.(?:\w+\.)*v4\.\w?32|\bld\.global\.(?:\w+\.)*v2\.\w?64"),
            "wide stores": _count(body, r"\bst\.global\.(?:\w+\.)*v4\.\w?32|\bst\.global\.(?:\w+\.)*v2\.\w?64"),
            "local": _count(body, r"\b(?:ld|st)\.local\b"),
            "inexact": _count(body, r"\b(?:fma|mad)\.\S*f(?:32|64)\b|\.approx\b|\.ftz\b|\b(?:div|sqrt)\.full\b"),
        }
    return found


def read_machine_code(text: str) -> dict[str, dict[str, int]]:
    """Counts by symbol, of SASS as cuobjdump prints it."""
    found = {}
    for symbol, body in _bodies(text, r"^\s*Function : (\w+)", r"^\s*\.{6,}"):
        found[symbol] = {
            "wide loads": _count(body, r"\bLDG?\.E\.(?:\w+\.)*128\b"),
            "wide stores": _count(body, r"\bSTG?\.E\.(?:\w+\.)*128\b"),
            "loads": _count(body, r"\bLDG?\.E\b"),
            "stores": _count(body, r"\bSTG?\.E\b"),
            "local": _count(body, r"\b(?:LDL|STL)\b"),
            "instructions": _count(body, r"/\*[0-9a-f]{4,}\*/ +(?!NOP)\S"),
        }
    return found


def _bodies(text: str, begins: str, ends: str) -> Iterator[tuple[str, str]]:
    symbol, lines = "", list[str]()
    for line in text.splitlines():
        if match := re.match(begins, line):
            symbol, lines = match[1], []
        elif symbol and re.match(ends, line):
            yield symbol, "\n".join(lines)
            symbol = ""
        else:
            lines.append(line)
    if symbol:
        yield symbol, "\n".join(lines)


def _count(text: str, pattern: str) -> int:
    return len(re.findall(pattern, text))


# ---- the tools -------------------------------------------------------------------------------------------------------


def all_kernels() -> dict[str, str]:
    """By the name of each kernel with its template arguments: the types of its arguments."""
    found = {
        "split_kernel": "const float*, uint16_t*, uint16_t*, int64_t",
        "join_kernel": "const uint16_t*, const uint16_t*, float*, int64_t",
        "clip_kernel": "const double*, const int64_t*, int64_t, double, double*, ClipPlaces",
    }
    for grad, aligned in itertools.product(("f32", "bf16", "f16"), ("true", "false")):
        dtype = f"gemini::Dtype::{grad}"
        for doing in DOINGS.values():
            found[f"grad_kernel<gemini::cuda::Doing::{doing}, {dtype}, {aligned}>"] = (
                "void*, void*, const void*, int64_t, NormPlaces"
            )
        for rule in ("Adam<true>", "Adam<false>", "Average", *sorted(STATES.keys() - {"AdamW", "Adam"})):
            argument = f"const __grid_constant__ Launch<gemini::{rule}>"
            for split in ("true", "false"):
                found[f"update_kernel<gemini::{rule}, {dtype}, {split}, {aligned}>"] = argument
            if rule in COMPACT:
                found[f"compact_kernel<gemini::{rule}, {dtype}, {aligned}>"] = argument
    return found


def write_source(path: Path, chosen: Iterable[str] | None = None) -> None:
    """Kernels (all without ``chosen``), for nvcc, which makes code of a template only where it is asked for."""
    folder = ROOT / "csrc" / "cuda"
    lines = ["#include <cstdint>", *(f'#include "{folder / name}.cu"' for name in ("update", "grad"))]
    lines += ["namespace gemini::cuda {"]
    types = all_kernels()
    names = types if chosen is None else chosen
    lines += [f"template __global__ void {name}({types[name]});" for name in names if "<" in name]
    path.write_text("\n".join([*lines, "}\n"]))


def examine(
    nvcc: str, disassembler: str | None, architecture: str, folder: Path, chosen: Iterable[str] | None = None
) -> list[Kernel]:
    """Every kernel; leaves machine code and PTX in ``folder``. Raises subprocess.CalledProcessError, with what the tool
    said.
    """
    source, binary, ptx = folder / "kernels.cu", folder / f"{architecture}.cubin", folder / f"{architecture}.ptx"
    write_source(source, chosen)
    target = [*nvrtc.OPTIONS, f"-arch=sm_{architecture}"]
    said = _run(nvcc, *target, "-Xptxas=-v", "-cubin", str(source), "-o", str(binary))
    _run(nvcc, *nvrtc.OPTIONS, f"-arch=compute_{architecture}", "-ptx", str(source), "-o", str(ptx))
    kernels, texts = read_resources(said), read_ptx(ptx.read_text())
    code = None if disassembler is None else read_machine_code(_run(disassembler, "-sass", str(binary)))
    for symbol, kernel in kernels.items():
        kernel.ptx = texts[symbol]
        kernel.machine = None if code is None else code[symbol]
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def machine_code(binary: bytes) -> dict[str, bytes]:
    """The instructions of each kernel, by its symbol, out of an ELF file."""
    start, size, count, of_names = struct.unpack_from("<Q10xHHH", binary, 40)
    sections = [struct.unpack_from("<IIQQQQ", binary, start + size * number) for number in range(count)]
    names = sections[of_names][4]

    def name(offset: int) -> str:
        return binary[names + offset : binary.index(b"\0", names + offset)].decode()

    found = {name(offset): binary[at : at + length] for offset, _, _, _, at, length in sections}
    return {key.removeprefix(".text."): code for key, code in found.items() if key.startswith(".text.")}


def arithmetic(body: str) -> Counter[str]:
    """The instructions of PTX that compute with floating point, reach memory or wait, and how often each is there: not
    what copies registers and arguments.
    """
    found = re.findall(r"^\s+(?:@!?%p\d+\s+)?((?:[a-z0-9_]+\.)+[a-z0-9]+)", body, re.MULTILINE)
    wanted = r"^(?!mov|ld\.param).*\.f(32|64)\b|^(ld(?!\.param)|st|atom|bar|membar|shfl)\."
    return Counter(name for name in found if re.search(wanted, name))


def others(
    folder: Path, compiler: nvrtc.Compiler, architecture: str, chosen: Iterable[str] | None = None
) -> tuple[list[str], list[str]]:
    """The kernels of which NVRTC makes other machine code than nvcc, whose files are in ``folder``; and those among
    them in whose PTX more differs than how addresses are computed.
    """
    wanted = machine_code((folder / f"{architecture}.cubin").read_bytes())
    texts = dict(_bodies((folder / f"{architecture}.ptx").read_text(), *_ENTRY))
    other, worse = [], []
    for kernel in all_kernels() if chosen is None else chosen:
        symbol, code = compiler.compile(kernel, f"sm_{architecture}")
        if machine_code(code)[symbol] != wanted.get(symbol):
            other.append(kernel)
            text = compiler.compile(kernel, f"compute_{architecture}")[1].decode()
            if arithmetic(dict(_bodies(text, *_ENTRY))[symbol]) != arithmetic(texts.get(symbol, "")):
                worse.append(kernel)
    return other, worse


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout + done.stderr


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home, "bin")))


def find_disassembler(nvcc: str, given: str | None) -> str | None:
    if given is not None:
        return given
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    top = next((line.partition("=")[2] for line in said.splitlines() if line.startswith("#$ TOP=")), "")
    beside = os.pathsep.join([str(Path(nvcc).parent), str(Path(top, "bin"))])
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=beside)


# ---- the report ------------------------------------------------------------------------------------------------------


def report(found: dict[str, list[Kernel]], tools: str, command: str) -> str:
    """Markdown: the verdict, then a table for each architecture."""
    faults = [
        f"- sm_{architecture}, {kernel.name}: {fault}"
        for architecture, kernels in found.items()
        for kernel in kernels
        for fault in kernel.faults()
    ]
    num_kernels = sum(map(len, found.values()))
    verdict = (
        f"**{len(faults)} faults.**\n\n" + "\n".join(faults)
        if faults
        else f"**No faults** in {num_kernels} kernels: no local memory, all elements of aligned arrays in 128-bit\n"
        "accesses, no fused, approximate or flushing arithmetic in PTX."
    )
    parts = [
        f"# Code of the CUDA kernels, {date.today().isoformat()}\n",
        f"Compiled, not run: this says nothing of speed. {tools}\nFlags: `{' '.join(nvrtc.OPTIONS)}`.",
        f"Command: `{command}`\n",
        f"{verdict}\n",
        "Wide: instructions that move 16 bytes for each thread, of all that access global memory. Each kernel of an\n"
        "update holds beside its text one that goes element by element, for the ends of segments. Shared memory in\n"
        "bytes for a block of 256 threads.\n",
    ]
    for architecture, kernels in found.items():
        parts.append(f"## sm_{architecture}\n\n{table(kernels)}\n")
    return "\n".join(parts)


def table(kernels: list[Kernel]) -> str:
    is_machine = all(kernel.machine is not None for kernel in kernels)
    kind = "SASS" if is_machine else "PTX"
    names = ["kernel", "registers", "stack", "spills", "shared", f"wide loads ({kind})", f"wide stores ({kind})"]
    rows = []
    for kernel in kernels:
        loads, stores = map(str, kernel.wide())
        if kernel.machine is not None:
            loads, stores = f"{loads} of {kernel.machine['loads']}", f"{stores} of {kernel.machine['stores']}"
        rows.append([kernel.name, kernel.registers, kernel.stack, kernel.spills, kernel.shared, loads, stores])
    return "\n".join(_report.table(names, rows)[:-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_out(parser)
    parser.add_argument("--cuobjdump", help="the disassembler; default: found on PATH or beside nvcc")
    parser.add_argument("--nvrtc", help="the library; default: the one that torch brings")
    parser.add_argument("--architecture", action="append", help="such as 90; may be repeated; default: 80, 89 and 90")
    arguments = parser.parse_args()
    compiler = None
    with contextlib.suppress(nvrtc.CompilerMissing):
        compiler = nvrtc.Compiler(arguments.nvrtc and nvrtc.load(Path(arguments.nvrtc)))
    nvcc = find_nvcc()
    if nvcc is None:
        print("there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: nothing was looked at", file=sys.stderr)
        return 2
    disassembler = find_disassembler(nvcc, arguments.cuobjdump)
    version = re.search(r"release [\d.]+, V[\d.]+", _run(nvcc, "--version"))
    tools = f"nvcc {version[0] if version else 'of an unknown release'}; machine code "
    tools += "not looked at (no cuobjdump)." if disassembler is None else "read with cuobjdump."
    found, compared = {}, ""
    other: dict[str, list[str]] = {}
    worse: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in arguments.architecture or ARCHITECTURES:
            found[architecture] = examine(nvcc, disassembler, architecture, Path(folder))
            if compiler is not None:
                other[architecture], worse[architecture] = others(Path(folder), compiler, architecture)
    if compiler is not None:
        same = (f"{len(found[name]) - len(names)} of {len(found[name])} for sm_{name}" for name, names in other.items())
        compared = (
            f" NVRTC {compiler.version} makes the same machine code of {', '.join(same)}; of the others the same "
        )
        compared += "but for how addresses are computed."
    _report.publish([report(found, tools + compared, told_command(sys.argv))], arguments.out)
    for architecture, names in worse.items():
        for name in names:
            print(f"sm_{architecture}, {name}: NVRTC makes other code", file=sys.stderr)
    return int(any(worse.values()) or any(kernel.faults() for kernels in found.values() for kernel in kernels))


if __name__ == "__main__":
    raise SystemExit(main())
