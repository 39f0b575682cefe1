"""On a GPU: copies on streams, the order of streams and computation, registered host memory, blocks that are reused.

What is asked of the runtime, and that the order of it is enough, is in ``tests/memory/test_cuda_*.py``.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gemini.errors import GeminiError
from gemini.memory.devices.device import Device, make_device
from tests.gpu import gpu_cases
from tests.gpu.gpu_cases import ON_FAKE, takes_time
from tests.invariants import bytes_behind

MIB = 2**20


@pytest.fixture
def device() -> object:
    made = make_device("cuda")
    yield made
    made.close()


def busy(device: Device, turns: int = 60) -> torch.Tensor:
    """Some milliseconds of work on the current stream."""
    size, turns = (64, 2) if ON_FAKE else (2048, turns)
    a = torch.ones(size, size, device=device.torch_device)
    for _ in range(turns):
        a = a @ a / size
    return a


def on_card(device: Device, values: torch.Tensor) -> torch.Tensor:
    return values.to(device.torch_device)


def test_copies_go_there_and_back(device: Device) -> None:
    source, back = device.make_host_buffer(MIB), device.make_host_buffer(MIB)
    source.copy_(torch.randint(0, 256, (MIB,), dtype=torch.uint8))
    there = device.make_buffer(MIB)
    arrived = device.copy(there, source, "fetch")
    device.copy(back, there, "evict", after=arrived).wait()
    assert torch.equal(back, source) and arrived.is_complete()


def test_host_buffers_are_page_locked_until_they_go(device: Device) -> None:
    buffer = device.make_host_buffer(MIB)
    assert buffer.is_pinned() and buffer[4096:].is_pinned()
    del buffer
    gc.collect()
    again = device.make_host_buffer(MIB)  # perhaps at the same address: it was given back
    assert again.is_pinned()
    device.close()
    again.fill_(1)


def test_a_copy_from_the_card_comes_after_the_work_that_wrote_it(device: Device) -> None:
    expected = busy(device).cpu()
    back = device.make_host_buffer(expected.nbytes).view(torch.float32)
    for _ in range(3):
        result = busy(device)
        event = device.copy(back, result.view(-1), "evict")
        del result  # its block may be asked for again at once
        torch.empty(expected.shape, device=device.torch_device).fill_(-1)
        event.wait()
        assert torch.equal(back.view(expected.shape), expected)


def test_a_copy_to_the_card_comes_after_the_work_that_reads_it(device: Device) -> None:
    weights = on_card(device, torch.ones(MIB))
    source = device.make_host_buffer(4 * MIB).view(torch.float32).fill_(2)
    busy(device)
    read = weights.sum()
    device.copy(weights, source, "fetch").wait_on_device()
    assert read.item() == MIB and weights.sum().item() == 2 * MIB


@takes_time
def test_a_mark_completes_after_the_work_before_it(device: Device) -> None:
    result = busy(device, 300)
    mark = device.mark()
    early = mark.is_complete()
    mark.wait()
    assert mark.is_complete() and result.isfinite().all()
    assert not early, "300 products of 2048 x 2048 take longer than giving them to the GPU"


def test_a_stream_is_in_order_in_both_directions(device: Device) -> None:
    cell, out = device.make_buffer(MIB), device.make_host_buffer(MIB)
    sources = [device.make_host_buffer(MIB).fill_(n) for n in range(10)]
    for number, source in enumerate(sources):
        device.copy(cell, source, "fetch")
        event = device.copy(out, cell, "fetch")  # one stream, back again
        event.wait()
        assert out.unique().tolist() == [number]


@takes_time
def test_a_fetch_waits_for_its_block_and_not_for_the_computation(device: Device) -> None:
    source = device.make_host_buffer(64 * MIB).fill_(3)
    window = device.make_window(64 * MIB)
    window.populate()
    device.copy(window.bytes, source, "fetch", behind_computing=False).wait()  # the streams are made with the first
    busy(device, 400)
    later = device.mark()
    fetched = device.copy(window.bytes, source, "fetch", behind_computing=False)
    fetched.wait()
    early = later.is_complete()
    assert not early, "400 products of 2048 x 2048 take longer than a copy of 64 MiB"
    later.wait()


def test_a_host_that_runs_far_ahead_mixes_no_windows_up(device: Device) -> None:
    """Eight chunks through room for three, nobody waits on the host, and computing is far behind all the time."""
    size = 20 * MIB  # three are whole segments of either kind: those that grow do so by 20 MiB
    device.reserve_host([(f"source {n}", size) for n in range(8)])
    device.reserve_windows(3 * size)
    sources = [device.make_host_buffer(size).fill_(n + 1) for n in range(8)]
    windows = [device.make_window(size) for _ in sources]
    there: list[int] = []
    seen: list[tuple[int, torch.Tensor]] = []
    for turn in range(60):
        index = (turn * 5) % 8
        if len(there) == 3:
            windows[there.pop(0)].depopulate()
        windows[index].populate()
        there.append(index)
        with ThreadPoolExecutor(1) as worker:
            fetched = worker.submit(
                device.copy, windows[index].bytes, sources[index], "fetch", behind_computing=False
            ).result()
        busy(device, 4)
        fetched.wait_on_device()
        part = windows[index].bytes[:: size // 4096]
        seen.append((index + 1, torch.stack([part.min(), part.max()])))
    assert [tuple(values.tolist()) for _, values in seen] == [(n, n) for n, _ in seen]
    own = [s for s in torch.cuda.memory_snapshot() if s["stream"] == device._memory._stream.cuda_stream]
    assert [s["total_size"] for s in own] == [3 * size], "all of them came out of what was got beforehand"


def test_what_is_free_in_pieces_is_made_one(device: Device) -> None:
    """Of eight windows every second one goes: then no place is as long as two, until the others are moved."""
    size = 5 * MIB  # eight are whole segments of either kind
    gpu_cases.forget_cached()  # what earlier tests left would go with the second reservation
    device.reserve_windows(8 * size)
    reserved = torch.cuda.memory_stats(device.torch_device)["reserved_bytes.large_pool.current"]
    windows = [device.make_window(size) for _ in range(8)]
    for number, window in enumerate(windows):
        window.populate()
        window.bytes.fill_(number + 1)
    assert not device.has_place(size), "as many as were reserved are in use"
    for window in windows[::2]:
        window.depopulate()
    assert device.has_place(size) and not device.has_place(size + 4096) and not device.has_place(2 * size)
    views = [window.bytes[size // 2 :] for window in windows[1::2]]
    device.move_windows_together(windows[1::2])
    assert device.has_place(4 * size)
    for number, view in zip((2, 4, 6, 8), views, strict=True):
        assert view.min() == view.max() == number, "who looks at a window sees it at its new place"
    long = device.make_window(4 * size)
    long.populate()
    assert long.bytes.fill_(9).min() == 9 and not device.has_place(size)
    assert torch.cuda.memory_stats(device.torch_device)["reserved_bytes.large_pool.current"] == reserved
    for window in (*windows[1::2], long):
        window.depopulate()
    device.reserve_windows(4 * size)
    assert torch.cuda.memory_stats(device.torch_device)["reserved_bytes.large_pool.current"] == reserved - 4 * size
    assert device.has_place(4 * size) and not device.has_place(4 * size + 4096)
    windows[0].populate()
    assert windows[0].bytes.fill_(7).min() == 7


def test_windows_share_their_pool_with_nobody(device: Device) -> None:
    window = device.make_window(32 * MIB)
    window.populate()
    address = window.bytes.data_ptr()
    assert bytes_behind(device, [window.bytes]) == 32 * MIB
    window.depopulate()
    assert bytes_behind(device, [window.bytes]) == 0
    others = [torch.empty(32 * MIB, dtype=torch.uint8, device=device.torch_device) for _ in range(3)]
    assert all(other.data_ptr() != address for other in others)
    window.populate()
    assert window.bytes.data_ptr() == address
    assert bytes_behind(device, [window.bytes, *others]) == 4 * 32 * MIB


@takes_time
def test_what_is_computed_beside_does_not_hold_copies_up(device: Device) -> None:
    source, into = device.make_host_buffer(MIB).fill_(5), device.make_buffer(MIB)
    device.copy(into, source, "fetch").wait()
    with device.beside("adam"):
        result = busy(device, 400)
        beside = device.mark()
    device.copy(into, source, "fetch").wait()
    assert not beside.is_complete(), "400 products of 2048 x 2048 take longer than a copy of 1 MiB"
    beside.wait()
    assert result.isfinite().all()


def test_one_registration_for_all_host_buffers(device: Device) -> None:
    sizes = [size * MIB for size in (1, 30, 3, 30)]
    device.reserve_host([(str(size), size) for size in sizes])
    buffers = [device.make_host_buffer(size) for size in sizes]
    assert [buffer.data_ptr() - buffers[0].data_ptr() for buffer in buffers] == [0, MIB, 31 * MIB, 34 * MIB]
    assert all(buffer.is_pinned() for buffer in buffers)
    into = device.make_buffer(30 * MIB)
    buffers[1].random_(0, 255)
    arrived = device.copy(into, buffers[1], "fetch")
    device.copy(buffers[3], into, "evict", after=arrived).wait()  # another lane waits for nothing by itself
    assert torch.equal(buffers[1], buffers[3])


def test_the_figures_of_torch_and_of_the_driver(device: Device) -> None:
    before = device.memory_figures()
    window = device.make_window(64 * MIB)
    window.populate()
    after = device.memory_figures()
    assert after["allocated"] - before["allocated"] == 64 * MIB
    assert after["allocated"] <= after["reserved"] <= after["driver"]
    assert after["allocated_peak"] >= after["allocated"] and after["reserved_peak"] >= after["reserved"]


def test_a_stream_of_the_user_s(device: Device) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        result = busy(device)
        back = device.make_host_buffer(result.nbytes).view(torch.float32)
        device.mark()
        worker = threading.Thread(target=lambda: device.copy(back, result.view(-1), "evict").wait())
        worker.start()
        worker.join(60)
        assert torch.equal(back.view(result.shape), result.cpu())


def test_a_copy_that_cannot_be_says_so(device: Device) -> None:
    with pytest.raises((GeminiError, RuntimeError)):
        device.copy(device.make_buffer(4096), torch.zeros(5, dtype=torch.uint8), "fetch").wait()
    device.copy(device.make_buffer(4096), device.make_host_buffer(4096), "fetch").wait()


def test_a_refused_registration_leaves_no_error_behind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering twice is refused by the driver; the next kernel must not be blamed for it."""
    from gemini.memory.devices.pinned import PinnedPages

    register = PinnedPages.register

    def twice(pages: PinnedPages, node: int | None) -> None:
        register(pages, node)
        register(pages, node)

    monkeypatch.setattr(PinnedPages, "register", twice)
    with pytest.warns(UserWarning, match="cannot be registered"):
        buffer = device.make_host_buffer(MIB)
    assert torch.ones(10, device=device.torch_device).sum().item() == 10
    into = device.make_buffer(MIB)
    device.copy(into, buffer.fill_(4), "fetch").wait()
    assert into.unique().tolist() == [4]
