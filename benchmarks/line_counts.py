"""Lines of Python files and folders, as `wc -l` counts them and of code alone: neither blank, comment nor docstring.

python benchmarks/line_counts.py gemini/jobs gemini/cli
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def counts(text: str) -> tuple[int, int]:
    """All lines, and those of code."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(text.splitlines()), len(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="files, and folders that are searched for *.py")
    parser.add_argument("--without", nargs="*", type=Path, default=[], help="files and folders to leave out")
    given = parser.parse_args()
    total = [0, 0, 0]
    for path in given.paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        kept = [file for file in files if not {file, *file.parents} & {*given.without}]
        found = [counts(file.read_text(encoding="utf-8")) for file in kept]
        row = [len(found), sum(lines for lines, _ in found), sum(code for _, code in found)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"{row[0]:>4} files {row[1]:>7,} lines {row[2]:>7,} of code  {path}")
    print(f"{total[0]:>4} files {total[1]:>7,} lines {total[2]:>7,} of code  in all")


if __name__ == "__main__":
    main()
