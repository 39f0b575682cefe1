"""What ``HybridAdam`` refuses by name, with nothing changed: groups and states that it would else accept and ignore.

Every case is tried on managed and on plain models, whose weights, states, step counts and groups are compared before
and after. And the other side: labels, implementation options and states of torch's AdamW that must go on to work.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.train.helpers import Blocks, assert_same_snapshot, noise, same_bits, snapshot, squares, wrap

NAN, INF = float("nan"), float("inf")
NAME = "layers.1.weight"


class World:
    """A trained model and its optimizer, managed or not, and everything that a refusal must leave alone."""

    def __init__(self, kind: str, path: Path, **how: Any):
        self.managed = kind != "plain"
        model: nn.Module = Blocks() if self.managed else Blocks().bfloat16()
        self.model = wrap(model, kind, path) if self.managed else model
        self.optimizer = gemini.HybridAdam(self.model.parameters(), lr=1e-2, weight_decay=0.1, **how)
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        squares(self.model, 0).backward()

    def look(self) -> Any:
        groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if self.managed:
            return groups, sizes, snapshot(self.model)
        states = {
            name: {"weights": param.detach().clone(), **{k: v.clone() for k, v in self.optimizer.state[param].items()}}
            for name, param in self.model.named_parameters()
        }
        return groups, sizes, states

    def unchanged(self, before: Any) -> None:
        after = self.look()
        assert repr(before[:2]) == repr(after[:2])  # NaN is not equal to itself
        assert_same_snapshot(before[2], after[2])


@pytest.fixture(params=["ram", "disk", "plain"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(str(request.param), tmp_path)


GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "maximize": ({"maximize": True}, "maximize=True"),
    "amsgrad": ({"amsgrad": True}, "amsgrad=True"),
    "differentiable": ({"differentiable": True}, "differentiable=True"),
    "lr nan": ({"lr": NAN}, "lr of .* finite"),
    "lr inf": ({"lr": INF}, "lr of .* finite"),
    "lr beyond fp32": ({"lr": 1e39}, "lr of .* finite"),
    "lr negative": ({"lr": -1e-3}, "lr of .* not negative"),
    "lr tensor nan": ({"lr": torch.tensor(NAN)}, "lr of .* finite"),
    "eps inf": ({"eps": INF}, "eps of .* finite"),
    "weight decay nan": ({"weight_decay": NAN}, "weight_decay of .* finite"),
    "weight decay negative": ({"weight_decay": -0.1}, "weight_decay of .* not negative"),
    "beta of 1": ({"betas": (0.9, 1.0)}, "betas of .* two numbers"),
    "beta nan": ({"betas": (NAN, 0.9)}, "betas of .* two numbers"),
    "one beta": ({"betas": (0.9,)}, "betas of .* two numbers"),
}
TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "lr string": ({"lr": "1e-3"}, "lr of .* must be a number"),
    "lr tensor of two": ({"lr": torch.ones(2)}, "lr of .* must be a number"),
    "eps none": ({"eps": None}, "eps of .* must be a number"),
    "decoupled string": ({"decoupled": "no"}, "decoupled of .* must be True"),
}
WRONG_GROUPS = [pytest.param(*case, ValueError, id=name) for name, case in GROUPS.items()]
WRONG_GROUPS += [pytest.param(*case, TypeError, id=name) for name, case in TYPES.items()]


@pytest.mark.parametrize(("keys", "message", "kind"), WRONG_GROUPS)
def test_a_wrong_group_is_refused_wherever_it_comes_from(
    keys: dict[str, Any], message: str, kind: type[Exception], world: World
) -> None:
    """At construction, in ``add_param_group``, in a loaded state, and by hand before a step."""
    optimizer, params = world.optimizer, list(world.model.parameters())
    before, good = world.look(), optimizer.state_dict()
    groups = [{"params": params[:2]}, {"params": params[2:], **keys}]
    with pytest.raises(kind, match=message):
        gemini.HybridAdam(groups)
    with pytest.raises(kind, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **keys})
    with pytest.raises(kind, match=message):
        optimizer.load_state_dict({"state": good["state"], "param_groups": [{**good["param_groups"][0], **keys}]})
    world.unchanged(before)
    world.backward()
    optimizer.param_groups[0].update(keys)
    with pytest.raises(kind, match=message):
        optimizer.step()
    for key, value in good["param_groups"][0].items():
        optimizer.param_groups[0][key] = params if key == "params" else value
    for key in keys.keys() - good["param_groups"][0].keys():
        del optimizer.param_groups[0][key]
    world.unchanged(before)
    optimizer.step()  # the gradients are still there, and the optimizer is still theirs
    assert all(float(state["step"]) == 2 for state in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_a_wrong_lr_is_refused_before_an_update_inside_backward(gradients: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path, gradients=gradients)
    params = list(model.parameters())
    optimizer = gemini.HybridAdam([{"params": params[3:]}, {"params": params[:3]}], step_in_backward=True)
    before = snapshot(model)
    optimizer.param_groups[1]["lr"] = NAN
    with pytest.raises(ValueError, match="lr of param group 1 .* finite"):
        squares(model, 0).backward()
    model.zero_grad()
    assert_same_snapshot(before, snapshot(model))
    optimizer.param_groups[1]["lr"] = 1e-3
    squares(model, 0).backward()
    optimizer.step()


def test_labels_and_implementations_of_torch_pass(world: World, tmp_path: Path) -> None:
    labels = {
        "initial_lr": 0.1, "max_lr": 0.1, "min_lr": 0.0, "base_momentum": 0.85, "max_momentum": 0.95, "swa_lr": 0.1,
        "name": "all", "group_name": "decay", "param_names": ["a"], "lr_mult": 2.0, "init_weight_decay": 0.1,
        "step_on_batch": True, "foreach": True, "fused": None, "capturable": True, "maximize": False, "amsgrad": False,
        "differentiable": False, "momentum": 0, "decoupled_weight_decay": True, 7: "seven",
    }  # fmt: skip
    group = world.optimizer.param_groups[0]
    group.update(labels)
    gemini.HybridAdam([{"params": [nn.Parameter(torch.ones(3))], **labels}])
    world.backward()
    world.optimizer.step()
    world.optimizer.zero_grad()
    state = world.optimizer.state_dict()
    world.optimizer.load_state_dict(state)
    assert labels.items() <= group.items()


def test_a_tensor_lr_and_names_of_torch_pass(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    optimizer = gemini.HybridAdam(model.named_parameters(), lr=torch.tensor(1e-3))
    squares(model, 0).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(2e-3)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    squares(model, 0).backward()
    with pytest.raises(ValueError, match="not negative"):
        optimizer.step()


def changed(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def do(states: dict[str, Any]) -> None:
        states[2][key] = change(states[2].get(key))

    return do


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def do(states: dict[str, Any]) -> None:
        del states[2][key]

    return do


STATES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "negative step": (changed("step", lambda _: torch.tensor(-1.0)), "'step'.*-1"),
    "half a step": (changed("step", lambda _: 1.5), "'step'.*1.5"),
    "step nan": (changed("step", lambda _: NAN), "'step'.*nan"),
    "step inf": (changed("step", lambda _: torch.tensor(INF)), "'step'.*inf"),
    "no step": (without("step"), "no 'step'"),
    "no exp_avg": (without("exp_avg"), "no 'exp_avg'"),
    "no exp_avg_sq": (without("exp_avg_sq"), "no 'exp_avg_sq'"),
    "step beyond counting": (changed("step", lambda _: 1e30), "'step'.*whole number"),
    "integer moment": (changed("exp_avg", lambda v: v.int()), "'exp_avg'.*int32"),
    "complex moment": (changed("exp_avg_sq", lambda v: v.to(torch.complex64)), "'exp_avg_sq'.*complex64"),
    "list": (changed("exp_avg", lambda v: v.tolist()), "'exp_avg'.*not a dense tensor"),
    "meta": (changed("exp_avg", lambda v: v.to("meta")), "'exp_avg'.*not a dense tensor"),
    "sparse": (changed("exp_avg", lambda v: v.to_sparse()), "'exp_avg'.*not a dense tensor"),
    "transposed": (changed("exp_avg", lambda v: v[:, :16].t()), "'exp_avg'.*shape"),
    "flat": (changed("exp_avg_sq", lambda v: v.reshape(-1)), "'exp_avg_sq'.*shape"),
    "residual of floats": (changed("residual", lambda v: v.float()), "'residual'.*float32"),
    "of sgd": (changed("momentum_buffer", lambda _: torch.zeros(32, 32)), "has 'momentum_buffer'"),
    "of nadam": (changed("mu_product", lambda _: torch.tensor(0.9)), "has 'mu_product'"),
    "of adagrad": (changed("sum", lambda _: torch.zeros(32, 32)), "has 'sum'"),
    "of amsgrad": (changed("max_exp_avg_sq", lambda _: torch.zeros(32, 32)), "has 'max_exp_avg_sq'"),
}


@pytest.mark.parametrize(("change", "message"), [pytest.param(*case, id=name) for name, case in STATES.items()])
def test_a_wrong_state_is_refused(change: Callable[[dict[str, Any]], None], message: str, world: World) -> None:
    before, state = world.look(), world.optimizer.state_dict()
    states = {key: dict(own) for key, own in state["state"].items()}
    change(states)
    with pytest.raises(ValueError, match=message) as refusal:
        world.optimizer.load_state_dict({"state": states, "param_groups": state["param_groups"]})
    assert (repr(NAME) if world.managed else "'param 2'") in str(refusal.value)
    world.unchanged(before)
    world.optimizer.load_state_dict(state)
    world.unchanged(before)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("where", ["ram", "plain"])
def test_adam_and_adamw_are_told_apart(decoupled: bool, weight_decay: float, where: str, tmp_path: Path) -> None:
    """Each loads its own; the other's only where there is no decay, and it stays what it was made as."""
    world = World(where, tmp_path, decoupled=decoupled)
    params = [
        nn.Parameter(noise(*p.shape, seed=i, dtype=torch.float32)) for i, p in enumerate(world.model.parameters())
    ]
    for kind in (torch.optim.AdamW, torch.optim.Adam, gemini.HybridAdam):
        how = {"decoupled": not decoupled} if kind is gemini.HybridAdam else {}
        stock: Any = kind(params, lr=0.1, weight_decay=weight_decay, **how)
        for param in params:
            param.grad = torch.ones_like(param)
        stock.step()
        before, state = world.look(), stock.state_dict()
        is_same = kind is (torch.optim.AdamW if decoupled else torch.optim.Adam)
        if weight_decay and not is_same:
            with pytest.raises(ValueError, match=f"decoupled={not decoupled}"):
                world.optimizer.load_state_dict(state)
            world.unchanged(before)
            continue
        world.optimizer.load_state_dict(state)
        loaded, group = world.optimizer.state_dict(), world.optimizer.param_groups[0]
        assert group["lr"] == 0.1 and group["decoupled"] is decoupled
        for index, own in state["state"].items():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert same_bits(loaded["state"][index][key], own[key].contiguous()), (index, key)


