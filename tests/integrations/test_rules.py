"""Other rules than Adam's in the bridges: by name in TrainingArguments, by the config, given as torch's optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.lightning import GeminiStrategy
from gemini.integrations.rules import to_hybrid
from lightning_cases import alone  # noqa: F401
from transformers import Trainer

import gemini
from gemini import optim
from tests.integrations.test_lightning_fit import fit
from tests.integrations.test_lightning_optimizers import optimizing
from tests.integrations.trainer_cases import llama, make, masters, train_new
from tests.train.helpers import train
from tests.world import world_of

Config = gemini.GeminiConfig
STOCK: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd"},
    "sgd with momentum": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
    "adagrad": {"optim": "adagrad", "optim_args": "lr_decay=0.1"},
    "rmsprop": {"optim": "rmsprop", "optim_args": "momentum=0.5,centered=true"},
}


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("which", STOCK)
def test_a_stock_name_trains_as_the_stock_trainer_does(which: str, tmp_path: Path) -> None:
    """The same losses; for adopted classes the same bits, gradients being summed in fp32 by both."""
    how = {**STOCK[which], "max_grad_norm": 0.0, "learning_rate": 1e-3, "train_sampling_strategy": "sequential"}
    stock, wanted = train_new(tmp_path / "stock", kind=Trainer, save_strategy="no", **how)
    ours, record = train_new(tmp_path / "ours", **how)
    exact = not which.startswith("sgd")
    rule = ours.optimizer.optimizer.rule
    assert isinstance(rule, optim.AdoptedRule if exact else (optim.SGDRule, optim.PlainSGDRule))
    assert record.of("loss") == pytest.approx(wanted.of("loss"), rel=0 if exact else 1e-5)
    found = masters(ours.model)
    for name, param in stock.model.named_parameters():
        if exact:
            assert torch.equal(found[name], param.detach()), name
        else:
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-4, atol=1e-6)
    again, _ = make(tmp_path / "ours", **how)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    for name, value in masters(again.model).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize(
    ("name", "kind", "hypers"),
    [
        ("lion_32bit", optim.LionRule, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
        ("lomo", optim.PlainSGDRule, {"lr": 1e-3}),
        ("adalomo", optim.AdaLomoRule, {"weight_decay": 0.1}),
    ],
)
def test_names_whose_rule_gemini_has(name: str, kind: type, hypers: dict[str, Any], tmp_path: Path) -> None:
    trainer, record = train_new(
        tmp_path, optim=name, learning_rate=1e-3, adam_beta1=0.8, adam_beta2=0.9, warmup_steps=0, save_strategy="no"
    )
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer.rule) is kind and world_of(trainer.model).config.optimizer == optimizer.rule
    assert all(optimizer.defaults[key] == value or key == "weight_decay" for key, value in hypers.items())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert len(record.of("loss")) == 6


def test_the_config_says_the_rule(tmp_path: Path) -> None:
    rule = optim.adopt(torch.optim.NAdam, momentum_decay=0.1)
    trainer, _ = train_new(tmp_path, gemini_config=Config(optimizer=rule), save_strategy="no", learning_rate=1e-4)
    (first, _) = trainer.optimizer.optimizer.param_groups
    assert trainer.optimizer.optimizer.rule == rule and first["momentum_decay"] == 0.1 and first["initial_lr"] == 1e-4
    with pytest.raises(ValueError, match=r"optim='sgd' is PlainSGDRule\(\), .* managed for gemini.optim.adopt"):
        make(tmp_path, gemini_config=Config(optimizer=rule), optim="sgd")


@pytest.mark.parametrize(("name", "rule"), [("adamw_torch", optim.AdamRule()), ("lion_32bit", optim.LionRule())])
def test_averages_leave_the_optimizer_as_it_is(name: str, rule: Any, tmp_path: Path) -> None:
    """They are in the Trainer's checkpoints, and begin at the masters that an optimizer of torch has left."""
    config = Config(optimizer=optim.AveragedRule(rule, decay=0.9))
    trainer, _ = train_new(tmp_path, gemini_config=config, optim=name, learning_rate=1e-3)
    assert trainer.optimizer.optimizer.rule == rule
    names = [key for key, _ in trainer.model.named_parameters()]
    found = {key: gemini.EMA(trainer.model).full_param(key) for key in names}
    assert any(not torch.equal(found[key], value) for key, value in masters(trainer.model).items())
    again, _ = make(tmp_path, gemini_config=config, optim=name, learning_rate=1e-3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(gemini.EMA(again.model).full_param(key), value) for key, value in found.items())
    if rule != optim.AdamRule():
        return
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2), clip=None)
    left = {key: param.detach().clone() for key, param in model.named_parameters()}
    model, _ = GeminiAccelerator(cpu=True, gemini_config=config).prepare(model, optimizer)
    assert all(torch.equal(gemini.EMA(model).full_param(key), value) for key, value in left.items())


def test_a_given_optimizer_of_the_rule_is_converted_with_its_states(tmp_path: Path) -> None:
    """A run that began with torch goes on as it would have there."""
    for kind, rule, how in (
        (torch.optim.NAdam, optim.adopt(torch.optim.NAdam), {"lr": 1e-3}),
        (torch.optim.SGD, optim.SGDRule(), {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    ):
        runs = []
        for managed in (True, False):
            model: Any = llama()
            optimizer = kind(model.parameters(), foreach=False, **how)  # type: ignore[arg-type]
            train(model, optimizer, range(2), clip=None)
            if managed:
                accelerator = GeminiAccelerator(cpu=True, gemini_config=Config(precision="fp32", optimizer=rule))
                model, optimizer = accelerator.prepare(model, optimizer)
                assert optimizer.optimizer.rule == rule
            train(model, optimizer, range(2, 4), clip=None)
            runs.append(masters(model) if managed else dict(model.named_parameters()))
        for name, value in runs[0].items():
            torch.testing.assert_close(value, runs[1][name].detach(), rtol=1e-5, atol=1e-7)


def test_lightning_converts_by_the_rule_of_the_config() -> None:
    rule = optim.adopt(torch.optim.Adagrad)
    strategy = GeminiStrategy(Config(precision="fp32", optimizer=rule))
    module = optimizing(lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2))
    run = fit(module, strategy, 8)
    assert run.optimizers[0].rule == rule
    other = optimizing(lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2))
    with pytest.raises(ValueError, match=r"RMSprop is not of the rule .*Adagrad.*adopt\(torch.optim.RMSprop\)"):
        fit(other, GeminiStrategy(Config(precision="fp32", optimizer=rule)), 4)


def test_an_optimizer_of_another_rule_is_refused_by_name() -> None:
    model = gemini.GeminiDDP(llama(), Config(precision="fp32", optimizer=optim.SGDRule()))
    with pytest.raises(ValueError, match=r"AdamW is not of the rule .* SGDRule\(\).*adopt\(torch.optim.AdamW\)"):
        to_hybrid(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="SGD has maximize=True"):
        to_hybrid(torch.optim.SGD(model.parameters(), maximize=True))
    lion = gemini.HybridOptimizer(list(llama().parameters()), optim.LionRule())
    assert to_hybrid(lion) is lion
