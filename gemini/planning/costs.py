"""How long a piece of work takes on one rank of a machine, and which share of what it has.

Figures that were measured are taken as they are. Figures of a specification are peaks that nothing reaches;
:class:`Efficiency` holds, in this one place, the share of each that is reached; where it comes from is said in
docs/internals/trace-plan-simulate.md.

:class:`Speeds` are the few of them that decide between placements: of a machine's figures, or typical ones where no
machine is named. Then only their order matters (host memory before a PCIe link before a drive), which is the same on
nearly every machine.

Ranks of a mesh are numbered as ``DeviceMesh`` numbers them, the last dim first: ``tp`` innermost, then ``cp``, ``dp``
and ``pp``. So neighbours in ``tp`` are on one machine before those of any other dim are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from gemini.planning.hardware import Hardware
from gemini.planning.placement import Problem
from gemini.planning.planes import ADAM, GRAD, RuleSpec
from gemini.planning.trace import Moment, Product
from gemini.tiers import FILED, Boundary, Tier

GPU, LINK, DRAM, THREADS, WIRE, NETWORK = "gpu", "link", "dram", "threads", "wire", "network"
_DRIVES = [name for tier in FILED for name in (tier.value, *(way.figure for way in reversed(tier.spec.ways)))]
RESOURCES = (GPU, *(way.figure for way in Tier.GPU.spec.ways), LINK, DRAM, *_DRIVES, THREADS, WIRE, NETWORK)
"""What tasks share: one GPU, its two directions of the link, what the link does of both at once, and this rank's part
of what its machine has: host memory, NVMe drives (what they do of both at once, reading, writing), host threads; its
wire to other ranks of the machine, and its port to those of others.
"""
_SHARED = ("dram_", "cpu_flops_", *(f"{tier.value}_" for tier in FILED))
"""How figures begin of what the ranks of a machine divide."""


@dataclass(frozen=True)
class Efficiency:
    """The share of a specified peak that real work reaches. Raises ValueError for one that is not above 0, or above 1.

    Attributes:
        matrix: tensor cores in the best products; of a GPU its own (``gpu_matrix_share``). What others take longer by
            their shape is in :func:`occupied`.
        attention, attention_backward: fused attention, of the FLOP that are not under a causal mask; of a GPU its own
            (``gpu_attention_share``, ``gpu_attention_backward_share``).
        gpu_memory, host_memory: of their bandwidth.
        link, wire: of the data rate, which also carries framing and headers.
        nvme: of what a drive's data sheet says.
    """

    matrix: float = 0.83
    attention: float = 0.73
    attention_backward: float = 0.63
    gpu_memory: float = 0.9
    link: float = 0.9
    host_memory: float = 0.78
    nvme: float = 1.0
    wire: float = 0.9

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0 < share <= 1:
                raise ValueError(f"Efficiency({name}={share}): it is a share, above 0 and at most 1")

    def of(self, hardware: Hardware, key: str) -> float:
        """The share of figure ``key`` that is reached: 1 for a measured one."""
        if hardware.figures[key].source.startswith("measured"):
            return 1.0
        if key.startswith("gpu_flops"):
            return self.of_gpu(hardware, "matrix")
        return float(getattr(self, _KIND_OF_FIGURE[key])) if key in _KIND_OF_FIGURE else 1.0

    def of_gpu(self, hardware: Hardware, kind: str) -> float:
        """The share of the tensor cores' peak that work of a kind reaches on this GPU."""
        own = hardware.figures.get(f"gpu_{kind}_share")
        return float(getattr(self, kind)) if own is None else own.value


_KIND_OF_FIGURE = {
    "gpu_bandwidth": "gpu_memory",
    "dram_bandwidth": "host_memory",
    **dict.fromkeys(("cpu_flops_bf16", "cpu_flops_fp32"), "matrix"),
    **dict.fromkeys(("h2d", "d2h", "link_mixed"), "link"),
    **dict.fromkeys(("nvme_read", "nvme_write", "nvme_mixed", "nvme_write_sustained"), "nvme"),
    **dict.fromkeys(("interconnect", "network"), "wire"),
}


class Cost(NamedTuple):
    """Seconds that a task takes alone, and the share of each resource that it uses meanwhile."""

    seconds: float
    loads: Mapping[str, float]


