"""The failed attempts of a message are kept with it."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import msgspec

from durable import Bus, Retry
from durable.envelope import ANY_NODE
from durable.storage import dead_letters, inbox
from durable.storage.inbox import Arrival
from durable.storage.rows import KEPT_ATTEMPTS, Tried
from durable.testing import eventually
from tests.integration.dead_letters.on_postgres.storing import QUICK, Placed, claim, failure, given, store, stored
from tests.support import letters
from tests.support.letters import ENDPOINT, NODE, envelope
from tests.support.tables import Tables


class TestAttempts:
    async def test_a_letter_has_every_attempt_with_its_traceback(self, tables: Tables) -> None:
        bus = Bus(ENDPOINT, tables.url, **QUICK)
        errors = iter([KeyError("first"), LookupError("second"), ValueError("third")])

        @bus.handles(Placed, retry=Retry(immediate=1, delays=[0.01]))
        async def handle(placed: Placed) -> None:
            raise next(errors)

        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(1))
            await eventually(lambda: tables.count("dead_letters"), within=30)
        letter, node_id = tables.one("SELECT letter_id, node_id FROM durable.dead_letters")
        attempts = stored(tables, dead_letters.attempts, letter)

        assert [(each.number, each.exception_type, each.reason, each.node_id) for each in attempts] == [
            (1, "KeyError", "'first'", node_id),
            (2, "LookupError", "second", node_id),
            (3, "ValueError", "third", node_id),
        ]
        assert [each.failed_at for each in attempts] == sorted(each.failed_at for each in attempts)
        assert all("raise next(errors)" in each.traceback for each in attempts)

    async def test_undecodable_body_and_textless_error_are_recorded_as_attempts(self, tables: Tables) -> None:
        bus = Bus(ENDPOINT, tables.url, check_pending=0, **QUICK)

        class Speechless(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        @bus.handles(Placed, retry=Retry.never())
        async def handle(placed: Placed) -> None:
            raise Speechless

        undecodable = msgspec.structs.replace(envelope(1), body=b'{"number": "many"}')
        stored(tables, inbox.store, [Arrival(ENDPOINT, each, ANY_NODE) for each in (undecodable, envelope(2))])
        async with bus:
            await eventually(lambda: tables.count("dead_letters") == 2, within=30)

        rows = tables.rows(
            "SELECT a.exception_type, a.reason LIKE '%%no Placed%%', a.reason LIKE '%%text cannot be made' "
            "FROM durable.failed_attempts a JOIN durable.dead_letters l USING (letter_id) WHERE number = l.attempts"
        )
        assert sorted(row[1:] for row in rows) == [(False, True), (True, False)]

    async def test_attempt_of_a_handled_suspect_is_no_failed_one(self, tables: Tables) -> None:
        bus = Bus(ENDPOINT, tables.url, **QUICK)
        errors = [KeyError("first")]

        @bus.handles(Placed, retry=Retry(immediate=2, delays=[]))
        async def handle(placed: Placed) -> None:
            if placed.number == 2 and errors:
                raise errors.pop()

        given(tables, store, [envelope(1), envelope(2)])
        tables.execute("UPDATE durable.incoming_envelopes SET interruptions = 2, attempts = 1")
        async with bus:
            await eventually(lambda: tables.count("envelope_history") == 2, within=30)
        assert sorted(tables.rows("SELECT outcome, attempts FROM durable.envelope_history")) == [
            ("handled", 1),
            ("handled", 2),
        ]

    def test_attempts_are_written_in_the_transaction_of_their_settlement(self, tables: Tables) -> None:
        given(tables, store, [envelope(1)])
        (lease,) = claim(tables)
        retry = partial(stored, tables, inbox.retry_later, NODE, lease, delay=timedelta(0))
        assert retry(Tried(2, [failure(1), failure(2)]))
        together = "SELECT DISTINCT a.xmin = e.xmin FROM durable.failed_attempts a JOIN durable.{} e USING ({})"
        assert tables.rows(together.format("incoming_envelopes", "id")) == [True]

        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
        (lease,) = claim(tables)
        assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, [failure(3)]))

        assert tables.rows(together.format("dead_letters", "letter_id")) == [True]
        assert tables.rows("SELECT number FROM durable.failed_attempts ORDER BY attempt_id") == [1, 2, 3]

    def test_node_without_the_lease_writes_no_attempts(self, tables: Tables) -> None:
        given(tables, store, [envelope(1)])
        (late,) = claim(tables)
        tables.execute("UPDATE durable.incoming_envelopes SET epoch = epoch + 1")

        assert not stored(tables, inbox.retry_later, NODE, late, Tried(1, [failure(1)]), delay=timedelta(0))
        assert not stored(tables, inbox.dead_letter, NODE, late, letters.LETTER, Tried(1, [failure(1)]))
        assert (tables.count("failed_attempts"), tables.count("dead_letters")) == (0, 0)

    def test_newest_attempts_alone_are_kept(self, tables: Tables) -> None:
        given(tables, store, [envelope(1), envelope(2)])
        first, neighbour = claim(tables)
        stored(tables, inbox.retry_later, NODE, neighbour, Tried(1, [failure(1)]), delay=timedelta(0))
        for number in range(1, 51):
            tables.execute("UPDATE durable.incoming_envelopes SET owner_id = 7, epoch = 0, execution_time = NULL")
            lease = msgspec.structs.replace(first, epoch=0)
            failures = [failure(2 * number - 1), failure(2 * number)]
            assert stored(tables, inbox.retry_later, NODE, lease, Tried(1, failures), delay=timedelta(0))

        kept = tables.rows("SELECT number FROM durable.failed_attempts WHERE id = %s ORDER BY 1", first.envelope.id)
        assert kept == list(range(101 - KEPT_ATTEMPTS, 101))
        assert tables.count("failed_attempts") == KEPT_ATTEMPTS + 1

    def test_setting_bounds_the_attempts_kept(self, tables: Tables) -> None:
        given(tables, store, [envelope(1)])
        (lease,) = claim(tables)
        failures = [failure(number) for number in range(1, 6)]
        assert stored(tables, inbox.retry_later, NODE, lease, Tried(1, failures[:4], kept=2), delay=timedelta(0))
        assert tables.rows("SELECT number FROM durable.failed_attempts ORDER BY 1") == [3, 4]

        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
        (lease,) = claim(tables)
        assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, failures[2:], kept=2))
        assert tables.rows("SELECT number FROM durable.failed_attempts ORDER BY attempt_id DESC LIMIT 2") == [5, 4]

    def test_attempts_of_a_handled_message_are_purged_with_the_history(self, tables: Tables) -> None:
        given(tables, store, [envelope(1)])
        (lease,) = claim(tables)
        stored(tables, inbox.retry_later, NODE, lease, Tried(1, [failure(1)]), delay=timedelta(0))
        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
        assert stored(tables, inbox.finish_handled, NODE, claim(tables)) == 1

        purge = partial(stored, tables, dead_letters.purge_attempts)
        assert (purge(keep=timedelta(hours=1)), tables.count("failed_attempts")) == (0, 1)
        assert (purge(keep=timedelta(0)), tables.count("failed_attempts")) == (1, 0)
