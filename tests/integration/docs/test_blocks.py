"""Every block of Python in README.md and docs/ runs as it stands, on a real Postgres: see tests/support/pages.py."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.support.pages import PAGES, ROOT, Block, blocks, sources

GIVEN = Path(__file__).parent / "given"
RUN = [block for page in PAGES for block in blocks(page) if block.is_run]
RUN_BY = {
    "quickstart": "tests/integration/docs/test_quickstart.py",
    "tutorial": "tests/integration/docs/test_tutorial.py",
    "calls": "tests/integration/docs/test_calls.py",
    "lines": "tests/contract/test_transports_documented.py",
    "examples": "tests/integration/cli/test_examples.py",
    "pipeline": "tests/pipeline/test_examples_of_tools.py",
    "testing": "tests/integration/docs/test_testing.py",
    "deploy": "tests/integration/docs/test_deploy.py",
}
"""The test that runs the files of each folder below docs/examples."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def names(
    make_database: Callable[[str], str], no_messages: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, Any]:
    """Those of a module of its own, in a process that has declared no messages, in an empty folder, with a database."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", make_database("docs"))
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where annotations are looked up
    return vars(module)


@pytest.mark.parametrize("block", RUN, ids=str)
async def test_block_runs(block: Block, names: dict[str, Any]) -> None:
    given = GIVEN / f"{block.page.stem}.py"
    await run(compiled(given.read_text(), str(given)), names)
    if "begin" in names:
        await names["begin"]()
    await run(compiled(block.code, str(block), first_line=block.line), names)
    if "finish" in names:
        await names["finish"]()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_marked_as_not_run_give_a_reason(page: Path) -> None:
    reasons = [block.reason for block in blocks(page) if block.reason is not None]
    assert all(len(reason.split()) >= 4 for reason in reasons)
    assert page.read_text().count("<!-- not run:") == len(reasons), "a mark stands before no block of Python"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_python_are_called_python(page: Path) -> None:
    """Otherwise they are not found, and not run."""
    assert re.findall(r"^```(?:py|python3|pycon| python)$|^~~~", page.read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_file_of_examples_is_run_by_a_test(path: Path) -> None:
    test = (ROOT / RUN_BY[path.parent.name]).read_text()
    assert path.parent.name in test


def compiled(code: str, name: str, first_line: int = 1) -> CodeType:
    tree = ast.parse(code, name)
    code_object: CodeType = compile(
        ast.increment_lineno(tree, first_line - 1), name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    return code_object


async def run(code: CodeType, names: dict[str, Any]) -> None:
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result


class TestMechanism:
    """What a page must not get away with."""

    def test_failing_block_is_found(self) -> None:
        block = Block(ROOT / "README.md", 1, "bus.send(1)\n", None)
        assert block.is_run
        with pytest.raises(NameError):
            eval(compiled(block.code, str(block)), {})

    def test_block_differing_from_its_file_is_no_excerpt(self) -> None:
        quickstart = (ROOT / "docs" / "examples" / "quickstart" / "shop.py").read_text()
        assert Block(ROOT / "README.md", 1, quickstart, None).is_excerpt
        assert not Block(ROOT / "README.md", 1, quickstart.replace("teapot", "cup"), None).is_excerpt
        assert not Block(ROOT / "README.md", 1, f"# stock.py\n{quickstart}", None).is_excerpt