class Costs:
    """One rank's machine; ``local_ranks`` on the same host divide its memory, drives and threads. ``beside``: updates
    run beside computing; where both run on the host, each has threads of its own if the hardware says how many torch
    has and what an update takes with one, else either takes the whole host. ``update_threads``: of such updates; None
    for those of the cores that torch leaves which make them faster, at least one.
    """

    def __init__(
        self,
        hardware: Hardware,
        efficiency: Efficiency,
        *,
        compute: Tier,
        precision: str,
        local_ranks: int,
        beside: bool = False,
        update_threads: int | None = None,
    ):
        self._hardware = hardware
        self._efficiency = efficiency
        self._compute = compute
        self._width = "fp32" if precision == "fp32" else "bf16"
        # Attention and convolutions are not of cuBLAS, whose sums alone may be in fp16.
        self._products = precision if precision == "fp16_accumulation" else self._width
        self._local = local_ranks
        self._get = cache(self._figure)
        self._product = cache(self._seconds_of)
        # The parts of the host's cores that computing and updates use: either takes all of them, unless updates have
        # threads of their own beside those of torch.
        self._computes_with = self._updates_with = 1.0
        self._update_threads: int | None = None
        figures = hardware.figures
        if beside and compute is Tier.CPU and {"cpu_threads", "torch_threads", "update_cpu_one"} <= figures.keys():
            cores, torch_threads = figures["cpu_threads"].value / local_ranks, figures["torch_threads"].value
            self._update_threads = update_threads or hardware.useful_threads(max(int(cores - torch_threads), 1))
            # Threads that slow each other down use more of the cores than they are.
            slower = figures["cpu_contention"].value if hardware.has("cpu_contention") else 1.0
            self._computes_with = min(1.0, torch_threads / cores * slower)
            self._updates_with = min(1.0, self._update_threads / cores * slower)

    def _figure(self, key: str, needed_for: str) -> float:
        """A figure as one rank sees it."""
        value = self._hardware.get(key, needed_for=needed_for) * self._efficiency.of(self._hardware, key)
        if key.startswith(_SHARED):
            value /= self._local
        return value * (self._local if key in ("update_cpu", "land_cpu") else 1)

    def _on_host(self, seconds: float, dram_bytes: float, needed_for: str, **loads: float) -> Cost:
        """Work that also takes so many bytes of host memory; those alone take at least as long as they take."""
        if not dram_bytes:
            return Cost(seconds, dict.fromkeys(loads, 1.0) if seconds else {})
        through_memory = dram_bytes / self._get("dram_bandwidth", needed_for)
        whole = max(seconds, through_memory)
        return Cost(whole, {DRAM: through_memory / whole, **{name: seconds / whole * n for name, n in loads.items()}})

    def compute(self, moment: Moment, *, measured: bool) -> Cost:
        """Computing one moment: on the host the slowest of its arithmetic, its memory traffic, and launching its
        operations; on a GPU its products one by one, then all else of it; the trace's own seconds if ``measured`` here.
        """
        on_gpu, seconds = self._compute is Tier.GPU, moment.seconds if measured else None
        if seconds is None:
            seconds = self._on_gpu(moment) if on_gpu else self._on_cpu(moment)
        if not seconds:
            return Cost(0.0, {})
        loads = {GPU: 1.0} if on_gpu else {THREADS: self._computes_with}
        if not on_gpu and self._hardware.has("dram_bandwidth"):
            through_memory = moment.touched_bytes / self._get("dram_bandwidth", "computing on the host")
            loads[DRAM] = min(1.0, through_memory / seconds)
        return Cost(seconds, loads)

    def _on_gpu(self, moment: Moment) -> float:
        """Kernels of one stream run one after another: every product by its shape, and the slower of arithmetic
        (attention, convolutions, products of unknown shape) and memory traffic of all else.
        """
        what, speed = "computing a moment", f"gpu_flops_{self._width}"
        products = through_memory = 0.0
        for product in moment.products:
            computing, reading = self._product(product)
            products += computing
            through_memory += reading
        attention = moment.attention
        flops = moment.flops - attention.counted - sum(product.flops for product in moment.products)
        for kind, done in (("attention", attention.forward), ("attention_backward", attention.backward)):
            if done:  # in FLOP of products that take as long
                shares = [self._efficiency.of_gpu(self._hardware, each) for each in ("matrix", kind)]
                flops += done * shares[0] / shares[1]
        others = flops / self._get(speed, what) if flops > 0 else 0.0
        if moment.touched_bytes:
            others = max(others, moment.touched_bytes / self._get("gpu_bandwidth", what) - through_memory)
        return products + others

    def launching(self, moment: Moment, num_hooked: int, *, measured: bool) -> float:
        """Seconds of the thread that launches a moment on a GPU (``measured``: operations are launched in the trace's
        own seconds); of the host, which computes itself, none. ``num_hooked``: params gathered, gradients that leave.
        """
        if self._compute is not Tier.GPU:
            return 0.0
        seconds, what = 0.0, "launching operations on the GPU"
        if moment.num_ops and not (measured and moment.seconds is not None):
            seconds = moment.num_ops * self._get("gpu_op_seconds", what)
        if num_hooked and self._hardware.has("hook_seconds"):
            seconds += num_hooked * self._get("hook_seconds", what)
        return seconds

    def _seconds_of(self, product: Product) -> tuple[float, float]:
        """Seconds that such products take on a GPU, and that their bytes alone take through its memory."""
        what = "the products of a moment"
        sms = self._hardware.figures.get("gpu_sms")
        computing = occupied(product, None if sms is None else int(sms.value))
        through_memory = product.num_bytes(4 if self._width == "fp32" else 2) / self._get("gpu_bandwidth", what)
        speed = self._get(f"gpu_flops_{product.dtype or self._products}", what)
        return max(computing / speed, through_memory), through_memory

    def _on_cpu(self, moment: Moment) -> float:
        what = "computing a moment"
        return max(
            moment.flops / self._get(f"cpu_flops_{self._width}", what) if moment.flops else 0.0,
            moment.touched_bytes / self._get("dram_bandwidth", what) if moment.touched_bytes else 0.0,
            moment.num_ops * self._get("cpu_op_seconds", what) if moment.num_ops else 0.0,
        )

    def move(self, boundary: Boundary, num_bytes: float, *, copies: int = 1) -> Cost:
        """Bytes over a boundary. A link or a drive does one direction alone at its own speed, and of both at once
        ``_mixed``. ``copies``: in how many they cross a link.
        """
        tier, key = boundary.outer, boundary.way.figure
        inward, both = boundary.target is tier, tier.value if tier.in_files else LINK
        if tier.in_files:
            what, latency = f"{'writing to' if inward else 'reading from'} the {tier.spec.title} tier", 0.0
        else:
            what = "bringing bytes to the GPU" if inward else "taking bytes off the GPU"
            latency = copies * self._get("copy_seconds", what) if self._hardware.has("copy_seconds") else 0.0
        speed, loads = self._get(self._hardware.sustained(key), what), {key: 1.0}
        if self._hardware.has(f"{both}_mixed"):
            loads[both] = min(1.0, speed / self._get(f"{both}_mixed", what))
        return self._on_host(num_bytes / speed + latency if num_bytes else 0.0, num_bytes, what, **loads)

    def host_pass(self, num_bytes: float) -> Cost:
        """Host threads reading and writing so many bytes, no more than that (a cast, a copy)."""
        return self._on_host(0.0, num_bytes, "copying in host memory")

    def landing(self, num_bytes: float) -> Cost:
        """A gradient copied into its plane, or into staging, with its norm in the same pass: bytes read and written.
        The figure ``land_cpu`` is for 2 + 2 bytes; without it the pass takes what host memory takes.
        """
        if not num_bytes or not self._hardware.has("land_cpu"):
            return self.host_pass(num_bytes)
        what = "landing gradients"
        return self._on_host(self._get("land_cpu", what) * num_bytes / 4, num_bytes, what, threads=1.0)

    def gpu_pass(self, num_bytes: float) -> Cost:
        """The GPU reading and writing so many bytes of its own memory."""
        seconds = num_bytes / self._get("gpu_bandwidth", "working on planes in GPU memory")
        return Cost(seconds, {GPU: 1.0} if seconds else {})

    def update(self, problem: Problem, index: int, tier: Tier) -> Cost:
        """One update of a chunk on ``tier``: every plane is read, and all but the gradient are written. The figures
        ``update_cpu`` and ``update_gpu`` are for Adam in bf16 with a split master; other formats and rules take time by
        their bytes, and on a CPU by their arithmetic, where that is more. A specified ``update_cpu`` is no faster than
        host memory, a measured one is what it is. Without ``update_gpu`` the GPU's memory decides.
        """
        chunk = problem.layout.chunks[index]
        grad_bytes = chunk.numel // problem.layout.ranks * chunk.itemsize(problem.precision)
        rule = problem.rule.of(chunk.exact)
        touched = rule.touched_bytes({GRAD: grad_bytes, **problem.sizes[index]})
        if tier is Tier.GPU:
            if not self._hardware.has("update_gpu"):
                return self.gpu_pass(touched)
            seconds = self._get("update_gpu", "updates on the GPU") * touched / ADAM.touched
            return Cost(seconds, {GPU: 1.0} if seconds else {})
        what = "updates on the host"
        per_param = self._get("update_cpu", what)
        if self._update_threads is not None:
            per_param = max(per_param, self._get("update_cpu_one", what) / self._update_threads)
        seconds = per_param * touched / ADAM.touched * rule.beyond_bytes
        if not seconds:
            return Cost(0.0, {})
        through_memory = touched / self._get("dram_bandwidth", what) if self._hardware.has("dram_bandwidth") else 0.0
        if self._hardware.figures["update_cpu"].source.startswith("measured"):
            through_memory = min(through_memory, seconds)
        whole = max(seconds, through_memory)
        return Cost(whole, {THREADS: self._updates_with * seconds / whole, DRAM: through_memory / whole})

    def ring(self, group: Group, num_bytes: float) -> Cost:
        """Each rank of ``group`` sends ``num_bytes`` on in a ring."""
        return Cost(0.0, {}) if group.size == 1 else self.wires(*sent_in_ring(group, num_bytes))

    def wires(self, inside: float, between: float) -> Cost:
        """Sending so many bytes to ranks of this machine, and so many to those of others."""
        what = "sharing a model among ranks"
        on_wire = inside / self._get("interconnect", what) if inside else 0.0
        key = "network" if self._hardware.has("network") else "interconnect"
        on_network = between / self._get(key, what) if between else 0.0
        whole = max(on_wire, on_network)
        return Cost(whole, {WIRE: on_wire / whole, NETWORK: on_network / whole} if whole else {})


