"""How large the house is and how far one walks in it: lines, files, ways, and what one step passes through.

    python benchmarks/house.py
    python benchmarks/house.py --against ../before --out benchmarks/reports/house.md
    python benchmarks/house.py --files                    # the files of a step in memory, with the calls in each
    python benchmarks/house.py --lines gemini/jobs csrc   # lines of files and folders alone

What is counted in the text: lines (as ``wc -l`` counts them, and of code alone: neither blank, comment nor docstring),
files, and the habits that make code hard to follow. What is counted at run time, by a process with the checkout's own
code: five Linear layers (10 params) are wrapped, trained for two steps, saved and loaded under a call trace of the
training thread. A hop is a call that goes from one file of ``gemini/`` to another. Kernels are the reference in torch,
so that native code hides nothing, and a checkout need not be built.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from _report import add_out, head, publish, table

HERE = Path(__file__).resolve()
# What is to be reached, beside the figure; an empty text where the figure is only watched.
GOALS = {
    "gemini/, lines": "44,000",
    "gemini/, files": "210",
    "gemini/train/, lines": "19,000",
    "tests/, lines": "52,000",
    "benchmarks/, lines": "10,000",
    "connect methods": "0",
    "callables in annotations of constructors": "5",
    "lines in train/ that test for None": "500",
    "lines of Engine.__init__": "70",
    "functions that walk the model in a wrap": "5",
    "hops of a step on NVMe": "450",
    "hops of a save on NVMe": "600",
    "hops of a wrap on NVMe": "700",
    "lines of code per comment in memory/": "15",
    "lines of code per comment in train/": "15",
    "duplicate class names": "3",
    "# fmt: skip": "0",
    "docs/architecture.md, lines": "120",
}
HABITS = [
    "connect methods",
    "callables in annotations of constructors",
    "lines in train/ that test for None",
    "duplicate class names",
    "# fmt: skip",
    "assignments of three values and more",
    "docstrings that begin with Of, What, Who, Where, As",
    "Tier.NVME",
]
LAYOUT = [tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER]
WALKERS = ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers")


# ---- in the text ----------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """One Python file."""

    path: Path
    room: str = ""
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def num_code(self) -> int:
        """Lines that are neither blank, comment nor docstring."""
        code: set[int] = set()
        for token in self.tokens:
            if token.type not in (tokenize.COMMENT, *LAYOUT):
                code.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
                code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        return len(code)

    @property
    def num_comments(self) -> int:
        """Comments on lines of their own and behind code; no rulers, and nothing that is said to a tool."""
        found = (token.string for token in self.tokens if token.type == tokenize.COMMENT)
        return sum(not re.match(r"#!|#\s*([-=#]{3}|type:|noqa|fmt:|pragma|mypy:|ruff:|isort:)", text) for text in found)

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def methods(self, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        """Methods called ``name``, with the names of their classes."""
        for owner in self.classes:
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    yield owner.name, node


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    """All but ``self``; ``*args`` and ``**kwargs`` are one each."""
    args = function.args
    starred = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred][1:]


def read(paths: list[Path], root: Path) -> list[Source]:
    """The Python files among and below ``paths``, each with its room: the folder that it lies in."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [Source(file, str(file.parent.relative_to(root))) for file in files]


