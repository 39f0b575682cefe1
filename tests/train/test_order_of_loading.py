"""The states of a model and of its optimizer are loaded in any order, and in parts: the run goes on with the same bits.

In bf16 the lower half of a master comes with the optimizer's state, and belongs to one moment's weights: it completes
those and no others.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as of_torch
from torch.utils import _pytree as pytree

import gemini
from gemini import kernels
from gemini.planning import rules as spec_rules
from tests.train import test_adopt as adopted
from tests.train.helpers import adam, assert_same_snapshot, llama, same_bits, snapshot, train, wrap
from tests.world import world_of

Q = "model.layers.0.self_attn.q_proj.weight"
Loads = Callable[[Any, Any, dict[str, Any], dict[str, Any]], None]


def in_parts(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    names = list(weights)
    model.load_state_dict({name: weights[name] for name in names[::2]}, strict=False)
    optimizer.load_state_dict(states)
    model.load_state_dict({name: weights[name] for name in names[1::2]}, strict=False)


def by_modules(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    optimizer.load_state_dict(states)
    for name, module in model.named_children():
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        module.load_state_dict(own)


def gathered(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    optimizer.load_state_dict(states)
    for name, param in model.named_parameters():
        with torch.no_grad(), model.gathered([param], write=True):
            param.copy_(weights[name])


def other_weights_between(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    optimizer.load_state_dict(states)
    model.load_state_dict({name: value + 1 for name, value in weights.items()})
    model.load_state_dict(weights)


def twice(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)


def optimizer_first(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)


def model_first(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)


def as_torch_does(model: Any, optimizer: Any, weights: dict[str, Any], states: dict[str, Any]) -> None:
    names = [name for name, _ in model.named_parameters()]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in states["param_groups"]]
    named = {"state": {names[i]: state for i, state in states["state"].items()}, "param_groups": groups}
    of_torch.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=named)


# More of them are habits of drawn programs: test_programs.py.
ORDERS: dict[str, Loads] = {
    f.__name__: f for f in (
        optimizer_first, as_torch_does, in_parts, by_modules, gathered, other_weights_between, twice, model_first,
    )
}  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_gives_the_same_bits(order: str, precision: str, where: str, tmp_path: Path) -> None:
    first = wrap(llama(), where, tmp_path, precision=precision)
    optimizer = adam(first)
    train(first, optimizer, range(2))
    weights, states = first.state_dict(), optimizer.state_dict()
    second = wrap(llama(), where, tmp_path, precision=precision)
    train(second, others := adam(second, lr=0.1), range(3, 4))
    ORDERS[order](second, others, weights, states)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(second, others, range(2, 5)) == train(first, optimizer, range(2, 5))
    assert_same_snapshot(snapshot(first), snapshot(second))


@pytest.mark.parametrize("form", ["compact", "adopted"])
@pytest.mark.parametrize("order", ["optimizer_first", "in_parts", "model_first"])
def test_compact_states_and_adopted_optimizers_too(
    form: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)

    def made() -> tuple[Any, Any]:
        if form == "adopted":
            rule = gemini.optim.adopt(torch.optim.NAdam)
            model = gemini.GeminiDDP(adopted.make_model(), adopted.config_for(rule, tmp_path, "bf16"))
            return model, rule.make(model.parameters(), lr=1e-2)
        config = gemini.GeminiConfig(precision="bf16", device="cpu", states="compact")
        model = gemini.GeminiDDP(adopted.make_model(), config)
        return model, adam(model)

    (first, optimizer), (second, others) = made(), made()
    adopted.train(first, optimizer, range(2), None)
    weights, states = first.state_dict(), optimizer.state_dict()
    adopted.train(second, others, range(3, 4), None)
    ORDERS[order](second, others, weights, states)
    for name, _ in first.named_parameters():
        assert same_bits(first.full_param(name, torch.float32), second.full_param(name, torch.float32)), name


def test_flattened_files_of_torch_distributed_checkpoint_into_a_new_run(tmp_path: Path) -> None:
    """The way of torch's own guide: the states of an optimizer without steps say what is to be loaded."""
    options = of_torch.StateDictOptions(flatten_optimizer_state_dict=True)

    def states_of(model: Any, optimizer: Any) -> dict[str, Any]:
        return dict(
            zip(("model", "optimizer"), of_torch.get_state_dict(model, optimizer, options=options), strict=True)
        )

    first = wrap(llama(), "ram", tmp_path)
    train(first, optimizer := adam(first), range(2))
    dcp.save(states_of(first, optimizer), checkpoint_id=tmp_path / "files", no_dist=True)
    second = wrap(llama(), "disk", tmp_path)
    others = adam(second)
    assert not others.state and not others.state_dict()["state"]
    dcp.load(states := states_of(second, others), checkpoint_id=tmp_path / "files", no_dist=True)
    of_torch.set_state_dict(
        second, others, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=options
    )
    assert_same_snapshot(snapshot(first), snapshot(second))
    assert train(second, others, [2]) == train(first, optimizer, [2])


