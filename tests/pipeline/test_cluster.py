"""The same jobs elsewhere: on a cluster by spark-submit, and over Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from durable.embedded import Embedded
from tests.support import cluster, every_command
from tests.support.history import add_history, add_old_day
from tests.support.publishing import Outbox
from tests.support.root import ROOT

pytestmark = pytest.mark.timeout(600)

PUBLISH = """
from durable.pipeline import publish
from durable.settings import load_settings

def publish_twice(spark, url):
    orders = spark.range(0, 300, 1, 3).selectExpr("id AS order_id")
    kind = {"message_type": "orders.order-placed", "source": "orders", "destination": "tcp://127.0.0.1:2301"}
    added = []
    for part in (orders.where("order_id < 200"), orders.where("order_id < 250")):
        done = publish.publish(publish.envelopes(part, key="order_id", **kind), load_settings(database_url=url))
        added.append(done.added)
    for _ in range(2):
        rows = publish.envelopes(orders, key="order_id", **kind)
        rows.write.format("durable").mode("append").option("url", url).save()
    return added
"""
ADDED, PUBLISHED = [200, 50], [*range(300)]

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
done = archive(lambda: spark, Lake(lake), "history", Origin(url=url, schema="durable", service="shop"), local_rows=0)
register(spark)
with consistent(url) as options:
    read = spark.read.format("durable").options(**options).load().count()

def where(batches):
    import durable, pyarrow
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"place": [durable.__file__]})

places = {row.place for row in spark.range(0, 2, 1, 2).mapInArrow(where, "place string").collect()}
print(json.dumps({"rows": done.rows, "read": read, "lake": Lake(lake).read(spark, "history").count(),
    "places": sorted(places), "master": spark.sparkContext.master, "added": publish_twice(spark, url)}))
"""

CONNECTED = """
import json, sys

from durable.pipeline.session import spark_session

url, remote = sys.argv[1:]
print(json.dumps(publish_twice(spark_session(remote=remote), url)))
"""


def filled(url: str, count: int) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        add_history(conn, count)


def test_job_submitted_to_a_cluster_brings_durable_along(database_url: str, tmp_path: Path) -> None:
    filled(database_url, 500)
    script = tmp_path / "job.py"
    script.write_text(PUBLISH + SUBMITTED)
    with cluster.standalone(tmp_path) as master:
        done = cluster.submit(script, database_url, str(tmp_path / "lake"), master=master, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["rows"], told["read"], told["lake"], told["master"]) == (500, 500, 500, master)
    assert all("durable.zip" in place for place in told["places"]), told["places"]
    assert (told["added"], Outbox(database_url).orders) == (ADDED, PUBLISHED)


REFUSED = {"bad condition": 2, "hostile condition": 2, "failing condition": 1}


ORPHANED = """
import json, os, signal, sys, time

from durable.errors import DurableError
from durable.pipeline import remote
from durable.pipeline.session import spark_session

server, process = sys.argv[1:]
remote.PATIENCE_SECONDS = 5
session = spark_session(remote=server)
session.range(3).count()
os.kill(int(process), signal.SIGKILL)
began = time.monotonic()
try:
    session.range(3).count()
except DurableError as error:
    print(json.dumps([str(error), time.monotonic() - began]))
"""


def is_java(process: Path, word: str) -> bool:
    """Tell whether this process, which may end meanwhile, is a JVM with this word in its command line."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return word.encode() in (process / "cmdline").read_bytes() and (process / "comm").read_text() == "java\n"
    return False


def test_killed_connect_server_is_named_soon(tmp_path: Path) -> None:
    """Also where the process that began the server lives on."""
    with cluster.connect_server(tmp_path) as remote:
        (jvm,) = [each.name for each in Path("/proc").glob("[0-9]*") if is_java(each, remote.rpartition(":")[2])]
        done = subprocess.run(
            [sys.executable, "-c", ORPHANED, remote, jvm],
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAVA_HOME": "/nowhere"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    said, seconds = json.loads(done.stdout)
    assert said.startswith(f"the Spark Connect server at {remote.removeprefix('sc://')} has not answered")
    assert seconds < 30


def test_every_command_and_publishing_run_over_spark_connect(
    server: Embedded, database_url: str, tmp_path: Path
) -> None:
    filled(database_url, 50)
    with psycopg.connect(database_url, autocommit=True) as conn:
        add_old_day(conn, 2 * every_command.OLD_DAYS, 20, first=501)
        conn.execute("UPDATE durable.envelope_history SET body = '{}', content_type = 'text', headers = '{}'")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAVA_HOME": "/nowhere"}

    def told(*arguments: str) -> Any:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    with cluster.connect_server(tmp_path) as remote:
        module = ("-m", "tests.support.every_command")
        ended = told(*module, database_url, str(tmp_path / "lake"), "--remote", remote)
        assert {name: each["code"] for name, each in ended.items()} == {name: REFUSED.get(name, 0) for name in ended}
        assert [each["error"].count("\n") for each in ended.values() if each["error"]] == [1, 1, 1]
        said = {name: each["said"] for name, each in ended.items()}
        assert [said[name]["tables"][0]["rows"] for name in ("archive", "verify")] == [70, 70]
        assert said["report"]["totals"]["total"] == 70
        assert (said["audit"]["counts"]["lost"], said["audit"]["counts"]["twice"]) == (0, 0)
        assert [said[name]["added"] for name in ("dry run", "replay", "replay again")] == [0, 70, 0]
        assert said["purge"]["rows"] == 20

        assert told("-c", PUBLISH + CONNECTED, database_url, remote) == ADDED
        assert Outbox(database_url).orders == PUBLISHED
