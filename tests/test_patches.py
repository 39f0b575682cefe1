"""What Gemini changes for the whole process: what ``gemini.patches`` lists and nothing else, and no program of torch or
PEFT without a managed model sees any of it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import pytest

from gemini import patches
from tests.plain_programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*(ROOT / "gemini").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
OTHERS = ("torch", "transformers", "peft", "accelerate", "trl", "lightning", "safetensors", "builtins", "os", "signal")


def run(*command: str) -> str:
    """What a fresh process prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_programs_without_a_managed_model_come_out_as_in_a_fresh_process() -> None:
    fresh = run("-m", "tests.plain_programs", "fresh", *PROGRAMS).splitlines()
    wrapped = run("-m", "tests.plain_programs", "wrapped", *PROGRAMS).splitlines()
    assert len(fresh) == len(wrapped) == len(PROGRAMS)
    for before, after in zip(fresh, wrapped, strict=True):
        assert "Error;" not in before[:80] and before == after


def behaviour() -> dict[str, int]:
    """Every function, property and hook of other packages by its place, with which object it is."""
    found: dict[str, int] = {}

    def note(place: str, value: Any) -> None:
        if isinstance(value, (FunctionType, BuiltinFunctionType, property, staticmethod, classmethod, type)) or (
            type(value).__name__ in ("getset_descriptor", "method_descriptor", "wrapper_descriptor")
        ):
            found[place] = id(value)
        elif "hook" in place and isinstance(value, dict):
            found[place] = len(value)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in OTHERS or module is None:
            continue
        for key, value in list(vars(module).items()):
            note(f"{name}.{key}", value)
            if isinstance(value, type) and value.__module__ == name:
                for own, inner in list(vars(value).items()):
                    note(f"{name}.{key}.{own}", inner)
    return found


SCRIPT = """
import atexit, signal, sys, tempfile
import torch, transformers, peft, accelerate, safetensors.torch, torch._dynamo
import transformers.core_model_loading, torch.utils.checkpoint, torch.distributed.tensor
import tests.test_patches as this
from torch import nn

torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                  intermediate_size=32)
folder = tempfile.mkdtemp()
for _ in range(2):  # packages put much of their own in place at the first use
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(folder)
    plain = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(folder), peft.LoraConfig())
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
before = this.behaviour(), signal.getsignal(signal.SIGINT)
exits = atexit._ncallbacks()
import gemini
settings = gemini.GeminiConfig(precision="bf16", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))
for make in (
    lambda: gemini.from_config(config, settings),
    lambda: gemini.from_pretrained(folder, settings, adapt=lambda model: peft.get_peft_model(model, peft.LoraConfig())),
):
    model = make()
    optimizer = gemini.HybridAdam(model.parameters())
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    gemini.save_checkpoint(tempfile.mkdtemp() + "/c", model, optimizer)
model.compile(backend="eager")
model(input_ids=ids)
after = this.behaviour(), signal.getsignal(signal.SIGINT)
assert before[1] is after[1]
print(*(place for place in before[0] if after[0].get(place) != before[0][place]))
print(*(place for place in after[0] if place not in before[0] and place.rpartition(".")[0] in before[0]))
print(atexit._ncallbacks() > exits)
"""


def test_the_table_is_what_a_process_has() -> None:
    changed, added, exits = run("-c", SCRIPT).splitlines()
    hooks = {
        "torch.nn.modules.module._global_parameter_registration_hooks",
        "torch.nn.modules.module._global_module_registration_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
    }
    assert set(changed.split()) == hooks | {
        "torch.autograd.backward",
        "torch.autograd.graph.disable_saved_tensors_hooks",
    }
    assert added.split() == ["torch.nn.parameter.Parameter.data"]  # which only tensors had
    assert exits == "True" and "atexit.register" in patches.HOOKS


def test_what_stays_is_installed_by_the_table_alone() -> None:
    """No statement of ours gives an attribute to another package, or a function to one of its registers."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
            if not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("gemini"))
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root: Any = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                is_other = isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in imported
                assert not is_other, f"{path.name}:{node.lineno} {ast.unparse(target)}: use gemini.patches"  # type: ignore[attr-defined]
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            name = called.rpartition(".")[2]
            is_register = called in ("atexit.register", "os.register_at_fork", "sys.settrace", "sys.setprofile") or (
                name.startswith("register_") and name.endswith("_hook") and called.startswith(("register_", "torch."))
            )
            assert not is_register, f"{path.name}:{node.lineno} {called}: use gemini.patches"  # type: ignore[attr-defined]


FOR_THE_TIME_OF_A_CALL = {
    "signal.signal": "Ctrl-C is held back while a state changes, and by `gemini sft` until a checkpoint is written",
    "torch.nn.Module.register_parameter": "from_config: params go home as they are made; in this thread only",
    "transformers.PreTrainedModel.init_weights": "from_config, trace: shapes are found out without drawing values",
    "transformers.PreTrainedModel._load_pretrained_model": "from_pretrained: shapes first, values when there are homes",
    "transformers.PreTrainedModel._finalize_model_loading": "the same",
    "transformers.core_model_loading.set_param_for_module": "the same: what was read goes home",
    "transformers.core_model_loading.is_dtensor": "from_pretrained over tp and ep: slices are read, not whole tensors",
    "transformers.core_model_loading.DtensorShardOperation": "the same",
    "transformers.core_model_loading.WeightConverter.convert": "from_pretrained: how params come from tensors is noted",
    "transformers.core_model_loading.WeightRenaming.convert": "the same",
    "torch.nn.functional.scaled_dot_product_attention": "trace: the memory that it takes on another device",
    "torch.nn.functional.dropout": "trace: the same",
}
"""What is put back when a call of ours ends."""


def test_what_is_put_back_is_listed() -> None:
    """By its name, where :func:`replaced` is told one. What a step, or who replaces it, has is nobody else's."""
    listed = {place.rpartition(".")[2] for place in FOR_THE_TIME_OF_A_CALL}
    of_one_object = {"state_dict", "_weight_conversions", "_loss_function", "gather", "is_loaded_in_4bit"}
    of_one_object |= {"add_adapter", "get_parameter", "num_key_value_groups", "training", "in_forward", "module"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_ours = isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]).endswith(("state", "self"))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced" and not is_ours:
                assert isinstance(node.args[1], ast.Constant), f"{path.name}:{node.lineno}"
                assert node.args[1].value in listed | of_one_object, node.args[1].value
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal":
                assert "signal.signal" in FOR_THE_TIME_OF_A_CALL


@pytest.mark.parametrize("install", [patches.patch, patches.register])
def test_nothing_is_installed_that_is_not_listed(install: Any) -> None:
    with pytest.raises(AssertionError, match="is not in the table"):
        install("torch.nn.Linear.forward", None)
