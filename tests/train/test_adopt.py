"""``gemini.optim.adopt``: stock optimizers, offloaded, leave the bits of their own run over fp32 masters.

The plain loop here keeps a master of each param in its own shape, and gives torch's optimizer all of them at once:
nothing of Gemini is in it but the rounding of weights and the norm.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.torch_files import promised_optimizer_state, write_torch_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gemini
from gemini import optim
from gemini.kernels import reference
from gemini.optim import adopted
from tests import models
from tests.train import helpers
from tests.train.test_update_rules import bits, config_for, loss_of, make_model, settings_of
from tests.world import world_of


class _Of(Optimizer):
    """Something like SGD; what it does otherwise is in ``update``."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "weight": 1.0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, param.grad)

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        raise NotImplementedError


class Normed(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        param.sub_(grad / grad.norm() * group["lr"])


class Counting(_Of):
    """Counts in its group and, as an int, in its states; keeps something that is None."""

    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        group["step"] = group.get("step", 0) + (param is group["params"][0])
        state = self.state[param]
        state["seen"], state["nothing"] = state.get("seen", 0) + 1, None
        average = state.setdefault("average", torch.zeros_like(param)).mul_(0.9).add_(grad, alpha=0.1)
        param.sub_(average / (1 - 0.9 ** state["seen"]) * (group["lr"] / group["step"]))


class Shaped(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
        momentum.mul_(0.9).add_(grad / grad.norm(dim=-1, keepdim=True).add(1e-6))
        param.sub_(momentum * group["lr"])


NUM_STEPS = 7  # RAdam computes otherwise from the sixth on
STOCK: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    # what belongs to the rule, and what to the optimizer
    "nadam": (torch.optim.NAdam, {}, {"lr": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"decoupled_weight_decay": True}, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {}, {"lr": 1e-3, "weight_decay": 0.1}),
    "rmsprop, all": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, {"lr": 1e-2, "lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}, {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {}, {"lr": 1e-2, "lambd": 1e-2, "t0": 2.0}),
    "rprop": (torch.optim.Rprop, {}, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"lr": 1e-2}),
    "plain sgd": (torch.optim.SGD, {}, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, {"lr": 1e-2}),
    "adafactor, whole": (torch.optim.Adafactor, {}, {"lr": 1e-2, "weight_decay": 0.1}),
    "counting": (Counting, {}, {"lr": 1e-2}),
    "normed, whole": (Normed, {}, {"lr": 1e-2}),
    "shaped, whole": (Shaped, {}, {"lr": 1e-3}),
    "maximize": (torch.optim.Adam, {"maximize": True}, {"lr": 1e-3, "weight_decay": 0.1}),
}


def rule_of(which: str) -> optim.AdoptedRule:
    kind, of_rule, _ = STOCK[which]
    return optim.adopt(kind, **of_rule)


def decayed(params: Any, which: str) -> list[dict[str, Any]]:
    """Two groups, as programs make them."""
    params = list(params)
    return [{"params": params[::2]}, {"params": params[1::2], "lr": STOCK[which][2]["lr"] / 2}]


def schedule(optimizer: Optimizer, step: int) -> None:
    """What changes from step to step: NAdam's product of momenta depends on all of it."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
        if "betas" in group:
            group["betas"] = (0.9 - 0.05 * (step % 3), group["betas"][1])


class Plain:
    """Torch's own loop over fp32 masters."""

    def __init__(self, which: str, precision: str, clip: float | None, missing: str = "nothing"):
        kind, of_rule, hypers = STOCK[which]
        self.model, self.precision, self.clip, self.missing = make_model(), precision, clip, missing
        self.masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            param.data = models.rounded(self.masters[name].detach(), precision)
        alone = {} if issubclass(kind, _Of) else {"foreach": False}
        self.optimizer = kind(decayed(self.masters.values(), which), **alone, **of_rule, **hypers)  # type: ignore[call-arg]

    def train(self, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            (loss := loss_of(self.model, seed)).backward()
            losses.append(loss.item())
            grads = {name: param.grad for name, param in self.model.named_parameters()}
            scale = 1.0
            if self.clip is not None:
                sums = [reference.total(reference.sum_squares(grad.reshape(-1))) for grad in grads.values()]  # type: ignore[union-attr]
                scale = min(1.0, self.clip / (math.sqrt(reference.total(sums)) + 1e-6))
            for name, param in self.model.named_parameters():
                if not (self.missing in name and seed == 0):
                    self.masters[name].grad = grads[name].float() * scale  # type: ignore[union-attr]
                param.grad = None
            self.optimizer.step()
            self.optimizer.zero_grad()
            schedule(self.optimizer, seed)
            for name, param in self.model.named_parameters():
                param.data = models.rounded(self.masters[name].detach(), self.precision)
        return losses


def train(model: Any, optimizer: Optimizer, seeds: range, clip: float | None) -> list[float]:
    return helpers.train(model, optimizer, seeds, loss_of, clip=clip, after=lambda seed: schedule(optimizer, seed))


def assert_same(model: Any, optimizer: Any, plain: Plain) -> None:
    world_of(model).check()
    for name, master in plain.masters.items():
        assert torch.equal(bits(model.full_param(name, torch.float32)), bits(master.detach())), name
        kept, wanted = optimizer.full_state(name), plain.optimizer.state[master]
        tensors = {kind: value for kind, value in wanted.items() if isinstance(value, Tensor)}
        assert {*kept} - {"step", "residual"} == tensors.keys() - {"step"}
        for kind, value in tensors.items():
            if kind in kept:
                assert kept[kind].shape == value.shape and torch.equal(bits(kept[kind]), bits(value)), (name, kind)


def placed(where: str, rule: Any, path: Path, precision: str) -> gemini.GeminiConfig:
    if where == "on nvme":
        return config_for(rule, path, precision)  # with room for one module
    return gemini.GeminiConfig(precision=precision, optimizer=rule, **{"max_chunk": 6000, **settings_of(where, path)})


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "where", ["in memory", "on nvme", "transient", "streamed", "on the device", "half", "small tiles"]
)
@pytest.mark.parametrize("which", STOCK)
def test_a_stock_optimizer_has_the_bits_of_its_own_run(
    which: str, where: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, clip = rule_of(which), None if where == "transient" else 0.5
    plain = Plain(which, precision, clip)
    config = placed(where, rule, tmp_path, precision)
    assert rule.spec.needs == ("param" if "whole" in which else "place")
    with models.tiles_of(monkeypatch, rule.spec.align if where == "small tiles" else None):
        model = gemini.GeminiDDP(make_model(), config)
        optimizer = rule.make(
            decayed(model.parameters(), which), step_in_backward=where == "transient", **STOCK[which][2]
        )
        assert train(model, optimizer, range(NUM_STEPS), clip) == plain.train(range(NUM_STEPS))
        assert_same(model, optimizer, plain)


@pytest.mark.sweep(every=5)
@pytest.mark.parametrize("which", [which for which in STOCK if which != "counting"])  # a group counts for all params
def test_a_run_goes_on_from_a_checkpoint(which: str, tmp_path: Path) -> None:
    """With numbers of a param that depend on all hyperparameters so far, and params that have had fewer updates."""
    rule, plain = rule_of(which), Plain(which, "bf16", None, missing="layers.1.mlp")
    config = config_for(rule, tmp_path, "bf16")
    model = gemini.GeminiDDP(make_model(), config)
    optimizer = rule.make(decayed(model.parameters(), which), **STOCK[which][2])
    (loss := loss_of(model, 0)).backward()
    for name, param in model.named_parameters():
        if plain.missing in name:
            rule.make([param]).zero_grad()
    optimizer.start_anew()  # all are its own again
    optimizer.step()
    optimizer.zero_grad()
    schedule(optimizer, 0)
    losses = [loss.item(), *train(model, optimizer, range(1, 3), None)]
    gemini.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    wanted = plain.train(range(5))
    in_memory = gemini.GeminiConfig(precision="bf16", device="cpu", optimizer=rule, max_chunk=64)
    for again in (config, in_memory):
        other = gemini.GeminiDDP(make_model(), again)
        resumed = rule.make(decayed(other.parameters(), which))
        gemini.load_checkpoint(tmp_path / "checkpoint", other, resumed)
        assert losses + train(other, resumed, range(3, 5), None) == wanted
        assert_same(other, resumed, plain)
    counts = {float(resumed.full_state(name)["step"]) for name in plain.masters}
    assert counts == {4.0, 5.0}


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("which", ["nadam", "asgd", "rmsprop, all", "adagrad", "amsgrad", "adafactor, whole"])
def test_states_go_to_torch_and_come_back(which: str) -> None:
    """``state_dict`` is torch's own: a run goes on without Gemini, and one from before goes on with it."""
    rule = rule_of(which)
    kind, of_rule, hypers = STOCK[which]
    plain = Plain(which, "fp32", None)
    config = gemini.GeminiConfig(precision="fp32", device="cpu", optimizer=rule)
    model = gemini.GeminiDDP(make_model(), config)
    optimizer = rule.make(decayed(model.parameters(), which), **hypers)
    train(model, optimizer, range(2), None)
    stock = Plain(which, "fp32", None)
    for name, param in stock.model.named_parameters():
        stock.masters[name].data = model.full_param(name, torch.float32)
        param.data = stock.masters[name].detach().clone()
    stock.optimizer.load_state_dict(optimizer.state_dict())
    wanted = plain.train(range(4))
    assert stock.train(range(2, 4)) == wanted[2:]
    for name, master in plain.masters.items():
        assert torch.equal(bits(master.detach()), bits(stock.masters[name].detach())), name

    before = Plain(which, "fp32", None)
    before.train(range(2))
    again = gemini.GeminiDDP(before.model, config)
    back = rule.make(decayed(again.parameters(), which))
    back.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    assert train(again, back, range(2, 4), None) == wanted[2:]
    assert_same(again, back, plain)


@pytest.mark.parametrize("which", ["nadam", "asgd", "rprop", "adagrad", "plain sgd", "adafactor, whole"])
def test_plain_params_are_updated_alike(which: str) -> None:
    rule, plain, model = rule_of(which), Plain(which, "fp32", None), make_model()
    optimizer = rule.make(decayed(model.parameters(), which), **STOCK[which][2])
    train(model, optimizer, range(2), None)
    again = rule.make(decayed(model.parameters(), which))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, again, range(2, 3), None)
    later = gemini.GeminiDDP(model, gemini.GeminiConfig(precision="fp32", device="cpu", optimizer=rule))
    train(later, again, range(3, 4), None)  # its states went into chunks
    plain.train(range(4))
    assert_same(later, again, plain)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Noisy(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        param.sub_((grad + 1e-3 * torch.randn_like(grad)) * group["lr"])


class Forgetful(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        param.sub_(grad * group["lr"] / self.calls)


class Sharing(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        group["weight"] += float(grad.abs().mean())
        param.sub_(grad * group["lr"] / group["weight"])


class Double(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        self.state[param].setdefault("sum", torch.zeros_like(param, dtype=torch.float64)).add_(grad)
        param.sub_(self.state[param]["sum"].float() * group["lr"])


class Listing(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        self.state[param].setdefault("history", []).append(grad)


class Late(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        if self.calls > 3:
            self.state[param]["sum"] = grad.clone()


class Complex(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        self.state[param]["phase"] = torch.tensor(1 + 2j)


class Lazy(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        self.state[param]["sum"] = grad.clone() if self.state[param] else None


class Reserved(_Of):
    def update(self, group: Any, param: Tensor, grad: Tensor) -> None:
        self.state[param]["master"] = param.clone()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.LBFGS, r"torch.optim.LBFGS\): it cannot update .* missing 1 required positional .* 'closure'"),
        (torch.optim.SparseAdam, r"torch.optim.SparseAdam\): .* does not support dense gradients"),
        (Noisy, "draws random numbers inside step"),
        (Forgetful, "something stays in the optimizer itself"),
        (Sharing, "changes 'weight' in its param group"),
        (Double, "state 'sum' is float64 .*: there is room for an item for each element .uint8, .*float32., and in"),
        (Complex, "state 'phase' is complex64"),
        (Listing, "state 'history' is a list"),
        (Late, "other states in later steps"),
        (Lazy, "state 'sum' is a NoneType, which no plane"),
        (Reserved, "its states cannot be named: .* 'master'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(kind: type[Optimizer], words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"gemini.optim.adopt\(.*{kind.__name__}\): |{kind.__name__}") as raised:
        optim.adopt(kind)
    assert raised.match(words)
    assert torch.equal(before, torch.get_rng_state()), "a trial takes nothing from the program's random numbers"


def test_a_class_for_matrices_refuses_other_params() -> None:
    rule = optim.adopt(torch.optim.Muon)
    rule.make([nn.Parameter(torch.zeros(3, 5))])
    with pytest.raises(ValueError, match=r"has params of 1 dimensions, which torch.optim.Muon cannot .* only supports"):
        rule.make([nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(5))])
    param = nn.Parameter(torch.ones(3, 5))
    optimizer = rule.make([param])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, 3))]})
    stock = torch.optim.Muon([nn.Parameter(param.detach().clone())])
    for one in (optimizer, stock):
        own = one.param_groups[0]["params"][0]
        own.grad = torch.arange(15.0).view(3, 5)
        one.step()
    assert torch.equal(param.detach(), stock.param_groups[0]["params"][0].detach())


def test_arguments_that_are_no_optimizer_are_refused() -> None:
    with pytest.raises(TypeError, match="adopt takes a class of torch optimizers"):
        optim.adopt(torch.optim.NAdam([nn.Parameter(torch.zeros(1))]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="HybridAdam is an optimizer of Gemini already"):
        optim.adopt(gemini.HybridAdam)
    with pytest.raises(TypeError, match=r"torch.optim.NAdam has no momentum="):
        optim.adopt(torch.optim.NAdam, momentum=0.9)
    with pytest.raises(TypeError, match=r"weight_decay of torch.optim.Adagrad cannot be used: it is a Decimal"):
        optim.adopt(torch.optim.Adagrad, weight_decay=Decimal(1))
    with pytest.raises(ValueError, match=r"it cannot be made .* Invalid learning rate: -1"):
        optim.adopt(torch.optim.NAdam, lr=-1.0)
    with pytest.raises(ValueError, match="it cannot update"):
        optim.adopt(torch.optim.NAdam, differentiable=True)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda rule, p: rule.make(p, lr=-1.0),
            ValueError,
            "HybridOptimizer cannot be used with torch.optim.RMSprop: Invalid learning rate: -1.0",
        ),
        (lambda rule, p: rule.make(p, lr=math.nan), ValueError, "lr of HybridOptimizer must be finite"),
        (lambda rule, p: rule.make(p, lr="much"), TypeError, "lr of HybridOptimizer must be a number"),
        (lambda rule, p: rule.make(p, betas=3), TypeError, "betas= is not a hyperparameter"),
        (lambda rule, p: rule.make(p, momentum=0.0), ValueError, r"'momentum': 0.0.* keeps other states"),
        (
            lambda rule, p: rule.make(p, centered=True),
            ValueError,
            r"'centered': True.*\.adopt\(torch.optim.RMSprop, ...\)",
        ),
        (lambda rule, p: rule.make([{"params": p, "centered": True}]), ValueError, "param group 0 has .*'centered'"),
        (lambda rule, p: rule.make(p, alpha=object()), TypeError, "alpha of HybridOptimizer must be a number"),
        (lambda rule, p: rule.make(p, capturable=True), ValueError, "it cannot update .*capturable"),
    ],
)
def test_groups_that_the_rule_has_no_planes_for_are_refused(
    make: Callable[[Any, Any], Any], error: type[Exception], words: str
) -> None:
    rule = optim.adopt(torch.optim.RMSprop, momentum=0.9)
    with pytest.raises(error, match=words):
        make(rule, [nn.Parameter(torch.zeros(3))])


def test_a_schedule_may_begin_with_0_and_be_a_tensor() -> None:
    rule = optim.adopt(torch.optim.NAdam, lr=0.0)
    param = nn.Parameter(torch.ones(3))
    optimizer = rule.make([param], lr=torch.tensor(0.0))
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3)) and optimizer.state[param]["mu_product"].item() < 1
    optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizer.step()
    assert (param < 1).all()


