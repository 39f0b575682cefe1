"""Wrong uses of the library, and what a person is told: a table in Markdown.

    python benchmarks/wrong_library_uses.py > table.md

Each use is one mistake in an otherwise right program. Exit code 1 if one of them is not refused with a sentence.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini

REFUSALS = (gemini.GeminiError, ValueError, TypeError, KeyError, OSError)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def config(**settings: Any) -> gemini.GeminiConfig:
    settings = {"memory": gemini.MemoryBudget(cpu="1MiB"), "device": "cpu", "precision": "fp32", **settings}
    return gemini.GeminiConfig(**settings)


def managed(**settings: Any) -> Any:
    return gemini.GeminiDDP(plain(), config(**settings))


def loss_of(model: Any) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(torch.ones(2, 16, dtype=dtype)).float().square().mean()


def trained() -> tuple[Any, Any]:
    model = managed()
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    return model, optimizer


def backward_then(do: Callable[[Any], Any]) -> Any:
    model, _ = trained()
    return do(model)


def stale_plan() -> Any:
    other = gemini.trace(nn.Sequential(nn.Linear(8, 8)), {"input": torch.ones(1, 8)}, target="cpu", loss=torch.sum)
    plan = gemini.plan(other, None, gemini.MemoryBudget(cpu="1MiB"), compute=gemini.Tier.CPU)
    return managed(placement=plan)


def damaged_checkpoint() -> Any:
    model, optimizer = trained()
    optimizer.step()
    gemini.save_checkpoint("damaged", model, optimizer)
    file = next(Path("damaged").glob("params-*.safetensors"))
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    return gemini.load_checkpoint("damaged", model, optimizer)


def another_models_checkpoint() -> Any:
    model, optimizer = trained()
    optimizer.step()
    gemini.save_checkpoint("other", model, optimizer)
    wide = gemini.GeminiDDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), config())
    return gemini.load_checkpoint("other", wide, gemini.HybridAdam(wide.parameters()))


def unwritable() -> str:
    Path("file").write_text("")
    return "file"


def retained_twice() -> Any:
    for kib in range(8, 256, 4):  # the smallest budget that a single backward fits
        try:
            model = managed(precision="bf16", memory=gemini.MemoryBudget(cpu=f"{kib}KiB"))
            break
        except gemini.BudgetExceeded:
            continue
    loss_of(model).backward()
    loss_of(model).backward()


def torchs_adam() -> Any:
    model = managed()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()


def nan_step() -> Any:
    model = managed()
    optimizer = gemini.HybridAdam(model.parameters())
    (loss_of(model) * float("nan")).backward()
    optimizer.step()


USES: dict[str, tuple[Callable[[], Any], str]] = {
    "a budget that is too small": (lambda: managed(memory=gemini.MemoryBudget(cpu="4KiB")), "Cheapest change"),
    "an unfrozen model that is only evaluated": (
        lambda: gemini.GeminiDDP(plain().eval(), config(memory=gemini.MemoryBudget(cpu="64KiB"))),
        "requires_grad_(False)"),
    "a unit that is none": (lambda: gemini.MemoryBudget(cpu="5 parsecs"), "unknown unit"),
    "a negative budget": (lambda: gemini.MemoryBudget(cpu=-1), "negative"),
    "a budget for a drive without its folder": (lambda: gemini.MemoryBudget(nvme="1GiB"), "nvme_path="),
    "a folder that is not there": (
        lambda: managed(memory=gemini.MemoryBudget(cpu="1MiB", nvme_path="nowhere")), "nowhere"),
    "a folder that is a file": (
        lambda: managed(memory=gemini.MemoryBudget(cpu="1MiB", nvme_path=unwritable())), "file"),
    "a precision that is none": (lambda: gemini.GeminiConfig(precision="int8"), "use one of"),
    "settings instead of a config": (lambda: gemini.GeminiDDP(plain(), precision="bf16"), "GeminiConfig"),
    "a dict instead of a budget": (lambda: gemini.GeminiConfig(memory={"cpu": "1GiB"}), "MemoryBudget"),
    "a setting that does not go with another": (
        lambda: gemini.GeminiConfig(precision="fp16", gradients="transient"), "retain"),
    "wrapping twice": (lambda: gemini.GeminiDDP(managed(), config()), "gemini.release"),
    "a config instead of a model": (lambda: gemini.GeminiDDP(config(), config()), "Module"),
    "a model without params": (lambda: gemini.GeminiDDP(nn.ReLU(), config()), "param"),
    "an integer param": (
        lambda: gemini.GeminiDDP(
            nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)]), config()), "int8"),
    "torch's AdamW": (torchs_adam, "HybridAdam"),
    "a learning rate below 0": (lambda: gemini.HybridAdam(managed().parameters(), lr=-1.0), "lr"),
    "an option of another Adam": (lambda: gemini.HybridAdam(managed().parameters(), amsgrad=True), "amsgrad"),
    "torch's clipping": (
        lambda: backward_then(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0)), "model.clip_grad_norm_"),
    "clipping by values": (
        lambda: backward_then(lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0)), "clip_grad_norm_"),
    "clipping by another norm": (lambda: backward_then(lambda m: m.clip_grad_norm_(1.0, 1.0)), "2-norm"),
    "a gradient that is assigned": (
        lambda: backward_then(lambda m: setattr(m[0].weight, "grad", torch.ones(32, 16))), "loss.backward()"),
    "writing weights with autograd on": (lambda: backward_then(lambda m: m[0].weight.mul_(2)), "gathered("),
    "weights in other memory": (
        lambda: backward_then(lambda m: setattr(m[0].weight, "data", torch.ones(32, 16))), "copy_(value)"),
    "a param of a wrong name": (lambda: managed().full_param("0.weigth"), "0.weight"),
    "a step without memory for a second backward": (retained_twice, "accumulate"),
    "a gradient of NaN": (nan_step, "NaN"),
    "copying the model": (lambda: copy.deepcopy(managed()), "state_dict"),
    "pickling the model": (lambda: pickle.dumps(managed()), "save_pretrained"),
    "another dtype afterwards": (lambda: managed().half(), "precision="),
    "compiling the whole": (lambda: torch.compile(managed())(torch.ones(2, 16)), "compile()"),
    "a checkpoint where no folder is": (lambda: gemini.save_checkpoint("no/where", *trained()), "create it"),
    "a checkpoint with the arguments the other way around": (
        lambda: (lambda m, o: gemini.save_checkpoint(m, "folder", o))(*trained()), "folder"),
    "a checkpoint that is not there": (lambda: gemini.load_checkpoint("nowhere", *trained()), "nowhere"),
    "a damaged checkpoint": (damaged_checkpoint, "is damaged"),
    "a checkpoint of another model": (another_models_checkpoint, "saved for another model"),
    "a plan of another model": (stale_plan, "the plan"),
    "a folder that is no model": (lambda: gemini.from_pretrained("nowhere", config()), "nowhere"),
    "a path instead of a config": (lambda: gemini.from_config("config.json", config()), "config"),
    "releasing what is not managed": (lambda: gemini.release(plain()), "GeminiDDP"),
}  # fmt: skip


def told(use: Callable[[], Any]) -> tuple[str, str]:
    """The class and the words of what is raised; nothing for what is not refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
    except REFUSALS as e:
        return type(e).__name__, " ".join(str(e).split())
    except Exception as e:
        return "", f"{type(e).__name__}: {e}"
    return "", "nothing"


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("config.json").write_text(json.dumps({"model_type": "gpt2"}))
        print("| done | told |\n|---|---|")
        for name, (use, word) in USES.items():
            kind, words = told(use)
            fine = bool(kind) and word in words
            bad += not fine
            words = words.replace(folder, ".").replace("|", "\\|")
            print(f"| {name} | {f'`{kind}`: ' if fine else f'NOT TOLD: {kind} '}{words} |")
        os.chdir("/")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
