"""One class, three steps, twice: the plain loop and the managed one with every plane on NVMe, compared bit by bit."""

import gc
import random
import re
import time
import traceback
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import nn

import gemini
from gemini.planning.working import staging_bytes, tile_numel
from gemini.train.modules.mixed import kept_in_fp32
from gemini.train.observers import iter_tensors
from gemini.train.setup.problem import structural_trace
from tests.hunts.zoo.configs import tiny_config
from tests.hunts.zoo.inputs import Batches, Spec
from tests.hunts.zoo.mappings import Entry
from tests.models import working_set
from tests.train.helpers import DTYPES, Plain, assert_same_state, same_bits
from tests.world import world_of

STEPS = 3
MAX_PARAMS = 16_000_000
MANAGED = "managed"
"""A file of this name says that the plain loop is done: what dies from here on is ours."""
EXTRA = (0, 1, 2, 4)
"""How many of the largest chunks there is room for beyond the working set; the first that is enough is noted."""
VARIANTS = 10


class Untried(Exception):
    """The plain loop itself does not run here: nothing to compare with. ``dtype``: another one may help."""

    def __init__(self, reason: str, *, dtype: bool = False):
        super().__init__(reason)
        self.dtype = dtype


_OF_DTYPE = re.compile(r"dtype|BFloat16|FloatTensor|type|not implemented|finite|CPU", re.I)


@dataclass
class Result:
    """What came of one class."""

    name: str
    kind: str
    tasks: tuple[str, ...]
    model_type: str
    status: str = "untried"
    """"works", "refused" (a clear error of Gemini), "failed" (a bug), "untried" (the plain loop does not run)."""
    reason: str = ""
    precision: str = ""
    loss: str = ""
    """"loss" of the model, or the mean "square" of its first output."""
    params: int = 0
    chunks: int = 0
    extra: int = 0
    """Chunks' worth of room that it took beyond the estimated working set."""
    evictions: tuple[int, int] = (0, 0)
    """In forward and in backward, over all steps."""
    seconds: float = 0.0


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def build(entry: Entry) -> nn.Module:
    """The tiny model, the same fp32 weights each time.

    Raises:
        Untried: if its config or its class cannot be built here.
    """
    try:
        config = tiny_config(entry.model_type, entry.name)
        model_class = getattr(transformers, entry.name)
        with torch.device("meta"):
            num_params = sum(p.numel() for p in model_class(config).parameters())
    except Exception as e:
        raise Untried(f"build: {_line(e)}") from e
    if num_params > MAX_PARAMS:
        raise Untried(f"its tiny config has {num_params:,} params")
    try:
        seed_all(0)
        model = model_class(config)
    except Exception as e:
        raise Untried(f"build: {_line(e)}") from e
    for param in model.parameters():  # some are left as torch.empty gives them
        if not param.detach().isfinite().all():
            nn.init.normal_(param, std=0.02)
    return model.train()


def loss_of(model: nn.Module, batch: dict[str, Any], seed: int) -> tuple[torch.Tensor, str]:
    """The model's loss, else the mean square of its first output that has a gradient."""
    seed_all(seed)
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.sum(), "loss"
    for tensor in iter_tensors(outputs):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel() > 1:
            return tensor.float().square().mean(), "square"
    raise ValueError(f"no output of {type(outputs).__name__} has a gradient")


def find_batches(entry: Entry, precision: str) -> tuple[Batches, str]:
    """A batch that the plain model trains on.

    Raises:
        Untried: if none was found; the first error says why.
    """
    seen: dict[str, None] = {}
    for labels in (True, False):
        for variant in range(VARIANTS):
            spec = Spec(DTYPES[precision], labels=labels, variant=variant)
            for _ in range(5):
                try:
                    return _try(entry, spec)
                except Untried:
                    raise
                except Exception as e:
                    place = traceback.extract_tb(e.__traceback__)[-1]
                    seen[f"{_line(e)[:200]} ({Path(place.filename).name}:{place.lineno})"] = None
                    if not spec.learn(e):
                        break
    raise Untried("forward: " + " / ".join(list(seen)[:4]), dtype=any(_OF_DTYPE.search(line) for line in seen))


def _try(entry: Entry, spec: Spec) -> tuple[Batches, str]:
    """One forward and backward of the plain model on a batch as ``spec`` says."""
    model = build(entry)
    kept = kept_in_fp32(model, {dtype: name for name, dtype in DTYPES.items()}[spec.dtype])
    for param in model.parameters():
        param.data = param.data.to(torch.float32 if id(param) in kept else spec.dtype)
    batches = Batches(model, entry, spec)
    loss, how = loss_of(model, batches(0), 0)
    loss.backward()
    if not loss.isfinite():
        raise ValueError("its loss is not finite")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if any(g.layout is not torch.strided or not g.isfinite().all() for g in grads):
        raise ValueError("its gradients are not finite")
    return batches, how


