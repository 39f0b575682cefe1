"""The report on the CUDA kernels' code reads what the tools say, and names what must not be."""

from __future__ import annotations

import ctypes
import struct

from benchmarks import cuda_code
from benchmarks.cuda_code import Kernel
from tests.native.emulated_cuda import library

UPDATE = "_ZN6gemini4cuda41_GLOBAL__N__abc_9_update_cu_1213update_kernel"
ADAM = f"{UPDATE}INS_4AdamILb1EEELNS_5DtypeE1ELb1ELb1EEEvNS0_6LaunchIT_EE"
L2 = f"{UPDATE}INS_4AdamILb0EEELNS_5DtypeE0ELb0ELb1EEEvNS0_6LaunchIT_EE"
LION = f"{UPDATE}INS_4LionELNS_5DtypeE2ELb0ELb0EEEvNS0_6LaunchIT_EE"
COMPACT = f"{UPDATE[:-15]}14compact_kernelINS_4AdamILb1EEELNS_5DtypeE1ELb1EEEvNS0_6LaunchIT_EE"
GRAD = "_ZN6gemini4cuda37_GLOBAL__N__abc_7_grad_cu_1211grad_kernelILNS0_5DoingE3ELNS_5DtypeE0ELb0EEEvPvPKvlNS0_6PlacesE"
CLIP = "_ZN6gemini4cuda37_GLOBAL__N__abc_7_grad_cu_1211clip_kernelEPKdlddPdPfPi"

RESOURCES = f"""
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{ADAM}' for 'sm_90'
ptxas info    : Function properties for {ADAM}
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 58 registers, used 0 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function '{GRAD}' for 'sm_90'
ptxas info    : Function properties for {GRAD}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16385 bytes smem
"""

PTX = f"""
.visible .entry {ADAM}(
{{
    ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1];
    ld.global.nc.v2.u64 {{%rd2, %rd3}}, [%rd1];
    st.global.wb.v4.u32 [%rd1], {{%r1, %r2, %r3, %r4}};
    st.global.u32 [%rd1], %r1;
    div.rn.f32 %f1, %f2, %f3;
    mad.lo.s32 %r1, %r2, %r3, %r4;
}}
.entry {GRAD}(
{{
    st.local.u32 [%rd1], %r1;
    fma.rn.f32 %f1, %f2, %f3, %f4;
    sqrt.approx.f32 %f1, %f2;
    add.ftz.f32 %f1, %f2, %f3;
    mad.rn.f64 %fd1, %fd2, %fd3, %fd4;
}}
"""

MACHINE = f"""
		Function : {ADAM}
        /*0010*/                   LDG.E.128 R8, desc[UR4][R6.64] ;              /* 0x0 */
        /*0020*/                   LDG.E.128.CONSTANT R8, [R6.64] ;              /* 0x0 */
        /*0030*/              @!P0 LDG.E.U16 R8, [R6.64] ;                       /* 0x0 */
        /*0040*/                   STG.E.128 [R6.64], R8 ;                       /* 0x0 */
        /*0050*/                   STG.E.STRONG.GPU [R6.64], R8 ;                /* 0x0 */
        /*0060*/                   STL [R1], R8 ;                                /* 0x0 */
        /*0070*/                   NOP ;                                         /* 0x0 */
		..........
		Function : {CLIP}
        /*0010*/                   LDL R8, [R1] ;                                /* 0x0 */
		..........
"""


def test_names_say_which_kernel_it_is() -> None:
    assert [cuda_code.short_name(symbol) for symbol in (ADAM, L2, LION, COMPACT, GRAD, CLIP, "_Z5otherv")] == [
        "AdamW<bf16, split, aligned>", "Adam<fp32, fp32 master, aligned>",
        "Lion<fp16, fp32 master, not aligned>", "compact AdamW<bf16, aligned>", "grad<accumulate, fp32, not aligned>",
        "clip", "_Z5otherv",
    ]  # fmt: skip