def test_files_of_a_gemini_that_did_not_save_which_weights_a_residual_is_of(tmp_path: Path) -> None:
    """Those that are there: the model's state comes first then."""

    def states_of(model: Any, optimizer: Any) -> dict[str, Any]:
        weights, states = of_torch.get_state_dict(model, optimizer)
        for state in states["state"].values():
            del state["residual_of"]
        return {"model": weights, "optimizer": states}

    first = wrap(llama(), "ram", tmp_path)
    train(first, optimizer := adam(first), range(2))
    dcp.save(states_of(first, optimizer), checkpoint_id=tmp_path / "files", no_dist=True)
    second = wrap(llama(), "disk", tmp_path)
    train(second, others := adam(second), [5])
    dcp.load(states := states_of(second, others), checkpoint_id=tmp_path / "files", no_dist=True)
    of_torch.set_model_state_dict(second, states["model"])
    of_torch.set_optimizer_state_dict(second, others, states["optimizer"])
    assert_same_snapshot(snapshot(first), snapshot(second))
    assert train(second, others, [2]) == train(first, optimizer, [2])


def test_a_residual_completes_no_other_weights(where: str, tmp_path: Path) -> None:
    """Not those that are there, nor those that are written, whether they are in bf16 or exact."""
    first = wrap(llama(), where, tmp_path)
    train(first, optimizer := adam(first), range(2))
    weights, states = first.state_dict(), optimizer.state_dict()
    second = wrap(llama(), where, tmp_path)
    train(second, others := adam(second), [5])
    before = second.full_param(Q, torch.float32)
    others.load_state_dict(states)
    assert same_bits(second.full_param(Q, torch.float32), before)
    changed = weights[Q].clone()
    changed.view(-1)[3] += 1
    for value in (changed, before, torch.randn(changed.shape)):
        with torch.no_grad():
            second.get_parameter(Q).copy_(value)
        assert same_bits(second.full_param(Q, torch.float32), value.float())
    master = first.full_param(Q, torch.float32)
    with torch.no_grad():
        second.get_parameter(Q).copy_(weights[Q].float())  # without lower bits: those weights again
    assert same_bits(second.full_param(Q, torch.float32), master)
    exact = (master.view(torch.int32) ^ 1).view(torch.float32)  # the same weights in bf16, and not the same master
    assert same_bits(exact.bfloat16(), master.bfloat16())
    with torch.no_grad():
        second.get_parameter(Q).copy_(exact)
    assert same_bits(second.full_param(Q, torch.float32), exact)


def test_after_an_update_a_loaded_residual_is_gone(where: str, tmp_path: Path) -> None:
    first = wrap(llama(), where, tmp_path)
    train(first, optimizer := adam(first), range(2))
    weights, states = first.state_dict(), optimizer.state_dict()
    optimizer.load_state_dict(states)
    train(first, optimizer, [2])
    first.load_state_dict(weights)
    assert same_bits(first.full_param(Q, torch.float32), weights[Q].float())
    assert all(handle.waiting is None for handle in world_of(first).handles)


