"""The rooms of the house: imports point down only, constructors take few parts, what is private stays in its room.

These are the rules on form; everything else is judgement. Beside them: the ground floor knows no torch, names stay.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gemini

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gemini"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A file may import from its own floor and from those below it.
FLOORS = [
    (
        "gemini.errors",
        "gemini.ledger",
        "gemini.replacing",
        "gemini.sharing",
        "gemini.tiers",
        "gemini.waiting",
        "gemini.version",
    ),  # fmt: skip
    ("gemini.planning",),
    (
        "gemini.config",
        "gemini.interrupts",
        "gemini.kernels",
        "gemini.optim.around",
        "gemini.optim.elementwise",
        "gemini.optim.matrices",
        "gemini.patches",
        "gemini.rules",
        "gemini._C",
    ),  # fmt: skip
    ("gemini.memory",),
    ("gemini.machines",),
    ("gemini.ranks",),
    ("gemini.train",),
    ("gemini.optim",),
    ("gemini.pictures",),
    ("gemini.tracing",),
    ("gemini.pipeline",),
    ("gemini.jobs", "gemini.integrations"),
    ("gemini.cli",),
    ("gemini.__main__",),
]
# Rooms of gemini.train, from the ground up: data flows one way, and nothing calls up.
ROOMS = (
    "step", "observers", "params", "modules", "slices", "context", "gradients",
    "activations", "setup", "update", "sharding", "passes", "engine", "optimizers", "recording", "report",
    "second_look", "checkpoint", "wrap", "averages", "adapters", "ddp", "loading",
)  # fmt: skip
NO_TORCH = 2  # the first so many floors, and the settings
# Of DESIGN's names; plan and simulate come with the planner.
PUBLIC = {
    "GeminiDDP", "GeminiConfig", "HybridAdam", "MemoryBudget", "StaticPlacement", "save_checkpoint", "load_checkpoint",
    "GeminiError", "BudgetExceeded", "IllegalTransition", "PlanMismatch", "StorageError", "Tier", "MemoryTrace",
    "MemoryTracer", "trace",
}  # fmt: skip
MOST_ARGUMENTS = 7
# Constructors that take more arguments than that, or callables of other parts: (arguments, callables). No entry is
# added and no number raised; what has come down is entered anew, or goes.
BIG_CONSTRUCTORS = {
    "DrawnModel": (0, 1), "Exchange": (0, 1), "ManagedStage": (0, 1), "Meter": (0, 1), "Pipeline": (8, 0),
    "StandinDevice": (0, 1),
}  # fmt: skip
LIKE_TORCH = ("HybridAdam", "Muon")  # optimizers, whose hyperparameters are arguments as those of torch are


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> int:
    for floor, rooms in enumerate(FLOORS):
        if any(module == room or module.startswith(room + ".") for room in rooms):
            return floor
    raise AssertionError(f"{module} has no floor: say in FLOORS where it belongs")


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports when it runs, also inside functions. Imports for type checkers do not count:
    they make no dependency, and the two halves of a room may name each other's types."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: write the whole name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            if node.module != "gemini":  # ``from gemini import kernels`` names a room, not the face
                found.add(str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    if module == "gemini":
        return  # the face: imports lazily, from everywhere
    floor = floor_of(module)
    for imported in imports_of(path):
        if imported.startswith("gemini.") and imported.removeprefix("gemini.") not in gemini.__all__:
            assert floor_of(imported) <= floor, f"{module} reaches up to {imported}"


def test_the_measure_sees_an_import_upwards(tmp_path: Path) -> None:
    path = tmp_path / "layout.py"
    path.write_text("def late():\n    from gemini.train.engine import Engine\n    return Engine\n")
    assert "gemini.train.engine" in imports_of(path)
    assert floor_of("gemini.train.engine") > floor_of("gemini.planning.layout")
    with pytest.raises(AssertionError, match="no floor"):
        floor_of("gemini.attic")


def room_of(module: str) -> int:
    return ROOMS.index(module.split(".")[2])


def upward_in_train(path: Path, module: str) -> list[str]:
    """What a file of gemini.train imports from rooms above its own; imports for type checkers count as well."""
    found = (
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("gemini.train.")
    )
    return [name for name in found if room_of(name) > room_of(module)]


def test_rooms_of_a_training_step_point_down(tmp_path: Path) -> None:
    for path in FILES:
        module = module_of(path)
        if module.startswith("gemini.train."):
            assert not upward_in_train(path, module), module
    path = tmp_path / "hooks.py"
    path.write_text("if TYPE_CHECKING:\n    from gemini.train.engine import Engine\n")
    assert upward_in_train(path, "gemini.train.passes.hooks") == ["gemini.train.engine"]


def test_inside_the_product_the_face_is_not_used_below_the_jobs() -> None:
    """``import gemini`` in the lower rooms would hide where a name comes from, and let it come from above."""
    face = {"gemini", *(f"gemini.{name}" for name in gemini.__all__)}
    for path in FILES:
        if module_of(path) != "gemini" and floor_of(module_of(path)) < floor_of("gemini.jobs"):
            assert not face & imports_of(path), path


def test_the_ground_floor_and_the_plan_know_no_torch() -> None:
    for path in FILES:
        module = module_of(path)
        if module != "gemini" and (floor_of(module) < NO_TORCH or module == "gemini.config"):
            assert not {name for name in imports_of(path) if name.split(".")[0] in ("torch", "numpy")}, module


def test_import_gemini_costs_no_torch() -> None:
    code = "import sys, gemini, gemini.config; dir(gemini); gemini.MemoryBudget; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_public_names_are_there() -> None:
    assert PUBLIC <= set(gemini.__all__)
    for name in gemini.__all__:
        assert getattr(gemini, name) is not None
    assert set(dir(gemini)) >= PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'GeminiDP'"):
        _ = gemini.GeminiDP


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_begin_with_what_they_hold(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a file opens with a paragraph: what it holds, for whom"


def constructors_of(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Every constructor that is written out, with its numbers of arguments and of callables. What dataclasses and named
    tuples are made of does not count: they are values."""
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for function in made.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs][1:]
                types = [ast.unparse(argument.annotation) for argument in given if argument.annotation is not None]
                yield made.name, len(given), sum("Callable" in annotation for annotation in types)


