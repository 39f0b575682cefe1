"""What cannot be meant on a managed model is refused with the remedy, before anything changes; never a silent nothing.

Each refusal names what to do instead, and leaves the model able to train on as if nothing had been asked: the fixture
checks that after every test.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import gemini
from gemini.train.params.handle import optimizer_of
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_snapshot,
    assert_trains_alike,
    batch,
    llama,
    make_config,
    noise,
    on_batch,
    same_bits,
    snapshot,
    train,
    train_plain,
    wrap,
)
from tests.world import is_managed, world_of

REFUSED = (gemini.GeminiError, ValueError, TypeError)
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(where: str, tmp_path: Path) -> Iterator[Any]:
    """A model that has trained one step, and must go on to train as if the test had not happened."""
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer = adam(model)
    assert train(model, optimizer, [0]) == train_plain(plain, [0])
    yield model
    model.zero_grad()
    assert_trains_alike(model, optimizer, plain, [1])


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_deepcopy_and_pickle(model: Any) -> None:
    for thing in (model, model.model.layers[1], [model]):
        with pytest.raises(gemini.GeminiError, match="copied"):
            copy.deepcopy(thing)
    p = model.get_parameter(Q)
    for thing in (model, p):
        with pytest.raises(gemini.GeminiError, match="pickled"):
            pickle.dumps(thing)
    with pytest.raises(gemini.GeminiError, match="pickled"):
        torch.save(model, io.BytesIO())
    with pytest.raises(gemini.GeminiError, match="(copied|pickled)"):
        copy.copy(model)
    with pytest.raises((gemini.GeminiError, AttributeError), match="(?i)pickle"):
        torch.save(model.model, io.BytesIO())


def test_data_parallel(model: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="torchrun"):
        model._replicate_for_data_parallel()
    with pytest.raises(REFUSED):
        gemini.GeminiDDP(nn.DataParallel(model))
    with pytest.raises(TypeError, match="bare model"):
        gemini.GeminiDDP(nn.DataParallel(llama()))


def test_distributed_data_parallel(model: Any, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(gemini.GeminiError, match="DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(model)
        ids = torch.zeros(1, 4, dtype=torch.long)
        with pytest.raises(gemini.GeminiError, match=r"nor torch\.jit takes a managed model"):
            torch.jit.trace(model, (ids,))
        with pytest.raises(gemini.GeminiError, match=r"torch\.export does not take a managed model"):
            torch.export.export(model, (ids,))
        with pytest.raises(TypeError, match="bare model"):
            gemini.GeminiDDP(nn.parallel.DistributedDataParallel(llama()))
    finally:
        torch.distributed.destroy_process_group()


def test_fully_shard(model: Any, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(Exception, match="(?i)managed|gemini"):
            fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()


# ---- wrapping --------------------------------------------------------------------------------------------------------


def test_wrapping_twice(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="managed already"):
        gemini.GeminiDDP(model)
    with pytest.raises(ValueError, match="another GeminiDDP model"):
        gemini.GeminiDDP(model.model.layers[1])  # a part
    parent = nn.Sequential(nn.Linear(4, 4), model)
    with pytest.raises(ValueError, match="managed already"):
        gemini.GeminiDDP(parent)
    outside = llama()
    outside.lm_head = model.lm_head  # a param of another model
    with pytest.raises(ValueError, match=r"lm_head\.weight.*another GeminiDDP model"):
        gemini.GeminiDDP(outside, make_config(llama(), "ram", tmp_path))
    assert type(outside) is LlamaForCausalLM and outside.model.norm.weight.dtype is torch.float32


def test_the_class_makes_ordinary_models(model: Any, tmp_path: Path) -> None:
    assert isinstance(model, gemini.GeminiDDP) and isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    made = type(model)(model.config)
    assert type(made) is LlamaForCausalLM and not is_managed(made)
    model.save_pretrained(tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert type(loaded) is LlamaForCausalLM
    assert same_bits(loaded.get_parameter(Q).detach().bfloat16(), model.full_param(Q))
    assert type(made)(model.config).num_parameters() == model.num_parameters()


# ---- dtype and device ------------------------------------------------------------------------------------------------


def test_casting_and_moving(model: Any) -> None:
    for change in (
        lambda: model.half(), lambda: model.float(), lambda: model.double(), lambda: model.to(torch.float32),
        lambda: model.to(dtype=torch.float16), lambda: model.to("meta"), lambda: model.to_empty(device="meta"),
        lambda: model._apply(lambda t: t.double()),
    ):  # fmt: skip
        with pytest.raises(gemini.GeminiError, match="precision"):
            change()
    with pytest.raises((gemini.GeminiError, AssertionError, RuntimeError), match="(?i)managed|cuda|nvidia"):
        model.cuda()
    assert model.to("cpu") is model and model.cpu() is model and model.to(model.device) is model
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32  # nothing was cast on the way


@pytest.mark.parametrize("place", [0, 1])
def test_swapping_a_param_that_no_optimizer_has(place: int, tmp_path: Path) -> None:
    model = wrap(nn.Linear(8, 8), "ram", tmp_path)
    before = model.full_param("weight")
    params = [model.weight]
    params.insert(place, nn.Parameter(torch.ones(8)))
    with pytest.raises(gemini.ParamAccessError, match="swap_tensors of a managed param"):
        torch.utils.swap_tensors(*params)
    assert same_bits(model.full_param("weight"), before) and bool((params[place] == 1).all())


def test_casting_a_part(model: Any) -> None:
    for change in (lambda: model.model.half(), lambda: model.lm_head.to(torch.float32), lambda: model.model.double()):
        with pytest.raises(gemini.GeminiError, match="(?i)managed|gathered"):
            change()
    assert model.get_parameter(Q).dtype is torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_sharing_memory(model: Any) -> None:
    with pytest.raises(gemini.GeminiError):
        model.share_memory()


# ---- optimizers and gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stock", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_stock_optimizers(model: Any, stock: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="HybridAdam"):
        optimizer = stock(model.parameters(), lr=0.1)
        on_batch(model, 5).backward()
        optimizer.step()


def test_torchs_clipping(model: Any) -> None:
    on_batch(model, 5).backward()
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(gemini.GeminiError, match=r"model\.clip_grad_norm_"):
            clip(model.parameters(), 1.0)
        with pytest.raises(gemini.GeminiError, match=r"model\.clip_grad_norm_"):
            clip(list(model.parameters())[-1], 1.0)
        with pytest.raises(gemini.GeminiError, match=r"model\.clip_grad_norm_"):
            clip([p for p in model.parameters() if p.requires_grad], 1.0, foreach=False)


def test_grad_scaler(model: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = optimizer_of(model.get_parameter(Q))
    assert optimizer is not None
    scaler.scale(on_batch(model, 5)).backward()
    with pytest.raises(gemini.GeminiError, match=r"gemini\.GradScaler"):
        scaler.step(optimizer)
    with pytest.raises((gemini.GeminiError, RuntimeError, AssertionError)):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)


def test_double_backward(model: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="create_graph"):
        on_batch(model, 5).backward(create_graph=True)
    model.zero_grad()


def test_autograd_grad_of_managed_params(model: Any) -> None:
    """They would never reach the chunks: refused with the way to get them."""
    with pytest.raises(gemini.GeminiError, match="(?i)grad"):
        torch.autograd.grad(on_batch(model, 5), list(model.parameters()))


def test_assigning_a_gradient(model: Any) -> None:
    p = model.get_parameter(Q)
    with pytest.raises(gemini.GeminiError, match="(?i)grad"):
        p.grad = torch.ones_like(p)
        adam(model).step()


# ---- params ----------------------------------------------------------------------------------------------------------


def test_writes_at_rest_with_autograd_on(model: Any) -> None:
    """torch refuses them too, for a leaf; what gives a param other memory is refused in any case."""
    p, ones = model.get_parameter(Q), torch.ones(32, 32, dtype=torch.bfloat16)
    before = model.full_param(Q, torch.float32)

    def set_item() -> None:
        p[0, 0] = 1.0

    def in_place() -> None:
        nonlocal p
        p += 1

    for write in (
        set_item, in_place, lambda: p.mul_(2), lambda: torch.add(p, 1, out=p), lambda: torch.relu_(p),
        lambda: p.index_fill_(0, torch.tensor([0]), 0), lambda: torch._foreach_mul_([p], 2.0),
        lambda: p.lerp_(ones, 0.5), lambda: p.copy_(ones), lambda: p.log1p_(),
    ):  # fmt: skip
        with pytest.raises(gemini.ParamAccessError, match=r"q_proj\.weight' while autograd is on.*gathered"):
            write()
    for change in (
        lambda: setattr(p, "data", ones), lambda: p.resize_(0), lambda: p.t_(), lambda: p.data.set_(ones),
        lambda: p.share_memory_(), lambda: p.data.squeeze_(0).unsqueeze_(0),
    ):  # fmt: skip
        with torch.no_grad(), pytest.raises(gemini.ParamAccessError, match=r"q_proj\.weight"):
            change()
    assert same_bits(model.full_param(Q, torch.float32), before)


def test_copy_under_no_grad_writes_the_master(model: Any) -> None:
    """How ``load_state_dict`` writes: all bits of the value."""
    p, before = model.get_parameter(Q), model.full_param(Q, torch.float32)
    value = torch.randn(32, 32)
    with torch.no_grad():
        p.copy_(value)
        assert same_bits(model.full_param(Q, torch.float32), value)
        p.copy_(before)
    assert same_bits(model.full_param(Q, torch.float32), before)


def test_views_and_differentiable_uses_at_rest(model: Any) -> None:
    p = model.get_parameter(Q)
    for view in (lambda: nn.Parameter(p), lambda: nn.Parameter(p[0]), lambda: torch.from_dlpack(p.view(-1))):
        with torch.no_grad(), pytest.raises(gemini.ParamAccessError, match=r"full_param|gathered"):
            view()
    with torch.no_grad():
        unseen = torch.tensor(p)  # torch shows this read to nobody: the weights, or NaN, never garbage
        assert same_bits(unseen, model.full_param(Q)) or unseen.isnan().all()


def test_a_loss_that_reads_weights_itself(model: Any) -> None:
    """Outside of forward, with gradients on: as in torch, wherever the weights are."""
    plain = llama().to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    name = "model.embed_tokens.weight"
    for use in (
        lambda w: w.float().square().sum(), lambda w: (w * 2).sum(), lambda w: w.t()[:, :3].float().norm(),
        lambda w: torch.stack([w, w]).float().std(), lambda w: nn.functional.linear(noise(3, 32), w).sum(),
    ):  # fmt: skip
        ours, theirs = use(model.get_parameter(name)), use(plain.get_parameter(name))
        assert same_bits(ours.detach(), theirs.detach())
        ours.backward()
        theirs.backward()
        assert same_bits(model.full_grad(name), plain.get_parameter(name).grad)
        model.zero_grad()
        plain.zero_grad()


def test_resizing_embeddings(model: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="before GeminiDDP"):
        model.resize_token_embeddings(128)


def test_state_dict_variants(model: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="keep_vars"):
        model.state_dict(keep_vars=True)
    with pytest.raises(gemini.GeminiError, match="assign"):
        model.load_state_dict(llama().state_dict(), assign=True)
    before, last = snapshot(model), list(model.state_dict())[-1]
    for hollow in (lambda v: v.to("meta"), lambda v: v.to_sparse(), lambda v: None):
        state = {name: value + 1 for name, value in model.state_dict().items()}
        with pytest.raises(TypeError, match=rf"{re.escape(repr(last))}.* is (not a dense tensor|a NoneType)"):
            model.load_state_dict({**state, last: hollow(state[last])})
    assert_same_snapshot(before, snapshot(model))


# ---- models that cannot be managed -----------------------------------------------------------------------------------


def test_params_that_cannot_be_managed(tmp_path: Path) -> None:
    def with_param(param: torch.Tensor) -> nn.Module:
        model = nn.Linear(4, 4)
        model.extra = nn.Parameter(param, requires_grad=False)
        return model

    for wrong, match in (
        (with_param(torch.zeros(3, dtype=torch.int64)), "extra.*int64"),
        (with_param(torch.zeros(3, dtype=torch.complex64)), "extra.*complex64"),
        (with_param(torch.zeros(3, 3).to_sparse()), "extra.*sparse"),
        (with_param(torch.zeros(3, device="meta")), "extra.*meta"),
        (nn.Linear(4, 4, device="meta"), "meta"),
    ):
        kept = dict(wrong.named_parameters())
        values = {name: param.clone() for name, param in kept.items()}
        with pytest.raises(REFUSED, match=match):
            gemini.GeminiDDP(wrong, make_config(nn.Linear(4, 4), "ram", tmp_path))
        for name, param in wrong.named_parameters():  # untouched
            assert param is kept[name] and param.dtype is values[name].dtype and type(param) is nn.Parameter
            assert param.is_meta or param.is_sparse or torch.equal(param, values[name])


def test_sparse_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(gemini.GeminiError, match="sparse=False"):
        model = gemini.GeminiDDP(model, make_config(model, "ram", tmp_path))
        model(torch.tensor([1, 2])).float().sum().backward()


def test_batch_outside_the_model_is_served_after_all_that(model: Any) -> None:
    with torch.no_grad():
        assert model(**batch(9)).logits.isfinite().all()


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
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(
        precision="fp32", memory=memory, placement=gemini.StaticPlacement(weights_on_nvme=1), max_chunk=64
    )
    model = gemini.GeminiDDP(nn.Sequential(Differentiates(), nn.Linear(8, 8)), config)
    with pytest.raises(gemini.ParamAccessError, match=r"'0\.weight'.* called torch\.func inside of its forward"):
        (model[0] if part else model)(torch.ones(2, 8))
    model[1](torch.ones(2, 8)).sum().backward()
    world_of(model).check()