def in_the_text(root: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Figures of the checkout at ``root``, and what was found, for those whose places one wants to know."""
    figures: dict[str, float] = {}
    for name in ("gemini", "gemini/train", "gemini/memory", "tests", "benchmarks", "integrations"):
        sources = read([root / name], root)
        figures[f"{name}/, lines"] = sum(source.num_lines for source in sources)
        figures[f"{name}/, lines of code"] = sum(source.num_code for source in sources)
        figures[f"{name}/, files"] = len(sources)
    house = read([root / "gemini"], root)
    found = _habits(house)
    figures |= {name: len(places) for name, places in found.items()}
    engine = [node for source in house for owner, node in source.methods("__init__") if owner == "Engine"]
    figures["lines of Engine.__init__"] = sum((node.end_lineno or 0) - node.lineno + 1 for node in engine)
    for name in ("memory", "train"):
        part = [source for source in house if source.room.startswith(f"gemini/{name}")]
        comments = sum(source.num_comments for source in part)
        figures[f"lines of code per comment in {name}/"] = round(sum(s.num_code for s in part) / max(comments, 1), 1)
    pages = root / "docs" / "architecture.md"
    figures["docs/architecture.md, lines"] = len(pages.read_text().splitlines()) if pages.exists() else 0
    return figures, found


def _habits(house: list[Source]) -> dict[str, list[str]]:
    """The places of each habit."""
    found: dict[str, list[str]] = defaultdict(list)
    names = Counter(node.name for source in house for node in source.classes)
    for source in house:

        def note(what: str, node: ast.AST, name: str, source: Source = source) -> None:
            found[what].append(f"{source.room}/{source.path.name}:{getattr(node, 'lineno', 0)} {name}")

        for owner, method in source.methods("connect"):
            note("connect methods", method, owner)
        for owner, method in source.methods("__init__"):
            for arg in _arguments(method):
                if arg.annotation is not None and "Callable" in ast.unparse(arg.annotation):
                    note("callables in annotations of constructors", arg, f"{owner}({arg.arg})")
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and names[node.name] > 1:
                note("classes whose name another has", node, node.name)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "Tier.NVME":
                note("Tier.NVME", node, "")
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2:
                    note("assignments of three values and more", node, ast.unparse(node)[:60])
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                if re.match(r"(Of|What|Who|Whose|Where|As|The same)\b", ast.get_docstring(node) or ""):
                    note("docstrings that begin with Of, What, Who, Where, As", node, node.name)
        if source.room.startswith("gemini/train"):
            asking = (line.strip() for line in source.text.splitlines() if re.search(r"\bis (not )?None\b", line))
            found["lines in train/ that test for None"] += [f"{source.path.name} {line}" for line in asking]
        found["# fmt: skip"] += [f"{source.path.name}"] * source.text.count("# fmt: skip")
    found["duplicate class names"] = sorted(name for name, number in names.items() if number > 1)
    return {name: found[name] for name in HABITS}


# ---- at run time: in a process with the checkout's own code ---------------------------------------------------------


class Walk:
    """The functions of Gemini that one thread enters, in order."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.root):
            self.files.append(frame.f_code.co_filename)

    def of(self, do: Callable[[], Any]) -> Any:
        sys.setprofile(self)
        try:
            return do()
        finally:
            sys.setprofile(None)

    def figures(self) -> dict[str, int]:
        hops = sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))
        return {"files": len(set(self.files)), "hops": hops, "calls": len(self.files)}

    def by_file(self) -> dict[str, int]:
        """Calls in each file, most of them first."""
        return dict(Counter(name.removeprefix(self.root + "/") for name in self.files).most_common())


def at_run_time() -> dict[str, Any]:
    """Figures of the ``gemini`` that this process imports."""
    import torch
    from torch import nn

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import gemini
    from tests import kernel_settings

    root = str(Path(gemini.__file__).parent)

    class Block(nn.Module):
        """A numbered part, which is hooked as an entrance."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    def blocks(number: int) -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(number)))

    def configs(folder: Path) -> dict[str, gemini.GeminiConfig]:
        memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
        on_nvme = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
        how = {
            "in memory": {"overlap": False},
            "NVMe": {"overlap": False, "placement": on_nvme},
            "NVMe, overlapped": {"overlap": True, "placement": on_nvme},
        }
        return {name: gemini.GeminiConfig(precision="bf16", memory=memory, **these) for name, these in how.items()}

    def phases(config: gemini.GeminiConfig, folder: Path) -> dict[str, Walk]:
        torch.manual_seed(0)
        found: dict[str, Walk] = defaultdict(lambda: Walk(root))
        x = torch.randn(4, 16, dtype=torch.bfloat16)
        bare = blocks(5)
        model = found["wrap"].of(lambda: gemini.GeminiDDP(bare, config))
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
        for _ in range(2):  # the second step is that of every later one
            for name in ("forward", "backward", "step", "zero_grad"):
                found.pop(name, None)
            loss = found["forward"].of(lambda: model(x).float().square().mean())
            found["backward"].of(loss.backward)
            found["step"].of(optimizer.step)
            found["zero_grad"].of(optimizer.zero_grad)
        found["save"].of(lambda: gemini.save_checkpoint(folder / "saved", model, optimizer))
        found["load"].of(lambda: gemini.load_checkpoint(folder / "saved", model, optimizer))
        return found

    def calls_of_unmoved_module(config: gemini.GeminiConfig) -> float:
        """What a block costs inside the model when every weight stays where it is: more blocks, by how many more.
        What is per chunk (params become ordinary, and guarded again) is counted too.
        """

        def calls(num_blocks: int) -> int:
            model, seen = gemini.GeminiDDP(blocks(num_blocks), config), Walk(root)
            with torch.no_grad():
                model(torch.zeros(1, 16, dtype=torch.bfloat16))
                seen.of(lambda: model(torch.zeros(1, 16, dtype=torch.bfloat16)))
            return len(seen.files)

        return (calls(40) - calls(20)) / 20

    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, kernel_settings.use_isa("reference"):
        for label, config in configs(Path(name)).items():
            folder = Path(name) / label.replace(" ", "_")
            folder.mkdir()
            walks = phases(config, folder)
            report[label] = {phase: seen.figures() for phase, seen in walks.items()}
            if label == "in memory":
                report["files"] = {phase: walks[phase].by_file() for phase in ("forward", "backward", "step")}
        report["unmoved module"] = calls_of_unmoved_module(configs(Path(name))["in memory"])
        with walks_of_the_model(blocks(5), root) as (model, walkers):
            gemini.GeminiDDP(model, configs(Path(name))["NVMe"])
        report["walkers"] = dict(walkers.most_common())
    return report


class walks_of_the_model:
    """Inside this block the functions of Gemini are counted that iterate over the modules, params or buffers of the
    whole of ``model``, by how often they do.
    """

    def __init__(self, model: Any, root: str) -> None:
        self.model, self.root, self.walkers = model, root, Counter[str]()

    def __enter__(self) -> tuple[Any, Counter[str]]:
        from torch import nn

        self.before = {name: getattr(nn.Module, name) for name in WALKERS}
        for name, walker in self.before.items():
            setattr(nn.Module, name, self._noted(walker))
        return self.model, self.walkers

    def __exit__(self, *_: object) -> None:
        from torch import nn

        for name, walker in self.before.items():
            setattr(nn.Module, name, walker)

    def _noted(self, walker: Callable[..., Any]) -> Callable[..., Any]:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_name.startswith("<"):  # a comprehension of a function
                frame = frame.f_back
            if module is self.model and frame is not None and frame.f_code.co_filename.startswith(self.root):
                place = frame.f_code.co_filename.removeprefix(self.root + "/")
                self.walkers[f"{place} {frame.f_code.co_name}"] += 1
            return walker(module, *args, **kwargs)

        return noted


def run_with(root: Path) -> dict[str, Any]:
    """Figures at run time of the checkout at ``root``, from a process of its own."""
    with tempfile.NamedTemporaryFile("r") as file:
        env = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, str(HERE), "--run-time", file.name], check=True, cwd=root, env=env)
        report: dict[str, Any] = json.load(file)
    return report


# ---- the report ------------------------------------------------------------------------------------------------------


def measure(root: Path) -> dict[str, Any]:
    figures, found = in_the_text(root)
    run = run_with(root)
    figures["functions that walk the model in a wrap"] = len(run["walkers"])
    figures["walks of the model in a wrap"] = sum(run["walkers"].values())
    for phase in ("wrap", "step", "save", "load"):
        figures[f"hops of a {phase} on NVMe"] = run["NVMe"][phase]["hops"]
    for phase in ("forward", "backward", "step"):
        figures[f"hops of a {phase} in memory"] = run["in memory"][phase]["hops"]
    figures["Python calls of a module that moves nothing"] = round(run["unmoved module"], 1)
    return {"figures": figures, "found": found, "run": run}


def report(measured: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown, a column for each checkout."""
    names = [*dict.fromkeys(name for one in measured.values() for name in one["figures"])]
    rows = []
    for name in names:
        rows.append([name, GOALS.get(name, ""), *(f"{one['figures'].get(name, 0):,}" for one in measured.values())])
    lines = table(["figure", "at most", *measured], rows)
    lines += ["## What a step passes through", "", "Files of gemini/ entered / hops from one to another / calls.", ""]
    rows = []
    for label in ("in memory", "NVMe", "NVMe, overlapped"):
        for phase in ("wrap", "forward", "backward", "step", "zero_grad", "save", "load"):
            cells = (" / ".join(str(n) for n in one["run"][label][phase].values()) for one in measured.values())
            rows.append([f"{label}: {phase}", *cells])
    return lines + table(["phase", *measured], rows)


