"""Pages that name the test of each promise: the test is there, under this name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT

PAGES = [DOCS / "guarantees.md", DOCS / "security.md"]

_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(tests/[^)#]+)\)")
_IN_CODE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def named(page: Path) -> list[tuple[str, str]]:
    """The files of tests that a page names, each with the test within it, if one is named."""
    text = page.read_text()
    found = [
        (path, name if name.startswith("test_") and name.isidentifier() else "") for name, path in _LINK.findall(text)
    ]
    return found + _IN_CODE.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_existing_tests_only(page: Path) -> None:
    found = named(page)
    assert found
    missing = [
        (path, test)
        for path, test in found
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text())
    ]
    assert missing == []


def test_every_threat_has_a_test() -> None:
    rows = [
        line
        for line in (DOCS / "security.md").read_text().split("## Threats")[1].split("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    assert len(rows) > 10
    assert [row for row in rows[1:] if not _LINK.search(row.rsplit(" | ", 1)[1])] == []


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.name)
def test_picture_loads_nothing_and_has_a_title(picture: Path) -> None:
    text = picture.read_text()
    assert "<title" in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