def test_resources_are_read() -> None:
    adam, grad = cuda_code.read_resources(RESOURCES).values()
    assert (adam.registers, adam.stack, adam.spills, adam.shared) == (58, 16, 12, 0)
    assert (grad.registers, grad.stack, grad.spills, grad.shared) == (40, 0, 0, 16385)


def test_accesses_and_arithmetic_are_counted() -> None:
    ptx, machine = cuda_code.read_ptx(PTX), cuda_code.read_machine_code(MACHINE)
    assert ptx[ADAM] == {"wide loads": 2, "wide stores": 1, "local": 0, "inexact": 0}
    assert ptx[GRAD] == {"wide loads": 0, "wide stores": 0, "local": 1, "inexact": 4}
    assert machine[ADAM] == {
        "wide loads": 2, "wide stores": 1, "loads": 3, "stores": 2, "local": 1, "instructions": 6,
    }  # fmt: skip
    assert machine[CLIP]["local"] == 1


def test_every_thread_s_elements_are_demanded_in_wide_accesses() -> None:
    """Eight elements: 16 bytes of 2 each, 32 of 4."""
    assert cuda_code.expected_wide("AdamW<bf16, split, aligned>") == (7, 6)  # 1 + 1 + 2 + 2 + 1 loads
    assert cuda_code.expected_wide("Adam<fp32, fp32 master, aligned>") == (8, 6)
    assert cuda_code.expected_wide("PlainSgd<bf16, split, aligned>") == (3, 2)
    assert cuda_code.expected_wide("grad<copy, bf16, aligned>") == (1, 1)
    assert cuda_code.expected_wide("grad<widen, fp16, aligned>") == (1, 2)
    assert cuda_code.expected_wide("grad<accumulate, fp32, aligned>") == (4, 2)
    assert cuda_code.expected_wide("grad<read, fp32, aligned>") == (2, 0)
    assert cuda_code.expected_wide("grad<add24, bf16, aligned>") == (2, 1)
    assert cuda_code.expected_wide("grad<first24, fp32, aligned>") == (2, 1)
    assert cuda_code.expected_wide("AdamW<bf16, split, not aligned>") == (0, 0)


def test_faults_are_named() -> None:
    clean = {"wide loads": 7, "wide stores": 6, "local": 0, "inexact": 0}
    fine = Kernel("AdamW<bf16, split, aligned>", ptx=clean)
    assert fine.faults() == []
    fine.machine = {**clean, "wide stores": 4, "loads": 60, "stores": 50, "instructions": 900}
    assert fine.faults() == ["128-bit accesses: 7 loads and 4 stores, of 7 and 6"]
    assert "stack" in Kernel("clip", stack=8, ptx=clean).faults()[0]
    assert "spilled" in Kernel("clip", spills=8, ptx=clean).faults()[0]
    assert "1 instructions" in Kernel("clip", ptx=clean, machine={**clean, "local": 1}).faults()[0]
    assert "local" in Kernel("clip", ptx={**clean, "local": 2}).faults()[0]
    assert "fuse" in Kernel("clip", ptx={**clean, "inexact": 2}).faults()[0]


def test_the_kernels_are_those_that_the_host_runs_too() -> None:
    names = library().names
    names.restype = ctypes.c_char_p
    assert cuda_code.all_kernels().keys() == set(names().decode().split("\n")) - {""}


def test_machine_code_is_found_by_its_symbol() -> None:
    """An ELF file of two sections and their names, as small as it can be."""
    names = b"\0.text._Zk\0.shstrtab\0"
    code, head = b"0123456789abcdef", 64
    sections = [(0,) * 6, (1, 1, 6, 0, head, len(code)), (11, 3, 0, 0, head + len(code), len(names))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", *section, 0, 0, 0, 0) for section in sections)
    start = head + len(code) + len(names)
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<QIHHHHHH", start, 0, 64, 0, 0, 64, len(sections), 2)
    assert cuda_code.machine_code(header + code + names + table) == {"_Zk": code}
