"""Numbers before their nouns: "1 envelope", "2 envelopes", in logs, errors and commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
_PLURAL: Final = re.compile(r" (?!bytes|characters)([a-z]+ )?(?!is\b|has\b)[a-z]{3,}s\b(?<!ss)")
_LOGGED: Final = re.compile(rf"%d{_PLURAL.pattern}")
_VERBS: Final = re.compile(r" (more than |announces|ends|holds|leaves|takes)")


def miscounted(source: str) -> Iterator[str]:
    """The numbers in this source that stand before a plural noun whatever they are."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            logged = _LOGGED.search(node.value)
            if logged is not None and not _VERBS.match(logged[0].removeprefix("%d")):
                yield f"{node.lineno}: {logged[0]}"
        if isinstance(node, ast.JoinedStr):
            for value, text in pairwise(node.values):
                if isinstance(value, ast.FormattedValue) and _is_count(value) and isinstance(text, ast.Constant):
                    said = str(text.value)
                    if (found := _PLURAL.match(said)) and not _VERBS.match(said):
                        yield f"{value.lineno}: {{{ast.unparse(value.value)}}}{found[0]}"


def _is_count(value: ast.FormattedValue) -> bool:
    if ast.unparse(value.value).isupper():  # a bound is no 1
        return False
    is_length = isinstance(value.value, ast.Call) and ast.unparse(value.value.func) == "len"
    return is_length or (value.format_spec is not None and ast.unparse(value.format_spec) in ("f','", 'f","'))


@pytest.mark.parametrize("folder", ["durable", "transports", "recovery"])
def test_numbers_agree_with_their_nouns(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in sorted(Path(ROOT, folder).rglob("*.py"))
        for each in miscounted(path.read_text())
    ]
    assert found == [], "write durable.grammar.several(number, nouns)"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('log.info("released %d envelopes", n)', 1),
        ('log.info("node %d is gone", n)', 0),
        ('f"{len(x)} messages wait"', 1),
        ('f"{n:,} rows"', 1),
        ('f"{n:,} of them"', 0),
        ('f"{len(x):,} dead letters"', 1),
        ('f"{several(n, words)} wait"', 0),
    ],
)
def test_miscounted_noun_is_found(source: str, count: int) -> None:
    assert len(list(miscounted(source))) == count