@dataclass(frozen=True)
class Speeds:
    """Bytes/s over each way by its figure, and seconds of one Adam update per param on either processor."""

    moving: Mapping[str, float]
    update_cpu: float
    update_gpu: float
    measured_update_gpu: bool = False
    """Whether ``update_gpu`` is a figure of the machine: without one no update is streamed through the GPU."""

    @classmethod
    def typical(cls) -> Speeds:
        """The usual speeds of each way, and eight channels of DDR4."""
        moving = {way.figure: way.usual for tier in Tier for way in tier.spec.ways}
        return cls(moving, update_cpu=0.25e-9, update_gpu=0.03e-9)

    @classmethod
    def of(cls, hardware: Hardware, tiers: Mapping[Tier, int], *, sharing: int = 1) -> Speeds:
        """Speeds of a machine, shared by ``sharing`` ranks. Raises MissingFigure for what ``tiers`` need."""
        usual, shares = cls.typical(), Efficiency()

        def figure(key: str, tier: Tier, otherwise: float) -> float:
            if tier not in tiers:
                return otherwise
            return hardware.get(key, needed_for=f"a plan with a {tier.value} tier") * shares.of(hardware, key)

        measured = Tier.GPU in tiers and hardware.has("update_gpu")
        moving = {
            way.figure: figure(hardware.sustained(way.figure), tier, way.usual) / (sharing if tier.in_files else 1)
            for tier in Tier
            for way in tier.spec.ways
        }
        update_cpu = figure("update_cpu", Tier.CPU, usual.update_cpu) * sharing
        if measured:
            update_gpu = figure("update_gpu", Tier.GPU, usual.update_gpu)
        else:
            update_gpu = ADAM.touched / figure("gpu_bandwidth", Tier.GPU, ADAM.touched / usual.update_gpu)
        return cls(moving, update_cpu, update_gpu, measured)

    def update(self, tier: Tier, rule: RuleSpec) -> float:
        """Seconds per param of an update on ``tier``: Adam's, of other rules by their bytes, or arithmetic if more."""
        share = rule.touched / ADAM.touched
        return self.update_gpu * share if tier is Tier.GPU else self.update_cpu * share * rule.beyond_bytes

    def seconds(self, boundary: Boundary, num_bytes: float) -> float:
        """Seconds of moving so many bytes over a boundary that has it to itself."""
        return num_bytes * (1 / self.moving[boundary.way.figure])

    def cost(self, traffic: Mapping[Boundary, int]) -> float:
        """Seconds of all of it, one after the other."""
        return sum(self.seconds(boundary, num_bytes) for boundary, num_bytes in traffic.items())