def tight_config(model: nn.Module, precision: str, path: Path, extra: int) -> gemini.GeminiConfig:
    """Everything on NVMe, and as little memory as the model's most demanding module needs; small chunks."""
    max_chunk = max(1024, sum(param.numel() for param in model.parameters()) // 8)
    layout = structural_trace(model, precision).layout(max_chunk=max_chunk)
    itemsize, largest = (4 if precision == "fp32" else 2), max(chunk.numel for chunk in layout.chunks)
    gathered = working_set(model, layout, precision) + extra * largest * itemsize
    staging = staging_bytes(tile_numel(largest))
    return gemini.GeminiConfig(
        precision=precision,
        max_chunk=max_chunk,
        memory=gemini.MemoryBudget(cpu=gathered + staging, nvme="2GiB", nvme_path=path),
        placement=gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1),
        device="cpu",
    )


def run_plain(entry: Entry, batches: Batches, precision: str) -> tuple[Plain, list[float]]:
    model = build(entry)
    kept = kept_in_fp32(model, precision)
    plain = Plain(model, precision, lr=1e-3, fp32=[name for name, p in model.named_parameters() if id(p) in kept])
    losses = []
    for step in range(STEPS):
        loss, _ = loss_of(plain.model, batches(step), step)
        plain.backward(loss)
        losses += [loss.item(), plain.clip(1.0)]
        plain.step()
    return plain, losses


def run(kind: str, entry: Entry, path: Path, precision: str | None = None) -> Result:
    """Train one class both ways. Never raises."""
    result = Result(entry.name, kind, entry.tasks, entry.model_type)
    begun = time.perf_counter()
    try:
        _run(result, entry, path, precision)
    except Untried as e:
        result.reason = str(e)
    except Exception as e:
        result.status, result.reason = "failed", f"{_line(e)} | {_where(e)}"
    result.seconds = round(time.perf_counter() - begun, 2)
    return result


def _run(result: Result, entry: Entry, path: Path, precision: str | None) -> None:
    """bf16 where the model takes it (but for every third class), else fp32."""
    order = [precision] if precision else ["bf16", "fp32"] if zlib.crc32(entry.name.encode()) % 3 else ["fp32"]
    refused = ""
    for result.precision in order:
        try:
            _run_in(result, entry, path)
        except Untried as e:
            if result.precision == order[-1] or not e.dtype:
                raise
            continue
        if result.status != "refused":
            break
        refused = refused or f"in {result.precision}: {result.reason}"
    if result.status == "works" and refused:
        result.reason = refused


def _run_in(result: Result, entry: Entry, path: Path) -> None:
    batches, result.loss = find_batches(entry, result.precision)
    try:
        plain, losses = run_plain(entry, batches, result.precision)
    except Exception as e:
        raise Untried(f"plain loop: {_line(e)}") from e
    if not all(torch.isfinite(torch.tensor(losses))):
        raise Untried(f"the plain loop does not stay finite: {losses}")
    difference = None
    for result.extra in EXTRA:
        try:
            difference = _compare(result, entry, batches, path, plain, losses)
        except gemini.GeminiError as e:
            result.status, result.reason = "refused", f"{type(e).__name__}: {_line(e)}"
            if isinstance(e, gemini.BudgetExceeded):
                continue
            return
        break
    else:
        return
    if difference is None:
        forward, backward = result.evictions
        if not forward or not backward:
            raise Untried("the same bits, but its batch reads too little of it for anything to be evicted")
        result.status, result.reason = "works", ""
        return
    again, repeated = run_plain(entry, batches, result.precision)
    same = repeated == losses and all(same_bits(again.master(n), plain.master(n)) for n in plain.states)
    if not same:
        raise Untried("two plain runs with the same seeds differ")
    result.status, result.reason = "failed", difference


def _compare(
    result: Result, entry: Entry, batches: Batches, path: Path, plain: Plain, losses: list[float]
) -> str | None:
    """Train managed: what differs from the plain loop, or None."""
    (path / MANAGED).touch()
    model: Any = build(entry)
    result.params = sum(p.numel() for p in model.parameters())
    try:
        model = gemini.GeminiDDP(model, tight_config(model, result.precision, path, result.extra))
    except (ValueError, TypeError) as e:  # what GeminiDDP says of models that it does not take
        raise gemini.GeminiError(_line(e)) from e
    world = world_of(model)
    result.chunks = len(world.chunks)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
    managed: list[float] = []
    forward = backward = 0
    for step in range(STEPS):
        before = world.num_evictions
        loss, _ = loss_of(model, batches(step), step)
        between = world.num_evictions
        loss.backward()
        forward, backward = forward + between - before, backward + world.num_evictions - between
        managed += [loss.item(), model.clip_grad_norm_(1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    result.evictions = (forward, backward)
    return _difference(model, plain, managed, losses)


def _difference(model: Any, plain: Plain, managed: list[float], losses: list[float]) -> str | None:
    norms = [torch.tensor(n, dtype=torch.float32).item() for n in losses[1::2]]
    if managed[0::2] != losses[0::2] or managed[1::2] != norms:
        return f"losses and norms differ: {managed} plain {losses}"
    try:
        assert_same_state(model, plain)
    except AssertionError as e:
        return f"state differs: {_line(e)}"
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.model.named_buffers(), strict=True):
        if not same_bits(ours, theirs):
            return f"buffer {name} differs"
    return None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:400]}" if not isinstance(error, (gemini.GeminiError,)) else text[:400]


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


def as_record(result: Result) -> dict[str, Any]:
    gc.collect()
    return asdict(result)
