"""Kernels compiled at run time: one text, kept in whole files, and what happens where nothing compiles.

No NVRTC is here; tests/fakegpu/test_nvrtc.py has one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import kernels
from gemini.kernels import nvrtc
from gemini.kernels.cuda import CudaKernels
from gemini.kernels.nvrtc import Compiler

CARD = (8, 9)


class Counting(Compiler):
    """Compiles nothing, and counts it."""

    def __init__(self, version: str = "13.0") -> None:
        self.version, self.architectures = version, (75, 80, 86, 90)
        self.asked: list[tuple[str, str]] = []

    def compile(self, kernel: str, target: str) -> tuple[str, bytes]:
        self.asked.append((kernel, target))
        return f"_Z{kernel}", b"\x7fELF\n" + target.encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEMINI_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Counting:
    made = Counting()
    monkeypatch.setattr(nvrtc, "compiler", lambda: made)
    return made


def test_the_text_includes_nothing_and_every_file_once() -> None:
    text = nvrtc.text()
    assert "#include" not in text and "__global__" in text
    for once in (
        "struct Launch {",
        "struct NormPlaces {",
        "enum class Dtype",
        "struct Arrays {",
        "using make_index_seq",
    ):
        assert text.count(once) == 1, once


def test_what_was_compiled_is_read_by_the_next_process(compiler: Counting, folder: Path) -> None:
    first = nvrtc.code_of("join_kernel", CARD)
    assert nvrtc.code_of("join_kernel", CARD) == first == ("_Zjoin_kernel", b"\x7fELF\ncompute_86")
    assert compiler.asked == [("join_kernel", "compute_86")], "8.9 is not among those that it knows"
    assert [path.suffix for path in folder.iterdir()] == [".compute_86"]


@pytest.mark.parametrize("what", ["kernel", "card", "version", "text", "options"])
def test_another_key_is_another_file(
    what: str, compiler: Counting, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.code_of("join_kernel", CARD)
    if what == "version":
        compiler.version = "13.1"
    if what == "text":
        monkeypatch.setattr(nvrtc, "text", lambda: "other")
    if what == "options":
        monkeypatch.setattr(nvrtc, "OPTIONS", ("--other",))
    nvrtc.code_of("split_kernel" if what == "kernel" else "join_kernel", (9, 0) if what == "card" else CARD)
    assert len(compiler.asked) == len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_file_is_compiled_again_and_replaced(damage: str, compiler: Counting, folder: Path) -> None:
    first = nvrtc.code_of("join_kernel", CARD)
    [path] = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-3], "empty": b"", "changed": whole.replace(b"ELF", b"ELG")}[damage])
    assert nvrtc.code_of("join_kernel", CARD) == first and len(compiler.asked) == 2
    assert [path] == list(folder.iterdir()) and path.read_bytes() == whole


def test_a_crash_while_a_file_is_put_into_place_leaves_none(
    compiler: Counting, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            nvrtc.code_of("join_kernel", CARD)
    assert list(folder.iterdir()) == []


def test_where_nothing_can_be_written_it_compiles_every_time(
    compiler: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("GEMINI_CACHE", str(tmp_path / "file"))
    assert nvrtc.code_of("join_kernel", CARD) == nvrtc.code_of("join_kernel", CARD)
    assert len(compiler.asked) == 2


def test_an_old_card_is_refused_in_words() -> None:
    with pytest.raises(
        RuntimeError, match=r"NVRTC 13.0 compiles for compute capability 7.5 and later, and this card has 6.1"
    ):
        Counting().target((6, 1))
    assert [Counting().target(card) for card in ((8, 0), (9, 0), (12, 0))] == ["sm_80", "sm_90", "compute_90"]


def test_torch_without_cuda_has_no_compiler() -> None:
    with pytest.raises(RuntimeError, match="is not built for CUDA"):
        Compiler()


class Refusing:
    """Starts nothing, for a reason."""

    def launch(self, *launched: Any) -> None:
        raise RuntimeError("loading split_kernel: the provided PTX was compiled with an unsupported toolchain.")


def test_a_card_that_others_have_filled_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def split_master(self, *_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "_cuda", Full())
    kernels.why_not_cuda.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                kernels.why_not_cuda(torch.device("cpu"))
    finally:
        kernels.why_not_cuda.cache_clear()


@pytest.mark.parametrize("launcher", ["refuses", "gives other bits"])
def test_kernels_that_do_not_run_are_found_by_the_probe_and_told_once(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        def launch(self, *launched: Any) -> None:
            pass

    class Kernels(CudaKernels):
        def stream(self, device: torch.device) -> None:
            return None

    monkeypatch.setattr(kernels, "_cuda", Kernels(Refusing() if launcher == "refuses" else Other()))
    kernels.why_not_cuda.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"CUDA kernels cannot be used on cpu.*go through torch") as told:
            first = kernels.why_not_cuda(torch.device("cpu"))
        assert first is not None and ("unsupported toolchain" in first) == (launcher == "refuses")
        assert kernels.why_not_cuda(torch.device("cpu")) == first and len(told) == 1
    finally:
        kernels.why_not_cuda.cache_clear()