def test_a_checkpoint_ends_the_waiting(tmp_path: Path) -> None:
    first = wrap(llama(), "ram", tmp_path)
    train(first, optimizer := adam(first), range(2))
    weights, states = first.state_dict(), optimizer.state_dict()
    train(first, optimizer, [2])
    gemini.save_checkpoint(tmp_path / "c", first, optimizer)
    optimizer.load_state_dict(states)
    gemini.load_checkpoint(tmp_path / "c", first, optimizer)
    first.load_state_dict(weights)
    assert same_bits(first.full_param(Q, torch.float32), weights[Q].float())


def test_states_of_other_weights_are_told(tmp_path: Path) -> None:
    first = wrap(llama(), "ram", tmp_path)
    train(first, optimizer := adam(first), range(2))
    second = wrap(llama(), "ram", tmp_path)
    (others := adam(second)).load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="saved with other weights than 'model.embed_tokens.weight' and"):
        train(second, others, [2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        train(second, others, [3])


def test_plain_params_say_it_too(tmp_path: Path) -> None:
    """Trained without a GeminiDDP, and loaded into one in the order of torch's own function."""
    plain = llama().bfloat16()
    optimizer = gemini.HybridAdam(plain.parameters(), lr=1e-2)
    train(plain, optimizer, range(2), clip=None)
    model = wrap(llama(), "ram", tmp_path)
    optimizer_first(model, adam(model), plain.state_dict(), optimizer.state_dict())
    for name, param in plain.named_parameters():
        master = torch.empty(param.numel())
        kernels.join_master(param.detach().view(-1), optimizer.state[param]["residual"].view(-1), master)
        assert same_bits(model.full_param(name, torch.float32).view(-1), master), name


def plain_run(precision: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16).to(precision)
    return model, gemini.HybridAdam(model.parameters(), lr=1e-2)


def plain_step(model: Any, optimizer: Any, seed: int) -> None:
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(model.weight.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def copies(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
def test_a_loaded_master_of_other_weights_changes_no_plain_param(precision: torch.dtype) -> None:
    """The weights that it is of never come, as with ``strict=False`` and other names: its own master stays."""
    model, optimizer = plain_run(precision)
    plain_step(model, optimizer, 0)
    _, states = copies(model, optimizer)
    plain_step(model, optimizer, 1)
    other, others = plain_run(precision)
    for seed in (0, 1):
        plain_step(other, others, seed)
    optimizer.load_state_dict(states)
    rest = {"residual", "residual_of", "master"}
    own = copies(other, others)[1]["state"]
    states["state"] = {
        number: {**state, **{name: own[number][name] for name in rest & state.keys()}}
        for number, state in states["state"].items()
    }
    others.load_state_dict(states)  # with the masters that fit
    with pytest.warns(UserWarning, match="saved with other weights than a plain param of shape"):
        plain_step(model, optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_step(other, others, 2)
    assert_same_values(copies(model, optimizer), copies(other, others))


def test_what_was_written_to_plain_fp16_weights_is_their_master() -> None:
    model, optimizer = plain_run(torch.float16)
    plain_step(model, optimizer, 0)
    with torch.no_grad():
        model.weight[3].mul_(0.5)
    before, master = model.weight.detach().clone(), optimizer.state[model.weight]["master"].clone()
    optimizer.param_groups[0]["lr"] = 0.0
    plain_step(model, optimizer, 1)
    assert same_bits(model.weight.detach(), before)
    after = optimizer.state[model.weight]["master"]
    assert same_bits(after[3], before[3].float()) and same_bits(after[:3], master[:3])


def test_it_is_when_the_model_is_wrapped_then_as_well(tmp_path: Path) -> None:
    model, optimizer = plain_run(torch.float16)
    plain_step(model, optimizer, 0)
    with torch.no_grad():
        model.weight[3].mul_(0.5)
    wanted = optimizer.state[model.weight]["master"].clone()
    wanted[3] = model.weight.detach()[3].float()
    managed = wrap(model, "ram", tmp_path, precision="fp16")
    assert same_bits(managed.full_param("weight", torch.float32), wanted)


def assert_same_values(ours: Any, theirs: Any) -> None:
    ours, theirs = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b
