"""README.md as PyPI shows it: without this repository around it."""

from __future__ import annotations

import re
import tomllib
from xml.etree import ElementTree

import pytest

from tests.support.pages import ROOT

README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROJECT = PYPROJECT["urls"]["Repository"]
LINKS = re.findall(r"\]\(([^)]+)\)", README)


@pytest.mark.parametrize("link", LINKS)
def test_link_is_absolute_and_leads_to_a_file(link: str) -> None:
    assert link.startswith("https://")
    if link.startswith(PROJECT):
        path = re.sub(r"^/(blob|raw|tree)/main/", "", link.removeprefix(PROJECT))
        assert (ROOT / path).exists()


def test_table_of_extras_lists_all_for_users() -> None:
    table = README.partition("| extra | for |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        extra for extra in PYPROJECT["optional-dependencies"] if extra not in ("docs", "dev")
    ]


def test_no_block_needs_a_renderer() -> None:
    assert "```mermaid" not in README


def test_picture_loads_nothing_and_is_described() -> None:
    picture = ROOT / "docs" / "images" / "message.svg"
    root = ElementTree.parse(picture).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", picture.read_text()) == []


def test_claimed_pythons_are_those_of_the_classifiers() -> None:
    prefix = "Programming Language :: Python :: "
    versions = [each.removeprefix(prefix) for each in PYPROJECT["classifiers"] if each.startswith(f"{prefix}3.")]
    assert versions
    assert set(re.findall(r"\b3\.1\d\b", README)) == set(versions)
