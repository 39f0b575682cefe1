"""Measures this machine in seconds: the figures of ``gemini.planning.hardware``, by the code that training itself runs.
Every figure is a median, and says when and how it was measured, and its spread where that is large. Buffers are larger
than the caches, so that memory is measured and not them. For ``gemini doctor --measure``.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gemini import kernels
from gemini.errors import counted, human_bytes
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import PAGE, host_bytes, in_pages
from gemini.memory.movement.mover import SLOTS, tiles
from gemini.memory.nvme import Extent, SpillFile, free_bytes
from gemini.memory.system import cache_bytes, memory_bytes, memory_limit
from gemini.optim.around import CompactRule
from gemini.patches import sums_in_fp16
from gemini.planning.hardware import Figure, human_figure
from gemini.planning.planes import plane_specs
from gemini.planning.working import DEVICE_TILE, TILE
from gemini.rules import ADAM, Arrays, Segment, UpdateRule, Where

MiB = 2**20
_LARGE_SPREAD = 0.1
_PLANES = [
    (getattr(torch, spec.dtype), spec.block_bytes) for spec in plane_specs("bf16", "retain", trainable=True).values()
]
"""Of an update in bf16: weights, residual, Adam's two states, and the gradient."""
_STATE_BYTES = tuple(size for _, size in _PLANES[:-1])
"""Per param of what an update writes; one request each per tile."""
_ADAM_BYTES = sum(size for _, size in _PLANES)
"""Per param in memory."""