def too_big(tree: ast.Module) -> list[tuple[str, int, int]]:
    found = []
    for name, arguments, callables in constructors_of(tree):
        most, most_callables = BIG_CONSTRUCTORS.get(name, (0, 0))
        most = 99 if name in LIKE_TORCH else max(most, MOST_ARGUMENTS)
        if arguments > most or callables > most_callables:
            found.append((name, arguments, callables))
    return found


def test_constructors_take_few_parts_and_no_callables_of_others() -> None:
    trees = [ast.parse(path.read_text()) for path in FILES]
    assert not [found for tree in trees for found in too_big(tree)], "a value counts as one; ask the part, or the chunk"
    # A part that is connected later takes its callables by another door.
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [function.lineno for function in functions if function.name == "connect"]
    seven, eight = (", ".join(f"a{i}" for i in range(count)) for count in (7, 8))
    for arguments, is_too_big in (
        (seven, False),
        (eight, True),
        ("ask: Callable[[], int]", True),
        ("*, on=None", False),
    ):
        tree = ast.parse(f"class Part:\n    def __init__(self, {arguments}): ...")
        assert bool(too_big(tree)) == is_too_big, arguments


def room_name(module: str) -> str:
    """Of gemini.train and gemini.memory every folder or file is a room, of the others the whole."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["train"], ["memory"]) else 2])


def private_names_made_in(tree: ast.Module) -> set[str]:
    """Functions, classes, attributes and variables, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_gemini"))  # those are marks on what users have


def is_own(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls")


def private_names_used_in(tree: ast.Module) -> set[str]:
    """Of other objects than itself, or imported."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gemini"):
            found.update(alias.name for alias in node.names)
    return {name for name in found if is_private(name)}


def test_private_names_are_used_in_their_own_room_only() -> None:
    made, everywhere = defaultdict[str, set[str]](set), set[str]()
    trees = {module_of(path): ast.parse(path.read_text()) for path in FILES}
    for module, tree in trees.items():
        made[room_name(module)] |= private_names_made_in(tree)
        everywhere |= private_names_made_in(tree)
    everywhere -= {*dir(torch.Tensor), *dir(nn.Module()), *dir(namedtuple("T", ()))}  # those are others' names, too
    everywhere -= {"_world", "_values"}  # torch's groups, and a sparse gradient's
    for module, tree in trees.items():
        assert not (private_names_used_in(tree) & everywhere) - made[room_name(module)], module
    used = ast.parse("from gemini.train.step import _now\ndef f(self, chunk):\n    return self._own + chunk._mine")
    assert private_names_used_in(used) == {"_now", "_mine"}


def test_bindings_alone_know_pybind11() -> None:
    sources = sorted((ROOT / "csrc").rglob("*.*"))
    assert sources, "no native sources"
    assert {p.stem for p in sources if "pybind11" in p.read_text()} == {"bindings"}


def test_native_code_knows_no_torch() -> None:
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        includes = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#include")]
        assert not [line for line in includes if "torch" in line or "ATen" in line or "c10" in line], path


_HELD = re.compile(r"threading\.(Condition|Event|Semaphore|BoundedSemaphore|Barrier)\b|\.acquire\(\)")
_MAY_HOLD = {
    "gemini.machines.measure": "a measurement, and no training",
    "gemini.waiting": "the latch itself",
}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_threads_share_what_no_interrupt_can_leave_held(path: Path) -> None:
    """Not what Python writes in Python around a lock; :mod:`gemini.waiting` says why, and what there is instead."""
    if module_of(path) not in _MAY_HOLD:
        code = [line.split("#")[0] for line in path.read_text().splitlines() if "``" not in line]
        assert not [line for line in code if _HELD.search(line)]
