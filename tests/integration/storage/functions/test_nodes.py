"""Nodes, their locks, and the circuits that they share."""

from __future__ import annotations

import json
from datetime import timedelta

import psycopg
from sqlalchemy import Connection

from durable.storage import circuits, locks, nodes
from durable.storage.circuits import CircuitKind
from durable.storage.locks import Job
from durable.storage.sql import housekeeping
from tests.failure.leftovers import SCHEMA
from tests.failure.waiting import eventually
from tests.integration.storage.functions.stores import PEER, Store


async def test_nodes_are_read_with_the_age_of_their_heartbeat(store: Store) -> None:
    params = {"service": "billing", "description": "host:1", "version": "1", "capabilities": '{"message_types": ["a"]}'}

    def register(conn: Connection, schema: str) -> None:
        for _ in range(2):
            conn.execute(housekeeping.REGISTER_NODE.within(SCHEMA), params)

    await store.database.transaction(register)
    first, second = await store.run(nodes.read)
    assert second.node_id > first.node_id
    assert (first.service, first.description, json.loads(first.capabilities)) == (
        "billing", "host:1", {"message_types": ["a"]},
    )  # fmt: skip
    assert timedelta(0) <= first.heartbeat_age < timedelta(minutes=1)
    await store.run(nodes.remove, first.node_id)
    assert [node.node_id for node in await store.run(nodes.read)] == [second.node_id]


async def test_locks_of_nodes_are_read_for_this_schema_and_database_alone(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        lock = "SELECT pg_advisory_lock(%s, %s)"
        conn.execute(lock, (locks.nodes_class(SCHEMA), 17))
        conn.execute(lock, (locks.nodes_class("another"), 18))
        conn.execute(lock, (locks.jobs_class(SCHEMA), 19))
        conn.execute("SELECT pg_advisory_lock(20)")
        assert await store.run(nodes.locked) == {17}
    await eventually(lambda: store.run(_nothing_locked))


def _nothing_locked(conn: Connection, schema: str) -> bool:
    return not nodes.locked(conn, schema)


async def test_lock_of_a_job_is_held_by_one_transaction_at_a_time(store: Store) -> None:
    def try_lock(conn: Connection, job: Job) -> bool:
        return locks.try_lock(conn, SCHEMA, job)

    async with store.database.engine.begin() as first, store.database.engine.begin() as second:
        assert await first.run_sync(try_lock, Job.SWEEP)
        assert not await second.run_sync(try_lock, Job.SWEEP)
        assert await second.run_sync(try_lock, Job.PARTITIONS)
    assert await store.run(locks.try_lock, Job.SWEEP)


def test_lock_classes_never_change() -> None:
    """Nodes of two versions, and the functions in the database, must mean the same lock."""
    assert (locks.nodes_class("durable"), locks.jobs_class("durable")) == (1509190759, 1708623273)
    assert [int(job) for job in Job] == [1, 2, 3, 4, 5, 6]


async def test_start_of_the_server_is_read_and_stays(store: Store) -> None:
    first, second = await store.run(nodes.server_times), await store.run(nodes.server_times)
    assert first.started_at == second.started_at
    assert first.started_at < first.now < second.now < first.started_at + timedelta(days=1)


async def test_open_circuit_keeps_its_reason_and_its_start(store: Store) -> None:
    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="first", actor="node 1")
    (opened,) = await store.run(circuits.read)
    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="second", actor="node 2")
    await store.run(
        circuits.open_circuit, CircuitKind.HANDLER, PEER, reason="paused", actor="ops", duration=timedelta(hours=1)
    )

    destination, handler = await store.run(circuits.read)
    assert destination == opened
    assert (opened.kind, opened.key, opened.reason, opened.until, opened.actor) == (
        "destination", PEER, "first", None, "node 1",
    )  # fmt: skip
    assert timedelta(minutes=59) < handler.until - handler.since <= timedelta(hours=1)
    await store.run(circuits.close_circuit, CircuitKind.DESTINATION, PEER)
    assert [circuit.kind for circuit in await store.run(circuits.read)] == ["handler"]
