"""Runs the code blocks of Markdown pages: Python as printed, commands against the options there really are.

Of a page (README.md and everything under docs/):

- ```python blocks run in order in one namespace, in an empty folder; `"/scratch"` is replaced by a folder there. One
  whose first line is a comment with a file name (`# train.py`) is written to that file and run as its own program.
- `<!-- setup ... -->` is Python that readers do not see.
- `<!-- output -->` before a ```text block: it is what the Python block before it prints; `...` stands for anything.
  `<!-- output, numbers vary -->`: the same but for numbers, units of bytes and where lines are broken.
- ```bash blocks and `gemini ...`, `make ...` in the text: every command, option, target, extra and file must exist, and
  values must parse.
- `<!-- not run: reason -->` before a block: it has to compile, no more.
- `<!-- run by: tests/... -->` before a block: that test reads the page and runs it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]

_SHOWN = {"text", "console", "json", "toml", "yaml", ""}
"""Languages of blocks that show something. Whatever is not here has to run, or be a directive."""


class Block(NamedTuple):
    """A fenced block, or the invisible setup of a page."""

    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    mark: str
    """The comment right before it, without its arrows."""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order; `<!-- setup ... -->` has the language "setup"."""
    lines = page.read_text().splitlines()
    found: list[Block] = []
    mark, number = "", 0
    while number < len(lines):
        line = lines[number].strip()
        number += 1
        if fence := re.fullmatch(r"(`{3,})(.*)", line):
            start = number
            while lines[number].strip() != fence[1]:
                number += 1
            code = textwrap.dedent("\n".join(lines[start:number]))
            found.append(Block(page, start + 1, fence[2].strip(), code, mark))
            number, mark = number + 1, ""
        elif line.startswith("<!--"):
            start = number
            while "-->" not in lines[number - 1]:
                number += 1
            words = "\n".join(lines[start - 1 : number]).strip().removeprefix("<!--").removesuffix("-->").strip()
            if words.startswith("setup"):
                found.append(Block(page, start + 1, "setup", words.removeprefix("setup").strip("\n"), ""))
            else:
                mark = words
        elif line:
            mark = ""
    return found


def is_run(block: Block) -> bool:
    """Whether a block is code that has to run; raises for what is neither code, nor shown, nor a directive."""
    if block.language in _SHOWN or block.language.startswith("{"):
        assert not re.match(r"\{(code-block|code|sourcecode)\}", block.language), f"{block.where}: write ```python"
        return False
    assert block.language in ("python", "bash", "setup"), f"{block.where}: unknown language {block.language!r}"
    return not block.mark.startswith(("not run:", "run by:"))


# ---- Python ----------------------------------------------------------------------------------------------------------


def run_python(page: Path, folder: Path, names: dict[str, Any], replace: dict[str, str]) -> int:
    """Run the page's Python in ``folder`` (the current one); returns the number of blocks that ran.

    Raises:
        AssertionError: for output that is not as printed; whatever a block raises, with its line of the page.
    """
    num_run, printed = 0, ""
    names.setdefault("__name__", "__main__")
    for block in blocks_of(page):
        if block.language == "text" and block.mark.startswith("output"):
            compare(block, printed)
        elif block.language in ("python", "setup"):
            code = block.code
            for theirs, here in {'"/scratch"': repr(str(folder / "scratch")), **replace}.items():
                code = code.replace(theirs, here)
            program = compile("\n" * (block.line - 1) + code, str(page), "exec")
            if not is_run(block):
                continue
            file = re.match(r"# ([\w.-]+\.py)\n", code)
            if file:
                (folder / file[1]).write_text(code)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(program, {"__name__": "__main__"} if file else names)
            printed = out.getvalue()
            num_run += block.language == "python"
    return num_run


_NUMBERS_VARY = "output, numbers vary"


