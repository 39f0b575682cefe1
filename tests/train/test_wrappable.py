"""What cannot be managed is refused at the wrap with its place, and a wrap that fails leaves the model as it was."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import gemini
from gemini import GeminiConfig, GeminiDDP, GeminiError, MemoryBudget, StaticPlacement, StorageError
from gemini.memory.nvme import SpillFile
from gemini.train import ddp, wrap
from gemini.train.passes import hooks
from gemini.train.setup import build
from tests.standin_device import StandinDevice
from tests.train import helpers
from tests.train.helpers import adam, failing, llama, make_config, same_bits, snapshot, train
from tests.world import is_managed, world_of

Error = type[BaseException] | tuple[type[BaseException], ...]


class Net(nn.Module):
    def __init__(self, part: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.part = nn.Linear(8, 8), nn.Linear(8, 8), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(x)))
        return (x if self.part is None else self.part(x)).float().pow(2).mean()


class Hookless(nn.Linear):
    def register_forward_pre_hook(self, *args: Any, **how: Any) -> Any:
        raise RuntimeError("no hooks here")


class Final(Net):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


class Own(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]


def with_param(param: Any) -> nn.Module:
    net = Net()
    net.a._parameters["weight"] = param(net)
    return net


def with_buffer(buffer: Any) -> nn.Module:
    net = Net()
    net.b.register_buffer("seen", buffer(net))
    return net


def with_attribute() -> nn.Module:
    net = Net()
    net.b.kept = net.a.weight.detach()  # type: ignore[assignment]
    return net


def with_gradient() -> nn.Module:
    net = Net()
    net.a.weight.grad = torch.zeros(8, 8)  # as zero_grad(set_to_none=False) leaves it
    net.b.bias.grad = torch.full((8,), float("nan"))
    return net


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Net()


KINDS: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "scripted": (lambda: Net(torch.jit.script(nn.Linear(8, 8))), TypeError, r"'part' is a torch\.jit module"),
    "scripted whole": (lambda: torch.jit.script(nn.Linear(8, 8)), TypeError, r"the model is a torch\.jit module"),
    "traced": (
        lambda: Net(torch.jit.trace(nn.Linear(8, 8), torch.zeros(1, 8))), TypeError, r"'part' is a torch\.jit module",
    ),
    "takes no hooks": (lambda: Net(Hookless(8, 8)), TypeError, r"'part' \(Hookless\) takes no forward hooks"),
    "no subclass": (Final, TypeError, "Final cannot be the base of a managed class .*no subclasses"),
    "lazy": (lambda: Net(nn.LazyLinear(8)), ValueError, r"param 'part\.weight' is not initialized yet"),
    "lazy buffer": (
        lambda: Net(nn.LazyBatchNorm1d(affine=False)), ValueError, r"buffer 'part\.running_mean' is not initialized",
    ),
    "meta": (lambda: Net(nn.Linear(8, 8, device="meta")), ValueError, r"param 'part\.weight' is on the meta device"),
    "meta buffer": (
        lambda: with_buffer(lambda net: torch.zeros(2, device="meta")), ValueError, r"buffer 'b\.seen' is on the meta",
    ),
    "complex": (
        lambda: with_param(lambda net: nn.Parameter(torch.zeros(8, 8, dtype=torch.cfloat))), TypeError, "complex64",
    ),
    "integer": (
        lambda: with_param(lambda net: nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)),
        TypeError, "int8",
    ),
    "frozen, of int64": (
        lambda: with_param(lambda net: nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)),
        TypeError, r"'a\.weight'.*int64",
    ),
    "sparse": (lambda: with_param(lambda net: nn.Parameter(torch.eye(8).to_sparse())), TypeError, "sparse"),
    "of inference": (in_inference_mode, ValueError, r"param 'a\.weight' was made in torch\.inference_mode"),
    "computed": (lambda: with_param(lambda net: net.a.weight * 2), ValueError, "is the result of a computation"),
    "own class": (lambda: with_param(lambda net: Own(torch.zeros(8, 8))), TypeError, "is a Own, a tensor with a behav"),
    "two of one memory": (
        lambda: with_param(lambda net: nn.Parameter(net.b.weight.data)), ValueError,
        r"param 'a\.weight' and 'b\.weight' share memory.*registering one nn\.Parameter",
    ),
    "a row of another": (
        lambda: with_param(lambda net: nn.Parameter(torch.as_strided(net.b.weight.data, (7, 8), (8, 1), 8))),
        ValueError, "'b.weight' and 'a.weight' share memory",
    ),
    "seen by a buffer": (
        lambda: with_buffer(lambda net: net.a.weight.data[1]), ValueError, "a.weight' and 'b.seen' share memory",
    ),
    "a gradient": (with_gradient, ValueError, r"param 'b\.bias' has a gradient already.*zero_grad\(\) before"),
    "seen by an attribute": (with_attribute, ValueError, r"'a\.weight' and 'b\.kept' share memory.*Compute it"),
}  # fmt: skip


def config(folder: Path, **how: Any) -> gemini.GeminiConfig:
    memory = gemini.MemoryBudget(cpu="16MiB", nvme="16MiB", nvme_path=folder)
    return gemini.GeminiConfig(
        memory=memory, placement=gemini.StaticPlacement(weights_on_nvme=1.0), device="cpu", max_chunk=64, **how
    )


def looks(model: nn.Module) -> Any:
    """All of a model that a wrap would change."""
    return (
        type(model), [set(vars(m)) for m in model.modules()],
        [(name, id(p), id(p.grad) if p.is_leaf else 0, type(p), p.dtype, "_gemini" in vars(p),
          len(getattr(p, "_post_accumulate_grad_hooks", 0) or ()))
         for name, p in model.named_parameters()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_before_anything_changes(kind: str, tmp_path: Path) -> None:
    make, error, words = KINDS[kind]
    model = make()
    before = looks(model)
    with pytest.raises(error, match=words):
        gemini.GeminiDDP(model, config(tmp_path))
    assert looks(model) == before and not any(tmp_path.iterdir())


def test_a_model_that_fully_shard_has_divided(tmp_path: Path) -> None:

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Net()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"param 'a\.weight' is a DTensor, .* before fully_shard"):
            gemini.GeminiDDP(model, config(tmp_path))
    finally:
        torch.distributed.destroy_process_group()


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "columns of one matrix": lambda: of_columns(torch.arange(128.0).view(8, 16) / 128),
    "gradients of zeros": lambda: with_zeros(),
    "a sparse buffer": lambda: with_buffer(lambda net: torch.eye(3).to_sparse()),
}


def of_columns(matrix: torch.Tensor) -> nn.Module:
    net = Net()
    net.a.weight, net.b.weight = nn.Parameter(matrix[:, ::2]), nn.Parameter(matrix[:, 1::2])
    return net


def with_zeros() -> nn.Module:
    net = Net()
    net.a.weight.grad = torch.zeros(8, 8)
    return net


@pytest.mark.parametrize("kind", RIGHT)
def test_what_can_be_managed_computes_as_the_plain_loop(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    plain: Any = RIGHT[kind]()
    strided = [param for param in plain.parameters() if not param.is_contiguous()]
    for param in strided:  # torch rounds in another way where a weight has gaps: its kernels differ
        param.data = param.data.contiguous()
    torch.manual_seed(2)
    told: Any = nullcontext([])
    if strided:
        told = pytest.warns(UserWarning, match=f"kept contiguous, and {len(strided)} of them were not")
    with told as said:
        model: Any = gemini.GeminiDDP(RIGHT[kind](), config(tmp_path, precision="fp32"))
    assert not said or said[0].filename == __file__  # the program's own line, however deep ours is
    losses = []
    for each in (plain, model):
        optimizer = gemini.HybridAdam(each.parameters(), lr=1e-2, weight_decay=0.1)
        torch.manual_seed(1)
        losses.append(train(each, optimizer, range(3), lambda net, _: net(torch.ones(2, 8)), clip=None))
    assert losses[0] == losses[1]


BREAKS: dict[str, tuple[Any, str, int]] = {
    "buffers are there": (wrap, "prepare_layers", 1), "first hook": (hooks, "hook_around", 1),
    "last hook": (hooks, "hook_around", 3),
    "class": (ddp, "managed_class", 2),  # the first is the question whether it can be made
}  # fmt: skip


@pytest.mark.parametrize("moment", BREAKS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_wrap_that_breaks_off_is_undone(precision: str, moment: str, tmp_path: Path) -> None:
    """Frozen params lose bits in bf16 and float64 ones in any precision: they have all of them back."""
    model = Net(nn.BatchNorm1d(8))
    model.b.requires_grad_(False)
    model.a.double()
    before, values = looks(model), {name: value.clone() for name, value in model.state_dict().items()}
    breaks = failing(*BREAKS[moment], KeyboardInterrupt())
    with breaks, pytest.warns(UserWarning, match="float64"), pytest.raises(KeyboardInterrupt):
        gemini.GeminiDDP(model, config(tmp_path, precision=precision))
    assert looks(model) == before
    for name, value in model.state_dict().items():
        assert value.dtype is values[name].dtype and torch.equal(value, values[name]), name
    managed: Any = gemini.GeminiDDP(model.float(), config(tmp_path, precision="fp32"))
    managed(torch.ones(2, 8)).backward()
    world_of(managed).check()


# ---- configs that a model does not fit -------------------------------------------------------------------------------


def cpu(**budget: Any) -> GeminiConfig:
    return GeminiConfig(device="cpu", memory=MemoryBudget(**budget))


@contextmanager
def refused_wrap(error: Error, words: str) -> Iterator[tuple[nn.Module, pytest.ExceptionInfo[BaseException]]]:
    """A model that stays the ordinary one it was: class, params, hooks, values."""
    model, like = llama(), llama()
    with pytest.raises(error, match=words) as raised:
        yield model, raised
    assert type(model) is type(like) and not is_managed(model)
    for (name, param), (_, expected) in zip(model.named_parameters(), like.named_parameters(), strict=True):
        assert type(param) is nn.Parameter and same_bits(param.detach(), expected.detach()), name
        assert getattr(param, "_gemini", None) is None, name
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


SPILL_FOLDERS = ("missing", "file", "file/below", "/proc", "/proc/self", "/dev/full")
CONFIGS: dict[str, tuple[Callable[[Path], Any], Error, str]] = {
    "1 kB": (lambda path: cpu(cpu="1kB"), gemini.BudgetExceeded, "missing on cpu"),
    "nothing": (lambda path: cpu(cpu=0), gemini.BudgetExceeded, "missing on cpu"),
    "a small GPU": (
        lambda path: GeminiConfig(device="standin", memory=MemoryBudget(gpu="10KiB", cpu="1GiB")),
        gemini.BudgetExceeded,
        r"missing on gpu.*raise the gpu budget",
    ),
    "a GPU full of activations": (
        lambda path: GeminiConfig(device="standin", memory=MemoryBudget(gpu="1MiB", cpu="1GiB"), activations="1020KiB"),
        gemini.BudgetExceeded,
        "missing on gpu.*raise the gpu budget to at least",
    ),
    "a small disk": (
        lambda path: cpu(cpu="800KiB", nvme="4KiB", nvme_path=path),
        gemini.BudgetExceeded,
        r"missing on nvme.*raise the nvme budget to",
    ),
    "no folder": (
        lambda path: GeminiConfig(device="cpu", placement=StaticPlacement(weights_on_nvme=0.5)),
        ValueError,
        r"nvme.*nvme_path=",
    ),
    **{
        f"on {device}": (lambda path, device=device: GeminiConfig(device=device), ValueError, "device")
        for device in ("tpu", "cuda:99", "mps", "meta", 3.5, "cpu:", "standin0")
    },
    **{
        f"in {folder}": (
            lambda path, folder=folder: cpu(cpu="600KiB", nvme="4MiB", nvme_path=path / folder),
            gemini.StorageError,
            re.escape(folder),
        )
        for folder in SPILL_FOLDERS
    },
    **{
        f"config {config!r}": (lambda path, config=config: config, TypeError, "GeminiConfig")
        for config in ("bf16", {"precision": "bf16"}, MemoryBudget())
    },
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_cannot_be_met(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config, error, words = CONFIGS[what]
    with refused_wrap(error, words) as (model, _):
        GeminiDDP(model, config(tmp_path))
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_budget_too_small_names_the_gap_and_the_cheapest_change(precision: str, tmp_path: Path) -> None:
    half = world_of(helpers.wrap(llama(), "ram", tmp_path, precision=precision)).used(gemini.Tier.CPU) // 2
    how = {"device": "cpu", "precision": precision}
    with refused_wrap(gemini.BudgetExceeded, r"does not fit: .*missing on cpu.*Cheapest change: ") as (model, error):
        GeminiDDP(model, GeminiConfig(**how, memory=MemoryBudget(cpu=half)))
    match = re.search(r"nvme=([\d.]+ [KM]iB)", str(error.value))
    assert match is not None, error.value
    remedy = MemoryBudget(cpu=half, nvme=match[1], nvme_path=tmp_path)  # what the error said is enough
    wrapped = GeminiDDP(model, GeminiConfig(**how, memory=remedy))
    train(wrapped, adam(wrapped), [0])


def test_a_budget_below_the_working_set_names_one_that_is_enough(tmp_path: Path) -> None:
    disk = {"nvme": "64MiB", "nvme_path": tmp_path}
    with refused_wrap(gemini.BudgetExceeded, "missing on cpu") as (model, error):
        GeminiDDP(model, cpu(cpu="100KiB", **disk))
    match = re.search(r"raise the cpu budget to at least ([\d.]+ [KM]iB)", str(error.value))
    assert match is not None, error.value
    GeminiDDP(model, cpu(cpu=match[1], **disk))


def test_the_named_gap_is_the_gap(tmp_path: Path) -> None:
    """With just the bytes it asks for the model fits, with a page less it does not."""
    used = world_of(helpers.wrap(llama(), "ram", tmp_path)).used(gemini.Tier.CPU)
    with pytest.raises(gemini.BudgetExceeded):
        GeminiDDP(llama(), cpu(cpu=used - 4096))
    GeminiDDP(llama(), cpu(cpu=used))


@pytest.mark.parametrize(
    ("owner", "name", "number", "error", "words"),
    [
        (os, "posix_fallocate", 1, OSError(28, "No space left on device"), "No space left.*nvme"),
        (SpillFile, "begin_write", 4, StorageError("the disk is gone"), "gone"),
    ],
    ids=["too small", "fails while the model moves in"],
)
def test_a_disk(owner: Any, name: str, number: int, error: Exception, words: str, tmp_path: Path) -> None:
    with failing(owner, name, number, error), refused_wrap(StorageError, words) as (model, _):
        GeminiDDP(model, make_config(llama(), "disk", tmp_path))


def _files_in(folder: Path) -> list[str]:
    opened = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [name for file in opened if file.is_symlink() and (name := os.readlink(file)).startswith(str(folder))]


def test_what_a_refused_wrap_has_opened_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the program keeps the error, with all that its frames have."""
    ended = list[str]()
    for name in ("reserve_windows", "close"):
        real = getattr(StandinDevice, name)

        def note(device: StandinDevice, *args: Any, real: Any = real, name: str = name) -> Any:
            ended.append(name)
            return real(device, *args)

        monkeypatch.setattr(StandinDevice, name, note)
    with (
        failing(build, "make_plane", 3, MemoryError("no memory")),
        refused_wrap(MemoryError, "no memory") as (model, _),
    ):
        with pytest.raises(MemoryError, match="no memory") as kept:
            GeminiDDP(model, make_config(llama(), "standin", tmp_path))
        assert not _files_in(tmp_path) and ended == ["reserve_windows", "reserve_windows", "close"]
        raise kept.value