def test_weight_decay_of_either_kind_is_loaded() -> None:
    """What is another optimizer in Adam's own groups is a hyperparameter of others."""
    rule, param = optim.adopt(torch.optim.NAdam), nn.Parameter(torch.ones(3))
    decoupled = rule.make([param], weight_decay=0.1, decoupled_weight_decay=True).state_dict()
    optimizer = rule.make([param])
    optimizer.load_state_dict(decoupled)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_rules_of_one_class_and_state_are_the_same() -> None:
    nadam, again = optim.adopt(torch.optim.NAdam, lr=1e-2), optim.adopt(torch.optim.NAdam)
    assert nadam == again and hash(nadam) == hash(again) and nadam.defaults["lr"] != again.defaults["lr"]
    assert repr(nadam) == "gemini.optim.adopt(torch.optim.NAdam, lr=0.01)"
    rmsprop = optim.adopt(torch.optim.RMSprop)
    assert rmsprop != optim.adopt(torch.optim.RMSprop, momentum=0.9)
    assert optim.adopt(torch.optim.Adam) != optim.adopt(torch.optim.AdamW), "the states are alike, the step is not"


def test_hooks_of_the_program_see_its_own_optimizer_alone() -> None:
    seen: list[Any] = []
    rule, param = optim.adopt(torch.optim.NAdam), nn.Parameter(torch.ones(3))
    optimizer = rule.make([param])
    hook = register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append(o))
    try:
        param.grad = torch.ones(3)
        optimizer.step()
    finally:
        hook.remove()
    assert seen == [optimizer]


