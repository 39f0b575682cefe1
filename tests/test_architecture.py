"""The rooms of the house: imports point down only, the ground floor knows no torch, files stay short, names stay."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemini

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gemini"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A file may import from its own floor and from those below it.
FLOORS = [
    (
        "gemini.errors",
        "gemini.schema",
        "gemini.tiers",
        "gemini.waiting",
        "gemini.memory.chunks.states",
        "gemini.version",
    ),  # fmt: skip
    ("gemini.planning",),
    (
        "gemini.config",
        "gemini.interrupts",
        "gemini.kernels",
        "gemini.kernels_checks",
        "gemini.kernels_compact",
        "gemini.kernels_cuda",
        "gemini.kernels_io",
        "gemini.kernels_native",
        "gemini.kernels_reference",
        "gemini.kernels_sums",
        "gemini.optim.compact",
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
    ("gemini.testing",),  # nothing of the product may import it
]
# Rooms of gemini.train, from the ground up: data flows one way, and nothing calls up.
ROOMS = (
    "own_work", "step", "write_observers", "observers", "params", "modules", "slices", "context", "gradients",
    "activations", "setup", "update", "sharding", "passes", "engine", "optimizers", "recording", "report",
    "checkpoint", "unmanage", "adapters", "managed_class", "others", "ddp", "loading",
)  # fmt: skip
NO_TORCH = 2  # the first so many floors, and the settings
# Of DESIGN's names; plan and simulate come with the planner.
PUBLIC = {
    "GeminiDDP", "GeminiConfig", "HybridAdam", "MemoryBudget", "StaticPlacement", "save_checkpoint", "load_checkpoint",
    "GeminiError", "BudgetExceeded", "IllegalTransition", "PlanMismatch", "StorageError", "Tier", "MemoryTrace",
    "MemoryTracer", "trace",
}  # fmt: skip
SOFT_LIMIT, HARD_LIMIT = 600, 800


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
def test_files_are_short_and_begin_with_what_they_hold(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= HARD_LIMIT, f"{len(lines)} lines: about {SOFT_LIMIT} are meant to be the limit"
    assert ast.get_docstring(ast.parse(path.read_text())), "a file opens with a paragraph: what it holds, for whom"


def test_of_the_checkpoint_files_one_sees_the_engine() -> None:
    """The others are given the few values that they work with."""
    texts = {path.stem: path.read_text() for path in (PACKAGE / "train" / "checkpoint").glob("*.py")}
    assert {name for name, text in texts.items() if re.search(r"\b_?[eE]ngine(_of)?\b", text)} == {"saving"}
    assert not re.search(r"\bengine(\.\w+)+ = ", texts["saving"]), "what an engine has it changes itself"


def takers_of_the_engine(path: Path) -> list[str]:
    """Functions of a file, no methods, that take an Engine."""
    found = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return [f.name for f in found for arg in (*f.args.args, *f.args.kwonlyargs)
            if arg.annotation is not None and re.search(r"\bEngine\b", ast.unparse(arg.annotation))]  # fmt: skip


def test_the_engine_makes_the_parts_and_is_no_part_itself(tmp_path: Path) -> None:
    text = (PACKAGE / "train" / "engine.py").read_text()
    members = {*re.findall(r"^    def (\w+)", text, re.M), *re.findall(r"\bself\.(\w+)(?=,[^=\n]*=| = )", text)}
    assert len(members) <= 25, sorted(members)
    assert not [(path, names) for path in FILES if (names := takers_of_the_engine(path))], "give them what they need"
    path = tmp_path / "late.py"
    path.write_text("def late(engine: Engine | None) -> None: ...\n")
    assert takers_of_the_engine(path) == ["late"]


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
    "gemini.testing.clock": "a gate of copy threads, which the training thread opens inside WHOLE",
    "gemini.machines.measure": "a measurement, and no training",
    "gemini.waiting": "the latch itself",
}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_threads_share_what_no_interrupt_can_leave_held(path: Path) -> None:
    """Not what Python writes in Python around a lock; :mod:`gemini.waiting` says why, and what there is instead."""
    if module_of(path) not in _MAY_HOLD:
        code = [line.split("#")[0] for line in path.read_text().splitlines() if "``" not in line]
        assert not [line for line in code if _HELD.search(line)]
