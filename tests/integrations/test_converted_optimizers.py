"""A converted optimizer is the one that it was: what anyone can read of it is what the stock bridge shows."""

import csv
import functools
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.huggingface import GeminiTrainer
from gemini.integrations.lightning import GeminiStrategy
from gemini.integrations.rules import to_hybrid
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning_cases import Tiny, loader, trainer
from torch import nn
from transformers import Trainer
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

import gemini
from gemini import optim
from tests.integrations.trainer_cases import llama, make, masters, rows, train_new

Config = gemini.GeminiConfig
STEPS = 3


class Kind(NamedTuple):
    make: Any
    rule: Any = None


KINDS = {
    "AdamW": Kind(lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.9))),
    "fused AdamW": Kind(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
    "Adam": Kind(lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1)),
    "SGD": Kind(lambda p: torch.optim.SGD(p, lr=1e-2), optim.PlainSGDRule()),
    "SGD with momentum": Kind(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True), optim.SGDRule()),
    "RMSprop": Kind(lambda p: torch.optim.RMSprop(p, lr=1e-3), optim.adopt(torch.optim.RMSprop)),
    "Adagrad": Kind(lambda p: torch.optim.Adagrad(p, lr=1e-3), optim.adopt(torch.optim.Adagrad)),
    "NAdam": Kind(lambda p: torch.optim.NAdam(p, lr=1e-3), optim.adopt(torch.optim.NAdam)),
}
HOOKS = (
    "step_pre_hook", "step_post_hook", "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook",
    "load_state_dict_post_hook",
)  # fmt: skip


@pytest.fixture(autouse=True)
def apart() -> Any:
    """Lightning makes a process group, and says so in the environment; accelerate keeps what it has found."""
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)


def made(kind: Kind, model: nn.Module) -> tuple[Any, Any, Counter[str]]:
    """An optimizer as a program hands it on: with a label, a schedule, attributes and hooks, which are counted."""
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if "norm" in n or "scale" in n], "lr": 1e-4, "of": "norms"}]
    groups.append({"params": [p for n, p in named if "norm" not in n and "scale" not in n]})
    optimizer, called = kind.make(groups), Counter[str]()
    for name in HOOKS:
        getattr(optimizer, f"register_{name}")(lambda *_, name=name: called.update([name]))
    optimizer.mine = "mine"
    half = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [half, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    )
    return optimizer, schedule, called


def told(optimizer: Any, schedule: Any, called: Counter[str]) -> dict[str, Any]:
    """What can be read of an optimizer after a few steps, by whoever was given it before."""
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    return {
        "name": type(optimizer).__name__, "module": type(optimizer).__module__, "mine": optimizer.mine,
        "repr": repr(optimizer), "defaults": optimizer.defaults, "doc": type(optimizer).__doc__,
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "sizes": [len(g["params"]) for g in optimizer.param_groups],
        "state": {n: {k: getattr(v, "shape", v) for k, v in s.items()} for n, s in state["state"].items()},
        "followed": schedule.optimizer is optimizer and all(s.optimizer is optimizer for s in schedule._schedulers),
        "rates": schedule.get_last_lr(), "hooks": called, "stepped": optimizer._opt_called,
    }  # fmt: skip


def by_accelerate(kind: Kind, managed: bool, folder: Path) -> Any:
    model = llama()
    optimizer, schedule, called = made(kind, model)
    ours = {"gemini_config": Config(precision="fp32", optimizer=kind.rule)}
    accelerator: Any = GeminiAccelerator(cpu=True, **ours) if managed else Accelerator(cpu=True)
    model, prepared, scheduler = accelerator.prepare(model, optimizer, schedule)
    assert prepared.optimizer is optimizer and scheduler.scheduler is schedule
    called.clear()  # accelerate reads and writes the whole state where it places it
    for number in range(STEPS):
        accelerator.backward(model(**rows(number)).loss)
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
    return model, optimizer, schedule, called


