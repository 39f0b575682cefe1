"""A config that says nothing about precision leaves it to the framework's flags, in every bridge."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.lightning import GeminiStrategy
from lightning_cases import Tiny, loader
from lightning_cases import trainer as lightning_trainer
from trainer_cases import llama, make, train_new

import gemini
from gemini import GeminiConfig as Config
from tests.world import world_of

FLAGS = ["no", "bf16", "fp16"]
MEANT = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
ROOM = gemini.MemoryBudget(cpu="64MiB")


def precision_of(model: Any) -> str:
    return world_of(model).config.precision


def test_alone_it_is_bf16_and_a_change_of_the_config_says_nothing_more() -> None:
    config = dataclasses.replace(Config(memory=ROOM), gradients="accumulate")
    assert config.precision is None and config.resolved().precision == "bf16"
    assert config.resolved("fp16").precision == config.resolved("fp16").resolved("fp32").precision == "fp16"
    assert precision_of(gemini.GeminiDDP(torch.nn.Linear(2, 2), config)) == "bf16"
    with pytest.raises(ValueError, match="transient.*fp16"):
        Config(gradients="transient").resolved("fp16")


@pytest.mark.parametrize("said", [None, "fp32", "bf16"])
@pytest.mark.parametrize("flag", FLAGS)
def test_in_the_trainer(tmp_path: Path, flag: str, said: str | None) -> None:
    flags = {} if flag == "no" else {flag: True}
    config = Config(precision=said, memory=ROOM) if said else Config(memory=ROOM)
    if said is not None and flag not in ("no", said):
        with pytest.raises(ValueError, match=f"asks for {flag}, and the model is to be managed in {said}"):
            make(tmp_path, gemini_config=config, **flags)
        return
    trainer, _ = make(tmp_path, gemini_config=config, **flags)
    trainer._gemini_manage()
    assert precision_of(trainer.model) == (said or MEANT[flag])


def test_the_trainer_computes_in_fp32_without_flags_and_refuses_early_what_cannot_be(tmp_path: Path) -> None:
    plain, without = train_new(tmp_path / "plain", max_steps=2, save_strategy="no")
    budgets, with_config = train_new(
        tmp_path / "said", max_steps=2, save_strategy="no", gemini_config=Config(memory=ROOM)
    )
    assert without.of("loss") == with_config.of("loss") and without.of("grad_norm") == with_config.of("grad_norm")
    with pytest.raises(ValueError, match="transient"):
        make(tmp_path, fp16=True, gemini_config=Config(gradients="transient"))
    with pytest.raises(ValueError, match="fp16_full_eval=True, but the model is managed in fp32"):
        make(tmp_path, fp16_full_eval=True, gemini_config=Config(memory=ROOM))


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("bridge", ["trainer", "accelerate", "lightning"])
def test_weights_in_half_precision_without_a_flag_are_said_to_be_trained_in_fp32(
    bridge: str, half: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def manage(config: Config) -> list[str]:
        recwarn.clear()
        model = llama().to({"bf16": torch.bfloat16, "fp16": torch.float16}[half])
        if bridge == "trainer":
            trainer, _ = make(tmp_path, model=model, gemini_config=config)
            trainer._gemini_manage()
        elif bridge == "accelerate":
            GeminiAccelerator(cpu=True, gemini_config=config).prepare(model)
        else:
            module = Tiny().to(model.dtype)
            lightning_trainer(GeminiStrategy(config)).fit(module, loader(8))
        return [str(w.message) for w in recwarn if "weights are" in str(w.message)]

    found = manage(Config(memory=ROOM))
    assert len(found) == 1 and f"weights are {half}" in found[0] and "trained in fp32" in found[0]
    assert not manage(Config(memory=ROOM, precision="fp32")), "it was asked for"


@pytest.mark.parametrize("flag", FLAGS)
def test_in_accelerate(flag: str) -> None:
    config = Config(memory=ROOM)
    accelerator = GeminiAccelerator(cpu=True, mixed_precision=flag, gemini_config=config)
    assert accelerator.mixed_precision == flag
    model = accelerator.prepare(llama())
    assert precision_of(model) == MEANT[flag]
    assert GeminiAccelerator(cpu=True, gemini_config=config).prepare(model) is model, "nothing here says another"
    if flag == "no":
        assert (
            precision_of(GeminiAccelerator(cpu=True, gemini_config=Config(precision="bf16")).prepare(llama())) == "bf16"
        )


@pytest.mark.parametrize("flag", [None, "32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_in_lightning(flag: Any) -> None:
    run = lightning_trainer(GeminiStrategy(Config(memory=ROOM)), precision=flag)
    meant = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-true": "fp16"}.get(flag, "fp32")
    assert run.precision_plugin.compute == meant
    module = Tiny()
    run.fit(module, loader(8))
    assert precision_of(module) == meant
    if meant == "fp16":
        with pytest.raises(ValueError, match="transient"):
            lightning_trainer(GeminiStrategy(Config(gradients="transient")), precision=flag)
