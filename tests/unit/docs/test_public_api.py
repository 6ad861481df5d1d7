"""The public API is one list: the names in `__all__` of a module are the names in the reference, and no others."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from typing import Any

import pytest

import durable
from tests.support.pages import DOCS, PAGES, blocks, sources

DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
IMPORT = re.compile(r"^\s*from (durable[\w.]*) import \(?([^()#\n]+)", re.MULTILINE)
INTERNAL = {"durable.cli", "durable.demo"}
"""Entry points of commands: their names are no API. `durable.cli.main` is for jobs that run a command."""


def documented() -> list[tuple[str, str]]:
    """The module and the name of each entry in the reference."""
    text = "".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    return [(found.rpartition(".")[0], found.rpartition(".")[2]) for found in DIRECTIVE.findall(text)]


def public_modules() -> list[str]:
    return sorted({module for module, _ in documented()} | {"durable.envelope", "durable.settings"})


def names_of(module: str) -> list[str]:
    names: list[str] = importlib.import_module(module).__all__
    return names


def key(module: str, name: str) -> object:
    """The same for a name that two modules have, such as an error."""
    value: Any = getattr(importlib.import_module(module), name)
    return id(value) if callable(value) else (name, repr(value))


def test_every_name_in_all_is_documented_once() -> None:
    entries = [key(module, name) for module, name in documented()]
    assert len(entries) == len(set(entries))

    missing = {
        (module, name) for module in public_modules() for name in names_of(module) if key(module, name) not in entries
    }
    assert missing == set()


def test_every_documented_name_is_in_all_of_its_module() -> None:
    assert [(module, name) for module, name in documented() if name not in names_of(module)] == []


def test_every_module_with_all_is_public_or_internal() -> None:
    """But those that only gather names for a module above them."""
    with_all = {
        found.name
        for found in pkgutil.walk_packages(durable.__path__, "durable.", onerror=lambda name: None)
        if not found.name.startswith("durable.migrations") and "\n__all__ = [" in source_of(found.name)
    }
    gathered = {"durable.asgi.middleware"} | {
        f"durable.transports.{name}.transport" for name in ("tcp", "http", "rabbitmq")
    }
    assert with_all - gathered - INTERNAL == set(public_modules()) - {"durable"}


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        return file.read()


@pytest.mark.parametrize("page", [*PAGES, *sources()], ids=lambda path: path.name)
def test_pages_and_examples_import_public_names_only(page: Any) -> None:
    text = page.read_text() if page.suffix == ".py" else "".join(block.code for block in blocks(page))
    imported = [(module, name.strip()) for module, names in IMPORT.findall(text) for name in names.split(",")]
    for module, name in imported:
        if (module, name) == ("durable.cli", "main"):
            continue
        is_module = f"{module}.{name}" in public_modules()
        assert is_module or name in names_of(module), f"{module}.{name}"


def test_every_public_class_and_function_has_a_docstring() -> None:
    values = [
        (module, name, getattr(importlib.import_module(module), name))
        for module in public_modules()
        for name in names_of(module)
    ]
    documentable = [value for value in values if isinstance(value[2], type) or inspect.isfunction(value[2])]
    assert [(module, name) for module, name, value in documentable if not value.__doc__] == []
