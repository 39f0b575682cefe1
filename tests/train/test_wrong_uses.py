"""What cannot be meant is refused with its remedy, before anything changes: tables of ``(do, error, words)``.

The first table is of things done to a managed model, which must train on as if nothing had been asked (its fixture
checks that after every case). Then come values, arguments that are meant otherwise, and folders and packages that are
not what they should be. Wraps that are refused are in ``test_wrappable.py``.
"""

import copy
import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import gemini
from benchmarks._progress import run
from gemini import GeminiConfig, GeminiDDP, GeminiError, HybridAdam, MemoryBudget, ParamAccessError, StaticPlacement
from tests.train import helpers
from tests.train.helpers import Plain, adam, llama, on_batch, same_bits, snapshot, train, wrap
from tests.world import is_managed, world_of

Error = type[BaseException] | tuple[type[BaseException], ...]
BadValue = (ValueError, TypeError)
Row = tuple[Callable[..., Any], Error, str]
ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")
Q = "model.layers.1.self_attn.q_proj.weight"


def on_nvme(path: Path, **how: Any) -> GeminiConfig:
    """All weights on the drive, in chunks of one param."""
    memory = MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=path)
    return GeminiConfig(memory=memory, placement=StaticPlacement(weights_on_nvme=1), max_chunk=64, **how)


def cpu(**budget: Any) -> GeminiConfig:
    return GeminiConfig(device="cpu", memory=MemoryBudget(**budget))


# ---- on a managed model ----------------------------------------------------------------------------------------------


@pytest.fixture
def model(where: str, tmp_path: Path) -> Iterator[Any]:
    """A model that has trained one step, and must go on to train as if the test had not happened."""
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer = adam(model)
    assert train(model, optimizer, [0]) == helpers.train_plain(plain, [0])
    yield model
    model.zero_grad()
    helpers.assert_trains_alike(model, optimizer, plain, [1])


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def refuse(rows: list[Row], *given: Any) -> None:
    for do, error, words in rows:
        with pytest.raises(error, match=words):
            do(*given)


def q(model: Any) -> nn.Parameter:
    return model.get_parameter(Q)


def ids() -> torch.Tensor:
    return torch.zeros(1, 4, dtype=torch.long)


def step_with(stock: Any) -> Row:
    def do(model: Any) -> None:
        optimizer = stock(model.parameters(), lr=0.1)
        on_batch(model, 5).backward()
        optimizer.step()

    return do, GeminiError, "HybridAdam"


def assign_gradient(model: Any) -> None:
    q(model).grad = torch.ones_like(q(model))
    adam(model).step()


def set_item(p: Any) -> None:
    p[0, 0] = 1.0


def in_place(p: Any) -> None:
    p += 1


def while_autograd_is_on(write: Callable[[Any], Any]) -> Row:
    """torch refuses them too, for a leaf."""
    return lambda model: write(q(model)), ParamAccessError, r"q_proj\.weight' while autograd is on.*gathered"


def at_rest(change: Callable[[Any], Any], words: str) -> Row:
    return lambda model: torch.no_grad()(change)(q(model)), ParamAccessError, words


def ones() -> torch.Tensor:
    return torch.ones(32, 32, dtype=torch.bfloat16)


