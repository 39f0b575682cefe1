"""Every code block of README.md and docs/ is run: what a reader would type is what there is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doc_blocks import PAGES, ROOT, blocks_of, check_command, commands_of, compiles, is_run, run_python

from benchmarks._progress import run

README = ROOT / "README.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))]
BASH = [page for page in PAGES if next(commands_of(page), None)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a page's blocks, with a `scratch` in it that stands for /scratch."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    transformers.logging.set_verbosity_error()
    return tmp_path


# ---- the pages -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("page", [p for p in PYTHON if p != README], ids=name_of)
def test_python_runs_as_printed(page: Path, folder: Path) -> None:
    expected = sum(b.language == "python" and is_run(b) for b in blocks_of(page))
    assert run_python(page, folder, {}, {}) == expected


def test_the_readme_runs_as_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the sizes and the folder are changed, so that both tiers are used; model and data are small ones of ours."""
    values = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**values, bos_token_id=256, eos_token_id=256)
    ids = torch.arange(32).view(2, 16)
    names = {"config": config, "loader": [{"input_ids": ids, "labels": ids}] * 3}
    sizes = {'"64GiB"': '"8MiB"', '"400GiB"': '"8MiB"'}
    text = README.read_text()
    assert all(text.count(size) == 1 for size in (*sizes, '"/scratch"'))
    run_python(README, folder, names, sizes)
    assert transformers.AutoModelForCausalLM.from_pretrained("out").num_parameters() == 34_720
    assert Path("checkpoint").is_dir()


@pytest.mark.parametrize("page", BASH, ids=name_of)
def test_commands_and_options_exist(page: Path) -> None:
    for where, command in commands_of(page):
        try:
            check_command(command, page)
        except (Exception, SystemExit) as e:
            raise AssertionError(f"{where}: {command}: {e or type(e).__name__}") from e


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "program", "says"),
    [  # two processes may both print their lines before the ends of them
        ("guide/many_processes.md", "train.py", r"^2 ranks, last loss \d"),
        ("ranks.md", "tensor_parallel.py", r"^loss (5\.\d\d\d)\s*loss \1$"),
        ("ranks.md", "expert_parallel.py", r"^loss 5\.\d\d\d"),
        ("guide/pipelines.md", "pipeline.py", r"^loss (5\.\d\d\d)\s*loss \1$"),
    ],
)
def test_programs_of_many_processes_run_in_two(page: str, program: str, says: str, folder: Path) -> None:
    """With torchrun, as the page says: what runs alone may still not run in two."""
    (block,) = [b for b in blocks_of(ROOT / "docs" / page) if b.code.startswith(f"# {program}")]
    Path(program).write_text(block.code)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert re.search(says, result.stdout, re.MULTILINE), result.stdout


def test_what_is_not_run_says_why_and_is_little(summary: Callable[[str], None]) -> None:
    blocks = [b for page in PAGES for b in blocks_of(page) if b.language in ("python", "bash")]
    skipped = [b for b in blocks if not is_run(b)]
    for block in skipped:
        reason, elsewhere = block.mark.removeprefix("not run:").strip(), block.mark.removeprefix("run by:").strip()
        assert len(reason) > 10, f"{block.where} does not say why it is not run"
        if elsewhere != block.mark:
            assert block.page.name in (ROOT / elsewhere).read_text(), f"{block.where}: {elsewhere} does not read it"
        if block.language == "python":
            compiles(block)
    skipped = [b for b in skipped if b.mark.startswith("not run:")]
    summary(f"documentation: {len(blocks)} code blocks on {len(PAGES)} pages, {len(skipped)} of them not run")
    assert len(blocks) - len(skipped) > 30 and len(skipped) <= 4, [b.where for b in skipped]
    for page in PAGES:
        for block in blocks_of(page):
            is_run(block)  # refuses languages that nobody runs


# ---- the runner itself: a broken block is noticed --------------------------------------------------------------------


def page_with(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.mark.parametrize(
    "text, error",
    [
        ("```python\nimport gemini\ngemini.MemoryBudgets()\n```", AttributeError),
        ("```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```", AssertionError),
        ("```python\nprint('a')\n```\n<!-- output -->\n```text\nb\n```", AssertionError),
        ("```python\nprint('ab c')\n```\n<!-- output -->\n```text\na...d\n```", AssertionError),
        (
            "```python\nprint('1 MiB of a')\n```\n<!-- output, numbers vary -->\n```text\n1 MiB of b\n```",
            AssertionError,
        ),
        ("- a list\n\n  ```python\n  1 / 0\n  ```", ZeroDivisionError),
        ("<!-- setup\nx = 1 / 0\n-->", ZeroDivisionError),
        ("<!-- not run: for a reason -->\n```python\nthis is no Python\n```", SyntaxError),
        ("```python\n# program.py\nraise KeyError\n```", KeyError),
        ("```{code-block} python\nx = 1\n```", AssertionError),
        ("```py\nx = 1\n```", AssertionError),
    ],
)
def test_broken_python_is_noticed(folder: Path, text: str, error: type[Exception]) -> None:
    page = page_with(folder, text)
    with pytest.raises(error):
        for block in blocks_of(page):
            is_run(block)
        run_python(page, folder, {}, {})


def test_good_python_passes(folder: Path) -> None:
    text = (
        "<!-- setup\nx = 1\n-->\n```python\nprint('one', x)\n```\n\n<!-- output -->\n```text\none ...\n```\n"
        "<!-- setup\nprint('10.5 GiB (9%)  of 1,200')\n-->\n"
        "<!-- output, numbers vary -->\n```text\n512 MiB (11%)\n of 3\n```\n"
        "<!-- not run: it would raise -->\n```python\n1 / 0\n```\n```python\n# program.py\nname = __name__\n```"
    )
    names: dict[str, Any] = {}
    assert run_python(page_with(folder, text), folder, names, {}) == 2
    assert Path("program.py").is_file() and "name" not in names


@pytest.mark.parametrize(
    "command",
    [
        "gemini sft --cpu-memori 8GiB",
        "gemini sft --model_name_or_path c.json --dataset_name t --max_steps many",
        "gemini train --model c.json --dataset_name t",
        "gemini dpo --model_name_or_path c.json --dataset_name t --cpu-memory 8XiB",
        "gemini plan --model c.json",
        "gemini plan c.json --cpu 8XiB",
        "gemini trace --batch-size 2",
        "make nothing",
        "torchrun --nproc 2 -m gemini train --no-such-option",
        "torchrun --nproc-per-node 2 missing.py",
        "torchrun --no-such-option 2 -m gemini train",
        "python missing.py",
        "pip install '.[none]'",
        "curl https://example.org",
    ],
)
def test_broken_commands_are_noticed(folder: Path, command: str) -> None:
    page = page_with(folder, f"```bash\n{command}\n```")
    ((_, found),) = commands_of(page)
    with pytest.raises((Exception, SystemExit)):  # click's, argparse's or our own: each names what is wrong
        check_command(found, page)


def test_commands_in_the_text_are_found(folder: Path) -> None:
    page = page_with(folder, "Say `gemini train --no-such-option`, or `make nothing`, not `GeminiDDP`.")
    assert [command.split()[0] for _, command in commands_of(page)] == ["gemini", "make"]
    for _, command in commands_of(page):
        with pytest.raises((Exception, SystemExit)):
            check_command(command, page)
