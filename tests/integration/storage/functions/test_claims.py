"""A claim takes the oldest rows that are due and nobody's, past circuits and other claims."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable.envelope import LeasedEnvelope, NodeId
from durable.errors import InvalidMessage
from durable.storage import circuits, inbox, leases, outbox, trials
from durable.storage.circuits import CircuitKind
from durable.storage.sql.recovery import OUTGOING
from tests.failure.leftovers import MESSAGE_TYPE, SCHEMA, envelope
from tests.integration.storage.functions.stores import PEER, A, B, Store, orders, outgoing


async def test_oldest_rows_are_claimed_first_and_at_most_the_requested_number(store: Store) -> None:
    for number in range(5):
        await store.send(outgoing(number))
        await store.receive(envelope(number))

    assert orders(await store.claim_outgoing(batch_size=3)) == [0, 1, 2]
    assert orders(await store.claim_outgoing(batch_size=3)) == [3, 4]
    assert orders(await store.claim_incoming(batch_size=3)) == [0, 1, 2]
    assert orders(await store.claim_incoming(batch_size=3)) == [3, 4]


async def test_claim_takes_only_unowned_due_and_unexpired_rows(store: Store) -> None:
    now = datetime.now(UTC)
    await store.send(
        outgoing(1),
        outgoing(2, execution_time=now - timedelta(seconds=1)),
        outgoing(3, deliver_by=now - timedelta(seconds=1)),
        outgoing(4, deliver_by=now + timedelta(days=1)),
        msgspec.structs.replace(outgoing(5), destination="tcp://127.0.0.1:2302"),
    )
    await store.send(outgoing(6), owner=B)

    assert orders(await store.claim_outgoing()) == [1, 4]
    assert [lease.epoch for lease in await store.claim_outgoing()] == []


async def test_only_messages_of_the_type_are_claimed(store: Store) -> None:
    await store.receive(envelope(1), msgspec.structs.replace(envelope(2), message_type="another.type"))

    assert orders(await store.claim_incoming(of="another.type")) == [2]
    assert orders(await store.claim_incoming()) == [1]


async def test_claim_takes_nothing_for_open_circuits(store: Store) -> None:
    await store.send(outgoing(1))
    await store.receive(envelope(2))
    opened = ((CircuitKind.DESTINATION, PEER), (CircuitKind.HANDLER, MESSAGE_TYPE))
    for kind, key in opened:
        await store.run(circuits.open_circuit, kind, key, reason="a test", actor="node 1")
    assert (await store.claim_outgoing(), await store.claim_incoming()) == ([], [])

    for kind, key in opened:
        await store.run(circuits.pause, kind, key, reason="a test", actor="ops", duration=None)
    assert (await store.claim_outgoing(), await store.claim_incoming()) == ([], []), "without an end"

    for kind, key in opened:
        await store.run(circuits.pause, kind, key, reason="a test", actor="ops", duration=timedelta(seconds=-1))
    assert (orders(await store.claim_outgoing()), orders(await store.claim_incoming())) == ([1], [2])


async def test_ended_circuit_can_be_opened_again_and_is_closed_by_maintenance(store: Store) -> None:
    ended = {"reason": "ended", "actor": "ops", "duration": timedelta(seconds=-1)}
    for kind in (CircuitKind.DESTINATION, CircuitKind.HANDLER):
        await store.run(circuits.pause, kind, PEER, **ended)
    assert await store.run(circuits.read) == []

    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="again", actor="node 1")
    assert [circuit.reason for circuit in await store.run(circuits.read)] == ["again"]
    await store.run(circuits.close_ended)
    assert await store.rows("SELECT kind FROM durable.circuits") == [("destination",)]


async def test_several_targets_are_paused_together_or_not_at_all(store: Store) -> None:
    paused = {"reason": "moved", "actor": "ops", "duration": None}
    named = [(CircuitKind.DESTINATION, key) for key in ("tcp://b.example:1", "tcp://c.example:1")]
    with pytest.raises((DBAPIError, InvalidMessage)):
        await store.run(circuits.pause_each, [*named, (CircuitKind.DESTINATION, "tcp://nul.example\0")], **paused)
    assert await store.run(circuits.read) == []

    await store.run(circuits.pause_each, named, **paused)
    assert [circuit.key for circuit in await store.run(circuits.read)] == [key for _, key in named]
    assert (await store.run(circuits.resume_each, named)).was_open
    assert not (await store.run(circuits.resume_each, named)).was_open


async def test_success_ends_no_pause(store: Store) -> None:
    paused = {"reason": "stocktaking", "actor": "ops", "duration": None}
    await store.run(circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1")
    await store.run(circuits.pause, CircuitKind.HANDLER, MESSAGE_TYPE, **paused)
    assert not await store.run(circuits.close_circuit, CircuitKind.HANDLER, MESSAGE_TYPE)
    assert [circuit.reason for circuit in await store.run(circuits.read)] == ["stocktaking"]

    await store.run(circuits.resume, CircuitKind.HANDLER, MESSAGE_TYPE)
    await store.run(circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1")
    assert await store.run(circuits.close_circuit, CircuitKind.HANDLER, MESSAGE_TYPE)


async def test_failures_do_not_replace_a_pause(store: Store) -> None:
    paused = {"reason": "stocktaking", "actor": "ops", "duration": timedelta(hours=1)}
    await store.run(circuits.pause, CircuitKind.HANDLER, MESSAGE_TYPE, **paused)
    await store.run(circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1")
    assert [(circuit.reason, circuit.probing) for circuit in await store.run(circuits.read)] == [("stocktaking", False)]


async def _stop(store: Store, duration: timedelta) -> None:
    await store.run(
        circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1", duration=duration
    )


async def _claim_trial(store: Store, node: NodeId = A) -> LeasedEnvelope | None:
    trial: trials.Trial = await store.run(
        trials.claim_trial,
        message_type=MESSAGE_TYPE,
        handler=MESSAGE_TYPE,
        node=node,
        lease=timedelta(minutes=1),
    )
    return trial.lease


async def test_ended_circuit_is_tried_by_one_node_with_one_message(store: Store) -> None:
    await store.receive(*(envelope(number) for number in range(3)))
    await _stop(store, timedelta(hours=1))
    assert await _claim_trial(store) is None

    await store.rows("UPDATE durable.circuits SET until = now() RETURNING key")
    assert await store.claim_incoming() == []  # still open: only trials
    trial = await _claim_trial(store)
    assert trial is not None
    assert (orders([trial]), trial.epoch) == ([0], 1)
    assert await _claim_trial(store, B) is None

    await store.rows("UPDATE durable.circuits SET until = now() RETURNING key")  # the node that tried it has died
    trial = await _claim_trial(store, B)
    assert trial is not None
    assert orders([trial]) == [1]


async def test_circuit_without_a_message_for_its_trial_stays_due(store: Store) -> None:
    await _stop(store, timedelta(seconds=-1))
    assert await _claim_trial(store) is None
    await store.receive(envelope(1))
    assert await _claim_trial(store) is not None


@pytest.mark.parametrize(
    ("open_for", "next_try"),
    [(timedelta(0), 10), (timedelta(seconds=20), 20), (timedelta(minutes=2), 120), (timedelta(hours=1), 300)],
)
async def test_failed_trial_doubles_the_time_to_the_next(store: Store, open_for: timedelta, next_try: int) -> None:
    await _stop(store, timedelta(seconds=-1))
    await store.rows("UPDATE durable.circuits SET since = now() - CAST(:t AS interval) RETURNING key", t=open_for)
    bounds = {"shortest": timedelta(seconds=10), "longest": timedelta(minutes=5)}
    await store.run(circuits.put_off_probe, MESSAGE_TYPE, reason="still down", **bounds)
    ((reason, seconds),) = await store.rows(
        "SELECT reason, CAST(extract(epoch FROM until - clock_timestamp()) AS float) FROM durable.circuits"
    )
    assert reason == "still down"
    assert next_try - 5 < seconds <= next_try + 5


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
async def test_concurrent_claims_of_two_nodes_take_different_rows_without_waiting(store: Store, side: str) -> None:
    await store.send(*(outgoing(number) for number in range(10)))
    await store.receive(*(envelope(number) for number in range(10)))

    def claim(conn: Connection, node: NodeId) -> list[LeasedEnvelope]:
        if side == "outgoing":
            return outbox.claim(conn, SCHEMA, {PEER: 6}, node=node)
        return inbox.claim(conn, SCHEMA, message_type=MESSAGE_TYPE, batch_size=6, node=node)

    async with store.database.engine.begin() as first, store.database.engine.begin() as second:
        mine = await first.run_sync(claim, A)
        async with asyncio.timeout(30):
            others = await second.run_sync(claim, B)

    assert (orders(mine), orders(others)) == ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9])


async def test_every_claim_raises_the_epoch(store: Store) -> None:
    await store.send(outgoing())
    for epoch in (1, 3, 5):
        (lease,) = await store.claim_outgoing()
        assert lease.epoch == epoch
        assert await store.run(leases.release, OUTGOING, A, [lease.key]) == 1