REFUSED: dict[str, list[Row]] = {
    "copies and pickles": [
        (lambda model: copy.deepcopy(model), GeminiError, "copied.*state_dict"),
        (lambda model: copy.deepcopy(model.model.layers[1]), GeminiError, "copied"),
        (lambda model: copy.deepcopy([model]), GeminiError, "copied"),
        (lambda model: pickle.dumps(model), GeminiError, "pickled.*save_pretrained"),
        (lambda model: pickle.dumps(q(model)), GeminiError, "pickled"),
        (lambda model: torch.save(model, io.BytesIO()), GeminiError, "pickled"),
        (lambda model: copy.copy(model), GeminiError, "(copied|pickled)"),
        (lambda model: torch.save(model.model, io.BytesIO()), (GeminiError, AttributeError), "(?i)pickle"),
    ],
    "data parallel": [
        (lambda model: model._replicate_for_data_parallel(), GeminiError, "torchrun"),
        (lambda model: GeminiDDP(nn.DataParallel(model)), (GeminiError, ValueError, TypeError), ""),
        (lambda model: GeminiDDP(nn.DataParallel(llama())), TypeError, "bare model"),
    ],
    "distributed data parallel": [
        (lambda model: nn.parallel.DistributedDataParallel(model), GeminiError, "DistributedDataParallel"),
        (lambda model: torch.jit.trace(model, (ids(),)), GeminiError, r"nor torch\.jit takes a managed model"),
        (lambda model: torch.export.export(model, (ids(),)), GeminiError, "export does not take a managed model"),
        (lambda model: GeminiDDP(nn.parallel.DistributedDataParallel(llama())), TypeError, "bare model"),
    ],
    "fully_shard": [
        (
            lambda model: fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,))),
            Exception,
            "(?i)managed|gemini",
        )
    ],
    "wrapping twice": [
        (lambda model: GeminiDDP(model), ValueError, r"managed already.*gemini\.release"),
        (lambda model: GeminiDDP(model.model.layers[1]), ValueError, "another GeminiDDP model"),
        (lambda model: GeminiDDP(nn.Sequential(nn.Linear(4, 4), model)), ValueError, "managed already"),
    ],
    "casting and moving": [
        (lambda model: model.half(), GeminiError, "precision"),
        (lambda model: model.float(), GeminiError, "precision"),
        (lambda model: model.double(), GeminiError, "precision"),
        (lambda model: model.to(torch.float32), GeminiError, "precision"),
        (lambda model: model.to(dtype=torch.float16), GeminiError, "precision"),
        (lambda model: model.to("meta"), GeminiError, "precision"),
        (lambda model: model.to_empty(device="meta"), GeminiError, "precision"),
        (lambda model: model._apply(lambda t: t.double()), GeminiError, "precision"),
        (lambda model: model.cuda(), (GeminiError, AssertionError, RuntimeError), "(?i)managed|cuda|nvidia"),
    ],
    "casting a part": [
        (lambda model: model.model.half(), GeminiError, "(?i)managed|gathered"),
        (lambda model: model.lm_head.to(torch.float32), GeminiError, "(?i)managed|gathered"),
        (lambda model: model.model.double(), GeminiError, "(?i)managed|gathered"),
    ],
    "sharing memory": [(lambda model: model.share_memory(), GeminiError, "")],
    "AdamW": [step_with(torch.optim.AdamW)],
    "SGD": [step_with(torch.optim.SGD)],
    "Adagrad": [step_with(torch.optim.Adagrad)],
    "double backward": [(lambda model: on_batch(model, 5).backward(create_graph=True), GeminiError, "create_graph")],
    "gradients that never reach the chunks": [
        (lambda model: torch.autograd.grad(on_batch(model, 5), list(model.parameters())), GeminiError, "(?i)grad")
    ],
    "assigning a gradient": [(assign_gradient, GeminiError, r"loss\.backward\(\)")],
    "writes at rest": [
        while_autograd_is_on(set_item),
        while_autograd_is_on(in_place),
        while_autograd_is_on(lambda p: p.mul_(2)),
        while_autograd_is_on(lambda p: torch.add(p, 1, out=p)),
        while_autograd_is_on(torch.relu_),
        while_autograd_is_on(lambda p: p.index_fill_(0, torch.tensor([0]), 0)),
        while_autograd_is_on(lambda p: torch._foreach_mul_([p], 2.0)),
        while_autograd_is_on(lambda p: p.lerp_(ones(), 0.5)),
        while_autograd_is_on(lambda p: p.copy_(ones())),
        while_autograd_is_on(lambda p: p.log1p_()),
    ],
    "other memory": [
        at_rest(lambda p: setattr(p, "data", ones()), r"q_proj\.weight.*copy_\(value\)"),
        at_rest(lambda p: p.resize_(0), r"q_proj\.weight"),
        at_rest(lambda p: p.t_(), r"q_proj\.weight"),
        at_rest(lambda p: p.data.set_(ones()), r"q_proj\.weight"),
        at_rest(lambda p: p.set_(ones()), r"q_proj\.weight"),
        at_rest(lambda p: p.share_memory_(), r"q_proj\.weight"),
        at_rest(lambda p: p.data.squeeze_(0).unsqueeze_(0), r"q_proj\.weight"),
    ],
    "views": [
        at_rest(lambda p: nn.Parameter(p), "full_param|gathered"),
        at_rest(lambda p: nn.Parameter(p[0]), "full_param|gathered"),
        at_rest(lambda p: torch.from_dlpack(p.view(-1)), "full_param|gathered"),
    ],
    "a wrong name": [
        (lambda model: model.full_param(Q.replace("ht", "th")), KeyError, "no managed .* there are model")
    ],
    "resizing embeddings": [(lambda model: model.resize_token_embeddings(128), GeminiError, "before GeminiDDP")],
    "weights that are computed": [
        (lambda model, norm=norm: norm(model.model.layers[0].self_attn.q_proj), GeminiError, "before GeminiDDP")
        for norm in (
            nn.utils.weight_norm,
            nn.utils.parametrizations.weight_norm,
            nn.utils.parametrizations.spectral_norm,
            lambda module: nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity()),
        )
    ],
    "state dicts": [
        (lambda model: model.state_dict(keep_vars=True), GeminiError, "keep_vars"),
        (lambda model: model.load_state_dict(llama().state_dict(), assign=True), GeminiError, "assign"),
    ],
}


