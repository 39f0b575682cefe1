"""The words of the hunt: public functions of torch, transformers, PEFT and Lightning that touch params, optimizers or
state, found by introspection; which of them drawn programs use, found in their sources; and which they leave out, why.

    python tests/hunts/program_words.py            # the counts
    python tests/hunts/program_words.py --write    # docs/program_words.md anew
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "program_words.md"


def _methods(kind: type, keep: Callable[[str], Any] = lambda name: True) -> list[str]:
    """Public methods and properties that a class defines itself, or inherits from its own package."""
    package = kind.__module__.split(".")[0]
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] == package]
    names = {
        name for base in own for name, value in vars(base).items() if callable(value) or isinstance(value, property)
    }
    return sorted(name for name in names if not name.startswith("_") and keep(name))


def _functions(module: ModuleType, keep: Callable[[str], Any] = lambda name: True) -> list[str]:
    """Public functions and classes that a module has of its own package."""
    package = module.__name__.split(".")[0]
    named = getattr(module, "__all__", None) or vars(module)
    return sorted(
        name
        for name in named
        if not name.startswith("_") and keep(name) and callable(value := getattr(module, name, None))
        and str(getattr(value, "__module__", package) or package).split(".")[0] in (package, "torch")
    )  # fmt: skip


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


@cache
def groups() -> dict[str, tuple[str, ...]]:
    """The words by where they are found."""
    import peft
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.nn.utils.prune
    import torch.nn.utils.stateless
    import transformers
    from lightning import pytorch as pl
    from peft.tuners.lora import LoraLayer, LoraModel
    from torch.distributed.checkpoint import state_dict as dcp_state
    from transformers import optimization

    tensor = _methods(torch.Tensor, _writes) + [n for n in dir(torch._C.TensorBase) if _writes(n) and n[0] != "_"]
    at_hand = ["data", "grad", "detach", "requires_grad", "register_hook", "register_post_accumulate_grad_hook"]
    words: dict[str, Iterable[str]] = {
        "torch.nn.Module": _methods(torch.nn.Module),
        "torch.Tensor, what writes": {*tensor, *at_hand},
        "torch._foreach, what writes": [n for n in dir(torch) if n.startswith("_foreach_") and _writes(n)],
        "torch.nn.init": [n for n in _functions(torch.nn.init) if _writes(n)],
        "torch.nn.utils": _functions(torch.nn.utils),
        "torch.nn.utils.parametrize": _functions(torch.nn.utils.parametrize),
        "torch.nn.utils.parametrizations": _functions(torch.nn.utils.parametrizations),
        "torch.nn.utils.prune": [n for n in _functions(torch.nn.utils.prune) if n[0].islower()],
        "torch.optim": [n for n in _functions(torch.optim) if n[0].isupper()],
        "torch.optim.Optimizer": _methods(torch.optim.Optimizer),
        "torch.optim.lr_scheduler": [n for n in _functions(torch.optim.lr_scheduler) if n[0].isupper()],
        "torch.optim.swa_utils": _functions(torch.optim.swa_utils),
        "torch.amp.GradScaler": _methods(torch.amp.GradScaler),
        "torch.func": _functions(torch.func),
        "torch.autograd": ["backward", "grad", "functional", "graph", "detect_anomaly", "Function"],
        "torch.distributed.checkpoint": [n for n in _functions(dcp) if n[0].islower()],
        "torch.distributed.checkpoint.state_dict": [n for n in _functions(dcp_state) if n[0].islower()],
        "transformers.PreTrainedModel": set(_methods(transformers.PreTrainedModel)) - set(_methods(torch.nn.Module)),
        "transformers, schedules": [v.value for v in transformers.SchedulerType] + ["get_scheduler"],
        "transformers.optimization": [n for n in _functions(optimization) if n.startswith("get_") or n == "Adafactor"],
        "transformers.Trainer": _methods(transformers.Trainer),
        "peft": [n for n in _functions(peft) if n[0].islower()],
        "peft, methods": [n.removesuffix("Config") for n in dir(peft) if re.fullmatch(r"[A-Z]\w+Config", n)],
        "peft.PeftModel": set(_methods(peft.PeftModel)) - set(_methods(torch.nn.Module)),
        "peft.tuners, models": set(_methods(LoraModel)) - set(_methods(torch.nn.Module)),
        "peft.tuners, layers": set(_methods(LoraLayer)) - set(_methods(torch.nn.Module)),
        "lightning.LightningModule": [
            n for n in vars(pl.LightningModule) if n[0] != "_" and callable(getattr(pl.LightningModule, n))
        ],
        "lightning.Trainer": [n for n in vars(pl.Trainer) if n[0] != "_"],
        "lightning, callbacks": list(pl.callbacks.__all__),
    }
    return {where: tuple(sorted({*names})) for where, names in words.items()}


_BRIDGES = "a framework's own loop: tests/integrations compares it with the stock one"
_SHOW = "reads names, or prints; no values"
_DEVICE = "another device or dtype for all of a model: refused or nothing, tests/train/test_wrong_uses.py"
_SHAPE = "gives the tensor itself another shape, memory or type: tests/train/test_access.py"
_NOT_PARAMS = "about data, devices, hubs or tokens; no params, optimizers or state"
_LOADING = "loads or saves files of transformers: tests/train/test_loading.py, tests/integrations"

EXCLUDED: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers.Trainer": ((r".*", _BRIDGES),),
    "lightning.LightningModule": ((r".*", _BRIDGES),),
    "lightning.Trainer": ((r".*", _BRIDGES),),
    "lightning, callbacks": ((r".*", _BRIDGES),),
    "transformers.PreTrainedModel": (
        (r".*(from_pretrained|save_pretrained|push_to_hub|card|quantiz|hub).*", _LOADING),
        (
            r".*(compile|kernel|attn|attention|experts|generate|pipeline|tensor_parallel|device|tp_|memory).*",
            _NOT_PARAMS,
        ),
        (r".*", "of transformers' models: tests/train/test_model_zoo.py trains them, drawn programs are smaller"),
    ),
    "torch.nn.Module": (
        (r"extra_repr|get_submodule|named_children|children|T_destination|call_super_init|dump_patches", _SHOW),
        (r"cuda|ipu|xpu|mtia|half|bfloat16|float", _DEVICE),
        (r"compile", "tests/train/test_compiled.py: compiling takes seconds"),
        (r"set_submodule|register_module", "replaces modules, as `add_module`, which is drawn"),
        (r"to_empty", "leaves values that nobody wrote: there is nothing to compare"),
    ),
    "torch.Tensor, what writes": (
        (r"set_", "torch tells nobody of it: docs/programs.md, not detected"),
        (
            r"(sparse|coalesce|index_put|names|rename|resize|as_strid|.*squeeze|.*transpose|t|swap.*|detach|un).*_",
            _SHAPE,
        ),
        (r".*", "one of many that write element by element: some twenty of them are drawn, all go one way"),
    ),
    "torch._foreach, what writes": ((r".*", "one of many that write element by element, as above"),),
    "torch.func": ((r"debug_unwrap|linearize|functionalize|stack_module_state", "no other use of params than `vmap`"),),
    "torch.optim": (
        (
            r".*",
            "stock optimizers find no gradients of a managed model: tests/train/test_optimizer_refusals.py",
        ),
    ),
    "torch.distributed.checkpoint": ((r".*", _NOT_PARAMS + ": storages and planners"),),
    "transformers.optimization": ((r".*", "what `get_scheduler` calls by name"),),
    "peft": ((r".*(hub|cast|prepare|map|from|check|is_|layer_status|model_status|type|device).*", _SHOW),),
    "peft, methods": ((r".*", "docs/guide/lora.md has the table of methods, which a script makes"),),
}
"""By group: patterns of words that are left out, and why. The first that fits counts; what is drawn is not left out."""


LOOPS = ("transformers.Trainer", "lightning.LightningModule", "lightning.Trainer", "lightning, callbacks")
"""Groups of which no program uses a word: they have no loop of a framework."""


@cache
def used() -> frozenset[str]:
    """Every name that drawn programs, and what they call of the hunt, read or call; and every string in them."""
    from tests.hunts.program_draw import each_part
    from tests.hunts.program_source import source

    here = Path(__file__).parent
    texts = [source(program) for program in each_part()]
    texts += [path.read_text() for path in (here / "program_state.py", here.parent / "plain_programs.py")]
    found: set[str] = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.name)
            elif isinstance(node, ast.FunctionDef):  # an override: get_extra_state
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found | {name.removesuffix("Config") for name in found})


def drawn(where: str) -> list[str]:
    """Words that programs use."""
    return [word for word in groups()[where] if word in used() and where not in LOOPS]


def left_out(where: str) -> dict[str, list[str]]:
    """Words by the reason for which they are left out."""
    found: dict[str, list[str]] = {}
    for word in groups()[where]:
        if word not in drawn(where):
            why = next((why for pattern, why in EXCLUDED.get(where, ()) if re.fullmatch(pattern, word)), None)
            if why is not None:
                found.setdefault(why, []).append(word)
    return found


def not_drawn(where: str) -> list[str]:
    """Words that neither programs use nor the table leaves out."""
    without = {word for words in left_out(where).values() for word in words}
    return [word for word in groups()[where] if word not in drawn(where) and word not in without]


def page() -> str:
    """The page of the documentation."""
    import lightning
    import peft
    import torch
    import transformers

    versions = (torch, transformers, peft, lightning)
    told = ", ".join(f"{module.__name__} {module.__version__.split('+')[0]}" for module in versions)
    lines = [
        "# The words of the program hunt", "",
        "[Drawn programs](programs.md) are made of public functions of torch, transformers, PEFT and Lightning. Here",
        "are those that touch params, optimizers or state: which of them programs use, and which not. The page is made",
        f"by `python tests/hunts/program_words.py --write` ({told}): words are found",
        "by introspection, use in the sources of programs.",
        "",
        "| where | words | drawn | left out | not drawn |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    rows = [
        (w, len(groups()[w]), len(drawn(w)), sum(map(len, left_out(w).values())), len(not_drawn(w))) for w in groups()
    ]
    lines += [f"| {where} | {' | '.join(map(str, counts))} |" for where, *counts in rows]
    lines += [f"| all | {' | '.join(str(sum(row[at] for row in rows)) for at in range(1, 5))} |"]
    for where in groups():
        lines += ["", f"## {where}", ""]
        lines.append(f"Drawn: {_told(drawn(where))}.")
        if not_drawn(where):
            lines += ["", f"Not drawn: {_told(not_drawn(where))}."]
        for why, words in left_out(where).items():
            lines += ["", f"Left out ({why}): {_told(words)}."]
    return "\n".join(lines) + "\n"


def _told(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "none"


def main() -> None:
    if "--write" in sys.argv:
        PAGE.write_text(page())
    for where in groups():
        counts = (len(drawn(where)), len(not_drawn(where)))
        print(f"{where}: {len(groups()[where])} words, {counts[0]} drawn, {counts[1]} not drawn: {not_drawn(where)}")


if __name__ == "__main__":
    main()
