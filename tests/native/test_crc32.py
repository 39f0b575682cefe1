"""``kernels.crc32`` is that of zlib, from any address on and of any length, whoever computes it."""

import random
import zlib

import pytest
import torch

from gemini import kernels
from gemini.kernels import native as kernels_io


@pytest.mark.parametrize("native", [True, False])
def test_it_is_that_of_zlib(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(kernels_io, "_native_crc32", None)
    rng = random.Random(0)
    data = rng.randbytes(20_000)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    lengths = [*range(0, 200), *(rng.randrange(20_000) for _ in range(200))]
    for length in lengths:
        first = rng.randrange(len(data) - length + 1)
        begin = rng.choice([0, 1, 0xFFFFFFFF, rng.getrandbits(32)])
        part = tensor[first : first + length]
        assert kernels.crc32(part, begin) == zlib.crc32(data[first : first + length], begin), (first, length)
    assert kernels.crc32(tensor[:19_998].view(torch.int16)) == zlib.crc32(data[:19_998])


@pytest.mark.skipif(kernels_io._native_crc32 is None, reason="no native crc32 on this CPU")
def test_the_native_one_refuses_what_it_is_not_for() -> None:
    native = kernels_io._native_crc32
    assert native is not None
    tensor = torch.zeros(96, dtype=torch.uint8)
    for num_bytes in (0, 16, 48, 65):
        with pytest.raises(ValueError, match="64 bytes or more, a multiple of 16"):
            native(tensor.data_ptr(), num_bytes, 0)
