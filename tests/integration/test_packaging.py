"""What is built and installed is what lies in the folders: nothing forgotten, nothing twice, nothing shadowed.

Everything happens to copies of the checkout, without a network: what builds leave behind must touch neither the
checkout nor the next build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from durable.pipeline.session import find_java
from tests.support.history import add_history
from tests.support.quick_spark import java_options

ROOT = Path(__file__).parents[2]
INSTALLED_AS = {
    "durable": "durable",
    "transports": "durable/transports",
    "recovery": "durable/recovery",
    "migrations": "durable/migrations",
}


PLUGIN = "durable/pipeline/plugin/"
"""What lies there is installed at the top level, where Spark looks for it."""


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    wheel_from_sdist: Path


def copy_checkout(to: Path) -> Path:
    """A copy of all that a build may look at, symlinks as they are."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")  # an editor may be at work
    for folder in INSTALLED_AS:
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=ignore)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, to)
    return to


def files_of(checkout: Path) -> list[str]:
    """Every file of the package, under the name that it is installed as."""
    return sorted(
        f"{package}/{file.relative_to(checkout / folder)}".removeprefix(PLUGIN)
        for folder, package in INSTALLED_AS.items()
        for parent, _, names in os.walk(checkout / folder)  # does not follow symlinks
        for file in (Path(parent, name) for name in names)
        if not file.is_symlink()
    )


