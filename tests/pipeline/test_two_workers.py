"""Jobs on a cluster of two workers, with speculation: tasks, a worker and the driver are killed; each row is once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from durable.pipeline import publish
from durable.settings import load_settings
from tests.failure.waiting import eventually
from tests.support import cluster
from tests.support.history import add_history
from tests.support.publishing import Outbox, messages, orders
from tests.support.root import ROOT

pytestmark = pytest.mark.timeout(600)

ORDERS = 1_000
AT_WORK = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'durable-pipeline' AND datname = current_database()"


def test_jobs_on_two_workers_are_done_once_when_tasks_a_worker_and_the_driver_are_killed(
    spark: SparkSession, make_database: Callable[[str], str], tmp_path: Path
) -> None:
    at_once, by_parts, cut_off = (make_database("shop") for _ in range(3))
    with psycopg.connect(at_once, autocommit=True) as conn:
        add_history(conn, 500)
    with (
        cluster.two_workers(tmp_path) as master,
        (tmp_path / "said").open("wb") as said,
    ):  # a pipe outlives a killed JVM
        command = [sys.executable, "-m", "tests.support.speculating", master, at_once, by_parts, cut_off, str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        job = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=said, timeout=400)
    assert job.returncode == -signal.SIGKILL, (tmp_path / "said").read_text()[-5_000:]
    told = json.loads(job.stdout.splitlines()[-1])
    assert told["archived"] == 500

    for mode, url in (("atomic", at_once), ("fast", by_parts)):
        assert {"died", "took its worker"} < set(told[mode])
        assert sum(each.endswith("done") for each in told[mode]) >= 2, "two attempts of one task have done all of it"
        assert Outbox(url).orders == [*range(ORDERS)], mode
    assert Outbox(at_once).batches == [(ORDERS, ORDERS)]

    left = Outbox(cut_off)
    asyncio.run(eventually(lambda: not left.rows(AT_WORK)))
    assert (left.orders, left.batches) == ([], [])
    assert left.leftovers, "they are swept when they are old"
    publish.publish(messages(orders(spark, ORDERS)), load_settings(database_url=cut_off))
    assert left.orders == [*range(ORDERS)]