def test_a_state_of_torch_before_it_named_the_decay_loads(tmp_path: Path) -> None:
    world = World("ram", tmp_path)
    state = world.optimizer.state_dict()
    old = {k: v for k, v in state["param_groups"][0].items() if k != "decoupled"}
    world.optimizer.load_state_dict({**state, "param_groups": [{**old, "amsgrad": False, "foreach": None}]})


def test_moments_of_a_frozen_param_are_refused(tmp_path: Path) -> None:
    raw = Blocks()
    raw.layers[0].requires_grad_(False)
    model = wrap(raw, "ram", tmp_path)
    optimizer = gemini.HybridAdam(model.parameters())
    other = World("ram", tmp_path)
    state, before = other.optimizer.state_dict(), snapshot(model)
    with pytest.raises(ValueError, match="'layers.0.weight', which is frozen"):
        optimizer.load_state_dict(state)
    assert_same_snapshot(before, snapshot(model))


def test_a_hyperparameter_that_is_gone_is_named(world: World) -> None:
    before = world.look()
    world.backward()
    group = world.optimizer.param_groups[0]
    for key in ("lr", "betas", "eps", "weight_decay"):
        world.optimizer.param_groups[0] = {k: v for k, v in group.items() if k != key}
        with pytest.raises(ValueError, match=f"param group 0 has no '{key}'"):
            world.optimizer.step()
    world.optimizer.param_groups[0] = group
    world.optimizer.zero_grad()
    world.unchanged(before)


