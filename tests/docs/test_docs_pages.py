"""The pages say what there is: every error, public name, option and key; and they build without a warning."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import from_source
import pytest
import torch
from doc_blocks import PAGES, ROOT
from from_source import GAP, WARNING, error_classes, first_sentence, folders, messages

import gemini
import gemini.errors
from gemini.cli import COMMANDS, RECORDS
from gemini.jobs.settings import is_argument, spelled

DOCS = ROOT / "docs"
CONFIGS = (gemini.GeminiConfig, gemini.MemoryBudget, gemini.StaticPlacement)
ERRORS = (DOCS / "errors.md").read_text()
LISTED = " ".join(re.findall(r"^```\{error-messages\} (.*)$", ERRORS, re.MULTILINE)).split()
MIGRATION = (DOCS / "migration.md").read_text()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_every_error_class_has_a_section_with_its_messages() -> None:
    exported = [n for n in gemini.__all__ if inspect.isclass(v := getattr(gemini, n)) and issubclass(v, Exception)]
    defined = [n for n, v in vars(gemini.errors).items() if inspect.isclass(v) and issubclass(v, Exception)]
    assert set(exported) == set(defined) == set(error_classes())
    for name in defined:
        assert re.search(rf"^## {name}$", ERRORS, re.MULTILINE), f"docs/errors.md has no section on {name}"
        assert name in LISTED, f"the messages of {name} are not listed"


def test_every_kind_of_message_is_listed() -> None:
    """The lists of the page together hold every message there is."""
    assert {message.kind for message in messages()} <= set(LISTED)
    assert {WARNING, "JobError"} <= set(LISTED) and len(messages()) > 200


def test_every_way_of_writing_a_message_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot be read is noticed, not left out."""
    source = tmp_path / "gemini" / "some.py"
    source.parent.mkdir()
    assert error_classes()  # read before there is another source
    monkeypatch.setattr(from_source, "ROOT", tmp_path)

    def texts(code: str) -> list[str]:
        source.write_text(code)
        return [message.text for message in messages.__wrapped__()]

    assert texts("raise GeminiError(f'{a} and {b} {c}' + ' are' f' {d:>3} apart')") == ["… and … are … apart"]
    assert texts("def words():\n return f'no {a}'\nraise StorageError(self.words()) from e") == ["no …"]
    assert texts("W = {f: 'a {name!r}', g: 'b'}\nraise ParamAccessError(W[x].format(name=n))") == ["a …", "b"]
    assert texts("W = {x: f'{x} of {{name}}' for x in y}\nraise ParamAccessError(W[x].format(name=n))") == ["… of …"]
    assert texts("raise GeminiError(f'{e}') from e") == texts("raise GeminiError(str(e)) from e") == []
    with pytest.raises(ValueError, match="some.py:2"):
        texts("message = 'hidden'\nraise GeminiError(message)")


def test_every_file_has_a_row_in_the_table_of_its_folder() -> None:
    rows = {f"{folder.name}/{name}": words for folder in folders() for name, words in folder.files}
    there = [path for top in ("gemini", "integrations") for path in (ROOT / top).rglob("*.py")]
    assert rows.keys() == {str(path.relative_to(ROOT)) for path in there if path.stem != "__init__"}
    assert not [name for name, words in rows.items() if not 15 < len(words) < 250 or "``" in words]


def test_files_that_the_pages_on_the_inside_name_are_there() -> None:
    named = 0
    for page in (DOCS / "architecture.md", *(DOCS / "internals").glob("*.md")):
        for name in re.findall(r"`((?:\w+/)+\w+\.\w+)`", page.read_text()):
            assert (ROOT / "gemini" / name).exists() or (ROOT / name).exists(), f"{page.name} names {name}"
            named += 1
    assert named > 60
    assert len((DOCS / "architecture.md").read_text().splitlines()) <= 120, "the page to begin with is short"


