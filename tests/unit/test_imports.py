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

AGENT = "import sys; sys.argv[1:] = '{}'.split()\nfrom durable.cli import main; main()"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def loaded_by(*steps: str) -> list[set[str]]:
    """The top-level packages and modules in memory after each step of one process."""
    shown = "import sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = run("\n".join(f"{step}\n{shown}" for step in steps))
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def after_steps() -> dict[str, set[str]]:
    steps = {
        "import": "import durable",
        "bus": "durable.Bus('orders')",
        "engine": "durable.Bus('orders', database='postgresql://localhost/orders').runtime.database",
    }
    return dict(zip(steps, loaded_by(*steps.values()), strict=True))


def test_import_of_durable_loads_no_library(after_steps: dict[str, set[str]]) -> None:
    [without] = loaded_by("import importlib, typing")
    assert after_steps["import"] - without == {"durable"}


@pytest.mark.parametrize("code", ["from durable import *", "import durable; durable.Bus('orders')"])
def test_declared_bus_loads_no_driver_and_no_extra(code: str, after_steps: dict[str, set[str]]) -> None:
    loaded = after_steps["bus"] if "Bus" in code else loaded_by(code)[0]
    assert loaded & (DRIVERS | EXTRAS) == set()


def test_first_engine_loads_the_drivers(after_steps: dict[str, set[str]]) -> None:
    assert after_steps["engine"] >= {"asyncpg", "psycopg"}


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


@pytest.mark.parametrize(
    ("missing", "code", "said"),
    [
        ("jinja2", "import durable.console", "durable.console needs jinja2; run: pip install 'durable-bus[console]'"),
        ("starlette", "import durable.console", "console needs starlette; run: pip install 'durable-bus[console]'"),
        ("httpx", AGENT.format("demo"), "demo needs httpx; run: pip install 'durable-bus[demo]'"),
        ("httpx", AGENT.format("demo --transport http"), "demo needs httpx; run: pip install 'durable-bus[demo]'"),
        ("starlette", "import durable; durable.Bus('a').asgi()", "run: pip install 'durable-bus[http]'"),
        ("prometheus_client", "import durable; durable.Bus('a').metrics_app()", "install 'durable-bus[metrics]'"),
        ("opentelemetry", "import durable; durable.Bus('a').trace()", "run: pip install 'durable-bus[tracing]'"),
        ("opentelemetry", "import durable; durable.Bus('a').meter()", "run: pip install 'durable-bus[tracing]'"),
    ],
)
def test_missing_library_of_an_extra_is_reported_with_install_advice(missing: str, code: str, said: str) -> None:
    done = run(f"import sys; sys.modules[{missing!r}] = None\n{code}")

    assert said in done.stderr
    assert "ModuleNotFoundError" not in done.stderr.splitlines()[-1]


LOADED = "import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"


@pytest.mark.parametrize(
    ("arguments", "module"),
    [("status", "inspect"), ("dead-letters list", "dead_letters.commands"), ("pipeline audit", "pipeline.commands")],
)
def test_command_line_loads_the_module_of_its_command_alone(arguments: str, module: str) -> None:
    loaded = run(LOADED + AGENT.format(f"{arguments} --help")).stdout.splitlines()[-1].split()
    groups = {f"durable.cli.{each}" for each in ("inspect", "dead_letters.commands", "pipeline.commands", "demo")}
    assert groups & {*loaded} == {f"durable.cli.{module}"}


COMMANDS = ("doctor", "migrate", "status")
EACH_IN_A_FORK = """
import os, sys
from durable.cli import app, main
for command, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    if os.fork() == 0:
        os.dup2(os.open(place, os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.exit(main([command, "--database", "postgresql://localhost/orders"]))
    os.wait()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command says without libpq, in a process of its own that begins with the command line imported."""
    places = {command: tmp_path_factory.mktemp(command) / "said" for command in COMMANDS}
    arguments = [str(each) for pair in places.items() for each in pair]
    subprocess.run([sys.executable, "-c", NO_LIBPQ + EACH_IN_A_FORK, *arguments], timeout=60, check=True)
    return {command: place.read_text() for command, place in places.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_ends_with_install_advice_when_libpq_is_missing(command: str, said: dict[str, str]) -> None:
    assert "Traceback" not in said[command]
    assert "pip install 'durable-bus[binary]'" in said[command]
