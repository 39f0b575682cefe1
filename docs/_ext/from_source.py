"""What the pages take from the source instead of repeating it: error messages, options of the commands, update rules,
and what each file holds.

`messages()` reads the raise sites with `ast`, nothing is imported or run; what a message fills in is shown as "…".
`folders()` reads the docstrings that files open with. The directives `error-messages`, `command-help` and `file-tables`
put them on a page, and `update-rules` the registry of optimizers. The tests of the pages use the same functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
GAP = "…"

USERS_VALUES = ("ValueError", "TypeError", "KeyError", "AttributeError", "RuntimeError", "TimeoutError", "ImportError")
WARNING, REFUSED_JOB = "warning", "JobError"


class Message(NamedTuple):
    """One message of the source."""

    kind: str
    """The class it is raised with, or "warning"."""
    text: str
    path: Path
    line: int


@cache
def error_classes() -> tuple[str, ...]:
    """The classes of `gemini/errors.py`, in their order."""
    tree = ast.parse((ROOT / "gemini" / "errors.py").read_text())
    return tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))


@cache
def messages() -> tuple[Message, ...]:
    """Every message that the package raises or warns with, file by file, but the kernels' checks of our own calls.

    Raises:
        ValueError: where a message is put together in a way that cannot be read here.
    """
    found: list[Message] = []
    for path in sorted([*(ROOT / "gemini").rglob("*.py"), *(ROOT / "integrations").glob("*.py")]):
        if path.parent.name == "kernels":
            continue
        tree = ast.parse(path.read_text())
        named: dict[str, ast.AST] = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        named |= {node.targets[0].id: node.value for node in tree.body
                  if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
            kind, words = _kind(call)
            for text in _texts(words, named) if kind else ():
                text = re.sub(f"{GAP}(?: ?{GAP})+", GAP, re.sub(r"\{[\w.]+(?:!r)?\}", GAP, text))
                if any(character.isalpha() for character in text):
                    found.append(Message(kind, text, path, call.lineno))
                elif not _passes_on(words):
                    raise ValueError(f"{path}:{call.lineno}: docs/_ext/from_source.py cannot read this message")
    return tuple(found)


def _kind(call: ast.Call) -> tuple[str, ast.expr]:
    """What is raised, if anything, and the words of it."""
    func, kinds = call.func, (*error_classes(), *USERS_VALUES, REFUSED_JOB)
    if isinstance(func, ast.Name) and func.id in kinds:
        return func.id, call.args[0]
    if isinstance(func, ast.Name) and func.id == "refuse_in":  # a function in which `p.grad` raises this
        return "ParamAccessError", call.args[1]
    if isinstance(func, ast.Name) and func.id == "warn":
        return WARNING, call.args[0]
    if isinstance(func, ast.Call) and isinstance(func.func, ast.Name) and func.func.id == "error_called":
        return "StorageError", call.args[0]  # what another rank raised: most often that it could not write
    if isinstance(func, ast.Name) and func.id == "of_storage":  # an error of the drive gets these words
        return "StorageError", call.args[0]
    is_type = isinstance(func, ast.Call) and isinstance(func.func, ast.Name) and func.func.id == "type"
    if is_type and not isinstance(call.args[0], ast.GeneratorExp):  # that one copies a sequence
        return "BudgetExceeded", call.args[0]  # `raise type(e)(...) from e` adds words to a refusal of the ledger
    return "", call.args[0]


def _passes_on(words: ast.expr) -> bool:
    """Whether a message is only what another one said: ``f"{e}"``, ``*e.args``, ``str(e)``."""
    is_str = isinstance(words, ast.Call) and isinstance(words.func, ast.Name) and words.func.id == "str"
    return is_str or isinstance(words, ast.JoinedStr | ast.Starred)


def _texts(node: ast.AST, named: dict[str, ast.AST]) -> list[str]:
    """The words of an expression; several where they come from a table of the file."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        table = node.func.value.value if isinstance(node.func.value, ast.Subscript) else node.func.value
        table = named.get(table.id, table) if isinstance(table, ast.Name) else table
        values = [table.value] if isinstance(table, ast.DictComp) else getattr(table, "values", [table])
        return [_text(value, named) for value in values]
    return [_text(node, named)]


