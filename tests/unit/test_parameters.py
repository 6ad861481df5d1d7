"""No function takes a pile of parameters: what travels together is one value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
MOST: Final = 7
OPTIONS: Final = {
    "durable/bus.py": {"handles"},
    "durable/pipeline/archive.py": {"archive"},
    "durable/pipeline/publish.py": {"envelopes"},
    "durable/testing/chaos.py": {"__init__"},
}
"""The public API: options that are given by name, each with a default. Those of the command line are in durable/cli."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the statements below this one, and no expressions: functions are statements."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def _functions() -> Iterator[tuple[str, str, list[str]]]:
    """The path, the name and the parameters of each."""
    for folder in ("durable", "recovery", "transports"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] == ("durable", "cli"):
                continue
            for node in statements(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    given = node.args
                    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    yield str(relative), node.name, names


@cache
def functions() -> list[tuple[str, str, list[str]]]:
    return list(_functions())


def count(names: list[str]) -> int:
    """Without the object; the connection and its schema, which each storage function is run with, are one."""
    own = [name for name in names if name not in ("self", "cls")]
    return len(own) - (own[:2] == ["conn", "schema"])


def test_functions_take_at_most_seven_parameters() -> None:
    found = {
        f"{path}: {name}({', '.join(names)})"
        for path, name, names in functions()
        if count(names) > MOST and name not in OPTIONS.get(path, ())
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(("path", "names"), OPTIONS.items())
def test_every_listed_exception_is_needed(path: str, names: set[str]) -> None:
    assert names <= {name for where, name, given in functions() if where == path and count(given) > MOST}
