"""The tests that execute a line, found out by one run of all tests under coverage.py.

A line that is executed when its module is imported (a default, a decorator) belongs to the tests of its function, or
of the functions of its class; a line of the module itself to all tests of the module.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from coverage import CoverageData

from tests.mutants.mutant import SIMULATION
from tests.mutants.trees import Tree
from tests.mutants.trials import Ended, ended_in
from tests.mutants.witness import FILE

_SECONDS: Final = 3_600
_SEEDS: Final = 40
_MEASURED: Final = "durable,recovery,transports"


class Reach(NamedTuple):
    """The tests that execute each line of each file, and the seconds of each test."""

    lines: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]

    def of(self, tree: Tree, file: str, line: int) -> list[str]:
        """Return the tests of this line, the cheapest first; SIMULATION may be among them."""
        reached = self.lines.get(file, {})
        for rows in _around(ast.parse((tree.folder / file).read_text()), line):
            tests = frozenset().union(*(reached.get(row, frozenset()) for row in rows))
            if tests:
                return sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test))
        return []


def recorded(tree: Tree, tests: Sequence[str], servers: Mapping[str, str], seeds: int = _SEEDS) -> Reach:
    """Run these tests and some seeds of the simulation without a mutant. Tests that fail are left out, and printed."""
    told = tree.folder / ".told.json"
    options = ["-q", "-p", "tests.mutants.witness", "-p", "tests.mutants.operators.contexts", "-p", "no:cacheprovider"]
    options += ["--hypothesis-profile", "quick", "-k", "not rabbitmq"]
    ended = _covered(tree, ".covered-tests", [], ["pytest", *options, *tests], {**servers, FILE: str(told)})
    if not told.exists():
        raise RuntimeError(f"the tests told nothing: {ended.output[-1_000:]}")
    seconds, failed = _outcomes(json.loads(told.read_text())["reports"])
    if failed:
        print("left out, because they fail without a mutant:", *sorted(failed), sep="\n  ")
    lines = _contexts(tree, ".covered-tests", failed)
    if seeds:
        simulation = ["tests.simulation", "--seeds", str(seeds), "--whole"]
        _covered(tree, ".covered-seeds", ["--context", SIMULATION], simulation, {"PYTHONHASHSEED": "0"})
        for file, found in _contexts(tree, ".covered-seeds", set()).items():
            for row, names in found.items():
                lines.setdefault(file, {})[row] = lines.get(file, {}).get(row, frozenset()) | names
    return Reach(lines, seconds)


def keep(path: Path, tree: Tree, tests: Sequence[str], reach: Reach) -> None:
    """Write this to a file, for the next run."""
    lines = {file: {row: sorted(names) for row, names in rows.items()} for file, rows in reach.lines.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"of": _digest(tree, tests), "seconds": reach.seconds, "lines": lines}))


def kept(path: Path, tree: Tree, tests: Sequence[str]) -> Reach | None:
    """Read what `keep` has written, unless a module or one of these tests has changed since."""
    if not path.exists() or (read := json.loads(path.read_text()))["of"] != _digest(tree, tests):
        return None
    lines = {file: {int(row): frozenset(names) for row, names in rows.items()} for file, rows in read["lines"].items()}
    return Reach(lines, read["seconds"])


def _digest(tree: Tree, tests: Sequence[str]) -> str:
    named = [tree.folder / name for name in (*_MEASURED.split(","), *tests)]
    files = sorted(file for each in named for file in ([each] if each.is_file() else each.rglob("*.py")))
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _covered(
    tree: Tree, data: str, options: Sequence[str], module: Sequence[str], environment: Mapping[str, str]
) -> Ended:
    measured = ["--rcfile", "/dev/null", "--data-file", str(tree.folder / data), "--source", _MEASURED]
    arguments = ["-m", "coverage", "run", *measured, *options, "-m", *module]
    return ended_in(tree, arguments, environment, _SECONDS)


def _outcomes(reports: Sequence[Mapping[str, object]]) -> tuple[dict[str, float], set[str]]:
    seconds: dict[str, float] = {}
    for report in reports:
        test = str(report["test"])
        seconds[test] = seconds.get(test, 0.0) + float(str(report["seconds"]))
    return seconds, {str(report["test"]) for report in reports if report["outcome"] != "passed"}


def _contexts(tree: Tree, data: str, without: set[str]) -> dict[str, dict[int, frozenset[str]]]:
    found = CoverageData(str(tree.folder / data))
    found.read()
    root = tree.folder.resolve()
    lines: dict[str, dict[int, frozenset[str]]] = {}
    for path in found.measured_files():
        if Path(path).is_relative_to(root):
            rows = found.contexts_by_lineno(path)
            lines[str(Path(path).relative_to(root))] = {
                row: frozenset(name for name in names if name) - without for row, names in rows.items()
            }
    return lines


class _Span(NamedTuple):
    """The lines of a statement, from its first decorator on."""

    first: int
    body: int
    """The first line of its body; of a simple statement, the line behind it."""
    last: int
    is_function: bool
    is_class: bool


def _around(module: ast.Module, line: int) -> list[list[int]]:
    """Return the lines whose tests are those of this line, and those to look at when no test executes the former.

    Outside of a function, a line is executed by the first import: that is in any test.
    """
    spans = sorted(_spans(module), key=lambda span: -span.first)
    holders = [span for span in spans if span.first <= line <= span.last]
    if any(span.is_function and line >= span.body for span in holders):
        return [list(range(holders[0].first, max(holders[0].body, holders[0].first + 1)))]
    wholes = [(span.first, span.last) for span in holders if span.is_function or span.is_class]
    return [_in_functions(spans, *whole) for whole in [*wholes, (1, max(span.last for span in spans))]]


def _in_functions(spans: Sequence[_Span], first: int, last: int) -> list[int]:
    """Return the lines of all functions between these two."""
    inside = [span for span in spans if span.is_function and first <= span.first <= last]
    return [row for span in inside for row in range(span.body, span.last + 1)]


def _spans(module: ast.Module) -> Iterator[_Span]:
    for node in ast.walk(module):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            last = node.end_lineno or node.lineno
            body: list[ast.stmt] = getattr(node, "body", [])
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            yield _Span(
                first=min([node.lineno, *(each.lineno for each in decorators)]),
                body=body[0].lineno if body else last + 1,
                last=last,
                is_function=isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef),
                is_class=isinstance(node, ast.ClassDef),
            )
