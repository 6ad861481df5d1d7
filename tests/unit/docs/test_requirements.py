"""The pinned requirements, and what `make demo` installs of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

FILES = sorted((ROOT / "requirements").rglob("*.txt"))
NOT_FOR_THE_DEMO = {"moto", "mypy", "pyright", "pyspark", "pytest", "mkdocs", "duckdb", "deltalake"}


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_demo_installs_a_part_of_the_requirements_of_the_tests() -> None:
    """So `make test` after `make demo` adds to the environment and changes nothing."""
    assert pins("demo.txt") < pins("dev.txt")
    assert not {pin.partition("==")[0] for pin in pins("demo.txt")} & NOT_FOR_THE_DEMO


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_requirement_is_a_pinned_name(path: Path) -> None:
    for pin in pins(path.relative_to(ROOT / "requirements").as_posix()):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)