def test_factors_are_counted_kept_and_compared(tmp_path: Path) -> None:
    """A value for each row and column of a matrix, and for each element of a vector: in memory, in the ledger."""
    rule = rule_of("adafactor, whole")
    model = gemini.GeminiDDP(make_model(), config_for(rule, tmp_path, "bf16"))
    sizes = [p.shape for p in model.parameters()]
    wanted = 4 * sum(shape[0] + shape[1] if len(shape) == 2 else shape[0] for shape in sizes)
    report, problem = model.memory_report(), world_of(model).problem
    assert report["cpu"]["holders"]["factors"] == problem.factors == wanted < 0.03 * 4 * sum(map(math.prod, sizes)) * 2
    assert report["bytes_per_param"] * problem.layout.payload == 4 * problem.layout.numel + wanted
    optimizer = rule.make(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2), None)
    name = "model.layers.0.mlp.up_proj.weight"
    assert set(optimizer.state[model.get_parameter(name)]) == {"step", "residual", "residual_of", "row_var", "col_var"}
    kept = optimizer.full_state(name)
    assert kept["row_var"].shape == (144, 1) and kept["col_var"].shape == (1, 32) and (kept["row_var"] > 0).all()
    state = copy.deepcopy(optimizer.state_dict())
    index = [n for n, _ in model.named_parameters()].index(name)
    state["state"][index]["row_var"] = torch.zeros(1, 144)
    with pytest.raises(ValueError, match=r"'row_var' of .*up_proj.* of shape .* wanted .* of shape \(144, 1\)"):
        optimizer.load_state_dict(state)
    del state["state"][index]["row_var"]
    with pytest.raises(ValueError, match="the rule 'torch.optim.Adafactor' has .*'row_var'"):
        optimizer.load_state_dict(state)
    gemini.save_checkpoint(tmp_path / "kept", model, optimizer)
    optimizer.state.clear()
    assert not any(value.any() for handle in world_of(model).handles for value in handle.factors.values())
    gemini.load_checkpoint(tmp_path / "kept", model, optimizer)
    assert all(torch.equal(value, kept[kind]) for kind, value in optimizer.full_state(name).items())
    write_torch_file(promised_optimizer_state(optimizer), tmp_path / "states.pt")
    assert torch.equal(torch.load(tmp_path / "states.pt")["state"][index]["col_var"], kept["col_var"])