@pytest.mark.parametrize("what", REFUSED)
def test_on_a_managed_model(what: str, model: Any, process_group: None) -> None:
    before = snapshot(model)
    refuse(REFUSED[what], model)
    assert model.to("cpu") is model and model.cpu() is model and model.to(model.device) is model
    assert q(model).dtype is torch.bfloat16 and model.model.rotary_emb.inv_freq.dtype is torch.float32
    helpers.assert_same_snapshot(before, snapshot(model))
    with torch.no_grad():
        assert model(**helpers.batch(9)).logits.isfinite().all(), "and it is served"


@pytest.mark.parametrize("place", [0, 1])
def test_swapping_a_param_that_no_optimizer_has(place: int, tmp_path: Path) -> None:
    model = wrap(nn.Linear(8, 8), "ram", tmp_path)
    before = model.full_param("weight")
    params = [model.weight]
    params.insert(place, nn.Parameter(torch.ones(8)))
    with pytest.raises(ParamAccessError, match="swap_tensors of a managed param"):
        torch.utils.swap_tensors(*params)
    assert same_bits(model.full_param("weight"), before) and bool((params[place] == 1).all())


def test_a_state_dict_of_no_values(model: Any) -> None:
    before, last = snapshot(model), list(model.state_dict())[-1]
    for hollow in (lambda v: v.to("meta"), lambda v: v.to_sparse(), lambda v: None):
        state = {name: value + 1 for name, value in model.state_dict().items()}
        with pytest.raises(TypeError, match=rf"{re.escape(repr(last))}.* is (not a dense tensor|a NoneType)"):
            model.load_state_dict({**state, last: hollow(state[last])})
    helpers.assert_same_snapshot(before, snapshot(model))


class Differentiates(nn.Module):
    """Takes a Jacobian over a weight of its own, inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.func.jacrev(lambda z: torch.tanh(z @ self.weight))(x[0]).sum()


@pytest.mark.parametrize("part", [False, True])
def test_a_transform_inside_a_module_whose_weights_move(part: bool, tmp_path: Path) -> None:
    """torch takes no derivatives where saved-tensor hooks are open: said in our words, whoever calls the module."""
    model = GeminiDDP(nn.Sequential(Differentiates(), nn.Linear(8, 8)), on_nvme(tmp_path, precision="fp32"))
    with pytest.raises(ParamAccessError, match=r"'0\.weight'.* called torch\.func inside of its forward"):
        (model[0] if part else model)(torch.ones(2, 8))
    model[1](torch.ones(2, 8)).sum().backward()
    world_of(model).check()


class Lengths(nn.Linear):
    """Whose second input belongs on the CPU, wherever the model computes."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert lengths.device.type != "cpu", "the device of a model without a GPU is the CPU"
        return super().forward(x)


