"""The modules whose mutants are tried, and the tests that may kill them.

They are the modules that the guarantees stand on: each decides what is stored, sent, handled, deleted or taken over.
Left out are the modules around them that report, declare or connect (metrics, tables, migrations, TLS, addresses), the
actions of operators (dead letters, scheduled messages), publishing in bulk, and calls.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Room(NamedTuple):
    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    """Files and folders of tests; the simulation may kill a mutant of any room."""


_BUS: Final = "tests/contract/bus"
_AGENTS: Final = (
    "tests/integration/agents/test_answers.py",
    "tests/integration/agents/test_circuits.py",
    "tests/integration/agents/test_handling.py",
    "tests/integration/agents/test_handling_faults.py",
    "tests/integration/agents/test_memory.py",
    "tests/integration/agents/test_order.py",
    "tests/integration/agents/test_pauses.py",
    "tests/integration/agents/test_receiving.py",
    "tests/integration/agents/test_sending.py",
    "tests/integration/agents/test_taken_ids.py",
)
_TCP: Final = (
    "tests/integration/transports/tcp/test_bad_input.py",
    "tests/integration/transports/tcp/test_identity.py",
    "tests/integration/transports/tcp/test_relays.py",
    "tests/integration/transports/tcp/test_unix_sockets.py",
)

ROOMS: Final = (
    Room(
        "outbox",
        (
            "durable/outbox/envelope_factory.py",
            "durable/outbox/outbox.py",
            "durable/outbox/pending.py",
            "durable/outbox/sessions.py",
            "durable/outbox/transactions.py",
            "durable/outbox/unit_of_work.py",
        ),
        ("tests/unit/outbox", _BUS, "tests/integration/outbox"),
    ),
    Room(
        "sending",
        (
            "durable/agents/buffer.py",
            "durable/agents/deletions.py",
            "durable/agents/latch.py",
            "durable/agents/pace.py",
            "durable/agents/sending.py",
        ),
        ("tests/unit/agents", _BUS, *_AGENTS),
    ),
    Room(
        "receiving",
        ("durable/agents/arrivals.py", "durable/agents/intake.py", "durable/agents/receiving.py"),
        (_BUS, "tests/contract/test_transports_tcp.py", *_AGENTS),
    ),
    Room(
        "handling",
        (
            "durable/agents/attempts.py",
            "durable/agents/delivery.py",
            "durable/agents/fair_queue.py",
            "durable/agents/fence.py",
            "durable/agents/group_size.py",
            "durable/agents/handler_circuit.py",
            "durable/agents/handling.py",
            "durable/agents/settling.py",
        ),
        (
            "tests/unit/agents",
            _BUS,
            *_AGENTS,
            "tests/integration/agents/test_handling_groups.py",
            "tests/integration/encryption/test_missing_keys.py",
        ),
    ),
    Room(
        "storage",
        (
            "durable/storage/answers.py",
            "durable/storage/circuits.py",
            "durable/storage/in_flight.py",
            "durable/storage/inbox.py",
            "durable/storage/isolation.py",
            "durable/storage/leases.py",
            "durable/storage/ordering.py",
            "durable/storage/outages.py",
            "durable/storage/outbox.py",
            "durable/storage/receipts.py",
            "durable/storage/rows.py",
            "durable/storage/schedules.py",
            "durable/storage/trials.py",
        ),
        (
            "tests/unit/storage",
            _BUS,
            *_AGENTS,
            "tests/integration/outbox",
            "tests/integration/storage/functions",
            "tests/integration/storage/test_actions.py",
            "tests/integration/storage/test_business_keys.py",
            "tests/integration/storage/test_circuit_writers.py",
            "tests/integration/storage/test_dated_ids.py",
            "tests/integration/storage/test_odd_rows.py",
            "tests/integration/storage/test_order_claims.py",
            "tests/integration/storage/test_outages.py",
        ),
    ),
    Room(
        "recovery",
        (
            "recovery/agent.py",
            "recovery/dormant_nodes.py",
            "recovery/forgotten_rows.py",
            "recovery/former_memberships.py",
            "recovery/incoming_claims.py",
            "recovery/membership.py",
            "recovery/ordered_claims.py",
            "recovery/outgoing_claims.py",
            "recovery/policy.py",
            "recovery/recurring_schedules.py",
            "recovery/due_rows.py",
            "recovery/fair_claims.py",
        ),
        ("tests/unit/recovery", _BUS, "tests/integration/recovery", "tests/integration/application/test_schedules.py"),
    ),
    Room(
        "wire",
        (
            "transports/frames.py",
            "transports/gate.py",
            "transports/tcp/client_side.py",
            "transports/tcp/connecting.py",
            "transports/tcp/pace.py",
            "transports/tcp/sender.py",
            "transports/tcp/server_side.py",
            "transports/tcp/stream.py",
            "transports/wire.py",
        ),
        (
            "tests/unit/transports/tcp",
            "tests/unit/transports/test_wire.py",
            "tests/contract/test_transports_tcp.py",
            "tests/integration/calls/test_calls.py",
            *_TCP,
        ),
    ),
)


def files_of(rooms: tuple[Room, ...] = ROOMS) -> dict[str, Room]:
    return {file: room for room in rooms for file in room.files}
