"""Measures a disk, and optimizer state streamed through it: disk -> Adam -> disk, against the slower of the two alone.

    python benchmarks/nvme_stream.py --directory /mnt/nvme --fio --rounds 5 --report benchmarks/reports/....md

One spill file holds the planes of the state as the engine lays them out (weights and residuals of 2 bytes, two states
of 4, gradients of 2), in tiles; per tile 14 bytes an element are read and 12 written. O_DIRECT is required, so no page
cache takes part; buffers are huge pages, reused. Every *way* below is a function that goes through the whole file once;
in each round all of them run, in another order, and ratios are taken inside a round. The script
checks the bits of the streamed state in the end. `fio` measures the same disk in the same rounds (with pages of 4 KiB:
its huge ones need pages that the system has set apart).
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import in_turn, median_ratio, seconds_of
from gemini import kernels
from gemini.memory.devices.pages import host_bytes
from gemini.memory.nvme import SpillFile
from gemini.rules import ADAM, Arrays, Segment

MIB = 2**20
PLANES = {
    "weights": torch.bfloat16,
    "residual": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "grad": torch.bfloat16,
}
UPDATED = [name for name in PLANES if name != "grad"]
READ_BYTES = sum(dtype.itemsize for dtype in PLANES.values())  # per element
WRITTEN_BYTES = sum(PLANES[name].itemsize for name in UPDATED)
SCALARS = ADAM.scalars({**ADAM.defaults, "lr": 1e-4}, 1000, 1.0)
IO_SETS = 6  # staging sets in flight where only the disk is to be measured
ADAM_SETS = 8  # and where only Adam is: more than a cache holds


class Staging:
    """One tile of every plane, in page-aligned memory that was touched: huge pages."""

    def __init__(self, tile: int):
        self.planes = {name: host_bytes(tile * dtype.itemsize).zero_().view(dtype) for name, dtype in PLANES.items()}

    def fill(self) -> None:
        rng = torch.Generator().manual_seed(0)
        n = len(self.planes["weights"])
        noise = torch.randn(n, generator=rng)
        kernels.split_master(noise * 0.02, self.planes["weights"], self.planes["residual"])
        self.planes["exp_avg"].copy_(noise).mul_(1e-3)
        self.planes["exp_avg_sq"].copy_(noise).square_().mul_(1e-6).add_(1e-8)
        self.planes["grad"].copy_(torch.randn(n, generator=rng).mul_(1e-3))

    def update(self) -> None:
        p = self.planes
        ADAM.run(Arrays(p["weights"], p["residual"], p, p["grad"]), [Segment(0, len(p["weights"]), SCALARS)])


class Disk:
    """The spill file with its planes one after the other, and the queue that reads and writes their tiles."""

    def __init__(self, directory: Path, num_tiles: int, tile: int, io_threads: int):
        self.num_tiles, self.tile = num_tiles, tile
        self.file = SpillFile(directory, num_tiles * tile * READ_BYTES)
        if not self.file.direct:
            sys.exit(f"{directory} offers no O_DIRECT: the page cache would be measured. Give another --directory")
        self.queue = kernels.IoQueue(io_threads)
        self.bases = {name: self.file.allocate(num_tiles * tile * dtype.itemsize) for name, dtype in PLANES.items()}
        self.staging = [Staging(tile) for _ in range(max(IO_SETS, ADAM_SETS))]
        self.updates = 0  # how often every tile was updated: all are equal before and after each pass

    def read(self, number: int, into: Staging) -> list[int]:
        return [self._submit(self.queue.submit_read, name, number, into) for name in PLANES]

    def write(self, number: int, source: Staging, names: list[str]) -> list[int]:
        return [self._submit(self.queue.submit_write, name, number, source) for name in names]

    def _submit(self, submit: Callable[..., int], name: str, number: int, staging: Staging) -> int:
        plane = staging.planes[name]
        return submit(
            self.file._fds[0], plane.data_ptr(), plane.nbytes, self.bases[name] + number * plane.nbytes, False
        )

    def wait(self, tickets: list[int]) -> None:
        for ticket in tickets:
            self.queue.wait(ticket)

    def close(self) -> None:
        self.queue.close()
        self.file.close()


# ---- ways ------------------------------------------------------------------------------------------------------------


def read_alone(disk: Disk) -> None:
    in_flight: deque[list[int]] = deque()
    for number in range(disk.num_tiles):
        if len(in_flight) == IO_SETS:
            disk.wait(in_flight.popleft())
        in_flight.append(disk.read(number, disk.staging[number % IO_SETS]))
    for tickets in in_flight:
        disk.wait(tickets)


def write_alone(disk: Disk) -> None:
    """All planes of all tiles, with what they hold already."""
    in_flight: deque[list[int]] = deque()
    for number in range(disk.num_tiles):
        if len(in_flight) == IO_SETS:
            disk.wait(in_flight.popleft())
        in_flight.append(disk.write(number, disk.staging[number % IO_SETS], list(PLANES)))
    for tickets in in_flight:
        disk.wait(tickets)


def pipeline(disk: Disk, sets: int, names: list[str], work: Callable[[Staging], None] | None) -> None:
    """Reads ahead, ``work``, writes behind, over ``sets`` staging sets: at least one tile is read while one is worked
    on, and with three or more sets the last one is still being written then.
    """
    ahead = max(1, sets - 2)
    reads: dict[int, list[int]] = {}
    writes: dict[int, list[int]] = {}
    for number in range(disk.num_tiles):
        for coming in range(number if number == 0 else number + ahead, min(number + ahead + 1, disk.num_tiles)):
            disk.wait(writes.pop(coming - sets, []))
            reads[coming] = disk.read(coming, disk.staging[coming % sets])
        staging = disk.staging[number % sets]
        disk.wait(reads.pop(number))
        if work is not None:
            work(staging)
        writes[number] = disk.write(number, staging, names)
    for tickets in writes.values():
        disk.wait(tickets)


def copy_back(disk: Disk) -> None:
    """Reads and writes, one to one: the raw copy loop."""
    pipeline(disk, IO_SETS, list(PLANES), None)


def io_alone(sets: int) -> Callable[[Disk], None]:
    """What streaming reads and writes, without Adam."""
    return lambda disk: pipeline(disk, sets, UPDATED, None)


def adam_alone(disk: Disk) -> None:
    """As many tiles as the file has, in memory."""
    for number in range(disk.num_tiles):
        disk.staging[number % ADAM_SETS].update()


def serial(disk: Disk) -> None:
    staging = disk.staging[0]
    for number in range(disk.num_tiles):
        disk.wait(disk.read(number, staging))
        staging.update()
        disk.wait(disk.write(number, staging, UPDATED))


def streamed(sets: int) -> Callable[[Disk], None]:
    return lambda disk: pipeline(disk, sets, UPDATED, Staging.update)


RAW = {"read alone": read_alone, "write alone": write_alone, "copy, 1 : 1": copy_back}
# More sets keep more requests waiting, fewer stay in the caches: the quicker one is the bound.
IO_ALONE = {f"I/O alone, {sets} staging sets": io_alone(sets) for sets in (3, 4, IO_SETS)}
ALONE = IO_ALONE | {"Adam alone": adam_alone}
# A way of streaming updates every tile of the file once. Others are added here.
STREAMING = {
    "one after the other": serial,
    "double buffered": streamed(2),
    "triple buffered": streamed(3),
    "4 staging sets": streamed(4),
    "6 staging sets": streamed(6),
}
MOVED = {  # bytes per element
    "read alone": READ_BYTES,
    "write alone": READ_BYTES,
    "copy, 1 : 1": 2 * READ_BYTES,
    "Adam alone": READ_BYTES + WRITTEN_BYTES,
}


def one_pass(disk: Disk, name: str, way: Callable[[Disk], None]) -> float:
    """Seconds of one pass. Before it the buffers get the tile that every place of the file holds."""
    for staging in disk.staging:
        disk.wait(disk.read(0, staging))
    seconds = seconds_of(lambda: way(disk))
    disk.updates += name in STREAMING
    return seconds


def check(disk: Disk) -> None:
    """The streamed state has the bits of as many updates in memory."""
    wanted, found = Staging(disk.tile), Staging(disk.tile)
    wanted.fill()
    for _ in range(disk.updates):
        wanted.update()
    for number in (0, disk.num_tiles // 2, disk.num_tiles - 1):
        disk.wait(disk.read(number, found))
        for name, plane in wanted.planes.items():
            same = torch.equal(found.planes[name].view(torch.uint8), plane.view(torch.uint8))
            assert same, f"{name} of tile {number} is not what {disk.updates} updates in memory give"


def fill(disk: Disk) -> None:
    """Writes every byte once: space that was only allocated would be read as zeros, without the disk."""
    for staging in disk.staging:
        staging.fill()
    write_alone(disk)


# ---- fio -------------------------------------------------------------------------------------------------------------

FIO_MODES = {"read alone": "read", "write alone": "write", "copy, 1 : 1": "rw"}
FIO_ENGINES = {
    "psync, 4 threads": ["--ioengine=psync", "--numjobs=4", "--thread", "--group_reporting"],
    "libaio, depth 8": ["--ioengine=libaio", "--iodepth=8"],
    "io_uring, depth 8": ["--ioengine=io_uring", "--iodepth=8"],
}


def fio_rate(file: Path, size: int, seconds: float, mode: str, engine: list[str]) -> float:
    """Bytes per second, read and written together."""
    share = size // 4 // (4 * MIB) * (4 * MIB)
    split = [f"--size={share}", f"--offset_increment={share}"] if "--numjobs=4" in engine else [f"--size={size}"]
    command = ["fio", "--name=disk", f"--filename={file}", f"--rw={mode}", "--bs=4M", "--direct=1", "--time_based"]
    command += [f"--runtime={seconds}", "--overwrite=1", "--fallocate=none", "--scramble_buffers=0"]
    command += ["--output-format=json"]
    done = subprocess.run([*command, *split, *engine], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"fio failed: {done.stderr or done.stdout}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


# ---- rounds and reports ----------------------------------------------------------------------------------------------


def streaming_table(times: dict[str, list[float]], num_elements: int) -> list[str]:
    io = min(IO_ALONE, key=lambda name: statistics.median(times[name]))
    bound = [max(pair) for pair in zip(times[io], times["Adam alone"], strict=True)]
    rows = []
    for name, taken in times.items():
        seconds = statistics.median(taken)
        rate = MOVED.get(name, READ_BYTES + WRITTEN_BYTES) * num_elements / seconds / 1e9
        ratio = f"{median_ratio(taken, bound):.3f}" if name in STREAMING else ""
        rows.append([name, f"{seconds:.2f}", f"{rate:.2f}", ratio])
    adam_to_io = median_ratio(times["Adam alone"], times[io])
    best = min(STREAMING, key=lambda name: median_ratio(times[name], bound))
    verdict = "met" if median_ratio(times[best], bound) <= 1.05 else "missed"
    return [
        *table(["way", "seconds", "GB/s read + written", "time / max(I/O alone, Adam alone)"], rows),
        f"The bound is of {io}; Adam alone takes {adam_to_io:.2f} of it. Best way: {best}; the goal, at most 1.05, is "
        f"{verdict}.",
        "",
    ]


def fio_table(rates: dict[str, list[float]], times: dict[str, list[float]], num_elements: int) -> list[str]:
    def cells(of: Callable[[str], list[float]]) -> list[str]:
        return [f"{statistics.median(of(mode)) / 1e9:.2f}" for mode in FIO_MODES]

    ours = {mode: [MOVED[mode] * num_elements / t for t in times[mode]] for mode in FIO_MODES}
    best = {
        mode: [max(same) for same in zip(*(rates[f"{engine}: {mode}"] for engine in FIO_ENGINES), strict=True)]
        for mode in FIO_MODES
    }
    rows = [[engine, *cells(lambda mode, engine=engine: rates[f"{engine}: {mode}"])] for engine in FIO_ENGINES]
    rows.append(["Gemini's queue", *cells(lambda mode: ours[mode])])
    over = [f"{median_ratio(ours[mode], best[mode]):.3f}" for mode in FIO_MODES]
    return table(["fio, GB/s at 4 MiB", *FIO_MODES], [*rows, ["Gemini's queue / the round's best of fio", *over]])


def compare(args: argparse.Namespace, disk: Disk) -> list[str]:
    ways = RAW | ALONE | STREAMING
    times: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {f"{engine}: {mode}": [] for engine in FIO_ENGINES for mode in FIO_MODES}
    with tempfile.TemporaryDirectory(dir=args.directory, prefix=".fio-") as folder:
        # Shuffled: a way must not always come after the same one, whose writes the drive may still be busy with.
        for number, name in in_turn([*ways, *(rates if args.fio else [])], args.rounds, order="shuffled"):
            if name in ways:
                result = one_pass(disk, name, ways[name])
            else:
                engine, mode = name.split(": ", 1)
                file, size = Path(folder) / "file", args.fio_size_mib * MIB
                result = fio_rate(file, size, args.fio_seconds, FIO_MODES[mode], FIO_ENGINES[engine])
            print(f"{'' if number >= 0 else '(warm-up) '}{name}: {result:.4g}", flush=True)
            if number >= 0:
                (times if name in ways else rates)[name].append(result)
    check(disk)
    lines = streaming_table(times, disk.num_tiles * disk.tile)
    if args.fio:
        lines += fio_table(rates, times, disk.num_tiles * disk.tile)
    return lines


def head_of(args: argparse.Namespace, disk: Disk) -> list[str]:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = switch.read_text().split("[")[-1].split("]")[0] if switch.exists() else "unknown"
    own = args.adam_threads or kernels.get_num_threads()
    return head(
        "NVMe stream",
        [
            f"{disk.num_tiles} tiles of {disk.tile:,} elements: {disk.file.num_bytes / 2**30:.2f} GiB, O_DIRECT (no "
            f"page cache), {args.io_threads} I/O threads, {own} for Adam, huge pages: {huge}. Medians of {args.rounds} "
            "interleaved rounds.",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=4096, help="of the spill file")
    parser.add_argument("--tile", type=int, default=1 << 20, help="elements, a multiple of 2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--adam-threads", type=int, help="that share one call of Adam (default: all)")
    parser.add_argument("--fio", action="store_true", help="measure with fio too; it has to be installed")
    parser.add_argument("--fio-seconds", type=float, default=3, help="of each of its 9 runs in a round")
    parser.add_argument("--fio-size-mib", type=int, default=1024)
    add_out(parser)
    args = parser.parse_args()
    if args.fio and shutil.which("fio") is None:
        sys.exit("--fio: no fio on PATH; install it (apt-get install fio) or leave the option out")
    if args.tile % 2048:
        sys.exit(f"--tile {args.tile}: whole pages of every plane are needed, so a multiple of 2048")
    kernels.limit_threads(args.adam_threads)
    disk = Disk(args.directory, args.size_mib * MIB // (args.tile * READ_BYTES), args.tile, args.io_threads)
    try:
        fill(disk)
        lines = [*head_of(args, disk), *compare(args, disk)]
    finally:
        disk.close()
    publish(lines, args.out)


if __name__ == "__main__":
    main()