def compare(block: Block, printed: str) -> None:
    """A text block against what was printed: line ends do not matter, `...` stands for anything."""

    def lines(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip().splitlines())

    if block.mark == _NUMBERS_VARY:
        shown, found = (
            re.sub(r"[\d.,]*\d( ?[KMGT]?i?B\b|%|)", "#", " ".join(s.split())) for s in (block.code, printed)
        )
        assert shown == found, f"{block.where} shows\n{block.code}\nprinted is\n{printed}"
        return
    wanted = re.escape(lines(block.code)).replace(re.escape("..."), ".*?")
    assert re.fullmatch(wanted, lines(printed), re.DOTALL), f"{block.where} shows\n{block.code}\nprinted is\n{printed}"


# ---- commands --------------------------------------------------------------------------------------------------------


def commands_of(page: Path) -> Iterator[tuple[str, str]]:
    """Every command of a page with where it stands: lines of bash blocks, and `gemini ...`, `make ...` in the text."""
    for block in blocks_of(page):
        if block.language == "bash" and is_run(block):
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.split("#")[0].strip():
                    yield block.where, line.strip()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for command in re.findall(r"`((?:make|gemini) [a-z-][^`]*)`", text):
        yield page.name, f"{command} ..."


def check_command(command: str, page: Path) -> None:
    """Raises AssertionError, or what click or argparse say, where the command could not be meant."""
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    whole = "..." not in shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    words[0] = Path(words[0]).name  # .venv/bin/gemini
    if words[:3] == ["python", "-m", "gemini"]:
        words = words[2:]
    match words:
        case ["gemini", *rest]:
            _check_gemini(rest, whole)
        case ["torchrun", *rest]:
            _check_torchrun(rest, whole, page)
        case ["make", *rest]:
            targets = [word for word in rest if "=" not in word]
            for target in targets:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file() or script in _programs_of(page), f"there is no {script}"
        case ["pip", "install", *rest]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(extra.split(",")) <= extras.keys(), f"no extra {extra}"
        case ["source" | "cd" | "git" | "fio" | "df" | "kill", *_]:
            pass
        case _:
            raise AssertionError(f"{command!r} is of no kind that can be checked")


def _check_gemini(words: list[str], whole: bool) -> None:
    from gemini.cli import COMMANDS, RECORDS
    from gemini.jobs.settings import RecordParser

    if not words or words[0].startswith("-"):
        assert set(words) <= {"--help", "-h"}, words
        return
    assert words[0] in COMMANDS, words
    record, rest = RECORDS.get(words[0]), [word for word in words[1:] if word not in ("--help", "...")]
    if record is None:
        from gemini.jobs.train_options import Parser, options_of

        parser = Parser("sft" if words[0] in ("train", "demo") else words[0])
        from_file = "--config" in rest
        if from_file:
            at = rest.index("--config")
            rest = rest[:at] + rest[at + 2 :]
        given = parser.read(rest)
        if whole and not from_file and words[0] != "demo":
            num = max(1, given.values.tp * given.values.cp * given.values.ep * given.values.replicas)
            options_of(given, num)
    elif whole:
        RecordParser(words[0], "", record).read(rest)
    else:
        unknown = RecordParser(words[0], "", record).parse_known_args([*rest, "config.json"])[1]
        assert not [word for word in unknown if word.startswith("-")], words


def _check_torchrun(words: list[str], whole: bool, page: Path) -> None:
    from torch.distributed.run import get_args_parser

    known = get_args_parser().parse_args(words)
    if known.module:
        assert known.training_script == "gemini", known.training_script
        _check_gemini(known.training_script_args, whole)
    else:
        assert known.training_script in _programs_of(page), f"{known.training_script} is not a file of the page"


def _programs_of(page: Path) -> set[str]:
    """The files that the page shows, and the one that stands for the reader's own program."""
    heads = (re.match(r"# ([\w.-]+\.py)\n", block.code) for block in blocks_of(page) if block.language == "python")
    return {"train.py"} | {head[1] for head in heads if head}


def compiles(block: Block) -> None:
    """A block that is not run is Python all the same."""
    ast.parse(block.code)
