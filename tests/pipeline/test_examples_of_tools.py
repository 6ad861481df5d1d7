"""docs/examples/pipeline: the commands of the DAGs exist, and the SQL of the dbt project runs on a lake."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import duckdb
import jinja2
import pytest
import typer
import yaml  # type: ignore[import-untyped]

from durable.cli.app import command_line
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import LakeTable
from tests.support.lakes import at, fill, handled, letter, message_id, sent, table
from tests.support.root import ROOT

EXAMPLES: Final = ROOT / "docs" / "examples" / "pipeline"
DBT: Final = EXAMPLES / "dbt"

# ---------------------------------------------------------------- Airflow


class Task:
    """Of Airflow's operator what the file uses of it."""

    def __init__(self, *, task_id: str, bash_command: str, append_env: bool = False, retries: int = 0) -> None:
        self.name, self.command, self.sees_environment = task_id, bash_command, append_env
        self.before: list[Task] = []
        made.append(self)

    def __rshift__(self, other: Task) -> Task:
        other.before.append(self)
        return other


class Dag:
    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


made: list[Task] = []


def tasks() -> list[Task]:
    """What the file defines. It imports nothing of Airflow but these two names."""
    tree = ast.parse((EXAMPLES / "airflow_dag.py").read_text())
    of_airflow = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("airflow.")
    ]
    assert [(node.module, [name.name for name in node.names]) for node in of_airflow] == [
        ("airflow.providers.standard.operators.bash", ["BashOperator"]),
        ("airflow.sdk", ["DAG"]),
    ]
    tree.body = [node for node in tree.body if node not in of_airflow]
    made.clear()
    exec(compile(tree, "airflow_dag.py", "exec"), {"BashOperator": Task, "DAG": Dag, "__name__": "dag"})
    return [*made]


def understood(line: str) -> str:
    """The command of the pipeline that this line runs. Raises TyperException where it is none, or misspelt."""
    program, group, name, *arguments = shlex.split(jinja2.Template(line).render(ds="2030-05-04"))
    assert (program, group) == ("durable-agent", "pipeline")
    commands: Any = command_line()
    command = commands.commands[group].commands[name]
    command.make_context(name, arguments)
    return name


def test_every_command_of_the_dags_is_understood() -> None:
    assert all(task.sees_environment == ("$" in task.command) for task in tasks())
    found = {understood(task.command) for task in tasks()}
    assert sorted(found) == ["archive", "audit", "compact", "purge", "report", "vacuum", "verify"]


def test_misspelt_option_of_a_dag_is_found() -> None:
    with pytest.raises(typer.TyperException):
        understood("durable-agent pipeline compact --laek x")


def test_purge_tasks_depend_on_their_verify_tasks() -> None:
    of_purge = [task for task in tasks() if task.name.startswith("purge")]
    assert [[before.name for before in task.before] for task in of_purge] == [["verify_orders"], ["verify_billing"]]


# ---------------------------------------------------------------- dbt