def places(one: dict[str, Any]) -> list[str]:
    """Where the habits of a checkout are, without those that are in hundreds of places."""
    lines = []
    for name, found in {**one["found"], "functions that walk the model in a wrap": [*one["run"]["walkers"]]}.items():
        if 0 < len(found) <= 120 and any(found):
            lines += [f"## {name}", "", *(f"- {place}" for place in found), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=HERE.parents[1], help="default: this one")
    parser.add_argument("--against", type=Path, action="append", default=[], help="another checkout, a column before")
    parser.add_argument("--places", action="store_true", help="also where each habit was found")
    parser.add_argument("--files", action="store_true", help="also the files of a step in memory, with calls in each")
    parser.add_argument("--lines", nargs="+", type=Path, help="count only the lines of these files and folders")
    parser.add_argument("--run-time", type=Path, help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args()
    if args.run_time:
        args.run_time.write_text(json.dumps(at_run_time()))
        return
    if args.lines:
        rows = []
        for path in args.lines:
            sources = read([path.resolve()], Path("/"))
            rows.append([path, len(sources), sum(s.num_lines for s in sources), sum(s.num_code for s in sources)])
        publish(table(["path", "files", "lines", "of code"], rows), args.out)
        return
    measured = {_title(root): measure(root.resolve()) for root in (*args.against, args.checkout)}
    lines = [*head("The house", ['Lines of Python files; goals are those of "Fewer ways".']), *report(measured)]
    last = list(measured.values())[-1]
    if args.places:
        lines += places(last)
    if args.files:
        for phase, files in last["run"]["files"].items():
            lines += ["", f"{phase}: " + ", ".join(f"{name} {calls}" for name, calls in files.items())]
    publish(lines, args.out)


def _title(root: Path) -> str:
    """The commit that a checkout is at, with a plus where files were changed."""
    ask = ["git", "-C", str(root), "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    told = subprocess.run(ask, capture_output=True, text=True)
    return told.stdout.strip() or root.resolve().name


if __name__ == "__main__":
    main()
