"""The places of a module that the operators can change, and the mutants that are drawn from them.

The operators offer each other sign for a `+`, and one change for a `not`: so places are drawn, and of each place one
mutant. The order of drawing is that of a hash of the seed and of the place's text: a change of the module elsewhere
does not alter it, and the first hundred of a seed are the same for each size of the sample.

Left out are operators that make no other program than the original, or one that says nothing of the tests:

    Is to Eq, IsNot to NotEq, and back   the same for None, enums, classes, and for the numbers that Python keeps
    VariableReplacer, VariableInserter   they put random numbers and names in, other ones each time
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants.operators.meaning import meaning

_LEFT_OUT: Final = frozenset(
    {
        "VariableInserter",
        "VariableReplacer",
        "ReplaceComparisonOperator_Eq_Is",
        "ReplaceComparisonOperator_IsNot_NotEq",
        "ReplaceComparisonOperator_Is_Eq",
        "ReplaceComparisonOperator_NotEq_IsNot",
    }
)
_WITHOUT_OPERATOR: Final = frozenset({"name", "string", "newline", "endmarker"})
_UNKNOWN_ERROR: Final = "\n\nclass CosmicRayTestingException(Exception): ...\n"
"""The error that ExceptionReplacer catches instead: no place raises it."""


class Place(NamedTuple):
    """A place in a file, and the changes of one family of operators to it: (operator, occurrence in the file)."""

    file: str
    line: int
    rank: str
    changes: tuple[tuple[str, int], ...]


class Mutation(NamedTuple):
    """A mutant: a file, and its whole text with one change."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator}"

    @property
    def diff(self) -> str:
        lines = [f"- {line}" for line in self.before.splitlines()]
        return "\n".join([*lines, *(f"+ {line}" for line in self.after.splitlines())])


def drawn(tree: Path, files: Sequence[str], seed: int) -> Iterator[Mutation]:
    """Draw one mutant of each place of these files. Places without one are passed over."""
    meanings = {file: meaning((tree / file).read_text()) for file in files}
    for place in sorted((place for file in files for place in places(tree, file, seed)), key=lambda each: each.rank):
        source = (tree / place.file).read_text()
        for operator, occurrence in sorted(place.changes, key=lambda change: _hash(place.rank, change[0])):
            text = mutate_code(source, get_operator(f"core/{operator}")(), occurrence)
            if text is not None and meaning(text) not in (None, meanings[place.file]):
                yield _mutation(place, operator, source, text)
                break


def places(tree: Path, file: str, seed: int) -> list[Place]:
    """Return all places of this file."""
    source = (tree / file).read_text()
    lines = source.splitlines()
    found: defaultdict[tuple[tuple[int, int], str], list[tuple[str, int]]] = defaultdict(list)
    nodes = [node for node in ast_nodes(get_ast(source)) if node.type not in _WITHOUT_OPERATOR]
    for name in _operators():
        operator: Any = get_operator(f"core/{name}")()
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            found[start, name.partition("_")[0]].append((name, occurrence))
    return [
        Place(file, start[0], _rank(seed, file, lines, start, family), tuple(changes))
        for (start, family), changes in found.items()
    ]


def _operators() -> list[str]:
    names = [name.removeprefix("core/") for name in operator_names() if name.startswith("core/")]
    return [name for name in names if name not in _LEFT_OUT]


def _rank(seed: int, file: str, lines: Sequence[str], start: tuple[int, int], family: str) -> str:
    row, column = start
    same = lines[: row - 1].count(lines[row - 1])
    return _hash(seed, file, lines[row - 1], same, column, family)


def _hash(*parts: object) -> str:
    return sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _mutation(place: Place, operator: str, source: str, text: str) -> Mutation:
    before, after = _changed_lines(source, text)
    if operator == "ExceptionReplacer":
        text += _UNKNOWN_ERROR
    return Mutation(place.file, place.line, operator, before, after, text)


def _changed_lines(source: str, text: str) -> tuple[str, str]:
    """Return the lines that differ, as they were and as they are, without indentation.

    Of lines that only go, the next line is shown too: `@property` alone tells no place.
    """
    old, new = ([line.strip() for line in each.splitlines() if line.strip()] for each in (source, text))
    before: list[str] = []
    after: list[str] = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            more = kind == "delete"
            before += old[i1 : i2 + more]
            after += new[j1 : j2 + more]
    return "\n".join(before), "\n".join(after)