def test_a_batch_on_another_device() -> None:
    """It is refused by torch; what merely is elsewhere is nobody's business."""
    model: Any = GeminiDDP(nn.Linear(4, 2), GeminiConfig(precision="fp32", device="cpu"))
    assert model.device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="device"):
        model(torch.zeros(3, 4, device="meta"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    model(torch.zeros(3, 4)).sum().backward()
    more: Any = GeminiDDP(Lengths(4, 2), GeminiConfig(precision="fp32", device="cpu"))
    more(torch.zeros(3, 4), torch.zeros(3, device="meta"))


def test_modes_that_do_not_go_together(where: str, tmp_path: Path) -> None:
    model, other = wrap(llama(), where, tmp_path, gradients="transient"), wrap(llama(), where, tmp_path)
    before = snapshot(model)
    refuse([
        (lambda: on_batch(model, 0).backward(), GeminiError, "step_in_backward=True"),
        (lambda: train(model, adam(model), [0], clip=None), GeminiError, "step_in_backward=True"),
        (lambda: model.clip_grad_norm_(1.0), GeminiError, "retain"),
    ])  # fmt: skip
    helpers.assert_same_snapshot(before, snapshot(model))
    with pytest.raises(GeminiError, match="leave step_in_backward out"):
        train(other, adam(other, step_in_backward=True), [0], clip=1.0)


# ---- what looks alike, and is right ----------------------------------------------------------------------------------


def test_torch_tensor_of_a_param_at_rest(model: Any) -> None:
    """torch shows this read to nobody: the weights, or NaN, never garbage."""
    with torch.no_grad():
        unseen = torch.tensor(q(model))
        assert same_bits(unseen, model.full_param(Q)) or unseen.isnan().all()


def test_the_class_makes_ordinary_models(model: Any, tmp_path: Path) -> None:
    assert isinstance(model, GeminiDDP) and isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    made = type(model)(model.config)
    assert type(made) is LlamaForCausalLM and not is_managed(made)
    model.save_pretrained(tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert type(loaded) is LlamaForCausalLM
    assert same_bits(loaded.get_parameter(Q).detach().bfloat16(), model.full_param(Q))
    assert type(made)(model.config).num_parameters() == model.num_parameters()


# ---- values ----------------------------------------------------------------------------------------------------------


def params() -> Any:
    return nn.Linear(2, 2).parameters()


VALUES: dict[str, tuple[Callable[[], Any], Error, str]] = {
    **{
        f"cpu={size!r}": (lambda size=size: MemoryBudget(cpu=size), ValueError, r"cpu=.*(unit|read)")
        for size in ("20 Gigs", "GiB", "1.2.3MiB", "20XB", "", "nan", "1e", "²")
    },
    **{
        f"gpu={size!r}": (lambda size=size: MemoryBudget(gpu=size), ValueError, r"gpu=.*(negative|finite)")
        for size in (-1, "-20GiB", INF, NAN, " -1 kB")
    },
    **{
        f"nvme of {type(size).__name__}": (
            lambda size=size: MemoryBudget(nvme=size, nvme_path="/tmp"), TypeError, "nvme=",
        )
        for size in (True, b"1GiB", [1], object())
    },
    "nvme without a folder": (lambda: MemoryBudget(nvme="1GiB"), ValueError, "nvme_path="),
    **{
        f"{name}={value}": (lambda name=name, value=value: GeminiConfig(**{name: value}), BadValue, words)
        for name, value, words in (
            ("precision", "bfloat16", "bf16.*fp16.*fp32"),
            ("precision", torch.bfloat16, "bf16.*fp16.*fp32"),
            ("precision", "fp8", "bf16"),
            ("gradients", "keep", "transient.*retain.*accumulate"),
            ("placement", "fast", "auto"),
            ("placement", 0.5, "StaticPlacement"),
            ("memory", "20GiB", "MemoryBudget"),
            ("memory", None, "MemoryBudget"),
            ("max_chunk", 0, "max_chunk"),
            ("max_chunk", 1.5, "max_chunk"),
            ("activations", "lots", "activations"),
            ("activations", -5, "activations"),
        )
    },
    "fp16, transient": (lambda: GeminiConfig(gradients="transient", precision="fp16"), BadValue, "retain"),
    **{
        f"fraction {value}": (lambda value=value: StaticPlacement(weights_on_nvme=value), ValueError, "weights_on_nvme")
        for value in (-0.1, 1.1, "half", None, NAN)
    },
    "fractions above 1": (
        lambda: StaticPlacement(weights_on_gpu=0.6, weights_on_nvme=0.6), ValueError, "more than 1",
    ),
    "no model": (lambda: GeminiDDP(None), TypeError, "nn.Module"),
    "a name": (lambda: GeminiDDP("gpt2"), TypeError, "nn.Module"),
    "a list": (lambda: GeminiDDP([llama()]), TypeError, "nn.Module"),
    "a state dict": (lambda: GeminiDDP(llama().state_dict()), TypeError, "nn.Module"),
    "a class": (lambda: GeminiDDP(nn.Linear), TypeError, "nn.Module"),
    "a config": (lambda: GeminiDDP(cpu()), TypeError, "nn.Module"),
    "no params": (lambda: GeminiDDP(nn.Module()), ValueError, "no params"),
    "layers without params": (lambda: GeminiDDP(nn.Sequential(nn.ReLU(), nn.Dropout())), ValueError, "no params"),
    "HybridAdam of nothing": (lambda: HybridAdam([]), ValueError, "empty"),
    **{
        f"HybridAdam, {name}=True": (
            lambda name=name: HybridAdam(params(), **{name: True}), TypeError, f"unexpected keyword argument {name!r}",
        )
        for name in ("adamw_mode", "amsgrad", "fused", "rho")
    },
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
def test_a_value_that_makes_no_sense(what: str) -> None:
    refuse([VALUES[what]])


def test_hyperparameters_of_a_managed_model(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path)
    refuse([
        (lambda: HybridAdam(model.parameters(), lr=-1.0), ValueError, "lr"),
        (lambda: model.clip_grad_norm_(-1.0), ValueError, "max_norm"),
        (lambda: model.clip_grad_norm_(1.0, norm_type=INF), ValueError, "2-norm"),
    ])  # fmt: skip


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_bad_gradient_is_refused_before_anything_changed(
    bad: float, precision: str, where: str, tmp_path: Path
) -> None:
    model, plain = wrap(llama(), where, tmp_path, precision=precision), Plain(llama(), precision)
    optimizer = adam(model)
    assert train(model, optimizer, [0]) == helpers.train_plain(plain, [0])
    before = snapshot(model)
    with model.model.layers[2].register_forward_hook(lambda module, args, out: out * bad):
        on_batch(model, 1).backward()
    norm = model.clip_grad_norm_(1.0)
    assert not norm.isfinite()
    with pytest.raises(gemini.NonFiniteGradient, match="zero_grad"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(gemini.NonFiniteGradient, match=r"gradient of '[\w.]+' holds inf or NaN.*zero_grad"):
        optimizer.step()
    helpers.assert_same_snapshot(before, snapshot(model))
    optimizer.zero_grad()
    helpers.assert_trains_alike(model, optimizer, plain, [1])


# ---- params of other models ------------------------------------------------------------------------------------------


def test_an_optimizer_with_params_of_two_models(tmp_path: Path) -> None:
    a, b = wrap(llama(), "ram", tmp_path), wrap(llama(), "disk", tmp_path)
    optimizer, plain = adam(a), Plain(llama())
    refuse([
        (lambda: HybridAdam([*a.parameters(), *b.parameters()]), ValueError, "two GeminiDDP models"),
        (lambda: optimizer.add_param_group({"params": list(b.parameters())}), ValueError, "two GeminiDDP models"),
    ])  # fmt: skip
    assert len(optimizer.param_groups) == 1
    assert train(a, optimizer, [0]) == helpers.train_plain(plain, [0])
    raw, other = llama(), llama()
    both = HybridAdam([*raw.parameters(), *other.parameters()])  # found out when both are wrapped
    raw, other = GeminiDDP(raw, cpu(cpu="1GiB")), GeminiDDP(other, cpu(cpu="1GiB"))
    on_batch(raw, 0).backward()
    with pytest.raises(ValueError, match="two GeminiDDP models"):
        both.step()


ALONE = """
import torch, gemini
memory = gemini.MemoryBudget(cpu="1MiB")
model = gemini.GeminiDDP(torch.nn.Linear(4, 4), gemini.GeminiConfig(memory=memory, device="cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
try:
    optimizer.step()
except gemini.GeminiError as e:
    print(e)
"""


@pytest.mark.slow  # it starts an interpreter
def test_torchs_optimizer_is_refused_where_ours_was_never_looked_at(tmp_path: Path) -> None:
    result = run([sys.executable, "-c", ALONE], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert "SGD cannot update 'weight'" in result.stdout, result.stdout + result.stderr


# ---- arguments that are meant otherwise ------------------------------------------------------------------------------

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


def test_arguments_that_are_not_there() -> None:
    for make in (GeminiDDP, gemini.from_config, gemini.from_pretrained):
        with pytest.raises(TypeError, match="the config of a managed model is a gemini.GeminiConfig, got dict"):
            make(nn.Linear(2, 2), {"device": "cpu"})  # type: ignore[arg-type]
    model, of_config = nn.Linear(2, 2), r"takes a config object.*AutoConfig\.from_pretrained"
    of_class, of_mesh = "model_class= is a model class or an auto class of transformers", "mesh= is a DeviceMesh"
    refuse([
        (lambda: GeminiDDP(model, precision="fp32"), TypeError,
         "unexpected keyword argument 'precision'.*GeminiConfig"),
        (lambda: gemini.from_config(LlamaConfig(**TINY), gradients="retain"), TypeError,
         "unexpected keyword argument 'gradients'"),
        (lambda: gemini.from_config("config.json"), TypeError, of_config),
        (lambda: gemini.from_config({"model_type": "llama"}), TypeError, of_config),
        (lambda: gemini.from_config(LlamaConfig(**TINY), model_class="LlamaForCausalLM"), TypeError, of_class),
        (lambda: gemini.from_pretrained("folder", model_class=nn.Linear), TypeError, of_class),
        (lambda: gemini.trace(LlamaConfig(**TINY), {}, model_class="LlamaForCausalLM"), TypeError, of_class),
        (lambda: GeminiDDP(model, mesh="cpu"), TypeError, of_mesh),
        (lambda: gemini.slice_tensors(model, None), TypeError, of_mesh),
        (lambda: gemini.data_rank((2, 2)), TypeError, of_mesh),
    ])  # fmt: skip
    assert type(model) is nn.Linear


def test_checkpoints_by_other_arguments_and_in_folders_that_are_not_there(tmp_path: Path) -> None:
    model, folder = GeminiDDP(nn.Linear(2, 2)), tmp_path / "ck"
    optimizer = HybridAdam(model.parameters())
    words = r"not of a PosixPath \(the folder comes first"
    refuse([
        (lambda: gemini.save_checkpoint(model, folder, optimizer), TypeError, words),
        (lambda: gemini.load_checkpoint(model, folder, optimizer), TypeError, words),
        (lambda: gemini.save_checkpoint(folder, model, optimizer, {"step": 1}), TypeError,
         r"scheduler is a dict, which has no state_dict.*extra="),
        (lambda: gemini.save_checkpoint(tmp_path / "no" / "where", model, optimizer), gemini.StorageError, "create it"),
        (lambda: gemini.load_checkpoint(tmp_path / "nowhere", model, optimizer), gemini.StorageError, "nowhere"),
    ])  # fmt: skip
    assert not any(tmp_path.iterdir())


def test_paths_of_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "spill").mkdir()
    memory = MemoryBudget(cpu="16MiB", nvme="16MiB", nvme_path="~/spill")
    assert memory.nvme_path == tmp_path / "spill"
    config = GeminiConfig(memory=memory, placement=StaticPlacement(weights_on_nvme=1.0))
    assert world_of(GeminiDDP(nn.Linear(8, 8), config)).spill.directory == tmp_path / "spill"
    monkeypatch.chdir(tmp_path)
    memory = MemoryBudget(cpu="16MiB", nvme="16MiB", nvme_path="~no-such-user/spill")
    with pytest.raises(gemini.StorageError, match="~no-such-user/spill"):
        GeminiDDP(nn.Linear(8, 8), replace(config, memory=memory))


def test_an_unfrozen_model_that_is_only_evaluated() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    with pytest.raises(gemini.BudgetExceeded, match=r"requires_grad_\(False\)"):
        GeminiDDP(model, cpu(cpu="64KiB"))


# ---- model folders, packages -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several shards."""
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "model", max_shard_size="6KB")
    return tmp_path / "model"


@pytest.mark.parametrize("damage", ["short", "empty", "junk"])
@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_a_damaged_shard_is_named(folder: Path, damage: str, dtype: Any) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    for number in (0, 1, -1):
        whole = shards[number].read_bytes()
        shards[number].write_bytes({"short": whole[:-100], "empty": b"", "junk": b"junk" * 40}[damage])
        with pytest.raises(gemini.StorageError, match=rf"{shards[number].name} cannot be read: .*damaged"):
            gemini.from_pretrained(folder, dtype=dtype)
        shards[number].write_bytes(whole)
    assert type(gemini.from_pretrained(folder, dtype=dtype)).__name__ == "LlamaForCausalLM"


def test_a_damaged_pytorch_model_is_named(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    managed: Any = gemini.from_pretrained(folder)
    assert torch.equal(managed.full_param("model.norm.weight", torch.float32), model.model.norm.weight)
    whole = (folder / "pytorch_model.bin").read_bytes()
    for data in (whole[:-500], b"junk" * 40, b""):
        (folder / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(gemini.StorageError, match=r"pytorch_model\.bin cannot be read"):
            gemini.from_pretrained(folder)


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("nothere", "./nothere", tmp_path / "nothere"):
        with pytest.raises(OSError, match=rf"{path}: there is no such folder \(looked for in {tmp_path}\)"):
            gemini.from_pretrained(path)


WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
try:
    {code}
except ImportError as e:
    print("said:", e)
"""


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize(
    "hidden, code, extra",
    [
        ("accelerate", "from gemini.integrations.huggingface import GeminiTrainer", "trainer"),
        ("accelerate", "from gemini.integrations.accelerate import GeminiAccelerator", "trainer"),
        ("transformers", "from gemini.integrations.huggingface import GeminiTrainer", "trainer"),
        ("transformers", "import gemini; gemini.from_pretrained('model')", "hf"),
        ("transformers", "import gemini; gemini.from_config(object())", "hf"),
        ("lightning", "import gemini.integrations.lightning", "lightning"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(hidden: str, code: str, extra: str) -> None:
    done = run([sys.executable, "-c", WITHOUT.format(hidden=hidden, code=code)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("said: ") and "pip install" in done.stdout and hidden in done.stdout
    assert extra in done.stdout


@pytest.mark.parametrize("value", ["no", 0, None])
def test_what_is_true_or_false_is_nothing_else(value: Any) -> None:
    """Words that mean no would mean yes."""
    with pytest.raises(TypeError, match="overlap= is True or False"):
        gemini.GeminiConfig(overlap=value)
    with pytest.raises(TypeError, match="durable=. is True or False"):
        gemini.MemoryBudget(durable=value)