# ---- products on a GPU -----------------------------------------------------------------------------------------------

TILES = (((256, 128), (128, 256)), ((128, 128),), ((256, 64), (64, 256)), ((128, 64), (64, 128)), ((64, 64),))
"""Sizes of tiles, the most efficient first; those of one size together."""


def occupied(product: Product, sms: int | None) -> float:
    """The FLOP of a product with those of empty parts of tiles and waves: what a GPU with so many SMs is busy for.

    A product of m x k by k x n is cut into tiles of m x n, one thread block each, and an SM takes one after another. So
    a tile that is partly empty takes as long as a full one (tile quantization), and so does a last wave in which some
    SMs have none (wave quantization)::

        seconds = max(waves * SMs * 2 * tile_m * tile_n * k / FLOP/s,   bytes of both factors and the result / bytes/s)

    How cuBLAS chooses is not published: here it takes the largest tile of which every SM gets one; if there is none,
    the smallest, with k split among the SMs that would have none (docs/internals/trace-plan-simulate.md).

    Without ``sms`` only the empty parts of the smallest tiles count.
    """
    for tiles in TILES:
        cut = [(product.batch * -(-product.m // m) * -(-product.n // n), m * n) for m, n in tiles]
        number, area = min(cut)
        if sms is not None and number >= sms:
            number = sms * -(-number // sms)
            break
    return 2.0 * number * area * product.k * product.times


# ---- ranks over machines ---------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Ranks that send each other something: how many, and how many of them are on one machine."""

    size: int
    local: int


class MeshSizes(NamedTuple):
    """The sizes of a mesh's dims. Params are sharded over ``dp`` and ``cp`` together."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Ranks that have parts of the same chunks."""
        return self.dp * self.cp

    def __str__(self) -> str:
        """The dims with more than one rank: "pp 4 x dp 2 x tp 8"."""
        return " x ".join(f"{dim} {size}" for dim, size in self._asdict().items() if size > 1) or "one rank"


class Grid(NamedTuple):
    """A mesh over machines of ``per_machine`` ranks each."""

    sizes: MeshSizes
    per_machine: int

    @property
    def slices(self) -> Group:
        return self._group(1, self.sizes.tp)

    @property
    def parts(self) -> Group:
        return self._group(self.sizes.tp, self.sizes.cp)

    @property
    def shards(self) -> Group:
        return self._group(self.sizes.tp, self.sizes.shards)

    @property
    def stages(self) -> Group:
        return self._group(self.sizes.tp * self.sizes.shards, self.sizes.pp)

    def _group(self, stride: int, size: int) -> Group:
        return Group(size, max(1, min(size, self.per_machine // stride)))


def sent_in_ring(group: Group, num_bytes: float) -> tuple[float, float]:
    """Divide ``num_bytes`` that each rank of a ring sends on: those to ranks of its machine, and those to others. Of B
    bytes that all ranks are to have, each sends ``num_bytes`` = B (size - 1) / size. Rings are laid so that each
    machine receives what it has not, B (size - local) / size, once, through the network ports of its ``local`` ranks
    together, and hands it around inside. As NCCL does with one port for each GPU.
    """
    if group.local == group.size:
        return num_bytes, 0.0
    whole = num_bytes * group.size / (group.size - 1)
    between = whole * (group.size - group.local) / group.size / group.local
    return whole * (group.local - 1) / group.local, between