Figures = Iterator[tuple[str, Figure]]
Timed = Callable[..., tuple[str, Figure]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured on: by default for some seconds on two cores. Products are said by rows, inner size and
    columns. What is streamed and updated on the host is at least four times the caches, if the memory has that.
    """

    product: tuple[int, int, int] = (512, 1024, 4096)  # tokens, hidden, and intermediate size
    stream_bytes: int = 256 * MiB
    adam_numel: int = 16 * TILE
    spill_bytes: int = 384 * MiB  # at most a quarter of what is free
    spill_seconds: float = 8.0  # after which no further round over the file is begun
    repeats: int = 7
    ops: int = 1000
    gpu_product: tuple[int, int, int] = (8192, 8192, 8192)
    gpu_bytes: int = 256 * MiB


def measure(nvme_path: Path | None = None, sizes: Sizes | None = None) -> Figures:
    """Every figure of this machine, as it is measured; StorageError if ``nvme_path`` cannot hold a spill file."""
    sizes = sizes or Sizes()
    yield from measure_host(sizes)
    if torch.cuda.is_available():
        yield from measure_gpu(torch.device("cuda", 0), sizes)
    if nvme_path is not None:
        yield from measure_nvme(nvme_path, sizes)


# ---- host ------------------------------------------------------------------------------------------------------------


def measure_host(sizes: Sizes) -> Figures:
    """Memory and cores, matrix products, the smallest operation, memory bandwidth, Adam; and two of them at once."""
    num_threads, cores = torch.get_num_threads(), kernels.get_num_threads()
    yield "cpu_bytes", _asked(memory_bytes(), "host memory" if memory_limit() is None else "limit of the control group")
    yield "cpu_threads", _asked(cores, "cores that the process may use")
    yield "torch_threads", _asked(num_threads, "of torch in this process")
    cpu, timed = torch.device("cpu"), partial(_timed, sizes=sizes)
    yield from _products("cpu", ["bf16", "fp32"], sizes.product, cpu, timed, f", {counted(num_threads, 'thread')}")
    yield _ops("cpu", sizes.ops, cpu, timed)
    yield _dram(sizes, num_threads, cores)
    numel = in_pages(_beyond_caches(sizes.adam_numel * _ADAM_BYTES) // _ADAM_BYTES)
    update = _update_in(host_bytes, numel, TILE)
    kernel = f"Gemini's {kernels.capabilities().isa} kernel on {numel / 1e6:.4g} M params in tiles"
    yield _adam("update_cpu", update, numel, sizes, cores, kernel)
    yield _adam("update_cpu_one", update, numel, sizes, 1, kernel)
    compact = _update_in(host_bytes, numel, TILE, CompactRule(ADAM))
    yield _adam("update_cpu_compact", compact, numel, sizes, cores, "the same of compact states")
    del compact
    if num_threads < cores:  # else computing and updates have no cores of their own
        product = _product(sizes.product, torch.bfloat16, cpu)
        yield "cpu_contention", _contention(product, update, cores - num_threads, sizes)
    del update
    yield _landing(sizes)


def _product(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    rows, inner, columns = size
    x, weight = (torch.full((n, inner), 0.5, device=device).to(dtype) for n in (rows, columns))
    if dtype is torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(x, weight.t())


_KINDS = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16_accumulation": torch.float16,
    "float8": torch.float8_e4m3fn,
}
"""Of products, by the end of their figures' names."""


def _products(
    name: str, kinds: Iterable[str], size: tuple[int, int, int], device: torch.device, timed: Timed, beside: str = ""
) -> Figures:
    rows, inner, columns = size
    how = f"torch.mm of {rows} x {inner} and {inner} x {columns}{beside}"
    for kind in kinds:
        product = _product(size, _KINDS[kind], device)
        with sums_in_fp16() if kind == "fp16_accumulation" else nullcontext():
            found = timed(f"{name}_flops_{kind}", product, how=how, value_of=lambda s: 2 * rows * inner * columns / s)
        yield found  # whoever takes it has torch's switch as it was


def _ops(name: str, count: int, device: torch.device, timed: Timed) -> tuple[str, Figure]:
    small = torch.ones(64, device=device, requires_grad=True)

    def add() -> None:
        for _ in range(count):
            small + small  # noqa: B018 - its time is what is wanted

    how = f"{count} recorded additions of 64 numbers"
    return timed(f"{name}_op_seconds", add, how=how, value_of=lambda s: s / count)


def _dram(sizes: Sizes, num_threads: int, cores: int) -> tuple[str, Figure]:
    """In place, so that what is counted is what crosses the bus: for a copy the processor reads the target as well. By
    all cores, whatever threads torch has: one of them cannot draw all that there is.
    """
    num_bytes = _beyond_caches(sizes.stream_bytes)
    parts = host_bytes(num_bytes).view(torch.float32).fill_(1.0).tensor_split(max(cores // num_threads, 1))
    how = f"{human_bytes(num_bytes)} read and written in place, {counted(len(parts) * num_threads, 'thread')}"
    with ThreadPoolExecutor(len(parts)) as pool:

        def scale() -> None:
            list(pool.map(lambda part: part.mul_(1.0), parts))

        return _timed("dram_bandwidth", scale, sizes, how, lambda s: 2 * num_bytes / s)


def _update_in(
    make: Callable[[int], torch.Tensor], numel: int, tile: int, rule: UpdateRule = ADAM
) -> Callable[[], None]:
    """An update of planes in memory that ``make`` gives, by bytes, tile by tile."""
    specs = plane_specs("bf16", "retain", rule.spec, trainable=True)
    planes = {
        kind: make(in_pages(spec.num_bytes(numel))).zero_().view(getattr(torch, spec.dtype))
        for kind, spec in specs.items()
    }
    planes["weights"].fill_(1.0)
    planes["grad"].fill_(1e-3)
    scalars = rule.scalars(rule.defaults, 1, 1.0)

    def update() -> None:
        for start, stop in tiles(0, numel, tile):
            own = {kind: planes[kind][start // spec.block : -(-stop // spec.block)] for kind, spec in specs.items()}
            weights, residual, grad = (own.pop(kind) for kind in ("weights", "residual", "grad"))
            where = Where("weight", start)
            rule.run(Arrays(weights, residual, own, grad), [Segment(0, stop - start, scalars, where)])

    return update


def _adam(
    key: str, update: Callable[[], None], numel: int, sizes: Sizes, num_threads: int, how: str
) -> tuple[str, Figure]:
    with _limited(num_threads):
        return _timed(key, update, sizes, f"{how}, {counted(num_threads, 'thread')}", lambda s: s / numel)


def _contention(product: Callable[[], object], update: Callable[[], None], num_threads: int, sizes: Sizes) -> Figure:
    """How many times as long products and updates beside each other, which share caches and memory, take as alone."""

    def rate(work: Callable[[], object], seconds: float) -> float:
        begin, count = time.perf_counter(), 0
        with _limited(num_threads):
            while count == 0 or time.perf_counter() - begin < seconds:
                work()
                count += 1
        return count / (time.perf_counter() - begin)

    def times() -> float:
        with _limited(num_threads):
            seconds = 2 * max(_time(product), _time(update))  # two of the longer one, as many of the other as fit
        alone = rate(product, seconds), rate(update, seconds)
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(rate, update, seconds)
            kept = rate(product, seconds) / alone[0], beside.result() / alone[1]
        return max(1.0, 2 / sum(kept))

    times()
    found = [times() for _ in range(min(3, sizes.repeats))]
    how = f"products on {counted(torch.get_num_threads(), 'thread')} beside updates on {counted(num_threads, 'thread')}"
    return measured("cpu_contention", found, how, lambda value: value)


@contextmanager
def _limited(num_threads: int) -> Iterator[None]:
    """Kernels that this thread calls run on so many threads."""
    kernels.limit_threads(num_threads)
    try:
        yield
    finally:
        kernels.limit_threads(None)


def _landing(sizes: Sizes) -> tuple[str, Figure]:
    """Param by param in backward, as gradients arrive: torch has just written each, so it is in the caches."""
    numel = _beyond_caches(sizes.adam_numel * 2) // 2
    plane, gradient = (host_bytes(in_pages(n * 2)).view(torch.bfloat16).fill_(1e-3) for n in (numel, TILE))

    def land() -> None:
        for start, stop in tiles(0, numel, TILE):
            kernels.copy_grad(plane[start:stop], gradient[: stop - start])

    how = f"Gemini's {kernels.capabilities().isa} kernel on {numel / 1e6:.4g} M elements in tiles"
    return _timed("land_cpu", land, sizes, how, lambda s: s / numel)


def _beyond_caches(num_bytes: int) -> int:
    """At least ``num_bytes``, and four times the caches; but no more than an eighth of the memory."""
    wanted = max(num_bytes, 4 * cache_bytes() if num_bytes >= MiB else 0)
    return in_pages(max(PAGE, min(wanted, memory_bytes() // 8)))


# ---- drive -----------------------------------------------------------------------------------------------------------


def measure_nvme(directory: Path, sizes: Sizes) -> Figures:
    """Room, reads and writes of a spill file, as updates make them; StorageError if none can be made."""
    free = free_bytes(directory) if directory.is_dir() else 0
    tile = min(TILE, in_pages(sizes.spill_bytes // sum(_STATE_BYTES)))
    per_tile = tile * sum(_STATE_BYTES)
    count = max(1, min(sizes.spill_bytes, free // 4) // per_tile)
    spill = SpillFile(directory, count * per_tile)  # it has no name: nothing stays behind, whatever ends the process
    try:
        yield "nvme_bytes", _asked(free, f"free in {directory}")
        yield from _drive(spill, tile, count, sizes)
        yield "nvme_mixed", _both_ways(spill, tile, count, sizes)
    finally:
        spill.close()


def _drive(spill: SpillFile, tile: int, count: int, sizes: Sizes) -> Figures:
    # As an update does it: a buffer per plane, all of which it has changed since they were read. With one small buffer,
    # which stays in the cache, a drive measured a sixth faster than updates ever saw it.
    buffers = [host_bytes(size * tile).random_(0, 256) for size in _STATE_BYTES]  # a drive may compress
    plan = [[(buffer, spill.allocate(buffer.numel())) for buffer in buffers] for _ in range(count)]
    for planes in plan:
        _each(spill.write, planes)  # the first write of a block costs more: training pays for it once
    seconds: dict[str, list[float]] = {"nvme_read": [], "nvme_write": []}
    begin = time.perf_counter()
    for _ in range(sizes.repeats):
        read = write = 0.0
        for planes in plan:
            read += _time(partial(_each, spill.read, planes))
            for buffer in buffers:
                buffer.add_(1)
            write += _time(partial(_each, spill.write, planes))
        seconds["nvme_read"].append(read)
        seconds["nvme_write"].append(write)
        if time.perf_counter() - begin > sizes.spill_seconds:
            break
    num_bytes = count * tile * sum(_STATE_BYTES)
    requests = f"{human_bytes(2 * tile)} and {human_bytes(4 * tile)}"
    how = f"{human_bytes(num_bytes)} in {spill.directory}, requests of {requests}, one at a time"
    how += "" if spill.direct else ", through the page cache: no O_DIRECT here"
    for key, times in seconds.items():
        yield key, measured(key, times, how, lambda s: num_bytes / s)


def _both_ways(spill: SpillFile, tile: int, count: int, sizes: Sizes) -> Figure:
    """Move as updates beside computing do: two tiles are read ahead while one is changed and others are written."""
    part = in_pages(tile // SLOTS)
    slots = [[host_bytes(size * part).random_(0, 256) for size in _STATE_BYTES] for _ in range(SLOTS)]
    steps = count * tile // part
    before = [sum(_STATE_BYTES[:kind]) for kind in range(len(_STATE_BYTES))]
    places = [[(number * sum(_STATE_BYTES) + at) * part for at in before] for number in range(steps)]

    def extents(number: int) -> list[Extent]:
        return [Extent(*pair) for pair in zip(slots[number % SLOTS], places[number], strict=True)]

    def stream() -> None:
        reading = {number: spill.begin_read(extents(number)) for number in range(min(2, steps))}
        writing: dict[int, Event] = {}
        for number in range(steps):
            reading.pop(number).wait()
            for buffer in slots[number % SLOTS]:
                buffer.add_(1)
            writing[number] = spill.begin_write(extents(number))
            if number + 2 < steps:
                if number + 2 >= SLOTS:
                    writing.pop(number + 2 - SLOTS).wait()
                reading[number + 2] = spill.begin_read(extents(number + 2))
        for transfer in writing.values():
            transfer.wait()

    seconds = _times(stream, min(sizes.repeats, 5))
    num_bytes = 2 * steps * part * sum(_STATE_BYTES)
    how = f"{human_bytes(num_bytes)} read and written in {spill.directory}, {SLOTS} tiles under way"
    return measured("nvme_mixed", seconds, how, lambda s: num_bytes / s)


def _each(transfer: Callable[[torch.Tensor, int], None], planes: list[tuple[torch.Tensor, int]]) -> None:
    for buffer, offset in planes:
        transfer(buffer, offset)


# ---- GPU -------------------------------------------------------------------------------------------------------------


def measure_gpu(device: torch.device, sizes: Sizes) -> Figures:
    """Memory, bandwidth, products, Adam, a launch, and copies of pinned memory, each way alone and both at once."""
    on_cuda = device.type == "cuda"  # anything else stands in for it in tests
    timed = partial(_timed, sizes=sizes, synchronize=partial(torch.cuda.synchronize, device) if on_cuda else None)
    if on_cuda:
        card = torch.cuda.get_device_properties(device)
        yield "num_gpus", _asked(torch.cuda.device_count(), card.name)
        yield "gpu_bytes", _asked(card.total_memory, card.name)
        yield "gpu_sms", _asked(card.multi_processor_count, card.name)
    has_float8 = on_cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    kinds = [kind for kind in _KINDS if kind != "float8" or has_float8]
    yield from _products("gpu", kinds, sizes.gpu_product, device, timed)
    num_bytes = sizes.gpu_bytes
    here = torch.ones(num_bytes // 4, device=device)
    how = f"{human_bytes(num_bytes)} read and written in place"
    yield timed("gpu_bandwidth", lambda: here.mul_(1.0), how=how, value_of=lambda s: 2 * num_bytes / s)
    numel = in_pages(max(num_bytes // _ADAM_BYTES, PAGE))
    update = _update_in(partial(torch.zeros, dtype=torch.uint8, device=device), numel, DEVICE_TILE)
    how = f"Gemini's kernel on {numel / 1e6:.4g} M params in tiles"
    yield timed("update_gpu", update, how=how, value_of=lambda s: s / numel)
    yield _ops("gpu", sizes.ops, device, timed)
    yield from _link(here, sizes, timed, on_cuda=on_cuda)
    if on_cuda and torch.cuda.device_count() > 1:
        other = torch.empty_like(here, device=torch.device("cuda", 1))
        how = f"{human_bytes(num_bytes)} from GPU 0 to GPU 1"
        yield timed("interconnect", lambda: other.copy_(here), how=how, value_of=lambda s: num_bytes / s)


def _link(here: torch.Tensor, sizes: Sizes, timed: Timed, *, on_cuda: bool) -> Figures:
    """Copies of pinned memory, each way alone and both at once, and of small pieces; ``here``: memory of the GPU."""
    num_bytes, device = here.nbytes, here.device
    host, there = torch.ones(num_bytes // 4, pin_memory=on_cuda), torch.ones_like(here)
    back = torch.empty_like(host, pin_memory=on_cuda)
    how = f"{human_bytes(num_bytes)}, pinned"
    for key, target, source in (("h2d", here, host), ("d2h", host, here)):
        copy = partial(target.copy_, source, non_blocking=True)
        yield timed(key, copy, how=how, value_of=lambda s: num_bytes / s)
    streams = [torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext() for _ in range(2)]

    def both_ways() -> None:
        for stream, target, source in zip(streams, (here, back), (host, there), strict=True):
            with stream:
                target.copy_(source, non_blocking=True)

    how = f"{human_bytes(num_bytes)} each way at once, pinned"
    yield timed("link_mixed", both_ways, how=how, value_of=lambda s: 2 * num_bytes / s)

    how = f"{sizes.ops} copies of {human_bytes(4 * PAGE)} to the GPU, one after the other"
    copy = partial(here[:PAGE].copy_, host[:PAGE], non_blocking=True)
    yield timed("copy_seconds", lambda: [copy() for _ in range(sizes.ops)], how=how, value_of=lambda s: s / sizes.ops)


# ---- figures ---------------------------------------------------------------------------------------------------------


def _time(run: Callable[[], object], synchronize: Callable[[], object] | None = None) -> float:
    begin = time.perf_counter()
    run()
    if synchronize is not None:
        synchronize()
    return time.perf_counter() - begin


def _times(run: Callable[[], object], repeats: int, synchronize: Callable[[], object] | None = None) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    _time(run, synchronize)
    return [_time(run, synchronize) for _ in range(repeats)]


def _timed(
    key: str,
    run: Callable[[], object],
    sizes: Sizes,
    how: str,
    value_of: Callable[[float], float],
    synchronize: Callable[[], object] | None = None,
) -> tuple[str, Figure]:
    return key, measured(key, _times(run, sizes.repeats, synchronize), how, value_of)


def measured(key: str, seconds: list[float], how: str, value_of: Callable[[float], float]) -> Figure:
    values = sorted(value_of(s) for s in seconds)
    middle = statistics.median(values)
    source = f"measured {datetime.date.today()}, {how}, median of {len(values)}"
    if values[-1] - values[0] > _LARGE_SPREAD * middle:
        source += f", from {human_figure(key, values[0])} to {human_figure(key, values[-1])}"
    return Figure(middle, source)


def _asked(value: int, what: str) -> Figure:
    return Figure(value, f"asked {datetime.date.today()}, {what}")
