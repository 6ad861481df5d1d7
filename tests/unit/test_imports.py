"""Which libraries an import of durable loads, and which it leaves until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import durable

DRIVERS = {"alembic", "asyncpg", "psycopg"}
EXTRAS = {"aio_pika", "httpx", "opentelemetry", "prometheus_client", "pyspark", "rich", "starlette", "typer", "uvicorn"}
NO_LIBPQ = "import sys; sys.modules.update(dict.fromkeys(('psycopg_c', 'psycopg_binary')))\n" + (
    "import ctypes.util; ctypes.util.find_library = lambda name: None\n"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def loaded_by(code: str) -> set[str]:
    """The top-level packages and modules in memory after this code."""
    done = run(f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_of_durable_loads_no_library() -> None:
    assert loaded_by("import durable") - loaded_by("import importlib, typing") == {"durable"}


@pytest.mark.parametrize("code", ["from durable import *", "import durable; durable.Bus('orders')"])
def test_declared_bus_loads_no_driver_and_no_extra(code: str) -> None:
    assert loaded_by(code) & (DRIVERS | EXTRAS) == set()


def test_first_engine_loads_the_drivers() -> None:
    code = "import durable; durable.Bus('orders', database='postgresql://localhost/orders').runtime.database"
    assert loaded_by(code) >= {"asyncpg", "psycopg"}


def test_every_public_name_is_found_at_its_home() -> None:
    assert sorted(durable.__all__) == sorted(durable._HOMES) == dir(durable)
    for name, home in durable._HOMES.items():
        assert getattr(durable, name) is getattr(sys.modules[home], name)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'durable' has no attribute 'Buss'"):
        durable.Buss  # type: ignore[attr-defined]  # noqa: B018


def test_missing_libpq_is_reported_with_install_advice() -> None:
    code = "import durable; durable.Bus('orders', database='postgresql://localhost/orders').runtime.database"
    done = run(NO_LIBPQ + code)

    assert "durable.errors.InvalidSetting: psycopg cannot be loaded" in done.stderr
    assert "pip install 'durable-bus[binary]', or install the system's libpq" in done.stderr


@pytest.mark.parametrize("command", ["doctor", "migrate", "status"])
def test_command_ends_with_install_advice_when_libpq_is_missing(command: str) -> None:
    arguments = [command, "--database", "postgresql://localhost/orders"]
    done = run(f"{NO_LIBPQ}from durable.cli import main\nmain({arguments})")

    assert "Traceback" not in done.stderr
    assert "pip install 'durable-bus[binary]'" in done.stdout + done.stderr