class Project:
    """The models, rendered as dbt does, and run by DuckDB over a lake."""

    def __init__(self, lake: Lake) -> None:
        self._conn = duckdb.connect()
        self._conn.execute("SET TimeZone = 'UTC'")
        self._lake = lake
        self._macros = "".join(file.read_text() for file in sorted((DBT / "macros").glob("*.sql")))

    def build(self, *, is_incremental: bool = False) -> None:
        """Each model as a table of its name, from the lake as it is now."""
        for name in self._sources():
            files = [file.removeprefix("file://") for file in self._lake.files(name)]
            self._conn.execute(
                f"CREATE OR REPLACE VIEW durable_{name} AS SELECT * FROM read_parquet({files}, union_by_name = true, "
                "hive_partitioning = true, hive_types = {'day': DATE})"
            )
        for model in ("stg_history", "stg_letters", "daily_volume", "open_causes"):
            self._build(model, is_incremental)

    def rows(self, model: str) -> list[dict[str, Any]]:
        return sorted(self._conn.sql(f"SELECT * FROM {model}").to_arrow_table().to_pylist(), key=str)

    def _sources(self) -> list[LakeTable]:
        (source,) = yaml.safe_load((DBT / "models" / "sources.yml").read_text())["sources"]
        place = source["meta"]["external_location"].replace("{{ env_var('DURABLE_LAKE') }}", self._lake.url)
        assert place.format(name="history") == f"delta_scan('{self._lake.table_url('history')}')"
        return [each["name"] for each in source["tables"]]

    def _build(self, model: str, is_incremental: bool) -> None:
        (file,) = (DBT / "models").rglob(f"{model}.sql")
        configured: dict[str, Any] = {}
        sql = jinja2.Template(self._macros + file.read_text(), undefined=jinja2.StrictUndefined).render(
            source=lambda source, name: f"{source}_{name}",
            ref=lambda name: name,
            config=lambda **given: configured.update(given) or "",
            is_incremental=lambda: is_incremental and "unique_key" in configured,
            this=model,
        )
        if is_incremental and configured:
            same = " AND ".join(f"fresh.{name} = {model}.{name}" for name in configured["unique_key"])
            self._conn.execute(f"CREATE TEMP TABLE fresh AS {sql}")
            self._conn.execute(f"DELETE FROM {model} USING fresh WHERE {same}")
            self._conn.execute(f"INSERT INTO {model} SELECT * FROM fresh")
        else:
            self._conn.execute(f"CREATE OR REPLACE TABLE {model} AS {sql}")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    fill(lake, table([sent(1), handled(1), handled(2, erasure_id=UUID(int=7)), handled(3, attempts=2)]))
    resolved = {"resolution": "discarded", "xid": 9}
    again = letter(2, id=message_id(9), failed_at=at(99))  # of a database that was restored
    letters = [letter(1), letter(2), letter(2, **resolved), letter(3), again]
    return fill(lake, table(letters, "dead_letters"), of="dead_letters")


@pytest.fixture
def project(lake: Lake) -> Project:
    project = Project(lake)
    project.build()
    return project


def only(row: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def volume(project: Project) -> list[tuple[Any, ...]]:
    return [
        only(row, "day", "service", "side", "outcome", "envelopes", "retries") for row in project.rows("daily_volume")
    ]


def test_models_of_the_dbt_project_compute_the_expected_rows(project: Project) -> None:
    assert volume(project) == [
        (date(2026, 1, 1), "billing", "incoming", "handled", 3, 2),
        (date(2026, 1, 1), "shop", "outgoing", "sent", 1, 0),
    ]
    assert [only(row, "fastest_ms", "slowest_ms") for row in project.rows("daily_volume")] == [(25, 25), (10, 10)]
    causes = project.rows("open_causes")
    assert [only(row, "service", "exception_type", "letters") for row in causes] == [("billing", "LookupError", 3)]


def test_incremental_model_of_the_dbt_project_includes_late_rows(project: Project, lake: Lake) -> None:
    later = at(86_400 + 7)
    fill(lake, table([handled(4), handled(5, sent_at=later, finished_at=later)]))
    project.build(is_incremental=True)
    assert volume(project) == [
        (date(2026, 1, 1), "billing", "incoming", "handled", 4, 2),
        (date(2026, 1, 1), "shop", "outgoing", "sent", 1, 0),
        (date(2026, 1, 2), "billing", "incoming", "handled", 1, 0),
    ]


def test_erased_messages_are_counted_by_the_dbt_project(project: Project) -> None:
    assert sorted(row["is_erased"] for row in project.rows("stg_history")) == [False, False, False, True]


def test_every_model_of_the_dbt_project_is_described() -> None:
    described = {each["name"] for each in yaml.safe_load((DBT / "models" / "schema.yml").read_text())["models"]}
    assert described == {file.stem for file in (DBT / "models").rglob("*.sql")}
    assert yaml.safe_load((DBT / "dbt_project.yml").read_text())["profile"] in yaml.safe_load(
        (DBT / "profiles.yml").read_text()
    )