def by_trainer(kind: Kind, managed: bool, folder: Path) -> Any:
    model = llama()
    optimizer, schedule, called = made(kind, model)
    ours = {"gemini_config": Config(optimizer=kind.rule)} if managed else {"kind": Trainer}
    run, _ = train_new(
        folder, model=model, optimizers=(optimizer, schedule), max_steps=STEPS, save_strategy="no",
        max_grad_norm=0.0, **ours,
    )  # fmt: skip
    assert run.optimizer.optimizer is optimizer
    for name in HOOKS[2:]:
        del called[name]  # as above
    return model, optimizer, schedule, called


def by_lightning(kind: Kind, managed: bool, folder: Path) -> Any:
    found: list[Any] = []

    class Other(Tiny):
        def configure_optimizers(self) -> Any:
            optimizer, schedule, called = made(kind, self)
            found.extend((self, optimizer, schedule, called))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    strategy: Any = GeminiStrategy(Config(precision="fp32", optimizer=kind.rule)) if managed else "auto"
    run = trainer(strategy, max_steps=STEPS)
    run.fit(Other(), loader())
    assert run.optimizers[0] is found[1]
    for name in HOOKS[2:]:
        found[3].pop(name, None)
    return found


BRIDGES = {"accelerate": by_accelerate, "trainer": by_trainer, "lightning": by_lightning}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bridge", BRIDGES)
def test_all_that_can_be_read_is_what_the_stock_bridge_shows(bridge: str, kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(lr_scheduler.step|optimizer.step).*")
        ours, stock = (BRIDGES[bridge](KINDS[kind], managed, tmp_path / str(managed)) for managed in (True, False))
    found, wanted = told(*ours[1:]), told(*stock[1:])
    for what, value in wanted.items():
        if what == "state" and kind == "SGD with momentum":  # torch's keeps no count of steps
            value = {n: {**s, "step": torch.Size()} for n, s in value.items()}
        if what == "state" and kind == "SGD":
            value = {n: {"step": torch.Size()} for n in found["state"]}
        assert found[what] == value, what
    assert found["hooks"]["step_pre_hook"] == found["hooks"]["step_post_hook"] == STEPS
    assert isinstance(ours[1], type(stock[1])) and isinstance(ours[1], gemini.HybridOptimizer)
    weights = masters(ours[0])
    for name, param in stock[0].named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=2e-5)


NAMES: dict[str, dict[str, Any]] = {
    "adamw_torch": {}, "adamw_torch_fused": {}, "sgd": {}, "sgd with momentum": {"optim_args": "momentum=0.9"},
    "rmsprop": {}, "adagrad": {}, "given": {}, "given adopted": {}, "given class": {},
}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    str(kind.value): {} for kind in TYPE_TO_SCHEDULER_FUNCTION
} | {
    "cosine_with_min_lr": {"min_lr": 1e-6}, "cosine_warmup_with_min_lr": {"min_lr": 1e-6},
    "polynomial": {"lr_end": 1e-6}, "warmup_stable_decay": {"num_decay_steps": 2},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5, "mode": "max"},
    "greedy": {"patience": 0, "factor": 0.5, "mode": "max"},
}  # fmt: skip


def rates(folder: Path, name: str, schedule: str, ours: bool) -> tuple[list[float], Any]:
    """The learning rates that a Trainer logs."""
    how: dict[str, Any] = {
        "lr_scheduler_type": schedule, "lr_scheduler_kwargs": SCHEDULES[schedule], "learning_rate": 2e-5,
        "save_strategy": "no", "max_steps": 5, "warmup_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.0,
        "gradient_accumulation_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **NAMES[name],
    }  # fmt: skip
    if name.startswith("given"):
        model = llama()
        kind = torch.optim.NAdam if "adopted" in name else torch.optim.AdamW
        if "adopted" in name and ours:
            how["gemini_config"] = Config(optimizer=optim.adopt(kind))
        if "class" in name:
            how["optimizer_cls_and_kwargs"] = kind, {"lr": 3e-5}
        else:
            how["optimizers"] = kind(model.parameters(), lr=3e-5), None
        how["model"] = model
    else:
        how["optim"] = name.split()[0]
    run, record = train_new(folder, kind=GeminiTrainer if ours else Trainer, **how)
    return record.of("learning_rate"), run.optimizer.optimizer


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_schedules_set_the_rates_of_the_stock_trainer(name: str, schedule: str, tmp_path: Path) -> None:
    found, ours = rates(tmp_path / "ours", name, schedule, True)
    wanted, stock = rates(tmp_path / "stock", name, schedule, False)
    assert found == wanted and len(found) == 5
    assert type(ours).__name__ == type(stock).__name__
    assert ours.defaults | {"foreach": None} == stock.defaults | {"foreach": None}, "adopted classes update alone"


