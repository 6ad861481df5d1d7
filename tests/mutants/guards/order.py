"""Guards of order: one message of a key at a time, in the order of the commits."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_MANY = "tests/integration/agents/test_many_addresses.py"
_PARKED = "tests/integration/agents/test_parked_rows.py::test_row_buried_by_the_database_parks_its_order"
_LOST = (
    "tests/integration/transports/rabbitmq/test_order.py::"
    "test_ordered_listener_stores_nothing_of_a_lost_consumer_after_newer_messages"
)

_PEERS = "tests/unit/transports/rabbitmq/test_storing.py::test_ordered_queue_of_several_peers_is_stored_in_its_order"

ROWS = (
    Mutant(
        "order",
        "a key is claimed while another node has it",
        "durable/storage/sql/ordering.py",
        before='        HAVING count(*) FILTER (WHERE owner_id <> 0) = 0"""',
        after='        """',
        killed_by=(
            "tests/integration/storage/test_order_claims.py::TestTurns::test_message_committed_late_waits_for_owned_ones_behind[guarded]",
        ),
    ),
    Mutant(
        "order",
        "a key is claimed past a message that waits for its retry",
        "durable/storage/sql/ordering.py",
        before='turn = "(free.seq IS NULL OR free.seq > first.seq)"',
        after='turn = "true"',
        killed_by=(
            "tests/integration/storage/test_order_claims.py::TestLooking::test_held_key_is_found_without_a_type",
        ),
    ),
    Mutant(
        "order",
        "a key is claimed without its lock",
        "durable/storage/sql/ordering.py",
        before="WHERE pg_try_advisory_xact_lock(:class_id, hashtext(found.scope || found.key))",
        after="WHERE :class_id IS NOT NULL",
        killed_by=(
            "tests/integration/storage/test_order_claims.py::TestTwoAtOnce::test_key_being_claimed_by_one_node_is_contested_for_another",
        ),
        hangs=True,
    ),
    Mutant(
        "order",
        "the order of sending is not that of storing",
        "durable/storage/sql/outbox.py",
        before="""\
FROM sent WHERE endpoint IS NULL
    ORDER BY position
""",
        after="""\
FROM sent WHERE endpoint IS NULL
    ORDER BY position DESC
""",
        killed_by=(
            "tests/integration/storage/test_order_claims.py::TestTurns::test_rows_of_one_statement_keep_its_order_for_any_ids",
        ),
    ),
    Mutant(
        "order",
        "a look for ordered rows has no end",
        "recovery/ordered_claims.py",
        before="            if waiting and time.monotonic() - began > LONGEST_STEP:\n",
        after="            if not lanes:\n",
        killed_by=("tests/integration/agents/test_order.py::test_every_address_has_its_turn_however_short_a_look_is",),
    ),
    Mutant(
        "order",
        "a look that was too short begins again",
        "recovery/ordered_claims.py",
        before="                if not self._walk(waiting[0]).pages:\n",
        after="                if not waiting:\n",
        killed_by=(f"{_MANY}::test_paused_addresses_keep_no_others_waiting_however_short_a_look_is",),
    ),
    Mutant(
        "order",
        "hints left over by a step are forgotten",
        "recovery/ordered_claims.py",
        before="        for turn in chain.from_iterable(batches):\n",
        after="        for turn in chain.from_iterable(batches) if contested else ():\n",
        killed_by=(f"{_MANY}::test_keys_hinted_at_many_addresses_are_all_claimed_however_short_a_step_is",),
    ),
    Mutant(
        "order",
        "keys of many addresses are claimed address by address",
        "recovery/ordered_claims.py",
        before="        while waiting and is_known and len(group) < self._batch_size:\n",
        after="        while waiting and is_known and len(group) < 1:\n",
        killed_by=(f"{_MANY}::test_keyed_messages_at_many_addresses_are_looked_for_and_claimed_together",),
    ),
    Mutant(
        "order",
        "messages of two peers leave the order of their queue",
        "transports/rabbitmq/listener.py",
        before="        if not self._held.is_ordered:\n            arrived.sort(",
        after="        if True:\n            arrived.sort(",
        killed_by=(_PEERS,),
    ),
    Mutant(
        "order",
        "a message overtakes one of another peer that could not be stored",
        "transports/rabbitmq/listener.py",
        before="            if self._held.is_ordered and not all_settled(outcomes):",
        after="            if False:",
        killed_by=(_PEERS,),
    ),
    Mutant(
        "order",
        "an ordered listener stores what it holds of a lost consumer",
        "transports/rabbitmq/listener.py",
        before="        if self._held.is_ordered:\n            self._drop_lost()\n",
        after="",
        killed_by=(_LOST,),
    ),
    Mutant(
        "order",
        "a batch of a lost consumer waits on to be stored",
        "transports/rabbitmq/listener.py",
        before="                unless_lost.reschedule(0)\n",
        after="                pass\n",
        killed_by=(_LOST,),
    ),
    Mutant(
        "order",
        "a deleted ordered queue is consumed again before its last consumer hears of it",
        "transports/rabbitmq/listener.py",
        before="pause = longest if lost.is_cancelled and self._held.is_ordered else first",
        after="pause = first",
        killed_by=(
            "tests/integration/transports/rabbitmq/test_order.py::test_deleted_ordered_queue_is_left_alone_for_longer",
        ),
    ),
    Mutant(
        "order",
        "a message buried because of its row parks nothing",
        "durable/storage/isolation.py",
        before="            hears(conn, schema, node, message, letter)\n",
        after="            pass\n",
        killed_by=(f"{_PARKED}[claim refused-key]", f"{_PARKED}[retry refused-handler]", f"{_PARKED}[unreadable-key]"),
    ),
    Mutant(
        "order",
        "a run goes on behind an unreadable row that parked its key",
        "durable/storage/ordering.py",
        before="        if self._table is INCOMING and len(leases) < len(found):\n",
        after="        if False:\n",
        killed_by=(f"{_PARKED}[unreadable in the middle of a run-key]",),
    ),
    Mutant(
        "order",
        "a deleted ordered queue is declared only when it is consumed again",
        "transports/rabbitmq/listener.py",
        before="                    if lost.is_cancelled:\n",
        after="                    if lost.is_cancelled and not self._held.is_ordered:\n",
        killed_by=(
            "tests/integration/transports/rabbitmq/test_order.py::"
            "test_deleted_ordered_queue_is_declared_and_bound_at_once",
        ),
    ),
)
