"""The same jobs elsewhere: on a cluster by spark-submit, and over Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from durable.embedded import Embedded
from tests.support import cluster
from tests.support.command import ROOT
from tests.support.history import add_history

pytestmark = pytest.mark.timeout(300)

SUBMITTED = """
import json, sys

import durable
from durable.pipeline.archive import archive
from durable.pipeline.lake import Lake
from durable.pipeline.origin import Origin
from durable.pipeline.session import spark_session
from durable.pipeline.source import consistent, register

url, lake = sys.argv[1:]
spark = spark_session()
done = archive(spark, Lake(lake), "history", Origin(url=url, schema="durable", service="shop"))
register(spark)
with consistent(url) as options:
    read = spark.read.format("durable").options(**options).load().count()

def where(batches):
    import durable, pyarrow
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"place": [durable.__file__]})

places = {row.place for row in spark.range(0, 2, 1, 2).mapInArrow(where, "place string").collect()}
print(json.dumps({"rows": done.rows, "read": read, "lake": Lake(lake).read(spark, "history").count(),
    "places": sorted(places), "master": spark.sparkContext.master}))
"""


def filled(url: str, count: int) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        add_history(conn, count)


def test_a_job_that_is_submitted_to_a_cluster_brings_durable_along(database_url: str, tmp_path: Path) -> None:
    filled(database_url, 500)
    script = tmp_path / "job.py"
    script.write_text(SUBMITTED)
    with cluster.standalone(tmp_path) as master:
        done = cluster.submit(script, database_url, str(tmp_path / "lake"), master=master, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["rows"], told["read"], told["lake"], told["master"]) == (500, 500, 500, master)
    assert all("durable.zip" in place for place in told["places"]), told["places"]


def test_commands_run_over_spark_connect(server: Embedded, database_url: str, tmp_path: Path) -> None:
    filled(database_url, 50)
    with cluster.connect_server(tmp_path) as remote:
        for command in ("archive", "verify"):
            arguments = ["pipeline", command, "--service", "shop", "--remote", remote, "--json"]
            environment = os.environ | {
                "PYTHONPATH": str(ROOT),
                "DURABLE_DATABASE_URL": database_url,
                "DURABLE_LAKE": str(tmp_path / "lake"),
                "JAVA_HOME": "/nowhere",
            }
            command_line = [sys.executable, "-m", "durable.cli", *arguments]
            done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=240)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["tables"][0]["rows"] == 50