def test_a_run_goes_on_with_another_implementation_of_its_optimizer(tmp_path: Path) -> None:
    whole, _ = train_new(tmp_path, optim="adamw_torch_fused")
    again, _ = make(tmp_path, optim="adamw_torch")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    other = masters(again.model)
    assert all(torch.equal(value, other[name]) for name, value in masters(whole.model).items())


class Keeping(Tiny):
    """Returns the same optimizer and scheduler in each fit."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


@pytest.mark.parametrize("monitored", [False, True])
def test_a_second_fit_with_the_same_optimizer_and_scheduler(monitored: bool, tmp_path: Path) -> None:
    """The rates go on, and are logged under the optimizer's own name."""
    runs = {}
    for strategy in ("gemini", "auto"):
        module, names = Keeping(), []
        for number in range(2):
            folder = tmp_path / strategy / str(number)
            logging = {"logger": CSVLogger(folder, flush_logs_every_n_steps=1), "callbacks": [LearningRateMonitor()]}
            run = trainer(strategy, **({**logging, "log_every_n_steps": 1} if monitored else {}))
            run.fit(module, loader(12))
            for path in folder.rglob("metrics.csv"):
                names.append(next(csv.reader(path.open())))
            assert run.optimizers[0] is module.kept["optimizer"]
        runs[strategy] = (module.rates, names, module.kept["lr_scheduler"]["scheduler"].state_dict())
        assert len(module.losses) == 6 and module.losses[3] < module.losses[0]
        assert int(module.kept["optimizer"].state_dict()["state"][0]["step"]) == 6
    assert runs["gemini"] == runs["auto"]
    assert not monitored or "lr-AdamW" in runs["gemini"][1][0]


def test_a_new_optimizer_keeps_the_state_that_it_was_given(tmp_path: Path) -> None:
    """``configure_optimizers`` loads a state: the second fit goes on with it as the first one does."""

    class Loading(Tiny):
        saved: Any = None

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if self.saved is not None:
                optimizer.load_state_dict(self.saved)
            return optimizer

    module = Loading()
    for _ in range(2):
        run = trainer("gemini")
        run.fit(module, loader(8))
        module.saved = {**run.optimizers[0].state_dict()}
    assert run.optimizers[0].full_state("scale")["step"] == 4


# ---- what is refused leaves everything as it was ---------------------------------------------------------------------


def managed(**how: Any) -> Any:
    return gemini.GeminiDDP(llama(), Config(precision="fp32", **how))


def negative(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}