def _text(node: ast.AST, named: dict[str, ast.AST]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name) and node.id.isupper() and node.id in named:  # a constant of the file
        return _text(named[node.id], named)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, named) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, named) + _text(node.right, named)
    if isinstance(node, ast.Call):  # words that a function of the same file puts together
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        for statement in ast.walk(named[name]) if name in named else ():
            if isinstance(statement, ast.Return) and isinstance(statement.value, (ast.JoinedStr, ast.Constant)):
                return _text(statement.value, named)
    return GAP


class Folder(NamedTuple):
    """One folder of the package: what it is for, and its files with what they hold."""

    name: str
    words: str
    files: list[tuple[str, str]]


def folders() -> list[Folder]:
    """The folders of `gemini/` and the bridges at the root, by name, each with its own files."""
    paths = [path for top in ("gemini", "integrations") for path in [ROOT / top, *(ROOT / top).rglob("*/")]]
    found = []
    for folder in sorted(path for path in paths if any(path.glob("*.py"))):
        files = [(path.name, first_sentence(path)) for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
        door = folder / "__init__.py"
        found.append(Folder(f"{folder.relative_to(ROOT)}", first_sentence(door) if door.exists() else "", files))
    return found


def first_sentence(path: Path) -> str:
    """What a Python file says of itself first, with names between single backticks."""
    words = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    words = re.sub(r":\w+:`[~!]?(?:[\w.]+\.)?(\w+)`", r"`\1`", words).replace("``", "`")
    first = re.match(r".*?[\w`)\"']\.(?= [A-Z`]|$)", words)
    return (first[0] if first else words).removesuffix(":")


class FileTables(SphinxDirective):
    """A section for each folder, with a table of its files."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for folder in folders():
            section = nodes.section("", nodes.title("", folder.name), ids=[nodes.make_id(folder.name)])
            section += nodes.paragraph("", "", *_words(folder.words), support_smartquotes=False)
            rows = [[nodes.literal("", name), *_words(words)] for name, words in folder.files]
            section += [_table({"file": 20, "what it holds": 80}, rows)] if rows else []
            found.append(section)
        return found


class ErrorMessages(SphinxDirective):
    """All messages of the classes that are named, as a list."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        kinds = self.arguments[0].split()
        items = nodes.bullet_list(classes=["messages"], support_smartquotes=False)
        for text in dict.fromkeys(message.text for message in messages() if message.kind in kinds):
            items += nodes.list_item("", nodes.paragraph("", " ".join(text.split())))
        return [items] if len(items) else [nodes.paragraph("", "None.")]


class CommandHelp(SphinxDirective):
    """One command: what it does, and a table of its options for each group of its help."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from dataclasses import fields

        from gemini.cli import COMMANDS, RECORDS

        about, record = COMMANDS[self.arguments[0]], RECORDS.get(self.arguments[0])
        found: list[nodes.Node] = [nodes.paragraph("", "", *_words(about), support_smartquotes=False)]
        groups: dict[str, list[Any]] = {}
        for option in fields(record) if record else ():
            group = "Arguments" if "metavar" in option.metadata else option.metadata["group"] or "Options"
            groups.setdefault(group, []).append(_row(option))
        for title, rows in groups.items():
            found += [nodes.rubric("", title), _table({"option": 28, "default": 14, "": 58}, rows)]
        return found


class GeminiOptions(SphinxDirective):
    """The options that the training commands have beside TRL's."""

    def run(self) -> list[nodes.Node]:
        from dataclasses import fields

        from gemini.jobs.train_options import GeminiArguments

        rows = [
            [nodes.literal("", f"--{field.name}"), nodes.Text(str(field.default)), nodes.Text(field.metadata["help"])]
            for field in fields(GeminiArguments)
        ]
        return [_table({"option": 28, "default": 14, "": 58}, rows)]


class UpdateRules(SphinxDirective):
    """The registry of update rules: as a "table" of optimizers with states, bytes and defaults, or as "reference"."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.arguments[0] == "reference":
            lines = [
                f".. autoclass:: gemini.optim.{name}\n" + (f"   :members: {members}\n" if members else "")
                for name, members in _classes()
            ]
            return self.parse_text_to_nodes("\n".join(("```{eval-rst}", *lines, "```")))  # the pages are Markdown
        columns = {"optimizer": 12, "GeminiConfig(optimizer=...)": 18, "state": 24, "bytes per param": 10,
                   "moved per step": 10, "defaults": 34}  # fmt: skip
        return [_table(columns, list(_rules()))]


def _classes() -> Iterator[tuple[str, str]]:
    """The optimizers and rules of the registry, with what is to be documented of an optimizer beside its arguments."""
    from gemini import optim
    from gemini.planning.rules import RULES

    for entry in RULES.values():
        if entry.optimizer != "AdamW":  # which is HybridAdam
            yield entry.optimizer, ", ".join(name for name in vars(getattr(optim, entry.optimizer)) if name[0] != "_")
        yield entry.rule, ""


def _rules() -> Iterator[list[nodes.Node]]:
    """A row for each rule."""
    from gemini.planning.planes import plane_specs
    from gemini.planning.rules import RULES, rule_named

    for name, entry in RULES.items():
        planes = plane_specs("bf16", "transient", entry.spec, trainable=True)
        states = [spec.kind for spec in entry.spec.planes] + [factor.name for factor in entry.spec.factors]
        hypers = {hyper: about.default for hyper, about in rule_named(name).hypers.items() if about.words}
        num_bytes = sum(spec.block_bytes for spec in planes.values())
        yield [
            nodes.literal("", entry.optimizer),
            nodes.literal("", f"{entry.rule}()"),
            *_words(", ".join(f"`{state}`" for state in states) or "none"),
            nodes.Text(f"{num_bytes}"),
            nodes.Text(f"{2 * num_bytes}"),
            *_words(", ".join(f"{hyper} {default}" for hyper, default in hypers.items())),
        ]


def _row(option: Any) -> list[nodes.Node]:
    kinds = {"bool": "", "Path": " PATH", "str": " TEXT", "int": " INT", "WithModel": " NAME=CONFIG"}
    given = next(words for known, words in kinds.items() if known in option.type)
    is_argument, choices = "metavar" in option.metadata, option.metadata.get("choices", ())
    shown = option.default not in (None, (), False) and not is_argument
    name = option.name.rstrip("_")  # a word of Python's has one behind it
    words = option.metadata["words"] + (f" ({', '.join(choices)})" if choices else "")
    return [
        nodes.literal("", f"{name.upper() if is_argument else '--' + name.replace('_', '-')}{given}"),
        nodes.literal("", f"{option.default}") if shown else nodes.Text(""),
        *_words(words),
    ]


def _words(text: str) -> list[nodes.Node]:
    """A text of the command line, whose names stand between backticks, as one cell."""
    parts = [nodes.literal("", part) if odd % 2 else nodes.Text(part) for odd, part in enumerate(text.split("`"))]
    return [nodes.inline("", "", *parts)]


def _table(columns: dict[str, int], rows: list[list[nodes.Node]]) -> nodes.table:
    """``columns``: their titles and widths."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in columns.values()), cols=len(columns))
    head = nodes.thead("", _line([nodes.Text(words) for words in columns]))
    group += [head, nodes.tbody("", *(_line(row) for row in rows))]
    return nodes.table("", group, classes=["options"], support_smartquotes=False)


def _line(cells: list[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def _say_defaults(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, back: Any) -> Any:
    """A dataclass shows `<factory>` where its default is made anew each time: show what is made."""
    return (signature.replace("<factory>", "MemoryBudget()"), back) if signature else None


def _without_stars(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """napoleon escapes the stars of ``*args`` or of ``**kwargs``, but not where both are described in one line."""
    lines[:] = [line.replace("*args, **kwargs:", "args, kwargs:") for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-signature", _say_defaults)
    app.connect("autodoc-process-docstring", _without_stars, priority=100)  # before napoleon
    app.add_directive("error-messages", ErrorMessages)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("file-tables", FileTables)
    app.add_directive("gemini-options", GeminiOptions)
    app.add_directive("update-rules", UpdateRules)
    return {"version": "1", "parallel_read_safe": True}