def files_in_wheel(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What the command prints; what it complains of is shown when it fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    def build(*options: str) -> Path:
        source = copy_checkout(tmp_path_factory.mktemp("source"))
        run(sys.executable, "-m", "build", "--no-isolation", *options, cwd=source)
        return source / "dist"

    direct, through_sdist = build("--wheel"), build()
    return Built(*direct.glob("*.whl"), *through_sdist.glob("*.tar.gz"), *through_sdist.glob("*.whl"))


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """An application's folder, with packages of its own under the names of our folders."""
    folder = tmp_path / "application"
    for name in ("transports", "recovery", "migrations"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a new environment, which sees this one's packages and lacks only durable.

    A .pth file lends them: it makes importable what lies in the folder, and does not run the .pth files there, such as
    that of an editable install of durable.
    """
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "venv" / "bin" / "python"


def test_the_wheel_holds_every_file_of_the_folders_once_and_nothing_else(built: Built, checkout: Path) -> None:
    assert files_in_wheel(built.wheel) == files_of(checkout)


def test_wheel_declares_its_types(built: Built) -> None:
    assert "durable/py.typed" in files_in_wheel(built.wheel)


def test_the_wheel_made_from_the_sdist_is_the_same(built: Built) -> None:
    assert files_in_wheel(built.wheel_from_sdist) == files_in_wheel(built.wheel)


def test_sdist_holds_every_file_once_and_no_symlink(built: Built, checkout: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    names = [member.name.partition("/")[2] for member in members if member.isfile()]
    assert not [member.name for member in members if member.issym() or member.islnk()]
    shipped = sorted(name.removeprefix(PLUGIN) for name in names if name.startswith("durable/"))
    assert shipped == files_of(checkout)
    assert not [name for name in names if name.partition("/")[0] in {"transports", "recovery", "migrations", "tests"}]


def install_wheel(python: Path, built: Built, _checkout: Path) -> None:
    run(python, *PIP_INSTALL, built.wheel, cwd=python.parent)


def install_wheel_from_sdist(python: Path, built: Built, _checkout: Path) -> None:
    run(python, *PIP_INSTALL, built.wheel_from_sdist, cwd=python.parent)


def install_editable_with_pip(python: Path, _built: Built, checkout: Path) -> None:
    run(python, *PIP_INSTALL, "--no-build-isolation", "--editable", checkout, cwd=python.parent)


def install_editable_with_uv(python: Path, _built: Built, checkout: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    options = ("--offline", "--no-deps", "--no-build-isolation", "--editable")
    cache = str(python.parent / "cache")
    run(uv, "pip", "install", "--python", python, *options, checkout, cwd=python.parent, UV_CACHE_DIR=cache)


# --ignore-installed: pip sees the packages that are lent, and would not install durable over a durable among them.
PIP_INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps", "--ignore-installed")

IMPORT_BOTH = """
import json, transports, recovery, migrations, durable.transports.base, durable.recovery, durable.migrations
modules = transports, recovery, migrations, durable, durable.transports.base, durable.recovery, durable.migrations
print(json.dumps({module.__name__: module.__file__ for module in modules}))
"""


@pytest.mark.parametrize(
    ("install", "is_editable"),
    [
        (install_wheel, False),
        (install_wheel_from_sdist, False),
        (install_editable_with_pip, True),
        (install_editable_with_uv, True),
    ],
)
def test_an_installed_durable_and_an_application_do_not_shadow_each_other(
    install: Callable[[Path, Built, Path], None],
    is_editable: bool,
    python: Path,
    built: Built,
    checkout: Path,
    application: Path,
) -> None:
    install(python, built, checkout)

    found = {name: Path(file) for name, file in json.loads(run(python, "-c", IMPORT_BOTH, cwd=application)).items()}

    home = checkout if is_editable else python.parents[1]
    assert {name for name, file in found.items() if file.is_relative_to(application)} == {
        "transports",
        "recovery",
        "migrations",
    }
    assert {name for name, file in found.items() if file.is_relative_to(home)} == {
        "durable",
        "durable.transports.base",
        "durable.recovery",
        "durable.migrations",
    }
    assert "Usage" in run(python.with_name("durable-agent"), "--help", cwd=application)


# ---------------------------------------------------------------- Spark's own discovery

READ_PLAINLY = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.read.format("durable").option("url", sys.argv[1]).load().where("side = 'incoming'")
print("read", rows.count())
spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
print("pushed", rows.count())
"""
REGISTER = """
from durable.pipeline.source import register
register(spark)
print("registered", rows.count())
"""


def read_plainly(
    python: Path, url: str, program: str = READ_PLAINLY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this with an interpreter of its own, which is that of the workers too, and far from the checkout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    own = {"JAVA_HOME": str(find_java()), "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
    own["SPARK_SUBMIT_OPTS"] = java_options()
    return subprocess.run(
        [python, "-c", program, url],
        cwd=python.parent,
        env=inherited | own | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def install_editable_strictly(python: Path, _built: Built, checkout: Path) -> None:
    options = ("--no-build-isolation", "--config-settings", "editable_mode=strict", "--editable")
    run(python, *PIP_INSTALL, *options, checkout, cwd=python.parent)


@pytest.mark.parametrize("install", [install_wheel, install_editable_strictly])
def test_a_plain_spark_session_finds_the_data_source_of_an_installed_durable(
    install: Callable[[Path, Built, Path], None],
    python: Path,
    built: Built,
    checkout: Path,
    database_url: str,
) -> None:
    install(python, built, checkout)
    with psycopg.connect(database_url, autocommit=True) as conn:
        add_history(conn, 3)
    done = read_plainly(python, database_url, READ_PLAINLY + REGISTER)
    assert done.stdout.split() == ["read", "3", "pushed", "3", "registered", "3"], done.stdout + done.stderr
    assert "replaced a" not in done.stderr


def test_a_plain_spark_session_finds_the_data_source_of_a_checkout_on_its_path(
    python: Path, checkout: Path, database_url: str
) -> None:
    path = os.pathsep.join([str(checkout), str(checkout / PLUGIN)])
    done = read_plainly(python, database_url, PYTHONPATH=path)
    assert done.stdout.split() == ["read", "0", "pushed", "0"], done.stdout + done.stderr


def test_missing_extra_hides_no_other_data_source(python: Path, built: Built, checkout: Path) -> None:
    install_wheel(python, built, checkout)
    without = "import sys; sys.modules['pyarrow'] = None; sys.modules['adbc_driver_manager'] = None; "
    without += "sys.modules['pyspark'] = None; import pyspark_durable; print(hasattr(pyspark_durable, 'DefaultSource'))"
    assert run(python, "-c", without, cwd=python.parent) == "False\n"


@pytest.mark.parametrize("name", ["transports", "recovery"])
def test_import_by_a_bare_folder_name_raises_with_the_full_name(name: str, checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert f"ImportError: import durable.{name}, not {name}" in done.stderr


def test_every_requirement_is_pinned_to_an_allowed_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert [line for line in pinned if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    versions = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in pinned)}

    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for requirement in map(Requirement, asked):
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