REFUSED: dict[str, tuple[Any, str]] = {
    "another class": (lambda p: torch.optim.SGD(p, lr=0.1), "SGD cannot update a managed model"),
    "a class of one's own": (lambda p: type("Mine", (torch.optim.AdamW,), {})(p), "Mine cannot update a managed model"),
    "an option": (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW has amsgrad=True"),
    "a state": (lambda p: torch.optim.AdamW(p), "in the loaded state"),
    "step of its own": (lambda p: torch.optim.AdamW(p), "step of the optimizer AdamW was replaced"),
    "zero_grad of its own": (lambda p: torch.optim.AdamW(p), "zero_grad of the optimizer AdamW was replaced"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_optimizer_is_as_it_was(what: str) -> None:
    model = managed()
    before = gemini.HybridAdam(model.parameters())
    model(**rows(0)).loss.backward()
    before.step()
    before.zero_grad()
    optimizer = REFUSED[what][0](model.parameters())
    if what == "a state":
        negative(optimizer)
    if what.endswith("of its own"):
        name = what.split()[0]
        setattr(optimizer, name, functools.partial(getattr(optimizer, name)))
    optimizer.register_step_pre_hook(lambda *_: None)
    kind, there, groups = type(optimizer), dict(vars(optimizer)), [dict(g) for g in optimizer.param_groups]
    with pytest.raises(ValueError, match=REFUSED[what][1]):
        to_hybrid(optimizer)
    assert type(optimizer) is kind and optimizer.__dict__.keys() == there.keys()
    assert all(optimizer.__dict__[name] is value for name, value in there.items())
    assert [list(g) for g in optimizer.param_groups] == [list(g) for g in groups]
    with pytest.raises(gemini.GeminiError, match=f"{kind.__name__} cannot update"):
        kind.step(optimizer)
    model(**rows(0)).loss.backward()
    before.step()  # the params are still those of the optimizer that had them
    assert before.full_state("lm_head.weight")["step"] == 2


def test_a_step_that_was_taken_before_says_so() -> None:
    model = managed()
    optimizer = torch.optim.AdamW(model.parameters())
    stale = optimizer.step
    to_hybrid(optimizer)
    model(**rows(0)).loss.backward()
    with pytest.raises(gemini.GeminiError, match=r"called as it was before .*call optimizer.step\(\)"):
        stale()
    optimizer.step()
    assert optimizer.full_state("lm_head.weight")["step"] == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD with momentum", "Adagrad"])
def test_a_released_model_gives_the_optimizer_back(kind: str, precision: str) -> None:
    """It is torch's again, with its hooks and its schedule, and begins anew; a model that is wrapped again takes it."""
    model = llama()
    optimizer, schedule, called = made(KINDS[kind], model)
    original, config = type(optimizer), Config(precision=precision, optimizer=KINDS[kind].rule)
    GeminiAccelerator(cpu=True, gemini_config=config).prepare(model, optimizer, schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(lr_scheduler.step|optimizer.step).*")
        for again in (False, True, False):
            model(**rows(0)).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if again:
                gemini.GeminiDDP(model, config)
                to_hybrid(optimizer)
                assert int(optimizer.full_state("lm_head.weight")["step"]) == 1
            else:
                gemini.release(model)
                assert type(optimizer) is original and optimizer.mine == "mine"
                anew = original([dict(group) for group in optimizer.param_groups])
                assert optimizer.state.keys() == anew.state.keys()
    assert called == {"step_pre_hook": 3, "step_post_hook": 3}


# ---- loops without their bridge: their first step, or clipping before it, finds out ----------------------------------


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_stock_trainer_is_refused(clip: float, tmp_path: Path) -> None:
    with pytest.raises(gemini.GeminiError, match=r"gradients .*of a managed model live in chunks"):
        make(tmp_path, kind=Trainer, model=managed(), max_grad_norm=clip, max_steps=1, save_strategy="no")[0].train()
    make(tmp_path, model=managed(), max_steps=1, save_strategy="no", max_grad_norm=clip)[0].train()


def test_the_stock_accelerator_and_lightning_are_refused() -> None:
    model = managed()
    model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    model(**rows(0)).loss.backward()
    with pytest.raises(gemini.GeminiError, match="AdamW cannot update .*HybridAdam"):
        optimizer.step()
    module = gemini.GeminiDDP(Tiny(), Config(precision="fp32"))
    with pytest.raises(gemini.GeminiError, match="AdamW cannot update .*HybridAdam"):
        trainer("auto").fit(module, loader(4))
    trainer("gemini").fit(module, loader(4))
    assert module.to("cpu") is module, "to where it is, by the program itself"
