"""What Gemini changes for the whole process: what ``gemini.patches`` lists and nothing else, and no program of torch or
PEFT without a managed model sees any of it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
    "torch.nn.Module.register_parameter": "from_config: params go home as they are made",
    "transformers.PreTrainedModel.init_weights": "from_config, trace: shapes are found out without drawing values",
    "transformers.PreTrainedModel._load_pretrained_model": "from_pretrained: shapes first, values when there are homes",
    "transformers.PreTrainedModel._finalize_model_loading": "the same",
    "transformers.core_model_loading.set_param_for_module": "the same: what was read goes home",
    "transformers.core_model_loading.ThreadPoolExecutor": "the same: one param is read after the other",
    "transformers.core_model_loading.tqdm": "the same: one bar is enough",
    "transformers.core_model_loading.is_dtensor": "from_pretrained over tp and ep: slices are read, not whole tensors",
    "transformers.core_model_loading.DtensorShardOperation": "the same",
    "transformers.core_model_loading.WeightConverter.convert": "from_pretrained: how params come from tensors is noted",
    "transformers.core_model_loading.WeightRenaming.convert": "the same",
    "torch.nn.functional.scaled_dot_product_attention": "trace: the memory that it takes on another device",
    "torch.nn.functional.dropout": "trace: the same",
    "transformers.models.llama.modeling_llama.apply_rotary_pos_emb": "trace: kernels that need not be here",
    "trl.trainer.grpo_trainer.gather_object": "a step of a trainer: ranks leave the model first; gather, of others too",
    "transformers.PreTrainedConfig.save_pretrained": "save_pretrained(dtype=): a config says what is written beside it",
}
"""What is put back when a call of ours ends. Functions are other ones for the thread of that call alone."""


def test_what_is_put_back_is_listed() -> None:
    """By its name. What a step, or who replaces it, has is nobody else's; what all threads have is replaced for one."""
    listed = {place.rpartition(".")[2] for place in FOR_THE_TIME_OF_A_CALL}
    of_one_object = {"state_dict", "_weight_conversions", "_loss_function", "gather", "is_loaded_in_4bit"}
    of_one_object |= {
        "backward",
        "_call",
        "add_adapter",
        "get_parameter",
        "num_key_value_groups",
        "training",
        "in_forward",
        "pad_token_id",
        "module",
    }
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("patch.object", "mock.patch.object", "mock.patch"), f"{path.name}: for all threads"
            if called == "signal.signal":
                assert "signal.signal" in FOR_THE_TIME_OF_A_CALL
            if called not in ("replaced", "replaced_for_thread") or path.name == "patches.py":
                continue
            owner, name = node.args[:2]  # type: ignore[attr-defined]
            if called == "replaced" and ast.unparse(owner).endswith(("state", "self")):
                continue
            allowed = (
                of_one_object if called == "replaced" else listed | {"step", "function"}
            )  # of from_pretrained and of turns, which say which
            what = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
            assert what in allowed, f"{path.name}:{node.lineno} {what}"  # type: ignore[attr-defined]


class Shared:
    """What two threads have."""

    @staticmethod
    def made(name: str) -> str:
        return f"plain {name}"

    def own(self) -> str:
        return "plain"


def in_other_thread(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=30)


def test_a_function_is_replaced_for_one_thread() -> None:
    before = dict(vars(Shared))
    with patches.replaced_for_thread(Shared, "made", lambda name: f"ours {name}"):
        assert Shared.made("a") == Shared().made("a") == "ours a"
        assert in_other_thread(lambda: Shared.made("a")) == "plain a"
        assert patches.original(Shared, "made")("a") == "plain a"
        with patches.replaced_for_thread(Shared, "made", lambda name: f"inner {name}"):
            assert Shared.made("a") == "inner a"
        assert Shared.made("a") == "ours a"
    with pytest.raises(KeyboardInterrupt), patches.replaced_for_thread(Shared, "own", lambda self: type(self)):
        assert Shared().own() is Shared
        raise KeyboardInterrupt
    assert dict(vars(Shared)) == before and not patches._by_thread


def test_threads_that_replace_a_function_leave_in_any_order() -> None:
    """The first one to come is the first one to go: put back in turn, it would leave what the second one has found."""
    before, is_in, may_go = dict(vars(Shared)), threading.Event(), threading.Event()

    def second() -> tuple[str, str]:
        with patches.replaced_for_thread(
            Shared, "made", lambda name: "second, of " + patches.original(Shared, "made")(name)
        ):
            is_in.set()
            assert may_go.wait(30)
            return Shared.made("b"), Shared().own()

    with ThreadPoolExecutor(1) as pool:
        with patches.replaced_for_thread(Shared, "made", lambda name: "first"):
            other = pool.submit(second)
            assert is_in.wait(30) and Shared.made("a") == "first"
        assert Shared.made("a") == "plain a"
        may_go.set()
        assert other.result(timeout=30) == ("second, of plain b", "plain")
    assert dict(vars(Shared)) == before and not patches._by_thread


@pytest.mark.parametrize("install", [patches.patch, patches.register])
def test_nothing_is_installed_that_is_not_listed(install: Any) -> None:
    with pytest.raises(AssertionError, match="is not in the table"):
        install("torch.nn.Linear.forward", None)
