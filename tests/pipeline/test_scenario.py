"""Two services and two lakes through dump, restore, backup and compaction: an audit finds only what was lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from pyspark.sql import SparkSession

from durable.storage import migrator
from tests.support.clusters import Cluster, Clusters, clusters
from tests.support.command import Agent

ADDRESS = "tcp://billing:2302"
ROWS = """
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, sent_at,
    received_at, finished_at, attempts, interruptions, node_id, error)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid), %(side)s, %(outcome)s, %(address)s, 'orders.order-placed', 'shop',
    CAST(lpad(to_hex(n), 32, '0') AS uuid), now() - interval '1 h', now() - interval '1 h', now() - interval '50 min',
    1, 0, 7, NULL
FROM unnest(CAST(%(numbers)s AS bigint[])) AS n
"""


class Service:
    """One service: its database, which may be replaced, and its lake."""

    def __init__(self, name: str, cluster: Cluster, folder: Path, agent: Agent) -> None:
        self.name, self.cluster, self.agent = name, cluster, agent
        self.lake = folder / f"lake of {name}"
        cluster.execute(f"CREATE DATABASE {name}")
        migrator.upgrade(self.url.replace("postgresql://", "postgresql+psycopg://"), "durable")

    @property
    def url(self) -> str:
        return self.cluster.uri(self.name)

    def write(self, numbers: range, *, but: frozenset[int] = frozenset()) -> None:
        """A transaction for every ten messages that were sent, or handled, by this service."""
        outgoing = self.name == "shop"
        kind = {"side": "outgoing", "outcome": "sent"} if outgoing else {"side": "incoming", "outcome": "handled"}
        address = ADDRESS if outgoing else "billing"
        with psycopg.connect(self.url, autocommit=True) as conn:
            for first in range(numbers.start, numbers.stop, 10):
                ten = [number for number in range(first, min(first + 10, numbers.stop)) if number not in but]
                conn.execute(ROWS, kind | {"address": address, "numbers": ten})

    def pipeline(self, command: str, *options: str, code: int = 0) -> Any:
        whose = [] if command in ("compact", "vacuum") else ["--database", self.url, "--service", self.name]
        ended = self.agent("pipeline", command, *whose, "--lake", str(self.lake), *options, "--json")
        assert ended.code == code, ended.err
        return json.loads(ended.out)

    def archived(self, *options: str) -> int:
        return int(self._history("archive", *options)["rows"])

    def is_whole(self, code: int = 0) -> bool:
        return bool(self._history("verify", code=code)["whole"])

    def _history(self, command: str, *options: str, code: int = 0) -> Any:
        told = self.pipeline(command, *options, code=code)
        return next(table for table in told["tables"] if table["table"] == "history")


@pytest.fixture(scope="module")
def made() -> Iterator[Clusters]:
    with clusters() as found:
        yield found


def test_audit_after_dump_restore_backup_and_compaction_finds_only_the_lost(
    made: Clusters, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    shop = Service("shop", made.new(), tmp_path, agent)
    billing = Service("billing", made.new(), tmp_path, agent)

    for first in range(1, 301, 50):  # small runs leave small files
        shop.write(range(first, first + 50))
        billing.write(range(first, first + 50))
        assert (shop.archived(), billing.archived()) == (50, 50)
    for service in (shop, billing):
        service.pipeline("compact")

    backup = tmp_path / "backup"
    shutil.copytree(shop.lake, backup)
    shop.write(range(301, 401))
    billing.write(range(301, 401), but=frozenset({350}))
    assert (shop.archived(), billing.archived()) == (100, 99)

    shutil.rmtree(shop.lake)
    backup.rename(shop.lake)
    assert not shop.is_whole(code=1)
    assert shop.archived() == 100, "the restored lake is filled again"

    dead, billing.cluster = billing.cluster, made.new()
    dead.copy_dump("billing", billing.cluster)
    billing.write(range(401, 451))
    assert "is not the database that was archived" in billing.pipeline("archive", code=2)["error"]
    assert billing.archived("--successor") == 50, "rows that were archived before are known"
    shop.write(range(401, 451))
    assert shop.archived() == 50

    for service in (shop, billing):
        service.pipeline("compact")
        service.pipeline("vacuum")
        assert service.is_whole()
    ended = agent("pipeline", "audit", "--sender", str(shop.lake), "--receiver", str(billing.lake), "--json")
    assert ended.code == 1, ended.err
    found = json.loads(ended.out)
    assert {name: count for name, count in found["counts"].items() if count} == {"lost": 1}
    assert [row["id"] for row in found["examples"]] == [str(UUID(int=350))]