def test_a_warning_when_a_setting_has_no_effect() -> None:
    with pytest.warns(UserWarning, match=r"gpu=.*no effect"):
        GeminiDDP(llama(), cpu(gpu="1GiB", cpu="1GiB"))


def test_a_param_shared_by_two_wrapped_models(tmp_path: Path) -> None:
    first, second = llama(), llama()
    second.lm_head.weight = first.lm_head.weight
    wrapped = helpers.wrap(first, "disk", tmp_path)
    before = snapshot(wrapped)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*another GeminiDDP model"):
        GeminiDDP(second, cpu(cpu="1GiB"))
    helpers.assert_same_snapshot(before, snapshot(wrapped))
    assert all(type(p) is nn.Parameter for n, p in second.named_parameters() if n != "lm_head.weight")
    assert type(second) is LlamaForCausalLM and second.model.norm.weight.dtype is torch.float32
    train(wrapped, adam(wrapped), [0])


def test_sparse_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(GeminiError, match="sparse=False"):
        model = GeminiDDP(model, make_config(model, "ram", tmp_path))
        model(torch.tensor([1, 2])).float().sum().backward()


# ---- the way back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [StorageError("the drive does not answer"), KeyboardInterrupt()], ids=["drive", "ctrl-c"]
)
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_release_that_breaks_off_changes_nothing(where: str, error: BaseException, tmp_path: Path) -> None:
    model, plain = (helpers.wrap(Net(), where, tmp_path, precision="fp32") for _ in range(2))
    optimizer, other = adam(model), adam(plain)
    x = torch.ones(2, 8)
    with failing(world_of(model).by_names, "read", 3, error, once=True), pytest.raises(type(error)):
        gemini.release(model)
    for _ in range(2):
        for managed, its in ((model, optimizer), (plain, other)):
            managed(x).backward()
            its.step()
            its.zero_grad()
    world_of(model).check()
    after = {name: value.clone() for name, value in plain.state_dict().items()}
    released = gemini.release(model)
    assert type(released) is Net and not is_managed(released)
    assert all(same_bits(value, after[name]) for name, value in released.state_dict().items())