def test_first_sentences_end_where_they_end(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    for text, first in {
        "One thing, for :class:`~a.b.C` and ``d``. Another one.": "One thing, for `C` and `d`.",
        "``p.grad`` of a param\nover two lines\n\nand more": "`p.grad` of a param over two lines",
        "What an example shows:\n\n    x = 1": "What an example shows",
    }.items():
        path.write_text(f'"""{text}"""')
        assert first_sentence(path) == first


def test_messages_are_taken_whole_from_the_source() -> None:
    by_kind = {(message.kind, message.text) for message in messages()}
    assert ("BudgetExceeded", "… asked for … of …, which has no budget") in by_kind
    assert any(kind == "IllegalTransition" and "is not legal here" in text for kind, text in by_kind)
    # The words of a helper function, and of an exception that is made anew from another.
    assert any(kind == "BudgetExceeded" and "gathered chunks in use" in text for kind, text in by_kind)
    assert any(kind == "BudgetExceeded" and "needs fp32 sums" in text for kind, text in by_kind)


def test_quoted_messages_exist() -> None:
    """The first column of a table of messages quotes the source, `…` standing for what is filled in."""
    texts = [" ".join(message.text.split()) for message in messages()]
    quoted = []
    for page in (DOCS / "errors.md", DOCS / "guide" / "nvme.md"):
        for table in re.findall(r"^\| message \|.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
            for row in table.splitlines()[1:]:
                quoted += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    assert len(quoted) > 60
    for head in quoted:
        assert any(head in text for text in texts), f"no message of the source says {head!r}"


# ---- the reference ---------------------------------------------------------------------------------------------------


def directives(page: str) -> str:
    return (DOCS / "reference" / page).read_text()


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)", pages, re.MULTILINE))
    assert set(gemini.__all__) - {"__version__"} - set(error_classes()) <= documented


@pytest.mark.parametrize("page, cls", [("model.md", gemini.GeminiDDP), ("optimizer.md", gemini.HybridOptimizer)])
def test_every_public_method_is_in_the_reference(page: str, cls: type) -> None:
    """But what is refused with a message of its own, and what other parts of Gemini call."""
    ours = {n for n, v in vars(cls).items() if inspect.isfunction(v) and not n.startswith("_")}
    shown = set(re.findall(r"\w+", re.search(r":members:((?:.|\n {10,})*)", directives(page))[1]))  # type: ignore[index]
    internal = {"share_memory", "resize_token_embeddings", "owner", "scalars_in_backward", "adopt_plain_states"}
    internal |= {"skip_step"}
    assert ours - internal == shown


def test_the_signature_of_geminiddp_is_that_of_the_wrapper() -> None:
    from gemini.train.ddp import _wrap

    (shown,) = re.findall(r"autoclass:: GeminiDDP\((.*)\)", directives("model.md"))
    parts = re.split(r", ", shown)
    assert [part.split("=")[0] for part in parts if part != "*"] == list(inspect.signature(_wrap).parameters)


def test_every_field_of_the_config_is_described() -> None:
    for cls in CONFIGS:
        for field in dataclasses.fields(cls):
            assert re.search(rf"^        {field.name}: ", inspect.getdoc(cls) or "", re.MULTILINE) or re.search(
                rf"^    {field.name}: ", inspect.getdoc(cls) or "", re.MULTILINE
            ), f"{cls.__name__}.{field.name} is not in the docstring, and so not in the reference"


def test_every_command_is_in_the_reference() -> None:
    page = directives("cli.md")
    for name in COMMANDS:
        assert f"```{{command-help}} {name}\n" in page, f"docs/reference/cli.md does not have `gemini {name}`"


# ---- migration -------------------------------------------------------------------------------------------------------


def test_our_side_of_the_migration_tables_exists() -> None:
    """What stands in the middle column is a name of ours, of torch or of transformers."""
    names = {f.name for cls in CONFIGS for f in dataclasses.fields(cls)}
    names |= set(inspect.signature(gemini.GradScaler).parameters)
    names |= set(inspect.signature(gemini.HybridAdam).parameters) | {"mesh", "process_group", "write", "dtype"}
    middle = "\n".join(row.split(" | ")[1] for row in MIGRATION.splitlines() if row.startswith("| ") and " | " in row)
    keywords = set(re.findall(r"\b([a-z_]+)=", middle))
    assert keywords <= names, keywords - names
    methods = set(re.findall(r"model\.(\w+)\(", middle))
    assert methods <= set(dir(gemini.GeminiDDP)) | {"save_pretrained"}, methods
    ours = set(re.findall(r"\bgemini\.(\w+)", middle))
    assert ours <= {*gemini.__all__, "optim"}, ours
    assert set(re.findall(r"\bgemini\.optim\.(\w+)", middle)) <= set(gemini.optim.__all__)


def test_their_side_of_fsdp2_is_that_of_this_torch() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    section = MIGRATION.split("## FSDP2")[1]
    for argument in list(inspect.signature(fully_shard).parameters):
        assert f"`{argument}" in section, f"fully_shard({argument}=) is not in the table"
    for cls in (MixedPrecisionPolicy, CPUOffloadPolicy):
        for field in dataclasses.fields(cls):
            assert field.name in section, f"{cls.__name__}.{field.name} is not in the table"
    for method in re.findall(r"`(set_\w+)", section):
        assert hasattr(FSDPModule, method), method
    assert torch.distributed.fsdp.register_fsdp_forward_method


# ---- the site --------------------------------------------------------------------------------------------------------


def test_links_between_pages_lead_somewhere() -> None:
    """Of README.md too, which the site does not hold. Pages that are not written yet are in conf.py's list."""
    expected = set(re.findall(r'"(docs/[\w/]+\.md)"', (DOCS / "conf.py").read_text()))
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            path = (page.parent / target).resolve()
            assert path.exists() or str(path.relative_to(ROOT)) in expected, f"{page.name} links to {target}"


def test_numbers_of_reports_are_in_the_reports() -> None:
    """A paragraph or table that names a report holds numbers of that report: every one with a decimal or a comma."""
    checked = 0
    for page in (DOCS / "guide").glob("*.md"):
        for part in re.split(r"\n\n(?!\|)", page.read_text()):
            for name in re.findall(r"benchmarks/reports/[\w.-]+\.md", part):
                report = (ROOT / name).read_text()
                for number in re.findall(r"\d[\d,]*\.\d+|\d+,\d{3}", part.replace(name, "")):
                    assert number in report, f"{page.name}: {number} is not in {name}"
                    checked += 1
    assert checked >= 12


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs`: a broken link, a page in no list, a docstring that is not reStructuredText are errors."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    result = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pages = {path: path.read_text() for path in (tmp_path / "html").rglob("*.html")}
    for path, text in pages.items():
        for asset in re.findall(r'(?:src|href)="(https?://[^"]+)"', text):
            assert not re.search(r"\.(?:css|js|woff2?|png|svg)$", asset), f"{path.name} fetches {asset}"
        body = re.sub(r"<(pre|script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r":(?:class|func|meth|attr):|``", body), f"{path.name} has markup left over"
    cli = pages[tmp_path / "html" / "reference" / "cli.html"]
    for record in RECORDS.values():
        for option in dataclasses.fields(record):
            assert (option.name.upper() if is_argument(option) else spelled(option.name)) in cli
    errors = pages[tmp_path / "html" / "errors.html"]
    assert errors.count("<li><p>") > 180 and GAP in errors