def test_hooks_of_loading_are_called(world: World) -> None:
    seen: list[str] = []
    world.optimizer.register_load_state_dict_pre_hook(lambda o, s: {**s, "state": {}})
    world.optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    world.optimizer.load_state_dict(world.optimizer.state_dict())
    assert seen == ["after"] and world.optimizer.state_dict()["state"] == {}


def test_hooks_of_a_state_see_all_of_it_and_a_loaded_one_stays_the_caller_s(world: World) -> None:
    seen: list[int] = []
    world.optimizer.register_state_dict_post_hook(lambda o, s: seen.append(len(s["state"])))
    other = world.optimizer.register_state_dict_post_hook(lambda o, s: {"optimizer": s})
    state = world.optimizer.state_dict()["optimizer"]
    other.remove()
    assert seen == [len(state["state"])] and seen[0] > 0
    world.optimizer.register_load_state_dict_pre_hook(lambda o, s: s.update(note=1))
    world.optimizer.load_state_dict(state)
    assert state.keys() == {"state", "param_groups"}


def test_what_is_no_state_of_an_optimizer_is_refused(world: World) -> None:
    before, state = world.look(), world.optimizer.state_dict()
    for wrong in ({}, {"model": {}, "optimizer": state}):
        with pytest.raises(ValueError, match="give what optimizer.state_dict\\(\\) returned"):
            world.optimizer.load_state_dict(wrong)
    world.unchanged(before)