def test_factors_come_with_a_param_that_is_trained_later() -> None:
    rule, model = rule_of("adafactor, whole"), make_model()
    model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr, operator]
    managed = gemini.GeminiDDP(model, gemini.GeminiConfig(precision="fp32", device="cpu", optimizer=rule))
    before = managed.memory_report()["cpu"]["holders"]["factors"]
    managed.model.embed_tokens.requires_grad_(True)
    optimizer = rule.make(managed.parameters(), lr=1e-2)
    train(managed, optimizer, range(2), None)
    assert optimizer.full_state("model.embed_tokens.weight")["row_var"].any()
    assert managed.memory_report()["cpu"]["holders"]["factors"] == before + 4 * (64 + 32)


def test_a_number_of_a_param_takes_next_to_nothing(tmp_path: Path) -> None:
    """4 of the master, 8 of the averages, and one fp32 in a block of 2048 elements: in memory, never in the file."""
    rule = rule_of("nadam")
    model = gemini.GeminiDDP(make_model(), config_for(rule, tmp_path, "bf16"))
    report, layout = model.memory_report(), world_of(model).layout
    assert report["nvme"]["used"] == (12 + 2) * layout.numel, "with gradients"
    assert report["cpu"]["holders"]["mu_product"] == 4096 * len(layout.chunks)
    assert adopted.ALIGN == 2048 and rule.spec.planes[-1].num_bytes(2**20) == 4 * 2**20 // 2048


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


ANY_DEFAULT = [torch.optim.RAdam, torch.optim.Adafactor, torch.optim.Adadelta]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (torch.optim.NAdam, torch.bfloat16),
        *((kind, dtype) for kind in ANY_DEFAULT for dtype in (torch.bfloat16, torch.float64)),
    ],
)
def test_the_default_dtype_of_a_program_changes_no_rule(kind: type[Optimizer], dtype: torch.dtype) -> None:
    wanted = optim.adopt(kind, lr=0.37).spec
    with default_dtype(dtype):
        # A learning rate of no other test: what was adopted is remembered.
        assert optim.adopt(kind, lr=0.37 + 0.01 * dtype.itemsize).spec == wanted


def test_a_state_that_torch_makes_in_the_default_dtype_is_refused_by_name() -> None:
    with default_dtype(torch.float64), pytest.raises(ValueError, match="its state 'mu_product' is float64"):
        optim.adopt(torch.optim.NAdam, lr=0.46)
